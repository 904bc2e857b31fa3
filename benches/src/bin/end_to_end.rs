//! Throughput and latency of decisions on one Redis, compared with an EVALSHA that does nothing and with other
//! limiters.

use std::time::Duration;

use deadpool_redis::Pool;
use throttled::{RateLimiter as _, RedisRateLimiter};
use tollgate::redis::aio::{ConnectionLike, MultiplexedConnection};
use tollgate::redis::{self, Client, IntoConnectionInfo, Value};
use tollgate::{Algorithm, Limiter, Redis, Rule};
use tollgate_benches::callers::{Slice, callers, in_turn};
use tollgate_benches::options::Options;
use tollgate_benches::pipeline::is_allowed;
use tollgate_benches::report::{Targets, header, median, row, short};
use tollgate_benches::server::Server;
use tollgate_benches::{NO_OP, arguments, peers, rule};

const KEYS: usize = 10_000;
/// The numbers that the script of `token-bucket 1000000/1s` takes.
const MILLION_A_SECOND: [i64; 5] = [1_000_000, 1, 1, 1, 0];
/// Units of the one key in the check that no more are admitted: a unit comes back after three minutes.
const EXACT: u64 = 500;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Variant {
    NoOp,
    TokenBucket,
    TokenBucketUncoalesced,
    OneHotKey,
    Published,
    PooledNoOp,
    PooledPublished,
    Throttled,
    RedisCell,
    Governor,
}

use Variant::*;

/// The variants in the order of their turns, with their names in the table.
const VARIANTS: [(Variant, &str); 10] = [
    (NoOp, "no-op, one shared connection"),
    (TokenBucket, "**tollgate**, `token-bucket`, 10,000 keys"),
    (TokenBucketUncoalesced, "the same script, a call per decision"),
    (OneHotKey, "**tollgate**, `token-bucket`, one hot key"),
    (Published, "published token bucket, one shared connection"),
    (PooledNoOp, "no-op, `deadpool-redis`, a get per call from a pool of 16"),
    (PooledPublished, "published token bucket, the same pool"),
    (Throttled, "`throttled`, 10,000 keys"),
    (RedisCell, "redis-cell, a module of the server, 10,000 keys"),
    (Governor, "`governor`, in process"),
];

/// All that the variants call.
struct Bench {
    keys: Vec<String>,
    no_op: Script,
    published: Script,
    bucket_script: Script,
    shared: MultiplexedConnection,
    pool: Pool,
    throttled: RedisRateLimiter,
    governor: governor::DefaultKeyedRateLimiter<&'static str>,
    limiter: Limiter,
    token_bucket: Rule,
    hot: Rule,
    exact: Rule,
}

