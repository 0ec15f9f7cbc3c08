//! Overrides as rows state them: of a rule, or of a namespace of direct limits.

use std::collections::HashSet;
use std::time::Duration;

use tidegate_core::Limit;
use toml::Value;

use super::{OrderedRules, RowPlace, each_body};
use crate::expiry::read_expiry;
use crate::fields::{
    Fields, kind_of, read_instant, read_name, read_namespace_text, read_patterns, read_period, read_text,
};
use crate::interner::Interner;
use crate::overrides::{
    NamespaceDraft, NamespaceOverrides, NamespaceOverridesBuilder, OVERRIDE_PERIOD_MS_MAX,
    OVERRIDE_PERIOD_MS_MIN, OverrideDraft, check_stars,
};
use crate::pattern::Pattern;
use crate::problems::{ProblemList, Problems};
use crate::rows::RuleRow;

/// Fields of an override of a rule.
const RULE_FIELDS: &[&str] =
    &["name", "rule", "tenant", "priority", "key", "limit", "period", "burst", "mode", "expires"];
/// Fields of an override of a namespace.
const NAMESPACE_FIELDS: &[&str] =
    &["name", "namespace", "identifier", "tenant", "limit", "period", "expires"];

/// The version of a namespace override in a file.
const FILE_VERSION: u32 = 1;

/// Compiles the rows of a store that are overrides of namespaces. Other rows are left out.
pub(crate) fn namespace_overrides(rows: &[RuleRow], now_ms: u64) -> Result<NamespaceOverrides, Problems> {
    let (mut problems, mut texts) = (ProblemList::default(), Interner::default());
    let mut builder = NamespaceOverridesBuilder::default();
    each_body(rows.iter().filter(|row| row.is_namespace_override()), |row, body| {
        let place = RowPlace::Named("overrides", &row.name);
        if let Some(value) = problems.named_body(&place, row, body) {
            take_namespace_override(
                (&mut builder, &mut texts, &mut problems),
                &place,
                value,
                row.version,
                now_ms,
            );
        }
    });
    let overrides = builder.finish(|name, misfit| problems.add(format_args!("overrides[{name:?}]{misfit}")));
    problems.into_result()?;
    Ok(overrides)
}

/// Whether a row is an override of a namespace, also if it has problems.
fn is_of_namespace(row: &Value) -> bool {
    row.as_table().is_some_and(|table| table.contains_key("namespace") && !table.contains_key("rule"))
}

/// Takes an override of a namespace, unless it ended before `now_ms`.
fn take_namespace_override(
    (builder, texts, problems): (&mut NamespaceOverridesBuilder, &mut Interner, &mut ProblemList),
    place: &RowPlace<'_>,
    row: Value,
    version: u32,
    now_ms: u64,
) {
    let Value::Table(table) = row else {
        return problems.add(format_args!("{place}: an override is a table, not {}", kind_of(&row)));
    };
    let mut fields = Fields::new(table);
    let draft = parse_namespace_override(&mut fields, texts, version);
    fields.refuse_unknown("an override of a namespace", NAMESPACE_FIELDS);
    if !fields.problems.is_empty() {
        return problems.of_row(place, fields.problems);
    }
    let Some(draft) = draft.filter(|draft| draft.expires_ms.is_none_or(|expires_ms| now_ms < expires_ms))
    else {
        return;
    };
    if let Err(misfit) = builder.add(draft) {
        problems.add(format_args!("{place}{misfit}"));
    }
}

fn parse_namespace_override(
    fields: &mut Fields,
    texts: &mut Interner,
    version: u32,
) -> Option<NamespaceDraft> {
    let name = fields.required("name", read_name);
    let namespace = fields.required("namespace", read_namespace_text);
    let identifier = fields.required("identifier", read_identifier);
    let tenant = fields.optional("tenant", read_text);
    let amount = fields.amount();
    let period = fields.required("period", read_whole_milliseconds);
    let expires_ms = fields.optional("expires", |value| read_instant(&value));
    // The namespace selects the algorithm, so only amount and period count.
    let limit = Limit::sliding_window(amount?, period?);
    let limit = limit.map_err(|error| fields.problem("limit", error)).ok();
    Some(NamespaceDraft {
        name: name?,
        tenant: tenant.map(|tenant| texts.text(&tenant)),
        namespace: texts.text(&namespace?),
        identifier: identifier?,
        limit: limit?,
        version,
        expires_ms,
    })
}

fn read_identifier(value: Value) -> Result<Pattern, String> {
    let text = read_namespace_text(value)?;
    check_stars(&text)?;
    Ok(Pattern::new(text))
}

fn read_key(value: Value) -> Result<Vec<Pattern>, String> {
    let key = read_patterns(value)?;
    key.iter().try_for_each(|part| check_stars(part.as_str()))?;
    Ok(key)
}

