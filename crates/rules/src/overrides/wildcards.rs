//! The overrides with a `*` of one target, in the order in which they apply.
//!
//! A lookup finds its candidates by the longest text that their keys begin or end with. A candidate
//! costs two comparisons. The text between two stars would cost a search through the value for each
//! candidate, so one pass of an Aho-Corasick automaton finds the texts of all candidates at once.
//! [`MIDDLE_BYTES_MAX`] bounds how many of them end at one byte of a value.

use std::cmp::Reverse;
use std::collections::HashMap;

use aho_corasick::{AhoCorasick, AhoCorasickKind, MatchKind};
use foldhash::quality::RandomState;

use super::index::OverrideClash;
use super::index::OverrideConflict;
use crate::index::{Literals, small};
use crate::pattern::{Pattern, describes, strip_ends};
use crate::rule::KEY_PARTS_MAX;

/// The most `*` of an identifier, or of one part of a key. Higher: each candidate of a lookup has
/// more texts to look up.
pub const STARS_MAX: usize = 4;

/// The most bytes between two `*`. Higher: a lookup notes more texts, at most so many for each byte
/// of a value.
pub const MIDDLE_BYTES_MAX: usize = 64;

/// Maximum overrides with a `*` for one rule, or for one namespace of a tenant. A request without
/// an exact override examines those with a prefix or suffix of its key: at worst all of them.
pub const WILDCARDS_PER_TARGET_MAX: usize = 1_000;

/// Maximum overrides of one rule, or of one namespace of a tenant, without a literal prefix or
/// suffix, such as `*x*`. A request examines each of them.
pub const LOOSE_WILDCARDS_MAX: usize = 64;

/// Overrides with text between stars for which no automaton is built. Higher: less memory for
/// targets with few of them; more searches through a value.
const WITHOUT_AUTOMATON_MAX: usize = 32;

/// The order of wildcards of equal priority with equally many literal bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) enum WildcardTies {
    /// By their names.
    #[default]
    ByName,
    /// By the text of their keys.
    ByKey,
}

/// Checks the number of `*` in a pattern, and the text between them.
pub fn check_stars(pattern: &str) -> Result<(), String> {
    let stars = pattern.matches('*').count();
    if stars > STARS_MAX {
        return Err(format!("{stars} of `*` is outside 0 to {STARS_MAX}"));
    }
    match middles(pattern).map(str::len).max() {
        Some(bytes) if bytes > MIDDLE_BYTES_MAX => {
            Err(format!("{bytes} bytes between two `*` is outside 0 to {MIDDLE_BYTES_MAX}"))
        }
        _ => Ok(()),
    }
}

/// The texts between two stars.
fn middles(pattern: &str) -> impl Iterator<Item = &str> {
    let between = match (pattern.find('*'), pattern.rfind('*')) {
        (Some(first), Some(last)) => pattern.get(first + 1..last),
        _ => None,
    };
    between.unwrap_or_default().split('*').filter(|text| !text.is_empty())
}

/// How much the patterns of a key spell out, in bytes.
pub(crate) fn literal_bytes(key: &[Pattern]) -> usize {
    key.iter().map(Pattern::literal_bytes).sum()
}

/// An override with a `*`, until it has its place among others.
#[derive(Debug)]
pub(super) struct Wildcard {
    pub(super) row: u32,
    pub(super) tenant: u32,
    pub(super) name: String,
    pub(super) priority: i32,
    pub(super) key: Vec<Pattern>,
}

/// The overrides with a `*` of one target.
#[derive(Debug)]
pub(super) struct Wildcards {
    /// Where their rows begin, in the order in which they apply.
    ranked: Box<[u32]>,
    by_part: Box<[PartIndex]>,
    loose: Box<[u32]>,
}

/// One part of the keys of a target.
#[derive(Debug, Default)]
struct PartIndex {
    /// The wildcards of which this part spells out most, by the text that it begins with.
    beginnings: Literals,
    /// The same, by the text that it ends with.
    ends: Literals,
    /// `None` if few wildcards have text between stars.
    middles: Option<MiddleTexts>,
}

