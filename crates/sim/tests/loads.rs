//! Fleets of even and uneven nodes admit as much as a single bucket, and deny only the rest.

use tidegate_sim::{FleetResult, load_cases};

/// Whether a case is tested: limits with bursts that last from a tenth of a second to a minute, on
/// fleets of 4 and 12 nodes.
fn is_tested(amount: u64, burst: u64, nodes: usize) -> bool {
    matches!((amount, burst), (400, 40) | (1_000, 200 | 1_000)) && matches!(nodes, 4 | 12)
}

#[test]
fn even_and_uneven_fleets_share_a_limit() {
    let mut cases = load_cases();
    cases.retain(|case| case.cost_max == 1 && is_tested(case.amount, case.burst, case.nodes));
    assert_eq!(cases.len(), 3 * 2 * 3 * 4, "three limits, two fleets, three spreads, four loads");
    let results: Vec<_> = cases.into_iter().map(|case| (case, case.measure())).collect();
    let fleets = FleetResult::of(&results);
    assert_eq!(fleets.len(), 6);
    let missed: Vec<&FleetResult> = fleets.iter().filter(|fleet| !fleet.holds()).collect();
    assert!(missed.is_empty(), "{missed:#?}");
    let half: Vec<_> = results.iter().filter(|(case, _)| case.load_tenths == 5).collect();
    assert!(
        half.iter().all(|(_, result)| result.net_denials == 0.0),
        "denied at half of the limit: {half:#?}"
    );
}
