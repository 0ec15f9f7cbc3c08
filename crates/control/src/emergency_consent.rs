//! The consent that an emergency needs: it waits for no approval, so one that reaches far needs a
//! token that may approve.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::slice;
use std::sync::Arc;

use serde::Deserialize;
use tidegate_core::Limit;
use tidegate_rules::change::ChangeNeeds;
use tidegate_rules::pattern::Pattern;
use tidegate_rules::rows::{EmergencyRow, RowKind};
use tidegate_rules::{ADDRESS, AddressCover, Rule, RuleSet, parse_period};

use crate::control::Control;
use crate::guardrail::{Consent, KEYS_MAX, SERIES_MS, blocked_by_rules, consent_of_blocks, is_small, lifts};
use crate::node::{Node, NodeRules as _};
use crate::plan::PlanError;

/// The fields of an emergency that show its reach.
#[derive(Deserialize)]
struct EmergencyBody {
    action: String,
    rule: Option<String>,
    #[serde(default)]
    key: Vec<String>,
    #[serde(default)]
    when: BTreeMap<String, ConditionBody>,
    limit: Option<u64>,
    period: Option<String>,
    burst: Option<u64>,
    by: Option<String>,
}

/// One pattern, or several.
#[derive(Deserialize)]
#[serde(untagged)]
enum ConditionBody {
    One(String),
    Several(Vec<String>),
}

impl ConditionBody {
    fn patterns(&self) -> &[String] {
        match self {
            Self::One(pattern) => slice::from_ref(pattern),
            Self::Several(patterns) => patterns,
        }
    }
}

impl EmergencyBody {
    /// Reads a body that was checked before.
    fn read(row: &EmergencyRow) -> Option<Self> {
        serde_json::from_str(&row.body).ok()
    }

    fn denies(&self) -> bool {
        matches!(self.action.as_str(), "block" | "limit")
    }

    /// Returns each dimension that it names, with its patterns. All must match.
    fn parts<'b>(&'b self, key: &'b [Arc<str>]) -> impl Iterator<Item = (&'b str, &'b [String])> {
        let of_key = key.iter().map(|name| &**name).zip(self.key.iter().map(slice::from_ref));
        of_key.chain(self.when.iter().map(|(name, condition)| (name.as_str(), condition.patterns())))
    }

    /// Returns the addresses that it names; `None` without any.
    fn cover(&self, key: &[Arc<str>]) -> Option<AddressCover> {
        let mut addresses = self.parts(key).filter(|(name, _)| *name == ADDRESS).peekable();
        addresses.peek()?;
        let mut cover = AddressCover::default();
        let patterns = addresses.flat_map(|(_, patterns)| patterns);
        patterns.for_each(|pattern| cover.add_pattern(&Pattern::new(pattern.as_str())));
        Some(cover)
    }

    /// Whether it is about few keys of its rule: all parts of the key have values. Values of other
    /// dimensions exclude few requests, because most clients send the same method or path.
    fn names_keys(&self, key: &[Arc<str>]) -> bool {
        let values = |name: &str| {
            let of_name = self.parts(key).filter(|(part, patterns)| *part == name && is_literal(patterns));
            of_name.map(|(_, patterns)| patterns.len()).min()
        };
        let few = || usize::from(self.cover(key).as_ref().is_some_and(is_small));
        let counts =
            key.iter().map(|name| if **name == *ADDRESS { few() } else { values(name).unwrap_or(0) });
        let keys = counts.reduce(usize::saturating_mul);
        keys.is_some_and(|keys| (1..=KEYS_MAX).contains(&keys))
    }

    /// Returns the addresses that it is about; `None` if it names none, or few keys of its rule.
    fn addresses(&self, key: &[Arc<str>]) -> Option<AddressCover> {
        self.cover(key).filter(|_| !self.names_keys(key))
    }

    /// Whether it is about few requests: few keys of its rule, or few addresses.
    fn is_narrow(&self, key: &[Arc<str>]) -> bool {
        self.names_keys(key) || self.cover(key).as_ref().is_some_and(is_small)
    }

    /// Returns its limit; `None` if it allows everything.
    fn limit(&self) -> Option<Limit> {
        let period = parse_period(self.period.as_deref()?).ok()?;
        let limit = Limit::gcra(self.limit?, period).ok()?;
        self.burst.map_or(Some(limit), |burst| limit.with_burst(burst).ok())
    }

    /// Returns a security rule that it lifts for many requests.
    fn lifted<'s>(&self, set: &'s RuleSet, key: &[Arc<str>]) -> Option<&'s Rule> {
        if self.action == "block" || self.is_narrow(key) {
            return None;
        }
        let limit = self.limit();
        let is_meant = |rule: &&Rule| self.rule.as_ref().is_none_or(|only| **only == *rule.name);
        set.rules().iter().filter(is_meant).find(|rule| lifts(rule, limit.as_ref()))
    }
}

