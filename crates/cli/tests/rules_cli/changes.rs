//! Changes: planned, confirmed, approved and rolled back.

use serde_json::Value;
use tidegate_testkit::wait_until;

use crate::desk::{Desk, SAMPLED_TIME_MAX, STRANGERS};
use crate::support::write;

#[test]
fn a_change_is_planned_confirmed_approved_and_undone() {
    let desk = Desk::new();
    // A new rule has no decision records.
    let (status, printed) = desk.run("ann", &["rules", "apply", &desk.rule(100)]);
    assert_eq!(status, 1, "{printed}");
    assert!(
        printed.contains("create rule \"per_user\"\n  + key = [\"user\"]\n  + limit = 100\n"),
        "{printed}"
    );
    assert!(printed.contains("not applied: nothing to measure") && printed.contains("--yes"), "{printed}");
    let worst =
        "the change may deny all by \"per_user\" that passes now; the store is new; confirm with --yes";
    assert!(printed.contains(worst), "{printed}");
    let printed =
        desk.good("ann", &["rules", "apply", &desk.rule(100), "--yes", "--reason", "to begin with"]);
    assert!(printed.contains("change 1: applied, revision 1, by token:"), "{printed}");
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 100, "in force at once");

    desk.traffic(100, 101);
    let plan = desk.good("ann", &["rules", "plan", &desk.rule(94)]);
    assert!(plan.contains("update rule \"per_user\"\n  - limit = 100\n  + limit = 94\n"), "{plan}");
    assert!(plan.contains("5.9 % of") && plan.contains("needs: confirmation"), "{plan}");
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 100, "a plan changes nothing");
    let (status, printed) = desk.run("ann", &["rules", "apply", &desk.rule(94)]);
    assert_eq!((status, printed.contains("--yes")), (1, true), "{printed}");
    let printed = desk.good("ann", &["rules", "apply", &desk.rule(94), "--yes"]);
    assert!(printed.contains("change 2: applied, revision 2"), "{printed}");

    // A change that denies half of all requests needs another person's approval, even if confirmed.
    let (status, printed) = desk.run("bea", &["rules", "apply", &desk.rule(10), "--yes"]);
    assert_eq!(status, 3, "{printed}");
    assert!(printed.contains("needs: approver") && printed.contains("tidegate rules approve 3"), "{printed}");
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 94);
    let (status, printed) = desk.run("bea", &["rules", "apply", "--change", "3", "--yes"]);
    assert_eq!((status, printed.contains("needs the approval of another person")), (1, true), "{printed}");
    let (status, printed) = desk.run("bea", &["rules", "approve", "3"]);
    assert_eq!(
        (status, printed.contains("403: change 3 cannot be approved by its author")),
        (1, true),
        "{printed}"
    );
    let (status, printed) = desk.run("ann", &["rules", "approve", "3"]);
    assert_eq!((status, printed.contains("needs the role \"approver\"")), (1, true), "{printed}");
    desk.good("cy", &["rules", "approve", "3"]);
    let printed = desk.good("ann", &["rules", "apply", "--change", "3"]);
    assert!(printed.contains("change 3: applied, revision 3"), "{printed}");
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 10);
    let whole = desk.json("ann", &["rules", "history", "3"]);
    assert!(whole["change"]["approver"].as_str().is_some_and(|name| name.starts_with("token:")), "{whole}");
    assert!(whole["change"]["effect"]["measured"]["newly_denied_percent"].as_f64() > Some(50.0), "{whole}");

    let printed =
        desk.good("ann", &["rules", "rollback", "--to-revision", "1", "--reason", "too strict", "--yes"]);
    assert!(printed.contains("change 4: applied, revision 4"), "{printed}");
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 100);
    let history = desk.good("ann", &["rules", "history"]);
    assert!(
        history.starts_with("change 4: applied, revision 4") && history.contains("too strict"),
        "{history}"
    );
    assert!(history.contains("change 3: rolled back"), "{history}");

    let (status, printed) = desk.run("bea", &["rules", "apply", &desk.rule(1)]);
    assert_eq!(status, 3, "{printed}");
    let (status, printed) = desk.run("ann", &["rules", "reject", "5"]);
    assert_eq!((status, printed.contains("403")), (1, true), "of somebody else: {printed}");
    desk.good("bea", &["rules", "reject", "5", "--reason", "a slip"]);
    let (status, printed) = desk.run("cy", &["rules", "approve", "5"]);
    assert_eq!((status, printed.contains("change 5 is rejected")), (1, true), "{printed}");
}

