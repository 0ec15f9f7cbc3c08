//! The memory of the table: allocated once, zeroed by the system, in huge pages where available.
#![allow(
    unsafe_code,
    reason = "turning mapped bytes into lines, and prefetching, are the table's own business"
)]

use super::line::Line;

#[cfg(not(loom))]
mod mapped {
    use super::Line;
    use crate::table::BYTES_PER_LINE;
    use memmap2::MmapMut;
    use std::io;
    use std::ptr::NonNull;

    /// Bytes that one entry of the page table covers with huge pages.
    const HUGE_PAGE_BYTES: usize = 2 << 20;

    /// Lines in memory of their own.
    #[derive(Debug)]
    pub(crate) struct Memory {
        /// The first line, inside `map`.
        first: NonNull<Line>,
        lines: usize,
        /// Gives the memory back when dropped.
        _map: MmapMut,
    }

    // SAFETY: `first` points into `_map`, which moves along with it, and all access through it is
    // to atomics.
    unsafe impl Send for Memory {}
    // SAFETY: as above; a shared `Memory` only ever gives out shared lines.
    unsafe impl Sync for Memory {}

    impl Memory {
        pub(crate) fn new(lines: usize) -> io::Result<Self> {
            let too_large = || io::Error::new(io::ErrorKind::OutOfMemory, "larger than the address space");
            let bytes = lines.checked_mul(BYTES_PER_LINE).ok_or_else(too_large)?;
            // A huge page has to start at its own multiple, which a mapping need not do.
            let spare = if bytes < HUGE_PAGE_BYTES { BYTES_PER_LINE } else { HUGE_PAGE_BYTES };
            let mut map = MmapMut::map_anon(bytes.checked_add(spare).ok_or_else(too_large)?)?;
            let offset = map.as_ptr().align_offset(spare);
            #[cfg(target_os = "linux")]
            if bytes >= HUGE_PAGE_BYTES {
                // Refused where the system has no huge pages: slower, not wrong.
                let _ = map.advise_range(memmap2::Advice::HugePage, offset, bytes);
            }
            // SAFETY: `offset` is at most `spare`, by which the mapping is longer than the lines.
            let first = unsafe { map.as_mut_ptr().add(offset) };
            let first = NonNull::new(first).ok_or_else(too_large)?.cast();
            Ok(Self { first, lines, _map: map })
        }
    }

    impl std::ops::Deref for Memory {
        type Target = [Line];

        #[inline]
        fn deref(&self) -> &[Line] {
            // SAFETY: `first` is aligned to at least 64 bytes. `new` mapped `lines` lines from
            // there, and they live as long as `self`. The bytes started as zeroes, and every bit
            // pattern is a valid `Line`. A `Line` consists of atomics only, so shared access is
            // sufficient: no other code touches the map.
            unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.lines) }
        }
    }
}

#[cfg(not(loom))]
pub(crate) use mapped::Memory;

/// Under loom every atomic is an object of its own.
#[cfg(loom)]
#[derive(Debug)]
pub(crate) struct Memory(Box<[Line]>);

#[cfg(loom)]
impl Memory {
    #[expect(clippy::unnecessary_wraps, reason = "the same signature as the mapped memory")]
    pub(crate) fn new(lines: usize) -> std::io::Result<Self> {
        Ok(Self((0..lines).map(|_| Line::new()).collect()))
    }
}

#[cfg(loom)]
impl std::ops::Deref for Memory {
    type Target = [Line];

    fn deref(&self) -> &[Line] {
        &self.0
    }
}

/// Prefetches a line into the processor's cache, without waiting for it.
#[inline]
pub(crate) fn prefetch(line: &Line) {
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    // SAFETY: a prefetch is a hint that has no architectural effect, and SSE is part of every
    // x86-64.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(line).cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(loom))))]
    let _ = line;
}
