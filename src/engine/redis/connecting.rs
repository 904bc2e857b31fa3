//! Makes the connection that a runtime's calls go over, keeps it, and replaces it.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::time::{Instant, timeout};

use super::Redis;
use super::connection::{Connection, RENEW_AGAIN};
use super::per_runtime::PerRuntime;
use super::server::interrupted;
use crate::error::Error;

/// How long one attempt to connect may take, whatever its waiters' deadlines.
const LONGEST_CONNECT: Duration = Duration::from_secs(5);
/// After this long Redis counts as away, though the attempt goes on.
const SLOW_CONNECT: Duration = Duration::from_secs(1);
/// How long after an attempt another one starts beside it.
const AGAIN: Duration = Duration::from_millis(500);

impl Redis {
    pub(super) async fn connection(&self, per_runtime: &Arc<PerRuntime>) -> Result<Connection, Error> {
        if let Some(held) = per_runtime.current_connection() {
            if held.is_usable().await {
                if held.is_due() {
                    self.succeed(per_runtime, &held);
                }
                return Ok(held);
            }
            per_runtime.drop_connection(held.number);
            held.lose();
        }
        let attempt = loop {
            let ended = per_runtime.connecting.ended();
            // If the attempt's runtime is stuck, another attempt would be stuck too: its runtime is the same.
            let attempt = per_runtime.connecting.begin(None);
            if let Some(held) = per_runtime.current_connection() {
                return Ok(held);
            }
            if let Some(attempt) = attempt {
                break attempt;
            }
            ended.await;
            // The attempt may have failed.
            if let Some(held) = per_runtime.current_connection() {
                return Ok(held);
            }
            per_runtime.breaker.check()?;
        };
        // A separate task, so that callers with deadlines shorter than connecting takes still leave a connection for
        // the next one. The caller may be polled on another runtime than the one that the connection is for.
        let (this, of_task) = (self.clone(), Arc::clone(per_runtime));
        let connect = per_runtime.runtime.spawn(async move {
            // Callers from now on needn't wait for an attempt that takes long.
            let made = this.make_at_last(|late| of_task.report_away(late)).await;
            match &made {
                Ok(connection) => {
                    of_task.set_connection(connection.clone());
                    of_task.breaker.connected();
                }
                Err(error) => of_task.report_failure(error),
            }
            drop(attempt);
            made
        });
        connect.await.unwrap_or_else(|ended| {
            let error = interrupted(ended);
            per_runtime.report_failure(&error);
            Err(error)
        })
    }

    /// Replaces a connection whose credentials expire soon, while calls go on over it. If that fails, the next call
    /// after a while tries again; once the server has closed it, callers connect as they do at first.
    fn succeed(&self, per_runtime: &Arc<PerRuntime>, held: &Connection) {
        // One at a time, and beside the attempts of callers who have no connection, if this one breaks meanwhile.
        held.due_again_after(LONGEST_CONNECT);
        let (this, per_runtime, held) = (self.clone(), Arc::clone(per_runtime), held.clone());
        per_runtime.runtime.clone().spawn(async move {
            match timeout(LONGEST_CONNECT, this.make_at_last(|_| ())).await {
                Ok(Ok(connection)) => per_runtime.replace(&held, connection),
                _ => held.due_again_after(RENEW_AGAIN),
            }
        });
    }

    /// The first of several attempts to succeed. Another starts every half a second meanwhile: one attempt may never be
    /// answered, and the next immediately. `slow` hears of it when they take long.
    async fn make_at_last(&self, slow: impl Fn(&Error)) -> Result<Connection, Error> {
        let late = |after| Error::deadline(after, false).at_connecting();
        let (began, mut failed) = (Instant::now(), None);
        let mut next = began + AGAIN;
        let mut attempts = FuturesUnordered::new();
        attempts.push(self.connect());
        loop {
            match tokio::time::timeout_at(next, attempts.next()).await {
                Ok(Some(Ok(connection))) => return Ok(connection),
                // A refusal will be repeated.
                Ok(Some(Err(error))) if attempts.is_empty() || !error.goes_to_policy() => return Err(error),
                Ok(Some(Err(error))) => failed = Some(error),
                Ok(None) => return Err(late(began.elapsed())),
                Err(_) if began.elapsed() >= LONGEST_CONNECT => {
                    let late = late(LONGEST_CONNECT);
                    return Err(match failed {
                        Some(error) => late.caused_by(error),
                        None => late,
                    });
                }
                Err(_) => {
                    if began.elapsed() >= SLOW_CONNECT {
                        slow(&late(SLOW_CONNECT));
                    }
                    next += AGAIN;
                    attempts.push(self.connect());
                }
            }
        }
    }
}
