//! A checksum of rows that doesn't depend on their order: a table and its archive have the same one.

use std::fmt;
use std::str::FromStr;

use sha2::{Digest, Sha256};

use super::row::{Field, Row};

/// How many rows there are, and the sum, modulo 2^128, of the first 16 bytes of each row's SHA-256.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) rows: u64,
    pub(super) checksum: Checksum,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Checksum(u128);

impl Content {
    /// `buffer` is reused, so that it isn't allocated for each row.
    pub(super) fn add(&mut self, row: &Row<'_>, buffer: &mut Vec<u8>) {
        buffer.clear();
        for field in row {
            // Type, length and value, so that no two different rows have the same encoding.
            match field {
                Field::Null => buffer.push(0),
                Field::Number(number) => {
                    buffer.push(1);
                    buffer.extend_from_slice(&number.to_be_bytes());
                }
                Field::Text(text) => {
                    buffer.push(2);
                    buffer.extend_from_slice(&(text.len() as u64).to_be_bytes());
                    buffer.extend_from_slice(text);
                }
            }
        }
        let digest = Sha256::digest(&buffer);
        let mut first = [0; 16];
        first.copy_from_slice(&digest[..16]);
        self.rows += 1;
        self.checksum = Checksum(self.checksum.0.wrapping_add(u128::from_be_bytes(first)));
    }

    /// The content of both together.
    pub(super) fn and(self, other: Self) -> Self {
        let checksum = Checksum(self.checksum.0.wrapping_add(other.checksum.0));
        Self { rows: self.rows.saturating_add(other.rows), checksum }
    }
}

/// As in the manifest: 32 hexadecimal digits.
impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl FromStr for Checksum {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        if text.len() != 32 || !text.bytes().all(is_digit) {
            return Err(());
        }
        u128::from_str_radix(text, 16).map(Self).map_err(|_| ())
    }
}

/// The SHA-256 of bytes, in hexadecimal.
pub(super) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::columns::WIDTH;

    fn content(rows: &[Row<'_>]) -> Content {
        let mut content = Content::default();
        rows.iter().for_each(|row| content.add(row, &mut Vec::new()));
        content
    }

    #[test]
    fn the_order_of_rows_makes_no_difference_and_all_else_does() {
        let null = [Field::Null; WIDTH];
        let with = |at: usize, field| {
            let mut row = null;
            row[at] = field;
            row
        };
        let (one, two) = (with(1, Field::Text(b"a")), with(10, Field::Number(7)));
        assert_eq!(content(&[one, two]), content(&[two, one]));
        assert_eq!(content(&[one]).and(content(&[two])), content(&[one, two]));
        let different = [
            content(&[]),
            content(&[null]),
            content(&[null, null]),
            content(&[one]),
            content(&[one, one]),
            content(&[with(2, Field::Text(b"a"))]),
            content(&[with(1, Field::Text(b""))]),
            content(&[with(10, Field::Number(0))]),
            content(&[with(10, Field::Number(-7))]),
        ];
        for (at, one) in different.iter().enumerate() {
            assert!(different[at + 1..].iter().all(|other| other != one), "{at}");
        }
        let checksum = content(&[one]).checksum;
        assert_eq!(checksum.to_string().parse(), Ok(checksum));
        assert_eq!(checksum.to_string().len(), 32);
        assert!("".parse::<Checksum>().is_err() && "+".repeat(32).parse::<Checksum>().is_err());
        assert_eq!(sha256(b""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    }
}
