//! A Redis Cluster: every call goes to the node that has its keys' slot, and each node is handled as a single Redis.
//!
//! Each node has its own connection, queue and breaker, so that a dead node affects only calls on its own keys.
//! redis-rs's cluster client (1.8) isn't used. With its retries on, it resends calls that may have run. With them off,
//! killing one primary made calls to the other two fail as well, all after a few seconds, since it holds up every
//! caller while it looks for the new primary. And it sends each call by itself.

mod across_slots;
mod slots;
mod topology;

use std::fmt;
use std::future::poll_fn;
use std::ops::Deref;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures_util::future::{join, join_all};
use futures_util::stream::{self, StreamExt};
#[cfg(feature = "redis-rs")]
use redis::{FromRedisValue, Pipeline};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::deadline::Deadline;
use super::redis::address;
use super::redis::breaker::BreakerState;
use super::redis::redirect::Redirect;
use super::redis::settings::Settings;
use super::redis::{Asking, Redis};
use crate::batch::AskApart;
use crate::call::{Ask, Reply};
use crate::error::{Error, ErrorKind, Kind};
use crate::random::jittered;
use crate::runtime;
pub(crate) use slots::slot_of;
use topology::{Node, Topology};

/// The most redirects that one call follows.
const MOST_REDIRECTS: u32 = 8;
/// The pause before the second redirect, since the nodes don't agree yet; longer by as much for each further one.
const DISAGREEMENT: Duration = Duration::from_millis(5);

/// A Redis Cluster (7.0 or newer) or Valkey cluster (7.2 or newer), given the addresses of some of its nodes.
///
/// Connects to each node at the first decision on one of its keys. The slot map is read at the first decision, from
/// whichever of the given nodes answers first, and again from one node when a node says that a slot has moved, or
/// doesn't answer. One refresh runs at a time, with pauses of 100 ms to 1.5 s while nothing changes. It takes one round
/// trip, which only the first decision waits for.
///
/// Redirects for a slot that has moved (MOVED), is moving (ASK, followed in one pipeline with ASKING), or has its keys
/// in two places (TRYAGAIN) are followed within the deadline, at a round trip each. Nothing that may have run is sent
/// twice. Decisions on keys of several nodes go to all of them at the same time.
///
/// Concurrent decisions share a script call with others of their node, whatever their slots. Such a call declares no
/// keys, and its script has the flag `allow-cross-slot-keys`. Redis's documentation discourages that for applications,
/// which "should be designed to only access keys from a single slot at a time, allowing slots to move between Redis
/// servers". Here each key is decided by itself: if its slot has moved or is moving, the node rejects this key alone,
/// the call takes nothing of it, and it is asked for again, declared. A node or proxy that refuses such calls gets them
/// slot by slot, and is tried again after a minute.
#[derive(Clone)]
pub struct Cluster {
    topology: Arc<Topology>,
}

/// How a call is sent to another node, or resent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Routing {
    /// With others of its slot, if possible.
    WithSlot,
    /// In a call of its own: of keys that share a slot, some may have moved and some not.
    Alone,
    /// The same after ASKING, for a slot that is moving to the node.
    Asking,
}

impl Cluster {
    /// The cluster that these nodes belong to: `redis-cluster://[user:password@]host[:port][,host[:port]...]`,
    /// optionally with `?protocol=resp3`. User and password apply to every node. One node suffices, if it is up when
    /// the first decision is made. Connects later.
    ///
    /// With the feature `tls`, `rediss-cluster://...` works too, if each node's certificate is from one of the
    /// platform's authorities and is for the host name that the other nodes give it.
    /// [`RedisBuilder::tls`](crate::RedisBuilder::tls) changes the authorities.
    ///
    /// # Errors
    ///
    /// An address that can't be read, or one that ends in `#insecure`: certificates are always checked.
    pub fn open(url: &str) -> Result<Self, Error> {
        Self::with(url, &Settings::default())
    }

    pub(super) fn with(url: &str, settings: &Settings) -> Result<Self, Error> {
        let seeds = address::cluster(url)?.into_iter().map(|seed| seed.with(settings, url));
        let seeds = seeds.collect::<Result<_, _>>()?;
        Ok(Self { topology: Arc::new(Topology::new(seeds, settings.confirm)?) })
    }

    /// The nodes that have slots, by address, each as a Redis that decides on its own keys only.
    ///
    /// # Errors
    ///
    /// No node returned the slot map by the deadline.
    pub async fn primaries(&self, deadline: Duration) -> Result<Vec<Redis>, Error> {
        let until = Deadline::after(deadline);
        runtime::with_timers()?;
        let known = runtime::timeout_at(until.at, self.topology.primaries()).await;
        known.unwrap_or_else(|| Err(Error::deadline(deadline, false)))
    }

    /// The breaker of each known node, by address.
    #[must_use]
    pub fn breakers(&self) -> Vec<(String, BreakerState)> {
        self.topology.nodes().map(|node| (node.redis.address().to_owned(), node.redis.breaker())).collect()
    }

