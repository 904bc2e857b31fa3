//! `tollgate replay`: recorded traffic through a rule, on a clock taken from the records.

mod summary;

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufRead, BufReader, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use tokio::sync::mpsc;
use tollgate::{Limiter, Request, Rule};

use crate::options::{self, Options};
use crate::output::{Line, Printer};
use crate::probe::decide;
use crate::records::{self, Format, KeyField, Record, Unreadable};
use crate::{Failure, Outcome};
use summary::Summary;

#[derive(Debug, Args)]
pub(crate) struct Replay {
    /// The rule, such as "sliding-log 60/1m"; given several times, all or nothing.
    #[arg(long, required = true)]
    rule: Vec<String>,
    /// Count denied calls too, and show them as overage.
    #[arg(long)]
    overage: bool,
    /// How the records are written down.
    #[arg(long, value_enum, default_value_t = Input::Jsonl)]
    input: Input,
    /// Which field of an access log's line to count by.
    #[arg(long, value_enum, default_value_t = Key::Ip)]
    key: Key,
    /// Play a file as it stands, clocks that step back included, instead of sorted by time.
    #[arg(long)]
    unsorted: bool,
    /// Stop at the first line that can't be read.
    #[arg(long)]
    strict: bool,
    /// Print totals instead of decisions.
    #[arg(long)]
    summary: bool,
    /// The records; - for standard input, whose clock is kept from stepping back.
    file: PathBuf,
    #[command(flatten)]
    options: Options,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Input {
    /// A JSON object per line: t_us, key, and op and cost if not acquire and 1, id, and for of a block.
    Jsonl,
    /// The same names in a header.
    Csv,
    /// Combined (or Common) Log Format.
    Combined,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Key {
    Ip,
    Path,
    Method,
    User,
}

/// How many records make a progress bar worth its while.
const LONG: usize = 2000;

impl Replay {
    pub(crate) async fn run(self) -> Outcome {
        let rule = self.options.follow_policy(options::rule(&self.rule)?.count_denials(self.overage))?;
        let prefix = own_prefix("replay");
        let limiter = self.options.limiter()?.prefix(&prefix)?;
        let stdout = anstream::stdout();
        let printer = Printer::new(io::BufWriter::new(stdout), self.options.shape());
        let (summary, quiet) = (Summary::default(), self.summary);
        let mut player = Player { limiter, rule, printer, summary, quiet, played: 0, ids: HashSet::new() };
        let played = tokio::select! {
            biased;
            told = interrupted() => told.map_err(Failure::from).and(Err(Failure::Told("interrupted".into()))),
            played = self.play(&mut player) => played,
        };
        let left = "in an hour, or twice the longest that the rule takes to reset";
        let forgotten = player.forget_keys().await;
        let forgotten =
            forgotten.map_err(|error| format!("keys of prefix {prefix} are left, and expire {left}: {error}"));
        match (played, forgotten) {
            (Ok(()), forgotten) => forgotten.map_err(Failure::Told)?,
            (Err(Failure::Told(why)), Err(left)) => return Err(Failure::Told(format!("{why}; {left}"))),
            (Err(why), _) => return Err(why),
        }
        player.printer.flush()?;
        if player.summary.only_unreadable() {
            let input = self.input.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
            eprintln!("tollgate: no line could be read as {input}: is --input right?");
        }
        if self.summary {
            player.summary.print(anstream::stdout(), self.options.shape())?;
        }
        Ok(ExitCode::SUCCESS)
    }

    async fn play(&self, player: &mut Player<impl Write>) -> Result<(), Failure> {
        if self.file.as_os_str() == "-" {
            return self.play_stream(player).await;
        }
        let records = self.load(player)?;
        let progress = self.progress(records.len());
        for record in &records {
            self.play_one(player, record, Some(&self.file.display())).await?;
            progress.inc(1);
        }
        progress.finish_and_clear();
        Ok(())
    }

    /// Plays standard input as it comes, on a clock that never steps back.
    async fn play_stream(&self, player: &mut Player<impl Write>) -> Result<(), Failure> {
        let mut latest = 0;
        let mut items = self.read_in_background();
        while let Some(item) = items.recv().await {
            let item = item.map_err(|error| Failure::Told(format!("standard input: {error}")))?;
            let Some(mut record) = self.readable(item, player, None)? else { continue };
            player.summary.in_order(record.t_us, latest);
            latest = latest.max(record.t_us);
            record.t_us = latest;
            self.play_one(player, &record, None).await?;
            player.printer.flush()?;
        }
        Ok(())
    }

    async fn play_one(
        &self,
        player: &mut Player<impl Write>,
        record: &Record,
        file: Option<&dyn std::fmt::Display>,
    ) -> Result<(), Failure> {
        match player.play(record).await? {
            None => Ok(()),
            Some(unreadable) => self.readable(Err(unreadable), player, file).map(|_| ()),
        }
    }

    /// Standard input can only be waited for by a thread, which ends with the process.
    fn read_in_background(&self) -> mpsc::Receiver<io::Result<Result<Record, Unreadable>>> {
        let (sender, receiver) = mpsc::channel(1024);
        let (input, key) = (self.input, self.key);
        std::thread::spawn(move || {
            for item in read(input, key, io::stdin().lock()) {
                if sender.blocking_send(item).is_err() {
                    return;
                }
            }
        });
        receiver
    }

    /// All records of the file, in the order in which they are played.
    fn load(&self, player: &mut Player<impl Write>) -> Result<Vec<Record>, Failure> {
        let shown = self.file.display();
        let file = File::open(&self.file).map_err(|error| Failure::Told(format!("{shown}: {error}")))?;
        let mut records = Vec::new();
        let mut latest = 0;
        for item in read(self.input, self.key, BufReader::new(file)) {
            let item = item.map_err(|error| Failure::Told(format!("{shown}: {error}")))?;
            let Some(record) = self.readable(item, player, Some(&shown))? else { continue };
            player.summary.in_order(record.t_us, latest);
            latest = latest.max(record.t_us);
            records.push(record);
        }
        if !self.unsorted {
            records.sort_by_key(|record| record.t_us);
        }
        Ok(records)
    }

    /// The record, unless it could not be read: then that is told, and ends a strict replay.
    fn readable(
        &self,
        item: Result<Record, Unreadable>,
        player: &mut Player<impl Write>,
        file: Option<&dyn std::fmt::Display>,
    ) -> Result<Option<Record>, Failure> {
        let unreadable = match item {
            Ok(record) => return Ok(Some(record)),
            Err(unreadable) => unreadable,
        };
        let told = file.map_or_else(|| unreadable.to_string(), |file| format!("{file}: {unreadable}"));
        if self.strict {
            return Err(Failure::Told(told));
        }
        eprintln!("tollgate: {told}; skipped");
        player.summary.unreadable();
        Ok(None)
    }

    /// A bar on standard error, unless the decisions scroll by on the same terminal.
    fn progress(&self, records: usize) -> ProgressBar {
        if records < LONG || (io::stdout().is_terminal() && !self.summary) {
            return ProgressBar::hidden();
        }
        let style = ProgressStyle::with_template("{wide_bar} {human_pos} of {human_len} records, {eta} left");
        let bar = ProgressBar::new(records.try_into().unwrap_or(u64::MAX));
        bar.with_style(style.expect("a well-formed template"))
    }
}

fn read(input: Input, key: Key, from: impl BufRead) -> impl Iterator<Item = io::Result<Result<Record, Unreadable>>> {
    let format = match input {
        Input::Jsonl => Format::Jsonl,
        Input::Csv => Format::Csv,
        Input::Combined => Format::Combined,
    };
    let key = match key {
        Key::Ip => KeyField::Ip,
        Key::Path => KeyField::Path,
        Key::Method => KeyField::Method,
        Key::User => KeyField::User,
    };
    records::read(format, key, from)
}

/// Ends when the user or the system asks the tool to.
pub(crate) async fn interrupted() -> io::Result<()> {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let mut terminated = signal(SignalKind::terminate())?;
        tokio::select! {
            told = tokio::signal::ctrl_c() => told,
            _ = terminated.recv() => Ok(()),
        }
    }
    #[cfg(not(unix))]
    tokio::signal::ctrl_c().await
}

/// Decides records one after the other.
#[derive(Debug)]
struct Player<W: Write> {
    limiter: Limiter,
    rule: Rule,
    printer: Printer<W>,
    summary: Summary,
    /// Only the summary is wanted.
    quiet: bool,
    played: u64,
    /// The ids that were given, and the keys they were given for.
    ids: HashSet<(Vec<u8>, Vec<u8>)>,
}

/// After how many records a signal is looked for.
const PLAYED_AT_A_TIME: u64 = 256;

impl<W: Write> Player<W> {
    /// Decides the record, unless it settles what is not remembered.
    async fn play(&mut self, record: &Record) -> Result<Option<Unreadable>, Failure> {
        let Record { line, t_us, op, ref key, cost, ref id, length } = *record;
        // The embedded engine never waits, and signals arrive only while something does.
        self.played += 1;
        if self.played.is_multiple_of(PLAYED_AT_A_TIME) {
            tokio::task::yield_now().await;
        }
        self.summary.touched(key);
        let at = UNIX_EPOCH + Duration::from_micros(t_us);
        let mut request = Request::new(key).cost(cost).at(at);
        if let Some(id) = id {
            request = request.id(id);
            self.ids.insert((key.clone(), id.clone()));
        }
        let decision = match decide(&self.limiter, &self.rule, op, request, length).await {
            // The fault of the record, as if it could not be read.
            Err(error) if error.is_unknown_id() => {
                return Ok(Some(Unreadable { line, reason: format!("id: {error}") }));
            }
            // An operation that the rule doesn't have.
            Err(error) if error.is_input() => {
                return Ok(Some(Unreadable { line, reason: error.to_string() }));
            }
            decision => decision?,
        };
        self.summary.decided(key, decision.allowed);
        if !self.quiet {
            self.printer.print(
                &Line::new(&self.rule, op, key, cost, &decision).at(t_us).named(id.as_deref()).lasting(length),
            )?;
        }
        Ok(None)
    }

    /// Removes what the replay wrote.
    async fn forget_keys(&mut self) -> Result<(), tollgate::Error> {
        for key in self.summary.keys() {
            self.limiter.reset(&self.rule, key).await?;
        }
        for (key, id) in &self.ids {
            self.limiter.reset(&self.rule, Request::new(key).id(id)).await?;
        }
        Ok(())
    }
}

/// A prefix that no other run has, so that keys start empty.
pub(crate) fn own_prefix(what: &str) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("tollgate:{what}-{}-{}", std::process::id(), now.as_nanos())
}
