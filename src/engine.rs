//! The seam: run this script, with this key and these arguments.

#[cfg(feature = "embedded")]
pub(crate) mod embedded;
pub(crate) mod redis;

use std::time::Duration;

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

impl Engine {
    /// Runs the script and ends by the deadline.
    pub(crate) async fn run(&self, call: &Call<'_>, deadline: Duration) -> Result<Reply, Error> {
        match self {
            Self::Redis(redis) => redis.run(call, deadline).await,
            #[cfg(feature = "embedded")]
            Self::Embedded(embedded) => embedded.run(call),
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
