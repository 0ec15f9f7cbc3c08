//! The expected effect of a change: recent decisions are decided again under the planned rules. A
//! change that would deny much of the passing traffic needs consent.
//!
//! A record contains the verdict of a request under the rules in force. Meters give its verdict
//! under the planned rules, record by record. They need the other requests of its key. But the log
//! has all denials and only a sample of the allowed requests, such as one in a thousand. So a
//! record is decided as one request, beside as many others of its key as the sample makes likely
//! (`keys`). Only the count multiplies it by the requests it was drawn from. Decided as a thousand
//! requests of one key, it would exceed every limit, before the change and after it.
//!
//! Where a record shows more than a model could, the record prevails. A request that passed still
//! passes if its limit is not lowered. A shadow denial becomes a denial when the rule is enforced.
//! A key that had used more than the new burst would not have passed. Meters also model the rules
//! in force, and their error is assumed to be the same on both sides: the share is relative to the
//! requests that they let pass. A record of other rules than those in force, or of an emergency,
//! only shows that a request came: both of its sides are modelled.
//!
//! Nothing here decides a real request or reads a clock: the records contain their times.

mod addresses;
mod approval;
mod back_test;
mod earlier;
mod keys;
mod meter;
mod overrides;
mod plan;
mod rate;
mod security;

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use tidegate_record::timestamp;
use tidegate_rules::change::ChangeNeeds;

use self::approval::{HalvedRule, ShortRule, listed_halved};
use self::plan::NOTHING_LEFT;
use self::security::Weakening;

pub(crate) use self::addresses::{blocked_by_rules, consent_of_blocks, is_small};
pub(crate) use self::approval::ApprovedEffect;
pub(crate) use self::earlier::{AuthorHistory, SERIES_MS};
pub(crate) use self::overrides::KEYS_MAX;
pub(crate) use self::plan::{ChangePlan, ChangeScope, StricterRules, tightened, with};
pub(crate) use self::security::lifts;

/// Share of newly denied requests above which a change needs confirmation. Higher: fewer
/// confirmations; more requests denied by mistake.
const CONFIRM_ABOVE: f64 = 0.05;

/// Share above which it needs the approval of another person.
const APPROVE_ABOVE: f64 = 0.5;

/// Part of the passing requests that a rule leaves by its limits alone, up to which half is lost.
const HALF: f64 = 0.5;

/// Default time that the records of a rule must cover to show that a change denies little, in
/// milliseconds. Longer: an author needs more time to make records on an idle server; more changes
/// after a start are unmeasured.
pub(crate) const EVIDENCE_MS: u64 = 5 * 60 * 1_000;

/// Time span of the replayed decisions, in milliseconds. Longer: covers daily events too; more to
/// read.
pub(crate) const WINDOW_MS: u64 = 60 * 60 * 1_000;

/// Maximum number of replayed decisions; the latest are taken. Higher: more certain; a plan takes
/// longer.
pub(crate) const RECORDS_MAX: u64 = 200_000;

/// Maximum number of touched rules listed by name.
const NAMES_MAX: usize = 20;

/// Maximum number of weakened security rules listed by name, and described in a reason. With the
/// rest of the effect they must fit into the text that a store keeps of a change.
const WEAKENED_MAX: usize = 10;
const WEAKENED_WORDS_MAX: usize = 5;

/// The expected effect of a change, and the consent that it needs. Stored with the change.
#[derive(Debug, Serialize)]
pub struct ChangeEffect {
    /// Consent that the change needs before it is applied.
    #[serde(serialize_with = "word")]
    pub needs: ChangeNeeds,
    /// The reason.
    pub because: String,
    /// The rules that it touches, the first of them.
    touched: Vec<String>,
    touched_count: usize,
    /// `None` if there was nothing to measure.
    measured: Option<Measurement>,
    /// The first of the rules that leave half of the passing requests or less in the worst case.
    halved: Vec<HalvedRule>,
    halved_count: usize,
    /// The first of the security rules that protect less.
    weakened: Vec<String>,
    weakened_count: usize,
    /// Addresses that the change blocks, with those that its author blocks otherwise.
    blocked: BlockedAddresses,
    /// Describes the limit that falls most.
    #[serde(skip)]
    lowered: Option<String>,
    /// Whether it denies clearly more than was approved.
    #[serde(skip)]
    pub(crate) is_beyond: bool,
}

/// Numbers of blocked addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct BlockedAddresses {
    v4_addresses: u64,
    /// IPv6 networks that identify a client. There may be 2^64.
    v6_clients: f64,
}

