//! Default names of overrides and emergencies for some keys of a rule.

use std::fmt::Write as _;

use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use sha2::{Digest as _, Sha256};

/// The longest name that a server takes.
const NAME_BYTES_MAX: usize = 128;

/// Characters that are percent-encoded within a part: the separator `:`, the escape `%` and control
/// characters.
const APART: &AsciiSet = &CONTROLS.add(b':').add(b'%');

/// Returns a name that is unique to these keys of a rule. A repeated command therefore refers to
/// the same override or emergency.
pub(crate) fn name_of(prefix: &str, rule: &str, key: &[&str]) -> String {
    let parts: Vec<String> =
        std::iter::once(&rule).chain(key).map(|part| utf8_percent_encode(part, APART).to_string()).collect();
    let name = format!("{prefix}{}", parts.join(":"));
    if name.len() <= NAME_BYTES_MAX { name } else { format!("{prefix}{}", digest(&name)) }
}

fn digest(name: &str) -> String {
    let mut text = "sha256-".to_owned();
    for byte in Sha256::digest(name) {
        // Writing to a text cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_a_name_each() {
        assert_eq!(name_of("block:", "per_user", &["eve"]), "block:per_user:eve");
        assert_eq!(name_of("", "per_ip", &["2001:db8::1", "/x y"]), "per_ip:2001%3Adb8%3A%3A1:/x y");
        for (one, other) in [
            (["a:b", "c"], ["a", "b:c"]),
            (["a%3Ab", "c"], ["a:b", "c"]),
            (["é", "\n"], ["e", "n"]),
            ([&*"x".repeat(1_024), "1"], [&*"x".repeat(1_024), "2"]),
        ] {
            let names = [one, other].map(|key| name_of("block:", "r", &key));
            assert_ne!(names[0], names[1]);
            assert!(names.iter().all(|name| name.len() <= NAME_BYTES_MAX && name.is_ascii()), "{names:?}");
        }
    }
}
