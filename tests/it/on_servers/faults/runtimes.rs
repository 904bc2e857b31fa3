//! Several runtimes share a client: none delays another, however it is driven, and each batches its own callers' calls.

use futures_util::future::join_all;
use tollgate_testing::polling::block_until;

use super::*;

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

#[test]
fn a_runtime_for_each_call_decides_each() {
    let server = Server::start();
    let limiter = limiter(&server.tcp_url()).to_builder().deadline(PATIENCE).build();
    let rule = rule("gcra 1000/30d", OnError::Closed);
    for left in (900..1000).rev() {
        assert_eq!(runtime().block_on(acquire(&limiter, &rule, "key")).expect("a decision").remaining, left);
    }
}

/// A runtime may end before it has asked which node has the slot now.
#[test]
fn a_runtime_for_each_call_follows_a_cluster_through_a_failover() {
    let mut servers = ClusterServers::start();
    let (_, limiter) = cluster_limiter(&servers);
    let limiter = limiter.to_builder().deadline(PATIENCE).build();
    let rule = rule("gcra 1000/30d", OnError::Closed);
    let key = &servers.keys_of(0, 1)[0];
    runtime().block_on(acquire(&limiter, &rule, key)).expect("a decision");
    servers.kill(0);
    block_until("the promoted node decides", || runtime().block_on(acquire(&limiter, &rule, key)).is_ok());
}

/// A runtime that sent a call, and has been neither driven nor dropped since.
#[test]
fn a_runtime_that_idles_or_is_blocked_holds_up_no_other() {
    let server = Server::start();
    let redis = redis(&server.tcp_url());
    let limiter = Limiter::builder(redis.clone()).deadline(PATIENCE).build();
    let rule = rule("gcra 1000/30d", OnError::Closed);
    let (idle, driven) = (runtime(), runtime());
    idle.block_on(acquire(&limiter, &rule, "key")).expect("a decision");
    // Sent, and given up before the answer could be read.
    for _ in 0..10 {
        let mut call = Box::pin(limiter.acquire(&rule, "key"));
        idle.block_on(std::future::poll_fn(|context| {
            _ = call.as_mut().poll(context);
            std::task::Poll::Ready(())
        }));
    }
    let answers = driven.block_on(join_all((0..100).map(|_| acquire(&limiter, &rule, "key"))));
    assert!(answers.into_iter().all(|answer| answer.is_ok()));
    assert!(redis.connections() >= 2 && redis.breaker() == BreakerState::Closed);
    idle.block_on(acquire(&limiter, &rule, "key")).expect("a decision, driven again");
}

#[test]
fn each_runtime_sends_its_callers_together() {
    let server = Server::start();
    let limiter = limiter(&server.tcp_url()).to_builder().deadline(PATIENCE).build();
    let rule = rule("gcra 1000000/30d", OnError::Closed);
    // Loads the script.
    runtime().block_on(acquire(&limiter, &rule, "key")).expect("a decision");
    server.reset_command_counts();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                runtime().block_on(async {
                    for _ in 0..20 {
                        for answer in join_all((0..64).map(|_| acquire(&limiter, &rule, "key"))).await {
                            answer.expect("a decision");
                        }
                    }
                });
            });
        }
    });
    let (calls, failed) = server.commands()["evalsha"];
    // One alone, and the others in a batch or two; a call each would be 5,120.
    assert!(failed == 0 && calls <= 4 * 20 * 4, "{calls} calls, {failed} failed");
}

/// A decision that needs a runtime, on a thread that has none, and on one that can't wait or connect.
#[test]
fn a_call_without_a_runtime_that_can_wait_is_misuse() {
    let server = Server::start();
    let limiter = limiter(&server.tcp_url());
    let open = rule("gcra 10/1d", OnError::Open);
    let permits = rule("concurrency 10 ttl 1h", OnError::Open);
    let bare = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let without_io = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    let misused = |what: &str, answer: Result<(), Error>| {
        let error = answer.expect_err(what);
        assert!(error.is_input() && error.to_string().contains("call this within a tokio runtime"), "{what}: {error}");
        assert_eq!(error.charged(), Charged::No);
    };
    let watched = Redis::open(&format!("redis-sentinel://127.0.0.1:{}/primary", server.port())).expect("an address");
    let embedded = Limiter::new(tollgate::Embedded::new());
    let queue = tollgate_testing::rules::rule("gcra 1/1h burst 1 max-debt 5");
    let calls = async || {
        misused("acquire", limiter.acquire(&open, "key").await.map(drop));
        misused("peek", limiter.peek(&open, "key").await.map(drop));
        misused("many", limiter.acquire_many(&open, ["a", "b"]).await.remove(0).map(drop));
        misused("hold", limiter.hold(&permits, "key").await.map(drop));
        misused("hold wait", limiter.hold_wait(&permits, "key", PATIENCE).await.map(drop));
        misused("wait", limiter.acquire_wait(&open, "key", PATIENCE).await.map(drop));
        misused("client", watched.client(PATIENCE).await.map(drop));
    };
    futures_util::FutureExt::now_or_never(calls()).expect("at once");
    bare.block_on(calls());
    misused("no I/O", without_io.block_on(limiter.acquire(&open, "key")).map(drop));
    misused("no I/O for Sentinels", without_io.block_on(watched.client(PATIENCE)).map(drop));
    let waiting = futures_util::FutureExt::now_or_never(embedded.acquire_wait(&queue, "key", PATIENCE));
    misused("wait here", waiting.expect("at once").map(drop));
    // What decides in the process needs none.
    let here = futures_util::FutureExt::now_or_never(embedded.acquire(&queue, "key")).expect("at once");
    assert!(here.expect("a decision").allowed);
}

