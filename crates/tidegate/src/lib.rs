//! Tidegate in your process: a rate limiter that decides from memory, exactly, in nanoseconds.
//!
//! A [`Limiter`] holds named limits and a table of meters in a fixed amount of memory. A [`Gate`]
//! is the handle of one limit; make checks on keys through it. The limiter needs no runtime, no
//! server and no background thread.
//!
//! ```
//! use std::time::Duration;
//! use tidegate::{Limit, Limiter};
//!
//! let limiter = Limiter::builder().limit("logins", Limit::gcra(5, Duration::from_secs(60))?).build()?;
//! let logins = limiter.gate("logins")?;
//!
//! for _ in 0..5 {
//!     assert!(limiter.check(logins.key("alice")).is_allowed());
//! }
//! let sixth = limiter.check(logins.key("alice"));
//! assert!(!sixth.is_allowed());
//! assert!(sixth.retry_after() <= Some(Duration::from_secs(12)));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Time is injected: see [`Clock`]. Memory is fixed: see [`Builder::memory_bytes`].
//!
//! # Features
//!
//! All features are off by default.
//!
//! - `http`: the module `headers` turns a [`Decision`] into `RateLimit`, `X-RateLimit-*` and
//!   `Retry-After` header fields, and into the body of a 429.
//! - `tower`: the module `layer` limits any tower service of HTTP requests, such as an axum router.
//!   Enables `http`.

mod clock;
mod decision;
mod gate;
#[cfg(feature = "http")]
pub mod headers;
#[cfg(feature = "tower")]
pub mod layer;
mod limiter;
#[cfg(feature = "region")]
pub mod region;
mod reservation;

pub use clock::{Clock, ManualClock, SystemClock};
pub use decision::{Decision, LIMITS_INLINE_MAX, LIMITS_PER_CHECK_MAX, Outcome};
pub use gate::{Check, Gate};
pub use limiter::{BuildError, Builder, Limiter, MEMORY_BYTES_DEFAULT, UnknownName};
pub use reservation::{RESERVATION_US_MAX, RESERVATIONS_MAX, Reservation, ReserveError, ReserveOutcome};
pub use tidegate_core::{
    Algorithm, DRAIN_US_MAX, DecidingMeter, Limit, LimitError, Now, PERIOD_US_MAX, Retry, Secret, ShareStats,
    TableError, TooManyLimits, Verdict,
};
