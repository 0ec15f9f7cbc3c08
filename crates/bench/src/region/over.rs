//! The over-admission of a limit, as its clients observe it.
//!
//! A request is decided between its sending and its answer. So all requests sent at `a` or later
//! and answered at `b` or earlier were decided within `[a, b]`. If their cost is more than may pass
//! in that time, the limit was exceeded. The method never reports a false excess. It misses an
//! excess that the latency of requests hides.

use std::collections::BTreeMap;

use tidegate::{Algorithm, Limit};

/// A request that passed. Times are microseconds of the wall clock, on one line for all requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PassedRequest {
    pub(crate) cost: u64,
    pub(crate) sent_us: u64,
    pub(crate) answered_us: u64,
}

/// The largest excess of any interval over one bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OverAdmission {
    /// In units of cost times the period, which makes it an integer.
    numerator: i128,
    period_us: u64,
    burst: u32,
}

impl OverAdmission {
    /// Of one key.
    pub(crate) fn of(limit: &Limit, passed: &[PassedRequest]) -> Self {
        let used = match limit.algorithm() {
            Algorithm::Gcra => fullest_bucket(limit, passed),
            Algorithm::SlidingWindow => fullest_cells(limit, passed),
        };
        let numerator = (used - i128::from(limit.burst()) * i128::from(limit.period_us())).max(0);
        Self { numerator, period_us: limit.period_us(), burst: limit.burst() }
    }

    /// Returns the excess in units of cost; 0 if the limit was kept.
    pub(crate) fn units(self) -> f64 {
        self.numerator as f64 / self.period_us as f64
    }

    /// As a share of the burst.
    pub(crate) fn share(self) -> f64 {
        self.units() / f64::from(self.burst)
    }
}

/// The highest that a bucket which drains at the limit's rate stood, times the period.
fn fullest_bucket(limit: &Limit, passed: &[PassedRequest]) -> i128 {
    let (amount, period) = (i128::from(limit.amount()), i128::from(limit.period_us()));
    let mut by_sending: Vec<usize> = (0..passed.len()).collect();
    by_sending.sort_by_key(|at| passed[*at].sent_us);
    let mut places = vec![0; passed.len()];
    for (place, at) in by_sending.iter().enumerate() {
        places[*at] = place;
    }
    let mut by_answer: Vec<usize> = (0..passed.len()).collect();
    by_answer.sort_by_key(|at| passed[*at].answered_us);
    let mut beginnings = Beginnings::new(passed.len());
    let mut fullest = 0;
    for at in by_answer {
        let PassedRequest { cost, sent_us, answered_us } = passed[at];
        beginnings.add(places[at], i128::from(cost) * period, i128::from(sent_us) * amount);
        fullest = fullest.max(beginnings.best() - i128::from(answered_us) * amount);
    }
    fullest
}

/// Possible starts of an interval, in order of time. The tree covers all intervals of a key in
/// `n log n` steps.
struct Beginnings {
    /// For each run of starts: the cost decided in it, and its best start.
    runs: Vec<Run>,
    leaves: usize,
}

#[derive(Clone, Copy)]
struct Run {
    cost: i128,
    /// The highest of "when it begins, in drained cost, plus all cost from there to the end of the
    /// run".
    best: i128,
}

const EMPTY: Run = Run { cost: 0, best: i128::MIN / 2 };

impl Beginnings {
    fn new(count: usize) -> Self {
        let leaves = count.next_power_of_two();
        Self { runs: vec![EMPTY; 2 * leaves], leaves }
    }

    fn add(&mut self, place: usize, cost: i128, begins: i128) {
        let mut at = self.leaves + place;
        self.runs[at] = Run { cost, best: begins + cost };
        while at > 1 {
            at /= 2;
            let (left, right) = (self.runs[2 * at], self.runs[2 * at + 1]);
            self.runs[at] =
                Run { cost: left.cost + right.cost, best: right.best.max(left.best + right.cost) };
        }
    }

    fn best(&self) -> i128 {
        self.runs[1].best
    }
}

