//! What a request takes once more is known of it: the cost that its handler reports, and the status of its response.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::runtime::Handle;

use crate::algorithm::numbers::EXACT;
use crate::limiter::hold::Permit;
use crate::limiter::{Limiter, persist_until};
use crate::lock::Lock;
use crate::operation::Operation;
use crate::request::{OwnedRequest, Request};
use crate::rule::Rule;
use crate::rules::{CountedBy, GivenBack};
use crate::telemetry;

/// A request's actual cost, if it is known only afterwards. A layer that [settles](super::RateLimitLayer::settle) puts
/// one into each request's extensions; inside another such layer, a value counts for both. The last value set before
/// the response ends is charged.
#[derive(Clone, Debug)]
pub struct Usage {
    units: Arc<AtomicU64>,
    /// Of single limits, by their names.
    own: Arc<Lock<Vec<(String, u64)>>>,
    /// The outer layer's.
    outer: Option<Box<Usage>>,
}

/// No value was set.
const UNSAID: u64 = u64::MAX;

/// How long a call to be settled is remembered.
pub(super) const SETTLED_WITHIN: Duration = Duration::from_secs(3600);

/// How long it is remembered once settled, in case the answer was lost.
const REMEMBERED_ONCE_SETTLED: Duration = Duration::from_secs(60);

/// A call whose cost becomes known later. When dropped, it is settled.
pub(super) struct Settlement {
    pub(super) limiter: Limiter,
    pub(super) rule: Rule,
    pub(super) request: OwnedRequest,
    /// None if nothing but the status changes it.
    pub(super) usage: Option<Usage>,
    /// By which statuses it stays charged.
    pub(super) counted: CountedBy,
    /// What is given back, since the response has another status.
    pub(super) given_back: GivenBack,
    /// Held until the call is settled: a released call is forgotten.
    pub(super) permits: Arc<Vec<Permit>>,
    pub(super) runtime: Handle,
}

impl Usage {
    /// No value yet.
    #[must_use]
    pub fn new() -> Self {
        Self { units: Arc::new(AtomicU64::new(UNSAID)), own: Arc::default(), outer: None }
    }

    pub(super) fn within(outer: Option<Self>) -> Self {
        Self { outer: outer.map(Box::new), ..Self::new() }
    }

    /// Sets the final cost in units, at most 2^53, for limits without a [cost of their own](Rule::cost_of).
    pub fn set(&self, units: u64) {
        self.units.store(units.min(EXACT), Ordering::Relaxed);
        if let Some(outer) = &self.outer {
            outer.set(units);
        }
    }

    /// Sets what the request finally takes, in units, at most 2^53, of the limits with this
    /// [name](crate::Limit::named) or, in a file of rules, with this attribute as `cost`. A rule without such a limit
    /// ignores it. So a request for a model settles its tokens and its price at once.
    pub fn set_of(&self, limit: &str, units: u64) {
        let mut own = self.own.lock();
        own.retain(|(name, _)| name != limit);
        own.push((limit.to_owned(), units.min(EXACT)));
        drop(own);
        if let Some(outer) = &self.outer {
            outer.set_of(limit, units);
        }
    }

    /// The request at the costs that were set; none if no limit of the rule has another cost by them.
    fn settles(&self, rule: &Rule, request: &OwnedRequest) -> Option<OwnedRequest> {
        let all = Some(self.units.load(Ordering::Relaxed)).filter(|units| *units != UNSAID);
        let own: Vec<_> = self.own.lock().iter().filter(|(name, _)| rule.costs_by(name)).cloned().collect();
        if all.is_none() && own.is_empty() {
            return None;
        }
        let mut request = request.clone();
        own.iter().for_each(|(name, units)| request.set_cost_of(name, *units));
        if let Some(units) = all {
            request.set_cost(units);
        }
        Some(request)
    }
}

impl Default for Usage {
    fn default() -> Self {
        Self::new()
    }
}

impl Settlement {
    /// The response has this status. Returns whether its cost may still change.
    pub(super) fn responded(&mut self, status: u16) -> bool {
        self.given_back = self.counted.given_back(status);
        self.usage.is_some() && self.given_back != GivenBack::All
    }

    /// The request at what it takes in the end; none if nothing changes.
    fn change(&self) -> Option<OwnedRequest> {
        let used = self.usage.as_ref().and_then(|usage| usage.settles(&self.rule, &self.request));
        match &self.given_back {
            GivenBack::Nothing => used,
            // A cancellation would end the permits before the body has ended, and forget the id by which a retry after
            // an outage finds what was given back.
            given_back => Some(given_back.taken_off(used.unwrap_or_else(|| self.request.clone()))),
        }
    }
}

impl Drop for Settlement {
    fn drop(&mut self) {
        let Some(request) = self.change() else { return };
        let (limiter, rule) = (self.limiter.clone(), self.rule.clone());
        let permits = Arc::clone(&self.permits);
        self.limiter.spawn(&self.runtime, move |at_once| {
            let (limiter, rule, request) = (limiter.clone(), rule.clone(), request.clone());
            let permits = Arc::clone(&permits);
            async move {
                // If this fails, what was charged before stays charged.
                let request = Request::from(&request).id_ttl(REMEMBERED_ONCE_SETTLED);
                let settle = || at_once.call(limiter.make(Operation::Settle, &rule, limiter.unhurried(request)));
                let settled = persist_until(None, settle).await;
                drop(permits);
                if let Err(error) = &settled {
                    telemetry::unsettled(error.kind().name());
                }
                !settled.is_err_and(|error| error.is_input())
            }
        });
    }
}
