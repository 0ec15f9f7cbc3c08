//! The state that all surfaces share: one limiter, and the sources of its limits.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use arc_swap::{ArcSwap, Guard};
use ipnet::IpNet;
use prometheus_client::registry::Registry;
use serde::Serialize;
use tidegate::headers::ResetStyle;
use tidegate::region::RegionPolicy;
use tidegate::{Clock, Gate, Limit, LimitError, Limiter, SystemClock, UnknownName};
use tidegate_control::KeyMemory;
use tidegate_core::bound::Fleet;
use tidegate_rules::pattern::Pattern;
use tidegate_rules::{Class, NamespaceOverrides, Regime, SecretHeaders};
use utoipa::ToSchema;

use crate::auth::{Caller, Credentials, Principal, TenantIndex};
use crate::config::{Config, DEFAULT_TENANT, RulesConfig, RulesLocation};
use crate::control::Control;
use crate::decider::Decider;
use crate::decision_log::{DecisionLog, LogOwner};
use crate::envoy::Descriptors;
use crate::guard::ClientTimeouts;
use crate::metrics::{self, Metrics, Scrape, Stopwatch};
use crate::origin::RegionConfig;
use crate::origin_monitor::OriginMonitor;
use crate::overrides::{OverrideScope, Overrides};
use crate::rates::{DecisionTotals, Rates};
use crate::reload::RefusedEdits;
use crate::request_memory::RequestMemory;
use crate::rules::ActiveRules;

/// The weight of the default tenant, as in the meter table.
const DEFAULT_WEIGHT: u32 = 1;

/// The state that all surfaces share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) decider: Decider,
    /// By [`TenantIndex`].
    pub(crate) tenants: Vec<Tenant>,
    pub(crate) node: Identity,
    pub(crate) fleet: FleetState,
    pub(crate) credentials: CredentialState,
    pub(crate) rules: Arc<RuleState>,
    pub(crate) key_memory: KeyMemory,
    pub(crate) direct: DirectLimits,
    pub(crate) telemetry: Telemetry,
    pub(crate) protocol: ProtocolSettings,
    /// For requests that have arrived in part.
    pub(crate) request_memory: Arc<RequestMemory>,
}

/// The identity of this node, and its phase of life.
#[derive(Debug)]
pub(crate) struct Identity {
    pub(crate) host_name: String,
    pub(crate) region_name: String,
    /// Time of the start, in milliseconds since the Unix epoch.
    pub(crate) started_ms: u64,
    started: Stopwatch,
    /// Set once the ports are open.
    listeners: OnceLock<Vec<ListenerAddress>>,
    stopping: AtomicBool,
}

/// The nodes and regions that count together, as far as this node knows them.
#[derive(Debug)]
pub(crate) struct FleetState {
    pub(crate) configured: Fleet,
    /// With the measurements since the start. Bounds are computed for it.
    measured: ArcSwap<Fleet>,
    /// `None` without an origin.
    pub(crate) origin: Option<Arc<OriginMonitor>>,
}

/// The tokens that the server accepts.
#[derive(Debug)]
pub(crate) struct CredentialState {
    current: ArcSwap<Credentials>,
    /// Raised after each change of those.
    generation: AtomicU64,
    /// Tells the time at which a token expires.
    limiter: Arc<Limiter>,
}

/// The rules in force, and their source.
#[derive(Debug, Default)]
pub(crate) struct RuleState {
    /// For `/v1/check` and forward-auth.
    active: ArcSwap<ActiveRules>,
    /// For Envoy.
    pub(crate) descriptors: ArcSwap<Descriptors>,
    /// `None` without rules.
    pub(crate) location: Option<RulesLocation>,
    /// Files whose last edit is not in force.
    pub(crate) refused_edits: RefusedEdits,
    /// `None` for rules in a file, and until the rule store is first reached.
    control: OnceLock<Arc<Control>>,
    /// Locked while rules of a file, or embedded overrides, replace others: each keeps what the
    /// other has put in force.
    replacing: Mutex<()>,
}

