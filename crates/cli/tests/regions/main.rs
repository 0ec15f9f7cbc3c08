//! Several regions of real servers, a Redis in each, and a long way between them.
//!
//! An ordinary run takes less than a minute. With `TIDEGATE_REGION_LONG` set, attacks and cuts last for a minute each and
//! long-run rates, shares and how soon a cut is over are compared as well. Both print what they measured.

#![allow(unreachable_pub, reason = "modules of a test program")]
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../region/field.rs"]
#[allow(dead_code, reason = "the tests of one region use more of it")]
mod field;
#[path = "../support/mod.rs"]
mod support;

mod attack;
mod global;
mod kill;
mod replicator;
mod strict;
mod world;
