//! Decides records: one by one in this process, and many at once on a Redis.

use std::collections::HashSet;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::Result;
use futures_util::future::{join_all, try_join_all};
use tollgate::{
    Algorithm, Clock, Decision, Engine, Error, Limit, LimitDecision, Limiter, OwnedRequest, Request, RetryAfter, Rule,
};

use super::by_rules::ByRules;
use super::edge::Edges;
use super::summary::Summary;
use super::waves::waves;
use crate::held::{self, ByResponse, Held};
use crate::line::{Line, Printer};
use crate::operation;
use crate::output::counted;
use crate::records::{Record, Unreadable};
use crate::subject::{Subject, title};
use crate::verdict::{Judged, Plan};

#[derive(Debug)]
pub(crate) struct Player<'s, W: Write> {
    limiter: Limiter,
    plays: Plays<'s>,
    printer: Printer<W>,
    pub(crate) summary: Summary,
    held: Held,
    waiting: Vec<(Record, Asks<'s>)>,
    /// How many records are decided concurrently: several if each takes a round trip.
    together: usize,
    /// The embedded engine's clock, if it can follow the records.
    clock: Option<Followed>,
    /// What was admitted within each period, if that is asked for.
    edges: Option<Edges>,
    /// Whether only the summary is wanted.
    quiet: bool,
    played: u64,
}

/// A clock that is advanced to the time of each record, so that scripts decide in the engine's own time, which is
/// fastest. Records of the same time are decided together.
#[derive(Debug)]
struct Followed {
    clock: Clock,
    now_us: u64,
}

/// What decides.
#[derive(Debug)]
pub(crate) enum Plays<'s> {
    /// One rule, on keys; and the given ids with their keys.
    Rule(Arc<Subject>, HashSet<(Vec<u8>, Vec<u8>)>),
    /// A set of rules, on attributes.
    ByRules(ByRules<'s>),
}

/// The outcome of decided records.
#[derive(Debug, Default)]
pub(crate) struct Played {
    /// The units that they took.
    pub(crate) took: u64,
    /// Those that request something impossible.
    pub(crate) unreadable: Vec<Unreadable>,
}

/// The calls for a record.
#[derive(Debug)]
enum Asks<'s> {
    Rule(Box<KeyCall>),
    /// For the rule that applies, then for each shadow rule.
    ByRules(Vec<Plan<'s>>),
}

/// A call of one rule for a record's key.
#[derive(Debug)]
struct KeyCall {
    subject: Arc<Subject>,
    request: OwnedRequest,
    cost: u64,
    id: Option<Vec<u8>>,
}

#[derive(Debug)]
enum Answer<'s> {
    Rule(Box<KeyCall>, Box<Decision>),
    /// By the rule that applies.
    ByRules(Box<Judged<'s>>, Vec<Judged<'s>>),
}

impl Plays<'_> {
    /// The rule or set that decides, as text for people.
    pub(super) fn named(&self) -> String {
        match self {
            Self::Rule(subject, _) => subject.rule.to_string(),
            Self::ByRules(ByRules { only: Some(name), .. }) => format!("rule {name} of a set"),
            Self::ByRules(ByRules { rules, only: None, .. }) => {
                format!("a set of {}", counted(rules.definitions().len() as u64, "rule"))
            }
        }
    }
}

/// How many records are decided between checks for a signal.
const PLAYED_AT_A_TIME: u64 = 256;

/// The embedded engine decides at once, unless the process is stopped meanwhile.
const UNBOUNDED: Duration = Duration::from_secs(365 * 86_400);

/// How many records are decided concurrently on a Redis: more records share a round trip.
const TOGETHER: usize = 512;

impl<'s, W: Write> Player<'s, W> {
    pub(crate) fn new(limiter: Limiter, plays: Plays<'s>, printer: Printer<W>, quiet: bool) -> Self {
        let together = if matches!(limiter.engine(), Engine::Embedded(_)) { 1 } else { TOGETHER };
        let (summary, held) = (Summary::default(), Held::default());
        let (waiting, clock, edges) = (Vec::new(), None, None);
        Self { limiter, plays, printer, summary, held, waiting, together, clock, edges, quiet, played: 0 }
    }

