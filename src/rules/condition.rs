//! A rule's conditions on a request.

use std::fmt;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::attributes::{Attributes, OTHER_METHOD, is_standard, upper_case};
use super::definition::Reading;
use super::names::{self, IP, METHOD, Name, PATH};
use super::path::{self, Pattern};

/// An attribute, and the values of which it must have one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Condition {
    attribute: Name,
    pub(super) values: Values,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Values {
    /// `*`: any value.
    Present,
    Paths(Vec<Pattern>),
    /// Sorted, and none contains another.
    Nets(Vec<IpNet>),
    /// Sorted.
    Texts(Vec<Box<[u8]>>),
}

/// All addresses.
pub(super) const EVERY_NET: [IpNet; 2] = [
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::UNSPECIFIED, 0)),
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::UNSPECIFIED, 0)),
];

impl Condition {
    /// From an attribute and a rule's values for it; or which value is wrong, and what was expected.
    pub(super) fn new(attribute: &str, values: &[String], reading: Reading) -> Result<Self, (usize, String)> {
        if values.is_empty() {
            return Err((0, "the list is empty: write at least one value".into()));
        }
        if let Some(empty) = values.iter().position(String::is_empty) {
            return Err((empty, "a value is empty: write \"*\" for any value".into()));
        }
        if let Some(any) = values.iter().position(|value| value == "*").filter(|_| values.len() > 1) {
            return Err((any, format!("expected \"*\" alone, or values, got {values:?}")));
        }
        let values = match attribute {
            _ if values == ["*"] => Values::Present,
            PATH => Values::Paths(each(values, |value| Pattern::new(value, reading))?),
            IP => Values::Nets(widest(each(values, net)?)),
            METHOD => Values::Texts(methods(values)?),
            _ => Values::Texts(sorted(values.iter().map(|value| value.as_bytes().into()))),
        };
        Ok(Self { attribute: names::name(attribute), values })
    }

    pub(super) fn attribute(&self) -> &str {
        &self.attribute
    }

    pub(super) fn can_be_looked_up(&self) -> bool {
        self.values != Values::Present
    }

    /// Each value, as other rules may share it.
    pub(super) fn each_value(&self, mut each: impl FnMut(&str)) {
        match &self.values {
            Values::Present => {}
            Values::Paths(patterns) => patterns.iter().for_each(|pattern| each(pattern.text())),
            Values::Nets(nets) => nets.iter().for_each(|net| each(&net.to_string())),
            Values::Texts(values) => {
                values.iter().for_each(|value| each(&String::from_utf8_lossy(value)));
            }
        }
    }

    /// Whether a request fulfils the condition.
    pub(super) fn holds(&self, request: &Attributes<'_>) -> bool {
        match &self.values {
            Values::Present => match &*self.attribute {
                PATH => request.path.is_some(),
                IP => request.ip.is_some(),
                name => request.text(name).is_some(),
            },
            Values::Paths(patterns) => {
                let covers = |path: &str| patterns.iter().any(|pattern| pattern.covers(path::segments(path)));
                request.matched_path().is_some_and(covers)
            }
            Values::Nets(nets) => {
                request.ip.is_some_and(|address| last_before(nets, address).is_some_and(|net| net.contains(&address)))
            }
            Values::Texts(values) => {
                let mut got = request.values(&self.attribute);
                got.any(|got| values.binary_search_by(|value| (**value).cmp(got)).is_ok())
            }
        }
    }

    /// Whether this value is a method that isn't a standard one, which `OTHER` names too.
    pub(super) fn names_another_method(&self, value: &[u8]) -> bool {
        *self.attribute == *METHOD && std::str::from_utf8(value).is_ok_and(|method| !is_standard(method))
    }

