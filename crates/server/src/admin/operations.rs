//! Operations in requests: rows to put or to delete.

use serde::Deserialize;
use serde_json::{Map, Value};
use tidegate_record::timestamp;
use tidegate_rules::change::Operation;
use tidegate_rules::rows::{RowKind, RuleRows};
use tidegate_rules::{PROBLEMS_MAX, read_expiry};

use super::rules::{kind, object};
use crate::http::Problem;

/// An operation in a request. Its body is a JSON object.
#[derive(Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum OperationBody {
    Put { kind: String, name: String, body: Map<String, Value> },
    Delete { kind: String, name: String },
}

impl OperationBody {
    /// Reads operations on `rule_rows`, and puts their expiry times in the form of stored rows.
    pub(super) fn read(all: Vec<Self>, rule_rows: &RuleRows, now_ms: u64) -> Result<Vec<Operation>, Problem> {
        let mut problems = Vec::new();
        let one = |(at, asking)| {
            let kind = |word: &str| {
                kind(word)
                    .map_err(|problem| Problem::bad_request(format!("operations[{at}].{}", problem.detail)))
            };
            Ok(match asking {
                Self::Put { kind: word, name, body } => {
                    let kind = kind(&word)?;
                    let mut body = Value::Object(body);
                    let stored = || Some(object(&rule_rows.row(kind, &name)?.body));
                    if kind == RowKind::Override
                        && let Err(problem) = settle_expiry(&mut body, stored, now_ms)
                        && problems.len() < PROBLEMS_MAX
                    {
                        problems.push(format!("overrides[{name:?}].expires: {problem}"));
                    }
                    Operation::Put { kind, name, body: body.to_string() }
                }
                Self::Delete { kind: word, name } => Operation::Delete { kind: kind(&word)?, name },
            })
        };
        let operations = all.into_iter().enumerate().map(one).collect::<Result<_, Problem>>()?;
        if problems.is_empty() { Ok(operations) } else { Err(Problem::bad_request(problems.join("\n"))) }
    }
}

/// Replaces an expiry by its milliseconds. A new one must be in the future: an override that has
/// ended is a mistake. A stored one may have ended since.
fn settle_expiry(
    body: &mut Value,
    stored: impl FnOnce() -> Option<Value>,
    now_ms: u64,
) -> Result<(), String> {
    let Some(expires) = body.get("expires") else { return Ok(()) };
    let read = toml::Value::try_from(expires).map_err(|error| error.to_string());
    let read = read.and_then(|value| read_expiry(&value));
    if let Ok(at_ms) = read {
        body["expires"] = at_ms.into();
        if u64::try_from(at_ms).is_ok_and(|at_ms| at_ms > now_ms) {
            return Ok(());
        }
    }
    if stored().as_ref() == Some(&*body) {
        return Ok(());
    }
    let at_ms = u64::try_from(read?).unwrap_or_default();
    Err(format!("{} is not in the future: it is {} now", timestamp(at_ms), timestamp(now_ms)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const NOW_MS: u64 = 1_800_000_000_000;

    fn settled(expires: Value, stored: Option<Value>) -> Result<Value, String> {
        let body = |expires| json!({ "limit": 1, "expires": expires });
        let mut settled = body(expires);
        settle_expiry(&mut settled, || stored.map(body), NOW_MS).map(|()| settled["expires"].clone())
    }

    #[test]
    fn a_new_expiry_is_in_the_future_and_a_stored_one_may_have_ended() {
        assert_eq!(settled(json!("2030-01-01T00:00:00Z"), None), Ok(json!(1_893_456_000_000_u64)));
        let (ended, ended_ms) = (json!("2023-11-14T22:13:20Z"), json!(1_700_000_000_000_u64));
        for expires in [&ended, &ended_ms] {
            let problem = settled(expires.clone(), None).expect_err("in the past");
            assert!(problem.starts_with("2023-11-14T22:13:20.000Z is not in the future: "), "{problem}");
            assert_eq!(settled(expires.clone(), Some(ended_ms.clone())), Ok(ended_ms.clone()));
        }
        // A row from before the check of the unit stays as it is.
        assert_eq!(settled(json!(5), Some(json!(5))), Ok(json!(5)));
        let problem = settled(json!(5), Some(json!(6))).expect_err("seconds");
        assert!(problem.contains("milliseconds since the Unix epoch"), "{problem}");
    }
}
