//! A Redis Cluster: every call goes to the node that has its keys' slot, which is a Redis like any other.
//!
//! Each node has its own connection, line of callers and breaker, so that a dead one harms nobody but those who count by
//! its keys. redis-rs's cluster client (1.8) isn't between. With its retries on it sends again what may have run; with
//! them off, a primary that was killed made calls to the other two fail as well, all of them after a few seconds, as it
//! keeps everybody waiting while it looks for it. And it sends each call by itself.

mod slots;
mod topology;

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures_util::future::{join, join_all};
#[cfg(feature = "postgres")]
use redis::{FromRedisValue, Pipeline};
use tokio::time::Instant;

use super::deadline::Deadline;
use super::redis::address;
use super::redis::breaker::Breaker;
#[cfg(feature = "tls")]
use super::redis::tls::Tls;
use super::redis::{Asking, Confirm, Redis};
use crate::batch::Ask;
use crate::error::{Detour, Error, Kind};
use crate::random::jittered;
use crate::runtime;
use crate::script::{Call, Reply};
use slots::slot_of;
use topology::{Node, Topology};

/// How often nodes may name each other for one call.
const MOST_DETOURS: u32 = 8;
/// From the second detour on they don't agree yet: so long is waited, and as long again for each further one.
const DISAGREEMENT: Duration = Duration::from_millis(5);

/// A Redis Cluster (7.0 or newer) or one of Valkey (7.2 or newer), by the addresses of some of its nodes.
///
/// Connects to each node at the first decision on one of its keys. Which node has which slot is asked of one node at the
/// first decision, and again when a node says that a slot has moved, or doesn't answer: once at a time, with pauses of
/// 100 ms to 1 s for as long as nothing changes. It takes one round trip, which decisions don't wait for but the first.
///
/// What a node says of a slot that has moved (MOVED), that is moving (ASK, followed in one pipeline with ASKING), or whose
/// keys are in two places (TRYAGAIN) is followed within the deadline, at a round trip each; nothing is sent twice that may
/// have run. Decisions on keys of several nodes go to all of them at the same time, and only those on keys of one slot
/// share a call of a script: the others are pipelined.
#[derive(Clone)]
pub struct Cluster {
    topology: Arc<Topology>,
}

/// What is asked of a node.
#[derive(Clone, Copy)]
enum NodeCall<'a> {
    Call(&'a Call<'a>),
    Ask(&'a Ask<'a>),
}

/// How it is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Routing {
    /// With others of its slot, where that can be.
    Batched,
    /// By a call of its own: of keys that share a slot, some may have moved and some not.
    Alone,
    /// The same behind an ASKING, in a slot that is on its way to the node.
    Asking,
}

impl Cluster {
    /// The cluster that these nodes belong to: `redis-cluster://[user:password@]host[:port][,host[:port]...]`, with
    /// `?protocol=resp3` at will; user and password are those of every node. One node suffices, as long as it is up
    /// when the first decision is made. Connects later.
    ///
    /// With the feature `tls` also at `rediss-cluster://...`, if each node's certificate is for the host by which the
    /// others know it, and by one of the platform's authorities; `open_with_tls` says otherwise.
    ///
    /// # Errors
    ///
    /// An address that can't be read, or one that ends in `#insecure`: no certificate goes unchecked.
    pub fn open(url: &str) -> Result<Self, Error> {
        Self::of(address::cluster(url)?)
    }

    /// The cluster at `rediss-cluster://...`, with authorities or a client's certificate of the caller's own; see
    /// [`Redis::open_with_tls`].
    ///
    /// # Errors
    ///
    /// An address that can't be read, or that isn't one of TLS.
    #[cfg(feature = "tls")]
    pub fn open_with_tls(url: &str, tls: &Tls) -> Result<Self, Error> {
        let nodes = address::cluster(url)?.into_iter().map(|node| node.by(tls, url));
        Self::of(nodes.collect::<Result<_, _>>()?)
    }

    fn of(seeds: Vec<address::Endpoint>) -> Result<Self, Error> {
        Ok(Self { topology: Arc::new(Topology::new(seeds)?) })
    }

    /// Lets an allowed call be an answer only when so many replicas of its node have what it took; see
    /// [`Redis::confirmed_by`].
    #[must_use]
    pub fn confirmed_by(self, replicas: u8, within: Duration) -> Self {
        if let Some(confirm) = Confirm::by(replicas, within) {
            // A second call changes nothing.
            let _ = self.topology.confirm.set(confirm);
            self.topology.nodes().for_each(|node| node.redis.confirm(Some(confirm)));
        }
        self
    }

