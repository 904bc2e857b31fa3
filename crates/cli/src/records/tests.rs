use std::io::{BufReader, Read};

use super::*;
use crate::operation;

/// A linear congruential generator: the same bytes on every run.
pub(super) struct Lcg(pub(super) u64);

impl Lcg {
    /// A number below `n`, which must not be 0.
    pub(super) fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
}

fn all(format: Format, input: impl BufRead) -> Vec<Result<Record, Unreadable>> {
    read(format, Identity::Key(KeyField::Ip), input).collect::<io::Result<_>>().unwrap()
}

#[test]
fn an_op_reads_what_it_prints() {
    for op in Operation::ALL {
        assert_eq!(operation::named(&op.to_string()), Ok(*op));
        let json = format!("\"{op}\"");
        assert_eq!(serde_json::to_string(op).unwrap(), json);
        assert_eq!(serde_json::from_str::<Operation>(&json).unwrap(), *op);
    }
    let unknown = operation::named("Peek").unwrap_err();
    assert_eq!(
        unknown.to_string(),
        "expected acquire, peek, reserve, at-most, refund, penalty, block, renew, release, settle, cancel or reset, got \"Peek\""
    );
}

#[test]
fn blank_lines_count_and_are_nothing_else() {
    let text = "\u{feff}{\"t_us\":1,\"key\":\"a\"}\r\n\r\n \t\n{\"t_us\":2,\"key\":\"b\"}\nx\n\n";
    let lines: Vec<_> = all(Format::Jsonl, text.as_bytes())
        .into_iter()
        .map(|item| item.map(|record| record.line).map_err(|unreadable| unreadable.to_string()))
        .collect();
    assert_eq!(lines, [Ok(1), Ok(4), Err("line 5: line: expected a JSON object, got \"x\"".to_owned())]);
    assert!(all(Format::Jsonl, &b""[..]).is_empty());
    assert!(all(Format::Combined, &b"\n\r\n"[..]).is_empty());
}

#[test]
fn a_byte_order_mark_comes_before_a_csv_header_too() {
    assert_eq!(all(Format::Csv, &b"\xef\xbb\xbf\"t_us\",key\r\n1,a\r\n"[..]).len(), 1);
}

