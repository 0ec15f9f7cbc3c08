//! A body that has to arrive in time.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::time::{Sleep, sleep_until};
use tonic::Status;

use crate::guard::from_now;

/// A body that ends with an error if it has not ended by itself in time.
pub(super) struct TimedBody {
    body: Incoming,
    patience: Duration,
    deadline: Pin<Box<Sleep>>,
}

impl TimedBody {
    pub(super) fn new(body: Incoming, patience: Duration) -> Self {
        Self { body, patience, deadline: Box::pin(sleep_until(from_now(patience))) }
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
        Pin::new(&mut this.body).poll_frame(cx).map_err(|error| Status::cancelled(error.to_string()))
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
