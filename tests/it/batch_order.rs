//! However calls are batched, and whichever are dropped before they are sent, each answer is that of calls made in
//! sequence.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use tollgate::{Embedded, Limiter, Redis, Request, Rule};
use tollgate_testing::effort::cases;
use tollgate_testing::polling::is_pending;
use tollgate_testing::redis_server::Server;
use tollgate_testing::rules::rule;

/// One call: a rule, a key, a cost, and a time, each by its number; and whether it is dropped.
type Asked = (usize, usize, u64, u64, bool);

fn at(second: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(1_700_000_000 + second)
}

fn request(key: &str, (_, _, cost, second, _): Asked) -> Request<'_> {
    Request::new(key).cost(cost).at(at(second))
}

/// The first goes alone, and all others are queued by the time that some are dropped.
async fn decided(limiter: &Limiter, rules: &[Rule], keys: &[String], asked: &[Asked]) -> Vec<Option<bool>> {
    // The sender of the last round's batch may be about to check the queue again.
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    let mut callers: Vec<_> =
        asked.iter().map(|one| Some(Box::pin(limiter.acquire(&rules[one.0], request(&keys[one.1], *one))))).collect();
    for caller in callers.iter_mut().flatten() {
        assert!(is_pending(caller.as_mut()).await);
    }
    for (caller, one) in callers.iter_mut().zip(asked) {
        if one.4 {
            *caller = None;
        }
    }
    let mut answers = Vec::new();
    for caller in callers {
        answers.push(match caller {
            Some(caller) => Some(caller.await.expect("a decision").allowed),
            None => None,
        });
    }
    answers
}

#[test]
fn calls_dropped_before_they_are_sent_leave_the_others_decided_in_order() {
    let server = Server::start();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let limiter =
        Limiter::builder(Redis::open(&server.url()).expect("a good address")).deadline(Duration::from_secs(30)).build();
    let rules = ["token-bucket 7/1h", "token-bucket 20/2h", "fixed-window 9/1h", "sliding-log 6/1h"].map(rule);
    for rule in &rules {
        // A script that has to be loaded is overtaken by those that needn't.
        assert!(runtime.block_on(limiter.acquire(rule, "warm")).expect("a decision").allowed);
    }

    let config = Config { cases: cases(80), failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let one = (0..4_usize, 0..4_usize, 0..4_u64, 0..3_u64, proptest::bool::weighted(0.3));
    let all = proptest::collection::vec(one, 2..120);
    let round = std::cell::Cell::new(0);
    let result = runner.run(&all, |mut asked: Vec<Asked>| {
        // The first is sent alone, so it can't be dropped unsent.
        asked[0].4 = false;
        round.set(round.get() + 1);
        let keys: Vec<_> = (0..4).map(|key| format!("{}:{key}", round.get())).collect();
        let answers = runtime.block_on(decided(&limiter, &rules, &keys, &asked));

        // Asks of one time go in one call, so those of one key at different times needn't keep their order among them.
        let model = Limiter::new(Embedded::new());
        let mut times: Vec<_> = Vec::new();
        for one in &asked[1..] {
            if !times.contains(&(one.0, one.3)) {
                times.push((one.0, one.3));
            }
        }
        let first = std::iter::once(0);
        let rest = times.iter().flat_map(|time| (1..asked.len()).filter(|at| (asked[*at].0, asked[*at].3) == *time));
        for place in first.chain(rest).filter(|place| !asked[*place].4) {
            let one = asked[place];
            let expected = runtime.block_on(model.acquire(&rules[one.0], request(&keys[one.1], one)));
            let expected = expected.expect("a decision").allowed;
            proptest::prop_assert_eq!(answers[place], Some(expected), "{}: {:?} of {:?}", place, one, &asked);
        }
        for (rule, key) in rules.iter().flat_map(|rule| keys.iter().map(move |key| (rule, key))) {
            let left = async |limiter: &Limiter| {
                limiter.peek(rule, Request::new(key).at(at(3))).await.expect("an answer").remaining
            };
            let (redis, model) = runtime.block_on(async { (left(&limiter).await, left(&model).await) });
            proptest::prop_assert_eq!(redis, model, "{} of {}: who was dropped took nothing", key, rule);
        }
        Ok(())
    });
    result.expect("as one after the other");
}
