//! The region a server is part of, its origin, and the other regions.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use tidegate::region::{MultiRegionConfig, PeerCertificates, PeerConfig, WEIGHT_MAX};

use super::listen::resolve;
use super::reader::{NAME_BYTES_MAX, Reader, is_name};
use crate::origin::{OriginConfig, OriginTls, PEM_BYTES_MAX, RegionConfig};
use crate::rules::read_text;

/// The most processes of a region.
const NODES_MAX: usize = 1_000_000;

/// Replaces a missing address, so that the check can find further problems.
const NOWHERE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

impl Reader<'_> {
    pub(super) fn region(&mut self) -> RegionConfig {
        let origin = self.text("origin").unwrap_or_default().parse().unwrap_or_else(|problem: String| {
            self.problem("origin", problem);
            OriginConfig::None
        });
        let name = self.text("region").unwrap_or_default();
        if !is_name(&name) {
            self.problem("region", format!("{name:?} is not 1 to {NAME_BYTES_MAX} printable bytes"));
        }
        let (cert, key) = (self.path("origin_cert"), self.path("origin_key"));
        let identity = match (cert, key) {
            (Some(cert), Some(key)) => Some((cert, key)),
            (None, None) => None,
            (cert, _) => {
                let missing = if cert.is_none() { "origin_cert" } else { "origin_key" };
                self.problem(missing, "missing: origin_cert and origin_key need each other");
                None
            }
        };
        let tls = OriginTls { ca: self.path("origin_ca"), identity };
        let among = self.among(&name, !matches!(origin, OriginConfig::None));
        let wait_max = self.time("origin_timeout", Duration::from_millis(1), Duration::from_secs(10));
        let nodes = u32::try_from(self.number("nodes", 1, NODES_MAX)).unwrap_or(u32::MAX);
        RegionConfig { name, origin, tls, wait_max, nodes, among }
    }

    /// The other regions, if there are any.
    fn among(&mut self, name: &str, has_origin: bool) -> Option<MultiRegionConfig> {
        let listen = self.peer_listen();
        let (peers, weights) = (self.pairs("peer"), self.pairs("region_weights"));
        let peer_timeout = self.time("peer_timeout", Duration::from_secs(2), Duration::from_mins(1));
        let forward_time_max =
            self.time("forward_timeout", Duration::from_millis(10), Duration::from_secs(10));
        let certificates = self.peer_certificates();
        if peers.is_empty() {
            let alone = [
                ("peer_listen", listen.is_some()),
                ("region_weights", !weights.is_empty()),
                ("peer_cert", !matches!(certificates, Ok(None))),
            ];
            for (key, _) in alone.into_iter().filter(|(_, is_given)| *is_given) {
                self.problem(key, "only for one of several regions: there is no peer");
            }
            return None;
        }
        if !has_origin {
            self.problem("origin", "\"none\": several regions need an origin each");
        }
        if listen.is_none() && !self.has_problem("peer_listen") {
            self.problem("peer_listen", "missing: the peers have to reach this server");
        }
        let mut regions = MultiRegionConfig::new(name, listen.unwrap_or(NOWHERE));
        (regions.peer_timeout, regions.forward_time_max) = (peer_timeout, forward_time_max);
        add_peers(&mut regions, peers);
        regions.weights = self.weights(weights);
        let certificates_known = certificates.is_ok();
        regions.certificates = certificates.unwrap_or_default();
        for problem in regions.problems() {
            // Unreadable certificates are reported already; do not report them as missing too.
            if certificates_known || !problem.contains("set `peer_cert`") {
                self.problems.push(as_setting(&problem));
            }
        }
        Some(regions).filter(|regions| regions.problems().is_empty())
    }

    fn peer_listen(&mut self) -> Option<SocketAddr> {
        let text = self.text("peer_listen")?;
        let address = resolve(&text);
        address
            .map_err(|problem| self.problem("peer_listen", format!("{problem}, such as 127.0.0.1:7400")))
            .ok()
    }

    fn weights(&mut self, pairs: Vec<(String, String)>) -> Vec<(String, u32)> {
        let mut weights = Vec::new();
        for (name, text) in pairs {
            match text.parse() {
                Ok(weight) => weights.push((name, weight)),
                Err(_) => self.problem(
                    "region_weights",
                    format!("{name}: {text:?} is not a number from 1 to {WEIGHT_MAX}"),
                ),
            }
        }
        weights
    }

    /// Reads the certificates for connections between regions. Returns an error if they are
    /// configured but unusable.
    fn peer_certificates(&mut self) -> Result<Option<PeerCertificates>, ()> {
        let mut read = |key: &str| {
            let text = self.path(key).map(|path| read_text(&path, PEM_BYTES_MAX)).transpose();
            text.map_err(|problem| self.problem(key, problem))
        };
        let (authority, chain, key) = (read("peer_ca"), read("peer_cert"), read("peer_key"));
        match (authority?, chain?, key?) {
            (Some(authority), Some(chain), Some(key)) => Ok(Some(PeerCertificates {
                authority: authority.into_bytes(),
                chain: chain.into_bytes(),
                key: key.into_bytes(),
            })),
            (None, None, None) => Ok(None),
            (authority, chain, key) => {
                for (name, file) in [("peer_ca", &authority), ("peer_cert", &chain), ("peer_key", &key)] {
                    if file.is_none() {
                        self.problem(name, "missing: peer_ca, peer_cert and peer_key need each other");
                    }
                }
                Err(())
            }
        }
    }
}

