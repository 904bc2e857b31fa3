//! Strings and sorted sets by key, with expiry: the commands that the scripts call, answering as Redis does.

mod sorted_commands;

use hashbrown::HashMap;

#[cfg(test)]
use super::sorted::Score;
use super::sorted::SortedSet;

/// Values by key. Time changes only in `set_time`, so it stands still within a script.
#[derive(Clone, Debug, Default)]
pub(super) struct Keyspace {
    values: HashMap<Vec<u8>, Entry>,
    now_us: u64,
    /// The number of keys that triggers the next sweep.
    sweep_at: usize,
    /// The most keys kept from one script to the next, if bounded.
    most: Option<usize>,
}

#[derive(Clone, Debug)]
struct Entry {
    value: Value,
    expires_ms: Option<u64>,
}

#[derive(Clone, Debug)]
enum Value {
    Bytes(Vec<u8>),
    Sorted(SortedSet),
}

/// A command's answer.
#[derive(Debug, PartialEq)]
pub(super) enum Outcome {
    Nothing,
    Done,
    Integer(i64),
    Bytes(Vec<u8>),
    /// Values, some of which may be missing.
    Values(Vec<Option<Vec<u8>>>),
    Array(Vec<Vec<u8>>),
    Time([String; 2]),
    Error(String),
}

/// Fewer keys than this are never swept.
const LEAST_SWEPT: usize = 1024;

impl Keyspace {
    pub(super) fn keep_at_most(&mut self, keys: usize) {
        self.most = Some(keys);
    }

    /// Called before a script. Within one no key is forgotten, since scripts rely on what they have read.
    pub(super) fn set_time(&mut self, now_us: u64) {
        self.now_us = now_us;
        if let Some(most) = self.most.filter(|most| self.values.len() > *most) {
            self.forget(most);
        }
    }

    pub(super) fn run(&mut self, words: &[&[u8]]) -> Outcome {
        let (name, rest) = words.split_first().map_or((&b""[..], &[][..]), |(name, rest)| (*name, rest));
        let answer = match (name, rest) {
            (b"TIME", []) => {
                Ok(Outcome::Time([self.now_us / 1_000_000, self.now_us % 1_000_000].map(|n| n.to_string())))
            }
            (b"GET", [key]) => {
                self.bytes(key).map(|bytes| bytes.map_or(Outcome::Nothing, |bytes| Outcome::Bytes(bytes.to_vec())))
            }
            (b"MGET", keys) if !keys.is_empty() => {
                // A value of another type counts as missing, as in Redis.
                let values = keys.iter().map(|key| self.bytes(key).ok().flatten().map(<[u8]>::to_vec));
                Ok(Outcome::Values(values.collect()))
            }
            (b"STRLEN", [key]) => self.bytes(key).map(|bytes| count(bytes.map_or(0, <[u8]>::len))),
            (b"EXISTS", [key]) => Ok(Outcome::Integer(self.live(key).is_some().into())),
            (b"GETRANGE", [key, from, to]) => self.get_range(key, from, to),
            (b"SET", [key, value, b"KEEPTTL"]) => Ok(self.replace(key, value)),
            (b"SET", [key, value, expiry, at]) => self.set(key, value, expiry, at),
            (b"SETRANGE", [key, offset, value]) => self.set_range(key, offset, value),
            (b"PEXPIRE", [key, ms]) => integer(ms).map(|ms| self.expire(key, self.now_ms().saturating_add_signed(ms))),
            (b"PEXPIREAT", [key, at]) => integer(at).map(|at| self.expire(key, at.try_into().unwrap_or(0))),
            (b"PTTL", [key]) => Ok(Outcome::Integer(self.time_to_live(key))),
            (b"DEL", keys) if !keys.is_empty() => {
                let there = keys.iter().filter(|key| self.live(key).is_some()).count();
                keys.iter().for_each(|key| _ = self.values.remove(*key));
                Ok(count(there))
            }
            (b"ZADD", [key, pairs @ ..]) if pairs.len() > 1 => self.z_add(key, pairs),
            (b"ZREM", [key, members @ ..]) if !members.is_empty() => self.z_rem(key, members),
            (b"ZREMRANGEBYSCORE", [key, min, max]) => self.z_rem_range_by_score(key, min, max),
            (b"ZCOUNT", [key, min, max]) => self.z_count(key, min, max),
            (b"ZSCORE", [key, member]) => self.z_score(key, member),
            (b"ZRANGE", [key, from, to, options @ ..]) => self.z_range(key, from, to, options),
            _ => Err(format!(
                "ERR the embedded engine has no {} with {} arguments",
                String::from_utf8_lossy(name),
                rest.len()
            )),
        };
        answer.unwrap_or_else(Outcome::Error)
    }

