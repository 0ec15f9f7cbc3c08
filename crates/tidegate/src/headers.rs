//! The only module that turns a decision into HTTP: the header fields of every response, and the
//! body of a 429.
//!
//! ```
//! use std::time::Duration;
//! use http::HeaderMap;
//! use tidegate::headers::{ResetStyle, problem_body, set_headers};
//! use tidegate::{Limit, Limiter};
//!
//! let limiter = Limiter::builder().limit("logins", Limit::gcra(5, Duration::from_secs(60))?).build()?;
//! let logins = limiter.gate("logins")?;
//! let decision = limiter.check_all(&[logins.key("alice")])?;
//!
//! let mut headers = HeaderMap::new();
//! set_headers(&mut headers, &decision, limiter.wall_us(), ResetStyle::default());
//! assert_eq!(headers["ratelimit-policy"], r#""logins";q=5;w=60"#);
//! assert_eq!(headers["ratelimit"], r#""logins";r=4;t=12"#);
//!
//! let denied = limiter.check_all(&[logins.key("alice").cost(6)])?;
//! assert!(problem_body(&denied).contains(r#""violated-policies":["logins"]"#));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Names
//!
//! A header field holds printable ASCII only, but a limit may have any name. So each byte of a
//! name's UTF-8 that is not printable ASCII, and `%` itself, is percent-encoded: `größe` becomes
//! `gr%C3%B6%C3%9Fe`. Names without such bytes stay unchanged, no two names become equal, and
//! percent-decoding restores the name. The body of a 429 uses the same form, so its names match the
//! header fields.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::fmt::Write;

use http::header::{HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};

use crate::decision::{Decision, Outcome};

/// The draft that `RateLimit`, `RateLimit-Policy` and the problem type follow.
pub const DRAFT: &str = "draft-ietf-httpapi-ratelimit-headers-11";

/// Names of fields and parameters in [`DRAFT`], parameters with the characters around their keys.
/// Earlier drafts had other names, and later ones may too.
mod draft {
    use http::header::HeaderName;

    pub(super) const POLICY_FIELD: HeaderName = HeaderName::from_static("ratelimit-policy");
    pub(super) const LIMIT_FIELD: HeaderName = HeaderName::from_static("ratelimit");
    pub(super) const QUOTA: [u8; 3] = *b";q=";
    pub(super) const WINDOW: [u8; 3] = *b";w=";
    pub(super) const REMAINING: [u8; 3] = *b";r=";
    pub(super) const RESET: [u8; 3] = *b";t=";
    pub(super) const PROBLEM_TYPE: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
    pub(super) const PROBLEM_TITLE: &str = "Request cannot be satisfied as assigned quota has been exceeded";
    pub(super) const VIOLATED: &str = "violated-policies";
}

/// The fields that were in use before there was a draft. Each describes one limit only.
mod custom {
    use http::header::HeaderName;

    pub(super) const LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
    pub(super) const REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
    pub(super) const RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");
    pub(super) const POLICY: HeaderName = HeaderName::from_static("x-ratelimit-policy");
    pub(super) const DENIED_BY: HeaderName = HeaderName::from_static("x-ratelimit-denied-by");
}

/// The media type of [`problem_body`].
pub const PROBLEM_CONTENT_TYPE: &str = "application/problem+json";

/// The meaning of `X-RateLimit-Reset`. There is no standard, and servers differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResetStyle {
    /// Seconds since the Unix epoch.
    #[default]
    Epoch,
    /// Seconds from now.
    Delta,
}

/// Returns the header fields of a decision made at `wall_us`, microseconds since the Unix epoch.
///
/// - `RateLimit-Policy`: each limit, its amount and its period.
/// - `RateLimit`: the units left under each limit, and the seconds until its meter has drained.
///   After a denial: only the limits that denied, and the seconds until they would let the same
///   request pass.
/// - `X-RateLimit-Limit`, `-Remaining`, `-Reset` and `-Policy`: the same for the most relevant
///   limit: the one that denied, or else the one with the smallest share of its burst left.
/// - `X-RateLimit-Denied-By` and `Retry-After`: on a denial.
///
/// Every time is rounded up, so that a client that waits as long does not retry too early. A
/// request that can never pass, because it costs more than the burst or the limit is 0, gets no
/// time: no `t`, no `X-RateLimit-Reset` and no `Retry-After`. A decision under no limits has no
/// fields.
pub fn headers(decision: &Decision<'_>, wall_us: u64, reset: ResetStyle) -> Vec<(HeaderName, HeaderValue)> {
    let mut made = Vec::with_capacity(FIELDS_MAX);
    write_fields(decision, wall_us, reset, |name, value| made.push((name, value)));
    made
}

