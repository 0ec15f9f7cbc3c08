//! The rules file: TOML, parsed once into rules that need no second look.

use std::collections::HashSet;
use std::fmt;
use std::time::Duration;

use tidegate_core::{Algorithm, Class, Limit, LimitError};
use toml::{Table, Value};

use crate::dimensions::{ADDRESS, DIMENSIONS_MAX, HEADER_PREFIX, is_name};
use crate::network::parse_network;
use crate::pattern::Pattern;
use crate::period::parse_period;
use crate::rule::{Condition, KEY_PARTS_MAX, Mode, Rule};
use crate::set::RULES_MAX;

/// The largest rules file.
pub const FILE_BYTES_MAX: usize = 16 << 20;

/// The longest name of a rule: it is told in headers.
const RULE_NAME_BYTES_MAX: usize = 128;
/// The most conditions of a rule.
const CONDITIONS_MAX: usize = 8;
/// The most header fields that the rules of a set look at.
const HEADERS_MAX: usize = 16;
const _: () = assert!(HEADERS_MAX < DIMENSIONS_MAX, "there are other dimensions too");
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

/// What a rule may say, in the order in which problems are told.
const FIELDS: &[&str] = &[
    "name",
    "tenant",
    "version",
    "class",
    "paid",
    "tolerance",
    "mode",
    "algorithm",
    "key",
    "limit",
    "period",
    "burst",
    "when",
];

/// The largest limit and burst.
const AMOUNT_MAX: u64 = u32::MAX as u64;

/// The rules of a file, or all that is wrong with it.
pub(crate) fn parse_rules(text: &str) -> Result<(Vec<Rule>, Option<String>), Problems> {
    let (rows, placement) = rows_of(text).map_err(|problem| Problems(vec![problem]))?;
    let mut problems = Vec::new();
    let placement = placement.and_then(|value| {
        read_dimension(value).map_err(|problem| problems.push(format!("placement: {problem}"))).ok()
    });
    let mut rules = Vec::with_capacity(rows.len());
    for (at, row) in rows.into_iter().enumerate() {
        match parse_row(row) {
            Ok(rule) => rules.push(rule),
            Err(found) => problems.extend(found.into_iter().map(|problem| format!("rules[{at}]{problem}"))),
        }
    }
    problems.extend(repeated_names(&rules));
    problems.extend(too_many_headers(&rules));
    if problems.is_empty() { Ok((rules, placement)) } else { Err(Problems(problems)) }
}

/// What is wrong with a text that is not TOML, and where, in one line.
pub fn syntax_problem(text: &str, error: &toml::de::Error) -> String {
    let message = error.message().replace('\n', ", ");
    let Some(before) = error.span().and_then(|span| text.get(..span.start)) else { return message };
    let line_start = before.rfind('\n').map_or(0, |end| end + 1);
    let line = 1 + before.matches('\n').count();
    let column = 1 + before[line_start..].chars().count();
    format!("line {line}, column {column}: {message}")
}

/// The rows of a file, and what its requests are placed by.
fn rows_of(text: &str) -> Result<(Vec<Value>, Option<Value>), String> {
    if text.len() > FILE_BYTES_MAX {
        return Err(format!("{} bytes is outside 0 to {FILE_BYTES_MAX}", text.len()));
    }
    let mut file: Table = text.parse().map_err(|error| syntax_problem(text, &error))?;
    let (rules, placement) = (file.remove("rules"), file.remove("placement"));
    if let Some(unknown) = file.keys().next() {
        return Err(format!("{unknown}: not known; a rules file has [[rules]] and placement"));
    }
    let rows = match rules {
        // An empty file is more often one that is being written than one that was meant.
        None => return Err("rules: missing; a file that means none says `rules = []`".to_owned()),
        Some(Value::Array(rows)) => rows,
        Some(other) => return Err(format!("rules: {} is not a list of rules", kind_of(&other))),
    };
    if rows.len() > RULES_MAX {
        return Err(format!("rules: {} is outside 0 to {RULES_MAX}", rows.len()));
    }
    Ok((rows, placement))
}

fn repeated_names(rules: &[Rule]) -> Vec<String> {
    let mut seen = HashSet::new();
    let repeated = rules.iter().filter(|rule| !seen.insert(rule.name.as_str()));
    repeated.map(|rule| format!("rules: {:?} is given twice", rule.name)).collect()
}

