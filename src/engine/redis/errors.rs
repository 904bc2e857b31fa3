//! What redis-rs says went wrong, as what that means for a decision.

use deadpool_redis::redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::error::{Detour, Error, Kind};

pub(super) fn from_connecting(error: &RedisError, address: &str) -> Error {
    let kind = match (error.kind(), error.code()) {
        (ErrorKind::AuthenticationFailed, _) | (_, Some("NOAUTH" | "WRONGPASS")) => Kind::Authentication,
        (ErrorKind::RESP3NotSupported, _) => Kind::Unsupported,
        (ErrorKind::Server(ServerErrorKind::NoPerm), _) => Kind::Permission,
        // Of SELECT, redis-rs hands on the text alone.
        _ if error.to_string().contains("Authentication required") => Kind::Authentication,
        _ if error.to_string().contains("no permissions to run") => Kind::Permission,
        _ => Kind::Unreachable,
    };
    let what = match kind {
        Kind::Authentication => "redis refused the user or the password",
        Kind::Permission => "redis doesn't let this user connect",
        Kind::Unsupported => "redis version: expected Redis 7.0 or newer",
        _ => "no connection to redis",
    };
    Error::new(kind, format!("{what} at {address}: {}", described(error)))
}

pub(super) fn from_answer(error: &RedisError) -> Error {
    let kind = match (error.kind(), error.code().unwrap_or_default()) {
        (ErrorKind::Io, _) => Kind::Disconnected,
        (_, "WRONGTYPE" | "BADSTATE") => Kind::Unreadable,
        (_, "NOAUTH" | "WRONGPASS") => Kind::Authentication,
        (_, "NOPERM") => Kind::Permission,
        (_, "BADID") => Kind::UnknownId,
        (_, "CLUSTERDOWN") if of_a_slot(error) => Kind::Refused,
        (_, "LOADING" | "BUSY" | "MASTERDOWN" | "READONLY" | "CLUSTERDOWN" | "TRYAGAIN") => Kind::NotNow,
        (ErrorKind::Server(_) | ErrorKind::Extension, _) => {
            let says = |beginning| error.detail().is_some_and(|detail| detail.starts_with(beginning));
            if says("unknown command") || says("Unknown Redis command called from script") {
                Kind::Unsupported
            } else if says("The user executing the script can't") {
                // Redis 7.0 has no code for what a user may not run within a script.
                Kind::Permission
            } else {
                Kind::Refused
            }
        }
        _ => Kind::Garbled,
    };
    if kind == Kind::UnknownId {
        return Error::unknown_id(&described(error));
    }
    let what = match kind {
        Kind::Disconnected => "the connection to redis broke before its answer",
        Kind::Unreadable => "expected the limit's state, which a reset would restore",
        Kind::Authentication => "redis refused the user or the password",
        Kind::Permission => "redis doesn't let this user decide",
        Kind::Unsupported => "redis version: expected Redis 7.0 or newer",
        Kind::Garbled => "an answer that can't be read",
        Kind::NotNow => "redis runs no script now",
        _ if error.redirect_node().is_some() => {
            "redis refused, as a node of a cluster does (expected redis-cluster://... as the url)"
        }
        _ => "redis refused",
    };
    Error::new(kind, format!("{what}: {}", described(error))).by(detour(error))
}

/// Whether a node that finds the cluster well says that nobody has a slot: `CLUSTERDOWN Hash slot not served`.
fn of_a_slot(error: &RedisError) -> bool {
    error.detail().is_some_and(|detail| detail.starts_with("Hash slot"))
}

fn detour(error: &RedisError) -> Option<Detour> {
    let to = error.redirect_node().map(|(to, _)| to.to_owned());
    match (error.kind(), to) {
        (ErrorKind::Server(ServerErrorKind::Moved), Some(to)) => Some(Detour::Moved { to }),
        (ErrorKind::Server(ServerErrorKind::Ask), Some(to)) => Some(Detour::Ask { to }),
        (ErrorKind::Server(ServerErrorKind::TryAgain), _) => Some(Detour::Again),
        (ErrorKind::Server(ServerErrorKind::ClusterDown), _) if of_a_slot(error) => Some(Detour::Nobody),
        _ => None,
    }
}

/// Whether a script had begun when it met this: what Redis says then names the script, and what the scripts that decide
/// for others say the command.
pub(super) fn is_of_a_script(error: &Error) -> bool {
    let said = error.to_string();
    let begun = said.contains(" script: ") || said.contains(" command: ");
    (error.is_permission() || error.is_unsupported() || error.is_refused()) && begun
}

/// What the server or the system said. redis-rs puts no password into its errors.
fn described(error: &RedisError) -> String {
    match (error.code(), error.detail()) {
        (Some(code), Some(detail)) => format!("{code} {detail}"),
        _ => error.to_string(),
    }
}