#[test]
fn change_needs_confirmation_above_5_and_approval_above_50_percent() {
    let desk = Desk::new();
    desk.good("ann", &["rules", "apply", &desk.rule(100), "--yes"]);
    desk.traffic(100, 100);
    for (limit, percent, needs) in [
        (95, "5.0", "nothing"),
        (94, "6.0", "confirmation"),
        (50, "50.0", "confirmation"),
        (49, "51.0", "approver"),
    ] {
        let plan = desk.good("ann", &["rules", "plan", &desk.rule(limit)]);
        assert!(plan.contains(&format!("effect: {percent} % of")), "{limit}: {plan}");
        assert!(plan.contains(&format!("needs: {needs}\n")), "{limit}: {plan}");
    }
    let (status, printed) = desk.run("bea", &["rules", "apply", &desk.rule(94)]);
    assert_eq!((status, printed.contains("6.0 %") && printed.contains("--yes")), (1, true), "{printed}");
    let (status, printed) = desk.run("bea", &["rules", "apply", &desk.rule(49), "--yes"]);
    assert_eq!((status, printed.contains("change 2: waiting")), (3, true), "{printed}");
    let (status, printed) = desk.run("bea", &["rules", "approve", "2"]);
    assert_eq!((status, printed.contains("cannot be approved by its author")), (1, true), "{printed}");
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 100);
    desk.good("cy", &["rules", "approve", "2"]);
    desk.good("bea", &["rules", "apply", "--change", "2"]);
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 49);
}

#[test]
fn unmeasured_change_that_may_deny_all_keys_needs_approval() {
    let desk = Desk::new();
    desk.good("ann", &["rules", "apply", &desk.rule(100), "--yes"]);
    desk.traffic(100, 100);
    let by_plan = "[[rules]]\nname = 'per_user'\nkey = ['plan']\nlimit = 100\nperiod = '1h'\n";
    let by_plan = write(desk.folder(), "plan.toml", by_plan);
    let (status, printed) = desk.run("ann", &["rules", "apply", &by_plan, "--yes"]);
    assert_eq!((status, printed.contains("the log has no \"plan\" of requests")), (3, true), "{printed}");
    assert_eq!(desk.check("bob")["rules"][0]["rule"], "per_user", "nothing changed");
    let by_team =
        "[[rules]]\nname = 'per_team'\nkey = ['team']\nlimit = 100\nperiod = '1h'\nmode = 'shadow'\n";
    desk.good("ann", &["rules", "apply", &write(desk.folder(), "team.toml", by_team)]);
    // A higher limit for all keys and back, on a rule without requests so far.
    let more = ["override", "set", "--rule", "per_team", "--key", "*", "--limit", "1000", "--name", "all"];
    desk.good("ann", &more);
    let (status, printed) = desk.run("ann", &["rules", "enforce", "per_team", "--yes"]);
    assert_eq!((status, printed.contains("change 5: waiting")), (3, true), "{printed}");
    desk.good("cy", &["rules", "approve", "5"]);
    desk.good("ann", &["rules", "apply", "--change", "5"]);
    let (status, printed) = desk.run("ann", &["override", "delete", "all", "--yes"]);
    assert_eq!((status, printed.contains("change 6: waiting")), (3, true), "{printed}");
}