    /// The nodes that have slots, each as a Redis that decides on its own keys alone, by address.
    ///
    /// # Errors
    ///
    /// No node says by the deadline who they are.
    pub async fn primaries(&self, deadline: Duration) -> Result<Vec<Redis>, Error> {
        let until = Deadline::after(deadline);
        runtime::with_timers()?;
        let known = tokio::time::timeout_at(until.at, self.topology.primaries()).await;
        known.unwrap_or_else(|_| Err(Error::deadline(deadline, false)))
    }

    /// Whether each known node is asked at present, by address.
    #[must_use]
    pub fn breakers(&self) -> Vec<(String, Breaker)> {
        self.topology.nodes().map(|node| (node.redis.address().to_owned(), node.redis.breaker())).collect()
    }

    /// Connections made so far to the nodes that are known; see [`Redis::connections`].
    #[must_use]
    pub fn connections(&self) -> u64 {
        self.topology.nodes().map(|node| node.redis.connections()).sum()
    }

    /// How often a new connection to one of the nodes that are known found another server process than the last one;
    /// see [`Redis::restarts`].
    #[must_use]
    pub fn restarts(&self) -> u64 {
        self.topology.nodes().map(|node| node.redis.restarts()).sum()
    }

    /// How often a node was asked which node has which slot.
    #[must_use]
    pub fn refreshes(&self) -> u64 {
        self.topology.refreshes()
    }

    pub(crate) async fn run(&self, call: &Call<'_>, deadline: Duration) -> Result<Reply, Error> {
        let slot = slot_of_all(call)?;
        self.ask(NodeCall::Call(call), slot, Deadline::after(deadline)).await
    }

    /// Decides this ask, alone or with others of its slot.
    pub(crate) async fn acquire(&self, ask: Ask<'_>, deadline: Duration) -> Result<Reply, Error> {
        let slot = slot_of(&ask.key);
        let ask = Ask { partition: slot, ..ask };
        self.ask(NodeCall::Ask(&ask), slot, Deadline::after(deadline)).await
    }

