//! `POST /v1/check`: takes the dimensions of a request, and returns the decision of all rules that
//! apply.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use ::http::StatusCode;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use tidegate::headers::{PROBLEM_CONTENT_TYPE, problem_body};
use tidegate::{Decision, Outcome, Retry};
use tidegate_core::DecisionSource;
use tidegate_record::timestamp;
use tidegate_rules::{ADDRESS, DIMENSIONS_MAX, Dimensions, DimensionsError, Rule, RuleMatch, SecretHeaders};
use utoipa::ToSchema;

use super::answer::ProblemBody;
use super::object::Object;
use super::{HttpRequest, HttpResponse, Problem, json, read_json, text};
use crate::auth::Role;
use crate::metrics::Surface;
use crate::pipeline::RequestDecision;
use crate::pipeline::rules::{MatchedRequest, MatchedRule, RulesError};
use crate::reason::DecisionReason;

/// Names and values, as they come.
type Pairs<'b> = Vec<(Cow<'b, str>, Cow<'b, str>)>;

/// A check.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct CheckRequest<'b> {
    /// The dimensions of the request.
    #[serde(borrow, deserialize_with = "pairs")]
    #[schema(value_type = std::collections::HashMap<String, String>)]
    dimensions: Pairs<'b>,
    /// The cost of the request in units. A cost of 0 reads without a charge.
    #[serde(default = "one")]
    cost: u64,
    /// The status of a denial: 200, with the decision in the body, or 429.
    #[serde(default = "ok")]
    deny_status: u16,
}

const fn one() -> u64 {
    1
}

const fn ok() -> u16 {
    200
}

/// The decision on a check.
#[derive(Debug, Serialize, ToSchema)]
struct CheckAnswer<'r> {
    decision: &'static str,
    /// The rule that denied: of several, the one that denies longest.
    denied_by: Option<&'r str>,
    /// Which set of rules decided.
    rules_version: &'r str,
    /// The source of the decision.
    source: &'static str,
    /// `limit`, `block`, `origin_unreachable`, `owner_unreachable`, `no_room` or `shed`; null if
    /// the limits let the request pass, or none applies.
    reason: Option<&'static str>,
    /// The emergency that blocked the request; null unless the reason is `block`.
    block: Option<BlockAnswer<'r>>,
    rules: Vec<RuleAnswer<'r>>,
    /// Why no rule applies; absent if one does.
    #[serde(skip_serializing_if = "Option::is_none")]
    no_rule: Option<NoRuleAnswer<'r>>,
}

/// Why no rule applies to a request.
#[derive(Debug, Serialize, ToSchema)]
struct NoRuleAnswer<'r> {
    /// Whether the tenant has rules at all.
    has_rules: bool,
    /// Up to five rules that need dimensions which the request lacks.
    lacking: Vec<LackingAnswer<'r>>,
}

/// A rule, and the dimensions that it needs and a request lacks.
#[derive(Debug, Serialize, ToSchema)]
struct LackingAnswer<'r> {
    rule: &'r str,
    dimensions: Vec<&'r str>,
}

/// An emergency that blocks a request.
#[derive(Debug, Serialize, ToSchema)]
struct BlockAnswer<'r> {
    id: &'r str,
    /// When it ends, unless it is renewed.
    until: String,
    until_ms: u64,
}

/// The verdict of one rule.
#[derive(Debug, Serialize, ToSchema)]
struct RuleAnswer<'r> {
    rule: &'r str,
    version: u64,
    class: &'static str,
    /// How far it reaches where there are several regions.
    regime: &'static str,
    mode: &'static str,
    /// The override that the limit is from; not there if it is the rule's.
    #[serde(rename = "override", skip_serializing_if = "Option::is_none")]
    override_name: Option<&'r str>,
    /// The emergency that takes precedence over the rule; absent if none does.
    #[serde(skip_serializing_if = "Option::is_none")]
    emergency: Option<&'r str>,
    /// When that emergency ends, in milliseconds since the Unix epoch.
    #[serde(skip_serializing_if = "Option::is_none")]
    emergency_until_ms: Option<u64>,
    allowed: bool,
    limit: u32,
    remaining: u32,
    /// Milliseconds until the meter is as good as new.
    reset_after_ms: u64,
    /// Milliseconds until the same request would pass; null if it passes, or never will.
    retry_after_ms: Option<u64>,
    /// Whether waiting cannot help: the cost is above the burst, or the limit is 0.
    never: bool,
    /// The largest over-admission in units, if every fault occurs once.
    bound: u64,
}

