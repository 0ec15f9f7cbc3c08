//! Compact conditions and terms of rules, in one cache line for each rule where they fit. A match
//! usually reads no other part of the rule.

use std::collections::HashMap;
use std::sync::Arc;

use foldhash::quality::RandomState;
use tidegate_core::{Algorithm, Limit};

use crate::dimensions::Dimensions;
use crate::index::{LINE_BYTES, NUMBER_MAX, Pages, small};
use crate::overrides::OverrideKinds;
use crate::pattern::describes;
use crate::rule::{Condition, KEY_PARTS_MAX, Key, Mode, Rule};
use crate::set::RULES_MAX;

/// Bytes of position, key and terms (four each), and of override kinds, tenant and location of the
/// conditions (one each).
const HEAD_BYTES: usize = 15;

/// Tenants that are longer are looked up in the rule. Higher: more memory for them, and rules that
/// take more than a line.
const TENANT_BYTES_MAX: usize = 64;
/// Maximum bytes of unshared conditions stored with their rule. Longer ones go to the shared area.
const OWN_CONDITIONS_BYTES_MAX: usize = 256;

/// In place of the length of a tenant's name: the rule is for every tenant.
const EVERYONE: u8 = u8::MAX;
/// The table has no copy, so the rule itself is read.
const NOT_KEPT: u8 = u8::MAX - 1;
const _: () = assert!(TENANT_BYTES_MAX < NOT_KEPT as usize, "the length of a tenant's name has to fit");

/// Location of conditions: after the tenant, or in the area that several rules share. Otherwise
/// [`NOT_KEPT`]: the table stores neither networks nor conditions that are too long.
const HERE: u8 = 0;
const SHARED: u8 = 1;

/// Maximum bytes of a rule, with the padding before it.
const RULE_BYTES_MAX: usize = HEAD_BYTES + TENANT_BYTES_MAX + OWN_CONDITIONS_BYTES_MAX + LINE_BYTES;
const _: () =
    assert!(RULES_MAX * RULE_BYTES_MAX <= NUMBER_MAX as usize, "the number of every rule has to fit");

/// Conditions, keys, limits and modes of all rules of a set.
#[derive(Debug, Default)]
pub(crate) struct MatchTable {
    /// One behind the other, in the order of the rules. Where a rule begins is its number.
    rules: Pages,
    /// Conditions of several rules.
    shared: Pages,
    dimensions: Box<[Arc<str>]>,
    keys: Box<[Arc<[Arc<str>]>]>,
    terms: Box<[(Limit, Mode)]>,
}

/// A rule that applies to a request, with the request's key and the rule's terms.
#[derive(Debug)]
pub(crate) struct MatchedRule<'d> {
    pub(crate) position: u32,
    pub(crate) kinds: OverrideKinds,
    pub(crate) key: Key<'d>,
    pub(crate) terms: (Limit, Mode),
}

impl MatchTable {
    /// Builds the table. Also returns the lookup numbers of `rules`, in the same order.
    pub(crate) fn new(rules: &[Rule], kinds: impl Fn(u32) -> OverrideKinds) -> (Self, Vec<u32>) {
        let mut builder =
            Builder { rules: Vec::with_capacity(rules.len() * LINE_BYTES), ..Builder::default() };
        let numbers = rules.iter().zip(0..).map(|(rule, at)| builder.add(rule, at, kinds(at))).collect();
        let asked = Self {
            rules: Pages::new(&builder.rules),
            shared: Pages::new(&builder.shared),
            dimensions: builder.dimensions.into(),
            keys: builder.keys.into(),
            terms: builder.terms.into(),
        };
        (asked, numbers)
    }

