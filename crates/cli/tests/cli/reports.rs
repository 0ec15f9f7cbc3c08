//! Reports of a server: its status, notices of automatic rollbacks, and colours.

use serde_json::json;
use tidegate_testkit::{HttpListener, Reply, START_TIME_MAX, free_port, wait_until};

use crate::support::terminal::run_at_terminal;
use crate::support::{serve, tidegate as command};
use crate::{RULES, folder_with, json, status, stderr, stdout, tidegate};

#[test]
fn a_healthy_server_has_status_0_and_a_degraded_one_1() {
    let (_folder, rules) = folder_with("rules.toml", RULES);
    let server = serve(&["--rules", &rules]);
    let address = server.address("admin").to_string();
    let healthy = tidegate(&["status", "--server", &address]);
    assert_eq!(status(&healthy), 0, "{healthy:?}");
    let text = stdout(&healthy);
    assert!(text.starts_with("healthy\n version    "), "{text}");
    for part in
        [&format!("admin {address}"), "none: the node counts alone", "1 rule, 0 overrides", " requests/s"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    let as_json = tidegate(&["status", "--server", &address, "--json"]);
    assert_eq!((status(&as_json), &json(&as_json)["degraded"]), (0, &json!([])));

    let origin = format!("redis://127.0.0.1:{}", free_port());
    let server = serve(&["--rules", &rules, "--origin", &origin]);
    let address = server.address("admin").to_string();
    wait_until("the origin to be down", START_TIME_MAX, || {
        status(&tidegate(&["status", "--server", &address])) == 1
    });
    let degraded = tidegate(&["status", "--server", &address]);
    let text = stdout(&degraded);
    assert!(text.starts_with(&format!("degraded: the origin {origin} is down since 20")), "{text}");
    assert!(
        text.contains(&format!("{origin}: down since 20")) && text.contains("last failure at 20"),
        "{text}"
    );
    let check = tidegate(&["check", "user=a", "--server", &address]);
    assert!(stdout(&check).starts_with("allow: the origin is unreachable; decided locally\n"), "{check:?}");
}

/// A server whose last change was rolled back automatically.
fn rolled_back() -> HttpListener {
    let rollback = json!({
        "change": 6, "rollback_change": 7, "revision": 8, "at": "2026-11-18T10:00:00.000Z", "at_ms": 1,
        "reason": "rule \"a\" newly denies 29 of 30 keys", "tenant": null,
    });
    let alarm = json!({
        "change": 5, "at": "2026-11-18T09:00:00.000Z", "at_ms": u64::MAX, "reason": "rule \"b\" newly denies 9",
    });
    HttpListener::start(move |_, request| {
        let answer = match request.path.split('?').next().unwrap_or_default() {
            "/v1/status" => json!({
                "rules": { "revision": 8, "last_automatic_rollback": rollback, "last_alarm": alarm },
            }),
            "/v1/rules" => {
                json!({
                    "revision": 8, "rows": [], "next": null, "last_automatic_rollback": rollback,
                    "last_alarm": alarm,
                })
            }
            "/v1/why" => json!({
                "key": "user:a", "at": "now", "window_ms": 1, "records": [],
                "notices": [
                    { "kind": "automatic_rollback", "message": "change 6 was rolled back" },
                    { "kind": "alarm", "message": "alarm at 2026" },
                ],
            }),
            _ => json!({
                "decision": "allow", "denied_by": null, "rules_version": "r8", "source": "local", "rules": [],
            }),
        };
        Reply::new(200, answer.to_string())
    })
}

#[test]
fn an_automatic_rollback_and_an_alarm_are_notices() {
    let server = rolled_back();
    let notice = "notice: change 6 was rolled back";
    for (arguments, code) in
        [(&["check", "user=a"][..], 0), (&["rules", "list"], 0), (&["why", "--key", "a"], 2)]
    {
        let output = tidegate(&[arguments, &["--server", &server.url()]].concat());
        assert_eq!(status(&output), code, "{output:?}");
        assert!(stderr(&output).starts_with(notice), "{output:?}");
        assert!(stderr(&output).contains("\nnotice: alarm at 2026"), "{output:?}");
        assert!(!stdout(&output).contains("notice"), "an answer has no notice: {output:?}");
        let as_json = tidegate(&[arguments, &["--server", &server.url(), "--json"]].concat());
        assert_eq!((status(&as_json), stderr(&as_json)), (code, ""), "{as_json:?}");
    }
    let output = tidegate(&["status", "--server", &server.url()]);
    let told = "change 6 was rolled back automatically at 2026-11-18T10:00:00.000Z by change 7: rule \"a\"";
    assert!(stdout(&output).contains(told), "{output:?}");
    let alarm = "alarm at 2026-11-18T09:00:00.000Z: rule \"b\" newly denies 9";
    assert!(stdout(&output).contains(alarm), "{output:?}");
}

#[test]
fn a_check_works_without_access_to_the_status() {
    let server = HttpListener::start(|_, request| {
        if request.path == "/v1/status" {
            return Reply::new(403, json!({ "detail": "a role" }).to_string());
        }
        let answer = json!({
            "decision": "allow", "denied_by": null, "rules_version": "r", "source": "local", "rules": [],
        });
        Reply::new(200, answer.to_string())
    });
    let output = tidegate(&["check", "user=a", "--server", &server.url()]);
    assert_eq!((status(&output), stderr(&output)), (0, ""), "{output:?}");
}

#[test]
fn colours_are_on_a_terminal_only_unless_a_flag_or_variable_says_otherwise() {
    let (_folder, rules) = folder_with("rules.toml", RULES);
    let colour = "\u{1b}[";
    let validate = |more: &[&str]| {
        let mut command = command(&[&["rules", "validate", &rules], more].concat());
        command.env("TERM", "xterm").env_remove("NO_COLOR").env_remove("CLICOLOR_FORCE");
        command
    };
    let piped = |more: &[&str]| validate(more).output().expect("it runs");
    assert!(!stdout(&piped(&[])).contains(colour));
    assert!(stdout(&piped(&["--color", "always"])).contains(colour));
    let at_terminal = |more: &[&str], no_color: bool| {
        let mut command = validate(more);
        if no_color {
            command.env("NO_COLOR", "1");
        }
        run_at_terminal(command, b"").printed
    };
    assert!(at_terminal(&[], false).contains(colour));
    assert!(!at_terminal(&[], true).contains(colour), "NO_COLOR");
    assert!(!at_terminal(&["--color=never"], false).contains(colour));
    let help = |color: &str| {
        let mut command = command(&["--color", color, "--help"]);
        command.env("TERM", "xterm").env_remove("NO_COLOR");
        run_at_terminal(command, b"").printed
    };
    assert!(help("auto").contains(colour) && !help("never").contains(colour), "help texts too");
}
