//! What all protocols share: who decides, by which rules, and how those are answered for whom there is no rule.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tollgate::Limiter;
use tollgate::rules::{Account, Attributes, Descriptors, RuleSet, RuleSource, Verdict};
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::token::Tokens;
use tollgate::middleware::HeaderStyle;

/// A rate limit service: decides by a set of rules, for whoever asks by [gRPC](Self::grpc) or [HTTP](Self::http).
/// Cheap to clone.
#[derive(Clone)]
pub struct Service {
    shared: Arc<Shared>,
}

struct Shared {
    limiter: Limiter,
    rules: Box<dyn RuleSource>,
    settings: Settings,
    health: HealthReporter,
    /// It is to end, and says so.
    is_ending: AtomicBool,
}

/// What is set once, before there are requests.
#[derive(Clone, Debug, Default)]
struct Settings {
    /// In place of what the rules say.
    descriptors: Option<Descriptors>,
    unmatched: Unmatched,
    header_style: HeaderStyle,
    tokens: Tokens,
}

/// Settings of a [`Service`] that is being made.
pub struct ServiceBuilder {
    limiter: Limiter,
    rules: Box<dyn RuleSource>,
    settings: Settings,
}

/// The answer to a descriptor, or a request by HTTP, that no rule applies to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unmatched {
    /// Allowed.
    #[default]
    Allow,
    /// Denied: a gateway that leaves out an attribute passes no limit by that.
    Deny,
}

impl Service {
    /// A service with default settings.
    pub fn new(limiter: Limiter, rules: impl RuleSource) -> Self {
        Self::builder(limiter, rules).build()
    }

    /// A service whose settings are to be made.
    pub fn builder(limiter: Limiter, rules: impl RuleSource) -> ServiceBuilder {
        ServiceBuilder { limiter, rules: Box::new(rules), settings: Settings::default() }
    }

    /// Says by `grpc.health.v1` that it doesn't serve any more, and answers `/readyz` with 503. Decisions are made as
    /// before: for the time in which those who balance load turn away from it.
    pub async fn fail_health(&self) {
        self.shared.is_ending.store(true, Ordering::Relaxed);
        self.shared.health.clone().set_service_status("", ServingStatus::NotServing).await;
    }

    /// The same, and ends the watches of `grpc.health.v1`, which would keep a [port](crate::listen) from its end. To be
    /// called before that.
    pub async fn end_health(&self) {
        self.fail_health().await;
        self.shared.health.clone().clear_service_status("").await;
    }

    pub(crate) fn health_reporter(&self) -> HealthReporter {
        self.shared.health.clone()
    }

    pub(crate) fn is_ending(&self) -> bool {
        self.shared.is_ending.load(Ordering::Relaxed)
    }

    pub(crate) fn limiter(&self) -> &Limiter {
        &self.shared.limiter
    }

    /// The rules in force.
    #[must_use]
    pub fn rules(&self) -> RuleSet {
        self.shared.rules.rules()
    }

    /// How several descriptors are decided while these rules are in force.
    pub(crate) fn descriptors(&self, rules: &RuleSet) -> Descriptors {
        self.shared.settings.descriptors.unwrap_or_else(|| rules.descriptors())
    }

    pub(crate) fn unmatched(&self) -> Unmatched {
        self.shared.settings.unmatched
    }

    pub(crate) fn header_style(&self) -> HeaderStyle {
        self.shared.settings.header_style
    }

    pub(crate) fn tokens(&self) -> &Tokens {
        &self.shared.settings.tokens
    }

    /// What is known of the request's user beside the request.
    pub(crate) fn account_of(&self, attributes: &Attributes<'_>) -> Option<Account> {
        let rules = &self.shared.rules;
        attributes.user_name().filter(|_| rules.knows_users()).and_then(|user| rules.account_of_user(user))
    }

    /// Hands a decision to whoever keeps account of it. Who asked has no response of its own to report.
    pub(crate) fn decided(&self, attributes: &Attributes<'_>, verdict: &Verdict, began: Instant) {
        if let Some(sink) = self.shared.rules.sink() {
            let latency: Duration = began.elapsed();
            if let Some(next) = sink.decided(attributes, verdict, latency) {
                let denied = verdict.response.as_ref().map_or(429, |response| response.status.get());
                next.responded(if verdict.allowed { 200 } else { denied });
            }
        }
    }
}

impl ServiceBuilder {
    /// How the descriptors of one request by Envoy's protocol are decided: as the rules say, unless this says otherwise.
    #[must_use]
    pub fn descriptors(mut self, descriptors: impl Into<Option<Descriptors>>) -> Self {
        self.settings.descriptors = descriptors.into();
        self
    }

    /// The answer where no rule applies: allowed, unless this says otherwise. The metric
    /// `tollgate_serve_unmatched_total` counts them.
    #[must_use]
    pub fn unmatched(mut self, unmatched: Unmatched) -> Self {
        self.settings.unmatched = unmatched;
        self
    }

    /// Which header fields clients get: those of the draft, unless this says otherwise.
    #[must_use]
    pub fn header_style(mut self, style: HeaderStyle) -> Self {
        self.settings.header_style = style;
        self
    }

    /// The tokens of those who may ask: anybody, unless this names some.
    #[must_use]
    pub fn tokens(mut self, tokens: Tokens) -> Self {
        self.settings.tokens = tokens;
        self
    }

    /// The service.
    #[must_use]
    pub fn build(self) -> Service {
        let Self { limiter, rules, settings } = self;
        let (health, is_ending) = (HealthReporter::new(), AtomicBool::new(false));
        Service { shared: Arc::new(Shared { limiter, rules, settings, health, is_ending }) }
    }
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Service").field("settings", &self.shared.settings).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for ServiceBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServiceBuilder").field("settings", &self.settings).finish_non_exhaustive()
    }
}
