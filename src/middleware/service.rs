//! A service under rules: the path of a request.

use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use http::request::Parts;
use http::{Extensions, Request, Response};
use http_body::Body;
use tower_service::Service;

use super::answer::{self, Failure, Protocol};
use super::body::{Ends, ResponseBody, ResponsePermits};
use super::pending::Pending;
use super::request_attributes::RequestAttributes;
use super::settings::{Checked, Settings};
use super::settlement::{SETTLED_WITHIN, Settlement, Usage};
use super::upstream_backoff::back_off;
use crate::decision::Decision;
use crate::error::{Error, Kind};
use crate::limiter::Limiter;
use crate::limiter::hold::Permit;
use crate::limiter::wait::Blocks;
use crate::random::unique_id;
use crate::request::OwnedRequest;
use crate::rule::Rule;
use crate::rules::{
    Account, Acquisition, Applies, CountedBy, Effect, FollowUp, GivenBack, HoldVerdict, Reason, RuleSet, Shadow,
    Verdict,
};
use crate::runtime;
use crate::telemetry;

const NO_PEER: &str = "ip: the server doesn't provide the connection's peer address (in axum, serve \
                       into_make_service_with_connect_info::<SocketAddr>())";

/// After this many requests without an account, no earlier layer provides accounts: a few requests, such as health
/// checks, may have none anyway.
const STRANGERS: usize = 100;

/// A service under rules, created by a [`RateLimitLayer`](super::RateLimitLayer).
#[derive(Clone, Debug)]
pub struct RateLimit<S> {
    pub(super) settings: Arc<Settings>,
    pub(super) service: S,
}

impl<S, B, R> Service<Request<B>> for RateLimit<S>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    B: Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
{
    type Response = Response<ResponseBody<R>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // Takes the instance that is ready.
        let again = self.service.clone();
        let service = mem::replace(&mut self.service, again);
        let (settings, rules) = (Arc::clone(&self.settings), self.settings.rules.rules());
        settings.check(&rules, request.extensions());
        Box::pin(settings.pass(rules, service, request))
    }
}

/// A request that may proceed, and what it holds.
struct Admitted {
    verdict: Verdict,
    ends: Option<Ends>,
    /// The responses after which what it took stays charged.
    counted: Option<CountedBy>,
    /// The rule and request that were charged.
    charged: Option<(Rule, OwnedRequest)>,
    pending: Pending,
}

impl Settings {
    /// Decides, and passes the request on if it is allowed.
    async fn pass<S, B, R>(
        self: Arc<Self>,
        rules: RuleSet,
        mut service: S,
        request: Request<B>,
    ) -> Result<Response<ResponseBody<R>>, S::Error>
    where
        S: Service<Request<B>, Response = Response<R>>,
        R: Body<Data = Bytes>,
    {
        let (mut parts, body) = request.into_parts();
        let usage = self.settles.then(|| Usage::within(parts.extensions.remove()));
        if let Some(usage) = &usage {
            parts.extensions.insert(usage.clone());
        }
        if self.skip.as_ref().is_some_and(|skip| skip(&parts)) {
            // Handlers ask for them, and find that there are none.
            parts.extensions.get_or_insert_default::<ResponsePermits>();
            drop(rules);
            let response = service.call(Request::from_parts(parts, body)).await?;
            return Ok(response.map(|body| ResponseBody::inner(body, None)));
        }
        let admitted = match self.decide(&rules, &parts, usage).await {
            Ok(admitted) => admitted,
            Err(answer) => return Ok(answer.map(ResponseBody::answer)),
        };
        // A handler may take long, and another set may replace this one meanwhile.
        drop(rules);
        let Admitted { verdict, mut ends, counted, charged, pending } = admitted;
        let fields = verdict.headers(self.style);
        let decided = counted.zip(verdict.decision.clone());
        parts.extensions.insert(verdict);
        parts.extensions.get_or_insert_default::<ResponsePermits>().add(ends.as_ref());
        let (mut parts, body) = service.call(Request::from_parts(parts, body)).await?.into_parts();
        let status = parts.status.as_u16();
        pending.responded(status);
        if let Some(ends) = &mut ends {
            ends.responded(status);
        }
        let given_back = decided.map(|(counted, decision)| (counted.given_back(status), decision));
        let fields = match given_back {
            Some((given_back, decision)) if given_back != GivenBack::Nothing => {
                decision.given_back(|rule| given_back.has(rule)).headers(self.style)
            }
            _ => fields,
        };
        if let (Some((rule, request)), Some(most)) = (charged, self.upstream_backoff) {
            back_off(&self.limiter, &rule, &request, most, &parts).await;
        }
        answer::append(&mut parts.headers, &mut parts.extensions, fields);
        Ok(Response::from_parts(parts, ResponseBody::inner(body, ends)))
    }

