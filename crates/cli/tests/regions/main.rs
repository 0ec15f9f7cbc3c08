//! Several distant regions of real servers, with a Redis in each.
//!
//! An ordinary run takes less than a minute. With `TIDEGATE_REGION_LONG` set, attacks and cuts last
//! a minute each. The tests then also compare long-run rates, shares and the time to recover from a
//! cut. Both print their measurements.

#![allow(unreachable_pub, reason = "modules of a test program")]
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../region/client.rs"]
#[allow(dead_code, reason = "the tests of one region use more of it")]
mod client;
#[path = "../support/mod.rs"]
mod support;

mod attack;
mod global;
mod kill;
mod replicator;
mod strict;
mod world;
