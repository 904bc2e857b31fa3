//! `tollgate rules diff`: who would be treated differently by another set of rules.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::UNIX_EPOCH;

use anyhow::Result;
#[cfg(feature = "postgres")]
use anyhow::bail;
use clap::Args;
use serde::Serialize;
use tollgate::rules::RuleSet;
use tollgate::{Clock, Embedded, Error, Limiter};

use super::changes;
use crate::attributes::{self, Shown};
use crate::escape::shown;
use crate::found;
use crate::held::Held;
use crate::options::Output;
use crate::options::from_zero;
use crate::output::{QUIET, Shape, counted, facts, json};
use crate::records::{Identity, Record};
use crate::replay::{Reading, Recording, is_zero, unplayable};
use crate::rules_file::RulesFile;
use crate::verdict::{Judged, MISSING, Plan};

#[derive(Debug, Args)]
pub(crate) struct Diff {
    /// The current set of rules: a file, or the address of a database.
    ///
    /// Or env: and the name of an environment variable that has one.
    before: PathBuf,
    /// The set that would replace it.
    after: PathBuf,
    /// The records, in one or several files; - for standard input.
    ///
    /// Sorted by time, all together. Without records, only the rules themselves are compared.
    #[arg(value_name = "LOG")]
    logs: Vec<PathBuf>,
    #[command(flatten)]
    reading: Reading,
    /// Replay the records as they stand, instead of sorted by time.
    #[arg(long, help_heading = "Records")]
    unsorted: bool,
    /// Print only totals, without the records that are treated differently.
    ///
    /// As a table does.
    #[arg(long, help_heading = "Output")]
    summary: bool,
    /// How many of the most affected keys to name.
    #[arg(long, value_name = "N", default_value = "10", value_parser = from_zero, allow_negative_numbers = true)]
    most: usize,
    #[command(flatten)]
    output: Output,
}

/// Stands for a rule's name, which can't contain a space, for requests that the middleware refuses.
const REFUSED: &str = "ambiguous path";

/// A record that is treated differently, with the names and the order that other programs rely on.
#[derive(Debug, Serialize)]
struct Line<'a> {
    /// The line in the log.
    line: u64,
    t_us: u64,
    attrs: Shown<'a>,
    key: String,
    change: &'static str,
    before: Side<'a>,
    after: Side<'a>,
}

#[derive(Debug, Serialize)]
struct Side<'a> {
    rule: Option<&'a str>,
    reason: &'static str,
    allowed: bool,
    denied_by: Option<&'a str>,
}

/// The totals.
#[derive(Debug, Default, Serialize)]
struct Totals {
    /// The names of the two sets.
    before: String,
    after: String,
    records: u64,
    allowed_by_both: u64,
    denied_by_both: u64,
    /// Denied by both, since the middleware refuses their path, which can be read in two ways.
    #[serde(skip_serializing_if = "is_zero")]
    refused_by_both: u64,
    /// Denied by both without a limit, since the record lacks an attribute of a rule's key.
    #[serde(skip_serializing_if = "is_zero")]
    missing_by_both: u64,
    newly_denied: u64,
    newly_allowed: u64,
    /// Treated alike, but by different rules.
    other_rule: u64,
    /// Exactly one of the two sets can't decide these, for instance because an attribute isn't a valid cost.
    undecided: u64,
    unreadable: u64,
    #[serde(skip_serializing_if = "is_zero")]
    permits_not_replayed: u64,
    /// The differences by rule: the one that denies under the new set or, if that allows, the one that denied under the
    /// old.
    rules: Vec<Affected>,
    keys_affected: usize,
    keys: Vec<Affected>,
}

#[derive(Clone, Debug, Default, Serialize)]
struct Affected {
    name: String,
    newly_denied: u64,
    newly_allowed: u64,
}

/// How often each kind of difference occurred.
#[derive(Debug, Default)]
struct Counts {
    rules: BTreeMap<String, Affected>,
    keys: HashMap<Vec<u8>, Affected>,
}

/// A set, and where it comes from.
struct Set {
    name: String,
    rules: RuleSet,
}

/// A set, and what it has counted so far.
struct Player {
    rules: RuleSet,
    limiter: Limiter,
}

