//! Where the lines of an access log have their fields: `--fields time=ts,ip=client.ip,duration=took:ms`.

use std::borrow::Cow;
use std::str::FromStr;

use super::access::{self, Access, Time};
use super::clients::without_port;
use super::field::{self, MAX_SECONDS, quoted, unexpected};
use super::place::Place;
use super::time;

/// A line whose fields can be asked for.
pub(super) trait Line {
    /// The text of a field, if the line has it.
    fn at(&self, place: &Place) -> Option<Cow<'_, [u8]>>;

    /// The same for a list of addresses, with the spaces that the format replaces.
    fn addresses(&self, place: &Place) -> Option<Cow<'_, [u8]>> {
        self.at(place)
    }

    /// The fields that may have a client's address as written by a proxy, each with its text.
    fn forwarded(&self) -> Vec<(Place, Cow<'_, [u8]>)>;
}

/// The given places.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Places {
    time: Option<Place>,
    start: Option<Place>,
    ip: Option<Place>,
    /// Whether every address at `ip` has a port.
    ports: bool,
    /// Where the address is, on lines without one at `ip`.
    peer: Option<Place>,
    user: Option<Place>,
    method: Option<Place>,
    path: Option<Place>,
    request: Option<Place>,
    status: Option<Place>,
    duration: Option<Took>,
}

/// How long a request took, as the sum of some fields.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Took {
    of: Vec<Place>,
    /// `None` if each value has its own.
    unit: Option<Unit>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    Seconds,
    Milliseconds,
    Microseconds,
    Nanoseconds,
}

/// Fields whose unit their makers document: nginx's, pino's, the Elastic Common Schema's, Kong's, Traefik's,
/// Cloudflare's.
const DOCUMENTED: [(&str, Unit); 7] = [
    ("request_time", Unit::Seconds),
    ("responseTime", Unit::Milliseconds),
    ("event.duration", Unit::Nanoseconds),
    ("latencies.request", Unit::Milliseconds),
    ("Duration", Unit::Nanoseconds),
    ("EdgeTimeToFirstByteMs", Unit::Milliseconds),
    ("OriginResponseDurationMs", Unit::Milliseconds),
];

/// Parts of the names that programs choose for fields with a duration.
pub(super) const DURATIONS: [&str; 6] = ["duration", "latency", "latencies", "elapsed", "responsetime", "took"];

impl Unit {
    fn named(text: &str) -> Option<Self> {
        Some(match text {
            "s" => Self::Seconds,
            "ms" => Self::Milliseconds,
            "us" | "µs" => Self::Microseconds,
            "ns" => Self::Nanoseconds,
            _ => return None,
        })
    }

    /// The unit that a field's name implies.
    pub(super) fn of_field(name: &str) -> Option<Self> {
        let documented = DOCUMENTED.iter().find(|(field, _)| *field == name).map(|(_, unit)| *unit);
        let suffix = || {
            name.rsplit_once(['_', '-']).and_then(|(_, last)| match last {
                "sec" | "secs" | "seconds" => Some(Self::Seconds),
                "msec" | "millis" | "milliseconds" => Some(Self::Milliseconds),
                "micros" | "microseconds" => Some(Self::Microseconds),
                "nanos" | "nanoseconds" => Some(Self::Nanoseconds),
                last => Self::named(last),
            })
        };
        documented.or_else(suffix)
    }

    pub(super) fn micros(self, number: f64) -> Option<u64> {
        let us = match self {
            Self::Seconds => number * 1e6,
            Self::Milliseconds => number * 1e3,
            Self::Microseconds => number,
            Self::Nanoseconds => number / 1e3,
        };
        (0.0..=f64::from(MAX_SECONDS) * 1e6).contains(&us).then(|| us.round() as u64)
    }
}

/// `12ms` or `0.25s` in microseconds.
pub(super) fn micros_with_unit(text: &str) -> Option<u64> {
    let number = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    Unit::named(&text[number.len()..])?.micros(number.parse().ok()?)
}

impl Took {
    /// In microseconds; `None` if the line doesn't say.
    fn of(&self, line: &dyn Line) -> Result<Option<u64>, String> {
        let mut sum = 0;
        for place in &self.of {
            let Some(text) = line.at(place).filter(|text| !is_nothing(text)) else { return Ok(None) };
            let value = String::from_utf8_lossy(&text);
            let got = || quoted(&text);
            let us = match (value.trim_matches('+').parse::<f64>(), self.unit) {
                // As written for a request without an answer.
                (Ok(number), _) if number < 0.0 => return Ok(None),
                (Ok(number), Some(unit)) => unit.micros(number),
                (Ok(_), None) => {
                    let how = format!("its unit, as in --fields duration={place}:ms (s, ms, us or ns)");
                    return Err(unexpected("duration", &how, &got()));
                }
                (Err(_), _) => micros_with_unit(&value),
            };
            sum +=
                us.ok_or_else(|| unexpected("duration", "a number such as 12 or 0.25s, of a day at most", &got()))?;
        }
        Ok(Some(sum))
    }
}

/// Whether a field stands for no value.
fn is_nothing(text: &[u8]) -> bool {
    matches!(text, b"" | b"-")
}

impl Places {
    pub(super) fn are_none(&self) -> bool {
        *self == Self::default()
    }

    /// Whether they say where the time is, so that no other format is needed.
    pub(crate) fn have_time(&self) -> bool {
        self.time.is_some() || self.start.is_some()
    }

    /// Adds the place of the connection's address, for lines that have no other.
    pub(super) fn or_peer(self, peer: Option<i16>) -> Self {
        Self { peer: peer.map(Place::At), ..self }
    }

