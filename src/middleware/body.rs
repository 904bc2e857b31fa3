//! A response body. When it ends, what its request holds is released.

use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tokio::runtime::Handle;

use crate::algorithm::numbers::EXACT;
use crate::limiter::hold::Permit;
use crate::limiter::{Limiter, persist};
use crate::lock::Lock;
use crate::request::{OwnedRequest, Request};
use crate::rule::Rule;
use crate::telemetry;

pin_project! {
    /// The body of a response: the service's own, or the limiter's in its place. When it ends or is dropped, permits
    /// are given back and costs settled.
    #[derive(Debug)]
    pub struct ResponseBody<B> {
        #[pin]
        kind: Source<B>,
        ends: Option<Ends>,
    }
}

pin_project! {
    #[project = SourceProjection]
    #[derive(Debug)]
    enum Source<B> {
        Inner { #[pin] body: B },
        Answer { bytes: Option<Bytes> },
    }
}

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

/// A request's permits, in its extensions: for work that outlasts the response, such as a WebSocket. Empty if the
/// request's rule has no `concurrency` limit.
#[derive(Clone, Debug, Default)]
pub struct Permits {
    // Weak, so that a request kept for longer doesn't hold permits.
    of_layers: Vec<Weak<Vec<Permit>>>,
}

/// Permits held until this is dropped, or until their response has ended if that is later.
#[derive(Debug)]
#[must_use = "permits are given back when this is dropped"]
pub struct HeldPermits {
    _of_layers: Vec<Arc<Vec<Permit>>>,
}

impl Permits {
    pub(super) fn add(&mut self, ends: Option<&Ends>) {
        let held = ends.filter(|ends| !ends.permits.is_empty());
        self.of_layers.extend(held.map(|ends| Arc::downgrade(&ends.permits)));
    }

    /// Holds the permits from now on: call it before the response is returned, and move the value into the task that
    /// needs them. None if there are no permits, or the response has ended and they are given back.
    pub fn hold(&self) -> Option<HeldPermits> {
        let held: Vec<_> = self.of_layers.iter().filter_map(Weak::upgrade).collect();
        (!held.is_empty()).then_some(HeldPermits { _of_layers: held })
    }
}

/// How long a call to be settled is remembered.
pub(super) const SETTLED_WITHIN: Duration = Duration::from_secs(3600);

/// How long it is remembered once settled, in case the answer was lost.
const REMEMBERED_ONCE_SETTLED: Duration = Duration::from_secs(60);

/// Ends with a response: when dropped, gives permits back and settles the cost.
pub(super) struct Ends {
    // Settled first: a released call is forgotten.
    pub(super) _settlement: Option<Box<Settlement>>,
    pub(super) permits: Arc<Vec<Permit>>,
}

/// A call whose cost becomes known later.
pub(super) struct Settlement {
    pub(super) limiter: Limiter,
    pub(super) rule: Rule,
    pub(super) request: OwnedRequest,
    pub(super) usage: Usage,
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

impl Drop for Settlement {
    fn drop(&mut self) {
        let Some(request) = self.usage.settles(&self.rule, &self.request) else { return };
        let (limiter, rule) = (self.limiter.clone(), self.rule.clone());
        let permits = Arc::clone(&self.permits);
        self.limiter.spawn(&self.runtime, move |at_once| {
            let (limiter, rule, request) = (limiter.clone(), rule.clone(), request.clone());
            let permits = Arc::clone(&permits);
            async move {
                // If this fails, what was charged before stays charged.
                let request = Request::from(&request).id_ttl(REMEMBERED_ONCE_SETTLED);
                let settled = persist(&at_once, || limiter.settle(&rule, limiter.unhurried(request))).await;
                drop(permits);
                if let Err(error) = &settled {
                    telemetry::unsettled(error.class());
                }
                !settled.is_err_and(|error| error.is_input())
            }
        });
    }
}

/// Hides the key.
impl fmt::Debug for Ends {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ends").finish_non_exhaustive()
    }
}

impl<B> ResponseBody<B> {
    pub(super) fn inner(body: B, ends: Option<Ends>) -> Self {
        Self { kind: Source::Inner { body }, ends }
    }

    pub(super) fn answer(bytes: Bytes) -> Self {
        Self { kind: Source::Answer { bytes: Some(bytes).filter(|bytes| !bytes.is_empty()) }, ends: None }
    }
}

/// Empty, for layers that construct such a response themselves.
impl<B: Default> Default for ResponseBody<B> {
    fn default() -> Self {
        Self::inner(B::default(), None)
    }
}

impl<B: Body<Data = Bytes>> Body for ResponseBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let this = self.project();
        let mut kind = this.kind;
        match kind.as_mut().project() {
            SourceProjection::Inner { mut body } => {
                let polled = body.as_mut().poll_frame(context);
                let ended = body.is_end_stream();
                if matches!(polled, Poll::Ready(None | Some(Err(_)))) || (polled.is_ready() && ended) {
                    // Dropping it may still set its cost.
                    kind.set(Source::Answer { bytes: None });
                    *this.ends = None;
                }
                polled
            }
            SourceProjection::Answer { bytes } => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Source::Inner { body } => body.is_end_stream(),
            Source::Answer { bytes } => bytes.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Source::Inner { body } => body.size_hint(),
            Source::Answer { bytes } => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
        }
    }
}
