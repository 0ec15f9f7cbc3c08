//! Overrides of rules: another limit for some keys of a rule. Exact keys are found by hash, patterns by what they begin or end with.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::sync::Arc;

use arrayvec::ArrayVec;
use hashbrown::HashTable;
use tidegate_core::{Algorithm, Limit};

use crate::index::{Literals, small};
use crate::pattern::Pattern;
use crate::rule::{KEY_PARTS_MAX, Mode};

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
/// When nothing ends.
const NEVER: u64 = u64::MAX;

/// One override, as small as it can be told.
#[derive(Clone, Copy, Debug)]
struct Entry {
    expires_ms: u64,
    /// Where its name begins, and behind that its key, if that is exact.
    text: u32,
    rule: u32,
    tenant: u32,
    effect: u32,
    name_bytes: u8,
    parts: u8,
}

/// All overrides of a set.
#[derive(Debug, Default)]
pub(crate) struct Exceptions {
    entries: Vec<Entry>,
    text: Vec<u8>,
    /// Limits and modes that differ.
    effects: Vec<(Limit, Option<Mode>)>,
    tenants: HashMap<Arc<str>, u32>,
    exact: HashTable<u32>,
    hasher: RandomState,
    /// By rule.
    wild: HashMap<u32, Wildcards>,
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
    /// Of its entry.
    number: u32,
    priority: i32,
    key: Box<[Pattern]>,
}

/// Takes overrides one by one.
#[derive(Debug, Default)]
pub(crate) struct Builder {
    built: Exceptions,
    effects: HashMap<(Algorithm, u32, u32, u64, Option<Mode>), u32>,
    wild: HashMap<u32, Vec<Wildcard>>,
    wildcards: usize,
    /// Overrides by their names.
    names: HashTable<u32>,
}

impl Builder {
    /// Room for about so many.
    pub(crate) fn with_capacity(overrides: usize) -> Self {
        let (exact, names) = (HashTable::with_capacity(overrides), HashTable::with_capacity(overrides));
        let built = Exceptions { entries: Vec::with_capacity(overrides), exact, ..Exceptions::default() };
        Self { built, names, ..Self::default() }
    }

    /// Takes another override, if there is room for it.
    pub(crate) fn add(&mut self, draft: Draft) -> Result<(), Misfit> {
        let key_bytes: usize = draft.key.iter().map(|part| LENGTH_BYTES + part.as_str().len()).sum();
        if self.built.text.len() + draft.name.len() + key_bytes > TEXT_BYTES_MAX {
            return Err(Misfit::Text);
        }
        let entry = Entry {
            expires_ms: draft.expires_ms.unwrap_or(NEVER),
            text: small(self.built.text.len()),
            rule: draft.rule,
            tenant: draft.tenant.as_ref().map_or(EVERYONE, |tenant| self.built.number(tenant)),
            effect: self.effect(draft.limit, draft.mode),
            // Names are shorter than this, and keys have fewer parts.
            name_bytes: u8::try_from(draft.name.len()).unwrap_or(u8::MAX),
            parts: u8::try_from(draft.key.len()).unwrap_or(u8::MAX),
        };
        let hash = self.built.hash_of_name(&draft.name);
        if self.names.find(hash, |known| self.built.name(*known) == draft.name).is_some() {
            return Err(Misfit::Name(draft.name));
        }
        let number = if draft.key.iter().any(Pattern::is_wild) {
            self.add_wild(entry, draft)?
        } else {
            self.built.add_exact(entry, &draft.name, &draft.key)?
        };
        let built = &self.built;
        self.names.insert_unique(hash, number, |known| built.hash_of_name(built.name(*known)));
        Ok(())
    }

    fn add_wild(&mut self, entry: Entry, draft: Draft) -> Result<u32, Misfit> {
        if self.wildcards == WILDCARDS_MAX {
            return Err(Misfit::Wildcards);
        }
        let of_rule = self.wild.entry(draft.rule).or_default();
        if of_rule.len() == WILDCARDS_PER_RULE_MAX {
            return Err(Misfit::WildcardsOfRule);
        }
        self.wildcards += 1;
        let number = self.built.push(entry, &draft.name);
        of_rule.push(Wildcard { number, priority: draft.priority, key: draft.key.into() });
        Ok(number)
    }

    fn effect(&mut self, limit: Limit, mode: Option<Mode>) -> u32 {
        let same = (limit.algorithm(), limit.amount(), limit.burst(), limit.period_us(), mode);
        *self.effects.entry(same).or_insert_with(|| {
            self.built.effects.push((limit, mode));
            small(self.built.effects.len() - 1)
        })
    }

    /// All of them, or what is wrong with wildcards, each told by its name.
    pub(crate) fn finish(mut self) -> Result<Exceptions, Vec<(String, Misfit)>> {
        let mut misfits = Vec::new();
        for (rule, wildcards) in std::mem::take(&mut self.wild) {
            match self.built.rank(wildcards) {
                Ok(ranked) => drop(self.built.wild.insert(rule, ranked)),
                Err(misfit) => misfits.push(misfit),
            }
        }
        misfits.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        self.built.entries.shrink_to_fit();
        self.built.text.shrink_to_fit();
        if misfits.is_empty() { Ok(self.built) } else { Err(misfits) }
    }
}