/// The consent that an action needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Consent {
    /// The consent.
    pub needs: ChangeNeeds,
    /// The reason.
    pub because: String,
}

impl Consent {
    /// Returns the stronger of two, with both reasons.
    pub(crate) fn and(self, other: Self) -> Self {
        let (first, second) =
            if weight(other.needs) > weight(self.needs) { (other, self) } else { (self, other) };
        Self { needs: first.needs, because: format!("{}; {}", first.because, second.because) }
    }
}

/// Recent requests under the rules of the change, and their fate.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Measurement {
    /// Records of the log that were decided again.
    records: u64,
    /// Requests that these records represent.
    requests: f64,
    /// Requests that pass under the rules in force.
    #[serde(default)]
    passing: f64,
    /// Requests that pass now, and would be denied.
    newly_denied: f64,
    /// Requests that are denied now, and would pass.
    newly_allowed: f64,
    /// Share of the passing requests, in percent: of the rule with the largest share, or of all.
    newly_denied_percent: f64,
    /// The rule with the largest share; `None` if the share of all together is the largest.
    #[serde(default)]
    worst: Option<String>,
    /// Upper bound of the same, if keys with one record had as many requests as possible.
    #[serde(default)]
    at_most_percent: f64,
    /// Whether the share is reached only after overrides have ended.
    #[serde(default)]
    once_ended: bool,
    /// The measurements of the rules that deny more, the largest first.
    #[serde(default)]
    rules: Vec<RuleMeasurement>,
    /// The other rules in short form. `others` has the largest shares of the rules without room.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    in_short: Vec<ShortRule>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    others: Option<(f64, f64)>,
}

/// Measured effect of one rule.
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

/// A rule that may deny more, with an unknown effect.
#[derive(Debug)]
struct UncertainRule {
    rule: String,
    /// Part of the passing requests left in the worst case, if an unknown traffic may lose half or
    /// more.
    left: Option<f64>,
    why: UnknownReason,
}

impl UncertainRule {
    /// Returns the reason why no number of records could show the effect, if there is one.
    fn not_measured(&self) -> Option<UnknownReason> {
        Some(self.why.clone()).filter(UnknownReason::is_of_rule)
    }
}

/// The reason why the effect of a change is unknown.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum UnknownReason {
    /// There is no log.
    NoLog,
    /// The log could not be read.
    LogUnreadable(String),
    /// It has so few records of the rules.
    Few(u64),
    /// It has too small a sample of the passing requests.
    Rough(u64),
    /// Its records of a rule cover too little time.
    Short { records: u64, covered_ms: u64, evidence_ms: u64 },
    /// It does not have the dimension of requests that a rule looks at.
    NotLogged(String),
    /// It has digests of this dimension, and the change names a credential in clear text.
    Credential(String),
    /// A rule counts by another algorithm, or with other regions, which the log does not show.
    CountedOtherwise,
}

