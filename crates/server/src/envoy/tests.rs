//! Tests of descriptor files and their decisions, with the examples of envoyproxy/ratelimit.

use std::slice::from_ref;

use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::{
    Entry, RateLimitOverride,
};
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus};
use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use envoy_types::pb::google::protobuf::UInt64Value;
use futures_util::FutureExt as _;

use super::*;
use crate::auth::TenantIndex;
use crate::fuzzing::small_config;

/// Decides at once: without an origin, a decision never waits.
fn decided(
    shared: &Shared,
    tenant: TenantIndex,
    request: &RateLimitRequest,
) -> Result<RateLimitResponse, Refusal> {
    decide(shared, tenant, request).now_or_never().expect("decided at once")
}

fn shared() -> Shared {
    Shared::new(&mut small_config(None)).expect("nothing is read")
}

fn parsed(text: &str, shared: &Shared) -> Result<Descriptors, Vec<String>> {
    let mut loaded = Descriptors::default();
    file::parse(text).and_then(|file| loaded.domains.add(file, shared))?;
    Ok(loaded)
}

/// A server with one descriptor file.
fn server(text: &str) -> Shared {
    let shared = shared();
    let descriptors = parsed(text, &shared).expect("a good file");
    shared.rules.descriptors.store(std::sync::Arc::new(descriptors));
    shared
}

fn descriptor(entries: &[(&str, &str)]) -> RateLimitDescriptor {
    let entry = |(key, value): &(&str, &str)| Entry { key: (*key).to_owned(), value: (*value).to_owned() };
    RateLimitDescriptor { entries: entries.iter().map(entry).collect(), ..RateLimitDescriptor::default() }
}

fn request(domain: &str, descriptors: &[RateLimitDescriptor]) -> RateLimitRequest {
    RateLimitRequest { domain: domain.to_owned(), descriptors: descriptors.to_vec(), hits_addend: 0 }
}

fn ask(shared: &Shared, domain: &str, descriptors: &[RateLimitDescriptor]) -> RateLimitResponse {
    decided(shared, 0, &request(domain, descriptors)).expect("decided")
}

/// How many requests in a row pass, of at most `most`.
fn passes(shared: &Shared, domain: &str, entries: &[(&str, &str)], most: u32) -> u32 {
    let one = [descriptor(entries)];
    (0..most).take_while(|_| ask(shared, domain, &one).overall_code() == Code::Ok).map(|_| 1).sum()
}

fn limit_of(status: &DescriptorStatus) -> Option<(u32, Unit)> {
    status.current_limit.as_ref().map(|limit| (limit.requests_per_unit, limit.unit()))
}

fn found(shared: &Shared, domain: &str, entries: &[(&str, &str)]) -> Option<(u32, Unit)> {
    limit_of(&ask(shared, domain, &[descriptor(entries)]).statuses[0])
}