    /// Returns the rule with this number, if it applies to a request of `tenant`.
    #[inline]
    pub(crate) fn of<'d>(
        &self,
        number: u32,
        rules: &[Rule],
        tenant: &str,
        request: &'d Dimensions<'_>,
    ) -> Option<MatchedRule<'d>> {
        let rest = &mut self.rules.get(number as usize..)?;
        let position = u32::from_le_bytes(take(rest)?);
        let (key, terms) = (u32::from_le_bytes(take(rest)?), u32::from_le_bytes(take(rest)?));
        let [kinds, tenants, conditions] = take(rest)?;
        let rule = || rules.get(position as usize);
        let is_for = match tenants {
            EVERYONE => true,
            NOT_KEPT => rule()?.is_for(tenant),
            bytes => take_text(rest, usize::from(bytes))? == tenant.as_bytes(),
        };
        if !is_for {
            return None;
        }
        match conditions {
            HERE => self.hold(rest, request)?,
            SHARED => self.hold(self.shared.get(u32::from_le_bytes(take(rest)?) as usize..)?, request)?,
            _ => rule()?.when.iter().all(|condition| condition.holds(request)).then_some(())?,
        }
        // A rule with more parts than fit is refused.
        let names = self.keys.get(key as usize)?.iter().take(KEY_PARTS_MAX);
        let key = names.map(|name| request.get(name)).collect::<Option<_>>()?;
        let terms = *self.terms.get(terms as usize)?;
        Some(MatchedRule { position, kinds: OverrideKinds(kinds), key, terms })
    }

    /// Evaluates the conditions that begin here. Returns `None` if one does not hold.
    fn hold(&self, mut rest: &[u8], request: &Dimensions<'_>) -> Option<()> {
        let [conditions] = take(&mut rest)?;
        for _ in 0..conditions {
            let [dimension, patterns] = take(&mut rest)?;
            let (value, clear) = request.forms(self.dimensions.get(usize::from(dimension))?)?;
            let mut holds = false;
            for _ in 0..patterns {
                let bytes = u16::from_le_bytes(take(&mut rest)?);
                let pattern = take_text(&mut rest, usize::from(bytes))?;
                let describes = |value: &str| describes(pattern, value.as_bytes());
                holds = holds || describes(value) || clear.is_some_and(describes);
            }
            if !holds {
                return None;
            }
        }
        Some(())
    }
}

#[inline]
fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (taken, after) = rest.split_first_chunk::<N>()?;
    *rest = after;
    Some(*taken)
}

#[inline]
fn take_text<'t>(rest: &mut &'t [u8], bytes: usize) -> Option<&'t [u8]> {
    let (text, after) = rest.split_at_checked(bytes)?;
    *rest = after;
    Some(text)
}

/// Adds rules one by one. Interned values have one address, and are stored once here too.
#[derive(Default)]
struct Builder {
    rules: Vec<u8>,
    shared: Vec<u8>,
    /// Buffer for the next rule.
    next: Vec<u8>,
    /// By address: where conditions are that are shared.
    known: HashMap<usize, Option<u32>, RandomState>,
    dimensions: Vec<Arc<str>>,
    known_dimensions: HashMap<Arc<str>, usize, RandomState>,
    keys: Vec<Arc<[Arc<str>]>>,
    known_keys: HashMap<usize, u32, RandomState>,
    terms: Vec<(Limit, Mode)>,
    known_terms: HashMap<(Algorithm, u32, u32, u64, Mode), u32, RandomState>,
}

