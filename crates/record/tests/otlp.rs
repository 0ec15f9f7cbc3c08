//! All records reach a collector, even one that returns late. An unreachable collector delays
//! nothing.
#![allow(clippy::expect_used, reason = "a test fails by panicking")]

mod support;

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use support::{NOW_MS, denied};
use tidegate_record::{DecisionEntry, Delivery, FLUSH_EVERY, Log, LogSettings, Otlp, RecordVerdict};
use tidegate_testkit::{HttpListener, ReceivedRequest, Reply, wait_until};

const TIME_MAX: Duration = Duration::from_secs(30);

fn open(folder: &Path, to: &str, headers: &str) -> Log {
    let otlp = Otlp::new(to).and_then(|otlp| otlp.with_headers(headers)).expect("an address");
    let settings = LogSettings {
        threads: 1,
        sample_rate: 0.5,
        retention: Duration::from_hours(1),
        bytes_max: 1 << 30,
        region: "eu".to_owned(),
        node: "n1".to_owned(),
        seed: 1,
        otlp: Some(otlp),
        flush_every: FLUSH_EVERY,
    };
    Log::open(folder, settings, || NOW_MS).expect("opens")
}

/// The records of a request.
fn records(heard: &ReceivedRequest) -> Vec<Value> {
    let body: Value = serde_json::from_slice(&heard.body).expect("JSON");
    body["resourceLogs"][0]["scopeLogs"][0]["logRecords"].as_array().expect("records").clone()
}

fn attributes(of: &Value) -> serde_json::Map<String, Value> {
    let pair = |attribute: &Value| {
        (attribute["key"].as_str().expect("a key").to_owned(), attribute["value"].clone())
    };
    of["attributes"].as_array().expect("attributes").iter().map(pair).collect()
}

fn delivered(log: &Log) -> Delivery {
    log.deliveries().expect("it sends").until_now()
}

#[test]
fn a_record_has_all_that_the_log_has() {
    let collector = HttpListener::start(|_, _| Reply::new(200, "{}"));
    let folder = tempfile::tempdir().expect("a folder");
    let log = open(folder.path(), &collector.url(), "authorization=Bearer abc");
    log.recorder().write(0, &denied("user:42", NOW_MS + 5), [("user", "42"), ("path", "/x")]);
    let passed = DecisionEntry {
        verdict: RecordVerdict::Allowed,
        replaced_by: "",
        until_ms: None,
        retry_ms: None,
        ..denied("user:7", NOW_MS + 6)
    };
    log.recorder().write(0, &passed, []);
    wait_until("both to be sent", TIME_MAX, || delivered(&log).sent == 2);

    let heard = collector.heard();
    assert_eq!((heard[0].method.as_str(), heard[0].path.as_str()), ("POST", "/v1/logs"));
    assert_eq!(heard[0].header("content-type"), Some("application/json"));
    assert_eq!(heard[0].header("authorization"), Some("Bearer abc"));
    let body: Value = serde_json::from_slice(&heard[0].body).expect("JSON");
    let resource = attributes(&body["resourceLogs"][0]["resource"]);
    assert_eq!(resource["service.name"], json!({ "stringValue": "tidegate" }));
    assert_eq!(resource["host.name"], json!({ "stringValue": "n1" }));
    assert_eq!(resource["tidegate.region"], json!({ "stringValue": "eu" }));

    let all: Vec<Value> = heard.iter().flat_map(records).collect();
    let first = &all[0];
    assert_eq!(first["timeUnixNano"], "1794839537005000000");
    assert_eq!((&first["severityNumber"], &first["eventName"]), (&json!(9), &json!("tidegate.decision")));
    assert_eq!(first["body"], json!({ "stringValue": "user:42 denied by per_user" }));
    let expected = json!({
        "tidegate.tenant": { "stringValue": "acme" },
        "tidegate.surface": { "stringValue": "check" },
        "tidegate.key": { "stringValue": "user:42" },
        "tidegate.cost": { "intValue": "2" },
        "tidegate.verdict": { "stringValue": "denied" },
        "tidegate.rule": { "stringValue": "per_user" },
        "tidegate.rule_version": { "intValue": "3" },
        "tidegate.set_version": { "stringValue": "5f2a" },
        "tidegate.replaced_by": { "stringValue": "launch" },
        "tidegate.limit.amount": { "intValue": "100" },
        "tidegate.limit.burst": { "intValue": "120" },
        "tidegate.limit.period_ms": { "intValue": "60000" },
        "tidegate.remaining": { "intValue": "1" },
        "tidegate.level": { "intValue": "119" },
        "tidegate.retry_ms": { "intValue": "600" },
        "tidegate.source": { "stringValue": "regional" },
        "tidegate.reason": { "stringValue": "block" },
        "tidegate.until_ms": { "intValue": "1794843137000" },
        "tidegate.sample_rate": { "doubleValue": 1.0 },
        "tidegate.dimensions": { "kvlistValue": { "values": [
            { "key": "user", "value": { "stringValue": "42" } },
            { "key": "path", "value": { "stringValue": "/x" } },
        ] } },
    });
    assert_eq!(Value::Object(attributes(first)), expected);
    let second = attributes(&all[1]);
    assert_eq!(second["tidegate.sample_rate"], json!({ "doubleValue": 0.5 }));
    for absent in ["tidegate.retry_ms", "tidegate.replaced_by", "tidegate.until_ms"] {
        assert!(!second.contains_key(absent), "{absent}");
    }
}

