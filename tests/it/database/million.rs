//! A million requests through the layer, on a real Redis, each of which is found again: by count and by sum.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use http::header::HeaderName;
use http::{Request, Response};
use tollgate::history::HistorySettings;
use tollgate::middleware::RateLimitLayer;
use tollgate::rules::RuleSet;
use tollgate::{Limiter, Redis};
use tower::{Layer, ServiceExt, service_fn};

use super::{database, prepared, until};
use crate::server::Server;

const USERS: u64 = 1_000;
const REQUESTS: u64 = 1_000;
const LIMIT: u64 = 600;
const CALLERS: u64 = 250;

/// Of each user's requests, 600 are allowed; what is used grows from 1 to 600 and stays.
const RULES: &str = r#"
    [[rule]]
    name = "yearly"
    match = { path = "/api/*" }
    key = "user"
    limits = ["fixed-window 600/year"]
"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_million_decisions_are_found_again() {
    let redis = Server::start();
    let (mut server, _) = prepared().await;
    // So that nothing is lost while PostgreSQL is away.
    let settings = HistorySettings::new().queue(1_500_000).region("eu");
    let history = database(&server).record(settings).expect("recording");
    let rules: RuleSet = RULES.parse().expect("rules");
    let limiter = Limiter::new(Redis::open(&redis.url()).expect("an address"));
    let layer = RateLimitLayer::new(limiter, rules).header("user", HeaderName::from_static("user"));
    let answer = service_fn(|_: Request<String>| async { Ok::<_, String>(Response::new(String::new())) });
    let service = layer.history(history.clone()).layer(answer);
    let denied = Arc::new(AtomicU64::new(0));
    let callers: Vec<_> = (0..CALLERS)
        .map(|caller| {
            let (service, denied) = (service.clone(), Arc::clone(&denied));
            tokio::spawn(async move {
                for number in 0..USERS * REQUESTS / CALLERS {
                    let user = caller * (USERS / CALLERS) + number % (USERS / CALLERS);
                    let request = Request::builder().uri("/api/items").header("user", user.to_string());
                    let answer = service.clone().oneshot(request.body(String::new()).expect("a request")).await;
                    denied.fetch_add(u64::from(answer.expect("an answer").status() == 429), Ordering::Relaxed);
                }
            })
        })
        .collect();
    // Ten minutes at most, on a machine that is busy.
    for _ in 0..6_000 {
        if history.status().recorded > USERS * REQUESTS / 2 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(history.status().recorded > USERS * REQUESTS / 2);
    server.stop();
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    assert!(history.status().lag > Duration::from_secs(1));
    server.start_again();
    for caller in callers {
        caller.await.expect("all of its requests");
    }
    until("all is written", async || history.finish().await.is_ok()).await;

    assert_eq!(denied.load(Ordering::Relaxed), USERS * (REQUESTS - LIMIT));
    assert_eq!((history.status().recorded, history.status().lost), (USERS * REQUESTS, 0));
    let sums = "count(*), count(DISTINCT user_id), count(*) FILTER (WHERE decision = 'throttled' AND status = 429),
        count(*) FILTER (WHERE decision = 'allowed' AND status = 200), sum(used), sum(capacity), sum(user_id::int8)";
    let sums = format!("SELECT concat_ws(' ', {sums}) FROM tollgate.rate_limit_audit_logs");
    let used = LIMIT * (LIMIT + 1) / 2 + (REQUESTS - LIMIT) * LIMIT;
    let expected = [
        USERS * REQUESTS,
        USERS,
        USERS * (REQUESTS - LIMIT),
        USERS * LIMIT,
        USERS * used,
        USERS * REQUESTS * LIMIT,
        REQUESTS * USERS * (USERS - 1) / 2,
    ];
    assert_eq!(server.run(&sums).await, [expected.map(|number| number.to_string()).join(" ")]);
    let counted =
        "SELECT concat_ws(' ', sum(allowed), sum(throttled), sum(cache_misses)) FROM tollgate.rate_limit_metrics
        WHERE width = 'minute'";
    let counted = server.run(counted).await;
    assert_eq!(counted, [format!("{} {} {}", USERS * LIMIT, USERS * (REQUESTS - LIMIT), USERS * REQUESTS)]);
}
