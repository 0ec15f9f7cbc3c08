//! Encryption, the same for every listener.

use std::io;
use std::path::Path;
use std::sync::Arc;

use rustls::RootCertStore;
use rustls::server::{ServerConfig, WebPkiClientVerifier};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

use crate::config::TlsFiles;
use crate::shared::StartError;

/// What accepts encrypted connections, if files were named.
pub(crate) fn acceptor(files: Option<&TlsFiles>) -> Result<Option<TlsAcceptor>, StartError> {
    files.map(from_files).transpose().map_err(StartError::File)
}

fn from_files(files: &TlsFiles) -> Result<TlsAcceptor, String> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| format!("tls_cert: {error}"))?;
    let builder = match &files.client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(authority(path)?), provider)
                .build()
                .map_err(|error| format!("tls_client_ca: {}: {error}", path.display()))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let chain = certificates("tls_cert", &files.cert)?;
    let key = PrivateKeyDer::from_pem_file(&files.key)
        .map_err(|error| format!("tls_key: {}: {error}", files.key.display()))?;
    let mut config = builder
        .with_single_cert(chain, key)
        .map_err(|error| format!("tls_cert: {}: {error}", files.cert.display()))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
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
