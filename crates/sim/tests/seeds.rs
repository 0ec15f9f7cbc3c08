//! Worlds of many seeds keep every promise.

use tidegate_sim::{Size, Worlds, run, sweep};

const SIZE: Size = Size { length_us: 300_000_000, requests: 3_000 };

fn seeds() -> u64 {
    std::env::var("TIDEGATE_SIM_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(200)
}

#[test]
fn worlds_keep_their_promises() {
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let summary = sweep(Worlds::OneRegion, 0..seeds(), SIZE, threads, &|| {});
    for (seed, violations) in &summary.broken {
        let scenario = Worlds::OneRegion.scenario(*seed, SIZE);
        for violation in violations {
            println!("seed {seed}: {violation}\n    {scenario}");
        }
    }
    assert!(summary.broken.is_empty());
    assert!(summary.faults > summary.seeds, "too few faults in the simulated worlds");
}

#[test]
fn the_same_seed_gives_the_same_history() {
    for seed in 0..10 {
        let scenario = Worlds::OneRegion.scenario(seed, Size { requests: 1_000, ..SIZE });
        assert_eq!(run(&scenario, None, false).trace.hash(), run(&scenario, None, true).trace.hash());
    }
}

#[test]
fn the_number_of_threads_changes_nothing() {
    let hash = |threads| sweep(Worlds::OneRegion, 0..20, SIZE, threads, &|| {}).trace_hash;
    assert_eq!(hash(1), hash(3));
}
