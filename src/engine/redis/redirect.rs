//! The node that a cluster's node redirects a call to.

use redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::error::Error;

/// A redirect. The call certainly didn't run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::engine) enum Redirect {
    /// The slot belongs to another node.
    Moved { to: String },
    /// The slot is moving, and this call's keys are there already, or will be.
    Ask { to: String },
    /// Some of the call's keys have moved, and some have not.
    Again,
    /// As far as the node knows, no node has the slot.
    Nobody,
}

impl Redirect {
    /// The redirect that this error is, if it is one.
    pub(in crate::engine) fn of(error: &Error) -> Option<&Self> {
        error.note()
    }

    /// The redirect in a node's answer.
    pub(super) fn in_answer(error: &RedisError) -> Option<Self> {
        let to = error.redirect_node().map(|(to, _)| to.to_owned());
        match (error.kind(), to) {
            (ErrorKind::Server(ServerErrorKind::Moved), Some(to)) => Some(Self::Moved { to }),
            (ErrorKind::Server(ServerErrorKind::Ask), Some(to)) => Some(Self::Ask { to }),
            (ErrorKind::Server(ServerErrorKind::TryAgain), _) => Some(Self::Again),
            (ErrorKind::Server(ServerErrorKind::ClusterDown), _) if of_a_slot(error) => Some(Self::Nobody),
            _ => None,
        }
    }
}

/// Whether a node of an otherwise working cluster says that a slot has no owner: `CLUSTERDOWN Hash slot not served`.
fn of_a_slot(error: &RedisError) -> bool {
    error.detail().is_some_and(|detail| detail.starts_with("Hash slot"))
}
