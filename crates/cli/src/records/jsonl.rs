//! One JSON object per line.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;

use tollgate::Operation;

use super::field::{self, missing, shown, unexpected};
use super::{Identity, Permits, Record};
use crate::attributes;
use crate::escape::{one_of, read_back};
use crate::operation;
use crate::records::field::quoted;

pub(super) fn parse(line: u64, text: &[u8], about: Identity) -> Result<Record, String> {
    let fields: Fields = serde_json::from_str(object(text)?).map_err(|e| broken(&e))?;
    if let Some(reason) = fields.refused {
        return Err(reason);
    }

    // The tool's own lines have keys and ids as it shows them.
    let own = fields.own;
    let written = |text: String| if own { read_back(&text) } else { text.into_bytes() };

    let t_us = fields.t_us.ok_or_else(|| missing("t_us"))?;
    let t_us = field::whole("t_us", t_us.as_u64(), field::MAX_T_US, || got(&t_us))?;
    let op = match fields.op {
        None => Operation::default(),
        Some(Value::String(name)) => operation::named(&name).map_err(|e| format!("op: {e}"))?,
        Some(other) => return Err(unexpected("op", "a string", &got(&other))),
    };
    let (key, attributes) = match (about, fields.key, fields.attrs) {
        (Identity::Key(_), _, Some(_)) if !own => {
            return Err("attrs: only read with --rules FILE; without it, give a key".into());
        }
        (Identity::Key(_), key, _) => match key.ok_or_else(|| missing("key"))? {
            Value::String(key) if !key.is_empty() => (written(key), Vec::new()),
            other => return Err(unexpected("key", field::KEY, &got(&other))),
        },
        (Identity::Attributes, Some(_), _) if !own => {
            return Err("key: a set of rules reads attrs in its place".into());
        }
        (Identity::Attributes, _, None) => return Err(missing("attrs")),
        (Identity::Attributes, _, Some(Value::Object(attrs))) => {
            let attribute = |(name, value): (String, Value)| match value {
                Value::String(value) => Ok((name, written(value))),
                Value::Number(number) if number.is_u64() => Ok((name, number.to_string().into_bytes())),
                other => Err(unexpected(&format!("attrs: {}", shown(name.as_bytes())), "a string", &got(&other))),
            };
            (Vec::new(), attrs.into_iter().map(attribute).collect::<Result<_, _>>()?)
        }
        (Identity::Attributes, _, Some(other)) => return Err(unexpected("attrs", "an object", &got(&other))),
    };
    attributes::check(&attributes)?;
    let cost = match fields.cost {
        None => None,
        // No limit was asked.
        Some(Value::Null) if own => None,
        Some(cost) => Some(field::whole("cost", cost.as_u64(), field::MAX_COST, || got(&cost))?),
    };
    let id = match fields.id {
        None => None,
        Some(Value::String(id)) if !id.is_empty() => Some(written(id)),
        Some(other) => return Err(unexpected("id", field::KEY, &got(&other))),
    };
    let length = match fields.length {
        None => None,
        Some(Value::String(text)) => Some(field::length(&text)?),
        Some(other) => return Err(unexpected("for", "a duration such as \"10m\"", &got(&other))),
    };
    operation::check(op, id.is_some(), length.is_some())?;
    let permits = match fields.request_time {
        None => Permits::ByRecords,
        Some(Value::Null) => Permits::Unknown,
        Some(Value::String(seconds)) => Permits::Until(field::ends_us(t_us, &seconds)?),
        Some(other) => Permits::Until(field::ends_us(t_us, &other.to_string())?),
    };
    let status = match fields.status {
        None | Some(Value::Null) => None,
        Some(Value::String(text)) => Some(field::needed_status(text.as_bytes())?),
        Some(other) => Some(field::needed_status(other.to_string().as_bytes())?),
    };
    Ok(Record { line, t_us, op, key, cost, id, length, permits, status, attributes })
}

/// The line, if it is text that begins as an object does.
pub(super) fn object(text: &[u8]) -> Result<&str, String> {
    // Checks the whole line, because serde_json doesn't validate strings that it skips.
    let text = str::from_utf8(text).map_err(|e| {
        let (_, rest) = text.split_at(e.valid_up_to());
        format!("line: expected UTF-8, got {} at column {}", quoted(rest), e.valid_up_to() + 1)
    })?;
    if !text.trim_ascii_start().starts_with('{') {
        return Err(unexpected("line", "a JSON object", &quoted(text.as_bytes())));
    }
    Ok(text)
}

