//! The budget of hedges: an origin that is late for all nodes must not get every call twice.

/// Hedges are counted in thousandths.
const MILLI: u64 = 1_000;

const US_PER_SECOND: u64 = 1_000_000;

/// Budget that each call adds: one call in ten may be hedged. Higher: a shorter tail when more
/// replies are late; more work for an overloaded origin.
const PER_CALL: u64 = 100;

/// Budget that each second adds: a node with few calls is no burden if it hedges all of them.
const PER_SECOND: u64 = 20 * MILLI;

/// The largest budget. Higher: more hedges at once; the same trade-off as above.
const MOST: u64 = 20 * MILLI;

/// How many more calls may be hedged.
#[derive(Clone, Copy, Debug)]
pub(super) struct HedgeBudget {
    left: u64,
    since_us: u64,
}

impl Default for HedgeBudget {
    fn default() -> Self {
        Self { left: MOST, since_us: 0 }
    }
}

impl HedgeBudget {
    /// Adds the budget of one call.
    pub(super) fn earn(&mut self) {
        self.left = (self.left + PER_CALL).min(MOST);
    }

    /// Adds the budget of the time that has passed.
    pub(super) fn advance(&mut self, now_us: u64) {
        let earned = now_us.saturating_sub(self.since_us).min(US_PER_SECOND) * PER_SECOND / US_PER_SECOND;
        // A time too short to earn anything counts the next time.
        if earned > 0 {
            *self = Self { left: (self.left + earned).min(MOST), since_us: now_us };
        }
    }

    /// Spends the budget of one hedge. Returns false if too little is left.
    pub(super) fn spend(&mut self) -> bool {
        let left = self.left.checked_sub(MILLI);
        self.left = left.unwrap_or(self.left);
        left.is_some()
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_call_in_ten_is_hedged_and_twenty_in_each_second() {
        let mut hedges = HedgeBudget::default();
        let twice = (0..1_000).filter(|_| {
            hedges.earn();
            hedges.spend()
        });
        // Twenty at once, and one in ten of the 999 that came after the first.
        assert_eq!(twice.count(), 20 + 999 / 10);
        for second in 1..=3 {
            hedges.advance(second * US_PER_SECOND);
            let left: Vec<bool> = (0..30).map(|_| hedges.spend()).collect();
            assert!((20..=21).contains(&left.iter().filter(|may| **may).count()), "{left:?}");
        }
    }
}
