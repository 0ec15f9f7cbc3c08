//! RESP, the protocol of Redis clients: `CL.THROTTLE`, and the commands that clients send on
//! connect.
//!
//! A connection reads the available bytes, answers all requests in them, and writes the replies at
//! once. It reads no more until the client has read them, so its memory is bounded. An idle
//! connection holds next to nothing, because reads and writes use buffers of the worker.

mod client;
mod client_state;
mod command;
mod connection;
mod dialogue;
mod info;
mod pending;
mod reply;
mod request;
mod throttle;

#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context as Task, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use self::dialogue::{Dialogue, Next, REPLY_BYTES_MAX};
use self::pending::PendingReplies;
use crate::guard::ConnectionState;
use crate::pieces::append;
use crate::shared::Shared;
use crate::worker::{Context, woken_by_stop};

/// How much is read in one go. Higher: longer pipelines decided as one; more that a single client
/// may take of a worker's time before it is the turn of another.
const READ_BYTES: usize = 16 << 10;

/// A connection that had a part of a request keeps this much room for the next.
const KEPT_BYTES_MAX: usize = 1 << 10;

/// Capacity that a connection keeps for its next reply, in bytes: enough for one at a time. Higher:
/// fewer allocations for clients that send several; more memory for each idle connection.
const KEPT_ANSWER_BYTES_MAX: usize = 128;

/// The read and write buffers of a worker, for the connection that is ready.
struct Buffers {
    read: Box<[u8]>,
    write: Vec<u8>,
}

impl Buffers {
    fn new() -> Self {
        Self { read: vec![0; READ_BYTES].into(), write: Vec::with_capacity(2 * REPLY_BYTES_MAX) }
    }
}

thread_local! {
    static BUFFERS: RefCell<Buffers> = RefCell::new(Buffers::new());
}

/// Serves the commands of one connection.
pub(crate) async fn serve<S>(stream: S, state: Rc<ConnectionState>, context: Context) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin + 'static,
{
    let mut connection = Connection::new(stream, state, Arc::clone(&context.shared));
    woken_by_stop(&context.stop, |task| connection.poll(task)).await
}

struct Connection<S> {
    stream: S,
    state: Rc<ConnectionState>,
    shared: Arc<Shared>,
    dialogue: Dialogue,
    /// Unanswered input: a part of a request, or requests that wait until the client has read its
    /// replies.
    pending: Vec<u8>,
    /// Whether `pending` contains complete requests.
    stalled: bool,
    /// Replies that wait for the origin.
    later: Option<PendingReplies>,
    /// Replies that the client has not read yet.
    unsent: Vec<u8>,
    /// Whether the last write is not flushed yet.
    unflushed: bool,
    closing: bool,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Connection<S> {
    fn new(stream: S, state: Rc<ConnectionState>, shared: Arc<Shared>) -> Self {
        let dialogue = Dialogue::new(Arc::clone(&shared));
        Self {
            stream,
            state,
            shared,
            dialogue,
            pending: Vec::new(),
            stalled: false,
            later: None,
            unsent: Vec::new(),
            unflushed: false,
            closing: false,
        }
    }

    fn poll(&mut self, task: &mut Task<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(self.poll_later(task));
            ready!(self.poll_unsent(task))?;
            // Requests that were read are answered before a stop.
            if self.closing || !self.stalled && !self.shared.node.is_ready() {
                return Pin::new(&mut self.stream).poll_shutdown(task);
            }
            ready!(BUFFERS.with_borrow_mut(|buffers| self.poll_turn(task, buffers)))?;
        }
    }

    /// Waits for replies that need the origin. Later requests wait too.
    fn poll_later(&mut self, task: &mut Task<'_>) -> Poll<()> {
        if let Some(later) = &mut self.later {
            self.unsent = ready!(later.as_mut().poll(task));
            self.later = None;
        }
        Poll::Ready(())
    }

