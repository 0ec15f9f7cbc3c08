//! The index of overrides by target and key. Exact keys are found by hash, patterns by their prefix
//! or suffix.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher as _, Hash as _, Hasher as _};
use std::sync::Arc;

use foldhash::quality::RandomState;
use tidegate_core::{Algorithm, Limit};

use super::packed::{self, PackedOverride};
use super::wildcards::{LOOSE_WILDCARDS_MAX, WILDCARDS_PER_TARGET_MAX, Wildcard, WildcardTies, Wildcards};
use crate::index::{HashIndex, Pages, small};
use crate::pattern::Pattern;
use crate::rule::Mode;

/// The most overrides of a set. Higher: more memory, some 100 bytes each, and a slower start.
pub const OVERRIDES_MAX: usize = 2_000_000;
/// The most overrides of a set that have a `*`. Higher: more memory, some 500 bytes each.
pub const WILDCARDS_MAX: usize = 100_000;
/// The most bytes that all overrides have together: they are found by 32 bits.
pub(crate) const TEXT_BYTES_MAX: usize = u32::MAX as usize;

/// An override as it was read and checked.
#[derive(Debug)]
pub(crate) struct OverrideDraft {
    pub(crate) name: String,
    /// The position of its rule, or the number of its namespace.
    pub(crate) target: u32,
    pub(crate) tenant: Option<Arc<str>>,
    pub(crate) key: Vec<Pattern>,
    pub(crate) limit: Limit,
    pub(crate) mode: Option<Mode>,
    pub(crate) priority: i32,
    pub(crate) expires_ms: Option<u64>,
    /// Whether its rule states a burst. The override inherits it unless it states its own.
    pub(crate) rule_has_burst: bool,
    /// The version of its row, if decisions under the override state that.
    pub(crate) version: Option<u32>,
}

/// An override that applies to a key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OverrideMatch<'s> {
    pub(crate) name: &'s str,
    pub(crate) limit: Limit,
    /// `None`: the mode of the rule.
    pub(crate) mode: Option<Mode>,
}

/// Why an override cannot stand beside the others.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum OverrideConflict {
    /// One of the same name.
    Name(String),
    /// One for the same target, tenant and key, by name.
    Identical(String),
    /// More than [`WILDCARDS_MAX`].
    Wildcards,
    /// More than [`WILDCARDS_PER_TARGET_MAX`].
    WildcardsOfTarget,
    /// More than [`LOOSE_WILDCARDS_MAX`].
    LooseOfTarget,
    /// More than [`TEXT_BYTES_MAX`].
    Text,
}

/// The problem of an override of a rule. Overrides of namespaces have words of their own.
impl fmt::Display for OverrideConflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.describe(f, "key", "rule", "rule, tenant and key")
    }
}

impl OverrideConflict {
    /// Writes the problem, with the field of the key, the target, and the fields that are the same.
    pub(super) fn describe(
        &self,
        f: &mut fmt::Formatter<'_>,
        field: &str,
        target: &str,
        same: &str,
    ) -> fmt::Result {
        match self {
            Self::Name(name) => write!(f, ".name: {name:?} is given twice"),
            Self::Identical(name) => write!(f, ".{field}: override {name:?} is for the same {same}"),
            Self::Wildcards => write!(f, ".{field}: more than {WILDCARDS_MAX} overrides have a `*`"),
            Self::WildcardsOfTarget => {
                write!(
                    f,
                    ".{field}: more than {WILDCARDS_PER_TARGET_MAX} overrides of this {target} have a `*`"
                )
            }
            Self::LooseOfTarget => write!(
                f,
                ".{field}: more than {LOOSE_WILDCARDS_MAX} overrides of this {target} neither begin nor end \
                 with anything but `*`"
            ),
            Self::Text => {
                write!(f, ".name: the names and keys of all overrides have more than {TEXT_BYTES_MAX} bytes")
            }
        }
    }
}

/// The number of no tenant: of overrides that are for every one.
const EVERYONE: u32 = u32::MAX;

/// Bits for the kinds of overrides of a target. Most rules have none, and need no lookup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct OverrideKinds(pub(crate) u8);

