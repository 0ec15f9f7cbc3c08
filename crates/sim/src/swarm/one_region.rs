//! Worlds of one region: every seed has a mix of faults, load and limits of its own.

use std::time::Duration;

use fastrand::Rng;
use tidegate_core::{Class, Limit};

use super::{Size, bucket, pick, window};
use crate::scenario::{Faults, PLENTY_PER_S, RuleChange, SECOND_US, Scenario, Shape, Spread};

/// The world of a seed.
pub(super) fn scenario_of(seed: u64, Size { length_us, requests }: Size) -> Scenario {
    let mut rng = Rng::with_seed(seed);
    let rng = &mut rng;
    let nodes = pick(rng, &[1, 2, 3, 4, 8, 16]);
    let keys = pick(rng, &[1, 2, 4, 12]);
    // Requests per second for the busiest key, so that limits are often just reached.
    let busiest = requests * SECOND_US / length_us.max(1) / 2 + 1;
    let seconds = pick(rng, &[1, 1, 10, 60]);
    let about = pick(rng, &[1, 5, 10, 50, 100, 1_000]).max(busiest * rng.u64(1..=8) / 4);
    // In one world in six the demand for the busiest key is ten times its limit.
    let attacked = rng.u8(0..6) == 0;
    let amount = if attacked { (busiest * seconds / 10).max(1) } else { about };
    let period = Duration::from_secs(seconds);
    let is_security = rng.bool();
    let limit = draw_limit(rng, amount, period);
    let mut scenario = Scenario {
        seed,
        tolerance_ppm: if is_security { 0 } else { pick(rng, &[0, 10_000]) },
        nodes,
        keys,
        shared: rng.u8(0..3) == 0,
        spread: pick(rng, &[Spread::Even, Spread::Home, Spread::Few, Spread::Half, Spread::Zipf]),
        requests,
        length_us,
        shape: pick(rng, &[Shape::Steady, Shape::Bursts, Shape::Edges]),
        cost_max: pick(rng, &[1, 1, 1, 5, 20]).min(amount),
        large_ppm: pick(rng, &[0, 0, 0, 20_000]),
        delay_us: pick(rng, &[100, 500, 1_000, 5_000]),
        faults: faults(rng),
        uneven: rng.bool(),
        updates_per_s_max: pick(rng, &[PLENTY_PER_S, PLENTY_PER_S, 1]),
        charges_ppm: pick(rng, &[0, 0, 0, 20_000]),
        ..Scenario::new(limit, Class::Security)
    };
    if scenario.faults != Faults::default() {
        scenario.faults.wipes = pick(rng, &[0, 0, 0, 0, 0, 0, 0, 1]);
        scenario.faults.change = pick(rng, &[RuleChange::Half, RuleChange::Algorithm, RuleChange::Period]);
    }
    if !is_security {
        scenario.class = pick(rng, &[Class::Comfort, Class::Comfort, Class::Cost]);
    }
    scenario
}

fn draw_limit(rng: &mut Rng, amount: u64, period: Duration) -> Limit {
    let burst = 1 + rng.u64(0..=amount);
    if rng.u8(0..3) == 0 { window(amount, period) } else { bucket(amount, period, burst) }
}

/// One world in four is well.
fn faults(rng: &mut Rng) -> Faults {
    if rng.u8(0..4) == 0 {
        return Faults::default();
    }
    Faults {
        loss_ppm: pick(rng, &[0, 1_000, 50_000, 300_000]),
        duplicate_ppm: pick(rng, &[0, 10_000, 200_000]),
        slow_ppm: pick(rng, &[0, 10_000, 200_000]),
        slow_us: pick(rng, &[10_000, 400_000, 2 * SECOND_US, 10 * SECOND_US]),
        crashes: pick(rng, &[0, 0, 1, 8]),
        restarts: pick(rng, &[0, 0, 1, 8]),
        deploys: pick(rng, &[0, 0, 0, 1]),
        freezes: pick(rng, &[0, 0, 1, 4]),
        freeze_us: pick(rng, &[200_000, 2 * SECOND_US, 90 * SECOND_US]),
        cuts: pick(rng, &[0, 0, 2, 8]),
        one_way: rng.bool(),
        cut_us: pick(rng, &[50_000, SECOND_US, 5 * SECOND_US, 60 * SECOND_US]),
        pauses: pick(rng, &[0, 0, 1, 5]),
        losses: pick(rng, &[0, 0, 0, 1, 3]),
        skew_ppm: pick(rng, &[0, 100, 50_000]),
        node_steps: pick(rng, &[0, 0, 2]),
        origin_steps: pick(rng, &[0, 0, 0, 0, 1, 2]),
        rule_changes: pick(rng, &[0, 0, 0, 2, 6]),
        ..Faults::default()
    }
}
