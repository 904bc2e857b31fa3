//! What an outage leaves behind: nothing of calls that charged nothing, and of the others no more than is still owed.

use futures_util::future::join_all;
use tokio::runtime::Handle;

use super::*;

/// Tasks of this runtime that haven't ended.
fn tasks() -> usize {
    Handle::current().metrics().num_alive_tasks()
}

#[tokio::test]
async fn calls_that_were_never_sent_leave_no_task_and_no_call() {
    let mut server = Server::start();
    let limiter = Limiter::builder(redis(&server.tcp_url())).deadline(PATIENCE).build();
    server.stop();
    let permits = rule("concurrency 5 ttl 1h", OnError::Closed);
    let both = rule("concurrency 5 ttl 1h, gcra 5/1h", OnError::Closed);
    let open = rule("concurrency 5 ttl 1h", OnError::Open).named("open").expect("a good name");
    let queue = rule("gcra 1/1h max-debt 9", OnError::Closed).named("queue").expect("a good name");
    for _ in 0..2_000 {
        let error = limiter.hold(&permits, "key").await.expect_err("stopped");
        assert_eq!(error.charged(), Charged::No);
        limiter.hold(&both, Request::new("key").id("mine")).await.expect_err("stopped");
        limiter.hold_wait(&permits, "key", PATIENCE).await.expect_err("stopped");
        limiter.acquire_wait(&queue, "key", PATIENCE).await.expect_err("stopped");
        let held = limiter.hold(&open, "key").await.expect("open");
        drop(held.permit.expect("the policy's").renewed());
    }
    assert!(tasks() < 10, "{} tasks", tasks());
    in_time(limiter.finish()).await;
    server.start_again(&[]);
    server.wait_until_it_answers();
    server.reset_command_counts();
    answered_again(&limiter, &queue, "other").await;
    limiter.finish().await;
    let calls: u64 = ["evalsha", "eval"].iter().filter_map(|name| Some(server.commands().get(*name)?.0)).sum();
    assert_eq!(calls, 2, "that one's");
}

/// Of calls that were sent, Redis may have taken what they asked for.
#[tokio::test]
async fn what_must_be_given_back_waits_for_one_task_and_is_bounded() {
    let server = Server::start();
    let limiter = Limiter::builder(redis(&server.tcp_url())).deadline(PATIENCE).build();
    let rule = rule("concurrency 10000 ttl 1h", OnError::Closed);
    let first = limiter.hold(&rule, "key").await.expect("a decision").permit.expect("the first");
    let before = tasks();
    server.signal("-STOP");
    let permits = 12_000;
    let mut given_up: Vec<_> = (0..permits).map(|_| Box::pin(limiter.hold(&rule, "key"))).collect();
    std::future::poll_fn(|context| {
        given_up.iter_mut().for_each(|call| assert!(call.as_mut().poll(context).is_pending()));
        std::task::Poll::Ready(())
    })
    .await;
    drop(given_up);
    tokio::task::yield_now().await;
    assert!(tasks() < before + 10, "{} tasks, {before} before", tasks());
    server.signal("-CONT");
    in_time(limiter.finish()).await;
    // Those above the bound aren't made: what they are about expires. Each looks for a permit of its holder once, and
    // the first of a script's call twice.
    let (releases, _) = server.commands()["zscore"];
    assert!((8_192..permits).contains(&releases), "{releases} releases");
    first.renew().await.expect("it is held");
}

/// Whoever sleeps in the queue while Redis can't be reached, and gives up.
#[tokio::test]
async fn a_wait_dropped_in_an_outage_is_cancelled_only_while_it_is_owed() {
    let server = Server::start();
    let proxy = Proxy::to(server.port()).await;
    let limiter = limiter(&proxy.url());
    let of_a_unit = [Duration::from_secs(180), Duration::from_millis(250)];
    let outages = [(Duration::ZERO, true), (Duration::from_secs(11), false)];
    for (rate, unit, (outage, cancelled)) in [("20/1h", of_a_unit[0], outages[0]), ("4/1s", of_a_unit[1], outages[1])] {
        let rule = rule(&format!("token-bucket {rate} burst 20 max-debt 1000"), OnError::Closed);
        let key = format!("{outage:?}");
        let request = Request::new(&key).deadline(PATIENCE);
        assert!(limiter.acquire(&rule, request.cost(20)).await.expect("a decision").allowed);
        // The last is to wait for 40 units.
        let waits: Vec<_> = (0..8)
            .map(|_| {
                let (limiter, rule, key) = (limiter.clone(), rule.clone(), key.clone());
                let longest = Duration::from_secs(86_400);
                tokio::spawn(async move {
                    let request = Request::new(&key).cost(5).deadline(Duration::from_secs(5));
                    limiter.acquire_wait(&rule, request, longest).await
                })
            })
            .collect();
        let owed = async || limiter.peek(&rule, request).await.expect("a decision").reset_after;
        wait_until("all have reserved", async || owed().await > 50 * unit).await;
        proxy.swallow(!cancelled);
        server.reset_command_counts();
        for wait in waits {
            wait.abort();
            assert!(wait.await.is_err() || !cancelled, "it waits");
        }
        tokio::time::sleep(outage).await;
        proxy.swallow(false);
        in_time(limiter.finish()).await;
        // Each forgets the id of its call.
        let cancels = server.commands().get("del").map_or(0, |(calls, _)| *calls);
        assert_eq!(cancels >= 8, cancelled, "{cancels} calls after {outage:?}");
        wait_until("it is answered", async || limiter.peek(&rule, request).await.is_ok()).await;
        assert!(owed().await <= 20 * unit);
    }
}

