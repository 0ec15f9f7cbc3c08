//! Compiles rows into a rule set: reads each row, checks rows against each other, and refuses the
//! whole set on any problem.

mod overrides;

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::hash::BuildHasher as _;
use std::sync::Arc;

use foldhash::quality::RandomState;
use tidegate_core::{Algorithm, LIMITS_PER_REQUEST_MAX, Limit};
use toml::{Table, Value};

use crate::dimensions::{DIMENSIONS_MAX, HEADER_PREFIX};
use crate::emergency::{Action, EMERGENCIES_MAX, Emergencies, Emergency, EmergencyLimits};
use crate::fields::{
    Fields, as_counted, kind_of, read_choice, read_dimension, read_instant, read_key, read_name, read_number,
    read_patterns, read_period, read_text,
};
use crate::index::{Crowd, HashIndex, RuleIndex, WorstScan, small};
use crate::interner::Interner;
use crate::match_table::MatchTable;
use crate::overrides::{NamespaceOverridesBuilder, OVERRIDES_MAX, OverrideIndexBuilder};
use crate::pattern::Pattern;
use crate::problems::{ProblemList, Problems};
use crate::rows::{EmergencyRow, RowKind, RuleRow, RuleRows};
use crate::rule::{Mode, Rule};
use crate::set::{
    LOOKED_AT_RULES_MAX, RULES_MAX, RuleSet, RuleSetParts, SCANNED_RULES_MAX, version_of_revisions,
};
use crate::template::{TEMPLATES_MAX, Template};

pub(crate) use overrides::namespace_overrides;

/// The most header fields that the rules of a set look at.
const HEADERS_MAX: usize = 16;
const _: () = assert!(HEADERS_MAX < DIMENSIONS_MAX, "a request has dimensions besides header fields");

/// The version of a rule that states none.
const FIRST_VERSION: u64 = 1;

/// The highest version of a rule: origins keep 32 bits of it, and of two limits of one version
/// neither is the later.
const VERSION_MAX: u64 = (1 << 32) - 1;

/// Fields of a rule, in the order in which problems list them.
const RULE_FIELDS: &[&str] = &[
    "name",
    "tenant",
    "version",
    "priority",
    "template",
    "class",
    "paid",
    "tolerance",
    "regime",
    "mode",
    "algorithm",
    "key",
    "limit",
    "period",
    "burst",
    "when",
];
/// Fields of an emergency.
const EMERGENCY_FIELDS: &[&str] = &[
    "rule",
    "tenant",
    "key",
    "when",
    "action",
    "limit",
    "period",
    "burst",
    "reason",
    "by",
    "created_ms",
    "expires_ms",
];

/// Nominal period of a blocked rule. Its length does not matter, because nothing passes.
const BLOCKED_PERIOD: std::time::Duration = std::time::Duration::from_mins(1);

/// Location of a row, as problems name it.
pub(crate) enum RowPlace<'r> {
    /// In a list of a file.
    Row(&'static str, usize),
    /// In the rule store.
    Named(&'static str, &'r str),
}

impl fmt::Display for RowPlace<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Row(list, at) => write!(f, "{list}[{at}]"),
            Self::Named(list, name) => write!(f, "{list}[{name:?}]"),
        }
    }
}

/// Order of rules with equal priority.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TieBreak {
    /// The order of the input.
    AsGiven,
    /// The order of names: a store has no other.
    ByName,
}

/// A rule, and the burst that it states.
type RuleWithBurst = (Rule, Option<u64>);

/// Takes templates, then rules.
#[derive(Debug, Default)]
pub(crate) struct Compiler {
    problems: ProblemList,
    texts: Interner,
    placement: Option<String>,
    /// `None` for a template with problems of its own.
    templates: HashMap<String, Option<Table>>,
    rules: Vec<RuleWithBurst>,
    /// Names of rules that have problems.
    faulty: HashSet<String>,
    /// Whether rules and templates that are missing may be in the rule store.
    is_part: bool,
}

