//! Every operation, at random, from many tasks at once: no more units are taken at any moment than the rule
//! allows, and in the end the key holds exactly what was taken and not given back.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tollgate::{Decision, Embedded, Error, Limiter, Redis, Request, Rule};
use tollgate_testing::effort::cases;
use tollgate_testing::engines::{Micros, answer, time};
use tollgate_testing::oracle_spec::oracle;
use tollgate_testing::redis_server::Server;
use tollgate_testing::rules::{assert_of_every_algorithm, by_own_id};

const RULES: [&str; 6] = [
    "token-bucket 40/1h max-debt 20",
    "fixed-window 40/1h max-debt 20",
    "fixed-window 40/month tz Europe/Zurich",
    "sliding-window 40/1h",
    "sliding-log 40/1h",
    "concurrency 40 ttl 1h",
];

const NOW: Micros = 1 << 50;

/// A task's next call, and its units.
#[derive(Clone, Copy, Debug)]
enum Ask {
    Acquire(u64),
    AtMost(u64),
    Reserve(u64),
    /// Sent twice at once under one id.
    Twice(u64),
    /// Gives back the oldest that it has.
    GiveBack,
    /// Makes it another count, twice.
    Settle(u64),
    Cancel,
    Penalty(u64),
    Block,
    Unblock,
    Peek,
}

/// Units that a task has, and the id that they were taken under.
struct Taken {
    units: u64,
    id: String,
    remembered: bool,
}

fn asks() -> impl Strategy<Value = Vec<Vec<Ask>>> {
    let ask = prop_oneof![
        5 => (0_u64..=9).prop_map(Ask::Acquire),
        3 => (0_u64..=9).prop_map(Ask::AtMost),
        3 => (1_u64..=9).prop_map(Ask::Reserve),
        4 => (1_u64..=9).prop_map(Ask::Twice),
        6 => Just(Ask::GiveBack),
        3 => (0_u64..=9).prop_map(Ask::Settle),
        2 => Just(Ask::Cancel),
        1 => (0_u64..=9).prop_map(Ask::Penalty),
        1 => Just(Ask::Block),
        4 => Just(Ask::Unblock),
        2 => Just(Ask::Peek),
    ];
    let of_a_task = proptest::collection::vec(ask, 1..=24);
    proptest::collection::vec(of_a_task, 8)
}

/// One key that all tasks share.
struct Shared {
    limiter: Limiter,
    rule: Rule,
    key: String,
    holds: bool,
    /// Admitted and not given back: counted after the answer, and given back before the call, so never more than the
    /// server has.
    out: AtomicI64,
    /// Taken whether it was there or not.
    imposed: AtomicI64,
}

#[test]
fn nothing_is_over_admitted_and_no_unit_is_lost() {
    assert_of_every_algorithm(&RULES, &[]);
    let server = Server::start();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build().expect("a runtime");
    let redis =
        Limiter::builder(Redis::open(&server.url()).expect("a good address")).deadline(Duration::from_secs(30)).build();
    for (limiter, cases) in [(redis, cases(6)), (Limiter::new(Embedded::new()), cases(20))] {
        for text in RULES {
            let config = Config { cases, failure_persistence: None, ..Config::default() };
            let number = std::cell::Cell::new(0);
            let outcome = TestRunner::new(config).run(&asks(), |tasks| {
                number.set(number.get() + 1);
                play(&runtime, &limiter, text, &format!("{text} {}", number.get()), tasks)
            });
            outcome.unwrap_or_else(|failure| panic!("{text}: {failure}"));
        }
    }
}

fn play(
    runtime: &Runtime,
    limiter: &Limiter,
    text: &str,
    key: &str,
    tasks: Vec<Vec<Ask>>,
) -> Result<(), TestCaseError> {
    let rule = tollgate_testing::rules::rule(text);
    let limit = rule.limits().next().expect("a limit").clone();
    let (holds, bound) = (limit.algorithm().holds(), limit.capacity() + limit.max_debt());
    let (out, imposed) = (AtomicI64::new(0), AtomicI64::new(0));
    let shared = Arc::new(Shared { limiter: limiter.clone(), rule, key: key.to_owned(), holds, out, imposed });
    let left = runtime.block_on(async {
        let mut running = JoinSet::new();
        for (number, asks) in tasks.into_iter().enumerate() {
            let shared = Arc::clone(&shared);
            running.spawn(async move { shared.task(number, asks, i64::try_from(bound).expect("small")).await });
        }
        running.join_all().await;
        shared.limiter.unblock(&shared.rule, shared.request(0)).await.expect("an answer");
        shared.limiter.peek(&shared.rule, shared.request(1)).await.expect("a decision")
    });
    let used = shared.out.load(Ordering::SeqCst) + shared.imposed.load(Ordering::SeqCst);
    let mut expected = oracle(&limit);
    expected.penalty(u64::try_from(used).expect("nothing was given back twice"), NOW);
    prop_assert_eq!(answer(&left), expected.peek(1, NOW), "{} used", used);
    Ok(())
}