#[test]
fn problems_of_a_descriptor_file_are_named() {
    let long = "x".repeat(257);
    let table = [
        ("descriptors: []", "config file cannot have empty domain"),
        ("domain: ''", "config file cannot have empty domain"),
        (
            "domain: a\nratelimits: []",
            "ratelimits: unknown key 'ratelimits'; known here: domain, descriptors",
        ),
        (
            "domain: a\ndescriptors: [{key: k, rate_limit: {unit: day, requests_per_unit: 1, shadow_mode: true}}]",
            "descriptors[0].rate_limit.shadow_mode: unknown key 'shadow_mode'; known here: unit, requests_per_unit, \
             unlimited, name, replaces",
        ),
        ("domain: a\ndescriptors: [{value: v}]", "'a': descriptor has empty key"),
        (
            "domain: a\ndescriptors: [{key: k, value: v}, {key: k}, {key: k, value: v}]",
            "duplicate descriptor composite key 'a.k_v'",
        ),
        (
            "domain: a\ndescriptors: [{key: k, descriptors: [{key: l}, {key: l}]}]",
            "duplicate descriptor composite key 'a.k.l'",
        ),
        (
            "domain: a\ndescriptors: [{key: k, rate_limit: {unit: fortnight, requests_per_unit: 1}}]",
            "'a.k': invalid rate limit unit 'fortnight'; known: second, minute, hour, day, week, month, year",
        ),
        (
            "domain: a\ndescriptors: [{key: k, rate_limit: {requests_per_unit: 1}}]",
            "'a.k': invalid rate limit unit ''; known: second, minute, hour, day, week, month, year",
        ),
        (
            "domain: a\ndescriptors: [{key: k, rate_limit: {unit: unknown, requests_per_unit: 1}}]",
            "'a.k': invalid rate limit unit 'unknown'; known: second, minute, hour, day, week, month, year",
        ),
        (
            "domain: a\ndescriptors: [{key: k, rate_limit: {unlimited: true, unit: day}}]",
            "'a.k': should not specify rate limit unit when unlimited",
        ),
        (
            "domain: a\ndescriptors: [{key: k, rate_limit: {unit: day, replaces: [{name: ''}]}}]",
            "'a.k': should not have an empty replaces entry",
        ),
        (
            "domain: a\ndescriptors: [{key: k, rate_limit: {unit: day, name: n, replaces: [{name: n}]}}]",
            "'a.k': replaces should not contain name of same descriptor",
        ),
        (
            "domain: a\ndescriptors: [{key: k, value: v, share_threshold: true}]",
            "share_threshold can only be used with wildcard values (with a '*'), but found key 'k_v'",
        ),
        (
            "domain: a\ndescriptors: [{key: k, shadow_mode: true, metadata: {tidegate: {charge: always}}}]",
            "'a.k': metadata.tidegate.charge: \"always\" goes with neither shadow_mode nor quota_mode",
        ),
        (&format!("domain: {long}"), "domain: 257 bytes is outside 1 to 256"),
        (&format!("domain: a\ndescriptors: [{{key: {long}}}]"), "'a': key: 257 bytes is outside 1 to 256"),
        (
            &format!("domain: a\ndescriptors: [{{key: k, rate_limit: {{unit: day, name: {long}}}}}]"),
            "'a.k': name: 257 bytes is outside 0 to 256",
        ),
    ];
    let shared = shared();
    for (text, expected) in table {
        assert_eq!(parsed(text, &shared).expect_err(text), [expected], "{text}");
    }
}

#[test]
fn yaml_that_is_none_is_refused_with_its_place() {
    let deep = format!("domain: a\ndescriptors: {}", "[{key: k, descriptors: ".repeat(100));
    let bomb = "domain: a\na: &a [1,1]\nb: &b [*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b]\ndescriptors: *c";
    let shared = shared();
    for (text, part) in [
        ("domain: [a", "line 1"),
        ("domain: a\ndomain: b", "duplicate"),
        ("domain: a\ndescriptors: 5", "line 2"),
        ("domain: a\ndescriptors: [5]", "line 2"),
        ("domain: a\ndescriptors: [{key: k, rate_limit: {unit: day, requests_per_unit: -1}}]", "line 2"),
        (
            "domain: a\ndescriptors: [{key: k, rate_limit: {unit: day, requests_per_unit: 4294967296}}]",
            "line 2",
        ),
        ("domain: a\ndescriptors: [{key: k, shadow_mode: maybe}]", "line 2"),
        ("domain: a\ndescriptors: [{key: k, metadata: {tidegate: {charge: often}}}]", "often"),
        ("domain: a\ndescriptors: [{key: k, metadata: {tidegate: {charges: always}}}]", "charges"),
        (deep.as_str(), ""),
        (bomb, "unknown key 'a'"),
    ] {
        let problems = parsed(text, &shared).expect_err(text);
        assert!(problems.iter().any(|problem| problem.contains(part)), "{text}: {problems:?}");
    }
}

#[test]
fn all_problems_of_a_file_are_listed() {
    let text =
        "domain: a\ndescriptors:\n- {key: k, rate_limit: {unit: x}}\n- {value: v}\n- {key: l}\n- {key: l}\n";
    assert_eq!(parsed(text, &shared()).expect_err("three mistakes").len(), 3);
    let text = "domain: a\nfoo: 1\ndescriptors:\n- {key: k, bar: 2}\n";
    assert_eq!(parsed(text, &shared()).expect_err("two mistakes").len(), 2);
}

