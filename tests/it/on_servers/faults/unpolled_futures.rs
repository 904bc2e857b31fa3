//! Callers whose futures are polled otherwise than by their own waking. Some aren't polled any more, nor dropped, as
//! the other arm of a `select!` may leave one: they delay no other caller. Some are polled all the time.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake};
use std::thread::Thread;

use tollgate_testing::polling::block_until;

use super::*;

/// It waits for a connection that another caller makes, in vain.
#[tokio::test]
async fn an_unpolled_caller_does_not_stop_others_from_connecting() {
    let server = Server::start();
    let redis = redis(&server.tcp_url());
    let limiter = Limiter::builder(redis.clone()).deadline(Duration::from_millis(300)).build();
    let rule = rule("gcra 1000/1d", OnError::Closed);
    server.signal("-STOP");
    let first = {
        let (limiter, rule) = (limiter.clone(), rule.clone());
        tokio::spawn(async move { limiter.peek(&rule, "key").await })
    };
    tokio::time::sleep(Duration::from_millis(50)).await;
    let mut unpolled = Box::pin(limiter.peek(&rule, "key"));
    assert!(is_pending(unpolled.as_mut()).await);
    first.await.expect("a caller").expect_err("stopped");
    // An attempt to connect ends after 5 s at the latest.
    tokio::time::sleep(Duration::from_millis(5500)).await;
    server.signal("-CONT");
    answered_again(&limiter, &rule, "key").await;
    drop(unpolled);
}

/// It is the one that sees whether Redis answers again.
#[tokio::test]
async fn an_unpolled_probe_does_not_stop_others_from_probing() {
    let mut server = Server::start();
    let redis = redis(&server.tcp_url());
    let limiter = Limiter::builder(redis.clone()).deadline(PATIENCE).build();
    let rule = rule("gcra 1000/1d", OnError::Closed);
    opened(&mut server, &redis, &limiter, &rule).await;
    let mut look = Box::pin(limiter.acquire(&rule, "key"));
    assert!(is_pending(look.as_mut()).await);
    assert_eq!(redis.breaker(), BreakerState::Probing);
    answered_again(&limiter, &rule, "key").await;
    drop(look);
}

/// A caller polled just as its batch ends gets its answer, not the end of the batch.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_polled_in_a_busy_loop_gets_its_answer() {
    let server = Server::start();
    let limiter = Limiter::builder(redis(&server.tcp_url())).deadline(PATIENCE).build();
    let rule = rule("gcra 1000000/1d", OnError::Closed);
    let mut callers = tokio::task::JoinSet::new();
    for _ in 0..24 {
        let (limiter, rule) = (limiter.clone(), rule.clone());
        callers.spawn(async move {
            for _ in 0..1000 {
                let decision = once_sent(|| async {
                    let mut call = pin!(limiter.acquire(&rule, "key"));
                    loop {
                        tokio::select! {
                            answer = &mut call => break answer,
                            () = tokio::task::yield_now() => {}
                        }
                    }
                });
                assert!(decision.await.allowed);
            }
        });
    }
    callers.join_all().await;
}

struct Unparks(Thread);

impl Wake for Unparks {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Polls it without a runtime.
fn on_this_thread<T>(future: impl Future<Output = T>) -> T {
    let (mut future, began) = (pin!(future), std::time::Instant::now());
    let waker = Arc::new(Unparks(std::thread::current())).into();
    loop {
        assert!(began.elapsed() < PATIENCE, "it isn't woken");
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(answer) => return answer,
            Poll::Pending => std::thread::park_timeout(PATIENCE),
        }
    }
}

/// Futures that were begun on a runtime go on wherever they are polled.
#[test]
fn a_caller_polled_outside_a_runtime_is_answered_or_ends_by_its_deadline() {
    let server = Server::start();
    let runtime = runtime();
    let limiter = Limiter::builder(redis(&server.tcp_url())).deadline(PATIENCE).build();
    let rule = rule("gcra 1000/1d", OnError::Closed);
    runtime.block_on(answered_again(&limiter, &rule, "key"));
    for frozen in [false, true] {
        if frozen {
            server.signal("-STOP");
        }
        let deadline = if frozen { Duration::from_millis(300) } else { PATIENCE };
        let (_alone, begun) = runtime.block_on(async {
            let mut unanswered = Vec::new();
            while unanswered.len() < 2 {
                let mut call = Box::pin(limiter.acquire(&rule, Request::new("key").deadline(deadline)));
                // Its answer may come while it is polled for the first time.
                if is_pending(call.as_mut()).await {
                    unanswered.push(call);
                }
            }
            (unanswered.remove(0), unanswered.remove(0))
        });
        let answer = on_this_thread(begun);
        assert_eq!(answer.is_ok(), !frozen, "{answer:?}");
    }
    server.signal("-CONT");
}