/// A script called without tollgate: loaded, with its own keys.
struct Script {
    digest: String,
    keys: Vec<String>,
    arguments: Vec<Vec<u8>>,
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let options = Options::read();
    let cell = std::env::var(peers::CELL).ok();
    let server = cell.as_deref().map_or_else(Server::start, |module| Server::with(&["--loadmodule", module]));
    let all: Vec<_> = VARIANTS.into_iter().filter(|(variant, _)| *variant != RedisCell || cell.is_some()).collect();
    // Leaked, so that callers share it at no measurable cost.
    let bench: &Bench = Box::leak(Box::new(Bench::on(&server).await));
    let mut targets = Targets::default();
    let mut cells: Vec<Vec<String>> = all.iter().map(|(_, name)| vec![(*name).to_owned()]).collect();
    for count in &options.callers {
        eprintln!("end to end, callers: {count}");
        let variants = all.iter().map(|(variant, _)| *variant);
        let slice = async |variant, time| bench.slice(variant, *count, time).await;
        let slices = in_turn(variants, options.rounds, options.slice, slice).await;
        let of = |variant: Variant, what: fn(&Slice) -> f64| {
            let at = all.iter().position(|(one, _)| *one == variant).expect("a variant of the list");
            median(slices[at].iter().map(what))
        };
        let throughput = |variant, to| of(variant, |slice| slice.per_second) / of(to, |slice| slice.per_second);
        let p99 = |variant| of(variant, |slice| slice.p99_us) / of(NoOp, |slice| slice.p99_us);
        for (cells, (variant, _)) in cells.iter_mut().zip(&all) {
            let per_second = of(*variant, |slice| slice.per_second);
            let p99_us = of(*variant, |slice| slice.p99_us);
            cells.push(match *variant {
                NoOp => format!("{per_second:.0} a second, p99 {} µs", short(p99_us)),
                Governor => short(throughput(*variant, NoOp)),
                variant => format!(
                    "{} ({per_second:.0} a second), p99 {} ({} µs)",
                    short(throughput(variant, NoOp)),
                    short(p99(variant)),
                    short(p99_us)
                ),
            });
        }

        let who = if *count == 1 { "1 caller".to_owned() } else { format!("{count} callers") };
        let (one, alone) = (TokenBucket, TokenBucketUncoalesced);
        let what = |what: &str| format!("{who}, `token-bucket`: {what}");
        match count {
            1024 => {
                targets.at_least(what("throughput, x no-op"), 1.2, throughput(one, NoOp)).wanted(1.7);
                targets.at_most(what("p99, x no-op"), 0.8, p99(one)).wanted(0.6);
            }
            64 => {
                targets.at_least(what("throughput, x no-op"), 1.2, throughput(one, NoOp)).wanted(2.0);
                targets.at_most(what("p99, x no-op"), 1.0, p99(one)).wanted(0.6);
            }
            16 => {
                targets.at_least(what("throughput, x no-op"), 0.8, throughput(one, NoOp)).wanted(1.15);
                targets.at_least(what("throughput, x the same uncoalesced"), 1.0, throughput(one, alone));
            }
            1 => {
                targets.at_least(what("throughput, x the same uncoalesced"), 0.95, throughput(one, alone));
            }
            _ => {}
        }
        let (hot, hot_to_no_op) = (format!("{who}, one hot key: throughput, x no-op"), throughput(OneHotKey, NoOp));
        match count {
            1024 => targets.at_least(hot, 6.0, hot_to_no_op).wanted(11.0),
            64 => targets.at_least(hot, 2.2, hot_to_no_op).wanted(2.8),
            _ => {}
        }
        targets.exactly(format!("{who}, one hot key: admitted"), EXACT as f64, bench.admitted(*count).await as f64);
    }

    let counts: Vec<_> = options.callers.iter().map(|count| format!("callers: {count}")).collect();
    let titles: Vec<_> = std::iter::once("").chain(counts.iter().map(String::as_str)).collect();
    println!("## End to end\n");
    println!(
        "Decisions a second and the 99th percentile of their latency, as multiples of the no-op's; of `governor`,"
    );
    println!("which calls no server, decisions a second alone.\n");
    println!("{}", header(&titles));
    cells.iter().for_each(|cells| println!("{}", row(cells)));
    println!("\n{targets}");
}

impl Bench {
    async fn on(server: &Server) -> Self {
        let info = server.url().into_connection_info().expect("a good address");
        // As tollgate sets it: otherwise callers that share a connection would wait for each other's packets.
        let tcp = info.tcp_settings().clone().set_nodelay(true);
        let client = Client::open(info.set_tcp_settings(tcp)).expect("a good address");
        let mut shared = client.get_multiplexed_async_connection().await.expect("a connection");
        let words = |words: &[&str]| words.iter().map(|word| Vec::from(*word)).collect();
        let bucket = Algorithm::TokenBucket.script();
        let acquire = arguments::acquire(bucket, &MILLION_A_SECOND, 1);
        let five = words(&["1000000", "1000000", "1", "1", "0"]);
        let three = words(&["1000000", "1000000", "1"]);
        Self {
            keys: (0..KEYS).map(|key| format!("user:{key}")).collect(),
            no_op: Script::load(&mut shared, NO_OP, "user:", five).await,
            published: Script::load(&mut shared, peers::PUBLISHED_BUCKET, "bucket:", three).await,
            // As long as tollgate's keys.
            bucket_script: Script::load(&mut shared, bucket.text(), "uncoalesced:cli:token-bucket-1s:", acquire).await,
            pool: peers::pool(&server.url()),
            throttled: peers::throttled(&client).await,
            governor: peers::governor(),
            limiter: Limiter::builder(Redis::open(&server.url()).expect("a good address"))
                .deadline(Duration::from_secs(5))
                .build(),
            token_bucket: rule("token-bucket 1000000/1s"),
            // High enough that no caller is ever denied.
            hot: rule("token-bucket 1000000000/1s"),
            exact: rule(&format!("token-bucket {EXACT}/1d")),
            shared,
        }
    }