#[test]
fn every_key_is_read() {
    let text = "
domain: all
descriptors:
  - key: k
    value: 1.10
    detailed_metric: true
    value_to_metric: true
    metadata: {any: [thing, {at: all}]}
    shadow_mode: false
    quota_mode: false
    share_threshold: false
    rate_limit: {unit: Week, requests_per_unit: 3, name: n, replaces: [{name: other}], unlimited: false}
  - {key: k, value: yes, rate_limit: {unit: YEAR, requests_per_unit: 4}}
  - {key: nothing, descriptors: , rate_limit: }
";
    let shared = server(text);
    assert_eq!(found(&shared, "all", &[("k", "1.10")]), Some((3, Unit::Week)));
    assert_eq!(found(&shared, "all", &[("k", "yes")]), Some((4, Unit::Year)));
    assert_eq!(found(&shared, "all", &[("nothing", "")]), None);
}

#[test]
fn a_folder_is_one_domain_for_each_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let shared = shared();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("written");
    let problem = Descriptors::load(folder.path(), &shared).expect_err("empty");
    assert!(problem.ends_with("no .yaml or .yml file in it"), "{problem}");
    write("a.yaml", "domain: a");
    write("b.yml", "domain: b");
    write("README.md", "not: descriptors");
    assert!(Descriptors::load(folder.path(), &shared).expect("two files").domains.contains("b"));
    write("c.yaml", "domain: a");
    write("d.yaml", "domain:");
    let problem = Descriptors::load(folder.path(), &shared).expect_err("two mistakes");
    assert!(problem.contains("c.yaml: duplicate domain 'a' in config file\n"), "{problem}");
    assert!(problem.ends_with("d.yaml: config file cannot have empty domain"), "{problem}");
    assert!(Descriptors::load(&folder.path().join("none.yaml"), &shared).is_err());
}

const MESSAGING: &str = "
domain: messaging
descriptors:
  - key: message_type
    value: marketing
    descriptors:
      - key: to_number
        rate_limit: {unit: day, requests_per_unit: 5}
  - key: to_number
    rate_limit: {unit: day, requests_per_unit: 100}
";

#[test]
fn nested_descriptors_count_each_value_on_its_own() {
    let shared = server(MESSAGING);
    let marketing = |number| [("message_type", "marketing"), ("to_number", number)];
    assert_eq!(passes(&shared, "messaging", &marketing("2061111111"), 10), 5);
    assert_eq!(passes(&shared, "messaging", &marketing("2062222222"), 10), 5);
    assert_eq!(passes(&shared, "messaging", &[("to_number", "2061111111")], 200), 100);
    assert_eq!(found(&shared, "messaging", &[("message_type", "marketing")]), None);
    assert_eq!(found(&shared, "messaging", &[("message_type", "news"), ("to_number", "1")]), None);
    assert_eq!(found(&shared, "elsewhere", &[("to_number", "1")]), None);
}

#[test]
fn a_request_is_under_all_its_descriptors_and_charged_for_all_or_none() {
    let shared = server(MESSAGING);
    let both =
        [descriptor(&[("message_type", "marketing"), ("to_number", "1")]), descriptor(&[("to_number", "1")])];
    for left in (0..5).rev() {
        let response = ask(&shared, "messaging", &both);
        assert_eq!(response.overall_code(), Code::Ok);
        let remaining: Vec<_> = response.statuses.iter().map(|status| status.limit_remaining).collect();
        assert_eq!(remaining, [left, left + 95]);
    }
    let denied = ask(&shared, "messaging", &both);
    assert_eq!(denied.overall_code(), Code::OverLimit);
    assert_eq!(denied.statuses[0].code(), Code::OverLimit);
    assert_eq!(denied.statuses[1].code(), Code::Ok);
    assert_eq!(denied.statuses[1].limit_remaining, 95, "a denied request is not charged");
    let wait = denied.statuses[0].duration_until_reset.expect("limited").seconds;
    assert!((24 * 60 * 60 / 5 - 5..=24 * 60 * 60 / 5).contains(&wait), "{wait}");
    let header = |name: &str| {
        let found = denied.response_headers_to_add.iter().find(|header| header.key == name);
        found.map(|header| header.value.as_str())
    };
    assert_eq!(header("x-ratelimit-limit"), Some("5"));
    assert_eq!(header("x-ratelimit-denied-by"), Some("messaging.message_type_marketing.to_number"));
    assert_eq!(header("retry-after"), Some(wait.to_string().as_str()));
}

