//! What a change of rules would have done: recent decisions, decided again under the rules as they are and as they would be,
//! and what a change takes that would deny much of what passes now.
//!
//! Nothing here decides for real, and nothing here reads a clock: the records bring their times.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use serde::Serialize;
use serde_json::Value;
use tidegate::Limit;
use tidegate_record::Record;
use tidegate_rules::book::{Book, Kind, Row};
use tidegate_rules::change::{Needs, Operation};
use tidegate_rules::{Dimensions, Match, Mode, Problems, Rule, RuleSet};

use crate::metrics::Surface;

/// The share of requests above which a change that denies them asks whether that is meant. Higher: fewer questions; more
/// people turned away by a mistake.
const CONFIRM_ABOVE: f64 = 0.05;

/// The share above which it waits for somebody else.
const APPROVE_ABOVE: f64 = 0.5;

/// How many requests the rules of a change must have had for a share to mean anything. Higher: surer; more changes of which
/// nothing is known.
const REQUESTS_MIN: f64 = 100.0;

/// How far back decisions are decided again. Longer: also what happens once a day; more to read.
pub(crate) const WINDOW_MS: u64 = 60 * 60 * 1_000;

/// How many of them at most. More: surer; a plan takes longer.
const RECORDS_MAX: u64 = 200_000;

/// How many meters each side has at most: a bound on memory, up to 50 bytes each. What comes after that is not counted.
const METERS_MAX: usize = 1_000_000;

/// How many of the rules that a change touches are told by name.
const NAMES_MAX: usize = 20;

/// Times and levels are not exact here.
const NEARLY_NOTHING: f64 = 1e-6;

/// What a change would have done, and what it takes for that. Kept with the change.
#[derive(Debug, Serialize)]
pub(crate) struct Effect {
    /// What it takes before it applies.
    #[serde(serialize_with = "word")]
    pub(crate) needs: Needs,
    /// Why.
    pub(crate) because: String,
    /// The rules that it touches, the first of them.
    touched: Vec<String>,
    touched_count: usize,
    /// Nothing if there was nothing to measure.
    measured: Option<Measured>,
}

/// Recent requests that rules of the change apply to, and what would have become of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Measured {
    /// Records of the log that were decided again.
    records: u64,
    /// Requests that they stand for, where a rule of the change applies.
    requests: f64,
    /// Those that pass under the rules as they are, and would be denied.
    newly_denied: f64,
    /// Those that are denied, and would pass.
    newly_allowed: f64,
    /// In hundredths of `requests`.
    newly_denied_percent: f64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn word<S: serde::Serializer>(needs: &Needs, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(needs.word())
}

/// A change, compiled beside what is there.
#[derive(Debug)]
pub(crate) struct Trial {
    before: RuleSet,
    after: RuleSet,
    touched: BTreeSet<String>,
    /// Those that deny more than before, or may.
    tighter: BTreeSet<String>,
}

impl Trial {
    /// Compiles the book with a change in it. What it then says has to make sense as a whole.
    pub(crate) fn new(
        book: &Book,
        operations: &[Operation],
        placement: Option<&str>,
        now_ms: u64,
    ) -> Result<Self, Problems> {
        // Emergencies end by themselves: a change is judged by what is there without them. That those of today fit the rules
        // of tomorrow has to be seen all the same.
        let changed = with(book, operations);
        RuleSet::compile(&changed, placement, now_ms)?;
        let calm = |book: Book| Book { emergencies: Vec::new(), ..book };
        let after = RuleSet::compile(&calm(changed), placement, now_ms)?;
        let before = RuleSet::compile(&calm(book.clone()), placement, now_ms)?;
        let mut trial = Self { before, after, touched: BTreeSet::new(), tighter: BTreeSet::new() };
        trial.compare_rules();
        trial.compare_overrides(book, operations);
        Ok(trial)
    }

    /// The rules as they would be.
    pub(crate) fn after(&self) -> &RuleSet {
        &self.after
    }