/// Settings of Unkey's direct form, whose limits come with the request.
#[derive(Debug)]
pub(crate) struct DirectLimits {
    pub(crate) overrides: Overrides,
    /// Namespaces that count by GCRA.
    pub(crate) gcra_namespaces: Vec<Pattern>,
}

/// Metrics, rates and the decision log.
#[derive(Debug)]
pub(crate) struct Telemetry {
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) registry: Registry,
    pub(crate) rates: Rates,
    /// The decision log, if it is on.
    pub(crate) decision_log: Option<DecisionLog>,
}

/// Settings of the protocols.
#[derive(Debug)]
pub(crate) struct ProtocolSettings {
    /// Proxies that may state the client's address.
    pub(crate) trusted_proxies: Vec<IpNet>,
    /// Header fields whose values are kept as digests.
    pub(crate) secret_headers: SecretHeaders,
    /// Host names of a server without tokens, besides those of loopback.
    pub(crate) allowed_hosts: Vec<String>,
    /// The unit of `X-RateLimit-Reset`.
    pub(crate) reset: ResetStyle,
    pub(crate) client_timeouts: ClientTimeouts,
}

/// A listener and its address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct ListenerAddress {
    /// `http`, `grpc`, `resp`, `admin` or `peer`.
    pub(crate) name: &'static str,
    #[schema(value_type = String)]
    pub(crate) address: SocketAddr,
    pub(crate) tls: bool,
}

/// A tenant and the gates of limits that come with its requests. Each surface has keys of its own.
#[derive(Debug)]
pub(crate) struct Tenant {
    /// As configured.
    pub(crate) name: String,
    /// Its parts of the meter table, and of a worker's time under overload.
    pub(crate) weight: u32,
    /// Unkey's direct form, as its users expect it.
    pub(crate) direct_window: Gate,
    /// Unkey's direct form, for namespaces that chose GCRA.
    pub(crate) direct_gcra: Gate,
    /// `CL.THROTTLE`.
    pub(crate) resp: Gate,
    /// Envoy's descriptors.
    pub(crate) envoy: Gate,
}

/// Why a server cannot start.
#[derive(Debug)]
pub enum StartError {
    /// The limiter cannot be built.
    Limiter(tidegate::BuildError),
    /// One of the files it needs is wrong.
    File(String),
    /// Neither the store of rules nor a snapshot of it gives any, each problem in a line of its
    /// own.
    Rules(String),
    /// Ports that could not be opened, one per line.
    Ports(Vec<String>),
    /// A system call failed.
    System(String, std::io::Error),
}

impl std::fmt::Display for StartError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Limiter(error) => error.fmt(f),
            Self::File(problem) | Self::Rules(problem) => f.write_str(problem),
            Self::Ports(problems) => f.write_str(&problems.join("\n")),
            Self::System(what, error) => write!(f, "{what}: {error}"),
        }
    }
}

impl std::error::Error for StartError {}

impl Shared {
    /// Creates the state of a server, without the contents of its files.
    pub(crate) fn new(config: &mut Config) -> Result<Self, StartError> {
        Self::on_clock(config, SystemClock::new())
    }

