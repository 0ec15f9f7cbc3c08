//! A server that also listens for TLS.

use std::path::Path;

use tempfile::TempDir;

use super::Redis;
use crate::wait::free_port;

/// A server that also listens for TLS as `localhost`, with a certificate of its own.
#[derive(Debug)]
pub struct TlsRedis {
    /// The server.
    pub redis: Redis,
    /// The port for TLS.
    pub port: u16,
    /// Certificate that a client must trust, in PEM.
    pub roots: Vec<u8>,
    /// The folder with the certificate of the server, unless it is a test's own.
    _dir: Option<TempDir>,
}

impl TlsRedis {
    /// Starts it.
    pub fn start() -> Self {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
        let dir = tempfile::tempdir().expect("a folder");
        let certificate = write(dir.path(), "certificate.pem", &made.cert.pem());
        let key = write(dir.path(), "key.pem", &made.signing_key.serialize_pem());
        Self { _dir: Some(dir), ..Self::presenting(&certificate, &key) }
    }

    /// Starts it with a certificate and its key in these files.
    pub fn presenting(certificate: &str, key: &str) -> Self {
        let roots = std::fs::read(certificate).expect("a certificate");
        let port = free_port();
        let listen = ["--tls-port", &port.to_string(), "--tls-auth-clients", "no"];
        let files = ["--tls-cert-file", certificate, "--tls-key-file", key];
        let trust = ["--tls-ca-cert-file", certificate];
        let redis = Redis::start(&[&listen[..], &files, &trust].concat());
        Self { redis, port, roots, _dir: None }
    }
}

fn write(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    std::fs::write(&path, text).expect("written");
    path.to_string_lossy().into_owned()
}
