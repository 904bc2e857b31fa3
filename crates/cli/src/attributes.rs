//! A request's attributes, which rules match and count: from the command line, from records, or from a key.

use std::ffi::{OsStr, OsString};

use anyhow::{Result, anyhow, bail, ensure};
use clap::Args;
use serde::{Serialize, Serializer};
use tollgate::rules::Attributes;

use crate::escape::shown;

/// Names and values, each name once.
pub(crate) type Pairs = Vec<(String, Vec<u8>)>;

/// The options that describe a request.
#[derive(Debug, Args)]
pub(crate) struct Described {
    /// The user who makes the request.
    #[arg(long, value_name = "USER", help_heading = "Request")]
    user: Option<OsString>,
    /// The client's address.
    #[arg(long, value_name = "ADDRESS", help_heading = "Request")]
    ip: Option<OsString>,
    /// The path of its URL, or the whole request target.
    #[arg(long, value_name = "PATH", help_heading = "Request")]
    path: Option<OsString>,
    /// The HTTP method.
    #[arg(long, value_name = "METHOD", help_heading = "Request")]
    method: Option<OsString>,
    /// What the user pays for, such as free.
    #[arg(long, value_name = "TIER", help_heading = "Request")]
    tier: Option<OsString>,
    /// The API key of the request.
    #[arg(long, value_name = "KEY", help_heading = "Request")]
    api_key: Option<OsString>,
    /// An attribute of your own, such as org=acme; once for each.
    #[arg(long = "attr", value_name = "NAME=VALUE", help_heading = "Request")]
    others: Vec<OsString>,
}

impl Described {
    pub(crate) fn pairs(&self) -> Result<Pairs> {
        let Self { user, ip, path, method, tier, api_key, others } = self;
        let known =
            [("user", user), ("ip", ip), ("path", path), ("method", method), ("tier", tier), ("api_key", api_key)];
        let mut all = pairs("--attr", others)?;
        for (name, value) in known {
            let Some(value) = value else { continue };
            let (option, bytes) = (name.replace('_', "-"), value.as_encoded_bytes());
            ensure!(!bytes.is_empty(), "--{option}: expected at least one byte, got an empty value");
            let twice = all.iter().any(|(other, _)| other == name);
            ensure!(!twice, "--attr: {name} is already given by --{option}");
            all.push((name.to_owned(), bytes.to_vec()));
        }
        check(&all).map_err(|why| anyhow!("--{}", why.replacen("api_key:", "api-key:", 1)))?;
        Ok(all)
    }
}

/// Parses NAME=VALUE options; each name may be given once.
pub(crate) fn pairs(option: &str, given: &[OsString]) -> Result<Pairs> {
    let mut pairs = Pairs::with_capacity(given.len());
    for given in given {
        let pair = pair(given).map_err(|why| anyhow!("{option}: {why}"))?;
        if pairs.iter().any(|(earlier, _)| *earlier == pair.0) {
            let shown = shown(given.as_encoded_bytes());
            bail!("{option}: {} is given twice; the second is {shown}", pair.0);
        }
        pairs.push(pair);
    }
    Ok(pairs)
}

fn pair(given: &OsStr) -> Result<(String, Vec<u8>), String> {
    let bytes = given.as_encoded_bytes();
    let shown = shown(bytes);
    let at = bytes.iter().position(|byte| *byte == b'=');
    let split = at.map(|at| (&bytes[..at], &bytes[at + 1..])).filter(|(name, _)| !name.is_empty());
    let (name, value) = split.ok_or_else(|| format!("expected NAME=VALUE, such as org=acme, got {shown}"))?;
    if value.is_empty() {
        return Err(format!("expected at least one byte after the =, got {shown}"));
    }
    Ok((String::from_utf8_lossy(name).into_owned(), value.to_vec()))
}

/// Whether rules can read these attributes, or which one they can't.
pub(crate) fn check(pairs: &Pairs) -> Result<(), String> {
    try_read(pairs).map(|_| ())
}

/// The attributes as rules read them. Unless they were [checked](check), unreadable ones count as missing.
pub(crate) fn read(pairs: &Pairs) -> Attributes<'_> {
    try_read(pairs).unwrap_or_default()
}

