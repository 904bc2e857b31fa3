//! What a decision tells an HTTP client, as header fields.

use std::time::Duration;

use crate::algorithm::Algorithm;
use crate::decision::{By, Decision, RetryAfter};
use crate::limit::Calendar;
use crate::quota::Quota;
use crate::rules::Verdict;

/// How a client is told of limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum HeaderStyle {
    /// `RateLimit` and `RateLimit-Policy` of [draft-ietf-httpapi-ratelimit-headers-11][draft].
    ///
    /// [draft]: https://datatracker.ietf.org/doc/draft-ietf-httpapi-ratelimit-headers/11/
    #[default]
    Draft,
    /// `X-RateLimit-Limit`, `X-RateLimit-Remaining` and `X-RateLimit-Reset` (seconds to go), which older clients know.
    Legacy,
    /// All of these.
    Both,
    /// None of these: `Retry-After` alone, of a denial.
    Off,
}

/// A header field: its name in lower case, and its value.
type Field = (&'static str, String);

/// How one limit stands.
struct Standing<'d> {
    quota: &'d Quota,
    remaining: u64,
    /// Whole seconds until more can be taken.
    seconds: Option<u64>,
}

impl Decision {
    /// The header fields that tell an HTTP client how things stand, in any framework. `Retry-After` is the wait of a denial,
    /// rounded up to whole seconds and at least 1; none where waiting doesn't help. Nothing but that is told where Redis was
    /// away and the rule's [policy](crate::OnError) or the engine in this process answered.
    ///
    /// In `RateLimit-Policy`, a limit has its rule's name, or `rule/limit` where the rule has several; `q` is its rate
    /// (not its burst) and `w` its period in seconds, both multiplied where the period is no whole number of seconds.
    /// In `RateLimit`, `r` is what remains and `t` the seconds until a denied request would be allowed or, of an allowed one,
    /// until all is back.
    ///
    /// ```
    /// # #[cfg(feature = "embedded")]
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use tollgate::middleware::HeaderStyle;
    /// use tollgate::{Embedded, Limiter, Rule};
    ///
    /// let limiter = Limiter::new(Embedded::new());
    /// let rule = "token-bucket 6/1m burst 1".parse::<Rule>()?.named("api")?;
    ///
    /// limiter.acquire(&rule, "user:42").await?;
    /// let denied = limiter.acquire(&rule, "user:42").await?;
    /// let told = denied.headers(HeaderStyle::Draft);
    /// assert_eq!(told, [
    ///     ("retry-after", "10".to_owned()),
    ///     ("ratelimit-policy", "\"api\";q=6;w=60".to_owned()),
    ///     ("ratelimit", "\"api\";r=0;t=10".to_owned()),
    /// ]);
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "embedded"))]
    /// # fn main() {}
    /// ```
    #[must_use]
    pub fn headers(&self, style: HeaderStyle) -> Vec<(&'static str, String)> {
        let mut fields = Vec::with_capacity(3);
        fields.extend(retry_after(self));
        if matches!(self.by, By::Policy | By::Local) {
            return fields;
        }
        let standings = self.standings();
        if matches!(style, HeaderStyle::Draft | HeaderStyle::Both) && !standings.is_empty() {
            let list =
                |item: &dyn Fn(&Standing<'_>) -> String| standings.iter().map(item).collect::<Vec<_>>().join(", ");
            let name = |standing: &Standing<'_>| policy_name(standing.quota, self.limits.len() > 1);
            fields.push(("ratelimit-policy", list(&|standing| format!("{}{}", name(standing), terms(standing.quota)))));
            fields.push((
                "ratelimit",
                list(&|standing| {
                    let seconds = standing.seconds.map(|seconds| format!(";t={seconds}")).unwrap_or_default();
                    format!("{};r={}{seconds}", name(standing), standing.remaining)
                }),
            ));
        }
        if matches!(style, HeaderStyle::Legacy | HeaderStyle::Both)
            && let Some(scarcest) = standings.iter().min_by_key(|standing| standing.remaining)
        {
            fields.push(("x-ratelimit-limit", scarcest.quota.rate().to_string()));
            fields.push(("x-ratelimit-remaining", scarcest.remaining.to_string()));
            fields.extend(scarcest.seconds.map(|seconds| ("x-ratelimit-reset", seconds.to_string())));
        }
        fields
    }

    fn standings(&self) -> Vec<Standing<'_>> {
        match &self.quota {
            Some(quota) => {
                let seconds = seconds_left(self.retry_after, self.reset_after);
                vec![Standing { quota, remaining: self.remaining, seconds }]
            }
            None => {
                let standing = |limit: &'_ crate::LimitDecision| -> (u64, Option<u64>) {
                    (limit.remaining, seconds_left(limit.retry_after, limit.reset_after))
                };
                let limits = self.limits.iter().map(|limit| (&limit.quota, standing(limit)));
                limits.map(|(quota, (remaining, seconds))| Standing { quota, remaining, seconds }).collect()
            }
        }
    }
}

