//! Decisions that are made together: keys of one limit in one call of its script, by the script's packed form, and calls
//! alike on one key as one lot of them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::SystemTime;

use crate::error::{Error, Kind};
use crate::script::{Reply, Script};

/// As large as a cost needs to be: above every limit.
const LARGEST_COST: u64 = 1 << 53;

/// An acquire of one limit, and no more than that.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) script: &'static Script,
    /// The limit's numbers, as the script's packed form takes them.
    pub(crate) numbers: Arc<[u8]>,
    pub(crate) key: Vec<u8>,
    pub(crate) cost: u64,
    /// Microseconds since the epoch; the server's time if none.
    pub(crate) now_us: Option<u64>,
    /// Keys in one call of the script, so that it doesn't hold Redis for long.
    pub(crate) most_keys: usize,
    /// The key's, where only keys of one slot can be decided together.
    pub(crate) slot: Option<u16>,
}

/// One call of a script in its packed form.
#[derive(Debug)]
pub(crate) struct Batch<'a> {
    pub(crate) script: &'static Script,
    numbers: &'a Arc<[u8]>,
    now_us: Option<u64>,
    /// The batch of the same slot that was begun before this one.
    before: Option<usize>,
    lots: Vec<Lot<'a>>,
    /// Where a key's last lot stands, once there are more than a few.
    places: HashMap<&'a [u8], usize>,
}

/// Lots that are looked through one by one: of a cluster's slot there is mostly one.
const FEW: usize = 8;

/// Asks alike that follow each other: of one key, at one cost.
#[derive(Debug)]
struct Lot<'a> {
    key: &'a [u8],
    cost: u64,
    calls: u32,
}

/// Which place an ask has: its batch, the lot there, and how many of the lot came before it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) batch: usize,
    lot: usize,
    before: u32,
}

/// What a batch answers: a record of each lot.
#[derive(Debug)]
pub(crate) struct Records {
    records: Vec<Record>,
    at: SystemTime,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    /// How many of the calls are allowed; -1 if the key is blocked, below that if its state can't be read.
    allowed: i64,
    limit: i64,
    remaining: i64,
    /// Of the first call that isn't allowed.
    retry_after_us: i64,
    reset_after_us: i64,
}

impl<'a> Batch<'a> {
    /// The batch of this ask alone.
    pub(crate) fn of_one(ask: &'a Ask) -> Self {
        let mut batch = Self::empty(ask, None);
        batch.lots.push(Lot { key: &ask.key, cost: ask.cost, calls: 1 });
        batch
    }

    /// As few batches as these asks can be made in, and the place of each. Asks of one key keep their order.
    pub(crate) fn of(asks: &'a [Ask]) -> (Vec<Self>, Vec<Place>) {
        let mut batches: Vec<Self> = Vec::new();
        // The last batch of each slot: there may be as many as asks.
        let mut last: HashMap<Option<u16>, usize> = HashMap::new();
        let places = asks.iter().map(|ask| {
            let before = last.get(&ask.slot).copied();
            let mut of_slot = std::iter::successors(before, |at| batches[*at].before);
            let at = of_slot.find(|at| batches[*at].is_for(ask)).filter(|at| batches[*at].has_room(ask));
            let batch = at.unwrap_or_else(|| {
                batches.push(Self::empty(ask, before));
                last.insert(ask.slot, batches.len() - 1);
                batches.len() - 1
            });
            let (lot, before) = batches[batch].add(ask);
            Place { batch, lot, before }
        });
        let places = places.collect();
        (batches, places)
    }

    fn empty(ask: &'a Ask, before: Option<usize>) -> Self {
        let Ask { script, numbers, now_us, .. } = ask;
        Self { script, numbers, now_us: *now_us, before, lots: Vec::new(), places: HashMap::new() }
    }

    fn is_for(&self, ask: &Ask) -> bool {
        let same_numbers = Arc::ptr_eq(self.numbers, &ask.numbers) || *self.numbers == ask.numbers;
        same_numbers && std::ptr::eq(self.script, ask.script) && self.now_us == ask.now_us
    }

    fn has_room(&self, ask: &Ask) -> bool {
        self.lots.len() < ask.most_keys || self.lot_for(ask).is_some()
    }

