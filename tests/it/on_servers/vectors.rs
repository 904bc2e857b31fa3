//! Golden tables: what is known of each algorithm from other limiters and by hand, as literal answers. Each table is
//! played on a real Redis, on the embedded engine and to the oracle, so that a fault shared by two of them still shows.
//!
//! A step names the virtual time (`t_ms`, or `t_us`), the operation and what must come back; what it doesn't name is
//! not checked. Waits are compared in the unit that the step names, rounded up.

use std::collections::HashMap;
use std::path::Path;

use serde_json::Value;
use tollgate::{Algorithm, Limit, Rule, WindowStart};
use tollgate_testing::engines::{Engine, Micros, Subject, micros};
use tollgate_testing::oracle::{Answer, Change, Oracle, Retry, Spec};
use tollgate_testing::oracle_spec::spec;
use tollgate_testing::rules::limit;

/// A multiple of every period in the tables (30 days): 2024, where times have as many digits as in production.
const RECENT: Micros = 660 * 30 * 86_400 * 1_000_000;

#[test]
fn every_vector_holds_on_redis() {
    let engine = Engine::redis();
    for_each_vector(|vector| {
        for zero in vector.zeros {
            vector.play(&mut OnEngine::new(&engine, &format!("{}.{zero}", vector.id), &vector.rule), *zero);
        }
    });
}

#[test]
fn every_vector_holds_on_the_embedded_engine() {
    let engine = Engine::embedded();
    for_each_vector(|vector| {
        for zero in vector.zeros {
            vector.play(&mut OnEngine::new(&engine, &format!("{}.{zero}", vector.id), &vector.rule), *zero);
        }
    });
}

#[test]
fn every_vector_holds_for_the_oracle() {
    for_each_vector(|vector| {
        for zero in vector.zeros {
            vector.play(&mut OnOracle { limit: vector.rule.clone(), keys: HashMap::new() }, *zero);
        }
    });
}

#[test]
fn every_algorithm_has_a_table_of_five_vectors_at_least() {
    for algorithm in Algorithm::all() {
        let vectors = table(algorithm);
        assert!(vectors.len() >= 5, "{algorithm}: only {} vectors", vectors.len());
        for vector in &vectors {
            assert_eq!(vector.rule.algorithm(), algorithm, "{}: in the wrong table", vector.id);
            assert!(!vector.steps.is_empty(), "{}: no steps", vector.id);
        }
    }
}

#[test]
fn no_two_vectors_share_an_id() {
    let mut ids: Vec<_> = Algorithm::all().flat_map(table).map(|vector| vector.id).collect();
    ids.sort();
    let twice: Vec<_> = ids.windows(2).filter(|pair| pair[0] == pair[1]).collect();
    assert!(twice.is_empty(), "{twice:?}");
}

/// One row of a table: calls on a rule, with what must come back.
struct Vector {
    id: String,
    rule: Limit,
    /// What its times count from.
    zeros: &'static [Micros],
    steps: Vec<Value>,
}

/// What a vector can be played on.
trait Player {
    fn call(&mut self, operation: &str, key: &str, cost: u64, now: Micros) -> Answer;
    /// None if nothing is held by this id.
    fn call_by(&mut self, id: &str, operation: &str, key: &str, cost: u64, now: Micros) -> Option<Answer>;
    fn block(&mut self, key: &str, length: Micros, now: Micros) -> Answer;
    fn change(&mut self, limit: Limit, strategy: &str);
}

