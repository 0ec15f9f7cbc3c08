//! Overrides of rules: another limit for some keys of a rule. Exact keys are found by hash, patterns by what they begin or end with.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::{BuildHasher as _, Hash as _, Hasher as _, RandomState};
use std::sync::Arc;

use tidegate_core::{Algorithm, Limit};

use crate::index::{Hashed, Literals, small};
use crate::pattern::Pattern;
use crate::rule::Mode;

/// The most overrides of a set. Higher: more memory, some 100 bytes each, and a slower start.
pub const RULE_OVERRIDES_MAX: usize = 2_000_000;
/// The most overrides of a set that have a `*`. Higher: more memory, some 500 bytes each.
pub const WILDCARDS_MAX: usize = 100_000;
/// The most overrides with a `*` of one rule. A request whose key has no override of its own looks at those that begin, or
/// end, as its key does: at worst at each of them.
pub const WILDCARDS_PER_RULE_MAX: usize = 1_000;
/// The most overrides of one rule that neither begin nor end with anything, such as `*x*`. Each is looked at.
pub const LOOSE_WILDCARDS_PER_RULE_MAX: usize = 64;
/// The most bytes that the names and keys of all overrides have together: they are found by 32 bits.
pub(crate) const TEXT_BYTES_MAX: usize = u32::MAX as usize;

/// An override as it was read and checked.
#[derive(Debug)]
pub(crate) struct Draft {
    pub(crate) name: String,
    /// The position of its rule.
    pub(crate) rule: u32,
    pub(crate) tenant: Option<Arc<str>>,
    pub(crate) key: Vec<Pattern>,
    pub(crate) limit: Limit,
    pub(crate) mode: Option<Mode>,
    pub(crate) priority: i32,
    pub(crate) expires_ms: Option<u64>,
}

/// What an override says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found<'s> {
    pub(crate) name: &'s str,
    pub(crate) limit: Limit,
    /// The rule's own, where it says none.
    pub(crate) mode: Option<Mode>,
}

/// Why an override cannot stand beside the others.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Misfit {
    /// One of the same name.
    Name(String),
    /// One for the same rule, tenant and key, by name.
    Identical(String),
    /// More than [`WILDCARDS_MAX`].
    Wildcards,
    /// More than [`WILDCARDS_PER_RULE_MAX`].
    WildcardsOfRule,
    /// More than [`LOOSE_WILDCARDS_PER_RULE_MAX`].
    LooseOfRule,
    /// More than [`TEXT_BYTES_MAX`].
    Text,
}

/// The number of no tenant: of overrides that are for every one.
const EVERYONE: u32 = u32::MAX;
/// In the place of an end that never comes.
const NEVER: u32 = u32::MAX;

/// One override, as small as it can be told.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Where its name begins, and behind that its key, if that is exact.
    text: u32,
    rule: u32,
    tenant: u32,
    effect: u32,
    /// Where it is told when it ends; [`NEVER`] if it does not.
    end: u32,
    name_bytes: u8,
    parts: u8,
}

/// What kinds of overrides a rule has: most have none, and need not be looked up.
#[derive(Clone, Copy, Debug, Default)]
struct Kinds {
    exact: bool,
    exact_of_tenant: bool,
    wild: bool,
}

/// All overrides of a set.
#[derive(Debug, Default)]
pub(crate) struct Exceptions {
    exact: Hashed<Entry>,
    /// By rule.
    wild: HashMap<u32, Wildcards>,
    wildcards: usize,
    /// By rule, as far as any have overrides.
    kinds: Vec<Kinds>,
    text: Vec<u8>,
    /// Limits and modes that differ.
    effects: Vec<(Limit, Option<Mode>)>,
    ends_ms: Vec<u64>,
    tenants: HashMap<Arc<str>, u32>,
    hasher: RandomState,
}

/// The overrides with a `*` of one rule.
#[derive(Debug)]
struct Wildcards {
    /// In the order in which they apply.
    ranked: Box<[Wildcard]>,
    /// By part of the key: those of which it is the part that spells out most.
    by_part: Box<[(Literals, Literals)]>,
    loose: Box<[u32]>,
}

#[derive(Debug)]
struct Wildcard {
    entry: Entry,
    priority: i32,
    key: Box<[Pattern]>,
}

/// Takes overrides one by one.
#[derive(Debug, Default)]
pub(crate) struct Builder {
    built: Exceptions,
    exact: Vec<(u64, Entry)>,
    wild: HashMap<u32, Vec<Wildcard>>,
    effects: HashMap<(Algorithm, u32, u32, u64, Option<Mode>), u32>,
    /// By the hash of its name.
    named: Vec<(u64, Entry)>,
}

