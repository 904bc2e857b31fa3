//! Plays the same records under several rules at once, each in a thread of its own.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc as ahead;
use std::thread::JoinHandle;

use anyhow::{Context, Result, anyhow};
use indicatif::ProgressBar;
use tokio::sync::mpsc;

use super::Contender;
use crate::records::{Record, Unreadable};
use crate::replay::{Records, Warnings};

/// How many chunks of records a rule may be ahead of another.
const AHEAD: usize = 8;

/// A rule's thread.
struct Worker {
    records: ahead::SyncSender<Arc<Vec<Record>>>,
    /// For each chunk, the records that the rule can't decide.
    unplayed: mpsc::Receiver<Result<Vec<Unreadable>>>,
    thread: JoinHandle<Contender>,
}

/// Plays all records, and reports those that a rule can't decide. If `are_plain`, the engines' clocks can follow them.
pub(super) async fn play(
    contenders: Vec<Contender>,
    are_plain: bool,
    mut records: Records,
    progress: &ProgressBar,
    warnings: &mut Warnings,
) -> Result<Vec<Contender>> {
    let workers = contenders.into_iter().map(|contender| Worker::start(contender, are_plain));
    let mut workers = workers.collect::<Result<Vec<_>>>()?;
    let mut under_way = VecDeque::with_capacity(AHEAD);
    while let Some((chunk, read)) = records.next().await {
        let (count, chunk) = (chunk.len() as u64, Arc::new(chunk));
        for worker in &workers {
            // A worker that has ended reports why itself.
            let _ = worker.records.send(Arc::clone(&chunk));
        }
        under_way.push_back(chunk);
        if under_way.len() == AHEAD {
            take(&mut workers, under_way.pop_front(), warnings).await?;
        }
        read?;
        progress.inc(count);
    }
    while let Some(chunk) = under_way.pop_front() {
        take(&mut workers, Some(chunk), warnings).await?;
    }
    workers.into_iter().map(Worker::end).collect()
}

/// Reports the records of the oldest chunk that rules could not decide, in its order and then by rule.
async fn take(workers: &mut [Worker], chunk: Option<Arc<Vec<Record>>>, warnings: &mut Warnings) -> Result<()> {
    let mut unplayed = Vec::new();
    for worker in workers {
        unplayed.extend(worker.unplayed.recv().await.with_context(ended)??);
    }
    if unplayed.is_empty() {
        return Ok(());
    }
    let places = chunk.iter().flat_map(|chunk| chunk.iter()).enumerate().map(|(at, record)| (record.line, at));
    let places: HashMap<_, _> = places.collect();
    unplayed.sort_by_key(|unreadable| places.get(&unreadable.line).copied());
    unplayed.into_iter().try_for_each(|unreadable| warnings.unreadable(unreadable))
}

fn ended() -> String {
    "the thread of a rule has ended".to_owned()
}

impl Worker {
    fn start(mut contender: Contender, are_plain: bool) -> Result<Self> {
        let (records, chunks) = ahead::sync_channel::<Arc<Vec<Record>>>(AHEAD);
        let (tell, unplayed) = mpsc::channel(AHEAD);
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        if are_plain {
            contender.player.follow(contender.clock.clone());
        }
        let thread = std::thread::Builder::new().name("rule".to_owned()).spawn(move || {
            for chunk in chunks {
                let played = runtime.block_on(contender.play(&chunk));
                let failed = played.is_err();
                if tell.blocking_send(played).is_err() || failed {
                    break;
                }
            }
            contender
        })?;
        Ok(Self { records, unplayed, thread })
    }

    fn end(self) -> Result<Contender> {
        drop(self.records);
        self.thread.join().map_err(|_| anyhow!(ended()))
    }
}