    /// The lot that the ask can join: its key's last one, if that is at its cost. To join an earlier one would be to
    /// overtake.
    fn lot_for(&self, ask: &Ask) -> Option<usize> {
        let key = ask.key.as_slice();
        let last = if self.lots.len() > FEW {
            *self.places.get(key)?
        } else {
            self.lots.iter().rposition(|lot| lot.key == key)?
        };
        (self.lots[last].cost == ask.cost).then_some(last)
    }

    fn add(&mut self, ask: &'a Ask) -> (usize, u32) {
        if let Some(at) = self.lot_for(ask) {
            let lot = &mut self.lots[at];
            lot.calls += 1;
            return (at, lot.calls - 1);
        }
        self.lots.push(Lot { key: &ask.key, cost: ask.cost, calls: 1 });
        let last = self.lots.len() - 1;
        match last {
            // Later lots of a key overwrite its earlier ones.
            FEW => self.places.extend(self.lots.iter().enumerate().map(|(at, lot)| (lot.key, at))),
            at if at > FEW => _ = self.places.insert(&ask.key, at),
            _ => {}
        }
        (last, 0)
    }

    /// KEYS in order.
    pub(crate) fn keys(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        self.lots.iter().map(|lot| lot.key)
    }

    /// Hands over ARGV in order: the numbers and the cost, now where it is given or something follows it, and, where the
    /// lots differ or a key has several, the cost and the calls of each.
    pub(crate) fn each_argument(&self, mut give: impl FnMut(&[u8])) {
        let first = self.lots.first().map_or(0, |lot| lot.cost);
        // Lots at one cost are of different keys.
        let alike = self.lots.iter().all(|lot| lot.calls == 1 && lot.cost == first);
        give(&[self.numbers, &packed_cost(first)[..]].concat());
        match self.now_us {
            Some(now_us) => give(now_us.to_string().as_bytes()),
            None if !alike => give(b"-1"),
            None => {}
        }
        if !alike {
            let lots = self.lots.iter();
            let several = lots.flat_map(|Lot { cost, calls, .. }| {
                let [calls @ .., _] = calls.to_le_bytes();
                packed_cost(*cost).into_iter().chain(calls)
            });
            give(&several.collect::<Vec<u8>>());
        }
    }

    /// What the script answered.
    pub(crate) fn read(&self, answer: &[u8]) -> Result<Records, Error> {
        let (records, rest) = answer.as_chunks::<40>();
        let each = records.iter().zip(&self.lots).map(|(record, lot)| Record::read(record, lot.calls));
        match each.collect::<Option<Vec<_>>>() {
            Some(read) if records.len() == self.lots.len() && rest.is_empty() => {
                Ok(Records { records: read, at: SystemTime::now() })
            }
            _ => Err(Error::new(Kind::Garbled, "expected a decision for each key from the script, got something else")),
        }
    }
}

impl Record {
    /// None if it holds what a script doesn't say to so many calls.
    fn read(bytes: &[u8; 40], calls: u32) -> Option<Self> {
        let whole = |number: f64| number.fract() == 0.0 && number.abs() <= LARGEST_COST as f64;
        let mut numbers = bytes.as_chunks::<8>().0.iter().map(|number| f64::from_le_bytes(*number));
        let mut next = || numbers.next().filter(|number| whole(*number)).map(|number| number as i64);
        let (allowed, limit, remaining) = (next()?, next()?, next()?);
        let record = Self { allowed, limit, remaining, retry_after_us: next()?, reset_after_us: next()? };
        (-2..=i64::from(calls)).contains(&allowed).then_some(record)
    }
}

/// As struct's I7.
fn packed_cost(cost: u64) -> [u8; 7] {
    let [packed @ .., _] = cost.min(LARGEST_COST).to_le_bytes();
    packed
}

impl Records {
    /// The reply to the ask that had this place in this batch.
    pub(crate) fn reply(&self, place: Place, script: &Script) -> Result<Reply, Error> {
        let Record { allowed, limit, remaining, retry_after_us, reset_after_us } = self.records[place.lot];
        let reply = |allowed: bool, appended| {
            let wait = if allowed { 0 } else { retry_after_us };
            Reply { decision: [allowed.into(), limit, remaining, wait, reset_after_us], appended, at: self.at }
        };
        match allowed {
            0.. => Ok(reply(i64::from(place.before) < allowed, Vec::new())),
            // That it is blocked, and no denials counted.
            -1 => Ok(reply(false, vec![1, 0])),
            _ => {
                let what = "expected the limit's state, which a reset would restore";
                let why = format!("BADSTATE {}: the key holds something else than this limit's state", script.name());
                Err(Error::new(Kind::Unreadable, format!("{what}: {why}")))
            }
        }
    }

