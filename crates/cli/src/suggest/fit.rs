//! Finds the units that each trial needs.
//!
//! The counts are exact, as a limiter decides. If the keys hit are bounded, the answer is the smallest possible: a key
//! is hit if and only if the limit has fewer units than the most that any of its requests needs while none is denied.
//! If denied requests are bounded, each denial leaves room for later requests, so the heaviest keys are followed again
//! for each number of units tried. The answer keeps to the bound, and one unit less doesn't. Where every request costs
//! one unit, that is the smallest possible number; where costs differ, or windows slide, more units may deny more, and
//! a much smaller number may keep to the bound by chance.

use anyhow::Result;

use super::share::{Bound, Of};
use super::spool::{Spool, of_keys};
use super::traffic::{Group, Key};
use super::trial::{Heaviest, Member, Trial, follow};

/// Finds the units of each trial.
pub(super) fn fit(spool: &mut Spool, keys: &[Key], groups: &[Group], trials: &mut [Trial], bound: Bound) -> Result<()> {
    find_heaviest(spool, keys, groups, trials)?;
    let may_deny: Vec<_> = groups.iter().map(|group| bound.of(group.requests, group.keys)).collect();
    if bound.of == Of::Keys {
        for trial in trials {
            let units = trial.heaviest.but(may_deny[trial.group]).max(1);
            trial.units = Some(units).filter(|units| *units <= trial.meter.most());
        }
        return Ok(());
    }
    // A search starts above units that more keys exceed than requests may be denied, since each of these keys has at
    // least one denied.
    let mut searches: Vec<_> = trials.iter().map(|trial| Search::new(trial, may_deny[trial.group])).collect();
    let mut followed = vec![false; keys.len()];
    for (trial, search) in trials.iter().zip(&searches) {
        trial.heaviest.above(search.too_few + 1).for_each(|key| followed[key as usize] = true);
    }
    let mut followed = of_keys(spool, |key| followed[key as usize])?;
    while searches.iter().any(|search| search.next().is_some()) {
        let denied = denied(&mut followed, keys, trials, &searches)?;
        for (at, search) in searches.iter_mut().enumerate() {
            search.denied(denied[at], may_deny[trials[at].group]);
        }
    }
    for (trial, search) in trials.iter_mut().zip(searches) {
        trial.units = search.enough.filter(|_| search.next().is_none());
    }
    Ok(())
}

/// Finds the keys that need the most units in each trial.
fn find_heaviest(spool: &mut Spool, keys: &[Key], groups: &[Group], trials: &mut [Trial]) -> Result<()> {
    let mut of_group = vec![Vec::new(); groups.len()];
    trials.iter().enumerate().for_each(|(at, trial)| of_group[trial.group].push(at));
    let members = (0_u32..).zip(keys).flat_map(|(key, is)| of_group[is.group].iter().map(move |trial| (key, *trial)));
    let mut heaviest: Vec<Heaviest> = trials.iter().map(|trial| trial.heaviest.clone()).collect();
    follow(
        spool,
        keys,
        trials,
        members,
        || 0_u64,
        |trial, state, request, need| {
            let meter = &trials[trial].meter;
            *need = meter.asks(state, request.t_us, request.cost).max(*need);
            meter.take(state, request.t_us, request.cost);
        },
        |(key, trial), need| heaviest[trial].add(need, key),
    )?;
    for (trial, mut heaviest) in trials.iter_mut().zip(heaviest) {
        heaviest.end();
        trial.heaviest = heaviest;
    }
    Ok(())
}

/// How many requests each search's next units would deny.
fn denied(spool: &mut Spool, keys: &[Key], trials: &[Trial], searches: &[Search]) -> Result<Vec<u64>> {
    let mut members: Vec<Member> = Vec::new();
    for (at, (trial, search)) in trials.iter().zip(searches).enumerate() {
        members.extend(search.next().iter().flat_map(|units| trial.heaviest.above(*units)).map(|key| (key, at)));
    }
    members.sort_unstable();
    let units: Vec<_> = searches.iter().map(|search| search.next().unwrap_or_default()).collect();
    let mut denied = vec![0; trials.len()];
    follow(
        spool,
        keys,
        trials,
        members.into_iter(),
        || 0_u64,
        |trial, state, request, denied| {
            let meter = &trials[trial].meter;
            if meter.asks(state, request.t_us, request.cost) <= units[trial] {
                meter.take(state, request.t_us, request.cost);
            } else {
                *denied += 1;
            }
        },
        |(_, trial), of_key| denied[trial] += of_key,
    )?;
    Ok(denied)
}

/// A search for the least units that deny few enough requests.
#[derive(Clone, Copy, Debug)]
struct Search {
    /// The most units known to deny too many.
    too_few: u64,
    /// The fewest units known not to, if any.
    enough: Option<u64>,
    /// The most that fit.
    most: u64,
}

impl Search {
    fn new(trial: &Trial, may_deny: u64) -> Self {
        let (at_most, most) = (trial.heaviest.but(0).max(1), trial.meter.most());
        let too_few = (trial.heaviest.but(may_deny).max(1) - 1).min(most);
        Self { too_few, enough: Some(at_most).filter(|units| *units <= most), most }
    }

    /// The units to try next.
    fn next(&self) -> Option<u64> {
        match self.enough {
            Some(enough) => (enough - self.too_few > 1).then(|| self.too_few + (enough - self.too_few) / 2),
            None => (self.too_few < self.most).then_some(self.most),
        }
    }

    /// Notes how many requests these units deny.
    fn denied(&mut self, count: u64, may_deny: u64) {
        match self.next() {
            Some(units) if count <= may_deny => self.enough = Some(units),
            Some(units) => self.too_few = units,
            None => {}
        }
    }
}
