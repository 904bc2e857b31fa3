//! HTTP with JSON, for who has no gRPC.

use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use http::header::CONNECTION;
use http::{HeaderValue, StatusCode};
use serde::Deserialize;
use serde_json::{Number, Value};
use tollgate::rules::{Applies, Attributes, Cost, Effect, Reason, RuleRequest, RuleSet, Verdict};
use tollgate::{ErrorKind, Operation, Rule};

use crate::answer::Answer;
use crate::failure::{Failure, as_json, check_path, refusal};
use crate::headers::add;
use crate::named::Named;
use crate::service::{Service, Unmatched};
use crate::token::require;
use crate::{auth, metrics, ready};

/// The most bytes of a body.
const MOST_BYTES: usize = 64 << 10;

/// The most units that scripts compute with.
const MOST_UNITS: u64 = 1 << 53;

/// The longest time that an id is remembered: a year.
const MOST_TTL_MS: u64 = 366 * 86_400_000;

/// What is asked, as JSON.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    /// What rules match and count: text, numbers, `true` or `false`.
    attributes: Named<Value>,
    cost: Option<Number>,
    costs: Option<Named<Number>>,
    id: Option<String>,
    /// For how long the id is remembered.
    id_ttl_ms: Option<Number>,
}

impl Service {
    /// The service by HTTP with JSON: `POST /v1/decide` and its siblings, `/v1/forward-auth` and `/v1/auth-request` for
    /// proxies, `/v1/openapi.json`, `/healthz` and `/readyz`. For [`listen`](crate::listen), or as routes of a server of
    /// your own.
    pub fn http(&self) -> Router {
        let mut routes = Router::new();
        for operation in [
            Operation::Acquire,
            Operation::Peek,
            Operation::Refund,
            Operation::Settle,
            Operation::Cancel,
            Operation::Renew,
            Operation::Release,
        ] {
            let name = if operation == Operation::Acquire { "decide" } else { operation.name() };
            let call = move |State(service): State<Service>, body: Result<Bytes, BytesRejection>| async move {
                let began = Instant::now();
                let answered = match body {
                    Ok(body) => service.call(operation, &body).await,
                    Err(unread) => unread_body(&unread),
                };
                let allowed = answered.as_ref().map(|response| response.status().is_success());
                metrics::answered("json", allowed, began.elapsed());
                answered
            };
            routes = routes.route(&format!("/v1/{name}"), post(call));
        }
        let routes = routes
            .route("/v1/forward-auth", get(auth::forward_auth))
            .route("/v1/auth-request", get(auth::auth_request));
        require(self.tokens(), routes)
            .route("/v1/openapi.json", get(openapi))
            .layer(DefaultBodyLimit::max(MOST_BYTES))
            .with_state(self.clone())
            .merge(self.health())
            .layer(axum::middleware::map_response(as_json))
            .layer(axum::middleware::map_response_with_state(self.clone(), leaving))
    }

    /// `/healthz` and `/readyz` alone, which nobody needs a token for.
    pub fn health(&self) -> Router {
        let routes = Router::new().route("/healthz", get(ready::healthz)).route("/readyz", get(ready::readyz));
        routes.with_state(self.clone())
    }

