//! Creates the tables step by step, from the files in `sql/`.

use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};

use super::client::Transaction;
use super::ownership::{self, Found};
use super::{Postgres, PostgresError, begin_reading, begin_writing};

/// A file in `sql/`, whose name begins with its number.
struct Step {
    name: &'static str,
    sql: &'static str,
}

/// In order; the first has number 1. A released step never changes, since databases have it.
const STEPS: [Step; 2] = [
    Step { name: "configuration", sql: include_str!("../../sql/0001_configuration.sql") },
    Step { name: "history", sql: include_str!("../../sql/0002_history.sql") },
];

/// Held while migrating, so that two migrations don't run at once, and nobody adds a trigger meanwhile. Only the
/// table's owner can take it, and it holds up nobody who reads.
const LOCK: &str = "LOCK TABLE tollgate.migrations IN EXCLUSIVE MODE";

/// How long to wait for a migration that runs at the same time.
const SETTINGS: &str = "SET LOCAL lock_timeout = '60s'; SET LOCAL search_path = pg_catalog, pg_temp";

/// How long the server may be silent in a statement, each of which may change a large table.
const ANSWERED_WITHIN: Duration = Duration::from_secs(600);
/// How often a migration is tried while others create the schema at the same moment.
const MOST_ATTEMPTS: usize = 5;

/// Run only if there is no schema: it needs a right in the database, even with `IF NOT EXISTS` where one exists.
const OWN_SCHEMA: &str = "CREATE SCHEMA tollgate";

const OWN_TABLE: &str = "
    CREATE TABLE tollgate.migrations (
        number integer PRIMARY KEY,
        name text NOT NULL,
        -- SHA-256 of its text.
        digest bytea NOT NULL,
        applied_at timestamptz NOT NULL DEFAULT now()
    )";

/// One of the steps to the tables that this version of tollgate uses.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Migration {
    /// Counts from 1.
    pub number: u32,
    /// What it makes.
    pub name: String,
    /// When it was applied to this database; `None` if it is pending.
    pub applied_at: Option<SystemTime>,
}

/// Which migrations a database has.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Schema {
    /// The server's version as it reports it, such as `15.18`.
    pub server_version: String,
    /// All migrations that this version of tollgate knows.
    pub migrations: Vec<Migration>,
}

impl Schema {
    /// Whether no migration is pending.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.migrations.iter().all(|migration| migration.applied_at.is_some())
    }
}

impl Postgres {
    /// Creates the tables, or upgrades those of an older version. Returns the migrations that were applied, in order;
    /// none if there was nothing to do. All run in one transaction; a concurrent call waits, for at most a minute. The
    /// first call needs the right to create a schema in the database, unless there is an empty one that the role owns.
    /// Later calls must come from the role that made it.
    ///
    /// # Errors
    ///
    /// No connection; no right; a database that isn't in UTF-8; tables of a newer version of tollgate, or altered
    /// migrations; a schema `tollgate` that another role owns, may create in, or has added to, which the error names:
    /// what is in it, such as a trigger, would run with the rights of the role that migrates.
    pub async fn migrate(&self) -> Result<Vec<Migration>, PostgresError> {
        for _ in 0..MOST_ATTEMPTS {
            if let Some(made) = self.migrate_once().await? {
                return Ok(made);
            }
        }
        Err(PostgresError::refused("schema tollgate: other sessions keep creating and dropping it"))
    }

    /// `None` if somebody else has made the schema meanwhile.
    async fn migrate_once(&self) -> Result<Option<Vec<Migration>>, PostgresError> {
        let mut connection = self.connection().await?.within(ANSWERED_WITHIN);
        let transaction = begin_writing(&mut connection).await?;
        transaction.batch_execute(SETTINGS).await?;
        let encoding: String = transaction.query_one("SELECT current_setting('server_encoding')", &[]).await?.get(0);
        if encoding != "UTF8" {
            // Clients write text that other encodings can't hold, and a whole batch would then fail.
            return Err(PostgresError::input(format!("encoding: expected a database in UTF8, got {encoding}")));
        }
        let pid = transaction.pid().await?;
        let made = async {
            let found = ownership::checked(&transaction).await?;
            let is_made = match found {
                Found::Nothing => create(&transaction, OWN_SCHEMA).await? && create(&transaction, OWN_TABLE).await?,
                Found::Empty => create(&transaction, OWN_TABLE).await?,
                Found::Ours => true,
            };
            if !is_made {
                return Ok(None);
            }
            transaction.batch_execute(LOCK).await?;
            // Again, since another migration may have ended meanwhile, and nobody can add anything now.
            ownership::checked(&transaction).await?;
            applied_anew(&transaction).await.map(Some)
        };
        let Some(made) = self.naming_blockers(pid, made).await? else { return Ok(None) };
        transaction.commit().await?;
        Ok(Some(made))
    }