/// The texts between stars of one part, of all wildcards of a target.
#[derive(Debug)]
struct MiddleTexts {
    automaton: AhoCorasick,
    /// The texts of each wildcard in turn, by their numbers in the automaton, and their bytes.
    sequences: Box<[(u32, usize)]>,
    /// Where the sequence of each wildcard begins, and the end of the last one.
    starts: Box<[u32]>,
}

/// Where the texts of an automaton begin in a value.
#[derive(Debug)]
struct Occurrences {
    /// In the order of the texts, then of the value.
    starts: Vec<u32>,
    /// The first place of each text in `starts`, and the end of the last one.
    texts: Vec<u32>,
}

impl Wildcards {
    /// Puts the wildcards of one target in order: by priority, then by how much they spell out,
    /// then by `ties`. Adds those that cannot be to `clashes`.
    pub(super) fn new(
        mut wildcards: Vec<Wildcard>,
        ties: WildcardTies,
        clashes: &mut Vec<OverrideClash>,
    ) -> Self {
        wildcards.sort_by(|a, b| {
            let rank = |of: &Wildcard| (Reverse(of.priority), Reverse(literal_bytes(&of.key)));
            rank(a).cmp(&rank(b)).then_with(|| match ties {
                WildcardTies::ByName => a.name.cmp(&b.name),
                WildcardTies::ByKey => {
                    a.key.iter().map(Pattern::as_str).cmp(b.key.iter().map(Pattern::as_str))
                }
            })
        });
        let parts = wildcards.first().map_or(0, |wildcard| wildcard.key.len());
        let mut texts: Vec<(Vec<_>, Vec<_>)> = vec![(Vec::new(), Vec::new()); parts];
        let mut loose = Vec::new();
        for (wildcard, at) in wildcards.iter().zip(0..) {
            match anchor(&wildcard.key) {
                None => loose.push(at),
                Some((part, Side::Beginning, text)) => texts[part].0.push((text, at)),
                Some((part, Side::End, text)) => texts[part].1.push((text, at)),
            }
        }
        clashes.extend(identical(&wildcards));
        if let Some(at) = loose.get(LOOSE_WILDCARDS_MAX) {
            let row = wildcards[*at as usize].row;
            clashes.push((row, |_| OverrideConflict::LooseOfTarget, row));
        }
        let part_index = |(part, (beginnings, ends))| PartIndex {
            beginnings: Literals::beginnings(beginnings),
            ends: Literals::ends(ends),
            middles: MiddleTexts::new(&wildcards, part),
        };
        let by_part = texts.into_iter().enumerate().map(part_index).collect();
        let ranked = wildcards.iter().map(|wildcard| wildcard.row).collect();
        Self { ranked, by_part, loose: loose.into() }
    }

    /// Returns the first wildcard, in order, that applies to a key. `read` returns the row that
    /// begins at a place, if it is in force for the request, and the patterns of its key.
    pub(super) fn first<'r, T, P>(&self, key: &[&str], read: impl Fn(u32) -> Option<(T, P)>) -> Option<T>
    where
        P: Iterator<Item = &'r [u8]>,
    {
        let (mut first, mut found) = (self.ranked.len(), None);
        let mut occurrences = [const { None }; KEY_PARTS_MAX];
        let mut look = |at: u32| {
            let at = at as usize;
            if at < first
                && let Some((row, patterns)) = read(self.ranked[at])
                && self.applies(at, patterns, key, &mut occurrences)
            {
                (first, found) = (at, Some(row));
            }
        };
        self.loose.iter().for_each(|at| look(*at));
        for (part, value) in self.by_part.iter().zip(key) {
            part.beginnings.each_beginning(value, &mut look);
            part.ends.each_end(value, &mut look);
        }
        found
    }

    /// Whether the patterns of a wildcard match a key. Searches a value the first time that the
    /// text between stars decides.
    fn applies<'r>(
        &self,
        at: usize,
        mut patterns: impl Iterator<Item = &'r [u8]>,
        key: &[&str],
        occurrences: &mut [Option<Occurrences>; KEY_PARTS_MAX],
    ) -> bool {
        let mut parts = self.by_part.iter().zip(key).zip(occurrences);
        parts.all(|((part, value), occurrences)| {
            let (Some(pattern), value) = (patterns.next(), value.as_bytes()) else { return false };
            match &part.middles {
                None => describes(pattern, value),
                Some(middles) => middles.describes(at, pattern, value, occurrences),
            }
        })
    }
}

