//! Traces, as a collector gets them.

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::trace::v1::Span;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tollgate_testing::polling::in_time;
use tonic::{Request, Response, Status};

use crate::binary::{FREE, Process};
use crate::client::send;

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
    std::fs::write(&file, "[[rule]]\nname = \"users\"\nkey = \"user\"\nlimits = [\"fixed-window 5/30d\"]")
        .expect("a file");
    let arguments = [&[file.to_str().expect("text"), "--otlp", &collector], FREE.as_slice()].concat();
    let process = Process::start(&arguments, 3).await;
    let parent = [("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")];
    let body = json!({ "attributes": { "user": 1 } }).to_string();
    assert_eq!(send(process.port("http"), "POST", "/v1/decide", &parent, &body).await.status, 200);
    assert_eq!(send(process.port("http"), "GET", "/healthz", &parent, "").await.status, 200);
    // What is left is sent at the end.
    process.end().await;
    let export = in_time(exported.recv()).await.expect("spans");
    let resource = format!("{:?}", export.resource_spans[0].resource);
    assert!(resource.contains("tollgate-serve"), "{resource}");
    let spans: Vec<&Span> =
        export.resource_spans.iter().flat_map(|of| &of.scope_spans).flat_map(|of| &of.spans).collect();
    let named =
        |name: &str| *spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("{name}: {spans:?}"));
    let (request, decision) = (named("/v1/decide"), named("decision"));
    assert_eq!(spans.len(), 2, "nor those of /healthz and of readiness: {spans:?}");
    assert_eq!(request.trace_id, 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c_u128.to_be_bytes());
    assert_eq!(request.parent_span_id, 0xb7ad_6b71_6920_3331_u64.to_be_bytes());
    assert_eq!((&decision.trace_id, &decision.parent_span_id), (&request.trace_id, &request.span_id));
    assert!(decision.attributes.iter().any(|one| one.key == "rule"), "{decision:?}");
    serving.abort();
}
