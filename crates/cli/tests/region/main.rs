//! Regions of real servers, a real Redis, and what goes wrong between them.
//!
//! An ordinary run takes a minute or two. `TIDEGATE_REGION_LONG` stops stores for longer; `TIDEGATE_REGION_FIGURES` runs what
//! prints figures and is of no use on a machine that does something else meanwhile.

#![allow(unreachable_pub, reason = "modules of a test program")]
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../support/mod.rs"]
mod support;

mod commands;
mod conservation;
mod crossing;
mod field;
mod load;
mod meters;
