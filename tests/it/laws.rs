//! Every law of a decision, as a property, on both engines: the embedded one tries many histories, Redis some.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use tollgate::Limit;

use crate::limits::{Step, any_limit, beginning, steps, two_limits};
use crate::oracle::Retry;
use crate::subject::{Engine, Micros, Subject, micros, oracle, spec};

/// Checks a property on many cases in the process, and on some with a real server.
pub(crate) fn everywhere<S: Strategy>(cases: S, property: impl Fn(&Engine, S::Value) -> Result<(), TestCaseError>)
where
    S::Value: Clone,
{
    for (engine, count) in [(Engine::embedded(), 1500), (Engine::redis(), 150)] {
        let config =
            Config { cases: count, failure_persistence: None, max_global_rejects: 100_000, ..Config::default() };
        let outcome = TestRunner::new(config).run(&cases, |case| property(&engine, case));
        outcome.unwrap_or_else(|failure| panic!("{failure}"));
    }
}

/// A key with a past: the subject and the time it has come to.
fn lived<'a>(engine: &'a Engine, limit: Limit, begin: Micros, steps: &[Step]) -> (Subject<'a>, Micros) {
    let subject = engine.subject(limit);
    let mut now = begin;
    for step in steps {
        let (cost, then) = step.aim(&subject, now);
        subject.acquire(cost, then);
        now = then;
    }
    (subject, now)
}

fn histories() -> impl Strategy<Value = (Limit, Micros, Vec<Step>, Step)> {
    (any_limit(), beginning(), steps(0..=12), steps(1..=1)).prop_map(|(limit, begin, steps, mut last)| {
        let last = last.pop().expect("one step");
        (limit, begin, steps, last)
    })
}

#[test]
fn every_answer_is_the_oracles() {
    everywhere((any_limit(), beginning(), steps(1..=25)), |engine, (limit, begin, steps)| {
        let subject = engine.subject(limit.clone());
        let mut oracle = oracle(&limit);
        let mut now = begin;
        for step in steps {
            let (cost, then) = step.aim(&subject, now);
            prop_assert_eq!(subject.peek(cost, then), oracle.peek(cost, then), "peek {} at {}", cost, then);
            prop_assert_eq!(subject.acquire(cost, then), oracle.acquire(cost, then), "acquire {} at {}", cost, then);
            now = then;
        }
        prop_assert_eq!(subject.reset(), oracle.reset());
        prop_assert_eq!(subject.acquire(1, now), oracle.acquire(1, now));
        Ok(())
    });
}

#[test]
fn law_1_a_denial_and_a_peek_write_nothing() {
    everywhere(histories(), |engine, (limit, begin, past, next)| {
        let (subject, now) = lived(engine, limit, begin, &past);
        let (cost, then) = next.aim(&subject, now);
        let ahead = subject.state(then).iter().any(|(name, value)| *name == "time_us" && *value > then as i64);
        let before = subject.state(now);
        subject.peek(cost, then);
        prop_assert_eq!(&subject.state(now), &before, "a peek wrote");
        let denied = !subject.acquire(cost, then).allowed;
        if denied && !ahead {
            prop_assert_eq!(&subject.state(now), &before, "a denial wrote");
        }
        Ok(())
    });
}

#[test]
fn law_2_remaining_can_be_taken_and_not_one_more() {
    everywhere(histories(), |engine, (limit, begin, past, next)| {
        let (subject, now) = lived(engine, limit, begin, &past);
        let (cost, then) = next.aim(&subject, now);
        let peeked = subject.peek(cost, then);
        let untouched = subject.peek(0, then);
        prop_assert_eq!((peeked.remaining, peeked.reset_after_us), (untouched.remaining, untouched.reset_after_us));
        let decision = subject.acquire(cost, then);
        prop_assert_eq!((peeked.allowed, peeked.retry), (decision.allowed, decision.retry));
        prop_assert!(subject.acquire(0, then).allowed);
        prop_assert_eq!(subject.peek(0, then).remaining, decision.remaining);
        prop_assert!(!subject.acquire(decision.remaining + 1, then).allowed);
        prop_assert!(subject.acquire(decision.remaining, then).allowed);
        prop_assert_eq!(subject.peek(1, then).remaining, 0);
        Ok(())
    });
}

