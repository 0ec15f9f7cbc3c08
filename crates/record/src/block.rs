//! Blocks: records that are stored together as one row.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::entry::{KEY_BYTES_MAX, RecordContext, RecordKind, cut};
use crate::layout::{DecisionFrame, StoredDecision, are_whole, put_again, put_setting};

/// Size from which on the next block begins, bytes. Higher: fewer rows, better compressed; more to
/// unpack for one record.
const BLOCK_BYTES: usize = 512 << 10;

/// Slots of the filter of repeated terms. A term that occurs in every record is then not collected
/// and sorted each time.
const TERMS_KNOWN: usize = 1 << 10;

/// The most that a block unpacks to: one record beyond its size.
const RAW_BYTES_MAX: usize = 2 * BLOCK_BYTES;

/// A block of this many records is not written again with more. Higher: fewer rows where little is
/// denied; more is written again with each flush.
const OPEN_RECORDS_MAX: u64 = 500;

/// Nor one that spans this much time.
const OPEN_MS_MAX: u64 = 60_000;

/// Records that are written together.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) from_ms: u64,
    pub(crate) to_ms: u64,
    /// By kind.
    pub(crate) counts: [u64; RecordKind::ALL.len()],
    settings: u32,
    terms: Vec<u32>,
    /// Recently collected terms, each in its slot.
    known: Box<[u32]>,
    raw: Vec<u8>,
}

impl Default for Block {
    fn default() -> Self {
        Self {
            from_ms: 0,
            to_ms: 0,
            counts: Default::default(),
            settings: 0,
            terms: Vec::new(),
            known: vec![0; TERMS_KNOWN].into(),
            raw: Vec::new(),
        }
    }
}

impl Block {
    /// Adds the fields that records share, as a setting, and returns its number.
    pub(crate) fn define(&mut self, setting: &RecordContext<'_>) -> u32 {
        put_setting(&mut self.raw, setting);
        self.settings += 1;
        self.settings - 1
    }

    /// Adds a decision of a setting that was defined, and of the tenant with these terms.
    pub(crate) fn push(
        &mut self,
        setting: u32,
        terms: SearchTerms,
        decision: &DecisionFrame<'_>,
        frame: &[u8],
    ) {
        let is_first = self.records() == 0;
        self.from_ms = if is_first { decision.at_ms } else { self.from_ms.min(decision.at_ms) };
        self.to_ms = self.to_ms.max(decision.at_ms);
        self.counts[decision.verdict.kind() as usize] += 1;
        self.note(terms.of(decision.key));
        for (_, text) in decision.dimensions.iter() {
            self.note(terms.of(as_key(text)));
        }
        put_again(&mut self.raw, frame, setting);
    }

    /// Collects a search term. It is collected again only if another term of the same slot came in
    /// between.
    fn note(&mut self, term: u32) {
        let known = &mut self.known[term as usize % TERMS_KNOWN];
        // The term 0 is always collected: it equals an empty slot.
        if *known != term || term == 0 {
            *known = term;
            self.terms.push(term);
        }
    }

    /// Whether the block takes no more records.
    pub(crate) fn is_full(&self) -> bool {
        self.raw.len() >= BLOCK_BYTES
    }

    /// Whether it may be written again later, with more in it.
    pub(crate) fn stays_open(&self) -> bool {
        self.records() < OPEN_RECORDS_MAX && self.to_ms - self.from_ms < OPEN_MS_MAX
    }

    pub(crate) fn records(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns the search terms of its records: hashes in ascending order, four bytes each.
    pub(crate) fn packed_terms(&mut self) -> Vec<u8> {
        self.terms.sort_unstable();
        self.terms.dedup();
        self.terms.iter().flat_map(|term| term.to_le_bytes()).collect()
    }

    /// Its records, compressed.
    pub(crate) fn packed_records(&self) -> Vec<u8> {
        lz4_flex::block::compress_prepend_size(&self.raw)
    }
}

/// The search terms of a tenant's records: their keys and each dimension of their requests.
/// `user:42` is then found whichever limit decided.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SearchTerms {
    /// Hash of the tenant.
    seed: u64,
}

impl SearchTerms {
    pub(crate) fn new(tenant: &str) -> Self {
        Self { seed: xxh3_64_with_seed(tenant.as_bytes(), 0) }
    }

    /// Returns the hash of a key, or of a dimension as a [`RecordKey`](crate::RecordKey) writes it.
    /// A collision costs one read of a block without a match.
    pub(crate) fn of(self, text: &[u8]) -> u32 {
        let [a, b, c, d, ..] = xxh3_64_with_seed(text, self.seed).to_le_bytes();
        u32::from_le_bytes([a, b, c, d])
    }
}

