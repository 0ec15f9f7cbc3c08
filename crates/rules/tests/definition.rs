//! For every request, the index gives the same result as the definition, which examines every row
//! one by one.

#![allow(clippy::expect_used, reason = "helpers of tests may panic as tests may")]

use std::fmt::Write as _;

use proptest::prelude::*;
use proptest::sample::Index;
use tidegate_rules::rows::{EmergencyRow, RowKind, RuleRow, RuleRows};
use tidegate_rules::{Dimensions, Mode, RuleSet};

const TENANTS: [&str; 3] = ["", "acme", "zeta"];
const MODES: [&str; 2] = ["enforce", "shadow"];
const ADDRESSES: [&str; 4] = ["10.1.2.3", "10.9.0.1", "192.0.2.7", "unknown"];

/// A rule as it is written.
#[derive(Clone, Debug)]
struct Rule {
    name: String,
    tenant: Option<&'static str>,
    priority: i32,
    key: Vec<&'static str>,
    paths: Vec<String>,
    users: Vec<String>,
    networks: Vec<&'static str>,
    limit: u32,
    mode: &'static str,
}

#[derive(Clone, Debug)]
struct Override {
    name: String,
    rule: String,
    tenant: Option<&'static str>,
    priority: i32,
    key: Vec<String>,
    limit: u32,
    mode: Option<&'static str>,
    expires: Option<u64>,
}

#[derive(Clone, Debug)]
struct Emergency {
    id: String,
    rule: Option<String>,
    tenant: Option<&'static str>,
    key: Option<Vec<String>>,
    paths: Vec<String>,
    action: &'static str,
    limit: u32,
    expires_ms: u64,
}

#[derive(Clone, Debug)]
struct Request {
    tenant: &'static str,
    path: Option<String>,
    user: Option<String>,
    ip: Option<&'static str>,
}

/// All that is written down.
#[derive(Clone, Debug)]
struct WrittenRules {
    rules: Vec<Rule>,
    overrides: Vec<Override>,
    emergencies: Vec<Emergency>,
}

/// Name, key, limit, enforcement, override and emergency of a rule that applies.
type MatchedFields = (String, Vec<String>, u32, bool, Option<String>, Option<String>);

fn pattern() -> impl Strategy<Value = String> {
    prop_oneof!["[ab]{1,3}", "[ab*]{1,4}"]
}

fn tenant() -> impl Strategy<Value = Option<&'static str>> {
    prop::option::weighted(0.3, prop::sample::select(&TENANTS[..]))
}

fn rule() -> impl Strategy<Value = Rule> {
    let key = prop::sample::subsequence(vec!["path", "user", "ip"], 0..=2);
    let networks = prop::sample::subsequence(vec!["10.0.0.0/8", "10.1.0.0/16", "192.0.2.7"], 0..=2);
    let networks = prop_oneof![3 => Just(Vec::new()), 1 => networks];
    let patterns = || prop::collection::vec(pattern(), 0..3);
    let mode = prop::sample::select(&MODES[..]);
    (tenant(), -1..2, key, patterns(), patterns(), networks, 1..1_000_u32, mode).prop_map(
        |(tenant, priority, key, paths, users, networks, limit, mode)| Rule {
            name: String::new(),
            tenant,
            priority,
            key,
            paths,
            users,
            networks,
            limit,
            mode,
        },
    )
}

