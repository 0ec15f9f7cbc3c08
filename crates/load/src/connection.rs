//! A connection that stays open, with a timeout for each reply.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

pub(crate) fn connect(address: SocketAddr, time_max: Duration) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, time_max).map_err(timeout)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(time_max))?;
    Ok(stream)
}

/// Names a timeout, which the system reports as a resource that is temporarily unavailable.
pub(crate) fn timeout(error: io::Error) -> io::Error {
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
