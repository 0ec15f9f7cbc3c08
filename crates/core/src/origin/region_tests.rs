//! Tests of origins that count the same limit in several regions.

use std::time::Duration;

use proptest::prelude::*;

use super::{
    CONNECTED_US_MAX, Call, Charge, CheckGroup, CheckReply, Component, ComponentTotals, CrossRegionTerms,
    DIRTY_RETENTION_US, Lapse, MergeReply, MergeRequest, MeterReply, MeterUpdate, NodeId, OriginMeter,
    Partition, RegionId, RoundReply, RoundRequest, StoreId, Terms, share_of,
};
use crate::limit::Limit;

const SECOND: u64 = 1_000_000;
const START: u64 = 1_000_000 * SECOND;
const KEY: &[u8] = b"key";

/// The round of a replicator that has received all usage of its peers.
fn round(connected_for_us: u64, clock_us: u64) -> RoundRequest {
    RoundRequest { connected_for_us, settled: true, clock_us, trim: 0, after: 0, most: 1 }
}

/// A region that one node calls.
struct Region {
    partition: Partition,
    terms: Terms,
    sequence: u64,
    store: StoreId,
}

impl Region {
    fn new(terms: Terms) -> Self {
        let store = StoreId { lineage: 1, boot: 1, parent: 0, up_us: 0 };
        Self { partition: Partition::default(), terms, sequence: 0, store }
    }

    /// A connected region.
    fn whole(terms: Terms, now: u64) -> Self {
        let mut region = Self::new(terms);
        region.hear(now, CONNECTED_US_MAX);
        region
    }

    fn round(&mut self, now: u64, round: &RoundRequest) -> RoundReply {
        self.partition.round(now, self.store, round)
    }

    /// All peers are heard, and their isolated usage has arrived.
    fn hear(&mut self, now: u64, connected_for_us: u64) {
        self.round(now, &round(connected_for_us, now));
    }

    /// All peers are heard.
    fn hear_of(&mut self, now: u64, connected_for_us: u64) {
        self.round(now, &RoundRequest { settled: false, ..round(connected_for_us, now) });
    }

    fn apply_call(
        &mut self,
        now: u64,
        change: impl FnOnce(&mut MeterUpdate),
        count: u32,
    ) -> (MeterReply, CheckReply) {
        self.sequence += 1;
        let mut update =
            MeterUpdate { life_us: SECOND, cell: now / SECOND, ..MeterUpdate::new(KEY, self.terms) };
        change(&mut update);
        let call = Call {
            node: NodeId(1),
            sequence: self.sequence,
            acknowledged: self.sequence - 1,
            known_us: 0,
            store: self.store,
            updates: vec![update],
            checks: vec![CheckGroup { charges: vec![Charge { meter: 0, cost: 1 }], count }],
        };
        let reply = self.partition.apply(now, &call).expect("in order");
        (reply.meters[0], reply.checks[0])
    }

    fn ask(&mut self, now: u64, count: u32) -> u32 {
        self.apply_call(now, |_| {}, count).1.passed
    }

    fn gather(&mut self, now: u64) -> Vec<Component> {
        let round = RoundRequest { most: 256, ..round(0, now) };
        self.round(now, &round).components
    }

    fn merge(&mut self, now: u64, from: u64, components: Vec<Component>) -> MergeReply {
        self.partition.merge(now, &MergeRequest { from: RegionId(from), components }).expect("makes sense")
    }

    fn meter(&self) -> &OriginMeter {
        self.partition.meter(KEY).expect("known")
    }
}

fn limit(amount: u64, burst: u64) -> Limit {
    Limit::gcra(amount, Duration::from_secs(1)).and_then(|limit| limit.with_burst(burst)).expect("in range")
}

/// Ten per second. The regional share is half, and usage is published from the third unit on.
fn ten(lapse: Lapse) -> Terms {
    let cross_region =
        CrossRegionTerms { publish_threshold: 3, share_amount: 5, share_capacity: 5, debt_max: 20 };
    Terms::new(&limit(10, 10), 0, lapse, 1).with_cross_region(cross_region)
}

fn window_of_ten() -> Terms {
    let limit = Limit::sliding_window(10, Duration::from_secs(1)).expect("in range");
    let cross_region =
        CrossRegionTerms { publish_threshold: 1, share_amount: 5, share_capacity: 5, debt_max: 20 };
    Terms::new(&limit, 0, Lapse::Counted, 1).with_cross_region(cross_region)
}