/// Returns the tenant of an override or emergency, if the rule is for that tenant.
fn fitting(tenant: Option<&'static str>, rule: &Rule) -> Option<&'static str> {
    tenant.filter(|tenant| rule.tenant.is_none_or(|only| only == *tenant))
}

fn over_rule(rules: &[Rule]) -> impl Strategy<Value = Override> + use<> {
    let rules = rules.to_vec();
    let mode = prop::option::of(prop::sample::select(&MODES[..]));
    let expires = prop::option::weighted(0.3, 1..5_u64);
    (any::<Index>(), tenant(), -1..2, [pattern(), pattern()], 1..1_000_u32, mode, expires).prop_map(
        move |(of, tenant, priority, key, limit, mode, expires)| {
            let rule = of.get(&rules);
            let key = key.into_iter().take(rule.key.len()).collect();
            let (rule, tenant) = (rule.name.clone(), fitting(tenant, rule));
            Override { name: String::new(), rule, tenant, priority, key, limit, mode, expires }
        },
    )
}

fn emergency(rules: &[Rule]) -> impl Strategy<Value = Emergency> + use<> {
    let rules = rules.to_vec();
    let action = prop::sample::select(vec!["block", "allow", "limit"]);
    let paths = prop::collection::vec(pattern(), 0..2);
    let about = (prop::option::of(any::<Index>()), prop::option::of([pattern(), pattern()]));
    (about, tenant(), paths, action, 1..1_000_u32, 1..5_u64).prop_map(
        move |((of, key), tenant, paths, action, limit, expires_ms)| {
            let rule = of.map(|of| of.get(&rules));
            let key = rule.zip(key).map(|(rule, key)| key.into_iter().take(rule.key.len()).collect());
            let tenant = rule.map_or(tenant, |rule| fitting(tenant, rule));
            let rule = rule.map(|rule| rule.name.clone());
            Emergency { id: String::new(), rule, tenant, key, paths, action, limit, expires_ms }
        },
    )
}

/// Rows of different names, no two overrides alike.
fn written() -> impl Strategy<Value = WrittenRules> {
    let rules = prop::collection::vec(rule(), 1..24).prop_map(|mut rules| {
        // Not in the order in which they are given.
        rules.iter_mut().enumerate().for_each(|(at, rule)| rule.name = format!("r{}", at * 7 % 24));
        rules
    });
    rules.prop_flat_map(|rules| {
        let overrides = prop::collection::vec(over_rule(&rules), 0..40);
        let emergencies = prop::collection::vec(emergency(&rules), 0..3);
        (Just(rules), overrides, emergencies).prop_map(|(rules, mut overrides, mut emergencies)| {
            let mut seen = std::collections::HashSet::new();
            overrides.retain(|over| seen.insert((over.rule.clone(), over.tenant, over.key.clone())));
            overrides.iter_mut().enumerate().for_each(|(at, over)| over.name = format!("o{at}"));
            emergencies.iter_mut().enumerate().for_each(|(at, one)| one.id = format!("e{at}"));
            WrittenRules { rules, overrides, emergencies }
        })
    })
}

fn request() -> impl Strategy<Value = Request> {
    let value = || prop::option::weighted(0.8, "[ab]{0,4}");
    let ip = prop::option::of(prop::sample::select(&ADDRESSES[..]));
    (prop::sample::select(&TENANTS[..]), value(), value(), ip).prop_map(|(tenant, path, user, ip)| Request {
        tenant,
        path,
        user,
        ip,
    })
}

fn quoted(text: &str) -> String {
    format!("{text:?}")
}

fn list(texts: &[impl AsRef<str>]) -> String {
    let all: Vec<String> = texts.iter().map(|text| quoted(text.as_ref())).collect();
    format!("[{}]", all.join(","))
}

/// A list that is left out where it is empty.
fn some(texts: &[impl AsRef<str>]) -> Option<String> {
    (!texts.is_empty()).then(|| list(texts))
}

/// A JSON object of the members that are there.
fn object(members: &[(&str, Option<String>)]) -> String {
    let mut json = String::new();
    for (name, value) in members {
        if let Some(value) = value {
            let _ = write!(json, "{}\"{name}\":{value}", if json.is_empty() { "" } else { "," });
        }
    }
    format!("{{{json}}}")
}

fn rule_row(rule: &Rule) -> RuleRow {
    let when = [("path", some(&rule.paths)), ("user", some(&rule.users)), ("ip", some(&rule.networks))];
    let body = object(&[
        ("tenant", rule.tenant.map(quoted)),
        ("priority", Some(rule.priority.to_string())),
        ("key", Some(list(&rule.key))),
        ("limit", Some(rule.limit.to_string())),
        ("period", Some(quoted("1m"))),
        ("mode", Some(quoted(rule.mode))),
        ("when", Some(object(&when))),
    ]);
    RuleRow { kind: RowKind::Rule, name: rule.name.clone(), body, version: rule.limit }
}

fn override_row(over: &Override) -> RuleRow {
    let body = object(&[
        ("rule", Some(quoted(&over.rule))),
        ("tenant", over.tenant.map(quoted)),
        ("priority", Some(over.priority.to_string())),
        ("key", Some(list(&over.key))),
        ("limit", Some(over.limit.to_string())),
        ("mode", over.mode.map(quoted)),
        ("expires", over.expires.map(|at| at.to_string())),
    ]);
    RuleRow { kind: RowKind::Override, name: over.name.clone(), body, version: 1 }
}

fn emergency_row(emergency: &Emergency) -> EmergencyRow {
    let of_limit = |text: String| (emergency.action == "limit").then_some(text);
    let body = object(&[
        ("rule", emergency.rule.as_deref().map(quoted)),
        ("tenant", emergency.tenant.map(quoted)),
        ("key", emergency.key.as_deref().map(list)),
        ("when", Some(object(&[("path", some(&emergency.paths))]))),
        ("action", Some(quoted(emergency.action))),
        ("limit", of_limit(emergency.limit.to_string())),
        ("period", of_limit(quoted("1m"))),
    ]);
    EmergencyRow { id: emergency.id.clone(), body, expires_ms: emergency.expires_ms }
}

fn compiled(written: &WrittenRules, now_ms: u64) -> RuleSet {
    let rows = written.rules.iter().map(rule_row).chain(written.overrides.iter().map(override_row)).collect();
    let emergencies = written.emergencies.iter().map(emergency_row).collect();
    let rule_rows = RuleRows { revision: 1, emergency_revision: 1, override_revision: 0, rows, emergencies };
    RuleSet::compile(&rule_rows, None, now_ms).expect("valid rules")
}

/// Whether a pattern describes a value, by the definition.
fn describes(pattern: &[u8], value: &[u8]) -> bool {
    match pattern.split_first() {
        None => value.is_empty(),
        Some((b'*', rest)) => (0..=value.len()).any(|at| describes(rest, &value[at..])),
        Some((byte, rest)) => {
            value.split_first().is_some_and(|(first, tail)| first == byte && describes(rest, tail))
        }
    }
}

fn any_describes(patterns: &[String], value: Option<&str>) -> bool {
    let described =
        |value: &str| patterns.iter().any(|pattern| describes(pattern.as_bytes(), value.as_bytes()));
    patterns.is_empty() || value.is_some_and(described)
}

fn all_describe(patterns: &[String], key: &[String]) -> bool {
    patterns.iter().zip(key).all(|(pattern, value)| describes(pattern.as_bytes(), value.as_bytes()))
}

fn within(networks: &[&str], ip: Option<&str>) -> bool {
    let inside = |network: &str, ip: &str| match network {
        "10.0.0.0/8" => ip.starts_with("10."),
        "10.1.0.0/16" => ip.starts_with("10.1."),
        address => ip == address,
    };
    networks.is_empty() || ip.is_some_and(|ip| networks.iter().any(|network| inside(network, ip)))
}

fn literal(patterns: &[String]) -> usize {
    patterns.iter().flat_map(|pattern| pattern.bytes()).filter(|byte| *byte != b'*').count()
}

fn key_of(rule: &Rule, request: &Request) -> Option<Vec<String>> {
    let value = |dimension: &&str| match *dimension {
        "path" => request.path.clone(),
        "user" => request.user.clone(),
        _ => request.ip.map(str::to_owned),
    };
    let applies = rule.tenant.is_none_or(|only| only == request.tenant)
        && any_describes(&rule.paths, request.path.as_deref())
        && any_describes(&rule.users, request.user.as_deref())
        && within(&rule.networks, request.ip);
    if applies { rule.key.iter().map(value).collect() } else { None }
}

impl WrittenRules {
    fn override_for(&self, rule: &Rule, key: &[String], tenant: &str, now_ms: u64) -> Option<&Override> {
        let applying = self.overrides.iter().filter(|over| {
            over.rule == rule.name
                && over.tenant.is_none_or(|only| only == tenant)
                && over.expires.is_none_or(|end| now_ms < end)
                && all_describe(&over.key, key)
        });
        applying.min_by_key(|over| {
            if over.key.iter().any(|part| part.contains('*')) {
                (true, false, -over.priority, usize::MAX - literal(&over.key), over.name.as_str())
            } else {
                (false, over.tenant.is_none(), 0, 0, "")
            }
        })
    }

    fn emergency_for(
        &self,
        rule: &Rule,
        key: &[String],
        request: &Request,
        now_ms: u64,
    ) -> Option<&Emergency> {
        let applying = self.emergencies.iter().filter(|emergency| {
            emergency.rule.as_ref().is_none_or(|only| *only == rule.name)
                && emergency.tenant.is_none_or(|only| only == request.tenant)
                && now_ms < emergency.expires_ms
                && emergency.key.as_ref().is_none_or(|patterns| all_describe(patterns, key))
                && any_describes(&emergency.paths, request.path.as_deref())
        });
        applying.min_by_key(|emergency| {
            let spelled_out =
                literal(&emergency.paths) + emergency.key.as_ref().map_or(0, |key| literal(key));
            (emergency.action != "block", emergency.rule.is_none(), usize::MAX - spelled_out, &emergency.id)
        })
    }

    fn matched(&self, rule: &Rule, request: &Request, now_ms: u64) -> Option<MatchedFields> {
        let key = key_of(rule, request)?;
        let over = self.override_for(rule, &key, request.tenant, now_ms);
        let usual = over.map_or((rule.limit, rule.mode), |over| (over.limit, over.mode.unwrap_or(rule.mode)));
        let emergency = self.emergency_for(rule, &key, request, now_ms);
        let (limit, mode, over) = match emergency.map(|emergency| (emergency.action, emergency.limit)) {
            None => (usual.0, usual.1, over),
            Some(("block", _)) => (0, "enforce", None),
            Some(("limit", limit)) => (limit, "enforce", None),
            Some(_) => (usual.0, "shadow", over),
        };
        let (over, emergency) = (over.map(|over| over.name.clone()), emergency.map(|one| one.id.clone()));
        Some((rule.name.clone(), key, limit, mode == "enforce", over, emergency))
    }

    /// By the definition: every rule is looked at, and of each every override and every emergency.
    fn scan(&self, request: &Request, now_ms: u64) -> Vec<MatchedFields> {
        let mut ordered: Vec<&Rule> = self.rules.iter().collect();
        ordered.sort_by_key(|rule| (-rule.priority, &rule.name));
        ordered.into_iter().filter_map(|rule| self.matched(rule, request, now_ms)).collect()
    }
}

fn find(set: &RuleSet, request: &Request, now_ms: u64) -> Vec<MatchedFields> {
    let pairs = [("path", request.path.as_deref()), ("user", request.user.as_deref()), ("ip", request.ip)];
    let given = pairs.into_iter().filter_map(|(name, value)| value.map(|value| (name, value)));
    let dimensions = Dimensions::new(given).expect("good dimensions");
    let matched = set.matching(request.tenant, &dimensions, now_ms).map(|found| {
        let (name, terms) = (found.rule.name.to_string(), found.terms);
        assert_eq!(*set.rules()[found.position].name, *name);
        assert_eq!(found.rule.version, u64::from(found.rule.limit.amount()), "the version of the row");
        let key = found.key.iter().map(|part| (*part).to_owned()).collect();
        let (over, emergency) =
            (terms.override_name.map(str::to_owned), terms.emergency.map(|found| found.id.to_owned()));
        (name, key, terms.limit.amount(), terms.mode == Mode::Enforce, over, emergency)
    });
    matched.collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn index_matches_a_scan(
        written in written(),
        requests in prop::collection::vec(request(), 12),
    ) {
        let set = compiled(&written, 0);
        // Some of it ends on the way: whether it ended before the set was compiled or after makes
        // no difference.
        for now_ms in [0, 2, 3, 9] {
            let later = compiled(&written, now_ms);
            for request in &requests {
                let expected = written.scan(request, now_ms);
                prop_assert_eq!(&find(&set, request, now_ms), &expected, "{:?} at {}", request, now_ms);
                prop_assert_eq!(&find(&later, request, now_ms), &expected, "{:?} compiled at {}", request, now_ms);
            }
        }
    }
}
