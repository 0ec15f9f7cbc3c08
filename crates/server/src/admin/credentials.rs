//! Credentials of the store. A token is returned once, by the request that creates it; the store
//! keeps only its hash.

use ::http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};
use tidegate_rules::store::{CREDENTIALS_PAGE_MAX, Credential};

use super::params::{QueryParams, body};
use super::{AdminResult, control, refused, take_over};
use crate::auth::{Role, TokenHash, is_free_name, new_token};
use crate::http::{HttpRequest, Problem, json};

/// Default number of credentials per page.
const PAGE: u64 = 100;

/// `GET /v1/credentials?limit=100&after=HASH`
pub(super) async fn list(req: &HttpRequest<'_>) -> AdminResult {
    let given = QueryParams::read(req, &["limit", "after"])?;
    let limit = given.number("limit", PAGE, 1, CREDENTIALS_PAGE_MAX)?;
    let after = given.text("after").unwrap_or_default();
    if !after.is_empty() && format!("sha256:{after}").parse::<TokenHash>().is_err() {
        let problem = format!("after: {after:?} is not a hash of 64 hexadecimal digits, as `next` has it");
        return Err(Problem::bad_request(problem));
    }
    // One more shows whether there are any behind the page.
    let found = control(req)?.store().credentials_after(after, limit + 1).await;
    let mut found = found.map_err(|error| refused(&error))?;
    let has_more = found.len() as u64 > limit;
    found.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
    let next = found.last().filter(|_| has_more).map(|last| last.hash.as_str());
    let credentials: Vec<Value> = found.iter().map(to_json).collect();
    Ok(json(StatusCode::OK, &json!({ "credentials": credentials, "next": next })))
}

fn to_json(credential: &Credential) -> Value {
    let Credential { hash, name, tenant, role, created_ms, expires_ms } = credential;
    json!({
        "hash": hash, "name": name, "tenant": tenant, "role": role, "created_ms": created_ms, "expires_ms": expires_ms
    })
}

/// Body of a request for a new credential.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NewCredential {
    name: String,
    role: String,
    #[serde(default)]
    tenant: String,
    expires_ms: Option<u64>,
}

/// The warning for a token that every caller can do without.
const UNCHECKED: &str = "this server has no tokens in its configuration, so it checks none";

/// `POST /v1/credentials`: creates a token. Only this response contains it.
pub(super) async fn admit(req: &HttpRequest<'_>) -> AdminResult {
    let NewCredential { name, role, tenant, expires_ms } = body(req)?;
    let (control, actor) = (control(req)?, req.actor()?);
    let attribution = control.attribution(&actor)?;
    if !is_free_name(&name) {
        return Err(Problem::bad_request(format!("name: {name:?} is reserved for the server")));
    }
    if Role::of_name(&role).is_none() {
        let roles = Role::ALL.map(Role::as_str).join(", ");
        return Err(Problem::bad_request(format!("role: {role:?} is none of {roles}")));
    }
    if req.shared.tenants.iter().all(|known| known.name != tenant) {
        return Err(Problem::bad_request(format!("tenant: there is none named {tenant:?}")));
    }
    if let Some(ended) = expires_ms.filter(|expires_ms| *expires_ms <= attribution.now_ms) {
        let problem = format!("expires_ms: {ended} is outside {} to {}", attribution.now_ms + 1, u64::MAX);
        return Err(Problem::bad_request(problem));
    }
    let token = new_token().map_err(|error| Problem::new(StatusCode::INTERNAL_SERVER_ERROR, error))?;
    let hash = TokenHash::of(token.as_bytes()).to_string().replace("sha256:", "");
    let credential = Credential { hash, name, tenant, role, created_ms: attribution.now_ms, expires_ms };
    control.store().put_credential(&credential, attribution).await.map_err(|error| refused(&error))?;
    let problem = take_over(control.refresh()).await;
    let warning = req.shared.credentials.load().is_open().then_some(UNCHECKED);
    let answer = json!({
        "token": token,
        "credential": to_json(&credential),
        "not_in_force": problem,
        "warning": warning,
    });
    Ok(json(StatusCode::OK, &answer))
}

/// `DELETE /v1/credentials/{hash}`
pub(super) async fn revoke(req: &HttpRequest<'_>, hash: &str) -> AdminResult {
    let (control, actor) = (control(req)?, req.actor()?);
    control
        .store()
        .revoke_credential(hash, control.attribution(&actor)?)
        .await
        .map_err(|error| refused(&error))?;
    let problem = take_over(control.refresh()).await;
    Ok(json(StatusCode::OK, &json!({ "hash": hash, "not_in_force": problem })))
}