#[test]
fn a_batch_is_tried_again_until_it_is_taken_and_closing_sends_the_rest() {
    // Unwell twice, then rid of one record, then well.
    let collector = HttpListener::start(|before, _| match before {
        0 => Reply { headers: vec![("retry-after".to_owned(), "0".to_owned())], ..Reply::new(503, "") },
        1 => Reply { headers: vec![("retry-after".to_owned(), "0".to_owned())], ..Reply::new(429, "") },
        2 => Reply::new(200, r#"{"partialSuccess":{"rejectedLogRecords":"1"}}"#),
        _ => Reply::new(200, "{}"),
    });
    let folder = tempfile::tempdir().expect("a folder");
    let log = open(folder.path(), &collector.url(), "");
    let deliveries = log.deliveries().expect("it sends");
    log.recorder().write(0, &denied("a", NOW_MS), []);
    log.recorder().write(0, &denied("b", NOW_MS), []);
    wait_until("the first to be taken", TIME_MAX, || {
        deliveries.until_now() == Delivery { sent: 1, dropped: 1 }
    });
    let bodies: Vec<_> = collector.heard().into_iter().map(|heard| heard.body).collect();
    assert!(bodies[0] == bodies[1] && bodies[1] == bodies[2], "the same batch each time");

    for at in 0..2_000 {
        log.recorder().write(0, &denied("c", NOW_MS + at), []);
    }
    drop(log);
    assert_eq!(deliveries.until_now(), Delivery { sent: 2_001, dropped: 1 });
    let sizes: Vec<usize> = collector.heard().iter().skip(3).map(|heard| records(heard).len()).collect();
    assert_eq!(sizes.iter().sum::<usize>(), 2_000);
    assert!(sizes.iter().all(|size| *size <= 500), "{sizes:?}");
}

#[test]
fn rejected_export_is_counted_and_the_next_is_sent() {
    let collector = HttpListener::start(|before, _| Reply::new(if before == 0 { 400 } else { 200 }, "{}"));
    let folder = tempfile::tempdir().expect("a folder");
    let log = open(folder.path(), &collector.url(), "");
    log.recorder().write(0, &denied("a", NOW_MS), []);
    wait_until("it to be refused", TIME_MAX, || delivered(&log).dropped == 1);
    log.recorder().write(0, &denied("b", NOW_MS), []);
    wait_until("the next to be taken", TIME_MAX, || delivered(&log).sent == 1);
    assert_eq!(collector.heard().len(), 2);
}

#[test]
fn a_collector_that_is_gone_costs_the_store_nothing() {
    let gone = format!("http://127.0.0.1:{}", tidegate_testkit::free_port());
    let folder = tempfile::tempdir().expect("a folder");
    let log = open(folder.path(), &gone, "");
    let (recorder, deliveries) = (std::sync::Arc::clone(log.recorder()), log.deliveries().expect("it sends"));
    for at in 0..1_000 {
        log.recorder().write(0, &denied("a", NOW_MS + at), []);
    }
    drop(log);
    assert_eq!(deliveries.until_now(), Delivery { sent: 0, dropped: 1_000 });
    assert_eq!(recorder.counts().written(tidegate_record::RecordKind::Denial), 1_000);
}