impl Verdict {
    /// The header fields that tell an HTTP client how things stand: those of its [decision](Decision::headers), if limits
    /// were asked, and the wait that the rule tells in place of the true one, if it does.
    #[must_use]
    pub fn headers(&self, style: HeaderStyle) -> Vec<(&'static str, String)> {
        let mut fields = self.decision.as_ref().map(|decision| decision.headers(style)).unwrap_or_default();
        if let Some(instead) = self.response.as_ref().and_then(|response| response.retry_after) {
            fields.retain(|(name, _)| *name != "retry-after");
            fields.insert(0, ("retry-after", whole_seconds(instead).max(1).to_string()));
        }
        fields
    }
}

fn retry_after(decision: &Decision) -> Option<Field> {
    match decision.retry_after {
        RetryAfter::After(wait) if !decision.allowed => Some(("retry-after", whole_seconds(wait).max(1).to_string())),
        _ => None,
    }
}

/// Until the request would be allowed or, where it is, until all is back; none where that is now or never.
fn seconds_left(retry_after: RetryAfter, reset_after: Duration) -> Option<u64> {
    let wait = match retry_after {
        RetryAfter::After(wait) => wait,
        RetryAfter::Now => reset_after,
        RetryAfter::Never => return None,
    };
    Some(whole_seconds(wait)).filter(|seconds| *seconds > 0)
}

/// Rounded up.
fn whole_seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}

/// A quoted string of structured fields: names have no character that would have to be escaped.
fn policy_name(quota: &Quota, among_several: bool) -> String {
    match quota.rule() {
        Some(rule) if among_several => format!("\"{rule}/{}\"", quota.label()),
        Some(rule) => format!("\"{rule}\""),
        None => format!("\"{}\"", quota.label()),
    }
}

/// `;q=6;w=60`.
fn terms(quota: &Quota) -> String {
    if quota.algorithm() == Algorithm::Concurrency {
        return format!(";q={};qu=\"concurrent-requests\"", quota.rate());
    }
    match quota.window() {
        None => {}
        Some(Calendar::Day | Calendar::Week) => {
            return format!(";q={};w={}", quota.rate(), quota.period().as_secs());
        }
        // Not all are equally long.
        Some(_) => return format!(";q={}", quota.rate()),
    }
    let us = u64::try_from(quota.period().as_micros()).unwrap_or(u64::MAX);
    // The fewest periods that last whole seconds.
    let periods = 1_000_000 / gcd(us, 1_000_000);
    match (quota.rate().checked_mul(periods), us.checked_mul(periods)) {
        (Some(units), Some(us)) if units < 1_000_000_000_000_000 => format!(";q={units};w={}", us / 1_000_000),
        _ => format!(";q={}", quota.rate()),
    }
}

fn gcd(one: u64, other: u64) -> u64 {
    if other == 0 { one } else { gcd(other, one % other) }
}
