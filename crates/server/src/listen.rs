//! Listeners: accept, count, and hand each connection to a worker.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use crate::metrics::Listener;
use crate::shared::Shared;

/// Connections that wait to be accepted. Higher: larger bursts of new clients; more memory in the kernel.
const BACKLOG: u32 = 1_024;

/// Accepted connections that wait for their worker. When it is full, accepting waits.
pub(crate) const HANDED_OVER_MAX: usize = 1_024;

/// How long to wait when the system has no more file descriptors: trying again at once would only burn time.
const EXHAUSTED_WAIT: Duration = Duration::from_millis(50);

/// A connection on its way to a worker.
pub(crate) struct Accepted {
    pub(crate) listener: Listener,
    pub(crate) stream: std::net::TcpStream,
    pub(crate) peer: SocketAddr,
    /// Given back when the connection ends.
    pub(crate) permit: OwnedSemaphorePermit,
}

/// The workers, in turn.
#[derive(Clone)]
pub(crate) struct Workers {
    senders: Arc<[mpsc::Sender<Accepted>]>,
    next: Arc<AtomicUsize>,
}

impl Workers {
    pub(crate) fn new(senders: Vec<mpsc::Sender<Accepted>>) -> Self {
        Self { senders: senders.into(), next: Arc::new(AtomicUsize::new(0)) }
    }

    async fn hand_over(&self, accepted: Accepted) {
        let turn = self.next.fetch_add(1, Ordering::Relaxed) % self.senders.len();
        // A worker that is gone is one that stops; so does the connection.
        let _ = self.senders[turn].send(accepted).await;
    }
}

/// Takes an address.
pub(crate) fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // A port whose last connections are still being forgotten can be taken again; one in use cannot.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Accepts until told to stop.
pub(crate) async fn accept(
    listener: Listener,
    socket: TcpListener,
    shared: Arc<Shared>,
    workers: Workers,
    connections_max: usize,
    stop: CancellationToken,
) {
    let room = Arc::new(Semaphore::new(connections_max));
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = socket.accept() => accepted,
        };
        match accepted {
            Ok((stream, peer)) => {
                let Ok(permit) = Arc::clone(&room).try_acquire_owned() else {
                    shared.metrics.refused(listener);
                    continue;
                };
                let Ok(stream) = stream.set_nodelay(true).and_then(|()| stream.into_std()) else { continue };
                workers.hand_over(Accepted { listener, stream, peer, permit }).await;
            }
            Err(error) => {
                tracing::warn!(listener = listener.as_str(), %error, "a connection could not be accepted");
                pause(&stop).await;
            }
        }
    }
}

async fn pause(stop: &CancellationToken) {
    let _ = tokio::time::timeout(EXHAUSTED_WAIT, stop.cancelled()).await;
}