impl Vector {
    fn play(&self, player: &mut dyn Player, zero: Micros) {
        for (number, step) in self.steps.iter().enumerate() {
            let at = format!("{}, step {} from {zero}: {step}", self.id, number + 1);
            let operation = step["op"].as_str().unwrap_or_else(|| panic!("{at}: no op"));
            if operation == "change" {
                let how = step["strategy"].as_str().unwrap_or("keep-used");
                player.change(limit(step["rule"].as_str().unwrap_or_else(|| panic!("{at}: no rule"))), how);
                continue;
            }
            let (time, unit) = time_of(step).unwrap_or_else(|| panic!("{at}: no time"));
            let key = step["key"].as_str().unwrap_or("key");
            let cost = step["cost"].as_u64().unwrap_or(0);
            let answer = match (step["id"].as_str(), step["for_ms"].as_u64()) {
                (None, None) => Some(player.call(operation, key, cost, zero + time)),
                (_, Some(length)) => Some(player.block(key, length * 1000, zero + time)),
                (Some(id), None) => player.call_by(id, operation, key, cost, zero + time),
            };
            let Some(answer) = answer else {
                assert_eq!(step["expect"], Value::from("unknown id"), "{at}");
                continue;
            };
            let expected = step["expect"].as_object().unwrap_or_else(|| panic!("{at}: no expect"));
            for (field, value) in expected {
                assert_eq!(&shown(&answer, field, unit), value, "{at}: {field} of {answer:?}");
            }
        }
    }
}

/// A step's time, and the microseconds in its unit.
fn time_of(step: &Value) -> Option<(Micros, u64)> {
    let in_unit = |name: &str, unit| step[name].as_u64().map(|time| (time * unit, unit));
    in_unit("t_us", 1).or_else(|| in_unit("t_ms", 1000))
}

/// A field of the answer as a table writes it.
fn shown(answer: &Answer, field: &str, unit: u64) -> Value {
    let suffix = if unit == 1 { "_us" } else { "_ms" };
    match field.strip_suffix(suffix).unwrap_or(field) {
        "allowed" => answer.allowed.into(),
        "limit" => answer.limit.into(),
        "remaining" => answer.remaining.into(),
        "blocked" => answer.blocked.into(),
        "retry_after" => match answer.retry {
            Retry::Now => Value::Null,
            Retry::AfterUs(wait) => wait.div_ceil(unit).into(),
            Retry::Never => "never".into(),
        },
        "reset_after" => answer.reset_after_us.div_ceil(unit).into(),
        _ => panic!("{field}: not a field, or not in the step's unit"),
    }
}

struct OnEngine<'a> {
    engine: &'a Engine,
    /// The rule's name, which keeps the keys of one play apart from those of another.
    name: String,
    rule: Rule,
}

impl<'a> OnEngine<'a> {
    fn new(engine: &'a Engine, name: &str, limit: &Limit) -> Self {
        Self { engine, name: name.to_owned(), rule: named(name, limit.clone()) }
    }

    fn subject(&self, key: &str) -> Subject<'a> {
        let mut subject = self.engine.subject(self.rule.limits().next().expect("a limit").clone());
        subject.rule = self.rule.clone();
        subject.key = key.to_owned();
        subject
    }
}

/// The limit is named too, so that a changed period finds the same state.
fn named(name: &str, limit: Limit) -> Rule {
    limit.named("limit").and_then(|limit| Rule::new(name, limit)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

impl Player for OnEngine<'_> {
    fn call(&mut self, operation: &str, key: &str, cost: u64, now: Micros) -> Answer {
        let subject = self.subject(key);
        match operation {
            "acquire" => subject.acquire(cost, now),
            "peek" => subject.peek(cost, now),
            "reserve" => subject.reserve(cost, now),
            "at-most" => subject.at_most(cost, now).0,
            "refund" => subject.refund(cost, now),
            "penalty" => subject.penalty(cost, now),
            "reset" => subject.reset(),
            other => panic!("{other}: no such operation"),
        }
    }

    fn call_by(&mut self, id: &str, operation: &str, key: &str, cost: u64, now: Micros) -> Option<Answer> {
        let subject = self.subject(key);
        match operation {
            "acquire" => Some(subject.hold(id, cost, now)),
            "renew" => subject.renew(id, now),
            "release" => Some(subject.release(id, now)),
            "refund" => Some(subject.give_back(id, cost, now)),
            "penalty" => Some(subject.penalty_by(id, cost, now)),
            other => panic!("{other}: no such operation by an id"),
        }
    }

    fn block(&mut self, key: &str, length: Micros, now: Micros) -> Answer {
        self.subject(key).block(length, now)
    }

    fn change(&mut self, limit: Limit, strategy: &str) {
        let strategy = strategy.parse().unwrap_or_else(|error| panic!("{error}"));
        self.rule = named(&self.name, limit).on_change(strategy);
    }
}

struct OnOracle {
    limit: Limit,
    keys: HashMap<String, Oracle>,
}

impl OnOracle {
    /// Spread windows start at an offset of the key's own, which is passed to the oracle.
    fn spec(&self, key: &str) -> Spec {
        match (self.limit.start(), spec(&self.limit)) {
            (WindowStart::Spread, Spec::FixedWindow { rate, period_us, capacity, max_debt, .. }) => {
                let digest = sha1_smol::Sha1::from(key).digest().bytes();
                let first = digest.iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte));
                let start = tollgate_testing::oracle::Start::At(first % micros(self.limit.period()));
                Spec::FixedWindow { rate, period_us, capacity, max_debt, start }
            }
            (_, spec) => spec,
        }
    }

    fn oracle(&mut self, key: &str) -> &mut Oracle {
        let spec = self.spec(key);
        self.keys.entry(key.to_owned()).or_insert_with(|| Oracle::new(spec))
    }
}

