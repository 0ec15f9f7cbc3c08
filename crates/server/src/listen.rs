//! Listeners: accept, count, and hand each connection to a worker.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use crate::metrics::Listener;
use crate::open_files::HEALTH_CONNECTIONS_MAX;
use crate::shared::Shared;
use crate::slots::{Evictor, Slots, TakenSlot};

/// Connections that wait to be accepted. Higher: larger bursts of new clients; more memory in the
/// kernel.
const BACKLOG: u32 = 1_024;

/// Accepted connections that wait for their worker. When it is full, accepting waits.
pub(crate) const HANDED_OVER_MAX: usize = 1_024;

/// How long to wait after connections could not be accepted, at first and at most. Longer: less
/// time burnt; clients wait longer once they can be accepted again.
const RETRY_WAIT_MIN: Duration = Duration::from_millis(5);
const RETRY_WAIT_MAX: Duration = Duration::from_millis(500);

/// Interval between log lines about connections that cannot be accepted. Shorter: more detail; a
/// longer log.
const SAY_EVERY: Duration = Duration::from_secs(1);

/// How long a new connection waits for an evicted one to close, and how many are evicted for it.
/// Higher: fewer refused connections while workers are busy; accepting pauses for longer.
const EVICTION_WAIT: Duration = Duration::from_millis(100);
const EVICTIONS_MAX: usize = 3;

/// Interval between searches of a listener that has no idle connection. Shorter: an idle one is
/// found earlier; a flood of new connections costs more time.
const SEARCH_EVERY: Duration = Duration::from_millis(20);

/// A connection on its way to a worker.
pub(crate) struct AcceptedConnection {
    pub(crate) listener: Listener,
    pub(crate) stream: std::net::TcpStream,
    pub(crate) peer: SocketAddr,
    /// Given back when the connection ends.
    pub(crate) slot: TakenSlot,
    /// Whether it may only ask for the health of the server, because the listener is full.
    pub(crate) for_health: bool,
}

/// The connections of a listener, up to its limit.
struct Room {
    permits: Arc<Semaphore>,
    slots: Arc<Slots>,
    evictor: Evictor,
    /// Pause after a search that found no idle connection.
    search_every: Duration,
    /// The time of that search.
    none_idle_at: Option<Instant>,
}

impl Room {
    fn new(connections_max: usize, search_every: Duration) -> Self {
        let (permits, slots) = (Arc::new(Semaphore::new(connections_max)), Arc::new(Slots::default()));
        let evictor = Evictor::new(&slots);
        Self { permits, slots, evictor, search_every, none_idle_at: None }
    }

    /// Takes a slot, if need be that of the connection which has been idle for longest. Returns it
    /// with the number of evicted connections.
    async fn take(&mut self) -> (Option<TakenSlot>, u64) {
        let mut evicted = 0;
        let mut permit = self.try_permit();
        for _ in 0..EVICTIONS_MAX {
            if permit.is_some() || !self.evict() {
                break;
            }
            evicted += 1;
            let freed = Arc::clone(&self.permits).acquire_owned();
            permit = tokio::time::timeout(EVICTION_WAIT, freed).await.ok().and_then(Result::ok);
        }
        (permit.map(|permit| self.slots.take(permit)), evicted)
    }

    fn evict(&mut self) -> bool {
        let is_known = |at: Instant| now().saturating_duration_since(at) < self.search_every;
        if self.none_idle_at.is_some_and(is_known) {
            return false;
        }
        let evicted = self.evictor.evict();
        self.none_idle_at = (!evicted).then(now);
        evicted
    }

    fn try_permit(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.permits).try_acquire_owned().ok()
    }
}

/// The workers, in turn.
#[derive(Clone)]
pub(crate) struct Workers {
    senders: Arc<[mpsc::Sender<AcceptedConnection>]>,
    next: Arc<AtomicUsize>,
}

impl Workers {
    pub(crate) fn new(senders: Vec<mpsc::Sender<AcceptedConnection>>) -> Self {
        Self { senders: senders.into(), next: Arc::new(AtomicUsize::new(0)) }
    }

    async fn hand_over(&self, accepted: AcceptedConnection) {
        let turn = self.next.fetch_add(1, Ordering::Relaxed) % self.senders.len();
        // A worker that is gone has stopped, so the connection ends too.
        let _ = self.senders[turn].send(accepted).await;
    }
}

/// Takes an address.
pub(crate) fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // Allows a port with connections in TIME_WAIT, but not a port in use.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Describes to the operator why an address cannot be bound.
pub(crate) fn not_taken(key: &str, address: SocketAddr, error: &io::Error) -> String {
    let advice = match error.kind() {
        ErrorKind::AddrInUse => {
            ": another program listens there; stop it, or choose another address (port 0 takes a free one)"
        }
        ErrorKind::AddrNotAvailable => ": this machine has no such address",
        ErrorKind::PermissionDenied => {
            ": ports below 1024 are for privileged programs; choose another, or grant CAP_NET_BIND_SERVICE"
        }
        _ => "",
    };
    format!("{key}: {address}: {error}{advice}")
}

