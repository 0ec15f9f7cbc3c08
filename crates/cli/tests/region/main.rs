//! Regions of real servers with a real Redis, and faults between them.
//!
//! An ordinary run takes a minute or two. With `TIDEGATE_REGION_LONG` set, faults last longer and
//! occur more often. With `TIDEGATE_REGION_REWRITE`, the test writes the table in
//! `docs/failures.md` instead of comparing it. `tidegate-bench region` measures times.

#![allow(unreachable_pub, reason = "modules of a test program")]
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../support/mod.rs"]
mod support;

mod changes;
mod client;
mod commands;
mod conservation;
mod crossing;
mod load;
mod matrix;
mod meters;
mod status;
