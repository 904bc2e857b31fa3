//! An axum service under the rules of a file, which may change while it runs, with metrics for Prometheus. With
//! `TOLLGATE_DATABASE`, it uses the rules, users and API keys of a PostgreSQL instead, and records each decision there.
//! `TOLLGATE_CACHE_SECRET`, 16 bytes or more, lets it accept keys also if it starts while PostgreSQL is unreachable:
//!
//!   cargo run -p tollgate-examples --bin service
//!   curl -i -H 'X-User: 42' -H 'X-Tier: free' http://127.0.0.1:3000/api/v1/items
//!   curl -i -H "X-Api-Key: $(tollgate keys create --user 42)" http://127.0.0.1:3000/api/v1/items

use std::error::Error;
use std::future::ready;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::{HeaderName, StatusCode};
use axum::routing::{get, post};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
use tollgate::Limiter;
use tollgate::middleware::{ApiKeyLayer, RateLimitLayer};
use tollgate::rules::{RuleSource, WatchedRules};
use tollgate_examples::{address, engine, interrupted};
use tollgate_record::history::HistorySettings;
use tollgate_record::{Configuration, Postgres};

const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let buckets = [0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.5];
    let keys = [1.0, 2.0, 5.0, 10.0, 50.0, 200.0, 1000.0];
    let metrics = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), &buckets)?
        .set_buckets_for_metric(Matcher::Suffix("_keys".into()), &keys)?
        .install_recorder()?;
    tollgate::describe_metrics();
    tollgate_record::describe_metrics();

    let upkeep = metrics.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_secs(5)).await;
            upkeep.run_upkeep();
        }
    });

    let limiter = Limiter::new(engine()?);
    let mut postgres = std::env::var("TOLLGATE_DATABASE").ok().map(|url| Postgres::open(&url)).transpose()?;
    // With a secret that all of its processes share, a service that starts while PostgreSQL is unreachable accepts API
    // keys.
    if let Ok(secret) = std::env::var("TOLLGATE_CACHE_SECRET") {
        postgres = postgres.map(|postgres| postgres.cache_secret(secret)).transpose()?;
    }
    let (configuration, history) = match &postgres {
        Some(postgres) => {
            let settings = HistorySettings::new().region(&std::env::var("REGION").unwrap_or_default());
            (Some(postgres.follow(&limiter).await?), Some(postgres.record(settings)?))
        }
        None => (None, None),
    };
    let rules: Arc<dyn RuleSource> = match &configuration {
        Some(configuration) => Arc::new(configuration.clone()),
        None => {
            let file = std::env::var("RULES").unwrap_or_else(|_| "examples/rules.toml".to_owned());
            Arc::new(WatchedRules::open(&file)?)
        }
    };
    // In a service, the user comes from authentication, such as the API keys below, and never from a header that
    // clients write.
    let layer = RateLimitLayer::new(limiter.clone(), rules)
        .api_key(X_API_KEY)
        .header("user", HeaderName::from_static("x-user"))
        .header("tier", HeaderName::from_static("x-tier"))
        .header("org", HeaderName::from_static("x-org"))
        .header("megabytes", HeaderName::from_static("x-megabytes"));
    let layer = match &history {
        Some(history) => layer.record(history.clone()),
        None => layer,
    };

    let app = Router::new()
        .route("/", get(|| async { "hello\n" }))
        // Stands for a check of the password, which is always wrong here.
        .route("/login", post(|| async { (StatusCode::UNAUTHORIZED, "wrong password\n") }))
        // A route for each pattern of the rules: under `/api/{*rest}`, they would not apply to `/api/v1/s%65arch`.
        .route("/api/{version}/items", get(|| async { "items\n" }))
        .route("/api/{version}/search", get(|| async { "items\n" }))
        .route("/api/{version}/files/{*file}", post(|| async { "stored\n" }).put(|| async { "stored\n" }))
        .layer(layer);
    let app = match &configuration {
        // A request with a key belongs to the key's user; one without is identified by its headers.
        Some(configuration) => app.layer(ApiKeyLayer::new(configuration.clone()).header(X_API_KEY).optional()),
        None => app,
    };
    let status = configuration.clone();
    let app = app
        // Added after the layers, so not limited.
        .route("/metrics", get(move || ready(metrics.render())))
        .route("/status", get(move || ready(format!("{:?}\n", status.as_ref().map(Configuration::status)))));

    let listener = tokio::net::TcpListener::bind(address("127.0.0.1:3000")).await?;
    println!("listening on {}", listener.local_addr()?);
    let app = app.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, app).with_graceful_shutdown(interrupted()).await?;
    limiter.finish().await;
    // Finish both, whatever the result of either.
    let recorded = match history {
        Some(history) => history.finish().await,
        None => Ok(()),
    };
    if let Some(configuration) = configuration {
        configuration.finish().await?;
    }
    Ok(recorded?)
}
