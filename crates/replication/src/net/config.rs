//! Configuration of a replicator: addresses of peers, and trusted certificates.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::origin::{CONNECTED_US_MAX, RegionId};

use super::tls::Tls;
use crate::forward::ForwardHandler;
use crate::region_id;
use crate::rounds::{PEER_TIMEOUT_DEFAULT_US, PEERS_MAX};
use crate::wire::{NAME_BYTES_MAX, is_region_name};

/// Shortest peer timeout. Without any failure, the knowledge of a peer's peers is up to four
/// intervals and two round trips old. With a shorter timeout, slightly late rounds would look like
/// a network partition.
pub(super) const PEER_TIMEOUT_MIN: Duration = Duration::from_secs(2);

/// The longest: an origin takes no word for longer than this.
pub(super) const PEER_TIMEOUT_MAX: Duration = Duration::from_micros(CONNECTED_US_MAX);

/// The most addresses of a peer.
const ADDRESSES_MAX: usize = 16;

/// A monotonic clock, µs. It also counts the time while the machine is suspended.
pub(super) type ClockUs = Arc<dyn Fn() -> u64 + Send + Sync>;

/// Configuration of a replicator.
#[derive(Clone)]
pub struct ReplicatorConfig {
    /// The region.
    pub region: String,
    /// Address to listen on for replicators of peer regions; port 0 takes a free one.
    pub listen: SocketAddr,
    /// The other regions: every one of them, in every region.
    pub peers: Vec<PeerConfig>,
    /// Certificates of the region, and the authority that it trusts. Without them, connections are
    /// limited to this machine.
    pub certificates: Option<PeerCertificates>,
    /// Last-heard age of a peer at which the region becomes isolated. Must be equal in every
    /// region. Longer: short network partitions go unnoticed; each region may exceed a limit by the
    /// usage of this time.
    pub peer_timeout: Duration,
    /// Hash of further settings that must be equal in every region. Peers exchange it, and a node
    /// warns if it differs.
    pub agreement: u64,
    /// Handler of checks that other regions forward, if this node decides any.
    pub forward_handler: Option<Arc<dyn ForwardHandler>>,
    /// A monotonic clock, µs. It must also count the time while the machine is suspended.
    pub now_us: ClockUs,
    /// Random number of this node. It identifies the lease holder, and varies the waits between
    /// retries.
    pub seed: u64,
}

impl ReplicatorConfig {
    /// Returns a configuration with defaults for everything else: no peers, no certificates.
    pub fn new(
        region: &str,
        listen: SocketAddr,
        now_us: impl Fn() -> u64 + Send + Sync + 'static,
        seed: u64,
    ) -> Self {
        Self {
            region: region.to_owned(),
            listen,
            peers: Vec::new(),
            certificates: None,
            peer_timeout: Duration::from_micros(PEER_TIMEOUT_DEFAULT_US),
            agreement: 0,
            forward_handler: None,
            now_us: Arc::new(now_us),
            seed,
        }
    }

    /// Returns all problems of the configuration, without opening a port. Each begins with the name
    /// of its setting.
    pub fn problems(&self) -> Vec<String> {
        check(self.clone()).err().map(|error| error.problems).unwrap_or_default()
    }
}

impl fmt::Debug for ReplicatorConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplicatorConfig")
            .field("region", &self.region)
            .field("peers", &self.peers)
            .finish_non_exhaustive()
    }
}

/// Another region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerConfig {
    /// Its name.
    pub region: String,
    /// `host:port` of its processes, of which one is the replicator.
    pub addresses: Vec<String>,
}

/// Certificates of a region, and the authority that it trusts. All in PEM.
#[derive(Clone)]
pub struct PeerCertificates {
    /// Certificate of the authority that signs the certificates of all regions, and no others.
    pub authority: Vec<u8>,
    /// Certificate of this region with the name `REGION.tidegate`, for server and client use, and
    /// the intermediate certificates up to the authority.
    pub chain: Vec<u8>,
    /// Its key.
    pub key: Vec<u8>,
}