    /// The same, by another source of time.
    pub(crate) fn on_clock(config: &mut Config, clock: impl Clock + 'static) -> Result<Self, StartError> {
        let mut builder = Limiter::builder().memory_bytes(config.memory_bytes).clock(clock);
        for tenant in &config.tenants {
            builder = builder.tenant(tenant.name.clone(), tenant.weight);
        }
        let limiter = Arc::new(builder.build().map_err(StartError::Limiter)?);
        let of_default = (DEFAULT_TENANT.to_owned(), DEFAULT_WEIGHT);
        let configured = config.tenants.iter().map(|tenant| (tenant.name.clone(), tenant.weight));
        let (names, weights): (Vec<String>, Vec<u32>) = std::iter::once(of_default).chain(configured).unzip();
        let region = config.region.join(&limiter).map_err(StartError::File)?;
        let decider = Decider { limiter, region };
        let tenants: Result<Vec<_>, UnknownName> =
            names.iter().zip(weights).map(|(name, weight)| Tenant::new(&decider, name, weight)).collect();
        let tenants = tenants.map_err(|error| StartError::File(error.to_string()))?;
        let now_ms = decider.limiter.wall_us() / 1_000;
        let location = config.rules.as_ref().map(RulesConfig::location);
        let rules = Arc::new(RuleState { location, ..RuleState::default() });
        let overrides = match &config.rules {
            Some(RulesConfig::Store(_)) => {
                Overrides::of_fleet(config.data_dir.as_deref(), Arc::clone(&rules), names.len())?
            }
            Some(RulesConfig::File(_)) | None => {
                Overrides::embedded(config.data_dir.as_deref(), Arc::clone(&rules), names.len(), now_ms)?
            }
        };
        let fleet = FleetState::new(&config.region, now_ms);
        let key_memory = key_memory(config.rules.as_ref(), &names);
        let request_memory = Arc::new(RequestMemory::new(config.request_memory_bytes, names.len()));
        Ok(Self {
            tenants,
            key_memory,
            node: Identity::new(&config.region.name, now_ms),
            credentials: CredentialState::new(std::mem::take(&mut config.credentials), &decider),
            rules,
            direct: DirectLimits { overrides, gcra_namespaces: std::mem::take(&mut config.gcra_namespaces) },
            telemetry: Telemetry::new(config.workers, &decider, &fleet, &request_memory, names),
            protocol: ProtocolSettings {
                trusted_proxies: std::mem::take(&mut config.trusted_proxies),
                secret_headers: std::mem::take(&mut config.secret_headers),
                allowed_hosts: std::mem::take(&mut config.allowed_hosts),
                reset: config.reset,
                client_timeouts: ClientTimeouts {
                    idle: config.idle_timeout,
                    request: config.request_timeout,
                },
            },
            request_memory,
            fleet,
            decider,
        })
    }

    /// Locks the data folder. Overrides are kept in it from now on, with those that are there,
    /// unless the rule store keeps them.
    pub(crate) fn keep_overrides_in(&mut self, folder: &Path) -> Result<(), StartError> {
        let (rules, tenants) = (Arc::clone(&self.rules), self.tenants.len());
        self.direct.overrides = match self.direct.overrides.scope() {
            OverrideScope::Fleet => Overrides::of_fleet(Some(folder), rules, tenants)?,
            OverrideScope::Server => Overrides::embedded(Some(folder), rules, tenants, self.now_ms())?,
        };
        if self.direct.overrides.scope() == OverrideScope::Server {
            self.telemetry.metrics.exports_embedded_store(self.direct.overrides.is_store_down());
        }
        Ok(())
    }

    /// Keeps the decision log in `folder` from now on, unless it is off.
    pub(crate) fn keep_log_in(&mut self, folder: &Path, config: &Config) -> Result<(), StartError> {
        let Some(log) = &config.log else { return Ok(()) };
        // A server without an origin is in no region, even though the setting has a default name.
        let region = self.decider.region.as_ref().map_or_else(String::new, |_| config.region.name.clone());
        let owner = LogOwner { threads: config.workers, region };
        let decision_log = DecisionLog::open(folder, log, owner, self)
            .map_err(|error| StartError::File(error.to_string()))?;
        let (recorder, deliveries) = (Arc::clone(decision_log.recorder()), decision_log.deliveries());
        self.telemetry.metrics.counts_records_of(recorder, deliveries);
        self.telemetry.decision_log = Some(decision_log);
        Ok(())
    }

