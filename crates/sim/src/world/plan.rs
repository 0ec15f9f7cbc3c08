//! External events: requests and faults. Faults, and requests of most shapes, are drawn before the
//! world begins.

use super::{Event, PAUSE_US_MAX, World};
use crate::network::hits;
use crate::scenario::{Demand, SECOND_US, Shape};

impl World<'_> {
    /// Draws all faults and requests. For `Poisson` and `Sequence` it draws the first request only.
    pub(super) fn plan(&mut self) {
        match self.scenario.shape {
            Shape::Attack(attack) => self.plan_attack(attack),
            Shape::Poisson | Shape::Sequence => self.schedule_next_request(),
            Shape::Steady | Shape::Bursts | Shape::Edges => {
                for _ in 0..self.scenario.requests {
                    let at_us = self.request_time();
                    self.schedule_request(at_us);
                }
            }
        }
        self.plan_faults();
        if self.scenario.regions.is_some() {
            (0..self.regions.len()).for_each(|region| self.take_over(region));
        }
        self.schedule(self.scenario.length_us + PAUSE_US_MAX, Event::Close);
    }

    fn plan_faults(&mut self) {
        let (faults, links) = (self.scenario.faults, self.scenario.link_faults());
        for (cut, of) in links.cuts.iter().enumerate() {
            self.schedule(of.at_us, Event::CutBegins { cut });
            self.schedule(of.at_us + of.for_us, Event::CutEnds { cut });
        }
        let plan: [(u32, fn() -> Event); 13] = [
            (links.replicator_crashes, || Event::ReplicatorDies),
            (links.two_replicators, || Event::SecondReplicator),
            (faults.restarts, || Event::Restart { process: None }),
            (faults.deploys, || Event::Deploy),
            (faults.freezes, || Event::Freeze),
            (faults.cuts, || Event::Cut),
            (faults.pauses, || Event::Pause),
            (faults.losses, || Event::Lose),
            (faults.wipes, || Event::Wipe),
            (faults.crashes, || Event::Crash),
            (faults.rule_changes, || Event::ChangeRule),
            (faults.node_steps, || Event::StepNode),
            (faults.origin_steps, || Event::StepOrigin),
        ];
        for (count, event) in plan {
            for _ in 0..count {
                let at_us = self.rng.u64(0..self.scenario.length_us);
                self.schedule(at_us, event());
            }
        }
        if faults.losses > 0 {
            self.schedule(0, Event::Snapshot);
        }
    }

    fn schedule_request(&mut self, at_us: u64) {
        let (region, key, cost) = (self.any_region(), self.draw_key(), self.draw_cost());
        let shared_cost = self.draw_shared_cost(cost);
        let is_charge = hits(&mut self.rng, self.scenario.charges_ppm);
        self.schedule(at_us, Event::Request(Demand { region, key, cost, shared_cost, is_charge }));
    }

    /// Schedules the request after the present one, where requests come as a Poisson process or one
    /// after the other.
    pub(super) fn schedule_next_request(&mut self) {
        let mean_us = self.scenario.length_us as f64 / self.scenario.requests.max(1) as f64;
        if self.scenario.shape == Shape::Sequence {
            if self.drawn < self.scenario.requests {
                self.schedule_request(self.now_us + mean_us as u64);
            }
            return;
        }
        self.arrival_us -= (1.0 - self.rng.f64()).ln() * mean_us;
        if self.arrival_us < self.scenario.length_us as f64 {
            self.schedule_request(self.arrival_us as u64);
        }
    }

    fn request_time(&mut self) -> u64 {
        let at_us = self.rng.u64(0..self.scenario.length_us);
        match self.scenario.shape {
            Shape::Steady | Shape::Poisson | Shape::Sequence | Shape::Attack(_) => at_us,
            // A second of noise, twenty of quiet.
            Shape::Bursts => at_us - at_us % (20 * SECOND_US) + self.rng.u64(0..SECOND_US),
            Shape::Edges => {
                let period_us = self.scenario.limit.period_us();
                let edge_us = at_us - at_us % period_us + period_us;
                edge_us - self.rng.u64(0..=period_us / 10)
            }
        }
    }

    fn draw_cost(&mut self) -> u64 {
        if hits(&mut self.rng, self.scenario.large_ppm) {
            return u64::from(self.scenario.limit.burst());
        }
        self.rng.u64(1..=self.scenario.cost_max)
    }

    fn draw_shared_cost(&mut self, cost: u64) -> u64 {
        if !(self.scenario.shared && self.scenario.uneven) {
            return cost;
        }
        let most = self.regions[0].rules.first(self.scenario.keys).burst() / 10;
        self.rng.u64(0..=most.max(1))
    }

    /// Keys weigh 1, 1/2, 1/3 and so on.
    fn draw_key(&mut self) -> usize {
        let keys = self.scenario.keys;
        let total: f64 = (1..=keys).map(|n| 1.0 / n as f64).sum();
        let mut point = self.rng.f64() * total;
        for key in 0..keys {
            point -= 1.0 / (key + 1) as f64;
            if point <= 0.0 {
                return key;
            }
        }
        keys - 1
    }
}
