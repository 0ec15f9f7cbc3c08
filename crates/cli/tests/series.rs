//! The number of metric series does not depend on the input of clients.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::time::Duration;

use support::raw::{request, send};
use support::serve;
use tidegate_load::{RespConnection, throttle};
use tidegate_testkit::{START_TIME_MAX, Server};

/// Identifiers in one write: enough to make syscalls cheap, few enough for the server to take at
/// once.
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
    let mut connection = RespConnection::open(server.address("resp"), START_TIME_MAX).unwrap();
    let command = |id| throttle(&format!("user-{id}"), 30, Duration::from_mins(1));
    for first in (0..IDENTIFIERS).step_by(PER_WRITE) {
        connection.send(&(first..first + PER_WRITE).map(command).collect::<String>()).unwrap();
        (0..PER_WRITE).for_each(|_| assert!(connection.read().unwrap().is_ok()));
    }
}

fn series(server: &Server) -> usize {
    let scrape = send(server.address("admin"), &request("GET", "/metrics", &[], None));
    assert_eq!(scrape.status, 200, "{}", scrape.body);
    scrape.body.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).count()
}