    /// Expects a port after every address.
    pub(super) fn with_ports(self) -> Self {
        Self { ports: true, ..self }
    }

    pub(super) fn have_ip(&self) -> bool {
        self.ip.is_some()
    }

    /// All of them.
    pub(super) fn all(&self) -> impl Iterator<Item = &Place> {
        let times = [&self.time, &self.start];
        let ones = [&self.ip, &self.user, &self.method, &self.path, &self.request, &self.status];
        times.into_iter().chain(ones).flatten().chain(self.duration.iter().flat_map(|took| &took.of))
    }

    /// Whether they are only of the time, the duration and the status, so that the format gives the rest.
    pub(super) fn are_times(&self) -> bool {
        let Self { ip, user, method, path, request, .. } = self;
        [ip, user, method, path, request].iter().all(|place| place.is_none())
    }

    pub(super) fn have_duration(&self) -> bool {
        self.duration.is_some()
    }

    /// The names, if all are names.
    pub(super) fn names(&self) -> Option<impl Iterator<Item = &str>> {
        self.all().all(|place| place.name().is_some()).then(|| self.all().filter_map(Place::name))
    }

    /// What these places say, over what the format found; `None` if the line has neither an address nor a request.
    pub(super) fn read<'l>(&self, line: &'l dyn Line, found: Option<Access<'l>>) -> Result<Option<Access<'l>>, String> {
        if self.are_none() {
            return Ok(found);
        }
        let get = |place: &Option<Place>| line.at(place.as_ref()?).filter(|text| !is_nothing(text));
        let request = get(&self.request);
        let part = |of: fn(&[u8]) -> Option<&[u8]>| match request.as_ref()? {
            Cow::Borrowed(request) => of(request).map(Cow::Borrowed),
            Cow::Owned(request) => of(request).map(|part| Cow::Owned(part.to_vec())),
        };
        let method = get(&self.method).or_else(|| part(access::method));
        let path = get(&self.path).map(access::path_of_target).or_else(|| part(access::path));
        let own = get(&self.ip).map(|host| if self.ports { client(host) } else { host });
        let (host, user) = (own.or_else(|| get(&self.peer)), get(&self.user));
        if found.is_none() && host.is_none() && method.is_none() && path.is_none() && request.is_none() {
            return Ok(None);
        }
        let at = |name: &str, place: &Place| {
            let text = line.at(place).ok_or_else(|| format!("{name}: no field {place} on this line"))?;
            time::read(name, &text)
        };
        let time = match (&self.time, &self.start, &found) {
            (Some(place), ..) => Time::Ended(at("time", place)?),
            (None, Some(place), _) => Time::Began(at("start", place)?),
            (None, None, Some(found)) => found.time,
            (None, None, None) => {
                return Err("the time is missing: give time=FIELD or start=FIELD in --fields".to_owned());
            }
        };
        let took = match &self.duration {
            Some(took) => took.of(line)?,
            None => found.as_ref().and_then(|found| found.took),
        };
        let found = found.unwrap_or_else(|| Access::at(time));
        Ok(Some(Access {
            time,
            took,
            status: get(&self.status).and_then(|text| field::status(&text)).or(found.status),
            host: host.unwrap_or(found.host),
            user: user.or(found.user),
            method: method.or(found.method),
            path: path.or(found.path),
            request: request.unwrap_or(found.request),
        }))
    }
}

/// The client without its port.
fn client(host: Cow<'_, [u8]>) -> Cow<'_, [u8]> {
    match (without_port(&host).map(<[u8]>::len), host) {
        (Some(length), Cow::Borrowed(host)) => Cow::Borrowed(&host[..length]),
        (Some(length), Cow::Owned(mut host)) => {
            host.truncate(length);
            Cow::Owned(host)
        }
        (None, host) => host,
    }
}

impl FromStr for Took {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (fields, unit) = match text.rsplit_once(':') {
            None => (text, None),
            Some((fields, unit)) => {
                let named = Unit::named(unit).ok_or_else(|| {
                    unexpected("duration", "a unit after the colon, s, ms, us or ns", &quoted(unit.as_bytes()))
                })?;
                (fields, Some(named))
            }
        };
        let of = fields.split('+').map(str::parse).collect::<Result<Vec<Place>, _>>()?;
        let unit = unit.or_else(|| match of.as_slice() {
            [Place::Named(name)] => Unit::of_field(name),
            _ => None,
        });
        Ok(Self { of, unit })
    }
}

impl FromStr for Places {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut places = Self::default();
        for given in text.split(',') {
            let pair = given.split_once('=').filter(|(_, place)| !place.is_empty());
            let (name, place) = pair.ok_or_else(|| {
                let got = quoted(given.as_bytes());
                format!("expected NAME=FIELD with commas between, such as time=ts,ip=client.address, got {got}")
            })?;
            let slot = match name {
                "time" => &mut places.time,
                "start" => &mut places.start,
                "ip" => &mut places.ip,
                "user" => &mut places.user,
                "method" => &mut places.method,
                "path" => &mut places.path,
                "request" => &mut places.request,
                "status" => &mut places.status,
                "duration" if places.duration.is_none() => {
                    places.duration = Some(place.parse()?);
                    continue;
                }
                "duration" => return Err("duration is given twice".to_owned()),
                other => {
                    let names = "time, start, ip, user, method, path, request, status or duration before the =";
                    return Err(format!("expected {names}, got {}", quoted(other.as_bytes())));
                }
            };
            if slot.replace(place.parse()?).is_some() {
                return Err(format!("{name} is given twice"));
            }
        }
        if places.time.is_some() && places.start.is_some() {
            return Err("time, when requests ended, and start, when they arrived, exclude each other".to_owned());
        }
        Ok(places)
    }
}
