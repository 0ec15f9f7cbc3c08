//! The command line as people and scripts use it: the real binary, its output and exit statuses.

#![allow(
    clippy::expect_used,
    clippy::panic,
    unreachable_pub,
    reason = "what tests share is part of the tests"
)]

#[path = "../support/mod.rs"]
mod support;

mod configuration;
mod process;
mod reports;
mod tls;
mod usage;

use std::process::{Command, Output};

use serde_json::Value;
use support::tidegate as command;
use tidegate_testkit::{Process, START_TIME_MAX, wait_until};

pub(crate) const RULES: &str = r#"
[[rules]]
name = "per_user"
key = ["user"]
limit = 2
period = "1h"
"#;

pub(crate) fn tidegate(arguments: &[&str]) -> Output {
    command(arguments).output().expect("it runs")
}

pub(crate) fn status(output: &Output) -> i32 {
    output.status.code().expect("it ended by itself")
}

pub(crate) fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).expect("text")
}

pub(crate) fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).expect("text")
}

pub(crate) fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// A folder with a file in it.
pub(crate) fn folder_with(name: &str, text: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join(name);
    std::fs::write(&path, text).expect("written");
    let path = path.to_str().expect("text").to_owned();
    (folder, path)
}

/// Starts a server that writes its log to a file; gives the URL of its admin listener.
pub(crate) fn start_with_log(mut serve: Command) -> (Process, String, tempfile::NamedTempFile) {
    let log = tempfile::NamedTempFile::new().expect("a file");
    let out = tempfile::NamedTempFile::new().expect("a file");
    serve.stderr(log.reopen().expect("a file")).stdout(out.reopen().expect("a file"));
    let process = Process::spawn(&mut serve);
    let mut line = String::new();
    wait_until("the ready line", START_TIME_MAX, || {
        line = std::fs::read_to_string(out.path()).expect("text");
        line.ends_with('\n')
    });
    let address =
        line.split_whitespace().find_map(|word| word.strip_prefix("admin=")).expect("an admin listener");
    (process, format!("http://{}", address.replace("0.0.0.0", "127.0.0.1")), log)
}
