//! Counts the keys of each rule and finds those in use: by SCAN in small steps and OBJECT, neither of which counts as a
//! use of a key.
//!
//! Whether a key was touched depends on the server's policy: with LFU on how often (OBJECT FREQ), with any other on how
//! long ago (OBJECT IDLETIME). Both count reads too, and so denied calls.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use tollgate::redis::{Pipeline, from_redis_value};

use super::connection::{Connection, Failure};
use super::key_name::{KeyName, Label};
use super::reading::Reading;

/// Keys for each SCAN, which blocks the server for about a tenth of a microsecond each.
const STEP: u64 = 100;
/// The microseconds of each second that these commands may take on the server, by its own count. Reading and replying
/// take about twice that in addition.
const BUDGET_US: f64 = 500.0;
/// The assumption before the server has counted any.
const US_PER_KEY: f64 = 2.0;
/// The most keys that are checked again each time.
const MOST_WATCHED: usize = 64;
/// The share of uses among looks below which a key isn't checked again.
const RARELY: f64 = 0.2;
/// The factor by which each later look lowers the weight of a look: after ten more, it counts half.
const FADE: f64 = 0.933;
const MOST_LABELS: usize = 1024;

#[derive(Debug, Default)]
pub(super) struct Census {
    cursor: u64,
    counting: Counts,
    complete: Option<Counts>,
    watched: HashMap<Vec<u8>, Looks>,
    /// How many keys the budget still allows; negative where the last step of a scan took more than was left.
    left: i64,
    /// The number of the present look.
    turn: u64,
    /// The last one that was scanned.
    any_key: Option<Vec<u8>>,
}

/// Keys counted in one pass through the keyspace, so far.
#[derive(Clone, Debug, Default)]
pub(super) struct Counts {
    pub(super) scanned: u64,
    pub(super) of: BTreeMap<Label, u64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Looks {
    looks: f64,
    touched: f64,
    pub(super) freq: Option<u64>,
    /// The number of the last look.
    turn: u64,
}

/// How often each command was sent.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sent {
    pub(super) scans: u64,
    pub(super) objects: u64,
}

impl Census {
    /// Looks at as many keys as the budget of this time allows, and again at those in use.
    pub(super) async fn step(
        &mut self,
        connection: &mut Connection,
        reading: &Reading,
        prefix: &str,
        within: Duration,
    ) -> Result<Sent, Failure> {
        let by_frequency = reading.evicts_by_frequency();
        let (until, mut sent) = (Instant::now() + within / 2, Sent::default());
        let allowed = i64::try_from(keys_within(reading, within)).unwrap_or(i64::MAX);
        // An unused budget isn't saved, so that a quiet time leads to no burst.
        self.left = self.left.min(0) + allowed;
        self.turn += 1;
        // At least half is for the scan, however many keys are in use and however short the time is.
        let watched = self.longest_unseen(usize::try_from(allowed / 2).unwrap_or(usize::MAX).max(1));
        self.look_again(connection, &watched, by_frequency, within, &mut sent).await?;
        while self.left > 0 && Instant::now() < until {
            let mut scan = Pipeline::with_capacity(1);
            scan.cmd("SCAN").arg(self.cursor).arg("COUNT").arg(STEP);
            let reply = connection.all(&scan).await?.pop().unwrap_or_else(|| Err(Failure::Refused(String::new())))?;
            sent.scans += 1;
            let garbled = |_| Failure::Refused("a reply to SCAN that can't be read".to_owned());
            let (cursor, keys): (u64, Vec<Vec<u8>>) = from_redis_value(reply).map_err(garbled)?;
            self.left -= i64::try_from(STEP).unwrap_or(i64::MAX);
            self.cursor = cursor;
            let fresh = self.count(keys, prefix);
            self.look_again(connection, &fresh, by_frequency, within, &mut sent).await?;
            if cursor == 0 {
                self.complete = Some(std::mem::take(&mut self.counting));
                break;
            }
        }
        self.forget_the_idle();
        Ok(sent)
    }

    /// The watched keys that were checked longest ago, taken from the budget.
    fn longest_unseen(&mut self, most: usize) -> Vec<Vec<u8>> {
        let mut watched: Vec<_> = self.watched.iter().map(|(key, looks)| (looks.turn, key)).collect();
        watched.sort_unstable();
        let keys: Vec<_> = watched.into_iter().take(most).map(|(_, key)| key.clone()).collect();
        self.left -= i64::try_from(keys.len()).unwrap_or(i64::MAX);
        keys
    }