#[test]
fn only_approver_confirms_changes_of_unknown_effect() {
    let desk = Desk::of_one_admin();
    desk.good("dan", &["rules", "apply", &desk.rule(100), "--yes"]);
    let team = |name: &str| {
        let text = format!("[[rules]]\nname = '{name}'\nkey = ['team']\nlimit = 100\nperiod = '1h'\n");
        write(desk.folder(), &format!("{name}.toml"), &text)
    };
    let (status, printed) = desk.run("dan", &["rules", "apply", &team("one")]);
    assert_eq!(
        (status, printed.contains("; no other credential may approve; confirm with --yes")),
        (1, true),
        "{printed}"
    );
    desk.good("dan", &["rules", "apply", &team("one"), "--yes"]);
    // An operator cannot approve, so another person can: the change waits.
    let (status, printed) = desk.run("ann", &["rules", "apply", &team("two"), "--yes"]);
    assert_eq!((status, printed.contains("change 3: waiting")), (3, true), "{printed}");
    desk.good("dan", &["rules", "approve", "3"]);
    desk.good("ann", &["rules", "apply", "--change", "3"]);
    // A measured effect needs a confirmation too: no approver exists that it could wait for.
    desk.traffic(100, 100);
    let (status, printed) = desk.run("dan", &["rules", "apply", &desk.rule(49)]);
    assert_eq!((status, printed.contains("confirm with --yes")), (1, true), "{printed}");
    let printed = desk.good("dan", &["rules", "apply", &desk.rule(49), "--yes"]);
    assert!(printed.contains("change 4: applied"), "{printed}");
    let body = r#"{"name":"eve","role":"approver"}"#;
    let (status, made) = desk.ask("dan", "POST", "/v1/credentials", Some(body));
    assert_eq!(status, 200, "{made}");
    // The author of a change cannot make its approver.
    let (status, printed) = desk.run("dan", &["rules", "apply", &team("three"), "--yes"]);
    assert_eq!((status, printed.contains("change 5: applied")), (0, true), "{printed}");
}

#[test]
fn change_denying_all_needs_approval_at_the_default_sample_rate() {
    let folder = tempfile::tempdir().expect("a folder");
    let rules = format!("sqlite:{}", folder.path().join("rules.db").display());
    let desk = Desk::logging(&rules, folder, &[]);
    desk.good("ann", &["rules", "apply", &desk.rule(1_000), "--yes"]);
    // One request of each user. The log keeps one record of a thousand requests.
    let mut users = 0;
    wait_until("enough records of a sample", SAMPLED_TIME_MAX, || {
        desk.strangers(users..users + STRANGERS);
        users += STRANGERS;
        let plan = desk.json("ann", &["rules", "plan", &desk.rule(0)]);
        plan["effect"]["measured"].is_object()
    });
    let (status, printed) = desk.run("ann", &["rules", "apply", &desk.rule(0), "--yes"]);
    assert_eq!(status, 3, "{printed}");
    assert!(printed.contains("effect: 100.0 % of") && printed.contains("needs: approver"), "{printed}");
    assert_eq!(desk.check("bob")["decision"], "allow");
    let plan = desk.good("ann", &["rules", "plan", &desk.rule(900)]);
    assert!(plan.contains("effect: 0.0 % of") && plan.contains("needs: nothing"), "{plan}");
}

#[test]
fn rollback_to_a_strict_limit_needs_approval() {
    let desk = Desk::new();
    desk.good("ann", &["rules", "apply", &desk.rule(100), "--yes"]);
    desk.traffic(100, 100);
    desk.run("bea", &["rules", "apply", &desk.rule(1)]);
    desk.good("cy", &["rules", "approve", "2"]);
    desk.good("bea", &["rules", "apply", "--change", "2"]);
    // A looser limit needs no approval.
    desk.good("ann", &["rules", "rollback", "--change", "2", "--yes"]);
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 100);
    for (at, back) in [(4, ["--change", "3"]), (5, ["--to-revision", "2"])] {
        let (status, printed) = desk.run("ann", &[&["rules", "rollback", "--yes"], &back[..]].concat());
        assert_eq!(
            (status, printed.contains(&format!("change {at}: waiting"))),
            (3, true),
            "{back:?}: {printed}"
        );
        assert_eq!(desk.check("bob")["rules"][0]["limit"], 100, "{back:?}");
    }
    desk.good("bea", &["rules", "approve", "4"]);
    desk.good("ann", &["rules", "apply", "--change", "4"]);
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 1);
    let history = desk.good("ann", &["rules", "history"]);
    assert!(history.contains("change 3: rolled back"), "{history}");
}