    /// Which migrations this database has. Changes nothing.
    ///
    /// # Errors
    ///
    /// No connection; no right; tables of a newer version of tollgate, or altered migrations.
    pub async fn schema(&self) -> Result<Schema, PostgresError> {
        let mut connection = self.connection().await?;
        let transaction = begin_reading(&mut connection).await?;
        let row = transaction.query_one("SELECT current_setting('server_version')", &[]).await?;
        let pid = transaction.pid().await?;
        let done = async { if is_there(&transaction).await? { applied(&transaction).await } else { Ok(Vec::new()) } };
        let done = self.naming_blockers(pid, done).await?;
        transaction.commit().await?;
        let migrations = STEPS.iter().zip(1..).map(|(step, number)| Migration {
            number,
            name: step.name.to_owned(),
            applied_at: done.get(number as usize - 1).copied(),
        });
        Ok(Schema { server_version: row.get(0), migrations: migrations.collect() })
    }
}

/// Refuses tables that are older or newer than this program: what it would read or write there may mean something else.
pub(crate) async fn expect_this_version(transaction: &Transaction<'_>) -> Result<(), PostgresError> {
    let (got, expected) = (applied(transaction).await?.len(), STEPS.len());
    if got < expected {
        let why = format!("schema: the database has {got} of {expected} migrations");
        return Err(PostgresError::schema(format!("{why}: run tollgate db migrate")));
    }
    Ok(())
}

/// Creates the schema or the table; `false` if somebody else has done so meanwhile.
async fn create(transaction: &Transaction<'_>, sql: &str) -> Result<bool, PostgresError> {
    match transaction.batch_execute(sql).await {
        Err(error) if error.is_made_already() => Ok(false),
        made => made.map(|()| true),
    }
}

/// Applies the steps that are pending.
async fn applied_anew(transaction: &Transaction<'_>) -> Result<Vec<Migration>, PostgresError> {
    let done = applied(transaction).await?;
    let mut made = Vec::new();
    for (step, number) in STEPS.iter().zip(1_i32..).skip(done.len()) {
        transaction.batch_execute(step.sql).await?;
        let insert = "INSERT INTO tollgate.migrations (number, name, digest) VALUES ($1, $2, $3) RETURNING applied_at";
        let row = transaction.query_one(insert, &[&number, &step.name, &digest(step)]).await?;
        let (number, name) = (number.unsigned_abs(), step.name.to_owned());
        made.push(Migration { number, name, applied_at: Some(row.get(0)) });
    }
    Ok(made)
}

/// Whether there is a table of migrations. A view of that name would run its owner's functions with the reader's
/// rights.
async fn is_there(transaction: &Transaction<'_>) -> Result<bool, PostgresError> {
    let select =
        "SELECT EXISTS (SELECT FROM pg_class WHERE oid = to_regclass('tollgate.migrations') AND relkind = 'r')";
    Ok(transaction.query_one(select, &[]).await?.get(0))
}

/// When each applied step was applied.
async fn applied(transaction: &Transaction<'_>) -> Result<Vec<SystemTime>, PostgresError> {
    let select = "SELECT number, name, digest, applied_at FROM tollgate.migrations ORDER BY number";
    let mut done = Vec::new();
    for (row, number) in transaction.query(select, &[]).await?.iter().zip(1_i32..) {
        let (got, name): (i32, String) = (row.get(0), row.get(1));
        let Some(step) = usize::try_from(number - 1).ok().and_then(|at| STEPS.get(at)) else {
            let most = STEPS.len();
            let why = format!("the database has migration {got} ({name}), and this version of tollgate knows {most}");
            return Err(PostgresError::schema(format!("schema: {why}: upgrade tollgate")));
        };
        if got != number || name != step.name || row.get::<_, &[u8]>(2) != digest(step) {
            let why = format!("differs from migration {number} ({}) of this version of tollgate", step.name);
            return Err(PostgresError::schema(format!("schema: the database's migration {got} ({name}) {why}")));
        }
        done.push(row.get(3));
    }
    Ok(done)
}

fn digest(step: &Step) -> Vec<u8> {
    Sha256::digest(step.sql).to_vec()
}
