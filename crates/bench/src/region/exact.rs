//! The cost that one exact bucket lets pass of the same requests.

use tidegate::{Algorithm, Limit, Now};
use tidegate_oracle::{Bucket, Cells, Level, Model};

/// A request as it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arrival {
    pub(crate) cost: u64,
    pub(crate) sent_us: u64,
}

/// The cost that passes of these requests of one key, each decided when it was sent, after `before`
/// passed.
pub(crate) fn passes(limit: &Limit, before: Option<Arrival>, arrivals: &[Arrival]) -> u64 {
    match limit.algorithm() {
        Algorithm::Gcra => replay::<Bucket>(limit, before, arrivals),
        Algorithm::SlidingWindow => replay::<Cells>(limit, before, arrivals),
    }
}

fn replay<L: Level>(limit: &Limit, before: Option<Arrival>, arrivals: &[Arrival]) -> u64 {
    let mut in_order = arrivals.to_vec();
    in_order.sort_by_key(|arrival| arrival.sent_us);
    let mut model = Model::<L>::empty(limit);
    let now = |arrival: Arrival| Now::from_micros(arrival.sent_us, arrival.sent_us);
    if let Some(before) = before {
        model.charge(now(before), before.cost);
    }
    let mut decides = |arrival: &Arrival| model.decide(now(*arrival), arrival.cost).is_allowed();
    in_order.iter().filter(|arrival| decides(arrival)).map(|arrival| arrival.cost).sum()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const MINUTE_US: u64 = 60_000_000;
    const START_US: u64 = 1_794_000_000_000_000;

    fn at(time_us: u64, cost: u64) -> Arrival {
        Arrival { cost, sent_us: START_US + time_us }
    }

    #[test]
    fn bucket_admits_its_burst_and_the_drained_units() {
        let limit = Limit::gcra(60, Duration::from_mins(1)).unwrap();
        let each_quarter: Vec<Arrival> = (0..=240).rev().map(|at_s| at(at_s * 250_000, 1)).collect();
        assert_eq!(passes(&limit, None, &each_quarter), 120);
        assert_eq!(passes(&limit, Some(at(0, 60)), &each_quarter), 60, "a burst less");
    }

    #[test]
    fn cells_admit_the_remaining_units_of_the_limit() {
        let limit = Limit::sliding_window(60, Duration::from_mins(1)).unwrap();
        let at_once = vec![at(0, 7); 10];
        assert_eq!(passes(&limit, None, &at_once), 56);
        let half_a_cell_later = vec![at(MINUTE_US + MINUTE_US / 2, 1); 60];
        assert_eq!(passes(&limit, Some(at(0, 60)), &half_a_cell_later), 30);
    }
}
