//! Calls a third party that allows five calls a second. All processes that share a Redis stay under its limit together,
//! wait for their turn, and hold back when its responses ask for that.
//!
//!   TARGET=http://127.0.0.1:3000/ cargo run -p tollgate-examples --bin client

use std::error::Error;
use std::time::{Duration, Instant};

use axum::http::Request;
use reqwest::Body;
use tollgate::middleware::RateLimitLayer;
use tollgate::rules::RuleSet;
use tollgate::{Limiter, Rule};
use tollgate_examples::engine;
use tower::{Layer, Service, ServiceExt};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let target = std::env::var("TARGET").unwrap_or_else(|_| "http://127.0.0.1:3000/".to_owned());
    let rule = Rule::new("their-api", "token-bucket 5/1s burst 1 max-debt 100")?;
    let layer = RateLimitLayer::new(Limiter::new(engine()?), RuleSet::single(&rule, "global")?)
        .for_outgoing()
        .wait(Duration::from_secs(30))
        .upstream_backoff(Duration::from_secs(600));

    let http = reqwest::Client::new();
    let mut client = layer.layer(tower::service_fn(move |request: Request<Body>| {
        let http = http.clone();
        async move { http.execute(request.try_into()?).await.map(axum::http::Response::<Body>::from) }
    }));

    let began = Instant::now();
    for call in 0..10 {
        let request = Request::get(&target).body(Body::default())?;
        let response = client.ready().await?.call(request).await?;
        println!("call {call} at {:.1} s: {}", began.elapsed().as_secs_f64(), response.status());
    }
    Ok(())
}
