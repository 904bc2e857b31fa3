//! Files of rules with a value of the wrong kind in each field, and the error for each.

use tollgate::rules::RuleSet;

/// A value of each kind, as written.
const VALUES: [&str; 13] = [
    "-1",
    "0",
    "1.5",
    "nan",
    "true",
    "1979-05-27",
    "1979-05-27T07:32:00Z",
    "\"\"",
    "\"a b\\n\"",
    "\"*\"",
    "[]",
    "[{}]",
    "{}",
];

/// The fields of a rule, of its limits, of the settings, and of tables with names of the author's own.
const FIELDS: [&str; 46] = [
    "name",
    "priority",
    "match",
    "match.tier",
    "match.path",
    "match.ip",
    "match.method",
    "key",
    "limits",
    "limits[]",
    "limits[].name",
    "limits[].limit",
    "limits[].key",
    "limits[].cost",
    "limits[].missing",
    "tag",
    "cost",
    "min_cost",
    "count",
    "action",
    "shadow",
    "missing",
    "ipv6_prefix",
    "block_for",
    "max_hold",
    "overrides",
    "overrides.user:a",
    "block",
    "allow",
    "on_error",
    "processes",
    "on_change",
    "overage",
    "hash_keys",
    "status",
    "message",
    "retry_after",
    "include",
    "ignore_case",
    "paths",
    "descriptors",
    "variables",
    "variables.x",
    "defaults",
    "defaults.status",
    "rule",
];

/// A file with this value in this field, which is written on its line 3, or 1 if it is no rule's.
fn file(field: &str, value: &str) -> String {
    let rule = |line: String, key: &str, limits: &str| format!("[[rule]]\nname = \"r\"\n{line}\n{key}{limits}");
    let (key, limits) = ("key = \"user\"\n", "limits = [\"gcra 5/1s\"]\n");
    let cost = if field == "min_cost" { "cost = \"units\"\n" } else { "" };
    match field.split_once('.') {
        None if ["include", "ignore_case", "paths", "descriptors", "variables", "defaults"].contains(&field) => {
            format!("{field} = {value}\n{}", rule(String::new(), key, limits))
        }
        None if field == "rule" => format!("rule = {value}\n"),
        None if field == "name" => format!("[[rule]]\n\nname = {value}\n{key}{limits}"),
        None if field == "key" => rule(format!("key = {value}"), "", limits),
        None if field == "limits" => rule(format!("limits = {value}"), key, ""),
        None if field == "limits[]" => rule(format!("limits = [{value}]"), key, ""),
        None => rule(format!("{field} = {value}\n{cost}"), key, limits),
        Some(("limits[]", "limit")) => rule(format!("limits = [{{ limit = {value} }}]"), key, ""),
        Some(("limits[]", inner)) => {
            rule(format!("limits = [{{ limit = \"gcra 5/1s\", {inner} = {value} }}]"), key, "")
        }
        Some((table @ ("variables" | "defaults"), inner)) => {
            format!("{table} = {{ {inner} = {value} }}\n{}", rule(String::new(), key, limits))
        }
        Some((table, inner)) => rule(format!("{table} = {{ \"{inner}\" = {value} }}"), key, limits),
    }
}

/// What is right as it is.
const RIGHT: &str = r#"
    priority = -1, priority = 0, match = {}, match.tier = "a b\n", match.tier = "*", match.path = "*", match.ip = "*",
    match.method = "*", limits[].key = [], limits[].cost = 0, cost = 0, min_cost = 0, shadow = true, overrides = {}, block = [], allow = [],
    overage = true, hash_keys = true, message = "", message = "a b\n", message = "*", include = [], ignore_case = true,
    variables = {}, defaults = {}, rule = []
"#;

/// Words of parsers and of Rust.
const FOREIGN: [&str; 16] = [
    "integer", "float", "floating", "boolean", "map", "sequence", "struct", "enum", "variant", "invalid", "wanted",
    "element", "i64", "u64", "u32", "datetime",
];

#[test]
fn a_value_of_another_kind_is_reported_in_the_authors_words() {
    let mut right = Vec::new();
    for field in FIELDS {
        for value in VALUES {
            let Err(error) = file(field, value).parse::<RuleSet>() else {
                right.push(format!("{field} = {value}"));
                continue;
            };
            let message = error.to_string();
            let (place, why) = message.split_once(": ").expect("a place");
            assert!(place.starts_with("rules:") && error.faults()[0].line().is_some(), "{field} = {value}: {message}");
            let tells_the_value = why.contains("expected ") && why.contains(", got ");
            let tells_what_to_do = why.contains(": write ")
                || why.starts_with("write ")
                || why.contains(": only ")
                || why.ends_with(" is missing");
            assert!(tells_the_value || tells_what_to_do, "{field} = {value}: {message}");
            let mut words = why.split(|character: char| !character.is_ascii_alphanumeric());
            assert!(words.all(|word| !FOREIGN.contains(&word)), "{field} = {value}: {message}");
            assert!(!message.contains(['`', '$']) && message.lines().count() == 1, "{field} = {value}: {message}");
            // Numbers and dates are shown as they are written.
            let shown = !value.starts_with(|first: char| first.is_ascii_digit()) || message.ends_with(value);
            assert!(shown, "{field} = {value}: {message}");
        }
    }
    let expected: Vec<_> = RIGHT.split(',').map(str::trim).collect();
    assert_eq!(right, expected);
}
