//! pingora-limits: its `Rate`, a count-min sketch of the current interval, as its own guide limits
//! with it.

use anyhow::Result;
use pingora_limits::rate::Rate;

use super::{Batch, Contender, Contenders, Entry, Role, Variant};
use crate::workload::Workload;

pub(super) const ENTRY: Entry = Entry {
    variants: &[Variant {
        contender: "pingora",
        note: Some(
            "pingora: an estimate from a fixed sketch of 4 x 1024 counters, no state per key; not filled",
        ),
    }],
    role: Role::Peer,
    make,
    key_cost: None,
};

struct Pingora {
    rate: Rate,
    events_max: isize,
}

fn make(workload: &Workload) -> Result<Contenders> {
    let events_max = isize::try_from(workload.quota.count)?;
    Ok(vec![Box::new(Pingora { rate: Rate::new(workload.quota.period()), events_max })])
}

impl Contender for Pingora {
    fn check(&self, batch: &Batch<'_>) -> u64 {
        batch.count_by_name(|name| self.rate.observe(&name, 1) <= self.events_max)
    }
}
