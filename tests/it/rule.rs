//! The rule that most tests decide by, and ids for permits.

use std::sync::atomic::{AtomicU64, Ordering};

use tollgate::{Request, Rule};

/// These limits under the name `test`.
pub(crate) fn rule(text: &str) -> Rule {
    text.parse::<Rule>().and_then(|rule| rule.named("test")).unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// The request with an id that nobody else has, if the rule has permits, which are held by one.
pub(crate) fn by_own_id<'a>(rule: &Rule, request: impl Into<Request<'a>>) -> Request<'a> {
    static IDS: AtomicU64 = AtomicU64::new(0);
    let request = request.into();
    if rule.limits().all(|limit| !limit.algorithm().holds()) {
        return request;
    }
    let id = format!("own-{}", IDS.fetch_add(1, Ordering::Relaxed));
    // A request borrows its id, and these are few.
    request.id(Box::leak(id.into_boxed_str()))
}
