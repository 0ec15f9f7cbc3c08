//! Rounds, one step after the other, and in every order that a network and crashes can make of
//! them.

mod steps;
mod world;

use tidegate_core::Limit;
use tidegate_core::origin::{
    Component, ComponentTotals, CrossRegionTerms, Lapse, RegionId, RoundReply, Terms,
};

use super::{PEER_TIMEOUT_DEFAULT_US, Rounds, RoundsConfig};

pub(super) fn terms() -> Terms {
    let limit = Limit::gcra(100, std::time::Duration::from_secs(1)).expect("in range");
    let cross_region =
        CrossRegionTerms { publish_threshold: 1, share_amount: 50, share_capacity: 50, debt_max: 1_000 };
    Terms::new(&limit, 0, Lapse::Counted, 1).with_cross_region(cross_region)
}

pub(super) fn component(key: &[u8], charged: u64) -> Component {
    let totals = ComponentTotals::Drained { charged, refunded: 0, level: 0 };
    Component { key: key.into(), terms: terms(), incarnation: 1, totals }
}

pub(super) fn charged(component: &Component) -> u64 {
    component.totals.numbers()[0]
}

pub(super) fn gathered(components: Vec<Component>, upto: u64, more: bool) -> RoundReply {
    RoundReply { components, upto, more, includes_isolated: true, now_us: 0 }
}

pub(super) fn rounds(peers: &[u64], partitions: u16, incarnation: u64) -> Rounds {
    let peers = peers.iter().map(|peer| RegionId(*peer)).collect();
    Rounds::new(&RoundsConfig { peers, partitions, incarnation, peer_timeout_us: PEER_TIMEOUT_DEFAULT_US })
}
