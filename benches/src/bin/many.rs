//! Much at once: hundreds of thousands of callers, `acquire_many` of as many keys, and several runtimes. A decision's
//! cost to the client must not depend on how many there are.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Runtime};
use tollgate::{Cluster, Limiter, Redis, Request, Rule};
use tollgate_benches::options::Options;
use tollgate_benches::report::{Targets, header, median, row, short};
use tollgate_benches::{Random, process, rule, server};

const KEYS: usize = 10_000;
const CALLERS: [usize; 3] = [1_000, 10_000, 100_000];
const AT_HAND: [usize; 4] = [1_000, 10_000, 100_000, 1_000_000];
const AT_SEVERAL_NODES: [usize; 2] = [1_000, 10_000];
/// Callers on each of several runtimes.
const CALLERS_OF_ONE: usize = 64;
const RUNTIMES: usize = 4;

struct Bench {
    keys: Vec<String>,
    limiter: Limiter,
    even: Rule,
    hot: Rule,
    targets: Targets,
}

/// The cost of a turn.
#[derive(Clone, Copy)]
struct Cost {
    per_second: f64,
    /// Microseconds of this process's processor time for each decision.
    client_us: f64,
    /// How much the memory grew.
    bytes: f64,
}

fn main() {
    let options = Options::read();
    let server = server::Server::start();
    let engine = Redis::open(&server.url()).expect("a good address");
    let mut bench = Bench {
        keys: (0..KEYS).map(|key| format!("user:{key}")).collect(),
        limiter: Limiter::builder(engine).deadline(Duration::from_secs(20)).build(),
        even: rule("token-bucket 1000000/1s"),
        hot: rule("token-bucket 1000000000/1s"),
        targets: Targets::default(),
    };
    println!("## Much at once\n");
    bench.callers(&options);
    bench.at_hand(&options, &server);
    bench.at_several_nodes(&options);
    bench.runtimes(&options);
    println!("{}", bench.targets);
}

impl Bench {
    fn callers(&mut self, options: &Options) {
        println!(
            "Concurrent callers on two threads: decisions a second, microseconds of the client's processor time for"
        );
        println!("each decision, and bytes of memory for each waiting caller, including its task.\n");
        println!("{}", header(&["callers", "one hot key", "10,000 keys", "bytes for each"]));
        let mut few = [f64::NAN; 2];
        for count in CALLERS {
            eprintln!("much at once, callers: {count}");
            let runtime = of_threads(2);
            let (mut cells, mut bytes) = (vec![count.to_string()], 0.0_f64);
            for (at, hot) in [true, false].into_iter().enumerate() {
                let turns = (0..options.rounds).map(|_| self.asked(&[&runtime], count, hot, options.slice));
                let turns: Vec<_> = turns.collect();
                let of = |what: fn(&Cost) -> f64| median(turns.iter().map(what));
                let client_us = of(|cost| cost.client_us);
                cells.push(format!("{:.0} a second, {} µs", of(|cost| cost.per_second), short(client_us)));
                bytes = bytes.max(turns[0].bytes / count as f64);
                if count == CALLERS[0] {
                    few[at] = client_us;
                } else {
                    let what = if hot { "one hot key" } else { "10,000 keys" };
                    let what = format!("{count} callers, {what}: client time, x that of {} callers", CALLERS[0]);
                    self.targets.at_most(what, 1.5, client_us / few[at]);
                    if hot {
                        let what = format!("{count} callers, one hot key: client time, µs a decision");
                        self.targets.at_most(what, 1.2, client_us).wanted(0.45);
                    }
                }
            }
            cells.push(format!("{bytes:.0}"));
            println!("{}", row(cells));
            if count == 100_000 {
                let what = format!("{count} callers: bytes of each that waits, its task included");
                self.targets.at_most(what, 900.0, bytes).wanted(700.0);
            }
        }
        let future = size_of_val(&self.limiter.acquire(&self.hot, "hot"));
        println!("\nThe future of an acquire accounts for {future} of these bytes.\n");
    }

