//! Notices of automatic rollbacks, on standard error.

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

/// Prints the last automatic rollback if it is from the last day, or if its revision is in force.
pub(crate) fn print_rollback(rollback: &Value, revision: &Value) {
    if is_current(rollback, revision, expiry::now_ms()) {
        print(&rollback_text(rollback));
    }
}

/// Prints the last automatic rollback of a server. A token without access to the status gets none.
pub(crate) fn print_rollback_of(client: &Client) {
    let Ok(answer) = client.get("/v1/status", &[]) else { return };
    let rules = &answer.body["rules"];
    print_rollback(&rules["last_automatic_rollback"], &rules["revision"]);
}

fn is_current(rollback: &Value, revision: &Value, now_ms: u64) -> bool {
    let Some(at_ms) = rollback["at_ms"].as_u64() else { return false };
    now_ms.saturating_sub(at_ms) <= NOTICE_MS_MAX || rollback["revision"] == *revision
}

/// An automatic rollback in a sentence.
pub(crate) fn rollback_text(rollback: &Value) -> String {
    let at = rollback["at"].as_str().unwrap_or("an unknown time");
    let by = rollback["rollback_change"].as_u64().map_or_else(String::new, |id| format!(" by change {id}"));
    let reason = rollback["reason"].as_str().map_or_else(String::new, |reason| format!(": {reason}"));
    format!("change {} was rolled back automatically at {at}{by}{reason}", rollback["change"])
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
            "reason": "denials of rule \"a\" went from 0 to 296 a minute",
        });
        assert_eq!(
            rollback_text(&rollback),
            "change 6 was rolled back automatically at 2026-11-18T10:00:00.000Z by change 7: denials of \
             rule \"a\" went from 0 to 296 a minute"
        );
        rollback = json!({ "change": 6 });
        assert_eq!(rollback_text(&rollback), "change 6 was rolled back automatically at an unknown time");
    }
}