    fn compare_rules(&mut self) {
        let named = |set: &RuleSet| -> HashMap<String, Rule> {
            set.rules().iter().map(|rule| (rule.name.to_string(), rule.clone())).collect()
        };
        let (before, after) = (named(&self.before), named(&self.after));
        for (name, rule) in &after {
            let known = before.get(name);
            if known.is_some_and(|known| is_same(known, rule)) {
                continue;
            }
            self.touched.insert(name.clone());
            if is_tighter(known, rule) {
                self.tighter.insert(name.clone());
            }
        }
        self.touched.extend(before.into_keys().filter(|name| !after.contains_key(name)));
    }

    /// An override touches its rule, before and after.
    fn compare_overrides(&mut self, book: &Book, operations: &[Operation]) {
        let there = book.rows.iter().filter(|row| row.kind == Kind::Override);
        let there: HashMap<&str, &str> = there.map(|row| (row.name.as_str(), row.body.as_str())).collect();
        let rules = self.after.rules().iter().chain(self.before.rules());
        let amounts: HashMap<&str, u64> =
            rules.map(|rule| (&*rule.name, u64::from(rule.limit.amount()))).collect();
        for operation in operations.iter().filter(|operation| operation.row().0 == Kind::Override) {
            let old = there.get(operation.row().1).copied().map(read);
            let new = operation.body().map(read);
            let rule_of = |body: &Value| body["rule"].as_str().map(str::to_owned);
            let rules: BTreeSet<String> = old.iter().chain(&new).filter_map(rule_of).collect();
            let usual = rules.iter().find_map(|name| amounts.get(name.as_str()).copied());
            if may_deny_more(old.as_ref(), new.as_ref(), usual) {
                self.tighter.extend(rules.iter().cloned());
            }
            self.touched.extend(rules);
        }
    }

    /// The same, ready to be shown what was decided.
    pub(crate) fn begin(self) -> BackTest {
        let Self { before, after, touched, tighter } = self;
        BackTest {
            before: Model::new(before),
            after: Model::new(after),
            touched,
            tighter,
            measured: Measured::default(),
        }
    }
}

/// Whether an override may deny what passed: under the one before it, or under the rule's `usual` limit.
fn may_deny_more(old: Option<&Value>, new: Option<&Value>, usual: Option<u64>) -> bool {
    let limit = |body: Option<&Value>| body.and_then(|body| body["limit"].as_u64()).or(usual);
    // What else it says may mean more or less: that takes somebody who knows.
    let says = |body: &Value| ["rule", "key", "period", "burst", "mode"].map(|field| body[field].clone());
    let differs = old.zip(new).is_some_and(|(old, new)| says(old) != says(new));
    differs || limit(new) < limit(old)
}

/// A body that was checked before.
fn read(body: &str) -> Value {
    serde_json::from_str(body).unwrap_or_default()
}

/// A book after a change.
fn with(book: &Book, operations: &[Operation]) -> Book {
    let mut rows: BTreeMap<(Kind, &str), Row> =
        book.rows.iter().map(|row| ((row.kind, row.name.as_str()), row.clone())).collect();
    for operation in operations {
        let (kind, name) = operation.row();
        match operation.body() {
            None => drop(rows.remove(&(kind, name))),
            Some(body) => {
                let version = rows.get(&(kind, name)).map_or(1, |row| row.version.saturating_add(1));
                let row = Row { kind, name: name.to_owned(), body: body.to_owned(), version };
                rows.insert((kind, name), row);
            }
        }
    }
    Book { rows: rows.into_values().collect(), emergencies: book.emergencies.clone(), ..*book }
}

/// Whether two rules say the same, whatever their versions are.
fn is_same(a: &Rule, b: &Rule) -> bool {
    *a == Rule { version: a.version, ..b.clone() }
}

/// Whether a rule may deny what it did not.
fn is_tighter(before: Option<&Rule>, after: &Rule) -> bool {
    let Some(before) = before.filter(|before| before.mode == Mode::Enforce) else {
        return after.mode == Mode::Enforce;
    };
    let rate = |of: &Limit, other: &Limit| u128::from(of.amount()) * u128::from(other.period_us());
    let slower = rate(&after.limit, &before.limit) < rate(&before.limit, &after.limit);
    let reaches_others =
        (&after.tenant, &after.key, &after.when) != (&before.tenant, &before.key, &before.when);
    let counts_otherwise = after.limit.algorithm() != before.limit.algorithm();
    after.mode == Mode::Enforce
        && (slower || after.limit.burst() < before.limit.burst() || reaches_others || counts_otherwise)
}

