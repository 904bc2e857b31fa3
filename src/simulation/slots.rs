//! The slot map of a cluster, as each server sees it.
//!
//! Slots go together in groups, which keeps the maps short.

use std::collections::BTreeMap;

use crc::{CRC_16_XMODEM, Crc};

use super::server::{Role, Server};
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
}

fn slot_of(key: &[u8]) -> usize {
    let open = key.iter().position(|byte| *byte == b'{').map(|open| open + 1);
    let tag = open.and_then(|open| Some(&key[open..open + key[open..].iter().position(|byte| *byte == b'}')?]));
    usize::from(CRC.checksum(tag.filter(|tag| !tag.is_empty()).unwrap_or(key)) % 16_384)
}

pub(super) fn group_of(key: &[u8]) -> usize {
    slot_of(key) / SLOTS
}

/// A cluster server's answer to a request for keys that it doesn't have.
pub(super) fn elsewhere(server: &Server, keys: &[Vec<u8>], asking: bool) -> Option<String> {
    let mut state = server.state();
    let first = keys.first()?;
    let (slot, group) = (slot_of(first), group_of(first));
    state.slots.as_ref()?;
    if keys.iter().any(|key| slot_of(key) != slot) {
        return Some("CROSSSLOT Keys in request don't hash to the same slot".into());
    }
    state.store.set_time(server.network.now_us());
    let missing = keys.iter().filter(|key| !state.store.has(key)).count();
    let replica = state.role == Role::Replica;
    let slots = state.slots.as_ref()?;
    let owner = slots.owners[group];
    let (migrating, importing) = (slots.migrating.get(&group).copied(), slots.importing.contains_key(&group));
    drop(state);
    let named = |how: &str, to: usize| Some(format!("{how} {slot} {}", server.network.server(to).address()));
    if owner == server.at && !replica {
        return match migrating {
            Some(to) if missing == keys.len() => named("ASK", to),
            Some(_) if missing > 0 => Some("TRYAGAIN Multiple keys request during rehashing of slot".into()),
            _ => None,
        };
    }
    if importing && asking && !replica {
        let several = keys.len() > 1 && missing > 0;
        return several.then(|| "TRYAGAIN Multiple keys request during rehashing of slot".into());
    }
    // A replica whose primary isn't known to have changed names that primary.
    named("MOVED", owner)
}

/// CLUSTER SLOTS.
pub(super) fn shown(server: &Server) -> Answer {
    let Some(slots) = server.state().slots.clone() else {
        return Answer::Error("ERR This instance has cluster support disabled".into());
    };
    let node = |at: usize| {
        let node = server.network.server(at);
        let host = Answer::Bytes(node.host().as_bytes().to_vec());
        let id = Answer::Bytes(format!("{at:040x}").into_bytes());
        Answer::Array(vec![host, Answer::Integer(node.port().into()), id])
    };
    let mut runs = Vec::new();
    let mut first = 0;
    while first < GROUPS {
        let owner = slots.owners[first];
        let end = (first..GROUPS).find(|group| slots.owners[*group] != owner).unwrap_or(GROUPS);
        let mut run = vec![Answer::Integer((first * SLOTS) as i64), Answer::Integer((end * SLOTS - 1) as i64)];
        run.push(node(owner));
        let replica = server.network.server(owner).state().other;
        run.extend(replica.map(node));
        runs.push(Answer::Array(run));
        first = end;
    }
    Answer::Array(runs)
}
