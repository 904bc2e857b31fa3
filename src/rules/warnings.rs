//! What is valid in a rule and probably doesn't match as meant: values written as patterns where none are read.

use super::definition::Definition;
use super::error::Field;
use super::names::{METHOD, PATH, TIER};
use super::throttle::Refusal;

/// The route that a router has matched; its own patterns are written in braces.
const ROUTE: &str = "route";

/// The host that a request is for, which the middleware reads in one spelling.
const HOST: &str = "host";

/// What is compared literally in this rule though it looks like a pattern.
pub(super) fn of(rule: &Definition) -> Vec<Refusal> {
    let mut found = Vec::new();
    for (attribute, values) in &rule.conditions {
        // Any value.
        if matches!(values.0.as_slice(), [any] if any == "*") {
            continue;
        }
        for (index, value) in values.0.iter().enumerate() {
            let warning = in_condition(attribute, value);
            found.extend(warning.map(|why| {
                let at = Field::named("match").entry(attribute).item(index);
                (at, format!("{attribute}: {why}, got {value:?}"))
            }));
        }
    }
    let of_key = |field: &str, key: &str| {
        key.contains('*').then(|| format!("{field}: expected a whole key, since keys have no patterns, got {key:?}"))
    };
    for key in rule.overrides.keys() {
        found.extend(of_key("overrides", key).map(|why| (Field::named("overrides").entry(key), why)));
    }
    for (field, keys) in [("block", &rule.block), ("allow", &rule.allow)] {
        let items = keys.iter().enumerate();
        found.extend(items.filter_map(|(index, key)| Some((Field::named(field).item(index), of_key(field, key)?))));
    }
    found
}

/// What was probably meant by a value of a condition.
fn in_condition(attribute: &str, value: &str) -> Option<&'static str> {
    match attribute {
        PATH if has_an_expression(value) => {
            Some("expected * for a segment that varies, since everything else is compared literally")
        }
        PATH => None,
        ROUTE if outside_braces(value).contains('*') => {
            Some("expected a route as the router has it, such as /users/{id}, since only path has patterns")
        }
        ROUTE => None,
        _ if value.contains('*') => Some("expected a whole value, since only path has patterns"),
        HOST if has_another_spelling(value) => {
            Some("expected a host as the middleware reads it, in lower case, without port and final dot")
        }
        METHOD | TIER if value.contains(['|', ',']) => Some("expected a list of values, such as [\"a\", \"b\"]"),
        _ => None,
    }
}

/// Whether it looks like a regular expression or a template. The characters hardly occur in a URL as they are; and
/// one that does is meant literally if it is percent-encoded.
fn has_an_expression(pattern: &str) -> bool {
    let expression = |segment: &str| {
        segment.contains(['[', ']', '{', '}', '<', '>', '|', '^', '\\'])
            || segment.starts_with('(')
            || segment.contains(".+")
            || segment.contains(")+")
    };
    pattern.ends_with('$') || pattern.split('/').any(expression)
}

fn has_another_spelling(host: &str) -> bool {
    let port = host.rsplit_once(':').filter(|(_, after)| !after.contains(']'));
    port.is_some() || host.ends_with('.') || !host.is_ascii() || host.bytes().any(|byte| byte.is_ascii_uppercase())
}

fn outside_braces(text: &str) -> String {
    let mut depth = 0_usize;
    let outside = text.chars().filter(|character| {
        match character {
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        depth == 0
    });
    outside.collect()
}

#[cfg(test)]
mod tests {
    use super::super::{Definition, RuleSet};

    fn warned(attribute: &str, value: &str) -> bool {
        let mut rule = Definition::new("a");
        rule.action = super::super::Action::Block;
        rule.conditions.insert(attribute.to_owned(), value.into());
        let rules = RuleSet::new([rule]).unwrap_or_else(|error| panic!("{value}: {error}"));
        assert!(rules.warnings().len() <= 1);
        !rules.warnings().is_empty()
    }

    #[test]
    fn values_that_look_like_patterns_are_doubted_and_no_others() {
        for (attribute, doubted, fine) in [
            (
                "path",
                &[
                    "/users/[0-9]+",
                    "/api/(v1|v2)/items$",
                    "/a/v1|v2",
                    "/^api",
                    "/files/.+",
                    "/v{version}/items",
                    "/a/(x)",
                    "/items$",
                ][..],
                &[
                    "/users/*",
                    "/*",
                    "*",
                    "/a.b/c++/$metadata",
                    "/Products(1)/x:y",
                    "/a/b$c,d;e=f@g!h'i+j",
                    "/a%5B0%5D%24",
                    "/a/...",
                ][..],
            ),
            ("tier", &["fr*", "*free", "free|paid", "free,paid"], &["*", "free", "a.b"]),
            ("method", &["GET|POST", "P*"], &["GET", "*"]),
            ("route", &["/users/*", "/*"], &["/users/{id}", "/files/{*path}", "*", "/{a}/{tail:.*}"]),
            (
                "host",
                &["*.example.com", "Example.com", "example.com.", "example.com:80", "[::1]:80", "b\u{fc}cher.example"],
                &["example.com", "a|b", "192.0.2.1", "[2001:db8::1]", "xn--bcher-kva.example"],
            ),
        ] {
            doubted.iter().for_each(|value| assert!(warned(attribute, value), "{attribute} {value}"));
            fine.iter().for_each(|value| assert!(!warned(attribute, value), "{attribute} {value}"));
        }
    }
}
