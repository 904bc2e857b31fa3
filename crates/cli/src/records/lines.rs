//! Numbered lines of bytes; at most [`LIMIT`] bytes of one are kept in memory.

use std::io::{self, BufRead, Read};

use super::{Record, Unreadable};

/// The most bytes kept of a line, or of a CSV row over several lines. A key may have a megabyte, which is up to six
/// with JSON escapes.
pub(super) const LIMIT: usize = 16 << 20;

pub(super) struct Lines<R> {
    input: R,
    /// The latest line with its ending, in a reused buffer.
    buffer: Vec<u8>,
    number: u64,
}

pub(super) struct Line<'a> {
    /// From 1.
    pub(super) number: u64,
    /// Without its ending, and the first line without its byte order mark.
    pub(super) text: &'a [u8],
    /// `\n`, `\r\n`, or on the last line maybe nothing.
    pub(super) ending: &'a [u8],
    /// Longer than the limit: `text` is only its beginning.
    pub(super) too_long: bool,
}

impl Line<'_> {
    pub(super) fn is_blank(&self) -> bool {
        !self.too_long && self.text.trim_ascii().is_empty()
    }
}

/// The message about a line longer than [`LIMIT`].
pub(super) fn too_long(what: &str) -> String {
    format!("{what}: longer than {LIMIT} bytes")
}

impl<R: BufRead> Lines<R> {
    pub(super) fn new(input: R) -> Self {
        Self { input, buffer: Vec::new(), number: 0 }
    }

    pub(super) fn next(&mut self) -> io::Result<Option<Line<'_>>> {
        self.buffer.clear();
        let read = self.input.by_ref().take(LIMIT as u64 + 1).read_until(b'\n', &mut self.buffer)?;
        if read == 0 {
            return Ok(None);
        }
        self.number += 1;
        let too_long = read > LIMIT && !self.buffer.ends_with(b"\n");
        if too_long {
            self.input.skip_until(b'\n')?;
        }

        let mut line = self.buffer.as_slice();
        if self.number == 1 {
            line = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line);
        }
        let text = line.strip_suffix(b"\n").unwrap_or(line);
        let text = text.strip_suffix(b"\r").unwrap_or(text);
        Ok(Some(Line { number: self.number, text, ending: &line[text.len()..], too_long }))
    }

    /// The next record of a format with one record per line; skips blank lines.
    pub(super) fn next_record(
        &mut self,
        parse: impl Fn(u64, &[u8]) -> Result<Record, String>,
    ) -> io::Result<Option<Result<Record, Unreadable>>> {
        while let Some(line) = self.next()? {
            if line.is_blank() {
                continue;
            }
            let record = if line.too_long { Err(too_long("line")) } else { parse(line.number, line.text) };
            return Ok(Some(record.map_err(|reason| Unreadable { line: line.number, reason })));
        }
        Ok(None)
    }
}
