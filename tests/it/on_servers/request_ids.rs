//! Calls with an id: charged once however often they are sent, and settled once.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use proptest::prelude::*;
use tollgate::redis::cmd;
use tollgate::{Algorithm, Charged, Clock, Decision, Embedded, Error, ErrorKind, Limiter, Operation, Request, Script};
use tollgate_testing::engines::{Engine, Subject, answer, on_both_engines, time};
use tollgate_testing::histories::{Step, beginning, call_of, steps_with};
use tollgate_testing::limits::two_limits;
use tollgate_testing::oracle::{Answer, Taken};
use tollgate_testing::oracle_spec::{oracle, spec};
use tollgate_testing::redis_server::{Server, patient};
use tollgate_testing::rules::{limit, rule};

fn call(engine: &Engine, subject: &Subject<'_>, operation: Operation, request: Request<'_>) -> Result<Decision, Error> {
    engine.runtime.block_on(call_of(operation, &engine.limiter, &subject.rule, request))
}

/// A call by an id, or none, where the rule's numbers change.
type Call = (usize, (Option<Operation>, Step));

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let operations = [
        (6, Some(Operation::Acquire)),
        (3, Some(Operation::AtMost)),
        (3, Some(Operation::Reserve)),
        (4, Some(Operation::Settle)),
        (3, Some(Operation::Cancel)),
        (1, None),
    ];
    let ids = proptest::collection::vec(0_usize..20, 60);
    (ids, steps_with(&operations, 1..=60)).prop_map(|(ids, steps)| ids.into_iter().zip(steps).collect())
}

#[test]
fn the_same_id_gets_the_same_answer_and_is_charged_and_settled_once() {
    let limits =
        two_limits().prop_filter("permits are given back by their own ids", |(limit, _)| !limit.algorithm().holds());
    on_both_engines((limits, beginning(), calls()), |engine, ((limit, other), begin, calls)| {
        let mut subject = engine.subject(limit.clone());
        let (mut oracle, mut other) = (oracle(&limit), other);
        oracle.by_id(true);
        // What is remembered of an id: the operation, the answer, the units, whether they are settled, and how the key
        // was left.
        let mut remembered: HashMap<usize, (Operation, Answer, u64, bool, Taken)> = HashMap::new();
        let mut now = begin;
        for (id, (operation, step)) in calls {
            let Some(operation) = operation else {
                let next = std::mem::replace(&mut other, subject.limit().clone());
                subject = subject.changed(next.clone().named("limit").expect("a good name"));
                oracle.change(spec(&next));
                continue;
            };
            if operation == Operation::Reserve && !limit.algorithm().reserves() {
                continue;
            }
            let (cost, then) = step.aim(&subject, now);
            // An id is forgotten after ten minutes of the caller's time; here none grows as old.
            let soon = begin..begin + 500_000_000;
            now = if soon.contains(&then) { then } else { now };
            let name = format!("id {id}");
            let request = Request::new(subject.key.as_str()).cost(cost).at(time(now)).id(&name);
            let told = call(engine, &subject, operation, request);
            // Remembered under a larger limit, there remains no more than this one has.
            let limit = subject.limit().capacity();
            let again = |answer: Answer| Answer { limit, remaining: answer.remaining.min(limit), ..answer };
            let expected = match (operation, remembered.get(&id).copied()) {
                (Operation::Settle | Operation::Cancel, None) => {
                    let error = told.expect_err("nothing is remembered");
                    prop_assert!(error.is_unknown_id() && error.charged() == Charged::No);
                    continue;
                }
                (Operation::Cancel, Some((_, _, took, _, taken))) => {
                    remembered.remove(&id);
                    (oracle.refund_of(taken, took, now).0, 0)
                }
                (Operation::Settle, Some((was, _, took, false, taken))) => {
                    // More than can be counted isn't taken.
                    let (answer, taken, took) = match cost.checked_sub(took) {
                        Some(more) if more > 0 => {
                            let (answer, taken, more) = oracle.penalty_of(taken, more, now);
                            (answer, taken, took + more)
                        }
                        _ => {
                            let (answer, taken) = oracle.refund_of(taken, took - cost, now);
                            (answer, taken, cost)
                        }
                    };
                    remembered.insert(id, (was, answer, took, true, taken));
                    (answer, took)
                }
                (Operation::Settle, Some((_, answer, took, true, _))) => (again(answer), took),
                (_, Some((was, ..))) if was != operation => {
                    let error = told.expect_err("an id of another operation");
                    prop_assert!(error.is_input() && error.charged() == Charged::No, "{}", error);
                    continue;
                }
                (_, Some((_, answer, took, ..))) => (again(answer), took),
                (_, None) => {
                    let (answer, took) = match operation {
                        Operation::AtMost => oracle.at_most(cost, now),
                        Operation::Reserve => (oracle.reserve(cost, now), cost),
                        _ => (oracle.acquire(cost, now), cost),
                    };
                    let took = if answer.allowed { took } else { 0 };
                    if answer.allowed {
                        remembered.insert(id, (operation, answer, took, false, oracle.taken()));
                    }
                    (answer, took)
                }
            };
            let decision = told.expect("a decision");
            prop_assert_eq!((answer(&decision), decision.granted), expected, "{:?} {} as {}", operation, cost, id);
            prop_assert_eq!(subject.peek(1, now), oracle.peek(1, now), "after {:?} {} as {}", operation, cost, id);
        }
        Ok(())
    });
}

