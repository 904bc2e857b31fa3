//! Which nodes there are, and the slot map. One task at a time refreshes it, however many callers notice a change.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard, OnceLock};
use std::time::Duration;

use futures_util::stream::{self, StreamExt};
use redis::{Value, pipe};
use tokio::sync::watch;
use tokio::time::Instant;

use super::slots::{self, Address, Run, SLOTS};
use crate::backoff::Backoff;
use crate::engine::redis::address::{Endpoint, host_and_port};
use crate::engine::redis::breaker::Breaker;
use crate::engine::redis::{Confirm, Redis};
use crate::error::{Error, Kind};
use crate::lock::Lock;
use crate::random::random;

/// The pause between refreshes, at first; it doubles after each one that finds nothing new.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Longer by up to a half, so that processes don't all refresh at once.
const PAUSES: Backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE, 50);
/// How long one node may take to answer before another is asked.
const PATIENCE: Duration = Duration::from_millis(500);
/// The longest refresh. One that has taken this long may be on a runtime that is no longer driven, so another begins.
const LONGEST_REFRESH: Duration = Duration::from_secs(2);
/// Stands for the owner of a slot that no node has.
const NOBODY: u16 = u16::MAX;

pub(super) struct Topology {
    seeds: Vec<Endpoint>,
    known: watch::Sender<Known>,
    refreshing: Lock<Refreshing>,
    looks: AtomicU64,
    /// The confirmation that every node's calls need.
    pub(super) confirm: OnceLock<Confirm>,
}

/// A node. It keeps its connection and its breaker while it is known.
pub(super) struct Node {
    host: String,
    port: u16,
    pub(super) redis: Redis,
}

struct Known {
    map: Map,
    /// Whether any node has given the map; until then only the seeds are known.
    said: bool,
    /// Why the first refresh failed, and when the next one may begin.
    failed: Option<(Error, Instant)>,
}

struct Map {
    /// For each slot, its primary's index in `nodes`.
    owners: Vec<u16>,
    nodes: Vec<Arc<Node>>,
}

struct Refreshing {
    /// When the running refresh began.
    since: Option<Instant>,
    number: u64,
    pauses: Backoff,
    next: Option<Instant>,
}

impl Default for Refreshing {
    fn default() -> Self {
        Self { since: None, number: 0, pauses: PAUSES, next: None }
    }
}

/// A running refresh. However it is dropped, another may begin.
struct Refresh {
    topology: Arc<Topology>,
    number: u64,
}

impl Topology {
    pub(super) fn new(seeds: Vec<Endpoint>) -> Result<Self, Error> {
        let nodes = seeds.iter().map(|seed| node(seed.clone())).collect::<Result<Vec<_>, _>>()?;
        let map = Map { owners: vec![NOBODY; SLOTS], nodes };
        let known = watch::Sender::new(Known { map, said: false, failed: None });
        Ok(Self { seeds, known, refreshing: Lock::default(), looks: AtomicU64::new(0), confirm: OnceLock::new() })
    }

    /// The node that has the slot, as far as known.
    pub(super) fn owner(&self, slot: u16) -> Option<Arc<Node>> {
        self.known.borrow().map.owner(slot).cloned()
    }

    /// The same, after the first refresh if there was none; waits as long as that takes.
    pub(super) async fn owner_at_last(self: &Arc<Self>, slot: u16) -> Result<Arc<Node>, Error> {
        let of_nobody = || Error::new(Kind::NotNow, format!("no node of the cluster has slot {slot} now"));
        let owner = self.at_last(|map| map.owner(slot).cloned()).await?;
        owner.ok_or_else(|| {
            self.refresh_soon();
            of_nobody()
        })
    }

    pub(super) async fn primaries(self: &Arc<Self>) -> Result<Vec<Redis>, Error> {
        self.at_last(Map::primaries).await
    }

    pub(super) fn nodes(&self) -> impl Iterator<Item = Arc<Node>> {
        self.known.borrow().map.nodes.clone().into_iter()
    }

    pub(super) fn refreshes(&self) -> u64 {
        self.looks.load(Ordering::Relaxed)
    }

    /// Reads something from the map, once there is one.
    async fn at_last<T>(self: &Arc<Self>, of: impl Fn(&Map) -> T) -> Result<T, Error> {
        let mut known = self.known.subscribe();
        let read = |known: &Known| match &known.failed {
            _ if known.said => Some(Ok(of(&known.map))),
            Some((error, next)) => Some(Err((error.clone(), next.saturating_duration_since(Instant::now())))),
            None => None,
        };
        match read(&known.borrow_and_update()) {
            Some(Ok(found)) => return Ok(found),
            Some(Err((error, wait))) if !wait.is_zero() => return Err(error.for_unsent(wait)),
            _ => {}
        }
        loop {
            self.refresh_soon();
            // The refresh ends, is dropped, or is on a runtime that is no longer driven.
            let _ = tokio::time::timeout(LONGEST_REFRESH / 4, known.changed()).await;
            match read(&known.borrow_and_update()) {
                Some(Ok(found)) => return Ok(found),
                Some(Err((error, wait))) if !wait.is_zero() => return Err(error),
                _ => {}
            }
        }
    }

