//! The calls of one connection: how many are open, and since when none is.

use std::cell::Cell;
use std::ops::Deref;
use std::rc::Rc;
use std::time::Duration;

use tokio::time::sleep_until;

use crate::guard::from_now;
use crate::load::{pulse, pulses, time_of};
use crate::worker::Context;

/// A connection, as its calls see it.
pub(super) struct Connection {
    context: Context,
    open: Cell<usize>,
    /// The pulse at which the last call ended, or the connection began.
    quiet_since: Cell<u32>,
}

impl Connection {
    pub(super) fn new(context: Context) -> Self {
        Self { context, open: Cell::new(0), quiet_since: Cell::new(pulse()) }
    }

    /// Comes back when no call has been open for so long. It looks now and then: it may come late by as much again.
    pub(super) async fn quiet_for(&self, time: Duration) {
        let wanted = pulses(time);
        loop {
            let quiet = if self.open.get() > 0 { 0 } else { pulse().wrapping_sub(self.quiet_since.get()) };
            let Some(missing @ 1..) = wanted.checked_sub(quiet) else { return };
            sleep_until(from_now(time_of(missing))).await;
        }
    }
}

/// A call of a connection, open until its answer is taken or nobody waits for it any more.
pub(super) struct Call(Rc<Connection>);

impl Call {
    pub(super) fn begin(connection: &Rc<Connection>) -> Self {
        connection.open.set(connection.open.get() + 1);
        Self(Rc::clone(connection))
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.0.open.set(self.0.open.get() - 1);
        self.0.quiet_since.set(pulse());
    }
}

impl Deref for Call {
    type Target = Context;

    fn deref(&self) -> &Context {
        &self.0.context
    }
}
