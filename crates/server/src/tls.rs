//! Encryption, the same for every listener.

use std::io;
use std::path::Path;
use std::sync::Arc;

use rustls::RootCertStore;
use rustls::crypto::CryptoProvider;
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ServerConfig, WebPkiClientVerifier};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

use crate::config::TlsFiles;
use crate::metrics::Listener;

/// Accepts TLS connections: one certificate for all listeners, and the protocol of each.
#[derive(Clone)]
pub(crate) struct Tls {
    http1: TlsAcceptor,
    http2: TlsAcceptor,
    bare: TlsAcceptor,
}

impl Tls {
    /// From the files that were named, if any were; or all that is wrong with them.
    pub(crate) fn new(files: Option<&TlsFiles>) -> Result<Option<Self>, Vec<String>> {
        let Some(files) = files else { return Ok(None) };
        let config = from_files(files)?;
        let speaking = |protocol: Option<&[u8]>| {
            let mut config = config.clone();
            config.alpn_protocols = protocol.map(<[u8]>::to_vec).into_iter().collect();
            TlsAcceptor::from(Arc::new(config))
        };
        Ok(Some(Self {
            http1: speaking(Some(b"http/1.1")),
            http2: speaking(Some(b"h2")),
            bare: speaking(None),
        }))
    }

    pub(crate) fn acceptor(&self, listener: Listener) -> &TlsAcceptor {
        match listener {
            Listener::Http | Listener::Admin => &self.http1,
            Listener::Grpc => &self.http2,
            Listener::Resp => &self.bare,
        }
    }
}

fn from_files(files: &TlsFiles) -> Result<ServerConfig, Vec<String>> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let chain = certificates("tls_cert", &files.cert);
    let key = PrivateKeyDer::from_pem_file(&files.key)
        .map_err(|error| format!("tls_key: {}: {error}", files.key.display()));
    let verifier = files.client_ca.as_deref().map(|path| client_verifier(path, &provider)).transpose();
    let (chain, key, verifier) = match (chain, key, verifier) {
        (Ok(chain), Ok(key), Ok(verifier)) => (chain, key, verifier),
        (chain, key, verifier) => {
            return Err([chain.err(), key.err(), verifier.err()].into_iter().flatten().collect());
        }
    };
    let wrong = |error: rustls::Error| vec![format!("tls_cert: {}: {error}", files.cert.display())];
    let builder =
        ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().map_err(wrong)?;
    let builder = match verifier {
        None => builder.with_no_client_auth(),
        Some(verifier) => builder.with_client_cert_verifier(verifier),
    };
    builder.with_single_cert(chain, key).map_err(|error| match error {
        rustls::Error::InconsistentKeys(_) => {
            vec![format!("tls_key: {}: tls_key does not belong to tls_cert", files.key.display())]
        }
        error => wrong(error),
    })
}

fn client_verifier(
    path: &Path,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, String> {
    let roots = Arc::new(authority(path)?);
    WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(provider))
        .build()
        .map_err(|error| format!("tls_client_ca: {}: {error}", path.display()))
}

fn certificates(key: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let problem = |error: &dyn std::fmt::Display| format!("{key}: {}: {error}", path.display());
    let read = CertificateDer::pem_file_iter(path).map_err(|error| problem(&error))?;
    let chain: Vec<_> = read.collect::<Result<_, _>>().map_err(|error| problem(&error))?;
    if chain.is_empty() { Err(problem(&io::Error::other("no certificate in it"))) } else { Ok(chain) }
}

fn authority(path: &Path) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates("tls_client_ca", path)? {
        roots.add(certificate).map_err(|error| format!("tls_client_ca: {}: {error}", path.display()))?;
    }
    Ok(roots)
}
