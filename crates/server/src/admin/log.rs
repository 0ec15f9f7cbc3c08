//! Queries of the decision log: past decisions and heavy keys.

use std::time::Duration;

use ::http::StatusCode;
use serde::Serialize;
use tidegate_record::{
    DecisionRecord, HEAVY_MAX, HeavyKey, HeavyKeys, MINUTES_MAX, MINUTES_MIN, RECORDS_MAX, RecordCounts,
    moment, timestamp,
};
use tidegate_rules::parse_period;

use super::AdminResult;
use super::params::QueryParams;
use super::status::{AlarmBody, AutomaticRollbackBody};
use crate::auth::{OPERATING_TENANT, Principal, Role};
use crate::decision_log::{DecisionLog, LogQueryError, WhyAnswer, WhyRequest};
use crate::http::{HttpRequest, Problem, json};

/// Default time around a moment that a query searches.
const WINDOW: Duration = Duration::from_mins(1);
/// Longest time around a moment. Longer: more blocks to search for a key that is in none of them.
const WINDOW_MAX: Duration = Duration::from_hours(1);
/// Default number of records per response.
const RECORDS: usize = 10;
/// Default number of minutes that a query for heavy keys covers.
const MINUTES: u64 = 10;
/// Default number of heavy keys per response.
const HEAVY: u64 = 100;

#[derive(Serialize)]
struct WhyBody<'w> {
    tenant: &'w str,
    key: &'w str,
    at: String,
    window_ms: u64,
    records: Vec<RecordBody>,
    /// Keys that contain the key of the query; empty if there are records.
    similar: Vec<String>,
    notices: Vec<Notice>,
}

/// An event that explains decisions of many keys.
#[derive(Serialize)]
struct Notice {
    kind: &'static str,
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    rollback: Option<AutomaticRollbackBody>,
    #[serde(skip_serializing_if = "Option::is_none")]
    alarm: Option<AlarmBody>,
}

/// How long after an automatic rollback, or an alarm, answers have a notice of it.
const NOTICE_MS: u64 = 24 * 60 * 60 * 1_000;

/// Returns the automatic rollback and the alarm of the last day, for operators: they concern all
/// tenants.
fn notices(req: &HttpRequest<'_>, principal: Principal, now_ms: u64) -> Vec<Notice> {
    let control = req.shared.rules.control().filter(|_| principal.tenant == OPERATING_TENANT);
    let Some(control) = control else { return Vec::new() };
    let is_recent = |at_ms: u64| now_ms < at_ms.saturating_add(NOTICE_MS);
    let rollback = control.last_rollback().filter(|rollback| is_recent(rollback.at_ms));
    let rollback = rollback.map(|rollback| {
        let (change, at, reason) = (rollback.change, &rollback.at, &rollback.reason);
        let message = format!("change {change} was rolled back automatically at {at}: {reason}");
        let rollback = Some(AutomaticRollbackBody::from(&*rollback));
        Notice { kind: "automatic_rollback", message, rollback, alarm: None }
    });
    let alarm = control.last_alarm().filter(|alarm| is_recent(alarm.at_ms));
    let alarm = alarm.map(|alarm| {
        let message = format!("alarm at {}: {}", alarm.at, alarm.reason);
        let alarm = Some(AlarmBody::from(&*alarm));
        Notice { kind: "alarm", message, rollback: None, alarm }
    });
    rollback.into_iter().chain(alarm).collect()
}

#[derive(Serialize)]
struct RecordBody {
    at: String,
    #[serde(flatten)]
    record: DecisionRecord,
}

