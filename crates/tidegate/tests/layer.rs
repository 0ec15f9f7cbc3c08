//! The tower layer, from a request to its response.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::borrow::Cow;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use common::{HOUR, MINUTE, gcra, limiter, remaining};
use http::request::Parts;
use http::{HeaderName, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use tidegate::headers::ResetStyle;
use tidegate::layer::{LayerError, LimitLayer, header_key};
use tidegate::{LIMITS_INLINE_MAX, Limit, Limiter, TooManyLimits, UnknownName};
use tower::{Layer, Service, ServiceExt, service_fn};

type Body = Full<Bytes>;

const USER: HeaderName = HeaderName::from_static("x-user");

/// A layer without limits on a limiter with these, a thousand seconds after the epoch.
fn layer(limits: &[(&str, Limit)]) -> (LimitLayer, Arc<Limiter>) {
    let (limiter, clock) = limiter(limits);
    clock.advance(Duration::from_secs(1_000));
    let limiter = Arc::new(limiter);
    (LimitLayer::new(Arc::clone(&limiter)), limiter)
}

fn request(user: &str) -> Request<Body> {
    Request::builder().uri("/hello").header(USER, user).body(Body::from("question")).unwrap()
}

/// A service that counts its calls and returns the body of the request.
fn echo(
    calls: &AtomicU32,
) -> impl Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send> + Clone {
    service_fn(|request: Request<Body>| {
        calls.fetch_add(1, Ordering::Relaxed);
        std::future::ready(Ok(Response::new(request.into_body())))
    })
}

async fn body_of(response: Response<Body>) -> String {
    String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
}

#[tokio::test]
async fn an_allowed_request_reaches_the_service_and_its_answer_carries_the_fields() {
    let (layer, _) = layer(&[("per_user", gcra(5, MINUTE))]);
    let calls = AtomicU32::new(0);
    let service = layer.limit("per_user", header_key(USER)).unwrap().layer(echo(&calls));
    let response = service.oneshot(request("alice")).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(response.headers()["ratelimit-policy"], r#""per_user";q=5;w=60"#);
    assert_eq!(response.headers()["ratelimit"], r#""per_user";r=4;t=12"#);
    assert_eq!(response.headers()["x-ratelimit-remaining"], "4");
    assert!(!response.headers().contains_key("retry-after"));
    assert_eq!(body_of(response).await, "question");
    assert_eq!(calls.into_inner(), 1);
}

#[tokio::test]
async fn a_denied_request_is_answered_429_and_never_reaches_the_service() {
    let (layer, _) = layer(&[("per_user", gcra(1, MINUTE))]);
    let calls = AtomicU32::new(0);
    let service = layer.limit("per_user", header_key(USER)).unwrap().layer(echo(&calls));
    service.clone().oneshot(request("alice")).await.unwrap();
    let response = service.clone().oneshot(request("alice")).await.unwrap();
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(response.headers()["content-type"], "application/problem+json");
    assert_eq!(response.headers()["retry-after"], "60");
    assert_eq!(response.headers()["ratelimit"], r#""per_user";r=0;t=60"#);
    assert_eq!(response.headers()["x-ratelimit-denied-by"], "per_user");
    let problem: serde_json::Value = serde_json::from_str(&body_of(response).await).unwrap();
    assert_eq!(problem["violated-policies"], serde_json::json!(["per_user"]));
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    let other = service.oneshot(request("bob")).await.unwrap();
    assert_eq!(other.status(), StatusCode::OK, "another key has its own meter");
}

#[tokio::test]
async fn a_request_without_a_key_is_not_limited() {
    let (layer, _) = layer(&[("per_user", gcra(0, MINUTE))]);
    let calls = AtomicU32::new(0);
    let service = layer.limit("per_user", header_key(USER)).unwrap().layer(echo(&calls));
    let response = service.oneshot(Request::new(Body::default())).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    assert!(response.headers().is_empty(), "no limit, no header: {:?}", response.headers());
    assert_eq!(calls.into_inner(), 1);
}

#[tokio::test]
async fn request_cost_comes_from_the_layer_function() {
    let (layer, limiter) = layer(&[("per_user", gcra(10, HOUR))]);
    let calls = AtomicU32::new(0);
    let cost = |request: &Parts| if request.method == Method::POST { 7 } else { 1 };
    let service = layer.limit_with_cost("per_user", header_key(USER), cost).unwrap().layer(echo(&calls));
    let post = || {
        let mut post = request("alice");
        *post.method_mut() = Method::POST;
        post
    };
    assert_eq!(service.clone().oneshot(post()).await.unwrap().headers()["x-ratelimit-remaining"], "3");
    assert_eq!(service.clone().oneshot(post()).await.unwrap().status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(service.oneshot(request("alice")).await.unwrap().status(), StatusCode::OK);
    assert_eq!(remaining(&limiter, limiter.gate("per_user").unwrap().key("alice")), 2);
}

#[tokio::test]
async fn two_limits_are_charged_together_or_not_at_all() {
    let (layer, limiter) = layer(&[("per_user", gcra(9, HOUR)), ("per_path", gcra(1, HOUR))]);
    let calls = AtomicU32::new(0);
    let layer = layer.limit("per_user", header_key(USER)).unwrap();
    let layer = layer
        .limit("per_path", |request| Some(Cow::Owned(request.uri.path().to_ascii_uppercase().into_bytes())));
    let service = layer.unwrap().layer(echo(&calls));
    let first = service.clone().oneshot(request("alice")).await.unwrap();
    assert_eq!(first.headers()["ratelimit-policy"], r#""per_user";q=9;w=3600, "per_path";q=1;w=3600"#);
    let second = service.oneshot(request("alice")).await.unwrap();
    assert_eq!(second.headers()["x-ratelimit-denied-by"], "per_path");
    assert_eq!(second.headers()["ratelimit"], r#""per_path";r=0;t=3600"#);
    assert_eq!(remaining(&limiter, limiter.gate("per_user").unwrap().key("alice")), 8);
    assert_eq!(remaining(&limiter, limiter.gate("per_path").unwrap().key("/HELLO")), 0);
}

#[tokio::test]
async fn only_limits_with_a_key_in_the_request_appear_in_headers() {
    let (layer, _) = layer(&[("per_user", gcra(9, HOUR)), ("per_token", gcra(0, HOUR))]);
    let calls = AtomicU32::new(0);
    let token = header_key(HeaderName::from_static("x-token"));
    let layer = layer.limit("per_token", token).unwrap().limit("per_user", header_key(USER)).unwrap();
    let response = layer.layer(echo(&calls)).oneshot(request("alice")).await.unwrap();
    assert_eq!(response.headers()["ratelimit-policy"], r#""per_user";q=9;w=3600"#);
}

#[tokio::test]
async fn key_can_come_from_request_extensions() {
    #[derive(Clone)]
    struct Account(String);
    let (layer, limiter) = layer(&[("per_account", gcra(9, HOUR))]);
    let calls = AtomicU32::new(0);
    let layer = layer.limit("per_account", |request| {
        request.extensions.get::<Account>().map(|account| Cow::Borrowed(account.0.as_bytes()))
    });
    let service = layer.unwrap().layer(echo(&calls));
    let mut asked = request("alice");
    asked.extensions_mut().insert(Account("acme".to_owned()));
    service.oneshot(asked).await.unwrap();
    assert_eq!(remaining(&limiter, limiter.gate("per_account").unwrap().key("acme")), 8);
}

#[tokio::test]
async fn the_reset_style_of_the_layer_is_that_of_its_answers() {
    let (layer, _) = layer(&[("per_user", gcra(5, MINUTE))]);
    let calls = AtomicU32::new(0);
    let layer = layer.limit("per_user", header_key(USER)).unwrap();
    let epoch = layer.clone().layer(echo(&calls)).oneshot(request("alice")).await.unwrap();
    let delta = layer.reset_style(ResetStyle::Delta).layer(echo(&calls));
    let delta = delta.oneshot(request("alice")).await.unwrap();
    assert_eq!(epoch.headers()["x-ratelimit-reset"], "1012");
    assert_eq!(delta.headers()["x-ratelimit-reset"], "24");
}

#[tokio::test]
async fn an_error_of_the_service_passes_through() {
    let (layer, _) = layer(&[("per_user", gcra(5, MINUTE))]);
    let failing = service_fn(|_: Request<Body>| std::future::ready(Err::<Response<Body>, _>("out of order")));
    let service = layer.limit("per_user", header_key(USER)).unwrap().layer(failing);
    assert_eq!(service.oneshot(request("alice")).await.unwrap_err(), "out of order");
}

#[tokio::test]
async fn an_axum_router_can_be_limited() {
    let (layer, _) = layer(&[("per_user", gcra(1, MINUTE))]);
    let layer = layer.limit("per_user", header_key(USER)).unwrap();
    let app = axum::Router::new().route("/hello", axum::routing::get(|| async { "hi" })).layer(layer);
    let ask = || Request::get("/hello").header(USER, "alice").body(axum::body::Body::empty()).unwrap();
    assert_eq!(app.clone().oneshot(ask()).await.unwrap().status(), StatusCode::OK);
    assert_eq!(app.oneshot(ask()).await.unwrap().status(), StatusCode::TOO_MANY_REQUESTS);
}

#[test]
fn the_layer_is_ready_when_the_service_is() {
    struct BusyService;
    impl Service<Request<Body>> for BusyService {
        type Response = Response<Body>;
        type Error = Infallible;
        type Future = std::future::Pending<Result<Response<Body>, Infallible>>;
        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Pending
        }
        fn call(&mut self, _: Request<Body>) -> Self::Future {
            std::future::pending()
        }
    }
    let (layer, _) = layer(&[]);
    let mut context = Context::from_waker(std::task::Waker::noop());
    assert!(layer.layer(BusyService).poll_ready(&mut context).is_pending());
    let calls = AtomicU32::new(0);
    assert!(layer.layer(echo(&calls)).poll_ready(&mut context).is_ready());
}

#[test]
fn an_unknown_limit_is_an_error_when_the_layer_is_built() {
    let (layer, _) = layer(&[("per_user", gcra(5, MINUTE))]);
    let error = layer.limit("per_usr", header_key(USER)).unwrap_err();
    assert_eq!(error, LayerError::UnknownName(UnknownName::Limit("per_usr".to_owned())));
    assert_eq!(error.to_string(), r#"limit: there is none called "per_usr""#);
}

#[test]
fn more_limits_than_a_check_may_have_is_an_error_when_the_layer_is_built() {
    let (mut layer, _) = layer(&[("per_user", gcra(5, MINUTE))]);
    for _ in 0..LIMITS_INLINE_MAX {
        layer = layer.limit("per_user", header_key(USER)).unwrap();
    }
    let error = TooManyLimits { limits: LIMITS_INLINE_MAX + 1, limits_max: LIMITS_INLINE_MAX };
    let result = layer.limit("per_user", header_key(USER));
    assert_eq!(result.unwrap_err(), LayerError::TooManyLimits(error));
}
