//! The task that executes the effects of the engine.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tidegate_core::engine::{
    CallFailure, Charge, ChargeLocation, Effect, Engine, EngineRequest, EngineSettings, EngineStats,
    Resolution, Ticket,
};
use tidegate_core::origin::{Call, CallError, CallReply, NodeId};
use tidegate_core::{Digest, FallbackState, Now, RemoteClock};
use tidegate_origin::{Origin, OriginError, PARTITIONS};
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot, watch};

use crate::limiter::Limiter;

/// Interval between polls of the engine if it requests none. Only spending from a grant does not
/// wake it.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Delay of a wake-up above which the task first lets in replies that have arrived, and the longest
/// time that it waits for them. It waits as long as it was late: a stall of this process may have
/// stalled the origin too, and the origin must run first. Longer: fewer decisions without the
/// origin on a machine that stalls at times; longer response times there.
const LATE_BY: Duration = Duration::from_millis(5);
const GRACE_MAX: Duration = Duration::from_millis(10);

/// The engine and the requests that wait for it.
struct State {
    engine: Engine,
    /// As many as the engine lets wait: [`EngineSettings::waiting_max`].
    waiters: HashMap<Ticket, oneshot::Sender<Resolution>>,
    tickets: Ticket,
    /// Lead of the origin's clock over this one, µs, by the fastest recent reply.
    skew: ClockSkew,
    /// Clock reading of each partition that has replied: each server of a cluster has its own
    /// clock.
    clocks: HashMap<u16, RemoteClock>,
}

/// The executor of the engine's effects.
pub(super) struct Driver {
    limiter: Arc<Limiter>,
    origin: Arc<dyn Origin>,
    state: Mutex<State>,
    /// The runtime that makes calls, independent of the caller's.
    runtime: Handle,
    origin_up: watch::Sender<bool>,
    /// Reason of the last refused call.
    refusal: watch::Sender<Option<CallError>>,
    /// For each partition: whether its last reply about a cross-region limit counted the usage of
    /// all regions.
    connected: Box<[AtomicBool]>,
    /// Notified when the engine may have work.
    wake: Notify,
    /// Notified when the engine has no work left.
    idle: Notify,
}

impl Driver {
    pub(super) fn start(
        node: NodeId,
        limiter: Arc<Limiter>,
        origin: Arc<dyn Origin>,
        settings: EngineSettings,
    ) -> Arc<Self> {
        let engine = Engine::new(node, settings);
        let (waiters, clocks) = (HashMap::new(), HashMap::new());
        let state = State { engine, waiters, tickets: 0, skew: ClockSkew::default(), clocks };
        let driver = Arc::new(Self {
            limiter,
            origin,
            state: Mutex::new(state),
            runtime: Handle::current(),
            origin_up: watch::Sender::new(true),
            refusal: watch::Sender::new(None),
            connected: (0..PARTITIONS).map(|_| AtomicBool::new(false)).collect(),
            wake: Notify::new(),
            idle: Notify::new(),
        });
        tokio::spawn(drive(Arc::downgrade(&driver)));
        driver
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic under this lock leaves the engine between two steps, and no step is half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Submits checks for a call to the origin. The engine resolves them within its deadline, even
    /// without a reply, as long as its task runs.
    pub(super) async fn request(self: &Arc<Self>, partition: u16, charges: Vec<Charge>) -> Resolution {
        let (sender, answer) = oneshot::channel();
        let effects = {
            let mut state = self.state();
            state.tickets += 1;
            let ticket = state.tickets;
            state.waiters.insert(ticket, sender);
            let mut effects = Vec::new();
            state.engine.on_request(
                self.limiter.now(),
                EngineRequest { ticket, partition, charges },
                &mut effects,
            );
            effects
        };
        self.act(effects);
        self.wake.notify_one();
        answer.await.unwrap_or(Resolution::Unanswered)
    }

    /// Records usage that was admitted without the origin.
    pub(super) fn owe(&self, partition: u16, charge: &Charge) {
        if charge.cost > 0 {
            self.state().engine.owe(self.limiter.now(), partition, &charge.meter, charge.cost);
            self.wake.notify_one();
        }
    }

    /// Gives a charge back: on this node if it is not reported yet, or else at the origin.
    pub(super) fn refund(&self, partition: u16, charge: &Charge) {
        let now = self.limiter.now();
        let rest = self.limiter.table().give_back(now, &charge.check());
        if rest > 0 {
            self.state().engine.refund(now, partition, &charge.meter, rest);
            self.wake.notify_one();
        }
    }

    /// Gives back the charge of a request that is denied in the end.
    pub(super) fn roll_back(&self, partition: u16, charge: &Charge, location: ChargeLocation) {
        if charge.cost > 0 {
            let (now, table) = (self.limiter.now(), self.limiter.table());
            self.state().engine.roll_back(now, table, partition, charge, location);
            self.wake.notify_one();
        }
    }

    /// Gives back this region's charge for a request of a peer region that is denied in the end.
    /// Any node of this region may have made the charge. So this node's grant stays unchanged: its
    /// usage may belong to other requests.
    pub(super) fn roll_back_for_another(&self, partition: u16, charge: &Charge, since_us: u64) {
        let clock = self.state().clocks.get(&partition).copied();
        // Without a reading of the origin's clock, the drained part is unknown, so all of it counts
        // as drained.
        let at_us =
            clock.map_or(0, |clock| clock.at_or_before_us(since_us.min(self.limiter.now().mono_us())));
        // For the origin, 0 means that no part has drained.
        self.roll_back(partition, charge, ChargeLocation::AtOrigin { at_us: at_us.max(1) });
    }

    /// Returns the known state of a meter, for a decision without the origin.
    pub(super) fn fallback_state(&self, partition: u16, digest: Digest) -> FallbackState {
        self.state().engine.fallback_state(self.limiter.now(), partition, digest)
    }

    /// Returns the known number of nodes that share the origin.
    pub(super) fn processes(&self) -> u32 {
        self.state().engine.processes()
    }

    /// Limits the life of grants of cross-region limits.
    pub(super) fn limit_cross_region_life(&self, life_us: u64) {
        self.state().engine.limit_cross_region_life(life_us);
    }

    /// Spawns a task on the runtime that makes calls, beside the caller.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(task);
    }

