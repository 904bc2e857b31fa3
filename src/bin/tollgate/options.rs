//! What every command takes: where to decide, how long to wait, how to print.

use std::ffi::OsString;
use std::io::IsTerminal;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use tollgate::{By, Embedded, Engine, Limit, Limiter, OnError, Rule, Tls};

use crate::Failure;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The Redis that decides, such as redis://127.0.0.1:6379, unix:///run/redis.sock,
    /// redis-sentinel://host:26379,host:26379/primary or redis-cluster://host:7000,host:7001; without one, an engine in
    /// this process.
    #[arg(long, env = "TOLLGATE_URL", hide_env_values = true)]
    url: Option<String>,
    /// The authorities to trust at rediss://..., in PEM, instead of the platform's.
    #[arg(long, value_name = "FILE", env = "TOLLGATE_TLS_CA")]
    tls_ca: Option<OsString>,
    /// The certificate to show at rediss://..., in PEM.
    #[arg(long, value_name = "FILE", env = "TOLLGATE_TLS_CERT")]
    tls_cert: Option<OsString>,
    /// The private key of that certificate, in PEM.
    #[arg(long, value_name = "FILE", env = "TOLLGATE_TLS_KEY")]
    tls_key: Option<OsString>,
    /// How long one decision may take.
    #[arg(long, value_name = "D", default_value = "500ms", value_parser = duration)]
    deadline: Duration,
    /// What is answered where Redis is away: closed (the error), open (allowed) or local (the engine in this process).
    #[arg(long, value_enum, default_value = "closed", value_name = "HOW")]
    on_error: Policy,
    /// How many processes share a rule that is decided locally: this one decides by its part.
    #[arg(long, value_name = "N", default_value = "1")]
    processes: NonZeroU32,
    /// How many replicas must have what a call took before it is allowed, waited for less than half the deadline.
    #[arg(long, value_name = "N", default_value = "0")]
    confirmed_by: u8,
    /// How to print. Default: a table on a terminal, else a JSON object per line.
    #[arg(long, value_enum)]
    format: Option<Shape>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Shape {
    /// For people.
    Table,
    /// One JSON object per line.
    Jsonl,
}

/// Who answers where Redis is away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Policy {
    Closed,
    Open,
    Local,
}

impl Options {
    pub(crate) fn url(&self) -> Option<&str> {
        self.url.as_deref().filter(|url| !url.is_empty())
    }

    pub(crate) fn deadline(&self) -> Duration {
        self.deadline
    }

    /// The host that isn't this machine, if one of the address isn't: with its port, and without a password.
    pub(crate) fn remote(&self) -> Option<String> {
        let (scheme, rest) = self.url()?.split_once("://")?;
        if scheme == "unix" {
            return None;
        }
        let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
        let hosts = authority.rsplit_once('@').map_or(authority, |(_, hosts)| hosts);
        hosts.split(',').find(|host| !is_this_machine(without_port(host))).map(str::to_owned)
    }

    /// Who decides, unless somebody answers in its place.
    pub(crate) fn engine(&self) -> By {
        if self.url().is_some() { By::Redis } else { By::Embedded }
    }

    /// A limiter on the engine that was asked for.
    pub(crate) fn limiter(&self) -> Result<Limiter, Failure> {
        let limiter = match self.redis()? {
            Some(redis) => Limiter::new(redis),
            None => {
                eprintln!("tollgate: no --url, so the embedded engine decides: its state ends with this command");
                Limiter::new(Embedded::new())
            }
        };
        Ok(limiter.deadline(self.deadline))
    }

