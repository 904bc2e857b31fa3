//! What a rule asks of a request.

use std::fmt;

use std::net::IpAddr;

use ipnet::IpNet;

use super::attributes::{Attributes, IP, METHOD, PATH, upper_case};
use super::index::host;
use super::path::{self, Pattern};

/// One attribute, and the values of which it has to have one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Condition {
    attribute: Box<str>,
    pub(super) values: Values,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Values {
    /// `*`: whatever it is.
    Present,
    Paths(Vec<Pattern>),
    /// Sorted, and none within another.
    Nets(Vec<IpNet>),
    /// Sorted.
    Texts(Vec<Box<[u8]>>),
}

impl Condition {
    /// Of an attribute and what a rule says of it; or what was expected.
    pub(super) fn new(attribute: &str, values: &[String], ignores_case: bool) -> Result<Self, String> {
        if values.is_empty() {
            return Err("expected at least one value, got none".into());
        }
        if let Some(empty) = values.iter().position(String::is_empty) {
            return Err(format!("expected a value, or \"*\" for any, got an empty one in place {}", empty + 1));
        }
        if values.len() > 1 && values.iter().any(|value| value == "*") {
            return Err(format!("expected \"*\" alone, or values, got {values:?}"));
        }
        let values = match attribute {
            _ if values == ["*"] => Values::Present,
            PATH => {
                Values::Paths(values.iter().map(|value| Pattern::new(value, ignores_case)).collect::<Result<_, _>>()?)
            }
            IP => Values::Nets(widest(values.iter().map(|value| net(value)).collect::<Result<_, _>>()?)),
            METHOD => Values::Texts(methods(values)?),
            _ => Values::Texts(sorted(values.iter().map(|value| value.as_bytes().into()))),
        };
        Ok(Self { attribute: attribute.into(), values })
    }

    pub(super) fn attribute(&self) -> &str {
        &self.attribute
    }

    pub(super) fn can_be_looked_up(&self) -> bool {
        self.values != Values::Present
    }

    /// Each value, as what other rules may have in common with it.
    pub(super) fn each_value(&self, mut each: impl FnMut(String)) {
        match &self.values {
            Values::Present => {}
            Values::Paths(patterns) => patterns.iter().for_each(|pattern| each(pattern.to_string())),
            Values::Nets(nets) => nets.iter().for_each(|net| each(net.to_string())),
            Values::Texts(values) => {
                values.iter().for_each(|value| each(String::from_utf8_lossy(value).into_owned()));
            }
        }
    }

    /// Whether a request has what is asked for.
    pub(super) fn holds(&self, request: &Attributes<'_>) -> bool {
        match &self.values {
            Values::Present => match &*self.attribute {
                PATH => request.path.is_some(),
                IP => request.ip.is_some(),
                name => request.text(name).is_some(),
            },
            Values::Paths(patterns) => {
                let covers = |path: &str| patterns.iter().any(|pattern| pattern.covers(path::segments(path)));
                request.path.as_deref().is_some_and(covers)
            }
            Values::Nets(nets) => request.ip.is_some_and(|address| holds_address(nets, address)),
            Values::Texts(values) => request
                .text(&self.attribute)
                .is_some_and(|got| values.binary_search_by(|value| (**value).cmp(got)).is_ok()),
        }
    }

    /// Whether it holds wherever all of these do.
    pub(super) fn follows_from(&self, others: &[Self]) -> bool {
        others.iter().filter(|other| other.attribute == self.attribute).any(|other| {
            match (&self.values, &other.values) {
                (Values::Present, _) => true,
                (Values::Paths(own), Values::Paths(other)) => {
                    other.iter().all(|other| own.iter().any(|own| own.covers(other.segments())))
                }
                (Values::Nets(own), Values::Nets(other)) => {
                    other.iter().all(|other| own.iter().any(|own| own.contains(other)))
                }
                (Values::Texts(own), Values::Texts(other)) => other.iter().all(|other| own.contains(other)),
                _ => false,
            }
        })
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut values = Vec::new();
        self.each_value(|value| values.push(value));
        match values.as_slice() {
            [] => write!(f, "any {}", self.attribute),
            [one] => write!(f, "{} {one}", self.attribute),
            several => write!(f, "{} {}", self.attribute, several.join(" or ")),
        }
    }
}

/// What GET is limited by, HEAD is too: most servers answer it by the same work.
fn methods(values: &[String]) -> Result<Vec<Box<[u8]>>, String> {
    let mut methods = Vec::with_capacity(values.len());
    for text in values {
        if !text.bytes().all(|byte| byte.is_ascii_graphic() && !b"()<>@,;:\\\"/[]?={}".contains(&byte)) {
            return Err(format!("expected an HTTP method such as POST, got {text:?}"));
        }
        let method = upper_case(text);
        if method == "GET" {
            methods.push(b"HEAD"[..].into());
        }
        methods.push(method.as_bytes().into());
    }
    Ok(sorted(methods))
}

fn sorted(values: impl IntoIterator<Item = Box<[u8]>>) -> Vec<Box<[u8]>> {
    let mut values: Vec<_> = values.into_iter().collect();
    values.sort_unstable();
    values.dedup();
    values
}

/// Those that aren't within another.
fn widest(mut nets: Vec<IpNet>) -> Vec<IpNet> {
    nets.sort_unstable_by_key(|net| (net.network(), net.prefix_len()));
    nets.dedup_by(|net, wider| wider.contains(&*net));
    nets
}

/// Among networks that are [`widest`], only the last that begins at or before the address may hold it.
fn holds_address(nets: &[IpNet], address: IpAddr) -> bool {
    let after = nets.partition_point(|net| net.network() <= address);
    nets[..after].last().is_some_and(|net| net.contains(&address))
}

/// An address or a network. Of IPv4 addresses within IPv6, those.
fn net(text: &str) -> Result<IpNet, String> {
    let bad = || format!("expected an address or a network, such as 192.0.2.1 or 10.0.0.0/8, got {text:?}");
    let net = match text.parse::<IpNet>() {
        Ok(net) => net,
        Err(_) => host(text.parse().map_err(|_| bad())?),
    };
    let net = match net {
        IpNet::V6(v6) if v6.prefix_len() >= 96 => match v6.addr().to_ipv4_mapped() {
            Some(v4) => ipnet::Ipv4Net::new(v4, v6.prefix_len() - 96).map_or(net, IpNet::V4),
            None => net,
        },
        net => net,
    };
    match net.trunc() {
        trunc if trunc == net => Ok(net),
        trunc => Err(format!("expected a network without bits beyond its length, such as {trunc}, got {text:?}")),
    }
}
