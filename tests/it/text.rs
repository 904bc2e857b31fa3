//! The text form of a limit, and rules as serde sees them.

use proptest::prelude::*;
use serde_json::json;
use tollgate::{Limit, Rule};

use crate::limits::any_limit;

proptest! {
    #[test]
    fn what_is_printed_is_read_back(limit in any_limit()) {
        let text = limit.to_string();
        let read: Limit = text.parse().expect("its own text");
        prop_assert_eq!(&read, &limit);
        prop_assert_eq!(read.to_string(), text);
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in "\\PC{0,40}|(token-bucket|gcra|fixed-window) [0-9]{0,20}/[0-9a-z]{0,20}( [a-z-]{1,9} [0-9a-z]{0,9}){0,3}") {
        if let Err(error) = text.parse::<Limit>() {
            prop_assert_eq!(error.to_string().lines().count(), 1);
        }
    }
}

#[test]
fn the_canonical_form_has_one_unit_and_leaves_defaults_out() {
    for (text, canonical) in [
        ("token-bucket 100/1m burst 200", "token-bucket 100/1m burst 200"),
        ("token-bucket 10/s max-debt 50", "token-bucket 10/1s max-debt 50"),
        ("fixed-window 100/60m", "fixed-window 100/1h"),
        ("fixed-window 100/1h start 8m burst 300", "fixed-window 100/1h burst 300 start 8m"),
        ("fixed-window 100/1h start first-hit", "fixed-window 100/1h start first-hit"),
        ("fixed-window 100/1h start spread", "fixed-window 100/1h start spread"),
        ("sliding-window 1000/1h30m", "sliding-window 1000/90m"),
        ("sliding-log 5/10000ms", "sliding-log 5/10s"),
        ("sliding-log 50000/1d max 50000", "sliding-log 50000/1d max 50000"),
        ("  gcra   100/s\tcapacity 100 max-debt 0", "gcra 100/1s"),
        ("gcra 1/1s burst 0 max-debt none", "gcra 1/1s burst 0 max-debt none"),
        ("gcra 1/1500us", "gcra 1/1500us"),
    ] {
        assert_eq!(text.parse::<Limit>().expect(text).to_string(), canonical);
    }
}

#[test]
fn a_tick_is_a_microsecond_or_the_finest_that_fits() {
    for (text, us) in [
        ("gcra 1000000/1s", 1),
        ("token-bucket 1/30d", 1),
        ("sliding-window 3000/30d", 1),
        // 30 d in us is 2.592e12: times a million and one it is 287.8 times 2^53, and 288 divides it.
        ("sliding-window 1000000/30d", 288),
    ] {
        let limit: Limit = text.parse().expect(text);
        assert_eq!(limit.tick().as_micros(), us, "{text}");
    }
}

#[test]
fn serde_reads_what_it_writes_and_tells_each_forms_own_mistakes() {
    let line = json!("gcra 5/1s");
    let table = json!({"name": "org", "limit": "fixed-window 10/1m"});
    for value in [line, table] {
        let limit: Limit = serde_json::from_value(value.clone()).expect("a limit");
        assert_eq!(serde_json::to_value(&limit).expect("a value"), value);
    }
    let rule = json!({"name": "api", "limits": ["gcra 10/1s", {"name": "org", "limit": "fixed-window 1000/1m", "key": "org"}], "tag": "org"});
    let read: Rule = serde_json::from_value(rule.clone()).expect("a rule");
    assert_eq!(serde_json::to_value(&read).expect("a value"), rule);
    let rule = json!({"name": "jobs", "limits": ["concurrency 8 ttl 30s"], "on_change": "as-is", "overage": true});
    let read: Rule = serde_json::from_value(rule.clone()).expect("a rule");
    assert_eq!(serde_json::to_value(&read).expect("a value"), rule);
    assert_eq!(serde_json::from_value::<Rule>(json!("gcra 5/1s")).expect("a rule").name(), "default");
    for (value, expected) in [
        (json!({"name": "a", "limits": ["gcra 0/1s"]}), "got 0"),
        (json!({"name": "a b", "limits": ["gcra 5/1s"]}), "got \"a b\""),
        (json!({"name": "a", "limits": []}), "at least one limit"),
        (json!({"name": "a", "limit": "gcra 5/1s"}), "unknown field `limit`"),
        (json!({"name": "a", "limits": ["gcra 5/1s", "gcra 9/1s"]}), "gcra-1s twice"),
        (json!({"name": "a", "limits": ["gcra 5/1s", {"limit": "gcra 9/1m", "key": "org"}]}), "expected a tag"),
        (
            json!({"name": "a", "limits": ["gcra 5/1s"], "on_change": "later"}),
            "keep-used, as-is or reset, got \"later\"",
        ),
        (json!(5), "a limit's line, or a table"),
    ] {
        let error = serde_json::from_value::<Rule>(value.clone()).expect_err("a mistake").to_string();
        assert!(error.contains(expected), "{value}: {error}");
    }
}
