//! Decisions as telemetry counts them.

use crate::decision::Decision;
use crate::error::Error;
use crate::rule::Rule;
use crate::telemetry::{self, Ended};

/// Counts the answer to a caller: once, however many calls it took.
pub(crate) fn counted(rule: &Rule, decided: Result<&Decision, &Error>) {
    let limits = rule.scoped_limits();
    let quota = &limits[0].quota;
    let algorithm = if limits.len() > 1 { "several" } else { quota.algorithm().name() };
    telemetry::decided(quota.rule_name(), algorithm, ended(decided));
}

/// How a call ended.
pub(super) fn ended(decided: Result<&Decision, &Error>) -> Ended {
    decided.map(|decision| (decision.allowed, decision.by.name())).map_err(Error::class)
}
