//! The oracle itself, on examples computed by hand.

#![expect(clippy::unwrap_used, reason = "a helper of tests may panic as a test may")]

use std::time::Duration;

use tidegate_core::{Limit, Now, Retry, Verdict};
use tidegate_oracle::{Bucket, Cells, Model};

const DAY_US: u64 = 86_400_000_000;

fn gcra(amount: u64, period_us: u64, burst: u64) -> Limit {
    Limit::gcra(amount, Duration::from_micros(period_us)).and_then(|l| l.with_burst(burst)).unwrap()
}

fn bucket(amount: u64, period_us: u64, burst: u64) -> Model<Bucket> {
    Model::empty(&gcra(amount, period_us, burst))
}

/// Ten in a window of 100 us.
fn window() -> Model<Cells> {
    Model::empty(&Limit::sliding_window(10, Duration::from_micros(100)).unwrap())
}

fn at(us: u64) -> Now {
    Now::from_micros(us, us)
}

fn allow(remaining: u32, reset_after_us: u64) -> Verdict {
    Verdict::Allow { remaining, reset_after_us }
}

fn deny(remaining: u32, reset_after_us: u64, retry: Retry) -> Verdict {
    Verdict::Deny { remaining, reset_after_us, retry }
}

#[test]
fn seven_per_second() {
    let mut key = bucket(7, 1_000_000, 7);
    // A seventh of a second is 142,857.14 us.
    assert_eq!(key.decide(at(0), 1), allow(6, 142_858));
    assert_eq!(key.decide(at(0), 6), allow(0, 1_000_000));
    assert_eq!(key.decide(at(0), 1), deny(0, 1_000_000, Retry::After(142_858)));
    assert_eq!(key.decide(at(142_857), 1), deny(0, 857_143, Retry::After(1)));
    // The level is 5.999994 before and 6.999994 after, which drains in 999,999.14 us.
    assert_eq!(key.decide(at(142_858), 1), allow(0, 1_000_000));
    assert_eq!(key.used(at(142_858)), 7);
    // 142,858 us later it is 5.999988: six in whole units.
    assert_eq!(key.used(at(285_716)), 6);
    assert_eq!(key.decide(at(2_000_000), 0), allow(7, 0));
}

#[test]
fn reservations_count_against_a_bucket_but_are_not_used() {
    let mut key = bucket(10, 10, 10);
    assert_eq!(key.reserve(at(0), 4), allow(6, 4));
    assert_eq!((key.reserved(), key.used(at(0))), (4, 0));
    assert_eq!(key.decide(at(0), 6), allow(0, 6));
    assert_eq!(key.decide(at(0), 0), allow(0, 6));
    assert_eq!(key.decide(at(0), 3), deny(0, 6, Retry::After(3)));
    // At 2 us the level is 4; with the reservation as if committed now it is 8, and 5 more fit
    // after 3 us.
    assert_eq!(key.decide(at(2), 5), deny(2, 4, Retry::After(3)));
    key.rollback(3);
    assert_eq!(key.reserved(), 1);
    key.commit(at(2), 1, 2);
    assert_eq!((key.reserved(), key.used(at(2))), (0, 6));
}

#[test]
fn a_bucket_may_be_charged_into_debt_and_be_given_back() {
    let limit = gcra(10, 10, 10);
    let mut key = Model::<Bucket>::empty(&limit);
    key.charge(at(0), 15);
    assert_eq!(key.decide(at(0), 0), deny(0, 15, Retry::After(5)));
    assert_eq!(key.decide(at(0), 10), deny(0, 15, Retry::After(15)));
    key.refund(at(0), 6);
    assert_eq!(key.decide(at(0), 0), allow(1, 9));
    key.refund(at(0), 10);
    assert_eq!(key.decide(at(0), 0), allow(10, 0));
    key.merge(at(0), 3);
    key.merge(at(0), 2);
    assert_eq!(key.used(at(0)), 3);
    key.reset(&limit);
    assert_eq!(key.used(at(0)), 0);
}

