//! What the silence of a connection means: another connection is tried, to distinguish a dead connection from a Redis
//! that is unreachable, and from one that runs no script for now.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::{Instant, sleep, timeout};

use super::connection::{Connection, Diagnosis, Owner, lost};
use super::errors::from_answer;
use super::per_runtime::PerRuntime;
use super::{Redis, Shared};
use crate::error::{Error, Kind};

impl Owner for Shared {
    fn diagnose<'a>(self: Arc<Self>, connection: &'a Connection, answered: u64) -> BoxFuture<'a, Option<Diagnosis>> {
        Box::pin(async move {
            let redis = Redis { shared: self };
            let per_runtime = redis.per_runtime().ok()?;
            let is_used = per_runtime.is_current(connection) || connection.is_waited_for();
            if is_used { Some(redis.diagnose_silence(&per_runtime, connection, answered).await) } else { None }
        })
    }

    fn ended(self: Arc<Self>, connection: &Connection, broke: bool) {
        if let Ok(per_runtime) = (Redis { shared: self }).per_runtime() {
            let was_current = per_runtime.drop_connection(connection.number);
            if was_current && broke {
                per_runtime.report_failure(&from_answer(&lost()));
            }
        }
    }
}

impl Redis {
    async fn diagnose_silence(&self, per_runtime: &PerRuntime, connection: &Connection, answered: u64) -> Diagnosis {
        let (patience, began): (Duration, _) = (connection.patience(), Instant::now());
        let for_another = connection.patience_for_another();
        let other = match per_runtime.current_connection().filter(|other| other.number != connection.number) {
            Some(other) => Ok(other),
            None => timeout(for_another, self.connect()).await.unwrap_or_else(|_| {
                let why = "redis answers nothing, on this connection or a new one";
                Err(Error::new(Kind::Unreachable, why))
            }),
        };
        if let Ok(other) = &other {
            // EVAL may write, so it is held up while Redis pauses writes; then neither connection is to blame.
            let mut nothing = redis::cmd("EVAL");
            nothing.arg("return 1").arg(0);
            match timeout(patience, other.command(&nothing)).await {
                Ok(Err(error)) if error.is_io_error() => return Diagnosis::Unresolved,
                Ok(_) => {}
                Err(_) => return Diagnosis::Waits,
            }
            // The old connection may have much in flight, and the new one nothing.
            sleep(patience).await;
        }
        // If this runtime stalled, the silence proves nothing.
        if connection.last_answered() != answered || began.elapsed() > 3 * patience + for_another {
            return Diagnosis::Unresolved;
        }
        match other {
            Ok(other) => {
                per_runtime.report_silence(&from_answer(&lost()));
                per_runtime.replace(connection, other);
            }
            Err(error) if error.is_outage() => {
                per_runtime.report_away(&error);
                return Diagnosis::Waits;
            }
            // A refusal: the next caller connects, and gets its reason.
            Err(_) => _ = per_runtime.drop_connection(connection.number),
        }
        connection.lose();
        Diagnosis::Dead
    }
}
