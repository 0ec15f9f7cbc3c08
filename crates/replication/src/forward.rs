//! Questions that another region decides.

use std::pin::Pin;

use siphasher::sip::SipHasher13;
use tidegate_core::origin::RegionId;
use tidegate_core::{LIMITS_PER_REQUEST_MAX, Limit};

/// The most questions that are forwarded as one: no request is under more limits.
pub const FORWARD_CHECKS_MAX: usize = LIMITS_PER_REQUEST_MAX;

/// The one of `regions` that decides for a key, whose spelling is given in parts: its place among them. Every region comes to
/// the same one, and when a region is added or taken away, only keys that it decides for move.
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
    /// Which answer is to this one: no two under way on a connection have the same.
    pub id: u64,
    /// What is to be done.
    pub act: ForwardAction,
    /// With what. Without any, it only says that somebody is there.
    pub checks: Vec<ForwardedCheck>,
}

/// What is to be done with questions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForwardAction {
    /// They are decided as one.
    Decide,
    /// What they cost was spent already.
    Charge,
    /// What they cost is given back, all of it.
    Refund,
    /// What they cost was charged for a request that does not pass in the end, and is given back but for what has drained: by then
    /// others may have used that.
    RollBack {
        /// It was charged then or later, by the clock of whoever reads this: the asker's until it is sent, from then on that of the
        /// process that decides.
        since_us: u64,
    },
}

impl ForwardAction {
    /// Whether it makes room: if it was done twice, more would pass than the limit says.
    #[cfg_attr(not(feature = "net"), expect(dead_code, reason = "only connections tell something again"))]
    pub(crate) const fn gives_back(self) -> bool {
        matches!(self, Self::Refund | Self::RollBack { .. })
    }
}

/// A question, spelled out for a process that has the same tenants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardedCheck {
    /// Whose limit it is.
    pub tenant: String,
    /// What the limit is called.
    pub name: String,
    /// What may pass.
    pub limit: Limit,
    /// How far it may be passed, in millionths of its burst.
    pub tolerance_ppm: u32,
    /// Of two versions of a limit the higher holds.
    pub version: u32,
    /// Who is limited.
    pub key: Box<[u8]>,
    /// Where the meter is kept, if not where the key says.
    pub placement: Option<Box<[u8]>>,
    /// What is asked for.
    pub cost: u64,
}

/// What became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardReply {
    /// What it answers.
    pub id: u64,
    /// What was decided; nothing if nobody could.
    pub decision: Option<ForwardDecision>,
}

/// What was decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardDecision {
    /// What is left under each limit, in the order of the questions.
    pub remaining: Vec<u32>,
    /// Which of the limits denied, if one did, and when the request would pass, µs from now.
    pub denied: Option<(u16, u64)>,
}

/// Decides what other regions forward.
pub trait ForwardHandler: Send + Sync {
    /// What becomes of it.
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
            assert_eq!(owner, owner_of(&names, &[b"lim", b"it:", &key]), "however it is spelled");
            counts[owner] += 1;
            let without: Vec<RegionId> =
                (0..3).filter(|at| *at != (owner + 1) % 3).map(|at| names[at]).collect();
            assert_eq!(
                without[owner_of(&without, &[b"limit:", &key])],
                names[owner],
                "another one went away"
            );
        }
        assert!(counts.iter().all(|count| (900..1_100).contains(count)), "{counts:?}");
    }
}
