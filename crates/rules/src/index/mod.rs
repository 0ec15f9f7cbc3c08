//! Which rules may apply to a request, found by what it is known by instead of by looking at all of them.

mod literals;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use smallvec::SmallVec;

pub(crate) use literals::Literals;

use crate::dimensions::Dimensions;
use crate::pattern::Pattern;
use crate::rule::{Condition, Rule};

/// A tenant with so many rules of its own has them looked at one by one: that is as fast as an index, and smaller.
const UNINDEXED_MAX: usize = 4;

/// Rules that may apply to a request, by their positions.
pub(crate) type Candidates = SmallVec<[u32; 32]>;

/// The rules of a set by whose requests they are for, and by what those have to be known by.
#[derive(Debug, Default)]
pub(crate) struct RuleIndex {
    everyone: Group,
    own: HashMap<Arc<str>, Group>,
}

/// Rules for the same requests, as far as tenants go.
#[derive(Debug, Default)]
struct Group {
    /// All of them, in order.
    positions: Box<[u32]>,
    /// How most of them are found; nothing if all are looked at.
    facets: Option<Box<Facets>>,
}

#[derive(Debug)]
struct Facets {
    by_dimension: Box<[Facet]>,
    /// Rules that no condition finds.
    others: Box<[u32]>,
}

/// Rules that are found by the value of one dimension.
#[derive(Debug)]
struct Facet {
    dimension: Arc<str>,
    exact: HashMap<Arc<str>, Box<[u32]>>,
    beginnings: Literals,
    ends: Literals,
}

/// What a value must be, begin with or end with for a pattern to match.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Anchor<'p> {
    Exact(&'p Pattern),
    Beginning(&'p str),
    End(&'p str),
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
        let own = own.into_iter().map(|(tenant, positions)| (tenant, Group::new(rules, positions)));
        Self { own: own.collect(), everyone: Group::new(rules, everyone) }
    }

    /// The rules that may apply to a request, in order, each once.
    pub(crate) fn candidates(&self, tenant: &str, request: &Dimensions<'_>) -> Candidates {
        let mut found = Candidates::new();
        for group in self.groups(tenant) {
            group.collect(request, &mut found);
        }
        found.sort_unstable();
        found.dedup();
        found
    }

    /// Every rule that is for requests of `tenant`: those for everyone, then its own, each in order.
    pub(crate) fn positions(&self, tenant: &str) -> impl Iterator<Item = usize> {
        self.groups(tenant).flat_map(|group| &group.positions).map(|at| *at as usize)
    }

    /// The most rules of which a request looks at each, and whose they are.
    pub(crate) fn most_scanned(&self) -> (Option<&str>, usize) {
        let own = self.own.iter().map(|(tenant, group)| (Some(&**tenant), group.scanned()));
        own.chain([(None, self.everyone.scanned())]).max_by_key(|(_, scanned)| *scanned).unwrap_or_default()
    }

    fn groups(&self, tenant: &str) -> impl Iterator<Item = &Group> {
        // Most sets have no tenants.
        let own = if self.own.is_empty() { None } else { self.own.get(tenant) };
        std::iter::once(&self.everyone).chain(own)
    }
}

impl Group {
    fn new(rules: &[Rule], positions: Vec<u32>) -> Self {
        let facets = (positions.len() > UNINDEXED_MAX).then(|| Box::new(Facets::new(rules, &positions)));
        Self { positions: positions.into(), facets }
    }

    fn collect(&self, request: &Dimensions<'_>, found: &mut Candidates) {
        match &self.facets {
            None => found.extend_from_slice(&self.positions),
            Some(facets) => facets.collect(request, found),
        }
    }

    fn scanned(&self) -> usize {
        self.facets.as_ref().map_or(self.positions.len(), |facets| facets.others.len())
    }
}

/// By dimension and anchor, how many rules of a group could be found by it.
type Crowds<'r> = HashMap<(&'r str, Anchor<'r>), usize>;

impl Facets {
    fn new(rules: &[Rule], positions: &[u32]) -> Self {
        let of = |at: &u32| (*at, &rules[*at as usize]);
        let mut crowds = Crowds::new();
        for (_, rule) in positions.iter().map(of) {
            for (condition, anchors) in anchored(rule) {
                for anchor in anchors {
                    *crowds.entry((&*condition.dimension, anchor)).or_default() += 1;
                }
            }
        }
        let mut drafts: BTreeMap<&Arc<str>, Vec<(Anchor<'_>, u32)>> = BTreeMap::new();
        let mut others = Vec::new();
        for (at, rule) in positions.iter().map(of) {
            match most_selective(rule, &crowds) {
                None => others.push(at),
                Some((condition, anchors)) => {
                    let draft = drafts.entry(&condition.dimension).or_default();
                    draft.extend(anchors.into_iter().map(|anchor| (anchor, at)));
                }
            }
        }
        let facets = drafts.into_iter().map(|(dimension, anchors)| Facet::new(dimension, anchors));
        Self { by_dimension: facets.collect(), others: others.into() }
    }

    fn collect(&self, request: &Dimensions<'_>, found: &mut Candidates) {
        found.extend_from_slice(&self.others);
        for facet in &self.by_dimension {
            if let Some(value) = request.get(&facet.dimension) {
                facet.collect(value, found);
            }
        }
    }
}

impl Facet {
    fn new(dimension: &Arc<str>, anchors: Vec<(Anchor<'_>, u32)>) -> Self {
        let mut exact: HashMap<Arc<str>, Vec<u32>> = HashMap::new();
        let (mut beginnings, mut ends) = (Vec::new(), Vec::new());
        for (anchor, at) in anchors {
            match anchor {
                Anchor::Exact(pattern) => exact.entry(pattern.text()).or_default().push(at),
                Anchor::Beginning(text) => beginnings.push((text, at)),
                Anchor::End(text) => ends.push((text, at)),
            }
        }
        Self {
            dimension: Arc::clone(dimension),
            exact: exact.into_iter().map(|(value, positions)| (value, positions.into())).collect(),
            beginnings: Literals::beginnings(beginnings),
            ends: Literals::ends(ends),
        }
    }

    fn collect(&self, value: &str, found: &mut Candidates) {
        if let Some(positions) = self.exact.get(value) {
            found.extend_from_slice(positions);
        }
        self.beginnings.each_beginning(value, |at| found.push(at));
        self.ends.each_end(value, |at| found.push(at));
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
        let spelled_out = anchors.iter().map(|anchor| anchor.bytes()).min().unwrap_or_default();
        (sharing, std::cmp::Reverse(spelled_out))
    })
}

fn anchor(pattern: &Pattern) -> Option<Anchor<'_>> {
    if !pattern.is_wild() {
        return Some(Anchor::Exact(pattern));
    }
    let (beginning, end) = (pattern.beginning(), pattern.end());
    let anchor = if beginning.len() >= end.len() { Anchor::Beginning(beginning) } else { Anchor::End(end) };
    (anchor.bytes() > 0).then_some(anchor)
}

impl Anchor<'_> {
    fn bytes(&self) -> usize {
        match self {
            Self::Exact(pattern) => pattern.as_str().len(),
            Self::Beginning(text) | Self::End(text) => text.len(),
        }
    }
}

/// A position in a list that is bounded far below 2^32.
pub(crate) fn small(at: usize) -> u32 {
    u32::try_from(at).unwrap_or(u32::MAX)
}
