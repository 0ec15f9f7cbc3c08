//! The state of a connection between requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use tidegate_rules::Class;

use super::pending::PendingReply;
use super::reply::Protocol;
use super::request::Trust;
use super::throttle::Gates;
use crate::auth::{Principal, TenantIndex, TokenHash};
use crate::metrics::Surface;
use crate::pipeline::{RequestContext, Tally};
use crate::shared::Shared;

/// Longest name of a client, in bytes. It is stored as long as the connection lasts.
const NAME_BYTES_MAX: usize = 128;

/// The user that Redis has before any other.
const DEFAULT_USER: &[u8] = b"default";

/// The class of all checks of Redis clients, because a request does not state one.
const CLASS: Class = Class::Comfort;

/// Returns the context of a check of a Redis client.
pub(super) fn context(shared: &Shared, tenant: TenantIndex) -> RequestContext<'_> {
    RequestContext { shared, tenant, surface: Surface::Resp, class: CLASS }
}

/// The state of a connection between requests.
#[derive(Debug)]
pub(super) struct ClientState {
    pub(super) shared: Arc<Shared>,
    /// Number of the connection, unique in the process.
    pub(super) id: i64,
    pub(super) name: Vec<u8>,
    pub(super) protocol: Protocol,
    /// The principal, once the client is authenticated.
    pub(super) principal: Option<Principal>,
    /// The token behind the principal.
    shown: ShownToken,
    pub(super) gates: Gates,
    /// Decisions that are not counted in the metrics yet.
    pub(super) tally: Tally,
    /// Replies that wait for the origin, in order.
    pub(super) waiting: Vec<PendingReply>,
}

impl ClientState {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        static NEXT_ID: AtomicI64 = AtomicI64::new(1);
        let generation = shared.credentials.generation();
        let principal = shared.credentials.principal(None);
        Self {
            shared,
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            name: Vec::new(),
            protocol: Protocol::default(),
            principal,
            shown: ShownToken { generation, ..ShownToken::default() },
            gates: Gates::default(),
            tally: Tally::default(),
            waiting: Vec::new(),
        }
    }

    /// Counts the decisions since the last call in the metrics, and returns their number.
    pub(super) fn flush_tally(&mut self) -> u64 {
        self.tally.flush(&self.shared.telemetry.metrics, Surface::Resp, CLASS)
    }

    pub(super) fn trust(&self) -> Trust {
        if self.principal.is_some() { Trust::Known } else { Trust::Stranger }
    }

    /// Authenticates by `token`, and returns whether it is known. The user name has no meaning
    /// beside the token, but an open server has one user only.
    pub(super) fn authenticate(&mut self, user: &[u8], token: &[u8]) -> bool {
        let is_open = self.shared.credentials.load().is_open();
        if is_open && user != DEFAULT_USER {
            return false;
        }
        let shown = ShownToken { token: (!is_open).then(|| TokenHash::of(token)), ..ShownToken::default() };
        let is_known = shown.holder(&self.shared).is_some();
        if is_known {
            self.become_holder(shown);
        }
        is_known
    }

    /// Checks the token again if the credentials have changed or the token has expired. The
    /// principal is valid only as long as its token.
    pub(super) fn look_again(&mut self) {
        let has_ended = self.shown.expires_ms.is_some_and(|at_ms| at_ms <= self.shared.now_ms());
        if has_ended || self.shown.generation != self.shared.credentials.generation() {
            self.become_holder(ShownToken { token: self.shown.token, ..ShownToken::default() });
        }
    }

    fn become_holder(&mut self, shown: ShownToken) {
        // Read before the credentials, so that a change in between is noticed the next time.
        let generation = self.shared.credentials.generation();
        let (principal, expires_ms) = shown.holder(&self.shared).unzip();
        if self.principal != principal {
            self.gates.clear();
        }
        self.principal = principal;
        self.shown = ShownToken { generation, expires_ms: expires_ms.flatten(), ..shown };
    }

    /// Becomes as new.
    pub(super) fn reset(&mut self) {
        self.name = Vec::new();
        self.protocol = Protocol::default();
        self.become_holder(ShownToken::default());
        self.gates.clear();
    }

    /// Sets the name, or returns the reason why it is invalid.
    pub(super) fn set_name(&mut self, name: &[u8]) -> Result<(), String> {
        check_name(name)?;
        name.clone_into(&mut self.name);
        Ok(())
    }
}

/// The token that a client presented.
#[derive(Clone, Copy, Debug, Default)]
struct ShownToken {
    /// `None` if the client presented no token.
    token: Option<TokenHash>,
    /// When the token ends, if it does.
    expires_ms: Option<u64>,
    /// Of the tokens there were when it was last looked at.
    generation: u64,
}

impl ShownToken {
    /// Returns the present principal of the token, and its expiry.
    fn holder(&self, shared: &Shared) -> Option<(Principal, Option<u64>)> {
        let found = shared.credentials.load().holder(self.token.as_ref())?;
        let lasts = found.1.is_none_or(|expires_ms| shared.now_ms() < expires_ms);
        lasts.then_some(found)
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
