//! The metrics of the server. Every label has a fixed set of values; a client never chooses one.
//!
//! Each worker has its own counters, so that they share no cache line. A scrape adds them up.

use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};
use tidegate::region::{EngineStats, PeerCounts, PeerStatus, Region, ReplicationStatus};
use tidegate::{Limiter, ShareStats};
use tidegate_control::ControlEvent;
use tidegate_core::DecisionSource;
use tidegate_record::{Deliveries, Delivery, RecordKind, Recorder};
use tidegate_rules::Class;

use crate::origin_monitor::OriginMonitor;
use crate::rates::DecisionTotals;
use crate::request_memory::RequestMemory;
use crate::tenant_metrics::{OTHER_TENANTS, TENANT_SERIES_MAX, TenantMetrics};

/// Upper ends of the latency buckets, in microseconds. A decision takes far less than one; the
/// surface and a busy machine add the rest.
const BUCKETS_US: [u64; 17] =
    [1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 1_000_000];

/// An enum of label values, with their text for metrics and responses.
macro_rules! label {
    ($(#[$doc:meta])* $vis:vis $name:ident { $($(#[$value_doc:meta])* $value:ident = $text:expr,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        $vis enum $name { $($(#[$value_doc])* $value,)+ }

        impl $name {
            /// All values.
            $vis const ALL: &'static [Self] = &[$(Self::$value,)+];

            /// Returns the text for metrics and responses.
            $vis const fn as_str(self) -> &'static str {
                match self { $(Self::$value => $text,)+ }
            }
        }
    };
}

label! {
    /// Where a request came in.
    pub(crate) Surface {
        /// `POST /v1/check`.
        Check = "check",
        /// Unkey's `/v2/ratelimit.*`.
        Direct = "direct",
        /// Forward-auth.
        ForwardAuth = "forward_auth",
        /// Envoy's rate limit service, also as JSON.
        Envoy = "envoy",
        /// `CL.THROTTLE`.
        Resp = "resp",
    }
}

label! {
    /// The outcome of a request.
    pub(crate) RequestOutcome {
        /// It may pass.
        Allowed = "allowed",
        /// It may not.
        Denied = "denied",
        /// It may pass, though a rule in shadow mode would have denied it.
        ShadowDenied = "shadow_denied",
    }
}

label! {
    /// A listener, by its clients.
    pub Listener {
        /// HTTP clients.
        Http = "http",
        /// Envoy.
        Grpc = "grpc",
        /// Redis clients.
        Resp = "resp",
        /// Operators.
        Admin = "admin",
    }
}

label! {
    /// The limit of the memory for incomplete requests that refused one.
    pub(crate) MemoryLimit {
        /// That of a tenant.
        Tenant = "tenant",
        /// That of an address without a known credential.
        Address = "address",
        /// That of all clients together.
        Total = "total",
    }
}

label! {
    /// The outcome of an attempt to load a rule set from the store.
    pub(crate) StoreLoad {
        /// It is in force.
        Taken = "loaded",
        /// It is invalid, and the rules in force stay.
        Refused = "refused",
        /// The store did not give it.
        Failed = "failed",
    }
}

label! {
    /// Files that are reloaded when they change.
    pub(crate) ReloadedFile {
        /// The rules file.
        Rules = "rules",
        /// Envoy's descriptors.
        Descriptors = "descriptors",
    }
}

const SURFACES: usize = Surface::ALL.len();
const CLASSES: usize = Class::ALL.len();
const OUTCOMES: usize = RequestOutcome::ALL.len();
const DECISION_SOURCES: usize = DecisionSource::ALL.len();
const LISTENERS: usize = Listener::ALL.len();
pub(crate) const RELOADS: usize = ReloadedFile::ALL.len();

/// The counters of one worker. Aligned, so that no two workers write to the same cache line.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Tally {
    decisions: [[[[AtomicU64; DECISION_SOURCES]; OUTCOMES]; CLASSES]; SURFACES],
    latency: [Latency; SURFACES],
}

#[derive(Debug, Default)]
struct Latency {
    buckets: [AtomicU64; BUCKETS_US.len() + 1],
    sum_ns: AtomicU64,
}

