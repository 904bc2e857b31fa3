//! What earlier versions have written, as `tests/layouts` has it: the keys and the bytes of states and ids. Today's
//! scripts go on from there, and within a minor version they write the same bytes, so that services of both versions
//! can share a Redis in a rollout.
//!
//! A file for each minor version. Its cases have calls, the keys that these leave, and the next calls with their
//! answers. To add a case, or begin the file of a new version with a copy of the last one, write the calls and run the
//! first test with `TOLLGATE_WRITE_LAYOUT=1`, which writes keys and answers. What was released is never rewritten.

use std::time::Duration;

use serde_json::{Value, json};
use tollgate::redis::{Connection, cmd};
use tollgate::{Algorithm, Decision, Operation, Request, RetryAfter, Rule};
use tollgate_testing::engines::{Engine, Micros, micros, time};
use tollgate_testing::repository::{read, root, stems};
use tollgate_testing::rules::{assert_of_every_algorithm, rule};

/// What the times of calls count from, in milliseconds.
const BEGIN: Micros = 1_760_000_000_000_000;
const KEY: &str = "user:42";
const PARTS: [(&str, &[u8]); 1] = [("org", b"acme")];

/// On a cluster, so that there are shards.
#[test]
fn scripts_write_the_bytes_that_are_recorded_for_their_version() {
    let (major_and_minor, _patch) = env!("CARGO_PKG_VERSION").rsplit_once('.').expect("three numbers");
    let name = format!("tests/layouts/{major_and_minor}.json");
    let mut cases: Vec<Value> = serde_json::from_str(&read(&name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    let writes = std::env::var_os("TOLLGATE_WRITE_LAYOUT").is_some();
    let of_cases: Vec<_> = cases.iter().map(|case| case["rule"].as_str().expect("a rule")).collect();
    assert_of_every_algorithm(&of_cases, &[]);
    let rules: Vec<_> = of_cases.into_iter().map(rule).collect();
    let owing: Vec<_> = rules.iter().flat_map(Rule::limits).filter(|limit| limit.max_debt() > 0).collect();
    for algorithm in Algorithm::all().filter(|algorithm| algorithm.reserves()) {
        assert!(owing.iter().any(|limit| limit.algorithm() == algorithm), "{name}: {algorithm} in debt");
    }
    let engine = Engine::cluster();
    for case in &mut cases {
        let mut caller = Caller::new(&engine, case);
        for call in texts(&case["calls"]) {
            caller.call(call);
        }
        let keys = taken_keys(&mut caller.redis);
        if writes {
            put_keys(&mut caller.redis, &keys);
            case["keys"] = keys;
            for step in case["next"].as_array_mut().expect("the next calls") {
                let call = step[0].as_str().expect("a call").to_owned();
                *step = json!([call, caller.call(&call)]);
            }
            taken_keys(&mut caller.redis);
        } else {
            assert_eq!(keys, case["keys"], "{name}: {}", case["what"]);
        }
    }
    if writes {
        let text = serde_json::to_string_pretty(&cases).expect("JSON") + "\n";
        std::fs::write(root().join(&name), text).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

#[test]
fn scripts_go_on_from_what_each_recorded_version_wrote() {
    let engine = Engine::cluster();
    let versions = stems("tests/layouts", "json");
    assert!(!versions.is_empty());
    for version in versions {
        let cases: Vec<Value> = serde_json::from_str(&read(&format!("tests/layouts/{version}.json"))).expect("cases");
        assert!(!cases.is_empty(), "{version}");
        for case in cases {
            let mut caller = Caller::new(&engine, &case);
            // A change of numbers is a call of the service, not of the state.
            texts(&case["calls"]).filter(|call| call.starts_with("rule ")).for_each(|call| _ = caller.call(call));
            put_keys(&mut caller.redis, &case["keys"]);
            for step in case["next"].as_array().expect("the next calls") {
                let call = step[0].as_str().expect("a call");
                assert_eq!(caller.call(call), step[1], "{version}, {}: {call}", case["what"]);
            }
            taken_keys(&mut caller.redis);
        }
    }
}

/// Makes the calls of a case.
struct Caller<'a> {
    engine: &'a Engine,
    redis: Connection,
    rule: Rule,
    counts_overage: bool,
}

impl<'a> Caller<'a> {
    fn new(engine: &'a Engine, case: &Value) -> Self {
        let redis = engine.server.as_ref().expect("a server").connection();
        let counts_overage = case["counts_overage"] == true;
        let mut rule = rule(case["rule"].as_str().expect("a rule")).count_overage(counts_overage);
        if let Some(name) = case["named"].as_str() {
            let limit = rule.limits().next().expect("a limit").clone().named(name).expect("a name");
            rule = Rule::new(rule.name().expect("a name"), limit).expect("a rule").count_overage(counts_overage);
        }
        if case["tag"].is_string() {
            rule = rule.tagged(case["tag"].as_str().expect("a part")).expect("a part");
        }
        Self { engine, redis, rule, counts_overage }
    }

    /// `1500 acquire 2 id=a`: at 1.5 seconds. The cost of a block is its length in milliseconds. Or `rule`, and the new
    /// one.
    fn call(&mut self, call: &str) -> String {
        if let Some(text) = call.strip_prefix("rule ") {
            self.rule = rule(text).count_overage(self.counts_overage);
            return String::new();
        }
        let words: Vec<_> = call.split(' ').collect();
        let [at, operation, units, ..] = words[..] else { panic!("{call}: expected a time, an operation, a number") };
        let number = |text: &str| text.parse::<u64>().unwrap_or_else(|error| panic!("{call}: {error}"));
        let operation: Operation = operation.parse().unwrap_or_else(|error| panic!("{call}: {error}"));
        let (at, units) = (number(at), number(units));
        let request = Request::new(KEY).parts(&PARTS).at(time(BEGIN + at * 1000));
        let request = match operation {
            Operation::Block => request.block_for(Duration::from_millis(units)),
            _ => request.cost(units),
        };
        let id = words.get(3).and_then(|word| word.strip_prefix("id="));
        let request = id.map_or(request, |id| request.id(id));
        let answer = self.engine.runtime.block_on(self.engine.limiter.call(operation, &self.rule, request));
        answer.map_or_else(|error| format!("error: {error}"), |decision| shown(&decision))
    }
}

fn shown(decision: &Decision) -> String {
    let verdict = if decision.allowed { "allowed" } else { "denied" };
    let retry = match decision.retry_after {
        RetryAfter::Now => "now".to_owned(),
        RetryAfter::After(wait) => format!("{} us", micros(wait)),
        RetryAfter::Never => "never".to_owned(),
    };
    let (limit, left, taken) = (decision.capacity, decision.remaining, decision.granted);
    let reset = micros(decision.reset_after);
    let notes = if decision.blocked { ", blocked" } else { "" };
    let denials = decision.overage.map(|denials| format!(", {denials} denials")).unwrap_or_default();
    format!("{verdict} {taken}, {left} of {limit} left, retry {retry}, reset {reset} us{notes}{denials}")
}

fn texts(list: &Value) -> impl Iterator<Item = &str> {
    list.as_array().expect("a list").iter().map(|text| text.as_str().expect("a text"))
}

/// Every key with its value in hexadecimal, or its members with their scores. The server then has none.
fn taken_keys(redis: &mut Connection) -> Value {
    let mut names: Vec<String> = cmd("KEYS").arg("*").query(redis).expect("names");
    names.sort();
    let mut keys = serde_json::Map::new();
    for name in names {
        let kind: String = cmd("TYPE").arg(&name).query(redis).expect("a type");
        let value = if kind == "zset" {
            let scored: Vec<(Vec<u8>, String)> =
                cmd("ZRANGE").arg(&name).arg(0).arg(-1).arg("WITHSCORES").query(redis).expect("members");
            scored.into_iter().map(|(member, score)| json!([hexadecimal(&member), score])).collect()
        } else {
            let bytes: Vec<u8> = cmd("GET").arg(&name).query(redis).expect("a string");
            json!(hexadecimal(&bytes))
        };
        cmd("DEL").arg(&name).exec(redis).expect("deleted");
        keys.insert(name, value);
    }
    keys.into()
}

/// They outlive the test, as they would outlive a rollout: the states themselves say when they were written.
fn put_keys(redis: &mut Connection, keys: &Value) {
    for (name, value) in keys.as_object().expect("keys") {
        match value {
            Value::String(hex) => cmd("SET").arg(name).arg(bytes_of(hex)).exec(redis).expect("written"),
            members => {
                let members: Vec<(String, String)> = serde_json::from_value(members.clone()).expect("members");
                for (member, score) in members {
                    cmd("ZADD").arg(name).arg(score).arg(bytes_of(&member)).exec(redis).expect("written");
                }
            }
        }
        cmd("PEXPIRE").arg(name).arg(3_600_000).exec(redis).expect("an expiry");
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes_of(hex: &str) -> Vec<u8> {
    let digits = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).expect("hexadecimal");
    (0..hex.len()).step_by(2).map(digits).collect()
}