/// Takes overrides and emergencies, of rules that are known.
#[derive(Debug)]
pub(crate) struct OrderedRules {
    problems: ProblemList,
    texts: Interner,
    placement: Option<String>,
    rules: Vec<RuleWithBurst>,
    faulty: HashSet<String>,
    is_part: bool,
    positions: Positions,
    rule_overrides: OverrideIndexBuilder,
    namespaces: NamespaceOverridesBuilder,
    emergencies: Vec<Emergency>,
}

/// Where rules are, by the hashes of their names: there may be a million, and each has its name
/// already.
#[derive(Debug, Default)]
struct Positions {
    hashed: HashIndex,
    hasher: RandomState,
}

impl Positions {
    /// The positions of rules that are in order; and of those that have the name of one before
    /// them.
    fn new(rules: &[RuleWithBurst]) -> (Self, Vec<u32>) {
        let hasher = RandomState::default();
        let hash = |(at, (rule, _)): (usize, &RuleWithBurst)| (hasher.hash_one(&*rule.name), small(at));
        let mut items: Vec<(u64, u32)> = rules.iter().enumerate().map(hash).collect();
        items.sort_unstable();
        let name = |at: u32| rules.get(at as usize).map(|(rule, _)| &rule.name);
        let is_same = |pair: &&[(u64, u32)]| matches!(pair, [a, b] if a.0 == b.0 && name(a.1) == name(b.1));
        let mut repeated: Vec<u32> = items.windows(2).filter(is_same).map(|pair| pair[1].1).collect();
        repeated.sort_unstable();
        (Self { hashed: HashIndex::new(&items), hasher }, repeated)
    }

    fn find(&self, rules: &[RuleWithBurst], name: &str) -> Option<u32> {
        let is_it = |at: u32| rules.get(at as usize).is_some_and(|(rule, _)| *rule.name == *name);
        self.hashed.find(self.hasher.hash_one(name), |at| is_it(at).then_some(at))
    }
}

/// Compiles the rows of a rule store.
pub(crate) fn compile(
    rule_rows: &RuleRows,
    placement: Option<&str>,
    now_ms: u64,
) -> Result<RuleSet, Problems> {
    let mut compiler = Compiler::default();
    let of = |kind: RowKind| rule_rows.rows.iter().filter(move |row| row.kind == kind);
    let (rules, overrides) = (of(RowKind::Rule).count(), of(RowKind::Override).count());
    has_room_for(of(RowKind::Template).count(), rules, overrides)?;
    refuse_too_many(&rule_rows.emergencies)?;
    if let Some(placement) = placement {
        compiler.placement(Value::from(placement));
    }
    each_body(of(RowKind::Template), |row, body| {
        let place = RowPlace::Named("templates", &row.name);
        match compiler.problems.named_body(&place, row, body) {
            None => drop(compiler.templates.insert(row.name.clone(), None)),
            Some(value) => compiler.template(&place, value),
        }
    });
    compiler.rules.reserve_exact(rules);
    each_body(of(RowKind::Rule), |row, body| {
        let place = RowPlace::Named("rules", &row.name);
        match compiler.problems.named_body(&place, row, body) {
            None => drop(compiler.faulty.insert(row.name.clone())),
            Some(mut value) => {
                // The store counts versions. A version in the body of the row is ignored.
                if let Value::Table(table) = &mut value {
                    table.insert("version".to_owned(), Value::from(row.version));
                }
                compiler.rule(&place, value);
            }
        }
    });
    let mut compiler = compiler.ordered(TieBreak::ByName, overrides);
    each_body(of(RowKind::Override), |row, body| {
        let place = RowPlace::Named("overrides", &row.name);
        if let Some(value) = compiler.problems.named_body(&place, row, body) {
            compiler.take_override(&place, value, row.version, now_ms);
        }
    });
    for row in &rule_rows.emergencies {
        compiler.emergency(row, now_ms);
    }
    let set = compiler.finish(version_of_revisions(rule_rows.revision, rule_rows.emergency_revision))?;
    Ok(set.of_revision(rule_rows.revision))
}