#[test]
fn change_that_now_denies_more_than_approved_waits_again() {
    let desk = Desk::new();
    desk.good("ann", &["rules", "apply", &desk.rule(100), "--yes"]);
    (0..60).for_each(|user| drop(desk.check(&format!("once-{user}"))));
    desk.traffic_of("often", 100, 160);
    let (status, printed) = desk.run("bea", &["rules", "apply", &desk.rule(10)]);
    assert_eq!((status, printed.contains("effect: 56.2 %")), (3, true), "{printed}");
    desk.good("cy", &["rules", "approve", "2"]);
    // Two more frequent users raise the share to three in four.
    desk.traffic_of("often-too", 100, 260);
    desk.traffic_of("often-as-well", 100, 360);
    let (status, printed) = desk.run("bea", &["rules", "apply", "--change", "2", "--yes"]);
    assert_eq!((status, printed.contains("change 2: waiting")), (3, true), "{printed}");
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 100);
    let whole = desk.json("ann", &["rules", "history", "2"]);
    assert_eq!(whole["change"]["approver"], Value::Null, "{whole}");
    assert!(whole["change"]["effect"]["measured"]["newly_denied_percent"].as_f64() > Some(70.0), "{whole}");
    assert!(desk.good("ann", &["audit", "show"]).contains(" change.wait "));
    desk.good("cy", &["rules", "approve", "2"]);
    let printed = desk.good("bea", &["rules", "apply", "--change", "2"]);
    assert!(printed.contains("change 2: applied"), "{printed}");
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 10);
}

#[test]
fn approved_change_waits_again_after_its_template_changes() {
    let desk = Desk::new();
    let template = |limit: u32| format!("[[templates]]\nname = 't'\nlimit = {limit}\nperiod = '1h'\n");
    let rule = |name: &str, users: &str, terms: &str| {
        format!("[[rules]]\nname = '{name}'\nkey = ['user']\nwhen = {{ user = '{users}' }}\n{terms}\n")
    };
    let legacy = |limit: u32| rule("legacy", "l*", &format!("limit = {limit}\nperiod = '1h'"));
    let file = |name: &str, parts: &[String]| write(desk.folder(), name, &parts.concat());
    let begun = [template(1_000), legacy(100), rule("main", "m*", "limit = 1000\nperiod = '1h'")];
    desk.good("ann", &["rules", "apply", &file("begun.toml", &begun), "--yes"]);
    desk.traffic_of("lea", 100, 100);
    desk.traffic_of("mia", 100, 200);
    let moved = file("moved.toml", &[legacy(0), rule("main", "m*", "template = 't'")]);
    let (status, printed) = desk.run("bea", &["rules", "apply", &moved]);
    assert_eq!(
        (status, printed.contains("100.0 % of the requests that pass rule \"legacy\"")),
        (3, true),
        "{printed}"
    );
    desk.good("cy", &["rules", "approve", "2"]);
    // No rule uses the template yet.
    desk.good("bea", &["rules", "apply", &file("t.toml", &[template(1)])]);
    let (status, printed) = desk.run("bea", &["rules", "apply", "--change", "2", "--yes"]);
    assert_eq!((status, printed.contains("change 2: waiting")), (3, true), "{printed}");
    assert_eq!(desk.check("max")["rules"][0]["limit"], 1_000);
}

