//! Calls that go to Redis together. Acquires of one limit are batched further: keys of limits with the same numbers
//! share one call of their script, in packed form, and identical asks on one key form one group of that call. Any other
//! call is in full: one of its script, with arguments as text.

mod in_full;
mod records;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::hash::BuildHasher;
use std::sync::{Arc, LazyLock};

use hashbrown::{DefaultHashBuilder, HashTable};

use crate::algorithm::numbers::cost_sent;
use crate::call::Call;
use crate::error::{Error, Kind};
use crate::key::Key;
use crate::script::Script;
use crate::wall_clock;
pub(crate) use in_full::InFull;
use records::PackedRecord;
pub(crate) use records::{Answer, AskApart, Records, packed_number};

/// Groups in a batch, over all its calls; bounded so that it doesn't hold up Redis for long.
const MOST_GROUPS: usize = 1024;
/// How many groups take Redis as long as a call in full takes for each of its keys.
const GROUPS_OF_KEY_IN_FULL: usize = 16;

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
    /// The slot of a cluster. Asks of several partitions share a call only if all of them are `across_partitions`.
    pub(crate) partition: u16,
    /// Whether the node takes calls with keys of several slots.
    pub(crate) across_partitions: bool,
}

/// What is asked of an engine.
#[derive(Clone, Debug)]
pub(crate) enum Entry<'a> {
    Packed(Ask<'a>),
    InFull(&'a Call<'a>),
}

/// What goes to Redis together, in as few script calls as possible. Asks of one key with the same numbers and
/// time keep their order.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    calls: Vec<BatchCall>,
    /// The bytes of all keys.
    keys: Vec<u8>,
    groups: usize,
    /// The latest group of each key, for each script, numbers and time.
    by_key: HashTable<GroupId>,
    /// The call that takes more keys, for each script, numbers, time and, if it is of one, partition.
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
    /// None if it takes asks of every partition. Then no two of its groups are of one key.
    partition: Option<u16>,
    groups: Vec<Group>,
    /// If it is in full: then its only group has one ask.
    in_full: Option<InFull>,
}

/// Consecutive identical asks: of one key, at one cost.
#[derive(Debug)]
struct Group {
    /// The range of its key in the batch's key bytes.
    key: std::ops::Range<usize>,
    hash: u64,
    partition: u16,
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

/// A call of a script, as it is sent.
#[derive(Clone, Copy, Debug)]
pub(crate) enum BatchedCall<'a> {
    Packed(PackedCall<'a>),
    InFull(&'a InFull),
}

/// A call of a script in its packed form, as it is sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedCall<'a> {
    script: &'static Script,
    numbers: &'a Arc<[u8]>,
    now_us: Option<u64>,
    groups: &'a [Group],
    keys: &'a [u8],
    /// Whether its keys are of several partitions.
    across_partitions: bool,
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
        let Ask { ref key, partition, cost, .. } = *self;
        Alone { ask: self, group: Group { key: 0..key.len(), hash: 0, partition, cost, asks: 1 } }
    }

    fn terms_hash(&self, partition: Option<u16>) -> u64 {
        terms_hash(self.script, &self.numbers, self.now_us, partition)
    }
}

impl Alone<'_> {
    pub(crate) fn call(&self) -> PackedCall<'_> {
        let Ask { script, ref numbers, now_us, .. } = *self.ask;
        let (groups, keys) = (std::slice::from_ref(&self.group), &self.ask.key);
        PackedCall { script, numbers, now_us, groups, keys, across_partitions: false }
    }
}

impl Entry<'_> {
    /// A hash for [`Batch::add`].
    pub(crate) fn hash(&self) -> u64 {
        match self {
            Self::Packed(ask) => ask.hash(),
            Self::InFull(_) => 0,
        }
    }
}

impl Batch {
    /// Whether this entry, whose hash this is, joins a group or there is room for another one.
    pub(crate) fn has_room(&self, entry: &Entry<'_>, hash: u64) -> bool {
        let joins = |ask| self.latest(ask, hash).is_some_and(|id| self.takes(id, ask));
        self.groups < MOST_GROUPS || matches!(entry, Entry::Packed(ask) if joins(ask))
    }

    pub(crate) fn add(&mut self, entry: &Entry<'_>, hash: u64) -> GroupId {
        match entry {
            Entry::Packed(ask) => self.add_ask(ask, hash),
            Entry::InFull(call) => self.add_in_full(call),
        }
    }

    fn add_in_full(&mut self, call: &Call<'_>) -> GroupId {
        let mut groups = self.spare.pop().unwrap_or_default();
        groups.push(Group { key: 0..0, hash: 0, partition: 0, cost: 0, asks: 0 });
        self.groups += GROUPS_OF_KEY_IN_FULL * call.key_count();
        let (script, in_full) = (call.script, Some(InFull::of(call)));
        self.calls.push(BatchCall {
            script,
            numbers: Arc::default(),
            now_us: None,
            partition: Some(0),
            groups,
            in_full,
        });
        GroupId { call: as_u32(self.calls.len() - 1), group: 0 }
    }

