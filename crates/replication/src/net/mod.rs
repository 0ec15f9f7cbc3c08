//! The task that carries rounds out: a lease at the own origin, a connection to each peer, and a
//! listener for theirs.

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

/// A node that is the replicator of its region, or a standby for it.
///
/// If dropped, it stops at once without notice, as in a crash. Its lease expires, and another node
/// takes over.
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
    /// Listens for other regions, and becomes replicator as soon as the lease is free. Must be
    /// called within a runtime, which runs its tasks.
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

    /// The address on which it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the forwarder of checks to their owner regions.
    pub fn forwarder(&self) -> Forwarder {
        self.forwarder.clone()
    }

    /// Returns the current status.
    pub fn status(&self) -> ReplicationStatus {
        self.shared.status()
    }

    /// Stops and releases the lease, so that another node takes over at once. Components not yet
    /// acknowledged stay dirty in the origin.
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
    // Allows a port with connections in TIME_WAIT, but not one in use.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(accept::BACKLOG)
}
