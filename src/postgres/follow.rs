//! Rules that follow the database: in force in every process within a second of a change.

use std::convert::Infallible;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use arc_swap::ArcSwap;
use futures_util::future::{Either, select};
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tokio_postgres::{AsyncMessage, Client, NoTls};

use super::rules::read;
use super::{CONNECTED_WITHIN, Postgres, PostgresError, StoredRules};
use crate::random::jittered;
use crate::rules::RuleSet;
use crate::telemetry;

/// The version is looked at this often, whatever is heard: a connection that has died without a word is noticed by that.
const CHECKED_EVERY: Duration = Duration::from_secs(2);
const ANSWERED_WITHIN: Duration = Duration::from_secs(2);
/// Before a lost connection is made again, and up to as much longer by chance.
const PAUSE: Duration = Duration::from_millis(200);

/// A set of rules that follows the database. Cheap to clone; all clones follow together, until the last is dropped.
#[derive(Clone)]
pub struct FollowedRules {
    shared: Arc<Shared>,
}

struct Shared {
    current: ArcSwap<StoredRules>,
    connected: AtomicBool,
    reloads: AtomicU64,
    failures: AtomicU64,
    task: AbortHandle,
}

impl Postgres {
    /// Reads the rules and follows them, in a task of this runtime: a change is in force within a second of its commit,
    /// whole, or not at all where it can't be used. While PostgreSQL is away the last rules stay in force.
    ///
    /// # Errors
    ///
    /// No connection, no tables, or rules that can't be used, at first.
    pub async fn follow_rules(&self) -> Result<FollowedRules, PostgresError> {
        let first = self.rules().await?;
        let postgres = self.clone();
        let shared = Arc::new_cyclic(|shared: &Weak<Shared>| Shared {
            current: ArcSwap::from_pointee(first),
            connected: AtomicBool::new(true),
            reloads: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            task: tokio::spawn(follow(Weak::clone(shared), postgres)).abort_handle(),
        });
        Ok(FollowedRules { shared })
    }
}

impl FollowedRules {
    /// The rules in force.
    #[must_use]
    pub fn current(&self) -> RuleSet {
        self.shared.current.load().rules.clone()
    }

    /// The version of the configuration that they are of.
    #[must_use]
    pub fn version(&self) -> i64 {
        self.shared.current.load().version
    }

    /// Whether the database was heard from within the last few seconds. If not, the rules are those of before.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.shared.connected.load(Ordering::Relaxed)
    }

    /// How often changed rules were taken so far.
    #[must_use]
    pub fn reloads(&self) -> u64 {
        self.shared.reloads.load(Ordering::Relaxed)
    }

    /// How often changed rules could not be used so far.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.shared.failures.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for FollowedRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rules, version) = (self.current().len(), self.version());
        f.debug_struct("FollowedRules").field("rules", &rules).field("version", &version).finish_non_exhaustive()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Listens for as long as anybody has the rules.
async fn follow(shared: Weak<Shared>, postgres: Postgres) {
    loop {
        let Err(lost) = listen(&shared, &postgres).await;
        let Some(rules) = shared.upgrade() else { return };
        if rules.connected.swap(false, Ordering::Relaxed) {
            telemetry::database_lost(&lost);
        }
        drop(rules);
        tokio::time::sleep(jittered(PAUSE, 100)).await;
    }
}

/// Takes each change, on a connection of its own, until that is lost.
async fn listen(shared: &Weak<Shared>, postgres: &Postgres) -> Result<Infallible, PostgresError> {
    let connected = in_time(CONNECTED_WITHIN, postgres.config.connect(NoTls));
    let (mut client, mut connection) = connected.await?;
    let changed = Notify::new();
    let heard = async {
        loop {
            match poll_fn(|context| connection.poll_message(context)).await {
                Some(Ok(AsyncMessage::Notification(_))) => changed.notify_one(),
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(PostgresError::from(error)),
                None => return Err(PostgresError::lost()),
            }
        }
    };
    let taken = async {
        // Before the rules are read, so that no change is missed.
        in_time(ANSWERED_WITHIN, client.batch_execute("LISTEN tollgate")).await?;
        // What was refused is not read again and again.
        let mut refused = 0;
        loop {
            take(shared, &mut client, &mut refused).await?;
            let _ = timeout(CHECKED_EVERY, changed.notified()).await;
        }
    };
    match select(pin!(heard), pin!(taken)).await {
        Either::Left((lost, _)) | Either::Right((lost, _)) => lost,
    }
}

/// Takes the rules of a version that isn't here yet.
async fn take(shared: &Weak<Shared>, client: &mut Client, refused: &mut i64) -> Result<(), PostgresError> {
    let version = in_time(ANSWERED_WITHIN, client.query_one("SELECT version FROM tollgate.configuration", &[])).await?;
    let (version, Some(rules)) = (version.get::<_, i64>(0), shared.upgrade()) else { return Ok(()) };
    if !rules.connected.swap(true, Ordering::Relaxed) {
        telemetry::database_found();
    }
    if version == rules.current.load().version || version == *refused {
        return Ok(());
    }
    match timeout(CONNECTED_WITHIN, read(client)).await {
        Ok(Ok(read)) => {
            let known = rules.current.load();
            if read.rules.is_same_as(&known.rules) {
                // A change of users or keys, of which rules know nothing.
                rules.current.store(Arc::new(StoredRules { rules: known.rules.clone(), ..read }));
            } else {
                telemetry::reloaded(Ok(&read.rules));
                rules.reloads.fetch_add(1, Ordering::Relaxed);
                rules.current.store(Arc::new(read));
            }
        }
        Ok(Err(error)) if error.is_input() => {
            *refused = version;
            rules.failures.fetch_add(1, Ordering::Relaxed);
            telemetry::reloaded(Err(&error));
        }
        Ok(Err(error)) => return Err(error),
        Err(_) => return Err(PostgresError::lost()),
    }
    Ok(())
}

async fn in_time<T>(
    most: Duration,
    work: impl Future<Output = Result<T, tokio_postgres::Error>>,
) -> Result<T, PostgresError> {
    match timeout(most, work).await {
        Ok(done) => Ok(done?),
        Err(_) => Err(PostgresError::lost()),
    }
}
