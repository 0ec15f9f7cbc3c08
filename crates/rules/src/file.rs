//! The rules file: TOML, parsed once into rules that need no second look.

use std::collections::HashSet;
use std::fmt;

use serde::Deserialize;
use tidegate_core::Limit;
use toml::{Table, Value};

use crate::dimensions::is_name;
use crate::pattern::Pattern;
use crate::period::parse_period;
use crate::rule::{Class, Condition, KEY_PARTS_MAX, Mode, Rule};
use crate::set::RULES_MAX;

/// The largest rules file.
pub const FILE_BYTES_MAX: usize = 16 << 20;

/// The longest name of a rule: it is told in headers.
const RULE_NAME_BYTES_MAX: usize = 128;
/// The most conditions of a rule.
const CONDITIONS_MAX: usize = 8;
/// The most patterns of one condition.
const PATTERNS_MAX: usize = 64;

/// Everything that is wrong with a file, so that it can be mended in one go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problems(pub Vec<String>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("\n"))
    }
}

impl std::error::Error for Problems {}

/// A rule as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    name: String,
    tenant: Option<String>,
    #[serde(default = "first_version")]
    version: u64,
    #[serde(default)]
    class: ClassRow,
    #[serde(default)]
    mode: ModeRow,
    #[serde(default)]
    algorithm: AlgorithmRow,
    limit: u64,
    period: String,
    burst: Option<u64>,
    key: Vec<String>,
    #[serde(default)]
    when: Table,
}

