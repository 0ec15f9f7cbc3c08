//! The sliding window on integers: two fixed cells, the previous one weighted by its remaining
//! overlap.
//!
//! The wall clock identifies a cell, so that its edges fall where people expect them. A cell is
//! stored by its start on the monotonic line. So a step of the wall clock moves the edges by less
//! than a period and leaves elapsed time alone: no key is locked out for the length of the step.

use crate::limit::{Limit, PERIOD_US_MAX};
use crate::time::Now;
use crate::verdict::{Retry, Verdict};

/// Added to stored instants, µs, so that a cell that began before the line's zero still has a place
/// on it.
const LEAD_US: u64 = 1 << 46;

const _: () = assert!(LEAD_US > 2 * PERIOD_US_MAX);

/// The two cells of a meter. All zeroes is an empty meter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Cells {
    /// Where the current cell began on the monotonic line.
    start: u64,
    current: u32,
    previous: u32,
}

/// The cells as they stand at one instant: `elapsed` µs of the current one have passed.
#[derive(Clone, Copy, Debug)]
struct View {
    cells: Cells,
    elapsed_us: u64,
    period_us: u64,
}

impl Cells {
    pub(crate) const fn from_parts(start: u64, current: u32, previous: u32) -> Self {
        Self { start, current, previous }
    }

    pub(crate) const fn parts(self) -> (u64, u32, u32) {
        (self.start, self.current, self.previous)
    }

    /// A stored start as an instant on the monotonic line.
    pub(crate) const fn began_us(start: u64) -> u64 {
        start.saturating_sub(LEAD_US)
    }

    /// Whether both cells are over at `now` for windows of at most `period_us`.
    pub(crate) const fn are_over(start: u64, now_us: u64, period_us: u64) -> bool {
        now_us + LEAD_US >= start.saturating_add(period_us.saturating_mul(2))
    }
}

impl View {
    /// Rolls the cells forward to `now`.
    #[inline]
    fn at(limit: &Limit, before: Cells, now: Now) -> Self {
        let period_us = limit.period_us();
        let elapsed_us = now.wall_us() % period_us;
        let start = now.mono_us() + LEAD_US - elapsed_us;
        let ahead = before.start.saturating_sub(start);
        if ahead > period_us / 2 {
            // Another thread with a later reading has rolled the cells already: decide as at their
            // start.
            return Self { cells: before, elapsed_us: 0, period_us };
        }
        // The grid moves a little whenever the wall clock is corrected, so starts are compared in
        // whole cells.
        let rolls = (start.saturating_sub(before.start) + period_us / 2) / period_us;
        let cells = match rolls {
            0 => before,
            1 => Cells { start, current: 0, previous: before.current },
            _ => Cells { start, current: 0, previous: 0 },
        };
        Self { cells, elapsed_us, period_us }
    }

    /// Returns the weight of the previous cell, as a numerator over the period.
    #[inline]
    fn weighted(&self) -> u128 {
        u128::from(self.cells.previous) * u128::from(self.period_us - self.elapsed_us)
    }

    #[inline]
    fn weight_ceil(&self) -> u64 {
        ceil_div(self.weighted(), self.period_us)
    }

    /// Returns the microseconds until neither cell has weight, if the current one holds `current`.
    #[inline]
    fn reset_after_us(&self, current: u64) -> u64 {
        let to_edge = self.period_us - self.elapsed_us;
        match (current, self.cells.previous) {
            (0, 0) => 0,
            (0, _) => to_edge,
            _ => to_edge + self.period_us,
        }
    }

    /// Returns the microseconds until `cost` fits, if the current cell holds `current`.
    fn retry_after_us(&self, amount: u64, current: u64, cost: u64) -> u64 {
        if let Some(room) = amount.checked_sub(current + cost) {
            return self.fits_at(room, u64::from(self.cells.previous)) - self.elapsed_us;
        }
        let to_edge = self.period_us - self.elapsed_us;
        to_edge + self.fits_at(amount - cost, current)
    }

    /// How far into a cell its predecessor, which holds `previous`, has faded to `room`.
    fn fits_at(&self, room: u64, previous: u64) -> u64 {
        if previous <= room {
            return 0;
        }
        let overlap = u128::from(room) * u128::from(self.period_us) / u128::from(previous);
        // The quotient is below the period, since room is below previous.
        self.period_us - u64::try_from(overlap).unwrap_or(self.period_us)
    }
}

