//! State of the peer regions.

use ::http::StatusCode;
use serde_json::{Value, json};
use tidegate::region::{PeerStatus, Region};

use super::AdminResult;
use crate::http::{HttpRequest, json};

/// `GET /v1/regions`: returns this server's knowledge of the peer regions. Only the replicator
/// knows the last-heard ages. It shares the lag with the other nodes of the region.
#[expect(clippy::unnecessary_wraps, reason = "answers of all routes are of one type")]
pub(super) fn list(req: &HttpRequest<'_>) -> AdminResult {
    let status = req.shared.decider.region.as_ref().and_then(Region::replication_status);
    let body = status.map(|status| {
        json!({
            "replicator": status.is_replicator,
            "connected": status.is_replicator.then_some(status.is_connected),
            "last_heard_age_ms": status.last_heard_age_us.map(ms),
            "lag_ms": status.lag_us.map(ms),
            "rounds": status.rounds,
            "connected_since_round": status.connected_since_round,
            "unknown_connections": status.strangers,
            "origin_failures": status.origin_failures,
            "oversized": status.oversized,
            "peers": status.peers.iter().map(peer).collect::<Vec<_>>(),
        })
    });
    Ok(json(StatusCode::OK, &json!({ "replication": body })))
}

fn peer(peer: &PeerStatus) -> Value {
    let PeerStatus { region, has_link, lag_us, last_heard_age_us, agrees, counts } = peer;
    json!({
        "region": region,
        "linked": has_link,
        "lag_ms": lag_us.map(ms),
        "last_heard_age_ms": last_heard_age_us.map(ms),
        "settings_match": agrees,
        "bytes_sent": counts.bytes_sent,
        "bytes_received": counts.bytes_received,
        "batches_sent": counts.batches_sent,
        "batches_received": counts.batches_received,
        "refused": counts.refused,
    })
}

fn ms(us: u64) -> u64 {
    us / 1_000
}
