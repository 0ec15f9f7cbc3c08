//! The listener: batches of other regions come in, and go to the own origin; questions come in, and
//! are decided.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream;
use tidegate_core::origin::{MergeRequest, RegionId};
use tidegate_origin::{OriginError, PARTITIONS};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::frames::{ConnectionError, Stream, read, within, write};
use super::shared::Shared;
use super::slots::{SlotLease, SlotPool};
use super::tls::may_speak_for;
use crate::forward::ForwardRequest;
use crate::message::{Ack, Batch, ComponentGroup};
use crate::wire::{FRAME_BYTES_MAX, Frame, GREETING_BYTES_MAX, Hello, Refusal, Welcome, WireError};

/// Connections that wait to be accepted.
pub(super) const BACKLOG: u32 = 64;

/// Maximum connections that have not identified themselves and their purpose. At the maximum, a new
/// connection replaces another. Higher: an attacker needs more connections to keep a peer from
/// greeting in time; more memory.
const GREETINGS_MAX: usize = 128;

/// Maximum connections of one peer that carry batches. A region has one replicator: further
/// connections are left over from its predecessors, or broke unnoticed. A new connection therefore
/// replaces an old one of the same peer, and a reconnecting replicator never waits for a slot.
const REPLICATORS_EACH_MAX: usize = 4;

/// Maximum connections of one peer that carry forwarded checks. Further connections are refused,
/// and the peer tries another node. Higher: more nodes of a peer for each node here; more memory
/// while all of them send.
const FORWARDERS_EACH_MAX: usize = 128;

/// Timeout of the greeting. Longer: slower networks work; strangers occupy slots for longer.
const GREETING_TIME_MAX: Duration = Duration::from_secs(5);

/// Idle timeout of a connection. A healthy replicator sends five times a second.
pub(super) const IDLE_TIME_MAX: Duration = Duration::from_secs(10);

/// How long to wait when connections cannot be accepted, for want of file descriptors mostly.
const RETRY_WAIT: Duration = Duration::from_millis(100);

/// Merges into the own origin that are under way at once, for each connection. Higher: batches are
/// acknowledged sooner; nodes wait longer for the same store.
const MERGES_AT_ONCE: usize = 16;

/// Accepts connections of other regions.
pub(super) async fn accept(
    shared: Arc<Shared>,
    listener: TcpListener,
    tasks: TaskTracker,
    stop: CancellationToken,
) {
    let connection_slots = Arc::new(ConnectionSlots::new(shared.peers.len()));
    loop {
        let Ok((stream, from)) = listener.accept().await else {
            let _ = tokio::time::timeout(RETRY_WAIT, std::future::pending::<()>()).await;
            continue;
        };
        let place = connection_slots.greetings.enter(from.ip());
        let receiving = receive(Arc::clone(&shared), Arc::clone(&connection_slots), stream, from, place);
        tasks.spawn(stop.clone().run_until_cancelled_owned(receiving));
    }
}

/// Slots for connections, by purpose. One kind of connection never takes the slots of another.
struct ConnectionSlots {
    greetings: Arc<SlotPool>,
    /// For each peer.
    replicators: Vec<Arc<SlotPool>>,
    forwarders: Vec<Semaphore>,
}

impl ConnectionSlots {
    fn new(peers: usize) -> Self {
        Self {
            greetings: SlotPool::new(GREETINGS_MAX),
            replicators: (0..peers).map(|_| SlotPool::new(REPLICATORS_EACH_MAX)).collect(),
            forwarders: (0..peers).map(|_| Semaphore::new(FORWARDERS_EACH_MAX)).collect(),
        }
    }
}

/// Identifies a connection by its greeting and first message, then serves it.
async fn receive(
    shared: Arc<Shared>,
    connection_slots: Arc<ConnectionSlots>,
    stream: TcpStream,
    from: SocketAddr,
    place: SlotLease,
) {
    let Some((mut peer_connection, first)) = meet(&shared, stream, from, place).await else { return };
    match first {
        PeerMessage::Batch(batch) => {
            let Some(room) = connection_slots.replicators.get(peer_connection.place) else { return };
            let place = room.enter(from.ip());
            tokio::select! {
                () = peer_connection.listen(&shared, batch) => {}
                () = place.lost() => {}
            }
        }
        PeerMessage::Check(forward, until_us) => {
            match connection_slots.forwarders.get(peer_connection.place).map(Semaphore::try_acquire) {
                Some(Ok(_permit)) => peer_connection.answer(&shared, (forward, until_us)).await,
                _ => peer_connection.turn_away(&shared, Refusal::Full).await,
            }
        }
    }
}