/// A request has room for so many of its header fields beside what else it is known by.
fn too_many_headers(rules: &[Rule]) -> Option<String> {
    let used = rules.iter().flat_map(Rule::dimensions_used).filter(|name| name.starts_with(HEADER_PREFIX));
    let count = used.collect::<HashSet<_>>().len();
    (count > HEADERS_MAX).then(|| {
        format!("rules: {count} different {HEADER_PREFIX}* dimensions is outside 0 to {HEADERS_MAX}")
    })
}

fn parse_row(row: Value) -> Result<Rule, Vec<String>> {
    let Value::Table(table) = row else {
        return Err(vec![format!(": a rule is a table, not {}", kind_of(&row))]);
    };
    let mut fields = Fields { table, problems: Vec::new() };
    let rule = parse_fields(&mut fields);
    fields.refuse_unknown();
    match rule {
        Some(rule) if fields.problems.is_empty() => Ok(rule),
        _ => Err(fields.problems),
    }
}

/// Reads every field before it gives up, so that all problems of a rule are told at once.
fn parse_fields(fields: &mut Fields) -> Option<Rule> {
    let name = fields.required("name", read_name);
    let tenant = fields.optional("tenant", read_text);
    let version = fields.optional("version", |value| read_number(&value, 0, i64::MAX.unsigned_abs()));
    let class = fields.optional("class", |value| read_choice(value, &CLASSES));
    let paid = fields.paid(class);
    let tolerance = fields.optional("tolerance", |value| read_number(&value, 0, 100));
    let mode = fields.optional("mode", |value| read_choice(value, &MODES));
    let algorithm = fields.optional("algorithm", |value| read_choice(value, &ALGORITHMS));
    let key = fields.required("key", read_key);
    let amount = fields.required("limit", |value| read_number(&value, 0, AMOUNT_MAX));
    let period = fields.required("period", read_period);
    let burst = fields.optional("burst", |value| read_number(&value, 1, AMOUNT_MAX));
    let when = fields.conditions();
    let limit = fields.limit(algorithm.unwrap_or(Algorithm::Gcra), amount?, period?, burst);
    Some(Rule {
        name: name?,
        tenant,
        version: version.unwrap_or(FIRST_VERSION),
        class: class.unwrap_or_default(),
        paid: paid.unwrap_or_default(),
        tolerance_ppm: tolerance.and_then(|percent| u32::try_from(percent * PPM_PER_PERCENT).ok()),
        mode: mode.unwrap_or_default(),
        limit: limit?,
        key: key?,
        when,
    })
}

/// The fields of one rule, taken one by one.
struct Fields {
    table: Table,
    /// Each begins with what is wrong: `.limit: …`.
    problems: Vec<String>,
}

impl Fields {
    fn optional<T>(&mut self, field: &str, read: impl FnOnce(Value) -> Result<T, String>) -> Option<T> {
        let read = read(self.table.remove(field)?);
        read.map_err(|problem| self.problems.push(format!(".{field}: {problem}"))).ok()
    }

    fn required<T>(&mut self, field: &str, read: impl FnOnce(Value) -> Result<T, String>) -> Option<T> {
        if !self.table.contains_key(field) {
            self.problems.push(format!(".{field}: missing"));
        }
        self.optional(field, read)
    }

    /// Whether who is limited pays, which only the class for money asks.
    fn paid(&mut self, class: Option<Class>) -> Option<bool> {
        let paid = self.optional("paid", |value| {
            value.as_bool().ok_or_else(|| format!("true or false is expected, not {}", kind_of(&value)))
        })?;
        if paid && class != Some(Class::Cost) {
            self.problems.push(".paid: only a rule of class \"cost\" can say so".to_owned());
        }
        Some(paid)
    }

    fn limit(
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
        // What the core calls an amount is called the limit here.
        let problem = |error: LimitError| format!(".{}", error.to_string().replacen("amount:", "limit:", 1));
        limit.map_err(|error| self.problems.push(problem(error))).ok()
    }

    fn conditions(&mut self) -> Vec<Condition> {
        let Some(when) = self.optional("when", read_table) else { return Vec::new() };
        let mut problems = Vec::new();
        let conditions = parse_conditions(&when, &mut problems);
        self.problems.extend(problems.into_iter().map(|problem| format!(".{problem}")));
        conditions
    }

    fn refuse_unknown(&mut self) {
        let known = FIELDS.join(", ");
        let unknown = self.table.keys().map(|field| format!(".{field}: not known; a rule has {known}"));
        self.problems.extend(unknown);
    }
}

