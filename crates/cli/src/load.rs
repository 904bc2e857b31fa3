//! `tollgate load`: how long decisions take under load, and whether they were right.

mod audit;
mod clock;
mod drawing;
mod histogram;
mod keys;
mod ledger;
mod pace;
mod page;
mod report;
mod run;
mod tally;

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;
use tollgate::{Limiter, Request};

use crate::interrupted::interrupted;
use crate::options::{self, Confirmation, FailureOptions, Options};
use crate::page::ReportFile;
use crate::rule_arguments::{Denials, RuleOptions, SEE_RULES};
use crate::subject::Subject;
use crate::{failed, found};
use audit::{Audit, SLACK};
use clock::Timeline;
use drawing::{Drawing, progress};
use histogram::Bucket;
use keys::{Keys, Spread};
use ledger::Ledger;
use report::{Mode, Quantiles, Report};
use run::{Bounds, Run};
use tally::Tally;

#[derive(Debug, Args)]
#[command(after_help = SEE_RULES)]
pub(crate) struct Load {
    /// The rule, such as "token-bucket 100/1s", or the name of one from --rules.
    ///
    /// Several are decided together, all or nothing.
    #[arg(value_name = "RULE", required = true)]
    rules: Vec<String>,
    /// Calls a second, each sent when it is due.
    ///
    /// Whether or not earlier ones were answered.
    #[arg(long, short = 'q', value_name = "N", default_value = "1000", allow_negative_numbers = true)]
    #[arg(value_parser = options::from_one::<u64, 10_000_000>, help_heading = "Load")]
    rate: u64,
    /// Instead of a rate: callers who call again as soon as they are answered.
    #[arg(long, short, value_name = "N", conflicts_with = "rate", allow_negative_numbers = true)]
    #[arg(value_parser = options::from_one::<u32, 10_000>, help_heading = "Load")]
    callers: Option<u32>,
    /// How calls spread over the keys.
    #[arg(long, value_enum, default_value_t = Spread::Uniform, help_heading = "Load")]
    keys: Spread,
    /// How many keys there are, for uniform and zipf. Default: 10000.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    #[arg(value_parser = options::from_one::<u32, 10_000_000>, help_heading = "Load")]
    key_count: Option<u32>,
    /// How unevenly zipf spreads: the n-th key in proportion to 1 / n^S. Default: 1.
    #[arg(long, value_name = "S", value_parser = exponent, allow_negative_numbers = true, help_heading = "Load")]
    zipf_exponent: Option<f64>,
    /// Units that each call takes.
    ///
    /// Default: 1, or what a rule in JSON or from --rules says.
    #[arg(long, value_name = "N", value_parser = options::units, allow_negative_numbers = true)]
    #[arg(help_heading = "Load")]
    cost: Option<u64>,
    /// How long to run before anything is measured.
    ///
    /// The audit counts these calls too.
    #[arg(long, value_name = "D", default_value = "1s", value_parser = length, help_heading = "Load")]
    warmup: Duration,
    /// How long to measure. Default: 10s, or as long as the count takes.
    #[arg(long, short = 'z', value_name = "D", value_parser = some_length, help_heading = "Load")]
    duration: Option<Duration>,
    /// How many calls to measure, at most.
    #[arg(long, short = 'n', value_name = "N", allow_negative_numbers = true)]
    #[arg(value_parser = options::from_one::<u64, MOST_CALLS>, help_heading = "Load")]
    count: Option<u64>,
    /// Draw the same keys again. Default: random, and reported.
    #[arg(long, value_name = "N", help_heading = "Load")]
    seed: Option<u64>,
    /// Don't compare what was admitted with an exact limiter.
    #[arg(long, help_heading = "Load")]
    no_audit: bool,
    /// Allow a Redis that isn't on this machine.
    #[arg(long, help_heading = "Redis")]
    remote: bool,
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

const KEY_COUNT: u32 = 10_000;
const ZIPF_EXPONENT: f64 = 1.0;
/// The largest count that a double represents exactly.
const MOST_CALLS: u64 = (1 << 53) - 1;
/// The default length of the measurement.
const DURATION: Duration = Duration::from_secs(10);
/// Calls delayed by more than this were sent late.
const LATE: Duration = Duration::from_millis(1);
/// How long the unmeasured calls before and after the run may take: Redis may have a lot to catch up with.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often progress is shown.
const TICK: Duration = Duration::from_millis(200);

impl Load {
    pub(crate) async fn run(self) -> Result<ExitCode> {
        let subject = self.denials.applied(self.subject()?)?.follow_policy(self.policy)?;
        let cost = subject.cost_or_own(self.cost)?;
        if let Some(address) = self.options.remote()?.filter(|_| !self.remote) {
            let expected = "expected a Redis on this machine (or --remote, to load another)";
            bail!("url: {expected}, got {address}");
        }
        self.check_keys()?;
        let report_file = self.report.open(&[self.about.rules_path()])?;
        let prefix = self.about.own_prefix("load");
        let limiter = self.about.of_prefix(&prefix, self.options.limiter(self.confirmation)?)?;
        self.options.say_who_decides();
        let patient = limiter.to_builder().deadline(PATIENCE).build();
        // Connects, and fails here if the server doesn't reply.
        let (first, _) = subject.drawn(0);
        patient.peek(&subject.rule, Request::new(&first).parts(&subject.parts())).await?;
        let timeline = Timeline::now(subject.name());
        let auditable = self.auditable(&subject, &timeline, &patient).await;

        let seed = self.seed.unwrap_or_else(|| fastrand::u64(..1 << 53));
        let ledger = auditable.is_ok().then(|| Ledger::new(seed, Ledger::MOST));
        let duration = self.duration.or(self.count.is_none().then_some(DURATION));
        let run = Arc::new(Run {
            limiter,
            holds: subject.holds(),
            subject,
            cost,
            keys: Keys::new(self.keys, self.key_count(), self.zipf_exponent.unwrap_or(ZIPF_EXPONENT)),
            seed,
            bounds: Bounds { warmup: self.warmup, duration, count: self.count },
            timeline,
            tally: Mutex::new(Tally::new(ledger)),
            stop: Arc::new(AtomicBool::new(false)),
        });
        self.make_calls(&run).await;

        until_it_answers(&run.timeline, &patient).await;
        let audit = match auditable {
            Ok(()) => judge(&run, &patient).await,
            Err(why) => Err(why),
        };
        let forgotten = patient.reset_all(run.subject.name(), |_| ()).await;
        let tally = run.tally();
        let mut code = ExitCode::SUCCESS;
        if let Err(error) = forgotten {
            code = failed(&format!("keys of prefix {prefix} are left until they expire: {error}"));
        }
        if tally.asked() == 0 {
            let why = "the run ended during the warm-up";
            bail!("no call was measured: {why}{}", tally.warmup);
        }
        let report = self.result(&run, &tally, &audit);
        let printed = report.print(anstream::stdout(), self.options.shape());
        if let Some(file) = report_file {
            file.write(&page::page(&report))?;
        }
        found(code, printed)?;
        if let Some(unanswered) = tally.unanswered() {
            let less = if self.callers.is_none() { "--rate" } else { "--callers" };
            let advice = if tally.errors.deadline + tally.unsent > 0 {
                format!("; if the load is too high, lower {less}")
            } else {
                String::new()
            };
            code = failed(&format!("{unanswered}{advice}"));
        }
        let faulty = audit.is_ok_and(|audit| audit.found_faults());
        Ok(if faulty { ExitCode::from(1) } else { code })
    }

