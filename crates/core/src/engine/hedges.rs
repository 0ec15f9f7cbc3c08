//! How often a late call is made a second time: an origin that is late for everyone must not be asked twice by everyone.

/// Hedges are counted in thousandths.
const MILLI: u64 = 1_000;

/// What each call adds: one in twenty may be made twice. Higher: a shorter tail when more answers are late; more work for an
/// origin that has too much already.
const PER_CALL: u64 = 50;

/// How many may come at once. Higher: the same.
const MOST: u64 = 10 * MILLI;

/// How many more calls may be made twice.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hedges(u64);

impl Default for Hedges {
    fn default() -> Self {
        Self(MOST)
    }
}

impl Hedges {
    /// Takes in that a call was made.
    pub(super) fn earn(&mut self) {
        self.0 = (self.0 + PER_CALL).min(MOST);
    }

    /// Whether one may be made twice, which is counted.
    pub(super) fn spend(&mut self) -> bool {
        let left = self.0.checked_sub(MILLI);
        self.0 = left.unwrap_or(self.0);
        left.is_some()
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_call_in_twenty_may_be_made_twice() {
        let mut hedges = Hedges::default();
        let hedged = (0..1_000).filter(|_| {
            hedges.earn();
            hedges.spend()
        });
        // Ten at once, and one in twenty of the 999 that came after the first.
        assert_eq!(hedged.count(), 10 + 999 / 20);
    }
}
