//! What is found, against the oracle and every smaller number.

use std::collections::BTreeMap;

use proptest::prelude::*;
use tollgate::{Algorithm, Limit};
use tollgate_testing::oracle_spec::oracle;

use super::check::check;
use super::fit::fit;
use super::meter::Meter;
use super::share::{Bound, Of};
use super::suggestion::{Kind, Suggestion, find_hits};
use super::traffic::Traffic;
use super::trial::Trial;
use super::trial::follow;

type Trace = Vec<(u64, &'static str, u64)>;

const SECOND: u64 = 1_000_000;

/// Of few keys, within a few windows; `costs` says the most that a request takes.
fn traces(costs: u64) -> impl Strategy<Value = Trace> {
    let times = prop_oneof![0..4 * SECOND, (0..8_u64).prop_map(|half| half * SECOND / 2)];
    let cost = prop_oneof![4 => 1..=costs, 1 => 0..=costs];
    let cost = cost.prop_map(move |cost| if costs == 1 { 1 } else { cost });
    let request = (times, proptest::sample::select(vec!["a", "b", "c"]), cost);
    // As real ones, they begin at some time of day.
    let since = |mut trace: Trace| {
        trace.iter_mut().for_each(|(t_us, ..)| *t_us += 1_431_857_103_250_000);
        trace
    };
    proptest::collection::vec(request, 1..60).prop_map(since)
}

fn meters() -> impl Strategy<Value = Meter> {
    let bucket = (1..12_u64, prop_oneof![Just(SECOND), Just(700_000), Just(60 * SECOND)]);
    let bucket = bucket.prop_map(|(rate, period_us)| Meter::bucket(rate, period_us));
    let windows = vec![Algorithm::FixedWindow, Algorithm::SlidingWindow, Algorithm::SlidingLog];
    let window = (proptest::sample::select(windows), prop_oneof![Just(SECOND), Just(300_000), Just(3600 * SECOND)]);
    prop_oneof![
        bucket,
        window.prop_map(|(algorithm, period_us)| Meter::window(algorithm, period_us)),
        Just(Meter::of(&"fixed-window 1/1s start 250ms".parse().expect("a limit")).expect("a meter")),
    ]
}

/// By key: how many requests the oracle denies, and when first and last.
fn denied(limit: &Limit, trace: &Trace) -> BTreeMap<&'static str, (u64, u64, u64)> {
    let (mut trace, mut oracles, mut denied) = (trace.clone(), BTreeMap::new(), BTreeMap::new());
    trace.sort_by_key(|(t_us, ..)| *t_us);
    for (t_us, key, cost) in trace {
        if !oracles.entry(key).or_insert_with(|| oracle(limit)).acquire(cost, t_us).allowed {
            let (count, _, last) = denied.entry(key).or_insert((0, t_us, t_us));
            (*count, *last) = (*count + 1, t_us);
        }
    }
    denied
}

/// Whether the oracle denies no more than may be denied.
fn keeps(units: u64, meter: &Meter, trace: &Trace, of: Of, may_deny: u64) -> bool {
    let denied = denied(&meter.limit(units).expect("a limit"), trace);
    let count = if of == Of::Keys { denied.len() as u64 } else { denied.values().map(|(count, ..)| count).sum() };
    count <= may_deny
}

fn found(trace: &Trace, meter: &Meter, bound: Bound) -> (Traffic, Trial) {
    let mut traffic = Traffic::of(trace);
    let may_deny = bound.of(traffic.groups[0].requests, traffic.groups[0].keys);
    let mut trials = [Trial::new(0, meter.clone(), may_deny)];
    fit(&mut traffic.spool, &traffic.keys, &traffic.groups, &mut trials, bound).expect("fitted");
    let [trial] = trials;
    (traffic, trial)
}