#[test]
fn a_wait_dropped_outside_its_runtime_gives_back_its_reservation() {
    let server = Server::start();
    let limiter = limiter(&server.tcp_url()).to_builder().deadline(PATIENCE).build();
    let rule = rule("gcra 1/1h burst 1 max-debt 100", OnError::Closed);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    runtime.block_on(acquire(&limiter, &rule, "key")).expect("a decision");
    for _ in 0..5 {
        let mut waiting = Box::pin(limiter.acquire_wait(&rule, "key", Duration::from_secs(86_400)));
        runtime.block_on(async {
            let reserved = async || {
                let left = limiter.peek(&rule, "key").await.expect("a peek").reset_after;
                (left > Duration::from_secs(3600)).then_some(())
            };
            tokio::select! {
                _ = &mut waiting => panic!("it waits"),
                () = wait_for_value(reserved) => {}
            }
        });
        drop(waiting);
        runtime.block_on(wait_for_value(async || {
            let left = limiter.peek(&rule, "key").await.expect("a peek").reset_after;
            (left <= Duration::from_secs(3600)).then_some(())
        }));
    }
}

/// A permit that is renewed belongs to whoever has its value, wherever that is.
#[test]
fn a_permit_is_renewed_after_the_runtime_that_took_it_has_ended() {
    let server = Server::start();
    let limiter = Limiter::builder(redis(&server.tcp_url())).deadline(PATIENCE).build();
    let rule = rule("concurrency 1 ttl 9s", OnError::Closed);
    let (first, other) = (runtime(), runtime());
    let permit = first.block_on(limiter.hold(&rule, "key")).expect("a decision").permit.expect("free").renewed();
    drop(first);
    let began = std::time::Instant::now();
    while began.elapsed() < Duration::from_secs(20) {
        let second = other.block_on(limiter.hold(&rule, "key")).expect("a decision");
        assert!(second.permit.is_none(), "two hold it after {:?}", began.elapsed());
        std::thread::sleep(Duration::from_millis(50));
    }
    drop(permit);
    other.block_on(limiter.finish());
    assert!(other.block_on(limiter.hold(&rule, "key")).expect("a decision").permit.is_some(), "given back");
}

/// A permit, a wait, dropped where there is no runtime, after their own has ended.
#[test]
fn what_is_dropped_after_its_runtime_has_ended_is_given_back() {
    let server = Server::start();
    let limiter = Limiter::builder(redis(&server.tcp_url())).deadline(PATIENCE).build();
    let permits = rule("concurrency 1 ttl 1h", OnError::Closed);
    let queue = rule("gcra 1/1h max-debt 9", OnError::Closed);
    let (ended, other) = (runtime(), runtime());
    let permit = ended.block_on(limiter.hold(&permits, "key")).expect("a decision").permit.expect("free");
    ended.block_on(acquire(&limiter, &queue, "key")).expect("a decision");
    let mut waiting = Box::pin(limiter.acquire_wait(&queue, "key", Duration::from_secs(86_400)));
    let owed = async || limiter.peek(&queue, "key").await.expect("a decision").reset_after > Duration::from_secs(3600);
    ended.block_on(async {
        tokio::select! {
            _ = &mut waiting => panic!("it waits"),
            _ = wait_until("it has reserved", owed) => {}
        }
    });
    drop(ended);
    drop((permit, waiting));
    other.block_on(in_time(limiter.finish()));
    assert_eq!(other.block_on(limiter.peek(&permits, "key")).expect("a decision").remaining, 1);
    assert!(!other.block_on(owed()));
}
