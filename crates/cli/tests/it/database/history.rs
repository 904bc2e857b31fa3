//! What was decided, as the tool shows it.

use std::time::Duration;

use serde_json::Value;
use tollgate::rules::{Account, Attributes, RuleSet};
use tollgate_record::history::HistorySettings;
use tollgate_testing::postgres_server::PostgresServer;
use tollgate_testing::record::{limiter, prepared};

use crate::support::tool::{code, stdout, tollgate};

const RULES: &str = r#"
    [[rule]]
    name = "api"
    match = { path = "/api/*" }
    key = "user"
    limits = ["fixed-window 3/1h"]
"#;

/// A server that has all of these decided and recorded.
async fn recorded(requests: &[Attributes<'_>]) -> PostgresServer {
    let (server, database) = prepared().await;
    let history = database.record(HistorySettings::new()).expect("recording");
    let (limiter, rules): (_, RuleSet) = (limiter(), RULES.parse().expect("rules"));
    for request in requests {
        let verdict = limiter.acquire_by(&rules, request).await.expect("a verdict");
        history.record(request, &verdict, Duration::from_micros(100));
    }
    history.finish().await.expect("written");
    server
}

/// In a table, and whole as JSON.
#[tokio::test]
async fn the_tool_explains_a_denial() {
    let account = Account::new("42").api_key("k1");
    let request = || Attributes::new().account(&account).method("get").path("/api/items?page=2");
    let server = recorded(&[request(), request(), request(), request()]).await;
    let minute = "SELECT to_char(at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI') FROM tollgate.rate_limit_audit_logs WHERE decision = 'throttled'";
    let minute = server.run(minute).await.remove(0);
    let arguments = ["audit", "--user", "42", "--denied", "--database", &server.url(), "--at", &minute];
    let table = stdout(&tollgate(&[&arguments[..], &["--format", "table"]].concat()));
    for said in ["throttled", "api", "fixed-window 3/1h", "3 of 3", "GET", "/api/items"] {
        assert!(table.contains(said), "{said} in {table}");
    }
    let json = stdout(&tollgate(&[&arguments[..], &["--format", "jsonl"]].concat()));
    let json: Value = serde_json::from_str(json.trim()).expect("one object");
    assert_eq!((&json["api_key"], &json["used"], &json["status"]), (&"k1".into(), &3.into(), &Value::Null));
    let nobody = tollgate(&["audit", "--user", "nobody", "--at", &minute, "--database", &server.url()]);
    assert_eq!(code(&nobody), 1);
}

#[tokio::test]
async fn hostile_text_is_shown_escaped() {
    let users: [&[u8]; 5] = [
        b"'; DROP TABLE tollgate.rate_limit_audit_logs; --",
        b"a\0b",
        b"\xff\xfe",
        "ünïcödé \u{202e}".as_bytes(),
        b"\\N\t\n\r",
    ];
    let server = recorded(&users.map(|user| Attributes::new().set("user", user).path("/else"))).await;
    let table = stdout(&tollgate(&["stats", "--each", "user", "--format", "table", "--database", &server.url()]));
    assert!(table.contains("\\u{202e}") && !table.contains('\u{202e}'), "{table}");
    assert!(table.contains("DROP TABLE") && !table.contains('\t') && !table.contains('\r'), "{table}");
}
