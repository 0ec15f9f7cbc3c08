//! A change compared with the rules in force: the rules it touches, and those that may deny more.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use tidegate_core::Limit;
use tidegate_rules::change::Operation;
use tidegate_rules::pattern::Pattern;
use tidegate_rules::rows::{RowKind, RuleRow, RuleRows};
use tidegate_rules::{AddressCover, Mode, Problems, Regime, Rule, RuleSet, is_secret_digest};

use super::UnknownReason;
use super::addresses::blocked_by;
use super::approval::ApprovedEffect;
use super::back_test::BackTest;
use super::earlier::AuthorHistory;
use super::overrides::{ChangedOverrides, end_ms};
use super::rate::{LoweredRate, Rate};
use super::security::{Weakening, protects};

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
    /// Common prefix of the versions of `before` in decision records; `None` if it was not in
    /// force.
    version: Option<String>,
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
    /// The security rules that protect less than before.
    pub(super) weakened: Arc<[(String, Weakening)]>,
    /// Addresses that the change blocks, with those that its author blocks otherwise.
    pub(super) blocked: AddressCover,
    /// Whether it touches a security rule, perhaps by a small step.
    is_of_security: bool,
    /// When the first earlier change was made that is judged together with this one.
    pub(super) since_ms: Option<u64>,
}

/// A rule that denies more than before, or may.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TightenedRule {
    pub(super) rule: String,
    /// Part of the passing requests left in the worst case, if an unknown traffic may lose half or
    /// more.
    pub(super) left: Option<f64>,
    /// The largest reduction of its limit, or of an override.
    pub(super) lowered: Option<LoweredRate>,
    /// The reason why records cannot show its effect.
    pub(super) not_measured: Option<UnknownReason>,
    /// Dimensions of which it, or an override of the change, names values. Records have no
    /// credentials to compare them with.
    pub(super) named: Vec<String>,
    pub(super) precedent: RulePrecedent,
}

/// The rule of the same name before a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RulePrecedent {
    /// There was none.
    Absent,
    /// The same rule in shadow mode.
    Shadowed,
    /// A rule with other terms.
    Different,
}

/// The rules that deny more after changes than before, or may.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct StricterRules {
    /// Rules that had other terms before, in either mode.
    pub(crate) known: BTreeSet<String>,
    /// Rules that did not exist before.
    pub(crate) new: BTreeSet<String>,
    /// Rules that had the same terms in shadow mode, which showed their denials.
    pub(crate) shadowed: BTreeSet<String>,
}

impl StricterRules {
    fn add(&mut self, rule: &str, precedent: RulePrecedent) {
        let rules = match precedent {
            RulePrecedent::Absent => &mut self.new,
            RulePrecedent::Shadowed => &mut self.shadowed,
            RulePrecedent::Different => &mut self.known,
        };
        rules.insert(rule.to_owned());
    }

    /// Whether a rule of this name existed before.
    pub(crate) fn has_precedent(&self, rule: &str) -> bool {
        self.known.contains(rule) || self.shadowed.contains(rule)
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
        self.tighter.iter().for_each(|tighter| stricter.add(&tighter.rule, tighter.precedent));
        stricter
    }

    /// Returns the position of a rule among the touched rules.
    pub(super) fn number_of(&self, rule: &str) -> Option<u32> {
        let found = self.touched.binary_search_by(|name| name.as_str().cmp(rule)).ok()?;
        u32::try_from(found).ok()
    }

    /// Returns the rules that may leave half of the passing requests or less, with the part that
    /// their limits leave.
    pub(super) fn halved(&self) -> impl Iterator<Item = (&TightenedRule, f64)> {
        self.tighter.iter().filter_map(|tighter| Some((tighter, tighter.left?)))
    }

    /// Returns the rule whose limit falls most.
    pub(super) fn lowered(&self) -> Option<(&str, LoweredRate)> {
        let lowered =
            self.tighter.iter().filter_map(|tighter| Some((tighter.rule.as_str(), tighter.lowered?)));
        lowered.min_by(|(_, a), (_, b)| a.part().total_cmp(&b.part()))
    }

    /// Whether the change may need consent together with earlier ones. Other changes only let more
    /// pass that no security rule keeps out.
    pub(crate) fn is_risky(&self) -> bool {
        self.is_of_security || !(self.tighter.is_empty() && self.blocked.is_empty())
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
        let version = Some(format!("r{}e", before.revision()));
        let scope = compare((&before, &after), rule_rows, operations, now_ms).scope(&before, &after);
        let moments = moments((&before, &after), operations, now_ms);
        Ok(Self { before, after, scope, moments, version })
    }

