//! The next step of a key: random operations, costs and waits, steered by the last verdict towards
//! its edges.

use tidegate_core::{Limit, Retry, Verdict};

use crate::draw::MONO_US_MAX;
use crate::history::{Clock, Operation, Step};
use crate::rng::Rng;

const HUGE: [u64; 6] = [u32::MAX as u64, 1 << 32, 1 << 53, 1 << 63, u64::MAX - 1, u64::MAX];

const TEN_YEARS_US: u64 = 10 * 366 * 86_400 * 1_000_000;

/// How many reservations are open at once, at most.
const OPEN_MAX: usize = 4;

/// Writes one history, a step at a time.
#[derive(Debug)]
pub(crate) struct Script {
    rng: Rng,
    clock: Clock,
    amount: u64,
    burst: u64,
    period_us: u64,
    at_us: u64,
    last: Option<Verdict>,
    open: Vec<u64>,
}

impl Script {
    pub(crate) fn new(rng: Rng, limit: &Limit, clock: Clock) -> Self {
        let (amount, burst) = (u64::from(limit.amount()), u64::from(limit.burst()));
        let period_us = limit.period_us();
        Self { rng, clock, amount, burst, period_us, at_us: 0, last: None, open: Vec::new() }
    }

    /// The next step.
    pub(crate) fn next(&mut self) -> Step {
        let room = MONO_US_MAX.saturating_sub(self.clock.mono_us + self.at_us);
        self.at_us += self.wait().min(room);
        Step { at_us: self.at_us, operation: self.operation() }
    }

    /// Records the verdict of the last step.
    pub(crate) fn note(&mut self, operation: Operation, verdict: Verdict) {
        self.last = Some(verdict);
        match operation {
            Operation::Reserve { cost } if verdict.is_allowed() => self.open.push(cost),
            _ => {}
        }
    }

    fn wait(&mut self) -> u64 {
        let near = self.rng.below(3);
        match self.rng.below(24) {
            0..=7 => 0,
            8 => 1,
            9..=11 => around(self.retry_us(), near),
            12..=13 => around(self.reset_us(), near),
            14..=15 => around(self.to_edge_us(), near),
            16 => around(self.period_us, near),
            17..=18 => self.rng.below(2 * self.unit_us() + 2),
            19..=20 => self.rng.below(self.period_us + 1),
            21 => self.rng.any_length(self.reset_us().max(1)),
            22 => self.rng.any_length(2 * self.period_us),
            _ if self.rng.one_in(16) => self.rng.any_length(TEN_YEARS_US),
            _ => around(self.unit_us(), near),
        }
    }

    fn operation(&mut self) -> Operation {
        match self.rng.below(64) {
            0..=31 => Operation::Decide { cost: self.cost() },
            32..=41 if self.open.len() < OPEN_MAX => Operation::Reserve { cost: self.cost() },
            42..=46 => self.commit(),
            47..=49 => Operation::Rollback { reserved: self.close() },
            50..=52 => Operation::Charge { cost: self.adjustment() },
            53..=55 => Operation::Refund { cost: self.adjustment() },
            56..=58 => Operation::Merge { used: self.adjustment() },
            59 if self.rng.one_in(2) => Operation::Reset,
            60..=61 => Operation::Used,
            _ => Operation::Decide { cost: 1 },
        }
    }

    fn cost(&mut self) -> u64 {
        let remaining = self.last.map_or(self.burst, |verdict| u64::from(verdict.remaining()));
        match self.rng.below(24) {
            0..=1 => 0,
            2..=6 => 1,
            7 => 2,
            8 => self.burst,
            9 => self.burst.saturating_sub(1),
            10 => self.burst + 1,
            11..=13 => remaining,
            14..=15 => remaining + 1,
            16..=17 => 1 + self.rng.below(self.burst),
            18..=19 => 1 + self.rng.below(remaining),
            20..=21 => 1 + self.rng.below(self.burst / 4),
            22 => self.rng.any_length(self.burst.max(1)),
            _ => self.rng.pick(&HUGE),
        }
    }

    /// Returns units to charge, refund or merge: seldom so many that the key is useless for the
    /// rest of the history.
    fn adjustment(&mut self) -> u64 {
        match self.rng.below(64) {
            0 => self.rng.pick(&HUGE),
            1..=3 => self.burst + self.rng.any_length(self.burst.max(1)),
            4..=15 => 1,
            16..=31 => self.rng.any_length(self.burst.max(1)),
            32..=47 => self.rng.below(self.burst + 1),
            _ => self.cost().min(self.burst),
        }
    }

    fn commit(&mut self) -> Operation {
        let reserved = self.close();
        let actual = match self.rng.below(8) {
            0 => self.adjustment(),
            1 => reserved.saturating_add(1),
            2 => reserved / 2,
            _ => reserved,
        };
        Operation::Commit { reserved, actual }
    }

    /// Closes an open reservation and returns its units. Without one, returns units that were never
    /// reserved.
    fn close(&mut self) -> u64 {
        if self.open.is_empty() {
            return if self.rng.one_in(16) { self.rng.any_length(u64::MAX) } else { 0 };
        }
        let index = self.rng.below(u64::try_from(self.open.len()).unwrap_or(0));
        self.open.swap_remove(usize::try_from(index).unwrap_or(0))
    }

    fn retry_us(&self) -> u64 {
        let retry = self.last.and_then(|verdict| verdict.retry());
        retry.and_then(Retry::after_us).unwrap_or(0)
    }

    fn reset_us(&self) -> u64 {
        self.last.map_or(0, |verdict| verdict.reset_after_us())
    }

    fn to_edge_us(&self) -> u64 {
        self.period_us - (self.clock.wall_us + self.at_us) % self.period_us
    }

    /// Returns the approximate time in which one unit drains, in microseconds.
    fn unit_us(&self) -> u64 {
        self.period_us / self.amount.max(1)
    }
}

/// One less, the same, or one more.
fn around(us: u64, near: u64) -> u64 {
    (us + near).saturating_sub(1)
}
