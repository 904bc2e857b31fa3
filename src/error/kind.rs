//! What went wrong, for callers and for this crate.

use std::fmt;

/// What went wrong, in one word; the [runbook](crate::operations::runbook#error-classes) says of each what to do, and
/// [`charged`](crate::Error::charged) whether the call may be repeated. [`Display`](fmt::Display) and
/// [`name`](Self::name) give the word that metrics, logs and JSON have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// `input`: the caller's own input can't be used, such as an empty key, a time out of range, a malformed address, a
    /// rule without a name.
    Input,
    /// `unreachable`: no connection could be made, or Redis isn't asked for a while because earlier calls failed.
    Unreachable,
    /// `authentication`: the server refused the user or the password.
    Authentication,
    /// `permission`: the server doesn't let this user run what a decision needs; the message names the command.
    Permission,
    /// `unsupported`: the server is older than Redis 7.0, or doesn't know a command, which the message names.
    Unsupported,
    /// `deadline`: no answer by the deadline, or not sent by then; [`charged`](crate::Error::charged) tells which.
    Deadline,
    /// `disconnected`: the connection broke while waiting for an answer.
    Disconnected,
    /// `unreadable-state`: the key holds something that isn't the limit's state; a reset repairs it.
    UnreadableState,
    /// `unknown-id`: nothing is remembered for the id that was to be settled or cancelled, or no permit is held by the
    /// id that was to be renewed: it was never taken, or its time to live has passed.
    UnknownId,
    /// `refused`: the server refused to run the script: it is out of memory, can't write to its disk, has too few
    /// replicas, or gave another reason.
    Refused,
    /// `stale-windows`: the server's clock was outside the call's calendar windows and, when asked again, outside those
    /// around the time that it had just reported.
    StaleWindows,
    /// `not-now`: the server runs no script for now, but may soon: it is loading, busy with another script, without its
    /// primary, or a replica. Several attempts got this answer.
    NotNow,
    /// `garbled`: an answer that isn't a script's.
    Garbled,
    /// `unconfirmed`: the units were taken, but fewer replicas than [asked for](crate::RedisBuilder::confirmed_by) have
    /// the write: a failover could lose it. For a call on several nodes they are given back;
    /// [`charged`](crate::Error::charged) says whether all are.
    Unconfirmed,
}

impl ErrorKind {
    /// The word, as metrics, logs and JSON have it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::Unreachable => "unreachable",
            Self::Authentication => "authentication",
            Self::Permission => "permission",
            Self::Unsupported => "unsupported",
            Self::Deadline => "deadline",
            Self::Disconnected => "disconnected",
            Self::UnreadableState => "unreadable-state",
            Self::UnknownId => "unknown-id",
            Self::Refused => "refused",
            Self::StaleWindows => "stale-windows",
            Self::NotNow => "not-now",
            Self::Garbled => "garbled",
            Self::Unconfirmed => "unconfirmed",
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What went wrong, with what only this crate tells apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A key, a time, a prefix or an address that can't be used.
    Input,
    /// An empty key. In a service, this input comes from its client.
    EmptyKey,
    /// No connection could be made.
    Unreachable,
    /// The server refused the user or the password.
    Authentication,
    /// The server doesn't let this user run what a decision needs.
    Permission,
    /// The server is older than supported, or doesn't know a command.
    Unsupported,
    /// No answer by the deadline; `sent` if the call may have reached the server.
    Deadline { sent: bool },
    /// The connection broke while waiting for an answer.
    Disconnected,
    /// The key holds something that isn't the limit's state.
    Unreadable,
    /// Nothing is remembered for the id that was to be settled, cancelled or renewed.
    UnknownId,
    /// The server refused to run the script, or the script refused its arguments.
    Refused,
    /// The script got calendar windows that don't contain the server's time, which is this.
    Stale { now_us: u64 },
    /// The server runs no script for now, but may soon: it is loading, busy, has lost its primary, or has become a
    /// replica.
    NotNow,
    /// An answer that isn't a script's reply.
    Garbled,
    /// Units were taken, and too few replicas have the write.
    Unconfirmed,
}

impl Kind {
    /// Whether Redis, or the way to it, fails for now.
    pub(super) fn is_away(self) -> bool {
        matches!(self, Self::Unreachable | Self::Deadline { .. } | Self::Disconnected | Self::NotNow | Self::Garbled)
    }
}
