//! Frames on a stream of bytes.

use std::fmt;
use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::time::timeout;

use crate::wire::{Frame, PREFIX_BYTES, Refusal, WireError};

/// Both directions of a connection.
pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Sync + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Sync + Unpin> Stream for T {}

/// Why a connection ends.
#[derive(Debug)]
pub(super) enum ConnectionError {
    /// The network or TLS failed.
    Io(io::Error),
    /// The other side took too long.
    Late(&'static str),
    /// It sent bytes that are no valid frame.
    Wire(WireError),
    /// It sent a frame that is too long.
    TooLong(usize),
    /// It sent a frame that does not belong here.
    Unexpected,
    /// It is another region than the one that was looked for.
    WrongRegion(String),
    /// It turned us away.
    Refused(Refusal),
    /// We turned it away.
    Turned(Refusal),
    /// An address that only encryption may reach.
    Plain,
    /// There is no such address.
    NoAddress,
    /// It lost its slot to newer connections before it completed its greeting.
    Crowded,
}

impl fmt::Display for ConnectionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => write!(f, "{error}"),
            Self::Late(operation) => write!(f, "timeout: {operation}"),
            Self::Wire(error) => write!(f, "{error}"),
            Self::TooLong(given) => write!(f, "a frame of {given} bytes is longer than allowed"),
            Self::Unexpected => f.write_str("the peer sent an unexpected frame"),
            Self::WrongRegion(name) => {
                write!(f, "the peer is region {name:?}: correct its configured address")
            }
            Self::Refused(refusal) => write!(f, "the peer refused the connection: {refusal}"),
            Self::Turned(refusal) => write!(f, "{refusal}"),
            Self::Plain => {
                f.write_str("the peer is on another machine: set `peer_cert`, `peer_key` and `peer_ca`")
            }
            Self::NoAddress => f.write_str("the host name of the peer has no address"),
            Self::Crowded => f.write_str("newer connections have taken the slot of this connection"),
        }
    }
}

impl From<io::Error> for ConnectionError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<WireError> for ConnectionError {
    fn from(error: WireError) -> Self {
        Self::Wire(error)
    }
}

/// Runs a future with a timeout.
pub(super) async fn within<T>(
    operation: &'static str,
    time_max: Duration,
    doing: impl Future<Output = Result<T, ConnectionError>>,
) -> Result<T, ConnectionError> {
    timeout(time_max, doing).await.unwrap_or(Err(ConnectionError::Late(operation)))
}

/// Writes a frame; how many bytes that were.
pub(super) async fn write(
    stream: &mut (impl AsyncWrite + Unpin),
    frame: &Frame,
) -> Result<u64, ConnectionError> {
    let bytes = frame.encode();
    stream.write_all(&bytes).await?;
    stream.flush().await?;
    Ok(bytes.len() as u64)
}

/// Reads a frame of at most `bytes_max`, and how many bytes it was.
pub(super) async fn read(
    stream: &mut (impl AsyncRead + Unpin),
    bytes_max: usize,
) -> Result<(Frame, u64), ConnectionError> {
    let mut prefix = [0; PREFIX_BYTES];
    stream.read_exact(&mut prefix).await?;
    let len = u32::from_be_bytes(prefix);
    let given = usize::try_from(len).unwrap_or(usize::MAX);
    if given > bytes_max {
        return Err(ConnectionError::TooLong(given));
    }
    // Memory grows with the bytes received, not with the announced length.
    let mut bytes = Vec::new();
    (&mut *stream).take(u64::from(len)).read_to_end(&mut bytes).await?;
    if bytes.len() < given {
        return Err(ConnectionError::Wire(WireError::Short));
    }
    Ok((Frame::decode(&bytes)?, (PREFIX_BYTES + given) as u64))
}
