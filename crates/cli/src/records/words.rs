//! A line of words with spaces or tabs between: text in quotes or brackets is one word.

use std::borrow::Cow;

use super::combined::unescape;
use super::place::Place;
use super::places::Line;

pub(super) struct Words<'a>(Vec<&'a [u8]>);

impl<'a> Words<'a> {
    pub(super) fn of(mut text: &'a [u8]) -> Self {
        let mut words = Vec::with_capacity(16);
        loop {
            text = text.trim_ascii_start();
            if text.is_empty() {
                return Self(words);
            }
            let (word, rest) = text.split_at(length(text));
            words.push(word);
            text = rest;
        }
    }

    /// The words, with their quotes and brackets.
    pub(super) fn all(&self) -> &[&'a [u8]] {
        &self.0
    }
}

/// How long the first word is. A quote or bracket that is never closed encloses nothing.
fn length(text: &[u8]) -> usize {
    let plain = text.iter().position(u8::is_ascii_whitespace).unwrap_or(text.len());
    // `"..."` and `[...]`, also behind NAME= or in the word.
    let opens = |byte: &u8| matches!(byte, b'"' | b'[');
    let Some(open) = text[..plain].iter().position(opens).filter(|at| *at == 0 || text[at - 1] == b'=') else {
        return plain;
    };
    let close = if text[open] == b'"' { b'"' } else { b']' };
    let mut escaped = false;
    let end = (open + 1..text.len()).find(|at| {
        let closes = text[*at] == close && !escaped && text.get(at + 1).is_none_or(u8::is_ascii_whitespace);
        escaped = text[*at] == b'\\' && !escaped;
        closes
    });
    end.map_or(plain, |end| end + 1)
}

/// The word without its quotes or brackets.
pub(super) fn said(word: &[u8]) -> Cow<'_, [u8]> {
    match word {
        [b'"', text @ .., b'"'] => unescape(text),
        [b'[', text @ .., b']'] => Cow::Borrowed(text),
        word => Cow::Borrowed(word),
    }
}

fn is_quoted(word: &[u8]) -> bool {
    matches!(word, [b'"', .., b'"'])
}

impl Line for Words<'_> {
    fn at(&self, place: &Place) -> Option<Cow<'_, [u8]>> {
        let word = match place {
            Place::At(at @ 1..) => self.0.get(usize::try_from(at - 1).ok()?)?,
            Place::At(at) => self.0.get(self.0.len().checked_sub(usize::from(at.unsigned_abs()))?)?,
            Place::LastQuoted => self.0.iter().rev().find(|word| is_quoted(word))?,
            Place::Named(name) => self.0.iter().find_map(|word| value(word, name))?,
        };
        Some(said(word))
    }

    fn forwarded(&self) -> Vec<(Place, Cow<'_, [u8]>)> {
        let last = self.0.iter().rposition(|word| is_quoted(word));
        let quoted = self.0.iter().enumerate().filter(|(_, word)| is_quoted(word)).filter_map(|(at, word)| {
            let place = if Some(at) == last { Place::LastQuoted } else { Place::At(i16::try_from(at + 1).ok()?) };
            Some((place, said(word)))
        });
        quoted.collect()
    }
}

/// The value in `NAME=value`.
fn value<'a>(word: &'a [u8], name: &str) -> Option<&'a [u8]> {
    word.strip_prefix(name.as_bytes())?.strip_prefix(b"=")
}
