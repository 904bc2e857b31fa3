//! Every law of a decision, as a property, on both engines: the embedded one tries many histories, Redis some.

use std::time::Duration;

use proptest::prelude::*;
use tollgate::{Algorithm, CalendarUnit, Limit, MaxDebt, OnChange, Operation};
use tollgate_testing::engines::{Engine, Micros, micros, on_both_engines};
use tollgate_testing::histories::{Compared, any_change, beginning, histories, lived, steps};
use tollgate_testing::limits::{any_limit, two_limits};
use tollgate_testing::oracle::{self, Answer, Retry};
use tollgate_testing::oracle_spec::{oracle, spec};

#[test]
fn every_answer_is_the_oracles() {
    on_both_engines((any_limit(), beginning(), steps(1..=25)), |engine, (limit, begin, steps)| {
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
    on_both_engines(histories(), |engine, (limit, begin, past, next)| {
        let (subject, now) = lived(engine, limit, begin, &past);
        let (cost, then) = next.aim(&subject, now);
        let is_ahead = |(name, value): &(_, i64)| matches!(*name, "time_us" | "newest_us") && *value > then as i64;
        let ahead = subject.state(then).iter().any(is_ahead);
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
    on_both_engines(histories(), |engine, (limit, begin, past, next)| {
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
    on_both_engines(histories(), |engine, (limit, begin, past, next)| {
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
    on_both_engines((histories(), steps(1..=6)), |engine, ((limit, begin, past, next), future)| {
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
    on_both_engines((histories(), 1_u64..), |engine, ((limit, begin, past, _), more)| {
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
    on_both_engines((any_limit(), beginning(), steps(1..=40)), |engine, (limit, begin, steps)| {
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
    use tollgate_testing::oracle::Spec;
    let span = u128::from(end - begin);
    let [rate, period, capacity] = [limit.rate(), micros(limit.period()), limit.capacity()].map(u128::from);
    match spec(limit) {
        Spec::TokenBucket { .. } => capacity + span * rate / period,
        // Each boundary within the span adds the rate.
        Spec::FixedWindow { .. } => capacity + (span / period + 1) * rate,
        // None is shorter by more than an hour or a day left out beside it.
        Spec::CalendarWindow { .. } => {
            let shortest = u128::from(micros(limit.period())).min(365 * 86_400_000_000) * 9 / 10;
            (span / shortest + 2) * rate
        }
        Spec::SlidingLog { .. } | Spec::Concurrency { .. } => (span / period + 1) * rate,
        // The count before is taken to have come evenly: two windows' worth at worst.
        Spec::SlidingWindow { .. } => (span / period + 2) * rate,
    }
}

#[test]
fn law_7_no_clock_locks_anybody_out_for_longer_than_the_rule_could() {
    on_both_engines((histories(), 0_u64..), |engine, ((limit, begin, past, _), back)| {
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
    on_both_engines(any_limit(), |_, limit| {
        use tollgate_testing::oracle::Spec;
        let [rate, period, capacity, debt] =
            [limit.rate(), micros(limit.period()), limit.capacity(), limit.max_debt()].map(u128::from);
        let tick = u128::from(micros(limit.tick()));
        let shared = gcd(rate, period);
        let product = |tick: u128| match spec(&limit) {
            Spec::TokenBucket { .. } => {
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

/// The tick of the new numbers begins with the window, in which the previous one weighed less a microsecond later. What
/// is used there is what a clock far behind finds.
#[test]
fn law_9_a_changed_tick_and_a_clock_far_behind() {
    let weeks = Duration::from_secs(4 * 7 * 86_400);
    let limit = |rate| Limit::builder(Algorithm::SlidingWindow, rate, weeks).build().expect("a limit");
    for engine in [Engine::embedded(), Engine::redis()] {
        let mut oracle = oracle(&limit(2));
        let before = engine.subject(limit(2));
        let window = micros(weeks) * 465;
        for (cost, now) in [(2, window), (1, window + micros(weeks) + 1)] {
            assert_eq!(before.acquire(cost, now), oracle.acquire(cost, now));
        }
        oracle.change(spec(&limit(3723)));
        let after = before.changed(limit(3723));
        let now = window - micros(weeks) * 2;
        assert_eq!(after.peek(1, now), oracle.peek(1, now));
        assert_eq!(after.acquire(1, now), oracle.acquire(1, now));
    }
}

#[test]
fn law_9_a_changed_rule_keeps_what_was_used() {
    let cases = (two_limits(), beginning(), steps(1..=10), steps(1..=10));
    on_both_engines(cases, |engine, ((limit, other), begin, past, future)| {
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
    on_both_engines(cases, |engine, ((limit, other), now, part)| {
        // On a tick of both: a state's time is that of its own limit's clock.
        let now = now - now % (micros(limit.tick()) * micros(other.tick()));
        let before = engine.subject(limit.clone());
        let units = (limit.capacity() / 100 * part).max(1).min(limit.capacity());
        prop_assert!(before.acquire(units, now).allowed);
        let after = before.changed(other.clone());
        let left = after.peek(0, now);
        prop_assert_eq!(left.remaining, other.capacity().saturating_sub(units));
        let longest = limit.longest_reset().max(other.longest_reset());
        prop_assert!(left.reset_after_us <= micros(longest) + micros(limit.tick()));
        Ok(())
    });
}

#[test]
fn law_10_an_entry_one_window_old_no_longer_counts() {
    on_both_engines((any_limit(), beginning()), |engine, (limit, now)| {
        if !matches!(spec(&limit), tollgate_testing::oracle::Spec::SlidingLog { .. }) {
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

/// Two limits whose numbers are as large as they may be, or nearly, often of the same rate.
fn limits_at_the_bounds(algorithm: Algorithm) -> impl Strategy<Value = (Limit, Limit)> {
    let most = if algorithm == Algorithm::SlidingLog { 30 } else { 1 << 53 };
    let rate = move || prop_oneof![6 => 3..40_u64, 1 => large(1 << 53)].prop_map(move |rate| rate.min(most));
    let days = || (1..400_u64).prop_map(|days| days * 86_400_000_000);
    let period = move || prop_oneof![5 => 1..40_u64, 1 => large(1 << 51), 1 => days()];
    let numbers = || {
        let capacity = prop_oneof![2 => Just(0), 2 => 1..40_u64, 1 => large(1 << 53)];
        let units = large(1 << 53).prop_map(MaxDebt::Units);
        (capacity, prop_oneof![4 => Just(MaxDebt::Unlimited), 1 => Just(MaxDebt::Units(0)), 1 => units], 0..3_u64)
    };
    let cases = (rate(), period(), numbers(), proptest::option::of((rate(), period())), numbers());
    cases.prop_filter_map("can be built", move |(rate, period, numbers, other, others)| {
        let (other_rate, other_period) = other.unwrap_or((rate, period));
        let first = at_the_bounds(algorithm, rate, period, numbers)?;
        Some((first, at_the_bounds(algorithm, other_rate, other_period, others)?))
    })
}

/// The limit with as much of the capacity and the debt as fits, or some units of the debt less.
fn at_the_bounds(algorithm: Algorithm, rate: u64, period: u64, numbers: (u64, MaxDebt, u64)) -> Option<Limit> {
    if algorithm == Algorithm::CalendarWindow {
        return Limit::calendar(rate, CalendarUnit::Month).tz("Australia/Lord_Howe").build().ok();
    }
    let of = |capacity: u64, debt: MaxDebt| {
        let limit = Limit::builder(algorithm, rate, Duration::from_micros(period));
        if algorithm.reserves() { limit.capacity(capacity).max_debt(debt).build() } else { limit.build() }
    };
    let (capacity, debt, less) = numbers;
    let (capacity, limit) =
        (0..54).find_map(|halved| Some((capacity >> halved, of(capacity >> halved, debt).ok()?)))?;
    match limit.max_debt().saturating_sub(less) {
        0 => Some(limit),
        debt => of(capacity, MaxDebt::Units(debt)).ok(),
    }
}

/// Numbers of any size up to this, most of them near a power of two.
fn large(most: u64) -> impl Strategy<Value = u64> {
    let bits = most.ilog2();
    let near = (0..=bits, 0..4_u64).prop_map(|(bit, off)| (1 << bit) + 1 - off.min(1 << bit));
    prop_oneof![2 => near, 1 => (0..=bits, any::<u64>()).prop_map(|(bit, noise)| noise >> (63 - bit))]
        .prop_map(move |number| number.clamp(1, most))
}

#[derive(Clone, Copy, Debug)]
enum Clock {
    Stay,
    Forward(u64),
    /// A little, or by any time.
    Back(u64),
    Retry(u64),
    Reset(u64),
}

#[derive(Clone, Copy, Debug)]
enum Units {
    Of(u64),
    /// What the rule could lend at most, and so many more or less.
    Span(i64),
    /// What remains, and so many more.
    Remaining(u64),
}

/// None changes the rule's numbers.
fn calls_at_the_bounds() -> impl Strategy<Value = Vec<(Option<Operation>, Clock, Units)>> {
    let operation = prop_oneof![
        2 => Just(Some(Operation::Acquire)), 3 => Just(Some(Operation::Reserve)), 1 => Just(Some(Operation::AtMost)),
        1 => Just(Some(Operation::Refund)), 2 => Just(Some(Operation::Penalty)), 1 => Just(Some(Operation::Block)),
        2 => Just(None),
    ];
    let clock = prop_oneof![
        3 => Just(Clock::Stay),
        2 => large(1 << 50).prop_map(Clock::Forward),
        2 => (1..10_u64).prop_map(Clock::Back),
        1 => large(1 << 50).prop_map(Clock::Back),
        3 => (0..2_u64).prop_map(Clock::Retry),
        1 => (0..2_u64).prop_map(Clock::Reset),
    ];
    let units = prop_oneof![
        2 => Just(Units::Of(1 << 53)),
        1 => large(1 << 53).prop_map(Units::Of),
        2 => (1..4_u64).prop_map(Units::Of),
        4 => (-9..2_i64).prop_map(Units::Span),
        2 => (0..2_u64).prop_map(Units::Remaining),
    ];
    proptest::collection::vec((operation, clock, units), 1..=40)
}

/// The deepest debts and penalties, changing numbers, and clocks that step back a little.
#[test]
fn law_8_every_operation_is_exact_up_to_the_largest_numbers() {
    let algorithms: Vec<_> = Algorithm::all().filter(|algorithm| !algorithm.holds()).collect();
    let limits = proptest::sample::select(algorithms).prop_flat_map(limits_at_the_bounds);
    let block_for = proptest::option::weighted(0.3, large(1 << 51));
    let cases = (limits, calls_at_the_bounds(), any_change(), any::<bool>(), block_for);
    on_both_engines(cases, |engine, (limits, calls, change, counting, block_for)| {
        let mut compared = Compared::new(engine, limits, change, counting, block_for);
        let mut now: Micros = 1 << 50;
        for (operation, clock, units) in calls {
            let limit = compared.subject.limit();
            let (algorithm, span) = (limit.algorithm(), limit.capacity() + limit.max_debt());
            let oracle = &compared.oracle;
            let cost = match units {
                Units::Of(units) => units,
                Units::Span(more) => span.saturating_add_signed(more),
                Units::Remaining(more) => oracle.peek(0, now).remaining + more,
            };
            let cost = cost.min(1 << 53);
            let then = match (clock, oracle.peek(cost, now)) {
                (Clock::Forward(by), _) => now + by,
                (Clock::Back(by), _) => now.saturating_sub(by),
                (Clock::Retry(early), Answer { retry: Retry::AfterUs(wait), .. }) => now + wait - early,
                (Clock::Reset(early), Answer { reset_after_us: wait, .. }) if wait > 0 => now + wait - early,
                _ => now,
            };
            now = if then < 1 << 51 { then } else { now };
            match operation {
                // Of those that can't reserve, more acquires.
                Some(Operation::Reserve) if !algorithm.reserves() => compared.call(Operation::Acquire, cost, 0, now)?,
                Some(operation) => compared.call(operation, cost, cost % (1 << 51), now)?,
                None => {
                    compared.change();
                    prop_assert_eq!(compared.subject.peek(1, now), compared.oracle.peek(1, now), "after a change");
                }
            }
        }
        Ok(())
    });
}

/// A state of another version that lies decades ahead, as a denied call leaves it.
#[test]
fn law_9_a_denied_call_leaves_a_state_far_ahead_to_the_version_that_wrote_it() {
    use Operation::{Acquire, AtMost};
    let month = |units| {
        let limit = Limit::calendar(units, CalendarUnit::Month).tz("Australia/Lord_Howe").build();
        limit.expect("within the bounds")
    };
    let begin = 1 << 50;
    let (later, earlier) = (begin + 877_136_714, begin + 877_136_714 - (1 << 49));
    let steps = [
        (Some(AtMost), 1 << 53, begin),
        (None, 0, begin + 1),
        (Some(Acquire), 1, later),
        (None, 0, earlier),
        (Some(Acquire), 6, earlier),
        (None, 0, earlier),
    ];
    for engine in [Engine::embedded(), Engine::redis()] {
        let mut compared =
            Compared::new(&engine, (month(5), month(6)), (OnChange::Reset, oracle::Change::Reset), false, None);
        for (operation, cost, at) in steps {
            match operation {
                Some(operation) => compared.call(operation, cost, cost, at).expect("the same answer"),
                None => compared.change(),
            }
            assert_eq!(compared.subject.peek(1, at), compared.oracle.peek(1, at), "{operation:?} {cost} at {at}");
        }
    }
}

/// Rules so far apart in size that what one version can count as taken exceeds the other's debt.
#[test]
fn law_9_two_versions_at_the_bounds_are_charged_and_forgotten_alike() {
    use Operation::{Acquire, AtMost, Block, Penalty, Reserve};
    let bucket = |capacity, debt| {
        let limit = Limit::builder(Algorithm::TokenBucket, 70_368_744_177_662, Duration::from_hours(24));
        limit.capacity(capacity).max_debt(MaxDebt::Units(debt)).build().expect("within the bounds")
    };
    let [large, small] = [bucket(137_438_953_473, 2_748_779_067), bucket(0, 207_684)];
    let (span, most, begin) = (large.capacity() + large.max_debt(), 1 << 53, 1 << 50);
    // Operations, or changes of the rule, with the cost and the time.
    let long_reset = [
        (Some(AtMost), span, begin - 1),
        (None, 0, begin - 1),
        (Some(Penalty), most, begin + 1_074_424_201),
        (None, 0, begin + 1_074_424_200),
    ];
    let no_room = [
        (None, 0, begin),
        (Some(Penalty), 207_684, begin),
        (Some(Penalty), 207_684, begin),
        (None, 0, begin),
        (Some(Acquire), 1, begin - 3),
        (None, 0, begin - 3),
        (Some(Penalty), most, begin - 260),
        (None, 0, begin - 260),
    ];
    let far_ahead = [
        (None, 0, begin),
        (Some(Block), 2, begin),
        (None, 0, begin),
        (Some(Acquire), span, begin - 268_435_457),
        (Some(Reserve), span, begin - 268_435_460),
        (None, 0, begin - 268_435_461),
    ];
    for engine in [Engine::embedded(), Engine::redis()] {
        for steps in [&long_reset[..], &no_room, &far_ahead] {
            let (keep_used, limits) = ((OnChange::KeepUsed, oracle::Change::KeepUsed), (large.clone(), small.clone()));
            let mut compared = Compared::new(&engine, limits, keep_used, false, None);
            for (operation, cost, at) in steps {
                match operation {
                    Some(operation) => compared.call(*operation, *cost, *cost, *at).expect("the same answer"),
                    None => compared.change(),
                }
                assert_eq!(compared.subject.peek(1, *at), compared.oracle.peek(1, *at), "{operation:?} {cost} at {at}");
            }
        }
    }
}
