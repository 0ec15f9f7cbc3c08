//! What a meter has to do with those of other regions: the standing part it falls back to, what it tells them, and what it
//! takes from them.

use super::super::region_state::{Connectivity, RegionState};
use super::super::replication::{Component, ComponentTotals, RegionId};
use super::super::tank::Tank;
use super::super::terms::{DEBT_MAX, Lapse, Terms};
use super::{Moment, OriginMeter, TOTAL_MAX};
use crate::limit::Algorithm;

impl OriginMeter {
    /// Everything it counts because other regions do too, as a script keeps it: the incarnation; what was charged and given
    /// back in it, and the sum of both when it was last marked; what this region charged, as level, current and previous; what
    /// was charged to its standing part, likewise; whether it is open (1), on its part (2), and settling there (4); and what was
    /// forgiven.
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

    /// What was charged for components of other regions: by region and incarnation.
    pub fn seen(&self) -> impl Iterator<Item = (RegionId, u64, ComponentTotals)> + '_ {
        let seen = self.region_state.iter().flat_map(|region_state| &region_state.seen);
        seen.map(|((region, incarnation), totals)| (*region, *incarnation, *totals))
    }

    /// What was owed to other regions and forgotten, in units.
    pub fn forgiven(&self) -> u64 {
        self.region_state.as_ref().map_or(0, |region_state| region_state.forgiven)
    }

    /// Whether something that was charged to the standing part is left, which nobody else is to hear of yet.
    pub(in crate::origin) fn has_isolated_usage(&self) -> bool {
        self.region_state.as_ref().is_some_and(|region_state| region_state.has_isolated_usage())
    }

    /// Brings the meter up to a moment at which nobody calls for it.
    pub(in crate::origin) fn look(&mut self, moment: Moment) {
        if self.region_state.is_some() {
            self.come_to(moment);
            self.seen_us = moment.now_us;
        }
    }

    /// Brings the meter up to a moment: to its time, and to what it counts on by then.
    ///
    /// A region that has not been heard of by others pays for what it charged by its own part of the rate, whatever it counts on
    /// here: what is left of that counts as soon as all are heard of again. While they are, nothing of it is left that has
    /// drained here.
    fn come_to(&mut self, moment: Moment) {
        let since_us = self.at_us();
        self.roll(moment.now_us);
        self.follow_connectivity(moment, since_us);
    }

    /// Counts on what it counts on by now. It was last brought up to the present at `since_us`.
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

    /// Whether others are to hear of what this region charged since they last did. Then it counts as told.
    pub(in crate::origin) fn is_due(&mut self) -> bool {
        let publish_threshold = self.terms.cross_region().map(|cross_region| cross_region.publish_threshold);
        self.region_state
            .as_mut()
            .zip(publish_threshold)
            .is_some_and(|(region_state, publish_threshold)| region_state.is_due(publish_threshold))
    }

    /// What this region charged, for the others to know; nothing of a limit that is its own.
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

    /// What is left of what this region charged, at a moment that the meter is not brought up to.
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

    /// Charges what is new in a component of another region, without a test: it has been admitted. What that was, in units, and
    /// whether anything was new.
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
            // What is of a cell that has not begun here counts in the one that has.
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
        self.tank.charge(&self.terms, units.min(DEBT_MAX), cells_ago);
        let (Some(region_state), Some(cross_region)) = (&mut self.region_state, self.terms.cross_region())
        else {
            return;
        };
        if self.terms.lapse() == Lapse::Counted {
            return;
        }
        let debt = (self.terms.full() + self.terms.drops(cross_region.debt_max)).min(DEBT_MAX);
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

    /// Counts on another ground from now on. Others hear of what is left of what was charged to the standing part, and nothing of
    /// what had its time to drain: nobody exceeded a part.
    pub(super) fn set_connectivity(&mut self, connectivity: Connectivity) {
        let Some(region_state) = &mut self.region_state else { return };
        if region_state.connectivity == Connectivity::Isolated && connectivity != Connectivity::Isolated {
            let units = region_state.isolated.units(&self.terms);
            region_state.own =
                region_state.own.with(&self.terms, &Tank { level: 0, ..region_state.isolated });
            region_state.add(&self.terms, self.at * self.terms.tick_us(), units);
        }
        // What others have heard of counts as what all used, also where they fall silent again.
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

    /// A limit that becomes one of all regions is one of which all that was charged is told: then all have the sum of what each
    /// had. In another algorithm, or in cells of another length, sums mean something else and begin anew, with nothing that
    /// others have not charged already.
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

    /// How long what was charged to the standing part takes to drain, with what is held, which may yet be charged there: by the part's
    /// own rate, if it has one.
    pub(super) fn isolated_ticks(&self, held: u64) -> u64 {
        let Some(region_state) = &self.region_state else { return 0 };
        let (amount, drops) = (
            self.terms.cross_region().map_or(0, |cross_region| cross_region.share_amount),
            region_state.isolated.level + held,
        );
        if amount == 0 { self.terms.ticks_to_drain(drops) } else { drops.div_ceil(amount) }
    }

    /// How long what this region charged takes to be paid off, with what is held, as long as nobody else hears of it: until then it is
    /// worth telling. A part that has no rate pays as slowly as the slowest one that has.
    pub(super) fn ticks_owned(&self, held: u64) -> u64 {
        let amount = self.terms.cross_region().map_or(0, |cross_region| cross_region.share_amount).max(1);
        self.region_state.as_ref().map_or(0, |region_state| (region_state.own.level + held).div_ceil(amount))
    }

    /// What is charged of the limit that holds now: of the whole, or of the standing part, where this region's share of what
    /// all used counts too.
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

/// What is new in a component: units and the cell they are of, and units that were given back.
struct ComponentDelta {
    cells: [(u64, u64); 2],
    refunded: u64,
}

/// Of a component that is not known, what has not drained is charged: what is known of it is its sum since it began, most of
/// which may be long over.
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
        // Older than anything that is remembered: over.
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
