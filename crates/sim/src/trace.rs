//! The events of a world, as one hash and, on request, line by line.

use std::collections::VecDeque;
use std::fmt;

/// Number of the last lines that are retained. Higher: more to read after a failure; slower.
const LINES_KEPT: usize = 100_000;

/// A running hash of all events, and the last events as text.
#[derive(Clone, Debug)]
pub struct Trace {
    hash: u64,
    lines: VecDeque<String>,
    keeps_lines: bool,
}

impl Trace {
    pub(crate) fn new(keeps_lines: bool) -> Self {
        Self { hash: 0xcbf2_9ce4_8422_2325, lines: VecDeque::new(), keeps_lines }
    }

    /// Records an event: numbers that identify it, and its text.
    pub(crate) fn note(&mut self, numbers: [u64; 4], words: impl FnOnce() -> String) {
        for number in numbers {
            // FNV-1a, a word at a time: a simulation has no attackers.
            self.hash = (self.hash ^ number).wrapping_mul(0x0100_0000_01b3).rotate_left(23);
        }
        if self.keeps_lines {
            if self.lines.len() == LINES_KEPT {
                self.lines.pop_front();
            }
            self.lines.push_back(format!("{:>13} us  {}", numbers[0], words()));
        }
    }

    /// A hash of all events.
    pub fn hash(&self) -> u64 {
        self.hash
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lines.iter().try_for_each(|line| writeln!(f, "{line}"))
    }
}
