//! Waits that differ between processes, so that many do not retry at once.

use std::time::Duration;

/// Waits that double, up to a bound, each shortened by up to a half of it.
#[derive(Clone, Debug)]
pub struct Backoff {
    least: Duration,
    most: Duration,
    failures: u32,
    seed: u64,
}

impl Backoff {
    /// Waits from `least` to `most`.
    pub fn new(least: Duration, most: Duration, seed: u64) -> Self {
        Self { least, most, failures: 0, seed }
    }

    /// How long to wait after one more failure.
    pub fn after_failure(&mut self) -> Duration {
        let doubled = self.least.saturating_mul(1 << self.failures.min(16)).min(self.most);
        self.failures = self.failures.saturating_add(1);
        self.seed = step(self.seed);
        between(doubled / 2, doubled, self.seed)
    }

    /// Takes in a success: the next wait is a short one.
    pub fn succeed(&mut self) {
        self.failures = 0;
    }
}

/// A time that is varied by up to a fifth.
pub fn with_jitter(time: Duration, seed: u64) -> Duration {
    between(time / 5 * 4, time / 5 * 6, step(seed))
}

/// One step of a linear congruential generator. It only has to spread the waits.
fn step(seed: u64) -> u64 {
    seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407)
}

/// A time from `least` to `most`, by the high bits of a number, which are the best of a generator.
fn between(least: Duration, most: Duration, random: u64) -> Duration {
    let share = u32::from((random >> 48) as u16);
    least + (most.saturating_sub(least) / u32::from(u16::MAX)).saturating_mul(share)
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_up_to_a_bound_and_differ() {
        let (least, most) = (Duration::from_millis(20), Duration::from_secs(5));
        let waits = |seed: u64| {
            let mut backoff = Backoff::new(least, most, seed);
            (0..40).map(|_| backoff.after_failure()).collect::<Vec<_>>()
        };
        assert!(waits(1)[0] >= least / 2 && waits(1)[0] <= least);
        assert!(waits(1)[30..].iter().all(|wait| *wait >= most / 2 && *wait <= most), "{:?}", waits(1));
        assert_ne!(waits(1), waits(2));
    }

    #[test]
    fn after_a_success_the_wait_is_short_again() {
        let least = Duration::from_millis(20);
        let mut backoff = Backoff::new(least, Duration::from_secs(5), 1);
        let grown = (0..9).map(|_| backoff.after_failure()).last();
        assert!(grown > Some(least));
        backoff.succeed();
        assert!(backoff.after_failure() <= least);
    }

    #[test]
    fn times_differ_by_a_fifth_at_most() {
        let time = Duration::from_mins(5);
        let random: Vec<Duration> = (0..1_000).map(|seed| with_jitter(time, seed)).collect();
        assert!(random.iter().all(|with_jitter| (time / 5 * 4..=time / 5 * 6).contains(with_jitter)));
        let (least, most) = (random.iter().min(), random.iter().max());
        assert!(least < Some(&(time / 10 * 9)) && most > Some(&(time / 10 * 11)), "{least:?} {most:?}");
    }
}
