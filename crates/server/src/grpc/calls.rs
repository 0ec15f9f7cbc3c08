//! The open calls of one connection, and the time since it has none.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ops::Deref;
use std::rc::Rc;

use tokio::time::sleep_until;

use crate::auth::TenantIndex;
use crate::guard::{ClientTimeouts, ConnectionState, from_now};
use crate::load::{pulse, pulses, time_of};
use crate::request_memory::PartialRequest;
use crate::worker::Context;

/// A connection, as its calls see it.
pub(super) struct Connection {
    state: Rc<ConnectionState>,
    context: Context,
    /// Open calls, the oldest first.
    begun: RefCell<VecDeque<CallStart>>,
    /// Open calls that may be open for as long as they like.
    lasting: Cell<usize>,
    /// The pulse at which the last call ended, or the connection began.
    quiet_since: Cell<u32>,
}

/// The calls that began at one pulse.
struct CallStart {
    pulse: u32,
    /// How many of them are open.
    open: usize,
}

/// Why a connection should end.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum CloseReason {
    /// The connection had no call for too long.
    Quiet,
    /// The client did not read the response to a call.
    Stuck,
}

impl Connection {
    pub(super) fn new(state: Rc<ConnectionState>, context: Context) -> Self {
        let quiet_since = Cell::new(pulse());
        Self { state, context, begun: RefCell::default(), lasting: Cell::new(0), quiet_since }
    }

    /// Returns when the connection should close. It checks at intervals, so it may return up to one
    /// timeout late.
    pub(super) async fn over(&self, patience: ClientTimeouts) -> CloseReason {
        // A message may take the request timeout to arrive, and its response as long again.
        let (idle, call) = (pulses(patience.idle), 2 * pulses(patience.request));
        loop {
            let missing = match (self.oldest(), self.lasting.get()) {
                (Some(begun), _) => match call.checked_sub(pulse().wrapping_sub(begun)) {
                    Some(missing @ 1..) => missing,
                    _ => return CloseReason::Stuck,
                },
                (None, 1..) => idle,
                (None, 0) => match idle.checked_sub(pulse().wrapping_sub(self.quiet_since.get())) {
                    Some(missing @ 1..) => missing,
                    _ => return CloseReason::Quiet,
                },
            };
            // Calls that begin meanwhile have to be looked at in time, too.
            sleep_until(from_now(time_of(missing.min(call)))).await;
        }
    }

    /// When the oldest open call began.
    fn oldest(&self) -> Option<u32> {
        self.begun.borrow().front().map(|begun| begun.pulse)
    }

    fn begin(&self) -> u32 {
        let now = pulse();
        self.state.slot.set_busy();
        let mut begun = self.begun.borrow_mut();
        match begun.back_mut() {
            Some(last) if last.pulse == now => last.open += 1,
            _ => begun.push_back(CallStart { pulse: now, open: 1 }),
        }
        now
    }

    fn end(&self, pulse: u32) {
        let mut begun = self.begun.borrow_mut();
        // Nearly always among the last.
        if let Some(with_it) = begun.iter_mut().rev().find(|begun| begun.pulse == pulse) {
            with_it.open -= 1;
        }
        while begun.front().is_some_and(|oldest| oldest.open == 0) {
            begun.pop_front();
        }
    }
}

/// A call of a connection. It is open until the client has read the response or cancelled the call.
pub(super) struct Call {
    connection: Rc<Connection>,
    /// The pulse at which it began; `None` if it has no timeout.
    began: Option<u32>,
}

impl Call {
    /// Begins a call with a timeout.
    pub(super) fn begin(connection: Rc<Connection>) -> Self {
        let began = Some(connection.begin());
        Self { connection, began }
    }

    /// Returns the account of a message that arrives in part. The address pays until a tenant does.
    pub(super) fn partial(&self) -> PartialRequest {
        self.connection.state.partial.of_same_address()
    }

    /// Sets the tenant that pays for the worker's time.
    pub(super) fn charge_to(&self, tenant: TenantIndex) {
        self.connection.state.tenant.set(Some(tenant));
    }

    /// Removes the timeout of a call that streams updates.
    pub(super) fn lasting(mut self) -> Self {
        if let Some(began) = self.began.take() {
            self.connection.end(began);
            self.connection.lasting.set(self.connection.lasting.get() + 1);
        }
        self
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let connection = &self.connection;
        match self.began {
            Some(began) => connection.end(began),
            None => connection.lasting.set(connection.lasting.get() - 1),
        }
        let now = pulse();
        connection.quiet_since.set(now);
        if connection.oldest().is_none() && connection.lasting.get() == 0 {
            connection.state.slot.set_idle(now);
        }
    }
}

impl Deref for Call {
    type Target = Context;

    fn deref(&self) -> &Context {
        &self.connection.context
    }
}
