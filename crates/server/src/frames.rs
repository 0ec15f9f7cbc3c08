//! Follows the frames of an HTTP/2 client, to know whether one of them, or the head of a call, has
//! arrived in part. HTTP/2 buffers both, and has no timeout for the rest.

/// Length of the text with which a client begins.
const PREFACE_BYTES: usize = 24;
const HEADER_BYTES: usize = 9;
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 4;

/// The place in the frames of a client.
#[derive(Debug)]
pub(crate) struct FrameWalker {
    preface_missing: usize,
    /// The header of the present frame, as far as it has arrived.
    header: [u8; HEADER_BYTES],
    header_bytes: usize,
    payload_missing: usize,
    /// Whether the head of a call continues in the next frame.
    in_head: bool,
    held: usize,
}

impl FrameWalker {
    pub(crate) const fn new() -> Self {
        Self {
            preface_missing: PREFACE_BYTES,
            header: [0; HEADER_BYTES],
            header_bytes: 0,
            payload_missing: 0,
            in_head: false,
            held: 0,
        }
    }

    /// Bytes of the frame or head that has arrived in part.
    pub(crate) const fn held(&self) -> usize {
        self.held
    }

    /// Follows `bytes`; whether a frame or a head has ended among them.
    pub(crate) fn walk(&mut self, mut bytes: &[u8]) -> bool {
        let mut has_ended = false;
        let preface = self.preface_missing.min(bytes.len());
        self.preface_missing -= preface;
        self.held += preface;
        bytes = &bytes[preface..];
        while !bytes.is_empty() {
            let used =
                if self.header_bytes < HEADER_BYTES { self.read_header(bytes) } else { self.skip(bytes) };
            self.held += used;
            bytes = &bytes[used..];
            if self.header_bytes == HEADER_BYTES && self.payload_missing == 0 {
                self.header_bytes = 0;
                if !self.in_head {
                    self.held = 0;
                    has_ended = true;
                }
            }
        }
        has_ended
    }

    fn read_header(&mut self, bytes: &[u8]) -> usize {
        let used = bytes.len().min(HEADER_BYTES - self.header_bytes);
        self.header[self.header_bytes..][..used].copy_from_slice(&bytes[..used]);
        self.header_bytes += used;
        if self.header_bytes == HEADER_BYTES {
            let [a, b, c, kind, flags, ..] = self.header;
            self.payload_missing = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
            if kind == HEADERS || kind == CONTINUATION {
                self.in_head = flags & END_HEADERS == 0;
            }
        }
        used
    }

    fn skip(&mut self, bytes: &[u8]) -> usize {
        let used = bytes.len().min(self.payload_missing);
        self.payload_missing -= used;
        used
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: u8 = 4;

    fn frame(kind: u8, flags: u8, payload: usize) -> Vec<u8> {
        let length = u32::try_from(payload).expect("short").to_be_bytes();
        let mut frame = length[1..].to_vec();
        frame.extend([kind, flags, 0, 0, 0, 1]);
        frame.resize(HEADER_BYTES + payload, b'x');
        frame
    }

    /// Follows `bytes` in pieces; how many ended a frame, and how many bytes are held then.
    fn walk(bytes: &[u8], piece: usize) -> (usize, usize) {
        let mut walker = FrameWalker::new();
        let ended = bytes.chunks(piece).filter(|piece| walker.walk(piece)).count();
        (ended, walker.held())
    }

    #[test]
    fn partial_frames_and_heads_are_held() {
        let preface = [b'P'; PREFACE_BYTES];
        let begun = [&preface[..], &frame(SETTINGS, 0, 12)].concat();
        assert_eq!(walk(&preface, 7), (0, 24), "a greeting has settings behind it");
        assert_eq!(walk(&begun, 5), (1, 0));
        let call = [&begun[..], &frame(HEADERS, END_HEADERS, 30), &frame(0, 1, 40_000)].concat();
        for piece in [1, 2, 9, 100, 1 << 20] {
            assert_eq!(walk(&call, piece).1, 0);
            assert_eq!(walk(&call[..call.len() - 1], piece).1, 40_008);
            let in_head = [&begun[..], &frame(HEADERS, 0, 30), &frame(CONTINUATION, 0, 50)].concat();
            assert_eq!(walk(&in_head, piece).1, 98);
            let head = [&in_head[..], &frame(CONTINUATION, END_HEADERS, 0)].concat();
            assert_eq!(walk(&head, piece).1, 0);
        }
    }
}