    /// Returns the decisions since the start.
    pub(crate) fn decision_totals(&self) -> DecisionTotals {
        self.telemetry.metrics.totals(self.decider.region.is_some())
    }

    /// Milliseconds since the Unix epoch, by the server's clock.
    pub(crate) fn now_ms(&self) -> u64 {
        self.decider.limiter.wall_us() / 1_000
    }

    /// The tenant of a principal.
    pub(crate) fn tenant(&self, index: TenantIndex) -> &Tenant {
        // Principals are made from the same list.
        &self.tenants[index]
    }
}

/// Returns the memory for the recent keys of rules. Changes of a file are not watched, so its rules
/// need none.
fn key_memory(rules: Option<&RulesConfig>, tenants: &[String]) -> KeyMemory {
    let tenants = if matches!(rules, Some(RulesConfig::File(_))) { &[] } else { tenants };
    KeyMemory::new(tenants.iter().map(String::as_str))
}

impl Identity {
    fn new(region_name: &str, now_ms: u64) -> Self {
        Self {
            host_name: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            region_name: region_name.to_owned(),
            started_ms: now_ms,
            started: Stopwatch::start(),
            listeners: OnceLock::new(),
            stopping: AtomicBool::new(false),
        }
    }

    /// Returns the time since the start.
    pub(crate) fn uptime(&self) -> Duration {
        self.started.taken()
    }

    /// Sets the addresses of the open ports.
    pub(crate) fn listens_on(&self, listeners: Vec<ListenerAddress>) {
        // The ports of a server are opened once.
        let _ = self.listeners.set(listeners);
    }

    pub(crate) fn listeners(&self) -> &[ListenerAddress] {
        self.listeners.get().map(Vec::as_slice).unwrap_or_default()
    }

    /// Whether new requests are welcome.
    pub(crate) fn is_ready(&self) -> bool {
        !self.stopping.load(Ordering::Relaxed)
    }

    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }
}

impl FleetState {
    fn new(config: &RegionConfig, now_ms: u64) -> Self {
        let configured = config.fleet();
        let origin = config.origin.address();
        Self {
            measured: ArcSwap::from_pointee(configured.clone()),
            configured,
            origin: origin.map(|address| Arc::new(OriginMonitor::new(address, now_ms))),
        }
    }

    /// Returns the fleet as known now. Bounds are computed for it.
    pub(crate) fn measured(&self) -> Arc<Fleet> {
        self.measured.load_full()
    }

    /// Stores a measured fleet.
    pub(crate) fn note(&self, measured: Fleet) {
        if **self.measured.load() != measured {
            self.measured.store(Arc::new(measured));
        }
    }
}

impl CredentialState {
    fn new(credentials: Credentials, decider: &Decider) -> Self {
        Self {
            current: ArcSwap::from_pointee(credentials),
            generation: AtomicU64::new(0),
            limiter: Arc::clone(&decider.limiter),
        }
    }

    /// Returns the tokens that the server accepts.
    pub(crate) fn load(&self) -> Guard<Arc<Credentials>> {
        self.current.load()
    }

    /// Replaces the credentials.
    pub(crate) fn store(&self, credentials: Credentials) {
        self.current.store(Arc::new(credentials));
        // A thread that reads the new generation also sees the new credentials.
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Returns a number that changes with the credentials. A connection that cached a principal
    /// then checks its token again.
    #[inline]
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Returns the principal of a token.
    pub(crate) fn principal(&self, token: Option<&[u8]>) -> Option<Principal> {
        self.load().principal(token, || self.now_ms())
    }

    /// The principal of an `Authorization` value.
    pub(crate) fn of_authorization(&self, value: Option<&[u8]>) -> Option<Principal> {
        self.load().of_authorization(value, || self.now_ms())
    }

    /// Returns the same with the token, for requests that need the caller's name later.
    pub(crate) fn caller_of(&self, value: Option<&[u8]>) -> Option<Caller> {
        self.load().caller_of(value, || self.now_ms())
    }

    /// Returns the name of an authenticated caller, if its token is still valid.
    pub(crate) fn actor(&self, caller: &Caller) -> Option<String> {
        self.load().actor(caller, || self.now_ms())
    }

    fn now_ms(&self) -> u64 {
        self.limiter.wall_us() / 1_000
    }
}

impl RuleState {
    /// Returns the rules in force.
    pub(crate) fn load(&self) -> Guard<Arc<ActiveRules>> {
        self.active.load()
    }

