//! What a meter has to do with those of other regions: the standing part it falls back to, what it tells them, and what it
//! takes from them.

use super::super::abroad::{Component, RegionId, Sums};
use super::super::outward::{Ground, Outward};
use super::super::tank::Tank;
use super::super::terms::{DEBT_MAX, Lapse, Terms};
use super::{Moment, OriginMeter, TOTAL_MAX};
use crate::limit::Algorithm;

impl OriginMeter {
    /// Everything it counts because other regions do too, as a script keeps it: the incarnation; what was charged and given
    /// back in it, and the sum of both when it was last marked; what this region charged, as level, current and previous; what
    /// was charged to its standing part, likewise; whether it is open (1), on its part (2), and settling there (4); and what was
    /// forgiven.
    pub fn outward_numbers(&self) -> Option<[u64; 12]> {
        self.outward.as_ref().map(|outward| {
            let Outward { incarnation, charged, refunded, published, own, apart, forgiven, .. } = **outward;
            let ground = match outward.ground {
                Ground::Whole => 0,
                Ground::Part => 2,
                Ground::Settling => 6,
            };
            let flags = u64::from(outward.is_open) + ground;
            let [own, apart] = [own, apart].map(|tank| [tank.level, tank.current, tank.previous]);
            let sums = [incarnation, charged, refunded, published];
            let mut numbers = [0; 12];
            let all = sums.into_iter().chain(own).chain(apart).chain([flags, forgiven]);
            numbers.iter_mut().zip(all).for_each(|(number, value)| *number = value);
            numbers
        })
    }

