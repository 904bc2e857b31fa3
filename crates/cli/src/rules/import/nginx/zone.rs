//! Zones and their uses: what is counted, by which key, and how much is allowed.

use super::super::fault::{Fault, expected, fault, quoted};
use super::directive::Directive;

/// nginx's numbers are machine words; no limit comes near this.
const MOST: u64 = 1_000_000_000;

/// The most permits of a limit.
const MOST_PERMITS: u64 = 10_000;

/// Variables for which the library has an attribute.
const OWN: [(&str, &str); 10] = [
    ("binary_remote_addr", "ip"),
    ("remote_addr", "ip"),
    ("uri", "path"),
    ("document_uri", "path"),
    ("request_uri", "path"),
    ("host", "host"),
    ("http_host", "host"),
    ("server_name", "host"),
    ("request_method", "method"),
    ("remote_user", "user"),
];

/// Other variables that nginx sets itself, and the beginnings of names of more.
const KNOWN: &str = " args body_bytes_sent bytes_sent connection connection_requests connection_time content_length \
    content_type document_root hostname http2 http3 https is_args limit_rate msec nginx_version pid pipe \
    proxy_add_x_forwarded_for proxy_host proxy_port proxy_protocol_addr proxy_protocol_port proxy_protocol_server_addr \
    proxy_protocol_server_port query_string realip_remote_addr realip_remote_port realpath_root remote_port request \
    request_body request_completion request_filename request_id request_length request_time scheme secure_link \
    server_addr server_port server_protocol status tcpinfo_rtt time_iso8601 time_local uid_got uid_set ";
const BEGINNINGS: [&str; 9] =
    ["arg_", "cookie_", "http_", "ssl_", "geoip_", "geoip2_", "jwt_", "sent_http_", "proxy_protocol_tlv_"];