    pub(super) fn origin(&self) -> Arc<dyn Origin> {
        Arc::clone(&self.origin)
    }

    /// Whether a partition counts the usage of all regions, by its last reply.
    pub(super) fn is_connected(&self, partition: u16) -> bool {
        self.connected.get(usize::from(partition)).is_some_and(|connected| connected.load(Ordering::Relaxed))
    }

    /// Records whether a partition counts all regions, by its reply about cross-region limits.
    fn note_connected(&self, partition: u16, call: &Call, reply: &CallReply) {
        let mut meter_reply = call
            .updates
            .iter()
            .zip(&reply.meters)
            .filter(|(update, _)| update.terms.cross_region().is_some());
        if let (Some((_, meter_reply)), Some(connected)) =
            (meter_reply.next(), self.connected.get(usize::from(partition)))
        {
            connected.store(meter_reply.is_global, Ordering::Relaxed);
        }
    }

    /// Records the reading of a partition's clock in the reply to a call sent at `sent`.
    fn note_clock(&self, partition: u16, sent: Now, clock_us: u64) {
        let now = self.limiter.now();
        let mut state = self.state();
        state.skew.measure(sent, now, clock_us);
        state.clocks.insert(partition, RemoteClock::new(clock_us, now.mono_us()));
    }

    pub(super) fn origin_up(&self) -> watch::Receiver<bool> {
        self.origin_up.subscribe()
    }

    pub(super) fn refusal(&self) -> watch::Receiver<Option<CallError>> {
        self.refusal.subscribe()
    }

    pub(super) fn skew_us(&self) -> i64 {
        self.state().skew.ahead
    }

    pub(super) fn stats(&self) -> EngineStats {
        self.state().engine.stats()
    }

    pub(super) async fn leave(&self) {
        loop {
            let idle = self.idle.notified();
            {
                let mut state = self.state();
                state.engine.close();
                if state.engine.is_idle() {
                    return;
                }
            }
            self.wake.notify_one();
            idle.await;
        }
    }

    /// Polls the engine, executes its effects, and returns the time until the next poll.
    fn turn(self: &Arc<Self>) -> Duration {
        let now = self.limiter.now();
        let mut effects = Vec::new();
        let (next, is_idle) = {
            let mut state = self.state();
            let next = state.engine.poll(now, self.limiter.table(), &mut effects);
            (next, state.engine.is_idle())
        };
        self.act(effects);
        if is_idle {
            self.idle.notify_waiters();
        }
        next.map_or(LOOK_EVERY, |next_us| Duration::from_micros(next_us.saturating_sub(now.mono_us())))
    }