    /// Connections made so far to the known nodes; see [`Redis::connections`].
    #[must_use]
    pub fn connections(&self) -> u64 {
        self.topology.nodes().map(|node| node.redis.connections()).sum()
    }

    /// How often a new connection to a known node found a different server process than the last one; see
    /// [`Redis::restarts`].
    #[must_use]
    pub fn restarts(&self) -> u64 {
        self.topology.nodes().map(|node| node.redis.restarts()).sum()
    }

    /// How often a node was asked for the slot map.
    #[must_use]
    pub fn refreshes(&self) -> u64 {
        self.topology.refreshes()
    }

    pub(super) fn remote_address(&self) -> Option<String> {
        self.topology.seeds().iter().find_map(address::Endpoint::remote)
    }

    /// Asks the node that has the keys' slot, alone or with others of that node.
    pub(crate) fn ask<'a>(
        &'a self,
        mut ask: Ask<'a>,
        until: Deadline,
    ) -> impl Future<Output = Result<Reply, Error>> + use<'a> {
        let partition = slot_of_keys(&ask.keys);
        // There may be thousands of these, so what is rare is boxed. A block, since an async function would hold a
        // second copy of the ask.
        async move {
            ask.partition = partition;
            let node = match self.topology.owner(ask.partition) {
                Some(node) => node,
                None => Box::pin(self.owner(ask.partition, until)).await?,
            };
            ask.across_partitions = node.across_slots.are_allowed();
            match put_to(&node, &ask, until).await {
                Err(error) if !self.is_over(&error, until) => Box::pin(self.after(error, node, &ask, until)).await,
                answer => answer,
            }
        }
    }

    /// Decides all of these at the same time, each independently and by its own deadline.
    pub(crate) async fn acquire_all(&self, asks: Vec<(Ask<'_>, Deadline)>) -> Vec<Result<Reply, Error>> {
        let asks = asks.into_iter().map(|(ask, until)| (Ask { partition: slot_of_keys(&ask.keys), ..ask }, until));
        let asks: Vec<_> = asks.collect();
        let mut of_nodes: Vec<(Arc<Node>, Vec<usize>)> = Vec::new();
        let mut of_nobody = Vec::new();
        for (at, (ask, _)) in asks.iter().enumerate() {
            let Some(node) = self.topology.owner(ask.partition) else {
                of_nobody.push(at);
                continue;
            };
            match of_nodes.iter_mut().find(|(other, _)| Arc::ptr_eq(other, &node)) {
                Some((_, asks)) => asks.push(at),
                None => of_nodes.push((node, vec![at])),
            }
        }
        let asks = &asks;
        // A redirected call waits for no others.
        let at_node = async |(node, of_node): (Arc<Node>, Vec<usize>)| {
            let across_partitions = node.across_slots.are_allowed();
            let asked = of_node.iter().map(|at| {
                let (ask, until) = &asks[*at];
                (Ask { across_partitions, ..ask.clone() }, *until)
            });
            let mut many = node.redis.acquire_all(asked);
            let (tell, mut told) = mpsc::unbounded_channel();
            let most = of_node.len();
            let answered = async move {
                let mut answered = Vec::with_capacity(most);
                for at in of_node {
                    match many.next().await {
                        // The receiver lives until this future has ended.
                        Some(Err(error)) if !self.is_over(&error, asks[at].1) => _ = tell.send((at, error)),
                        Some(answer) => answered.push((at, answer)),
                        None => break,
                    }
                }
                answered
            };
            let follow = |(at, error): (usize, Error)| {
                let ((ask, until), node) = (&asks[at], Arc::clone(&node));
                async move { (at, self.after(error, node, ask, *until).await) }
            };
            let followed = stream::poll_fn(move |context| told.poll_recv(context)).map(follow).buffer_unordered(most);
            let (mut answered, followed) = join(answered, followed.collect::<Vec<_>>()).await;
            answered.extend(followed);
            answered
        };
        let at_last = of_nobody.iter().map(async |at| {
            let (ask, until) = &asks[*at];
            (*at, self.ask(ask.clone(), *until).await)
        });
        let (answered, at_last) = join(join_all(of_nodes.into_iter().map(at_node)), join_all(at_last)).await;
        let mut all: Vec<_> = answered.into_iter().flatten().chain(at_last).collect();
        all.sort_unstable_by_key(|(at, _)| *at);
        all.into_iter().map(|(_, answer)| answer).collect()
    }

    /// The answers of the node that has this key's slot. If it no longer has it, the next try asks another.
    #[cfg(feature = "redis-rs")]
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

    async fn owner(&self, slot: u16, until: Deadline) -> Result<Arc<Node>, Error> {
        if let Some(node) = self.topology.owner(slot) {
            return Ok(node);
        }
        runtime::with_timers()?;
        let known = runtime::timeout_at(until.at, self.topology.owner_at_last(slot)).await;
        known.unwrap_or_else(|| Err(until.missed(false)))
    }

    /// Asks the node again, without asks of other slots, after one call for all of them didn't decide this one.
    async fn ask_apart(&self, apart: AskApart, node: &Node, ask: &Ask<'_>, until: Deadline) -> Result<Reply, Error> {
        if until.at <= Instant::now() {
            return Err(until.missed(false));
        }
        match apart {
            AskApart::Call => {
                node.across_slots.refused();
                put_again(node, ask, Routing::WithSlot, until).await
            }
            AskApart::Key => {
                let answer = put_again(node, ask, Routing::Alone, until).await;
                // The node has the key after all. That has rarely just changed; more likely, calls without declared
                // keys don't reach the node, as through some proxies.
                if answer.is_ok() {
                    node.across_slots.refused();
                }
                answer
            }
            AskApart::Others => put_again(node, ask, Routing::Alone, until).await,
        }
    }

    /// Whether no time is left to do anything about a call that has ended with this error.
    fn is_over(&self, error: &Error, until: Deadline) -> bool {
        let is_over = error.kind() == ErrorKind::Deadline && until.left().is_zero();
        if is_over && error.is_outage() {
            self.topology.refresh_soon();
        }
        is_over
    }

    /// What to do with a call that this node answered with this error: send it elsewhere, if it certainly didn't run
    /// and there is another node to send it to.
    async fn after(
        &self,
        mut error: Error,
        mut node: Arc<Node>,
        ask: &Ask<'_>,
        until: Deadline,
    ) -> Result<Reply, Error> {
        while let Some(apart) = error.note().copied() {
            match self.ask_apart(apart, &node, ask, until).await {
                Err(another) => error = another,
                answer => return answer,
            }
        }
        let (slot, mut redirects, mut was_moving) = (ask.partition, 0, false);
        // The node that named the one asked now.
        let mut named_by: Option<Arc<Node>> = None;
        loop {
            let (next, routing) = match Redirect::of(&error) {
                Some(Redirect::Moved { to }) => (self.topology.learn(to, &node, Some(slot))?, Routing::WithSlot),
                Some(Redirect::Ask { to }) => (self.topology.learn(to, &node, None)?, Routing::Asking),
                // An ask of one key is sent declaring it, and then never gets this error; one of several keys is sent
                // by itself, and retried after waits.
                Some(Redirect::Again) => (self.owner(slot, until).await?, Routing::Alone),
                Some(Redirect::Nobody) => {
                    self.topology.refresh_soon();
                    return Err(error);
                }
                None => {
                    if error.is_outage() {
                        self.topology.refresh_soon();
                    }
                    // Another call may have learned the new owner meanwhile. A node that named this one would name it
                    // again.
                    let asked = [Some(&node), named_by.as_ref()];
                    let was_asked = |owner: &Arc<Node>| asked.iter().flatten().any(|asked| Arc::ptr_eq(asked, owner));
                    match self.topology.owner(slot).filter(|owner| !was_asked(owner)) {
                        Some(other) if error.is_unreachable() => (other, Routing::WithSlot),
                        _ => return Err(error),
                    }
                }
            };
            // While keys are moving, both nodes are asked in turn until the keys have arrived: that isn't disagreement.
            let moving = matches!(Redirect::of(&error), Some(Redirect::Again));
            if until.at <= Instant::now() {
                // What kept it waiting is more informative than the deadline.
                return Err(if moving { error } else { until.missed(false) });
            }
            if !moving && !was_moving {
                redirects += 1;
                if redirects > MOST_REDIRECTS {
                    let why = format!("the cluster's nodes don't agree on slot {slot}: {MOST_REDIRECTS} redirects");
                    return Err(Error::new(Kind::NotNow, why));
                }
                if redirects > 1 {
                    let wait = jittered(DISAGREEMENT * (redirects - 1), 50);
                    runtime::sleep_until((Instant::now() + wait).min(until.at)).await?;
                }
            }
            was_moving = moving;
            named_by = Redirect::of(&error).map(|_| node);
            match put_again(&next, ask, routing, until).await {
                Err(another) => (error, node) = (another, next),
                answer => return answer,
            }
        }
    }
}

async fn put_to(node: &Node, ask: &Ask<'_>, until: Deadline) -> Result<Reply, Error> {
    poll_fn(|context| Poll::Ready(node.redis.begin(ask, until, context.waker()))).await?.await
}

async fn put_again(node: &Node, ask: &Ask<'_>, routing: Routing, until: Deadline) -> Result<Reply, Error> {
    match routing {
        Routing::WithSlot => put_to(node, &Ask { across_partitions: false, ..ask.clone() }, until).await,
        Routing::Alone => node.redis.ask_by_itself(Asking::No, ask, until).await,
        Routing::Asking => node.redis.ask_by_itself(Asking::Yes, ask, until).await,
    }
}

/// The slot of a script call's keys. All are in one: otherwise the limiter makes several calls.
fn slot_of_keys(keys: &[impl Deref<Target = [u8]>]) -> u16 {
    let slot = keys.first().map_or(0, |key| slot_of(key));
    debug_assert!(keys.iter().all(|key| slot_of(key) == slot), "keys of several slots");
    slot
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster").field("nodes", &self.breakers()).finish_non_exhaustive()
    }
}