/// Millionths in a hundredth.
const PPM_PER_PERCENT: u64 = 10_000;

/// The version of a rule that states none.
const FIRST_VERSION: u64 = 1;

const CLASSES: [(&str, Class); 3] = [
    (Class::Comfort.as_str(), Class::Comfort),
    (Class::Cost.as_str(), Class::Cost),
    (Class::Security.as_str(), Class::Security),
];
const MODES: [(&str, Mode); 2] =
    [(Mode::Enforce.as_str(), Mode::Enforce), (Mode::Shadow.as_str(), Mode::Shadow)];
const ALGORITHMS: [(&str, Algorithm); 2] =
    [("gcra", Algorithm::Gcra), ("sliding_window", Algorithm::SlidingWindow)];

fn kind_of(value: &Value) -> &'static str {
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

fn read_text(value: Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text),
        other => Err(format!("text is expected, not {}", kind_of(&other))),
    }
}

fn read_table(value: Value) -> Result<Table, String> {
    match value {
        Value::Table(table) => Ok(table),
        other => Err(format!("a table of dimensions is expected, not {}", kind_of(&other))),
    }
}

fn read_number(value: &Value, least: u64, most: u64) -> Result<u64, String> {
    let &Value::Integer(number) = value else {
        return Err(format!("a whole number from {least} to {most} is expected, not {}", kind_of(value)));
    };
    let inside = u64::try_from(number).ok().filter(|number| (least..=most).contains(number));
    inside.ok_or_else(|| format!("{number} is outside {least} to {most}"))
}

fn read_choice<T: Copy>(value: Value, choices: &[(&str, T)]) -> Result<T, String> {
    let text = read_text(value)?;
    let chosen = choices.iter().find(|(name, _)| *name == text);
    chosen.map(|(_, choice)| *choice).ok_or_else(|| {
        let names: Vec<_> = choices.iter().map(|(name, _)| format!("{name:?}")).collect();
        format!("{text:?} is none of {}", names.join(", "))
    })
}

fn read_name(value: Value) -> Result<String, String> {
    let name = read_text(value)?;
    if (1..=RULE_NAME_BYTES_MAX).contains(&name.len()) && !name.chars().any(char::is_control) {
        return Ok(name);
    }
    Err(format!("{name:?} is not 1 to {RULE_NAME_BYTES_MAX} printable bytes"))
}

fn read_key(value: Value) -> Result<Vec<String>, String> {
    let Value::Array(names) = value else {
        return Err(format!("a list of dimensions is expected, not {}", kind_of(&value)));
    };
    if names.len() > KEY_PARTS_MAX {
        return Err(format!("{} dimensions is outside 0 to {KEY_PARTS_MAX}", names.len()));
    }
    names.into_iter().map(read_dimension).collect()
}

fn read_dimension(value: Value) -> Result<String, String> {
    let name = read_text(value)?;
    if is_name(&name) { Ok(name) } else { Err(format!("{name:?} cannot name a dimension")) }
}