/// How many bodies of rows are read at a time. More: fewer hand-overs between threads; more memory,
/// about a kilobyte for each, of which there are four times as many at once.
const BODIES_READ_AHEAD: usize = 4_096;

/// A body, as far as it can be read.
type Body = serde_json::Result<Value>;

/// Reads the body of each row, in their order. Of many, the next are read on another thread
/// meanwhile: to read them and to make rules of them take about the same time.
fn each_body<'b>(rows: impl Iterator<Item = &'b RuleRow>, mut take: impl FnMut(&'b RuleRow, Body)) {
    let rows: Vec<&RuleRow> = rows.collect();
    let read =
        |rows: &[&RuleRow]| rows.iter().map(|row| serde_json::from_str(&row.body)).collect::<Vec<Body>>();
    let (ahead, bodies) = std::sync::mpsc::sync_channel(1);
    std::thread::scope(|scope| {
        if rows.len() > BODIES_READ_AHEAD {
            let chunks = rows.chunks(BODIES_READ_AHEAD);
            scope.spawn(move || chunks.map(read).try_for_each(|bodies| ahead.send(bodies)));
        } else {
            drop(ahead);
        }
        for chunk in rows.chunks(BODIES_READ_AHEAD) {
            // For few rows there is no read-ahead thread.
            let bodies = bodies.recv().unwrap_or_else(|_| read(chunk));
            chunk.iter().zip(bodies).for_each(|(row, body)| take(row, body));
        }
    });
}

/// Reads emergencies for a set that is compiled already.
pub(crate) fn emergencies(
    set: &RuleSet,
    rows: &[EmergencyRow],
    now_ms: u64,
) -> Result<Emergencies, Problems> {
    refuse_too_many(rows)?;
    // Only the rules that they name are looked at, by places of their own.
    let named: HashSet<String> = rows.iter().filter_map(|row| rule_named_by(&row.body)).collect();
    let all = set.rules().iter().enumerate();
    let (places, rules): (Vec<u32>, Vec<RuleWithBurst>) = all
        .filter(|(_, rule)| named.contains(&*rule.name))
        .map(|(at, rule)| (small(at), (rule.clone(), None)))
        .unzip();
    let mut compiler = Compiler { rules, ..Compiler::default() }.ordered(TieBreak::AsGiven, 0);
    for row in rows {
        compiler.emergency(row, now_ms);
    }
    let OrderedRules { mut problems, mut emergencies, .. } = compiler;
    for emergency in &mut emergencies {
        emergency.rule = emergency.rule.and_then(|at| places.get(at as usize).copied());
    }
    let emergencies = Emergencies::new(emergencies);
    refuse_headers(&mut problems, set.rules(), &emergencies);
    problems.into_result()?;
    Ok(emergencies)
}

/// The rule that an emergency is about, if it can be read.
fn rule_named_by(body: &str) -> Option<String> {
    let Value::Table(mut table) = serde_json::from_str(body).ok()? else { return None };
    table.remove("rule").and_then(|name| name.as_str().map(str::to_owned))
}

fn refuse_too_many(rows: &[EmergencyRow]) -> Result<(), Problems> {
    if rows.len() > EMERGENCIES_MAX {
        return Err(format!("emergencies: {} is outside 0 to {EMERGENCIES_MAX}", rows.len()).into());
    }
    Ok(())
}

impl ProblemList {
    /// Notes the problems of one row.
    fn of_row(&mut self, place: &RowPlace<'_>, found: Vec<String>) {
        for problem in found {
            self.add(format_args!("{place}{problem}"));
        }
    }

