//! Text for a page, of any origin and length, with any characters.

use crate::escape::is_visible;
use crate::output::grouped;

/// The most characters of a cell or a fact.
pub(super) const LONGEST: usize = 120;

/// Escapes text as the content of an element or of an attribute.
pub(super) fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            _ => safe.push(character),
        }
    }
    safe
}

/// Escapes invisible characters by their numbers.
pub(super) fn printable(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        if is_visible(character) {
            safe.push(character);
        } else {
            safe.extend(character.escape_unicode());
        }
    }
    safe
}

/// Shortens text to about so many characters: its beginning and end, and its length.
pub(super) fn shortened(text: &str, most: usize) -> String {
    if text.len() <= most || text.chars().count() <= most {
        return text.to_owned();
    }
    let length = format!(" ({} characters)", grouped(text.chars().count() as u64));
    let room = most.saturating_sub(length.len() + 1).max(2);
    let end = room / 3;
    let ends: Vec<_> = text.chars().rev().take(end).collect();
    let begins: String = text.chars().take(room - end).collect();
    format!("{begins}…{}{length}", ends.iter().rev().collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_in_a_text_is_taken_for_the_page() {
        assert_eq!(escaped("<script>'\"&amp;"), "&lt;script&gt;&#39;&quot;&amp;amp;");
        assert_eq!(printable("a\u{202e}b\0\u{7f}\u{ffff}"), "a\\u{202e}b\\u{0}\\u{7f}\\u{ffff}");
        assert_eq!(printable("Zoë \u{5d0} e\u{301}"), "Zoë \u{5d0} e\u{301}");
    }

    #[test]
    fn a_long_text_is_shortened_in_its_middle_and_says_how_long_it_is() {
        assert_eq!(shortened("short", 5), "short");
        let long = format!("begin{}end", "x".repeat(1 << 20));
        let short = shortened(&long, 40);
        assert!(short.starts_with("beginx") && short.ends_with("xend (1,048,584 characters)"), "{short}");
        assert!(short.chars().count() <= 40, "{short}");
        assert_eq!(shortened(&"é".repeat(30), 30), "é".repeat(30));
        assert!(shortened(&"é".repeat(31), 8).chars().count() < 31);
    }
}
