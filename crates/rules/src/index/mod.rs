//! Finds the rules that may apply to a request by its dimensions, instead of a scan of all rules.

mod hashed;
mod literals;
mod pages;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::BuildHasher as _;
use std::sync::Arc;

use foldhash::quality::RandomState;
use smallvec::SmallVec;

pub(crate) use hashed::HashIndex;
pub(crate) use literals::Literals;
pub(crate) use pages::{LINE_BYTES, Pages};

use crate::dimensions::Dimensions;
use crate::pattern::Pattern;
use crate::rule::{Condition, Rule};

/// Flag in the table of exact values: several rules share the value, and the rest of the number is
/// the start of their list.
const LISTED: u32 = 1 << 31;
/// The largest number that a rule may have.
pub(crate) const NUMBER_MAX: u32 = LISTED - 1;

/// Rules that may apply to a request, by the numbers that the index was given for them.
pub(crate) type Candidates = SmallVec<[u32; 32]>;

/// The rules of a set, by tenant and by the values that their conditions require.
#[derive(Debug, Default)]
pub(crate) struct RuleIndex {
    everyone: Box<[u32]>,
    own: HashMap<Arc<str>, Box<[u32]>, RandomState>,
    /// Rules of all tenants that are found by an exact value.
    exact: HashIndex,
    /// How many rules share a value, and which.
    listed: Box<[u32]>,
    hasher: RandomState,
    /// The dimensions of those values, for everyone and for tenants, in order.
    everyone_by: Box<[Arc<str>]>,
    own_by: Box<[Arc<str>]>,
    /// Rules that are not found by an exact value. Most tenants have none of their own.
    others: UnindexedRules,
    own_others: HashMap<Arc<str>, UnindexedRules, RandomState>,
    worst: WorstScan,
}

/// The rules for everyone, or of one tenant, that a request looks at if it has the worst value of
/// every dimension.
#[derive(Debug, Default)]
pub(crate) struct WorstScan {
    /// Tenant of the rules; `None` if they are for every tenant.
    pub(crate) tenant: Option<Arc<str>>,
    /// How many.
    pub(crate) looked_at: usize,
    /// The text that finds the most of them.
    pub(crate) largest: Option<Crowd>,
}

/// Rules that are found by the same text.
#[derive(Debug)]
pub(crate) struct Crowd {
    pub(crate) dimension: Arc<str>,
    /// As a pattern.
    pub(crate) pattern: String,
    pub(crate) rules: usize,
}

/// Rules of one tenant, or for every tenant, that are not found by an exact value.
#[derive(Debug, Default)]
struct UnindexedRules {
    /// In the order of their dimensions.
    facets: Box<[Facet]>,
    /// Rules that no condition finds.
    scanned: Box<[u32]>,
}

/// Rules that are found by a prefix or suffix of one dimension's value.
#[derive(Debug)]
struct Facet {
    dimension: Arc<str>,
    beginnings: Literals,
    ends: Literals,
}

