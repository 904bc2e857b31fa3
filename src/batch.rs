//! Calls that go to Redis together. Calls of one shape (limits with the same numbers, the same operation and options)
//! share one call of their script, and identical plain acquires of the same keys form one group in it.

mod records;
mod script_call;
#[cfg(test)]
mod tests;

use std::hash::BuildHasher;
use std::ops::Range;
use std::sync::{Arc, LazyLock};

use hashbrown::{DefaultHashBuilder, HashTable};
use smallvec::SmallVec;

use crate::call::{Ask, Costs, Terms};
use crate::script::Script;
pub(crate) use records::{AskApart, Records};
pub(crate) use script_call::ScriptCall;

/// The most that groups sent together may weigh, over all calls; bounded so that they don't hold up Redis for long. A
/// plain acquire weighs 1.
pub(crate) const MOST_WEIGHT: usize = 1024;

/// Calls whose memory a batch keeps: more than most batches have.
const MOST_SPARE: usize = 16;

/// Seeded randomly for this process, so that nobody can send keys that all collide.
static HASHER: LazyLock<DefaultHashBuilder> = LazyLock::new(DefaultHashBuilder::default);

/// What goes to Redis together, in as few script calls as possible. Asks of one key with the same numbers, terms and
/// time keep their order.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    calls: Vec<BatchCall>,
    /// Of all groups.
    words: Words,
    /// The hash of each word.
    hashes: Vec<u64>,
    /// The weight of all groups that somebody asks for.
    weight: usize,
    /// The latest group of each key, for each script, numbers, terms and time.
    by_key: HashTable<Found>,
    /// The call that takes more keys, for each script, numbers, terms, time and, if it is limited to one, partition.
    by_terms: HashTable<u32>,
    /// Memory of earlier groups, for reuse.
    spare: Vec<Vec<Group>>,
}

/// Keys and holders, one after the other.
#[derive(Debug, Default)]
struct Words {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

/// A call of a script in a batch that is being filled.
#[derive(Debug)]
struct BatchCall {
    script: &'static Script,
    numbers: Arc<[u8]>,
    terms: Terms,
    /// How many limits it has.
    limits: usize,
    /// What each of its groups weighs.
    weight: usize,
    now_us: Option<u64>,
    /// None if it takes asks of any partition. Then no two of its groups have a key in common.
    partition: Option<u16>,
    /// Of its terms.
    hash: u64,
    groups: Vec<Group>,
    /// Whether some of its groups have a key in common.
    repeats: bool,
}

/// Consecutive identical asks: of the same keys, at the same costs.
#[derive(Debug)]
struct Group {
    /// Its keys and, last, its holder if it has one, among the batch's words.
    words: Range<usize>,
    partition: u16,
    costs: Costs,
    has_holder: bool,
    /// How many asks of this group are to be sent.
    asks: u32,
}

/// Where a key is: in which group, and which word it is.
#[derive(Clone, Copy, Debug)]
struct Found {
    id: GroupId,
    word: usize,
}

/// Identifies an ask's group: which call, and which group of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GroupId {
    pub(crate) call: u32,
    group: u32,
}

/// An ask that is sent: its group, and how many asks of the group come before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Position {
    pub(crate) group: GroupId,
    before: u32,
}

/// An ask that is sent in a call of its own.
#[derive(Debug)]
pub(crate) struct Alone<'a> {
    ask: &'a Ask<'a>,
    words: Words,
    group: Group,
}

/// The hash of each key of an ask.
pub(crate) type Hashes = SmallVec<[u64; 2]>;

impl Ask<'_> {
    /// The hashes of its keys, for [`Batch::add`].
    pub(crate) fn hashes(&self) -> Hashes {
        self.keys.iter().map(|key| HASHER.hash_one(key.as_slice())).collect()
    }

    pub(crate) fn alone(&self) -> Alone<'_> {
        let mut words = Words::default();
        let group = words.add(self);
        Alone { ask: self, words, group }
    }

    /// How many plain acquires take Redis the same time.
    fn weight(&self) -> usize {
        let each = if self.terms.id_ttl_ms.is_some() { 3 } else { 2 };
        if self.is_plain() { 1 } else { each * self.keys.len() }
    }

    /// A hash of all that the asks of a call have in common.
    fn terms_hash(&self, partition: Option<u16>) -> u64 {
        let numbers: &[u8] = &self.numbers;
        HASHER.hash_one((std::ptr::from_ref(self.script), numbers, &self.terms, self.now_us, partition))
    }
}

