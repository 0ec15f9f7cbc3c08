//! A body that arrives in pieces.

use bytes::Bytes;

/// A buffer that has no room for a piece grows by one part in so many, at least by the piece.
/// Higher: less unused memory; more copies of a body that arrives in many pieces.
const GROWTH_PART: usize = 4;

/// The received part of a body. Nearly always it arrives in one piece, which is not copied. Several
/// pieces are copied, because each may keep a much larger buffer alive.
#[derive(Default)]
pub(crate) struct Pieces {
    whole: Bytes,
    joined: Vec<u8>,
}

impl Pieces {
    /// Adds a piece, unless the body would exceed `most` bytes. Returns whether it was added.
    pub(crate) fn take(&mut self, data: Bytes, most: usize) -> bool {
        if self.len() + data.len() > most {
            return false;
        }
        if self.len() == 0 {
            self.whole = data;
        } else {
            append(&mut self.joined, &std::mem::take(&mut self.whole));
            append(&mut self.joined, &data);
        }
        true
    }

    /// The received bytes.
    pub(crate) fn len(&self) -> usize {
        self.whole.len() + self.joined.len()
    }

    pub(crate) fn into_bytes(self) -> Bytes {
        if self.joined.is_empty() { self.whole } else { self.joined.into() }
    }
}

/// Appends a piece to a buffer. The buffer grows with the bytes that arrived, so it takes little
/// more memory than they do, whatever length was announced.
pub(crate) fn append(buffer: &mut Vec<u8>, data: &[u8]) {
    if buffer.capacity() - buffer.len() < data.len() {
        buffer.reserve_exact(data.len().max(buffer.len() / GROWTH_PART));
    }
    buffer.extend_from_slice(data);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_joined_in_order_up_to_a_most() {
        let mut pieces = Pieces::default();
        let taken = ["ab", "", "cd", "e"].map(|piece| pieces.take(Bytes::from(piece), 4));
        assert_eq!((taken, pieces.len()), ([true, true, true, false], 4));
        assert_eq!(pieces.into_bytes(), "abcd");
    }

    #[test]
    fn one_piece_is_not_copied() {
        let one = Bytes::from(vec![1; 100]);
        let mut pieces = Pieces::default();
        assert!(pieces.take(one.clone(), 100));
        assert_eq!(pieces.into_bytes().as_ptr(), one.as_ptr());
    }

    #[test]
    fn a_buffer_is_little_larger_than_its_content() {
        let mut buffer = Vec::new();
        for _ in 0..1_000 {
            append(&mut buffer, &[1; 700]);
            let excess = buffer.capacity() - buffer.len();
            assert!(excess <= buffer.len() / GROWTH_PART, "{excess} beside {}", buffer.len());
        }
        assert_eq!(buffer.len(), 700_000);
    }
}
