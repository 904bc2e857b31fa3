//! Looks API keys up in PostgreSQL: those that are asked for while a query is in flight go out together in the next
//! one.

use std::sync::MutexGuard;
use std::time::Duration;

use tokio::sync::oneshot::{self, error::TryRecvError};
use tokio::time::timeout;

use crate::lock::Lock;
use crate::postgres::Postgres;
use crate::stored::key_text::KeyId;
use crate::stored::keys::LookedUp;

/// Ids in one query.
const MOST_AT_ONCE: usize = 1000;
const ANSWERED_WITHIN: Duration = Duration::from_secs(2);

pub(crate) struct Lookups {
    postgres: Postgres,
    waiting: Lock<Vec<(KeyId, oneshot::Sender<LookedUp>)>>,
    /// Held during a query.
    in_flight: tokio::sync::Mutex<()>,
}

impl Lookups {
    pub(crate) fn new(postgres: &Postgres) -> Self {
        Self { postgres: postgres.clone(), waiting: Lock::default(), in_flight: tokio::sync::Mutex::default() }
    }

    /// What the database has on an id; `None` if it didn't answer. Each id is asked for once at a time.
    pub(crate) async fn look_up(&self, id: KeyId) -> Option<LookedUp> {
        let (answer, mut answered) = oneshot::channel();
        self.waiting().push((id, answer));
        let _turn = self.in_flight.lock().await;
        loop {
            match answered.try_recv() {
                Ok(found) => return Some(found),
                Err(TryRecvError::Closed) => return None,
                // No query has included it yet: the next one does, unless many have waited longer.
                Err(TryRecvError::Empty) => self.ask().await,
            }
        }
    }

    /// One query for those that have waited longest. If it fails, their channels are closed.
    async fn ask(&self) {
        let batch: Vec<_> = {
            let mut waiting = self.waiting();
            let most = waiting.len().min(MOST_AT_ONCE);
            waiting.drain(..most).collect()
        };
        let ids: Vec<_> = batch.iter().map(|(id, _)| *id).collect();
        match timeout(ANSWERED_WITHIN, self.postgres.look_up(&ids)).await {
            Ok(Ok(mut found)) => {
                for (id, answer) in batch {
                    if let Some(found) = found.remove(&id) {
                        // The receiver may be gone.
                        let _ = answer.send(found);
                    }
                }
            }
            // The next query would wait as long, and those that wait for it have waited already.
            Err(_) => self.waiting().clear(),
            Ok(Err(error)) if error.is_locked() => self.waiting().clear(),
            Ok(Err(_)) => {}
        }
    }

    fn waiting(&self) -> MutexGuard<'_, Vec<(KeyId, oneshot::Sender<LookedUp>)>> {
        self.waiting.lock()
    }
}