/// Two overrides of which the second cannot be, or one too many.
type Clash = (Entry, fn(String) -> Misfit, Entry);

impl Builder {
    /// Room for about so many.
    pub(crate) fn with_capacity(overrides: usize) -> Self {
        let (exact, named) = (Vec::with_capacity(overrides), Vec::with_capacity(overrides));
        Self { exact, named, ..Self::default() }
    }

    /// Takes another override, if there is room for it.
    pub(crate) fn add(&mut self, draft: Draft) -> Result<(), Misfit> {
        let key_bytes: usize = draft.key.iter().map(|part| LENGTH_BYTES + part.as_str().len()).sum();
        if self.built.text.len() + draft.name.len() + key_bytes > TEXT_BYTES_MAX {
            return Err(Misfit::Text);
        }
        let is_wild = draft.key.iter().any(Pattern::is_wild);
        if is_wild {
            self.has_room_for_wildcard(draft.rule)?;
        }
        let entry = self.entry(&draft);
        self.built.text.extend_from_slice(draft.name.as_bytes());
        self.named.push((self.built.hasher.hash_one(&*draft.name), entry));
        let kinds = self.built.kinds_of(draft.rule);
        if is_wild {
            kinds.wild = true;
            self.built.wildcards += 1;
            let wildcard = Wildcard { entry, priority: draft.priority, key: draft.key.into() };
            self.wild.entry(draft.rule).or_default().push(wildcard);
            return Ok(());
        }
        if entry.tenant == EVERYONE {
            kinds.exact = true;
        } else {
            kinds.exact_of_tenant = true;
        }
        for part in &draft.key {
            let bytes = u16::try_from(part.as_str().len()).unwrap_or(u16::MAX);
            self.built.text.extend_from_slice(&bytes.to_le_bytes());
            self.built.text.extend_from_slice(part.as_str().as_bytes());
        }
        let hash = self.built.hash(entry.rule, entry.tenant, self.built.parts(&entry));
        self.exact.push((hash, entry));
        Ok(())
    }

    fn entry(&mut self, draft: &Draft) -> Entry {
        let end = draft.expires_ms.map(|end_ms| {
            self.built.ends_ms.push(end_ms);
            small(self.built.ends_ms.len() - 1)
        });
        Entry {
            text: small(self.built.text.len()),
            rule: draft.rule,
            tenant: draft.tenant.as_ref().map_or(EVERYONE, |tenant| self.built.number(tenant)),
            effect: self.effect(draft.limit, draft.mode),
            end: end.unwrap_or(NEVER),
            // Names are shorter than this, and keys have fewer parts.
            name_bytes: u8::try_from(draft.name.len()).unwrap_or(u8::MAX),
            parts: u8::try_from(draft.key.len()).unwrap_or(u8::MAX),
        }
    }

    fn has_room_for_wildcard(&self, rule: u32) -> Result<(), Misfit> {
        let of_rule = self.wild.get(&rule).map_or(0, Vec::len);
        match (self.built.wildcards < WILDCARDS_MAX, of_rule < WILDCARDS_PER_RULE_MAX) {
            (true, true) => Ok(()),
            (false, _) => Err(Misfit::Wildcards),
            (true, false) => Err(Misfit::WildcardsOfRule),
        }
    }

    fn effect(&mut self, limit: Limit, mode: Option<Mode>) -> u32 {
        let same = (limit.algorithm(), limit.amount(), limit.burst(), limit.period_us(), mode);
        *self.effects.entry(same).or_insert_with(|| {
            self.built.effects.push((limit, mode));
            small(self.built.effects.len() - 1)
        })
    }

