//! The interface to an engine: run this script, with these keys and arguments.

pub(crate) mod builder;
pub(crate) mod cluster;
pub(crate) mod deadline;
#[cfg(feature = "embedded")]
pub(crate) mod embedded;
pub(crate) mod redis;

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, SystemTime};

#[cfg(feature = "redis-rs")]
use ::redis::{FromRedisValue, Pipeline};
use futures_util::future::BoxFuture;

use self::deadline::Deadline;
use self::redis::{Asking, address};
use crate::call::{Ask, Reply};
use crate::decision::DecidedBy;
use crate::error::Error;

/// The engine that runs the scripts.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Engine {
    /// One Redis, or the primary that Sentinels name.
    Redis(redis::Redis),
    /// The nodes of a Redis Cluster.
    Cluster(cluster::Cluster),
    /// This process.
    #[cfg(feature = "embedded")]
    Embedded(embedded::Embedded),
}

/// A call in progress.
pub(crate) enum Acquiring<'a> {
    /// Queued, to be sent with others.
    Queued {
        waiting: redis::Waiting,
        /// From the breaker, held until the call ends.
        _admission: redis::Admission,
    },
    /// Boxed to keep queued calls small: there may be thousands.
    Otherwise(BoxFuture<'a, Result<Reply, Error>>, Deadline),
}

/// Acquires in progress together.
pub(crate) enum AcquiringAll<'a> {
    Queued(redis::Many),
    Asked(BoxFuture<'a, Vec<Result<Reply, Error>>>),
    Answered(std::vec::IntoIter<Result<Reply, Error>>),
}

/// A set of keys to scan: one server's, or this process's.
#[derive(Debug)]
pub(crate) enum Keyspace {
    Redis(redis::Redis),
    #[cfg(feature = "embedded")]
    Embedded(embedded::Embedded),
}

/// Which keys to remove.
#[derive(Debug)]
pub(crate) struct Which<'a> {
    /// A glob that all of them match.
    pub(crate) glob: &'a str,
    pub(crate) exactly: fn(&Which<'_>, &[u8]) -> bool,
    pub(crate) prefix: &'a str,
    pub(crate) rule: &'a str,
}

/// One step of removing keys.
#[derive(Debug)]
pub(crate) struct Swept {
    pub(crate) next: u64,
    pub(crate) looked_at: u64,
    pub(crate) removed: u64,
}

impl Engine {
    /// The engine at this address: a [`Redis`](redis::Redis), also one found through Sentinels, or a
    /// [`Cluster`](cluster::Cluster) at `redis-cluster://...`. Connects later.
    ///
    /// # Errors
    ///
    /// An address that can't be read.
    pub fn open(url: &str) -> Result<Self, Error> {
        if address::is_of_cluster(url) {
            cluster::Cluster::open(url).map(Self::from)
        } else {
            redis::Redis::open(url).map(Self::from)
        }
    }

    /// The first server of its address that isn't on this machine, as `host:port`. None if all are, as one at a Unix
    /// socket or at `localhost` is, and for the embedded engine. Other names aren't resolved, and count as another
    /// machine; so does a pool, which doesn't reveal its address. Unstable: for the tool.
    #[doc(hidden)]
    #[must_use]
    pub fn remote_address(&self) -> Option<String> {
        match self {
            Self::Redis(redis) => redis.remote_address(),
            Self::Cluster(cluster) => cluster.remote_address(),
            #[cfg(feature = "embedded")]
            Self::Embedded(_) => None,
        }
    }

    /// Asks for this, and ends by the deadline.
    pub(crate) async fn ask(&self, ask: &Ask<'_>, until: Deadline) -> Result<Reply, Error> {
        poll_fn(|context| Poll::Ready(self.begin(ask, until, context.waker()))).await?.await
    }

