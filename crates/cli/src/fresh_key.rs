//! A key to be blocked or reset that has no state: the prefix or the rule's name is probably wrong, so similar keys are
//! looked for.

use std::collections::{BTreeMap, BTreeSet};

use tollgate::redis::cmd;
use tollgate::{Engine, Limiter, Redis, Request};

use crate::escape::shown;
use crate::messages;
use crate::options::Options;
use crate::rule_arguments::{UNNAMED, is_own_prefix};
use crate::subject::Subject;

/// The most keys that are scanned, of all nodes together, which takes Redis some milliseconds.
const MOST_KEYS: usize = 20_000;
/// Keys for each SCAN.
const STEP: usize = 500;

/// Warns if a key to be blocked or reset has no state. A missing permission or a passed deadline shortens the warning,
/// and isn't an error.
pub(crate) async fn warn(subject: &Subject, limiter: &Limiter, options: &Options, request: Request<'_>) {
    let Ok(states) = limiter.inspect(&subject.rule, request).await else { return };
    if states.iter().any(|state| state.exists) {
        return;
    }
    let names: Vec<_> = states.iter().filter_map(|state| Name::parse(state.key.as_bytes())).collect();
    let Some(first) = names.first() else { return };
    let mut found = Found::new(first, &names);
    // After the deadline, what was found so far is used.
    let _ = tokio::time::timeout(options.deadline(), found.search(options)).await;
    let unused = shown(states.first().map(|state| state.key.as_bytes()).unwrap_or_default());
    let no_state = format!("this key has no state (never used, or expired): {unused}");
    match found.best() {
        Some(likely) => messages::warning(format!("{no_state}; {likely}")),
        None if found.is_rule_used => messages::note(no_state),
        None => messages::note(format!("{no_state}; check --prefix and the rule's name")),
    }
}

/// The parts of a key's name that say which prefix, rule and limit it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Name<'a> {
    prefix: &'a str,
    /// The tag, and the key if it differs.
    subject: &'a [u8],
    rule: &'a str,
    /// With its leading slash; for a call's id, the id with its `#`.
    limit: &'a str,
}

/// What a key has in common with the named key, the most telling first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Likeness {
    /// The subject is used under the same prefix, by another rule or limit.
    SubjectAndPrefix,
    SubjectAndRule,
    Subject,
    Rule,
    /// The same prefix, and one key ends in the other: `42` and `user:42`.
    Ending,
}

/// Keys similar to the named key.
#[derive(Debug)]
struct Found<'a> {
    subjects: BTreeSet<&'a [u8]>,
    limits: BTreeSet<&'a str>,
    first: &'a Name<'a>,
    /// Whether other keys use the rule under this prefix, so that both names are right.
    is_rule_used: bool,
    /// Whether other keys use this limit.
    is_limit_used: bool,
    /// By likeness, prefix and the rule's name: how many there are, and one of them.
    likely: BTreeMap<(Likeness, String, String), (u64, String)>,
}

impl<'a> Name<'a> {
    /// None if it's neither the key of a limit nor the marker of a call's id.
    fn parse(key: &'a [u8]) -> Option<Self> {
        // A prefix can't contain braces.
        let (prefix, rest) = key.split_at(key.iter().position(|byte| *byte == b'{')?);
        let prefix = std::str::from_utf8(prefix.strip_suffix(b":")?).ok()?;
        let (subject, rule) = rest.split_at(rest.iter().rposition(|byte| *byte == b':')?);
        let rule = std::str::from_utf8(&rule[1..]).ok()?;
        let (rule, limit) = rule.split_at(rule.find(['/', '#'])?);
        // The tag of a cached configuration.
        let is_cache = subject.starts_with(b"{%c}");
        (!prefix.is_empty() && subject.contains(&b'}') && !rule.is_empty() && !is_cache).then_some(Self {
            prefix,
            subject,
            rule,
            limit,
        })
    }

    /// Whether one subject ends in a colon and the other.
    fn ends_alike(&self, other: &Name<'_>) -> bool {
        fn inner(subject: &[u8]) -> Option<&[u8]> {
            subject.strip_prefix(b"{")?.strip_suffix(b"}")
        }
        let (Some(one), Some(other)) = (inner(self.subject), inner(other.subject)) else { return false };
        let is_end = |whole: &[u8], end: &[u8]| whole.strip_suffix(end).is_some_and(|start| start.ends_with(b":"));
        is_end(one, other) || is_end(other, one)
    }
}

