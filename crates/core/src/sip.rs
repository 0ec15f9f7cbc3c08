//! SipHash-1-3 with 128 bits of output, over contiguous bytes.
//!
//! The `siphasher` crate accepts its input in pieces, and so carries its state through memory. A
//! key of one part is always contiguous, and hashing it is the largest part of a check that finds
//! its meter in the cache. Here the state stays in registers, and the caller may inline the whole.
//! The function is the same, bit for bit; the tests compare it with that crate.

/// Size of an input word, bytes.
const WORD_BYTES: usize = std::mem::size_of::<u64>();

/// The function under one secret: the state that every input starts from.
#[derive(Clone, Copy)]
pub(crate) struct Sip13(State);

#[derive(Clone, Copy)]
struct State {
    v0: u64,
    v1: u64,
    v2: u64,
    v3: u64,
}

impl Sip13 {
    pub(crate) const fn new(secret: [u8; 16]) -> Self {
        let secret = u128::from_le_bytes(secret);
        let (k0, k1) = (secret as u64, (secret >> 64) as u64);
        Self(State {
            v0: k0 ^ 0x736f_6d65_7073_6575,
            v1: k1 ^ 0x646f_7261_6e64_6f6d ^ 0xee,
            v2: k0 ^ 0x6c79_6765_6e65_7261,
            v3: k1 ^ 0x7465_6462_7974_6573,
        })
    }

    /// Both halves of the hash.
    #[inline]
    pub(crate) fn hash(&self, bytes: &[u8]) -> (u64, u64) {
        let mut state = self.0;
        let (words, tail) = bytes.as_chunks::<WORD_BYTES>();
        for &word in words {
            state.absorb(u64::from_le_bytes(word));
        }
        state.absorb((bytes.len() as u64) << 56 | last_word(bytes, tail.len()));
        state.v2 ^= 0xee;
        let first = state.squeeze();
        state.v1 ^= 0xdd;
        (first, state.squeeze())
    }
}

/// The last `tail` bytes, fewer than a word, as a number.
#[inline]
fn last_word(bytes: &[u8], tail: usize) -> u64 {
    match bytes.last_chunk::<WORD_BYTES>() {
        // The tail is the upper end of the last eight bytes. In two steps, since no shift takes all
        // 64 bits away.
        Some(last) => u64::from_le_bytes(*last) >> 1 >> (63 - 8 * tail),
        None => bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte)),
    }
}

impl State {
    #[inline(always)]
    fn absorb(&mut self, word: u64) {
        self.v3 ^= word;
        self.round();
        self.v0 ^= word;
    }

    #[inline(always)]
    fn squeeze(&mut self) -> u64 {
        self.round();
        self.round();
        self.round();
        self.v0 ^ self.v1 ^ self.v2 ^ self.v3
    }

    #[inline(always)]
    fn round(&mut self) {
        self.v0 = self.v0.wrapping_add(self.v1);
        self.v2 = self.v2.wrapping_add(self.v3);
        self.v1 = self.v1.rotate_left(13) ^ self.v0;
        self.v3 = self.v3.rotate_left(16) ^ self.v2;
        self.v0 = self.v0.rotate_left(32);
        self.v2 = self.v2.wrapping_add(self.v1);
        self.v0 = self.v0.wrapping_add(self.v3);
        self.v1 = self.v1.rotate_left(17) ^ self.v2;
        self.v3 = self.v3.rotate_left(21) ^ self.v0;
        self.v2 = self.v2.rotate_left(32);
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use siphasher::sip128::SipHasher13;

    const LEN_MAX: usize = 100;

    proptest! {
        /// Every length, since each ends in another tail.
        #[test]
        fn it_is_the_function_that_the_crate_computes(
            secret in any::<[u8; 16]>(),
            bytes in prop::collection::vec(any::<u8>(), LEN_MAX),
        ) {
            let (ours, theirs) = (Sip13::new(secret), SipHasher13::new_with_key(&secret));
            for len in 0..=LEN_MAX {
                let expected = theirs.hash(&bytes[..len]);
                prop_assert_eq!(ours.hash(&bytes[..len]), (expected.h1, expected.h2), "{} bytes", len);
            }
        }

        #[test]
        fn a_length_above_a_byte_counts_as_the_crate_counts_it(len in 200usize..1_000) {
            let bytes = vec![7; len];
            let expected = SipHasher13::new_with_key(&[1; 16]).hash(&bytes);
            prop_assert_eq!(Sip13::new([1; 16]).hash(&bytes), (expected.h1, expected.h2));
        }
    }
}
