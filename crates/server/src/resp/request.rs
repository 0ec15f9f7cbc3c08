//! Parses requests: RESP arrays of bulk strings, and lines as people type them.
//!
//! The parser keeps its position in an incomplete frame, so input that arrives in many pieces is
//! parsed once. Frames do not nest, so there is no recursion.

use std::fmt;

use memchr::memchr;

/// The most arguments of a request. Higher: longer lists of commands to `COMMAND INFO`; more memory
/// for a connection.
pub(super) const ARGUMENTS_MAX: usize = 1_024;

/// The longest argument. Higher: longer keys; more memory for a connection.
pub(super) const ARGUMENT_BYTES_MAX: usize = 64 << 10;

/// The largest request, counted as it is sent. Higher: more of the largest arguments; more memory
/// for a connection.
pub(super) const FRAME_BYTES_MAX: usize = 256 << 10;

/// The longest line of a request that is no array, as Redis has it.
pub(super) const LINE_BYTES_MAX: usize = 64 << 10;

/// Longest number before an array or a bulk string, in bytes: any 64-bit number with its sign, and
/// some room to report bad ones as such.
const NUMBER_BYTES_MAX: usize = 32;

/// Largest number of arguments from an unauthenticated client, as in Redis.
const STRANGER_ARGUMENTS_MAX: usize = 10;

/// Longest argument from an unauthenticated client, in bytes, as in Redis.
const STRANGER_ARGUMENT_BYTES_MAX: usize = 16 << 10;

const _: () = assert!(FRAME_BYTES_MAX <= u32::MAX as usize, "places in a frame are kept in 32 bits");

/// The end of a line.
const CRLF_BYTES: usize = 2;

/// How much a client is trusted with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trust {
    /// It is not authenticated.
    Stranger,
    /// It is authenticated, or the server is open.
    Known,
}

/// The reason why input is not a request. The start of the next request is then unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProtocolError {
    LineTooLong,
    UnbalancedQuotes,
    CountTooLong,
    InvalidCount,
    StrangerCount,
    LengthTooLong,
    InvalidLength,
    StrangerLength,
    NotABulkString(u8),
    FrameTooLarge,
}

impl fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LineTooLong => "too big inline request",
            Self::UnbalancedQuotes => "unbalanced quotes in request",
            Self::CountTooLong => "too big mbulk count string",
            Self::InvalidCount => "invalid multibulk length",
            Self::StrangerCount => "unauthenticated multibulk length",
            Self::LengthTooLong => "too big bulk count string",
            Self::InvalidLength => "invalid bulk length",
            Self::StrangerLength => "unauthenticated bulk length",
            Self::NotABulkString(got) => return write!(f, "expected '$', got '{}'", char::from(*got)),
            Self::FrameTooLarge => "too big request",
        })
    }
}

/// One request: a command and its arguments. An empty one has no effect.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request<'p> {
    bytes: &'p [u8],
    places: &'p [Place],
    /// How much of the input it was.
    pub(super) used: usize,
}

impl<'p> Request<'p> {
    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    #[inline]
    pub(super) fn get(&self, at: usize) -> Option<&'p [u8]> {
        self.places.get(at).map(|place| place.of(self.bytes))
    }

    /// The arguments from `first` on.
    pub(super) fn from(&self, first: usize) -> impl Iterator<Item = &'p [u8]> + use<'p> {
        let bytes = self.bytes;
        self.places.iter().skip(first).map(move |place| place.of(bytes))
    }

    /// Whether an argument is this word, in any case.
    pub(super) fn is(&self, at: usize, word: &str) -> bool {
        self.get(at).is_some_and(|argument| argument.eq_ignore_ascii_case(word.as_bytes()))
    }
}

/// Where an argument is, counted from the first byte of its frame.
#[derive(Clone, Copy, Debug)]
struct Place {
    start: u32,
    end: u32,
}

impl Place {
    /// Both are below [`FRAME_BYTES_MAX`].
    #[expect(clippy::cast_possible_truncation, reason = "frames are shorter than 32 bits can say")]
    const fn new(start: usize, end: usize) -> Self {
        Self { start: start as u32, end: end as u32 }
    }

    #[inline]
    fn of(self, bytes: &[u8]) -> &[u8] {
        bytes.get(self.start as usize..self.end as usize).unwrap_or_default()
    }
}

/// Reads the requests of one connection.
#[derive(Debug, Default)]
pub(super) struct Parser {
    /// The arguments of the present frame that were read.
    places: Vec<Place>,
    /// How many are still to come.
    missing: usize,
    /// Bytes of the present frame that were parsed; 0 between frames.
    at: usize,
    /// The arguments of a line, without their quotes.
    text: Vec<u8>,
}

