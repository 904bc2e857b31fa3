//! A web server's access log with a JSON object on each line, as nginx (`log_format ... escape=json`), Caddy, Envoy and
//! Traefik write them. Fields are found by the names that these servers or their manuals use; others are ignored.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::access::{self, Access, Time};
use super::clients;
use super::field::{self, shown, unexpected};
use super::jsonl;
use super::place::Place;
use super::places::{DURATIONS, Line, Places, Unit, micros_with_unit};
use super::time;

/// Names of the time at which the request was answered and the line written: nginx's, Caddy's, and those that log
/// shippers use.
const ENDED: [&str; 7] = ["msec", "time_iso8601", "time_local", "ts", "@timestamp", "timestamp", "time"];
/// Names of the time at which the request arrived: Envoy's, and Traefik's, of which a configuration may drop one.
const BEGAN: [&str; 3] = ["start_time", "StartUTC", "StartLocal"];
/// Names of the client's address: first those for the address as the server finds it behind proxies, then its peer's.
const HOST: [&str; 10] = [
    "client_ip",
    "request.client_ip",
    "remote_addr",
    "remote_ip",
    "request.remote_ip",
    "request.remote_addr",
    "downstream_remote_address",
    "ClientHost",
    "ClientAddr",
    "ip",
];
const USER: [&str; 4] = ["remote_user", "user_id", "user", "ClientUsername"];
const METHOD: [&str; 4] = ["request_method", "method", "request.method", "RequestMethod"];
const TARGET: [&str; 6] = ["request_uri", "uri", "path", "request.uri", "url", "RequestPath"];
/// Names of the response's status: nginx's and Caddy's, Envoy's, Traefik's, and those of others.
const STATUS: [&str; 5] = ["status", "response_code", "DownstreamStatus", "status_code", "statusCode"];
/// A whole request line: nginx's `$request`.
const REQUEST: &str = "request";

/// A line's object.
pub(super) struct Object(Map<String, Value>);

pub(super) fn object(text: &[u8]) -> Result<Object, String> {
    serde_json::from_str(jsonl::object(text)?).map(Object).map_err(|e| jsonl::broken(&e))
}

/// The fields of an access log's line; `None` if it isn't about a request, as a server's own messages.
pub(super) fn access<'l>(object: &'l Object, places: &Places, text: &'l [u8]) -> Result<Option<Access<'l>>, String> {
    if places.have_time() && !places.are_times() {
        return places.read(object, None);
    }
    let Some(found) = own(&object.0, text, places)? else { return Ok(None) };
    let is_request = |access: &Access<'_>| places.are_none() || access.says_anything();
    Ok(places.read(object, Some(found))?.filter(is_request))
}

/// The fields of a known log; these places may add others.
fn own<'l>(fields: &'l Map<String, Value>, text: &'l [u8], places: &Places) -> Result<Option<Access<'l>>, String> {
    let host = text_of(fields, &HOST);
    let request = text_of(fields, &[REQUEST]);
    let line = request.map(str::as_bytes);
    let method = text_of(fields, &METHOD).map(str::as_bytes).or_else(|| access::method(line?));
    let path = text_of(fields, &TARGET).map(|target| access::path_of_target(Cow::Borrowed(target.as_bytes())));
    let path = path.or_else(|| Some(Cow::Borrowed(access::path(line?)?)));
    let anything = host.is_some() || line.is_some() || method.is_some() || path.is_some() || !places.are_none();
    let times = || {
        places.have_time() || fields.keys().any(|name| ENDED.contains(&name.as_str()) || BEGAN.contains(&name.as_str()))
    };
    if is_of_the_server_itself(fields) || (!anything && !fields.contains_key(REQUEST) && times()) {
        return Ok(None);
    }
    Ok(Some(Access {
        // Read from its given place later, if there is one.
        time: if places.have_time() { Time::Ended(0) } else { time(fields)? },
        took: took(fields),
        status: STATUS.iter().find_map(|name| field::status(&text_in(fields.get(*name)?)?)),
        host: host.unwrap_or_default().as_bytes().into(),
        user: text_of(fields, &USER).map(|user| user.as_bytes().into()),
        method: method.map(Cow::Borrowed),
        path,
        request: line.map_or_else(|| shown(text).into_bytes().into(), Cow::Borrowed),
    }))
}

