//! The comparison can fail: each of these meters is wrong in one way, and each is found.

#![expect(clippy::expect_used, reason = "a helper of tests may panic as a test may")]

use std::time::Duration;

use tidegate_core::{Limit, Meter, Now, Retry, Verdict};
use tidegate_oracle::{Bucket, Cells, Level, Plan, Report, Subject, campaign};

/// A meter that is the product's but for the methods given.
macro_rules! mutant {
    ($name:ident { $($methods:tt)* }) => {
        #[derive(Clone, Copy)]
        struct $name(Meter);

        impl Subject for $name {
            fn meter(self) -> Meter {
                self.0
            }

            fn around(meter: Meter) -> Self {
                Self(meter)
            }

            $($methods)*
        }
    };
}

fn found<L: Level, S: Subject>() -> Box<Report> {
    let plan = Plan { seed: 1, decisions: 200_000, threads: 1 };
    let report = campaign::<L, S>(&plan, |_| ()).expect_err("the mutant must be found");
    assert!((1..=5).contains(&report.steps.len()), "not short: {report}");
    report
}

fn found_in_both<S: Subject>() -> [&'static str; 2] {
    [found::<Bucket, S>().difference.property, found::<Cells, S>().difference.property]
}

/// The same rate with the time of one unit cut to whole microseconds.
fn rounded(limit: &Limit) -> Limit {
    let unit_us = limit.period_us() / u64::from(limit.amount().max(1));
    let rounded = Limit::gcra(limit.amount().min(1).into(), Duration::from_micros(unit_us));
    rounded.and_then(|rounded| rounded.with_burst(limit.burst().into())).unwrap_or(*limit)
}

mutant!(RoundedInterval {
    fn decide(self, limit: &Limit, now: Now, cost: u64) -> (Verdict, Self) {
        let (verdict, meter) = self.0.decide(&rounded(limit), now, cost);
        (verdict, Self(meter))
    }

    fn reserve(self, limit: &Limit, now: Now, cost: u64) -> (Verdict, Self) {
        let (verdict, meter) = self.0.reserve(&rounded(limit), now, cost);
        (verdict, Self(meter))
    }

    fn commit(self, limit: &Limit, now: Now, reserved: u64, actual: u64) -> Self {
        Self(self.0.commit(&rounded(limit), now, reserved, actual))
    }

    fn charge(self, limit: &Limit, now: Now, cost: u64) -> Self {
        Self(self.0.charge(&rounded(limit), now, cost))
    }

    fn refund(self, limit: &Limit, now: Now, cost: u64) -> Self {
        Self(self.0.refund(&rounded(limit), now, cost))
    }

    fn merge(self, limit: &Limit, now: Now, used: u64) -> Self {
        Self(self.0.merge(&rounded(limit), now, used))
    }

    fn used(self, limit: &Limit, now: Now) -> u64 {
        Meter::used(&self.0, &rounded(limit), now)
    }
});

#[test]
fn an_interval_of_whole_microseconds() {
    found::<Bucket, RoundedInterval>();
}

fn with_retry(verdict: Verdict, change: impl Fn(u64) -> u64) -> Verdict {
    match verdict {
        Verdict::Deny { remaining, reset_after_us, retry: Retry::After(us) } => {
            Verdict::Deny { remaining, reset_after_us, retry: Retry::After(change(us)) }
        }
        other => other,
    }
}

mutant!(LateRetry {
    fn decide(self, limit: &Limit, now: Now, cost: u64) -> (Verdict, Self) {
        let (verdict, meter) = self.0.decide(limit, now, cost);
        (with_retry(verdict, |us| us + 1), Self(meter))
    }
});

mutant!(EarlyRetry {
    fn decide(self, limit: &Limit, now: Now, cost: u64) -> (Verdict, Self) {
        let (verdict, meter) = self.0.decide(limit, now, cost);
        (with_retry(verdict, |us| us - 1), Self(meter))
    }
});

#[test]
fn a_retry_that_is_off_by_one_microsecond() {
    assert_eq!(found_in_both::<LateRetry>(), ["verdict of decide"; 2]);
    assert_eq!(found_in_both::<EarlyRetry>(), ["verdict of decide"; 2]);
}

