//! Questions that another region decides: out through a connection of their own to each, and in from theirs.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
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

/// Questions to one region that are under way at once; more are not taken. Higher: more that pass where a region is slow; more
/// memory, and more that waits at a region that is gone.
const FORWARDS_IN_FLIGHT_MAX: usize = 1_024;

/// Questions of one connection that are decided at once; more wait in its socket.
const ANSWERS_AT_ONCE: usize = 256;

/// A connection on which nothing was heard for this long leads nowhere, µs. Shorter: the next one is there sooner; slower networks
/// lose theirs.
const IDLE_US_MAX: u64 = 1_000_000;

/// How often a connection is looked at, and something is said on it that has to be answered.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// How long a question waits for another connection, if nobody else gives up on it sooner. Longer: more of them pass while a
/// network loses connections; more requests wait for a region that is gone.
const PATIENCE: Duration = Duration::from_secs(1);

/// Takes questions to other regions. Cheap to clone.
#[derive(Clone)]
pub struct Forwarder {
    pub(super) shared: Arc<Shared>,
    peers: Arc<[mpsc::Sender<PendingForward>]>,
    wanted: Arc<watch::Sender<bool>>,
    ids: Arc<AtomicU64>,
    /// For what other regions are told until they have heard it.
    pub(super) deliveries: Arc<Semaphore>,
}

pub(super) struct PendingForward {
    forward: ForwardRequest,
    answer: oneshot::Sender<ForwardReply>,
    fate: Arc<SendState>,
    /// Until when somebody waits for it.
    until_us: u64,
}

/// Whether something was sent, or will never be: whoever gives up on it has to know which.
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

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ForwardError {
    /// It was not sent, and never will be.
    NotSent,
    /// It may have been heard.
    Unknown,
}

pub(super) type Inbox = (mpsc::Receiver<PendingForward>, watch::Receiver<bool>);

impl Forwarder {
    /// To all peers, with what each of their tasks takes from.
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

    /// Connects to the other regions, and stays connected, so that no question waits for that.
    pub fn keep_ready(&self) {
        self.wanted.send_replace(true);
    }

    /// Asks a region. Nothing, if it does not answer in time, or too much is asked or under way.
    pub async fn ask(
        &self,
        region: RegionId,
        mut forward: ForwardRequest,
        time_max: Duration,
    ) -> Option<ForwardReply> {
        let place = self.number(region, &mut forward)?;
        self.ask_once(place, forward, time_max).await.ok()
    }

    /// Gives a question a number that no other one has; whom it is for, if it can be sent at all.
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

/// Takes questions to a peer, through one connection after the other, from when somebody first has one.
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

/// Whoever asks is not kept waiting for a region that has not been there for a while. It ends when nobody can ask any more.
async fn refuse_in_the_end(inbox: &mut mpsc::Receiver<PendingForward>) {
    wait(PATIENCE).await;
    while inbox.recv().await.is_some() {}
}

/// One connection to a peer.
struct ForwardConnection<'a> {
    shared: &'a Shared,
    place: usize,
    pending: Mutex<HashMap<u64, oneshot::Sender<ForwardReply>>>,
    /// What the peer's clock read when it was last heard of, and ours then.
    heard: Mutex<(u64, u64)>,
    answered: AtomicU64,
}

impl<'a> ForwardConnection<'a> {
    fn new(shared: &'a Shared, place: usize, clock_us: u64) -> Self {
        let heard = Mutex::new((clock_us, shared.now_us()));
        Self { shared, place, pending: Mutex::default(), heard, answered: AtomicU64::new(0) }
    }

