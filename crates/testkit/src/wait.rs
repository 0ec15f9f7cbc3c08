//! Waits for conditions in other processes, and free ports.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// How long a process may take to get ready, on a machine that has much else to do.
pub const START_TIME_MAX: Duration = Duration::from_mins(1);

/// Interval between two checks of a condition. It affects no result. Shorter: less CPU for the
/// awaited processes. Longer: a test ends that much after its condition is met.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// The port of a Redis cluster's bus, above that of the server.
const CLUSTER_BUS: u16 = 10_000;

/// Waits for a condition, and panics after the timeout. The state of other processes can only be
/// polled, and tests poll only here.
#[expect(clippy::disallowed_methods, reason = "waits for other processes, which have no injected clock")]
pub fn wait_until(awaited: &str, time_max: Duration, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + time_max;
    while !condition() {
        assert!(Instant::now() < deadline, "waited {time_max:?} for {awaited}");
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Waits until `address` accepts connections.
pub fn wait_for_port(name: &str, address: SocketAddr) {
    wait_until(&format!("{name} at {address}"), START_TIME_MAX, || TcpStream::connect(address).is_ok());
}

/// Returns a port that was free a moment ago, for programs that cannot choose one themselves. Its
/// bus port in a Redis cluster was free too.
pub fn free_port() -> u16 {
    loop {
        let socket = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = socket.local_addr().expect("bound").port();
        let bus = port.checked_add(CLUSTER_BUS).map(|bus| TcpListener::bind(("127.0.0.1", bus)));
        if matches!(bus, Some(Ok(_))) {
            return port;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_is_looked_at_until_it_holds() {
        let mut looks = 0;
        wait_until("the third look", START_TIME_MAX, || {
            looks += 1;
            looks == 3
        });
        assert_eq!(looks, 3);
    }

    #[test]
    #[should_panic(expected = "waited 0ns for the impossible")]
    fn a_condition_that_never_holds_ends_the_test() {
        wait_until("the impossible", Duration::ZERO, || false);
    }
}
