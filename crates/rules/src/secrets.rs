//! Header fields that hold credentials. Their values are counted, logged and stored as digests.
//!
//! Servers of a region, and regions that replicate, must derive the same meter key from a value. No
//! secret is common to all of them, so the digest is a plain SHA-256, cut to 128 bits. It hides
//! tokens that cannot be guessed; it does not hide a short password.

use std::borrow::Cow;

use sha2::{Digest as _, Sha256};

use crate::audit::hexadecimal;
use crate::dimensions::{HEADER_PREFIX, NAME_BYTES_MAX, is_name};

/// The most header fields that a server adds to those that are always secret. Higher: more names to
/// compare with each header field of a request.
pub const SECRET_HEADERS_MAX: usize = 32;

/// Fields that hold credentials on every server.
const ALWAYS_SECRET: [&str; 8] = [
    "authorization",
    "proxy-authorization",
    "cookie",
    "set-cookie",
    "x-api-key",
    "api-key",
    "x-auth-token",
    "x-amz-security-token",
];

/// First field of the hashed bytes. No other use of the hash gives the digest of a credential.
const DOMAIN: &[u8] = b"tidegate secret header 1";

/// Begins each digest, so that readers know a digest from a value.
const DIGEST_PREFIX: &str = "sha256:";

/// Digits of a digest: 128 bits.
const DIGEST_DIGITS: usize = 32;

/// The header fields whose values are credentials: the usual ones, and those of a server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SecretHeaders(Box<[Box<str>]>);

impl SecretHeaders {
    /// Adds the header fields of a server to the usual ones.
    pub fn new<'n>(names: impl IntoIterator<Item = &'n str>) -> Result<Self, String> {
        let names: Vec<Box<str>> = names.into_iter().map(Box::from).collect();
        if names.len() > SECRET_HEADERS_MAX {
            return Err(format!("{} names is outside 0 to {SECRET_HEADERS_MAX}", names.len()));
        }
        let longest = NAME_BYTES_MAX - HEADER_PREFIX.len();
        match names.iter().find(|name| !is_name(name) || name.len() > longest) {
            Some(name) => Err(format!(
                "{name:?} is not the name of a header field: 1 to {longest} of the characters a-z, A-Z, 0-9, \
                 _, - and ."
            )),
            None => Ok(Self(names.into())),
        }
    }

    /// Whether the values of a dimension are credentials: of a header field, with or without the
    /// prefix, since callers choose their names. Proxies write `_` for `-`.
    pub fn is_secret(&self, dimension: &str) -> bool {
        let field = field_of(dimension);
        ALWAYS_SECRET.iter().copied().chain(self.0.iter().map(|name| &**name)).any(|known| same(known, field))
    }

    /// Returns a key of a decision record with digests in place of credentials, as the record has
    /// it. A value ends before a comma and the name of a credential or one of `names`, the
    /// dimensions that keys are made of.
    pub fn hide_in_key<'k>(&self, key: &'k str, names: &[String]) -> Cow<'k, str> {
        let parts = parts_of_key(key, |name| self.is_secret(name) || names.iter().any(|known| known == name));
        let hidden = |(name, value): &(&str, &str)| self.is_secret(name) && !is_digest(value);
        if !parts.iter().any(hidden) {
            return Cow::Borrowed(key);
        }
        let hide = |part: &(&str, &str)| match part {
            (name, value) if hidden(part) => format!("{name}:{}", digest(name, value)),
            ("", value) => (*value).to_owned(),
            (name, value) => format!("{name}:{value}"),
        };
        Cow::Owned(parts.iter().map(hide).collect::<Vec<_>>().join(","))
    }
}

/// Returns the form in which the value of a dimension with a credential is kept.
pub fn digest(dimension: &str, value: &str) -> String {
    let field: String = field_of(dimension).bytes().map(|byte| char::from(folded(byte))).collect();
    let mut hasher = Sha256::new();
    for part in [DOMAIN, field.as_bytes(), value.as_bytes()] {
        hasher.update((part.len() as u64).to_be_bytes());
        hasher.update(part);
    }
    let mut digits = hexadecimal(&hasher.finalize());
    digits.truncate(DIGEST_DIGITS);
    format!("{DIGEST_PREFIX}{digits}")
}

