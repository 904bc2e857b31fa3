//! Which nodes there are, and the slot map. One task at a time refreshes it, however many callers notice a change.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use futures_util::stream::{self, StreamExt};
use redis::{Value, pipe};
use tokio::time::Instant;

use super::across_slots::AcrossSlots;
use super::slots::{self, Address, Run, SLOTS};
use crate::backoff::Backoff;
use crate::engine::redis::address::{Endpoint, host_and_port};
use crate::engine::redis::breaker::BreakerState;
use crate::engine::redis::{Confirm, Redis};
use crate::error::{Error, ErrorKind, Kind};
use crate::lock::Lock;
use crate::random::random;
use crate::runtime;
use crate::single_flight::{Flight, SingleFlight};

/// The pause between refreshes, at first; it doubles after each one that finds nothing new.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Longer by up to a half, so that processes don't all refresh at once.
const PAUSES: Backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE, 50);
/// How long one node may take to answer before another is asked, once there is a map.
const PATIENCE: Duration = Duration::from_millis(500);
/// The longest refresh.
const LONGEST_REFRESH: Duration = Duration::from_secs(2);
/// After this long, a refresh may be on a runtime that is no longer driven, so another begins. Longer than a refresh
/// takes even on a busy machine, since the result of a replaced one isn't noted.
const STUCK_REFRESH: Duration = Duration::from_millis(2_500);
/// Stands for the owner of a slot that no node has.
const NOBODY: u16 = u16::MAX;

pub(super) struct Topology {
    seeds: Vec<Endpoint>,
    known: RwLock<Known>,
    refreshing: Arc<SingleFlight>,
    pacing: Lock<Pacing>,
    looks: AtomicU64,
    /// The confirmation that every node's calls need.
    confirm: Option<Confirm>,
}

/// A node. It keeps its connection and its breaker while it is known.
pub(super) struct Node {
    host: String,
    port: u16,
    pub(super) redis: Redis,
    pub(super) across_slots: AcrossSlots,
}

struct Known {
    map: Map,
    /// Whether any node has given the map; until then only the seeds are known.
    said: bool,
    /// Why the last refresh failed, and when the next one may begin.
    failed: Option<(Error, Instant)>,
}

struct Map {
    /// For each slot, its primary's index in `nodes`.
    owners: Vec<u16>,
    nodes: Vec<Arc<Node>>,
}

/// When the next refresh may begin.
struct Pacing {
    pauses: Backoff,
    next: Option<Instant>,
}

impl Topology {
    pub(super) fn new(seeds: Vec<Endpoint>, confirm: Option<Confirm>) -> Result<Self, Error> {
        let nodes = seeds.iter().map(|seed| node(seed.clone(), confirm)).collect::<Result<Vec<_>, _>>()?;
        let map = Map { owners: vec![NOBODY; SLOTS], nodes };
        let known = RwLock::new(Known { map, said: false, failed: None });
        let pacing = Lock::new(Pacing { pauses: PAUSES, next: None });
        let (refreshing, looks) = (Arc::default(), AtomicU64::new(0));
        Ok(Self { seeds, known, refreshing, pacing, looks, confirm })
    }

