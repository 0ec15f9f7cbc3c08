use super::*;
use proptest::prelude::*;
use std::time::Duration;

const SECOND: Duration = Duration::from_secs(1);

fn gcra(amount: u64, seconds: u64, burst: u64) -> Limit {
    let limit = Limit::gcra(amount, Duration::from_secs(seconds)).and_then(|limit| limit.with_burst(burst));
    limit.expect("in range")
}

fn units(bound: &Bound) -> Vec<(&str, u64)> {
    bound.terms.iter().map(|term| (term.formula, term.units)).collect()
}

/// Regions with a lag of 2.5 s between their nodes, for limits that drain slowly.
fn fleet(regions: u32) -> Fleet {
    let grant_life_us = 800_000;
    Fleet {
        replication_interval_us: 200_000,
        transit_us: 300_000,
        grant_life_us,
        nodes: 4,
        ..Fleet::of(regions)
    }
}

#[test]
fn a_global_limit_is_bounded_term_by_term() {
    let limit = gcra(60, 60, 160);
    let promise = Promise::new(&limit, Class::Comfort, Regime::BestEffort);
    let promise = Promise { tolerance_ppm: 10_000, ..promise };
    let found = bound(&promise, &fleet(3), &Faults { lapses: 5, ..Faults::ONE_OF_EACH });
    let expected = [
        ("(R-1) * B", 320),
        ("(R-1) * h * B", 20),
        ("(R-1) * r * K", 2),
        ("(R-1) * r * K", 2),
        ("(R-1) * r * (S-K)", 10),
        ("(R-1) * r * (S-K)", 10),
        ("R * e * B", 3),
        ("lapses * q", 800),
        ("fail-overs * q", 160),
        ("outages * max(largest share of B, N)", 54),
        ("outages * (N-1)/N * largest share of r * O", 8),
    ];
    assert_eq!(units(&found), expected);
    assert_eq!((found.lag_us, found.buckets, found.recurs), (2_500_000, 1, false));
    assert_eq!((found.steady(), found.total(), found.largest_grant), (347, 1_389, 160));
}

#[test]
fn partitions_add_to_the_bound_once_for_any_weights() {
    let limit = gcra(60, 60, 100);
    let promise = Promise::new(&limit, Class::Security, Regime::BestEffort);
    let surplus = |weights: &[u32], partitions| {
        let fleet = Fleet { weights: weights.into(), ..fleet(1) };
        bound(&promise, &fleet, &Faults { partitions, ..Faults::NONE }).total()
    };
    // A burst, a sixteenth of it, and twice the drain of 0.5 s; or of a peer timeout of 5 s and
    // its sixteenth.
    let (well, cut) = (100 + 7 + 2, 100 + 7 + 2 * 6);
    assert_eq!((surplus(&[1, 1, 1, 1], 0), surplus(&[1, 1, 1, 1], 1)), (3 * well, 3 * cut));
    assert_eq!(surplus(&[1, 1, 1, 1], 9), surplus(&[1, 1, 1, 1], 1));
    assert_eq!(surplus(&[7, 1, 1, 1], 1), 3 * cut);
    assert_eq!(surplus(&[7, 1, 1, 1], 0), 3 * well, "regional shares add nothing without a partition");
}

#[test]
fn how_long_grants_last_is_nothing_to_a_bound_and_something_to_a_debt() {
    let limit = gcra(60, 60, 160);
    let promise = Promise::new(&limit, Class::Comfort, Regime::BestEffort);
    let faults = Faults { partitions: 1, ..Faults::NONE };
    let of = |grant_life_us| {
        let fleet = Fleet { grant_life_us, ..fleet(3) };
        (bound(&promise, &fleet, &faults).total(), debt_max(&promise, &fleet))
    };
    // Bursts with their hidden part, and the drain of 2.5 s and of 5 s.
    assert_eq!(of(800_000), (364, 2 * (160 + 10 + 3 + 5)));
    assert_eq!(of(0), (364, 2 * (160 + 10 + 1 + 5)));
    let window = Limit::sliding_window(100, SECOND).expect("in range");
    assert_eq!(debt_max(&Promise { limit: &window, ..promise }, &fleet(3)), 200);
    let nothing = Limit::gcra(0, SECOND).expect("in range");
    assert_eq!(debt_max(&Promise { limit: &nothing, ..promise }, &fleet(3)), 0);
}

