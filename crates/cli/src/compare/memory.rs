//! Estimates the memory of a rule's keys in Redis: the lengths of a key's name and state, and the overhead of Redis.

use tollgate::{Algorithm, Limit, Limiter, Request, Rule};

use crate::replay::Edges;

/// What Redis takes for a key besides its name and its state: two entries of hash tables (one for the expiry), an
/// object, and rounding. Measured on Redis 7.0.15 as used_memory over 10,000 keys; it was 120 to 145.
const PER_KEY: u64 = 130;

/// Bytes on one server for all these keys at once, each at its fullest, named with the default prefix.
pub(super) fn bytes<'k>(rule: &Rule, keys: impl Iterator<Item = &'k Vec<u8>>, edges: &Edges) -> u64 {
    let names = Limiter::new(tollgate::Embedded::new());
    let of_key = |key: &Vec<u8>| {
        let names: u64 = names.keys(rule, Request::new(key)).unwrap_or_default().iter().map(|n| n.len() as u64).sum();
        let mut place = 0;
        let states = rule.limits().map(|limit| {
            let entries = edges.entries(place, key);
            place += usize::from(!limit.algorithm().holds());
            PER_KEY + state(limit, entries)
        });
        names + states.sum::<u64>()
    };
    keys.map(of_key).sum()
}

/// The length of a limit's state, as lua/README.md says.
fn state(limit: &Limit, entries: usize) -> u64 {
    match limit.algorithm() {
        Algorithm::SlidingLog => {
            let slots = (entries as u64 * 6).div_ceil(5).max(4);
            54 + 12 * slots
        }
        Algorithm::Concurrency => 57,
        Algorithm::FixedWindow => 55,
        Algorithm::CalendarWindow => 34,
        // The test below checks that this holds for all others.
        _ => 44,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rule_arguments::subject_of;

    #[test]
    fn states_are_as_long_as_the_scripts_readme_says() {
        let readme = tollgate_testing::repository::read("lua/README.md");
        for algorithm in Algorithm::all() {
            let limit = tollgate_testing::rules::limit(tollgate_testing::rules::five_of(algorithm));
            let row = format!("| `{}` | ", algorithm.script().name());
            let (_, states) = readme.split_once("| script | bytes | fields |").expect("a table of states");
            let line = states.lines().find_map(|line| line.strip_prefix(&row)).expect("a row");
            let least = if algorithm == Algorithm::SlidingLog { state(&limit, 0) - 4 * 12 } else { state(&limit, 1) };
            let numbers = line.split(|character: char| !character.is_ascii_digit()).filter(|number| !number.is_empty());
            assert_eq!(numbers.clone().next(), Some(least.to_string().as_str()), "{algorithm}: {line}");
        }
    }

    #[test]
    fn a_log_takes_memory_for_each_request_and_others_for_each_key() {
        let bytes = |rule: &str, requests: u64| {
            let rule = subject_of(rule).unwrap().rule;
            let mut edges = Edges::of(&rule);
            (0..requests).for_each(|at| edges.note(b"user:42", at, 1));
            bytes(&rule, [b"user:42".to_vec()].iter(), &edges)
        };
        let name = "tollgate:{user:42}:cli/token-bucket-1m".len() as u64;
        assert_eq!(bytes("token-bucket 100/1m", 1), PER_KEY + name + 44);
        assert_eq!(bytes("token-bucket 100/1m", 90), bytes("token-bucket 100/1m", 1));
        assert!(bytes("sliding-log 100/1m", 90) > bytes("sliding-log 100/1m", 1) + 90 * 12);
        assert!(bytes("token-bucket 100/1m, fixed-window 9/1d", 1) > 2 * PER_KEY + 44 + 55);
    }
}
