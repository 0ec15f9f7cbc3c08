//! Counters of each tenant. The first tenants of the configuration have series of their own.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::registry::Unit;

use crate::auth::TenantIndex;
use crate::metrics::this_worker;

/// Tenants with series of their own; those beyond are added up under [`OTHER_TENANTS`]. Higher:
/// more series.
pub(crate) const TENANT_SERIES_MAX: usize = 100;
pub(crate) const OTHER_TENANTS: &str = "_other";

/// The counters of all tenants, for each worker.
#[derive(Debug)]
pub(crate) struct TenantMetrics {
    workers: Box<[Box<[TenantTally]>]>,
}

/// The counters of a tenant.
#[derive(Debug, Default)]
struct TenantTally {
    /// Nanoseconds of the worker's time.
    time_ns: AtomicU64,
    /// Requests that were shed.
    shed: AtomicU64,
}

impl TenantMetrics {
    /// Counters at zero.
    pub(crate) fn new(workers: usize, tenants: usize) -> Self {
        let tallies = || (0..tenants).map(|_| TenantTally::default()).collect();
        Self { workers: (0..workers.max(1)).map(|_| tallies()).collect() }
    }

    /// Adds nanoseconds of this worker's time.
    pub(crate) fn used_time(&self, tenant: TenantIndex, ns: u64) {
        if let Some(tally) = self.here(tenant) {
            tally.time_ns.fetch_add(ns, Ordering::Relaxed);
        }
    }

    /// Counts a request that was shed.
    pub(crate) fn shed(&self, tenant: TenantIndex) {
        if let Some(tally) = self.here(tenant) {
            tally.shed.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn here(&self, tenant: TenantIndex) -> Option<&TenantTally> {
        self.workers.get(this_worker()).or_else(|| self.workers.first())?.get(tenant)
    }

    /// Encodes the counters of tenants with these names.
    pub(crate) fn encode(&self, names: &[String], encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let about = "Time of the workers, by tenant";
        let mut time =
            encoder.encode_descriptor("tenant_time", about, Some(&Unit::Seconds), MetricType::Counter)?;
        for (name, ns) in self.series(names, |tally| &tally.time_ns) {
            ConstCounter::new(seconds(ns)).encode(time.encode_family(&[("tenant", name)])?)?;
        }
        let about = "Requests shed under overload, because their tenant was above its share";
        let mut shed = encoder.encode_descriptor("tenant_shed", about, None, MetricType::Counter)?;
        for (name, count) in self.series(names, |tally| &tally.shed) {
            ConstCounter::new(count).encode(shed.encode_family(&[("tenant", name)])?)?;
        }
        Ok(())
    }

    /// A value for each tenant, those beyond the cap added up.
    fn series<'n>(
        &self,
        names: &'n [String],
        of: impl Fn(&TenantTally) -> &AtomicU64,
    ) -> Vec<(&'n str, u64)> {
        let mut series: Vec<(&str, u64)> = Vec::new();
        for (tenant, name) in names.iter().enumerate() {
            let tallies = self.workers.iter().filter_map(|tallies| tallies.get(tenant));
            let value = tallies.map(|tally| of(tally).load(Ordering::Relaxed)).sum();
            if series.len() < TENANT_SERIES_MAX {
                series.push((name, value));
            } else if let Some((_, others)) = series.get_mut(TENANT_SERIES_MAX) {
                *others += value;
            } else {
                series.push((OTHER_TENANTS, value));
            }
        }
        series
    }
}

#[expect(clippy::cast_precision_loss, reason = "a sum of more than a hundred days loses nanoseconds")]
fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_beyond_the_cap_share_one_series() {
        let names: Vec<String> = (0..TENANT_SERIES_MAX + 3).map(|at| at.to_string()).collect();
        let metrics = TenantMetrics::new(2, names.len());
        for tenant in 0..names.len() {
            metrics.shed(tenant);
            metrics.used_time(tenant, 7);
        }
        metrics.shed(names.len());
        let shed = metrics.series(&names, |tally| &tally.shed);
        assert_eq!(shed.len(), TENANT_SERIES_MAX + 1);
        assert_eq!((shed.first(), shed.last()), (Some(&("0", 1)), Some(&(OTHER_TENANTS, 3))));
        assert_eq!(metrics.series(&names, |tally| &tally.time_ns).last(), Some(&(OTHER_TENANTS, 21)));
    }
}
