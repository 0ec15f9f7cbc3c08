//! gRPC: Envoy's rate limit service, with health and reflection beside it.
//!
//! The method for decisions has no layer between HTTP/2 and the decision. Methods that a client
//! calls once per connection use tonic.

mod call;
mod calls;
mod health;
mod reflection;
mod reply;
mod timed_body;

use std::convert::Infallible;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ::http::{Request, Response};
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tonic::Status;

use self::calls::{Call, CloseReason, Connection};
use self::reply::Reply;
use self::timed_body::TimedBody;
use crate::guard::ConnectionState;
use crate::worker::Context;

/// Calls of one connection at a time. Higher: more of them wait here instead of at the client; more
/// memory.
const STREAMS_MAX: u32 = 128;

/// The largest question about health or to reflection: both are a name.
const BESIDE_BYTES_MAX: usize = 16 << 10;

/// The largest head of a call. Higher: more metadata; more memory for each call that is being read.
const HEAD_BYTES_MAX: u32 = 16 << 10;

/// Unread bytes that a client may send, per call and per connection.
const STREAM_WINDOW_BYTES: u32 = 64 << 10;
const CONNECTION_WINDOW_BYTES: u32 = 1 << 20;

/// Unsent bytes that the server buffers for each call. A response is far smaller.
const SEND_BYTES_MAX: usize = 64 << 10;

/// Idle time after which the server pings a client, and the timeout of its reply.
const PING_EVERY: Duration = Duration::from_secs(30);
const PING_TIMEOUT: Duration = Duration::from_secs(20);

const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// Runs the tasks of a connection on the worker's own thread. The tenant of the connection pays for
/// them.
#[derive(Clone)]
struct LocalExecutor(Rc<ConnectionState>);

impl<F> Executor<F> for LocalExecutor
where
    F: Future + 'static,
    F::Output: 'static,
{
    fn execute(&self, future: F) {
        let state = Rc::clone(&self.0);
        tokio::task::spawn_local(async move { state.charged(future).await });
    }
}

/// Serves the calls of one connection. It closes when the server stops, when it is idle for too
/// long, or when the client does not read a response.
pub(crate) async fn serve<S>(stream: S, state: Rc<ConnectionState>, context: Context) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin + 'static,
{
    let (stop, patience) = (context.stop.clone(), context.shared.protocol.client_timeouts);
    let metrics = Arc::clone(&context.shared.telemetry.metrics);
    let executor = LocalExecutor(Rc::clone(&state));
    // All calls of this connection share it, on this thread.
    let calls = Rc::new(Connection::new(state, context));
    let service = service_fn(|request| answer(Call::begin(Rc::clone(&calls)), request));
    let mut builder = http2::Builder::new(executor);
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS_MAX)
        .max_header_list_size(HEAD_BYTES_MAX)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_send_buf_size(SEND_BYTES_MAX)
        .auto_date_header(false)
        .keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_TIMEOUT);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
        over = calls.over(patience) => {
            metrics.timed_out();
            if over == CloseReason::Stuck {
                return Err(io::ErrorKind::TimedOut.into());
            }
            connection.as_mut().graceful_shutdown();
            tokio::time::timeout(patience.request, connection).await?
        }
    };
    ended.map_err(io::Error::other)
}

/// Serves one call. Each call is a task, so its future is kept small: rare methods are boxed.
async fn answer(call: Call, request: Request<Incoming>) -> Result<Response<Reply>, Infallible> {
    let is_watch = request.uri().path() == health::WATCH;
    let response = if request.uri().path() == SHOULD_RATE_LIMIT {
        match call::read_head(&call.shared, request) {
            Ok((tenant, body)) => {
                call.charge_to(tenant);
                call::should_rate_limit(&call, tenant, body).await
            }
            Err(refused) => *refused,
        }
    } else {
        Box::pin(answer_beside(&call, request)).await
    };
    let call = if is_watch { call.lasting() } else { call };
    Ok(response.map(|reply| reply.of(call)))
}

async fn answer_beside(context: &Call, request: Request<Incoming>) -> Response<Reply> {
    let path = request.uri().path().to_owned();
    let patience = context.shared.protocol.client_timeouts.request;
    let request = request.map(|body| TimedBody::new(body, patience, context.partial()));
    let answered = match path.split('/').nth(1).unwrap_or_default() {
        // Load balancers have no token.
        health::SERVICE => Ok(health::answer(context.stop.clone(), request).await),
        reflection::SERVICE_V1 | reflection::SERVICE_V1ALPHA => reflect(context, request).await,
        _ => Err(Status::unimplemented(format!("there is no method {path}"))),
    };
    answered.map_or_else(Status::into_http, |response| response.map(Reply::from))
}

/// Describes the services to callers with a valid token.
async fn reflect(
    context: &Context,
    request: Request<TimedBody>,
) -> Result<Response<tonic::body::Body>, Status> {
    call::principal(&context.shared, request.headers())?;
    reflection::answer(request).await
}
