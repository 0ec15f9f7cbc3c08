//! `POST /v2/ratelimit.multiLimit`: several limits, all charged or none.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use tidegate::LIMITS_PER_CHECK_MAX;
use utoipa::ToSchema;

use super::direct::{DirectLimit, LimitFields, LimitRequest, LimitSearch, decide, wall_us};
use super::fields::{FieldError, Problems};
use super::limit::LimitData;
use super::{Envelope, ErrorEnvelope, Refusal, body, enveloped};
use crate::auth::Principal;
use crate::http::object::Object;
use crate::http::{HttpRequest, HttpResponse};
use crate::pipeline::RequestDecision;

/// Largest number of limits in one request: Unkey's maximum, if one decision allows as many.
const LIMITS_MAX: usize = if LIMITS_PER_CHECK_MAX < 100 { LIMITS_PER_CHECK_MAX } else { 100 };

/// The decision on a request.
#[derive(Debug, Serialize, ToSchema)]
pub(in crate::http) struct MultiData<'r> {
    /// Whether every limit lets the request pass. If not, none is charged.
    passed: bool,
    /// The status of each limit, in the order of the request.
    limits: Vec<CheckData<'r>>,
}

/// The status of one limit.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct CheckData<'r> {
    namespace: &'r str,
    identifier: &'r str,
    /// Whether this limit lets the request pass.
    passed: bool,
    /// How much may pass in each window.
    limit: u32,
    /// How much more could pass now.
    remaining: u32,
    /// Milliseconds since the Unix epoch. For a denial: the first instant at which this limit would
    /// let the same request pass. Otherwise: the time at which the whole limit is available again.
    reset: u64,
    /// The override that applied, if one did.
    #[serde(skip_serializing_if = "Option::is_none")]
    override_id: Option<&'r str>,
}

impl<'r> CheckData<'r> {
    fn new(of: &'r DirectLimit<'_, '_>, status: &LimitData<'r>) -> Self {
        let LimitData { success: passed, limit, remaining, reset, override_id } = *status;
        Self {
            namespace: &of.namespace,
            identifier: &of.identifier,
            passed,
            limit,
            remaining,
            reset,
            override_id,
        }
    }
}

/// Checks several limits as one.
#[utoipa::path(
    post,
    path = "/v2/ratelimit.multiLimit",
    operation_id = "ratelimit.multiLimit",
    request_body = Vec<LimitRequest<'static>>,
    responses(
        (status = 200, description = "Decided; `passed` says how", body = Envelope<MultiData<'static>>),
        (status = "4XX", description = "Not decided", body = ErrorEnvelope<'static>),
    )
)]
pub(in crate::http) async fn answer(
    req: &HttpRequest<'_>,
    principal: Principal,
) -> Result<HttpResponse, Refusal> {
    let rules = req.shared.rules.load();
    let fields = read(req)?;
    let first = fields.first().ok_or_else(|| outside(0))?;
    let mut search = LimitSearch::new(req, principal.tenant, rules.set(), first);
    let mut limits = Vec::with_capacity(fields.len());
    for fields in fields {
        limits.push(search.limit(fields).await?);
    }
    let first = limits.first().ok_or_else(|| outside(0))?;
    let decision = decide(search.admission, first, &limits).await?;
    let wall_us = wall_us(req, decision.as_ref());
    let outcome = |at: usize| decision.as_ref().and_then(|decision| decision.outcome_of(at));
    let statuses = limits.iter().enumerate();
    let statuses = statuses.map(|(at, limit)| CheckData::new(limit, &limit.status(outcome(at), wall_us)));
    let passed = decision.as_ref().is_none_or(RequestDecision::is_allowed);
    let mut answer = enveloped(MultiData { passed, limits: statuses.collect() });
    if let Some(decision) = &decision {
        req.set_decision_headers(&mut answer, decision);
    }
    Ok(answer)
}

fn read<'b>(req: &'b HttpRequest<'_>) -> Result<Vec<LimitFields<'b>>, Refusal> {
    let LimitList { requests, count } = body(req)?;
    if count > LIMITS_MAX {
        return Err(outside(count));
    }
    let mut problems = Problems::default();
    let mut fields = Vec::with_capacity(requests.len());
    for (at, request) in requests.into_iter().enumerate() {
        problems.element = Some(at);
        fields.push(request.read(&mut problems));
    }
    Ok(problems.or(fields)?)
}

/// The limits of a request, as many as it may have, and their number.
struct LimitList<'b> {
    requests: Vec<LimitRequest<'b>>,
    count: usize,
}

