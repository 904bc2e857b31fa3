//! Bytes as text and back: different values have different texts, and invisible characters are escaped.
//!
//! Printable text stays as it is. `\xff` is a byte that isn't UTF-8, `\n` or `\u{1b}` a character that can't be seen or
//! that moves what is around it, `\x20` a space at an end, and `\\` a backslash.

/// A key, a part or an id as text, the same in all output.
pub(crate) fn shown(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    let spaces = |bytes: &mut dyn Iterator<Item = &u8>| bytes.take_while(|byte| **byte == b' ').count();
    let (before, rest) = bytes.split_at(spaces(&mut bytes.iter()));
    let (inner, after) = rest.split_at(rest.len() - spaces(&mut rest.iter().rev()));
    before.iter().for_each(|_| text.push_str("\\x20"));
    for chunk in inner.utf8_chunks() {
        if is_plain(chunk.valid()) {
            text.push_str(chunk.valid());
        } else {
            chunk.valid().chars().for_each(|character| push_shown(&mut text, character));
        }
        for byte in chunk.invalid() {
            text.push_str(&format!("\\x{byte:02x}"));
        }
    }
    after.iter().for_each(|_| text.push_str("\\x20"));
    text
}

/// Whether no character needs an escape: the common case, checked quickly.
fn is_plain(text: &str) -> bool {
    text.bytes().all(|byte| matches!(byte, b' '..=b'~') && byte != b'\\')
}

fn push_shown(text: &mut String, character: char) {
    match character {
        '\\' => text.push_str("\\\\"),
        _ if is_visible(character) => text.push(character),
        '\n' | '\r' | '\t' | '\0' => text.extend(character.escape_debug()),
        _ => text.extend(character.escape_unicode()),
    }
}

/// Whether a character is visible and doesn't reorder its neighbours. A combining one is visible after another.
pub(crate) fn is_visible(character: char) -> bool {
    match character {
        ' '..='~' => true,
        // Unicode's Default_Ignorable_Code_Point, as far as it isn't unprintable anyway, and Braille's blank pattern.
        '\u{34f}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}' | '\u{180b}'..='\u{180f}' | '\u{2800}' => false,
        '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{ffa0}' | '\u{e0100}'..='\u{e01ef}' => false,
        _ => character.escape_debug().len() == 1 || is_mark(character),
    }
}

/// Whether it is escaped only because it combines with the preceding character.
fn is_mark(character: char) -> bool {
    let behind = format!("x{character}");
    character.len_utf8() > 1 && behind.escape_debug().eq(behind.chars())
}

/// `acquire, peek or reset`
pub(crate) fn one_of(names: &[&str]) -> String {
    match names {
        [] => String::new(),
        [name] => (*name).to_owned(),
        [names @ .., last] => format!("{} or {last}", names.join(", ")),
    }
}

/// The bytes that this text shows. Invalid escapes are taken literally.
pub(crate) fn read_back(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((plain, escaped)) = rest.split_once('\\') {
        bytes.extend_from_slice(plain.as_bytes());
        match escape(escaped) {
            Some((value, tail)) => {
                bytes.extend_from_slice(&value);
                rest = tail;
            }
            None => {
                bytes.push(b'\\');
                rest = escaped;
            }
        }
    }
    bytes.extend_from_slice(rest.as_bytes());
    bytes
}

/// The value of the escape after a backslash, and the text after it.
fn escape(text: &str) -> Option<(Vec<u8>, &str)> {
    let mut characters = text.chars();
    let value = match characters.next()? {
        '\\' => b'\\',
        'n' => b'\n',
        'r' => b'\r',
        't' => b'\t',
        '0' => 0,
        'x' => {
            let (digits, tail) = text.get(1..3).zip(text.get(3..))?;
            return Some((vec![u8::try_from(number(digits)?).ok()?], tail));
        }
        'u' => {
            let (digits, tail) = text.strip_prefix("u{")?.split_once('}')?;
            let character = char::from_u32(number(digits)?)?;
            return Some((character.to_string().into_bytes(), tail));
        }
        _ => return None,
    };
    Some((vec![value], characters.as_str()))
}

/// Digits only: `from_str_radix` would take a plus sign too.
fn number(digits: &str) -> Option<u32> {
    let hexadecimal = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    u32::from_str_radix(digits, 16).ok().filter(|_| hexadecimal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_listed_as_people_do() {
        assert_eq!(one_of(&["a"]), "a");
        assert_eq!(one_of(&["a", "b"]), "a or b");
        assert_eq!(one_of(&["a", "b", "c"]), "a, b or c");
    }

    #[test]
    fn what_can_be_printed_stands_for_itself_and_nothing_else_does() {
        for (bytes, text) in [
            (&b"user:42"[..], "user:42"),
            ("Zoë \u{91c8} e\u{301} \"q\" it's {a}".as_bytes(), "Zoë \u{91c8} e\u{301} \"q\" it's {a}"),
            (b"a\\b", r"a\\b"),
            (b"\xff\xfe", r"\xff\xfe"),
            (br"\xff", r"\\xff"),
            (b"a\nb\r\t\0", r"a\nb\r\t\0"),
            (b"\x1b[2J\x7f", r"\u{1b}[2J\u{7f}"),
            ("\u{202e}\u{80}".as_bytes(), r"\u{202e}\u{80}"),
            (b"a\x7fb", r"a\u{7f}b"),
            ("a\u{200b}b\u{2028}\u{feff}\u{a0}\u{61c}".as_bytes(), r"a\u{200b}b\u{2028}\u{feff}\u{a0}\u{61c}"),
            ("a\u{34f}\u{fe0f}\u{3164}\u{2800}".as_bytes(), r"a\u{34f}\u{fe0f}\u{3164}\u{2800}"),
            (b" a  b ", r"\x20a  b\x20"),
            (b"  ", r"\x20\x20"),
            (b"a \n", r"a \n"),
            (b"a\n ", r"a\n\x20"),
            (b"\x80", r"\x80"),
            (b"\xef\xbf\xbd", "\u{fffd}"),
            (b"\xe9\x87", r"\xe9\x87"),
        ] {
            assert_eq!(shown(bytes), text);
            assert_eq!(read_back(text), bytes, "{text}");
        }
    }

    #[test]
    fn two_values_never_look_alike() {
        let pieces: [&[u8]; 10] =
            [b"\\", b"x20", b" ", b"\xff", b"n", b"\n", b"u{7f}", b"\x7f", b"\xe2\x80\x8b", b"\xc3"];
        let mut seen = std::collections::HashMap::new();
        for number in 0..10_000_usize {
            let digits = [number / 1000, number / 100 % 10, number / 10 % 10, number % 10];
            let bytes = digits.map(|digit| pieces[digit]).concat();
            let text = shown(&bytes);
            assert_eq!(read_back(&text), bytes, "{text}");
            assert!(text.chars().all(is_visible) && text.trim() == text, "{text:?}");
            assert_eq!(seen.entry(text).or_insert_with(|| bytes.clone()), &bytes);
        }
    }

    #[test]
    fn what_is_no_escape_stands_for_itself() {
        for text in [r"C:\dir", r"\", r"\xg0", r"\x4", r"\u{zz}", r"\u{d800}", r"\q", r"\xé1", r"\x+f", r"\u{+a}"] {
            assert_eq!(read_back(text), text.as_bytes());
        }
    }
}
