//! The cross-region side of a meter: its regional share, its own component, and the merge of
//! components from peers.

use super::super::region_state::{Connectivity, RegionState};
use super::super::replication::{Component, ComponentTotals, RegionId};
use super::super::tank::Tank;
use super::super::terms::{LEVEL_MAX, Lapse, Terms};
use super::{Moment, OriginMeter, TOTAL_MAX};
use crate::limit::Algorithm;

impl OriginMeter {
    /// Returns the cross-region numbers in the order of the script: `incarnation`, `charged`,
    /// `refunded` and `published`; level, current and previous of `own`, then of `isolated`; flags;
    /// `forgiven`. The flags are 1 for `publishes_all`, 2 while the regional share applies, and 4
    /// in addition while settling.
    pub fn region_state_numbers(&self) -> Option<[u64; 12]> {
        self.region_state.as_ref().map(|region_state| {
            let RegionState { incarnation, charged, refunded, published, own, isolated, forgiven, .. } =
                **region_state;
            let connectivity = match region_state.connectivity {
                Connectivity::Connected => 0,
                Connectivity::Isolated => 2,
                Connectivity::Settling => 6,
            };
            let flags = u64::from(region_state.publishes_all) + connectivity;
            let [own, isolated] = [own, isolated].map(|tank| [tank.level, tank.current, tank.previous]);
            let totals = [incarnation, charged, refunded, published];
            let mut numbers = [0; 12];
            let all = totals.into_iter().chain(own).chain(isolated).chain([flags, forgiven]);
            numbers.iter_mut().zip(all).for_each(|(number, value)| *number = value);
            numbers
        })
    }