    fn at_hand(&mut self, options: &Options, server: &server::Server) {
        println!("`acquire_many` at the default deadline of 500 ms: how many keys are answered, and microseconds for");
        println!("each key, in total and of the client's processor time.\n");
        println!("{}", header(&["keys", "answered", "in all", "client"]));
        let runtime = of_threads(1);
        let engine = Redis::open(&server.url()).expect("a good address");
        let limiter = Limiter::new(engine);
        for count in AT_HAND {
            eprintln!("much at once, at hand: {count}");
            let keys: Vec<_> = (0..count).map(|key| format!("user:{key}")).collect();
            // Few keys take little time, so they get more turns.
            let turns = (0..=options.rounds * (100_000 / count).clamp(1, 20)).map(|_| {
                let (began, before) = (Instant::now(), process::processor_time());
                let decisions = runtime.block_on(limiter.acquire_many(&self.even, keys.iter().map(String::as_str)));
                let (took, spent) = (began.elapsed(), process::processor_time() - before);
                let answered = decisions.iter().filter(|decision| decision.is_ok()).count() as f64;
                (answered, micros(took) / count as f64, micros(spent) / count as f64)
            });
            // The first turn creates the keys.
            let turns: Vec<_> = turns.skip(1).collect();
            let of = |what: fn(&(f64, f64, f64)) -> f64| median(turns.iter().map(what));
            let (answered, in_all, client) = (of(|turn| turn.0), of(|turn| turn.1), of(|turn| turn.2));
            println!("{}", row([count.to_string(), short(answered), short(in_all), short(client)]));
            if count <= 100_000 {
                self.targets.exactly(
                    format!("`acquire_many` of {count} keys: answered in 500 ms"),
                    count as f64,
                    answered,
                );
            }
            if count == 100_000 {
                self.targets
                    .at_most(format!("`acquire_many` of {count} keys: client time, µs a decision"), 1.0, client)
                    .wanted(0.35);
            }
        }
        println!();
    }

    fn at_several_nodes(&mut self, options: &Options) {
        println!("The same for two limits, each by a key of its own, on one Redis and on three primaries, where two");
        println!("calls of three have their keys on two nodes: microseconds for each call, in total and of the");
        println!("client's processor time.\n");
        println!("{}", header(&["calls", "one Redis", "three primaries", "ratio"]));
        let (one, three) = (server::Server::start(), server::Cluster::start(3));
        let limiter = |engine: tollgate::Engine| Limiter::builder(engine).deadline(Duration::from_secs(20)).build();
        let limiters = [
            limiter(Redis::open(&one.url()).expect("a good address").into()),
            limiter(Cluster::open(&three.url()).expect("a good address").into()),
        ];
        let everybody = "token-bucket 1000000/1s".parse().expect("a limit");
        let rule = rule("token-bucket 1000000/1s").and_by("other", everybody).expect("two limits");
        let runtime = of_threads(1);
        for count in AT_SEVERAL_NODES {
            eprintln!("much at once, at several nodes: {count}");
            let keys: Vec<_> = (0..count).map(|key| [format!("user:{key}"), format!("address:{key}")]).collect();
            let parts: Vec<_> = keys.iter().map(|[_, other]| [("other", other.as_bytes())]).collect();
            let mut turns = [Vec::new(), Vec::new()];
            for turn in 0..=options.rounds * (10_000 / count) {
                for (limiter, turns) in limiters.iter().zip(&mut turns) {
                    let requests = keys.iter().zip(&parts).map(|([key, _], parts)| Request::new(key).parts(parts));
                    let (began, before) = (Instant::now(), process::processor_time());
                    let decisions = runtime.block_on(limiter.acquire_many(&rule, requests));
                    let (took, spent) = (began.elapsed(), process::processor_time() - before);
                    assert!(decisions.iter().all(|decision| decision.as_ref().is_ok_and(|decision| decision.allowed)));
                    // The first turn creates the keys.
                    if turn > 0 {
                        turns.push((micros(took) / count as f64, micros(spent) / count as f64));
                    }
                }
            }
            let [one, three] = turns.map(|turns| {
                let in_all = median(turns.iter().map(|turn| turn.0));
                (in_all, median(turns.iter().map(|turn| turn.1)))
            });
            let cell = |(in_all, client): (f64, f64)| format!("{} µs, client {}", short(in_all), short(client));
            println!("{}", row([count.to_string(), cell(one), cell(three), short(three.0 / one.0)]));
        }
        println!();
    }

