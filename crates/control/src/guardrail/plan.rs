//! A change compared with the rules in force: the rules it touches, and those that may deny more.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use tidegate_core::Limit;
use tidegate_rules::change::Operation;
use tidegate_rules::rows::{RowKind, RuleRow, RuleRows};
use tidegate_rules::{Mode, Problems, Regime, Rule, RuleSet};

use super::UnknownReason;
use super::approval::ApprovedEffect;
use super::back_test::BackTest;
use super::overrides::{ChangedOverrides, end_ms};
use super::rate::Rate;

/// Maximum number of moments at which a plan is evaluated: the earliest ends of overrides, and the
/// time after all have ended. Higher: a plan takes longer, because it evaluates every request at
/// each moment.
const MOMENTS_MAX: usize = 16;

/// Part left in the worst case if nothing was enforced before, because the passing amount is
/// unknown.
pub(super) const NOTHING_LEFT: f64 = 0.0;

/// A time after all overrides have ended.
pub(super) const AFTER_ALL_MS: u64 = u64::MAX;

/// A change, compiled beside the rules in force.
#[derive(Debug)]
pub(crate) struct ChangePlan {
    before: RuleSet,
    after: RuleSet,
    scope: ChangeScope,
    /// Times at which other overrides apply than now; empty if none expires.
    moments: Vec<u64>,
}

/// The rules that a change touches.
#[derive(Clone, Debug, Default)]
pub(crate) struct ChangeScope {
    /// All of them, in order.
    pub(super) touched: Arc<[String]>,
    /// The touched rules that deny more than before, or may.
    pub(super) tighter: Arc<[TightenedRule]>,
    /// Overrides that the change removes, shortens or alters.
    pub(super) cut_short: Arc<HashSet<String>>,
}

/// A rule that denies more than before, or may.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TightenedRule {
    pub(super) rule: String,
    /// Part of the passing requests left in the worst case, if half or less.
    pub(super) left: Option<f64>,
    /// The reason why records cannot show its effect.
    pub(super) not_measured: Option<UnknownReason>,
    /// Whether there was no rule of this name before.
    pub(super) is_new: bool,
}

/// The rules that deny more after changes than before, or may.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct StricterRules {
    /// Rules that existed before, in either mode.
    pub(crate) known: BTreeSet<String>,
    /// Rules that did not exist before.
    pub(crate) new: BTreeSet<String>,
}

impl StricterRules {
    fn add(&mut self, rule: &str, is_new: bool) {
        let rules = if is_new { &mut self.new } else { &mut self.known };
        rules.insert(rule.to_owned());
    }
}

impl ChangeScope {
    /// Returns the rules that the change touches, in order.
    pub(crate) fn touched(&self) -> &Arc<[String]> {
        &self.touched
    }

    /// Returns the rules that deny more than before, or may.
    pub(crate) fn stricter(&self) -> StricterRules {
        let mut stricter = StricterRules::default();
        self.tighter.iter().for_each(|tighter| stricter.add(&tighter.rule, tighter.is_new));
        stricter
    }

    /// Returns the position of a rule among the touched rules.
    pub(super) fn number_of(&self, rule: &str) -> Option<u32> {
        let found = self.touched.binary_search_by(|name| name.as_str().cmp(rule)).ok()?;
        u32::try_from(found).ok()
    }

    /// Returns the rules that leave half of the passing requests or less, with that part.
    pub(super) fn halved(&self) -> impl Iterator<Item = (&TightenedRule, f64)> {
        self.tighter.iter().filter_map(|tighter| Some((tighter, tighter.left?)))
    }
}

impl ChangePlan {
    /// Compiles the content of a store with a change, which must be valid as a whole, beside the
    /// rules in force. These may come from other rows, if the content was refused and is being
    /// repaired.
    pub(crate) fn new(
        in_force: &RuleSet,
        rule_rows: &RuleRows,
        operations: &[Operation],
        placement: Option<&str>,
        now_ms: u64,
    ) -> Result<Self, Problems> {
        // Emergencies expire by themselves, so a change is judged without them. The current ones
        // must fit the planned rules all the same.
        let after = RuleSet::compile(&with(rule_rows, operations), placement, now_ms)?;
        after.with_emergencies(rule_rows.emergency_revision, &rule_rows.emergencies, now_ms)?;
        let before = in_force.with_emergencies(rule_rows.emergency_revision, &[], now_ms)?;
        let found = compare((&before, &after), rule_rows, operations, now_ms);
        let scope = ChangeScope {
            tighter: found.tighter(&before, &after),
            touched: found.touched.into_iter().collect(),
            cut_short: Arc::new(found.cut_short),
        };
        let has_ends = before.has_ends() || after.has_ends();
        let moments = if has_ends { moments(operations, now_ms) } else { Vec::new() };
        Ok(Self { before, after, scope, moments })
    }

