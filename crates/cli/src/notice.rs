//! Notices of automatic rollbacks, and of alarms about changes and emergencies, on standard error.

use serde_json::Value;

use crate::client::Client;
use crate::out::shown;
use crate::{expiry, style};

/// Age up to which a rollback is a notice, although the rules were changed since: one day.
const NOTICE_MS_MAX: u64 = 86_400_000;

/// Prints a notice.
pub(crate) fn print(message: &str) {
    aside!("{} {}", style::paint_aside(style::WARNING, "notice:"), shown(message));
}

/// Prints the last automatic rollback and the last alarm of an answer, if they are from the last
/// day, and a rollback also while its revision is in force.
pub(crate) fn print_last(answer: &Value) {
    let now_ms = expiry::now_ms();
    let (rollback, alarm) = (&answer["last_automatic_rollback"], &answer["last_alarm"]);
    if is_current(rollback, &answer["revision"], now_ms) {
        print(&rollback_text(rollback));
    }
    if is_recent(alarm, now_ms) {
        print(&alarm_text(alarm));
    }
}

/// Prints the same of a server. A token without access to the status gets none.
pub(crate) fn print_last_of(client: &Client) {
    let Ok(answer) = client.get("/v1/status", &[]) else { return };
    print_last(&answer.body["rules"]);
}

fn is_current(rollback: &Value, revision: &Value, now_ms: u64) -> bool {
    !rollback.is_null() && (is_recent(rollback, now_ms) || rollback["revision"] == *revision)
}

fn is_recent(event: &Value, now_ms: u64) -> bool {
    event["at_ms"].as_u64().is_some_and(|at_ms| now_ms.saturating_sub(at_ms) <= NOTICE_MS_MAX)
}

/// An alarm in a sentence.
pub(crate) fn alarm_text(alarm: &Value) -> String {
    let text = |field: &str| alarm[field].as_str().unwrap_or("unknown");
    format!("alarm at {}: {}", text("at"), text("reason"))
}

/// An automatic rollback in a sentence.
pub(crate) fn rollback_text(rollback: &Value) -> String {
    let at = rollback["at"].as_str().unwrap_or("an unknown time");
    let by = rollback["rollback_change"].as_u64().map_or_else(String::new, |id| format!(" by change {id}"));
    let reason = rollback["reason"].as_str().map_or_else(String::new, |reason| format!(": {reason}"));
    let tenant =
        rollback["tenant"].as_str().map_or_else(String::new, |of| format!(" for tenant {of:?} only"));
    format!("change {} was rolled back automatically{tenant} at {at}{by}{reason}", rollback["change"])
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_rollback_is_told_for_a_day_and_while_its_revision_is_in_force() {
        let rollback = json!({ "change": 6, "revision": 8, "at_ms": 1_000 });
        assert!(is_current(&rollback, &json!(9), 1_000 + NOTICE_MS_MAX));
        assert!(!is_current(&rollback, &json!(9), 1_001 + NOTICE_MS_MAX));
        assert!(is_current(&rollback, &json!(8), u64::MAX));
        assert!(!is_current(&Value::Null, &Value::Null, 0), "there was none");
    }

    #[test]
    fn a_rollback_is_told_with_its_reason() {
        let mut rollback = json!({
            "change": 6, "rollback_change": 7, "revision": 8, "at": "2026-11-18T10:00:00.000Z", "at_ms": 1,
            "reason": "rule \"a\" newly denies 29 of 30 keys",
        });
        assert_eq!(
            rollback_text(&rollback),
            "change 6 was rolled back automatically at 2026-11-18T10:00:00.000Z by change 7: rule \"a\" \
             newly denies 29 of 30 keys"
        );
        rollback["tenant"] = json!("acme");
        let partly = "change 6 was rolled back automatically for tenant \"acme\" only at 2026";
        assert!(rollback_text(&rollback).starts_with(partly));
        rollback = json!({ "change": 6 });
        assert_eq!(rollback_text(&rollback), "change 6 was rolled back automatically at an unknown time");
    }
}
