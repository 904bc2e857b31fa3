//! An actix-web service, which isn't on tower: a decision's header fields do for any framework.
//!
//!   cargo run --manifest-path examples/services/Cargo.toml --bin actix
//!   curl -i http://127.0.0.1:3001/

use std::error::Error;

use actix_web::http::StatusCode;
use actix_web::{App, HttpRequest, HttpResponse, HttpServer, get, web};
use tollgate::middleware::HeaderStyle;
use tollgate::{Limiter, Rule};
use tollgate_examples::{address, engine};

struct Limits {
    limiter: Limiter,
    rule: Rule,
}

#[get("/")]
async fn hello(request: HttpRequest, limits: web::Data<Limits>) -> HttpResponse {
    let client = request.peer_addr().map_or_else(|| "unknown".to_owned(), |address| address.ip().to_string());
    let decision = match limits.limiter.acquire(&limits.rule, &client).await {
        Ok(decision) => decision,
        // No decision: a dead Redis is no client's fault.
        Err(error) => {
            eprintln!("{error}");
            return HttpResponse::ServiceUnavailable().insert_header(("retry-after", "1")).finish();
        }
    };
    let status = if decision.allowed { StatusCode::OK } else { StatusCode::TOO_MANY_REQUESTS };
    let mut response = HttpResponse::build(status);
    for field in decision.headers(HeaderStyle::Both) {
        response.append_header(field);
    }
    response.body(if decision.allowed { "hello\n" } else { "too many requests\n" })
}

#[actix_web::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let limits = web::Data::new(Limits {
        limiter: Limiter::new(engine()?),
        rule: "token-bucket 60/1m burst 5".parse::<Rule>()?.named("hello")?,
    });
    let server = HttpServer::new(move || App::new().app_data(limits.clone()).service(hello));
    let server = server.workers(2).bind(address("127.0.0.1:3001"))?;
    println!("listening on {}", server.addrs()[0]);
    server.run().await?;
    Ok(())
}