fn drained(components: &[Component]) -> (u64, u64, u64) {
    let [component] = components else { panic!("{components:?}") };
    let ComponentTotals::Drained { charged, refunded, level } = component.totals else {
        panic!("{component:?}")
    };
    (charged, refunded, level)
}

#[test]
fn parts_are_whole_and_together_the_whole() {
    let weights = [3, 1, 1, 0];
    for whole in [0, 1, 2, 7, 10, u64::from(u32::MAX)] {
        let parts = [0, 1, 2, 3].map(|own| share_of(whole, &weights, own));
        assert_eq!(parts.iter().sum::<u64>(), whole);
        assert!(
            parts.iter().zip(weights).all(|(part, weight)| part.abs_diff(whole * u64::from(weight) / 5) <= 1)
        );
    }
    assert_eq!((share_of(7, &[], 0), share_of(7, &[0], 0), share_of(7, &[1], 3)), (0, 0, 0));
}

#[test]
fn terms_are_the_numbers_they_are_written_as() {
    for terms in [ten(Lapse::Counted), window_of_ten(), Terms::new(&limit(7, 9), 0, Lapse::Forgiven, 3)] {
        assert_eq!(Terms::of_numbers(terms.numbers()), Some(terms));
    }
    let numbers = ten(Lapse::Counted).numbers();
    for (place, wrong) in [(0, 2), (1, 1 << 32), (2, 0), (3, 0), (5, 1 << 48), (6, 2), (7, 1 << 40)] {
        let mut numbers = numbers;
        numbers[place] = wrong;
        assert_eq!(Terms::of_numbers(numbers), None, "{place}");
    }
}

#[test]
fn component_is_published_above_the_threshold_and_then_always() {
    let mut here = Region::whole(ten(Lapse::Counted), START);
    here.ask(START, 2);
    assert_eq!(here.gather(START), []);
    here.ask(START, 1);
    assert_eq!(drained(&here.gather(START)), (3, 0, 3));
    let before = here.partition.connectivity_and_stamp().1;
    here.ask(START, 1);
    assert_eq!(
        here.partition.connectivity_and_stamp().1,
        before + 1,
        "every later charge makes the meter dirty"
    );
    assert_eq!(drained(&here.gather(START + SECOND / 5)), (4, 0, 2), "two have drained");
}

#[test]
fn an_import_is_charged_once_and_opens_a_meter() {
    let (mut here, mut there) =
        (Region::whole(ten(Lapse::Counted), START), Region::whole(ten(Lapse::Counted), START));
    here.ask(START, 4);
    let answer = here.gather(START);
    assert_eq!(there.merge(START, 1, answer.clone()), MergeReply { charged: 4, stale: 0, now_us: START });
    assert_eq!(there.merge(START, 1, answer), MergeReply { charged: 0, stale: 1, now_us: START });
    assert_eq!(there.ask(START, 99), 6);
    assert_eq!(drained(&there.gather(START)), (6, 0, 6), "imported usage is not published as own");
    there.ask(START + SECOND, 1);
    assert_eq!(
        there.gather(START + SECOND).len(),
        1,
        "a published meter stays published below the threshold"
    );
}

#[test]
fn new_component_counts_by_its_undrained_level() {
    let (mut here, mut there) =
        (Region::whole(ten(Lapse::Counted), START), Region::whole(ten(Lapse::Counted), START));
    for second in 0..5 {
        assert_eq!(here.ask(START + second * SECOND, 10), 10);
    }
    let now = START + 4 * SECOND + SECOND / 2;
    let answer = here.gather(now);
    assert_eq!(drained(&answer), (50, 0, 5));
    assert_eq!(there.merge(now, 1, answer).charged, 5);
    assert_eq!(there.ask(now, 99), 5);
}

#[test]
fn undrained_refund_is_applied_in_every_region() {
    let (mut here, mut there) =
        (Region::whole(ten(Lapse::Counted), START), Region::whole(ten(Lapse::Counted), START));
    here.ask(START, 10);
    there.merge(START, 1, here.gather(START));
    let later = START + SECOND / 2;
    here.apply_call(later, |update| (update.refund, update.refund_of_us) = (8, START), 0);
    let answer = here.gather(later);
    assert_eq!(drained(&answer), (10, 3, 2), "five of eight had drained");
    assert_eq!(there.merge(later, 1, answer).stale, 0);
    assert_eq!(there.ask(later, 99), 8);
}

