//! A connection in memory: two directions, each of which delays, loses, or cuts off what is written to it.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, MutexGuard};
use std::task::{Context, Poll, Waker, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

use super::medium::Medium;
use crate::lock::Lock;

/// A connection between a client and a server.
pub(super) struct Wire {
    pub(super) number: u64,
    medium: Arc<Medium>,
    state: Lock<State>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    ToServer,
    ToClient,
}

/// What happens to bytes in a black hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hole {
    /// They are delivered once the hole is gone, as TCP resends them.
    Held,
    /// The connection is forgotten between here and there: nothing ever comes through.
    Lost,
}

struct State {
    halves: [Half; 2],
    /// Both sides see the reset at once.
    reset: bool,
    /// How many unread bytes a direction can hold.
    room: usize,
    client_gone: bool,
    server_gone: bool,
}

#[derive(Default)]
struct Half {
    /// Bytes in flight, and when they arrive; never, while a hole holds them.
    chunks: VecDeque<(Option<Instant>, Vec<u8>)>,
    queued: usize,
    /// The writer has closed it.
    ended: bool,
    /// Its latest arrival, since bytes don't overtake each other.
    last: Option<Instant>,
    hole: Option<Hole>,
    /// After this many more bytes only the end is delivered.
    cut: Option<usize>,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

/// The client's side, as a stream.
pub(crate) struct ClientEnd {
    wire: Arc<Wire>,
    timer: Pin<Box<Sleep>>,
}

/// The server's side.
pub(super) struct ServerEnd {
    pub(super) wire: Arc<Wire>,
    timer: Pin<Box<Sleep>>,
}

impl Wire {
    pub(super) fn ends(medium: Arc<Medium>, room: usize) -> (ClientEnd, ServerEnd) {
        let state = State { halves: Default::default(), reset: false, room, client_gone: false, server_gone: false };
        let wire = Arc::new(Self { number: medium.connection(), medium, state: Lock::new(state) });
        let timer = || Box::pin(tokio::time::sleep_until(Instant::now()));
        (ClientEnd { wire: Arc::clone(&wire), timer: timer() }, ServerEnd { wire, timer: timer() })
    }

    pub(super) fn reset(&self) {
        let mut state = self.state();
        state.reset = true;
        state.halves.iter_mut().for_each(Half::wake);
    }

    pub(super) fn fall_into(&self, hole: Hole, directions: &[Direction]) {
        let mut state = self.state();
        if state.client_gone {
            return;
        }
        for direction in directions {
            let half = &mut state.halves[*direction as usize];
            half.hole = Some(hole);
            half.chunks.iter_mut().for_each(|(at, _)| *at = None);
        }
    }

    /// Bytes held by a hole are sent on; lost ones stay lost.
    pub(super) fn climb_out(&self) {
        let mut state = self.state();
        for half in &mut state.halves {
            if half.hole == Some(Hole::Held) {
                half.hole = None;
                for (at, _) in &mut half.chunks {
                    let arrives = self.medium.arrival(half.last);
                    half.last = Some(arrives);
                    *at = Some(arrives);
                }
                half.wake();
            }
        }
    }

    /// Ends the connection after this many more bytes to the client.
    pub(super) fn cut_after(&self, bytes: usize) {
        self.state().halves[Direction::ToClient as usize].cut = Some(bytes);
    }

    /// Whether either side still has it open.
    pub(super) fn is_open_at_server(&self) -> bool {
        !self.state().server_gone
    }

    pub(super) fn is_over(&self) -> bool {
        let state = self.state();
        state.client_gone && state.server_gone
    }

    fn write(&self, direction: Direction, bytes: &[u8]) {
        let mut state = self.state();
        if !state.reset {
            state.halves[direction as usize].push(bytes, &self.medium);
        }
    }

