//! Many slow clients at once: health checks get through, and memory stays within its budget.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]
#![cfg(target_os = "linux")]

mod support;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use bytes::Bytes;
use h2::SendStream;
use h2::client::ResponseFuture;
use support::raw::{Reply, begin, request, send};
use support::{serve, token_entry, write};
use tidegate_testkit::{START_TIME_MAX, Server, wait_until};

/// Longest time of a health check while others crowd the listener.
const HEALTH_TIME_MAX: Duration = Duration::from_secs(1);

/// The budget of these servers.
const BUDGET: &str = "8MB";
const BUDGET_KB: u64 = 8 << 10;

/// Memory that a server may take beside the budget: 32 KiB for each of 2,000 connections that are
/// open at once, and 32 MiB of unused room of its allocator.
const MARGIN_KB: u64 = 2_000 * 32 + (32 << 10);

#[test]
fn health_checks_get_through_a_crowd_of_silent_clients() {
    health_checks_get_through(b"");
}

#[test]
fn health_checks_get_through_a_crowd_of_slow_clients() {
    health_checks_get_through(b"GET /healthz HTTP/1.1\r\nhost: local");
}

/// Fills the admin and the HTTP listener with clients that sent `half` of a request, and asks for
/// the health of the server again and again.
fn health_checks_get_through(half: &[u8]) {
    let server = serve(&["--request-timeout", "5m", "--connections-max", "300"]);
    let fill = |listener: &str, count: usize| -> Vec<TcpStream> {
        (0..count).map(|_| begin(server.address(listener), half)).collect()
    };
    let mut crowd = fill("http", 400);
    crowd.extend(fill("admin", 400));
    for asked in 0..100 {
        // More of them come all the time.
        crowd.extend(fill("admin", 1));
        for (path, body) in [("/healthz", "ok\n"), ("/readyz", "ready\n")] {
            let mut client = begin(server.address("admin"), &request("GET", path, &[], None));
            client.set_read_timeout(Some(HEALTH_TIME_MAX)).unwrap();
            let mut answer = String::new();
            let read = client.read_to_string(&mut answer);
            assert!(read.is_ok() && answer.ends_with(body), "{path}, turn {asked}: {read:?} {answer:?}");
        }
    }
}

#[test]
fn a_full_listener_answers_health_checks_only() {
    let server = serve(&["--request-timeout", "5m"]);
    let half = b"GET /healthz HTTP/1.1\r\n";
    let mut crowd: Vec<TcpStream> = (0..256).map(|_| begin(server.address("admin"), half)).collect();
    wait_until("the listener to be full", START_TIME_MAX, || {
        crowd.push(begin(server.address("admin"), half));
        let reply = send(server.address("admin"), &request("GET", "/v1/status", &[], None));
        reply.status == 503 && reply.body.contains("only /healthz and /readyz are answered")
    });
    let reply = send(server.address("admin"), &request("GET", "/readyz", &[], None));
    assert_eq!((reply.status, reply.body.as_str()), (200, "ready\n"));
    drop(crowd);
    wait_until("room for others", START_TIME_MAX, || {
        send(server.address("admin"), &request("GET", "/v1/status", &[], None)).status == 200
    });
}

/// The head of a check with a long body, and a part of the body.
fn half_of_check(token: Option<&str>, body_bytes: usize) -> Vec<u8> {
    let token = token.map_or_else(String::new, |token| format!("Authorization: Bearer {token}\r\n"));
    let head =
        format!("POST /v1/check HTTP/1.1\r\nHost: localhost\r\n{token}Content-Length: 500000\r\n\r\n{{");
    let mut bytes = head.into_bytes();
    bytes.resize(bytes.len() + body_bytes, b' ');
    bytes
}

/// Sends bytes on connections of its own. Those that the server refuses may be cut while it sends.
fn crowd(address: SocketAddr, count: usize, bytes: &[u8]) -> Vec<TcpStream> {
    let one = || {
        let mut stream = TcpStream::connect(address).unwrap();
        let _ = stream.write_all(bytes);
        stream
    };
    (0..count).map(|_| one()).collect()
}

/// The beginning of the answers that came so far.
fn answers(crowd: &[TcpStream]) -> Vec<String> {
    let answer = |stream: &TcpStream| {
        stream.set_nonblocking(true).unwrap();
        let mut bytes = [0; 1_000];
        let count = stream.peek(&mut bytes).unwrap_or_default();
        String::from_utf8_lossy(&bytes[..count]).into_owned()
    };
    crowd.iter().map(answer).filter(|answer| !answer.is_empty()).collect()
}

