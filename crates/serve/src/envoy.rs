//! Envoy's protocol: `envoy.service.ratelimit.v3.RateLimitService`, which Envoy, Istio, Envoy Gateway and others ask.

mod descriptor;
mod message;
mod status;

use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::State;
use axum::routing::post;
use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse, rate_limit_response};
use futures_util::future::{BoxFuture, try_join_all};
use http::{HeaderMap, StatusCode};
use tollgate::rules::{Attributes, Descriptors, RuleRequest, RuleSet, Verdict};
use tollgate::{ErrorKind, Operation};
use tonic::server::UnaryService;
use tonic::{Code, Request, Response, Status};
use tonic_health::pb::health_server::HealthServer;
use tonic_health::server::HealthService;
use tonic_prost::ProstCodec;
use tower::util::MapResponse;

use crate::failure::{Failure, is_grpc, refusal};
use crate::metrics;
use crate::service::{Service, Unmatched};
use crate::token::require;
use crate::unread::Lasting;
use crate::warning::warn_seldom;
use descriptor::{Asked, MOST_DESCRIPTORS, MOST_ENTRIES};
use message::Received;

/// The most bytes of a request: some hundred descriptors of ten entries fit ten times.
const MOST_BYTES: usize = 256 << 10;

impl Service {
    /// The service by Envoy's protocol, and `grpc.health.v1` beside it: for [`listen`](crate::listen), or as routes of a
    /// server of your own that speaks HTTP/2.
    pub fn grpc(&self) -> Router {
        let routes = Router::new().route(SHOULD_RATE_LIMIT, post(should_rate_limit)).with_state(self.clone());
        // Serving from its start: whether Redis answers is for the policies, and for `/readyz`.
        let health = HealthServer::new(HealthService::from_health_reporter(self.health_reporter()));
        let watch = MapResponse::new(health.clone(), |mut answer: http::Response<tonic::body::Body>| {
            answer.extensions_mut().insert(Lasting);
            answer
        });
        require(self.tokens(), routes)
            .route_service("/grpc.health.v1.Health/Watch", watch)
            .route_service("/grpc.health.v1.Health/{*call}", health)
            .fallback(unknown)
    }
}

const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

async fn should_rate_limit(
    State(service): State<Service>,
    request: axum::extract::Request,
) -> http::Response<tonic::body::Body> {
    let codec = ProstCodec::<RateLimitResponse, Received>::default();
    let mut grpc = tonic::server::Grpc::new(codec).apply_max_message_size_config(Some(MOST_BYTES), None);
    let began = Instant::now();
    let response = grpc.unary(ShouldRateLimit(service), request).await;
    // What can't be read never comes to the service.
    if let Some(unread) = Status::from_header_map(response.headers()).filter(|status| is_unread(status.code())) {
        metrics::answered("envoy", Err(&Failure::Request(unread.message().to_owned())), began.elapsed());
        warn_seldom(|| tracing::warn!(error = unread.message(), "a gateway's request can't be read"));
    }
    response
}

/// Whether this is what reading a request ends with: it is no message, too long, or compressed.
fn is_unread(code: Code) -> bool {
    matches!(code, Code::Internal | Code::OutOfRange | Code::Unimplemented)
}

/// The call, once its message was read.
struct ShouldRateLimit(Service);

impl UnaryService<Received> for ShouldRateLimit {
    type Response = RateLimitResponse;
    type Future = BoxFuture<'static, Result<Response<RateLimitResponse>, Status>>;

    fn call(&mut self, request: Request<Received>) -> Self::Future {
        let service = self.0.clone();
        Box::pin(async move { service.should_rate_limit(request.into_inner().into()).await })
    }
}

/// A call of another service, or a request that isn't gRPC: those who ask by HTTP must not take an answer's status 200,
/// which every call of gRPC gets, for a decision.
async fn unknown(headers: HeaderMap) -> axum::response::Response {
    if is_grpc(&headers) {
        return Status::unimplemented("expected envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit")
            .into_http();
    }
    const WHY: &str = "this port serves gRPC: HTTP with JSON is at the port that --http names";
    refusal(StatusCode::UNSUPPORTED_MEDIA_TYPE, WHY, ErrorKind::Input.name(), Some(false))
}

impl Service {
    async fn should_rate_limit(&self, request: RateLimitRequest) -> Result<Response<RateLimitResponse>, Status> {
        let began = Instant::now();
        let decided = self.decide(&request).await;
        let response = decided.map(|(asked, verdicts)| {
            asked.iter().zip(&verdicts).for_each(|(asked, verdict)| metrics::judged(asked.operation, verdict));
            status::response(&asked, &verdicts, self.unmatched(), self.header_style())
        });
        let allowed = response.as_ref().map(|response| response.overall_code() == rate_limit_response::Code::Ok);
        metrics::answered("envoy", allowed, began.elapsed());
        Ok(response.map(Response::new)?)
    }
}

