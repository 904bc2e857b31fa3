//! `tollgate audit`: why a user was denied, from recorded decisions.

use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::Args;
use serde_json::{Value, json};
use tollgate::RetryAfter;
use tollgate_record::history::{AuditQuery, AuditRecord};

use crate::database_output::{Fields, print_all};
use crate::db::Database;
use crate::found;
use crate::messages::note;
use crate::options::{Output, from_one};
use crate::output::{Shape, human, micros};
use crate::time_options::{moment, span, times};

#[derive(Debug, Args)]
pub(crate) struct Audit {
    /// The user, as rules count it: what follows `user:` in a key.
    #[arg(long, value_name = "USER")]
    user: String,
    /// When: a minute (14:03), a second (14:03:07) or a day (2026-11-23).
    ///
    /// In UTC unless it has an offset (2026-11-23T14:03:07+01:00). A time without a day is the most recent one.
    #[arg(long, value_name = "TIME", required_unless_present = "from")]
    at: Option<String>,
    /// Start at this time instead.
    #[arg(long, value_name = "TIME", conflicts_with = "at")]
    from: Option<String>,
    /// Up to the end of this day, minute or second. Default: now.
    #[arg(long, value_name = "TIME", requires = "from")]
    to: Option<String>,
    /// Only denials.
    #[arg(long)]
    denied: bool,
    /// Show at most this many decisions, the last ones.
    #[arg(long, value_name = "N", default_value = "100", value_parser = from_one::<u32, 1_000_000>)]
    most: u32,
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    database: Database,
}

/// Rows younger than this are never archived.
const ARCHIVED_AFTER: jiff::SignedDuration = jiff::SignedDuration::from_hours(31 * 24);

impl Audit {
    pub(crate) async fn run(self) -> Result<ExitCode> {
        ensure!(!self.user.is_empty(), "user: the name is empty");
        let now = jiff::Timestamp::now();
        let range = match (&self.at, &self.from, &self.to) {
            (Some(at), _, _) => moment("--at", at, now)?,
            (None, Some(from), to) => span(from, to.as_deref(), now)?,
            (None, None, _) => now..now,
        };
        let (from, to) = times(&range);
        let query = AuditQuery::new(&self.user, from, to).most(self.most);
        let query = if self.denied { query.only_denied() } else { query };
        let records = self.database.open()?.audit(&query).await?;
        if records.is_empty() {
            let what = if self.denied { "no denial" } else { "no decision" };
            note(format!("{what} of this user is recorded from {} to {}", range.start, range.end));
        }
        if range.start < now.checked_sub(ARCHIVED_AFTER).unwrap_or(now) {
            note("months that were archived are not in the database: see tollgate archive query");
        }
        if records.len() == self.most as usize {
            note(format!("only the last {}: see --most", self.most));
        }
        let shape = self.output.shape();
        let fields = if shape == Shape::Table { row } else { whole };
        found(ExitCode::from(u8::from(records.is_empty())), print_all(shape, records.iter().map(fields).collect()))
    }
}

/// The columns that answer the question.
fn row(record: &AuditRecord) -> Fields {
    let used = record.used.zip(record.capacity).map(|(used, capacity)| format!("{used} of {capacity}"));
    let wait = record.retry_after.map(|wait| match wait {
        RetryAfter::Never => "never".to_owned(),
        wait => human(wait.duration().unwrap_or_default()),
    });
    vec![
        ("at", exact_time(record)),
        ("decision", json!(record.decision.name())),
        ("reason", json!(record.reason)),
        ("rule", json!(record.rule)),
        ("limit", json!(record.limited_by)),
        ("used", json!(used)),
        ("wait", json!(wait)),
        ("status", json!(record.status)),
        ("method", json!(record.method)),
        ("endpoint", json!(record.endpoint)),
    ]
}

fn whole(record: &AuditRecord) -> Fields {
    let wait = record.retry_after.map(|wait| match wait.duration() {
        None => json!("never"),
        Some(wait) => json!(micros(wait)),
    });
    vec![
        ("at", exact_time(record)),
        ("decision", json!(record.decision.name())),
        ("reason", json!(record.reason)),
        ("rule", json!(record.rule)),
        ("limited_by", json!(record.limited_by)),
        ("used", json!(record.used)),
        ("capacity", json!(record.capacity)),
        ("retry_after_us", json!(wait)),
        ("status", json!(record.status)),
        ("method", json!(record.method)),
        ("endpoint", json!(record.endpoint)),
        ("ip", json!(record.ip)),
        ("api_key", json!(record.api_key)),
        ("region", json!(record.region)),
        ("server", json!(record.server)),
        ("latency_us", json!(micros(record.latency))),
        ("rules", json!(record.rules)),
    ]
}

/// To the millisecond, since many decisions share a second.
fn exact_time(record: &AuditRecord) -> Value {
    jiff::Timestamp::try_from(record.at).map_or(Value::Null, |time| Value::String(format!("{time:.3}")))
}
