//! A set of rules, read as one and replaced as one.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::ops::Bound;
use std::sync::Arc;

use sha2::{Digest, Sha256};
use tidegate_core::bound::Fleet;
use tidegate_core::{Algorithm, Limit};

use crate::compile;
use crate::dimensions::{Dimensions, HEADER_PREFIX};
use crate::emergency::Emergencies;
use crate::fields::as_counted;
use crate::file;
use crate::index::{RuleIndex, small};
use crate::match_table::{MatchTable, MatchedRule};
use crate::overrides::{NamespaceOverride, NamespaceOverrides, OverrideIndex, OverrideMatch};
use crate::pattern::Pattern;
use crate::problems::{ProblemList, Problems};
use crate::rows::{EmergencyRow, RuleRows};
use crate::rule::{Key, Mode, Rule};

/// The most rules of a set. Higher: more memory, some 300 bytes each, and a slower start.
pub const RULES_MAX: usize = 1_000_000;

/// Maximum rules for every tenant, and of each tenant's own, without an exact value, prefix or
/// suffix in `when`. A request scans each of them, so more would be slow.
pub const SCANNED_RULES_MAX: usize = 10_000;

/// Maximum rules for every tenant, and of each tenant's own, that one request may have to examine.
/// It counts the scanned rules and, for each dimension, the most rules that one exact value, one
/// prefix and one suffix find. Higher: a set of rules that are all for `/*` makes every request
/// slow.
pub const LOOKED_AT_RULES_MAX: usize = 10_000;
const _: () = assert!(SCANNED_RULES_MAX <= LOOKED_AT_RULES_MAX, "scanned rules count as examined rules");

/// Hexadecimal digits of a file's version: enough to distinguish sets, few enough to read out.
const VERSION_DIGITS: usize = 12;

/// An immutable set of rules, with the overrides and emergencies that go before them.
#[derive(Debug)]
pub struct RuleSet {
    /// Shared by sets that only differ in their emergencies and in overrides of namespaces.
    parts: Arc<RuleSetParts>,
    /// Overrides of namespaces, from the source of the rules.
    namespaces: Arc<NamespaceOverrides>,
    /// Overrides of namespaces that this server keeps beside a rules file, or without rules.
    embedded: Arc<NamespaceOverrides>,
    emergencies: Emergencies,
    version: String,
    revision: u64,
}

/// The parts of a set, without emergencies.
#[derive(Debug, Default)]
pub(crate) struct RuleSetParts {
    /// In the order in which they apply.
    pub(crate) rules: Box<[Rule]>,
    pub(crate) index: RuleIndex,
    pub(crate) match_table: MatchTable,
    pub(crate) rule_overrides: OverrideIndex,
    pub(crate) placement: Option<String>,
}

/// A rule that applies to a request.
#[derive(Clone, Debug)]
pub struct RuleMatch<'s, 'd> {
    /// The rule's place in [`RuleSet::rules`].
    pub position: usize,
    /// The rule.
    pub rule: &'s Rule,
    /// Key under which the request is counted.
    pub key: Key<'d>,
    /// Terms in force for this key.
    pub terms: EffectiveTerms<'s>,
}

/// The terms of a rule for one key, and their source. The meters stay the rule's: usage under one
/// limit counts under another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EffectiveTerms<'s> {
    /// Limit in force, with the rule's algorithm.
    pub limit: Limit,
    /// Whether a denial stops anyone.
    pub mode: Mode,
    /// Name of the override in force.
    pub override_name: Option<&'s str>,
    /// The emergency in force.
    pub emergency: Option<EmergencyTerms<'s>>,
}

/// An emergency in force for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmergencyTerms<'s> {
    /// Its id.
    pub id: &'s str,
    /// Whether it lets nothing pass.
    pub is_block: bool,
    /// When it ends, in milliseconds since the Unix epoch.
    pub expires_ms: u64,
}

/// Terms that overrides inherit from their rule unless they state their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InheritedTerms {
    algorithm: Algorithm,
    period_us: u64,
    /// Burst that the rule states. Overrides do not inherit a burst that follows from the rule's
    /// limit.
    burst: Option<u32>,
    mode: Mode,
}

impl<'s> EffectiveTerms<'s> {
    /// The same under an override.
    fn under(self, found: &OverrideMatch<'s>) -> Self {
        let mode = found.mode.unwrap_or(self.mode);
        Self { limit: found.limit, mode, override_name: Some(found.name), emergency: None }
    }
}