const fn first_version() -> u64 {
    1
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ClassRow {
    #[default]
    Comfort,
    Cost,
    Security,
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ModeRow {
    #[default]
    Enforce,
    Shadow,
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum AlgorithmRow {
    #[default]
    Gcra,
    SlidingWindow,
}

/// The rules of a file, or all that is wrong with it.
pub(crate) fn parse_rules(text: &str) -> Result<Vec<Rule>, Problems> {
    let rows = rows_of(text).map_err(|problem| Problems(vec![problem]))?;
    let mut problems = Vec::new();
    let mut rules = Vec::with_capacity(rows.len());
    for (at, row) in rows.into_iter().enumerate() {
        match parse_row(row) {
            Ok(rule) => rules.push(rule),
            Err(found) => problems.extend(found.into_iter().map(|problem| format!("rules[{at}].{problem}"))),
        }
    }
    problems.extend(repeated_names(&rules));
    if problems.is_empty() { Ok(rules) } else { Err(Problems(problems)) }
}

fn rows_of(text: &str) -> Result<Vec<Value>, String> {
    if text.len() > FILE_BYTES_MAX {
        return Err(format!("{} bytes is outside 0 to {FILE_BYTES_MAX}", text.len()));
    }
    let mut file: Table = text.parse().map_err(|error: toml::de::Error| error.to_string())?;
    let rows = match file.remove("rules") {
        None => Vec::new(),
        Some(Value::Array(rows)) => rows,
        Some(other) => return Err(format!("rules: a {} is not a list of rules", other.type_str())),
    };
    if let Some(unknown) = file.keys().next() {
        return Err(format!("{unknown}: not known; a rules file has [[rules]] only"));
    }
    if rows.len() > RULES_MAX {
        return Err(format!("rules: {} is outside 0 to {RULES_MAX}", rows.len()));
    }
    Ok(rows)
}

fn repeated_names(rules: &[Rule]) -> Vec<String> {
    let mut seen = HashSet::new();
    let repeated = rules.iter().filter(|rule| !seen.insert(rule.name.as_str()));
    repeated.map(|rule| format!("rules: {:?} is given twice", rule.name)).collect()
}

fn parse_row(row: Value) -> Result<Rule, Vec<String>> {
    let row: Row = row.try_into().map_err(|error: toml::de::Error| vec![error.message().to_owned()])?;
    let mut problems = Vec::new();
    check_name(&row.name, &mut problems);
    check_key(&row.key, &mut problems);
    let limit = parse_limit(&row).map_err(|problem| problems.push(problem)).ok();
    let when = parse_conditions(&row.when, &mut problems);
    match limit {
        Some(limit) if problems.is_empty() => Ok(Rule {
            name: row.name,
            tenant: row.tenant,
            version: row.version,
            class: row.class.into(),
            mode: row.mode.into(),
            limit,
            key: row.key,
            when,
        }),
        _ => Err(problems),
    }
}

fn check_name(name: &str, problems: &mut Vec<String>) {
    if !(1..=RULE_NAME_BYTES_MAX).contains(&name.len()) || name.chars().any(char::is_control) {
        problems.push(format!("name: {name:?} is not 1 to {RULE_NAME_BYTES_MAX} printable bytes"));
    }
}

fn check_key(key: &[String], problems: &mut Vec<String>) {
    if key.len() > KEY_PARTS_MAX {
        problems.push(format!("key: {} dimensions is outside 0 to {KEY_PARTS_MAX}", key.len()));
    }
    for name in key.iter().filter(|name| !is_name(name)) {
        problems.push(format!("key: {name:?} cannot name a dimension"));
    }
}

fn parse_limit(row: &Row) -> Result<Limit, String> {
    let period = parse_period(&row.period).map_err(|problem| format!("period: {problem}"))?;
    let limit = match row.algorithm {
        AlgorithmRow::Gcra => Limit::gcra(row.limit, period),
        AlgorithmRow::SlidingWindow => Limit::sliding_window(row.limit, period),
    };
    let limit = match row.burst {
        None => limit,
        Some(burst) => limit.and_then(|limit| limit.with_burst(burst)),
    };
    // What the core calls an amount is called the limit here.
    limit.map_err(|error| error.to_string().replacen("amount:", "limit:", 1))
}

fn parse_conditions(when: &Table, problems: &mut Vec<String>) -> Vec<Condition> {
    if when.len() > CONDITIONS_MAX {
        problems.push(format!("when: {} dimensions is outside 0 to {CONDITIONS_MAX}", when.len()));
    }
    let mut conditions = Vec::new();
    for (dimension, value) in when {
        match parse_condition(dimension, value) {
            Ok(condition) => conditions.push(condition),
            Err(problem) => problems.push(format!("when.{dimension}: {problem}")),
        }
    }
    conditions
}

fn parse_condition(dimension: &str, value: &Value) -> Result<Condition, String> {
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
    let parsed: Option<Vec<_>> = patterns.iter().map(|value| value.as_str().map(Pattern::new)).collect();
    let any_of = parsed.ok_or("a pattern is text")?;
    Ok(Condition { dimension: dimension.to_owned(), any_of })
}

impl From<ClassRow> for Class {
    fn from(row: ClassRow) -> Self {
        match row {
            ClassRow::Comfort => Self::Comfort,
            ClassRow::Cost => Self::Cost,
            ClassRow::Security => Self::Security,
        }
    }
}

impl From<ModeRow> for Mode {
    fn from(row: ModeRow) -> Self {
        match row {
            ModeRow::Enforce => Self::Enforce,
            ModeRow::Shadow => Self::Shadow,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dimensions, RuleSet};

    fn problems(text: &str) -> Vec<String> {
        RuleSet::parse(text).expect_err("has problems").0
    }

    #[test]
    fn a_file_is_read_in_order_with_defaults() {
        let set = RuleSet::parse(
            r#"
            [[rules]]
            name = "per_user"
            key = ["user"]
            limit = 10
            period = "1s"

            [[rules]]
            name = "logins"
            tenant = "acme"
            version = 7
            class = "security"
            mode = "shadow"
            algorithm = "sliding_window"
            key = ["ip", "user"]
            limit = 5
            period = "1m"
            when = { path = "/login" }
            "#,
        )
        .expect("a good file");
        let [first, second] = set.rules() else { panic!("two rules") };
        assert_eq!((first.version, first.class, first.mode), (1, Class::Comfort, Mode::Enforce));
        assert_eq!((second.version, second.class, second.mode), (7, Class::Security, Mode::Shadow));
        assert!(first.is_for("acme") && first.is_for("other"));
        assert!(second.is_for("acme") && !second.is_for("other"));
        let login = Dimensions::new([("ip", "::1"), ("user", "a"), ("path", "/login")]).expect("fine");
        assert_eq!(set.matching(&login).count(), 2);
        let other = Dimensions::new([("ip", "::1"), ("user", "a"), ("path", "/")]).expect("fine");
        assert_eq!(set.matching(&other).map(|rule| &rule.name).collect::<Vec<_>>(), ["per_user"]);
    }

    #[test]
    fn every_problem_is_named() {
        let found = problems(
            r#"
            [[rules]]
            name = ""
            key = ["us er"]
            limit = 4294967296
            period = "1s"
            when = { path = 3, method = [] }

            [[rules]]
            name = "b"
            key = []
            limit = 1
            period = "1 fortnight"

            [[rules]]
            name = "c"
            key = []
            limit = 1
            period = "1s"
            brust = 4
            "#,
        );
        let expected = [
            "rules[0].name: \"\" is not 1 to 128 printable bytes",
            "rules[0].key: \"us er\" cannot name a dimension",
            "rules[0].limit: 4294967296 is outside 0 to 4294967295",
            "rules[0].when.method: 0 patterns is outside 1 to 64",
            "rules[0].when.path: a pattern is text",
            "rules[1].period: \"1 fortnight\" is not a number and a unit of us, ms, s, m, h or d, such as \"1m\"",
        ];
        assert_eq!(found[..expected.len()], expected);
        assert!(found[expected.len()].starts_with("rules[2].unknown field `brust`"), "{found:?}");
    }

    #[test]
    fn a_file_that_is_not_a_set_of_rules_is_refused() {
        assert!(problems("rules = 3")[0].contains("not a list of rules"));
        assert!(problems("[rule]\nname = 1")[0].starts_with("rule: not known"));
        assert_eq!(RuleSet::parse("").map(|set| set.rules().len()), Ok(0));
        let twice = "[[rules]]\nname='a'\nkey=[]\nlimit=1\nperiod='1s'\n".repeat(2);
        assert_eq!(problems(&twice), ["rules: \"a\" is given twice"]);
    }

    #[test]
    fn a_version_tells_sets_apart() {
        let [a, b] = ["", "# a comment"].map(|text| RuleSet::parse(text).expect("good").version().to_owned());
        assert_ne!(a, b);
        assert_eq!(a.len(), 12);
    }
}