#[derive(Clone, Debug)]
pub(super) struct Zone {
    pub(super) name: String,
    pub(super) line: usize,
    pub(super) counts: Counts,
    /// The attributes that make up its key.
    pub(super) key: Vec<String>,
    /// Whether it counts by the query too, which no path has.
    pub(super) by_query: bool,
    pub(super) used: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counts {
    Requests(Rate),
    Connections,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rate {
    pub(super) requests: u64,
    pub(super) per_minute: bool,
}

/// A `limit_req` or `limit_conn`, as it is in force somewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Use {
    pub(super) zone: String,
    pub(super) asks: Asks,
    pub(super) status: u16,
    pub(super) dry_run: bool,
    pub(super) line: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asks {
    Requests {
        burst: u64,
        /// How many requests of the burst aren't delayed, if the others are.
        delay: Option<u64>,
    },
    Connections(u64),
}

impl Use {
    /// Whether one rule can express both.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        Self { line: 0, ..self.clone() } == Self { line: 0, ..other.clone() }
    }

    /// Whether both count in one zone.
    pub(super) fn shares(&self, other: &Self) -> bool {
        self.zone == other.zone
            && matches!(self.asks, Asks::Connections(_)) == matches!(other.asks, Asks::Connections(_))
    }
}

/// `limit_req_zone KEY zone=NAME:SIZE rate=RATE` or `limit_conn_zone KEY zone=NAME:SIZE`
pub(super) fn zone(directive: &Directive, defined: &[String]) -> Result<Zone, Fault> {
    let line = directive.line;
    let is_of_requests = directive.name == "limit_req_zone";
    let (mut name, mut rate, mut key) = (None, None, None);
    for argument in &directive.arguments {
        match argument.split_once('=') {
            Some(("zone", zone)) => name = zone.split(':').next().filter(|name| !name.is_empty()),
            Some(("rate", text)) if is_of_requests => rate = Some(parsed_rate(line, text)?),
            _ if is_of_requests && argument == "sync" => {}
            _ if key.is_none() => key = Some(argument),
            _ => return Err(expected(line, &format!("a parameter of {}", directive.name), argument)),
        }
    }
    let name = name.ok_or_else(|| fault(line, "zone=NAME:SIZE is missing"))?.to_owned();
    let written = key.ok_or_else(|| fault(line, "the key is missing, such as $binary_remote_addr"))?;
    let (key, by_query) = attributes(line, written, defined)?;
    let counts = match is_of_requests {
        true => Counts::Requests(rate.ok_or_else(|| fault(line, "rate= is missing, such as rate=10r/s"))?),
        false => Counts::Connections,
    };
    Ok(Zone { name, line, counts, key, by_query, used: false })
}

fn parsed_rate(line: usize, text: &str) -> Result<Rate, Fault> {
    let what = "a rate such as 10r/s or 30r/m";
    let number = |digits: &str| number(line, what, digits, MOST).ok().filter(|number| *number > 0);
    let per_second = text.strip_suffix("r/s").and_then(number).map(|requests| Rate { requests, per_minute: false });
    let per_minute = || text.strip_suffix("r/m").and_then(number).map(|requests| Rate { requests, per_minute: true });
    per_second.or_else(per_minute).ok_or_else(|| expected(line, what, text))
}

fn number(line: usize, what: &str, digits: &str, most: u64) -> Result<u64, Fault> {
    let plain = digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse().ok().filter(|number| plain && *number <= most).ok_or_else(|| expected(line, what, digits))
}

/// The attributes for the variables in a key, and whether one includes the query.
fn attributes(line: usize, key: &str, defined: &[String]) -> Result<(Vec<String>, bool), Fault> {
    let (mut all, mut by_query) = (Vec::<String>::new(), false);
    for piece in key.split('$').skip(1) {
        let braced = piece.strip_prefix('{').and_then(|rest| rest.split_once('}')).map(|(name, _)| name);
        let is_part = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
        let name = braced.unwrap_or_else(|| &piece[..piece.find(|letter| !is_part(letter)).unwrap_or(piece.len())]);
        let own = OWN.iter().find(|(theirs, _)| *theirs == name).map(|(_, ours)| *ours);
        let is_known = KNOWN.contains(&format!(" {name} "))
            || BEGINNINGS.iter().any(|start| name.len() > start.len() && name.starts_with(start))
            || defined.iter().any(|other| other == name);
        if own.is_none() && (!is_known || name.is_empty()) {
            return Err(expected(line, "a variable of nginx, or one that this file sets", &format!("${name}")));
        }
        by_query |= name == "request_uri";
        let attribute = own.unwrap_or(name).to_owned();
        if !all.contains(&attribute) {
            all.push(attribute);
        }
    }
    Ok((all, by_query))
}

/// `limit_req zone=NAME [burst=N] [nodelay | delay=N]`, with defaults for what other directives set.
pub(super) fn use_of_requests(directive: &Directive) -> Result<Use, Fault> {
    let line = directive.line;
    let (mut zone, mut burst, mut delay) = (None, 0, Some(0));
    for argument in &directive.arguments {
        let count = |text: &str| {
            number(line, &format!("{}= with a number", argument.split('=').next().unwrap_or("")), text, MOST)
        };
        match argument.split_once('=') {
            Some(("zone", name)) => zone = Some(name.to_owned()),
            Some(("burst", text)) => burst = count(text)?,
            Some(("delay", text)) => delay = Some(count(text)?),
            None if argument == "nodelay" => delay = None,
            _ => return Err(expected(line, "zone=, burst=, nodelay or delay=", argument)),
        }
    }
    let zone = zone.ok_or_else(|| fault(line, "zone=NAME is missing"))?;
    let delay = delay.filter(|delay| *delay < burst);
    Ok(Use { zone, asks: Asks::Requests { burst, delay }, status: 503, dry_run: false, line })
}

/// `limit_conn NAME N`
pub(super) fn use_of_connections(directive: &Directive) -> Result<Use, Fault> {
    let line = directive.line;
    let [zone, count] = &directive.arguments[..] else {
        return Err(expected(line, "limit_conn with a zone and a number", &quoted(&directive.arguments.join(" "))));
    };
    let what = format!("a number of connections from 1 to {MOST_PERMITS}");
    let count = number(line, &what, count, MOST_PERMITS)?;
    if count == 0 {
        return Err(expected(line, &what, "0"));
    }
    Ok(Use { zone: zone.clone(), asks: Asks::Connections(count), status: 503, dry_run: false, line })
}