#[test]
fn lag_above_the_peer_timeout_determines_the_bound() {
    let limit = gcra(60, 60, 160);
    let promise = Promise::new(&limit, Class::Security, Regime::BestEffort);
    let late = Fleet { transit_us: 60_000_000, ..fleet(2) };
    let found = bound(&promise, &late, &Faults { partitions: 1, ..Faults::NONE });
    assert_eq!(found.total(), found.steady());
}

#[test]
fn security_limit_of_one_region_is_exact_under_all_faults() {
    let many = Faults { lapses: 9, failovers: 9, outages: 9, partitions: 9, ..Faults::NONE };
    for regime in Regime::ALL {
        for limit in [gcra(60, 60, 10), Limit::sliding_window(60, SECOND).expect("in range")] {
            let promise = Promise::new(&limit, Class::Security, regime);
            assert_eq!(bound(&promise, &fleet(1), &many).total(), 0, "{regime}");
        }
    }
}

#[test]
fn global_window_may_be_exceeded_in_each_window_at_any_lag() {
    let limit = Limit::sliding_window(100, SECOND).expect("in range");
    let promise = Promise::new(&limit, Class::Cost, Regime::BestEffort);
    let found = bound(&promise, &fleet(4), &Faults::NONE);
    assert_eq!((found.total(), found.recurs), (300, true));
    let late = Fleet { transit_us: u64::MAX, ..fleet(4) };
    assert_eq!(bound(&promise, &late, &Faults::NONE).total(), 300);
}

#[test]
fn other_regimes_do_not_depend_on_usage_of_peers() {
    let limit = gcra(60, 60, 100);
    let of = |regime, class| bound(&Promise::new(&limit, class, regime), &fleet(3), &Faults::ONE_OF_EACH);
    let regional = of(Regime::Regional, Class::Comfort);
    assert_eq!((regional.total(), regional.buckets, regional.lag_us), (100 + 100 + 100 + 23, 3, 0));
    let share = of(Regime::Share, Class::Comfort);
    // A third of 100 is 34 at most. In half a minute 10 of 30 drain.
    assert_eq!((share.total(), share.buckets, share.largest_grant), (34 + 34 + 34 + 8, 1, 34));
    let strict = of(Regime::Strict, Class::Security);
    assert_eq!((strict.total(), strict.buckets), (0, 1));
}

#[test]
fn node_without_origin_adds_its_node_share_of_the_rate() {
    let limit = gcra(60, 60, 100);
    let outage = |regime, nodes, outage_us| {
        let faults = Faults { outages: 1, outage_us, ..Faults::NONE };
        let fleet = Fleet { nodes, ..fleet(2) };
        let found = bound(&Promise::new(&limit, Class::Comfort, regime), &fleet, &faults);
        let terms = found.terms.iter().filter(|term| term.condition == TermCondition::Outage);
        terms.map(|term| term.units).collect::<Vec<_>>()
    };
    let minute_us = 60_000_000;
    assert_eq!(outage(Regime::Regional, 1, minute_us), [100], "one node has no other node shares");
    assert_eq!(
        outage(Regime::Regional, 4, minute_us),
        [100, 45],
        "three of four nodes admit their node shares"
    );
    assert_eq!(outage(Regime::Regional, 4, 0), [100, 0], "an outage of no duration adds no drain");
    assert_eq!(outage(Regime::Share, 4, minute_us), [50, 23], "the node shares divide the regional share");
}

#[test]
fn parts_go_by_weight() {
    let limit = gcra(60, 60, 100);
    let promise = Promise::new(&limit, Class::Security, Regime::Share);
    let uneven = Fleet { weights: [1, 8, 1].into(), ..fleet(1) };
    assert_eq!(bound(&promise, &uneven, &Faults::NONE).largest_grant, 80);
    assert_eq!(warnings(&promise, &uneven), []);
    let small = gcra(9, 60, 9);
    assert_eq!(warnings(&Promise { limit: &small, ..promise }, &uneven), [Warning::EmptyShare]);
}

