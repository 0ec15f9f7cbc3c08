//! gRPC's reflection service, so that tools such as `grpcurl` need no `.proto` files.

use std::pin::Pin;
use std::sync::LazyLock;

use ::http::{Request, Response};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic_reflection::server::{Builder, Error};

use super::BESIDE_BYTES_MAX;
use super::timed_body::TimedBody;

pub(super) const SERVICE_V1: &str = "grpc.reflection.v1.ServerReflection";
pub(super) const SERVICE_V1ALPHA: &str = "grpc.reflection.v1alpha.ServerReflection";

/// The compiled `proto/envoy/service/ratelimit/v3/rls.proto`; a test compares the two.
const RATE_LIMIT_SERVICE: &[u8] = include_bytes!("../../proto/rls.binpb");

type ReflectionFuture = Pin<Box<dyn Future<Output = Response<Body>>>>;

/// A service as a function, because its type has no name.
type Reflector = Box<dyn Fn(Request<TimedBody>) -> ReflectionFuture + Send + Sync>;

/// The present version of the service.
static V1: LazyLock<Result<Reflector, Status>> = LazyLock::new(|| {
    let server =
        builder().build_v1().map_err(|error| broken(&error))?.max_decoding_message_size(BESIDE_BYTES_MAX);
    Ok(Box::new(move |request| {
        let mut server = server.clone();
        Box::pin(async move {
            let Ok(response) = server.call(request).await;
            response
        })
    }))
});

/// The version for older clients.
static V1ALPHA: LazyLock<Result<Reflector, Status>> = LazyLock::new(|| {
    let server = builder()
        .build_v1alpha()
        .map_err(|error| broken(&error))?
        .max_decoding_message_size(BESIDE_BYTES_MAX);
    Ok(Box::new(move |request| {
        let mut server = server.clone();
        Box::pin(async move {
            let Ok(response) = server.call(request).await;
            response
        })
    }))
});

/// Serves a call to either version.
pub(super) async fn answer(request: Request<TimedBody>) -> Result<Response<Body>, Status> {
    let is_older = request.uri().path().contains(SERVICE_V1ALPHA);
    let reflector = if is_older { &V1ALPHA } else { &V1 };
    let reflect = LazyLock::force(reflector).as_ref().map_err(Status::clone)?;
    Ok(reflect(request).await)
}

fn builder() -> Builder<'static> {
    Builder::configure()
        .register_encoded_file_descriptor_set(RATE_LIMIT_SERVICE)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
}

fn broken(error: &Error) -> Status {
    Status::internal(error.to_string())
}
