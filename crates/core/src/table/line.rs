//! A line: two meters and a header in 64 bytes. One thread at a time changes it, and all threads
//! read it.
//!
//! The header holds a version. A reader reads the version and the meters, decides, and only then
//! compares the version again. A denial therefore writes nothing. A writer locks the version that
//! it decided on, makes its few stores, and leaves a new version behind. A thread that decided on
//! an older version starts over, so every decision is made on the state that it changes.

use crate::meter::Slot;
use crate::sync::{AtomicU64, Ordering, SpinWait, fence};

/// Meters in a line.
pub const SLOTS_PER_LINE: usize = 2;

/// Bytes of a line: one cache line of the processor.
pub const BYTES_PER_LINE: usize = 64;

/// Words that belong to one slot alone. The fourth, half a word, is at the end of the line.
const WORDS_PER_SLOT: usize = 3;
const HELD_WORD: usize = SLOTS_PER_LINE * WORDS_PER_SLOT;

const _: () = assert!(SLOTS_PER_LINE == 2, "`Line::find` compares two tags");
#[cfg(not(loom))]
const _: () = assert!(std::mem::size_of::<Line>() == BYTES_PER_LINE);

#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Line {
    head: AtomicU64,
    words: [AtomicU64; HELD_WORD + 1],
}

/// A header as read while no thread was writing: 59 bits of version, 4 of reach, 1 for the lock.
///
/// The reach is the number of following lines that may contain meters with this home line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head(u64);

const LOCKED: u64 = 1;
const REACH_SHIFT: u32 = 1;
const REACH_MAX: u64 = 0b1111;
const ONE_VERSION: u64 = 1 << 5;

impl Head {
    #[inline]
    pub(crate) fn reach(self) -> usize {
        ((self.0 >> REACH_SHIFT) & REACH_MAX) as usize
    }
}

impl Line {
    #[cfg(loom)]
    pub(crate) fn new() -> Self {
        Self { head: AtomicU64::new(0), words: std::array::from_fn(|_| AtomicU64::new(0)) }
    }

    /// Returns the header as soon as no thread is writing.
    #[inline]
    pub(crate) fn head(&self) -> Head {
        let head = self.head.load(Ordering::Acquire);
        if head & LOCKED == 0 { Head(head) } else { self.head_after_wait() }
    }

    /// Returns the reach without waiting for a writer, so it may be out of date.
    #[inline]
    pub(crate) fn reach_now(&self) -> usize {
        Head(self.head.load(Ordering::Relaxed)).reach()
    }

    #[cold]
    fn head_after_wait(&self) -> Head {
        let mut backoff = SpinWait::default();
        loop {
            backoff.wait();
            let head = self.head.load(Ordering::Acquire);
            if head & LOCKED == 0 {
                return Head(head);
            }
        }
    }

    /// Returns the slot with `tag`. No branch selects between the two slots, because the result is
    /// unpredictable: a wrong prediction on a line still in transit from memory would discard all
    /// work done meanwhile.
    #[inline]
    pub(crate) fn find(&self, tag: u64) -> Option<usize> {
        let tag_at = |slot: usize| Slot::tag_in(self.words[slot * WORDS_PER_SLOT].load(Ordering::Relaxed));
        let slot = usize::from(tag_at(1) == tag);
        (tag_at(slot) == tag).then_some(slot)
    }

    /// Returns the words of a slot. Without the lock they may be of different versions, unless
    /// [`Line::is_still`] is true afterwards.
    #[inline]
    pub(crate) fn slot(&self, slot: usize) -> Slot {
        let word = |at: usize| self.words[at].load(Ordering::Relaxed);
        let first = slot * WORDS_PER_SLOT;
        let held = (word(HELD_WORD) >> (slot * 32)) as u32;
        Slot { head: word(first), time: word(first + 1), count: word(first + 2), held }
    }

    /// Whether no thread has written since `head` was read: then all words read meanwhile are of
    /// one version.
    #[inline]
    pub(crate) fn is_still(&self, head: Head) -> bool {
        fence(Ordering::Acquire);
        self.head.load(Ordering::Relaxed) == head.0
    }

    /// Locks the line, if no thread has written since `head` was read.
    #[inline]
    pub(crate) fn lock_at(&self, head: Head) -> Option<LineGuard<'_>> {
        self.head.compare_exchange(head.0, head.0 | LOCKED, Ordering::Acquire, Ordering::Relaxed).ok()?;
        // A reader that sees one of the stores to come must also see the header locked.
        fence(Ordering::Release);
        Some(LineGuard { line: self, head: head.0, next: head.0 })
    }

    /// Locks the line after waiting for other writers.
    pub(crate) fn lock(&self) -> LineGuard<'_> {
        loop {
            if let Some(locked) = self.lock_at(self.head()) {
                return locked;
            }
        }
    }
}

/// The right to write to a line, given up when dropped.
#[derive(Debug)]
pub(crate) struct LineGuard<'a> {
    line: &'a Line,
    head: u64,
    next: u64,
}

impl LineGuard<'_> {
    #[inline]
    pub(crate) fn head(&self) -> Head {
        Head(self.head)
    }

    #[inline]
    pub(crate) fn slot(&self, slot: usize) -> Slot {
        self.line.slot(slot)
    }

    #[inline]
    pub(crate) fn find(&self, tag: u64) -> Option<usize> {
        self.line.find(tag)
    }

    #[inline]
    pub(crate) fn write(&mut self, slot: usize, value: Slot) {
        let store = |at: usize, word: u64| self.line.words[at].store(word, Ordering::Relaxed);
        let first = slot * WORDS_PER_SLOT;
        store(first, value.head);
        store(first + 1, value.time);
        store(first + 2, value.count);
        let held = self.line.words[HELD_WORD].load(Ordering::Relaxed);
        let shift = slot * 32;
        let kept = held & !(u64::from(u32::MAX) << shift);
        let merged = kept | u64::from(value.held) << shift;
        if merged != held {
            store(HELD_WORD, merged);
        }
        self.mark_changed();
    }

    /// Records that a meter with this home line is `lines` further on.
    pub(crate) fn extend_reach(&mut self, lines: usize) {
        let reach = self.head().reach().max(lines) as u64;
        debug_assert!(reach <= REACH_MAX);
        self.mark_changed();
        self.next = self.next & !(REACH_MAX << REACH_SHIFT) | reach << REACH_SHIFT;
    }

    #[inline]
    fn mark_changed(&mut self) {
        if self.next == self.head {
            self.next = self.head.wrapping_add(ONE_VERSION);
        }
    }
}

impl Drop for LineGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.line.head.store(self.next, Ordering::Release);
    }
}
