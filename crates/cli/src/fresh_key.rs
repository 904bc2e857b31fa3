//! A key to be blocked or reset that has no state: probably the prefix or the rule's name isn't the service's, so
//! others are looked for.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

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

/// Warns if a key to be blocked or reset has no state. A missing right or too little time makes the warning shorter,
/// and is no error.
pub(crate) async fn warn(subject: &Subject, limiter: &Limiter, options: &Options, request: Request<'_>) {
    let Ok(states) = limiter.inspect(&subject.rule, request).await else { return };
    if states.iter().any(|state| state.exists) {
        return;
    }
    let names: Vec<_> = states.iter().filter_map(|state| Name::parse(state.key.as_bytes())).collect();
    let Some(first) = names.first() else { return };
    let mut found = Found { subjects: names.iter().map(|name| name.subject).collect(), first, likely: BTreeMap::new() };
    // What was found in time counts.
    let _ = tokio::time::timeout(options.deadline(), found.search(options)).await;
    let unused = shown(states.first().map(|state| state.key.as_bytes()).unwrap_or_default());
    match found.best() {
        Some(likely) => messages::warning(format!("nobody has used this key yet: {unused}; {likely}")),
        None => messages::note(format!(
            "nobody has used this key yet: {unused}; --prefix, and without --rules --name, choose others"
        )),
    }
}

/// The name of a key, as far as it says where it belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Name<'a> {
    prefix: &'a str,
    /// The tag, and the key if it is another.
    subject: &'a [u8],
    rule: &'a str,
}

/// What a key has in common with the one that was named; the first says most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Likeness {
    SubjectAndRule,
    Subject,
    Rule,
}

/// Keys that are like the one that was named.
#[derive(Debug)]
struct Found<'a> {
    subjects: BTreeSet<&'a [u8]>,
    first: &'a Name<'a>,
    /// By likeness, prefix and the rule's name: how many there are, and one of them.
    likely: BTreeMap<(Likeness, String, String), (u64, String)>,
}

impl<'a> Name<'a> {
    /// None if it isn't the key of a limit, nor the marker of a call's id.
    fn parse(key: &'a [u8]) -> Option<Self> {
        // No prefix has braces.
        let (prefix, rest) = key.split_at(key.iter().position(|byte| *byte == b'{')?);
        let prefix = std::str::from_utf8(prefix.strip_suffix(b":")?).ok()?;
        let (subject, rule) = rest.split_at(rest.iter().rposition(|byte| *byte == b':')?);
        let rule = std::str::from_utf8(&rule[1..]).ok()?;
        let rule = &rule[..rule.find(['/', '#'])?];
        // The tag of a cached configuration.
        let is_cache = subject.starts_with(b"{%c}");
        (!prefix.is_empty() && subject.contains(&b'}') && !rule.is_empty() && !is_cache).then_some(Self {
            prefix,
            subject,
            rule,
        })
    }
}

impl Found<'_> {
    /// Scans each node until it finds the same key of the same rule elsewhere, or has seen enough.
    async fn search(&mut self, options: &Options) {
        let nodes = match options.redis() {
            Ok(Some(Engine::Redis(redis))) => vec![redis],
            Ok(Some(Engine::Cluster(cluster))) => cluster.primaries(options.deadline()).await.unwrap_or_default(),
            _ => return,
        };
        let steps = (MOST_KEYS / STEP / nodes.len().max(1)).max(1);
        for node in nodes.iter().take(MOST_KEYS / STEP) {
            // Where this one doesn't answer, the next one may.
            let _ = self.scan(node, options, steps).await;
            if self.is_certain() {
                break;
            }
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
            if next == 0 || self.is_certain() {
                break;
            }
            from = next;
        }
        Ok(())
    }

    fn is_certain(&self) -> bool {
        self.likely.first_key_value().is_some_and(|((likeness, ..), _)| *likeness == Likeness::SubjectAndRule)
    }

    /// Counts the key if an option leads to it.
    fn note(&mut self, key: &[u8]) {
        let Some(name) = Name::parse(key).filter(|name| !is_own_prefix(name.prefix)) else { return };
        let is_elsewhere = name.prefix != self.first.prefix;
        // Whoever named a rule may well mean one that nobody has used yet.
        let is_unnamed = self.first.rule == UNNAMED;
        let likeness = match (self.subjects.contains(name.subject), name.rule == self.first.rule) {
            (true, true) if is_elsewhere => Likeness::SubjectAndRule,
            // No service names its rule so: this tool has made that key, perhaps by the mistake that is warned of here.
            (true, false) if name.rule == UNNAMED => return,
            (true, false) if is_elsewhere || is_unnamed => Likeness::Subject,
            (false, true) if is_elsewhere && !is_unnamed => Likeness::Rule,
            _ => return,
        };
        let place = (likeness, name.prefix.to_owned(), name.rule.to_owned());
        self.likely.entry(place).or_insert_with(|| (0, shown(key))).0 += 1;
    }

    /// One of the most similar keys, where there are most of them, and the options that lead there.
    fn best(&self) -> Option<String> {
        let likeliest = self.likely.first_key_value()?.0.0;
        let alike = self.likely.iter().filter(|((likeness, ..), _)| *likeness == likeliest);
        let ((_, prefix, rule), (_, key)) = alike.rev().max_by_key(|(_, (count, _))| *count)?;
        let mut likely = format!("there is {key}: try");
        if prefix != self.first.prefix {
            let _ = write!(likely, " --prefix {}", shown(prefix.as_bytes()));
        }
        if rule != self.first.rule && self.first.rule == UNNAMED {
            let _ = write!(likely, " --name {rule}");
        }
        Some(likely)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn best(named: &str, keys: &[&str]) -> Option<String> {
        let first = Name::parse(named.as_bytes()).expect(named);
        let mut found = Found { subjects: [first.subject].into(), first: &first, likely: BTreeMap::new() };
        keys.iter().for_each(|key| found.note(key.as_bytes()));
        found.best()
    }

    #[test]
    fn the_most_similar_key_is_named_with_the_options_that_lead_to_it() {
        for (named, keys, expected) in [
            (
                "tollgate:{u}:free/gcra-1s",
                &["a:{v}:free/gcra-1s", "b:{v}:free/x", "b:{w}:free/x", "c:{u}:paid/x", "d:{u}:free/gcra-1m"][..],
                "there is d:{u}:free/gcra-1m: try --prefix d",
            ),
            (
                "tollgate:{u}:free/gcra-1s",
                &["a:{v}:free/x", "b:{v}:free/x", "b:{w}:free/x"],
                "there is b:{v}:free/x: try --prefix b",
            ),
            (
                "tollgate:{u}:cli/x",
                &["shop:eu:{u}:api/x"],
                "there is shop:eu:{u}:api/x: try --prefix shop:eu --name api",
            ),
            ("tollgate:{u}:cli/x", &["tollgate:{u}:api#id"], "there is tollgate:{u}:api#id: try --name api"),
            ("tollgate:{o}:u:free/x", &["a:{u}:free/x", "b:{o}:u:free/x"], "there is b:{o}:u:free/x: try --prefix b"),
        ] {
            assert_eq!(best(named, keys).as_deref(), Some(expected), "{named}");
        }
    }

    #[test]
    fn a_key_that_no_option_leads_to_is_not_named() {
        for (named, key) in [
            ("tollgate:{u}:free/x", "tollgate:{v}:free/x"),
            ("tollgate:{u}:free/x", "tollgate:{u}:paid/x"),
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
