//! What a Redis key stands for, from its name: the reverse of the encoding that `lua/sharing.md` documents.

use serde::Serialize;

use crate::escape::shown;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KeyName {
    /// What the limit counts, as the rest of the tool shows it.
    pub(super) key: String,
    pub(super) shard: Option<u32>,
    pub(super) of: Label,
}

/// The rule and limit that a key belongs to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub(super) struct Label {
    /// What follows the prefix, such as the name that a load gives itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) under: Option<String>,
    pub(super) rule: String,
    /// None for the marker of a call's id.
    pub(super) limit: Option<String>,
}

/// Digits of a hash that are shown: enough to tell two keys apart.
const HASH_DIGITS: usize = 12;

impl KeyName {
    /// `None` if the key is neither of a limit nor the marker of a call's id, under this prefix or one that begins with
    /// it.
    pub(super) fn parse(name: &[u8], prefix: &str) -> Option<Self> {
        let rest = name.strip_prefix(prefix.as_bytes())?.strip_prefix(b":")?;
        let (under, rest) = split_once(rest, b'{')?;
        let under = match under.strip_suffix(b":") {
            Some(under) => Some(shown(under)),
            None if under.is_empty() => None,
            None => return None,
        };
        let (tag, rest) = split_once(rest, b'}')?;
        let rest = rest.strip_prefix(b":")?;
        let (key, last) = match rest.iter().rposition(|byte| *byte == b':') {
            Some(at) => (Some(&rest[..at]), &rest[at + 1..]),
            None => (None, rest),
        };
        let (tag, shard) = without_shard(tag);
        if tag.starts_with(b"%c") {
            // A cached configuration.
            return None;
        }
        Some(Self { key: decoded(key.unwrap_or(tag)), shard, of: Label::parse(under, last)? })
    }

    pub(super) fn is_marker(&self) -> bool {
        self.of.limit.is_none()
    }
}

impl Label {
    fn parse(under: Option<String>, last: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(last).ok()?;
        let at = text.find(['/', '#'])?;
        let (rule, rest) = text.split_at(at);
        let limit = rest.strip_prefix('/').map(str::to_owned);
        (!rule.is_empty() && rest.len() > 1).then(|| Self { under, rule: rule.to_owned(), limit })
    }

    pub(super) fn text(&self) -> String {
        let Self { under, rule, limit } = self;
        let under = under.as_ref().map(|under| format!(" under {under}")).unwrap_or_default();
        limit.as_ref().map_or_else(|| format!("{rule} (ids){under}"), |limit| format!("{rule}/{limit}{under}"))
    }
}

/// A tag without the number of its shard: a key's own `%` is always followed by two hexadecimal digits.
fn without_shard(tag: &[u8]) -> (&[u8], Option<u32>) {
    let shard = tag.windows(2).rposition(|two| two == b"%s").and_then(|at| {
        let number = std::str::from_utf8(&tag[at + 2..]).ok()?.parse().ok()?;
        Some((&tag[..at], Some(number)))
    });
    shard.unwrap_or((tag, None))
}

fn decoded(text: &[u8]) -> String {
    let digits = |hash: &[u8]| String::from_utf8_lossy(&hash[..hash.len().min(HASH_DIGITS)]).into_owned();
    if let Some(hash) = text.strip_prefix(b"%h") {
        return format!("(hashed) {}", digits(hash));
    }
    if let Some(hash) = text.strip_prefix(b"#") {
        return format!("(long) {}", digits(hash));
    }
    let (mut bytes, mut rest) = (Vec::with_capacity(text.len()), text);
    while let Some((first, others)) = rest.split_first() {
        let escaped = (*first == b'%').then(|| others.get(..2)).flatten().and_then(|two| {
            let two = std::str::from_utf8(two).ok()?;
            u8::from_str_radix(two, 16).ok()
        });
        bytes.push(escaped.unwrap_or(*first));
        rest = if escaped.is_some() { &others[2..] } else { others };
    }
    shown(&bytes)
}

fn split_once(bytes: &[u8], at: u8) -> Option<(&[u8], &[u8])> {
    let place = bytes.iter().position(|byte| *byte == at)?;
    Some((&bytes[..place], &bytes[place + 1..]))
}

#[cfg(test)]
mod tests {
    use tollgate::{Cluster, Embedded, KeySecret, Limiter, Request, Rule};

    use super::*;

    fn rule(text: &str) -> Rule {
        Rule::new("api", text).expect("a rule")
    }

