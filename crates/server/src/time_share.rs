//! The time of a worker, by tenant. Under overload, a worker sheds the tenants above their share.
//!
//! A connection belongs to the tenant of its last request. After each turn of a connection the
//! worker reads the clock once, and charges the time since the last reading to that tenant. A
//! worker that wakes up reads the clock too, so that no tenant pays for its sleep.
//!
//! The share of a tenant is max-min fair: the tenants that used time divide three quarters of it by
//! their weights. Time that one of them leaves goes to the others. So a tenant that uses less than
//! its part is never shed, whatever the other tenants do, and at least one tenant is above its
//! share.

use std::cell::{Cell, OnceCell};
use std::time::Instant;

use crate::auth::TenantIndex;
use crate::metrics::Metrics;

/// The part of the used time that the tenants share under overload, in percent. Higher: fewer
/// tenants are shed, and the worker takes longer to catch up.
const SHARED_PERCENT: u64 = 75;

/// A tenant's use is remembered for about so many looks at the load, less with each. Higher: a
/// tenant that has just become busy counts for less; a share changes more slowly.
const LOOKS_REMEMBERED: u64 = 8;

thread_local! {
    /// Only a worker has one.
    static TIME: OnceCell<WorkerTime> = const { OnceCell::new() };
}

/// The time of one worker.
#[derive(Debug)]
struct WorkerTime {
    /// The last reading of the clock.
    read: Cell<Instant>,
    /// By [`TenantIndex`].
    tenants: Box<[TenantTime]>,
    /// Nanoseconds of clients without a valid token.
    of_strangers: UsedTime,
}

/// The time of one tenant.
#[derive(Debug)]
struct TenantTime {
    weight: u64,
    used: UsedTime,
    is_above_share: Cell<bool>,
}

/// Nanoseconds of a worker's time.
#[derive(Debug, Default)]
struct UsedTime {
    /// Since the last look.
    fresh: Cell<u64>,
    /// Before that, less the longer ago it was.
    recent: Cell<u64>,
}

impl UsedTime {
    #[inline]
    fn add(&self, ns: u64) {
        self.fresh.set(self.fresh.get() + ns);
    }

    /// Adds the fresh time to the recent one, and returns it.
    fn settle(&self) -> u64 {
        let fresh = self.fresh.take();
        let recent = self.recent.get();
        self.recent.set(recent - recent.div_ceil(LOOKS_REMEMBERED) + fresh);
        fresh
    }
}

/// Makes this thread a worker for tenants of these weights.
pub(crate) fn start(weights: &[u32]) {
    let tenants = weights.iter().map(|weight| TenantTime {
        weight: u64::from(*weight).max(1),
        used: UsedTime::default(),
        is_above_share: Cell::new(true),
    });
    let time =
        WorkerTime { read: Cell::new(now()), tenants: tenants.collect(), of_strangers: UsedTime::default() };
    // A thread becomes a worker once.
    TIME.with(|of_thread| drop(of_thread.set(time)));
}

/// Reads the clock, and charges the time since the last reading to a tenant, or to clients without
/// a valid token.
#[inline]
pub(crate) fn charge(tenant: Option<TenantIndex>) {
    TIME.with(|time| {
        if let Some(time) = time.get() {
            time.charge(tenant, now());
        }
    });
}

/// Charges a time to a tenant, as if the worker had spent it.
#[cfg(test)]
pub(crate) fn charge_ns(tenant: TenantIndex, ns: u64) {
    TIME.with(|time| {
        let of_tenant = time.get().and_then(|time| time.tenants.get(tenant));
        of_tenant.expect("a worker with this tenant").used.add(ns);
    });
}

/// Reads the clock after a time in which the worker slept.
pub(crate) fn wake() {
    TIME.with(|time| {
        if let Some(time) = time.get() {
            time.read.set(now());
        }
    });
}

/// Exports the time that tenants used since the last look. If the worker is late, finds the tenants
/// above their share.
pub(crate) fn settle(metrics: &Metrics, is_late: bool) {
    TIME.with(|time| {
        if let Some(time) = time.get() {
            time.settle(is_late, |tenant, ns| metrics.tenants.used_time(tenant, ns));
        }
    });
}

/// Whether a tenant used more than its share of this worker's time, when the worker was last late.
/// On a thread that is no worker, every tenant has.
pub(crate) fn is_above_share(tenant: TenantIndex) -> bool {
    TIME.with(|time| {
        let of_tenant = time.get().and_then(|time| time.tenants.get(tenant));
        of_tenant.is_none_or(|of_tenant| of_tenant.is_above_share.get())
    })
}

#[expect(clippy::disallowed_methods, reason = "the time that a tenant takes is what is measured")]
fn now() -> Instant {
    Instant::now()
}

impl WorkerTime {
    #[inline]
    fn charge(&self, tenant: Option<TenantIndex>, now: Instant) {
        let spent = now.saturating_duration_since(self.read.replace(now));
        let ns = u64::try_from(spent.as_nanos()).unwrap_or(u64::MAX);
        let of_tenant = tenant.and_then(|tenant| self.tenants.get(tenant));
        of_tenant.map_or(&self.of_strangers, |of_tenant| &of_tenant.used).add(ns);
    }

    fn settle(&self, is_late: bool, mut export: impl FnMut(TenantIndex, u64)) {
        self.of_strangers.settle();
        for (tenant, time) in self.tenants.iter().enumerate() {
            let ns = time.used.settle();
            if ns > 0 {
                export(tenant, ns);
            }
        }
        if is_late {
            self.find_above_share();
        }
    }