/// Decides a check.
#[utoipa::path(
    post,
    path = "/v1/check",
    operation_id = "check",
    request_body = CheckRequest<'static>,
    responses(
        (status = 200, description = "Decided; `decision` says how", body = CheckAnswer<'static>),
        (
            status = 429,
            description = "Denied, where `deny_status` is 429: a problem with the answer's members",
            body = CheckAnswer<'static>,
            content_type = "application/problem+json",
        ),
        (status = "4XX", description = "Not decided", body = ProblemBody<'static>,
            content_type = "application/problem+json"),
    )
)]
pub(super) async fn answer(req: &HttpRequest<'_>) -> HttpResponse {
    decide(req).await.unwrap_or_else(HttpResponse::from)
}

async fn decide(req: &HttpRequest<'_>) -> Result<HttpResponse, Problem> {
    let principal = req.principal(Role::Client)?;
    let request = read(&req.body)?;
    if !matches!(request.deny_status, 200 | 429) {
        return Err(Problem::bad_request(format!(
            "deny_status: {} is neither 200 nor 429",
            request.deny_status
        )));
    }
    let dimensions = known_by(request.dimensions, &req.shared.protocol.secret_headers)
        .map_err(|error| Problem::bad_request(error.to_string()))?;
    let rules = req.shared.rules.load();
    let matched = rules.match_request(req.shared, principal.tenant, &dimensions);
    match matched.decide(req.shared, Surface::Check, request.cost).await {
        Ok(decision) => {
            let tenant = &req.shared.tenant(principal.tenant).name;
            Ok(respond(req, (&matched, tenant), &decision, request.deny_status))
        }
        Err(RulesError::Shed(shed)) if shed.is_allowed() => Ok(shed_answer(rules.set().version())),
        Err(error) => Err(error.into()),
    }
}

/// Returns the dimensions of the request. All spellings of an IP address count as one.
fn known_by<'p>(pairs: Pairs<'p>, secrets: &'p SecretHeaders) -> Result<Dimensions<'p>, DimensionsError> {
    let mut dimensions = Dimensions::keeping_secret(secrets);
    for (name, value) in pairs {
        match (name == ADDRESS).then(|| value.parse()) {
            Some(Ok(address)) => dimensions.add_address(address)?,
            _ => dimensions.add(name, value)?,
        }
    }
    Ok(dimensions)
}

/// The request in a body.
fn read(body: &[u8]) -> Result<CheckRequest<'_>, Problem> {
    match read_json(body) {
        Ok(Object(request)) => Ok(request),
        Err(error) => Err(Problem::bad_request(in_words(body, &error))),
    }
}

/// Describes the problem of a body. Parses it a second time to find the place: speed does not
/// matter for an invalid request.
fn in_words(body: &[u8], error: &serde_json::Error) -> String {
    let mut again = serde_json::Deserializer::from_slice(body);
    let located = serde_path_to_error::deserialize::<_, Object<CheckRequest<'_>>>(&mut again).err();
    let path = located.map(|error| error.path().to_string()).filter(|path| path != "." && path != "?");
    // The members of an object with its own deserializer have no name in the path.
    let path = path.map_or_else(|| "body".to_owned(), |path| path.trim_end_matches(".?").to_owned());
    let allowed = match path.as_str() {
        "cost" => "; allowed is a whole number from 0 to 18446744073709551615",
        "deny_status" => "; allowed are 200 and 429",
        "dimensions" => "; allowed is an object of names and texts",
        _ => "",
    };
    format!("{path}: {error}{allowed}")
}

/// Returns every pair of an object, including repeated names, which are reported as a problem.
fn pairs<'de: 'b, 'b, D>(deserializer: D) -> Result<Pairs<'b>, D::Error>
where
    D: Deserializer<'de>,
{
    struct Visit<'b>(PhantomData<&'b str>);

    impl<'de: 'b, 'b> Visitor<'de> for Visit<'b> {
        type Value = Pairs<'b>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a map")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut pairs = Vec::new();
            while let Some((Text(name), Text(value))) = map.next_entry()? {
                // One too many is enough to know that there are too many.
                if pairs.len() <= DIMENSIONS_MAX {
                    pairs.push((name, value));
                }
            }
            Ok(pairs)
        }
    }

    /// Borrowed where the text has no escapes.
    #[derive(Deserialize)]
    struct Text<'b>(#[serde(borrow)] Cow<'b, str>);

    deserializer.deserialize_map(Visit(PhantomData))
}

