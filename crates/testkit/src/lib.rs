//! Shared parts of tests with real processes: programs on free ports that are stopped by id, stores
//! and networks that can be made to fail, and conditions with deadlines.
//!
//! No function here returns an error. If the environment of a test does not start, the test panics
//! with the reason.

#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::missing_panics_doc,
    reason = "a test helper fails by panicking"
)]

mod bucket;
#[cfg(target_os = "linux")]
mod disk;
mod fleet;
mod listener;
mod postgres;
mod process;
mod proxy;
mod redis;
mod regions;
mod server;
mod wait;

pub use bucket::ObjectStore;
#[cfg(target_os = "linux")]
pub use disk::{ALWAYS, DiskFault, FaultLibrary, FaultSwitch};
pub use fleet::ServerFleet;
pub use listener::{HttpListener, ReceivedRequest, Reply};
pub use postgres::Postgres;
pub use process::{Process, Signal};
pub use proxy::{Proxy, Traffic};
pub use redis::{APPEND_ONLY, Cluster, Redis, SNAPSHOTS, TlsRedis, ask};
pub use regions::{REGIONS, Region, Regions};
pub use server::{Server, tidegate};
pub use wait::{START_TIME_MAX, free_port, wait_for_port, wait_until};