impl OverrideKinds {
    /// For every tenant, by an exact key.
    const EXACT: u8 = 1;
    /// For one tenant, by an exact key.
    const EXACT_OF_TENANT: u8 = 2;
    const WILD: u8 = 4;
    /// The rule states a burst, which its overrides of any kind inherit.
    const WITH_BURST: u8 = 8;

    fn has(self, kind: u8) -> bool {
        self.0 & kind != 0
    }
}

/// All overrides of a set.
#[derive(Debug, Default)]
pub(crate) struct OverrideIndex {
    /// Where rows begin, by target, tenant and key.
    exact: HashIndex,
    /// By target.
    wild: HashMap<u32, Wildcards, RandomState>,
    wildcards: usize,
    /// Whether any of them ends by itself.
    has_ends: bool,
    /// By target, as far as any have overrides.
    kinds: Vec<OverrideKinds>,
    /// Every override as a [`PackedOverride`].
    rows: Pages,
    /// Limits and modes that differ.
    effects: Vec<(Limit, Option<Mode>)>,
    tenants: HashMap<Arc<str>, u32, RandomState>,
    hasher: RandomState,
}

/// Terms of an override: algorithm, amount, burst, period and mode.
type OverrideTerms = (Algorithm, u32, u32, u64, Option<Mode>);

/// Takes overrides one by one.
#[derive(Debug, Default)]
pub(crate) struct OverrideIndexBuilder {
    built: OverrideIndex,
    rows: Vec<u8>,
    exact: Vec<(u64, u32)>,
    wild: HashMap<u32, Vec<Wildcard>, RandomState>,
    ties: WildcardTies,
    effects: HashMap<OverrideTerms, u32, RandomState>,
    /// By the hash of its name.
    named: Vec<(u64, u32)>,
}

/// Two overrides of which the second cannot be, or one too many, by their rows.
pub(super) type OverrideClash = (u32, fn(String) -> OverrideConflict, u32);

impl OverrideIndexBuilder {
    /// Room for about so many.
    pub(crate) fn with_capacity(overrides: usize) -> Self {
        let (exact, named) = (Vec::with_capacity(overrides), Vec::with_capacity(overrides));
        Self { exact, named, ..Self::default() }
    }

    pub(crate) fn with_ties(self, ties: WildcardTies) -> Self {
        Self { ties, ..self }
    }

    /// How many it has taken.
    pub(crate) fn len(&self) -> usize {
        self.named.len()
    }

    /// Calls `look` with the name of each override.
    pub(crate) fn each_name(&self, mut look: impl FnMut(&str)) {
        for (_, at) in &self.named {
            if let Some((row, _)) = PackedOverride::read(&self.rows, *at) {
                look(row.name);
            }
        }
    }

    /// Takes another override, if there is room for it, and returns where its row begins.
    pub(crate) fn add(&mut self, draft: OverrideDraft) -> Result<u32, OverrideConflict> {
        let key_bytes: usize = draft.key.iter().map(|part| packed::PART_BYTES + part.as_str().len()).sum();
        if self.rows.len() + packed::HEAD_BYTES_MAX + draft.name.len() + key_bytes > TEXT_BYTES_MAX {
            return Err(OverrideConflict::Text);
        }
        let is_wild = draft.key.iter().any(Pattern::is_wild);
        if is_wild {
            self.has_room_for_wildcard(draft.target)?;
        }
        let tenant = draft.tenant.as_ref().map_or(EVERYONE, |tenant| self.built.number(tenant));
        let at = self.put(&draft, tenant);
        self.built.has_ends |= draft.expires_ms.is_some();
        self.named.push((self.built.hasher.hash_one(&*draft.name), at));
        let kinds = self.built.add_kind(draft.target);
        kinds.0 |= if draft.rule_has_burst { OverrideKinds::WITH_BURST } else { 0 };
        if is_wild {
            kinds.0 |= OverrideKinds::WILD;
            self.built.wildcards += 1;
            let OverrideDraft { name, priority, key, .. } = draft;
            let wildcard = Wildcard { row: at, tenant, name, priority, key };
            self.wild.entry(draft.target).or_default().push(wildcard);
            return Ok(at);
        }
        kinds.0 |= if tenant == EVERYONE { OverrideKinds::EXACT } else { OverrideKinds::EXACT_OF_TENANT };
        let hash = self.built.hash(draft.target, tenant, draft.key.iter().map(Pattern::as_str));
        self.exact.push((hash, at));
        Ok(at)
    }

