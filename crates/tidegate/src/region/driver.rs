//! The task that does what the engine wants done.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tidegate_core::engine::{
    Charge, Effect, Engine, EngineStats, Failure, MeterRef, Request, Resolution, Settings, Ticket,
};
use tidegate_core::origin::{Call, CallError, NodeId, Reply};
use tidegate_origin::{Origin, OriginError};
use tokio::sync::{Notify, oneshot};

use super::RegionAsk;
use crate::limiter::Limiter;

/// How often the engine is looked at when it asks for nothing. Only what spends a grant does so without telling it.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The engine and those who wait for it.
struct State {
    engine: Engine,
    waiters: HashMap<Ticket, oneshot::Sender<Resolution>>,
    tickets: Ticket,
    /// The most processes that were ever heard to hold a part of one meter: how many there are, for all that is known.
    holders: u32,
}

/// Does what the engine wants done.
pub(super) struct Driver {
    limiter: Arc<Limiter>,
    origin: Arc<dyn Origin>,
    state: Mutex<State>,
    /// Told when the engine may have something to do.
    stirred: Notify,
    /// Told when the engine has nothing left to do.
    idle: Notify,
}

impl Driver {
    pub(super) fn start(
        node: NodeId,
        limiter: Arc<Limiter>,
        origin: Arc<dyn Origin>,
        settings: Settings,
    ) -> Arc<Self> {
        let engine = Engine::new(node, settings);
        let state = State { engine, waiters: HashMap::new(), tickets: 0, holders: 1 };
        let driver = Arc::new(Self {
            limiter,
            origin,
            state: Mutex::new(state),
            stirred: Notify::new(),
            idle: Notify::new(),
        });
        tokio::spawn(drive(Arc::downgrade(&driver)));
        driver
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Whoever panicked while holding it left the engine between two of its steps, none of which is half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the origin, by and by. The engine answers within its deadline, whatever becomes of the call.
    pub(super) async fn ask(self: &Arc<Self>, partition: u16, charges: Vec<Charge>) -> Resolution {
        let (sender, answer) = oneshot::channel();
        let effects = {
            let mut state = self.state();
            state.tickets += 1;
            let ticket = state.tickets;
            state.waiters.insert(ticket, sender);
            let mut effects = Vec::new();
            state.engine.ask(self.limiter.now(), Request { ticket, partition, charges }, &mut effects);
            effects
        };
        self.act(effects);
        self.stirred.notify_one();
        answer.await.unwrap_or(Resolution::Unanswered)
    }

    /// Notes what was let through without the origin.
    pub(super) fn owe(&self, partition: u16, meters: impl Iterator<Item = MeterRef>, cost: u64) {
        let now = self.limiter.now();
        let mut state = self.state();
        for meter in meters {
            state.engine.owe(now, partition, &meter, cost);
        }
    }

    /// How many processes share a meter, as far as this one knows.
    pub(super) fn holders(&self, partition: u16, ask: &RegionAsk<'_, '_>) -> u32 {
        let state = self.state();
        state.engine.holders(partition, ask.held().digest).unwrap_or(1).max(state.holders)
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
            self.stirred.notify_one();
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
                    tokio::spawn(Arc::clone(self).call(partition, call, hedge));
                }
                Effect::Answer { ticket, resolution } => {
                    let waiter = self.state().waiters.remove(&ticket);
                    // Whoever waited may have gone away.
                    let _ = waiter.map(|waiter| waiter.send(resolution));
                }
            }
        }
    }

    async fn call(self: Arc<Self>, partition: u16, call: Arc<Call>, hedge: bool) {
        let answer = if hedge {
            self.origin.hedge(partition, &call).await
        } else {
            self.origin.call(partition, &call).await
        };
        let effects = self.hear(partition, call.sequence, answer);
        self.act(effects);
        self.stirred.notify_one();
    }

    fn hear(&self, partition: u16, sequence: u64, answer: Result<Reply, OriginError>) -> Vec<Effect> {
        let now = self.limiter.now();
        let mut effects = Vec::new();
        let mut state = self.state();
        match answer {
            Ok(reply) => {
                let holders = reply.told.iter().map(|told| told.holders).max().unwrap_or(1);
                state.holders = state.holders.max(holders);
                state.engine.on_reply(now, self.limiter.table(), partition, sequence, &reply, &mut effects);
            }
            Err(OriginError::Refused(CallError::Outdated { sequence: applied })) => {
                let failure = Failure::Outdated { sequence: applied };
                state.engine.on_failure(now, partition, sequence, failure);
            }
            Err(_) => state.engine.on_failure(now, partition, sequence, Failure::Unanswered),
        }
        effects
    }
}

/// Runs until nobody holds the driver any more.
async fn drive(driver: Weak<Driver>) {
    loop {
        let Some(strong) = driver.upgrade() else { return };
        let wait = strong.turn();
        // Held only for the wait, which ends at the latest when the engine wants to be looked after again.
        let _ = tokio::time::timeout(wait.min(LOOK_EVERY), strong.stirred.notified()).await;
    }
}
