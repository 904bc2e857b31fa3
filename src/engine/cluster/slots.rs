//! Which of a cluster's 16,384 slots a key is in, and which node has which slot.

use crc::{CRC_16_XMODEM, Crc};
use redis::Value;

/// Slots of a cluster.
pub(super) const SLOTS: usize = 16_384;

static CRC: Crc<u16> = Crc::<u16>::new(&CRC_16_XMODEM);

/// The slot of this key: hashed from the text between its first `{` and the next `}`, if there is any, and otherwise
/// from all of it.
pub(crate) fn slot_of(key: &[u8]) -> u16 {
    CRC.checksum(hash_tag(key)) % 16_384
}

/// What a cluster hashes of a key: the text between its first `{` and the next `}`, if there is any, and otherwise all
/// of it.
fn hash_tag(key: &[u8]) -> &[u8] {
    let tag = || {
        let open = key.iter().position(|byte| *byte == b'{')? + 1;
        let length = key[open..].iter().position(|byte| *byte == b'}')?;
        (length > 0).then(|| &key[open..open + length])
    };
    tag().unwrap_or(key)
}

/// A range of slots, and the nodes that have them. None for a primary whose address isn't known: no replica stands in
/// for it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) first: u16,
    pub(super) last: u16,
    pub(super) primary: Option<Address>,
    pub(super) replicas: Vec<Address>,
}

#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct Address {
    pub(super) host: String,
    pub(super) port: u16,
}

/// Reads the answer to CLUSTER SLOTS; `asked` is the host that gave it. None if it is malformed.
pub(super) fn read(answer: &Value, asked: &str) -> Option<Vec<Run>> {
    let Value::Array(runs) = answer else { return None };
    runs.iter().map(|run| read_run(run, asked)).collect()
}

fn read_run(run: &Value, asked: &str) -> Option<Run> {
    let Value::Array(fields) = run else { return None };
    let [first, last, primary, replicas @ ..] = fields.as_slice() else { return None };
    let slot = |value: &Value| match value {
        Value::Int(slot) => u16::try_from(*slot).ok().filter(|slot| usize::from(*slot) < SLOTS),
        _ => None,
    };
    let (first, last) = (slot(first)?, slot(last)?);
    (first <= last).then_some(())?;
    let address = |node| read_address(node, asked);
    Some(Run { first, last, primary: address(primary), replicas: replicas.iter().filter_map(address).collect() })
}

/// None if the address isn't known.
fn read_address(node: &Value, asked: &str) -> Option<Address> {
    let Value::Array(fields) = node else { return None };
    let [host, Value::Int(port), ..] = fields.as_slice() else { return None };
    let host = match host {
        Value::BulkString(host) => std::str::from_utf8(host).ok()?,
        Value::SimpleString(host) => host,
        Value::Nil => "",
        _ => return None,
    };
    // A node that doesn't know its own host name: use the one it was reached by.
    let host = if host.is_empty() { asked } else { host }.to_owned();
    let port = u16::try_from(*port).ok().filter(|port| *port > 0)?;
    (host != "?").then_some(Address { host, port })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Value {
        Value::BulkString(text.into())
    }

    /// The values come from CLUSTER KEYSLOT on a redis-server.
    #[test]
    fn keys_are_in_the_slots_that_redis_says() {
        for (key, slot) in [
            ("", 0),
            ("123456789", 12_739),
            ("tollgate:{user:42}:cli/token-bucket-1s", 15_880),
            ("{user:42}", 15_880),
            ("user:42", 15_880),
            ("{}foo", 9_500),
            ("foo{bar", 15_278),
            ("a{b}{c}", 3_300),
            ("foo{{bar}}zap", 4_015),
        ] {
            assert_eq!(slot_of(key.as_bytes()), slot, "{key}");
        }
    }

    #[test]
    fn runs_are_read_with_their_nodes() {
        let node = |host, port| Value::Array(vec![host, Value::Int(port), text("id"), Value::Array(Vec::new())]);
        let run =
            |first, last, nodes: Vec<Value>| Value::Array([vec![Value::Int(first), Value::Int(last)], nodes].concat());
        let answer = Value::Array(vec![
            run(0, 5460, vec![node(text("10.0.0.1"), 7000), node(text(""), 7003)]),
            run(5461, 5461, vec![node(Value::Nil, 7001), node(text("?"), 7004), node(text("replica"), 7005)]),
            run(5462, 5470, vec![node(text("?"), 7006), node(text("replica"), 7007)]),
            run(5471, 5471, vec![node(text("h"), 70_000)]),
        ]);
        let at = |host: &str, port| Address { host: host.into(), port };
        let run = |first, last, primary, replicas| Run { first, last, primary, replicas };
        let expected = [
            run(0, 5460, Some(at("10.0.0.1", 7000)), vec![at("asked", 7003)]),
            run(5461, 5461, Some(at("asked", 7001)), vec![at("replica", 7005)]),
            run(5462, 5470, None, vec![at("replica", 7007)]),
            run(5471, 5471, None, vec![]),
        ];
        assert_eq!(read(&answer, "asked").as_deref(), Some(&expected[..]));
    }

    #[test]
    fn nonsense_is_no_map() {
        for nonsense in [
            Value::Nil,
            Value::Array(vec![Value::Int(1)]),
            Value::Array(vec![Value::Array(vec![Value::Int(0), Value::Int(16_384)])]),
            Value::Array(vec![Value::Array(vec![Value::Int(-1), Value::Int(1)])]),
            Value::Array(vec![Value::Array(vec![Value::Int(2), Value::Int(1), Value::Array(vec![])])]),
        ] {
            assert_eq!(read(&nonsense, "asked"), None, "{nonsense:?}");
        }
    }
}
