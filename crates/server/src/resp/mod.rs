//! RESP.

use std::io;

use tokio::io::{AsyncRead, AsyncWrite};

use crate::worker::Context;

/// Answers the commands of one connection.
pub(crate) async fn serve<S>(_stream: S, _context: Context) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin + 'static,
{
    Ok(())
}
