//! Normalised paths, and their patterns.

use std::borrow::Cow;
use std::fmt;

use smallvec::SmallVec;

use super::definition::{Paths, Reading};

/// One segment of a path, or of a pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Segment<'a> {
    Literal(&'a str),
    /// `*`: any segment.
    Any,
    /// A final `*`: everything that follows, if anything.
    Rest,
}

/// A path pattern such as `/api/v1/*`: `*` is one segment, and a final `/*` is the rest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pattern {
    /// As written.
    text: Box<str>,
    /// The places of segments that are a literal star, written encoded: hardly ever any.
    stars: Box<[usize]>,
    /// Whether it ends with `/*`.
    open: bool,
}

/// A request target's path as servers interpret it: without scheme, authority, query and fragment; percent-encoded
/// characters decoded once, including slashes; backslashes as slashes; without empty and dot segments and a trailing
/// slash.
pub(super) fn normalised(target: &str) -> Cow<'_, str> {
    let path = path_of(target);
    if is_normal(path) {
        return Cow::Borrowed(path);
    }
    let decoded = decoded(path);
    let mut kept: SmallVec<[&str; 16]> = SmallVec::new();
    for segment in decoded.split(['/', '\\']) {
        match segment {
            "" | "." => {}
            ".." => drop(kept.pop()),
            segment => kept.push(segment),
        }
    }
    let mut normal = String::with_capacity(decoded.len() + 1);
    for segment in &kept {
        normal.push('/');
        normal.push_str(segment);
    }
    if normal.is_empty() {
        normal.push('/');
    }
    Cow::Owned(normal)
}

/// Whether servers may read this path differently: because they decode before they split or afterwards, once, twice or
/// not at all, or disagree on what belongs in a path. What is left has a single spelling: each character that URLs have
/// a right to (RFC 3986) as it is, and every other one encoded.
pub(super) fn is_ambiguous(target: &str) -> bool {
    let path = path_of(target);
    // Of `OPTIONS *`, and of CONNECT.
    if path == "*" || path.is_empty() {
        return false;
    }
    let (mut rest, mut before, mut decoded) = (path.as_bytes(), 0, Vec::new());
    while let Some((&first, tail)) = rest.split_first() {
        if first == b'%' {
            let Some(byte) = escaped(tail) else { return true };
            let is_percent_of_an_escape = byte == b'%' && escaped(&tail[2..]).is_some();
            let has_another_spelling = byte.is_ascii_control() || may_be_raw(byte) || b"/?#[]\\;".contains(&byte);
            if has_another_spelling || is_percent_of_an_escape || tail[..2].iter().any(u8::is_ascii_lowercase) {
                return true;
            }
            decoded.push(byte);
            (before, rest) = (byte, &tail[2..]);
            continue;
        }
        // Browsers leave brackets as they are.
        if !may_be_raw(first) && !b"/[]".contains(&first) || before == b'/' && first == b'/' {
            return true;
        }
        // Most paths have no escape, and aren't copied.
        decoded.extend((!decoded.is_empty()).then_some(first));
        (before, rest) = (first, tail);
    }
    let has_dots = path.contains("/.") && path.split('/').any(|segment| segment == "." || segment == "..");
    has_dots || std::str::from_utf8(&decoded).is_err()
}

/// Whether a segment may have this character as it is: unreserved ones, and reserved ones but for those that servers
/// cut it at.
fn may_be_raw(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,=:@".contains(&byte)
}

/// The byte that the two hexadecimal digits at the start of this stand for.
fn escaped(after_percent: &[u8]) -> Option<u8> {
    let [high, low, ..] = after_percent else { return None };
    let value = |digit: u8| char::from(digit).to_digit(16).and_then(|value| u8::try_from(value).ok());
    Some(value(*high)? << 4 | value(*low)?)
}

/// Without scheme, authority, query and fragment.
pub(super) fn path_of(target: &str) -> &str {
    // Most targets start with their path.
    let path = if target.starts_with('/') { target } else { without_authority(target) };
    let end = path.bytes().position(|byte| byte == b'?' || byte == b'#');
    &path[..end.unwrap_or(path.len())]
}