    /// The Redis that was asked for, if any.
    pub(crate) fn redis(&self) -> Result<Option<Engine>, Failure> {
        let engine = match (self.url(), self.tls()?) {
            (Some(url), Some(tls)) => Engine::open_with_tls(url, &tls)?,
            (Some(url), None) => Engine::open(url)?,
            (None, Some(_)) => {
                let message = "--tls-ca, --tls-cert: expected --url rediss://... with them, got no --url";
                return Err(Failure::Told(message.into()));
            }
            (None, None) if self.confirmed_by > 0 => {
                return Err(Failure::Told("--confirmed-by: expected --url with it, got no --url".into()));
            }
            (None, None) => return Ok(None),
        };
        let (replicas, within) = (self.confirmed_by, self.deadline / 2);
        Ok(Some(match engine {
            Engine::Redis(redis) => redis.confirmed_by(replicas, within).into(),
            Engine::Cluster(cluster) => cluster.confirmed_by(replicas, within).into(),
            other => other,
        }))
    }

    /// The rule, with what was asked for where Redis is away.
    pub(crate) fn follow_policy(&self, rule: Rule) -> Result<Rule, Failure> {
        let policy = match self.on_error {
            Policy::Closed => OnError::Closed,
            Policy::Open => OnError::Open,
            Policy::Local => OnError::Local { processes: self.processes },
        };
        Ok(rule.on_error(policy)?)
    }

    /// What the files say, if any is named.
    fn tls(&self) -> Result<Option<Tls>, Failure> {
        let named = |path: &Option<OsString>| path.clone().filter(|path| !path.is_empty()).map(PathBuf::from);
        let (ca, cert, key) = (named(&self.tls_ca), named(&self.tls_cert), named(&self.tls_key));
        if ca.is_none() && cert.is_none() && key.is_none() {
            return Ok(None);
        }
        let mut tls = Tls::new();
        if let Some(path) = ca {
            let told = |error| Failure::Told(format!("--tls-ca {}: {error}", path.display()));
            tls = tls.authority(&read("--tls-ca", &path)?).map_err(told)?;
        }
        match (cert, key) {
            (Some(cert), Some(key)) => {
                let files = format!("--tls-cert {} --tls-key {}", cert.display(), key.display());
                let (pem, secret) = (read("--tls-cert", &cert)?, read("--tls-key", &key)?);
                tls = tls.certificate(&pem, &secret).map_err(|error| Failure::Told(format!("{files}: {error}")))?;
            }
            (None, None) => {}
            (Some(_), None) => return Err(Failure::Told("--tls-cert: expected --tls-key with it, got none".into())),
            (None, Some(_)) => return Err(Failure::Told("--tls-key: expected --tls-cert with it, got none".into())),
        }
        Ok(Some(tls))
    }

    pub(crate) fn shape(&self) -> Shape {
        let by_terminal = || if std::io::stdout().is_terminal() { Shape::Table } else { Shape::Jsonl };
        self.format.unwrap_or_else(by_terminal)
    }
}

/// A rule given on the command line as the text of its limits: its keys in Redis are those of the rule `cli`.
pub(crate) fn rule(limits: &[String]) -> Result<Rule, Failure> {
    let Some((first, others)) = limits.split_first() else {
        return Err(Failure::Told("rule: expected at least one, such as \"token-bucket 5/10s\", got none".into()));
    };
    let mut rule = Rule::new("cli", limit(first)?)?;
    for other in others {
        rule = rule.and(limit(other)?)?;
    }
    Ok(rule)
}

/// The rule with what each call takes, if it has shards: then a cost that none of them admits is a mistake. Otherwise
/// that is a denial, with "never".
pub(crate) fn at_cost(rule: Rule, cost: u64) -> Result<Rule, Failure> {
    if rule.limits().all(|limit| limit.shards() == 1) { Ok(rule) } else { Ok(rule.cost(cost)?) }
}

fn read(option: &str, path: &Path) -> Result<Vec<u8>, Failure> {
    std::fs::read(path).map_err(|error| Failure::Told(format!("{option} {}: {error}", path.display())))
}

