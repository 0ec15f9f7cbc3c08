//! A body that arrives in pieces.

use bytes::{Bytes, BytesMut};

/// The received part of a body. Nearly always it arrives in one piece, which is not copied. Several
/// pieces are copied, because each may keep a much larger buffer alive.
#[derive(Default)]
pub(crate) struct Pieces {
    whole: Bytes,
    joined: BytesMut,
}

impl Pieces {
    /// Adds a piece, unless the body would exceed `most` bytes. Returns whether it was added.
    pub(crate) fn take(&mut self, data: Bytes, most: usize) -> bool {
        if self.whole.len() + self.joined.len() + data.len() > most {
            return false;
        }
        if self.whole.is_empty() && self.joined.is_empty() {
            self.whole = data;
        } else {
            self.joined.extend_from_slice(&std::mem::take(&mut self.whole));
            self.joined.extend_from_slice(&data);
        }
        true
    }

    pub(crate) fn into_bytes(self) -> Bytes {
        if self.joined.is_empty() { self.whole } else { self.joined.freeze() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_joined_in_order_up_to_a_most() {
        let mut pieces = Pieces::default();
        let taken = ["ab", "", "cd", "e"].map(|piece| pieces.take(Bytes::from(piece), 4));
        assert_eq!(taken, [true, true, true, false]);
        assert_eq!(pieces.into_bytes(), "abcd");
    }

    #[test]
    fn one_piece_is_not_copied() {
        let one = Bytes::from(vec![1; 100]);
        let mut pieces = Pieces::default();
        assert!(pieces.take(one.clone(), 100));
        assert_eq!(pieces.into_bytes().as_ptr(), one.as_ptr());
    }
}
