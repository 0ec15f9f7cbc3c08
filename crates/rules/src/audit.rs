//! The audit: a hash chain of all actions, each with actor, action and time.
//!
//! The hash of an entry covers its fields and the hash of its predecessor. To change, remove,
//! insert or move one entry, an attacker has to rewrite all later entries. The end of the chain is
//! also known in two other places: in the store's heads, and in a [`Checkpoint`] that an operator
//! keeps elsewhere.

use std::fmt;
use std::io::BufRead;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

pub use crate::alteration::{ALTERATIONS_NAMED_MAX, Alteration, AlterationWay, Alterations, StorePart};

/// First field of the hashed bytes. No other use of the hash can pass for an audit entry.
const DOMAIN: &[u8] = b"tidegate audit 1";

/// Predecessor hash of the first entry.
pub const BEGINNING: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// First word of a checkpoint line.
const CHECKPOINT_WORD: &str = "tidegate-audit";

/// One entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AuditEntry {
    /// From 1, without a gap.
    pub sequence: u64,
    /// When, in milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// Name of the actor.
    pub actor: String,
    /// Action, such as `change.apply`.
    pub action: String,
    /// Details: the text of a JSON object, byte for byte as hashed.
    pub detail: String,
    /// The hash of the entry before it.
    pub previous: String,
    /// The hash of all of the above.
    pub hash: String,
}

impl AuditEntry {
    /// The entry that follows the end of a chain.
    pub(crate) fn following(end: &Checkpoint, at_ms: u64, actor: &str, action: &str, detail: String) -> Self {
        let mut entry = Self {
            sequence: end.count + 1,
            at_ms,
            actor: actor.to_owned(),
            action: action.to_owned(),
            detail,
            previous: end.hash.clone(),
            hash: String::new(),
        };
        entry.hash = entry.computed_hash();
        entry
    }

    /// Computes the hash of the entry. Each field is hashed with its length, so no two entries hash
    /// the same bytes.
    fn computed_hash(&self) -> String {
        let mut hasher = Sha256::new();
        let (sequence, at_ms) = (self.sequence.to_be_bytes(), self.at_ms.to_be_bytes());
        let texts = [&self.actor, &self.action, &self.detail, &self.previous].map(String::as_bytes);
        for field in [DOMAIN, &sequence, &at_ms].into_iter().chain(texts) {
            hasher.update((field.len() as u64).to_be_bytes());
            hasher.update(field);
        }
        hexadecimal(&hasher.finalize())
    }

    /// One line of an export, without its end.
    pub fn to_line(&self) -> Result<String, serde_json::Error> {
        serde_json::to_string(self)
    }
}

/// The lower-case hexadecimal form of bytes.
pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .filter_map(|digit| char::from_digit(digit.into(), 16))
        .collect()
}

/// The end of a chain: the number of entries and the hash of the last. A checkpoint kept elsewhere
/// later shows whether the chain still begins with those entries, even if the store is not trusted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// How many entries there are.
    pub count: u64,
    /// The hash of the last one.
    pub hash: String,
}

impl Default for Checkpoint {
    fn default() -> Self {
        Self { count: 0, hash: BEGINNING.to_owned() }
    }
}

impl fmt::Display for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{CHECKPOINT_WORD} {} {}", self.count, self.hash)
    }
}

impl Checkpoint {
    /// The last line of an export that ends here, without its end.
    pub fn to_line(&self) -> Result<String, serde_json::Error> {
        serde_json::to_string(&LastLine { checkpoint: self.to_string() })
    }
}

/// A line that is no checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidCheckpoint;

impl fmt::Display for InvalidCheckpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "checkpoint: must be `{CHECKPOINT_WORD} COUNT HASH`, the hash of 64 hexadecimal digits")
    }
}

impl std::error::Error for InvalidCheckpoint {}

impl FromStr for Checkpoint {
    type Err = InvalidCheckpoint;

    fn from_str(line: &str) -> Result<Self, InvalidCheckpoint> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [CHECKPOINT_WORD, count, hash] = words[..] else { return Err(InvalidCheckpoint) };
        let count = count.parse().map_err(|_| InvalidCheckpoint)?;
        if !is_hash(hash) || (count == 0) != (hash == BEGINNING) {
            return Err(InvalidCheckpoint);
        }
        Ok(Self { count, hash: hash.to_owned() })
    }
}

