//! A decision's header fields for HTTP clients.

use std::time::Duration;

use crate::algorithm::Algorithm;
use crate::decision::{DecidedBy, Decision, LimitDecision, RetryAfter};
use crate::quota::Quota;
use crate::rules::{Reason, Verdict};

/// Which header fields a response has: those that its clients read. A service whose clients read different ones sets
/// the fields of [`Verdict::headers`] in both styles itself (`Retry-After` is in each).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum HeaderStyle {
    /// `RateLimit` and `RateLimit-Policy` of [draft-ietf-httpapi-ratelimit-headers-11][draft].
    ///
    /// [draft]: https://datatracker.ietf.org/doc/draft-ietf-httpapi-ratelimit-headers/11/
    #[default]
    Draft,
    /// `X-RateLimit-Limit`, `X-RateLimit-Remaining` and `X-RateLimit-Reset` (seconds from now), which older clients
    /// know. As in the draft, the limit is the rate; what remains is bounded by the burst, which may be less or more.
    XRateLimit,
    /// The same as `RateLimit-Limit`, `RateLimit-Remaining` and `RateLimit-Reset`: the draft's first versions, and what
    /// Envoy's own rate limit service writes.
    RateLimit,
    /// None of these: only `Retry-After` on a denial.
    Off,
}

impl HeaderStyle {
    /// The fields that report one limit alone: its rate, what remains, and the seconds until there is more.
    fn one_limits_fields(self) -> Option<[&'static str; 3]> {
        match self {
            Self::XRateLimit => Some(["x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"]),
            Self::RateLimit => Some(["ratelimit-limit", "ratelimit-remaining", "ratelimit-reset"]),
            Self::Draft | Self::Off => None,
        }
    }
}

/// A header field: its name in lower case, and its value.
type Field = (&'static str, String);

/// The state of one limit.
struct Standing<'d> {
    quota: &'d Quota,
    denies: bool,
    remaining: u64,
    /// Whole seconds until more can be taken, if known.
    seconds: Option<u64>,
}

/// How soon a client that found no permit may retry: permits are usually given back long before they expire.
const NEXT_LOOK: Duration = Duration::from_secs(1);

/// The largest integer in structured fields.
const LARGEST: u64 = 999_999_999_999_999;

impl Decision {
    /// The header fields that report the decision to an HTTP client, in any framework. `Retry-After` is a denial's
    /// wait, rounded up to whole seconds and at least 1; it is 1 if only permits are missing, and absent if waiting
    /// doesn't help. There are no other fields if Redis was unreachable and the rule's [policy](crate::OnError) or the
    /// engine in this process answered.
    ///
    /// In `RateLimit-Policy`, a limit has its rule's name, or `rule/limit` if the rule has several; `q` is its rate
    /// (not its burst) and `w` its period in seconds, both multiplied if the period is no whole number of seconds;
    /// there is no `w` for months and years, nor for days and weeks in a time zone whose clocks change. In `RateLimit`,
    /// `r` is what remains (for a limit with shards, on a cluster, an estimate: what remains of one, times their
    /// number), and `t` the seconds until there is more: for a limit that denies, until it would allow the same
    /// request; for one that allows, until the window ends, if the limit has fixed windows.
    ///
    /// ```
    /// # #[cfg(feature = "embedded")]
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use tollgate::middleware::HeaderStyle;
    /// use tollgate::{Embedded, Limiter, Rule};
    ///
    /// let limiter = Limiter::new(Embedded::new());
    /// let rule = Rule::new("api", "token-bucket 6/1m burst 1")?;
    ///
    /// limiter.acquire(&rule, "user:42").await?;
    /// let denied = limiter.acquire(&rule, "user:42").await?;
    /// let fields = denied.headers(HeaderStyle::Draft);
    /// assert_eq!(fields, [
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
        self.fields(style, self.wait())
    }

    /// A denial's `Retry-After`, if waiting helps.
    fn wait(&self) -> Option<Duration> {
        let wait = self.retry_after.duration().filter(|wait| !self.allowed && !wait.is_zero())?;
        if self.blocked {
            return Some(wait);
        }
        let holds = |limit: &LimitDecision| limit.quota.algorithm() == Algorithm::Concurrency;
        if !self.limits.iter().any(|limit| !limit.allowed && holds(limit)) {
            return Some(wait);
        }
        let waits = self.limits.iter().filter_map(|limit| {
            let wait = limit.retry_after.duration()?;
            Some(if holds(limit) { wait.min(NEXT_LOOK) } else { wait })
        });
        waits.max()
    }

    /// With this wait instead of the true one.
    fn fields(&self, style: HeaderStyle, wait: Option<Duration>) -> Vec<Field> {
        let mut fields = Vec::with_capacity(3);
        fields.extend(wait.map(retry_after));
        if matches!(self.by, DecidedBy::Policy(_) | DecidedBy::Local(_)) {
            return fields;
        }
        let mut standings = self.standings();
        if wait != self.wait() {
            // `Retry-After` may not be earlier.
            standings.iter_mut().for_each(|standing| standing.seconds = None);
        }
        if style == HeaderStyle::Draft && !standings.is_empty() {
            let list =
                |item: &dyn Fn(&Standing<'_>) -> String| standings.iter().map(item).collect::<Vec<_>>().join(", ");
            let name = |standing: &Standing<'_>| format!("\"{}\"", policy_name(standing.quota, self.limits.len() > 1));
            fields.push(("ratelimit-policy", list(&|standing| format!("{}{}", name(standing), terms(standing.quota)))));
            fields.push((
                "ratelimit",
                list(&|standing| {
                    let seconds = standing.seconds.map(|seconds| format!(";t={seconds}")).unwrap_or_default();
                    format!("{};r={}{seconds}", name(standing), standing.remaining.min(LARGEST))
                }),
            ));
        }
        if let Some([limit, remaining, reset]) = style.one_limits_fields()
            && let Some(told) = standings.iter().min_by_key(|standing| (!standing.denies, standing.remaining))
        {
            fields.push((limit, told.quota.rate().to_string()));
            fields.push((remaining, told.remaining.to_string()));
            fields.extend(told.seconds.map(|seconds| (reset, seconds.to_string())));
        }
        fields
    }

    fn standings(&self) -> Vec<Standing<'_>> {
        let standings = self.limits.iter().map(|limit| {
            let LimitDecision { quota, allowed, .. } = limit;
            // If another limit denied, this one took nothing and has no wait to report.
            let says = self.allowed || !allowed;
            let seconds = seconds_left(quota, *allowed, limit.retry_after, limit.reset_after).filter(|_| says);
            let remaining = of_all_shards(quota, limit.capacity, limit.remaining);
            Standing { quota, denies: !allowed, remaining, seconds }
        });
        standings.collect()
    }
}

