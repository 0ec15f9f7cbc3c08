//! Help texts, wrong usage, and commands with their output.

use std::process::Output;

use serde_json::Value;
use tidegate_testkit::free_port;

use crate::support::{serve, tidegate as command};
use crate::{RULES, folder_with, json, status, stderr, stdout, tidegate};

const COMMANDS: [&[&str]; 26] = [
    &["serve"],
    &["status"],
    &["check"],
    &["why"],
    &["heavy"],
    &["rules"],
    &["rules", "init"],
    &["rules", "validate"],
    &["rules", "apply"],
    &["rules", "rollback"],
    &["override", "set"],
    &["block"],
    &["unblock"],
    &["emergency", "limit"],
    &["credential", "new"],
    &["audit", "show"],
    &["log", "export"],
    &["bound"],
    &["plan"],
    &["token"],
    &["token", "new"],
    &["bench"],
    &["sim"],
    &["demo"],
    &["completions"],
    &["man"],
];

#[test]
fn every_command_has_help_and_is_in_the_help() {
    let all = tidegate(&["--help"]);
    assert_eq!(status(&all), 0);
    for words in COMMANDS {
        assert!(stdout(&all).contains(&format!("\n  {} ", words[0])), "{words:?}");
        let help = tidegate(&[words, &["--help"]].concat());
        assert_eq!(status(&help), 0, "{words:?}");
        assert!(stdout(&help).contains("Usage: tidegate "), "{words:?}");
    }
}

#[test]
fn wrong_usage_is_64_and_help_is_0() {
    let wrong: [&[&str]; 13] = [
        &["sevre"],
        &["serve", "--colour", "blue"],
        &["check", "--cost", "-1"],
        &["check", "alice"],
        &["check", "user=a", "user=b"],
        &["check", "--server", "ftp://127.0.0.1:8090"],
        &["check", "--ca", "/nowhere.pem"],
        &["bench", "--connections", "1001"],
        &["bench", "--duration", "2h"],
        &["bench", "--surface", "http", "--pipeline", "2"],
        &["bench", "--surface", "resp", "--server", "http://127.0.0.1:1"],
        &["token", "new", "--role", "king"],
        &["token", "new", "--name", ""],
    ];
    for words in wrong {
        let output = tidegate(words);
        assert_eq!(status(&output), 64, "{words:?}: {output:?}");
        assert!(stderr(&output).starts_with("error: "), "{words:?}: {output:?}");
        assert_eq!(stdout(&output), "", "{words:?}");
    }
    assert_eq!(status(&tidegate(&["--version"])), 0);
}

#[test]
fn a_bench_on_another_machine_has_to_be_asked_for() {
    // A documentation network without hosts.
    let output = tidegate(&["bench", "--server", "http://192.0.2.1:8080"]);
    assert_eq!(status(&output), 64);
    assert!(stderr(&output).contains("--allow-remote"), "{output:?}");
}

#[test]
fn check_prints_text_or_json_and_sets_its_exit_status() {
    let (_folder, rules) = folder_with("rules.toml", RULES);
    let server = serve(&["--rules", &rules]);
    let url = server.url("admin", "");
    let check = |more: &[&str]| tidegate(&[&["check", "user=alice", "--server", &url], more].concat());

    let allowed = check(&[]);
    assert_eq!(status(&allowed), 0, "{allowed:?}");
    let text = stdout(&allowed);
    assert!(text.starts_with("allow\n") && text.contains("per_user") && text.contains("remaining"), "{text}");

    let as_json = check(&["--json"]);
    assert_eq!((status(&as_json), &json(&as_json)["decision"]), (0, &Value::from("allow")));
    assert_eq!(json(&as_json)["rules"][0]["remaining"], 0);

    let denied = check(&["--json"]);
    assert_eq!((status(&denied), &json(&denied)["denied_by"]), (2, &Value::from("per_user")));
    let denied = check(&[]);
    assert_eq!(status(&denied), 2);
    assert!(
        stdout(&denied).starts_with("deny: the limit of rule \"per_user\" is reached; retry after "),
        "{denied:?}"
    );
    let never = check(&["--cost", "3"]);
    assert!(stdout(&never).contains("never"), "{never:?}");
    assert_eq!(status(&check(&["--cost", "0"])), 0, "a look costs nothing and is always allowed");

    let other = tidegate(&["check", "plan=free", "--server", &url]);
    let needs = "no rule applies: per_user needs \"user\"\n";
    assert_eq!((status(&other), stdout(&other).contains(needs)), (0, true), "{other:?}");
    let wrong = tidegate(&["check", "us er=x", "--server", &url]);
    assert_eq!(status(&wrong), 64, "{wrong:?}");
    assert!(stderr(&wrong).contains("the server answered 400: dimensions"), "{wrong:?}");
}

