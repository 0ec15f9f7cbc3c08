//! The number of metric series does not depend on the input of clients.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;

use support::raw::{request, send};
use support::serve;
use tidegate_testkit::Server;

/// Identifiers in one write: enough to make syscalls cheap, few enough for the server to take at once.
const PER_WRITE: usize = 100;
const IDENTIFIERS: usize = 1_000_000;
const SERIES_MAX: usize = 2_000;

#[test]
fn a_million_identifiers_leave_few_series() {
    let server = serve(&[]);
    let before = series(&server);
    throttle_a_million(&server);
    let after = series(&server);
    assert!(after <= SERIES_MAX, "{after} series");
    // Series that count for the first time appear; none appears for each identifier.
    assert!(after - before < 50, "{before} series became {after}");
}

fn throttle_a_million(server: &Server) {
    let mut stream = TcpStream::connect(server.address("resp")).unwrap();
    let mut answers = BufReader::new(stream.try_clone().unwrap());
    let mut line = String::new();
    for first in (0..IDENTIFIERS).step_by(PER_WRITE) {
        let mut commands = String::new();
        for id in first..first + PER_WRITE {
            commands.push_str(&command(&format!("user-{id}")));
        }
        stream.write_all(commands.as_bytes()).unwrap();
        // Five integers and their count for each.
        for at in 0..PER_WRITE * 6 {
            line.clear();
            answers.read_line(&mut line).unwrap();
            assert_eq!(line == "*5\r\n", at % 6 == 0, "{line:?}");
        }
    }
}

fn command(id: &str) -> String {
    let length = id.len();
    format!("*5\r\n$11\r\nCL.THROTTLE\r\n${length}\r\n{id}\r\n$2\r\n15\r\n$2\r\n30\r\n$2\r\n60\r\n")
}

fn series(server: &Server) -> usize {
    let scrape = send(server.address("admin"), &request("GET", "/metrics", &[], None));
    assert_eq!(scrape.status, 200, "{}", scrape.body);
    scrape.body.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).count()
}
