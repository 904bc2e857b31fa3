//! The command line and the environment.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use tollgate::middleware::HeaderStyle;
use tollgate::rules::Descriptors;
use tollgate_serve::Unmatched;
use tollgate_serve::listen::{Address, AddressError};

/// A rate limit service: the same rules for gateways, by Envoy's protocol, and for every language, by HTTP with JSON.
#[derive(Debug, Parser)]
#[command(name = "tollgate-serve", version, max_term_width = 100)]
pub(crate) struct Options {
    /// The file of rules, which is followed: a change is in force within a second.
    #[arg(value_name = "RULES", required_unless_present = "database", conflicts_with = "database")]
    pub(crate) rules: Option<PathBuf>,
    /// Check the file of rules, print what is wrong with it, and exit.
    #[arg(long, conflicts_with = "database")]
    pub(crate) check: bool,
    /// The PostgreSQL that has the rules, users and API keys, in place of a file.
    #[arg(long, value_name = "URL", env = "TOLLGATE_DATABASE", hide_env_values = true)]
    pub(crate) database: Option<String>,

    /// The Redis that decides, such as redis://127.0.0.1:6379.
    ///
    /// Also unix:///run/redis.sock, redis-sentinel://host:26379,host:26379/primary and
    /// redis-cluster://host:7000,host:7001. Without one, the engine in this process decides, for this process alone.
    #[arg(long, short, env = "TOLLGATE_URL", hide_env_values = true, help_heading = "Redis")]
    pub(crate) url: Option<String>,
    /// How long a decision may take before the rule's policy answers.
    ///
    /// Envoy waits 20ms by default (`timeout` of its filter): less than that, so that the policy and not the filter
    /// decides.
    #[arg(long, value_name = "D", env = "TOLLGATE_DEADLINE", default_value = "15ms", value_parser = duration, help_heading = "Redis")]
    pub(crate) deadline: Duration,
    /// What all keys begin with.
    #[arg(long, value_name = "PREFIX", env = "TOLLGATE_PREFIX", default_value = "tollgate", help_heading = "Redis")]
    pub(crate) prefix: String,
    /// What to answer while Redis is unreachable, by rules that don't say.
    #[arg(long, value_enum, value_name = "HOW", default_value = "closed", help_heading = "Redis")]
    pub(crate) on_error: OnErrorArgument,
    /// How many of these services share the rules, if each decides locally.
    #[arg(long, value_name = "N", default_value = "1", help_heading = "Redis")]
    pub(crate) processes: std::num::NonZeroU32,
    /// The certificate authorities to trust for rediss://..., in PEM. Default: the platform's.
    #[cfg(feature = "tls")]
    #[arg(long, value_name = "FILE", env = "TOLLGATE_TLS_CA", help_heading = "Redis")]
    pub(crate) tls_ca: Option<PathBuf>,
    /// The client certificate for rediss://..., in PEM.
    #[cfg(feature = "tls")]
    #[arg(long, value_name = "FILE", env = "TOLLGATE_TLS_CERT", requires = "tls_key", help_heading = "Redis")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// The private key of the client certificate, in PEM.
    #[cfg(feature = "tls")]
    #[arg(long, value_name = "FILE", env = "TOLLGATE_TLS_KEY", requires = "tls_cert", help_heading = "Redis")]
    pub(crate) tls_key: Option<PathBuf>,

