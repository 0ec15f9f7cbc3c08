//! gRPC's reflection service, so that `grpcurl` and its like need no `.proto` files.

use tonic::Status;
use tonic_reflection::server::{Builder, v1, v1alpha};

pub(super) const SERVICE_V1: &str = "grpc.reflection.v1.ServerReflection";
pub(super) const SERVICE_V1ALPHA: &str = "grpc.reflection.v1alpha.ServerReflection";

/// What `proto/envoy/service/ratelimit/v3/rls.proto` compiles to; a test compares the two.
const RATE_LIMIT_SERVICE: &[u8] = include_bytes!("../../proto/rls.binpb");

/// The service as it is asked for today.
pub(super) fn v1() -> Result<v1::ServerReflectionServer<impl v1::ServerReflection>, Status> {
    builder().build_v1().map_err(|error| Status::internal(error.to_string()))
}

/// The service as older clients ask for it.
pub(super) fn v1alpha() -> Result<v1alpha::ServerReflectionServer<impl v1alpha::ServerReflection>, Status> {
    builder().build_v1alpha().map_err(|error| Status::internal(error.to_string()))
}

fn builder() -> Builder<'static> {
    Builder::configure()
        .register_encoded_file_descriptor_set(RATE_LIMIT_SERVICE)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
}
