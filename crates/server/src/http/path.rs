//! One spelling of a path, so that a limit on `/login` also counts `//login`, `/./login` and
//! `/%6Cogin`.
//!
//! - The query, the fragment, and the scheme and authority of a whole URL are cut off.
//! - Percent-encoded printable characters are decoded. All other bytes are percent-encoded, in
//!   capitals. `/` (`%2F`), `%`, `?`, `#` and `\` stay encoded, because decoded they would mean
//!   something else.
//! - After decoding, repeated slashes become one, and `.` and `..` are resolved.
//!
//! Paths that only some services treat as equal stay different: letter case, a slash at the end,
//! `;parameters`, `%2F`.

use std::fmt::Write;

/// Written as they are only where they separate: encoded, they are part of a name.
const RESERVED: &[u8] = b"/%?#\\";

/// The path of a request target, in the one spelling that rules see.
pub(crate) fn normal_path(target: &[u8]) -> String {
    let path = raw_path(target);
    let mut segments: Vec<String> = Vec::new();
    for segment in path.split(|byte| *byte == b'/').map(normal_segment) {
        match segment.as_str() {
            "" | "." => {}
            ".." => drop(segments.pop()),
            _ => segments.push(segment),
        }
    }
    let mut normal =
        segments.iter().fold(String::with_capacity(path.len() + 1), |path, segment| path + "/" + segment);
    if normal.is_empty() || ends_in_folder(path) {
        normal.push('/');
    }
    normal
}

/// Returns the target without its query and fragment, and without the authority of a whole URL.
fn raw_path(target: &[u8]) -> &[u8] {
    let end = target.iter().position(|byte| matches!(byte, b'?' | b'#')).unwrap_or(target.len());
    let target = &target[..end];
    let authority = [&b"http://"[..], b"https://"].iter().find_map(|scheme| {
        let (start, rest) = target.split_at_checked(scheme.len())?;
        start.eq_ignore_ascii_case(scheme).then_some(rest)
    });
    match authority {
        None => target,
        Some(rest) => &rest[rest.iter().position(|byte| *byte == b'/').unwrap_or(rest.len())..],
    }
}

fn ends_in_folder(path: &[u8]) -> bool {
    let last = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    matches!(normal_segment(last).as_str(), "" | "." | "..")
}

fn normal_segment(segment: &[u8]) -> String {
    let mut normal = String::with_capacity(segment.len());
    let mut rest = segment;
    while let Some((byte, tail)) = rest.split_first() {
        let decoded = (*byte == b'%').then(|| decode(tail)).flatten();
        let (byte, tail) = decoded.map_or((*byte, tail), |byte| (byte, &tail[2..]));
        if byte.is_ascii_graphic() && !RESERVED.contains(&byte) {
            normal.push(char::from(byte));
        } else {
            // Writing to a string does not fail.
            let _ = write!(normal, "%{byte:02X}");
        }
        rest = tail;
    }
    normal
}

/// The byte that two hexadecimal digits stand for.
fn decode(digits: &[u8]) -> Option<u8> {
    let digit = |at: usize| char::from(*digits.get(at)?).to_digit(16);
    u8::try_from(16 * digit(0)? + digit(1)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn one_path_has_one_spelling() {
        let cases = [
            ("/login", "/login"),
            ("/login?next=/a/../b", "/login"),
            ("/login#top", "/login"),
            ("//login", "/login"),
            ("/./login", "/login"),
            ("/a/../login", "/login"),
            ("/../../login", "/login"),
            ("/%6Cogin", "/login"),
            ("/%6c%6F%67in", "/login"),
            ("/a/%2e%2E/login", "/login"),
            ("/%2e/login", "/login"),
            ("/a//%2e%2e//.//login", "/login"),
            ("login", "/login"),
            ("http://example.com/login?x", "/login"),
            ("HTTPS://example.com//login", "/login"),
            ("http://example.com", "/"),
            ("", "/"),
            ("/", "/"),
            ("///", "/"),
            ("*", "/*"),
            // A folder stays one.
            ("/login/", "/login/"),
            ("/login//", "/login/"),
            ("/login/.", "/login/"),
            ("/a/b/..", "/a/"),
            // Characters that every service decodes, and bytes that are always encoded.
            ("/users%3Alogin", "/users:login"),
            ("/a%20b", "/a%20b"),
            ("/a b", "/a%20b"),
            ("/caf%c3%a9", "/caf%C3%A9"),
            ("/caf\u{e9}", "/caf%C3%A9"),
            ("/%00", "/%00"),
            // Encoded separators are part of a name.
            ("/a%2fb", "/a%2Fb"),
            ("/a%2f..%2flogin", "/a%2F..%2Flogin"),
            ("/a%3fb", "/a%3Fb"),
            ("/a%25b", "/a%25b"),
            ("/a\\b", "/a%5Cb"),
            // Twice encoded is not decoded twice.
            ("/%256Cogin", "/%256Cogin"),
            // Not a valid encoding.
            ("/%zz%6", "/%25zz%256"),
            ("/Login;v=1", "/Login;v=1"),
        ];
        for (target, normal) in cases {
            assert_eq!(normal_path(target.as_bytes()), normal, "{target}");
        }
    }

    proptest! {
        #[test]
        fn the_normal_spelling_is_its_own(target in prop::collection::vec(any::<u8>(), 0..40)) {
            let normal = normal_path(&target);
            prop_assert_eq!(normal_path(normal.as_bytes()), normal.clone());
            prop_assert!(normal.starts_with('/') && !normal.contains("//") && normal.is_ascii());
        }

        #[test]
        fn encoding_a_letter_changes_nothing(path in "(/[a-z.:~-]{1,5}){1,4}", at in any::<prop::sample::Index>()) {
            let at = at.index(path.len());
            prop_assume!(path.as_bytes()[at] != b'/');
            let encoded = format!("{}%{:02x}{}", &path[..at], path.as_bytes()[at], &path[at + 1..]);
            prop_assert_eq!(normal_path(encoded.as_bytes()), normal_path(path.as_bytes()));
        }
    }
}