/// What was reserved of the burst hasn't refilled by the end of the longest wait.
#[tokio::test]
async fn a_wait_dropped_before_its_answer_charges_nothing_however_short_it_was_to_be() {
    let server = Server::start();
    let limiter = Limiter::builder(redis(&server.tcp_url())).deadline(PATIENCE).build();
    let rule = rule("token-bucket 1/1h burst 10 max-debt 10", OnError::Closed);
    for longest in [0, 20, 10_000].map(Duration::from_millis) {
        run_command(&server, &["CLIENT", "PAUSE", "60000", "WRITE"]);
        let waits = limiter.acquire_wait(&rule, Request::new("key").cost(3), longest);
        assert!(tokio::time::timeout(Duration::from_millis(50), waits).await.is_err(), "it waits for its answer");
        run_command(&server, &["CLIENT", "UNPAUSE"]);
        in_time(limiter.finish()).await;
        assert_eq!(limiter.peek(&rule, "key").await.expect("a decision").remaining, 10, "{longest:?}");
    }
}

/// It was given back by then, in vain.
#[tokio::test]
async fn a_call_whose_script_the_server_lacked_is_not_sent_again_once_its_caller_has_left() {
    let server = Server::start();
    let proxy = Proxy::to(server.port()).await;
    let limiter = Limiter::builder(redis(&proxy.url())).deadline(PATIENCE).build();
    let beside = Limiter::builder(redis(&server.tcp_url())).deadline(PATIENCE).build();
    let other = rule("fixed-window 1000/30d", OnError::Closed);
    let queue = rule("token-bucket 1/1h burst 10 max-debt 10", OnError::Closed).named("queue").expect("a good name");
    let permits = rule("concurrency 10 ttl 1h", OnError::Closed).named("permits").expect("a good name");
    limiter.acquire(&other, "key").await.expect("a decision");
    for waits in [true, false] {
        run_command(&server, &["SCRIPT", "FLUSH"]);
        beside.acquire(&other, "key").await.expect("a decision");
        proxy.pass_replies(0);
        // Calls go together only while another is on its way.
        let first = tokio::spawn({
            let (limiter, other) = (limiter.clone(), other.clone());
            async move { limiter.acquire(&other, "key").await }
        });
        wait_until("the first is answered", async || proxy.held_replies() == 1).await;
        let before = proxy.requested();
        let abandoned = tokio::spawn({
            let (limiter, queue, permits) = (limiter.clone(), queue.clone(), permits.clone());
            async move {
                if waits {
                    drop(limiter.acquire_wait(&queue, "key", PATIENCE).await);
                } else {
                    std::mem::forget(limiter.hold(&permits, "key").await);
                }
            }
        });
        wait_until("the second is sent", async || proxy.requested() > before).await;
        proxy.pass_replies(1);
        first.await.expect("no panic").expect("a decision");
        wait_until("the second is answered", async || proxy.held_replies() == 1).await;
        // Another process brings the scripts.
        let before = proxy.requested();
        beside.acquire(&queue, Request::new("other").cost(0)).await.expect("a decision");
        drop(beside.hold(&permits, "other").await.expect("a decision"));
        beside.finish().await;
        abandoned.abort();
        assert!(abandoned.await.is_err(), "it waits for its answer");
        wait_until("it is given back", async || proxy.requested() > before).await;
        proxy.pass_replies(u64::MAX);
        in_time(limiter.finish()).await;
        let left = async |rule| beside.peek(rule, "key").await.expect("a decision").remaining;
        wait_until("what follows is answered", async || limiter.acquire(&other, "key").await.is_ok()).await;
        assert_eq!((left(&queue).await, left(&permits).await), (10, 10), "waits: {waits}");
    }
}

#[tokio::test]
async fn many_calls_at_once_that_could_not_connect_leave_nothing() {
    let limiter = limiter("redis://127.0.0.1:1");
    let rule = rule("concurrency 5 ttl 1h", OnError::Closed);
    let answers = join_all((0..5_000).map(|_| limiter.hold(&rule, "key"))).await;
    assert!(answers.iter().all(|answer| answer.as_ref().is_err_and(|error| error.charged() == Charged::No)));
    assert!(tasks() < 10, "{} tasks", tasks());
}

