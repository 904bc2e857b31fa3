//! The commands on sorted sets.

use std::ops::Range;

use super::super::sorted::{Score, SortedSet};
use super::{Keyspace, Outcome, Value, count, integer, wrong_type};

/// What ZRANGE returns of the members between its bounds.
struct Selection {
    by_score: bool,
    reversed: bool,
    skip: usize,
    take: usize,
    with_scores: bool,
}

impl Keyspace {
    pub(super) fn z_add(&mut self, key: &[u8], pairs: &[&[u8]]) -> Result<Outcome, String> {
        let (pairs, []) = pairs.as_chunks::<2>() else { return Err("ERR syntax error".into()) };
        // Parses all of them first: if one is no score, nothing is written.
        let pairs = pairs.iter().map(|[score, member]| Some((exact_score(score)?, *member)));
        let pairs: Vec<_> = pairs.collect::<Option<_>>().ok_or("ERR value is not a valid float")?;
        let Value::Sorted(set) = self.live_or(key, Value::Sorted(SortedSet::default())) else {
            return Err(wrong_type());
        };
        Ok(count(pairs.into_iter().filter(|(score, member)| set.add(member, *score)).count()))
    }

    pub(super) fn z_rem(&mut self, key: &[u8], members: &[&[u8]]) -> Result<Outcome, String> {
        self.thin_out(key, |set| members.iter().filter(|member| set.remove(member)).count())
    }

    pub(super) fn z_rem_range_by_score(&mut self, key: &[u8], min: &[u8], max: &[u8]) -> Result<Outcome, String> {
        let scores = between(min, max)?;
        self.thin_out(key, |set| set.remove_range(scores))
    }

    pub(super) fn z_count(&mut self, key: &[u8], min: &[u8], max: &[u8]) -> Result<Outcome, String> {
        let scores = between(min, max)?;
        Ok(count(self.sorted(key)?.map_or(0, |set| set.range(scores).count())))
    }

    pub(super) fn z_score(&mut self, key: &[u8], member: &[u8]) -> Result<Outcome, String> {
        let score = self.sorted(key)?.and_then(|set| set.score(member));
        Ok(score.map_or(Outcome::Nothing, |score| Outcome::Bytes(score.to_string().into_bytes())))
    }

    pub(super) fn z_range(&mut self, key: &[u8], from: &[u8], to: &[u8], options: &[&[u8]]) -> Result<Outcome, String> {
        let mut selection = Selection::parse(options)?;
        let scores = match (selection.by_score, selection.reversed) {
            (true, false) => between(from, to)?,
            (true, true) => between(to, from)?,
            (false, _) => {
                selection.by_index(integer(from)?, integer(to)?)?;
                between(b"-inf", b"+inf")?
            }
        };
        let Some(set) = self.sorted(key)? else { return Ok(Outcome::Array(Vec::new())) };
        let members = set.range(scores);
        Ok(if selection.reversed { selection.of(members.rev()) } else { selection.of(members) })
    }

    fn sorted(&mut self, key: &[u8]) -> Result<Option<&mut SortedSet>, String> {
        match self.live(key).map(|entry| &mut entry.value) {
            None => Ok(None),
            Some(Value::Sorted(set)) => Ok(Some(set)),
            Some(_) => Err(wrong_type()),
        }
    }

    /// Removes members, and the key with the last one.
    fn thin_out(&mut self, key: &[u8], remove: impl FnOnce(&mut SortedSet) -> usize) -> Result<Outcome, String> {
        let Some(set) = self.sorted(key)? else { return Ok(Outcome::Integer(0)) };
        let removed = remove(set);
        if set.is_empty() {
            self.values.remove(key);
        }
        Ok(count(removed))
    }
}

impl Selection {
    fn parse(mut options: &[&[u8]]) -> Result<Self, String> {
        let mut selection = Self { by_score: false, reversed: false, skip: 0, take: usize::MAX, with_scores: false };
        while !options.is_empty() {
            options = match options {
                [b"BYSCORE", rest @ ..] if !selection.by_score => {
                    selection.by_score = true;
                    rest
                }
                [b"REV", rest @ ..] if !selection.reversed => {
                    selection.reversed = true;
                    rest
                }
                [b"WITHSCORES", rest @ ..] => {
                    selection.with_scores = true;
                    rest
                }
                [b"LIMIT", offset, count, rest @ ..] => {
                    selection.limit(integer(offset)?, integer(count)?);
                    rest
                }
                _ => return Err("ERR syntax error".into()),
            };
        }
        Ok(selection)
    }

