//! The rule that most tests decide by, and ids for permits.

use std::sync::atomic::{AtomicU64, Ordering};

use tollgate::rules::RuleSet;
use tollgate::{Algorithm, Limit, Request, Rule};

/// These limits under the name `test`.
pub fn rule(text: &str) -> Rule {
    Rule::new("test", text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// A set of rules as a file has it.
pub fn rule_set(text: &str) -> RuleSet {
    text.parse().unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// A set with the rule `all`, which puts all requests under this limit.
pub fn rule_set_of_one(limit: &str) -> RuleSet {
    rule_set(&format!("[[rule]]\nname = \"all\"\nkey = \"global\"\nlimits = [\"{limit}\"]"))
}

/// The request with a unique id if the rule has permits, which are held by ids.
pub fn by_own_id<'a>(rule: &Rule, request: impl Into<Request<'a>>) -> Request<'a> {
    static IDS: AtomicU64 = AtomicU64::new(0);
    let request = request.into();
    if rule.limits().all(|limit| !limit.algorithm().holds()) {
        return request;
    }
    let id = format!("own-{}", IDS.fetch_add(1, Ordering::Relaxed));
    // A request borrows its id, and these are few.
    request.id(Box::leak(id.into_boxed_str()))
}

/// A limit of this algorithm that admits five in ten seconds or, of the calendar, in a day.
pub fn five_of(algorithm: Algorithm) -> &'static str {
    match algorithm {
        Algorithm::TokenBucket => "token-bucket 5/10s",
        Algorithm::FixedWindow => "fixed-window 5/10s",
        Algorithm::CalendarWindow => "fixed-window 5/day",
        Algorithm::SlidingWindow => "sliding-window 5/10s",
        Algorithm::SlidingLog => "sliding-log 5/10s",
        Algorithm::Concurrency => "concurrency 5 ttl 10s",
        other => panic!("{other}: what admits five?"),
    }
}

pub fn limit(text: &str) -> Limit {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// Holds these rules to be of every algorithm but those that are named, so that a list doesn't lack a new one.
pub fn assert_of_every_algorithm<T: AsRef<str>>(rules: &[T], but_for: &[Algorithm]) {
    let rules: Vec<_> = rules.iter().map(|text| rule(text.as_ref())).collect();
    let found: Vec<_> = rules.iter().flat_map(Rule::limits).map(Limit::algorithm).collect();
    for algorithm in Algorithm::all() {
        let expected = !but_for.contains(&algorithm);
        assert_eq!(found.contains(&algorithm), expected, "{algorithm}: is it in this list?");
    }
}

/// A rule of each algorithm that keeps a string, but for windows of the calendar.
pub const FOUR: [&str; 4] =
    ["token-bucket 5/10s", "fixed-window 5/10s start first-hit", "sliding-window 5/10s", "sliding-log 5/10s"];

/// The same, and one of windows of the calendar.
pub const FIVE: [&str; 5] = [FOUR[0], FOUR[1], FOUR[2], FOUR[3], "fixed-window 5/day"];

/// One of each algorithm, with a capacity of 1000 and a period in which nothing comes back during a test.
pub const THOUSAND: [&str; 5] = [
    "token-bucket 1000/30d",
    "fixed-window 1000/30d start first-hit",
    "fixed-window 1000/year",
    "sliding-window 1000/30d",
    "sliding-log 1000/30d",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lists_are_of_every_algorithm_that_keeps_a_string() {
        assert_of_every_algorithm(&FOUR, &[Algorithm::CalendarWindow, Algorithm::Concurrency]);
        assert_of_every_algorithm(&FIVE, &[Algorithm::Concurrency]);
        assert_of_every_algorithm(&THOUSAND, &[Algorithm::Concurrency]);
    }
}
