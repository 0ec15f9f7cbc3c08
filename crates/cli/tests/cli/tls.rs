//! Encrypted listeners, and clients with and without certificates.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use tidegate_testkit::{START_TIME_MAX, TlsRedis, wait_until};

use crate::support::serve;
use crate::{status, stderr, stdout, tidegate};

/// A certificate authority and the certificates it signed, as files for a server and its clients.
struct Certificates {
    folder: tempfile::TempDir,
    authority: rcgen::CertifiedIssuer<'static, rcgen::KeyPair>,
}

impl Certificates {
    fn new() -> Self {
        let key = rcgen::KeyPair::generate().expect("a key");
        let mut parameters = rcgen::CertificateParams::new(Vec::<String>::new()).expect("parameters");
        parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let authority = rcgen::CertifiedIssuer::self_signed(parameters, key).expect("signed");
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("ca.pem"), authority.pem()).expect("written");
        let certificates = Self { folder, authority };
        certificates.sign("server", &["localhost", "127.0.0.1"]);
        certificates.sign("client", &["a client"]);
        certificates
    }

    fn sign(&self, name: &str, names: &[&str]) {
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let key = rcgen::KeyPair::generate().expect("a key");
        let parameters = rcgen::CertificateParams::new(names).expect("names");
        let certificate = parameters.signed_by(&key, &self.authority).expect("signed");
        std::fs::write(self.folder.path().join(format!("{name}.pem")), certificate.pem()).expect("written");
        std::fs::write(self.folder.path().join(format!("{name}.key")), key.serialize_pem()).expect("written");
    }

    /// A certificate that is its own issuer, as `openssl req -x509` makes it.
    fn sign_self(&self, name: &str, is_ca: rcgen::IsCa) {
        let key = rcgen::KeyPair::generate().expect("a key");
        let mut parameters = rcgen::CertificateParams::new(["localhost".to_owned()]).expect("names");
        parameters.is_ca = is_ca;
        let certificate = parameters.self_signed(&key).expect("signed");
        std::fs::write(self.path(&format!("{name}.pem")), certificate.pem()).expect("written");
        std::fs::write(self.path(&format!("{name}.key")), key.serialize_pem()).expect("written");
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().expect("text").to_owned()
    }
}

/// An encrypted connection to a listener, after its handshake.
fn connect(address: SocketAddr, ca: &Path) -> std::io::Result<StreamOwned<ClientConnection, TcpStream>> {
    use rustls::pki_types::{CertificateDer, pem::PemObject};
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(ca).expect("a certificate")).expect("an authority");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").expect("a name");
    let stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(START_TIME_MAX))?;
    let mut stream =
        StreamOwned::new(ClientConnection::new(Arc::new(config), name).expect("a client"), stream);
    stream.conn.complete_io(&mut stream.sock)?;
    Ok(stream)
}

#[test]
fn every_listener_is_encrypted_once_there_is_a_certificate() {
    let certificates = Certificates::new();
    let (cert, key) = (certificates.text("server.pem"), certificates.text("server.key"));
    let server = serve(&["--tls-cert", &cert, "--tls-key", &key]);
    for listener in ["http", "grpc", "resp", "admin"] {
        let connected = connect(server.address(listener), &certificates.path("ca.pem"));
        assert!(connected.is_ok(), "{listener}: {:?}", connected.err());
    }
    let mut admin = connect(server.address("admin"), &certificates.path("ca.pem")).expect("encrypted");
    admin.write_all(b"GET /readyz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").expect("sent");
    let mut answer = Vec::new();
    let _ = admin.read_to_end(&mut answer);
    assert!(answer.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&answer));

    let url = format!("https://localhost:{}", server.address("admin").port());
    let ca = certificates.text("ca.pem");
    let trusted = tidegate(&["check", "user=a", "--server", &url, "--ca", &ca]);
    assert_eq!(status(&trusted), 0, "{trusted:?}");
    let unknown = tidegate(&["check", "user=a", "--server", &url]);
    assert_eq!(status(&unknown), 69, "{unknown:?}");
    let in_clear = tidegate(&["check", "user=a", "--server", &server.url("admin", "")]);
    assert_eq!(status(&in_clear), 69, "{in_clear:?}");
}

#[test]
fn a_server_that_wants_certificates_refuses_clients_without_one() {
    let certificates = Certificates::new();
    let (cert, key, ca) =
        (certificates.text("server.pem"), certificates.text("server.key"), certificates.text("ca.pem"));
    let server = serve(&["--tls-cert", &cert, "--tls-key", &key, "--tls-client-ca", &ca]);
    for listener in ["http", "grpc", "resp", "admin"] {
        // With TLS 1.3, the client finishes its handshake before the server has verified its
        // certificate.
        let refused = connect(server.address(listener), &certificates.path("ca.pem"))
            .and_then(|mut stream| stream.read(&mut [0; 1]));
        let error = refused.expect_err(listener).to_string();
        assert!(error.contains("CertificateRequired"), "{listener}: {error}");
    }
    let url = format!("https://localhost:{}", server.address("admin").port());
    let check = ["check", "user=a", "--server", &url, "--ca", &ca];
    assert_eq!(status(&tidegate(&check)), 69);
    let (cert, key) = (certificates.text("client.pem"), certificates.text("client.key"));
    let with = tidegate(&[&check[..], &["--client-cert", &cert, "--client-key", &key]].concat());
    assert_eq!(status(&with), 0, "{with:?}");
}

