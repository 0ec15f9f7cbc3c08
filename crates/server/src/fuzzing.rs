//! Entry points of the fuzzer, one for each kind of untrusted input. Each panics if an invariant is
//! broken. Not part of the public interface.

#![expect(clippy::expect_used, reason = "the fuzzer looks for what stops the process")]
#![allow(missing_docs, reason = "each is named after what it reads")]

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, OnceLock};

use ::http::header::FORWARDED;
use ::http::{HeaderMap, HeaderValue, Request};
use bytes::Bytes;
use futures_util::FutureExt as _;
use ipnet::IpNet;
use tidegate_rules::rows::{EmergencyRow, RowKind, RuleRow, RuleRows};
use tidegate_rules::{Dimensions, PROBLEMS_MAX, RuleSet};

use crate::address;
use crate::config::Config;
use crate::envoy::Descriptors;
use crate::http::{HttpRequest, normal_path, route};
use crate::rules::ActiveRules;
use crate::shared::Shared;

/// Looks at every dimension that can be wrong.
const RULES: &str = "
    [[rules]]
    name = 'everything'
    key = ['method', 'path', 'host', 'ip', 'header.x-key']
    limit = 5
    period = '1m'
    [[rules]]
    name = 'users'
    key = ['user']
    limit = 5
    period = '1s'
    algorithm = 'sliding_window'
    when = { user = ['a*', '*b'] }
    [[rules]]
    name = 'networks'
    key = ['ip']
    limit = 5
    period = '1s'
    mode = 'shadow'
    when = { ip = ['10.0.0.0/8', '2001:db8::/32', '1*'] }
";

/// A limit for requests from Envoy.
const DESCRIPTORS: &str = "
domain: a
descriptors:
  - key: k
    rate_limit: {unit: minute, requests_per_unit: 5}
";

/// Lines: a request target, then values of `X-Forwarded-For` and, if the target is empty, of
/// `Forwarded`.
pub fn forwarded_address(bytes: &[u8]) {
    let mut lines = bytes.split(|byte| *byte == b'\n');
    let target = lines.next().unwrap_or_default();
    path_has_one_spelling(target);
    let name = if target.is_empty() { FORWARDED } else { ::http::HeaderName::from_static("x-forwarded-for") };
    let values: Vec<HeaderValue> =
        lines.filter_map(|line| HeaderValue::from_bytes(line).ok()).take(32).collect();
    let headers = |values: &[HeaderValue]| {
        values.iter().map(|value| (name.clone(), value.clone())).collect::<HeaderMap>()
    };
    let trusted: Vec<IpNet> =
        ["127.0.0.0/8", "10.0.0.0/8"].iter().filter_map(|text| text.parse().ok()).collect();

    let stranger = IpAddr::from([192, 0, 2, 1]);
    assert_eq!(address::client(stranger, &headers(&values), &trusted), stranger);
    let client = address::client(Ipv4Addr::LOCALHOST.into(), &headers(&values), &trusted);
    if !address::is_trusted(client, &trusted) {
        // More entries of the client on the left change nothing.
        let mut more = vec![HeaderValue::from_static("\", for=1.2.3.4, 1.2.3.4")];
        more.extend(values);
        assert_eq!(address::client(Ipv4Addr::LOCALHOST.into(), &headers(&more), &trusted), client);
    }
}

fn path_has_one_spelling(target: &[u8]) {
    let normal = normal_path(target);
    assert_eq!(normal_path(normal.as_bytes()), normal);
    assert!(normal.starts_with('/') && !normal.contains("//") && normal.is_ascii());
}

/// The text of a rules file: refused with problems, or a rule set that lists its dimensions.
pub fn rules_file(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match RuleSet::parse(text) {
        Ok(set) => {
            assert!(set.rules().iter().all(|rule| !rule.name.is_empty()));
            let _ = set.dimensions_used("");
        }
        Err(problems) => assert!(!problems.0.is_empty()),
    }
}

/// Lines of rule rows: the kind (`t`, `r`, `o` or `e`), the name up to the first blank, and the
/// body. Refused with problems, or a rule set in which rules apply in order, each once.
pub fn rule_rows(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let mut rule_rows = RuleRows { revision: 1, emergency_revision: 1, ..RuleRows::default() };
    let mut rows = Vec::new();
    for line in text.lines() {
        let mut chars = line.chars();
        let kind = chars.next();
        let (name, body) = chars.as_str().split_once(' ').unwrap_or_default();
        let (name, body) = (name.to_owned(), body.to_owned());
        let mut row = |kind| rows.push(RuleRow { kind, name: name.clone(), body: body.clone(), version: 1 });
        match kind {
            Some('t') => row(RowKind::Template),
            Some('r') => row(RowKind::Rule),
            Some('o') => row(RowKind::Override),
            _ => rule_rows.emergencies.push(EmergencyRow { id: name, body, expires_ms: 2 }),
        }
    }
    rule_rows.rows = rows.into();
    match RuleSet::compile(&rule_rows, None, 0) {
        Ok(set) => each_request(&set),
        Err(problems) => assert!((1..=PROBLEMS_MAX + 1).contains(&problems.0.len())),
    }
}

