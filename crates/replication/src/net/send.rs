//! The connection to a peer that carries batches, several in flight at once.

use std::collections::HashMap;
use std::hash::Hasher as _;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use siphasher::sip::SipHasher13;
use tidegate_core::Backoff;
use tidegate_core::origin::RegionId;
use tokio::io::{ReadHalf, WriteHalf, split};
use tokio::net::{TcpStream, lookup_host};
use tokio::sync::Notify;
use tokio::time::timeout;

use super::frames::{ConnectionError, Stream, read, within, write};
use super::shared::Shared;
use crate::message::{Ack, BatchId};
use crate::rounds::INTERVAL_US;
use crate::wire::{FRAME_BYTES_MAX, Frame, GREETING_BYTES_MAX, Hello, Refusal, Welcome};

/// Timeout to connect and receive the welcome: several of the longest round trips on earth. Longer:
/// slower networks work; more concurrent attempts while a peer is unreachable.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(2);

/// Timeout for the next acknowledgement while batches are in flight. Longer: slower peers keep
/// their connection; a hung peer is detected later.
const ACK_TIME_MAX: Duration = Duration::from_secs(3);

/// First and longest wait before a retry, at most one round. Longer: less work while a peer is
/// unreachable; a region stays lost for longer after it returns, or after a new replicator takes
/// over.
const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_micros(INTERVAL_US);

/// Speaks to a peer whenever this process is the replicator, through one connection after the
/// other.
pub(super) async fn send_batches(shared: Arc<Shared>, place: usize) {
    let mut search = PeerDialer::new(&shared, place);
    let mut tenures = shared.tenure.subscribe();
    loop {
        let Ok(Some(incarnation)) = tenures.wait_for(Option::is_some).await.map(|tenure| *tenure) else {
            return;
        };
        let talk = BatchConnection::new(&shared, place, incarnation);
        let ended = tokio::select! {
            ended = talk.hold(&mut search) => ended,
            _ = tenures.wait_for(|tenure| *tenure != Some(incarnation)) => Ok(()),
        };
        talk.end();
        // Woken early where this process stops being the replicator, or becomes one again: the next
        // try is for that one.
        let _ = timeout(search.wait_after(talk.was_good(), ended), tenures.changed()).await;
    }
}

/// The way to a peer: which of its addresses is next, and how long to wait before.
pub(super) struct PeerDialer<'a> {
    shared: &'a Shared,
    place: usize,
    turn: usize,
    backoff: Backoff,
    /// Whether the last connection got an acknowledgement. True before the first connection.
    was_good: bool,
    last_cause: String,
}

impl<'a> PeerDialer<'a> {
    pub(super) fn new(shared: &'a Shared, place: usize) -> Self {
        let backoff = Backoff::new(BACKOFF_MIN, BACKOFF_MAX, shared.seed.wrapping_add(place as u64));
        let turn = first_turn(shared.seed, place);
        Self { shared, place, turn, backoff, was_good: true, last_cause: String::new() }
    }

    /// Connects to any node of the peer, or to its replicator only. Returns the stream and the
    /// peer's clock. Without a reply, another attempt starts each round beside the pending ones:
    /// packets sent before a network recovers may never arrive.
    pub(super) async fn find(&mut self, incarnation: u64, whom: PeerTarget) -> (Box<dyn Stream>, u64) {
        let mut tries = FuturesUnordered::new();
        loop {
            tries.push(attempt(self.shared, self.place, incarnation, whom, self.turn));
            self.turn += 1;
            let answered = async {
                while let Some((turn, answer)) = tries.next().await {
                    match answer {
                        Ok(found) => return Some((turn, found)),
                        Err(broken) => note(self.shared, self.place, &broken, &mut self.last_cause),
                    }
                }
                None
            };
            match timeout(BACKOFF_MAX, answered).await {
                // After the connection breaks, the search starts at the address that replied.
                Ok(Some((turn, found))) => {
                    self.turn = turn;
                    return found;
                }
                Ok(None) => wait(self.backoff.after_failure()).await,
                Err(_) => {}
            }
        }
    }

    /// Returns the wait after a connection ended. `was_good`: it got an acknowledgement.
    pub(super) fn wait_after(&mut self, was_good: bool, ended: Result<(), ConnectionError>) -> Duration {
        self.was_good = was_good;
        if was_good {
            self.backoff.succeed();
            self.last_cause.clear();
        } else {
            self.turn += 1;
        }
        match ended {
            Ok(()) => BACKOFF_MIN,
            Err(broken) => {
                note(self.shared, self.place, &broken, &mut self.last_cause);
                self.backoff.after_failure()
            }
        }
    }
}

/// Returns the turn at which a process starts to look for a peer. Processes start at different
/// addresses, so that they do not all connect to the first.
fn first_turn(seed: u64, place: usize) -> usize {
    let [high, low, ..] = SipHasher13::new_with_keys(seed, place as u64).finish().to_be_bytes();
    // Turns count up from this value. 16 bits leave enough room for them.
    u16::from_be_bytes([high, low]).into()
}

