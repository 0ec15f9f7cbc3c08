//! A connection that stays open, with one timeout for each reply and each write.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::clients::now;

/// A stream of replies. A reply that arrives in parts has one deadline for all of them.
#[derive(Debug)]
pub(crate) struct ReplyStream {
    stream: TcpStream,
    time_max: Duration,
    /// Of the current reply; `None` before its first read.
    deadline: Option<Instant>,
    /// The socket's read timeout, to set it only if it changes.
    read_timeout: Duration,
}

impl ReplyStream {
    /// Connects. `time_max` is the timeout of the connection, of each reply and of each write.
    pub(crate) fn connect(address: SocketAddr, time_max: Duration) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, time_max).map_err(timeout)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(time_max))?;
        stream.set_write_timeout(Some(time_max))?;
        Ok(Self { stream, time_max, deadline: None, read_timeout: time_max })
    }

    /// Starts the timeout of the next reply at its first read.
    pub(crate) fn begin_reply(&mut self) {
        self.deadline = None;
    }
}

impl Read for ReplyStream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let time_left = if let Some(deadline) = self.deadline {
            deadline.saturating_duration_since(now())
        } else {
            self.deadline = Some(now() + self.time_max);
            self.time_max
        };
        if time_left.is_zero() {
            return Err(timeout(ErrorKind::TimedOut.into()));
        }
        if time_left != self.read_timeout {
            self.stream.set_read_timeout(Some(time_left))?;
            self.read_timeout = time_left;
        }
        self.stream.read(bytes).map_err(timeout)
    }
}

impl Write for ReplyStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.write(bytes).map_err(timeout)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// Names a timeout, which the system reports as a resource that is temporarily unavailable.
fn timeout(error: io::Error) -> io::Error {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            io::Error::new(ErrorKind::TimedOut, "the server did not answer in time")
        }
        _ => error,
    }
}

pub(crate) fn closed() -> io::Error {
    io::Error::new(ErrorKind::UnexpectedEof, "the server closed the connection")
}

pub(crate) fn invalid(problem: impl Into<String>) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, problem.into())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn all_reads_of_a_reply_share_one_timeout() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let time_max = Duration::from_mins(1);
        let mut replies = ReplyStream::connect(listener.local_addr().unwrap(), time_max).unwrap();
        assert_eq!(replies.stream.write_timeout().unwrap(), Some(time_max));
        let (mut server, _) = listener.accept().unwrap();
        server.write_all(b"one").unwrap();
        let mut byte = [0];
        replies.read_exact(&mut byte).unwrap();
        // Most of the time has passed: the next read gets the rest only.
        replies.deadline = Some(now() + Duration::from_secs(10));
        replies.read_exact(&mut byte).unwrap();
        assert!(replies.stream.read_timeout().unwrap() <= Some(Duration::from_secs(10)));
        replies.deadline = Some(now());
        let error = replies.read_exact(&mut byte).unwrap_err();
        assert_eq!(error.to_string(), "the server did not answer in time");
        replies.begin_reply();
        replies.read_exact(&mut byte).unwrap();
        assert_eq!(replies.stream.read_timeout().unwrap(), Some(time_max), "of the next reply");
    }
}
