//! The layer: a decision before each request that the service behind it gets.

use std::fmt;
use std::future::Future;
use std::mem;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::HeaderName;
use http::request::Parts;
use http::{Request, Response};
use http_body::Body;
use tower_layer::Layer;
use tower_service::Service;

use super::answer::{self, Failure, Protocol};
use super::body::{Ends, Permits, ResponseBody, SETTLED_WITHIN, Settlement, Usage};
use super::client_address::ClientAddress;
use super::headers::HeaderStyle;
use super::restraint;
use super::sources::{self, Sources};
use crate::error::Error;
use crate::hold::Permit;
use crate::limiter::{Asking, HeldVerdict, Limiter};
use crate::random::unique_id;
use crate::request::OwnedRequest;
use crate::rule::Rule;
use crate::rules::{Applies, Effect, RuleSet, Verdict, WatchedRules};
use crate::runtime;
use crate::telemetry;

/// Puts a service under rules: see [the module](super).
#[derive(Clone, Debug)]
pub struct RateLimitLayer {
    settings: Settings,
}

/// A service under rules, which a [`RateLimitLayer`] makes.
#[derive(Clone, Debug)]
pub struct RateLimit<S> {
    settings: Arc<Settings>,
    service: S,
}

#[derive(Clone)]
struct Settings {
    limiter: Limiter,
    rules: Rules,
    sources: Sources,
    style: HeaderStyle,
    skip: Option<Skip>,
    max_wait: Option<Duration>,
    settles: bool,
    /// How long another may tell to hold back.
    heeds: Option<Duration>,
}

type Skip = Arc<dyn Fn(&Parts) -> bool + Send + Sync>;

/// The rules of a layer: [a set](RuleSet), or [one that follows its file](WatchedRules).
#[derive(Clone, Debug)]
#[non_exhaustive]
#[allow(missing_docs, reason = "named by what they hold")]
pub enum Rules {
    Set(RuleSet),
    Watched(WatchedRules),
}

impl From<RuleSet> for Rules {
    fn from(rules: RuleSet) -> Self {
        Self::Set(rules)
    }
}

impl From<WatchedRules> for Rules {
    fn from(rules: WatchedRules) -> Self {
        Self::Watched(rules)
    }
}

impl Rules {
    fn current(&self) -> RuleSet {
        match self {
            Self::Set(rules) => rules.clone(),
            Self::Watched(rules) => rules.current(),
        }
    }
}

impl RateLimitLayer {
    /// A service under these rules, by this limiter. Of each request they know its `method`, its `path` and the other end of
    /// its connection as `ip`, if the server notes that: as `axum::extract::ConnectInfo<SocketAddr>` (feature `axum`), or a
    /// [`SocketAddr`](std::net::SocketAddr) in the request's extensions.
    #[must_use]
    pub fn new(limiter: Limiter, rules: impl Into<Rules>) -> Self {
        let settings = Settings {
            limiter,
            rules: rules.into(),
            sources: Sources::new(),
            style: HeaderStyle::default(),
            skip: None,
            max_wait: None,
            settles: false,
            heeds: None,
        };
        Self { settings }
    }

    /// The attribute `api_key` is what this header holds, such as `x-api-key`. A request in which it stands twice is refused.
    /// It stands in Redis as it is, unless keys are [hashed](Limiter::key_secret).
    #[must_use]
    pub fn api_key(self, header: HeaderName) -> Self {
        self.header("api_key", header)
    }

    /// The attribute `api_key` is the token of `Authorization: Bearer ...`. It stands in Redis as it is, unless keys are
    /// [hashed](Limiter::key_secret).
    #[must_use]
    pub fn bearer_key(mut self) -> Self {
        self.settings.sources.attribute("api_key", sources::bearer());
        self
    }

    /// An attribute is what this header holds, which the client writes as it likes. A request in which it stands twice is
    /// refused.
    #[must_use]
    pub fn header(mut self, attribute: &str, header: HeaderName) -> Self {
        self.settings.sources.attribute(attribute, sources::header(header));
        self
    }

