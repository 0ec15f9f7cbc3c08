//! The Tidegate server: one limiter behind the protocols that existing clients speak.
//!
//! Listeners accept connections and pass them to workers. A worker reads a request, finds the
//! limits that apply, asks the limiter and writes the response, all on one thread. It waits only
//! for the origin of its region, if memory cannot decide. This crate does no arithmetic on counts.

mod address;
mod admin;
pub mod auth;
pub mod bounds;
pub mod config;
mod control;
mod decider;
mod decision_log;
mod envoy;
#[cfg(feature = "parquet")]
mod export;
mod frames;
#[doc(hidden)]
pub mod fuzzing;
mod grpc;
mod guard;
mod http;
mod listen;
mod load;
mod metrics;
mod open_files;
mod origin;
mod origin_monitor;
mod overrides;
mod pieces;
mod pipeline;
mod prepare;
mod rates;
mod reason;
mod reload;
mod request_memory;
mod resp;
mod rules;
mod search_turns;
pub mod settings;
mod shared;
mod slots;
mod tenant_metrics;
mod time_share;
mod tls;
mod worker;

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tidegate::region::Region;
use tidegate_control::StoreFollower;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub use crate::admin::UNRULED_REQUESTS;
pub use crate::config::{Config, ConfigProblems};
pub use crate::envoy::{DescriptorImport, import_descriptors};
#[cfg(feature = "parquet")]
pub use crate::export::{LogExport, LogExportError};
pub use crate::metrics::Listener;
pub use crate::origin::{OriginConfig, OriginTls, RegionConfig};
pub use crate::origin_monitor::{OriginProbe, SINGLE_PROBE_TIME_MAX};
pub use crate::prepare::PreparedServer;
pub use crate::shared::StartError;
/// The nodes that count together, to compute a bound without a server.
pub use tidegate_core::bound::Fleet;
/// A moment as people and programs read it.
pub use tidegate_record::{moment, timestamp};
/// Rules files and periods, to read them without a server.
pub use tidegate_rules::{
    FILE_BYTES_MAX as RULES_FILE_BYTES_MAX, RuleSet, audit, check_part as check_rules_part, parse_period,
    snapshot,
};

use crate::config::RulesConfig;
use crate::listen::{ListenerTask, Workers};
use crate::open_files::{ADMIN_CONNECTIONS_MAX, OpenFiles};
use crate::reload::WatchedFile;
use crate::shared::{ListenerAddress, Shared};
use crate::worker::Context;

/// Timeout for requests to the admin listener after all other listeners have drained. Longer:
/// slower clients get their last response; one slow client delays a stop for longer.
const ADMIN_DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// Shortest timeout for the last reports to the origin. Longer: less usage is lost with a slow
/// origin; a stop takes longer without an origin.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);

/// A stop that waits longer than this for the origin says so. Longer: fewer lines in the log.
const LEAVE_SILENCE_MAX: Duration = Duration::from_millis(500);

/// A server with open ports.
pub struct Server {
    shared: Arc<Shared>,
    config: Config,
    sockets: Vec<(Listener, TcpListener)>,
    peer_address: Option<SocketAddr>,
    watched: Vec<WatchedFile>,
    following: Option<StoreFollower<Shared>>,
    context: Context,
}

impl Server {
    /// Opens the data folder and the rule store, then the ports. Must be called in the runtime that
    /// serves them.
    pub async fn start(prepared: PreparedServer) -> Result<Self, StartError> {
        let PreparedServer { mut config, mut shared, tls, watched, data_dir } = prepared;
        reload::warn(&watched, &shared);
        if let Some(folder) = &data_dir {
            shared.keep_overrides_in(folder)?;
            shared.keep_log_in(folder, &config)?;
        }
        let shared = Arc::new(shared);
        let following = match &config.rules {
            Some(RulesConfig::Store(store)) => {
                Some(StoreFollower::start(store, &shared).await.map_err(StartError::Rules)?)
            }
            Some(RulesConfig::File(_)) | None => None,
        };
        let sockets = open(&config)?;
        let peer_address = shared.decider.region.as_ref().map_or(Ok(None), Region::start_replication);
        let peer_address = peer_address.map_err(|error| StartError::Ports(error.problems))?;
        shared.node.listens_on(listener_addresses(&config, &sockets, peer_address));
        let serving = sockets.iter().filter(|(listener, _)| *listener != Listener::Admin).count();
        config.connections_max = OpenFiles::new(serving, config.connections_max, config.workers).make_room();
        let context = Context {
            shared: Arc::clone(&shared),
            tls,
            stop: CancellationToken::new(),
            stop_admin: CancellationToken::new(),
            cut: CancellationToken::new(),
        };
        Ok(Self { shared, config, sockets, peer_address, watched, following, context })
    }

