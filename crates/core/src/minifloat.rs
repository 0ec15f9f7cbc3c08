//! Amounts in eight bits: six of exponent, two of mantissa. A meter stores two of them, so that
//! eviction can rank it without its limit.

/// The largest representable value that is not above `value`.
pub(crate) const fn floor(value: u64) -> u8 {
    if value < 4 {
        return value as u8;
    }
    let exponent = value.ilog2();
    let mantissa = (value >> (exponent - 2)) & 0b11;
    (((exponent - 1) << 2) as u8) | mantissa as u8
}

/// The smallest representable value that is not below `value`, or the largest there is.
pub(crate) const fn ceil(value: u64) -> u8 {
    let below = floor(value);
    if decode(below) == value || below == u8::MAX { below } else { below + 1 }
}

/// Returns the value of a code. Codes beyond 64 bits read as the largest value.
pub(crate) const fn decode(code: u8) -> u64 {
    let mantissa = (code & 0b11) as u64;
    let exponent = (code >> 2) as u32;
    match exponent {
        0 => mantissa,
        1..=62 => (4 | mantissa) << (exponent - 1),
        _ => u64::MAX,
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn floor_and_ceil_bracket_the_value(value in 0..=1u64 << 62, shift in 0u32..62) {
            let value = value >> shift;
            let (low, high) = (decode(floor(value)), decode(ceil(value)));
            prop_assert!(low <= value && value <= high);
            prop_assert!(value - low <= value / 4);
            prop_assert!(high - value <= value / 4);
        }
    }

    #[test]
    fn small_values_are_exact_and_large_ones_do_not_overflow() {
        for value in 0..8 {
            assert_eq!(decode(floor(value)), value);
            assert_eq!(decode(ceil(value)), value);
        }
        assert_eq!(floor(u64::MAX), 251);
        assert_eq!(decode(ceil(u64::MAX)), u64::MAX);
    }
}
