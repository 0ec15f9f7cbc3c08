//! Texts that values may begin or end with: all of them that one value begins with, by one search.

use arrayvec::ArrayVec;

use super::small;
use crate::dimensions::VALUE_BYTES_MAX;
use crate::overrides::NAMESPACE_TEXT_CHARS_MAX;

/// The most bytes of a value: a dimension, or an identifier of characters with four bytes each.
const TEXT_BYTES_MAX: usize = 4 * NAMESPACE_TEXT_CHARS_MAX;
const _: () = assert!(VALUE_BYTES_MAX <= TEXT_BYTES_MAX, "both kinds of values fit");

/// Texts, each with the numbers of those that are found by it.
#[derive(Debug, Default)]
pub(crate) struct Literals {
    /// The texts, concatenated in byte order: every text comes after its prefixes.
    bytes: Box<[u8]>,
    texts: Box<[Text]>,
    numbers: Box<[u32]>,
}

#[derive(Clone, Copy, Debug)]
struct Text {
    /// Where it begins and ends.
    bytes: (usize, usize),
    /// Where its numbers begin and end.
    numbers: (u32, u32),
    /// The longest other one that it begins with.
    parent: Option<u32>,
}

impl Literals {
    /// Texts to begin with.
    pub(crate) fn beginnings(entries: Vec<(&str, u32)>) -> Self {
        Self::new(entries.into_iter().map(|(text, number)| (text.bytes().collect(), number)).collect())
    }

    /// Texts to end with: beginnings, read from the right.
    pub(crate) fn ends(entries: Vec<(&str, u32)>) -> Self {
        Self::new(entries.into_iter().map(|(text, number)| (text.bytes().rev().collect(), number)).collect())
    }

    fn new(mut entries: Vec<(Box<[u8]>, u32)>) -> Self {
        entries.sort_unstable();
        let (mut bytes, mut texts, mut numbers): (Vec<u8>, Vec<Text>, Vec<u32>) = Default::default();
        let mut open: Vec<u32> = Vec::new();
        for same in entries.chunk_by(|(a, _), (b, _)| a == b) {
            let (text, _) = &same[0];
            let is_part = |at: &u32| text.starts_with(&bytes[texts[*at as usize].range()]);
            while open.last().is_some_and(|last| !is_part(last)) {
                open.pop();
            }
            let parent = open.last().copied();
            open.push(small(texts.len()));
            let starts = (bytes.len(), small(numbers.len()));
            bytes.extend_from_slice(text);
            numbers.extend(same.iter().map(|(_, number)| *number));
            texts.push(Text {
                bytes: (starts.0, bytes.len()),
                numbers: (starts.1, small(numbers.len())),
                parent,
            });
        }
        Self { bytes: bytes.into(), texts: texts.into(), numbers: numbers.into() }
    }

    /// How many texts do not come after `value`.
    fn up_to(&self, value: &[u8]) -> usize {
        let (mut from, mut to) = (0, self.texts.len());
        while from < to {
            let middle = usize::midpoint(from, to);
            if &self.bytes[self.texts[middle].range()] <= value {
                from = middle + 1;
            } else {
                to = middle;
            }
        }
        from
    }

    /// The most numbers that one value finds, and the longest text that it finds them by.
    pub(crate) fn most(&self) -> (usize, &[u8]) {
        let mut found: Vec<usize> = Vec::with_capacity(self.texts.len());
        for text in &self.texts {
            // The prefixes of a text come before it, and a value that finds the text finds them
            // too.
            let shorter = text.parent.and_then(|parent| found.get(parent as usize)).copied();
            let own = text.numbers.1.saturating_sub(text.numbers.0) as usize;
            found.push(shorter.unwrap_or(0) + own);
        }
        let most = found.into_iter().zip(&self.texts).max_by_key(|(found, _)| *found);
        most.map_or((0, &[]), |(found, text)| (found, &self.bytes[text.range()]))
    }

    /// Calls `tell` with the numbers of all texts that `value` begins with.
    pub(crate) fn each_beginning(&self, value: &str, tell: impl FnMut(u32)) {
        self.each(value.as_bytes(), tell);
    }

    /// Calls `tell` with the numbers of all texts that `value` ends with.
    pub(crate) fn each_end(&self, value: &str, tell: impl FnMut(u32)) {
        if !self.texts.is_empty() {
            let reversed: ArrayVec<u8, TEXT_BYTES_MAX> = value.bytes().rev().take(TEXT_BYTES_MAX).collect();
            self.each(&reversed, tell);
        }
    }

    /// Searches once and then follows parents. The last text not after `value` begins with every
    /// text that is a prefix of `value`: in byte order, all texts between a prefix and `value` have
    /// that prefix too.
    fn each(&self, value: &[u8], mut tell: impl FnMut(u32)) {
        let mut next = self.up_to(value).checked_sub(1);
        while let Some(at) = next {
            let text = &self.texts[at];
            if value.starts_with(&self.bytes[text.range()]) {
                let (start, end) = text.numbers;
                self.numbers[start as usize..end as usize].iter().for_each(|number| tell(*number));
            }
            next = text.parent.map(|parent| parent as usize);
        }
    }
}

impl Text {
    fn range(&self) -> std::ops::Range<usize> {
        self.bytes.0..self.bytes.1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// A search finds every text that a value begins or ends with, and no other.
        #[test]
        fn search_matches_a_scan(
            texts in prop::collection::vec("[ab]{0,4}", 0..12),
            value in "[ab]{0,6}",
        ) {
            let entries = || texts.iter().zip(0..).map(|(text, number)| (text.as_str(), number)).collect();
            let scan = |is_it: &dyn Fn(&str) -> bool| -> Vec<u32> {
                texts.iter().zip(0..).filter(|(text, _)| is_it(text)).map(|(_, number)| number).collect()
            };
            let mut found = Vec::new();
            Literals::beginnings(entries()).each_beginning(&value, |number| found.push(number));
            found.sort_unstable();
            prop_assert_eq!(found, scan(&|text| value.starts_with(text)));
            let mut found = Vec::new();
            Literals::ends(entries()).each_end(&value, |number| found.push(number));
            found.sort_unstable();
            prop_assert_eq!(found, scan(&|text| value.ends_with(text)));
        }
    }
}