/// Whether a text is a SHA-256 as it is written here.
pub(crate) fn is_hash(text: &str) -> bool {
    text.len() == BEGINNING.len() && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Where a chain is broken. Each names the entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChainBreak {
    /// An entry has an unexpected sequence number. The expected entry was removed or moved, or
    /// another entry was inserted before it.
    OutOfPlace {
        /// Which entry belongs there.
        expected: u64,
        /// Which one is there.
        found: u64,
    },
    /// An entry does not match its hash, or cannot be read.
    Changed {
        /// Which.
        sequence: u64,
    },
    /// An entry is sealed in itself, but does not follow the one before it: one of the two was
    /// replaced.
    Unlinked {
        /// Which.
        sequence: u64,
    },
    /// The chain ends before its known end.
    CutOff {
        /// The first entry that is missing.
        missing: u64,
        /// How many there must be.
        count: u64,
    },
    /// There are entries after the known end of the chain.
    Appended {
        /// The first of them.
        sequence: u64,
    },
    /// The chain holds together, but is not the one of the checkpoint: it was rewritten at this
    /// entry or before.
    Rewritten {
        /// The entry of the checkpoint.
        sequence: u64,
    },
}

impl fmt::Display for ChainBreak {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfPlace { expected, found } => {
                write!(f, "audit: entry {expected} is missing: entry {found} is in its place")
            }
            Self::Changed { sequence } => write!(f, "audit: entry {sequence} was changed"),
            Self::Unlinked { sequence } => {
                write!(
                    f,
                    "audit: entry {sequence} does not follow the one before it: one of them was replaced"
                )
            }
            Self::CutOff { missing, count } => {
                write!(
                    f,
                    "audit: entry {missing} is missing: there were {count} entries, and the last are cut off"
                )
            }
            Self::Appended { sequence } => {
                write!(f, "audit: entry {sequence} comes after the end: it was not written by a server")
            }
            Self::Rewritten { sequence } => {
                write!(
                    f,
                    "audit: entry {sequence} is not that of the checkpoint: the audit was rewritten there or \
                     before"
                )
            }
        }
    }
}

impl std::error::Error for ChainBreak {}

/// Follows a chain entry by entry, from its beginning.
#[derive(Clone, Debug, Default)]
pub struct Verifier {
    end: Checkpoint,
    checkpoint: Option<Checkpoint>,
}

impl Verifier {
    /// Creates a verifier that also checks whether the chain passes through a checkpoint kept
    /// elsewhere.
    pub fn new(checkpoint: Option<Checkpoint>) -> Self {
        Self { end: Checkpoint::default(), checkpoint }
    }

    /// Takes the next entry.
    pub fn take(&mut self, entry: &AuditEntry) -> Result<(), ChainBreak> {
        let expected = self.end.count + 1;
        if entry.sequence != expected {
            return Err(ChainBreak::OutOfPlace { expected, found: entry.sequence });
        }
        if entry.hash != entry.computed_hash() {
            return Err(ChainBreak::Changed { sequence: expected });
        }
        if entry.previous != self.end.hash {
            return Err(ChainBreak::Unlinked { sequence: expected });
        }
        self.end = Checkpoint { count: expected, hash: entry.hash.clone() };
        let kept = self.checkpoint.as_ref().filter(|checkpoint| checkpoint.count == expected);
        if kept.is_some_and(|checkpoint| checkpoint.hash != self.end.hash) {
            return Err(ChainBreak::Rewritten { sequence: expected });
        }
        Ok(())
    }

    /// Returns the break at an entry that cannot be read. `found` is its sequence number, if that
    /// is readable.
    pub(crate) fn damaged(&self, found: Option<u64>) -> ChainBreak {
        let expected = self.end.count + 1;
        match found {
            Some(found) if found != expected => ChainBreak::OutOfPlace { expected, found },
            _ => ChainBreak::Changed { sequence: expected },
        }
    }

    /// Ends the verification, and returns the end of the chain.
    pub fn finish(self) -> Result<Checkpoint, ChainBreak> {
        let count = self.checkpoint.map_or(0, |checkpoint| checkpoint.count);
        if self.end.count < count {
            return Err(ChainBreak::CutOff { missing: self.end.count + 1, count });
        }
        Ok(self.end)
    }

