//! The start of a server: its configuration, its addresses, and the permissions of its files.

#![allow(clippy::expect_used, clippy::panic, reason = "a helper of tests may panic as a test may")]
#![allow(unreachable_pub, reason = "what test programs share is public in each of them")]

mod support;

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use support::raw::{request, send};
use support::{serve, tidegate, write};
use tidegate_testkit::{START_TIME_MAX, wait_until};

#[test]
fn problems_of_all_files_are_listed_with_their_lines() {
    let folder = tempfile::tempdir().expect("a folder");
    let rules = "[[rule]]\nname = 'typo'\n\n[[rules]]\nname = 'a'\nkey = []\nlimit = -1\nperiod = '1s'\n";
    let rules = write(folder.path(), "rules.toml", rules);
    let config = format!("workers = 0\nrules = '{rules}'\n\n[[tenants]]\nname = 'a'\nweight = 0\n");
    let config = write(folder.path(), "tidegate.toml", &config);
    let checked = tidegate(&["serve", "--check-config", "--config", &config, "--memory", "much"]).output();
    let checked = checked.expect("it ends by itself");
    assert_eq!(checked.status.code(), Some(64));
    let complaint = String::from_utf8_lossy(&checked.stderr).into_owned();
    let wanted = [
        "memory: \"much\" is not a size".to_owned(),
        format!("{config}: line 1: workers: "),
        format!("{config}: line 6: tenants[0]: weight: "),
        format!("rules: {rules}: line 1: [[rule]]: did you mean [[rules]]?"),
        format!("rules: {rules}: line 7: rules[0].limit: -1 is outside 0 to 4294967295"),
    ];
    let mut rest = complaint.as_str();
    for problem in &wanted {
        let at = rest.find(problem.as_str()).unwrap_or_else(|| panic!("{problem} in order in {complaint}"));
        rest = &rest[at + problem.len()..];
    }
}

#[test]
fn listener_takes_a_host_name() {
    let server = serve(&["--http-listen", "localhost:0"]);
    assert!(server.address("http").ip().is_loopback());
    let reply = send(server.address("http"), &request("GET", "/openapi.json", &[], None));
    assert_eq!(reply.status, 200);
}

/// All files and folders below a folder, with their permissions.
fn modes(folder: &Path) -> Vec<(PathBuf, bool, u32)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let metadata = std::fs::metadata(&path).expect("known");
        found.push((path.clone(), metadata.is_dir(), metadata.permissions().mode() & 0o777));
        if metadata.is_dir() {
            found.extend(modes(&path));
        }
    }
    found
}

#[test]
fn files_of_a_server_are_private() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = folder.path().join("made/data");
    let url = format!("sqlite:{}", folder.path().join("rules.db").display());
    let server = serve(&["--rules", &url, "--data-dir", &data.to_string_lossy()]);
    let has =
        |suffix: &str| modes(folder.path()).iter().any(|(path, ..)| path.to_string_lossy().ends_with(suffix));
    wait_until("a snapshot", START_TIME_MAX, || has(".snapshot"));
    assert!(["rules.db", "-wal", "decisions.db", "tidegate.db"].iter().all(|suffix| has(suffix)));
    for (path, is_folder, mode) in modes(folder.path()) {
        let wanted = if is_folder { 0o700 } else { 0o600 };
        assert_eq!(mode, wanted, "{}", path.display());
    }
    drop(server);
}
