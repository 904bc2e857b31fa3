//! The body of a response, with which ends what its request holds.

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

use crate::hold::Permit;
use crate::limiter::Limiter;
use crate::request::{OwnedRequest, Request};
use crate::rule::Rule;
use crate::telemetry;

pin_project! {
    /// The body of a response: the service's own, or the limiter's answer in its place. Permits are given back, and costs
    /// settled, when it has ended or is dropped.
    #[derive(Debug)]
    pub struct ResponseBody<B> {
        #[pin]
        kind: Kind<B>,
        ends: Option<Ends>,
    }
}

pin_project! {
    #[project = KindProjection]
    #[derive(Debug)]
    enum Kind<B> {
        Inner { #[pin] body: B },
        Answer { bytes: Option<Bytes> },
    }
}

/// What a request turned out to take, for a service that knows only afterwards: in the extensions of each request that a
/// layer passes on which [settles](super::RateLimitLayer::settle). What was said last when the response has ended is what is
/// charged.
#[derive(Clone, Debug)]
pub struct Usage {
    units: Arc<AtomicU64>,
}

/// Nothing was said.
const UNSAID: u64 = u64::MAX;

/// The permits of a request, in its extensions where its rule has a `concurrency` limit: for work that outlasts the response,
/// such as that of a WebSocket.
#[derive(Clone, Debug, Default)]
pub struct Permits {
    // Weak, so that nothing is held by a request that somebody keeps.
    of_layers: Vec<Weak<Vec<Permit>>>,
}

/// Permits that are held until this is dropped, or their response has ended if that is later.
#[derive(Debug)]
#[must_use = "permits are given back when this is dropped"]
pub struct HeldPermits {
    _of_layers: Vec<Arc<Vec<Permit>>>,
}

impl Permits {
    pub(super) fn add(&mut self, ends: &Ends) {
        self.of_layers.push(Arc::downgrade(&ends.permits));
    }

    /// Holds them from now on; none of them are left once the response has ended.
    pub fn hold(&self) -> HeldPermits {
        HeldPermits { _of_layers: self.of_layers.iter().filter_map(Weak::upgrade).collect() }
    }
}

/// How long a call is remembered that is to be settled.
pub(super) const SETTLED_WITHIN: Duration = Duration::from_secs(3600);

/// After which pauses a settlement is tried again: it counts once.
const PAUSES: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(2)];

/// What ends with a response: permits are given back, and the cost is settled, as they are dropped.
pub(super) struct Ends {
    pub(super) permits: Arc<Vec<Permit>>,
    pub(super) _settlement: Option<Box<Settlement>>,
}

/// A call whose cost becomes known later.
pub(super) struct Settlement {
    pub(super) limiter: Limiter,
    pub(super) rule: Rule,
    pub(super) request: OwnedRequest,
    pub(super) usage: Usage,
    pub(super) runtime: Handle,
}

impl Usage {
    /// Nothing said yet.
    #[must_use]
    pub fn new() -> Self {
        Self { units: Arc::new(AtomicU64::new(UNSAID)) }
    }

    /// So many units were taken in the end.
    pub fn set(&self, units: u64) {
        self.units.store(units, Ordering::Relaxed);
    }

    fn said(&self) -> Option<u64> {
        Some(self.units.load(Ordering::Relaxed)).filter(|units| *units != UNSAID)
    }
}

impl Default for Usage {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Settlement {
    fn drop(&mut self) {
        let Some(units) = self.usage.said() else { return };
        let (limiter, rule, request) = (self.limiter.clone(), self.rule.clone(), self.request.clone());
        self.runtime.spawn(async move {
            let settle = || limiter.settle(&rule, Request::from(&request).cost(units));
            let mut settled = settle().await;
            for pause in PAUSES {
                if settled.as_ref().is_ok_and(|decision| decision.error.is_none()) {
                    return;
                }
                tokio::time::sleep(pause).await;
                settled = settle().await;
            }
            // What was charged before stays charged.
            if let Err(error) = settled {
                telemetry::unsettled(&error);
            }
        });
    }
}

/// Whom it is about is nobody's business.
impl fmt::Debug for Ends {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ends").finish_non_exhaustive()
    }
}

impl<B> ResponseBody<B> {
    pub(super) fn inner(body: B, ends: Option<Ends>) -> Self {
        Self { kind: Kind::Inner { body }, ends }
    }

    pub(super) fn answer(bytes: Bytes) -> Self {
        Self { kind: Kind::Answer { bytes: Some(bytes).filter(|bytes| !bytes.is_empty()) }, ends: None }
    }
}

/// Empty, as layers ask for that answer by themselves.
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
        match this.kind.project() {
            KindProjection::Inner { body } => {
                let mut body = body;
                let polled = body.as_mut().poll_frame(context);
                let ended = body.is_end_stream();
                if matches!(polled, Poll::Ready(None | Some(Err(_)))) || (polled.is_ready() && ended) {
                    *this.ends = None;
                }
                polled
            }
            KindProjection::Answer { bytes } => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Inner { body } => body.is_end_stream(),
            Kind::Answer { bytes } => bytes.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Inner { body } => body.size_hint(),
            Kind::Answer { bytes } => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
        }
    }
}
