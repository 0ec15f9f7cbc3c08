//! Connections that may act for a region, and the refusal of all others.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::net::SocketAddr;
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tidegate_replication::wire::{Frame, GREETING_BYTES_MAX, Hello, Refusal, VERSION};
use tidegate_replication::{PeerCertificates, Replicator};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use common::{BURST, Region, wait_for};

const KEY: &str = "api/alice";

/// Signs certificates.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        Self { issuer }
    }

    fn certify(&self, region: &str) -> PeerCertificates {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![format!("{region}.tidegate")]).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        PeerCertificates {
            authority: self.issuer.pem().into_bytes(),
            chain: certificate.pem().into_bytes(),
            key: key.serialize_pem().into_bytes(),
        }
    }
}

fn start(region: &Region, certificates: PeerCertificates, peers: &[(&str, SocketAddr)]) -> Replicator {
    let mut config = region.config(peers);
    config.certificates = Some(certificates);
    region.start_with(config)
}

/// Connects to a region over TLS as `identity`, or without a certificate.
async fn connect(
    to: &Region,
    trusted: &PeerCertificates,
    identity: Option<&PeerCertificates>,
) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(&trusted.authority).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let builder = builder.with_root_certificates(roots);
    let config = match identity {
        None => builder.with_no_client_auth(),
        Some(shown) => {
            let chain = vec![CertificateDer::from_pem_slice(&shown.chain).unwrap()];
            builder.with_client_auth_cert(chain, PrivateKeyDer::from_pem_slice(&shown.key).unwrap()).unwrap()
        }
    };
    let name = ServerName::try_from(format!("{}.tidegate", to.name)).unwrap();
    let stream = TcpStream::connect(to.address()).await?;
    TlsConnector::from(Arc::new(config)).connect(name, stream).await
}

async fn say_hello(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    from: &str,
    to: &str,
) -> std::io::Result<Frame> {
    let hello = Hello { from: from.to_owned(), to: to.to_owned(), incarnation: 1, agreement: 0 };
    stream.write_all(&Frame::Hello(hello).encode()).await?;
    hear(stream).await
}

