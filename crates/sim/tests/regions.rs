//! Worlds of several regions keep every promise, reach their bound, and notice every known mistake.

use std::collections::BTreeSet;

use tidegate_core::Class;
use tidegate_sim::{
    Attack, BoundReach, Bug, CutKind, Cuts, Kind, Reach, Scenario, Shape, Size, Summary, Worlds, catch, run,
    shrink, sweep,
};

const SIZE: Size = Size { length_us: 240_000_000, requests: 2_000 };

/// How much of a printed bound an attacker reaches at least, in thousandths.
const REACHED_MILLI: u64 = 800;

/// How many of those are attacked: some of them are hardly cut.
const RUSHED_WORLDS: usize = 40;

/// How many worlds are attacked in which only one pair is cut. How much is reached depends on when
/// the cut falls into the attack.
const PAIR_WORLDS: usize = 4;

/// Attacked worlds in which a region hears no peer. That region has to receive less than it sends,
/// which depends on the network.
const DEAF_WORLDS: usize = 24;

/// In how many worlds of the long run a limit that is passed all the time has to show.
const LONG_WORLDS: usize = 3;

/// The seeds among which worlds of one sort are searched.
const SEARCHED_SEEDS: u64 = 20_000;

/// In how many worlds a mistake has to show.
const MUTANT_SEEDS: u64 = 400;

fn scenario_of(seed: u64) -> Scenario {
    Worlds::SeveralRegions.scenario(seed, SIZE)
}

/// Returns the first worlds of this sort.
fn worlds_of(is_of_sort: impl Fn(&Scenario) -> bool, count: usize) -> Vec<Scenario> {
    let worlds: Vec<_> = (0..SEARCHED_SEEDS).map(scenario_of).filter(is_of_sort).take(count).collect();
    assert_eq!(worlds.len(), count, "worlds of this sort among {SEARCHED_SEEDS} seeds");
    worlds
}

/// Runs worlds in which no promise breaks. Returns how much of its bound each reached, in
/// thousandths.
fn reached_milli(worlds: &[Scenario]) -> Vec<u64> {
    let reached = worlds.iter().map(|world| {
        let report = run(world, None, false);
        assert_eq!(report.violations, [], "{world}");
        report.reach.milli()
    });
    reached.collect()
}