fn respond(
    req: &HttpRequest<'_>,
    (matched, tenant): (&MatchedRequest<'_, '_>, &str),
    decision: &RequestDecision<'_>,
    deny_status: u16,
) -> HttpResponse {
    let body = body(matched, decision, tenant);
    let mut answer = if decision.is_allowed() || deny_status == 200 {
        json(StatusCode::OK, &body)
    } else {
        let problem = problem_with(&body, &decision.headline.decision);
        text(StatusCode::TOO_MANY_REQUESTS, PROBLEM_CONTENT_TYPE, problem)
    };
    req.set_decision_headers(&mut answer, decision);
    answer
}

/// Returns a problem that also has the members of the answer, as RFC 9457 allows. So a client that
/// asked for a 429 gets the complete answer.
fn problem_with(answer: &CheckAnswer<'_>, denial: &Decision<'_>) -> String {
    let problem = problem_body(denial);
    let answer = serde_json::to_string(answer).unwrap_or_default();
    // Two objects without a member in common: the members of one follow those of the other.
    match (problem.strip_suffix('}'), answer.strip_prefix('{')) {
        (Some(problem), Some(answer)) => format!("{problem},{answer}"),
        _ => problem,
    }
}

fn body<'r>(
    matched: &'r MatchedRequest<'_, '_>,
    decision: &RequestDecision<'r>,
    tenant: &str,
) -> CheckAnswer<'r> {
    let denied_by = decision.headline.decision.denied_by();
    let outcomes = matched.outcomes(decision);
    let rules: Vec<RuleAnswer<'_>> = outcomes.map(|(rule, outcome)| rule_answer(rule, outcome)).collect();
    let lacking = |(rule, dimensions): (&'r Rule, _)| LackingAnswer { rule: &rule.name, dimensions };
    let no_rule = rules.is_empty().then(|| NoRuleAnswer {
        has_rules: matched.has_rules(tenant),
        lacking: matched.lacking(tenant).into_iter().map(lacking).collect(),
    });
    CheckAnswer {
        decision: if decision.is_allowed() { "allow" } else { "deny" },
        denied_by: denied_by.map(|outcome| outcome.gate().name()),
        rules_version: matched.version(),
        source: decision.headline.source.as_str(),
        reason: decision.reason.unless_passed(decision.is_allowed()),
        block: matched.block(decision).map(|block| BlockAnswer {
            id: block.id,
            until: timestamp(block.expires_ms),
            until_ms: block.expires_ms,
        }),
        rules,
        no_rule,
    }
}

fn rule_answer<'r>(rule: &'r MatchedRule<'_, '_>, outcome: Outcome<'_>) -> RuleAnswer<'r> {
    let MatchedRule { matched: RuleMatch { rule, terms, .. }, bound, .. } = rule;
    let verdict = outcome.verdict();
    let retry = verdict.retry();
    RuleAnswer {
        rule: &rule.name,
        version: rule.version,
        class: rule.class.as_str(),
        regime: rule.regime().as_str(),
        mode: terms.mode.as_str(),
        override_name: terms.override_name,
        emergency: terms.emergency.map(|emergency| emergency.id),
        emergency_until_ms: terms.emergency.map(|emergency| emergency.expires_ms),
        allowed: outcome.is_allowed(),
        limit: terms.limit.amount(),
        remaining: outcome.remaining(),
        reset_after_ms: verdict.reset_after_us().div_ceil(1_000),
        retry_after_ms: retry.and_then(Retry::after_us).map(|us| us.div_ceil(1_000)),
        never: retry.is_some_and(|retry| retry.after_us().is_none()),
        bound: *bound,
    }
}

/// Comfort checks pass when there is no time for them.
fn shed_answer(version: &str) -> HttpResponse {
    let body = CheckAnswer {
        decision: "allow",
        denied_by: None,
        rules_version: version,
        source: DecisionSource::Shed.as_str(),
        reason: DecisionReason::Shed.unless_passed(true),
        block: None,
        rules: Vec::new(),
        no_rule: None,
    };
    json(StatusCode::OK, &body)
}