impl UnknownReason {
    /// Whether it lies in the terms of a rule, so that no number of records helps.
    fn is_of_rule(&self) -> bool {
        matches!(self, Self::NotLogged(_) | Self::Credential(_) | Self::CountedOtherwise)
    }
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
                write!(f, "the log has {records} {which}, too few of them of allowed requests")
            }
            Self::Short { records, covered_ms, evidence_ms } => {
                let [covered_s, evidence_s] = [covered_ms, evidence_ms].map(|ms| ms / 1_000);
                write!(f, "the log has {records} {which}, over {covered_s} s, less than {evidence_s} s")
            }
            Self::NotLogged(dimension) => {
                write!(f, "the log has no {dimension:?} of requests, since no rule in force uses it")
            }
            Self::Credential(dimension) => {
                write!(
                    f,
                    "the log has only digests of {dimension:?}, and the change names other values of it"
                )
            }
            Self::CountedOtherwise => {
                f.write_str("the log has no decisions by another algorithm or with other regions")
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
        let consents = scope.weakened_consent().into_iter().chain(consent_of_blocks(&scope.blocked));
        let consent = consents.fold(judge(measured.as_ref(), unsure, scope), Consent::and);
        let lowered = scope.lowered().map(|(rule, lowered)| lowered.words(rule, &scope.since()));
        let Consent { needs, because } = scope.with_lowered(consent, lowered.as_deref());
        let touched_count = scope.touched.len();
        let touched = scope.touched.iter().take(NAMES_MAX).cloned().collect();
        let halved: Vec<(&str, f64)> =
            scope.halved().map(|(tighter, left)| (tighter.rule.as_str(), left)).collect();
        let (halved, halved_count) = (listed_halved(&halved), halved.len());
        let weakened = scope.weakened.iter().take(WEAKENED_MAX).map(|(rule, _)| rule.clone()).collect();
        Self {
            needs,
            because,
            touched,
            touched_count,
            measured: measured.ok(),
            halved,
            halved_count,
            weakened,
            weakened_count: scope.weakened.len(),
            blocked: BlockedAddresses::of(&scope.blocked),
            lowered,
            is_beyond: false,
        }
    }

    /// Returns the effect of a change without a measurement, compared with the approved effect.
    pub(crate) fn unknown(scope: &ChangeScope, why: UnknownReason, approved: &ApprovedEffect) -> Self {
        let halved = scope.halved().map(|(tighter, left)| (tighter.rule.as_str(), left));
        let is_beyond = approved.is_passed_by_halved(halved) || approved.is_passed_by_scope(scope);
        Self::new(scope, Err(why), None).beyond_if(is_beyond)
    }

    /// Returns the effect of this change together with the earlier changes of its author, if that
    /// needs more consent. An approver reads in any case how far the limit falls in all.
    pub(crate) fn or_with_earlier(self, together: Self) -> Self {
        if weight(together.needs) > weight(self.needs) {
            return together;
        }
        match together.lowered.filter(|_| together.needs == ChangeNeeds::Approver) {
            Some(lowered) => Self { because: format!("{lowered}; {}", self.because), ..self },
            None => self,
        }
    }

    /// Requires an approver, for this reason.
    pub(crate) fn approved_for(self, reason: &str) -> Self {
        let because = format!("{reason}; {}", self.because);
        Self { needs: ChangeNeeds::Approver, because, ..self }
    }

    /// Notes whether the effect exceeds the approved one. An effect that needs no approval never
    /// does.
    fn beyond_if(self, is_beyond: bool) -> Self {
        let is_beyond = is_beyond && self.needs == ChangeNeeds::Approver;
        Self { is_beyond, ..self }
    }

    /// Adapts the effect if there is no other person to ask: the author confirms it instead,
    /// because no approval could ever come.
    pub(crate) fn for_one(self) -> Self {
        self.asked_instead("without tokens there is no second approver")
    }

    /// Does the same for the first change of a store. Its author may be the only person so far, and
    /// no server depends on the store yet.
    pub(crate) fn for_first(self) -> Self {
        self.asked_instead("the store is new")
    }

    /// Does the same if no other credential may approve, because the change would wait forever.
    pub(crate) fn for_only(self) -> Self {
        self.asked_instead("no other credential may approve")
    }

    fn asked_instead(mut self, why: &str) -> Self {
        if self.needs == ChangeNeeds::Approver {
            self.needs = ChangeNeeds::Confirmation;
            self.is_beyond = false;
            self.because = format!("{}; {why}", self.because);
        }
        self
    }

    /// Requires at least that the author confirms this.
    pub(crate) fn confirmed_for(mut self, confirmation: &str) -> Self {
        if self.needs == ChangeNeeds::Nothing {
            self.needs = ChangeNeeds::Confirmation;
        }
        self.because = format!("{confirmation}; {}", self.because);
        self
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn word<S: serde::Serializer>(needs: &ChangeNeeds, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(needs.word())
}

impl ChangeScope {
    /// Returns the consent for security rules that protect less than before.
    fn weakened_consent(&self) -> Option<Consent> {
        let since = self.since();
        let words = |(rule, weakening): &(String, Weakening)| weakening.words(rule, &since);
        let mut words: Vec<String> = self.weakened.iter().take(WEAKENED_WORDS_MAX).map(words).collect();
        if self.weakened.len() > words.len() {
            words.push(format!("{} more security rules", self.weakened.len() - words.len()));
        }
        let because = words.join(", ");
        (!self.weakened.is_empty()).then_some(Consent { needs: ChangeNeeds::Approver, because })
    }

    /// Adds the limit that falls most to the reason of a consent.
    fn with_lowered(&self, Consent { needs, because }: Consent, lowered: Option<&str>) -> Consent {
        let because = match (needs, lowered, self.since_ms) {
            (ChangeNeeds::Nothing, _, _) | (_, None, None) => because,
            (_, Some(lowered), None) => format!("{because}; {lowered}"),
            // It differs from the limit in force, so the author must read it first.
            (_, Some(lowered), Some(_)) => format!("{lowered}; {because}"),
            (_, None, Some(_)) => format!("with earlier changes of its author{}: {because}", self.since()),
        };
        Consent { needs, because }
    }

    /// Names the time of the first change that is judged together with this one.
    fn since(&self) -> String {
        let Some(since_ms) = self.since_ms else { return String::new() };
        let at = timestamp(since_ms);
        format!(" since {} UTC", at.get(HOUR_AND_MINUTE).unwrap_or(&at))
    }
}

/// The hour and the minute in a time as records have it.
const HOUR_AND_MINUTE: Range<usize> = 11..16;

/// Returns the consent that a change needs, and the reason, from the measured and the unknown
/// effects.
fn judge(
    measured: Result<&Measurement, &UnknownReason>,
    unsure: Option<&UncertainRule>,
    scope: &ChangeScope,
) -> Consent {
    let consent = match measured {
        Ok(measured) => by_share(measured),
        Err(why) => by_terms(why, scope),
    };
    let Some(UncertainRule { rule, left, why }) = unsure.filter(|_| measured.is_ok()) else {
        return consent;
    };
    // Measurements of other rules do not apply to this one.
    let Consent { needs, because: may } = of_unknown(rule, *left);
    if weight(needs) > weight(consent.needs) {
        let because = format!("{}; of rule {rule:?} there is {why}; {may}", consent.because);
        Consent { needs, because }
    } else {
        consent
    }
}

fn weight(needs: ChangeNeeds) -> u8 {
    match needs {
        ChangeNeeds::Nothing => 0,
        ChangeNeeds::Confirmation => 1,
        ChangeNeeds::Approver => 2,
    }
}

fn by_terms(why: &UnknownReason, scope: &ChangeScope) -> Consent {
    let least = scope.halved().min_by(|(_, a), (_, b)| a.total_cmp(b)).map(|(tighter, _)| tighter);
    let Some(tighter) = least.or(scope.tighter.first()) else {
        let because = format!("{why}; the change denies nothing that passes now");
        return Consent { needs: ChangeNeeds::Nothing, because };
    };
    let Consent { needs, because: may } = of_unknown(&tighter.rule, tighter.left);
    Consent { needs, because: format!("{why}; {may}") }
}

/// Returns the consent for a rule that may deny an unknown amount more: that of its worst case. An
/// empty or unrelated log makes nothing harmless.
fn of_unknown(rule: &str, left: Option<f64>) -> Consent {
    let (needs, because) = match left {
        None => (ChangeNeeds::Confirmation, format!("the change may deny more by {rule:?}")),
        Some(left) if left > HALF => {
            let message = format!(
                "the change lowers the burst of rule {rule:?}: the costs of its requests are unknown, and \
                 all that cost more would be denied"
            );
            (ChangeNeeds::Approver, message)
        }
        Some(left) if left > NOTHING_LEFT => {
            (ChangeNeeds::Approver, format!("the change leaves half of rule {rule:?}, or less"))
        }
        Some(_) => (ChangeNeeds::Approver, format!("the change may deny all by {rule:?} that passes now")),
    };
    Consent { needs, because }
}

fn by_share(measured: &Measurement) -> Consent {
    let percent = measured.newly_denied_percent;
    let of =
        measured.worst.as_ref().map_or_else(|| "these rules".to_owned(), |rule| format!("rule {rule:?}"));
    let then = if measured.once_ended { " once overrides have ended" } else { "" };
    let message = |rest: &str| {
        format!("{percent:.1} % of the requests that pass {of} now would be newly denied{then}{rest}")
    };
    let (needs, because) = match percent / 100.0 {
        share if share > APPROVE_ABOVE => {
            (ChangeNeeds::Approver, message(&format!(", more than {} %", 100.0 * APPROVE_ABOVE)))
        }
        share if share > CONFIRM_ABOVE => {
            (ChangeNeeds::Confirmation, message(&format!(", more than {} %", 100.0 * CONFIRM_ABOVE)))
        }
        // A share that may be larger needs confirmation, like an unknown one.
        _ if measured.at_most_percent / 100.0 > CONFIRM_ABOVE => {
            let at_most = measured.at_most_percent;
            let rest = format!(", or up to {at_most:.1} %: of most keys the log has one record or none");
            (ChangeNeeds::Confirmation, message(&rest))
        }
        _ => (ChangeNeeds::Nothing, message("")),
    };
    Consent { needs, because }
}

#[cfg(test)]
mod tests;
