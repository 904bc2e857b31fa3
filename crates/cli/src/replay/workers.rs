//! The records of one rule decided by several threads, by the embedded engine. Each has an engine of its own and
//! decides the records of its share of the keys. Keys are independent, so every decision is the same as with one
//! thread.

use std::collections::{HashSet, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::sync::Arc;
use std::sync::mpsc as ahead;
use std::thread::JoinHandle;

use anyhow::{Context, Result, anyhow};
use indicatif::ProgressBar;
use tokio::sync::mpsc;
use tollgate::{Clock, Limiter};

use super::player::{Player, Plays};
use super::recording::Records;
use super::unreadable::Warnings;
use crate::held;
use crate::line::Printer;
use crate::output::Shape;
use crate::records::{Record, Unreadable};
use crate::subject::Subject;

/// How many chunks of records a thread may be ahead of what is printed.
const AHEAD: usize = 8;

/// More threads than this would wait for the reading one.
const MOST: usize = 8;

pub(super) struct Workers {
    workers: Vec<Worker>,
    hasher: RandomState,
}

/// A thread that decides.
struct Worker {
    records: ahead::SyncSender<Vec<Record>>,
    /// The results, for each chunk.
    parts: mpsc::Receiver<Result<Part>>,
    thread: JoinHandle<Player<'static, Vec<u8>>>,
}

/// The results of a thread for its records of a chunk.
struct Part {
    /// A line for each decided record, unless only a summary is wanted.
    lines: Vec<u8>,
    unplayed: VecDeque<Unreadable>,
    /// How many of the lines are printed.
    printed: usize,
}

impl Workers {
    /// How many threads can decide for this rule, with decisions printed in this shape, or `None` for a summary.
    pub(super) fn count(subject: &Subject, shape: Option<Shape>) -> usize {
        // A part has the same value for every key, so its limit is shared. Permits are reported in total, and a table
        // has one header.
        let one = subject.counts_a_part().is_some() || held::holds(&subject.rule) || shape == Some(Shape::Table);
        if one { 1 } else { std::thread::available_parallelism().map_or(1, |threads| threads.get().min(MOST)) }
    }

    /// Starts one for each of these limiters, whose engines must not be shared; `follow` if their clocks have to follow
    /// the records.
    pub(super) fn start(
        subject: &Arc<Subject>,
        limiters: Vec<(Limiter, Clock)>,
        quiet: bool,
        follow: bool,
    ) -> Result<Self> {
        let workers = limiters.into_iter().map(|(limiter, clock)| {
            let plays = Plays::Rule(Arc::clone(subject), HashSet::new());
            let mut player = Player::new(limiter, plays, Printer::new(Vec::new(), Shape::Jsonl), quiet);
            if follow {
                player.follow(clock);
            }
            Worker::start(player)
        });
        Ok(Self { workers: workers.collect::<Result<_>>()?, hasher: RandomState::new() })
    }

    /// Plays all records; prints and sums up the decisions for this player, in the order of the records.
    pub(super) async fn play_all(
        mut self,
        player: &mut Player<'_, impl Write>,
        mut records: Records,
        progress: &ProgressBar,
        warnings: &mut Warnings,
    ) -> Result<()> {
        let mut under_way = VecDeque::with_capacity(AHEAD);
        while let Some((chunk, read)) = records.next().await {
            let count = chunk.len() as u64;
            under_way.push_back(self.hand_out(chunk));
            if under_way.len() == AHEAD {
                self.take(under_way.pop_front().unwrap_or_default(), player, warnings).await?;
            }
            if read.is_err() {
                // Records before the error are still decided.
                while let Some(chunk) = under_way.pop_front() {
                    self.take(chunk, player, warnings).await?;
                }
            }
            read?;
            progress.inc(count);
        }
        while let Some(chunk) = under_way.pop_front() {
            self.take(chunk, player, warnings).await?;
        }
        for worker in self.workers {
            player.summary.add(worker.end()?.summary);
        }
        Ok(())
    }

    /// Returns which worker decides each record, and its line.
    fn hand_out(&self, chunk: Vec<Record>) -> Vec<(usize, u64)> {
        let mut shares: Vec<_> = self.workers.iter().map(|_| Vec::with_capacity(chunk.len())).collect();
        let count = shares.len() as u64;
        let whose = chunk.into_iter().map(|record| {
            let (line, hash) = (record.line, self.hasher.hash_one(&record.key));
            let at = usize::try_from(hash % count).unwrap_or_default();
            shares[at].push(record);
            (at, line)
        });
        let whose = whose.collect();
        for (worker, share) in self.workers.iter().zip(shares) {
            // A worker that has ended reports why itself.
            let _ = worker.records.send(share);
        }
        whose
    }

    /// Prints the decisions of the oldest chunk, and reports the records that could not be decided.
    async fn take(
        &mut self,
        whose: Vec<(usize, u64)>,
        player: &mut Player<'_, impl Write>,
        warnings: &mut Warnings,
    ) -> Result<()> {
        let mut parts = Vec::with_capacity(self.workers.len());
        for worker in &mut self.workers {
            parts.push(worker.parts.recv().await.with_context(ended)??);
        }
        if parts.iter().all(|part| part.lines.is_empty() && part.unplayed.is_empty()) {
            return Ok(());
        }
        for (at, line) in whose {
            let part = &mut parts[at];
            if part.unplayed.front().is_some_and(|unreadable| unreadable.line == line)
                && let Some(unreadable) = part.unplayed.pop_front()
            {
                warnings.unreadable(unreadable)?;
                player.summary.unreadable(1);
            } else {
                player.print_lines(part.next_line())?;
            }
        }
        Ok(())
    }
}

impl Part {
    /// The next line, with its line end.
    fn next_line(&mut self) -> &[u8] {
        let rest = &self.lines[self.printed..];
        let line = rest.split_inclusive(|byte| *byte == b'\n').next().unwrap_or_default();
        self.printed += line.len();
        line
    }
}

fn ended() -> String {
    "the thread of a share of the keys has ended".to_owned()
}

impl Worker {
    fn start(mut player: Player<'static, Vec<u8>>) -> Result<Self> {
        let (records, chunks) = ahead::sync_channel::<Vec<Record>>(AHEAD);
        let (tell, parts) = mpsc::channel(AHEAD);
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        let thread = std::thread::Builder::new().name("share".to_owned()).spawn(move || {
            for chunk in chunks {
                let played = runtime.block_on(player.play_all(&chunk));
                let failed = played.is_err();
                let part =
                    played.map(|unplayed| Part { lines: player.take_printed(), unplayed: unplayed.into(), printed: 0 });
                if tell.blocking_send(part).is_err() || failed {
                    break;
                }
            }
            player
        })?;
        Ok(Self { records, parts, thread })
    }

    fn end(self) -> Result<Player<'static, Vec<u8>>> {
        drop(self.records);
        self.thread.join().map_err(|_| anyhow!(ended()))
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use tollgate::{Embedded, Operation};

    use super::*;
    use crate::records::Permits;
    use crate::replay::summary::Order;
    use crate::rule_arguments::subject_of;

    fn engines(count: usize) -> Vec<(Limiter, Clock)> {
        let clocks = (0..count).map(|_| Clock::new(UNIX_EPOCH));
        clocks.map(|clock| (Limiter::new(Embedded::with_clock(clock.clone())), clock)).collect()
    }

    fn records(plain: bool) -> Vec<Record> {
        let (mut random, mut t_us) = (fastrand::Rng::with_seed(31), 1_000_000_000_000);
        let record = |line| {
            t_us += [0, 0, 0, 1, 999, 250_000, 61_000_000][random.usize(0..7)];
            let asks = [Operation::Acquire, Operation::Peek, Operation::Refund, Operation::Reserve];
            let op = if plain { Operation::Acquire } else { asks[random.usize(0..4)] };
            let (key, cost) = (vec![b'a' + random.u8(0..9)], Some(random.u64(0..4)));
            let (id, length, permits, status, attributes) = (None, None, Permits::ByRecords, None, Vec::new());
            Record { line, t_us, op, key, cost, id, length, permits, status, attributes }
        };
        (1..1_000).map(record).collect()
    }

    /// What is printed, and the summary.
    fn said(mut player: Player<'static, Vec<u8>>) -> [String; 2] {
        let (printed, mut totals) = (player.take_printed(), Vec::new());
        player.summary.print(&mut totals, Shape::Jsonl, Order::Sorted).unwrap();
        [printed, totals].map(|text| String::from_utf8(text).unwrap())
    }

    #[tokio::test]
    async fn keys_are_decided_alike_by_one_thread_and_by_several() {
        for (rule, plain) in [
            ("gcra 10/1s burst 4", true),
            ("fixed-window 5/1m start spread", true),
            ("sliding-log 6/1m", true),
            ("sliding-log 6/1m", false),
            ("gcra 10/1s burst 4, fixed-window 9/1m", true),
            ("token-bucket 3/1m burst 6 max-debt 9", false),
            ("fixed-window 40/day", true),
        ] {
            for quiet in [false, true] {
                let (subject, records) = (Arc::new(subject_of(rule).unwrap()), records(plain));
                let new = || {
                    let (limiter, clock) = engines(1).remove(0);
                    let plays = Plays::Rule(Arc::clone(&subject), HashSet::new());
                    (Player::new(limiter, plays, Printer::new(Vec::new(), Shape::Jsonl), quiet), clock)
                };
                let (mut one, clock) = new();
                if plain {
                    one.follow(clock);
                }
                let unplayed = one.play_all(&records).await.unwrap();
                one.summary.unreadable(unplayed.len() as u64);
                let (mut all, _) = new();
                let mut warnings = Warnings::new("records", false);
                warnings.read();
                let workers = Workers::start(&subject, engines(3), quiet, plain).unwrap();
                let records = Records::of(records);
                workers.play_all(&mut all, records, &ProgressBar::hidden(), &mut warnings).await.unwrap();
                let (expected, found) = (said(one), said(all));
                assert!(found == expected, "{rule}: {} {}", found[1], expected[1]);
                assert!(expected[1].contains("\"denied\":") && quiet == expected[0].is_empty(), "{rule}");
            }
        }
    }
}
