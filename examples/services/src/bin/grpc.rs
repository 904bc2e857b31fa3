//! A tonic service under a layer: gRPC's own health service. With `call ADDRESS`, a client that calls it ten times.
//!
//!   cargo run -p tollgate-examples --bin grpc
//!   cargo run -p tollgate-examples --bin grpc -- call http://127.0.0.1:3002

use std::error::Error;

use tollgate::middleware::RateLimitLayer;
use tollgate::rules::RuleSet;
use tollgate::{Limiter, Rule};
use tollgate_examples::{address, engine};
use tonic::transport::server::{TcpConnectInfo, TcpIncoming};
use tonic::transport::{Endpoint, Server};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, call, server] = arguments.as_slice()
        && call == "call"
    {
        return calls(server).await;
    }
    let rule = Rule::new("health", "token-bucket 60/1m burst 5")?;
    let layer = RateLimitLayer::new(Limiter::new(engine()?), RuleSet::single(&rule, "ip")?)
        .peer(|request| request.extensions.get::<TcpConnectInfo>()?.remote_addr().map(|address| address.ip()));

    let (_reporter, health) = tonic_health::server::health_reporter();
    let incoming = TcpIncoming::bind(address("127.0.0.1:3002").parse()?)?;
    println!("listening on {}", incoming.local_addr()?);
    Server::builder().layer(layer).add_service(health).serve_with_incoming(incoming).await?;
    Ok(())
}

async fn calls(server: &str) -> Result<(), Box<dyn Error>> {
    let mut client = HealthClient::new(Endpoint::from_shared(server.to_owned())?.connect().await?);
    for _ in 0..10 {
        match client.check(HealthCheckRequest { service: String::new() }).await {
            Ok(_) => println!("ok"),
            Err(status) => {
                let wait = status.metadata().get("grpc-retry-pushback-ms").and_then(|value| value.to_str().ok());
                println!("{:?}: {}, retry after {} ms", status.code(), status.message(), wait.unwrap_or("?"));
            }
        }
    }
    Ok(())
}
