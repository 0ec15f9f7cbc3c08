//! A connection with timeouts for idle and slow clients. It also lets other connections read before
//! it writes.
//!
//! A connection is idle after a response was written, and busy from the next byte on. While idle,
//! it may stay silent for the idle timeout. While busy, the whole request must arrive, and the
//! client must read the response, within the request timeout. All surfaces use this mechanism. It
//! reads no clock while data flows.
//!
//! A response is written one turn after its request was read, when every other readable connection
//! has had its turn. Written at once, it would wake the client for a single response, and its next
//! request would wake this worker for a single one. With the delay, both get several at a time.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

use crate::load::{pulse, pulses, time_of};
use crate::metrics::Metrics;

/// How long a client may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClientTimeouts {
    /// Between requests.
    pub(crate) idle: Duration,
    /// For one request to arrive, or for the client to read a response.
    pub(crate) request: Duration,
}

/// A connection under [`ClientTimeouts`].
#[derive(Debug)]
pub(crate) struct GuardedStream<S> {
    stream: S,
    patience: ClientTimeouts,
    metrics: Arc<Metrics>,
    busy: bool,
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
    pub(crate) fn new(stream: S, patience: ClientTimeouts, metrics: Arc<Metrics>) -> Self {
        let alarm = Box::pin(sleep_until(from_now(patience.idle)));
        let alarm_at = pulse().wrapping_add(pulses(patience.idle));
        Self {
            stream,
            patience,
            metrics,
            busy: false,
            waits: true,
            gave_way: true,
            since: pulse(),
            alarm,
            alarm_at,
        }
    }

    /// Turns the delay off, for a surface that already responds one turn after it reads, or later.
    pub(crate) fn answers_later(self) -> Self {
        Self { waits: false, ..self }
    }

    fn allowed(&self) -> Duration {
        if self.busy { self.patience.request } else { self.patience.idle }
    }

    #[inline]
    fn turn(&mut self, busy: bool) {
        if self.busy != busy {
            self.busy = busy;
            self.since = pulse();
        }
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
        match Pin::new(&mut this.stream).poll_read(cx, buf) {
            Poll::Ready(result) => {
                this.turn(true);
                this.gave_way = !this.waits;
                Poll::Ready(result)
            }
            Poll::Pending if this.out_of_patience(cx) => Self::timed_out(),
            Poll::Pending => Poll::Pending,
        }
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
                self.turn(false);
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
        self.turn(true);
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
