//! Workers: threads that each serve their own connections from beginning to end, and share nothing
//! but the limiter.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context as Task, Poll, Waker};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc;
use tokio::task::LocalSet;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::guard::{ClientTimeouts, GuardedStream};
use crate::listen::AcceptedConnection;
use crate::metrics::{self, Listener};
use crate::shared::Shared;
use crate::tls::Tls;
use crate::{admin, grpc, http, load, resp};

/// The state that every connection of a worker needs.
#[derive(Clone)]
pub(crate) struct Context {
    pub(crate) shared: Arc<Shared>,
    pub(crate) tls: Option<Tls>,
    /// Cancelled when the server stops: connections finish open requests and begin no new ones.
    pub(crate) stop: CancellationToken,
    /// The same for the admin listener, which serves until the others have drained.
    pub(crate) stop_admin: CancellationToken,
    /// Cancelled when the remaining connections are cut.
    pub(crate) cut: CancellationToken,
}

/// Creates the runtime of a worker, on one thread. Its connections never move, so their state need
/// not be shared.
pub(crate) fn runtime() -> io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}

/// Serves connections until no more come and the last has ended or is cut.
pub(crate) fn run(
    index: usize,
    runtime: &Runtime,
    context: &Context,
    mut incoming: mpsc::Receiver<AcceptedConnection>,
) {
    metrics::this_is_worker(index);
    let connections = TaskTracker::new();
    LocalSet::new().block_on(runtime, async {
        tokio::task::spawn_local(load::watch());
        while let Some(accepted) = incoming.recv().await {
            connections.spawn_local(connection(accepted, context.clone()));
        }
        connections.close();
        tokio::select! {
            biased;
            () = connections.wait() => {}
            () = context.cut.cancelled() => tracing::warn!(
                connections = connections.len(),
                "connections were cut because they did not end in time"
            ),
        }
    });
}

/// Polls a connection until it is done, and wakes it when the server stops. The connection reads
/// from `Shared` that it must stop.
pub(crate) async fn woken_by_stop<T>(
    stop: &CancellationToken,
    mut poll: impl FnMut(&mut Task<'_>) -> Poll<T>,
) -> T {
    let mut stopped = pin!(stop.cancelled());
    let mut registered: Option<Waker> = None;
    poll_fn(|task| {
        // A poll of the token takes a lock that all connections share. One registration is enough
        // to be woken.
        if !registered.as_ref().is_some_and(|waker| waker.will_wake(task.waker())) {
            let _ = stopped.as_mut().poll(task);
            registered = Some(task.waker().clone());
        }
        poll(task)
    })
    .await
}

async fn connection(accepted: AcceptedConnection, context: Context) {
    let AcceptedConnection { listener, stream, peer, permit } = accepted;
    let metrics = Arc::clone(&context.shared.telemetry.metrics);
    metrics.opened(listener);
    if let Err(error) = serve(listener, stream, peer, context).await {
        // Clients disconnect all the time. Operators need this only to search for a cause.
        tracing::debug!(listener = listener.as_str(), %peer, %error, "a connection ended early");
    }
    metrics.closed(listener);
    drop(permit);
}

async fn serve(
    listener: Listener,
    stream: std::net::TcpStream,
    peer: SocketAddr,
    context: Context,
) -> io::Result<()> {
    let stream = TcpStream::from_std(stream)?;
    let patience = patience(listener, context.shared.protocol.client_timeouts);
    let metrics = Arc::clone(&context.shared.telemetry.metrics);
    let Some(tls) = context.tls.clone() else {
        return surface(listener, GuardedStream::new(stream, patience, metrics), peer, context).await;
    };
    let stream = tokio::time::timeout(
        context.shared.protocol.client_timeouts.request,
        tls.acceptor(listener).accept(stream),
    )
    .await??;
    surface(listener, GuardedStream::new(stream, patience, metrics), peer, context).await
}

/// Returns the timeouts of a listener. HTTP/2 has frames without requests, so an idle connection
/// looks busy. There, only a connection without any data times out.
fn patience(listener: Listener, patience: ClientTimeouts) -> ClientTimeouts {
    match listener {
        Listener::Grpc => ClientTimeouts { request: patience.idle, ..patience },
        Listener::Http | Listener::Resp | Listener::Admin => patience,
    }
}

async fn surface<S>(
    listener: Listener,
    stream: GuardedStream<S>,
    peer: SocketAddr,
    context: Context,
) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin + 'static,
{
    match listener {
        Listener::Http => http::serve(stream, peer, context).await,
        Listener::Admin => admin::serve(stream, peer, context).await,
        // A call is a task of its own, which runs after the connections that were ready with its
        // own.
        Listener::Grpc => grpc::serve(stream.answers_later(), context).await,
        Listener::Resp => resp::serve(stream, context).await,
    }
}
