//! Writes replies in the protocol that the client chose.

/// Which replies a client understands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Protocol {
    #[default]
    Resp2,
    Resp3,
}

impl Protocol {
    /// Its number.
    pub(super) const fn number(self) -> i64 {
        match self {
            Self::Resp2 => 2,
            Self::Resp3 => 3,
        }
    }
}

/// Where replies are written.
#[derive(Debug)]
pub(super) struct Reply<'o> {
    out: &'o mut Vec<u8>,
    protocol: Protocol,
}

impl<'o> Reply<'o> {
    pub(super) fn new(out: &'o mut Vec<u8>, protocol: Protocol) -> Self {
        Self { out, protocol }
    }

    /// How much is written so far.
    pub(super) fn len(&self) -> usize {
        self.out.len()
    }

    /// Changes the protocol of the next values.
    pub(super) fn speak(&mut self, protocol: Protocol) {
        self.protocol = protocol;
    }

    /// A status, which is one line.
    pub(super) fn status(&mut self, text: &str) {
        self.line(b'+', text.as_bytes());
    }

    pub(super) fn ok(&mut self) {
        self.status("OK");
    }

    /// Writes an error. It stays on one line, even if it repeats a client's text.
    pub(super) fn error(&mut self, text: &[u8]) {
        let is_end = |byte: &u8| matches!(byte, b'\r' | b'\n');
        let from = text.iter().position(|byte| !is_end(byte)).unwrap_or(text.len());
        let to = text.iter().rposition(|byte| !is_end(byte)).map_or(from, |last| last + 1);
        self.out.push(b'-');
        self.out.extend(text[from..to].iter().map(|byte| if is_end(byte) { b' ' } else { *byte }));
        self.out.extend_from_slice(b"\r\n");
    }

    #[inline]
    pub(super) fn integer(&mut self, value: i64) {
        match u8::try_from(value) {
            Ok(digit @ 0..=9) => self.digit(b':', digit),
            _ => self.line(b':', itoa::Buffer::new().format(value).as_bytes()),
        }
    }

    /// An array of integers.
    #[inline]
    pub(super) fn integers<const N: usize>(&mut self, values: [i64; N]) {
        self.array(N);
        for value in values {
            self.integer(value);
        }
    }

    pub(super) fn bulk(&mut self, bytes: &[u8]) {
        self.head(b'$', bytes.len());
        self.out.extend_from_slice(bytes);
        self.out.extend_from_slice(b"\r\n");
    }

    /// A text for people.
    pub(super) fn verbatim(&mut self, text: &str) {
        const FORMAT: &[u8] = b"txt:";
        match self.protocol {
            Protocol::Resp2 => self.bulk(text.as_bytes()),
            Protocol::Resp3 => {
                self.head(b'=', FORMAT.len() + text.len());
                self.out.extend_from_slice(FORMAT);
                self.out.extend_from_slice(text.as_bytes());
                self.out.extend_from_slice(b"\r\n");
            }
        }
    }

    pub(super) fn null(&mut self) {
        self.out.extend_from_slice(match self.protocol {
            Protocol::Resp2 => b"$-1\r\n",
            Protocol::Resp3 => b"_\r\n",
        });
    }

    /// As many values follow.
    #[inline]
    pub(super) fn array(&mut self, length: usize) {
        self.head(b'*', length);
    }

    /// As many values follow, in no order.
    pub(super) fn set(&mut self, length: usize) {
        let mark = if self.protocol == Protocol::Resp3 { b'~' } else { b'*' };
        self.head(mark, length);
    }

    /// As many names and values follow.
    pub(super) fn map(&mut self, length: usize) {
        match self.protocol {
            Protocol::Resp2 => self.head(b'*', 2 * length),
            Protocol::Resp3 => self.head(b'%', length),
        }
    }

    #[inline]
    fn head(&mut self, mark: u8, length: usize) {
        match u8::try_from(length) {
            Ok(digit @ 0..=9) => self.digit(mark, digit),
            _ => self.line(mark, itoa::Buffer::new().format(length).as_bytes()),
        }
    }

    /// A number of one digit, as half of all are: written in one go.
    #[inline]
    fn digit(&mut self, mark: u8, digit: u8) {
        self.out.extend_from_slice(&[mark, b'0' + digit, b'\r', b'\n']);
    }

    #[inline]
    fn line(&mut self, mark: u8, text: &[u8]) {
        self.out.push(mark);
        self.out.extend_from_slice(text);
        self.out.extend_from_slice(b"\r\n");
    }
}
