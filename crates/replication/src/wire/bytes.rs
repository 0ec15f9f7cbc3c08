//! Numbers and texts as bytes.

use super::WireError;

/// Continuation bit. Each byte has seven bits of a number, the lowest first; the eighth bit means
/// that more follow.
const MORE: u8 = 0x80;

/// A number has at most this many bytes.
pub(super) const NUMBER_BYTES_MAX: usize = 10;

pub(super) fn put_number(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= u64::from(MORE) {
        bytes.push(low_bits(number) | MORE);
        number >>= 7;
    }
    bytes.push(low_bits(number));
}

#[allow(clippy::cast_possible_truncation, reason = "the mask leaves seven bits")]
fn low_bits(number: u64) -> u8 {
    (number & 0x7f) as u8
}

/// How many bytes a number takes.
pub(super) const fn number_len(number: u64) -> usize {
    let bits = 64 - (number | 1).leading_zeros() as usize;
    bits.div_ceil(7)
}

/// Writes the number plus one, so that `None` is 0. The highest number is written like the one
/// before it.
pub(super) fn put_optional(bytes: &mut Vec<u8>, number: Option<u64>) {
    put_number(bytes, number.map_or(0, |number| number.saturating_add(1)));
}

pub(super) fn put_text(bytes: &mut Vec<u8>, text: &[u8]) {
    put_number(bytes, text.len() as u64);
    bytes.extend_from_slice(text);
}

pub(super) fn text_len(text: &[u8]) -> usize {
    number_len(text.len() as u64) + text.len()
}

/// Takes bytes from the front, and never more than there are.
pub(super) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(super) fn byte(&mut self) -> Result<u8, WireError> {
        let (first, rest) = self.rest.split_first().ok_or(WireError::Short)?;
        self.rest = rest;
        Ok(*first)
    }

    pub(super) fn number(&mut self) -> Result<u64, WireError> {
        let mut number = 0;
        for place in 0..NUMBER_BYTES_MAX {
            let byte = self.byte()?;
            let bits = u64::from(byte & !MORE);
            let shifted = bits << (7 * place);
            // A number has one encoding: no bits that do not fit, and no zero byte at its end.
            if shifted >> (7 * place) != bits || (byte == 0 && place > 0) {
                return Err(WireError::Number);
            }
            number |= shifted;
            if byte & MORE == 0 {
                return Ok(number);
            }
        }
        Err(WireError::Number)
    }

    pub(super) fn optional(&mut self) -> Result<Option<u64>, WireError> {
        Ok(self.number()?.checked_sub(1))
    }

    /// A number that is at most `most`.
    pub(super) fn bounded(&mut self, field: &'static str, most: u64) -> Result<u64, WireError> {
        let given = self.number()?;
        if given <= most { Ok(given) } else { Err(WireError::Range { field, given, most }) }
    }

    pub(super) fn text(&mut self, field: &'static str, bytes_max: usize) -> Result<&'a [u8], WireError> {
        let len = self.bounded(field, bytes_max as u64)?;
        let len = usize::try_from(len).map_err(|_| WireError::Short)?;
        let (text, rest) = self.rest.split_at_checked(len).ok_or(WireError::Short)?;
        self.rest = rest;
        Ok(text)
    }

    /// Reads a sequence of items, each of at least one byte.
    pub(super) fn many<T>(
        &mut self,
        field: &'static str,
        most: usize,
        mut one: impl FnMut(&mut Self) -> Result<T, WireError>,
    ) -> Result<Vec<T>, WireError> {
        let count = self.bounded(field, most as u64)?;
        if count > self.rest.len() as u64 {
            return Err(WireError::Short);
        }
        (0..count).map(|_| one(self)).collect()
    }

    pub(super) fn end(&self) -> Result<(), WireError> {
        if self.rest.is_empty() { Ok(()) } else { Err(WireError::Long) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn numbers_round_trip_in_the_computed_length(number: u64, short in 0u64..1_000) {
            for number in [number, short, u64::MAX, u64::MAX - number] {
                let mut bytes = Vec::new();
                put_number(&mut bytes, number);
                prop_assert_eq!(bytes.len(), number_len(number));
                let mut reader = Reader::new(&bytes);
                prop_assert_eq!(reader.number(), Ok(number));
                prop_assert_eq!(reader.end(), Ok(()));
            }
        }

        #[test]
        fn a_number_has_one_way_to_be_written(bytes in proptest::collection::vec(any::<u8>(), 0..12)) {
            let mut reader = Reader::new(&bytes);
            if let Ok(number) = reader.number() {
                let mut again = Vec::new();
                put_number(&mut again, number);
                prop_assert_eq!(&again[..], &bytes[..bytes.len() - reader.rest.len()]);
            }
        }
    }
}
