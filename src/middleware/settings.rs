//! What a layer is set to: shared by all services that it makes.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;

use http::request::Parts;

use super::headers::HeaderStyle;
use super::request_attributes::AttributeReaders;
use crate::limiter::Limiter;
use crate::rules::{DecisionSink, RuleSource};

#[derive(Clone)]
pub(super) struct Settings {
    pub(super) limiter: Limiter,
    pub(super) rules: Arc<dyn RuleSource>,
    pub(super) readers: AttributeReaders,
    pub(super) style: HeaderStyle,
    pub(super) skip: Option<Skip>,
    pub(super) max_wait: Option<Duration>,
    pub(super) settles: bool,
    /// The longest pause that a response may cause.
    pub(super) upstream_backoff: Option<Duration>,
    pub(super) sink: Option<Arc<dyn DecisionSink>>,
    /// Shared, since a router creates a layer's services again and again.
    pub(super) checked: Arc<Checked>,
}

/// What is known of attributes that no request has.
#[derive(Debug, Default)]
pub(super) struct Checked {
    /// The address of the set of rules that was last checked.
    pub(super) set: AtomicUsize,
    /// How many requests under that set had no account.
    pub(super) strangers: AtomicUsize,
    /// Whether one ever had.
    pub(super) accounts: AtomicBool,
}

type Skip = Arc<dyn Fn(&Parts) -> bool + Send + Sync>;

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rules = self.rules.rules().len();
        f.debug_struct("Settings").field("rules", &rules).field("readers", &self.readers).finish_non_exhaustive()
    }
}
