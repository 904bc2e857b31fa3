//! Throughput and latency of decisions on a cluster of three primaries, compared with one node and with redis-rs's own
//! cluster client.

use std::time::Duration;

use tollgate::redis::aio::{ConnectionLike, MultiplexedConnection};
use tollgate::redis::cluster::ClusterClientBuilder;
use tollgate::redis::cluster_async::ClusterConnection;
use tollgate::redis::{self, Client, IntoConnectionInfo, Value};
use tollgate::{Cluster, Limiter, Redis, Rule};
use tollgate_benches::callers::{Slice, callers, in_turn};
use tollgate_benches::options::Options;
use tollgate_benches::report::{Targets, header, median, row, short};
use tollgate_benches::server;
use tollgate_benches::{NO_OP, rule};

const KEYS: usize = 10_000;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Variant {
    NoOp,
    OneNode,
    OneNodeHotKey,
    ClusterNoOp,
    ThreeNodes,
    ThreeNodesHotKey,
}

use Variant::*;

/// The variants in the order of their turns, with their names in the table.
const VARIANTS: [(Variant, &str); 6] = [
    (NoOp, "one node: no-op, one shared connection"),
    (OneNode, "one node: **tollgate**, `token-bucket`, 10,000 keys"),
    (ThreeNodes, "three primaries: **tollgate**, `token-bucket`, 10,000 keys"),
    (ClusterNoOp, "three primaries: no-op, `redis-rs`'s cluster client"),
    (OneNodeHotKey, "one node: **tollgate**, `token-bucket`, one hot key"),
    (ThreeNodesHotKey, "three primaries: **tollgate**, `token-bucket`, one hot key"),
];

struct Bench {
    keys: Vec<String>,
    digest: String,
    shared: MultiplexedConnection,
    cluster: ClusterConnection,
    of_one: Limiter,
    of_three: Limiter,
    even: Rule,
    hot: Rule,
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let options = Options::read();
    let (one, three) = (server::Server::start(), server::Cluster::start(3));
    // Leaked, so that callers share it at no measurable cost.
    let bench: &Bench = Box::leak(Box::new(Bench::on(&one, &three).await));
    let mut cells: Vec<Vec<String>> = VARIANTS.iter().map(|(_, name)| vec![(*name).to_owned()]).collect();
    let counts: Vec<_> = options.callers.iter().copied().filter(|count| *count != 16).collect();
    let mut targets = Targets::default();
    for count in &counts {
        eprintln!("cluster, callers: {count}");
        let variants = VARIANTS.iter().map(|(variant, _)| *variant);
        let slice = async |variant, time| bench.slice(variant, *count, time).await;
        let slices = in_turn(variants, options.rounds, options.slice, slice).await;
        let of = |at: usize, what: fn(&Slice) -> f64| median(slices[at].iter().map(what));
        for (at, cells) in cells.iter_mut().enumerate() {
            let (per_second, p99_us) = (of(at, |slice| slice.per_second), of(at, |slice| slice.p99_us));
            let [rate, p99] = [per_second / of(0, |slice| slice.per_second), p99_us / of(0, |slice| slice.p99_us)];
            // Wanted: 1.8 times what a call for each slot gave (0.85 and 1.03).
            let bounds = match (VARIANTS[at].0, count) {
                (ThreeNodes, 64) => Some((0.9, 1.53)),
                (ThreeNodes, 1024) => Some((1.1, 1.85)),
                _ => None,
            };
            if let Some((promised, wanted)) = bounds {
                let what = format!("three primaries, {count} callers: throughput, x no-op on one node");
                targets.at_least(what, promised, rate).wanted(wanted);
            }
            cells.push(match at {
                0 => format!("{per_second:.0} a second, p99 {} µs", short(p99_us)),
                _ => format!("{}, p99 {}", short(rate), short(p99)),
            });
        }
    }
    let counts: Vec<_> = counts.iter().map(|count| format!("callers: {count}")).collect();
    let titles: Vec<_> = std::iter::once("").chain(counts.iter().map(String::as_str)).collect();
    println!(
        "## The cluster\n\n\
         Decisions a second and the 99th percentile of their latency, as multiples of the no-op's on one node.\n"
    );
    println!("{}", header(&titles));
    cells.iter().for_each(|cells| println!("{}", row(cells)));
    println!("\n{targets}");
}

impl Bench {
    async fn on(one: &server::Server, three: &server::Cluster) -> Self {
        let info = one.url().into_connection_info().expect("a good address");
        let tcp = info.tcp_settings().clone().set_nodelay(true);
        let client = Client::open(info.set_tcp_settings(tcp.clone())).expect("a good address");
        let mut shared = client.get_multiplexed_async_connection().await.expect("a connection");
        let mut load = redis::cmd("SCRIPT");
        load.arg("LOAD").arg(NO_OP);
        let digest: String = load.query_async(&mut shared).await.expect("a digest");
        let cluster =
            ClusterClientBuilder::new(three.urls()).retries(0).tcp_settings(tcp).build().expect("good addresses");
        let mut cluster = cluster.get_async_connection().await.expect("connections");
        // Loads the script on every primary.
        load.query_async::<Value>(&mut cluster).await.expect("a digest");
        let limiter = |engine: tollgate::Engine| Limiter::builder(engine).deadline(Duration::from_secs(5)).build();
        Self {
            keys: (0..KEYS).map(|key| format!("user:{key}")).collect(),
            digest,
            shared,
            cluster,
            of_one: limiter(Redis::open(&one.url()).expect("a good address").into()),
            of_three: limiter(Cluster::open(&three.url()).expect("a good address").into()),
            even: rule("token-bucket 1000000/1s"),
            // High enough that no caller is ever denied.
            hot: rule("token-bucket 1000000000/1s"),
        }
    }

    /// One turn of a variant; no caller may be denied.
    async fn slice(&'static self, variant: Variant, count: usize, time: Duration) -> Slice {
        let key = |random: u64| self.keys[random as usize % KEYS].as_str();
        let slice = match variant {
            NoOp => callers(count, time, move |random| self.no_op(self.shared.clone(), key(random))).await,
            ClusterNoOp => callers(count, time, move |random| self.no_op(self.cluster.clone(), key(random))).await,
            OneNode => callers(count, time, move |random| acquire(&self.of_one, &self.even, key(random))).await,
            ThreeNodes => callers(count, time, move |random| acquire(&self.of_three, &self.even, key(random))).await,
            OneNodeHotKey => callers(count, time, move |_| acquire(&self.of_one, &self.hot, "hot")).await,
            ThreeNodesHotKey => callers(count, time, move |_| acquire(&self.of_three, &self.hot, "hot")).await,
        };
        assert_eq!(slice.allowed, slice.calls, "{variant:?} denied some of {count} callers");
        slice
    }

    async fn no_op(&self, mut connection: impl ConnectionLike, key: &str) -> bool {
        let mut command = redis::cmd("EVALSHA");
        command.arg(&self.digest).arg(1).arg(key).arg(&["1000000", "1000000", "1", "1", "0"]);
        let answer: Value = command.query_async(&mut connection).await.expect("an answer");
        answer == Value::Array((1..=4).map(Value::Int).collect())
    }
}

async fn acquire(limiter: &Limiter, rule: &Rule, key: &str) -> bool {
    limiter.acquire(rule, key).await.expect("a decision").allowed
}