    fn poll_take(
        &self,
        direction: Direction,
        most: usize,
        timer: &mut Pin<Box<Sleep>>,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<Vec<u8>>> {
        loop {
            let mut state = self.state();
            if state.reset {
                return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
            }
            let half = &mut state.halves[direction as usize];
            let Some((at, bytes)) = half.chunks.front_mut() else {
                if half.ended && half.hole.is_none() {
                    return Poll::Ready(Ok(Vec::new()));
                }
                half.reader = Some(cx.waker().clone());
                return Poll::Pending;
            };
            let Some(at) = *at else {
                half.reader = Some(cx.waker().clone());
                return Poll::Pending;
            };
            if at > Instant::now() {
                half.reader = Some(cx.waker().clone());
                drop(state);
                timer.as_mut().reset(at);
                ready!(timer.as_mut().poll(cx));
                continue;
            }
            let rest = bytes.split_off(most.min(bytes.len()));
            let taken = std::mem::replace(bytes, rest);
            if bytes.is_empty() {
                half.chunks.pop_front();
            }
            half.queued -= taken.len();
            if let Some(writer) = half.writer.take() {
                writer.wake();
            }
            drop(state);
            self.medium.record(&[self.number, direction as u64, taken.len() as u64], &taken);
            return Poll::Ready(Ok(taken));
        }
    }

    fn close(&self, direction: Direction) {
        let mut state = self.state();
        match direction {
            Direction::ToServer => state.client_gone = true,
            Direction::ToClient => state.server_gone = true,
        }
        let gone = state.client_gone;
        let half = &mut state.halves[direction as usize];
        half.ended = true;
        half.wake();
        // Nothing will ever arrive from the other side again: the system closes what is left of the connection.
        if gone && half.hole == Some(Hole::Lost) {
            state.reset = true;
            state.halves.iter_mut().for_each(Half::wake);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl Half {
    fn push(&mut self, bytes: &[u8], medium: &Medium) {
        let mut bytes = bytes.to_vec();
        let mut ends = false;
        if let Some(cut) = &mut self.cut {
            bytes.truncate(*cut);
            *cut -= bytes.len();
            ends = *cut == 0;
        }
        self.queued += bytes.len();
        let at = self.hole.is_none().then(|| medium.arrival(self.last));
        self.last = at.or(self.last);
        if !bytes.is_empty() && !self.ended {
            self.chunks.push_back((at, bytes));
        }
        // What was delivered before the cut is still read.
        self.ended |= ends;
        self.wake();
    }

    fn wake(&mut self) {
        self.reader.take().into_iter().chain(self.writer.take()).for_each(Waker::wake);
    }
}

impl AsyncRead for ClientEnd {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let Self { wire, timer } = &mut *self;
        let taken = ready!(wire.poll_take(Direction::ToClient, buffer.remaining(), timer, cx))?;
        buffer.put_slice(&taken);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for ClientEnd {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut state = self.wire.state();
        if state.reset {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        let (room, dead) = (state.room, state.server_gone);
        let half = &mut state.halves[Direction::ToServer as usize];
        let room = room.saturating_sub(half.queued);
        if room == 0 {
            half.writer = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let written = &bytes[..room.min(bytes.len())];
        // A server that is gone reads none of it.
        if !dead {
            half.push(written, &self.wire.medium);
        }
        drop(state);
        self.wire.medium.wrote(self.wire.number, written);
        Poll::Ready(Ok(written.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.wire.close(Direction::ToServer);
        Poll::Ready(Ok(()))
    }
}

impl Drop for ClientEnd {
    fn drop(&mut self) {
        self.wire.close(Direction::ToServer);
    }
}

impl ServerEnd {
    /// What arrives; none at the end, however it ends.
    pub(super) async fn receive(&mut self) -> Option<Vec<u8>> {
        let Self { wire, timer } = self;
        let taken = std::future::poll_fn(|cx| wire.poll_take(Direction::ToServer, usize::MAX, timer, cx)).await;
        taken.ok().filter(|taken| !taken.is_empty())
    }

    pub(super) fn send(&self, bytes: &[u8]) {
        self.wire.write(Direction::ToClient, bytes);
    }
}

impl Drop for ServerEnd {
    fn drop(&mut self) {
        self.wire.close(Direction::ToClient);
    }
}