impl Verdict {
    /// The header fields that report the verdict to an HTTP client: those of its [decision](Decision::headers), if
    /// limits were asked, with the rule's `retry_after` instead of the true wait, if it has one and waiting helps.
    #[must_use]
    pub fn headers(&self, style: HeaderStyle) -> Vec<(&'static str, String)> {
        match &self.decision {
            Some(decision) => decision.fields(style, self.wait()),
            None => self.wait().map(retry_after).into_iter().collect(),
        }
    }

    /// The wait that `Retry-After` gives: the rule's own, or the true one. None if the request is allowed, or waiting
    /// doesn't help.
    #[must_use]
    pub fn wait(&self) -> Option<Duration> {
        let instead = self.response.as_ref().and_then(|response| response.retry_after);
        match (&self.decision, &self.reason) {
            (Some(decision), _) => decision.wait().map(|wait| instead.unwrap_or(wait)),
            (None, Reason::Blocked | Reason::UserBlocked(_)) => instead,
            _ => None,
        }
    }
}

fn retry_after(wait: Duration) -> Field {
    ("retry-after", whole_seconds(wait).max(1).to_string())
}

/// What remains of a limit, as far as one of its shards tells, of which these are the capacity and what remains.
fn of_all_shards(quota: &Quota, capacity: u64, remaining: u64) -> u64 {
    let whole = u128::from(quota.capacity()).max(u128::from(capacity));
    let all = u128::from(remaining) * whole / u128::from(capacity.max(1));
    u64::try_from(all.min(whole)).unwrap_or(u64::MAX).max(remaining)
}

/// The time until there is more, if known; none if that is now or never.
fn seconds_left(quota: &Quota, allowed: bool, retry_after: RetryAfter, reset_after: Duration) -> Option<u64> {
    let wait = match (retry_after, quota.algorithm()) {
        // Permits are usually given back long before they expire.
        (_, Algorithm::Concurrency) | (RetryAfter::Never, _) => return None,
        (RetryAfter::After(wait), _) if !allowed => wait,
        (_, Algorithm::CalendarWindow) => reset_after,
        // It may be several windows until it is full, or free of debt: there is more when this window ends.
        (_, Algorithm::FixedWindow) if !reset_after.is_zero() => to_the_end_of_a_window(reset_after, quota.period()),
        // A continuously refilling limit has more sooner than it is full, and of logs it isn't known when the oldest
        // entry leaves.
        (_, Algorithm::TokenBucket | Algorithm::FixedWindow | Algorithm::SlidingWindow | Algorithm::SlidingLog) => {
            return None;
        }
    };
    Some(whole_seconds(wait)).filter(|seconds| *seconds > 0)
}

/// A limit that is full after this time is full at the end of a window.
fn to_the_end_of_a_window(reset_after: Duration, period: Duration) -> Duration {
    let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    match us(reset_after) % us(period).max(1) {
        0 => period,
        rest => Duration::from_micros(rest),
    }
}

/// Rounded up.
fn whole_seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}

/// A limit's name for clients, to be quoted: names contain no character that needs escaping.
pub(super) fn policy_name(quota: &Quota, among_several: bool) -> String {
    match quota.rule() {
        Some(rule) if among_several => format!("{rule}/{}", quota.label()),
        Some(rule) => rule.to_owned(),
        None => quota.label().to_owned(),
    }
}

/// `;q=6;w=60`.
fn terms(quota: &Quota) -> String {
    let rate = quota.rate().min(LARGEST);
    if quota.algorithm() == Algorithm::Concurrency {
        return format!(";q={rate};qu=\"concurrent-requests\"");
    }
    if !quota.has_even_periods() {
        return format!(";q={rate}");
    }
    let us = u64::try_from(quota.period().as_micros()).unwrap_or(u64::MAX);
    // The fewest periods that add up to whole seconds.
    let periods = 1_000_000 / gcd(us, 1_000_000);
    match (quota.rate().checked_mul(periods), us.checked_mul(periods)) {
        (Some(units), Some(us)) if units <= LARGEST => format!(";q={units};w={}", us / 1_000_000),
        _ => format!(";q={rate}"),
    }
}

fn gcd(one: u64, other: u64) -> u64 {
    if other == 0 { one } else { gcd(other, one % other) }
}
