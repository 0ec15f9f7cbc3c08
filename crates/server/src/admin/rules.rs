//! Rules of a store: looked at, planned, changed, and changed back.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use ::http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tidegate_control::{Alarm, ChangeError, ChangeKind, ChangeOutcome, PlanResult, WatchForecast};
use tidegate_core::bound::Fleet;
use tidegate_rules::change::{Change, Operation, Proposal, kind_name, kind_of};
use tidegate_rules::rows::{RowKind, RuleRow, RuleRows};
use tidegate_rules::store::{HISTORY_MAX, Rollback};
use tidegate_rules::{Rule, RuleSet};

use super::operations::OperationBody;
use super::params::{QueryParams, body};
use super::status::{AlarmBody, AutomaticRollbackBody};
use super::{AdminResult, control, refused, take_over, unfit};
use crate::auth::Role;
use crate::bounds::{BoundReport, Situation};
use crate::control::Control;
use crate::http::{HttpRequest, HttpResponse, Problem, json};

/// Default number of rows per page.
const ROWS: u64 = 100;
/// Largest number of rows per page. Higher: fewer requests, longer responses.
const ROWS_MAX: u64 = 1_000;
/// Default number of changes in a history response.
const CHANGES: u64 = 20;

pub(super) fn kind(word: &str) -> Result<RowKind, Problem> {
    kind_of(word)
        .ok_or_else(|| Problem::bad_request(format!("kind: {word:?} is none of template, rule, override")))
}

/// A row in a response. Its body is a JSON object, not text.
#[derive(Serialize)]
struct RowBody<'r> {
    kind: &'static str,
    name: &'r str,
    version: u32,
    body: Value,
    /// The dimensions of the key of a rule in force. The body lacks them if a template has them.
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<Vec<&'r str>>,
    /// The mode of a rule: as stated, otherwise as in force. The body lacks one of a template.
    #[serde(skip_serializing_if = "Option::is_none")]
    mode: Option<String>,
    /// How far a rule in force may be passed.
    #[serde(skip_serializing_if = "Option::is_none")]
    bound: Option<BoundReport<'r>>,
}

/// Converts rows for a response, and adds the bounds of rules in force.
fn row_bodies<'r>(fleet: &Fleet, set: &'r RuleSet, rows: &'r [RuleRow]) -> Vec<RowBody<'r>> {
    let names: HashSet<&str> =
        rows.iter().filter(|row| row.kind == RowKind::Rule).map(|row| row.name.as_str()).collect();
    let meant = set.rules().iter().filter(|rule| names.contains(&*rule.name));
    let meant: HashMap<&str, &Rule> = meant.map(|rule| (&*rule.name, rule)).collect();
    let situation = Situation::new(fleet.clone());
    let to_json = |row: &'r RuleRow| {
        let rule = meant.get(row.name.as_str()).filter(|_| row.kind == RowKind::Rule);
        let body = object(&row.body);
        RowBody {
            kind: kind_name(row.kind),
            name: &row.name,
            version: row.version,
            mode: rule.and_then(|rule| mode_of(&body, Some(rule))),
            body,
            key: rule.map(|rule| rule.key.iter().map(|part| &**part).collect()),
            bound: rule.map(|rule| situation.report(rule)),
        }
    };
    rows.iter().map(to_json).collect()
}

/// Returns the mode that a rule states, or otherwise the one in force by its template or by
/// default.
fn mode_of(body: &Value, rule: Option<&Rule>) -> Option<String> {
    let in_force = || rule.map(|rule| rule.mode.as_str().to_owned());
    body["mode"].as_str().map(str::to_owned).or_else(in_force)
}

/// Parses a body of the store, which contains only objects.
pub(super) fn object(body: &str) -> Value {
    serde_json::from_str(body).unwrap_or_default()
}