/// Also if Redis refuses the call at first, so that it is retried after a wait.
#[test]
fn a_caller_polled_outside_a_runtime_retries() {
    let server = Server::with(&["--busy-reply-threshold", "20"]);
    let runtime = runtime();
    let limiter = Limiter::builder(redis(&server.tcp_url())).deadline(PATIENCE).build();
    let rule = rule("gcra 1000/1d", OnError::Closed);
    runtime.block_on(answered_again(&limiter, &rule, "key"));
    let busy = keep_busy(&server, Duration::from_millis(100));
    let begun = begun(&runtime, limiter.acquire(&rule, "key"));
    assert!(on_this_thread(begun).expect("retried until the script has ended").allowed);
    busy.join().expect("a thread");
}

/// The runtime may end while the call waits to be retried.
#[test]
fn a_caller_whose_runtime_ends_before_its_retry_is_answered_or_gets_an_outage() {
    let server = Server::with(&["--busy-reply-threshold", "5"]);
    let rule = rule("gcra 1000/1d", OnError::Closed);
    for driven in [20, 40, 60].map(Duration::from_millis) {
        let limiter = Limiter::builder(redis(&server.tcp_url())).deadline(PATIENCE).build();
        let (ends, other) = (single(), single());
        ends.block_on(answered_again(&limiter, &rule, "key"));
        let busy = keep_busy(&server, Duration::from_millis(300));
        let call = begun(&ends, limiter.acquire(&rule, "key"));
        let ends = std::thread::spawn(move || ends.block_on(async { tokio::time::sleep(driven).await }));
        // Nothing reads the answers of a connection whose runtime has ended.
        if let Err(error) = other.block_on(in_time(call)) {
            assert!(OUTAGES.contains(&error.kind().name()), "{error}");
        }
        ends.join().expect("a thread");
        busy.join().expect("a thread");
    }
}

/// A script that has begun, and keeps the server from answering for this long.
fn keep_busy(server: &Server, time: Duration) -> std::thread::JoinHandle<()> {
    let busy = "local from, now = redis.call('TIME')
                repeat now = redis.call('TIME') until (now[1] - from[1]) * 1e6 + now[2] - from[2] > tonumber(ARGV[1])";
    let mut other = server.connection();
    // On a busy machine it may have ended before anybody sees that it runs.
    for _ in 0..1000 {
        let (mut connection, micros) = (server.connection(), time.as_micros().to_string());
        let script = std::thread::spawn(move || {
            redis::cmd("EVAL").arg(busy).arg(0).arg(micros).exec(&mut connection).expect("the script has ended");
        });
        while !script.is_finished() {
            if redis::cmd("PING").exec(&mut other).is_err() {
                return script;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        script.join().expect("a thread");
    }
    panic!("no script was seen to run");
}

/// On a cluster, a caller may also wait for the slot map, which a caller of another runtime asks for.
#[test]
fn a_caller_of_a_silent_cluster_gets_its_error_wherever_it_is_polled() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("redis-cluster://{}", silent.local_addr().expect("an address"));
    // Long enough that the calls end with the request for the slot map.
    let limiter = Limiter::builder(Cluster::open(&url).expect("an address")).deadline(Duration::from_secs(3)).build();
    let rule = rule("gcra 1000/1d", OnError::Closed);
    let (ended, driven, other) = (single(), runtime(), single());
    let moved = begun(&ended, limiter.acquire(&rule, "key"));
    let bare = begun(&driven, limiter.acquire(&rule, "key"));
    drop(ended);
    std::thread::scope(|scope| {
        scope.spawn(|| is_an_outage(on_this_thread(bare)));
        is_an_outage(other.block_on(in_time(moved)));
    });
}

#[test]
fn a_caller_polled_outside_a_runtime_notices_that_its_node_is_gone() {
    let servers = ClusterServers::of_primaries();
    let (cluster, limiter) = cluster_limiter(&servers);
    let limiter = limiter.to_builder().deadline(PATIENCE).build();
    let (runtime, rule) = (runtime(), rule("gcra 1000/1d", OnError::Closed));
    let key = &servers.keys_of(0, 1)[0];
    runtime.block_on(answered_again(&limiter, &rule, key));
    servers.node(0).signal("-STOP");
    let call = begun(&runtime, limiter.acquire(&rule, key));
    servers.node(0).signal("-KILL");
    let refreshes = cluster.refreshes();
    is_an_outage(on_this_thread(call));
    block_until("it asks for the slots", || cluster.refreshes() > refreshes);
}

fn is_an_outage(answer: Result<Decision, Error>) {
    let error = answer.expect_err("nothing answers");
    assert!(OUTAGES.contains(&error.kind().name()), "{error}");
}

/// The runtime that a call was begun on may end before the call does.
#[test]
fn a_caller_whose_runtime_has_ended_gets_an_error_wherever_it_is_polled() {
    let server = Server::start();
    let rule = rule("gcra 1000/1d", OnError::Closed);
    for connected in [false, true] {
        let limiter = Limiter::builder(redis(&server.tcp_url())).deadline(Duration::from_millis(300)).build();
        let (ended, other) = (runtime(), runtime());
        if connected {
            ended.block_on(answered_again(&limiter, &rule, "key"));
        }
        server.signal("-STOP");
        let [here, there] = [(), ()].map(|()| begun(&ended, limiter.peek(&rule, "key")));
        drop(ended);
        on_this_thread(here).expect_err("nothing drives it");
        other.block_on(there).expect_err("nothing drives it");
        server.signal("-CONT");
        other.block_on(answered_again(&limiter, &rule, "key"));
    }
}

/// The runtime that it was begun on isn't driven any more, as if it were blocked.
#[test]
fn a_caller_that_moves_to_another_runtime_keeps_its_deadline() {
    let server = Server::start();
    let (blocked, other) = (single(), single());
    let limiter = Limiter::builder(redis(&server.tcp_url())).deadline(Duration::from_millis(200)).build();
    let rule = rule("gcra 1000/1d", OnError::Closed);
    blocked.block_on(answered_again(&limiter, &rule, "key"));
    server.signal("-STOP");
    let calls = blocked.block_on(async {
        // The first is sent alone, the others are queued.
        let mut calls: Vec<_> = (0..3).map(|_| Box::pin(limiter.acquire(&rule, "key"))).collect();
        for call in &mut calls {
            assert!(is_pending(call.as_mut()).await);
        }
        // Long enough that all are sent.
        tokio::time::sleep(Duration::from_millis(20)).await;
        calls
    });
    // The last first, which is polled there while its deadline is yet to come.
    for call in calls.into_iter().rev() {
        let began = tokio::time::Instant::now();
        let error = other.block_on(in_time(call)).expect_err("frozen");
        assert!(
            error.kind() == ErrorKind::Deadline && began.elapsed() < PATIENCE / 2,
            "{error} after {:?}",
            began.elapsed()
        );
    }
    server.signal("-CONT");
}

/// Where the first runtime is blocked, and where it has ended.
#[test]
fn a_wait_that_moves_to_another_runtime_ends_in_time() {
    let limiter = Limiter::new(tollgate::Embedded::new());
    let other = single();
    for (ends, text) in [(false, "gcra 1/2s max-debt 9"), (true, "gcra 1/2s max-debt 9"), (true, "gcra 1/2s")] {
        let (first, rule, key) = (single(), rule(text, OnError::Closed), format!("{ends} {text}"));
        first.block_on(acquire(&limiter, &rule, &key)).expect("a decision");
        let waiting = begun(&first, limiter.acquire_wait(&rule, &key, PATIENCE));
        if ends {
            drop(first);
        }
        let decision = other.block_on(in_time(waiting)).expect("a decision");
        assert!(decision.allowed, "{key}: {decision:?}");
    }
    // With no runtime to wait by, it is an error.
    let (first, rule) = (single(), rule("gcra 1/1d max-debt 9", OnError::Closed));
    first.block_on(acquire(&limiter, &rule, "none")).expect("a decision");
    let waiting = begun(&first, limiter.acquire_wait(&rule, "none", 2 * Duration::from_secs(86_400)));
    drop(first);
    let error = on_this_thread(waiting).expect_err("nothing to wait by");
    assert!(error.is_input() && error.charged() == Charged::Yes, "{error:?}");
}

fn single() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime")
}

