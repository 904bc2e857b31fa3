//! Errors of PostgreSQL, each in one line, without values or passwords.

use std::error::Error as _;
use std::fmt;
use std::time::Duration;

use deadpool_postgres::PoolError;
use tokio_postgres::error::SqlState;

/// Why PostgreSQL could not do what was asked.
///
/// The message is complete, and there is no [`source`](std::error::Error::source): the rest of a server's message,
/// above all its DETAIL, may contain a row's values. Of rows that couldn't be stored, it names the user and the like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PostgresError {
    kind: Kind,
    message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Input,
    Unreachable,
    /// A change may or may not have been made.
    Unknown,
    /// There is a server, and it isn't ready: it recovers, or accepts no connections to this database.
    NotReady,
    /// The server rejects the password, the role, or what the role may do.
    Denied,
    Schema,
    /// What was sent can't be stored.
    Data,
    /// The same, because of a function or a trigger of the database's owner, or of a limit of the server.
    Rejected,
    /// Somebody else has held a lock for too long.
    Locked,
    /// What was to be created exists already.
    Exists,
    Refused,
}

impl PostgresError {
    pub(crate) fn new(error: &tokio_postgres::Error) -> Self {
        let (kind, message) = described(error);
        Self { kind, message }
    }

    pub(crate) fn input(message: impl Into<String>) -> Self {
        Self { kind: Kind::Input, message: message.into() }
    }

    pub(crate) fn schema(message: impl Into<String>) -> Self {
        Self { kind: Kind::Schema, message: message.into() }
    }

    pub(crate) fn refused(message: impl Into<String>) -> Self {
        Self { kind: Kind::Refused, message: message.into() }
    }

    pub(crate) fn lost() -> Self {
        Self { kind: Kind::Unreachable, message: "postgres: the connection was lost".to_owned() }
    }

    /// The server didn't answer a statement in time.
    pub(crate) fn silent(address: &str, within: Duration) -> Self {
        Self { kind: Kind::Unreachable, message: format!("postgres at {address}: no answer within {within:?}") }
    }

    pub(crate) fn unanswered(within: Duration) -> Self {
        Self { kind: Kind::Unreachable, message: format!("postgres: no answer within {within:?}") }
    }

    /// Adds what is known although the statement wasn't answered.
    pub(crate) fn but(mut self, what: &str) -> Self {
        if self.kind == Kind::Unreachable {
            self.message = format!("{}: {what}", self.message);
        }
        self
    }

    /// For a statement that may have been executed, although its answer didn't come.
    pub(crate) fn unknown(mut self) -> Self {
        if self.kind == Kind::Unreachable {
            self.kind = Kind::Unknown;
            self.message.push_str(": the change may or may not have been made");
        }
        self
    }

    pub(crate) fn unreachable(address: &str, error: &PoolError) -> Self {
        match error {
            PoolError::Backend(error) => Self::not_connected(address, error),
            PoolError::Timeout(_) => Self::late(address),
            other => Self { kind: Kind::Unreachable, message: format!("postgres at {address}: {other}") },
        }
    }

    pub(crate) fn not_connected(address: &str, error: &tokio_postgres::Error) -> Self {
        if error.as_db_error().is_some() {
            return Self::from_server(address, error);
        }
        let why = error.source().map_or_else(|| error.to_string(), ToString::to_string);
        Self { kind: Kind::Unreachable, message: format!("postgres at {address}: {why}") }
    }

    pub(crate) fn late(address: &str) -> Self {
        Self { kind: Kind::Unreachable, message: format!("postgres at {address}: no connection in time") }
    }

    fn from_server(address: &str, error: &tokio_postgres::Error) -> Self {
        let said = Self::new(error);
        Self { message: said.message.replacen("postgres:", &format!("postgres at {address}:"), 1), ..said }
    }

    /// The input can't be used: an address, a value, rules, or a server that is too old.
    #[must_use]
    pub fn is_input(&self) -> bool {
        self.kind == Kind::Input
    }