#[test]
fn isolated_region_spends_its_share_and_publishes_its_level() {
    let (mut here, mut there) = (Region::new(ten(Lapse::Counted)), Region::whole(ten(Lapse::Counted), START));
    let (answer, decided) = here.apply_call(START, |update| update.want = 9, 9);
    assert_eq!((decided.passed, answer.grant, answer.is_global), (5, 0, false), "no peer has been heard yet");
    assert_eq!(here.gather(START), [], "an isolated region does not publish its share usage");
    here.hear_of(START, SECOND);
    let (answer, decided) = here.apply_call(START, |_| {}, 99);
    assert_eq!((decided.passed, answer.is_global), (0, false), "share usage of the peers has not arrived");
    assert_eq!(drained(&here.gather(START)), (5, 0, 5), "the share usage is published at once");
    let later = START + SECOND / 2;
    assert!(!here.apply_call(later, |_| {}, 0).0.is_global, "the region settles until the peers report");
    here.hear(later, SECOND / 2);
    let (answer, decided) = here.apply_call(later, |_| {}, 99);
    assert_eq!((decided.passed, answer.is_global), (7, true), "five were spent, and half have drained");
    let answer = here.gather(later);
    assert_eq!(drained(&answer), (12, 0, 10), "five from the regional share and seven from the limit");
    there.merge(later, 1, answer);
    assert_eq!(there.ask(later, 9), 0);
    assert_eq!(here.ask(START + SECOND, 99), 2, "the peers have timed out");
}

#[test]
fn share_usage_is_published_without_further_requests() {
    let mut here = Region::new(ten(Lapse::Counted));
    here.ask(START, 4);
    let later = START + SECOND / 5;
    let round = |connected_for_us, after| RoundRequest {
        settled: false,
        after,
        most: 9,
        ..round(connected_for_us, later)
    };
    let apart = here.round(later, &round(0, 0));
    assert!(!apart.includes_isolated, "an isolated region publishes no share usage");
    assert_eq!((apart.components, apart.more, here.partition.isolated_meters().count()), (vec![], false, 1));
    let first = here.round(later, &round(SECOND, 0));
    assert_eq!(
        (first.components, first.more, first.includes_isolated),
        (vec![], true, true),
        "more components are left to publish"
    );
    let second = here.round(later, &round(SECOND, first.upto));
    assert_eq!((drained(&second.components), second.more), ((3, 0, 3), false), "one has drained");
    assert_eq!(here.ask(later, 99), 2, "the regional share decides");
    here.hear(later, SECOND);
    assert_eq!(
        here.ask(later + SECOND / 2, 99),
        7,
        "the whole limit decides, less the undrained share usage"
    );
    assert_eq!(here.partition.isolated_meters().count(), 0);
}

/// Peers may have merged a higher total before the loss. Under the same incarnation they would
/// ignore new usage.
#[test]
fn share_usage_is_not_published_under_a_lossy_incarnation() {
    let round = |now| RoundRequest { most: 9, ..round(SECOND, now) };
    let later = START + SECOND / 5;
    for is_noticed in [false, true] {
        let mut here = Region::new(ten(Lapse::Forgiven));
        here.ask(START, 4);
        here.store.boot = 2;
        if is_noticed {
            here.apply_call(later, |update| update.key = Box::from(&b"another"[..]), 1);
        }
        assert!(here.round(later, &round(later)).components.is_empty());
        let answer = here.round(later, &round(later)).components;
        assert!(answer.iter().all(|component| *component.key != *KEY), "{is_noticed}: {answer:?}");
        let settled = later + SECOND / 2;
        here.ask(settled, 4);
        let answer = here.round(settled, &round(settled)).components;
        let name = answer.iter().find(|component| *component.key == *KEY).map(|answer| answer.incarnation);
        assert_eq!(name, Some(if is_noticed { later } else { settled }), "{is_noticed}: {answer:?}");
    }
}

#[test]
fn regional_share_counts_its_part_of_the_global_usage() {
    let mut here = Region::new(ten(Lapse::Counted));
    here.hear(START, 1);
    assert_eq!(here.ask(START, 8), 8);
    assert_eq!(here.ask(START + 1, 99), 1, "the share counts half of eight: one of five is left");
    here.hear_of(START + 1, SECOND);
    let later = START + 1 + SECOND / 2;
    here.hear(later, SECOND);
    assert_eq!(here.ask(later, 99), 3, "nine were spent, and two and a half have drained");
}