#[test]
fn law_3_retry_after_is_tight_to_the_microsecond() {
    everywhere(histories(), |engine, (limit, begin, past, next)| {
        let (subject, now) = lived(engine, limit, begin, &past);
        let (cost, then) = next.aim(&subject, now);
        let decision = subject.acquire(cost, then);
        match decision.retry {
            Retry::Now => prop_assert!(decision.allowed),
            Retry::Never => prop_assert!(!decision.allowed && cost > decision.limit),
            Retry::AfterUs(wait) => {
                prop_assert!(!decision.allowed && wait > 0);
                prop_assert!(!subject.acquire(cost, then + wait - 1).allowed, "allowed early");
                prop_assert!(subject.acquire(cost, then + wait).allowed, "denied when promised");
            }
        }
        Ok(())
    });
}

#[test]
fn law_4_after_reset_after_the_key_is_as_if_never_used() {
    everywhere((histories(), steps(1..=6)), |engine, ((limit, begin, past, next), future)| {
        let (used, now) = lived(engine, limit.clone(), begin, &past);
        let (cost, then) = next.aim(&used, now);
        let decision = used.acquire(cost, then);
        let mut now = then + decision.reset_after_us;
        if decision.reset_after_us > 0 {
            prop_assert!(used.peek(0, now - 1).reset_after_us == 1, "reset after too long");
        }
        let fresh = engine.subject(limit);
        for step in future {
            let (cost, then) = step.aim(&fresh, now);
            // A clock that steps back finds a used key ahead of it, and a fresh one not.
            let then = then.max(now);
            prop_assert_eq!(used.acquire(cost, then), fresh.acquire(cost, then));
            now = then;
        }
        Ok(())
    });
}

#[test]
fn law_5_what_can_never_be_had_is_denied_with_never_and_charges_nothing() {
    everywhere((histories(), 1_u64..), |engine, ((limit, begin, past, _), more)| {
        let (subject, now) = lived(engine, limit.clone(), begin, &past);
        let before = subject.peek(0, now);
        let decision = subject.acquire(limit.capacity().saturating_add(more), now);
        prop_assert!(!decision.allowed);
        prop_assert_eq!(decision.retry, Retry::Never);
        prop_assert_eq!(subject.peek(0, now), before);
        Ok(())
    });
}

#[test]
fn law_6_no_span_admits_more_than_capacity_and_rate() {
    everywhere((any_limit(), beginning(), steps(1..=40)), |engine, (limit, begin, steps)| {
        let subject = engine.subject(limit.clone());
        let mut now = begin;
        let mut taken: Vec<(Micros, u64)> = Vec::new();
        for step in steps {
            let (cost, then) = step.aim(&subject, now);
            // The bound holds while the clock doesn't step back: where it does, law 7 says what is lost.
            now = then.max(now);
            if subject.acquire(cost, now).allowed {
                taken.push((now, cost));
            }
            for (first, (begin, _)) in taken.iter().enumerate() {
                let units: u128 = taken[first..].iter().map(|(_, cost)| u128::from(*cost)).sum();
                prop_assert!(units <= most_in(&limit, *begin, now), "{} units from {} to {}", units, begin, now);
            }
        }
        Ok(())
    });
}

/// The most units that a limit may admit from one moment to another, both included.
fn most_in(limit: &Limit, begin: Micros, end: Micros) -> u128 {
    use crate::oracle::Spec;
    let span = u128::from(end - begin);
    let [rate, period, capacity] = [limit.rate(), micros(limit.period()), limit.capacity()].map(u128::from);
    match spec(limit) {
        Spec::TokenBucket { .. } | Spec::Gcra { .. } => capacity + span * rate / period,
        // Each boundary within the span adds the rate.
        Spec::FixedWindow { .. } => capacity + (span / period + 1) * rate,
        Spec::SlidingLog { .. } | Spec::Concurrency { .. } => (span / period + 1) * rate,
        // The count before is taken to have come evenly: two windows' worth at worst.
        Spec::SlidingWindow { .. } => (span / period + 2) * rate,
    }
}