    /// The planned rules.
    pub(crate) fn after(&self) -> &RuleSet {
        &self.after
    }

    /// The touched rules.
    pub(crate) fn scope(&self) -> &ChangeScope {
        &self.scope
    }

    /// Starts the back-test, for a log with this sample rate, and compares with the approved
    /// effect.
    pub(crate) fn begin(self, sample_rate: f64, approved: Arc<ApprovedEffect>) -> BackTest {
        BackTest::new((self.before, self.after), self.scope, self.moments, sample_rate, approved)
    }
}

/// Returns when overrides that a change puts end, in order, and when all have ended, also those
/// that were there.
fn moments(operations: &[Operation], now_ms: u64) -> Vec<u64> {
    let puts = operations.iter().filter(|operation| operation.row().0 == RowKind::Override);
    let ends = puts.filter_map(Operation::body).filter_map(end_ms).filter(|end_ms| *end_ms > now_ms);
    let ends: BTreeSet<u64> = ends.collect();
    ends.into_iter().take(MOMENTS_MAX - 1).chain([AFTER_ALL_MS]).collect()
}

/// Returns the rules that deny more after changes than before, or may. `rule_rows` are those
/// before.
pub(crate) fn tightened(
    sets: (&RuleSet, &RuleSet),
    rule_rows: &RuleRows,
    operations: &[Operation],
    now_ms: u64,
) -> StricterRules {
    let found = compare(sets, rule_rows, operations, now_ms);
    let mut stricter = StricterRules::default();
    found.tighter.keys().for_each(|rule| stricter.add(rule, found.new.contains(rule)));
    stricter
}

/// Differences between two rule sets.
#[derive(Debug, Default)]
pub(super) struct RuleDiff {
    pub(super) touched: BTreeSet<String>,
    /// Overrides that the change removes, shortens or alters.
    pub(super) cut_short: HashSet<String>,
    /// Rules that count by another algorithm, or with other regions.
    counted_otherwise: HashSet<String>,
    /// Rules that did not exist before.
    new: HashSet<String>,
    /// Rules that deny more than before, or may, with the part left if it is half or less.
    tighter: BTreeMap<String, Option<f64>>,
}

impl RuleDiff {
    pub(super) fn note_tighter(&mut self, rule: &str, left: Option<f64>) {
        let known = self.tighter.entry(rule.to_owned()).or_default();
        *known = known.iter().copied().chain(left).reduce(f64::min);
    }

    fn tighter(&self, before: &RuleSet, after: &RuleSet) -> Arc<[TightenedRule]> {
        if self.tighter.is_empty() {
            return Arc::default();
        }
        let logged = LoggedDimensions::new(before);
        let rules = after.rules().iter().filter(|rule| self.tighter.contains_key(&*rule.name));
        let not_logged: HashMap<&str, &str> =
            rules.filter_map(|rule| Some((&*rule.name, logged.lacks(rule)?))).collect();
        let of = |(rule, left): (&String, &Option<f64>)| TightenedRule {
            rule: rule.clone(),
            left: *left,
            not_measured: not_logged
                .get(rule.as_str())
                .map(|name| UnknownReason::NotLogged((*name).to_owned()))
                .or_else(|| self.counted_otherwise.contains(rule).then_some(UnknownReason::CountedOtherwise)),
            is_new: self.new.contains(rule),
        };
        self.tighter.iter().map(of).collect()
    }
}

/// The dimensions of requests that the log has: the dimensions that rules in force use, for all
/// tenants or for one.
struct LoggedDimensions<'s> {
    placement: Option<&'s str>,
    by_tenant: HashMap<Option<&'s str>, HashSet<&'s str>>,
}

impl<'s> LoggedDimensions<'s> {
    fn new(in_force: &'s RuleSet) -> Self {
        let mut by_tenant: HashMap<Option<&str>, HashSet<&str>> = HashMap::new();
        for rule in in_force.rules() {
            by_tenant.entry(rule.tenant.as_deref()).or_default().extend(rule.dimensions_used());
        }
        Self { placement: in_force.placement(), by_tenant }
    }

    /// Returns a dimension that a rule uses and the log does not have.
    fn lacks<'r>(&self, rule: &'r Rule) -> Option<&'r str> {
        let whose = [None, rule.tenant.as_deref()];
        let has = |name: &str| {
            self.placement == Some(name)
                || whose.iter().filter_map(|tenant| self.by_tenant.get(tenant)).any(|all| all.contains(name))
        };
        rule.dimensions_used().find(|name| !has(name))
    }
}

/// Compares the rules of two sets, and their overrides.
fn compare(
    (before, after): (&RuleSet, &RuleSet),
    rule_rows: &RuleRows,
    operations: &[Operation],
    now_ms: u64,
) -> RuleDiff {
    let (before, after) = (NamedRules::new(before, now_ms), NamedRules::new(after, now_ms));
    let mut found = RuleDiff::default();
    compare_rules(&before, &after, &mut found);
    ChangedOverrides::new(&before, &after, rule_rows, operations).compare(&mut found);
    found
}