#[test]
fn unreadable_decision_log_does_not_prevent_changes() {
    let desk = Desk::new();
    desk.good("ann", &["rules", "apply", &desk.rule(100), "--yes"]);
    desk.traffic(100, 100);
    // Replaces the log with files that are not a database.
    let log = desk.folder().join("data");
    let named = std::fs::read_dir(&log).expect("a folder").map(|entry| entry.expect("an entry").path());
    for file in named.filter(|path| path.to_string_lossy().contains("decisions")) {
        std::fs::rename(&file, file.with_extension("away")).expect("moved");
        std::fs::write(&file, b"no database, but long enough that nobody takes it for a new one".repeat(99))
            .expect("written");
    }
    let slower = desk.slower_rule(60);
    let (status, printed) = desk.run("ann", &["rules", "apply", &slower]);
    assert_eq!(status, 1, "{printed}");
    assert!(printed.contains("the decision log cannot be read") && printed.contains("--yes"), "{printed}");
    desk.good("ann", &["rules", "apply", &slower, "--yes"]);
    desk.good("ann", &["rules", "rollback", "--change", "2", "--yes"]);
    // Halving a limit needs approval, like denying half of the requests.
    let (status, printed) = desk.run("ann", &["rules", "apply", &desk.rule(50), "--yes"]);
    assert_eq!(
        (status, printed.contains("leaves half of rule \"per_user\", or less")),
        (3, true),
        "{printed}"
    );
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 100);
}

#[test]
fn invalid_change_is_rejected_with_all_reasons() {
    let desk = Desk::new();
    let wrong = "[[rules]]\nname = 'a'\nlimit = 1\nperiod = 'soon'\n\
                 [[overrides]]\nname = 'o'\nrule = 'b'\nlimit = 1\n";
    let wrong = write(desk.folder(), "wrong.toml", wrong);
    for verb in ["plan", "apply"] {
        let (status, printed) = desk.run("ann", &["rules", verb, &wrong]);
        assert_eq!(status, 64, "{printed}");
        assert!(
            printed.contains("line 4: rules[0].period") && printed.contains("overrides[0].key"),
            "{printed}"
        );
    }
    let (status, printed) = desk.run("ann", &["rules", "plan", "--delete", "rule/a"]);
    assert_eq!(
        (status, printed.contains("cannot delete rows that do not exist: rule \"a\"")),
        (1, true),
        "{printed}"
    );
    assert_eq!(desk.json("ann", &["rules", "list"])["revision"], 0, "nothing happened");
}

