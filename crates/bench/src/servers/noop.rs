//! Servers that decide nothing, on the stack of Tidegate's server: they show the stack's part of
//! the cost.

use std::convert::Infallible;
use std::net::TcpListener as Listener;

use anyhow::Result;
use bytes::Bytes;
use clap::ValueEnum;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::LocalSet;
use tonic::codegen::BoxFuture;
use tonic::server::{Grpc, UnaryService};
use tonic_prost::ProstCodec;

use super::grpc::{EnvoyRequest, EnvoyResponse};

/// A body as long as one of Tidegate. The only header field set is the content type.
const ANSWER: &str = concat!(
    r#"{"meta":{"requestId":"req_000000000000000000000000"},"#,
    r#""data":{"success":true,"limit":100,"remaining":99,"reset":1700000000000}}"#,
);

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Transport {
    Http,
    Grpc,
}

#[derive(clap::Args)]
pub(super) struct Args {
    #[arg(long)]
    transport: Transport,
    #[arg(long)]
    port: u16,
    #[arg(long)]
    threads: usize,
}

/// Serves until it is killed: threads that each have their own connections, as ours does.
pub(super) fn run(args: &Args) -> Result<()> {
    let listener = Listener::bind(("127.0.0.1", args.port))?;
    let mut workers = Vec::new();
    for _ in 0..args.threads {
        let (sender, receiver) = mpsc::unbounded_channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let transport = args.transport;
        std::thread::spawn(move || {
            LocalSet::new().block_on(&runtime, answer_all(transport, receiver));
        });
        workers.push(sender);
    }
    for (turn, stream) in listener.incoming().enumerate() {
        let stream = stream?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        workers[turn % workers.len()].send(stream)?;
    }
    Ok(())
}

async fn answer_all(transport: Transport, mut incoming: mpsc::UnboundedReceiver<std::net::TcpStream>) {
    while let Some(stream) = incoming.recv().await {
        let Ok(stream) = TcpStream::from_std(stream).map(TokioIo::new) else { continue };
        tokio::task::spawn_local(async move {
            // An error ends this connection only, as when a client disconnects.
            let _ = match transport {
                Transport::Http => http1::Builder::new().serve_connection(stream, service_fn(http)).await,
                Transport::Grpc => {
                    http2::Builder::new(LocalExecutor).serve_connection(stream, service_fn(grpc)).await
                }
            };
        });
    }
}

async fn http(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, hyper::Error> {
    request.into_body().collect().await?;
    let mut answer = Response::new(Full::from(ANSWER));
    answer
        .headers_mut()
        .insert(hyper::header::CONTENT_TYPE, hyper::header::HeaderValue::from_static("application/json"));
    Ok(answer)
}

async fn grpc(request: Request<Incoming>) -> Result<Response<tonic::body::Body>, Infallible> {
    let codec: ProstCodec<EnvoyResponse, EnvoyRequest> = ProstCodec::default();
    Ok(Grpc::new(codec).unary(Allow, request).await)
}

/// Answers OK to everything.
struct Allow;

impl UnaryService<EnvoyRequest> for Allow {
    type Response = EnvoyResponse;
    type Future = BoxFuture<tonic::Response<EnvoyResponse>, tonic::Status>;

    fn call(&mut self, _request: tonic::Request<EnvoyRequest>) -> Self::Future {
        Box::pin(async { Ok(tonic::Response::new(EnvoyResponse { overall_code: 1 })) })
    }
}

/// Runs the tasks of a connection on its own thread.
#[derive(Clone, Copy)]
struct LocalExecutor;

impl<F> Executor<F> for LocalExecutor
where
    F: Future + 'static,
    F::Output: 'static,
{
    fn execute(&self, future: F) {
        tokio::task::spawn_local(future);
    }
}