    /// What the rules decide for a request, or the response in place of the service's.
    async fn decide(&self, rules: &RuleSet, parts: &Parts, usage: Option<Usage>) -> Result<Admitted, Response<Bytes>> {
        let protocol = Protocol::of(parts);
        let refused = |detail: &str, error| protocol.failed(Failure::Request(detail), &error);
        let uncounted = |error: Error| {
            telemetry::judged(None, Err(error.kind().name()));
            error
        };
        let given = self.readers.of(parts).map_err(uncounted);
        let given = given.map_err(|error| refused(&error.to_string(), error))?;
        let account = self.account(parts, &given);
        let attributes = given.attributes(parts, rules);
        let attributes = attributes.map_err(|(detail, error)| refused(detail, uncounted(error)))?;
        let attributes = match &account {
            // What an earlier layer has found out holds for the request.
            Some(account) if parts.extensions.get::<Account>().is_some() => attributes.account(account),
            account => attributes.known_user(account.as_ref()),
        };
        if rules.reads_two_ways(&attributes) {
            let error = Error::new(Kind::Input, "path: servers may read it in different ways");
            return Err(refused("this path can be read in two ways", uncounted(error)));
        }
        let found = Limiter::found(rules, &attributes);
        let cost = "the cost that this request gives must be a whole number up to 2^53";
        let (applies, shadows) = found.map_err(|error| refused(cost, error))?;
        let usage = usage.filter(|_| self.max_wait.is_none() && may_be_settled(&applies));
        let by_response = |applies: &Applies<'_>| counted_by(applies).is_some();
        let settles = usage.is_some();
        let shadow_by_response = |(_, shadow): &Shadow<'_>| shadow.as_ref().is_ok_and(by_response);
        let changes = settles || by_response(&applies) || shadows.iter().any(shadow_by_response);
        let id = changes.then(|| unique_id("http"));
        let next = id.as_ref().map(|id| FollowUp { id: id.as_bytes(), within: SETTLED_WITHIN, settles });
        let asking = match self.max_wait {
            // A response may block the key while others wait.
            Some(max_wait) if self.upstream_backoff.is_some() => Acquisition::Wait(max_wait, Blocks::Respected, next),
            Some(max_wait) => Acquisition::Wait(max_wait, Blocks::Outrun, next),
            None => Acquisition::Hold(next),
        };
        let failed = |error: Error| protocol.failed(Failure::of(&error), &error);
        let no_peer = || Error::new(Kind::Input, NO_PEER);
        let lacks_a_peer = given.lacks_a_peer() && rules.uses("ip");
        if lacks_a_peer {
            telemetry::no_peer(NO_PEER);
            // Otherwise it would bypass a rule by address.
            if applies.user_block.is_none() && rules.misses("ip", &attributes) {
                return Err(failed(uncounted(no_peer())));
            }
        }
        let began = self.has_sinks().then(Instant::now);
        let held = self.limiter.judge(&applies, &shadows, asking).await.map_err(failed)?;
        let HoldVerdict { verdict, permits } = held;
        if lacks_a_peer && matches!(&verdict.reason, Reason::Missing(name) if name == "ip") {
            return Err(failed(no_peer()));
        }
        let latency = began.map(|began| began.elapsed()).unwrap_or_default();
        let mut pending = Pending::default();
        for sink in self.rules.sink().into_iter().chain(self.sink.as_deref()) {
            pending.add(sink.decided(&attributes, &verdict, latency));
        }
        // For as long as the response takes.
        let renewed = |permit: Permit| if verdict.allowed { permit.renewed() } else { permit };
        let permits: Arc<Vec<_>> = Arc::new(permits.into_iter().map(renewed).collect());
        let settlements = match &id {
            Some(id) => self.settlements(id, (&applies, &shadows), &verdict, usage, &permits).map_err(failed)?,
            None => Vec::new(),
        };
        let holds = !settlements.is_empty() || !permits.is_empty();
        let mut ends = holds.then_some(Ends { settlements, permits });
        if !verdict.allowed {
            let answer = protocol.denied(verdict, self.style);
            let status = answer.status().as_u16();
            pending.responded(status);
            if let Some(ends) = &mut ends {
                ends.responded(status);
            }
            return Err(answer);
        }
        let charged = match &applies.effect {
            Effect::Limit(charge) if self.upstream_backoff.is_some() => {
                Some((charge.rule().clone(), charge.request().into_owned()))
            }
            _ => None,
        };
        let counted = counted_by(&applies).cloned();
        Ok(Admitted { verdict, ends, counted, charged, pending })
    }