/// The exact value, prefix or suffix that a pattern requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Anchor<'p> {
    Exact(&'p str),
    Beginning(&'p str),
    End(&'p str),
}

/// Number of rules of a tenant that a dimension and an anchor could find, by the hash of both. It
/// only guides the choice between anchors: a hash collision makes the choice worse, not wrong.
#[derive(Debug, Default)]
struct Crowds {
    rules: HashMap<u64, u32, RandomState>,
    hasher: RandomState,
}

impl Crowds {
    fn add(&mut self, condition: &Condition, anchor: Anchor<'_>) {
        *self.rules.entry(self.hash(condition, anchor)).or_default() += 1;
    }

    fn of(&self, condition: &Condition, anchor: Anchor<'_>) -> usize {
        self.rules.get(&self.hash(condition, anchor)).map_or(0, |rules| *rules as usize)
    }

    fn hash(&self, condition: &Condition, anchor: Anchor<'_>) -> u64 {
        self.hasher.hash_one((&*condition.dimension, anchor))
    }
}

/// The anchors of one condition. Most conditions have few patterns.
type Anchors<'r> = SmallVec<[Anchor<'r>; 4]>;

/// Number of rules that each exact value of a dimension finds, for values with several rules.
type Values<'r> = HashMap<(&'r Arc<str>, &'r str), usize, RandomState>;

/// Rules found by an exact value, as the index collects them.
#[derive(Default)]
struct ExactValues {
    items: Vec<(u64, u32)>,
    everyone_by: BTreeSet<Arc<str>>,
    own_by: BTreeSet<Arc<str>>,
}

impl RuleIndex {
    /// Builds an index of rules in the order in which they apply. `numbers`, in the same order, are
    /// the results of a lookup.
    pub(crate) fn new(rules: &[Rule], numbers: &[u32]) -> Self {
        let rules = NumberedRules { rules, numbers };
        let mut everyone = Vec::new();
        let mut own: HashMap<Arc<str>, Vec<u32>, RandomState> = HashMap::default();
        for (at, rule) in rules.rules.iter().enumerate() {
            match &rule.tenant {
                None => everyone.push(small(at)),
                Some(tenant) => own.entry(Arc::clone(tenant)).or_default().push(small(at)),
            }
        }
        let hasher = RandomState::default();
        let mut exact = ExactValues::default();
        let (others, mut worst) = UnindexedRules::new(&rules, &everyone, &hasher, &mut exact);
        let mut own_others = HashMap::default();
        for (tenant, positions) in &own {
            let (others, of_tenant) = UnindexedRules::new(&rules, positions, &hasher, &mut exact);
            if of_tenant.looked_at > worst.looked_at {
                worst = WorstScan { tenant: Some(Arc::clone(tenant)), ..of_tenant };
            }
            if !others.is_empty() {
                own_others.insert(Arc::clone(tenant), others);
            }
        }
        let (items, listed) = exact.listed();
        Self {
            everyone: everyone.into(),
            own: own.into_iter().map(|(tenant, positions)| (tenant, positions.into())).collect(),
            exact: HashIndex::new(&items),
            listed,
            hasher,
            everyone_by: exact.everyone_by.into_iter().collect(),
            own_by: exact.own_by.into_iter().collect(),
            others,
            own_others,
            worst,
        }
    }

    /// The rules that may apply to a request, in order, each once. Some of them may be another
    /// tenant's.
    pub(crate) fn candidates(&self, tenant: &str, request: &Dimensions<'_>) -> Candidates {
        let mut found = Candidates::new();
        for (dimension, value) in request.compared() {
            if is_among(&self.everyone_by, dimension) {
                self.find(hash(&self.hasher, None, dimension, value), &mut found);
            }
            if is_among(&self.own_by, dimension) {
                self.find(hash(&self.hasher, Some(tenant), dimension, value), &mut found);
            }
        }
        self.others.collect(request, &mut found);
        if !self.own_others.is_empty()
            && let Some(others) = self.own_others.get(tenant)
        {
            others.collect(request, &mut found);
        }
        found.sort_unstable();
        found.dedup();
        found
    }

    #[inline]
    fn find(&self, hash: u64, found: &mut Candidates) {
        let _: Option<()> = self.exact.find(hash, |number| {
            match number.checked_sub(LISTED) {
                None => found.push(number),
                Some(list) => {
                    let list = &self.listed[list as usize..];
                    let (count, numbers) = list.split_first()?;
                    found.extend_from_slice(&numbers[..*count as usize]);
                }
            }
            None
        });
    }

    /// Every rule that is for requests of `tenant`: those for everyone, then its own, each in
    /// order.
    pub(crate) fn positions(&self, tenant: &str) -> impl Iterator<Item = usize> {
        let own = self.own.get(tenant).map(|own| &**own).unwrap_or_default();
        self.everyone.iter().chain(own).map(|at| *at as usize)
    }

    /// Returns the most rules that every request of a tenant scans, and that tenant.
    pub(crate) fn most_scanned(&self) -> (Option<&str>, usize) {
        let own = self.own_others.iter().map(|(tenant, others)| (Some(&**tenant), others.scanned.len()));
        own.chain([(None, self.others.scanned.len())]).max_by_key(|(_, scanned)| *scanned).unwrap_or_default()
    }

    /// Returns the worst case of rules that one request examines.
    pub(crate) fn worst(&self) -> &WorstScan {
        &self.worst
    }
}

fn is_among(dimensions: &[Arc<str>], dimension: &str) -> bool {
    dimensions.binary_search_by(|known| (**known).cmp(dimension)).is_ok()
}

/// Hashes with a fast function and a new random seed for each set. Only authors of rules choose the
/// entries of the table. A client can at worst make its request examine some unrelated rules.
fn hash(hasher: &RandomState, tenant: Option<&str>, dimension: &str, value: &str) -> u64 {
    hasher.hash_one((tenant, dimension, value))
}

/// Rules, and the number that a lookup returns for each.
struct NumberedRules<'r> {
    rules: &'r [Rule],
    numbers: &'r [u32],
}

