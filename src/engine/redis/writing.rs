//! The order in which a runtime's calls are written.
//!
//! A caller that gives up may be followed at once by a call that gives back what it took. If its own call was just about
//! to be written, on another thread, the later one must not overtake it.

use std::future::poll_fn;
use std::pin::pin;

use crate::lock::Lock;

/// One at a time decides what it sends, and hands it to the connection.
#[derive(Debug, Default)]
pub(super) struct Writing(Lock<()>);

impl Writing {
    /// Runs this, which hands what it sends to the connection before it waits for anything: nobody else does so from its
    /// beginning until then.
    pub(super) async fn in_order<T>(&self, sending: impl Future<Output = T>) -> T {
        let (mut sending, mut is_written) = (pin!(sending), false);
        poll_fn(|context| {
            let turn = (!is_written).then(|| self.0.lock());
            is_written = true;
            let polled = sending.as_mut().poll(context);
            drop(turn);
            polled
        })
        .await
    }
}