#[test]
fn change_against_an_old_revision_is_a_conflict() {
    let desk = Desk::new();
    for limit in [5, 6] {
        desk.good("ann", &["rules", "apply", &desk.rule(limit), "--yes"]);
    }
    let operation = r#"{"do":"delete","kind":"rule","name":"per_user"}"#;
    let body = &format!(r#"{{"operations":[{operation}],"base_revision":1,"confirmed":true}}"#);
    let (status, problem) = desk.ask("bea", "POST", "/v1/rules/apply", Some(body));
    let detail = "conflict: changed in the meantime: rule \"per_user\" (revision 2); plan the change \
                  again, and send its `base_revision`";
    assert_eq!((status, &problem["detail"]), (409, &detail.into()));
    assert_eq!(desk.json("ann", &["rules", "list"])["rows"][0]["version"], 2);
}

#[test]
fn terminal_user_is_asked_for_confirmation() {
    /// The end of input on a terminal, at the start of a line.
    const CONTROL_D: &[u8] = b"\x04";
    let desk = Desk::new();
    let rule = desk.rule(100);
    let apply = ["rules", "apply", rule.as_str()];
    let revision = || desk.ask("ann", "GET", "/v1/rules", None).1["revision"].clone();
    for no in [b"n\n".as_slice(), b"\n", b"nothing of the sort\n", CONTROL_D] {
        let (status, printed) = desk.run_at_terminal("ann", &apply, no);
        assert_eq!(status, 1, "{no:?}: {printed}");
        assert!(printed.contains("\nApply? [y/N]") && printed.contains("error: not applied"), "{printed}");
    }
    // Without a terminal, nothing is confirmed.
    let (status, printed) = desk.run("ann", &apply);
    assert_eq!((status, printed.contains("confirm with --yes")), (1, true), "{printed}");
    assert!(!printed.contains("[y/N]"), "{printed}");
    assert_eq!(revision(), 0, "nothing was applied");
    let (status, printed) = desk.run_at_terminal("ann", &apply, b"y\n");
    assert_eq!(status, 0, "{printed}");
    assert!(printed.contains("change 1: applied, revision 1"), "{printed}");
    let slower = ["rules", "apply", &desk.slower_rule(60)];
    let (status, printed) = desk.run_at_terminal("ann", &slower, b"yes\n");
    assert_eq!((status, revision()), (0, 2.into()), "{printed}");
}

#[test]
fn removals_print_their_diff_and_ask() {
    let desk = Desk::new();
    desk.good("ann", &["rules", "apply", &desk.rule(100), "--yes"]);
    desk.good("ann", &["override", "set", "--rule", "per_user", "--key", "bob", "--limit", "900"]);
    let both = "Remove rule \"per_user\", override \"per_user:bob\"?";
    let one = "Remove override \"per_user:bob\"?";
    let removals: [(&[&str], &str, &str); 4] = [
        (
            &["rules", "rollback", "--to-revision", "0"],
            "delete rule \"per_user\"\n  - key = [\"user\"]",
            both,
        ),
        (&["rules", "rollback", "--change", "2"], "delete override \"per_user:bob\"\n", one),
        (
            &["rules", "apply", "--delete", "rule/per_user", "--delete", "override/per_user:bob"],
            "delete rule \"per_user\"",
            both,
        ),
        (&["override", "delete", "per_user:bob"], "delete override \"per_user:bob\"\n", one),
    ];
    for (arguments, diff, question) in removals {
        let (status, printed) = desk.run("ann", arguments);
        assert_eq!((status, printed.contains(diff)), (1, true), "{arguments:?}: {printed}");
        assert!(
            printed.contains("error: not applied: ") && printed.contains("; confirm with --yes"),
            "{printed}"
        );
        let (status, printed) = desk.run_at_terminal("ann", arguments, b"n\n");
        let asks = printed.contains(&format!("\n{question} [y/N]"));
        assert_eq!((status, asks), (1, true), "{arguments:?}: {printed}");
    }
    let (status, printed) = desk.run("ann", &["rules", "rollback", "--to-revision", "99"]);
    let outside = "to_revision: 99 is outside 0 to 2, the latest revision";
    assert_eq!((status, printed.contains(outside)), (64, true), "{printed}");
    let (status, printed) = desk.run("ann", &["rules", "rollback"]);
    let named = printed.contains("--change") && printed.contains("--to-revision");
    assert_eq!((status, named), (64, true), "{printed}");
    let listed = desk.json("ann", &["rules", "list"]);
    assert_eq!(
        (&listed["revision"], listed["rows"].as_array().map(Vec::len)),
        (&2.into(), Some(2)),
        "{listed}"
    );
    let (status, printed) = desk.run_at_terminal("ann", &["rules", "rollback", "--to-revision", "0"], b"y\n");
    assert_eq!((status, printed.contains("change 3: applied, revision 3")), (0, true), "{printed}");
    assert_eq!(desk.json("ann", &["rules", "list"])["rows"], serde_json::json!([]));
    assert_eq!(desk.good("ann", &["rules", "list"]), "revision 3: no rows\n");
}

#[test]
fn a_change_prints_the_rules_that_are_not_watched() {
    let desk = Desk::new();
    let printed = desk.good("ann", &["rules", "apply", &desk.rule(100), "--yes"]);
    assert!(printed.contains("\nnot watched: rule \"per_user\" is new"), "{printed}");
    let plan = desk.good("ann", &["rules", "plan", &desk.rule(200)]);
    assert!(plan.contains("\nnot watched: "), "{plan}");
}