    /// The names that the library itself gives to this request's keys, as parsed here.
    fn read<'a>(limiter: &Limiter, rule: &Rule, request: impl Into<Request<'a>>) -> Vec<KeyName> {
        let keys = limiter.keys(rule, request).expect("keys");
        keys.iter().map(|key| KeyName::parse(key.as_bytes(), "shop").unwrap_or_else(|| panic!("{key}"))).collect()
    }

    #[test]
    fn every_name_that_the_library_gives_is_read_as_the_key_it_was_given_for() {
        let limiter = Limiter::builder(Embedded::new()).prefix("shop").expect("a prefix").build();
        let two = rule("token-bucket 10/1s, fixed-window 250/1d");
        for key in ["user:42", "2001:db8::1", "a}{b", "50%", "%s3", "a%s3", "%41", "\0", "caf\u{e9}", "x y/z#1"] {
            let names = read(&limiter, &two, key);
            let limits: Vec<_> = names.iter().map(|name| name.of.text()).collect();
            assert_eq!(limits, ["api/token-bucket-1s", "api/fixed-window-1d"]);
            assert!(names.iter().all(|name| name.key == shown(key.as_bytes()) && name.shard.is_none()), "{names:?}");
        }
        let named =
            "token-bucket 10/1s".parse::<tollgate::Limit>().and_then(|limit| limit.named("orgs")).expect("a limit");
        let names = read(&limiter, &Rule::new("api", named).expect("a rule"), "user:42");
        assert_eq!((names[0].key.as_str(), names[0].of.text().as_str()), ("user:42", "api/orgs/token-bucket"));
        let cluster = Cluster::open("redis-cluster://127.0.0.1").expect("a good address");
        let on_cluster = Limiter::builder(cluster).prefix("shop").expect("a prefix").build();
        let sharded = read(&on_cluster, &rule("token-bucket 100/1s shards 12"), "user:42%s1");
        let shards: Vec<_> = sharded.iter().map(|name| name.shard).collect();
        assert_eq!(shards, (0..12).map(Some).collect::<Vec<_>>());
        assert!(sharded.iter().all(|name| name.key == "user:42%s1"), "{sharded:?}");
    }

    #[test]
    fn a_key_beside_a_tag_is_the_key() {
        let limiter = Limiter::builder(Embedded::new()).prefix("shop").expect("a prefix").build();
        let tagged = rule("token-bucket 10/1s").tagged("org").expect("a part");
        let parts: [(&str, &[u8]); 1] = [("org", b"acme:1")];
        let names = read(&limiter, &tagged, Request::new("user:7").parts(&parts));
        assert_eq!((names[0].key.as_str(), names[0].of.text().as_str()), ("user:7", "api/token-bucket-1s"));
    }

    #[test]
    fn what_is_hashed_is_said_to_be_and_shown_in_part() {
        let secret = KeySecret::new("0123456789abcdef0123456789abcdef").expect("a secret");
        let hashing = Limiter::builder(Embedded::new()).prefix("shop").expect("a prefix").key_secret(&secret).build();
        let names = read(&hashing, &rule("token-bucket 10/1s"), "alice@example.com");
        assert_eq!(names[0].key, "(hashed) 841240d2a5b6");
        let limiter = Limiter::builder(Embedded::new()).prefix("shop").expect("a prefix").build();
        let long = "x".repeat(1 << 20);
        let names = read(&limiter, &rule("token-bucket 10/1s"), long.as_str());
        assert!(names[0].key.starts_with("(long) ") && names[0].key.len() < 30, "{}", names[0].key);
    }

    #[test]
    fn other_keys_are_none_and_a_marker_is_one() {
        for name in [
            &b"shop:{a}:api"[..],
            b"shop:{a}",
            b"shop:{a:api/x",
            b"shopper:{a}:api/x",
            b"session:1",
            b"",
            b"shop:{%c}:users:1/2",
            b"shop:{a}:\xff/x",
            b"shop:{a}:/x",
            b"shop:{a}:api/",
            b"shop:x{a}:api/y",
        ] {
            assert_eq!(KeyName::parse(name, "shop"), None, "{}", shown(name));
        }
        let marker = KeyName::parse(b"shop:{a}:api#token-bucket-1s-job-7", "shop").expect("a marker");
        assert!(marker.is_marker());
        assert_eq!(marker.of.text(), "api (ids)");
        let of_load = KeyName::parse(b"shop:load-7:{a}:cli/token-bucket-1s", "shop").expect("a load's key");
        assert_eq!((of_load.key.as_str(), of_load.of.text().as_str()), ("a", "cli/token-bucket-1s under load-7"));
    }
}
