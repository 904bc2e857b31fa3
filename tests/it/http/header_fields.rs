//! Header fields, read by another implementation of structured fields.

use std::time::Duration;

use sfv::{BareItem, Item, ListEntry, Parser};
use tollgate::middleware::HeaderStyle;
use tollgate::{Clock, Decision, Embedded, Limit, Limiter, Request, Rule};

fn rule(text: &str) -> Rule {
    Rule::new("api", text).expect("a name")
}

/// The members of a list: a string each, with parameters.
fn items(value: &str) -> Vec<(String, Vec<(String, String)>)> {
    let list: sfv::List = Parser::new(value).parse().unwrap_or_else(|error| panic!("{error}: {value}"));
    let item = |entry: ListEntry| match entry {
        ListEntry::Item(Item { bare_item: BareItem::String(name), params }) => {
            let text = |value: &BareItem| match value {
                BareItem::Integer(number) => number.to_string(),
                BareItem::String(text) => text.as_str().to_owned(),
                other => panic!("{other:?}"),
            };
            (
                name.as_str().to_owned(),
                params.iter().map(|(name, value)| (name.as_str().to_owned(), text(value))).collect(),
            )
        }
        other => panic!("{other:?}"),
    };
    list.into_iter().map(item).collect()
}

fn field(decision: &Decision, name: &str) -> Option<String> {
    let fields = decision.headers(HeaderStyle::Draft);
    fields.into_iter().find(|(own, _)| *own == name).map(|(_, value)| value)
}

async fn taken(rule: &Rule, times: u32) -> Decision {
    let limiter =
        Limiter::new(Embedded::with_clock(Clock::new(std::time::UNIX_EPOCH + Duration::from_secs(1_700_000_000))));
    let mut last = None;
    for _ in 0..times {
        let request = Request::new("k");
        let request = if rule.limits().any(|limit| limit.to_string().starts_with("concurrency")) {
            request.id("holder")
        } else {
            request
        };
        last = Some(limiter.acquire(rule, request).await.expect("a decision"));
    }
    last.expect("one at least")
}

#[tokio::test]
async fn a_policy_is_the_rules_rate_over_whole_seconds() {
    for (text, expected) in [
        ("token-bucket 100/1m burst 20", &[("q", "100"), ("w", "60")][..]),
        ("token-bucket 10/1s", &[("q", "10"), ("w", "1")]),
        ("token-bucket 5/100ms", &[("q", "50"), ("w", "1")]),
        ("token-bucket 7/1500ms", &[("q", "14"), ("w", "3")]),
        ("fixed-window 10/1us", &[("q", "10000000"), ("w", "1")]),
        ("sliding-window 1000/1h", &[("q", "1000"), ("w", "3600")]),
        ("sliding-log 5/15m", &[("q", "5"), ("w", "900")]),
        ("fixed-window 250/day", &[("q", "250"), ("w", "86400")]),
        ("fixed-window 250/day tz Asia/Tokyo", &[("q", "250"), ("w", "86400")]),
        // Days of 23 and 25 hours.
        ("fixed-window 250/day tz Europe/Zurich", &[("q", "250")]),
        ("fixed-window 9/week tz America/New_York", &[("q", "9")]),
        ("fixed-window 9/week", &[("q", "9"), ("w", "604800")]),
        ("fixed-window 10000/month", &[("q", "10000")]),
        ("concurrency 8 ttl 30s", &[("q", "8"), ("qu", "concurrent-requests")]),
    ] {
        let decision = taken(&rule(text), 1).await;
        let told = items(&field(&decision, "ratelimit-policy").expect("it"));
        let expected = expected.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        assert_eq!(told, [("api".to_owned(), expected)], "{text}");
        let stands = items(&field(&decision, "ratelimit").expect("it"));
        assert_eq!(
            (&stands[0].0[..], &stands[0].1[0]),
            ("api", &("r".to_owned(), decision.remaining.to_string())),
            "{text}"
        );
        assert_eq!((decision.rule(), &**decision.limits[0].name()), (Some("api"), text));
    }
}

#[tokio::test]
async fn waits_are_whole_seconds_rounded_up_and_at_least_one() {
    for (text, times, retry_after, seconds) in [
        ("gcra 1/1500ms", 2, Some("2"), Some("2")),
        ("gcra 1/1s", 2, Some("1"), Some("1")),
        ("gcra 1000/1s burst 1", 2, Some("1"), Some("1")),
        ("gcra 1/1h", 1, None, None),
        ("fixed-window 1/1h start first-hit", 1, None, Some("3600")),
        // Full after several windows, and more of it after this one.
        ("fixed-window 2/1h start first-hit burst 9", 7, None, Some("3600")),
        ("fixed-window 2/1h start first-hit max-debt 9", 1, None, Some("3600")),
        ("concurrency 8 ttl 30s", 1, None, None),
        ("sliding-window 5/1h", 1, None, None),
    ] {
        let decision = taken(&rule(text), times).await;
        assert_eq!(field(&decision, "retry-after").as_deref(), retry_after, "{text}");
        let stands = items(&field(&decision, "ratelimit").expect("it"));
        let told = stands[0].1.iter().find(|(name, _)| name == "t").map(|(_, value)| value.as_str());
        assert_eq!(told, seconds, "{text}");
    }
}

