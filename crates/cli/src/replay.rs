//! `tollgate replay`: recorded traffic through a rule, on a clock taken from the records.

mod by_rules;
mod edge;
mod kept;
mod log_options;
mod page;
mod player;
mod recording;
mod source;
mod summary;
mod unreadable;
mod waves;
mod workers;

use std::collections::{HashMap, HashSet};
use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use anyhow::{Result, anyhow, bail};
use clap::Args;
use indicatif::ProgressBar;
use tollgate::{Clock, Limiter, Rule};

use crate::interrupted::interrupted;
use crate::line::Printer;
use crate::options::{Confirmation, FailureOptions, Options};
use crate::output::Shape;
use crate::page::ReportFile;
use crate::records::{Identity, KeyField, Unreadable};
use crate::rule_arguments::{Denials, RuleOptions, SEE_RULES};
use crate::rules_file::RulesFile;
use crate::subject::Subject;
use crate::{messages, reader_is_gone};
use by_rules::ByRules;
pub(crate) use edge::{Edges, Most};
pub(crate) use page::{bars, busiest};
pub(crate) use player::{Player, Plays, unplayable};
pub(crate) use recording::{Recording, Records, Through, progress};
pub(crate) use source::{Reading, Source};
use summary::Order;
pub(crate) use summary::is_zero;
pub(crate) use unreadable::Warnings;
use workers::Workers;

#[derive(Debug, Args)]
#[command(after_help = SEE_RULES)]
pub(crate) struct Replay {
    /// The rule, such as "sliding-log 60/1m"; given several times, all or nothing.
    ///
    /// With --rules, the name of the one rule to use, whatever its conditions; default: whichever rule applies.
    #[arg(long, required_unless_present = "set", help_heading = "Rule")]
    rule: Vec<String>,
    /// Also count denied calls, and show them as overage.
    #[arg(long, help_heading = "Rule")]
    overage: bool,
    #[command(flatten)]
    reading: Reading,
    /// Which field of an access log to count by. Default: ip.
    ///
    /// With --rules, the rules decide.
    #[arg(long, value_enum, value_name = "NAME", conflicts_with = "set", help_heading = "Records")]
    key: Option<KeyField>,
    /// Replay records as they stand, instead of sorted by time.
    ///
    /// Each is decided as soon as it is read, so that a log can be followed: tail -f access.log | tollgate replay
    /// --unsorted ... -
    #[arg(long, help_heading = "Records")]
    unsorted: bool,
    /// Print totals instead of decisions.
    #[arg(long, help_heading = "Output")]
    summary: bool,
    /// The records, in one or several files; - for standard input.
    ///
    /// Read to the end, and sorted by time, all together, before the first is decided.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    #[command(flatten)]
    report: ReportFile,
    #[command(flatten)]
    denials: Denials,
    #[command(flatten)]
    about: RuleOptions,
    #[command(flatten)]
    options: Options,
    #[command(flatten)]
    policy: FailureOptions,
    #[command(flatten)]
    confirmation: Confirmation,
}

impl Replay {
    pub(crate) async fn run(self) -> Result<ExitCode> {
        let service = self.about.rules_file()?;
        let plays = match &service {
            None => Plays::Rule(Arc::new(self.subject()?), HashSet::new()),
            Some(service) => Plays::ByRules(self.set(service)?),
        };
        let report = self.report.open(&self.about.files_read(&self.files))?;
        let ruled = plays.named();
        let prefix = self.about.own_prefix("replay");
        let of_prefix = self.about.to_prefix(&prefix)?;
        let one = || {
            // It stands still, and each call gives its record's time, so that keys expire by records' times alone.
            let clock = Clock::new(UNIX_EPOCH);
            anyhow::Ok((of_prefix(self.options.limiter_by(clock.clone(), self.confirmation)?)?, clock))
        };
        let limiters = (0..self.workers(&plays)).map(|_| one()).collect::<Result<Vec<_>>>()?;
        let printer = Printer::new(self.out(), self.options.shape());
        let mut player = Player::new(limiters[0].0.clone(), plays, printer, self.summary);
        let played = tokio::select! {
            biased;
            told = interrupted() => Err(told.map_or_else(anyhow::Error::from, |()| anyhow!("interrupted"))),
            played = self.play(&mut player, limiters) => played,
        };
        let left = "in an hour or, if longer, in twice the rule's longest reset";
        let forgotten = player.forget_keys().await;
        let forgotten =
            forgotten.map_err(|error| anyhow!("keys of prefix {prefix} are left, and expire {left}: {error}"));
        match (played, forgotten) {
            (Ok(()), forgotten) => forgotten?,
            (Err(why), Err(left)) if !reader_is_gone(&why) => bail!("{}; {left}", messages::line(&why)),
            (Err(why), _) if report.is_some() && reader_is_gone(&why) => {
                bail!("--report: not written, since the output was closed before the end of the records")
            }
            (Err(why), _) => return Err(why),
        }
        player.flush()?;
        player.sum_up_permits();
        let printed = match self.summary {
            true => player.summary.print(anstream::stdout(), self.options.shape(), self.order()),
            false => Ok(()),
        };
        if let Some(report) = report {
            report.write(&page::page(&player.summary, &ruled, &self.files, self.order()))?;
        }
        printed?;
        Ok(ExitCode::SUCCESS)
    }

    fn subject(&self) -> Result<Subject> {
        let subject = self.denials.applied(self.about.subject(&self.rule)?)?;
        let mut subject = subject.follow_policy(self.policy)?;
        if self.overage {
            subject.rule = subject.rule.count_overage(true);
        }
        Ok(subject)
    }

