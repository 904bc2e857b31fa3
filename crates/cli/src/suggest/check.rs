//! Replays the suggestions with the limiter's own scripts before they are printed.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Result, anyhow, bail};
use tollgate::{Clock, Embedded, Limiter, Rule};

use super::meter::State;
use super::spool::{Request, Spool};
use super::suggestion::{Checked, Kind, Suggestion};
use super::traffic::{Group, Key};
use crate::escape::shown;
use crate::output::timestamp;

/// About how many decisions all checks together may take: some seconds.
const DECISIONS: u64 = 500_000;
/// Up to this many requests, the recommended limits are checked in full.
const FEW: u64 = 200_000;

const FAULT: &str = "please report this as a bug in tollgate";

/// The requests of a key that are replayed under a suggestion.
struct Replayed {
    suggestion: usize,
    state: State,
    /// How many of its requests remain to be replayed.
    left: u64,
    denied: u64,
    /// Whether these are all requests of the key.
    whole: bool,
}

/// The keys that one thread replays; keys are independent.
#[derive(Default)]
struct Share {
    replayed: HashMap<u32, Vec<Replayed>>,
    requests: Vec<Request>,
}

/// More threads than this would find little left to share.
const THREADS: usize = 8;

/// Replays the keys that each suggestion may hit, and compares the decision on each request. If all would take too
/// long, it replays those hit most, then the heaviest, each from its first request on, as far as the budget allows.
///
/// A key whose requests together fit at one instant can't be hit, so it needn't be replayed.
///
/// # Errors
///
/// A request was decided differently than computed.
pub(super) fn check(spool: &mut Spool, keys: &[Key], groups: &[Group], suggestions: &mut [Suggestion]) -> Result<()> {
    let share = DECISIONS / (suggestions.len() as u64).max(1);
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get().min(THREADS));
    let mut shares: Vec<_> = (0..threads).map(|_| Share::default()).collect();
    // How many requests of each key are replayed under any suggestion.
    let mut most: HashMap<u32, u64> = HashMap::new();
    for (at, suggestion) in suggestions.iter_mut().enumerate() {
        let in_full = suggestion.kind == Kind::Recommended && groups[suggestion.trial.group].requests <= FEW;
        for (key, left) in choose(suggestion, keys, if in_full { FEW } else { share }) {
            let state = suggestion.trial.meter.unused();
            let whole = left == keys[key as usize].requests;
            let replayed = Replayed { suggestion: at, state, left, denied: 0, whole };
            shares[key as usize % threads].replayed.entry(key).or_default().push(replayed);
            most.entry(key).and_modify(|most| *most = left.max(*most)).or_insert(left);
        }
    }
    for request in spool.requests()? {
        let request = request?;
        if let Some(left) = most.get_mut(&request.key).filter(|left| **left > 0) {
            *left -= 1;
            shares[request.key as usize % threads].requests.push(request);
        }
    }
    let suggestions = &*suggestions;
    std::thread::scope(|scope| {
        let replays = shares.into_iter().map(|share| scope.spawn(|| share.replay(keys, suggestions)));
        let replays: Vec<_> = replays.collect();
        let ended = |_| Err(anyhow!("the thread of a replay has ended"));
        replays.into_iter().try_for_each(|replay| replay.join().unwrap_or_else(ended))
    })
}

impl Share {
    fn replay(self, keys: &[Key], suggestions: &[Suggestion]) -> Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        runtime.block_on(self.replayed(keys, suggestions))
    }

    async fn replayed(self, keys: &[Key], suggestions: &[Suggestion]) -> Result<()> {
        let Self { mut replayed, requests } = self;
        let hits = |suggestion: &Suggestion| suggestion.hits.iter().map(|hit| (hit.key, hit.denied)).collect();
        let said: Vec<HashMap<u32, u64>> = suggestions.iter().map(hits).collect();
        // The clock follows the requests, which are in order, since scripts are fastest in the engine's own time.
        let (clock, mut now_us) = (Clock::new(UNIX_EPOCH), 0);
        let limiter = Limiter::new(Embedded::with_clock(clock.clone()));
        let rules = suggestions.iter().enumerate();
        let rules = rules.map(|(at, suggestion)| Rule::new(&format!("suggestion-{at}"), suggestion.limit.clone()));
        let rules = rules.collect::<Result<Vec<_>, _>>()?;
        for Request { t_us, key, cost } in requests {
            clock.advance(Duration::from_micros(t_us.saturating_sub(now_us)));
            now_us = t_us;
            for Replayed { suggestion, state, left, denied, .. } in replayed.get_mut(&key).into_iter().flatten() {
                if *left == 0 {
                    continue;
                }
                *left -= 1;
                let meter = &suggestions[*suggestion].trial.meter;
                let asks = meter.asks(state, t_us, cost);
                let said = asks <= suggestions[*suggestion].units();
                let bytes = keys[key as usize].bytes();
                let asked = tollgate::Request::new(bytes).cost(cost);
                if limiter.acquire(&rules[*suggestion], asked).await?.allowed != said {
                    let (limit, expected) = (&suggestions[*suggestion].limit, if said { "allowed" } else { "denied" });
                    let (key, at) = (shown(bytes), timestamp(t_us));
                    let why = "but a replay decides otherwise";
                    bail!("{limit}: {key:.60} should be {expected} at {at}, {why}; {FAULT}");
                }
                if said {
                    meter.take(state, t_us, cost);
                } else {
                    *denied += 1;
                }
            }
        }
        for (key, of_key) in replayed {
            for Replayed { suggestion, left, denied, whole, .. } in of_key {
                let (limit, said) = (&suggestions[suggestion].limit, said[suggestion].get(&key).copied().unwrap_or(0));
                if left > 0 || whole && denied != said {
                    let key = shown(keys[key as usize].bytes());
                    bail!("{limit}: a replay denies {denied} requests of {key:.60}, not {said}; {FAULT}");
                }
            }
        }
        Ok(())
    }
}

/// The keys to replay, and how many of their requests.
fn choose(suggestion: &mut Suggestion, keys: &[Key], most: u64) -> Vec<(u32, u64)> {
    let (group, units) = (suggestion.trial.group, suggestion.units());
    let may_be_hit = || (0_u32..).zip(keys).filter(|(_, key)| key.group == group && key.units > units);
    let count = may_be_hit().count() as u64;
    let chosen: Vec<_> = if may_be_hit().map(|(_, key)| key.requests).sum::<u64>() <= most {
        may_be_hit().map(|(key, is)| (key, is.requests)).collect()
    } else {
        let (mut seen, mut left) = (HashSet::new(), most);
        let hit = suggestion.hits.iter().map(|hit| hit.key);
        let heaviest = hit.chain(suggestion.trial.heaviest.first(usize::MAX)).filter(|key| seen.insert(*key));
        let some = heaviest.map_while(|key| {
            // No key takes all that is left.
            let requests = keys[key as usize].requests.min(left.div_ceil(4));
            left -= requests;
            (requests > 0).then_some((key, requests))
        });
        some.collect()
    };
    let whole = chosen.iter().filter(|(key, requests)| keys[*key as usize].requests == *requests).count() as u64;
    let requests = chosen.iter().map(|(_, requests)| requests).sum();
    suggestion.checked = Checked { requests, keys: chosen.len() as u64, left: count.saturating_sub(whole) };
    chosen
}
