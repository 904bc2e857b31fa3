//! Answers that a client doesn't take. By HTTP/2 each request grants room for its answer, and a client that grants none
//! would keep as many as it may ask for, for as long as it answers pings.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use http::Response;
use hyper::body::{Body as HttpBody, Frame, SizeHint};

/// How many answers of a connection may last: a gateway has one watch of the service's health.
const MOST_LASTING: usize = 8;

/// Marks a response that is meant to last.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lasting;

/// The answers of a connection that were begun and not yet taken, in two turns: those of this one and of the one before.
#[derive(Debug, Default)]
pub(crate) struct Unread {
    turn: AtomicUsize,
    begun: [AtomicUsize; 2],
    lasting: AtomicUsize,
}

impl Unread {
    /// Counts this answer until it is taken.
    pub(crate) fn count(self: &Arc<Self>, answer: Response<Body>) -> Response<Answer> {
        let lasts = answer.extensions().get::<Lasting>().is_some();
        let turn = match lasts && self.lasting.fetch_add(1, Ordering::Relaxed) < MOST_LASTING {
            true => None,
            false => {
                let turn = self.turn.load(Ordering::Relaxed);
                self.begun[turn].fetch_add(1, Ordering::Relaxed);
                Some(turn)
            }
        };
        answer.map(|body| Answer { body, lasts, turn, of: Arc::clone(self) })
    }

    /// Begins another turn. Whether an answer is there that was begun in the turn before this one.
    pub(crate) fn is_stuck_after_turn(&self) -> bool {
        let next = 1 - self.turn.load(Ordering::Relaxed);
        self.turn.store(next, Ordering::Relaxed);
        self.begun[next].load(Ordering::Relaxed) > 0
    }
}

/// The body of an answer. It is dropped once all of it is taken.
#[derive(Debug)]
pub(crate) struct Answer {
    body: Body,
    lasts: bool,
    /// In which it was begun; none of one that may last.
    turn: Option<usize>,
    of: Arc<Unread>,
}

impl Drop for Answer {
    fn drop(&mut self) {
        if self.lasts {
            self.of.lasting.fetch_sub(1, Ordering::Relaxed);
        }
        if let Some(turn) = self.turn {
            self.of.begun[turn].fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        Pin::new(&mut self.get_mut().body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
