//! Emergencies: declared, renewed and ended, on a way that is shorter than that of rules.

use std::time::Duration;

use ::http::StatusCode;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tidegate_control::{Consent, PlanError};
use tidegate_record::timestamp;
use tidegate_rules::change::ChangeNeeds;
use tidegate_rules::parse_period;
use tidegate_rules::rows::EmergencyRow;
use tidegate_rules::store::EMERGENCY_MS_MAX;

use super::params::body;
use super::{AdminResult, control, refused, take_over, unconfirmed, unfit};
use crate::auth::{Role, new_token};
use crate::http::{HttpRequest, Problem, json};

/// Requests that no emergency affects, because their limit is not a rule.
pub const UNRULED_REQUESTS: &str = "direct limits (CL.THROTTLE, /v2/ratelimit.limit) and Envoy descriptors";

/// How many characters of a random id are enough that no two emergencies share one.
const ID_CHARACTERS: usize = 11;

/// `GET /v1/emergencies`
pub(super) async fn list(req: &HttpRequest<'_>) -> AdminResult {
    let (revision, rows) = control(req)?.store().emergencies().await.map_err(|error| refused(&error))?;
    let now_ms = req.shared.now_ms();
    let lasting = rows.iter().filter(|row| now_ms < row.expires_ms);
    let emergencies: Vec<Value> = lasting.map(to_json).collect();
    Ok(json(StatusCode::OK, &json!({ "emergency_revision": revision, "emergencies": emergencies })))
}

fn to_json(row: &EmergencyRow) -> Value {
    let body: Value = serde_json::from_str(&row.body).unwrap_or_default();
    json!({ "id": row.id, "expires": timestamp(row.expires_ms), "expires_ms": row.expires_ms, "body": body })
}

/// Body of a request for an emergency: its fields and its duration.
#[derive(Deserialize)]
struct Declaration {
    id: Option<String>,
    r#for: Option<String>,
    #[serde(default)]
    confirmed: bool,
    #[serde(flatten)]
    fields: Map<String, Value>,
}

/// Describes the scope of an emergency that may deny but selects no keys, so that the caller
/// confirms it is no slip. Returns `None` for one that selects keys. Invalid emergencies are
/// refused later.
fn unscoped_denial(fields: &Map<String, Value>) -> Option<String> {
    let text = |name: &str| fields.get(name).and_then(Value::as_str);
    let denies = matches!(text("action"), Some("block" | "limit"));
    let key = fields.get("key").and_then(Value::as_array).into_iter().flatten();
    // All conditions must hold, so one narrow condition is enough.
    let mut when = fields.get("when").and_then(Value::as_object).into_iter().flatten();
    let is_narrow = key.filter_map(Value::as_str).any(spells_out) || when.any(|(_, any_of)| narrows(any_of));
    (denies && !is_narrow).then(|| {
        let rule = text("rule").map_or_else(|| "any rule".to_owned(), |rule| format!("rule {rule:?}"));
        let whose = text("tenant").map_or_else(String::new, |tenant| format!(" of tenant {tenant:?}"));
        let beyond = if text("rule").is_some() {
            String::new()
        } else {
            format!("; it does not affect {UNRULED_REQUESTS}")
        };
        format!(
            "the emergency affects all requests{whose} of {rule}: neither `key` nor `when` names any{beyond}"
        )
    })
}

/// Whether a condition does not match everything. Any one of its patterns may match, so each must
/// contain more than wildcards.
fn narrows(any_of: &Value) -> bool {
    match any_of {
        Value::String(pattern) => spells_out(pattern),
        Value::Array(patterns) => {
            !patterns.is_empty() && patterns.iter().all(|pattern| pattern.as_str().is_some_and(spells_out))
        }
        _ => false,
    }
}

