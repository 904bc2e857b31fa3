//! Traces by OpenTelemetry: a span for each request, below its caller's, and below it the library's for each decision.

use std::sync::LazyLock;
use std::time::Duration;

use anyhow::{Context, Result};
use axum::extract::{MatchedPath, Request};
use axum::middleware::Next;
use axum::response::Response;
use http::HeaderMap;
use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::{SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::field::Empty;
use tracing::level_filters::LevelFilter;
use tracing::{Instrument, Subscriber};
use tracing_opentelemetry::OpenTelemetrySpanExt;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{FilterExt, Targets, dynamic_filter_fn};
use tracing_subscriber::registry::LookupSpan;

/// The statuses of gRPC that are a server's failures, by OpenTelemetry's conventions: unknown, deadline exceeded,
/// unimplemented, internal, unavailable, data loss.
const OWN_FAILURES: [&str; 6] = ["2", "4", "12", "13", "14", "15"];

/// A request's span, as the process knows it; a trace has it by its route.
const REQUEST: &str = "request";

/// The spans of this process on their way to a collector.
pub(crate) struct Traces(SdkTracerProvider);

impl Traces {
    /// Sends them to this collector by OTLP over gRPC, in batches. Which requests are traced is the callers' choice, or
    /// by `OTEL_TRACES_SAMPLER`.
    pub(crate) fn open(collector: &str) -> Result<Self> {
        // Without TLS: a collector is beside the service, or its agent is.
        anyhow::ensure!(collector.starts_with("http://"), "--otlp: expected http://HOST:PORT, without TLS");
        let exporter = SpanExporter::builder().with_tonic().with_endpoint(collector).build().context("--otlp")?;
        let resource = match std::env::var_os("OTEL_SERVICE_NAME") {
            Some(_) => Resource::builder(),
            None => Resource::builder().with_service_name("tollgate-serve"),
        };
        let provider = SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource.build());
        Ok(Self(provider.build()))
    }

    /// What makes traces of spans.
    pub(crate) fn layer<S: Subscriber + for<'s> LookupSpan<'s>>(&self) -> impl Layer<S> + use<S> {
        // Of the library and of this crate, whose name begins with the library's.
        let spans = Targets::new().with_target("tollgate", LevelFilter::DEBUG);
        // No trace begins with a decision: those of readiness belong to no request.
        let begun = dynamic_filter_fn(|span, context| span.name() == REQUEST || context.lookup_current().is_some());
        let spans = spans.and(begun);
        tracing_opentelemetry::layer().with_tracer(self.0.tracer("tollgate-serve")).with_filter(spans)
    }

    /// Sends what is left.
    pub(crate) async fn end(self) {
        // A collector that hangs doesn't keep the process for longer.
        let within = Duration::from_secs(2);
        let ended = tokio::task::spawn_blocking(move || self.0.shutdown_with_timeout(within)).await;
        if let Ok(Err(error)) = ended {
            tracing::warn!(%error, "the last traces are lost");
        }
    }
}

/// Makes a span of a request, below the one that its `traceparent` names. Of health checks and of paths that nobody
/// serves there is none.
pub(crate) async fn traced(request: Request, next: Next) -> Response {
    static CONTEXT: LazyLock<TraceContextPropagator> = LazyLock::new(TraceContextPropagator::new);
    let route = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str);
    let route = route.filter(|route| !matches!(*route, "/healthz" | "/readyz" | "/grpc.health.v1.Health/{*call}"));
    let Some(route) = route else { return next.run(request).await };
    // A service of gRPC has one method here.
    let name = route.trim_end_matches("/{*rest}");
    let span = tracing::debug_span!(
        REQUEST,
        otel.name = name,
        otel.kind = "server",
        otel.status_code = Empty,
        http.response.status_code = Empty,
        rpc.grpc.status_code = Empty
    );
    // An error if nobody traces it, as at the end of the process.
    let _traced = span.set_parent(CONTEXT.extract(&Fields(request.headers())));
    let response = next.run(request).instrument(span.clone()).await;
    span.record("http.response.status_code", i64::from(response.status().as_u16()));
    // Of a call that ended without an answer.
    let refused = response.headers().get("grpc-status").and_then(|status| status.to_str().ok());
    if let Some(status) = refused {
        span.record("rpc.grpc.status_code", status);
    }
    if response.status().is_server_error() || refused.is_some_and(|status| OWN_FAILURES.contains(&status)) {
        span.record("otel.status_code", "ERROR");
    }
    response
}

/// The header fields in which a caller names its own span.
struct Fields<'a>(&'a HeaderMap);

impl Extractor for Fields<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(http::HeaderName::as_str).collect()
    }
}
