//! Runs benchmarks on the program of this checkout, and parses their output.

#![allow(unreachable_pub, reason = "a module of test programs")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// The program of this checkout, in the profile that tests are built in.
fn tidegate() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("below the target folder");
    // A build of one package has other features than that of the whole gate, and takes a minute.
    if std::env::var_os("TIDEGATE_IS_BUILT").is_none() {
        build(target);
    }
    target.join("debug/tidegate")
}

fn build(target: &Path) {
    let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    build.args(["build", "--quiet", "--package", "tidegate-cli", "--target-dir"]).arg(target);
    let status = build.current_dir(env!("CARGO_MANIFEST_DIR")).status().expect("cargo runs");
    assert!(status.success(), "tidegate is not built");
}

/// Runs a benchmark, and returns its output, also parsed as JSON.
pub fn run(benchmark: &str, arguments: &[&str]) -> (Output, Value) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate-bench"));
    command.args([benchmark, "--json", "--tidegate"]).arg(tidegate()).args(arguments);
    let output = command.output().expect("it runs");
    let published = serde_json::from_slice(&output.stdout);
    let published = published.unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
    (output, published)
}

/// Whether a bar is held, if there is such a bar.
pub fn is_held(published: &Value, name: &str) -> Option<bool> {
    let bars = published["bars"].as_array().expect("bars");
    bars.iter().find(|bar| bar["name"] == name).map(|bar| bar["held"] == true)
}
