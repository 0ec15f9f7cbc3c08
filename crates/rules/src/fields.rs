//! The fields of a row, each read and checked once, with every problem named.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::origin::TOLERANCE_PPM_MAX;
use tidegate_core::{Algorithm, Class, Limit, LimitError, Regime};
use toml::{Table, Value};

use crate::dimensions::{ADDRESS, VALUE_BYTES_MAX, counted_as, is_name};
use crate::interner::Interner;
use crate::network::parse_network;
use crate::overrides::NAMESPACE_TEXT_CHARS_MAX;
use crate::pattern::Pattern;
use crate::period::parse_period;
use crate::rule::{Condition, KEY_PARTS_MAX, Mode};

/// Maximum bytes of a name. Headers carry the names of rules.
const NAME_BYTES_MAX: usize = 128;
const _: () =
    assert!(NAME_BYTES_MAX <= u8::MAX as usize, "an override keeps the length of its name in a byte");
/// The most conditions of a rule.
const CONDITIONS_MAX: usize = 8;
/// The most patterns of one condition.
const PATTERNS_MAX: usize = 64;
/// The largest limit and burst.
const AMOUNT_MAX: u64 = u32::MAX as u64;
/// Largest priority, positive or negative. Rows with a negative priority come after rows that state
/// none.
const PRIORITY_MAX: i64 = 1_000_000;
/// Latest valid instant, in milliseconds since the Unix epoch: the end of the year 9999.
pub(crate) const INSTANT_MS_MAX: u64 = 253_402_300_799_999;

/// The fields of one row, taken one by one.
pub(crate) struct Fields {
    table: Table,
    /// Each problem begins with the field: `.limit: …`.
    pub(crate) problems: Vec<String>,
}

impl Fields {
    pub(crate) fn new(table: Table) -> Self {
        Self { table, problems: Vec::new() }
    }

    /// Copies the fields of a template that the row does not set.
    pub(crate) fn fill_from(&mut self, template: &Table) {
        for (field, value) in template {
            if !self.table.contains_key(field) {
                self.table.insert(field.clone(), value.clone());
            }
        }
    }

    /// Returns the fields not read yet.
    pub(crate) fn rest(&self) -> &Table {
        &self.table
    }

    pub(crate) fn problem(&mut self, field: &str, problem: impl std::fmt::Display) {
        self.problems.push(format!(".{field}: {problem}"));
    }

    pub(crate) fn optional<T>(
        &mut self,
        field: &str,
        read: impl FnOnce(Value) -> Result<T, String>,
    ) -> Option<T> {
        let read = read(self.table.remove(field)?);
        read.map_err(|problem| self.problems.push(format!(".{field}: {problem}"))).ok()
    }

    pub(crate) fn required<T>(
        &mut self,
        field: &str,
        read: impl FnOnce(Value) -> Result<T, String>,
    ) -> Option<T> {
        if !self.table.contains_key(field) {
            self.problems.push(format!(".{field}: missing"));
        }
        self.optional(field, read)
    }

    /// How much may pass in a period; 0 blocks.
    pub(crate) fn amount(&mut self) -> Option<u64> {
        self.required("limit", |value| read_number(&value, 0, AMOUNT_MAX))
    }

    pub(crate) fn burst(&mut self) -> Option<u64> {
        self.optional("burst", |value| read_number(&value, 1, AMOUNT_MAX))
    }

    pub(crate) fn mode(&mut self) -> Option<Mode> {
        self.optional("mode", |value| read_choice(value, &MODES))
    }

    pub(crate) fn class(&mut self) -> Option<Class> {
        self.optional("class", |value| read_choice(value, &CLASSES))
    }

    pub(crate) fn regime(&mut self) -> Option<Regime> {
        self.optional("regime", |value| read_choice(value, &REGIMES))
    }

    /// Returns the class of a rule. A regime may require one, which is then the default.
    pub(crate) fn class_under(&mut self, regime: Option<Regime>, class: Option<Class>) -> Class {
        let required = regime.and_then(Regime::requires);
        let refused = class.filter(|class| required.is_some_and(|required| required != *class));
        if let (Some(regime), Some(required), Some(stated)) = (regime, required, refused) {
            let (regime, required) = (regime.as_str(), required.as_str());
            self.problem(
                "regime",
                format_args!(
                    "{regime:?} requires class {required:?}, its default, not {:?}",
                    stated.as_str()
                ),
            );
        }
        class.or(required).unwrap_or_default()
    }

    pub(crate) fn algorithm(&mut self) -> Option<Algorithm> {
        self.optional("algorithm", |value| read_choice(value, &ALGORITHMS))
    }

    pub(crate) fn tolerance_ppm(&mut self) -> Option<u32> {
        let percent = self.optional("tolerance", |value| read_number(&value, 0, TOLERANCE_PERCENT_MAX))?;
        u32::try_from(percent * PPM_PER_PERCENT).ok()
    }

    pub(crate) fn priority(&mut self) -> i32 {
        let priority = self.optional("priority", |value| read_priority(&value));
        priority.unwrap_or_default()
    }

