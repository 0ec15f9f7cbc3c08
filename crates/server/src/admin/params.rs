//! Inputs of an admin request: query parameters and the body.

use std::borrow::Cow;
use std::collections::HashMap;

use serde::de::DeserializeOwned;

use crate::http::{HttpRequest, Problem};

/// Query parameters, each given once. Unknown names are refused.
pub(super) struct QueryParams<'q>(HashMap<Cow<'q, str>, Cow<'q, str>>);

impl<'q> QueryParams<'q> {
    pub(super) fn read(req: &'q HttpRequest<'_>, known: &[&str]) -> Result<Self, Problem> {
        let query = req.parts.uri.query().unwrap_or_default();
        let mut given = HashMap::new();
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            if !known.contains(&&*name) {
                let known = known.join(", ");
                return Err(Problem::bad_request(format!("{name}: not a parameter; there are {known}")));
            }
            if let Some(_before) = given.insert(name.clone(), value) {
                return Err(Problem::bad_request(format!("{name}: given twice")));
            }
        }
        Ok(Self(given))
    }

    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(|value| &**value)
    }

    pub(super) fn number(&self, name: &str, default: u64, least: u64, most: u64) -> Result<u64, Problem> {
        let Some(text) = self.text(name) else { return Ok(default) };
        let number = text.parse().ok().filter(|number| (least..=most).contains(number));
        number.ok_or_else(|| {
            Problem::bad_request(format!("{name}: {text:?} is not a number from {least} to {most}"))
        })
    }
}

/// Parses a JSON body. An empty body counts as `{}`, which is enough if every field is optional.
pub(super) fn body<T: DeserializeOwned>(req: &HttpRequest<'_>) -> Result<T, Problem> {
    let text: &[u8] = if req.body.is_empty() { b"{}" } else { &req.body };
    let mut reader = serde_json::Deserializer::from_slice(text);
    let read = serde_path_to_error::deserialize(&mut reader);
    let read = read.map_err(|error| match error.path().to_string() {
        path if path == "." || path == "?" => format!("body: {}", error.inner()),
        path => format!("{path}: {}", error.inner()),
    });
    let value = read.map_err(Problem::bad_request)?;
    reader.end().map_err(|error| Problem::bad_request(format!("body: {error}")))?;
    Ok(value)
}
