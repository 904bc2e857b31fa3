//! A service with five limits: requests by API key, 100 a minute with a burst of 20, and 8 of them at once; a model's
//! requests and tokens by organisation; and five failed logins in 15 minutes. While Redis is unreachable, requests
//! pass, but each of the two processes still allows only two login attempts per account.
//!
//! An answer is sent word by word. A caller who goes in the middle pays for the words until then.
//!
//!   cargo run -p tollgate-examples --bin completions
//!   curl -iN -H 'Authorization: Bearer k' -H 'X-Org: acme' -d 'What is a tollgate?' http://127.0.0.1:3000/completions

use std::collections::HashMap;
use std::convert::Infallible;
use std::error::Error;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderName, StatusCode};
use axum::routing::post;
use axum::{Extension, Form, Router};
use futures_util::{StreamExt, stream};
use tollgate::middleware::{RateLimitLayer, Rejection, Usage};
use tollgate::rules::RuleSet;
use tollgate::{Limiter, OnError, Request, Rule};
use tollgate_examples::{address, engine, interrupted};

/// A completion is a request of 500 tokens until it is known how many they are.
const MODEL: &str = r#"
[[rule]]
name = "model"
key = "org"
limits = [{ limit = "token-bucket 600/1m", cost = 1 }, { name = "tokens", limit = "token-bucket 100000/1d" }]
cost = 500
"#;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let limiter = Limiter::builder(engine()?).on_error(OnError::Open).build();
    // In a service, keys are checked first, as by ApiKeyLayer: whoever invents one for each request has no limit.
    let rule = Rule::new("requests", "token-bucket 100/1m burst 20, concurrency 8 ttl 1m")?;
    let requests = RateLimitLayer::new(limiter.clone(), RuleSet::single(&rule, "api_key")?).bearer_key();
    // In a service, the organisation comes from authentication: see RateLimitLayer::attribute.
    let rules: RuleSet = MODEL.parse()?;
    let model = RateLimitLayer::new(limiter.clone(), rules);
    let model = model.header("org", HeaderName::from_static("x-org")).settle();
    let logins = Rule::new("logins", "sliding-log 5/15m")?.on_error(OnError::Local { processes: 2.try_into()? })?;

    let app = Router::new()
        .route("/completions", post(complete).layer(model))
        .layer(requests)
        .route("/login", post(login).layer(Extension((limiter.clone(), logins))));

    let listener = tokio::net::TcpListener::bind(address("127.0.0.1:3000")).await?;
    println!("listening on {}", listener.local_addr()?);
    axum::serve(listener, app).with_graceful_shutdown(interrupted()).await?;
    limiter.finish().await;
    Ok(())
}

async fn complete(Extension(usage): Extension<Usage>, prompt: String) -> Body {
    let answer = format!("{prompt} I don't know.\n");
    let words: Vec<_> = answer.split_inclusive(' ').map(str::to_owned).collect();
    let mut tokens = prompt.split_whitespace().count() as u64;
    let words = stream::iter(words).then(move |word| {
        tokens += 1;
        // What is known when the answer ends, or the caller goes, is what the request has taken.
        usage.set_of("tokens", tokens);
        async move {
            tokio::time::sleep(Duration::from_millis(100)).await;
            Ok::<_, Infallible>(word)
        }
    });
    Body::from_stream(words)
}

async fn login(
    Extension((limiter, logins)): Extension<(Limiter, Rule)>,
    Form(form): Form<HashMap<String, String>>,
) -> Result<StatusCode, Rejection> {
    // All spellings of an account count as one.
    let account = form.get("account").map_or("", String::as_str).trim().to_lowercase();
    // Charged before the password is checked: of guesses made at once, five get past this line.
    let attempt = limiter.acquire(&logins, &account).await?.into_result()?;
    tokio::time::sleep(Duration::from_millis(20)).await;
    if form.get("password").is_none_or(|password| password != "right") {
        return Ok(StatusCode::UNAUTHORIZED);
    }
    if let Err(error) = limiter.reset(&logins, Request::new(&account).after(&attempt)).await {
        eprintln!("attempts stay counted: {error}");
    }
    Ok(StatusCode::OK)
}
