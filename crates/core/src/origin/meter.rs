//! The transition of one meter: lapse, charge, decide, grant.
//!
//! A meter holds what was charged, which drains, and what nodes hold of it, which does not. Whenever a grant is made, both
//! together are at most what the limit allows. Every number is whole and below 2^53, and every step is one that a script can
//! take as well: see [`Terms`].

use std::collections::{BTreeMap, BTreeSet};

use super::call::{NodeId, Told, Update};
use super::terms::{DEBT_MAX, Lapse, Terms};
use crate::limit::Algorithm;

/// How many grants of nodes that were not heard of a call writes off, beside the caller's own. Higher: a meter with many
/// holders is sooner rid of dead ones; longer calls.
pub const LAPSES_PER_CALL: usize = 8;

/// How much longer than its holder an origin believes in a grant, µs, beside a sixteenth of its life for clocks that run
/// at different rates. Higher: fewer grants written off under slow calls; longer until a dead node's are.
pub const LAPSE_MARGIN_US: u64 = 300_000;

/// The longest life of a grant, µs.
pub const LIFE_US_MAX: u64 = 10_000_000;

/// The longest that an origin believes in a grant, µs.
const HELD_US_MAX: u64 = LIFE_US_MAX + LIFE_US_MAX / 16 + LAPSE_MARGIN_US;

/// How long what comes back is kept for a request that was too large, µs: long enough for the holders' next flushes.
pub const RECALL_US: u64 = 300_000;

/// When a request that was too large had better come again, µs.
const RECALL_RETRY_US: u64 = 200_000;

/// The wait of a request that no wait helps: it costs more than the burst, or the limit is 0.
pub const NEVER_US: u64 = 1 << 52;

/// How long an idle meter is kept after it has drained, µs, so that its rule's version is not forgotten at once.
const RETENTION_US: u64 = 60_000_000;

/// The longest that a debt is remembered, µs: seventeen years. A full burst drains in ten, a debt may be larger.
const DEBT_US_MAX: u64 = 1 << 49;

/// Where the sums of all that was ever charged, and of all that was given back, stop.
const TOTAL_MAX: u64 = 1 << 52;

const _: () = assert!(TOTAL_MAX + DEBT_MAX < 1 << 53, "a script's numbers are exact up to 2^53");

/// What one node holds of a meter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holding {
    /// Units.
    pub amount: u64,
    /// When it is written off, by the origin's clock.
    pub until_us: u64,
    /// The cell it is of.
    pub cell: u64,
}

/// What is kept for a request that was too large for what was left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wanted {
    node: NodeId,
    units: u64,
    until_us: u64,
}

/// A meter as an origin holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OriginMeter {
    /// The highest version of its limit that anyone brought.
    terms: Terms,
    /// GCRA: what was charged and has not drained, in drops, at tick `at`.
    level: u64,
    at: u64,
    /// Sliding window: the present cell and what was charged in it and in the one before, in units.
    cell: u64,
    current: u64,
    previous: u64,
    /// What nodes hold, in units: of the present cell, and of former ones.
    held: u64,
    held_before: u64,
    /// All that was ever charged, in units, and all that was given back.
    charged: u64,
    refunded: u64,
    /// When the last call came.
    seen_us: u64,
    /// The last loss of writes that was taken into account: when it was noticed, 0 for none.
    loss_us: u64,
    holders: BTreeMap<NodeId, Holding>,
    by_end: BTreeSet<(u64, NodeId)>,
    wanted: Option<Wanted>,
}

/// What a meter needs to know of the call it is part of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment {
    pub(super) node: NodeId,
    pub(super) now_us: u64,
    /// When the partition last lost writes; 0 if it never did.
    pub(super) loss_us: u64,
    /// Whether that was since this node was last answered.
    pub(super) lost: bool,
}