impl Diff {
    pub(super) async fn run(self) -> Result<ExitCode> {
        let sets = [Set::read(&self.before).await?, Set::read(&self.after).await?];
        if self.logs.is_empty() {
            let changes = sets[0].rules.changes_to(&sets[1].rules);
            let code = ExitCode::from(u8::from(!changes.is_empty()));
            return found(code, changes::print(&changes, sets[1].rules.len()));
        }
        let [before, after] = sets.each_ref().map(|set| set.name.clone());
        let [one, other] = sets.map(Player::new);
        let players = [one?, other?];
        let source = self.reading.of(&self.logs, Identity::Attributes)?;
        let recording = Recording::read(source, !self.unsorted).await?;
        let mut totals = Totals { before, after, unreadable: recording.unreadable, ..Totals::default() };
        let (mut records, mut warnings) = recording.in_order();
        let shape = self.output.shape();
        let mut out = BufWriter::new(anstream::stdout());
        let lines = shape == Shape::Jsonl && !self.summary;
        let (mut counts, mut held) = (Counts::default(), [Held::default(), Held::default()]);
        let mut printed = Ok(());
        while let Some((chunk, read)) = records.next().await {
            for record in &chunk {
                let [before, after] = match Player::both(&players, &mut held, record).await {
                    [Ok(before), Ok(after)] => [before, after],
                    [before, after] => {
                        // A record that only one set can decide is treated differently.
                        let by_one = before.is_ok() != after.is_ok();
                        *(if by_one { &mut totals.undecided } else { &mut totals.unreadable }) += 1;
                        if let Some(error) = after.err().or(before.err()) {
                            warnings.unreadable(unplayable(record, error)?)?;
                        }
                        continue;
                    }
                };
                let Some(change) = totals.count(&before, &after) else { continue };
                let denier = if before.allowed { &after } else { &before };
                let key = denier.key_or_client(&record.attributes);
                let by = if denier.is_refused() { REFUSED } else { denier.rule().unwrap_or_default() };
                counts.note(by, &key, before.allowed);
                if lines && printed.is_ok() {
                    let (t_us, attrs, key) = (record.t_us, Shown(&record.attributes), shown(&key));
                    let (before, after) = (Side::of(&before), Side::of(&after));
                    printed = json(&mut out, &Line { line: record.line, t_us, attrs, key, change, before, after });
                }
            }
            read?;
        }
        warnings.sum_up();
        if let Some(held) = held.iter().max_by_key(|held| held.not_replayed()) {
            held.sum_up();
            totals.permits_not_replayed = held.not_replayed();
        }
        counts.sum_up(&mut totals, self.most);
        let differ = totals.newly_denied + totals.newly_allowed + totals.undecided > 0;
        let printed = printed.and_then(|()| match shape {
            Shape::Jsonl => json(&mut out, &totals),
            Shape::Table => totals.print(&mut out),
        });
        found(ExitCode::from(u8::from(differ)), printed.and_then(|()| out.flush()))
    }
}

impl Set {
    #[cfg_attr(not(feature = "postgres"), allow(clippy::unused_async, reason = "files alone"))]
    async fn read(from: &Path) -> Result<Self> {
        #[cfg(feature = "postgres")]
        if let Some(url) = address(from)? {
            let postgres = tollgate_record::Postgres::open(&url)?;
            return Ok(Self { name: postgres.address().to_owned(), rules: postgres.rules().await?.rules });
        }
        Ok(Self { name: from.display().to_string(), rules: RulesFile::read(from)?.rules })
    }
}

/// The address of a database, if it isn't a file's path: as given, or in an environment variable.
#[cfg(feature = "postgres")]
fn address(from: &Path) -> Result<Option<String>> {
    let Some(text) = from.to_str() else { return Ok(None) };
    match text.strip_prefix("env:") {
        Some(name) => match std::env::var(name) {
            Ok(address) => Ok(Some(address)),
            Err(_) => bail!("{text}: this environment variable isn't set to the address of a database"),
        },
        None => Ok(text.contains("://").then(|| text.to_owned())),
    }
}

impl Player {
    fn new(set: Set) -> Result<Self> {
        // A clock that stands still, so that keys expire only in the time of the records.
        let engine = Embedded::with_clock(Clock::new(UNIX_EPOCH));
        let secret = tollgate::KeySecret::new("rules that hash their keys need one")?;
        Ok(Self { rules: set.rules, limiter: Limiter::builder(engine).key_secret(&secret).build() })
    }

    async fn both<'s>(players: &'s [Self; 2], held: &mut [Held; 2], record: &Record) -> [Result<Judged<'s>, Error>; 2] {
        let ([before, after], [by_before, by_after]) = (players, held);
        [before.play(record, by_before).await, after.play(record, by_after).await]
    }

    async fn play(&self, record: &Record, held: &mut Held) -> Result<Judged<'_>, Error> {
        held.until(&self.limiter, record.t_us).await?;
        let request = attributes::read(&record.attributes);
        if self.rules.reads_two_ways(&request) {
            return Plan::refused().decide(&self.limiter, record).await;
        }
        let plan = Plan::of(self.rules.applies(&request)?, &|rule| rule, record);
        let judged = plan.decide(&self.limiter, record).await?;
        judged.hold(held, &self.limiter, record).await?;
        Ok(judged)
    }
}