    /// The reply to the only ask.
    pub(crate) fn only(&self, script: &Script) -> Result<Reply, Error> {
        self.reply(Place { batch: 0, lot: 0, before: 0 }, script)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::Algorithm;

    const MOST_KEYS: usize = 80;

    fn ask(numbers: &Arc<[u8]>, key: &str, cost: u64) -> Ask {
        let (script, numbers) = (Algorithm::Gcra.script(), Arc::clone(numbers));
        Ask { script, numbers, key: key.into(), cost, now_us: None, most_keys: MOST_KEYS, slot: None }
    }

    fn arguments(batch: &Batch<'_>) -> Vec<Vec<u8>> {
        let mut arguments = Vec::new();
        batch.each_argument(|argument| arguments.push(argument.to_vec()));
        arguments
    }

    #[test]
    fn asks_of_one_rule_go_in_one_call_and_asks_alike_in_one_lot() {
        let (one, other): (Arc<[u8]>, Arc<[u8]>) = (Arc::from([1]), Arc::from([2]));
        let equal: Arc<[u8]> = Arc::from([1]);
        let asks = [
            ask(&one, "a", 1),
            ask(&one, "b", 1),
            ask(&other, "a", 1),
            ask(&equal, "a", 1),
            ask(&one, "a", 2),
            ask(&one, "a", 1),
            ask(&one, "a", 1),
        ];
        let (batches, places) = Batch::of(&asks);
        let keys: Vec<Vec<_>> = batches.iter().map(|batch| batch.keys().collect()).collect();
        assert_eq!(keys, [vec![b"a", b"b", b"a", b"a"], vec![b"a"]]);
        let seats: Vec<_> = places.iter().map(|place| (place.batch, place.lot, place.before)).collect();
        assert_eq!(seats, [(0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1), (0, 2, 0), (0, 3, 0), (0, 3, 1)]);
        let several: Vec<u8> = [(1, 2), (1, 1), (2, 1), (1, 2)]
            .into_iter()
            .flat_map(|(cost, calls)| [cost, 0, 0, 0, 0, 0, 0, calls, 0, 0])
            .collect();
        assert_eq!(arguments(&batches[0]), [vec![1, 1, 0, 0, 0, 0, 0, 0], b"-1".to_vec(), several]);
        assert_eq!(arguments(&batches[1]), [vec![2, 1, 0, 0, 0, 0, 0, 0]]);
    }

    #[test]
    fn a_full_batch_takes_no_more_keys_and_still_asks_of_its_own() {
        let numbers: Arc<[u8]> = Arc::from([1]);
        let asks: Vec<_> = (0..=MOST_KEYS).map(|key| ask(&numbers, &key.to_string(), 1)).collect();
        assert_eq!(Batch::of(&asks).0.len(), 2);
        let asks: Vec<_> = (0..MOST_KEYS).chain(0..5).map(|key| ask(&numbers, &key.to_string(), 1)).collect();
        assert_eq!(Batch::of(&asks).0.len(), 1);
    }

    #[test]
    fn the_first_of_a_lot_are_allowed() {
        let numbers: Arc<[u8]> = Arc::from([1]);
        let asks = [ask(&numbers, "a", 1), ask(&numbers, "a", 1)];
        let (batches, places) = Batch::of(&asks);
        let answer: Vec<u8> = [1.0_f64, 5.0, 0.0, 7.0, 9.0].into_iter().flat_map(f64::to_le_bytes).collect();
        let records = batches[0].read(&answer).unwrap();
        let decisions: Vec<_> =
            places.iter().map(|place| records.reply(*place, asks[0].script).unwrap().decision).collect();
        assert_eq!(decisions, [[1, 5, 0, 0, 9], [0, 5, 0, 7, 9]]);
        assert!(batches[0].read(&answer[1..]).is_err());
    }
}
