//! The dashboard and the alert rules: each metric, label and value that they name is one that the code has, and each
//! alert leads to an entry of a runbook.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;
use tollgate_testing::python::python;
use tollgate_testing::repository::{anchor, read, root, stems};

/// Those that Prometheus adds, and the bound of a histogram's bucket.
const OF_PROMETHEUS: [&str; 3] = ["job", "instance", "le"];

/// Of redis_exporter, with the label that queries may use.
const OF_REDIS_EXPORTER: [(&str, &[&str]); 4] = [
    ("redis_errors_total", &["err"]),
    ("redis_evicted_keys_total", &[]),
    ("redis_memory_max_bytes", &[]),
    ("redis_memory_used_bytes", &[]),
];

type Values = BTreeSet<String>;

/// The metrics of the code: the labels of each, with the values that they may have, or none if these aren't bounded.
fn metrics() -> BTreeMap<String, BTreeMap<String, Option<Values>>> {
    let mut metrics = BTreeMap::<_, BTreeMap<_, _>>::new();
    for module in ["src/telemetry.rs", "crates/record/src/telemetry.rs"] {
        let code = read(module);
        for (name, function) in code.split("names::").skip(1).zip(functions_of_uses(&code)) {
            if function.contains("describe_counter!") {
                continue;
            }
            let name: String = name.chars().take_while(|letter| letter.is_uppercase() || *letter == '_').collect();
            let (_, rest) = code.split_once(&format!("const {name}: &str = \"")).expect("a name");
            let metric = rest.split('"').next().expect("its end").to_owned();
            let labels = metrics.entry(metric.clone()).or_default();
            for label in labels_of(function, &name) {
                let values = values(&code, function, &metric, label);
                labels.insert(label.to_owned(), values);
            }
        }
    }
    metrics
}

/// For each use of a metric's name, the function in which it stands.
fn functions_of_uses(code: &str) -> impl Iterator<Item = &str> {
    code.match_indices("names::").map(|(at, _)| {
        let from = code[..at].rfind("\nfn ").max(code[..at].rfind("fn ")).expect("a function");
        let to = code[at..].find("\n}\n").map_or(code.len(), |end| at + end);
        &code[from..to]
    })
}

/// `names::NAME, "label" => value, ...`
fn labels_of<'a>(function: &'a str, name: &str) -> Vec<&'a str> {
    let used = format!("names::{name}");
    let uses = function.split(&used).skip(1);
    uses.filter_map(|rest| rest.split("names::").next()).flat_map(|rest| quoted(rest, true)).collect()
}

/// String literals: those that name labels, which stand before an arrow, or all others.
fn quoted(code: &str, are_labels: bool) -> Vec<&str> {
    let pieces: Vec<_> = code.split('"').collect();
    let is_label = |at: usize| pieces.get(at + 1).is_some_and(|next| next.starts_with(" =>"));
    (1..pieces.len()).step_by(2).filter(|at| is_label(*at) == are_labels).map(|at| pieces[at]).collect()
}

fn values(code: &str, function: &str, metric: &str, label: &str) -> Option<Values> {
    let classes = || literals(&read("src/error/kind.rs"), "pub fn name(");
    let known = match label {
        "rule" | "algorithm" => return None,
        "class" => classes(),
        "source" => {
            literals(&read("src/decision/decided_by.rs"), "fn name(").into_iter().chain(["none".to_owned()]).collect()
        }
        "reason" => literals(&read("src/rules/verdict.rs"), "pub fn name(").into_iter().chain(classes()).collect(),
        "outcome" if metric == "tollgate_api_keys_total" => {
            literals(&read("src/rules/api_key.rs"), "pub fn name(").into_iter().chain(["valid".to_owned()]).collect()
        }
        "outcome" => {
            let mut values = literals(function, "fn ");
            if function.contains("outcome(") {
                values.extend(literals(code, "fn outcome("));
            }
            values
        }
        _ => panic!("{metric}: which values may {label} have?"),
    };
    assert!(known.len() > 1, "{metric}, {label}: {known:?}");
    Some(known)
}

/// The string literals of a function, or of the statements for metrics with which it begins, but for names of labels.
fn literals(code: &str, function: &str) -> Values {
    let (_, rest) = code.split_once(function).unwrap_or_else(|| panic!("{function}"));
    let body = rest.split("\n}\n").next().unwrap_or_default();
    let body = body.split("\n    }\n").next().unwrap_or_default();
    quoted(body, false).into_iter().map(str::to_owned).collect()
}