/// A period that some limit can have: told here, so that no other mistake in the rule hides it.
fn read_period(value: Value) -> Result<Duration, String> {
    let period = parse_period(&read_text(value)?)?;
    let problem = |error: LimitError| error.to_string().replacen("period: ", "", 1);
    Limit::sliding_window(1, period).map(|_| period).map_err(problem)
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
    let mut condition =
        Condition { dimension: dimension.to_owned(), any_of: Vec::new(), networks: Vec::new() };
    for value in patterns {
        let pattern = Pattern::new(value.as_str().ok_or("a pattern is text")?);
        // Addresses have many spellings: only a pattern with a star is compared as text.
        if dimension == ADDRESS && !pattern.is_wild() {
            condition.networks.push(parse_network(pattern.as_str())?);
        } else {
            condition.any_of.push(pattern);
        }
    }
    Ok(condition)
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
    fn a_rule_says_how_a_region_treats_it() {
        let set = RuleSet::parse(
            r#"
            placement = "user"

            [[rules]]
            name = "per_user"
            class = "cost"
            paid = true
            key = ["user", "path"]
            limit = 10
            period = "1s"

            [[rules]]
            name = "per_path"
            tolerance = 2
            key = ["path"]
            limit = 10
            period = "1s"
            "#,
        )
        .expect("a good file");
        let [per_user, per_path] = set.rules() else { panic!("two rules") };
        assert_eq!((per_user.paid, per_user.tolerance_ppm, set.crosses(per_user)), (true, None, false));
        assert_eq!(
            (per_path.paid, per_path.tolerance_ppm, set.crosses(per_path)),
            (false, Some(20_000), true)
        );
        assert_eq!(set.dimensions_used("").into_iter().collect::<Vec<_>>(), ["path", "user"]);
    }

    #[test]
    fn what_a_region_cannot_take_is_told() {
        let rule = "[[rules]]\nname = 'a'\nkey = []\nlimit = 1\nperiod = '1s'\n";
        let wrong = |rest: &str| problems(&format!("{rule}{rest}"));
        assert_eq!(wrong("paid = true"), ["rules[0].paid: only a rule of class \"cost\" can say so"]);
        assert_eq!(wrong("paid = 1"), ["rules[0].paid: true or false is expected, not an integer"]);
        assert_eq!(wrong("tolerance = 101"), ["rules[0].tolerance: 101 is outside 0 to 100"]);
        let placed = problems(&format!("placement = 'us er'\n{rule}"));
        assert_eq!(placed, ["placement: \"us er\" cannot name a dimension"]);
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
            "rules[2].brust: not known; a rule has name, tenant, version, class, paid, tolerance, mode, algorithm, key, limit, period, \
             burst, when",
        ];
        assert_eq!(found, expected);
    }

    /// A rule with one line changed or added.
    fn rule_with(line: &str) -> String {
        let field = line.split(' ').next().expect("a name");
        let lines = ["name = 'a'", "key = []", "limit = 1", "period = '1s'"];
        let others = lines.iter().filter(|other| other.split(' ').next() != Some(field));
        others.chain([&line]).fold("[[rules]]\n".to_owned(), |text, line| format!("{text}{line}\n"))
    }

    #[test]
    fn a_wrong_field_is_named_with_what_it_may_be() {
        let cases = [
            ("limit = -2", ".limit: -2 is outside 0 to 4294967295"),
            ("limit = 1.5", ".limit: a whole number from 0 to 4294967295 is expected, not a float"),
            ("limit = '1'", ".limit: a whole number from 0 to 4294967295 is expected, not text"),
            ("burst = 0", ".burst: 0 is outside 1 to 4294967295"),
            ("burst = 4294967296", ".burst: 4294967296 is outside 1 to 4294967295"),
            ("version = -1", ".version: -1 is outside 0 to 9223372036854775807"),
            ("name = 7", ".name: text is expected, not an integer"),
            ("tenant = ['a']", ".tenant: text is expected, not a list"),
            ("class = 'luxury'", ".class: \"luxury\" is none of \"comfort\", \"cost\", \"security\""),
            ("mode = 'off'", ".mode: \"off\" is none of \"enforce\", \"shadow\""),
            ("algorithm = 'leaky'", ".algorithm: \"leaky\" is none of \"gcra\", \"sliding_window\""),
            ("key = 'user'", ".key: a list of dimensions is expected, not text"),
            ("key = [1]", ".key: text is expected, not an integer"),
            ("key = ['a','b','c','d','e','f','g','h','i']", ".key: 9 dimensions is outside 0 to 8"),
            ("period = 60", ".period: text is expected, not an integer"),
            (
                "period = '367d'",
                ".period: 31708800s is not a whole number of microseconds from 1 us to 366 days",
            ),
            ("when = 'always'", ".when: a table of dimensions is expected, not text"),
            ("when = { 'a b' = 'x' }", ".when.a b: cannot name a dimension"),
            (
                "when = { ip = ['10.0.0.0/8', 'home'] }",
                ".when.ip: \"home\" is neither an address nor a network such \
             as \"10.0.0.0/8\"",
            ),
            (
                "when = { ip = '10.0.0.1/8' }",
                ".when.ip: \"10.0.0.1/8\" has bits behind its prefix; the network is \
             \"10.0.0.0/8\"",
            ),
        ];
        for (line, problem) in cases {
            assert_eq!(problems(&rule_with(line)), [format!("rules[0]{problem}")], "{line}");
        }
        assert_eq!(problems("rules = [3]"), ["rules[0]: a rule is a table, not an integer"]);
        let missing = [
            "rules[0].name: missing",
            "rules[0].key: missing",
            "rules[0].limit: missing",
            "rules[0].period: missing",
        ];
        assert_eq!(problems("[[rules]]"), missing);
        let both = problems("[[rules]]\nname = 'a'\nkey = []\nlimit = -1\nperiod = '0s'\n");
        let told = both.iter().map(|problem| problem.split(':').next().unwrap_or_default());
        assert_eq!(told.collect::<Vec<_>>(), ["rules[0].limit", "rules[0].period"]);
    }

    #[test]
    fn all_problems_of_a_rule_are_told() {
        let found = problems("[[rules]]\nlimit = -2\nclass = 3\nperiod = 'x'\nlimt = 1");
        let fields: Vec<_> = found.iter().filter_map(|problem| problem.split([':', ' ']).next()).collect();
        assert_eq!(
            fields,
            [
                "rules[0].name",
                "rules[0].class",
                "rules[0].key",
                "rules[0].limit",
                "rules[0].period",
                "rules[0].limt"
            ]
        );
    }

    #[test]
    fn conditions_on_the_address_are_networks() {
        let rule = rule_with("when = { ip = ['10.0.0.0/8', '2001:db8::/32', '192.0.2.7', '198.51.100.*'] }");
        let set = RuleSet::parse(&rule).expect("good");
        let applies = |ip: &str| set.matching(&Dimensions::new([("ip", ip)]).expect("fine")).count() == 1;
        for ip in
            ["10.1.2.3", "::ffff:10.1.2.3", "2001:db8::1", "2001:db8:0:1::/64", "192.0.2.7", "198.51.100.9"]
        {
            assert!(applies(ip), "{ip}");
        }
        for ip in
            ["11.0.0.1", "2001:db9::1", "2001::/16", "192.0.2.8", "198.51.10.9", "", "10.0.0.0.1", "unknown"]
        {
            assert!(!applies(ip), "{ip}");
        }
        assert_eq!(set.matching(&Dimensions::default()).count(), 0);
    }

    #[test]
    fn networks_see_all_of_an_address_that_is_counted_by_its_prefix() {
        let set = RuleSet::parse(&rule_with("when = { ip = '2001:db8:1:2::6' }")).expect("good");
        for (address, applies) in [("2001:db8:1:2::6", 1), ("2001:db8:1:2::7", 0)] {
            let mut request = Dimensions::default();
            request.add_address(address.parse().expect("an address")).expect("the first");
            assert_eq!(set.matching(&request).count(), applies, "{address}");
        }
    }

    #[test]
    fn a_set_says_which_dimensions_it_looks_at() {
        let text = "
            [[rules]]
            name = 'a'
            key = ['ip', 'header.x-api-key']
            limit = 1
            period = '1s'
            when = { path = '/*' }
            [[rules]]
            name = 'b'
            tenant = 'acme'
            key = ['ip', 'host']
            limit = 1
            period = '1s'
        ";
        let set = RuleSet::parse(text).expect("good");
        let used = |tenant| set.dimensions_used(tenant).into_iter().collect::<Vec<_>>();
        assert_eq!(used(""), ["header.x-api-key", "ip", "path"]);
        assert_eq!(used("acme"), ["header.x-api-key", "host", "ip", "path"]);
    }

    #[test]
    fn a_set_looks_at_a_bounded_number_of_header_fields() {
        let rules = |count: usize| {
            let rule = |at| format!("[[rules]]\nname='{at}'\nkey=['header.h{at}']\nlimit=1\nperiod='1s'\n");
            (0..count).map(rule).collect::<String>()
        };
        assert!(RuleSet::parse(&rules(16)).is_ok());
        assert_eq!(problems(&rules(17)), ["rules: 17 different header.* dimensions is outside 0 to 16"]);
    }

    #[test]
    fn a_file_that_is_not_a_set_of_rules_is_refused() {
        assert!(problems("rules = 3")[0].contains("not a list of rules"));
        assert!(problems("[rule]\nname = 1")[0].starts_with("rule: not known"));
        assert!(problems("")[0].starts_with("rules: missing"));
        assert_eq!(RuleSet::parse("rules = []").map(|set| set.rules().len()), Ok(0));
        let twice = "[[rules]]\nname='a'\nkey=[]\nlimit=1\nperiod='1s'\n".repeat(2);
        assert_eq!(problems(&twice), ["rules: \"a\" is given twice"]);
    }

    #[test]
    fn a_version_tells_sets_apart() {
        let [a, b] = ["rules = []", "rules = [] # none"]
            .map(|text| RuleSet::parse(text).expect("good").version().to_owned());
        assert_ne!(a, b);
        assert_eq!(a.len(), 12);
    }
}
