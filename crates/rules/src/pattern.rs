//! Patterns: text in which `*` matches any text, also an empty one.

use std::ops::Range;
use std::sync::Arc;

use memchr::memmem;

/// Text to compare with, compiled once. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pattern {
    text: Arc<str>,
    wild: bool,
}

impl Pattern {
    /// The pattern written as `text`.
    pub fn new(text: impl Into<Arc<str>>) -> Self {
        let text = text.into();
        Self { wild: text.contains('*'), text }
    }

    /// Whether the pattern matches `value`.
    #[inline]
    pub fn matches(&self, value: &str) -> bool {
        if self.wild { matches_wild(self.text.as_bytes(), value.as_bytes()) } else { *self.text == *value }
    }

    /// Whether the pattern has a `*`.
    pub fn is_wild(&self) -> bool {
        self.wild
    }

    /// Whether some value may match both patterns. For two patterns with a `*` this compares only
    /// prefixes and suffixes, so it may be true although no value matches both.
    pub fn may_meet(&self, other: &Self) -> bool {
        match (self.wild, other.wild) {
            (false, _) => other.matches(&self.text),
            (true, false) => self.matches(&other.text),
            (true, true) => {
                let (begin, of) = (self.beginning(), other.beginning());
                let begins = begin.starts_with(of) || of.starts_with(begin);
                let (end, of) = (self.end(), other.end());
                begins && (end.ends_with(of) || of.ends_with(end))
            }
        }
    }

    /// Returns the prefix of all matching values: the whole text, if the pattern has no `*`.
    pub(crate) fn beginning(&self) -> &str {
        self.text.split('*').next().unwrap_or_default()
    }

    /// Returns the suffix of all matching values.
    pub(crate) fn end(&self) -> &str {
        self.text.rsplit('*').next().unwrap_or_default()
    }

    /// How much the pattern spells out, in bytes.
    pub(crate) fn literal_bytes(&self) -> usize {
        self.text.bytes().filter(|byte| *byte != b'*').count()
    }

    /// The pattern as it was written.
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

/// Whether `value` matches a pattern that is stored as text only.
#[inline]
pub(crate) fn describes(pattern: &[u8], value: &[u8]) -> bool {
    if pattern.contains(&b'*') { matches_wild(pattern, value) } else { pattern == value }
}

/// Takes the text between stars from the left, each at its first place: if any way matches, this
/// one does. No character of a text begins within another one, so bytes will do.
fn matches_wild(pattern: &[u8], value: &[u8]) -> bool {
    let Some((between, rest)) = strip_ends(pattern, value) else { return false };
    let mut texts = between.split(|byte| *byte == b'*');
    let behind = |rest: &[u8], text: &[u8]| memmem::find(rest, text).map(|at| at + text.len());
    texts.try_fold(&value[rest], |rest, text| rest.get(behind(rest, text)?..)).is_some()
}

/// Returns the text of a pattern between its first and its last star, and the place of the rest of
/// a value without the beginning and the end that the pattern requires; `None` if the value lacks
/// them.
#[inline]
pub(crate) fn strip_ends<'p>(pattern: &'p [u8], value: &[u8]) -> Option<(&'p [u8], Range<usize>)> {
    let first = memchr::memchr(b'*', pattern)?;
    let last = memchr::memrchr(b'*', pattern)?;
    let rest = value.strip_prefix(&pattern[..first])?.strip_suffix(&pattern[last + 1..])?;
    Some((pattern.get(first + 1..last).unwrap_or_default(), first..first + rest.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_star_stands_for_anything() {
        let yes = [
            ("a*c", "abbc"),
            ("a*c", "ac"),
            ("*", ""),
            ("**", "x"),
            ("/v1/*/x", "/v1/a/b/x"),
            ("*b*b", "bb"),
        ];
        let no = [("a*c", "ab"), ("a*a", "a"), ("/v1/*", "/v2/x"), ("*b*b", "b"), ("", "a"), ("a", "")];
        for (pattern, value) in yes {
            assert!(Pattern::new(pattern).matches(value), "{pattern} {value}");
        }
        for (pattern, value) in no {
            assert!(!Pattern::new(pattern).matches(value), "{pattern} {value}");
        }
    }

    /// The definition, followed to the letter.
    fn slow(pattern: &[u8], value: &[u8]) -> bool {
        match pattern.split_first() {
            None => value.is_empty(),
            Some((b'*', rest)) => (0..=value.len()).any(|at| slow(rest, &value[at..])),
            Some((byte, rest)) => value.split_first().is_some_and(|(v, tail)| v == byte && slow(rest, tail)),
        }
    }

    #[test]
    fn patterns_that_begin_or_end_otherwise_do_not_meet() {
        let meet = |(a, b): (&str, &str)| Pattern::new(a).may_meet(&Pattern::new(b));
        assert!([("*", "a"), ("a*", "*b"), ("ab*", "a*c"), ("a*", "abc"), ("a", "a")].into_iter().all(meet));
        assert!(
            ![("a", "b"), ("a*", "b*"), ("*a", "*b"), ("a*", "ba"), ("ab*", "ac*")].into_iter().any(meet)
        );
    }

    proptest! {
        #[test]
        fn patterns_of_one_value_meet(a in "[ab*]{0,5}", b in "[ab*]{0,5}", value in "[ab]{0,6}") {
            let (a, b) = (Pattern::new(a), Pattern::new(b));
            if a.matches(&value) && b.matches(&value) {
                prop_assert!(a.may_meet(&b) && b.may_meet(&a));
            }
        }

        #[test]
        fn matching_follows_the_definition(pattern in "[ab*]{0,7}", value in "[ab]{0,8}") {
            let expected = slow(pattern.as_bytes(), value.as_bytes());
            prop_assert_eq!(Pattern::new(pattern.clone()).matches(&value), expected);
            prop_assert_eq!(describes(pattern.as_bytes(), value.as_bytes()), expected);
        }
    }
}