    /// The body of a row, with the row's name in it.
    fn named_body(&mut self, place: &RowPlace<'_>, row: &RuleRow, body: Body) -> Option<Value> {
        let mut value = self.body(place, &row.body, body)?;
        if let Value::Table(table) = &mut value {
            match table.get("name") {
                None => drop(table.insert("name".to_owned(), Value::from(row.name.as_str()))),
                Some(Value::String(name)) if *name == row.name => {}
                Some(_) => self.add(format_args!("{place}.name: not the name of the row")),
            }
        }
        Some(value)
    }

    fn body(&mut self, place: &RowPlace<'_>, body: &str, read: Body) -> Option<Value> {
        // Read again for its place: that is slow, and only needed for those that are wrong.
        read.map_err(|error| self.add(format_args!("{place}{}", unreadable(body, &error)))).ok()
    }
}

/// Describes why a body cannot be parsed, and in which field.
fn unreadable(body: &str, error: &serde_json::Error) -> String {
    let mut again = serde_json::Deserializer::from_str(body);
    let located = serde_path_to_error::deserialize::<_, Value>(&mut again).err();
    let path = located.map(|error| error.path().to_string()).filter(|path| path != "." && path != "?");
    path.map_or_else(|| format!(": {error}"), |path| format!(".{path}: {error}"))
}

/// Checks the numbers of rows. If there are too many, no row is read.
pub(crate) fn has_room_for(templates: usize, rules: usize, overrides: usize) -> Result<(), Problems> {
    let bounds = [
        ("templates", templates, TEMPLATES_MAX),
        ("rules", rules, RULES_MAX),
        ("overrides", overrides, OVERRIDES_MAX),
    ];
    let over = bounds.iter().find(|(_, count, most)| count > most);
    over.map_or(Ok(()), |(list, count, most)| Err(format!("{list}: {count} is outside 0 to {most}").into()))
}

impl Compiler {
    /// A part of a rule store may lack rules and templates that its rows name.
    pub(crate) fn new(is_part: bool) -> Self {
        Self { is_part, ..Self::default() }
    }

    pub(crate) fn placement(&mut self, value: Value) {
        match read_dimension(value) {
            Ok(dimension) => self.placement = Some(dimension),
            Err(problem) => self.problems.add(format_args!("placement: {problem}")),
        }
    }

    pub(crate) fn template(&mut self, place: &RowPlace<'_>, row: Value) {
        let name = named(place, &row);
        let (name, fields) = match Template::read(row) {
            Ok(Template { name, fields }) => (Some(name), Some(fields)),
            Err(found) => {
                self.problems.of_row(place, found);
                (name.map(Cow::into_owned), None)
            }
        };
        let Some(name) = name else { return };
        if self.templates.contains_key(&name) {
            self.problems.add(format_args!("templates[{name:?}].name: given twice"));
        }
        self.templates.insert(name, fields);
    }

    pub(crate) fn rule(&mut self, place: &RowPlace<'_>, row: Value) {
        let name = named(place, &row);
        match self.read_rule(row) {
            Ok(Some(stated)) => self.rules.push(stated),
            // The problems of its template are reported already.
            Ok(None) => self.note_faulty(name),
            Err(found) => {
                self.note_faulty(name);
                self.problems.of_row(place, found);
            }
        }
    }

    fn note_faulty(&mut self, name: Option<Cow<'_, str>>) {
        let Some(name) = name.map(Cow::into_owned) else { return };
        if !self.faulty.insert(name.clone()) {
            self.name_given_twice(&name);
        }
    }

    fn name_given_twice(&mut self, rule: &str) {
        self.problems.add(format_args!("rules[{rule:?}].name: given twice"));
    }