/// Its release and itself together: neither begins to count anew.
#[tokio::test]
async fn a_hold_after_a_dropped_permit_of_its_id_ends_by_its_deadline() {
    let server = Server::start();
    let proxy = Proxy::to(server.port()).await;
    let (limiter, rule) = (limiter(&proxy.url()), rule("concurrency 1 ttl 30s", OnError::Closed));
    let request = Request::new("key").id("job-7").deadline(Duration::from_millis(400));
    let held = limiter.hold(&rule, request.deadline(PATIENCE)).await.expect("an answer");
    // Two answers take longer than the deadline, and one may not.
    proxy.delay(Duration::from_millis(250));
    drop(held);
    let error = limiter.hold(&rule, request).await.expect_err("no answer in time");
    assert!(error.kind() == ErrorKind::Deadline, "{error:?}");
}

/// The first of them makes the release itself, and the task that was to make it has nothing to do.
#[tokio::test]
async fn no_hold_by_an_id_overtakes_its_release_whoever_makes_that() {
    let server = Server::start();
    let proxy = Proxy::to(server.port()).await;
    let (limiter, rule) = (limiter(&proxy.url()), rule("concurrency 1 ttl 30s", OnError::Closed));
    let request = Request::new("key").id("job-7");
    let held = limiter.hold(&rule, request.deadline(PATIENCE)).await.expect("an answer");
    // The release, on this runtime's connection, gets no answer.
    proxy.swallow_those_there();
    drop(held);
    let mut first = Box::pin(limiter.hold(&rule, request));
    assert!(is_pending(first.as_mut()).await);
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    let is_over = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let elsewhere = std::thread::spawn({
        let (limiter, rule, is_over) = (limiter.clone(), rule.clone(), std::sync::Arc::clone(&is_over));
        move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            let second = runtime.block_on(limiter.hold(&rule, Request::new("key").id("job-7").deadline(PATIENCE)));
            assert!(is_over.load(std::sync::atomic::Ordering::Acquire), "{second:?} before the release has ended");
        }
    });
    let error = first.await.expect_err("no answer");
    assert!(error.kind() == ErrorKind::Deadline && error.charged() == Charged::Unknown, "{error}");
    is_over.store(true, std::sync::atomic::Ordering::Release);
    tokio::task::spawn_blocking(|| elsewhere.join()).await.expect("no panic").expect("no panic");
}

/// A call of three units that was decided here, since Redis answered too late, and then ran there.
async fn decided_twice(server: &Server, limiter: &Limiter, local: &Rule) -> (Request<'static>, Decision) {
    // Loads the script.
    in_time(limiter.acquire(local, Request::new("key").id("first"))).await.expect("a decision");
    server.signal("-STOP");
    let call = Request::new("key").id("call").cost(3);
    let here = in_time(limiter.acquire(local, call.deadline(DEADLINE))).await.expect("decided here");
    assert_eq!((here.by.name(), here.by.error().expect("why").charged()), ("local", Charged::Unknown));
    server.signal("-CONT");
    answered_again(limiter, local, "other").await;
    (call, here)
}

/// A call that was decided here, since Redis answered too late: what both took is given back, though Redis is still
/// away at the first try.
#[tokio::test]
async fn a_cancellation_that_is_tried_again_reaches_both_engines() {
    let mut server = Server::start();
    let limiter = limiter(&server.tcp_url()).to_builder().deadline(PATIENCE).build();
    let local = rule("token-bucket 10/1d", OnError::Local { processes: NonZeroU32::MIN });
    let (call, here) = decided_twice(&server, &limiter, &local).await;
    assert_eq!(in_time(limiter.peek(&local, "key")).await.expect("a peek").remaining, 6, "it ran late");
    cmd("SAVE").exec(&mut server.connection()).expect("saved");
    server.stop();
    let cancelled = in_time(limiter.cancel(&local, call.after(&here))).await.expect("cancelled here");
    assert!(cancelled.by.error().is_some(), "{cancelled:?}");
    assert_eq!(in_time(limiter.peek(&local, "key")).await.expect("decided here").remaining, 10);
    server.start_again(&[]);
    server.wait_until_it_answers();
    answered_again(&limiter, &local, "other").await;
    let cancelled = in_time(limiter.cancel(&local, call.after(&here))).await.expect("cancelled there too");
    assert_eq!(cancelled.by, DecidedBy::Redis);
    assert_eq!(in_time(limiter.peek(&local, "key")).await.expect("a peek").remaining, 9);
    let unknown = in_time(limiter.cancel(&local, call.after(&here))).await.expect_err("cancelled before");
    assert!(unknown.is_unknown_id(), "{unknown}");
}

/// What both may have taken is given back here alone, and the answer says so.
#[tokio::test]
async fn a_cancellation_that_redis_refuses_to_run_is_no_whole_one() {
    let server = Server::start();
    let limiter = limiter(&server.user("service", "+@all ~*")).to_builder().deadline(PATIENCE).build();
    let local = rule("token-bucket 10/1d", OnError::Local { processes: NonZeroU32::MIN });
    let (call, here) = decided_twice(&server, &limiter, &local).await;
    server.user("service", "+@all ~* -evalsha -eval");
    let cancelled = in_time(limiter.cancel(&local, call.after(&here))).await.expect("cancelled here");
    assert!(cancelled.by.error().is_some_and(|error| error.kind() == ErrorKind::Permission), "{cancelled:?}");
}
