//! Emergencies: declared, renewed, listed and ended.

use serde_json::{Map, Value, json};
use tidegate_testkit::{START_TIME_MAX, wait_until};

use crate::desk::Desk;
use crate::support::write;

#[test]
fn an_emergency_lasts_an_hour_unless_it_is_renewed_or_ended() {
    let desk = Desk::new();
    desk.good("ann", &["rules", "apply", &desk.rule(5), "--yes"]);
    let declare = |body: &str| desk.ask("ann", "POST", "/v1/emergencies", Some(body));
    let (status, declared) =
        declare(r#"{"action":"limit","limit":1,"period":"1h","for":"1m","confirmed":true}"#);
    assert_eq!(status, 200, "{declared}");
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 1);
    let emergency = &declared["emergency"];
    let id = emergency["id"].as_str().expect("an id");
    let lasted_ms = |told: &Value| told["expires_ms"].as_u64().expect("a time");
    let (_, renewed) = desk.ask("ann", "POST", &format!("/v1/emergencies/{id}/renew"), Some("{}"));
    let longer_ms = lasted_ms(&renewed) - lasted_ms(emergency);
    assert!((59 * 60_000..=60 * 60_000).contains(&longer_ms), "an hour from now: {longer_ms}");
    let (_, all) = desk.ask("ann", "GET", "/v1/emergencies", None);
    assert_eq!(all["emergencies"][0]["expires_ms"], renewed["expires_ms"]);
    assert_eq!(desk.ask("ann", "DELETE", &format!("/v1/emergencies/{id}"), None).0, 200);
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 5);
    for (wrong, field) in [
        (r#"{"action":"block","for":"61m"}"#, "for: 3660s is outside 1ms to 3600s"),
        (r#"{"action":"stop"}"#, "action: "),
        (r#"{"action":"block","rule":"nothing"}"#, "rule: there is no rule \"nothing\""),
    ] {
        let (status, problem) = declare(wrong);
        let detail = problem["detail"].as_str().expect("words");
        assert_eq!((status, detail.starts_with(field)), (400, true), "{problem}");
    }
}

#[test]
fn emergency_without_selected_keys_needs_confirmation() {
    let desk = Desk::new();
    desk.good("ann", &["rules", "apply", &desk.rule(5), "--yes"]);
    let declare = |body: &str| desk.ask("ann", "POST", "/v1/emergencies", Some(body));
    for everything in [
        r#"{"action":"block"}"#,
        r#"{"action":"block","when":{},"reason":"a slip"}"#,
        r#"{"action":"block","when":{"user":"*"}}"#,
        r#"{"action":"block","rule":"per_user"}"#,
        r#"{"action":"block","rule":"per_user","key":["*"]}"#,
        r#"{"action":"limit","limit":0,"period":"1s"}"#,
        r#"{"action":"limit","limit":1,"period":"1h"}"#,
    ] {
        let (status, problem) = declare(everything);
        let detail = problem["detail"].as_str().expect("words");
        assert_eq!(
            (status, detail.starts_with("confirmed: the emergency affects all ")),
            (409, true),
            "{problem}"
        );
    }
    assert_eq!(desk.check("bob")["decision"], "allow");
    let (_, all) = desk.ask("ann", "GET", "/v1/emergencies", None);
    assert_eq!(all["emergencies"], json!([]), "nothing was declared");
    let (status, declared) = declare(r#"{"id":"all","action":"block","confirmed":true}"#);
    assert_eq!(status, 200, "{declared}");
    assert_eq!(desk.check("bob")["decision"], "deny");
    assert_eq!(desk.ask("ann", "DELETE", "/v1/emergencies/all", None).0, 200);
    // An emergency for some keys only, or one that allows, needs no confirmation.
    for some in [
        r#"{"id":"x","action":"block","rule":"per_user","key":["bob"]}"#,
        r#"{"id":"x","action":"block","when":{"user":"bob"}}"#,
        r#"{"id":"x","action":"limit","limit":1,"period":"1h","when":{"user":"b*"}}"#,
        r#"{"id":"x","action":"allow"}"#,
    ] {
        assert_eq!(declare(some).0, 200, "{some}");
    }
    desk.ask("ann", "DELETE", "/v1/emergencies/x", None);

    let (status, printed) = desk.run("ann", &["block"]);
    assert_eq!((status, printed.contains("confirm with --yes")), (1, true), "{printed}");
    let direct = "direct limits (CL.THROTTLE, /v2/ratelimit.limit) and Envoy descriptors";
    assert!(printed.contains(&format!("it does not affect {direct}")), "{printed}");
    let (status, printed) = desk.run_at_terminal("ann", &["block"], b"n\n");
    assert_eq!((status, printed.contains("Continue? [y/N]")), (1, true), "{printed}");
    assert_eq!(desk.check("carol")["decision"], "allow");
    let printed = desk.good("ann", &["block", "--yes"]);
    let scope = format!(": all requests under any rule; not affected: {direct}\n");
    assert!(printed.starts_with("blocked until ") && printed.ends_with(&scope), "{printed}");
    assert_eq!(desk.check("carol")["decision"], "deny");
    desk.good("ann", &["unblock"]);
    let printed = desk.good("ann", &["emergency", "block", "--id", "all", "--yes"]);
    assert!(printed.ends_with(&format!(": block; not affected: {direct}\n")), "{printed}");
    desk.good("ann", &["emergency", "end", "all"]);
    assert_eq!(desk.check("carol")["decision"], "allow");
    let (status, printed) = desk.run("ann", &["block", "--rule", "per_user"]);
    assert_eq!(
        (status, printed.contains("affects all requests of rule \"per_user\"")),
        (1, true),
        "{printed}"
    );
    let printed = desk.good("ann", &["block", "--rule", "per_user", "--yes"]);
    assert!(printed.ends_with(": all requests of rule per_user\n"), "{printed}");
    let (status, printed) = desk.run("ann", &["block", "--key", "carol"]);
    assert_eq!((status, printed.contains("--rule")), (64, true), "{printed}");
    for command in [&["block"][..], &["unblock"], &["emergency", "block"]] {
        let printed = desk.good("ann", &[command, &["--help"]].concat());
        let words: Vec<&str> = printed.split_whitespace().collect();
        assert!(words.join(" ").contains("required with --key [default: all rules]"), "{printed}");
    }
}

#[test]
fn an_emergency_that_does_not_go_with_the_others_is_refused() {
    let desk = Desk::new();
    desk.good("ann", &["rules", "apply", &desk.rule(5), "--yes"]);
    // Rules and emergencies in force use at most 16 header fields together.
    let declare = |id: usize, headers: usize| {
        let when: Map<String, Value> =
            (0..headers).map(|at| (format!("header.x{id}{at}"), "y".into())).collect();
        let body = json!({ "id": id.to_string(), "action": "block", "when": when }).to_string();
        desk.ask("ann", "POST", "/v1/emergencies", Some(&body))
    };
    for (id, headers) in [(0, 8), (1, 8), (1, 8)] {
        let (status, answer) = declare(id, headers);
        assert_eq!((status, &answer["not_in_force"]), (200, &Value::Null), "{answer}");
    }
    let (status, problem) = declare(2, 1);
    assert_eq!(
        (status, &problem["detail"]),
        (400, &"rules: 17 different header.* dimensions is outside 0 to 16".into())
    );
    let (_, all) = desk.ask("ann", "GET", "/v1/emergencies", None);
    assert_eq!(all["emergencies"].as_array().map(Vec::len), Some(2), "{all}");
    desk.good("ann", &["rules", "apply", &desk.rule(6), "--yes"]);
}

#[test]
fn a_rule_in_an_emergency_is_not_deleted() {
    let desk = Desk::new();
    desk.good("ann", &["rules", "apply", &desk.rule(100), "--yes"]);
    let emergency = r#"{"id": "stop", "action": "block", "rule": "per_user", "confirmed": true}"#;
    assert_eq!(desk.ask("ann", "POST", "/v1/emergencies", Some(emergency)).0, 200);
    let delete = r#"{"operations": [{"do": "delete", "kind": "rule", "name": "per_user"}], "base_revision": 1,
            "confirmed": true}"#;
    let plan = r#"{"operations": [{"do": "delete", "kind": "rule", "name": "per_user"}]}"#;
    for (route, body) in [("/v1/rules/plan", plan), ("/v1/rules/apply", delete)] {
        let (status, answer) = desk.ask("ann", "POST", route, Some(body));
        assert_eq!(status, 409, "{answer}");
        let detail = answer["detail"].as_str().expect("a reason");
        assert!(detail.contains("end it first: rule \"per_user\" (emergency \"stop\")"), "{detail}");
    }
    assert_eq!(desk.check("bob")["decision"], "deny", "it lasts");
    assert_eq!(desk.ask("ann", "DELETE", "/v1/emergencies/stop", None).0, 200);
    let (status, answer) = desk.ask("ann", "POST", "/v1/rules/apply", Some(delete));
    assert_eq!((status, &answer["not_in_force"]), (200, &Value::Null), "{answer}");
    let (status, answer) = desk.ask("ann", "POST", "/v1/emergencies", Some(emergency));
    assert_eq!(status, 400, "about a rule that is gone: {answer}");
}

#[test]
fn emergencies_are_declared_renewed_listed_and_ended() {
    let desk = Desk::new();
    let rules = "[[rules]]\nname='per_user'\nkey=['user']\nlimit=100\nperiod='1m'\n";
    desk.good("ann", &["rules", "apply", &write(desk.folder(), "one.toml", rules), "--yes"]);
    let limit =
        ["emergency", "limit", "--rule", "per_user", "--limit", "1", "--period", "1m", "--id", "calm"];
    let (status, printed) = desk.run("ann", &limit);
    assert_eq!((status, printed.contains("confirm with --yes")), (1, true), "{printed}");
    let printed = desk.good("ann", &[&limit[..], &["--yes"]].concat());
    assert!(
        printed.starts_with("emergency \"calm\" in force until 20") && printed.ends_with(": limit\n"),
        "{printed}"
    );
    let listed = desk.json("ann", &["emergency", "list"]);
    let body = &listed["emergencies"][0]["body"];
    assert_eq!(
        (&body["action"], &body["limit"], &body["rule"]),
        (&json!("limit"), &json!(1), &json!("per_user"))
    );
    assert!(
        desk.good("ann", &["emergency", "renew", "calm", "--for", "20m"]).starts_with("in force until 20")
    );
    assert_eq!(desk.good("ann", &["emergency", "end", "calm"]), "ended\n");
    assert_eq!(desk.json("ann", &["emergency", "list"])["emergencies"], json!([]));
    let (status, printed) = desk.run("ann", &["emergency", "renew", "calm"]);
    assert_eq!(status, 1, "{printed}");
    let (status, printed) = desk.run("ann", &["emergency", "block", "--tenant", "acme", "--yes"]);
    let told = "tenant: there is no [[tenants]] entry named \"acme\"";
    assert!(status != 0 && printed.contains(told), "{status}: {printed}");
}

#[test]
fn a_block_is_told_apart_from_a_limit() {
    let desk = Desk::new();
    desk.good("ann", &["rules", "apply", &desk.rule(1), "--yes"]);
    desk.good("ann", &["block", "--rule", "per_user", "--key", "eve"]);
    let (status, printed) = desk.run("ann", &["check", "user=eve"]);
    assert_eq!(status, 2, "{printed}");
    assert!(printed.starts_with("deny: blocked until 20"), "{printed}");
    assert!(printed.contains("Z by emergency \"block:per_user:eve\"\n"), "{printed}");
    desk.good("ann", &["check", "user=bob"]);
    let (_, printed) = desk.run("ann", &["check", "user=bob"]);
    assert!(
        printed.starts_with("deny: the limit of rule \"per_user\" is reached; retry after "),
        "{printed}"
    );
    let mut why = String::new();
    wait_until("the record of the block", START_TIME_MAX, || {
        why = desk.run("ann", &["why", "--key", "user:eve"]).1;
        why.contains("user:eve denied at ")
    });
    assert!(
        why.contains(": blocked until 20") && why.contains("by emergency \"block:per_user:eve\""),
        "{why}"
    );
    let listed = desk.good("ann", &["emergency", "list"]);
    let (header, row) = listed.split_once('\n').expect("a header and a row");
    assert!(header.starts_with(" id  ") && header.contains("  action  rule      key  until  "), "{listed}");
    assert!(row.starts_with(" block:per_user:eve  block   per_user  eve  20"), "{listed}");
}