    /// Returns the same change together with the earlier changes of its author; `None` if there are
    /// none, or if this change only lets more pass: then it adds nothing to them.
    pub(crate) fn with_earlier(
        &self,
        history: &AuthorHistory,
        rule_rows: &RuleRows,
        operations: &[Operation],
        now_ms: u64,
    ) -> Result<Option<Self>, Problems> {
        let since_ms = history.first_ms();
        if since_ms.is_none() || !self.scope.is_risky() {
            return Ok(None);
        }
        let earlier = history.rule_rows(rule_rows);
        let operations = history.operations(&earlier, rule_rows, operations);
        let before = RuleSet::compile(&earlier, self.before.placement(), now_ms)?;
        // The set is shared, and not compiled again.
        let after = self.after.with_emergencies(rule_rows.emergency_revision, &[], now_ms)?;
        let found = compare((&before, &after), &earlier, &operations, now_ms);
        let scope = ChangeScope { since_ms, ..found.scope(&self.before, &after) };
        let moments = moments((&before, &after), &operations, now_ms);
        Ok(Some(Self { before, after, scope, moments, version: None }))
    }

    /// Adds addresses that the author blocks otherwise, if the change blocks some.
    pub(crate) fn add_blocks(&mut self, blocked: &AddressCover) {
        if !self.scope.blocked.is_empty() {
            self.scope.blocked.extend(blocked);
        }
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
        let sets = (self.before, self.after, self.version);
        BackTest::new(sets, self.scope, self.moments, sample_rate, approved)
    }
}

/// Returns when overrides that a change puts end, in order, and when all have ended, also those
/// that were there. Empty if no override expires.
fn moments((before, after): (&RuleSet, &RuleSet), operations: &[Operation], now_ms: u64) -> Vec<u64> {
    if !(before.has_ends() || after.has_ends()) {
        return Vec::new();
    }
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
    found.tighter.keys().for_each(|rule| stricter.add(rule, found.precedent_of(rule)));
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
    /// Rules that had the same terms in shadow mode.
    shadowed: HashSet<String>,
    /// Rules that deny more than before, or may.
    tighter: BTreeMap<String, Tightening>,
    /// By stricter rule: the dimensions of which it, or a changed override, names values.
    named: HashMap<String, BTreeSet<String>>,
    /// Security rules that protect less than before.
    weakened: BTreeMap<String, Weakening>,
    /// Whether a security rule is touched.
    pub(super) is_of_security: bool,
    /// Addresses that the change blocks.
    pub(super) blocked: AddressCover,
}

/// The worst case of a rule that denies more than before, or may.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tightening {
    /// Part of the passing requests left, if an unknown traffic may lose half or more.
    pub(super) left: Option<f64>,
    /// The reduction of a limit.
    pub(super) lowered: Option<LoweredRate>,
}

impl RuleDiff {
    pub(super) fn note_tighter(&mut self, rule: &str, tightening: Tightening) {
        let known = self.tighter.entry(rule.to_owned()).or_default();
        known.left = known.left.into_iter().chain(tightening.left).reduce(f64::min);
        let lowered = known.lowered.into_iter().chain(tightening.lowered);
        known.lowered = lowered.reduce(|a, b| if b.part() < a.part() { b } else { a });
    }

