//! The names of other limiters for parts of a request, and the attributes for them.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::draft::spelled;
use super::fault::{Fault, expected};

/// Names for which the library has an attribute.
const OWN: [(&str, &str); 3] = [("remote_address", "ip"), ("req.method", "method"), ("req.path", "path")];

/// The attribute for each name of a source.
#[derive(Debug, Default)]
pub(super) struct Attributes {
    /// By the name in the source.
    known: BTreeMap<String, String>,
}

impl Attributes {
    /// Different names have different attributes.
    pub(super) fn of(&mut self, name: &str) -> String {
        if let Some(known) = self.known.get(name) {
            return known.clone();
        }
        let own = OWN.iter().find(|(theirs, _)| *theirs == name).map(|(_, ours)| *ours);
        let own = own.filter(|ours| !self.known.values().any(|other| other == ours)).map(str::to_owned);
        let attribute = own.unwrap_or_else(|| self.free(&spelled(name)));
        self.known.insert(name.to_owned(), attribute.clone());
        attribute
    }

    /// The addresses that are called so here are always the library's; `global` as a key would be all requests.
    fn free(&self, wanted: &str) -> String {
        let is_taken = |name: &str| {
            ["", "ip", "global", "domain"].contains(&name) || self.known.values().any(|other| other == name)
        };
        let numbered = (2..).map(|number| format!("{wanted}-{number}"));
        std::iter::once(wanted.to_owned()).chain(numbered).find(|name| !is_taken(name)).unwrap_or_default()
    }

    /// The attributes whose names differ from the source.
    pub(super) fn renamed(&self) -> String {
        let other = self.known.iter().filter(|(theirs, ours)| theirs != ours);
        other.map(|(theirs, ours)| format!("{theirs} is {ours}")).collect::<Vec<_>>().join(", ")
    }
}

/// The condition that an attribute has exactly this value; `None` if no condition can say that.
pub(super) fn literal(line: usize, attribute: &str, value: &str) -> Result<Option<String>, Fault> {
    match attribute {
        "ip" if value.parse::<IpAddr>().is_err() => Err(expected(line, "an address", value)),
        "path" => Ok(value.starts_with('/').then(|| value.replace('*', "%2A"))),
        _ => Ok((!["", "*"].contains(&value)).then(|| value.to_owned())),
    }
}