#[test]
fn new_replicator_does_not_shorten_the_connected_time() {
    let mut here = Region::new(ten(Lapse::Counted));
    let is_connected = |here: &mut Region, now| here.apply_call(now, |_| {}, 0).0.is_global;
    here.hear(START, SECOND);
    // Another node has become the replicator, and has heard no peer yet.
    here.hear(START + 1, 0);
    here.round(START + 1, &round(0, 0));
    assert!(is_connected(&mut here, START + SECOND - 1));
    assert!(!is_connected(&mut here, START + SECOND), "no peer has been heard since");
}

#[test]
fn connected_region_stays_connected_only_by_settled_rounds() {
    let mut here = Region::new(ten(Lapse::Counted));
    let is_connected = |here: &mut Region, now| here.apply_call(now, |_| {}, 0).0.is_global;
    here.hear(START, SECOND);
    here.hear_of(START + SECOND / 2, SECOND);
    assert!(is_connected(&mut here, START + SECOND - 1));
    assert!(
        !is_connected(&mut here, START + SECOND),
        "a peer is isolated and has not published its share usage"
    );
    here.hear_of(START + SECOND, SECOND);
    assert!(!is_connected(&mut here, START + SECOND));
    here.hear(START + SECOND, SECOND / 2);
    assert!(is_connected(&mut here, START + SECOND));
    assert!(
        !is_connected(&mut here, START + SECOND + SECOND / 2),
        "only settled rounds extend the connected time"
    );
}

#[test]
fn delayed_round_extends_connectivity_from_its_own_time() {
    let mut here = Region::new(ten(Lapse::Counted));
    here.round(START + 20 * SECOND, &round(2 * SECOND, START));
    assert!(!here.apply_call(START + 20 * SECOND, |_| {}, 0).0.is_global);
}

#[test]
fn clock_set_back_does_not_extend_connectivity() {
    let mut here = Region::whole(ten(Lapse::Counted), START);
    let back = START - 5 * SECOND;
    // The replicator has heard no peer, and its estimate is from before the clock was set back.
    here.round(back, &round(0, START));
    assert!(!here.apply_call(back, |_| {}, 0).0.is_global);
    here.round(back, &round(SECOND, START));
    assert!(
        here.apply_call(back + SECOND / 2, |_| {}, 0).0.is_global,
        "a clock that was set back does not invalidate the round"
    );
}

#[test]
fn share_without_drain_admits_nothing_and_states_a_retry() {
    let cross_region =
        CrossRegionTerms { publish_threshold: 1, share_amount: 0, share_capacity: 3, debt_max: 0 };
    let mut here =
        Region::new(Terms::new(&limit(1, 10), 0, Lapse::Counted, 1).with_cross_region(cross_region));
    let (answer, decided) = here.apply_call(START, |update| update.want = 3, 1);
    assert_eq!((answer.grant, answer.wait_us, decided.passed, decided.retry_us), (0, SECOND, 0, SECOND));
}

#[test]
fn a_debt_is_capped_where_a_limit_forgives() {
    for (lapse, level, forgiven) in [(Lapse::Counted, 60, 0), (Lapse::Forgiven, 30, 30)] {
        let mut here = Region::whole(ten(lapse), START);
        let totals = ComponentTotals::Drained { charged: 60, refunded: 0, level: 60 };
        let component = Component { key: KEY.into(), terms: ten(lapse), incarnation: 1, totals };
        here.merge(START, 1, vec![component]);
        assert_eq!((here.meter().level() / SECOND, here.meter().forgiven()), (level, forgiven));
    }
}

#[test]
fn window_component_is_published_by_cells() {
    let (mut here, mut there) =
        (Region::whole(window_of_ten(), START), Region::whole(window_of_ten(), START));
    here.ask(START + SECOND / 2, 4);
    let first = here.gather(START + SECOND / 2);
    let later = START + SECOND + SECOND / 2;
    here.ask(later, 3);
    let second = here.gather(later);
    assert_eq!(there.merge(later, 1, second.clone()).charged, 7);
    assert_eq!(
        there.merge(later, 1, first),
        MergeReply { charged: 0, stale: 1, now_us: later },
        "a component of the previous cell is stale"
    );
    assert_eq!(there.merge(later, 1, second).stale, 1);
    assert_eq!(there.ask(later, 99), 5, "three, and half of the previous four");
}

