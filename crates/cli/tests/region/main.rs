//! Regions of real servers, a real Redis, and what goes wrong between them.
//!
//! An ordinary run takes a minute or two. With `TIDEGATE_REGION_LONG` set, faults last longer and come more often; with
//! `TIDEGATE_REGION_REWRITE`, the table in `docs/failures.md` is written instead of compared. How long things take is measured
//! by `tidegate-bench region`.

#![allow(unreachable_pub, reason = "modules of a test program")]
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../support/mod.rs"]
mod support;

mod changes;
mod commands;
mod conservation;
mod crossing;
mod field;
mod load;
mod matrix;
mod meters;