impl Parser {
    /// The next request, if all of it is there. `input` begins where the last request ended, and
    /// only grows until this one is complete.
    #[inline]
    pub(super) fn parse<'p>(
        &'p mut self,
        input: &'p [u8],
        trust: Trust,
    ) -> Result<Option<Request<'p>>, ProtocolError> {
        let bytes = match input.first() {
            Some(b'*') if self.read_array(input, trust)? => input,
            Some(other) if *other != b'*' && self.read_line(input)? => &self.text,
            _ => return Ok(None),
        };
        let used = std::mem::take(&mut self.at);
        Ok(Some(Request { bytes, places: &self.places, used }))
    }

    /// Reads as much of an array as is there; whether that is all.
    #[inline]
    fn read_array(&mut self, input: &[u8], trust: Trust) -> Result<bool, ProtocolError> {
        if self.at == 0 && !self.read_count(input, trust)? {
            return Ok(false);
        }
        while self.missing > 0 {
            let rest = input.get(self.at..).unwrap_or_default();
            match rest.first() {
                None => return Ok(false),
                Some(b'$') => {}
                Some(other) => return Err(ProtocolError::NotABulkString(*other)),
            }
            let (length, used) = match number(&rest[1..]) {
                Number::Is { value, used } => (value, used),
                Number::Partial => return Ok(false),
                Number::Bad => return Err(ProtocolError::InvalidLength),
                Number::TooLong => return Err(ProtocolError::LengthTooLong),
            };
            let start = self.at + 1 + used;
            let end = start + argument_length(length, trust)?;
            if end + CRLF_BYTES > FRAME_BYTES_MAX {
                return Err(ProtocolError::FrameTooLarge);
            }
            // As in Redis, the two bytes after the argument are skipped without a check.
            if input.len() < end + CRLF_BYTES {
                return Ok(false);
            }
            self.places.push(Place::new(start, end));
            self.at = end + CRLF_BYTES;
            self.missing -= 1;
        }
        Ok(true)
    }

    /// Reads how many arguments an array has.
    #[inline]
    fn read_count(&mut self, input: &[u8], trust: Trust) -> Result<bool, ProtocolError> {
        let (count, used) = match number(&input[1..]) {
            Number::Is { value, used } => (value, used),
            Number::Partial => return Ok(false),
            Number::Bad => return Err(ProtocolError::InvalidCount),
            Number::TooLong => return Err(ProtocolError::CountTooLong),
        };
        self.places.clear();
        // A negative count means an empty array.
        self.missing = usize::try_from(count).unwrap_or(0);
        if self.missing > ARGUMENTS_MAX {
            return Err(ProtocolError::InvalidCount);
        }
        if self.missing > STRANGER_ARGUMENTS_MAX && trust == Trust::Stranger {
            return Err(ProtocolError::StrangerCount);
        }
        self.at = 1 + used;
        Ok(true)
    }

    /// Reads a line; whether all of it is there.
    fn read_line(&mut self, input: &[u8]) -> Result<bool, ProtocolError> {
        // The part searched before contains no line end.
        let looked_at = self.at;
        let Some(end) = memchr(b'\n', &input[looked_at..]).map(|end| looked_at + end) else {
            self.at = input.len();
            return if self.at > LINE_BYTES_MAX { Err(ProtocolError::LineTooLong) } else { Ok(false) };
        };
        if end > LINE_BYTES_MAX {
            return Err(ProtocolError::LineTooLong);
        }
        let line = &input[..end];
        self.split(line.strip_suffix(b"\r").unwrap_or(line))?;
        self.at = end + 1;
        Ok(true)
    }

    /// Splits a line into words. Words may be quoted, as in a shell.
    fn split(&mut self, line: &[u8]) -> Result<(), ProtocolError> {
        self.places.clear();
        self.text.clear();
        let mut rest = past_spaces(line);
        while !rest.is_empty() {
            let start = self.text.len();
            rest = past_spaces(word(rest, &mut self.text)?);
            if self.places.len() == ARGUMENTS_MAX {
                return Err(ProtocolError::InvalidCount);
            }
            self.places.push(Place::new(start, self.text.len()));
        }
        Ok(())
    }
}

/// The length of an argument that is announced as `length`.
#[inline]
fn argument_length(length: i64, trust: Trust) -> Result<usize, ProtocolError> {
    match usize::try_from(length) {
        Ok(length) if length > ARGUMENT_BYTES_MAX => Err(ProtocolError::InvalidLength),
        Ok(length) if length > STRANGER_ARGUMENT_BYTES_MAX && trust == Trust::Stranger => {
            Err(ProtocolError::StrangerLength)
        }
        Ok(length) => Ok(length),
        Err(_) => Err(ProtocolError::InvalidLength),
    }
}

enum Number {
    /// The number, and how long it was with its end.
    Is { value: i64, used: usize },
    /// Its end is not there yet.
    Partial,
    /// It is not a number.
    Bad,
    /// It has no end where every number has.
    TooLong,
}

