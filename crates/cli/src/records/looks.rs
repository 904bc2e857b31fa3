//! Detects the format of recorded traffic from its beginning.

use std::io::{self, BufRead, Read};

use super::access_json::Object;
use super::field::quoted;
use super::places::Places;
use super::words::Words;
use super::{Format, access_json, combined, csv_table, haproxy, text};

/// The most lines examined; more if they are objects, since a log may start after them.
const LINES: usize = 10;
const OBJECTS: usize = 500;
/// The most bytes examined.
const BYTES: u64 = 256 << 10;

/// What the beginning of a stream shows.
#[derive(Debug, Default)]
pub(crate) struct Looks {
    /// The format of one of its first lines.
    pub(crate) format: Option<Format>,
    /// Whether the format is only a guess, for objects of an unknown kind.
    pub(crate) is_guessed: bool,
    /// A suggestion for --fields, if its format is unknown but its fields can be recognised.
    pub(crate) places: Option<String>,
    /// Why its JSON isn't a log with one object per line, and how to make it one.
    pub(crate) otherwise: Option<String>,
    /// What its first bytes show, if it isn't readable text, and what to do about it.
    pub(crate) foreign: Option<&'static str>,
    /// Its first non-blank line, as one short printable line; `None` if there is none.
    pub(crate) begins: Option<String>,
}

/// What the stream looks like, and the whole stream to read. If the format hardly matters, waits only for the first
/// line.
pub(crate) fn look<R: BufRead>(
    mut input: R,
    matters: bool,
    places: &Places,
) -> io::Result<(Looks, impl BufRead + use<R>)> {
    let (mut head, mut looks, mut objects, mut others) = (Vec::new(), Looks::default(), 0, 0);
    let mut columns = Vec::new();
    while others < LINES && objects < OBJECTS {
        let start = head.len();
        let left = BYTES.saturating_sub(start as u64);
        if input.by_ref().take(left).read_until(b'\n', &mut head)? == 0 {
            break;
        }
        if start == 0 {
            looks.foreign = foreign(&head);
        }
        let line = if start == 0 { head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&head) } else { &head[start..] };
        // Behind a socket, gunicorn writes no client, only the space after it.
        let (line, whole) = (line.trim_ascii(), line.trim_ascii_end());
        if line.starts_with(b"{") {
            objects += 1
        } else {
            others += 1
        }
        if line.is_empty() {
            continue;
        }
        if looks.begins.is_none() {
            looks.otherwise = spread(line).map(str::to_owned);
        }
        if looks.otherwise.is_none() {
            looks.format = of_line(line, whole, looks.begins.is_none(), places);
        }
        if looks.format.is_none() && looks.places.is_none() {
            looks.places = match access_json::object(line) {
                Ok(object) => {
                    let suggested = object.suggested();
                    // Some shippers keep the original line beside the fields they parsed from it.
                    let has_request = |places: &String| places.contains(",path=") || places.contains(",request=");
                    if !suggested.as_ref().is_some_and(has_request) {
                        looks.otherwise = looks.otherwise.or_else(|| {
                            let field = object.field_of_lines(&is_of_a_log)?;
                            let how = format!("take them out first, for example with jq -r '{}'", of_jq(&field));
                            Some(format!("objects that have them in {field}: {how}"))
                        });
                    }
                    suggested.filter(|_| looks.otherwise.is_none())
                }
                Err(_) => text::suggested(line).or_else(|| of_table(&mut columns, line)),
            };
        }
        looks.begins.get_or_insert_with(|| quoted(line));
        if looks.format.is_some() || looks.otherwise.is_some() || !matters {
            break;
        }
    }
    // Objects without anything of a request are most likely meant as records.
    let is_unknown = looks.format.is_none() && looks.places.is_none() && looks.otherwise.is_none();
    looks.is_guessed = matters && is_unknown && objects > 0;
    looks.format = looks.format.or(looks.is_guessed.then_some(Format::Jsonl));
    Ok((looks, io::Cursor::new(head).chain(input)))
}

/// A suggestion for --fields of a table whose header was the first line, if this is a row.
fn of_table(columns: &mut Vec<String>, line: &[u8]) -> Option<String> {
    let cells = csv_table::cells(line);
    if columns.is_empty() {
        *columns = cells;
        return None;
    }
    (cells.len() > 2 && cells.len() == columns.len()).then(|| Object::of_row(columns, &cells).suggested())?
}

/// Recognises data that isn't text with readable lines.
fn foreign(head: &[u8]) -> Option<&'static str> {
    const MAGIC: [(&[u8], &str); 7] = [
        (b"BZh", "bzip2: decompress it first, for example with bzcat"),
        (b"\xfd7zXZ\0", "xz: decompress it first, for example with xzcat"),
        (b"\x04\x22\x4d\x18", "lz4: decompress it first, for example with lz4cat"),
        (b"PK\x03\x04", "a ZIP archive: unpack it first, for example with unzip -p"),
        (b"\x1f\x8b", "gzip within another compression: decompress it once first"),
        (b"\xff\xfe", "text in UTF-16: convert it first, for example with iconv -f UTF-16 -t UTF-8"),
        (b"\xfe\xff", "text in UTF-16: convert it first, for example with iconv -f UTF-16 -t UTF-8"),
    ];
    let found = MAGIC.iter().find(|(magic, _)| head.starts_with(magic))?;
    // Text may begin like this, too.
    let is_text = found.0 == b"BZh" && head.get(4..10) != Some(b"1AY&SY");
    (!is_text).then_some(found.1)
}