fn got(value: &Value) -> String {
    match value {
        Value::String(text) if text.is_empty() => field::EMPTY.into(),
        Value::String(text) => quoted(text.as_bytes()),
        other => shown(other.to_string().as_bytes()),
    }
}

/// The message about text that isn't JSON.
pub(super) fn broken(e: &serde_json::Error) -> String {
    let text = e.to_string();
    // serde_json's "line 1" would contradict the line number in the file.
    let place = format!(" at line {} column {}", e.line(), e.column());
    let what = text.strip_suffix(&place).unwrap_or(&text);
    format!("json: {} at column {}", shown(what.as_bytes()), e.column())
}

/// The object as written. Values are checked afterwards, so that a reason can name the field;
/// a derive would also take `null` for absent.
#[derive(Default)]
struct Fields {
    t_us: Option<Value>,
    op: Option<Value>,
    key: Option<Value>,
    attrs: Option<Value>,
    cost: Option<Value>,
    id: Option<Value>,
    length: Option<Value>,
    request_time: Option<Value>,
    status: Option<Value>,
    /// Whether it is a line of replay's own output.
    own: bool,
    refused: Option<String>,
}

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;

        impl<'de> Visitor<'de> for Object {
            type Value = Fields;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
                let mut fields = Fields::default();
                while let Some(name) = map.next_key::<String>()? {
                    let slot = match name.as_str() {
                        "t_us" => &mut fields.t_us,
                        "op" => &mut fields.op,
                        "key" => &mut fields.key,
                        "attrs" => &mut fields.attrs,
                        "cost" => &mut fields.cost,
                        "id" => &mut fields.id,
                        "for" => &mut fields.length,
                        "request_time" => &mut fields.request_time,
                        "status" => &mut fields.status,
                        other => {
                            fields.own |= other == field::OWN;
                            if !field::OUTPUT.contains(&other) {
                                fields.refused.get_or_insert_with(|| unknown(other));
                            }
                            map.next_value::<IgnoredAny>()?;
                            continue;
                        }
                    };
                    if slot.replace(map.next_value()?).is_some() {
                        fields.refused.get_or_insert_with(|| format!("{name}: given twice"));
                    }
                }
                Ok(fields)
            }
        }

        deserializer.deserialize_map(Object)
    }
}