/// All metrics of a server.
#[derive(Debug)]
pub(crate) struct Metrics {
    workers: Box<[Tally]>,
    pub(crate) tenants: TenantMetrics,
    connections: [AtomicI64; LISTENERS],
    refused: [AtomicU64; LISTENERS],
    evicted: [AtomicU64; LISTENERS],
    timed_out: AtomicU64,
    reloads: [[AtomicU64; 2]; RELOADS],
    /// Of the store of rules, if there is one.
    pub(crate) control: ControlMetrics,
    /// Counts the records of the decision log, once it is open.
    recorder: OnceLock<Arc<Recorder>>,
    deliveries: OnceLock<Deliveries>,
    /// Whether the embedded store in the data folder is down, if there is one.
    is_embedded_store_down: OnceLock<Arc<AtomicBool>>,
}

thread_local! {
    /// Which worker this thread is; others count with the first.
    static WORKER: Cell<usize> = const { Cell::new(0) };
}

/// Sets the worker index of this thread.
pub(crate) fn this_is_worker(index: usize) {
    WORKER.set(index);
}

/// Which worker this thread is.
#[inline]
pub(crate) fn this_worker() -> usize {
    WORKER.get()
}

impl Metrics {
    /// Counters at zero.
    pub(crate) fn new(workers: usize, tenants: usize) -> Self {
        Self {
            tenants: TenantMetrics::new(workers, tenants),
            workers: (0..workers.max(1)).map(|_| Tally::default()).collect(),
            connections: Default::default(),
            refused: Default::default(),
            evicted: Default::default(),
            timed_out: AtomicU64::new(0),
            reloads: Default::default(),
            control: ControlMetrics::default(),
            recorder: OnceLock::new(),
            deliveries: OnceLock::new(),
            is_embedded_store_down: OnceLock::new(),
        }
    }

    /// Counts `n` decisions.
    #[inline]
    pub(crate) fn decided(
        &self,
        surface: Surface,
        class: Class,
        outcome: RequestOutcome,
        source: DecisionSource,
        n: u64,
    ) {
        let counts = &self.here().decisions[surface as usize][class as usize];
        add(&counts[outcome as usize][source as usize], n);
    }

    /// Records that each of `n` requests took `taken`, from the time it was read until its response
    /// was encoded.
    #[inline]
    pub(crate) fn took(&self, surface: Surface, taken: Duration, n: u64) {
        let latency = &self.here().latency[surface as usize];
        let us = u64::try_from(taken.as_micros()).unwrap_or(u64::MAX);
        let bucket = BUCKETS_US.iter().position(|end| us < *end).unwrap_or(BUCKETS_US.len());
        add(&latency.buckets[bucket], n);
        add(&latency.sum_ns, u64::try_from(taken.as_nanos()).unwrap_or(u64::MAX).saturating_mul(n));
    }