/// The segments of a path: none for `/`, and an empty one after each further slash, which a normalised path doesn't
/// have.
pub(super) fn segments(path: &str) -> impl Iterator<Item = Segment<'_>> {
    let after = path.strip_prefix('/').unwrap_or(path);
    let rest = (!after.is_empty()).then_some(after);
    rest.into_iter().flat_map(|rest| rest.split('/')).map(Segment::Literal)
}

/// For `http://host/path`, as sent to a proxy, the path.
fn without_authority(target: &str) -> &str {
    let scheme = target.find("://").filter(|at| {
        let scheme = &target[..*at];
        scheme.starts_with(|first: char| first.is_ascii_alphabetic())
            && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
    });
    let Some(at) = scheme else { return target };
    let after = &target[at + 3..];
    after.find(['/', '?', '#', '\\']).map_or("/", |path| &after[path..])
}

/// Most paths are normalised already.
fn is_normal(path: &str) -> bool {
    let bytes = path.as_bytes();
    if bytes.len() < 2 || bytes[0] != b'/' {
        return path == "/";
    }
    let mut before = 0;
    for &byte in bytes {
        // A dot at the start of a segment may be a dot segment.
        if byte == b'%' || byte == b'\\' || (before == b'/' && (byte == b'/' || byte == b'.')) {
            return false;
        }
        before = byte;
    }
    before != b'/'
}

/// Decodes each `%2F` or the like, once. Anything that isn't UTF-8 then, and NUL, stays encoded, in upper case; a `%`
/// that starts no escape stays.
fn decoded(path: &str) -> Cow<'_, str> {
    if !path.contains('%') {
        return Cow::Borrowed(path);
    }
    let mut bytes = Vec::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        match escaped(tail).filter(|byte| first == b'%' && *byte != 0) {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            None => {
                bytes.push(first);
                rest = tail;
            }
        }
    }
    match String::from_utf8(bytes) {
        Ok(text) => Cow::Owned(text),
        Err(error) => {
            let mut text = String::with_capacity(path.len());
            for chunk in error.as_bytes().utf8_chunks() {
                text.push_str(chunk.valid());
                chunk.invalid().iter().for_each(|byte| text.push_str(&format!("%{byte:02X}")));
            }
            Cow::Owned(text)
        }
    }
}

impl Pattern {
    /// A pattern, or what was expected.
    pub(super) fn new(text: &str, reading: Reading) -> Result<Self, String> {
        let expected = |what: &str| Err(format!("expected {what}, got {text:?}"));
        if !text.starts_with('/') {
            return expected("a path pattern that begins with /, such as /api/*");
        }
        if text.contains(['?', '#']) {
            return expected("a path pattern without a query or fragment");
        }
        if text.split('/').any(|segment| segment.len() > 1 && segment.contains('*')) {
            return expected("* as a whole segment of a path pattern, such as /api/*/items");
        }
        if text.split('/').any(|segment| segment.starts_with(['{', ':', '<'])) {
            return expected("* for a segment that varies in a path pattern, such as /users/*");
        }
        let open = text.ends_with("/*");
        let fixed = if open { &text[..text.len() - 2] } else { text };
        // Apart from stars, a pattern is written as paths are. What is between stars is normalised, unless paths are
        // compared as they are sent; the slash of `/` itself then begins no empty segment.
        let raw = reading.paths == Paths::Segments;
        let fixed = if raw && !open && fixed == "/" { "" } else { fixed };
        let (mut normal, mut count, mut stars) = (String::with_capacity(text.len()), 0, Vec::new());
        for (at, segment) in fixed.split('/').enumerate() {
            let is_none = if raw { at == 0 } else { segment.is_empty() };
            if is_none {
                continue;
            }
            count += 1;
            normal.push('/');
            if segment == "*" {
                normal.push('*');
                continue;
            }
            let literal = if raw { Cow::Borrowed(segment) } else { decoded(segment) };
            if !raw && (literal.contains(['/', '\\']) || literal == "." || literal == "..") {
                return expected("a path pattern without dot segments and encoded slashes, since paths are normalised");
            }
            if literal == "*" {
                stars.push(count - 1);
            }
            normal.push_str(&literal);
        }
        if reading.ignore_case {
            normal.make_ascii_lowercase();
        }
        if open {
            normal.push_str("/*");
        } else if normal.is_empty() {
            normal.push('/');
        }
        Ok(Self { text: normal.into(), stars: stars.into(), open })
    }