    /// Returns the merged totals of peer components, by region and incarnation.
    pub fn seen(&self) -> impl Iterator<Item = (RegionId, u64, ComponentTotals)> + '_ {
        let seen = self.region_state.iter().flat_map(|region_state| &region_state.seen);
        seen.map(|((region, incarnation), totals)| (*region, *incarnation, *totals))
    }

    /// Returns the usage of peers that was dropped above the debt limit, in units.
    pub fn forgiven(&self) -> u64 {
        self.region_state.as_ref().map_or(0, |region_state| region_state.forgiven)
    }

    /// Whether the meter has isolated usage that must not be published yet.
    pub(in crate::origin) fn has_isolated_usage(&self) -> bool {
        self.region_state.as_ref().is_some_and(|region_state| region_state.has_isolated_usage())
    }

    /// Brings the meter up to date without a call of a node.
    pub(in crate::origin) fn look(&mut self, moment: Moment) {
        if self.region_state.is_some() {
            self.come_to(moment);
            self.seen_us = moment.now_us;
        }
    }

    /// Brings the meter to the time and the connectivity of `moment`.
    ///
    /// While isolated, this region's own usage drains only at the rate of its share, because peers
    /// do not know of it. The undrained part counts as soon as all peers are heard again. While
    /// connected, `own` is never above the level of the meter.
    fn come_to(&mut self, moment: Moment) {
        let since_us = self.at_us();
        self.roll(moment.now_us);
        self.follow_connectivity(moment, since_us);
    }

    /// Adopts the connectivity of `moment`. The meter was last brought up to date at `since_us`.
    pub(super) fn follow_connectivity(&mut self, moment: Moment, since_us: u64) {
        self.set_connectivity(moment.connectivity);
        let was_isolated = self.terms.tick(moment.connected_since_us) > self.terms.tick(since_us);
        let Some(region_state) = self
            .region_state
            .as_mut()
            .filter(|region_state| region_state.connectivity == Connectivity::Connected)
        else {
            return;
        };
        if was_isolated {
            self.tank.level = self.tank.level.max(region_state.own.level);
        } else {
            region_state.own.level = region_state.own.level.min(self.tank.level);
        }
    }

    /// Returns whether this region's usage since the last publication is due. If so, it counts as
    /// published.
    pub(in crate::origin) fn is_due(&mut self) -> bool {
        let publish_threshold = self.terms.cross_region().map(|cross_region| cross_region.publish_threshold);
        self.region_state
            .as_mut()
            .zip(publish_threshold)
            .is_some_and(|(region_state, publish_threshold)| region_state.is_due(publish_threshold))
    }

    /// Returns this region's component, or none for a limit of this region only.
    pub(in crate::origin) fn component(&self, key: &[u8], moment: Moment) -> Option<Component> {
        let region_state = self.region_state.as_ref()?;
        let totals = match self.terms.algorithm() {
            Algorithm::Gcra => {
                let RegionState { charged, refunded, .. } = **region_state;
                ComponentTotals::Drained {
                    charged,
                    refunded,
                    level: self.owned(region_state, moment).units(&self.terms),
                }
            }
            Algorithm::SlidingWindow => {
                let Tank { current, previous, .. } = region_state.own;
                ComponentTotals::Cells { cell: self.cell, current, previous }
            }
        };
        Some(Component { key: key.into(), terms: self.terms, incarnation: region_state.incarnation, totals })
    }

    /// Returns this region's undrained own usage at `moment`, without bringing the meter up to
    /// date.
    fn owned(&self, region_state: &RegionState, moment: Moment) -> Tank {
        let elapsed = self.terms.tick(moment.now_us).saturating_sub(self.at);
        let mut own = region_state.own;
        own.drain(elapsed, self.terms.cross_region().map_or(0, |cross_region| cross_region.share_amount));
        let is_connected = region_state.connectivity == Connectivity::Connected
            && moment.connectivity == Connectivity::Connected;
        if is_connected && self.terms.tick(moment.connected_since_us) <= self.at {
            let mut tank = self.tank;
            tank.drain(elapsed, self.terms.amount());
            own.level = own.level.min(tank.level);
        }
        own
    }

    /// Charges the new usage in a peer's component without a check, because the peer has admitted
    /// it. Returns the charged units, and whether the component contained anything new.
    pub(in crate::origin) fn import(
        &mut self,
        moment: Moment,
        from: RegionId,
        component: &Component,
    ) -> (u64, bool) {
        if !self.counts_like(&component.terms) {
            return (0, false);
        }
        self.look(moment);
        let Some(region_state) = &mut self.region_state else { return (0, false) };
        region_state.publishes_all = true;
        let incarnation = component.incarnation.min(TOTAL_MAX);
        let seen = region_state.seen.get(&(from, incarnation)).copied();
        let [first, second, third] = component.totals.numbers().map(|number| number.min(TOTAL_MAX));
        let (totals, delta) = match self.terms.algorithm() {
            Algorithm::Gcra => drained_delta(seen, first, second, third),
            Algorithm::SlidingWindow => cells_delta(seen, first, second, third),
        };
        region_state.remember(from, incarnation, totals);
        self.charge_delta(&delta)
    }

    /// Whether sums under `terms` mean the same here.
    fn counts_like(&self, terms: &Terms) -> bool {
        let is_window = terms.algorithm() == Algorithm::SlidingWindow;
        self.region_state.is_some()
            && self.terms.algorithm() == terms.algorithm()
            && (!is_window || self.terms.cell_us() == terms.cell_us())
    }

    fn charge_delta(&mut self, delta: &ComponentDelta) -> (u64, bool) {
        let mut charged = 0;
        for (cell, units) in delta.cells {
            // Usage of a cell that has not begun here counts in the present cell.
            let cells_ago = self.cells_ago(cell.min(self.cell));
            if cells_ago < 2 || self.terms.algorithm() == Algorithm::Gcra {
                self.charge_foreign(units, cells_ago);
                charged += units;
            }
        }
        self.tank.give_back(self.terms.drops(delta.refunded), 0, 0);
        (charged, charged + delta.refunded > 0)
    }

    /// A limit that forgives owes no more than its cap.
    fn charge_foreign(&mut self, units: u64, cells_ago: u64) {
        let before = self.tank;
        self.tank.charge(&self.terms, units.min(LEVEL_MAX), cells_ago);
        let (Some(region_state), Some(cross_region)) = (&mut self.region_state, self.terms.cross_region())
        else {
            return;
        };
        if self.terms.lapse() == Lapse::Counted {
            return;
        }
        let debt = (self.terms.full() + self.terms.drops(cross_region.debt_max)).min(LEVEL_MAX);
        let most = (self.terms.capacity() + cross_region.debt_max).min(self.terms.units_max());
        let capped = Tank {
            level: self.tank.level.min(before.level.max(debt)),
            current: self.tank.current.min(before.current.max(most)),
            previous: self.tank.previous.min(before.previous.max(most)),
        };
        let forgiven = (self.tank.level - capped.level).div_ceil(self.terms.period())
            + (self.tank.current - capped.current)
            + (self.tank.previous - capped.previous);
        region_state.forgiven = (region_state.forgiven + forgiven).min(TOTAL_MAX);
        self.tank = capped;
    }

    /// Changes the connectivity of the meter. When isolation ends, the region publishes the
    /// undrained part of its isolated usage. The drained part is not published, because no region
    /// exceeded its share.
    pub(super) fn set_connectivity(&mut self, connectivity: Connectivity) {
        let Some(region_state) = &mut self.region_state else { return };
        if region_state.connectivity == Connectivity::Isolated && connectivity != Connectivity::Isolated {
            let units = region_state.isolated.units(&self.terms);
            region_state.own =
                region_state.own.with(&self.terms, &Tank { level: 0, ..region_state.isolated });
            region_state.add(&self.terms, self.at * self.terms.tick_us(), units);
        }
        // Published usage counts as usage of all regions, also if a peer is lost again.
        let joins = match region_state.connectivity {
            Connectivity::Connected => false,
            Connectivity::Settling => connectivity != Connectivity::Settling,
            Connectivity::Isolated => connectivity == Connectivity::Connected,
        };
        if joins {
            let isolated = std::mem::take(&mut region_state.isolated);
            self.tank = self.tank.with(&self.terms, &isolated);
            self.tank.level = self.tank.level.max(region_state.own.level);
        }
        region_state.connectivity = connectivity;
    }

    /// Adapts the cross-region state to changed terms. A limit that becomes cross-region publishes
    /// all usage charged so far: then every region counts the sum of all. Under another algorithm
    /// or cell length, totals have another meaning. They start a new incarnation at zero, because
    /// peers have charged the published usage already.
    pub(super) fn adopt_cross_region(&mut self, now_us: u64, recounts: bool) {
        if self.terms.cross_region().is_none() {
            self.set_connectivity(Connectivity::Connected);
            self.region_state = None;
        } else if let Some(region_state) = &mut self.region_state {
            if recounts {
                region_state.begin(&self.terms, now_us, Tank::default());
                region_state.seen.clear();
            }
        } else {
            let mut region_state = RegionState::new(now_us);
            (region_state.own, region_state.charged) = (self.tank, self.tank.units(&self.terms));
            self.region_state = Some(Box::new(region_state));
        }
    }

    /// Returns the ticks until isolated usage drains, at the rate of the share if it has one. It
    /// includes `held` drops of grants, which may still be charged there.
    pub(super) fn isolated_ticks(&self, held: u64) -> u64 {
        let Some(region_state) = &self.region_state else { return 0 };
        let (amount, drops) = (
            self.terms.cross_region().map_or(0, |cross_region| cross_region.share_amount),
            region_state.isolated.level + held,
        );
        if amount == 0 { self.terms.ticks_to_drain(drops) } else { drops.div_ceil(amount) }
    }

    /// Returns the ticks until this region's own usage drains at the rate of its share, `held`
    /// drops of grants included. Until then it is worth publishing to a peer without a record of
    /// it. A share without a rate drains one drop per tick, the slowest rate.
    pub(super) fn ticks_owned(&self, held: u64) -> u64 {
        let amount = self.terms.cross_region().map_or(0, |cross_region| cross_region.share_amount).max(1);
        self.region_state.as_ref().map_or(0, |region_state| (region_state.own.level + held).div_ceil(amount))
    }

    /// Returns the usage that counts against the limit in force. While connected, that is the usage
    /// of all regions. Otherwise it is this region's part of that usage, plus the isolated usage.
    pub(super) fn used(&self) -> Tank {
        match &self.region_state {
            Some(region_state) if region_state.connectivity != Connectivity::Connected => {
                self.tank.shared(self.terms.share()).with(&self.terms, &region_state.isolated)
            }
            _ => self.tank,
        }
    }

    pub(super) fn is_isolated(&self) -> bool {
        self.region_state
            .as_ref()
            .is_some_and(|region_state| region_state.connectivity != Connectivity::Connected)
    }
}

