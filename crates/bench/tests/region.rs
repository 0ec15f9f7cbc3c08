//! `tidegate-bench region --quick` on real servers: the conditions that do not depend on the
//! machine's load hold, and the exit status agrees with the printed bars.

#![allow(clippy::expect_used, clippy::panic, reason = "a helper of tests may panic as a test may")]

mod common;

use std::process::Output;

use serde_json::Value;

use common::is_held;

const SECURITY_OVER: &str = "security: largest over-admission of a limit";
const STALLED_PASSED: &str = "stalled store: allowed security decisions without the store";

fn run(arguments: &[&str]) -> (Output, Value) {
    common::run("region", arguments)
}

/// Asserts the conditions of a stalled origin that do not depend on the machine's speed.
fn assert_stalled(stall: &Value) {
    let counts = ["security_without", "requests_after"];
    assert!(counts.iter().all(|count| stall[count].as_u64() > Some(0)), "{stall}");
    assert!(
        ["odd_before", "odd_after"]
            .iter()
            .all(|odd| stall[odd].as_array().is_some_and(|odd| !odd.is_empty())),
        "{stall}"
    );
    assert_eq!(stall["security_passed"], 0, "{stall}");
}

/// Exact counting depends on no speed: a sequence with a late origin is left out.
fn assert_exact(exact: &Value) {
    let rows = exact["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 8, "two fleets and four surfaces");
    for row in rows {
        let sequences = ["sequences", "not_judged"].map(|count| row[count].as_u64().expect("a count"));
        let per_row = if row["servers"] == 1 { 6 } else { 12 };
        assert_eq!(sequences.iter().sum::<u64>(), per_row, "{row}");
        assert!(sequences[0] > 0, "{row}");
        assert_eq!(row["most_above"], 0, "{row}");
    }
    let half_load = exact["half_load"].as_array().expect("rows");
    assert_eq!(half_load.len(), 4, "two rules, even and skewed");
    assert!(half_load.iter().all(|row| row["requests"].as_u64() > Some(10)), "{half_load:?}");
}

#[test]
fn a_region_of_real_servers_never_passes_a_security_limit_and_leaves_nothing_in_its_store() {
    let (output, published) = run(&["--quick", "--seconds", "1", "--rate", "300"]);
    let rows = published["cases"].as_array().expect("rows");
    assert_eq!(rows.len(), 8);
    for row in rows {
        assert!(row["requests"].as_u64() > Some(100), "{row}");
        assert!(row["class"] != "security" || row["over_units"] == 0.0, "{row}");
    }
    assert!(rows.iter().any(|row| row["admitted"].as_u64() > Some(0)), "{rows:?}");
    assert!(published["warm"]["requests"].as_u64() > Some(1_000), "{}", published["warm"]);
    assert_stalled(&published["stall"]);
    for asked in ["once", "again"] {
        assert_eq!(published["hedge"][asked]["requests"], 500, "{}", published["hedge"]);
    }
    assert_exact(&published["exact"]);
    assert_eq!(is_held(&published, SECURITY_OVER), Some(true), "{}", published["bars"]);
    assert_eq!(is_held(&published, STALLED_PASSED), Some(true), "{}", published["bars"]);
    assert_eq!(is_held(&published, "keys in Redis without an expiry"), Some(true), "{}", published["bars"]);
    // Shares, waits and times depend on the machine, so the test does not judge them.
    let all_held = published["bars"].as_array().expect("bars").iter().all(|bar| bar["held"] == true);
    assert_eq!(output.status.code(), Some(i32::from(!all_held)), "{}", published["bars"]);
}

#[test]
fn one_part_is_run_alone() {
    let (_, published) = run(&["--quick", "--only", "hedge"]);
    assert!(published["hedge"].is_object(), "{published}");
    assert!(["stall", "warm", "exact"].iter().all(|part| published[part].is_null()), "{published}");
    assert_eq!(published["cases"].as_array().map(Vec::len), Some(0), "{published}");
    assert_eq!(
        published["bars"].as_array().map(Vec::len),
        Some(1),
        "a part that was not run has no bar: {published}"
    );
}

#[test]
fn servers_that_share_nothing_are_noticed() {
    let (output, published) =
        run(&["--quick", "--seconds", "1", "--rate", "300", "--only", "cases", "--apart"]);
    let over = |row: &Value| row["over_units"].as_f64() > Some(1.0);
    assert!(published["cases"].as_array().expect("rows").iter().all(over), "{}", published["cases"]);
    assert_eq!(is_held(&published, SECURITY_OVER), Some(false), "{}", published["bars"]);
    assert_eq!(output.status.code(), Some(1));
}
