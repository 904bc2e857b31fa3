//! A web server's access log with a JSON object on each line, as nginx (`log_format ... escape=json`), Caddy and Envoy
//! write them. Fields are found by the names that these servers or their manuals use; others are ignored.

use std::borrow::Cow;
use std::net::SocketAddr;

use jiff::Timestamp;
use serde_json::{Map, Value};

use super::access::{self, Access, Time, in_range};
use super::field::{self, quoted, shown, unexpected};
use super::jsonl;

/// Names of a time at which the line was written, with the request answered: nginx's, Caddy's, and what log shippers
/// make of them.
const ENDED: [&str; 7] = ["msec", "time_iso8601", "time_local", "ts", "@timestamp", "timestamp", "time"];
/// Of the time at which the request arrived: Envoy's.
const BEGAN: &str = "start_time";
/// The address that the server takes for the client's, behind proxies too, before that of its peer.
const HOST: [&str; 8] = [
    "client_ip",
    "request.client_ip",
    "remote_addr",
    "remote_ip",
    "request.remote_ip",
    "request.remote_addr",
    "downstream_remote_address",
    "ip",
];
const USER: [&str; 3] = ["remote_user", "user_id", "user"];
const METHOD: [&str; 3] = ["request_method", "method", "request.method"];
const TARGET: [&str; 5] = ["request_uri", "uri", "path", "request.uri", "url"];
/// A whole request line: nginx's `$request`.
const REQUEST: &str = "request";

/// Seconds up to here are a time until the year 5138; larger numbers are milliseconds, then microseconds.
const MOST_SECONDS: f64 = 1e11;

/// The fields of an access log's line. None if the names aren't an access log's.
pub(super) fn parse(text: &[u8]) -> Result<Access<'static>, String> {
    let fields: Map<String, Value> = serde_json::from_str(jsonl::object(text)?).map_err(|e| jsonl::broken(&e))?;
    let time = time(&fields)?;
    let request = text_of(&fields, &[REQUEST]);
    let line = request.as_deref().map(str::as_bytes);
    let method = text_of(&fields, &METHOD).map(String::into_bytes);
    let method = method.or_else(|| Some(access::method(line?)?.to_vec()));
    let path = text_of(&fields, &TARGET).map(|target| access::without_query(target.as_bytes()).to_vec());
    let path = path.or_else(|| Some(access::path(line?)?.to_vec()));
    Ok(Access {
        time,
        took: took(&fields),
        host: text_of(&fields, &HOST).map(without_port).unwrap_or_default().into_bytes().into(),
        user: text_of(&fields, &USER).map(|user| user.into_bytes().into()),
        method: method.map(Cow::Owned),
        path: path.map(Cow::Owned),
        request: request.map_or_else(|| shown(text).into_bytes(), String::into_bytes).into(),
    })
}

/// Whether this line has the time and the client's address of an access log, and neither key nor attributes.
pub(super) fn is_likely(text: &[u8]) -> bool {
    let Ok(fields) = serde_json::from_slice::<Map<String, Value>>(text) else { return false };
    let is_record = ["t_us", "key", "attrs"].iter().any(|name| fields.contains_key(*name));
    !is_record && time(&fields).is_ok() && text_of(&fields, &HOST).is_some()
}

fn time(fields: &Map<String, Value>) -> Result<Time, String> {
    let named = |names: &[&str]| names.iter().find_map(|name| Some(((*name).to_owned(), fields.get(*name)?.clone())));
    if let Some((name, value)) = named(&[BEGAN]) {
        return micros_of(&name, &value).map(Time::Began);
    }
    let (name, value) = named(&ENDED)
        .ok_or_else(|| format!("time: expected one of {BEGAN}, {}, got {}", ENDED.join(", "), names_of(fields)))?;
    micros_of(&name, &value).map(Time::Ended)
}

fn names_of(fields: &Map<String, Value>) -> String {
    let names: Vec<_> = fields.keys().map(String::as_str).collect();
    if names.is_empty() { "no field".into() } else { shown(names.join(", ").as_bytes()) }
}

/// A time as RFC 3339, as in the Common Log Format, or as seconds, milliseconds or microseconds since 1970.
fn micros_of(name: &str, value: &Value) -> Result<u64, String> {
    let found = match value {
        Value::Number(number) => number.as_f64().and_then(since_1970).map(Ok),
        Value::String(text) => {
            let at = text.parse::<Timestamp>().ok().map(|at| in_range(at, text));
            let at = at.or_else(|| access::common_time(text));
            at.or_else(|| text.parse::<f64>().ok().and_then(since_1970).map(Ok))
        }
        _ => None,
    };
    let got = match value {
        Value::String(text) => quoted(text.as_bytes()),
        other => shown(other.to_string().as_bytes()),
    };
    let expected =
        "a time such as 2015-05-17T10:05:03Z, 17/May/2015:10:05:03 +0000 or 1431857103.25, from 1970 to 2112";
    found.unwrap_or_else(|| Err(unexpected(name, expected, &got)))
}

fn since_1970(number: f64) -> Option<u64> {
    let scale = match number {
        _ if !(0.0..=MOST_SECONDS * 1e6).contains(&number) => return None,
        _ if number < MOST_SECONDS => 1e6,
        _ if number < MOST_SECONDS * 1e3 => 1e3,
        _ => 1.0,
    };
    let us = (number * scale).round();
    (us <= field::MAX_T_US as f64).then_some(us as u64)
}

/// How long the request took: nginx's request_time and Caddy's duration in seconds, Envoy's duration in milliseconds.
fn took(fields: &Map<String, Value>) -> Option<u64> {
    let number = |name: &str| match fields.get(name)? {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => text.parse().ok(),
        _ => None,
    };
    let scale = if fields.contains_key(BEGAN) { 1e3 } else { 1e6 };
    let us = number("request_time").map(|seconds| seconds * 1e6).or_else(|| Some(number("duration")? * scale))?;
    (0.0..=f64::from(field::MAX_SECONDS) * 1e6).contains(&us).then(|| us.round() as u64)
}

