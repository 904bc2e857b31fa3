//! The layer: a decision before each request reaches the inner service.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::header::HeaderName;
use http::request::Parts;
use tower_layer::Layer;

use super::client_address::ClientAddress;
use super::headers::HeaderStyle;
use super::request_attributes::{self, AttributeReaders};
use super::service::RateLimit;
use super::settings::Settings;
use crate::limiter::Limiter;
use crate::rules::{DecisionSink, RuleSource};

/// Puts a service under rules: see [the module](super).
#[derive(Clone, Debug)]
pub struct RateLimitLayer {
    settings: Settings,
}

impl RateLimitLayer {
    /// Puts a service under these rules, decided by this limiter: a [set](crate::rules::RuleSet), [one that follows its
    /// file](crate::rules::WatchedRules), a database's, or any other [source](RuleSource). The rules know each
    /// request's `method`, its `path` and, as `ip`, its connection's peer address, if the server provides it: as
    /// `axum::extract::ConnectInfo<SocketAddr>` (feature `axum`), or as a [`SocketAddr`](std::net::SocketAddr) in the
    /// request's extensions.
    #[must_use]
    pub fn new(limiter: Limiter, rules: impl RuleSource) -> Self {
        let settings = Settings {
            limiter,
            rules: Arc::new(rules),
            readers: AttributeReaders::new(),
            style: HeaderStyle::default(),
            skip: None,
            max_wait: None,
            settles: false,
            upstream_backoff: None,
            sink: None,
            checked: Arc::default(),
        };
        Self { settings }
    }

    /// Takes the attribute `api_key` from this header, such as `x-api-key`. A request with two such headers is refused.
    /// Redis stores the value as given, unless keys are [hashed](crate::LimiterBuilder::key_secret).
    ///
    /// Nobody checks the key: a client that invents one for each request is never limited by it. So put an
    /// [`ApiKeyLayer`](super::ApiKeyLayer) or your own authentication around this layer, or limit
    /// addresses beside it:
    ///
    /// ```
    /// # use http::HeaderName;
    /// # use tollgate::Limiter;
    /// # use tollgate::middleware::RateLimitLayer;
    /// # fn layer(limiter: Limiter) -> Result<RateLimitLayer, Box<dyn std::error::Error>> {
    /// use tollgate::rules::RuleSet;
    ///
    /// let rules: RuleSet = r#"
    ///     [[rule]]
    ///     name = "api"
    ///     key = "api_key"
    ///     limits = ["token-bucket 100/1m", { limit = "token-bucket 1000/1m", key = "ip" }]
    /// "#
    /// .parse()?;
    /// let layer = RateLimitLayer::new(limiter, rules);
    /// Ok(layer.api_key(HeaderName::from_static("x-api-key")))
    /// # }
    /// ```
    #[must_use]
    pub fn api_key(self, header: HeaderName) -> Self {
        self.header("api_key", header)
    }

    /// Takes the attribute `api_key` from the token of `Authorization: Bearer ...`. Redis stores it as given, unless
    /// keys are [hashed](crate::LimiterBuilder::key_secret). Nobody checks it: see [`api_key`](Self::api_key).
    #[must_use]
    pub fn bearer_key(mut self) -> Self {
        self.settings.readers.attribute("api_key", request_attributes::bearer());
        self
    }

    /// Takes an attribute from this header, in which the client may write anything. A request with two such headers is
    /// refused, and so is an `ip` that is no address, if a rule uses it.
    ///
    /// `Host` is read as the host that the request is for, on every version of HTTP (`:authority` on HTTP/2), and in
    /// its [normalised](super::normalised_host) spelling. A request with a host that can't be read, or one received for
    /// two different ones, is refused.
    #[must_use]
    pub fn header(mut self, attribute: &str, header: HeaderName) -> Self {
        self.settings.readers.attribute(attribute, request_attributes::header(header));
        self
    }