/// Whether a value has the form of a digest.
pub fn is_digest(value: &str) -> bool {
    let digits = value.strip_prefix(DIGEST_PREFIX).filter(|digits| digits.len() == DIGEST_DIGITS);
    digits.is_some_and(|digits| digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')))
}

fn field_of(dimension: &str) -> &str {
    dimension.strip_prefix(HEADER_PREFIX).unwrap_or(dimension)
}

fn same(known: &str, field: &str) -> bool {
    known.len() == field.len() && known.bytes().map(folded).eq(field.bytes().map(folded))
}

fn folded(byte: u8) -> u8 {
    if byte == b'_' { b'-' } else { byte.to_ascii_lowercase() }
}

/// Splits `user:42,ip:192.0.2.1` into names and values. Values may have commas and colons, so a
/// part begins only with a known name. A part without one has an empty name.
fn parts_of_key<'k>(key: &'k str, is_known: impl Fn(&str) -> bool) -> Vec<(&'k str, &'k str)> {
    let named = |text: &'k str| {
        let (name, value) = text.split_once(':')?;
        is_known(name).then_some((name, value))
    };
    let (mut parts, mut rest) = (Vec::new(), key);
    loop {
        let begins = |(at, _): &(usize, &str)| named(&rest[at + 1..]).is_some();
        let end = rest.match_indices(',').find(begins).map(|(at, _)| at);
        let part = &rest[..end.unwrap_or(rest.len())];
        parts.push(named(part).unwrap_or(("", part)));
        match end {
            Some(end) => rest = &rest[end + 1..],
            None => return parts,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_known_by_the_name_of_their_field() {
        let own = SecretHeaders::new(["X-Session"]).expect("a name");
        for secret in ["header.Authorization", "cookie", "header.X_Api_Key", "api_key", "header.x-session"] {
            assert!(own.is_secret(secret), "{secret}");
        }
        for other in ["", "header.", "header.x-authorization", "header.x-api-key2", "user"] {
            assert!(!own.is_secret(other), "{other}");
        }
        assert!(!SecretHeaders::default().is_secret("header.x-session"));
    }

    #[test]
    fn impossible_names_are_refused() {
        for (name, message) in [("", "\"\" is not the name"), ("x y", "\"x y\" is not the name")] {
            let problem = SecretHeaders::new([name]).expect_err(name);
            assert!(problem.starts_with(message), "{problem}");
        }
        assert!(SecretHeaders::new(["x".repeat(58).as_str()]).is_err());
        let problem = SecretHeaders::new(["x"; 33]).expect_err("too many");
        assert_eq!(problem, "33 names is outside 0 to 32");
    }

    #[test]
    fn the_digest_of_a_credential_never_changes() {
        // Another program computed this digest. Nodes of different versions share meters.
        let known = "sha256:ae162a40ae765e3467de8240576a2607";
        assert_eq!(digest("header.Authorization", "Bearer abc"), known);
        assert_eq!(digest("authorization", "Bearer abc"), known);
        assert!(is_digest(known));
        assert_ne!(digest("header.x-api-key", "Bearer abc"), known);
        assert!(!is_digest("sha256:abc") && !is_digest("Bearer abc"));
    }

    #[test]
    fn credentials_are_hidden_in_the_key_of_a_question() {
        let names = ["header.cookie", "user", "header.x-key"].map(str::to_owned);
        let hide = |key| SecretHeaders::default().hide_in_key(key, &names).into_owned();
        for same in ["user:42", "42", "", "user:a,b:c", "user:1,header.x-key:2"] {
            assert_eq!(hide(same), same);
        }
        let hidden = digest("header.cookie", "a=1, b:2,c");
        assert_eq!(hide("header.cookie:a=1, b:2,c"), format!("header.cookie:{hidden}"));
        let key = format!("user:1,header.cookie:{hidden},header.x-key:3");
        assert_eq!(hide("user:1,header.cookie:a=1, b:2,c,header.x-key:3"), key);
        assert_eq!(hide(&key), key, "a digest is searched as it is");
    }
}