    fn read_rule(&mut self, row: Value) -> Result<Option<RuleWithBurst>, Vec<String>> {
        let Value::Table(table) = row else {
            return Err(vec![format!(": a rule is a table, not {}", kind_of(&row))]);
        };
        let mut fields = Fields::new(table);
        let template = fields.optional("template", read_name);
        match template.as_ref().map(|name| (name, self.templates.get(name))) {
            None => {}
            Some((_, None)) if self.is_part => return Ok(None),
            Some((name, None)) => fields.problem("template", format_args!("there is none called {name:?}")),
            Some((_, Some(None))) => return Ok(None),
            Some((_, Some(Some(template)))) => fields.fill_from(template),
        }
        let rule = parse_rule(&mut fields, &mut self.texts);
        fields.refuse_unknown("a rule", RULE_FIELDS);
        if fields.problems.is_empty() { Ok(rule) } else { Err(fields.problems) }
    }

    /// Sorts the rules in the order in which they apply, and reserves room for their overrides.
    pub(crate) fn ordered(mut self, ties: TieBreak, overrides: usize) -> OrderedRules {
        self.rules.sort_by(|(a, _), (b, _)| {
            let by_name = || match ties {
                TieBreak::AsGiven => std::cmp::Ordering::Equal,
                TieBreak::ByName => a.name.cmp(&b.name),
            };
            b.priority.cmp(&a.priority).then_with(by_name)
        });
        let (positions, repeated) = Positions::new(&self.rules);
        let rules = &self.rules;
        let mut twice: Vec<String> =
            repeated.iter().map(|at| rules[*at as usize].0.name.to_string()).collect();
        twice.extend(self.faulty.iter().filter(|name| positions.find(rules, name).is_some()).cloned());
        twice.sort_unstable();
        for name in &twice {
            self.name_given_twice(name);
        }
        let Self { problems, texts, placement, rules, faulty, is_part, .. } = self;
        let rule_overrides = OverrideIndexBuilder::with_capacity(overrides);
        OrderedRules {
            problems,
            texts,
            placement,
            rules,
            faulty,
            is_part,
            positions,
            rule_overrides,
            namespaces: NamespaceOverridesBuilder::default(),
            emergencies: Vec::new(),
        }
    }
}

/// The name of a row that may be wrong in other ways.
fn named<'r>(place: &RowPlace<'r>, row: &Value) -> Option<Cow<'r, str>> {
    match place {
        RowPlace::Named(_, name) => Some(Cow::Borrowed(*name)),
        RowPlace::Row(..) => row.get("name")?.as_str().map(|name| Cow::Owned(name.to_owned())),
    }
}

/// Parses every field before it gives up, so that all problems of a rule are reported together.
fn parse_rule(fields: &mut Fields, texts: &mut Interner) -> Option<RuleWithBurst> {
    let name = fields.required("name", read_name);
    let tenant = fields.optional("tenant", read_text);
    let version = fields.optional("version", |value| read_number(&value, 0, VERSION_MAX));
    let priority = fields.priority();
    let class = fields.class();
    let paid = fields.paid(class);
    let tolerance_ppm = fields.tolerance_ppm();
    let regime = fields.regime();
    let class = fields.class_under(regime, class);
    let mode = fields.mode();
    let algorithm = fields.algorithm();
    let key = fields.required("key", |value| read_key(value, texts));
    let amount = fields.amount();
    let period = fields.required("period", read_period);
    let burst = fields.burst();
    let when = fields.conditions(texts);
    let limit = fields.limit(algorithm.unwrap_or(Algorithm::Gcra), amount?, period?, burst);
    let rule = Rule {
        name: name?.into(),
        tenant: tenant.map(|tenant| texts.text(&tenant)),
        version: version.unwrap_or(FIRST_VERSION),
        priority,
        class,
        paid: paid.unwrap_or_default(),
        tolerance_ppm,
        regime,
        mode: mode.unwrap_or_default(),
        limit: limit?,
        key: texts.key(key?),
        when: texts.conditions(when),
    };
    Some((rule, burst))
}

/// Result of a lookup of a rule by name.
enum RuleLookup {
    Unknown,
    /// It has problems of its own.
    Faulty,
    At(u32),
}

