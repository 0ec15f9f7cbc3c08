//! A tower layer: limits the requests to a service, and adds the state of the limits to every
//! response.
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//! use http::HeaderName;
//! use tidegate::layer::{LimitLayer, header_key};
//! use tidegate::{Limit, Limiter};
//!
//! let minute = Duration::from_secs(60);
//! let limiter = Limiter::builder()
//!     .limit("per_user", Limit::gcra(100, minute)?)
//!     .limit("bytes_up", Limit::gcra(1_000_000, minute)?)
//!     .build()?;
//! let layer = LimitLayer::new(Arc::new(limiter))
//!     .limit("per_user", header_key(HeaderName::from_static("x-user")))?
//!     .limit_with_cost("bytes_up", header_key(HeaderName::from_static("x-user")), |request| {
//!         let length = request.headers.get("content-length").and_then(|value| value.to_str().ok());
//!         length.and_then(|length| length.parse().ok()).unwrap_or(1)
//!     })?;
//! # let _ = layer;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Choosing keys
//!
//! A limit is only as good as its key. The layer leaves two choices to you, because only you know
//! the answer:
//!
//! - **Client addresses.** The layer does not guess them. Behind a proxy, the address of the
//!   connection is the proxy's, and all clients would share one limit. The client writes
//!   `X-Forwarded-For` itself, except for the part that your own proxy adds. If clients connect to
//!   you directly, take the address from the connection. Otherwise take it from the field that your
//!   own proxy overwrites, and from no other source.
//! - **Missing keys.** A limit does not apply if its key is `None`. If omitting a header must not
//!   bypass the limit, reject such requests earlier, or count them under a key of their own:
//!
//! ```
//! # use std::borrow::Cow;
//! # use tidegate::layer::{LimitLayer, LayerError};
//! # fn add(layer: LimitLayer) -> Result<LimitLayer, LayerError> {
//! layer.limit("per_user", |request| {
//!     let user = request.headers.get("x-user").map_or(&b"nobody"[..], |value| value.as_bytes());
//!     Some(Cow::Borrowed(user))
//! })
//! # }
//! ```

use std::borrow::Cow;
use std::fmt;
use std::future::{Future, Ready, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use arrayvec::ArrayVec;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderName, HeaderValue, Request, Response, StatusCode};
use pin_project_lite::pin_project;
use tidegate_core::TooManyLimits;
use tower_layer::Layer;
use tower_service::Service;

use crate::decision::{Decision, LIMITS_INLINE_MAX};
use crate::gate::{Check, Gate};
use crate::headers::{self, PROBLEM_CONTENT_TYPE, ResetStyle};
use crate::limiter::{Limiter, UnknownName};

type KeyOf = dyn for<'r> Fn(&'r Parts) -> Option<Cow<'r, [u8]>> + Send + Sync;
type CostOf = dyn Fn(&Parts) -> u64 + Send + Sync;
type Fields = Vec<(HeaderName, HeaderValue)>;

/// A layer that limits a service: each request counts under all limits for which it has a key, or
/// under none.
///
/// An allowed request goes on to the service. Its response gets the header fields of
/// [`headers`](headers::headers), as of the time of the decision. A denied request gets a response
/// at once: 429, the same fields, and a problem (RFC 9457) as its body. Put all limits into one
/// layer: of two, the outer one overwrites the fields of the inner one, and charges requests that
/// the inner one denies.
#[derive(Clone, Debug)]
pub struct LimitLayer {
    policy: Policy,
}

/// Why a limit cannot be added to a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayerError {
    /// The limiter has no such limit.
    UnknownName(UnknownName),
    /// More than [`LIMITS_INLINE_MAX`] limits.
    TooManyLimits(TooManyLimits),
}

impl fmt::Display for LayerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownName(error) => error.fmt(f),
            Self::TooManyLimits(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for LayerError {}

impl LimitLayer {
    /// Returns a layer without limits.
    pub fn new(limiter: Arc<Limiter>) -> Self {
        Self { policy: Policy { limiter, rules: Vec::new(), reset: ResetStyle::default() } }
    }

    /// Adds the limit `name`. A request costs 1 on the key that `key` returns, and does not count
    /// if it returns `None`. `key` may borrow from the request, so it has to be a function, or a
    /// closure written in the call itself. For a closure from a variable, the compiler does not
    /// infer this borrow.
    pub fn limit<K>(self, name: &str, key: K) -> Result<Self, LayerError>
    where
        K: for<'r> Fn(&'r Parts) -> Option<Cow<'r, [u8]>> + Send + Sync + 'static,
    {
        self.add(name, Arc::new(key), None)
    }

    /// Adds the limit `name` like [`LimitLayer::limit`], with the cost that `cost` returns.
    pub fn limit_with_cost<K, C>(self, name: &str, key: K, cost: C) -> Result<Self, LayerError>
    where
        K: for<'r> Fn(&'r Parts) -> Option<Cow<'r, [u8]>> + Send + Sync + 'static,
        C: Fn(&Parts) -> u64 + Send + Sync + 'static,
    {
        self.add(name, Arc::new(key), Some(Arc::new(cost)))
    }

    /// Sets the meaning of `X-RateLimit-Reset`.
    #[must_use]
    pub fn reset_style(mut self, reset: ResetStyle) -> Self {
        self.policy.reset = reset;
        self
    }

    fn add(mut self, name: &str, key: Arc<KeyOf>, cost: Option<Arc<CostOf>>) -> Result<Self, LayerError> {
        let limits = self.policy.rules.len() + 1;
        if limits > LIMITS_INLINE_MAX {
            let error = TooManyLimits { limits, limits_max: LIMITS_INLINE_MAX };
            return Err(LayerError::TooManyLimits(error));
        }
        let gate = self.policy.limiter.gate(name).map_err(LayerError::UnknownName)?;
        self.policy.rules.push(Rule { gate, key, cost });
        Ok(self)
    }
}

