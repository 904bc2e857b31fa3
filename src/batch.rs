//! Batched decisions: keys of limits with the same numbers share one call of their script, in packed form, and identical
//! asks on one key form one group of that call.

mod records;

use std::borrow::Cow;
use std::hash::BuildHasher;
use std::sync::{Arc, LazyLock};
use std::time::SystemTime;

use hashbrown::{DefaultHashBuilder, HashTable};

use crate::algorithm::numbers::cost_sent;
use crate::error::{Error, Kind};
use crate::key::Key;
use crate::script::Script;
use records::PackedRecord;
pub(crate) use records::{Records, packed_number};

/// Groups in a batch, over all its calls; bounded so that it doesn't hold up Redis for long.
const MOST_GROUPS: usize = 1024;

/// Calls whose memory a batch keeps: more than most batches have.
const MOST_SPARE: usize = 16;

/// Seeded randomly for this process, so that nobody can send keys that all collide.
static HASHER: LazyLock<DefaultHashBuilder> = LazyLock::new(DefaultHashBuilder::default);

/// An acquire of a single limit.
#[derive(Clone, Debug)]
pub(crate) struct Ask<'a> {
    pub(crate) script: &'static Script,
    /// The limit's numbers, in the script's packed form.
    pub(crate) numbers: Cow<'a, Arc<[u8]>>,
    pub(crate) key: Key,
    pub(crate) cost: u64,
    /// Microseconds since the epoch; the server's time if none.
    pub(crate) now_us: Option<u64>,
    /// Keys in one call of the script; bounded so that it doesn't hold up Redis for long.
    pub(crate) most_keys: usize,
    /// Only asks of one partition share a call.
    pub(crate) partition: u16,
}

/// Asks that go to Redis together, in as few script calls as possible. Asks of one key with the same numbers and
/// time keep their order.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    calls: Vec<BatchCall>,
    /// The bytes of all keys.
    keys: Vec<u8>,
    groups: usize,
    /// The latest group of each key, for each script, numbers, time and partition.
    by_key: HashTable<GroupId>,
    /// The call that takes more keys, for each script, numbers, time and partition.
    by_terms: HashTable<u32>,
    /// Memory of earlier groups, for reuse.
    spare: Vec<Vec<Group>>,
}

/// A call of a script in a batch that is being filled.
#[derive(Debug)]
struct BatchCall {
    script: &'static Script,
    numbers: Arc<[u8]>,
    now_us: Option<u64>,
    partition: u16,
    groups: Vec<Group>,
}

/// Consecutive identical asks: of one key, at one cost.
#[derive(Debug)]
struct Group {
    /// The range of its key in the batch's key bytes.
    key: std::ops::Range<usize>,
    hash: u64,
    cost: u64,
    /// How many asks of this group are sent.
    asks: u32,
}

/// Identifies an ask's group: which call, and which group of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupId {
    pub(crate) call: u32,
    group: u32,
}

/// An ask that is sent: its group, and how many asks of the group come before it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Position {
    pub(crate) group: GroupId,
    before: u32,
}

/// A call of a script in its packed form, as it is sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedCall<'a> {
    script: &'static Script,
    numbers: &'a Arc<[u8]>,
    now_us: Option<u64>,
    groups: &'a [Group],
    keys: &'a [u8],
}

/// An ask that is sent in a call of its own.
#[derive(Debug)]
pub(crate) struct Alone<'a> {
    ask: &'a Ask<'a>,
    group: Group,
}

impl Ask<'_> {
    /// The hash of its key, for [`Batch::add`].
    pub(crate) fn hash(&self) -> u64 {
        HASHER.hash_one(self.key.as_slice())
    }

    pub(crate) fn alone(&self) -> Alone<'_> {
        Alone { ask: self, group: Group { key: 0..self.key.len(), hash: 0, cost: self.cost, asks: 1 } }
    }

    fn terms_hash(&self) -> u64 {
        terms_hash(self.script, &self.numbers, self.now_us, self.partition)
    }
}

impl Alone<'_> {
    pub(crate) fn call(&self) -> PackedCall<'_> {
        let Ask { script, ref numbers, now_us, .. } = *self.ask;
        PackedCall { script, numbers, now_us, groups: std::slice::from_ref(&self.group), keys: &self.ask.key }
    }
}

impl Batch {
    /// Whether this ask, whose hash this is, joins a group or there is room for another one.
    pub(crate) fn has_room(&self, ask: &Ask<'_>, hash: u64) -> bool {
        self.groups < MOST_GROUPS || self.latest(ask, hash).is_some_and(|id| self.group(id).cost == ask.cost)
    }