/// Two sets, and what they make of the same requests.
#[derive(Debug)]
pub(crate) struct BackTest {
    before: Model,
    after: Model,
    touched: BTreeSet<String>,
    tighter: BTreeSet<String>,
    measured: Measured,
}

impl BackTest {
    /// Takes the next record, in the order of their times, and says whether more are wanted.
    pub(crate) fn take(&mut self, record: &Record) -> bool {
        let by_rules =
            [Surface::Check, Surface::ForwardAuth].iter().any(|surface| record.surface == surface.as_str());
        // Without all of its dimensions nobody knows which rules applied.
        if !by_rules || record.dimensions_cut {
            return true;
        }
        let pairs = record.dimensions.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let Ok(dimensions) = Dimensions::new(pairs) else { return true };
        let stands_for = 1.0 / record.sample_rate.clamp(NEARLY_NOTHING, 1.0);
        let asked = Request { record, dimensions: &dimensions, stands_for };
        let (before, after) =
            (self.before.decide(&asked, &self.touched), self.after.decide(&asked, &self.touched));
        self.measured.records += 1;
        if before.is_touched || after.is_touched {
            self.measured.requests += stands_for;
            self.measured.newly_denied += (before.passed - after.passed).max(0.0);
            self.measured.newly_allowed += (after.passed - before.passed).max(0.0);
        }
        self.measured.records < RECORDS_MAX
    }

    /// What came of it.
    pub(crate) fn finish(mut self) -> Effect {
        let enough = self.measured.requests >= REQUESTS_MIN;
        if enough {
            self.measured.newly_denied_percent = 100.0 * self.measured.newly_denied / self.measured.requests;
        }
        let measured = enough.then_some(self.measured);
        let (needs, because) = judge(measured.as_ref(), &self.tighter);
        let touched_count = self.touched.len();
        let touched = self.touched.into_iter().take(NAMES_MAX).collect();
        Effect { needs, because, touched, touched_count, measured }
    }
}

/// What a change takes, and why.
fn judge(measured: Option<&Measured>, tighter: &BTreeSet<String>) -> (Needs, String) {
    let Some(measured) = measured else {
        let nothing = format!(
            "nothing to measure: the log has fewer than {REQUESTS_MIN} requests of the last hour that these rules apply to"
        );
        return match tighter.first() {
            None => (Needs::Nothing, format!("{nothing}; the change denies nothing that passes now")),
            Some(rule) => (Needs::Confirmation, format!("{nothing}; the change may deny more by {rule:?}")),
        };
    };
    let percent = measured.newly_denied_percent;
    let told = |rest: &str| {
        format!("{percent:.1} % of the requests that these rules apply to would be newly denied{rest}")
    };
    match percent / 100.0 {
        share if share > APPROVE_ABOVE => {
            (Needs::Approver, told(&format!(", more than {} %", 100.0 * APPROVE_ABOVE)))
        }
        share if share > CONFIRM_ABOVE => {
            (Needs::Confirmation, told(&format!(", more than {} %", 100.0 * CONFIRM_ABOVE)))
        }
        _ => (Needs::Nothing, told("")),
    }
}

/// A request of the log.
struct Request<'r> {
    record: &'r Record,
    dimensions: &'r Dimensions<'r>,
    /// How many requests.
    stands_for: f64,
}

/// What becomes of it.
struct Modelled {
    /// How many of those that it stands for pass.
    passed: f64,
    is_touched: bool,
}

/// A set with meters that leak as those of a limit do, for any number of requests at once.
#[derive(Debug)]
struct Model {
    set: RuleSet,
    meters: HashMap<u64, Meter>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Meter {
    level: f64,
    at_ms: u64,
}

impl Model {
    fn new(set: RuleSet) -> Self {
        Self { set, meters: HashMap::new() }
    }

