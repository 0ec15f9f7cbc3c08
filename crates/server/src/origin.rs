//! The region that a server is a part of.

use std::path::PathBuf;
use std::sync::Arc;

use tidegate::region::redis::{Certificates, RedisConfig, RedisOrigin, Servers};
use tidegate::region::{MemoryOrigin, Origin, Region, Settings};
use tidegate::{Clock, Limiter, SystemClock};

use crate::rules::read_text;

/// The largest file of certificates.
const PEM_BYTES_MAX: usize = 1 << 20;

/// Where a region's meters are kept.
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

/// Files with what TLS to the origin needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OriginTls {
    /// Who is trusted instead of those that the system trusts.
    pub ca: Option<PathBuf>,
    /// What is shown to the servers, and its key.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// The region that a server is a part of.
#[derive(Clone, Debug, Default)]
pub struct RegionConfig {
    /// What it is called.
    pub name: String,
    /// Where its meters are kept.
    pub origin: OriginConfig,
    /// Files with what TLS to it needs.
    pub tls: OriginTls,
}

impl RegionConfig {
    /// Joins the region, if there is one. Has to be called within a runtime then, which makes the calls.
    pub(crate) fn join(&self, limiter: &Arc<Limiter>) -> Result<Option<Region>, String> {
        let origin: Arc<dyn Origin> = match &self.origin {
            OriginConfig::None => return Ok(None),
            OriginConfig::Memory => {
                let clock = SystemClock::new();
                Arc::new(MemoryOrigin::new(move || clock.now().wall_us()))
            }
            OriginConfig::Redis(servers) => Arc::new(self.open(servers)?),
        };
        let joined = Region::join_as(&self.name, Arc::clone(limiter), origin, Settings::default());
        joined.map(Some).map_err(|error| format!("region: {error}"))
    }

    fn open(&self, servers: &Servers) -> Result<RedisOrigin, String> {
        // Connections are made at times that differ from process to process.
        let mut config = RedisConfig::new(servers.clone(), u64::from(std::process::id()));
        config.certificates = self.tls.read()?;
        RedisOrigin::open(config).map_err(|problem| format!("origin: {problem}"))
    }
}

impl OriginTls {
    fn read(&self) -> Result<Certificates, String> {
        let read = |key: &str, path: &PathBuf| {
            let text = read_text(path, PEM_BYTES_MAX).map_err(|problem| format!("{key}: {problem}"))?;
            Ok::<_, String>(text.into_bytes())
        };
        let roots = self.ca.as_ref().map(|path| read("origin_ca", path)).transpose()?;
        let identity = self
            .identity
            .as_ref()
            .map(|(cert, key)| Ok::<_, String>((read("origin_cert", cert)?, read("origin_key", key)?)));
        Ok(Certificates { roots, identity: identity.transpose()? })
    }
}

/// Tells of it whenever the origin stops or begins to answer, for as long as the server runs.
pub(crate) async fn watch(region: Region) {
    let mut answers = region.answers();
    while answers.changed().await.is_ok() {
        if *answers.borrow_and_update() {
            tracing::info!("the origin answers again: limits are the region's");
        } else {
            tracing::warn!(
                "the origin does not answer: comfort limits go on with this process's part of them, cost limits of who \
                 pays are open, all others are closed"
            );
        }
    }
}