#[test]
fn the_most_specific_descriptor_applies() {
    let shared = server(
        "
domain: edge_proxy_per_ip
descriptors:
  - key: remote_address
    rate_limit: {unit: second, requests_per_unit: 10}
  - key: remote_address
    value: 50.0.0.5
    rate_limit: {unit: second, requests_per_unit: 0}
",
    );
    assert_eq!(
        found(&shared, "edge_proxy_per_ip", &[("remote_address", "50.0.0.1")]),
        Some((10, Unit::Second))
    );
    assert_eq!(passes(&shared, "edge_proxy_per_ip", &[("remote_address", "50.0.0.5")], 5), 0);
    let blocked = ask(&shared, "edge_proxy_per_ip", &[descriptor(&[("remote_address", "50.0.0.5")])]);
    assert!(
        blocked.response_headers_to_add.iter().all(|header| header.key != "retry-after"),
        "it never passes"
    );
}

#[test]
fn a_limit_applies_at_the_depth_of_the_request_only() {
    let shared = server(
        "
domain: example4
descriptors:
  - key: key
    value: value
    rate_limit: {requests_per_unit: 300, unit: second}
  - key: deep
    descriptors:
      - key: subkey
        rate_limit: {requests_per_unit: 300, unit: second}
",
    );
    assert_eq!(found(&shared, "example4", &[("key", "value")]), Some((300, Unit::Second)));
    assert_eq!(found(&shared, "example4", &[("key", "value"), ("subkey", "subvalue")]), None);
    assert_eq!(found(&shared, "example4", &[("deep", "x"), ("subkey", "y")]), Some((300, Unit::Second)));
    assert_eq!(found(&shared, "example4", &[("deep", "x")]), None);
    assert_eq!(found(&shared, "example4", &[]), None);
}

#[test]
fn unlimited_differs_from_unknown() {
    let shared = server("domain: internal\ndescriptors: [{key: ldap, rate_limit: {unlimited: true}}]");
    let asked = [descriptor(&[("ldap", "x")]), descriptor(&[("other", "x")])];
    let response = ask(&shared, "internal", &asked);
    assert_eq!(response.overall_code(), Code::Ok);
    let told: Vec<_> = response
        .statuses
        .iter()
        .map(|status| (status.code(), status.current_limit.is_some(), status.limit_remaining))
        .collect();
    assert_eq!(told, [(Code::Ok, false, u32::MAX), (Code::Ok, false, 0)]);
    assert_eq!(response.response_headers_to_add, []);
}

#[test]
fn shadow_mode_only_counts() {
    let shared = server(
        "
domain: example6
descriptors:
  - key: service
    descriptors:
      - {key: user, value: user-a, rate_limit: {requests_per_unit: 10, unit: hour}, shadow_mode: true}
      - {key: user, value: user-b, rate_limit: {requests_per_unit: 20, unit: hour}}
",
    );
    let user = |user| [("service", "auth-service"), ("user", user)];
    assert_eq!(passes(&shared, "example6", &user("user-a"), 50), 50);
    assert_eq!(passes(&shared, "example6", &user("user-b"), 50), 20);
    let over = ask(&shared, "example6", &[descriptor(&user("user-a"))]);
    assert_eq!((over.statuses[0].code(), over.statuses[0].limit_remaining), (Code::Ok, 0));
    // A request that another limit denies is not charged in shadow either.
    let both = [descriptor(&user("user-b")), descriptor(&[("service", "other"), ("user", "user-a")])];
    assert_eq!(ask(&shared, "example6", &both).statuses[1].limit_remaining, 10);
}

