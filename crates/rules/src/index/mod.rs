//! Which rules may apply to a request, found by what it is known by instead of by looking at all of them.

mod hashed;
mod literals;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;

use smallvec::SmallVec;

pub(crate) use hashed::Hashed;
pub(crate) use literals::Literals;

use crate::dimensions::Dimensions;
use crate::pattern::Pattern;
use crate::rule::{Condition, Rule};

/// Rules that may apply to a request, by their positions.
pub(crate) type Candidates = SmallVec<[u32; 32]>;

/// The rules of a set by whose requests they are for, and by what those have to be known by.
#[derive(Debug, Default)]
pub(crate) struct RuleIndex {
    everyone: Box<[u32]>,
    own: HashMap<Arc<str>, Box<[u32]>>,
    /// Rules that are found by a whole value, of all tenants.
    exact: Hashed<u32>,
    hasher: RandomState,
    /// The dimensions of those values, for everyone and for tenants, in order.
    everyone_by: Box<[Arc<str>]>,
    own_by: Box<[Arc<str>]>,
    /// Rules that are not found by a whole value; most tenants have none of their own.
    others: Others,
    own_others: HashMap<Arc<str>, Others>,
}

/// Rules for the same requests, as far as tenants go, that are not found by a whole value.
#[derive(Debug, Default)]
struct Others {
    /// In the order of their dimensions.
    facets: Box<[Facet]>,
    /// Rules that no condition finds.
    scanned: Box<[u32]>,
}

/// Rules that are found by what the value of one dimension begins or ends with.
#[derive(Debug)]
struct Facet {
    dimension: Arc<str>,
    beginnings: Literals,
    ends: Literals,
}