    /// Reads `paid`: whether the limited clients pay. Only class `cost` may set it to true.
    pub(crate) fn paid(&mut self, class: Option<Class>) -> Option<bool> {
        let paid = self.optional("paid", |value| read_flag(&value))?;
        if paid && class != Some(Class::Cost) {
            self.problems.push(".paid: allowed only for class \"cost\"".to_owned());
        }
        Some(paid)
    }

    pub(crate) fn limit(
        &mut self,
        algorithm: Algorithm,
        amount: u64,
        period: Duration,
        burst: Option<u64>,
    ) -> Option<Limit> {
        let limit = match algorithm {
            Algorithm::Gcra => Limit::gcra(amount, period),
            Algorithm::SlidingWindow => Limit::sliding_window(amount, period),
        };
        let limit = match burst {
            None => limit,
            Some(burst) => limit.and_then(|limit| limit.with_burst(burst)),
        };
        // The core's `amount` is called `limit` in rules.
        let problem = |error: LimitError| format!(".{}", error.to_string().replacen("amount:", "limit:", 1));
        limit.map_err(|error| self.problems.push(problem(error))).ok().map(Limit::keeping_units)
    }

    pub(crate) fn conditions(&mut self, texts: &mut Interner) -> Vec<Condition> {
        let Some(when) = self.optional("when", read_table) else { return Vec::new() };
        let mut problems = Vec::new();
        let conditions = parse_conditions(&when, texts, &mut problems);
        self.problems.extend(problems.into_iter().map(|problem| format!(".{problem}")));
        conditions
    }

    pub(crate) fn refuse_unknown(&mut self, object: &str, known: &[&str]) {
        let message = |field: &String| format!(".{field}: not known; {object} has {}", known.join(", "));
        self.problems.extend(self.table.keys().map(message));
    }
}

/// Millionths in a hundredth.
const PPM_PER_PERCENT: u64 = 10_000;
/// The largest tolerance, in percent of the burst.
const TOLERANCE_PERCENT_MAX: u64 = TOLERANCE_PPM_MAX as u64 / PPM_PER_PERCENT;

const CLASSES: [(&str, Class); 3] = [
    (Class::Comfort.as_str(), Class::Comfort),
    (Class::Cost.as_str(), Class::Cost),
    (Class::Security.as_str(), Class::Security),
];
const REGIMES: [(&str, Regime); 4] = [
    (Regime::Regional.as_str(), Regime::Regional),
    (Regime::BestEffort.as_str(), Regime::BestEffort),
    (Regime::Share.as_str(), Regime::Share),
    (Regime::Strict.as_str(), Regime::Strict),
];
const MODES: [(&str, Mode); 2] =
    [(Mode::Enforce.as_str(), Mode::Enforce), (Mode::Shadow.as_str(), Mode::Shadow)];
const ALGORITHMS: [(&str, Algorithm); 2] =
    [("gcra", Algorithm::Gcra), ("sliding_window", Algorithm::SlidingWindow)];

pub(crate) fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::String(_) => "text",
        Value::Integer(_) => "an integer",
        Value::Float(_) => "a float",
        Value::Boolean(_) => "a boolean",
        Value::Datetime(_) => "a date",
        Value::Array(_) => "a list",
        Value::Table(_) => "a table",
    }
}

pub(crate) fn read_text(value: Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text),
        other => Err(format!("text is expected, not {}", kind_of(&other))),
    }
}

/// The text of a namespace or an identifier of direct limits.
pub(crate) fn read_namespace_text(value: Value) -> Result<String, String> {
    let text = read_text(value)?;
    let chars = text.chars().count();
    if (1..=NAMESPACE_TEXT_CHARS_MAX).contains(&chars) {
        return Ok(text);
    }
    Err(format!("{chars} characters is outside 1 to {NAMESPACE_TEXT_CHARS_MAX}"))
}

fn read_table(value: Value) -> Result<Table, String> {
    match value {
        Value::Table(table) => Ok(table),
        other => Err(format!("a table of dimensions is expected, not {}", kind_of(&other))),
    }
}

pub(crate) fn read_number(value: &Value, least: u64, most: u64) -> Result<u64, String> {
    let &Value::Integer(number) = value else {
        return Err(format!("a whole number from {least} to {most} is expected, not {}", kind_of(value)));
    };
    let inside = u64::try_from(number).ok().filter(|number| (least..=most).contains(number));
    inside.ok_or_else(|| format!("{number} is outside {least} to {most}"))
}

pub(crate) fn read_flag(value: &Value) -> Result<bool, String> {
    value.as_bool().ok_or_else(|| format!("true or false is expected, not {}", kind_of(value)))
}

/// An instant, in milliseconds since the Unix epoch.
pub(crate) fn read_instant(value: &Value) -> Result<u64, String> {
    read_number(value, 1, INSTANT_MS_MAX)
}

