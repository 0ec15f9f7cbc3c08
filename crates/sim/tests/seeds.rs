//! Worlds of many seeds keep every promise.

use tidegate_sim::{run, scenario_of};

const LENGTH_US: u64 = 300_000_000;

#[test]
fn worlds_keep_their_promises() {
    let seeds: u64 =
        std::env::var("TIDEGATE_SIM_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(60);
    let mut broken = 0;
    for seed in 0..seeds {
        let scenario = scenario_of(seed, LENGTH_US, 3_000);
        let report = run(&scenario, None, false);
        for violation in &report.violations {
            println!("seed {seed}: {violation}\n    {scenario:?}");
        }
        broken += report.violations.len();
    }
    assert_eq!(broken, 0);
}

#[test]
fn the_same_seed_gives_the_same_history() {
    for seed in 0..10 {
        let scenario = scenario_of(seed, LENGTH_US, 1_000);
        assert_eq!(run(&scenario, None, false).trace.hash(), run(&scenario, None, true).trace.hash());
    }
}