    /// Writes the row of an override; where it begins.
    fn put(&mut self, draft: &OverrideDraft, tenant: u32) -> u32 {
        let at = small(self.rows.len());
        let row = PackedOverride {
            target: draft.target,
            tenant: (tenant != EVERYONE).then_some(tenant),
            effect: self.effect(draft.limit, draft.mode),
            end_ms: draft.expires_ms,
            version: draft.version,
            name: &draft.name,
        };
        row.put(draft.key.iter().map(Pattern::as_str), &mut self.rows);
        at
    }

    fn has_room_for_wildcard(&self, target: u32) -> Result<(), OverrideConflict> {
        let of_target = self.wild.get(&target).map_or(0, Vec::len);
        match (self.built.wildcards < WILDCARDS_MAX, of_target < WILDCARDS_PER_TARGET_MAX) {
            (true, true) => Ok(()),
            (false, _) => Err(OverrideConflict::Wildcards),
            (true, false) => Err(OverrideConflict::WildcardsOfTarget),
        }
    }

    fn effect(&mut self, limit: Limit, mode: Option<Mode>) -> u32 {
        let same = (limit.algorithm(), limit.amount(), limit.burst(), limit.period_us(), mode);
        *self.effects.entry(same).or_insert_with(|| {
            self.built.effects.push((limit, mode));
            small(self.built.effects.len() - 1)
        })
    }

    /// Builds the overrides. Calls `tell` with the name of each conflicting override, in the order
    /// of the input.
    pub(crate) fn finish(mut self, mut tell: impl FnMut(&str, OverrideConflict)) -> OverrideIndex {
        let rows = Pages::new(&self.rows);
        drop(self.rows);
        let row = |at: u32| PackedOverride::read(&rows, at);
        let name = |at| row(at).map(|(row, _)| row.name).unwrap_or_default();
        self.named.sort_unstable();
        let twice = repeated(&self.named, |a, b| name(a) == name(b));
        let mut clashes: Vec<OverrideClash> =
            twice.map(|(a, b)| (b, OverrideConflict::Name as fn(_) -> _, a)).collect();
        drop(self.named);
        self.exact.sort_unstable();
        let same = |a, b| {
            let parts = |at| row(at).map(|(row, key)| (row.target, row.tenant, key.collect::<Vec<_>>()));
            parts(a) == parts(b)
        };
        clashes.extend(
            repeated(&self.exact, same).map(|(a, b)| (b, OverrideConflict::Identical as fn(_) -> _, a)),
        );
        for (target, wildcards) in self.wild {
            let ranked = Wildcards::new(wildcards, self.ties, &mut clashes);
            self.built.wild.insert(target, ranked);
        }
        clashes.sort_unstable_by_key(|(at, ..)| *at);
        for (at, misfit, other) in &clashes {
            tell(name(*at), misfit(name(*other).to_owned()));
        }
        OverrideIndex { exact: HashIndex::new(&self.exact), rows, ..self.built }
    }
}

/// Returns adjacent items that are equal, also in their hash. There may be as many as there are
/// overrides.
fn repeated(ordered: &[(u64, u32)], same: impl Fn(u32, u32) -> bool) -> impl Iterator<Item = (u32, u32)> {
    let pairs = ordered.iter().zip(ordered.iter().skip(1));
    pairs.filter(move |(a, b)| a.0 == b.0 && same(a.1, b.1)).map(|(a, b)| (a.1, b.1))
}

