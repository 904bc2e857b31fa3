//! Configurations of other limiters as rules: what they mean is held against what their documentation says, and each
//! line is accounted for.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, UNIX_EPOCH};

use tokio::runtime::Runtime;
use tollgate::{Clock, Embedded};

use super::*;
use crate::support::tool::with_input;

mod envoy;
mod limitador;
mod nginx;

/// No round hour, since windows may begin then.
const START_MS: u64 = 1_800_001_234_567;

/// What the tool made of a configuration.
struct Imported {
    rules: String,
    warnings: Vec<String>,
}

/// The rules of a configuration, which must be valid.
fn import(format: &str, configuration: &str) -> Imported {
    let output = with_input(&["rules", "import", "--format", format, "-"], configuration.as_bytes());
    let said = stderr(&output);
    let warnings: Vec<_> = said.lines().filter(|line| !line.starts_with("tollgate: ")).map(str::to_owned).collect();
    assert_eq!(code(&output), i32::from(!warnings.is_empty()), "{configuration}\n{warnings:?}");
    Imported { rules: stdout(&output), warnings }
}

/// The same of one that rules say exactly.
fn import_exactly(format: &str, configuration: &str) -> String {
    let imported = import(format, configuration);
    assert_eq!(imported.warnings, [""; 0], "{configuration}");
    imported.rules
}

/// The lines of a list in the comments at the head of a file, each with its reason.
fn list(rules: &str, title: &str) -> Vec<String> {
    let head = rules.lines().take_while(|line| line.starts_with('#')).map(|line| line.trim_start_matches(['#', ' ']));
    let mut items = Vec::<String>::new();
    for line in head.skip_while(|line| !line.starts_with(title)).skip(1).take_while(|line| !line.is_empty()) {
        match (line.strip_prefix("- "), items.last_mut()) {
            (Some(item), _) => items.push(item.to_owned()),
            (None, Some(item)) => *item = format!("{item} {line}"),
            (None, None) => panic!("{rules}"),
        }
    }
    items
}

type Pairs = BTreeMap<&'static str, String>;

/// A service under imported rules, by a clock of its own.
struct Service {
    rules: RuleSet,
    limiter: Limiter,
    clock: Clock,
    now_ms: u64,
    runtime: Runtime,
}

impl Service {
    fn new(rules: &str) -> Self {
        let clock = Clock::new(UNIX_EPOCH + Duration::from_millis(START_MS));
        let limiter = Limiter::new(Embedded::with_clock(clock.clone()));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let rules: RuleSet = rules.parse().unwrap_or_else(|error| panic!("{error}\n{rules}"));
        assert_eq!(rules.warnings().len(), 0);
        Self { rules, limiter, clock, now_ms: START_MS, runtime }
    }

    fn allows(&mut self, now_ms: u64, request: &Pairs) -> bool {
        self.clock.advance(Duration::from_millis(now_ms - self.now_ms));
        self.now_ms = now_ms;
        let mut attributes = Attributes::new();
        for (name, value) in request {
            attributes = match *name {
                "ip" => attributes.ip(value.parse::<IpAddr>().expect("an address")),
                "path" => attributes.path(value),
                "method" => attributes.method(value),
                name => attributes.set(name, value),
            };
        }
        let verdict = self.runtime.block_on(self.limiter.acquire_by(&self.rules, &attributes));
        verdict.expect("a verdict").allowed
    }

    /// How many of so many at once are allowed.
    fn allowed_of(&mut self, count: usize, request: &Pairs) -> usize {
        let now_ms = self.now_ms;
        (0..count).filter(|_| self.allows(now_ms, request)).count()
    }
}

