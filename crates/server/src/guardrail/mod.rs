//! What a change of rules would have done: recent decisions, decided again as the rules would be, and what a change takes that
//! would deny much of what passes now.
//!
//! What became of a request under the rules in force is in its record. What would become of it is found with meters, record by
//! record. That needs to know what else its key asked for, and of what passes the log has a sample: one record in a thousand
//! requests, say, while it has all that was denied. So a record is decided as one request, beside as many others of its
//! key as the sample makes likely (`keys`), and stands for as many such requests as it was drawn from only when they
//! are counted. Counted as a thousand requests of one key it would drown every limit, before the change as after it.
//!
//! Where a record says more than a model could, it is believed: a request that passed still passes where a limit is not lowered;
//! one that a rule in shadow mode would have denied is denied when that is enforced; and a key that had spent more than the new
//! burst would not have. What the rules as they are let pass is found with meters too, and what these get wrong is taken to be as
//! wrong on the other side: the share is of what they let pass. A record that other rules than those in force decided,
//! or an emergency, only says that a request came: both sides of it are modelled.
//!
//! Nothing here decides for real, and nothing here reads a clock: the records bring their times.

mod approval;
mod back_test;
mod keys;
mod meter;
mod overrides;
mod plan;

use std::fmt;

use serde::{Deserialize, Serialize};
use tidegate_rules::change::ChangeNeeds;

use self::approval::{HalvedRule, ShortRule, listed_halved};
use self::plan::NOTHING_LEFT;

pub(crate) use self::approval::ApprovedEffect;
pub(crate) use self::back_test::BackTest;
pub(crate) use self::plan::{ChangePlan, ChangeScope, tightened, with};

/// The share of requests above which a change that denies them asks whether that is meant. Higher: fewer questions; more
/// people turned away by a mistake.
const CONFIRM_ABOVE: f64 = 0.05;

/// The share above which it waits for somebody else.
const APPROVE_ABOVE: f64 = 0.5;

/// How far back decisions are decided again. Longer: also what happens once a day; more to read.
pub(crate) const WINDOW_MS: u64 = 60 * 60 * 1_000;

/// How many of them at most, the latest. More: surer; a plan takes longer.
pub(crate) const RECORDS_MAX: u64 = 200_000;

/// How many of the rules that a change touches are told by name.
const NAMES_MAX: usize = 20;

/// What a change would have done, and what it takes for that. Kept with the change.
#[derive(Debug, Serialize)]
pub(crate) struct ChangeEffect {
    /// What it takes before it applies.
    #[serde(serialize_with = "word")]
    pub(crate) needs: ChangeNeeds,
    /// Why.
    pub(crate) because: String,
    /// The rules that it touches, the first of them.
    touched: Vec<String>,
    touched_count: usize,
    /// Nothing if there was nothing to measure.
    measured: Option<Measurement>,
    /// The rules that are left half of what passes at worst, or less, the first of them.
    halved: Vec<HalvedRule>,
    halved_count: usize,
    /// Whether it denies clearly more than what somebody approved.
    #[serde(skip)]
    pub(crate) is_beyond: bool,
}

/// Recent requests that rules of the change apply to, and what would have become of them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Measurement {
    /// Records of the log that were decided again.
    records: u64,
    /// Requests that they stand for.
    requests: f64,
    /// Those of them that pass under the rules as they are.
    #[serde(default)]
    passing: f64,
    /// Those that pass, and would be denied.
    newly_denied: f64,
    /// Those that are denied, and would pass.
    newly_allowed: f64,
    /// In hundredths of what passes: of the rule of which that is most, or of all.
    newly_denied_percent: f64,
    /// That rule; nothing if it is most of all together.
    #[serde(default)]
    worst: Option<String>,
    /// The same at most, if keys of which the log has one record asked for as much as may be.
    #[serde(default)]
    at_most_percent: f64,
    /// Whether that much is denied only once overrides have ended.
    #[serde(default)]
    once_ended: bool,
    /// The same of the rules that deny more, those first that deny most.
    #[serde(default)]
    rules: Vec<RuleMeasurement>,
    /// The others in short, and the largest shares of those for which there is no room.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    in_short: Vec<ShortRule>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    others: Option<(f64, f64)>,
}

