//! Rows of a batch that the database refuses: they are set aside and named, and the others are written.

use crate::postgres::client::Transaction;

use super::numbering::answered;
use crate::postgres::PostgresError;

/// Refused rows that are looked for in a batch, and the most that are named. After these, what is refused is given up
/// in larger parts: each takes a dozen statements to find.
const MOST_ROWS: usize = 16;
const MOST_NAMES: usize = 3;

/// Otherwise a constraint that is checked at the commit would refuse the whole batch then.
const SAVEPOINT: &str = "SAVEPOINT part; SET CONSTRAINTS ALL IMMEDIATE";

/// The rows of a batch that weren't written.
#[derive(Default)]
pub(crate) struct SetAside {
    /// How many requests are lost with it.
    pub(crate) requests: u64,
    rows: u64,
    names: Vec<String>,
    error: Option<PostgresError>,
}

impl SetAside {
    /// Adds a row by its name, and why it was refused.
    pub(crate) fn add(&mut self, name: impl FnOnce() -> String, error: &PostgresError) {
        self.rows += 1;
        if self.names.len() < MOST_NAMES {
            self.names.push(name());
        }
        self.error.get_or_insert_with(|| error.clone());
    }

    /// An error that names the rows, if there are any.
    pub(super) fn into_result(self) -> Result<(), PostgresError> {
        let Some(error) = self.error else { return Ok(()) };
        let mut names = self.names.join("; ");
        let rest = self.rows - self.names.len() as u64;
        if rest > 0 {
            names.push_str(&format!("; and {rest} more"));
        }
        Err(error.of_rows(&names))
    }
}

/// Rows that are added in parts, each within a savepoint: a part that is refused is halved, until the rows are found
/// that the database doesn't take.
pub(crate) struct Parts<'r, R> {
    parts: Vec<&'r [R]>,
    found: usize,
}

impl<'r, R> Parts<'r, R> {
    pub(crate) fn of(rows: &'r [R]) -> Self {
        Self { parts: if rows.is_empty() { Vec::new() } else { vec![rows] }, found: 0 }
    }

    /// The next rows to add; call [`end`](Self::end) with the outcome.
    pub(crate) async fn begin(&mut self, transaction: &Transaction<'_>) -> Result<Option<&'r [R]>, PostgresError> {
        let Some(part) = self.parts.pop() else { return Ok(None) };
        answered(transaction.batch_execute(SAVEPOINT)).await?;
        Ok(Some(part))
    }

    /// Keeps what was added or, if it was refused, undoes that. An error that is returned is why all of these rows are
    /// to be set aside.
    pub(crate) async fn end(
        &mut self,
        transaction: &Transaction<'_>,
        part: &'r [R],
        added: Result<(), PostgresError>,
    ) -> Result<Option<PostgresError>, PostgresError> {
        let Err(error) = added else {
            answered(transaction.batch_execute("RELEASE part")).await?;
            return Ok(None);
        };
        if !error.is_data() {
            return Err(error);
        }
        answered(transaction.batch_execute("ROLLBACK TO part; RELEASE part")).await?;
        if part.len() > 1 && self.found < MOST_ROWS {
            let (first, second) = part.split_at(part.len() / 2);
            self.parts.extend([second, first]);
            return Ok(None);
        }
        self.found += 1;
        Ok(Some(error))
    }
}