/// Returns the highest sum of a cell and the weighted cell before it, times the period. Only a
/// request sent and answered within one cell is certain to belong to it.
fn fullest_cells(limit: &Limit, passed: &[PassedRequest]) -> i128 {
    let period = limit.period_us();
    let mut cells: BTreeMap<u64, Vec<PassedRequest>> = BTreeMap::new();
    for one in passed.iter().filter(|one| one.sent_us / period == one.answered_us / period) {
        cells.entry(one.sent_us / period).or_default().push(*one);
    }
    let total =
        |cell: Option<&Vec<PassedRequest>>| cell.map_or(0, |cell| cell.iter().map(|one| one.cost).sum());
    let mut fullest = 0;
    for (number, cell) in &cells {
        let previous: u64 = total(number.checked_sub(1).and_then(|before| cells.get(&before)));
        let mut in_order = cell.clone();
        in_order.sort_by_key(|one| one.answered_us);
        let mut current = 0;
        for one in in_order {
            current += one.cost;
            let weight_us = period - one.answered_us % period;
            let used =
                i128::from(current) * i128::from(period) + i128::from(previous) * i128::from(weight_us);
            fullest = fullest.max(used);
        }
    }
    fullest
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const SECOND_US: u64 = 1_000_000;
    /// The beginning of a minute in 2026.
    const START_US: u64 = 1_794_000_000 * SECOND_US;

    fn at(seconds: f64, took_us: u64, cost: u64) -> PassedRequest {
        let sent_us = START_US + (seconds * 1e6) as u64;
        PassedRequest { cost, sent_us, answered_us: sent_us + took_us }
    }

    fn bucket() -> Limit {
        Limit::gcra(60, Duration::from_mins(1)).unwrap()
    }

    fn window() -> Limit {
        Limit::sliding_window(60, Duration::from_mins(1)).unwrap()
    }

    /// Every interval, by the definition.
    fn fullest_by_definition(limit: &Limit, passed: &[PassedRequest]) -> i128 {
        let (amount, period) = (i128::from(limit.amount()), i128::from(limit.period_us()));
        let mut fullest = 0;
        for begins in passed.iter().map(|one| one.sent_us) {
            for ends in passed.iter().map(|one| one.answered_us).filter(|ends| *ends >= begins) {
                let inside = passed.iter().filter(|one| one.sent_us >= begins && one.answered_us <= ends);
                let cost: u64 = inside.map(|one| one.cost).sum();
                fullest = fullest.max(i128::from(cost) * period - amount * i128::from(ends - begins));
            }
        }
        fullest
    }

    #[test]
    fn burst_and_drained_units_are_within_the_limit() {
        assert_eq!(START_US % (60 * SECOND_US), 0);
        // Sixty at once, then one in each second, each decided right after the second is full.
        let mut passed = vec![at(0.0, 10, 1); 60];
        passed.extend((1..200).map(|second| at(f64::from(second), 10, 1)));
        let over = OverAdmission::of(&bucket(), &passed);
        assert_eq!((over.numerator, over.units() > 0.0), (0, false));
        assert_eq!(OverAdmission::of(&bucket(), &[]).numerator, 0);
    }

    #[test]
    fn one_request_too_many_is_seen_wherever_it_is() {
        for extra in [0.0, 0.5, 17.25, 150.9] {
            let mut passed = vec![at(0.0, 10, 1); 60];
            passed.extend((1..200).map(|second| at(f64::from(second), 10, 1)));
            passed.push(at(extra, 10, 1));
            let over = OverAdmission::of(&bucket(), &passed);
            assert!(over.units() > 0.0 && over.units() <= 1.0, "at {extra}: {}", over.units());
        }
    }

    #[test]
    fn one_request_of_high_cost_is_seen_in_its_size() {
        let over = OverAdmission::of(&bucket(), &[at(0.0, 0, 50), at(0.0, 0, 25)]);
        assert!((over.units() - 15.0).abs() < 1e-9 && (over.share() - 0.25).abs() < 1e-9);
    }

    #[test]
    fn possibly_later_decisions_are_not_over_admission() {
        // The second sixty may have been decided a minute after the first.
        let mut passed = vec![at(0.0, 10, 1); 60];
        passed.extend(vec![at(0.1, 60 * SECOND_US, 1); 60]);
        assert_eq!(OverAdmission::of(&bucket(), &passed).numerator, 0);
        // A second less, and they cannot all have been.
        passed.truncate(60);
        passed.extend(vec![at(0.0, 59 * SECOND_US, 1); 60]);
        assert!((OverAdmission::of(&bucket(), &passed).units() - 1.0).abs() < 1e-9);
    }

    #[test]
    fn all_intervals_are_looked_at() {
        // A simple generator is enough: it only has to make times overlap in every way.
        let mut state = 7_u64;
        let mut draw = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        for _ in 0..300 {
            let passed: Vec<PassedRequest> = (0..=draw(30))
                .map(|_| at(draw(40) as f64 / 10.0, draw(2 * SECOND_US), 1 + draw(9)))
                .collect();
            assert_eq!(fullest_bucket(&bucket(), &passed), fullest_by_definition(&bucket(), &passed));
        }
    }

    #[test]
    fn cell_and_weighted_previous_cell_are_within_the_limit() {
        // Sixty in the first cell; half of them weigh half a minute later.
        let mut passed = vec![at(10.0, 10, 1); 60];
        passed.extend(vec![at(90.0, 10, 1); 30]);
        assert_eq!(OverAdmission::of(&window(), &passed).numerator, 0);
    }

    #[test]
    fn overfull_cell_and_previous_cell_weight_are_detected() {
        let over = OverAdmission::of(&window(), &vec![at(10.0, 10, 1); 61]);
        assert!((over.units() - 1.0).abs() < 1e-9);
        let mut passed = vec![at(10.0, 10, 1); 60];
        passed.extend(vec![at(90.0, 0, 1); 31]);
        assert!((OverAdmission::of(&window(), &passed).units() - 1.0).abs() < 1e-9);
    }

    #[test]
    fn decisions_across_a_cell_edge_are_not_over_admission() {
        let crossing = vec![at(59.9, SECOND_US, 1); 61];
        assert_eq!(OverAdmission::of(&window(), &crossing).numerator, 0);
    }
}
