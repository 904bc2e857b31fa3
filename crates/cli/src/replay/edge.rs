//! The most units that a rule admitted within any period: up to twice its rate at the edge of a fixed window, and never
//! more than the rate with a log. It is exact, from the units admitted within the last period.

use std::collections::{HashMap, VecDeque};

use serde::Serialize;
use tollgate::Rule;

use crate::output::micros;

/// For each limit that has a period. The limits of a rule admit the same units, since they decide together.
#[derive(Debug)]
pub(crate) struct Edges {
    limits: Vec<Edge>,
}

#[derive(Debug)]
struct Edge {
    period_us: u64,
    rate: u64,
    keys: HashMap<Vec<u8>, Recent>,
    most: u64,
}

/// What was admitted for a key within the last period.
#[derive(Debug, Default)]
struct Recent {
    admitted: VecDeque<(u64, u64)>,
    units: u64,
    /// The most entries it has had at once.
    most_entries: usize,
}

/// The most units admitted within a period, and the rate per that period.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Most {
    pub(crate) units: u64,
    pub(crate) rate: u64,
    pub(crate) period_us: u64,
}

impl Edges {
    pub(crate) fn of(rule: &Rule) -> Self {
        // Permits come back, so they have no rate.
        let limits = rule.limits().filter(|limit| !limit.algorithm().holds()).map(|limit| Edge {
            period_us: micros(limit.period()),
            rate: limit.rate(),
            keys: HashMap::new(),
            most: 0,
        });
        Self { limits: limits.collect() }
    }

    /// Notes units that were admitted, no earlier than those before.
    pub(crate) fn note(&mut self, key: &[u8], t_us: u64, units: u64) {
        if units == 0 {
            return;
        }
        for limit in &mut self.limits {
            let period_us = limit.period_us;
            let most = match limit.keys.get_mut(key) {
                Some(recent) => recent.note(t_us, units, period_us),
                None => limit.keys.entry(key.to_vec()).or_default().note(t_us, units, period_us),
            };
            limit.most = limit.most.max(most);
        }
    }

    /// The maximum of the limit whose rate was exceeded most.
    pub(crate) fn most(&self) -> Option<Most> {
        let most = |limit: &Edge| Most { units: limit.most, rate: limit.rate, period_us: limit.period_us };
        self.limits.iter().map(most).max_by(|one, other| one.times().total_cmp(&other.times()))
    }

    /// The most entries of a key within a period, of the limit at this place among those with a period.
    pub(crate) fn entries(&self, place: usize, key: &[u8]) -> usize {
        let recent = self.limits.get(place).and_then(|limit| limit.keys.get(key));
        recent.map_or(0, |recent| recent.most_entries)
    }
}

impl Most {
    /// The multiple of the rate.
    pub(crate) fn times(self) -> f64 {
        self.units as f64 / self.rate.max(1) as f64
    }
}

impl Recent {
    /// The units within the period that ends now. An entry exactly a period old no longer counts.
    fn note(&mut self, t_us: u64, units: u64, period_us: u64) -> u64 {
        while let Some(&(_, old)) = self.admitted.front().filter(|(at, _)| t_us.saturating_sub(*at) >= period_us) {
            self.admitted.pop_front();
            self.units -= old;
        }
        self.units += units;
        self.admitted.push_back((t_us, units));
        self.most_entries = self.most_entries.max(self.admitted.len());
        self.units
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rule_arguments::subject_of;

    const SECOND: u64 = 1_000_000;

    fn edges(rule: &str) -> Edges {
        Edges::of(&subject_of(rule).unwrap().rule)
    }

    #[test]
    fn the_most_of_any_period_is_found_as_by_trying_each() {
        let mut random = fastrand::Rng::with_seed(11);
        for _ in 0..50 {
            let mut times: Vec<_> = (0..60).map(|_| random.u64(0..200)).collect();
            times.sort_unstable();
            let admitted: Vec<_> = times.into_iter().map(|at| (at, random.u64(0..4))).collect();
            let mut edges = edges("fixed-window 10/20us");
            admitted.iter().for_each(|(at, units)| edges.note(b"k", *at, *units));
            let within = |from: u64| {
                admitted.iter().filter(|(at, _)| (from..from + 20).contains(at)).map(|(_, units)| units).sum::<u64>()
            };
            assert_eq!(edges.most().unwrap().units, (0..200).map(within).max().unwrap());
        }
    }

    #[test]
    fn keys_are_apart_and_an_entry_a_period_old_no_longer_counts() {
        let mut edges = edges("fixed-window 2/1m");
        for (key, second) in [(b"a", 0), (b"a", 59), (b"b", 59), (b"a", 60)] {
            edges.note(key, second * SECOND, 1);
        }
        assert_eq!(edges.most(), Some(Most { units: 2, rate: 2, period_us: 60 * SECOND }));
        assert_eq!((edges.entries(0, b"a"), edges.entries(0, b"b"), edges.entries(0, b"c")), (2, 1, 0));
    }

    #[test]
    fn of_several_limits_the_one_that_was_exceeded_most_counts_and_permits_have_no_period() {
        let mut both = edges("gcra 10/1s, fixed-window 20/1m");
        (0..30).for_each(|second| both.note(b"k", second * SECOND, 1));
        assert_eq!(both.most().map(|most| (most.units, most.rate)), Some((30, 20)));
        assert_eq!(edges("concurrency 2 ttl 1s").most(), None);
    }
}
