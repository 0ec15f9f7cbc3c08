//! What a connection remembers between requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use tidegate_rules::Class;

use super::reply::Protocol;
use super::request::Trust;
use super::throttle::Gates;
use super::waiting::Waiting;
use crate::auth::Principal;
use crate::metrics::{Metrics, Outcome, Rung, Surface};
use crate::shared::Shared;

/// The longest name a client may give itself: it is kept for as long as the connection.
const NAME_BYTES_MAX: usize = 128;

/// The user that Redis has before any other.
const DEFAULT_USER: &[u8] = b"default";

/// What a connection remembers between requests.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) shared: Arc<Shared>,
    /// Tells the connections of a process apart.
    pub(super) id: i64,
    pub(super) name: Vec<u8>,
    pub(super) protocol: Protocol,
    /// Who asks, once that is known.
    pub(super) principal: Option<Principal>,
    pub(super) gates: Gates,
    /// What was decided and not counted yet.
    pub(super) tally: Tally,
    /// What only the origin can decide, in the order of the answers.
    pub(super) waiting: Vec<Waiting>,
}

impl Session {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        static NEXT_ID: AtomicI64 = AtomicI64::new(1);
        let principal = shared.principal(None);
        Self {
            shared,
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            name: Vec::new(),
            protocol: Protocol::default(),
            principal,
            gates: Gates::default(),
            tally: Tally::default(),
            waiting: Vec::new(),
        }
    }

    pub(super) fn trust(&self) -> Trust {
        if self.principal.is_some() { Trust::Known } else { Trust::Stranger }
    }

    /// Becomes whoever holds `token`; whether anybody does. A user's name says nothing that the token does not, but on
    /// an open server there is one user only.
    pub(super) fn authenticate(&mut self, user: &[u8], token: &[u8]) -> bool {
        let is_open = self.shared.credentials.load().is_open();
        let principal =
            if is_open && user != DEFAULT_USER { None } else { self.shared.principal(Some(token)) };
        if principal.is_some() {
            self.principal = principal;
            self.gates.clear();
        }
        principal.is_some()
    }

    /// Becomes as new.
    pub(super) fn reset(&mut self) {
        self.name = Vec::new();
        self.protocol = Protocol::default();
        self.principal = self.shared.principal(None);
        self.gates.clear();
    }

    /// Takes a name, or says why not.
    pub(super) fn set_name(&mut self, name: &[u8]) -> Result<(), String> {
        check_name(name)?;
        name.clone_into(&mut self.name);
        Ok(())
    }
}

/// Whether a client may be called so.
pub(super) fn check_name(name: &[u8]) -> Result<(), String> {
    if !name.iter().all(u8::is_ascii_graphic) {
        return Err("ERR Client names cannot contain spaces, newlines or special characters.".to_owned());
    }
    if name.len() > NAME_BYTES_MAX {
        return Err(format!("ERR client name: {} bytes is outside 0 to {NAME_BYTES_MAX}", name.len()));
    }
    Ok(())
}

/// Decisions that are counted together, once for each batch.
#[derive(Debug, Default)]
pub(super) struct Tally {
    allowed: [u64; Rung::ALL.len()],
    denied: [u64; Rung::ALL.len()],
}

impl Tally {
    #[inline]
    pub(super) fn count(&mut self, allowed: bool, rung: Rung) {
        let counts = if allowed { &mut self.allowed } else { &mut self.denied };
        counts[rung as usize] += 1;
    }

    /// Counts a question that nobody had the time to decide, and that passed.
    pub(super) fn shed(&mut self) {
        self.allowed[Rung::Shed as usize] += 1;
    }

    /// Hands the counts on; how many there were.
    pub(super) fn flush(&mut self, metrics: &Metrics) -> u64 {
        let counts = std::mem::take(self);
        let mut total = 0;
        for (outcome, counts) in [(Outcome::Allowed, counts.allowed), (Outcome::Denied, counts.denied)] {
            for (rung, n) in Rung::ALL.iter().zip(counts) {
                if n > 0 {
                    metrics.decided(Surface::Resp, Class::Comfort, outcome, *rung, n);
                    total += n;
                }
            }
        }
        total
    }
}
