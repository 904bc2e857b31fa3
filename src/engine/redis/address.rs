//! Addresses, read and shown.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo};

use super::connect::{Connect, Tcp};
use super::credentials::Asked;
use super::settings::Settings;
use super::shown_address::without_password;
use super::spelling::{ENCODE, flaw, has_a_raw_password};
#[cfg(feature = "tls")]
use super::tls::Tls;
use crate::error::{Error, Kind};

/// One server: where it is, and how to connect and log in to it.
#[derive(Clone)]
pub(crate) struct Endpoint {
    info: ConnectionInfo,
    pub(super) connector: Arc<dyn Connect>,
    /// In place of the address's own.
    pub(super) credentials: Asked,
    #[cfg(feature = "tls")]
    tls: Tls,
}

impl Endpoint {
    fn of(info: ConnectionInfo) -> Self {
        Self {
            info,
            connector: Arc::new(Tcp),
            credentials: Asked::default(),
            #[cfg(feature = "tls")]
            tls: Tls::new(),
        }
    }

    pub(super) fn info(&self) -> &ConnectionInfo {
        &self.info
    }

    /// The same server with these settings.
    pub(in crate::engine) fn with(mut self, settings: &Settings, url: &str) -> Result<Self, Error> {
        self.connector = Arc::clone(&settings.connector);
        self.credentials = settings.credentials.clone();
        #[cfg(feature = "tls")]
        if let Some(tls) = &settings.tls {
            (self.info, self.tls) = (tls.applied_to(self.info, url)?, tls.clone());
        }
        #[cfg(not(feature = "tls"))]
        let _ = url;
        Ok(self)
    }

    #[cfg(feature = "tls")]
    pub(super) fn tls(&self) -> &Tls {
        &self.tls
    }

    /// A redis-rs client for it.
    #[cfg(feature = "redis-rs")]
    pub(super) fn client(&self) -> redis::RedisResult<redis::Client> {
        #[cfg(feature = "tls")]
        if self.is_by_tls() {
            super::tls::have_a_provider();
        }
        let tcp = redis::io::tcp::TcpSettings::default().set_nodelay(true);
        redis::Client::open(self.info.clone().set_tcp_settings(tcp))
    }

    /// Another server, to which all else applies as well.
    pub(crate) fn elsewhere(&self, host: &str, port: u16) -> Self {
        let host = host.to_owned();
        let there = match self.info.addr() {
            ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
                ConnectionAddr::TcpTls { host, port, insecure: *insecure, tls_params: tls_params.clone() }
            }
            _ => ConnectionAddr::Tcp(host, port),
        };
        let mut elsewhere = self.clone();
        elsewhere.info = elsewhere.info.set_addr(there);
        elsewhere
    }

    pub(crate) fn host(&self) -> &str {
        match self.info.addr() {
            ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. } => host,
            _ => "",
        }
    }

    pub(crate) fn port(&self) -> u16 {
        match self.info.addr() {
            ConnectionAddr::Tcp(_, port) | ConnectionAddr::TcpTls { port, .. } => *port,
            _ => 0,
        }
    }

    /// Where it is, unless that is this machine. Goes by the name alone: names aren't resolved.
    pub(crate) fn remote(&self) -> Option<String> {
        let (host, port) = match self.info.addr() {
            ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => (host, port),
            _ => return None,
        };
        let address = host.parse::<IpAddr>().map(|address| address.to_canonical());
        let is_here = host.trim_end_matches('.').eq_ignore_ascii_case("localhost")
            || address.is_ok_and(|address| address.is_loopback());
        let shown = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        (!is_here).then_some(shown)
    }

    #[cfg(all(feature = "tls", feature = "redis-rs"))]
    fn is_by_tls(&self) -> bool {
        matches!(self.info.addr(), ConnectionAddr::TcpTls { .. })
    }
}

/// For messages: without user and password.
impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.info.addr().fmt(f)
    }
}

/// Sentinels, and the name under which they know the primary.
#[derive(Clone)]
pub(super) struct Sentinels {
    pub(super) nodes: Vec<Endpoint>,
    pub(super) name: String,
    /// How to connect to the primary, wherever it is.
    pub(super) primary: Endpoint,
}