impl<'r> NumberedRules<'r> {
    fn of(&self, position: u32) -> (u32, &'r Rule) {
        (self.numbers[position as usize], &self.rules[position as usize])
    }
}

impl UnindexedRules {
    /// Moves the rules that are found by an exact value to `exact`. Returns the others, and the
    /// worst case of rules, from both groups, that one request examines.
    fn new(
        rules: &NumberedRules<'_>,
        positions: &[u32],
        hasher: &RandomState,
        exact: &mut ExactValues,
    ) -> (Self, WorstScan) {
        let of = |at: &u32| rules.of(*at);
        let mut crowds = Crowds { hasher: hasher.clone(), ..Crowds::default() };
        crowds.rules.reserve(positions.len());
        for (_, rule) in positions.iter().map(of) {
            for (condition, anchors) in anchored(rule) {
                anchors.into_iter().for_each(|anchor| crowds.add(condition, anchor));
            }
        }
        let mut facets: BTreeMap<&Arc<str>, (Vec<_>, Vec<_>)> = BTreeMap::new();
        let mut scanned = Vec::new();
        let mut values = Values::default();
        for (at, rule) in positions.iter().map(of) {
            let Some((condition, anchors)) = most_selective(rule, &crowds) else {
                scanned.push(at);
                continue;
            };
            for anchor in anchors {
                match anchor {
                    Anchor::Exact(value) => {
                        exact.add(rule, condition, hasher, value, at);
                        // Most rules have a value to themselves, and are not counted here.
                        if crowds.of(condition, anchor) > 1 {
                            *values.entry((&condition.dimension, value)).or_default() += 1;
                        }
                    }
                    Anchor::Beginning(text) => {
                        facets.entry(&condition.dimension).or_default().0.push((text, at));
                    }
                    Anchor::End(text) => facets.entry(&condition.dimension).or_default().1.push((text, at)),
                }
            }
        }
        let facets = facets.into_iter().map(|(dimension, (beginnings, ends))| Facet {
            dimension: Arc::clone(dimension),
            beginnings: Literals::beginnings(beginnings),
            ends: Literals::ends(ends),
        });
        let others = Self { facets: facets.collect(), scanned: scanned.into() };
        let worst = others.worst(&values);
        (others, worst)
    }

    /// A request has one value of each dimension: at worst the one that finds most rules.
    fn worst(&self, values: &Values<'_>) -> WorstScan {
        let crowds: Vec<Crowd> =
            self.facets.iter().flat_map(Facet::crowds).chain(largest_values(values)).collect();
        let looked_at = self.scanned.len() + crowds.iter().map(|crowd| crowd.rules).sum::<usize>();
        WorstScan { tenant: None, looked_at, largest: crowds.into_iter().max_by_key(|crowd| crowd.rules) }
    }

    fn is_empty(&self) -> bool {
        self.facets.is_empty() && self.scanned.is_empty()
    }

    fn collect(&self, request: &Dimensions<'_>, found: &mut Candidates) {
        found.extend_from_slice(&self.scanned);
        if self.facets.is_empty() {
            return;
        }
        for (dimension, value) in request.compared() {
            let at = self.facets.binary_search_by(|facet| (*facet.dimension).cmp(dimension));
            if let Some(facet) = at.ok().map(|at| &self.facets[at]) {
                facet.beginnings.each_beginning(value, |at| found.push(at));
                facet.ends.each_end(value, |at| found.push(at));
            }
        }
    }
}

