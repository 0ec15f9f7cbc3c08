//! Questions that another region decides: out through a connection of their own to each, and in
//! from theirs.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use tidegate_core::RemoteClock;
use tidegate_core::origin::RegionId;
use tokio::io::{ReadHalf, WriteHalf, split};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::accept::IDLE_TIME_MAX;
use super::deliver::{DELIVERIES_MAX, SenderId};
use super::frames::{ConnectionError, Stream, read, within, write};
use super::send::{PeerDialer, PeerTarget, wait};
use super::shared::Shared;
use crate::forward::{ForwardAction, ForwardReply, ForwardRequest};
use crate::wire::forward::fits;
use crate::wire::{FRAME_BYTES_MAX, Frame};

/// Maximum requests in flight to one region; further ones fail at once. Higher: more requests pass
/// while a region is slow; more memory, and more requests wait for an unreachable region.
const FORWARDS_IN_FLIGHT_MAX: usize = 1_024;

/// Questions of one connection that are decided at once; more wait in its socket.
const ANSWERS_AT_ONCE: usize = 256;

/// Idle time after which a connection counts as broken, µs. Shorter: a new connection is made
/// sooner; slower networks lose working connections.
const IDLE_US_MAX: u64 = 1_000_000;

/// Interval of heartbeats, and of the idle check, on a connection. The peer replies to each
/// heartbeat.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Time that a request waits for a new connection, unless its caller gives up sooner. Longer: more
/// requests pass while a network loses connections; more requests wait for an unreachable region.
const PATIENCE: Duration = Duration::from_secs(1);

/// Takes questions to other regions. Cheap to clone.
#[derive(Clone)]
pub struct Forwarder {
    pub(super) shared: Arc<Shared>,
    peers: Arc<[mpsc::Sender<PendingForward>]>,
    wanted: Arc<watch::Sender<bool>>,
    ids: Arc<AtomicU64>,
    /// Permits for deliveries, which are retried until acknowledged.
    pub(super) deliveries: Arc<Semaphore>,
}

pub(super) struct PendingForward {
    forward: ForwardRequest,
    answer: oneshot::Sender<ForwardReply>,
    fate: Arc<SendState>,
    /// Deadline of the caller, on our clock.
    until_us: u64,
}

/// Whether a request was sent or withdrawn. A caller that gives up must know which.
#[derive(Default)]
struct SendState(AtomicU8);

const WAITS: u8 = 0;
const SENT: u8 = 1;
const WITHDRAWN: u8 = 2;