    pub(crate) fn opened(&self, listener: Listener) {
        self.connections[listener as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn closed(&self, listener: Listener) {
        self.connections[listener as usize].fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn refused(&self, listener: Listener) {
        add(&self.refused[listener as usize], 1);
    }

    pub(crate) fn evicted(&self, listener: Listener, connections: u64) {
        if connections > 0 {
            add(&self.evicted[listener as usize], connections);
        }
    }

    pub(crate) fn timed_out(&self) {
        add(&self.timed_out, 1);
    }

    pub(crate) fn reloaded(&self, what: ReloadedFile, taken: bool) {
        add(&self.reloads[what as usize][usize::from(taken)], 1);
    }

    /// Adds the counts of a decision log to the metrics.
    pub(crate) fn counts_records_of(&self, recorder: Arc<Recorder>, deliveries: Option<Deliveries>) {
        // There is one log for as long as a server runs.
        let _ = self.recorder.set(recorder);
        if let Some(deliveries) = deliveries {
            let _ = self.deliveries.set(deliveries);
        }
    }

    /// Adds the state of the embedded store in the data folder to the metrics.
    pub(crate) fn exports_embedded_store(&self, is_down: &Arc<AtomicBool>) {
        // The data folder is set once.
        let _ = self.is_embedded_store_down.set(Arc::clone(is_down));
    }

    /// Adds up the decisions of all workers. In a region, `local` is a decision of the fallback.
    pub(crate) fn totals(&self, has_origin: bool) -> DecisionTotals {
        let mut totals = DecisionTotals::default();
        let all = self.workers.iter().flat_map(|tally| tally.decisions.as_flattened().as_flattened());
        for (at, sources) in all.enumerate() {
            let is_denied = at % OUTCOMES == RequestOutcome::Denied as usize;
            for (source, count) in DecisionSource::ALL.iter().zip(sources) {
                let count = count.load(Ordering::Relaxed);
                totals.all += count;
                totals.denied += if is_denied { count } else { 0 };
                match source {
                    DecisionSource::Local if !has_origin => {}
                    DecisionSource::Local | DecisionSource::Open | DecisionSource::Closed => {
                        totals.without_origin += count;
                    }
                    DecisionSource::Shed => totals.shed += count,
                    _ => {}
                }
            }
        }
        totals
    }

    #[inline]
    fn here(&self) -> &Tally {
        let at = WORKER.get();
        &self.workers[if at < self.workers.len() { at } else { 0 }]
    }

    fn sum(&self, of: impl Fn(&Tally) -> &AtomicU64) -> u64 {
        self.workers.iter().map(|tally| of(tally).load(Ordering::Relaxed)).sum()
    }
}

#[inline]
fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// A point in time to measure from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stopwatch(Instant);

impl Stopwatch {
    /// Starts to measure.
    #[inline]
    #[expect(clippy::disallowed_methods, reason = "measures for people; nothing is decided by it")]
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    /// Returns the time since the start.
    #[inline]
    #[expect(clippy::disallowed_methods, reason = "measures for people; nothing is decided by it")]
    pub(crate) fn taken(self) -> Duration {
        self.0.elapsed()
    }
}

/// The state that a scrape reads.
pub(crate) struct Scrape {
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) request_memory: Arc<RequestMemory>,
    pub(crate) limiter: Arc<Limiter>,
    pub(crate) region: Option<Region>,
    pub(crate) origin: Option<Arc<OriginMonitor>>,
    pub(crate) tenants: Vec<String>,
}

impl fmt::Debug for Scrape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scrape").finish_non_exhaustive()
    }
}

/// The text of a scrape, in the `OpenMetrics` format.
pub(crate) fn registry(scrape: Scrape) -> Registry {
    let mut registry = Registry::with_prefix("tidegate");
    registry.register_collector(Box::new(scrape));
    registry
}

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        self.encode_decisions(&mut encoder)?;
        self.encode_latency(&mut encoder)?;
        self.metrics.tenants.encode(&self.tenants, &mut encoder)?;
        self.encode_connections(&mut encoder)?;
        self.encode_request_memory(&mut encoder)?;
        self.encode_reloads(&mut encoder)?;
        self.metrics.control.encode(&mut encoder)?;
        if let Some(is_down) = self.metrics.is_embedded_store_down.get() {
            let about = "Whether the store of overrides in the data folder works";
            let up = encoder.encode_descriptor("overrides_store_up", about, None, MetricType::Gauge)?;
            ConstGauge::new(i64::from(!is_down.load(Ordering::Relaxed))).encode(up)?;
        }
        if let Some(recorder) = self.metrics.recorder.get() {
            encode_log(recorder, &mut encoder)?;
        }
        if let Some(deliveries) = self.metrics.deliveries.get() {
            encode_deliveries(deliveries, &mut encoder)?;
        }
        if let Some(region) = &self.region {
            let is_down = self.origin.as_ref().is_some_and(|origin| origin.is_down());
            encode_region(region, is_down, &mut encoder)?;
        }
        if let Some(status) = self.region.as_ref().and_then(Region::replication_status) {
            encode_replication(&status, &mut encoder)?;
        }
        self.encode_table(&mut encoder)
    }
}

