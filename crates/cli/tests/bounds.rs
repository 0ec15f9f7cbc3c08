//! Every client has its bounds: the silent, the slow, the many, and the strangers.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::time::Duration;

use support::{Server, tool, wait_until};

/// How long a server may take to notice, on a machine that has much else to do.
const NOTICE_TIME_MAX: Duration = Duration::from_secs(30);

const LISTENERS: [&str; 3] = ["http", "resp", "admin"];

#[test]
fn the_silent_are_cut() {
    let server = Server::start(&["--idle-timeout", "1s"]);
    for listener in LISTENERS {
        let mut silent = connect(server.address(listener));
        assert!(is_closed(&mut silent), "{listener}");
    }
    assert!(metric(&server, "tidegate_connections_timed_out_total") >= 3);
}

#[test]
fn half_a_request_is_cut_long_before_a_silent_connection() {
    let server = Server::start(&["--idle-timeout", "1d", "--request-timeout", "100ms"]);
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
fn who_never_takes_an_answer_is_cut() {
    let server = Server::start(&["--idle-timeout", "1d", "--request-timeout", "100ms"]);
    let mut deaf = connect(server.address("resp"));
    deaf.set_nonblocking(true).unwrap();
    let pings = b"PING\r\n".repeat(10_000);
    wait_until("a client that does not read to be cut", NOTICE_TIME_MAX, || match deaf.write(&pings) {
        Ok(_) => false,
        Err(error) => error.kind() != ErrorKind::WouldBlock,
    });
}

#[test]
fn more_connections_than_allowed_are_closed_at_once() {
    let server = Server::start(&["--connections-max", "2"]);
    let address = server.address("resp");
    let mut first: Vec<TcpStream> = (0..2).map(|_| connect(address)).collect();
    for client in &mut first {
        ping(client);
    }
    assert!(is_closed(&mut connect(address)));
    assert_eq!(metric(&server, "tidegate_connections_refused_total{listener=\"resp\"}"), 1);
    // The others go on, and who leaves makes room.
    ping(&mut first[0]);
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
    let server = Server::start(&["--config", config.to_str().unwrap()]);
    let mut stranger = connect(server.address("http"));
    // The body never comes, and is not waited for.
    stranger.write_all(b"POST /v1/check HTTP/1.1\r\nhost: h\r\ncontent-length: 500000\r\n\r\n{").unwrap();
    let mut head = [0; 12];
    stranger.read_exact(&mut head).unwrap();
    assert_eq!(&head, b"HTTP/1.1 401");
}

#[test]
fn curl_asks_over_tls_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
    let made = rcgen::generate_simple_self_signed(names).unwrap();
    let [cert, key] = ["cert.pem", "key.pem"].map(|name| folder.path().join(name));
    std::fs::write(&cert, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let (cert, key) = (cert.to_str().unwrap(), key.to_str().unwrap());
    let server = Server::start(&["--tls-cert", cert, "--tls-key", key]);
    for (listener, path) in [("http", "/openapi.json"), ("admin", "/healthz")] {
        let url = format!("https://{}{path}", server.address(listener));
        let output =
            Command::new(tool("curl")).args(["-sS", "--fail", "--cacert", cert, &url]).output().unwrap();
        assert!(output.status.success(), "{url}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(NOTICE_TIME_MAX)).unwrap();
    stream
}

fn ping(client: &mut TcpStream) {
    client.write_all(b"PING\r\n").unwrap();
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
    admin.write_all(b"GET /metrics HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    admin.read_to_string(&mut text).unwrap();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .unwrap_or_else(|| panic!("no {name} in {text}"));
    line.trim().parse().unwrap()
}