    /// Divides the shared time: each tenant that used less than its part leaves the rest to those
    /// that used more. The others are above their share.
    fn find_above_share(&self) {
        let strangers = (self.of_strangers.recent.get(), 1, None);
        let of_tenants = self.tenants.iter().map(|time| (time.used.recent.get(), time.weight, Some(time)));
        let mut active: Vec<_> =
            of_tenants.chain([strangers]).filter(|(recent, weight, _)| *recent > 0 && *weight > 0).collect();
        active.sort_unstable_by_key(|(recent, weight, _)| u128::from(*recent) * SCALE / u128::from(*weight));
        let used: u64 = active.iter().map(|(recent, ..)| recent).sum();
        let mut shared = u128::from(used) * u128::from(SHARED_PERCENT) / 100;
        let mut weights: u128 = active.iter().map(|(_, weight, _)| u128::from(*weight)).sum();
        // Nothing is known of a worker that is late before its first turn: all are shed, as one is.
        self.tenants.iter().for_each(|time| time.is_above_share.set(active.is_empty()));
        for (at, (recent, weight, _)) in active.iter().enumerate() {
            let (recent, weight) = (u128::from(*recent), u128::from(*weight));
            if recent * weights > shared * weight {
                let above = active[at..].iter().filter_map(|(.., time)| *time);
                return above.for_each(|time| time.is_above_share.set(true));
            }
            shared -= recent;
            weights -= weight;
        }
    }
}

/// Keeps the order of tenants with similar use for their weights.
const SCALE: u128 = 1 << 32;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn worker(weights: &[u64]) -> WorkerTime {
        let tenants = weights.iter().map(|weight| TenantTime {
            weight: *weight,
            used: UsedTime::default(),
            is_above_share: Cell::new(false),
        });
        let (tenants, of_strangers) = (tenants.collect(), UsedTime::default());
        WorkerTime { read: Cell::new(now()), tenants, of_strangers }
    }

    /// Which tenants are above their share after they used these times.
    fn above(weights: &[u64], used: &[u64], of_strangers: u64) -> Vec<bool> {
        let time = worker(weights);
        time.of_strangers.add(of_strangers);
        time.tenants.iter().zip(used).for_each(|(time, ns)| time.used.add(*ns));
        time.settle(true, |_, _| {});
        time.tenants.iter().map(|time| time.is_above_share.get()).collect()
    }

    #[test]
    fn the_tenant_above_its_share_is_shed_and_others_are_not() {
        assert_eq!(above(&[1, 1], &[90, 10], 0), [true, false]);
        assert_eq!(above(&[1], &[100], 0), [true], "one tenant alone overloads its server");
        assert_eq!(above(&[1, 1], &[50, 50], 0), [true, true], "both do");
        assert_eq!(above(&[1, 1], &[0, 0], 0), [true, true], "nothing is known");
        assert_eq!(above(&[1, 1], &[0, 100], 0), [false, true]);
        assert_eq!(above(&[1, 4], &[40, 60], 0), [true, false], "by weight");
        assert_eq!(above(&[1, 1], &[5, 10], 85), [false, false], "clients without a token are the cause");
        // The others divide the time that fifty small tenants leave.
        let mut used = vec![1; 50];
        used.extend([200, 750]);
        let found = above(&[1; 52], &used, 0);
        assert_eq!(found.iter().filter(|is_above| **is_above).count(), 1);
        assert_eq!(found.last(), Some(&true));
    }

    #[test]
    fn time_is_charged_from_reading_to_reading_and_forgotten_by_and_by() {
        let time = worker(&[1, 1]);
        let start = time.read.get();
        let at = |ms| start + Duration::from_millis(ms);
        time.charge(Some(1), at(30));
        time.charge(None, at(31));
        time.charge(Some(0), at(36));
        let mut exported = Vec::new();
        time.settle(false, |tenant, ns| exported.push((tenant, ns)));
        assert_eq!(exported, [(0, 5_000_000), (1, 30_000_000)]);
        assert_eq!(time.tenants[1].used.recent.get(), 30_000_000);
        (0..8).for_each(|_| time.settle(false, |_, _| {}));
        let recent = time.tenants[1].used.recent.get();
        assert!((9_000_000..12_000_000).contains(&recent), "{recent}");
        (0..200).for_each(|_| time.settle(false, |_, _| {}));
        assert_eq!(time.tenants[1].used.recent.get(), 0);
    }

    proptest! {
        /// No tenant below its part of the shared time is shed, whatever the others use, and
        /// overload by tenants always has a tenant above its share.
        #[test]
        fn a_tenant_below_its_part_is_never_above_its_share(
            tenants in prop::collection::vec((1..5_u64, 0..1_000_000_u64), 1..12),
            of_strangers in 0..1_000_u64,
        ) {
            let (weights, used): (Vec<u64>, Vec<u64>) = tenants.iter().copied().unzip();
            let all = used.iter().sum::<u64>() + of_strangers;
            let whole: u64 = 1 + weights.iter().sum::<u64>();
            let found = above(&weights, &used, of_strangers);
            for ((is_above, used), weight) in found.iter().zip(&used).zip(&weights) {
                prop_assert!(!is_above || all == 0 || used * whole * 100 >= all * weight * SHARED_PERCENT);
            }
            let most = used.iter().zip(&weights).map(|(used, weight)| used * 1_000 / weight).max();
            if most > Some(1_000 * of_strangers) {
                prop_assert!(found.contains(&true));
            }
        }
    }
}