impl Service {
    /// What is asked for each descriptor, and the verdict on it, in their order.
    async fn decide(&self, request: &RateLimitRequest) -> Result<(Vec<Asked>, Vec<Verdict>), Failure> {
        let began = Instant::now();
        let RateLimitRequest { domain, descriptors, hits_addend } = request;
        if domain.is_empty() {
            return Err(Failure::Request("domain: it is missing: it names the set of limits that apply".into()));
        }
        if descriptors.is_empty() || descriptors.len() > MOST_DESCRIPTORS {
            let got = descriptors.len();
            return Err(Failure::Request(format!("descriptors: expected 1 to {MOST_DESCRIPTORS}, got {got}")));
        }
        let entries = descriptors.iter().map(|one| one.entries.len()).max().unwrap_or_default();
        if entries > MOST_ENTRIES {
            return Err(Failure::Request(format!(
                "entries: expected at most {MOST_ENTRIES} in a descriptor, got {entries}"
            )));
        }
        let rules = self.rules();
        let names: Vec<_> = descriptors.iter().map(|one| descriptor::names(&one.entries)).collect();
        let attributes = descriptors.iter().zip(&names);
        let attributes = attributes.map(|(one, names)| descriptor::attributes(domain, names, &one.entries));
        let attributes: Vec<_> = attributes.collect();
        let accounts: Vec<_> = attributes.iter().map(|attributes| self.account_of(attributes)).collect();
        let known = attributes.into_iter().zip(&accounts);
        let attributes: Vec<_> = known.map(|(own, account)| own.known_user(account.as_ref())).collect();
        let asked = descriptors.iter().zip(&attributes);
        let asked = asked.map(|(descriptor, attributes)| Asked::of(descriptor, *hits_addend, &rules, attributes));
        let asked = asked.collect::<Result<Vec<_>, _>>()?;
        // What no rule applies to may be denied, and takes nothing of the others then.
        let is_unmatched = |own: &Attributes<'_>| rules.applies(own).is_ok_and(|applies| applies.rule.is_none());
        let refused = self.unmatched() == Unmatched::Deny && attributes.iter().any(is_unmatched);
        let requests = asked.iter().zip(&attributes).map(|(asked, own)| (asked.operation, asked.request(own)));
        let requests: Vec<_> = requests.collect();
        let verdicts = match (&*requests, self.descriptors(&rules)) {
            ([(operation, request)], _) => vec![self.limiter().call_by(*operation, &rules, *request).await?],
            (several, Descriptors::Each) => Box::pin(self.each(&rules, several)).await?,
            (several, _) => Box::pin(self.together(&rules, several, refused)).await?,
        };
        for (attributes, verdict) in attributes.iter().zip(&verdicts) {
            self.decided(attributes, verdict, began);
        }
        Ok((asked, verdicts))
    }

    /// Takes what all descriptors take and gives back what they give back, or does nothing. Those that only look come
    /// first, and what is given back last: each only if those before deny nothing.
    async fn together(&self, rules: &RuleSet, requests: &[Call<'_>], refused: bool) -> Result<Vec<Verdict>, Failure> {
        let mut allowed = !refused;
        let began = Instant::now();
        let mut verdicts: Vec<Option<Verdict>> = requests.iter().map(|_| None).collect();
        for operation in [Operation::Peek, Operation::Acquire, Operation::Refund] {
            let own = requests.iter().enumerate().filter(|(_, (asked, _))| *asked == operation);
            // One time for all of them.
            let left = self.limiter().deadline().saturating_sub(began.elapsed()).max(Duration::from_micros(1));
            let (places, of_rules): (Vec<_>, Vec<_>) =
                own.map(|(at, (_, request))| (at, request.deadline(left))).unzip();
            let decided = match operation {
                Operation::Acquire if allowed => self.limiter().acquire_all_by(rules, of_rules).await?,
                _ => {
                    let made = if allowed { operation } else { Operation::Peek };
                    let calls: Vec<_> = of_rules.into_iter().map(|request| (made, request)).collect();
                    self.each(rules, &calls).await?
                }
            };
            allowed &= decided.iter().all(|verdict| verdict.allowed);
            places.into_iter().zip(decided).for_each(|(at, verdict)| verdicts[at] = Some(verdict));
        }
        Ok(verdicts.into_iter().flatten().collect())
    }

    /// Makes each call by itself, at once.
    async fn each(&self, rules: &RuleSet, requests: &[Call<'_>]) -> Result<Vec<Verdict>, Failure> {
        let calls = requests.iter().map(|(operation, request)| self.limiter().call_by(*operation, rules, *request));
        Ok(try_join_all(calls).await?)
    }
}

/// What is asked for a descriptor, of the rules.
type Call<'a> = (Operation, RuleRequest<'a>);
