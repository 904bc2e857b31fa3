//! Logs as servers and services write them: each file in `tests/data/logs` is read as it is, or with the options beside
//! it, and its records are those in the `.expected` file of its name.

use std::fs;
use std::path::{Path, PathBuf};

use super::*;
use crate::support::tool::{code, lines, stderr, tollgate};

/// Each file, with what it takes to read it.
const LOGS: [(&str, &[&str]); 55] = [
    ("apache-combined.log", &[]),
    ("apache-common.log", &[]),
    ("apache-duration.log", &["--fields", "start=4,duration=-1:us"]),
    ("apache-forwarded-first.log", &[]),
    ("apache-micros.log", &[]),
    ("apache-named-users.log", &[]),
    ("apache-vhost-combined.log", &[]),
    ("aws-alb.log", &[]),
    ("aws-classic-elb.log", &[]),
    ("aws-cloudfront.log", &[]),
    ("aws-s3.log", &[]),
    ("caddy-nano.log", &[]),
    ("caddy-wall.log", &[]),
    ("caddy.log", &[]),
    (
        "cloudflare-logpush-unixnano.log",
        &["--fields", "start=EdgeStartTimestamp,ip=ClientIP,method=ClientRequestMethod,path=ClientRequestPath"],
    ),
    (
        "cloudflare-logpush.log",
        &[
            "--fields",
            "start=EdgeStartTimestamp,ip=ClientIP,method=ClientRequestMethod,path=ClientRequestURI,\
             duration=EdgeTimeToFirstByteMs",
        ],
    ),
    (
        "cloudfront-export.csv",
        &["--fields", "time=date_time,ip=request_ip,method=method,path=uri,duration=time_taken:s"],
    ),
    ("docker-compose.log", &[]),
    (
        "ecs-dotted.log",
        &["--fields", "time=@timestamp,ip=client.ip,method=http.request.method,path=url.path,duration=event.duration"],
    ),
    (
        "ecs.log",
        &[
            "--fields",
            "time=@timestamp,ip=source.ip,user=user.name,method=http.request.method,path=url.path,\
             duration=event.duration",
        ],
    ),
    ("envoy-text.log", &[]),
    (
        "gcp-load-balancer.log",
        &[
            "--fields",
            "start=timestamp,ip=httpRequest.remoteIp,method=httpRequest.requestMethod,path=httpRequest.requestUrl,\
             duration=httpRequest.latency",
        ],
    ),
    ("gunicorn-socket.log", &[]),
    ("gunicorn.log", &[]),
    ("haproxy-cut-off.log", &[]),
    ("haproxy-docs.log", &[]),
    ("haproxy-http.log", &[]),
    ("heroku-router.log", &[]),
    ("iis-forwarded.log", &["--client-address", "X-Forwarded-For", "--proxies", "10.0.0.0/8"]),
    ("iis-w3c.log", &[]),
    ("istio-json.log", &[]),
    ("istio-text.log", &[]),
    (
        "kong.log",
        &[
            "--fields",
            "start=started_at,ip=client_ip,method=request.method,path=request.uri,duration=latencies.request",
        ],
    ),
    ("logfmt-own.log", &["--fields", "time=ts,ip=client,method=method,path=path,duration=took"]),
    ("nginx-combined.log", &[]),
    ("nginx-forwarded-first.log", &[]),
    ("nginx-forwarded-quoted.log", &["--proxies", "198.51.100.0/24"]),
    ("nginx-ingress.log", &[]),
    ("nginx-iso8601-first.log", &[]),
    ("nginx-iso8601.log", &[]),
    ("nginx-json-msec.log", &[]),
    ("nginx-json.log", &["--client-address", "x_forwarded_for", "--proxies", "127.0.0.0/8,198.51.100.0/24"]),
    ("nginx-main.log", &["--client-address", "last-quoted"]),
    ("nginx-named-durations.log", &[]),
    ("nginx-odd-users.log", &[]),
    ("nginx-request-time.log", &[]),
    ("nginx-syslog.log", &[]),
    ("pino.log", &["--fields", "time=time,ip=req.remoteAddress,method=req.method,path=req.url,duration=responseTime"]),
    ("traefik-clf.log", &[]),
    ("traefik-json-local.log", &[]),
    ("traefik-json.log", &[]),
    ("w3c-own.log", &["--fields", "duration=time-taken:s"]),
    (
        "winston-own.log",
        &[
            "--fields",
            "time=timestamp,ip=meta.client.address,method=meta.verb,path=meta.target,duration=meta.elapsed:ms",
        ],
    ),
    ("words-own.log", &["--fields", "time=1,ip=2,user=3,request=4,duration=6:ms"]),
    ("zap-own.log", &["--fields", "duration=duration:s"]),
];