impl Builder {
    /// Adds a rule; where it begins.
    fn add(&mut self, rule: &Rule, position: u32, kinds: OverrideKinds) -> u32 {
        let mut bytes = std::mem::take(&mut self.next);
        bytes.clear();
        bytes.extend_from_slice(&position.to_le_bytes());
        bytes.extend_from_slice(&self.key(&rule.key).to_le_bytes());
        bytes.extend_from_slice(&self.term(rule.limit, rule.mode).to_le_bytes());
        bytes.push(kinds.0);
        let tenant = rule.tenant.as_deref().unwrap_or_default();
        let kept = u8::try_from(tenant.len()).ok().filter(|bytes| usize::from(*bytes) <= TENANT_BYTES_MAX);
        bytes.push(if rule.tenant.is_none() { EVERYONE } else { kept.unwrap_or(NOT_KEPT) });
        let place = bytes.len();
        bytes.push(HERE);
        debug_assert_eq!(bytes.len(), HEAD_BYTES);
        if kept.is_some() {
            bytes.extend_from_slice(tenant.as_bytes());
        }
        bytes[place] = self.put_conditions(&rule.when, &mut bytes);
        self.align(bytes.len());
        let start = small(self.rules.len());
        self.rules.extend_from_slice(&bytes);
        self.next = bytes;
        start
    }

    /// Adds padding, so that a rule that fits into one cache line does not cross a line boundary.
    fn align(&mut self, bytes: usize) {
        let left = LINE_BYTES - self.rules.len() % LINE_BYTES;
        if bytes > left && bytes <= LINE_BYTES {
            self.rules.resize(self.rules.len() + left, 0);
        }
    }

    /// Writes the conditions, or their location in the shared area. Returns the kind of location.
    fn put_conditions(&mut self, when: &Arc<[Condition]>, out: &mut Vec<u8>) -> u8 {
        let start = out.len();
        let is_shared = Arc::strong_count(when) > 1;
        if !is_shared && self.encode(when, out).is_some() && out.len() - start <= OWN_CONDITIONS_BYTES_MAX {
            return HERE;
        }
        out.truncate(start);
        match self.shared(when) {
            None => NOT_KEPT,
            Some(at) => {
                out.extend_from_slice(&at.to_le_bytes());
                SHARED
            }
        }
    }

    fn shared(&mut self, when: &Arc<[Condition]>) -> Option<u32> {
        if let Some(known) = self.known.get(&address(when)) {
            return *known;
        }
        let mut shared = std::mem::take(&mut self.shared);
        let start = shared.len();
        let at = u32::try_from(start).ok().filter(|_| self.encode(when, &mut shared).is_some());
        if at.is_none() {
            shared.truncate(start);
        }
        self.shared = shared;
        self.known.insert(address(when), at);
        at
    }

    /// Returns `None` if the conditions cannot be stored here. Part of them may then be written.
    fn encode(&mut self, when: &[Condition], out: &mut Vec<u8>) -> Option<()> {
        out.push(u8::try_from(when.len()).ok()?);
        for Condition { dimension, any_of, networks } in when {
            if !networks.is_empty() {
                return None;
            }
            out.push(u8::try_from(self.dimension(dimension)).ok()?);
            out.push(u8::try_from(any_of.len()).ok()?);
            for pattern in any_of {
                out.extend_from_slice(&u16::try_from(pattern.as_str().len()).ok()?.to_le_bytes());
                out.extend_from_slice(pattern.as_str().as_bytes());
            }
        }
        Some(())
    }

    fn dimension(&mut self, name: &Arc<str>) -> usize {
        *self.known_dimensions.entry(Arc::clone(name)).or_insert_with(|| {
            self.dimensions.push(Arc::clone(name));
            self.dimensions.len() - 1
        })
    }

    fn key(&mut self, key: &Arc<[Arc<str>]>) -> u32 {
        *self.known_keys.entry(address(key)).or_insert_with(|| {
            self.keys.push(Arc::clone(key));
            small(self.keys.len() - 1)
        })
    }

    fn term(&mut self, limit: Limit, mode: Mode) -> u32 {
        let same = (limit.algorithm(), limit.amount(), limit.burst(), limit.period_us(), mode);
        *self.known_terms.entry(same).or_insert_with(|| {
            self.terms.push((limit, mode));
            small(self.terms.len() - 1)
        })
    }
}

/// Returns the address of a value. Interned values that are equal have the same address.
fn address<T: ?Sized>(of: &Arc<T>) -> usize {
    Arc::as_ptr(of).addr()
}
