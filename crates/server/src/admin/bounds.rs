//! How far the rules in force may be passed.

use ::http::StatusCode;
use serde_json::json;
use tidegate_core::bound::Fleet;
use tidegate_rules::Rule;

use super::AdminResult;
use super::params::QueryParams;
use crate::bounds::{PARAMETERS, Situation, situation_json};
use crate::http::{HttpRequest, Problem, json};

/// Default number of bounds per page.
const BOUNDS: u64 = 100;
/// Largest number of bounds per page. Higher: fewer requests, longer responses.
const BOUNDS_MAX: u64 = 1_000;

/// `GET /v1/bounds?regions=3&lag_ms=500&from=0&limit=100`: of the rules in force, in the order in
/// which they apply.
pub(super) fn list(req: &HttpRequest<'_>) -> AdminResult {
    let names = PARAMETERS.iter().map(|parameter| parameter.name);
    let known: Vec<&str> = names.chain(["weights", "from", "limit"]).collect();
    let given = QueryParams::read(req, &known)?;
    let situation = situation(&given, Situation::new(Fleet::clone(&req.shared.fleet.measured())))?;
    let limit = given.number("limit", BOUNDS, 1, BOUNDS_MAX)?;
    let from = given.number("from", 0, 0, u64::MAX)?;
    let rules = req.shared.rules.load();
    let place = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
    let rest: &[Rule] = rules.set().rules().get(place(from)..).unwrap_or_default();
    let page: Vec<_> = rest.iter().take(place(limit)).map(|rule| situation.report(rule)).collect();
    let next = (rest.len() > page.len()).then(|| from + limit);
    Ok(json(
        StatusCode::OK,
        &json!({
            "rules_version": rules.set().version(),
            "of": situation_json(&situation),
            "bounds": page,
            "next": next,
        }),
    ))
}

fn situation(given: &QueryParams<'_>, mut situation: Situation) -> Result<Situation, Problem> {
    for parameter in PARAMETERS {
        let value =
            given.number(parameter.name, (parameter.get)(&situation), parameter.least, parameter.most)?;
        if given.text(parameter.name).is_some() {
            (parameter.set)(&mut situation, value);
        }
    }
    if let Some(weights) = given.text("weights") {
        situation.set_weights(weights).map_err(Problem::bad_request)?;
    }
    Ok(situation)
}
