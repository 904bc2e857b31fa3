//! Authenticates what is cached in Redis, where others may write, with a secret that isn't there.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// HMAC-SHA256 over an entry and the name of its Redis key, so that no entry passes for another.
#[derive(Clone)]
pub(crate) struct Seal {
    hmac: Hmac<Sha256>,
}

/// The bytes of a MAC. They precede the content.
const MAC: usize = 32;
/// The first byte of the content, counted from 1 as Lua does.
pub(crate) const SEALED_FROM: usize = MAC + 1;

impl Seal {
    pub(crate) fn new(secret: &[u8]) -> Self {
        Self { hmac: Hmac::new_from_slice(secret).expect("HMAC takes a secret of any length") }
    }

    /// The entry for this Redis key.
    pub(crate) fn seal(&self, name: &str, content: &[u8]) -> Vec<u8> {
        let mut entry = self.mac(name, content).finalize().into_bytes().to_vec();
        entry.extend_from_slice(content);
        entry
    }

    /// The content of the entry at this Redis key; `None` if it wasn't sealed for this key with this secret.
    pub(crate) fn open<'e>(&self, name: &str, entry: &'e [u8]) -> Option<&'e [u8]> {
        let (mac, content) = entry.split_at_checked(MAC)?;
        // Compares in constant time.
        self.mac(name, content).verify_slice(mac).is_ok().then_some(content)
    }

    fn mac(&self, name: &str, content: &[u8]) -> Hmac<Sha256> {
        // With the name's length, so that no other name and content yield the same bytes.
        let length = u64::try_from(name.len()).unwrap_or(u64::MAX).to_be_bytes();
        self.hmac.clone().chain_update(length).chain_update(name).chain_update(content)
    }
}

/// The content of an entry, unverified.
pub(crate) fn unverified(entry: &[u8]) -> Option<&[u8]> {
    entry.get(MAC..)
}

/// Hides the secret.
impl fmt::Debug for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Seal").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_entry_of_the_same_name_and_secret_is_opened() {
        let seal = Seal::new(b"sesame");
        let entry = seal.seal("rules", b"content");
        assert_eq!(seal.open("rules", &entry), Some(&b"content"[..]));
        assert_eq!(unverified(&entry), Some(&b"content"[..]));
        assert_eq!(seal.open("rules", &seal.seal("rules", b"")), Some(&b""[..]));
        assert_eq!(Seal::new(b"sesame").open("rules", &entry), Some(&b"content"[..]), "another process");
        assert_eq!(Seal::new(b"other").open("rules", &entry), None);
        for name in ["", "rule", "rulesc", "Rules"] {
            assert_eq!(seal.open(name, &entry), None, "{name}");
        }
        // The bytes of name and content are the same, divided elsewhere.
        assert_eq!(seal.open("rulesc", &[&entry[..MAC], b"ontent"].concat()), None);
        for at in 0..entry.len() {
            let mut changed = entry.clone();
            changed[at] ^= 1;
            assert_eq!(seal.open("rules", &changed), None, "{at}");
            assert_eq!(seal.open("rules", &entry[..at]), None, "{at}");
        }
        assert_eq!((seal.open("rules", &[]), unverified(&[0; 31])), (None, None));
        assert_eq!(seal.open("rules", &[&entry[..], b"x"].concat()), None);
    }

    #[test]
    fn nothing_shows_the_secret() {
        assert_eq!(format!("{:?}", Seal::new(b"sesame")), "Seal { .. }");
    }
}
