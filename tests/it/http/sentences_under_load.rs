//! The sentences that most services begin with, each as a rules file and under the load of `wrk`: on one Redis, and on
//! a cluster whose slots move and where replicas take over meanwhile, of a primary that is well and of one that is
//! killed. What passes is counted by the service behind the layer, and is exactly what the limits allow.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::http::{HeaderMap, HeaderName, StatusCode};
use axum::routing::any;
use tollgate::middleware::{ClientAddress, RateLimitLayer};
use tollgate::rules::{Attributes, Charge, Effect, RuleSet};
use tollgate::{Cluster, Limit, Limiter};
use tollgate_testing::cluster::ClusterServers;
use tollgate_testing::polling::{PATIENCE, wait_until};
use tollgate_testing::redis_server::Server;

use super::{rule_set, serve};

const CONNECTIONS: &str = "8";
/// Of a request that passes, so that the load lasts as long as what befalls the cluster.
const SERVED_IN: Duration = Duration::from_millis(15);

/// A user, and an address, as a request names them.
type Client = (u64, u64);

/// What passed and counts, of each client: how many requests.
#[derive(Clone, Default)]
struct Passed(Arc<Mutex<BTreeMap<Client, u64>>>);

impl Passed {
    fn of_clients(&self) -> BTreeMap<Client, u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn by(&self, is_meant: impl Fn(&Client) -> bool) -> u64 {
        self.of_clients().iter().filter(|(client, _)| is_meant(client)).map(|(_, passed)| passed).sum()
    }

    fn all(&self) -> u64 {
        self.by(|_| true)
    }
}

/// Answers 401 to a wrong password, which counts as 200 does.
fn service(layer: RateLimitLayer, passed: Passed, counts: StatusCode) -> Router {
    let handler = move |headers: HeaderMap| {
        let number = |name: &str| {
            let text = headers[name].to_str().expect("text");
            text.rsplit('.').next().and_then(|number| number.parse::<u64>().ok()).expect("a number")
        };
        let is_wrong = headers.get("x-password").is_some_and(|password| password == "wrong");
        let status = if is_wrong { StatusCode::UNAUTHORIZED } else { StatusCode::OK };
        if status == counts {
            let client = (number("x-user"), number("x-forwarded-for"));
            *passed.0.lock().unwrap_or_else(PoisonError::into_inner).entry(client).or_default() += 1;
        }
        async move {
            tokio::time::sleep(SERVED_IN).await;
            status
        }
    };
    Router::new().fallback(any(handler)).layer(layer)
}

fn layer(limiter: &Limiter, rules: RuleSet) -> RateLimitLayer {
    let header = HeaderName::from_static;
    RateLimitLayer::new(limiter.clone(), rules)
        .client_address(ClientAddress::behind(["127.0.0.1"]).expect("an address"))
        .header("user", header("x-user"))
        .header("tokens", header("x-tokens"))
}

/// A process of wrk, which doesn't outlive its test.
struct Load(Child);