    /// Follows what is admitted within each period.
    pub(crate) fn with_edges(self, edges: Edges) -> Self {
        Self { edges: Some(edges), ..self }
    }

    pub(crate) fn edges(&self) -> Option<&Edges> {
        self.edges.as_ref()
    }

    /// From now on, advances the embedded engine's clock by the records, which must be acquires without an id, sorted
    /// by time. Has no effect for a rule that does more than count, since its decisions may depend on when a key
    /// expires.
    pub(crate) fn follow(&mut self, clock: Clock) {
        let counts_alone = |rule: &Rule| {
            let (mut limits, mut parts) = (rule.limits(), rule.counted_parts());
            let is_plain = |limit: &Limit| !limit.algorithm().holds() && limit.algorithm() != Algorithm::CalendarWindow;
            let is_one = limits.len() == 1 && limits.all(is_plain) && parts.all(|part| part.is_none());
            is_one && rule.blocks_for().is_none() && rule.clone().count_overage(false) == *rule
        };
        if let Plays::Rule(subject, _) = &self.plays
            && self.together == 1
            && counts_alone(&subject.rule)
        {
            self.clock = Some(Followed { clock, now_us: 0 });
        }
    }

    /// Decides these records. Returns those that ask for something impossible.
    pub(crate) async fn play_all(&mut self, records: &[Record]) -> Result<Vec<Unreadable>> {
        if self.clock.is_some() {
            return self.play_by_clock(records).await;
        }
        let mut unreadable = Vec::new();
        for record in records {
            let played = self.play(record.clone()).await?;
            if let Some(edges) = &mut self.edges {
                // Units given back aren't subtracted, and penalties don't count as admitted.
                edges.note(&record.key, record.t_us, if operation::asks(record.op) { played.took } else { 0 });
                played.unreadable.iter().for_each(|_| self.summary.passed_over(record.t_us));
            }
            unreadable.extend(played.unreadable);
        }
        Ok(unreadable)
    }

    async fn play_by_clock(&mut self, records: &[Record]) -> Result<Vec<Unreadable>> {
        let mut unreadable = Vec::new();
        let mut rest = records;
        while let Some(first) = rest.first() {
            let count = if self.quiet {
                // All denials of a key at the same time have the same wait.
                rest.iter().take_while(|record| record.t_us == first.t_us).count()
            } else {
                let mut keys = HashSet::new();
                rest.iter().take_while(|record| record.t_us == first.t_us && keys.insert(&record.key)).count()
            };
            let (together, others) = rest.split_at(count);
            rest = others;
            self.decide_together(together, &mut unreadable).await?;
            // Signals arrive only while something waits.
            self.played += count as u64;
            if self.played >= PLAYED_AT_A_TIME {
                self.played = 0;
                tokio::task::yield_now().await;
            }
        }
        Ok(unreadable)
    }

    /// Decides records of one time.
    async fn decide_together(&mut self, records: &[Record], unreadable: &mut Vec<Unreadable>) -> Result<()> {
        let (Plays::Rule(subject, _), Some(followed), Some(first)) = (&self.plays, &mut self.clock, records.first())
        else {
            return Ok(());
        };
        followed.clock.advance(Duration::from_micros(first.t_us.saturating_sub(followed.now_us)));
        followed.now_us = first.t_us.max(followed.now_us);
        let subject = Arc::clone(subject);
        let parts = subject.parts();
        let cost = |record: &Record| record.cost.unwrap_or(subject.cost);
        let request = |record| Self::request(record, &parts).cost(cost(record)).deadline(UNBOUNDED);
        let decisions = match records {
            [one] => vec![self.limiter.acquire(&subject.rule, request(one)).await],
            several => self.limiter.acquire_many(&subject.rule, several.iter().map(request)).await,
        };
        for (record, decided) in records.iter().zip(decisions) {
            let Record { t_us, op, ref key, .. } = *record;
            // Before the decision, as for any other record.
            self.summary.touched(key);
            let decision = match decided {
                Ok(decision) => decision,
                Err(error) => {
                    unreadable.push(unplayable(record, error)?);
                    if self.edges.is_some() {
                        self.summary.passed_over(t_us);
                    }
                    continue;
                }
            };
            self.summary.decided(key, t_us, decision.allowed, Some(decision.retry_after));
            if let Some(edges) = &mut self.edges {
                edges.note(key, t_us, decision.granted);
            }
            if !self.quiet {
                self.printer.print(&Line::new(&subject, op, key, cost(record), &decision).at(t_us))?;
            }
        }
        Ok(())
    }