impl fmt::Debug for PeerCertificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificates").finish_non_exhaustive()
    }
}

/// Why a replicator cannot start: all that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicatorError {
    /// Each begins with the setting that it is about.
    pub problems: Vec<String>,
}

impl ReplicatorError {
    pub(super) fn of(setting: &str, problem: &dyn fmt::Display) -> Self {
        Self { problems: vec![format!("{setting}: {problem}")] }
    }
}

impl fmt::Display for ReplicatorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.problems.join("; "))
    }
}

impl std::error::Error for ReplicatorError {}

/// A validated configuration.
pub(super) struct ValidConfig {
    pub(super) region: String,
    pub(super) listen: SocketAddr,
    pub(super) peers: Vec<ValidPeer>,
    pub(super) tls: Option<Tls>,
    pub(super) peer_timeout_us: u64,
    pub(super) agreement: u64,
    pub(super) forward_handler: Option<Arc<dyn ForwardHandler>>,
    pub(super) now_us: ClockUs,
    pub(super) seed: u64,
}

pub(super) struct ValidPeer {
    pub(super) id: RegionId,
    pub(super) name: String,
    pub(super) addresses: Vec<String>,
}

pub(super) fn check(config: ReplicatorConfig) -> Result<ValidConfig, ReplicatorError> {
    let mut problems = Vec::new();
    check_names(&config, &mut problems);
    check_addresses(&config, &mut problems);
    if !(PEER_TIMEOUT_MIN..=PEER_TIMEOUT_MAX).contains(&config.peer_timeout) {
        let given = config.peer_timeout;
        problems
            .push(format!("peer_timeout: {given:?} is outside {PEER_TIMEOUT_MIN:?} to {PEER_TIMEOUT_MAX:?}"));
    }
    let tls =
        config.certificates.as_ref().map(|certificates| Tls::new(&config.region, certificates)).transpose();
    let tls = tls.map_err(|problem| problems.push(problem)).unwrap_or_default();
    if !problems.is_empty() {
        return Err(ReplicatorError { problems });
    }
    let peer = |peer: PeerConfig| ValidPeer {
        id: region_id(&peer.region),
        name: peer.region,
        addresses: peer.addresses,
    };
    let peer_timeout_us = u64::try_from(config.peer_timeout.as_micros()).unwrap_or(PEER_TIMEOUT_DEFAULT_US);
    Ok(ValidConfig {
        agreement: agreement(&config, peer_timeout_us),
        region: config.region,
        listen: config.listen,
        peers: config.peers.into_iter().map(peer).collect(),
        tls,
        peer_timeout_us,
        forward_handler: config.forward_handler,
        now_us: config.now_us,
        seed: config.seed,
    })
}

/// Returns the hash of the settings that must be the same in every region.
fn agreement(config: &ReplicatorConfig, peer_timeout_us: u64) -> u64 {
    let peers = config.peers.iter().map(|peer| peer.region.as_str());
    let mut names: Vec<&str> = peers.chain([config.region.as_str()]).collect();
    names.sort_unstable();
    region_id(&format!("{names:?} {peer_timeout_us} {}", config.agreement)).0
}

fn check_names(config: &ReplicatorConfig, problems: &mut Vec<String>) {
    if !(1..=PEERS_MAX).contains(&config.peers.len()) {
        problems.push(format!("peers: {} is outside 1 to {PEERS_MAX}", config.peers.len()));
    }
    let own = ("region", &config.region);
    let named = config.peers.iter().map(|peer| ("peers", &peer.region));
    let mut seen = Vec::new();
    for (setting, name) in std::iter::once(own).chain(named) {
        if !is_region_name(name) {
            let allowed = "the characters a-z, 0-9 and -, without - at either end";
            problems.push(format!("{setting}: {name:?} is not 1 to {NAME_BYTES_MAX} of {allowed}"));
        }
        // Regions are identified by this id, so two names with the same hash are a duplicate as
        // well.
        let id = region_id(name);
        if seen.contains(&id) {
            problems.push(format!("{setting}: {name:?} is given twice"));
        }
        seen.push(id);
    }
}

