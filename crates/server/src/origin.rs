//! The region that a server is a part of.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tidegate::region::redis::{RedisCertificates, RedisConfig, RedisOrigin, Servers};
use tidegate::region::{EngineSettings, MemoryOrigin, MultiRegionConfig, Origin, Region};
use tidegate::{Clock, Limiter, SystemClock};
use tidegate_core::bound::{Fleet, LAG_ALARM_US};
use tokio::time::MissedTickBehavior;

use crate::rules::read_text;
use crate::shared::Shared;

/// The largest file of certificates.
pub(crate) const PEM_BYTES_MAX: usize = 1 << 20;

/// The store of a region's meters.
#[derive(Clone, Debug, Default)]
pub enum OriginConfig {
    /// Nowhere: every process counts for itself.
    #[default]
    None,
    /// In this process, which is a region of its own.
    Memory,
    /// In Redis.
    Redis(Servers),
}

impl std::str::FromStr for OriginConfig {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::None),
            "memory" => Ok(Self::Memory),
            url => Ok(Self::Redis(url.parse()?)),
        }
    }
}

/// Files for TLS to the origin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OriginTls {
    /// Certificate authorities to trust instead of those of the system.
    pub ca: Option<PathBuf>,
    /// The client certificate and its key.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// The region that a server is a part of.
#[derive(Clone, Debug)]
pub struct RegionConfig {
    /// The name of the region.
    pub name: String,
    /// The store of its meters.
    pub origin: OriginConfig,
    /// Files for TLS to the origin.
    pub tls: OriginTls,
    /// How long a request waits for it.
    pub wait_max: Duration,
    /// The configured number of nodes in each region.
    pub nodes: u32,
    /// The regions that it counts with, if it is one of several.
    pub among: Option<MultiRegionConfig>,
}

impl OriginConfig {
    /// Returns the address without credentials; `None` without an origin.
    pub(crate) fn address(&self) -> Option<String> {
        match self {
            Self::None => None,
            Self::Memory => Some("memory".to_owned()),
            Self::Redis(servers) => Some(servers.to_string()),
        }
    }
}

impl RegionConfig {
    /// Returns the configured fleet: whether it has an origin, the number of nodes, and the
    /// regions.
    pub(crate) fn fleet(&self) -> Fleet {
        let regions = self.among.as_ref().map_or_else(|| Fleet::of(1), MultiRegionConfig::fleet);
        let has_origin = !matches!(self.origin, OriginConfig::None);
        Fleet { has_origin, nodes: self.nodes, ..regions }
    }

    /// Joins the region, if there is one. Has to be called within a runtime then, which makes the
    /// calls.
    pub(crate) fn join(&self, limiter: &Arc<Limiter>) -> Result<Option<Region>, String> {
        let origin: Arc<dyn Origin> = match &self.origin {
            OriginConfig::None => return Ok(None),
            OriginConfig::Memory => {
                let clock = SystemClock::new();
                Arc::new(MemoryOrigin::new(move || clock.now().wall_us()))
            }
            OriginConfig::Redis(servers) => Arc::new(self.open(servers)?),
        };
        let deadline_us = u64::try_from(self.wait_max.as_micros()).unwrap_or(u64::MAX);
        let settings = EngineSettings { deadline_us, processes: self.nodes, ..EngineSettings::default() };
        let limiter = Arc::clone(limiter);
        let joined = match &self.among {
            None => Region::join_as(&self.name, limiter, origin, settings)
                .map_err(|error| format!("region: {error}")),
            Some(regions) => Region::join_among(regions.clone(), limiter, origin, settings)
                .map_err(|error| error.problems.join("\n")),
        };
        joined.map(Some)
    }

    fn open(&self, servers: &Servers) -> Result<RedisOrigin, String> {
        // Connections are made at times that differ from process to process. In containers all have
        // the same number.
        let seed = getrandom::u64().map_err(|error| format!("the system gave no random bytes: {error}"))?;
        let mut config = RedisConfig::new(servers.clone(), seed);
        config.certificates = self.tls.read()?;
        RedisOrigin::open(config).map_err(|problem| format!("origin: {problem}"))
    }
}

impl OriginTls {
    fn read(&self) -> Result<RedisCertificates, String> {
        let read = |key: &str, path: &PathBuf| {
            let text = read_text(path, PEM_BYTES_MAX).map_err(|problem| format!("{key}: {problem}"))?;
            Ok::<_, String>(text.into_bytes())
        };
        let roots = self.ca.as_ref().map(|path| read("origin_ca", path)).transpose()?;
        let identity = self
            .identity
            .as_ref()
            .map(|(cert, key)| Ok::<_, String>((read("origin_cert", cert)?, read("origin_key", key)?)));
        Ok(RedisCertificates { roots, identity: identity.transpose()? })
    }
}

/// Interval at which a server reads the number of nodes seen and the lag between regions.
const FLEET_EVERY: Duration = Duration::from_secs(1);

/// Step to which a measured lag is rounded up, in microseconds. Longer: bounds are computed less
/// often; they are further above the measured lag.
const LAG_STEP_US: u64 = LAG_ALARM_US;

/// Updates the fleet by the region's measurements, as long as the server runs.
pub(crate) async fn watch_fleet(shared: Arc<Shared>) {
    let Some(region) = shared.decider.region.clone() else { return };
    let mut ticks = tokio::time::interval(FLEET_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let lag_us = region.replication_status().and_then(|status| status.lag_us);
        shared.fleet.note(observed(&shared.fleet.configured, region.processes(), lag_us));
        shared.rules.load().note_fleet(shared.fleet.measured());
    }
}

/// Returns the configured fleet, raised to the most nodes ever seen to share a meter and to the
/// longest lag measured between regions. The lag counts up to the peer timeout. Beyond it, regions
/// are isolated, which is another term of a bound.
fn observed(configured: &Fleet, processes: u32, lag_us: Option<u64>) -> Fleet {
    let configured_us = configured.replication_interval_us + configured.transit_us;
    let lag_us = lag_us.unwrap_or(0).div_ceil(LAG_STEP_US).saturating_mul(LAG_STEP_US);
    let lag_us = lag_us.min(configured.peer_timeout_us).max(configured_us);
    Fleet {
        nodes: configured.nodes.max(processes),
        transit_us: lag_us - configured.replication_interval_us,
        ..configured.clone()
    }
}

/// Shortest time between log lines about calls that the origin refused, regardless of their number.
const REFUSALS_EVERY: Duration = Duration::from_secs(10);

/// Logs calls that the origin refused, as long as the server runs.
pub(crate) async fn watch_refusals(region: Region) {
    let mut refusal = region.refusal();
    while refusal.changed().await.is_ok() {
        if let Some(reason) = *refusal.borrow_and_update() {
            let refused = region.stats().refused;
            tracing::error!(%reason, refused,
                "the origin rejected a call: its requests were decided without the origin");
        }
        let _ = tokio::time::timeout(REFUSALS_EVERY, std::future::pending::<()>()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_use_observed_values_above_configured_ones() {
        let configured = Fleet { nodes: 4, ..Fleet::of(3) };
        let of = |processes, lag_us| {
            let fleet = observed(&configured, processes, lag_us);
            (fleet.nodes, fleet.replication_interval_us + fleet.transit_us)
        };
        assert_eq!(of(1, None), (4, 500_000));
        assert_eq!(of(9, Some(240_000)), (9, 500_000));
        assert_eq!(of(4, Some(500_001)), (4, 1_000_000));
        assert_eq!(
            of(4, Some(3_600_000_000)),
            (4, configured.peer_timeout_us),
            "regions have parted by then"
        );
    }
}
