//! The requests of an attack on one key in all regions at once, beside an ordinary and a rare key.

use tidegate_core::Algorithm;
use tidegate_replication::{INTERVAL_US, PEER_TIMEOUT_DEFAULT_US};

use super::{Event, World};
use crate::scenario::{Attack, Demand, SECOND_US};

/// The keys of a world with an attack.
pub(crate) const ATTACK_KEYS: usize = 3;

/// The key that is attacked.
pub(crate) const ATTACKED: usize = 0;

/// The key of the ordinary user, with even demand within every regional share.
pub(crate) const ORDINARY: usize = 1;

/// The key with occasional requests.
const RARE: usize = 2;

/// Requests that make up a burst.
const PIECES: u64 = 40;

/// The same where there are many bursts.
const LARGE_PIECES: u64 = 8;

/// Demand under a flood, as a multiple of the limit.
const FLOOD: u64 = 4;

/// Demand under a rush in each region, as a multiple of the drain rate.
const RUSH: u64 = 4;

/// How long after a cut a rush begins at most, µs.
const RUSH_LATE_US: u64 = SECOND_US / 100;

/// Demand of the ordinary user, in hundredths of the regional shares. A sliding window that is used
/// to the last unit denies some requests, however even the demand, also if one process counts it.
const ORDINARY_PERCENT: u64 = 100;
const ORDINARY_WINDOW_PERCENT: u64 = 80;

/// Requests for the third key.
const RARE_REQUESTS: u64 = 30;

/// Attempts of an attacker after a burst: their duration and interval in µs, and their maximum
/// number.
const AFTER_US: u64 = 5 * SECOND_US;
const AFTER_EVERY_US: u64 = SECOND_US / 10;
const AFTER_MAX: u64 = 1_000;