    /// Those from the first to the last of these places, the lowest score's being 0.
    fn by_index(&mut self, first: i64, last: i64) -> Result<(), String> {
        if self.reversed || first < 0 || last < 0 {
            return Err("ERR the embedded engine has no ZRANGE by places from the end".into());
        }
        self.limit(first, last.saturating_sub(first).saturating_add(1).max(0));
        Ok(())
    }

    /// A negative offset selects nothing, a negative count everything.
    fn limit(&mut self, offset: i64, count: i64) {
        (self.skip, self.take) = match usize::try_from(offset) {
            Ok(offset) => (offset, usize::try_from(count).unwrap_or(usize::MAX)),
            Err(_) => (0, 0),
        };
    }

    fn of<'a>(&self, members: impl Iterator<Item = (&'a [u8], Score)>) -> Outcome {
        let mut items = Vec::new();
        for (member, score) in members.skip(self.skip).take(self.take) {
            items.push(member.to_vec());
            if self.with_scores {
                items.push(score.to_string().into_bytes());
            }
        }
        Outcome::Array(items)
    }
}

/// The scores between two bounds; `(` before a bound excludes it.
fn between(min: &[u8], max: &[u8]) -> Result<Range<Score>, String> {
    let bound = |text: &[u8]| {
        let excluded = text.strip_prefix(b"(");
        let number = match excluded.unwrap_or(text) {
            // Redis accepts it: strtod finds no number, but no other character either.
            b"" => 0.0,
            text => number(text).ok_or("ERR min or max is not a float")?,
        };
        Ok::<_, String>((Score::new(number), excluded.is_some()))
    };
    let ((min, after_min), (max, before_max)) = (bound(min)?, bound(max)?);
    Ok(if after_min { min.next() } else { min }..if before_max { max } else { max.next() })
}

/// A member's score, unless it would be rounded to infinity or zero.
fn exact_score(text: &[u8]) -> Option<Score> {
    let number = number(text)?;
    let mut digits = text.iter().take_while(|byte| !byte.eq_ignore_ascii_case(&b'e'));
    let rounded = (number.is_infinite() || number == 0.0) && digits.any(|byte| matches!(byte, b'1'..=b'9'));
    (!rounded).then(|| Score::new(number))
}

