//! For proxies that ask another service whether a request may pass: Traefik's and Caddy's `forward_auth`, nginx's
//! `auth_request`.

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, Method, StatusCode};
use percent_encoding::{AsciiSet, percent_encode};
use tollgate::Operation;
use tollgate::rules::{Attributes, Reason, RuleRequest, Verdict};

use crate::failure::{Failure, check_path};
use crate::headers::add;
use crate::metrics;
use crate::service::Service;

/// What begins the name of a header field that is an attribute: `X-Tollgate-User` is `user`.
const ATTRIBUTE: &str = "x-tollgate-";

/// Where a proxy names the request's path, method and client. What another one would write isn't read: a client may have.
struct Fields {
    path: &'static str,
    method: &'static str,
    client: &'static str,
}

const FORWARDED: Fields = Fields { path: "x-forwarded-uri", method: "x-forwarded-method", client: "x-forwarded-for" };
const ORIGINAL: Fields = Fields { path: "x-original-uri", method: "x-original-method", client: "x-real-ip" };

/// Answers a denial with its own status, as Traefik and Caddy hand it on.
pub(crate) async fn forward_auth(State(service): State<Service>, method: Method, headers: HeaderMap) -> Response {
    service.answer(&FORWARDED, &method, &headers, |status, _, _| status).await
}

/// Answers a denial with 403, since nginx takes any other status for a failure, and with the true one in
/// `X-Tollgate-Status`.
pub(crate) async fn auth_request(State(service): State<Service>, method: Method, headers: HeaderMap) -> Response {
    let answer = service.answer(&ORIGINAL, &method, &headers, |status, told, verdict| {
        told.push(("x-tollgate-status", status.as_str().to_owned()));
        told.extend(missing(verdict));
        if status.is_success() { status } else { StatusCode::FORBIDDEN }
    });
    answer.await
}

/// The attribute that a request lacks and its rule counts by: nothing else says which field the proxy doesn't set.
fn missing(verdict: &Verdict) -> Option<(&'static str, String)> {
    match &verdict.reason {
        Reason::Missing(attribute) => Some(("x-tollgate-missing", attribute.clone())),
        _ => None,
    }
}

fn respond(status: StatusCode, told: Told, verdict: &Verdict) -> Response {
    let message = verdict.response.as_ref().filter(|_| !status.is_success());
    let message = message.and_then(|response| response.message.as_deref()).unwrap_or_default().to_owned();
    let mut response = (status, message).into_response();
    add(&mut response, told);
    response
}

/// The header fields of a response.
type Told = Vec<(&'static str, String)>;

impl Service {
    /// The answer to a proxy, with the status that this makes of a verdict's own.
    async fn answer(
        &self,
        fields: &Fields,
        method: &Method,
        headers: &HeaderMap,
        status_of: impl FnOnce(StatusCode, &mut Told, &Verdict) -> StatusCode,
    ) -> Response {
        let began = Instant::now();
        let admitted = self.admitted(fields, method, headers).await;
        let answered = admitted.map(|verdict| {
            metrics::judged(Operation::Acquire, &verdict);
            let (own, mut told) = self.head(&verdict);
            (own.is_success(), respond(status_of(own, &mut told, &verdict), told, &verdict))
        });
        metrics::answered("proxy", answered.as_ref().map(|(allowed, _)| *allowed), began.elapsed());
        match answered {
            Ok((_, response)) => response,
            // Proxies hand the answer on to clients, whom the address of a Redis is none of the business of.
            Err(Failure::Limiter(error)) => {
                tracing::warn!(target: "tollgate", %error, "a proxy got no decision");
                StatusCode::SERVICE_UNAVAILABLE.into_response()
            }
            Err(failure) => failure.into_response(),
        }
    }

    /// Decides on the request that a proxy describes by header fields. It sets or removes all of them itself: a client
    /// that could write one would choose whom it counts as.
    async fn admitted(&self, fields: &Fields, method: &Method, headers: &HeaderMap) -> Result<Verdict, Failure> {
        let began = Instant::now();
        let field = |name: &str| headers.get_all(name).iter().next_back().map(|value| written(value.as_bytes()));
        let [own_method, path, client] = [fields.method, fields.path, fields.client].map(field);
        let mut attributes = Attributes::new().method(own_method.as_deref().unwrap_or(method.as_str()));
        if let Some(path) = &path {
            attributes = attributes.path(path);
        }
        // The last address is the one that the proxy itself has added.
        let client = client.as_deref().and_then(|listed| listed.rsplit(',').next()).map(str::trim);
        if let Some(client) = client.filter(|client| !client.is_empty()) {
            attributes = attributes.ip(address(client)?);
        }
        for (name, value) in headers {
            match name.as_str().strip_prefix(ATTRIBUTE) {
                // Those that have a field of their own.
                None | Some("ip" | "path" | "method" | "status") => {}
                Some(attribute) => attributes = attributes.set(attribute, value.as_bytes()),
            }
        }
        let account = self.account_of(&attributes);
        let attributes = attributes.known_user(account.as_ref());
        let rules = self.rules();
        check_path(&rules, &attributes)?;
        let verdict = self.limiter().acquire_by(&rules, RuleRequest::new(&attributes)).await?;
        self.decided(&attributes, &verdict, began);
        Ok(verdict)
    }
}

/// A field's text, with other bytes than ASCII as a path has them, percent-encoded: what a client may write into it must
/// not make it disappear.
fn written(bytes: &[u8]) -> Cow<'_, str> {
    match std::str::from_utf8(bytes).ok().filter(|text| text.is_ascii()) {
        Some(text) => text.into(),
        None => percent_encode(bytes, &AsciiSet::EMPTY).into(),
    }
}

/// A client's address, to which some load balancers add its port.
fn address(text: &str) -> Result<IpAddr, Failure> {
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let with_port = || text.parse::<SocketAddr>().map(|address| address.ip());
    bare.parse().or_else(|_| with_port()).map_err(|_| {
        Failure::Request(format!("the client's address: expected one such as 192.0.2.1 or 2001:db8::1, got {text:?}"))
    })
}
