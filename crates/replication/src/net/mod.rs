//! The task that carries rounds out: a lease at the own origin, a connection to each peer, and a listener for theirs.

mod accept;
mod config;
mod deliver;
mod forward;
mod frames;
mod lease;
mod send;
mod shared;
mod slots;
mod status;
mod tls;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use tidegate_origin::Origin;
use tokio::net::TcpListener;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

pub use config::{PeerCertificates, PeerConfig, ReplicatorConfig, ReplicatorError};
pub use forward::Forwarder;
pub use status::{PeerCounts, PeerStatus, ReplicationStatus};

use shared::Shared;

/// A process that is the replicator of its region, or would be if the one that is went away.
///
/// Dropped, it stops at once and without a word, as a crash would; its lease runs out and somebody else takes over.
pub struct Replicator {
    shared: Arc<Shared>,
    address: SocketAddr,
    forwarder: Forwarder,
    tasks: TaskTracker,
    stop: DropGuard,
}

impl std::fmt::Debug for Replicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Replicator").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Replicator {
    /// Listens for the replicators of other regions, and becomes the one of its own as soon as nobody else is. Has to be called
    /// within a runtime, which carries everything out.
    pub fn start(config: ReplicatorConfig, origin: Arc<dyn Origin>) -> Result<Self, ReplicatorError> {
        let checked = config::check(config)?;
        let listener = listen(checked.listen)
            .map_err(|error| ReplicatorError::of("peer_listen", &format!("{}: {error}", checked.listen)))?;
        let address = listener.local_addr().map_err(|error| ReplicatorError::of("peer_listen", &error))?;
        let stop = CancellationToken::new();
        let tasks = TaskTracker::new();
        let shared = Arc::new(Shared::new(checked, origin));
        let spawn = |task| {
            let stop = stop.clone();
            tasks.spawn(async move { stop.run_until_cancelled_owned(task).await });
        };
        spawn(Box::pin(lease::keep_lease(Arc::clone(&shared)))
            as std::pin::Pin<Box<dyn Future<Output = ()> + Send>>);
        spawn(Box::pin(lease::run_rounds(Arc::clone(&shared))));
        spawn(Box::pin(accept::accept(Arc::clone(&shared), listener, tasks.clone(), stop.clone())));
        let (forwarder, inboxes) = Forwarder::new(Arc::clone(&shared));
        for (place, inbox) in inboxes.into_iter().enumerate() {
            spawn(Box::pin(send::send_batches(Arc::clone(&shared), place)));
            spawn(Box::pin(forward::carry(Arc::clone(&shared), place, inbox)));
        }
        Ok(Self { shared, address, forwarder, tasks, stop: stop.drop_guard() })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What takes questions to the regions that decide them.
    pub fn forwarder(&self) -> Forwarder {
        self.forwarder.clone()
    }

    /// How it stands.
    pub fn status(&self) -> ReplicationStatus {
        self.shared.status()
    }

    /// Stops, and lets somebody else be the replicator at once. What was not carried stays marked at the origin.
    pub async fn stop(self) {
        let Self { shared, tasks, stop, .. } = self;
        drop(stop);
        tasks.close();
        tasks.wait().await;
        shared.give_up_lease().await;
    }
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket =
        if address.is_ipv4() { tokio::net::TcpSocket::new_v4() } else { tokio::net::TcpSocket::new_v6() }?;
    // A port whose last connections are still being forgotten can be taken again; one in use cannot.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(accept::BACKLOG)
}
