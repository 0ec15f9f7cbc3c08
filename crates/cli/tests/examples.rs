//! The files of the folder `examples`, and the examples of the documentation.

#![allow(clippy::expect_used, clippy::panic, reason = "a helper of tests may panic as a test may")]
#![allow(unreachable_pub, reason = "what test programs share is public in each of them")]

mod support;

use std::process::Output;

use support::examples::{example, fill, in_repository};
use support::raw::{request, send};
use support::{serve, tidegate, write};
use tidegate_server::settings::{SETTINGS, Setting};
use tidegate_testkit::Server;

/// Pages with examples of rules files.
const PAGES: [&str; 3] = ["rules.md", "tutorial.md", "bounds.md"];

/// Runs the command in the root of the repository, as the examples expect.
fn run(arguments: &[&str]) -> Output {
    tidegate(arguments).current_dir(in_repository("")).output().expect("it starts")
}

fn assert_accepted(output: &Output, context: &str) {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{context}\n{out}{err}");
    assert!(!err.contains("warning"), "{context}\n{err}");
}

#[test]
fn the_rules_example_is_valid() {
    assert_accepted(&run(&["rules", "validate", "examples/rules.toml"]), "examples/rules.toml");
}

#[test]
fn a_server_starts_with_the_configuration_example() {
    let check = ["serve", "--check-config", "--config", "examples/tidegate.toml", "--data-dir", "none"];
    assert_accepted(&run(&check), "examples/tidegate.toml");

    let mut command = tidegate(&[]);
    command.current_dir(in_repository(""));
    let server = Server::start_as(command, &["--config", "examples/tidegate.toml"]);
    let body = r#"{"dimensions": {"ip": "192.0.2.1", "path": "/"}}"#;
    let reply = send(server.address("http"), &request("POST", "/v1/check", &[], Some(body)));
    assert_eq!(reply.status, 200, "{reply:?}");
    assert!(reply.body.contains("\"rule\":\"per_client\""), "{reply:?}");
    let body = r#"{"domain": "edge", "descriptors": [{"entries": [{"key": "user", "value": "alice"}]}]}"#;
    let reply = send(server.address("http"), &request("POST", "/json", &[], Some(body)));
    assert!(reply.body.contains("\"requestsPerUnit\":60"), "{reply:?}");
}

/// Returns the value of a setting in the configuration example, commented out or not.
fn value_in_example(text: &str, setting: &Setting) -> Option<String> {
    let lines = text.lines().map(|line| line.strip_prefix('#').unwrap_or(line));
    let mut values = lines.filter_map(|line| line.strip_prefix(setting.key)?.strip_prefix(" = "));
    let value = values.next()?.split("  #").next()?.trim();
    assert_eq!(values.next(), None, "{} occurs twice", setting.key);
    let is_punctuation = |c: char| ['"', '[', ']', ' '].contains(&c);
    Some(value.chars().filter(|c| !is_punctuation(*c)).collect())
}

#[test]
fn the_configuration_example_has_every_setting_with_its_default() {
    let text = example("tidegate.toml");
    for setting in SETTINGS {
        let value = value_in_example(&text, setting);
        let value = value.unwrap_or_else(|| panic!("examples/tidegate.toml lacks {}", setting.key));
        if !setting.default.is_empty() {
            assert_eq!(value, setting.default, "{}", setting.key);
        }
    }
}

#[test]
fn every_commented_setting_of_the_configuration_example_is_valid() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = format!("sqlite:{}", folder.path().join("rules.db").display());
    let text = fill(&example("tidegate.toml"), "examples/rules.toml", &store);
    let text = fill(&text, "#origin = \"none\"", "origin = \"redis://127.0.0.1:6379\"");
    let is_setting = |line: &str| line.starts_with(|c: char| c.is_ascii_lowercase() || c == '[');
    let lines =
        text.lines().map(|line| line.strip_prefix('#').filter(|rest| is_setting(rest)).unwrap_or(line));
    let config = write(folder.path(), "tidegate.toml", &lines.collect::<Vec<_>>().join("\n"));
    let data = folder.path().join("data").to_string_lossy().into_owned();
    let output = run(&["serve", "--check-config", "--config", &config, "--data-dir", &data]);
    let problems = String::from_utf8_lossy(&output.stderr).into_owned();
    // The certificates of the example do not exist. Every other setting is accepted.
    assert!(problems.contains("/etc/tidegate/server.pem"), "{problems}");
    for problem in problems.lines().filter(|line| line.starts_with("error: ")) {
        assert!(problem.contains("/etc/tidegate/") && problem.contains("(os error 2)"), "{problems}");
    }
}

#[test]
fn the_reference_has_every_setting() {
    let path = in_repository("docs/settings.md");
    let page = std::fs::read_to_string(path).expect("the page");
    for setting in SETTINGS {
        let row = page.lines().find(|line| line.starts_with(&format!("| `{}` |", setting.key)));
        let row = row.unwrap_or_else(|| panic!("docs/settings.md lacks {}", setting.key));
        assert!(row.contains(setting.default), "{row}: the default is {}", setting.default);
    }
}

/// Returns the rules files that a page shows: blocks of `toml`, and files that a shell writes.
fn rules_files(page: &str) -> Vec<String> {
    let path = in_repository("docs").join(page);
    let text = std::fs::read_to_string(&path).expect("the page");
    let blocks = text.split("```toml\n").skip(1).map(|rest| rest.split_once("```").expect("an end").0);
    let written = text.split("<<'END'\n").skip(1).map(|rest| rest.split_once("END\n").expect("an end").0);
    blocks.chain(written).map(str::to_owned).collect()
}

#[test]
fn every_rules_example_of_the_documentation_is_valid() {
    let folder = tempfile::tempdir().expect("a folder");
    for page in PAGES {
        let mut examples = rules_files(page);
        assert!(!examples.is_empty(), "{page} has no example");
        // A reader may also paste all examples of a page into one file.
        examples.push(examples.concat());
        for text in examples {
            let context = format!("{page}:\n{text}");
            let file = write(folder.path(), "rules.toml", &text);
            assert_accepted(&run(&["rules", "validate", &file]), &context);
            let check = ["serve", "--check-config", "--data-dir", "none", "--rules", &file];
            assert_accepted(&run(&check), &context);
        }
    }
}

#[test]
fn a_store_accepts_every_rules_example_of_the_documentation() {
    let folder = tempfile::tempdir().expect("a folder");
    for page in PAGES {
        let store = format!("sqlite:{}", folder.path().join(format!("{page}.db")).display());
        let server = serve(&["--rules", &store]);
        let address = format!("http://{}", server.address("admin"));
        let file = write(folder.path(), "rules.toml", &rules_files(page).concat());
        let output = run(&["rules", "apply", &file, "--yes", "--server", &address]);
        assert_eq!(output.status.code(), Some(0), "{page}: {}", String::from_utf8_lossy(&output.stderr));
    }
}