    /// Decides all of these at the same time, each by itself and by its deadline.
    pub(crate) async fn acquire_all(&self, asks: Vec<(Ask<'_>, Duration)>) -> Vec<Result<Reply, Error>> {
        let began = Instant::now();
        let asks = asks.into_iter().map(|(ask, deadline)| {
            let slot = slot_of(&ask.key);
            (Ask { partition: slot, ..ask }, slot, Deadline::counted_from(began, deadline))
        });
        let asks: Vec<_> = asks.collect();
        let mut of_nodes: Vec<(Arc<Node>, Vec<usize>)> = Vec::new();
        let mut of_nobody = Vec::new();
        for (at, (_, slot, _)) in asks.iter().enumerate() {
            let Some(node) = self.topology.owner(*slot) else {
                of_nobody.push(at);
                continue;
            };
            match of_nodes.iter_mut().find(|(other, _)| Arc::ptr_eq(other, &node)) {
                Some((_, asks)) => asks.push(at),
                None => of_nodes.push((node, vec![at])),
            }
        }
        let asks = &asks;
        // A redirected call doesn't wait for other nodes.
        let at_node = async |(node, of_node): (Arc<Node>, Vec<usize>)| {
            let asked = of_node.iter().map(|at| (asks[*at].0.clone(), asks[*at].2.length));
            let mut many = node.redis.acquire_all(asked);
            let mut answers = Vec::with_capacity(of_node.len());
            while let Some(answer) = many.next().await {
                answers.push(answer);
            }
            let (answered, failed): (Vec<_>, Vec<_>) =
                of_node.into_iter().zip(answers).partition(|(_, answer)| answer.is_ok());
            let followed =
                failed.into_iter().filter_map(|(at, answer)| Some((at, answer.err()?))).map(async |(at, error)| {
                    let (ask, slot, until) = &asks[at];
                    (at, self.after(error, Arc::clone(&node), NodeCall::Ask(ask), *slot, *until).await)
                });
            let followed = join_all(followed).await;
            answered.into_iter().chain(followed).collect::<Vec<_>>()
        };
        let at_last = of_nobody.iter().map(async |at| {
            let (ask, slot, until) = &asks[*at];
            (*at, self.ask(NodeCall::Ask(ask), *slot, *until).await)
        });
        let (answered, at_last) = join(join_all(of_nodes.into_iter().map(at_node)), join_all(at_last)).await;
        let mut all: Vec<_> = answered.into_iter().flatten().chain(at_last).collect();
        all.sort_unstable_by_key(|(at, _)| *at);
        all.into_iter().map(|(_, answer)| answer).collect()
    }

    /// The answers of the node that has this key's slot. One that doesn't have it any more is left for the next try.
    #[cfg(feature = "postgres")]
    pub(crate) async fn ask_commands<T: FromRedisValue>(
        &self,
        key: &[u8],
        commands: &Pipeline,
        deadline: Duration,
    ) -> Result<T, Error> {
        let until = Deadline::after(deadline);
        let node = self.owner(slot_of(key), until).await?;
        let left = until.left();
        let answers = node.redis.ask(commands, left).await;
        if answers.is_err() {
            self.topology.refresh_soon();
        }
        answers
    }

    /// Asks the node that has the slot.
    async fn ask(&self, call: NodeCall<'_>, slot: u16, until: Deadline) -> Result<Reply, Error> {
        let node = self.owner(slot, until).await?;
        match call.put_to(&node, Routing::Batched, until).await {
            Err(error) => self.after(error, node, call, slot, until).await,
            answer => answer,
        }
    }

    async fn owner(&self, slot: u16, until: Deadline) -> Result<Arc<Node>, Error> {
        if let Some(node) = self.topology.owner(slot) {
            return Ok(node);
        }
        runtime::with_timers()?;
        let known = tokio::time::timeout_at(until.at, self.topology.owner_at_last(slot)).await;
        known.unwrap_or_else(|_| Err(until.missed(false)))
    }

    /// What becomes of a call that this node answered with this: asked elsewhere, if it certainly didn't run and there
    /// is where to.
    async fn after(
        &self,
        mut error: Error,
        mut node: Arc<Node>,
        call: NodeCall<'_>,
        slot: u16,
        until: Deadline,
    ) -> Result<Reply, Error> {
        let (mut detours, mut was_moving) = (0, false);
        loop {
            let (next, routing) = match error.detour() {
                Some(Detour::Moved { to }) => (self.topology.learn(to, &node, Some(slot))?, Routing::Batched),
                Some(Detour::Ask { to }) => (self.topology.learn(to, &node, None)?, Routing::Asking),
                // An ask goes on by a call of its one key, of which this is never said; a call of several keys has been put
                // again by the node's own waits.
                Some(Detour::Again) => (self.owner(slot, until).await?, Routing::Alone),
                Some(Detour::Nobody) => {
                    self.topology.refresh_soon();
                    return Err(error);
                }
                None => {
                    if error.is_outage() {
                        self.topology.refresh_soon();
                    }
                    // Others may have learned meanwhile who is in its place.
                    let other = self.topology.owner(slot).filter(|owner| !Arc::ptr_eq(owner, &node));
                    match other {
                        Some(other) if error.is_unreachable() => (other, Routing::Batched),
                        _ => return Err(error),
                    }
                }
            };
            if until.at <= Instant::now() {
                return Err(until.missed(false));
            }
            // Keys that are on their way are asked for at either node in turn: until they have arrived, that isn't disagreement.
            let moving = matches!(error.detour(), Some(Detour::Again));
            if !moving && !was_moving {
                detours += 1;
                if detours > MOST_DETOURS {
                    let why = format!("the nodes of the cluster named each other {MOST_DETOURS} times for slot {slot}");
                    return Err(Error::new(Kind::NotNow, why));
                }
                if detours > 1 {
                    let wait = jittered(DISAGREEMENT * (detours - 1), 50);
                    tokio::time::sleep_until((Instant::now() + wait).min(until.at)).await;
                }
            }
            was_moving = moving;
            match call.put_to(&next, routing, until).await {
                Err(another) => (error, node) = (another, next),
                answer => return answer,
            }
        }
    }
}

impl NodeCall<'_> {
    async fn put_to(self, node: &Node, routing: Routing, until: Deadline) -> Result<Reply, Error> {
        let left = until.left();
        let asking = if routing == Routing::Asking { Asking::Yes } else { Asking::No };
        match self {
            Self::Call(call) => node.redis.run_as(asking, call, left).await,
            Self::Ask(ask) if routing == Routing::Batched => {
                poll_fn(|context| Poll::Ready(node.redis.acquire(ask.clone(), left, context.waker()))).await?.await
            }
            Self::Ask(ask) => node.redis.acquire_apart(asking, ask, left).await,
        }
    }
}

/// The slot that all keys of the call are in.
fn slot_of_all(call: &Call<'_>) -> Result<u16, Error> {
    let mut slots = call.keys().map(|key| (slot_of(key), key));
    let Some((slot, first)) = slots.next() else { return Ok(0) };
    match slots.find(|(other, _)| *other != slot) {
        None => Ok(slot),
        Some((other, key)) => {
            let [first, key] = [first, key].map(String::from_utf8_lossy);
            let why =
                format!("expected the keys of one decision in one slot, got {first} in {slot} and {key} in {other}");
            Err(Error::new(Kind::Input, format!("keys: {why}")))
        }
    }
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster").field("nodes", &self.breakers()).finish_non_exhaustive()
    }
}