impl SendState {
    /// Takes in that it is sent, unless it was withdrawn.
    fn send(&self) -> bool {
        self.0.compare_exchange(WAITS, SENT, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Keeps it from being sent, unless it was.
    fn withdraw(&self) -> bool {
        self.0.compare_exchange(WAITS, WITHDRAWN, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

/// Reason for a missing reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ForwardError {
    /// It was not sent, and never will be.
    NotSent,
    /// The peer may have received it.
    Unknown,
}

pub(super) type Inbox = (mpsc::Receiver<PendingForward>, watch::Receiver<bool>);

impl Forwarder {
    /// Creates a forwarder to all peers, and the inbox of each peer's task.
    pub(super) fn new(shared: Arc<Shared>) -> (Self, Vec<Inbox>) {
        let wanted = watch::Sender::new(false);
        let inbox = |_| {
            let (sender, receiver) = mpsc::channel(FORWARDS_IN_FLIGHT_MAX);
            (sender, (receiver, wanted.subscribe()))
        };
        let (senders, inboxes): (Vec<_>, Vec<_>) = shared.peers.iter().map(inbox).unzip();
        let (wanted, ids) = (Arc::new(wanted), Arc::new(AtomicU64::new(1)));
        let deliveries = Arc::new(Semaphore::new(DELIVERIES_MAX));
        (Self { shared, peers: senders.into(), wanted, ids, deliveries }, inboxes)
    }

    /// Connects to the other regions and stays connected, so that no check waits for a connection.
    pub fn keep_ready(&self) {
        self.wanted.send_replace(true);
    }

    /// Sends a request to a region. Returns `None` after the timeout, or if the request is too
    /// large or too many are in flight.
    pub async fn ask(
        &self,
        region: RegionId,
        mut forward: ForwardRequest,
        time_max: Duration,
    ) -> Option<ForwardReply> {
        let place = self.number(region, &mut forward)?;
        self.ask_once(place, forward, time_max).await.ok()
    }

    /// Gives a request a unique number. Returns the index of its peer, or `None` if the request
    /// cannot be sent.
    pub(super) fn number(&self, region: RegionId, forward: &mut ForwardRequest) -> Option<usize> {
        self.keep_ready();
        forward.id = self.ids.fetch_add(1, Ordering::Relaxed);
        self.shared.peers.iter().position(|peer| peer.id == region).filter(|_| fits(forward))
    }

    pub(super) async fn ask_once(
        &self,
        place: usize,
        forward: ForwardRequest,
        time_max: Duration,
    ) -> Result<ForwardReply, ForwardError> {
        let sender = self.peers.get(place).ok_or(ForwardError::NotSent)?;
        let ((answer, answered), fate) = (oneshot::channel(), Arc::<SendState>::default());
        let time_us = u64::try_from(time_max.as_micros()).unwrap_or(u64::MAX);
        let until_us = self.shared.now_us().saturating_add(time_us);
        let parcel = PendingForward { forward, answer, fate: Arc::clone(&fate), until_us };
        sender.try_send(parcel).map_err(|_| ForwardError::NotSent)?;
        let unheard = || if fate.withdraw() { ForwardError::NotSent } else { ForwardError::Unknown };
        let answer = timeout(time_max, answered).await;
        answer.ok().and_then(Result::ok).ok_or_else(unheard)
    }
}

/// Sends requests to a peer over one connection after another. It first connects when a caller
/// needs it.
pub(super) async fn carry(shared: Arc<Shared>, place: usize, (mut inbox, mut wanted): Inbox) {
    if wanted.wait_for(|wanted| *wanted).await.is_err() {
        return;
    }
    let mut search = PeerDialer::new(&shared, place);
    loop {
        let (stream, clock_us) = tokio::select! {
            found = search.find(shared.seed, PeerTarget::AnyNode) => found,
            () = refuse_in_the_end(&mut inbox) => return,
        };
        let line = ForwardConnection::new(&shared, place, clock_us);
        let (reader, writer) = split(stream);
        let ended = tokio::select! {
            ended = line.ask(writer, &mut inbox) => ended,
            ended = line.read_replies(reader) => ended,
        };
        let was_good = line.answered.load(Ordering::Relaxed) > 0;
        wait(search.wait_after(was_good, ended)).await;
    }
}

/// Drops requests after `PATIENCE`, so that no caller waits for an unreachable region. Returns when
/// all forwarders are dropped.
async fn refuse_in_the_end(inbox: &mut mpsc::Receiver<PendingForward>) {
    wait(PATIENCE).await;
    while inbox.recv().await.is_some() {}
}

/// One connection to a peer.
struct ForwardConnection<'a> {
    shared: &'a Shared,
    place: usize,
    pending: Mutex<HashMap<u64, oneshot::Sender<ForwardReply>>>,
    /// The peer's clock in its last reply.
    clock: Mutex<RemoteClock>,
    answered: AtomicU64,
}

impl<'a> ForwardConnection<'a> {
    fn new(shared: &'a Shared, place: usize, clock_us: u64) -> Self {
        let clock = Mutex::new(RemoteClock::new(clock_us, shared.now_us()));
        Self { shared, place, pending: Mutex::default(), clock, answered: AtomicU64::new(0) }
    }

    fn pending(&self) -> MutexGuard<'_, HashMap<u64, oneshot::Sender<ForwardReply>>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn clock(&self) -> MutexGuard<'_, RemoteClock> {
        self.clock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn ask<S: Stream>(
        &self,
        mut writer: WriteHalf<S>,
        inbox: &mut mpsc::Receiver<PendingForward>,
    ) -> Result<(), ConnectionError> {
        let mut looks = interval(LOOK_EVERY);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let (forward, until_us) = tokio::select! {
                parcel = inbox.recv() => match parcel {
                    None => return Ok(()),
                    Some(parcel) => match self.enter(parcel) {
                        Some(entered) => entered,
                        None => continue,
                    },
                },
                _ = looks.tick() => {
                    if self.is_idle() {
                        return Err(ConnectionError::Late("the decision of a forwarded check"));
                    }
                    (ForwardRequest { id: 0, act: ForwardAction::Decide, checks: Vec::new() }, u64::MAX)
                }
            };
            let frame = Frame::Forward(forward, until_us);
            let writing = write(&mut writer, &frame);
            let sent = within("a forwarded check", IDLE_TIME_MAX, writing).await?;
            self.shared.count(self.place, |counts| counts.bytes_sent += sent);
        }
    }

    /// Registers the caller of a request. Returns the request and its deadline on the peer's clock.
    /// Returns `None` if the caller has given up or too many requests are in flight.
    fn enter(&self, parcel: PendingForward) -> Option<(ForwardRequest, u64)> {
        let PendingForward { mut forward, answer, fate, until_us } = parcel;
        if answer.is_closed() {
            return None;
        }
        let mut pending = self.pending();
        if pending.len() >= FORWARDS_IN_FLIGHT_MAX {
            pending.retain(|_, answer| !answer.is_closed());
        }
        if pending.len() >= FORWARDS_IN_FLIGHT_MAX || !fate.send() {
            return None;
        }
        pending.insert(forward.id, answer);
        if let ForwardAction::RollBack { since_us } = &mut forward.act {
            // A charge at this instant has drained for the time since, or for less.
            *since_us = self.clock().at_or_before_us(*since_us);
        }
        // Charges and refunds count however late they arrive. A decision after the deadline, as a
        // lower bound of the peer's clock states it, is never of use.
        let is_late_in_vain = forward.act == ForwardAction::Decide;
        Some((forward, if is_late_in_vain { self.clock().at_us(until_us) } else { u64::MAX }))
    }

    fn is_idle(&self) -> bool {
        self.shared.now_us() > self.clock().arrived_us() + IDLE_US_MAX
    }

    async fn read_replies<S: Stream>(&self, mut reader: ReadHalf<S>) -> Result<(), ConnectionError> {
        loop {
            let (frame, bytes) = read(&mut reader, FRAME_BYTES_MAX).await?;
            self.shared.count(self.place, |counts| counts.bytes_received += bytes);
            match frame {
                Frame::Forwarded(forwarded, clock_us) => {
                    *self.clock() = RemoteClock::new(clock_us, self.shared.now_us());
                    self.answered.fetch_add(1, Ordering::Relaxed);
                    let waiting = self.pending().remove(&forwarded.id);
                    // The caller may have given up.
                    let _ = waiting.map(|answer| answer.send(forwarded));
                }
                Frame::Refused(refusal) => return Err(ConnectionError::Refused(refusal)),
                _ => return Err(ConnectionError::Unexpected),
            }
        }
    }
}

/// Decides the requests of a peer concurrently until the connection ends.
pub(super) async fn answer(
    shared: &Shared,
    place: usize,
    incarnation: u64,
    stream: impl Stream,
    first: (ForwardRequest, u64),
) -> Result<(), ConnectionError> {
    let asker = SenderId { place, incarnation };
    let (mut reader, mut writer) = split(stream);
    let (takes, checks) = mpsc::channel(ANSWERS_AT_ONCE);
    let (decided, mut decisions) = mpsc::channel(ANSWERS_AT_ONCE);
    // There is room for one.
    let _ = takes.try_send(first);
    let reading = async {
        loop {
            let reading = read(&mut reader, FRAME_BYTES_MAX);
            let (frame, bytes) = within("a forwarded check", IDLE_TIME_MAX, reading).await?;
            shared.count(place, |counts| counts.bytes_received += bytes);
            let Frame::Forward(forward, until_us) = frame else { return Err(ConnectionError::Unexpected) };
            if takes.send((forward, until_us)).await.is_err() {
                return Ok(());
            }
        }
    };
    let checks = stream::unfold(checks, async |mut checks| Some((checks.recv().await?, checks)));
    let deciding = checks.for_each_concurrent(ANSWERS_AT_ONCE, |(forward, until_us)| {
        let decided = decided.clone();
        async move {
            // This fails only after the writer has ended.
            let _ = decided.send(decide(shared, asker, forward, until_us).await).await;
        }
    });
    let writing = async {
        while let Some(forwarded) = decisions.recv().await {
            let frame = Frame::Forwarded(forwarded, shared.now_us());
            let writing = write(&mut writer, &frame);
            let sent = within("the decision of a forwarded check", IDLE_TIME_MAX, writing).await?;
            shared.count(place, |counts| counts.bytes_sent += sent);
        }
        Ok(())
    };
    tokio::select! {
        ended = reading => ended,
        () = deciding => Ok(()),
        ended = writing => ended,
    }
}

/// Decides checks while their caller still waits: after the deadline, a charge would be wasted.
/// Applies charges and refunds once.
async fn decide(shared: &Shared, asker: SenderId, forward: ForwardRequest, until_us: u64) -> ForwardReply {
    let nobody = ForwardReply { id: forward.id, decision: None };
    let is_late = shared.now_us() > until_us;
    match &shared.forward_handler {
        Some(forward_handler) if !forward.checks.is_empty() && !is_late => match forward.act {
            ForwardAction::Decide => forward_handler.answer(forward).await,
            ForwardAction::Charge | ForwardAction::Refund | ForwardAction::RollBack { .. } => {
                shared.deliveries_seen.once(asker, forward, forward_handler.as_ref()).await
            }
        },
        _ => nobody,
    }
}
