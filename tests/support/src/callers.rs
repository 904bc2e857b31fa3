//! Callers that keep calling while servers fail, and the outcomes of their calls.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use tollgate::{Charged, DecidedBy, Decision, Error, Limiter, Rule};

use crate::polling::{in_time, wait_until};

/// A call that ends so long after its deadline has waited for something else, however busy the machine is.
pub const SLACK: Duration = Duration::from_secs(8);

pub struct Callers {
    over: Arc<AtomicBool>,
    answers: Arc<AtomicU64>,
    tasks: Vec<JoinHandle<Outcomes>>,
}

/// Outcomes of callers' calls.
#[derive(Debug, Default)]
pub struct Outcomes {
    pub keys: HashMap<String, KeyOutcomes>,
    /// Calls that ended in an error, by its class.
    pub errors: BTreeMap<&'static str, u64>,
    /// Answers that didn't come from Redis.
    pub instead: u64,
    pub longest: Duration,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct KeyOutcomes {
    pub allowed: u64,
    pub denied: u64,
    /// Calls that may have been charged, by their errors.
    pub unknown: u64,
}

impl Callers {
    /// So many of them, each going round these keys.
    pub fn start(count: usize, limiter: &Limiter, rule: &Rule, keys: &[String]) -> Self {
        let (over, answers) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let caller = |first| {
            let (limiter, rule, keys) = (limiter.clone(), rule.clone(), keys.to_vec());
            let (over, answers) = (Arc::clone(&over), Arc::clone(&answers));
            tokio::spawn(async move {
                let mut told = Outcomes::default();
                for key in keys.iter().cycle().skip(first * keys.len() / count) {
                    if over.load(Ordering::Relaxed) {
                        break;
                    }
                    let began = Instant::now();
                    let answer = in_time(limiter.acquire(&rule, key)).await;
                    answers.fetch_add(u64::from(is_by_redis(&answer)), Ordering::Relaxed);
                    told.add(key, &answer, began.elapsed());
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
                told
            })
        };
        let tasks = (0..count).map(caller).collect();
        Self { over, answers, tasks }
    }

    /// Waits until Redis has answered so many more calls.
    pub async fn answered(&self, more: u64) {
        let before = self.answers.load(Ordering::Relaxed);
        wait_until("Redis answers", async || self.answers.load(Ordering::Relaxed) >= before + more).await;
    }

    pub async fn end(self) -> Outcomes {
        self.over.store(true, Ordering::Relaxed);
        let mut all = Outcomes::default();
        for task in self.tasks {
            all.merge(task.await.expect("a task"));
        }
        all
    }
}

fn is_by_redis(answer: &Result<Decision, Error>) -> bool {
    answer.as_ref().is_ok_and(|decision| decision.by == DecidedBy::Redis)
}

impl Outcomes {
    pub fn add(&mut self, key: &str, answer: &Result<Decision, Error>, after: Duration) {
        let of_key = self.keys.entry(key.to_owned()).or_default();
        match answer {
            Ok(decision) if decision.by != DecidedBy::Redis => self.instead += 1,
            Ok(decision) if decision.allowed => of_key.allowed += 1,
            Ok(_) => of_key.denied += 1,
            Err(error) => {
                of_key.unknown += u64::from(error.charged() == Charged::Unknown);
                *self.errors.entry(error.kind().name()).or_default() += 1;
            }
        }
        self.longest = self.longest.max(after);
    }

    fn merge(&mut self, other: Self) {
        for (key, of) in other.keys {
            let of_key = self.keys.entry(key).or_default();
            of_key.allowed += of.allowed;
            of_key.denied += of.denied;
            of_key.unknown += of.unknown;
        }
        for (class, count) in other.errors {
            *self.errors.entry(class).or_default() += count;
        }
        self.instead += other.instead;
        self.longest = self.longest.max(other.longest);
    }

    pub fn allowed(&self) -> u64 {
        self.keys.values().map(|of| of.allowed).sum()
    }

    pub fn denied(&self) -> u64 {
        self.keys.values().map(|of| of.denied).sum()
    }

    /// Nothing went wrong, and every answer is Redis's, by the deadline.
    pub fn is_undisturbed(&self, deadline: Duration) {
        assert!(self.errors.is_empty() && self.instead == 0, "{self:?}");
        self.is_in_time(deadline);
    }

    pub fn is_in_time(&self, deadline: Duration) {
        assert!(self.longest < deadline + SLACK, "{:?} for a deadline of {deadline:?}", self.longest);
    }

    /// Each key was admitted at most its capacity, and once more at most for each loss of counts. A denied key had
    /// taken what there was, or may have.
    pub fn is_within(&self, capacity: u64, losses: u64) {
        for (key, of) in &self.keys {
            assert!(of.allowed <= capacity * (1 + losses), "{key}: {of:?}");
            assert!(of.denied == 0 || of.allowed + of.unknown >= capacity, "{key} was denied too soon: {of:?}");
        }
    }
}