#[test]
fn replaces_drops_the_named_limit() {
    let shared = server(
        "
domain: example7
descriptors:
  - key: key_1
    value: value_1
    descriptors:
      - {key: user, value: bkthomps, rate_limit: {name: specific_limit, requests_per_unit: 5, unit: hour}}
  - key: key_2
    value: value_2
    descriptors:
      - key: user
        value: bkthomps
        rate_limit: {replaces: [{name: specific_limit}], requests_per_unit: 10, unit: hour}
",
    );
    let first = descriptor(&[("key_1", "value_1"), ("user", "bkthomps")]);
    let second = descriptor(&[("key_2", "value_2"), ("user", "bkthomps")]);
    for _ in 0..10 {
        let response = ask(&shared, "example7", &[first.clone(), second.clone()]);
        assert_eq!(response.overall_code(), Code::Ok);
        assert_eq!(response.statuses[0].current_limit, None);
    }
    assert_eq!(ask(&shared, "example7", &[first.clone(), second]).overall_code(), Code::OverLimit);
    let alone = ask(&shared, "example7", &[first]);
    assert_eq!(alone.statuses[0].limit_remaining, 4, "what was replaced was not charged");
    assert_eq!(
        alone.statuses[0].current_limit.as_ref().map(|limit| limit.name.as_str()),
        Some("specific_limit")
    );
}