    /// All rules that are enforced are charged for what passes all of them.
    fn decide(&mut self, asked: &Request<'_>, touched: &BTreeSet<String>) -> Modelled {
        let Request { record, dimensions, stands_for } = asked;
        let Self { set, meters } = self;
        let found: Vec<Match<'_, '_>> = set.matching(&record.tenant, dimensions, record.at_ms).collect();
        let is_touched = found.iter().any(|found| touched.contains(&*found.rule.name));
        let mut passed = *stands_for;
        let mut charged = Vec::new();
        for found in found.iter().filter(|found| found.terms.mode == Mode::Enforce) {
            let place = place(&record.tenant, found);
            if meters.len() >= METERS_MAX && !meters.contains_key(&place) {
                continue;
            }
            let meter = meters.entry(place).or_default();
            meter.leak(&found.terms.limit, record.at_ms);
            passed = passed.min(meter.room(&found.terms.limit, record.cost));
            charged.push(place);
        }
        for place in charged {
            meters.entry(place).or_default().level += passed * as_real(record.cost);
        }
        Modelled { passed, is_touched }
    }
}

impl Meter {
    fn leak(&mut self, limit: &Limit, at_ms: u64) {
        let passed_us = as_real(at_ms.saturating_sub(self.at_ms)) * 1_000.0;
        let leaked = f64::from(limit.amount()) * passed_us / as_real(limit.period_us().max(1));
        self.level = (self.level - leaked).max(0.0);
        self.at_ms = self.at_ms.max(at_ms);
    }

