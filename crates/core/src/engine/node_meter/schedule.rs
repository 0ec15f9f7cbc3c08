//! When the node reports a meter, and how urgently.

use std::cell::Cell;

/// Urgency of a report about a meter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in super::super) enum ReportUrgency {
    /// No report.
    None,
    /// A report that joins an urgent one: a call costs more than its content.
    CanWait,
    /// A report that should not wait.
    Urgent,
}

impl ReportUrgency {
    pub(super) fn urgent_if(is_urgent: bool) -> Self {
        if is_urgent { Self::Urgent } else { Self::None }
    }
}

/// The last call about a meter, and the earliest time of the next report.
#[derive(Debug, Default)]
pub(super) struct ReportSchedule {
    /// When the last call about the meter was sent.
    pub(super) sent_us: u64,
    /// Whether that call is in flight.
    pub(super) is_in_flight: bool,
    /// Until when the node does not read the slot of the meter, by the demand for it: reads of
    /// thousands of slots are slow, because they are spread over memory.
    pub(super) quiet_until_us: Cell<u64>,
}

impl ReportSchedule {
    pub(super) fn begin_call(&mut self, now_us: u64) {
        (self.sent_us, self.is_in_flight) = (now_us, true);
    }

    pub(super) fn end_call(&mut self) {
        self.is_in_flight = false;
        self.quiet_until_us.set(0);
    }

    pub(super) fn is_quiet(&self, now_us: u64) -> bool {
        now_us < self.quiet_until_us.get()
    }
}