#[test]
fn lost_writes_begin_another_incarnation_and_a_limit_that_must_hold_is_full_everywhere() {
    for (lapse, charged) in [(Lapse::Counted, 10), (Lapse::Forgiven, 1)] {
        let (mut here, mut there) = (Region::whole(ten(lapse), START), Region::whole(ten(lapse), START));
        here.ask(START, 3);
        there.merge(START, 1, here.gather(START));
        here.store.boot = 2;
        here.ask(START + 1, 1);
        let answer = here.gather(START + 1);
        assert_eq!(drained(&answer).0, charged);
        assert_eq!(
            there.merge(START + 1, 1, answer).charged,
            charged,
            "the new incarnation adds to the three of the old one"
        );
        assert_eq!(there.meter().seen().count(), 2);
    }
}

#[test]
fn after_lost_writes_usage_of_peers_is_not_published_back() {
    let mut here = Region::whole(ten(Lapse::Counted), START);
    let totals = ComponentTotals::Drained { charged: 60, refunded: 0, level: 60 };
    let component = Component { key: KEY.into(), terms: ten(Lapse::Counted), incarnation: 1, totals };
    here.merge(START, 1, vec![component]);
    here.ask(START, 0);
    here.store.boot = 2;
    here.ask(START + 1, 1);
    assert_eq!(
        drained(&here.gather(START + 1)).0,
        10,
        "the loss is published as one burst, not as the sixty of the peer"
    );

    let mut here = Region::whole(window_of_ten(), START);
    let totals = ComponentTotals::Cells { cell: START / SECOND, current: 60, previous: 0 };
    here.merge(START, 1, vec![Component { key: KEY.into(), terms: window_of_ten(), incarnation: 1, totals }]);
    here.ask(START, 0);
    here.store.boot = 2;
    here.ask(START + 1, 1);
    let answer = here.gather(START + 1);
    assert_eq!(answer[0].totals, ComponentTotals::Cells { cell: START / SECOND, current: 10, previous: 0 });
}

#[test]
fn limit_that_becomes_cross_region_publishes_earlier_usage() {
    let regional = Terms::new(&limit(10, 10), 0, Lapse::Counted, 1);
    let mut here = Region::whole(regional, START);
    here.ask(START, 4);
    assert_eq!((here.gather(START), here.meter().region_state_numbers()), (vec![], None));
    here.terms = Terms::new(&limit(10, 10), 0, Lapse::Counted, 2)
        .with_cross_region(*ten(Lapse::Counted).cross_region().expect("some"));
    here.ask(START, 1);
    assert_eq!(drained(&here.gather(START)), (5, 0, 5));
}

#[test]
fn dirty_meters_are_paged_trimmed_and_resent_after_a_loss() {
    let mut partition = Partition::default();
    let component = |name: u8| {
        let totals = ComponentTotals::Drained { charged: 1, refunded: 0, level: 1 };
        Component { key: Box::from([name]), terms: ten(Lapse::Counted), incarnation: 1, totals }
    };
    let mut call = Region::new(ten(Lapse::Counted));
    std::mem::swap(&mut call.partition, &mut partition);
    for name in 0..5 {
        call.merge(START, 1, vec![component(name)]);
        call.apply_call(START, |update| (update.key, update.used) = (Box::from([name]), 9), 0);
    }
    // The reports charged no units, because the node had no grant. So the node sends checks.
    let round = |after, trim, most| RoundRequest { trim, after, most, ..round(SECOND, START) };
    call.hear(START, SECOND);
    for name in 0..5 {
        call.apply_call(START, |update| update.key = Box::from([name]), 1);
    }
    let first = call.round(START, &round(0, 0, 2));
    let names =
        |components: &[Component]| components.iter().map(|component| component.key[0]).collect::<Vec<_>>();
    assert_eq!((names(&first.components), first.more), (vec![0, 1], true));
    let second = call.round(START, &round(first.upto, first.upto, 9));
    assert_eq!((names(&second.components), second.more), (vec![2, 3, 4], false));
    assert_eq!(names(&call.round(START, &round(0, 0, 9)).components), [2, 3, 4], "trimmed");
    let again = call.round(START, &round(second.upto + 1, second.upto + 1, 9));
    assert_eq!(
        (names(&again.components), again.upto),
        (vec![2, 3, 4], second.upto),
        "a cursor of another incarnation reads from the start"
    );
    call.round(START + 2 * DIRTY_RETENTION_US, &round(0, 0, 9));
    assert_eq!(call.partition.dirty_meters().count(), 0, "dirty marks expire");
}