/// Requests state their periods in milliseconds, so an override can have no finer one.
fn read_whole_milliseconds(value: Value) -> Result<Duration, String> {
    let period = read_period(value)?;
    let milliseconds = u64::try_from(period.as_millis()).unwrap_or(u64::MAX);
    let is_whole = Duration::from_millis(milliseconds) == period;
    if is_whole && (OVERRIDE_PERIOD_MS_MIN..=OVERRIDE_PERIOD_MS_MAX).contains(&milliseconds) {
        return Ok(period);
    }
    Err(format!(
        "{period:?} is not a whole number of milliseconds from {OVERRIDE_PERIOD_MS_MIN} to \
         {OVERRIDE_PERIOD_MS_MAX}"
    ))
}

impl OrderedRules {
    /// Takes an override of a rules file. It may have ended, because a file must stay valid when
    /// one of its overrides ends.
    pub(crate) fn take_file_override(&mut self, place: &RowPlace<'_>, mut row: Value) {
        if let Value::Table(table) = &mut row
            && let Some(value) = table.remove("expires")
        {
            match read_expiry(&value) {
                Ok(at_ms) => drop(table.insert("expires".to_owned(), at_ms.into())),
                Err(problem) => self.problems.of_row(place, vec![format!(".expires: {problem}")]),
            }
        }
        // Time 0, so that no override has expired: each lookup checks the expiry.
        self.take_override(place, row, FILE_VERSION, 0);
    }

    /// Takes an override, unless it ended before `now_ms`. The version is that of its row.
    pub(crate) fn take_override(&mut self, place: &RowPlace<'_>, row: Value, version: u32, now_ms: u64) {
        if is_of_namespace(&row) {
            let builders = (&mut self.namespaces, &mut self.texts, &mut self.problems);
            return take_namespace_override(builders, place, row, version, now_ms);
        }
        let draft = match self.read_override(row) {
            Ok(Some(draft)) => draft,
            Ok(None) => return,
            Err(found) => return self.problems.of_row(place, found),
        };
        if draft.expires_ms.is_some_and(|expires_ms| expires_ms <= now_ms) {
            return;
        }
        if let Err(misfit) = self.rule_overrides.add(draft) {
            self.problems.add(format_args!("{place}{misfit}"));
        }
    }

    /// Returns `None` if the rule of the override has problems, which are reported already.
    fn read_override(&mut self, row: Value) -> Result<Option<OverrideDraft>, Vec<String>> {
        let Value::Table(table) = row else {
            return Err(vec![format!(": an override is a table, not {}", kind_of(&row))]);
        };
        let mut fields = Fields::new(table);
        let draft = self.parse_override(&mut fields);
        fields.refuse_unknown("an override", RULE_FIELDS);
        if fields.problems.is_empty() { Ok(draft) } else { Err(fields.problems) }
    }

    fn parse_override(&mut self, fields: &mut Fields) -> Option<OverrideDraft> {
        let name = fields.required("name", read_name);
        let rule = fields.required("rule", read_name);
        let tenant = fields.optional("tenant", read_text);
        let priority = fields.priority();
        let key = fields.required("key", read_key);
        let amount = fields.amount();
        let period = fields.optional("period", read_period);
        let burst = fields.burst();
        let mode = fields.mode();
        let expires_ms = fields.optional("expires", |value| read_instant(&value));
        let at = self.rule_at(fields, &rule?)?;
        let key = self.key_of(fields, at, key?)?;
        let tenant = self.tenant_of(fields, Some(at), tenant);
        let (rule, rule_burst) = &self.rules[at as usize];
        let amount = amount?;
        // An inherited burst is at most the override's amount: a smaller limit must not pass the
        // rule's whole burst at once.
        let burst = burst.or(rule_burst.map(|burst| burst.min(amount.max(1))));
        let limit =
            fields.limit(rule.limit.algorithm(), amount, period.unwrap_or(rule.limit.period()), burst)?;
        let rule_has_burst = rule_burst.is_some();
        Some(OverrideDraft {
            name: name?,
            target: at,
            tenant,
            key,
            limit,
            mode,
            priority,
            expires_ms,
            rule_has_burst,
            version: None,
        })
    }

