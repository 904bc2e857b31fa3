//! The names and values of a JSON object, each name once.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};

/// The most of them: looking one up takes time with their number.
pub(crate) const MOST: usize = 100;

/// In the order in which they were written.
#[derive(Debug)]
pub(crate) struct Named<T>(pub(crate) Vec<(String, T)>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Named<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Names(PhantomData))
    }
}

struct Names<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for Names<T> {
    type Value = Named<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Named<T>, A::Error> {
        let mut all: Vec<(String, T)> = Vec::new();
        while let Some((name, value)) = map.next_entry::<String, T>()? {
            // Of two values, another reader may take the other one.
            if all.iter().any(|(other, _)| *other == name) {
                return Err(A::Error::custom(format_args!("{name:?} is given twice")));
            }
            if all.len() == MOST {
                return Err(A::Error::custom(format_args!("expected at most {MOST} names in an object")));
            }
            all.push((name, value));
        }
        Ok(Named(all))
    }
}