proptest! {
    #[test]
    fn components_may_come_in_any_order_and_any_number_of_times(
        charges in prop::collection::vec((0u64..3, 1u32..4), 1..9),
        order in prop::collection::vec(any::<prop::sample::Index>(), 1..40),
    ) {
        let terms = Terms::new(&limit(10, 100), 0, Lapse::Counted, 1).with_cross_region(CrossRegionTerms {
            publish_threshold: 1, share_amount: 3, share_capacity: 30, debt_max: 0,
        });
        let mut from: Vec<Region> = (0..3).map(|_| Region::whole(terms, START)).collect();
        let mut messages = Vec::new();
        for (region, units) in &charges {
            from[*region as usize].ask(START, *units);
            messages.push((*region, from[*region as usize].gather(START)));
        }
        let mut here = Region::whole(terms, START);
        let all = order.iter().map(|index| index.get(&messages)).chain(&messages);
        for (region, components) in all {
            here.merge(START, *region, components.clone());
        }
        let units: u64 = charges.iter().map(|(_, units)| u64::from(*units)).sum();
        prop_assert_eq!(here.meter().level(), units * SECOND);
    }
}

/// Peer timeout: the last-heard age at which regions fall back to their shares.
const SILENCE_MAX: u64 = 2 * SECOND;
const INTERVAL: u64 = SECOND / 5;
const LAG_MAX: u64 = SECOND / 2;

struct Message {
    from: usize,
    to: usize,
    due: u64,
    upto: u64,
    /// The sender's highest last-heard age of a peer when it sent the message.
    silence: u64,
    /// When it was sent, if all that was charged by then is in it, also to the sender's part.
    joined: Option<u64>,
    components: Vec<Component>,
}

/// Regions with as many requests as they admit. The links between their replicators fail, delay and
/// duplicate messages.
struct World {
    chance: u64,
    now: u64,
    regions: Vec<Region>,
    on_the_way: Vec<Message>,
    cut: Vec<Vec<bool>>,
    /// For each region and peer: when the region last heard the peer, and the highest last-heard
    /// age of the peer's own peers.
    heard: Vec<Vec<(u64, u64)>>,
    /// By when each has all that each other charged, also to its part.
    joined: Vec<Vec<u64>>,
    acknowledged: Vec<Vec<u64>>,
    next_round: Vec<u64>,
    /// Whether requests arrive at present. During a pause, the debts of regions drain.
    is_asking: bool,
    /// Level of one bucket that receives all usage: the most by which any interval so far exceeds
    /// the rate.
    level: u64,
    level_at: u64,
    amount: u64,
}

impl World {
    fn new(seed: u64, regions: usize, amount: u64, burst: u64) -> Self {
        let weights = vec![1; regions];
        let terms = |own| {
            let cross_region = CrossRegionTerms {
                publish_threshold: (burst / 16).max(1),
                share_amount: share_of(amount, &weights, own),
                share_capacity: share_of(burst, &weights, own),
                debt_max: 0,
            };
            Terms::new(&limit(amount, burst), 0, Lapse::Counted, 1).with_cross_region(cross_region)
        };
        Self {
            chance: seed,
            now: START,
            regions: (0..regions).map(|own| Region::new(terms(own))).collect(),
            on_the_way: Vec::new(),
            cut: vec![vec![false; regions]; regions],
            heard: vec![vec![(START, 0); regions]; regions],
            joined: vec![vec![0; regions]; regions],
            acknowledged: vec![vec![0; regions]; regions],
            next_round: vec![START; regions],
            is_asking: true,
            level: 0,
            level_at: START,
            amount,
        }
    }

