//! `tollgate inspect`: what a key's state means.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use tollgate::{Algorithm, Change, RetryAfter, Rule, State};

use crate::Outcome;
use crate::options::{self, Options, Shape};
use crate::output::{facts, human, json, micros, timestamp};

#[derive(Debug, Args)]
pub(crate) struct Inspect {
    /// The rule, such as "token-bucket 5/10s".
    rule: String,
    /// Whom it counts: any bytes.
    key: OsString,
    /// As of a probe: what becomes of the key's state where the rule's numbers have changed.
    #[arg(long, value_name = "HOW", default_value = "keep-used")]
    on_change: Change,
    #[command(flatten)]
    options: Options,
}

/// A key's state, for other programs.
#[derive(Debug, Serialize)]
struct Report<'a> {
    key: Cow<'a, str>,
    rule: &'a str,
    limit_text: String,
    redis_key: &'a str,
    /// From 1, of a limit that has some.
    #[serde(skip_serializing_if = "Option::is_none")]
    shard: Option<usize>,
    exists: bool,
    ttl_ms: Option<u64>,
    limit: u64,
    remaining: u64,
    retry_after_us: RetryAfter,
    reset_after_us: u64,
    /// The script's own numbers; null without a state.
    state: Option<BTreeMap<&'static str, i64>>,
    by: String,
}

impl Inspect {
    pub(crate) async fn run(self) -> Outcome {
        let rule = options::rule(std::slice::from_ref(&self.rule))?.on_change(self.on_change);
        let limiter = self.options.limiter()?;
        let key = self.key.as_encoded_bytes();
        let shape = self.options.shape();
        let states = limiter.inspect(&rule, key).await?;
        let count = states.len();
        for (at, state) in states.iter().enumerate() {
            let shard = (count > 1).then_some(at + 1);
            match shape {
                Shape::Jsonl => {
                    let report = Report { shard, ..report(&rule, String::from_utf8_lossy(key), state) };
                    json(anstream::stdout(), &report)?;
                }
                Shape::Table => {
                    let mut lines = explained(&rule, state);
                    if let Some(shard) = shard {
                        lines.insert(1, ("shard", format!("{shard} of {count}")));
                    }
                    facts(anstream::stdout(), &lines)?;
                    if count > 1 {
                        anstream::println!();
                    }
                }
            }
        }
        if count > 1 && shape == Shape::Table {
            let sum = |units: fn(&State) -> u64| states.iter().map(units).sum::<u64>();
            let (remaining, limit) = (sum(|state| state.decision.remaining), sum(|state| state.decision.limit));
            let all = format!("{remaining} of {limit} units remain, over {count} shards");
            facts(anstream::stdout(), &[("all", all)])?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn report<'a>(rule: &'a Rule, key: Cow<'a, str>, state: &'a State) -> Report<'a> {
    Report {
        key,
        rule: rule.name().unwrap_or_default(),
        limit_text: rule.to_string(),
        redis_key: &state.key,
        shard: None,
        exists: state.exists,
        ttl_ms: state.expires_after.map(|ttl| u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX)),
        limit: state.decision.limit,
        remaining: state.decision.remaining,
        retry_after_us: state.decision.retry_after,
        reset_after_us: micros(state.decision.reset_after),
        state: state.exists.then(|| state.fields.iter().copied().collect()),
        by: state.decision.by.to_string(),
    }
}

fn explained(rule: &Rule, state: &State) -> Vec<(&'static str, String)> {
    let decision = &state.decision;
    let full = if decision.reset_after.is_zero() {
        "as if never used".to_owned()
    } else {
        format!("as if never used in {}", human(decision.reset_after))
    };
    let next = match decision.retry_after {
        RetryAfter::Now => "a request of cost 1 is allowed now".to_owned(),
        RetryAfter::After(wait) => format!("a request of cost 1 is denied, and allowed in {}", human(wait)),
        RetryAfter::Never => "a request of cost 1 is never allowed".to_owned(),
    };
    let mut lines = vec![
        ("rule", rule.to_string()),
        ("redis key", state.key.clone()),
        ("remaining", format!("{} of {} units, {full}", decision.remaining, decision.limit)),
        ("next", next),
    ];
    if !state.exists {
        lines.push(("state", "none".to_owned()));
        return lines;
    }
    let expiry = state.expires_after.map_or_else(|| "never".to_owned(), |ttl| format!("in {}", human(ttl)));
    lines.push(("expires", expiry));
    let value = |name: &str| state.fields.iter().find(|(field, _)| *field == name).map(|(_, value)| *value);
    // A bucket's level is kept in parts of a unit, a window's in whole ones.
    let scaled = rule.limits().any(|limit| limit.algorithm() == Algorithm::TokenBucket);
    for (name, number) in &state.fields {
        lines.push((name, decoded(name, *number, scaled, value("state_period"))));
    }
    if let (Some(lead), Some(rate), Some(tick)) = (value("lead"), value("state_rate"), value("state_tick")) {
        let ahead = lead.max(0).unsigned_abs().div_ceil(rate.max(1).unsigned_abs()) * tick.max(0).unsigned_abs();
        let arrival = value("time_us").unwrap_or(0).max(0).unsigned_abs() + ahead;
        lines.push(("arrival", format!("{}, {} ahead", timestamp(arrival), human(Duration::from_micros(ahead)))));
    }
    lines
}

/// A number of the state in the units that people think in, and as it stands.
fn decoded(name: &str, number: i64, scaled: bool, period: Option<i64>) -> String {
    let precise = |value: f64| format!("{value:.6}").trim_end_matches('0').trim_end_matches('.').to_owned();
    match (name, period) {
        ("blocked_us" | "overage" | "first_us" | "last_us", _) if number == 0 => "-".to_owned(),
        ("blocked_us", _) => format!("for {}", human(Duration::from_micros(number.max(0).unsigned_abs()))),
        (name, ..) if name.ends_with("_us") => u64::try_from(number).map_or_else(|_| number.to_string(), timestamp),
        ("level", Some(period)) if scaled => {
            format!("{} units ({number} / {period})", precise(number as f64 / period as f64))
        }
        ("lead", Some(period)) => format!("{} units ({number} / {period})", precise(number as f64 / period as f64)),
        _ => number.to_string(),
    }
}