    /// What rules that allowed the request have taken by this id, and may give back.
    fn settlements(
        &self,
        id: &str,
        (applies, shadows): (&Applies<'_>, &[Shadow<'_>]),
        verdict: &Verdict,
        usage: Option<Usage>,
        permits: &Arc<Vec<Permit>>,
    ) -> Result<Vec<Settlement>, Error> {
        let own = verdict.decision.as_ref().map(|decision| (applies, decision, usage));
        let of_shadows = shadows.iter().zip(&verdict.shadows).filter_map(|((_, shadow), verdict)| {
            let (Ok(applies), Some(Ok(decision))) = (shadow, &verdict.decision) else { return None };
            Some((applies, decision, None))
        });
        let allowed = own.into_iter().chain(of_shadows).filter(|(_, decision, _)| decision.allowed);
        let settlement = |(applies, decision, usage): (&Applies<'_>, &Decision, Option<Usage>)| {
            let (Effect::Limit(charge), counted) = (&applies.effect, counted_by(applies)) else { return None };
            if usage.is_none() && counted.is_none() {
                return None;
            }
            let id = decision.taken_by().unwrap_or(id.as_bytes());
            let request = charge.request().id(id).id_ttl(SETTLED_WITHIN).following(decision).into_owned();
            let (limiter, rule, permits) = (self.limiter.clone(), charge.rule().clone(), Arc::clone(permits));
            let (counted, given_back) = (counted.cloned().unwrap_or_default(), GivenBack::Nothing);
            let settlement =
                |runtime| Settlement { limiter, rule, request, usage, counted, given_back, permits, runtime };
            Some(runtime::current().map(settlement))
        };
        allowed.filter_map(settlement).collect()
    }
}

impl Settings {
    /// Whether a sink, of the layer or of the rules, takes each decision.
    fn has_sinks(&self) -> bool {
        self.sink.is_some() || self.rules.sink().is_some()
    }

    /// Reports, once for each set of rules, the attributes that they use and no request has.
    fn check(&self, rules: &RuleSet, request: &Extensions) {
        let Checked { set, strangers, accounts } = &*self.checked;
        // Read alone by nearly every request, of all threads.
        if set.load(Ordering::Relaxed) != rules.address() {
            set.store(rules.address(), Ordering::Relaxed);
            strangers.store(0, Ordering::Relaxed);
            self.readers.check(rules, request);
        }
        if accounts.load(Ordering::Relaxed) || strangers.load(Ordering::Relaxed) >= STRANGERS {
            return;
        }
        if self.rules.knows_users() || request.get::<Account>().is_some() {
            accounts.store(true, Ordering::Relaxed);
        } else if strangers.fetch_add(1, Ordering::Relaxed) + 1 == STRANGERS {
            self.readers.check_accounts(rules);
        }
    }

    /// The account behind the request: as an earlier layer found it, with what the source of the rules knows of the
    /// user.
    fn account(&self, parts: &Parts, given: &RequestAttributes<'_>) -> Option<Account> {
        let account = parts.extensions.get::<Account>().cloned();
        if !self.rules.knows_users() {
            return account;
        }
        let user = account.as_ref().map(Account::user).or_else(|| given.user());
        let known = user.and_then(|user| self.rules.account_of_user(user));
        match (account, known) {
            (Some(account), Some(known)) => Some(account.with_user(&known)),
            (account, known) => account.or(known),
        }
    }
}

/// The statuses of responses after which a request stays charged, if not after all.
fn counted_by<'a>(applies: &'a Applies<'_>) -> Option<&'a CountedBy> {
    match &applies.effect {
        Effect::Limit(charge) => Some(charge.counted()).filter(|counted| !counted.is_none()),
        _ => None,
    }
}

/// Whether one of its limits counts a request's cost.
fn may_be_settled(applies: &Applies<'_>) -> bool {
    match &applies.effect {
        Effect::Limit(charge) => charge.rule().limits().any(|limit| !limit.algorithm().holds()),
        _ => false,
    }
}