    /// What was charged for components of other regions: by region and incarnation.
    pub fn seen(&self) -> impl Iterator<Item = (RegionId, u64, Sums)> + '_ {
        let seen = self.outward.iter().flat_map(|outward| &outward.seen);
        seen.map(|((region, incarnation), sums)| (*region, *incarnation, *sums))
    }

    /// What was owed to other regions and forgotten, in units.
    pub fn forgiven(&self) -> u64 {
        self.outward.as_ref().map_or(0, |outward| outward.forgiven)
    }

    /// Whether something that was charged to the standing part is left, which nobody else is to hear of yet.
    pub(in crate::origin) fn has_parted(&self) -> bool {
        self.outward.as_ref().is_some_and(|outward| outward.has_parted())
    }

    /// Brings the meter up to a moment at which nobody calls for it.
    pub(in crate::origin) fn look(&mut self, moment: Moment) {
        if self.outward.is_some() {
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
        self.regard(moment, since_us);
    }

    /// Counts on what it counts on by now. It was last brought up to the present at `since_us`.
    pub(super) fn regard(&mut self, moment: Moment, since_us: u64) {
        self.stand_on(moment.ground);
        let was_apart = self.terms.tick(moment.whole_since_us) > self.terms.tick(since_us);
        let Some(outward) = self.outward.as_mut().filter(|outward| outward.ground == Ground::Whole) else {
            return;
        };
        if was_apart {
            self.tank.level = self.tank.level.max(outward.own.level);
        } else {
            outward.own.level = outward.own.level.min(self.tank.level);
        }
    }

    /// Whether others are to hear of what this region charged since they last did. Then it counts as told.
    pub(in crate::origin) fn is_due(&mut self) -> bool {
        let hide = self.terms.abroad().map(|abroad| abroad.hide);
        self.outward.as_mut().zip(hide).is_some_and(|(outward, hide)| outward.is_due(hide))
    }

    /// What this region charged, for the others to know; nothing of a limit that is its own.
    pub(in crate::origin) fn component(&self, key: &[u8], moment: Moment) -> Option<Component> {
        let outward = self.outward.as_ref()?;
        let sums = match self.terms.algorithm() {
            Algorithm::Gcra => {
                let Outward { charged, refunded, .. } = **outward;
                Sums::Drained { charged, refunded, level: self.owned(outward, moment).units(&self.terms) }
            }
            Algorithm::SlidingWindow => {
                let Tank { current, previous, .. } = outward.own;
                Sums::Cells { cell: self.cell, current, previous }
            }
        };
        Some(Component { key: key.into(), terms: self.terms, incarnation: outward.incarnation, sums })
    }

    /// What is left of what this region charged, at a moment that the meter is not brought up to.
    fn owned(&self, outward: &Outward, moment: Moment) -> Tank {
        let elapsed = self.terms.tick(moment.now_us).saturating_sub(self.at);
        let mut own = outward.own;
        own.drain(elapsed, self.terms.abroad().map_or(0, |abroad| abroad.part_amount));
        let is_whole = outward.ground == Ground::Whole && moment.ground == Ground::Whole;
        if is_whole && self.terms.tick(moment.whole_since_us) <= self.at {
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
        let Some(outward) = &mut self.outward else { return (0, false) };
        outward.is_open = true;
        let incarnation = component.incarnation.min(TOTAL_MAX);
        let seen = outward.seen.get(&(from, incarnation)).copied();
        let [first, second, third] = component.sums.numbers().map(|number| number.min(TOTAL_MAX));
        let (sums, news) = match self.terms.algorithm() {
            Algorithm::Gcra => news_of_drained(seen, first, second, third),
            Algorithm::SlidingWindow => news_of_cells(seen, first, second, third),
        };
        outward.remember(from, incarnation, sums);
        self.take(&news)
    }

    /// Whether sums under `terms` mean the same here.
    fn counts_like(&self, terms: &Terms) -> bool {
        let is_window = terms.algorithm() == Algorithm::SlidingWindow;
        self.outward.is_some()
            && self.terms.algorithm() == terms.algorithm()
            && (!is_window || self.terms.cell_us() == terms.cell_us())
    }

    fn take(&mut self, news: &News) -> (u64, bool) {
        let mut charged = 0;
        for (cell, units) in news.cells {
            // What is of a cell that has not begun here counts in the one that has.
            let cells_ago = self.cells_ago(cell.min(self.cell));
            if cells_ago < 2 || self.terms.algorithm() == Algorithm::Gcra {
                self.charge_foreign(units, cells_ago);
                charged += units;
            }
        }
        self.tank.give_back(self.terms.drops(news.refunded), 0, 0);
        (charged, charged + news.refunded > 0)
    }

    /// A limit that forgives owes no more than its cap.
    fn charge_foreign(&mut self, units: u64, cells_ago: u64) {
        let before = self.tank;
        self.tank.charge(&self.terms, units.min(DEBT_MAX), cells_ago);
        let (Some(outward), Some(abroad)) = (&mut self.outward, self.terms.abroad()) else { return };
        if self.terms.lapse() == Lapse::Counted {
            return;
        }
        let debt = (self.terms.full() + self.terms.drops(abroad.debt_max)).min(DEBT_MAX);
        let most = (self.terms.capacity() + abroad.debt_max).min(self.terms.units_max());
        let capped = Tank {
            level: self.tank.level.min(before.level.max(debt)),
            current: self.tank.current.min(before.current.max(most)),
            previous: self.tank.previous.min(before.previous.max(most)),
        };
        let forgiven = (self.tank.level - capped.level).div_ceil(self.terms.period())
            + (self.tank.current - capped.current)
            + (self.tank.previous - capped.previous);
        outward.forgiven = (outward.forgiven + forgiven).min(TOTAL_MAX);
        self.tank = capped;
    }

    /// Counts on another ground from now on. Others hear of what is left of what was charged to the standing part, and nothing of
    /// what had its time to drain: nobody exceeded a part.
    pub(super) fn stand_on(&mut self, ground: Ground) {
        let Some(outward) = &mut self.outward else { return };
        if outward.ground == Ground::Part && ground != Ground::Part {
            let units = outward.apart.units(&self.terms);
            outward.own = outward.own.with(&self.terms, &Tank { level: 0, ..outward.apart });
            outward.add(&self.terms, self.at * self.terms.tick_us(), units);
        }
        // What others have heard of counts as what all used, also where they fall silent again.
        let joins = match outward.ground {
            Ground::Whole => false,
            Ground::Settling => ground != Ground::Settling,
            Ground::Part => ground == Ground::Whole,
        };
        if joins {
            let apart = std::mem::take(&mut outward.apart);
            self.tank = self.tank.with(&self.terms, &apart);
            self.tank.level = self.tank.level.max(outward.own.level);
        }
        outward.ground = ground;
    }

    /// A limit that becomes one of all regions is one of which all that was charged is told: then all have the sum of what each
    /// had. In another algorithm, or in cells of another length, sums mean something else and begin anew, with nothing that
    /// others have not charged already.
    pub(super) fn adopt_abroad(&mut self, now_us: u64, recounts: bool) {
        if self.terms.abroad().is_none() {
            self.stand_on(Ground::Whole);
            self.outward = None;
        } else if let Some(outward) = &mut self.outward {
            if recounts {
                outward.begin(&self.terms, now_us, Tank::default());
                outward.seen.clear();
            }
        } else {
            let mut outward = Outward::new(now_us);
            (outward.own, outward.charged) = (self.tank, self.tank.units(&self.terms));
            self.outward = Some(Box::new(outward));
        }
    }

    /// How long what was charged to the standing part takes to drain, with what is held, which may yet be charged there: by the part's
    /// own rate, if it has one.
    pub(super) fn ticks_apart(&self, held: u64) -> u64 {
        let Some(outward) = &self.outward else { return 0 };
        let (amount, drops) =
            (self.terms.abroad().map_or(0, |abroad| abroad.part_amount), outward.apart.level + held);
        if amount == 0 { self.terms.ticks_to_drain(drops) } else { drops.div_ceil(amount) }
    }

    /// How long what this region charged takes to be paid off, with what is held, as long as nobody else hears of it: until then it is
    /// worth telling. A part that has no rate pays as slowly as the slowest one that has.
    pub(super) fn ticks_owned(&self, held: u64) -> u64 {
        let amount = self.terms.abroad().map_or(0, |abroad| abroad.part_amount).max(1);
        self.outward.as_ref().map_or(0, |outward| (outward.own.level + held).div_ceil(amount))
    }

    /// What is charged of the limit that holds now: of the whole, or of the standing part, where this region's share of what
    /// all used counts too.
    pub(super) fn used(&self) -> Tank {
        match &self.outward {
            Some(outward) if outward.ground != Ground::Whole => {
                self.tank.shared(self.terms.share()).with(&self.terms, &outward.apart)
            }
            _ => self.tank,
        }
    }

    pub(super) fn is_apart(&self) -> bool {
        self.outward.as_ref().is_some_and(|outward| outward.ground != Ground::Whole)
    }
}

/// What is new in a component: units and the cell they are of, and units that were given back.
struct News {
    cells: [(u64, u64); 2],
    refunded: u64,
}

/// Of a component that is not known, what has not drained is charged: what is known of it is its sum since it began, most of
/// which may be long over.
fn news_of_drained(seen: Option<Sums>, charged: u64, refunded: u64, level: u64) -> (Sums, News) {
    let (sums, more, back) = match seen {
        Some(Sums::Drained { charged: before, refunded: before_back, .. }) => {
            let sums =
                Sums::Drained { charged: charged.max(before), refunded: refunded.max(before_back), level: 0 };
            (sums, charged.saturating_sub(before), refunded.saturating_sub(before_back))
        }
        _ => (Sums::Drained { charged, refunded, level: 0 }, charged.min(level), 0),
    };
    (sums, News { cells: [(0, more), (0, 0)], refunded: back })
}

fn news_of_cells(seen: Option<Sums>, cell: u64, current: u64, previous: u64) -> (Sums, News) {
    let Some(Sums::Cells { cell: known, current: now, previous: before }) = seen else {
        let news = News { cells: [(cell, current), (cell.saturating_sub(1), previous)], refunded: 0 };
        return (Sums::Cells { cell, current, previous }, news);
    };
    let [current_known, previous_known] = [cell, cell.saturating_sub(1)].map(|of| match of {
        _ if of > known => 0,
        _ if of == known => now,
        _ if of + 1 == known => before,
        // Older than anything that is remembered: over.
        _ => u64::MAX,
    });
    let news = [
        (cell, current.saturating_sub(current_known)),
        (cell.saturating_sub(1), previous.saturating_sub(previous_known)),
    ];
    let sums = match cell {
        _ if cell > known + 1 => Sums::Cells { cell, current, previous },
        _ if cell == known + 1 => Sums::Cells { cell, current, previous: previous.max(now) },
        _ if cell == known => Sums::Cells { cell, current: current.max(now), previous: previous.max(before) },
        _ if cell + 1 == known => Sums::Cells { cell: known, current: now, previous: before.max(current) },
        _ => Sums::Cells { cell: known, current: now, previous: before },
    };
    (sums, News { cells: news, refunded: 0 })
}