    /// All of them. Those that cannot stand beside others are told by name, in the order in which they were given.
    pub(crate) fn finish(mut self, mut tell: impl FnMut(&str, Misfit)) -> Exceptions {
        let built = &self.built;
        let place = |entry: &Entry| entry.text;
        self.named.sort_unstable_by_key(|(hash, entry)| (*hash, place(entry)));
        let twice = repeated(&self.named, |a, b| built.name(a) == built.name(b));
        let mut clashes: Vec<Clash> = twice.map(|(a, b)| (b, Misfit::Name as fn(_) -> _, a)).collect();
        drop(self.named);
        self.exact.sort_unstable_by_key(|(hash, entry)| (*hash, place(entry)));
        let same = |a: &Entry, b: &Entry| {
            (a.rule, a.tenant) == (b.rule, b.tenant) && built.parts(a).eq(built.parts(b))
        };
        clashes.extend(repeated(&self.exact, same).map(|(a, b)| (b, Misfit::Identical as fn(_) -> _, a)));
        let ranked = self.wild.into_iter().map(|(rule, wildcards)| {
            let ranked = built.rank(wildcards);
            clashes.extend(ranked.clashes());
            (rule, ranked)
        });
        let wild = ranked.collect();
        clashes.sort_unstable_by_key(|(entry, ..)| place(entry));
        for (entry, misfit, other) in &clashes {
            tell(built.name(entry), misfit(built.name(other).to_owned()));
        }
        let exact = Hashed::of_ordered(self.exact);
        self.built.text.shrink_to_fit();
        Exceptions { exact, wild, ..self.built }
    }
}

/// Neighbours of the same hash that are the same. There may be as many as there are overrides.
fn repeated(
    ordered: &[(u64, Entry)],
    same: impl Fn(&Entry, &Entry) -> bool,
) -> impl Iterator<Item = (Entry, Entry)> {
    let pairs = ordered.iter().zip(ordered.iter().skip(1));
    pairs.filter(move |(a, b)| a.0 == b.0 && same(&a.1, &b.1)).map(|(a, b)| (a.1, b.1))
}

/// Bytes in front of each part of a key: without them (`a-b`, `c`) would be (`a`, `b-c`).
const LENGTH_BYTES: usize = 2;
const _: () =
    assert!(crate::dimensions::VALUE_BYTES_MAX <= u16::MAX as usize, "the length of a part has to fit");

impl Exceptions {
    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.exact.len() + self.wildcards
    }

    /// The override that applies to a key of a rule: the exact one of the tenant, the exact one for every tenant, or the first
    /// wildcard in order that matches.
    pub(crate) fn find(&self, rule: u32, tenant: &str, key: &[&str], now_ms: u64) -> Option<Found<'_>> {
        let kinds = *self.kinds.get(rule as usize)?;
        let tenant = if self.tenants.is_empty() { None } else { self.tenants.get(tenant).copied() };
        let own = tenant.filter(|_| kinds.exact_of_tenant);
        let own = own.and_then(|tenant| self.exact(rule, tenant, key, now_ms));
        let exact = || kinds.exact.then(|| self.exact(rule, EVERYONE, key, now_ms)).flatten();
        let wild = || kinds.wild.then(|| self.wildcard(rule, tenant, key, now_ms)).flatten();
        let entry = own.or_else(exact).or_else(wild)?;
        let (limit, mode) = self.effects[entry.effect as usize];
        Some(Found { name: self.name(entry), limit, mode })
    }

    fn exact(&self, rule: u32, tenant: u32, key: &[&str], now_ms: u64) -> Option<&Entry> {
        let parts = || key.iter().map(|part| part.as_bytes());
        let mut found = self.exact.find(self.hash(rule, tenant, parts()));
        found.find(|entry| {
            (entry.rule, entry.tenant) == (rule, tenant)
                && self.parts(entry).eq(parts())
                && self.lives(entry, now_ms)
        })
    }

    fn wildcard(&self, rule: u32, tenant: Option<u32>, key: &[&str], now_ms: u64) -> Option<&Entry> {
        let applies = |Wildcard { entry, key: patterns, .. }: &Wildcard| {
            (entry.tenant == EVERYONE || Some(entry.tenant) == tenant)
                && patterns.iter().zip(key).all(|(pattern, value)| pattern.matches(value))
                && self.lives(entry, now_ms)
        };
        self.wild.get(&rule)?.first(key, applies).map(|wildcard| &wildcard.entry)
    }

    fn lives(&self, entry: &Entry, now_ms: u64) -> bool {
        self.ends_ms.get(entry.end as usize).is_none_or(|end_ms| now_ms < *end_ms)
    }

    fn number(&mut self, tenant: &Arc<str>) -> u32 {
        let next = small(self.tenants.len());
        *self.tenants.entry(Arc::clone(tenant)).or_insert(next)
    }

    fn kinds_of(&mut self, rule: u32) -> &mut Kinds {
        let at = rule as usize;
        self.kinds.resize(self.kinds.len().max(at + 1), Kinds::default());
        &mut self.kinds[at]
    }

    fn hash<'k>(&self, rule: u32, tenant: u32, key: impl Iterator<Item = &'k [u8]>) -> u64 {
        let mut hasher = self.hasher.build_hasher();
        hasher.write_u64(u64::from(rule) << 32 | u64::from(tenant));
        key.for_each(|part| part.hash(&mut hasher));
        hasher.finish()
    }

    fn name(&self, entry: &Entry) -> &str {
        let start = entry.text as usize;
        let name = self.text.get(start..start + usize::from(entry.name_bytes)).unwrap_or_default();
        std::str::from_utf8(name).unwrap_or_default()
    }

    /// The parts of an exact key.
    fn parts(&self, entry: &Entry) -> impl Iterator<Item = &[u8]> {
        let mut rest = &self.text[entry.text as usize + usize::from(entry.name_bytes)..];
        let next = move || {
            let (bytes, text) = rest.split_first_chunk::<LENGTH_BYTES>()?;
            let (part, after) = text.split_at_checked(usize::from(u16::from_le_bytes(*bytes)))?;
            rest = after;
            Some(part)
        };
        std::iter::from_fn(next).take(usize::from(entry.parts))
    }

    /// Puts the wildcards of one rule in order: by priority, then by how much they spell out, then by name.
    fn rank(&self, mut wildcards: Vec<Wildcard>) -> Wildcards {
        wildcards.sort_by(|a, b| {
            let rank = |of: &Wildcard| (Reverse(of.priority), Reverse(literal_bytes(&of.key)));
            rank(a).cmp(&rank(b)).then_with(|| self.name(&a.entry).cmp(self.name(&b.entry)))
        });
        Wildcards::new(wildcards)
    }
}