    fn add_ask(&mut self, ask: &Ask<'_>, hash: u64) -> GroupId {
        let latest = self.latest(ask, hash);
        // Only the latest group is joined: joining an earlier one would overtake it.
        if let Some(id) = latest.filter(|id| self.takes(*id, ask)) {
            return id;
        }
        let call = self.call_for(ask, latest);
        let key = self.keys.len()..self.keys.len() + ask.key.len();
        self.keys.extend_from_slice(&ask.key);
        let groups = &mut self.calls[call as usize].groups;
        let id = GroupId { call, group: as_u32(groups.len()) };
        groups.push(Group { key, hash, partition: ask.partition, cost: ask.cost, asks: 0 });
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
    pub(crate) fn calls(&self) -> impl Iterator<Item = (usize, BatchedCall<'_>)> {
        let all = self.calls.iter().enumerate();
        let asked = all.filter(|(_, call)| call.groups.iter().any(|group| group.asks > 0));
        asked.map(|(at, call)| {
            let packed = || BatchedCall::Packed(call.packed(&self.keys));
            (at, call.in_full.as_ref().map_or_else(packed, BatchedCall::InFull))
        })
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

    /// Whether this ask, which is of the group's key, may join the group.
    fn takes(&self, id: GroupId, ask: &Ask<'_>) -> bool {
        let call = &self.calls[id.call as usize];
        call.groups[id.group as usize].cost == ask.cost && (ask.across_partitions || call.partition.is_some())
    }

    /// The call that takes another group for this ask, mostly the last one: none before that of the key's latest group.
    fn call_for(&mut self, ask: &Ask<'_>, latest: Option<GroupId>) -> u32 {
        // A call of several partitions takes no key twice.
        let partition = Some(ask.partition).filter(|_| latest.is_some() || !ask.across_partitions);
        let is_its = |call: &BatchCall| call.partition == partition && call.is_for(ask);
        let has_room = |call: &BatchCall| call.groups.len() < ask.most_keys;
        if self.calls.last().is_some_and(|last| is_its(last) && has_room(last)) {
            return as_u32(self.calls.len() - 1);
        }
        let hash = ask.terms_hash(partition);
        let found = self.by_terms.find_mut(hash, |at| is_its(&self.calls[*at as usize]));
        if let Some(at) = &found
            && has_room(&self.calls[**at as usize])
            && latest.is_none_or(|latest| latest.call <= **at)
        {
            return **at;
        }
        let new = as_u32(self.calls.len());
        match found {
            Some(at) => *at = new,
            None => _ = self.by_terms.insert_unique(hash, new, |at| self.calls[*at as usize].terms_hash()),
        }
        let Ask { script, ref numbers, now_us, .. } = *ask;
        let groups = self.spare.pop().unwrap_or_default();
        let numbers = Arc::clone(numbers);
        self.calls.push(BatchCall { script, numbers, now_us, partition, groups, in_full: None });
        new
    }
}

fn as_u32(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

fn terms_hash(script: &'static Script, numbers: &[u8], now_us: Option<u64>, partition: Option<u16>) -> u64 {
    HASHER.hash_one((std::ptr::from_ref(script), numbers, now_us, partition))
}

impl BatchCall {
    fn is_for(&self, ask: &Ask<'_>) -> bool {
        let same_numbers = Arc::ptr_eq(&self.numbers, &ask.numbers) || self.numbers == *ask.numbers;
        same_numbers && std::ptr::eq(self.script, ask.script) && self.now_us == ask.now_us && self.in_full.is_none()
    }

    fn terms_hash(&self) -> u64 {
        terms_hash(self.script, &self.numbers, self.now_us, self.partition)
    }

    fn packed<'a>(&'a self, keys: &'a [u8]) -> PackedCall<'a> {
        let Self { script, numbers, now_us, groups, .. } = self;
        let mut asked = groups.iter().filter(|group| group.asks > 0).map(|group| group.partition);
        let first = asked.next();
        let across_partitions = self.partition.is_none() && asked.any(|partition| Some(partition) != first);
        PackedCall { script, numbers, now_us: *now_us, groups, keys, across_partitions }
    }
}

impl BatchedCall<'_> {
    pub(crate) fn key_count(&self) -> usize {
        match self {
            Self::Packed(call) => call.key_count(),
            Self::InFull(call) => call.key_count(),
        }
    }

    /// Whether it may take units.
    pub(crate) fn takes(&self) -> bool {
        match self {
            Self::Packed(_) => true,
            Self::InFull(call) => call.takes,
        }
    }
}

impl<'a> PackedCall<'a> {
    pub(crate) fn script(self) -> &'static Script {
        if self.across_partitions { self.script.across_slots() } else { self.script }
    }

    /// Whether its keys are of several slots of a cluster, and so passed as arguments, after their count.
    pub(crate) fn is_across_slots(self) -> bool {
        self.across_partitions
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
        let least = match self.script.takes_windows() {
            _ if self.across_partitions => -4,
            true => -3,
            false => -2,
        };
        let each = self.groups.iter().map(|group| match group.asks {
            0 => Some(PackedRecord::default()),
            asks => PackedRecord::read(&mut numbers, least, asks, group.cost > 0),
        });
        match each.collect::<Option<Vec<_>>>() {
            Some(records) if numbers.next().is_none() && answer.len().is_multiple_of(7) => {
                Ok(Records { records, script: self.script, limit: self.limit(), at: wall_clock::now(), lacking })
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