impl MiddleTexts {
    fn new<'w>(wildcards: &'w [Wildcard], part: usize) -> Option<Self> {
        let of_part = |wildcard: &'w Wildcard| wildcard.key.get(part).map_or("", Pattern::as_str);
        let patterns = || wildcards.iter().map(of_part);
        if patterns().filter(|pattern| middles(pattern).next().is_some()).count() <= WITHOUT_AUTOMATON_MAX {
            return None;
        }
        let mut numbers: HashMap<&str, u32, RandomState> = HashMap::default();
        let (mut texts, mut sequences, mut starts) = (Vec::new(), Vec::new(), vec![0]);
        for pattern in patterns() {
            for text in middles(pattern) {
                let number = *numbers.entry(text).or_insert_with(|| {
                    texts.push(text);
                    small(texts.len() - 1)
                });
                sequences.push((number, text.len()));
            }
            starts.push(small(sequences.len()));
        }
        let mut builder = AhoCorasick::builder();
        builder.match_kind(MatchKind::Standard).kind(Some(AhoCorasickKind::ContiguousNFA)).prefilter(false);
        // An automaton of so few short texts always fits. If not, each candidate is searched for.
        let automaton = builder.build(texts).ok()?;
        Some(Self { automaton, sequences: sequences.into(), starts: starts.into() })
    }

    /// Whether the pattern of a wildcard matches a value.
    fn describes(
        &self,
        at: usize,
        pattern: &[u8],
        value: &[u8],
        occurrences: &mut Option<Occurrences>,
    ) -> bool {
        if !pattern.contains(&b'*') {
            return pattern == value;
        }
        let Some((_, rest)) = strip_ends(pattern, value) else { return false };
        let sequence = &self.sequences[self.starts[at] as usize..self.starts[at + 1] as usize];
        if sequence.is_empty() {
            return true;
        }
        let occurrences = occurrences.get_or_insert_with(|| Occurrences::new(&self.automaton, value));
        // Each text at its first place behind the one before: if any way matches, this one does.
        let behind = sequence
            .iter()
            .try_fold(rest.start, |from, (text, bytes)| Some(occurrences.first_from(*text, from)? + bytes));
        behind.is_some_and(|behind| behind <= rest.end)
    }
}

impl Occurrences {
    /// Finds the texts of an automaton in a value.
    fn new(automaton: &AhoCorasick, value: &[u8]) -> Self {
        let mut texts = vec![0; automaton.patterns_len() + 1];
        let mut found: Vec<(u32, u32)> = Vec::new();
        for occurrence in automaton.find_overlapping_iter(value) {
            let text = occurrence.pattern().as_u32();
            texts[text as usize + 1] += 1;
            found.push((text, small(occurrence.start())));
        }
        for at in 1..texts.len() {
            texts[at] += texts[at - 1];
        }
        let (mut next, mut starts) = (texts.clone(), vec![0; found.len()]);
        for (text, start) in found {
            let place = &mut next[text as usize];
            starts[*place as usize] = start;
            *place += 1;
        }
        Self { starts, texts }
    }

    /// Where a text begins for the first time at `from` or behind.
    fn first_from(&self, text: u32, from: usize) -> Option<usize> {
        let text = text as usize;
        let starts = &self.starts[self.texts[text] as usize..self.texts[text + 1] as usize];
        let at = starts.partition_point(|start| (*start as usize) < from);
        starts.get(at).map(|start| *start as usize)
    }
}

/// Those for the same tenant and key.
fn identical(wildcards: &[Wildcard]) -> Vec<OverrideClash> {
    let mut seen = HashMap::new();
    let mut clashes: Vec<OverrideClash> = Vec::new();
    for Wildcard { row, tenant, key, .. } in wildcards {
        if let Some(known) = seen.insert((*tenant, key), *row) {
            clashes.push((*row, OverrideConflict::Identical, known));
        }
    }
    clashes
}

#[derive(Clone, Copy)]
enum Side {
    Beginning,
    End,
}