#[test]
fn empty_regional_share_of_a_global_limit_is_warned_about() {
    let messages = |limit: Limit, weights: &[u32]| {
        let promise = Promise::new(&limit, Class::Security, Regime::BestEffort);
        let fleet = Fleet { weights: weights.into(), ..fleet(1) };
        warnings(&promise, &fleet)
    };
    let nothing = [Warning::EmptyShareWhileIsolated];
    assert_eq!(messages(gcra(600, 60, 2), &[1, 1, 1]), nothing);
    assert_eq!(
        messages(gcra(600, 60, 100), &[1, 100, 100]),
        nothing,
        "a low weight leaves no share of the burst"
    );
    assert_eq!(messages(gcra(2, 60, 600), &[1, 1, 1]), nothing, "the share of the rate is 0");
    assert_eq!(messages(gcra(600, 60, 3), &[1, 1, 1]), []);
    assert_eq!(messages(gcra(600, 60, 2), &[1, 1]), [], "the burst has one unit for each region");
}

#[test]
fn processes_without_an_origin_forget_when_they_are_restarted() {
    let limit = gcra(60, 60, 10);
    let promise = Promise::new(&limit, Class::Security, Regime::Regional);
    let without_origin = Fleet { has_origin: false, nodes: 4, ..Fleet::of(2) };
    let found = bound(&promise, &without_origin, &Faults::ONE_OF_EACH);
    assert_eq!((units(&found), found.buckets), (vec![("fail-overs * B", 10)], 8));
}

#[test]
fn nothing_passes_under_a_limit_of_nothing() {
    let limit = Limit::gcra(0, SECOND).expect("in range");
    let promise = Promise::new(&limit, Class::Comfort, Regime::BestEffort);
    assert_eq!(bound(&promise, &fleet(3), &Faults::ONE_OF_EACH).total(), 0);
    assert_eq!(warnings(&promise, &fleet(3)), []);
}

#[test]
fn unsuitable_limits_are_warned_about() {
    let messages = |limit: &Limit, regime| -> Vec<String> {
        let promise = Promise::new(limit, Class::Comfort, regime);
        warnings(&promise, &fleet(1)).iter().map(Warning::to_string).collect()
    };
    let short = gcra(1, 4, 1);
    assert_eq!(
        messages(&short, Regime::BestEffort),
        ["regime: in effect regional: its period of 4 s is shorter than twice the lag between regions, \
             2.5 s"]
    );
    assert!(messages(&gcra(1, 5, 1), Regime::BestEffort).is_empty(), "a period of twice the lag is enough");
    for regime in [Regime::Regional, Regime::Share, Regime::Strict] {
        assert!(messages(&short, regime).is_empty(), "{regime}");
    }
    let window = Limit::sliding_window(10, Duration::from_mins(1)).expect("in range");
    assert!(messages(&window, Regime::BestEffort)[0].contains("use gcra, which over-admits once"));
}

#[test]
fn a_grant_is_taken_to_last_as_long_as_an_origin_lets_it() {
    let promise = gcra(100, 1, 100);
    let promise = Promise::new(&promise, Class::Security, Regime::BestEffort);
    let lag_us =
        |grant_life_us| bound(&promise, &Fleet { grant_life_us, ..Fleet::of(2) }, &Faults::NONE).lag_us;
    // Two grants of a second with their clock drift, the lapse margin, and the lag between
    // origins.
    assert_eq!(lag_us(CROSS_REGION_LIFE_US_MAX), 2 * 1_062_500 + 300_000 + 500_000);
    assert_eq!(
        lag_us(u64::MAX),
        lag_us(CROSS_REGION_LIFE_US_MAX),
        "`grant_life_us` is capped at `CROSS_REGION_LIFE_US_MAX`"
    );
}

/// All inputs of a bound.
#[derive(Clone, Debug)]
struct Situation {
    amount: u64,
    burst: u64,
    period_us: u64,
    class: Class,
    regime: Regime,
    window: bool,
    tolerance_ppm: u32,
    fleet: Fleet,
    faults: Faults,
}

impl Situation {
    fn bound(&self) -> Option<Bound> {
        let period = Duration::from_micros(self.period_us);
        let limit = if self.window {
            Limit::sliding_window(self.amount, period)
        } else {
            Limit::gcra(self.amount, period).and_then(|limit| limit.with_burst(self.burst))
        };
        let (limit, tolerance_ppm) = (limit.ok()?, self.tolerance_ppm);
        let promise = Promise { tolerance_ppm, ..Promise::new(&limit, self.class, self.regime) };
        Some(bound(&promise, &self.fleet, &self.faults))
    }