fn check_addresses(config: &ReplicatorConfig, problems: &mut Vec<String>) {
    let is_plain = config.certificates.is_none();
    if is_plain && !config.listen.ip().is_loopback() {
        problems.push(format!(
            "peer_listen: {} is open to other machines: set `peer_cert`, `peer_key` and `peer_ca`",
            config.listen
        ));
    }
    for peer in &config.peers {
        if !(1..=ADDRESSES_MAX).contains(&peer.addresses.len()) {
            let given = peer.addresses.len();
            problems
                .push(format!("peers: {}: {given} addresses is outside 1 to {ADDRESSES_MAX}", peer.region));
        }
        for address in &peer.addresses {
            if let Some(problem) = address_problem(address, is_plain) {
                problems.push(format!("peers: {}: {address:?}: {problem}", peer.region));
            }
        }
    }
}

fn address_problem(address: &str, is_plain: bool) -> Option<&'static str> {
    let Some((host, port)) = address.rsplit_once(':') else { return Some("is not host:port") };
    if host.is_empty() || !matches!(port.parse::<u16>(), Ok(1..)) {
        return Some("is not host:port");
    }
    let ip = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    let is_far = ip.is_ok_and(|ip| !ip.is_loopback());
    (is_plain && is_far).then_some("is on another machine: set `peer_cert`, `peer_key` and `peer_ca`")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(peers: &[(&str, &[&str])]) -> ReplicatorConfig {
        let listen = "127.0.0.1:0".parse().unwrap();
        let mut config = ReplicatorConfig::new("eu", listen, || 0, 1);
        config.peers = peers
            .iter()
            .map(|(region, addresses)| PeerConfig {
                region: (*region).to_owned(),
                addresses: addresses.iter().map(ToString::to_string).collect(),
            })
            .collect();
        config
    }

    fn problems(config: ReplicatorConfig) -> Vec<String> {
        check(config).err().map(|error| error.problems).unwrap_or_default()
    }

    #[test]
    fn a_sound_configuration_has_no_problems() {
        let near: &[&str] = &["127.0.0.1:7000", "localhost:7000", "[::1]:7000"];
        assert_eq!(problems(config(&[("us", near), ("ap-2", near)])), [""; 0]);
    }

    #[test]
    fn all_configuration_problems_are_reported_together() {
        let mut wrong = config(&[
            ("us", &["10.0.0.1:7000", "us.example"]),
            ("us", &[]),
            ("eu", &["[2001:db8::1]:7000"]),
            ("Ünï", &["localhost:0"]),
        ]);
        wrong.peer_timeout = Duration::from_millis(1_999);
        wrong.listen = "0.0.0.0:7000".parse().unwrap();
        let problems = problems(wrong);
        for part in [
            "peers: \"us\" is given twice",
            "peers: \"eu\" is given twice",
            "peers: \"Ünï\" is not 1 to 63",
            "peer_listen: 0.0.0.0:7000 is open to other machines",
            "us: \"10.0.0.1:7000\": is on another machine",
            "us: \"us.example\": is not host:port",
            "us: 0 addresses is outside 1 to 16",
            "eu: \"[2001:db8::1]:7000\": is on another machine",
            "Ünï: \"localhost:0\": is not host:port",
            "peer_timeout: 1.999s is outside 2s to 60s",
        ] {
            assert!(problems.iter().any(|problem| problem.contains(part)), "{part} in {problems:#?}");
        }
        assert_eq!(problems.len(), 10, "{problems:#?}");
    }

    #[test]
    fn a_region_alone_needs_no_replicator() {
        assert_eq!(problems(config(&[])), ["peers: 0 is outside 1 to 15"]);
    }
}
