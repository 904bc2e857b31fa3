//! The seam: run this script, with this key and these arguments.

#[cfg(feature = "embedded")]
pub(crate) mod embedded;
pub(crate) mod redis;

use std::time::Duration;

use crate::batch::Ask;
use crate::decision::By;
use crate::error::Error;
use crate::script::{Call, Reply};

/// What runs the scripts.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Engine {
    /// One Redis.
    Redis(redis::Redis),
    /// This process.
    #[cfg(feature = "embedded")]
    Embedded(embedded::Embedded),
}

/// Which keys to remove.
#[derive(Debug)]
pub(crate) struct Which<'a> {
    /// What all of them match.
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
    /// Runs the script and ends by the deadline.
    pub(crate) async fn run(&self, call: &Call<'_>, deadline: Duration) -> Result<Reply, Error> {
        match self {
            Self::Redis(redis) => redis.run(call, deadline).await,
            #[cfg(feature = "embedded")]
            Self::Embedded(embedded) => embedded.run(call),
        }
    }

    /// Decides this ask and ends by the deadline.
    pub(crate) async fn acquire(&self, ask: Ask, deadline: Duration) -> Result<Reply, Error> {
        match self {
            Self::Redis(redis) => redis.acquire(ask, deadline).await,
            #[cfg(feature = "embedded")]
            Self::Embedded(embedded) => embedded.acquire(&ask),
        }
    }

    /// Decides all of these, each by itself and by its deadline.
    pub(crate) async fn acquire_all(&self, asks: Vec<(Ask, Duration)>) -> Vec<Result<Reply, Error>> {
        match self {
            Self::Redis(redis) => redis.acquire_all(asks).await,
            #[cfg(feature = "embedded")]
            Self::Embedded(embedded) => {
                let asks: Vec<_> = asks.into_iter().map(|(ask, _)| ask).collect();
                embedded.acquire_all(&asks)
            }
        }
    }

    /// How many keys there are.
    pub(crate) async fn size(&self, deadline: Duration) -> Result<u64, Error> {
        match self {
            Self::Redis(redis) => redis.size(deadline).await,
            #[cfg(feature = "embedded")]
            Self::Embedded(embedded) => Ok(embedded.size()),
        }
    }

    /// Removes some of the keys that match, and says where to go on: at 0, all have been looked at.
    pub(crate) async fn sweep(&self, from: u64, which: &Which<'_>, deadline: Duration) -> Result<Swept, Error> {
        match self {
            Self::Redis(redis) => redis.sweep(from, which, deadline).await,
            #[cfg(feature = "embedded")]
            Self::Embedded(embedded) => Ok(embedded.sweep(which)),
        }
    }

    /// Whether all keys lie in one place, so that one call can look at any two.
    pub(crate) fn has_one_node(&self) -> bool {
        match self {
            Self::Redis(_) => true,
            #[cfg(feature = "embedded")]
            Self::Embedded(_) => true,
        }
    }

    pub(crate) fn by(&self) -> By {
        match self {
            Self::Redis(_) => By::Redis,
            #[cfg(feature = "embedded")]
            Self::Embedded(_) => By::Embedded,
        }
    }
}

impl From<redis::Redis> for Engine {
    fn from(redis: redis::Redis) -> Self {
        Self::Redis(redis)
    }
}

#[cfg(feature = "embedded")]
impl From<embedded::Embedded> for Engine {
    fn from(embedded: embedded::Embedded) -> Self {
        Self::Embedded(embedded)
    }
}
