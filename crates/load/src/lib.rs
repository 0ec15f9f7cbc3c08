//! A load generator: clients that check keys over a connection each, in a closed or an open loop.
//!
//! A client is a thread. It waits for its turn, sends its requests and waits for their replies. So
//! the time of a reply does not depend on the number of clients that one thread would serve.

mod clients;
mod connection;
mod decision;
mod http;
mod resp;
mod tenants;

pub use clients::{Pace, Turns, now, run_clients, wait_until};
pub use decision::{CheckDecision, CheckResult, CheckTally};
pub use http::{CheckReply, HttpConnection, HttpReply, check_body};
pub use resp::{RespConnection, command, throttle};
pub use tenants::{
    AttackProgress, HostileTenant, TENANTS_CONFIG, TenantAttack, VICTIM_RULES, VictimReport, VictimTenant,
    long_identifier, wildcard,
};
