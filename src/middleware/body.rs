//! A response body. When it ends, what its request holds is released.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use super::settlement::Settlement;
use crate::limiter::hold::Permit;

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

/// A request's permits, in its extensions: for work that outlasts the response, such as a WebSocket. Empty if the
/// request's rule has no `concurrency` limit.
#[derive(Clone, Debug, Default)]
pub struct ResponsePermits {
    // Weak, so that a request kept for longer doesn't hold permits.
    of_layers: Vec<Weak<Vec<Permit>>>,
}

/// Permits held until this is dropped, or until their response has ended if that is later.
#[derive(Debug)]
#[must_use = "permits are given back when this is dropped"]
pub struct KeptPermits {
    _of_layers: Vec<Arc<Vec<Permit>>>,
}

impl ResponsePermits {
    pub(super) fn add(&mut self, ends: Option<&Ends>) {
        let held = ends.filter(|ends| !ends.permits.is_empty());
        self.of_layers.extend(held.map(|ends| Arc::downgrade(&ends.permits)));
    }

    /// Holds the permits from now on: call it before the response is returned, and move the value into the task that
    /// needs them. None if there are no permits, or the response has ended and they are given back.
    pub fn hold(&self) -> Option<KeptPermits> {
        let held: Vec<_> = self.of_layers.iter().filter_map(Weak::upgrade).collect();
        (!held.is_empty()).then_some(KeptPermits { _of_layers: held })
    }
}

/// Ends with a response: when dropped, gives permits back and settles the cost.
pub(super) struct Ends {
    // Settled first: a released call is forgotten.
    pub(super) settlements: Vec<Settlement>,
    pub(super) permits: Arc<Vec<Permit>>,
}

impl Ends {
    /// Called with the response's status: gives back what doesn't count by it.
    pub(super) fn responded(&mut self, status: u16) {
        self.settlements.retain_mut(|settlement| settlement.responded(status));
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
