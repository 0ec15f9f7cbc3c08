//! The network between nodes and origin. It delays, loses, duplicates and reorders messages.

use fastrand::Rng;

use crate::scenario::Faults;

/// Returns the delays of the copies of a message, µs: none, one or two.
pub(crate) fn arrivals(rng: &mut Rng, faults: &Faults, delay_us: u64) -> impl Iterator<Item = u64> {
    let copies =
        if hits(rng, faults.loss_ppm) { 0 } else { 1 + usize::from(hits(rng, faults.duplicate_ppm)) };
    let times: Vec<u64> = (0..copies).map(|_| time(rng, faults, delay_us)).collect();
    times.into_iter()
}

fn time(rng: &mut Rng, faults: &Faults, delay_us: u64) -> u64 {
    let jitter = rng.u64(0..=delay_us / 4);
    let slow = if hits(rng, faults.slow_ppm) { rng.u64(0..=faults.slow_us) } else { 0 };
    delay_us + jitter + slow
}

/// Draws whether an event with a probability of `ppm` millionths occurs.
pub(crate) fn hits(rng: &mut Rng, ppm: u32) -> bool {
    ppm > 0 && rng.u32(0..1_000_000) < ppm
}
