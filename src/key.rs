//! The encoding of keys in Redis: `<prefix>:{<tag>}:<key>:<rule>/<limit>`, without `<key>` if it equals the tag.
//!
//! A key is data: any bytes. Letters, digits and `-_.@:/+=,~|` stand for themselves. Everything else, including braces
//! and `%`, is written `%XX`. An encoding longer than 128 bytes is replaced by `#` and the SHA-256 of the key. Names of
//! rules and limits contain neither `:` nor `/`, so the encoding is injective: the tag ends at the first `}`, the rule
//! begins after the last `:`, and no key can open a tag of its own. `<limit>` is an algorithm and its period,
//! `token-bucket-1m`, or the limit's name and its algorithm, `per-user/token-bucket`: states of other algorithms can't
//! be read.
//!
//! Each shard of a limit has its own tag, and so its own slot: `{<tag>%s<number>}`, which no key can produce, since a
//! key's own `%` is followed by two of `0-9a-f`. The same holds for `%h` and the 32 digits of a hash, which stand for
//! personal data, and for `%c`, under which the configuration of a system of record is cached.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use smallvec::SmallVec;

use crate::error::{Error, Kind, RuleError};

/// A key as encoded in Redis, usually short enough to be stored inline.
pub(crate) type Key = SmallVec<[u8; INLINE]>;

/// How many bytes of a key are stored inline.
const INLINE: usize = 64;

/// Which bytes stand for themselves in a key, and which in an id.
const IN_KEY: Plain = plain(b"-_.@:/+=,~|");
const IN_ID: Plain = plain(b"-_.");
/// The longest encoding of a key, in bytes, before it is hashed.
const MOST_BYTES: usize = 128;

/// For each byte, whether it stands for itself.
type Plain = [bool; 256];

/// A shorter secret could be guessed.
const SHORTEST_SECRET: usize = 16;

/// A secret for hashing keys, so that addresses, e-mails and the like don't appear in Redis: see
/// [`LimiterBuilder::key_secret`](crate::LimiterBuilder::key_secret). `Debug` never shows it.
///
/// ```
/// use tollgate::{Embedded, KeySecret, Limiter};
///
/// let secret = KeySecret::new(b"32 bytes by chance, from a vault")?;
/// let limiter = Limiter::builder(Embedded::new()).key_secret(&secret).build();
/// # Ok::<(), tollgate::Error>(())
/// ```
#[derive(Clone)]
pub struct KeySecret {
    hmac: Hmac<Sha256>,
}

/// What is counted, or what groups keys: as given, or hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Name<'a> {
    Plain(&'a [u8]),
    Hashed([u8; 16]),
}

impl KeySecret {
    /// A secret of at least 16 bytes; 32 random ones are a good choice.
    ///
    /// # Errors
    ///
    /// A shorter secret.
    pub fn new(secret: impl AsRef<[u8]>) -> Result<Self, Error> {
        let secret = secret.as_ref();
        let too_short = |got: usize| {
            Error::new(Kind::Input, format!("key secret: expected at least {SHORTEST_SECRET} bytes, got {got}"))
        };
        if secret.len() < SHORTEST_SECRET {
            return Err(too_short(secret.len()));
        }
        Ok(Self { hmac: Hmac::new_from_slice(secret).map_err(|_| too_short(secret.len()))? })
    }

    /// The first 128 bits of HMAC-SHA256 (RFC 2104).
    fn hash(&self, bytes: &[u8]) -> [u8; 16] {
        let all: [u8; 32] = self.hmac.clone().chain_update(bytes).finalize().into_bytes().into();
        let mut first = [0; 16];
        first.copy_from_slice(&all[..16]);
        first
    }
}

impl fmt::Debug for KeySecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeySecret").finish_non_exhaustive()
    }
}