impl Facet {
    /// The most rules that one value finds, by its beginning and by its end.
    fn crowds(&self) -> impl Iterator<Item = Crowd> {
        let (beginnings, ends) = (self.beginnings.most(), self.ends.most());
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        // Suffixes are stored reversed.
        let end: Vec<u8> = ends.1.iter().rev().copied().collect();
        let crowds =
            [(beginnings.0, format!("{}*", text(beginnings.1))), (ends.0, format!("*{}", text(&end)))];
        let of = |(rules, pattern)| Crowd { dimension: Arc::clone(&self.dimension), pattern, rules };
        crowds.map(of).into_iter()
    }
}

/// Of each dimension, the value that finds most rules.
fn largest_values(values: &Values<'_>) -> impl Iterator<Item = Crowd> {
    let mut largest: BTreeMap<&Arc<str>, (usize, &str)> = BTreeMap::new();
    for ((dimension, value), rules) in values {
        let most = largest.entry(dimension).or_default();
        *most = (*most).max((*rules, value));
    }
    let of = |(dimension, (rules, value)): (&Arc<str>, (usize, &str))| Crowd {
        dimension: Arc::clone(dimension),
        pattern: value.to_owned(),
        rules,
    };
    largest.into_iter().map(of)
}

impl ExactValues {
    fn add(&mut self, rule: &Rule, condition: &Condition, hasher: &RandomState, value: &str, at: u32) {
        let by = if rule.tenant.is_none() { &mut self.everyone_by } else { &mut self.own_by };
        if !by.contains(&condition.dimension) {
            by.insert(Arc::clone(&condition.dimension));
        }
        self.items.push((hash(hasher, rule.tenant.as_deref(), &condition.dimension, value), at));
    }

    /// Returns an item for each hash: a number, or the start of a list of numbers. Also returns the
    /// lists.
    fn listed(&mut self) -> (Vec<(u64, u32)>, Box<[u32]>) {
        self.items.sort_unstable();
        let mut listed = Vec::new();
        let same = self.items.chunk_by(|a, b| a.0 == b.0).map(|same| match same {
            [(hash, number)] => (*hash, *number),
            several => {
                let start = small(listed.len());
                listed.push(small(several.len()));
                listed.extend(several.iter().map(|(_, number)| *number));
                (several[0].0, LISTED | start)
            }
        });
        (same.collect(), listed.into())
    }
}

/// The conditions that a rule can be found by, each with one anchor for each of its patterns.
fn anchored(rule: &Rule) -> impl Iterator<Item = (&Condition, Anchors<'_>)> {
    rule.when.iter().filter_map(|condition| {
        // An address has many spellings: networks are not found by text.
        let by_text = condition.networks.is_empty();
        let anchors: Option<Anchors<'_>> = condition.any_of.iter().map(anchor).collect();
        by_text.then_some(condition).zip(anchors)
    })
}

/// Returns the condition that shares its anchors with the fewest other rules. On a tie, the one
/// with the longest shortest anchor.
fn most_selective<'r>(rule: &'r Rule, crowds: &Crowds) -> Option<(&'r Condition, Anchors<'r>)> {
    anchored(rule).min_by_key(|(condition, anchors)| {
        let sharing: usize = anchors.iter().map(|anchor| crowds.of(condition, *anchor)).sum();
        let spelled_out = anchors.iter().map(Anchor::bytes).min().unwrap_or_default();
        (sharing, std::cmp::Reverse(spelled_out))
    })
}

fn anchor(pattern: &Pattern) -> Option<Anchor<'_>> {
    if !pattern.is_wild() {
        return Some(Anchor::Exact(pattern.as_str()));
    }
    let (beginning, end) = (pattern.beginning(), pattern.end());
    let anchor = if beginning.len() >= end.len() { Anchor::Beginning(beginning) } else { Anchor::End(end) };
    (anchor.bytes() > 0).then_some(anchor)
}

impl Anchor<'_> {
    fn bytes(&self) -> usize {
        let (Self::Exact(text) | Self::Beginning(text) | Self::End(text)) = self;
        text.len()
    }
}

/// A position in a list that is bounded far below 2^32.
pub(crate) fn small(at: usize) -> u32 {
    u32::try_from(at).unwrap_or(u32::MAX)
}
