//! Clients of a server with which no statement waits for ever.
//!
//! A server that freezes keeps its connections open, and so does the kernel below it: neither TCP nor a timeout of the
//! server's own ends a call then. So no code outside `postgres` has a client of `tokio_postgres`, and in here each step
//! of each exchange has a deadline.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use deadpool_postgres::{Object, StatementCache};
use futures_util::TryStreamExt;
use tokio::time::timeout;
use tokio_postgres::binary_copy::BinaryCopyInWriter;
#[cfg(feature = "archive")]
use tokio_postgres::binary_copy::{BinaryCopyOutRow, BinaryCopyOutStream};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client as Inner, IsolationLevel, Portal, Row, Statement, ToStatement};

use super::PostgresError;

/// The values of a statement.
type Values<'a> = &'a [&'a (dyn ToSql + Sync)];

/// How long a server may be silent.
#[derive(Clone, Debug)]
pub(super) struct Deadline {
    /// In a statement, or between two rows of one.
    pub(super) within: Duration,
    /// In a statement that reads or removes a whole table.
    #[cfg(feature = "archive")]
    pub(super) whole_table_within: Duration,
    /// Whether the caller of the library chose these.
    pub(super) is_chosen: bool,
    /// What an error says of the work so far if an answer is missing, other than that to a commit.
    pub(super) so_far: &'static str,
    pub(super) address: Arc<str>,
    /// Whether the connection must not be used again.
    pub(super) is_spent: Arc<AtomicBool>,
}

impl Deadline {
    /// Waits for the server's answer. After a timeout it may still come, so the connection isn't reused.
    async fn answer<T>(
        &self,
        within: Duration,
        work: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T, PostgresError> {
        match timeout(within, work).await {
            Ok(done) => done.map_err(|error| PostgresError::new(&error)),
            Err(_) => {
                self.spend();
                Err(PostgresError::silent(&self.address, within))
            }
        }
    }

    fn spend(&self) {
        self.is_spent.store(true, Ordering::Relaxed);
    }

    fn so_far(&self, error: PostgresError) -> PostgresError {
        error.but(self.so_far)
    }
}

/// A connection, from the pool or of its own.
pub(crate) struct Client {
    held: Held,
    deadline: Deadline,
}

enum Held {
    /// Taken out only when this is dropped.
    Pooled(Option<Object>),
    Own(Inner),
}

const HELD: &str = "the connection is taken out only on drop";

impl Drop for Client {
    fn drop(&mut self) {
        if let Held::Pooled(connection) = &mut self.held
            && self.deadline.is_spent.load(Ordering::Relaxed)
        {
            // Otherwise it would go back to the pool.
            drop(connection.take().map(Object::take));
        }
    }
}

impl Client {
    pub(super) fn pooled(connection: Object, deadline: Deadline) -> Self {
        Self { held: Held::Pooled(Some(connection)), deadline }
    }

    /// The caller drives the connection.
    pub(super) fn own(client: Inner, deadline: Deadline) -> Self {
        Self { held: Held::Own(client), deadline }
    }

    /// Sets another deadline for each statement, unless the library's caller has chosen one.
    pub(crate) fn within(mut self, within: Duration) -> Self {
        if !self.deadline.is_chosen {
            self.deadline.within = within;
        }
        self
    }

    fn inner(&self) -> &Inner {
        match &self.held {
            Held::Pooled(connection) => connection.as_ref().expect(HELD),
            Held::Own(client) => client,
        }
    }

    /// A transaction at this level; one that doesn't write is read-only.
    pub(super) async fn begin(
        &mut self,
        level: IsolationLevel,
        writes: bool,
    ) -> Result<Transaction<'_>, PostgresError> {
        let deadline = self.deadline.clone();
        let (client, statements) = match &mut self.held {
            Held::Pooled(connection) => {
                let connection = connection.as_mut().expect(HELD);
                let statements = Arc::clone(&connection.statement_cache);
                let client: &mut Inner = connection;
                (client, Some(statements))
            }
            Held::Own(client) => (client, None),
        };
        let begun = client.build_transaction().isolation_level(level).read_only(!writes).start();
        let transaction = deadline.answer(deadline.within, begun).await.map_err(|error| deadline.so_far(error))?;
        Ok(Transaction { transaction, statements, deadline, writes })
    }

    pub(crate) async fn query<T: ?Sized + ToStatement>(
        &self,
        statement: &T,
        values: Values<'_>,
    ) -> Result<Vec<Row>, PostgresError> {
        rows(self.inner(), &self.deadline, statement, values).await
    }

    pub(crate) async fn query_one(&self, statement: &str, values: Values<'_>) -> Result<Row, PostgresError> {
        self.answer(self.inner().query_one(statement, values)).await
    }

    /// Statements that change nothing beyond this session.
    pub(crate) async fn batch_execute(&self, statements: &str) -> Result<(), PostgresError> {
        self.answer(self.inner().batch_execute(statements)).await
    }

    pub(crate) async fn prepare_cached(&self, statement: &str) -> Result<Statement, PostgresError> {
        match &self.held {
            Held::Pooled(connection) => self.answer(connection.as_ref().expect(HELD).prepare_cached(statement)).await,
            Held::Own(client) => self.answer(client.prepare(statement)).await,
        }
    }

    async fn answer<T>(
        &self,
        work: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T, PostgresError> {
        self.deadline.answer(self.deadline.within, work).await.map_err(|error| self.deadline.so_far(error))
    }
}

/// What an archiver does with whole tables.
#[cfg(feature = "archive")]
impl Client {
    /// A query that reads a whole table for its one row.
    pub(crate) async fn query_whole_table(&self, statement: &str) -> Result<Row, PostgresError> {
        let work = self.inner().query_one(statement, &[]);
        self.deadline.answer(self.deadline.whole_table_within, work).await.map_err(|error| self.deadline.so_far(error))
    }

    /// For work in many steps: those that are done stay done, and the next run continues after them.
    pub(crate) fn of_many_steps(mut self) -> Self {
        self.deadline.so_far = "the next run continues from here";
        self
    }

    /// A statement that changes tables.
    pub(crate) async fn alter(&self, statement: &str) -> Result<(), PostgresError> {
        let work = self.inner().batch_execute(statement);
        self.deadline.answer(self.deadline.whole_table_within, work).await.map_err(|error| self.deadline.so_far(error))
    }

    /// The rows of a whole table, which may be sorted before the first comes.
    pub(crate) async fn copy_out(&self, copy: &str, types: &[Type]) -> Result<CopyOut, PostgresError> {
        let deadline = self.deadline.clone();
        let stream = deadline.answer(deadline.whole_table_within, self.inner().copy_out(copy)).await;
        let stream = stream.map_err(|error| deadline.so_far(error))?;
        Ok(CopyOut { stream: Box::pin(BinaryCopyOutStream::new(stream, types)), deadline })
    }
}

/// Rows on their way from the server.
#[cfg(feature = "archive")]
pub(crate) struct CopyOut {
    stream: Pin<Box<BinaryCopyOutStream>>,
    deadline: Deadline,
}

#[cfg(feature = "archive")]
impl CopyOut {
    pub(crate) async fn next(&mut self) -> Result<Option<BinaryCopyOutRow>, PostgresError> {
        let next = self.deadline.answer(self.deadline.whole_table_within, self.stream.try_next()).await;
        next.map_err(|error| self.deadline.so_far(error))
    }
}

/// A transaction. What it has done is undone unless [`commit`](Self::commit) is called.
pub(crate) struct Transaction<'s> {
    transaction: tokio_postgres::Transaction<'s>,
    statements: Option<Arc<StatementCache>>,
    deadline: Deadline,
    writes: bool,
}

impl Transaction<'_> {
    pub(crate) async fn query(&self, statement: &str, values: Values<'_>) -> Result<Vec<Row>, PostgresError> {
        rows(self.transaction.client(), &self.deadline, statement, values).await
    }

    pub(crate) async fn query_one(&self, statement: &str, values: Values<'_>) -> Result<Row, PostgresError> {
        self.answer(self.transaction.query_one(statement, values)).await
    }

    pub(crate) async fn query_opt(&self, statement: &str, values: Values<'_>) -> Result<Option<Row>, PostgresError> {
        self.answer(self.transaction.query_opt(statement, values)).await
    }

    pub(crate) async fn execute<T: ?Sized + ToStatement>(
        &self,
        statement: &T,
        values: Values<'_>,
    ) -> Result<u64, PostgresError> {
        self.answer(self.transaction.execute(statement, values)).await
    }

    pub(crate) async fn batch_execute(&self, statements: &str) -> Result<(), PostgresError> {
        self.answer(self.transaction.batch_execute(statements)).await
    }

    pub(crate) async fn prepare_cached(&self, statement: &str) -> Result<Statement, PostgresError> {
        match &self.statements {
            Some(statements) => self.answer(statements.prepare(self.transaction.client(), statement)).await,
            None => self.answer(self.transaction.prepare(statement)).await,
        }
    }

    /// The server's process that runs this transaction. A pool in front of the server may give the next transaction
    /// another process.
    pub(super) async fn pid(&self) -> Result<i32, PostgresError> {
        Ok(self.query_one("SELECT pg_backend_pid()", &[]).await?.get(0))
    }

    /// A query whose rows are fetched some at a time.
    pub(crate) async fn bind(&self, statement: &str, values: Values<'_>) -> Result<Portal, PostgresError> {
        self.answer(self.transaction.bind(statement, values)).await
    }

    pub(crate) async fn query_portal(&self, portal: &Portal, most: i32) -> Result<Vec<Row>, PostgresError> {
        self.answer(self.transaction.query_portal(portal, most)).await
    }

    /// Rows for a table, by `COPY ... FROM STDIN (FORMAT binary)`.
    pub(crate) async fn copy_in(&self, copy: &str, types: &[Type]) -> Result<CopyIn, PostgresError> {
        // If the server refuses it at once, tokio-postgres sends one Sync too many, whose answer would be taken for
        // that to another statement.
        let sink = self.answer(self.transaction.copy_in(copy)).await.inspect_err(|_| self.deadline.spend())?;
        Ok(CopyIn { writer: Box::pin(BinaryCopyInWriter::new(sink, types)), deadline: self.deadline.clone() })
    }

    /// Commits. Without an answer, it isn't known whether the changes were made.
    pub(crate) async fn commit(self) -> Result<(), PostgresError> {
        let Self { transaction, deadline, writes, .. } = self;
        let done = deadline.answer(deadline.within, transaction.commit()).await;
        done.map_err(|error| if writes { error.unknown() } else { deadline.so_far(error) })
    }

    async fn answer<T>(
        &self,
        work: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T, PostgresError> {
        self.deadline.answer(self.deadline.within, work).await.map_err(|error| self.deadline.so_far(error))
    }
}

/// Rows on their way to the server.
pub(crate) struct CopyIn {
    writer: Pin<Box<BinaryCopyInWriter>>,
    deadline: Deadline,
}

impl CopyIn {
    pub(crate) async fn write(&mut self, row: Values<'_>) -> Result<(), PostgresError> {
        let written = self.deadline.answer(self.deadline.within, self.writer.as_mut().write(row)).await;
        written.map_err(|error| self.deadline.so_far(error))
    }

    /// Ends the copy; returns the number of rows.
    pub(crate) async fn finish(mut self) -> Result<u64, PostgresError> {
        let done = self.deadline.answer(self.deadline.within, self.writer.as_mut().finish()).await;
        done.map_err(|error| self.deadline.so_far(error))
    }
}

/// Each row resets the deadline, so that a long result isn't taken for a silent server.
async fn rows<T: ?Sized + ToStatement>(
    client: &Inner,
    deadline: &Deadline,
    statement: &T,
    values: Values<'_>,
) -> Result<Vec<Row>, PostgresError> {
    let read = async {
        let begun = deadline.answer(deadline.within, client.query_raw(statement, values.iter().copied())).await?;
        let mut begun = std::pin::pin!(begun);
        let mut rows = Vec::new();
        while let Some(row) = deadline.answer(deadline.within, begun.try_next()).await? {
            rows.push(row);
        }
        Ok(rows)
    };
    read.await.map_err(|error| deadline.so_far(error))
}