    pub(super) fn len(&self) -> u64 {
        self.values.len().try_into().unwrap_or(u64::MAX)
    }

    pub(super) fn remove_where(&mut self, matches: impl Fn(&[u8]) -> bool) {
        self.values.retain(|key, _| !matches(key));
    }

    #[cfg(test)]
    pub(super) fn has(&mut self, key: &[u8]) -> bool {
        self.live(key).is_some()
    }

    /// A key's whole state, as text.
    #[cfg(test)]
    pub(super) fn shown(&mut self, key: &[u8]) -> String {
        self.live(key).map_or_else(String::new, |entry| match &entry.value {
            Value::Bytes(bytes) => format!("{bytes:?}"),
            Value::Sorted(set) => {
                format!("{:?}", set.range(Score::new(-1.0)..Score::new(f64::MAX)).collect::<Vec<_>>())
            }
        })
    }

    #[cfg(test)]
    pub(super) fn keys(&self) -> Vec<Vec<u8>> {
        let mut keys: Vec<_> = self.values.keys().cloned().collect();
        keys.sort_unstable();
        keys
    }

    #[cfg(test)]
    pub(super) fn copy_to(&self, other: &mut Self, key: &[u8]) {
        match self.values.get(key) {
            Some(entry) => _ = other.values.insert(key.to_vec(), entry.clone()),
            None => _ = other.values.remove(key),
        }
    }

    /// Moves the matching keys to another keyspace, and returns them in order.
    #[cfg(test)]
    pub(super) fn move_to(&mut self, other: &mut Self, matches: impl Fn(&[u8]) -> bool) -> Vec<Vec<u8>> {
        let moved: Vec<_> = self.values.extract_if(|key, _| matches(key)).collect();
        let mut keys: Vec<_> = moved.iter().map(|(key, _)| key.clone()).collect();
        keys.sort_unstable();
        other.values.extend(moved);
        keys
    }

    fn now_ms(&self) -> u64 {
        self.now_us / 1000
    }

    /// The entry, unless it has expired.
    fn live(&mut self, key: &[u8]) -> Option<&mut Entry> {
        let now = self.now_ms();
        if self.values.get(key).is_some_and(|entry| entry.expired(now)) {
            self.values.remove(key);
        }
        self.values.get_mut(key)
    }

    /// The key's value, set to this one if there was none.
    fn live_or(&mut self, key: &[u8], value: Value) -> &mut Value {
        if self.live(key).is_none() {
            self.sweep();
        }
        &mut self.values.entry_ref(key).or_insert(Entry { value, expires_ms: None }).value
    }

    fn bytes(&mut self, key: &[u8]) -> Result<Option<&[u8]>, String> {
        match self.live(key).map(|entry| &entry.value) {
            None => Ok(None),
            Some(Value::Bytes(bytes)) => Ok(Some(bytes)),
            Some(_) => Err(wrong_type()),
        }
    }