/// The most fields that a decision has.
const FIELDS_MAX: usize = 8;

/// Initial size of a field value, bytes: a list of two or three limits fits without growth. Longer
/// lists grow it.
const VALUE_BYTES: usize = 128;

fn write_fields(
    decision: &Decision<'_>,
    wall_us: u64,
    reset: ResetStyle,
    put: impl FnMut(HeaderName, HeaderValue),
) {
    let Some(chief) = chief(decision) else { return };
    let amount = chief.gate().limit().amount().into();
    let mut fields = Fields { text: Vec::with_capacity(VALUE_BYTES), put };
    fields.add(draft::POLICY_FIELD, |text| policy_list(text, decision));
    fields.add(draft::LIMIT_FIELD, |text| limit_list(text, decision));
    fields.add(custom::LIMIT, |text| number(text, amount));
    fields.add(custom::REMAINING, |text| number(text, chief.remaining().into()));
    if let Some(reset) = reset_at(chief, wall_us, reset) {
        fields.add(custom::RESET, |text| number(text, reset));
    }
    fields.add(custom::POLICY, |text| {
        number(text, amount);
        parameter(text, draft::WINDOW, window_seconds(chief));
    });
    if let Some(outcome) = decision.denied_by() {
        fields.add(custom::DENIED_BY, |text| text.extend_from_slice(name_of(outcome).as_bytes()));
    }
    if let Some(seconds) = retry_after(decision) {
        fields.add(RETRY_AFTER, |text| number(text, seconds));
    }
}

/// A writer of fields that reuses one buffer for all values.
struct Fields<P> {
    text: Vec<u8>,
    put: P,
}

impl<P: FnMut(HeaderName, HeaderValue)> Fields<P> {
    fn add(&mut self, name: HeaderName, write: impl FnOnce(&mut Vec<u8>)) {
        self.text.clear();
        write(&mut self.text);
        // Always valid: `name_of` encodes all bytes that a field cannot hold.
        if let Ok(value) = HeaderValue::from_bytes(&self.text) {
            (self.put)(name, value);
        }
    }
}

/// Sets [`headers`] on a response, in place of any fields of the same names.
pub fn set_headers(on: &mut HeaderMap, decision: &Decision<'_>, wall_us: u64, reset: ResetStyle) {
    make_room(on);
    write_fields(decision, wall_us, reset, |name, value| put_one(on, name, value));
}

/// Sets fields that were made before.
#[cfg(feature = "tower")]
pub(crate) fn put(on: &mut HeaderMap, fields: Vec<(HeaderName, HeaderValue)>) {
    make_room(on);
    for (name, value) in fields {
        put_one(on, name, value);
    }
}

fn make_room(on: &mut HeaderMap) {
    // Grown once, and not while the fields go in. Without the room there is no place for them
    // either.
    let _ = on.try_reserve(FIELDS_MAX);
}

fn put_one(on: &mut HeaderMap, name: HeaderName, value: HeaderValue) {
    // Fails only on a response that has tens of thousands of fields already; it can do without
    // these.
    let _ = on.try_insert(name, value);
}

/// The body of a 429: a problem (RFC 9457) that names the limits that denied.
pub fn problem_body(decision: &Decision<'_>) -> String {
    let violated: Vec<_> = denying(decision).map(name_of).collect();
    serde_json::json!({
        "type": draft::PROBLEM_TYPE,
        "title": draft::PROBLEM_TITLE,
        "status": http::StatusCode::TOO_MANY_REQUESTS.as_u16(),
        draft::VIOLATED: violated,
    })
    .to_string()
}

/// Returns the limit that matters most to the client.
fn chief<'d, 'g>(decision: &'d Decision<'g>) -> Option<&'d Outcome<'g>> {
    decision.denied_by().or_else(|| decision.outcomes().iter().min_by(|a, b| by_share_left(a, b)))
}