    fn subject(&self) -> Result<Subject> {
        let Some(service) = self.about.rules_file()? else { return self.about.subject(&self.rules) };
        let [name] = self.rules.as_slice() else {
            let got = self.rules.len();
            bail!("rule: expected the name of one rule with --rules, got {got} names");
        };
        let subject = service.drawn(name, self.about.attributes()?)?;
        if subject.counts_all_as_one() && self.keys != Spread::Hot {
            let why = format!("since rule {name} counts all these calls as one");
            bail!("--keys: expected hot, {why}, got {}", self.keys.name());
        }
        Ok(subject)
    }

    fn key_count(&self) -> u32 {
        if self.keys == Spread::Hot { 1 } else { self.key_count.unwrap_or(KEY_COUNT) }
    }

    /// Rejects options that would have no effect.
    fn check_keys(&self) -> Result<()> {
        let keys = self.keys.name();
        if self.keys != Spread::Zipf && self.zipf_exponent.is_some() {
            bail!("--zipf-exponent: needs --keys zipf, got --keys {keys}");
        }
        if self.keys == Spread::Hot && self.key_count.is_some() {
            bail!("--key-count: needs --keys uniform or zipf, got --keys {keys}");
        }
        Ok(())
    }

    /// Checks that the run can be audited; the error says why not.
    async fn auditable(&self, subject: &Subject, timeline: &Timeline, limiter: &Limiter) -> Result<(), String> {
        if self.no_audit {
            return Err("--no-audit".into());
        }
        audit::fits(subject)?;
        one_clock(timeline, limiter).await
    }