    /// Notes a redirect, permanently if it names a slot, and returns the node it leads to.
    pub(super) fn learn(self: &Arc<Self>, named: &str, by: &Node, slot: Option<u16>) -> Result<Arc<Node>, Error> {
        let bad = || Error::new(Kind::Garbled, format!("expected another node's host:port from redis, got {named:?}"));
        let (host, port) = host_and_port(named).ok_or_else(bad)?;
        let host = if host.is_empty() { by.host.as_str() } else { host };
        let known = self.known.borrow().map.at(host, port).cloned();
        let mut found = known.map_or_else(|| self.node(host, port), Ok)?;
        self.known.send_modify(|known| {
            let map = &mut known.map;
            let at = map.nodes.iter().position(|node| node.is(host, port)).unwrap_or_else(|| {
                map.nodes.push(Arc::clone(&found));
                map.nodes.len() - 1
            });
            // Another call may have added it meanwhile: a node has one connection.
            found = Arc::clone(&map.nodes[at]);
            if let (Some(slot), Ok(owner)) = (slot, u16::try_from(at)) {
                map.owners[usize::from(slot)] = owner;
            }
        });
        if slot.is_some() {
            self.refresh_soon();
        }
        Ok(found)
    }

    /// Refreshes the slot map, unless a refresh is running or recent.
    pub(super) fn refresh_soon(self: &Arc<Self>) {
        let (number, at) = {
            let (mut refreshing, now) = (self.refreshing(), Instant::now());
            if refreshing.since.is_some_and(|since| now - since < LONGEST_REFRESH) {
                return;
            }
            if refreshing.next.is_none_or(|next| now > next + LONGEST_PAUSE) {
                refreshing.pauses.reset();
            }
            let at = refreshing.next.map_or(now, |next| next.max(now));
            refreshing.since = Some(at);
            refreshing.number += 1;
            (refreshing.number, at)
        };
        tokio::spawn(Refresh { topology: Arc::clone(self), number }.begin(at));
    }

    /// Asks the nodes one by one until one returns the slot map, those with a closed breaker first. Until a first map
    /// is known, asks all of them at once. A node that finds the cluster down, such as one cut off from the others, is
    /// believed only if no other knows better.
    async fn ask_nodes(&self) -> Result<Vec<Run>, Error> {
        let mut nodes: Vec<_> = self.nodes().collect();
        nodes.sort_by_cached_key(|node| (node.redis.breaker() != Breaker::Closed, random()));
        let unknown = |seed: &&Endpoint| !nodes.iter().any(|node| node.is(seed.host(), seed.port()));
        let seeds = self.seeds.iter().filter(unknown).map(|seed| node(seed.clone()));
        let seeds = seeds.collect::<Result<Vec<_>, _>>()?;
        let (mut doubtful, mut why) = (None, None);
        let at_once = if self.known.borrow().said { 1 } else { nodes.len() };
        let nodes = nodes.into_iter().chain(seeds).map(|node| {
            self.looks.fetch_add(1, Ordering::Relaxed);
            async move { node.says().await }
        });
        let mut answers = stream::iter(nodes).buffer_unordered(at_once);
        while let Some(answer) = answers.next().await {
            match answer {
                Ok((runs, true)) => return Ok(runs),
                Ok((runs, false)) => doubtful = doubtful.or(Some(runs)),
                // A refused password says more than a node that can't be reached.
                Err(_) if why.as_ref().is_some_and(Error::is_authentication) => {}
                Err(error) => why = Some(error),
            }
        }
        match (doubtful, why) {
            (Some(runs), _) => Ok(runs),
            (None, Some(error)) => Err(error),
            (None, None) => Err(Error::new(Kind::Unreachable, "no node of the cluster is known")),
        }
    }

    /// The map of these runs, reusing nodes already known.
    fn map_of(&self, runs: &[Run], before: &Map) -> Result<Map, Error> {
        let mut map = Map { owners: vec![NOBODY; SLOTS], nodes: Vec::new() };
        let mut places: HashMap<&Address, usize> = HashMap::new();
        for Run { first, last, primary, replicas } in runs {
            for address in primary.iter().chain(replicas) {
                if !places.contains_key(address) {
                    let Address { host, port } = address;
                    let known = before.at(host, *port).cloned();
                    map.nodes.push(known.map_or_else(|| self.node(host, *port), Ok)?);
                    places.insert(address, map.nodes.len() - 1);
                }
            }
            let owner = primary.as_ref().and_then(|primary| u16::try_from(places[primary]).ok());
            map.owners[usize::from(*first)..=usize::from(*last)].fill(owner.unwrap_or(NOBODY));
        }
        Ok(map)
    }

    fn node(&self, host: &str, port: u16) -> Result<Arc<Node>, Error> {
        let node = node(self.seeds[0].elsewhere(host, port))?;
        node.redis.confirm(self.confirm.get().copied());
        Ok(node)
    }