/// `weighted / period`, rounded up, in one machine word where it fits.
#[inline]
fn ceil_div(numerator: u128, denominator: u64) -> u64 {
    match u64::try_from(numerator) {
        Ok(small) => small.div_ceil(denominator),
        Err(_) => u64::try_from(numerator.div_ceil(u128::from(denominator))).unwrap_or(u64::MAX),
    }
}

/// Decides a request of `cost` on a meter with `reserved` more units in reservations. Returns the
/// cells after it, which are unchanged unless the request is allowed.
#[inline]
pub fn decide(limit: &Limit, before: Cells, reserved: u32, now: Now, cost: u64) -> (Verdict, Cells) {
    if limit.is_blocked() {
        return (Verdict::Deny { remaining: 0, reset_after_us: 0, retry: Retry::Blocked }, before);
    }
    let (amount, view) = (u64::from(limit.amount()), View::at(limit, before, now));
    let current = u64::from(view.cells.current);
    let held = current + u64::from(reserved);
    let Some(cost) = u32::try_from(cost).ok().filter(|&cost| cost <= limit.amount()) else {
        return (denial(&view, amount, held, Retry::CostAboveBurst), before);
    };
    let fits = amount
        .checked_sub(held + u64::from(cost))
        .is_some_and(|room| view.weighted() <= u128::from(room) * u128::from(view.period_us));
    if !fits {
        let retry = Retry::After(view.retry_after_us(amount, held, u64::from(cost)));
        return (denial(&view, amount, held, retry), before);
    }
    let charged = current + u64::from(cost);
    let remaining = remaining(&view, amount, held + u64::from(cost));
    let verdict = Verdict::Allow { remaining, reset_after_us: view.reset_after_us(charged) };
    (verdict, Cells { current: view.cells.current + cost, ..view.cells })
}

#[inline]
fn remaining(view: &View, amount: u64, held: u64) -> u32 {
    u32::try_from(amount.saturating_sub(held).saturating_sub(view.weight_ceil())).unwrap_or(u32::MAX)
}

fn denial(view: &View, amount: u64, held: u64, retry: Retry) -> Verdict {
    let reset_after_us = view.reset_after_us(u64::from(view.cells.current));
    Verdict::Deny { remaining: remaining(view, amount, held), reset_after_us, retry }
}

/// Adds `cost` without a test; the cell stops at 4,294,967,295.
pub fn charge(limit: &Limit, before: Cells, now: Now, cost: u64) -> Cells {
    let cells = View::at(limit, before, now).cells;
    let current = u64::from(cells.current).saturating_add(cost);
    Cells { current: u32::try_from(current).unwrap_or(u32::MAX), ..cells }
}

/// Refunds `cost`: from the current cell, and the rest from the previous one.
pub fn refund(limit: &Limit, before: Cells, now: Now, cost: u64) -> Cells {
    let cells = View::at(limit, before, now).cells;
    let rest = cost.saturating_sub(u64::from(cells.current));
    let less = |count: u32, cost: u64| count.saturating_sub(u32::try_from(cost).unwrap_or(u32::MAX));
    Cells { current: less(cells.current, cost), previous: less(cells.previous, rest), ..cells }
}

/// Raises the meter to at least `used` units, which another party knows to be spent.
pub fn raise(limit: &Limit, before: Cells, now: Now, used: u64) -> Cells {
    let view = View::at(limit, before, now);
    let weight = u64::try_from(view.weighted() / u128::from(view.period_us)).unwrap_or(u64::MAX);
    let floor = u32::try_from(used.saturating_sub(weight)).unwrap_or(u32::MAX);
    Cells { current: view.cells.current.max(floor), ..view.cells }
}

