//! The slot map of a cluster, as each server sees it.
//!
//! Slots go together in groups, which keeps the maps short.

use std::collections::BTreeMap;

use crc::{CRC_16_XMODEM, Crc};

use crate::engine::embedded::raw::Answer;

pub(super) const GROUPS: usize = 16;
const SLOTS: usize = 16_384 / GROUPS;
pub(super) const DOWN: &str = "CLUSTERDOWN The cluster is down";

static CRC: Crc<u16> = Crc::<u16>::new(&CRC_16_XMODEM);

/// The map as one server sees it.
#[derive(Clone, Debug)]
pub(super) struct Slots {
    /// The owner of each group.
    pub(super) owners: [usize; GROUPS],
    /// Groups moving away from here, and groups moving here.
    pub(super) migrating: BTreeMap<usize, usize>,
    pub(super) importing: BTreeMap<usize, usize>,
}

/// Where a server is, and which one is its replica.
pub(super) struct Node {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) replica: Option<usize>,
}

impl Slots {
    pub(super) fn new(owners: [usize; GROUPS]) -> Self {
        Self { owners, migrating: BTreeMap::new(), importing: BTreeMap::new() }
    }

    /// Learns that a server replaced another.
    pub(super) fn replace(&mut self, old: usize, new: usize) {
        self.owners.iter_mut().filter(|owner| **owner == old).for_each(|owner| *owner = new);
        let mut all = self.migrating.values_mut().chain(self.importing.values_mut());
        all.by_ref().filter(|server| **server == old).for_each(|server| *server = new);
    }

    /// What a server answers to a request for these keys, of which it lacks some, unless it has the slot. `primary` is
    /// the server, if it isn't a replica.
    pub(super) fn elsewhere(
        &self,
        primary: Option<usize>,
        keys: &[Vec<u8>],
        missing: usize,
        asking: bool,
        address: impl Fn(usize) -> String,
    ) -> Option<String> {
        let first = keys.first()?;
        let (slot, group) = (slot_of(first), group_of(first));
        if keys.iter().any(|key| slot_of(key) != slot) {
            return Some("CROSSSLOT Keys in request don't hash to the same slot".into());
        }
        let owner = self.owners[group];
        let named = |how: &str, to: usize| Some(format!("{how} {slot} {}", address(to)));
        if primary == Some(owner) {
            return match self.migrating.get(&group) {
                Some(to) if missing == keys.len() => named("ASK", *to),
                Some(_) if missing > 0 => Some("TRYAGAIN Multiple keys request during rehashing of slot".into()),
                _ => None,
            };
        }
        if self.importing.contains_key(&group) && asking && primary.is_some() {
            let several = keys.len() > 1 && missing > 0;
            return several.then(|| "TRYAGAIN Multiple keys request during rehashing of slot".into());
        }
        // A replica whose primary isn't known to have changed names that primary.
        named("MOVED", owner)
    }

    /// CLUSTER SLOTS.
    pub(super) fn shown(&self, node: impl Fn(usize) -> Node) -> Answer {
        let shown = |at: usize, node: &Node| {
            let host = Answer::Bytes(node.host.as_bytes().to_vec());
            let id = Answer::Bytes(format!("{at:040x}").into_bytes());
            Answer::Array(vec![host, Answer::Integer(node.port.into()), id])
        };
        let mut runs = Vec::new();
        let mut first = 0;
        while first < GROUPS {
            let owner = self.owners[first];
            let end = (first..GROUPS).find(|group| self.owners[*group] != owner).unwrap_or(GROUPS);
            let mut run = vec![Answer::Integer((first * SLOTS) as i64), Answer::Integer((end * SLOTS - 1) as i64)];
            let primary = node(owner);
            run.push(shown(owner, &primary));
            run.extend(primary.replica.map(|replica| shown(replica, &node(replica))));
            runs.push(Answer::Array(run));
            first = end;
        }
        Answer::Array(runs)
    }
}

fn slot_of(key: &[u8]) -> usize {
    let open = key.iter().position(|byte| *byte == b'{').map(|open| open + 1);
    let tag = open.and_then(|open| Some(&key[open..open + key[open..].iter().position(|byte| *byte == b'}')?]));
    usize::from(CRC.checksum(tag.filter(|tag| !tag.is_empty()).unwrap_or(key)) % 16_384)
}

pub(super) fn group_of(key: &[u8]) -> usize {
    slot_of(key) / SLOTS
}
