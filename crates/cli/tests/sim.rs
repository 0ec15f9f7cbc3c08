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
fn a_sweep_says_what_came_of_it_and_the_same_seeds_give_the_same_history() {
    let sweep = || json(&["--seeds", "12", "--first", "5", "--hours", "0.1", "--json"]);
    let summary = sweep();
    assert_eq!(summary["seeds"], 12);
    assert_eq!(summary["requests"], 12 * 720);
    assert_eq!(summary["violations"], Value::Array(Vec::new()));
    assert!((summary["region_hours"].as_f64().expect("a number") - 1.2).abs() < 1e-6);
    assert_eq!(summary["trace_hash"], sweep()["trace_hash"]);
}

#[test]
fn one_world_is_told_in_words_traced_and_drawn() {
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
fn what_makes_no_sense_is_wrong_usage() {
    for arguments in
        [&["--hours", "0"][..], &["--hours", "25"], &["--trace"], &["--seed", "1", "--seeds", "2"]]
    {
        assert_eq!(sim(arguments).status.code(), Some(64), "{arguments:?}");
    }
}