fn read_priority(value: &Value) -> Result<i32, String> {
    let range = -PRIORITY_MAX..=PRIORITY_MAX;
    let &Value::Integer(number) = value else {
        let kind = kind_of(value);
        return Err(format!("a whole number from -{PRIORITY_MAX} to {PRIORITY_MAX} is expected, not {kind}"));
    };
    let inside = i32::try_from(number).ok().filter(|_| range.contains(&number));
    inside.ok_or_else(|| format!("{number} is outside -{PRIORITY_MAX} to {PRIORITY_MAX}"))
}

/// The values or patterns that an override or an emergency is for, one for each part of a key.
pub(crate) fn read_patterns(value: Value) -> Result<Vec<Pattern>, String> {
    let Value::Array(values) = value else {
        return Err(format!("a list of values and patterns is expected, not {}", kind_of(&value)));
    };
    if values.len() > KEY_PARTS_MAX {
        return Err(format!("{} parts is outside 0 to {KEY_PARTS_MAX}", values.len()));
    }
    values.into_iter().map(read_pattern).collect()
}

fn read_pattern(value: Value) -> Result<Pattern, String> {
    let text = read_text(value)?;
    if (1..=VALUE_BYTES_MAX).contains(&text.len()) {
        return Ok(Pattern::new(text));
    }
    Err(format!("a part of {} bytes is outside 1 to {VALUE_BYTES_MAX}", text.len()))
}

/// A part of a key as requests have it: an address counts as it does everywhere, however it is
/// spelled.
pub(crate) fn as_counted(dimension: &str, pattern: Pattern) -> Pattern {
    let address = (dimension == ADDRESS).then(|| pattern.as_str().parse::<IpAddr>().ok()).flatten();
    address.map_or(pattern, |address| Pattern::new(counted_as(address)))
}

pub(crate) fn read_choice<T: Copy>(value: Value, choices: &[(&str, T)]) -> Result<T, String> {
    let text = read_text(value)?;
    let chosen = choices.iter().find(|(name, _)| *name == text);
    chosen.map(|(_, choice)| *choice).ok_or_else(|| {
        let names: Vec<_> = choices.iter().map(|(name, _)| format!("{name:?}")).collect();
        format!("{text:?} is none of {}", names.join(", "))
    })
}

pub(crate) fn read_name(value: Value) -> Result<String, String> {
    let name = read_text(value)?;
    if (1..=NAME_BYTES_MAX).contains(&name.len()) && !name.chars().any(char::is_control) {
        return Ok(name);
    }
    Err(format!("{name:?} is not 1 to {NAME_BYTES_MAX} printable bytes"))
}

pub(crate) fn read_key(value: Value, texts: &mut Interner) -> Result<Vec<Arc<str>>, String> {
    let Value::Array(names) = value else {
        return Err(format!("a list of dimensions is expected, not {}", kind_of(&value)));
    };
    if names.len() > KEY_PARTS_MAX {
        return Err(format!("{} dimensions is outside 0 to {KEY_PARTS_MAX}", names.len()));
    }
    names.into_iter().map(|name| read_dimension(name).map(|name| texts.text(&name))).collect()
}

pub(crate) fn read_dimension(value: Value) -> Result<String, String> {
    let name = read_text(value)?;
    if is_name(&name) { Ok(name) } else { Err(format!("{name:?} cannot name a dimension")) }
}

/// Reads a period and checks its range at once, so that no other problem of the rule hides it.
pub(crate) fn read_period(value: Value) -> Result<Duration, String> {
    let period = parse_period(&read_text(value)?)?;
    let problem = |error: LimitError| error.to_string().replacen("period: ", "", 1);
    Limit::sliding_window(1, period).map(|_| period).map_err(problem)
}

fn parse_conditions(when: &Table, texts: &mut Interner, problems: &mut Vec<String>) -> Vec<Condition> {
    if when.len() > CONDITIONS_MAX {
        problems.push(format!("when: {} dimensions is outside 0 to {CONDITIONS_MAX}", when.len()));
    }
    let mut conditions = Vec::new();
    for (dimension, value) in when {
        match parse_condition(dimension, value, texts) {
            Ok(condition) => conditions.push(condition),
            Err(problem) => problems.push(format!("when.{dimension}: {problem}")),
        }
    }
    conditions
}

fn parse_condition(dimension: &str, value: &Value, texts: &mut Interner) -> Result<Condition, String> {
    if !is_name(dimension) {
        return Err("cannot name a dimension".to_owned());
    }
    let patterns = match value {
        Value::Array(values) => values.as_slice(),
        one => std::slice::from_ref(one),
    };
    if !(1..=PATTERNS_MAX).contains(&patterns.len()) {
        return Err(format!("{} patterns is outside 1 to {PATTERNS_MAX}", patterns.len()));
    }
    let (mut any_of, mut networks) = (Vec::new(), Vec::new());
    for value in patterns {
        let text = value.as_str().ok_or("a pattern is text")?;
        let pattern = Pattern::new(texts.text(text));
        // Addresses have many spellings: only a pattern with a star is compared as text.
        if dimension == ADDRESS && !pattern.is_wild() {
            networks.push(parse_network(text)?);
        } else {
            any_of.push(pattern);
        }
    }
    Ok(Condition { dimension: texts.text(dimension), any_of: any_of.into(), networks: networks.into() })
}