impl World<'_> {
    /// Draws all requests of a world with an attack.
    pub(super) fn plan_attack(&mut self, attack: Attack) {
        match attack {
            Attack::Flood => self.plan_flood(),
            Attack::Lag => self.plan_lag(),
            Attack::Cut => self.plan_cuts(),
            Attack::Heal => self.plan_heals(),
            Attack::Pause => self.plan_pauses(),
            Attack::Edges => self.plan_edges(),
            Attack::Wipes => self.plan_burst(self.scenario.length_us / 10, AFTER_US),
            Attack::Rush => self.plan_rushes(),
        }
        self.plan_ordinary();
        self.plan_rare();
    }

    fn ask(&mut self, at_us: u64, region: usize, key: usize, cost: u64) {
        if at_us < self.scenario.length_us {
            self.tally.attacks += 1;
            let demand = Demand { region, key, cost, shared_cost: cost, is_charge: false };
            self.schedule(at_us, Event::Request(demand));
        }
    }

    fn burst(&self) -> u64 {
        u64::from(self.scenario.limit.burst())
    }

    fn plan_flood(&mut self) {
        let all = FLOOD * self.scenario.drained(self.scenario.length_us) + 2 * self.burst();
        let cost = all.div_ceil(self.scenario.requests.max(1)).clamp(1, (self.burst() / 4).max(1));
        for _ in 0..(all / cost).min(self.scenario.requests) {
            let at_us = self.rng.u64(0..self.scenario.length_us);
            let region = self.rng.usize(0..self.regions.len());
            let cost = self.rng.u64(1..=2 * cost);
            self.ask(at_us, region, ATTACKED, cost);
        }
    }

    /// All there is of a region, at once.
    pub(super) fn plan_burst_in(&mut self, region: usize, at_us: u64) {
        let most = self.burst() + self.burst() / 10;
        let piece = (self.burst() / PIECES).max(1);
        for _ in 0..most.div_ceil(piece) {
            let soon_us = at_us + self.rng.u64(0..20_000);
            self.ask(soon_us, region, ATTACKED, piece);
        }
    }

    /// Plans a burst in every region at once, and requests for the units that drain after it.
    fn plan_burst(&mut self, at_us: u64, after_us: u64) {
        for region in 0..self.regions.len() {
            self.plan_burst_in(region, at_us);
            let every_us = AFTER_EVERY_US.max(after_us / AFTER_MAX);
            let cost = (self.scenario.drained(every_us) * 3 / 2).max(1);
            let mut late_us = at_us + every_us;
            while late_us < at_us + after_us {
                self.ask(late_us, region, ATTACKED, cost);
                late_us += every_us;
            }
        }
    }

    /// Plans usage below the publish threshold, which drains without reaching peers, and then a
    /// burst in every region. The burst follows the first cut, if there is one that comes late
    /// enough.
    fn plan_lag(&mut self) {
        let terms = self.regions[0].rules.first(ATTACKED);
        let publish_threshold = terms.cross_region().map_or(1, |of| of.publish_threshold);
        let drip_us = self.scenario.drain_us(publish_threshold);
        let cut_us = self.scenario.link_faults().cuts.iter().map(|cut| cut.at_us).min();
        let late_us = self.rng.u64(0..SECOND_US);
        let at_us = match cut_us.filter(|cut_us| *cut_us >= drip_us) {
            Some(cut_us) => cut_us + late_us,
            None => drip_us + self.rng.u64(20 * SECOND_US..60 * SECOND_US),
        };
        for region in 0..self.regions.len() {
            for unit in 1..publish_threshold {
                self.ask(at_us - drip_us + unit * drip_us / publish_threshold, region, ATTACKED, 1);
            }
        }
        self.plan_burst(at_us, AFTER_US);
    }

    /// When links are cut, and for how long; some time, if they never are.
    fn cut_times(&mut self) -> Vec<(u64, u64)> {
        let mut times: Vec<(u64, u64)> =
            self.scenario.link_faults().cuts.iter().map(|cut| (cut.at_us, cut.for_us)).collect();
        if times.is_empty() {
            times.push((self.rng.u64(0..self.scenario.length_us / 2), AFTER_US));
        }
        times
    }

    /// Plans a burst in every region just after a cut begins, and requests for the units that drain
    /// until it ends.
    fn plan_cuts(&mut self) {
        for (at_us, for_us) in self.cut_times() {
            let begins_us = at_us + self.rng.u64(0..SECOND_US);
            self.plan_burst(begins_us, for_us + 2 * AFTER_US);
        }
    }

    /// Plans all requests that can pass in every region from the beginning of a cut, for a key
    /// unknown to peers. Units that drain before the key is first published never become known to
    /// peers. This surplus lasts while all known usage is at the limit. It adds to the surplus of
    /// the next cut, if the known usage has time to drain before.
    fn plan_rushes(&mut self) {
        let mut times = self.cut_times();
        if let &[(at_us, for_us)] = &times[..] {
            times.push((at_us + for_us, for_us));
        }
        times.sort_unstable();
        for (turn, (at_us, _)) in times.iter().copied().enumerate() {
            let begins_us = at_us + self.rng.u64(0..=RUSH_LATE_US);
            // A level above the burst takes a little longer to drain.
            let quiet_us = self.scenario.drain_us(self.burst()) + self.rng.u64(0..=SECOND_US / 2);
            let until_us = match times.get(turn + 1) {
                Some((next_us, _)) => next_us.saturating_sub(quiet_us),
                None => begins_us + PEER_TIMEOUT_DEFAULT_US + AFTER_US,
            };
            self.plan_rush(begins_us, until_us);
        }
    }

    /// Plans requests at a multiple of the rate of the limit, in every region, for a while.
    fn plan_rush(&mut self, begins_us: u64, until_us: u64) {
        let limit = &self.scenario.limit;
        let every_us = (limit.period_us() / (u64::from(limit.amount()).max(1) * RUSH)).max(1);
        for region in 0..self.regions.len() {
            self.plan_burst_in(region, begins_us);
            let mut at_us = begins_us + every_us;
            while at_us < until_us {
                self.ask(at_us, region, ATTACKED, 1);
                at_us += every_us;
            }
        }
    }

    /// Plans a burst in every region just before a cut begins, so that some peers may receive it
    /// and others not. Requests for the units that drain follow. From the end of the cut, bursts
    /// follow until every region must have noticed it: the exact time is unknown.
    fn plan_heals(&mut self) {
        let told_us = INTERVAL_US + self.wan_us();
        for (at_us, for_us) in self.cut_times() {
            let begins_us = at_us.saturating_sub(self.rng.u64(0..=told_us));
            self.plan_burst(begins_us, for_us);
            self.plan_bursts_from(at_us + for_us);
        }
    }

    /// Plans a burst in every region before a cut is noticed, and again when it is over. Without
    /// requests in between, regions may drop their debts to each other.
    fn plan_pauses(&mut self) {
        for (at_us, for_us) in self.cut_times() {
            for region in 0..self.regions.len() {
                let late_us = self.rng.u64(0..PEER_TIMEOUT_DEFAULT_US);
                self.plan_burst_in(region, at_us + late_us);
            }
            self.plan_bursts_from(at_us + for_us);
        }
    }

    /// Bursts in every region from a time on, as often as it may take.
    fn plan_bursts_from(&mut self, at_us: u64) {
        for again in 0..AFTER_US / AFTER_EVERY_US {
            self.plan_large_bursts(at_us + again * AFTER_EVERY_US);
        }
    }

    /// A burst in every region, in few pieces.
    fn plan_large_bursts(&mut self, at_us: u64) {
        let piece = (self.burst() / LARGE_PIECES).max(1);
        for region in 0..self.regions.len() {
            for _ in 0..=LARGE_PIECES {
                let soon_us = at_us + self.rng.u64(0..20_000);
                self.ask(soon_us, region, ATTACKED, piece);
            }
        }
    }

    fn plan_edges(&mut self) {
        let period_us = self.scenario.limit.period_us();
        let piece = (self.burst() / LARGE_PIECES).max(1);
        let most = self.scenario.requests / ((LARGE_PIECES + 1) * self.regions.len() as u64);
        for period in 1..=(self.scenario.length_us / period_us).min(most) {
            for region in 0..self.regions.len() {
                for _ in 0..=LARGE_PIECES {
                    let at_us = period * period_us - self.rng.u64(1_000..100_000);
                    self.ask(at_us, region, ATTACKED, piece);
                }
            }
        }
    }

    /// Plans even demand of the ordinary user in every region, of up to the regional share.
    fn plan_ordinary(&mut self) {
        for region in 0..self.regions.len() {
            let every_us = self.ordinary_every_us(region);
            let mut at_us = self.rng.u64(0..every_us);
            while at_us < self.scenario.length_us {
                self.ask(at_us, region, ORDINARY, 1);
                at_us += every_us;
            }
        }
    }

    /// Interval between requests of the ordinary user in a region, µs.
    fn ordinary_every_us(&self, region: usize) -> u64 {
        let terms = self.regions[region].rules.first(ORDINARY);
        let part = terms.cross_region().map_or(terms.amount(), |of| of.share_amount).max(1);
        let percent = match self.scenario.limit.algorithm() {
            Algorithm::Gcra => ORDINARY_PERCENT,
            Algorithm::SlidingWindow => ORDINARY_WINDOW_PERCENT,
        };
        self.scenario.limit.period_us() * 100 / (part * percent)
    }

    fn plan_rare(&mut self) {
        for _ in 0..RARE_REQUESTS {
            let at_us = self.rng.u64(0..self.scenario.length_us);
            let region = self.rng.usize(0..self.regions.len());
            let cost = self.rng.u64(1..=(self.burst() / 4).max(1));
            self.ask(at_us, region, RARE, cost);
        }
    }
}