/// The new part of a component: pairs of cell and units, and refunded units.
struct ComponentDelta {
    cells: [(u64, u64); 2],
    refunded: u64,
}

/// Computes the new part of a GCRA component. Only the undrained `level` of an unknown component is
/// charged: most of its total, which counts from the start of the incarnation, may have drained
/// long ago.
fn drained_delta(
    seen: Option<ComponentTotals>,
    charged: u64,
    refunded: u64,
    level: u64,
) -> (ComponentTotals, ComponentDelta) {
    let (totals, more, back) = match seen {
        Some(ComponentTotals::Drained { charged: before, refunded: before_back, .. }) => {
            let totals = ComponentTotals::Drained {
                charged: charged.max(before),
                refunded: refunded.max(before_back),
                level: 0,
            };
            (totals, charged.saturating_sub(before), refunded.saturating_sub(before_back))
        }
        _ => (ComponentTotals::Drained { charged, refunded, level: 0 }, charged.min(level), 0),
    };
    (totals, ComponentDelta { cells: [(0, more), (0, 0)], refunded: back })
}

fn cells_delta(
    seen: Option<ComponentTotals>,
    cell: u64,
    current: u64,
    previous: u64,
) -> (ComponentTotals, ComponentDelta) {
    let Some(ComponentTotals::Cells { cell: known, current: now, previous: before }) = seen else {
        let delta =
            ComponentDelta { cells: [(cell, current), (cell.saturating_sub(1), previous)], refunded: 0 };
        return (ComponentTotals::Cells { cell, current, previous }, delta);
    };
    let [current_known, previous_known] = [cell, cell.saturating_sub(1)].map(|of| match of {
        _ if of > known => 0,
        _ if of == known => now,
        _ if of + 1 == known => before,
        // Older than the remembered cells: it no longer counts.
        _ => u64::MAX,
    });
    let delta = [
        (cell, current.saturating_sub(current_known)),
        (cell.saturating_sub(1), previous.saturating_sub(previous_known)),
    ];
    let totals = match cell {
        _ if cell > known + 1 => ComponentTotals::Cells { cell, current, previous },
        _ if cell == known + 1 => ComponentTotals::Cells { cell, current, previous: previous.max(now) },
        _ if cell == known => {
            ComponentTotals::Cells { cell, current: current.max(now), previous: previous.max(before) }
        }
        _ if cell + 1 == known => {
            ComponentTotals::Cells { cell: known, current: now, previous: before.max(current) }
        }
        _ => ComponentTotals::Cells { cell: known, current: now, previous: before },
    };
    (totals, ComponentDelta { cells: delta, refunded: 0 })
}