async fn hear(stream: &mut (impl AsyncRead + Unpin)) -> std::io::Result<Frame> {
    let length = stream.read_u32().await?;
    let mut bytes = vec![0; usize::try_from(length).unwrap()];
    stream.read_exact(&mut bytes).await?;
    Ok(Frame::decode(&bytes).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn regions_that_know_each_other_by_their_certificates_speak() {
    let authority = Authority::new();
    let [eu, us] = ["eu", "us"].map(Region::new);
    let first = start(&eu, authority.certify("eu"), &[("us", us.address())]);
    let second = start(&us, authority.certify("us"), &[("eu", eu.address())]);
    eu.wait_until_connected(KEY);
    us.wait_until_connected(KEY);
    eu.charge(KEY, 5).await;
    us.wait_for_room(KEY, BURST - 5);
    for replicator in [first, second] {
        let status = replicator.status();
        assert_eq!((status.strangers, status.peers[0].counts.refused), (0, 0), "{status:#?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_region_that_another_authority_signed_is_refused_on_both_sides() {
    let [eu, us] = ["eu", "us"].map(Region::new);
    let first = start(&eu, Authority::new().certify("eu"), &[("us", us.address())]);
    let second = start(&us, Authority::new().certify("us"), &[("eu", eu.address())]);
    for replicator in [&first, &second] {
        wait_for(replicator, "both sides to refuse", |status| {
            status.strangers > 0 && status.peers[0].counts.refused > 0 && !status.peers[0].has_link
        });
        assert!(!replicator.status().is_connected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_region_that_answers_in_place_of_another_is_not_spoken_to() {
    let authority = Authority::new();
    let [eu, us, ap] = ["eu", "us", "ap"].map(Region::new);
    let replicator = start(&eu, authority.certify("eu"), &[("us", ap.address())]);
    let _other = start(&ap, authority.certify("ap"), &[("eu", eu.address()), ("us", us.address())]);
    wait_for(&replicator, "the wrong region to be refused", |status| status.peers[0].counts.refused > 0);
    assert!(!replicator.status().peers[0].has_link);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_speaks_for_its_own_region_only() {
    let authority = Authority::new();
    let us = Region::new("us");
    let nowhere = SocketAddr::from(([127, 0, 0, 1], 1));
    let own = authority.certify("us");
    let replicator = start(&us, own.clone(), &[("eu", nowhere), ("ap", nowhere)]);
    let ap = authority.certify("ap");
    let mut stream = connect(&us, &own, Some(&ap)).await.unwrap();
    assert_eq!(say_hello(&mut stream, "eu", "us").await.unwrap(), Frame::Refused(Refusal::Certificate));
    wait_for(&replicator, "the stranger to be counted", |status| status.strangers == 1);
    let mut stream = connect(&us, &own, Some(&ap)).await.unwrap();
    assert!(matches!(say_hello(&mut stream, "ap", "us").await.unwrap(), Frame::Welcome(_)));
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_without_a_certificate_are_refused() {
    let authority = Authority::new();
    let us = Region::new("us");
    let own = authority.certify("us");
    let replicator = start(&us, own.clone(), &[("eu", ([127, 0, 0, 1], 1).into())]);
    let reply = async { say_hello(&mut connect(&us, &own, None).await?, "eu", "us").await }.await;
    let refused = reply.unwrap_err().to_string();
    assert!(refused.contains("CertificateRequired"), "{refused}");
    wait_for(&replicator, "the stranger to be counted", |status| status.strangers == 1);
    let mut plain = TcpStream::connect(us.address()).await.unwrap();
    assert!(say_hello(&mut plain, "eu", "us").await.is_err() || hear(&mut plain).await.is_err());
    wait_for(&replicator, "the stranger to be counted", |status| status.strangers == 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_of_another_region_is_found_before_anything_starts() {
    let authority = Authority::new();
    let us = Region::new("us");
    let mut config = us.config(&[("eu", ([127, 0, 0, 1], 1).into())]);
    config.certificates = Some(authority.certify("eu"));
    let problems = Replicator::start(config.clone(), us.origin.clone()).unwrap_err().problems;
    assert_eq!(problems, ["peer_cert: the certificate is not for us.tidegate"]);
    config.certificates = Some(PeerCertificates { key: Vec::new(), ..authority.certify("us") });
    let problems = Replicator::start(config, us.origin.clone()).unwrap_err().problems;
    assert!(problems[0].starts_with("peer_key: "), "{problems:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_or_wrong_region_is_refused() {
    let us = Region::new("us");
    let replicator = us.start(&[("eu", ([127, 0, 0, 1], 1).into())]);
    let cases = [
        (("ap", "us"), Refusal::UnknownRegion),
        (("us", "us"), Refusal::UnknownRegion),
        (("eu", "ap"), Refusal::WrongRegion),
    ];
    for (number, ((from, to), refusal)) in (1..).zip(cases) {
        let mut stream = TcpStream::connect(us.address()).await.unwrap();
        assert_eq!(say_hello(&mut stream, from, to).await.unwrap(), Frame::Refused(refusal));
        wait_for(&replicator, "the stranger to be counted", |status| status.strangers == number);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_frames_and_other_versions_are_refused_and_counted() {
    let us = Region::new("us");
    let replicator = us.start(&[("eu", ([127, 0, 0, 1], 1).into())]);
    let too_long = u32::try_from(GREETING_BYTES_MAX + 1).unwrap().to_be_bytes().to_vec();
    let other_version = vec![0, 0, 0, 3, 1, u8::try_from(VERSION + 1).unwrap(), 0];
    let cases = [
        (too_long, Refusal::Nonsense),
        (vec![0, 0, 0, 1, 99], Refusal::Nonsense),
        (other_version, Refusal::Version),
    ];
    for (number, (bytes, refusal)) in (1..).zip(cases) {
        let mut stream = TcpStream::connect(us.address()).await.unwrap();
        stream.write_all(&bytes).await.unwrap();
        assert_eq!(hear(&mut stream).await.unwrap(), Frame::Refused(refusal));
        wait_for(&replicator, "the stranger to be counted", |status| status.strangers == number);
    }
    let mut stream = TcpStream::connect(us.address()).await.unwrap();
    assert!(matches!(say_hello(&mut stream, "eu", "us").await.unwrap(), Frame::Welcome(_)));
    stream.write_all(&[0, 0, 0, 1, 99]).await.unwrap();
    assert_eq!(hear(&mut stream).await.unwrap(), Frame::Refused(Refusal::Nonsense));
    wait_for(&replicator, "the stranger to be counted", |status| status.peers[0].counts.refused == 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_that_say_nothing_and_stay_leave_room_for_peers() {
    let us = Region::new("us");
    let replicator = us.start(&[("eu", ([127, 0, 0, 1], 1).into())]);
    let mut silent = Vec::new();
    // From when on the first of them had to leave there is no more room.
    while replicator.status().strangers == 0 {
        silent.push(TcpStream::connect(us.address()).await.unwrap());
        assert!(silent.len() < 10_000, "the connections of a region are bounded");
    }
    let mut stream = TcpStream::connect(us.address()).await.unwrap();
    assert!(matches!(say_hello(&mut stream, "eu", "us").await.unwrap(), Frame::Welcome(_)));
    drop(silent);
}
