//! The task that does what the engine wants done.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tidegate_core::engine::{
    CallFailure, Charge, ChargeLocation, Effect, Engine, EngineRequest, EngineSettings, EngineStats,
    Resolution, Ticket,
};
use tidegate_core::origin::{Call, CallError, CallReply, NodeId};
use tidegate_core::{Digest, FallbackState, Now};
use tidegate_origin::{Origin, OriginError, PARTITIONS};
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot, watch};

use crate::limiter::Limiter;

/// How often the engine is looked at when it asks for nothing. Only what spends a grant does so without telling it.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// By how much later than it wanted the task may be woken before it lets answers in that have come meanwhile; and for how long at most,
/// as long as it was late: what kept this process from running may have kept the origin's as well, which has to run first. Longer: fewer
/// decisions without the origin on a machine that stops now and then; longer answers there.
const LATE_BY: Duration = Duration::from_millis(5);
const GRACE_MAX: Duration = Duration::from_millis(10);

/// The engine and those who wait for it.
struct State {
    engine: Engine,
    /// As many as the engine lets wait: [`EngineSettings::waiting_max`].
    waiters: HashMap<Ticket, oneshot::Sender<Resolution>>,
    tickets: Ticket,
    /// How far the origin's clock is ahead of this one, µs, by the quickest of the answers of late.
    skew: ClockSkew,
    /// Of each partition that has answered: every origin on a cluster has a clock of its own.
    clocks: HashMap<u16, ClockReading>,
}

/// Does what the engine wants done.
pub(super) struct Driver {
    limiter: Arc<Limiter>,
    origin: Arc<dyn Origin>,
    state: Mutex<State>,
    /// Where calls are made: not where whoever asks happens to be.
    runtime: Handle,
    origin_up: watch::Sender<bool>,
    /// Why the origin would not take the last call that it would not.
    refusal: watch::Sender<Option<CallError>>,
    /// Of each partition: whether it counted what all regions use when it last spoke of a limit that they share.
    connected: Box<[AtomicBool]>,
    /// Told when the engine may have something to do.
    wake: Notify,
    /// Told when the engine has nothing left to do.
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
        // Whoever panicked while holding it left the engine between two of its steps, none of which is half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the origin, by and by. The engine answers within its deadline, whatever becomes of the call, if its task runs.
    pub(super) async fn ask(self: &Arc<Self>, partition: u16, charges: Vec<Charge>) -> Resolution {
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

    /// Notes what was let through without the origin.
    pub(super) fn owe(&self, partition: u16, charge: &Charge) {
        if charge.cost > 0 {
            self.state().engine.owe(self.limiter.now(), partition, &charge.meter, charge.cost);
            self.wake.notify_one();
        }
    }

    /// Gives back what was charged: here, as far as it was not reported, and otherwise there.
    pub(super) fn refund(&self, partition: u16, charge: &Charge) {
        let Charge { meter, cost } = charge;
        let now = self.limiter.now();
        let ask = tidegate_core::Check {
            limit: &meter.limit,
            space: &meter.space,
            digest: meter.digest,
            cost: *cost,
        };
        let rest = self.limiter.table().give_back(now, &ask);
        if rest > 0 {
            self.state().engine.refund(now, partition, meter, rest);
            self.wake.notify_one();
        }
    }

    /// Gives back what was charged for a request that does not pass in the end.
    pub(super) fn roll_back(&self, partition: u16, charge: &Charge, paid: ChargeLocation) {
        if charge.cost > 0 {
            let (now, table) = (self.limiter.now(), self.limiter.table());
            self.state().engine.roll_back(now, table, partition, charge, paid);
            self.wake.notify_one();
        }
    }

    /// Gives back what this region charged for a request of another one that does not pass in the end. Whichever process of this
    /// region it was that charged it, what is held here is left alone: it may be what others have spent since.
    pub(super) fn roll_back_for_another(&self, partition: u16, charge: &Charge, since_us: u64) {
        let clock = self.state().clocks.get(&partition).copied();
        // Where nobody here knows the origin's time, nobody knows what has drained: then all of it has.
        let at_us =
            clock.map_or(0, |clock| clock.at_or_before_us(since_us.min(self.limiter.now().mono_us())));
        // To the origin 0 says that nothing has drained.
        self.roll_back(partition, charge, ChargeLocation::AtOrigin { at_us: at_us.max(1) });
    }

    /// What there is to go by for a meter while the origin is gone.
    pub(super) fn fallback_state(&self, partition: u16, digest: Digest) -> FallbackState {
        self.state().engine.fallback_state(self.limiter.now(), partition, digest)
    }

    /// How many processes there are, for all that is known.
    pub(super) fn processes(&self) -> u32 {
        self.state().engine.processes()
    }

    /// Has grants of limits that several regions count together last this long at most.
    pub(super) fn limit_cross_region_life(&self, life_us: u64) {
        self.state().engine.limit_cross_region_life(life_us);
    }

    /// Does something beside whoever asks, where calls are made.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(task);
    }

    pub(super) fn origin(&self) -> Arc<dyn Origin> {
        Arc::clone(&self.origin)
    }

