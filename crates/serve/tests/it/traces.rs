//! Traces, as a collector gets them.

use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use envoy_types::pb::envoy::service::ratelimit::v3::RateLimitRequest;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::trace::v1::Span;
use serde_json::json;
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tollgate_testing::polling::in_time;
use tonic::transport::Endpoint;
use tonic::{Request, Response, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::binary::{FREE, Process};
use crate::client::send;

const RULES: &str = "[[rule]]\nname = \"users\"\nkey = \"user\"\nlimits = [\"fixed-window 5/30d\"]";

/// Hands on what it gets.
struct Collector(mpsc::UnboundedSender<ExportTraceServiceRequest>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.0.send(request.into_inner()).map_err(|_| Status::unavailable("the test is over"))?;
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

#[tokio::test]
async fn a_request_and_its_decision_are_spans_below_the_callers() {
    let (sender, mut exported) = mpsc::unbounded_channel();
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let collector = format!("http://{}", listener.local_addr().expect("an address"));
    let routes = tonic::service::Routes::new(TraceServiceServer::new(Collector(sender))).into_axum_router();
    let serving = tokio::spawn(axum::serve(listener, routes).into_future());
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("rules.toml");
    std::fs::write(&file, RULES).expect("a file");
    let arguments = [&[file.to_str().expect("text"), "--otlp", &collector], FREE.as_slice()].concat();
    let process = Process::start(&arguments, 3).await;
    let parent = [("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")];
    let body = json!({ "attributes": { "user": 1 } }).to_string();
    assert_eq!(send(process.port("http"), "POST", "/v1/decide", &parent, &body).await.status, 200);
    // Of health checks, and of what nobody serves, there is no trace.
    for (path, status) in [("/healthz", 200), ("/readyz", 200), ("/nothing", 404)] {
        assert_eq!(send(process.port("http"), "GET", path, &parent, "").await.status, status, "{path}");
    }
    let channel = Endpoint::from_shared(format!("http://{}", process.port("grpc"))).expect("an address");
    let channel = channel.connect().await.expect("a connection");
    HealthClient::new(channel.clone()).check(HealthCheckRequest::default()).await.expect("a status");
    let entry = Entry { key: "user".into(), value: "1".into() };
    let descriptor = RateLimitDescriptor { entries: vec![entry], ..RateLimitDescriptor::default() };
    let asked = RateLimitRequest { domain: "a".into(), descriptors: vec![descriptor], hits_addend: 0 };
    RateLimitServiceClient::new(channel).should_rate_limit(asked).await.expect("an answer");
    // What is left is sent at the end.
    process.end().await;
    let mut spans: Vec<Span> = Vec::new();
    while spans.len() < 4 {
        let export = in_time(exported.recv()).await.expect("spans");
        let resource = format!("{:?}", export.resource_spans[0].resource);
        assert!(resource.contains("tollgate-serve"), "{resource}");
        let scopes = export.resource_spans.into_iter().flat_map(|of| of.scope_spans);
        spans.extend(scopes.flat_map(|of| of.spans));
    }
    assert!(exported.try_recv().is_err() && spans.len() == 4, "{spans:?}");
    let named = |name: &str| spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("{name}: {spans:?}"));
    let below = |request: &Span| {
        let below = |span: &&Span| (&span.trace_id, &span.parent_span_id) == (&request.trace_id, &request.span_id);
        spans.iter().find(below).unwrap_or_else(|| panic!("nothing below {request:?}"))
    };
    let (json, grpc) = (named("/v1/decide"), named("/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"));
    assert_eq!(json.trace_id, 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c_u128.to_be_bytes());
    assert_eq!(json.parent_span_id, 0xb7ad_6b71_6920_3331_u64.to_be_bytes());
    assert_eq!(grpc.parent_span_id, b"", "it begins a trace");
    for request in [json, grpc] {
        let decision = below(request);
        assert_eq!(decision.name, "decision");
        assert!(decision.attributes.iter().any(|one| one.key == "rule"), "{decision:?}");
    }
    serving.abort();
}

#[tokio::test]
async fn a_collector_that_is_away_is_told_of_and_delays_nothing() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("rules.toml");
    std::fs::write(&file, RULES).expect("a file");
    let arguments = [&[file.to_str().expect("text"), "--otlp", "http://127.0.0.1:1"], FREE.as_slice()].concat();
    let mut process = Process::logging(&arguments, 3).await;
    let body = json!({ "attributes": { "user": 1 } }).to_string();
    assert_eq!(send(process.port("http"), "POST", "/v1/decide", &[], &body).await.status, 200);
    let mut log = process.log();
    process.end().await;
    let mut text = String::new();
    in_time(log.read_to_string(&mut text)).await.expect("text");
    assert!(text.contains("opentelemetry"), "{text}");
}