#[test]
fn tls_files_that_are_wrong_are_named() {
    let certificates = Certificates::new();
    let (cert, key) = (certificates.text("server.pem"), certificates.text("client.key"));
    let wrong = [
        (["--tls-cert", &cert, "--tls-key", "/nowhere.pem"], "tls_key: /nowhere.pem: "),
        (["--tls-cert", "/nowhere.pem", "--tls-key", &key], "tls_cert: /nowhere.pem: "),
        (["--tls-cert", &cert, "--tls-key", &key], ": tls_key does not belong to tls_cert"),
    ];
    for (flags, words) in wrong {
        let output = tidegate(&[&["serve", "--check-config", "--data-dir", "none"], &flags[..]].concat());
        assert_eq!(status(&output), 64, "{output:?}");
        assert!(stderr(&output).contains(words), "{words}: {output:?}");
    }
}

/// Returns the output of a configuration check with an origin that presents a certificate.
fn check_origin(cert: &str, key: &str) -> String {
    let origin = TlsRedis::presenting(cert, key);
    let url = format!("rediss://localhost:{}", origin.port);
    let check = ["serve", "--check-config", "--data-dir", "none", "--origin", &url, "--origin-ca", cert];
    let mut printed = String::new();
    // A busy machine may time out first.
    wait_until("the state of the origin", START_TIME_MAX, || {
        stdout(&tidegate(&check)).clone_into(&mut printed);
        !printed.contains(" within ")
    });
    printed
}

#[test]
fn the_command_of_the_remedy_makes_a_certificate_that_works() {
    let certificates = Certificates::new();
    certificates.sign_self("authority", rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained));
    let printed = check_origin(&certificates.text("authority.pem"), &certificates.text("authority.key"));
    assert!(printed.contains("a CA certificate") && printed.contains("`origin_ca`"), "{printed}");
    assert!(!printed.contains("OtherError"), "{printed}");
    let command = printed.split('`').find(|part| part.starts_with("openssl ")).expect("a command");
    let run = |script: &str| {
        std::process::Command::new("sh").args(["-c", script]).current_dir(certificates.folder.path()).output()
    };
    if !run("command -v openssl").expect("a shell").status.success() {
        return;
    }
    let made = run(command).expect("it runs");
    assert!(made.status.success(), "{made:?}");
    let printed = check_origin(&certificates.text("cert.pem"), &certificates.text("key.pem"));
    assert!(printed.ends_with(": up\n"), "{printed}");
}

#[test]
fn a_failed_handshake_states_its_cause_and_its_remedy() {
    let certificates = Certificates::new();
    certificates.sign_self("authority", rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained));
    certificates.sign_self("own", rcgen::IsCa::ExplicitNoCa);
    let refused = |url: &str, more: &[&str]| {
        let output = tidegate(&[&["check", "user=a", "--server", url], more].concat());
        assert_eq!(status(&output), 69, "{output:?}");
        assert!(!stderr(&output).contains("is the server running"), "{output:?}");
        stderr(&output).to_owned()
    };
    let serve_with = |name: &str| {
        let [cert, key] = ["pem", "key"].map(|kind| certificates.text(&format!("{name}.{kind}")));
        let server = serve(&["--tls-cert", &cert, "--tls-key", &key]);
        let port = server.address("admin").port();
        (server, cert, port)
    };
    let (_server, cert, port) = serve_with("authority");
    let problem = refused(&format!("https://localhost:{port}"), &["--ca", &cert]);
    assert!(problem.contains("-addext basicConstraints=critical,CA:FALSE"), "{problem}");

    let (_server, cert, port) = serve_with("own");
    let url = format!("https://localhost:{port}");
    let trusted = tidegate(&["check", "user=a", "--server", &url, "--ca", &cert]);
    assert_eq!(status(&trusted), 0, "{trusted:?}");
    assert!(refused(&url, &[]).contains("is not trusted"), "without --ca");
    assert!(refused(&format!("https://127.0.0.1:{port}"), &["--ca", &cert]).contains("subjectAltName"));
    assert!(refused(&format!("localhost:{port}"), &[]).contains("use https://"));

    let plain = serve(&[]);
    let url = format!("https://localhost:{}", plain.address("admin").port());
    assert!(refused(&url, &[]).contains("use http://"));
}
