//! A connection with timeouts for idle and slow clients. It also lets other connections read before
//! it writes.
//!
//! A connection is busy while a request has arrived in part or waits for its response, and idle
//! otherwise. While busy, the whole request must arrive, and the client must read the response,
//! within the request timeout. The first byte of a connection has the same time. Later, an idle
//! connection may stay silent for the idle timeout, unless its listener is full: then the listener
//! evicts the one that has been idle for longest. All surfaces use this mechanism. It reads no
//! clock while data flows.
//!
//! The connection holds the bytes of an incomplete request. They are charged to the memory for
//! requests before the next read, so a request that arrives with one read is never charged.
//!
//! A response is written one turn after its request was read, when every other readable connection
//! has had its turn. Written at once, it would wake the client for a single response, and its next
//! request would wake this worker for a single one. With the delay, both get several at a time.

use std::cell::Cell;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

use crate::auth::TenantIndex;
use crate::frames::FrameWalker;
use crate::load::{pulse, pulses, time_of};
use crate::metrics::Metrics;
use crate::request_memory::{PartialRequest, ReadFailure};
use crate::slots::Slot;
use crate::time_share;

/// How long a client may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClientTimeouts {
    /// Between requests.
    pub(crate) idle: Duration,
    /// For the first byte, for one request to arrive, or for the client to read a response.
    pub(crate) request: Duration,
}

/// The state of a connection that its guard shares with its surface and its listener.
#[derive(Debug)]
pub(crate) struct ConnectionState {
    /// The other end.
    pub(crate) peer: SocketAddr,
    pub(crate) slot: Arc<Slot>,
    /// The request that has arrived in part.
    pub(crate) partial: PartialRequest,
    /// The tenant of the last request, which pays for the worker's time; `None` before one with a
    /// valid token.
    pub(crate) tenant: Cell<Option<TenantIndex>>,
}

impl ConnectionState {
    /// Runs a task of the connection, and charges the worker's time in it to the tenant.
    pub(crate) async fn charged<T>(&self, task: impl Future<Output = T>) -> T {
        let mut task = pin!(task);
        poll_fn(|cx| {
            let polled = task.as_mut().poll(cx);
            time_share::charge(self.tenant.get());
            polled
        })
        .await
    }
}

/// How a connection knows whether a request has arrived in part.
#[derive(Debug)]
pub(crate) enum Framing {
    /// HTTP/1: all bytes since the last response belong to the next request.
    Exchange,
    /// HTTP/2: frames show it. The surface knows whether a call is open, and publishes it.
    Frames(FrameWalker),
    /// RESP: the surface sets it.
    Surface,
}

/// The phase of a connection, which selects its timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// No byte has arrived yet.
    Fresh,
    Idle,
    Busy,
}

/// A connection under [`ClientTimeouts`].
#[derive(Debug)]
pub(crate) struct GuardedStream<S> {
    stream: S,
    state: Rc<ConnectionState>,
    framing: Framing,
    patience: ClientTimeouts,
    metrics: Arc<Metrics>,
    phase: Phase,
    /// Whether the guard publishes in the slot if it is idle.
    publishes: bool,
    /// Whether a response waits until other connections have had their turn.
    waits: bool,
    /// Whether the others have had their turn since the last read.
    gave_way: bool,
    /// The pulse at which the present state began.
    since: u32,
    alarm: Pin<Box<Sleep>>,
    /// The pulse for which the alarm was set.
    alarm_at: u32,
}

impl<S> GuardedStream<S> {
    pub(crate) fn new(
        stream: S,
        state: Rc<ConnectionState>,
        framing: Framing,
        patience: ClientTimeouts,
        metrics: Arc<Metrics>,
    ) -> Self {
        let first = patience.idle.min(patience.request);
        Self {
            stream,
            state,
            publishes: !matches!(framing, Framing::Frames(_)),
            framing,
            patience,
            metrics,
            phase: Phase::Fresh,
            waits: true,
            gave_way: true,
            since: pulse(),
            alarm: Box::pin(sleep_until(from_now(first))),
            alarm_at: pulse().wrapping_add(pulses(first)),
        }
    }