    /// Where servers of other regions reach it.
    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.peer_address
    }

    /// Where the server listens: useful where a port was left to the system.
    pub fn addresses(&self) -> Vec<(Listener, SocketAddr)> {
        let address =
            |(listener, socket): &(Listener, TcpListener)| Some((*listener, socket.local_addr().ok()?));
        self.sockets.iter().filter_map(address).collect()
    }

    /// Whether connections are encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.context.tls.is_some()
    }

    /// Serves until `stopped`, then finishes the open requests. The admin listener runs until the
    /// others have drained, so that probes see a server that is alive but not ready.
    pub async fn run(self, stopped: impl Future<Output = ()>) -> Result<(), StartError> {
        let Self { shared, config, sockets, watched, following, context, .. } = self;
        let (senders, threads) = start_workers(config.workers, &context)?;
        let (mut serving, mut admin) = serve(sockets, &Workers::new(senders), &config, &context);
        serving.spawn(reload::watch(watched, Arc::clone(&shared), context.stop.clone()));
        serving.spawn(rates::watch(Arc::clone(&shared), context.stop.clone()));
        if let Some(following) = following {
            serving.spawn(following.run(context.stop.clone()));
        }
        let watching = shared.decider.region.clone().map(|region| {
            let fleet = Arc::clone(&shared);
            let watched = Arc::clone(&shared);
            tokio::spawn(async move {
                let monitor = origin_monitor::watch(watched);
                tokio::join!(monitor, origin::watch_refusals(region), origin::watch_fleet(fleet))
            })
        });
        stopped.await;
        shared.node.stop();
        context.stop.cancel();
        finish(&mut serving, config.drain_timeout).await;
        context.stop_admin.cancel();
        finish(&mut admin, ADMIN_DRAIN_TIMEOUT).await;
        if let Some(region) = &shared.decider.region {
            leave(region, config.drain_timeout).await;
        }
        if let Some(watching) = watching {
            watching.abort();
        }
        // The channels of the workers are closed, and the time for their remaining connections is
        // over.
        context.cut.cancel();
        let ended =
            tokio::task::spawn_blocking(move || threads.into_iter().all(|thread| thread.join().is_ok()))
                .await;
        match ended {
            Ok(true) => Ok(()),
            _ => Err(StartError::File("a worker ended in a panic".to_owned())),
        }
    }
}

/// Reports the remaining usage and returns all grants, so that other nodes need not wait until they
/// lapse.
async fn leave(region: &Region, time_max: Duration) {
    // A short drain timeout applies to clients; the last reports to the origin still get their
    // time.
    let time_max = time_max.max(LEAVE_TIMEOUT);
    let mut leaving = pin!(tokio::time::timeout(time_max, region.leave()));
    let left = if let Ok(left) = tokio::time::timeout(LEAVE_SILENCE_MAX, leaving.as_mut()).await {
        left
    } else {
        tracing::info!(
            seconds = time_max.as_secs(),
            "waiting for the origin to take the last reports; a second signal ends the server at once"
        );
        leaving.await
    };
    if left.is_err() {
        tracing::warn!("stopped before all usage was reported to the origin");
    }
}

type Tasks = JoinSet<()>;

/// Accepts connections on all listeners. Returns the tasks, with those of the admin listener
/// separate.
fn serve(
    sockets: Vec<(Listener, TcpListener)>,
    workers: &Workers,
    config: &Config,
    context: &Context,
) -> (Tasks, Tasks) {
    let (mut serving, mut admin) = (Tasks::new(), Tasks::new());
    for (listener, socket) in sockets {
        let most = config.connections_max;
        let (tasks, stop, connections_max) = match listener {
            Listener::Admin => (&mut admin, &context.stop_admin, most.min(ADMIN_CONNECTIONS_MAX)),
            Listener::Http | Listener::Grpc | Listener::Resp => (&mut serving, &context.stop, most),
        };
        let door = ListenerTask {
            listener,
            socket,
            shared: Arc::clone(&context.shared),
            workers: workers.clone(),
            connections_max,
            stop: stop.clone(),
        };
        tasks.spawn(door.serve());
    }
    (serving, admin)
}

/// Waits for all tasks to end, and ends those that take longer.
async fn finish(tasks: &mut Tasks, time_max: Duration) {
    let all = async { while tasks.join_next().await.is_some() {} };
    if tokio::time::timeout(time_max, all).await.is_err() {
        tasks.shutdown().await;
    }
}

type Senders = Vec<mpsc::Sender<listen::AcceptedConnection>>;
type Threads = Vec<std::thread::JoinHandle<()>>;

fn start_workers(count: usize, context: &Context) -> Result<(Senders, Threads), StartError> {
    let mut started = (Vec::new(), Vec::new());
    for index in 0..count {
        let (sender, receiver) = mpsc::channel(listen::HANDED_OVER_MAX);
        let failed = |error| StartError::System(format!("worker {index}"), error);
        let runtime = worker::runtime().map_err(failed)?;
        let context = context.clone();
        let thread = std::thread::Builder::new()
            .name(format!("worker-{index}"))
            .spawn(move || worker::run(index, &runtime, &context, receiver))
            .map_err(failed)?;
        started.0.push(sender);
        started.1.push(thread);
    }
    Ok(started)
}

/// Returns the names and addresses of the open ports.
fn listener_addresses(
    config: &Config,
    sockets: &[(Listener, TcpListener)],
    peer: Option<SocketAddr>,
) -> Vec<ListenerAddress> {
    let tls = config.tls.is_some();
    let of = |(listener, socket): &(Listener, TcpListener)| {
        Some(ListenerAddress { name: listener.as_str(), address: socket.local_addr().ok()?, tls })
    };
    let certificates = config.region.among.as_ref().is_some_and(|among| among.certificates.is_some());
    let peer = peer.map(|address| ListenerAddress { name: "peer", address, tls: certificates });
    sockets.iter().filter_map(of).chain(peer).collect()
}

/// Opens every port, or lists all that cannot be opened.
fn open(config: &Config) -> Result<Vec<(Listener, TcpListener)>, StartError> {
    let mut sockets = Vec::new();
    let mut problems = Vec::new();
    for (listener, key, address) in config.listeners() {
        let Some(address) = address else { continue };
        match listen::bind(address) {
            Ok(socket) => sockets.push((listener, socket)),
            Err(error) => problems.push(listen::not_taken(key, address, &error)),
        }
    }
    if problems.is_empty() { Ok(sockets) } else { Err(StartError::Ports(problems)) }
}