    /// Whether it holds whenever all of these do.
    pub(super) fn follows_from(&self, others: &[Self]) -> bool {
        others.iter().filter(|other| other.attribute == self.attribute).any(|other| {
            match (&self.values, &other.values) {
                (Values::Present, _) => true,
                (Values::Paths(own), Values::Present) => own.iter().any(Pattern::covers_all),
                (Values::Nets(own), Values::Present) => EVERY_NET.iter().all(|net| own.contains(net)),
                (Values::Paths(own), Values::Paths(other)) => {
                    own == other || other.iter().all(|other| own.iter().any(|own| own.covers(other.segments())))
                }
                (Values::Nets(own), Values::Nets(other)) => {
                    other.iter().all(|other| last_before(own, other.network()).is_some_and(|own| own.contains(other)))
                }
                (Values::Texts(own), Values::Texts(other)) => other.iter().all(|other| {
                    let has = |value: &[u8]| own.binary_search_by(|own| (**own).cmp(value)).is_ok();
                    has(other) || self.names_another_method(other) && has(OTHER_METHOD.as_bytes())
                }),
                _ => false,
            }
        })
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut values = Vec::new();
        self.each_value(|value| values.push(value.to_owned()));
        match values.as_slice() {
            [] => write!(f, "any {}", self.attribute),
            [one] => write!(f, "{} {one}", self.attribute),
            several => write!(f, "{} {}", self.attribute, several.join(" or ")),
        }
    }
}

/// A limit on GET also applies to HEAD: most servers do the same work for it.
fn methods(values: &[String]) -> Result<Vec<Box<[u8]>>, (usize, String)> {
    let methods = each(values, |text| {
        if !text.bytes().all(|byte| byte.is_ascii_graphic() && !b"()<>@,;:\\\"/[]?={}".contains(&byte)) {
            return Err(format!("expected an HTTP method such as POST, got {text:?}"));
        }
        Ok(upper_case(text).as_bytes().into())
    })?;
    let head = methods.contains(&b"GET"[..].into()).then(|| b"HEAD"[..].into());
    Ok(sorted(methods.into_iter().chain(head)))
}

/// All of these in the form in which they are compared, or which one is wrong.
fn each<T>(values: &[String], read: impl Fn(&str) -> Result<T, String>) -> Result<Vec<T>, (usize, String)> {
    values.iter().enumerate().map(|(at, value)| read(value).map_err(|why| (at, why))).collect()
}

fn sorted(values: impl IntoIterator<Item = Box<[u8]>>) -> Vec<Box<[u8]>> {
    let mut values: Vec<_> = values.into_iter().collect();
    values.sort_unstable();
    values.dedup();
    values
}

/// Those that no other contains.
fn widest(mut nets: Vec<IpNet>) -> Vec<IpNet> {
    nets.sort_unstable_by_key(|net| (net.network(), net.prefix_len()));
    nets.dedup_by(|net, wider| wider.contains(&*net));
    nets
}

/// Among networks that are [`widest`], the only one that may contain an address: the last that begins at or before it.
fn last_before(nets: &[IpNet], address: IpAddr) -> Option<&IpNet> {
    let after = nets.partition_point(|net| net.network() <= address);
    nets[..after].last()
}

/// An address or a network; IPv4-mapped IPv6 becomes IPv4.
pub(crate) fn net(text: &str) -> Result<IpNet, String> {
    let bad = || format!("expected an address or a network, such as 192.0.2.1 or 10.0.0.0/8, got {text:?}");
    let net = match text.parse::<IpNet>() {
        Ok(net) => net,
        // The network of this address alone.
        Err(_) => IpNet::from(text.parse::<IpAddr>().map_err(|_| bad())?),
    };
    let net = match net {
        IpNet::V6(v6) if v6.prefix_len() >= 96 => match v6.addr().to_ipv4_mapped() {
            Some(v4) => Ipv4Net::new(v4, v6.prefix_len() - 96).map_or(net, IpNet::V4),
            None => net,
        },
        net => net,
    };
    match net.trunc() {
        trunc if trunc == net => Ok(net),
        trunc => Err(format!("expected a network without bits beyond its length, such as {trunc}, got {text:?}")),
    }
}