    /// Where Envoy's protocol is served: an address, unix:PATH, or off.
    #[arg(long, value_name = "ADDRESS", env = "TOLLGATE_SERVE_GRPC", default_value = "127.0.0.1:8081", value_parser = port, help_heading = "Ports")]
    pub(crate) grpc: Port,
    /// Where HTTP with JSON is served.
    #[arg(long, value_name = "ADDRESS", env = "TOLLGATE_SERVE_HTTP", default_value = "127.0.0.1:8080", value_parser = port, help_heading = "Ports")]
    pub(crate) http: Port,
    /// Where metrics are served, and /healthz and /readyz.
    #[arg(long, value_name = "ADDRESS", env = "TOLLGATE_SERVE_METRICS", default_value = "127.0.0.1:9090", value_parser = port, help_heading = "Ports")]
    pub(crate) metrics: Port,
    /// The certificate of the ports for gRPC and HTTP, in PEM: read again on SIGHUP.
    #[cfg(feature = "tls")]
    #[arg(long, value_name = "FILE", env = "TOLLGATE_SERVE_CERT", requires = "key", help_heading = "Ports")]
    pub(crate) cert: Option<PathBuf>,
    /// Its private key, in PEM.
    #[cfg(feature = "tls")]
    #[arg(long, value_name = "FILE", env = "TOLLGATE_SERVE_KEY", requires = "cert", help_heading = "Ports")]
    pub(crate) key: Option<PathBuf>,
    /// How long to keep serving after SIGTERM or Ctrl-C, while /readyz and gRPC's health checks already fail.
    ///
    /// Load balancers then send nothing more when the ports close. A second signal ends the wait.
    #[arg(long, value_name = "D", env = "TOLLGATE_SERVE_DRAIN", default_value = "0s", value_parser = duration_or_none, help_heading = "Ports")]
    pub(crate) drain: Duration,
    /// A file of tokens, one a line: a request needs one of them. It is read only at the start.
    #[arg(long, value_name = "FILE", env = "TOLLGATE_SERVE_TOKENS", help_heading = "Ports")]
    pub(crate) tokens: Option<PathBuf>,
    /// The collector that gets traces by OTLP over gRPC, such as http://127.0.0.1:4317. Default: none.
    ///
    /// OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES and OTEL_TRACES_SAMPLER are observed.
    #[cfg(feature = "otlp")]
    #[arg(long, value_name = "URL", env = "TOLLGATE_SERVE_OTLP", help_heading = "Ports")]
    pub(crate) otlp: Option<String>,
    /// Connections to each port at once.
    #[arg(long, value_name = "N", default_value = "10000", value_parser = clap::value_parser!(u32).range(1..=1_000_000), help_heading = "Ports")]
    pub(crate) connections: u32,

    /// How the descriptors of one request by Envoy's protocol are decided.
    ///
    /// Default: as `descriptors` in the file of rules says, else together.
    #[arg(long, value_enum, value_name = "HOW", help_heading = "Answers")]
    pub(crate) descriptors: Option<DescriptorsArgument>,
    /// The answer where no rule applies.
    #[arg(long, value_enum, value_name = "HOW", default_value = "allow", help_heading = "Answers")]
    pub(crate) unmatched: UnmatchedArgument,
    /// The header fields for clients.
    #[arg(long, value_name = "STYLE", default_value = "draft", value_parser = header_style(), help_heading = "Answers")]
    pub(crate) headers: HeaderStyle,
}

/// What `--on-error` accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnErrorArgument {
    /// An error: the gateway's own setting then allows or denies.
    Closed,
    /// Allowed.
    Open,
    /// What the engine in this process decides, by its share.
    Local,
}

/// What `--descriptors` accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DescriptorsArgument {
    /// All are allowed, or nothing is taken.
    Together,
    /// Each by itself.
    Each,
}

/// What `--unmatched` accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum UnmatchedArgument {
    /// Allowed.
    Allow,
    /// Denied.
    Deny,
}

/// Where a port is, unless it is off.
#[derive(Clone, Debug)]
pub(crate) struct Port(pub(crate) Option<Address>);

impl From<DescriptorsArgument> for Descriptors {
    fn from(argument: DescriptorsArgument) -> Self {
        match argument {
            DescriptorsArgument::Together => Self::Together,
            DescriptorsArgument::Each => Self::Each,
        }
    }
}

impl From<UnmatchedArgument> for Unmatched {
    fn from(argument: UnmatchedArgument) -> Self {
        match argument {
            UnmatchedArgument::Allow => Self::Allow,
            UnmatchedArgument::Deny => Self::Deny,
        }
    }
}

fn port(text: &str) -> Result<Port, String> {
    if text == "off" {
        return Ok(Port(None));
    }
    text.parse().map(|address| Port(Some(address))).map_err(|why: AddressError| format!("{why} (or off)"))
}

fn header_style() -> impl clap::builder::TypedValueParser<Value = HeaderStyle> {
    use clap::builder::{PossibleValuesParser, TypedValueParser};
    PossibleValuesParser::new(["draft", "x-ratelimit", "ratelimit", "off"]).map(|chosen| match &*chosen {
        "x-ratelimit" => HeaderStyle::XRateLimit,
        "ratelimit" => HeaderStyle::RateLimit,
        "off" => HeaderStyle::Off,
        _ => HeaderStyle::Draft,
    })
}

/// A duration such as `15ms` or `1s`.
fn duration(text: &str) -> Result<Duration, String> {
    let expected = || "expected a duration above 0, such as 15ms or 1s".to_owned();
    parsed(text).filter(|time| !time.is_zero()).ok_or_else(expected)
}

/// The same, or none: `0s`.
fn duration_or_none(text: &str) -> Result<Duration, String> {
    parsed(text).ok_or_else(|| "expected a duration such as 5s, or 0s".to_owned())
}

fn parsed(text: &str) -> Option<Duration> {
    text.parse::<jiff::SignedDuration>().ok().and_then(|signed| Duration::try_from(signed).ok())
}