fn each_request(set: &RuleSet) {
    for (user, path) in [("a", "/a"), ("ab", "/"), ("", "b")] {
        let known_by = [("user", user), ("path", path), ("ip", "10.0.0.1")];
        let request = Dimensions::new(known_by).expect("good dimensions");
        let positions: Vec<usize> = set.matching("t", &request, 1).map(|found| found.position).collect();
        assert!(positions.is_sorted_by(|a, b| a < b), "each once, in order");
        // Emergencies end, all of them.
        let mut later = set.matching("t", &request, u64::MAX);
        assert!(later.all(|found| found.terms.emergency.is_none()));
    }
}

/// Where the HTTP listener reads a body, each in its own way.
const PATHS: [&str; 8] = [
    "/v1/check",
    "/json",
    "/v2/ratelimit.limit",
    "/v2/ratelimit.multiLimit",
    "/v2/ratelimit.setOverride",
    "/v2/ratelimit.getOverride",
    "/v2/ratelimit.deleteOverride",
    "/v2/ratelimit.listOverrides",
];

/// Posts a body to every path. Returns the status of each response that did not wait for the store.
pub fn http_body(bytes: &[u8]) -> Vec<u16> {
    let statuses: Vec<u16> = PATHS.iter().filter_map(|path| post(path, bytes)).collect();
    // No body may cause a server error.
    assert!(statuses.iter().all(|status| *status < 500), "{statuses:?}");
    statuses
}

/// The text of a descriptor file: refused in words, or one that decides.
pub fn descriptors(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Err(problems) = Descriptors::parse(text, server()) {
        assert!(!problems.is_empty());
    }
}

/// Requests as Redis clients send them.
pub fn resp(bytes: &[u8]) {
    crate::resp::read_requests(bytes);
}

/// Returns the status of the HTTP listener's response to a body; `None` if it has to wait.
fn post(path: &str, body: &[u8]) -> Option<u16> {
    let request = Request::post(path).header("content-type", "application/json");
    let (parts, ()) = request.body(()).expect("a request").into_parts();
    let peer = SocketAddr::from(([127, 0, 0, 1], 1));
    let req = HttpRequest::new(server(), peer, parts, Bytes::copy_from_slice(body));
    route(&req).now_or_never().map(|answer| answer.status().as_u16())
}

/// Returns the configuration of a small server that keeps nothing on disk, with the contents of a
/// configuration file.
pub(crate) fn small_config(file: Option<&str>) -> Config {
    let given = [("memory", "1MB"), ("data_dir", "none"), ("workers", "1")];
    let given = given.map(|(key, value)| (key.to_owned(), value.to_owned()));
    Config::read(&HashMap::from(given), file).expect("a good configuration")
}

fn server() -> &'static Shared {
    static SERVER: OnceLock<Shared> = OnceLock::new();
    SERVER.get_or_init(|| {
        let shared = Shared::new(&mut small_config(None)).expect("a small server");
        let set = RuleSet::parse(RULES).expect("good rules");
        let descriptors = Descriptors::parse(DESCRIPTORS, &shared).expect("good descriptors");
        shared.rules.descriptors.store(Arc::new(descriptors));
        shared.rules.store(Arc::new(ActiveRules::new(set, &shared).expect("few rules")));
        shared
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_path_answers_a_body() {
        let limit = br#"{"namespace":"n","identifier":"a","limit":1,"duration":1000}"#;
        let statuses = http_body(limit);
        // The body is a valid check and a valid override. The store of overrides replies at once,
        // or only later.
        let good = statuses.iter().filter(|status| **status == 200).count();
        assert!((1..=2).contains(&good), "{statuses:?}");
    }

    #[test]
    fn rule_rows_are_refused_or_matched() {
        rule_rows(
            b"rr {\"key\":[\"user\"],\"limit\":1,\"period\":\"1s\"}\n\
             oo {\"rule\":\"r\",\"key\":[\"a\"],\"limit\":2,\"expires\":9}",
        );
        rule_rows(b"rr {}\noo [\nee {\"action\":\"block\"}");
    }

    proptest! {
        /// Nearly right requests, which get furthest.
        #[test]
        fn no_body_breaks_anything(
            fields in prop::collection::vec(
                ("namespace|identifier|limit|duration|cost|cursor|x",
                    "[0-9]{1,22}|-1|1e9|null|\"[*a>]{0,3}\"|\\[\\]|\\{\\}|true"),
                0..6,
            ),
            cut in any::<prop::sample::Index>(),
            is_cut: bool,
        ) {
            let members: Vec<String> =
                fields.iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
            let object = format!("{{{}}}", members.join(","));
            for text in [object.clone(), format!("[{object},{object}]")] {
                let most = if is_cut { cut.index(text.len()) } else { text.len() };
                let statuses = http_body(&text.as_bytes()[..most]);
                prop_assert!(statuses.iter().all(|status| matches!(status, 200 | 400 | 404)), "{text} {statuses:?}");
            }
        }
    }
}
