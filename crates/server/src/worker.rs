//! Workers: threads that each serve their own connections from beginning to end, and share nothing
//! but the limiter.

use std::cell::Cell;
use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context as Task, Poll, Waker};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc;
use tokio::task::LocalSet;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::frames::FrameWalker;
use crate::guard::{ClientTimeouts, ConnectionState, Framing, GuardedStream};
use crate::listen::AcceptedConnection;
use crate::metrics::{self, Listener};
use crate::request_memory::PartialRequest;
use crate::shared::Shared;
use crate::slots::Slot;
use crate::tls::Tls;
use crate::{admin, grpc, http, load, resp, time_share};

/// Longest time of a health check on a full listener, from its connection to its response. Longer:
/// slower clients get one; fewer of them if others keep them out.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(1);

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
    Builder::new_current_thread().enable_all().on_thread_unpark(time_share::wake).build()
}

/// Serves connections until no more come and the last has ended or is cut.
pub(crate) fn run(
    index: usize,
    runtime: &Runtime,
    context: &Context,
    mut incoming: mpsc::Receiver<AcceptedConnection>,
) {
    metrics::this_is_worker(index);
    let weights: Vec<u32> = context.shared.tenants.iter().map(|tenant| tenant.weight).collect();
    time_share::start(&weights);
    let connections = TaskTracker::new();
    LocalSet::new().block_on(runtime, async {
        tokio::task::spawn_local(load::watch(Arc::clone(&context.shared.telemetry.metrics)));
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
    let AcceptedConnection { listener, stream, peer, slot, for_health } = accepted;
    let metrics = Arc::clone(&context.shared.telemetry.metrics);
    metrics.opened(listener);
    let state = Rc::new(ConnectionState {
        peer,
        slot: Arc::clone(&slot.slot),
        partial: PartialRequest::new(&context.shared.request_memory, peer.ip()),
        tenant: Cell::new(None),
    });
    if !for_health {
        state.slot.set_idle(load::pulse());
    }
    let served = state.charged(serve(listener, stream, Rc::clone(&state), for_health, context));
    if let Err(error) = served.await {
        // Clients disconnect all the time. Operators need this only to search for a cause.
        tracing::debug!(listener = listener.as_str(), %peer, %error, "a connection ended early");
    }
    metrics.closed(listener);
    drop(slot);
}

async fn serve(
    listener: Listener,
    stream: std::net::TcpStream,
    state: Rc<ConnectionState>,
    for_health: bool,
    context: Context,
) -> io::Result<()> {
    let stream = TcpStream::from_std(stream)?;
    let patience = match context.shared.protocol.client_timeouts {
        ClientTimeouts { idle, request } if for_health => {
            ClientTimeouts { idle: idle.min(HEALTH_TIMEOUT), request: request.min(HEALTH_TIMEOUT) }
        }
        patience => patience,
    };
    let Some(tls) = context.tls.clone() else {
        return guarded(listener, stream, state, patience, for_health, context).await;
    };
    let handshake = unless_evicted(&state.slot, tls.acceptor(listener).accept(stream));
    let handshake = tokio::time::timeout(patience.request, handshake).await;
    let stream = handshake.inspect_err(|_| context.shared.telemetry.metrics.timed_out())??;
    guarded(listener, stream, state, patience, for_health, context).await
}

/// Ends a TLS handshake if its connection is evicted.
async fn unless_evicted<T>(slot: &Slot, handshake: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let mut handshake = pin!(handshake);
    poll_fn(|task| {
        slot.wake_by(task.waker());
        if slot.is_evicted() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        handshake.as_mut().poll(task)
    })
    .await
}

async fn guarded<S>(
    listener: Listener,
    stream: S,
    state: Rc<ConnectionState>,
    patience: ClientTimeouts,
    for_health: bool,
    context: Context,
) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin + 'static,
{
    let metrics = Arc::clone(&context.shared.telemetry.metrics);
    let guard =
        |framing| GuardedStream::new(stream, Rc::clone(&state), framing, patience, Arc::clone(&metrics));
    match listener {
        Listener::Admin if for_health => {
            admin::serve_health(guard(Framing::Exchange).always_gives_way(), state, context).await
        }
        Listener::Http => http::serve(guard(Framing::Exchange), state, context).await,
        Listener::Admin => admin::serve(guard(Framing::Exchange), state, context).await,
        Listener::Grpc => {
            // A call is a task of its own, which runs after the connections that were ready with
            // its own.
            let stream = guard(Framing::Frames(FrameWalker::new())).answers_later();
            grpc::serve(stream, state, context).await
        }
        Listener::Resp => resp::serve(guard(Framing::Surface), state, context).await,
    }
}
