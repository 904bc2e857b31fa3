//! An actix-web service, which doesn't use tower: a verdict's header fields suit any framework.
//!
//!   cargo run -p tollgate-examples --bin actix
//!   curl -i http://127.0.0.1:3001/

use std::error::Error;

use actix_web::http::StatusCode;
use actix_web::{App, HttpRequest, HttpResponse, HttpServer, get, web};
use tollgate::middleware::HeaderStyle;
use tollgate::rules::{Attributes, RuleSet};
use tollgate::{Limiter, Rule};
use tollgate_examples::{address, engine};

struct Limits {
    limiter: Limiter,
    rules: RuleSet,
}

#[get("/")]
async fn hello(request: HttpRequest, limits: web::Data<Limits>) -> HttpResponse {
    // The path as actix-web compares it, for rules with `paths = "segments"`.
    let known = Attributes::new().method(request.method().as_str()).path(request.match_info().as_str());
    let known = match request.peer_addr() {
        Some(peer) => known.ip(peer.ip()),
        None => known,
    };
    let verdict = match limits.limiter.acquire_by(&limits.rules, &known).await {
        Ok(verdict) => verdict,
        // Not a denial: if Redis is dead or a rule can't be decided, the client isn't at fault.
        Err(error) => {
            eprintln!("{error}");
            let status =
                if error.is_input() { StatusCode::INTERNAL_SERVER_ERROR } else { StatusCode::SERVICE_UNAVAILABLE };
            return HttpResponse::build(status).insert_header(("retry-after", "1")).finish();
        }
    };
    let status = verdict.response.as_ref().map_or(200, |response| response.status.get());
    let mut response = HttpResponse::build(StatusCode::from_u16(status).unwrap_or(StatusCode::TOO_MANY_REQUESTS));
    for field in verdict.headers(HeaderStyle::Draft) {
        response.append_header(field);
    }
    response.body(if verdict.allowed { "hello\n" } else { "too many requests\n" })
}

#[actix_web::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let rule = Rule::new("hello", "token-bucket 60/1m burst 5")?;
    let limits = web::Data::new(Limits { limiter: Limiter::new(engine()?), rules: RuleSet::single(&rule, "ip")? });
    let server = HttpServer::new(move || App::new().app_data(limits.clone()).service(hello));
    let server = server.workers(2).bind(address("127.0.0.1:3001"))?;
    println!("listening on {}", server.addrs()[0]);
    server.run().await?;
    Ok(())
}
