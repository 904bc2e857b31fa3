//! The text form of a limit, and rules as serde sees them.

use proptest::prelude::*;
use serde_json::json;
use tollgate::{Algorithm, Limit, Operation, Rule};
use tollgate_testing::limits::{any_limit, sharded};

proptest! {
    #[test]
    fn a_printed_limit_is_read_back_unchanged(limit in prop_oneof![any_limit(), sharded()]) {
        let text = limit.to_string();
        let read: Limit = text.parse().expect("its own text");
        prop_assert_eq!(&read, &limit);
        prop_assert_eq!(read.to_string(), text);
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in any_text()) {
        match text.parse::<Limit>() {
            Ok(limit) => {
                let canonical = limit.to_string();
                prop_assert_eq!(&canonical.parse::<Limit>().expect("its own text"), &limit, "{:?}", text);
                prop_assert_eq!(canonical.parse::<Limit>().expect("its own text").to_string(), canonical);
            }
            Err(error) => {
                let error = error.to_string();
                prop_assert!(!error.contains(char::is_control), "{:?}: {:?}", text, error);
                let is_of_a_value = error.contains(": expected ") && error.contains(", got ");
                let is_of_a_gap = error.contains(" missing") || error.contains(": given twice");
                prop_assert!(is_of_a_value || is_of_a_gap, "{:?}: {}", text, error);
            }
        }
        // A rule is its limits with commas between them.
        let rule = text.parse::<Rule>().map(|rule| rule.to_string());
        if !text.contains(',') {
            prop_assert_eq!(&rule, &text.parse::<Limit>().map(|limit| limit.to_string()));
        }
        if let Ok(canonical) = rule {
            prop_assert_eq!(canonical.parse::<Rule>().expect("its own text").to_string(), canonical);
        }
    }
}

#[test]
fn a_limit_that_takes_too_long_to_reset_is_refused_with_its_time() {
    let error = "gcra 5/9h burst 347136 max-debt 364".parse::<Limit>().expect_err("too long").to_string();
    let expected = "expected a key to reset within 26062 days (71 years), got 26063 days; raise";
    assert!(error.contains(expected), "{error}");
}

/// Any characters, words of the grammar in any order, and texts of limits with some characters changed.
fn any_text() -> impl Strategy<Value = String> {
    let words = vec![
        "token-bucket",
        "gcra",
        "fixed-window",
        "sliding-window",
        "sliding-log",
        "concurrency",
        ",",
        "burst",
        "capacity",
        "max-debt",
        "start",
        "max",
        "ttl",
        "shards",
        "shards 2",
        "tz Europe/Zurich",
        "tz",
        "5/month",
        "5/week",
        "unlimited",
        "first-hit",
        "spread",
        "5/1s",
        "0/s",
        "5/0s",
        "5/",
        "/",
        "1",
        "0",
        "-1",
        "9007199254740992",
        "18446744073709551616",
        "1/106751991167300d",
        "5/1h1h",
        "1d",
        "8h30m",
        "1e9",
        "٣/1s",
        "\u{0}",
        "\u{a0}",
    ];
    let words = proptest::collection::vec(proptest::sample::select(words), 1..=7).prop_map(|words| words.join(" "));
    let change = (
        any::<proptest::sample::Index>(),
        prop_oneof![
            any::<char>().prop_map(Some),
            proptest::sample::select("0159/ -smhdu\n".chars().collect::<Vec<_>>()).prop_map(Some),
            Just(None),
        ],
    );
    let mutated =
        (prop_oneof![any_limit(), sharded()], proptest::collection::vec(change, 1..=3)).prop_map(|(limit, changes)| {
            let mut text: Vec<char> = limit.to_string().chars().collect();
            for (at, new) in changes {
                let at = at.index(text.len());
                text.splice(at..=at, new);
            }
            text.into_iter().collect()
        });
    prop_oneof![1 => any::<String>(), 2 => words, 4 => mutated]
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
        ("  gcra   100/s\tcapacity 100 max-debt 0", "token-bucket 100/1s"),
        ("token-bucket 1/1s burst 0 max-debt unlimited", "token-bucket 1/1s burst 0 max-debt unlimited"),
        ("token-bucket 1/1500us", "token-bucket 1/1500us"),
        ("gcra 100/s shards 4 burst 20", "token-bucket 100/1s burst 20 shards 4"),
        ("fixed-window 100/1h shards 8 start 8m", "fixed-window 100/1h start 8m shards 8"),
        ("fixed-window 250/day", "fixed-window 250/day"),
        ("fixed-window 250/1d", "fixed-window 250/1d"),
        ("fixed-window 5/week tz UTC", "fixed-window 5/week"),
        ("fixed-window 9/month tz europe/zurich shards 2", "fixed-window 9/month shards 2 tz Europe/Zurich"),
        ("fixed-window 1/year tz Etc/GMT+1", "fixed-window 1/year tz Etc/GMT+1"),
        ("sliding-window 100/1h shards 1", "sliding-window 100/1h"),
        ("concurrency 8 shards 2 ttl 30s", "concurrency 8 ttl 30s shards 2"),
    ] {
        assert_eq!(text.parse::<Limit>().expect(text).to_string(), canonical);
    }
}

