//! Checkers that see all regions: they verify admissions, published components and charges.

use std::collections::{BTreeMap, BTreeSet};

use tidegate_core::Algorithm;
use tidegate_core::origin::{
    Call, CallReply, ComponentTotals, DIRTY_RETENTION_US, Lapse, MergeRequest, OriginMeter, Partition,
    RegionId, RoundReply,
};
use tidegate_replication::PEER_TIMEOUT_DEFAULT_US;

use super::report::RegionViolation as Violation;
use super::scenario::{KEYS, ORDINARY, RegionScenario, SECOND_US};
use super::world::{EPOCH_US, Region, region_id};
use crate::memory::{IS_SETTLING, ON_PART, still_counts};
use crate::node::{meter_of, name};

/// Longest denial of the ordinary user: this time in µs, and this many requests in a row. At the
/// end of a cut, the usage that all regions admitted before they noticed it is charged at once.
const ORDINARY_US: u64 = 10 * SECOND_US;
const ORDINARY_REQUESTS: u64 = 4;

/// The usage of a key that a region has to publish at some moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeyKnowledge {
    /// The region of the component.
    of: usize,
    key: usize,
    incarnation: u64,
    charged: u64,
    /// For a sliding window: the cell, and the units counted in it.
    cell: u64,
    current: u64,
}

/// Longest time for which one region may be connected while another is isolated, µs. The loss of a
/// peer soon reaches the region that learns of it last.
const PARTED_US: u64 = 5 * SECOND_US;

/// Message loss between regions from which on isolation is a matter of chance, millionths. Links
/// are then dead for three seconds again and again, and last-heard ages stay close to the peer
/// timeout.
const UNFAIR_PPM: u32 = 10_000;

/// Whether a region is connected, as observed in the last round of its replicator.
#[derive(Clone, Copy, Default)]
struct RegionConnectivity {
    is_connected: bool,
    since_us: u64,
    told_us: u64,
}

/// The last published totals of a component.
#[derive(Clone, Copy)]
struct PublishedTotals {
    /// The sum, or the cell and its sum.
    totals: (u64, u64),
    /// How often the region had lost data by then.
    losses: u32,
    /// Whether it fell because data was lost: then its name is given up.
    is_given_up: bool,
}

/// The state of all checkers.
pub(super) struct RegionChecker {
    is_ordinary_safe: bool,
    is_wan_fair: bool,
    ordinary_us: Vec<u64>,
    debt_us: u64,
    share_capacity: Vec<u64>,
    burst: u64,
    /// Unpublished units from which on a region publishes a key that no peer counts.
    publish_threshold: u64,
    /// The most that may count of a limit that forgives.
    owed_max: Option<u64>,
    /// Admissions of each key: time in µs, and cost.
    admissions: Vec<Vec<(u64, u64)>>,
    passed_us: Vec<[u64; KEYS]>,
    published_totals: BTreeMap<(usize, usize, u64), PublishedTotals>,
    /// Totals that regions had charged for components that have since expired there: by charging
    /// region, publishing region, key and incarnation.
    forgotten: BTreeMap<(usize, RegionId, usize, u64), ComponentTotals>,
    /// Components of regions that have expired in the regions themselves, so there is no more usage
    /// to publish.
    over: BTreeSet<(usize, usize, u64)>,
    is_connected: BTreeMap<(usize, u16), bool>,
    stances: Vec<RegionConnectivity>,
    isolations: BTreeMap<(usize, u16), u64>,
    lapses: [u64; KEYS],
    troubled_us: u64,
    violations: Vec<Violation>,
}

