//! Several runtimes share a client: none holds up another, however it is driven, and each sends its callers' calls together.

use futures_util::future::join_all;

use super::*;

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

#[test]
fn a_runtime_for_each_call_decides_each() {
    let server = Server::start();
    let limiter = limiter(&server.tcp_url()).deadline(PATIENCE);
    let rule = rule("gcra 1000/30d", OnError::Closed);
    for left in (900..1000).rev() {
        assert_eq!(runtime().block_on(acquire(&limiter, &rule, "key")).expect("a decision").remaining, left);
    }
}

/// A runtime that asked, and is neither driven nor dropped since.
#[test]
fn a_runtime_that_idles_or_is_blocked_holds_up_no_other() {
    let server = Server::start();
    let redis = redis(&server.tcp_url());
    let limiter = Limiter::new(redis.clone()).deadline(PATIENCE);
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
    assert_eq!((redis.connections(), redis.breaker()), (2, Breaker::Closed));
    idle.block_on(acquire(&limiter, &rule, "key")).expect("a decision, driven again");
}

#[test]
fn each_runtime_sends_its_callers_together() {
    let server = Server::start();
    let limiter = limiter(&server.tcp_url()).deadline(PATIENCE);
    let rule = rule("gcra 1000000/30d", OnError::Closed);
    // Loads the script.
    runtime().block_on(acquire(&limiter, &rule, "key")).expect("a decision");
    server.forget_commands();
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
    // One alone, and its company in a flight or two; a call each would be 5,120.
    assert!(failed == 0 && calls <= 4 * 20 * 4, "{calls} calls, {failed} failed");
}