/// A set whose rule shows what it reads of a request, durations too.
const RULES: &str = "[[rule]]\nname = \"a\"\nkey = \"global\"\nlimits = [\"concurrency 10000 ttl 1d\"]\n";

fn folder() -> PathBuf {
    root().join("tests/data/logs")
}

/// Runs a replay of a file, and what it says on standard error.
fn read(file: &Path, options: &[&str]) -> (Output, String) {
    let rules = tempfile::NamedTempFile::new().expect("a file");
    fs::write(&rules, RULES).expect("written");
    let (rules, file) = (rules.path().to_str().expect("UTF-8"), file.to_str().expect("UTF-8"));
    let output = tollgate(&[&["replay", "--unsorted", "--rules", rules, file][..], options].concat());
    let said = stderr(&output);
    (output, said)
}

/// What was read of each request, one on a line.
fn records(output: &Output) -> String {
    let record = |line: &Value| {
        let names = ["ip", "method", "path", "user"];
        let attrs: Vec<_> = names.iter().map(|name| line["attrs"][name].as_str().unwrap_or("-")).collect();
        let took = line["request_time"].as_str().unwrap_or("-");
        format!("{} {took} {}\n", line["t_us"], attrs.join(" "))
    };
    lines(output).iter().map(record).collect()
}

