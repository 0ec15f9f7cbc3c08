//! The audit, read and followed.

use ::http::StatusCode;
use serde_json::json;
use tidegate_rules::audit::Checkpoint;
use tidegate_rules::store::{AUDIT_PAGE_MAX, StoreError};

use super::params::QueryParams;
use super::{AdminResult, control, refused};
use crate::http::{HttpRequest, Problem, json};

/// Default number of entries per page.
const ENTRIES: u64 = 100;

/// `GET /v1/audit?after=0&limit=100`: returns entries in order, and in `next` the entry after which
/// the next page begins. `checkpoint` is the end of the audit as the store recorded it, separately
/// from the entries.
pub(super) async fn page(req: &HttpRequest<'_>) -> AdminResult {
    let given = QueryParams::read(req, &["after", "limit"])?;
    let after = given.number("after", 0, 0, u64::MAX)?;
    let limit = given.number("limit", ENTRIES, 1, AUDIT_PAGE_MAX)?;
    let found = control(req)?.store().audit_and_end(after, limit).await;
    let (entries, end) = found.map_err(|error| refused(&error))?;
    let next = entries.last().map(|entry| entry.sequence);
    Ok(json(StatusCode::OK, &json!({ "entries": entries, "next": next, "checkpoint": end.to_string() })))
}

/// `GET /v1/audit/verify?checkpoint=tidegate-audit 7 HASH`: by one at a time.
pub(super) async fn verify(req: &HttpRequest<'_>) -> AdminResult {
    let given = QueryParams::read(req, &["checkpoint"])?;
    let kept = given.text("checkpoint").map(str::parse::<Checkpoint>).transpose();
    let kept = kept.map_err(|error| Problem::bad_request(error.to_string()))?;
    match control(req)?.verify_audit(kept.as_ref()).await.ok_or_else(busy)? {
        Ok(end) => {
            let answer = json!({ "holds": true, "entries": end.count, "checkpoint": end.to_string() });
            Ok(json(StatusCode::OK, &answer))
        }
        Err(StoreError::Audit(found)) => {
            Ok(json(StatusCode::OK, &json!({ "holds": false, "problem": found.to_string() })))
        }
        Err(StoreError::Altered(found)) => {
            let (problem, altered) = (found.to_string(), found.named());
            Ok(json(StatusCode::OK, &json!({ "holds": false, "problem": problem, "altered": altered })))
        }
        Err(error) => Err(refused(&error)),
    }
}

fn busy() -> Problem {
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "audit: it is being verified: one at a time, so try again")
}
