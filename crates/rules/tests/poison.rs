//! A set with any problem is refused whole, and every reason names the row and the field.

#![allow(clippy::expect_used, reason = "helpers of tests may panic as tests may")]

use tidegate_rules::rows::{EmergencyRow, RowKind, RuleRow, RuleRows};
use tidegate_rules::{
    EMERGENCIES_MAX, LOOKED_AT_RULES_MAX, LOOSE_WILDCARDS_MAX, PROBLEMS_MAX, RuleSet, SCANNED_RULES_MAX,
    TEMPLATES_MAX, WILDCARDS_MAX, WILDCARDS_PER_TARGET_MAX,
};

/// A rule for a path and a user.
const GOOD: &str = r#"{"key":["path","user"],"limit":10,"period":"1m","burst":5}"#;

fn row(kind: RowKind, name: &str, body: &str) -> RuleRow {
    RuleRow { kind, name: name.to_owned(), body: body.to_owned(), version: 1 }
}

fn rule(name: &str, body: &str) -> RuleRow {
    row(RowKind::Rule, name, body)
}

fn over(name: &str, body: &str) -> RuleRow {
    row(RowKind::Override, name, body)
}

/// Returns the problems of rows beside a good rule.
fn problems(rows: Vec<RuleRow>) -> Vec<String> {
    let rows = [rule("good", GOOD)].into_iter().chain(rows).collect();
    refused(&RuleRows { rows, ..RuleRows::default() })
}

fn refused(rule_rows: &RuleRows) -> Vec<String> {
    RuleSet::compile(rule_rows, None, 0).expect_err("has problems").0
}