    fn request<'r>(record: &'r Record, parts: &'r [(&'r str, &'r [u8])]) -> Request<'r> {
        Request::new(&record.key).parts(parts)
    }

    /// The rule that decides, if a single one does.
    pub(super) fn subject(&self) -> Option<Arc<Subject>> {
        match &self.plays {
            Plays::Rule(subject, _) => Some(Arc::clone(subject)),
            Plays::ByRules(_) => None,
        }
    }

    /// Prints what another player has printed.
    pub(super) fn print_lines(&mut self, lines: &[u8]) -> io::Result<()> {
        self.printer.print_lines(lines)
    }

    pub(super) fn plays_a_set(&self) -> bool {
        matches!(self.plays, Plays::ByRules(_))
    }

    /// Decides the record, at once or together with the next ones.
    pub(crate) async fn play(&mut self, record: Record) -> Result<Played> {
        // The embedded engine never waits, and signals arrive only while something does.
        self.played += 1;
        if self.played.is_multiple_of(PLAYED_AT_A_TIME) {
            tokio::task::yield_now().await;
        }
        let record = match &self.plays {
            Plays::ByRules(set) => set.completed(record),
            Plays::Rule(..) => record,
        };
        let asks = match self.plan(&record) {
            Ok(asks) => asks,
            Err(error) => {
                let mut played = self.decide_waiting().await?;
                played.unreadable.push(unplayable(&record, error)?);
                return Ok(played);
            }
        };
        // Renewals and releases happen between records.
        if self.together == 1 || self.held.are_any() || asks.hold() {
            let mut played = self.decide_waiting().await?;
            self.held.until(&self.limiter, record.t_us).await?;
            let answer = self.ask(&record, asks).await;
            self.note(&record, answer, &mut played).await?;
            return Ok(played);
        }
        self.waiting.push((record, asks));
        if self.waiting.len() < self.together { Ok(Played::default()) } else { self.decide_waiting().await }
    }

    /// Decides the records that wait to be decided together.
    pub(super) async fn decide_waiting(&mut self) -> Result<Played> {
        let waiting = std::mem::take(&mut self.waiting);
        let waves = waves(waiting.iter().map(|(_, asks)| asks.keys(&self.limiter)));
        let (records, asks): (Vec<_>, Vec<_>) = waiting.into_iter().unzip();
        let mut asks: Vec<_> = asks.into_iter().map(Some).collect();
        let mut answers: Vec<_> = asks.iter().map(|_| None).collect();
        for wave in 0..=waves.iter().max().copied().unwrap_or(0) {
            let of_wave = (0..records.len()).filter(|at| waves[*at] == wave);
            let asked = of_wave.filter_map(|at| Some((at, asks[at].take()?)));
            let asked = asked.map(async |(at, asks)| (at, self.ask(&records[at], asks).await));
            for (at, answer) in join_all(asked).await {
                answers[at] = Some(answer);
            }
        }
        let mut played = Played::default();
        for (record, answer) in records.iter().zip(answers.into_iter().flatten()) {
            self.note(record, answer, &mut played).await?;
        }
        Ok(played)
    }