    /// Refuses a name that an override of a rule and one of a namespace have.
    pub(super) fn refuse_shared_names(&mut self) {
        if self.namespaces.is_empty() {
            return;
        }
        let mut names = HashSet::new();
        self.namespaces.each_name(|name| {
            names.insert(name.to_owned());
        });
        let problems = &mut self.problems;
        self.rule_overrides.each_name(|name| {
            if names.contains(name) {
                problems.add(format_args!("overrides[{name:?}].name: {name:?} is given twice"));
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RuleSet;
    use crate::rows::RowKind;

    const RULE: &str = "[[rules]]\nname='r'\nkey=['user']\nlimit=1\nperiod='1s'\n";

    /// An override with one line changed or added.
    fn problems(line: &str) -> Vec<String> {
        let field = line.split('=').next().unwrap_or_default();
        let lines = ["name='o'", "namespace='emails'", "identifier='vip-*'", "limit=5", "period='1m'"];
        let others = lines.iter().filter(|other| other.split('=').next() != Some(field));
        let text =
            others.chain([&line]).fold(format!("{RULE}[[overrides]]\n"), |text, line| text + line + "\n");
        let found = RuleSet::parse(&text).expect_err("has problems").0;
        found.iter().map(|problem| problem.split_once(": ").map_or("", |(_, rest)| rest).to_owned()).collect()
    }

    #[test]
    fn a_file_holds_overrides_of_rules_and_of_namespaces() {
        let text = format!(
            "{RULE}[[overrides]]\nname='o'\nrule='r'\nkey=['a']\nlimit=2\n[[overrides]]\nname='n'\n\
             namespace='emails'\nidentifier='vip-*'\nlimit=500\nperiod='1m'\nexpires=2027-01-01T00:00:00Z\n"
        );
        let set = RuleSet::parse(&text).expect("a good file");
        assert_eq!((set.overrides(), set.wildcards()), (2, 1));
        let found = set.namespace_override("acme", "emails", "vip-1", 1_798_761_599_999).expect("it applies");
        assert_eq!((found.name, found.limit, found.period_ms), ("n", 500, 60_000));
        assert_eq!((found.version, found.is_of_tenant), (FILE_VERSION, false));
        assert_eq!(
            set.namespace_override("acme", "emails", "vip-1", 1_798_761_600_000),
            None,
            "it has expired"
        );
        assert_eq!(set.namespace_override("acme", "r", "a", 0), None, "that is a rule");
    }

    #[test]
    fn each_problem_names_its_field_and_range() {
        let long = format!("namespace='{}'", "n".repeat(513));
        let between = format!("identifier='a*{}*'", "b".repeat(65));
        let cases = [
            ("limit=-1", ".limit: -1 is outside 0 to 4294967295"),
            (
                "expires=1798761600",
                ".expires: 1798761600 is outside 1000000000000 to 253402300799999: expected milliseconds \
                 since the Unix epoch (1798761600000) or RFC 3339 (2027-01-01T00:00:00Z)",
            ),
            (
                "period='999ms'",
                ".period: 999ms is not a whole number of milliseconds from 1000 to 31622400000",
            ),
            (
                "period='1000500us'",
                ".period: 1.0005s is not a whole number of milliseconds from 1000 to 31622400000",
            ),
            ("identifier=''", ".identifier: 0 characters is outside 1 to 512"),
            ("identifier='*a*b*c*d*'", ".identifier: 5 of `*` is outside 0 to 4"),
            (&between, ".identifier: 65 bytes between two `*` is outside 0 to 64"),
            (&long, ".namespace: 513 characters is outside 1 to 512"),
            (
                "burst=3",
                ".burst: not known; an override of a namespace has name, namespace, identifier, tenant, limit, \
                 period, expires",
            ),
            ("rule='r'", ".key: missing"),
        ];
        for (line, expected) in cases {
            assert_eq!(problems(line)[0], format!("overrides[0]{expected}"), "{line}");
        }
    }

    #[test]
    fn names_and_keys_are_unique_among_both_kinds() {
        let of_namespace = |name: &str| {
            format!("[[overrides]]\nname='{name}'\nnamespace='n'\nidentifier='a'\nlimit=1\nperiod='1s'\n")
        };
        let of_rule = "[[overrides]]\nname='o'\nrule='r'\nkey=['a']\nlimit=2\n";
        let wrong = |text: String| RuleSet::parse(&text).expect_err("has problems").to_string();
        let problem = wrong(format!("{RULE}{of_rule}{}", of_namespace("o")));
        assert!(problem.contains("overrides[\"o\"].name: \"o\" is given twice"), "{problem}");
        let problem = wrong(format!("{RULE}{}{}", of_namespace("a"), of_namespace("b")));
        let expected =
            "overrides[\"b\"].identifier: override \"a\" is for the same tenant, namespace and identifier";
        assert!(problem.contains(expected), "{problem}");
    }

    #[test]
    fn rows_of_a_store_carry_their_versions() {
        let body =
            r#"{"namespace":"emails","identifier":"vip-*","limit":5,"period":"60000ms","tenant":"acme"}"#;
        let row =
            RuleRow { kind: RowKind::Override, name: "o".to_owned(), body: body.to_owned(), version: 9 };
        let of_rule =
            RuleRow { body: r#"{"rule":"namespace","key":["a"],"limit":1}"#.to_owned(), ..row.clone() };
        assert!(row.is_namespace_override() && !of_rule.is_namespace_override());
        let overrides = namespace_overrides(&[row.clone(), of_rule], 0).expect("valid");
        let found = overrides.find("acme", "emails", "vip-1", 0).expect("it applies");
        assert_eq!((found.version, found.is_of_tenant, overrides.len()), (9, true, 1));
        let broken = RuleRow { body: body.replace("60000ms", "1"), ..row };
        let problem = namespace_overrides(&[broken], 0).expect_err("refused").to_string();
        assert!(problem.starts_with("overrides[\"o\"].period: "), "{problem}");
    }
}