    /// Also looks at these from now on.
    pub(super) fn watch(&mut self, keys: &[&Vec<u8>]) {
        for key in keys {
            if self.watched.len() < 2 * MOST_WATCHED && !self.watched.contains_key(*key) {
                self.watched.insert((*key).clone(), Looks::default());
            }
        }
    }

    /// The number of keys of each rule, the total that these are out of, and whether all keys were counted.
    pub(super) fn counts(&self) -> (&Counts, bool) {
        self.complete.as_ref().map_or((&self.counting, false), |complete| (complete, true))
    }

    /// How far the current pass has come.
    pub(super) fn scanned(&self) -> u64 {
        self.counting.scanned
    }

    pub(super) fn watched(&self) -> impl Iterator<Item = (&Vec<u8>, &Looks)> {
        self.watched.iter().filter(|(_, looks)| looks.looks > 0.0)
    }

    /// Some key of a limit on this node.
    pub(super) fn any_key(&self) -> Option<&Vec<u8>> {
        self.any_key.as_ref()
    }

    /// Counts the keys, and returns those of limits.
    fn count(&mut self, keys: Vec<Vec<u8>>, prefix: &str) -> Vec<Vec<u8>> {
        self.counting.scanned += keys.len() as u64;
        let mut of_limits = Vec::with_capacity(keys.len());
        for key in keys {
            let Some(name) = KeyName::parse(&key, prefix) else { continue };
            let is_marker = name.is_marker();
            if self.counting.of.len() < MOST_LABELS || self.counting.of.contains_key(&name.of) {
                *self.counting.of.entry(name.of).or_default() += 1;
            }
            if !is_marker {
                of_limits.push(key);
            }
        }
        if let Some(key) = of_limits.last() {
            self.any_key = Some(key.clone());
        }
        of_limits
    }

    async fn look_again(
        &mut self,
        connection: &mut Connection,
        keys: &[Vec<u8>],
        by_frequency: bool,
        within: Duration,
        sent: &mut Sent,
    ) -> Result<(), Failure> {
        if keys.is_empty() {
            return Ok(());
        }
        let mut objects = Pipeline::with_capacity(keys.len());
        for key in keys {
            objects.cmd("OBJECT").arg(if by_frequency { "FREQ" } else { "IDLETIME" }).arg(key);
        }
        let replies = connection.all(&objects).await?;
        sent.objects += keys.len() as u64;
        for (key, reply) in keys.iter().zip(replies) {
            // Null if the key is gone; an error if its slot has moved to another node.
            let number = match reply {
                Ok(number) => from_redis_value::<Option<u64>>(number).unwrap_or_default(),
                Err(failure) if failure.is_of_slot() => None,
                Err(failure) => return Err(failure),
            };
            let Some(number) = number else {
                self.watched.remove(key);
                continue;
            };
            self.seen(key, number, by_frequency, within);
        }
        Ok(())
    }

    /// One look at a key. New keys are kept if they are in use and there is room.
    fn seen(&mut self, key: &[u8], number: u64, by_frequency: bool, within: Duration) {
        // The server's clock for idle times ticks once a second.
        let touched = !by_frequency && number <= within.as_secs().max(1);
        let least_frequent = || {
            let frequencies = self.watched.iter().map(|(key, looks)| (looks.freq.unwrap_or(0), key));
            frequencies.min().map(|(freq, key)| (freq, key.clone()))
        };
        let is_known = self.watched.contains_key(key);
        if !is_known && self.watched.len() >= MOST_WATCHED {
            match least_frequent().filter(|(least, _)| by_frequency && number > *least) {
                Some((_, rarest)) => self.watched.remove(&rarest),
                None => return,
            };
        } else if !is_known && !by_frequency && !touched {
            return;
        }
        let looks = self.watched.entry(key.to_vec()).or_default();
        looks.turn = self.turn;
        looks.looks = looks.looks * FADE + 1.0;
        looks.touched = looks.touched * FADE + f64::from(u8::from(touched));
        looks.freq = by_frequency.then_some(number);
    }

    /// Makes room for keys that are in use.
    fn forget_the_idle(&mut self) {
        self.watched
            .retain(|_, looks| looks.freq.is_some() || looks.touched_share().is_none_or(|share| share >= RARELY));
    }
}

impl Looks {
    pub(super) fn touched_share(&self) -> Option<f64> {
        (self.looks > 0.0 && self.freq.is_none()).then(|| self.touched / self.looks)
    }
}

