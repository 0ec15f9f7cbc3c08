//! The state of this server in one answer.

use ::http::StatusCode;
use serde::Serialize;
use tidegate::region::{PeerStatus, Region};
use tidegate_control::{Alarm, AutomaticRollback};
use tidegate_record::timestamp;
use utoipa::ToSchema;

use crate::config::RulesLocation;
use crate::http::{HttpRequest, HttpResponse, ProblemBody, json};
use crate::origin_monitor::{Audience, OriginMonitor, OriginState, OriginStatus};
use crate::rates::RateReport;
use crate::shared::{ListenerAddress, Shared};

/// The state of a server.
#[derive(Serialize, ToSchema)]
pub(crate) struct StatusBody {
    version: &'static str,
    /// Host name, as in decision records.
    node: String,
    started: String,
    uptime_seconds: u64,
    /// Whether new requests are welcome; false while the server drains.
    ready: bool,
    listeners: Vec<ListenerAddress>,
    /// Null without an origin.
    origin: Option<OriginBody>,
    /// Null without an origin.
    region: Option<RegionBody>,
    rules: RulesBody,
    rates: RateReport,
    /// Reasons why the server does not work as configured; empty if it is healthy.
    degraded: Vec<String>,
}

/// The origin of the region.
#[derive(Serialize, ToSchema)]
struct OriginBody {
    /// Without credentials.
    address: String,
    state: OriginState,
    /// Time of the last change of state.
    since: String,
    since_ms: u64,
    /// The last failure. It stays after the origin is up again.
    cause: Option<String>,
    cause_at: Option<String>,
    /// The eviction policy of the store, if it may evict meters.
    eviction_policy: Option<String>,
}

impl OriginBody {
    fn new(origin: &OriginMonitor) -> Self {
        let OriginStatus { state, since_ms, ref cause, ref eviction_policy } = *origin.status();
        Self {
            address: origin.address.clone(),
            state,
            since: timestamp(since_ms),
            since_ms,
            cause: cause.as_ref().map(|(cause, _)| cause.to_string()),
            cause_at: cause.as_ref().map(|(_, at_ms)| timestamp(*at_ms)),
            eviction_policy: eviction_policy.clone(),
        }
    }
}

/// The region of a server, and its peers.
#[derive(Serialize, ToSchema)]
struct RegionBody {
    name: String,
    /// Null without peers.
    replicator: Option<bool>,
    /// Known to the replicator only.
    connected: Option<bool>,
    lag_ms: Option<u64>,
    peers: Vec<PeerBody>,
}

/// A peer region.
#[derive(Serialize, ToSchema)]
struct PeerBody {
    region: String,
    linked: bool,
    last_heard_age_ms: Option<u64>,
    lag_ms: Option<u64>,
}

impl RegionBody {
    fn new(name: &str, region: &Region) -> Self {
        let status = region.replication_status();
        let status = status.as_ref();
        let ms = |us: u64| us / 1_000;
        let peer = |peer: &PeerStatus| PeerBody {
            region: peer.region.clone(),
            linked: peer.has_link,
            last_heard_age_ms: peer.last_heard_age_us.map(ms),
            lag_ms: peer.lag_us.map(ms),
        };
        Self {
            name: name.to_owned(),
            replicator: status.map(|status| status.is_replicator),
            connected: status.filter(|status| status.is_replicator).map(|status| status.is_connected),
            lag_ms: status.and_then(|status| status.lag_us).map(ms),
            peers: status.map(|status| status.peers.iter().map(peer).collect()).unwrap_or_default(),
        }
    }
}

/// The rules in force.
#[derive(Serialize, ToSchema)]
struct RulesBody {
    /// `store`, `file` or `none`.
    source: &'static str,
    /// Without credentials.
    location: Option<String>,
    /// Whether the rule store replies; null for a file.
    reachable: Option<bool>,
    /// Revision of the store; null for a file.
    revision: Option<u64>,
    /// `rules_version` of answers.
    version: String,
    rules: usize,
    overrides: usize,
    /// Emergencies in force.
    emergencies: usize,
    last_automatic_rollback: Option<AutomaticRollbackBody>,
    /// The last change or emergency that newly denied many keys, and is not undone automatically.
    last_alarm: Option<AlarmBody>,
}

/// A change that a server rolled back by itself.
#[derive(Serialize, ToSchema)]
#[schema(as = AutomaticRollback)]
pub(super) struct AutomaticRollbackBody {
    /// The change that was undone.
    change: u64,
    /// The change that undid it.
    rollback_change: u64,
    /// The revision since the rollback.
    revision: u64,
    at: String,
    at_ms: u64,
    /// The rule, and its newly denied keys.
    reason: String,
    /// The tenant whose rows were restored; null if the whole change was undone.
    tenant: Option<String>,
}

impl From<&AutomaticRollback> for AutomaticRollbackBody {
    fn from(rollback: &AutomaticRollback) -> Self {
        let AutomaticRollback { change, rollback_change, revision, at, at_ms, reason, tenant } =
            rollback.clone();
        Self { change, rollback_change, revision, at, at_ms, reason, tenant }
    }
}

