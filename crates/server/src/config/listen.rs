//! Where the server listens, and by which certificate.

use std::net::SocketAddr;
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

impl Reader<'_> {
    pub(super) fn listen(&mut self, key: &str, credentials: &Credentials) -> Option<SocketAddr> {
        let text = self.text(key).filter(|text| text != "off")?;
        let Ok(address) = text.parse::<SocketAddr>() else {
            self.problem(
                key,
                format!("{text:?} is not an address and a port, such as 127.0.0.1:8080, nor \"off\""),
            );
            return None;
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
            self.problem("http_listen", "\"off\", and so is every other listener: nobody could ask");
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
    use crate::auth::TokenHash;

    #[test]
    fn other_machines_need_a_token() {
        let problems = read(&[("admin_listen", "0.0.0.0:8090")], "").expect_err("open to the world");
        assert!(problems[0].contains("tidegate token new"), "{problems:?}");
        let hash = TokenHash::of(b"a token");
        let file = format!("[[tokens]]\nname = 'me'\nrole = 'admin'\nhash = '{hash}'");
        assert!(read(&[("admin_listen", "0.0.0.0:8090")], &file).is_ok());
    }
}
