//! Consent that does not depend on the size of a step: series of changes, idle servers, blocks of
//! addresses, security rules, and the revision that an author looked at.

use serde_json::json;

use crate::desk::Desk;
use crate::support::write;

#[test]
fn small_confirmed_steps_wait_for_the_approval_of_the_whole_way() {
    let desk = Desk::new();
    desk.good("ann", &["rules", "apply", &desk.slower_rule(1_000), "--yes"]);
    desk.good("ann", &["rules", "apply", &desk.slower_rule(570), "--yes"]);
    let (status, printed) = desk.run("ann", &["rules", "apply", &desk.slower_rule(325), "--yes"]);
    assert_eq!(status, 3, "{printed}");
    let words = "effect: lowers rule \"per_user\" from 1,000 to 325 since ";
    assert!(printed.contains(words) && printed.contains(" UTC, by 67.5 %; "), "{printed}");
    assert!(printed.contains("\nneeds: approver\n"), "{printed}");
    desk.good("cy", &["rules", "approve", "3"]);
    desk.good("ann", &["rules", "apply", "--change", "3"]);
    desk.good("ann", &["rules", "apply", &desk.slower_rule(300), "--yes"]);
}

#[test]
fn requests_of_a_moment_measure_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let rules = format!("sqlite:{}", folder.path().join("rules.db").display());
    let desk = Desk::logging(&rules, folder, &["--log-sample", "1", "--log-evidence", "5m"]);
    desk.good("ann", &["rules", "apply", &desk.rule(100), "--yes"]);
    desk.traffic(100, 100);
    let plan = desk.good("ann", &["rules", "plan", &desk.rule(99)]);
    assert!(plan.contains("less than 300 s") && plan.contains("needs: approver\n"), "{plan}");
}

#[test]
fn wide_block_needs_a_token_that_may_approve() {
    let desk = Desk::new();
    desk.good("ann", &["rules", "apply", &desk.rule(100), "--yes"]);
    let declare = |who: &str, range: &str, confirmed: bool| {
        let body = json!({ "action": "block", "when": { "ip": range }, "confirmed": confirmed });
        let (status, answer) = desk.ask(who, "POST", "/v1/emergencies", Some(&body.to_string()));
        (status, answer["detail"].as_str().unwrap_or_default().to_owned())
    };
    for half in ["0.0.0.0/1", "128.0.0.0/1"] {
        let (status, detail) = declare("ann", half, true);
        let words = "the blocks of its author cover 2,147,483,648 IPv4 addresses, more than the 16,777,216 of \
                     a /8: this needs the role \"approver\" or a higher one";
        assert!(status == 403 && detail.starts_with(words), "{status}: {detail}");
    }
    let (status, detail) = declare("cy", "0.0.0.0/1", false);
    assert!(
        status == 409 && detail.starts_with("confirmed: the blocks of its author cover "),
        "{status}: {detail}"
    );
    assert_eq!(declare("cy", "0.0.0.0/1", true).0, 200);
    let (_, all) = desk.ask("cy", "GET", "/v1/emergencies", None);
    let target = format!("/v1/emergencies/{}/renew", all["emergencies"][0]["id"].as_str().expect("an id"));
    assert_eq!(["ann", "cy"].map(|who| desk.ask(who, "POST", &target, Some("{}")).0), [403, 200]);
    let (status, detail) = declare("ann", "10.0.0.0/12", false);
    assert!(status == 409 && detail.contains("more than the 65,536 of a /16"), "{status}: {detail}");
    assert_eq!(declare("ann", "10.0.0.0/12", true).0, 200);
    assert_eq!(declare("ann", "192.0.2.0/24", false).0, 200);
}

#[test]
fn deleted_security_rule_waits_for_an_approval() {
    let desk = Desk::new();
    let rules = "[[rules]]\nname='login'\nkey=['user']\nlimit=5\nperiod='1m'\nclass='security'\n";
    desk.good("ann", &["rules", "apply", &write(desk.folder(), "login.toml", rules), "--yes"]);
    let delete = ["rules", "apply", "--delete", "rule/login", "--yes"];
    for arguments in [&delete[..], &["rules", "shadow", "login", "--yes"]] {
        let (status, printed) = desk.run("ann", arguments);
        assert_eq!(status, 3, "{arguments:?}: {printed}");
    }
    let plan = desk.good("ann", &["rules", "plan", "--delete", "rule/login"]);
    assert!(plan.contains("deletes security rule \"login\"") && plan.contains("needs: approver\n"), "{plan}");
    assert_eq!(desk.check("bob")["rules"][0]["rule"], "login");
}

#[test]
fn change_without_the_revision_that_its_author_saw_is_refused() {
    let desk = Desk::new();
    desk.good("ann", &["rules", "apply", &desk.rule(5), "--yes"]);
    let operation = r#"{"do":"delete","kind":"rule","name":"per_user"}"#;
    let apply = format!(r#"{{"operations":[{operation}],"confirmed":true}}"#);
    for (route, body) in [
        ("/v1/rules/apply", apply.as_str()),
        ("/v1/rules/rollback", r#"{"change":1,"confirmed":true}"#),
        ("/v1/rules/per_user/shadow", r#"{"confirmed":true}"#),
    ] {
        let (status, problem) = desk.ask("ann", "POST", route, Some(body));
        let detail = "base_revision: missing; plan the change with `POST /v1/rules/plan` and send its \
                      `base_revision` (the latest is 1)";
        assert_eq!((status, &problem["detail"]), (400, &detail.into()), "{route}");
    }
    desk.good("ann", &["rules", "apply", &desk.rule(6), "--yes"]);
    let old = r#"{"base_revision":1,"confirmed":true}"#;
    let (status, problem) = desk.ask("ann", "POST", "/v1/rules/per_user/shadow", Some(old));
    let detail = problem["detail"].as_str().expect("words");
    assert!(
        status == 409 && detail.ends_with("plan the change again, and send its `base_revision`"),
        "{problem}"
    );
    desk.good("ann", &["rules", "shadow", "per_user"]);
}