/// Returns a function that takes the key from a header field, the first of several with this name.
/// A request without the field has no key.
///
/// A client that can set the field chooses the key, and with a new key for every request it is
/// never limited. Use only fields that a trusted component has set or verified. See [Choosing
/// keys](self#choosing-keys).
pub fn header_key(
    name: HeaderName,
) -> impl for<'r> Fn(&'r Parts) -> Option<Cow<'r, [u8]>> + Clone + Send + Sync + 'static {
    move |request: &Parts| request.headers.get(&name).map(|value| Cow::Borrowed(value.as_bytes()))
}

/// The limits of a layer, and where they are counted.
#[derive(Clone)]
struct Policy {
    limiter: Arc<Limiter>,
    rules: Vec<Rule>,
    reset: ResetStyle,
}

/// One limit of a layer: on which key a request counts, and how much.
#[derive(Clone)]
struct Rule {
    gate: Gate,
    key: Arc<KeyOf>,
    cost: Option<Arc<CostOf>>,
}

impl Rule {
    fn check(&self, request: &Parts) -> Option<Check<'_>> {
        let check = self.gate.key((self.key)(request)?);
        Some(self.cost.as_ref().map_or(check, |cost| check.cost(cost(request))))
    }
}

impl Policy {
    fn decide(&self, request: &Parts) -> Decision<'_> {
        let checks: ArrayVec<_, LIMITS_INLINE_MAX> =
            self.rules.iter().filter_map(|rule| rule.check(request)).collect();
        let Ok(decision) = self.limiter.check_all(&checks) else {
            unreachable!("`LimitLayer::add` takes no more limits than one check may have")
        };
        decision
    }

    fn fields(&self, decision: &Decision<'_>) -> Fields {
        headers::headers(decision, self.limiter.wall_us(), self.reset)
    }
}

impl fmt::Debug for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gates: Vec<_> = self.rules.iter().map(|rule| &rule.gate).collect();
        f.debug_struct("Policy").field("gates", &gates).field("reset", &self.reset).finish_non_exhaustive()
    }
}

impl<S> Layer<S> for LimitLayer {
    type Service = LimitService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        LimitService { inner, policy: Arc::new(self.policy.clone()) }
    }
}

/// A service behind the limits of a [`LimitLayer`].
#[derive(Clone, Debug)]
pub struct LimitService<S> {
    inner: S,
    policy: Arc<Policy>,
}

impl<S, ReqBody, ResBody> Service<Request<ReqBody>> for LimitService<S>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>>,
    ResBody: From<String>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = ResponseFuture<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        let (parts, body) = request.into_parts();
        let decision = self.policy.decide(&parts);
        let fields = self.policy.fields(&decision);
        let state = if decision.is_allowed() {
            State::Passed { inner: self.inner.call(Request::from_parts(parts, body)), fields }
        } else {
            State::Denied { answer: ready(Ok(denial(&decision, fields))) }
        };
        ResponseFuture { state }
    }
}

fn denial<B: From<String>>(decision: &Decision<'_>, fields: Fields) -> Response<B> {
    let mut response = Response::new(B::from(headers::problem_body(decision)));
    *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(PROBLEM_CONTENT_TYPE));
    headers::put(response.headers_mut(), fields);
    response
}

pin_project! {
    /// The future response of a [`LimitService`]: that of the inner service, or a denial.
    pub struct ResponseFuture<F: Future> {
        #[pin]
        state: State<F>,
    }
}

pin_project! {
    #[project = StateProjection]
    enum State<F: Future> {
        Passed { #[pin] inner: F, fields: Fields },
        Denied { #[pin] answer: Ready<F::Output> },
    }
}

impl<F, B, E> Future for ResponseFuture<F>
where
    F: Future<Output = Result<Response<B>, E>>,
{
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().state.project() {
            StateProjection::Denied { answer } => answer.poll(cx),
            StateProjection::Passed { inner, fields } => {
                let mut answer = ready!(inner.poll(cx));
                if let Ok(response) = &mut answer {
                    headers::put(response.headers_mut(), std::mem::take(fields));
                }
                Poll::Ready(answer)
            }
        }
    }
}