/// What one rule would have done.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct RuleMeasurement {
    rule: String,
    #[serde(default)]
    records: u64,
    requests: f64,
    #[serde(default)]
    passing: f64,
    newly_denied: f64,
}

/// A rule of which it is not known what it would have done, though it may deny more.
#[derive(Debug)]
struct UncertainRule {
    rule: String,
    /// The part that is left of what passes at worst, if that is half or less.
    left: Option<f64>,
    why: UnknownReason,
}

impl UncertainRule {
    /// Why it could not be known, however many records there were.
    fn not_measured(&self) -> Option<UnknownReason> {
        Some(self.why.clone())
            .filter(|why| matches!(why, UnknownReason::NotLogged(_) | UnknownReason::CountedOtherwise))
    }
}

/// Why it is not known what a change would have done.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum UnknownReason {
    /// There is no log.
    NoLog,
    /// The log could not be read.
    LogUnreadable(String),
    /// It has so few records of the rules.
    Few(u64),
    /// It has too small a part of what passed.
    Rough(u64),
    /// It does not have the dimension of requests that a rule looks at.
    NotLogged(String),
    /// A rule counts by another algorithm, or with other regions, of which it says nothing.
    CountedOtherwise,
}

impl fmt::Display for UnknownReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("nothing to measure: ")?;
        let which = "records of the last hour that these rules apply to";
        match self {
            Self::NoLog => f.write_str("there is no decision log"),
            Self::LogUnreadable(problem) => write!(f, "the decision log cannot be read ({problem})"),
            Self::Few(records) => {
                write!(f, "the log has {records} {which}, fewer than {}", back_test::RECORDS_MIN)
            }
            Self::Rough(records) => {
                write!(f, "the log has {records} {which}, too few of them of what passed")
            }
            Self::NotLogged(dimension) => {
                write!(f, "the log has no {dimension:?} of requests, since no rule in force looks at that")
            }
            Self::CountedOtherwise => {
                f.write_str("the log does not tell what passes by another algorithm or beside other regions")
            }
        }
    }
}

impl ChangeEffect {
    fn new(
        scope: &ChangeScope,
        measured: Result<Measurement, UnknownReason>,
        unsure: Option<&UncertainRule>,
    ) -> Self {
        let (needs, because) = judge(measured.as_ref(), unsure, scope);
        let touched_count = scope.touched.len();
        let touched = scope.touched.iter().take(NAMES_MAX).cloned().collect();
        let halved: Vec<(&str, f64)> =
            scope.halved().map(|(tighter, left)| (tighter.rule.as_str(), left)).collect();
        let (halved, halved_count) = (listed_halved(&halved), halved.len());
        let (measured, is_beyond) = (measured.ok(), false);
        Self { needs, because, touched, touched_count, measured, halved, halved_count, is_beyond }
    }

    /// What is said of a change of which nothing is known, beside what somebody approved.
    pub(crate) fn unknown(scope: &ChangeScope, why: UnknownReason, approved: &ApprovedEffect) -> Self {
        let halved = scope.halved().map(|(tighter, left)| (tighter.rule.as_str(), left));
        Self::new(scope, Err(why), None).beyond_if(approved.is_passed_by_halved(halved))
    }

    /// The same, held against what somebody approved. What needs nobody's approval is within it.
    fn beyond_if(self, is_beyond: bool) -> Self {
        let is_beyond = is_beyond && self.needs == ChangeNeeds::Approver;
        Self { is_beyond, ..self }
    }

    /// The same where there is nobody else to ask: of what is not known, whoever is there has to be sure. What is measured waits
    /// until there is somebody.
    pub(crate) fn for_one(self) -> Self {
        self.asked_instead("without tokens there is nobody else to ask")
    }

    /// The same of the first change of a store: whoever makes it may be the only one yet, and nobody goes by what the store says.
    pub(crate) fn for_first(self) -> Self {
        self.asked_instead("the store is new")
    }

    /// The same where no other credential may approve: what would wait for its holder would wait forever.
    pub(crate) fn for_only(self) -> Self {
        self.asked_instead("nobody else may approve")
    }

