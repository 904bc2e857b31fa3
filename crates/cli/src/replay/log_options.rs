//! Options that say where the lines of an access log have which field.

use anyhow::{Result, anyhow, bail};
use clap::{Args, ValueEnum};

use crate::records::{Clients, Format, Identity, KeyField, Place, Places, Wanted};

/// Where an access log has the fields to read.
#[derive(Clone, Debug, Args)]
pub(crate) struct LogOptions {
    /// Where an access log has its fields, such as time=ts,ip=client.ip.
    ///
    /// NAME is time (of the line, at a request's end) or start (its arrival, as Apache writes it), ip, user, method,
    /// path or request, status, or duration; what isn't given is found as --input says. A FIELD is a name in JSON (with
    /// dots into objects), a column's name, NAME in NAME=VALUE, the position of a word from 1, or from the end from -1
    /// (text in quotes or brackets is one word), or last-quoted. A duration is a number with its unit, or takes the one
    /// given: duration=FIELD:s, ms, us or ns; the sum of several is FIELD+FIELD.
    #[arg(long, value_name = "NAME=FIELD,...", help_heading = "Records")]
    fields: Option<Places>,
    /// The field of an access log that has the client's address.
    ///
    /// As a proxy or a balancer has written it, such as x_forwarded_for in JSON, last-quoted for nginx's packaged
    /// format, or as in --fields. Of a list, the last entry that isn't one of the --proxies counts; without --proxies,
    /// the last one, which the nearest proxy wrote.
    #[arg(long, value_name = "FIELD", allow_hyphen_values = true, help_heading = "Records")]
    client_address: Option<Place>,
    /// Proxies whose entries in --client-address are trusted, such as 10.0.0.0/8.
    ///
    /// Addresses or networks, with commas between. As with the middleware's ClientAddress::behind, a request that comes
    /// from none of them counts by its own address.
    #[arg(long, value_name = "NETWORK,...", value_delimiter = ',', help_heading = "Records")]
    proxies: Vec<String>,
}

impl LogOptions {
    /// What records are read for.
    pub(super) fn wanted(&self, about: Identity) -> Result<Wanted> {
        let of_clients = match (&self.client_address, self.proxies.as_slice()) {
            (Some(_), _) => Some("--client-address"),
            (None, [_, ..]) => Some("--proxies"),
            (None, []) => None,
        };
        if let (Some(option), Identity::Key(field)) = (of_clients, about)
            && field != KeyField::Ip
            && let Some(key) = field.to_possible_value()
        {
            bail!("{option}: expected --key ip, which counts by the client's address, got --key {}", key.get_name());
        }
        let clients = Clients::new(self.client_address.clone(), &self.proxies);
        let clients = clients.map_err(|why| anyhow!("--{why}"))?;
        Ok(Wanted::new(about, self.places(), clients))
    }

    pub(super) fn places(&self) -> Places {
        self.fields.clone().unwrap_or_default()
    }

    /// Whether it is read as a log of requests, not of keys and costs.
    fn is_access_log(&self, format: Format) -> bool {
        format.is_access_log() || (format == Format::Csv && self.places().have_time())
    }

    /// Refuses options that only an access log can have; `by` is whether a field to count by is given.
    pub(super) fn check(&self, shown: &str, format: Format, what: &str, by: bool) -> Result<()> {
        let asked = match (by, &self.fields, &self.client_address) {
            (true, ..) => "--key",
            (_, Some(_), _) => "--fields",
            (.., Some(_)) => "--client-address",
            _ if !self.proxies.is_empty() => "--proxies",
            _ => return Ok(()),
        };
        if !self.is_access_log(format) {
            bail!("{asked}: only for access logs; {shown} is read as {what}, with keys of its own");
        }
        Ok(())
    }
}

/// The error for an unknown format: how to read a log that begins like this, with the fields found in it.
pub(super) fn unknown(places: Option<&str>, begins: &str) -> String {
    let (how, why) = match places {
        Some(places) => (format!("--fields, such as --fields {places}"), ""),
        None => (
            "--fields time=FIELD,ip=FIELD,request=FIELD".to_owned(),
            ", and no time and address can be seen in it: every request needs its time",
        ),
    };
    format!("its format isn't known: give {how}; it begins with {begins}{why}")
}