    /// Returns the rules in force, for work that outlasts a request.
    pub(crate) fn load_full(&self) -> Arc<ActiveRules> {
        self.active.load_full()
    }

    /// Puts rules in force, and returns those that they replace.
    pub(crate) fn store(&self, rules: Arc<ActiveRules>) -> Arc<ActiveRules> {
        self.active.swap(rules)
    }

    /// Puts rules of a file in force. The overrides that the server keeps itself stay.
    pub(crate) fn store_file(&self, rules: &ActiveRules) {
        let _replacing = self.replacing();
        let embedded = Arc::clone(self.load().set().embedded());
        self.active.store(Arc::new(rules.with_set(rules.set().with_embedded(embedded))));
    }

    /// Puts overrides in force that the server keeps itself. The rules stay.
    pub(crate) fn store_embedded(&self, embedded: NamespaceOverrides) {
        let _replacing = self.replacing();
        let rules = self.load_full();
        self.active.store(Arc::new(rules.with_set(rules.set().with_embedded(Arc::new(embedded)))));
    }

    fn replacing(&self) -> MutexGuard<'_, ()> {
        // A thread that panicked had not begun to replace them.
        self.replacing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the control plane of the rule store. `None` for rules in a file, and until a store
    /// that was down at the start is reached.
    pub(crate) fn control(&self) -> Option<&Arc<Control>> {
        self.control.get()
    }

    /// From now on the rules come from a store.
    pub(crate) fn follow(&self, control: Arc<Control>) {
        // There is one store for as long as a server runs.
        let _ = self.control.set(control);
    }
}

impl Telemetry {
    fn new(
        workers: usize,
        decider: &Decider,
        fleet: &FleetState,
        request_memory: &Arc<RequestMemory>,
        tenants: Vec<String>,
    ) -> Self {
        let metrics = Arc::new(Metrics::new(workers, tenants.len()));
        let scrape = Scrape {
            metrics: Arc::clone(&metrics),
            request_memory: Arc::clone(request_memory),
            limiter: Arc::clone(&decider.limiter),
            region: decider.region.clone(),
            origin: fleet.origin.clone(),
            tenants,
        };
        Self { metrics, registry: metrics::registry(scrape), rates: Rates::default(), decision_log: None }
    }
}

impl Tenant {
    fn new(decider: &Decider, name: &str, weight: u32) -> Result<Self, UnknownName> {
        // Limits in requests state neither a class nor that other regions count them.
        let policy = RegionPolicy { regime: Regime::Regional, ..RegionPolicy::of(Class::Comfort) };
        let gate = |surface: &str, limit: &Limit| decider.gate(name, surface, *limit, policy);
        // Each request has its own limit: these only select the algorithm.
        let (gcra, window) = placeholders().map_err(|error| UnknownName::Limit(error.to_string()))?;
        Ok(Self {
            name: name.to_owned(),
            weight,
            direct_window: gate("direct", &window)?,
            direct_gcra: gate("direct", &gcra)?,
            resp: gate("resp", &gcra)?,
            envoy: gate("envoy", &gcra)?,
        })
    }
}

fn placeholders() -> Result<(Limit, Limit), LimitError> {
    let second = std::time::Duration::from_secs(1);
    Ok((Limit::gcra(1, second)?, Limit::sliding_window(1, second)?))
}