    /// Makes this call for the request in the body.
    async fn call(&self, operation: Operation, body: &[u8]) -> Result<Response, Failure> {
        let began = Instant::now();
        // serde would take a list for the fields in their order.
        if body.trim_ascii_start().first().is_some_and(|first| *first != b'{') {
            return Err(Failure::Request("body: expected an object, {\"attributes\": ...}".into()));
        }
        let asked: Asked = serde_json::from_slice(body).map_err(|error| Failure::Request(format!("body: {error}")))?;
        let values = asked.attributes.0.iter().map(|(name, value)| Ok((name.as_str(), text(name, value)?)));
        let values = values.collect::<Result<Vec<_>, Failure>>()?;
        let attributes = values.iter().try_fold(Attributes::new(), |all, (name, value)| all.try_set(name, value));
        let attributes = attributes.map_err(Failure::unreadable)?;
        let account = self.account_of(&attributes);
        let attributes = attributes.known_user(account.as_ref());
        let cost = asked.cost.as_ref().map(|cost| whole("cost", cost, 0..=MOST_UNITS)).transpose()?;
        let costs = asked.costs.iter().flat_map(|costs| &costs.0);
        let costs = costs.map(|(name, units)| Ok((&**name, whole(&format!("costs.{name}"), units, 0..=MOST_UNITS)?)));
        let costs = costs.collect::<Result<Vec<_>, Failure>>()?;
        let id_ttl_ms = asked.id_ttl_ms.as_ref().map(|ttl| whole("id_ttl_ms", ttl, 1..=MOST_TTL_MS)).transpose()?;
        let by_id = !matches!(operation, Operation::Acquire | Operation::Peek | Operation::Refund);
        if by_id && asked.id.is_none() {
            return Err(Failure::Request(format!("id: it is missing: {operation} needs the id of an earlier call")));
        }
        if operation == Operation::Settle && cost.is_none() && costs.is_empty() {
            return Err(Failure::Request("cost: it is missing: settle needs the final cost, or costs".into()));
        }
        if asked.id.as_deref() == Some("") {
            return Err(Failure::Request("id: expected at least one character, got none".into()));
        }
        let mut request = RuleRequest::new(&attributes).costs(&costs);
        request = cost.map_or(request, |units| request.cost(units));
        request = asked.id.as_deref().map_or(request, |id| request.id(id));
        request = id_ttl_ms.map_or(request, |ttl| request.id_ttl(Duration::from_millis(ttl)));
        let rules = self.rules();
        check_path(&rules, &attributes)?;
        let mut applies = rules.applies(request)?;
        // What takes no units needs none, whatever attribute the rule takes its cost from.
        let mut none = costs.clone();
        while let (Operation::Cancel | Operation::Renew | Operation::Release, Some(attribute)) =
            (operation, missing_cost(&rules, &applies).filter(|name| !none.iter().any(|(known, _)| known == name)))
        {
            none.push((attribute, 0));
            applies = rules.applies(request.costs(&none))?;
        }
        if none.len() > costs.len() {
            request = request.costs(&none);
        }
        let takes = matches!(operation, Operation::Acquire | Operation::Peek);
        match (&applies.effect, applies.rule) {
            (Effect::Limit(charge), Some(rule))
                if operation == Operation::Acquire && asked.id.is_none() && holds(charge.rule()) =>
            {
                let why = format!("id: it is missing: rule {rule} has permits, which are held and released by it");
                return Err(Failure::Unfit(why));
            }
            (Effect::Limit(charge), Some(rule))
                if matches!(operation, Operation::Settle | Operation::Cancel) && only_holds(charge.rule()) =>
            {
                let why = format!("{operation}: rule {rule} has only permits: release them instead");
                return Err(Failure::Unfit(why));
            }
            (Effect::Missing(attribute), Some(rule)) if !takes && missing_cost(&rules, &applies).is_some() => {
                return Err(Failure::Unfit(format!(
                    "costs.{attribute}: it is missing: rule {rule} takes its cost from it"
                )));
            }
            (Effect::Missing(attribute), Some(rule)) if !takes => {
                return Err(Failure::Unfit(format!("attributes.{attribute}: it is missing: rule {rule} needs it")));
            }
            (Effect::Allow | Effect::Block, rule) if !takes => {
                return Err(Failure::Nothing(match rule {
                    Some(rule) => format!("rule {rule} has no limits for this request"),
                    None => "no rule applies to these attributes".to_owned(),
                }));
            }
            _ => {}
        }
        let verdict = self.limiter().call_by(operation, &rules, request).await?;
        metrics::judged(operation, &verdict);
        if operation == Operation::Acquire {
            self.decided(&attributes, &verdict, began);
        }
        let (status, fields) = self.head(&verdict);
        let answer = Answer::new(operation, &applies, &verdict, asked.id.as_deref());
        let answer = if status.is_success() { answer } else { answer.denied() };
        let mut response = (status, Json(answer)).into_response();
        add(&mut response, fields);
        Ok(response)
    }

