//! A body that has to arrive in time, and within the memory for incomplete requests.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::time::{Sleep, sleep_until};
use tonic::Status;

use super::call::charge;
use crate::guard::from_now;
use crate::request_memory::PartialRequest;

/// A body that ends with an error if it has not ended by itself in time, or takes too much memory.
pub(super) struct TimedBody {
    body: Incoming,
    patience: Duration,
    deadline: Pin<Box<Sleep>>,
    partial: PartialRequest,
    /// Bytes that have arrived. Tonic keeps them until the message is whole.
    arrived: usize,
}

impl TimedBody {
    pub(super) fn new(body: Incoming, patience: Duration, partial: PartialRequest) -> Self {
        Self { body, patience, deadline: Box::pin(sleep_until(from_now(patience))), partial, arrived: 0 }
    }
}

impl Body for TimedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        // The deadline comes first, or a body that trickles in would never reach it.
        if this.deadline.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err(too_slow(this.patience))));
        }
        let polled = Pin::new(&mut this.body).poll_frame(cx);
        if let Poll::Ready(Some(Ok(frame))) = &polled {
            this.arrived += frame.data_ref().map_or(0, Bytes::len);
            if let Err(status) = charge(&this.partial, this.arrived) {
                return Poll::Ready(Some(Err(status)));
            }
        }
        polled.map_err(|error| Status::cancelled(error.to_string()))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Returns the status for a message that did not arrive in time.
pub(super) fn too_slow(patience: Duration) -> Status {
    Status::deadline_exceeded(format!("the call was not all there after {patience:?}"))
}