impl RegionChecker {
    pub(super) fn new(scenario: &RegionScenario) -> Self {
        let regions = scenario.regions();
        let terms: Vec<_> = (0..regions).map(|region| scenario.rule(region, None).terms).collect();
        let part = |region: usize| {
            terms[region].cross_region().map_or((0, 0), |of| (of.share_amount, of.share_capacity))
        };
        let every_us = |region| scenario.limit.period_us() * 2 / part(region).0.max(1);
        // An excess in a sliding window counts until the window is over.
        let patience_us = match scenario.limit.algorithm() {
            Algorithm::Gcra => ORDINARY_US,
            Algorithm::SlidingWindow => ORDINARY_US + scenario.limit.period_us(),
        };
        // Usage of peers during the absence of a replicator arrives at once. If the peers continue
        // to use their shares, the region pays it off at the rate of its own share.
        let late_us = |region| {
            let (own, all) = (part(region).0.max(1), terms[region].amount());
            let dies = scenario.faults.replicator_crashes > 0;
            if dies { PEER_TIMEOUT_DEFAULT_US * all.saturating_sub(own) / own } else { 0 }
        };
        let capacity = terms[0].capacity();
        let forgives = scenario.lapse() == Lapse::Forgiven;
        Self {
            is_ordinary_safe: scenario.faults.are_regions_well(),
            is_wan_fair: scenario.faults.wan_loss_ppm < UNFAIR_PPM,
            ordinary_us: (0..regions)
                .map(|of| patience_us + late_us(of) + ORDINARY_REQUESTS * every_us(of))
                .collect(),
            debt_us: scenario.drain_us(capacity + scenario.debt_max())
                + scenario.drain_us(capacity)
                + PEER_TIMEOUT_DEFAULT_US
                + ORDINARY_US,
            share_capacity: (0..regions).map(|region| part(region).1).collect(),
            burst: terms[0].burst(),
            publish_threshold: terms[0]
                .cross_region()
                .map_or(0, |cross_region| cross_region.publish_threshold),
            owed_max: forgives.then(|| capacity + scenario.debt_max()),
            admissions: vec![Vec::new(); KEYS],
            passed_us: vec![[0; KEYS]; regions],
            published_totals: BTreeMap::new(),
            forgotten: BTreeMap::new(),
            over: BTreeSet::new(),
            is_connected: BTreeMap::new(),
            stances: vec![RegionConnectivity::default(); regions],
            isolations: BTreeMap::new(),
            lapses: [0; KEYS],
            troubled_us: 0,
            violations: Vec::new(),
        }
    }

    /// Records a violation. The first one of each kind is enough, because it is the most
    /// informative.
    pub(super) fn report(&mut self, violation: Violation) {
        if !self.violations.iter().any(|known| known.is_like(&violation)) {
            self.violations.push(violation);
        }
    }

    pub(super) fn take_violations(&mut self) -> Vec<Violation> {
        std::mem::take(&mut self.violations)
    }

    /// Records a fault that lasts until this time.
    pub(super) fn troubled(&mut self, until_us: u64) {
        self.troubled_us = self.troubled_us.max(until_us);
    }

    pub(super) fn is_troubled_since(&self, since_us: u64) -> bool {
        self.troubled_us >= since_us
    }

    pub(super) fn admitted(&mut self, region: usize, key: usize, cost: u64, at_us: u64) {
        self.admissions[key].push((at_us, cost));
        let passed_us = &mut self.passed_us[region][key];
        *passed_us = (*passed_us).max(at_us);
    }

    /// Checks that a user within the shares of all regions is not denied for long. No key is denied
    /// for longer than its largest debt takes to drain.
    pub(super) fn denied(&mut self, region: usize, key: usize, cost: u64, at_us: u64) {
        let passed_us = self.passed_us[region][key];
        if key == ORDINARY && self.is_ordinary_safe && at_us > passed_us + self.ordinary_us[region] {
            self.report(Violation::LockedOut { region, key, at_us, passed_us });
        }
        let passed_us = self.passed_us.iter().map(|passed_us| passed_us[key]).max().unwrap_or(0);
        let is_small = cost <= self.share_capacity[region] && cost * 2 <= self.burst;
        if is_small && at_us > passed_us.max(self.troubled_us) + self.debt_us {
            self.report(Violation::Debt { region, key, at_us });
        }
    }

    /// Records the reply of an origin to a node. The origin may notice lost writes long after the
    /// loss.
    pub(super) fn note_reply(
        &mut self,
        region: usize,
        partition: u16,
        call: &Call,
        reply: &CallReply,
        at_us: u64,
    ) {
        if reply.now_us - EPOCH_US != at_us {
            // The stored reply to a repeated call.
            return;
        }
        if reply.lost {
            self.troubled(at_us);
        }
        for (update, published_totals) in call.updates.iter().zip(&reply.meters) {
            self.lapses[meter_of(&update.key)] += u64::from(published_totals.lapsed);
            let was_connected = self.is_connected.insert((region, partition), published_totals.is_global);
            if was_connected == Some(true) && !published_totals.is_global {
                *self.isolations.entry((region, partition)).or_default() += 1;
            }
        }
    }

