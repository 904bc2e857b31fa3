//! What a layer is set to: shared by all services that it makes.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use http::request::Parts;

use super::headers::HeaderStyle;
use super::sources::Sources;
#[cfg(feature = "postgres")]
use crate::history::History;
use crate::limiter::Limiter;
#[cfg(feature = "postgres")]
use crate::postgres::Configuration;
use crate::rules::{RuleSet, WatchedRules};

#[derive(Clone)]
pub(super) struct Settings {
    pub(super) limiter: Limiter,
    pub(super) rules: Rules,
    pub(super) sources: Sources,
    pub(super) style: HeaderStyle,
    pub(super) skip: Option<Skip>,
    pub(super) max_wait: Option<Duration>,
    pub(super) settles: bool,
    /// The longest pause that a response may cause.
    pub(super) heeds: Option<Duration>,
    #[cfg(feature = "postgres")]
    pub(super) history: Option<History>,
    /// The address of the last checked set of rules. A router creates a layer's services again and again.
    pub(super) checked: Arc<AtomicUsize>,
}

type Skip = Arc<dyn Fn(&Parts) -> bool + Send + Sync>;

/// A layer's rules: [a set](RuleSet), [one that follows its file](WatchedRules) or, with the feature `postgres`, a
/// configuration that follows the database. With the latter the layer also knows each user's own settings, and counts
/// their requests.
#[derive(Clone, Debug)]
#[non_exhaustive]
#[allow(missing_docs, reason = "named by what they hold")]
pub enum Rules {
    Set(RuleSet),
    Watched(WatchedRules),
    #[cfg(feature = "postgres")]
    Followed(Configuration),
}

impl From<RuleSet> for Rules {
    fn from(rules: RuleSet) -> Self {
        Self::Set(rules)
    }
}

impl From<WatchedRules> for Rules {
    fn from(rules: WatchedRules) -> Self {
        Self::Watched(rules)
    }
}

#[cfg(feature = "postgres")]
impl From<Configuration> for Rules {
    fn from(configuration: Configuration) -> Self {
        Self::Followed(configuration)
    }
}

impl Rules {
    pub(super) fn current(&self) -> RuleSet {
        match self {
            Self::Set(rules) => rules.clone(),
            Self::Watched(rules) => rules.current(),
            #[cfg(feature = "postgres")]
            Self::Followed(configuration) => configuration.rules(),
        }
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rules = self.rules.current().len();
        f.debug_struct("Settings").field("rules", &rules).field("sources", &self.sources).finish_non_exhaustive()
    }
}