    fn set(&mut self, key: &[u8], value: &[u8], expiry: &[u8], at: &[u8]) -> Result<Outcome, String> {
        let at = integer(at)?;
        let expires_ms = match expiry {
            b"PX" => self.now_ms().checked_add_signed(at),
            b"PXAT" => u64::try_from(at).ok(),
            _ => return Err("ERR syntax error".into()),
        };
        let Some(expires_ms) = expires_ms.filter(|_| at > 0) else {
            return Err("ERR invalid expire time in 'set' command".into());
        };
        match self.values.get_mut(key) {
            Some(Entry { value: Value::Bytes(bytes), expires_ms: expires }) => {
                bytes.clear();
                bytes.extend_from_slice(value);
                *expires = Some(expires_ms);
            }
            _ => {
                let entry = Entry { value: Value::Bytes(value.to_vec()), expires_ms: Some(expires_ms) };
                self.values.insert(key.to_vec(), entry);
                self.sweep();
            }
        }
        Ok(Outcome::Done)
    }

    /// Sets a key's value, and keeps its expiry.
    fn replace(&mut self, key: &[u8], value: &[u8]) -> Outcome {
        *self.live_or(key, Value::Bytes(Vec::new())) = Value::Bytes(value.to_vec());
        Outcome::Done
    }

    fn set_range(&mut self, key: &[u8], offset: &[u8], value: &[u8]) -> Result<Outcome, String> {
        let offset = usize::try_from(integer(offset)?).map_err(|_| "ERR offset is out of range")?;
        let Value::Bytes(bytes) = self.live_or(key, Value::Bytes(Vec::new())) else { return Err(wrong_type()) };
        let end = offset + value.len();
        if bytes.len() < end {
            bytes.resize(end, 0);
        }
        bytes[offset..end].copy_from_slice(value);
        Ok(count(bytes.len()))
    }

    fn get_range(&mut self, key: &[u8], from: &[u8], to: &[u8]) -> Result<Outcome, String> {
        let (from, to) = (integer(from)?, integer(to)?);
        let bytes = self.bytes(key)?.unwrap_or_default();
        let length = i64::try_from(bytes.len()).unwrap_or(i64::MAX);
        let from_end = |index: i64| if index < 0 { (length + index).max(0) } else { index };
        let (from, to) = (from_end(from), from_end(to).min(length - 1));
        let range = match (usize::try_from(from), usize::try_from(to)) {
            (Ok(from), Ok(to)) if from <= to => bytes[from..=to].to_vec(),
            _ => Vec::new(),
        };
        Ok(Outcome::Bytes(range))
    }

    fn expire(&mut self, key: &[u8], at_ms: u64) -> Outcome {
        let Some(entry) = self.live(key) else { return Outcome::Integer(0) };
        entry.expires_ms = Some(at_ms);
        Outcome::Integer(1)
    }

    fn time_to_live(&mut self, key: &[u8]) -> i64 {
        let now = self.now_ms();
        match self.live(key) {
            None => -2,
            Some(Entry { expires_ms: None, .. }) => -1,
            Some(Entry { expires_ms: Some(at), .. }) => i64::try_from(*at - now).unwrap_or(i64::MAX),
        }
    }

    /// Drops expired keys whenever the number of keys has doubled, so that keys never seen again don't pile up.
    fn sweep(&mut self) {
        if self.values.len() < self.sweep_at.max(LEAST_SWEPT) {
            return;
        }
        let now = self.now_ms();
        self.values.retain(|_, entry| !entry.expired(now));
        self.sweep_at = self.values.len() * 2;
    }

    /// Beyond this many keys, forgets those that have expired. If they are few, forgets an eighth more, so that the
    /// next time is far off: those that expire soonest, which are closest to never used.
    fn forget(&mut self, most: usize) {
        let now = self.now_ms();
        self.values.retain(|_, entry| !entry.expired(now));
        if self.values.len() <= most - most / 64 {
            return;
        }
        let too_many = self.values.len() - (most - most / 8);
        let mut expiries: Vec<_> = self.values.values().filter_map(|entry| entry.expires_ms).collect();
        if let Some(last) = too_many.checked_sub(1).filter(|last| *last < expiries.len()) {
            let (_, until, _) = expiries.select_nth_unstable(last);
            let (until, mut left) = (*until, too_many);
            self.values.retain(|_, entry| {
                let forgotten = left > 0 && entry.expires_ms.is_some_and(|at| at <= until);
                left -= usize::from(forgotten);
                !forgotten
            });
        }
    }
}