    /// Returns a copy with one input raised.
    fn raised(&self, which: usize, by: u32) -> Self {
        let mut raised = self.clone();
        let (fleet, faults) = (&mut raised.fleet, &mut raised.faults);
        let by_us = u64::from(by);
        match which {
            0 => raised.amount += by_us,
            1 => raised.burst += by_us,
            2 => raised.tolerance_ppm += by,
            3 => fleet.weights = vec![1; fleet.weights.len() + 1 + (by % 4) as usize].into(),
            4 => fleet.nodes += by,
            5 => fleet.replication_interval_us += by_us,
            6 => fleet.transit_us += by_us,
            7 => fleet.grant_life_us += by_us,
            8 => fleet.peer_timeout_us += by_us,
            9 => fleet.threshold_ppm += by,
            10 => faults.lapses += by,
            11 => faults.failovers += by,
            12 => faults.outages += by,
            13 => faults.outage_us += by_us,
            _ => faults.partitions += by,
        }
        raised
    }
}

const RAISED: usize = 15;

fn situation() -> impl Strategy<Value = Situation> {
    let limit = (1_u64..1 << 30, 1_u64..1 << 30, 1_u64..crate::PERIOD_US_MAX, any::<bool>());
    let kind =
        (prop::sample::select(&Class::ALL[..]), prop::sample::select(&Regime::ALL[..]), 0_u32..1_000_000);
    let times = (0_u64..1 << 30, 0_u64..1 << 30, 0_u64..20_000_000, 0_u64..1 << 40);
    let fleet = (1_u32..6, 1_u32..2_000, 0_u32..1_000_000, any::<bool>(), times);
    let faults = (prop::array::uniform4(0_u32..100), 0_u64..1 << 40);
    (limit, kind, fleet, faults).prop_map(|(limit, kind, fleet, faults)| {
        let (amount, burst, period_us, window) = limit;
        let (class, regime, tolerance_ppm) = kind;
        let (regions, nodes, threshold_ppm, has_origin, times) = fleet;
        let (replication_interval_us, transit_us, grant_life_us, peer_timeout_us) = times;
        let ([lapses, failovers, outages, partitions], outage_us) = faults;
        let fleet = Fleet {
            nodes,
            has_origin,
            replication_interval_us,
            transit_us,
            grant_life_us,
            peer_timeout_us,
            threshold_ppm,
            ..Fleet::of(regions)
        };
        let faults = Faults { lapses, failovers, outages, outage_us, partitions };
        Situation { amount, burst, period_us, class, regime, window, tolerance_ppm, fleet, faults }
    })
}

proptest! {
    #[test]
    fn raising_any_parameter_never_lowers_the_bound(
        situation in situation(),
        which in 0..RAISED,
        by in 1_u32..1 << 30,
    ) {
        // With more regions, each regional share is smaller; all shares together remain one
        // limit.
        prop_assume!(which != 3 || !matches!(situation.regime, Regime::Share | Regime::BestEffort));
        let pair = (situation.bound(), situation.raised(which, by).bound());
        if let (Some(less), Some(more)) = pair {
            prop_assert!(less.steady() <= more.steady(), "{:?} {:?}", less, more);
            prop_assert!(less.total() <= more.total(), "{:?} {:?}", less, more);
        }
    }

    #[test]
    fn more_regions_never_lower_the_bound_without_faults(
        situation in situation(),
        by in 0_u32..4,
    ) {
        let situation = Situation { regime: Regime::BestEffort, faults: Faults::NONE, ..situation };
        if let (Some(less), Some(more)) = (situation.bound(), situation.raised(3, by).bound()) {
            prop_assert!(less.total() <= more.total());
        }
    }

    #[test]
    fn a_total_is_the_sum_of_its_terms_and_no_fault_costs_nothing(situation in situation()) {
        let Some(found) = situation.bound() else { return Ok(()) };
        prop_assert_eq!(found.total(), found.terms.iter().map(|term| term.units).sum::<u64>());
        let well = Situation { faults: Faults::NONE, ..situation }.bound();
        prop_assert_eq!(well.map(|well| well.total()), Some(found.steady()));
    }
}
