//! The approved effect of a change, as stored with it, and whether the change exceeds it by now.
//!
//! A change may touch more rules than there is space to list. The others are stored in short form:
//! a name and two shares.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};
use tidegate_rules::AddressCover;

use super::plan::ChangeScope;
use super::rate::as_real;
use super::{APPROVE_ABOVE, BlockedAddresses, Measurement, RuleMeasurement};

/// Percentage points by which the denials of a change may exceed its approval when it is applied.
/// Higher: fewer repeated approvals; more denials without approval.
const APPROVED_PERCENT_MARGIN: f64 = 5.0;

/// Maximum bytes of all rules in short form, and of all halved rules. With the rest of the effect
/// they must fit into the text that a store keeps of a change.
const SHORT_BYTES_MAX: usize = 20 << 10;
const HALVED_BYTES_MAX: usize = 8 << 10;

/// Maximum bytes of a rule in short form, or of a halved rule, besides its name.
const BESIDE_NAME_BYTES: usize = 56;

/// Shares and parts of limits that differ by less are the same: they are computed, written and
/// read.
const NEARLY_NOTHING: f64 = 1e-9;

/// Shares that a rule would newly deny: of all its requests, and of those that pass it now.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct DeniedShares {
    of_requests: f64,
    pub(super) of_passing: f64,
}

impl DeniedShares {
    fn of_hundredths((of_requests, of_passing): (f64, f64)) -> Self {
        Self { of_requests: of_requests / 100.0, of_passing: of_passing / 100.0 }
    }
}

impl From<&RuleMeasurement> for DeniedShares {
    fn from(of: &RuleMeasurement) -> Self {
        let requests = of.requests.max(1.0);
        // Effects stored by older versions lack this field.
        let passing = if of.passing > 0.0 { of.passing } else { requests };
        let share = |whole: f64| (of.newly_denied / whole).min(1.0);
        Self { of_requests: share(requests), of_passing: share(passing) }
    }
}

/// A rule in short: its name, and its shares in hundredths, rounded up to a tenth.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct ShortRule(String, f64, f64);

impl ShortRule {
    fn new(of: RuleMeasurement) -> Self {
        let DeniedShares { of_requests, of_passing } = DeniedShares::from(&of);
        let percent = |share: f64| (share * 1_000.0).ceil() / 10.0;
        Self(of.rule, percent(of_requests), percent(of_passing))
    }

    fn shares(&self) -> DeniedShares {
        DeniedShares::of_hundredths((self.1, self.2))
    }
}

/// Returns the rules that fit in short form, the largest share of passing requests first. Returns
/// the largest shares of the other rules.
pub(super) fn in_short(rules: Vec<RuleMeasurement>) -> (Vec<ShortRule>, Option<(f64, f64)>) {
    let mut all: Vec<ShortRule> = rules.into_iter().map(ShortRule::new).collect();
    all.sort_by(|a, b| b.2.total_cmp(&a.2).then_with(|| a.0.cmp(&b.0)));
    let rest = all.split_off(room(all.iter().map(|rule| rule.0.as_str()), SHORT_BYTES_MAX));
    let largest = |(a, b): (f64, f64), rule: ShortRule| (a.max(rule.1), b.max(rule.2));
    let others = (!rest.is_empty()).then(|| rest.into_iter().fold((0.0, 0.0), largest));
    (all, others)
}

/// Returns the number of these names that fit.
fn room<'n>(names: impl Iterator<Item = &'n str>, bytes_max: usize) -> usize {
    // In JSON, a quotation mark or a backslash takes two.
    let escaped = |name: &str| name.bytes().filter(|byte| matches!(byte, b'"' | b'\\')).count();
    let bytes = names.map(|name| name.len() + escaped(name) + BESIDE_NAME_BYTES);
    let together = bytes.scan(0, |sum, bytes| {
        *sum += bytes;
        Some(*sum)
    });
    together.take_while(|sum| *sum <= bytes_max).count()
}

/// A rule that leaves half of the passing requests, or less.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct HalvedRule {
    rule: String,
    /// The part that it leaves.
    left: f64,
}

/// Returns the first of them, within the room for halved rules.
pub(super) fn listed_halved(all: &[(&str, f64)]) -> Vec<HalvedRule> {
    let room = room(all.iter().map(|(rule, _)| *rule), HALVED_BYTES_MAX);
    let listed = all.iter().take(room);
    listed.map(|(rule, left)| HalvedRule { rule: (*rule).to_owned(), left: *left }).collect()
}

/// The expected effect of a change at its approval; empty without one.
#[derive(Debug, Default)]
pub(crate) struct ApprovedEffect {
    newly_denied_percent: f64,
    of_rules: HashMap<String, DeniedShares>,
    /// The largest shares of the rules that did not fit.
    of_others: DeniedShares,
    halved: HashMap<String, f64>,
    halved_others: usize,
    weakened: HashSet<String>,
    weakened_others: usize,
    blocked: BlockedAddresses,
}

/// An effect in stored form.
#[derive(Deserialize)]
struct StoredEffect {
    measured: Option<Measurement>,
    #[serde(default)]
    halved: Vec<HalvedRule>,
    #[serde(default)]
    halved_count: usize,
    #[serde(default)]
    weakened: HashSet<String>,
    #[serde(default)]
    weakened_count: usize,
    #[serde(default)]
    blocked: BlockedAddresses,
}

