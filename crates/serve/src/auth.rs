//! For proxies that ask another service whether a request may pass: Traefik's and Caddy's `forward_auth`, nginx's
//! `auth_request`.

use std::time::Instant;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, Method, StatusCode};
use tollgate::rules::{Attributes, RuleRequest, Verdict};

use crate::failure::Failure;
use crate::http::add;
use crate::metrics;
use crate::service::Service;

/// What begins the name of a header field that is an attribute: `X-Tollgate-User` is `user`.
const ATTRIBUTE: &str = "x-tollgate-";

/// Where the proxies name the request's path, method and client, in the order in which they are looked for.
const PATHS: [&str; 2] = ["x-forwarded-uri", "x-original-uri"];
const METHODS: [&str; 2] = ["x-forwarded-method", "x-original-method"];
const CLIENTS: [&str; 2] = ["x-real-ip", "x-forwarded-for"];

/// Answers a denial with its own status, as Traefik and Caddy hand it on.
pub(crate) async fn forward_auth(State(service): State<Service>, method: Method, headers: HeaderMap) -> Response {
    service.answer(&method, &headers, |status, _| status).await
}

/// Answers a denial with 403, since nginx takes any other status for a failure, and with the true one in
/// `X-Tollgate-Status`.
pub(crate) async fn auth_request(State(service): State<Service>, method: Method, headers: HeaderMap) -> Response {
    let answer = service.answer(&method, &headers, |status, fields| {
        fields.push(("x-tollgate-status", status.as_str().to_owned()));
        if status.is_success() { status } else { StatusCode::FORBIDDEN }
    });
    answer.await
}

fn respond(status: StatusCode, fields: Fields, verdict: &Verdict) -> Response {
    let message = verdict.response.as_ref().filter(|_| !status.is_success());
    let message = message.and_then(|response| response.message.as_deref()).unwrap_or_default().to_owned();
    let mut response = (status, message).into_response();
    add(&mut response, fields);
    response
}

/// Header fields.
type Fields = Vec<(&'static str, String)>;

impl Service {
    /// The answer to a proxy, with the status that this makes of a verdict's own.
    async fn answer(
        &self,
        method: &Method,
        headers: &HeaderMap,
        status_of: impl FnOnce(StatusCode, &mut Fields) -> StatusCode,
    ) -> Response {
        let began = Instant::now();
        let admitted = self.admitted(method, headers).await;
        let answered = admitted.map(|verdict| {
            metrics::judged(&verdict);
            let (own, mut fields) = self.head(&verdict);
            (own.is_success(), respond(status_of(own, &mut fields), fields, &verdict))
        });
        metrics::answered("proxy", answered.as_ref().ok().map(|(allowed, _)| *allowed), began.elapsed());
        answered.map_or_else(IntoResponse::into_response, |(_, response)| response)
    }

    /// Decides on the request that a proxy describes by header fields. It sets or removes all of them itself: a client
    /// that could write one would choose whom it counts as.
    async fn admitted(&self, method: &Method, headers: &HeaderMap) -> Result<Verdict, Failure> {
        let began = Instant::now();
        let field = |names: [&str; 2]| names.iter().find_map(|name| headers.get(*name)?.to_str().ok());
        let mut attributes = Attributes::new().method(field(METHODS).unwrap_or(method.as_str()));
        if let Some(path) = field(PATHS) {
            attributes = attributes.path(path);
        }
        // The last address is the one that the proxy itself has added.
        let client = field(CLIENTS)
            .and_then(|listed| listed.rsplit(',').next())
            .map(str::trim)
            .filter(|client| !client.is_empty());
        if let Some(client) = client {
            attributes = attributes.try_set("ip", client).map_err(Failure::unreadable)?;
        }
        for (name, value) in headers {
            if let Some(attribute) = name.as_str().strip_prefix(ATTRIBUTE) {
                attributes = attributes.try_set(attribute, value.as_bytes()).map_err(Failure::unreadable)?;
            }
        }
        let account = self.account_of(&attributes);
        let attributes = match &account {
            Some(account) => attributes.known_user(account),
            None => attributes,
        };
        let rules = self.rules();
        let verdict = self.limiter().acquire_by(&rules, RuleRequest::new(&attributes)).await?;
        self.decided(&attributes, &verdict, began);
        Ok(verdict)
    }
}
