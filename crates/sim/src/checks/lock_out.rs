//! No key is denied for long although one bucket would let it pass.

use std::collections::BTreeMap;

use tidegate_core::Algorithm;
use tidegate_core::origin::Terms;

use super::{Checker, Ending, Observation};
use crate::history::History;
use crate::scenario::{Charge, Scenario};
use crate::store::EPOCH_US;

/// Longest denial of a key that could pass, beyond the time in which its bucket drains four times,
/// µs. The grant of a dead node lapses first, and drains then.
pub(super) const LOCKED_OUT_US: u64 = 5_000_000;

/// A denial that looks as if the key was locked out.
struct Denial {
    key: usize,
    meters: Vec<usize>,
    at_us: u64,
    /// Time of the last fault, µs.
    troubled_us: u64,
    /// Time in which the largest unreported usage until then drains, µs: the origin may receive it
    /// all at once.
    owed_us: u64,
}

struct LockOut {
    denials: Vec<Denial>,
}

pub(super) fn new(scenario: &Scenario) -> Option<Box<dyn Checker>> {
    let applies = is_reachable(scenario) && scenario.charges_ppm == 0;
    if applies { Some(Box::new(LockOut { denials: Vec::new() })) } else { None }
}

/// Whether there is one region, and its network is good enough for a key to get its full limit.
pub(super) fn is_reachable(scenario: &Scenario) -> bool {
    scenario.regions.is_none() && scenario.faults.loss_ppm + scenario.faults.slow_ppm == 0
}

impl Checker for LockOut {
    fn promise(&self) -> &'static str {
        "lock-out"
    }

    /// Records a key that seems to be denied for long. `end` checks it, because admissions at the
    /// origin may not be known here yet.
    fn see(&mut self, seen: &Observation<'_>, history: &History) -> Option<String> {
        let Observation::Denied { key, charges, .. } = seen else { return None };
        let meter = |charge: &Charge| &history.meters[charge.meter];
        let burst = |charge: &Charge| meter(charge).terms.iter().map(Terms::burst).min().unwrap_or(0);
        let is_small = charges.iter().all(|charge| charge.cost * 2 <= burst(charge));
        let owed_us = |charge: &Charge| meter(charge).untold_most * unit_us(&meter(charge).terms);
        let denial = Denial {
            key: *key,
            meters: charges.iter().map(|charge| charge.meter).collect(),
            at_us: history.now_us,
            troubled_us: history.troubled_us,
            owed_us: charges.iter().map(owed_us).max().unwrap_or(0),
        };
        let last = |meter: usize| history.meters[meter].last_passed_us();
        if is_small && denial.locked_out_since(history, last).is_some() {
            self.denials.push(denial);
        }
        None
    }

    /// Checks the recorded denials again, now that all admissions are known and in order. A key is
    /// locked out if it is denied for long. A single denial does not count: units admitted for an
    /// abandoned request are on their way back.
    fn end(&mut self, end: &Ending<'_>) -> Option<String> {
        let mut first: BTreeMap<(usize, u64), u64> = BTreeMap::new();
        self.denials.iter().find_map(|denial| {
            let last = |meter: usize| {
                let admissions = &end.history.meters[meter].admissions;
                let before = admissions.partition_point(|(at_us, _)| *at_us <= EPOCH_US + denial.at_us);
                admissions[..before].last().map_or(0, |(at_us, _)| at_us - EPOCH_US)
            };
            let since_us = denial.locked_out_since(end.history, last)?;
            let Denial { key, at_us, .. } = denial;
            let first_us = *first.entry((*key, since_us)).or_insert(*at_us);
            (*at_us > first_us + LOCKED_OUT_US).then(|| {
                format!("key {key}: denied at {at_us} us, although it owed nothing since {since_us} us")
            })
        })
    }
}

impl Denial {
    /// Since when one bucket would have let the request pass, if that is long.
    fn locked_out_since(&self, history: &History, last_us: impl Fn(usize) -> u64) -> Option<u64> {
        let drain_us = |meter: usize| history.meters[meter].terms.iter().map(drain_us).max().unwrap_or(0);
        // Usage admitted without the origin is reported all at once, and drains first.
        let free_us = |meter: &usize| last_us(*meter) + 4 * drain_us(*meter) + self.owed_us;
        let since_us = self.meters.iter().map(free_us).max().unwrap_or(0).max(self.troubled_us);
        (self.at_us > since_us + LOCKED_OUT_US).then_some(since_us)
    }
}

/// How long a unit takes to drain, under the slowest of these.
fn unit_us(terms: &[Terms]) -> u64 {
    let unit_us = |terms: &Terms| terms.period().div_ceil(terms.amount().max(1)) * terms.tick_us();
    terms.iter().map(unit_us).max().unwrap_or(0)
}

/// How long a full meter takes to be as good as new.
fn drain_us(terms: &Terms) -> u64 {
    match terms.algorithm() {
        Algorithm::Gcra => terms.full() / terms.amount().max(1) * terms.tick_us(),
        Algorithm::SlidingWindow => 2 * terms.period() * terms.tick_us(),
    }
}