impl OriginMeter {
    /// A meter that nothing was ever charged to.
    pub(super) fn new(terms: Terms, now_us: u64) -> Self {
        let at = terms.tick(now_us);
        Self {
            terms,
            level: 0,
            at,
            cell: at / terms.period(),
            current: 0,
            previous: 0,
            held: 0,
            held_before: 0,
            charged: 0,
            refunded: 0,
            seen_us: 0,
            loss_us: 0,
            holders: BTreeMap::new(),
            by_end: BTreeSet::new(),
            wanted: None,
        }
    }

    /// All that was ever charged, in units.
    pub fn charged(&self) -> u64 {
        self.charged
    }

    /// All that was ever given back, in units.
    pub fn refunded(&self) -> u64 {
        self.refunded
    }

    /// What nodes hold, in units.
    pub fn held(&self) -> u64 {
        self.held + self.held_before
    }

    /// The nodes that hold something.
    pub fn holders(&self) -> impl Iterator<Item = (NodeId, Holding)> + '_ {
        self.holders.iter().map(|(node, holding)| (*node, *holding))
    }

    /// What was charged and has not drained, in drops.
    pub fn level(&self) -> u64 {
        self.charged_drops()
    }

    /// The limit it is under.
    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// Everything it counts, as a script keeps it: level and tick; cell, current and previous; held of the present cell and
    /// of former ones; charged and given back in all; and the last loss that it took into account.
    pub fn numbers(&self) -> [u64; 10] {
        let [level, at, cell] = [self.level, self.at, self.cell];
        let [current, previous, held, held_before] =
            [self.current, self.previous, self.held, self.held_before];
        [level, at, cell, current, previous, held, held_before, self.charged, self.refunded, self.loss_us]
    }

    /// Whether nothing about this meter is worth remembering.
    pub(super) fn is_over(&self, now_us: u64) -> bool {
        self.expires_us() <= now_us
    }

    /// When nothing about this meter will be worth remembering.
    pub fn expires_us(&self) -> u64 {
        let ticks = match self.terms.algorithm() {
            // What is held may count as used, and drains only then.
            Algorithm::Gcra => self.terms.ticks_to_drain(self.level + self.terms.drops(self.held())),
            Algorithm::SlidingWindow => 2 * self.terms.period(),
        };
        self.seen_us + self.terms.ticks_us(ticks, DEBT_US_MAX) + HELD_US_MAX + RETENTION_US
    }

    /// Brings the meter up to the present and takes in what the node says. Whether what the node held had been written off.
    pub(super) fn settle(&mut self, moment: Moment, update: &Update) -> bool {
        let changed = self.adopt(&update.terms);
        self.roll(moment.now_us);
        self.distrust(moment, changed);
        self.lapse_others(moment);
        self.shorten_others(moment);
        let lapsed = self.settle_own(moment, update);
        // What is given back may have been charged in writes that were lost: taken from what was assumed instead of them, it
        // would be handed out twice.
        if !(moment.lost && self.terms.lapse() == Lapse::Counted) {
            self.refund(update);
        }
        self.seen_us = moment.now_us;
        // Neither what is over is kept, nor what was kept before the clock was set back.
        let kept = moment.now_us + 1..=moment.now_us + RECALL_US;
        self.wanted = self.wanted.filter(|wanted| kept.contains(&wanted.until_us));
        lapsed
    }

    /// The highest version of a limit holds. What was charged keeps its meaning in units. Whether the limit changed.
    fn adopt(&mut self, terms: &Terms) -> bool {
        if terms.version() < self.terms.version() || *terms == self.terms {
            return false;
        }
        let before = std::mem::replace(&mut self.terms, *terms);
        if before.period() != terms.period() {
            self.level = terms.drops(before_units(self.level, before.period()));
        }
        if before.tick_us() != terms.tick_us() {
            self.at = self.at * before.tick_us() / terms.tick_us();
        }
        let both_gcra = before.algorithm() == Algorithm::Gcra && terms.algorithm() == Algorithm::Gcra;
        if !both_gcra && (before.algorithm() != terms.algorithm() || before.cell_us() != terms.cell_us()) {
            self.recount(&before);
        }
        true
    }

    /// Takes over what was charged by another algorithm, or in cells of another length, as if it was charged just now.
    fn recount(&mut self, before: &Terms) {
        let units = match before.algorithm() {
            Algorithm::Gcra => before_units(self.level, self.terms.period()),
            Algorithm::SlidingWindow => self.current + self.previous,
        };
        let units = units.min(self.terms.units_max());
        self.cell = self.at / self.terms.period();
        self.previous = 0;
        (self.level, self.current) = match self.terms.algorithm() {
            Algorithm::Gcra => (self.terms.drops(units), 0),
            Algorithm::SlidingWindow => (0, units),
        };
        (self.held, self.held_before) = (0, self.held + self.held_before);
    }

    /// Drains, or moves on to the present cell. A clock that was set back starts again from where it is.
    fn roll(&mut self, now_us: u64) {
        let now = self.terms.tick(now_us);
        let elapsed = now.saturating_sub(self.at);
        self.at = now;
        match self.terms.algorithm() {
            Algorithm::Gcra => {
                let drained = elapsed.min(self.terms.ticks_to_drain(self.level)) * self.terms.amount();
                self.level = self.level.saturating_sub(drained);
            }
            Algorithm::SlidingWindow => self.roll_cells(now / self.terms.period()),
        }
    }

    fn roll_cells(&mut self, cell: u64) {
        if cell == self.cell {
            return;
        }
        if cell == self.cell + 1 {
            (self.previous, self.current) = (self.current, 0);
        } else if cell > self.cell {
            (self.previous, self.current) = (0, 0);
        }
        (self.held, self.held_before) = (0, self.held + self.held_before);
        self.cell = cell;
    }

    /// After writes were lost, a limit that must never be passed counts as full at that moment: once for each loss, which
    /// is known by its time and not by what came after it, since clocks are set back and those of two stores differ; and
    /// once for each limit that it is changed to later.
    fn distrust(&mut self, moment: Moment, changed: bool) {
        let known = std::mem::replace(&mut self.loss_us, moment.loss_us) == moment.loss_us;
        if moment.loss_us == 0 || (known && !changed) || self.terms.lapse() == Lapse::Forgiven {
            return;
        }
        let since = self.at.saturating_sub(self.terms.tick(moment.loss_us));
        match self.terms.algorithm() {
            Algorithm::Gcra => {
                let drained = since.min(self.terms.ticks_to_drain(self.terms.full())) * self.terms.amount();
                self.level = self.level.max(self.terms.full().saturating_sub(drained));
            }
            Algorithm::SlidingWindow => {
                let cell = self.terms.tick(moment.loss_us) / self.terms.period();
                if cell == self.cell {
                    self.current = self.current.max(self.terms.capacity());
                } else if cell + 1 == self.cell {
                    self.previous = self.previous.max(self.terms.capacity());
                }
            }
        }
    }

    fn lapse_others(&mut self, moment: Moment) {
        let over: Vec<NodeId> = self
            .by_end
            .iter()
            .take(LAPSES_PER_CALL)
            .take_while(|(until_us, _)| *until_us <= moment.now_us)
            .map(|(_, node)| *node)
            .filter(|node| *node != moment.node)
            .collect();
        for node in over {
            if let Some(holding) = self.release(node) {
                self.write_off(holding);
            }
        }
    }

    /// Grants that end later than any could, since the clock was set back, end as late as they may.
    fn shorten_others(&mut self, moment: Moment) {
        let latest_us = moment.now_us + HELD_US_MAX;
        let ahead: Vec<(u64, NodeId)> = self
            .by_end
            .iter()
            .rev()
            .take(LAPSES_PER_CALL)
            .take_while(|(until_us, _)| *until_us > latest_us)
            .filter(|(_, node)| *node != moment.node)
            .copied()
            .collect();
        for (until_us, node) in ahead {
            self.by_end.remove(&(until_us, node));
            self.by_end.insert((latest_us, node));
            if let Some(holding) = self.holders.get_mut(&node) {
                holding.until_us = latest_us;
            }
        }
    }

    fn write_off(&mut self, holding: Holding) {
        if self.terms.lapse() == Lapse::Counted {
            self.charge(holding.amount, holding.cell);
        }
    }

    fn settle_own(&mut self, moment: Moment, update: &Update) -> bool {
        let Some(holding) = self.release(moment.node) else {
            // It was written off, and counted if it had to be; unless the store forgot that there ever was a grant.
            let forgotten = moment.now_us < moment.loss_us + 2 * LIFE_US_MAX && moment.loss_us > 0;
            if self.terms.lapse() == Lapse::Forgiven || forgotten {
                self.charge(update.used, update.cell);
            }
            return update.used > 0 || update.keep > 0;
        };
        if holding.until_us <= moment.now_us {
            self.write_off(holding);
            if self.terms.lapse() == Lapse::Forgiven {
                self.charge(update.used, holding.cell);
            }
            return true;
        }
        self.charge(update.used, holding.cell);
        let amount = update.keep.min(holding.amount.saturating_sub(update.used));
        // Not longer than any may last, also after a clock was set back.
        let until_us = holding.until_us.min(moment.now_us + HELD_US_MAX);
        self.hold(moment.node, Holding { amount, until_us, ..holding });
        false
    }

    /// The cell that grants are of: only windows have any.
    fn grant_cell(&self) -> u64 {
        match self.terms.algorithm() {
            Algorithm::Gcra => 0,
            Algorithm::SlidingWindow => self.cell,
        }
    }

    fn release(&mut self, node: NodeId) -> Option<Holding> {
        let holding = self.holders.remove(&node)?;
        self.by_end.remove(&(holding.until_us, node));
        let (own, other) = if holding.cell == self.grant_cell() {
            (&mut self.held, &mut self.held_before)
        } else {
            (&mut self.held_before, &mut self.held)
        };
        // After a change of the limit a cell's number may mean another one: the sum is right all the same.
        let rest = holding.amount.saturating_sub(*own);
        *own -= holding.amount - rest;
        *other = other.saturating_sub(rest);
        Some(holding)
    }

    fn hold(&mut self, node: NodeId, holding: Holding) {
        if holding.amount == 0 {
            return;
        }
        if holding.cell == self.grant_cell() {
            self.held += holding.amount;
        } else {
            self.held_before += holding.amount;
        }
        self.holders.insert(node, holding);
        self.by_end.insert((holding.until_us, node));
    }

    fn charge(&mut self, units: u64, cell: u64) {
        let units = units.min(DEBT_MAX);
        self.charged = (self.charged + units).min(TOTAL_MAX);
        match self.terms.algorithm() {
            Algorithm::Gcra => self.level = (self.level + self.terms.drops(units)).min(DEBT_MAX),
            Algorithm::SlidingWindow => {
                let most = self.terms.units_max();
                if cell == self.cell {
                    self.current = (self.current + units).min(most);
                } else if cell.saturating_add(1) == self.cell {
                    self.previous = (self.previous + units).min(most);
                }
            }
        }
    }

    /// Gives back what was charged, in the cell in which it was, and as far as it has not drained.
    fn refund(&mut self, update: &Update) {
        let Update { refund_of_us, cell, .. } = *update;
        let units = update.refund.min(DEBT_MAX);
        self.refunded = (self.refunded + units).min(TOTAL_MAX);
        match self.terms.algorithm() {
            Algorithm::Gcra => {
                let drops = self.terms.drops(units);
                let age =
                    if refund_of_us == 0 { 0 } else { self.at.saturating_sub(self.terms.tick(refund_of_us)) };
                let drained = age.min(self.terms.ticks_to_drain(drops)) * self.terms.amount();
                self.level = self.level.saturating_sub(drops.saturating_sub(drained));
            }
            Algorithm::SlidingWindow if cell == self.cell => {
                self.current = self.current.saturating_sub(units);
            }
            Algorithm::SlidingWindow if cell.saturating_add(1) == self.cell => {
                self.previous = self.previous.saturating_sub(units);
            }
            Algorithm::SlidingWindow => {}
        }
    }

    /// Ticks of the present cell that have passed.
    fn elapsed(&self) -> u64 {
        self.at - self.cell * self.terms.period()
    }

    fn charged_drops(&self) -> u64 {
        match self.terms.algorithm() {
            Algorithm::Gcra => self.level,
            Algorithm::SlidingWindow => {
                let previous = self.previous.min(self.terms.units_max());
                self.terms.drops(self.current) + previous * (self.terms.period() - self.elapsed())
            }
        }
    }

    /// What stays as it is until someone reports or the cell ends, in drops.
    fn standing(&self, node: NodeId) -> u64 {
        let wanted = self.wanted.filter(|wanted| wanted.node != node).map_or(0, |wanted| wanted.units);
        let charged = match self.terms.algorithm() {
            Algorithm::Gcra => self.held_before,
            Algorithm::SlidingWindow => self.current,
        };
        self.terms.drops(self.held) + self.terms.drops(charged) + self.terms.drops(wanted)
    }

    /// What the cell before still weighs, in units, by what was charged and by what is held of it.
    fn fading(&self) -> u64 {
        (self.previous + self.held_before).min(self.terms.units_max())
    }

    /// What is taken of the limit as `node` sees it, in drops.
    fn taken(&self, node: NodeId) -> u64 {
        let draining = match self.terms.algorithm() {
            Algorithm::Gcra => self.level,
            Algorithm::SlidingWindow => self.fading() * (self.terms.period() - self.elapsed()),
        };
        self.standing(node) + draining
    }

    /// What is left for `node`, in drops.
    fn room(&self, node: NodeId) -> u64 {
        self.terms.full().saturating_sub(self.taken(node))
    }

    /// How many requests of `cost` units still pass.
    pub(super) fn passes(&self, node: NodeId, cost: u64, count: u32) -> u32 {
        if cost > self.terms.burst() || self.terms.amount() == 0 {
            return 0;
        }
        if cost == 0 {
            return count;
        }
        let most = self.room(node) / (cost * self.terms.period());
        u32::try_from(most).unwrap_or(u32::MAX).min(count)
    }

    /// Charges requests that were decided here.
    pub(super) fn admit(&mut self, node: NodeId, units: u64) {
        self.charge(units, self.cell);
        if units > 0 && self.wanted.is_some_and(|wanted| wanted.node == node) {
            self.wanted = None;
        }
    }

    /// When `units` will fit for `node`, if nothing else comes, µs from now.
    fn wait_us(&self, node: NodeId, units: u64) -> u64 {
        if self.terms.amount() == 0 {
            return NEVER_US;
        }
        let need = units * self.terms.period();
        let (taken, full) = (self.taken(node), self.terms.full());
        if taken + need <= full {
            return 0;
        }
        let ticks = match self.terms.algorithm() {
            Algorithm::Gcra => self.terms.ticks_to_drain(taken + need - full),
            Algorithm::SlidingWindow => self.ticks_until_faded(node, need),
        };
        self.terms.ticks_us(ticks, NEVER_US)
    }

    fn ticks_until_faded(&self, node: NodeId, need: u64) -> u64 {
        let (period, elapsed) = (self.terms.period(), self.elapsed());
        let standing = self.standing(node) + need;
        if standing > self.terms.full() {
            return period - elapsed;
        }
        let overlap = (self.terms.full() - standing) / self.fading().max(1);
        period.saturating_sub(overlap).saturating_sub(elapsed)
    }

    /// When a request of `units` that did not pass had better come again, µs from now; 0 if this meter did not deny it.
    /// What others hold of what it needs is called back.
    pub(super) fn denial_us(&mut self, moment: Moment, units: u64) -> u64 {
        if self.passes(moment.node, units, 1) == 1 {
            return 0;
        }
        if units > self.terms.burst() || self.terms.amount() == 0 {
            return NEVER_US;
        }
        self.keep_for(moment, units).unwrap_or_else(|| self.wait_us(moment.node, units))
    }

    /// Calls back what others hold, if a large request needs it, and keeps what comes back for it. When it had better come
    /// again, if that helps. Small ones wait for what drains or is given back anyway: calling everything back for each of
    /// them would leave nobody with a grant.
    fn keep_for(&mut self, moment: Moment, units: u64) -> Option<u64> {
        let others = self.wanted.is_some_and(|wanted| wanted.node != moment.node);
        let is_large = units * (self.holders.len() as u64 + 1) > self.terms.capacity();
        let held = self.terms.drops(self.held + self.held_before);
        let helps = self.room(moment.node) + held >= self.terms.drops(units);
        if others || !is_large || !helps {
            return None;
        }
        self.wanted = Some(Wanted { node: moment.node, units, until_us: moment.now_us + RECALL_US });
        Some(RECALL_RETRY_US)
    }

    /// Extends the node's grant towards what it wants, by a fair part of what is left.
    pub(super) fn grant(&mut self, moment: Moment, update: &Update, lapsed: bool) -> Told {
        let held = self.holders.get(&moment.node).copied();
        if let Some(holding) = held.filter(|holding| holding.cell != self.grant_cell()) {
            return self.told_over(moment, holding);
        }
        let kept = self.release(moment.node).map_or(0, |holding| holding.amount);
        let holders = self.holders.len() as u64 + 1;
        let room = self.room(moment.node).saturating_sub(self.terms.drops(kept));
        let units = room / self.terms.period();
        let want = update.want.min(self.terms.capacity());
        let missing = want.saturating_sub(kept);
        let extra = missing.min((units / holders).max(units.min(1)));
        let life_us = self.life_us(update.life_us);
        let until_us = moment.now_us + life_us + life_us / 16 + LAPSE_MARGIN_US;
        let cell = self.grant_cell();
        self.hold(moment.node, Holding { amount: kept + extra, until_us, cell });
        debug_assert!(extra == 0 || self.taken(moment.node) <= self.terms.full());
        Told {
            grant: kept + extra,
            life_us,
            room: units - extra,
            wait_us: self.wait_us(moment.node, 1),
            cell,
            holders: u32::try_from(holders).unwrap_or(u32::MAX),
            dry: kept + extra < want,
            lapsed,
            recall: self.wanted.is_some_and(|wanted| wanted.node != moment.node),
        }
    }

    /// A grant ends with its cell. What the node kept of it may have been spent while the call was under way, so it is held
    /// until the node has said; only then is there a new one.
    fn told_over(&self, moment: Moment, holding: Holding) -> Told {
        Told {
            grant: holding.amount,
            life_us: 0,
            room: self.room(moment.node) / self.terms.period(),
            wait_us: 0,
            cell: holding.cell,
            holders: u32::try_from(self.holders.len()).unwrap_or(u32::MAX),
            dry: false,
            lapsed: false,
            recall: false,
        }
    }

    /// A grant does not outlive its cell, also on a clock that runs slow by a sixteenth: what is spent after it would count in
    /// a cell that is over.
    fn life_us(&self, wanted_us: u64) -> u64 {
        let life_us = wanted_us.min(LIFE_US_MAX);
        match self.terms.algorithm() {
            Algorithm::Gcra => life_us,
            Algorithm::SlidingWindow => {
                let rest_us = (self.terms.period() - self.elapsed()) * self.terms.tick_us();
                life_us.min(rest_us * 16 / 17)
            }
        }
    }
}

/// Drops as units, rounded up: what was charged is not forgiven by rounding.
const fn before_units(drops: u64, period: u64) -> u64 {
    drops.div_ceil(period)
}