/// Returns the problems of a rule with these fields beside the required ones.
fn of_rule(fields: &str) -> Vec<String> {
    problems(vec![rule("bad", &format!(r#"{{"key":["user"],"limit":10,"period":"1m",{fields}}}"#))])
}

/// Returns the problems of an override with these fields.
fn of_override(fields: &str) -> Vec<String> {
    problems(vec![over("bad", &format!("{{{fields}}}"))])
}

/// Returns the problems of an emergency with these fields.
fn of_emergency(fields: &str) -> Vec<String> {
    refused(&rows_of_emergencies(1, &format!("{{{fields}}}")))
}

fn rows_of_emergencies(count: usize, body: &str) -> RuleRows {
    let emergency = |at| EmergencyRow { id: format!("e{at}"), body: body.to_owned(), expires_ms: 9 };
    let emergencies = (0..count).map(emergency).collect();
    RuleRows { rows: [rule("good", GOOD)].into(), emergencies, ..RuleRows::default() }
}

#[test]
fn valid_rule_rows_compile() {
    let rows = vec![
        row(RowKind::Template, "pro", r#"{"limit":100,"period":"1h"}"#),
        rule("good", GOOD),
        rule("tier", r#"{"name":"tier","template":"pro","key":["user"]}"#),
        over("one", r#"{"rule":"good","key":["/a","alice"],"limit":7}"#),
    ];
    let rule_rows = RuleRows {
        revision: 42,
        emergency_revision: 3,
        override_revision: 0,
        rows: rows.into(),
        emergencies: Vec::new(),
    };
    let set = RuleSet::compile(&rule_rows, Some("user"), 0).expect("nothing is wrong");
    assert_eq!((set.revision(), set.version(), set.placement()), (42, "r42e3", Some("user")));
    assert_eq!((set.rules().len(), set.overrides()), (2, 1));
}

#[test]
fn unreadable_body_is_reported() {
    let cases = [
        ("", "rules[\"bad\"]: EOF while parsing"),
        ("[]", "rules[\"bad\"]: a rule is a table, not a list"),
        ("{\"limit\":null}", "rules[\"bad\"].limit: invalid type: null"),
        ("{\"limit\":18446744073709551615}", "rules[\"bad\"].limit: "),
        ("{\"limit\":1,\"limit\":2}", "rules[\"bad\"]: duplicate key: `limit`"),
        ("{\"name\":\"other\"}", "rules[\"bad\"].name: not the name of the row"),
    ];
    for (body, problem) in cases {
        let found = problems(vec![rule("bad", body)]);
        assert!(found[0].starts_with(problem), "{body}: {found:?}");
    }
}

#[test]
fn invalid_rule_is_reported_by_name_and_field() {
    let cases = [
        (r#""limit":-1"#, "duplicate key"),
        (r#""priority":1000001"#, "rules[\"bad\"].priority: 1000001 is outside -1000000 to 1000000"),
        (
            r#""priority":"high""#,
            "rules[\"bad\"].priority: a whole number from -1000000 to 1000000 is expected, not text",
        ),
        (r#""template":"none""#, "rules[\"bad\"].template: there is none called \"none\""),
        (r#""burst":0"#, "rules[\"bad\"].burst: 0 is outside 1 to 4294967295"),
        (r#""limits":5"#, "rules[\"bad\"].limits: not known; a rule has name, tenant"),
        (r#""when":{"path":[]}"#, "rules[\"bad\"].when.path: 0 patterns is outside 1 to 64"),
    ];
    for (fields, problem) in cases {
        let found = of_rule(fields);
        assert!(found.len() == 1 && found[0].contains(problem), "{fields}: {found:?}");
    }
    let blank = problems(vec![rule("", GOOD)]);
    assert_eq!(blank, ["rules[\"\"].name: \"\" is not 1 to 128 printable bytes"]);
    let empty = problems(vec![rule("bad", "{}")]);
    let missing = ["key", "limit", "period"].map(|field| format!("rules[\"bad\"].{field}: missing"));
    assert_eq!(empty, missing);
    assert_eq!(problems(vec![rule("good", GOOD)]), ["rules[\"good\"].name: given twice"]);
}

#[test]
fn invalid_template_is_reported_once_and_not_per_rule() {
    let of_template = |body: &str| {
        let tier = r#"{"template":"pro","key":["user"],"limit":1,"period":"1s"}"#;
        problems(vec![row(RowKind::Template, "pro", body), rule("a", tier), rule("b", tier)])
    };
    let cases = [
        (r#"{"limit":-1}"#, "templates[\"pro\"].limit: -1 is outside 0 to 4294967295"),
        (r#"{"period":"soon"}"#, "templates[\"pro\"].period: \"soon\" is not a number and a unit"),
        (r#"{"paid":"yes"}"#, "templates[\"pro\"].paid: true or false is expected, not text"),
        (r#"{"template":"free"}"#, "templates[\"pro\"].template: not known; a template has name, class"),
        (r#"{"key":["user"]}"#, "templates[\"pro\"].key: not known; a template has name, class"),
        ("7", "templates[\"pro\"]: a template is a table, not an integer"),
    ];
    for (body, problem) in cases {
        let found = of_template(body);
        assert!(found.len() == 1 && found[0].starts_with(problem), "{body}: {found:?}");
    }
    let twice = problems(vec![row(RowKind::Template, "pro", "{}"), row(RowKind::Template, "pro", "{}")]);
    assert_eq!(twice, ["templates[\"pro\"].name: given twice"]);
    let both = of_template(r#"{"algorithm":"sliding_window","burst":3}"#);
    let message = "burst: not allowed for a sliding window: its burst is its amount";
    assert_eq!(both, ["a", "b"].map(|name| format!("rules[{name:?}].{message}")));
}

#[test]
fn invalid_override_is_reported_by_name_and_field() {
    let right = r#""rule":"good","key":["/a","alice"]"#;
    let cases = [
        (r#""rule":"gone","key":["a"],"limit":1"#.to_owned(), ".rule: there is no rule \"gone\""),
        (r#""key":["a"],"limit":1"#.to_owned(), ".rule: missing"),
        (r#""rule":"good","limit":1"#.to_owned(), ".key: missing"),
        (
            r#""rule":"good","key":["a"],"limit":1"#.to_owned(),
            ".key: 1 parts, but the key of rule \"good\" has 2",
        ),
        (
            r#""rule":"good","key":["a","b","c"],"limit":1"#.to_owned(),
            ".key: 3 parts, but the key of rule \"good\" has 2",
        ),
        (
            r#""rule":"good","key":["","b"],"limit":1"#.to_owned(),
            ".key: a part of 0 bytes is outside 1 to 1024",
        ),
        (
            r#""rule":"good","key":"a","limit":1"#.to_owned(),
            ".key: a list of values and patterns is expected, not text",
        ),
        (right.to_owned(), ".limit: missing"),
        (format!(r#"{right},"limit":-5"#), ".limit: -5 is outside 0 to 4294967295"),
        (
            format!(r#"{right},"limit":5e9"#),
            ".limit: a whole number from 0 to 4294967295 is expected, not a float",
        ),
        (format!(r#"{right},"limit":1,"period":"367d""#), ".period: 31708800s is not a whole number"),
        (
            format!(r#"{right},"limit":1,"period":"366d","burst":4000000000"#),
            ".burst: 4000000000 would take more than",
        ),
        (format!(r#"{right},"limit":1,"mode":"off""#), ".mode: \"off\" is none of \"enforce\", \"shadow\""),
        (format!(r#"{right},"limit":1,"expires":0"#), ".expires: 0 is outside 1 to 253402300799999"),
        (
            format!(r#"{right},"limit":1,"expires":253402300800000"#),
            ".expires: 253402300800000 is outside 1 to",
        ),
        (format!(r#"{right},"limit":1,"when":{{}}"#), ".when: not known; an override has name, rule"),
    ];
    for (fields, problem) in cases {
        let found = of_override(&fields);
        let is_found = found.len() == 1 && found[0].starts_with(&format!("overrides[\"bad\"]{problem}"));
        assert!(is_found, "{fields}: {found:?}");
    }
}

#[test]
fn override_of_a_rejected_rule_is_not_reported() {
    let found = problems(vec![
        rule("bad", r#"{"key":["user"],"limit":-1,"period":"1m"}"#),
        over("of it", r#"{"rule":"bad","key":["alice"],"limit":1}"#),
    ]);
    assert_eq!(found, ["rules[\"bad\"].limit: -1 is outside 0 to 4294967295"]);
}

#[test]
fn conflicting_overrides_are_reported() {
    let one = r#"{"rule":"good","key":["/a","alice"],"limit":1}"#;
    let wild = r#"{"rule":"good","key":["/a","a*"],"limit":1}"#;
    let for_tenant = r#"{"rule":"good","tenant":"acme","key":["/a","alice"],"limit":1}"#;
    let fine = RuleRows {
        rows: [rule("good", GOOD), over("a", one), over("b", for_tenant)].into(),
        ..RuleRows::default()
    };
    assert!(RuleSet::compile(&fine, None, 0).is_ok());
    let same =
        |name: &str| format!("overrides[\"b\"].key: override {name:?} is for the same rule, tenant and key");
    assert_eq!(problems(vec![over("a", one), over("b", one)]), [same("a")]);
    assert_eq!(problems(vec![over("a", wild), over("b", wild)]), [same("a")]);
    let other = one.replace("/a", "/b");
    assert_eq!(
        problems(vec![over("a", one), over("a", &other)]),
        ["overrides[\"a\"].name: \"a\" is given twice"]
    );
    let own = rule("own", r#"{"tenant":"acme","key":["user"],"limit":1,"period":"1s"}"#);
    let of_other = over("a", r#"{"rule":"own","tenant":"zeta","key":["alice"],"limit":1}"#);
    let found = problems(vec![own, of_other]);
    assert_eq!(found, ["overrides[\"a\"].tenant: \"zeta\", but the rule is only for \"acme\""]);
}

#[test]
fn expired_duplicate_override_is_accepted() {
    let rows = vec![
        rule("good", GOOD),
        over("a", r#"{"rule":"good","key":["/a","alice"],"limit":1,"expires":5}"#),
        over("b", r#"{"rule":"good","key":["/a","alice"],"limit":2}"#),
    ];
    let rule_rows = RuleRows { rows: rows.into(), ..RuleRows::default() };
    assert!(RuleSet::compile(&rule_rows, None, 4).is_err());
    assert_eq!(RuleSet::compile(&rule_rows, None, 5).map(|set| set.overrides()), Ok(1));
}

fn wildcards(count: usize, rules: usize, key: impl Fn(usize) -> String) -> Vec<RuleRow> {
    let body = |at: usize| format!(r#"{{"rule":"r{}","key":["{}"],"limit":1}}"#, at % rules, key(at));
    // With a condition, because rules without one have another maximum.
    let of_path = r#"{"key":["user"],"limit":1,"period":"1s","when":{"path":"/*"}}"#;
    let rule_row = |at: usize| rule(&format!("r{at}"), of_path);
    (0..rules).map(rule_row).chain((0..count).map(|at| over(&format!("o{at}"), &body(at)))).collect()
}

#[test]
fn there_is_a_most_of_wildcards() {
    let most = |rows: Vec<RuleRow>| refused(&RuleRows { rows: rows.into(), ..RuleRows::default() });
    let of_rule = most(wildcards(WILDCARDS_PER_TARGET_MAX + 1, 1, |at| format!("{at}-*")));
    assert_eq!(of_rule, ["overrides[\"o1000\"].key: more than 1000 overrides of this rule have a `*`"]);
    let loose = most(wildcards(LOOSE_WILDCARDS_MAX + 1, 1, |at| format!("*{at:03}*")));
    assert_eq!(
        loose,
        ["overrides[\"o9\"].key: more than 64 overrides of this rule neither begin nor end with anything \
             but `*`"]
    );
    let rules = WILDCARDS_MAX / WILDCARDS_PER_TARGET_MAX + 1;
    let all = most(wildcards(WILDCARDS_MAX + 1, rules, |at| format!("{at}-*")));
    assert_eq!(all, ["overrides[\"o100000\"].key: more than 100000 overrides have a `*`"]);
}

#[test]
fn a_million_wildcards_are_refused_whole() {
    const ALL: usize = 1_000_000;
    let rules = ALL / WILDCARDS_PER_TARGET_MAX;
    let rows = wildcards(ALL, rules, |at| format!("{at}-*")).into();
    let found = refused(&RuleRows { rows, ..RuleRows::default() });
    assert_eq!(found.len(), PROBLEMS_MAX + 1);
    let first =
        format!("overrides[\"o{WILDCARDS_MAX}\"].key: more than {WILDCARDS_MAX} overrides have a `*`");
    assert_eq!(found.first(), Some(&first));
    let rest = format!("and {} more", ALL - WILDCARDS_MAX - PROBLEMS_MAX);
    assert_eq!(found.last(), Some(&rest));
}

#[test]
fn there_is_a_most_of_rows() {
    let templates = (0..=TEMPLATES_MAX).map(|at| row(RowKind::Template, &at.to_string(), "{}")).collect();
    assert_eq!(problems(templates), ["templates: 1001 is outside 0 to 1000"]);
    let scanned = |tenant: &str| {
        let body = format!(r#"{{{tenant}"key":["user"],"limit":1,"period":"1s","when":{{"path":"*x*"}}}}"#);
        let rows = (0..=SCANNED_RULES_MAX).map(|at| rule(&at.to_string(), &body)).collect();
        refused(&RuleRows { rows, ..RuleRows::default() })
    };
    let message = "without an exact value, prefix or suffix in `when` is outside 0 to 10000";
    assert_eq!(scanned(""), [format!("rules: 10001 for every tenant {message}")]);
    assert_eq!(scanned(r#""tenant":"acme","#), [format!("rules: 10001 for tenant \"acme\" {message}")]);
    let emergencies = refused(&rows_of_emergencies(EMERGENCIES_MAX + 1, "{}"));
    assert_eq!(emergencies, ["emergencies: 257 is outside 0 to 256"]);
}

/// Returns the problems of these numbers of rules with these conditions; none if the set is
/// accepted.
fn of_crowds(crowds: &[(usize, &str)]) -> Vec<String> {
    let mut rows = Vec::new();
    for (rules, fields) in crowds {
        let body = format!(r#"{{{fields},"key":["user"],"limit":1,"period":"1s"}}"#);
        rows.extend((0..*rules).map(|at| rule(&format!("{at} {fields}"), &body)));
    }
    let rule_rows = RuleRows { rows: rows.into(), ..RuleRows::default() };
    RuleSet::compile(&rule_rows, None, 0).map_or_else(|problems| problems.0, |_| Vec::new())
}

#[test]
fn there_is_a_most_of_rules_that_one_request_looks_at() {
    const MOST: usize = LOOKED_AT_RULES_MAX;
    let everywhere = (MOST + 1, r#""when":{"path":"/*"}"#);
    let message = |tenant: &str, by: &str| {
        let message =
            format!("for {tenant} that one request may have to examine, {by}, is outside 0 to 10000");
        vec![format!("rules: 10001 {message}")]
    };
    let found = |by: &str| message("every tenant", &format!("10001 of them by {by}"));
    assert_eq!(of_crowds(&[everywhere]), found(r#"`when.path` "/*""#));
    assert_eq!(of_crowds(&[(MOST + 1, r#""when":{"path":"*/x"}"#)]), found(r#"`when.path` "*/x""#));
    assert_eq!(of_crowds(&[(MOST + 1, r#""when":{"method":"GET"}"#)]), found(r#"`when.method` "GET""#));
    let of_tenant = (MOST + 1, r#""tenant":"acme","when":{"path":"/*"}"#);
    assert_eq!(of_crowds(&[of_tenant]), message("tenant \"acme\"", "10001 of them by `when.path` \"/*\""));
    // A value with the longer prefix has the shorter one too.
    let nested = [(MOST / 2, r#""when":{"path":"/*"}"#), (MOST / 2 + 1, r#""when":{"path":"/v1/*"}"#)];
    assert_eq!(of_crowds(&nested), found(r#"`when.path` "/v1/*""#));
    let several = [(MOST / 2, r#""when":{"path":"/*"}"#), (MOST / 2 + 1, r#""when":{"method":"GET"}"#)];
    let by = r#"5001 of them by `when.method` "GET""#;
    assert_eq!(of_crowds(&several), message("every tenant", by));
    // A request begins with one of them at most.
    let apart = [(MOST, r#""when":{"path":"/a/*"}"#), (MOST, r#""when":{"path":"/b/*"}"#)];
    assert_eq!(of_crowds(&apart), [""; 0]);
}

#[test]
fn there_is_a_most_of_rules_that_are_for_everything() {
    let of = |rules: usize, fields: &str| {
        (0..rules).map(|at| rule(&at.to_string(), &format!(r#"{{{fields},"period":"1s"}}"#))).collect()
    };
    let all = |rows: Vec<RuleRow>| {
        let rule_rows = RuleRows { rows: rows.into(), ..RuleRows::default() };
        RuleSet::compile(&rule_rows, None, 0).map_or_else(|problems| problems.0, |_| Vec::new())
    };
    let by_user = r#""key":["user"],"limit":4000000000"#;
    let message = |tenant: &str, key: &str| {
        vec![format!(
            "rules: 129 enforced without `when` for {tenant} and the key [{key}] is outside 0 to 128, the \
             maximum of one request"
        )]
    };
    assert_eq!(all(of(129, by_user)), message("every tenant", r#""user""#));
    assert_eq!(all(of(128, by_user)), [""; 0]);
    let shadow = format!(r#"{by_user},"mode":"shadow""#);
    assert_eq!(
        all(of(129, &shadow)),
        ["rules: 129 in shadow mode without `when` for every tenant and the key [\"user\"] is outside 0 \
             to 128, the maximum of one request"]
    );
    assert_eq!(all(of(128, &shadow)), [""; 0]);
    assert_eq!(
        all(of(129, &format!(r#"{shadow},"when":{{"path":"/*"}}"#))),
        [""; 0],
        "a rule with `when` is not counted"
    );
    assert_eq!(
        all(of(129, &format!(r#"{by_user},"when":{{"path":"/*"}}"#))),
        [""; 0],
        "a rule with `when` is not counted"
    );
    let with = |more: &str| {
        let mut rows: Vec<RuleRow> = of(128, by_user);
        rows.push(rule("more", &format!(r#"{{{more},"limit":1,"period":"1s"}}"#)));
        all(rows)
    };
    assert_eq!(with(r#""key":["user"],"mode":"shadow""#), [""; 0], "shadow rules are counted separately");
    assert_eq!(with(r#""key":["team"]"#), [""; 0], "a request may lack one of the keys");
    assert_eq!(with(r#""key":["user","team"]"#), message("every tenant", r#""team", "user""#));
    assert_eq!(with(r#""key":[]"#), message("every tenant", r#""user""#));
    assert_eq!(with(r#""key":["user"],"tenant":"acme""#), message("tenant \"acme\"", r#""user""#));
}

#[test]
fn invalid_emergency_is_reported_by_id_and_field() {
    let cases = [
        ("", ".action: missing"),
        (r#""action":"panic""#, ".action: \"panic\" is none of \"block\", \"allow\", \"limit\""),
        (r#""action":"limit","period":"1s""#, ".limit: missing"),
        (r#""action":"limit","limit":1"#, ".period: missing"),
        (r#""action":"block","rule":"gone""#, ".rule: there is no rule \"gone\""),
        (
            r#""action":"block","rule":"good","key":["a"]"#,
            ".key: 1 parts, but the key of rule \"good\" has 2",
        ),
        (r#""action":"block","key":["a"]"#, ".key: the keys of all rules have no parts in common"),
        (
            r#""action":"block","when":{"ip":"home"}"#,
            ".when.ip: \"home\" is neither an address nor a network",
        ),
        (r#""action":"block","untill":3"#, ".untill: not known; an emergency has rule, tenant"),
        (r#""action":"block","by":7"#, ".by: text is expected, not an integer"),
    ];
    for (fields, problem) in cases {
        let found = of_emergency(fields);
        let is_found = found.len() == 1 && found[0].starts_with(&format!("emergencies[\"e0\"]{problem}"));
        assert!(is_found, "{fields}: {found:?}");
    }
    let block = r#"{"action":"block"}"#;
    let mut twice = rows_of_emergencies(2, block);
    twice.emergencies[1].id = "e0".to_owned();
    assert_eq!(refused(&twice), ["emergencies[\"e0\"].id: given twice"]);
    twice.emergencies[1].id = String::new();
    assert_eq!(refused(&twice), ["emergencies[\"\"].id: \"\" is not 1 to 128 printable bytes"]);
}

#[test]
fn problem_list_is_cut_to_its_maximum() {
    let found = problems((0..1_000).map(|at| rule(&at.to_string(), "{}")).collect());
    assert_eq!(found.len(), PROBLEMS_MAX + 1);
    assert_eq!(found.last().map(String::as_str), Some("and 2900 more"));
}

#[test]
fn file_problems_name_rows_by_index() {
    let text = r#"
        [[templates]]
        name = "pro"
        limit = -1

        [[rules]]
        name = "a"
        key = ["user"]
        limit = 1
        period = "1s"

        [[overrides]]
        name = "fine"
        rule = "a"
        key = ["alice"]
        limit = 1

        [[overrides]]
        name = "bad"
        rule = "a"
        key = []
        limit = 1
    "#;
    let found = RuleSet::parse(text).expect_err("has problems").0;
    let expected = [
        "line 4: templates[0].limit: -1 is outside 0 to 4294967295",
        "line 21: overrides[1].key: 0 parts, but the key of rule \"a\" has 1",
    ];
    assert_eq!(found, expected);
    let lists = RuleSet::parse("rules = []\noverrides = 3").expect_err("no list").0;
    assert_eq!(lists, ["line 2: overrides: an integer is not a list of overrides"]);
}
