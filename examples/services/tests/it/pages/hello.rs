//! The program that README begins with.

use std::net::SocketAddr;

use axum::{Router, routing::get};
use tollgate::{Limiter, Redis, Rule, middleware::RateLimitLayer, rules::RuleSet};

pub(super) async fn main(redis: &str, listen: &str) -> Result<(), Box<dyn std::error::Error>> {
    let limiter = Limiter::new(Redis::open(redis)?);
    let rule = Rule::new("api", "token-bucket 100/1m burst 20")?;
    let layer = RateLimitLayer::new(limiter, RuleSet::single(&rule, "ip")?);
    let app = Router::new().route("/", get(|| async { "hello\n" })).layer(layer);

    let listener = tokio::net::TcpListener::bind(listen).await?;
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
