//! A server that is slow, paused, busy with a script, or loading.

use super::*;

#[tokio::test]
async fn a_slow_server_opens_the_breaker_which_closes_again() {
    let server = Server::start();
    let redis = redis(&server.tcp_url());
    let limiter = Limiter::builder(redis.clone()).deadline(DEADLINE).build();
    let open = rule("gcra 1000/1d", OnError::Open);
    assert_eq!(decided(&limiter, &open, "key").await.by, DecidedBy::Redis);
    run(&server, &["CLIENT", "PAUSE", "6000", "ALL"]);
    let answers = futures_util::future::join_all((0..50).map(|_| acquire(&limiter, &open, "key"))).await;
    assert!(
        answers.iter().all(|answer| answer.as_ref().is_ok_and(|decision| matches!(decision.by, DecidedBy::Policy(_))))
    );
    until(|| matches!(redis.breaker(), BreakerState::Open(_))).await;
    // Answered without being sent, but for the one in a while that looks whether Redis answers again.
    let unsent = wait_for_value(async || {
        let answer = acquire(&limiter, &open, "key").await.expect("open");
        answer.by.error().cloned().filter(|error| error.charged() == Charged::No)
    })
    .await;
    assert!(unsent.is_unreachable(), "{unsent}");
    answered_again(&limiter, &open, "key").await;
    assert_eq!(redis.breaker(), BreakerState::Closed);
}

#[tokio::test]
async fn while_writes_are_paused_acquires_wait_and_peeks_are_answered() {
    let server = Server::start();
    let limiter = limiter(&server.tcp_url());
    let rule = rule("gcra 5/1d", OnError::Closed);
    decided(&limiter, &rule, "key").await;
    // Longer than any deadline here, until it is lifted.
    run(&server, &["CLIENT", "PAUSE", "60000", "WRITE"]);
    let patient = Request::new("key").deadline(PATIENCE);
    let waiting = {
        let (limiter, rule) = (limiter.clone(), rule.clone());
        tokio::spawn(async move { limiter.acquire(&rule, patient).await })
    };
    assert_eq!(
        in_time(limiter.peek(&rule, Request::new("key").deadline(PATIENCE))).await.expect("a peek").remaining,
        4
    );
    assert!(acquire(&limiter, &rule, "another").await.expect_err("paused").kind() == ErrorKind::Deadline);
    assert!(!waiting.is_finished());
    run(&server, &["CLIENT", "UNPAUSE"]);
    assert_eq!(in_time(waiting).await.expect("a task").expect("a decision").remaining, 3);
}

#[tokio::test]
async fn a_call_to_a_busy_server_is_retried_and_answered_once_its_script_is_killed() {
    let server = Server::with(&["--busy-reply-threshold", "50"]);
    let limiter = limiter(&server.tcp_url());
    let closed = rule("gcra 5/1d", OnError::Closed);
    decided(&limiter, &closed, "key").await;
    let mut endless = server.connection();
    let endless = std::thread::spawn(move || cmd("EVAL").arg("while true do end").arg(0).exec(&mut endless));
    until(|| cmd("PING").exec(&mut server.connection()).is_err()).await;
    by_policy(&server.tcp_url(), &["not-now", "deadline"]).await;
    let patient = Request::new("key").deadline(PATIENCE);
    let error = in_time(limiter.acquire(&closed, patient)).await.expect_err("busy");
    assert!(
        error.kind() == ErrorKind::NotNow && error.charged() == Charged::No && error.to_string().contains("BUSY"),
        "{error}"
    );
    run(&server, &["SCRIPT", "KILL"]);
    endless.join().expect("a thread").expect_err("killed");
    assert_eq!(answered_again(&limiter.to_builder().deadline(PATIENCE).build(), &closed, "key").await.remaining, 3);
}

#[tokio::test]
async fn a_loading_server_gets_few_retries_and_answers_when_it_has_loaded() {
    let mut server = Server::with(&["--enable-debug-command", "yes"]);
    run(&server, &["DEBUG", "POPULATE", "20000"]);
    run(&server, &["SAVE"]);
    server.stop();
    // A millisecond for each key; clients are served after each KiB.
    server.start_again(&["--key-load-delay", "1000", "--loading-process-events-interval-bytes", "1024"]);
    until(|| info_says(&server, "\nloading:1")).await;
    let redis = redis(&server.tcp_url());
    let limiter = Limiter::builder(redis.clone()).deadline(PATIENCE).build();
    let open = rule("gcra 5/1d", OnError::Open);
    let mut answers = 0;
    let first = in_time(limiter.acquire(&open, "key")).await.expect("open");
    assert!(first.by.error().is_some_and(|error| error.kind() == ErrorKind::NotNow), "{first:?}");
    let loads = std::time::Instant::now();
    let ends = std::thread::spawn({
        let url = server.url();
        move || {
            std::thread::sleep(Duration::from_secs(2));
            let mut server = tollgate::redis::Client::open(url).and_then(|client| client.get_connection()).expect("it");
            cmd("CONFIG").arg(&["SET", "key-load-delay", "0"]).exec(&mut server).expect("it loads without delay");
        }
    });
    in_time(async {
        while limiter.acquire(&open, "key").await.expect("open").by != DecidedBy::Redis {
            answers += 1;
            tokio::task::yield_now().await;
        }
    })
    .await;
    let rejected: String = cmd("INFO").arg("commandstats").query(&mut server.connection()).expect("statistics");
    let rejected = rejected.lines().filter_map(|line| line.strip_prefix("cmdstat_eval")?.split_once("rejected_calls="));
    let rejected: u64 = rejected.map(|(_, rest)| rest.split(',').next().unwrap().parse::<u64>().unwrap()).sum();
    ends.join().expect("no panic");
    // Each of the breaker's probes is four attempts, and there are a few in a second.
    let most = 100 * (1 + loads.elapsed().as_secs());
    assert!(rejected < most && rejected < answers, "{rejected} calls were refused for {answers} answers");
}
