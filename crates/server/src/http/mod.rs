//! HTTP: serves the requests of a connection one after another. A request waits only for its own
//! bytes, and for a needed reply of the origin or the store.

mod answer;
mod browser;
mod check;
mod envoy_json;
mod forward_auth;
mod object;
mod openapi;
mod path;
mod unkey;

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;

use ::http::request::Parts;
use ::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode};
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tidegate::headers::set_headers;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};

use crate::auth::{Caller, Principal, Role};
use crate::guard::ConnectionState;
use crate::metrics::{Stopwatch, Surface};
use crate::pieces::Pieces;
use crate::pipeline::RequestDecision;
use crate::request_memory::ReadFailure;
use crate::shared::Shared;
use crate::worker::{Context, woken_by_stop};

use self::answer::spare;
pub(crate) use self::answer::{HttpResponse, Problem, ProblemBody, json, read_json, text};
pub(crate) use self::browser::{refuse_body_type, refuse_foreign_host, refuse_foreign_origin};
pub(crate) use self::path::normal_path;

/// The largest body: a hundred limits of the longest names, written wastefully.
pub(crate) const BODY_BYTES_MAX: usize = 512 << 10;

/// The largest head of a request. Higher: longer cookies; more memory for each connection.
const HEAD_BYTES_MAX: usize = 32 << 10;

/// The header field with the decision source.
pub(crate) const SOURCE: HeaderName = HeaderName::from_static("x-tidegate-source");

/// A request, read as far as every surface needs it.
pub(crate) struct HttpRequest<'s> {
    pub(crate) shared: &'s Shared,
    /// The other end of the connection.
    pub(crate) peer: SocketAddr,
    /// The caller, if its token is known.
    caller: Option<Caller>,
    pub(crate) parts: Parts,
    pub(crate) body: Bytes,
}

impl<'s> HttpRequest<'s> {
    /// Creates a request that was read completely. Only the credential determines the caller.
    pub(crate) fn new(shared: &'s Shared, peer: SocketAddr, parts: Parts, body: Bytes) -> Self {
        let caller = caller(shared, &parts.headers);
        Self { shared, peer, caller, parts, body }
    }

    /// Adds the header fields of a decision, and its source if the server is in a region.
    pub(crate) fn set_decision_headers(&self, answer: &mut HttpResponse, decision: &RequestDecision<'_>) {
        let Shared { decider, protocol, .. } = self.shared;
        let RequestDecision { headline, wall_us, .. } = decision;
        set_headers(answer.headers_mut(), &headline.decision, *wall_us, protocol.reset);
        if decider.region.is_some() {
            answer.headers_mut().insert(SOURCE, HeaderValue::from_static(headline.source.as_str()));
        }
    }

    /// Returns the caller's name for the audit. Must be called right before a change: a token
    /// revoked since the request began must not change anything.
    pub(crate) fn actor(&self) -> Result<String, Problem> {
        let caller = self.caller.as_ref();
        caller.and_then(|caller| self.shared.credentials.actor(caller)).ok_or_else(Problem::unauthorized)
    }

    /// Returns the caller's principal, if it has at least `role`.
    pub(crate) fn principal(&self, role: Role) -> Result<Principal, Problem> {
        match self.caller.map(|caller| caller.principal) {
            None => Err(Problem::unauthorized()),
            Some(principal) if principal.role < role => Err(Problem::forbidden(role)),
            Some(principal) => Ok(principal),
        }
    }
}

/// A connection, as its requests see it. All workers share the count of the inner `Arc`; the count
/// of the `Rc` around this belongs to one connection.
struct HttpConnection {
    shared: Arc<Shared>,
    state: Rc<ConnectionState>,
}

/// Serves the requests of one connection.
pub(crate) async fn serve<S>(stream: S, state: Rc<ConnectionState>, context: Context) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    serve_with(stream, state, context, true, route).await
}

