//! The body of an answer: one message and the status after it, without any copy.

use std::pin::Pin;
use std::task::{Context, Poll};

use ::http::{HeaderMap, HeaderName, HeaderValue};
use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use tonic::Status;

const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const OK: HeaderValue = HeaderValue::from_static("0");

/// The body of an answer.
#[derive(Default)]
pub(super) enum Reply {
    /// A message; what was said in the head is not said again.
    Message(Bytes),
    /// That all went well.
    Trailers,
    /// Nothing more.
    #[default]
    Done,
    /// What tonic made.
    Tonic(tonic::body::Body),
}

impl Body for Reply {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        if let Self::Tonic(body) = this {
            return Pin::new(body).poll_frame(cx);
        }
        Poll::Ready(match std::mem::take(this) {
            Self::Message(message) => {
                *this = Self::Trailers;
                Some(Ok(Frame::data(message)))
            }
            Self::Trailers => Some(Ok(Frame::trailers(all_well()))),
            Self::Done | Self::Tonic(_) => None,
        })
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Message(_) | Self::Trailers => false,
            Self::Done => true,
            Self::Tonic(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            // Of calls, nobody wants to know a length.
            Self::Message(_) | Self::Trailers => SizeHint::default(),
            Self::Done => SizeHint::with_exact(0),
            Self::Tonic(body) => body.size_hint(),
        }
    }
}

fn all_well() -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(1);
    trailers.insert(STATUS, OK);
    trailers
}