/// Reads the greeting and the first message of a connection. Gives up if the connection loses its
/// greeting slot.
async fn meet(
    shared: &Shared,
    stream: TcpStream,
    from: SocketAddr,
    place: SlotLease,
) -> Option<(PeerConnection, PeerMessage)> {
    let greeting = within("the greeting", GREETING_TIME_MAX, admit(shared, stream));
    let met = tokio::select! {
        met = greeting => met,
        () = place.lost() => Err(ConnectionError::Crowded),
    };
    let mut peer_connection = match met {
        Ok(peer_connection) => peer_connection,
        Err(broken) => {
            if !is_gone(&broken) {
                shared.note_stranger(from, &broken);
            }
            return None;
        }
    };
    let first = tokio::select! {
        first = peer_connection.next(shared) => first,
        () = place.lost() => None,
    };
    Some((peer_connection, first?))
}

/// Whether the other side closed the connection without a message, as port probes do.
fn is_gone(broken: &ConnectionError) -> bool {
    let ConnectionError::Io(error) = broken else { return false };
    matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)
}

/// A connection of an identified peer.
struct PeerConnection {
    stream: Box<dyn Stream>,
    place: usize,
    region: RegionId,
    /// The process that it is.
    incarnation: u64,
}

/// Identifies the connecting node, over TLS if configured.
async fn admit(shared: &Shared, stream: TcpStream) -> Result<PeerConnection, ConnectionError> {
    stream.set_nodelay(true)?;
    match &shared.tls {
        None => greet(shared, stream, |_, _| true).await,
        Some(tls) => greet(shared, tls.accept(stream).await?, may_speak_for).await,
    }
}

async fn greet<S: Stream + 'static>(
    shared: &Shared,
    mut stream: S,
    may_speak_for: impl Fn(&S, &str) -> bool,
) -> Result<PeerConnection, ConnectionError> {
    let (hello, received) = match read(&mut stream, GREETING_BYTES_MAX).await {
        Ok((Frame::Hello(hello), bytes)) => (hello, bytes),
        Err(ConnectionError::Wire(WireError::Version(_))) => {
            return refuse(&mut stream, Refusal::Version).await;
        }
        Ok(_) | Err(ConnectionError::TooLong(_) | ConnectionError::Wire(_)) => {
            return refuse(&mut stream, Refusal::Nonsense).await;
        }
        Err(broken) => return Err(broken),
    };
    let (place, region) = match known(shared, &hello) {
        Err(refusal) => return refuse(&mut stream, refusal).await,
        Ok(_) if !may_speak_for(&stream, &hello.from) => {
            return refuse(&mut stream, Refusal::Certificate).await;
        }
        Ok(known) => known,
    };
    tracing::debug!(peer = hello.from, incarnation = hello.incarnation, "the replicator of a peer connected");
    shared.note_agreement(place, hello.agreement);
    let welcome = Welcome {
        region: shared.region.clone(),
        clock_us: shared.now_us(),
        is_replicator: shared.incarnation().is_some(),
        agreement: shared.agreement,
    };
    let sent = write(&mut stream, &Frame::Welcome(welcome)).await?;
    shared.count(place, |counts| {
        counts.bytes_received += received;
        counts.bytes_sent += sent;
    });
    Ok(PeerConnection { stream: Box::new(stream), place, region, incarnation: hello.incarnation })
}

fn known(shared: &Shared, hello: &Hello) -> Result<(usize, RegionId), Refusal> {
    if hello.to != shared.region {
        return Err(Refusal::WrongRegion);
    }
    let place = shared.peer_named(&hello.from).ok_or(Refusal::UnknownRegion)?;
    Ok((place, shared.id(place).ok_or(Refusal::UnknownRegion)?))
}

/// Sends the reason of a refusal. The other side may no longer read it.
async fn refuse<T>(stream: &mut impl Stream, refusal: Refusal) -> Result<T, ConnectionError> {
    let _ = write(stream, &Frame::Refused(refusal)).await;
    Err(ConnectionError::Turned(refusal))
}

/// A message of a peer.
enum PeerMessage {
    /// Changed components.
    Batch(Batch),
    /// Forwarded checks, with their deadline on this node's clock, µs.
    Check(ForwardRequest, u64),
}