/// Panics if a query has what the code doesn't have. Returns its metrics of tollgate, and the labels of its
/// result: those of the metrics, or by which it sums.
fn check(query: &str) -> (BTreeSet<String>, BTreeSet<String>) {
    let all = metrics();
    let (mut seen, mut labels) = (BTreeSet::new(), BTreeSet::from(OF_PROMETHEUS.map(str::to_owned)));
    let word = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    for (at, _) in query.match_indices("tollgate_").chain(query.match_indices("redis_")) {
        if query[..at].ends_with(word) {
            continue;
        }
        let name = query[at..].split(|letter| !word(letter)).next().unwrap_or_default();
        let base = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
        let own: BTreeMap<String, Option<Values>> = match OF_REDIS_EXPORTER.iter().find(|(known, _)| *known == name) {
            Some((_, labels)) => labels.iter().map(|label| ((*label).to_owned(), None)).collect(),
            None => {
                let own = all.get(base).unwrap_or_else(|| panic!("{base}: no such metric: {query}"));
                seen.insert(base.to_owned());
                own.clone()
            }
        };
        let selector = query[at + name.len()..].strip_prefix('{').and_then(|rest| rest.split('}').next());
        for matcher in selector.into_iter().flat_map(|selector| selector.split(", ")) {
            let (label, value) = matcher.split_once(['=', '!']).unwrap_or_else(|| panic!("{matcher}: {query}"));
            let values = own.get(label).unwrap_or_else(|| panic!("{base} has no {label}: {query}"));
            let value = value.trim_matches(['=', '~', '"']);
            for value in value.split('|').filter(|_| values.is_some()) {
                let is_known = values.as_ref().is_some_and(|values| values.contains(value));
                assert!(is_known, "{base}: {label} is never {value}, of {values:?}: {query}");
            }
        }
        labels.extend(own.keys().cloned());
        for by in sums(query) {
            let known = OF_PROMETHEUS.contains(&by) || own.contains_key(by);
            assert!(known, "{base} has no {by}: {query}");
        }
    }
    if query.contains(" by (") {
        labels = sums(query).map(str::to_owned).collect();
    }
    (seen, labels)
}

/// The labels by which a query sums.
fn sums(query: &str) -> impl Iterator<Item = &str> {
    let lists = query.split(" by (").skip(1).filter_map(|rest| rest.split(')').next());
    lists.flat_map(|list| list.split(", "))
}

#[test]
fn the_dashboard_queries_metrics_that_exist() {
    let dashboard: Value = serde_json::from_str(include_str!("../../grafana.json")).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().expect("targets"));
    let seen: BTreeSet<_> = targets.flat_map(|target| check(target["expr"].as_str().expect("a query")).0).collect();
    assert_eq!(seen.len(), 8, "{seen:?}");
}

#[test]
fn each_alert_queries_metrics_that_exist_and_leads_to_its_entry_in_a_runbook() {
    let file = root().join("examples/services/alerts.yaml");
    let program = "import json, sys, yaml; json.dump(yaml.safe_load(open(sys.argv[1])), sys.stdout)";
    let output = Command::new(python()).args(["-c", program]).arg(file).output().expect("Python");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rules: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let alerts = rules["groups"].as_array().expect("groups").iter();
    let alerts: Vec<_> = alerts.flat_map(|group| group["rules"].as_array().expect("rules")).collect();
    assert!(alerts.len() > 15, "{}", alerts.len());
    let text = |value: &Value| value.as_str().unwrap_or_else(|| panic!("text: {value}")).to_owned();
    let (mut names, mut runbooks) = (BTreeSet::new(), BTreeSet::new());
    for alert in alerts {
        let (name, annotations) = (text(&alert["alert"]), &alert["annotations"]);
        assert!(names.insert(name.clone()), "{name}: twice");
        assert!(["page", "warning"].contains(&alert["labels"]["severity"].as_str().expect("a severity")), "{name}");
        assert!(text(&alert["for"]).ends_with('m'), "{name}");
        let (_, labels) = check(&text(&alert["expr"]));
        for used in text(&annotations["summary"]).split("$labels.").skip(1) {
            let label = used.split(' ').next().unwrap_or_default();
            assert!(labels.contains(label), "{name}: no {label} among {labels:?}");
        }
        let link = text(&annotations["runbook_url"]);
        let (page, heading) = link.split_once('#').unwrap_or_else(|| panic!("{name}: {link}"));
        let runbook = read(page);
        let mut sections = runbook.split("\n# ").skip(1);
        let section = sections.find(|section| anchor(section.lines().next().unwrap_or_default()) == heading);
        let section = section.unwrap_or_else(|| panic!("{name}: {link}"));
        assert!(section.contains(&format!("`{name}`")), "{link}: no mention of {name}");
        runbooks.insert(page.to_owned());
    }
    // No entry names an alert that is none.
    for page in runbooks {
        let text = read(&page);
        let named = text.split('`').filter(|word| word.starts_with("Tollgate") || word.starts_with("Redis"));
        let alerts = named.filter(|word| word.chars().all(|letter| letter.is_ascii_alphabetic()) && *word != "Redis");
        for alert in alerts {
            assert!(names.contains(alert), "{page}: {alert}");
        }
    }
}

/// In a table of metrics, with its labels.
#[test]
fn each_metric_is_documented_with_its_labels() {
    let folders = ["src", "src/guide", "crates/record/src"].into_iter().filter(|folder| root().join(folder).is_dir());
    let files =
        folders.flat_map(|folder| stems(folder, "md").into_iter().map(move |page| format!("{folder}/{page}.md")));
    let pages: String = files.map(|file| read(&file)).collect();
    let metrics = metrics();
    assert!(metrics.len() > 12, "{metrics:?}");
    for (metric, labels) in metrics {
        let row = pages.lines().find(|line| line.starts_with(&format!("| `{metric}` |")));
        let cell = row.and_then(|row| row.split('|').nth(2)).unwrap_or_else(|| panic!("{metric}: no row"));
        for label in labels.keys() {
            assert!(cell.contains(&format!("`{label}`")), "{metric}: {label}");
        }
    }
}