    /// The node that has the slot, as far as known.
    pub(super) fn owner(&self, slot: u16) -> Option<Arc<Node>> {
        self.known().map.owner(slot).cloned()
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

    pub(super) fn seeds(&self) -> &[Endpoint] {
        &self.seeds
    }

    pub(super) async fn primaries(self: &Arc<Self>) -> Result<Vec<Redis>, Error> {
        self.at_last(Map::primaries).await
    }

    pub(super) fn nodes(&self) -> impl Iterator<Item = Arc<Node>> {
        self.known().map.nodes.clone().into_iter()
    }

    pub(super) fn refreshes(&self) -> u64 {
        self.looks.load(Ordering::Relaxed)
    }

    /// Reads something from the map, once there is one.
    async fn at_last<T>(self: &Arc<Self>, of: impl Fn(&Map) -> T) -> Result<T, Error> {
        let read = |known: &Known| match &known.failed {
            _ if known.said => Some(Ok(of(&known.map))),
            Some((error, next)) => Some(Err((error.clone(), next.saturating_duration_since(Instant::now())))),
            None => None,
        };
        let mut waited = false;
        loop {
            let mut ended = pin!(self.refreshing.ended());
            match read(&self.known()) {
                Some(Ok(found)) => return Ok(found),
                Some(Err((error, wait))) if !wait.is_zero() => {
                    return Err(if waited { error } else { error.for_unsent(wait) });
                }
                _ => {}
            }
            self.refresh_soon();
            // The refresh ends, is dropped, or is on a runtime that is no longer driven.
            let again = Instant::now() + LONGEST_REFRESH / 4;
            if runtime::timeout_at(again, ended.as_mut()).await.is_none() && Instant::now() < again {
                // There are no timers outside a runtime: only the end of the refresh, or the caller's deadline, ends
                // this.
                ended.await;
            }
            waited = true;
        }
    }

    /// Notes a redirect, permanently if a slot is given, and returns the node it leads to.
    pub(super) fn learn(self: &Arc<Self>, named: &str, by: &Node, slot: Option<u16>) -> Result<Arc<Node>, Error> {
        let bad =
            || Error::new(Kind::Garbled, format!("redis redirected the call to {named:?}, which isn't host:port"));
        let (host, port) = host_and_port(named).ok_or_else(bad)?;
        let host = if host.is_empty() { by.host.as_str() } else { host };
        let known = self.known().map.at(host, port).cloned();
        let mut found = known.map_or_else(|| self.node(host, port), Ok)?;
        {
            let map = &mut self.known_mut().map;
            let at = map.nodes.iter().position(|node| node.is(host, port)).unwrap_or_else(|| {
                map.nodes.push(Arc::clone(&found));
                map.nodes.len() - 1
            });
            // Another call may have added it meanwhile: a node has one connection.
            found = Arc::clone(&map.nodes[at]);
            if let (Some(slot), Ok(owner)) = (slot, u16::try_from(at)) {
                map.owners[usize::from(slot)] = owner;
            }
        }
        if slot.is_some() {
            self.refresh_soon();
        }
        Ok(found)
    }

    /// Refreshes the slot map, unless a refresh is running or recent.
    pub(super) fn refresh_soon(self: &Arc<Self>) {
        let (flight, at) = {
            let (mut pacing, now) = (self.pacing.lock(), Instant::now());
            let at = pacing.next.map_or(now, |next| next.max(now));
            let Some(flight) = self.refreshing.begin(Some(at + STUCK_REFRESH)) else { return };
            if pacing.next.is_none_or(|next| now > next + LONGEST_PAUSE) {
                pacing.pauses.reset();
            }
            (flight, at)
        };
        // The caller's runtime may end with its call. Outside one, the library's own does it.
        let Some(runtime) = runtime::current().ok().or_else(runtime::own) else {
            let why = "the cluster's nodes were not asked for its slots: no thread could be started";
            return self.note(Err(Error::new(Kind::Unreachable, why)));
        };
        let (this, flight) = (Arc::clone(self), Arc::new(flight));
        runtime::spawn_lasting(&runtime, move || Arc::clone(&this).refresh(Arc::clone(&flight), at));
    }

    async fn refresh(self: Arc<Self>, flight: Arc<Flight>, at: Instant) {
        tokio::time::sleep_until(at).await;
        if !flight.is_current() {
            return;
        }
        let found = tokio::time::timeout(LONGEST_REFRESH, self.ask_nodes()).await;
        let found = found.unwrap_or_else(|_| Err(Error::deadline(LONGEST_REFRESH, false)));
        // If it was stuck, what it found may be out of date.
        if flight.is_current() {
            self.note(found);
        }
    }

    /// Notes what a refresh has found, and when the next may begin.
    fn note(&self, found: Result<Vec<Run>, Error>) {
        // Nodes that are no longer known are dropped outside the lock: dropping one may report its breaker, and whoever
        // gets the report may ask for the other nodes.
        let _before;
        let known = &mut *self.known_mut();
        let map = found.and_then(|runs| self.map_of(&runs, &known.map));
        let changed = map.as_ref().is_ok_and(|map| !known.said || !map.is_as(&known.map));
        let Pacing { pauses, next } = &mut *self.pacing.lock();
        if changed {
            pauses.reset();
        }
        let next = *next.insert(Instant::now() + pauses.pause());
        match map {
            Ok(map) => _before = std::mem::replace(known, Known { map, said: true, failed: None }),
            Err(error) => known.failed = Some((error, next)),
        }
    }

    /// Asks the nodes one by one until one returns the slot map, those with a closed breaker first. Until a first map
    /// is known, asks all of them at once. A node that finds the cluster down, such as one cut off from the others, is
    /// believed only if no other knows better.
    async fn ask_nodes(&self) -> Result<Vec<Run>, Error> {
        let mut nodes: Vec<_> = self.nodes().collect();
        nodes.sort_by_cached_key(|node| (node.redis.breaker() != BreakerState::Closed, random()));
        let unknown = |seed: &&Endpoint| !nodes.iter().any(|node| node.is(seed.host(), seed.port()));
        let seeds = self.seeds.iter().filter(unknown).map(|seed| node(seed.clone(), self.confirm));
        let seeds = seeds.collect::<Result<Vec<_>, _>>()?;
        let (mut doubtful, mut why) = (None, None);
        // When all nodes are asked at once, none delays another, and connecting to a distant one may take long. But a
        // silent one is given up before the refresh is, so that the others' answers count.
        let (at_once, patience) =
            if self.known().said { (1, PATIENCE) } else { (nodes.len(), LONGEST_REFRESH * 3 / 4) };
        let nodes = nodes.into_iter().chain(seeds).map(|node| {
            self.looks.fetch_add(1, Ordering::Relaxed);
            async move { node.says(patience).await }
        });
        let mut answers = stream::iter(nodes).buffer_unordered(at_once);
        while let Some(answer) = answers.next().await {
            match answer {
                Ok((runs, true)) => return Ok(runs),
                Ok((runs, false)) => doubtful = doubtful.or(Some(runs)),
                // A refused password is more informative than a node that can't be reached.
                Err(_) if why.as_ref().is_some_and(|why: &Error| why.kind() == ErrorKind::Authentication) => {}
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
        node(self.seeds[0].elsewhere(host, port), self.confirm)
    }

    fn known(&self) -> RwLockReadGuard<'_, Known> {
        self.known.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn known_mut(&self) -> RwLockWriteGuard<'_, Known> {
        self.known.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Node {
    /// The runs of slots that this node reports, and whether it reports the cluster as working.
    async fn says(&self, patience: Duration) -> Result<(Vec<Run>, bool), Error> {
        let mut questions = pipe();
        questions.cmd("CLUSTER").arg("SLOTS").cmd("CLUSTER").arg("INFO");
        let answers: Result<(Value, String), _> = self.redis.ask(&questions, patience).await;
        let (slots, info) = answers.map_err(|error| said_of_a_cluster(error, self))?;
        match slots::read(&slots, &self.host) {
            Some(runs) if !runs.is_empty() => Ok((runs, info.contains("cluster_state:ok"))),
            Some(_) => Err(Error::new(Kind::NotNow, "no node of the cluster has slots yet")),
            None => Err(Error::new(Kind::Garbled, "the node's answer to CLUSTER SLOTS can't be read")),
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

fn node(endpoint: Endpoint, confirm: Option<Confirm>) -> Result<Arc<Node>, Error> {
    let (host, port) = (endpoint.host().to_owned(), endpoint.port());
    Ok(Arc::new(Node { host, port, redis: Redis::at(endpoint, confirm)?, across_slots: AcrossSlots::default() }))
}

/// A Redis that isn't part of a cluster rejects the command.
fn said_of_a_cluster(error: Error, node: &Node) -> Error {
    if error.kind() == ErrorKind::Refused && error.to_string().contains("cluster support disabled") {
        let got = node.redis.address();
        return Error::new(Kind::Input, format!("url: expected nodes of a cluster, got a single Redis at {got}"));
    }
    error
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    /// As one does that goes on after its runtime was blocked.
    #[tokio::test]
    async fn a_refresh_that_another_has_replaced_notes_nothing() {
        let seed = crate::engine::redis::address::address("redis://127.0.0.1:1/").unwrap();
        let topology = Arc::new(Topology::new(vec![seed], None).unwrap());
        let [stuck, current] = [(); 2].map(|()| topology.refreshing.begin(Some(Instant::now())).unwrap());
        for (flight, notes) in [(stuck, false), (current, true)] {
            Arc::clone(&topology).refresh(Arc::new(flight), Instant::now()).await;
            assert_eq!(topology.known().failed.is_some(), notes);
        }
    }

    #[test]
    fn who_learn_of_a_node_at_the_same_time_learn_of_the_same() {
        let seed = crate::engine::redis::address::address("redis://127.0.0.1:1/").unwrap();
        let topology = Arc::new(Topology::new(vec![seed], None).unwrap());
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