impl Entry {
    fn expired(&self, now_ms: u64) -> bool {
        self.expires_ms.is_some_and(|at| at <= now_ms)
    }
}

fn count(number: usize) -> Outcome {
    Outcome::Integer(i64::try_from(number).unwrap_or(i64::MAX))
}

fn wrong_type() -> String {
    "WRONGTYPE Operation against a key holding the wrong kind of value".into()
}

fn integer(text: &[u8]) -> Result<i64, String> {
    let text = std::str::from_utf8(text).ok();
    text.and_then(|text| text.parse().ok()).ok_or_else(|| "ERR value is not an integer or out of range".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn run(store: &mut Keyspace, line: &str) -> Outcome {
        store.run(&line.split(' ').map(str::as_bytes).collect::<Vec<_>>())
    }

    #[test]
    fn a_key_is_gone_at_its_expiry_and_not_before() {
        let mut store = Keyspace::default();
        store.set_time(1_000_000);
        assert_eq!(run(&mut store, "SET k v PX 5"), Outcome::Done);
        store.set_time(1_004_999);
        assert_eq!(run(&mut store, "PTTL k"), Outcome::Integer(1));
        store.set_time(1_005_000);
        assert_eq!(run(&mut store, "GET k"), Outcome::Nothing);
        assert_eq!(run(&mut store, "PTTL k"), Outcome::Integer(-2));
    }

    #[test]
    fn of_too_many_keys_those_that_expire_soonest_are_forgotten_between_scripts() {
        let mut store = Keyspace::default();
        store.keep_at_most(80);
        (0..81).for_each(|key| _ = run(&mut store, &format!("SET k{key} v PX {}", 1000 - key)));
        assert_eq!(store.len(), 81);
        store.set_time(1);
        assert_eq!(store.len(), 70);
        assert!((0..70).all(|key| store.has(format!("k{key}").as_bytes())));
        (0..500).for_each(|key| _ = run(&mut store, &format!("SET same{key} v PX 5")));
        store.set_time(2);
        assert_eq!((store.len(), store.has(b"k0")), (70, true), "all of one expiry");
        (0..20).for_each(|key| _ = run(&mut store, &format!("SET gone{key} v PX 1")));
        store.set_time(1_002);
        assert_eq!(store.len(), 70, "what has expired is enough");
    }

    #[test]
    fn ranges_are_those_of_redis() {
        let mut store = Keyspace::default();
        run(&mut store, "SET k hello PX 5");
        for (range, expected) in
            [("0 1", "he"), ("1 -1", "ello"), ("-3 -2", "ll"), ("3 99", "lo"), ("4 2", ""), ("9 12", "")]
        {
            assert_eq!(run(&mut store, &format!("GETRANGE k {range}")), Outcome::Bytes(expected.into()), "{range}");
        }
        assert_eq!(run(&mut store, "SETRANGE k 6 !"), Outcome::Integer(7));
        assert_eq!(run(&mut store, "GET k"), Outcome::Bytes(b"hello\0!".to_vec()));
    }

    #[test]
    fn keys_that_expired_are_swept() {
        let mut store = Keyspace::default();
        for n in 0..10_000 {
            store.set_time(n * 1000);
            run(&mut store, &format!("SET k{n} v PX 10"));
        }
        assert!(store.values.len() <= 2 * LEAST_SWEPT, "{} keys left", store.values.len());
    }

    #[test]
    fn expiry_zero_is_an_error() {
        let mut store = Keyspace::default();
        assert!(matches!(run(&mut store, "SET k v PX 0"), Outcome::Error(_)));
    }
}