/// What others gave back counts as older than a call's units as far as there were older ones, by its own numbers.
#[test]
fn after_a_change_of_numbers_what_others_gave_back_takes_nothing_from_a_later_call() {
    for engine in [Engine::embedded(), Engine::redis()] {
        let subject = engine.subject(limit("sliding-window 10/1s"));
        let changed = subject.changed(limit("sliding-window 100/1m"));
        // A minute begins.
        let begun = 60_000_000 << 24;
        let taken = |subject: &Subject<'_>, operation: Operation, cost: u64, now: u64, id: &str| {
            let request = Request::new(subject.key.as_str()).cost(cost).at(time(now)).id(id);
            100 - call(&engine, subject, operation, request).expect("a decision").remaining
        };
        taken(&subject, Operation::Acquire, 10, begun, "first");
        // Half of the ten units has passed.
        let now = begun + 1_500_000;
        assert_eq!(taken(&changed, Operation::Acquire, 50, now, "own"), 55);
        assert_eq!(taken(&changed, Operation::Acquire, 8, now, "others"), 63);
        assert_eq!(taken(&changed, Operation::Cancel, 0, now, "first"), 58);
        assert_eq!(taken(&changed, Operation::Cancel, 0, now, "others"), 50);
        assert_eq!(taken(&changed, Operation::Cancel, 0, now, "own"), 0);
    }
}

/// In the server's time, by the short way.
#[tokio::test]
async fn a_denied_id_is_decided_anew() {
    let server = Server::start();
    let limiter = patient(&server.url());
    for text in ["token-bucket 1/1h", "token-bucket 1/1h, fixed-window 1000/30d", "sliding-log 1/1h"] {
        let rule = rule(text);
        limiter.reset(&rule, "key").await.expect("an answer");
        for allowed in [true, false, false, true] {
            let decided = limiter.acquire(&rule, Request::new("key").id(if allowed { "other" } else { "id" })).await;
            assert_eq!(decided.expect("a decision").allowed, allowed, "{text}");
        }
        limiter.reset(&rule, "key").await.expect("an answer");
        assert!(limiter.acquire(&rule, Request::new("key").id("id")).await.expect("a decision").allowed, "{text}");
    }
}