    /// No connection could be made, it broke, or the server didn't answer in time.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        matches!(self.kind, Kind::Unreachable | Kind::Unknown)
    }

    /// Whether the change was made can't be known: the connection broke, or the server didn't answer in time, when only
    /// its confirmation was missing. Check whether it was made before you repeat it.
    #[must_use]
    pub fn is_unknown(&self) -> bool {
        self.kind == Kind::Unknown
    }

    /// Whether the database can't be used for now, or by this role. Otherwise something is wrong that no cached
    /// configuration makes up for: the address, the tables' version, or the rules in them.
    pub(crate) fn is_of_an_outage(&self) -> bool {
        !matches!(self.kind, Kind::Input | Kind::Schema)
    }

    /// The server rejects the password, the role, or what the role may do.
    pub(crate) fn is_denied(&self) -> bool {
        self.kind == Kind::Denied
    }

    /// What keeps the database from being used, in a word.
    pub(crate) fn reason(&self) -> &'static str {
        match self.kind {
            Kind::Unreachable | Kind::Unknown => "unreachable",
            Kind::NotReady => "not_ready",
            Kind::Denied => "denied",
            Kind::Locked => "locked",
            Kind::Schema => "schema",
            Kind::Input | Kind::Data | Kind::Rejected | Kind::Exists | Kind::Refused => "refused",
        }
    }

    /// The data can't be stored, however often that is tried.
    pub(crate) fn is_data(&self) -> bool {
        matches!(self.kind, Kind::Data | Kind::Rejected)
    }

    /// What was to be created exists already, or another transaction created it at the same moment, which an index of
    /// the server's catalog then refuses.
    pub(crate) fn is_made_already(&self) -> bool {
        matches!(self.kind, Kind::Exists | Kind::Data)
    }

    /// Somebody else held a lock on what was to be read or written for too long.
    pub(crate) fn is_locked(&self) -> bool {
        self.kind == Kind::Locked
    }

    /// Adds who held the lock that was waited for in vain, if that is known.
    pub(crate) fn held_by(mut self, blockers: Option<&str>) -> Self {
        if let (Kind::Locked, Some(blockers)) = (self.kind, blockers) {
            self.message = format!("{}: the lock is held by {blockers}", self.message);
        }
        self
    }

    /// Adds which rows couldn't be stored, while the others were.
    pub(crate) fn of_rows(mut self, names: &str) -> Self {
        self.message = format!("{}: all rows were stored except {names}", self.message);
        self
    }

    /// The tables are missing, older or newer than this version of tollgate knows; see
    /// [`Postgres::migrate`](super::Postgres::migrate).
    #[must_use]
    pub fn is_schema(&self) -> bool {
        self.kind == Kind::Schema
    }
}

/// Its kind, and the server's message with its SQLSTATE, or why there is none.
fn described(error: &tokio_postgres::Error) -> (Kind, String) {
    let Some(said) = error.as_db_error() else {
        let why = error.source().map_or_else(|| error.to_string(), ToString::to_string);
        let kind = if error.is_closed() || error.source().is_some_and(|why| why.is::<std::io::Error>()) {
            Kind::Unreachable
        } else {
            Kind::Refused
        };
        return (kind, format!("postgres: {why}"));
    };
    let kind = match *said.code() {
        SqlState::READ_ONLY_SQL_TRANSACTION
        | SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE
        | SqlState::UNDEFINED_DATABASE => Kind::NotReady,
        SqlState::INSUFFICIENT_PRIVILEGE => Kind::Denied,
        ref state if state.code().starts_with("28") => Kind::Denied,
        // Connection errors, lack of resources, an operator's intervention.
        ref state if ["08", "53", "57"].contains(&&state.code()[..2]) => Kind::Unreachable,
        ref state if ["21", "22", "23"].contains(&&state.code()[..2]) => Kind::Data,
        // RAISE EXCEPTION among others; a view's WITH CHECK OPTION; an index's row that is too large.
        ref state if ["27", "38", "39", "44", "54", "P0"].contains(&&state.code()[..2]) => Kind::Rejected,
        SqlState::LOCK_NOT_AVAILABLE => Kind::Locked,
        SqlState::DUPLICATE_SCHEMA | SqlState::DUPLICATE_TABLE => Kind::Exists,
        SqlState::UNDEFINED_TABLE | SqlState::UNDEFINED_COLUMN | SqlState::INVALID_SCHEMA_NAME => Kind::Schema,
        _ => Kind::Refused,
    };
    let remedy = if kind == Kind::Schema { ": run tollgate db migrate" } else { "" };
    (kind, format!("postgres: {} (SQLSTATE {}){remedy}", said.message(), said.code().code()))
}

impl fmt::Display for PostgresError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for PostgresError {}
