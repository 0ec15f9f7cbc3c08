//! JSON objects, as distinct from lists that serde would also accept.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// A `T` that was written as an object. Serde's derived code also accepts a list of the fields'
/// values in the order of the source. No client intends that, and no description mentions it.
#[derive(Debug)]
pub(super) struct Object<T>(pub(super) T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ObjectVisitor<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
            type Value = T;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map))
            }
        }

        deserializer.deserialize_map(ObjectVisitor(PhantomData)).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Eq, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Pair<'b> {
        name: &'b str,
        number: u64,
    }

    #[test]
    fn a_list_is_no_object() {
        let read = serde_json::from_str::<Object<Pair<'_>>>;
        let Object(pair) = read(r#"{"name":"a","number":1}"#).expect("an object");
        assert_eq!(pair, Pair { name: "a", number: 1 });
        assert!(serde_json::from_str::<Pair<'_>>(r#"["a",1]"#).is_ok(), "then it would need no guard");
        let error = read(r#"["a",1]"#).expect_err("a list").to_string();
        assert!(error.starts_with("invalid type: sequence, expected an object"), "{error}");
        assert!(serde_json::from_str::<Vec<Object<Pair<'_>>>>(r#"[["a",1]]"#).is_err());
    }
}
