//! The fields of a request. Each accepts any type, so that one response lists all problems, with
//! the field's name and the allowed values.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The longest namespace and identifier.
pub(super) const TEXT_CHARS_MAX: usize = 512;

/// One problem of a request.
#[derive(Debug, Serialize, ToSchema)]
pub(in crate::http) struct FieldError {
    /// Where: `body.limit`, or `body[3].limit`.
    pub(super) location: String,
    /// The problem, and the allowed values.
    pub(super) message: String,
}

impl FieldError {
    pub(super) fn new(location: impl Into<String>, message: impl Into<String>) -> Self {
        Self { location: location.into(), message: message.into() }
    }
}

/// The problems found so far, and the element that is being read.
#[derive(Debug, Default)]
pub(super) struct Problems {
    errors: Vec<FieldError>,
    /// Of a list, which element.
    pub(super) element: Option<usize>,
}

impl Problems {
    pub(super) fn add(&mut self, field: &str, message: impl fmt::Display) {
        let (location, message) = match self.element {
            None => (format!("body.{field}"), format!("{field}: {message}")),
            Some(at) => (format!("body[{at}].{field}"), format!("[{at}].{field}: {message}")),
        };
        self.errors.push(FieldError { location, message });
    }

    /// Returns the value, or the problems if there are any.
    pub(super) fn or<T>(self, read: T) -> Result<T, Vec<FieldError>> {
        if self.errors.is_empty() { Ok(read) } else { Err(self.errors) }
    }

    /// A text of 1 to [`TEXT_CHARS_MAX`] characters; empty if it is not.
    pub(super) fn text<'b>(&mut self, field: &str, given: Option<FieldValue<'b>>) -> Cow<'b, str> {
        match given {
            Some(FieldValue::Text(text)) if is_in_length(&text) => return text,
            Some(FieldValue::Text(text)) => {
                let chars = text.chars().count();
                self.add(field, format_args!("{chars} characters is outside 1 to {TEXT_CHARS_MAX}"));
            }
            Some(other) => {
                let what = other.kind();
                self.add(field, format_args!("{what} is not a text of 1 to {TEXT_CHARS_MAX} characters"));
            }
            None => {
                self.add(field, format_args!("missing; must be a text of 1 to {TEXT_CHARS_MAX} characters"));
            }
        }
        Cow::Borrowed("")
    }

    /// Returns a whole number in a range. Otherwise notes a problem, and returns the least.
    pub(super) fn number(
        &mut self,
        field: &str,
        given: Option<FieldValue<'_>>,
        least: u64,
        most: u64,
    ) -> u64 {
        match given {
            Some(FieldValue::Whole(number)) if (least..=most).contains(&number) => return number,
            Some(FieldValue::Whole(number)) => {
                self.add(field, format_args!("{number} is outside {least} to {most}"));
            }
            Some(FieldValue::Negative(number)) => {
                self.add(field, format_args!("{number} is outside {least} to {most}"));
            }
            Some(FieldValue::Broken(number)) => {
                self.add(field, format_args!("{number:?} is not a whole number from {least} to {most}"));
            }
            Some(other) => {
                let what = other.kind();
                self.add(field, format_args!("{what} is not a whole number from {least} to {most}"));
            }
            None => self.add(field, format_args!("missing; must be a whole number from {least} to {most}")),
        }
        least
    }
}

/// Few texts are so long that their characters have to be counted.
fn is_in_length(text: &str) -> bool {
    !text.is_empty() && (text.len() <= TEXT_CHARS_MAX || text.chars().count() <= TEXT_CHARS_MAX)
}

/// The value of a field, of any type.
#[derive(Debug)]
pub(in crate::http) enum FieldValue<'b> {
    Text(Cow<'b, str>),
    Whole(u64),
    Negative(i64),
    Broken(f64),
    Boolean,
    List,
    Object,
}

impl FieldValue<'_> {
    const fn kind(&self) -> &'static str {
        match self {
            Self::Text(_) => "a text",
            Self::Whole(_) | Self::Negative(_) | Self::Broken(_) => "a number",
            Self::Boolean => "a boolean",
            Self::List => "a list",
            Self::Object => "an object",
        }
    }
}

impl<'de: 'b, 'b> Deserialize<'de> for FieldValue<'b> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FieldValueVisitor;

        impl<'b> Visitor<'b> for FieldValueVisitor {
            type Value = FieldValue<'b>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("anything")
            }

            fn visit_borrowed_str<E>(self, text: &'b str) -> Result<FieldValue<'b>, E> {
                Ok(FieldValue::Text(Cow::Borrowed(text)))
            }

            fn visit_str<E>(self, text: &str) -> Result<FieldValue<'b>, E> {
                Ok(FieldValue::Text(Cow::Owned(text.to_owned())))
            }

            fn visit_u64<E>(self, number: u64) -> Result<FieldValue<'b>, E> {
                Ok(FieldValue::Whole(number))
            }

            fn visit_i64<E>(self, number: i64) -> Result<FieldValue<'b>, E> {
                Ok(u64::try_from(number).map_or(FieldValue::Negative(number), FieldValue::Whole))
            }

            fn visit_f64<E>(self, number: f64) -> Result<FieldValue<'b>, E> {
                Ok(FieldValue::Broken(number))
            }

            fn visit_bool<E>(self, _: bool) -> Result<FieldValue<'b>, E> {
                Ok(FieldValue::Boolean)
            }

            // The contents of a list or an object are consumed, so that the rest of the body can be
            // read.
            fn visit_seq<A: SeqAccess<'b>>(self, mut list: A) -> Result<FieldValue<'b>, A::Error> {
                while list.next_element::<IgnoredAny>()?.is_some() {}
                Ok(FieldValue::List)
            }

            fn visit_map<A: MapAccess<'b>>(self, mut object: A) -> Result<FieldValue<'b>, A::Error> {
                while object.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(FieldValue::Object)
            }
        }

        deserializer.deserialize_any(FieldValueVisitor)
    }
}
