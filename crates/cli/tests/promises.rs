//! Bounds of rules and resources for a load, as the real binary and a real server print them.

#![allow(
    clippy::expect_used,
    clippy::panic,
    unreachable_pub,
    reason = "what tests share is part of the tests"
)]

mod support;

use std::process::Output;

use serde_json::Value;
use support::raw::{request, send};
use support::{serve, tidegate, write};
use tidegate_testkit::Server;

const RULES: &str = r#"
[[rules]]
name = "everywhere"
regime = "best_effort"
key = ["user"]
limit = 60
burst = 160
period = "1m"

[[rules]]
name = "logins"
regime = "strict"
key = ["user"]
limit = 5
period = "1m"
"#;

/// Rules that are accepted, and had better be others.
const DOUBTFUL: &str = r#"
[[rules]]
name = "window"
regime = "best_effort"
algorithm = "sliding_window"
key = []
limit = 10
period = "1h"

[[rules]]
name = "hasty"
regime = "best_effort"
key = []
limit = 10
period = "1s"
"#;

fn run(arguments: &[&str]) -> Output {
    tidegate(arguments).output().expect("it runs")
}

/// Returns the output of a command that must succeed.
fn good(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).expect("text")
}

fn json(arguments: &[&str]) -> Value {
    let said = good(&[arguments, &["--json"]].concat());
    serde_json::from_str(&said).unwrap_or_else(|_| panic!("{said}"))
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

fn of<'a>(answer: &'a Value, rule: &str) -> &'a Value {
    let bounds = answer["bounds"].as_array().expect("bounds");
    bounds.iter().find(|bound| bound["rule"] == rule).unwrap_or_else(|| panic!("no {rule}: {answer}"))
}

#[test]
fn a_file_is_bounded_term_by_term() {
    let folder = folder();
    let file = write(folder.path(), "rules.toml", RULES);
    let fleet = ["bound", "--rules", &file, "--regions", "3", "--nodes", "4", "--grant-life", "800"];
    let answer = json(&[&fleet[..], &["--lapses", "5"]].concat());
    let everywhere = of(&answer, "everywhere");
    let terms = everywhere["terms"].as_array().expect("terms");
    let units: u64 = terms.iter().map(|term| term["units"].as_u64().expect("units")).sum();
    assert_eq!((everywhere["total"].as_u64(), everywhere["steady"].as_u64()), (Some(units), Some(344)));
    assert_eq!((units, &everywhere["lag_ms"], &everywhere["buckets"]), (1_386, &2_500.into(), &1.into()));
    let logins = of(&answer, "logins");
    assert_eq!((&logins["total"], &logins["class"]), (&0.into(), &"security".into()));

    let said = good(&fleet);
    assert!(said.contains("everywhere: 60 per 1m, burst 160; comfort, best_effort; D = 2500ms\n"), "{said}");
    assert!(said.contains("(R-1) * r * (S-K)"), "{said}");
    assert!(said.contains("R = 3 regions, N = 4 nodes in each"), "{said}");
    let weighed = json(&["bound", "--rules", &file, "--weights", "8,1,1"]);
    assert_eq!(weighed["of"]["regions"], 3, "{weighed}");
    let alone = json(&["bound", "--rules", &file, "--no-origin", "--nodes", "4", "--failovers", "2"]);
    let logins = of(&alone, "logins");
    assert_eq!((&logins["total"], &logins["buckets"]), (&10.into(), &4.into()), "each forgets by itself");
}

#[test]
fn server_and_rule_file_give_the_same_bounds() {
    let folder = folder();
    let file = write(folder.path(), "rules.toml", RULES);
    let server = serve(&["--rules", &file, "--origin", "memory", "--data-dir", "none"]);
    let url = server.url("admin", "");
    let fleet = ["--regions", "3", "--lag", "900", "--partitions", "2"];
    let told = json(&[&["bound", "--server", &url][..], &fleet].concat());
    assert_eq!(told, json(&[&["bound", "--rules", &file][..], &fleet].concat()));

    // The server's own situation: one region with an origin.
    let own = json(&["bound", "--server", &url]);
    assert_eq!(own, json(&["bound", "--rules", &file]));
    let answer = check(&server);
    for rule in answer["rules"].as_array().expect("rules") {
        let bound = of(&own, rule["rule"].as_str().expect("a name"));
        assert_eq!((&rule["bound"], &rule["regime"]), (&bound["total"], &bound["regime"]), "{answer}");
    }
    assert!(answer["rules"][0]["bound"].as_u64() > Some(0), "{answer}");

    // A region has up to 15 peers.
    let (status, problem) = ask(&server, "/v1/bounds?regions=17");
    assert_eq!((status, &problem["detail"]), (400, &"regions: \"17\" is not a number from 1 to 16".into()));
    for command in [&["bound", "--rules", &file][..], &["plan", "--requests-per-second", "1", "--keys", "1"]]
    {
        let refused = run(&[command, &["--regions", "17"]].concat());
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains("1..=16"), "{said}");
    }
    let (_, page) = ask(&server, "/v1/bounds?limit=1&from=1");
    assert_eq!((&page["bounds"][0]["rule"], &page["next"]), (&"logins".into(), &Value::Null));
    let (_, page) = ask(&server, "/v1/bounds?limit=1");
    assert_eq!((&page["bounds"][0]["rule"], &page["next"]), (&"everywhere".into(), &1.into()));
}

