//! Servers with a rule store, and failures between them.

#![allow(unreachable_pub, reason = "modules of a test program")]
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../support/mod.rs"]
mod support;

mod audit;
mod block;
mod credentials;
#[cfg(target_os = "linux")]
mod disk;
mod fixture;
mod outage;
mod overrides;
mod poison;
mod propagation;
mod rollback;