/// As a script is named, as the text form is, and with either kind of dash.
#[test]
fn an_algorithm_is_read_by_its_scripts_name_too_and_printed_by_its_own() {
    for algorithm in Algorithm::all() {
        let (rate, own) = match algorithm {
            Algorithm::Concurrency => ("8 ttl 30s", algorithm.to_string()),
            Algorithm::CalendarWindow => ("8/month", "fixed-window".to_owned()),
            _ => ("8/1m", algorithm.to_string()),
        };
        for name in [algorithm.to_string(), algorithm.script().name().to_owned()] {
            for name in [name.replace('_', "-"), name.replace('-', "_")] {
                let limit: Limit = format!("{name} {rate}").parse().expect(&name);
                assert_eq!((limit.algorithm(), limit.to_string()), (algorithm, format!("{own} {rate}")), "{name}");
            }
        }
    }
    for (text, told) in [
        ("calendar-window 5/days", "rate: expected units per period, such as 5/day, got \"5/days\""),
        ("calendar_window 5/1h", "rate: expected units per period, such as 250/day, got \"5/1h\""),
        ("calendar-window", "rate: it is missing after calendar-window: write units per period, such as 250/day"),
    ] {
        assert_eq!(text.parse::<Limit>().expect_err(text).to_string(), told);
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
    let line = json!("token-bucket 5/1s");
    let table = json!({"name": "org", "limit": "fixed-window 10/1m"});
    let of_the_calendar = json!("fixed-window 250/day tz Europe/Zurich");
    for value in [line, table, of_the_calendar] {
        let limit: Limit = serde_json::from_value(value.clone()).expect("a limit");
        assert_eq!(serde_json::to_value(&limit).expect("a value"), value);
    }
    let rule = json!({"name": "api", "limits": ["token-bucket 10/1s", {"name": "org", "limit": "fixed-window 1000/1m", "key": "org"}], "tag": "org"});
    let read: Rule = serde_json::from_value(rule.clone()).expect("a rule");
    assert_eq!(serde_json::to_value(&read).expect("a value"), rule);
    for more in [
        json!({"on_change": "as-is", "overage": true}),
        json!({"block_for": "15m"}),
        json!({"on_change": "reset", "overage": true, "block_for": "1us"}),
        json!({"on_error": "open"}),
        json!({"cost": 3}),
        json!({"hash_keys": false}),
        json!({"on_error": "local", "processes": 4}),
    ] {
        let mut rule = json!({"name": "jobs", "limits": ["concurrency 8 ttl 30s"]});
        rule.as_object_mut().expect("a table").extend(more.as_object().expect("a table").clone());
        let read: Rule = serde_json::from_value(rule.clone()).expect("a rule");
        assert_eq!(serde_json::to_value(&read).expect("a value"), rule);
    }
    assert_eq!(serde_json::from_value::<Rule>(json!("gcra 5/1s")).expect("a rule").name(), None);
    for (value, expected) in [
        (json!({"name": "a", "limits": ["gcra 0/1s"]}), "got 0"),
        (json!({"name": "a b", "limits": ["gcra 5/1s"]}), "got \"a b\""),
        (json!({"name": "a", "limits": []}), "rule a: limits: they are missing: write at least one"),
        (json!({"name": "a", "limit": "gcra 5/1s"}), "unknown field `limit`"),
        (json!({"name": "a", "limits": ["gcra 5/1s", "gcra 9/1s"]}), "are named token-bucket-1s"),
        (json!({"name": "a", "limits": ["gcra 5/1s", {"limit": "gcra 9/1m", "key": ""}]}), "name of a part"),
        (
            json!({"name": "a", "limits": [{"limit": "gcra 5/1s", "key": "or g"}, {"limit": "gcra 9/1m", "key": "or-g"}]}),
            "are named or-g",
        ),
        (
            json!({"name": "a", "limits": ["gcra 5/1s", {"limit": "gcra 9/1m", "cost": 10}]}),
            "cost: expected at most 9, the most that can ever be admitted by token-bucket 9/1m, got 10",
        ),
        (
            json!({"name": "a", "limits": ["gcra 5/1s"], "on_change": "later"}),
            "keep-used, as-is or reset, got \"later\"",
        ),
        (json!({"name": "a", "limits": ["gcra 5/1s"], "on_error": "shut"}), "unknown variant `shut`"),
        (json!({"name": "a", "limits": ["gcra 5/1s"], "on_error": "local"}), "rule a: processes is missing: "),
        (json!({"name": "a", "limits": ["gcra 5/1s"], "cost": 6}), "cost: expected at most 5"),
        (
            json!({"name": "a", "limits": ["gcra 5/1s"], "block_for": "15min"}),
            "block_for: period: expected a count and a unit (us ms s m h d), such as 15m, got \"15min\"",
        ),
        (json!({"name": "a", "limits": ["gcra 5/1s"], "block_for": "0s"}), "block_for: expected whole microseconds"),
        (json!({"name": "a", "limits": ["gcra 5/1s"], "block_for": "26100d"}), "from 1us to 71 years, got "),
        (
            json!({"name": "a", "limits": ["gcra 5/1s shards 2"], "block_for": "90m"}),
            "rule a: expected a limit without shards beside block_for, since a denial would block one shard alone, \
             got token-bucket 5/1s shards 2 and block_for 90m",
        ),
        (
            json!({"name": "a", "limits": ["gcra 5/1s shards 2"], "cost": 3}),
            "cost: expected at most 2, the smallest share",
        ),
        (json!({"name": "a", "limits": ["gcra 5/1s shards 2", "gcra 5/1m"]}), "with shards to be alone"),
        (json!({"name": "a", "limits": ["gcra 5/1s"], "processes": 2}), "beside processes = 2"),
        (json!({"name": "a", "limits": ["gcra 5/1s"], "on_error": "local", "processes": 6}), "a burst of at least 6"),
        (json!(5), "a limit's line, or a table"),
    ] {
        let error = serde_json::from_value::<Rule>(value.clone()).expect_err("a mistake").to_string();
        assert!(error.contains(expected), "{value}: {error}");
    }
}

#[test]
fn a_rule_is_read_as_it_is_printed_and_decides_once_it_has_a_name() {
    for text in [
        "token-bucket 10/1s",
        "token-bucket 10/1s, fixed-window 250/1d",
        "concurrency 8 ttl 30s, token-bucket 1/1m, sliding-log 5/15m",
    ] {
        let rule: Rule = text.parse().expect("a rule");
        assert_eq!((rule.to_string().as_str(), rule.limits().len()), (text, text.split(',').count()));
        assert_eq!(text.replace(", ", " ,").parse::<Rule>().expect("a rule"), rule, "spaces don't matter");
        assert_eq!(rule.clone().named("api").expect("a name").name(), Some("api"));
        let table = serde_json::to_value(&rule).expect("a table");
        assert_eq!(serde_json::from_value::<Rule>(table).expect("its own table"), rule);
    }
    for (text, expected) in [
        ("gcra 10/1s,", "rule: the limit is missing: write an algorithm and a rate"),
        (", gcra 10/1s", "rule: the limit is missing: write an algorithm and a rate"),
        ("gcra 10/1s, gcra 20/1s", "rule: two limits are named token-bucket-1s"),
        // The same algorithm, spelled in another way.
        ("gcra 10/1s, token-bucket 10/1s", "rule: two limits are named token-bucket-1s"),
    ] {
        let error = text.parse::<Rule>().expect_err(text).to_string();
        assert!(error.starts_with(expected), "{text}: {error}");
    }
}

#[test]
fn a_rule_is_made_of_any_text_of_a_limit_and_of_a_rule() {
    let text = "token-bucket 10/1s";
    let (owned, limit): (String, Limit) = (text.to_owned(), text.parse().expect("a limit"));
    let rule = Rule::new("api", text).expect("a rule");
    let rules = [
        Rule::new("api", text),
        Rule::new("api", &owned),
        Rule::new("api", std::borrow::Cow::Borrowed(text)),
        Rule::new("api", owned.clone()),
        Rule::new("api", limit),
    ];
    assert_eq!(rules.map(|rule| rule.expect("a rule")), [(); 5].map(|()| rule.clone()));
    let dear = rule.cost(3).and_then(|rule| Rule::new("other", rule)).expect("a rule");
    assert_eq!((dear.name(), dear.default_cost()), (Some("other"), 3), "renamed, with its settings");
    assert!(Rule::new("a b", text).expect_err("a name").to_string().starts_with("name: "));
    let endless = Rule::new("api", format!("gcra {}", "ü".repeat(1_000_000))).expect_err("no rate").to_string();
    assert!(endless.len() < 5_000 && endless.ends_with("... (cut off)"), "{}", endless.len());
    for nothing in [
        dear.clone().tagged(""),
        dear.and_by("", "gcra 1/1m".parse::<Limit>().and_then(|limit| limit.named("org")).expect("a limit")),
    ] {
        let error = nothing.expect_err("no part").to_string();
        assert_eq!(error, "rule other: expected the name of a part of the request, got \"\"");
    }
}

#[tokio::test]
async fn rules_without_a_name_share_nothing_since_they_decide_nothing() {
    let limiter = tollgate::Limiter::new(tollgate::Embedded::new());
    let rule: Rule = "gcra 10/1s".parse().expect("a rule");
    let expected =
        "rule token-bucket 10/1s: its name is missing: rules without one would share their keys (Rule::named)";
    let request = tollgate::Request::new("key").id("id");
    for answer in [
        limiter.acquire(&rule, "key").await,
        limiter.peek(&rule, "key").await,
        limiter.acquire(&rule, request).await,
        limiter.call(Operation::Settle, &rule, request).await,
        limiter.call(Operation::Reset, &rule, "key").await,
        limiter.acquire_wait(&rule, "key", std::time::Duration::ZERO).await,
        limiter.acquire_many(&rule, ["key"]).await.remove(0),
    ] {
        let error = answer.expect_err("no name");
        assert!(error.is_input() && error.to_string() == expected, "{error}");
    }
    assert!(limiter.inspect(&rule, "key").await.expect_err("no name").is_input());
}