#[test]
fn a_line_beyond_the_limit_is_unreadable_and_the_next_is_not() {
    let long = |line: &[u8], next: &[u8]| {
        let tail = [b"\n", next].concat();
        BufReader::new(
            io::Cursor::new(line.to_vec()).chain(io::repeat(b'x').take(40 << 20)).chain(io::Cursor::new(tail)),
        )
    };
    let header = b"t_us,key\n";
    let log = b"h - - [17/May/2015:10:05:03 +0000] \"-\" 408 0";
    for (items, line, what) in [
        (all(Format::Jsonl, long(b"", br#"{"t_us":1,"key":"a"}"#)), 1, "line"),
        (all(Format::Combined, long(log, log)), 1, "line"),
        (all(Format::Csv, long(&[header, &b"1,"[..]].concat(), b"2,b")), 2, "row"),
        (all(Format::Csv, long(&[header, &b"1,\"\n\n"[..]].concat(), b"2,b")), 2, "row"),
    ] {
        let reason = format!("{what}: longer than 16777216 bytes");
        assert_eq!(items[0], Err(Unreadable { line, reason }));
        assert!(items[1].is_ok() && items.len() == 2, "{:?}", items[1]);
    }
}

#[test]
fn a_megabyte_of_key_is_readable_however_it_is_escaped() {
    let text = format!(r#"{{"t_us":1,"key":"{}"}}"#, "\\u0000".repeat(1 << 20));
    assert_eq!(all(Format::Jsonl, text.as_bytes())[0].as_ref().unwrap().key, vec![0; 1 << 20]);
}

#[test]
fn a_failing_stream_is_the_last_item() {
    struct Broken;

    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::other("gone"))
        }
    }

    for (format, text) in [
        (Format::Jsonl, &b"{\"t_us\":1,\"key\":\"a\"}\n{\"t_us\""[..]),
        (Format::Csv, b"t_us,key\n1,a\n2,\"b"),
        (Format::Combined, b"h - - [17/May/2015:10:05:03 +0000] \"-\" 408 0\nh"),
    ] {
        let mut items = read(format, Identity::Key(KeyField::Ip), BufReader::new(text.chain(Broken)));
        assert!(items.next().unwrap().unwrap().is_ok());
        assert_eq!(items.next().unwrap().unwrap_err().to_string(), "gone");
        assert!(items.next().is_none());
    }
}

/// Bytes with a meaning in one of the formats.
const TELLING: &[u8] = b"\"\\,\n\r{}[]:- /?0919eExu\0\x7f\xff\xc3\xef";

fn mutate(text: &mut Vec<u8>, random: &mut Lcg) {
    if text.is_empty() {
        return;
    }
    let at = random.below(text.len());
    let end = at + random.below((text.len() - at).min(12) + 1);
    match random.below(6) {
        0 => text[at] = TELLING[random.below(TELLING.len())],
        1 => text.insert(at, TELLING[random.below(TELLING.len())]),
        2 => text[at] ^= 1 << random.below(8),
        3 => drop(text.drain(at..end)),
        4 => {
            let piece = text[at..end].to_vec();
            let to = random.below(text.len());
            text.splice(to..to, piece);
        }
        _ => text.truncate(text.len() - random.below(8).min(text.len())),
    }
}

#[test]
fn no_input_panics_or_breaks_what_a_record_promises() {
    let seeds: [(Format, &[u8]); 9] = [
        (Format::Jsonl, b"{\"t_us\":1700000000000000,\"op\":\"acquire\",\"key\":\"u\\u0031\",\"cost\":1}\n\n{\"t_us\":4503599627370496,\"key\":\"\xc3\xa9\",\"cost\":9007199254740991,\"limits\":[{\"a\":null}]}\n"),
        (Format::Csv, b"t_us,op,key,cost\r\n1,peek,\"a\"\"b\r\nc\",2\r\n4503599627370496,,u1,9007199254740991\r\n"),
        (Format::Combined, b"1.2.3.4 - ann [17/May/2015:10:05:03 +0000] \"GET /a\\\"\\x41?q HTTP/1.1\" 200 5 \"-\" \"x\"\n::1 - - [01/Jan/1970:00:00:00 +0000] \"-\" 408 -\n"),
        (Format::Combined, b"v.example:80 1.2.3.4, [::1]:80 - \"\" [2015-05-17T10:05:03.25+00:00] \"GET http://h/?q HTTP/1.1\" 200 5 12ms\n"),
        (Format::AccessJson, b"{\"ts\":1431857103.25,\"request\":{\"remote_ip\":\"::1\",\"method\":\"GET\",\"uri\":\"/a?b\"},\"user_id\":\"u\",\"a.b\":{\"c\":[\"1.2.3.4\"]}}\n"),
        (Format::Haproxy, b"Feb  6 h haproxy[1]: ::1:33317 [06/Feb/2009:12:14:14.655] in a/b 10/0/30/69/+109 200 5 - - ---- 1/1/1/1/0 0/0 {} \"GET /a HTTP/1.1\"\n"),
        (Format::W3c, b"#Software: Microsoft\n#Fields: date time c-ip cs-method cs-uri-stem cs-username time-taken\n2022-01-01 00:00:01 1.2.3.4 GET /a u 15\n"),
        (Format::Text, b"https 2018-07-02T22:23:01.186641Z app/x 1.2.3.4:2817 10.0.0.1:80 0.000 0.001 0.000 200 200 34 366 \"GET https://h:443/a HTTP/1.1\" \"x\"\n"),
        (Format::Combined, b"h - \"\" [31/Dec/2111:23:59:60 -1130] \"POST * HTTP/1.1\" 200 5\n"),
    ];
    let mut random = Lcg(42);
    let (mut readable, mut unreadable) = (0, 0);
    for round in 0..60_000 {
        let (format, seed) = seeds[round % seeds.len()];
        let mut text = seed.to_vec();
        for _ in 0..=random.below(6) {
            mutate(&mut text, &mut random);
        }
        let keys = [KeyField::Ip, KeyField::Path, KeyField::Method, KeyField::User].map(Identity::Key);
        let about = [keys[0], keys[1], keys[2], keys[3], Identity::Attributes][random.below(5)];
        let lines = text.split(|byte| *byte == b'\n').count() as u64;
        let mut latest = 0;
        let mut wanted = Wanted::from(about);
        if format.is_access_log() && random.below(3) == 0 {
            let places =
                ["duration=-1", "ip=4,duration=1+last-quoted:ns", "time=2,ip=4,request=13", "start=ts,ip=a.b.c.0"];
            wanted.places = places[random.below(4)].parse().unwrap();
            let field = ["-2", "last-quoted", "a.b.c", "3"][random.below(4)].parse().unwrap();
            wanted.clients = Clients::new(Some(field), &["10.0.0.0/8".to_owned()]).unwrap();
        }
        for item in read(format, wanted, text.as_slice()) {
            let (line, reason) = match item {
                Ok(Ok(record)) => {
                    assert!(
                        record.t_us <= 1 << 52
                            && record.cost.is_none_or(|cost| cost < 1 << 53)
                            && record.key.is_empty() == (about == Identity::Attributes),
                        "{record:?}"
                    );
                    readable += 1;
                    (record.line, String::new())
                }
                Ok(Err(bad)) => {
                    unreadable += 1;
                    (bad.line, bad.reason)
                }
                Err(e) => {
                    assert_eq!((format, e.kind()), (Format::Csv, io::ErrorKind::InvalidData));
                    (lines, e.to_string())
                }
            };
            assert!(line > latest && line <= lines, "line {line} after {latest} of {lines}");
            assert!(!reason.contains(char::is_control) && reason.chars().count() < 200, "{reason:?}");
            latest = line;
        }
    }
    assert!(readable > 10_000 && unreadable > 10_000, "{readable} readable, {unreadable} not: a test of nothing");
}
