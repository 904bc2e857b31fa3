//! The scripts' own replies, for tests that call them directly.

/// Calls allowed, limit, remaining, retry_after_us, reset_after_us.
pub type Record = [i64; 5];

/// What a packed call of one limit answers: of each key what remains, the reset, the wait, and how many are allowed.
pub fn records(answer: &[u8], limit: i64) -> Vec<Record> {
    let (records, rest) = answer.as_chunks::<24>();
    assert!(rest.is_empty(), "{answer:?}");
    let record = |bytes: &[u8; 24]| {
        let number = |at: usize, width: usize| {
            let mut number = [0; 8];
            number[8 - width..].copy_from_slice(&bytes[at..at + width]);
            i64::from_le_bytes(number) >> (64 - 8 * width)
        };
        let allowed = number(21, 3);
        // Of a blocked key, that is when the block ends.
        let remaining = if allowed == -1 { 0 } else { number(0, 7) };
        [allowed, limit, remaining, number(14, 7), number(7, 7)]
    };
    records.iter().map(record).collect()
}