    /// Turns the delay off, for a surface that already responds one turn after it reads, or later.
    pub(crate) fn answers_later(self) -> Self {
        Self { waits: false, ..self }
    }

    /// Lets the listener evict the connection also in the middle of a request.
    pub(crate) fn always_gives_way(self) -> Self {
        Self { publishes: false, ..self }
    }

    fn allowed(&self) -> Duration {
        let ClientTimeouts { idle, request } = self.patience;
        match self.phase {
            Phase::Fresh => idle.min(request),
            Phase::Idle => idle,
            Phase::Busy => request,
        }
    }

    #[inline]
    fn turn(&mut self, phase: Phase) {
        // HTTP/2 writes before the first byte arrives: only a read ends the fresh phase.
        if self.phase == phase || self.phase == Phase::Fresh {
            return;
        }
        self.phase = phase;
        self.since = pulse();
        if self.publishes {
            match phase {
                Phase::Busy => self.state.slot.set_busy(),
                Phase::Fresh | Phase::Idle => self.state.slot.set_idle(self.since),
            }
        }
    }

    /// Notes bytes that arrived.
    #[inline]
    fn after_read(&mut self, fresh: &[u8]) {
        self.gave_way = !self.waits;
        if self.phase == Phase::Fresh {
            self.phase = Phase::Idle;
        }
        match &mut self.framing {
            Framing::Exchange => self.state.partial.add(fresh.len()),
            Framing::Surface => {}
            Framing::Frames(walker) => {
                let has_ended = walker.walk(fresh);
                let held = walker.held();
                self.state.partial.set(held);
                if has_ended {
                    // The next frame, or the idle time, begins now.
                    self.phase = Phase::Idle;
                    self.since = pulse();
                }
                return self.turn(if held > 0 { Phase::Busy } else { Phase::Idle });
            }
        }
        self.turn(Phase::Busy);
    }

    /// Waits for bytes, unless the connection is evicted or the time is over.
    fn poll_missing(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // Every time: an eviction takes the waker, also if a request overwrites the eviction.
        self.state.slot.wake_by(cx.waker());
        if self.state.slot.is_evicted() {
            // To the surface, the client has closed the connection.
            return Poll::Ready(Ok(()));
        }
        if self.state.partial.is_begun() {
            self.turn(Phase::Busy);
        }
        if !self.out_of_patience(cx) {
            return Poll::Pending;
        }
        if self.state.partial.is_begun() {
            self.state.partial.fail(ReadFailure::TimedOut);
        }
        Self::timed_out()
    }

    /// Whether the timeout has passed. Called when the stream is not ready; sets the alarm so that
    /// the stream is polled again in time.
    fn out_of_patience(&mut self, cx: &mut Context<'_>) -> bool {
        let allowed = pulses(self.allowed());
        let spent = pulse().wrapping_sub(self.since);
        if spent >= allowed {
            self.metrics.timed_out();
            return true;
        }
        // The alarm comes from an earlier state. It may ring too early, which is harmless, but not
        // too late. Pulses cost nothing to compare. They wrap around, so only their distance
        // counts.
        let latest = self.since.wrapping_add(allowed);
        let is_later = (1..=u32::MAX / 2).contains(&self.alarm_at.wrapping_sub(latest));
        if is_later || self.alarm.is_elapsed() {
            self.alarm.as_mut().reset(from_now(time_of(allowed - spent)));
            self.alarm_at = latest;
        }
        self.alarm.as_mut().poll(cx).is_ready() && {
            cx.waker().wake_by_ref();
            false
        }
    }

    fn timed_out<T>() -> Poll<io::Result<T>> {
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

#[expect(clippy::disallowed_methods, reason = "alarms are set on the runtime's clock")]
pub(crate) fn from_now(time: Duration) -> Instant {
    Instant::now() + time
}

impl<S: AsyncRead + Unpin> AsyncRead for GuardedStream<S> {
    #[inline]
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if let Err(failure) = this.state.partial.charge() {
            return Poll::Ready(Err(io::Error::other(failure)));
        }
        let before = buf.filled().len();
        let Poll::Ready(result) = Pin::new(&mut this.stream).poll_read(cx, buf) else {
            return this.poll_missing(cx);
        };
        this.after_read(&buf.filled()[before..]);
        Poll::Ready(result)
    }
}

impl<S: AsyncWrite + Unpin> GuardedStream<S> {
    /// Whether this turn is for others: once after each read.
    #[inline]
    fn gives_way(&mut self, cx: &Context<'_>) -> bool {
        if self.gave_way {
            return false;
        }
        self.gave_way = true;
        cx.waker().wake_by_ref();
        true
    }

