//! Emergencies: declared, renewed and ended, on a way that is shorter than that of rules.

use std::time::Duration;

use ::http::StatusCode;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tidegate_record::timestamp;
use tidegate_rules::book::{Book, EmergencyRow, Kind};
use tidegate_rules::store::EMERGENCY_MS_MAX;
use tidegate_rules::{EMERGENCIES_MAX, RuleSet, parse_period};

use super::given::body;
use super::{Answered, act, control, refused, take_over};
use crate::auth::new_token;
use crate::http::{Asked, Problem, json};

/// How many characters of a random id are enough that no two emergencies share one.
const ID_CHARACTERS: usize = 11;

/// `GET /v1/emergencies`
pub(super) async fn list(asked: &Asked<'_>) -> Answered {
    let (revision, rows) = control(asked)?.store().emergencies().await.map_err(|error| refused(&error))?;
    let now_ms = asked.shared.now_ms();
    let lasting = rows.iter().filter(|row| now_ms < row.expires_ms);
    let emergencies: Vec<Value> = lasting.map(told).collect();
    Ok(json(StatusCode::OK, &json!({ "emergency_revision": revision, "emergencies": emergencies })))
}

fn told(row: &EmergencyRow) -> Value {
    let body: Value = serde_json::from_str(&row.body).unwrap_or_default();
    json!({ "id": row.id, "expires": timestamp(row.expires_ms), "expires_ms": row.expires_ms, "body": body })
}

/// What is declared: the fields of an emergency, and for how long.
#[derive(Deserialize)]
struct Declaration {
    id: Option<String>,
    r#for: Option<String>,
    #[serde(flatten)]
    fields: Map<String, Value>,
}

/// `POST /v1/emergencies`
pub(super) async fn declare(asked: &Asked<'_>) -> Answered {
    let Declaration { id, r#for, mut fields } = body(asked)?;
    let (control, actor) = (control(asked)?, asked.actor());
    let act = act(&actor, control);
    let id = match id {
        Some(id) => id,
        None => new_id()?,
    };
    fields.insert("by".to_owned(), actor.as_str().into());
    fields.insert("created_ms".to_owned(), act.now_ms.into());
    let expires_ms = act.now_ms + lasts_ms(r#for.as_deref())?;
    let row = EmergencyRow { id, body: Value::Object(fields).to_string(), expires_ms };
    let (_, there) = control.store().emergencies().await.map_err(|error| refused(&error))?;
    if there.len() >= EMERGENCIES_MAX && there.iter().all(|known| known.id != row.id) {
        let problem = format!("emergencies: there are {EMERGENCIES_MAX}, as many as may be; end one");
        return Err(Problem::new(StatusCode::CONFLICT, problem));
    }
    check(&control.book(), &row, act.now_ms)?;
    let revision = control.store().put_emergency(&row, act).await.map_err(|error| refused(&error))?;
    let problem = take_over(control).await;
    let answer = json!({ "emergency_revision": revision, "emergency": told(&row), "not_in_force": problem });
    Ok(json(StatusCode::OK, &answer))
}

/// Whether an emergency makes sense with the rule that it names. Other rules do not matter, and there may be many.
fn check(book: &Book, row: &EmergencyRow, now_ms: u64) -> Result<(), Problem> {
    let body: Value = serde_json::from_str(&row.body).unwrap_or_default();
    let is_needed =
        |kind: Kind, name: &str| kind == Kind::Template || kind == Kind::Rule && body["rule"] == *name;
    let rows = book.rows.iter().filter(|row| is_needed(row.kind, &row.name)).cloned().collect();
    let small = Book { rows, emergencies: vec![row.clone()], ..Book::default() };
    let compiled = RuleSet::compile(&small, None, now_ms);
    compiled.map(|_| ()).map_err(|problems| Problem::bad_request(problems.to_string()))
}

fn new_id() -> Result<String, Problem> {
    let random = new_token().map_err(|error| Problem::new(StatusCode::INTERNAL_SERVER_ERROR, error))?;
    Ok(random.chars().take(ID_CHARACTERS).collect::<String>().replace("tg_", "e-"))
}

/// How long an emergency lasts: an hour where nothing else is said, which is also the most.
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
pub(super) async fn renew(asked: &Asked<'_>, id: &str) -> Answered {
    let Renewal { r#for } = body(asked)?;
    let (control, actor) = (control(asked)?, asked.actor());
    let act = act(&actor, control);
    let expires_ms = act.now_ms + lasts_ms(r#for.as_deref())?;
    let revision =
        control.store().renew_emergency(id, expires_ms, act).await.map_err(|error| refused(&error))?;
    let problem = take_over(control).await;
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
pub(super) async fn end(asked: &Asked<'_>, id: &str) -> Answered {
    let (control, actor) = (control(asked)?, asked.actor());
    let revision =
        control.store().end_emergency(id, act(&actor, control)).await.map_err(|error| refused(&error))?;
    let problem = take_over(control).await;
    Ok(json(StatusCode::OK, &json!({ "emergency_revision": revision, "id": id, "not_in_force": problem })))
}
