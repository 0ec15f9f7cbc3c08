//! The body of a response: one message and the status after it, without a copy.

use std::pin::Pin;
use std::task::{Context, Poll};

use ::http::{HeaderMap, HeaderName, HeaderValue};
use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use tonic::Status;

use super::calls::Call;

const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const OK: HeaderValue = HeaderValue::from_static("0");

/// The body of a response.
#[derive(Default)]
pub(super) struct Reply {
    content: Content,
    /// Ends with the response.
    _call: Option<Call>,
}

#[derive(Default)]
enum Content {
    /// A message; the head is sent already.
    Message(Bytes),
    /// That all went well.
    Trailers,
    /// The end.
    #[default]
    Done,
    /// A body made by tonic.
    Tonic(tonic::body::Body),
}

impl Reply {
    /// One message, already framed.
    pub(super) fn message(framed: Bytes) -> Self {
        Self { content: Content::Message(framed), _call: None }
    }

    /// Makes it the response to a call.
    pub(super) fn of(self, call: Call) -> Self {
        Self { _call: Some(call), ..self }
    }
}

impl From<tonic::body::Body> for Reply {
    fn from(body: tonic::body::Body) -> Self {
        Self { content: Content::Tonic(body), _call: None }
    }
}

impl Body for Reply {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut self.get_mut().content;
        if let Content::Tonic(body) = this {
            return Pin::new(body).poll_frame(cx);
        }
        Poll::Ready(match std::mem::take(this) {
            Content::Message(message) => {
                *this = Content::Trailers;
                Some(Ok(Frame::data(message)))
            }
            Content::Trailers => Some(Ok(Frame::trailers(all_well()))),
            Content::Done | Content::Tonic(_) => None,
        })
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            Content::Message(_) | Content::Trailers => false,
            Content::Done => true,
            Content::Tonic(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            // gRPC clients do not need a content length.
            Content::Message(_) | Content::Trailers => SizeHint::default(),
            Content::Done => SizeHint::with_exact(0),
            Content::Tonic(body) => body.size_hint(),
        }
    }
}

fn all_well() -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(1);
    trailers.insert(STATUS, OK);
    trailers
}