#[test]
fn half_sent_bodies_stay_within_the_request_memory() {
    let server = serve(&["--request-memory", BUDGET, "--request-timeout", "5m"]);
    let before_kb = resident_kb(&server);
    let crowd = crowd(server.address("http"), 2_000, &half_of_check(None, 200_000));
    let grown_kb = resident_kb(&server) - before_kb;
    assert!(grown_kb <= BUDGET_KB + MARGIN_KB, "{grown_kb} kB more for 400 MB that were sent");
    // One tenant may hold half of the budget: 20 of these.
    let refused = "tidegate_request_memory_refused_total{limit=\"tenant\"}";
    wait_until("those beyond to be refused", START_TIME_MAX, || metric(&server, refused) == 1_980);
    let held = metric(&server, "tidegate_request_memory_bytes");
    assert!((3 << 20..=4 << 20).contains(&held), "{held}");
    let answers = answers(&crowd);
    assert!(!answers.is_empty());
    for answer in answers {
        assert!(answer.starts_with("HTTP/1.1 429 ") && answer.contains("request_memory: "), "{answer}");
        assert!(answer.contains("retry-after: 1\r\n"), "{answer}");
    }
    // A request that arrives at once needs no room.
    let reply = send(server.address("http"), &whole_check());
    assert_eq!(reply.status, 200, "{}", reply.body);
    drop(crowd);
    wait_until("the memory to be free", START_TIME_MAX, || {
        metric(&server, "tidegate_request_memory_bytes") == 0
    });
    eprintln!("{grown_kb} kB more for 2,000 half-sent bodies");
}

#[test]
fn half_sent_heads_of_strangers_stay_within_their_part() {
    let folder = tempfile::tempdir().unwrap();
    let config = write(folder.path(), "tidegate.toml", &token_entry("known", "", "admin"));
    let server = serve(&["--config", &config, "--request-memory", BUDGET, "--request-timeout", "5m"]);
    let head = format!("GET /v1/check HTTP/1.1\r\nhost: localhost\r\nx-long: {}", "x".repeat(20_000));
    let crowd = crowd(server.address("http"), 200, head.as_bytes());
    let refused = "tidegate_request_memory_refused_total{limit=\"address\"}";
    let scrape = |name| metric_as(&server, "known", name);
    // One address may hold half of a quarter: about 51 of these, as their bytes arrive in more or
    // fewer reads.
    wait_until("those beyond to be refused", START_TIME_MAX, || scrape(refused) >= 100);
    assert!(scrape("tidegate_request_memory_bytes") <= 1 << 20);
    for answer in answers(&crowd) {
        assert!(answer.starts_with("HTTP/1.1 429 ") && answer.contains("request_memory: "), "{answer}");
    }
}

#[test]
fn a_slow_tenant_leaves_room_for_another() {
    let folder = tempfile::tempdir().unwrap();
    let tenants = ["red", "blue"];
    let entry = |name: &&str| format!("[[tenants]]\nname = '{name}'\n{}", token_entry(name, name, "client"));
    let file: String = tenants.iter().map(entry).chain([token_entry("known", "", "admin")]).collect();
    let config = write(folder.path(), "tidegate.toml", &file);
    let server = serve(&["--config", &config, "--request-memory", BUDGET, "--request-timeout", "5m"]);
    let _crowd = crowd(server.address("http"), 100, &half_of_check(Some("red"), 200_000));
    let refused = "tidegate_request_memory_refused_total{limit=\"tenant\"}";
    wait_until("those beyond to be refused", START_TIME_MAX, || metric_as(&server, "known", refused) >= 70);
    // Blue sends as long a body in two parts.
    let of_red = metric_as(&server, "known", "tidegate_request_memory_bytes");
    let body = format!("{{\"dimensions\":{{\"user\":\"a\"}}{}}}", " ".repeat(499_973));
    let half = half_of_check(Some("blue"), 0);
    let (head, _) = half.split_at(half.len() - 1);
    let mut blue = begin(server.address("http"), &[head, &body.as_bytes()[..400_000]].concat());
    wait_until("blue to hold its part", START_TIME_MAX, || {
        metric_as(&server, "known", "tidegate_request_memory_bytes") >= of_red + 400_000
    });
    blue.write_all(&body.as_bytes()[400_000..]).unwrap();
    blue.set_read_timeout(Some(START_TIME_MAX)).unwrap();
    let mut status = [0; 12];
    blue.read_exact(&mut status).unwrap();
    assert_eq!(&status, b"HTTP/1.1 200");
}

