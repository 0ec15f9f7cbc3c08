//! Overrides of direct limits: for some identifiers of a namespace, another limit than the request
//! states.

use std::collections::HashMap;
use std::fmt;
use std::hash::BuildHasher as _;
use std::ops::Bound;
use std::sync::Arc;

use foldhash::quality::RandomState;
use tidegate_core::Limit;

use super::index::{OverrideConflict, OverrideDraft, OverrideIndex, OverrideIndexBuilder};
use super::wildcards::WildcardTies;
use crate::compile;
use crate::index::{HashIndex, small};
use crate::pattern::Pattern;
use crate::problems::Problems;
use crate::rows::RuleRow;

/// The most namespace overrides of one tenant. Higher: more memory, some 200 bytes each, and each
/// change of an override takes longer, because all of them are indexed again.
pub const OVERRIDES_PER_TENANT_MAX: usize = 100_000;

/// The most characters of a namespace, and of an identifier.
pub const NAMESPACE_TEXT_CHARS_MAX: usize = 512;

/// The shortest period of a namespace override, in milliseconds.
pub const OVERRIDE_PERIOD_MS_MIN: u64 = 1_000;
/// The longest period of a namespace override: 366 days, as for every limit.
pub const OVERRIDE_PERIOD_MS_MAX: u64 = 366 * 24 * 3_600 * 1_000;

/// A namespace override as it was read and checked.
#[derive(Debug)]
pub(crate) struct NamespaceDraft {
    pub(crate) name: String,
    /// `None`: for every tenant.
    pub(crate) tenant: Option<Arc<str>>,
    pub(crate) namespace: Arc<str>,
    pub(crate) identifier: Pattern,
    pub(crate) limit: Limit,
    pub(crate) version: u32,
    pub(crate) expires_ms: Option<u64>,
}

/// A namespace override in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceOverride<'s> {
    /// The name of its row.
    pub name: &'s str,
    /// The identifiers that it applies to: a value, or a pattern with `*`.
    pub identifier: &'s str,
    /// Units that may pass in each period; 0 blocks.
    pub limit: u32,
    /// The period in milliseconds.
    pub period_ms: u64,
    /// The version of its row.
    pub version: u32,
    /// Whether it is for one tenant, not for every tenant.
    pub is_of_tenant: bool,
}

impl NamespaceOverride<'_> {
    /// Of two overrides that match an identifier, the greater applies: an exact one, then the one
    /// with the most literal text, then that of the tenant.
    fn precedence(&self) -> (bool, usize, bool) {
        let stars = self.identifier.bytes().filter(|byte| *byte == b'*').count();
        (stars == 0, self.identifier.len() - stars, self.is_of_tenant)
    }

    /// Returns the one that applies. Of two with the same precedence, the first does.
    pub(crate) fn of_both<'s>(
        first: Option<NamespaceOverride<'s>>,
        second: Option<NamespaceOverride<'s>>,
    ) -> Option<NamespaceOverride<'s>> {
        match (first, second) {
            (Some(first), Some(second)) if second.precedence() > first.precedence() => Some(second),
            (None, second) => second,
            (first, _) => first,
        }
    }
}

/// The namespace overrides of one source: a rules file, or a rule store. Immutable: a change makes
/// another one.
#[derive(Debug, Default)]
pub struct NamespaceOverrides {
    index: OverrideIndex,
    /// Numbers of namespaces, by tenant and name. The index has them as targets.
    numbers: HashIndex,
    namespaces: Box<[Namespace]>,
    /// Whether any is for every tenant.
    has_shared: bool,
    hasher: RandomState,
}

/// A namespace in which a tenant, or every tenant, has overrides.
#[derive(Debug)]
struct Namespace {
    tenant: Option<Arc<str>>,
    name: Arc<str>,
    /// Where its rows begin in the index, in the order of their identifiers.
    listed: Box<[u32]>,
}

