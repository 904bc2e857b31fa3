//! `tollgate inspect`: what a key's state means.

mod explained;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use tollgate::{KeyState, Limit, OnChange, RetryAfter};

use crate::escape::shown;
use crate::operation;
use crate::options::{Confirmation, Options};
use crate::output::{Shape, counted, facts, json, micros};
use crate::rule_arguments::{RuleOptions, RulesAndKey, SEE_RULES, usage_of_rules_and_key};
use crate::rules_file::NeededCosts;
use crate::subject::Subject;
use explained::explained;

#[derive(Debug, Args)]
#[command(after_help = SEE_RULES, override_usage = usage_of_rules_and_key!("inspect"))]
pub(crate) struct Inspect {
    #[command(flatten)]
    target: RulesAndKey,
    /// What happens to the key's state if the rule's numbers have changed.
    ///
    /// Default: keep-used, or what a rule in JSON or from --rules says.
    #[arg(long, value_name = "HOW", value_parser = operation::change(), help_heading = "Rule")]
    on_change: Option<OnChange>,
    #[command(flatten)]
    about: RuleOptions,
    #[command(flatten)]
    options: Options,
}

/// A key's state, for other programs.
#[derive(Debug, Serialize)]
struct Report<'a> {
    /// What the limit counts.
    key: String,
    rule: &'a str,
    /// In a service's set, the key of the override whose limits replace the rule's own.
    #[serde(rename = "override", skip_serializing_if = "Option::is_none")]
    overridden: Option<String>,
    limit_text: String,
    redis_key: String,
    /// The shard, from 1, if the limit is decided by its shards.
    #[serde(skip_serializing_if = "Option::is_none")]
    shard: Option<usize>,
    exists: bool,
    ttl_ms: Option<u64>,
    limit: u64,
    remaining: u64,
    retry_after_us: RetryAfter,
    reset_after_us: u64,
    /// The script's own numbers; null if there is no state.
    state: Option<BTreeMap<&'static str, i64>>,
    by: String,
}

/// One limit of the rule with its state or, on a cluster, the states of all its shards.
struct Inspected<'a> {
    subject: &'a Subject,
    limit: &'a Limit,
    /// What it counts.
    key: &'a [u8],
    states: &'a [KeyState],
}

impl Inspect {
    pub(crate) async fn run(self) -> Result<ExitCode> {
        let (mut subject, key) = self.about.ruling(&self.target, NeededCosts::None)?.limits()?;
        if let Some(on_change) = self.on_change {
            subject.rule = subject.rule.on_change(on_change);
        }
        let limiter = self.about.of_service(self.options.limiter_on_redis("look into", Confirmation::default())?)?;
        let parts = subject.parts();
        let states = limiter.inspect(&subject.rule, tollgate::Request::new(&key).parts(&parts)).await?;
        let mut rest = states.as_slice();
        for (at, limit) in subject.rule.limits().enumerate() {
            let shards = usize::try_from(limit.shards()).unwrap_or(usize::MAX).min(rest.len());
            let (states, others) = rest.split_at(shards);
            rest = others;
            let inspected = Inspected { subject: &subject, limit, key: subject.counted(Some(at), &key), states };
            match self.options.shape() {
                Shape::Jsonl => inspected.print_lines(anstream::stdout())?,
                Shape::Table => {
                    if at > 0 {
                        writeln!(anstream::stdout())?;
                    }
                    inspected.print_table(anstream::stdout())?;
                }
            }
        }
        anyhow::Ok(ExitCode::SUCCESS)
    }
}

impl Inspected<'_> {
    fn print_lines(&self, mut out: impl Write) -> io::Result<()> {
        for (at, state) in self.states.iter().enumerate() {
            let shard = (self.states.len() > 1).then_some(at + 1);
            json(&mut out, &Report { shard, ..self.report(state) })?;
        }
        Ok(())
    }

    fn print_table(&self, mut out: impl Write) -> io::Result<()> {
        let count = self.states.len();
        for (at, state) in self.states.iter().enumerate() {
            let mut lines = vec![("rule", self.subject.name().to_owned())];
            if let Some(key) = &self.subject.overridden {
                lines.push(("override", format!("of {}", shown(key.as_bytes()))));
            }
            lines.push(("limit", named(self.limit)));
            if count > 1 {
                lines.push(("shard", format!("{} of {count}", at + 1)));
            }
            lines.extend(explained(state));
            facts(&mut out, &lines)?;
            if count > 1 {
                writeln!(out)?;
            }
        }
        if count > 1 {
            let sum = |units: fn(&KeyState) -> u64| self.states.iter().map(units).sum::<u64>();
            let (remaining, limit) = (sum(|state| state.decision.remaining), sum(|state| state.decision.capacity));
            let all = format!("{remaining} of {} remain, over {count} shards", counted(limit, "unit"));
            facts(&mut out, &[("all", all)])?;
        }
        Ok(())
    }

    fn report<'a>(&'a self, state: &'a KeyState) -> Report<'a> {
        Report {
            key: shown(self.key),
            rule: self.subject.name(),
            overridden: self.subject.overridden.as_ref().map(|key| shown(key.as_bytes())),
            limit_text: self.limit.to_string(),
            redis_key: shown(state.key.as_bytes()),
            shard: None,
            exists: state.exists,
            ttl_ms: state.expires_after.map(|ttl| u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX)),
            limit: state.decision.capacity,
            remaining: state.decision.remaining,
            retry_after_us: state.decision.retry_after,
            reset_after_us: micros(state.decision.reset_after),
            state: state.exists.then(|| state.fields.iter().copied().collect()),
            by: state.decision.by.to_string(),
        }
    }
}

fn named(limit: &Limit) -> String {
    limit.name().map_or_else(|| limit.to_string(), |name| format!("{name}: {limit}"))
}
