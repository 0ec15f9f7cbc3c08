//! The watch over a change: the rules whose denied keys are compared, for how long, whether a jump
//! undoes the change, and why other rules are not watched.

use std::fmt;

use serde_json::{Value, json};

use crate::denials::{AlarmCause, JUMP, KEYS_MIN, KEYS_PERCENT_MIN, WATCHED_MS};

/// Maximum number of watched rules listed by name.
const NAMES_MAX: usize = 20;

/// The rules of a change that are watched, and the reason for those that are not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WatchForecast {
    /// The first of the watched rules.
    rules: Vec<String>,
    pub(super) rule_count: usize,
    /// The first rule that is not watched.
    unwatched: Option<(String, UnwatchedReason)>,
    unwatched_count: usize,
    /// The reason why a jump raises an alarm and does not undo the change.
    alarm: Option<AlarmCause>,
    /// The tenant that the change concerns; `None` for several.
    tenant: Option<String>,
}

/// The reason why a rule that may deny more is not watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UnwatchedReason {
    /// The rule did not exist before the change.
    New,
    /// The rule has no request from at least a minute before the change.
    NoBaseline,
    /// The keys of the rule have no memory.
    NoMemory,
    /// The rule gets another key: keys before and after the change cannot be compared.
    OtherKey,
    /// The rule had so few keys that a jump is impossible.
    FewKeys(usize),
}

impl fmt::Display for UnwatchedReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::New => f.write_str("is new: it has no earlier denials to compare with"),
            Self::NoBaseline => f.write_str(
                "has no request that is at least one minute old on this server: \
                 there are no earlier denials to compare with",
            ),
            Self::NoMemory => f.write_str(
                "has no keys to compare with: rules of its tenant already use all memory for keys",
            ),
            Self::OtherKey => f.write_str("gets another key: there are no earlier keys to compare with"),
            Self::FewKeys(keys) => write!(
                f,
                "had requests of {keys} keys in the last five minutes on this server: a jump needs {KEYS_MIN}"
            ),
        }
    }
}

impl WatchForecast {
    pub(super) fn add(&mut self, rule: &str) {
        self.rule_count += 1;
        if self.rules.len() < NAMES_MAX {
            self.rules.push(rule.to_owned());
        }
    }

    pub(super) fn leave_out(&mut self, rule: &str, reason: UnwatchedReason) {
        self.unwatched_count += 1;
        self.unwatched.get_or_insert_with(|| (rule.to_owned(), reason));
    }

    /// A jump raises an alarm, for this reason.
    pub(super) fn alarm_only(mut self, cause: AlarmCause) -> Self {
        self.alarm = Some(cause);
        self
    }

    /// Only traffic of this tenant is watched.
    pub(super) fn of_tenant(mut self, tenant: &str) -> Self {
        self.tenant = Some(tenant.to_owned());
        self
    }

    /// Returns the watch as answers have it; `None` if no rule is watched.
    pub fn to_json(&self) -> Option<Value> {
        (self.rule_count > 0).then(|| {
            json!({
                "seconds": WATCHED_MS / 1_000,
                "rules": self.rules,
                "rule_count": self.rule_count,
                "keys_times": JUMP,
                "keys_min": KEYS_MIN,
                "keys_percent_min": KEYS_PERCENT_MIN,
                "tenant": self.tenant,
                "action": if self.alarm.is_some() { "alarm" } else { "rollback" },
                "alarm_because": self.alarm.as_ref().map(ToString::to_string),
            })
        })
    }

    /// Returns the reason why rules are not watched; `None` if all rules that may deny more are.
    pub fn not_watched(&self) -> Option<String> {
        let Some((rule, reason)) = &self.unwatched else {
            return (self.rule_count == 0).then(|| "no rule denies more than before".to_owned());
        };
        let others = match self.unwatched_count {
            1 => String::new(),
            count => format!(" (and {} more)", count - 1),
        };
        Some(format!("rule {rule:?} {reason}{others}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forecast_names_some_rules_and_counts_all() {
        let mut forecast = WatchForecast::default();
        assert_eq!(forecast.to_json(), None);
        assert_eq!(forecast.not_watched().as_deref(), Some("no rule denies more than before"));
        (0..30).for_each(|at| forecast.add(&format!("rule-{at:02}")));
        let watch = forecast.to_json().expect("watched");
        assert_eq!(watch["rules"].as_array().map(Vec::len), Some(NAMES_MAX));
        assert_eq!((&watch["rule_count"], &watch["seconds"]), (&json!(30), &json!(300)));
        assert_eq!(forecast.not_watched(), None);
        forecast.leave_out("a", UnwatchedReason::New);
        assert_eq!(
            forecast.not_watched().as_deref(),
            Some("rule \"a\" is new: it has no earlier denials to compare with")
        );
        forecast.leave_out("b", UnwatchedReason::NoBaseline);
        assert!(forecast.not_watched().is_some_and(|text| text.ends_with(" (and 1 more)")));
    }

    #[test]
    fn a_forecast_states_whether_a_jump_undoes_the_change() {
        let mut forecast = WatchForecast::default();
        forecast.add("a");
        let watch = forecast.to_json().expect("watched");
        assert_eq!((&watch["action"], &watch["alarm_because"]), (&json!("rollback"), &Value::Null));
        assert_eq!((&watch["keys_min"], &watch["keys_percent_min"]), (&json!(10), &json!(5)));
        let cause = AlarmCause::Security("a".to_owned());
        let watch = forecast.of_tenant("acme").alarm_only(cause).to_json().expect("watched");
        assert_eq!((&watch["action"], &watch["tenant"]), (&json!("alarm"), &json!("acme")));
        assert_eq!(watch["alarm_because"], json!("rule \"a\" has class security"));
    }
}