    fn asked_instead(mut self, why: &str) -> Self {
        // Something may have been measured, and yet it waits for what is not known of another rule.
        let waits_by_share =
            self.measured.as_ref().is_some_and(|measured| by_share(measured).0 == ChangeNeeds::Approver);
        if self.needs == ChangeNeeds::Approver && !waits_by_share {
            self.needs = ChangeNeeds::Confirmation;
            self.is_beyond = false;
            self.because = format!("{}; {why}", self.because);
        }
        self
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn word<S: serde::Serializer>(needs: &ChangeNeeds, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(needs.word())
}

/// What a change takes, and why: by what was measured, and by what could not be.
fn judge(
    measured: Result<&Measurement, &UnknownReason>,
    unsure: Option<&UncertainRule>,
    scope: &ChangeScope,
) -> (ChangeNeeds, String) {
    let (needs, because) = match measured {
        Ok(measured) => by_share(measured),
        Err(why) => by_terms(why, scope),
    };
    let Some(UncertainRule { rule, left, why }) = unsure.filter(|_| measured.is_ok()) else {
        return (needs, because);
    };
    // What is known of other rules says nothing of this one.
    let (least, may) = of_unknown(rule, *left);
    if weight(least) > weight(needs) {
        (least, format!("{because}; of rule {rule:?} there is {why}; {may}"))
    } else {
        (needs, because)
    }
}

fn weight(needs: ChangeNeeds) -> u8 {
    match needs {
        ChangeNeeds::Nothing => 0,
        ChangeNeeds::Confirmation => 1,
        ChangeNeeds::Approver => 2,
    }
}

fn by_terms(why: &UnknownReason, scope: &ChangeScope) -> (ChangeNeeds, String) {
    let halved = scope.halved().next().map(|(tighter, _)| tighter);
    let Some(tighter) = halved.or(scope.tighter.first()) else {
        return (ChangeNeeds::Nothing, format!("{why}; the change denies nothing that passes now"));
    };
    let (needs, may) = of_unknown(&tighter.rule, tighter.left);
    (needs, format!("{why}; {may}"))
}

/// What a rule takes that may deny more, nobody knows how much: what the worst takes that it can be. A log that is empty, or full
/// of something else, makes nothing harmless.
fn of_unknown(rule: &str, left: Option<f64>) -> (ChangeNeeds, String) {
    match left {
        None => (ChangeNeeds::Confirmation, format!("the change may deny more by {rule:?}")),
        Some(left) if left > NOTHING_LEFT => {
            (ChangeNeeds::Approver, format!("the change leaves half of rule {rule:?}, or less"))
        }
        Some(_) => (ChangeNeeds::Approver, format!("the change may deny all by {rule:?} that passes now")),
    }
}

fn by_share(measured: &Measurement) -> (ChangeNeeds, String) {
    let percent = measured.newly_denied_percent;
    let of =
        measured.worst.as_ref().map_or_else(|| "these rules".to_owned(), |rule| format!("rule {rule:?}"));
    let then = if measured.once_ended { " once overrides have ended" } else { "" };
    let message = |rest: &str| {
        format!("{percent:.1} % of the requests that pass {of} now would be newly denied{then}{rest}")
    };
    match percent / 100.0 {
        share if share > APPROVE_ABOVE => {
            (ChangeNeeds::Approver, message(&format!(", more than {} %", 100.0 * APPROVE_ABOVE)))
        }
        share if share > CONFIRM_ABOVE => {
            (ChangeNeeds::Confirmation, message(&format!(", more than {} %", 100.0 * CONFIRM_ABOVE)))
        }
        // What may be more is asked about, as what is not known.
        _ if measured.at_most_percent / 100.0 > CONFIRM_ABOVE => {
            let at_most = measured.at_most_percent;
            let rest = format!(", or up to {at_most:.1} %: of most keys the log has one record or none");
            (ChangeNeeds::Confirmation, message(&rest))
        }
        _ => (ChangeNeeds::Nothing, message("")),
    }
}

#[cfg(test)]
mod tests;