/// Puts the addresses of each region together.
fn add_peers(regions: &mut MultiRegionConfig, pairs: Vec<(String, String)>) {
    for (name, address) in pairs {
        match regions.peers.iter_mut().find(|peer| peer.region == name) {
            Some(peer) => peer.addresses.push(address),
            None => regions.peers.push(PeerConfig { region: name, addresses: vec![address] }),
        }
    }
}

/// A problem of regions as one of the settings that they were read from.
fn as_setting(problem: &str) -> String {
    let settings =
        [("peers: ", "peer: "), ("weights: ", "region_weights: "), ("peer_timeout: ", "peer_timeout: ")];
    let renamed = settings.iter().find_map(|(from, to)| Some(format!("{to}{}", problem.strip_prefix(from)?)));
    renamed.unwrap_or_else(|| problem.to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::read;

    #[test]
    fn a_region_may_be_one_of_several() {
        let peers = "us=127.0.0.1:1,ap=127.0.0.1:2, us=127.0.0.1:3";
        let given = [("origin", "memory"), ("region", "eu"), ("peer", peers), ("peer_listen", "127.0.0.1:0")];
        let config =
            read(&given, "region_weights = ['eu=3']\npeer_timeout = '7s'\nnodes = 12").expect("good");
        let regions = config.region.among.as_ref().expect("others");
        let peers: Vec<_> = regions.peers.iter().map(|peer| (&*peer.region, peer.addresses.len())).collect();
        assert_eq!(peers, [("us", 2), ("ap", 1)]);
        let fleet = config.region.fleet();
        assert_eq!(
            (&*fleet.weights, fleet.peer_timeout_us, fleet.has_origin),
            (&[1, 3, 1][..], 7_000_000, true)
        );
        assert_eq!(fleet.nodes, 12);
        let none = read(&[("nodes", "0")], "").expect_err("no region has none");
        assert_eq!(none, ["nodes: \"0\" is not a number from 1 to 1000000"]);
        assert!(read(&given[..2], "").expect("good").region.among.is_none());
    }

    #[test]
    fn every_problem_of_regions_is_listed() {
        let file = "
            peer = ['eu=127.0.0.1:1', 'us=10.0.0.1:7000', 'ap=nowhere', 'me']
            region = 'eu'
            peer_listen = '0.0.0.0:7000'
            region_weights = ['us=0', 'eu=x', 'mars=1']
            peer_timeout = '1ms'
        ";
        let problems = read(&[], file).expect_err("has problems");
        for (key, words) in [
            ("origin", "\"none\": several regions need an origin each"),
            ("peer", "\"me\" is not NAME=..."),
            ("peer", "\"eu\" is given twice"),
            ("peer", "us: \"10.0.0.1:7000\": is on another machine"),
            ("peer", "ap: \"nowhere\": is not host:port"),
            ("peer_listen", "0.0.0.0:7000 is open to other machines"),
            ("region_weights", "eu: \"x\" is not a number from 1 to"),
            ("region_weights", "us: 0 is outside 1 to"),
            ("region_weights", "\"mars\" is none of the regions"),
            ("peer_timeout", "1ms is outside 2s to 60s"),
        ] {
            let found = problems.iter().any(|problem| {
                problem.strip_prefix(key).is_some_and(|rest| rest.starts_with(": ") && rest.contains(words))
            });
            assert!(found, "{key}: {words}: {problems:#?}");
        }
        assert_eq!(problems.len(), 10, "{problems:#?}");
        let alone = read(&[("peer_listen", "127.0.0.1:0"), ("region_weights", "eu=1")], "");
        assert_eq!(alone.expect_err("alone").len(), 2);
        let files = [("peer", "us=10.0.0.1:7000"), ("peer_listen", "0.0.0.0:7000"), ("origin", "memory")];
        let unread = read(&files, "peer_ca = '/nowhere/ca.pem'").expect_err("not there");
        assert!(
            matches!(&unread[..], [only] if only.starts_with("peer_ca: /nowhere/ca.pem: ")),
            "{unread:#?}"
        );
        let lone = read(&files, "region_weights = ['us=2']\npeer_key = 'Cargo.toml'").expect_err("alone");
        assert!(lone.iter().any(|problem| problem.starts_with("peer_cert: missing: ")), "{lone:#?}");
    }
}
