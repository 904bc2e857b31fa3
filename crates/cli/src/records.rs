//! Recorded traffic as a stream of [`Record`]s: JSON lines, CSV, or a web server's access log; compressed or not.
//!
//! A line that can't be read is an item like any other ([`Unreadable`]), so that one bad line neither stops a replay
//! nor is lost from the counts. Memory is bounded by one line of at most 16 MiB: enough for a key of a megabyte with
//! every byte escaped.

use std::fmt;
use std::io::{self, BufRead};
use std::sync::Arc;
use std::time::Duration;

mod access;
mod access_json;
mod clients;
mod combined;
mod compression;
mod csv_table;
pub(crate) mod field;
mod haproxy;
mod jsonl;
mod lines;
mod looks;
mod place;
mod places;
mod reader;
mod sample;
mod tally;
mod text;
mod time;
mod w3c;
mod words;

use crate::attributes::Pairs;
use crate::by_time::At;
use clap::ValueEnum;
pub(crate) use clients::{Clients, counted};
pub(crate) use compression::{Copy, copy, decompressed, finished};
pub(crate) use looks::{Looks, look};
pub(crate) use place::Place;
pub(crate) use places::Places;
use reader::Records;
use serde::{Deserialize, Serialize};
pub(crate) use tally::Tally;
use tollgate::Operation;

/// One recorded request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// The line it starts on, from 1; of several files, those before it count.
    pub(crate) line: u64,
    /// When it arrived: microseconds since 1970, at most 2^52.
    pub(crate) t_us: u64,
    /// The requested operation.
    pub(crate) op: Operation,
    /// The key it counts against: any bytes, at least one; empty if it has attributes.
    pub(crate) key: Vec<u8>,
    /// The requested cost: less than 2^53; `None` for the rule's own.
    pub(crate) cost: Option<u64>,
    /// The id of the call, or of the one to settle: any bytes, at least one.
    pub(crate) id: Option<Vec<u8>>,
    /// How long a block lasts; zero lifts it.
    pub(crate) length: Option<Duration>,
    /// For how long it holds permits, if it takes some.
    pub(crate) permits: Permits,
    /// The HTTP status of its response, if it is known.
    pub(crate) status: Option<u16>,
    /// The attributes that a set of rules finds its rule by, if they are used in place of a key.
    pub(crate) attributes: Pairs,
}

/// For how long a record's permits are held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Permits {
    /// Until a later record gives them back, or the ttl ends.
    #[default]
    ByRecords,
    /// Until this time, in microseconds since 1970: the request had ended.
    Until(u64),
    /// The log doesn't say.
    Unknown,
}

impl At for Record {
    fn t_us(&self) -> u64 {
        self.t_us
    }
}

impl Record {
    /// How long the request took, as in the field request_time; null if the log doesn't say.
    pub(crate) fn request_time(&self) -> Option<Option<String>> {
        match self.permits {
            Permits::ByRecords => None,
            Permits::Unknown => Some(None),
            Permits::Until(ends_us) => {
                let took = ends_us.saturating_sub(self.t_us);
                Some(Some(format!("{}.{:06}", took / 1_000_000, took % 1_000_000)))
            }
        }
    }
}

/// The format of recorded traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// A JSON object per line: t_us and key; optionally op (default: acquire), cost (default: 1) and id; with op block,
    /// the field "for" with its length; request_time, the seconds for which it holds permits; with --rules, attrs in
    /// place of key, and status, that of the response. Replay's own output can be read too.
    Jsonl,
    /// CSV with the same names in a header; with --rules, a column attr.NAME for each attribute. With --fields, any CSV
    /// with a header.
    Csv,
    /// A web server's Combined (or Common) Log Format; nginx's may end with $request_time, Apache's may begin with the
    /// virtual host (vhost_combined).
    Combined,
    /// A web server's access log with a JSON object per line, as nginx, Caddy, Envoy and Traefik write it; with
    /// --fields, any other.
    AccessJson,
    /// HAProxy's HTTP log (option httplog).
    Haproxy,
    /// The W3C's extended format, with a line #Fields that names its columns, as IIS and CloudFront write it.
    W3c,
    /// Lines of words, as Envoy, AWS's balancers and Heroku's router write them; with --fields, any other.
    Text,
}

impl Format {
    /// Whether it is a log of requests, not of keys and costs.
    pub(crate) fn is_access_log(self) -> bool {
        !matches!(self, Self::Jsonl | Self::Csv)
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Jsonl => "jsonl",
            Self::Csv => "csv",
            Self::Combined => "combined",
            Self::AccessJson => "access-json",
            Self::Haproxy => "haproxy",
            Self::W3c => "w3c",
            Self::Text => "text",
        })
    }
}

/// The field of an access log's line that becomes the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum KeyField {
    /// The client's address, or its host name if the server logs that.
    Ip,
    /// The request's path without the query string.
    Path,
    /// The request's method.
    Method,
    /// The user that the server authenticated.
    User,
}

/// What identifies a record's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Identity {
    /// A key; in an access log, this field.
    Key(KeyField),
    /// Attributes, for a set of rules.
    Attributes,
}

/// A line without a valid record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unreadable {
    /// The line it starts on, from 1.
    pub(crate) line: u64,
    /// One short line: the field, what was expected, what was found.
    pub(crate) reason: String,
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.reason)
    }
}

/// What records are read for, and how.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) about: Identity,
    /// Where an access log has its fields, as far as given.
    pub(crate) places: Places,
    pub(crate) clients: Clients,
    /// Counts what isn't a record.
    pub(crate) tally: Arc<Tally>,
}

impl Wanted {
    pub(crate) fn new(about: Identity, places: Places, clients: Clients) -> Self {
        let tally = Arc::new(Tally::of(clients.field.as_ref()));
        Self { about, places, clients, tally }
    }
}

impl From<Identity> for Wanted {
    fn from(about: Identity) -> Self {
        Self::new(about, Places::default(), Clients::default())
    }
}

/// The records of `input`, in order.
///
/// An `io::Error` means that the rest can't be read, and is the last item: the stream itself failed, or (kind
/// `InvalidData`) a CSV header doesn't describe records.
pub(crate) fn read(
    format: Format,
    wanted: impl Into<Wanted>,
    input: impl BufRead,
) -> impl Iterator<Item = io::Result<Result<Record, Unreadable>>> {
    Records::new(format, wanted.into(), input)
}

#[cfg(test)]
mod tests;