/// Whether patterns name values in full.
fn is_literal(patterns: &[String]) -> bool {
    !patterns.is_empty() && patterns.iter().all(|pattern| !pattern.contains('*'))
}

/// Returns the addresses that emergencies of some actors block or limit.
pub(crate) fn blocked_by_emergencies(
    emergencies: &[EmergencyRow],
    names: &HashSet<String>,
    set: &RuleSet,
    now_ms: u64,
) -> AddressCover {
    let lasting = emergencies.iter().filter(|row| now_ms < row.expires_ms).filter_map(EmergencyBody::read);
    let is_theirs = |body: &EmergencyBody| body.by.as_ref().is_some_and(|by| names.contains(by));
    let all: Vec<EmergencyBody> = lasting.filter(|body| body.denies() && is_theirs(body)).collect();
    let keys = keys_of(set, &all);
    let mut blocked = AddressCover::default();
    for body in &all {
        let key = body.rule.as_deref().and_then(|rule| keys.get(rule)).copied().unwrap_or_default();
        body.addresses(key).iter().for_each(|cover| blocked.extend(cover));
    }
    blocked
}

/// Returns the keys of the rules that emergencies are about.
fn keys_of<'s>(set: &'s RuleSet, all: &[EmergencyBody]) -> HashMap<&'s str, &'s [Arc<str>]> {
    let meant: HashSet<&str> = all.iter().filter_map(|body| body.rule.as_deref()).collect();
    let rules = if meant.is_empty() { &[] } else { set.rules() };
    let rules = rules.iter().filter(|rule| meant.contains(&*rule.name));
    rules.map(|rule| (&*rule.name, &*rule.key)).collect()
}

impl<N: Node> Control<N> {
    /// Returns the consent that a valid emergency needs, besides that for its lack of a key; `None`
    /// if it needs none. An approver is a token that may approve: that of the author will do.
    pub async fn emergency_consent(
        &self,
        row: &EmergencyRow,
        author: &str,
    ) -> Result<Option<Consent>, PlanError> {
        let Some(body) = EmergencyBody::read(row) else { return Ok(None) };
        let node = self.node()?;
        let rules = node.rules();
        let keys = keys_of(rules.set(), slice::from_ref(&body));
        let key = keys.values().next().copied().unwrap_or_default();
        let lifted = body.lifted(rules.set(), key).map(|rule| Consent {
            needs: ChangeNeeds::Approver,
            because: format!("the emergency lifts security rule {:?} for many requests", rule.name),
        });
        let mut blocked = body.addresses(key).filter(|_| body.denies()).unwrap_or_default();
        if !is_small(&blocked) {
            blocked.extend(&self.blocked_besides(row, author, rules.set(), node.now_ms()).await?);
        }
        let consent = lifted.into_iter().chain(consent_of_blocks(&blocked)).reduce(Consent::and);
        let has_approver = || !node.is_open() && node.has_approver_beside(&HashSet::new());
        Ok(consent.map(|consent| match consent.needs {
            ChangeNeeds::Approver if !has_approver() => {
                Consent { needs: ChangeNeeds::Confirmation, ..consent }
            }
            _ => consent,
        }))
    }

    /// Returns the addresses that an author blocks by other emergencies, and by rules since a day.
    async fn blocked_besides(
        &self,
        row: &EmergencyRow,
        author: &str,
        set: &RuleSet,
        now_ms: u64,
    ) -> Result<AddressCover, PlanError> {
        let names = self.names_of(author).await?;
        let (_, mut emergencies) = self.store.emergencies().await?;
        emergencies.retain(|other| other.id != row.id);
        let mut blocked = blocked_by_emergencies(&emergencies, &names, set, now_ms);
        let changes = self.store.changes_by_urgently(author, now_ms.saturating_sub(SERIES_MS)).await?;
        let rules = changes.rows.keys().filter(|(kind, _)| *kind == RowKind::Rule);
        let rules: HashSet<&str> = rules.map(|(_, name)| name.as_str()).collect();
        if !rules.is_empty() {
            blocked.extend(&blocked_by_rules(set, |name| rules.contains(name)));
        }
        Ok(blocked)
    }
}
