//! Limits for misbehaving clients: silent, slow, too many, or without a token.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::{Ping, PingPong};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use support::{serve, tool};
use tidegate_testkit::{Server, wait_until};
use tokio::task::JoinHandle;

/// How long a server may take to notice, on a machine that has much else to do.
const NOTICE_TIME_MAX: Duration = Duration::from_secs(30);

const LISTENERS: [&str; 3] = ["http", "resp", "admin"];

const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// A message of gRPC: domain "d", and a descriptor with the entry "k" = "v" and a limit of one a
/// minute.
const ONE_A_MINUTE: &[u8] =
    b"\0\0\0\0\x13\x0a\x01d\x12\x0e\x0a\x06\x0a\x01k\x12\x01v\x12\x04\x08\x01\x10\x02";

#[test]
fn idle_connections_are_closed() {
    let server = serve(&["--idle-timeout", "1s"]);
    for listener in LISTENERS {
        let mut silent = connect(server.address(listener));
        assert!(is_closed(&mut silent), "{listener}");
    }
    assert!(metric(&server, "tidegate_connections_timed_out_total") >= 3);
}

#[test]
fn partial_request_times_out_before_an_idle_connection() {
    let server = serve(&["--idle-timeout", "1d", "--request-timeout", "100ms"]);
    let halves: [&[u8]; 3] =
        [b"POST /v1/check HTTP/1.1\r\nhost: h\r\ncontent-le", b"*2\r\n$4\r\nEC", b"GET /hea"];
    for (listener, half) in LISTENERS.iter().zip(halves) {
        let mut slow = connect(server.address(listener));
        slow.write_all(half).unwrap();
        assert!(is_closed(&mut slow), "{listener}");
    }
    let mut slow = connect(server.address("http"));
    slow.write_all(b"POST /v1/check HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\n\r\n{\"dim").unwrap();
    assert!(is_closed(&mut slow), "a body");
}

#[test]
fn client_that_never_reads_is_disconnected() {
    let server = serve(&["--idle-timeout", "1d", "--request-timeout", "100ms"]);
    let mut deaf = connect(server.address("resp"));
    deaf.set_nonblocking(true).unwrap();
    let pings = b"PING\r\n".repeat(10_000);
    wait_until("a client that does not read to be cut", NOTICE_TIME_MAX, || match deaf.write(&pings) {
        Ok(_) => false,
        Err(error) => error.kind() != ErrorKind::WouldBlock,
    });
}

#[test]
fn silent_connections_are_closed_long_before_idle_ones() {
    let folder = tempfile::tempdir().unwrap();
    let timeouts = ["--idle-timeout", "1d", "--request-timeout", "100ms"];
    let plain = serve(&timeouts);
    let (encrypted, _) = start_with_tls(folder.path(), &timeouts);
    for (server, name) in [(&plain, "plain"), (&encrypted, "TLS")] {
        for listener in ["http", "grpc", "resp", "admin"] {
            assert!(is_closed(&mut connect(server.address(listener))), "{name} {listener}");
        }
    }
    assert_eq!(metric(&plain, "tidegate_connections_timed_out_total"), 4);
    // A client that has sent a request may stay.
    let mut idle = connect(plain.address("resp"));
    ping(&mut idle);
    assert!(is_closed(&mut connect(plain.address("resp"))));
    ping(&mut idle);
}

#[test]
fn half_of_a_greeting_or_head_of_http2_is_closed() {
    let server = serve(&["--idle-timeout", "1d", "--request-timeout", "100ms"]);
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    let half_of_head = [0, 0, 9, 1, 0, 0, 0, 0, 1, 0x83];
    let whole_frame_of_head = [0, 0, 1, 1, 0, 0, 0, 0, 1, 0x83];
    let greeting = [&preface[..], &settings].concat();
    for (name, sent) in [
        ("preface", preface[..20].to_vec()),
        ("greeting", preface.to_vec()),
        ("frame", [&greeting[..], &half_of_head].concat()),
        ("head", [&greeting[..], &whole_frame_of_head].concat()),
    ] {
        let mut slow = connect(server.address("grpc"));
        slow.write_all(&sent).unwrap();
        assert!(is_closed(&mut slow), "{name}");
    }
}

#[test]
fn the_longest_idle_connection_gives_way_to_a_new_one() {
    let server = serve(&["--connections-max", "2"]);
    let address = server.address("resp");
    let mut first: Vec<TcpStream> = (0..2).map(|_| connect(address)).collect();
    for client in &mut first {
        ping(client);
    }
    let mut new = connect(address);
    ping(&mut new);
    assert!(is_closed(&mut first[0]));
    ping(&mut first[1]);
    assert_eq!(metric(&server, "tidegate_connections_evicted_total{listener=\"resp\"}"), 1);
    assert_eq!(metric(&server, "tidegate_connections_refused_total{listener=\"resp\"}"), 0);
}