impl Alone<'_> {
    pub(crate) fn call(&self) -> ScriptCall<'_> {
        let Ask { script, ref numbers, ref terms, now_us, .. } = *self.ask;
        let (groups, words, limits) = (std::slice::from_ref(&self.group), &self.words, self.ask.limit_count());
        let (across_partitions, repeats, is_alone) = (false, false, true);
        ScriptCall { script, numbers, terms, limits, now_us, groups, words, across_partitions, repeats, is_alone }
    }
}

impl Words {
    fn get(&self, word: usize) -> &[u8] {
        let from = word.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[from..self.ends[word]]
    }

    fn push(&mut self, word: &[u8]) {
        self.bytes.extend_from_slice(word);
        self.ends.push(self.bytes.len());
    }

    /// Adds an ask's keys and holder. Returns its group.
    fn add(&mut self, ask: &Ask<'_>) -> Group {
        let from = self.ends.len();
        ask.keys.iter().for_each(|key| self.push(key));
        if let Some(holder) = &ask.holder {
            self.push(holder);
        }
        let (words, has_holder) = (from..self.ends.len(), ask.holder.is_some());
        Group { words, partition: ask.partition, costs: ask.costs.clone(), has_holder, asks: 1 }
    }
}

impl Batch {
    /// Whether this ask, which has these hashes, joins others, or there is room for another group.
    pub(crate) fn has_room(&self, ask: &Ask<'_>, hashes: &Hashes) -> bool {
        let joins = || self.joined(ask, &self.latest(ask, hashes)).is_some_and(|id| self.group(id).asks > 0);
        self.weight == 0 || self.weight + ask.weight() <= MOST_WEIGHT || joins()
    }

    fn group(&self, id: GroupId) -> &Group {
        &self.calls[id.call as usize].groups[id.group as usize]
    }

    fn group_mut(&mut self, id: GroupId) -> &mut Group {
        &mut self.calls[id.call as usize].groups[id.group as usize]
    }

    pub(crate) fn add(&mut self, ask: &Ask<'_>, hashes: &Hashes) -> GroupId {
        let latest = self.latest(ask, hashes);
        if let Some(id) = self.joined(ask, &latest) {
            let group = self.group_mut(id);
            group.asks += 1;
            if group.asks == 1 {
                self.weight += ask.weight();
            }
            return id;
        }
        let call = self.call_for(ask, latest.iter().flatten().map(|found| found.id.call).max());
        let group = self.words.add(ask);
        self.hashes.extend(hashes);
        self.hashes.resize(self.words.ends.len(), 0);
        self.weight += ask.weight();
        let first = group.words.start;
        let its = &mut self.calls[call as usize];
        its.repeats |= latest.iter().flatten().any(|found| found.id.call == call);
        let id = GroupId { call, group: as_u32(its.groups.len()) };
        its.groups.push(group);
        for (at, (before, hash)) in latest.iter().zip(hashes).enumerate() {
            let found = Found { id, word: first + at };
            match before {
                // A key's later group replaces the earlier one.
                Some(before) => {
                    if let Some(known) = self.by_key.find_mut(*hash, |known| known.word == before.word) {
                        *known = found;
                    }
                }
                None => _ = self.by_key.insert_unique(*hash, found, |found| self.hashes[found.word]),
            }
        }
        id
    }

    /// Takes out one ask that was added to this group. Its weight is free for others once nobody asks for the group.
    pub(crate) fn give_up(&mut self, id: GroupId) {
        let group = self.group_mut(id);
        group.asks -= 1;
        if group.asks == 0 {
            self.weight -= self.calls[id.call as usize].weight;
        }
    }

    pub(crate) fn weight(&self) -> usize {
        self.weight
    }

    /// Marks the asks that are to be sent, and returns their positions. Takes the groups of all asks, in the order in
    /// which they were added; none for an ask that isn't sent. No ask is added after this.
    pub(crate) fn mark_sent(&mut self, ids: impl Iterator<Item = Option<GroupId>>) -> Vec<Option<Position>> {
        self.calls.iter_mut().flat_map(|call| &mut call.groups).for_each(|group| group.asks = 0);
        let mut position = |id: GroupId| {
            let group = self.group_mut(id);
            group.asks += 1;
            Position { group: id, before: group.asks - 1 }
        };
        ids.map(|id| id.map(&mut position)).collect()
    }