    /// One turn of a variant; no caller may be denied.
    async fn slice(&'static self, variant: Variant, count: usize, time: Duration) -> Slice {
        let key = |random: u64| self.keys[random as usize % KEYS].as_str();
        let slice = match variant {
            NoOp => callers(count, time, move |random| self.call(&self.no_op, random)).await,
            TokenBucket => callers(count, time, move |random| self.acquire(&self.token_bucket, key(random))).await,
            TokenBucketUncoalesced => callers(count, time, move |random| self.call(&self.bucket_script, random)).await,
            OneHotKey => callers(count, time, move |_| self.acquire(&self.hot, "hot")).await,
            Published => callers(count, time, move |random| self.call(&self.published, random)).await,
            PooledNoOp => callers(count, time, move |random| self.pooled(&self.no_op, random)).await,
            PooledPublished => callers(count, time, move |random| self.pooled(&self.published, random)).await,
            Throttled => callers(count, time, move |random| self.throttled(key(random))).await,
            RedisCell => callers(count, time, move |random| self.cell(key(random))).await,
            Governor => {
                callers(count, time, move |random| async move { self.governor.check_key(&key(random)).is_ok() }).await
            }
        };
        assert_eq!(slice.allowed, slice.calls, "{variant:?} denied some of {count} callers");
        slice
    }

    /// How many calls on one key were allowed by a rule that allows `EXACT`.
    async fn admitted(&'static self, count: usize) -> u64 {
        let key: &str = format!("exact:{count}").leak();
        let time = Duration::from_millis(300);
        let slice = callers(count, time, move |_| self.acquire(&self.exact, key)).await;
        assert!(slice.calls > EXACT, "too slow a machine to tell");
        slice.allowed
    }

    async fn acquire(&self, rule: &Rule, key: &str) -> bool {
        self.limiter.acquire(rule, key).await.expect("a decision").allowed
    }

    async fn throttled(&self, key: &str) -> bool {
        self.throttled.check(key, peers::throttled_quota()).await.expect("an answer").is_allowed()
    }

    async fn cell(&self, key: &str) -> bool {
        let mut command = redis::cmd("CL.THROTTLE");
        command.arg(format!("cell:{key}")).arg(&["1000000", "1000000", "1", "1"]);
        let answer: Vec<i64> = command.query_async(&mut self.shared.clone()).await.expect("an answer");
        answer.first() == Some(&0)
    }

    async fn call(&self, script: &Script, random: u64) -> bool {
        script.call(&mut self.shared.clone(), random).await
    }

    async fn pooled(&self, script: &Script, random: u64) -> bool {
        script.call(&mut *self.pool.get().await.expect("a connection"), random).await
    }
}

impl Script {
    async fn load(connection: &mut MultiplexedConnection, text: &str, prefix: &str, arguments: Vec<Vec<u8>>) -> Self {
        let mut command = redis::cmd("SCRIPT");
        let digest = command.arg("LOAD").arg(text).query_async(connection).await.expect("a digest");
        Self { digest, keys: (0..KEYS).map(|key| format!("{prefix}{key}")).collect(), arguments }
    }

    /// Whether the call is allowed: an array begins with 1, and a packed reply has a record.
    async fn call(&self, connection: &mut impl ConnectionLike, random: u64) -> bool {
        let mut command = redis::cmd("EVALSHA");
        command.arg(&self.digest).arg(1).arg(&self.keys[random as usize % KEYS]).arg(&self.arguments);
        match command.query_async(connection).await.expect("an answer") {
            Value::Array(integers) => integers.first() == Some(&Value::Int(1)),
            Value::BulkString(record) => is_allowed(&record),
            other => panic!("expected a decision, got {other:?}"),
        }
    }
}