impl Scrape {
    fn encode_decisions(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let mut family = encoder.encode_descriptor(
            "decisions",
            "Decisions, by surface, verdict and decision source",
            None,
            MetricType::Counter,
        )?;
        for &surface in Surface::ALL {
            for class in Class::ALL {
                for &outcome in RequestOutcome::ALL {
                    for source in DecisionSource::ALL {
                        let count = self.metrics.sum(|tally| {
                            &tally.decisions[surface as usize][class as usize][outcome as usize]
                                [source as usize]
                        });
                        if count == 0 {
                            continue;
                        }
                        let labels = [
                            ("surface", surface.as_str()),
                            ("class", class.as_str()),
                            ("outcome", outcome.as_str()),
                            ("source", source.as_str()),
                        ];
                        ConstCounter::new(count).encode(family.encode_family(&labels)?)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn encode_latency(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let about = "Time from reading a request to writing its answer";
        let mut family =
            encoder.encode_descriptor("latency", about, Some(&Unit::Seconds), MetricType::Histogram)?;
        for &surface in Surface::ALL {
            let labels = [("surface", surface.as_str())];
            self.encode_histogram(surface, family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn encode_histogram(&self, surface: Surface, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let ends = BUCKETS_US.iter().map(|us| seconds(*us)).chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = ends
            .enumerate()
            .map(|(at, end)| (end, self.metrics.sum(|tally| &tally.latency[surface as usize].buckets[at])))
            .collect();
        let sum_ns = self.metrics.sum(|tally| &tally.latency[surface as usize].sum_ns);
        let count = buckets.iter().map(|(_, count)| count).sum();
        encoder.encode_histogram::<[(&str, &str); 0]>(seconds(sum_ns) / 1_000.0, count, &buckets, None)
    }

    fn encode_connections(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let mut open =
            encoder.encode_descriptor("connections", "Open connections", None, MetricType::Gauge)?;
        for &listener in Listener::ALL {
            let count = self.metrics.connections[listener as usize].load(Ordering::Relaxed);
            ConstGauge::new(count).encode(open.encode_family(&[("listener", listener.as_str())])?)?;
        }
        for (name, about, counts) in [
            (
                "connections_refused",
                "Connections closed at once because `connections_max` was reached and none was idle",
                &self.metrics.refused,
            ),
            (
                "connections_evicted",
                "Idle connections closed for new ones because `connections_max` was reached",
                &self.metrics.evicted,
            ),
        ] {
            let mut family = encoder.encode_descriptor(name, about, None, MetricType::Counter)?;
            for &listener in Listener::ALL {
                let count = counts[listener as usize].load(Ordering::Relaxed);
                ConstCounter::new(count).encode(family.encode_family(&[("listener", listener.as_str())])?)?;
            }
        }
        let about = "Connections closed after `request_timeout` or `idle_timeout`";
        let timed_out =
            encoder.encode_descriptor("connections_timed_out", about, None, MetricType::Counter)?;
        ConstCounter::new(self.metrics.timed_out.load(Ordering::Relaxed)).encode(timed_out)
    }

    fn encode_request_memory(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let about = "Memory of requests that have arrived in part";
        let used =
            encoder.encode_descriptor("request_memory", about, Some(&Unit::Bytes), MetricType::Gauge)?;
        ConstGauge::new(i64::try_from(self.request_memory.used()).unwrap_or(i64::MAX)).encode(used)?;
        let about = "Incomplete requests refused for `request_memory`, by limit";
        let mut refused =
            encoder.encode_descriptor("request_memory_refused", about, None, MetricType::Counter)?;
        for &limit in MemoryLimit::ALL {
            let count = ConstCounter::new(self.request_memory.refused(limit));
            count.encode(refused.encode_family(&[("limit", limit.as_str())])?)?;
        }
        Ok(())
    }

    fn encode_reloads(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let about = "Reloads of changed files, by result";
        let mut family = encoder.encode_descriptor("reloads", about, None, MetricType::Counter)?;
        for &what in ReloadedFile::ALL {
            for (result, at) in [("refused", 0), ("loaded", 1)] {
                let count = self.metrics.reloads[what as usize][at].load(Ordering::Relaxed);
                let labels = [("file", what.as_str()), ("result", result)];
                ConstCounter::new(count).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }

    fn encode_table(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let shares = self.shares();
        let bytes = i64::try_from(self.limiter.memory_bytes()).unwrap_or(i64::MAX);
        let memory = encoder.encode_descriptor(
            "table_memory",
            "Memory of the table",
            Some(&Unit::Bytes),
            MetricType::Gauge,
        )?;
        ConstGauge::new(bytes).encode(memory)?;
        for (name, about, of) in GAUGES {
            let mut family = encoder.encode_descriptor(name, about, None, MetricType::Gauge)?;
            for (tenant, stats) in &shares {
                let value = i64::try_from(of(stats)).unwrap_or(i64::MAX);
                ConstGauge::new(value).encode(family.encode_family(&[("tenant", tenant.as_str())])?)?;
            }
        }
        for (name, about, of) in COUNTERS {
            let mut family = encoder.encode_descriptor(name, about, None, MetricType::Counter)?;
            for (tenant, stats) in &shares {
                ConstCounter::new(of(stats)).encode(family.encode_family(&[("tenant", tenant.as_str())])?)?;
            }
        }
        Ok(())
    }

    /// Each tenant's share, those beyond the cap added up.
    fn shares(&self) -> Vec<(String, ShareStats)> {
        let mut shares: Vec<(String, ShareStats)> = Vec::new();
        for name in &self.tenants {
            let Ok(stats) = self.limiter.stats_of(name) else { continue };
            if shares.len() < TENANT_SERIES_MAX {
                shares.push((name.clone(), stats));
            } else if let Some((_, other)) = shares.get_mut(TENANT_SERIES_MAX) {
                *other = sum(other, &stats);
            } else {
                shares.push((OTHER_TENANTS.to_owned(), stats));
            }
        }
        shares
    }
}

/// Upper ends of the buckets for how long changes of rules take to be in force. One second is
/// usual, five are many.
const LAG_BUCKETS_MS: [u64; 12] = [10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 60_000, 300_000];

/// How a server follows the store of its rules.
#[derive(Debug, Default)]
pub(crate) struct ControlMetrics {
    /// Whether there is a store.
    is_there: AtomicBool,
    is_up: AtomicBool,
    is_audit_broken: AtomicBool,
    revision: AtomicU64,
    emergency_revision: AtomicU64,
    outcomes: [AtomicU64; StoreLoad::ALL.len()],
    rolled_back: AtomicU64,
    not_rolled_back: AtomicU64,
    alarmed: AtomicU64,
    lag: [AtomicU64; LAG_BUCKETS_MS.len() + 1],
    lag_sum_ms: AtomicU64,
}

impl ControlMetrics {
    /// Counts an event of the control plane.
    pub(crate) fn note(&self, event: ControlEvent) {
        match event {
            ControlEvent::StoreUp(is_up) => self.store_is_up(is_up),
            ControlEvent::InForce { revision, emergency_revision } => {
                self.revision.store(revision, Ordering::Relaxed);
                self.emergency_revision.store(emergency_revision, Ordering::Relaxed);
            }
            ControlEvent::AuditContinues(continues) => {
                self.is_audit_broken.store(!continues, Ordering::Relaxed);
            }
            ControlEvent::Loaded => add(&self.outcomes[StoreLoad::Taken as usize], 1),
            ControlEvent::LoadRefused => add(&self.outcomes[StoreLoad::Refused as usize], 1),
            ControlEvent::LoadFailed => add(&self.outcomes[StoreLoad::Failed as usize], 1),
            ControlEvent::Lagged { ms } => self.lagged(ms),
            ControlEvent::RolledBack => add(&self.rolled_back, 1),
            ControlEvent::NotRolledBack => add(&self.not_rolled_back, 1),
            ControlEvent::Alarmed => add(&self.alarmed, 1),
        }
    }

    /// Sets whether the store replies. Before the first call, the server has no store.
    fn store_is_up(&self, is_up: bool) {
        self.is_there.store(true, Ordering::Relaxed);
        self.is_up.store(is_up, Ordering::Relaxed);
    }

    /// Whether the rule store replied last.
    pub(crate) fn is_store_up(&self) -> bool {
        self.is_up.load(Ordering::Relaxed)
    }

    /// How long a change took from when it was made to when it was in force here.
    fn lagged(&self, ms: u64) {
        let bucket = LAG_BUCKETS_MS.iter().position(|end| ms < *end).unwrap_or(LAG_BUCKETS_MS.len());
        add(&self.lag[bucket], 1);
        add(&self.lag_sum_ms, ms);
    }

    fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        if !self.is_there.load(Ordering::Relaxed) {
            return Ok(());
        }
        let revision = |of: &AtomicU64| i64::try_from(of.load(Ordering::Relaxed)).unwrap_or(i64::MAX);
        let gauges = [
            (
                "rules_store_up",
                "Whether the store of rules answers",
                i64::from(self.is_up.load(Ordering::Relaxed)),
            ),
            (
                "rules_audit_broken",
                "Whether the audit of the store of rules does not continue the last checkpoint",
                i64::from(self.is_audit_broken.load(Ordering::Relaxed)),
            ),
            ("rules_revision", "Revision of the rules in force", revision(&self.revision)),
            (
                "rules_emergency_revision",
                "Revision of the emergencies in force",
                revision(&self.emergency_revision),
            ),
        ];
        for (name, about, value) in gauges {
            let gauge = encoder.encode_descriptor(name, about, None, MetricType::Gauge)?;
            ConstGauge::new(value).encode(gauge)?;
        }
        let about = "Loads of the rule store, by result";
        let mut reloads = encoder.encode_descriptor("rules_reloads", about, None, MetricType::Counter)?;
        for &outcome in StoreLoad::ALL {
            let count = self.outcomes[outcome as usize].load(Ordering::Relaxed);
            ConstCounter::new(count).encode(reloads.encode_family(&[("outcome", outcome.as_str())])?)?;
        }
        let about = "Changes after which this server saw a jump of denied keys, by result";
        let mut rolled = encoder.encode_descriptor("rules_rollbacks", about, None, MetricType::Counter)?;
        for (outcome, count) in
            [("done", &self.rolled_back), ("refused", &self.not_rolled_back), ("alarm", &self.alarmed)]
        {
            let count = ConstCounter::new(count.load(Ordering::Relaxed));
            count.encode(rolled.encode_family(&[("outcome", outcome)])?)?;
        }
        self.encode_lag(encoder)
    }

    fn encode_lag(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let about = "Time from a change of the rules until it is in force on this server";
        let mut lag =
            encoder.encode_descriptor("rules_lag", about, Some(&Unit::Seconds), MetricType::Histogram)?;
        let ends = LAG_BUCKETS_MS.iter().map(|ms| seconds(ms * 1_000)).chain([f64::INFINITY]);
        let counts = self.lag.iter().map(|count| count.load(Ordering::Relaxed));
        let buckets: Vec<(f64, u64)> = ends.zip(counts).collect();
        let sum = seconds(self.lag_sum_ms.load(Ordering::Relaxed).saturating_mul(1_000));
        let count = buckets.iter().map(|(_, count)| count).sum();
        lag.encode_histogram::<[(&str, &str); 0]>(sum, count, &buckets, None)
    }
}

/// Encodes the counts of the decision log.
fn encode_log(recorder: &Recorder, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let counts = recorder.counts();
    let about = "Whether the decision log takes writes";
    let up = encoder.encode_descriptor("log_up", about, None, MetricType::Gauge)?;
    ConstGauge::new(i64::from(recorder.is_log_up())).encode(up)?;
    let about = "Decision records written to the log";
    let mut written = encoder.encode_descriptor("log_records", about, None, MetricType::Counter)?;
    for kind in RecordKind::ALL {
        ConstCounter::new(counts.written(kind)).encode(written.encode_family(&[("kind", kind.as_str())])?)?;
    }
    let about = "Decision records lost before the log, by cause";
    let mut dropped = encoder.encode_descriptor("log_dropped", about, None, MetricType::Counter)?;
    for kind in RecordKind::ALL {
        ConstCounter::new(counts.dropped(kind)).encode(dropped.encode_family(&[("kind", kind.as_str())])?)?;
    }
    Ok(())
}

/// Encodes the counts of records for a collector.
fn encode_deliveries(deliveries: &Deliveries, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let Delivery { sent, dropped } = deliveries.until_now();
    let about = "Decision records for the OTLP collector, by result";
    let mut records = encoder.encode_descriptor("log_otlp_records", about, None, MetricType::Counter)?;
    for (outcome, count) in [("sent", sent), ("dropped", dropped)] {
        ConstCounter::new(count).encode(records.encode_family(&[("outcome", outcome)])?)?;
    }
    Ok(())
}

/// Encodes the calls of a node to its origin, and the state of the origin.
fn encode_region(region: &Region, is_down: bool, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let about = "Whether the origin replies";
    let answers = encoder.encode_descriptor("origin_up", about, None, MetricType::Gauge)?;
    ConstGauge::new(i64::from(*region.origin_up().borrow() && !is_down)).encode(answers)?;
    let about = "Offset of the origin's clock to the clock of this node";
    let skew =
        encoder.encode_descriptor("origin_clock_skew", about, Some(&Unit::Seconds), MetricType::Gauge)?;
    ConstGauge::new(signed_seconds(region.skew_us())).encode(skew)?;
    let stats = region.stats();
    for (name, about, of) in ORIGIN_COUNTERS {
        let counter = encoder.encode_descriptor(name, about, None, MetricType::Counter)?;
        ConstCounter::new(of(&stats)).encode(counter)?;
    }
    Ok(())
}

/// Encodes the state of replication. Only the replicator exports the metrics that no other node
/// knows.
fn encode_replication(status: &ReplicationStatus, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let about = "Whether this server is the replicator of its region";
    let replicator = encoder.encode_descriptor("region_is_replicator", about, None, MetricType::Gauge)?;
    ConstGauge::new(i64::from(status.is_replicator)).encode(replicator)?;
    for (name, about, of) in REPLICATION_COUNTERS {
        let counter = encoder.encode_descriptor(name, about, None, MetricType::Counter)?;
        ConstCounter::new(of(status)).encode(counter)?;
    }
    if status.is_replicator {
        let about = "Whether the region is connected: cross-region limits count all regions together";
        let whole = encoder.encode_descriptor("region_connected", about, None, MetricType::Gauge)?;
        ConstGauge::new(i64::from(status.is_connected)).encode(whole)?;
        encode_ages(status, encoder)?;
    }
    let about = "Whether the peer has another region list, weights or `peer_timeout` than this node";
    let mut disagrees = encoder.encode_descriptor("peer_settings_differ", about, None, MetricType::Gauge)?;
    for peer in &status.peers {
        let labels = [("peer", peer.region.as_str())];
        let value = i64::from(peer.agrees == Some(false));
        ConstGauge::new(value).encode(disagrees.encode_family(&labels)?)?;
    }
    for (name, about, of) in PEER_COUNTERS {
        let mut family = encoder.encode_descriptor(name, about, None, MetricType::Counter)?;
        for peer in &status.peers {
            let labels = [("peer", peer.region.as_str())];
            ConstCounter::new(of(&peer.counts)).encode(family.encode_family(&labels)?)?;
        }
    }
    Ok(())
}

fn encode_ages(status: &ReplicationStatus, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    for (name, about, of) in PEER_AGES {
        let mut family = encoder.encode_descriptor(name, about, Some(&Unit::Seconds), MetricType::Gauge)?;
        for peer in &status.peers {
            // An unknown age has no sample.
            let Some(us) = of(peer) else { continue };
            ConstGauge::new(seconds(us)).encode(family.encode_family(&[("peer", peer.region.as_str())])?)?;
        }
    }
    Ok(())
}

type ReplicationCounter = (&'static str, &'static str, fn(&ReplicationStatus) -> u64);

const REPLICATION_COUNTERS: [ReplicationCounter; 4] = [
    ("replication_rounds", "Replication rounds of this node", |status| status.rounds),
    (
        "replication_unknown_connections",
        "Connections refused because they came from no known peer",
        |status| status.strangers,
    ),
    ("replication_origin_failures", "Calls of the replicator without a reply of the origin", |status| {
        status.origin_failures
    }),
    ("replication_oversized", "Components too large to replicate", |status| status.oversized),
];

type PeerAge = (&'static str, &'static str, fn(&PeerStatus) -> Option<u64>);

const PEER_AGES: [PeerAge; 2] = [
    ("peer_lag", "Replication lag: time until the peer has merged a change", |peer| peer.lag_us),
    ("peer_last_heard_age", "Last-heard age of the peer", |peer| peer.last_heard_age_us),
];

type PeerCounter = (&'static str, &'static str, fn(&PeerCounts) -> u64);

const PEER_COUNTERS: [PeerCounter; 9] = [
    ("peer_sent_bytes", "Bytes sent to the peer", |counts| counts.bytes_sent),
    ("peer_received_bytes", "Bytes received from the peer", |counts| counts.bytes_received),
    ("peer_batches_sent", "Batches that the peer merged", |counts| counts.batches_sent),
    ("peer_batches_received", "Batches of the peer that this node merged", |counts| counts.batches_received),
    ("peer_components_sent", "Components sent to the peer", |counts| counts.components_sent),
    ("peer_components_received", "Components received from the peer", |counts| counts.components_received),
    ("peer_refused", "Connections that one side refused", |counts| counts.refused),
    ("peer_charges_given_up", "Charges of meters that the peer owns, dropped undelivered", |counts| {
        counts.charges_given_up
    }),
    ("peer_refunds_given_up", "Refunds to the peer whose delivery is unknown", |counts| {
        counts.refunds_given_up
    }),
];

type OriginCounter = (&'static str, &'static str, fn(&EngineStats) -> u64);

const ORIGIN_COUNTERS: [OriginCounter; 10] = [
    ("origin_calls", "Calls to the origin", |stats| stats.calls),
    ("origin_retries", "Repeated calls, after a late or lost reply", |stats| stats.repeats),
    ("origin_updates", "Meter updates in all calls", |stats| stats.updates),
    ("origin_waited", "Checks that waited for the origin", |stats| stats.waited),
    ("origin_unanswered", "Checks without a reply within `origin_timeout`", |stats| stats.unanswered),
    ("origin_returned", "Units refunded because the reply came too late", |stats| stats.returned),
    ("origin_refused", "Calls that the origin rejected", |stats| stats.refused),
    ("origin_queue_full", "Checks decided without the origin because its queue was full", |stats| {
        stats.crowded
    }),
    ("origin_dropped", "Used units dropped without a report because the node had no room", |stats| {
        stats.dropped
    }),
    ("origin_lapsed", "Units of lapsed grants that count as used", |stats| stats.lapsed),
];

type ShareMetric = (&'static str, &'static str, fn(&ShareStats) -> u64);

const GAUGES: [ShareMetric; 2] = [
    ("table_meters", "Meters in the table", |stats| stats.live),
    ("table_slots", "Slots of the table", |stats| stats.slots),
];

const COUNTERS: [ShareMetric; 4] = [
    ("table_evicted_clean", "Evicted meters without usage", |stats| stats.evicted_clean),
    ("table_evicted_in_use", "Evicted meters with usage", |stats| stats.evicted_in_use),
    ("table_overflow", "Decisions of shared overflow meters", |stats| stats.spilled),
    ("table_refused", "Decisions refused because the table was full", |stats| stats.refused),
];

fn sum(a: &ShareStats, b: &ShareStats) -> ShareStats {
    ShareStats {
        live: a.live + b.live,
        slots: a.slots + b.slots,
        evicted_clean: a.evicted_clean + b.evicted_clean,
        evicted_in_use: a.evicted_in_use + b.evicted_in_use,
        spilled: a.spilled + b.spilled,
        refused: a.refused + b.refused,
    }
}

#[expect(clippy::cast_precision_loss, reason = "clocks that are a hundred years apart are apart")]
fn signed_seconds(us: i64) -> f64 {
    us as f64 / 1e6
}

#[expect(clippy::cast_precision_loss, reason = "a sum of more than a hundred days loses nanoseconds")]
fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}
