//! Rules of class `security` that a change weakens. Traffic does not show the attacks that such a
//! rule keeps out, so another person must agree, whatever the result of the back-test.

use tidegate_core::Limit;
use tidegate_rules::{Class, Mode, Regime, Rule};

use super::rate::Rate;

/// Factor by which the limit or the burst of a security rule may rise without an approver. Higher:
/// attackers get further by the change of one person.
pub(super) const SECURITY_RAISE_MAX: u32 = 2;

/// How a change weakens a security rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Weakening {
    Deletion,
    Shadow,
    Class(Class),
    Raise {
        from: Rate,
        to: Rate,
    },
    /// Its regime lets more pass in all regions together.
    Regime(Regime),
    /// It applies to fewer requests, or counts them apart.
    Scope,
    /// Overrides of many keys do one of these.
    Override,
}

impl Weakening {
    /// Returns how a rule is weakened; `None` if it is not, or did not protect before.
    pub(super) fn of(before: &Rule, after: Option<&Rule>) -> Option<Self> {
        if !protects(before) {
            return None;
        }
        let Some(after) = after else { return Some(Self::Deletion) };
        let (from, to) = (Rate::of(&before.limit), Rate::of(&after.limit));
        if after.mode == Mode::Shadow {
            Some(Self::Shadow)
        } else if after.class != Class::Security {
            Some(Self::Class(after.class))
        } else if to.exceeds(from, SECURITY_RAISE_MAX) {
            Some(Self::Raise { from, to })
        } else if promise(after.regime()) < promise(before.regime()) {
            Some(Self::Regime(after.regime()))
        } else {
            leaves_requests(before, after).then_some(Self::Scope)
        }
    }

    /// Describes the weakening of a rule, with the time of the first change, if that is an earlier
    /// one.
    pub(super) fn words(self, rule: &str, since: &str) -> String {
        match self {
            Self::Deletion => format!("deletes security rule {rule:?}{since}"),
            Self::Shadow => format!("takes security rule {rule:?} out of enforcement{since}"),
            Self::Class(class) => {
                format!("changes the class of rule {rule:?} from security to {}{since}", class.as_str())
            }
            Self::Raise { from, to } => {
                let change = from.to_words(to);
                format!("raises security rule {rule:?} {change}{since}, more than {SECURITY_RAISE_MAX} times")
            }
            Self::Regime(regime) => {
                format!("weakens the regime of security rule {rule:?} to {regime}{since}")
            }
            Self::Scope => format!("applies security rule {rule:?} to fewer requests{since}"),
            Self::Override => format!(
                "lifts security rule {rule:?} for many keys{since}: by shadow mode, or more than \
                 {SECURITY_RAISE_MAX} times the limit"
            ),
        }
    }
}

/// Returns the rank of the promise of a regime: the higher, the less passes in all regions
/// together.
fn promise(regime: Regime) -> u8 {
    match regime {
        Regime::Regional => 0,
        Regime::BestEffort => 1,
        Regime::Share => 2,
        Regime::Strict => 3,
    }
}

/// Whether a rule keeps attackers out.
pub(super) fn protects(rule: &Rule) -> bool {
    rule.class == Class::Security && rule.mode == Mode::Enforce
}

/// Whether another limit, or none, lifts a security rule.
pub(crate) fn lifts(rule: &Rule, limit: Option<&Limit>) -> bool {
    let exceeds = |limit: &Limit| Rate::of(limit).exceeds(Rate::of(&rule.limit), SECURITY_RAISE_MAX);
    protects(rule) && limit.is_none_or(exceeds)
}

/// Whether requests that a rule applied to may escape it, or get meters of their own.
fn leaves_requests(before: &Rule, after: &Rule) -> bool {
    let is_for_one = after.tenant.is_some() && after.tenant != before.tenant;
    let has_more = !after.when.iter().all(|condition| before.when.contains(condition));
    is_for_one || after.key != before.key || has_more
}