#[test]
fn requests_under_way_do_not_give_way() {
    let server = serve(&["--connections-max", "2"]);
    let address = server.address("resp");
    let mut first: Vec<TcpStream> = (0..2).map(|_| connect(address)).collect();
    for client in &mut first {
        client.write_all(b"PING\r\nPIN").unwrap();
        read_pong(client);
    }
    // The server has taken its next turn since then.
    assert_eq!(metric(&server, "tidegate_connections_evicted_total{listener=\"resp\"}"), 0);
    assert!(is_closed(&mut connect(address)));
    assert_eq!(metric(&server, "tidegate_connections_refused_total{listener=\"resp\"}"), 1);
    assert_eq!(metric(&server, "tidegate_connections_evicted_total{listener=\"resp\"}"), 0);
    // The other connections stay open, and a closed one makes room.
    first[0].write_all(b"G\r\n").unwrap();
    read_pong(&mut first[0]);
    first.pop();
    wait_until("room for another", NOTICE_TIME_MAX, || {
        let mut next = connect(address);
        next.write_all(b"PING\r\n").is_ok() && matches!(next.read(&mut [0; 7]), Ok(7))
    });
}

#[test]
fn nothing_is_read_from_strangers() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config.toml");
    let hash = tidegate_server::auth::TokenHash::of(b"known");
    std::fs::write(&config, format!("[[tokens]]\nname = 't'\nhash = '{hash}'\n")).unwrap();
    let server = serve(&["--config", config.to_str().unwrap()]);
    let mut stranger = connect(server.address("http"));
    // The body never arrives, and the server does not wait for it.
    stranger.write_all(b"POST /v1/check HTTP/1.1\r\nhost: h\r\ncontent-length: 500000\r\n\r\n{").unwrap();
    let mut head = [0; 12];
    stranger.read_exact(&mut head).unwrap();
    assert_eq!(&head, b"HTTP/1.1 401");
}

#[test]
fn half_a_call_of_grpc_is_cut() {
    let server = serve(&["--idle-timeout", "1d", "--request-timeout", "100ms"]);
    in_time(async {
        let Http2 { mut calls, .. } = Http2::connect(&server).await;
        for (path, status) in [
            (SHOULD_RATE_LIMIT, "4"),
            ("/grpc.health.v1.Health/Check", "4"),
            ("/grpc.health.v1.Health/Watch", "4"),
            // Its dialogue just ends.
            ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "0"),
            ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "0"),
        ] {
            let (answer, mut body) = calls.send_request(call(path), false).unwrap();
            body.send_data(Bytes::from_static(&[0, 0, 0]), false).unwrap();
            assert_eq!(grpc_status(answer).await, status, "{path}");
        }
    });
}

#[test]
fn pings_alone_do_not_keep_a_connection_of_grpc() {
    let server = serve(&["--idle-timeout", "1s"]);
    in_time(async {
        let Http2 { mut calls, mut pings, .. } = Http2::connect(&server).await;
        let (answer, mut body) = calls.send_request(call("/grpc.health.v1.Health/Watch"), false).unwrap();
        body.send_data(Bytes::from_static(&[0; 5]), true).unwrap();
        let _watched = answer.await.unwrap();

        let mut idle = Http2::connect(&server).await;
        let mut pace = tokio::time::interval(Duration::from_millis(10));
        while idle.pings.ping(Ping::opaque()).await.is_ok() {
            pings.ping(Ping::opaque()).await.unwrap();
            pace.tick().await;
        }
        idle.ended.await.unwrap().expect("told to go, not cut");
        // The older connection has an open `Watch` call, so it does not time out.
        pings.ping(Ping::opaque()).await.unwrap();
    });
    assert_eq!(metric(&server, "tidegate_connections_timed_out_total"), 1);
}

#[test]
fn grpc_client_without_window_is_disconnected() {
    let server = serve(&["--idle-timeout", "1d", "--request-timeout", "100ms"]);
    in_time(async {
        for (path, message) in
            [("/grpc.health.v1.Health/Check", &[0; 5][..]), (SHOULD_RATE_LIMIT, ONE_A_MINUTE)]
        {
            let mut deaf =
                Http2::connect_with(&server, h2::client::Builder::new().initial_window_size(0)).await;
            let (answer, mut body) = deaf.calls.send_request(call(path), false).unwrap();
            body.send_data(Bytes::copy_from_slice(message), true).unwrap();
            let _head = answer.await.unwrap();
            let mut pace = tokio::time::interval(Duration::from_millis(10));
            while deaf.pings.ping(Ping::opaque()).await.is_ok() {
                pace.tick().await;
            }
        }
    });
    assert_eq!(metric(&server, "tidegate_connections_timed_out_total"), 2);
}