    /// The status and the header fields that tell a client of a verdict.
    pub(crate) fn head(&self, verdict: &Verdict) -> (StatusCode, Vec<(&'static str, String)>) {
        let refused = verdict.reason == Reason::NoRule && self.unmatched() == Unmatched::Deny;
        let denied = || match &verdict.response {
            Some(response) => StatusCode::from_u16(response.status.get()).unwrap_or(StatusCode::TOO_MANY_REQUESTS),
            None => StatusCode::TOO_MANY_REQUESTS,
        };
        let status = if verdict.allowed && !refused { StatusCode::OK } else { denied() };
        (status, verdict.headers(self.header_style()))
    }
}

/// Asks those who keep connections to leave, while a service that is to end still serves.
async fn leaving(State(service): State<Service>, mut response: Response) -> Response {
    if service.is_ending() {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// The attribute that the request lacks, if it is one that the rule takes a cost from.
fn missing_cost<'r>(rules: &'r RuleSet, applies: &Applies<'_>) -> Option<&'r str> {
    let (Effect::Missing(missing), Some(rule)) = (&applies.effect, applies.rule) else { return None };
    let definition = rules.definitions().iter().find(|definition| definition.name == rule)?;
    let of_limits = definition.limits.iter().filter_map(|limit| limit.cost.as_ref());
    of_limits.chain([&definition.cost]).find_map(|cost| match cost {
        Cost::Attribute(name) if name == missing => Some(name.as_str()),
        _ => None,
    })
}

/// Whether it has permits.
fn holds(rule: &Rule) -> bool {
    rule.limits().any(|limit| limit.algorithm().holds())
}

/// Whether it has nothing but permits.
fn only_holds(rule: &Rule) -> bool {
    rule.limits().all(|limit| limit.algorithm().holds())
}

/// The answer to a body that is too large, or breaks off.
fn unread_body(why: &BytesRejection) -> Result<Response, Failure> {
    if why.status() != StatusCode::PAYLOAD_TOO_LARGE {
        return Err(Failure::Request(format!("body: {}", why.body_text())));
    }
    let error = format!("body: expected at most {MOST_BYTES} bytes");
    Ok(refusal(why.status(), &error, ErrorKind::Input.name(), Some(false)))
}

/// An attribute's value as text.
fn text(name: &str, value: &Value) -> Result<String, Failure> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Number(number) => {
            let float = number.as_f64().unwrap_or(f64::INFINITY);
            let whole = number.as_u64().or_else(|| number.as_i64().map(i64::unsigned_abs));
            if whole.map_or(float.abs() > MOST_UNITS as f64, |whole| whole > MOST_UNITS) {
                // There, languages write several numbers alike.
                let why = format!("attributes.{name}: expected a number up to {MOST_UNITS}, or text, got {number}");
                return Err(Failure::Request(why));
            }
            // Some languages write 1 as 1.0.
            Ok(if float.fract() == 0.0 { (float as i64).to_string() } else { number.to_string() })
        }
        Value::Bool(yes) => Ok(yes.to_string()),
        Value::Null | Value::Array(_) | Value::Object(_) => {
            Err(Failure::Request(format!("attributes.{name}: expected text, a number, true or false, got {value}")))
        }
    }
}

/// A number without a fraction within these bounds: JSON has one kind of number, and some languages write 1 as 1.0.
fn whole(name: &str, number: &Number, within: RangeInclusive<u64>) -> Result<u64, Failure> {
    let of_fraction =
        || number.as_f64().filter(|number| number.fract() == 0.0 && (0.0..=MOST_UNITS as f64).contains(number));
    let whole = number.as_u64().or_else(|| of_fraction().map(|number| number as u64));
    whole.filter(|whole| within.contains(whole)).ok_or_else(|| {
        let (least, most) = within.into_inner();
        Failure::Request(format!("{name}: expected a whole number from {least} to {most}, got {number}"))
    })
}

async fn openapi() -> impl IntoResponse {
    ([(http::header::CONTENT_TYPE, "application/json")], include_str!("openapi.json"))
}