/// One limit; whoever forgot to quote its words is told so.
fn limit(text: &str) -> Result<Limit, Failure> {
    text.parse().map_err(|error| {
        let unquoted = !text.is_empty() && !text.contains(char::is_whitespace);
        let hint = if unquoted { "; is a rule not quoted, as in \"token-bucket 5/10s\"?" } else { "" };
        Failure::Told(format!("{error}{hint}"))
    })
}

fn without_port(host: &str) -> &str {
    match host.strip_prefix('[') {
        Some(rest) => rest.split_once(']').map_or(rest, |(host, _)| host),
        None => host.split_once(':').map_or(host, |(host, _)| host),
    }
}

/// By its name alone: nobody is asked what another name stands for.
fn is_this_machine(host: &str) -> bool {
    let address = host.parse::<IpAddr>().map(|address| address.to_canonical());
    host.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
}

/// A duration such as `200ms` or `1m30s`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    // A day is as long as in a rule: 24 hours.
    let days = text.split_once('d').and_then(|(days, rest)| Some((days.trim().parse::<i64>().ok()?, rest)));
    let (days, rest) = days.unwrap_or((0, text));
    let rest = if rest.is_empty() && days > 0 { "0s" } else { rest };
    let parsed = rest
        .parse::<jiff::SignedDuration>()
        .ok()
        .and_then(|rest| rest.checked_add(jiff::SignedDuration::try_from_hours(days.checked_mul(24)?)?));
    let parsed = parsed.and_then(|signed| Duration::try_from(signed).ok());
    parsed.ok_or_else(|| "expected a duration such as 200ms, 1m30s or 7d".into())
}

/// A whole number that a script computes with.
pub(crate) fn units(text: &str) -> Result<u64, String> {
    const MOST: u64 = (1 << 53) - 1;
    let number = text.parse().ok().filter(|number| *number <= MOST);
    number.ok_or_else(|| format!("expected a whole number from 0 to {MOST}"))
}

/// A whole number from 1 up.
pub(crate) fn from_one<N: TryFrom<u64>, const MOST: u64>(text: &str) -> Result<N, String> {
    let number = text.parse().ok().filter(|number| (1..=MOST).contains(number)).map(N::try_from);
    number.and_then(Result::ok).ok_or_else(|| format!("expected a whole number from 1 to {MOST}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_of_this_machine_if_it_says_so() {
        let remote = |url: &str| {
            let (on_error, processes, format) = (Policy::Closed, NonZeroU32::MIN, None);
            let (url, deadline, tls_ca, tls_cert, tls_key) = (Some(url.into()), Duration::ZERO, None, None, None);
            let options =
                Options { url, tls_ca, tls_cert, tls_key, deadline, on_error, processes, confirmed_by: 0, format };
            options.remote().unwrap_or_default()
        };
        for url in [
            "",
            "redis://localhost",
            "redis://LOCALHOST:7000/1",
            "redis://:s3cret@127.0.0.1:6379",
            "redis://127.8.9.1",
            "redis://[::1]:6379",
            "redis://[::ffff:127.0.0.1]",
            "rediss://localhost:6380",
            "unix:///run/redis.sock",
            "redis-cluster://u:s3cret@127.0.0.1:7000,localhost:7001,[::1]:7002",
            "redis-sentinel://localhost,127.0.0.1:26380/main/1",
        ] {
            assert_eq!(remote(url), "", "{url}");
        }
        for (url, address) in [
            ("redis://user:s3cret@redis.example.com/0", "redis.example.com"),
            ("redis://localhost.example.com", "localhost.example.com"),
            ("redis://10.0.0.1:7000", "10.0.0.1:7000"),
            ("rediss://10.0.0.1:7000", "10.0.0.1:7000"),
            ("redis-cluster://127.0.0.1:7000,10.0.0.2:7000", "10.0.0.2:7000"),
            ("redis-sentinel://u:s3cret@sentinel.example.com:26379/main", "sentinel.example.com:26379"),
        ] {
            assert_eq!(remote(url), address);
        }
    }
}