    fn set<'s>(&'s self, service: &'s RulesFile) -> Result<ByRules<'s>> {
        let only = match self.rule.as_slice() {
            [] => None,
            [name] => Some(service.definition(name)?.name.as_str()),
            several => {
                let got = several.len();
                bail!("--rule: expected the name of one rule with --rules, got {got} names");
            }
        };
        let hashed = service.rules.definitions().iter().find(|rule| rule.hash_keys == Some(true));
        if let (Some(rule), false) = (hashed, self.about.has_key_secret()?) {
            let why = "the secret to hash its keys with is missing (--key-secret-file or TOLLGATE_KEY_SECRET)";
            bail!("rule {}: {why}", rule.name);
        }
        // A rule that can't block is left as it is.
        let adapted = |rule: Rule| {
            let rule = if self.overage { rule.count_overage(true) } else { rule };
            self.policy.follow_or_close(self.denials.applied_to(rule.clone()).unwrap_or(rule))
        };
        let adapted = Box::new(adapted);
        let (rules, given) = (&service.rules, self.about.attributes()?);
        Ok(ByRules { rules, only, given, adapted, touched: self.options.url().map(|_| HashMap::new()) })
    }

    /// How many threads decide.
    fn workers(&self, plays: &Plays<'_>) -> usize {
        match plays {
            Plays::Rule(subject, _) if self.options.url().is_none() => {
                Workers::count(subject, (!self.summary).then(|| self.options.shape()))
            }
            _ => 1,
        }
    }

    /// Where decisions are printed. Only tables have styles, to be stripped where there is no terminal.
    fn out(&self) -> Box<dyn Write> {
        const BUFFER: usize = 1 << 16;
        match self.options.shape() {
            Shape::Jsonl => Box::new(io::BufWriter::with_capacity(BUFFER, io::stdout())),
            Shape::Table => Box::new(io::BufWriter::with_capacity(BUFFER, anstream::stdout())),
        }
    }

    /// Plays the records on these limiters, each with the clock of its engine.
    async fn play(&self, player: &mut Player<'_, impl Write>, limiters: Vec<(Limiter, Clock)>) -> Result<()> {
        let source = match player.plays_a_set() {
            true => self.reading.of(&self.files, Identity::Attributes)?,
            false => self.reading.by_key(&self.files, self.key)?,
        };
        if self.unsorted && self.files.iter().any(|file| file.as_os_str() == "-") {
            let mut through = Through::as_they_come(source);
            let played = self.play_as_they_come(player, &mut through).await;
            // Records read before an error are still decided.
            let played = played.and(play_waiting(player, &mut through.warnings).await);
            through.warnings.sum_up();
            return played;
        }
        let recording = Recording::read(source, !self.unsorted).await?;
        player.summary.read_through(recording.unreadable, recording.out_of_order);
        let is_plain = recording.is_plain;
        self.options.say_who_decides();
        let progress = self.progress(recording.records);
        let (records, mut warnings) = recording.in_order();
        let played = match player.subject() {
            Some(subject) if limiters.len() > 1 => {
                let workers = Workers::start(&subject, limiters, self.summary, is_plain)?;
                workers.play_all(player, records, &progress, &mut warnings).await
            }
            _ => {
                limiters.into_iter().filter(|_| is_plain).for_each(|(_, clock)| player.follow(clock));
                let played = play_all(player, records, &progress, &mut warnings).await;
                played.and(play_waiting(player, &mut warnings).await)
            }
        };
        progress.finish_and_clear();
        warnings.sum_up();
        played
    }

    async fn play_as_they_come(&self, player: &mut Player<'_, impl Write>, through: &mut Through) -> Result<()> {
        let (mut said, mut latest) = (false, 0);
        loop {
            let next = through.next().await;
            player.summary.unreadable(std::mem::take(&mut through.unreadable));
            let Some(record) = next? else { return Ok(()) };
            if !std::mem::replace(&mut said, true) {
                self.options.say_who_decides();
            }
            player.summary.in_order(record.t_us < latest);
            latest = latest.max(record.t_us);
            let played = player.play(record).await?;
            unplayed(played.unreadable, player, &mut through.warnings)?;
            // Records that have arrived are decided together, and shown once no more are ready.
            if through.is_drained() {
                play_waiting(player, &mut through.warnings).await?;
                player.flush()?;
            }
        }
    }

    fn order(&self) -> Order {
        if self.unsorted { Order::AsItStands } else { Order::Sorted }
    }

    /// A bar on standard error, unless decisions scroll by on the same terminal.
    fn progress(&self, records: u64) -> ProgressBar {
        let scrolls = io::stdout().is_terminal() && !self.summary;
        if scrolls { ProgressBar::hidden() } else { progress(records) }
    }
}

async fn play_all(
    player: &mut Player<'_, impl Write>,
    mut records: Records,
    progress: &ProgressBar,
    warnings: &mut Warnings,
) -> Result<()> {
    while let Some((records, read)) = records.next().await {
        let count = records.len() as u64;
        let unreadable = player.play_all(&records).await?;
        unplayed(unreadable, player, warnings)?;
        read?;
        progress.inc(count);
    }
    Ok(())
}

async fn play_waiting(player: &mut Player<'_, impl Write>, warnings: &mut Warnings) -> Result<()> {
    let played = player.decide_waiting().await?;
    unplayed(played.unreadable, player, warnings)
}

/// Reports and counts records that couldn't be decided.
fn unplayed(unreadable: Vec<Unreadable>, player: &mut Player<'_, impl Write>, warnings: &mut Warnings) -> Result<()> {
    unreadable.into_iter().try_for_each(|unreadable| {
        warnings.unreadable(unreadable)?;
        player.summary.unreadable(1);
        Ok(())
    })
}
