//! A flood of new keys against a small table: memory does not grow, keys at their limit stay
//! denied, other tenants are unaffected.
#![expect(clippy::expect_used, reason = "a helper of tests may panic as a test may")]

use std::time::Duration;

use tidegate::{Gate, Limit, Limiter, ManualClock, Secret};

const MEMORY_BYTES: usize = 32 << 20;
const STRANGERS: u64 = 4_000_000;
const NEIGHBOURS: u64 = 2_000;

/// Returns the resident memory of the process.
#[cfg(target_os = "linux")]
fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("linux has it");
    let pages =
        statm.split_whitespace().nth(1).and_then(|pages| pages.parse::<usize>().ok()).expect("a number");
    pages * 4096
}

fn limiter() -> Limiter {
    let minute = Duration::from_mins(1);
    Limiter::builder()
        .memory_bytes(MEMORY_BYTES)
        .limit("bucket", Limit::gcra(100, minute).expect("in range"))
        .limit("window", Limit::sliding_window(100, minute).expect("in range"))
        .tenant("flooded", 6)
        .tenant("neighbour", 1)
        .clock(ManualClock::new())
        .secret(Secret::from_bytes([9; 16]))
        .build()
        .expect("enough memory")
}

fn gates(limiter: &Limiter, tenant: &str) -> [Gate; 2] {
    ["bucket", "window"].map(|limit| limiter.gate_of(tenant, limit).expect("it exists"))
}

/// Returns all verdicts of the neighbour tenant, in order. Its keys return several times, some past
/// their limit.
fn neighbour_verdicts(limiter: &Limiter, round: u64) -> Vec<tidegate::Verdict> {
    let gates = gates(limiter, "neighbour");
    let ask = |key: u64| {
        let [bucket, window] = &gates;
        let gate = if key.is_multiple_of(2) { bucket } else { window };
        limiter.check(gate.key(key.to_le_bytes()).cost(20 + (key + round) % 30)).verdict()
    };
    (0..NEIGHBOURS).map(ask).collect()
}

#[test]
fn a_flood_moves_neither_memory_nor_offenders_nor_neighbours() {
    let (flooded, quiet) = (limiter(), limiter());
    let gates = gates(&flooded, "flooded");
    for gate in &gates {
        assert!(flooded.check(gate.key("offender").cost(100)).is_allowed());
        assert!(!flooded.check(gate.key("offender")).is_allowed());
    }
    #[cfg(target_os = "linux")]
    let before = resident_bytes();

    for stranger in 0..STRANGERS {
        let gate = &gates[usize::from(stranger % 4 == 3)];
        let outcome = flooded.check(gate.key(stranger.to_le_bytes()));
        assert!(outcome.is_allowed(), "only offenders are at a limit: the table has room for {stranger}");
        if stranger.is_multiple_of(STRANGERS / 4) {
            let round = stranger / (STRANGERS / 4);
            assert_eq!(
                neighbour_verdicts(&flooded, round),
                neighbour_verdicts(&quiet, round),
                "round {round}"
            );
        }
    }

    for gate in &gates {
        assert!(!flooded.check(gate.key("offender")).is_allowed(), "the flood set an offender free");
    }
    #[cfg(target_os = "linux")]
    {
        let grown = resident_bytes() - before;
        assert!(
            grown <= MEMORY_BYTES + MEMORY_BYTES / 20,
            "{grown} bytes more for a table of {MEMORY_BYTES}"
        );
    }
    let stats = flooded.stats_of("flooded").expect("it exists");
    assert!(stats.live <= stats.slots && stats.evicted_in_use > STRANGERS / 2, "{stats:?}");
    assert_eq!(flooded.stats_of("neighbour").map(|stats| stats.live), Ok(NEIGHBOURS));
}

#[test]
fn strangers_that_find_no_room_share_one_meter_and_are_not_let_through() {
    let limit =
        Limit::gcra(2, Duration::from_hours(1)).and_then(|limit| limit.with_burst(1)).expect("in range");
    let limiter = Limiter::builder()
        .memory_bytes(1 << 16)
        .limit("logins", limit)
        .clock(ManualClock::new())
        .build()
        .expect("enough memory");
    let logins = limiter.gate("logins").expect("it exists");
    // With a burst of one, the first request puts each key at its limit, so none may be evicted.
    let admitted =
        (0..100_000u32).filter(|key| limiter.check(logins.key(key.to_le_bytes())).is_allowed()).count();
    let stats = limiter.stats();
    assert_eq!(
        admitted as u64, stats.live,
        "one for each key that is held, and one for all the others together"
    );
    assert!(stats.spilled > 90_000 && stats.evicted_in_use == 0, "{stats:?}");
}
