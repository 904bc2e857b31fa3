//! Decides records one after the other.

use std::collections::HashSet;
use std::io::{self, Write};
use std::time::{Duration, UNIX_EPOCH};

use tollgate::{Limiter, Request};

use super::summary::Summary;
use crate::Failure;
use crate::output::{Line, Printer};
use crate::probe::decide;
use crate::records::{Record, Unreadable};
use crate::subject::Subject;

#[derive(Debug)]
pub(super) struct Player<W: Write> {
    limiter: Limiter,
    subject: Subject,
    printer: Printer<W>,
    pub(super) summary: Summary,
    /// Only the summary is wanted.
    quiet: bool,
    played: u64,
    /// The ids that were given, and the keys they were given for.
    ids: HashSet<(Vec<u8>, Vec<u8>)>,
}

/// After how many records a signal is looked for.
const PLAYED_AT_A_TIME: u64 = 256;

impl<W: Write> Player<W> {
    pub(super) fn new(limiter: Limiter, subject: Subject, printer: Printer<W>, quiet: bool) -> Self {
        Self { limiter, subject, printer, summary: Summary::default(), quiet, played: 0, ids: HashSet::new() }
    }

    /// Decides the record, unless it asks for what can't be done.
    pub(super) async fn play(&mut self, record: &Record) -> Result<Option<Unreadable>, Failure> {
        let Record { line, t_us, op, ref key, cost, ref id, length } = *record;
        // The embedded engine never waits, and signals arrive only while something does.
        self.played += 1;
        if self.played.is_multiple_of(PLAYED_AT_A_TIME) {
            tokio::task::yield_now().await;
        }
        self.summary.touched(key);
        let cost = cost.unwrap_or(self.subject.cost);
        // Permits are held by an id, the same one in every replay of the file.
        let own = (id.is_none() && op.takes() && self.subject.holds()).then(|| format!("replay-{t_us}-{line}"));
        let id = id.as_deref().or(own.as_deref().map(str::as_bytes));
        let parts = self.subject.parts();
        let mut request = Request::new(key).parts(&parts).cost(cost).at(UNIX_EPOCH + Duration::from_micros(t_us));
        if let Some(id) = id {
            request = request.id(id);
            self.ids.insert((key.clone(), id.to_vec()));
        }
        let decision = match decide(&self.limiter, &self.subject.rule, op, request, length).await {
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
            let line = Line::new(&self.subject, op, key, cost, &decision);
            self.printer.print(&line.at(t_us).named(id).lasting(length))?;
        }
        Ok(None)
    }

    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.printer.flush()
    }

    /// Removes what the replay wrote.
    pub(super) async fn forget_keys(&mut self) -> Result<(), tollgate::Error> {
        let (rule, parts) = (&self.subject.rule, self.subject.parts());
        for key in self.summary.keys() {
            self.limiter.reset(rule, Request::new(key).parts(&parts)).await?;
        }
        // Permits alone remember their ids themselves.
        if rule.limits().all(|limit| limit.algorithm().holds()) {
            return Ok(());
        }
        for (key, id) in &self.ids {
            self.limiter.reset(rule, Request::new(key).parts(&parts).id(id)).await?;
        }
        Ok(())
    }
}