#[test]
fn command_without_a_server_reports_it() {
    let nowhere = format!("http://127.0.0.1:{}", free_port());
    for words in [&["check", "user=a"][..], &["bench"]] {
        let output = tidegate(&[words, &["--server", &nowhere]].concat());
        assert_eq!(status(&output), 69, "{output:?}");
        assert!(stderr(&output).contains("is the server running"), "{output:?}");
    }
}

#[test]
fn a_token_as_json_has_the_same_parts() {
    let made = json(&tidegate(&["token", "new", "--json"]));
    assert_eq!((&made["role"], &made["tenant"]), (&Value::from("client"), &Value::Null));
    assert!(made["hash"].as_str().is_some_and(|hash| hash.starts_with("sha256:") && hash.len() == 71));
    let another = json(&tidegate(&["token", "new", "--json"]));
    assert_ne!(made["token"], another["token"]);
}

#[test]
fn rules_are_validated_without_a_server() {
    let (_folder, file) = folder_with("rules.toml", RULES);
    let good = tidegate(&["rules", "validate", &file]);
    assert_eq!(status(&good), 0, "{good:?}");
    assert!(stdout(&good).contains("valid: 1 rule, version "), "{good:?}");
    let good = json(&tidegate(&["rules", "validate", &file, "--json"]));
    assert_eq!(
        (&good["valid"], &good["rules"], good["problems"].as_array().map(Vec::len)),
        (&true.into(), &1.into(), Some(0))
    );

    std::fs::write(&file, "[[rules]]\nname=''\nkey=['us er']\nlimit=1\nperiod='1s'\n").expect("written");
    let bad = tidegate(&["rules", "validate", &file]);
    assert_eq!((status(&bad), stdout(&bad)), (64, ""));
    for problem in ["rules[0].name: ", "rules[0].key: "] {
        let is_named = |line: &str| line.starts_with(&format!("error: {file}: ")) && line.contains(problem);
        assert!(stderr(&bad).lines().any(is_named), "{bad:?}");
    }
    let bad = tidegate(&["rules", "validate", &file, "--json"]);
    assert_eq!(status(&bad), 64);
    assert_eq!(
        (&json(&bad)["valid"], json(&bad)["problems"].as_array().map(Vec::len)),
        (&false.into(), Some(2))
    );
    for missing in ["/nowhere.toml", "/"] {
        assert_eq!(status(&tidegate(&["rules", "validate", missing])), 64);
    }
}

#[test]
fn bench_counts_decisions_of_the_server() {
    // On a machine that is too busy, checks of comfort pass uncounted; those of security are
    // errors.
    let (_folder, rules) = folder_with("rules.toml", &format!("{RULES}class = 'security'\n"));
    let server = serve(&["--rules", &rules]);
    let url = server.url("http", "");
    let bench = ["bench", "--surface", "check", "--server", &url, "--duration", "1s", "--json"];
    let output = tidegate(&[&bench[..], &["--connections", "3", "--keys", "10"]].concat());
    assert_eq!(status(&output), 0, "{output:?}");
    let report = json(&output);
    // Ten keys with two each, and an hour to get more.
    assert_eq!(report["allowed"], 20, "{report}");
    let first_error = report["first_error"].as_str();
    assert!(first_error.is_none_or(|words| words.contains("overloaded")), "{report}");
    let count = |name: &str| report[name].as_u64().expect("a number");
    assert!(count("denied") > 0 && count("decisions") == 20 + count("denied"), "{report}");
    let latency = |name: &str| report["latency_us"][name].as_f64().expect("a number");
    assert!(
        latency("p50") > 0.0 && latency("p50") <= latency("p99") && latency("p99") <= latency("max"),
        "{report}"
    );

    let paced = json(&tidegate(&[&bench[..], &["--rate", "50", "--connections", "5"]].concat()));
    let decisions = paced["decisions"].as_u64().expect("a number");
    assert!((1..=50).contains(&decisions), "no more than were asked for: {paced}");
}

#[test]
fn a_bench_without_a_single_decision_fails() {
    let server = serve(&[]);
    let admin = server.url("admin", "");
    let output = tidegate(&["bench", "--server", &admin, "--duration", "1s", "--connections", "1"]);
    assert_eq!(status(&output), 1, "{output:?}");
    assert!(stderr(&output).contains("no check got a decision: the server answered 404"), "{output:?}");
}

