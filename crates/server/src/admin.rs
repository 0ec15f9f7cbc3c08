//! The admin listener: health, readiness, metrics, and questions from the command line.

mod log;

use std::io;
use std::net::SocketAddr;

use ::http::{Method, StatusCode};
use prometheus_client::encoding::text::encode;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::auth::{Role, TenantIndex};
use crate::http::{Answer, Asked, Problem, not_found, only, route_check, serve_with, text};
use crate::worker::Context;

/// The tenant that tokens without one belong to: whoever runs the server.
const OPERATING_TENANT: TenantIndex = 0;

const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Answers the requests of one connection.
pub(crate) async fn serve<S>(stream: S, peer: SocketAddr, context: Context) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin + 'static,
{
    // Whoever watches the server sees the others drain.
    let stop = context.stop_admin.clone();
    serve_with(stream, peer, Context { stop, ..context }, route).await
}

async fn route(asked: &Asked<'_>) -> Answer {
    match asked.parts.uri.path() {
        "/healthz" => only(asked, &Method::GET, async |_: &Asked<'_>| alive()).await,
        "/readyz" => only(asked, &Method::GET, async |asked: &Asked<'_>| ready(asked)).await,
        "/metrics" => only(asked, &Method::GET, async |asked: &Asked<'_>| metrics(asked)).await,
        "/v1/check" => route_check(asked).await,
        "/v1/why" => only(asked, &Method::GET, log::why).await,
        "/v1/heavy" => only(asked, &Method::GET, async |asked: &Asked<'_>| log::heavy(asked)).await,
        _ => not_found(asked),
    }
}

fn alive() -> Answer {
    text(StatusCode::OK, "text/plain", "ok\n")
}

/// Probes have no credentials, and learn nothing here but whether to send traffic.
fn ready(asked: &Asked<'_>) -> Answer {
    if asked.shared.is_ready() {
        text(StatusCode::OK, "text/plain", "ready\n")
    } else {
        text(StatusCode::SERVICE_UNAVAILABLE, "text/plain", "draining\n")
    }
}

fn metrics(asked: &Asked<'_>) -> Answer {
    match asked.principal(Role::Viewer) {
        Err(problem) => return problem.into(),
        // What is counted is counted for all tenants: only whoever runs the server may look.
        Ok(principal) if principal.tenant != OPERATING_TENANT => return Problem::for_operators().into(),
        Ok(_) => {}
    }
    let mut body = String::new();
    match encode(&mut body, &asked.shared.registry) {
        Ok(()) => text(StatusCode::OK, METRICS_TYPE, body),
        Err(error) => Problem::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into(),
    }
}