/// Whether it is a message of Caddy or Traefik about themselves, or about an error in a request that has a line of its
/// own.
fn is_of_the_server_itself(fields: &Map<String, Value>) -> bool {
    let caddys = |logger: &str| !logger.starts_with("http.log.access") && fields.contains_key("ts");
    let apart = ["http", "admin", "tls", "pki", "events", "caddy"];
    text_of(fields, &["logger"])
        .is_some_and(|logger| caddys(logger) && apart.contains(&logger.split('.').next().unwrap_or_default()))
}

/// Whether this line has the time and the client's address of an access log, and neither key nor attributes.
pub(super) fn is_likely(text: &[u8]) -> bool {
    let Ok(object) = object(text) else { return false };
    !is_record(&object.0)
        && text_of(&object.0, &HOST).is_some()
        && matches!(own(&object.0, text, &Places::default()), Ok(Some(access)) if !access.host.is_empty())
}

/// Whether this line has what only a record has.
pub(super) fn is_likely_a_record(text: &[u8]) -> bool {
    object(text).is_ok_and(|object| is_record(&object.0))
}

fn is_record(fields: &Map<String, Value>) -> bool {
    ["t_us", "key", "attrs"].iter().any(|name| fields.contains_key(*name))
}

fn time(fields: &Map<String, Value>) -> Result<Time, String> {
    let named = |names: &[&str]| names.iter().find_map(|name| Some(((*name).to_owned(), fields.get(*name)?)));
    if let Some((name, value)) = named(&BEGAN) {
        return micros_of(&name, value).map(Time::Began);
    }
    match named(&ENDED) {
        Some((name, value)) => micros_of(&name, value).map(Time::Ended),
        None => {
            let expected = format!("one of {}, {}", BEGAN.join(", "), ENDED.join(", "));
            Err(unexpected("time", &expected, &names_of(fields)))
        }
    }
}

fn names_of(fields: &Map<String, Value>) -> String {
    let names: Vec<_> = fields.keys().map(String::as_str).collect();
    if names.is_empty() { "no field".into() } else { shown(names.join(", ").as_bytes()) }
}

fn micros_of(name: &str, value: &Value) -> Result<u64, String> {
    match value {
        Value::String(text) => time::read(name, text.as_bytes()),
        Value::Number(number) if number.as_f64().and_then(time::since_1970).is_some() => {
            Ok(number.as_f64().and_then(time::since_1970).unwrap_or_default())
        }
        // The message quotes it.
        other => time::read(name, shown(other.to_string().as_bytes()).as_bytes()),
    }
}

/// How long the request took, where the unit is known: nginx's request_time and Caddy's duration, with decimals, are in
/// seconds, Envoy's in milliseconds, Traefik's in nanoseconds. Any other service may write anything under these names.
fn took(fields: &Map<String, Value>) -> Option<u64> {
    let of = |name: &str, unit: Unit| match fields.get(name)? {
        Value::Number(number) => unit.micros(number.as_f64()?),
        Value::String(text) => {
            text.parse().ok().and_then(|number| unit.micros(number)).or_else(|| micros_with_unit(text))
        }
        _ => None,
    };
    let has = |name: &&str| fields.contains_key(*name);
    // nginx always writes three decimals. Caddy writes none if it is configured for nanoseconds or milliseconds.
    let has_decimals = |name: &str| fields.get(name).is_some_and(|value| value.as_u64().is_none());
    let is_caddys = text_of(fields, &["logger"]).is_some_and(|logger| logger.starts_with("http.log.access"));
    let envoys = ["downstream_remote_address", "response_flags", "upstream_cluster", "upstream_host"];
    if has(&"request_time") && has_decimals("request_time") {
        of("request_time", Unit::Seconds)
    } else if is_caddys && has_decimals("duration") {
        of("duration", Unit::Seconds)
    } else if has(&"start_time") && envoys.iter().any(has) {
        of("duration", Unit::Milliseconds)
    } else if has(&"StartUTC") || has(&"StartLocal") {
        of("Duration", Unit::Nanoseconds)
    } else {
        // Or the value has its unit.
        fields.get("duration").and_then(Value::as_str).and_then(micros_with_unit)
    }
}

