//! The pure core of Tidegate: limits, decision arithmetic, and the meter table.
//!
//! The crate reads no clock, opens no socket and draws no random number: time is an argument
//! ([`Now`]), secrets are given ([`Secret`]), and every answer is a value ([`Verdict`]).
//!
//! ```
//! use std::time::Duration;
//! use tidegate_core::{Check, KeySpace, Limit, Now, Secret, Shares, Table, Verdict};
//!
//! let table = Table::new(1 << 20, &Shares::single())?;
//! let limit = Limit::gcra(2, Duration::from_secs(1))?;
//! let space = KeySpace::new(&Secret::from_bytes([7; 16]), Shares::FIRST, "per_user");
//!
//! let now = Now::from_micros(0, 0);
//! let ask = Check { limit: &limit, space: &space, digest: space.digest(&[b"alice"]), cost: 1 };
//! assert!(table.check(now, &ask).verdict.is_allowed());
//! assert!(table.check(now, &ask).verdict.is_allowed());
//! assert!(!table.check(now, &ask).verdict.is_allowed());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![allow(
    clippy::cast_possible_truncation,
    reason = "packed fields were range-checked when they were created"
)]
#![allow(clippy::inline_always, reason = "the request path is inlined: a call costs more than it saves")]

pub mod bound;
pub mod engine;
pub mod gcra;
pub mod origin;
pub mod window;

mod backoff;
mod class;
mod digest;
mod fallback;
mod grant;
mod limit;
mod meter;
mod minifloat;
mod regime;
mod remote_clock;
mod sip;
mod sync;
mod table;
mod time;
mod verdict;

pub use backoff::{Backoff, with_jitter};
pub use class::Class;
pub use digest::{Digest, KeySpace, Secret};
pub use fallback::{DecisionSource, FallbackState, NodeShare};
pub use grant::{GrantUpdate, HOLD_US_MAX, UsageReport};
pub use limit::{Algorithm, DRAIN_US_MAX, Limit, LimitError, PERIOD_US_MAX};
pub use meter::Meter;
pub use regime::Regime;
pub use remote_clock::{CLOCK_DRIFT_DIVISOR, RemoteClock, longest_us, shortest_us};
pub use table::{
    BYTES_PER_LINE, Check, CheckOutcome, DecidingMeter, Home, LIMITS_PER_REQUEST_MAX, RequestVerdict,
    SLOTS_PER_LINE, ShareId, ShareStats, Shares, Table, TableError, TooManyLimits,
};
pub use time::{Now, Timeline};
pub use verdict::{Retry, Verdict};
