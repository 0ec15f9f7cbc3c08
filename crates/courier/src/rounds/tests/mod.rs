//! Rounds, one step after the other, and in every order that a network and crashes can make of them.

mod steps;
mod world;

use tidegate_core::Limit;
use tidegate_core::origin::{Abroad, Component, Gathered, Lapse, RegionId, Sums, Terms};

use super::{Rounds, RoundsConfig, SILENCE_MAX_US};

pub(super) fn terms() -> Terms {
    let limit = Limit::gcra(100, std::time::Duration::from_secs(1)).expect("in range");
    let abroad = Abroad { hide: 1, part_amount: 50, part_capacity: 50, debt_max: 1_000 };
    Terms::new(&limit, 0, Lapse::Counted, 1).with_abroad(abroad)
}

pub(super) fn component(key: &[u8], charged: u64) -> Component {
    let sums = Sums::Drained { charged, refunded: 0, level: 0 };
    Component { key: key.into(), terms: terms(), incarnation: 1, sums }
}

pub(super) fn charged(component: &Component) -> u64 {
    component.sums.numbers()[0]
}

pub(super) fn gathered(components: Vec<Component>, upto: u64, more: bool) -> Gathered {
    Gathered { components, upto, more, joined: true, now_us: 0 }
}

pub(super) fn rounds(peers: &[u64], partitions: u16, incarnation: u64) -> Rounds {
    let peers = peers.iter().map(|peer| RegionId(*peer)).collect();
    Rounds::new(&RoundsConfig { peers, partitions, incarnation, silence_max_us: SILENCE_MAX_US })
}
