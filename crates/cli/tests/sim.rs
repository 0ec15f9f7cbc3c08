//! `tidegate sim` as a script meets it.

#![allow(clippy::expect_used, reason = "helpers of tests may panic as tests may")]

use std::process::{Command, Output};

use serde_json::Value;

fn sim(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tidegate")).arg("sim").args(arguments).output().expect("it starts")
}

fn json(arguments: &[&str]) -> Value {
    let output = sim(arguments);
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).expect("one JSON value")
}

#[test]
fn sweep_prints_a_summary_and_is_deterministic() {
    let sweep = || json(&["--seeds", "12", "--first", "5", "--hours", "0.1", "--json"]);
    let summary = sweep();
    assert_eq!(summary["seeds"], 12);
    assert_eq!(summary["requests"], 12 * 720);
    assert_eq!(summary["violations"], Value::Array(Vec::new()));
    assert!((summary["region_hours"].as_f64().expect("a number") - 1.2).abs() < 1e-6);
    assert_eq!(summary["trace_hash"], sweep()["trace_hash"]);
}

#[test]
fn worlds_of_several_regions_say_how_much_of_the_bound_they_reached() {
    let arguments = ["--regions", "--seeds", "6", "--hours", "0.05", "--requests", "10000", "--json"];
    let summary = json(&arguments);
    assert_eq!((&summary["seeds"], &summary["violations"]), (&Value::from(6), &Value::Array(Vec::new())));
    assert!(summary["region_hours"].as_f64().expect("a number") >= 0.6, "two regions or more in each");
    let reached = summary["reached"].as_array().expect("kinds of worlds");
    assert_eq!(reached.iter().filter_map(|of| of["worlds"].as_u64()).sum::<u64>(), 6);
    let share = |of: &Value| of["share"].as_f64().expect("a number");
    assert!(
        reached.iter().any(|of| share(of) > 0.0) && reached.iter().all(|of| share(of) <= 1.0),
        "{reached:?}"
    );
    assert_eq!(summary["trace_hash"], json(&arguments)["trace_hash"]);
    let output = sim(&["--regions", "--seed", "3", "--hours", "0.02", "--trace"]);
    let words = String::from_utf8(output.stdout).expect("text");
    assert!(words.contains("replicator") && words.contains("seed 3: "), "{words}");
}

#[test]
fn single_world_is_described_traced_and_plotted() {
    let directory = tempfile::tempdir().expect("a directory");
    let picture = directory.path().join("world.svg");
    let path = picture.to_str().expect("plain");
    let output = sim(&["--seed", "3", "--hours", "0.01", "--trace", "--plot", path]);
    assert!(output.status.success(), "{output:?}");
    let words = String::from_utf8(output.stdout).expect("text");
    assert!(words.contains("request of") && words.contains("seed 3: "), "{words}");
    let drawn = std::fs::read_to_string(&picture).expect("drawn");
    assert!(drawn.starts_with("<svg") && drawn.trim_end().ends_with("</svg>"));
    assert!(drawn.contains("limit "));
}

#[test]
fn the_model_and_its_cases_are_compared() {
    let rows = json(&["--model", "--json"]);
    let rows = rows.as_array().expect("rows");
    assert!(rows.len() > 10 && rows.iter().all(|row| row["violations"] == 0));
}

#[test]
fn invalid_arguments_are_a_usage_error() {
    for arguments in [
        &["--hours", "0"][..],
        &["--hours", "25"],
        &["--trace"],
        &["--seed", "1", "--seeds", "2"],
        &["--regions", "--model"],
    ] {
        assert_eq!(sim(arguments).status.code(), Some(64), "{arguments:?}");
    }
}
