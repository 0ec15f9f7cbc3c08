//! Reservations: capacity set aside before the work, settled after it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arrayvec::ArrayVec;
use tidegate_core::{DecidingMeter, Digest, KeySpace, Limit, Now, Table, TooManyLimits};

use crate::decision::{Decision, LIMITS_INLINE_MAX};
use crate::gate::Check;
use crate::limiter::Limiter;

/// Reservations that may be open at once. Higher: more memory for work in flight.
pub const RESERVATIONS_MAX: usize = 65_536;

/// Longest time that a reservation stays open, µs. Then it is given back, because its holder has
/// likely forgotten it. A late commit is still charged.
pub const RESERVATION_US_MAX: u64 = 60_000_000;

/// The result of a request for a reservation.
#[derive(Debug)]
#[must_use = "a dropped reservation is released"]
pub enum ReserveOutcome<'l, 'g> {
    /// Every limit had room, and the cost is set aside.
    Held(Reservation<'l, 'g>),
    /// At least one limit had no room. No units are set aside.
    Denied(Decision<'g>),
}

/// The reason why a reservation cannot be requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReserveError {
    /// More limits than one request may be under.
    TooManyLimits(TooManyLimits),
    /// [`RESERVATIONS_MAX`] reservations are open already.
    TooManyOpen,
}

impl fmt::Display for ReserveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooManyLimits(error) => error.fmt(f),
            Self::TooManyOpen => {
                write!(
                    f,
                    "reservations: the maximum of {RESERVATIONS_MAX} open reservations is reached: commit or \
                     drop one"
                )
            }
        }
    }
}

impl std::error::Error for ReserveError {}

impl From<TooManyLimits> for ReserveError {
    fn from(error: TooManyLimits) -> Self {
        Self::TooManyLimits(error)
    }
}

/// One limit's part of a reservation, with all that is needed to settle it.
#[derive(Clone, Copy, Debug)]
struct ReservationPart {
    limit: Limit,
    space: KeySpace,
    digest: Digest,
    cost: u64,
    source: DecidingMeter,
}

impl ReservationPart {
    fn check(&self, cost: u64) -> tidegate_core::Check<'_> {
        tidegate_core::Check { limit: &self.limit, space: &self.space, digest: self.digest, cost }
    }

    fn rollback(&self, now: Now, table: &Table) {
        table.rollback(now, &self.check(self.cost), self.source);
    }
}

type ReservationParts = Arc<[ReservationPart]>;

/// The reservations that are open, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    open: Mutex<OpenReservations>,
}

#[derive(Debug, Default)]
struct OpenReservations {
    next_id: u64,
    entries: BTreeMap<u64, (u64, ReservationParts)>,
}

impl Ledger {
    fn open(&self) -> MutexGuard<'_, OpenReservations> {
        // A panic elsewhere cannot leave the entries half changed.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a reservation, unless too many are open.
    fn enter(&self, now: Now, parts: &ReservationParts) -> Option<u64> {
        let mut open = self.open();
        if open.entries.len() >= RESERVATIONS_MAX {
            return None;
        }
        let id = open.next_id;
        open.next_id += 1;
        open.entries.insert(id, (now.mono_us() + RESERVATION_US_MAX, Arc::clone(parts)));
        Some(id)
    }

    /// Removes a reservation. Returns false if it had expired: its units were given back already.
    fn strike(&self, id: u64) -> bool {
        self.open().entries.remove(&id).is_some()
    }

    /// Gives back expired reservations. All live equally long, so the oldest expire first.
    pub(crate) fn sweep(&self, now: Now, table: &Table) {
        let mut open = self.open();
        while let Some(oldest) = open.entries.first_entry()
            && oldest.get().0 <= now.mono_us()
        {
            let (_, parts) = oldest.remove();
            parts.iter().for_each(|part| part.rollback(now, table));
        }
    }
}

/// Units set aside under one or more limits. Dropping the reservation gives all of them back.
#[derive(Debug)]
#[must_use = "a dropped reservation is released"]
pub struct Reservation<'l, 'g> {
    limiter: &'l Limiter,
    id: u64,
    parts: ReservationParts,
    decision: Decision<'g>,
    settled: bool,
}

impl<'l, 'g> Reservation<'l, 'g> {
    /// Enters an allowed request into the ledger, or gives its cost back if the ledger is full.
    pub(crate) fn enter(
        limiter: &'l Limiter,
        checks: &[Check<'_>],
        decision: Decision<'g>,
    ) -> Result<Self, ReserveError> {
        let parts: ReservationParts = checks
            .iter()
            .zip(decision.outcomes())
            .map(|(check, outcome)| {
                let check = check.of(limiter.id());
                let source = outcome.source();
                ReservationPart {
                    limit: *check.limit,
                    space: *check.space,
                    digest: check.digest,
                    cost: check.cost,
                    source,
                }
            })
            .collect();
        let now = limiter.now();
        let Some(id) = limiter.ledger.enter(now, &parts) else {
            parts.iter().for_each(|part| part.rollback(now, limiter.table()));
            return Err(ReserveError::TooManyOpen);
        };
        Ok(Self { limiter, id, parts, decision, settled: false })
    }

    /// Returns the decision that set the cost aside.
    pub fn decision(&self) -> &Decision<'g> {
        &self.decision
    }

    /// Charges the reserved cost.
    pub fn commit(self) {
        self.commit_with(|_, reserved| reserved);
    }

    /// Charges `actual` under every limit instead of the reserved cost: less, or more.
    pub fn commit_actual(self, actual: u64) {
        self.commit_with(|_, _| actual);
    }

    /// Charges under each limit the cost that `actual` returns for the limit's position and its
    /// reserved cost.
    pub fn commit_with(mut self, actual: impl Fn(usize, u64) -> u64) {
        // Called before any limit is settled: if it panics, dropping the reservation gives all of
        // it back.
        let actuals: ArrayVec<u64, LIMITS_INLINE_MAX> =
            self.parts.iter().enumerate().map(|(at, part)| actual(at, part.cost)).collect();
        self.settled = true;
        let (now, table) = (self.limiter.now(), self.limiter.table());
        let held = self.limiter.ledger.strike(self.id);
        for (part, actual) in self.parts.iter().zip(actuals) {
            if held {
                table.commit(now, &part.check(part.cost), part.source, actual);
            } else {
                table.charge(now, &part.check(actual));
            }
        }
    }

    /// Gives all units back, as dropping it does.
    pub fn cancel(self) {}
}

impl Drop for Reservation<'_, '_> {
    fn drop(&mut self) {
        if self.settled || !self.limiter.ledger.strike(self.id) {
            return;
        }
        let now = self.limiter.now();
        self.parts.iter().for_each(|part| part.rollback(now, self.limiter.table()));
    }
}
