//! Decides records one by one.

use std::collections::HashSet;
use std::io::{self, Write};
use std::time::{Duration, UNIX_EPOCH};

use anyhow::Result;
use tollgate::{Error, Limiter, Request};

use super::by_rules::ByRules;
use super::summary::Summary;
use crate::held::Held;
use crate::line::{Line, Printer};
use crate::operation;
use crate::operation::call;
use crate::records::{Record, Unreadable};
use crate::subject::Subject;

#[derive(Debug)]
pub(super) struct Player<'s, W: Write> {
    limiter: Limiter,
    plays: Plays<'s>,
    printer: Printer<W>,
    pub(super) summary: Summary,
    held: Held,
    /// Whether only the summary is wanted.
    quiet: bool,
    played: u64,
}

/// What decides.
#[derive(Debug)]
pub(super) enum Plays<'s> {
    /// One rule, on keys; and the ids that were given, with their keys.
    Rule(Box<Subject>, HashSet<(Vec<u8>, Vec<u8>)>),
    /// A set of rules, on attributes.
    ByRules(ByRules<'s>),
}

/// How many records are decided between checks for a signal.
const PLAYED_AT_A_TIME: u64 = 256;

impl<'s, W: Write> Player<'s, W> {
    pub(super) fn new(limiter: Limiter, plays: Plays<'s>, printer: Printer<W>, quiet: bool) -> Self {
        Self { limiter, plays, printer, summary: Summary::default(), held: Held::default(), quiet, played: 0 }
    }

    pub(super) fn plays_a_set(&self) -> bool {
        matches!(self.plays, Plays::ByRules(_))
    }

    /// Decides the record; returns it as unreadable if it asks for something impossible.
    pub(super) async fn play(&mut self, record: &Record) -> Result<Option<Unreadable>> {
        // The embedded engine never waits, and signals arrive only while something does.
        self.played += 1;
        if self.played.is_multiple_of(PLAYED_AT_A_TIME) {
            tokio::task::yield_now().await;
        }
        self.held.until(&self.limiter, record.t_us).await?;
        match &mut self.plays {
            Plays::ByRules(set) => {
                let record = set.completed(record);
                let (judged, shadows) = match set.play(&self.limiter, &record, &mut self.held).await {
                    Ok(judged) => judged,
                    Err(error) => return unplayable(&record, error).map(Some),
                };
                let whom = judged.whom(&record.attributes);
                self.summary.touched(&whom);
                self.summary.decided(&whom, record.t_us, judged.allowed);
                match judged.is_refused() {
                    true => self.summary.refused(),
                    false => self.summary.decided_by(judged.rule(), judged.allowed),
                }
                shadows.iter().for_each(|shadow| self.summary.shadow(shadow.rule(), shadow.allowed));
                if !self.quiet {
                    self.printer.print(&Line::of_verdict(&judged, &shadows, &record))?;
                }
                Ok(None)
            }
            Plays::Rule(..) => self.play_key(record).await,
        }
    }

    async fn play_key(&mut self, record: &Record) -> Result<Option<Unreadable>> {
        let Plays::Rule(subject, ids) = &mut self.plays else { return Ok(None) };
        let Record { line, t_us, op, ref key, cost, ref id, length, .. } = *record;
        self.summary.touched(key);
        let cost = cost.unwrap_or(subject.cost);
        // Permits are held by an id: the same one in every replay of the file.
        let own = (id.is_none() && operation::takes(op) && subject.holds()).then(|| format!("replay-{t_us}-{line}"));
        let id = id.as_deref().or(own.as_deref().map(str::as_bytes));
        let parts = subject.parts();
        let mut request = Request::new(key).parts(&parts).cost(cost).at(UNIX_EPOCH + Duration::from_micros(t_us));
        if let Some(id) = id {
            request = request.id(id);
            ids.insert((key.clone(), id.to_vec()));
        }
        let decision = match call(&self.limiter, &subject.rule, op, request, length).await {
            Ok(decision) => decision,
            Err(error) => return unplayable(record, error).map(Some),
        };
        self.held.note(&self.limiter, &subject.rule, &request.into_owned(), record, decision.allowed).await?;
        self.summary.decided(key, t_us, decision.allowed);
        if !self.quiet {
            let line = Line::new(subject, op, key, cost, &decision).at(t_us).named(id).lasting(length);
            let request_time = if subject.holds() { record.request_time() } else { None };
            self.printer.print(&line.held_for(request_time))?;
        }
        Ok(None)
    }

    /// Reports permits that couldn't be replayed, and counts them.
    pub(super) fn sum_up_permits(&mut self) {
        self.held.sum_up();
        self.summary.permits_not_replayed(self.held.not_replayed());
    }

    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.printer.flush()
    }

    /// Removes the keys that the replay wrote.
    pub(super) async fn forget_keys(&mut self) -> Result<(), Error> {
        let (subject, ids) = match &self.plays {
            Plays::ByRules(set) => return set.forget_keys(&self.limiter).await,
            Plays::Rule(subject, ids) => (subject, ids),
        };
        let (rule, parts) = (&subject.rule, subject.parts());
        for key in self.summary.keys() {
            self.limiter.reset(rule, Request::new(key).parts(&parts)).await?;
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

/// Treats a record that asks for something impossible as unreadable; other errors end the replay.
pub(crate) fn unplayable(record: &Record, error: Error) -> Result<Unreadable> {
    let line = record.line;
    match error {
        error if error.is_unknown_id() => Ok(Unreadable { line, reason: format!("id: {error}") }),
        // The rule doesn't support this operation.
        error if error.is_input() => Ok(Unreadable { line, reason: error.to_string() }),
        error => Err(error.into()),
    }
}
