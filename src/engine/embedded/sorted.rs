//! A sorted set: members by score, and scores by member.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::ops::Range;

/// Members with a score each, ordered by score and then by their bytes.
#[derive(Clone, Debug, Default)]
pub(super) struct SortedSet {
    scores: HashMap<Vec<u8>, Score>,
    order: BTreeSet<(Score, Vec<u8>)>,
}

/// A number as an integer with the same order, so that each has a next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Score(i64);

impl SortedSet {
    /// Whether the member is new.
    pub(super) fn add(&mut self, member: &[u8], score: Score) -> bool {
        let new = !self.remove(member);
        self.scores.insert(member.to_vec(), score);
        self.order.insert((score, member.to_vec()));
        new
    }

    /// Whether the member was there.
    pub(super) fn remove(&mut self, member: &[u8]) -> bool {
        let Some((member, score)) = self.scores.remove_entry(member) else { return false };
        self.order.remove(&(score, member))
    }

    /// How many there were.
    pub(super) fn remove_range(&mut self, scores: Range<Score>) -> usize {
        let members: Vec<Vec<u8>> = self.range(scores).map(|(member, _)| member.to_vec()).collect();
        members.iter().filter(|member| self.remove(member)).count()
    }

    pub(super) fn score(&self, member: &[u8]) -> Option<Score> {
        self.scores.get(member).copied()
    }

    pub(super) fn range(&self, scores: Range<Score>) -> impl DoubleEndedIterator<Item = (&[u8], Score)> {
        // The tree panics on a range that ends before it starts.
        let end = scores.end.max(scores.start);
        let keys = (scores.start, Vec::new())..(end, Vec::new());
        self.order.range(keys).map(|(score, member)| (member.as_slice(), *score))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.scores.is_empty()
    }
}

impl Score {
    /// Of any number except NaN.
    pub(super) fn new(number: f64) -> Self {
        // -0 + 0 is 0.
        Self(in_order((number + 0.0).to_bits() as i64))
    }

    pub(super) fn next(self) -> Self {
        Self(self.0 + 1)
    }

    fn number(self) -> f64 {
        f64::from_bits(in_order(self.0) as u64)
    }
}

/// As Redis writes it since 7.2, except that Redis sometimes misses the shortest digits; 7.0 writes `%.17g`, which is
/// the same for whole numbers below 10^17.
impl fmt::Display for Score {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = self.number();
        if number.fract() == 0.0 && number.abs() <= (1_i64 << 62) as f64 {
            return write!(f, "{}", number as i64);
        }
        let scientific = format!("{number:e}");
        let parts = scientific.split_once('e').and_then(|(digits, power)| Some((digits, power.parse::<i64>().ok()?)));
        match parts {
            Some((digits, power)) if !is_plain(digits, power) => write!(f, "{digits}e{power:+}"),
            _ => write!(f, "{number}"),
        }
    }
}

/// Which numbers Redis writes without an exponent.
fn is_plain(digits: &str, power: i64) -> bool {
    let count = digits.bytes().filter(u8::is_ascii_digit).count() as i64;
    let decimals = count - 1 - power;
    if decimals <= 0 { power < count + 7 } else { decimals < 7 || power.abs() < 4 }
}

/// Converts a number's bits to an integer in the same order, and back: negative numbers' bits descend, so all but the
/// sign are inverted.
fn in_order(bits: i64) -> i64 {
    if bits < 0 { bits ^ i64::MAX } else { bits }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_are_ordered_as_their_numbers() {
        let numbers =
            [f64::NEG_INFINITY, f64::MIN, -1.5, -f64::from_bits(1), 0.0, f64::from_bits(1), 2.0, f64::INFINITY];
        for (index, number) in numbers.iter().enumerate() {
            assert_eq!(Score::new(*number).number(), *number);
            for after in &numbers[index + 1..] {
                assert!(Score::new(*number) < Score::new(*after), "{number} {after}");
                assert!(Score::new(*number).next() <= Score::new(*after), "{number} {after}");
            }
        }
        assert_eq!(Score::new(-0.0), Score::new(0.0));
    }

    #[test]
    fn a_score_is_written_as_redis_does() {
        // As Valkey 9.1 answers for the same numbers.
        for (number, text) in [
            (0.0, "0"),
            (-0.0, "0"),
            (-17.0, "-17"),
            (9_007_199_254_740_992.0, "9007199254740992"),
            (1e17, "100000000000000000"),
            (-4_611_686_018_427_387_904.0, "-4611686018427387904"),
            (9_223_372_036_854_775_808.0, "9223372036854776000"),
            (1e20, "1e+20"),
            (0.1, "0.1"),
            (-2.5, "-2.5"),
            (1_234.567_890_12, "1234.56789012"),
            (0.000_001, "0.000001"),
            (0.000_123_4, "1.234e-4"),
            (1e-7, "1e-7"),
            (-1_700_000_000.123_456_7, "-1.7000000001234567e+9"),
            (5e-324, "5e-324"),
            (f64::MAX, "1.7976931348623157e+308"),
            (f64::INFINITY, "inf"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(Score::new(number).to_string(), text);
        }
    }

    #[test]
    fn a_moved_member_leaves_its_place() {
        let mut set = SortedSet::default();
        assert!(set.add(b"m", Score::new(1.0)));
        assert!(!set.add(b"m", Score::new(2.0)));
        assert_eq!(set.range(Score::new(0.0)..Score::new(9.0)).collect::<Vec<_>>(), [(&b"m"[..], Score::new(2.0))]);
        assert!(set.remove(b"m"));
        assert!(set.is_empty() && set.order.is_empty());
    }
}