impl Drop for Load {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts wrk, which sends the script's requests until it is interrupted.
fn load(address: SocketAddr, script: &Path) -> Load {
    let url = format!("http://{address}/login");
    let script = script.to_str().expect("text");
    let mut wrk = Command::new("wrk");
    // Its own patience, of two seconds, would count answers that come later as errors.
    wrk.args(["-t1", "-c", CONNECTIONS, "-d5m", "--timeout", "2m", "-s", script, &url]).stdout(Stdio::piped());
    Load(wrk.spawn().expect("wrk, which tests/run.sh installs"))
}

/// How many requests had another status than 2xx and 3xx, and how many had any answer.
fn ended(mut load: Load) -> (u64, u64) {
    let interrupted = Command::new("kill").args(["-INT", &load.0.id().to_string()]).status().expect("kill runs");
    assert!(interrupted.success());
    let mut text = String::new();
    load.0.stdout.take().expect("piped").read_to_string(&mut text).expect("what it has counted");
    assert!(!text.contains("Socket errors"), "{text}");
    let count = |what: &str| {
        let line = text.lines().find(|line| line.contains(what)).unwrap_or_default();
        line.split_whitespace().find_map(|word| word.parse::<u64>().ok())
    };
    (count("Non-2xx").unwrap_or(0), count("requests in").unwrap_or_else(|| panic!("{text}")))
}

/// A sentence, and its clients.
struct Sentence {
    rules: &'static str,
    /// Sets the header fields of a request, in Lua.
    request: &'static str,
    /// The status of requests that count.
    counts: StatusCode,
    /// Whether everything that can pass has, but for so many.
    is_used_up: fn(&Passed, u64) -> bool,
    /// How many requests may stay charged that were under way at a primary when it was killed.
    stay_charged: u64,
    /// Of each limit, what these clients have used.
    used: fn(&Passed, Client) -> Vec<u64>,
}

/// Half of the requests are of one address, and half of an address's of one user.
const EVERYBODY: Sentence = Sentence {
    rules: r#"
        [[rule]]
        name = "api"
        key = "user"
        limits = [
            "fixed-window 10/30d start first-hit",
            { limit = "sliding-log 100/30d", key = "ip" },
            { limit = "fixed-window 600/30d start first-hit", key = "global" },
        ]
        on_error = "closed"
    "#,
    request: r#"
        local address = math.random(2) == 1 and 0 or math.random(11)
        local user = address * 12 + (math.random(2) == 1 and 0 or math.random(11))
    "#,
    counts: StatusCode::OK,
    is_used_up: |passed, but| passed.all() >= 600 - but,
    // By receipts: what was being given back there isn't given back again.
    stay_charged: 8,
    used: |passed, (user, address)| {
        vec![passed.by(|client| client.0 == user), passed.by(|client| client.1 == address), passed.all()]
    },
};

/// Three users are out of requests first, and three out of tokens.
const REQUESTS_AND_TOKENS: Sentence = Sentence {
    rules: r#"
        [[rule]]
        name = "model"
        key = "user"
        limits = [
            { name = "requests", limit = "token-bucket 60/1000d", cost = 1 },
            { name = "tokens", limit = "sliding-window 100000/30d", cost = "tokens" },
        ]
        on_error = "closed"
    "#,
    request: r#"
        local address, user = 0, math.random(0, 5)
        wrk.headers["x-tokens"] = ({500, 1000, 1600, 3000, 7000, 9000})[user + 1]
    "#,
    counts: StatusCode::OK,
    stay_charged: 0,
    is_used_up: |passed, _| {
        let passed = passed.of_clients();
        TOKENS.iter().zip(0..).all(|(tokens, user)| passed.get(&(user, 0)) >= Some(&(100_000 / tokens).min(60)))
    },
    used: |passed, (user, _)| {
        let requests = passed.by(|client| client.0 == user);
        vec![requests, requests * TOKENS[usize::try_from(user).expect("a user")]]
    },
};
const TOKENS: [u64; 6] = [500, 1000, 1600, 3000, 7000, 9000];

/// A quarter of all passwords are wrong.
const FAILED_LOGINS: Sentence = Sentence {
    rules: r#"
        [[rule]]
        name = "login"
        match = { path = "/login" }
        key = "user"
        limits = ["sliding-log 5/30d", { limit = "fixed-window 40/30d start first-hit", key = "ip" }]
        count = [401]
        on_error = "closed"
    "#,
    request: r#"
        local address = math.random(0, 3)
        local user = address * 12 + math.random(0, 11)
        wrk.headers["x-password"] = math.random(4) == 1 and "wrong" or "right"
    "#,
    counts: StatusCode::UNAUTHORIZED,
    stay_charged: 0,
    is_used_up: |passed, _| (0..4).all(|address| passed.by(|client| client.1 == address) >= 40),
    used: |passed, (user, address)| vec![passed.by(|client| client.0 == user), passed.by(|client| client.1 == address)],
};

/// What this client's requests are charged to.
fn charge<'s>(rules: &'s RuleSet, (user, address): &(String, IpAddr)) -> Charge<'s> {
    let request = Attributes::new().user(user).ip(*address).path("/login").set("tokens", "0");
    match rules.applies(&request).expect("a rule").effect {
        Effect::Limit(charge) => charge,
        other => panic!("expected limits, got {other:?}"),
    }
}

/// As its requests say.
fn named((user, address): Client) -> (String, IpAddr) {
    (user.to_string(), format!("192.0.2.{address}").parse().expect("an address"))
}