#[test]
fn wildcards_match_in_the_order_of_the_file() {
    let shared = server(
        "
domain: example9
descriptors:
  - {key: key1, value: value*, rate_limit: {unit: minute, requests_per_unit: 20}}
  - {key: key1, value: value1, rate_limit: {unit: minute, requests_per_unit: 21}}
  - {key: key1, value: v*, rate_limit: {unit: minute, requests_per_unit: 22}}
  - {key: key1, rate_limit: {unit: minute, requests_per_unit: 23}}
  - {key: path, value: /api/*/action, rate_limit: {unit: minute, requests_per_unit: 24}}
  - {key: route, value: /api/*/resource/*/action, rate_limit: {unit: minute, requests_per_unit: 25}}
  - {key: outer, descriptors: [{key: inner, value: a*, rate_limit: {unit: minute, requests_per_unit: 26}}]}
",
    );
    for (entries, amount) in [
        (&[("key1", "value1")][..], Some(21)),
        (&[("key1", "value2")], Some(20)),
        (&[("key1", "value")], Some(20)),
        (&[("key1", "vat")], Some(22)),
        (&[("key1", "other")], Some(23)),
        (&[("path", "/api/123/action")], Some(24)),
        (&[("path", "/api/123/other")], None),
        (&[("route", "/api/v1/resource/123/action")], Some(25)),
        (&[("outer", "x"), ("inner", "abc")], Some(26)),
        (&[("outer", "x"), ("inner", "b")], None),
    ] {
        assert_eq!(found(&shared, "example9", entries).map(|limit| limit.0), amount, "{entries:?}");
    }
    // Each value that matches is counted on its own.
    assert_eq!(passes(&shared, "example9", &[("key1", "value3")], 30), 20);
    assert_eq!(passes(&shared, "example9", &[("key1", "value4")], 30), 20);
}

#[test]
fn a_shared_threshold_is_counted_by_its_pattern() {
    let shared = server(
        "
domain: example11
descriptors:
  - {key: files, value: files/*, share_threshold: true, rate_limit: {unit: hour, requests_per_unit: 10}}
  - {key: files_no_share, value: files_no_share/*, rate_limit: {unit: hour, requests_per_unit: 10}}
  - key: route
    value: api/*
    share_threshold: true
    descriptors: [{key: method, rate_limit: {unit: hour, requests_per_unit: 3}}]
",
    );
    assert_eq!(passes(&shared, "example11", &[("files", "files/a.pdf")], 5), 5);
    assert_eq!(passes(&shared, "example11", &[("files", "files/b.csv")], 50), 5);
    assert_eq!(passes(&shared, "example11", &[("files", "files/c.txt")], 5), 0);
    assert_eq!(passes(&shared, "example11", &[("files_no_share", "files_no_share/a.pdf")], 50), 10);
    assert_eq!(passes(&shared, "example11", &[("files_no_share", "files_no_share/b.csv")], 50), 10);
    assert_eq!(passes(&shared, "example11", &[("route", "api/v1"), ("method", "GET")], 2), 2);
    assert_eq!(passes(&shared, "example11", &[("route", "api/v2"), ("method", "GET")], 5), 1);
    assert_eq!(passes(&shared, "example11", &[("route", "api/v2"), ("method", "PUT")], 5), 3);
}

#[test]
fn quotas_deny_only_when_all_are_over() {
    let shared = server(
        "
domain: quota
descriptors:
  - {key: backend, value: a, quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: backend, value: b, quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 2}}
  - {key: user, rate_limit: {unit: hour, requests_per_unit: 5}}
",
    );
    let all =
        [descriptor(&[("backend", "a")]), descriptor(&[("backend", "b")]), descriptor(&[("user", "x")])];
    let codes = |response: &RateLimitResponse| {
        let own: Vec<_> = response.statuses.iter().map(DescriptorStatus::code).collect();
        (response.overall_code(), own)
    };
    let remaining = |response: &RateLimitResponse| response.statuses[2].limit_remaining;
    assert_eq!(codes(&ask(&shared, "quota", &all)), (Code::Ok, vec![Code::Ok, Code::Ok, Code::Ok]));
    let one_over = ask(&shared, "quota", &all);
    assert_eq!(codes(&one_over), (Code::Ok, vec![Code::OverLimit, Code::Ok, Code::Ok]));
    assert_eq!(remaining(&one_over), 3);
    let all_over = ask(&shared, "quota", &all);
    assert_eq!(codes(&all_over), (Code::OverLimit, vec![Code::OverLimit, Code::OverLimit, Code::Ok]));
    assert_eq!(remaining(&all_over), 3, "a denied request is not charged");
    assert!(all_over.response_headers_to_add.iter().any(|header| header.key == "retry-after"));
}

#[test]
fn a_denied_request_does_not_spend_a_quota() {
    let shared = server(
        "
domain: quota
descriptors:
  - {key: backend, quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 2}}
  - {key: user, rate_limit: {unit: hour, requests_per_unit: 0}}
",
    );
    let both = [descriptor(&[("backend", "a")]), descriptor(&[("user", "x")])];
    for _ in 0..5 {
        assert_eq!(ask(&shared, "quota", &both).overall_code(), Code::OverLimit);
    }
    assert_eq!(passes(&shared, "quota", &[("backend", "a")], 5), 2);
}

#[test]
fn hits_are_taken_from_the_descriptor_then_the_request() {
    let shared =
        server("domain: d\ndescriptors: [{key: k, rate_limit: {unit: hour, requests_per_unit: 100}}]");
    let left = |request_hits: u32, own: Option<u64>, negative: bool| {
        let hits = own.map(|value| UInt64Value { value });
        let descriptor = RateLimitDescriptor {
            hits_addend: hits,
            is_negative_hits: negative,
            ..descriptor(&[("k", "v")])
        };
        let request = RateLimitRequest { hits_addend: request_hits, ..request("d", &[descriptor]) };
        let response = decided(&shared, 0, &request).expect("decided");
        (response.overall_code(), response.statuses[0].limit_remaining)
    };
    assert_eq!(left(0, None, false), (Code::Ok, 99));
    assert_eq!(left(9, None, false), (Code::Ok, 90));
    assert_eq!(left(9, Some(20), false), (Code::Ok, 70));
    assert_eq!(left(9, Some(0), false), (Code::Ok, 70));
    assert_eq!(left(71, None, false), (Code::OverLimit, 70));
    assert_eq!(left(0, Some(30), true), (Code::Ok, 100));
    assert_eq!(left(0, Some(500), true), (Code::Ok, 100));
    assert_eq!(left(100, None, false), (Code::Ok, 0));
    assert_eq!(left(0, Some(0), false), (Code::OverLimit, 0));
}

/// A request is checked at its start with a cost of 0, and charged at its end, when its cost is
/// known.
#[test]
fn past_hits_are_charged_with_charge_always() {
    let shared = server(
        "
domain: tokens
descriptors:
  - {key: user, rate_limit: {unit: hour, requests_per_unit: 1000}, metadata: {tidegate: {charge: always}}}
  - {key: team, rate_limit: {unit: hour, requests_per_unit: 1000}}
",
    );
    let asked = |key: &str, hits: u64| {
        let hits_addend = Some(UInt64Value { value: hits });
        ask(&shared, "tokens", &[RateLimitDescriptor { hits_addend, ..descriptor(&[(key, "alice")]) }])
    };
    for key in ["user", "team"] {
        assert_eq!(asked(key, 800).overall_code(), Code::Ok);
        assert_eq!(asked(key, 0).statuses[0].limit_remaining, 200, "{key}");
        assert_eq!(asked(key, 800).overall_code(), Code::OverLimit, "{key}");
    }
    let over = asked("user", 0);
    assert_eq!((over.overall_code(), over.statuses[0].limit_remaining), (Code::OverLimit, 0));
    let wait = over.statuses[0].duration_until_reset.expect("limited").seconds;
    // 601 of 1,000 an hour have to drain before one more may pass.
    assert!((601 * 3_600 / 1_000 - 60..=601 * 3_600 / 1_000 + 1).contains(&wait), "{wait}");
    assert_eq!(asked("team", 0).overall_code(), Code::Ok, "what was denied was not charged");
}

#[test]
fn limit_with_charge_always_is_charged_for_denied_requests() {
    let shared = server(
        "
domain: d
descriptors:
  - {key: fact, rate_limit: {unit: hour, requests_per_unit: 10}, metadata: {tidegate: {charge: always}}}
  - {key: closed, rate_limit: {unit: hour, requests_per_unit: 0}}
  - {key: open, rate_limit: {unit: hour, requests_per_unit: 10}}
",
    );
    let both = [descriptor(&[("fact", "v")]), descriptor(&[("closed", "v")]), descriptor(&[("open", "v")])];
    for left in [9, 8] {
        let denied = ask(&shared, "d", &both);
        assert_eq!(denied.overall_code(), Code::OverLimit);
        let remaining: Vec<_> = denied.statuses.iter().map(|status| status.limit_remaining).collect();
        assert_eq!(remaining, [left, 0, 10]);
    }
}

#[test]
fn never_allowed_request_waits_a_whole_unit() {
    let shared = server(
        "domain: d\ndescriptors: [{key: none, rate_limit: {unit: minute, requests_per_unit: 0}}, \
         {key: few, rate_limit: {unit: hour, requests_per_unit: 2}}]",
    );
    let wait = |descriptor: RateLimitDescriptor| {
        let denied = ask(&shared, "d", &[descriptor]);
        assert_eq!(denied.overall_code(), Code::OverLimit);
        denied.statuses[0].duration_until_reset.expect("limited").seconds
    };
    assert_eq!(wait(descriptor(&[("none", "v")])), 60);
    let look =
        RateLimitDescriptor { hits_addend: Some(UInt64Value { value: 0 }), ..descriptor(&[("none", "v")]) };
    assert_eq!(wait(look), 60);
    let many =
        RateLimitDescriptor { hits_addend: Some(UInt64Value { value: 3 }), ..descriptor(&[("few", "v")]) };
    assert_eq!(wait(many), 3_600);
}

#[test]
fn long_policy_name_is_truncated() {
    let shared = shared();
    let key = "ä".repeat(100);
    let limit = Some(RateLimitOverride { requests_per_unit: 1, unit: Unit::Minute.into() });
    let response =
        ask(&shared, "d", &[RateLimitDescriptor { limit, ..descriptor(&[(&key, "v"), ("k", "v")]) }]);
    let policy = response.response_headers_to_add.iter().find(|header| header.key == "ratelimit-policy");
    // The name is cut to 128 bytes: 2 for the domain and the dot, then 63 letters of 2 bytes. Each
    // byte of a letter is encoded as 3.
    let told = format!("\"d.{}\";q=1;w=60", "%C3%A4".repeat(63));
    assert_eq!(policy.map(|header| header.value.as_str()), Some(told.as_str()));
}

#[test]
fn a_look_that_denies_charges_nothing_else() {
    let shared = server(
        "domain: d\ndescriptors: [{key: k, rate_limit: {unit: hour, requests_per_unit: 0}}, \
         {key: l, rate_limit: {unit: hour, requests_per_unit: 3}}]",
    );
    let look =
        RateLimitDescriptor { hits_addend: Some(UInt64Value { value: 0 }), ..descriptor(&[("k", "v")]) };
    for _ in 0..5 {
        let response = ask(&shared, "d", &[look.clone(), descriptor(&[("l", "v")])]);
        assert_eq!(response.overall_code(), Code::OverLimit);
        assert_eq!(response.statuses[1].limit_remaining, 3);
    }
}

#[test]
fn a_limit_may_come_with_the_request() {
    let shared = server(
        "domain: d\ndescriptors: [{key: k, shadow_mode: true, rate_limit: {unit: hour, requests_per_unit: 1}}]",
    );
    let with = |requests_per_unit, unit| RateLimitDescriptor {
        limit: Some(RateLimitOverride { requests_per_unit, unit }),
        ..descriptor(&[("k", "v")])
    };
    let hourly = [with(2, Unit::Hour.into())];
    for expected in [Code::Ok, Code::Ok, Code::OverLimit] {
        let response = ask(&shared, "d", &hourly);
        assert_eq!(response.overall_code(), expected);
        assert_eq!(limit_of(&response.statuses[0]), Some((2, Unit::Hour)));
    }
    assert_eq!(ask(&shared, "d", &[with(2, Unit::Day.into())]).overall_code(), Code::Ok, "units do not mix");
    assert_eq!(ask(&shared, "unknown", &hourly).statuses[0].current_limit, None);
    for unit in [0, 99] {
        let refused = decided(&shared, 0, &request("d", &[with(2, unit)])).expect_err("no unit");
        assert_eq!(
            refused.to_string(),
            format!("descriptors[0].limit.unit: {unit} is not a unit of time; allowed are 1 to 7")
        );
    }
}

#[test]
fn requests_that_make_no_sense_are_refused() {
    let shared = server(MESSAGING);
    let one = descriptor(&[("to_number", "1")]);
    let long = descriptor(&vec![("k", "v"); 65]);
    let text = "x".repeat(64 << 10);
    let long_domain = "x".repeat(257);
    let long_key = descriptor(&[("k", "v"), (&text[..257], "v")]);
    let long_value = descriptor(&[("to_number", &format!("{text}x"))]);
    let longest = descriptor(&[("to_number", &text), (&text[..256], "")]);
    assert_eq!(ask(&shared, "messaging", &[longest]).overall_code(), Code::Ok);
    let many = vec![descriptor(&[("to_number", "1")]); tidegate::LIMITS_PER_CHECK_MAX + 1];
    let too_many = format!(
        "descriptors: {} are under limits, at most {} may be decided as one",
        many.len(),
        tidegate::LIMITS_PER_CHECK_MAX
    );
    for (request, words) in [
        (
            request("", from_ref(&one)),
            "domain: rate limit domain must not be empty; allowed are 1 to 256 bytes",
        ),
        (
            request("d", &[]),
            "descriptors: rate limit descriptor list must not be empty; allowed are 1 to 1024",
        ),
        (request("d", &[one.clone(), long]), "descriptors[1].entries: 65 is outside 0 to 64"),
        (request(&long_domain, from_ref(&one)), "domain: 257 bytes is outside 1 to 256"),
        (request("d", &[long_key]), "descriptors[0].entries[1].key: 257 bytes is outside 0 to 256"),
        (
            request("d", &[one.clone(), long_value]),
            "descriptors[1].entries[0].value: 65537 bytes is outside 0 to 65536",
        ),
        (request("d", &vec![descriptor(&[]); 1_025]), "descriptors: 1025 is outside 1 to 1024"),
        (request("messaging", &many), too_many.as_str()),
    ] {
        let refused = decided(&shared, 0, &request).expect_err(words);
        assert_eq!(refused, Refusal::Wrong(words.to_owned()));
    }
}

#[test]
fn without_a_file_only_limits_of_the_request_are_decided() {
    let shared = shared();
    let plain = descriptor(&[("k", "v")]);
    assert_eq!(decided(&shared, 0, &request("d", from_ref(&plain))), Err(Refusal::NothingLoaded));
    let limit = Some(RateLimitOverride { requests_per_unit: 1, unit: Unit::Minute.into() });
    let with = RateLimitDescriptor { limit, ..plain };
    assert_eq!(ask(&shared, "d", from_ref(&with)).overall_code(), Code::Ok);
    assert_eq!(ask(&shared, "d", &[with]).overall_code(), Code::OverLimit);
}

#[test]
fn credentials_are_compared_with_the_file_and_counted_apart() {
    let shared = server(
        "
domain: a
descriptors:
- key: authorization
  value: Bearer vip
  rate_limit: {unit: hour, requests_per_unit: 3}
- key: authorization
  rate_limit: {unit: hour, requests_per_unit: 1}
",
    );
    for (value, limit) in [("Bearer vip", 3), ("Bearer b", 1), ("Bearer c", 1)] {
        assert_eq!(passes(&shared, "a", &[("authorization", value)], 9), limit, "{value}");
    }
}
