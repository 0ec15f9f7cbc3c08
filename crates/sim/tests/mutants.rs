//! Every known mistake is noticed. A checker that misses one checks nothing.

use tidegate_sim::{Bug, Size, Worlds, catch, run, shrink};

const SIZE: Size = Size { length_us: 300_000_000, requests: 3_000 };

/// Worlds in which a mistake has to show once. The rarest shows in one world of 1,500.
const SEEDS: u64 = 6_000;

#[test]
fn every_known_mistake_is_noticed() {
    let here = Bug::ALL.iter().filter(|bug| bug.worlds().contains(&Worlds::OneRegion));
    let is_missed = |bug: &&Bug| catch(**bug, Worlds::OneRegion, 0..SEEDS, SIZE).is_none();
    let missed: Vec<&Bug> = here.filter(is_missed).collect();
    assert!(missed.is_empty(), "mutations without a violation: {missed:?}");
}

#[test]
fn a_world_that_breaks_a_promise_shrinks_and_still_does() {
    let (seed, violation) = catch(Bug::FailsOpen, Worlds::OneRegion, 0..SEEDS, SIZE).expect("noticed");
    let scenario = Worlds::OneRegion.scenario(seed.expect("a world with a seed"), SIZE);
    let (smaller, report) = shrink(&scenario, Some(Bug::FailsOpen), &violation);
    assert!(smaller.requests < scenario.requests, "{smaller}");
    assert!(report.violations.iter().any(|other| other.is_like(&violation)));
    assert_eq!(run(&smaller, None, false).violations, [], "without the mutation it holds");
}
