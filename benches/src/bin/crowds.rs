//! 100,000 calls at once: of one limit, of several limits, with ids, and for permits. Each is to end by its deadline,
//! whether Redis answers, is frozen, or moves slots to another node; and a caller of one limit beside them is not to
//! wait for them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;
use tollgate::{Charged, Decision, Engine, Error, Limiter, Request, Rule};
use tollgate_benches::options::Options;
use tollgate_benches::process::processor_time;
use tollgate_benches::report::{Targets, header, row, short};
use tollgate_benches::rule;
use tollgate_benches::server::{Cluster, Server};

const CROWD: usize = 100_000;
const DEADLINE: Duration = Duration::from_millis(500);

const PLAIN: &str = "token-bucket 1000000/1s";

/// What a crowd asks, its rule, whether each call has an id, and how many may be in flight at once: one by itself, and
/// two batches.
const ASKED: [(&str, &str, bool, usize); 4] = [
    ("one limit", PLAIN, false, 1 + 2 * 1024),
    ("two limits", "token-bucket 1000000/1s, fixed-window 1000000/1h", false, 1 + 2 * 256),
    ("an id", PLAIN, true, 1 + 2 * 170),
    ("a permit", "concurrency 10000 ttl 1m", true, 1 + 2 * 512),
];

struct Bench {
    server: Server,
    keys: Arc<[String]>,
    one: Rule,
    runtime: Runtime,
    targets: Targets,
    turns: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Healthy,
    Frozen,
    Moving,
}

/// How the crowd sends its calls.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Who {
    Callers,
    Many,
}

/// What became of a crowd.
#[derive(Default)]
struct Ended {
    answered: usize,
    unsent: usize,
    unknown: usize,
    /// When the last was answered after its deadline, and the longest that somebody beside them was kept: milliseconds.
    late_ms: f64,
    beside_ms: f64,
    /// Processor time of this process for each call, in microseconds.
    client_us: f64,
}

fn main() {
    let options = Options::read();
    let mut bench = Bench {
        server: Server::start(),
        keys: (0..CROWD).map(|key| format!("user:{key}")).collect(),
        one: rule(PLAIN),
        runtime: Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime"),
        targets: Targets::default(),
        turns: options.rounds.div_ceil(3),
    };
    println!("## Crowds\n");
    println!("{CROWD} calls at once, each to be answered within {DEADLINE:?}: how many Redis answered, how many were");
    println!("never sent, how many may have been charged; by how many milliseconds the last was late; and the");
    println!("longest that somebody waited who asked for one limit meanwhile, again and again; and the client's");
    println!(
        "processor time for each call. In the first row all of them only sleep: what tokio needs for the tasks.\n"
    );
    println!("{}", header(&["", "answered", "unsent", "unknown", "late, ms", "beside, ms", "client, µs"]));
    bench.measure("sleeps", Bench::slept);
    for (what, text, has_id, most) in ASKED {
        let (rule, is_plain) = (rule(text), text == PLAIN && !has_id);
        let mut in_flight = 0;
        for who in [Who::Callers, Who::Many] {
            let mut worst = Ended::default();
            for state in [State::Healthy, State::Frozen, State::Moving] {
                let what = format!("{what}, {}, {}", who.name(), state.name());
                let ended = bench.measure(&what, |bench| bench.turn(&rule, has_id, state, who));
                worst.late_ms = worst.late_ms.max(ended.late_ms);
                worst.client_us = worst.client_us.max(ended.client_us);
                // Nobody is answered by a frozen server.
                if state == State::Frozen {
                    in_flight = in_flight.max(ended.unknown);
                } else {
                    worst.beside_ms = worst.beside_ms.max(ended.beside_ms);
                }
            }
            // Others are compared with them.
            if is_plain {
                continue;
            }
            let what = format!("{CROWD} at once, {what}, {}", who.name());
            let targets = &mut bench.targets;
            targets.at_most(format!("{what}: the last after its deadline, ms"), 300.0, worst.late_ms).wanted(10.0);
            targets.at_most(format!("{what}: somebody beside them, ms"), 400.0, worst.beside_ms).wanted(50.0);
            targets.at_most(format!("{what}: client time, µs a call"), 12.0, worst.client_us).wanted(5.0);
        }
        if !is_plain {
            let what = format!("{CROWD} at once, {what}: in flight when the server freezes");
            bench.targets.at_most(what, most as f64, in_flight as f64);
        }
    }
    println!("\n{}", bench.targets);
}

impl Bench {
    /// The worst of some turns, which it prints.
    fn measure(&self, what: &str, turn: impl Fn(&Self) -> Ended) -> Ended {
        eprintln!("crowds: {what}");
        let turns = (0..self.turns).map(|_| turn(self));
        let worst = turns.max_by(|one, other| one.late_ms.total_cmp(&other.late_ms)).expect("a turn");
        let Ended { answered, unsent, unknown, late_ms, beside_ms, client_us } = worst;
        let counts = [answered, unsent, unknown].map(|count| count.to_string());
        println!(
            "{}",
            row([&[what.to_owned()][..], &counts, &[short(late_ms), short(beside_ms), short(client_us)]].concat())
        );
        worst
    }