/// The format of a line; `whole` has its leading spaces too, and `first` is whether it may be a header.
fn of_line(line: &[u8], whole: &[u8], first: bool, places: &Places) -> Option<Format> {
    let names = || line.split(|byte| *byte == b',').map(|name| unquoted(name.trim_ascii()));
    if line.starts_with(b"{") {
        return match () {
            () if places.have_time() || access_json::is_likely(line) => Some(Format::AccessJson),
            () if access_json::is_likely_a_record(line) => Some(Format::Jsonl),
            () => None,
        };
    }
    if line.starts_with(b"#Fields:") {
        return Some(Format::W3c);
    }
    if first && names().any(|name| matches!(name, b"t_us" | b"key") || name.starts_with(b"attr.")) {
        return Some(Format::Csv);
    }
    let is_combined = || {
        combined::parse(whole)
            .is_ok_and(|access| !access.host.is_empty() || (whole.starts_with(b" ") && access.path.is_some()))
    };
    let is_haproxy = || haproxy::parse(&Words::of(line), line).is_ok();
    if places.have_time() && !(places.are_times() && (is_combined() || is_haproxy())) {
        let has = |place: &str| names().any(|name| name == place.as_bytes());
        let is_header = first && places.names().is_some_and(|mut all| all.all(has));
        let may_be = if is_header { Format::Csv } else { Format::Text };
        return (!line.starts_with(b"#")).then_some(may_be);
    }
    if is_combined() {
        Some(Format::Combined)
    } else if is_haproxy() {
        Some(Format::Haproxy)
    } else if text::known(line).is_some() {
        Some(Format::Text)
    } else {
        None
    }
}

/// A field as jq names it.
fn of_jq(field: &str) -> String {
    let is_word = |name: &str| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    let name = |name: &str| if is_word(name) { format!(".{name}") } else { format!(".{name:?}") };
    field.split('.').map(name).collect()
}

/// Recognises JSON that isn't one object per line by its first line, as the command-line tools of clouds print it.
fn spread(line: &[u8]) -> Option<&'static str> {
    match line {
        b"[" | [b'[', b'{', ..] => {
            Some("a list of objects: write each on one line first, for example with jq -c '.[]'")
        }
        b"{" => Some("objects over several lines: write each on one line first, for example with jq -c ."),
        _ => None,
    }
}

/// Whether the text is a line of an access log that is known.
fn is_of_a_log(line: &[u8]) -> bool {
    of_line(line, line, false, &Places::default()).is_some_and(|format| format.is_access_log() && format != Format::W3c)
}

fn unquoted(name: &[u8]) -> &[u8] {
    name.strip_prefix(b"\"").and_then(|name| name.strip_suffix(b"\"")).unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "1.2.3.4 - - [17/May/2015:10:05:03 +0000] \"GET / HTTP/1.1\" 200 1\n";

    #[test]
    fn a_format_is_told_by_the_first_line_that_has_one() {
        for (text, format) in [
            ("{\"t_us\":1,\"key\":\"a\"}\n".to_owned(), Some(Format::Jsonl)),
            ("\u{feff}\n \n{\"".into(), Some(Format::Jsonl)),
            ("# a note\n{}\n".into(), Some(Format::Jsonl)),
            (
                "{\"level\":\"info\",\"ts\":1700000000,\"msg\":\"starting\"}\n".repeat(100)
                    + "{\"ts\":1,\"request\":{\"remote_ip\":\"a\"}}\n",
                Some(Format::AccessJson),
            ),
            ("{\"ts\":1,\"request\":{\"remote_ip\":\"a\"}}\n".into(), Some(Format::AccessJson)),
            (LOG.into(), Some(Format::Combined)),
            (LOG.replace("1.2.3.4", ""), Some(Format::Combined)),
            (format!("-- log of May --\r\n{LOG}"), Some(Format::Combined)),
            ("t_us,key\n1,a\n".into(), Some(Format::Csv)),
            ("\"key\" , \"time\"\n".into(), Some(Format::Csv)),
            ("a note\nt_us,key\n".into(), None),
            ("time user\n".into(), None),
            ("x\n".repeat(10) + LOG, None),
            ("x".repeat(1 << 20) + "\n" + LOG, None),
            (String::new(), None),
        ] {
            let (looks, mut all) = look(text.as_bytes(), true, &Places::default()).unwrap();
            assert_eq!(looks.format, format, "{text:.60}");
            let mut read = String::new();
            all.read_to_string(&mut read).unwrap();
            assert!(read == text, "nothing is lost of {text:.60}");
        }
    }

    #[test]
    fn where_it_does_not_matter_much_no_second_line_is_waited_for() {
        struct Waits;

        impl Read for Waits {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                panic!("nothing more comes")
            }
        }

        let input = || b"a note\n".chain(io::BufReader::new(Waits));
        let (looks, _) = look(input(), false, &Places::default()).unwrap();
        assert_eq!((looks.format, looks.begins.as_deref()), (None, Some("\"a note\"")));
    }
}