#[test]
fn every_file_is_read_as_it_is() {
    let mut files: Vec<_> =
        fs::read_dir(folder()).expect("a folder").map(|file| file.expect("a file").path()).collect();
    files.retain(|file| file.extension().is_some_and(|ending| ending == "log" || ending == "csv"));
    assert_eq!(files.len(), LOGS.len() + 1, "each is listed, and uvicorn's, which has no time");
    let mut wrong = String::new();
    for (name, options) in LOGS {
        let (output, said) = read(&folder().join(name), options);
        let expected = folder().join(name).with_extension("expected");
        if std::env::var_os("TOLLGATE_BLESS").is_some() {
            fs::write(&expected, records(&output)).expect("written");
        }
        let (got, expected) = (records(&output), fs::read_to_string(expected).unwrap_or_default());
        let unread = said.contains("skipped") || said.contains("error:");
        if code(&output) != 0 || unread || got != expected || got.is_empty() {
            wrong.push_str(&format!("{name}: {said}{got}expected\n{expected}\n"));
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

/// A log whose fields have names of their own is refused once, with options that read it.
#[test]
fn what_has_no_known_format_is_refused_with_the_fields_to_give() {
    let needs = |options: &[&str]| options.first() == Some(&"--fields") && !options[1].starts_with("duration=");
    let mut read_so = 0;
    for (name, options) in LOGS.iter().filter(|(_, options)| needs(options)) {
        let file = folder().join(name);
        let (refused, said) = read(&file, &[]);
        if code(&refused) == 0 {
            // Some of it has names that are known, such as Kong's client_ip.
            continue;
        }
        assert_eq!((code(&refused), said.matches("error: ").count()), (2, 1), "{name}: {said}");
        assert!(!said.contains("give --input"), "{name}: {said}");
        let (_, hint) = said.split_once("such as --fields ").unwrap_or_else(|| panic!("{name}: {said}"));
        let (hint, _) = hint.split_once("; it begins with ").unwrap_or_else(|| panic!("{name}: {said}"));
        let fields = hint.split(',').take_while(|part| part.contains('=')).collect::<Vec<_>>().join(",");
        // The end of a request, or its arrival.
        let first = |fields: &str| fields.split('=').next().map(str::to_owned);
        assert_eq!(first(&fields), first(options[1]), "{name}");
        let (output, said) = read(&file, &["--fields", &fields]);
        assert_eq!(code(&output), 0, "{name}: {fields}: {said}");
        // The user and the duration aren't to be seen from one line.
        let who = |records: &str| {
            let words = |line: &str| line.split(' ').skip(2).take(3).map(str::to_owned).collect::<Vec<_>>();
            records.lines().map(words).collect::<Vec<_>>()
        };
        let expected = fs::read_to_string(file.with_extension("expected")).expect("expected");
        assert_eq!(who(&records(&output)), who(&expected), "{name}: {fields}");
        assert!(!options[1].contains("duration=") || !said.contains("skipped"), "{name}");
        read_so += 1;
    }
    assert!(read_so >= 10, "{read_so} of them");
}

#[test]
fn a_hint_has_the_request_and_its_duration_where_one_line_shows_them() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    for (line, fields) in [
        (
            r#"{"@timestamp":"2024-02-01T10:00:01Z","event":{"duration":25000000},"source":{"ip":"192.0.2.1"},"http":{"request":{"method":"GET"}},"url":{"original":"/items/1?q=1"}}"#,
            "time=@timestamp,ip=source.ip,method=http.request.method,path=url.original,duration=event.duration",
        ),
        (
            "time=2024-02-01T10:00:01Z level=info remote_ip=192.0.2.1 method=GET path=/items/1 elapsed=25ms",
            "time=time,ip=remote_ip,method=method,path=path,duration=elapsed",
        ),
        (
            "time=2024-02-01T10:00:01Z level=info remote_ip=192.0.2.1 method=GET path=/items/1 duration_ms=25",
            "time=time,ip=remote_ip,method=method,path=path,duration=duration_ms",
        ),
        (
            "time=2024-02-01T10:00:01Z level=info remote_ip=192.0.2.1 method=GET path=/items/1 duration=25",
            "time=time,ip=remote_ip,method=method,path=path",
        ),
    ] {
        fs::write(&file, format!("{line}\n")).expect("written");
        let (_, said) = read(file.path(), &[]);
        assert!(said.contains(&format!("such as --fields {fields}; it begins with")), "{said}");
        let (output, said) = read(file.path(), &["--fields", fields]);
        let took = if fields.contains("duration") { "1706781600975000 0.025000" } else { "1706781601000000 -" };
        assert_eq!(records(&output), format!("{took} 192.0.2.1 GET /items/1 -\n"), "{said}");
    }
}

/// Docker's files, journald's export and shippers have a program's lines within objects of their own.
#[test]
fn lines_within_objects_are_named_with_how_to_take_them_out() {
    let clf = r#"192.0.2.1 - - [01/Feb/2024:10:00:01 +0000] \"GET /items/1 HTTP/1.1\" 200 1"#;
    let caddy = r#"{\"ts\":1706781601,\"request\":{\"remote_ip\":\"192.0.2.1\",\"uri\":\"/\"}}"#;
    let file = tempfile::NamedTempFile::new().expect("a file");
    for (object, field) in [
        (format!(r#"{{"log":"{clf}\n","stream":"stdout","time":"2024-02-01T10:00:01.1Z"}}"#), "log"),
        (format!(r#"{{"log":"{caddy}\n","stream":"stderr","time":"2024-02-01T10:00:01.1Z"}}"#), "log"),
        (format!(r#"{{"@timestamp":"2024-02-01T10:00:01Z","app":{{"@message":"{clf}"}}}}"#), "app.@message"),
        (format!(r#"{{"__REALTIME_TIMESTAMP":"1706781601000000","MESSAGE":"{clf}","_PID":"7"}}"#), "MESSAGE"),
        (format!(r#"{{"@timestamp":"2024-02-01T10:00:01Z","host":{{"ip":"10.0.0.5"}},"message":"{clf}"}}"#), "message"),
    ] {
        fs::write(&file, format!("{object}\n")).expect("written");
        let (output, said) = read(file.path(), &[]);
        let expected =
            format!("expected the lines of a log, got objects that have them in {field}: take them out first");
        assert_eq!((code(&output), said.matches("error: ").count()), (2, 1), "{said}");
        assert!(
            said.contains(&expected)
                && said.contains(&format!("jq -r '.{}'", field.replace("@message", "\"@message\""))),
            "{said}"
        );
    }
    let entry = r#"{"timestamp": "2024-02-01T10:00:01Z", "httpRequest": {"remoteIp": "192.0.2.1"}}"#;
    for (text, how) in [
        (
            format!("[{entry},\n{entry}]\n"),
            "a list of objects: write each on one line first, for example with jq -c '.[]', then pipe them in as -",
        ),
        (format!("[\n  {entry}\n]\n"), "a list of objects: "),
        (format!("{}\n", entry.replace('{', "{\n").replace('}', "\n}")), "objects over several lines: "),
    ] {
        fs::write(&file, text).expect("written");
        for options in [&[][..], &["--fields", "start=timestamp,ip=httpRequest.remoteIp"]] {
            let (output, said) = read(file.path(), options);
            assert_eq!((code(&output), said.matches("error: ").count()), (2, 1), "{said}");
            assert!(said.contains(&format!("expected the lines of a log, got {how}")), "{said}");
        }
    }
    // Beside what was read of it, a line isn't needed.
    let read_already = format!(
        r#"{{"@timestamp":"2024-02-01T10:00:01Z","source":{{"ip":"192.0.2.1"}},"method":"GET","url":"/a","event":{{"original":"{clf}"}}}}"#
    );
    fs::write(&file, read_already).expect("written");
    let (_, said) = read(file.path(), &[]);
    assert!(said.contains("such as --fields time=@timestamp,ip=source.ip,method=method,path=url"), "{said}");
}

#[test]
fn a_log_without_times_is_refused_with_what_it_lacks() {
    let (output, said) = read(&folder().join("uvicorn.log"), &[]);
    assert_eq!((code(&output), said.lines().count()), (2, 1), "{said}");
    assert!(said.contains("every request needs its time"), "{said}");
    // Nor does one of the two hints lead to the other.
    for input in ["jsonl", "access-json", "combined"] {
        let (output, said) = read(&folder().join("pino.log"), &["--input", input]);
        assert!(code(&output) == 2 || input == "access-json", "{said}");
        assert!(said.contains("; leave out --input to have its format detected\n"), "{input}: {said}");
    }
}

#[test]
fn lines_that_are_no_requests_are_passed_over_and_counted() {
    for (name, count) in [("caddy.log", 18), ("traefik-json.log", 2), ("haproxy-docs.log", 2), ("heroku-router.log", 2)]
    {
        let (output, said) = read(&folder().join(name), &["--strict"]);
        assert_eq!(code(&output), 0, "{said}");
        assert!(said.contains(&format!("{count} lines are not requests; ignored")), "{name}: {said}");
    }
}

#[test]
fn a_duration_is_never_guessed() {
    let (output, said) = read(&folder().join("words-own.log"), &["--fields", "time=1,ip=2,request=4,duration=6"]);
    assert_eq!((code(&output), said.matches("error: ").count()), (2, 1), "{said}");
    assert!(
        said.contains("duration: expected its unit, as in --fields duration=6:ms (s, ms, us or ns), got \"11\""),
        "{said}"
    );
    // Seconds, milliseconds or microseconds: Apache's %T, %{ms}T and %D look alike.
    for (name, options) in [("apache-duration.log", &[][..]), ("w3c-own.log", &[]), ("zap-own.log", &[])] {
        let (output, said) = read(&folder().join(name), options);
        assert_eq!(code(&output), 0, "{said}");
        assert!(records(&output).lines().all(|line| line.split(' ').nth(1) == Some("-")), "{name}");
    }
}

#[test]
fn fields_that_cannot_be_are_refused() {
    for (fields, why) in [
        ("time", "expected NAME=FIELD with commas between"),
        ("time=", "expected NAME=FIELD with commas between"),
        ("when=ts", "before the =, got \"when\""),
        ("ip=0", "its position from 1"),
        ("time=a,time=b", "time is given twice"),
        ("time=a,start=b", "exclude each other"),
        ("duration=a:h", "expected a unit after the colon, s, ms, us or ns, got \"h\""),
    ] {
        let (output, said) = read(&folder().join("pino.log"), &["--fields", fields]);
        assert_eq!(code(&output), 2, "{fields}");
        assert!(said.contains(why), "{fields}: {said}");
    }
    let records = tempfile::NamedTempFile::new().expect("a file");
    fs::write(&records, "{\"t_us\":1,\"attrs\":{\"user\":\"a\"}}\n").expect("written");
    for options in [["--client-address", "xff"], ["--fields", "ip=xff"]] {
        let (output, said) = read(records.path(), &options);
        assert_eq!(code(&output), 2, "{said}");
        let expected = format!("{}: only for access logs; ", options[0]);
        assert!(said.contains(&expected) && said.contains(" is read as JSON lines, with keys of its own"), "{said}");
    }
    let (output, said) = read(&folder().join("nginx-main.log"), &["--proxies", "10.0.0.1/8"]);
    assert_eq!(code(&output), 2, "{said}");
    assert!(
        said.contains("--proxies: expected a network without bits beyond its length, such as 10.0.0.0/8"),
        "{said}"
    );
}

/// What is asked of a log and isn't in it is said, not passed over.
#[test]
fn fields_that_no_line_has_are_reported() {
    for (name, options, said) in [
        ("nginx-json.log", &["--fields", "ip=clinet"][..], "no line has the field clinet, which --fields names"),
        ("nginx-main.log", &["--fields", "user=nobody"], "no line has the field nobody, which --fields names"),
        ("cloudfront-export.csv", &["--fields", "time=date_time,ip=request_ip,user=who"], "no line has the field who,"),
        ("pino.log", &["--fields", "time=when,ip=where"], "no line has the field where, which --fields names"),
        ("nginx-main.log", &["--proxies", "127.0.0.1"], "name the field that holds the list by --client-address"),
    ] {
        let (output, found) = read(&folder().join(name), options);
        assert_eq!(code(&output), 0, "{name}: {found}");
        assert!(found.contains(said), "{name}: {found}");
        assert!(!found.contains("its format detected"), "{name}: {found}");
    }
    for (name, options) in LOGS {
        let (_, found) = read(&folder().join(name), options);
        assert!(!found.contains("no line has"), "{name}: {found}");
    }
    let records = tempfile::NamedTempFile::new().expect("a file");
    fs::write(&records, "{\"t_us\":1,\"attrs\":{\"user\":\"a\"}}\n").expect("written");
    let (output, found) = read(records.path(), &["--proxies", "10.0.0.0/8"]);
    assert_eq!(code(&output), 2, "{found}");
    assert!(found.contains("--proxies: only for access logs; "), "{found}");
}

/// The rest is found as the format has it.
#[test]
fn the_time_alone_can_be_said() {
    for (text, fields) in [
        ("192.0.2.1 - - [01/Feb/2024:10:00:01 +0000] \"GET /a HTTP/1.1\" 200 1 250\n", "start=4,duration=-1:ms"),
        (
            "192.0.2.1:7 [01/Feb/2024:10:00:09.000] f b/s 0/0/0/1/1 200 1 - - ---- 1/1/0/0/0 0/0 \
             \"GET /a HTTP/1.1\" 1706781601 250\n",
            "start=-2,duration=-1:ms",
        ),
        (
            "{\"when\":\"2024-02-01T10:00:01Z\",\"remote_addr\":\"192.0.2.1\",\"request\":\"GET /a HTTP/1.1\",\"ms\":250}\n",
            "start=when,duration=ms:ms",
        ),
        ("#Fields: at c-ip cs-method cs-uri-stem ms\n1706781601 192.0.2.1 GET /a 250\n", "start=at,duration=ms:ms"),
    ] {
        let file = tempfile::NamedTempFile::new().expect("a file");
        fs::write(&file, text).expect("written");
        let (output, said) = read(file.path(), &["--fields", fields]);
        assert_eq!(records(&output), "1706781601000000 0.250000 192.0.2.1 GET /a -\n", "{text}{said}");
        assert!(!said.contains("counts as"), "{said}");
    }
}

#[test]
fn whose_time_a_duration_is_taken_from_is_said() {
    let apaches = folder().join("apache-duration.log");
    for (fields, is_said) in [("duration=-1:us", true), ("time=4,duration=-1:us", false), ("user=3", false)] {
        let (output, said) = read(&apaches, &["--fields", fields]);
        assert_eq!(code(&output), 0, "{said}");
        assert_eq!(said.contains("; Apache logs the arrival: add start=4 to --fields "), is_said, "{fields}: {said}");
    }
}

#[test]
fn what_is_no_text_is_named() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    for (bytes, what) in [
        (&b"BZh91AY&SYV^\xec"[..], "bzip2"),
        (b"\xfd7zXZ\0\0\x04", "xz"),
        (b"PK\x03\x04", "a ZIP archive"),
        (b"\xff\xfe1\0.\02\0", "text in UTF-16"),
    ] {
        fs::write(&file, bytes).expect("written");
        for options in [&[][..], &["--fields", "time=1,ip=2"]] {
            let (output, said) = read(file.path(), options);
            assert_eq!((code(&output), said.lines().count()), (2, 1), "{said}");
            assert!(said.contains(&format!("expected text, or text in gzip or zstd, got {what}")), "{said}");
        }
    }
}

#[test]
fn json_of_another_program_is_refused_with_the_option_to_give() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    fs::write(&file, "{\"date\":\"2026-11-26\",\"time\":\"17:27:31\",\"c-ip\":\"192.0.2.1\"}\n").expect("written");
    let (output, said) = read(file.path(), &[]);
    assert_eq!(code(&output), 2, "{said}");
    assert!(said.contains("; if it is another program's log, name its fields with --fields"), "{said}");
}

#[test]
fn times_in_another_unit_are_doubted() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    for (t_us, unit) in [(1_700_000_000_u64, Some("seconds")), (1_700_000_000_000, Some("milliseconds")), (1, None)] {
        for text in [format!("{{\"t_us\":{t_us},\"key\":\"a\"}}\n"), format!("t_us,key\n{t_us},a\n")] {
            fs::write(&file, text).expect("written");
            let output = tollgate(&["replay", "--rule", "gcra 1/1s", file.path().to_str().expect("UTF-8")]);
            let said = stderr(&output);
            assert_eq!(code(&output), 0, "{said}");
            assert_eq!(said.contains("is in January 1970"), unit.is_some(), "{said}");
            assert!(unit.is_none_or(|unit| said.contains(&format!("if it is in {unit}, write it in micro"))), "{said}");
        }
    }
}