impl OrderedRules {
    fn named(&self, name: &str) -> RuleLookup {
        match self.positions.find(&self.rules, name) {
            Some(at) => RuleLookup::At(at),
            None if self.faulty.contains(name) => RuleLookup::Faulty,
            None => RuleLookup::Unknown,
        }
    }

    fn rule_at(&self, fields: &mut Fields, name: &str) -> Option<u32> {
        match self.named(name) {
            RuleLookup::At(at) => Some(at),
            RuleLookup::Faulty => None,
            RuleLookup::Unknown if self.is_part => None,
            RuleLookup::Unknown => {
                fields.problem("rule", format_args!("there is no rule {name:?}"));
                None
            }
        }
    }

    /// A key with one value or pattern for each part of the rule's.
    fn key_of(&self, fields: &mut Fields, at: u32, key: Vec<Pattern>) -> Option<Vec<Pattern>> {
        let (rule, _) = &self.rules[at as usize];
        if key.len() == rule.key.len() {
            return Some(rule.key.iter().zip(key).map(|(part, of)| as_counted(part, of)).collect());
        }
        let (given, wanted, name) = (key.len(), rule.key.len(), &rule.name);
        fields.problem("key", format_args!("{given} parts, but the key of rule {name:?} has {wanted}"));
        None
    }

    /// Returns the tenant of an override or emergency. If the rule is for one tenant, it must be
    /// the same.
    fn tenant_of(
        &mut self,
        fields: &mut Fields,
        at: Option<u32>,
        tenant: Option<String>,
    ) -> Option<Arc<str>> {
        let tenant = tenant?;
        let only = at.and_then(|at| self.rules[at as usize].0.tenant.as_ref());
        if let Some(only) = only.filter(|only| ***only != *tenant) {
            fields.problem("tenant", format_args!("{tenant:?}, but the rule is only for {only:?}"));
        }
        Some(self.texts.text(&tenant))
    }

    /// Takes an emergency, unless it ended before `now_ms`.
    fn emergency(&mut self, row: &EmergencyRow, now_ms: u64) {
        // Its rule may have been deleted since: an expired emergency must not invalidate the rule
        // set.
        if row.expires_ms <= now_ms {
            return;
        }
        let place = RowPlace::Named("emergencies", &row.id);
        let Some(body) = self.problems.body(&place, &row.body, serde_json::from_str(&row.body)) else {
            return;
        };
        let Value::Table(table) = body else {
            return self
                .problems
                .add(format_args!("{place}: an emergency is an object, not {}", kind_of(&body)));
        };
        let mut fields = Fields::new(table);
        let emergency = self.parse_emergency(&mut fields, row);
        fields.refuse_unknown("an emergency", EMERGENCY_FIELDS);
        if self.emergencies.iter().any(|known| *known.id == *row.id) {
            fields.problem("id", "given twice");
        }
        self.problems.of_row(&place, fields.problems);
        self.emergencies.extend(emergency);
    }

    fn parse_emergency(&mut self, fields: &mut Fields, row: &EmergencyRow) -> Option<Emergency> {
        if let Err(problem) = read_name(Value::from(row.id.as_str())) {
            fields.problem("id", problem);
        }
        let rule = fields.optional("rule", read_name);
        let tenant = fields.optional("tenant", read_text);
        let key = fields.optional("key", read_patterns);
        let when = fields.conditions(&mut self.texts);
        let action = parse_action(fields);
        // These fields inform readers and have no effect.
        fields.optional("reason", read_text);
        fields.optional("by", read_text);
        fields.optional("created_ms", |value| read_instant(&value));
        fields.optional("expires_ms", |value| read_instant(&value));
        let rule = match rule {
            None => None,
            Some(name) => Some(self.rule_at(fields, &name)?),
        };
        let key = match (rule, key) {
            (_, None) => Vec::new(),
            (Some(at), Some(key)) => self.key_of(fields, at, key)?,
            (None, Some(_)) => {
                fields.problem("key", "the keys of all rules have no parts in common; set `rule` or `when`");
                return None;
            }
        };
        Some(Emergency {
            id: row.id.as_str().into(),
            rule,
            tenant: self.tenant_of(fields, rule, tenant),
            key: key.into(),
            when: self.texts.conditions(when),
            action: action?,
            expires_ms: row.expires_ms,
        })
    }