    fn slept(&self) -> Ended {
        let before = processor_time();
        let ended = self.runtime.block_on(async {
            let over = Arc::new(AtomicBool::new(false));
            let beside = tokio::spawn(beside(Arc::clone(&over), || tokio::time::sleep(Duration::ZERO)));
            let sleepers = tokio::spawn(async {
                let mut tasks = JoinSet::new();
                for _ in 0..CROWD {
                    tasks.spawn(async {
                        let began = Instant::now();
                        tokio::time::sleep(DEADLINE).await;
                        began.elapsed()
                    });
                }
                let mut ended = Ended::default();
                while let Some(task) = tasks.join_next().await {
                    ended.late(task.expect("a task that has slept"));
                }
                ended
            });
            let mut ended = sleepers.await.expect("a crowd that has slept");
            over.store(true, Ordering::Relaxed);
            ended.beside_ms = beside.await.expect("somebody who has slept");
            ended
        });
        Ended { client_us: (processor_time() - before).as_secs_f64() * 1e6 / CROWD as f64, ..ended }
    }

    fn turn(&self, rule: &Rule, has_id: bool, state: State, who: Who) -> Ended {
        let cluster = (state == State::Moving).then(|| Cluster::start(2));
        let url = cluster.as_ref().map_or_else(|| self.server.url(), Cluster::url);
        let limiter = Limiter::builder(Engine::open(&url).expect("a good address")).deadline(DEADLINE).build();
        // Each node is connected to.
        let connected = limiter.acquire_many(&self.one, &self.keys[..100]);
        assert!(self.runtime.block_on(connected).iter().all(Result::is_ok), "nobody else asks yet");
        if state == State::Frozen {
            self.server.signal("STOP");
        }
        let over = AtomicBool::new(false);
        let ended = thread::scope(|scope| {
            if let Some(cluster) = &cluster {
                scope.spawn(|| cluster.move_slots(&over));
            }
            let before = processor_time();
            let ended = self.runtime.block_on(self.crowd(limiter, rule.clone(), has_id, who));
            let client_us = (processor_time() - before).as_secs_f64() * 1e6 / CROWD as f64;
            over.store(true, Ordering::Relaxed);
            Ended { client_us, ..ended }
        });
        if state == State::Frozen {
            self.server.signal("CONT");
        }
        ended
    }

    async fn crowd(&self, limiter: Limiter, rule: Rule, has_id: bool, who: Who) -> Ended {
        let over = Arc::new(AtomicBool::new(false));
        let asks = {
            let (limiter, one) = (limiter.clone(), self.one.clone());
            move || {
                let (limiter, one) = (limiter.clone(), one.clone());
                async move { _ = limiter.acquire(&one, "beside").await }
            }
        };
        let beside = tokio::spawn(beside(Arc::clone(&over), asks));
        let keys = Arc::clone(&self.keys);
        let crowd = async move {
            match who {
                Who::Callers => callers(&limiter, &rule, &keys, has_id).await,
                Who::Many => at_hand(&limiter, &rule, &keys, has_id).await,
            }
        };
        let mut ended = tokio::spawn(crowd).await.expect("a crowd that was answered");
        over.store(true, Ordering::Relaxed);
        ended.beside_ms = beside.await.expect("somebody who was answered");
        ended
    }
}

impl State {
    fn name(self) -> &'static str {
        match self {
            Self::Healthy => "a healthy server",
            Self::Frozen => "a frozen server",
            Self::Moving => "slots that move",
        }
    }
}

impl Who {
    fn name(self) -> &'static str {
        match self {
            Self::Callers => "callers",
            Self::Many => "`acquire_many`",
        }
    }
}

/// Does this again and again; the longest that it took, in milliseconds.
async fn beside<A: Future<Output = ()>>(over: Arc<AtomicBool>, again: impl Fn() -> A) -> f64 {
    let mut longest = 0.0_f64;
    while !over.load(Ordering::Relaxed) {
        let began = Instant::now();
        again().await;
        longest = longest.max(ms(began.elapsed()));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    longest
}

async fn callers(limiter: &Limiter, rule: &Rule, keys: &Arc<[String]>, has_id: bool) -> Ended {
    let mut tasks = JoinSet::new();
    for at in 0..keys.len() {
        let (limiter, rule, keys) = (limiter.clone(), rule.clone(), Arc::clone(keys));
        tasks.spawn(async move {
            let (began, key) = (Instant::now(), keys[at].as_str());
            let request = if has_id { Request::new(key).id(key) } else { Request::new(key) };
            let answer = limiter.acquire(&rule, request).await;
            (answer, began.elapsed())
        });
    }
    let mut ended = Ended::default();
    while let Some(task) = tasks.join_next().await {
        let (answer, took) = task.expect("a caller that was answered");
        ended.add(&answer, took);
    }
    ended
}

async fn at_hand(limiter: &Limiter, rule: &Rule, keys: &[String], has_id: bool) -> Ended {
    let began = Instant::now();
    let requests = keys.iter().map(|key| if has_id { Request::new(key).id(key) } else { Request::new(key) });
    let answers = limiter.acquire_many(rule, requests).await;
    let took = began.elapsed();
    let mut ended = Ended::default();
    answers.iter().for_each(|answer| ended.add(answer, took));
    ended
}

impl Ended {
    fn add(&mut self, answer: &Result<Decision, Error>, took: Duration) {
        match answer {
            Ok(_) => self.answered += 1,
            Err(error) if error.charged() == Charged::No => self.unsent += 1,
            Err(_) => self.unknown += 1,
        }
        self.late(took);
    }

    fn late(&mut self, took: Duration) {
        self.late_ms = self.late_ms.max(ms(took.saturating_sub(DEADLINE)));
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}
