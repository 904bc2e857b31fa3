//! Limits under trial, and passes over the requests to find what each would do.

use std::cmp::Reverse;
use std::iter::Peekable;

use anyhow::Result;
use tollgate::Limit;

use super::meter::{Meter, State};
use super::spool::{Request, Spool};
use super::traffic::Key;

/// The most memory for states at once, in states without a log: some 100 MB. More keys take several passes.
const STATES: u64 = 1 << 21;

/// A limit whose burst, or rate, is to be found for the keys of one group.
#[derive(Clone, Debug)]
pub(super) struct Trial {
    pub(super) group: usize,
    pub(super) meter: Meter,
    pub(super) heaviest: Heaviest,
    /// The units found; `None` if no valid number denies so little.
    pub(super) units: Option<u64>,
}

/// The keys that need the most units, and how many they need in order never to be denied.
#[derive(Clone, Debug)]
pub(super) struct Heaviest {
    /// How many are kept.
    most: usize,
    needs: Vec<(u64, u32)>,
}

impl Trial {
    /// A trial of which so many keys may be hit; it keeps as many of the heaviest, and some more.
    pub(super) fn new(group: usize, meter: Meter, may_be_hit: u64) -> Self {
        Self { group, meter, heaviest: Heaviest::new(may_be_hit), units: None }
    }

    /// The same trial without its keys.
    pub(super) fn bare(&self) -> Self {
        Self { meter: self.meter.clone(), heaviest: Heaviest::new(0), ..*self }
    }

    /// The limit that was found.
    pub(super) fn limit(&self) -> Option<Limit> {
        self.meter.limit(self.units?).ok()
    }
}

impl Heaviest {
    /// Keys kept beyond those that may be hit.
    const MORE: usize = 64;

    pub(super) fn new(may_be_hit: u64) -> Self {
        Self { most: usize::try_from(may_be_hit).unwrap_or(usize::MAX).saturating_add(Self::MORE), needs: Vec::new() }
    }

    pub(super) fn add(&mut self, need: u64, key: u32) {
        self.needs.push((need, key));
        if self.needs.len() >= self.most.saturating_add(self.most / 4).saturating_add(1024) {
            self.needs.select_nth_unstable_by_key(self.most, |(need, key)| (Reverse(*need), *key));
            self.needs.truncate(self.most);
        }
    }

    pub(super) fn end(&mut self) {
        self.needs.sort_unstable_by_key(|(need, key)| (Reverse(*need), *key));
        self.needs.truncate(self.most);
    }

    /// The units with which all but so many keys are never denied.
    pub(super) fn but(&self, keys: u64) -> u64 {
        usize::try_from(keys).ok().and_then(|at| self.needs.get(at)).map_or(0, |(need, _)| *need)
    }

    /// The keys that need more units than this, heaviest first: those that such a limit hits.
    pub(super) fn above(&self, units: u64) -> impl Iterator<Item = u32> + '_ {
        self.needs.iter().take_while(move |(need, _)| *need > units).map(|(_, key)| *key)
    }

    /// The heaviest keys, at most so many.
    pub(super) fn first(&self, count: usize) -> impl Iterator<Item = u32> + '_ {
        self.needs.iter().take(count).map(|(_, key)| *key)
    }
}

/// A key under a trial, by their numbers; sorted by key.
pub(super) type Member = (u32, usize);

/// Follows each member through its key's requests, from `start` on, and passes its final state to `end`.
pub(super) fn follow<S>(
    spool: &mut Spool,
    keys: &[Key],
    trials: &[Trial],
    members: impl Iterator<Item = Member>,
    start: impl Fn() -> S,
    mut step: impl FnMut(usize, &mut State, &Request, &mut S),
    mut end: impl FnMut(Member, S),
) -> Result<()> {
    let mut members = members.peekable();
    while let Some(some) =
        Some(Followed::next(&mut members, keys, trials, &start)).filter(|some| !some.states.is_empty())
    {
        let Followed { first, offsets, mut states } = some;
        for request in spool.requests()? {
            let request = request?;
            let at = request.key.checked_sub(first).map_or(usize::MAX, |at| at as usize);
            let Some((from, to)) = offsets.get(at).zip(offsets.get(at.wrapping_add(1))) else { continue };
            for (trial, _, state, told) in &mut states[*from as usize..*to as usize] {
                step(*trial, state, &request, told);
            }
        }
        states.into_iter().for_each(|(trial, key, _, told)| end((key, trial), told));
    }
    Ok(())
}

/// As many members as are followed in one pass.
struct Followed<S> {
    first: u32,
    /// Where the states of each key from the first on begin, and where the last one's end.
    offsets: Vec<u32>,
    states: Vec<(usize, u32, State, S)>,
}

impl<S> Followed<S> {
    fn next(
        members: &mut Peekable<impl Iterator<Item = Member>>,
        keys: &[Key],
        trials: &[Trial],
        start: impl Fn() -> S,
    ) -> Self {
        let first = members.peek().map_or(0, |(key, _)| *key);
        let (mut offsets, mut states, mut weight) = (Vec::new(), Vec::new(), 0);
        let end = |states: &Vec<_>| u32::try_from(states.len()).unwrap_or(u32::MAX);
        while let Some((key, _)) = members.peek().copied().filter(|_| weight < STATES) {
            offsets.resize((key - first) as usize + 1, end(&states));
            while let Some((_, trial)) = members.next_if(|(next, _)| *next == key) {
                weight += 1 + trials[trial].meter.most_entries(keys[key as usize].requests) / 4;
                states.push((trial, key, trials[trial].meter.unused(), start()));
            }
        }
        offsets.push(end(&states));
        Self { first, offsets, states }
    }
}
