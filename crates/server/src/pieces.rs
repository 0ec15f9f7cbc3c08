//! A body that comes in pieces.

use bytes::{Bytes, BytesMut};

/// What has come of a body. Nearly always, all comes at once, and is not copied; what comes in several pieces is, since each
/// of them may hold on to much more.
#[derive(Default)]
pub(crate) struct Pieces {
    whole: Bytes,
    joined: BytesMut,
}

impl Pieces {
    /// Takes one more, unless that makes more than `most` bytes. Whether it was taken.
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