fn number(text: &[u8]) -> Option<f64> {
    let number: f64 = std::str::from_utf8(text).ok()?.parse().ok()?;
    (!number.is_nan()).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::super::LEAST_SWEPT;
    use super::super::tests::run;
    use super::*;

    fn text(outcome: Outcome) -> String {
        let word = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        match outcome {
            Outcome::Nothing => "nil".into(),
            Outcome::Done => "OK".into(),
            Outcome::Integer(number) => number.to_string(),
            Outcome::Bytes(bytes) => format!("'{}'", word(bytes)),
            Outcome::Array(items) => format!("[{}]", items.into_iter().map(word).collect::<Vec<_>>().join(" ")),
            Outcome::Values(values) => format!("{values:?}"),
            Outcome::Time(parts) => parts.join(" "),
            Outcome::Error(message) => message,
        }
    }

    const WRONG_TYPE: &str = "WRONGTYPE Operation against a key holding the wrong kind of value";
    const NO_SCORE: &str = "ERR value is not a valid float";
    const NO_BOUND: &str = "ERR min or max is not a float";
    const NO_INTEGER: &str = "ERR value is not an integer or out of range";
    const SYNTAX: &str = "ERR syntax error";

    /// Commands, run in order, each with what Redis 7.0 and Valkey 9.1 answer to it within EVAL.
    const ANSWERS: &[(&str, &str)] = &[
        // Members and scores.
        ("ZADD z 1 a 2 c 2 B 2 b 3 d", "5"),
        ("ZADD z 1 a 4 d 9 e 8 e", "1"),
        ("ZSCORE z d", "'4'"),
        ("ZSCORE z e", "'8'"),
        ("ZSCORE z none", "nil"),
        ("ZSCORE none a", "nil"),
        ("ZADD z 1 a 2", SYNTAX),
        ("ZADD z 1 new x other", NO_SCORE),
        ("ZADD z nan a", NO_SCORE),
        ("ZADD z 1e400 a", NO_SCORE),
        ("ZADD z -1e-400 a", NO_SCORE),
        ("ZADD z  a", NO_SCORE),
        ("ZADD z 1e a", NO_SCORE),
        ("ZSCORE z new", "nil"),
        ("ZADD n -0 a +5 b 5. c .5 d -1.25 e 1e3 f 9007199254740992 g -inf h +INF i 0e9 j", "10"),
        (
            "ZRANGE n -inf +inf BYSCORE WITHSCORES",
            "[h -inf e -1.25 a 0 j 0 d 0.5 b 5 c 5 f 1000 g 9007199254740992 i inf]",
        ),
        ("ZADD n 0 i -0 i -0 k 0 k", "1"),
        ("ZSCORE n i", "'0'"),
        ("ZCOUNT n -0 (0", "0"),
        ("ZCOUNT n -0 0", "4"),
        ("ZCOUNT n (-1.25 (0.5", "4"),
        // Ranges.
        ("ZRANGE z -inf +inf BYSCORE", "[a B b c d e]"),
        ("ZRANGE z 2 4 BYSCORE", "[B b c d]"),
        ("ZRANGE z (1 (4 BYSCORE", "[B b c]"),
        ("ZRANGE z (2 4 BYSCORE", "[d]"),
        ("ZRANGE z 4 2 BYSCORE", "[]"),
        ("ZRANGE z (2 (2 BYSCORE", "[]"),
        ("ZRANGE z (2 2 BYSCORE", "[]"),
        ("ZRANGE z 2 2 BYSCORE", "[B b c]"),
        ("ZRANGE z +inf -inf BYSCORE", "[]"),
        ("ZRANGE z (+inf +inf BYSCORE", "[]"),
        ("ZRANGE n (-inf (+inf BYSCORE LIMIT 0 2", "[e a]"),
        ("ZRANGE z 1e400 -1e400 BYSCORE REV", "[e d c b B a]"),
        ("ZRANGE z ( 3 BYSCORE", "[a B b c]"),
        ("ZRANGE z 4 (1 REV BYSCORE", "[d c b B]"),
        ("ZRANGE z 1 4 REV BYSCORE", "[]"),
        ("ZRANGE z -inf +inf LIMIT 1 2 BYSCORE WITHSCORES", "[B 2 b 2]"),
        ("ZRANGE z +inf -inf WITHSCORES REV LIMIT 1 2 BYSCORE", "[d 4 c 2]"),
        ("ZRANGE z -inf +inf BYSCORE LIMIT 4 9", "[d e]"),
        ("ZRANGE z -inf +inf BYSCORE LIMIT 6 1", "[]"),
        ("ZRANGE z -inf +inf BYSCORE LIMIT 0 0", "[]"),
        ("ZRANGE z -inf +inf BYSCORE LIMIT 4 -1", "[d e]"),
        ("ZRANGE z -inf +inf BYSCORE LIMIT -1 2", "[]"),
        ("ZRANGE z -inf +inf BYSCORE WITHSCORES LIMIT 0 1 LIMIT 1 1 WITHSCORES", "[B 2]"),
        ("ZRANGE z -inf +inf BYSCORE BYSCORE", SYNTAX),
        ("ZRANGE z -inf +inf REV BYSCORE REV", SYNTAX),
        ("ZRANGE none 1 2 BYSCORE WITHSCORES", "[]"),
        ("ZRANGE z 0 2", "[a B b]"),
        ("ZRANGE z 1 1 WITHSCORES", "[B 2]"),
        ("ZRANGE z 4 9", "[d e]"),
        ("ZRANGE z 6 9", "[]"),
        ("ZRANGE z 3 2", "[]"),
        ("ZRANGE none 0 2", "[]"),
        ("ZRANGE none x 2 BYSCORE", NO_BOUND),
        ("ZRANGE z 1 ((2 BYSCORE", NO_BOUND),
        ("ZRANGE z 1 nan BYSCORE", NO_BOUND),
        ("ZRANGE z 1 x BYSCORE LIMIT x 1", NO_INTEGER),
        ("ZRANGE z 1 2 BYSCORE LIMIT 0 1.5", NO_INTEGER),
        ("ZRANGE z 1 x BYSCORE LIMIT 0", SYNTAX),
        ("ZRANGE z 1 x BYSCORE NONE", SYNTAX),
        ("ZCOUNT z 2 +inf", "5"),
        ("ZCOUNT z (2 4", "1"),
        ("ZCOUNT z 4 2", "0"),
        ("ZCOUNT none 1 2", "0"),
        ("ZCOUNT none 1 x", NO_BOUND),
        // Removal of members, and of the key with the last one.
        ("ZREM z b none b", "1"),
        ("ZREM none a", "0"),
        ("ZREMRANGEBYSCORE z 2 (4", "2"),
        ("ZREMRANGEBYSCORE z 4 1", "0"),
        ("ZREMRANGEBYSCORE z 1 x", NO_BOUND),
        ("ZREMRANGEBYSCORE none 1 2", "0"),
        ("ZRANGE z -inf +inf BYSCORE", "[a d e]"),
        ("ZREM z a e d", "3"),
        ("EXISTS z", "0"),
        ("ZREMRANGEBYSCORE n -inf +inf", "11"),
        ("EXISTS n", "0"),
        // A key's type.
        ("ZADD z 1 a", "1"),
        ("GET z", WRONG_TYPE),
        ("STRLEN z", WRONG_TYPE),
        ("GETRANGE z 0 1", WRONG_TYPE),
        ("GETRANGE z x 1", NO_INTEGER),
        ("SETRANGE z 0 v", WRONG_TYPE),
        ("SETRANGE z -1 v", "ERR offset is out of range"),
        ("ZSCORE z a", "'1'"),
        ("SET s v PX 60000", "OK"),
        ("ZADD s 1 a", WRONG_TYPE),
        ("ZADD s x a", NO_SCORE),
        ("ZADD s 1 a 2", SYNTAX),
        ("ZREM s a", WRONG_TYPE),
        ("ZCOUNT s 1 2", WRONG_TYPE),
        ("ZCOUNT s 1 x", NO_BOUND),
        ("ZSCORE s a", WRONG_TYPE),
        ("ZRANGE s 1 2 BYSCORE", WRONG_TYPE),
        ("ZRANGE s 1 x BYSCORE", NO_BOUND),
        ("ZREMRANGEBYSCORE s 1 2", WRONG_TYPE),
        ("ZREMRANGEBYSCORE s 1 x", NO_BOUND),
        ("GET s", "'v'"),
        ("SET z v PX 60000", "OK"),
        ("GET z", "'v'"),
        ("DEL z", "1"),
        // Expiry.
        ("ZADD z 1 a", "1"),
        ("EXISTS z", "1"),
        ("PTTL z", "-1"),
        ("PEXPIRE z 60000", "1"),
        ("ZADD z 2 a 3 b", "1"),
        ("PEXPIREAT z 1", "1"),
        ("PTTL z", "-2"),
        ("ZSCORE z a", "nil"),
        ("ZADD z 1 a", "1"),
        ("PTTL z", "-1"),
        ("DEL z", "1"),
        ("DEL z", "0"),
    ];

    #[test]
    fn sorted_sets_answer_as_those_of_redis() {
        let mut store = Keyspace::default();
        store.set_time(1_000_000_000);
        for (command, expected) in ANSWERS {
            assert_eq!(text(run(&mut store, command)), *expected, "{command}");
        }
    }

    #[test]
    fn what_is_not_there_is_refused() {
        let mut store = Keyspace::default();
        for command in ["ZADD z 1", "ZREM z", "ZRANGE z 0 -1", "ZRANGE z 0 1 REV", "ZADD z NX 1 a", "ZCARD z"] {
            assert!(matches!(run(&mut store, command), Outcome::Error(_)), "{command}");
        }
        assert_eq!(store.len(), 0);
    }

    #[test]
    fn a_set_is_gone_at_its_expiry_and_keeps_it_until_then() {
        let mut store = Keyspace::default();
        store.set_time(1_000_000);
        run(&mut store, "ZADD z 1 a");
        assert_eq!(run(&mut store, "PEXPIRE z 5"), Outcome::Integer(1));
        store.set_time(1_004_999);
        assert_eq!(run(&mut store, "ZADD z 2 b"), Outcome::Integer(1));
        assert_eq!(run(&mut store, "PTTL z"), Outcome::Integer(1));
        store.set_time(1_005_000);
        assert_eq!(run(&mut store, "ZCOUNT z -inf +inf"), Outcome::Integer(0));
        assert_eq!(run(&mut store, "ZADD z 3 c"), Outcome::Integer(1));
        assert_eq!(text(run(&mut store, "ZRANGE z -inf +inf BYSCORE")), "[c]");
        assert_eq!(run(&mut store, "PTTL z"), Outcome::Integer(-1));
    }

    #[test]
    fn sets_that_expired_are_swept() {
        let mut store = Keyspace::default();
        for n in 0..10_000 {
            store.set_time(n * 1000);
            run(&mut store, &format!("ZADD z{n} 1 a"));
            run(&mut store, &format!("PEXPIRE z{n} 10"));
        }
        assert!(store.values.len() <= 2 * LEAST_SWEPT, "{} keys left", store.values.len());
    }
}