impl Totals {
    /// How the record is treated differently, if it is.
    fn count(&mut self, before: &Judged<'_>, after: &Judged<'_>) -> Option<&'static str> {
        self.records += 1;
        match (before.allowed, after.allowed) {
            (true, false) => {
                self.newly_denied += 1;
                return Some("newly-denied");
            }
            (false, true) => {
                self.newly_allowed += 1;
                return Some("newly-allowed");
            }
            (true, true) => self.allowed_by_both += 1,
            (false, false) => self.denied_by_both += 1,
        }
        self.refused_by_both += u64::from(before.is_refused() && after.is_refused());
        self.missing_by_both += u64::from([before, after].iter().all(|judged| judged.reason() == MISSING));
        let rules =
            |judged: &Judged<'_>| judged.each().iter().map(|(rule, _)| rule.map(str::to_owned)).collect::<Vec<_>>();
        self.other_rule += u64::from((rules(before), before.is_refused()) != (rules(after), after.is_refused()));
        None
    }

    fn print(&self, mut out: impl Write) -> io::Result<()> {
        let differ = self.newly_denied + self.newly_allowed;
        let other = match self.other_rule {
            0 => String::new(),
            count => format!(" (of the others, {count} by another rule)"),
        };
        let of_them = |count: u64, why: &str| if count == 0 { String::new() } else { format!(" ({count} {why})") };
        let refused = of_them(self.refused_by_both, "refused: their path can be read in two ways");
        let missing = of_them(self.missing_by_both, "lack an attribute that a rule's key names: no limit was checked");
        facts(
            &mut out,
            &[
                ("before", self.before.clone()),
                ("after", self.after.clone()),
                ("records", self.records.to_string()),
                ("allowed by both", self.allowed_by_both.to_string()),
                ("denied by both", format!("{}{refused}{missing}", self.denied_by_both)),
                ("newly denied", self.newly_denied.to_string()),
                ("newly allowed", self.newly_allowed.to_string()),
                ("differ", format!("{differ}{other}")),
                ("undecided by one", self.undecided.to_string()),
                ("unreadable", self.unreadable.to_string()),
            ],
        )?;
        table(&mut out, "rule", &self.rules)?;
        table(&mut out, "key", &self.keys)?;
        if let more @ 1.. = self.keys_affected.saturating_sub(self.keys.len()) {
            writeln!(out, "{:>26}  and {}: --most shows more", "", counted(more as u64, "more key"))?;
        }
        Ok(())
    }
}

impl Counts {
    fn note(&mut self, rule: &str, key: &[u8], was_allowed: bool) {
        let rules = self.rules.entry(rule.to_owned()).or_default();
        let keys = self.keys.entry(key.to_vec()).or_default();
        for affected in [rules, keys] {
            if was_allowed { affected.newly_denied += 1 } else { affected.newly_allowed += 1 }
        }
    }

    /// Most affected first, then by name.
    fn sum_up(self, totals: &mut Totals, most: usize) {
        totals.keys_affected = self.keys.len();
        let named = |(name, affected)| Affected { name, ..affected };
        totals.rules = self.rules.into_iter().map(named).collect();
        totals.keys = self.keys.into_iter().map(|(key, affected)| named((shown(&key), affected))).collect();
        for list in [&mut totals.rules, &mut totals.keys] {
            list.sort_by(|one, other| {
                let order = |affected: &Affected| Reverse(affected.newly_denied + affected.newly_allowed);
                order(one).cmp(&order(other)).then_with(|| one.name.cmp(&other.name))
            });
        }
        totals.keys.truncate(most);
    }
}

impl<'a> Side<'a> {
    fn of(judged: &'a Judged<'_>) -> Self {
        let (rule, denied_by) = (judged.rule(), judged.denied_by());
        Self { rule, reason: judged.reason(), allowed: judged.allowed, denied_by }
    }
}

fn table(out: &mut impl Write, what: &str, rows: &[Affected]) -> io::Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    writeln!(out, "\n{QUIET}{:>12} {:>13}  {what}{QUIET:#}", "newly denied", "newly allowed")?;
    for Affected { name, newly_denied, newly_allowed } in rows {
        writeln!(out, "{newly_denied:>12} {newly_allowed:>13}  {name}")?;
    }
    Ok(())
}