    /// Notes patterns of a stricter rule, or of its overrides, with their dimensions. Records match
    /// a digest and a lone `*` as requests do.
    pub(super) fn note_named<'p>(
        &mut self,
        rule: &str,
        patterns: impl Iterator<Item = (&'p Arc<str>, &'p Pattern)>,
    ) {
        let named = |pattern: &Pattern| pattern.as_str() != "*" && !is_secret_digest(pattern.as_str());
        for (dimension, _) in patterns.filter(|(_, pattern)| named(pattern)) {
            self.named.entry(rule.to_owned()).or_default().insert(dimension.to_string());
        }
    }

    /// The first weakening of a rule stays: that of the rule itself.
    pub(super) fn note_weakened(&mut self, rule: &str, weakening: Weakening) {
        self.weakened.entry(rule.to_owned()).or_insert(weakening);
    }

    /// Returns the scope of the change. Decision records have the dimensions that the rules in
    /// force use.
    fn scope(self, in_force: &RuleSet, after: &RuleSet) -> ChangeScope {
        ChangeScope {
            tighter: self.tighter(in_force, after),
            touched: self.touched.into_iter().collect(),
            cut_short: Arc::new(self.cut_short),
            weakened: self.weakened.into_iter().collect(),
            blocked: self.blocked,
            is_of_security: self.is_of_security,
            since_ms: None,
        }
    }

    fn tighter(&self, in_force: &RuleSet, after: &RuleSet) -> Arc<[TightenedRule]> {
        if self.tighter.is_empty() {
            return Arc::default();
        }
        let logged = LoggedDimensions::new(in_force);
        let rules = after.rules().iter().filter(|rule| self.tighter.contains_key(&*rule.name));
        let not_logged: HashMap<&str, &str> =
            rules.filter_map(|rule| Some((&*rule.name, logged.lacks(rule)?))).collect();
        let of = |(rule, tightening): (&String, &Tightening)| TightenedRule {
            rule: rule.clone(),
            left: tightening.left,
            lowered: tightening.lowered,
            not_measured: not_logged
                .get(rule.as_str())
                .map(|name| UnknownReason::NotLogged((*name).to_owned()))
                .or_else(|| self.counted_otherwise.contains(rule).then_some(UnknownReason::CountedOtherwise)),
            named: self.named.get(rule).into_iter().flatten().cloned().collect(),
            precedent: self.precedent_of(rule),
        };
        self.tighter.iter().map(of).collect()
    }

    fn precedent_of(&self, rule: &str) -> RulePrecedent {
        if self.new.contains(rule) {
            RulePrecedent::Absent
        } else if self.shadowed.contains(rule) {
            RulePrecedent::Shadowed
        } else {
            RulePrecedent::Different
        }
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

    pub(super) fn rule(&self, name: &str) -> Option<&'s Rule> {
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
        found.is_of_security |= known.is_some_and(protects);
        if known.is_none() {
            found.new.insert(name.to_owned());
        }
        if known.is_some_and(|known| is_shadow_of(known, rule)) {
            found.shadowed.insert(name.to_owned());
        }
        if known.is_some_and(|known| counts_otherwise(known, rule)) {
            found.counted_otherwise.insert(name.to_owned());
        }
        if is_tighter(known, rule) {
            found.note_tighter(name, Tightening { left: left(known, rule), lowered: lowered(known, rule) });
            let conditions = rule.when.iter();
            let patterns =
                conditions.flat_map(|of| of.any_of.iter().map(move |pattern| (&of.dimension, pattern)));
            found.note_named(name, patterns);
        }
        if let Some(weakening) = known.and_then(|known| Weakening::of(known, Some(rule))) {
            found.note_weakened(name, weakening);
        }
        if let Some(blocked) = blocked_by(rule).filter(|is| known.and_then(blocked_by).as_ref() != Some(is)) {
            found.blocked.extend(&blocked);
        }
    }
    for (name, gone) in before.rules().filter(|(name, _)| after.rule(name).is_none()) {
        found.touched.insert(name.to_owned());
        found.is_of_security |= protects(gone);
        if let Some(weakening) = Weakening::of(gone, None) {
            found.note_weakened(name, weakening);
        }
    }
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

/// Whether a rule in shadow mode equals an enforced rule except for version and mode.
fn is_shadow_of(before: &Rule, after: &Rule) -> bool {
    let enforced = Rule { mode: Mode::Enforce, ..before.clone() };
    before.mode == Mode::Shadow && is_same(&enforced, after)
}

/// Returns the part left in the worst case of the requests that pass a stricter rule, if an unknown
/// traffic may lose half or more.
fn left(before: Option<&Rule>, after: &Rule) -> Option<f64> {
    match before.filter(|before| before.mode == Mode::Enforce) {
        Some(before) if !reaches_others(before, after) => {
            Rate::of(&after.limit).risky_part_of(Rate::of(&before.limit))
        }
        _ => Some(NOTHING_LEFT),
    }
}

/// Returns the reduction of the limit of a rule that was enforced before.
fn lowered(before: Option<&Rule>, after: &Rule) -> Option<LoweredRate> {
    let before = before.filter(|before| before.mode == Mode::Enforce)?;
    LoweredRate::new(Rate::of(&before.limit), Rate::of(&after.limit))
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