/// Compares remaining / burst, multiplied out to stay exact.
fn by_share_left(a: &Outcome<'_>, b: &Outcome<'_>) -> Ordering {
    let scaled =
        |of: &Outcome<'_>, by: &Outcome<'_>| u64::from(of.remaining()) * u64::from(by.gate().limit().burst());
    scaled(a, b).cmp(&scaled(b, a))
}

fn denying<'d, 'g>(decision: &'d Decision<'g>) -> impl Iterator<Item = &'d Outcome<'g>> {
    decision.outcomes().iter().filter(|outcome| !outcome.is_allowed())
}

fn policy_list(text: &mut Vec<u8>, decision: &Decision<'_>) {
    for (at, outcome) in decision.outcomes().iter().enumerate() {
        item(text, at, &name_of(outcome));
        parameter(text, draft::QUOTA, outcome.gate().limit().amount().into());
        parameter(text, draft::WINDOW, window_seconds(outcome));
    }
}

fn limit_list(text: &mut Vec<u8>, decision: &Decision<'_>) {
    let telling = |outcome: &&Outcome<'_>| decision.denied_by().is_none() || !outcome.is_allowed();
    for (at, outcome) in decision.outcomes().iter().filter(telling).enumerate() {
        item(text, at, &name_of(outcome));
        parameter(text, draft::REMAINING, outcome.remaining().into());
        if let Some(wait_us) = wait_us(outcome) {
            parameter(text, draft::RESET, seconds(wait_us));
        }
    }
}

/// Writes a member of a list of structured strings (RFC 9651). This is written by hand, because
/// every response has two such lists, and their numbers and texts are always valid.
fn item(text: &mut Vec<u8>, at: usize, name: &str) {
    if at > 0 {
        text.extend_from_slice(b", ");
    }
    text.push(b'"');
    for byte in name.bytes() {
        if matches!(byte, b'"' | b'\\') {
            text.push(b'\\');
        }
        text.push(byte);
    }
    text.push(b'"');
}

/// A parameter of a list's member. Every amount and every time in seconds is below the largest
/// integer there is, 999,999,999,999,999: 64 bits of microseconds are not so many seconds.
fn parameter(text: &mut Vec<u8>, key: [u8; 3], value: u64) {
    text.extend_from_slice(&key);
    number(text, value);
}

fn number(text: &mut Vec<u8>, value: u64) {
    text.extend_from_slice(itoa::Buffer::new().format(value).as_bytes());
}

fn reset_at(outcome: &Outcome<'_>, wall_us: u64, style: ResetStyle) -> Option<u64> {
    let wait_us = wait_us(outcome)?;
    Some(match style {
        ResetStyle::Epoch => seconds(wall_us.saturating_add(wait_us)),
        ResetStyle::Delta => seconds(wait_us),
    })
}

/// Of several limits that denied, [`Decision::denied_by`] is the one that denies longest: its wait
/// is enough for all.
fn retry_after(decision: &Decision<'_>) -> Option<u64> {
    Some(seconds(wait_us(decision.denied_by()?)?).max(1))
}

/// Returns the time until a denied request would pass, or until the meter of an allowed one has
/// drained, µs. `None` if the request can never pass.
fn wait_us(outcome: &Outcome<'_>) -> Option<u64> {
    match outcome.verdict().retry() {
        Some(retry) => retry.after_us(),
        None => Some(outcome.verdict().reset_after_us()),
    }
}

fn window_seconds(outcome: &Outcome<'_>) -> u64 {
    seconds(outcome.gate().limit().period_us())
}

fn seconds(us: u64) -> u64 {
    us.div_ceil(1_000_000)
}

/// The limit's name as it is written on the wire: see the module.
fn name_of<'g>(outcome: &Outcome<'g>) -> Cow<'g, str> {
    let name = outcome.gate().name();
    let is_plain = |byte: u8| matches!(byte, b' '..=b'~') && byte != b'%';
    if name.bytes().all(is_plain) {
        return Cow::Borrowed(name);
    }
    let mut encoded = String::with_capacity(3 * name.len());
    for byte in name.bytes() {
        if is_plain(byte) {
            encoded.push(char::from(byte));
        } else {
            // Writing to a string does not fail.
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    Cow::Owned(encoded)
}