    pub(crate) fn add(&mut self, ask: &Ask<'_>, hash: u64) -> GroupId {
        let latest = self.latest(ask, hash);
        // Only the latest group is joined: joining an earlier one would overtake it.
        if let Some(id) = latest.filter(|id| self.group(*id).cost == ask.cost) {
            return id;
        }
        let call = self.call_for(ask);
        let key = self.keys.len()..self.keys.len() + ask.key.len();
        self.keys.extend_from_slice(&ask.key);
        let groups = &mut self.calls[call as usize].groups;
        let id = GroupId { call, group: as_u32(groups.len()) };
        groups.push(Group { key, hash, cost: ask.cost, asks: 0 });
        self.groups += 1;
        match latest {
            // A key's later group replaces the earlier one.
            Some(before) => {
                let found =
                    self.by_key.find_mut(hash, |found| found.call == before.call && found.group == before.group);
                if let Some(found) = found {
                    *found = id;
                }
            }
            None => {
                let hash_of = |id: &GroupId| self.calls[id.call as usize].groups[id.group as usize].hash;
                self.by_key.insert_unique(hash, id, hash_of);
            }
        }
        id
    }

    /// Marks the asks that are to be sent, and returns their positions. Takes the groups of all asks, in the order in
    /// which they were added; none for an ask that isn't sent. No ask is added after this.
    pub(crate) fn mark_sent(&mut self, ids: impl Iterator<Item = Option<GroupId>>) -> Vec<Option<Position>> {
        self.calls.iter_mut().flat_map(|call| &mut call.groups).for_each(|group| group.asks = 0);
        let mut position = |id: GroupId| {
            let group = &mut self.calls[id.call as usize].groups[id.group as usize];
            group.asks += 1;
            Position { group: id, before: group.asks - 1 }
        };
        ids.map(|id| id.map(&mut position)).collect()
    }

    /// Its calls, with their indices as in [`GroupId`]. Calls whose asks were all given up are left out.
    pub(crate) fn calls(&self) -> impl Iterator<Item = (usize, PackedCall<'_>)> {
        let all = self.calls.iter().enumerate();
        let asked = all.filter(|(_, call)| call.groups.iter().any(|group| group.asks > 0));
        asked.map(|(at, call)| (at, call.packed(&self.keys)))
    }

    pub(crate) fn call_count(&self) -> usize {
        self.calls.len()
    }

    /// Empties it, and keeps its memory for reuse.
    pub(crate) fn clear(&mut self) {
        for BatchCall { mut groups, .. } in self.calls.drain(..) {
            if self.spare.len() < MOST_SPARE {
                groups.clear();
                self.spare.push(groups);
            }
        }
        self.keys.clear();
        self.by_key.clear();
        self.by_terms.clear();
        self.groups = 0;
    }

    fn latest(&self, ask: &Ask<'_>, hash: u64) -> Option<GroupId> {
        let is_its = |id: &GroupId| {
            let call = &self.calls[id.call as usize];
            let group = &call.groups[id.group as usize];
            group.hash == hash && self.keys[group.key.clone()] == *ask.key && call.is_for(ask)
        };
        self.by_key.find(hash, is_its).copied()
    }

    fn group(&self, id: GroupId) -> &Group {
        &self.calls[id.call as usize].groups[id.group as usize]
    }

    /// The call that takes another key for this ask, mostly the last one.
    fn call_for(&mut self, ask: &Ask<'_>) -> u32 {
        let takes = |call: &BatchCall| call.is_for(ask) && call.groups.len() < ask.most_keys;
        if self.calls.last().is_some_and(takes) {
            return as_u32(self.calls.len() - 1);
        }
        let hash = ask.terms_hash();
        let found = self.by_terms.find_mut(hash, |at| self.calls[*at as usize].is_for(ask));
        if let Some(at) = &found
            && takes(&self.calls[**at as usize])
        {
            return **at;
        }
        let new = as_u32(self.calls.len());
        match found {
            Some(at) => *at = new,
            None => _ = self.by_terms.insert_unique(hash, new, |at| self.calls[*at as usize].terms_hash()),
        }
        let Ask { script, ref numbers, now_us, partition, .. } = *ask;
        let groups = self.spare.pop().unwrap_or_default();
        self.calls.push(BatchCall { script, numbers: Arc::clone(numbers), now_us, partition, groups });
        new
    }
}