fn bounds() -> impl Strategy<Value = Bound> {
    let shares = proptest::sample::select(vec!["0%", "3%", "10%", "34%", "70%", "100%"]);
    (shares, any::<bool>()).prop_map(|(share, keys)| Bound {
        share: share.parse().expect("a share"),
        of: if keys { Of::Keys } else { Of::Requests },
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_found_keeps_to_the_bound_and_one_unit_less_does_not(
        trace in traces(4), meter in meters(), bound in bounds(),
    ) {
        let (traffic, trial) = found(&trace, &meter, bound);
        let may_deny = bound.of(traffic.groups[0].requests, traffic.groups[0].keys);
        let units = trial.units.expect("small numbers fit");
        prop_assert!(keeps(units, &meter, &trace, bound.of, may_deny), "{units}");
        prop_assert!(units == 1 || !keeps(units - 1, &meter, &trace, bound.of, may_deny), "{units}");
    }

    #[test]
    fn no_smaller_number_keeps_to_the_bound_where_each_request_costs_one_unit_or_keys_are_bounded(
        trace in traces(1), costly in traces(4), meter in meters(), bound in bounds(),
    ) {
        let trace = if bound.of == Of::Keys { costly } else { trace };
        // What a sliding window admitted weighs on the next: more units may deny more.
        prop_assume!(bound.of == Of::Keys || meter.algorithm != Algorithm::SlidingWindow);
        let (traffic, trial) = found(&trace, &meter, bound);
        let may_deny = bound.of(traffic.groups[0].requests, traffic.groups[0].keys);
        let least = (1..).find(|units| keeps(*units, &meter, &trace, bound.of, may_deny));
        prop_assert_eq!(trial.units, least);
    }

    #[test]
    fn who_is_hit_and_when_is_what_the_oracle_and_a_replay_say(
        trace in traces(4), meter in meters(), bound in bounds(),
    ) {
        let (mut traffic, trial) = found(&trace, &meter, bound);
        let mut suggestions = [Suggestion::of(trial, Kind::Recommended).expect("it fits")];
        find_hits(&mut traffic.spool, &traffic.keys, &mut suggestions).expect("found");
        check(&mut traffic.spool, &traffic.keys, &traffic.groups, &mut suggestions).expect("confirmed");
        let [suggestion] = &suggestions;
        prop_assert_eq!(suggestion.checked.left, 0);
        let name = |key: u32| std::str::from_utf8(traffic.keys[key as usize].bytes()).expect("UTF-8");
        let told: BTreeMap<_, _> =
            suggestion.hits.iter().map(|hit| (name(hit.key), (hit.denied, hit.first_us, hit.last_us))).collect();
        prop_assert_eq!(&told, &denied(&suggestion.limit, &trace));
        prop_assert_eq!(suggestion.denied, told.values().map(|(count, ..)| count).sum::<u64>());
    }
}

#[test]
fn what_a_replay_does_not_confirm_is_an_error() {
    let trace: Trace = (0..30).map(|at| (at * 10, "a", 1)).collect();
    let bound = Bound { share: "10%".parse().unwrap(), of: Of::Requests };
    for wrong in [0, 1] {
        let (mut traffic, trial) = found(&trace, &Meter::bucket(5, SECOND), bound);
        let mut suggestions = [Suggestion::of(trial, Kind::Recommended).unwrap()];
        find_hits(&mut traffic.spool, &traffic.keys, &mut suggestions).unwrap();
        suggestions[0].hits[0].denied += wrong;
        let checked = check(&mut traffic.spool, &traffic.keys, &traffic.groups, &mut suggestions);
        assert_eq!(checked.is_err(), wrong > 0, "{checked:?}");
    }
}

#[test]
fn the_most_that_fits_counts_in_microseconds_and_one_more_does_not() {
    let buckets = [(1, SECOND), (7, 3600 * SECOND), (1_000_000, 60 * SECOND), (1, 86_400 * SECOND)];
    let buckets = buckets.map(|(rate, period_us)| Meter::bucket(rate, period_us));
    let windows = [SECOND, 3600 * SECOND].map(|period_us| Meter::window(Algorithm::SlidingWindow, period_us));
    for meter in buckets.into_iter().chain(windows) {
        let fits = |units| meter.limit(units).is_ok_and(|limit| limit.tick().as_micros() == 1);
        assert!(fits(meter.most()), "{meter:?}");
        assert!(!fits(meter.most() + 1), "{meter:?}");
    }
    assert!(Meter::window(Algorithm::SlidingLog, SECOND).limit(10_000).is_ok());
    assert!(Meter::window(Algorithm::SlidingLog, SECOND).limit(10_001).is_err());
}

/// Costs and times at the ends of what a record may say.
#[test]
fn extreme_numbers_neither_overflow_nor_fit() {
    let most = (1 << 53) - 1;
    let trace: Trace = vec![(0, "a", most), (1, "a", most), (1 << 52, "a", most), (1 << 52, "b", 1)];
    for algorithm in [Algorithm::FixedWindow, Algorithm::SlidingWindow, Algorithm::SlidingLog] {
        for share in ["0%", "100%"] {
            for of in [Of::Keys, Of::Requests] {
                let bound = Bound { share: share.parse().unwrap(), of };
                let (_, trial) = found(&trace, &Meter::window(algorithm, SECOND), bound);
                assert_eq!(trial.units, (share == "100%").then_some(1), "{algorithm}");
                let (_, trial) = found(&trace, &Meter::bucket(7, 3600 * SECOND), bound);
                assert_eq!(trial.units, (share == "100%").then_some(1));
            }
        }
    }
}

/// More keys than are followed at once, since each may hold a whole log.
#[test]
fn keys_with_long_logs_are_followed_in_several_passes() {
    let keys: Vec<&'static str> = (0..900).map(|key| &*key.to_string().leak()).collect();
    let trace: Trace = (0..10_u64).flat_map(|at| keys.iter().map(move |key| (at, *key, 1))).collect();
    let (mut traffic, trial) = found(
        &trace,
        &Meter::window(Algorithm::SlidingLog, SECOND),
        Bound { share: "0%".parse().unwrap(), of: Of::Keys },
    );
    assert_eq!(trial.units, Some(10));
    // As if each had ten thousand.
    traffic.keys.iter_mut().for_each(|key| key.requests = 10_000);
    let (mut ended, mut steps) = (Vec::new(), 0);
    let members = (0..900).map(|key| (key, 0));
    let Traffic { spool, keys, .. } = &mut traffic;
    follow(spool, keys, &[trial], members, || (), |_, _, _, ()| steps += 1, |(key, _), ()| ended.push(key)).unwrap();
    assert_eq!((ended, steps), ((0..900).collect(), 9000), "each key once");
}