impl PeerConnection {
    /// Reads the next message of the peer. Returns `None` if the connection is closed, idle for too
    /// long or invalid. An invalid frame is refused.
    async fn next(&mut self, shared: &Shared) -> Option<PeerMessage> {
        let reading = read(&mut self.stream, FRAME_BYTES_MAX);
        let (peer_message, bytes) = match within("the next frame of the peer", IDLE_TIME_MAX, reading).await {
            Ok((Frame::Batch(batch), bytes)) => (PeerMessage::Batch(batch), bytes),
            Ok((Frame::Forward(forward, until_us), bytes)) => (PeerMessage::Check(forward, until_us), bytes),
            Ok(_) | Err(ConnectionError::Wire(_) | ConnectionError::TooLong(_)) => {
                self.turn_away(shared, Refusal::Nonsense).await;
                return None;
            }
            // The peer reconnects when it can.
            Err(_) => return None,
        };
        shared.count(self.place, |counts| counts.bytes_received += bytes);
        Some(peer_message)
    }

    /// Merges batches until the connection ends. A connection that carries batches accepts no other
    /// message.
    async fn listen(&mut self, shared: &Shared, first: Batch) {
        let mut batch = first;
        loop {
            let ack = match self.take_in(shared, batch).await {
                Ok(ack) => ack,
                Err(refusal) => return self.turn_away(shared, refusal).await,
            };
            let Ok(sent) =
                within("the reply to a peer", IDLE_TIME_MAX, write(&mut self.stream, &Frame::Ack(ack))).await
            else {
                return;
            };
            shared.count(self.place, |counts| counts.bytes_sent += sent);
            batch = match self.next(shared).await {
                Some(PeerMessage::Batch(batch)) => batch,
                Some(PeerMessage::Check(..)) => return self.turn_away(shared, Refusal::Nonsense).await,
                None => return,
            };
        }
    }

    /// Decides the forwarded checks of the peer until the connection ends.
    async fn answer(&mut self, shared: &Shared, first: (ForwardRequest, u64)) {
        let answering = super::forward::answer(shared, self.place, self.incarnation, &mut self.stream, first);
        if let Err(ConnectionError::Wire(_) | ConnectionError::TooLong(_) | ConnectionError::Unexpected) =
            answering.await
        {
            self.turn_away(shared, Refusal::Nonsense).await;
        }
    }

    /// Merges a complete batch into the own origin, then returns its acknowledgement.
    async fn take_in(&self, shared: &Shared, batch: Batch) -> Result<Ack, Refusal> {
        let incarnation = shared.incarnation().ok_or(Refusal::NotReplicator)?;
        let merges: Vec<_> = batch.groups.iter().map(|group| self.merge(shared, group)).collect();
        let merges = stream::iter(merges).buffer_unordered(MERGES_AT_ONCE);
        let answers: Vec<Result<(), Refusal>> = merges.collect().await;
        answers.into_iter().collect::<Result<(), Refusal>>()?;
        // If this node lost the lease meanwhile, the batch is merged all the same. The next
        // replicator merges it again.
        let ack = shared.note_merged_batch(incarnation, self.region, &batch).ok_or(Refusal::NotReplicator)?;
        shared.count(self.place, |counts| {
            counts.batches_received += 1;
            counts.components_received += batch.components() as u64;
        });
        Ok(ack)
    }

    async fn merge(&self, shared: &Shared, group: &ComponentGroup) -> Result<(), Refusal> {
        if group.partition >= PARTITIONS {
            return Err(Refusal::Nonsense);
        }
        let merge = MergeRequest { from: self.region, components: group.components.clone() };
        match shared.ask_origin(shared.origin.merge(group.partition, &merge)).await {
            Ok(_) => Ok(()),
            Err(OriginError::Refused(_)) => Err(Refusal::Nonsense),
            Err(OriginError::NotApplied(_) | OriginError::Unknown(_)) => Err(Refusal::NotMerged),
        }
    }

    async fn turn_away(&mut self, shared: &Shared, refusal: Refusal) {
        if refusal == Refusal::Nonsense {
            shared.count(self.place, |counts| counts.refused += 1);
        }
        let _ =
            within("the reply to a peer", GREETING_TIME_MAX, refuse::<()>(&mut self.stream, refusal)).await;
    }
}
