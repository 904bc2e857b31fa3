//! The scripts' own text and replies, for tests that call them directly.

use tollgate::Script;

/// Calls allowed, limit, remaining, retry_after_us, reset_after_us.
pub type Record = [i64; 5];

/// The whole text of a script that decides for others.
pub fn composed(name: &str) -> String {
    Script::all().find(|script| script.name() == name).expect("a script").text().to_owned()
}

/// What a packed call answers: what remains and the reset, where all of a key's calls are allowed; else minus one less
/// what remains, the reset, the wait, and how many are allowed.
pub fn records(answer: &[u8], limit: i64, calls: impl Iterator<Item = i64>) -> Vec<Record> {
    let (numbers, rest) = answer.as_chunks::<7>();
    let mut numbers =
        numbers.iter().map(|[a, b, c, d, e, f, g]| i64::from_le_bytes([0, *a, *b, *c, *d, *e, *f, *g]) >> 8);
    let mut next = || numbers.next().expect("a number");
    let read = |calls| match (next(), next()) {
        (remaining @ 0.., reset) => [calls, limit, remaining, 0, reset],
        (less, reset) => {
            let (wait, allowed) = (next(), next());
            [allowed, limit, -1 - less, wait, reset]
        }
    };
    let records: Vec<_> = calls.map(read).collect();
    assert!(rest.is_empty() && numbers.next().is_none(), "{answer:?}");
    records
}