/// `GET /v1/rules?kind=rule&after=rule/a&limit=100`
pub(super) async fn list(req: &HttpRequest<'_>) -> AdminResult {
    let given = QueryParams::read(req, &["kind", "after", "limit"])?;
    let only = given.text("kind").map(kind).transpose()?;
    let limit = given.number("limit", ROWS, 1, ROWS_MAX)?;
    let after = given.text("after").map(place).transpose()?;
    let control = control(req)?;
    let rule_rows = current(control).await?;
    let (rollback, alarm) = (control.last_rollback(), control.last_alarm());
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let (rules, fleet) = (req.shared.rules.load_full(), req.shared.fleet.measured());
    let to_json = aside(move || {
        let after = after.as_ref().map(|(kind, name)| (*kind, name.as_str()));
        let rows = rule_rows.rows_behind(only, after);
        let (page, rest) = rows.split_at(limit.min(rows.len()));
        let last = page.last().filter(|_| !rest.is_empty());
        let next = last.map(|last| format!("{}/{}", kind_name(last.kind), last.name));
        json!({
            "revision": rule_rows.revision,
            "rows": row_bodies(&fleet, rules.set(), page),
            "next": next,
            "last_automatic_rollback": rollback.as_deref().map(AutomaticRollbackBody::from),
            "last_alarm": alarm.as_deref().map(AlarmBody::from),
        })
    });
    Ok(json(StatusCode::OK, &to_json.await?))
}

/// Runs work over all rules, up to a million, on another thread, so that it delays no decisions.
async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Problem> {
    let ended =
        |error: tokio::task::JoinError| Problem::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string());
    tokio::task::spawn_blocking(work).await.map_err(ended)
}

/// Where a page begins: behind this row.
fn place(text: &str) -> Result<(RowKind, String), Problem> {
    let (word, name) = text
        .split_once('/')
        .ok_or_else(|| Problem::bad_request(format!("after: {text:?} is not KIND/NAME, as `next` has it")))?;
    Ok((kind(word)?, name.to_owned()))
}

/// `GET /v1/rules/{kind}/{name}`
pub(super) async fn get(req: &HttpRequest<'_>, word: &str, name: &str) -> AdminResult {
    let kind = kind(word)?;
    let rule_rows = current(control(req)?).await?;
    let row = find(&rule_rows, kind, name)?.clone();
    let (rules, fleet) = (req.shared.rules.load_full(), req.shared.fleet.measured());
    let to_json = aside(move || {
        let row = row_bodies(&fleet, rules.set(), std::slice::from_ref(&row)).pop();
        json!({ "revision": rule_rows.revision, "row": row })
    });
    Ok(json(StatusCode::OK, &to_json.await?))
}

fn find<'b>(rule_rows: &'b RuleRows, kind: RowKind, name: &str) -> Result<&'b RuleRow, Problem> {
    let missing = || Problem::new(StatusCode::NOT_FOUND, format!("there is no {} {name:?}", kind_name(kind)));
    rule_rows.row(kind, name).ok_or_else(missing)
}

async fn current(control: &Arc<Control>) -> Result<Arc<RuleRows>, Problem> {
    control.current().await.map_err(|error| refused(&error))
}

/// Body of a plan request.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PlanBody {
    operations: Option<Vec<OperationBody>>,
    rollback: Option<RollbackTarget>,
}

/// The changes that a rollback undoes: one change, or all after a revision.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RollbackTarget {
    change: Option<u64>,
    to_revision: Option<u64>,
}

impl RollbackTarget {
    fn read(self, place: &str) -> Result<Rollback, Problem> {
        match (self.change, self.to_revision) {
            (Some(id), None) => Ok(Rollback::Change(id)),
            (None, Some(revision)) => Ok(Rollback::ToRevision(revision)),
            _ => Err(Problem::bad_request(format!(
                "{place}change, {place}to_revision: one of the two is needed"
            ))),
        }
    }
}

/// `POST /v1/rules/plan`: returns the effect of a change and the consent that it requires. Changes
/// nothing.
pub(super) async fn plan(req: &HttpRequest<'_>) -> AdminResult {
    let PlanBody { operations, rollback } = body(req)?;
    let control = control(req)?;
    let rule_rows = current(control).await?;
    let (kind, operations, undoes) = match (operations, rollback) {
        (Some(operations), None) => {
            let operations = OperationBody::read(operations, &rule_rows, req.shared.now_ms())?;
            (ChangeKind::Edit, operations, Vec::new())
        }
        (None, Some(target)) => {
            let restoring = control.store().restoring(target.read("rollback.")?, "").await;
            let Proposal { operations, undoes, .. } = restoring.map_err(|error| refused(&error))?;
            (ChangeKind::Rollback, operations, undoes)
        }
        _ => return Err(Problem::bad_request("operations, rollback: one of the two is needed")),
    };
    let planned = control.plan(&rule_rows, (kind, &operations), &req.actor()?).await;
    let PlanResult { effect, warnings, watch } = planned.map_err(unfit)?;
    let answer = json!({
        "base_revision": rule_rows.revision,
        "diff": differences(&rule_rows, &operations),
        "effect": effect,
        "warnings": warnings,
        "undoes": undoes,
        "watch": watch.to_json(),
        "not_watched": watch.not_watched(),
    });
    Ok(json(StatusCode::OK, &answer))
}