/// A change or an emergency that newly denied many keys, and is still in force.
#[derive(Serialize, ToSchema)]
#[schema(as = Alarm)]
pub(super) struct AlarmBody {
    /// Null for an emergency.
    change: Option<u64>,
    /// Null for a change.
    emergency: Option<String>,
    at: String,
    at_ms: u64,
    /// The rule, its newly denied keys, and why nothing is undone.
    reason: String,
}

impl From<&Alarm> for AlarmBody {
    fn from(alarm: &Alarm) -> Self {
        let Alarm { change, emergency, at, at_ms, reason } = alarm.clone();
        Self { change, emergency, at, at_ms, reason }
    }
}

impl RulesBody {
    fn new(shared: &Shared) -> Self {
        let (source, location) = match &shared.rules.location {
            None => ("none", None),
            Some(RulesLocation::File(path)) => ("file", Some(path.display().to_string())),
            Some(RulesLocation::Store(address)) => ("store", Some(address.to_string())),
        };
        let rules = shared.rules.load();
        let is_store = source == "store";
        Self {
            source,
            location,
            reachable: is_store.then(|| shared.telemetry.metrics.control.is_store_up()),
            revision: is_store.then(|| rules.set().revision()),
            version: rules.set().version().to_owned(),
            rules: rules.set().rules().len(),
            overrides: rules.set().overrides(),
            emergencies: rules.set().emergencies_in_force(shared.now_ms()),
            last_automatic_rollback: shared
                .rules
                .control()
                .and_then(|control| control.last_rollback())
                .map(|rollback| AutomaticRollbackBody::from(&*rollback)),
            last_alarm: shared
                .rules
                .control()
                .and_then(|control| control.last_alarm())
                .map(|alarm| AlarmBody::from(&*alarm)),
        }
    }
}

/// `GET /v1/status`, on the admin listener.
#[utoipa::path(
    get,
    path = "/v1/status",
    operation_id = "status",
    description = "State of this server. Only on the admin listener, for the role `viewer` without a tenant.",
    responses(
        (status = 200, description = "The state", body = StatusBody),
        (status = "4XX", description = "Not permitted", body = ProblemBody<'static>,
            content_type = "application/problem+json"),
    )
)]
pub(crate) fn answer(req: &HttpRequest<'_>) -> HttpResponse {
    json(StatusCode::OK, &body(req.shared))
}

fn body(shared: &Shared) -> StatusBody {
    StatusBody {
        version: env!("CARGO_PKG_VERSION"),
        node: shared.node.host_name.clone(),
        started: timestamp(shared.node.started_ms),
        uptime_seconds: shared.node.uptime().as_secs(),
        ready: shared.node.is_ready(),
        listeners: shared.node.listeners().to_vec(),
        origin: shared.fleet.origin.as_deref().map(OriginBody::new),
        region: shared
            .decider
            .region
            .as_ref()
            .map(|region| RegionBody::new(&shared.node.region_name, region)),
        rules: RulesBody::new(shared),
        rates: shared.telemetry.rates.report(shared.decision_totals()),
        degraded: degraded(shared, Audience::Operators),
    }
}

/// Returns the reasons why a server does not work as configured, as sentences.
pub(super) fn degraded(shared: &Shared, audience: Audience) -> Vec<String> {
    let mut reasons =
        shared.fleet.origin.as_ref().map(|origin| origin.degraded(audience)).unwrap_or_default();
    if let Some(RulesLocation::Store(address)) = &shared.rules.location
        && !shared.telemetry.metrics.control.is_store_up()
    {
        let store = match audience {
            Audience::Public => "the rule store".to_owned(),
            Audience::Operators => format!("the rule store {address}"),
        };
        reasons.push(format!("{store} does not reply or takes no writes: the last good rules stay in force"));
    }
    if let Some(found) = shared.rules.control().and_then(|control| control.audit_break()) {
        reasons.push(format!(
            "the audit of the rule store does not continue the last checkpoint: {found}: run `tidegate audit \
             verify`"
        ));
    }
    reasons.extend(shared.rules.refused_edits.degraded(audience));
    if let Some(status) = shared.decider.region.as_ref().and_then(Region::replication_status) {
        if status.is_replicator && !status.is_connected {
            let region = &shared.node.region_name;
            reasons.push(format!("region {region:?} is isolated: it spends its regional share only"));
        }
        for peer in status.peers.iter().filter(|peer| peer.agrees == Some(false)) {
            reasons.push(format!(
                "peer {:?} has a different region list, weights or `peer_timeout` than this node: regional \
                 shares may add up to more than the limit",
                peer.region
            ));
        }
    }
    let shed = shared.telemetry.rates.report(shared.decision_totals()).shed_per_second;
    if shed > 0.0 {
        reasons.push(format!("the server is overloaded: it sheds {shed} checks per second"));
    }
    reasons
}