/// Serves the requests of one connection with `route`; only the first one unless it is kept alive.
pub(crate) async fn serve_with<S, R>(
    mut stream: S,
    state: Rc<ConnectionState>,
    context: Context,
    keep_alive: bool,
    route: R,
) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
    R: AsyncFn(&HttpRequest<'_>) -> HttpResponse + Copy + 'static,
{
    let served = serve_requests(&mut stream, Rc::clone(&state), &context, keep_alive, route).await;
    if let Some(failure) = state.partial.take_failure() {
        // The head has not arrived completely, so no handler has answered.
        stream.write_all(&head_refusal(failure)).await?;
        stream.shutdown().await?;
    }
    served
}

async fn serve_requests<S, R>(
    stream: &mut S,
    state: Rc<ConnectionState>,
    context: &Context,
    keep_alive: bool,
    route: R,
) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
    R: AsyncFn(&HttpRequest<'_>) -> HttpResponse + Copy + 'static,
{
    let connection = Rc::new(HttpConnection { shared: Arc::clone(&context.shared), state });
    let service = service_fn(move |request| answer(Rc::clone(&connection), request, route));
    let mut builder = http1::Builder::new();
    // Responses are short: one buffer costs the kernel less than two.
    builder.max_buf_size(HEAD_BYTES_MAX).half_close(true).writev(false).keep_alive(keep_alive);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let mut finishing = false;
    let ended = woken_by_stop(&context.stop, |task| {
        // The admin listener serves on while the others drain: its own stop comes later.
        if !finishing && !context.shared.node.is_ready() && context.stop.is_cancelled() {
            finishing = true;
            connection.as_mut().graceful_shutdown();
        }
        connection.as_mut().poll(task)
    });
    ended.await.map_err(io::Error::other)
}

/// The response to a request whose head is not awaited any longer.
fn head_refusal(failure: ReadFailure) -> Vec<u8> {
    let problem = Problem::from(failure);
    let (status, detail) = (problem.status, problem.detail);
    let length = detail.len() + 1;
    format!(
        "HTTP/1.1 {status}\r\ncontent-type: text/plain\r\ncontent-length: {length}\r\n\
         connection: close\r\n\r\n{detail}\n"
    )
    .into_bytes()
}

async fn answer(
    connection: Rc<HttpConnection>,
    request: Request<Incoming>,
    route: impl AsyncFn(&HttpRequest<'_>) -> HttpResponse,
) -> Result<HttpResponse, Infallible> {
    let HttpConnection { shared, state } = &*connection;
    let (parts, body) = request.into_parts();
    let caller = caller(shared, &parts.headers);
    state.tenant.set(caller.as_ref().map(|caller| caller.principal.tenant));
    Ok(match read(caller.as_ref(), body, state).await {
        Ok(body) => {
            let req = HttpRequest { shared, peer: state.peer, caller, parts, body };
            let answer = route(&req).await;
            spare(req.parts.headers);
            answer
        }
        Err(problem) if parts.uri.path().starts_with(unkey::PREFIX) => unkey::refuse(problem),
        Err(problem) => HttpResponse::from(problem),
    })
}

/// Reads the whole body. The body of an unauthenticated caller is not read, so it takes no memory.
/// That of another one is charged to its tenant while it arrives.
async fn read(
    caller: Option<&Caller>,
    body: Incoming,
    ConnectionState { partial, .. }: &ConnectionState,
) -> Result<Bytes, Problem> {
    if body.is_end_stream() {
        return Ok(Bytes::new());
    }
    let Some(caller) = caller else { return Err(Problem::unauthorized()) };
    partial.belongs_to(caller.principal.tenant);
    partial.await_rest(true);
    let read = read_pieces(body).await;
    partial.await_rest(false);
    read.map_err(|problem| partial.take_failure().map_or(problem, Problem::from))
}

async fn read_pieces(mut body: Incoming) -> Result<Bytes, Problem> {
    let mut pieces = Pieces::default();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| Problem::new(StatusCode::BAD_REQUEST, format!("body: {error}")))?;
        let Ok(data) = frame.into_data() else { continue };
        if !pieces.take(data, BODY_BYTES_MAX) {
            let detail = format!("body: more than {BODY_BYTES_MAX} bytes");
            return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail));
        }
        if body.is_end_stream() {
            break;
        }
    }
    Ok(pieces.into_bytes())
}

/// Returns the caller of a request.
fn caller(shared: &Shared, headers: &HeaderMap) -> Option<Caller> {
    let authorization = headers.get(::http::header::AUTHORIZATION);
    shared.credentials.caller_of(authorization.map(::http::HeaderValue::as_bytes))
}

/// Which surface a request is for.
pub(crate) async fn route(req: &HttpRequest<'_>) -> HttpResponse {
    match req.parts.uri.path() {
        path if path.starts_with(unkey::PREFIX) => unkey::answer(req).await,
        "/v1/check" => route_check(req).await,
        "/json" => {
            timed(req, Surface::Envoy, async |req| only(req, &Method::POST, envoy_json::answer).await).await
        }
        "/forward-auth" => timed(req, Surface::ForwardAuth, forward_auth::answer).await,
        "/openapi.json" => only(req, &Method::GET, async |req: &HttpRequest<'_>| openapi::answer(req)).await,
        _ => not_found(req),
    }
}

/// Also on the admin listener, for the command line.
pub(crate) async fn route_check(req: &HttpRequest<'_>) -> HttpResponse {
    timed(req, Surface::Check, async |req| only(req, &Method::POST, check::answer).await).await
}

/// Answers a request, and records how long it took. Takes a function, because a future would be
/// moved.
async fn timed(
    req: &HttpRequest<'_>,
    surface: Surface,
    handle: impl AsyncFnOnce(&HttpRequest<'_>) -> HttpResponse,
) -> HttpResponse {
    let started = Stopwatch::start();
    let answer = handle(req).await;
    req.shared.telemetry.metrics.took(surface, started.taken(), 1);
    answer
}

/// Refuses other methods. HEAD is accepted wherever GET is: the connection leaves the body out.
pub(crate) async fn only(
    req: &HttpRequest<'_>,
    method: &Method,
    handle: impl AsyncFnOnce(&HttpRequest<'_>) -> HttpResponse,
) -> HttpResponse {
    let is_head = *method == Method::GET && req.parts.method == Method::HEAD;
    if is_head || req.parts.method == *method {
        handle(req).await
    } else {
        Problem::wrong_method(method).into()
    }
}

pub(crate) fn not_found(req: &HttpRequest<'_>) -> HttpResponse {
    Problem::new(StatusCode::NOT_FOUND, format!("there is nothing at {}", req.parts.uri.path())).into()
}