fn unknown(name: &str) -> String {
    format!("unknown field {}: expected {}", quoted(name.as_bytes()), one_of(field::INPUT))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::KeyField;

    const KEY: Identity = Identity::Key(KeyField::Ip);

    fn reason(text: &str) -> String {
        parse(1, text.as_bytes(), KEY).unwrap_err()
    }

    #[test]
    fn op_and_cost_have_defaults() {
        let record = parse(7, br#"{"t_us":1700000000000000,"key":"u1"}"#, KEY).unwrap();
        let want = Record {
            line: 7,
            t_us: 1_700_000_000_000_000,
            op: Operation::Acquire,
            key: b"u1".to_vec(),
            cost: None,
            id: None,
            length: None,
            permits: Permits::ByRecords,
            status: None,
            attributes: Vec::new(),
        };
        assert_eq!(record, want);
        let record = parse(7, br#" { "cost":0, "key":"u1", "op":"peek", "t_us":0 } "#, KEY).unwrap();
        assert_eq!(
            record,
            Record {
                line: 7,
                t_us: 0,
                op: Operation::Peek,
                key: b"u1".to_vec(),
                cost: Some(0),
                id: None,
                length: None,
                permits: Permits::ByRecords,
                status: None,
                attributes: Vec::new()
            }
        );
    }

    #[test]
    fn numbers_reach_their_limits_and_no_further() {
        let record = parse(1, br#"{"t_us":4503599627370496,"key":"k","cost":9007199254740991}"#, KEY).unwrap();
        assert_eq!((record.t_us, record.cost), (1 << 52, Some((1 << 53) - 1)));

        let t_us = "t_us: expected a whole number from 0 to 4503599627370496, got ";
        for (written, got) in [
            ("4503599627370497", "4503599627370497"),
            ("-1", "-1"),
            ("1.5", "1.5"),
            ("1e3", "1000.0"),
            ("18446744073709551616", "1.8446744073709552e+19"),
            ("\"5\"", "\"5\""),
            ("null", "null"),
            ("[1,2]", "[1,2]"),
        ] {
            assert_eq!(reason(&format!(r#"{{"t_us":{written},"key":"k"}}"#)), format!("{t_us}{got}"));
        }
        assert_eq!(
            reason(r#"{"t_us":1,"key":"k","cost":-1}"#),
            "cost: expected a whole number from 0 to 9007199254740991, got -1"
        );
        assert_eq!(
            reason(r#"{"t_us":1,"key":"k","cost":9007199254740992}"#),
            "cost: expected a whole number from 0 to 9007199254740991, got 9007199254740992"
        );
    }

    #[test]
    fn a_reason_names_the_field_and_the_value() {
        for (text, want) in [
            (r#"{"key":"k"}"#, "t_us: it is missing"),
            (r#"{"t_us":1}"#, "key: it is missing"),
            (r#"{"t_us":1,"key":""}"#, "key: expected a non-empty string, got an empty string"),
            (r#"{"t_us":1,"key":5}"#, "key: expected a non-empty string, got 5"),
            (
                r#"{"t_us":1,"key":"k","op":"acquier"}"#,
                "op: expected acquire, peek, reserve, at-most, refund, penalty, block, renew, release, settle, cancel or reset, got \"acquier\"",
            ),
            (r#"{"t_us":1,"key":"k","op":null}"#, "op: expected a string, got null"),
            (r#"{"t_us":1,"key":"k","t_us":2}"#, "t_us: given twice"),
            (
                r#"{"t_us":1,"key":"k","csot":2}"#,
                "unknown field \"csot\": expected t_us, op, key, cost, id, for, request_time or status",
            ),
            (
                r#"{"t_us":1,"key":"k","op":"block"}"#,
                "for: it is missing: block needs a duration such as 10m (0s lifts the block)",
            ),
            (r#"{"t_us":1,"key":"k","for":"10m"}"#, "for: only block takes it, and this is acquire"),
            (r#"{"t_us":1,"key":"k","op":"block","for":5}"#, "for: expected a duration such as \"10m\", got 5"),
            (r#"{"t_us":1,"key":"k","op":"renew"}"#, "id: it is missing: renew needs the id of an earlier call"),
            (r#"[1]"#, "line: expected a JSON object, got \"[1]\""),
            (r#"{"t_us":1"#, "json: EOF while parsing an object at column 9"),
            (r#"{"t_us":1,"key":"k"} x"#, "json: trailing characters at column 22"),
        ] {
            assert_eq!(reason(text), want);
        }
        assert_eq!(
            parse(1, b"{\"rule\":\"\xff\",\"t_us\":1,\"key\":\"k\"}", KEY).unwrap_err(),
            "line: expected UTF-8, got \"\\xff\",\"t_us\":1,\"key\":\"k\"}\" at column 10"
        );
    }

    #[test]
    fn replays_own_output_is_readable() {
        let text = br#"{"t_us":5,"op":"reset","key":"u1","cost":2,"rule":"cli","allowed":true,"limit":10,
            "remaining":9,"retry_after_us":null,"reset_after_us":6,"denied_by":null,"by":"embedded",
            "limits":[{"name":"a"}],"granted":1}"#;
        assert_eq!(
            parse(1, text, KEY).unwrap(),
            Record {
                line: 1,
                t_us: 5,
                op: Operation::Reset,
                key: b"u1".to_vec(),
                cost: Some(2),
                id: None,
                length: None,
                permits: Permits::ByRecords,
                status: None,
                attributes: Vec::new()
            }
        );
    }

    #[test]
    fn a_key_may_hold_anything_that_json_can_say() {
        let key = |text: &str| parse(1, format!(r#"{{"t_us":1,"key":"{text}"}}"#).as_bytes(), KEY).map(|r| r.key);
        assert_eq!(key(r"a\u0000\n\ud83d\ude00"), Ok("a\0\n\u{1f600}".into()));
        assert_eq!(key("{}é"), Ok("{}é".into()));
        assert!(key(r"\ud800").unwrap_err().starts_with("json: "), "half a character has no bytes");
    }

    #[test]
    fn deep_nesting_is_refused_not_followed() {
        let deep = format!(r#"{{"t_us":{}"#, "[".repeat(1_000_000));
        assert!(reason(&deep).starts_with("json: recursion limit exceeded"));
        let deep = format!(r#"{{"limits":{}"#, "[".repeat(1_000_000));
        assert!(reason(&deep).starts_with("json: "));
    }
}