#[test]
fn debt_ends_at_7320_days_of_drain() {
    let mut key = bucket(1, 366 * DAY_US, 10);
    key.charge(at(0), 100);
    assert_eq!(key.used(at(0)), 20);
    assert_eq!(key.decide(at(0), 1), deny(0, 7_320 * DAY_US, Retry::After(11 * 366 * DAY_US)));
}

#[test]
fn never_allowed_request_has_a_reason() {
    assert_eq!(bucket(0, 1, 5).decide(at(9), 1), deny(0, 0, Retry::Blocked));
    assert_eq!(bucket(0, 1, 5).decide(at(9), 6), deny(0, 0, Retry::Blocked));
    assert_eq!(bucket(10, 10, 5).decide(at(9), 6), deny(5, 0, Retry::CostAboveBurst));
    assert_eq!(bucket(10, 10, 5).decide(at(9), u64::MAX), deny(5, 0, Retry::CostAboveBurst));
    assert_eq!(window().decide(at(9), 11), deny(10, 0, Retry::CostAboveBurst));
    let none = Limit::sliding_window(0, Duration::from_micros(100)).unwrap();
    assert_eq!(Model::<Cells>::empty(&none).decide(at(9), 0), deny(0, 0, Retry::Blocked));
}

#[test]
fn previous_cell_is_weighted_by_its_remaining_time() {
    let mut key = window();
    assert_eq!(key.decide(at(250), 8), allow(2, 150));
    // At 310 the previous cell weighs 8 * 90 / 100 = 7.2.
    assert_eq!(key.decide(at(310), 2), allow(0, 190));
    assert_eq!(key.used(at(310)), 10);
    // 3 + 8 * (100 - e) / 100 <= 10 from e = 12.5 on.
    assert_eq!(key.decide(at(310), 1), deny(0, 190, Retry::After(3)));
    assert_eq!(key.decide(at(312), 1), deny(0, 188, Retry::After(1)));
    // 2 + 9 never fit into one cell; in the next, 9 + 2 * (100 - e) / 100 <= 10 from e = 50 on.
    assert_eq!(key.decide(at(312), 9), deny(0, 188, Retry::After(138)));
    assert_eq!(key.decide(at(313), 1), allow(0, 187));
    assert_eq!(key.decide(at(400), 0), allow(7, 100));
    assert_eq!(key.decide(at(499), 0), allow(9, 1));
    assert_eq!(key.decide(at(500), 0), allow(10, 0));
}

#[test]
fn a_window_gives_back_from_the_current_cell_first() {
    let mut key = window();
    key.charge(at(250), 8);
    key.charge(at(310), 2);
    key.refund(at(310), 5);
    // 5 * 90 / 100 = 4.5 of the previous cell are left, and none of the current one.
    assert_eq!(key.used(at(310)), 5);
    assert_eq!(key.decide(at(310), 0), allow(5, 90));
    // Merging counts them as 4, so that at least 7 are spent with either rounding.
    key.merge(at(310), 7);
    assert_eq!(key.used(at(310)), 8);
    key.merge(at(310), 3);
    assert_eq!(key.used(at(310)), 8);
    key.charge(at(310), u64::MAX);
    assert_eq!(key.used(at(310)), u64::from(u32::MAX) + 5);
}

#[test]
fn reservations_count_against_a_window_as_if_committed_now() {
    let mut key = window();
    assert_eq!(key.reserve(at(250), 4), allow(6, 150));
    assert_eq!(key.decide(at(250), 0), allow(6, 0));
    // Committed now they are 4 of the next cell's previous one: 7 + 4 * (100 - e) / 100 <= 10 from
    // e = 25 on.
    assert_eq!(key.decide(at(250), 7), deny(6, 0, Retry::After(75)));
    key.commit(at(260), 4, 3);
    assert_eq!((key.reserved(), key.used(at(260))), (0, 3));
    assert_eq!(key.decide(at(260), 7), allow(0, 140));
}
