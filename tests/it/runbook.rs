//! The runbooks have every line that a service logs, every class of errors, every check of the doctor, and no others.

use std::collections::{BTreeMap, BTreeSet};

use tollgate_testing::repository::{read, rust_files};

const OF_REDIS: &str = "src/operations/runbook.md";
const OF_THE_RECORD: &str = "crates/record/src/operations/runbook.md";

const LEVELS: [&str; 5] = ["error", "warn", "info", "debug", "trace"];

/// The events of a telemetry module: each message, with the levels at which it is logged.
fn logged(module: &str) -> BTreeMap<String, BTreeSet<String>> {
    let code = read(module);
    let mut found = BTreeMap::<_, BTreeSet<_>>::new();
    for level in LEVELS {
        for call in code.split(&format!("tracing::{level}!(")).skip(1) {
            let literals = literals_of_arguments(call);
            let [target, message] = &literals[..] else {
                panic!("{module}: {literals:?}: expected a target, a message")
            };
            assert_eq!(target, "tollgate", "{module}");
            found.entry(message.clone()).or_default().insert(level.to_uppercase());
        }
    }
    found
}

/// The string literals up to the end of a call.
fn literals_of_arguments(code: &str) -> Vec<String> {
    let (mut depth, mut literals, mut literal) = (1, Vec::new(), None::<String>);
    for character in code.chars() {
        match (&mut literal, character) {
            (Some(_), '"') => literals.extend(literal.take()),
            (Some(text), _) => text.push(character),
            (None, '"') => literal = Some(String::new()),
            (None, '(') => depth += 1,
            (None, ')') => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    literals
}

/// The rows of the tables in a section of a page, as cells.
fn rows(page: &str, section: &str) -> Vec<Vec<String>> {
    let text = read(page);
    let (_, rest) = text.split_once(&format!("\n# {section}\n")).unwrap_or_else(|| panic!("{page}: {section}"));
    let section = rest.split("\n# ").next().unwrap_or_default();
    let cells = |line: &str| line.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned()).collect();
    section.lines().filter(|line| line.starts_with("| `")).map(cells).collect()
}

/// What a cell has in backticks.
fn code_of(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

#[test]
fn every_line_that_a_service_logs_is_in_the_runbook() {
    for (page, module) in [(OF_REDIS, "src/telemetry.rs"), (OF_THE_RECORD, "crates/record/src/telemetry.rs")] {
        let logged = logged(module);
        assert!(logged.len() >= 15, "{module}: {logged:?}");
        let rows = rows(page, "Log lines");
        let lines = rows.iter().filter(|row| !row[0].starts_with("`tollgate_"));
        let mut documented: BTreeMap<_, _> =
            lines.map(|row| (code_of(&row[0]).next().unwrap_or_default(), &row[1])).collect();
        for (message, levels) in logged {
            let level = documented.remove(message.as_str()).unwrap_or_else(|| panic!("{page}: no `{message}`"));
            assert!(levels.iter().all(|name| level.contains(name.as_str())), "{page}: {message}: {levels:?}");
        }
        assert!(documented.is_empty(), "{page}: nothing logs {documented:?}");
    }
}

/// Otherwise a line might be missed above.
#[test]
fn only_the_modules_of_telemetry_log() {
    for file in ["src", "crates/record/src"].into_iter().flat_map(rust_files) {
        let text = read(&file);
        let event = |level: &&str| text.contains(&format!("tracing::{level}!("));
        let logs = LEVELS.iter().any(event) || text.contains("tracing::event!") || text.contains("use tracing");
        assert_eq!(logs, file.ends_with("/telemetry.rs"), "{file}");
    }
}

#[test]
fn every_class_of_errors_is_in_the_runbook_with_what_its_messages_begin_with() {
    let code = read("src/error/kind.rs");
    let (_, class) = code.split_once("pub fn name(self)").expect("the classes");
    let (class, _) = class.split_once("\n    }\n").expect("their end");
    let classes: BTreeSet<_> = class.split('"').skip(1).step_by(2).collect();
    assert!(classes.len() > 10, "{classes:?}");
    let rows = rows(OF_REDIS, "Error classes");
    let documented = rows.iter().flat_map(|row| code_of(&row[0])).collect::<BTreeSet<_>>();
    assert_eq!(documented, classes);
    let scripts = ["lua/decide.lua", "lua/keys.lua"].map(str::to_owned);
    let sources: Vec<_> = rust_files("src").into_iter().chain(scripts).map(|file| read(&file)).collect();
    for beginning in rows.iter().flat_map(|row| code_of(&row[1])) {
        assert!(sources.iter().any(|text| text.contains(beginning)), "no message has {beginning:?}");
    }
}

#[test]
fn every_check_of_the_doctor_is_in_the_runbook() {
    let files = rust_files("crates/cli/src/doctor").into_iter().filter(|file| !file.ends_with("tests.rs"));
    let code: String = files.map(|file| read(&file)).collect();
    let checks: BTreeSet<_> =
        code.split("Finding::new(\"").skip(1).filter_map(|rest| rest.split('"').next()).map(str::to_owned).collect();
    assert!(checks.len() > 20, "{checks:?}");
    let rows = rows(OF_REDIS, "Findings of doctor");
    let documented: BTreeSet<_> = rows.iter().flat_map(|row| code_of(&row[0])).map(str::to_owned).collect();
    assert_eq!(documented, checks);
}
