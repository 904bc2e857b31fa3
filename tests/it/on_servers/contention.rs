//! Callers that share a connection and give up: they don't affect others. That many tasks and processes together are
//! admitted exactly the limit is the tool's test of this name.

use tokio::task::JoinSet;
use tollgate::{Limiter, Request};
use tollgate_testing::polling::once_sent;
use tollgate_testing::redis_server::{Server, patient};
use tollgate_testing::rules::{THOUSAND, rule};

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn callers_that_give_up_are_charged_at_most_once_and_replies_stay_matched() {
    let server = Server::start();
    for text in THOUSAND {
        let (limiter, rule) = (limiter(&server), rule(text));
        let mut finished = 0;
        let mut tasks = Vec::new();
        for n in 0..600_u32 {
            let (limiter, rule) = (limiter.clone(), rule.clone());
            tasks.push(tokio::spawn(async move { once_sent(|| limiter.acquire(&rule, "shared")).await.allowed }));
            // The caller of some time ago gives up: before its call was sent, on the way, or after the answer.
            if n % 3 == 0 {
                let early = n / 3 * 7919 % 40;
                for _ in 0..early {
                    tokio::task::yield_now().await;
                }
                tasks[(n / 2) as usize].abort();
            }
        }
        for task in tasks {
            match task.await {
                Ok(allowed) => finished += u64::from(allowed),
                Err(error) => assert!(error.is_cancelled(), "{error}"),
            }
        }
        let charged = 1000 - limiter.peek(&rule, "shared").await.expect("a decision").remaining;
        assert!((finished..=600).contains(&charged), "{text}: {charged} charged, {finished} told so");
        assert_answers_are_the_callers_own(&limiter).await;
    }
}

/// Each caller has a limit of its own, which its answer names.
async fn assert_answers_are_the_callers_own(limiter: &Limiter) {
    let mut tasks = JoinSet::new();
    for n in 1..=200_u64 {
        let limiter = limiter.clone();
        tasks.spawn(async move {
            let rule = rule(&format!("gcra {n}/30d"));
            let decision = limiter.peek(&rule, Request::new(&n.to_string())).await.expect("a decision");
            assert_eq!((decision.capacity, decision.remaining), (n, n));
        });
    }
    tasks.join_all().await;
}

fn limiter(server: &Server) -> Limiter {
    patient(&server.url())
}