impl<'a> Name<'a> {
    /// Hashed if there is a secret.
    pub(crate) fn new(bytes: &'a [u8], secret: Option<&KeySecret>) -> Result<Self, Error> {
        if bytes.is_empty() {
            return Err(Error::new(Kind::EmptyKey, "key: expected at least one byte, got an empty key"));
        }
        Ok(secret.map_or(Self::Plain(bytes), |secret| Self::Hashed(secret.hash(bytes))))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Self::Plain(bytes) => bytes,
            Self::Hashed(hash) => hash,
        }
    }

    pub(crate) fn spell(&self, into: &mut Key) {
        self.spell_by(&IN_KEY, into);
    }

    /// The same, without a character that could end it among others.
    pub(crate) fn spell_apart(&self, into: &mut Key) {
        self.spell_by(&IN_ID, into);
    }

    fn spell_by(&self, plain: &Plain, into: &mut Key) {
        match self {
            Self::Plain(bytes) => encode(bytes, plain, into),
            Self::Hashed(hash) => {
                into.extend_from_slice(b"%h");
                into.extend(hash.iter().flat_map(|byte| [hex(byte >> 4), hex(byte & 15)]));
            }
        }
    }
}

/// The key of the state of one limit, or of one of its shards.
pub(crate) fn state_key(
    prefix: &str,
    (tag, shard): (Name<'_>, Option<u32>),
    key: Name<'_>,
    rule_and_limit: &str,
) -> Key {
    if let (Name::Plain(bytes), Name::Plain(tag), None) = (key, tag, shard)
        && (std::ptr::eq(bytes, tag) || bytes == tag)
        && let Some(short) = short_key(prefix, bytes, rule_and_limit)
    {
        return short;
    }
    let mut spelled = Key::new();
    spelled.extend_from_slice(prefix.as_bytes());
    spelled.push(b':');
    spelled.push(b'{');
    tag.spell(&mut spelled);
    if let Some(number) = shard {
        spelled.extend_from_slice(format!("%s{number}").as_bytes());
    }
    spelled.push(b'}');
    spelled.push(b':');
    if key != tag {
        key.spell(&mut spelled);
        spelled.push(b':');
    }
    spelled.extend_from_slice(rule_and_limit.as_bytes());
    spelled
}

/// The same for a key that is its own tag, if all of it stands for itself and the whole is short, as is usual. Takes a
/// third of the time.
fn short_key(prefix: &str, key: &[u8], rule_and_limit: &str) -> Option<Key> {
    let pieces = [prefix.as_bytes(), b":{", key, b"}:", rule_and_limit.as_bytes()];
    let length = pieces.iter().map(|piece| piece.len()).sum();
    if length > INLINE || !key.iter().all(|byte| IN_KEY[usize::from(*byte)]) {
        return None;
    }
    let (mut spelled, mut at) = ([0; INLINE], 0);
    for piece in pieces {
        spelled[at..at + piece.len()].copy_from_slice(piece);
        at += piece.len();
    }
    Some(Key::from_buf_and_len(spelled, length))
}

/// The key that remembers a call by its id: the rule's, with `#<limits>-<id>` in the limit's place. In an id only
/// letters, digits and `-_.` stand for themselves, so it can't be mistaken for anything else.
pub(crate) fn marker_key(
    prefix: &str,
    tag: (Name<'_>, Option<u32>),
    key: Name<'_>,
    rule: &str,
    id: &[u8],
) -> Result<Key, Error> {
    if id.is_empty() {
        return Err(Error::new(Kind::Input, "id: expected at least one byte, got an empty id"));
    }
    let mut marker = state_key(prefix, tag, key, rule);
    encode(id, &IN_ID, &mut marker);
    Ok(marker)
}

/// An id as the holder of permits.
pub(crate) fn holder(id: &[u8]) -> Result<Key, Error> {
    if id.is_empty() {
        return Err(Error::new(Kind::Input, "id: expected at least one byte, got an empty id"));
    }
    let mut holder = Key::new();
    encode(id, &IN_KEY, &mut holder);
    Ok(holder)
}

/// A glob that matches every key of this rule, and possibly other rules' keys: see [`is_of_rule`].
pub(crate) fn glob_of_rule(prefix: &str, rule: &str) -> String {
    let mut glob = String::new();
    for character in prefix.chars() {
        if "*?[]\\^".contains(character) {
            glob.push('\\');
        }
        glob.push(character);
    }
    format!("{glob}:{{*:{rule}[/#]*")
}

/// Whether this is a key of this rule: what follows its last `:` begins with the rule's name.
pub(crate) fn is_of_rule(key: &[u8], prefix: &str, rule: &str) -> bool {
    let last = key.rsplit(|byte| *byte == b':').next().unwrap_or_default();
    let limit = last.strip_prefix(rule.as_bytes());
    key.strip_prefix(prefix.as_bytes()).is_some_and(|rest| rest.starts_with(b":{"))
        && limit.is_some_and(|limit| matches!(limit.first(), Some(b'/' | b'#')))
}

/// The prefix, if it can't be mistaken for a tag.
pub(crate) fn checked_prefix(prefix: &str) -> Result<&str, Error> {
    if prefix.is_empty() || prefix.contains(['{', '}']) {
        return Err(Error::new(Kind::Input, format!("prefix: expected some text without braces, got {prefix:?}")));
    }
    Ok(prefix)
}

/// The name of a rule or a limit, if it may appear in a key.
pub(crate) fn checked_name(name: &str) -> Result<&str, RuleError> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if name.is_empty() || name.len() > 64 || !name.bytes().all(plain) {
        return Err(RuleError::new(format!("name: expected 1 to 64 letters, digits, '-', '_' or '.', got {name:?}")));
    }
    Ok(name)
}

/// The offset below `period` at which this key's windows start, for a limit with spread starts.
pub(crate) fn spread_offset(key: &[u8], period: u64) -> u64 {
    hashed_below(key, period)
}

/// The shard that a call with this id takes from, in every process, so that settling finds what was taken.
pub(crate) fn shard_of(id: &[u8], shards: u32) -> u32 {
    u32::try_from(hashed_below(id, shards.into())).unwrap_or(0)
}

/// The first eight bytes of the SHA-1, big-endian, modulo `bound`.
fn hashed_below(bytes: &[u8], bound: u64) -> u64 {
    let digest = sha1_smol::Sha1::from(bytes).digest().bytes();
    let [a, b, c, d, e, f, g, h, ..] = digest;
    u64::from_be_bytes([a, b, c, d, e, f, g, h]) % bound
}

/// Letters, digits and these.
const fn plain(others: &[u8]) -> Plain {
    let (mut plain, mut byte) = ([false; 256], 0_u8);
    while byte < 128 {
        plain[byte as usize] = byte.is_ascii_alphanumeric();
        byte += 1;
    }
    let mut at = 0;
    while at < others.len() {
        plain[others[at] as usize] = true;
        at += 1;
    }
    plain
}

fn encode(bytes: &[u8], plain: &Plain, into: &mut Key) {
    let stands_for_itself = |byte: u8| plain[usize::from(byte)];
    if bytes.len() <= MOST_BYTES && bytes.iter().all(|byte| stands_for_itself(*byte)) {
        into.extend_from_slice(bytes);
        return;
    }
    let start = into.len();
    for &byte in bytes {
        if stands_for_itself(byte) {
            into.push(byte);
        } else {
            into.extend_from_slice(&[b'%', hex(byte >> 4), hex(byte & 15)]);
        }
        if into.len() - start > MOST_BYTES {
            into.truncate(start);
            into.push(b'#');
            let digest = <sha2::Sha256 as sha2::Digest>::digest(bytes);
            into.extend(digest.iter().flat_map(|byte| [hex(byte >> 4), hex(byte & 15)]));
            return;
        }
    }
}

fn hex(digit: u8) -> u8 {
    b"0123456789abcdef"[usize::from(digit)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spelled(tag: &[u8], key: &[u8]) -> String {
        of_shard(tag, None, key)
    }

    fn of_shard(tag: &[u8], shard: Option<u32>, key: &[u8]) -> String {
        text(state_key("t", (Name::Plain(tag), shard), Name::Plain(key), "cli/token-bucket-1s"))
    }

    fn text(key: Key) -> String {
        String::from_utf8(key.into_vec()).unwrap()
    }

    #[test]
    fn a_shard_has_a_tag_that_no_key_can_spell() {
        assert_eq!(of_shard(b"user:42", Some(3), b"user:42"), "t:{user:42%s3}:cli/token-bucket-1s");
        assert_eq!(of_shard(b"org", Some(12), b"2001:db8::1"), "t:{org%s12}:2001:db8::1:cli/token-bucket-1s");
        let literals = ["user:42%s3", "user:42%s", "user:42%", "user:42s3", "user:423"];
        let mut all: Vec<_> = literals.map(|key| spelled(key.as_bytes(), key.as_bytes())).into();
        for key in ["user:42", "user:4", "user:42%s1", "user:42%s"] {
            all.extend([1, 2, 3, 11, 21, 23].map(|shard| of_shard(key.as_bytes(), Some(shard), key.as_bytes())));
        }
        let count = all.len();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), count);
        for name in &all {
            let escaped = name.split('%').skip(1).filter(|rest| !rest.starts_with('s'));
            for rest in escaped {
                assert!(
                    rest.bytes().take(2).all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte)),
                    "{name}"
                );
            }
        }
    }

    #[test]
    fn an_id_is_always_of_the_same_shard_and_ids_are_of_all() {
        let mut of = [0_u32; 8];
        for id in 0..8000 {
            of[shard_of(format!("id-{id}").as_bytes(), 8) as usize] += 1;
        }
        assert!(of.iter().all(|ids| (850..1150).contains(ids)), "{of:?}");
        // Must never change: processes of different versions must agree.
        assert_eq!((shard_of(b"payment-4711", 8), shard_of(b"payment-4711", 1024)), (5, 293));
    }

    /// Must never change, and matches other languages: `hmac.new(secret, key, "sha256").hexdigest()[:32]` in Python.
    #[test]
    fn a_hashed_key_is_an_hmac_that_no_key_can_spell() {
        let secret = KeySecret::new("0123456789abcdef0123456789abcdef").unwrap();
        let key = Name::new(b"alice@example.com", Some(&secret)).unwrap();
        let hashed = text(state_key("t", (key, None), key, "cli/token-bucket-1s"));
        assert_eq!(hashed, "t:{%h841240d2a5b6654b3ae21fc4499db7b7}:cli/token-bucket-1s");
        let literal = hashed.split(['{', '}']).nth(1).unwrap();
        assert_ne!(spelled(literal.as_bytes(), literal.as_bytes()), hashed);
        assert!(Name::new(b"", Some(&secret)).is_err() && !format!("{secret:?}").contains("0123"));
        let error = KeySecret::new("fifteen bytes..").unwrap_err();
        assert_eq!(error.to_string(), "key secret: expected at least 16 bytes, got 15");
    }

    #[test]
    fn ordinary_ids_stay_readable() {
        assert_eq!(spelled(b"user:42", b"user:42"), "t:{user:42}:cli/token-bucket-1s");
        assert_eq!(spelled(b"org", b"2001:db8::1"), "t:{org}:2001:db8::1:cli/token-bucket-1s");
    }

    #[test]
    fn braces_and_control_bytes_are_escaped() {
        assert_eq!(spelled(b"a}{b", b"a}{b"), "t:{a%7d%7bb}:cli/token-bucket-1s");
        assert_eq!(spelled(b"\0%", b"\0%"), "t:{%00%25}:cli/token-bucket-1s");
    }

    #[test]
    fn a_megabyte_is_hashed_and_still_told_apart() {
        let mut long = vec![b'x'; 1 << 20];
        let one = spelled(&long, &long);
        long[1 << 19] = b'y';
        let other = spelled(&long, &long);
        assert!(one.len() < 100 && one != other);
        let literal = one.trim_start_matches("t:{").split('}').next().unwrap();
        assert_ne!(spelled(literal.as_bytes(), literal.as_bytes()), one, "a key that spells a hash is not that key");
    }

    #[test]
    fn an_empty_key_is_refused() {
        let error = Name::new(b"", None).unwrap_err();
        assert_eq!(error.to_string(), "key: expected at least one byte, got an empty key");
    }
}