impl Sentinels {
    /// The same with these settings; their credentials are the primary's.
    pub(super) fn with(self, settings: &Settings, url: &str) -> Result<Self, Error> {
        let nodes = self.nodes.into_iter().map(|node| {
            let own = node.credentials.clone();
            Ok(Endpoint { credentials: own, ..node.with(settings, url)? })
        });
        Ok(Self { nodes: nodes.collect::<Result<_, _>>()?, primary: self.primary.with(settings, url)?, ..self })
    }
}

impl fmt::Display for Sentinels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nodes: Vec<_> = self.nodes.iter().map(Endpoint::to_string).collect();
        write!(f, "primary {} of the Sentinels at {}", self.name, nodes.join(", "))
    }
}

pub(super) fn is_of_sentinels(url: &str) -> bool {
    url.split_once("://").is_some_and(|(scheme, _)| scheme.ends_with("-sentinel"))
}

pub(crate) fn is_of_cluster(url: &str) -> bool {
    url.split_once("://").is_some_and(|(scheme, _)| scheme.ends_with("-cluster"))
}

/// Parses the address of a single Redis.
pub(crate) fn address(url: &str) -> Result<Endpoint, Error> {
    let malformed = |why: &str| {
        let expected = "expected redis[s]://[user:password@]host[:port][/db] or unix:///path/of.sock \
                        (redis-sentinel://..., redis-cluster://... for more than one)";
        Error::new(Kind::Input, format!("url: {expected}, got {:?}{why}", without_password(url)))
    };
    if let Some(flaw) = flaw(url) {
        return Err(malformed(&flaw));
    }
    if is_of_cluster(url) {
        return Err(malformed(", a cluster's (Cluster::open, RedisBuilder::open_cluster or Engine::open)"));
    }
    let why = lacking(url, cfg!(feature = "tls"));
    let info = url.into_connection_info().map_err(|error| match error.detail() {
        None => malformed(why).caused_by(error),
        // The error's text repeats a part of the address.
        Some(_) => malformed(why),
    })?;
    if matches!(info.addr(), ConnectionAddr::TcpTls { insecure: true, .. }) {
        return Err(malformed(", whose #insecure would leave the server's certificate unchecked"));
    }
    Ok(Endpoint::of(info))
}

/// The cluster nodes named in the address.
pub(crate) fn cluster(url: &str) -> Result<Vec<Endpoint>, Error> {
    let expected = "expected redis[s]-cluster://[user:password@]host[:port][,host[:port]...][?protocol=resp3]";
    let parts = Parts::of(url, "cluster", &["protocol"]).ok_or_else(|| unusable(url, expected))?;
    if !matches!(parts.path, "" | "0") {
        return Err(unusable(url, "expected no database but 0, the only one of a cluster"));
    }
    parts.nodes(parts.user, 6379, "", parts.query).map_err(|()| unusable(url, expected))
}

/// The Sentinels and the primary named in the address, and how to connect to it.
pub(super) fn sentinels(url: &str) -> Result<Sentinels, Error> {
    let expected = "expected redis[s]-sentinel://[user:password@]host[:port][,host[:port]...]/primary[/db], \
                    with no options but protocol, sentinel-user and sentinel-password";
    let unusable = |()| unusable(url, expected);
    let parts =
        Parts::of(url, "sentinel", &["protocol", "sentinel-user", "sentinel-password"]).ok_or(()).map_err(unusable)?;
    let (name, db) = parts.path.split_once('/').unwrap_or((parts.path, ""));
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
    if name.is_empty() || !name.bytes().all(plain) {
        return Err(unusable(()));
    }
    // Two of the options are for the Sentinels only.
    let option = |name: &str| parts.query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
    let (user, password) = (option("sentinel-user"), option("sentinel-password"));
    // Characters that would end it early must be encoded.
    let whole = |text: &&str| !text.contains(['/', '?', '#', '@']);
    if !user.iter().chain(&password).all(whole) || user.is_some_and(|user| user.contains(':')) {
        return Err(unusable(()));
    }
    let user = match (user, password) {
        (None, None) => None,
        (user, password) => Some(format!("{}:{}", user.unwrap_or_default(), password.unwrap_or_default())),
    };
    let others: Vec<_> = parts.query.split('&').filter(|pair| !pair.starts_with("sentinel-")).collect();
    let others = others.join("&");
    let nodes = parts.nodes(user.as_deref(), 26379, "", "").map_err(unusable)?;
    let primaries = parts.nodes(parts.user, 6379, db, &others).map_err(unusable)?;
    let primary = primaries.into_iter().next().ok_or(()).map_err(unusable)?;
    Ok(Sentinels { nodes, name: name.to_owned(), primary })
}