    /// Returns the set, or its problems.
    pub(crate) fn finish(mut self, version: String) -> Result<RuleSet, Problems> {
        self.refuse_shared_names();
        let problems = &mut self.problems;
        let rule_overrides = self
            .rule_overrides
            .finish(|name, misfit| problems.add(format_args!("overrides[{name:?}]{misfit}")));
        let namespaces =
            self.namespaces.finish(|name, misfit| problems.add(format_args!("overrides[{name:?}]{misfit}")));
        let rules: Box<[Rule]> = self.rules.into_iter().map(|(rule, _)| rule).collect();
        // Without the interner, a reference count above 1 means that several rows share the value.
        drop((self.texts, self.positions));
        let emergencies = Emergencies::new(self.emergencies);
        refuse_headers(&mut self.problems, &rules, &emergencies);
        let (match_table, numbers) = MatchTable::new(&rules, |rule| rule_overrides.kinds_of(rule));
        let index = RuleIndex::new(&rules, &numbers);
        refuse_scans(&mut self.problems, &index);
        refuse_undecidable(&mut self.problems, &rules);
        self.problems.into_result()?;
        let placement = self.placement;
        Ok(RuleSet::new(
            RuleSetParts { rules, index, match_table, rule_overrides, placement },
            namespaces,
            emergencies,
            version,
        ))
    }
}

fn parse_action(fields: &mut Fields) -> Option<Action> {
    const BLOCK: &str = "block";
    const ALLOW: &str = "allow";
    const LIMIT: &str = "limit";
    let choices = [BLOCK, ALLOW, LIMIT].map(|name| (name, name));
    match fields.required("action", |value| read_choice(value, &choices))? {
        LIMIT => {
            let amount = fields.amount();
            let period = fields.required("period", read_period);
            let burst = fields.burst();
            let (amount, period) = (amount?, period?);
            let gcra = fields.limit(Algorithm::Gcra, amount, period, burst)?;
            let sliding_window = fields.limit(Algorithm::SlidingWindow, amount, period, None)?;
            Some(Action::Limit(EmergencyLimits { gcra, sliding_window }))
        }
        BLOCK => {
            let (gcra, window) = (Limit::gcra(0, BLOCKED_PERIOD), Limit::sliding_window(0, BLOCKED_PERIOD));
            Some(Action::Block(EmergencyLimits { gcra: gcra.ok()?, sliding_window: window.ok()? }))
        }
        _ => Some(Action::Allow),
    }
}

/// Refuses too many different header fields: a request has room for `HEADERS_MAX` of them beside
/// its other dimensions.
fn refuse_headers(problems: &mut ProblemList, rules: &[Rule], emergencies: &Emergencies) {
    let of_rules = rules.iter().flat_map(Rule::dimensions_used);
    let of_emergencies = emergencies.iter().flat_map(|emergency| &*emergency.when);
    let used = of_rules.chain(of_emergencies.map(|condition| &*condition.dimension));
    let count = used.filter(|name| name.starts_with(HEADER_PREFIX)).collect::<HashSet<_>>().len();
    if count > HEADERS_MAX {
        problems.add(format_args!(
            "rules: {count} different {HEADER_PREFIX}* dimensions is outside 0 to {HEADERS_MAX}"
        ));
    }
}