/// Returns the units that are spent and still have weight, rounded up.
pub fn used(limit: &Limit, before: Cells, now: Now) -> u64 {
    let view = View::at(limit, before, now);
    u64::from(view.cells.current) + view.weight_ceil()
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const MINUTE_US: u64 = 60_000_000;

    fn per_minute(amount: u64) -> Limit {
        Limit::sliding_window(amount, Duration::from_mins(1)).expect("in range")
    }

    /// Both clocks at the same reading.
    fn at(us: u64) -> Now {
        Now::from_micros(us, us)
    }

    fn spend(limit: &Limit, cells: Cells, now: Now, times: u32) -> Cells {
        (0..times).fold(cells, |cells, _| {
            let (verdict, after) = decide(limit, cells, 0, now, 1);
            assert!(verdict.is_allowed(), "{now:?} {verdict:?}");
            after
        })
    }

    #[test]
    fn the_previous_cell_fades_with_the_window() {
        let limit = per_minute(100);
        let full = spend(&limit, Cells::default(), at(MINUTE_US - 1), 100);
        assert!(!decide(&limit, full, 0, at(MINUTE_US), 1).0.is_allowed());
        // Half a window later half of the previous cell is left.
        let (verdict, _) = decide(&limit, full, 0, at(MINUTE_US + MINUTE_US / 2), 0);
        assert_eq!(verdict, Verdict::Allow { remaining: 50, reset_after_us: MINUTE_US / 2 });
        let (verdict, _) = decide(&limit, full, 0, at(3 * MINUTE_US), 0);
        assert_eq!(verdict, Verdict::Allow { remaining: 100, reset_after_us: 0 });
    }

    #[test]
    fn retry_is_exact_inside_the_cell_and_across_its_edge() {
        let limit = per_minute(10);
        let cells = spend(&limit, Cells::default(), at(0), 10);
        for (now, cost) in [(5, 1), (5, 10), (MINUTE_US + 7, 1), (MINUTE_US + 7, 3)] {
            let (verdict, _) = decide(&limit, cells, 0, at(now), cost);
            let wait = verdict.retry().and_then(Retry::after_us).expect("denied for now");
            assert!(decide(&limit, cells, 0, at(now + wait), cost).0.is_allowed(), "{now} {cost} {wait}");
            assert!(
                !decide(&limit, cells, 0, at(now + wait - 1), cost).0.is_allowed(),
                "{now} {cost} {wait}"
            );
        }
    }

    #[test]
    fn a_thread_with_an_older_reading_is_judged_by_the_newer_cell() {
        let limit = per_minute(10);
        let full = spend(&limit, Cells::default(), at(MINUTE_US - 1), 10);
        let rolled = charge(&limit, full, at(MINUTE_US), 0);
        let (verdict, _) = decide(&limit, rolled, 0, at(MINUTE_US - 1), 1);
        assert!(!verdict.is_allowed());
    }

    #[test]
    fn a_wall_step_of_an_hour_neither_unlocks_nor_locks_out() {
        let limit = per_minute(10);
        let hour = 60 * MINUTE_US;
        let start = Now::from_micros(hour, 10 * hour + 5);
        let full = spend(&limit, Cells::default(), start, 10);
        for wall in [9 * hour + 6, 11 * hour + 6] {
            let soon = Now::from_micros(hour + 1, wall);
            assert!(!decide(&limit, full, 0, soon, 1).0.is_allowed(), "unlocked by the step");
            let later = Now::from_micros(hour + 2 * MINUTE_US, wall + 2 * MINUTE_US);
            assert!(decide(&limit, full, 0, later, 1).0.is_allowed(), "locked out by the step");
        }
    }

    #[test]
    fn a_step_that_shifts_the_grid_grants_at_most_one_burst() {
        let limit = Limit::sliding_window(10, Duration::from_hours(1)).expect("in range");
        let hour = 60 * MINUTE_US;
        for step in (0..hour).step_by(7 * 60_000_000) {
            let full = spend(&limit, Cells::default(), Now::from_micros(9 * hour, 9 * hour + 100), 10);
            let (mut cells, mut passed) = (full, 0);
            for minute in 0..60 {
                let now = Now::from_micros(
                    9 * hour + minute * MINUTE_US,
                    9 * hour + 100 + step + minute * MINUTE_US,
                );
                let (verdict, after) = decide(&limit, cells, 0, now, 1);
                passed += u32::from(verdict.is_allowed());
                cells = after;
            }
            assert!(passed <= 10, "step {step}: {passed} more in the hour");
            let now = Now::from_micros(12 * hour, 12 * hour + 100 + step);
            assert!(decide(&limit, full, 0, now, 10).0.is_allowed(), "step {step}: locked out");
        }
    }

    #[test]
    fn extremes_do_not_overflow() {
        let limit = Limit::sliding_window(u64::from(u32::MAX), Duration::from_hours(8784)).expect("in range");
        let far = Now::from_micros(u64::MAX, u64::MAX);
        let cells = charge(&limit, charge(&limit, Cells::default(), far, u64::MAX), far, u64::MAX);
        let (verdict, _) = decide(&limit, cells, u32::MAX, far, u64::from(u32::MAX));
        assert!(!verdict.is_allowed());
        assert_eq!(used(&limit, refund(&limit, cells, far, u64::MAX), far), 0);
        assert_eq!(used(&limit, raise(&limit, Cells::default(), far, u64::MAX), far), u64::from(u32::MAX));
        for cost in [u64::from(u32::MAX) + 1, 1 << 53, u64::MAX] {
            assert_eq!(decide(&limit, cells, 0, far, cost).0.retry(), Some(Retry::CostAboveBurst));
        }
    }
}