/// Both are taken in the server's time, by the short way.
#[tokio::test]
async fn a_cancel_leaves_what_a_later_id_took_and_nothing_else_in_use() {
    let server = Server::start();
    let limiter = patient(&server.url());
    for text in ["token-bucket 5/100s", "token-bucket 5/100s, fixed-window 1000/30d"] {
        let rule = rule(text);
        limiter.reset(&rule, "key").await.expect("an answer");
        for (id, cost) in [("first", 3), ("second", 2)] {
            assert!(limiter.acquire(&rule, Request::new("key").id(id).cost(cost)).await.expect("a decision").allowed);
        }
        // One of the first call's three units has come back by then.
        let later = SystemTime::now() + Duration::from_secs(30);
        let left = limiter.cancel(&rule, Request::new("key").id("first").at(later)).await.expect("an answer");
        assert_eq!(left.limits[0].remaining, 3, "{text}");
    }
}

#[test]
fn retries_from_many_tasks_are_charged_once_per_id() {
    let engine = Engine::redis();
    let subject = engine.subject(limit("token-bucket 100000/30d"));
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let mut tasks = Vec::new();
        for task in 0..400_u32 {
            let (limiter, rule, key) = (engine.limiter.clone(), subject.rule.clone(), subject.key.clone());
            tasks.push(tokio::spawn(async move {
                let id = format!("request {}", task % 50);
                limiter.acquire(&rule, Request::new(&key).cost(10).id(&id)).await.expect("a decision")
            }));
        }
        for task in tasks {
            assert!(task.await.expect("no panic").allowed);
        }
        let left = engine.limiter.peek(&subject.rule, &subject.key).await.expect("a decision").remaining;
        assert_eq!(left, 100_000 - 50 * 10);
    });
}

#[test]
fn the_marker_of_an_id_expires_and_is_in_its_keys_slot() {
    let engine = Engine::redis();
    let subject = engine.subject(limit("gcra 5/1s"));
    let request = Request::new(subject.key.as_str()).id("a:b}/#").id_ttl(Duration::from_secs(7));
    call(&engine, &subject, Operation::Acquire, request).expect("a decision");
    let mut redis = engine.server.as_ref().expect("a redis").connection();
    let keys: Vec<String> = tollgate::redis::cmd("KEYS").arg("*#*").query(&mut redis).expect("keys");
    let [marker] = keys.as_slice() else { panic!("{keys:?}") };
    assert!(marker.starts_with(&format!("tollgate:{{{}}}:test#", subject.key)), "{marker}");
    assert!(marker.ends_with("-a%3ab%7d%2f%23"), "{marker}");
    let ttl: i64 = tollgate::redis::cmd("PTTL").arg(marker).query(&mut redis).expect("an answer");
    assert!((1000..=7000).contains(&ttl), "{ttl}");
    let () = tollgate::redis::cmd("SET").arg(marker).arg("junk").query(&mut redis).expect("set");
    let error = call(&engine, &subject, Operation::Acquire, request).expect_err("junk");
    assert!(error.kind() == ErrorKind::UnreadableState && error.charged() == Charged::No, "{error}");
}

#[test]
fn several_limits_are_settled_together() {
    for engine in [Engine::embedded(), Engine::redis()] {
        let [minute, day] = ["token-bucket 1000/1m", "fixed-window 5000/1d"].map(limit);
        let rule = tollgate::Rule::new("tokens", minute).and_then(|rule| rule.and(day)).expect("a rule");
        let at = time(1 << 50);
        let remaining = |request: Request<'_>| -> Vec<u64> {
            let decision = engine.runtime.block_on(engine.limiter.peek(&rule, request)).expect("a decision");
            decision.limits.iter().map(|limit| limit.remaining).collect()
        };
        let request = Request::new("acme").at(at).id("completion-1");
        let decision = engine.runtime.block_on(engine.limiter.acquire(&rule, request.cost(400))).expect("a decision");
        assert_eq!((decision.allowed, decision.granted), (true, 400));
        for _ in 0..2 {
            let settled = engine.runtime.block_on(engine.limiter.settle(&rule, request.cost(650))).expect("settled");
            assert_eq!(settled.granted, 650);
            assert_eq!(remaining(request), [350, 4350]);
        }
        // A reservation that is cancelled.
        let other = Request::new("acme").at(at).id("completion-2");
        engine.runtime.block_on(engine.limiter.acquire(&rule, other.cost(350))).expect("a decision");
        assert_eq!(remaining(request), [0, 4000]);
        engine.runtime.block_on(engine.limiter.cancel(&rule, other)).expect("cancelled");
        assert_eq!(remaining(request), [350, 4350]);
    }
}