fn request<const N: usize>(pairs: [(&'static str, &str); N]) -> Pairs {
    pairs.into_iter().map(|(name, value)| (name, value.to_owned())).collect()
}

#[test]
fn the_format_is_told_by_what_only_that_one_has_and_the_file_is_the_rules() {
    let directory = directory();
    let envoy = "domain: d\ndescriptors:\n  - key: k\n    rate_limit: {unit: hour, requests_per_unit: 3}\n";
    let limitador = "- namespace: d\n  max_value: 3\n  seconds: 60\n";
    let nginx = "limit_req_zone $binary_remote_addr zone=a:1m rate=1r/s;\nlimit_req zone=a;\n";
    for (name, text, limit, asked) in [
        ("a.yaml", envoy, "fixed-window 3/1h", "domain, k "),
        ("b.yaml", limitador, "fixed-window 3/1m start first-hit", "domain "),
        ("c.conf", nginx, "token-bucket 1/1s burst 1", ""),
    ] {
        let path = file(&directory, name, text);
        let output = tollgate(&["rules", "import", &path]);
        let said = stderr(&output);
        assert_eq!((code(&output), said.lines().count()), (0, usize::from(!asked.is_empty())), "{name}: {said}");
        assert!(said.contains(&format!("{path}: these rules need a service that gives {asked}(")) || said.is_empty());
        let rules = stdout(&output);
        assert!(rules.contains(&format!("limits = [\"{limit}\"]")), "{rules}");
        let path = file(&directory, "rules.toml", &rules);
        let check = tollgate(&["rules", "check", &path]);
        assert_eq!((code(&check), stderr(&check)), (0, String::new()), "{rules}");
    }
}

#[test]
fn what_can_not_be_read_is_one_line_with_its_place() {
    let directory = directory();
    let envoy = |rest: &str| format!("domain: d\ndescriptors:\n  - key: k\n{rest}");
    let limit = |unit: &str, count: &str| {
        envoy(&format!("    rate_limit:\n      unit: {unit}\n      requests_per_unit: {count}\n"))
    };
    let limitador = |rest: &str| format!("- namespace: d\n  seconds: 60\n{rest}");
    let zone = "limit_req_zone $binary_remote_addr zone=a:1m rate=1r/s;\n";
    for (text, expected) in [
        (envoy("   - x: [\n"), "4: expected YAML, got "),
        (limit("fortnight", "1"), "5: expected a unit: second, minute, hour, day, week, month or year, got fortnight"),
        (limit("day", "-1"), "6: expected a number of requests up to 4294967295, got -1"),
        (limit("day", "4294967296"), "6: expected a number of requests up to 4294967295, got 4294967296"),
        (limit("day", "1.5"), "6: expected a number of requests up to 4294967295, got 1.5"),
        (envoy("    rate_limit: {requests_per_unit: 1}\n"), "4: unit is missing"),
        (envoy("    rate_limits: {}\n"), "4: expected a field of a descriptor, got rate_limits"),
        (envoy("    rate_limit: {unlimited: true, unit: day}\n"), "4: unit and unlimited exclude each other"),
        (envoy("  - key: k\n"), "4: k is given twice in its list"),
        (envoy("    key: l\n"), "4: key is given twice"),
        (envoy("  - value: v\n"), "4: key is missing"),
        (envoy("    shadow_mode: perhaps\n"), "4: expected true or false, got perhaps"),
        ("descriptors: []\n".to_owned(), "1: domain is missing"),
        ("domain: d\ndescriptors: []\n".to_owned(), " no limit to import"),
        (format!("{zone}limit_req zone=b;\n"), "2: no limit_req_zone defines the zone b (nginx -T"),
        (format!("{zone}limit_conn a 5;\n"), "2: no limit_conn_zone defines the zone a (nginx -T"),
        (format!("{zone}limit_req zone=a burst=-1;\n"), "2: expected burst= with a number, got -1"),
        (format!("{zone}limit_req zone=a brust=1;\n"), "2: expected zone=, burst=, nodelay or delay=, got brust=1"),
        (format!("{zone}{zone}"), "2: zone a is already defined by line 1"),
        (zone.replace("1r/s", "0r/s"), "1: expected a rate such as 10r/s or 30r/m, got 0r/s"),
        (zone.replace("1r/s", "1r/h"), "1: expected a rate such as 10r/s or 30r/m, got 1r/h"),
        (
            zone.replace("binary_remote_addr", "client"),
            "1: expected a variable of nginx, or one that this file sets, got $client",
        ),
        (format!("server {{\n{zone}"), "1: expected a } that closes this block, got the end of the file"),
        (limitador("  max_value: -3\n"), "3: expected a number of requests up to 2^53 - 1, got -3"),
        (limitador("  max_value: many\n"), "3: expected a number of requests up to 2^53 - 1, got many"),
        ("- seconds: 0\n  max_value: 1\n".to_owned(), "1: expected at least a second, got 0"),
        ("- seconds: 1\n  max_value: 1\n".to_owned(), "1: namespace is missing"),
        ("hello\n".to_owned(), " not recognised as a configuration of Envoy's ratelimit, limitador or nginx"),
    ] {
        let path = file(&directory, "source", &text);
        let output = tollgate(&["rules", "import", &path]);
        assert_eq!((code(&output), stdout(&output)), (2, String::new()), "{text}");
        let said = stderr(&output);
        assert!(said.starts_with(&format!("error: {path}:{expected}")) && said.lines().count() == 1, "{text}\n{said}");
    }
    let output = tollgate(&["rules", "import", "gone.yaml"]);
    assert!(stderr(&output).starts_with("error: gone.yaml: No such file"), "{}", stderr(&output));
    let output = with_input(&["rules", "import", "-"], b"domain: d\n\xff");
    assert!(stderr(&output).contains("line 2: not UTF-8"), "{}", stderr(&output));
    // Aliases of aliases would be gigabytes.
    let bomb: String = (0..30).map(|at| format!("a{at}: &a{at} [*a{}, *a{}]\n", at - 1, at - 1)).skip(1).collect();
    let output = with_input(&["rules", "import", "--format", "envoy", "-"], format!("a0: &a0 [x]\n{bomb}").as_bytes());
    assert!(stderr(&output).contains("more than 200000 values"), "{}", stderr(&output));
}

#[test]
fn names_of_rules_and_attributes_are_valid_whatever_the_source_calls_them() {
    let long = "x".repeat(100);
    let text = format!(
        "domain: d e\ndescriptors:\n  - key: ':path \"q\"'\n    value: 'a\\|b'\n    rate_limit: {{unit: day, \
         requests_per_unit: 1, name: user-quota}}\n  - key: global\n    rate_limit: {{unit: day, requests_per_unit: 1}}\n  \
         - key: {long}\n    rate_limit: {{unit: day, requests_per_unit: 1}}\n  - key: domain\n    value: \"\\e[31m\"\n    \
         rate_limit: {{unit: day, requests_per_unit: 1}}\n"
    );
    let rules = import_exactly("envoy", &text);
    let set: RuleSet = rules.parse().expect("rules");
    let names: Vec<_> = set.definitions().iter().map(|rule| rule.name.clone()).collect();
    assert_eq!(names[..2], ["user-quota-2", "global"]);
    assert_eq!(names[2], "x".repeat(64));
    let mut service = Service::new(&rules);
    let named = request([("domain", "d e"), ("_path__q_", "a\\|b")]);
    assert_eq!(service.allowed_of(3, &named), 1);
    assert_eq!(service.allowed_of(3, &request([("domain", "d e"), ("domain-2", "\u{1b}[31m")])), 1);
    // Without `global` as a key, nobody is counted by that.
    assert_eq!(service.allowed_of(3, &request([("domain", "d e")])), 3);
    assert_eq!(service.allowed_of(3, &request([("domain", "d e"), ("global-2", "x")])), 1);
}
