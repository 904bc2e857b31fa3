//! The format of API keys: `tg_<id>_<secret><checksum>`, in digits and letters.
//!
//! The id has 71 bits and isn't secret: tables, logs and limits name the key by it. The secret has 142 bits from the
//! system's random generator. The checksum is of all that precedes it, by HMAC-SHA256 with the database's own secret:
//! mistyped, truncated and made-up keys are recognised without any look-up, and nobody else can make a text that costs
//! one. Scanners of source code recognise leaked keys by the prefix and the length.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::postgres::PostgresError;

const PREFIX: &str = "tg_";
const ID: usize = 12;
const SECRET: usize = 24;
/// 35 bits.
const CHECKSUM: usize = 6;
const LENGTH: usize = PREFIX.len() + ID + 1 + SECRET + CHECKSUM;

const ALPHABET: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// SHA-256 of a whole key.
pub(crate) type Hash = [u8; 32];

/// Makes and verifies the checksums of one database's keys.
pub(crate) struct Checksums {
    hmac: Hmac<Sha256>,
}

/// The public part of a key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct KeyId([u8; ID]);

/// A newly created key. It is shown once: only its hash is stored.
#[derive(Clone, PartialEq, Eq)]
pub struct NewKey {
    text: String,
}

impl NewKey {
    pub(crate) fn make(checksums: &Checksums) -> Result<Self, PostgresError> {
        let unrandom = |error: getrandom::Error| {
            PostgresError::refused(format!("api key: the system's random generator failed: {error}"))
        };
        let mut text = PREFIX.to_owned();
        draw(ID, &mut text).map_err(unrandom)?;
        text.push('_');
        draw(SECRET, &mut text).map_err(unrandom)?;
        text.push_str(&checksums.of(&text));
        Ok(Self { text })
    }

    /// The key itself, for its user. It can't be recovered later.
    #[must_use]
    pub fn secret(&self) -> &str {
        &self.text
    }

    pub(crate) fn id(&self) -> &str {
        &self.text[PREFIX.len()..PREFIX.len() + ID]
    }

    pub(crate) fn hash(&self) -> Hash {
        Sha256::digest(&self.text).into()
    }
}

/// Shows only the public part.
impl fmt::Debug for NewKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewKey").field("id", &self.id()).finish_non_exhaustive()
    }
}

/// The id and the hash of what a client sent, if it is spelled as a key and has its checksum. Without `checksums`, any
/// checksum is accepted.
pub(crate) fn read(sent: &[u8], checksums: Option<&Checksums>) -> Option<(KeyId, Hash)> {
    let text = std::str::from_utf8(sent).ok().filter(|text| text.len() == LENGTH && text.is_ascii())?;
    let (body, sum) = text.split_at(LENGTH - CHECKSUM);
    let (id, secret) = body.strip_prefix(PREFIX)?.split_once('_').filter(|(id, _)| id.len() == ID)?;
    let spelled = |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric());
    let is_sum = || checksums.is_none_or(|checksums| checksums.of(body).as_bytes().ct_eq(sum.as_bytes()).into());
    (spelled(secret) && spelled(sum) && is_sum()).then_some(())?;
    Some((KeyId::read(id)?, Sha256::digest(sent).into()))
}

/// Whether a key has this hash. Compares in constant time.
pub(crate) fn is_same(sent: &Hash, stored: &[u8]) -> bool {
    sent.as_slice().ct_eq(stored).into()
}

impl Checksums {
    pub(crate) fn new(secret: &[u8]) -> Self {
        Self { hmac: Hmac::new_from_slice(secret).expect("HMAC takes a secret of any length") }
    }

    /// The first 64 bits of the MAC, modulo 62^6, as 6 digits.
    fn of(&self, text: &str) -> String {
        let mac: [u8; 32] = self.hmac.clone().chain_update(text).finalize().into_bytes().into();
        let mut sum = mac[..8].iter().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
        let mut digits = [0; CHECKSUM];
        for digit in digits.iter_mut().rev() {
            *digit = ALPHABET[(sum % 62) as usize];
            sum /= 62;
        }
        digits.iter().map(|digit| char::from(*digit)).collect()
    }
}

/// Hides the secret.
impl fmt::Debug for Checksums {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checksums").finish_non_exhaustive()
    }
}

impl KeyId {
    pub(crate) const LENGTH: usize = ID;

    pub(crate) fn read(text: &str) -> Option<Self> {
        Self::of(text.as_bytes())
    }

    pub(crate) fn of(bytes: &[u8]) -> Option<Self> {
        let bytes = <[u8; ID]>::try_from(bytes).ok()?;
        bytes.iter().all(u8::is_ascii_alphanumeric).then_some(Self(bytes))
    }

    pub(crate) fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap_or_default()
    }
}

impl fmt::Debug for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Appends `count` digits and letters, each equally likely.
fn draw(count: usize, text: &mut String) -> Result<(), getrandom::Error> {
    let end = text.len() + count;
    let mut bytes = [0; 64];
    while text.len() < end {
        getrandom::fill(&mut bytes)?;
        // 248 is the greatest multiple of 62 in a byte: values from there on would make the first letters likelier.
        let drawn = bytes.iter().filter(|byte| **byte < 248).map(|byte| char::from(ALPHABET[usize::from(byte % 62)]));
        text.extend(drawn.take(end - text.len()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_read_back_and_no_other_spelling_of_it() {
        let checksums = Checksums::new(b"sesame");
        let made: Vec<_> = (0..100).map(|_| NewKey::make(&checksums).expect("a key")).collect();
        let read = |sent: &[u8]| super::read(sent, Some(&checksums));
        for key in &made {
            let (id, hash) = read(key.secret().as_bytes()).expect("a key");
            assert_eq!((id.as_str(), hash), (key.id(), key.hash()));
            assert!(is_same(&hash, &key.hash()) && !is_same(&hash, &hash[..31]));
            assert!(!format!("{key:?}").contains(&key.secret()[20..]));
            // Another database's key isn't valid, unless the secret isn't known.
            assert_eq!(super::read(key.secret().as_bytes(), Some(&Checksums::new(b"other"))), None);
            assert_eq!(super::read(key.secret().as_bytes(), None), Some((id, hash)));
        }
        let ids: std::collections::HashSet<_> = made.iter().map(NewKey::id).collect();
        assert_eq!(ids.len(), made.len());
        let key = made[0].secret();
        for at in 0..key.len() {
            for other in [b'0', b'z', b'_', b' ', 0, 0xff] {
                let mut mistyped = key.as_bytes().to_vec();
                if mistyped[at] != other {
                    mistyped[at] = other;
                    assert_eq!(read(&mistyped), None, "{at} {other}");
                }
            }
            assert_eq!(read(&key.as_bytes()[..at]), None);
        }
        for wrong in [format!("{key}0"), format!(" {key}"), key.replacen("tg_", "tx_", 1), String::new()] {
            assert_eq!(read(wrong.as_bytes()), None, "{wrong}");
            assert_eq!(super::read(wrong.as_bytes(), None), None, "{wrong}");
        }
        assert_eq!(format!("{checksums:?}"), "Checksums { .. }");
    }

    /// Must never change. In Python: `int.from_bytes(hmac.digest(b"sesame", b"123456789", "sha256")[:8])`, in base 62.
    #[test]
    fn checksums_never_change() {
        let sum = Checksums::new(b"sesame").of("123456789");
        assert_eq!(sum, "hFYntJ");
    }
}
