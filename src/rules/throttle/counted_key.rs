//! The keys by which a rule counts requests: composed of attributes, and read back.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::rules::attributes::Attributes;
use crate::rules::names::{GLOBAL, IP, Name};

/// The separator between the attributes of a composed key.
const BETWEEN: u8 = b'|';

/// `user:42`, or `user:42|path:/x` for several attributes. Requests that differ in them never share a key.
pub(super) fn key_of(attributes: &[Name], request: &Attributes<'_>, ipv6_prefix: u8) -> Arc<[u8]> {
    if attributes.is_empty() {
        return GLOBAL.as_bytes().into();
    }
    let mut key = SmallVec::<[u8; 64]>::new();
    for (at, attribute) in attributes.iter().enumerate() {
        if at > 0 {
            key.push(BETWEEN);
        }
        key.extend_from_slice(attribute.as_bytes());
        key.push(b':');
        let value = request.counted(attribute, ipv6_prefix).unwrap_or_default();
        if attributes.len() == 1 {
            key.extend_from_slice(&value);
        } else {
            for &byte in &*value {
                if byte == BETWEEN || byte == b'\\' {
                    key.push(b'\\');
                }
                key.push(byte);
            }
        }
    }
    key.as_slice().into()
}

/// What limits count by these attributes, among the parts of several rules: they count as the same in all, but for
/// addresses, of which rules may count more or fewer bits.
pub(super) fn among_rules(attributes: &Arc<str>, ipv6_prefix: u8) -> Arc<str> {
    match attributes.split(',').any(|attribute| attribute == IP) {
        true => format!("{attributes}/{ipv6_prefix}").into(),
        false => Arc::clone(attributes),
    }
}

/// A listed key's attributes, of which it should have this many.
pub(in crate::rules) fn listed_values(key: &str, attributes: usize) -> Vec<String> {
    if attributes == 1 { vec![key.to_owned()] } else { unescaped(key) }
}

/// A composed key's attributes, split and without the backslashes that escape them.
fn unescaped(key: &str) -> Vec<String> {
    let (mut values, mut rest) = (vec![String::new()], key.chars());
    while let Some(character) = rest.next() {
        match (character, values.last_mut()) {
            ('|', _) => values.push(String::new()),
            ('\\', Some(value)) => value.extend(rest.next()),
            (character, Some(value)) => value.push(character),
            (_, None) => {}
        }
    }
    values
}
