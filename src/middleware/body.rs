//! The body of a response, with which ends what its request holds.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tokio::runtime::Handle;

use crate::hold::Permit;
use crate::limiter::Limiter;
use crate::request::OwnedRequest;
use crate::rule::Rule;

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

/// What a request turned out to take, for a service that knows only afterwards: in the extensions of each request under a
/// layer that [settles](super::RateLimitLayer::settle). What was said last when the response has ended is what is charged.
#[derive(Clone, Debug)]
pub struct Usage {
    units: Arc<AtomicU64>,
}

/// Nothing was said.
const UNSAID: u64 = u64::MAX;

/// What ends with a response.
#[derive(Debug)]
pub(super) struct Ends {
    #[expect(dead_code, reason = "given back as they are dropped")]
    pub(super) permits: Vec<Permit>,
    pub(super) settlement: Option<Settlement>,
}

/// A call whose cost becomes known later.
#[derive(Debug)]
pub(super) struct Settlement {
    pub(super) limiter: Limiter,
    pub(super) rule: Rule,
    pub(super) request: OwnedRequest,
    pub(super) usage: Usage,
    pub(super) runtime: Handle,
}

impl Usage {
    pub(super) fn unsaid() -> Self {
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

impl Drop for Settlement {
    fn drop(&mut self) {
        let Some(units) = self.usage.said() else { return };
        let (limiter, rule, request) = (self.limiter.clone(), self.rule.clone(), self.request.clone());
        self.runtime.spawn(async move {
            // Nobody waits for this answer: what was charged before stays charged.
            let _ = limiter.settle(&rule, crate::request::Request::from(&request).cost(units)).await;
        });
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
                let polled = body.poll_frame(context);
                if matches!(polled, Poll::Ready(None | Some(Err(_)))) {
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