#[test]
fn law_7_no_clock_locks_anybody_out_for_longer_than_the_rule_could() {
    everywhere((histories(), 0_u64..), |engine, ((limit, begin, past, _), back)| {
        let (subject, now) = lived(engine, limit.clone(), begin, &past);
        let longest = micros(limit.longest_reset());
        let then = now.saturating_sub(back % (4 * longest + 1));
        let before = subject.peek(0, now).remaining;
        let decision = subject.acquire(1, then);
        prop_assert!(decision.remaining <= before, "time ran backwards and refilled");
        prop_assert!(decision.reset_after_us <= 2 * longest);
        if let Retry::AfterUs(wait) = decision.retry {
            prop_assert!(wait <= 2 * longest);
            prop_assert!(subject.acquire(1, then + wait).allowed);
        }
        Ok(())
    });
}

#[test]
fn law_8_a_coarse_tick_is_a_divisor_and_every_product_is_exact() {
    everywhere(any_limit(), |_, limit| {
        use crate::oracle::Spec;
        let [rate, period, capacity, debt] =
            [limit.rate(), micros(limit.period()), limit.capacity(), limit.max_debt()].map(u128::from);
        let tick = u128::from(micros(limit.tick()));
        let shared = gcd(rate, period);
        let product = |tick: u128| match spec(&limit) {
            Spec::TokenBucket { .. } | Spec::Gcra { .. } => {
                let (rate, period) = (rate / shared, period / shared);
                (period % tick == 0).then(|| (capacity + debt + 1) * (period / tick) + rate)
            }
            Spec::SlidingWindow { .. } => (period % tick == 0).then(|| (rate + 1) * (period / tick)),
            _ => Some(0),
        };
        let fits = |tick| product(tick).is_some_and(|product| product <= 1 << 53);
        prop_assert!(fits(tick));
        prop_assert!((1..tick).all(|finer| !fits(finer)), "a finer tick would do");
        Ok(())
    });
}

fn gcd(a: u128, b: u128) -> u128 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[test]
fn law_9_a_changed_rule_keeps_what_was_used() {
    let cases = (two_limits(), beginning(), steps(1..=10), steps(1..=10));
    everywhere(cases, |engine, ((limit, other), begin, past, future)| {
        let (before, mut now) = lived(engine, limit.clone(), begin, &past);
        let mut oracle = oracle(&limit);
        let mut then = begin;
        let replay = engine.subject(limit);
        for step in &past {
            let (cost, at) = step.aim(&replay, then);
            replay.acquire(cost, at);
            oracle.acquire(cost, at);
            then = at;
        }
        oracle.change(spec(&other));
        let after = before.changed(other);
        for step in future {
            let (cost, at) = step.aim(&after, now);
            prop_assert_eq!(after.peek(cost, at), oracle.peek(cost, at));
            prop_assert_eq!(after.acquire(cost, at), oracle.acquire(cost, at));
            now = at;
        }
        Ok(())
    });
}

#[test]
fn law_9_at_the_same_instant_units_taken_stay_taken() {
    let cases = (two_limits(), beginning(), 1_u64..=100);
    everywhere(cases, |engine, ((limit, other), now, part)| {
        // On a tick of both: a state's time is that of its own limit's clock.
        let now = now - now % (micros(limit.tick()) * micros(other.tick()));
        let before = engine.subject(limit.clone());
        let units = (limit.capacity() / 100 * part).max(1).min(limit.capacity());
        prop_assert!(before.acquire(units, now).allowed);
        let after = before.changed(other.clone());
        let left = after.peek(0, now);
        prop_assert_eq!(left.remaining, other.capacity().saturating_sub(units));
        prop_assert!(left.reset_after_us <= micros(other.longest_reset()) + micros(limit.tick()));
        Ok(())
    });
}

#[test]
fn law_10_an_entry_one_window_old_no_longer_counts() {
    everywhere((any_limit(), beginning()), |engine, (limit, now)| {
        if !matches!(spec(&limit), crate::oracle::Spec::SlidingLog { .. }) {
            return Ok(());
        }
        let period = micros(limit.period());
        let subject = engine.subject(limit.clone());
        prop_assert!(subject.acquire(limit.rate(), now).allowed);
        prop_assert_eq!(subject.peek(1, now + period - 1).remaining, 0);
        prop_assert_eq!(subject.peek(1, now + period).remaining, limit.rate());
        Ok(())
    });
}