    fn act(self: &Arc<Self>, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Call { partition, call, hedge } => {
                    self.runtime.spawn(Arc::clone(self).call(partition, call, hedge));
                }
                Effect::Answer { ticket, resolution } => {
                    if resolution == Resolution::Unanswered && self.is_stalled() {
                        self.note_origin_up(false);
                    }
                    let waiter = self.state().waiters.remove(&ticket);
                    // The waiting request may have been dropped.
                    let _ = waiter.map(|waiter| waiter.send(resolution));
                }
            }
        }
    }

    /// Whether the origin replies to no call. One late call is not enough.
    fn is_stalled(&self) -> bool {
        self.state().engine.is_stalled(self.limiter.now())
    }

    fn note_origin_up(&self, origin_up: bool) {
        self.origin_up.send_if_modified(|before| std::mem::replace(before, origin_up) != origin_up);
    }

    async fn call(self: Arc<Self>, partition: u16, call: Arc<Call>, hedge: bool) {
        let sent = self.limiter.now();
        let answer = if hedge {
            self.origin.hedge(partition, &call).await
        } else {
            self.origin.call(partition, &call).await
        };
        if let Ok(reply) = &answer {
            self.note_clock(partition, sent, reply.now_us);
            self.note_connected(partition, &call, reply);
        }
        let effects = self.handle_reply(partition, call.sequence, answer);
        self.act(effects);
        self.wake.notify_one();
    }

    fn handle_reply(
        &self,
        partition: u16,
        sequence: u64,
        answer: Result<CallReply, OriginError>,
    ) -> Vec<Effect> {
        let now = self.limiter.now();
        let mut effects = Vec::new();
        if answer.is_ok() {
            self.note_origin_up(true);
        }
        let mut state = self.state();
        match answer {
            Ok(reply) => {
                state.engine.on_reply(now, self.limiter.table(), partition, sequence, &reply, &mut effects);
            }
            // A repeat of this call would be refused too.
            Err(OriginError::Refused(why)) => {
                let before = state.engine.stats().refused;
                state.engine.on_failure(now, partition, sequence, why.into(), &mut effects);
                // A refused second attempt does not matter after a reply to the first.
                if state.engine.stats().refused > before {
                    self.refusal.send_replace(Some(why));
                }
            }
            Err(_) => {
                state.engine.on_failure(now, partition, sequence, CallFailure::Unanswered, &mut effects);
            }
        }
        effects
    }
}

/// How far another clock is ahead, all in microseconds.
#[derive(Debug, Default)]
struct ClockSkew {
    ahead: i64,
    /// Round-trip time of the measurement, and its local time.
    took: u64,
    measured: u64,
}

/// Time for which a measurement by a fast reply takes precedence over a slower one, µs. Longer:
/// less noise; drift is noticed later.
const SKEW_EVERY_US: u64 = 10_000_000;

impl ClockSkew {
    /// Measures by a reply: the other clock was read between `sent` and `arrived`.
    fn measure(&mut self, sent: Now, arrived: Now, other_us: u64) {
        let took_us = arrived.mono_us().saturating_sub(sent.mono_us());
        let is_stale = arrived.mono_us() >= self.measured + SKEW_EVERY_US;
        if self.measured > 0 && took_us > self.took && !is_stale {
            return;
        }
        let here_us = arrived.wall_us().saturating_sub(took_us / 2);
        let ahead_us = i128::from(other_us) - i128::from(here_us);
        let ahead_us = i64::try_from(ahead_us).unwrap_or(if ahead_us < 0 { i64::MIN } else { i64::MAX });
        *self = Self { ahead: ahead_us, took: took_us, measured: arrived.mono_us() };
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "replies are unbounded in number: there is no condition to wait for"
)]
async fn give_time(time: Duration) {
    tokio::time::sleep(time).await;
}

/// Runs until the driver is dropped.
async fn drive(driver: Weak<Driver>) {
    loop {
        let Some(strong) = driver.upgrade() else { return };
        let wait = strong.turn().min(LOOK_EVERY);
        let asleep = strong.limiter.now();
        // The driver stays alive for this wait only, which ends at the next poll of the engine at
        // the latest.
        let _ = tokio::time::timeout(wait, strong.wake.notified()).await;
        // After a stall of this process, timers have expired and replies are unread. The driver
        // does not count its own delay against the origin.
        let slept_us = strong.limiter.now().mono_us().saturating_sub(asleep.mono_us());
        let late = Duration::from_micros(slept_us).saturating_sub(wait);
        if late > LATE_BY {
            give_time(late.min(GRACE_MAX)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skew_is_measured_by_the_fastest_recent_reply() {
        let at = |us: u64| Now::from_micros(us, 1_000_000_000 + us);
        let mut skew = ClockSkew::default();
        skew.measure(at(1_000), at(3_000), 1_000_502_000);
        assert_eq!(skew.ahead, 500_000);
        skew.measure(at(5_000), at(5_100), 1_000_505_060);
        assert_eq!(skew.ahead, 500_010, "a faster reply replaces it");
        skew.measure(at(6_000), at(9_000), 1_000_509_000);
        assert_eq!(skew.ahead, 500_010, "a slower reply does not");
        skew.measure(at(11_000_000), at(11_002_000), 1_011_001_000 - 250);
        assert_eq!(skew.ahead, -250, "unless the last measurement is old");
    }
}