#[test]
fn an_id_is_forgotten_by_the_callers_own_time() {
    for engine in [Engine::embedded(), Engine::redis()] {
        let subject = engine.subject(limit("gcra 5/1d"));
        let remaining = |seconds: u64| {
            let request = Request::new(subject.key.as_str()).id("nightly").at(time((1 << 50) + seconds * 1_000_000));
            call(&engine, &subject, Operation::Acquire, request).expect("a decision").remaining
        };
        assert_eq!((remaining(0), remaining(599), remaining(600)), (4, 4, 3), "ten minutes");
    }
}

#[test]
fn an_id_answers_for_the_limits_that_it_was_given_to() {
    let engine = Engine::redis();
    let request = Request::new("key").at(time(1 << 50)).id("m");
    for (rule, remaining) in [("fixed-window 100/1s", 99), ("token-bucket 5/1d", 4)] {
        let rule = tollgate_testing::rules::rule(rule);
        let decision = engine.runtime.block_on(engine.limiter.acquire(&rule, request)).expect("a decision");
        assert_eq!(decision.remaining, remaining, "{rule}");
    }
}

/// Or else it would give back what others took of the part that it names, where both began in one call.
#[tokio::test]
async fn an_id_that_is_cancelled_with_another_part_is_not_known() {
    let server = Server::start();
    for limiter in [patient(&server.url()), Limiter::new(Embedded::new())] {
        let rule = tollgate_testing::rules::rule("token-bucket 100/30d").named("users").expect("a name");
        let rule = rule.and_by("org", "token-bucket 10/30d".parse().expect("a limit")).expect("a rule");
        let parts = [[("org", &b"acme"[..])], [("org", &b"other"[..])]];
        let request = |at: usize, user| Request::new(user).parts(&parts[at]).cost(5);
        let taken = [request(0, "anna").id("1"), request(1, "bert").id("2")];
        assert!(limiter.acquire_many(&rule, taken).await.iter().all(|taken| taken.as_ref().is_ok_and(|by| by.allowed)));
        let error = limiter.cancel(&rule, request(1, "anna").id("1")).await.expect_err("another organisation's");
        assert!(error.is_unknown_id(), "{error}");
        let left = |decision: Decision| decision.limits.iter().map(|limit| limit.remaining).collect::<Vec<_>>();
        assert_eq!(left(limiter.peek(&rule, request(1, "anna")).await.expect("a decision")), [95, 5]);
        assert_eq!(left(limiter.call(Operation::Cancel, &rule, taken[0]).await.expect("its own")), [100, 10]);
    }
}

#[test]
fn a_refund_cannot_be_settled_and_a_cost_that_no_number_holds_is_refused() {
    let engine = Engine::embedded();
    let subject = engine.subject(limit("token-bucket 100/1d"));
    subject.acquire(50, 1 << 50);
    let request = Request::new(subject.key.as_str()).at(time(1 << 50)).cost(5).id("m");
    let refund = || engine.runtime.block_on(engine.limiter.refund(&subject.rule, request)).expect("given back");
    assert_eq!((refund().remaining, refund().remaining), (55, 55), "once");
    let error = call(&engine, &subject, Operation::Cancel, request).expect_err("nothing was taken");
    assert!(error.is_unknown_id(), "{error}");
    let error = call(&engine, &subject, Operation::Acquire, request.id("n").cost(u64::MAX)).expect_err("too much");
    assert!(error.is_input() && error.to_string().contains("18446744073709551615"), "{error}");
}