    /// Makes calls until the run's bounds, or until interrupted.
    async fn make_calls(&self, run: &Arc<Run>) {
        let calls = async {
            match self.callers {
                Some(callers) => run.closed(callers).await,
                None => run.open(self.rate).await,
            }
        };
        tokio::pin!(calls);
        let unwanted = interrupted();
        tokio::pin!(unwanted);
        let mut drawing = Drawing::new();
        if drawing.is_shown() {
            run.tally().draw_recent();
        }
        let (began, mut ticks) = (Instant::now(), tokio::time::interval(TICK));
        loop {
            tokio::select! {
                () = &mut calls => break,
                _ = &mut unwanted, if !run.stop.load(Ordering::Relaxed) => run.stop.store(true, Ordering::Relaxed),
                _ = ticks.tick(), if drawing.is_shown() => {
                    let (now, mut tally) = (Instant::now(), run.tally());
                    drawing.move_to(run.bounds.share(now - began, tally.sent), tally.answers);
                    if let Some(recent) = &mut tally.recent {
                        drawing.add(now, recent);
                    }
                }
            }
        }
        drawing.clear();
    }

    fn result<'a>(&self, run: &Run, tally: &'a Tally, audit: &'a Result<Audit, String>) -> Report<'a> {
        let open = self.callers.is_none();
        Report {
            rules: run.subject.rule.limits().map(ToString::to_string).collect(),
            by: self.options.engine().to_string(),
            mode: self.callers.map_or(Mode::Open { rate: self.rate }, |callers| Mode::Closed { callers }),
            keys: self.keys.name(),
            key_count: self.key_count(),
            zipf_exponent: (self.keys == Spread::Zipf).then_some(self.zipf_exponent.unwrap_or(ZIPF_EXPONENT)),
            cost: run.cost,
            seed: run.seed,
            tally,
            unreleased: run.holds.then_some(tally.unreleased),
            late: open.then(|| tally.later_than(LATE)),
            lateness_us: Quantiles::of(&tally.lateness).filter(|_| open),
            latency_us: Quantiles::of(&tally.latency),
            latency_histogram: Bucket::all_of(&tally.latency),
            audit: audit.as_ref().ok(),
            no_audit: audit.as_ref().err(),
        }
    }
}

/// Checks that the engine's clock is close enough to this process's for the audit.
async fn one_clock(timeline: &Timeline, limiter: &Limiter) -> Result<(), String> {
    let offset = timeline.offset(limiter, SLACK).await;
    let offset = offset.map_err(|why| format!("the clock of the deciding engine can't be read: {why}"))?;
    if offset < SLACK {
        Ok(())
    } else {
        Err(format!("the deciding engine's clock may be {offset:?} off this machine's, too far for an audit"))
    }
}

/// The audit, or why there is none.
async fn judge(run: &Run, limiter: &Limiter) -> Result<Audit, String> {
    // One of the clocks may have been set during the run.
    one_clock(&run.timeline, limiter).await?;
    let (ledger, left_out) = {
        let mut tally = run.tally();
        (tally.ledger.take(), tally.left_out)
    };
    let total = ledger.as_ref().map_or(0, Ledger::total);
    let (calls, until) = ledger.map(Ledger::into_calls).unwrap_or_default();
    let bar = progress(calls.len() as u64, "{wide_bar} audited {human_pos} of {human_len} calls");
    let identity = |key| run.subject.drawn(key);
    let audit = audit::audit(&run.subject.rule, &identity, run.cost, &calls, until, |audited| bar.inc(audited as u64));
    let audit = tokio::select! {
        biased;
        _ = interrupted() => Err("interrupted".to_owned()),
        audit = audit => audit.map_err(|error| error.to_string()),
    };
    let of_beginning = until < u64::MAX;
    let audit = audit.map(|audit| Audit { total, left_out, of_beginning, ..audit });
    bar.finish_and_clear();
    audit
}

/// Waits a while: an overloaded Redis is behind and its breaker may be open, and one that lacks its replicas refuses
/// writes.
async fn until_it_answers(timeline: &Timeline, limiter: &Limiter) {
    let until = Instant::now() + PATIENCE;
    loop {
        if timeline.is_told(limiter).await || Instant::now() >= until {
            return;
        }
        tokio::time::sleep(TICK).await;
    }
}

fn exponent(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| (0.0..=10.0).contains(number));
    number.ok_or_else(|| "expected a number from 0 to 10".into())
}

fn length(text: &str) -> Result<Duration, String> {
    const LONGEST_LOAD: Duration = Duration::from_secs(30 * 86_400);
    let length = options::duration(text)?;
    if length <= LONGEST_LOAD { Ok(length) } else { Err("expected at most 30d".into()) }
}

fn some_length(text: &str) -> Result<Duration, String> {
    let length = length(text)?;
    if length.is_zero() { Err("expected more than 0s".into()) } else { Ok(length) }
}
