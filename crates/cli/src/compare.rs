//! `tollgate compare`: the same traffic under several rules, side by side.

mod edge;
mod memory;
mod outcome;
mod page;
mod table;

use std::collections::HashSet;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Args;
use tollgate::{Embedded, Limiter, Rule};

use crate::interrupted::interrupted;
use crate::line::Printer;
use crate::operation;
use crate::options::Output;
use crate::output::{Shape, json};
use crate::page::ReportFile;
use crate::records::{KeyField, Record, Unreadable};
use crate::replay::{Player, Plays, Reading, Recording, Source, Warnings, progress};
use crate::rule_arguments::{SEE_RULES, subject_of};
use edge::Edges;
use outcome::Outcome;

#[derive(Debug, Args)]
#[command(after_help = SEE_RULES, override_usage = "tollgate compare [OPTIONS] <RULE>... <FILE>")]
pub(crate) struct Compare {
    /// The rules, each such as "gcra 100/1m burst 20", and the records.
    ///
    /// The records come last; - for standard input, whose clock is kept from stepping back.
    // Options may stand between them, so clap takes them one by one: this is shown as <RULE>... <FILE>.
    #[arg(value_name = "RULE>... <FILE", num_args = 1.., required = true)]
    rules_and_file: Vec<OsString>,
    #[command(flatten)]
    reading: Reading,
    /// Which field of an access log to count by. Default: ip.
    #[arg(long, value_enum, value_name = "NAME", help_heading = "Records")]
    key: Option<KeyField>,
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    report: ReportFile,
}

/// More rules than this can't be told apart side by side.
const MOST_RULES: usize = 12;

/// A rule at play.
struct Contender {
    rule: Rule,
    player: Player<'static, io::Sink>,
    edges: Edges,
    /// Records that it can't decide, such as a reservation from a rule that doesn't reserve.
    unplayed: u64,
}

/// What was read.
#[derive(Clone, Copy, Debug, Default)]
struct Input {
    records: u64,
    unreadable: u64,
    out_of_order: u64,
    /// Whether these were played at the latest time by then, not sorted.
    clamped: bool,
}

impl Compare {
    pub(crate) async fn run(self) -> Result<ExitCode> {
        let (rules, file) = self.split()?;
        let limiter = Limiter::new(Embedded::new());
        let contend = |(at, rule): (usize, &String)| Contender::new(rule, &limiter, at);
        let mut contenders = rules.iter().enumerate().map(contend).collect::<Result<Vec<_>>>()?;
        let report = self.report.open(&[Some(&file)])?;
        let input = tokio::select! {
            biased;
            told = interrupted() => Err(told.map_or_else(anyhow::Error::from, |()| anyhow!("interrupted"))),
            played = self.play(&mut contenders, &file) => played,
        }?;
        contenders.iter_mut().for_each(|contender| contender.player.sum_up_permits());
        let outcomes: Vec<_> = contenders.iter().map(Outcome::of).collect();
        let printed = match self.output.shape() {
            Shape::Jsonl => outcomes.iter().try_for_each(|outcome| json(anstream::stdout(), outcome)),
            Shape::Table => table::print(anstream::stdout(), &outcomes, input),
        };
        if let Some(report) = report {
            report.write(&page::page(&contenders, &outcomes, &file, input))?;
        }
        printed?;
        Ok(ExitCode::SUCCESS)
    }

    fn split(&self) -> Result<(Vec<String>, PathBuf)> {
        let Some((file, rules @ [_, ..])) = self.rules_and_file.split_last() else {
            let got = self.rules_and_file.len();
            bail!("expected RULE... FILE, such as \"gcra 100/1m\" \"fixed-window 100/1m\" access.log, got {got} word");
        };
        ensure!(rules.len() <= MOST_RULES, "expected at most {MOST_RULES} rules, got {}", rules.len());
        let rules: Vec<_> = rules.iter().map(|rule| rule.to_string_lossy().into_owned()).collect();
        Ok((rules, PathBuf::from(file)))
    }

    async fn play(&self, contenders: &mut [Contender], file: &Path) -> Result<Input> {
        let source = self.reading.by_key(file, self.key);
        if source.is_standard_input() {
            return play_stream(contenders, &source).await;
        }
        let recording = Recording::read(&source, true).await?;
        let Recording { records, unreadable, out_of_order, .. } = recording;
        let progress = progress(records);
        let (in_order, mut warnings) = recording.in_order()?;
        for record in in_order {
            play_one(contenders, &record?, &mut warnings).await?;
            progress.inc(1);
        }
        progress.finish_and_clear();
        warnings.sum_up();
        Ok(Input { records, unreadable, out_of_order, clamped: false })
    }
}

impl Contender {
    fn new(text: &str, limiter: &Limiter, at: usize) -> Result<Self> {
        let subject = subject_of(text).with_context(|| format!("rule {}", at + 1))?;
        // Rules may have one name, so each has a prefix of its own.
        let limiter = limiter.clone().prefix(&format!("compare-{}", at + 1))?;
        let (rule, edges) = (subject.rule.clone(), Edges::of(&subject.rule));
        let plays = Plays::Rule(Arc::new(subject), HashSet::new());
        let player = Player::new(limiter, plays, Printer::new(io::sink(), Shape::Jsonl), true);
        Ok(Self { rule, player, edges, unplayed: 0 })
    }
}

/// Plays standard input on a clock that never steps back.
async fn play_stream(contenders: &mut [Contender], source: &Source<'_>) -> Result<Input> {
    let (mut records, mut warnings) = source.stream().await?;
    let mut input = Input { clamped: true, ..Input::default() };
    while let Some(item) = records.next(&warnings).await? {
        match item {
            Ok(mut record) => {
                warnings.read();
                input.records += 1;
                input.out_of_order += u64::from(records.clamp(&mut record));
                play_one(contenders, &record, &mut warnings).await?;
            }
            Err(unreadable) => {
                input.unreadable += 1;
                warnings.unreadable(unreadable)?;
            }
        }
    }
    warnings.sum_up();
    warnings.end()?;
    Ok(input)
}

/// Plays a record under each rule, and reports it if one can't decide it.
async fn play_one(contenders: &mut [Contender], record: &Record, warnings: &mut Warnings) -> Result<()> {
    for Contender { rule, player, edges, unplayed } in contenders {
        // The embedded engine decides each record at once.
        let played = player.play(record.clone()).await?;
        // What a record gives back isn't subtracted, nor is a penalty admitted.
        let admitted = if operation::asks(record.op) { played.took } else { 0 };
        edges.note(&record.key, record.t_us, admitted);
        for Unreadable { line, reason } in played.unreadable {
            *unplayed += 1;
            player.summary.passed_over(record.t_us);
            warnings.unreadable(Unreadable { line, reason: format!("{reason} (under {rule})") })?;
        }
    }
    Ok(())
}
