//! An axum server with a limit on two of its routes: 5 requests per 10 seconds for each user. The
//! `x-user` header names the user. Start it with
//!
//! ```sh
//! cargo run --release --example axum_server -p tidegate --features tower
//! ```
//!
//! (add `-- 127.0.0.1:4000` for another address), then try it from another terminal:
//!
//! ```sh
//! # Allowed: see RateLimit and X-RateLimit-Remaining count down.
//! curl -i -H 'x-user: alice' http://127.0.0.1:3000/hello
//! # Six at once: the sixth is a 429, with Retry-After and a problem as its body.
//! for i in 1 2 3 4 5 6; do curl -si -H 'x-user: bob' http://127.0.0.1:3000/hello; echo; done
//! # A report costs 3: the second one is denied though 2 are left.
//! for i in 1 2; do curl -si -H 'x-user: carol' http://127.0.0.1:3000/report; echo; done
//! # No limit on this route.
//! curl -i http://127.0.0.1:3000/health
//! # Without a user a request counts as nobody's, and all of nobody's share one limit.
//! curl -i http://127.0.0.1:3000/hello
//! ```

use std::borrow::Cow;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::request::Parts;
use axum::routing::get;
use tidegate::layer::LimitLayer;
use tidegate::{Limit, Limiter};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:3000".to_owned());
    let limiter = Limiter::builder()
        .limit("per_user", Limit::gcra(5, Duration::from_secs(10))?)
        .keys(100_000)
        .build()?;
    let layer = LimitLayer::new(Arc::new(limiter));
    let layer = layer.limit_with_cost("per_user", |request| Some(user(request)), cost)?;
    let app = Router::new()
        .route("/hello", get(|| async { "hello\n" }))
        .route("/report", get(|| async { "a long report\n" }))
        .route_layer(layer)
        .route("/health", get(|| async { "fine\n" }));

    let listener = tokio::net::TcpListener::bind(&address).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app).await?;
    Ok(())
}

/// Returns the user of a request. A real server would take it from a verified token, not from a
/// header that any client can set.
fn user(request: &Parts) -> Cow<'_, [u8]> {
    Cow::Borrowed(request.headers.get("x-user").map_or(b"nobody", |value| value.as_bytes()))
}

fn cost(request: &Parts) -> u64 {
    if request.uri.path() == "/report" { 3 } else { 1 }
}
