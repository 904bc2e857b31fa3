//! `tollgate compare`: the same traffic under several rules, side by side.

mod memory;
mod outcome;
mod page;
mod side_by_side;
mod table;

use std::collections::HashSet;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Args;
use tollgate::{Clock, Embedded, Limiter, Rule};

use crate::interrupted::interrupted;
use crate::line::Printer;
use crate::options::Output;
use crate::output::{Shape, json};
use crate::page::ReportFile;
use crate::records::{KeyField, Record, Unreadable};
use crate::replay::{Edges, Player, Plays, Reading, Recording, progress};
use crate::rule_arguments::{SEE_RULES, subject_of};
use outcome::Outcome;

#[derive(Debug, Args)]
#[command(after_help = SEE_RULES, override_usage = "tollgate compare [OPTIONS] <RULE>... <FILE>...")]
pub(crate) struct Compare {
    /// The rules, each such as "token-bucket 100/1m burst 20", and the records.
    ///
    /// The records come last, in one or several files; - for standard input. They are sorted by time, all together.
    // Options may stand between them, so clap takes them one by one: this is shown as <RULE>... <FILE>...
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

/// A rule being played.
struct Contender {
    rule: Rule,
    clock: Clock,
    player: Player<'static, io::Sink>,
    /// Records that it can't decide, such as a reservation from a rule that doesn't reserve.
    unplayed: u64,
}

/// Counts of what was read.
#[derive(Clone, Copy, Debug, Default)]
struct Input {
    records: u64,
    unreadable: u64,
    out_of_order: u64,
}

impl Compare {
    pub(crate) async fn run(self) -> Result<ExitCode> {
        let (rules, files) = self.split()?;
        let contend = |(at, rule): (usize, &String)| Contender::new(rule, at);
        let contenders = rules.iter().enumerate().map(contend).collect::<Result<Vec<_>>>()?;
        let read = files.iter().map(|file| Some(file.as_path()));
        let report = self.report.open(&read.collect::<Vec<_>>())?;
        let (mut contenders, input) = tokio::select! {
            biased;
            told = interrupted() => Err(told.map_or_else(anyhow::Error::from, |()| anyhow!("interrupted"))),
            played = self.play(contenders, &files) => played,
        }?;
        contenders.iter_mut().for_each(|contender| contender.player.sum_up_permits());
        let outcomes: Vec<_> = contenders.iter().map(Outcome::of).collect();
        let printed = match self.output.shape() {
            Shape::Jsonl => outcomes.iter().try_for_each(|outcome| json(anstream::stdout(), outcome)),
            Shape::Table => table::print(anstream::stdout(), &outcomes, input),
        };
        if let Some(report) = report {
            report.write(&page::page(&contenders, &outcomes, &files, input))?;
        }
        printed?;
        Ok(ExitCode::SUCCESS)
    }

    /// The rules, and the files after them.
    fn split(&self) -> Result<(Vec<String>, Vec<PathBuf>)> {
        let words = &self.rules_and_file;
        let is_rule = |word: &OsString| word.to_str().is_some_and(|text| subject_of(text).is_ok());
        let is_file = |word: &OsString| word == "-" || !is_rule(word) && Path::new(word).exists();
        // The last word is a file, whether it exists or not; so are the words before it that name existing files.
        let files = 1 + words.iter().rev().skip(1).take_while(|word| is_file(word)).count();
        let (rules, files) = words.split_at(words.len().saturating_sub(files));
        if rules.is_empty() {
            let got = words.len();
            let expected =
                "expected RULE... FILE..., such as \"token-bucket 100/1m\" \"fixed-window 100/1m\" access.log";
            bail!("{expected}, got {}", if got == 1 { "1 word".to_owned() } else { format!("{got} files") });
        }
        ensure!(rules.len() <= MOST_RULES, "expected at most {MOST_RULES} rules, got {}", rules.len());
        let rules = rules.iter().map(|rule| rule.to_string_lossy().into_owned());
        Ok((rules.collect(), files.iter().map(PathBuf::from).collect()))
    }

    async fn play(&self, contenders: Vec<Contender>, files: &[PathBuf]) -> Result<(Vec<Contender>, Input)> {
        let recording = Recording::read(self.reading.by_key(files, self.key)?, true).await?;
        let Recording { records, unreadable, out_of_order, is_plain, .. } = recording;
        let progress = progress(records);
        let (in_order, mut warnings) = recording.in_order();
        let contenders = side_by_side::play(contenders, is_plain, in_order, &progress, &mut warnings).await?;
        progress.finish_and_clear();
        warnings.sum_up();
        Ok((contenders, Input { records, unreadable, out_of_order }))
    }
}

impl Contender {
    fn new(text: &str, at: usize) -> Result<Self> {
        let subject = subject_of(text).with_context(|| format!("rule {}", at + 1))?;
        // It stands still, and each call gives its record's time, so that keys expire by records' times alone.
        let clock = Clock::new(UNIX_EPOCH);
        let limiter = Limiter::new(Embedded::with_clock(clock.clone()));
        let (rule, edges) = (subject.rule.clone(), Edges::of(&subject.rule));
        let plays = Plays::Rule(Arc::new(subject), HashSet::new());
        let player = Player::new(limiter, plays, Printer::new(io::sink(), Shape::Jsonl), true).with_edges(edges);
        Ok(Self { rule, clock, player, unplayed: 0 })
    }

    /// Plays some records. Returns those that its rule can't decide.
    async fn play(&mut self, records: &[Record]) -> Result<Vec<Unreadable>> {
        let mut unreadable = self.player.play_all(records).await?;
        for Unreadable { reason, .. } in &mut unreadable {
            self.unplayed += 1;
            *reason += &format!(" (under {})", self.rule);
        }
        Ok(unreadable)
    }
}