    fn plan(&mut self, record: &Record) -> Result<Asks<'s>, Error> {
        let Record { line, t_us, op, ref key, cost, ref id, .. } = *record;
        let (subject, ids) = match &mut self.plays {
            Plays::ByRules(set) => return set.plan(&self.limiter, record).map(Asks::ByRules),
            Plays::Rule(subject, ids) => (subject, ids),
        };
        self.summary.touched(key);
        let cost = cost.unwrap_or(subject.cost);
        // Permits are held by an id: the same one in every replay of the file.
        let own = (id.is_none() && operation::takes(op) && subject.holds()).then(|| format!("replay-{t_us}-{line}"));
        let id = id.clone().or(own.map(String::into_bytes));
        let parts = subject.parts();
        let mut request = Request::new(key).parts(&parts).cost(cost).at(UNIX_EPOCH + Duration::from_micros(t_us));
        if let Some(id) = &id {
            request = request.id(id);
            // The embedded engine's keys go with it.
            if self.together > 1 {
                ids.insert((key.clone(), id.clone()));
            }
        }
        let subject = Arc::clone(subject);
        Ok(Asks::Rule(Box::new(KeyCall { subject, request: request.into_owned(), cost, id })))
    }

    async fn ask(&self, record: &Record, asks: Asks<'s>) -> Result<Answer<'s>, Error> {
        match asks {
            Asks::ByRules(plans) => {
                let mut plans = plans.into_iter();
                let applies = plans.next().unwrap_or_else(Plan::refused);
                let mut shadows = Vec::with_capacity(plans.len());
                for plan in plans {
                    // A shadow rule that can't decide has no consequence.
                    shadows.extend(plan.decide(&self.limiter, record).await);
                }
                Ok(Answer::ByRules(Box::new(applies.decide(&self.limiter, record).await?), shadows))
            }
            Asks::Rule(call) => {
                let (rule, request) = (&call.subject.rule, Request::from(&call.request));
                let decision = operation::call(&self.limiter, rule, record.op, request, record.length).await?;
                Ok(Answer::Rule(call, Box::new(decision)))
            }
        }
    }

    /// Counts and prints an answer.
    async fn note(&mut self, record: &Record, answer: Result<Answer<'s>, Error>, played: &mut Played) -> Result<()> {
        match answer {
            Err(error) => played.unreadable.push(unplayable(record, error)?),
            Ok(Answer::ByRules(judged, shadows)) => {
                for judged in shadows.iter().chain([&*judged]) {
                    judged.hold(&mut self.held, &self.limiter, record).await?;
                }
                let key = judged.key_or_client(&record.attributes);
                self.summary.touched(&key);
                // A denial by no limit never ends by waiting.
                let decision = judged.asked.as_ref().map(|(_, decision)| decision);
                let asked = judged.asked.as_ref().map(|(call, decision)| wait_of(&call.rule, decision));
                let wait = asked.unwrap_or(Some(RetryAfter::Never));
                played.took += decision.map_or(0, |decision| decision.granted);
                self.summary.decided(&key, record.t_us, judged.allowed, wait);
                match judged.is_refused() {
                    true => self.summary.refused(),
                    false => judged.each().iter().for_each(|(rule, allowed)| self.summary.decided_by(*rule, *allowed)),
                }
                shadows.iter().for_each(|shadow| self.summary.shadow(shadow.rule(), shadow.allowed));
                if !self.quiet {
                    self.printer.print(&Line::of_verdict(&judged, &shadows, record))?;
                }
            }
            Ok(Answer::Rule(call, decision)) => {
                let KeyCall { subject, request, cost, id } = *call;
                let Record { t_us, op, ref key, length, .. } = *record;
                let call = (&subject.rule, &request, &ByResponse::Stays);
                self.held.note(&self.limiter, call, record, decision.allowed).await?;
                played.took += decision.granted;
                let wait = wait_of(&subject.rule, &decision);
                self.summary.decided(key, t_us, decision.allowed, wait);
                if !self.quiet {
                    let line = Line::new(&subject, op, key, cost, &decision).at(t_us).named(id.as_deref());
                    let request_time = if subject.holds() { record.request_time() } else { None };
                    self.printer.print(&line.lasting(length).held_for(request_time))?;
                }
            }
        }
        Ok(())
    }

    /// Reports permits that couldn't be replayed, and counts them.
    pub(crate) fn sum_up_permits(&mut self) {
        self.held.sum_up();
        self.summary.permits_not_replayed(self.held.not_replayed());
    }

    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.printer.flush()
    }

    /// Removes the keys that the replay wrote.
    pub(super) async fn forget_keys(&mut self) -> Result<(), Error> {
        if self.together == 1 {
            // The embedded engine's keys go with it.
            return Ok(());
        }
        let (subject, ids) = match &self.plays {
            Plays::ByRules(set) => return set.forget_keys(&self.limiter).await,
            Plays::Rule(subject, ids) => (subject, ids),
        };
        let (rule, parts) = (&subject.rule, subject.parts());
        let keys: Vec<_> = self.summary.keys().map(|(key, _)| key).collect();
        for keys in keys.chunks(TOGETHER) {
            try_join_all(keys.iter().map(|key| self.limiter.reset(rule, Request::new(key).parts(&parts)))).await?;
        }
        // Permits store their ids themselves.
        if rule.limits().all(|limit| limit.algorithm().holds()) {
            return Ok(());
        }
        for (key, id) in ids {
            self.limiter.reset(rule, Request::new(key).parts(&parts).id(id)).await?;
        }
        Ok(())
    }
}