#[test]
fn half_sent_arguments_of_redis_clients_stay_within_the_request_memory() {
    let server = serve(&["--request-memory", BUDGET, "--request-timeout", "5m"]);
    let before_kb = resident_kb(&server);
    let half = [&b"PING\r\n*2\r\n$4\r\nECHO\r\n$61440\r\n"[..], &b"x".repeat(60_000)].concat();
    let crowd = crowd(server.address("resp"), 1_000, &half);
    let refused = "tidegate_request_memory_refused_total{limit=\"tenant\"}";
    wait_until("those beyond to be refused", START_TIME_MAX, || metric(&server, refused) >= 1_000 - 69);
    let grown_kb = resident_kb(&server) - before_kb;
    assert!(grown_kb <= BUDGET_KB + MARGIN_KB, "{grown_kb} kB more for 60 MB that were sent");
    let is_refused = |answer: &&String| answer.starts_with("+PONG\r\n-ERR request_memory: ");
    assert!(answers(&crowd).iter().filter(is_refused).count() > 0);
    let mut last = begin(server.address("resp"), b"PING\r\n");
    last.read_exact(&mut [0; 7]).unwrap();
    eprintln!("{grown_kb} kB more for 1,000 half-sent arguments");
}

#[test]
fn half_sent_messages_of_grpc_are_refused_as_exhausted() {
    let server = serve(&["--request-memory", BUDGET, "--request-timeout", "5s"]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let statuses = runtime.block_on(async {
        let mut begun = Vec::new();
        for _ in 0..40 {
            begun.push(half_of_call(server.address("grpc")).await);
        }
        let mut statuses = Vec::new();
        for (answer, _body) in begun {
            let head = answer.await.unwrap();
            statuses.push(head.headers()["grpc-status"].to_str().unwrap().to_owned());
        }
        statuses
    });
    // RESOURCE_EXHAUSTED, and DEADLINE_EXCEEDED for those that had room: half of the budget.
    let count = |status: &str| statuses.iter().filter(|known| *known == status).count();
    assert_eq!((count("8"), count("4")), (24, 16), "{statuses:?}");
}

/// Begins a call on a connection of its own, and sends a part of its message.
async fn half_of_call(address: SocketAddr) -> (ResponseFuture, SendStream<Bytes>) {
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let (calls, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    let path = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
    let head = http::Request::post(format!("http://localhost{path}"));
    let head = head.header("content-type", "application/grpc").body(()).unwrap();
    let (answer, mut body) = calls.ready().await.unwrap().send_request(head, false).unwrap();
    body.send_data(Bytes::from(vec![0; 250_000]), false).unwrap();
    (answer, body)
}

#[test]
fn slow_requests_are_told_why_they_end() {
    let server = serve(&["--request-timeout", "100ms"]);
    for (name, sent) in
        [("body", half_of_check(None, 10)), ("head", b"GET /openapi.json HTTP/1.1\r\n".to_vec())]
    {
        let reply: Reply = send(server.address("http"), &sent);
        assert_eq!(reply.status, 408, "{name}: {}", reply.body);
        assert!(reply.body.contains("request_timeout: "), "{name}: {}", reply.body);
    }
    let mut slow = begin(server.address("resp"), b"*1\r\n$4\r\nPI");
    slow.set_read_timeout(Some(START_TIME_MAX)).unwrap();
    let mut answer = String::new();
    slow.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("-ERR request_timeout: "), "{answer}");
    // Only the rest of a body is missing after `100 Continue`.
    let expecting =
        b"POST /v1/check HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\nexpect: 100-continue\r\n\r\n";
    let mut slow = begin(server.address("http"), expecting);
    slow.set_read_timeout(Some(START_TIME_MAX)).unwrap();
    let mut answer = String::new();
    slow.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 408 "), "{answer}");
}

fn whole_check() -> Vec<u8> {
    request("POST", "/v1/check", &[], Some(r#"{"dimensions":{"user":"alice"}}"#))
}

/// The resident memory of a server, in kB.
fn resident_kb(server: &Server) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.process.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn metric(server: &Server, name: &str) -> u64 {
    metric_as(server, "", name)
}

fn metric_as(server: &Server, token: &str, name: &str) -> u64 {
    let token = format!("Bearer {token}");
    let reply =
        send(server.address("admin"), &request("GET", "/metrics", &[("authorization", &token)], None));
    let line = reply.body.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap_or_else(|| panic!("no {name} in {}", reply.body)).trim().parse().unwrap()
}