/// Whether a pattern has more than stars. Every path has a slash, and every address is in a network
/// without a prefix.
fn spells_out(pattern: &str) -> bool {
    let is_everything = pattern.bytes().all(|byte| matches!(byte, b'*' | b'/'));
    !is_everything && !matches!(pattern, "0.0.0.0/0" | "::/0")
}

/// `POST /v1/emergencies`
pub(super) async fn declare(req: &HttpRequest<'_>) -> AdminResult {
    let Declaration { id, r#for, confirmed, mut fields } = body(req)?;
    let (control, actor) = (control(req)?, req.actor()?);
    let attribution = control.attribution(&actor)?;
    let id = match id {
        Some(id) => id,
        None => new_id()?,
    };
    let stops = unscoped_denial(&fields);
    fields.insert("by".to_owned(), actor.as_str().into());
    fields.insert("created_ms".to_owned(), attribution.now_ms.into());
    let expires_ms = attribution.now_ms + lasts_ms(r#for.as_deref())?;
    let row = EmergencyRow { id, body: Value::Object(fields).to_string(), expires_ms };
    control.try_emergency(&row).await.map_err(|error| unfit(without_place(error, &row.id)))?;
    let consent = control.emergency_consent(&row, &actor).await.map_err(unfit)?;
    check_approver(req, consent.as_ref())?;
    let because = consent.map(|consent| consent.because);
    let reasons: Vec<String> = stops.into_iter().chain(because).collect();
    if !reasons.is_empty() && !confirmed {
        return Err(unconfirmed(&reasons.join(", and ")));
    }
    let revision = control.store().put_emergency(&row, attribution).await.map_err(|error| refused(&error))?;
    let problem = take_over(control.refresh_emergencies()).await;
    let answer =
        json!({ "emergency_revision": revision, "emergency": to_json(&row), "not_in_force": problem });
    Ok(json(StatusCode::OK, &answer))
}

/// Checks that the caller may approve changes, if an emergency needs that. It waits for no
/// approval.
fn check_approver(req: &HttpRequest<'_>, consent: Option<&Consent>) -> Result<(), Problem> {
    let needed = consent.filter(|consent| consent.needs == ChangeNeeds::Approver);
    let Some(Consent { because, .. }) = needed.filter(|_| req.principal(Role::Approver).is_err()) else {
        return Ok(());
    };
    let role = Role::Approver.as_str();
    let problem = format!("{because}: this needs the role {role:?} or a higher one; let such a token do it");
    Err(Problem::new(StatusCode::FORBIDDEN, problem))
}

/// Removes the place of the declared emergency from its problems: a request has only one.
fn without_place(error: PlanError, id: &str) -> PlanError {
    let PlanError::Wrong(problems) = error else { return error };
    let place = format!("emergencies[{id:?}].");
    let lines = problems.lines().map(|line| line.strip_prefix(&place).unwrap_or(line));
    PlanError::Wrong(lines.collect::<Vec<_>>().join("\n"))
}

fn new_id() -> Result<String, Problem> {
    let random = new_token().map_err(|error| Problem::new(StatusCode::INTERNAL_SERVER_ERROR, error))?;
    Ok(random.chars().take(ID_CHARACTERS).collect::<String>().replace("tg_", "e-"))
}

/// Returns the duration of an emergency in milliseconds. The default is one hour, which is also the
/// maximum.
fn lasts_ms(text: Option<&str>) -> Result<u64, Problem> {
    let most = Duration::from_millis(EMERGENCY_MS_MAX);
    let wrong = |problem: String| Problem::bad_request(format!("for: {problem}"));
    let lasts = text.map_or(Ok(most), parse_period).map_err(wrong)?;
    if lasts > most || lasts.as_millis() == 0 {
        return Err(wrong(format!("{lasts:?} is outside 1ms to {most:?}; renew it to make it last longer")));
    }
    Ok(u64::try_from(lasts.as_millis()).unwrap_or(EMERGENCY_MS_MAX))
}

/// For how long.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Renewal {
    r#for: Option<String>,
}

/// `POST /v1/emergencies/{id}/renew`
pub(super) async fn renew(req: &HttpRequest<'_>, id: &str) -> AdminResult {
    let Renewal { r#for } = body(req)?;
    let (control, actor) = (control(req)?, req.actor()?);
    let attribution = control.attribution(&actor)?;
    let expires_ms = attribution.now_ms + lasts_ms(r#for.as_deref())?;
    // The same emergency needs the same token as at first, since its author may not be the caller.
    let (_, rows) = control.store().emergencies().await.map_err(|error| refused(&error))?;
    if let Some(row) = rows.into_iter().find(|row| row.id == id) {
        let consent = control.emergency_consent(&row, &actor).await.map_err(unfit)?;
        check_approver(req, consent.as_ref())?;
    }
    let revision = control
        .store()
        .renew_emergency(id, expires_ms, attribution)
        .await
        .map_err(|error| refused(&error))?;
    let problem = take_over(control.refresh_emergencies()).await;
    let answer = json!({
        "emergency_revision": revision,
        "id": id,
        "expires": timestamp(expires_ms),
        "expires_ms": expires_ms,
        "not_in_force": problem,
    });
    Ok(json(StatusCode::OK, &answer))
}

/// `DELETE /v1/emergencies/{id}`
pub(super) async fn end(req: &HttpRequest<'_>, id: &str) -> AdminResult {
    let (control, actor) = (control(req)?, req.actor()?);
    let revision = control
        .store()
        .end_emergency(id, control.attribution(&actor)?)
        .await
        .map_err(|error| refused(&error))?;
    let problem = take_over(control.refresh_emergencies()).await;
    Ok(json(StatusCode::OK, &json!({ "emergency_revision": revision, "id": id, "not_in_force": problem })))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asks(body: &str) -> Option<String> {
        let Value::Object(fields) = serde_json::from_str(body).expect("JSON") else { return None };
        unscoped_denial(&fields)
    }

    #[test]
    fn denying_emergency_without_keys_needs_confirmation() {
        for body in [
            r#"{"action":"block"}"#,
            r#"{"action":"block","rule":"a"}"#,
            r#"{"action":"block","tenant":"acme"}"#,
            r#"{"action":"block","rule":"a","key":["*"]}"#,
            r#"{"action":"block","rule":"a","key":["**","*"]}"#,
            r#"{"action":"block","when":{}}"#,
            r#"{"action":"block","when":{"path":"*"}}"#,
            r#"{"action":"block","when":{"path":"/*"}}"#,
            r#"{"action":"block","when":{"path":["/v1/*","*"]}}"#,
            r#"{"action":"block","when":{"path":[]}}"#,
            r#"{"action":"block","when":{"ip":"0.0.0.0/0"}}"#,
            r#"{"action":"limit","limit":0,"period":"1s"}"#,
            r#"{"action":"limit","limit":1000,"period":"1s","rule":"a"}"#,
        ] {
            assert!(asks(body).is_some(), "{body}");
        }
        for body in [
            r#"{"action":"block","rule":"a","key":["bob"]}"#,
            r#"{"action":"block","rule":"a","key":["*","b*"]}"#,
            r#"{"action":"block","when":{"path":"/v1/*"}}"#,
            r#"{"action":"block","when":{"path":"*","user":"bob"}}"#,
            r#"{"action":"block","when":{"ip":["10.0.0.0/8"]}}"#,
            r#"{"action":"limit","limit":0,"period":"1s","when":{"user":"bob"}}"#,
            r#"{"action":"allow"}"#,
        ] {
            assert_eq!(asks(body), None, "{body}");
        }
        let words = asks(r#"{"action":"block","rule":"a","tenant":"acme"}"#).expect("it asks");
        assert!(
            words.starts_with("the emergency affects all requests of tenant \"acme\" of rule \"a\": "),
            "{words}"
        );
    }
}