impl Default for RuleSet {
    fn default() -> Self {
        let (parts, namespaces) = (RuleSetParts::default(), NamespaceOverrides::default());
        Self::new(parts, namespaces, Emergencies::default(), version_of(""))
    }
}

impl RuleSet {
    pub(crate) fn new(
        parts: RuleSetParts,
        namespaces: NamespaceOverrides,
        emergencies: Emergencies,
        version: String,
    ) -> Self {
        let (parts, namespaces, embedded) = (Arc::new(parts), Arc::new(namespaces), Arc::default());
        Self { parts, namespaces, embedded, emergencies, version, revision: 0 }
    }

    pub(crate) fn of_revision(self, revision: u64) -> Self {
        Self { revision, ..self }
    }

    /// Parses the text of a rules file. The set is accepted whole, or refused with all its
    /// problems.
    pub fn parse(text: &str) -> Result<Self, Problems> {
        file::parse(text, version_of(text))
    }

    /// Compiles the rows of a store, without overrides and emergencies that have expired at
    /// `now_ms` (milliseconds since the Unix epoch). `placement` has the meaning of that field in a
    /// rules file. The set is accepted whole, or refused with all its problems.
    pub fn compile(rule_rows: &RuleRows, placement: Option<&str>, now_ms: u64) -> Result<Self, Problems> {
        compile::compile(rule_rows, placement, now_ms)
    }

    /// The same set under other emergencies, without reading its rules again: a set of a million is
    /// there in the time that it takes to go through their names.
    pub fn with_emergencies(
        &self,
        emergency_revision: u64,
        rows: &[EmergencyRow],
        now_ms: u64,
    ) -> Result<Self, Problems> {
        let emergencies = compile::emergencies(self, rows, now_ms)?;
        let version = version_of_revisions(self.revision, emergency_revision);
        Ok(Self { emergencies, version, ..self.beside() })
    }

    /// The same set with other overrides of namespaces, in place of those that its store had. No
    /// rule is compiled again.
    #[must_use]
    pub fn with_namespaces(&self, namespaces: Arc<NamespaceOverrides>) -> Self {
        Self { namespaces, ..self.beside() }
    }

    /// The same set with these overrides of namespaces, which the server keeps itself.
    #[must_use]
    pub fn with_embedded(&self, embedded: Arc<NamespaceOverrides>) -> Self {
        Self { embedded, ..self.beside() }
    }

    /// Returns the overrides of namespaces that the server keeps itself.
    pub fn embedded(&self) -> &Arc<NamespaceOverrides> {
        &self.embedded
    }

    /// A copy that shares everything but the emergencies, of which there are few.
    fn beside(&self) -> Self {
        Self {
            parts: Arc::clone(&self.parts),
            namespaces: Arc::clone(&self.namespaces),
            embedded: Arc::clone(&self.embedded),
            emergencies: self.emergencies.clone(),
            version: self.version.clone(),
            revision: self.revision,
        }
    }

