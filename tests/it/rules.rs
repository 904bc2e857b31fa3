//! Sets of rules: which rule applies, what it decides, and how its file is read and followed.

mod all_or_nothing;
mod bypasses;
mod continuing;
mod decisions;
mod files;
mod matching;
mod mistakes;
mod optional_limits;
mod own_costs;
mod reload;
mod requests;
mod together_in_trouble;

use tollgate::Limiter;
use tollgate::rules::{Attributes, RuleSet};
use tollgate_testing::redis_server::patient;
use tollgate_testing::rules::rule_set;

fn limiter(url: &str) -> Limiter {
    patient(url)
}

/// The name of the rule that applies.
fn applies(rules: &RuleSet, request: &Attributes<'_>) -> Option<String> {
    rules.applies(request).expect("a rule or none").rule.map(str::to_owned)
}