    /// Regions fall back to their parts together, also where only two of them are cut from each
    /// other.
    pub(super) fn note_connectivity(&mut self, region: usize, is_connected: bool, at_us: u64) {
        let connectivity = &mut self.stances[region];
        if connectivity.is_connected != is_connected {
            *connectivity = RegionConnectivity { is_connected, since_us: at_us, told_us: at_us };
        }
        connectivity.told_us = at_us;
        let is_settled = is_connected && connectivity.since_us + PARTED_US <= at_us;
        if !self.is_wan_fair || !is_settled || self.is_troubled_since(at_us.saturating_sub(2 * PARTED_US)) {
            return;
        }
        let is_parted = |other: &RegionConnectivity| {
            let is_recent = other.told_us + SECOND_US >= at_us;
            !other.is_connected && is_recent && other.since_us + PARTED_US <= other.told_us
        };
        if let Some(other) = self.stances.iter().position(is_parted) {
            self.report(Violation::Alone { region, other, at_us });
        }
    }

    /// The number of isolations of the partition that became isolated most often.
    pub(super) fn isolations(&self) -> u64 {
        self.isolations.values().copied().max().unwrap_or(0)
    }

    pub(super) fn lapses(&self, key: usize) -> u64 {
        self.lapses[key]
    }

    /// Returns the admissions of a key in order of time.
    pub(super) fn admissions(&mut self, key: usize) -> &[(u64, u64)] {
        self.admissions[key].sort_unstable();
        &self.admissions[key]
    }

    /// Checks that published usage was charged, and that it never decreases.
    pub(super) fn published(&mut self, place: usize, region: &Region, gathered: &RoundReply, at_us: u64) {
        for component in &gathered.components {
            let key = meter_of(&component.key);
            let meter = region.partitions[key].meter(&component.key);
            let committed = meter.map_or(0, OriginMeter::charged);
            let [first, second, third] = component.totals.numbers();
            let (totals, published) = match component.totals {
                ComponentTotals::Drained { .. } => ((first, 0), first),
                ComponentTotals::Cells { .. } => ((first, second), second + third),
            };
            if published > committed && region.losses == 0 {
                self.report(Violation::Uncommitted { region: place, key, published, committed });
            }
            if region.losses == 0 && meter.is_some_and(|meter| is_too_little(meter, self.publish_threshold)) {
                self.report(Violation::Chatty { region: place, key, published, at_us });
            }
            self.check_fall((place, key, component.incarnation), totals, region.losses, at_us);
        }
    }

    fn check_fall(&mut self, of: (usize, usize, u64), totals: (u64, u64), losses: u32, at_us: u64) {
        let before = self.published_totals.get(&of).copied().unwrap_or(PublishedTotals {
            totals,
            losses,
            is_given_up: false,
        });
        let fell = totals < before.totals;
        let is_lost = fell && losses > before.losses;
        let grew = totals > before.totals && before.is_given_up;
        if (fell && !is_lost) || grew {
            self.report(Violation::Fell { region: of.0, key: of.1, at_us });
        }
        self.published_totals
            .insert(of, PublishedTotals { totals, losses, is_given_up: before.is_given_up || is_lost });
    }

    /// Checks that a dirty meter is dropped only after all peers know its usage, or after
    /// `DIRTY_RETENTION_US`.
    pub(super) fn trimmed(
        &mut self,
        regions: &[Region],
        place: usize,
        key: usize,
        marked: &[(u64, Box<[u8]>)],
        at_us: u64,
    ) {
        let partition = &regions[place].partitions[key];
        for (stamp, name) in marked {
            let is_old = *stamp + DIRTY_RETENTION_US <= EPOCH_US + at_us + SECOND_US;
            if is_old || partition.dirty_meters().any(|(_, marked)| marked == &**name) {
                continue;
            }
            let Some(meter) = partition.meter(name) else { continue };
            let others = (0..regions.len()).filter(|other| *other != place && regions[*other].losses == 0);
            let is_unknown = |other: usize| !self.knows(other, regions, (place, key), meter);
            if others.into_iter().any(is_unknown) {
                self.report(Violation::Trimmed { region: place, key, at_us });
            }
        }
    }

    /// Whether a region knows all that the one at `place` counted of a key, or knew it until that
    /// was over.
    fn knows(
        &self,
        observer: usize,
        regions: &[Region],
        (place, key): (usize, usize),
        meter: &OriginMeter,
    ) -> bool {
        let Some(numbers) = meter.region_state_numbers() else { return true };
        let [incarnation, charged, _, _, _, current, previous, ..] = numbers;
        let cell = meter.numbers()[2];
        match self.charged_for(observer, regions, (place, key, incarnation)) {
            None => charged == 0,
            Some(ComponentTotals::Drained { charged: known, .. }) => known >= charged,
            Some(ComponentTotals::Cells { cell: known, current: of_it, .. }) if known == cell => {
                of_it >= current
            }
            Some(ComponentTotals::Cells { cell: known, current: of_it, .. }) if known + 1 == cell => {
                current == 0 && of_it >= previous
            }
            Some(ComponentTotals::Cells { cell: known, .. }) => known > cell || current + previous == 0,
        }
    }

