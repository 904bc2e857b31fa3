//! One decision as it is recorded: bounded in size, never containing a key's secret.

use std::fmt::Write;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tollgate::rules::{Attributes, Reason, Verdict};
use tollgate::{DecidedBy, Decision, RetryAfter};

/// Texts are cut off after this.
pub(crate) const MOST_BYTES: usize = 512;
const MOST_BYTES_OF_A_METHOD: usize = 32;
const MOST_BYTES_OF_A_CHARACTER: usize = 4;

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outcome {
    /// Let through.
    Allowed,
    /// Denied by its limits: for now or, if it costs more than they ever admit, always.
    Throttled,
    /// Denied by a rule that blocks, by a block of its user or a temporary block of its key, or because it lacks an
    /// attribute that its rule counts by.
    Blocked,
}

#[derive(Debug)]
pub(super) struct DecisionRecord {
    pub(super) at: SystemTime,
    pub(super) user: Option<Box<str>>,
    pub(super) api_key: Option<Box<str>>,
    pub(super) ip: Option<IpAddr>,
    pub(super) endpoint: Option<Endpoint>,
    pub(super) method: Option<Box<str>>,
    pub(super) rule: Option<Arc<str>>,
    pub(super) outcome: Outcome,
    pub(super) reason: &'static str,
    pub(super) limited_by: Option<Arc<str>>,
    pub(super) used: Option<u64>,
    pub(super) capacity: Option<u64>,
    pub(super) status: Option<u16>,
    /// Microseconds; -1: never.
    pub(super) retry_after: Option<i64>,
    pub(super) latency: Duration,
    /// All that applied, if several did.
    pub(super) rules: Option<Box<str>>,
    /// Whether Redis, or the engine in its place, was asked; `None` if there were no limits, or nothing could be asked.
    pub(super) asked: Option<bool>,
    /// Whether it gets a row of its own, or is only counted.
    pub(super) has_row: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Endpoint {
    /// As a router names it: one of few.
    Route(Box<str>),
    /// As the client wrote it: one of any number.
    Path(Box<str>),
}

impl DecisionRecord {
    pub(super) fn new(request: &Attributes<'_>, verdict: &Verdict, latency: Duration, has_row: bool) -> Self {
        let text_of = |name| request.get(name).map(|value| text(&value, MOST_BYTES));
        let endpoint = text_of("route").map(Endpoint::Route).or_else(|| text_of("path").map(Endpoint::Path));
        let decision = verdict.decision.as_ref();
        let deciding = decision.map(Deciding::of);
        Self {
            at: SystemTime::now(),
            user: text_of("user"),
            api_key: request.key_id().map(|key| text(key.as_bytes(), MOST_BYTES)),
            ip: request.address(),
            endpoint,
            method: request.get("method").map(|method| text(&method, MOST_BYTES_OF_A_METHOD)),
            rule: deciding.as_ref().and_then(|deciding| deciding.rule(verdict)).or_else(|| verdict.rule.clone()),
            outcome: Outcome::of(verdict),
            reason: verdict.reason.name(),
            limited_by: deciding.as_ref().and_then(|deciding| deciding.name.clone()),
            used: deciding.as_ref().map(|deciding| deciding.limit.saturating_sub(deciding.remaining)),
            capacity: deciding.map(|deciding| deciding.limit),
            status: None,
            retry_after: retry_after(verdict),
            latency,
            rules: (!verdict.together.is_empty()).then(|| verdict.together.join(",").into()),
            asked: decision.and_then(|decision| match decision.by {
                DecidedBy::Redis | DecidedBy::Embedded => Some(true),
                DecidedBy::DenialCache | DecidedBy::Lease => Some(false),
                _ => None,
            }),
            has_row,
        }
    }
}

/// The limit that denied or, for an allowed request, the one with the least left.
struct Deciding<'a> {
    of: Option<&'a str>,
    name: Option<Arc<str>>,
    limit: u64,
    remaining: u64,
}

impl<'a> Deciding<'a> {
    /// The limit's rule, if several apply together.
    fn rule(&self, verdict: &Verdict) -> Option<Arc<str>> {
        verdict.together.iter().find(|rule| self.of == Some(&***rule)).cloned()
    }

