//! The keys of a rule before a change, and those among them that are denied since.

use std::sync::Arc;

use crate::denials::{JUMP, LOOKS_PER_MINUTE};
use crate::rule_keys::{KeySample, KeySlots, LOOKS_KEPT, TenantKeys};

/// The marks of a sample before a change.
#[derive(Debug)]
pub(crate) struct PriorMarks {
    /// By slot: 0 for a key that was not allowed, else one more than its looks with a denial.
    known: Box<[u8]>,
    /// Looks since the first mark.
    pub(crate) looks: u32,
    /// Distinct keys that were denied in a minute, on average.
    denied_per_minute: f64,
}

impl PriorMarks {
    /// Returns the marks of the looks before the last `after`.
    pub(crate) fn of(slots: &KeySlots, after: u32) -> Self {
        let mask = u64::MAX.checked_shl(after).unwrap_or(0);
        let marks = slots.all().iter().map(|slot| (slot.allowed() & mask, slot.denied() & mask));
        let oldest = marks.clone().map(|(allowed, denied)| LOOKS_KEPT - (allowed | denied).leading_zeros());
        let looks = oldest.max().unwrap_or(0).saturating_sub(after);
        let known = marks.clone().map(|(allowed, denied)| match allowed {
            0 => 0,
            _ => u8::try_from(1 + denied.count_ones()).unwrap_or(u8::MAX),
        });
        let minutes = (after..LOOKS_KEPT).step_by(LOOKS_PER_MINUTE as usize);
        let denied_in = |from: u32| {
            let minute = minute_mask() << from;
            marks.clone().filter(|(_, denied)| denied & minute != 0).count()
        };
        let denied: usize = minutes.map(denied_in).sum();
        Self { known: known.collect(), looks, denied_per_minute: per_minute(denied, looks) }
    }

    /// Number of sampled keys that were allowed.
    pub(crate) fn known(&self) -> usize {
        self.known.iter().filter(|known| **known > 0).count()
    }
}

fn minute_mask() -> u64 {
    (1 << LOOKS_PER_MINUTE) - 1
}

/// A count of `looks` looks as a rate per minute.
fn per_minute(count: usize, looks: u32) -> f64 {
    as_float(count) * f64::from(LOOKS_PER_MINUTE) / f64::from(looks.max(1))
}

#[expect(clippy::cast_precision_loss, reason = "a sample has at most 1,024 keys")]
pub(crate) fn as_float(count: usize) -> f64 {
    count as f64
}

/// The keys of a rule in one tenant before a change. Its sample holds them meanwhile.
#[derive(Debug)]
pub(crate) struct KeyBaseline {
    pub(crate) tenant: Arc<str>,
    sample: Arc<KeySample>,
    slots: Arc<KeySlots>,
    prior: PriorMarks,
}

/// Distinct keys of a baseline in the last minute.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct KeyTally {
    /// Keys with requests.
    pub(crate) active: usize,
    /// Keys that are newly denied.
    pub(crate) denied: usize,
    /// Keys that were denied in a minute before the change, on average.
    pub(crate) denied_before: f64,
}

impl KeyBaseline {
    /// Takes the baseline of a change in force for `looks` looks, the present one included. `None`
    /// without marks of at least a minute before it.
    pub(crate) fn take(keys: &TenantKeys, looks: u32) -> Option<Self> {
        let sample = Arc::clone(&keys.sample);
        let slots = sample.hold();
        let prior = PriorMarks::of(&slots, looks);
        let baseline = Self { tenant: Arc::clone(&keys.tenant), sample, slots, prior };
        (baseline.prior.looks >= LOOKS_PER_MINUTE).then_some(baseline)
    }

    /// Number of slots that the baseline refers to.
    pub(crate) fn len(&self) -> usize {
        self.prior.known.len()
    }

    /// Number of its keys that were allowed.
    pub(crate) fn known(&self) -> usize {
        self.prior.known()
    }

    /// Counts the keys that are newly denied in the last `looks` looks. A key counts once. It must
    /// have been allowed before the change, and be denied in ten times as many looks as before.
    pub(crate) fn tally(&self, looks: u32) -> KeyTally {
        let mask = (1_u64 << looks.min(LOOKS_PER_MINUTE)) - 1;
        let mut tally = KeyTally { denied_before: self.prior.denied_per_minute, ..KeyTally::default() };
        for (slot, known) in self.slots.all().iter().zip(&self.prior.known) {
            let (allowed, denied) = (slot.allowed() & mask, slot.denied() & mask);
            if *known == 0 || allowed | denied == 0 {
                continue;
            }
            tally.active += 1;
            let before = per_minute(usize::from(known - 1), self.prior.looks);
            if f64::from(denied.count_ones()) > f64::from(JUMP) * before {
                tally.denied += 1;
            }
        }
        tally
    }
}

impl Drop for KeyBaseline {
    fn drop(&mut self) {
        self.sample.release();
    }
}
