//! Credentials of the store: who may ask. A token is told once, to whoever makes it; the store has its hash.

use ::http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};
use tidegate_rules::store::Credential;

use super::given::body;
use super::{Answered, act, control, refused, take_over};
use crate::auth::{Role, TokenHash, is_free_name, new_token};
use crate::http::{Asked, Problem, json};

/// `GET /v1/credentials`
pub(super) async fn list(asked: &Asked<'_>) -> Answered {
    let all = control(asked)?.store().credentials().await.map_err(|error| refused(&error))?;
    let credentials: Vec<Value> = all.iter().map(told).collect();
    Ok(json(StatusCode::OK, &json!({ "credentials": credentials })))
}

fn told(credential: &Credential) -> Value {
    let Credential { hash, name, tenant, role, created_ms, expires_ms } = credential;
    json!({
        "hash": hash, "name": name, "tenant": tenant, "role": role, "created_ms": created_ms, "expires_ms": expires_ms
    })
}

/// What is asked for.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NewCredential {
    name: String,
    role: String,
    #[serde(default)]
    tenant: String,
    expires_ms: Option<u64>,
}

/// `POST /v1/credentials`: makes a token, which is told here and never again.
pub(super) async fn admit(asked: &Asked<'_>) -> Answered {
    let NewCredential { name, role, tenant, expires_ms } = body(asked)?;
    let (control, actor) = (control(asked)?, asked.actor());
    let act = act(&actor, control);
    if !is_free_name(&name) {
        return Err(Problem::bad_request(format!("name: {name:?} stands for somebody else")));
    }
    if Role::of_name(&role).is_none() {
        let roles = Role::ALL.map(Role::as_str).join(", ");
        return Err(Problem::bad_request(format!("role: {role:?} is none of {roles}")));
    }
    if asked.shared.tenants.iter().all(|known| known.name != tenant) {
        return Err(Problem::bad_request(format!("tenant: there is none named {tenant:?}")));
    }
    if let Some(ended) = expires_ms.filter(|expires_ms| *expires_ms <= act.now_ms) {
        let problem = format!("expires_ms: {ended} is outside {} to {}", act.now_ms + 1, u64::MAX);
        return Err(Problem::bad_request(problem));
    }
    let token = new_token().map_err(|error| Problem::new(StatusCode::INTERNAL_SERVER_ERROR, error))?;
    let hash = TokenHash::of(token.as_bytes()).to_string().replace("sha256:", "");
    let credential = Credential { hash, name, tenant, role, created_ms: act.now_ms, expires_ms };
    control.store().put_credential(&credential, act).await.map_err(|error| refused(&error))?;
    let problem = take_over(control).await;
    Ok(json(
        StatusCode::OK,
        &json!({ "token": token, "credential": told(&credential), "not_in_force": problem }),
    ))
}

/// `DELETE /v1/credentials/{hash}`
pub(super) async fn revoke(asked: &Asked<'_>, hash: &str) -> Answered {
    let (control, actor) = (control(asked)?, asked.actor());
    control.store().revoke_credential(hash, act(&actor, control)).await.map_err(|error| refused(&error))?;
    let problem = take_over(control).await;
    Ok(json(StatusCode::OK, &json!({ "hash": hash, "not_in_force": problem })))
}
