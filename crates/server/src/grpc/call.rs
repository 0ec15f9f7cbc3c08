//! `ShouldRateLimit`: a message in, a message out.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

use ::http::header::{AUTHORIZATION, CONTENT_TYPE};
use ::http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use prost::Message;
use tokio::time::timeout;
use tonic::Status;

use super::calls::Call;
use super::reply::Reply;
use super::timed_body::too_slow;
use crate::auth::{Principal, TenantIndex};
use crate::envoy::{Refusal, decide};
use crate::metrics::{Stopwatch, Surface};
use crate::pieces::Pieces;
use crate::request_memory::PartialRequest;
use crate::shared::Shared;

/// The largest request. Higher: more and longer descriptors; more memory for each call that is
/// being read.
const MESSAGE_BYTES_MAX: usize = 256 << 10;

/// Length of the prefix of a message: the compression flag and the length.
const PREFIX_BYTES: usize = 5;

const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");

/// Reads the head of a call. Returns its tenant and the body that is still to be read.
pub(super) fn read_head(
    shared: &Shared,
    request: Request<Incoming>,
) -> Result<(TenantIndex, Incoming), Box<Response<Reply>>> {
    let headers = request.headers();
    if !is_grpc(headers) {
        let mut answer = Response::new(Reply::default());
        *answer.status_mut() = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        return Err(Box::new(answer));
    }
    let principal = principal(shared, headers).map_err(|status| Box::new(status.into_http()))?;
    Ok((principal.tenant, request.into_body()))
}

/// Returns the principal of a call.
pub(super) fn principal(shared: &Shared, headers: &HeaderMap) -> Result<Principal, Status> {
    let authorization = headers.get(AUTHORIZATION).map(HeaderValue::as_bytes);
    let unknown = || Status::unauthenticated("authorization: no `Bearer` token that this server knows");
    shared.credentials.of_authorization(authorization).ok_or_else(unknown)
}

/// Serves one call of a tenant.
pub(super) async fn should_rate_limit(call: &Call, tenant: TenantIndex, body: Incoming) -> Response<Reply> {
    let shared = &call.shared;
    let message = match read_in_time(call, tenant, body).await {
        Ok(message) => message,
        Err(status) => return status.into_http(),
    };
    let started = Stopwatch::start();
    let answer = match decided(shared, tenant, message).await {
        Ok(response) => respond(&response),
        Err(status) => status.into_http(),
    };
    shared.telemetry.metrics.took(Surface::Envoy, started.taken(), 1);
    answer
}

fn is_grpc(headers: &HeaderMap) -> bool {
    headers.get(CONTENT_TYPE).is_some_and(|media| media.as_bytes().starts_with(GRPC.as_bytes()))
}

/// The one message of a call. Nearly always it is there already: no alarm has to be set, and no
/// memory charged.
async fn read_in_time(call: &Call, tenant: TenantIndex, mut body: Incoming) -> Result<Bytes, Status> {
    let mut pieces = Pieces::default();
    let first = {
        let mut reading = pin!(read(&mut body, &mut pieces, None));
        poll_fn(|cx| Poll::Ready(reading.as_mut().poll(cx))).await
    };
    match first {
        Poll::Ready(read) => read?,
        Poll::Pending => Box::pin(read_rest(call, tenant, &mut body, &mut pieces)).await?,
    }
    unframed(pieces.into_bytes())
}

/// Reads the rest of a message that arrives in part, on the account of its tenant.
async fn read_rest(
    call: &Call,
    tenant: TenantIndex,
    body: &mut Incoming,
    pieces: &mut Pieces,
) -> Result<(), Status> {
    let patience = call.shared.protocol.client_timeouts.request;
    let partial = call.partial();
    partial.belongs_to(tenant);
    charge(&partial, pieces.len())?;
    let reading = timeout(patience, read(body, pieces, Some(&partial)));
    reading.await.unwrap_or_else(|_| Err(too_slow(patience)))
}

/// Reads a message to its end. It may be dropped at any time, and loses no piece.
async fn read(
    body: &mut Incoming,
    pieces: &mut Pieces,
    partial: Option<&PartialRequest>,
) -> Result<(), Status> {
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|error| Status::cancelled(error.to_string()))?.into_data() else {
            continue;
        };
        if !pieces.take(data, MESSAGE_BYTES_MAX + PREFIX_BYTES) {
            return Err(Status::resource_exhausted(format!(
                "a message has at most {MESSAGE_BYTES_MAX} bytes"
            )));
        }
        if body.is_end_stream() {
            break;
        }
        if let Some(partial) = partial {
            charge(partial, pieces.len())?;
        }
    }
    Ok(())
}

/// Charges the bytes of a message that has arrived in part.
pub(super) fn charge(partial: &PartialRequest, bytes: usize) -> Result<(), Status> {
    partial.set(bytes);
    partial.charge().map_err(|failure| Status::resource_exhausted(failure.to_string()))
}

fn unframed(mut whole: Bytes) -> Result<Bytes, Status> {
    if whole.len() < PREFIX_BYTES {
        return Err(Status::invalid_argument("the call has no message"));
    }
    let compressed = whole.get_u8() != 0;
    let length = whole.get_u32();
    if compressed {
        return Err(Status::unimplemented("compressed messages are not read here"));
    }
    if usize::try_from(length) != Ok(whole.len()) {
        return Err(Status::invalid_argument("the call is not one whole message"));
    }
    Ok(whole)
}

async fn decided(shared: &Shared, tenant: TenantIndex, message: Bytes) -> Result<RateLimitResponse, Status> {
    let request =
        RateLimitRequest::decode(message).map_err(|error| Status::invalid_argument(error.to_string()))?;
    decide(shared, tenant, &request).await.map_err(|refusal| match refusal {
        Refusal::Wrong(_) => Status::invalid_argument(refusal.to_string()),
        Refusal::NothingLoaded => Status::failed_precondition(refusal.to_string()),
    })
}

fn respond(response: &RateLimitResponse) -> Response<Reply> {
    let length = response.encoded_len();
    let mut framed = BytesMut::with_capacity(PREFIX_BYTES + length);
    framed.put_u8(0);
    // A response is as long as its request, plus a few words for each descriptor, so it is far
    // below 4 GB.
    framed.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    response.encode_raw(&mut framed);
    let mut answer = Response::new(Reply::message(framed.freeze()));
    answer.headers_mut().insert(CONTENT_TYPE, GRPC);
    answer
}