impl ApprovedEffect {
    /// Reads the effect stored with a change.
    pub(crate) fn read(effect: &str) -> Option<Self> {
        let stored: StoredEffect = serde_json::from_str(effect).ok()?;
        let StoredEffect { measured, halved, halved_count, weakened, weakened_count, blocked } = stored;
        let Measurement { newly_denied_percent, rules, in_short, others, .. } = measured.unwrap_or_default();
        let listed = rules.iter().map(|of_rule| (of_rule.rule.clone(), DeniedShares::from(of_rule)));
        let short = in_short.iter().map(|short| (short.0.clone(), short.shares()));
        Some(Self {
            newly_denied_percent,
            of_rules: listed.chain(short).collect(),
            of_others: others.map(DeniedShares::of_hundredths).unwrap_or_default(),
            halved_others: halved_count.saturating_sub(halved.len()),
            halved: halved.into_iter().map(|halved| (halved.rule, halved.left)).collect(),
            weakened_others: weakened_count.saturating_sub(weakened.len()),
            weakened,
            blocked,
        })
    }

    /// The share of a rule's requests that it was expected to newly deny.
    pub(crate) fn share_of(&self, rule: &str) -> f64 {
        self.shares_of(rule).of_requests
    }

    fn shares_of(&self, rule: &str) -> DeniedShares {
        self.of_rules.get(rule).copied().unwrap_or(self.of_others)
    }

    /// Whether so many hundredths are clearly more than was approved.
    pub(super) fn is_passed_by(&self, newly_denied_percent: f64) -> bool {
        is_clearly_more(newly_denied_percent, self.newly_denied_percent)
    }

    /// Whether a rule newly denies most of its passing requests, and clearly more than approved for
    /// it. Approved denials of other rules do not count.
    pub(super) fn is_passed_by_rule(&self, rule: &str, shares: DeniedShares) -> bool {
        let approved = self.shares_of(rule).of_passing;
        shares.of_passing > APPROVE_ABOVE && is_clearly_more(100.0 * shares.of_passing, 100.0 * approved)
    }

    /// Whether a halved rule was not part of the approval, or leaves less than was approved. There
    /// is no margin, because limits do not vary like traffic.
    pub(super) fn is_passed_by_halved<'r>(&self, halved: impl Iterator<Item = (&'r str, f64)>) -> bool {
        let mut others = 0;
        for (rule, left) in halved {
            match self.halved.get(rule) {
                Some(approved) if left + NEARLY_NOTHING < *approved => return true,
                Some(_) => {}
                None => others += 1,
            }
        }
        others > self.halved_others
    }

    /// Whether a change weakens other security rules than were approved, or blocks more addresses.
    pub(super) fn is_passed_by_scope(&self, scope: &ChangeScope) -> bool {
        let others = scope.weakened.iter().filter(|(rule, _)| !self.weakened.contains(rule)).count();
        let blocked = BlockedAddresses::of(&scope.blocked);
        others > self.weakened_others || blocked.is_more_than(self.blocked)
    }
}

impl BlockedAddresses {
    pub(super) fn of(cover: &AddressCover) -> Self {
        let v6_clients = u64::try_from(cover.v6_clients()).unwrap_or(u64::MAX);
        Self { v4_addresses: cover.v4_addresses(), v6_clients: as_real(v6_clients) }
    }

    fn is_more_than(self, approved: Self) -> bool {
        self.v4_addresses > approved.v4_addresses || self.v6_clients > approved.v6_clients
    }
}

fn is_clearly_more(percent: f64, approved: f64) -> bool {
    percent > approved + APPROVED_PERCENT_MARGIN + NEARLY_NOTHING
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_rule(rule: String, newly_denied: f64) -> RuleMeasurement {
        RuleMeasurement { rule, records: 100, requests: 200.0, passing: 100.0, newly_denied }
    }

    #[test]
    fn of_more_rules_than_there_is_room_for_the_smallest_shares_are_left_out() {
        // As long as names may be, and as many bytes as they may take.
        let name = |at: u32| format!("{at:06}{}", "\"".repeat(250));
        let rules = |count: u32| (0..count).map(|at| of_rule(name(at), f64::from(at) / 10.0)).collect();
        let (listed, others) = in_short(rules(1_000));
        let text = serde_json::to_string(&listed).expect("text");
        assert!((SHORT_BYTES_MAX / 2..=SHORT_BYTES_MAX).contains(&text.len()), "{}", text.len());
        assert!(listed[0].0 == name(999) && listed[0].shares().of_passing >= 0.999, "{:?}", listed[0]);
        let least = listed.last().expect("some").shares();
        let others = DeniedShares::of_hundredths(others.expect("the rest"));
        assert!(least.of_passing > others.of_passing && others.of_passing > 0.9, "{least:?}: {others:?}");
        assert!((others.of_requests - others.of_passing / 2.0).abs() < 0.001, "{others:?}");
        let (listed, others) = in_short(rules(10));
        assert_eq!((listed.len(), others), (10, None));
    }

    #[test]
    fn of_more_halved_rules_than_there_is_room_for_it_is_known_how_many_there_were() {
        let names: Vec<String> = (0..1_000).map(|at| format!("{at:0250}")).collect();
        let halved: Vec<(&str, f64)> = names.iter().map(|name| (name.as_str(), 0.5)).collect();
        let listed = listed_halved(&halved);
        assert!((1..100).contains(&listed.len()), "{}", listed.len());
        let kept = serde_json::json!({ "measured": null, "halved": listed, "halved_count": 999 }).to_string();
        assert!(kept.len() <= HALVED_BYTES_MAX + 100, "{}", kept.len());
        let approved = ApprovedEffect::read(&kept).expect("kept");
        assert!(!approved.is_passed_by_halved(halved.iter().take(999).copied()), "as many");
        assert!(approved.is_passed_by_halved(halved.iter().copied()), "one more");
        assert!(approved.is_passed_by_halved([(names[0].as_str(), 0.4)].into_iter()), "less is left");
    }
}
