//! Replays what is suggested by the limiter's own scripts, before it is printed.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Result, bail};
use tollgate::{Embedded, Limiter, Request, Rule};

use super::spool::Spool;
use super::suggestion::{Checked, Suggestion};
use super::traffic::Key;
use crate::escape::shown;

/// About how many decisions all checks together may take: some seconds.
const DECISIONS: u64 = 500_000;

/// What was decided for a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Decided {
    denied: u64,
    first_us: u64,
    last_us: u64,
}

/// Replays the keys that each suggestion may hit: all of them, or where that would take long those that are hit most,
/// and then the heaviest.
///
/// A key that takes no more in all than a limit admits at one instant can't be hit, so it needn't be replayed.
///
/// # Errors
///
/// A key would be denied at other requests than was said.
pub(super) async fn check(spool: &mut Spool, keys: &[Key], suggestions: &mut [Suggestion]) -> Result<()> {
    let most = DECISIONS / (suggestions.len() as u64).max(1);
    let mut members: HashMap<u32, Vec<(usize, Decided)>> = HashMap::new();
    for (at, suggestion) in suggestions.iter_mut().enumerate() {
        let chosen = choose(suggestion, keys, most);
        chosen.iter().for_each(|key| members.entry(*key).or_default().push((at, Decided::default())));
    }
    let limiter = Limiter::new(Embedded::new());
    let rules = suggestions.iter().enumerate().map(|(at, suggestion)| {
        let limit = suggestion.limit.clone();
        Rule::new(&format!("suggestion-{at}"), limit)
    });
    let rules = rules.collect::<Result<Vec<_>, _>>()?;
    for request in spool.requests()? {
        let request = request?;
        for (at, decided) in members.get_mut(&request.key).into_iter().flatten() {
            let at_time = UNIX_EPOCH + Duration::from_micros(request.t_us);
            let asked = Request::new(keys[request.key as usize].bytes()).cost(request.cost).at(at_time);
            if !limiter.acquire(&rules[*at], asked).await?.allowed {
                if decided.denied == 0 {
                    decided.first_us = request.t_us;
                }
                (decided.denied, decided.last_us) = (decided.denied + 1, request.t_us);
            }
        }
    }
    let hits = |suggestion: &Suggestion| suggestion.hits.iter().map(|hit| (hit.key, *hit)).collect::<HashMap<_, _>>();
    let said: Vec<_> = suggestions.iter().map(hits).collect();
    for (key, all) in members {
        for (at, decided) in all {
            let said = said[at].get(&key).map_or_else(Decided::default, |hit| Decided {
                denied: hit.denied,
                first_us: hit.first_us,
                last_us: hit.last_us,
            });
            if said != decided {
                let (limit, key) = (&suggestions[at].limit, shown(keys[key as usize].bytes()));
                let why = "please report this as a fault of tollgate";
                bail!("{limit}: {key:.60}: expected {said:?}, got {decided:?} by a replay: {why}");
            }
        }
    }
    Ok(())
}

/// The keys to replay.
fn choose(suggestion: &mut Suggestion, keys: &[Key], most: u64) -> Vec<u32> {
    let (group, units) = (suggestion.trial.group, suggestion.units());
    let may_be_hit = (0_u32..).zip(keys).filter(|(_, key)| key.group == group && key.units > units);
    let all: Vec<_> = may_be_hit.map(|(key, _)| key).collect();
    let requests = |chosen: &[u32]| chosen.iter().map(|key| keys[*key as usize].requests).sum();
    let (count, total): (_, u64) = (all.len() as u64, requests(&all));
    let chosen = if total <= most {
        all
    } else {
        let hit = suggestion.hits.iter().map(|hit| hit.key);
        let mut seen = HashSet::new();
        let (mut chosen, mut left) = (Vec::new(), most);
        for key in hit.chain(suggestion.trial.heaviest.first(usize::MAX)).filter(|key| seen.insert(*key)) {
            let requests = keys[key as usize].requests;
            // At least one, and the others as far as they fit.
            if requests <= left || chosen.is_empty() {
                left = left.saturating_sub(requests);
                chosen.push(key);
            }
        }
        chosen
    };
    let checked = chosen.len() as u64;
    suggestion.checked = Checked { requests: requests(&chosen), keys: checked, left: count.saturating_sub(checked) };
    chosen
}
