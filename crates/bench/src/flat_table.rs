//! A flat table of cache lines on huge pages, found by number and never searched.
#![allow(unsafe_code, reason = "a mapping seen as atomics, and the processor's prefetch")]

use std::sync::atomic::AtomicU64;

use anyhow::{Context, Result};
use memmap2::{Advice, MmapOptions, MmapRaw};

pub(crate) const LINE_BYTES: usize = 64;
const HUGE_PAGE_BYTES: usize = 2 << 20;
const METERS_PER_LINE: usize = LINE_BYTES / size_of::<AtomicU64>();

#[repr(C, align(64))]
struct Line([AtomicU64; METERS_PER_LINE]);

const _: () = assert!(size_of::<Line>() == LINE_BYTES);

/// Lines of meters, all zero at first.
pub(crate) struct FlatTable {
    mapping: MmapRaw,
    /// Bytes from the mapping's start to its first huge page.
    offset: usize,
    lines: usize,
}

impl FlatTable {
    pub(crate) fn new(lines: usize) -> Result<Self> {
        let bytes = lines * LINE_BYTES + HUGE_PAGE_BYTES;
        let mapping = MmapOptions::new().len(bytes).map_anon().context("mapping the flat table")?;
        let mapping = MmapRaw::from(mapping);
        // A kernel without huge pages refuses; the report prints how many were obtained.
        let _ = mapping.advise(Advice::HugePage);
        let offset = mapping.as_ptr().align_offset(HUGE_PAGE_BYTES);
        anyhow::ensure!(offset <= HUGE_PAGE_BYTES, "the mapping cannot be aligned to a huge page");
        Ok(Self { mapping, offset, lines })
    }

    /// The meter of a key, shared with the few keys that fall on the same one.
    pub(crate) fn meter(&self, key: u64) -> &AtomicU64 {
        let mixed = mix(key);
        &self.line(mixed).0[mixed as usize % METERS_PER_LINE]
    }

    /// Prefetches the line of a key into the cache.
    pub(crate) fn prefetch(&self, key: u64) {
        let line = self.line(mix(key));
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch is a hint that cannot fault, every x86_64 has SSE, and the pointer is
        // valid anyway.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(line).cast());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = line;
    }

    #[allow(clippy::cast_ptr_alignment, reason = "`offset` aligns the lines to a huge page")]
    fn line(&self, mixed: u64) -> &Line {
        let index = ((u128::from(mixed) * self.lines as u128) >> u64::BITS) as usize;
        // SAFETY: index < lines, and `new` mapped `lines` lines past the aligned offset; the memory
        // lives as long as self, is zeroed, and is only ever seen as atomics.
        unsafe { &*self.mapping.as_ptr().add(self.offset).cast::<Line>().add(index) }
    }
}

/// A cheap integer mix: high bits choose the line, low bits the meter in it.
fn mix(key: u64) -> u64 {
    let spread = (key + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (spread ^ (spread >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::sync::atomic::Ordering;

    #[test]
    fn keys_spread_over_the_lines() -> Result<()> {
        let table = FlatTable::new(10_000)?;
        let lines: HashSet<_> = (0..14_000).map(|key| std::ptr::from_ref(table.line(mix(key)))).collect();
        // 1 - e^-1.4 of the lines, if keys fall at random.
        assert!((7_300..7_800).contains(&lines.len()), "{}", lines.len());
        Ok(())
    }

    #[test]
    fn a_meter_keeps_its_value() -> Result<()> {
        let table = FlatTable::new(1)?;
        table.meter(3).store(9, Ordering::Relaxed);
        assert_eq!(table.meter(3).load(Ordering::Relaxed), 9);
        Ok(())
    }
}