#[test]
fn server_bounds_use_the_configured_node_count() {
    let folder = folder();
    let file = write(folder.path(), "rules.toml", RULES);
    let server = serve(&["--rules", &file, "--origin", "memory", "--data-dir", "none", "--nodes", "400"]);
    let own = json(&["bound", "--server", &server.url("admin", "")]);
    assert_eq!((&own["of"]["nodes"], &own["of"]["lag_ms"]), (&400.into(), &500.into()));
    let everywhere = of(&own, "everywhere");
    let terms = everywhere["terms"].as_array().expect("terms");
    let alone = terms.iter().find(|term| term["when"] == "outage").expect("of an outage");
    assert_eq!(alone["units"], 400, "each has a burst of at least one");
    assert_eq!(check(&server)["rules"][0]["bound"], everywhere["total"]);
}

fn ask(server: &Server, target: &str) -> (u16, Value) {
    let reply = send(server.address("admin"), &request("GET", target, &[], None));
    (reply.status, serde_json::from_str(&reply.body).unwrap_or_else(|_| panic!("{}", reply.body)))
}

fn check(server: &Server) -> Value {
    let body = r#"{"dimensions":{"user":"ann"}}"#;
    let reply = send(server.address("http"), &request("POST", "/v1/check", &[], Some(body)));
    serde_json::from_str(&reply.body).unwrap_or_else(|_| panic!("{}", reply.body))
}

#[test]
fn a_server_without_an_origin_owns_that_it_forgets() {
    let folder = folder();
    let file = write(folder.path(), "rules.toml", RULES);
    let server = serve(&["--rules", &file, "--data-dir", "none"]);
    let told = json(&["bound", "--server", &server.url("admin", "")]);
    assert_eq!(told, json(&["bound", "--rules", &file, "--no-origin"]));
    assert_eq!(of(&told, "logins")["total"], 5, "a burst for a restart");
}

#[test]
fn rules_of_a_store_show_their_regime_and_bound() {
    let folder = folder();
    let store = format!("sqlite:{}", folder.path().join("rules.db").display());
    let server = serve(&["--rules", &store, "--origin", "memory", "--data-dir", "none"]);
    let url = server.url("admin", "");
    let file = write(folder.path(), "rules.toml", RULES);
    let plan = good(&["rules", "plan", &file, "--server", &url]);
    assert!(plan.contains("  + regime = \"best_effort\"\n") && !plan.contains("warning"), "{plan}");
    good(&["rules", "apply", &file, "--yes", "--server", &url]);

    let bounds = json(&["bound", "--server", &url]);
    let expected = json(&["bound", "--rules", &file]);
    assert_eq!(of(&bounds, "everywhere"), of(&expected, "everywhere"));
    let list = json(&["rules", "list", "--server", &url]);
    let rows = list["rows"].as_array().expect("rows");
    let row = rows.iter().find(|row| row["name"] == "everywhere").expect("the rule");
    assert_eq!((&row["body"]["regime"], &row["bound"]), (&"best_effort".into(), of(&expected, "everywhere")));
    let said = good(&["rules", "get", "rule/everywhere", "--server", &url]);
    assert!(said.contains("regime = \"best_effort\"\n"), "{said}");
    assert!(
        said.contains(&format!("over-admits at most {} units", of(&expected, "everywhere")["total"])),
        "{said}"
    );

    let plan = good(&["rules", "plan", &write(folder.path(), "doubtful.toml", DOUBTFUL), "--server", &url]);
    assert!(plan.contains("warning: rules[\"window\"].regime: a best_effort sliding window"), "{plan}");
    let regional = RULES.replace("\"strict\"", "\"regional\"");
    let plan = good(&["rules", "plan", &write(folder.path(), "next.toml", &regional), "--server", &url]);
    assert!(plan.contains("  - regime = \"strict\"\n  + regime = \"regional\"\n"), "{plan}");
}

#[test]
fn a_file_is_validated_with_warnings() {
    let folder = folder();
    let file = write(folder.path(), "rules.toml", DOUBTFUL);
    let output = run(&["rules", "validate", &file]);
    let warned = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(warned.contains("use gcra, which over-admits once"), "{warned}");
    assert!(warned.contains("rules[\"hasty\"].regime: in effect regional"), "{warned}");
    let warnings = json(&["rules", "validate", &file])["warnings"].clone();
    assert_eq!(warnings.as_array().map(Vec::len), Some(2), "{warnings}");
    let wrong =
        write(folder.path(), "wrong.toml", &RULES.replace("strict\"", "strict\"\nclass = \"comfort\""));
    let output = run(&["rules", "validate", &wrong]);
    let problems = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(64), "{output:?}");
    assert!(problems.contains("rules[1].regime: \"strict\" requires class \"security\""), "{problems}");
}