impl NamespaceOverrides {
    /// Compiles the rows of a store that are overrides of namespaces, without those that have
    /// expired at
    /// `now_ms` (milliseconds since the Unix epoch). They are accepted whole, or refused with all
    /// their problems.
    pub fn compile(rows: &[RuleRow], now_ms: u64) -> Result<Self, Problems> {
        compile::namespace_overrides(rows, now_ms)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.namespaces.is_empty()
    }

    /// How many have a `*`.
    pub fn wildcards(&self) -> usize {
        self.index.wildcards()
    }

    /// The override that applies to an identifier: its own, else the matching wildcard with the
    /// most literal text. An override of the tenant comes before an equal one for every tenant.
    #[inline]
    pub fn find(
        &self,
        tenant: &str,
        namespace: &str,
        identifier: &str,
        now_ms: u64,
    ) -> Option<NamespaceOverride<'_>> {
        if self.is_empty() {
            return None;
        }
        let own = self.find_of(Some(tenant), namespace, identifier, now_ms);
        if !self.has_shared {
            return own;
        }
        NamespaceOverride::of_both(own, self.find_of(None, namespace, identifier, now_ms))
    }

    #[inline]
    fn find_of(
        &self,
        tenant: Option<&str>,
        namespace: &str,
        identifier: &str,
        now_ms: u64,
    ) -> Option<NamespaceOverride<'_>> {
        let number = self.number(tenant, namespace)?;
        self.row(self.index.position(number, identifier, now_ms)?, tenant.is_some())
    }

    /// The override with exactly this identifier or pattern.
    pub(crate) fn get(
        &self,
        tenant: Option<&str>,
        namespace: &str,
        pattern: &str,
        now_ms: u64,
    ) -> Option<NamespaceOverride<'_>> {
        let found = self.list(tenant, namespace, Bound::Included(pattern), now_ms).next()?;
        (found.identifier == pattern).then_some(found)
    }

    /// The overrides of a namespace in the order of their identifiers, from `from` on.
    pub(crate) fn list<'s>(
        &'s self,
        tenant: Option<&str>,
        namespace: &str,
        from: Bound<&str>,
        now_ms: u64,
    ) -> impl Iterator<Item = NamespaceOverride<'s>> + use<'s> {
        let is_of_tenant = tenant.is_some();
        let number = if self.is_empty() { None } else { self.number(tenant, namespace) };
        let namespace = number.and_then(|number| self.namespaces.get(number as usize));
        let listed = namespace.map(|namespace| &*namespace.listed).unwrap_or_default();
        let is_before = |at: &u32| {
            self.index.row(*at).is_some_and(|(_, identifier, _)| match from {
                Bound::Unbounded => false,
                Bound::Included(from) => identifier < from,
                Bound::Excluded(after) => identifier <= after,
            })
        };
        let first = listed.partition_point(is_before);
        let rows = listed.get(first..).unwrap_or_default();
        rows.iter().filter_map(move |at| {
            let is_in_force = self.index.row(*at).is_some_and(|(row, ..)| row.lives(now_ms));
            if is_in_force { self.row(*at, is_of_tenant) } else { None }
        })
    }

    fn row(&self, at: u32, is_of_tenant: bool) -> Option<NamespaceOverride<'_>> {
        let (row, identifier, limit) = self.index.row(at)?;
        Some(NamespaceOverride {
            name: row.name,
            identifier,
            limit: limit.amount(),
            period_ms: limit.period_us() / 1_000,
            version: row.version.unwrap_or_default(),
            is_of_tenant,
        })
    }

    #[inline]
    fn number(&self, tenant: Option<&str>, namespace: &str) -> Option<u32> {
        self.numbers.find(self.hasher.hash_one((tenant, namespace)), |number| {
            let found = self.namespaces.get(number as usize)?;
            (*found.name == *namespace && found.tenant.as_deref() == tenant).then_some(number)
        })
    }
}

/// A tenant, or every tenant, and a namespace.
type TenantNamespace = (Option<Arc<str>>, Arc<str>);