fn as_u32(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

fn terms_hash(script: &'static Script, numbers: &[u8], now_us: Option<u64>, partition: u16) -> u64 {
    HASHER.hash_one((std::ptr::from_ref(script), numbers, now_us, partition))
}

impl BatchCall {
    fn is_for(&self, ask: &Ask<'_>) -> bool {
        let same_numbers = Arc::ptr_eq(&self.numbers, &ask.numbers) || self.numbers == *ask.numbers;
        same_numbers
            && std::ptr::eq(self.script, ask.script)
            && self.now_us == ask.now_us
            && self.partition == ask.partition
    }

    fn terms_hash(&self) -> u64 {
        terms_hash(self.script, &self.numbers, self.now_us, self.partition)
    }

    fn packed<'a>(&'a self, keys: &'a [u8]) -> PackedCall<'a> {
        let Self { script, numbers, now_us, groups, .. } = self;
        PackedCall { script, numbers, now_us: *now_us, groups, keys }
    }
}

impl<'a> PackedCall<'a> {
    pub(crate) fn script(self) -> &'static Script {
        self.script
    }

    /// The groups with asks that are sent.
    fn asked(self) -> impl Iterator<Item = &'a Group> + Clone {
        self.groups.iter().filter(|group| group.asks > 0)
    }

    /// KEYS in order.
    pub(crate) fn keys(self) -> impl Iterator<Item = &'a [u8]> {
        self.asked().map(move |group| &self.keys[group.key.clone()])
    }

    pub(crate) fn key_count(self) -> usize {
        self.asked().count()
    }

    /// Hands over ARGV in order: the numbers and the cost; `now`, if it is given or another argument follows; and, if
    /// the groups differ, a key has several asks or an ask was given up, the cost and the number of asks of each.
    pub(crate) fn each_argument(self, mut give: impl FnMut(&[u8])) {
        let first = self.asked().next().map_or(0, |group| group.cost);
        // Groups at one cost have different keys, unless a group between two of them was given up.
        let alike = self.groups.iter().all(|group| group.asks == 1 && group.cost == first);
        give(&[self.numbers, &packed_cost(first)[..]].concat());
        match self.now_us {
            Some(now_us) => give(now_us.to_string().as_bytes()),
            None if !alike => give(b"-1"),
            None => {}
        }
        if !alike {
            let several = self.asked().flat_map(|Group { cost, asks, .. }| {
                let [asks @ .., _] = asks.to_le_bytes();
                packed_cost(*cost).into_iter().chain(asks)
            });
            give(&several.collect::<Vec<u8>>());
        }
    }

    /// The limit: the first number after the layout.
    fn limit(self) -> i64 {
        self.numbers.get(1..8).and_then(|limit| limit.try_into().ok()).map_or(0, packed_number)
    }

    /// Reads the script's answer, given the error if too few replicas confirmed it.
    pub(crate) fn read(self, answer: &[u8], lacking: Option<Error>) -> Result<Records, Error> {
        let mut numbers = answer.as_chunks::<7>().0.iter().map(|number| packed_number(*number));
        let least = if self.script.takes_windows() { -3 } else { -2 };
        let each = self.groups.iter().map(|group| match group.asks {
            0 => Some(PackedRecord::default()),
            asks => PackedRecord::read(&mut numbers, least, asks, group.cost > 0),
        });
        match each.collect::<Option<Vec<_>>>() {
            Some(records) if numbers.next().is_none() && answer.len().is_multiple_of(7) => {
                Ok(Records { records, script: self.script, limit: self.limit(), at: SystemTime::now(), lacking })
            }
            _ => Err(Error::new(Kind::Garbled, "expected a decision for each key from the script, got something else")),
        }
    }
}

