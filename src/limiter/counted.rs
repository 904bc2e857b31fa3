//! Decisions as telemetry counts them.

use crate::decision::Decision;
use crate::error::Error;
use crate::rule::Rule;
use crate::telemetry::{self, Ended};

/// Counts the answer to a caller: once, however many calls it took. Of rules that apply together, each counts what its
/// own limits say.
pub(crate) fn counted(rule: &Rule, decided: Result<&Decision, &Error>) {
    for own in rule.counting() {
        let limits = own.scoped_limits();
        let quota = &limits[0].quota;
        let algorithm = if limits.len() > 1 { "several" } else { quota.algorithm().name() };
        let mut ended = ended(decided);
        if let (Ok((allowed, _)), Ok(decision), true) = (&mut ended, decided, rule.is_joined()) {
            *allowed = decision.is_allowed_by(own.name());
        }
        telemetry::decided(quota.rule_name(), algorithm, ended);
    }
}

/// How a call ended.
pub(super) fn ended(decided: Result<&Decision, &Error>) -> Ended {
    decided.map(|decision| (decision.allowed, decision.by.name())).map_err(|error| error.kind().name())
}