#[test]
fn completions_and_manual_pages_are_made() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = tidegate(&["completions", shell]);
        assert!(status(&output) == 0 && stdout(&output).contains("check-config"), "{shell}");
    }
    let page = tidegate(&["man"]);
    assert!(status(&page) == 0 && stdout(&page).contains(".TH tidegate"), "{page:?}");
    let folder = tempfile::tempdir().expect("a folder");
    let pages = folder.path().join("man1");
    assert_eq!(status(&tidegate(&["man", "--dir", pages.to_str().expect("text")])), 0);
    for page in ["tidegate.1", "tidegate-serve.1", "tidegate-rules-validate.1", "tidegate-token-new.1"] {
        assert!(pages.join(page).is_file(), "{page}");
    }
}

/// The same without a reader of standard output.
fn unread(arguments: &[&str]) -> Output {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    command(arguments).stdout(writer).output().expect("it runs")
}

#[test]
fn closed_output_pipe_does_not_change_a_command() {
    let (folder, rules) = folder_with("rules.toml", RULES);
    let store = format!("sqlite:{}", folder.path().join("rules.db").to_str().expect("text"));
    let server = serve(&["--rules", &store]);
    let admin = server.url("admin", "");
    let made = unread(&["rules", "apply", &rules, "--yes", "--server", &admin]);
    assert_eq!((status(&made), stderr(&made)), (0, ""), "apply");
    let denied = ["check", "user=a", "--cost", "3", "--server", &admin];
    let quiet: [(&[&str], i32); 11] = [
        (&denied, 2),
        (&["rules", "list", "--server", &admin], 0),
        (&["rules", "list", "--toml", "--server", &admin], 0),
        (&["rules", "history", "--server", &admin], 0),
        (&["audit", "show", "--server", &admin], 0),
        (&["rules", "validate", &rules], 0),
        (&["bound", "--rules", &rules], 0),
        (&["plan", "--requests-per-second", "20k", "--keys", "5M"], 0),
        (&["sim", "--seeds", "2"], 0),
        (&["token", "new", "--name", "ci"], 0),
        (&["man"], 0),
    ];
    for (arguments, expected) in quiet {
        let output = unread(arguments);
        assert_eq!((status(&output), stderr(&output)), (expected, ""), "{arguments:?}");
    }
    let listed = tidegate(&["rules", "list", "--server", &admin]);
    assert!(stdout(&listed).contains("per_user"), "what nobody read about was done: {listed:?}");
}

/// Linux has a device that is always full.
#[cfg(target_os = "linux")]
#[test]
fn an_answer_that_cannot_be_written_is_a_failure() {
    let full = std::fs::File::options().write(true).open("/dev/full").expect("a device");
    let output = command(&["token", "new", "--name", "ci"]).stdout(full).output().expect("it runs");
    assert_eq!(status(&output), 1);
    assert!(stderr(&output).starts_with("error: standard output: "), "{output:?}");
}

#[test]
fn an_example_rules_file_is_written_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = |arguments: &[&str]| command(arguments).current_dir(folder.path()).output().expect("it runs");
    let created = run(&["rules", "init"]);
    assert_eq!(status(&created), 0, "{created:?}");
    assert!(stdout(&created).starts_with("rules.toml created."), "{created:?}");
    let valid = run(&["rules", "validate", "rules.toml"]);
    assert_eq!((status(&valid), stderr(&valid)), (0, ""), "{valid:?}");
    let file = folder.path().join("rules.toml");
    let printed = run(&["rules", "init", "-"]);
    assert_eq!(stdout(&printed), std::fs::read_to_string(&file).expect("a file"));
    std::fs::write(&file, "rules = []").expect("written");
    let refused = run(&["rules", "init", "rules.toml"]);
    assert_eq!(status(&refused), 1, "{refused:?}");
    assert!(stderr(&refused).contains("rules.toml: the file exists, and was not changed"), "{refused:?}");
    assert_eq!(std::fs::read_to_string(&file).expect("a file"), "rules = []");
    let elsewhere = run(&["rules", "init", "nowhere/rules.toml"]);
    assert_eq!(status(&elsewhere), 1, "{elsewhere:?}");
}

#[test]
fn a_server_address_needs_no_scheme() {
    let server = serve(&[]);
    let (admin, http) = (server.address("admin").port(), server.address("http").port());
    for address in
        [format!("localhost:{admin}"), format!("http://localhost:{admin}/"), format!("127.0.0.1:{admin}")]
    {
        let output = tidegate(&["check", "user=a", "--server", &address]);
        assert_eq!(status(&output), 0, "{address}: {output:?}");
    }
    let bench = ["bench", "--server", &format!("localhost:{http}"), "--duration", "1s", "--connections", "1"];
    let output = tidegate(&bench);
    assert_eq!(status(&output), 0, "{output:?}");
}
