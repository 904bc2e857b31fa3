//! Values that may be written in several forms: a text or a table, a text or a list.

use std::fmt;
use std::marker::PhantomData;

use serde::Deserializer;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Error, MapAccess, SeqAccess, Unexpected, Visitor};

use crate::error::RuleError;

/// A value with several forms, one of which is a text. Unlike serde's untagged enums, which report only that no form
/// fits, a mistake is reported as that of the form that was written.
pub(crate) trait Form<'de>: Sized {
    /// What is expected, if the value has none of its forms.
    const EXPECTED: &'static str;

    fn text(text: &str) -> Result<Self, RuleError>;

    /// None: a number is none of its forms.
    fn units(_: u64) -> Option<Self> {
        None
    }

    fn list<D: Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
        Err(Error::invalid_type(Unexpected::Seq, &Self::EXPECTED))
    }

    fn table<D: Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
        Err(Error::invalid_type(Unexpected::Map, &Self::EXPECTED))
    }
}

pub(crate) fn read<'de, F: Form<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<F, D::Error> {
    deserializer.deserialize_any(Reader(PhantomData))
}

struct Reader<F>(PhantomData<F>);

impl<'de, F: Form<'de>> Visitor<'de> for Reader<F> {
    type Value = F;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(F::EXPECTED)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<F, E> {
        F::text(text).map_err(E::custom)
    }

    fn visit_u64<E: Error>(self, units: u64) -> Result<F, E> {
        F::units(units).ok_or_else(|| E::invalid_type(Unexpected::Unsigned(units), &self))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<F, E> {
        match u64::try_from(number) {
            Ok(units) => self.visit_u64(units),
            // The type is right if it takes any number.
            Err(_) if F::units(0).is_some() => Err(E::invalid_value(Unexpected::Signed(number), &self)),
            Err(_) => Err(E::invalid_type(Unexpected::Signed(number), &self)),
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<F, A::Error> {
        F::list(SeqAccessDeserializer::new(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, table: A) -> Result<F, A::Error> {
        F::table(MapAccessDeserializer::new(table))
    }
}
