//! HTTP: one connection after another, one request after another, each answered without waiting for anything but its
//! own bytes.

mod answer;
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
use ::http::{HeaderMap, Method, Request, StatusCode};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::auth::{Principal, Role};
use crate::metrics::{Stopwatch, Surface};
use crate::shared::Shared;
use crate::worker::{Context, woken_by_stop};

use self::answer::spare;
pub(crate) use self::answer::{Answer, Problem, Reply, json, read_json, text};
pub(crate) use self::path::normal_path;

/// The largest body: a hundred limits of the longest names, written wastefully.
pub(crate) const BODY_BYTES_MAX: usize = 512 << 10;

/// The largest head of a request. Higher: longer cookies; more memory for each connection.
const HEAD_BYTES_MAX: usize = 32 << 10;

/// A request, read as far as every surface needs it.
pub(crate) struct Asked<'s> {
    pub(crate) shared: &'s Shared,
    /// The other end of the connection.
    pub(crate) peer: SocketAddr,
    /// Who asks, if anyone known.
    principal: Option<Principal>,
    pub(crate) parts: Parts,
    pub(crate) body: Bytes,
}

impl<'s> Asked<'s> {
    /// A request that was read whole. Who asks comes from the credential only.
    pub(crate) fn new(shared: &'s Shared, peer: SocketAddr, parts: Parts, body: Bytes) -> Self {
        let principal = principal(shared, &parts.headers);
        Self { shared, peer, principal, parts, body }
    }

    /// Who asks, if they may do what needs `role`.
    pub(crate) fn principal(&self, role: Role) -> Result<Principal, Problem> {
        match self.principal {
            None => Err(Problem::unauthorized()),
            Some(principal) if principal.role < role => Err(Problem::forbidden(role)),
            Some(principal) => Ok(principal),
        }
    }
}

/// Answers the requests of one connection.
pub(crate) async fn serve<S>(stream: S, peer: SocketAddr, context: Context) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin + 'static,
{
    serve_with(stream, peer, context, route_all).await
}

/// Answers the requests of one connection by `route`.
pub(crate) async fn serve_with<S, R>(
    stream: S,
    peer: SocketAddr,
    context: Context,
    route: fn(&Asked<'_>) -> R,
) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin + 'static,
    R: Into<Reply> + 'static,
{
    // The count of all who share is one for all workers; each connection has its own.
    let shared = Rc::new(Arc::clone(&context.shared));
    let service = service_fn(move |request| answer(Rc::clone(&shared), peer, request, route));
    let mut builder = http1::Builder::new();
    // Answers are short: one buffer costs the kernel less than two.
    builder.max_buf_size(HEAD_BYTES_MAX).half_close(true).writev(false);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let mut finishing = false;
    let ended = woken_by_stop(&context.stop, |task| {
        // The admin listener goes on while the others finish: its own stop comes later.
        if !finishing && !context.shared.is_ready() && context.stop.is_cancelled() {
            finishing = true;
            connection.as_mut().graceful_shutdown();
        }
        connection.as_mut().poll(task)
    });
    ended.await.map_err(io::Error::other)
}

#[expect(
    clippy::redundant_allocation,
    reason = "the inner count is shared by all workers, the outer one by none"
)]
async fn answer<R: Into<Reply>>(
    shared: Rc<Arc<Shared>>,
    peer: SocketAddr,
    request: Request<Incoming>,
    route: fn(&Asked<'_>) -> R,
) -> Result<Answer, Infallible> {
    let (parts, body) = request.into_parts();
    let principal = principal(&shared, &parts.headers);
    let reply = match read(principal.is_some(), body).await {
        Ok(body) => {
            let asked = Asked { shared: &shared, peer, principal, parts, body };
            let reply = route(&asked).into();
            spare(asked.parts.headers);
            reply
        }
        Err(problem) if parts.uri.path().starts_with(unkey::PREFIX) => unkey::refuse(problem).into(),
        Err(problem) => Answer::from(problem).into(),
    };
    Ok(match reply {
        Reply::Ready(answer) => answer,
        Reply::Later(answer) => answer.await,
    })
}

/// The whole body. That of a stranger is not read: nothing is kept for whoever may not ask.
async fn read(is_known: bool, mut body: Incoming) -> Result<Bytes, Problem> {
    if body.is_end_stream() {
        return Ok(Bytes::new());
    }
    if !is_known {
        return Err(Problem::unauthorized());
    }
    let mut whole = Bytes::new();
    let mut joined = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| Problem::new(StatusCode::BAD_REQUEST, format!("body: {error}")))?;
        let Ok(data) = frame.into_data() else { continue };
        if whole.len() + joined.len() + data.len() > BODY_BYTES_MAX {
            let detail = format!("body: more than {BODY_BYTES_MAX} bytes");
            return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail));
        }
        // Nearly always, all comes at once; what comes in pieces is copied, since each piece may hold on to much more.
        if whole.is_empty() && joined.is_empty() {
            whole = data;
        } else {
            joined.extend_from_slice(&std::mem::take(&mut whole));
            joined.extend_from_slice(&data);
        }
        if body.is_end_stream() {
            break;
        }
    }
    Ok(if joined.is_empty() { whole } else { joined.freeze() })
}

/// Who asks.
fn principal(shared: &Shared, headers: &HeaderMap) -> Option<Principal> {
    let authorization = headers.get(::http::header::AUTHORIZATION);
    shared.credentials.of_authorization(authorization.map(::http::HeaderValue::as_bytes))
}

/// Which surface a request is for, with those that may have to wait for the store.
pub(crate) fn route_all(asked: &Asked<'_>) -> Reply {
    if asked.parts.uri.path().starts_with(unkey::PREFIX) { unkey::reply(asked) } else { route(asked).into() }
}

/// Which surface a request is for.
fn route(asked: &Asked<'_>) -> Answer {
    match asked.parts.uri.path() {
        "/v1/check" => route_check(asked),
        "/json" => timed(asked, Surface::Envoy, |asked| only(asked, &Method::POST, envoy_json::answer)),
        "/forward-auth" => timed(asked, Surface::ForwardAuth, forward_auth::answer),
        "/openapi.json" => only(asked, &Method::GET, openapi::answer),
        _ => not_found(asked),
    }
}

/// Also on the admin listener, for the command line.
pub(crate) fn route_check(asked: &Asked<'_>) -> Answer {
    timed(asked, Surface::Check, |asked| only(asked, &Method::POST, check::answer))
}

/// Answers with `handle`, and notes how long that took.
fn timed(asked: &Asked<'_>, surface: Surface, handle: impl FnOnce(&Asked<'_>) -> Answer) -> Answer {
    let started = Stopwatch::start();
    let answer = handle(asked);
    asked.shared.metrics.took(surface, started.taken(), 1);
    answer
}

/// Refuses other methods. Who may GET may ask for the head alone: the connection leaves the body out.
pub(crate) fn only(asked: &Asked<'_>, method: &Method, handle: impl FnOnce(&Asked<'_>) -> Answer) -> Answer {
    let is_head = *method == Method::GET && asked.parts.method == Method::HEAD;
    if is_head || asked.parts.method == *method {
        handle(asked)
    } else {
        Problem::wrong_method(method).into()
    }
}

pub(crate) fn not_found(asked: &Asked<'_>) -> Answer {
    Problem::new(StatusCode::NOT_FOUND, format!("there is nothing at {}", asked.parts.uri.path())).into()
}
