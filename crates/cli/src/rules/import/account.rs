//! What happened to each line of a source.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

/// Lines of the source, from 1: those that became rules, and why others didn't.
#[derive(Debug, Default)]
pub(super) struct Account {
    taken: BTreeSet<usize>,
    left: BTreeMap<usize, Vec<String>>,
    /// Differences, each with the line that it is about.
    differs: Vec<(usize, String)>,
}

impl Account {
    /// The rules express these lines.
    pub(super) fn take(&mut self, lines: RangeInclusive<usize>) {
        self.taken.extend(lines);
    }

    /// These lines have no effect on limits.
    pub(super) fn leave(&mut self, lines: RangeInclusive<usize>, why: &str) {
        for line in lines {
            let reasons = self.left.entry(line).or_default();
            if !reasons.iter().any(|reason| reason == why) {
                reasons.push(why.to_owned());
            }
        }
    }

    /// The rules differ from this line.
    pub(super) fn differ(&mut self, line: usize, how: &str) {
        if !self.differs.iter().any(|(of, said)| *of == line && said == how) {
            self.differs.push((line, how.to_owned()));
        }
    }

    /// These lines would limit, but no rule can express them.
    pub(super) fn lose(&mut self, lines: RangeInclusive<usize>, why: &str) {
        self.differ(*lines.start(), why);
        self.leave(lines, why);
    }

    /// The differences in the order of the lines.
    pub(super) fn differences(&self) -> Vec<(usize, &str)> {
        let mut all: Vec<_> = self.differs.iter().map(|(line, how)| (*line, &**how)).collect();
        all.sort_by_key(|(line, _)| *line);
        all
    }

    /// What isn't translated: ranges of consecutive lines with the same reason.
    pub(super) fn left(&self) -> Vec<(RangeInclusive<usize>, String)> {
        let mut all: Vec<(RangeInclusive<usize>, String)> = Vec::new();
        for (line, reasons) in &self.left {
            let why = reasons.join("; ");
            match all.last_mut() {
                Some((lines, said)) if *said == why && lines.end() + 1 == *line => *lines = *lines.start()..=*line,
                _ => all.push((*line..=*line, why)),
            }
        }
        all
    }

    /// Lists the lines of this text that have not been accounted for.
    pub(super) fn close(&mut self, text: &str) {
        // Brackets and dashes alone need no account.
        let silent = |line: &str| line.starts_with('#') || !line.contains(char::is_alphanumeric);
        for (number, line) in (1..).zip(text.lines()) {
            if !silent(line.trim()) && !self.taken.contains(&number) && !self.left.contains_key(&number) {
                self.leave(number..=number, "isn't read");
            }
        }
    }
}

/// `line 3` or `lines 3 to 5`
pub(super) fn lines(range: &RangeInclusive<usize>) -> String {
    let (start, end) = (range.start(), range.end());
    if start == end { format!("line {start}") } else { format!("lines {start} to {end}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_is_taken_or_listed_once_with_its_reasons() {
        let mut account = Account::default();
        account.take(2..=2);
        account.leave(3..=4, "a");
        account.leave(4..=4, "b");
        account.leave(4..=4, "a");
        account.leave(5..=6, "c");
        account.lose(8..=9, "d");
        account.differ(1, "e");
        account.close("# comment\ntaken\na\nab\nc\nc\n\nd\nd\n  ---\nunread\n");
        let left: Vec<_> = account.left().iter().map(|(range, why)| format!("{}: {why}", lines(range))).collect();
        let unread = "line 11: isn't read";
        assert_eq!(left, ["line 3: a", "line 4: a; b", "lines 5 to 6: c", "lines 8 to 9: d", unread]);
        assert_eq!(account.differences(), [(1, "e"), (8, "d")]);
    }
}