/// Lists the differences that a change makes to each of its rows, field by field.
fn differences(rule_rows: &RuleRows, operations: &[Operation]) -> Vec<Value> {
    operations.iter().map(|operation| difference(rule_rows, operation)).collect()
}

fn difference(rule_rows: &RuleRows, operation: &Operation) -> Value {
    let (kind, name) = operation.row();
    let before = rule_rows.row(kind, name).map(|row| object(&row.body));
    let after = operation.body().map(object);
    let does = match (&before, &after) {
        (None, _) => "create",
        (Some(_), None) => "delete",
        (Some(before), Some(after)) if before == after => "keep",
        _ => "update",
    };
    let names = |body: &Option<Value>| -> Vec<String> {
        body.as_ref().and_then(Value::as_object).into_iter().flat_map(Map::keys).cloned().collect()
    };
    let said = |body: &Option<Value>, field: &str| body.as_ref().map(|body| body[field].clone());
    let fields: BTreeSet<String> = names(&before).into_iter().chain(names(&after)).collect();
    let fields: Vec<Value> = fields
        .iter()
        .map(|field| {
            (field, said(&before, field).unwrap_or_default(), said(&after, field).unwrap_or_default())
        })
        .filter(|(_, before, after)| before != after)
        .map(|(field, before, after)| json!({ "field": field, "before": before, "after": after }))
        .collect();
    json!({ "kind": kind_name(kind), "name": name, "does": does, "fields": fields })
}

/// Body of an apply request.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ApplyBody {
    operations: Option<Vec<OperationBody>>,
    change: Option<u64>,
    base_revision: Option<u64>,
    #[serde(default)]
    reason: String,
    #[serde(default)]
    confirmed: bool,
}

/// `POST /v1/rules/apply`: applies operations, or a change that was approved.
pub(super) async fn apply(req: &HttpRequest<'_>) -> AdminResult {
    let ApplyBody { operations, change, base_revision, reason, confirmed } = body(req)?;
    let control = control(req)?;
    let rule_rows = current(control).await?;
    match (operations, change) {
        (Some(operations), None) => {
            let base_revision = required(base_revision, &rule_rows)?;
            let operations = OperationBody::read(operations, &rule_rows, req.shared.now_ms())?;
            let proposal = Proposal::new(base_revision, reason, operations);
            make(req, &rule_rows, (ChangeKind::Edit, proposal), confirmed).await
        }
        (None, Some(id)) => apply_stored(req, &rule_rows, id, confirmed).await,
        _ => Err(Problem::bad_request("operations, change: one of the two is needed")),
    }
}

/// Returns the revision that the author of a change looked at. Without it, the change could undo a
/// later one that its author has not seen. Before the first change there is none.
fn required(base_revision: Option<u64>, rule_rows: &RuleRows) -> Result<u64, Problem> {
    let revision = rule_rows.revision;
    let missing = || {
        Problem::bad_request(format!(
            "base_revision: missing; plan the change with `POST /v1/rules/plan` and send its `base_revision` \
             (the latest is {revision})"
        ))
    };
    base_revision.or((revision == 0).then_some(0)).ok_or_else(missing)
}

/// Applies a stored change, after another plan: its effect may have changed since.
async fn apply_stored(
    req: &HttpRequest<'_>,
    rule_rows: &Arc<RuleRows>,
    id: u64,
    confirmed: bool,
) -> AdminResult {
    let control = control(req)?;
    let stored = control.stored_change(id).await.map_err(|error| refused(&error))?;
    let planned = control.plan_stored(rule_rows, &stored).await;
    let PlanResult { effect, watch, .. } = planned.map_err(unfit)?;
    // A plan takes a while, and the token may have been revoked meanwhile. So the actor is looked
    // up only now.
    let outcome = control.apply_stored(rule_rows, &stored, &effect, confirmed, &req.actor()?).await;
    made(control, outcome.map_err(unmade)?, &watch).await
}