impl Player<'_, Vec<u8>> {
    /// Takes what was printed since the last call.
    pub(super) fn take_printed(&mut self) -> Vec<u8> {
        self.printer.take()
    }
}

impl Asks<'_> {
    fn calls(&self) -> impl Iterator<Item = (&Rule, &OwnedRequest)> {
        let (one, several) = match self {
            Self::Rule(call) => (Some((&call.subject.rule, &call.request)), [].as_slice()),
            Self::ByRules(plans) => (None, plans.as_slice()),
        };
        let several = several.iter().filter_map(|plan| plan.call.as_ref());
        one.into_iter().chain(several.map(|call| (&call.rule, &call.request)))
    }

    /// Whether any of these calls holds something until its request ends.
    fn hold(&self) -> bool {
        let given_back = match self {
            Self::Rule(_) => false,
            Self::ByRules(plans) => {
                let mut calls = plans.iter().filter_map(|plan| plan.call.as_ref());
                calls.any(|call| matches!(call.counted, ByResponse::GivenBack(_)))
            }
        };
        given_back || self.calls().any(|(rule, _)| held::holds(rule))
    }

    /// The Redis keys that these calls use.
    fn keys(&self, limiter: &Limiter) -> Vec<String> {
        self.calls().flat_map(|(rule, request)| limiter.keys(rule, request).unwrap_or_default()).collect()
    }
}

/// Treats a record that requests something impossible as unreadable; other errors end the replay.
pub(crate) fn unplayable(record: &Record, error: Error) -> Result<Unreadable> {
    let line = record.line;
    match error {
        error if error.is_unknown_id() => Ok(Unreadable { line, reason: format!("id: {error}") }),
        // The rule doesn't support this operation.
        error if error.is_input() => Ok(Unreadable { line, reason: error.to_string() }),
        error => Err(error.into()),
    }
}

/// The wait that a denial has; none for permits, which another may give back at any time before they expire.
fn wait_of(rule: &Rule, decision: &Decision) -> Option<RetryAfter> {
    let denied = decision.limits.iter().filter(|limit| !limit.allowed).map(LimitDecision::name);
    let by_permits = denied.filter_map(|name| rule.limits().find(|limit| *title(limit) == **name));
    let waits_for_permits = !decision.blocked && by_permits.into_iter().any(|limit| limit.algorithm().holds());
    (!waits_for_permits).then_some(decision.retry_after)
}