    /// Writes replies that the client did not accept at once.
    fn poll_unsent(&mut self, task: &mut Task<'_>) -> Poll<io::Result<()>> {
        if !self.unsent.is_empty() {
            let mut unsent = std::mem::take(&mut self.unsent);
            let written = self.poll_write(task, &unsent)?;
            unsent.drain(..written);
            if !unsent.is_empty() {
                self.unsent = unsent;
                return Poll::Pending;
            }
            if unsent.capacity() <= KEPT_ANSWER_BYTES_MAX {
                self.unsent = unsent;
            }
        }
        if self.unflushed {
            ready!(Pin::new(&mut self.stream).poll_flush(task))?;
            self.unflushed = false;
        }
        Poll::Ready(Ok(()))
    }

    /// Reads once, answers all requests, writes once.
    fn poll_turn(&mut self, task: &mut Task<'_>, buffers: &mut Buffers) -> Poll<io::Result<()>> {
        let Buffers { read, write } = buffers;
        let mut fresh = 0;
        if !self.stalled {
            let mut into = ReadBuf::new(read);
            if let Err(error) = ready!(Pin::new(&mut self.stream).poll_read(task, &mut into)) {
                return Poll::Ready(self.refuse_rest(error));
            }
            fresh = into.filled().len();
            if fresh == 0 {
                self.closing = true;
                return Poll::Ready(Ok(()));
            }
        }
        write.clear();
        let next = self.answer(&read[..fresh], write);
        self.stalled = next == Next::Rest;
        self.closing = next == Next::Close;
        self.later = self.dialogue.later(write);
        if self.later.is_some() {
            return Poll::Ready(Ok(()));
        }
        let written = self.poll_write(task, write)?;
        self.unsent.extend_from_slice(&write[written..]);
        if fresh == READ_BYTES {
            // There may be much more: others first.
            task.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(Ok(()))
    }

    /// Ends the connection with an error in place of a request that has arrived in part.
    fn refuse_rest(&mut self, error: io::Error) -> io::Result<()> {
        let Some(failure) = self.state.partial.take_failure() else { return Err(error) };
        self.pending = Vec::new();
        self.state.partial.set(0);
        self.unsent.extend_from_slice(format!("-ERR {failure}\r\n").as_bytes());
        self.closing = true;
        Ok(())
    }

    /// Answers the requests in `pending` and in the fresh input.
    fn answer(&mut self, fresh: &[u8], out: &mut Vec<u8>) -> Next {
        let next = if self.pending.is_empty() {
            let (used, next) = self.dialogue.answer(fresh, out);
            append(&mut self.pending, &fresh[used..]);
            next
        } else {
            append(&mut self.pending, fresh);
            let (used, next) = self.dialogue.answer(&self.pending, out);
            if used > 0 {
                self.pending.drain(..used);
                self.pending.shrink_to(KEPT_BYTES_MAX);
            }
            next
        };
        let tenant = self.dialogue.tenant();
        self.state.tenant.set(tenant);
        if let (Some(tenant), false) = (tenant, self.pending.is_empty()) {
            self.state.partial.belongs_to(tenant);
        }
        self.state.partial.set(self.pending.len());
        next
    }

    /// Writes as much as the client takes; how much that was.
    fn poll_write(&mut self, task: &mut Task<'_>, bytes: &[u8]) -> io::Result<usize> {
        let mut written = 0;
        while written < bytes.len() {
            match Pin::new(&mut self.stream).poll_write(task, &bytes[written..]) {
                Poll::Ready(Ok(0)) => return Err(io::ErrorKind::WriteZero.into()),
                Poll::Ready(Ok(more)) => written += more,
                Poll::Ready(Err(error)) => return Err(error),
                Poll::Pending => break,
            }
        }
        self.unflushed |= written > 0;
        Ok(written)
    }
}

/// Parses `bytes` as requests, for fuzz tests.
///
/// # Panics
/// If the result depends on the pieces in which they arrive.
pub(crate) fn read_requests(bytes: &[u8]) {
    use self::request::Trust;
    for trust in [Trust::Stranger, Trust::Known] {
        let whole = request::read_all(bytes, bytes.len(), trust);
        let halves = request::read_all(bytes, bytes.len().div_ceil(2), trust);
        assert!(whole == halves, "what was read depends on how it arrived");
    }
}