/// Puts an applied change in force, and returns it; returns one that waits as it is.
async fn made(control: &Arc<Control>, outcome: ChangeOutcome, watch: &WatchForecast) -> AdminResult {
    let change = match outcome {
        ChangeOutcome::Applied(change) => change,
        ChangeOutcome::Waiting(change) => {
            return Ok(json(StatusCode::ACCEPTED, &json!({ "change": to_json(&change) })));
        }
    };
    let problem = take_over(control.refresh()).await;
    let answer = json!({
        "change": to_json(&change),
        "not_in_force": problem,
        "watch": watch.to_json(),
        "not_watched": watch.not_watched(),
    });
    Ok(json(StatusCode::OK, &answer))
}

fn unmade(error: ChangeError) -> Problem {
    match error {
        ChangeError::Store(error) => refused(&error),
        ChangeError::Unconfirmed(because) => super::unconfirmed(&because),
        ChangeError::Stopping(stopping) => stopping.into(),
        ChangeError::Effect(error) => Problem::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    }
}

/// Plans a change and makes it: at once, if all that it needs is there.
async fn make(
    req: &HttpRequest<'_>,
    rule_rows: &Arc<RuleRows>,
    (kind, proposal): (ChangeKind, Proposal),
    confirmed: bool,
) -> AdminResult {
    if matches!(kind, ChangeKind::Edit) && changes_nothing(rule_rows, &proposal.operations) {
        return Ok(unchanged());
    }
    let control = control(req)?;
    let planned = control.plan(rule_rows, (kind, &proposal.operations), &req.actor()?).await;
    let PlanResult { effect, watch, .. } = planned.map_err(unfit)?;
    // The token may have been revoked meanwhile.
    let outcome = control.make(rule_rows, proposal, &effect, confirmed, &req.actor()?).await;
    made(control, outcome.map_err(unmade)?, &watch).await
}

/// Whether operations leave all their rows as they are.
fn changes_nothing(rule_rows: &RuleRows, operations: &[Operation]) -> bool {
    let mut differences = operations.iter().map(|operation| difference(rule_rows, operation));
    !operations.is_empty() && differences.all(|difference| difference["does"] == "keep")
}

/// Answers a request that changes no row: there is no change, and the revision stays.
fn unchanged() -> HttpResponse {
    json(StatusCode::OK, &json!({ "change": null }))
}

/// Converts a change for a response.
fn to_json(change: &Change) -> Value {
    let (approver, approved_ms) = change.approval.clone().unzip();
    json!({
        "id": change.id,
        "state": change.state.word(),
        "needs": change.needs.word(),
        "base_revision": change.base_revision,
        "revision": change.revision,
        "author": change.author,
        "reason": change.reason,
        "created_ms": change.created_ms,
        "operation_count": change.operation_count,
        "effect": change.effect.as_deref().map(object),
        "undoes": change.undoes,
        "approver": approver,
        "approved_ms": approved_ms,
    })
}

/// `GET /v1/rules/history?limit=20&before=7`: the latest first.
pub(super) async fn history(req: &HttpRequest<'_>) -> AdminResult {
    let given = QueryParams::read(req, &["limit", "before"])?;
    let limit = given.number("limit", CHANGES, 1, HISTORY_MAX)?;
    let before = match given.text("before") {
        None => None,
        Some(_) => Some(given.number("before", 0, 1, u64::MAX)?),
    };
    let control = control(req)?;
    let found = control.store().history(limit, before).await.map_err(|error| refused(&error))?;
    let alarms = control.alarms().await.map_err(|error| refused(&error))?;
    let changes: Vec<Value> = found.iter().map(|change| with_alarm(change, &alarms)).collect();
    Ok(json(StatusCode::OK, &json!({ "changes": changes })))
}

/// `GET /v1/rules/changes/{id}`
pub(super) async fn change(req: &HttpRequest<'_>, id: &str) -> AdminResult {
    let id = change_id(id)?;
    let control = control(req)?;
    let store = control.store();
    let change = store.change(id).await.map_err(|error| refused(&error))?;
    let operations = store.operations(id).await.map_err(|error| refused(&error))?;
    let operations: Vec<Value> = operations.iter().map(operation_to_json).collect();
    let alarms = control.alarms().await.map_err(|error| refused(&error))?;
    let change = with_alarm(&change, &alarms);
    Ok(json(StatusCode::OK, &json!({ "change": change, "operations": operations })))
}