/// Rules that no condition finds are looked at one by one, and so are those that the same text
/// finds.
fn refuse_scans(problems: &mut ProblemList, index: &RuleIndex) {
    let (tenant, scanned) = index.most_scanned();
    if scanned > SCANNED_RULES_MAX {
        return problems.add(format_args!(
            "rules: {scanned} for {} without an exact value, prefix or suffix in `when` is outside 0 to \
             {SCANNED_RULES_MAX}",
            tenant_label(tenant)
        ));
    }
    let WorstScan { tenant, looked_at, largest } = index.worst();
    if *looked_at > LOOKED_AT_RULES_MAX {
        let found_by = largest.as_ref().map_or_else(String::new, |Crowd { dimension, pattern, rules }| {
            format!(", {rules} of them by `when.{dimension}` {pattern:?},")
        });
        problems.add(format_args!(
            "rules: {looked_at} for {} that one request may have to examine{found_by} is outside 0 to \
             {LOOKED_AT_RULES_MAX}",
            tenant_label(tenant.as_deref())
        ));
    }
}

fn tenant_label(tenant: Option<&str>) -> String {
    tenant.map_or_else(|| "every tenant".to_owned(), |tenant| format!("tenant {tenant:?}"))
}

/// By key, how many rules apply to every request that has it.
type RulesByKey<'r> = HashMap<Vec<&'r str>, usize, RandomState>;

/// Refuses too many rules without conditions, because those apply to every request that has their
/// key. With too many enforced rules, such a request could not be decided. With too many in shadow
/// mode, some of them would never be checked.
fn refuse_undecidable(problems: &mut ProblemList, rules: &[Rule]) {
    refuse_crowds(problems, rules, Mode::Enforce, "enforced");
    refuse_crowds(problems, rules, Mode::Shadow, "in shadow mode");
}

fn refuse_crowds(problems: &mut ProblemList, rules: &[Rule], mode: Mode, are: &str) {
    let mut all: BTreeMap<Option<&str>, RulesByKey<'_>> = BTreeMap::new();
    for rule in rules.iter().filter(|rule| rule.mode == mode && rule.when.is_empty()) {
        let mut key: Vec<&str> = rule.key.iter().map(|part| &**part).collect();
        key.sort_unstable();
        *all.entry(rule.tenant.as_deref()).or_default().entry(key).or_default() += 1;
    }
    let everyone = all.remove(&None).unwrap_or_default();
    let of_tenants = all.iter().map(|(tenant, own)| (*tenant, most_together(own, &everyone)));
    // A problem of the rules for every tenant is reported once, not again for each tenant.
    let mut worst = [(None, most_together(&RulesByKey::default(), &everyone))].into_iter().chain(of_tenants);
    let too_many = worst.find(|(_, (together, _))| *together > LIMITS_PER_REQUEST_MAX);
    if let Some((tenant, (together, key))) = too_many {
        problems.add(format_args!(
            "rules: {together} {are} without `when` for {} and the key {key:?} is outside 0 to \
             {LIMITS_PER_REQUEST_MAX}, the maximum of one request",
            tenant_label(tenant)
        ));
    }
}

/// The most rules that apply to every request with the key of one of them, and that key.
fn most_together<'r>(own: &RulesByKey<'r>, everyone: &RulesByKey<'r>) -> (usize, Vec<&'r str>) {
    let count = |key: &[&'r str]| [own, everyone].iter().filter_map(|all| all.get(key)).sum::<usize>();
    // Rules keyed by one part of a key, or by none, apply wherever rules with the whole key do.
    let together = |key: &Vec<&'r str>| {
        let parts = if key.len() > 1 { key.iter().map(|part| count(&[*part])).sum() } else { 0 };
        let of_all = if key.is_empty() { 0 } else { count(&[]) };
        (count(key) + parts + of_all, key.clone())
    };
    let few = own.values().chain(everyone.values()).sum::<usize>() <= LIMITS_PER_REQUEST_MAX;
    if few {
        return (0, Vec::new());
    }
    own.keys().chain(everyone.keys()).map(together).max().unwrap_or_default()
}
