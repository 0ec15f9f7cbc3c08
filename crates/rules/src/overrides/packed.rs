//! The memory layout of an override: one contiguous piece, so that a lookup costs one cache miss.

use crate::rule::KEY_PARTS_MAX;

/// The most bytes in front of an override's key and name.
pub(crate) const HEAD_BYTES_MAX: usize = 1 + 4 + 4 + 4 + 8 + 4 + 1;
/// Bytes in front of each part of a key: without them (`a-b`, `c`) would be (`a`, `b-c`).
pub(crate) const PART_BYTES: usize = 2;
const _: () =
    assert!(crate::dimensions::VALUE_BYTES_MAX <= u16::MAX as usize, "the length of a part has to fit");

/// In the first byte, beside the number of parts.
const HAS_TENANT: u8 = 0x80;
const HAS_END: u8 = 0x40;
const HAS_VERSION: u8 = 0x20;
const PARTS: u8 = 0x1f;
const _: () = assert!(KEY_PARTS_MAX <= PARTS as usize, "the number of parts has to fit");

/// An override without its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PackedOverride<'r> {
    /// The position of its rule, or the number of its namespace.
    pub(crate) target: u32,
    /// Number of the tenant; `None` for every tenant.
    pub(crate) tenant: Option<u32>,
    pub(crate) effect: u32,
    pub(crate) end_ms: Option<u64>,
    pub(crate) version: Option<u32>,
    pub(crate) name: &'r str,
}

impl<'r> PackedOverride<'r> {
    /// Appends the row and its key to `out`. The fields that a lookup compares first come first.
    pub(crate) fn put<'k>(&self, key: impl Iterator<Item = &'k str>, out: &mut Vec<u8>) {
        let start = out.len();
        out.push(0);
        out.extend_from_slice(&self.target.to_le_bytes());
        out.extend_from_slice(&self.effect.to_le_bytes());
        let mut flags = 0;
        if let Some(tenant) = self.tenant {
            flags |= HAS_TENANT;
            out.extend_from_slice(&tenant.to_le_bytes());
        }
        if let Some(end_ms) = self.end_ms {
            flags |= HAS_END;
            out.extend_from_slice(&end_ms.to_le_bytes());
        }
        if let Some(version) = self.version {
            flags |= HAS_VERSION;
            out.extend_from_slice(&version.to_le_bytes());
        }
        for part in key.take(KEY_PARTS_MAX) {
            flags += 1;
            let bytes = u16::try_from(part.len()).unwrap_or(u16::MAX);
            out.extend_from_slice(&bytes.to_le_bytes());
            out.extend_from_slice(&part.as_bytes()[..usize::from(bytes)]);
        }
        // Names are shorter than this.
        let bytes = u8::try_from(self.name.len()).unwrap_or(u8::MAX);
        out.push(bytes);
        out.extend_from_slice(&self.name.as_bytes()[..usize::from(bytes)]);
        out[start] = flags;
    }

    /// Returns the row that begins at `at`, and the parts of its key; `None` if no row begins
    /// there.
    #[inline]
    pub(crate) fn read(rows: &'r [u8], at: u32) -> Option<(Self, impl Iterator<Item = &'r [u8]>)> {
        let rest = &mut rows.get(at as usize..)?;
        let [flags] = take(rest)?;
        let (target, effect) = (u32::from_le_bytes(take(rest)?), u32::from_le_bytes(take(rest)?));
        let tenant = if flags & HAS_TENANT == 0 { None } else { Some(u32::from_le_bytes(take(rest)?)) };
        let end_ms = if flags & HAS_END == 0 { None } else { Some(u64::from_le_bytes(take(rest)?)) };
        let version = if flags & HAS_VERSION == 0 { None } else { Some(u32::from_le_bytes(take(rest)?)) };
        let key = *rest;
        for _ in 0..flags & PARTS {
            take_part(rest)?;
        }
        let [bytes] = take(rest)?;
        let name = str::from_utf8(rest.get(..usize::from(bytes))?).ok()?;
        let mut rest = key;
        let parts = std::iter::from_fn(move || take_part(&mut rest));
        Some((Self { target, tenant, effect, end_ms, version, name }, parts.take(usize::from(flags & PARTS))))
    }

    /// Whether it has not ended.
    pub(crate) fn lives(&self, now_ms: u64) -> bool {
        self.end_ms.is_none_or(|end_ms| now_ms < end_ms)
    }
}

#[inline]
fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (taken, after) = rest.split_first_chunk::<N>()?;
    *rest = after;
    Some(*taken)
}

#[inline]
fn take_part<'r>(rest: &mut &'r [u8]) -> Option<&'r [u8]> {
    let bytes = u16::from_le_bytes(take(rest)?);
    let (part, after) = rest.split_at_checked(usize::from(bytes))?;
    *rest = after;
    Some(part)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn rows_are_read_as_they_were_written(
            rows in prop::collection::vec(
                (any::<u32>(), any::<Option<u32>>(), any::<Option<u64>>(), any::<Option<u32>>(), ".{0,20}",
                    prop::collection::vec(".{0,20}", 0..=KEY_PARTS_MAX)),
                0..6,
            ),
        ) {
            let mut bytes = Vec::new();
            let mut starts = Vec::new();
            let row = |(number, tenant, end_ms, version, name): (u32, _, _, _, _)| {
                PackedOverride { target: number, tenant, effect: !number, end_ms, version, name }
            };
            for (number, tenant, end_ms, version, name, key) in &rows {
                starts.push(bytes.len());
                let head = row((*number, *tenant, *end_ms, *version, name.as_str()));
                head.put(key.iter().map(String::as_str), &mut bytes);
            }
            for ((number, tenant, end_ms, version, name, key), start) in rows.iter().zip(starts) {
                let (read, parts) = PackedOverride::read(&bytes, u32::try_from(start).expect("small")).expect("a row");
                prop_assert_eq!(read, row((*number, *tenant, *end_ms, *version, name.as_str())));
                prop_assert!(parts.eq(key.iter().map(String::as_bytes)));
            }
        }
    }
}
