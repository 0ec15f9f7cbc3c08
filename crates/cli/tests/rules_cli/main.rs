//! Rules of a store, changed by several people with the command line.

#![allow(clippy::expect_used, clippy::panic, reason = "a helper of tests may panic as a test may")]
#![allow(unreachable_pub, reason = "what test programs share is public in each of them")]

#[path = "../support/mod.rs"]
mod support;

mod audit;
mod changes;
mod desk;
mod emergencies;
mod guardrails;
mod rows;