/// What a value must be, begin with or end with for a pattern to match.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Anchor<'p> {
    Exact(&'p str),
    Beginning(&'p str),
    End(&'p str),
}

/// By dimension and anchor, how many rules of a tenant could be found by it.
type Crowds<'r> = HashMap<(&'r str, Anchor<'r>), usize>;

/// What is found by a whole value, as it is gathered.
#[derive(Default)]
struct Exact {
    items: Vec<(u64, u32)>,
    everyone_by: BTreeSet<Arc<str>>,
    own_by: BTreeSet<Arc<str>>,
}

impl RuleIndex {
    /// An index of rules that are in the order in which they apply.
    pub(crate) fn new(rules: &[Rule]) -> Self {
        let mut everyone = Vec::new();
        let mut own: HashMap<Arc<str>, Vec<u32>> = HashMap::new();
        for (at, rule) in rules.iter().enumerate() {
            match &rule.tenant {
                None => everyone.push(small(at)),
                Some(tenant) => own.entry(Arc::clone(tenant)).or_default().push(small(at)),
            }
        }
        let hasher = RandomState::default();
        let mut exact = Exact::default();
        let others = Others::new(rules, &everyone, &hasher, &mut exact);
        let mut own_others = HashMap::new();
        for (tenant, positions) in &own {
            let others = Others::new(rules, positions, &hasher, &mut exact);
            if !others.is_empty() {
                own_others.insert(Arc::clone(tenant), others);
            }
        }
        exact.items.sort_unstable();
        Self {
            everyone: everyone.into(),
            own: own.into_iter().map(|(tenant, positions)| (tenant, positions.into())).collect(),
            exact: Hashed::of_ordered(exact.items),
            hasher,
            everyone_by: exact.everyone_by.into_iter().collect(),
            own_by: exact.own_by.into_iter().collect(),
            others,
            own_others,
        }
    }

    /// The rules that may apply to a request, in order, each once. Some of them may be another tenant's.
    pub(crate) fn candidates(&self, tenant: &str, request: &Dimensions<'_>) -> Candidates {
        let mut found = Candidates::new();
        for (dimension, value) in request.pairs() {
            if is_among(&self.everyone_by, dimension) {
                found.extend(self.exact.find(hash(&self.hasher, None, dimension, value)).copied());
            }
            if is_among(&self.own_by, dimension) {
                found.extend(self.exact.find(hash(&self.hasher, Some(tenant), dimension, value)).copied());
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

    /// Every rule that is for requests of `tenant`: those for everyone, then its own, each in order.
    pub(crate) fn positions(&self, tenant: &str) -> impl Iterator<Item = usize> {
        let own = self.own.get(tenant).map(|own| &**own).unwrap_or_default();
        self.everyone.iter().chain(own).map(|at| *at as usize)
    }

    /// The most rules of which a request looks at each, and whose they are.
    pub(crate) fn most_scanned(&self) -> (Option<&str>, usize) {
        let own = self.own_others.iter().map(|(tenant, others)| (Some(&**tenant), others.scanned.len()));
        own.chain([(None, self.others.scanned.len())]).max_by_key(|(_, scanned)| *scanned).unwrap_or_default()
    }
}

fn is_among(dimensions: &[Arc<str>], dimension: &str) -> bool {
    dimensions.binary_search_by(|known| (**known).cmp(dimension)).is_ok()
}

fn hash(hasher: &RandomState, tenant: Option<&str>, dimension: &str, value: &str) -> u64 {
    hasher.hash_one((tenant, dimension, value))
}

impl Others {
    /// What is left of rules when those that are found by a whole value are taken out.
    fn new(rules: &[Rule], positions: &[u32], hasher: &RandomState, exact: &mut Exact) -> Self {
        let of = |at: &u32| (*at, &rules[*at as usize]);
        let mut crowds = Crowds::new();
        for (_, rule) in positions.iter().map(of) {
            for (condition, anchors) in anchored(rule) {
                for anchor in anchors {
                    *crowds.entry((&*condition.dimension, anchor)).or_default() += 1;
                }
            }
        }
        let mut facets: BTreeMap<&Arc<str>, (Vec<_>, Vec<_>)> = BTreeMap::new();
        let mut scanned = Vec::new();
        for (at, rule) in positions.iter().map(of) {
            let Some((condition, anchors)) = most_selective(rule, &crowds) else {
                scanned.push(at);
                continue;
            };
            for anchor in anchors {
                match anchor {
                    Anchor::Exact(value) => exact.add(rule, condition, hasher, value, at),
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
        Self { facets: facets.collect(), scanned: scanned.into() }
    }

    fn is_empty(&self) -> bool {
        self.facets.is_empty() && self.scanned.is_empty()
    }

    fn collect(&self, request: &Dimensions<'_>, found: &mut Candidates) {
        found.extend_from_slice(&self.scanned);
        if self.facets.is_empty() {
            return;
        }
        for (dimension, value) in request.pairs() {
            let at = self.facets.binary_search_by(|facet| (*facet.dimension).cmp(dimension));
            if let Some(facet) = at.ok().map(|at| &self.facets[at]) {
                facet.beginnings.each_beginning(value, |at| found.push(at));
                facet.ends.each_end(value, |at| found.push(at));
            }
        }
    }
}

impl Exact {
    fn add(&mut self, rule: &Rule, condition: &Condition, hasher: &RandomState, value: &str, at: u32) {
        let by = if rule.tenant.is_none() { &mut self.everyone_by } else { &mut self.own_by };
        if !by.contains(&condition.dimension) {
            by.insert(Arc::clone(&condition.dimension));
        }
        self.items.push((hash(hasher, rule.tenant.as_deref(), &condition.dimension, value), at));
    }
}

/// The conditions that a rule can be found by, each with one anchor for each of its patterns.
fn anchored(rule: &Rule) -> impl Iterator<Item = (&Condition, Vec<Anchor<'_>>)> {
    rule.when.iter().filter_map(|condition| {
        // An address has many spellings: networks are not found by text.
        let by_text = condition.networks.is_empty();
        let anchors: Option<Vec<_>> = condition.any_of.iter().map(anchor).collect();
        by_text.then_some(condition).zip(anchors)
    })
}

/// The condition that shares what it is found by with the fewest other rules, and of those the one that spells out most.
fn most_selective<'r>(rule: &'r Rule, crowds: &Crowds<'r>) -> Option<(&'r Condition, Vec<Anchor<'r>>)> {
    anchored(rule).min_by_key(|(condition, anchors)| {
        let crowd = |anchor| crowds.get(&(&*condition.dimension, anchor)).copied().unwrap_or_default();
        let sharing: usize = anchors.iter().map(|anchor| crowd(*anchor)).sum();
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
