//! gRPC's health service: reports serving until the server begins to stop.

use std::pin::Pin;
use std::task::{Context, Poll};

use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::body::Body;
use tonic::codegen::tokio_stream::Stream;
use tonic::codegen::{Service, async_trait};
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use super::BESIDE_BYTES_MAX;
use super::timed_body::TimedBody;

pub(super) const SERVICE: &str = "grpc.health.v1.Health";

/// The one call that is open for as long as the client likes.
pub(super) const WATCH: &str = "/grpc.health.v1.Health/Watch";

/// Names that a client may query: the whole server, or one of its services.
const KNOWN: [&str; 3] = ["", "envoy.service.ratelimit.v3.RateLimitService", SERVICE];

/// Serves a health call. `stop` stops the server.
pub(super) async fn answer(
    stop: CancellationToken,
    request: ::http::Request<TimedBody>,
) -> ::http::Response<Body> {
    let server = HealthServer::new(HealthService { stop });
    let Ok(response) = server.max_decoding_message_size(BESIDE_BYTES_MAX).call(request).await;
    response
}

struct HealthService {
    stop: CancellationToken,
}

#[async_trait]
impl Health for HealthService {
    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        if !is_known(&request) {
            return Err(Status::not_found(format!("service: {:?} is not here", request.get_ref().service)));
        }
        let stopping = self.stop.is_cancelled();
        Ok(Response::new(says(if stopping { ServingStatus::NotServing } else { ServingStatus::Serving })))
    }

    type WatchStream = Watch;

    async fn watch(&self, request: Request<HealthCheckRequest>) -> Result<Response<Watch>, Status> {
        let now = if is_known(&request) { ServingStatus::Serving } else { ServingStatus::ServiceUnknown };
        Ok(Response::new(Watch { next: Some(now), stopped: Box::pin(self.stop.clone().cancelled_owned()) }))
    }
}

fn is_known(request: &Request<HealthCheckRequest>) -> bool {
    KNOWN.contains(&request.get_ref().service.as_str())
}

fn says(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status.into() }
}

/// Sends the present status, and another one when the server stops.
struct Watch {
    next: Option<ServingStatus>,
    stopped: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl Stream for Watch {
    type Item = Result<HealthCheckResponse, Status>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        match this.next {
            None => Poll::Ready(None),
            Some(ServingStatus::NotServing) => {
                if this.stopped.as_mut().poll(cx).is_pending() {
                    return Poll::Pending;
                }
                this.next = None;
                Poll::Ready(Some(Ok(says(ServingStatus::NotServing))))
            }
            Some(now) => {
                this.next = Some(ServingStatus::NotServing);
                Poll::Ready(Some(Ok(says(now))))
            }
        }
    }
}
