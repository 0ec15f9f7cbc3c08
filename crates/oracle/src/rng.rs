//! Random numbers from a seed: `SplitMix64`, so that every history can be played again.

/// A stream of numbers that its seed determines.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    /// The stream of `seed`.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A stream of its own for the part `index` of `seed`.
    pub(crate) fn part(seed: u64, index: u64) -> Self {
        Self(Self(seed).bits() ^ Self(index).bits().rotate_left(17))
    }

    /// 64 random bits.
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `end`, or 0 if there is none. The tiny bias of the remainder does not
    /// matter here.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.bits().checked_rem(end).unwrap_or(0)
    }

    /// A number from 1 to `max` of which every length in bits is about as likely as any other.
    pub(crate) fn any_length(&mut self, max: u64) -> u64 {
        let length = 1 + self.below(u64::from(max.max(1).ilog2()) + 1);
        let bits = self.bits() >> (64 - length);
        bits.clamp(1, max.max(1))
    }

    /// Whether an event of chance 1 in `n` happens.
    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// One of `items`, which must not be empty.
    pub(crate) fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        let count = u64::try_from(items.len()).unwrap_or(u64::MAX);
        items[usize::try_from(self.below(count)).unwrap_or(0)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_is_that_of_the_reference() {
        let mut rng = Rng::new(1_234_567);
        assert_eq!(rng.bits(), 6_457_827_717_110_365_317);
        assert_eq!(rng.bits(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn every_length_stays_in_range_and_reaches_its_ends() {
        let mut rng = Rng::new(1);
        let drawn: Vec<u64> = (0..10_000).map(|_| rng.any_length(5)).collect();
        assert_eq!((drawn.iter().min(), drawn.iter().max()), (Some(&1), Some(&5)));
        assert!((0..1_000).any(|_| rng.any_length(u64::MAX) > 1 << 62));
    }
}