impl OverrideIndex {
    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.exact.len() + self.wildcards
    }

    /// How many have a `*`.
    pub(crate) fn wildcards(&self) -> usize {
        self.wildcards
    }

    /// Whether any of them ends by itself.
    pub(crate) fn has_ends(&self) -> bool {
        self.has_ends
    }

    /// The override that applies to a key of a target: the exact one of the tenant, the exact one
    /// for every tenant, or the first wildcard in order that matches. The key may have several
    /// forms, as one with a credential.
    pub(crate) fn find(
        &self,
        (target, kinds): (u32, OverrideKinds),
        tenant: &str,
        keys: &[&[&str]],
        now_ms: u64,
    ) -> Option<OverrideMatch<'_>> {
        if kinds == OverrideKinds::default() {
            return None;
        }
        let tenant = if self.tenants.is_empty() { None } else { self.tenants.get(tenant).copied() };
        let own = tenant.filter(|_| kinds.has(OverrideKinds::EXACT_OF_TENANT));
        let exact = |tenant| keys.iter().find_map(|key| self.exact(target, tenant, key, now_ms));
        let own = own.and_then(|tenant| exact(Some(tenant)));
        let of_all = || kinds.has(OverrideKinds::EXACT).then(|| exact(None)).flatten();
        let first_wild = || keys.iter().find_map(|key| self.wildcard(target, tenant, key, now_ms));
        let wild = || kinds.has(OverrideKinds::WILD).then(first_wild).flatten();
        let (_, row) = own.or_else(of_all).or_else(wild)?;
        let (limit, mode) = self.effects[row.effect as usize];
        Some(OverrideMatch { name: row.name, limit, mode })
    }

    /// Where the row begins that applies to a key of one part, of a target whose overrides are all
    /// for every tenant.
    #[inline]
    pub(crate) fn position(&self, target: u32, key: &str, now_ms: u64) -> Option<u32> {
        let kinds = self.kinds_of(target);
        let exact =
            if kinds.has(OverrideKinds::EXACT) { self.exact(target, None, &[key], now_ms) } else { None };
        let wild =
            || kinds.has(OverrideKinds::WILD).then(|| self.wildcard(target, None, &[key], now_ms)).flatten();
        exact.or_else(wild).map(|(at, _)| at)
    }

    /// Reads the row that begins at `at`: its head, the first part of its key, and its limit.
    pub(crate) fn row(&self, at: u32) -> Option<(PackedOverride<'_>, &str, Limit)> {
        let (row, mut key) = PackedOverride::read(&self.rows, at)?;
        let key = str::from_utf8(key.next()?).ok()?;
        Some((row, key, self.effects.get(row.effect as usize)?.0))
    }

    fn exact(
        &self,
        target: u32,
        tenant: Option<u32>,
        key: &[&str],
        now_ms: u64,
    ) -> Option<(u32, PackedOverride<'_>)> {
        let hash = self.hash(target, tenant.unwrap_or(EVERYONE), key.iter().copied());
        self.exact.find(hash, |at| {
            let (row, parts) = PackedOverride::read(&self.rows, at)?;
            let is_it = (row.target, row.tenant) == (target, tenant)
                && parts.eq(key.iter().map(|part| part.as_bytes()));
            (is_it && row.lives(now_ms)).then_some((at, row))
        })
    }

    fn wildcard(
        &self,
        target: u32,
        tenant: Option<u32>,
        key: &[&str],
        now_ms: u64,
    ) -> Option<(u32, PackedOverride<'_>)> {
        self.wild.get(&target)?.first(key, |at| {
            let (row, patterns) = PackedOverride::read(&self.rows, at)?;
            let is_in_force = (row.tenant.is_none() || row.tenant == tenant) && row.lives(now_ms);
            is_in_force.then_some(((at, row), patterns))
        })
    }

    fn number(&mut self, tenant: &Arc<str>) -> u32 {
        let next = small(self.tenants.len());
        *self.tenants.entry(Arc::clone(tenant)).or_insert(next)
    }

    /// Returns the kinds of overrides of a target.
    pub(crate) fn kinds_of(&self, target: u32) -> OverrideKinds {
        self.kinds.get(target as usize).copied().unwrap_or_default()
    }

    /// Whether the overrides of a rule inherit a burst from it; `None` if it has no overrides.
    pub(crate) fn inherits_burst(&self, rule: u32) -> Option<bool> {
        let kinds = self.kinds_of(rule);
        (kinds != OverrideKinds::default()).then(|| kinds.has(OverrideKinds::WITH_BURST))
    }

    fn add_kind(&mut self, target: u32) -> &mut OverrideKinds {
        let at = target as usize;
        self.kinds.resize(self.kinds.len().max(at + 1), OverrideKinds::default());
        &mut self.kinds[at]
    }

    fn hash<'k>(&self, target: u32, tenant: u32, key: impl Iterator<Item = &'k str>) -> u64 {
        let mut hasher = self.hasher.build_hasher();
        hasher.write_u64(u64::from(target) << 32 | u64::from(tenant));
        key.for_each(|part| part.hash(&mut hasher));
        hasher.finish()
    }
}