    /// Ends the verification of a chain with a known end: the chain must end exactly there.
    pub(crate) fn finish_at(self, head: &Checkpoint) -> Result<Checkpoint, ChainBreak> {
        let end = self.finish()?;
        if end.count < head.count {
            return Err(ChainBreak::CutOff { missing: end.count + 1, count: head.count });
        }
        if end.count > head.count {
            return Err(ChainBreak::Appended { sequence: head.count + 1 });
        }
        if end.hash != head.hash {
            return Err(ChainBreak::Rewritten { sequence: end.count });
        }
        Ok(end)
    }
}

/// Verifies a chain from its beginning, through an optional checkpoint, and returns its end.
pub fn verify<'a>(
    entries: impl IntoIterator<Item = &'a AuditEntry>,
    checkpoint: Option<&Checkpoint>,
) -> Result<Checkpoint, ChainBreak> {
    let mut verifier = Verifier::new(checkpoint.cloned());
    for entry in entries {
        verifier.take(entry)?;
    }
    verifier.finish()
}

/// Why an export does not hold.
#[derive(Debug)]
pub enum ExportError {
    /// It cannot be read.
    Read(std::io::Error),
    /// A line is no entry. There is one on each, so it has the number of the entry that belongs
    /// there.
    Line(u64, serde_json::Error),
    /// There is more after the line that ends it.
    Longer(u64),
    /// The export has no last line, and no checkpoint states its end.
    Endless {
        /// The first entry that may be missing.
        missing: u64,
    },
    /// The chain is broken.
    Broken(ChainBreak),
}

impl fmt::Display for ExportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Read(error) => write!(f, "audit: {error}"),
            Self::Line(line, error) => {
                write!(f, "audit: entry {line} was changed: line {line} is no entry: {error}")
            }
            Self::Longer(line) => write!(f, "audit: line {line} comes after the end of the export"),
            Self::Endless { missing } => write!(
                f,
                "audit: entry {missing} may be missing: the export has no last line with a checkpoint, so \
                 its end may be cut off; give the checkpoint where it has to end"
            ),
            Self::Broken(found) => found.fmt(f),
        }
    }
}

impl std::error::Error for ExportError {}

/// The last line of an export. It states the end, so that a truncated export is detected.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LastLine {
    checkpoint: String,
}

/// A line of an export.
enum Line {
    Entry(AuditEntry),
    Last(Checkpoint),
}

impl Line {
    /// In bytes: damage need not leave text.
    fn read(line: &[u8]) -> Result<Self, serde_json::Error> {
        // An entry has other fields: the first of them ends this.
        match serde_json::from_slice::<LastLine>(line) {
            Ok(last) => last.checkpoint.parse().map(Self::Last).map_err(serde::de::Error::custom),
            Err(_) => serde_json::from_slice(line).map(Self::Entry),
        }
    }
}

