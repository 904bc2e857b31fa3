//! What is valid in a rule and probably isn't as meant: attributes whose names are nearly those of others, values
//! written as patterns where none are read, and shards where rules apply together.

use super::definition::{Cost, Definition, Paths, Reading};
use super::error::Field;
use super::names::{API_KEY, GLOBAL, IP, METHOD, PATH, TIER, USER};
use super::throttle::{Refusal, listed_values};
use crate::limit::Limit;

/// The route that a router has matched; its own patterns are written in braces.
const ROUTE: &str = "route";

/// The host that a request is for, which the middleware reads in one spelling.
const HOST: &str = "host";

const A_HOST: &str = "expected a host as the middleware reads it, in lower case, without a port or a final dot";
const NO_BLANKS: &str = "expected a value without spaces at its ends, since a header's value never has any";

/// Names in this rule that hardly any service gives, and values compared literally though they look like patterns.
pub(super) fn of(rule: &Definition, reading: Reading) -> Vec<Refusal> {
    let mut found: Vec<_> = of_names(rule).collect();
    for (attribute, values) in &rule.conditions {
        // Any value.
        if matches!(values.0.as_slice(), [any] if any == "*") {
            continue;
        }
        for (index, value) in values.0.iter().enumerate() {
            let warning = in_condition(attribute, value, reading);
            found.extend(warning.map(|why| {
                let at = Field::named("match").entry(attribute).item(index);
                (at, format!("{attribute}: {why}, got {value:?}"))
            }));
        }
    }
    let of_key = |field: &str, key: &str| {
        let why = if key.contains('*') {
            "expected a whole key, since keys have no patterns"
        } else {
            of_values(&rule.key.0, key)?
        };
        Some(format!("{field}: {why}, got {key:?}"))
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

/// Limits with shards in rules that apply together with others. Each with its rule's index.
pub(super) fn of_shards(rules: &[Definition]) -> Vec<(usize, Refusal)> {
    let mut found = Vec::new();
    for (at, rule) in rules.iter().enumerate().filter(|(_, rule)| rule.shadow != Some(true)) {
        let comes_before = |other: usize, continuing: &Definition| {
            continuing.priority > rule.priority || continuing.priority == rule.priority && other <= at
        };
        let is_sharded = |text: &str| text.parse::<Limit>().is_ok_and(|limit| limit.shards() > 1);
        let sharded = rule.limits.iter().enumerate();
        for (index, limit) in sharded.filter(|(_, limit)| limit.limit.contains("shards") && is_sharded(&limit.limit)) {
            if rules.iter().enumerate().any(|(other, rule)| rule.continues && comes_before(other, rule)) {
                let why = "on a cluster, rules that apply together can't have limits with shards";
                let at_limit = Field::named("limits").item(index);
                found.push((at, (at_limit, format!("limits: {why}, got {:?}", limit.limit))));
            }
        }
    }
    found
}

/// What was probably meant by the names of attributes.
fn of_names(rule: &Definition) -> impl Iterator<Item = Refusal> {
    let by_cost = |cost: &Cost| match cost {
        Cost::Attribute(name) => Some(name.clone()),
        Cost::Units(_) => None,
    };
    let of = |field: &'static str| move |name: &String| (Field::named(field), field, name.clone());
    let conditions = rule.conditions.keys().map(|name| (Field::named("match").entry(name), "match", name.clone()));
    let limits = rule.limits.iter().enumerate().flat_map(move |(index, limit)| {
        let names = limit.key.0.iter().cloned().chain(limit.cost.as_ref().and_then(by_cost));
        names.map(move |name| (Field::named("limits").item(index), "limits", name)).collect::<Vec<_>>()
    });
    let named = conditions.chain(rule.key.0.iter().map(of("key"))).chain(rule.tag.iter().map(of("tag"))).chain(limits);
    let named = named.chain(by_cost(&rule.cost).map(|name| (Field::named("cost"), "cost", name)));
    named.filter_map(|(at, field, name)| {
        let expected = if name == "status" {
            "expected an attribute of the request, not of its response (count = \"401\" is about the response)"
                .to_owned()
        } else {
            format!("expected an attribute that the service gives (did you mean {}?)", probably_meant(&name)?)
        };
        Some((at, format!("{field}: {expected}, got {name:?}")))
    })
}

/// The name of an attribute that the middleware gives by itself, of which this is another spelling.
fn probably_meant(name: &str) -> Option<&'static str> {
    const KNOWN: [&str; 9] = [IP, PATH, METHOD, USER, API_KEY, TIER, ROUTE, HOST, GLOBAL];
    let lower = name.to_ascii_lowercase().replace('-', "_");
    let is_near = |known: &&str| {
        lower == **known || known.len() > 2 && lower.len() < 10 && strsim::damerau_levenshtein(known, &lower) == 1
    };
    KNOWN.into_iter().find(is_near).filter(|_| !KNOWN.contains(&name))
}

/// What was probably meant by the values in a key, which are compared as they are written.
fn of_values(attributes: &[String], key: &str) -> Option<&'static str> {
    let values = listed_values(key, attributes.len());
    values.iter().zip(attributes).find_map(|(value, attribute)| {
        let value = value.strip_prefix(&**attribute)?.strip_prefix(':')?;
        match &**attribute {
            // Read as in a request.
            PATH | METHOD | IP => None,
            HOST if has_another_spelling(value) => Some(A_HOST),
            _ if value.trim() != value => Some(NO_BLANKS),
            _ => None,
        }
    })
}