/// Takes namespace overrides one by one.
#[derive(Debug, Default)]
pub(crate) struct NamespaceOverridesBuilder {
    index: OverrideIndexBuilder,
    numbers: HashMap<TenantNamespace, u32, RandomState>,
    /// With the places of their rows.
    namespaces: Vec<(Namespace, Vec<u32>)>,
    /// How many each tenant has, and how many are for every tenant.
    counts: HashMap<Option<Arc<str>>, usize, RandomState>,
}

/// Why a namespace override cannot stand beside the others.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NamespaceConflict {
    /// More than [`OVERRIDES_PER_TENANT_MAX`].
    Tenant,
    /// As for an override of a rule.
    Override(OverrideConflict),
}

impl fmt::Display for NamespaceConflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tenant => {
                write!(f, ".tenant: more than {OVERRIDES_PER_TENANT_MAX} overrides of namespaces are for it")
            }
            Self::Override(conflict) => {
                conflict.describe(f, "identifier", "namespace", "tenant, namespace and identifier")
            }
        }
    }
}

impl NamespaceOverridesBuilder {
    /// Takes another override, if there is room for it.
    pub(crate) fn add(&mut self, draft: NamespaceDraft) -> Result<(), NamespaceConflict> {
        let NamespaceDraft { name, tenant, namespace, identifier, limit, version, expires_ms } = draft;
        let count = self.counts.entry(tenant.clone()).or_default();
        if *count >= OVERRIDES_PER_TENANT_MAX {
            return Err(NamespaceConflict::Tenant);
        }
        let next = small(self.namespaces.len());
        let number = *self.numbers.entry((tenant.clone(), Arc::clone(&namespace))).or_insert(next);
        if number == next {
            let namespace = Namespace { tenant, name: namespace, listed: Box::default() };
            self.namespaces.push((namespace, Vec::new()));
        }
        let draft = OverrideDraft {
            name,
            target: number,
            tenant: None,
            key: vec![identifier],
            limit,
            mode: None,
            priority: 0,
            expires_ms,
            rule_has_burst: false,
            version: Some(version),
        };
        let at = self.index.add(draft).map_err(NamespaceConflict::Override)?;
        *count += 1;
        if let Some((_, rows)) = self.namespaces.get_mut(number as usize) {
            rows.push(at);
        }
        Ok(())
    }

    /// Whether it has taken none.
    pub(crate) fn is_empty(&self) -> bool {
        self.index.len() == 0
    }

    /// Calls `look` with the name of each override.
    pub(crate) fn each_name(&self, look: impl FnMut(&str)) {
        self.index.each_name(look);
    }