impl Shared {
    fn request(&self, cost: u64) -> Request<'_> {
        Request::new(&self.key).cost(cost).at(time(NOW))
    }

    fn forgives(&self) -> bool {
        self.rule.limits().any(|limit| limit.window().is_some())
    }

    async fn task(&self, number: usize, asks: Vec<Ask>, bound: i64) {
        let Self { limiter, rule, holds, .. } = self;
        let mut taken: Vec<Taken> = Vec::new();
        for (call, ask) in asks.into_iter().enumerate() {
            let id = format!("{number}-{call}");
            match ask {
                // Permits are given back by the id that holds them.
                Ask::Acquire(cost) if *holds => {
                    let answer = limiter.acquire(rule, self.request(cost).id(&id)).await;
                    self.admitted(answer, cost, id, false, bound, &mut taken);
                }
                Ask::Acquire(cost) => {
                    let answer = limiter.acquire(rule, self.request(cost)).await;
                    self.admitted(answer, cost, id, false, bound, &mut taken);
                }
                Ask::AtMost(cost) => {
                    let request = self.request(cost);
                    let answer = limiter.at_most(rule, if *holds { request.id(&id) } else { request }).await;
                    let granted = answer.as_ref().map_or(0, |decision| decision.granted);
                    assert!(granted <= cost);
                    self.admitted(answer, granted, id, false, bound, &mut taken);
                }
                Ask::Reserve(cost) if rule.limits().all(|limit| limit.algorithm().reserves()) => {
                    let answer = limiter.reserve(rule, self.request(cost)).await;
                    self.admitted(answer, cost, id, false, bound, &mut taken);
                }
                Ask::Twice(cost) => {
                    let request = self.request(cost).id(&id);
                    let (one, other) = tokio::join!(limiter.acquire(rule, request), limiter.acquire(rule, request));
                    let (one, other) = (one.expect("a decision"), other.expect("a decision"));
                    // Denied calls aren't remembered, and others may have given back in between.
                    let answer = if one.allowed { one } else { other };
                    self.admitted(Ok(answer), cost, id, !holds, bound, &mut taken);
                }
                Ask::GiveBack => self.give_back(&mut taken).await,
                Ask::Settle(units) => self.settle(units, &mut taken).await,
                Ask::Cancel => {
                    let Some(at) = taken.iter().position(|taken| taken.remembered) else { continue };
                    let Taken { units, id, .. } = taken.remove(at);
                    self.out.fetch_sub(signed(units), Ordering::SeqCst);
                    limiter.cancel(rule, self.request(1).id(&id)).await.expect("an answer");
                    let again = limiter.cancel(rule, self.request(1).id(&id)).await;
                    assert!(again.is_err_and(|error| error.is_unknown_id()), "given back once");
                }
                // Of windows of the calendar a penalty forgives what exceeds the limit, which no sum shows.
                Ask::Penalty(_) if self.forgives() => {}
                Ask::Penalty(cost) => {
                    limiter.penalty(rule, by_own_id(rule, self.request(cost))).await.expect("an answer");
                    self.imposed.fetch_add(signed(cost), Ordering::SeqCst);
                }
                Ask::Block => {
                    let blocked = limiter.block(rule, self.request(1), Duration::from_secs(60)).await;
                    assert!(blocked.expect("an answer").blocked);
                }
                Ask::Unblock => drop(limiter.unblock(rule, self.request(1)).await.expect("an answer")),
                Ask::Peek | Ask::Reserve(_) => drop(limiter.peek(rule, self.request(1)).await.expect("a decision")),
            }
        }
    }

    fn admitted(
        &self,
        answer: Result<Decision, Error>,
        units: u64,
        id: String,
        remembered: bool,
        bound: i64,
        taken: &mut Vec<Taken>,
    ) {
        let decision = answer.expect("a decision");
        if !decision.allowed {
            return;
        }
        let out = self.out.fetch_add(signed(units), Ordering::SeqCst) + signed(units);
        assert!(out <= bound, "{out} units are out, of {bound}");
        taken.push(Taken { units, id, remembered });
    }

    async fn give_back(&self, taken: &mut Vec<Taken>) {
        let Some(at) = taken.iter().position(|taken| !taken.remembered) else { return };
        let Taken { units, id, .. } = taken.remove(at);
        self.out.fetch_sub(signed(units), Ordering::SeqCst);
        let (limiter, request) = (&self.limiter, self.request(units));
        let answer = match self.holds {
            true => limiter.release(&self.rule, request.id(&id)).await,
            false => limiter.refund(&self.rule, request).await,
        };
        answer.expect("an answer");
    }

    async fn settle(&self, units: u64, taken: &mut Vec<Taken>) {
        let Some(at) = taken.iter().position(|taken| taken.remembered) else { return };
        let Taken { units: estimate, id, .. } = taken.remove(at);
        let units = if self.forgives() { units.min(estimate) } else { units };
        let less = estimate.saturating_sub(units);
        self.out.fetch_sub(signed(less), Ordering::SeqCst);
        for _ in 0..2 {
            let answer = self.limiter.settle(&self.rule, self.request(units).id(&id)).await;
            assert_eq!(answer.expect("an answer").granted, units, "once or twice");
        }
        self.imposed.fetch_add(signed(units.saturating_sub(estimate)), Ordering::SeqCst);
    }
}

fn signed(units: u64) -> i64 {
    i64::try_from(units).expect("small")
}
