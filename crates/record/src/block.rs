//! Records that are kept together: what a row of the store holds.

use std::hash::Hasher;

use siphasher::sip::SipHasher13;

use crate::entry::{KEY_BYTES_MAX, Kind, Written, cut, records};

/// When a block has so many bytes, the next one begins. Higher: fewer rows, better compressed; more to unpack for one
/// record.
const BLOCK_BYTES: usize = 512 << 10;

/// The most that a block unpacks to: one record beyond its size.
const RAW_BYTES_MAX: usize = 2 * BLOCK_BYTES;

/// A block of this many records is not written again with more. Higher: fewer rows where little is denied; more is
/// written again with each flush.
const OPEN_RECORDS_MAX: u64 = 500;

/// Nor one that spans this much time.
const OPEN_MS_MAX: u64 = 60_000;

/// Records that are written together.
#[derive(Debug, Default)]
pub(crate) struct Block {
    pub(crate) from_ms: u64,
    pub(crate) to_ms: u64,
    /// By kind.
    pub(crate) counts: [u64; Kind::ALL.len()],
    terms: Vec<u32>,
    raw: Vec<u8>,
}

impl Block {
    /// Adds a record and its bytes.
    pub(crate) fn push(&mut self, written: &Written<'_>, bytes: &[u8]) {
        let at_ms = written.entry.at_ms;
        let is_first = self.raw.is_empty();
        self.from_ms = if is_first { at_ms } else { self.from_ms.min(at_ms) };
        self.to_ms = self.to_ms.max(at_ms);
        self.counts[written.entry.verdict.kind() as usize] += 1;
        self.terms.extend(terms(written));
        self.raw.extend_from_slice(bytes);
    }

    /// Whether nothing more goes in.
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

    /// What its records can be looked up by: hashes in ascending order, four bytes each.
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

/// What a record is found by: its key, and each of the request's dimensions, so that `user:42` is found whichever limit
/// decided.
fn terms(written: &Written<'_>) -> impl Iterator<Item = u32> {
    let tenant = written.entry.tenant;
    let dimensions = written.dimensions().map(move |(name, value)| term_of(tenant, &dimension(name, value)));
    std::iter::once(term(tenant, written.entry.key)).chain(dimensions)
}

/// A dimension as a [`Key`](crate::Key) has it, in pieces, so that nothing is copied: cut where that would be.
fn dimension<'d>(name: &'d str, value: &'d str) -> [&'d str; 3] {
    let name = cut(name, KEY_BYTES_MAX);
    let colon = cut(":", KEY_BYTES_MAX - name.len());
    [name, colon, cut(value, KEY_BYTES_MAX - name.len() - colon.len())]
}

/// The hash of what is looked for. Two things with the same cost a look into a block that has neither.
pub(crate) fn term(tenant: &str, key: &str) -> u32 {
    term_of(tenant, &[key])
}

/// The same of a text in pieces.
fn term_of(tenant: &str, pieces: &[&str]) -> u32 {
    let mut hasher = SipHasher13::new();
    hasher.write(tenant.as_bytes());
    // No text has this byte.
    hasher.write_u8(0xff);
    for piece in pieces {
        hasher.write(piece.as_bytes());
    }
    let [a, b, c, d, ..] = hasher.finish().to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

/// Whether a record is about `key`: the one that was counted, or one of its dimensions.
pub(crate) fn is_about(written: &Written<'_>, tenant: &str, key: &str) -> bool {
    let is_dimension = |name, value| {
        let [name, colon, value] = dimension(name, value);
        key.strip_prefix(name).and_then(|rest| rest.strip_prefix(colon)) == Some(value)
    };
    written.entry.tenant == tenant
        && (written.entry.key == key || written.dimensions().any(|(name, value)| is_dimension(name, value)))
}

/// Whether one of the hashes that [`Block::packed_terms`] gave is `term`.
pub(crate) fn has_term(packed: &[u8], term: u32) -> bool {
    let (terms, _) = packed.as_chunks::<4>();
    terms.binary_search_by_key(&term, |bytes| u32::from_le_bytes(*bytes)).is_ok()
}

/// What [`Block::packed_records`] gave; nothing if it is damaged.
pub(crate) fn unpack(packed: &[u8]) -> Option<Vec<u8>> {
    let (length, packed) = lz4_flex::block::uncompressed_size(packed).ok()?;
    if length > RAW_BYTES_MAX {
        return None;
    }
    let raw = lz4_flex::block::decompress(packed, length).ok()?;
    // Half a record at the end would be silently left out.
    let used: usize = records(&raw).map(|written| written.bytes).sum();
    (used == raw.len()).then_some(raw)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::tests::denied;

    fn block(keys: &[&str]) -> Block {
        let mut block = Block::default();
        for (at, key) in keys.iter().enumerate() {
            let mut bytes = Vec::new();
            denied(key, 1_000 + at as u64).encode([("user", *key), ("path", "/x")].into_iter(), &mut bytes);
            let (written, _) = Written::decode(&bytes).expect("a record");
            block.push(&written, &bytes);
        }
        block
    }

    #[test]
    fn records_are_found_by_key_and_by_dimension() {
        let mut block = block(&["k9", "k1", "k5", "k1"]);
        let packed = block.packed_terms();
        assert_eq!(packed.len(), 4 * 7, "three keys, three users, one path");
        for key in ["k1", "k5", "k9", "user:k1", "path:/x"] {
            assert!(has_term(&packed, term("t", key)), "{key}");
        }
        assert!(!has_term(&packed, term("t", "k2")) && !has_term(&packed, term("", "k1")));
        let raw = unpack(&block.packed_records()).expect("unpacks");
        let about = |key| records(&raw).filter(|written| is_about(written, "t", key)).count();
        assert_eq!((about("k1"), about("user:k1"), about("path:/x"), about("k")), (2, 2, 4, 0));
        assert_eq!((block.from_ms, block.to_ms, block.records()), (1_000, 1_003, 4));
    }

    #[test]
    fn long_dimensions_are_found_by_what_a_key_keeps_of_them() {
        for (name, value) in
            [("user", "é".repeat(400)), (&"n".repeat(255), "v".repeat(9)), (&"n".repeat(300), "v".to_owned())]
        {
            let mut key = crate::Key::default();
            key.add(name, &value);
            assert_eq!(dimension(name, &value).concat(), key.as_str());
            let mut bytes = Vec::new();
            denied("k", 1).encode([(name, value.as_str())].into_iter(), &mut bytes);
            let (written, _) = Written::decode(&bytes).expect("a record");
            assert!(is_about(&written, "t", key.as_str()));
            assert!(terms(&written).any(|known| known == term("t", key.as_str())));
        }
    }

    #[test]
    fn what_is_damaged_is_not_read() {
        let packed = block(&["a", "b", "c"]).packed_records();
        let whole = unpack(&packed).expect("unpacks");
        assert_eq!(unpack(&packed[..packed.len() - 1]), None);
        assert_eq!(unpack(&lz4_flex::block::compress_prepend_size(&whole[..whole.len() - 1])), None);
        assert_eq!(unpack(&u32::MAX.to_le_bytes()), None);
        assert_eq!(unpack(b""), None);
    }
}