    fn of(decision: &'a Decision) -> Self {
        let denying = decision.limits.iter().find(|limit| !limit.allowed);
        match denying.or_else(|| decision.limits.iter().min_by_key(|limit| limit.remaining)) {
            Some(limit) => {
                let name = Some(Arc::clone(limit.name()));
                Self { of: limit.rule(), name, limit: limit.capacity, remaining: limit.remaining }
            }
            None => Self { of: None, name: None, limit: decision.capacity, remaining: decision.remaining },
        }
    }
}

/// How long a denied client has to wait.
fn retry_after(verdict: &Verdict) -> Option<i64> {
    let wait = match (&verdict.decision, &verdict.response) {
        _ if verdict.allowed => None,
        (Some(decision), _) if decision.retry_after == RetryAfter::Never => return Some(-1),
        (Some(decision), _) => decision.retry_after.duration(),
        (None, response) => response.as_ref().and_then(|response| response.retry_after),
    };
    wait.map(|wait| i64::try_from(wait.as_micros()).unwrap_or(i64::MAX))
}

impl Outcome {
    fn of(verdict: &Verdict) -> Self {
        let blocked = verdict.decision.as_ref().is_some_and(|decision| decision.blocked);
        match &verdict.reason {
            _ if verdict.allowed => Self::Allowed,
            Reason::Limits if !blocked => Self::Throttled,
            _ => Self::Blocked,
        }
    }

    /// The outcome in a word: allowed, throttled or blocked.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Throttled => "throttled",
            Self::Blocked => "blocked",
        }
    }

    /// Parses one of these words; the table accepts no other.
    pub(super) fn read(word: &str) -> Self {
        match word {
            "allowed" => Self::Allowed,
            "throttled" => Self::Throttled,
            _ => Self::Blocked,
        }
    }
}

impl Endpoint {
    pub(super) fn text(&self) -> &str {
        match self {
            Self::Route(text) | Self::Path(text) => text,
        }
    }
}

/// Text that PostgreSQL can store: bytes that aren't UTF-8, and NUL, as `\xff`; cut off after `most` bytes.
pub(crate) fn text(bytes: &[u8], most: usize) -> Box<str> {
    let mut text = String::with_capacity(bytes.len().min(most));
    for chunk in bytes[..bytes.len().min(most + MOST_BYTES_OF_A_CHARACTER)].utf8_chunks() {
        for (at, part) in chunk.valid().split('\0').enumerate() {
            text.push_str(if at > 0 { "\\x00" } else { "" });
            text.push_str(part);
        }
        // Writing to a string doesn't fail.
        chunk.invalid().iter().for_each(|byte| _ = write!(text, "\\x{byte:02x}"));
        if text.len() > most {
            break;
        }
    }
    text.truncate(end(&text, most));
    text.into()
}

/// As much of a text as its column holds.
pub(super) fn cut(text: &str) -> &str {
    &text[..end(text, MOST_BYTES)]
}

/// The last character boundary within so many bytes.
fn end(text: &str, most: usize) -> usize {
    (0..=most.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_can_be_stored_and_are_bounded() {
        for (given, stored) in [
            (&b"plain"[..], "plain"),
            ("ä€𝄞".as_bytes(), "ä€𝄞"),
            (b"a\0b", "a\\x00b"),
            (b"\0", "\\x00"),
            (b"a\xff\xfeb", "a\\xff\\xfeb"),
            (b"", ""),
        ] {
            assert_eq!(*text(given, 64), *stored);
        }
        assert_eq!(*text("ää".as_bytes(), 3), *"ä");
        assert_eq!(
            (cut("plain"), cut(&"ä".repeat(400)).len(), cut(&format!("x{}", "ä".repeat(400))).len()),
            ("plain", 512, 511)
        );
        assert_eq!(text(&[b'x'; 5000], MOST_BYTES).len(), MOST_BYTES);
        assert!(text(&[0xff; 5000], MOST_BYTES).len() <= MOST_BYTES);
    }
}