/// The future after its first poll, on this runtime.
fn begun<F: Future>(runtime: &tokio::runtime::Runtime, future: F) -> std::pin::Pin<Box<F>> {
    let mut begun = Box::pin(future);
    assert!(runtime.block_on(is_pending(begun.as_mut())));
    begun
}

/// Wakers that tokio doesn't make: one panics, the others of its batch are woken all the same.
#[tokio::test]
async fn a_waker_that_panics_leaves_no_other_caller_unwoken() {
    struct Counting {
        panics: bool,
        woken: std::sync::atomic::AtomicBool,
    }
    impl Wake for Counting {
        fn wake(self: Arc<Self>) {
            self.woken.store(true, std::sync::atomic::Ordering::Release);
            assert!(!self.panics, "as some executors do when their queue is full");
        }
    }
    let server = Server::start();
    let limiter = Limiter::builder(redis(&server.tcp_url())).deadline(DEADLINE).build();
    let rule = rule("gcra 1000/1d", OnError::Closed);
    decided(&limiter, &rule, "key").await;
    // Whether they are answered, or late.
    for stopped in [false, true] {
        if stopped {
            server.signal("-STOP");
        }
        let mut callers: Vec<_> = (0..10).map(|_| Box::pin(limiter.acquire(&rule, "key"))).collect();
        let counting = (0..10).map(|at| Counting { panics: [2, 5, 7].contains(&at), woken: false.into() });
        let counting: Vec<_> = counting.map(Arc::new).collect();
        for (caller, counting) in callers.iter_mut().zip(&counting) {
            let waker = Arc::clone(counting).into();
            assert!(caller.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        }
        // The first is sent alone, and drives itself.
        let woken = || counting[1..].iter().all(|counting| counting.woken.load(std::sync::atomic::Ordering::Acquire));
        wait_until("all are woken", async || woken()).await;
        drop(callers);
    }
    server.signal("-CONT");
}
