//! The fields of a request. Each is read whatever it is, so that everything wrong with a request is told at once, by
//! the field's name and with what is allowed.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The longest namespace and identifier.
pub(super) const TEXT_CHARS_MAX: usize = 512;

/// One thing that is wrong.
#[derive(Debug, Serialize, ToSchema)]
pub(in crate::http) struct FieldError {
    /// Where: `body.limit`, or `body[3].limit`.
    pub(super) location: String,
    /// What, and what is allowed.
    pub(super) message: String,
}

impl FieldError {
    pub(super) fn new(location: impl Into<String>, message: impl Into<String>) -> Self {
        Self { location: location.into(), message: message.into() }
    }
}

/// What is wrong so far, and whose fields are looked at.
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

    /// What was read, if nothing was wrong with it.
    pub(super) fn or<T>(self, read: T) -> Result<T, Vec<FieldError>> {
        if self.errors.is_empty() { Ok(read) } else { Err(self.errors) }
    }

    /// A text of 1 to [`TEXT_CHARS_MAX`] characters; empty if it is not.
    pub(super) fn text<'b>(&mut self, field: &str, given: Option<Text<'b>>) -> Cow<'b, str> {
        match given {
            Some(Text::Given(text)) if is_in_length(&text) => return text,
            Some(Text::Given(text)) => {
                let chars = text.chars().count();
                self.add(field, format_args!("{chars} characters is outside 1 to {TEXT_CHARS_MAX}"));
            }
            Some(Text::Wrong(what)) => {
                self.add(field, format_args!("{what} is not a text of 1 to {TEXT_CHARS_MAX} characters"));
            }
            None => {
                self.add(field, format_args!("missing; must be a text of 1 to {TEXT_CHARS_MAX} characters"));
            }
        }
        Cow::Borrowed("")
    }

    /// A whole number in a range; its least if it is not.
    pub(super) fn number(&mut self, field: &str, given: Option<Number>, least: u64, most: u64) -> u64 {
        match given {
            Some(Number::Whole(number)) if (least..=most).contains(&number) => return number,
            Some(Number::Whole(number)) => {
                self.add(field, format_args!("{number} is outside {least} to {most}"));
            }
            Some(Number::Negative(number)) => {
                self.add(field, format_args!("{number} is outside {least} to {most}"));
            }
            Some(Number::Broken(number)) => {
                self.add(field, format_args!("{number:?} is not a whole number from {least} to {most}"));
            }
            Some(Number::Wrong(what)) => {
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

/// What should be a text.
#[derive(Debug)]
pub(in crate::http) enum Text<'b> {
    Given(Cow<'b, str>),
    Wrong(&'static str),
}

/// What should be a number.
#[derive(Clone, Copy, Debug)]
pub(in crate::http) enum Number {
    Whole(u64),
    Negative(i64),
    Broken(f64),
    Wrong(&'static str),
}

const BOOLEAN: &str = "a boolean";
const NUMBER: &str = "a number";
const TEXT: &str = "a text";
const LIST: &str = "a list";
const OBJECT: &str = "an object";

/// Takes what a list has, so that what follows it can be read.
fn skip_list<'b, A: SeqAccess<'b>>(mut list: A) -> Result<(), A::Error> {
    while list.next_element::<IgnoredAny>()?.is_some() {}
    Ok(())
}

fn skip_object<'b, A: MapAccess<'b>>(mut object: A) -> Result<(), A::Error> {
    while object.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
    Ok(())
}

impl<'de: 'b, 'b> Deserialize<'de> for Text<'b> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextVisitor;

        impl<'b> Visitor<'b> for TextVisitor {
            type Value = Text<'b>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("anything")
            }

            fn visit_borrowed_str<E>(self, text: &'b str) -> Result<Text<'b>, E> {
                Ok(Text::Given(Cow::Borrowed(text)))
            }

            fn visit_str<E>(self, text: &str) -> Result<Text<'b>, E> {
                Ok(Text::Given(Cow::Owned(text.to_owned())))
            }

            fn visit_bool<E>(self, _: bool) -> Result<Text<'b>, E> {
                Ok(Text::Wrong(BOOLEAN))
            }

            fn visit_u64<E>(self, _: u64) -> Result<Text<'b>, E> {
                Ok(Text::Wrong(NUMBER))
            }

            fn visit_i64<E>(self, _: i64) -> Result<Text<'b>, E> {
                Ok(Text::Wrong(NUMBER))
            }

            fn visit_f64<E>(self, _: f64) -> Result<Text<'b>, E> {
                Ok(Text::Wrong(NUMBER))
            }

            fn visit_seq<A: SeqAccess<'b>>(self, list: A) -> Result<Text<'b>, A::Error> {
                skip_list(list).map(|()| Text::Wrong(LIST))
            }

            fn visit_map<A: MapAccess<'b>>(self, object: A) -> Result<Text<'b>, A::Error> {
                skip_object(object).map(|()| Text::Wrong(OBJECT))
            }
        }

        deserializer.deserialize_any(TextVisitor)
    }
}

impl<'b> Deserialize<'b> for Number {
    fn deserialize<D: Deserializer<'b>>(deserializer: D) -> Result<Self, D::Error> {
        struct NumberVisitor;

        impl<'b> Visitor<'b> for NumberVisitor {
            type Value = Number;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("anything")
            }

            fn visit_u64<E>(self, number: u64) -> Result<Number, E> {
                Ok(Number::Whole(number))
            }

            fn visit_i64<E>(self, number: i64) -> Result<Number, E> {
                Ok(u64::try_from(number).map_or(Number::Negative(number), Number::Whole))
            }

            fn visit_f64<E>(self, number: f64) -> Result<Number, E> {
                Ok(Number::Broken(number))
            }

            fn visit_str<E>(self, _: &str) -> Result<Number, E> {
                Ok(Number::Wrong(TEXT))
            }

            fn visit_bool<E>(self, _: bool) -> Result<Number, E> {
                Ok(Number::Wrong(BOOLEAN))
            }

            fn visit_seq<A: SeqAccess<'b>>(self, list: A) -> Result<Number, A::Error> {
                skip_list(list).map(|()| Number::Wrong(LIST))
            }

            fn visit_map<A: MapAccess<'b>>(self, object: A) -> Result<Number, A::Error> {
                skip_object(object).map(|()| Number::Wrong(OBJECT))
            }
        }

        deserializer.deserialize_any(NumberVisitor)
    }
}
