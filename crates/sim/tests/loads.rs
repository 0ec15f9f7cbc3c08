//! Fleets of even and uneven nodes admit as much as a single bucket, and deny only the rest.

use tidegate_sim::{FleetResult, LoadCase, load_cases};

/// Whether a case is tested: a burst of one unit, and bursts that last from a tenth of a second to
/// a minute, on fleets of 4 and 12 nodes.
fn is_tested(case: &LoadCase) -> bool {
    matches!((case.amount, case.period_s, case.burst), (10, 1, 1) | (400, 1, 40) | (1_000, _, 200 | 1_000))
        && matches!(case.nodes, 4 | 12)
}

#[test]
fn even_and_uneven_fleets_share_a_limit() {
    let mut cases = load_cases();
    cases.retain(is_tested);
    assert_eq!(
        cases.len(),
        (4 + 3) * 2 * 3 * 4,
        "seven limits and costs, two fleets, three spreads, four loads"
    );
    let results: Vec<_> = cases.into_iter().map(|case| (case, case.measure())).collect();
    let fleets = FleetResult::of(&results);
    assert_eq!(fleets.len(), 14);
    let missed: Vec<_> = fleets.iter().filter(|fleet| !fleet.holds()).collect();
    assert!(missed.is_empty(), "{missed:#?}");
    let is_light = |case: &LoadCase| case.load_tenths == 5 && case.burst > 1 && case.cost_max == 1;
    let half: Vec<_> = results.iter().filter(|(case, _)| is_light(case)).collect();
    assert!(
        half.iter().all(|(_, result)| result.net_denials == 0.0),
        "denied at half of the limit: {half:#?}"
    );
}