/// Cuts a dimension to the length that a [`RecordKey`](crate::RecordKey) keeps.
fn as_key(text: &[u8]) -> &[u8] {
    if text.len() <= KEY_BYTES_MAX {
        return text;
    }
    str::from_utf8(text).map_or(text, |text| cut(text, KEY_BYTES_MAX).as_bytes())
}

/// Whether a record is about `key`: the one that was counted, or one of its dimensions.
pub(crate) fn is_about(written: &StoredDecision<'_>, tenant: &str, key: &str) -> bool {
    let mut dimensions = written.dimensions.iter();
    written.entry.tenant == tenant
        && (written.entry.key == key || dimensions.any(|(_, text)| as_key(text) == key.as_bytes()))
}

/// Whether one of the hashes that [`Block::packed_terms`] gave is `term`.
pub(crate) fn has_term(packed: &[u8], term: u32) -> bool {
    let (terms, _) = packed.as_chunks::<4>();
    terms.binary_search_by_key(&term, |bytes| u32::from_le_bytes(*bytes)).is_ok()
}

/// Decompresses the output of [`Block::packed_records`]; `None` if it is damaged.
pub(crate) fn unpack(packed: &[u8]) -> Option<Vec<u8>> {
    let (length, packed) = lz4_flex::block::uncompressed_size(packed).ok()?;
    if length > RAW_BYTES_MAX {
        return None;
    }
    let raw = lz4_flex::block::decompress(packed, length).ok()?;
    // Half a record at the end would be silently left out.
    are_whole(&raw).then_some(raw)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::tests::denied;
    use crate::layout::tests::encoded;
    use crate::layout::{Frame, frames, records};

    fn block(keys: &[&str]) -> Block {
        let mut block = Block::default();
        for (at, key) in keys.iter().enumerate() {
            let bytes = encoded(&denied(key, 1_000 + at as u64), [("user", *key), ("path", "/x")]);
            let mut number = 0;
            for frame in frames(&bytes) {
                match frame {
                    Frame::Setting(setting) => number = block.define(&setting),
                    Frame::Decision(_, decision, frame) => {
                        block.push(number, SearchTerms::new("t"), &decision, frame);
                    }
                }
            }
        }
        block
    }

    #[test]
    fn records_are_found_by_their_terms() {
        let mut block = block(&["k1", "k5", "k9", "k1"]);
        let packed = block.packed_terms();
        assert_eq!(packed.len(), 4 * 7, "three keys, three users, one path");
        let (own, other) = (SearchTerms::new("t"), SearchTerms::new(""));
        for key in ["k1", "k5", "k9", "user:k1", "path:/x"] {
            assert!(has_term(&packed, own.of(key.as_bytes())), "{key}");
        }
        assert!(!has_term(&packed, own.of(b"k2")) && !has_term(&packed, other.of(b"k1")));
        let raw = unpack(&block.packed_records()).expect("unpacks");
        let about = |key| records(&raw).filter(|written| is_about(written, "t", key)).count();
        assert_eq!((about("k1"), about("user:k1"), about("path:/x"), about("k")), (2, 2, 4, 0));
        assert_eq!((block.from_ms, block.to_ms, block.records()), (1_000, 1_003, 4));
    }

    #[test]
    fn every_term_is_there_however_many_share_a_place() {
        let mut block = Block::default();
        let known = u32::try_from(TERMS_KNOWN).expect("a few");
        let all: Vec<u32> = (0..8 * known).map(|at| at * known / 2).collect();
        for _ in 0..2 {
            for term in &all {
                block.note(*term);
            }
        }
        let packed = block.packed_terms();
        assert!(all.iter().all(|term| has_term(&packed, *term)));
        assert_eq!(packed.len(), 4 * all.len(), "each once");
    }

    #[test]
    fn long_dimensions_are_found_by_their_truncated_key() {
        for (name, value) in
            [("user", "é".repeat(400)), (&"n".repeat(255), "v".repeat(9)), (&"n".repeat(300), "v".to_owned())]
        {
            let mut key = crate::RecordKey::default();
            key.add(name, &value);
            let bytes = encoded(&denied("k", 1), [(name, value.as_str())]);
            let written = records(&bytes).next().expect("a record");
            assert!(is_about(&written, "t", key.as_str()));
            let mut dimensions = written.dimensions.iter();
            let terms = SearchTerms::new("t");
            assert!(dimensions.any(|(_, text)| terms.of(as_key(text)) == terms.of(key.as_str().as_bytes())));
        }
    }

    #[test]
    fn damaged_block_is_not_unpacked() {
        let packed = block(&["a", "b", "c"]).packed_records();
        let whole = unpack(&packed).expect("unpacks");
        assert_eq!(unpack(&packed[..packed.len() - 1]), None);
        assert_eq!(unpack(&lz4_flex::block::compress_prepend_size(&whole[..whole.len() - 1])), None);
        assert_eq!(unpack(&u32::MAX.to_le_bytes()), None);
        assert_eq!(unpack(b""), None);
    }
}