/// The first of these fields that is a string with something in it; `a.b` is the field b of the object a.
fn text_of(fields: &Map<String, Value>, names: &[&str]) -> Option<String> {
    names.iter().find_map(|name| {
        let value = match name.split_once('.') {
            Some((object, name)) => fields.get(object)?.get(name)?,
            None => fields.get(*name)?,
        };
        value.as_str().filter(|text| !matches!(*text, "" | "-")).map(ToOwned::to_owned)
    })
}

/// Envoy writes a peer's address with its port.
fn without_port(host: String) -> String {
    host.parse::<SocketAddr>().map_or(host, |address| address.ip().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::{Identity, KeyField, Permits};

    /// 17 May 2015, 10:05:03.25 UTC.
    const T_US: u64 = 1_431_857_103_250_000;
    const NGINX: &str = r#"{"time_iso8601":"2015-05-17T10:05:03+00:00","msec":"1431857103.250","remote_addr":"1.2.3.4","remote_user":"ann","request":"GET /a/b?c=d HTTP/1.1","status":"200","request_time":"0.250","http_user_agent":"x \"y\""}"#;
    const CADDY: &str = r#"{"level":"info","ts":1431857103.25,"logger":"http.log.access","msg":"handled request","request":{"remote_ip":"10.0.0.1","remote_port":"41342","client_ip":"1.2.3.4","proto":"HTTP/2.0","method":"GET","host":"localhost","uri":"/a/b?c=d","headers":{"User-Agent":["curl"]}},"user_id":"ann","duration":0.25,"size":10900,"status":200}"#;
    const ENVOY: &str = r#"{"start_time":"2015-05-17T10:05:03.000Z","method":"GET","path":"/a/b?c=d","protocol":"HTTP/1.1","response_code":200,"duration":250,"downstream_remote_address":"1.2.3.4:4711","x_forwarded_for":"9.9.9.9","user_agent":null}"#;

    fn key(text: &str, by: KeyField) -> Result<String, String> {
        let record = parse(text.as_bytes()).and_then(|access| access.record(1, Identity::Key(by)))?;
        Ok(String::from_utf8_lossy(&record.key).into_owned())
    }

    #[test]
    fn lines_of_nginx_caddy_and_envoy_are_read() {
        for (line, user) in [(NGINX, Some("ann")), (CADDY, Some("ann")), (ENVOY, None)] {
            assert!(is_likely(line.as_bytes()), "{line}");
            let record = parse(line.as_bytes()).unwrap().record(7, Identity::Key(KeyField::Ip)).unwrap();
            assert_eq!((record.line, record.t_us, record.permits), (7, T_US - 250_000, Permits::Until(T_US)), "{line}");
            assert_eq!(record.key, b"1.2.3.4", "{line}");
            assert_eq!(key(line, KeyField::Path).as_deref(), Ok("/a/b"), "{line}");
            assert_eq!(key(line, KeyField::Method).as_deref(), Ok("GET"), "{line}");
            assert_eq!(key(line, KeyField::User).ok().as_deref(), user, "{line}");
            let attributes = parse(line.as_bytes()).unwrap().record(7, Identity::Attributes).unwrap().attributes;
            let path = ("path".to_owned(), b"/a/b".to_vec());
            assert!(attributes.contains(&path) && attributes.len() == 3 + usize::from(user.is_some()), "{line}");
        }
    }

    #[test]
    fn a_time_is_read_in_each_of_its_forms() {
        let at = |time: &str| parse(format!(r#"{{"ip":"a","time":{time}}}"#).as_bytes()).map(|access| access.time);
        for time in [
            "1431857103.25",
            "1431857103250",
            "1431857103250000",
            "\"1431857103.25\"",
            "\"2015-05-17T10:05:03.25Z\"",
            "\"2015-05-17T12:05:03.25+02:00\"",
        ] {
            assert_eq!(at(time), Ok(Time::Ended(T_US)), "{time}");
        }
        assert_eq!(at("\"17/May/2015:10:05:03 +0000\""), Ok(Time::Ended(T_US - 250_000)));
        for time in ["-1", "1e300", "\"yesterday\"", "null", "[1]", "\"1e99\"", "\"NaN\"", "6000000000"] {
            assert!(at(time).is_err_and(|why| why.starts_with("time: expected a time such as ")), "{time}");
        }
        assert!(at("\"1969-12-31T23:59:59Z\"").is_err_and(|why| why.contains("from 1970 to 2112")));
    }

    #[test]
    fn what_a_line_lacks_is_named() {
        let no_time = parse(br#"{"remote_addr":"a"}"#).unwrap_err();
        assert_eq!(
            no_time,
            "time: expected one of start_time, msec, time_iso8601, time_local, ts, @timestamp, timestamp, time, got remote_addr"
        );
        assert!(parse(b"{}").unwrap_err().ends_with("got no field"));
        assert_eq!(key(r#"{"ts":1,"uri":"/"}"#, KeyField::Ip), Err("no host on this line".into()));
        assert_eq!(key(r#"{"ts":1,"ip":"a","user":"-"}"#, KeyField::User), Err("no user on this line".into()));
        assert!(key(r#"{"ts":1,"ip":"a"}"#, KeyField::Path).is_err_and(|why| why.starts_with("no path on this line")));
        assert!(parse(b"[1]").is_err_and(|why| why.starts_with("line: expected a JSON object")));
        assert!(parse(b"{\"ts\":1").is_err_and(|why| why.starts_with("json: ")));
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
