//! How it stands with the other regions.

use ::http::StatusCode;
use serde_json::{Value, json};
use tidegate::region::{PeerStatus, Region};

use super::Answered;
use crate::http::{Asked, json};

/// `GET /v1/regions`: what this server knows of the others. Only the courier of the region knows how well they are heard;
/// how late they hear of this one it tells the others.
#[expect(clippy::unnecessary_wraps, reason = "answers of all routes are of one type")]
pub(super) fn list(asked: &Asked<'_>) -> Answered {
    let status = asked.shared.decider.region.as_ref().and_then(Region::abroad);
    let told = status.map(|status| {
        json!({
            "courier": status.is_courier,
            "whole": status.is_courier.then_some(status.is_whole),
            "silence_ms": status.silence_us.map(ms),
            "lag_ms": status.lag_us.map(ms),
            "rounds": status.rounds,
            "whole_since_round": status.whole_since,
            "strangers": status.strangers,
            "origin_failures": status.origin_failures,
            "oversized": status.oversized,
            "peers": status.peers.iter().map(peer).collect::<Vec<_>>(),
        })
    });
    Ok(json(StatusCode::OK, &json!({ "abroad": told })))
}

fn peer(peer: &PeerStatus) -> Value {
    let PeerStatus { region, is_connected, lag_us, silence_us, agrees, counts } = peer;
    json!({
        "region": region,
        "connected": is_connected,
        "lag_ms": lag_us.map(ms),
        "silence_ms": silence_us.map(ms),
        "agrees": agrees,
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
