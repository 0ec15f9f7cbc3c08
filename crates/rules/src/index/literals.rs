//! Texts that values may begin or end with: all of them that one value begins with, by one search.

use arrayvec::ArrayVec;

use super::small;
use crate::dimensions::VALUE_BYTES_MAX;

/// Texts, each with the numbers of those that are found by it.
#[derive(Debug, Default)]
pub(crate) struct Literals {
    /// In the order of their bytes: whatever begins with a text follows it.
    texts: Box<[Box<[u8]>]>,
    /// By text: the longest other one that it begins with.
    parents: Box<[Option<u32>]>,
    /// By text: where its numbers begin; one more than there are texts.
    starts: Box<[u32]>,
    numbers: Box<[u32]>,
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
        let (mut texts, mut starts, mut numbers) = (Vec::new(), Vec::new(), Vec::new());
        for (text, number) in entries {
            if texts.last() != Some(&text) {
                starts.push(small(numbers.len()));
                texts.push(text);
            }
            numbers.push(number);
        }
        starts.push(small(numbers.len()));
        let parents = parents(&texts);
        Self { texts: texts.into(), parents: parents.into(), starts: starts.into(), numbers: numbers.into() }
    }

    /// Tells the numbers of all beginnings that `value` has.
    pub(crate) fn each_beginning(&self, value: &str, tell: impl FnMut(u32)) {
        self.each(value.as_bytes(), tell);
    }

    /// Tells the numbers of all ends that `value` has.
    pub(crate) fn each_end(&self, value: &str, tell: impl FnMut(u32)) {
        if !self.texts.is_empty() {
            let reversed: ArrayVec<u8, VALUE_BYTES_MAX> = value.bytes().rev().take(VALUE_BYTES_MAX).collect();
            self.each(&reversed, tell);
        }
    }

    /// The last text that does not come after `value` begins with every text that `value` begins with: what lies between a
    /// text and something that begins with it begins with it too.
    fn each(&self, value: &[u8], mut tell: impl FnMut(u32)) {
        let mut next = self.texts.partition_point(|text| **text <= *value).checked_sub(1);
        while let Some(at) = next {
            if value.starts_with(&self.texts[at]) {
                for number in &self.numbers[self.starts[at] as usize..self.starts[at + 1] as usize] {
                    tell(*number);
                }
            }
            next = self.parents[at].map(|parent| parent as usize);
        }
    }
}

fn parents(texts: &[Box<[u8]>]) -> Vec<Option<u32>> {
    let mut open: Vec<usize> = Vec::new();
    let mut parents = Vec::with_capacity(texts.len());
    for (at, text) in texts.iter().enumerate() {
        while open.last().is_some_and(|last| !text.starts_with(&texts[*last])) {
            open.pop();
        }
        parents.push(open.last().map(|last| small(*last)));
        open.push(at);
    }
    parents
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Every text that a value begins or ends with is found, and nothing else.
        #[test]
        fn a_search_finds_what_a_scan_finds(
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