    pub(super) fn segments(&self) -> impl Iterator<Item = Segment<'_>> {
        let fixed = match &*self.text {
            "/" => None,
            open if self.open => open[..open.len() - 2].strip_prefix('/'),
            text => text.strip_prefix('/'),
        };
        let fixed =
            fixed.into_iter().flat_map(|fixed| fixed.split('/')).enumerate().map(|(at, segment)| match segment {
                "*" if !self.stars.contains(&at) => Segment::Any,
                literal => Segment::Literal(literal),
            });
        fixed.chain(self.open.then_some(Segment::Rest))
    }

    /// Whether it covers every path.
    pub(super) fn covers_all(&self) -> bool {
        self.segments().next() == Some(Segment::Rest)
    }

    /// As it is shown.
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Whether this pattern covers everything that the other, a path or a pattern, stands for.
    pub(super) fn covers<'o>(&self, other: impl IntoIterator<Item = Segment<'o>>) -> bool {
        let mut others = other.into_iter();
        for own in self.segments() {
            if own == Segment::Rest {
                return true;
            }
            match (own, others.next()) {
                (Segment::Any, Some(Segment::Literal(_) | Segment::Any)) => {}
                (Segment::Literal(own), Some(Segment::Literal(other))) if own == other => {}
                _ => return false,
            }
        }
        others.next().is_none()
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_that_is_encoded_is_a_star_and_no_segment_that_varies() {
        let pattern = |text| Pattern::new(text, Reading::default()).unwrap();
        for (text, same, other) in
            [("/a/%2A", "/a/*", "/a/b"), ("/%2A/*", "/*/b", "/a/b"), ("/*/%2A/c", "/b/*/c", "/b/a/c")]
        {
            let pattern = pattern(text);
            assert!(pattern.covers(segments(same)) && !pattern.covers(segments(other)), "{text}");
        }
        assert_eq!(pattern("/a/%2A").to_string(), "/a/*");
        assert!(pattern("/a/%2A") != pattern("/a/*") && pattern("/*/c").covers(segments("/b/c")));
    }

    #[test]
    fn all_spellings_of_a_path_are_one() {
        for (target, expected) in [
            ("/api/v1/items", "/api/v1/items"),
            ("/", "/"),
            ("//", "/"),
            ("/api/", "/api"),
            ("/api//v1", "/api/v1"),
            ("/api/./v1", "/api/v1"),
            ("/api/../v1", "/v1"),
            ("/../../v1", "/v1"),
            ("/api/v1/..", "/api"),
            ("/api/v1?x=/y", "/api/v1"),
            ("/api/v1#part", "/api/v1"),
            ("/api%2Fv1", "/api/v1"),
            ("/api%2fv1", "/api/v1"),
            ("/%61pi/v1", "/api/v1"),
            ("/api/%2e%2E/v1", "/v1"),
            ("/api%5Cv1", "/api/v1"),
            ("/api\\v1", "/api/v1"),
            ("/api/%252e", "/api/%2e"),
            ("/api/%zz", "/api/%zz"),
            ("/api/%", "/api/%"),
            ("/api/%f", "/api/%f"),
            ("/%C3%A9t%C3%A9", "/été"),
            ("/%ff%fe", "/%FF%FE"),
            ("/a%00b", "/a%00b"),
            ("api/v1", "/api/v1"),
            ("http://host/api/v1", "/api/v1"),
            ("HTTPS://host:80//api/v1/", "/api/v1"),
            ("http://host?x", "/"),
            ("http://host", "/"),
            ("/redirect/http://host/x", "/redirect/http:/host/x"),
            ("*", "/*"),
            ("/.well-known/x", "/.well-known/x"),
            ("/...", "/..."),
        ] {
            assert_eq!(normalised(target), expected, "{target}");
            let again = normalised(expected);
            // An encoded percent sign is the exception: it is decoded once.
            assert!(again == expected || target.contains("%25"), "{target}: {again}");
        }
    }

    #[test]
    fn each_path_has_one_spelling_that_is_not_refused() {
        for fine in [
            "/",
            "*",
            "",
            "/api/v1/items",
            "/api/v1/items/",
            "/a/@me/x:y,z$1+2!(3)*4'5&6=7~8",
            "/a[0]",
            "/a%20b",
            "/caf%C3%A9",
            "/%E6%97%A5/%F0%9F%98%80",
            "/100%25",
            "/100%25x%20y",
            "/%22%3C%3E%5E%60%7B%7C%7D",
            "/.well-known/...",
            "/a?x=//%2F;%zz",
            "http://host/a%20b",
        ] {
            assert!(!is_ambiguous(fine), "{fine}");
        }
        for byte in (0..=0x20).chain([0x7f]).map(char::from) {
            assert!(is_ambiguous(&format!("/a{byte}b")), "{byte:?}");
            let refused = byte != ' ';
            assert_eq!(is_ambiguous(&format!("/a%{:02X}b", u32::from(byte))), refused, "{byte:?}");
        }
        for byte in ('!'..='~').filter(|byte| !"%\"<>^`{|}".contains(*byte)) {
            assert!(is_ambiguous(&format!("/a%{:02X}b", u32::from(byte))), "{byte}");
        }
        for twice in [
            "//",
            "/a//b",
            "/a/./b",
            "/a/..",
            "/.",
            "/a\\b",
            "/a;b",
            "/a;v=1/b",
            "/%",
            "/a%2",
            "/a%zz",
            "/a%u002Fb",
            "/caf\u{e9}",
            "/a\"b",
            "/a<b",
            "/a>b",
            "/a^b",
            "/a`b",
            "/a{b",
            "/a|b",
            "/a}b",
            "/caf%c3%a9",
            "/caf%C3%a9",
            "/%2541",
            "/%252F",
            "/%25252F",
            "/%FF",
            "/%C3",
            "/%C0%AF",
            "/%E0%80%AF",
            "/%ED%A0%80",
            "/a%00",
            "a/b;c",
        ] {
            assert!(is_ambiguous(twice), "{twice}");
        }
    }

    #[test]
    fn a_star_is_a_segment_and_a_final_one_the_rest() {
        for (pattern, matching, others) in [
            ("/api/*", &["/api", "/api/x", "/api/x/y"][..], &["/", "/apis", "/ap"][..]),
            ("/api/*/items", &["/api/v1/items"], &["/api/items", "/api/v1/v2/items", "/api/v1/items/7"]),
            ("/*", &["/", "/x", "/x/y"], &[]),
            ("/", &["/"], &["/x"]),
            ("/a/*/c/*", &["/a/b/c", "/a/b/c/d/e"], &["/a/c", "/a/b/d"]),
            ("/a%20b", &["/a b"], &["/a%20b"]),
        ] {
            let read = Pattern::new(pattern, Reading::default()).unwrap();
            for path in matching {
                assert!(read.covers(segments(path)), "{pattern}: {path}");
            }
            for path in others {
                assert!(!read.covers(segments(path)), "{pattern}: {path}");
            }
        }
        for bad in ["api", "/a*", "/a/**", "/users/{id}", "/users/:id", "/a?b", "/a/../b", "/a%2Fb"] {
            assert!(Pattern::new(bad, Reading::default()).unwrap_err().contains("expected"), "{bad}");
        }
        let ignoring = Pattern::new("/API/*", Reading { ignore_case: true, ..Reading::default() }).unwrap();
        assert!(ignoring.covers(segments("/api/x")) && ignoring.to_string() == "/api/*");
        let segments_first = Reading { paths: Paths::Segments, ..Reading::default() };
        for (pattern, matching, others) in [
            ("/a%2Fb", &["/a%2Fb"][..], &["/a%2fb", "/a/b"][..]),
            ("/a/..", &["/a/.."], &["/a/%2e.", "/"]),
            ("/a/*", &["/a", "/a/", "/a//b", "/a/%62"], &["/%61/b", "//a/b"]),
            ("/a/*/c", &["/a/b/c", "/a/../c", "/a//c"], &["/a/b/c/"]),
            ("/a/", &["/a/"], &["/a", "/a//"]),
            ("/", &["/"], &["//", "/a"]),
            ("/*", &["/", "//", "/a"], &[]),
        ] {
            let read = Pattern::new(pattern, segments_first).unwrap();
            assert_eq!(read.to_string(), pattern);
            for path in matching {
                assert!(read.covers(segments(path)), "{pattern}: {path}");
            }
            for path in others {
                assert!(!read.covers(segments(path)), "{pattern}: {path}");
            }
        }
    }
}