    #[inline]
    fn after_write<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        match written {
            Poll::Ready(result) => {
                if matches!(self.framing, Framing::Exchange) {
                    self.state.partial.set(0);
                }
                self.turn(Phase::Idle);
                Poll::Ready(result)
            }
            Poll::Pending => self.in_time(cx, Poll::Pending),
        }
    }

    /// Applies the timeout to a write. A client that does not read its response is as slow as one
    /// that does not send its request. TLS accepts responses at once, and waits for the client when
    /// they are flushed.
    fn in_time<T>(&mut self, cx: &mut Context<'_>, done: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if done.is_ready() {
            return done;
        }
        self.turn(Phase::Busy);
        if self.out_of_patience(cx) { Self::timed_out() } else { Poll::Pending }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for GuardedStream<S> {
    #[inline]
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.gives_way(cx) {
            return Poll::Pending;
        }
        let written = Pin::new(&mut this.stream).poll_write(cx, buf);
        this.after_write(cx, written)
    }

    #[inline]
    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.gives_way(cx) {
            return Poll::Pending;
        }
        let written = Pin::new(&mut this.stream).poll_write_vectored(cx, bufs);
        this.after_write(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let flushed = Pin::new(&mut this.stream).poll_flush(cx);
        this.in_time(cx, flushed)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let shut = Pin::new(&mut this.stream).poll_shutdown(cx);
        this.in_time(cx, shut)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Wake, Waker};

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
    use tokio::sync::Semaphore;

    use super::*;
    use crate::request_memory::RequestMemory;
    use crate::slots::{Evictor, Slots};

    struct CountedWakes(AtomicUsize);

    impl Wake for CountedWakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[tokio::test]
    async fn eviction_wakes_a_connection_that_outlived_an_earlier_one() {
        let (slots, room) = (Arc::new(Slots::default()), Arc::new(Semaphore::new(1)));
        let taken = slots.take(room.try_acquire_owned().expect("room"));
        let memory = Arc::new(RequestMemory::new(1 << 20, 1));
        let (patience, metrics) = (Duration::from_hours(1), Arc::new(Metrics::new(1, 1)));
        let patience = ClientTimeouts { idle: patience, request: patience };
        let peer: SocketAddr = ([127, 0, 0, 1], 1).into();
        let partial = PartialRequest::new(&memory, peer.ip());
        let state = Rc::new(ConnectionState {
            peer,
            slot: Arc::clone(&taken.slot),
            partial,
            tenant: Cell::default(),
        });
        let (mut client, server) = duplex(100);
        let mut stream =
            GuardedStream::new(server, state, Framing::Surface, patience, metrics).answers_later();
        let mut evictor = Evictor::new(&slots);
        taken.slot.set_idle(1);
        let counted = Arc::new(CountedWakes(AtomicUsize::new(0)));
        let waker = Waker::from(Arc::clone(&counted));
        let mut cx = Context::from_waker(&waker);
        let mut byte = [0];
        let mut read = |stream: &mut GuardedStream<DuplexStream>| {
            Pin::new(&mut *stream).poll_read(&mut cx, &mut ReadBuf::new(&mut byte)).is_ready()
        };
        assert!(!read(&mut stream));
        // The eviction and a request come at the same time: the connection stays.
        assert!(evictor.evict());
        client.write_all(b"x").await.expect("room");
        assert!(read(&mut stream));
        stream.write_all(b"y").await.expect("room");
        let mut reply = [0];
        client.read_exact(&mut reply).await.expect("a reply");
        assert!(!taken.slot.is_evicted() && !read(&mut stream));
        let before = counted.0.load(Ordering::Relaxed);
        assert!(evictor.evict());
        assert_eq!(counted.0.load(Ordering::Relaxed), before + 1);
        assert!(read(&mut stream), "it is closed");
    }
}
