//! The rules file: TOML, parsed once into a set that needs no second look.

use toml::{Table, Value};

use crate::compile::{Compiler, RowPlace, TieBreak, has_room_for};
use crate::fields::kind_of;
use crate::lines::TomlLines;
use crate::problems::Problems;
use crate::set::RuleSet;

/// The largest rules file.
pub const FILE_BYTES_MAX: usize = 16 << 20;

/// The lists of a file, and their names in the singular, which are not known.
const LISTS: [(&str, &str); 3] = [("templates", "template"), ("rules", "rule"), ("overrides", "override")];

/// The rows of a file, and the dimension that selects the placement of its requests.
struct Rows {
    templates: Vec<PlacedRow>,
    rules: Vec<PlacedRow>,
    overrides: Vec<PlacedRow>,
    placement: Option<Value>,
}

/// A row and its place in the file.
type PlacedRow = (RowPlace<'static>, Value);

/// The set of a file, or all that is wrong with it, each problem with its line.
pub(crate) fn parse(text: &str, version: String) -> Result<RuleSet, Problems> {
    if text.len() > FILE_BYTES_MAX {
        return Err(format!("{} bytes is outside 0 to {FILE_BYTES_MAX}", text.len()).into());
    }
    compile_text(text, |file| compile(file, version, false))
}

/// Checks a file whose rows are to be put into a rule store, which may have the rules and templates
/// that the file lacks.
pub fn check_part(text: &str) -> Result<(), Problems> {
    compile_text(text, |file| compile(file, String::new(), true)).map(drop)
}

fn compile_text(
    text: &str,
    compile: impl FnOnce(Table) -> Result<RuleSet, Problems>,
) -> Result<RuleSet, Problems> {
    // The lines are looked up only if there are problems.
    let Ok(file) = text.parse::<Table>() else {
        let lines = TomlLines::read(text);
        let problems = compile(lines.table()).err();
        return Err(Problems(lines.locate(problems.map(|problems| problems.0).unwrap_or_default())));
    };
    compile(file).map_err(|problems| Problems(TomlLines::read(text).locate(problems.0)))
}

fn compile(mut file: Table, version: String, is_part: bool) -> Result<RuleSet, Problems> {
    if is_part {
        file.entry("rules").or_insert_with(|| Value::Array(Vec::new()));
    }
    let (rows, mut problems) = rows_of(file);
    let mut compiler = Compiler::new(is_part);
    has_room_for(rows.templates.len(), rows.rules.len(), rows.overrides.len())?;
    if let Some(placement) = rows.placement {
        compiler.placement(placement);
    }
    for (place, row) in rows.templates {
        compiler.template(&place, row);
    }
    for (place, row) in rows.rules {
        compiler.rule(&place, row);
    }
    let mut compiler = compiler.ordered(TieBreak::AsGiven, rows.overrides.len());
    for (place, row) in rows.overrides {
        compiler.take_file_override(&place, row);
    }
    match compiler.finish(version) {
        Ok(set) if problems.is_empty() => Ok(set),
        finished => {
            problems.extend(finished.err().map(|found| found.0).unwrap_or_default());
            Err(Problems(problems))
        }
    }
}

/// Returns the rows of a file, and the problems of its keys.
fn rows_of(mut file: Table) -> (Rows, Vec<String>) {
    let mut problems = Vec::new();
    // An empty file is more often one that is being written than one that was meant.
    if !["rules", "rule", "overrides", "override"].iter().any(|key| file.contains_key(*key)) {
        problems.push("rules: missing; write `rules = []` for a file without rules".to_owned());
    }
    let [templates, rules, overrides] = LISTS.map(|(list, singular)| {
        let mut placed = match file.remove(list) {
            None => Vec::new(),
            Some(Value::Array(rows)) => placed_in(list, rows),
            Some(other) => {
                problems.push(format!("{list}: {} is not a list of {list}", kind_of(&other)));
                Vec::new()
            }
        };
        // Their fields are checked too, so that the next look at the file is not for those.
        let (header, misnamed) = match file.remove(singular) {
            None => return placed,
            Some(Value::Array(rows)) => (format!("[[{singular}]]"), rows),
            Some(row) => (format!("[{singular}]"), vec![row]),
        };
        problems.push(format!("{header}: did you mean [[{list}]]?"));
        placed.extend(placed_in(singular, misnamed));
        placed
    });
    let placement = file.remove("placement");
    let unknown = |field: &String| {
        format!("{field}: not known; a rules file has [[rules]], [[templates]], [[overrides]] and placement")
    };
    problems.extend(file.keys().map(unknown));
    (Rows { templates, rules, overrides, placement }, problems)
}

fn placed_in(list: &'static str, rows: Vec<Value>) -> Vec<PlacedRow> {
    rows.into_iter().enumerate().map(|(at, row)| (RowPlace::Row(list, at), row)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Class, Dimensions, Mode, Regime, Rule};
    use tidegate_core::bound::Fleet;

    /// The names of the rules that apply to a request of no tenant.
    fn applying(set: &RuleSet, request: &Dimensions<'_>) -> Vec<String> {
        set.matching("", request, 0).map(|found| found.rule.name.to_string()).collect()
    }

    /// The problems of a text, without their lines.
    fn problems(text: &str) -> Vec<String> {
        let without_line = |problem: &String| match problem.split_once(": ") {
            Some((line, problem)) if line.starts_with("line ") && !line.contains(',') => problem.to_owned(),
            _ => problem.clone(),
        };
        RuleSet::parse(text).expect_err("has problems").0.iter().map(without_line).collect()
    }

    #[test]
    fn unknown_table_hides_no_other_problem() {
        let text = "[[limits]]\nname = 'a'\n\n[[rules]]\nname = 'b'\nkey = []\nlimit = -1\nperiod = '1s'\n";
        let found = RuleSet::parse(text).expect_err("has problems").0;
        let known = "a rules file has [[rules]], [[templates]], [[overrides]] and placement";
        let expected = [
            format!("line 1: limits: not known; {known}"),
            "line 7: rules[0].limit: -1 is outside 0 to 4294967295".to_owned(),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_list_in_the_singular_is_named_and_checked() {
        let text = "[[rule]]\nname = 'a'\nkey = ['user']\nlimit = -1\nperiod = '1s'\n\
                    [[overrides]]\nname = 'o'\nrule = 'a'\nkey = ['x']\nlimit = 2\n";
        let found = RuleSet::parse(text).expect_err("has problems").0;
        let expected = [
            "line 1: [[rule]]: did you mean [[rules]]?",
            "line 4: rule[0].limit: -1 is outside 0 to 4294967295",
        ];
        assert_eq!(found, expected);
        let found = RuleSet::parse(&text.replace("-1", "1")).expect_err("has a problem").0;
        assert_eq!(found, expected[..1]);
    }

    #[test]
    fn rows_of_a_part_may_refer_to_rows_of_the_store() {
        let text = "[[rules]]\nname = 'a'\ntemplate = 'of-the-store'\n\
                    [[overrides]]\nname = 'o'\nrule = 'of-the-store'\nkey = ['x']\nlimit = 2\n";
        assert_eq!(check_part(text), Ok(()));
        assert_eq!(check_part("[[templates]]\nname = 't'\nlimit = 2\n"), Ok(()));
        let found = check_part(&text.replace("limit = 2", "limit = -1")).expect_err("has a problem").0;
        assert_eq!(found, ["line 8: overrides[0].limit: -1 is outside 0 to 4294967295"]);
        let found = check_part(&text.replace("[[rules]]", "[[rule]]").repeat(2)).expect_err("has problems").0;
        assert!(found.iter().any(|problem| problem.contains("did you mean [[rules]]?")), "{found:?}");
        assert!(found.iter().any(|problem| problem.contains("\"a\"].name: given twice")), "{found:?}");
    }

    #[test]
    fn syntax_error_hides_no_problem_of_another_line() {
        let text = "[[rules]]\nname = \nkey = []\nlimit = -1\nperiod = '1s'\n";
        let found = RuleSet::parse(text).expect_err("has problems").0;
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].starts_with("line 2, column 8: "), "{found:?}");
        assert_eq!(found[1], "line 4: rules[0].limit: -1 is outside 0 to 4294967295");
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
        let login = Dimensions::new([("ip", "::1"), ("user", "a"), ("path", "/login")]).expect("fine");
        assert_eq!(set.matching("acme", &login, 0).count(), 2);
        assert_eq!(applying(&set, &login), ["per_user"]);
        let other = Dimensions::new([("ip", "::1"), ("user", "a"), ("path", "/")]).expect("fine");
        assert_eq!(set.matching("acme", &other, 0).count(), 1);
        assert_eq!([set.rules_for("acme").count(), set.rules_for("other").count()], [2, 1]);
    }

    #[test]
    fn rule_sets_paid_tolerance_and_placement() {
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
            tolerance = 1
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
            (false, Some(10_000), true)
        );
        assert_eq!(set.dimensions_used("").into_iter().collect::<Vec<_>>(), ["path", "user"]);
    }

    #[test]
    fn invalid_regional_settings_are_reported() {
        let rule = "[[rules]]\nname = 'a'\nkey = []\nlimit = 1\nperiod = '1s'\n";
        let wrong = |rest: &str| problems(&format!("{rule}{rest}"));
        assert_eq!(wrong("paid = true"), ["rules[0].paid: allowed only for class \"cost\""]);
        assert_eq!(wrong("paid = 1"), ["rules[0].paid: true or false is expected, not an integer"]);
        assert_eq!(wrong("tolerance = 2"), ["rules[0].tolerance: 2 is outside 0 to 1"]);
        let placed = problems(&format!("placement = 'us er'\n{rule}"));
        assert_eq!(placed, ["placement: \"us er\" cannot name a dimension"]);
    }

    #[test]
    fn rule_sets_its_regime() {
        let rule = |lines: &str| {
            let text = format!("[[rules]]\nname = 'a'\nkey = []\nlimit = 1\nperiod = '1h'\n{lines}");
            RuleSet::parse(&text).map(|set| (set.rules()[0].regime(), set.rules()[0].class))
        };
        assert_eq!(rule(""), Ok((Regime::BestEffort, Class::Comfort)));
        assert_eq!(rule("class = 'cost'"), Ok((Regime::BestEffort, Class::Cost)));
        assert_eq!(rule("class = 'security'"), Ok((Regime::Strict, Class::Security)));
        assert_eq!(rule("class = 'security'\nregime = 'regional'"), Ok((Regime::Regional, Class::Security)));
        for regime in Regime::ALL.into_iter().filter(|regime| *regime != Regime::Strict) {
            assert_eq!(rule(&format!("class = 'cost'\nregime = '{regime}'")), Ok((regime, Class::Cost)));
        }
        assert_eq!(rule("regime = 'strict'"), Ok((Regime::Strict, Class::Security)), "the class follows");
        assert_eq!(rule("regime = 'strict'\nclass = 'security'"), Ok((Regime::Strict, Class::Security)));
        let problem =
            "line 6: rules[0].regime: \"strict\" requires class \"security\", its default, not \"cost\"";
        assert_eq!(rule("regime = 'strict'\nclass = 'cost'").expect_err("refused").0, [problem]);
        let problem = "line 6: rules[0].regime: \"worldwide\" is none of \
             \"regional\", \"best_effort\", \"share\", \"strict\"";
        assert_eq!(rule("regime = 'worldwide'").expect_err("refused").0, [problem]);
    }

    #[test]
    fn a_template_may_say_how_far_rules_reach() {
        let set = RuleSet::parse(
            r#"
            [[templates]]
            name = "everywhere"
            regime = "best_effort"
            limit = 10
            period = "1h"

            [[rules]]
            name = "a"
            template = "everywhere"
            key = []

            [[rules]]
            name = "b"
            template = "everywhere"
            regime = "share"
            key = []
            "#,
        )
        .expect("a good file");
        let regimes: Vec<_> = set.rules().iter().map(Rule::regime).collect();
        assert_eq!(regimes, [Regime::BestEffort, Regime::Share]);
    }

    #[test]
    fn unsuitable_regime_is_warned_about() {
        let rule = |name: &str, more: &str| {
            format!("[[rules]]\nname = '{name}'\nkey = []\nlimit = 9\nregime = 'best_effort'\n{more}\n")
        };
        let text = [
            rule("fine", "period = '1h'"),
            rule("window", "period = '1h'\nalgorithm = 'sliding_window'"),
            rule("short", "period = '1s'"),
        ];
        let set = RuleSet::parse(&text.concat()).expect("a good file");
        let warnings = set.warnings(&Fleet::of(1));
        assert_eq!(warnings.len(), 2, "{warnings:?}");
        let window = "rules[\"window\"].regime: a best_effort sliding window";
        assert!(warnings[0].starts_with(window), "{warnings:?}");
        assert!(warnings[1].starts_with("rules[\"short\"].regime: in effect regional"), "{warnings:?}");
        let unsaid = text.concat().replace("regime = 'best_effort'\n", "");
        let set = RuleSet::parse(&unsaid).expect("a good file");
        assert_eq!(set.warnings(&Fleet::of(1)), [""; 0], "a fleet of one region has no warnings");
        assert_eq!(set.warnings(&Fleet::of(2)).len(), 2);
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
            "rules[1].period: \"1 fortnight\" is not a number and a unit of us, ms, s, m, h or d, such as \
             \"1m\"",
            "rules[2].brust: not known; a rule has name, tenant, version, priority, template, class, paid, \
             tolerance, regime, mode, algorithm, key, limit, period, burst, when",
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
    fn invalid_field_is_named_with_its_allowed_values() {
        let cases = [
            ("limit = -2", ".limit: -2 is outside 0 to 4294967295"),
            ("limit = 1.5", ".limit: a whole number from 0 to 4294967295 is expected, not a float"),
            ("limit = '1'", ".limit: a whole number from 0 to 4294967295 is expected, not text"),
            ("burst = 0", ".burst: 0 is outside 1 to 4294967295"),
            ("burst = 4294967296", ".burst: 4294967296 is outside 1 to 4294967295"),
            ("version = -1", ".version: -1 is outside 0 to 4294967295"),
            // A date and a time. An origin keeps 32 bits, and could not distinguish this version
            // from the next.
            ("version = 202611170900", ".version: 202611170900 is outside 0 to 4294967295"),
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
        let fields = both.iter().map(|problem| problem.split(':').next().unwrap_or_default());
        assert_eq!(fields.collect::<Vec<_>>(), ["rules[0].limit", "rules[0].period"]);
    }

    #[test]
    fn all_problems_of_a_rule_are_reported() {
        let found = problems("[[rules]]\nlimit = -2\nclass = 3\nperiod = 'x'\nlimt = 1");
        let fields: Vec<_> = found.iter().filter_map(|problem| problem.split([':', ' ']).next()).collect();
        assert_eq!(
            fields,
            [
                "rules[0].name",
                "rules[0].key",
                "rules[0].limit",
                "rules[0].class",
                "rules[0].period",
                "rules[0].limt"
            ]
        );
    }

    #[test]
    fn conditions_on_the_address_are_networks() {
        let rule = rule_with("when = { ip = ['10.0.0.0/8', '2001:db8::/32', '192.0.2.7', '198.51.100.*'] }");
        let set = RuleSet::parse(&rule).expect("good");
        let applies = |ip: &str| applying(&set, &Dimensions::new([("ip", ip)]).expect("fine")).len() == 1;
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
        assert_eq!(applying(&set, &Dimensions::default()).len(), 0);
    }

    #[test]
    fn networks_see_all_of_an_address_that_is_counted_by_its_prefix() {
        let set = RuleSet::parse(&rule_with("when = { ip = '2001:db8:1:2::6' }")).expect("good");
        for (address, applies) in [("2001:db8:1:2::6", 1), ("2001:db8:1:2::7", 0)] {
            let mut request = Dimensions::default();
            request.add_address(address.parse().expect("an address")).expect("the first");
            assert_eq!(applying(&set, &request).len(), applies, "{address}");
        }
    }

    #[test]
    fn rule_set_lists_its_dimensions() {
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
        let found = problems("[rule]\nname = 1");
        assert_eq!(found[0], "[rule]: did you mean [[rules]]?", "{found:?}");
        assert!(found[1].starts_with("rule[0].name: "), "{found:?}");
        assert!(problems("")[0].starts_with("rules: missing"));
        assert_eq!(RuleSet::parse("rules = []").map(|set| set.rules().len()), Ok(0));
        let twice = "[[rules]]\nname='a'\nkey=[]\nlimit=1\nperiod='1s'\n".repeat(2);
        let given_twice = "rules[\"a\"].name: given twice";
        assert_eq!(problems(&twice), [given_twice]);
        // Also of rules with other problems, which are not among the compiled ones.
        let faulty = "rules[1].limit: -1 is outside 0 to 4294967295";
        let wrong = twice.replacen("limit=1", "limit=-1", 2).replacen("limit=-1", "limit=1", 1);
        assert_eq!(problems(&wrong), [given_twice, faulty], "in the order of their lines");
        assert!(problems(&twice.replace("limit=1", "limit=-1")).contains(&given_twice.to_owned()));
    }

    #[test]
    fn versions_of_different_rule_sets_differ() {
        let [a, b] = ["rules = []", "rules = [] # none"]
            .map(|text| RuleSet::parse(text).expect("good").version().to_owned());
        assert_ne!(a, b);
        assert_eq!(a.len(), 12);
    }
}