/// Writes struct's I7.
fn packed_cost(cost: u64) -> [u8; 7] {
    let [packed @ .., _] = cost_sent(cost).to_le_bytes();
    packed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::Algorithm;

    const KEYS_IN_CALL: usize = 80;

    fn ask<'a>(numbers: &'a Arc<[u8]>, key: &str, cost: u64) -> Ask<'a> {
        let (script, key, most_keys) = (Algorithm::Gcra.script(), Key::from(key.as_bytes()), KEYS_IN_CALL);
        Ask { script, numbers: Cow::Borrowed(numbers), key, cost, now_us: None, most_keys, partition: 0 }
    }

    /// A batch of these asks, and the positions of those that are sent.
    fn batch(asks: &[Ask<'_>], are_sent: impl Fn(usize) -> bool) -> (Batch, Vec<Position>) {
        let mut batch = Batch::default();
        let ids: Vec<_> = asks.iter().map(|ask| batch.add(ask, ask.hash())).collect();
        let sent = ids.into_iter().enumerate().map(|(at, id)| Some(id).filter(|_| are_sent(at)));
        let positions = batch.mark_sent(sent);
        (batch, positions.into_iter().flatten().collect())
    }

    fn arguments(call: PackedCall<'_>) -> Vec<Vec<u8>> {
        let mut arguments = Vec::new();
        call.each_argument(|argument| arguments.push(argument.to_vec()));
        arguments
    }

    fn call(batch: &Batch, at: usize) -> PackedCall<'_> {
        batch.calls().find(|(number, _)| *number == at).expect("it is asked for").1
    }

    #[test]
    fn asks_of_one_rule_go_in_one_call_and_asks_alike_in_one_group() {
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
        let (batch, positions) = batch(&asks, |_| true);
        let keys: Vec<Vec<_>> = batch.calls().map(|(_, call)| call.keys().collect()).collect();
        assert_eq!(keys, [vec![b"a", b"b", b"a", b"a"], vec![b"a"]]);
        let of = |position: &Position| (position.group.call, position.group.group, position.before);
        let positions: Vec<_> = positions.iter().map(of).collect();
        assert_eq!(positions, [(0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1), (0, 2, 0), (0, 3, 0), (0, 3, 1)]);
        let several: Vec<u8> = [(1, 2), (1, 1), (2, 1), (1, 2)]
            .into_iter()
            .flat_map(|(cost, calls)| [cost, 0, 0, 0, 0, 0, 0, calls, 0, 0])
            .collect();
        assert_eq!(arguments(call(&batch, 0)), [vec![1, 1, 0, 0, 0, 0, 0, 0], b"-1".to_vec(), several]);
        assert_eq!(arguments(call(&batch, 1)), [vec![2, 1, 0, 0, 0, 0, 0, 0]]);
    }

    #[test]
    fn a_full_call_takes_no_more_keys_and_still_asks_of_its_own() {
        let numbers: Arc<[u8]> = Arc::from([1]);
        let asks: Vec<_> = (0..=KEYS_IN_CALL).map(|key| ask(&numbers, &key.to_string(), 1)).collect();
        assert_eq!(batch(&asks, |_| true).0.calls().count(), 2);
        let asks: Vec<_> = (0..KEYS_IN_CALL).chain(0..5).map(|key| ask(&numbers, &key.to_string(), 1)).collect();
        assert_eq!(batch(&asks, |_| true).0.calls().count(), 1);
    }

    #[test]
    fn a_full_batch_has_room_for_identical_asks_only() {
        let numbers: Arc<[u8]> = Arc::from([1]);
        let asks: Vec<_> = (0..MOST_GROUPS).map(|key| ask(&numbers, &key.to_string(), 1)).collect();
        let (batch, _) = batch(&asks, |_| true);
        let has_room = |key: &str, cost| {
            let ask = ask(&numbers, key, cost);
            batch.has_room(&ask, ask.hash())
        };
        assert_eq!([has_room("7", 1), has_room("7", 2), has_room("other", 1)], [true, false, false]);
    }

    #[test]
    fn the_first_of_a_group_are_allowed_of_those_who_did_not_give_up() {
        let numbers: Arc<[u8]> = Arc::from([1, 5, 0, 0, 0, 0, 0, 0]);
        let asks = ["gone", "a", "a", "a"].map(|key| ask(&numbers, key, 1));
        let (batch, positions) = batch(&asks, |at| at > 1);
        let call = call(&batch, 0);
        assert_eq!((call.keys().collect::<Vec<_>>(), call.key_count()), (vec![&b"a"[..]], 1));
        // -1 - remaining, the reset, the wait, and how many are allowed; or remaining, and the reset.
        let packed = |numbers: &[i64]| -> Vec<u8> {
            numbers.iter().flat_map(|number| number.to_le_bytes()[..7].to_vec()).collect()
        };
        let answer = packed(&[-1, 9, 7, 1]);
        let records = call.read(&answer, None).unwrap();
        let decisions: Vec<_> = positions.iter().map(|at| records.reply(*at).unwrap().decision).collect();
        assert_eq!(decisions, [[1, 5, 0, 0, 9], [0, 5, 0, 7, 9]]);
        assert!(call.read(&answer[1..], None).is_err() && call.read(&answer[..21], None).is_err());
        let all = call.read(&packed(&[3, 8]), None).unwrap();
        let decisions: Vec<_> = positions.iter().map(|at| all.reply(*at).unwrap().decision).collect();
        assert_eq!(decisions, [[1, 5, 3, 0, 8]; 2]);
        let lacking = call.read(&answer, Some(Error::unconfirmed("no replica has it"))).unwrap();
        let unconfirmed: Vec<_> = positions.iter().map(|at| lacking.reply(*at).is_err()).collect();
        assert_eq!(unconfirmed, [true, false], "a denial took nothing");
    }

    #[test]
    fn what_nobody_asks_for_still_is_not_sent() {
        let numbers: Arc<[u8]> = Arc::from([1]);
        let (batch, _) = batch(&[ask(&numbers, "a", 1)], |_| false);
        assert_eq!(batch.calls().count(), 0);
    }
}