    /// Returns the totals that a region has charged for a component of a peer, also if they have
    /// expired. An expired component that arrives again is not charged again, and the peer may drop
    /// its dirty meter.
    fn charged_for(
        &self,
        observer: usize,
        regions: &[Region],
        (of, key, incarnation): (usize, usize, u64),
    ) -> Option<ComponentTotals> {
        let known = seen(&regions[observer].partitions[key], region_id(of), &name(key), incarnation);
        let forgotten = self.forgotten.get(&(observer, region_id(of), key, incarnation)).copied();
        known.into_iter().chain(forgotten).max_by_key(ComponentTotals::numbers)
    }

    /// Returns the first region that lacks usage of another one, the other region, and the key.
    pub(super) fn unknown(
        &self,
        regions: &[Region],
        known: &[KeyKnowledge],
    ) -> Option<(usize, usize, usize)> {
        for KeyKnowledge { of, key, incarnation, charged, cell, current } in known.iter().copied() {
            if self.over.contains(&(of, key, incarnation)) {
                continue;
            }
            for (place, region) in regions.iter().enumerate() {
                if place == of || region.losses + regions[of].losses > 0 {
                    continue;
                }
                let is_known = match self.charged_for(place, regions, (of, key, incarnation)) {
                    None => charged == 0,
                    Some(ComponentTotals::Drained { charged: known, .. }) => known >= charged,
                    Some(ComponentTotals::Cells { cell: known, current: of_it, .. }) if known == cell => {
                        of_it >= current
                    }
                    Some(ComponentTotals::Cells { cell: known, previous, .. }) if known == cell + 1 => {
                        previous >= current
                    }
                    Some(ComponentTotals::Cells { cell: known, .. }) => known > cell || current == 0,
                };
                if !is_known {
                    return Some((place, of, key));
                }
            }
        }
        None
    }

    /// Checks that an expired meter no longer counts. Peers need not receive its usage, and
    /// `forgotten` retains the totals that it had charged for peers.
    pub(super) fn forgot(&mut self, region: usize, key: usize, was: &OriginMeter, at_us: u64) {
        if still_counts(was, EPOCH_US + at_us) {
            self.report(Violation::Forgot { region, key, at_us });
        }
        if let Some([incarnation, ..]) = was.region_state_numbers() {
            self.over.insert((region, key, incarnation));
        }
        for (from, incarnation, totals) in was.seen() {
            let known = self.forgotten.entry((region, from, key, incarnation)).or_insert(totals);
            *known = std::cmp::max_by_key(*known, totals, ComponentTotals::numbers);
        }
    }

    /// Checks that the debt to peers has a maximum, if the limit forgives.
    pub(super) fn owes(&mut self, region: usize, key: usize, before: u64, owed: u64, at_us: u64) {
        if let Some(most) = self.owed_max.filter(|most| owed > before.max(*most)) {
            self.report(Violation::Owed { region, key, owed, most, at_us });
        }
    }

    /// Checks that a merge charges the new usage, and nothing else.
    pub(super) fn merged(&mut self, region: usize, charged: u64, news: Option<u64>, at_us: u64) {
        if let Some(news) = news.filter(|news| *news != charged) {
            self.report(Violation::Import { region, charged, news, at_us });
        }
    }
}

/// Returns the totals that a partition has charged for a component.
fn seen(partition: &Partition, from: RegionId, name: &[u8], incarnation: u64) -> Option<ComponentTotals> {
    let meter = partition.meter(name)?;
    let mut all = meter.seen();
    all.find(|(of, named, _)| (*of, *named) == (from, incarnation)).map(|(_, _, totals)| totals)
}

/// Units charged to a key that still count.
pub(super) fn owed(partition: &Partition, key: usize) -> u64 {
    let Some(meter) = partition.meter(&name(key)) else { return 0 };
    let [level, _, _, current, previous, ..] = meter.numbers();
    match meter.terms().algorithm() {
        Algorithm::Gcra => level.div_ceil(meter.terms().period()),
        Algorithm::SlidingWindow => current.max(previous),
    }
}