    fn below(&mut self, end: u64) -> u64 {
        self.chance =
            self.chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.chance >> 33) % end
    }

    fn silence(&self, of: usize) -> u64 {
        let peers = (0..self.regions.len()).filter(|peer| *peer != of);
        peers.map(|peer| self.now - self.heard[of][peer].0).max().unwrap_or(0)
    }

    fn round(&mut self, at: usize) {
        let count = self.regions.len();
        let peers: Vec<usize> = (0..count).filter(|peer| *peer != at).collect();
        let reported = peers.iter().map(|peer| {
            let (heard, silence) = self.heard[at][*peer];
            self.now - heard + silence
        });
        let silence = reported.max().unwrap_or(0);
        let trim = peers.iter().map(|peer| self.acknowledged[at][*peer]).min().unwrap_or(0);
        let (now, connected_for_us) = (self.now, SILENCE_MAX.saturating_sub(silence));
        let isolated_meters = peers.iter().map(|peer| now - self.joined[at][*peer]).max().unwrap_or(0);
        let joined_for_us = SILENCE_MAX.saturating_sub(isolated_meters);
        let settled = joined_for_us > 0;
        let connected_for_us = if settled { connected_for_us.min(joined_for_us) } else { connected_for_us };
        let round = RoundRequest { settled, trim, most: 256, ..round(connected_for_us, now) };
        let gathered = self.regions[at].round(now, &round);
        let joined = (gathered.includes_isolated && !gathered.more).then_some(now);
        let silence = self.silence(at);
        for to in peers {
            for _ in 0..=self.below(2) {
                let due = self.now + self.below(LAG_MAX);
                let components = gathered.components.clone();
                self.on_the_way.push(Message {
                    from: at,
                    to,
                    due,
                    upto: gathered.upto,
                    silence,
                    joined,
                    components,
                });
            }
        }
        self.next_round[at] = self.now + INTERVAL;
    }

    fn deliver(&mut self) {
        let now = self.now;
        let (due, later): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.on_the_way).into_iter().partition(|message| message.due <= now);
        self.on_the_way = later;
        for Message { from, to, upto, silence, joined, components, .. } in due {
            if self.cut[from][to] {
                continue;
            }
            self.regions[to].merge(now, from as u64, components);
            self.heard[to][from] = (now, silence);
            self.joined[to][from] = self.joined[to][from].max(joined.unwrap_or(0));
            self.acknowledged[from][to] = self.acknowledged[from][to].max(upto);
        }
    }

    fn admit(&mut self, at: usize, count: u32) {
        let passed = u64::from(self.regions[at].ask(self.now, count));
        let drained = (self.now - self.level_at) * self.amount;
        self.level = self.level.saturating_sub(drained) + passed * SECOND;
        self.level_at = self.now;
    }

    fn step(&mut self, cuts: bool) {
        self.now += self.below(SECOND / 20);
        self.deliver();
        for at in 0..self.regions.len() {
            if self.next_round[at] <= self.now {
                self.round(at);
            }
        }
        let count = self.regions.len() as u64;
        if cuts && self.below(60) == 0 {
            let (from, to) = (self.below(count) as usize, self.below(count) as usize);
            self.cut[from][to] = !self.cut[from][to];
            if self.below(2) == 0 {
                self.cut[to][from] = self.cut[from][to];
            }
        }
        if cuts && self.below(100) == 0 {
            self.is_asking = !self.is_asking;
        }
        let at = self.below(count) as usize;
        let wanted = self.below(30) as u32;
        if self.is_asking {
            self.admit(at, wanted);
        }
    }

    /// Exchanges the components of all regions and lets them settle.
    fn quiet(&mut self) {
        for from in 0..self.regions.len() {
            let now = self.now;
            self.regions[from].hear_of(now, SECOND);
            self.regions[from].ask(now, 0);
        }
        for _ in 0..2 {
            for from in 0..self.regions.len() {
                let components = self.regions[from].gather(self.now);
                for to in (0..self.regions.len()).filter(|to| *to != from) {
                    self.regions[to].merge(self.now, from as u64, components.clone());
                }
            }
        }
        self.now += SECOND / 2;
        for at in 0..self.regions.len() {
            self.regions[at].hear(self.now, SECOND);
            self.regions[at].ask(self.now, 0);
        }
        self.admit(0, 0);
    }
}

/// Messages are lost, late, duplicated and reordered. All regions together admit as much as one
/// bucket and, once, the units that they may admit before they hear each other.
#[test]
fn regions_together_stay_within_their_bound() {
    for seed in 0..60 {
        let regions = 2 + (seed % 3) as usize;
        let (amount, burst) = [(20, 20), (100, 10), (5, 60)][(seed / 3 % 3) as usize];
        let mut world = World::new(seed, regions, amount, burst);
        let others = regions as u64 - 1;
        let d = SILENCE_MAX + 2 * (INTERVAL + LAG_MAX);
        let surplus = others * ((burst + (burst / 16).max(1)) * SECOND + amount * d);
        let most = (2 * burst) * SECOND + surplus;
        for step in 0..3_000 {
            world.step(seed % 4 != 0);
            assert!(world.level <= most, "seed {seed}, step {step}: {} of {most}", world.level);
        }
        world.quiet();
        for (at, region) in world.regions.iter().enumerate() {
            let level = region.meter().level();
            let hidden = others * (burst / 16).max(1) * SECOND;
            assert!(level + hidden >= world.level, "seed {seed}, region {at}: {level} of {}", world.level);
        }
    }
}

