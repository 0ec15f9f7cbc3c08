//! Rows: modes, overrides, imports and exports.

use serde_json::{Value, json};
use tidegate_testkit::Postgres;

use crate::desk::Desk;
use crate::support::write;

#[test]
fn modes_overrides_and_blocks_are_in_force_at_once() {
    change_at_once(&Desk::new());
}

/// Each command is a connection of its own, and so on another worker: the store serves all of them.
#[test]
fn the_same_on_postgres() {
    let postgres = Postgres::start();
    change_at_once(&Desk::on(&postgres.url("postgres"), tempfile::tempdir().expect("a folder")));
}

fn change_at_once(desk: &Desk) {
    desk.good("ann", &["rules", "apply", &desk.rule(1), "--yes"]);
    assert_eq!(desk.check("bob")["decision"], "allow");
    assert_eq!(desk.check("bob")["decision"], "deny");

    desk.good("ann", &["rules", "shadow", "per_user"]);
    assert_eq!(desk.check("bob")["decision"], "allow");
    let (status, printed) = desk.run("ann", &["rules", "enforce", "per_user", "--yes"]);
    assert_eq!((status, printed.contains("change 3: waiting")), (3, true), "{printed}");
    desk.good("cy", &["rules", "approve", "3"]);
    desk.good("ann", &["rules", "apply", "--change", "3"]);
    assert_eq!(desk.check("bob")["decision"], "deny");

    desk.good("ann", &["override", "set", "--rule", "per_user", "--key", "bob", "--limit", "9"]);
    assert_eq!(desk.check("bob")["rules"][0]["override"], "per_user:bob");
    assert!(desk.good("ann", &["override", "list"]).contains("per_user:bob"));
    desk.good("ann", &["override", "delete", "per_user:bob", "--yes"]);
    assert_eq!(desk.check("bob")["decision"], "deny");

    let block = ["--rule", "per_user", "--key", "eve"];
    let printed = desk.good("ann", &[&["block"], &block[..], &["--for", "30m"]].concat());
    assert!(printed.starts_with("blocked until "), "{printed}");
    assert_eq!(desk.check("eve")["rules"][0]["emergency"], "block:per_user:eve");
    assert_eq!(desk.check("eve")["decision"], "deny");
    let (status, printed) = desk.run("ann", &[&["block"], &block[..], &["--for", "2h"]].concat());
    assert_eq!((status, printed.contains("for: 7200s is outside 1ms to 3600s")), (64, true), "{printed}");
    desk.good("ann", &[&["unblock"], &block[..]].concat());
    assert_eq!(desk.check("eve")["decision"], "allow");
    // `why` prints keys with their dimension.
    let copied = ["--rule", "per_user", "--key", "user:eve"];
    for verb in [
        &["block"][..],
        &["unblock"],
        &["override", "set", "--limit", "9"],
        &["emergency", "limit", "--limit", "1", "--period", "1m"],
    ] {
        let (status, printed) = desk.run("ann", &[verb, &copied[..]].concat());
        let refused = "the key of rule \"per_user\" is the value only: --key eve";
        assert_eq!((status, printed.contains(refused)), (64, true), "{printed}");
    }
    for verb in ["block", "unblock"] {
        desk.good("ann", &[&[verb], &copied[..], &["--verbatim"]].concat());
    }
    let (status, printed) = desk.run("ann", &[&["unblock"], &block[..]].concat());
    assert_eq!((status, printed.contains("not blocked")), (1, true), "{printed}");
    // A key may be longer than the longest name.
    let long = "x".repeat(1_024);
    for verb in [&["override", "set", "--limit", "9"][..], &["block"], &["unblock"]] {
        desk.good("ann", &[verb, &["--rule", "per_user", "--key", &long]].concat());
    }

    let row = desk.good("ann", &["rules", "get", "rule/per_user"]);
    assert!(row.starts_with("rule \"per_user\", version 3\n") && row.contains("mode = \"enforce\""), "{row}");
}

#[test]
fn mode_commands_print_the_diff_and_a_request_without_a_difference_makes_no_revision() {
    let desk = Desk::new();
    let rules = "[[templates]]\nname='quiet'\nlimit=5\nperiod='1h'\nmode='shadow'\n\
                 [[rules]]\nname='quiet'\ntemplate='quiet'\nkey=['user']\n\
                 [[rules]]\nname='loud'\nkey=['user']\nlimit=5\nperiod='1h'\n";
    let file = write(desk.folder(), "rules.toml", rules);
    desk.good("ann", &["rules", "apply", &file, "--yes"]);
    for same in [&["rules", "apply", &file][..], &["rules", "enforce", "loud"], &["rules", "shadow", "quiet"]]
    {
        assert_eq!(desk.good("ann", same), "nothing to change\n", "{same:?}");
        assert_eq!(desk.json("ann", same), json!({ "change": null }), "{same:?}");
    }
    for (target, body) in [("/v1/rules/loud/enforce", "{}"), ("/v1/rules/quiet/shadow", "{}")] {
        let (status, answer) = desk.ask("ann", "POST", target, Some(body));
        assert_eq!((status, answer), (200, json!({ "change": null })), "{target}");
    }
    let history = desk.json("ann", &["rules", "history"]);
    assert_eq!(history["changes"].as_array().map(Vec::len), Some(1), "{history}");

    let printed = desk.good("ann", &["rules", "shadow", "loud"]);
    assert!(printed.starts_with("update rule \"loud\"\n  + mode = \"shadow\"\n"), "{printed}");
    assert!(printed.contains("change 2: applied, revision 2"), "{printed}");
    assert_eq!(desk.good("ann", &["rules", "shadow", "loud"]), "nothing to change\n");
    let (status, printed) = desk.run("ann", &["rules", "enforce", "missing"]);
    assert_eq!((status, printed.contains("there is no rule \"missing\"")), (1, true), "{printed}");
}