/// Bytes in front of each part of a key: without them (`a-b`, `c`) would be (`a`, `b-c`).
const LENGTH_BYTES: usize = 2;
const _: () =
    assert!(crate::dimensions::VALUE_BYTES_MAX <= u16::MAX as usize, "the length of a part has to fit");

impl Exceptions {
    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The override that applies to a key of a rule: the exact one of the tenant, the exact one for every tenant, or the first
    /// wildcard in order that matches.
    pub(crate) fn find(&self, rule: u32, tenant: &str, key: &[&str], now_ms: u64) -> Option<Found<'_>> {
        let tenant = if self.tenants.is_empty() { None } else { self.tenants.get(tenant).copied() };
        let lives = |number: &u32| now_ms < self.entry(*number).expires_ms;
        let own = tenant.and_then(|tenant| self.exact(rule, tenant, key)).filter(lives);
        let exact = own.or_else(|| self.exact(rule, EVERYONE, key).filter(lives));
        let number = exact.or_else(|| self.wildcard(rule, tenant, key, now_ms))?;
        let (limit, mode) = self.effects[self.entry(number).effect as usize];
        Some(Found { name: self.name(number), limit, mode })
    }

    fn wildcard(&self, rule: u32, tenant: Option<u32>, key: &[&str], now_ms: u64) -> Option<u32> {
        let wildcards = self.wild.get(&rule)?;
        let applies = |wildcard: &Wildcard| {
            let entry = self.entry(wildcard.number);
            now_ms < entry.expires_ms
                && (entry.tenant == EVERYONE || Some(entry.tenant) == tenant)
                && wildcard.key.iter().zip(key).all(|(pattern, value)| pattern.matches(value))
        };
        wildcards.first(key, applies).map(|wildcard| wildcard.number)
    }

    fn exact(&self, rule: u32, tenant: u32, key: &[&str]) -> Option<u32> {
        if self.exact.is_empty() {
            return None;
        }
        let parts = || key.iter().map(|part| part.as_bytes());
        let is_it = |number: &u32| {
            let entry = self.entry(*number);
            (entry.rule, entry.tenant) == (rule, tenant) && self.parts(entry).eq(parts())
        };
        self.exact.find(self.hash_of_key(rule, tenant, parts()), is_it).copied()
    }

    fn entry(&self, number: u32) -> &Entry {
        &self.entries[number as usize]
    }

    fn number(&mut self, tenant: &Arc<str>) -> u32 {
        let next = small(self.tenants.len());
        *self.tenants.entry(Arc::clone(tenant)).or_insert(next)
    }

    fn push(&mut self, entry: Entry, name: &str) -> u32 {
        self.entries.push(entry);
        self.text.extend_from_slice(name.as_bytes());
        small(self.entries.len() - 1)
    }

    fn add_exact(&mut self, entry: Entry, name: &str, key: &[Pattern]) -> Result<u32, Misfit> {
        let parts: ArrayVec<&str, KEY_PARTS_MAX> =
            key.iter().take(KEY_PARTS_MAX).map(Pattern::as_str).collect();
        if let Some(known) = self.exact(entry.rule, entry.tenant, &parts) {
            return Err(Misfit::Identical(self.name(known).to_owned()));
        }
        let number = self.push(entry, name);
        for part in &parts {
            let bytes = u16::try_from(part.len()).unwrap_or(u16::MAX);
            self.text.extend_from_slice(&bytes.to_le_bytes());
            self.text.extend_from_slice(part.as_bytes());
        }
        let mut exact = std::mem::take(&mut self.exact);
        exact.insert_unique(self.hash(number), number, |number| self.hash(*number));
        self.exact = exact;
        Ok(number)
    }

    fn hash(&self, number: u32) -> u64 {
        let entry = self.entry(number);
        self.hash_of_key(entry.rule, entry.tenant, self.parts(entry))
    }

    fn hash_of_key<'k>(&self, rule: u32, tenant: u32, key: impl Iterator<Item = &'k [u8]>) -> u64 {
        let mut hasher = self.hasher.build_hasher();
        hasher.write_u64(u64::from(rule) << 32 | u64::from(tenant));
        key.for_each(|part| part.hash(&mut hasher));
        hasher.finish()
    }

    fn hash_of_name(&self, name: &str) -> u64 {
        self.hasher.hash_one(name)
    }

    fn name(&self, number: u32) -> &str {
        let entry = self.entry(number);
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
    fn rank(&self, mut wildcards: Vec<Wildcard>) -> Result<Wildcards, (String, Misfit)> {
        let name = |wildcard: &Wildcard| self.name(wildcard.number);
        wildcards.sort_by(|a, b| {
            let rank = |of: &Wildcard| (Reverse(of.priority), Reverse(literal_bytes(&of.key)));
            rank(a).cmp(&rank(b)).then_with(|| name(a).cmp(name(b)))
        });
        let mut seen = HashMap::new();
        for wildcard in &wildcards {
            let known = seen.insert((self.entry(wildcard.number).tenant, &wildcard.key), wildcard);
            if let Some(known) = known {
                return Err((name(wildcard).to_owned(), Misfit::Identical(name(known).to_owned())));
            }
        }
        let ranked = Wildcards::new(wildcards);
        match ranked.loose.get(LOOSE_WILDCARDS_PER_RULE_MAX) {
            None => Ok(ranked),
            Some(at) => Err((name(&ranked.ranked[*at as usize]).to_owned(), Misfit::LooseOfRule)),
        }
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