    /// An attribute is what this reads of the request, such as what a layer before this one has found out about the user.
    ///
    /// ```
    /// # use tollgate::middleware::RateLimitLayer;
    /// # #[derive(Clone)]
    /// # struct User { id: u64 }
    /// # fn layer(layer: RateLimitLayer) -> RateLimitLayer {
    /// layer.attribute("user", |request| Some(request.extensions.get::<User>()?.id.to_string()))
    /// # }
    /// ```
    #[must_use]
    pub fn attribute<V: Into<Vec<u8>>>(
        mut self,
        name: &str,
        read: impl Fn(&Parts) -> Option<V> + Send + Sync + 'static,
    ) -> Self {
        self.settings.sources.attribute(name, Arc::new(move |parts| Ok(read(parts).map(Into::into))));
        self
    }

    /// Where the address of a client comes from. Default: the connection.
    #[must_use]
    pub fn client_address(mut self, address: ClientAddress) -> Self {
        self.settings.sources.address(address);
        self
    }

    /// How the other end of a connection is known, of servers that note it in a way of their own.
    #[must_use]
    pub fn peer(mut self, read: impl Fn(&Parts) -> Option<IpAddr> + Send + Sync + 'static) -> Self {
        self.settings.sources.peer(Arc::new(read));
        self
    }

    /// Which header fields answers have. Default: [`HeaderStyle::Draft`].
    #[must_use]
    pub fn header_style(mut self, style: HeaderStyle) -> Self {
        self.settings.style = style;
        self
    }

    /// Passes such requests on undecided, such as those of health checks. Rules can say the same by `action = "allow"`.
    #[must_use]
    pub fn skip(mut self, skip: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.settings.skip = Some(Arc::new(skip));
        self
    }

    /// Waits for at most so long until a request is allowed, instead of denying it: in order where every limit of its rule
    /// has a `max-debt`, else whoever comes back first, see [`Limiter::acquire_wait`]. The service behind it is kept ready
    /// meanwhile. Such calls aren't settled.
    #[must_use]
    pub fn wait(mut self, max_wait: Duration) -> Self {
        self.settings.max_wait = Some(max_wait);
        self
    }

    /// Charges what a request turned out to take, as its handler says by the [`Usage`] in its extensions; at first what the
    /// rule says, and where nothing is said that stays. One round trip more, when the response has ended, within an hour; and
    /// each decision goes to Redis in a call of its own, since it is remembered by an id. Rules with permits aren't settled,
    /// since their cost is permits too: count tokens and requests at once by two layers.
    #[must_use]
    pub fn settle(mut self) -> Self {
        self.settings.settles = true;
        self
    }

    /// For calls that go out: where the other side says by `Retry-After` (with 429 or 503) or `RateLimit` that it takes no
    /// more for a while, the key of the request is [blocked](Limiter::block) for as long, at most this long, for all who share
    /// it and unless it is blocked for longer; of two responses at the same moment, either may have the last word. With
    /// [`wait`](Self::wait), the calls behind it wait for that too. Two round trips after such a response. A rule of which no
    /// limit counts the key can't be blocked: that is logged, with the feature `tracing`.
    #[must_use]
    pub fn heed(mut self, most: Duration) -> Self {
        self.settings.heeds = Some(most);
        self
    }
}

impl<S> Layer<S> for RateLimitLayer {
    type Service = RateLimit<S>;

    fn layer(&self, service: S) -> RateLimit<S> {
        RateLimit { settings: Arc::new(self.settings.clone()), service }
    }
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
        // The one that is ready.
        let again = self.service.clone();
        let service = mem::replace(&mut self.service, again);
        let settings = Arc::clone(&self.settings);
        Box::pin(settings.pass(service, request))
    }
}

/// A request that may go on, and what it holds.
struct Admitted {
    verdict: Verdict,
    ends: Option<Ends>,
    /// Whom it was charged to.
    charged: Option<(Rule, OwnedRequest)>,
}

