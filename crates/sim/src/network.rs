//! The way between nodes and origin: late, lost, twice, out of order, or not at all.

use fastrand::Rng;

use crate::scenario::Faults;

/// When the copies of a message arrive, µs after it was sent: none, one or two.
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

/// Whether something happens that happens `ppm` times in a million.
pub(crate) fn hits(rng: &mut Rng, ppm: u32) -> bool {
    ppm > 0 && rng.u32(0..1_000_000) < ppm
}