/// The parts of an address with several hosts.
struct Parts<'a> {
    tls: bool,
    user: Option<&'a str>,
    hosts: &'a str,
    path: &'a str,
    query: &'a str,
}

impl<'a> Parts<'a> {
    fn of(url: &'a str, kind: &str, options: &[&str]) -> Option<Self> {
        let (scheme, rest) = url.split_once("://")?;
        let tls = match scheme.strip_suffix(kind)? {
            "redis-" | "valkey-" => false,
            "rediss-" | "valkeys-" => true,
            _ => return None,
        };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (user, hosts) = authority.rsplit_once('@').map_or((None, authority), |(user, hosts)| (Some(user), hosts));
        // With a user for each host, all hosts but the last would be read as part of the user.
        let clear = !query.contains('#') && !path.contains('#') && !has_a_raw_password(url);
        let known =
            query.split('&').all(|pair| pair.is_empty() || options.contains(&pair.split('=').next().unwrap_or(pair)));
        (clear && known).then_some(Self { tls, user, hosts, path, query })
    }

    fn nodes(&self, user: Option<&str>, port: u16, db: &str, query: &str) -> Result<Vec<Endpoint>, ()> {
        let scheme = if self.tls { "rediss" } else { "redis" };
        let user = user.map(|user| format!("{user}@")).unwrap_or_default();
        let ask = if query.is_empty() { "" } else { "?" };
        let node = |host: &str| {
            let named = !host.ends_with(']') && host.contains(':');
            let port = if named { String::new() } else { format!(":{port}") };
            let usable = !host.is_empty() && !host.starts_with(':');
            let url = format!("{scheme}://{user}{host}{port}/{db}{ask}{query}");
            address(&url).ok().filter(|_| usable).ok_or(())
        };
        self.hosts.split(',').map(node).collect()
    }
}

fn unusable(url: &str, expected: &str) -> Error {
    let why = if has_a_raw_password(url) { ENCODE } else { lacking(url, cfg!(feature = "tls")) };
    Error::new(Kind::Input, format!("url: {expected}, got {:?}{why}", without_password(url)))
}

/// What an address needs that this build may lack.
fn lacking(url: &str, has_tls: bool) -> &'static str {
    let for_tls = ["rediss", "valkeys"]
        .iter()
        .any(|scheme| url.strip_prefix(scheme).is_some_and(|rest| rest.starts_with([':', '-'])));
    if for_tls && !has_tls { ", which is TLS: this program was built without tollgate's feature \"tls\"" } else { "" }
}

/// Host and port of `host:port`, as a cluster's nodes name each other. An empty host means the answering node's own.
pub(crate) fn host_and_port(address: &str) -> Option<(&str, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    Some((host.trim_start_matches('[').trim_end_matches(']'), port.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Redis;

    #[test]
    fn what_is_wrong_with_an_address_is_the_source_unless_it_repeats_a_part() {
        for (url, why) in [
            ("redis://0.0.0.0", Some("Cannot connect to a wildcard address (0.0.0.0 or ::) - InvalidClientConfig")),
            ("redis://localhost:1?protocol=hunter2", None),
        ] {
            let error = Redis::open(url).unwrap_err();
            assert!(error.is_input(), "{url}: {error}");
            assert_eq!(std::error::Error::source(&error).map(ToString::to_string).as_deref(), why, "{url}");
        }
    }

    #[test]
    fn without_tls_its_addresses_name_what_is_missing() {
        for url in ["rediss://localhost", "valkeys://localhost", "rediss-cluster://a,b", "rediss-sentinel://a/main"] {
            assert!(lacking(url, false).ends_with("without tollgate's feature \"tls\""), "{url}");
            assert_eq!(lacking(url, true), "", "{url}");
        }
        for url in ["redis://localhost", "unix:///x", "redis-cluster://a,b", "redissx://a"] {
            assert_eq!(lacking(url, false), "", "{url}");
        }
    }
}