/// And without cuts they admit nearly all of it.
#[test]
fn connected_regions_admit_nearly_the_whole_limit() {
    let mut world = World::new(7, 3, 100, 100);
    for _ in 0..4_000 {
        world.step(false);
    }
    let admitted: u64 = world.regions.iter().map(|region| region.meter().charged()).sum();
    let one_bucket = 100 + (world.now - START) * 100 / SECOND;
    assert!(admitted * 100 >= one_bucket * 97, "{admitted} of {one_bucket}");
}

/// A region that lost writes long ago.
fn that_lost_writes(terms: Terms, lost_us: u64) -> Region {
    let mut region = Region::whole(terms, lost_us);
    region.apply_call(lost_us, |update| update.key = b"other".as_slice().into(), 0);
    region.store.boot = 2;
    region.apply_call(lost_us, |update| update.key = b"other".as_slice().into(), 0);
    region
}

#[test]
fn usage_of_peers_is_never_published_as_own_after_a_loss() {
    for terms in [ten(Lapse::Counted), window_of_ten()] {
        let mut here = Region::whole(terms, START);
        assert_eq!(here.ask(START, 8), 8);
        let mut there = that_lost_writes(terms, START - 3_600 * SECOND);
        there.hear(START, CONNECTED_US_MAX);
        there.merge(START, 1, here.gather(START));
        assert_eq!(there.ask(START, 1), 1);
        let mut answer = there.gather(START).into_iter();
        let own = match answer.find(|component| *component.key == *KEY).expect("a component").totals {
            ComponentTotals::Drained { charged, level, .. } => (charged, level),
            ComponentTotals::Cells { current, previous, .. } => (current, previous + 1),
        };
        assert_eq!(own, (1, 1));
    }
}

#[test]
fn lost_writes_are_published_under_a_new_incarnation() {
    let mut here = Region::whole(ten(Lapse::Counted), START);
    here.ask(START, 4);
    let before = here.gather(START);
    here.store.boot = 2;
    let later = START + SECOND / 2;
    assert_eq!(here.ask(later, 1), 0, "the meter counts as full after the loss");
    let answer = here.gather(later);
    assert_eq!(drained(&answer), (10, 0, 10));
    assert!(answer[0].incarnation > before[0].incarnation);
    let much_later = later + 20 * SECOND;
    here.ask(much_later, 3);
    assert_eq!(drained(&here.gather(much_later)), (13, 0, 3), "the assumed usage has drained");
}

#[test]
fn a_clock_that_is_set_back_after_a_loss_closes_nothing_for_longer() {
    let mut here = that_lost_writes(ten(Lapse::Counted), START);
    let set_back = START - 3_600 * SECOND;
    here.hear(set_back, CONNECTED_US_MAX);
    assert_eq!(here.ask(set_back, 1), 0, "the loss counts from the present time");
    assert_eq!(here.ask(set_back + SECOND / 2, 99), 5, "the assumed usage drains");
    let later = set_back + 2 * SECOND;
    here.apply_call(later, |update| update.key = b"new".as_slice().into(), 0);
    assert_eq!(here.apply_call(later, |update| update.key = b"new".as_slice().into(), 99).1.passed, 10);
}

#[test]
fn a_region_knows_its_own_part_whichever_version_others_know() {
    let cross_region = |part| CrossRegionTerms {
        publish_threshold: 1,
        share_amount: part,
        share_capacity: part,
        debt_max: 20,
    };
    let terms = |part, version| {
        Terms::new(&limit(100, 100), 0, Lapse::Counted, version).with_cross_region(cross_region(part))
    };
    let (mut large, mut small) = (Region::whole(terms(98, 2), START), Region::whole(terms(1, 1), START));
    large.ask(START, 1);
    small.merge(START, 1, large.gather(START));
    let apart = START + 2 * CONNECTED_US_MAX;
    assert_eq!(small.ask(apart, 99), 1, "the regional share of the version in force here");
}

#[test]
fn a_clock_that_runs_slow_keeps_no_region_from_settling() {
    let mut here = Region::whole(ten(Lapse::Counted), START);
    for turn in 1..20 {
        let now = START + turn * SECOND / 5;
        here.round(now, &round(SECOND, now + 400));
        assert!(here.apply_call(now, |_| {}, 0).0.is_global);
    }
    let now = START + 5 * SECOND;
    here.round(now, &RoundRequest { settled: false, ..round(SECOND, now + SECOND) });
    assert!(
        !here.apply_call(now, |_| {}, 0).0.is_global,
        "after the clock is set back the region settles again"
    );
}