/// The first of these fields that is a string and not empty; `a.b` is the field b of the object a.
fn text_of<'l>(fields: &'l Map<String, Value>, names: &[&str]) -> Option<&'l str> {
    names.iter().find_map(|name| {
        let value = match name.split_once('.') {
            Some((object, name)) => fields.get(object)?.get(name)?,
            None => fields.get(*name)?,
        };
        value.as_str().filter(|text| !matches!(*text, "" | "-"))
    })
}

/// The value under this name, whose dots lead into objects and lists unless they belong to a name themselves, as
/// shippers write `client.ip`.
fn value<'l>(fields: &'l Map<String, Value>, name: &str) -> Option<&'l Value> {
    if let Some(value) = fields.get(name) {
        return Some(value);
    }
    name.match_indices('.').find_map(|(dot, _)| {
        let (outer, inner) = (&name[..dot], &name[dot + 1..]);
        match fields.get(outer)? {
            Value::Object(fields) => value(fields, inner),
            Value::Array(list) => list.get(inner.parse::<usize>().ok()?),
            _ => None,
        }
    })
}

fn text_in(value: &Value) -> Option<Cow<'_, [u8]>> {
    match value {
        Value::String(text) => Some(Cow::Borrowed(text.as_bytes())),
        Value::Number(number) => Some(Cow::Owned(number.to_string().into_bytes())),
        // The values of a repeated header.
        Value::Array(list) => {
            let texts: Vec<_> = list.iter().filter_map(Value::as_str).collect();
            (!texts.is_empty()).then(|| Cow::Owned(texts.join(", ").into_bytes()))
        }
        Value::Null => Some(Cow::Borrowed(b"")),
        Value::Bool(_) | Value::Object(_) => None,
    }
}

impl Line for Object {
    fn at(&self, place: &Place) -> Option<Cow<'_, [u8]>> {
        let Place::Named(name) = place else { return None };
        text_in(value(&self.0, name)?)
    }

    fn forwarded(&self) -> Vec<(Place, Cow<'_, [u8]>)> {
        const NAMES: [&str; 6] = ["forward", "xff", "client", "real", "connecting", "remote"];
        let telling = |name: &str| NAMES.iter().any(|part| name.to_ascii_lowercase().contains(part));
        self.leaves()
            .into_iter()
            .filter_map(|(name, value)| {
                let is_host = HOST.contains(&name.as_str()) && name != "remote_ip";
                (telling(&name) && !is_host).then_some((Place::Named(name), text_in(value)?))
            })
            .collect()
    }
}

impl Object {
    /// An object from a table's columns and one row.
    pub(super) fn of_row(columns: &[String], row: &[String]) -> Self {
        Self(columns.iter().cloned().zip(row.iter().cloned().map(Value::String)).collect())
    }

    /// All texts and numbers, by their names with dots; a list of texts counts as one.
    pub(super) fn leaves(&self) -> Vec<(String, &Value)> {
        fn collect<'l>(prefix: &str, fields: &'l Map<String, Value>, into: &mut Vec<(String, &'l Value)>) {
            for (name, value) in fields {
                let name = format!("{prefix}{name}");
                match value {
                    Value::Object(fields) => collect(&format!("{name}."), fields, into),
                    value => into.push((name, value)),
                }
            }
        }
        let mut leaves = Vec::new();
        collect("", &self.0, &mut leaves);
        leaves
    }