/// Verifies an exported chain, one entry per line, without its store. The export must end with its
/// last line, or at least reach a checkpoint kept elsewhere.
pub fn verify_lines(lines: impl BufRead, checkpoint: Option<&Checkpoint>) -> Result<Checkpoint, ExportError> {
    let mut verifier = Verifier::new(checkpoint.cloned());
    let mut last = None;
    for (number, line) in (1..).zip(lines.split(b'\n')) {
        let line = line.map_err(ExportError::Read)?;
        if last.is_some() {
            return Err(ExportError::Longer(number));
        }
        match Line::read(&line).map_err(|error| ExportError::Line(number, error))? {
            Line::Entry(entry) => verifier.take(&entry).map_err(ExportError::Broken)?,
            Line::Last(end) => last = Some(end),
        }
    }
    match last {
        Some(end) => verifier.finish_at(&end).map_err(ExportError::Broken),
        None if checkpoint.is_none() => Err(ExportError::Endless { missing: verifier.end.count + 1 }),
        None => verifier.finish().map_err(ExportError::Broken),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn chain(length: u64) -> Vec<AuditEntry> {
        let mut end = Checkpoint::default();
        let entry = |number| {
            let detail = format!(r#"{{"change":{number}}}"#);
            let entry = AuditEntry::following(&end, 1_000 + number, "ada", "change.apply", detail);
            end = Checkpoint { count: entry.sequence, hash: entry.hash.clone() };
            entry
        };
        (1..=length).map(entry).collect()
    }

    fn end_of(entries: &[AuditEntry]) -> Checkpoint {
        verify(entries, None).expect("whole")
    }

    #[test]
    fn the_hash_of_an_entry_never_changes() {
        // Another program computed this hash: later versions must still accept entries of today.
        let entry = AuditEntry::following(
            &Checkpoint::default(),
            1_700_000_000_000,
            "ada",
            "change.apply",
            "{}".to_owned(),
        );
        assert_eq!(entry.hash, "f2d7f7d9a541f0e9e403903f04aafa1f9df546bce40f3212ed81f757c373a432");
    }

    #[test]
    fn chain_verifies_and_its_checkpoint_round_trips() {
        let entries = chain(5);
        let end = end_of(&entries);
        assert_eq!(end.count, 5);
        assert_eq!(end.to_string().parse(), Ok(end.clone()));
        assert_eq!(verify(&entries, Some(&end)), Ok(end.clone()));
        let longer = chain(8);
        assert_eq!(verify(&longer, Some(&end)).map(|end| end.count), Ok(8));
        assert_eq!(verify(&[], None), Ok(Checkpoint::default()));
        assert_eq!(Checkpoint::default().to_string().parse(), Ok(Checkpoint::default()));
    }

    #[test]
    fn removed_entries_are_detected() {
        let end = end_of(&chain(5));
        for missing in 1..=4_u64 {
            let mut entries = chain(5);
            entries.retain(|entry| entry.sequence != missing);
            let found = ChainBreak::OutOfPlace { expected: missing, found: missing + 1 };
            assert_eq!(verify(&entries, None), Err(found));
        }
        assert_eq!(verify(&chain(3), Some(&end)), Err(ChainBreak::CutOff { missing: 4, count: 5 }));
        assert_eq!(verify(&[], Some(&end)), Err(ChainBreak::CutOff { missing: 1, count: 5 }));
    }

    #[test]
    fn moved_inserted_or_renumbered_entries_are_detected() {
        let mut entries = chain(5);
        entries.swap(1, 3);
        assert_eq!(verify(&entries, None), Err(ChainBreak::OutOfPlace { expected: 2, found: 4 }));
        let mut entries = chain(5);
        entries.insert(2, entries[0].clone());
        assert_eq!(verify(&entries, None), Err(ChainBreak::OutOfPlace { expected: 3, found: 1 }));
        let mut entries = chain(5);
        entries.remove(1);
        for (number, entry) in (1..).zip(&mut entries) {
            entry.sequence = number;
        }
        assert_eq!(verify(&entries, None), Err(ChainBreak::Changed { sequence: 2 }));
    }

    #[test]
    fn an_entry_that_was_sealed_anew_is_found_by_its_neighbour_or_the_checkpoint() {
        let end = end_of(&chain(5));
        let mut entries = chain(5);
        entries[1].actor = "eve".to_owned();
        entries[1].hash = entries[1].computed_hash();
        assert_eq!(verify(&entries, None), Err(ChainBreak::Unlinked { sequence: 3 }));
        for at in 2..5 {
            entries[at].previous = entries[at - 1].hash.clone();
            entries[at].hash = entries[at].computed_hash();
        }
        assert!(verify(&entries, None).is_ok(), "only a checkpoint detects the cut");
        assert_eq!(verify(&entries, Some(&end)), Err(ChainBreak::Rewritten { sequence: 5 }));
    }

    #[test]
    fn an_export_is_verified_without_its_store() {
        let entries = chain(4);
        let lines: Vec<String> = entries.iter().map(|entry| entry.to_line().expect("a line")).collect();
        let text = lines.join("\n") + "\n";
        let end = end_of(&entries);
        assert_eq!(verify_lines(text.as_bytes(), Some(&end)).expect("holds"), end);
        let error = verify_lines(text.as_bytes(), None).expect_err("the end is unknown");
        assert!(error.to_string().starts_with("audit: entry 5 may be missing: "), "{error}");
        let forged = text.replacen("ada", "eve", 1);
        let error = verify_lines(forged.as_bytes(), None).expect_err("forged");
        assert_eq!(error.to_string(), "audit: entry 1 was changed");
        let error = verify_lines(format!("{}\n{{}}", lines[0]).as_bytes(), None).expect_err("no entry");
        let expected_message = "audit: entry 2 was changed: line 2 is no entry: missing field";
        assert!(error.to_string().starts_with(expected_message), "{error}");
    }

    fn export(entries: &[AuditEntry]) -> String {
        let mut lines: Vec<String> = entries.iter().map(|entry| entry.to_line().expect("a line")).collect();
        lines.push(end_of(entries).to_line().expect("a line"));
        lines.join("\n") + "\n"
    }

    #[test]
    fn truncated_export_is_detected() {
        let entries = chain(4);
        let whole = export(&entries);
        assert_eq!(verify_lines(whole.as_bytes(), None).expect("holds"), end_of(&entries));
        let lines: Vec<&str> = whole.lines().collect();
        for left in 0..lines.len() {
            let error = verify_lines(lines[..left].join("\n").as_bytes(), None).expect_err("cut off");
            let expected_message = format!("audit: entry {} may be missing: ", left + 1);
            assert!(error.to_string().starts_with(&expected_message), "{error}");
        }
        let without_fourth = [&lines[..3], &lines[4..]].concat().join("\n");
        let error = verify_lines(without_fourth.as_bytes(), None).expect_err("cut out");
        assert!(error.to_string().starts_with("audit: entry 4 is missing: "), "{error}");
        let error = verify_lines((whole.clone() + lines[0]).as_bytes(), None).expect_err("longer");
        assert_eq!(error.to_string(), "audit: line 6 comes after the end of the export");
    }

    #[test]
    fn a_line_that_is_no_checkpoint_is_refused() {
        let hash = "ab".repeat(32);
        for line in ["", "tidegate-audit", "tidegate-audit 1", &format!("tidegate-audit x {hash}"), &hash] {
            assert_eq!(line.parse::<Checkpoint>(), Err(InvalidCheckpoint), "{line}");
        }
        for line in [format!("tidegate-audit 0 {hash}"), format!("tidegate-audit 1 {BEGINNING}")] {
            assert_eq!(line.parse::<Checkpoint>(), Err(InvalidCheckpoint), "{line}");
        }
    }

    proptest! {
        /// Any bit of any field, in any entry.
        #[test]
        fn a_flipped_bit_anywhere_is_found(
            at in 0_usize..6, field in 0_usize..7, byte in 0_usize..64, bit in 0_u32..7) {
            let mut entries = chain(6);
            let entry = &mut entries[at];
            let text = match field {
                0 => { entry.sequence ^= 1 << bit; None }
                1 => { entry.at_ms ^= 1 << bit; None }
                2 => Some(&mut entry.actor),
                3 => Some(&mut entry.action),
                4 => Some(&mut entry.detail),
                5 => Some(&mut entry.previous),
                _ => Some(&mut entry.hash),
            };
            if let Some(text) = text {
                let mut bytes = text.clone().into_bytes();
                let place = byte % bytes.len();
                bytes[place] ^= 1 << bit;
                *text = String::from_utf8(bytes).expect("seven bits");
            }
            let sequence = u64::try_from(at).expect("small") + 1;
            let found = verify(&entries, None).expect_err("flipped");
            let named = match found {
                ChainBreak::OutOfPlace { expected, .. } => expected,
                ChainBreak::Changed { sequence } => sequence,
                other => panic!("{other}"),
            };
            prop_assert_eq!(named, sequence);
        }

        /// Any bit of any byte of an export, also where that leaves no text, no JSON or no line.
        #[test]
        fn a_flipped_bit_anywhere_in_an_export_is_found(at in 0_usize..6, byte: prop::sample::Index, bit in 0_u32..8) {
            let text = export(&chain(6));
            let lines: Vec<&str> = text.split_inclusive('\n').collect();
            let before: usize = lines[..at].iter().map(|line| line.len()).sum();
            let mut bytes = text.clone().into_bytes();
            bytes[before + byte.index(lines[at].len())] ^= 1 << bit;
            let error = verify_lines(&*bytes, None).expect_err("flipped");
            let named = format!("audit: entry {} ", at + 1);
            prop_assert!(error.to_string().starts_with(&named), "{}", error);
        }

        #[test]
        fn a_flipped_bit_in_the_last_line_is_found(byte: prop::sample::Index, bit in 0_u32..8) {
            let text = export(&chain(6));
            let last = text.trim_end().rfind('\n').expect("several lines") + 1;
            let mut bytes = text.clone().into_bytes();
            bytes[last + byte.index(text.len() - last)] ^= 1 << bit;
            prop_assert!(verify_lines(&*bytes, None).is_err());
        }
    }
}