#[tokio::test]
async fn several_limits_are_named_in_the_new_fields_and_the_scarcest_in_the_old_ones() {
    let both = Rule::new("api", "gcra 10/1s, fixed-window 3/1h start first-hit").expect("a name");
    let decision = taken(&both, 1).await;
    let names = |field: &str| items(field).into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    for name in ["ratelimit-policy", "ratelimit"] {
        assert_eq!(names(&field(&decision, name).expect("it")), ["api/token-bucket-1s", "api/fixed-window-1h"]);
    }
    let old = decision.headers(HeaderStyle::XRateLimit);
    let expected = [("x-ratelimit-limit", "3"), ("x-ratelimit-remaining", "2"), ("x-ratelimit-reset", "3600")];
    assert_eq!(old, expected.map(|(name, value)| (name, value.to_owned())));
    let without_x = expected.map(|(name, value)| (name.trim_start_matches("x-"), value.to_owned()));
    assert_eq!(decision.headers(HeaderStyle::RateLimit), without_x);
    assert_eq!(decision.headers(HeaderStyle::Off), []);
    let denied = taken(&both, 4).await;
    assert_eq!(denied.headers(HeaderStyle::Off), [("retry-after", "3600".to_owned())]);
    assert_eq!(denied.rule(), Some("api"));
}

/// Of limits that count different things, the one with the fewest units left may be another.
#[tokio::test]
async fn the_old_fields_tell_of_a_denial_by_the_limit_that_denies() {
    let tokens = "fixed-window 100000/1h start first-hit".parse::<Limit>().expect("a limit");
    let tokens = tokens.named("tokens").expect("a name");
    let both = rule("gcra 60/1m").and(tokens).expect("two limits");
    let clock = Clock::new(std::time::UNIX_EPOCH + Duration::from_secs(1_700_000_000));
    let limiter = Limiter::new(Embedded::with_clock(clock));
    let spend = async |units: u64| {
        let costs = [("tokens", units)];
        limiter.acquire(&both, Request::new("ada").costs(&costs)).await.expect("a decision")
    };
    let old = |decision: &Decision, name: &str| {
        decision.headers(HeaderStyle::XRateLimit).into_iter().find(|(own, _)| *own == name).map(|(_, value)| value)
    };
    let remaining = |decision: &Decision| old(decision, "x-ratelimit-remaining");
    assert_eq!(remaining(&spend(99_000).await).as_deref(), Some("59"));
    let denied = spend(5_000).await;
    assert_eq!((denied.remaining, remaining(&denied).as_deref()), (59, Some("1000")));
    assert_eq!(old(&denied, "x-ratelimit-limit").as_deref(), Some("100000"));
    let never = spend(100_001).await.into_result().expect_err("a denial").to_string();
    assert_eq!(never, "rule api: denied by tokens: the cost is above the limit of 100000");
}

/// Permits are given back long before they expire.
#[tokio::test]
async fn a_request_denied_for_lack_of_a_permit_may_retry_after_a_second() {
    let limiter = Limiter::new(Embedded::new());
    for (text, expected) in [
        ("concurrency 1 ttl 1h", "1"),
        ("concurrency 1 ttl 200ms", "1"),
        ("concurrency 1 ttl 1h, token-bucket 9/1m", "1"),
        ("concurrency 9 ttl 1h, token-bucket 1/1m", "60"),
    ] {
        let rule = Rule::new(&format!("r{}", text.len()), text).expect(text);
        let held = limiter.hold(&rule, text).await.expect("an answer");
        let denied = limiter.hold(&rule, text).await.expect("an answer").decision;
        assert_eq!(field(&denied, "retry-after").as_deref(), Some(expected), "{text}");
        drop(held);
    }
    let rule = rule("concurrency 1 ttl 1h");
    limiter.block(&rule, "blocked", Duration::from_secs(100)).await.expect("blocked");
    let denied = limiter.hold(&rule, "blocked").await.expect("an answer").decision;
    assert_eq!(field(&denied, "retry-after").as_deref(), Some("100"));
}

/// `Retry-After` has the jitter of the decision.
#[tokio::test]
async fn a_wait_with_jitter_is_reported_with_it() {
    let limiter = Limiter::new(Embedded::new());
    let rule = rule("gcra 1/100s, fixed-window 9/1h");
    for _ in 0..20 {
        let denied = limiter.acquire(&rule, Request::new("key").jitter(50)).await.expect("a decision");
        if denied.allowed {
            continue;
        }
        let wait = denied.retry_after.duration().expect("a wait").as_secs_f64().ceil();
        assert_eq!(field(&denied, "retry-after"), Some(format!("{wait}")));
    }
}