/// The longest text that a key must begin or end with in one of its parts.
fn anchor(key: &[Pattern]) -> Option<(usize, Side, &str)> {
    let texts = key.iter().enumerate().flat_map(|(part, pattern)| {
        [(part, Side::Beginning, pattern.beginning()), (part, Side::End, pattern.end())]
    });
    texts.filter(|(.., text)| !text.is_empty()).max_by_key(|(.., text)| text.len())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn stars_and_the_text_between_them_have_a_maximum() {
        for fits in ["", "a", "*a*b*c*", &format!("{0}*{0}*{0}", "a".repeat(64))] {
            assert_eq!(check_stars(fits), Ok(()), "{fits}");
        }
        assert_eq!(check_stars("*****"), Err("5 of `*` is outside 0 to 4".to_owned()));
        let long = format!("x*{}*y", "a".repeat(65));
        assert_eq!(check_stars(&long), Err("65 bytes between two `*` is outside 0 to 64".to_owned()));
    }

    /// The wildcards of a target with these keys. Their row is their place among the keys.
    fn wildcards(keys: &[Vec<String>]) -> Wildcards {
        let wildcard = |(key, row): (&Vec<String>, u32)| Wildcard {
            row,
            tenant: 0,
            name: row.to_string(),
            priority: 0,
            key: key.iter().map(|part| Pattern::new(part.as_str())).collect(),
        };
        let wildcards = keys.iter().zip(0..).map(wildcard).collect();
        Wildcards::new(wildcards, WildcardTies::ByKey, &mut Vec::new())
    }

    /// The row that the definition selects: of those that match every part, the one with the most
    /// literal bytes, then the first in the order of the text.
    fn defined(keys: &[Vec<String>], asked: &[&str]) -> Option<u32> {
        let patterns = |key: &Vec<String>| -> Vec<Pattern> {
            key.iter().map(|part| Pattern::new(part.as_str())).collect()
        };
        let matching = keys.iter().zip(0..).filter(|(key, _)| {
            patterns(key).iter().zip(asked).all(|(pattern, value)| pattern.matches(value))
        });
        matching.min_by_key(|(key, _)| (Reverse(literal_bytes(&patterns(key))), *key)).map(|(_, row)| row)
    }

    fn found(wildcards: &Wildcards, keys: &[Vec<String>], asked: &[&str]) -> Option<u32> {
        wildcards.first(asked, |row| {
            let key = keys.get(row as usize)?;
            Some((row, key.iter().map(String::as_bytes)))
        })
    }

    proptest! {
        /// With and without an automaton, the wildcard that applies is the one that the definition
        /// selects.
        #[test]
        fn the_first_wildcard_is_the_one_of_the_definition(
            keys in prop::collection::btree_set(
                ("[ab]{0,1}[abé*]{1,7}", "[ab*]{1,4}").prop_map(|(one, two)| vec![one, two]), 0..120),
            asked in prop::collection::vec(("[abé]{0,9}", "[ab]{0,4}"), 12),
        ) {
            let keys: Vec<Vec<String>> = keys.into_iter().collect();
            let index = wildcards(&keys);
            for (one, two) in &asked {
                let asked = [one.as_str(), two.as_str()];
                prop_assert_eq!(found(&index, &keys, &asked), defined(&keys, &asked));
            }
        }
    }

    #[test]
    fn many_texts_between_stars_are_found_in_one_pass() {
        let keys: Vec<Vec<String>> = (0..1_000).map(|at| vec![format!("a*x{at:03}*y*z")]).collect();
        let index = wildcards(&keys);
        assert!(index.by_part[0].middles.is_some());
        for (value, row) in
            [("a-x017-y-z", Some(17)), ("ax999yz", Some(999)), ("ayx017z", None), ("az", None)]
        {
            assert_eq!(found(&index, &keys, &[value]), row, "{value}");
        }
        let few = wildcards(&keys[..WITHOUT_AUTOMATON_MAX]);
        assert!(few.by_part[0].middles.is_none());
    }

    #[test]
    fn a_long_suffix_finds_its_wildcard() {
        let keys = vec![vec![format!("*{}", "\u{1f980}".repeat(300))]];
        let value = format!("a{}", "\u{1f980}".repeat(300));
        assert_eq!(found(&wildcards(&keys), &keys, &[&value]), Some(0));
    }
}
