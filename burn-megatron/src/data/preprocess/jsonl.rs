//! The strings of some keys of a JSON object, without building the rest of it.

use std::borrow::Cow;
use std::fmt;

use serde::Deserializer as _;
use serde::de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, Visitor};

/// The values of `keys` in the object `line`, in the order of `keys`; borrowed where no escape
/// stands in the way. Of a repeated key the last value counts, as in Python.
///
/// # Errors
/// Why the line is not an object that holds a string under each key.
pub(super) fn strings<'a>(line: &'a [u8], keys: &[String]) -> Result<Vec<Cow<'a, str>>, String> {
    if line.iter().all(u8::is_ascii_whitespace) {
        return Err("the line is blank".to_string());
    }
    let mut json = serde_json::Deserializer::from_slice(line);
    json.deserialize_map(Object(keys))
        .and_then(|values| json.end().map(|()| values))
        .map_err(|e| {
            let message = e.to_string();
            // serde_json counts lines within what it is given; here that is always one.
            match message.rsplit_once(" at line ") {
                Some((reason, _)) => format!("{reason} at column {}", e.column()),
                None => message,
            }
        })
}

struct Object<'k>(&'k [String]);

impl<'de> Visitor<'de> for Object<'_> {
    type Value = Vec<Cow<'de, str>>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut values = vec![None; self.0.len()];
        while let Some(key) = map.next_key_seed(Key(self.0))? {
            match key {
                Some(k) => {
                    let value = map.next_value_seed(Text).map_err(|e| {
                        // Without the place: the caller's error adds it.
                        let reason = e.to_string();
                        let reason = reason.split(" at line ").next().unwrap_or_default();
                        A::Error::custom(format_args!("key \"{}\": {reason}", self.0[k]))
                    })?;
                    values[k] = Some(value);
                }
                None => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        let missing = |k: usize| {
            let key = &self.0[k];
            A::Error::custom(format_args!("the key \"{key}\" is missing"))
        };
        values
            .into_iter()
            .enumerate()
            .map(|(k, value)| value.ok_or_else(|| missing(k)))
            .collect()
    }
}

/// Which of the wanted keys a key is.
struct Key<'k>(&'k [String]);

impl<'de> DeserializeSeed<'de> for Key<'_> {
    type Value = Option<usize>;

    fn deserialize<D: serde::Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        d.deserialize_str(self)
    }
}

impl Visitor<'_> for Key<'_> {
    type Value = Option<usize>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E>(self, key: &str) -> Result<Self::Value, E> {
        Ok(self.0.iter().position(|wanted| wanted == key))
    }
}

/// A string, borrowed if possible.
struct Text;

impl<'de> DeserializeSeed<'de> for Text {
    type Value = Cow<'de, str>;

    fn deserialize<D: serde::Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        d.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Text {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Cow::Borrowed(text))
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Cow::Owned(text.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| name.to_string()).collect()
    }

    #[test]
    fn takes_the_keys_asked_for_in_their_order() {
        let line = br#" {"x": {"text": [1, {}]}, "b": "u\u00fc", "text": "old", "text": "new"} "#;
        let values = strings(line, &keys(&["text", "b"])).unwrap();
        assert_eq!(values, ["new", "uü"]);
        assert!(matches!(values[0], Cow::Borrowed(_)));
    }

    #[test]
    fn says_what_is_wrong() {
        let error = |line: &str| strings(line.as_bytes(), &keys(&["text"])).unwrap_err();
        assert_eq!(error("{}"), "the key \"text\" is missing at column 2");
        assert!(error("{\"text\": [\"a\"]}").contains("key \"text\": invalid type: sequence"));
        assert_eq!(error(" \r"), "the line is blank");
        assert!(error("{\"text\": \"a\"").contains("EOF while parsing an object at column"));
    }
}