fn seeds() -> u64 {
    std::env::var("TIDEGATE_SIM_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(64)
}

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

#[test]
fn regions_keep_their_promises_and_their_bound_is_tight() {
    let summary = sweep(Worlds::SeveralRegions, 0..seeds(), SIZE, threads(), &|| {});
    println!("{summary:#?}");
    for (seed, violations) in &summary.broken {
        let scenario = scenario_of(*seed);
        for violation in violations {
            println!("seed {seed}: {violation}\n    {scenario}");
        }
    }
    assert!(summary.broken.is_empty());
    assert!(
        summary.faults > summary.seeds && summary.isolations > 0,
        "too few faults in the simulated worlds"
    );
    assert!(summary.rated > 0, "no world measures the sustained rate");
    for cuts in [Cuts::None, Cuts::More] {
        let reached = summary.reached_milli(|kind| !kind.is_window && kind.cuts == cuts);
        assert!(reached >= REACHED_MILLI, "the bound is loose: {reached} thousandths reached");
    }
}

/// If many more units drain within the lag and the peer timeout than pass at once, an attacker has
/// to reach that drain.
#[test]
fn drain_before_the_peer_timeout_dominates_a_fast_limit() {
    let is_rushed = |world: &Scenario| world.shape == Shape::Attack(Attack::Rush);
    let rushed = worlds_of(is_rushed, RUSHED_WORLDS);
    assert!(rushed.iter().all(|world| world.kind().is_fast));
    let most = reached_milli(&rushed).into_iter().max();
    assert!(most >= Some(REACHED_MILLI), "the bound is loose: {most:?} thousandths reached");
}

#[test]
fn unreached_bounds_over_many_worlds_are_reported() {
    let kind = |is_fast, cuts| Kind { is_window: false, class: Class::Comfort, is_fast, cuts };
    let reached = |excess| BoundReach { worlds: 1, seed: 1, reach: Reach { excess, allowed: 1_000 } };
    let summary = |seeds, reached: [(Kind, BoundReach); 3]| Summary {
        seeds,
        reached: reached.into(),
        ..Summary::default()
    };
    let some = |slow, fast| {
        [
            (kind(false, Cuts::None), reached(1)),
            (kind(false, Cuts::More), reached(slow)),
            (kind(true, Cuts::None), reached(fast)),
        ]
    };
    assert_eq!(summary(2_000, some(REACHED_MILLI, REACHED_MILLI)).loose(), [], "for any partitioned links");
    assert_eq!(
        summary(2_000, some(REACHED_MILLI - 1, REACHED_MILLI)).loose(),
        [(kind(false, Cuts::None), REACHED_MILLI - 1)]
    );
    assert_eq!(summary(2_000, some(REACHED_MILLI, 1)).loose(), [(kind(true, Cuts::None), 1)]);
    assert_eq!(summary(1_999, some(1, 1)).loose(), [], "too few worlds for a judgement");
}

#[test]
fn where_only_one_pair_is_cut_the_bound_is_tight_too() {
    let is_wide = |world: &Scenario| world.region_count() > 4 && world.shape == Shape::Attack(Attack::Lag);
    let wide = worlds_of(is_wide, PAIR_WORLDS);
    assert!(wide.iter().all(|world| world.kind().cuts == Cuts::Pairs));
    let reached = reached_milli(&wide);
    assert!(reached.iter().any(|milli| *milli >= REACHED_MILLI), "{reached:?} thousandths");
}

/// Peers hear the deaf region, and pay off the usage that it does not know from their small shares.
#[test]
fn where_a_region_with_most_of_the_limit_is_deaf_no_more_passes_than_where_parts_are_alike() {
    let is_deaf = |world: &Scenario| world.link_faults().cuts.iter().any(|cut| cut.kind == CutKind::Deaf);
    let most = reached_milli(&worlds_of(is_deaf, DEAF_WORLDS)).into_iter().max();
    assert!(most >= Some(REACHED_MILLI), "the bound is loose: {most:?} thousandths reached");
}

/// Debt to peers that is dropped passes again, for as long as demand in all regions exceeds the
/// limit.
#[test]
fn constant_over_admission_violates_the_long_run_rate() {
    let worlds = worlds_of(run_is_long, LONG_WORLDS);
    let is_noticed = |world: &Scenario| {
        let report = run(world, Some(Bug::ForgivesAll), false);
        report.is_rated && report.violations.iter().any(|violation| violation.promise() == "rate")
    };
    assert!(worlds.iter().any(is_noticed), "no world measures the sustained rate");
}

fn run_is_long(world: &Scenario) -> bool {
    world.shape == Shape::Attack(Attack::Flood)
        && (2 * SIZE.length_us..3_600_000_000).contains(&world.length_us)
}

#[test]
fn the_same_seed_gives_the_same_history_of_regions() {
    let small = Size { length_us: SIZE.length_us / 3, requests: 500 };
    let mut hashes = BTreeSet::new();
    for seed in 0..6 {
        let scenario = Worlds::SeveralRegions.scenario(seed, small);
        let hash = run(&scenario, None, false).trace.hash();
        assert_eq!(hash, run(&scenario, None, true).trace.hash());
        hashes.insert(hash);
    }
    assert_eq!(hashes.len(), 6, "another seed gives another history");
}

#[test]
fn every_known_mistake_between_regions_is_noticed() {
    let here = Bug::ALL.iter().filter(|bug| bug.worlds().contains(&Worlds::SeveralRegions));
    let is_missed = |bug: &&Bug| catch(**bug, Worlds::SeveralRegions, 0..MUTANT_SEEDS, SIZE).is_none();
    let missed: Vec<&Bug> = here.filter(is_missed).collect();
    assert!(missed.is_empty(), "mutations without a violation: {missed:?}");
}

#[test]
fn a_world_of_regions_that_breaks_a_promise_shrinks_and_still_does() {
    let bug = Bug::RepublishesForeign;
    let noticed = catch(bug, Worlds::SeveralRegions, 0..MUTANT_SEEDS, SIZE);
    let (Some(seed), violation) = noticed.expect("noticed") else { panic!("a world with a seed") };
    let scenario = scenario_of(seed);
    let (smaller, report) = shrink(&scenario, Some(bug), &violation);
    assert!(smaller.length_us < scenario.length_us, "{smaller}");
    assert!(report.violations.iter().any(|other| other.is_like(&violation)));
    assert_eq!(run(&smaller, None, false).violations, [], "without the mutation it holds");
}
