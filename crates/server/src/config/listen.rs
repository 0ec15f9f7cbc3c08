//! Where the server listens, and by which certificate.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::PathBuf;

use super::reader::Reader;
use crate::auth::Credentials;
use crate::metrics::Listener;

/// Where the certificate and its key are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate chain.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authority of client certificates, if clients must show one.
    pub client_ca: Option<PathBuf>,
}

/// Returns the address to listen on for a text such as `127.0.0.1:8080` or `localhost:8080`. A name
/// may have several addresses. One that other machines reach comes first, because it decides
/// whether tokens are needed; else the first of IPv4, which every machine has.
pub(super) fn resolve(text: &str) -> Result<SocketAddr, String> {
    let wrong = || format!("{text:?} is not an address or a host name with a port");
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
    if host.is_empty() || port.parse::<u16>().is_err() {
        return Err(wrong());
    }
    let found = text.to_socket_addrs().map_err(|error| format!("{}: {error}", wrong()))?;
    preferred(&found.collect::<Vec<_>>()).ok_or_else(wrong)
}

fn preferred(addresses: &[SocketAddr]) -> Option<SocketAddr> {
    addresses.iter().copied().min_by_key(|address| (address.ip().is_loopback(), address.is_ipv6()))
}

impl Reader<'_> {
    pub(super) fn listen(&mut self, key: &str, credentials: &Credentials) -> Option<SocketAddr> {
        let text = self.text(key).filter(|text| text != "off")?;
        let address = match resolve(&text) {
            Ok(address) => address,
            Err(problem) => {
                self.problem(
                    key,
                    format!("{problem}, such as 127.0.0.1:8080 or localhost:8080, nor \"off\""),
                );
                return None;
            }
        };
        if !address.ip().is_loopback() && credentials.is_open() && self.tokens_known {
            self.problem(
                key,
                format!(
                    "{address} can be reached from other machines, and there are no tokens: make one with `tidegate \
                     token new` and add its [[tokens]] entry to the configuration, or listen on 127.0.0.1"
                ),
            );
        }
        Some(address)
    }

    /// Checks that at least one listener is on, and that each has its own address.
    pub(super) fn listeners(&mut self, listeners: &[(Listener, &'static str, Option<SocketAddr>)]) {
        let mut taken: Vec<(&str, SocketAddr)> = Vec::new();
        for (_, key, address) in listeners {
            let Some(address) = address else { continue };
            // Of port 0, each gets one of its own.
            let same = taken.iter().find(|(_, known)| known == address && address.port() != 0);
            if let Some((other, _)) = same {
                self.problem(key, format!("{address} is the address of {other} too"));
            }
            taken.push((key, *address));
        }
        let is_wrong = |(_, key, _): &(Listener, &'static str, Option<SocketAddr>)| self.has_problem(key);
        if taken.is_empty() && !listeners.iter().any(is_wrong) {
            self.problem(
                "http_listen",
                "\"off\", and so is every other listener: the server would have no clients",
            );
        }
    }

    pub(super) fn tls(&mut self) -> Option<TlsFiles> {
        let (cert, key, client_ca) =
            (self.path("tls_cert"), self.path("tls_key"), self.path("tls_client_ca"));
        match (cert, key) {
            (Some(cert), Some(key)) => Some(TlsFiles { cert, key, client_ca }),
            (None, None) if client_ca.is_none() => None,
            (cert, key) => {
                for (name, _) in
                    [("tls_cert", cert), ("tls_key", key)].iter().filter(|(_, file)| file.is_none())
                {
                    self.problem(name, "missing: tls_cert, tls_key and tls_client_ca need each other");
                }
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::read;
    use super::*;
    use crate::auth::TokenHash;

    #[test]
    fn host_names_are_resolved() {
        let config = read(&[("http_listen", "localhost:18080")], "").expect("a name");
        assert_eq!(config.http, Some(([127, 0, 0, 1], 18080).into()));
        assert_eq!(resolve("[::1]:80"), Ok("[::1]:80".parse().expect("an address")));
        for wrong in ["localhost", "8080", ":8080", "localhost:http", "localhost:65536", "nowhere.invalid:80"]
        {
            let problem = resolve(wrong).expect_err(wrong);
            assert!(problem.contains("is not an address or a host name with a port"), "{problem}");
        }
        let addresses = |texts: &[&str]| {
            let all: Vec<SocketAddr> = texts.iter().map(|text| text.parse().expect("one")).collect();
            preferred(&all).map(|address| address.to_string())
        };
        assert_eq!(addresses(&["[::1]:1", "127.0.0.1:1"]).as_deref(), Some("127.0.0.1:1"));
        // A name that other machines reach needs tokens, also if it has a loopback address.
        assert_eq!(addresses(&["127.0.0.1:1", "10.0.0.1:1"]).as_deref(), Some("10.0.0.1:1"));
        assert_eq!(addresses(&[]), None);
    }

    #[test]
    fn other_machines_need_a_token() {
        let problems = read(&[("admin_listen", "0.0.0.0:8090")], "").expect_err("open to the world");
        assert!(problems[0].contains("tidegate token new"), "{problems:?}");
        let hash = TokenHash::of(b"a token");
        let file = format!("[[tokens]]\nname = 'me'\nrole = 'admin'\nhash = '{hash}'");
        assert!(read(&[("admin_listen", "0.0.0.0:8090")], &file).is_ok());
    }
}