/// Puts load on a service until nothing passes any more. Meanwhile this is done to the servers, which have the keys of
/// a client in these places. Then each limit has left what didn't pass.
async fn hold(
    sentence: &Sentence,
    limiter: &Limiter,
    stay_charged: u64,
    meanwhile: impl FnOnce(Vec<String>) + Send + 'static,
) {
    let rules = rule_set(sentence.rules);
    let passed = Passed::default();
    let address = serve(service(layer(limiter, rules.clone()), passed.clone(), sentence.counts)).await;
    let directory = tempfile::TempDir::new().expect("a directory");
    let script = directory.path().join("requests.lua");
    let set = r#"
        wrk.headers["x-user"] = user
        wrk.headers["x-forwarded-for"] = "192.0.2." .. address
        return wrk.format()
    "#;
    // Requests that are denied at once would keep the processors from those that count.
    let pause = "function delay() return 4 end";
    let text = format!("math.randomseed(49)\n{pause}\nfunction request()\n{}{set}end\n", sentence.request);
    std::fs::write(&script, text).expect("a file");
    let load = load(address, &script);
    wait_until("some have passed", async || passed.all() > 20).await;
    let one = charge(&rules, &named((3, 0)));
    let keys = limiter.keys(one.rule(), one.request()).expect("keys");
    tokio::task::spawn_blocking(move || meanwhile(keys)).await.expect("done");
    let began = std::time::Instant::now();
    while !(sentence.is_used_up)(&passed, stay_charged) {
        let so_far = passed.of_clients();
        assert!(began.elapsed() < PATIENCE, "not all is used up: {so_far:?} under {}", sentence.rules);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let (refused, answered) = ended(load);
    limiter.finish().await;

    assert!(answered > refused || sentence.counts != StatusCode::OK, "{answered} answered, {refused} refused");
    let began = std::time::Instant::now();
    for client in passed.of_clients().into_keys() {
        let charge = charge(&rules, &named(client));
        // What was under way as the load ended is given back once its connection is seen to be closed. And the limiter
        // may only just be finding the node that has taken over.
        loop {
            let capacities = charge.rule().limits().map(Limit::capacity);
            let used = limiter
                .peek(charge.rule(), charge.request())
                .await
                .map(|now| capacities.zip(&now.limits).map(|(all, limit)| all - limit.remaining).collect::<Vec<_>>());
            let passed = (sentence.used)(&passed, client);
            let is_near = |(used, passed): (&u64, &u64)| (*passed..=passed + stay_charged).contains(used);
            if used.as_ref().is_ok_and(|used| used.iter().zip(&passed).all(is_near)) {
                break;
            }
            assert!(
                began.elapsed() < PATIENCE,
                "{client:?}: {used:?} used, {passed:?} passed under {}",
                sentence.rules
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

async fn hold_on_one_redis(sentence: &Sentence) {
    let server = Server::start();
    hold(sentence, &super::redis_limiter(&server), 0, |_| {}).await;
}

/// Slots move on to the next primary. The first one's replica takes over from it, and the second one's after it was
/// killed.
async fn hold_on_a_cluster(sentence: &Sentence) {
    let servers = Arc::new(ClusterServers::start());
    let limiter =
        Limiter::builder(Cluster::open(&servers.url()).expect("an address")).deadline(Duration::from_secs(20)).build();
    let cluster = Arc::clone(&servers);
    hold(sentence, &limiter, sentence.stay_charged, move |keys| {
        for slot in BTreeSet::from_iter(keys.iter().map(|key| cluster.slot_of(key))) {
            let from = cluster.primary_of(slot).expect("a primary");
            let to = (from + 1) % 3;
            cluster.begin_moving(slot, from, to);
            cluster.move_keys(slot, from, to);
            cluster.finish_moving(slot, from, to);
            // A replica that still claims the slot isn't elected, and asks again only after half a minute.
            cluster.wait_until_known(to);
        }
        cluster.hand_over(0);
        cluster.wait_until_known(cluster.partner_of(0));
        cluster.kill_without_loss(1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_a_user_and_everybody_together() {
    hold_on_one_redis(&EVERYBODY).await;
    hold_on_a_cluster(&EVERYBODY).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_and_tokens() {
    hold_on_one_redis(&REQUESTS_AND_TOKENS).await;
    hold_on_a_cluster(&REQUESTS_AND_TOKENS).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_failed_logins_count() {
    hold_on_one_redis(&FAILED_LOGINS).await;
    hold_on_a_cluster(&FAILED_LOGINS).await;
}