    /// Builds the overrides. Calls `tell` with the name of each conflicting override, in the order
    /// of the input.
    pub(crate) fn finish(self, mut tell: impl FnMut(&str, NamespaceConflict)) -> NamespaceOverrides {
        let Self { index, namespaces, .. } = self;
        let index = index.with_ties(WildcardTies::ByKey);
        let index = index.finish(|name, conflict| tell(name, NamespaceConflict::Override(conflict)));
        let hasher = RandomState::default();
        let mut numbers: Vec<(u64, u32)> = Vec::with_capacity(namespaces.len());
        let mut has_shared = false;
        let mut listed = |(number, (namespace, mut rows)): (usize, (Namespace, Vec<u32>))| {
            let identifier = |at: &u32| index.row(*at).map(|(_, identifier, _)| identifier);
            rows.sort_by(|a, b| identifier(a).cmp(&identifier(b)));
            has_shared |= namespace.tenant.is_none();
            let hash = hasher.hash_one((namespace.tenant.as_deref(), &*namespace.name));
            numbers.push((hash, small(number)));
            Namespace { listed: rows.into(), ..namespace }
        };
        let namespaces = namespaces.into_iter().enumerate().map(&mut listed).collect();
        NamespaceOverrides { numbers: HashIndex::new(&numbers), index, namespaces, has_shared, hasher }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::super::wildcards::{LOOSE_WILDCARDS_MAX, WILDCARDS_PER_TARGET_MAX};
    use super::*;

    fn draft(tenant: Option<&str>, namespace: &str, identifier: &str, limit: u64) -> NamespaceDraft {
        NamespaceDraft {
            name: format!("{tenant:?}/{namespace}/{identifier}"),
            tenant: tenant.map(Arc::from),
            namespace: namespace.into(),
            identifier: Pattern::new(identifier),
            limit: Limit::sliding_window(limit, Duration::from_secs(1)).expect("in range"),
            version: 7,
            expires_ms: None,
        }
    }

    fn built(drafts: impl IntoIterator<Item = NamespaceDraft>) -> NamespaceOverrides {
        let mut builder = NamespaceOverridesBuilder::default();
        for draft in drafts {
            builder.add(draft).expect("there is room");
        }
        builder.finish(|name, conflict| panic!("{name}{conflict}"))
    }

    fn own(identifier: &str) -> NamespaceDraft {
        draft(Some("t"), "n", identifier, 1)
    }

    #[test]
    fn exact_identifiers_come_first_then_the_most_literal_wildcard() {
        let overrides = built(["*", "a*", "*c", "ab*", "*bc", "abc", "a*c*"].map(own));
        let applying =
            |identifier: &str| overrides.find("t", "n", identifier, 0).map(|found| found.identifier);
        assert_eq!(applying("abc"), Some("abc"));
        // With equal literal length, text order decides: `*` comes before letters.
        assert_eq!(applying("abbc"), Some("*bc"));
        assert_eq!(applying("abd"), Some("ab*"));
        assert_eq!(applying("axc"), Some("a*c*"));
        assert_eq!(applying("xc"), Some("*c"));
        assert_eq!(applying(""), Some("*"));
        assert_eq!(overrides.find("t", "other", "abc", 0), None);
        assert_eq!(overrides.find("u", "n", "abc", 0), None);
        assert_eq!((overrides.len(), overrides.wildcards()), (7, 6));
        assert_eq!(
            overrides.find("t", "n", "abc", 0).map(|found| (found.version, found.period_ms)),
            Some((7, 1_000))
        );
    }

    #[test]
    fn overrides_of_the_tenant_come_before_equal_ones_for_every_tenant() {
        let shared = |identifier| draft(None, "n", identifier, 1);
        let overrides = built([own("a*"), own("b"), shared("*"), shared("ab*"), shared("b"), shared("c")]);
        let applying = |tenant, identifier| {
            overrides.find(tenant, "n", identifier, 0).map(|found| (found.identifier, found.is_of_tenant))
        };
        assert_eq!(applying("t", "b"), Some(("b", true)));
        assert_eq!(applying("u", "b"), Some(("b", false)));
        assert_eq!(applying("t", "c"), Some(("c", false)));
        assert_eq!(applying("t", "ac"), Some(("a*", true)));
        assert_eq!(applying("t", "abc"), Some(("ab*", false)), "more of it is literal");
        assert_eq!(applying("u", "ac"), Some(("*", false)));
    }

    #[test]
    fn expired_overrides_apply_no_more() {
        let mut ends = own("a");
        ends.expires_ms = Some(5);
        let overrides = built([ends, own("*")]);
        let applying = |now_ms| overrides.find("t", "n", "a", now_ms).map(|found| found.identifier);
        assert_eq!((applying(4), applying(5)), (Some("a"), Some("*")));
        assert_eq!(overrides.get(Some("t"), "n", "a", 4).map(|found| found.identifier), Some("a"));
        assert_eq!(overrides.get(Some("t"), "n", "a", 5), None);
    }

    #[test]
    fn each_tenant_and_namespace_has_a_maximum() {
        let mut builder = NamespaceOverridesBuilder::default();
        for at in 0..WILDCARDS_PER_TARGET_MAX {
            assert_eq!(builder.add(own(&format!("{at}*"))), Ok(()));
        }
        let full = Err(NamespaceConflict::Override(OverrideConflict::WildcardsOfTarget));
        assert_eq!(builder.add(own("x*")), full);
        assert_eq!(builder.add(draft(Some("u"), "n", "x*", 1)), Ok(()), "of another tenant");
        assert_eq!(builder.add(draft(Some("t"), "m", "x*", 1)), Ok(()), "of another namespace");
        for at in WILDCARDS_PER_TARGET_MAX + 1..OVERRIDES_PER_TENANT_MAX {
            assert_eq!(builder.add(own(&at.to_string())), Ok(()));
        }
        let problem = builder.add(own("x")).expect_err("the tenant has too many").to_string();
        assert_eq!(problem, ".tenant: more than 100000 overrides of namespaces are for it");
        assert_eq!(builder.add(draft(Some("u"), "n", "x", 1)), Ok(()), "of another tenant");
    }

    #[test]
    fn loose_wildcards_and_equal_identifiers_are_refused() {
        let mut builder = NamespaceOverridesBuilder::default();
        for at in 0..=LOOSE_WILDCARDS_MAX {
            builder.add(own(&format!("*{at:03}*"))).expect("found at the end");
        }
        builder.add(NamespaceDraft { name: "again".to_owned(), ..own("*000*") }).expect("found at the end");
        let mut problems = Vec::new();
        builder.finish(|_, conflict| problems.push(conflict.to_string()));
        problems.sort_unstable();
        let loose = ".identifier: more than 64 overrides of this namespace neither begin nor end with \
                     anything but `*`";
        assert!(problems.iter().any(|problem| problem == loose), "{problems:?}");
        let same = "is for the same tenant, namespace and identifier";
        assert!(problems.iter().any(|problem| problem.ends_with(same)), "{problems:?}");
    }

    #[test]
    fn lists_are_in_the_order_of_identifiers() {
        let overrides =
            built(["d", "*", "c", "a*"].map(own).into_iter().chain([draft(Some("t"), "m", "b", 1)]));
        let listed =
            |from| overrides.list(Some("t"), "n", from, 0).map(|found| found.identifier).collect::<Vec<_>>();
        assert_eq!(listed(Bound::Unbounded), ["*", "a*", "c", "d"]);
        assert_eq!(listed(Bound::Excluded("a*")), ["c", "d"]);
        assert_eq!(listed(Bound::Excluded("b")), ["c", "d"], "one that is gone");
        assert_eq!(listed(Bound::Excluded("d")), [""; 0]);
    }

    proptest! {
        /// The index applies the override that the definition selects: the exact one, else the one
        /// with the most literal text, else the first in the order of the text.
        #[test]
        fn lookups_agree_with_a_plain_list(
            drafts in prop::collection::btree_set(("[tu]", "[mn]", "[ab*]{1,3}"), 0..40),
            asked in prop::collection::vec(("[tu]", "[mn]", "[ab]{0,3}"), 8),
        ) {
            let overrides = built(drafts.iter().map(|(tenant, namespace, identifier)| {
                draft(Some(tenant), namespace, identifier, 1)
            }));
            prop_assert_eq!(overrides.len(), drafts.len());
            for (tenant, namespace, identifier) in &asked {
                let of = drafts.iter().filter(|of| (&of.0, &of.1) == (tenant, namespace));
                let matching = of.map(|of| Pattern::new(of.2.as_str())).filter(|of| of.matches(identifier));
                let rank = |of: &Pattern| (of.is_wild(), usize::MAX - of.literal_bytes(), of.as_str().to_owned());
                let expected = matching.min_by_key(rank);
                let found = overrides.find(tenant, namespace, identifier, 0).map(|found| found.identifier);
                prop_assert_eq!(found, expected.as_ref().map(Pattern::as_str));
            }
            for (tenant, namespace, identifier) in &drafts {
                let found = overrides.get(Some(tenant), namespace, identifier, 0);
                prop_assert_eq!(found.map(|found| found.identifier), Some(identifier.as_str()));
            }
        }
    }
}
