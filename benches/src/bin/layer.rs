//! What the HTTP layer adds to a decision: a service behind the layer, and the same decision coded by hand in front of
//! the same service, in turn. Both use the embedded engine.

use std::convert::Infallible;
use std::error::Error;
use std::fmt::Debug;
use std::hint::black_box;
use std::time::Instant;

use bytes::Bytes;
use http::{HeaderName, Request, Response};
use http_body_util::{BodyExt, Empty, Full};
use tollgate::middleware::{HeaderStyle, RateLimitLayer};
use tollgate::rules::{Attributes, RuleSet};
use tollgate::{Embedded, Limiter, Rule};
use tollgate_benches::options::Options;
use tollgate_benches::report::{Targets, header, median, row, short};
use tower::{Layer, Service, ServiceExt, service_fn};

const REQUESTS: u32 = 2000;

type Body = Empty<Bytes>;

async fn hello(request: Request<Body>) -> Result<Response<Full<Bytes>>, Infallible> {
    black_box(&request);
    Ok(Response::new(Full::new(Bytes::from_static(b"hello"))))
}

fn request() -> Request<Body> {
    let request = Request::get("/api/v1/items").header("x-api-key", "abcdef0123456789").header("host", "a.example");
    request.body(Empty::new()).expect("a request")
}

/// Microseconds for each of some requests to this service.
async fn served<S>(service: &S) -> f64
where
    S: Service<Request<Body>, Response: BodyExt<Error: Debug>, Error: Debug> + Clone,
{
    let began = Instant::now();
    for _ in 0..REQUESTS {
        let answer = service.clone().oneshot(request()).await.expect("an answer");
        black_box(answer.collect().await.expect("a body"));
    }
    began.elapsed().as_secs_f64() * 1e6 / f64::from(REQUESTS)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::read();
    let rule = Rule::new("api", "token-bucket 1000000/1s burst 1000000")?;
    let (rules, limiter) = (RuleSet::single(&rule, "api_key")?, Limiter::new(Embedded::new()));
    let by_host = RuleSet::single(&rule.clone().named("hosts")?, "host")?;
    let layer = RateLimitLayer::new(limiter.clone(), rules.clone()).api_key(HeaderName::from_static("x-api-key"));
    let outgoing = layer.clone().for_outgoing().layer(service_fn(hello));
    let of_host = RateLimitLayer::new(limiter.clone(), by_host).header("host", http::header::HOST);
    let (service, of_host) = (layer.layer(service_fn(hello)), of_host.layer(service_fn(hello)));
    let mut turns: [Vec<f64>; 5] = Default::default();
    for _ in 0..options.rounds {
        let began = Instant::now();
        for _ in 0..REQUESTS {
            let request = request();
            let key = request.headers()["x-api-key"].clone();
            let verdict = limiter.acquire_by(&rules, &Attributes::new().api_key(key.as_bytes())).await?;
            assert!(verdict.allowed);
            black_box(service_fn(hello).oneshot(request).await?.into_body().collect().await?);
        }
        turns[0].push(began.elapsed().as_secs_f64() * 1e6 / f64::from(REQUESTS));
        turns[1].push(served(&service).await);
        turns[2].push(served(&of_host).await);
        turns[3].push(served(&outgoing).await);
        let decision = limiter.acquire(&rule, "k").await?;
        let began = Instant::now();
        for _ in 0..REQUESTS {
            black_box(decision.headers(HeaderStyle::Draft));
        }
        turns[4].push(began.elapsed().as_secs_f64() * 1e6 / f64::from(REQUESTS));
    }
    let [by_hand, by_layer, of_host, outgoing, fields] = turns.map(median);
    println!("## The HTTP layer\n");
    println!("A request to a service that says hello, decided by the embedded engine, in microseconds.\n");
    println!("{}", header(&["", "µs"]));
    for (what, us) in [
        ("decided by hand", by_hand),
        ("under the layer", by_layer),
        ("the same by its host, `.header(\"host\", HOST)`", of_host),
        ("the same as a call to others, `.for_outgoing()`", outgoing),
        ("of it, the fields", fields),
    ] {
        println!("{}", row([what.to_owned(), short(us)]));
    }
    let mut targets = Targets::default();
    targets.at_most("the layer beyond the decision, µs", 5.0, by_layer - by_hand);
    println!("\n{targets}");
    Ok(())
}
