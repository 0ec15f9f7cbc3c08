//! The grant of a meter as the engine knows it. The slot of the meter counts its unspent units.

use super::super::Context;
use super::schedule::ReportUrgency;
use crate::origin::{LAPSE_MARGIN_US, Lapse, MeterReply, Terms};
use crate::remote_clock::shortest_us;

/// The grant in the origin's last reply.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Grant {
    /// Units in the reply.
    units: u64,
    /// End of the grant, µs; 0 without a grant.
    ends_us: u64,
    life_us: u64,
    /// Window cell in which its usage counts.
    pub(super) cell: u64,
    /// Whether the node must return the grant: the origin recalls it, the limit was lowered, or the
    /// table has no room.
    pub(super) is_recalled: bool,
}

impl Grant {
    pub(super) fn exists(&self) -> bool {
        self.ends_us > 0
    }

    /// Whether there is a grant that ends at `until_us` or before.
    pub(super) fn ends_by(&self, until_us: u64) -> bool {
        (1..=until_us).contains(&self.ends_us)
    }

    /// Returns when the node must report the end of the grant: `margin_us` after it, before it
    /// lapses at the origin.
    pub(super) fn report_by_us(&self, margin_us: u64) -> Option<u64> {
        self.exists().then_some(self.ends_us + margin_us)
    }

    /// Replaces the grant by that of a reply to a call sent at `sent_us`. A recall stays.
    pub(super) fn replace(&mut self, sent_us: u64, reply: &MeterReply) {
        let (ends_us, life_us) =
            if reply.grant > 0 { (sent_us + reply.life_us, reply.life_us) } else { (0, 0) };
        let is_recalled = self.is_recalled || reply.recall;
        *self = Self { units: reply.grant, ends_us, life_us, cell: reply.cell, is_recalled };
    }

    /// Returns the urgency of a report as the grant ends. A spent grant needs a report too: until
    /// the node returns it, the origin counts it as used.
    pub(super) fn urgency_at_end(&self, cx: &Context<'_>) -> ReportUrgency {
        if !self.exists() {
            return ReportUrgency::None;
        }
        let left_us = self.ends_us.saturating_sub(cx.now_us());
        // The flush after the next one would come too late.
        if left_us <= (self.life_us / 5).max(cx.settings.flush_us) {
            ReportUrgency::Urgent
        } else if left_us <= self.life_us * 3 / 5 {
            ReportUrgency::CanWait
        } else {
            ReportUrgency::None
        }
    }

    /// Returns the units that the origin may have counted as used because of a late report, whether
    /// its reply states so or not: the origin keeps no record of a lapse that another call applied.
    pub(super) fn lapsed(&self, now_us: u64, terms: &Terms, reply: &MeterReply) -> u64 {
        // The origin allows for clock drift in the life of a grant, but not in the margin.
        let is_late = self.exists() && now_us >= self.ends_us + shortest_us(LAPSE_MARGIN_US);
        let counts = terms.lapse() == Lapse::Counted;
        if counts && (reply.lapsed || is_late) { self.units } else { 0 }
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::super::super::tests::{MS, meter_reply, terms};
    use super::*;

    const SENT_US: u64 = 10_000 * MS;

    fn granted(units: u64) -> Grant {
        let mut grant = Grant::default();
        grant.replace(SENT_US, &meter_reply(units, 0));
        grant
    }

    #[test]
    fn grant_ends_after_its_life_and_an_empty_one_does_not_exist() {
        let grant = granted(8);
        assert!(!grant.ends_by(SENT_US + 1_000 * MS - 1) && grant.ends_by(SENT_US + 1_000 * MS));
        assert_eq!(grant.report_by_us(100), Some(SENT_US + 1_000 * MS + 100));
        let none = granted(0);
        assert!(!none.exists() && !none.ends_by(u64::MAX) && none.report_by_us(100).is_none());
    }

    #[test]
    fn recall_outlasts_a_reply() {
        let mut grant = granted(8);
        grant.is_recalled = true;
        grant.replace(SENT_US, &meter_reply(4, 0));
        assert!(grant.is_recalled);
    }

    #[test]
    fn grant_lapses_after_its_end_and_the_margin() {
        let (grant, reply) = (granted(8), meter_reply(0, 0));
        let lapses_us = SENT_US + 1_000 * MS + shortest_us(LAPSE_MARGIN_US);
        assert_eq!([lapses_us - 1, lapses_us].map(|now_us| grant.lapsed(now_us, &terms(10), &reply)), [0, 8]);
        let lapsed = MeterReply { lapsed: true, ..reply };
        assert_eq!(grant.lapsed(SENT_US, &terms(10), &lapsed), 8, "the reply states the lapse");
    }
}
