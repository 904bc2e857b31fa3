//! A service of a test's own, on free ports of the loopback, until it is dropped.

use std::time::Duration;

use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tollgate::rules::RuleSet;
use tollgate::{Limiter, Redis};
use tollgate_serve::listen::{Bounds, Port};
use tollgate_serve::{Service, ServiceBuilder};
use tollgate_testing::redis_server::Server;
use tonic::transport::{Channel, Endpoint};

pub(crate) struct Running {
    pub(crate) grpc: String,
    pub(crate) http: String,
    end: Option<oneshot::Sender<()>>,
    serving: JoinHandle<()>,
}

/// A builder with a deadline that no slow machine misses.
pub(crate) fn builder(server: &Server, rules: &str) -> ServiceBuilder {
    let limiter = Limiter::builder(Redis::open(&server.url()).expect("an address"));
    let rules: RuleSet = rules.parse().expect("rules");
    Service::builder(limiter.deadline(Duration::from_secs(100)).build(), rules)
}

impl Running {
    pub(crate) async fn start(service: Service) -> Self {
        // No slow machine misses them.
        let mut bounds = Bounds::default();
        (bounds.head, bounds.request) = (Duration::from_secs(100), Duration::from_secs(100));
        Self::bounded(service, bounds).await
    }

    pub(crate) async fn bounded(service: Service, bounds: Bounds) -> Self {
        let open = async || Port::open(&"127.0.0.1:0".parse().expect("an address")).await.expect("a port");
        let (grpc_port, http_port) = (open().await, open().await);
        let (grpc, http) = (grpc_port.address(), http_port.address());
        let (end, ended) = oneshot::channel::<()>();
        let serving = tokio::spawn(async move {
            let ended = futures_util::FutureExt::shared(async move { ended.await.unwrap_or(()) });
            tokio::join!(
                grpc_port.serve(service.grpc(), bounds, ended.clone()),
                http_port.serve(service.http(), bounds, ended)
            );
        });
        Self { grpc, http, end: Some(end), serving }
    }

    /// A client of a connection of its own.
    pub(crate) async fn client(&self) -> RateLimitServiceClient<Channel> {
        let endpoint = Endpoint::from_shared(format!("http://{}", self.grpc)).expect("an address");
        RateLimitServiceClient::new(endpoint.connect().await.expect("a connection"))
    }

    /// Ends it, and waits until what has begun is answered.
    pub(crate) async fn end(mut self) {
        drop(self.end.take());
        self.serving.await.expect("the service ends");
    }
}