impl Player for OnOracle {
    fn call(&mut self, operation: &str, key: &str, cost: u64, now: Micros) -> Answer {
        let oracle = self.oracle(key);
        match operation {
            "acquire" => oracle.acquire(cost, now),
            "peek" => oracle.peek(cost, now),
            "reserve" => oracle.reserve(cost, now),
            "at-most" => oracle.at_most(cost, now).0,
            "refund" => oracle.refund(cost, now),
            "penalty" => oracle.penalty(cost, now),
            "reset" => oracle.reset(),
            other => panic!("{other}: no such operation"),
        }
    }

    fn call_by(&mut self, id: &str, operation: &str, key: &str, cost: u64, now: Micros) -> Option<Answer> {
        let oracle = self.oracle(key);
        match operation {
            "acquire" => Some(oracle.hold(id, cost, now)),
            "renew" => oracle.renew(id, now),
            "release" => Some(oracle.release(id, now)),
            "refund" => Some(oracle.give_back(id, cost, now)),
            "penalty" => Some(oracle.penalty_by(id, cost, now)),
            other => panic!("{other}: no such operation by an id"),
        }
    }

    fn block(&mut self, key: &str, length: Micros, now: Micros) -> Answer {
        self.oracle(key).block(length, now)
    }

    fn change(&mut self, limit: Limit, strategy: &str) {
        let strategy = match strategy {
            "as-is" => Change::AsIs,
            "reset" => Change::Reset,
            _ => Change::KeepUsed,
        };
        self.limit = limit;
        let specs: Vec<_> = self.keys.keys().map(|key| (key.clone(), self.spec(key))).collect();
        for (key, spec) in specs {
            let oracle = self.keys.get_mut(&key).expect("listed just now");
            oracle.change(spec);
            oracle.on_change(strategy);
        }
    }
}

fn for_each_vector(check: impl Fn(&Vector)) {
    for algorithm in Algorithm::all() {
        table(algorithm).iter().for_each(&check);
    }
}

/// The vectors of an algorithm, from the file named as its script.
fn table(algorithm: Algorithm) -> Vec<Vector> {
    let name = format!("{}.json", algorithm.script().name());
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors").join(&name);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("tests/vectors/{name}: {error}"));
    let rows: Vec<Value> = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
    rows.into_iter()
        .map(|row| {
            let text = |field: &str| {
                let value = row[field].as_str().filter(|text| !text.is_empty());
                value.unwrap_or_else(|| panic!("{name}: a vector without {field}: {row}")).to_owned()
            };
            // Not read by the test: it documents where the numbers come from.
            let _why = (text("source"), text("note"));
            let steps = row["steps"].as_array().cloned().unwrap_or_default();
            let rule = limit(&text("rule"));
            // Of the calendar, times are the epoch's.
            let zeros: &[_] = if algorithm == Algorithm::CalendarWindow { &[0] } else { &[0, RECENT] };
            Vector { id: text("id"), rule, zeros, steps }
        })
        .collect()
}
