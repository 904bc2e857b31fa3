//! What the page for programs that share a limit with a Rust service says of keys, options and calls.

use std::collections::BTreeSet;
use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use tollgate::redis::{Value as Reply, cmd, from_redis_value};
use tollgate::{Cluster, Embedded, KeySecret, Limit, Limiter, Request, Rule};
use tollgate_testing::python::python;
use tollgate_testing::redis_server::Server;
use tollgate_testing::repository::read;

use crate::support::tool::{code, tollgate};

const SECRET: &str = "0123456789abcdef";
/// The operation's number in the packed form.
const ACQUIRE: u8 = 128;

fn page() -> String {
    read("lua/sharing.md")
}

fn rule(text: &str) -> Rule {
    Rule::new("api", text).expect("a name")
}

/// What the page's functions return for each of these calls, which are written in Python.
fn by_the_page(calls: &str, of: &Value) -> Vec<String> {
    let page = page();
    let (_, program) = page.split_once("```python\n").expect("the program");
    let (functions, _) = program.split_once("\nfor ").expect("the end of its functions");
    let program = format!("{functions}\nimport json, sys\nprint(json.dumps([{calls} in json.load(sys.stdin)]))");
    let mut python = Command::new(python());
    let mut python =
        python.args(["-c", &program]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("Python");
    let written = python.stdin.take().expect("piped").write_all(of.to_string().as_bytes());
    let output = python.wait_with_output().expect("Python ends");
    assert!(written.is_ok() && output.status.success(), "{program}");
    serde_json::from_slice(&output.stdout).expect("a list")
}

#[test]
fn the_pages_functions_spell_a_key_as_a_limiter_does() {
    let short = ["user:42", "-_.@:/+=,~|", "user 42", "a}{b", "%", "%41", "#", "zoë", "日本", "\0\n", "\"\\'", "*?[]"];
    // The last that fits and the first that doesn't, plain and escaped.
    let long = ["x".repeat(128), "x".repeat(129), "ü".repeat(21) + "xx", "ü".repeat(21) + "xxx", "ü".repeat(1000)];
    let all: Vec<_> = short.into_iter().map(str::to_owned).chain(long).collect();
    let (mut expected, mut asked) = (Vec::new(), Vec::new());
    for secret in [None, Some(SECRET)] {
        let mut limiter = Limiter::builder(Embedded::new()).prefix("shop eu").expect("a prefix").build();
        if let Some(secret) = secret {
            limiter = limiter.to_builder().key_secret(&KeySecret::new(secret).expect("a secret")).build();
        }
        let mut ask = |counted: &str, tag: Option<&str>| {
            let (rule, tags) = (rule("token-bucket 100/1m burst 20"), tag.map(|tag| ("org", tag.as_bytes())));
            let rule = if tag.is_some() { rule.tagged("org").expect("a part") } else { rule };
            let request = Request::new(counted).parts(tags.as_slice());
            expected.extend(limiter.keys(&rule, request).expect("keys"));
            asked.push(json!(["api/token-bucket-1m", counted, tag, "shop eu", secret]));
        };
        for counted in &all {
            ask(counted, None);
            ask(counted, Some(counted));
            ask(counted, Some("org 7"));
            ask("user:42", Some(counted));
        }
        // A rule may keep its keys as they are.
        let plain = limiter.keys(&rule("token-bucket 1/1m").hash_keys(false), "a b").expect("keys");
        assert_eq!(plain, ["shop eu:{a%20b}:api/token-bucket-1m"]);
    }
    let spelled = by_the_page("key_of(*given, secret and secret.encode()) for *given, secret", &asked.into());
    assert_eq!(spelled, expected);
    assert_eq!(spelled.len(), 2 * 4 * all.len());
}

#[test]
fn the_pages_function_spells_the_marker_of_an_id_as_the_tool_does() {
    let server = Server::start();
    let ends = json!(["api/token-bucket-1s", "api/fixed-window-1d"]);
    let ids = ["job-7", "a/b@c d", "ü", &"x".repeat(129)];
    let asked: Vec<_> = ids.iter().map(|id| json!([ends, id, "user 42"])).collect();
    for id in ids {
        let probe = ["probe", "token-bucket 10/1s, fixed-window 250/1d", "user 42", "--name", "api", "--id", id];
        assert_eq!(code(&tollgate(&[&probe[..], &["--url", &server.url()]].concat())), 0, "{id}");
    }
    let keys: BTreeSet<String> = cmd("KEYS").arg("*").query(&mut server.connection()).expect("keys");
    let mut expected: BTreeSet<_> = by_the_page("marker_of(*given) for given", &asked.into()).into_iter().collect();
    expected.extend(["token-bucket-1s", "fixed-window-1d"].map(|limit| format!("tollgate:{{user%2042}}:api/{limit}")));
    assert_eq!(keys, expected);

    // Permits are held by the id, escaped otherwise.
    let probe =
        ["probe", "concurrency 8 ttl 30s", "user:1", "--name", "api", "--id", "a/b@c d", "--url", &server.url()];
    assert_eq!(code(&tollgate(&probe)), 0);
    let permits = cmd("ZRANGE").arg("tollgate:{user:1}:api/concurrency").arg(&["0", "-1"]).to_owned();
    let permits: Vec<Vec<u8>> = permits.query(&mut server.connection()).expect("permits");
    assert!(permits.iter().any(|permit| permit.ends_with(b":a/b@c%20d")), "{permits:?}");
}

#[test]
fn the_pages_examples_of_a_limits_name_are_those_of_rules() {
    let (page, limiter) = (page(), Limiter::new(Embedded::new()));
    for (text, end) in [
        ("token-bucket 100/60s burst 20", "token-bucket-1m"),
        ("token-bucket 100/1m30s", "token-bucket-90s"),
        ("sliding-log 100/24h", "sliding-log-1d"),
        ("fixed-window 100/month", "fixed-window-month"),
        ("concurrency 8 ttl 30s", "concurrency"),
    ] {
        assert_eq!(limiter.keys(&rule(text), "user:42").expect("keys"), [format!("tollgate:{{user:42}}:api/{end}")]);
        assert!(page.contains(&format!("`{end}`")), "{end}");
    }
    let named = "token-bucket 1/1s".parse::<Limit>().expect("a limit").named("per-user").expect("a name");
    let named = Rule::new("api", named).expect("a rule");
    assert_eq!(limiter.keys(&named, "user:42").expect("keys"), ["tollgate:{user:42}:api/per-user/token-bucket"]);
    let named = "fixed-window 100/month".parse::<Limit>().expect("a limit").named("per-user").expect("a name");
    let named = Rule::new("api", named).expect("a rule");
    assert_eq!(limiter.keys(&named, "user:42").expect("keys"), ["tollgate:{user:42}:api/per-user/calendar-window"]);
    let on_cluster = Limiter::new(Cluster::open("redis-cluster://127.0.0.1").expect("a good address"));
    let shards = on_cluster.keys(&rule("token-bucket 100/1s shards 8"), "user:42").expect("keys");
    assert_eq!(shards[3], "tollgate:{user:42%s3}:api/token-bucket-1s");
    assert!(
        page.contains("`per-user/token-bucket`")
            && page.contains("`per-user/calendar-window`")
            && page.contains("`user:42%s3`")
    );
}

#[test]
fn a_service_sends_the_numbers_and_the_options_that_the_page_shows() {
    let (page, server) = (page(), Server::with(&["--slowlog-log-slower-than", "0"]));
    let probe = |options: &[&str]| {
        let probe = ["probe", "token-bucket 100/1m burst 20", "user:42", "--name", "api", "--url", &server.url()];
        assert_eq!(code(&tollgate(&[&probe, options].concat())), 0);
        let log: Vec<Vec<Reply>> = cmd("SLOWLOG").arg("GET").query(&mut server.connection()).expect("a log");
        let words = |mut entry: Vec<Reply>| from_redis_value::<Vec<Vec<u8>>>(entry.remove(3)).expect("words");
        let call = log.into_iter().map(words).find(|words| words[0].starts_with(b"EVAL"));
        call.expect("a call")
    };
    // What MONITOR makes of the algorithm's number, and of all numbers but the debt.
    let packed: String = probe(&[])[4][..25].iter().map(|byte| as_monitor_prints(*byte)).collect();
    assert!(page.contains(&format!("\"{packed}...\n")), "{packed}");

    // After the limit's numbers come the operation, the options, the cost, and the options' values.
    let options = |shape: &[u8]| (shape[32], shape[33] & 0x7f, shape[41..].to_vec());
    let sent = probe(&["--on-change", "as-is", "--overage", "--block-for", "15m"]);
    assert_eq!(options(&sent[4]), (ACQUIRE, 1 | 4 | 8, 900_000_000_u64.to_le_bytes()[..7].to_vec()));
    for option in ["+as-is", "+overage", "+block=900000000"] {
        assert!(page.contains(&format!("`{option}`")), "{option}");
    }
    assert_eq!(options(&probe(&["--on-change", "reset"])[4]), (ACQUIRE, 2, vec![]));
}

fn as_monitor_prints(byte: u8) -> String {
    match byte {
        b'\\' | b'"' => format!("\\{}", char::from(byte)),
        b'\n' => "\\n".into(),
        b'\r' => "\\r".into(),
        b'\t' => "\\t".into(),
        7 => "\\a".into(),
        8 => "\\b".into(),
        b' '..=b'~' => char::from(byte).to_string(),
        _ => format!("\\x{byte:02x}"),
    }
}