mutant!(IgnoresReservations {
    fn decide(self, limit: &Limit, now: Now, cost: u64) -> (Verdict, Self) {
        let (verdict, _) = self.0.rollback(u64::MAX).decide(limit, now, cost);
        let after = if verdict.is_allowed() { self.0.charge(limit, now, cost) } else { self.0 };
        (verdict, Self(after))
    }
});

#[test]
fn reservations_that_do_not_count() {
    found_in_both::<IgnoresReservations>();
}

mutant!(MillisecondClock {
    fn decide(self, limit: &Limit, now: Now, cost: u64) -> (Verdict, Self) {
        let whole = |us| us - us % 1_000;
        let now = Now::from_micros(whole(now.mono_us()), whole(now.wall_us()));
        let (verdict, meter) = self.0.decide(limit, now, cost);
        (verdict, Self(meter))
    }
});

mutant!(EarlyEdge {
    fn decide(self, limit: &Limit, now: Now, cost: u64) -> (Verdict, Self) {
        let now = Now::from_micros(now.mono_us(), now.wall_us() + 1);
        let (verdict, meter) = self.0.decide(limit, now, cost);
        (verdict, Self(meter))
    }
});

#[test]
fn a_clock_that_is_coarse_or_shifted() {
    found_in_both::<MillisecondClock>();
    found::<Cells, EarlyEdge>();
}

mutant!(ChargesDenied {
    fn decide(self, limit: &Limit, now: Now, cost: u64) -> (Verdict, Self) {
        let (verdict, meter) = self.0.decide(limit, now, cost);
        let after = if verdict.is_allowed() { meter } else { meter.charge(limit, now, 1) };
        (verdict, Self(after))
    }
});

mutant!(ForgetsCharge {
    fn charge(self, _: &Limit, _: Now, _: u64) -> Self {
        self
    }
});

mutant!(ForgetsRefund {
    fn refund(self, _: &Limit, _: Now, _: u64) -> Self {
        self
    }
});

mutant!(MergeAdds {
    fn merge(self, limit: &Limit, now: Now, used: u64) -> Self {
        Self(self.0.charge(limit, now, used))
    }
});

mutant!(CommitsWhatWasReserved {
    fn commit(self, limit: &Limit, now: Now, reserved: u64, _: u64) -> Self {
        Self(self.0.commit(limit, now, reserved, reserved.min(u32::MAX.into())))
    }
});

mutant!(ForgetsRollback {
    fn rollback(self, _: u64) -> Self {
        self
    }
});

mutant!(ResetsReservations {
    fn reset(self, limit: &Limit) -> Self {
        Self(Meter::empty(limit))
    }
});

mutant!(ForgetsReset {
    fn reset(self, _: &Limit) -> Self {
        self
    }
});

#[test]
fn a_charge_that_should_not_be_or_should() {
    found_in_both::<ChargesDenied>();
    assert_eq!(found_in_both::<ForgetsCharge>(), ["used"; 2]);
}

#[test]
fn every_other_change_that_goes_wrong() {
    assert_eq!(found_in_both::<ForgetsRefund>(), ["used"; 2]);
    assert_eq!(found_in_both::<MergeAdds>(), ["used"; 2]);
    assert_eq!(found_in_both::<CommitsWhatWasReserved>(), ["used"; 2]);
    assert_eq!(found_in_both::<ResetsReservations>(), ["reserved"; 2]);
    assert_eq!(found_in_both::<ForgetsReset>(), ["used"; 2]);
    found_in_both::<ForgetsRollback>();
}

mutant!(Panics {
    fn decide(self, limit: &Limit, now: Now, cost: u64) -> (Verdict, Self) {
        assert!(cost < u64::MAX, "a planted mutant");
        let (verdict, meter) = self.0.decide(limit, now, cost);
        (verdict, Self(meter))
    }
});

#[test]
fn a_panic_is_reported_with_its_history() {
    let report = found::<Bucket, Panics>();
    assert_eq!(report.difference.property, "answer");
    assert!(report.to_string().contains("Decide { cost: 18446744073709551615 }"), "{report}");
}
