//! Questions that another region decides.

use std::pin::Pin;

use siphasher::sip::SipHasher13;
use tidegate_core::origin::RegionId;
use tidegate_core::{LIMITS_PER_REQUEST_MAX, Limit};

/// The most questions that are forwarded as one: no request is under more limits.
pub const FORWARD_CHECKS_MAX: usize = LIMITS_PER_REQUEST_MAX;

/// Returns the index in `regions` of the owner region of a key, which is given in parts. Every
/// region computes the same owner. If a region is added or removed, only the keys that it owns
/// move.
pub fn owner_of(regions: &[RegionId], key: &[&[u8]]) -> usize {
    let weight = |region: &RegionId| {
        let mut hasher = SipHasher13::new_with_keys(region.0, 0);
        for part in key {
            std::hash::Hasher::write(&mut hasher, part);
        }
        std::hash::Hasher::finish(&hasher)
    };
    let owner = regions.iter().enumerate().max_by_key(|(_, region)| (weight(region), region.0));
    owner.map_or(0, |(place, _)| place)
}

/// Questions of one request for the region that decides for their keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardRequest {
    /// Number that matches the reply to this request. It is unique among the requests in flight on
    /// a connection.
    pub id: u64,
    /// Operation to apply to the checks.
    pub act: ForwardAction,
    /// The checks. An empty list is a heartbeat.
    pub checks: Vec<ForwardedCheck>,
}

/// Operation of the owner region on forwarded checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForwardAction {
    /// They are decided as one.
    Decide,
    /// Charge the cost, which is already spent.
    Charge,
    /// Refund the full cost.
    Refund,
    /// Refund the charge of a request that was denied in the end, less the part that has drained.
    /// Other requests may have used the drained part.
    RollBack {
        /// Earliest possible time of the charge, µs. It is on the sender's clock until the request
        /// is sent, then on the clock of the node that decides.
        since_us: u64,
    },
}

impl ForwardAction {
    /// Whether the action frees units. Applied twice, it would admit more than the limit.
    #[cfg_attr(
        not(feature = "net"),
        expect(dead_code, reason = "only network connections send a delivery again")
    )]
    pub(crate) const fn gives_back(self) -> bool {
        matches!(self, Self::Refund | Self::RollBack { .. })
    }
}

/// A question, spelled out for a process that has the same tenants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardedCheck {
    /// Tenant that the limit belongs to.
    pub tenant: String,
    /// Name of the limit.
    pub name: String,
    /// The limit itself.
    pub limit: Limit,
    /// How far it may be passed, in millionths of its burst.
    pub tolerance_ppm: u32,
    /// Of two versions of a limit the higher holds.
    pub version: u32,
    /// The limited key.
    pub key: Box<[u8]>,
    /// Placement of the meter. `None`: the key determines it.
    pub placement: Option<Box<[u8]>>,
    /// Units that the request costs.
    pub cost: u64,
}

/// The reply to a `ForwardRequest`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardReply {
    /// `id` of the request.
    pub id: u64,
    /// The decision. `None` if the owner region could not decide.
    pub decision: Option<ForwardDecision>,
}

/// The decision on forwarded checks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardDecision {
    /// Units left under each limit, in the order of the checks.
    pub remaining: Vec<u32>,
    /// The limit that denied, if one did, and the time until the request would pass, µs.
    pub denied: Option<(u16, u64)>,
}

/// Decides the checks that other regions forward.
pub trait ForwardHandler: Send + Sync {
    /// Applies a request and returns its reply.
    fn answer(&self, forward: ForwardRequest) -> Pin<Box<dyn Future<Output = ForwardReply> + Send + '_>>;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region_id;

    #[test]
    fn every_region_has_its_share_of_keys_and_keys_stay_where_they_are() {
        let names = ["ap", "eu", "us"].map(region_id);
        let mut counts = [0; 3];
        for number in 0..3_000_u32 {
            let key = number.to_be_bytes();
            let owner = owner_of(&names, &[b"limit:", &key]);
            assert_eq!(
                owner,
                owner_of(&names, &[b"lim", b"it:", &key]),
                "the owner is independent of the split into parts"
            );
            counts[owner] += 1;
            let without: Vec<RegionId> =
                (0..3).filter(|at| *at != (owner + 1) % 3).map(|at| names[at]).collect();
            assert_eq!(
                without[owner_of(&without, &[b"limit:", &key])],
                names[owner],
                "keys keep their owner when another region is removed"
            );
        }
        assert!(counts.iter().all(|count| (900..1_100).contains(count)), "{counts:?}");
    }
}