    /// Reads an attribute from the request with this function, such as what an earlier layer has found out about the
    /// user.
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
        self.settings.readers.attribute(name, Arc::new(move |parts, _| Ok(read(parts).map(Into::into))));
        self
    }

    /// Where a client's address comes from. Default: the connection.
    #[must_use]
    pub fn client_address(mut self, address: ClientAddress) -> Self {
        self.settings.readers.address(address);
        self
    }

    /// Reads a connection's peer address, for servers that provide it in their own way.
    #[must_use]
    pub fn peer(mut self, read: impl Fn(&Parts) -> Option<IpAddr> + Send + Sync + 'static) -> Self {
        self.settings.readers.peer(Arc::new(read));
        self
    }

    /// Which header fields responses have. Default: [`HeaderStyle::Draft`].
    #[must_use]
    pub fn header_style(mut self, style: HeaderStyle) -> Self {
        self.settings.style = style;
        self
    }

    /// Passes such requests on undecided, for example health checks. Rules can do the same with `action = "allow"`.
    #[must_use]
    pub fn skip(mut self, skip: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.settings.skip = Some(Arc::new(skip));
        self
    }

    /// Counts calls that this process sends, rather than requests that it receives: by the path that it is sent to,
    /// even if it is a received request that is forwarded with a router's extensions. Calls that are sent have no
    /// `route`.
    #[must_use]
    pub fn for_outgoing(mut self) -> Self {
        self.settings.readers.outgoing();
        self
    }

    /// Waits for at most this long until a request is allowed, instead of denying it: requests received and calls to
    /// others alike. They proceed in order if every limit of the rule has a `max-debt`, otherwise whichever retries
    /// first; see [`Limiter::acquire_wait`]. The inner service is kept ready meanwhile. Such calls aren't settled.
    #[must_use]
    pub fn wait(mut self, max_wait: Duration) -> Self {
        self.settings.max_wait = Some(max_wait);
        self
    }

    /// Charges what a request actually cost, as its handler reports through the [`Usage`](super::Usage) in its
    /// extensions. The rule's cost is charged first, and stays if nothing is reported. Takes one more round trip when
    /// the response has ended. A response that takes longer than an hour keeps the rule's cost, since the call's id is
    /// forgotten by then. Decisions no longer share script calls, since each is remembered by an id of its own. In a
    /// rule with permits, the other limits are settled; the rule's cost is also its number of permits, so it should be
    /// 1.
    #[must_use]
    pub fn settle(mut self) -> Self {
        self.settings.settles = true;
        self
    }

    /// For calls to others: when the other side says that it takes no more for a while, the request's key is
    /// [blocked](Limiter::block) for that time, up to `most`, for everyone who shares the key. The signals are
    /// `Retry-After` (with 403, 429, 503 or 529) and, if they say that nothing remains, `RateLimit` of the
    /// [draft][draft] and of its seventh version (`limit=5, remaining=0, reset=120`), and `RateLimit-Remaining` with
    /// `RateLimit-Reset`, with or without `X-`. Of several, the longest counts. Dates are relative to the response's
    /// own `Date`, and fractions of a second are rounded up. A longer block is kept; if two responses arrive together,
    /// either may win. With [`wait`](Self::wait), calls that are waiting wait for the block too, and then proceed
    /// together. Takes two round trips after such a response, and one for each call that waits in order. If none of the
    /// rule's limits counts by the rule's own key, nothing is blocked; that is logged, with the feature `tracing`.
    ///
    /// [draft]: https://datatracker.ietf.org/doc/draft-ietf-httpapi-ratelimit-headers/
    #[must_use]
    pub fn upstream_backoff(mut self, most: Duration) -> Self {
        self.settings.upstream_backoff = Some(most);
        self
    }

    /// Records each decision in this sink, such as the history of the crate `tollgate-record`, with the response's
    /// status. No request waits for that. If the client left before there was a response, there is no status. Requests
    /// that are [skipped](Self::skip), and those for which no decision could be made, aren't recorded. A source of
    /// rules with a [sink](RuleSource::sink) of its own, such as `Configuration`, counts each decision already: given
    /// here too, it would count each twice.
    #[must_use]
    pub fn record(mut self, sink: impl DecisionSink) -> Self {
        self.settings.sink = Some(Arc::new(sink));
        self
    }
}

impl<S> Layer<S> for RateLimitLayer {
    type Service = RateLimit<S>;

    fn layer(&self, service: S) -> RateLimit<S> {
        RateLimit { settings: Arc::new(self.settings.clone()), service }
    }
}