impl<'a> Found<'a> {
    fn new(first: &'a Name<'a>, names: &[Name<'a>]) -> Self {
        Self {
            subjects: names.iter().map(|name| name.subject).collect(),
            limits: names.iter().map(|name| name.limit).collect(),
            first,
            is_rule_used: false,
            is_limit_used: false,
            likely: BTreeMap::new(),
        }
    }

    /// Scans each node, up to `MOST_KEYS` keys in all: even if the same key is found elsewhere, other keys may use the
    /// rule here.
    async fn search(&mut self, options: &Options) {
        let nodes = match options.redis() {
            Ok(Some(Engine::Redis(redis))) => vec![redis],
            Ok(Some(Engine::Cluster(cluster))) => cluster.primaries(options.deadline()).await.unwrap_or_default(),
            _ => return,
        };
        let steps = (MOST_KEYS / STEP / nodes.len().max(1)).max(1);
        for node in nodes.iter().take(MOST_KEYS / STEP) {
            // If this node doesn't answer, the next one may.
            let _ = self.scan(node, options, steps).await;
        }
    }

    async fn scan(&mut self, node: &Redis, options: &Options, steps: usize) -> Result<(), tollgate::Error> {
        let client = node.client(options.deadline()).await?;
        let Ok(mut connection) = client.get_multiplexed_async_connection().await else { return Ok(()) };
        let mut from = 0_u64;
        for _ in 0..steps {
            let mut scan = cmd("SCAN");
            scan.arg(from).arg("MATCH").arg("*:{*}:*").arg("COUNT").arg(STEP);
            let page = scan.query_async::<(u64, Vec<Vec<u8>>)>(&mut connection).await;
            let Ok((next, keys)) = page else { return Ok(()) };
            keys.iter().for_each(|key| self.note(key));
            if next == 0 {
                break;
            }
            from = next;
        }
        Ok(())
    }

    /// Counts the key if it may be the intended one.
    fn note(&mut self, key: &[u8]) {
        let Some(name) = Name::parse(key).filter(|name| !is_own_prefix(name.prefix)) else { return };
        let is_here = name.prefix == self.first.prefix;
        let is_unnamed = self.first.rule == UNNAMED;
        let is_rule = name.rule == self.first.rule;
        // No service names its rule like this: the tool wrote that key, perhaps by the very mistake warned of here.
        let is_own = name.rule == UNNAMED;
        if is_here && is_rule && !is_own {
            self.is_rule_used = true;
            self.is_limit_used |= self.limits.contains(name.limit);
        }
        let likeness = match (self.subjects.contains(name.subject), is_rule) {
            (true, true) if !is_here => Likeness::SubjectAndRule,
            (true, _) if is_own => return,
            (true, _) if is_here => Likeness::SubjectAndPrefix,
            (true, _) => Likeness::Subject,
            (false, true) if !is_here && !is_unnamed => Likeness::Rule,
            (false, _) if is_here && !is_own && (is_rule || is_unnamed) && name.ends_alike(self.first) => {
                Likeness::Ending
            }
            _ => return,
        };
        let place = (likeness, name.prefix.to_owned(), name.rule.to_owned());
        self.likely.entry(place).or_insert_with(|| (0, shown(key))).0 += 1;
    }

    /// A key of the most similar kind, from the prefix and rule with most of them, and the options that lead there.
    fn best(&self) -> Option<String> {
        let fits = |likeness: Likeness| match likeness {
            Likeness::Ending => true,
            Likeness::SubjectAndPrefix => !self.is_limit_used,
            // These suggest another prefix.
            _ => !self.is_rule_used,
        };
        let likeliest = self.likely.keys().map(|(likeness, ..)| *likeness).find(|likeness| fits(*likeness))?;
        let alike = self.likely.iter().filter(|((likeness, ..), _)| *likeness == likeliest);
        let ((_, prefix, rule), (_, key)) = alike.rev().max_by_key(|(_, (count, _))| *count)?;
        let mut likely = format!("a similar key is in use: {key}");
        let mut options = Vec::new();
        if prefix != self.first.prefix {
            options.push(("--prefix", prefix));
        }
        if rule != self.first.rule && self.first.rule == UNNAMED {
            options.push(("--name", rule));
        }
        // Others may have written that key, and a suggested command is pasted into a shell.
        if !options.is_empty() && options.iter().all(|(_, value)| is_plain(value)) {
            likely.push_str(": try");
            options.iter().for_each(|(option, value)| likely.extend([" ", option, " ", value]));
        }
        Some(likely)
    }
}

/// Whether every shell reads it as one word, and no program as an option.
fn is_plain(word: &str) -> bool {
    !word.starts_with('-') && word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn best(named: &str, keys: &[&str]) -> Option<String> {
        let first = Name::parse(named.as_bytes()).expect(named);
        let mut found = Found::new(&first, &[first]);
        keys.iter().for_each(|key| found.note(key.as_bytes()));
        found.best()
    }

    #[test]
    fn the_most_similar_key_is_named_with_the_options_that_lead_to_it() {
        for (named, keys, expected) in [
            (
                "tollgate:{u}:free/token-bucket-1s",
                &[
                    "a:{v}:free/token-bucket-1s",
                    "b:{v}:free/x",
                    "b:{w}:free/x",
                    "c:{u}:paid/x",
                    "d:{u}:free/token-bucket-1m",
                ][..],
                "a similar key is in use: d:{u}:free/token-bucket-1m: try --prefix d",
            ),
            (
                "tollgate:{u}:free/token-bucket-1s",
                &["a:{v}:free/x", "b:{v}:free/x", "b:{w}:free/x"],
                "a similar key is in use: b:{v}:free/x: try --prefix b",
            ),
            (
                "tollgate:{u}:cli/x",
                &["shop:eu:{u}:api/x"],
                "a similar key is in use: shop:eu:{u}:api/x: try --prefix shop:eu --name api",
            ),
            (
                "tollgate:{u}:cli/x",
                &["tollgate:{u}:api#id"],
                "a similar key is in use: tollgate:{u}:api#id: try --name api",
            ),
            ("s:{u}:free/x", &["s:{u}:free/y", "p:{u}:free/x"], "a similar key is in use: s:{u}:free/y"),
            ("s:{u}:free/x", &["s:{u}:fre/x", "p:{u}:free/x"], "a similar key is in use: s:{u}:fre/x"),
            ("s:{42}:free/x", &["s:{user:42}:free/x", "p:{42}:free/x"], "a similar key is in use: s:{user:42}:free/x"),
            ("s:{42}:cli/x", &["s:{user:42}:free/x"], "a similar key is in use: s:{user:42}:free/x: try --name free"),
            ("s:{u}:cli/x", &["p q:{u}:free/x"], "a similar key is in use: p q:{u}:free/x"),
            ("s:{u}:cli/x", &["s:{u}:$(a)/x"], "a similar key is in use: s:{u}:$(a)/x"),
            (
                "tollgate:{o}:u:free/x",
                &["a:{u}:free/x", "b:{o}:u:free/x"],
                "a similar key is in use: b:{o}:u:free/x: try --prefix b",
            ),
        ] {
            assert_eq!(best(named, keys).as_deref(), Some(expected), "{named}");
        }
    }

    #[test]
    fn no_prefix_is_suggested_if_others_use_the_rule_under_the_given_one() {
        for here in ["s:{v}:free/x", "s:{v}:free/y", "s:{v}:free#id"] {
            assert_eq!(best("s:{u}:free/x", &["p:{u}:free/x", "p:{v}:free/x", here]), None, "{here}");
        }
        assert_eq!(best("s:{u}:free/x", &["s:{v}:free/x", "s:{u}:paid/x"]), None);
    }

    #[test]
    fn a_key_that_is_not_alike_is_not_named() {
        for (named, key) in [
            ("tollgate:{u}:free/x", "tollgate:{v}:free/x"),
            ("tollgate:{u}:cli/x", "shop:{v}:cli/x"),
            ("tollgate:{u}:free/x", "shop:{u}:cli/x"),
            ("tollgate:{u}:free/x", "shop:{v}:paid/x"),
            ("tollgate:{u}:free/x", "session:{u}"),
            ("tollgate:{u}:free/x", "{u}:free/x"),
            ("tollgate:{u}:1/x", "shop:{%c}:users:1/2"),
            ("tollgate:{u}:free/x", "tollgate:load-812-1700000000000000000:{u}:free/x"),
        ] {
            assert_eq!(best(named, &[key]), None, "{named}, {key}");
        }
    }
}