#[test]
fn a_server_warns_of_its_rules_when_it_starts() {
    let folder = folder();
    let small = RULES.replace("burst = 160", "burst = 2");
    let file = write(folder.path(), "rules.toml", &small);
    let said = folder.path().join("said");
    let mut command = tidegate(&[]);
    command.stderr(std::fs::File::create(&said).expect("a file"));
    let nobody = ["--peer", "us=127.0.0.1:1", "--peer", "ap=127.0.0.1:1", "--peer-listen", "127.0.0.1:0"];
    let server = ["--rules", &file, "--origin", "memory", "--region", "eu"];
    let _server = Server::start_as(command, &[&server[..], &nobody].concat());
    let said = std::fs::read_to_string(said).expect("text");
    // With a burst of two, one of three isolated regions has a regional share of nothing.
    let warning =
        "rules[\"everywhere\"].regime: the regional share of some regions is 0: they deny every request";
    assert!(said.contains(warning), "{said}");
}

#[test]
fn questions_that_make_no_sense_are_wrong_usage() {
    let folder = folder();
    let file = write(folder.path(), "rules.toml", RULES);
    let load = ["plan", "--requests-per-second", "5M"];
    let wrong: [&[&str]; 9] = [
        &["bound", "--rules", "/nowhere.toml"],
        &["bound", "--rules", &file, "--regions", "0"],
        &["bound", "--rules", &file, "--weights", "1,0"],
        &["bound", "--rules", &file, "--weights", "1,1", "--regions", "2"],
        &["bound", "--rules", &file, "--server", "http://127.0.0.1:1"],
        &["bound", "--no-origin"],
        &load,
        &[&load[..], &["--keys", "many"]].concat(),
        &[&load[..], &["--keys", "1", "--local", "101"]].concat(),
    ];
    for arguments in wrong {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(64), "{arguments:?}: {output:?}");
        assert!(output.stdout.is_empty(), "{arguments:?}: {output:?}");
    }
}

#[test]
fn capacity_plan_follows_from_its_constants() {
    let load = ["plan", "--requests-per-second", "5M", "--regions", "3", "--keys", "100M", "--limits", "4"];
    let answer = json(&load);
    let constant = |name: &str| {
        let all = answer["constants"].as_array().expect("constants");
        all.iter().find(|one| one["name"] == name).and_then(|one| one["value"].as_u64()).expect("its value")
    };
    let needs = |name: &str| answer["each_region"][name].as_u64().unwrap_or_else(|| panic!("{name}"));
    assert_eq!(needs("requests_per_s"), 1_666_667);
    assert_eq!(needs("table_bytes_per_node"), 100_000_000 * constant("a key in the meter table"));
    assert!(constant("a call to Redis") > 0 && constant("a meter in Redis") > 0);
    // Work of the nodes' calls and of the replicator.
    let busy_us = needs("origin_calls_per_s") * constant("a call to Redis")
        + needs("origin_looks_per_s") * constant("a read of a partition")
        + needs("components_per_s") * constant("a component gathered, at Redis")
        + needs("merged_per_s") * constant("a component merged, at Redis");
    assert_eq!(needs("redis_shards"), (2 * busy_us).div_ceil(1_000_000), "half busy");
    let over_http = json(&[&load[..], &["--surface", "http"]].concat());
    assert!(over_http["each_region"]["cores"].as_u64() > Some(10 * needs("cores")), "{over_http}");
}

/// Returns the first fenced block of a text after `from`.
fn block<'t>(text: &'t str, from: &str, language: &str) -> &'t str {
    let (_, rest) = text.split_once(from).unwrap_or_else(|| panic!("no {from:?}"));
    let (_, rest) = rest.split_once(&format!("```{language}\n")).expect("a block");
    rest.split_once("```").expect("its end").0
}

fn without_ends(text: &str) -> Vec<&str> {
    text.trim_end().lines().map(str::trim_end).collect()
}

#[test]
fn documented_examples_match_command_output() {
    let (docs, folder) = (include_str!("../../../docs/bounds.md"), folder());
    let rules = write(folder.path(), "rules.toml", block(docs, "## An example", "toml"));
    let (command, expected) = block(docs, "## An example", "console").split_once('\n').expect("a command");
    let mut words: Vec<&str> = command.strip_prefix("$ tidegate ").expect("a command").split(' ').collect();
    for word in words.iter_mut().filter(|word| **word == "rules.toml") {
        *word = &rules;
    }
    assert_eq!(without_ends(&good(&words)), without_ends(expected), "{command}");
}