/// A connection that speaks HTTP/2, frame by frame.
struct Http2 {
    calls: SendRequest<Bytes>,
    pings: PingPong,
    ended: JoinHandle<Result<(), h2::Error>>,
}

impl Http2 {
    async fn connect(server: &Server) -> Self {
        Self::connect_with(server, &h2::client::Builder::new()).await
    }

    async fn connect_with(server: &Server, settings: &h2::client::Builder) -> Self {
        let stream = tokio::net::TcpStream::connect(server.address("grpc")).await.unwrap();
        let (calls, mut connection) = settings.handshake(stream).await.unwrap();
        let pings = connection.ping_pong().unwrap();
        let ended = tokio::spawn(connection);
        Self { calls: calls.ready().await.unwrap(), pings, ended }
    }
}

fn call(path: &str) -> http::Request<()> {
    let head = http::Request::post(format!("http://localhost{path}"));
    head.header("content-type", "application/grpc").header("te", "trailers").body(()).unwrap()
}

/// Returns the gRPC status of a call, from its headers or trailers.
async fn grpc_status(answer: ResponseFuture) -> String {
    let (head, mut body) = answer.await.unwrap().into_parts();
    let mut fields = head.headers;
    while body.data().await.is_some_and(|data| data.is_ok()) {}
    fields.extend(body.trailers().await.unwrap().unwrap_or_default());
    fields["grpc-status"].to_str().unwrap().to_owned()
}

fn in_time(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let ended = runtime.block_on(async { tokio::time::timeout(NOTICE_TIME_MAX, test).await });
    assert!(ended.is_ok(), "not done after {NOTICE_TIME_MAX:?}");
}

#[test]
fn curl_asks_over_tls_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let (server, _) = start_with_tls(folder.path(), &[]);
    for (listener, path) in [("http", "/openapi.json"), ("admin", "/healthz")] {
        curl_over_tls(folder.path(), &server, listener, path);
    }
}

#[test]
fn tls_client_that_never_reads_is_disconnected() {
    let folder = tempfile::tempdir().unwrap();
    let (server, cert) =
        start_with_tls(folder.path(), &["--idle-timeout", "1d", "--request-timeout", "100ms"]);
    let mut roots = RootCertStore::empty();
    roots.add(cert).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").unwrap();
    let mut session = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut deaf = connect(server.address("resp"));
    session.complete_io(&mut deaf).unwrap();
    deaf.set_nonblocking(true).unwrap();
    let pings = b"PING\r\n".repeat(1_000);
    wait_until("a client that does not read to be cut", NOTICE_TIME_MAX, || {
        if !session.wants_write() {
            session.writer().write_all(&pings).unwrap();
        }
        match session.write_tls(&mut deaf) {
            Ok(_) => false,
            Err(error) => error.kind() != ErrorKind::WouldBlock,
        }
    });
    let scrape = curl_over_tls(folder.path(), &server, "admin", "/metrics");
    assert!(scrape.contains("\ntidegate_connections_timed_out_total 1\n"), "{scrape}");
}

/// A server with a certificate that is its own authority.
fn start_with_tls(folder: &Path, arguments: &[&str]) -> (Server, CertificateDer<'static>) {
    let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
    let made = rcgen::generate_simple_self_signed(names).unwrap();
    let [cert, key] = ["cert.pem", "key.pem"].map(|name| folder.join(name));
    std::fs::write(&cert, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let tls = ["--tls-cert", cert.to_str().unwrap(), "--tls-key", key.to_str().unwrap()];
    (serve(&[&tls, arguments].concat()), made.cert.der().clone())
}

fn curl_over_tls(folder: &Path, server: &Server, listener: &str, path: &str) -> String {
    let url = format!("https://{}{path}", server.address(listener));
    let mut curl = Command::new(tool("curl"));
    let output =
        curl.args(["-sS", "--fail", "--cacert"]).arg(folder.join("cert.pem")).arg(&url).output().unwrap();
    assert!(output.status.success(), "{url}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(NOTICE_TIME_MAX)).unwrap();
    stream
}

fn ping(client: &mut TcpStream) {
    client.write_all(b"PING\r\n").unwrap();
    read_pong(client);
}

fn read_pong(client: &mut TcpStream) {
    let mut pong = [0; 7];
    client.read_exact(&mut pong).unwrap();
    assert_eq!(&pong, b"+PONG\r\n");
}

/// Whether the other end closes, with or without a last word, before the time to notice is over.
fn is_closed(client: &mut TcpStream) -> bool {
    match client.read_to_end(&mut Vec::new()) {
        Ok(_) => true,
        Err(error) => matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe),
    }
}

fn metric(server: &Server, name: &str) -> u64 {
    let mut admin = connect(server.address("admin"));
    admin.write_all(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    admin.read_to_string(&mut text).unwrap();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .unwrap_or_else(|| panic!("no {name} in {text}"));
    line.trim().parse().unwrap()
}