pub(super) async fn wait(time: Duration) {
    let _ = timeout(time, std::future::pending::<()>()).await;
}

/// Node of a peer to connect to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PeerTarget {
    /// The one that takes batches.
    Replicator,
    /// Any of its processes.
    AnyNode,
}

/// Tries one address of a peer. Returns its turn, and the connection if the wanted node replies
/// there.
async fn attempt(
    shared: &Shared,
    place: usize,
    incarnation: u64,
    whom: PeerTarget,
    turn: usize,
) -> (usize, Result<(Box<dyn Stream>, u64), ConnectionError>) {
    let connecting = async {
        let mut stream = connect(shared, place, turn).await?;
        let welcome = greet(shared, place, incarnation, &mut stream).await?;
        if whom == PeerTarget::Replicator && !welcome.is_replicator {
            return Err(ConnectionError::Refused(Refusal::NotReplicator));
        }
        Ok((stream, welcome.clock_us))
    };
    (turn, within("the connection to the peer", CONNECT_TIME_MAX, connecting).await)
}

/// Connects to one of a peer's addresses in rotation, over TLS if configured.
async fn connect(shared: &Shared, place: usize, turn: usize) -> Result<Box<dyn Stream>, ConnectionError> {
    let Some(peer) = shared.peers.get(place) else { return Err(ConnectionError::NoAddress) };
    let stream = reach(&peer.addresses, turn, shared).await?;
    match &shared.tls {
        None => Ok(Box::new(stream)),
        Some(tls) => Ok(Box::new(tls.connect(&peer.name, stream).await?)),
    }
}

/// Counts the refusal of a connection, and logs each new cause of failure.
fn note(shared: &Shared, place: usize, broken: &ConnectionError, last_cause: &mut String) {
    let is_refusal = match broken {
        ConnectionError::Refused(Refusal::NotReplicator | Refusal::NotMerged | Refusal::Full)
        | ConnectionError::Late(_)
        | ConnectionError::NoAddress => false,
        // The TLS library reports a rejected certificate this way.
        ConnectionError::Io(error) => error.kind() == std::io::ErrorKind::InvalidData,
        _ => true,
    };
    if is_refusal {
        shared.count(place, |counts| counts.refused += 1);
    }
    // All network failures count as one cause, although their messages differ.
    let cause = if is_refusal { broken.to_string() } else { "gone".to_owned() };
    if *last_cause != cause {
        let peer = shared.peers.get(place).map_or("", |peer| &peer.name);
        tracing::warn!(peer, "cannot replicate to the peer: {broken}");
        *last_cause = cause;
    }
}

/// One connection to a peer.
struct BatchConnection<'a> {
    shared: &'a Shared,
    place: usize,
    incarnation: u64,
    sent_batches: Mutex<SentBatches>,
    /// Notified when a batch awaits its acknowledgement.
    sent: Notify,
}

/// Batches sent on a connection.
#[derive(Default)]
struct SentBatches {
    /// Batches that are not acknowledged, with the components in them: as many as may be under way.
    waiting: HashMap<BatchId, u64>,
    /// Batches that were.
    acknowledged: u64,
}

impl<'a> BatchConnection<'a> {
    fn new(shared: &'a Shared, place: usize, incarnation: u64) -> Self {
        Self { shared, place, incarnation, sent_batches: Mutex::default(), sent: Notify::new() }
    }

    fn sent_batches(&self) -> MutexGuard<'_, SentBatches> {
        self.sent_batches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the peer acknowledged a batch on this connection.
    fn was_good(&self) -> bool {
        self.sent_batches().acknowledged > 0
    }

    /// Connects to the peer and sends batches until the connection breaks.
    async fn hold(&self, search: &mut PeerDialer<'_>) -> Result<(), ConnectionError> {
        let (stream, echo_us) = search.find(self.incarnation, PeerTarget::Replicator).await;
        let Some(peer) = self.shared.id(self.place) else { return Ok(()) };
        self.shared.during(self.incarnation, |rounds, _| rounds.connected(peer, echo_us));
        // The peer may have missed much, so a round starts now. A peer that never acknowledges gets
        // no extra rounds.
        if search.was_good {
            self.shared.hurry.notify_one();
        }
        let (reader, writer) = split(stream);
        tokio::select! {
            ended = self.send_batches(peer, writer) => ended,
            ended = self.read_replies(peer, reader) => ended,
        }
    }

    /// Sends batches as they become ready, up to the maximum in flight.
    async fn send_batches<S: Stream>(
        &self,
        peer: RegionId,
        mut writer: WriteHalf<S>,
    ) -> Result<(), ConnectionError> {
        let Some(stirred) = self.shared.stirred.get(self.place) else { return Ok(()) };
        loop {
            let next = self.shared.during(self.incarnation, |rounds, now_us| rounds.next_batch(now_us, peer));
            match next {
                None => return Ok(()),
                Some(None) => stirred.notified().await,
                Some(Some(batch)) => {
                    self.sent_batches().waiting.insert(batch.id, batch.components() as u64);
                    self.sent.notify_one();
                    self.count_bytes(write(&mut writer, &Frame::Batch(batch)).await?, 0);
                }
            }
        }
    }