    fn refreshing(&self) -> MutexGuard<'_, Refreshing> {
        self.refreshing.lock()
    }
}

impl Refresh {
    async fn begin(self, at: Instant) {
        tokio::time::sleep_until(at).await;
        let found = tokio::time::timeout(LONGEST_REFRESH, self.topology.ask_nodes()).await;
        let found = found.unwrap_or_else(|_| Err(Error::deadline(LONGEST_REFRESH, false)));
        let mut changed = false;
        let next = |changed: bool| {
            let mut refreshing = self.topology.refreshing();
            if changed {
                refreshing.pauses.reset();
            }
            let next = Instant::now() + refreshing.pauses.pause();
            refreshing.next = Some(next);
            next
        };
        self.topology.known.send_modify(|known| match found.and_then(|runs| self.topology.map_of(&runs, &known.map)) {
            Ok(map) => {
                changed = !known.said || !map.is_as(&known.map);
                (known.map, known.said, known.failed) = (map, true, None);
                next(changed);
            }
            Err(error) => known.failed = Some((error, next(false))),
        });
    }
}

impl Drop for Refresh {
    fn drop(&mut self) {
        {
            let mut refreshing = self.topology.refreshing();
            if refreshing.number == self.number {
                refreshing.since = None;
            }
        }
        // A waiter may have to refresh the map itself.
        self.topology.known.send_modify(|_| ());
    }
}

impl Node {
    /// The runs of slots that this node reports, and whether it finds the cluster well.
    async fn says(&self) -> Result<(Vec<Run>, bool), Error> {
        let mut questions = pipe();
        questions.cmd("CLUSTER").arg("SLOTS").cmd("CLUSTER").arg("INFO");
        let answers: Result<(Value, String), _> = self.redis.ask(&questions, PATIENCE).await;
        let (slots, info) = answers.map_err(|error| said_of_a_cluster(error, self))?;
        match slots::read(&slots, &self.host) {
            Some(runs) if !runs.is_empty() => Ok((runs, info.contains("cluster_state:ok"))),
            Some(_) => Err(Error::new(Kind::NotNow, "the cluster's slots have no nodes yet")),
            None => Err(Error::new(Kind::Garbled, "expected the cluster's slots, got something else")),
        }
    }

    fn is(&self, host: &str, port: u16) -> bool {
        self.port == port && self.host == host
    }
}

impl Map {
    fn owner(&self, slot: u16) -> Option<&Arc<Node>> {
        self.nodes.get(usize::from(*self.owners.get(usize::from(slot))?))
    }

    fn at(&self, host: &str, port: u16) -> Option<&Arc<Node>> {
        self.nodes.iter().find(|node| node.is(host, port))
    }

    fn primaries(&self) -> Vec<Redis> {
        let has_slots = |at: &usize| self.owners.iter().any(|owner| usize::from(*owner) == *at);
        let mut primaries: Vec<_> = (0..self.nodes.len()).filter(has_slots).map(|at| &self.nodes[at]).collect();
        primaries.sort_by_key(|node| (&node.host, node.port));
        primaries.into_iter().map(|node| node.redis.clone()).collect()
    }

    fn is_as(&self, other: &Self) -> bool {
        let same = |(one, another): (&u16, &u16)| match (
            self.nodes.get(usize::from(*one)),
            other.nodes.get(usize::from(*another)),
        ) {
            (Some(one), Some(another)) => Arc::ptr_eq(one, another),
            (None, None) => true,
            _ => false,
        };
        self.owners.iter().zip(&other.owners).all(same)
    }
}

fn node(endpoint: Endpoint) -> Result<Arc<Node>, Error> {
    let (host, port) = (endpoint.host().to_owned(), endpoint.port());
    Ok(Arc::new(Node { host, port, redis: Redis::at(endpoint)? }))
}

/// A Redis that isn't part of a cluster rejects the command.
fn said_of_a_cluster(error: Error, node: &Node) -> Error {
    if error.is_refused() && error.to_string().contains("cluster support disabled") {
        let got = node.redis.address();
        return Error::new(Kind::Input, format!("url: expected nodes of a cluster, got {got}, which is in none"));
    }
    error
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn who_learn_of_a_node_at_the_same_time_learn_of_the_same() {
        let seed = crate::engine::redis::address::address("redis://127.0.0.1:1/").unwrap();
        let topology = Arc::new(Topology::new(vec![seed]).unwrap());
        let by = topology.nodes().next().unwrap();
        let barrier = Barrier::new(2);
        let learned = || {
            (2..500)
                .map(|port| {
                    barrier.wait();
                    topology.learn(&format!("127.0.0.1:{port}"), &by, None).unwrap()
                })
                .collect::<Vec<_>>()
        };
        let (one, other) = std::thread::scope(|scope| {
            let one = scope.spawn(learned);
            (learned(), one.join().unwrap())
        });
        let differ = one.iter().zip(&other).filter(|(one, other)| !Arc::ptr_eq(one, other)).count();
        assert_eq!((differ, topology.nodes().count()), (0, 499));
    }
}