/// How many keys the budget of this time allows: at least one, since a single slow step in the server's counts, as on a
/// busy machine, must not stop the scan forever.
fn keys_within(reading: &Reading, within: Duration) -> u64 {
    let object = if reading.evicts_by_frequency() { "object|freq" } else { "object|idletime" };
    let scan = reading.us_per_call("scan").map(|us| us / STEP as f64);
    let per_key = scan.zip(reading.us_per_call(object)).map_or(US_PER_KEY, |(scan, object)| scan + object);
    ((BUDGET_US * within.as_secs_f64() / per_key.max(0.1)) as u64).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::info::Fields;

    const SECOND: Duration = Duration::from_secs(1);

    fn key(number: usize) -> Vec<u8> {
        format!("t:{{u:{number}}}:api/token-bucket-1s").into_bytes()
    }

    #[test]
    fn keys_are_counted_by_rule_and_others_are_only_counted() {
        let mut census = Census::default();
        let keys = [key(1), key(2), b"t:{u:1}:api#job".to_vec(), b"session:1".to_vec()];
        assert_eq!(census.count(keys.to_vec(), "t"), [key(1), key(2)]);
        let (counts, all) = census.counts();
        let of: Vec<_> = counts.of.iter().map(|(label, count)| (label.text(), *count)).collect();
        assert_eq!(of, [("api (ids)".to_owned(), 1), ("api/token-bucket-1s".to_owned(), 2)]);
        assert_eq!((counts.scanned, all), (4, false));
        assert_eq!(census.any_key(), Some(&key(2)), "whether or not it is in use");
    }

    #[test]
    fn a_key_in_use_is_looked_at_again_until_it_is_idle() {
        let mut census = Census::default();
        census.seen(&key(1), 0, false, SECOND);
        census.seen(&key(2), 7, false, SECOND);
        let watched: Vec<_> = census.watched().collect();
        assert_eq!(watched.len(), 1, "{watched:?}");
        assert_eq!(watched[0].1.touched_share(), Some(1.0));
        for _ in 0..40 {
            census.seen(&key(1), 9, false, SECOND);
            census.forget_the_idle();
            if census.watched.is_empty() {
                return;
            }
        }
        panic!("{:?}", census.watched);
    }

    #[test]
    fn with_lfu_the_most_frequent_stay() {
        let mut census = Census::default();
        for number in 0..2 * MOST_WATCHED {
            census.seen(&key(number), number as u64, true, SECOND);
        }
        census.forget_the_idle();
        assert_eq!(census.watched.len(), MOST_WATCHED);
        assert!(census.watched().all(|(_, looks)| looks.freq.is_some_and(|freq| freq >= MOST_WATCHED as u64)));
        assert!(census.watched().all(|(_, looks)| looks.touched_share().is_none()));
    }

    #[test]
    fn keys_in_use_take_turns_and_leave_half_of_the_budget_to_the_scan() {
        let mut census = Census::default();
        (0..60).for_each(|number| census.seen(&key(number), 0, false, SECOND));
        let mut looked_at = BTreeMap::new();
        for _ in 0..12 {
            census.turn += 1;
            census.left = 25;
            for key in census.longest_unseen(12) {
                census.seen(&key, 0, false, SECOND);
                *looked_at.entry(key).or_insert(0) += 1;
            }
            assert_eq!(census.left, 13);
        }
        assert_eq!((looked_at.len(), looked_at.values().min(), looked_at.values().max()), (60, Some(&2), Some(&3)));
    }

    #[test]
    fn the_dearer_a_key_is_to_the_server_the_fewer_are_looked_at() {
        let of = |text: &str| Reading { at: Instant::now(), info: Fields::of_info(text), database: 0 };
        assert_eq!(keys_within(&of(""), SECOND), 250);
        let stats = "cmdstat_scan:calls=1,usec=30,usec_per_call=30.00\n\
                     cmdstat_object|idletime:calls=1,usec=1,usec_per_call=0.50\n";
        assert_eq!(keys_within(&of(stats), SECOND), 625);
        assert_eq!(keys_within(&of(stats), SECOND / 10), 62);
        let slow = stats.replace("per_call=30.00", "per_call=300.00");
        assert_eq!(keys_within(&of(&slow), SECOND), 142);
        let stalled = stats.replace("per_call=30.00", "per_call=90000.00");
        assert_eq!(keys_within(&of(&stalled), SECOND), 1);
    }
}