    /// The override that applies to an identifier of a namespace of direct limits: its own, else
    /// the matching wildcard with the most literal text.
    #[inline]
    pub fn namespace_override(
        &self,
        tenant: &str,
        namespace: &str,
        identifier: &str,
        now_ms: u64,
    ) -> Option<NamespaceOverride<'_>> {
        let embedded = self.embedded.find(tenant, namespace, identifier, now_ms);
        let stated = self.namespaces.find(tenant, namespace, identifier, now_ms);
        NamespaceOverride::of_both(embedded, stated)
    }

    /// The override of a tenant, or for every tenant, with exactly this identifier or pattern.
    pub fn namespace_override_named(
        &self,
        tenant: &str,
        namespace: &str,
        pattern: &str,
        now_ms: u64,
    ) -> Option<NamespaceOverride<'_>> {
        let sources = self.namespace_sources(tenant);
        sources.into_iter().find_map(|(source, tenant)| source.get(tenant, namespace, pattern, now_ms))
    }

    /// Lists overrides of a namespace in the order of their identifiers, `most` of those that
    /// follow
    /// `after`. Of several with the same identifier, only the one that applies.
    pub fn list_namespace_overrides(
        &self,
        tenant: &str,
        namespace: &str,
        (after, most): (Option<&str>, usize),
        now_ms: u64,
    ) -> Vec<NamespaceOverride<'_>> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut found = BTreeMap::new();
        for (source, tenant) in self.namespace_sources(tenant) {
            for one in source.list(tenant, namespace, from, now_ms).take(most) {
                found.entry(one.identifier).or_insert(one);
            }
        }
        found.into_values().take(most).collect()
    }

    /// The sources of overrides, those of the tenant first.
    fn namespace_sources<'t>(&self, tenant: &'t str) -> [(&NamespaceOverrides, Option<&'t str>); 4] {
        let (embedded, stated) = (&*self.embedded, &*self.namespaces);
        [(embedded, Some(tenant)), (stated, Some(tenant)), (embedded, None), (stated, None)]
    }

    /// The rules that apply to a request of `tenant`, in order: of higher priority first, then as
    /// in the file, or by name if they come from a store.
    pub fn matching<'s, 'd>(
        &'s self,
        tenant: &str,
        request: &'d Dimensions<'_>,
        now_ms: u64,
    ) -> impl Iterator<Item = RuleMatch<'s, 'd>> {
        self.parts.index.candidates(tenant, request).into_iter().filter_map(move |number| {
            let matched = self.parts.match_table.of(number, &self.parts.rules, tenant, request)?;
            let position = matched.position as usize;
            let rule = self.parts.rules.get(position)?;
            let terms = self.terms(rule, &matched, tenant, request, now_ms);
            Some(RuleMatch { position, rule, key: matched.key, terms })
        })
    }

    /// Returns the terms for a key of a rule: of the emergency, else of the override, else of the
    /// rule.
    fn terms(
        &self,
        rule: &Rule,
        matched: &MatchedRule<'_>,
        tenant: &str,
        request: &Dimensions<'_>,
        now_ms: u64,
    ) -> EffectiveTerms<'_> {
        let MatchedRule { position, kinds, ref key, terms: (limit, mode) } = *matched;
        let own = EffectiveTerms { limit, mode, override_name: None, emergency: None };
        // Rows may name a credential itself, or the digest that records and meters have.
        let clear = rule.clear_key(request);
        let both = [&key[..], clear.as_deref().unwrap_or_default()];
        let keys = if clear.is_some() { &both[..] } else { &both[..1] };
        let emergency = self.emergencies.find(position, tenant, keys, request, now_ms);
        if let Some((emergency, limit)) =
            emergency.and_then(|found| found.limit(limit.algorithm()).map(|limit| (found, limit)))
        {
            return EffectiveTerms {
                limit,
                mode: emergency.mode(),
                emergency: Some(emergency.terms()),
                ..own
            };
        }
        let found = self.parts.rule_overrides.find((position, kinds), tenant, keys, now_ms);
        let usual = found.map_or(own, |found| own.under(&found));
        match emergency {
            None => usual,
            // This emergency has no limit: it only lets requests pass.
            Some(emergency) => {
                EffectiveTerms { mode: emergency.mode(), emergency: Some(emergency.terms()), ..usual }
            }
        }
    }

    /// Returns the terms for a key of the rule at `position`, without emergencies; `None` if the
    /// rule's key has another number of parts. A part may be a pattern: the terms then hold for all
    /// matching keys without a more specific override.
    pub fn usual_terms(
        &self,
        position: usize,
        tenant: &str,
        key: &[&str],
        now_ms: u64,
    ) -> Option<EffectiveTerms<'_>> {
        let rule = self.rules().get(position).filter(|rule| rule.key.len() == key.len())?;
        let counted = rule.key.iter().zip(key).map(|(part, of)| as_counted(part, Pattern::new(*of)));
        let counted: Vec<Pattern> = counted.collect();
        let key: Vec<&str> = counted.iter().map(Pattern::as_str).collect();
        let position = small(position);
        let rule_overrides = &self.parts.rule_overrides;
        let found =
            rule_overrides.find((position, rule_overrides.kinds_of(position)), tenant, &[&key[..]], now_ms);
        let own = EffectiveTerms { limit: rule.limit, mode: rule.mode, override_name: None, emergency: None };
        Some(found.map_or(own, |found| own.under(&found)))
    }

    /// Returns the terms that the rule at `position` passes on to its overrides; `None` if it has
    /// none.
    pub fn inherited_terms(&self, position: usize) -> Option<InheritedTerms> {
        let rule = self.rules().get(position)?;
        let has_burst = self.parts.rule_overrides.inherits_burst(small(position))?;
        let (limit, mode) = (&rule.limit, rule.mode);
        let burst = has_burst.then(|| limit.burst());
        Some(InheritedTerms { algorithm: limit.algorithm(), period_us: limit.period_us(), burst, mode })
    }

    /// The rules that are for requests of `tenant`, with their places: those for everyone, then its
    /// own, each in order.
    pub fn rules_for(&self, tenant: &str) -> impl Iterator<Item = (usize, &Rule)> {
        self.parts.index.positions(tenant).map(|position| (position, &self.parts.rules[position]))
    }

    /// The dimensions that the rules for `tenant` look at: a request needs no others.
    pub fn dimensions_used(&self, tenant: &str) -> BTreeSet<&str> {
        let used = self.rule_dimensions(tenant);
        // Emergencies change rules: where there are none, a request needs no dimension.
        if self.has_rules_for(tenant) {
            used.into_iter().chain(self.emergency_dimensions(tenant)).collect()
        } else {
            used
        }
    }

    /// The same, but for those that only emergencies look at.
    pub fn rule_dimensions(&self, tenant: &str) -> BTreeSet<&str> {
        let used: BTreeSet<&str> =
            self.rules_for(tenant).flat_map(|(_, rule)| rule.dimensions_used()).collect();
        if used.is_empty() { used } else { used.into_iter().chain(self.placement()).collect() }
    }

    /// Whether any rule is for requests of `tenant`.
    pub fn has_rules_for(&self, tenant: &str) -> bool {
        self.rules_for(tenant).next().is_some()
    }

    /// The dimensions that only emergencies may look at for requests of `tenant`.
    pub fn emergency_dimensions(&self, tenant: &str) -> impl Iterator<Item = &str> {
        self.emergencies.dimensions_used(tenant)
    }

    /// Whether an emergency looks at a header field of requests.
    pub(crate) fn emergencies_look_at_headers(&self) -> bool {
        let mut conditions = self.emergencies.iter().flat_map(|emergency| &*emergency.when);
        conditions.any(|condition| condition.dimension.starts_with(HEADER_PREFIX))
    }

    /// Returns the dimension that selects the placement of a request's meters. Without it, all
    /// meters of a tenant have the same placement.
    pub fn placement(&self) -> Option<&str> {
        self.parts.placement.as_deref()
    }

    /// Whether requests of different placements share meters of a rule.
    pub fn crosses(&self, rule: &Rule) -> bool {
        self.placement().is_some_and(|dimension| rule.key.iter().all(|part| **part != *dimension))
    }

    /// All rules, in the order in which they apply.
    pub fn rules(&self) -> &[Rule] {
        &self.parts.rules
    }

    /// Returns warnings for the authors of rules about these regions: the first of them, and a
    /// count of the others.
    pub fn warnings(&self, fleet: &Fleet) -> Vec<String> {
        let mut findings = ProblemList::default();
        for rule in self.rules() {
            rule.warned(fleet).for_each(|warning| findings.add(warning));
        }
        findings.into_lines()
    }

    /// Returns the number of emergencies that have not expired at `now_ms`.
    pub fn emergencies_in_force(&self, now_ms: u64) -> usize {
        self.emergencies.iter().filter(|emergency| now_ms < emergency.expires_ms).count()
    }

    /// How many overrides there are.
    pub fn overrides(&self) -> usize {
        self.parts.rule_overrides.len() + self.namespaces.len() + self.embedded.len()
    }

    /// How many overrides have a `*`.
    pub fn wildcards(&self) -> usize {
        self.parts.rule_overrides.wildcards() + self.namespaces.wildcards() + self.embedded.wildcards()
    }

    /// Whether an override expires, so that the terms change without a new set.
    pub fn has_ends(&self) -> bool {
        self.parts.rule_overrides.has_ends()
    }

    /// Returns the identity of this set: the beginning of a digest of its text, or the revisions of
    /// a store.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The revision of the store that the set was compiled from; 0 for a file.
    pub fn revision(&self) -> u64 {
        self.revision
    }
}

/// Returns the identity of one state of a store.
pub(crate) fn version_of_revisions(revision: u64, emergency_revision: u64) -> String {
    format!("r{revision}e{emergency_revision}")
}

fn version_of(text: &str) -> String {
    let mut version = String::new();
    for byte in Sha256::digest(text.as_bytes()).iter().take(VERSION_DIGITS / 2) {
        // Writing to a string does not fail.
        let _ = write!(version, "{byte:02x}");
    }
    version
}