/// How much the patterns of a key spell out, in bytes.
pub(crate) fn literal_bytes(key: &[Pattern]) -> usize {
    key.iter().map(Pattern::literal_bytes).sum()
}

impl Wildcards {
    fn new(ranked: Vec<Wildcard>) -> Self {
        let parts = ranked.first().map_or(0, |wildcard| wildcard.key.len());
        let mut texts: Vec<(Vec<_>, Vec<_>)> = vec![(Vec::new(), Vec::new()); parts];
        let mut loose = Vec::new();
        for (wildcard, at) in ranked.iter().zip(0..) {
            match anchor(&wildcard.key) {
                None => loose.push(at),
                Some((part, Side::Beginning, text)) => texts[part].0.push((text, at)),
                Some((part, Side::End, text)) => texts[part].1.push((text, at)),
            }
        }
        let literals = |(beginnings, ends)| (Literals::beginnings(beginnings), Literals::ends(ends));
        let by_part = texts.into_iter().map(literals).collect();
        Self { by_part, loose: loose.into(), ranked: ranked.into() }
    }

    /// Those that are the same, and the first that is one too many.
    fn clashes(&self) -> Vec<Clash> {
        let mut seen = HashMap::new();
        let mut clashes: Vec<Clash> = Vec::new();
        for Wildcard { entry, key, .. } in &self.ranked {
            if let Some(known) = seen.insert((entry.tenant, key), *entry) {
                clashes.push((*entry, Misfit::Identical, known));
            }
        }
        if let Some(at) = self.loose.get(LOOSE_WILDCARDS_PER_RULE_MAX) {
            let entry = self.ranked[*at as usize].entry;
            clashes.push((entry, |_| Misfit::LooseOfRule, entry));
        }
        clashes
    }

    /// The first in order that applies.
    fn first(&self, key: &[&str], applies: impl Fn(&Wildcard) -> bool) -> Option<&Wildcard> {
        let mut first = self.ranked.len();
        let mut look = |at: u32| {
            let at = at as usize;
            if at < first && applies(&self.ranked[at]) {
                first = at;
            }
        };
        self.loose.iter().for_each(|at| look(*at));
        for ((beginnings, ends), value) in self.by_part.iter().zip(key) {
            beginnings.each_beginning(value, &mut look);
            ends.each_end(value, &mut look);
        }
        self.ranked.get(first)
    }
}

#[derive(Clone, Copy)]
enum Side {
    Beginning,
    End,
}

/// The longest text that a key must begin or end with in one of its parts.
fn anchor(key: &[Pattern]) -> Option<(usize, Side, &str)> {
    let texts = key.iter().enumerate().flat_map(|(part, pattern)| {
        [(part, Side::Beginning, pattern.beginning()), (part, Side::End, pattern.end())]
    });
    texts.filter(|(.., text)| !text.is_empty()).max_by_key(|(.., text)| text.len())
}
