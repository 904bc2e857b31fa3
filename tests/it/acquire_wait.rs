//! `acquire_wait`: callers wait in order, not beyond their bound, and are charged nothing once they give up.

mod two_limits;

use std::time::Duration;

use futures_util::future::join_all;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tollgate::{Clock, Embedded, Limiter, Redis, RetryAfter, Rule};
use tollgate_testing::polling::wait_until;
use tollgate_testing::redis_server::{Server, patient};
use tollgate_testing::rules::rule;

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn callers_are_served_in_order_of_arrival() {
    let limiter = Limiter::new(Embedded::new());
    let rule = rule("gcra 1/1s burst 0 max-debt 5");
    let started = Instant::now();
    let mut callers = tokio::task::JoinSet::new();
    for place in 1..=5 {
        let (limiter, rule) = (limiter.clone(), rule.clone());
        callers.spawn(async move {
            let decision = limiter.acquire_wait(&rule, "queue", 10 * SECOND).await.expect("a decision");
            assert!(decision.allowed && decision.retry_after == RetryAfter::Now && decision.granted == 1);
            assert_eq!(decision.limits[0].retry_after, RetryAfter::Now);
            (place, started.elapsed())
        });
        // Tasks of one thread run when this one waits: so each reserves before the next is there.
        tokio::task::yield_now().await;
    }
    for expected in 1..=5 {
        let (place, waited) = callers.join_next().await.expect("one more").expect("no panic");
        assert_eq!(place, expected);
        // The engine's clock went on by itself between two reservations, the waits are that much shorter.
        assert!(
            waited <= place * SECOND + Duration::from_millis(2) && waited > (place - 1) * SECOND,
            "{place}: {waited:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_wait_beyond_the_bound_is_denied_at_once_and_charges_nothing() {
    let limiter = Limiter::new(Embedded::new());
    let rule = rule("token-bucket 1/1h max-debt 9");
    assert!(limiter.acquire_wait(&rule, "key", SECOND).await.expect("a decision").allowed);
    let before = limiter.peek(&rule, "key").await.expect("a decision").reset_after;
    let started = Instant::now();
    let decision = limiter.acquire_wait(&rule, "key", 10 * SECOND).await.expect("a decision");
    assert!(!decision.allowed && decision.granted == 0 && started.elapsed() < SECOND);
    assert!(decision.retry_after.duration().expect("a wait") > 3000 * SECOND, "it says how long it would be");
    assert!(limiter.peek(&rule, "key").await.expect("a decision").reset_after <= before, "and it is not charged");
}

#[tokio::test]
async fn a_denial_carries_jitter_on_request() {
    let limiter = Limiter::new(Embedded::new());
    let rule = rule("fixed-window 1/1h start first-hit");
    let at = std::time::UNIX_EPOCH + SECOND;
    let request = tollgate::Request::new("key").at(at);
    limiter.acquire(&rule, request).await.expect("a decision");
    let mut waits = Vec::new();
    for _ in 0..20 {
        let denied = limiter.acquire(&rule, request.jitter(50)).await.expect("a decision");
        waits.push(denied.retry_after.duration().expect("a wait"));
    }
    assert!(waits.iter().all(|wait| (3600 * SECOND..=5400 * SECOND).contains(wait)), "{waits:?}");
    assert!(waits.iter().any(|wait| *wait != waits[0]), "{waits:?}");
    let exact = limiter.acquire(&rule, request).await.expect("a decision");
    assert_eq!(exact.retry_after, RetryAfter::After(3600 * SECOND));
}

#[tokio::test]
async fn a_caller_that_gives_up_is_not_charged() {
    let server = Server::start();
    for limiter in [Limiter::new(Embedded::new()), patient(&server.url())] {
        let rule = rule("token-bucket 10/1h max-debt 100");
        limiter.acquire(&rule, tollgate::Request::new("key").cost(10)).await.expect("a decision");
        for _ in 0..20 {
            let waiting = limiter.acquire_wait(&rule, "key", 30 * 3600 * SECOND);
            tokio::select! {
                biased;
                decision = waiting => panic!("allowed: {decision:?}"),
                () = tokio::time::sleep(Duration::from_millis(3)) => {}
            }
        }
        // The cancellations are tasks of their own; once all have run, the key is as it was.
        let hour = 3600 * SECOND;
        let mut reset_after = Duration::MAX;
        for _ in 0..1000 {
            reset_after = limiter.peek(&rule, "key").await.expect("a decision").reset_after;
            if reset_after <= hour {
                break;
            }
            tokio::task::yield_now().await;
        }
        assert!(reset_after <= hour, "{reset_after:?}: charged for callers who have gone");
    }
}

/// In real time, on a real Redis: without debt each caller comes back by itself.
#[tokio::test]
async fn a_log_is_waited_for_by_retries() {
    let server = Server::start();
    let limiter = patient(&server.url());
    let rule = rule("sliding-log 2/50ms");
    let mut callers = tokio::task::JoinSet::new();
    for _ in 0..6 {
        let (limiter, rule) = (limiter.clone(), rule.clone());
        callers
            .spawn(async move { limiter.acquire_wait(&rule, "key", 60 * SECOND).await.expect("a decision").allowed });
    }
    let started = Instant::now();
    assert_eq!(callers.join_all().await, [true; 6]);
    assert!(started.elapsed() >= Duration::from_millis(100), "six take three windows");
    let rule = self::rule("sliding-log 1/1d");
    limiter.acquire(&rule, "other").await.expect("a decision");
    let denied = limiter.acquire_wait(&rule, "other", SECOND).await.expect("a decision");
    assert!(!denied.allowed, "a day is more than a second");
}

/// In real time, as the block is: nothing else moves the engine's clock while a caller sleeps.
#[tokio::test]
async fn a_block_is_waited_for_where_it_ends_in_time() {
    let limiter = Limiter::new(Embedded::new());
    for text in ["gcra 5/1s max-debt 5", "gcra 5/1s"] {
        let rule = rule(text);
        // Scripts are compiled at their first call: not while the block runs.
        assert!(limiter.acquire_wait(&rule, text, SECOND).await.expect("a decision").allowed, "{text}");
        limiter.block(&rule, text, 5 * SECOND).await.expect("an answer");
        let denied = limiter.acquire_wait(&rule, text, Duration::from_millis(1)).await.expect("a decision");
        assert!(!denied.allowed && denied.blocked, "{text}");
        assert!(limiter.acquire_wait(&rule, text, 60 * SECOND).await.expect("a decision").allowed, "{text}");
        assert!(!limiter.peek(&rule, text).await.expect("a decision").blocked, "{text}");
    }
}

#[tokio::test]
async fn callers_that_would_wait_too_long_take_one_call_and_hold_up_nobody() {
    let server = Server::start();
    let limiter = Limiter::builder(Redis::open(&server.url()).expect("a good address")).deadline(60 * SECOND).build();
    let rule = rule("token-bucket 100/1s burst 100 max-debt 1000");
    // At one time: nothing refills meanwhile.
    let request = tollgate::Request::new("key").at(std::time::UNIX_EPOCH + 1_000_000 * SECOND);
    assert!(limiter.acquire_wait(&rule, request.cost(100), SECOND).await.expect("a decision").allowed);
    server.reset_command_counts();
    let impatient = (0..900).map(|_| limiter.acquire_wait(&rule, request, Duration::from_millis(20)));
    let answers = futures_util::future::join_all(impatient).await;
    let served = answers.into_iter().filter(|answer| answer.as_ref().expect("a decision").allowed).count();
    assert_eq!(served, 2);
    let (calls, failed) = server.commands()["evalsha"];
    assert!(calls <= 900 && failed == 0, "{calls}: one call each at most, and none to cancel; {failed} failed");
    let patient = limiter.reserve(&rule, request).await.expect("a decision");
    assert_eq!(patient.retry_after.duration(), Some(Duration::from_millis(30)));
}

/// An engine whose clock goes with the tasks' time.
struct World {
    clock: Clock,
    limiters: [Limiter; 2],
}

impl World {
    fn new() -> Self {
        let clock = Clock::new(std::time::UNIX_EPOCH + 1_000_000 * SECOND);
        let engine = Embedded::with_clock(clock.clone());
        // A process each in all but name.
        Self { clock, limiters: [Limiter::new(engine.clone()), Limiter::new(engine)] }
    }

    async fn pass(&self, time: Duration) {
        let step = Duration::from_millis(10);
        for _ in 0..time.as_millis() / step.as_millis() {
            self.clock.advance(step);
            tokio::time::advance(step).await;
            for _ in 0..20 {
                tokio::task::yield_now().await;
            }
        }
    }

    /// A caller in the queue.
    async fn wait(&self, limiter: usize, rule: &Rule, cost: u64) -> JoinHandle<bool> {
        let (limiter, rule) = (self.limiters[limiter].clone(), rule.clone());
        let waiting = tokio::spawn(async move {
            let request = tollgate::Request::new("key").cost(cost);
            limiter.acquire_wait(&rule, request, 3600 * SECOND).await.expect("a decision").allowed
        });
        self.pass(Duration::from_millis(10)).await;
        waiting
    }
}

#[tokio::test(start_paused = true)]
async fn callers_move_up_when_those_before_them_give_up() {
    for text in ["token-bucket 1/1s max-debt 50", "fixed-window 1/1s max-debt 50"] {
        // Callers of another process notice by and by.
        for (behind, late) in [(0, Duration::ZERO), (1, SECOND / 2)] {
            let (world, rule) = (World::new(), rule(text));
            assert!(world.wait(0, &rule, 1).await.await.expect("no panic"));
            let before = world.wait(0, &rule, 9).await;
            let [first, second] = [world.wait(behind, &rule, 1).await, world.wait(behind, &rule, 2).await];
            before.abort();
            world.pass(late + Duration::from_millis(50)).await;
            assert!(!first.is_finished() && !second.is_finished(), "{text}: theirs is still owed");
            world.pass(SECOND).await;
            assert!(first.is_finished() && !second.is_finished(), "{text}: one by one");
            world.pass(3 * SECOND).await;
            assert!(first.is_finished() && second.is_finished(), "{text}: nothing is owed");
            assert!(first.await.expect("no panic") && second.await.expect("no panic"));
            let left = world.limiters[0].peek(&rule, "key").await.expect("a decision");
            assert!(left.retry_after.duration() <= Some(SECOND), "{text}: {left:?}");
        }
    }
}

/// The wait that a reservation is answered is the longest that it can be: it is not for those behind it.
#[tokio::test(start_paused = true)]
async fn callers_do_not_wait_for_those_behind_them() {
    let (world, rule) = (World::new(), rule("gcra 1/1s max-debt 50"));
    assert!(world.wait(0, &rule, 1).await.await.expect("no panic"));
    let (first, last) = (world.wait(0, &rule, 3).await, world.wait(0, &rule, 20).await);
    world.wait(0, &rule, 9).await.abort();
    world.pass(3 * SECOND).await;
    assert!(first.is_finished() && !last.is_finished());
    world.pass(19 * SECOND).await;
    assert!(!last.is_finished());
    world.pass(SECOND).await;
    assert!(last.await.expect("no panic"));
}

/// The jitter of a denial is no part of the wait that must fit.
#[tokio::test(start_paused = true)]
async fn a_wait_that_fits_is_waited_for_whatever_its_jitter() {
    let limiter = Limiter::new(Embedded::with_clock(Clock::new(std::time::UNIX_EPOCH + SECOND)));
    let rule = rule("gcra 1/1s");
    for key in 0..50 {
        let key = key.to_string();
        let request = tollgate::Request::new(&key).jitter(100);
        assert!(limiter.acquire_wait(&rule, request, SECOND).await.expect("a decision").allowed);
        let began = Instant::now();
        let denied = limiter.acquire_wait(&rule, request, SECOND).await.expect("a decision");
        // The engine's clock stands still.
        assert!(!denied.allowed && began.elapsed() >= SECOND, "{:?}", began.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_is_too_long_names_the_limits_that_deny() {
    let limiter = Limiter::new(Embedded::new());
    let rule = rule("gcra 1000/1s max-debt 9, token-bucket 1/1h max-debt 9");
    assert!(limiter.acquire_wait(&rule, "key", SECOND).await.expect("a decision").allowed);
    let decision = limiter.acquire_wait(&rule, "key", SECOND).await.expect("a decision");
    assert_eq!((decision.allowed, decision.denied_by.as_deref()), (false, Some("token-bucket 1/1h max-debt 9")));
    assert_eq!([0, 1].map(|at| decision.limits[at].allowed), [true, false]);
    assert_eq!(decision.limits[1].retry_after, decision.retry_after);
}

/// Though no call with an id, such as its reservation, can say so much.
#[tokio::test]
async fn a_cost_that_no_limit_could_admit_is_denied_with_never() {
    let limiter = Limiter::new(Embedded::new());
    for text in ["token-bucket 10/1s max-debt 5", "token-bucket 10/1s"] {
        for cost in [16, (1 << 53) + 1, u64::MAX] {
            let request = tollgate::Request::new("key").cost(cost);
            let decision = limiter.acquire_wait(&rule(text), request, SECOND).await.expect("a decision");
            assert_eq!((decision.allowed, decision.retry_after), (false, RetryAfter::Never), "{text}: {cost}");
        }
    }
}

/// The turns of a window are one time, of which each hears a little later.
#[tokio::test]
async fn callers_of_a_fixed_window_move_up_in_order_of_arrival() {
    let server = Server::start();
    let limiter = patient(&server.url());
    let rule = rule("fixed-window 2/6s start first-hit max-debt 20");
    let mut of_keys = Vec::new();
    for number in 0..30 {
        let key = format!("key {number}");
        for _ in 0..2 {
            assert!(limiter.acquire(&rule, &key).await.expect("an answer").allowed);
        }
        let mut waits = Vec::new();
        for owed in 1..=4 {
            let (waiting, of, user) = (limiter.clone(), rule.clone(), key.clone());
            waits.push(tokio::spawn(async move {
                let decision = waiting.acquire_wait(&of, &user, Duration::from_secs(60)).await;
                assert!(decision.expect("an answer").allowed);
                Instant::now()
            }));
            // Only then is the next one behind it.
            wait_until("it has reserved", async || {
                let states = limiter.inspect(&rule, &key).await.expect("an answer");
                states[0].fields.contains(&("used", 2 + owed))
            })
            .await;
        }
        // Two of the three that stay are served by the next window.
        waits.remove(0).abort();
        of_keys.push(waits);
    }
    for waits in of_keys {
        let served: Vec<_> = join_all(waits).await.into_iter().map(|served| served.expect("served")).collect();
        assert!(served[2] + Duration::from_secs(1) > served[1], "the last came a window before the one before it");
    }
}