/// What was probably meant by a value of a condition.
fn in_condition(attribute: &str, value: &str, reading: Reading) -> Option<&'static str> {
    match attribute {
        PATH if reading.paths == Paths::Segments
            && value.bytes().any(|byte| !byte.is_ascii_graphic() || byte == b'"') =>
        {
            Some("expected it percent-encoded, since paths = \"segments\" compares paths as they are sent")
        }
        PATH if has_an_expression(value) => {
            Some("expected * for a segment that varies, since everything else is compared literally")
        }
        PATH => None,
        ROUTE if outside_braces(value).contains('*') => {
            Some("expected a route as the router has it, such as /users/{id}, since only path has patterns")
        }
        ROUTE => None,
        _ if value.contains('*') => Some("expected a whole value, since only path has patterns"),
        HOST if has_another_spelling(value) => Some(A_HOST),
        _ if value.trim() != value => Some(NO_BLANKS),
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
    fn names_that_are_nearly_those_of_known_attributes_are_doubted_and_no_others() {
        let doubts = |fields: &str| {
            let text = format!("[[rule]]\nname = \"a\"\n{fields}");
            let rules: RuleSet = text.parse().unwrap_or_else(|error| panic!("{fields}: {error}"));
            rules.warnings().iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let limits = "limits = [\"gcra 10/1s\"]";
        for (fields, meant) in [
            (
                format!("key = \"usr\"\n{limits}"),
                "2:1: rule a: key: expected an attribute that the service gives (did you mean user?), got \"usr\"",
            ),
            (format!("key = \"IP\"\n{limits}"), "did you mean ip?"),
            (format!("key = \"Global\"\n{limits}"), "did you mean global?"),
            (format!("key = \"ip\"\ntag = \"hots\"\n{limits}"), "did you mean host?"),
            ("key = \"ip\"\nlimits = [{ limit = \"gcra 10/1s\", key = \"api-key\" }]".to_owned(), "limits: expected"),
            ("match = { methd = \"POST\" }\naction = \"block\"".to_owned(), "did you mean method?"),
            ("match = { pth = \"/a\" }\naction = \"block\"".to_owned(), "did you mean path?"),
            ("match = { status = \"401\" }\naction = \"block\"".to_owned(), "count = \"401\" is about the response"),
        ] {
            let found = doubts(&fields);
            assert!(found.len() == 1 && found[0].contains(meant.trim_start_matches("2:1: ")), "{fields}: {found:?}");
        }
        for name in ["org", "plan", "team", "role", "zip", "tokens", "session", "ip4", "account", "region", "domain"] {
            assert!(doubts(&format!("key = \"{name}\"\ncost = \"{name}\"\n{limits}")).is_empty(), "{name}");
        }
    }

    #[test]
    fn shards_where_rules_apply_together_are_doubted() {
        let rule = |name: &str, limit: &str, more: &str| {
            format!("[[rule]]\nname = \"{name}\"\nkey = \"ip\"\nlimits = [\"{limit}\"]\n{more}\n")
        };
        let (plain, sharded, goes_on) = ("gcra 10/1s", "gcra 100/1s shards 4", "continue = true");
        for (rules, expected) in [
            ([rule("a", sharded, goes_on), rule("b", plain, "")], 1),
            ([rule("a", plain, goes_on), rule("b", sharded, "")], 1),
            ([rule("a", plain, goes_on), rule("b", sharded, "shadow = true")], 0),
            ([rule("a", sharded, "match = { path = \"/a\" }"), rule("b", plain, "")], 0),
            ([rule("a", sharded, "match = { path = \"/a\" }\npriority = 1"), rule("b", plain, goes_on)], 0),
            ([rule("a", sharded, ""), rule("b", plain, "continue = true\npriority = 1")], 1),
        ] {
            let rules: RuleSet = rules.concat().parse().expect("rules");
            assert_eq!(rules.warnings().len(), expected, "{rules:?}: {:?}", rules.warnings());
        }
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
            ("tier", &["fr*", "*free", "free|paid", "free,paid", " free", "free\t"], &["*", "free", "a.b", "a b"]),
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

    #[test]
    fn a_listed_key_that_is_spelled_as_no_request_is_doubted() {
        for (key, doubted, fine) in [
            (
                &["user"][..],
                &["user: 42", "user:42 ", "user:4*"][..],
                &["user:42", "user:Ada Lovelace", "user:A.:1"][..],
            ),
            (
                &["host"],
                &["host:Evil.example", "host:evil.example:443", "host:evil.example.", "host:b\u{fc}cher.example"],
                &["host:evil.example", "host:[2001:db8::1]"],
            ),
            (&["ip"], &[], &["ip:2001:DB8::1"]),
            (&["path"], &["path:/a/*"], &["path:/A.", "path:/a%20"]),
            (
                &["user", "host"],
                &["user:42|host:Evil.example", "user:42 |host:a"],
                &["user:A|host:a", "user:a\\|B|host:a"],
            ),
        ] {
            for (listed, expected) in doubted.iter().map(|key| (key, 1)).chain(fine.iter().map(|key| (key, 0))) {
                for field in ["block", "allow", "overrides"] {
                    let mut rule = Definition::new("a");
                    rule.key = super::super::OneOrMore(key.iter().map(|&name| name.to_owned()).collect());
                    rule.limits = vec!["gcra 1/1s".into()];
                    match field {
                        "block" => rule.block.push((*listed).to_owned()),
                        "allow" => rule.allow.push((*listed).to_owned()),
                        _ => drop(rule.overrides.insert((*listed).to_owned(), "gcra 2/1s".to_owned())),
                    }
                    let rules = RuleSet::new([rule]).unwrap_or_else(|error| panic!("{listed}: {error}"));
                    assert_eq!(rules.warnings().len(), expected, "{field} {listed}: {:?}", rules.warnings());
                }
            }
        }
    }

    #[test]
    fn a_pattern_that_is_compared_as_sent_and_never_sent_so_is_doubted() {
        for (pattern, encoded) in [("/caf\u{e9}", "/caf%C3%A9"), ("/a b/*", "/a%20b/*"), ("/a\"b", "/a%22b")] {
            for (paths, of_raw) in [("paths = \"segments\"\n", 1), ("paths = \"decoded\"\n", 0), ("", 0)] {
                for (pattern, expected) in [(pattern, of_raw), (encoded, 0)] {
                    let rule = format!("[[rule]]\nname = 'a'\nmatch = {{ path = '{pattern}' }}\naction = 'block'");
                    let rules: RuleSet = format!("{paths}{rule}").parse().unwrap();
                    assert_eq!(rules.warnings().len(), expected, "{paths}{pattern}: {:?}", rules.warnings());
                }
            }
        }
    }
}