fn try_read(pairs: &Pairs) -> Result<Attributes<'_>, String> {
    let read = pairs.iter().try_fold(Attributes::new(), |read, (name, value)| read.try_set(name, value));
    read.map_err(|error| error.to_string())
}

/// The attributes in a key, for a rule that counts by these: of `user:42|path:/x`, both.
pub(crate) fn of_key(key: &[u8], counted: &[String], ipv6_prefix: u8) -> Result<Pairs, String> {
    let expected = || match counted {
        [] => format!("expected global, since it counts all requests together, got {}", shown(key)),
        counted => {
            let form: Vec<_> = counted.iter().map(|name| format!("{name}:...")).collect();
            format!("expected a key of the form {}, got {}", form.join("|"), shown(key))
        }
    };
    if counted.is_empty() {
        return if key == b"global" { Ok(Pairs::new()) } else { Err(expected()) };
    }
    let values = if counted.len() == 1 { vec![key.to_vec()] } else { split(key) };
    if values.len() != counted.len() {
        return Err(expected());
    }
    let pair = |(name, value): (&String, Vec<u8>)| {
        let value = value.strip_prefix(name.as_bytes()).and_then(|rest| rest.strip_prefix(b":"));
        let value = value.filter(|value| !value.is_empty()).ok_or_else(expected)?;
        // An IPv6 address is counted and shown as its network.
        let network = format!("/{ipv6_prefix}");
        let address = value.strip_suffix(network.as_bytes()).filter(|address| name == "ip" && address.contains(&b':'));
        Ok((name.clone(), address.unwrap_or(value).to_vec()))
    };
    let pairs = counted.iter().zip(values).map(pair).collect::<Result<_, String>>()?;
    check(&pairs)?;
    Ok(pairs)
}

/// Splits at each `|` that has no backslash before it.
fn split(key: &[u8]) -> Vec<Vec<u8>> {
    let (mut values, mut bytes) = (vec![Vec::new()], key.iter().copied());
    while let Some(byte) = bytes.next() {
        match (byte, values.last_mut()) {
            (b'|', _) => values.push(Vec::new()),
            (b'\\', Some(last)) => last.extend(bytes.next()),
            (byte, Some(last)) => last.push(byte),
            (_, None) => {}
        }
    }
    values
}

/// Attributes as one JSON object with string values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shown<'a>(pub(crate) &'a Pairs);

impl Serialize for Shown<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, shown(value))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(key: &str, counted: &[&str]) -> Result<Vec<(String, String)>, String> {
        let counted: Vec<_> = counted.iter().map(|name| (*name).to_owned()).collect();
        let text = |(name, value)| (name, String::from_utf8(value).unwrap());
        of_key(key.as_bytes(), &counted, 64).map(|pairs| pairs.into_iter().map(text).collect())
    }

    #[test]
    fn a_key_is_read_as_rules_spell_it() {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(parsed("user:a|b", &["user"]), Ok(vec![pair("user", "a|b")]));
        assert_eq!(parsed("user:a\\|b|path:/x", &["user", "path"]), Ok(vec![pair("user", "a|b"), pair("path", "/x")]));
        assert_eq!(parsed("ip:2001:db8::/64", &["ip"]), Ok(vec![pair("ip", "2001:db8::")]));
        assert_eq!(parsed("global", &[]), Ok(Vec::new()));
        for (key, counted) in [("42", &["user"][..]), ("user:", &["user"]), ("user:1", &["user", "path"]), ("x", &[])] {
            assert!(parsed(key, counted).unwrap_err().ends_with(&format!(", got {key}")), "{key}");
        }
        for network in ["ip:2001:db8::/32", "ip:2001:db8::/x", "ip:192.0.2.1/64", "ip:192.0.2.1/"] {
            assert!(parsed(network, &["ip"]).unwrap_err().starts_with("ip: expected an address"), "{network}");
        }
        assert!(parsed("ip:nobody", &["ip"]).unwrap_err().starts_with("ip: expected an address"));
    }
}