    /// How many requests of some cost pass at once.
    fn room(&self, limit: &Limit, cost: u64) -> f64 {
        let room = f64::from(limit.burst()) - self.level;
        match cost {
            _ if limit.is_blocked() => 0.0,
            0 => f64::INFINITY,
            cost => ((room + NEARLY_NOTHING) / as_real(cost)).floor().max(0.0),
        }
    }
}

/// Which meter counts a request under a rule.
fn place(tenant: &str, found: &Match<'_, '_>) -> u64 {
    let mut hasher = DefaultHasher::new();
    (&found.rule.name, tenant, &found.key[..]).hash(&mut hasher);
    hasher.finish()
}

#[expect(clippy::cast_precision_loss, reason = "shares are told to a tenth of a percent")]
fn as_real(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use tidegate_record::{Terms, Verdict};

    use super::*;

    const NOW_MS: u64 = 1_800_000_000_000;

    fn row(kind: Kind, name: &str, body: &str) -> Row {
        Row { kind, name: name.to_owned(), body: body.to_owned(), version: 1 }
    }

    fn put(kind: Kind, name: &str, body: &str) -> Operation {
        Operation::Put { kind, name: name.to_owned(), body: body.to_owned() }
    }

    fn limit(amount: u32, more: &str) -> String {
        format!(r#"{{"key":["user"],"limit":{amount},"period":"1h"{more}}}"#)
    }

    fn book() -> Book {
        Book { revision: 1, rows: vec![row(Kind::Rule, "a", &limit(100, ""))], ..Book::default() }
    }

    fn record(user: &str, at_ms: u64, sample_rate: f64) -> Record {
        Record {
            at_ms,
            tenant: String::new(),
            surface: "check".to_owned(),
            key: format!("user:{user}"),
            cost: 1,
            verdict: Verdict::Allowed,
            rule: "a".to_owned(),
            rule_version: 1,
            set_version: "r1e0".to_owned(),
            replaced_by: String::new(),
            limit: Terms::default(),
            remaining: 0,
            level: 0,
            retry_ms: None,
            rung: "local".to_owned(),
            region: String::new(),
            node: "n".to_owned(),
            sample_rate,
            dimensions: vec![("user".to_owned(), user.to_owned())],
            dimensions_cut: false,
        }
    }

    /// What is found out about a change after so many requests at once.
    fn effect(operations: &[Operation], requests: u64) -> Effect {
        let mut test = Trial::new(&book(), operations, None, NOW_MS).expect("compiles").begin();
        for _ in 0..requests {
            assert!(test.take(&record("u", NOW_MS, 1.0)));
        }
        test.finish()
    }

    fn lowered(amount: u32, requests: u64) -> Effect {
        effect(&[put(Kind::Rule, "a", &limit(amount, ""))], requests)
    }

    #[test]
    fn the_share_that_is_newly_denied_says_what_a_change_takes() {
        for (amount, needs) in [
            (100, Needs::Nothing),
            (95, Needs::Nothing),
            (94, Needs::Confirmation),
            (50, Needs::Confirmation),
            (49, Needs::Approver),
            (0, Needs::Approver),
        ] {
            let effect = lowered(amount, 100);
            assert_eq!(effect.needs, needs, "{amount}: {}", effect.because);
        }
        let effect = lowered(94, 100);
        let measured = effect.measured.expect("measured");
        assert_eq!((measured.records, measured.requests, measured.newly_denied), (100, 100.0, 6.0));
        assert!(effect.because.starts_with("6.0 % of"), "{}", effect.because);
        assert_eq!(effect.touched, ["a"]);
    }

    #[test]
    fn what_cannot_be_measured_asks_where_more_may_be_denied() {
        let of = |operation: Operation| effect(&[operation], 99);
        let rule = |body: &str| of(put(Kind::Rule, "a", body)).needs;
        assert_eq!(rule(&limit(99, "")), Needs::Confirmation);
        assert_eq!(rule(&limit(100, r#","burst":99"#)), Needs::Confirmation);
        assert_eq!(rule(&limit(100, r#","when":{"user":"b*"}"#)), Needs::Confirmation, "others than before");
        assert_eq!(rule(&limit(101, "")), Needs::Nothing);
        assert_eq!(rule(&limit(1, r#","mode":"shadow""#)), Needs::Nothing);
        assert_eq!(of(put(Kind::Rule, "new", &limit(1_000, ""))).needs, Needs::Confirmation);
        assert_eq!(of(put(Kind::Rule, "new", &limit(1, r#","mode":"shadow""#))).needs, Needs::Nothing);
        let over = |amount: u32| {
            let body = format!(r#"{{"rule":"a","key":["u"],"limit":{amount}}}"#);
            of(put(Kind::Override, "o", &body))
        };
        assert_eq!(over(99).needs, Needs::Confirmation);
        assert_eq!(over(101).needs, Needs::Nothing);
        let delete = of(Operation::Delete { kind: Kind::Rule, name: "a".to_owned() });
        assert_eq!(delete.needs, Needs::Nothing);
        assert!(delete.because.starts_with("nothing to measure"), "{}", delete.because);
        assert!(delete.measured.is_none());
    }

    #[test]
    fn a_record_of_a_sample_stands_for_many_and_meters_leak_between_them() {
        let lowered = [put(Kind::Rule, "a", &limit(40, ""))];
        let mut test = Trial::new(&book(), &lowered, None, NOW_MS).expect("compiles").begin();
        // Each stands for fifty; an hour later the meters are as new.
        for hour in 0..2 {
            assert!(test.take(&record("u", NOW_MS + hour * 3_600_000, 0.02)));
        }
        let measured = test.finish().measured.expect("measured");
        assert_eq!((measured.requests, measured.newly_denied), (100.0, 20.0));
    }

    #[test]
    fn overrides_and_other_rules_are_part_of_both_sides() {
        let allowed = put(Kind::Override, "o", r#"{"rule":"a","key":["u"],"limit":1000}"#);
        let both = effect(&[put(Kind::Rule, "a", &limit(1, "")), allowed], 200);
        assert_eq!(both.needs, Needs::Nothing, "the only user has an override: {}", both.because);
        let measured = both.measured.expect("measured");
        assert_eq!((measured.newly_denied, measured.newly_allowed), (0.0, 100.0));
        // What another rule touches is no part of the share.
        let other = effect(&[put(Kind::Rule, "b", &limit(1, r#","when":{"user":"nobody"}"#))], 200);
        assert!(other.measured.is_none() && other.needs == Needs::Confirmation, "{}", other.because);
    }

    #[test]
    fn what_does_not_compile_is_refused_with_all_reasons() {
        let wrong =
            [put(Kind::Rule, "a", &limit(1, r#","burst":0"#)), put(Kind::Override, "o", r#"{"rule":"x"}"#)];
        let problems = Trial::new(&book(), &wrong, None, NOW_MS).expect_err("refused").to_string();
        assert!(
            problems.contains("rules[\"a\"].burst") && problems.contains("overrides[\"o\"].rule"),
            "{problems}"
        );
    }
}