    /// The field that has a whole log line, as told by `is_line`: Docker, journald and shippers write such objects
    /// around a program's lines.
    pub(super) fn field_of_lines(&self, is_line: &dyn Fn(&[u8]) -> bool) -> Option<String> {
        let has_line = |value: &Value| value.as_str().is_some_and(|text| is_line(text.trim_ascii_end().as_bytes()));
        self.leaves().into_iter().find(|(_, value)| has_line(value)).map(|(name, _)| name)
    }

    /// A suggestion for --fields, if the names and values of its fields allow one.
    pub(super) fn suggested(&self) -> Option<String> {
        let leaves = self.leaves();
        let find = |names: &[&str], fits: &dyn Fn(&[u8]) -> bool| {
            let last = |name: &str| name.rsplit('.').next().unwrap_or_default().to_ascii_lowercase();
            let fitting = |is_named: &dyn Fn(&str) -> bool| {
                let fits = |(name, value): &&(String, &Value)| {
                    is_named(name) && text_in(value).is_some_and(|text| fits(&text))
                };
                leaves.iter().find(fits).map(|(name, _)| name.as_str())
            };
            let exactly = names.iter().find_map(|part| fitting(&|name| last(name) == **part));
            exactly.or_else(|| names.iter().find_map(|part| fitting(&|name| last(name).contains(*part))))
        };
        let start = find(&["start"], &time::is_one);
        let time = start.or_else(|| find(&["timestamp", "time", "date", "ts", "at", ""], &time::is_one))?;
        let names = ["client", "ip", "remote", "addr", "source", ""];
        let ip = find(&names, &|text| clients::read(text).is_some())?;
        let method = find(&["method", "verb", ""], &|text| {
            matches!(text, b"GET" | b"HEAD" | b"POST" | b"PUT" | b"DELETE" | b"PATCH" | b"OPTIONS")
        });
        let is_path = |text: &[u8]| text.starts_with(b"/") || text.starts_with(b"http");
        // url.original is the Elastic Common Schema's name of the requested target.
        let path = find(&["path", "uri", "url", "target", "original"], &is_path);
        let request =
            find(&["request", "requestline", ""], &|text| text.contains(&b' ') && access::path(text).is_some());
        let number = |text: &[u8]| text.first().is_some_and(u8::is_ascii_digit);
        let duration = find(&DURATIONS, &number)
            .or_else(|| leaves.iter().map(|(name, _)| name.as_str()).find(|name| *name == "latencies.request"));
        let with_unit = |name: &str| {
            Unit::of_field(name).is_some() || {
                let text = leaves.iter().find(|(other, _)| other == name).and_then(|(_, value)| value.as_str());
                text.is_some_and(|text| micros_with_unit(text).is_some())
            }
        };
        // In Google Cloud's entries, timestamp is when the request arrived.
        let of_google = time == "timestamp" && leaves.iter().any(|(name, _)| name == "httpRequest.latency");
        let mut said = format!("{}={time},ip={ip}", if start.is_some() || of_google { "start" } else { "time" });
        match (method.zip(path), request) {
            (Some((method, path)), _) => said.push_str(&format!(",method={method},path={path}")),
            (None, Some(request)) => said.push_str(&format!(",request={request}")),
            (None, None) => {}
        }
        if let Some(duration) = duration.filter(|name| with_unit(name)) {
            said.push_str(&format!(",duration={duration}"));
        }
        Some(said)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::clients::Clients;
    use crate::records::{Identity, KeyField, Permits, Record};

    /// 17 May 2015, 10:05:03.25 UTC.
    const T_US: u64 = 1_431_857_103_250_000;
    const NGINX: &str = r#"{"time_iso8601":"2015-05-17T10:05:03+00:00","msec":"1431857103.250","remote_addr":"1.2.3.4","remote_user":"ann","request":"GET /a/b?c=d HTTP/1.1","status":"200","request_time":"0.250","http_user_agent":"x \"y\""}"#;
    const CADDY: &str = r#"{"level":"info","ts":1431857103.25,"logger":"http.log.access","msg":"handled request","request":{"remote_ip":"10.0.0.1","remote_port":"41342","client_ip":"1.2.3.4","proto":"HTTP/2.0","method":"GET","host":"localhost","uri":"/a/b?c=d","headers":{"User-Agent":["curl"]}},"user_id":"ann","duration":0.25,"size":10900,"status":200}"#;
    const ENVOY: &str = r#"{"start_time":"2015-05-17T10:05:03.000Z","method":"GET","path":"/a/b?c=d","protocol":"HTTP/1.1","response_code":200,"duration":250,"downstream_remote_address":"1.2.3.4:4711","x_forwarded_for":"9.9.9.9","user_agent":null}"#;

    fn key(text: &str, by: KeyField) -> Result<String, String> {
        let record = record(text, Identity::Key(by))?;
        Ok(String::from_utf8_lossy(&record.key).into_owned())
    }

    fn record(text: &str, about: Identity) -> Result<Record, String> {
        let object = object(text.as_bytes())?;
        let access = access(&object, &Places::default(), text.as_bytes())?.ok_or("no request")?;
        access.record(7, about, &Clients::default(), None)
    }

    #[test]
    fn lines_of_nginx_caddy_and_envoy_are_read() {
        for (line, user) in [(NGINX, Some("ann")), (CADDY, Some("ann")), (ENVOY, None)] {
            assert!(is_likely(line.as_bytes()), "{line}");
            let read = record(line, Identity::Key(KeyField::Ip)).unwrap();
            assert_eq!((read.line, read.t_us, read.permits), (7, T_US - 250_000, Permits::Until(T_US)), "{line}");
            assert_eq!(read.key, b"1.2.3.4", "{line}");
            assert_eq!(key(line, KeyField::Path).as_deref(), Ok("/a/b"), "{line}");
            assert_eq!(key(line, KeyField::Method).as_deref(), Ok("GET"), "{line}");
            assert_eq!(key(line, KeyField::User).ok().as_deref(), user, "{line}");
            let attributes = record(line, Identity::Attributes).unwrap().attributes;
            let path = ("path".to_owned(), b"/a/b".to_vec());
            assert!(attributes.contains(&path) && attributes.len() == 3 + usize::from(user.is_some()), "{line}");
        }
    }

    #[test]
    fn a_duration_whose_unit_is_not_known_is_none() {
        for (fields, took) in [
            (r#""request_time":0.25"#, Some(250_000)),
            (r#""request_time":"0.250""#, Some(250_000)),
            (r#""request_time":250"#, None),
            (r#""duration":250"#, None),
            (r#""duration":0.25"#, None),
            (r#""duration":"250ms""#, Some(250_000)),
            (r#""logger":"http.log.access.log0","duration":0.25"#, Some(250_000)),
            (r#""logger":"http.log.access.log0","duration":4.5e-05"#, Some(45)),
            // Caddy with `duration_format` nano or ms.
            (r#""logger":"http.log.access.log0","duration":45000"#, None),
            (r#""logger":"http.log.access.log0","duration":"5.06336ms""#, Some(5_063)),
            (r#""start_time":1,"duration":250"#, None),
            (r#""start_time":1,"response_flags":"-","duration":250"#, Some(250_000)),
            (r#""StartUTC":"2015-05-17T10:05:03Z","Duration":250000000"#, Some(250_000)),
            (r#""StartLocal":"2015-05-17T12:05:03+02:00","Duration":250000000"#, Some(250_000)),
        ] {
            let text = format!(r#"{{"ts":1431857103,"remote_addr":"a",{fields}}}"#);
            let object = object(text.as_bytes()).unwrap();
            let access = access(&object, &Places::default(), text.as_bytes()).unwrap().unwrap();
            assert_eq!(access.took, took, "{fields}");
        }
    }

    #[test]
    fn what_a_server_says_of_itself_is_no_request() {
        for text in [
            r#"{"level":"info","ts":1700000000.1,"msg":"using config from file","file":"/etc/caddy/Caddyfile"}"#,
            r#"{"level":"info","ts":1700000000.1,"logger":"admin.api","msg":"received request","method":"GET","uri":"/config/","remote_ip":"127.0.0.1"}"#,
            r#"{"level":"error","ts":1700000000.1,"logger":"http.log.error","msg":"refused","request":{"remote_ip":"192.0.2.1","method":"GET","uri":"/"},"duration":0.1}"#,
            r#"{"level":"info","msg":"Configuration loaded from flags.","time":"2024-01-01T00:00:00Z"}"#,
        ] {
            assert_eq!(key(text, KeyField::Ip), Err("no request".to_owned()), "{text}");
            assert!(!is_likely(text.as_bytes()), "{text}");
        }
    }

    #[test]
    fn a_time_is_read_in_each_of_its_forms() {
        let at = |time: &str| {
            record(&format!(r#"{{"ip":"a","time":{time}}}"#), Identity::Key(KeyField::Ip)).map(|record| record.t_us)
        };
        for time in [
            "1431857103.25",
            "1431857103250",
            "1431857103250000",
            "1431857103250000000",
            "\"2015-05-17 10:05:03.25\"",
            "\"1431857103.25\"",
            "\"2015-05-17T10:05:03.25Z\"",
            "\"2015-05-17T12:05:03.25+02:00\"",
        ] {
            assert_eq!(at(time), Ok(T_US), "{time}");
        }
        assert_eq!(at("\"17/May/2015:10:05:03 +0000\""), Ok(T_US - 250_000));
        for time in ["-1", "1e300", "\"yesterday\"", "null", "[1]", "\"1e99\"", "\"NaN\"", "6000000000"] {
            assert!(at(time).is_err_and(|why| why.starts_with("time: expected a time such as ")), "{time}");
        }
        assert!(at("\"1969-12-31T23:59:59Z\"").is_err_and(|why| why.contains("from 1970 to 2112")));
    }

    #[test]
    fn what_a_line_lacks_is_named() {
        let no_time = key(r#"{"remote_addr":"a"}"#, KeyField::Ip).unwrap_err();
        assert_eq!(
            no_time,
            "time: expected one of start_time, StartUTC, StartLocal, msec, time_iso8601, time_local, ts, @timestamp, timestamp, time, got remote_addr"
        );
        assert!(key("{}", KeyField::Ip).unwrap_err().ends_with("got no field"));
        assert_eq!(key(r#"{"ts":1,"uri":"/"}"#, KeyField::Ip), Err("no host on this line".into()));
        assert_eq!(key(r#"{"ts":1,"ip":"a","user":"-"}"#, KeyField::User), Err("no user on this line".into()));
        assert!(key(r#"{"ts":1,"ip":"a"}"#, KeyField::Path).is_err_and(|why| why.starts_with("no path on this line")));
        assert!(key("[1]", KeyField::Ip).is_err_and(|why| why.starts_with("line: expected a JSON object")));
        assert!(key("{\"ts\":1", KeyField::Ip).is_err_and(|why| why.starts_with("json: ")));
    }

    #[test]
    fn records_and_other_objects_are_no_access_log() {
        for text in [
            r#"{"t_us":1,"key":"a","ts":1,"ip":"a"}"#,
            r#"{"attrs":{},"ts":1,"ip":"a"}"#,
            r#"{"ts":1}"#,
            r#"{"ip":"a"}"#,
            r#"{"ts":"x","ip":"a"}"#,
            "{",
            "[]",
        ] {
            assert!(!is_likely(text.as_bytes()), "{text}");
        }
    }
}