/// Reads a number and the end of its line.
#[inline]
fn number(bytes: &[u8]) -> Number {
    // Nearly all have one digit or two.
    match *bytes {
        [ones @ b'0'..=b'9', b'\r', _, ..] => Number::Is { value: i64::from(ones - b'0'), used: 3 },
        [tens @ b'1'..=b'9', ones @ b'0'..=b'9', b'\r', _, ..] => {
            Number::Is { value: 10 * i64::from(tens - b'0') + i64::from(ones - b'0'), used: 4 }
        }
        _ => long_number(bytes),
    }
}

fn long_number(bytes: &[u8]) -> Number {
    let Some(end) = bytes.iter().take(NUMBER_BYTES_MAX + 1).position(|byte| *byte == b'\r') else {
        return if bytes.len() > NUMBER_BYTES_MAX { Number::TooLong } else { Number::Partial };
    };
    if bytes.len() < end + CRLF_BYTES {
        return Number::Partial;
    }
    match strict(&bytes[..end]) {
        Some(value) => Number::Is { value, used: end + CRLF_BYTES },
        None => Number::Bad,
    }
}

/// Parses a number without surrounding characters and without leading zeros.
pub(super) fn strict(digits: &[u8]) -> Option<i64> {
    let unsigned = digits.strip_prefix(b"-").unwrap_or(digits);
    match unsigned {
        b"0" if digits == b"0" => Some(0),
        [b'1'..=b'9', ..] => std::str::from_utf8(digits).ok()?.parse().ok(),
        _ => None,
    }
}

/// Reads one word of a line into `text`, and returns the rest of the line.
fn word<'l>(line: &'l [u8], text: &mut Vec<u8>) -> Result<&'l [u8], ProtocolError> {
    let mut rest = line;
    loop {
        match rest {
            [b'"', quoted @ ..] => return double_quoted(quoted, text),
            [b'\'', quoted @ ..] => return single_quoted(quoted, text),
            [] => return Ok(rest),
            [byte, ..] if is_space(*byte) => return Ok(rest),
            [byte, after @ ..] => {
                text.push(*byte);
                rest = after;
            }
        }
    }
}

fn double_quoted<'l>(mut rest: &'l [u8], text: &mut Vec<u8>) -> Result<&'l [u8], ProtocolError> {
    loop {
        let (byte, after) = match rest {
            [b'"', after @ ..] => return after_quote(after),
            [b'\\', b'x', high, low, after @ ..] if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => {
                (16 * hex(*high) + hex(*low), after)
            }
            [b'\\', escaped, after @ ..] => (escape(*escaped), after),
            [byte, after @ ..] => (*byte, after),
            [] => return Err(ProtocolError::UnbalancedQuotes),
        };
        text.push(byte);
        rest = after;
    }
}

fn single_quoted<'l>(mut rest: &'l [u8], text: &mut Vec<u8>) -> Result<&'l [u8], ProtocolError> {
    loop {
        let (byte, after) = match rest {
            [b'\'', after @ ..] => return after_quote(after),
            [b'\\', b'\'', after @ ..] => (b'\'', after),
            [byte, after @ ..] => (*byte, after),
            [] => return Err(ProtocolError::UnbalancedQuotes),
        };
        text.push(byte);
        rest = after;
    }
}

/// A quote ends its word.
fn after_quote(rest: &[u8]) -> Result<&[u8], ProtocolError> {
    match rest.first() {
        Some(byte) if !is_space(*byte) => Err(ProtocolError::UnbalancedQuotes),
        _ => Ok(rest),
    }
}

const fn escape(byte: u8) -> u8 {
    match byte {
        b'n' => b'\n',
        b'r' => b'\r',
        b't' => b'\t',
        b'b' => 0x08,
        b'a' => 0x07,
        other => other,
    }
}

const fn hex(digit: u8) -> u8 {
    match digit {
        b'0'..=b'9' => digit - b'0',
        _ => (digit | 0x20) - b'a' + 10,
    }
}

fn past_spaces(line: &[u8]) -> &[u8] {
    let word = line.iter().position(|byte| !is_space(*byte)).unwrap_or(line.len());
    &line[word..]
}

/// Whether C counts the byte as white space: one more byte than in Rust.
const fn is_space(byte: u8) -> bool {
    byte.is_ascii_whitespace() || byte == 0x0b
}

/// Parses all requests in `bytes`, which arrive `piece` by piece. Returns their arguments, and the
/// error after them.
pub(super) fn read_all(
    bytes: &[u8],
    piece: usize,
    trust: Trust,
) -> (Vec<Vec<Vec<u8>>>, Option<ProtocolError>) {
    let (mut parser, mut requests) = (Parser::default(), Vec::new());
    let (mut at, mut arrived) = (0, 0);
    loop {
        match parser.parse(&bytes[at..arrived], trust) {
            Ok(Some(request)) => {
                at += request.used;
                requests.push(request.from(0).map(<[u8]>::to_vec).collect());
            }
            Ok(None) if arrived == bytes.len() => return (requests, None),
            Ok(None) => arrived = bytes.len().min(arrived + piece.max(1)),
            Err(error) => return (requests, Some(error)),
        }
    }
}