/// In whatever order a call of permits and units is ended, nothing of it stays.
#[test]
fn a_call_with_permits_is_settled_cancelled_and_released_in_any_order() {
    for engine in [Engine::embedded(), Engine::redis()] {
        let rule = tollgate_testing::rules::rule("concurrency 5 ttl 1h, fixed-window 100/1d start first-hit");
        let (limiter, run) = (&engine.limiter, &engine.runtime);
        for (cost, settled) in [(1, Some(0)), (3, Some(1)), (2, Some(9)), (2, None)] {
            for release in [false, true] {
                let request = tollgate::Request::new("key").cost(cost).id("call");
                assert!(run.block_on(limiter.acquire(&rule, request)).expect("a decision").allowed);
                if let Some(units) = settled {
                    run.block_on(limiter.settle(&rule, request.cost(units))).expect("settled");
                    let now = run.block_on(limiter.peek(&rule, "key")).expect("a decision");
                    assert_eq!([0, 1].map(|at| now.limits[at].remaining), [5 - cost, 100 - units]);
                }
                run.block_on(limiter.cancel(&rule, request)).expect("cancelled");
                if release {
                    run.block_on(limiter.release(&rule, request)).expect("nothing is left to be released");
                }
                let now = run.block_on(limiter.peek(&rule, "key")).expect("a decision");
                assert_eq!([0, 1].map(|at| now.limits[at].remaining), [5, 100], "{cost} {settled:?}");
            }
        }
    }
}

/// What a settlement says of permits, and remembers, is what the call took. As other languages call them.
#[test]
fn a_settlement_leaves_permits_as_they_are() {
    let server = Server::start();
    let mut redis = server.connection();
    let text = Script::for_algorithms([Algorithm::TokenBucket, Algorithm::Concurrency]).text();
    let mut call = |cost: &str, mode: &str, seconds: u64| -> Vec<i64> {
        let now = 1_000_000_000_000_000 + seconds * 1_000_000;
        let limits = "token_bucket 10 1 1000000000 1 0 concurrency 8 1000000 ann 600000";
        let mut eval = cmd("EVAL");
        eval.arg(text).arg(&["3", "bucket", "permits", "marker"]).arg(limits.split(' ').collect::<Vec<_>>());
        eval.arg(cost).arg(mode).arg(now).query(&mut redis).expect("an answer")
    };
    assert_eq!(call("3,1", "acquire", 0)[10..], [3, 1]);
    assert_eq!(call("2,0", "settle", 0)[10..], [2, 1]);
    // Nobody holds the permit any more, so the call is decided anew.
    let anew = call("3,1", "acquire", 2);
    assert_eq!((anew[2], anew[7]), (5, 7));
}

/// Of calls at one time, as of a clock that stands still: what came to nothing and was forgotten is another state than
/// what begins after it, and so are all before that.
#[tokio::test]
async fn a_late_cancel_takes_nothing_of_a_state_that_began_after_its_own_was_forgotten() {
    let limiter = Limiter::new(Embedded::with_clock(Clock::new(time(1 << 50))));
    for text in ["token-bucket 1/1h", "fixed-window 1/1h start first-hit", "sliding-window 1/1h", "sliding-log 1/1h"] {
        let rule = rule(text);
        for round in 0..3 {
            let ids = ["a", "b", "c"].map(|id| format!("{id}{round}"));
            let [first, second, third] = ids.each_ref().map(|id| Request::new("key").id(id));
            assert!(limiter.acquire(&rule, first).await.expect("a decision").allowed, "{text}");
            limiter.refund(&rule, "key").await.expect("given back");
            assert!(limiter.acquire(&rule, second).await.expect("a decision").allowed, "{text}");
            limiter.cancel(&rule, first).await.expect("cancelled");
            assert!(!limiter.acquire(&rule, third).await.expect("a decision").allowed, "{text}: taken from another");
            limiter.cancel(&rule, second).await.expect("cancelled");
        }
    }
}