impl<'de: 'b, 'b> Deserialize<'de> for LimitList<'b> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct LimitListVisitor<'b>(PhantomData<&'b str>);

        impl<'de: 'b, 'b> Visitor<'de> for LimitListVisitor<'b> {
            type Value = LimitList<'b>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a sequence")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<LimitList<'b>, A::Error> {
                let mut requests = Vec::new();
                while requests.len() < LIMITS_MAX {
                    let Some(Object(request)) = list.next_element()? else {
                        return Ok(LimitList { count: requests.len(), requests });
                    };
                    requests.push(request);
                }
                // The others are counted for the problem, and not stored.
                let mut count = requests.len();
                while list.next_element::<IgnoredAny>()?.is_some() {
                    count += 1;
                }
                Ok(LimitList { requests, count })
            }
        }

        deserializer.deserialize_seq(LimitListVisitor(PhantomData))
    }
}

/// The problem of a request with too few or too many limits.
fn outside(count: usize) -> Refusal {
    vec![FieldError::new("body", format!("body: {count} limits is outside 1 to {LIMITS_MAX}"))].into()
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Arc;
    use std::task::{Context, Poll, Waker};
    use std::time::Duration;

    use ::http::Request;
    use http_body_util::BodyExt as _;
    use serde_json::Value;
    use tidegate_rules::NamespaceOverrides;
    use tidegate_rules::rows::{RowKind, RuleRow};

    use super::*;
    use crate::fuzzing::small_config;
    use crate::load;
    use crate::pipeline::tests::{overloaded, recording};
    use crate::search_turns::SEARCHES_PER_ROUND;
    use crate::shared::Shared;

    /// Puts an override with a `*` in force.
    fn set_wildcard(shared: &Shared) {
        let body = r#"{"tenant":"","namespace":"n","identifier":"a*","limit":3,"period":"60000ms"}"#;
        let row =
            RuleRow { kind: RowKind::Override, name: "o".to_owned(), body: body.to_owned(), version: 1 };
        shared.rules.store_embedded(NamespaceOverrides::compile(&[row], 0).expect("valid"));
    }

    /// Sends a request with so many limits. Returns the turns that it took, and the body of the
    /// reply. Calls `meanwhile` after each turn but the last.
    fn turns(shared: &Shared, limits: usize, meanwhile: impl Fn()) -> (usize, Value) {
        let limit = |at| format!(r#"{{"namespace":"n","identifier":"a{at}","limit":9,"duration":60000}}"#);
        let body = format!("[{}]", (0..limits).map(limit).collect::<Vec<_>>().join(","));
        let (parts, ()) = Request::post("/v2/ratelimit.multiLimit").body(()).expect("a request").into_parts();
        let req = HttpRequest::new(shared, ([127, 0, 0, 1], 1).into(), parts, body.into());
        let mut answer = pin!(crate::http::route(&req));
        let mut task = Context::from_waker(Waker::noop());
        let mut turns = 1;
        let answer = loop {
            match answer.as_mut().poll(&mut task) {
                Poll::Ready(answer) => break answer,
                Poll::Pending => {
                    turns += 1;
                    meanwhile();
                }
            }
        };
        let mut body = pin!(answer.into_body().collect());
        let Poll::Ready(Ok(body)) = body.as_mut().poll(&mut task) else { panic!("it is whole") };
        (turns, serde_json::from_slice(&body.to_bytes()).expect("JSON"))
    }

    #[test]
    fn many_searches_leave_turns_to_other_connections() {
        let shared = Shared::new(&mut small_config(None)).expect("fits");
        assert_eq!(turns(&shared, 100, || {}).0, 1, "nothing to search");
        set_wildcard(&shared);
        let (taken, body) = turns(&shared, 100, || {});
        let rounds = 100 / SEARCHES_PER_ROUND as usize;
        assert_eq!((taken, &body["data"]["limits"][99]["limit"]), (rounds, &Value::from(3)), "{body}");
    }

    #[test]
    fn a_shed_request_is_not_searched() {
        let folder = tempfile::tempdir().expect("a folder");
        let counts = overloaded(Arc::new(recording(folder.path())), |shared| {
            set_wildcard(&shared);
            let (taken, body) = turns(&shared, 100, || {});
            assert_eq!((taken, &body["data"]["limits"][99]["limit"]), (1, &Value::from(9)), "{body}");
            assert_eq!(body["data"]["passed"], Value::Bool(true));
        });
        assert_eq!(counts, (1, 1));
    }

    #[test]
    fn a_request_that_waits_for_its_turn_may_be_shed() {
        let shared = Shared::new(&mut small_config(None)).expect("fits");
        set_wildcard(&shared);
        let overload = || (0..load::LATE_LOOKS).for_each(|_| load::note(Duration::from_secs(1)));
        let (taken, body) = turns(&shared, 100, overload);
        let limit = |at: usize| body["data"]["limits"][at]["limit"].clone();
        assert_eq!((taken, limit(3), limit(4)), (2, Value::from(3), Value::from(9)), "{body}");
        assert_eq!(shared.decision_totals().shed, 1);
    }

    #[test]
    fn limits_beyond_the_most_are_counted_and_not_stored() {
        let shared = Shared::new(&mut small_config(None)).expect("fits");
        let (_, body) = turns(&shared, 1_000, || {});
        assert_eq!(body["error"]["detail"], "body: 1000 limits is outside 1 to 100");
    }
}