    fn runtimes(&mut self, options: &Options) {
        println!(
            "{} callers of one limiter, on one runtime of {RUNTIMES} threads and on {RUNTIMES} runtimes of one thread",
            RUNTIMES * CALLERS_OF_ONE
        );
        println!("each: decisions a second.\n");
        println!("{}", header(&["", "one runtime", "several", "ratio"]));
        eprintln!("much at once, runtimes");
        let one = of_threads(RUNTIMES);
        let several: Vec<_> = (0..RUNTIMES).map(|_| of_threads(1)).collect();
        let several: Vec<_> = several.iter().collect();
        for (hot, what) in [(true, "one hot key"), (false, "10,000 keys")] {
            let (mut of_one, mut of_several) = (Vec::new(), Vec::new());
            for _ in 0..options.rounds + 1 {
                of_one.push(self.asked(&[&one], RUNTIMES * CALLERS_OF_ONE, hot, options.slice).per_second);
                of_several.push(self.asked(&several, CALLERS_OF_ONE, hot, options.slice).per_second);
            }
            // The first turn connects.
            let [one, several] = [of_one, of_several].map(|turns| median(turns.into_iter().skip(1)));
            println!("{}", row([what.to_owned(), short(one), short(several), short(several / one)]));
            self.targets.at_least(
                format!("{RUNTIMES} runtimes, {what}: throughput, x one of {RUNTIMES} threads"),
                1.0,
                several / one,
            );
        }
        println!();
    }

    /// Runs this many callers on each runtime; each calls again as soon as it gets a reply.
    fn asked(&self, runtimes: &[&Runtime], count: usize, hot: bool, time: Duration) -> Cost {
        let (before, memory) = (process::processor_time(), process::resident_bytes());
        let (began, until) = (Instant::now(), Instant::now() + time);
        let most_memory = Arc::new(AtomicU64::new(memory));
        let callers = |number: usize| {
            let (limiter, rule) = (self.limiter.clone(), if hot { self.hot.clone() } else { self.even.clone() });
            let keys = self.keys.clone();
            let shared = Arc::new((limiter, rule, keys));
            let most_memory = Arc::clone(&most_memory);
            async move {
                let caller = |caller: usize| {
                    let shared = Arc::clone(&shared);
                    async move {
                        let (limiter, rule, keys) = &*shared;
                        let mut calls = 0_u64;
                        for random in Random::seeded(caller as u64) {
                            let key = if hot { "hot" } else { keys[random as usize % KEYS].as_str() };
                            assert!(limiter.acquire(rule, key).await.expect("a decision").allowed);
                            calls += 1;
                            if Instant::now() >= until {
                                break;
                            }
                        }
                        calls
                    }
                };
                let tasks: Vec<_> = (0..count).map(|at| tokio::spawn(caller(number * count + at))).collect();
                tokio::time::sleep(time / 2).await;
                most_memory.fetch_max(process::resident_bytes(), Ordering::Relaxed);
                let mut calls = 0;
                for task in tasks {
                    calls += task.await.expect("a caller that was answered");
                }
                calls
            }
        };
        let calls: u64 = std::thread::scope(|scope| {
            let driven = runtimes.iter().enumerate().map(|(number, runtime)| {
                let callers = callers(number);
                scope.spawn(move || runtime.block_on(callers))
            });
            let driven: Vec<_> = driven.collect();
            driven.into_iter().map(|thread| thread.join().expect("callers who were answered")).sum()
        });
        let decisions = calls as f64;
        Cost {
            per_second: decisions / began.elapsed().as_secs_f64(),
            client_us: micros(process::processor_time() - before) / decisions,
            bytes: (most_memory.load(Ordering::Relaxed) - memory) as f64,
        }
    }
}

fn of_threads(count: usize) -> Runtime {
    match count {
        1 => Builder::new_current_thread().enable_all().build(),
        _ => Builder::new_multi_thread().worker_threads(count).enable_all().build(),
    }
    .expect("a runtime")
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