    /// Begins to ask for this, which ends by the deadline. The waker belongs to the task that will wait for it.
    pub(crate) fn begin<'a>(&'a self, ask: &Ask<'a>, until: Deadline, waker: &Waker) -> Result<Acquiring<'a>, Error> {
        let otherwise: BoxFuture<'a, _> = match self {
            Self::Redis(redis) => return redis.begin(ask, until, waker),
            Self::Cluster(cluster) => Box::pin(cluster.ask(ask.clone(), until)),
            #[cfg(feature = "embedded")]
            Self::Embedded(embedded) => {
                let ask = ask.clone();
                Box::pin(async move {
                    // Deciding in this process never yields by itself.
                    tokio::task::consume_budget().await;
                    embedded.ask(&ask)
                })
            }
        };
        Ok(Acquiring::Otherwise(otherwise, until))
    }

    /// Asks for this in a call of its own.
    pub(crate) async fn ask_by_itself(&self, ask: &Ask<'_>, until: Deadline) -> Result<Reply, Error> {
        match self {
            Self::Redis(redis) => redis.ask_by_itself(Asking::No, ask, until).await,
            // The cluster itself chooses which calls are sent alone.
            Self::Cluster(cluster) => cluster.ask(ask.clone(), until).await,
            #[cfg(feature = "embedded")]
            Self::Embedded(embedded) => embedded.ask(ask),
        }
    }

    /// Begins to decide all of these, each independently and by its own deadline. On one Redis they are queued at once.
    pub(crate) fn acquire_all<'r>(&'r self, asks: impl Iterator<Item = (Ask<'r>, Deadline)>) -> AcquiringAll<'r> {
        match self {
            Self::Redis(redis) => AcquiringAll::Queued(redis.acquire_all(asks)),
            Self::Cluster(cluster) => AcquiringAll::Asked(Box::pin(cluster.acquire_all(asks.collect()))),
            #[cfg(feature = "embedded")]
            Self::Embedded(embedded) => {
                AcquiringAll::Answered(embedded.acquire_all(asks.map(|(ask, _)| ask)).into_iter())
            }
        }
    }

    /// Sends commands that decide nothing to the node with this key, for what a service keeps beside its limits, and
    /// returns their answers: one round trip, within the deadline. All keys that they name must share a slot with this
    /// one. `None` for the embedded engine, which only runs scripts.
    ///
    /// # Errors
    ///
    /// Redis is unreachable, didn't answer in time, or refused a command. An atomic pipeline, which has more answers
    /// than commands. Unstable: for the system of record.
    #[cfg(feature = "redis-rs")]
    #[doc(hidden)]
    pub async fn query<T: FromRedisValue>(
        &self,
        key: &[u8],
        commands: &Pipeline,
        deadline: Duration,
    ) -> Result<Option<T>, Error> {
        match self {
            Self::Redis(redis) => redis.ask(commands, deadline).await.map(Some),
            Self::Cluster(cluster) => cluster.ask_commands(key, commands, deadline).await.map(Some),
            #[cfg(feature = "embedded")]
            Self::Embedded(_) => Ok(None),
        }
    }

    /// The keyspaces, which don't overlap and together hold all keys.
    pub(crate) async fn keyspaces(&self, deadline: Duration) -> Result<Vec<Keyspace>, Error> {
        match self {
            Self::Redis(redis) => Ok(vec![Keyspace::Redis(redis.clone())]),
            Self::Cluster(cluster) => Ok(cluster.primaries(deadline).await?.into_iter().map(Keyspace::Redis).collect()),
            #[cfg(feature = "embedded")]
            Self::Embedded(embedded) => Ok(vec![Keyspace::Embedded(embedded.clone())]),
        }
    }

    /// Whether keys are on several nodes.
    pub(crate) fn is_cluster(&self) -> bool {
        matches!(self, Self::Cluster(_))
    }

    pub(crate) fn by(&self) -> DecidedBy {
        match self {
            Self::Redis(_) | Self::Cluster(_) => DecidedBy::Redis,
            #[cfg(feature = "embedded")]
            Self::Embedded(_) => DecidedBy::Embedded,
        }
    }

    /// The time by the clock that the caller gave it, if any.
    pub(crate) fn given_time(&self) -> Option<SystemTime> {
        match self {
            Self::Redis(_) | Self::Cluster(_) => None,
            #[cfg(feature = "embedded")]
            Self::Embedded(embedded) => embedded.given_time(),
        }
    }
}

impl Acquiring<'_> {
    /// The deadline by which it ends.
    pub(crate) fn until(&self) -> Deadline {
        match self {
            Self::Queued { waiting, .. } => waiting.until(),
            Self::Otherwise(_, until) => *until,
        }
    }
}

impl Future for Acquiring<'_> {
    type Output = Result<Reply, Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.get_mut() {
            Self::Queued { waiting, .. } => Pin::new(waiting).poll(context),
            Self::Otherwise(acquiring, _) => acquiring.as_mut().poll(context),
        }
    }
}

impl AcquiringAll<'_> {
    /// On a cluster, where nothing else drives them, sends them.
    pub(crate) async fn begin(&mut self) {
        let mut ended = pin!(self.ended());
        poll_fn(|context| Poll::Ready(_ = ended.as_mut().poll(context))).await;
    }

    /// On a cluster, waits until all are answered.
    pub(crate) async fn ended(&mut self) {
        if let Self::Asked(asked) = self {
            *self = Self::Answered(asked.await.into_iter());
        }
    }

    /// The next answer, in the order of the asks.
    pub(crate) async fn next(&mut self) -> Option<Result<Reply, Error>> {
        self.ended().await;
        match self {
            Self::Queued(many) => many.next().await,
            Self::Answered(answers) => {
                let answer = answers.next()?;
                tokio::task::consume_budget().await;
                Some(answer)
            }
            Self::Asked(_) => None,
        }
    }
}

impl Keyspace {
    /// How many keys there are.
    pub(crate) async fn size(&self, deadline: Duration) -> Result<u64, Error> {
        match self {
            Self::Redis(redis) => redis.size(deadline).await,
            #[cfg(feature = "embedded")]
            Self::Embedded(embedded) => Ok(embedded.size()),
        }
    }

    /// Removes some of the matching keys, and says where to continue; 0 means that all have been scanned.
    pub(crate) async fn sweep(&self, from: u64, which: &Which<'_>, deadline: Duration) -> Result<Swept, Error> {
        match self {
            Self::Redis(redis) => redis.sweep(from, which, deadline).await,
            #[cfg(feature = "embedded")]
            Self::Embedded(embedded) => Ok(embedded.sweep(which)),
        }
    }
}

impl From<redis::Redis> for Engine {
    fn from(redis: redis::Redis) -> Self {
        Self::Redis(redis)
    }
}

impl From<cluster::Cluster> for Engine {
    fn from(cluster: cluster::Cluster) -> Self {
        Self::Cluster(cluster)
    }
}

#[cfg(feature = "embedded")]
impl From<embedded::Embedded> for Engine {
    fn from(embedded: embedded::Embedded) -> Self {
        Self::Embedded(embedded)
    }
}