    fn pending(&self) -> MutexGuard<'_, HashMap<u64, oneshot::Sender<ForwardReply>>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn heard(&self) -> MutexGuard<'_, (u64, u64)> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
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
                        return Err(ConnectionError::Late("an answer"));
                    }
                    (ForwardRequest { id: 0, act: ForwardAction::Decide, checks: Vec::new() }, u64::MAX)
                }
            };
            let frame = Frame::Forward(forward, until_us);
            let writing = write(&mut writer, &frame);
            let sent = within("a question", IDLE_TIME_MAX, writing).await?;
            self.shared.count(self.place, |counts| counts.bytes_sent += sent);
        }
    }

    /// Takes down who waits for the answer, and until when that is by the peer's clock; nothing, if nobody does any more, or too
    /// many do.
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
            *since_us = self.at_peer_or_before_us(*since_us);
        }
        // What was spent or is given back counts, however late it is heard.
        let is_late_in_vain = forward.act == ForwardAction::Decide;
        Some((forward, if is_late_in_vain { self.at_peer_us(until_us) } else { u64::MAX }))
    }

    /// One of our instants by the peer's clock, at the earliest: it was read some time before it was heard of. So what is decided
    /// by then may come too late to be of use, but nothing that is later is of any.
    fn at_peer_us(&self, us: u64) -> u64 {
        let (clock_us, then_us) = *self.heard();
        clock_us.saturating_add(us.saturating_sub(then_us))
    }

    /// One of our instants by the peer's clock, or earlier, whose rates may differ by a sixteenth: what was charged then has drained for
    /// as long as this says, or for less.
    fn at_peer_or_before_us(&self, us: u64) -> u64 {
        let (clock_us, then_us) = *self.heard();
        let (after_us, before_us) = (us.saturating_sub(then_us), then_us.saturating_sub(us));
        clock_us
            .saturating_add(after_us - after_us / 16)
            .saturating_sub(before_us.saturating_add(before_us / 16))
    }

    fn is_idle(&self) -> bool {
        self.shared.now_us() > self.heard().1 + IDLE_US_MAX
    }

    async fn read_replies<S: Stream>(&self, mut reader: ReadHalf<S>) -> Result<(), ConnectionError> {
        loop {
            let (frame, bytes) = read(&mut reader, FRAME_BYTES_MAX).await?;
            self.shared.count(self.place, |counts| counts.bytes_received += bytes);
            match frame {
                Frame::Forwarded(forwarded, clock_us) => {
                    *self.heard() = (clock_us, self.shared.now_us());
                    self.answered.fetch_add(1, Ordering::Relaxed);
                    let waiting = self.pending().remove(&forwarded.id);
                    // Whoever waited may have gone away.
                    let _ = waiting.map(|answer| answer.send(forwarded));
                }
                Frame::Refused(refusal) => return Err(ConnectionError::Refused(refusal)),
                _ => return Err(ConnectionError::Unexpected),
            }
        }
    }
}

/// Decides what a peer forwards, many at once, until it has nothing more to say.
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
    let (says, mut said) = mpsc::channel(ANSWERS_AT_ONCE);
    // There is room for one.
    let _ = takes.try_send(first);
    let reading = async {
        loop {
            let reading = read(&mut reader, FRAME_BYTES_MAX);
            let (frame, bytes) = within("a question", IDLE_TIME_MAX, reading).await?;
            shared.count(place, |counts| counts.bytes_received += bytes);
            let Frame::Forward(forward, until_us) = frame else { return Err(ConnectionError::Unexpected) };
            if takes.send((forward, until_us)).await.is_err() {
                return Ok(());
            }
        }
    };
    let checks = stream::unfold(checks, async |mut checks| Some((checks.recv().await?, checks)));
    let deciding = checks.for_each_concurrent(ANSWERS_AT_ONCE, |(forward, until_us)| {
        let says = says.clone();
        async move {
            // Nobody is left to hear it where this fails.
            let _ = says.send(decide(shared, asker, forward, until_us).await).await;
        }
    });
    let writing = async {
        while let Some(forwarded) = said.recv().await {
            let frame = Frame::Forwarded(forwarded, shared.now_us());
            let writing = write(&mut writer, &frame);
            let sent = within("an answer", IDLE_TIME_MAX, writing).await?;
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

/// Decides what somebody still waits for, what comes too late would be charged for nothing; and takes in what it tells, once.
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