    /// Reads acknowledgements. While a batch is in flight, the next one must arrive within
    /// `ACK_TIME_MAX`.
    async fn read_replies<S: Stream>(
        &self,
        peer: RegionId,
        mut reader: ReadHalf<S>,
    ) -> Result<(), ConnectionError> {
        loop {
            while self.sent_batches().waiting.is_empty() {
                self.sent.notified().await;
            }
            let reading = read(&mut reader, FRAME_BYTES_MAX);
            let (answer, bytes) = within("the acknowledgement of a batch", ACK_TIME_MAX, reading).await?;
            self.count_bytes(0, bytes);
            match answer {
                Frame::Ack(ack) => self.take_in(peer, &ack)?,
                Frame::Refused(refusal) => return Err(ConnectionError::Refused(refusal)),
                _ => return Err(ConnectionError::Unexpected),
            }
        }
    }

    fn take_in(&self, peer: RegionId, ack: &Ack) -> Result<(), ConnectionError> {
        let components = {
            let mut sent_batches = self.sent_batches();
            let components = sent_batches.waiting.remove(&ack.id).ok_or(ConnectionError::Unexpected)?;
            sent_batches.acknowledged += 1;
            components
        };
        self.shared.during(self.incarnation, |rounds, now_us| rounds.acknowledged(now_us, peer, ack));
        self.shared.count(self.place, |counts| {
            counts.batches_sent += 1;
            counts.components_sent += components;
        });
        // There is room for another one.
        self.shared.stirred.get(self.place).into_iter().for_each(Notify::notify_one);
        Ok(())
    }

    fn count_bytes(&self, sent: u64, received: u64) {
        self.shared.count(self.place, |counts| {
            counts.bytes_sent += sent;
            counts.bytes_received += received;
        });
    }

    fn end(&self) {
        if let Some(peer) = self.shared.id(self.place) {
            self.shared.during(self.incarnation, |rounds, _| rounds.disconnected(peer));
        }
    }
}

/// Sends the greeting and returns the welcome of the peer.
async fn greet(
    shared: &Shared,
    place: usize,
    incarnation: u64,
    stream: &mut impl Stream,
) -> Result<Welcome, ConnectionError> {
    let Some(peer) = shared.peers.get(place) else { return Err(ConnectionError::NoAddress) };
    let (from, to, agreement) = (shared.region.clone(), peer.name.clone(), shared.agreement);
    let sent = write(stream, &Frame::Hello(Hello { from, to, incarnation, agreement })).await?;
    shared.count(place, |counts| counts.bytes_sent += sent);
    let (answer, received) = read(stream, GREETING_BYTES_MAX).await?;
    shared.count(place, |counts| counts.bytes_received += received);
    match answer {
        Frame::Welcome(welcome) if welcome.region == peer.name => {
            shared.note_agreement(place, welcome.agreement);
            Ok(welcome)
        }
        Frame::Welcome(welcome) => Err(ConnectionError::WrongRegion(welcome.region)),
        Frame::Refused(refusal) => Err(ConnectionError::Refused(refusal)),
        _ => Err(ConnectionError::Unexpected),
    }
}

/// Connects to one of the addresses that the peer's names lead to, each in its turn.
async fn reach(addresses: &[String], turn: usize, shared: &Shared) -> Result<TcpStream, ConnectionError> {
    let Some(address) = addresses.get(turn % addresses.len().max(1)) else {
        return Err(ConnectionError::NoAddress);
    };
    let found: Vec<SocketAddr> = lookup_host(address).await?.collect();
    let Some(found) = found.get(turn / addresses.len().max(1) % found.len().max(1)) else {
        return Err(ConnectionError::NoAddress);
    };
    if shared.tls.is_none() && !found.ip().is_loopback() {
        return Err(ConnectionError::Plain);
    }
    let stream = TcpStream::connect(found).await?;
    // A batch is written in one piece, so a delay would coalesce no writes.
    stream.set_nodelay(true)?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_begin_to_look_at_different_addresses() {
        let addresses = 16;
        let mut begun = vec![0; addresses];
        for seed in 0..1_000 {
            begun[first_turn(seed, 0) % addresses] += 1;
        }
        assert!(begun.iter().all(|begun| (30..100).contains(begun)), "{begun:?}");
        // Of a name that leads to as many.
        let names = 16;
        let mut begun = vec![0; names];
        for seed in 0..1_000 {
            begun[first_turn(seed, 0) / addresses % names] += 1;
        }
        assert!(begun.iter().all(|begun| (30..100).contains(begun)), "{begun:?}");
        assert_eq!(first_turn(7, 1), first_turn(7, 1), "the seed selects the first address");
    }
}