impl Settings {
    /// Decides, and passes the request on if it is allowed.
    async fn pass<S, B, R>(
        self: Arc<Self>,
        mut service: S,
        request: Request<B>,
    ) -> Result<Response<ResponseBody<R>>, S::Error>
    where
        S: Service<Request<B>, Response = Response<R>>,
        R: Body<Data = Bytes>,
    {
        let (mut parts, body) = request.into_parts();
        let usage = self.settles.then(|| parts.extensions.get_or_insert_with(Usage::new).clone());
        if self.skip.as_ref().is_some_and(|skip| skip(&parts)) {
            let response = service.call(Request::from_parts(parts, body)).await?;
            return Ok(response.map(|body| ResponseBody::inner(body, None)));
        }
        let admitted = match self.decide(&parts, usage).await {
            Ok(admitted) => admitted,
            Err(answer) => return Ok(answer.map(ResponseBody::answer)),
        };
        let Admitted { verdict, ends, charged } = admitted;
        let fields = verdict.headers(self.style);
        parts.extensions.insert(verdict);
        if let Some(ends) = ends.as_ref().filter(|ends| !ends.permits.is_empty()) {
            parts.extensions.get_or_insert_default::<Permits>().add(ends);
        }
        let (mut parts, body) = service.call(Request::from_parts(parts, body)).await?.into_parts();
        if let (Some((rule, request)), Some(most)) = (charged, self.heeds) {
            restraint::heed(&self.limiter, &rule, &request, most, &parts).await;
        }
        answer::append(&mut parts.headers, fields);
        Ok(Response::from_parts(parts, ResponseBody::inner(body, ends)))
    }

    /// What the rules make of a request; or the answer in place of the service's.
    async fn decide(&self, parts: &Parts, usage: Option<Usage>) -> Result<Admitted, Response<Bytes>> {
        let protocol = Protocol::of(parts);
        let rules = self.rules.current();
        let refused = |detail| move |error: Error| protocol.failed(Failure::Request(detail), &error);
        let given = self.sources.of(parts).inspect_err(|error| telemetry::judged(Err((None, error))));
        let given = given.map_err(refused("a header stands twice of which one counts"))?;
        let attributes = given.attributes(parts);
        let found = Limiter::found(&rules, &attributes);
        let (applies, shadows) = found.map_err(refused("what this request says that it costs is no whole number"))?;
        let usage = usage.filter(|_| self.max_wait.is_none() && may_be_settled(&applies));
        let id = usage.as_ref().map(|_| unique_id("http"));
        let asking = match self.max_wait {
            Some(max_wait) => Asking::Wait(max_wait),
            None => Asking::Hold { id: id.as_ref().map(|id| (id.as_bytes(), SETTLED_WITHIN)) },
        };
        let failed = |error: Error| protocol.failed(Failure::of(&error), &error);
        let held = self.limiter.judge(&applies, &shadows, asking).await.map_err(failed)?;
        let HeldVerdict { verdict, permits } = held;
        if !verdict.allowed {
            return Err(protocol.denied(verdict, self.style));
        }
        let charged = match &applies.effect {
            Effect::Limit(charge) => Some((charge.rule().clone(), charge.request().into_owned())),
            _ => None,
        };
        let settlement = match (&charged, &verdict.decision, usage, &id) {
            (Some((rule, request)), Some(decision), Some(usage), Some(id)) => {
                let request = crate::request::Request::from(request).id(id).id_ttl(SETTLED_WITHIN).after(decision);
                let (limiter, rule, request) = (self.limiter.clone(), rule.clone(), request.into_owned());
                let runtime = runtime::current().map_err(failed)?;
                Some(Box::new(Settlement { limiter, rule, request, usage, runtime }))
            }
            _ => None,
        };
        // For as long as the response takes.
        let permits: Vec<_> = permits.into_iter().map(Permit::renewed).collect();
        let holds = settlement.is_some() || !permits.is_empty();
        let ends = holds.then(|| Ends { permits: Arc::new(permits), _settlement: settlement });
        Ok(Admitted { verdict, ends, charged })
    }
}

fn may_be_settled(applies: &Applies<'_>) -> bool {
    match &applies.effect {
        Effect::Limit(charge) => !charge.rule().limits().any(|limit| limit.algorithm().holds()),
        _ => false,
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings").field("rules", &self.rules).field("sources", &self.sources).finish_non_exhaustive()
    }
}