#[test]
fn configurations_of_other_limiters_are_imported_as_rules() {
    let desk = Desk::new();
    let descriptors = "domain: edge\ndescriptors:\n  \
                       - key: user\n    rate_limit: { unit: hour, requests_per_unit: 7 }\n  \
                       - key: user\n    value: bob\n    rate_limit: { unit: hour, requests_per_unit: 8 }\n  \
                       - key: free\n    rate_limit: { unlimited: true }\n";
    let descriptors = write(desk.folder(), "descriptors.yaml", descriptors);
    let printed = desk.good("ann", &["rules", "import", "envoy", &descriptors, "--yes"]);
    assert!(printed.contains("left out: edge/free: unlimited"), "{printed}");
    assert_eq!(["ann", "bob"].map(|user| desk.check(user)["rules"][0]["limit"].as_u64()), [Some(7), Some(8)]);

    let list =
        r#"{"data":[{"overrideId":"o","identifier":"eve*","limit":4,"duration":60000}],"pagination":{}}"#;
    let list = write(desk.folder(), "unkey.json", list);
    desk.good("ann", &["rules", "import", "unkey", &list, "--namespace", "emails", "--yes"]);
    let overrides = || {
        let rows = desk.json("ann", &["rules", "list", "--kind", "override"])["rows"].clone();
        let fields =
            |row: &Value| ["namespace", "identifier", "limit"].map(|field| row["body"][field].clone());
        rows.as_array().into_iter().flatten().map(fields).filter(|row| row[0] == "emails").collect::<Vec<_>>()
    };
    let emails = |identifier: &str| -> [Value; 3] { ["emails".into(), identifier.into(), 4.into()] };
    assert_eq!(overrides(), [emails("eve*")]);
    let page = |name: &str, user: &str, pagination: &str| {
        let text = format!(
            r#"{{"data":[{{"identifier":"{user}","limit":4,"duration":60000}}],"pagination":{pagination}}}"#
        );
        write(desk.folder(), name, &text)
    };
    let first = page("1.json", "fay", r#"{"cursor":"c","hasMore":true}"#);
    let second = page("2.json", "gus", r#"{"hasMore":false}"#);
    let import = |pages: &[&str]| {
        desk.run("ann", &[&["rules", "import", "unkey"], pages, &["--namespace", "emails", "--yes"]].concat())
    };
    let (status, printed) = import(&[&first]);
    assert_eq!((status, printed.contains("the last page is missing")), (64, true), "{printed}");
    assert_eq!(overrides(), [emails("eve*")], "half of a list is not imported");
    let (status, printed) = import(&[&first, &second]);
    assert_eq!(status, 0, "{printed}");
    assert_eq!(overrides(), ["eve*", "fay", "gus"].map(emails));
    let (status, printed) =
        desk.run("ann", &["rules", "import", "unkey", &descriptors, "--namespace", "emails"]);
    assert_eq!(status, 64, "{printed}");
}

#[test]
fn the_rules_of_a_store_are_written_as_a_file_for_another() {
    let (desk, other) = (Desk::new(), Desk::new());
    let text = "
        [[templates]]
        name = 'pro'
        limit = 50
        period = '1h'
        [[rules]]
        name = 'a \"quoted\" rule'
        template = 'pro'
        key = ['user']
        when = { path = ['/x*', '/y'], plan = 'pro' }
        [[rules]]
        name = 'per_user'
        key = ['user']
        limit = 5
        period = '1h'
        priority = -3
        [[overrides]]
        name = 'vip'
        rule = 'per_user'
        key = ['ünal']
        limit = 9
        [[overrides]]
        name = 'important'
        namespace = 'emails'
        identifier = 'vip-*'
        tenant = 'acme'
        limit = 70
        period = '1m'";
    let file = write(desk.folder(), "all.toml", text);
    desk.good("ann", &["rules", "apply", &file, "--yes"]);
    let written = write(other.folder(), "written.toml", &desk.good("ann", &["rules", "list", "--toml"]));
    other.good("ann", &["rules", "apply", &written, "--yes"]);
    let rows = [&desk, &other].map(|desk| desk.json("ann", &["rules", "list"])["rows"].clone());
    assert_eq!(rows[0], rows[1]);
    assert_eq!(rows[0].as_array().map(Vec::len), Some(5));
    let listed = desk.good("ann", &["rules", "list"]);
    assert!(
        listed.contains("emails") && listed.contains("vip-*") && listed.contains("70 per 1m"),
        "{listed}"
    );
}

#[test]
fn override_command_sets_tenant_priority_and_expiry() {
    let desk = Desk::new();
    let rules = "[[rules]]\nname='per_user'\nkey=['user']\nlimit=100\nperiod='1m'\n";
    desk.good("ann", &["rules", "apply", &write(desk.folder(), "one.toml", rules), "--yes"]);
    let set =
        ["override", "set", "--rule", "per_user", "--key", "b*", "--limit", "500", "--name", "bees", "--yes"];
    let more = ["--priority", "-2", "--expires", "4000000000000", "--tenant", "acme"];
    let printed = desk.good("ann", &[&set[..], &more].concat());
    let warning = "warning: overrides[\"bees\"].tenant: there is no [[tenants]] entry named \"acme\"";
    assert!(printed.contains(warning), "{printed}");
    let body = desk.json("ann", &["rules", "get", "override/bees"])["row"]["body"].clone();
    let printed = (&body["priority"], &body["expires"], &body["tenant"]);
    assert_eq!(printed, (&json!(-2), &json!(4_000_000_000_000_u64), &json!("acme")));
    let (status, printed) = desk.run("ann", &[&set[..], &["--priority", "1000001"]].concat());
    assert_eq!((status, printed.contains("priority: 1000001 is outside")), (64, true), "{printed}");
}

#[test]
fn an_expiry_is_a_time_a_duration_or_a_number() {
    let desk = Desk::new();
    desk.good("ann", &["rules", "apply", &desk.rule(100), "--yes"]);
    let set =
        ["override", "set", "--rule", "per_user", "--key", "bob", "--limit", "500", "--name", "o", "--yes"];
    let expires_ms = |text: &str| {
        desk.good("ann", &[&set[..], &["--expires", text]].concat());
        desk.json("ann", &["rules", "get", "override/o"])["row"]["body"]["expires"].as_u64().expect("a time")
    };
    assert_eq!(expires_ms("2096-10-02T07:06:40Z"), 4_000_000_000_000);
    assert_eq!(expires_ms("4000000000"), 4_000_000_000_000, "seconds");
    assert_eq!(expires_ms("4000000000000"), 4_000_000_000_000, "milliseconds");
    let listed = desk.good("ann", &["override", "list"]);
    assert!(listed.contains("  2096-10-02T07:06:40.000Z  "), "{listed}");
    let (soon, later) = (expires_ms("1d"), expires_ms("2d"));
    assert!((86_400_000..86_700_000).contains(&(later - soon)), "{soon} {later}");
    for (text, problem) in [
        ("1700000000", "2023-11-14T22:13:20.000Z is not in the future: it is "),
        ("2020-01-01T00:00:00Z", "2020-01-01T00:00:00.000Z is not in the future"),
        ("tomorrow", "expected RFC 3339 (2026-12-31T00:00:00Z), a duration from now (30m, 90d), or Unix"),
    ] {
        let (status, printed) = desk.run("ann", &[&set[..], &["--expires", text]].concat());
        assert_eq!((status, printed.contains(problem)), (64, true), "{printed}");
    }
    // A rules file has the same forms, except for those that depend on the present.
    let row = |expires: &str| {
        let over = "[[overrides]]\nname='o'\nrule='per_user'\nkey=['bob']\nlimit=500\nexpires=";
        write(desk.folder(), "over.toml", &format!("{over}{expires}\n"))
    };
    for good in ["2096-10-02T07:06:40Z", "'2096-10-02T07:06:40Z'", "4000000000000"] {
        desk.good("ann", &["rules", "apply", &row(good), "--yes"]);
        let stored = desk.json("ann", &["rules", "get", "override/o"]);
        assert_eq!(stored["row"]["body"]["expires"], json!(4_000_000_000_000_u64), "{good}");
    }
    for (text, problem) in [
        ("4000000000", "line 6: overrides[0].expires: 4000000000 is outside 1000000000000 to "),
        ("1700000000000", "overrides[\"o\"].expires: 2023-11-14T22:13:20.000Z is not in the future: it is "),
        ("2020-01-01", "milliseconds since the Unix epoch (1798761600000) or RFC 3339"),
    ] {
        let (status, printed) = desk.run("ann", &["rules", "apply", &row(text), "--yes"]);
        assert_eq!((status, printed.contains(problem)), (64, true), "{printed}");
    }
    let made =
        ["credential", "new", "--name", "eli", "--role", "viewer", "--expires", "2096-10-02T07:06:40Z"];
    desk.good("dan", &made);
    let listed = desk.good("dan", &["credential", "list"]);
    assert!(listed.contains("eli   viewer  2096-10-02T07:06:40.000Z"), "{listed}");
}
