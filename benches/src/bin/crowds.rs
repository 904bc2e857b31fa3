//! 100,000 calls at once: of one limit, of several limits, and with ids. Each is to end by its deadline, whether Redis
//! answers or not, and a caller of one limit beside them is not to wait for them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;
use tollgate::{Charged, Decision, Error, Limiter, Redis, Request, Rule};
use tollgate_benches::options::Options;
use tollgate_benches::report::{Targets, header, row, short};
use tollgate_benches::rule;
use tollgate_benches::server::Server;

const CROWD: usize = 100_000;
const DEADLINE: Duration = Duration::from_millis(500);

struct Bench {
    server: Server,
    keys: Arc<[String]>,
    limiter: Limiter,
    one: Rule,
    runtime: Runtime,
    targets: Targets,
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
}

fn main() {
    let options = Options::read();
    let server = Server::start();
    let engine = Redis::open(&server.url()).expect("a good address");
    let mut bench = Bench {
        limiter: Limiter::new(engine).deadline(DEADLINE),
        server,
        keys: (0..CROWD).map(|key| format!("user:{key}")).collect(),
        one: rule("token-bucket 1000000/1s"),
        runtime: Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime"),
        targets: Targets::default(),
    };
    println!("## Crowds\n");
    println!("{CROWD} calls at once, each to be answered within {DEADLINE:?}: how many Redis answered, how many were");
    println!("never sent, how many may have been charged; by how many milliseconds the last was late; and the");
    println!("longest that somebody waited who asked for one limit meanwhile, again and again.\n");
    println!("{}", header(&["", "answered", "unsent", "unknown", "late, ms", "beside, ms"]));
    let one = "token-bucket 1000000/1s";
    let two = "token-bucket 1000000/1s, fixed-window 1000000/1h";
    for (what, text, has_id) in [("one limit", one, false), ("two limits", two, false), ("an id", one, true)] {
        let rule = rule(text);
        for frozen in [false, true] {
            for many in [false, true] {
                let state = if frozen { "a frozen server" } else { "a healthy server" };
                let how = if many { "`acquire_many`" } else { "callers" };
                let what = format!("{what}, {how}, {state}");
                eprintln!("crowds: {what}");
                let turns = (0..options.rounds.div_ceil(3)).map(|_| bench.turn(&rule, has_id, frozen, many));
                let worst = turns.max_by(|one, other| one.late_ms.total_cmp(&other.late_ms)).expect("a turn");
                let Ended { answered, unsent, unknown, late_ms, beside_ms } = worst;
                let counts = [answered, unsent, unknown].map(|count| count.to_string());
                println!("{}", row([&[what.clone()][..], &counts, &[short(late_ms), short(beside_ms)]].concat()));
                if text == two || has_id {
                    let what = format!("{CROWD} at once, {what}: the last after its deadline, ms");
                    bench.targets.at_most(what, 500.0, late_ms).wanted(10.0);
                }
            }
        }
    }
    println!("\n{}", bench.targets);
}

impl Bench {
    fn turn(&self, rule: &Rule, has_id: bool, frozen: bool, many: bool) -> Ended {
        self.runtime.block_on(self.limiter.acquire(&self.one, "first")).expect("a decision");
        if frozen {
            self.server.signal("STOP");
        }
        let ended = self.runtime.block_on(async {
            let over = Arc::new(AtomicBool::new(false));
            let beside = tokio::spawn(beside(self.limiter.clone(), self.one.clone(), Arc::clone(&over)));
            let (limiter, rule, keys) = (self.limiter.clone(), rule.clone(), Arc::clone(&self.keys));
            let crowd = async move {
                if many {
                    at_hand(&limiter, &rule, &keys, has_id).await
                } else {
                    callers(&limiter, &rule, &keys, has_id).await
                }
            };
            let mut ended = tokio::spawn(crowd).await.expect("a crowd that was answered");
            over.store(true, Ordering::Relaxed);
            ended.beside_ms = beside.await.expect("somebody who was answered");
            ended
        });
        if frozen {
            self.server.signal("CONT");
        }
        // The breaker closes again.
        while self.runtime.block_on(self.limiter.acquire(&self.one, "first")).is_err() {
            std::thread::sleep(Duration::from_millis(20));
        }
        ended
    }
}

/// Asks for one limit again and again; the longest that it took, in milliseconds.
async fn beside(limiter: Limiter, rule: Rule, over: Arc<AtomicBool>) -> f64 {
    let mut longest = 0.0_f64;
    while !over.load(Ordering::Relaxed) {
        let began = Instant::now();
        let _ = limiter.acquire(&rule, "beside").await;
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
        self.late_ms = self.late_ms.max(ms(took.saturating_sub(DEADLINE)));
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}