/// Converts a change for a response, with its alarm.
fn with_alarm(change: &Change, alarms: &[Alarm]) -> Value {
    let alarm = alarms.iter().find(|alarm| alarm.change == Some(change.id));
    let mut body = to_json(change);
    body["alarm"] = json!(alarm.map(AlarmBody::from));
    body
}

fn operation_to_json(operation: &Operation) -> Value {
    let (kind, name) = operation.row();
    match operation.body() {
        Some(body) => json!({ "do": "put", "kind": kind_name(kind), "name": name, "body": object(body) }),
        None => json!({ "do": "delete", "kind": kind_name(kind), "name": name }),
    }
}

fn change_id(text: &str) -> Result<u64, Problem> {
    text.parse().map_err(|_| Problem::bad_request(format!("change: {text:?} is no number of a change")))
}

/// `POST /v1/rules/changes/{id}/approve`: it can be applied then.
pub(super) async fn approve(req: &HttpRequest<'_>, id: &str) -> AdminResult {
    let (id, control, actor) = (change_id(id)?, control(req)?, req.actor()?);
    let change = control.approve(id, &actor).await.map_err(unfit)?;
    Ok(json(StatusCode::OK, &json!({ "change": to_json(&change) })))
}

/// Body of a request that only takes a reason.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReasonBody {
    #[serde(default)]
    reason: String,
}

/// `POST /v1/rules/changes/{id}/reject`: by an approver, or by its author.
pub(super) async fn reject(req: &HttpRequest<'_>, id: &str) -> AdminResult {
    let ReasonBody { reason } = body(req)?;
    let (id, control, actor) = (change_id(id)?, control(req)?, req.actor()?);
    if req.principal(Role::Approver).is_err() {
        let change = control.store().change(id).await.map_err(|error| refused(&error))?;
        if change.author != actor {
            return Err(Problem::forbidden(Role::Approver));
        }
    }
    let change = control
        .store()
        .reject(id, &reason, control.attribution(&actor)?)
        .await
        .map_err(|error| refused(&error))?;
    Ok(json(StatusCode::OK, &json!({ "change": to_json(&change) })))
}

/// Body of a rollback request.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RollbackBody {
    change: Option<u64>,
    to_revision: Option<u64>,
    base_revision: Option<u64>,
    #[serde(default)]
    reason: String,
    #[serde(default)]
    confirmed: bool,
}

/// `POST /v1/rules/rollback`: restores the rows before one change, or at a revision. A rollback
/// requires the same consent as any change, because the earlier rules may deny more.
pub(super) async fn rollback(req: &HttpRequest<'_>) -> AdminResult {
    let RollbackBody { change, to_revision, base_revision, reason, confirmed } = body(req)?;
    let what = RollbackTarget { change, to_revision }.read("")?;
    let control = control(req)?;
    let rule_rows = current(control).await?;
    let base_revision = required(base_revision, &rule_rows)?;
    let mut proposal = control.store().restoring(what, &reason).await.map_err(|error| refused(&error))?;
    // Rows that changed after the author's plan are conflicts.
    proposal.base_revision = base_revision.min(proposal.base_revision);
    make(req, &rule_rows, (ChangeKind::Rollback, proposal), confirmed).await
}

/// Body of a request that changes the mode of a rule.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ModeBody {
    base_revision: Option<u64>,
    #[serde(default)]
    reason: String,
    #[serde(default)]
    confirmed: bool,
}

/// `POST /v1/rules/{name}/shadow` and `/enforce`: a change like any other.
pub(super) async fn set_mode(req: &HttpRequest<'_>, name: &str, mode: &str) -> AdminResult {
    let ModeBody { base_revision, reason, confirmed } = body(req)?;
    let rule_rows = current(control(req)?).await?;
    let mut wanted = object(&find(&rule_rows, RowKind::Rule, name)?.body);
    let rules = req.shared.rules.load_full();
    let in_force = rules.set().rules().iter().find(|rule| &*rule.name == name);
    if mode_of(&wanted, in_force).as_deref() == Some(mode) {
        return Ok(unchanged());
    }
    wanted["mode"] = mode.into();
    let operations =
        vec![Operation::Put { kind: RowKind::Rule, name: name.to_owned(), body: wanted.to_string() }];
    let proposal = Proposal::new(required(base_revision, &rule_rows)?, reason, operations);
    make(req, &rule_rows, (ChangeKind::Edit, proposal), confirmed).await
}