/// A rule set, with its rules indexed by name.
pub(super) struct NamedRules<'s> {
    pub(super) set: &'s RuleSet,
    pub(super) positions: HashMap<&'s str, usize>,
    pub(super) now_ms: u64,
}

impl<'s> NamedRules<'s> {
    fn new(set: &'s RuleSet, now_ms: u64) -> Self {
        let positions = set.rules().iter().enumerate().map(|(at, rule)| (&*rule.name, at)).collect();
        Self { set, positions, now_ms }
    }

    fn rule(&self, name: &str) -> Option<&'s Rule> {
        self.set.rules().get(*self.positions.get(name)?)
    }

    fn rules(&self) -> impl Iterator<Item = (&'s str, &'s Rule)> {
        self.set.rules().iter().map(|rule| (&*rule.name, rule))
    }
}

/// Finds the rules that differ, and the rules among them that may deny more.
fn compare_rules(before: &NamedRules<'_>, after: &NamedRules<'_>, found: &mut RuleDiff) {
    for (name, rule) in after.rules() {
        let known = before.rule(name);
        if known.is_some_and(|known| is_same(known, rule)) {
            continue;
        }
        found.touched.insert(name.to_owned());
        if known.is_none() {
            found.new.insert(name.to_owned());
        }
        if known.is_some_and(|known| counts_otherwise(known, rule)) {
            found.counted_otherwise.insert(name.to_owned());
        }
        if is_tighter(known, rule) {
            found.note_tighter(name, left(known, rule));
        }
    }
    let gone = before.rules().filter(|(name, _)| after.rule(name).is_none());
    found.touched.extend(gone.map(|(name, _)| name.to_owned()));
}

/// Returns rule rows after a change, without emergencies.
pub(crate) fn with(rule_rows: &RuleRows, operations: &[Operation]) -> RuleRows {
    let mut rows: BTreeMap<(RowKind, &str), RuleRow> =
        rule_rows.rows.iter().map(|row| ((row.kind, row.name.as_str()), row.clone())).collect();
    for operation in operations {
        let (kind, name) = operation.row();
        match operation.body() {
            None => drop(rows.remove(&(kind, name))),
            Some(body) => {
                let version = rows.get(&(kind, name)).map_or(1, |row| row.version.saturating_add(1));
                let row = RuleRow { kind, name: name.to_owned(), body: body.to_owned(), version };
                rows.insert((kind, name), row);
            }
        }
    }
    RuleRows { rows: rows.into_values().collect(), emergencies: Vec::new(), ..*rule_rows }
}

/// Whether two rules are equal except for their versions.
fn is_same(a: &Rule, b: &Rule) -> bool {
    *a == Rule { version: a.version, ..b.clone() }
}

/// Returns the part left in the worst case of the requests that pass a stricter rule, if half or
/// less.
fn left(before: Option<&Rule>, after: &Rule) -> Option<f64> {
    match before.filter(|before| before.mode == Mode::Enforce) {
        Some(before) if !reaches_others(before, after) => {
            Rate::of(&after.limit).half_of(Rate::of(&before.limit))
        }
        _ => Some(NOTHING_LEFT),
    }
}

/// Whether a rule may deny requests that it did not deny before.
fn is_tighter(before: Option<&Rule>, after: &Rule) -> bool {
    let Some(before) = before.filter(|before| before.mode == Mode::Enforce) else {
        return after.mode == Mode::Enforce;
    };
    let rate = |of: &Limit, other: &Limit| u128::from(of.amount()) * u128::from(other.period_us());
    let slower = rate(&after.limit, &before.limit) < rate(&before.limit, &after.limit);
    after.mode == Mode::Enforce
        && (slower
            || after.limit.burst() < before.limit.burst()
            || reaches_others(before, after)
            || counts_otherwise(before, after))
}

/// Whether a rule gets another algorithm, or a new regime other than `regional`. Usage of other
/// regions may count from now on, or only a part of the limit may be left.
fn counts_otherwise(before: &Rule, after: &Rule) -> bool {
    after.limit.algorithm() != before.limit.algorithm()
        || (after.regime() != before.regime() && after.regime() != Regime::Regional)
}

/// Whether a rule may apply to new requests, or count them together with others. A rule with
/// additional conditions, or for one tenant instead of all, applies to a part of its former
/// requests.
fn reaches_others(before: &Rule, after: &Rule) -> bool {
    let is_for_others = before.tenant.is_some() && before.tenant != after.tenant;
    let has_all_conditions = before.when.iter().all(|condition| after.when.contains(condition));
    is_for_others || before.key != after.key || !has_all_conditions
}