/// `GET /v1/why?key=user:42&at=14:32:17`
pub(super) async fn why(req: &HttpRequest<'_>) -> AdminResult {
    let principal = req.principal(Role::Viewer)?;
    let given = QueryParams::read(req, &["key", "at", "window", "records", "tenant"])?;
    let tenant = tenant(req, principal, &given)?;
    let decision_log = decision_log(req)?;
    let Some(key) = given.text("key").filter(|key| !key.is_empty()) else {
        return Err(Problem::bad_request("key: missing; the key of a request, such as user:42"));
    };
    // Neither the search nor the answer has the credential of the question.
    let key = {
        let index = req.shared.tenants.iter().position(|known| known.name == tenant).unwrap_or_default();
        let rules = req.shared.rules.load();
        req.shared.protocol.secret_headers.hide_in_key(key, rules.dimensions_used(index))
    };
    let now_ms = req.shared.now_ms();
    let at_ms = moment(given.text("at").unwrap_or("now"), now_ms)
        .map_err(|problem| Problem::bad_request(format!("at: {problem}")))?;
    let window_ms = window(given.text("window"))?;
    let records = given.number("records", RECORDS as u64, 1, RECORDS_MAX as u64)?;
    let question = WhyRequest {
        tenant: tenant.clone(),
        key: key.clone().into_owned(),
        at_ms,
        window_ms,
        records: usize::try_from(records).unwrap_or(RECORDS),
    };
    let WhyAnswer { records, similar } = decision_log.why(question).await.map_err(not_answered)?;
    let records =
        records.into_iter().map(|record| RecordBody { at: timestamp(record.at_ms), record }).collect();
    let notices = notices(req, principal, now_ms);
    let answer =
        WhyBody { tenant: &tenant, key: &key, at: timestamp(at_ms), window_ms, records, similar, notices };
    Ok(json(StatusCode::OK, &answer))
}

fn window(text: Option<&str>) -> Result<u64, Problem> {
    let wrong = |problem| Problem::bad_request(format!("window: {problem}"));
    let window = text.map_or(Ok(WINDOW), parse_period).map_err(wrong)?;
    if window > WINDOW_MAX {
        return Err(wrong(format!("{window:?} is outside 1µs to {WINDOW_MAX:?}")));
    }
    Ok(u64::try_from(window.as_millis()).unwrap_or(u64::MAX))
}

#[derive(Serialize)]
struct HeavyBody<'w> {
    tenant: &'w str,
    minutes: u64,
    /// The minutes near a limit that make a key heavy.
    minutes_required: u64,
    /// The records of these minutes, whether or not a key is heavy.
    #[serde(flatten)]
    counts: RecordCounts,
    /// Keys that were near a limit in at least one minute, and the most minutes of one of them.
    keys_near: usize,
    minutes_near_max: u64,
    /// How many there are.
    of: usize,
    keys: Vec<HeavyKey>,
}

/// `GET /v1/heavy?minutes=10&limit=100`
pub(super) async fn heavy(req: &HttpRequest<'_>) -> AdminResult {
    let principal = req.principal(Role::Viewer)?;
    let given = QueryParams::read(req, &["minutes", "limit", "tenant"])?;
    let tenant = tenant(req, principal, &given)?;
    let decision_log = decision_log(req)?;
    let minutes = given.number("minutes", MINUTES, MINUTES_MIN, MINUTES_MAX)?;
    let most = given.number("limit", HEAVY, 1, HEAVY_MAX as u64)?;
    let most = usize::try_from(most).unwrap_or(HEAVY_MAX);
    let found = decision_log.heavy(tenant.clone(), minutes, req.shared.now_ms(), most).await;
    let HeavyKeys { of, keys, counts, keys_near, minutes_near_max } = found.map_err(not_answered)?;
    let minutes_required = minutes.div_ceil(2);
    let answer = HeavyBody {
        tenant: &tenant,
        minutes,
        minutes_required,
        counts,
        keys_near,
        minutes_near_max,
        of,
        keys,
    };
    Ok(json(StatusCode::OK, &answer))
}

/// Returns the tenant of the query: the caller's own, or any tenant if the caller is an operator of
/// the server.
fn tenant(req: &HttpRequest<'_>, principal: Principal, given: &QueryParams<'_>) -> Result<String, Problem> {
    let own = &req.shared.tenant(principal.tenant).name;
    match given.text("tenant") {
        None => Ok(own.clone()),
        Some(other) if other != own && principal.tenant != OPERATING_TENANT => Err(Problem::for_operators()),
        Some(known) if req.shared.tenants.iter().any(|tenant| tenant.name == known) => Ok(known.to_owned()),
        Some(unknown) => Err(Problem::bad_request(format!("tenant: there is none named {unknown:?}"))),
    }
}

fn decision_log<'a>(req: &'a HttpRequest<'_>) -> Result<&'a DecisionLog, Problem> {
    let off = "the decision log is off: it needs a data_dir, and not `decision_log = \"off\"`";
    req.shared.telemetry.decision_log.as_ref().ok_or_else(|| Problem::new(StatusCode::NOT_FOUND, off))
}

fn not_answered(why: LogQueryError) -> Problem {
    match why {
        LogQueryError::Busy => Problem::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "decision log: as many questions as may be are being looked up",
        ),
        LogQueryError::Log(error) => Problem::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    }
}