    /// Its calls, with their indices as in [`GroupId`]. Calls whose asks were all given up are left out.
    pub(crate) fn calls(&self) -> impl Iterator<Item = (usize, ScriptCall<'_>)> {
        let all = self.calls.iter().enumerate();
        let asked = all.filter(|(_, call)| call.groups.iter().any(|group| group.asks > 0));
        asked.map(|(at, call)| (at, call.sent(&self.words)))
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
        self.words.bytes.clear();
        self.words.ends.clear();
        self.hashes.clear();
        self.by_key.clear();
        self.by_terms.clear();
        self.weight = 0;
    }

    /// The latest group of each of its keys.
    fn latest(&self, ask: &Ask<'_>, hashes: &Hashes) -> SmallVec<[Option<Found>; 2]> {
        let latest = |(key, hash): (&crate::key::Key, &u64)| {
            let is_its = |found: &Found| {
                let same = self.hashes[found.word] == *hash && *self.words.get(found.word) == **key;
                same && self.calls[found.id.call as usize].is_for(ask)
            };
            self.by_key.find(*hash, is_its).copied()
        };
        ask.keys.iter().zip(hashes).map(latest).collect()
    }

    /// The group that this ask joins: the latest of all its keys, at the same costs. Joining an earlier one would
    /// overtake another.
    fn joined(&self, ask: &Ask<'_>, latest: &[Option<Found>]) -> Option<GroupId> {
        let first = (*latest.first()?)?;
        let (call, group) = (&self.calls[first.id.call as usize], self.group(first.id));
        let are_its = latest
            .iter()
            .enumerate()
            .all(|(at, found)| found.is_some_and(|found| found.id == first.id && found.word == group.words.start + at));
        let takes = ask.joins() && group.costs == ask.costs && (ask.across_partitions || call.partition.is_some());
        (are_its && takes).then_some(first.id)
    }

    /// The call that takes another group for this ask, usually the last one; never one before those of its keys' latest
    /// groups.
    fn call_for(&mut self, ask: &Ask<'_>, latest: Option<u32>) -> u32 {
        // A call of several partitions never takes a key twice.
        let partition = Some(ask.partition).filter(|_| latest.is_some() || !ask.across_partitions);
        let is_its = |call: &BatchCall| call.partition == partition && call.is_for(ask);
        let most = (ask.most_keys / ask.weight()).max(1);
        let has_room = |call: &BatchCall| call.groups.len() < most;
        if self.calls.last().is_some_and(|last| is_its(last) && has_room(last)) {
            return as_u32(self.calls.len() - 1);
        }
        let hash = ask.terms_hash(partition);
        let found = self.by_terms.find_mut(hash, |at| is_its(&self.calls[*at as usize]));
        if let Some(at) = &found
            && has_room(&self.calls[**at as usize])
            && latest.is_none_or(|latest| latest <= **at)
        {
            return **at;
        }
        let new = as_u32(self.calls.len());
        match found {
            Some(at) => *at = new,
            None => _ = self.by_terms.insert_unique(hash, new, |at| self.calls[*at as usize].hash),
        }
        let Ask { script, ref numbers, ref terms, now_us, .. } = *ask;
        let (numbers, limits, weight) = (Arc::clone(numbers), ask.limit_count(), ask.weight());
        let groups = self.spare.pop().unwrap_or_default();
        self.calls.push(BatchCall {
            script,
            numbers,
            terms: terms.clone(),
            limits,
            weight,
            now_us,
            partition,
            hash,
            groups,
            repeats: false,
        });
        new
    }
}

fn as_u32(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

impl BatchCall {
    fn is_for(&self, ask: &Ask<'_>) -> bool {
        let same_numbers = Arc::ptr_eq(&self.numbers, &ask.numbers) || self.numbers == *ask.numbers;
        same_numbers && self.terms == ask.terms && std::ptr::eq(self.script, ask.script) && self.now_us == ask.now_us
    }

    fn sent<'a>(&'a self, words: &'a Words) -> ScriptCall<'a> {
        let Self { script, ref numbers, ref terms, limits, now_us, ref groups, repeats, .. } = *self;
        let mut asked = groups.iter().filter(|group| group.asks > 0).map(|group| group.partition);
        let first = asked.next();
        let across_partitions = self.partition.is_none() && asked.any(|partition| Some(partition) != first);
        let is_alone = false;
        ScriptCall { script, numbers, terms, limits, now_us, groups, words, across_partitions, repeats, is_alone }
    }
}

impl Group {
    fn keys(&self) -> Range<usize> {
        self.words.start..self.words.end - usize::from(self.has_holder)
    }
}
