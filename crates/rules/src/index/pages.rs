//! Bytes for random reads, in huge pages, so that a cache miss does not cause another one in the
//! page tables.

use std::ops::Deref;

use memmap2::MmapMut;

/// Bytes that one page-table entry covers with huge pages. Smaller tables do not use them.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Bytes of a cache line.
pub(crate) const LINE_BYTES: usize = 64;

/// Less than a small page is not worth a mapping of its own.
const MAPPED_BYTES_MIN: usize = 4 << 10;

/// Bytes that do not change any more. They begin with a line of the cache, unless there are few.
#[derive(Debug)]
pub(crate) enum Pages {
    Few(Box<[u8]>),
    Mapped { map: MmapMut, start: usize, bytes: usize },
}

impl Default for Pages {
    fn default() -> Self {
        Self::Few(Box::default())
    }
}

impl Pages {
    pub(crate) fn new(bytes: &[u8]) -> Self {
        Self::filled(bytes.len(), |pages| pages.copy_from_slice(bytes))
    }

    /// So many bytes, filled in their place.
    pub(crate) fn filled(bytes: usize, fill: impl FnOnce(&mut [u8])) -> Self {
        let mapped = if bytes < MAPPED_BYTES_MIN { None } else { Self::mapped(bytes) };
        let mut pages = mapped.unwrap_or_else(|| Self::Few(vec![0; bytes].into()));
        match &mut pages {
            Self::Few(bytes) => fill(bytes),
            Self::Mapped { map, start, bytes } => fill(&mut map[*start..*start + *bytes]),
        }
        pages
    }

    /// Returns `None` if the system has no memory to map.
    fn mapped(bytes: usize) -> Option<Self> {
        let is_huge = bytes >= HUGE_PAGE_BYTES;
        // A huge page has to start at its own multiple, which a mapping need not do.
        let spare = if is_huge { HUGE_PAGE_BYTES } else { 0 };
        let map = MmapMut::map_anon(bytes.checked_add(spare)?).ok()?;
        let start = if is_huge { map.as_ptr().align_offset(HUGE_PAGE_BYTES) } else { 0 };
        #[cfg(target_os = "linux")]
        if is_huge {
            // Refused where the system has no huge pages: slower, not wrong.
            let _ = map.advise_range(memmap2::Advice::HugePage, start, bytes);
        }
        (map.len() >= start.checked_add(bytes)?).then_some(Self::Mapped { map, start, bytes })
    }
}

impl Deref for Pages {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        match self {
            Self::Few(bytes) => bytes,
            Self::Mapped { map, start, bytes } => &map[*start..*start + *bytes],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_contain_their_input() {
        for length in [0, 1, MAPPED_BYTES_MIN, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES + 77]
        {
            let bytes: Vec<u8> = (0..251).cycle().take(length).collect();
            let pages = Pages::new(&bytes);
            assert!(*pages == *bytes, "{length}");
            if length >= MAPPED_BYTES_MIN {
                assert_eq!(pages.as_ptr().align_offset(LINE_BYTES), 0, "{length}");
            }
        }
    }
}
