//! The watch over a change: the rules whose denials are compared, for how long, and why others are
//! not watched.

use std::fmt;

use serde_json::{Value, json};

use crate::denials::{DENIALS_MIN, DENIED_PERCENT_MIN, JUMP, WATCHED_MS};

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
}

/// The reason why a rule that may deny more is not watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UnwatchedReason {
    /// The rule did not exist before the change.
    New,
    /// The rule has no counts from at least a minute before the change.
    NoBaseline,
}

impl fmt::Display for UnwatchedReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::New => "is new: it has no earlier denials to compare with",
            Self::NoBaseline => {
                "has no request that is at least one minute old on this server: \
                 there are no earlier denials to compare with"
            }
        })
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

    /// Returns the watch as answers have it; `None` if no rule is watched.
    pub fn to_json(&self) -> Option<Value> {
        (self.rule_count > 0).then(|| {
            json!({
                "seconds": WATCHED_MS / 1_000,
                "rules": self.rules,
                "rule_count": self.rule_count,
                "denials_times": JUMP,
                "denials_min_per_minute": DENIALS_MIN,
                "denied_percent_min": DENIED_PERCENT_MIN,
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
}