/// One listener at work.
pub(crate) struct ListenerTask {
    pub(crate) listener: Listener,
    pub(crate) socket: TcpListener,
    pub(crate) shared: Arc<Shared>,
    pub(crate) workers: Workers,
    pub(crate) connections_max: usize,
    pub(crate) stop: CancellationToken,
}

impl ListenerTask {
    /// Accepts connections until the server stops, then waits until they end.
    pub(crate) async fn serve(self) {
        let mut room = Room::new(self.connections_max, SEARCH_EVERY);
        self.accept(&mut room).await;
        let Self { socket, workers, connections_max, .. } = self;
        // New clients must connect to another server.
        drop((socket, workers));
        let all = u32::try_from(connections_max).unwrap_or(u32::MAX);
        let _ = room.permits.acquire_many(all).await;
    }

    async fn accept(&self, room: &mut Room) {
        // Of the admin listener, where health checks come in.
        let is_admin = self.listener == Listener::Admin;
        let mut health = is_admin.then(|| Room::new(HEALTH_CONNECTIONS_MAX, Duration::ZERO));
        let mut trouble = AcceptErrors::default();
        loop {
            let accepted = tokio::select! {
                () = self.stop.cancelled() => return,
                accepted = self.socket.accept() => accepted,
            };
            match accepted {
                Ok((stream, peer)) => {
                    trouble.is_over();
                    self.take(stream, peer, room, health.as_mut()).await;
                }
                Err(error) => {
                    if let Some(times) = trouble.note(now()) {
                        tracing::warn!(
                            listener = self.listener.as_str(),
                            times,
                            %error,
                            "connections could not be accepted"
                        );
                    }
                    let _ = tokio::time::timeout(trouble.wait, self.stop.cancelled()).await;
                }
            }
        }
    }

    async fn take(&self, stream: TcpStream, peer: SocketAddr, room: &mut Room, health: Option<&mut Room>) {
        let metrics = &self.shared.telemetry.metrics;
        let (mut slot, evicted) = room.take().await;
        metrics.evicted(self.listener, evicted);
        let for_health = slot.is_none();
        if let (None, Some(health)) = (&slot, health) {
            slot = health.take().await.0;
            if let Some(taken) = &slot {
                // Evicted in the order of their numbers, also before a worker serves them.
                taken.slot.set_idle(0);
            }
        }
        let Some(slot) = slot else { return metrics.refused(self.listener) };
        let Ok(stream) = stream.set_nodelay(true).and_then(|()| stream.into_std()) else { return };
        let accepted = AcceptedConnection { listener: self.listener, stream, peer, slot, for_health };
        self.workers.hand_over(accepted).await;
    }
}

#[expect(clippy::disallowed_methods, reason = "paces log lines and searches; no decision depends on it")]
fn now() -> Instant {
    Instant::now()
}

/// Connections that cannot be accepted, such as when the system has no more file descriptors:
/// trying again at once would only burn time, and a line for each of them fill the disk.
#[derive(Debug, Default)]
struct AcceptErrors {
    wait: Duration,
    said: Option<Instant>,
    unsaid: u64,
}

impl AcceptErrors {
    /// Notes a failure. If a log line is due, returns the number of failures since the last one.
    fn note(&mut self, now: Instant) -> Option<u64> {
        self.wait = (self.wait * 2).clamp(RETRY_WAIT_MIN, RETRY_WAIT_MAX);
        self.unsaid += 1;
        if self.said.is_some_and(|said| now.saturating_duration_since(said) < SAY_EVERY) {
            return None;
        }
        self.said = Some(now);
        Some(std::mem::take(&mut self.unsaid))
    }

    /// Resets the wait for the next failure, but not the interval between log lines.
    fn is_over(&mut self) {
        self.wait = Duration::ZERO;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accept_errors_are_logged_once_a_second_with_a_count() {
        let start = now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut trouble = AcceptErrors::default();
        assert_eq!(trouble.note(at(0)), Some(1), "the first at once");
        assert_eq!((trouble.note(at(1)), trouble.note(at(999))), (None, None));
        assert_eq!(trouble.note(at(1_000)), Some(3));
        trouble.is_over();
        assert_eq!(trouble.note(at(1_500)), None, "that it was over in between does not make it louder");
        assert_eq!(trouble.note(at(9_000)), Some(2));
    }

    #[test]
    fn waits_grow_until_it_is_over() {
        let mut trouble = AcceptErrors::default();
        let mut waits = |times: usize| {
            for _ in 0..times {
                let _ = trouble.note(now());
            }
            let longest = trouble.wait;
            trouble.is_over();
            longest
        };
        assert_eq!(waits(1), RETRY_WAIT_MIN);
        assert_eq!(waits(2), RETRY_WAIT_MIN * 2);
        assert_eq!(waits(100), RETRY_WAIT_MAX);
        assert_eq!(waits(1), RETRY_WAIT_MIN, "starts anew");
    }
}