/// Whether a region counted less than the publish threshold of a key that no peer has published.
fn is_too_little(meter: &OriginMeter, publish_threshold: u64) -> bool {
    let counted = meter.region_state_numbers().map_or(0, |[_, charged, refunded, ..]| charged + refunded);
    counted < publish_threshold && meter.seen().next().is_none()
}

/// Units in a merge that are new to a partition. `None` for sliding windows, where the number
/// depends on the time.
pub(super) fn news(partition: &Partition, merge: &MergeRequest) -> Option<u64> {
    let mut news = 0;
    for component in &merge.components {
        let ComponentTotals::Drained { charged, level, .. } = component.totals else { return None };
        news += match seen(partition, merge.from, &component.key, component.incarnation) {
            Some(ComponentTotals::Drained { charged: known, .. }) => charged.saturating_sub(known),
            _ => charged.min(level),
        };
    }
    Some(news)
}

/// Returns all usage that regions have to publish to each other now.
pub(super) fn known(regions: &[Region]) -> Vec<KeyKnowledge> {
    let mut known = Vec::new();
    for (place, region) in regions.iter().enumerate() {
        for key in 0..KEYS {
            let meter = region.partitions[key].meter(&name(key));
            let Some((meter, numbers)) = meter.and_then(|meter| Some((meter, meter.region_state_numbers()?)))
            else {
                continue;
            };
            let is_open = numbers[10] % 2 == 1;
            if is_open {
                let [incarnation, charged, _, _, _, current, ..] = numbers;
                let cell = meter.numbers()[2];
                known.push(KeyKnowledge { of: place, key, incarnation, charged, cell, current });
            }
        }
    }
    known
}

/// Returns the first region and key that is not connected, or that is connected and has unpublished
/// usage of its regional share. After lost writes that usage is not required: the next call
/// publishes it under another incarnation.
pub(super) fn unsettled(regions: &[Region], origin_us: u64) -> Option<(usize, usize, bool)> {
    let places = (0..regions.len()).flat_map(|region| (0..KEYS).map(move |key| (region, key)));
    let stand = |(region, key): (usize, usize)| {
        let here = &regions[region];
        let is_connected = is_connected(&here.partitions[key], origin_us);
        let is_untold = here.losses == 0 && has_untold(&here.partitions[key], key);
        (!is_connected || is_untold).then_some((region, key, is_connected))
    };
    places.into_iter().find_map(stand)
}

/// Whether a partition is connected, and counts all regions together.
pub(super) fn is_connected(partition: &Partition, origin_us: u64) -> bool {
    let (connected_until_us, _, _, settled) = partition.connectivity_and_stamp();
    settled && connected_until_us > origin_us
}

/// Whether usage charged to the regional share of a key is not published yet.
fn has_untold(partition: &Partition, key: usize) -> bool {
    let numbers = partition.meter(&name(key)).and_then(OriginMeter::region_state_numbers);
    let is_isolated = numbers.is_some_and(|[_, _, _, _, _, _, _, level, current, previous, flags, _]| {
        flags & (ON_PART | IS_SETTLING) == ON_PART && level + current + previous > 0
    });
    is_isolated || partition.isolated_meters().next().is_some()
}

#[cfg(test)]
mod tests {
    use tidegate_core::origin::RoundRequest;

    use super::*;
    use crate::memory::tests::{START_US, STORE, ask, shared_gcra};

    #[test]
    fn share_charges_are_unpublished_until_reconnected() {
        let terms = shared_gcra(40, 1_000, 4);
        let mut partition = Partition::default();
        let round = |settled, clock_us| RoundRequest {
            connected_for_us: SECOND_US,
            settled,
            clock_us,
            trim: 0,
            after: 0,
            most: 8,
        };
        ask(&mut partition, START_US, terms, (2, 0));
        assert!(has_untold(&partition, 0) && !is_connected(&partition, START_US));
        partition.round(START_US, STORE, &round(false, START_US));
        assert!(!has_untold(&partition, 0), "the meter is dirty");
        assert!(!is_connected(&partition, START_US), "usage of the peers has not arrived");
        partition.round(START_US, STORE, &round(true, START_US));
        assert!(!has_untold(&partition, 0) && is_connected(&partition, START_US));
        let later_us = START_US + 2 * SECOND_US;
        assert!(!is_connected(&partition, later_us), "all peers have timed out");
        ask(&mut partition, later_us, terms, (2, 0));
        assert!(has_untold(&partition, 0));
    }
}
