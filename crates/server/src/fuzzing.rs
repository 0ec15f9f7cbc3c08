//! What the fuzzer calls: one function for each kind of bytes that strangers send, which fails if something that must
//! hold does not. No part of the interface.

#![expect(clippy::expect_used, reason = "the fuzzer looks for what stops the process")]
#![allow(missing_docs, reason = "each is named after what it reads")]

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, OnceLock};

use ::http::header::FORWARDED;
use ::http::{HeaderMap, HeaderValue, Request};
use bytes::Bytes;
use ipnet::IpNet;
use tidegate_rules::RuleSet;

use crate::address;
use crate::config::Config;
use crate::http::{Answer, Asked, normal_path, route_check};
use crate::rules::GatedRules;
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

/// Lines: a request target, then values of `X-Forwarded-For` and, if the target is empty, of `Forwarded`.
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
        // What more a client writes on the left of it changes nothing.
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

/// The text of a rules file: refused in words, or a set whose dimensions can be looked at.
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

/// The body of `POST /v1/check`.
pub fn check_body(bytes: &[u8]) {
    is_an_answer(&post("/v1/check", bytes, route_check));
}

// The bodies of other surfaces are fuzzed the same way: a function here, a file in `fuzz/fuzz_targets`.

/// What `handle` answers to a body.
fn post(path: &str, body: &[u8], handle: fn(&Asked<'_>) -> Answer) -> Answer {
    let (parts, ()) = Request::post(path).body(()).expect("a request").into_parts();
    let peer = SocketAddr::from(([127, 0, 0, 1], 1));
    handle(&Asked { shared: server(), peer, parts, body: Bytes::copy_from_slice(body) })
}

/// Whatever was asked, it is the asker who is wrong.
fn is_an_answer(answer: &Answer) {
    assert!(!answer.status().is_server_error(), "{answer:?}");
}

fn server() -> &'static Shared {
    static SERVER: OnceLock<Shared> = OnceLock::new();
    SERVER.get_or_init(|| {
        let given = [("memory", "1MB"), ("data_dir", "none"), ("workers", "1")];
        let given: HashMap<String, String> =
            given.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let mut config = Config::read(&given, None).expect("a good configuration");
        let shared = Shared::new(&mut config).expect("a small server");
        let set = RuleSet::parse(RULES).expect("good rules");
        shared.rules.store(Arc::new(GatedRules::new(set, &shared).expect("few rules")));
        shared
    })
}
