//! Encryption on both sides of a connection, with the region in the certificate.

use std::io;
use std::sync::Arc;

use rustls::client::{ClientConfig, verify_server_name};
use rustls::crypto::CryptoProvider;
use rustls::server::{ParsedCertificate, ServerConfig, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{Error, RootCertStore};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};

use super::config::PeerCertificates;

/// Domain of the region names in certificates.
const DOMAIN: &str = "tidegate";

/// Both sides of encrypted connections.
pub(super) struct Tls {
    acceptor: TlsAcceptor,
    connector: TlsConnector,
}

impl Tls {
    /// Creates both sides for a region. Returns the problem if its certificates are unusable.
    pub(super) fn new(region: &str, certificates: &PeerCertificates) -> Result<Self, String> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let roots = Arc::new(roots(&certificates.authority)?);
        let chain = pem_chain("peer_cert", &certificates.chain)?;
        let own = chain.first().ok_or("peer_cert: the file contains no certificate")?;
        if !is_of(own, region) {
            return Err(format!("peer_cert: the certificate is not for {region}.{DOMAIN}"));
        }
        let key =
            || PrivateKeyDer::from_pem_slice(&certificates.key).map_err(|error| format!("peer_key: {error}"));
        let server = server_config(&provider, &roots, chain.clone(), key()?);
        let client = client_config(&provider, roots, chain, key()?);
        let wrong = |error: Error| format!("peer_cert, peer_key: {error}");
        Ok(Self {
            acceptor: TlsAcceptor::from(Arc::new(server.map_err(wrong)?)),
            connector: TlsConnector::from(Arc::new(client.map_err(wrong)?)),
        })
    }

    /// Accepts a TLS connection with a client certificate. [`may_speak_for`] checks the region in
    /// it.
    pub(super) async fn accept(&self, stream: TcpStream) -> io::Result<server::TlsStream<TcpStream>> {
        self.acceptor.accept(stream).await
    }

    /// Opens a TLS connection with our certificate, if the server's certificate is for `region`.
    pub(super) async fn connect(
        &self,
        region: &str,
        stream: TcpStream,
    ) -> io::Result<client::TlsStream<TcpStream>> {
        let name = server_name(region)
            .ok_or_else(|| io::Error::other("peer_cert: the region name is not a valid host name"))?;
        self.connector.connect(name, stream).await
    }
}

/// Whether the client's certificate is for `region`.
pub(super) fn may_speak_for(stream: &server::TlsStream<TcpStream>, region: &str) -> bool {
    let (_, connection) = stream.get_ref();
    let shown = connection.peer_certificates().and_then(<[_]>::first);
    shown.is_some_and(|certificate| is_of(certificate, region))
}

fn is_of(certificate: &CertificateDer<'_>, region: &str) -> bool {
    let Ok(parsed) = ParsedCertificate::try_from(certificate) else { return false };
    server_name(region).is_some_and(|name| verify_server_name(&parsed, &name).is_ok())
}

fn server_name(region: &str) -> Option<ServerName<'static>> {
    ServerName::try_from(format!("{region}.{DOMAIN}")).ok()
}

fn server_config(
    provider: &Arc<CryptoProvider>,
    roots: &Arc<RootCertStore>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<ServerConfig, Error> {
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(roots), Arc::clone(provider))
        .build()
        .map_err(|error| Error::General(error.to_string()))?;
    // Every replicator is one of ours: there is no reason for an older version.
    ServerConfig::builder_with_provider(Arc::clone(provider))
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)
}

fn client_config(
    provider: &Arc<CryptoProvider>,
    roots: Arc<RootCertStore>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<ClientConfig, Error> {
    ClientConfig::builder_with_provider(Arc::clone(provider))
        .with_protocol_versions(&[&TLS13])?
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)
}

fn pem_chain(setting: &str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    read.map_err(|error| format!("{setting}: {error}"))
}

fn roots(pem: &[u8]) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in pem_chain("peer_ca", pem)? {
        roots.add(certificate).map_err(|error| format!("peer_ca: {error}"))?;
    }
    if roots.is_empty() { Err("peer_ca: the file contains no certificate".to_owned()) } else { Ok(roots) }
}