    /// Whether a partition counts what all regions use, as it last said.
    pub(super) fn is_connected(&self, partition: u16) -> bool {
        self.connected.get(usize::from(partition)).is_some_and(|connected| connected.load(Ordering::Relaxed))
    }

    /// Takes in what a partition said of limits that regions share.
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

    /// Takes in what a partition's clock read in an answer to a call that was sent at that time.
    fn note_clock(&self, partition: u16, sent: Now, clock_us: u64) {
        let now = self.limiter.now();
        let mut state = self.state();
        state.skew.measure(sent, now, clock_us);
        state.clocks.insert(partition, ClockReading { clock_us, heard_us: now.mono_us() });
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

    /// Looks after the engine: what it wants done now, and when to come again.
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
                    // Whoever waited may have gone away.
                    let _ = waiter.map(|waiter| waiter.send(resolution));
                }
            }
        }
    }

    /// Whether the origin answers nobody: one call that is late does not mean that.
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
            // However often it was said again, it would not be taken.
            Err(OriginError::Refused(why)) => {
                let before = state.engine.stats().refused;
                state.engine.on_failure(now, partition, sequence, why.into(), &mut effects);
                // A second attempt that comes after the answer to the first is of no interest.
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

/// What another clock read, and when that was heard by the one here.
#[derive(Clone, Copy, Debug)]
struct ClockReading {
    clock_us: u64,
    heard_us: u64,
}

impl ClockReading {
    /// What the other clock read at a moment of the one here, or earlier, whose rates may differ by a sixteenth: it was read before it
    /// was heard.
    fn at_or_before_us(self, mono_us: u64) -> u64 {
        let Self { clock_us, heard_us } = self;
        let (after_us, before_us) = (mono_us.saturating_sub(heard_us), heard_us.saturating_sub(mono_us));
        clock_us
            .saturating_add(after_us - after_us / 16)
            .saturating_sub(before_us.saturating_add(before_us / 16))
    }
}

/// How far another clock is ahead, all in microseconds.
#[derive(Debug, Default)]
struct ClockSkew {
    ahead: i64,
    /// How long the answer took by which it was measured, and when that was.
    took: u64,
    measured: u64,
}

/// For how long a measurement by a quick answer is better than one by a slower. Longer: less noise; drift is seen later.
const SKEW_EVERY_US: u64 = 10_000_000;

impl ClockSkew {
    /// Takes in the other clock's reading in an answer: it was read somewhere between `sent` and `heard`.
    fn measure(&mut self, sent: Now, heard: Now, other_us: u64) {
        let took_us = heard.mono_us().saturating_sub(sent.mono_us());
        let is_stale = heard.mono_us() >= self.measured + SKEW_EVERY_US;
        if self.measured > 0 && took_us > self.took && !is_stale {
            return;
        }
        let here_us = heard.wall_us().saturating_sub(took_us / 2);
        let ahead_us = i128::from(other_us) - i128::from(here_us);
        let ahead_us = i64::try_from(ahead_us).unwrap_or(if ahead_us < 0 { i64::MIN } else { i64::MAX });
        *self = Self { ahead: ahead_us, took: took_us, measured: heard.mono_us() };
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "any number of answers may come, so there is no condition to wait for"
)]
async fn give_time(time: Duration) {
    tokio::time::sleep(time).await;
}

/// Runs until nobody holds the driver any more.
async fn drive(driver: Weak<Driver>) {
    loop {
        let Some(strong) = driver.upgrade() else { return };
        let wait = strong.turn().min(LOOK_EVERY);
        let asleep = strong.limiter.now();
        // Held only for the wait, which ends at the latest when the engine wants to be looked after again.
        let _ = tokio::time::timeout(wait, strong.wake.notified()).await;
        // A process that did not run for a while finds its timers over and the answers unread that came meanwhile: the time that
        // it was late itself is not held against the origin.
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
    fn no_moment_of_another_clock_is_taken_for_a_later_one() {
        let reading = ClockReading { clock_us: 5_000_000, heard_us: 1_000_000 };
        assert_eq!(reading.at_or_before_us(1_000_000), 5_000_000);
        assert_eq!(reading.at_or_before_us(1_160_000), 5_150_000, "it may run slower");
        assert_eq!(reading.at_or_before_us(840_000), 4_830_000, "or have run faster");
        assert_eq!(ClockReading { clock_us: 7, heard_us: u64::MAX }.at_or_before_us(0), 0);
    }

    #[test]
    fn skew_is_measured_by_the_quickest_answer_of_late() {
        let at = |us: u64| Now::from_micros(us, 1_000_000_000 + us);
        let mut skew = ClockSkew::default();
        skew.measure(at(1_000), at(3_000), 1_000_502_000);
        assert_eq!(skew.ahead, 500_000);
        skew.measure(at(5_000), at(5_100), 1_000_505_060);
        assert_eq!(skew.ahead, 500_010, "a quicker one is better");
        skew.measure(at(6_000), at(9_000), 1_000_509_000);
        assert_eq!(skew.ahead, 500_010, "a slower one is not");
        skew.measure(at(11_000_000), at(11_002_000), 1_011_001_000 - 250);
        assert_eq!(skew.ahead, -250, "unless the last is old");
    }
}
