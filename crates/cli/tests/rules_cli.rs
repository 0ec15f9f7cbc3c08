//! Rules of a store, changed by several people with the command line: planned, confirmed, approved, undone, and audited.

#![allow(clippy::expect_used, clippy::panic, reason = "a helper of tests may panic as a test may")]
#![allow(unreachable_pub, reason = "what test programs share is public in each of them")]

mod support;

use std::path::Path;
use std::process::Output;

use serde_json::Value;
use support::raw::{request, send};
use support::{serve, tidegate, token_entry, write};
use tempfile::TempDir;
use tidegate_testkit::{Postgres, START_TIME_MAX, Server, wait_until};

/// A server on a store of its own, with people of several roles.
struct Desk {
    server: Server,
    folder: TempDir,
}

impl Desk {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let rules = format!("sqlite:{}", folder.path().join("rules.db").display());
        Self::on(&rules, folder)
    }

    fn on(rules: &str, folder: TempDir) -> Self {
        let people = [
            ("ann", "operator"),
            ("bea", "approver"),
            ("cy", "approver"),
            ("dan", "admin"),
            ("app", "client"),
        ];
        let config: String = people.map(|(name, role)| token_entry(name, "", role)).concat();
        let config = write(folder.path(), "tidegate.toml", &config);
        let data = folder.path().join("data").to_string_lossy().into_owned();
        let server = serve(&[
            "--config",
            &config,
            "--rules",
            rules,
            "--data-dir",
            &data,
            "--log-sample",
            "1",
            "--workers",
            "3",
        ]);
        Self { server, folder }
    }

    fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// What a command ends with, and says on either output.
    fn run(&self, who: &str, arguments: &[&str]) -> (i32, String) {
        let url = self.server.url("admin", "");
        let output: Output =
            tidegate(&[arguments, &["--server", &url, "--token", who]].concat()).output().expect("it runs");
        let said = [output.stdout, output.stderr].concat();
        (output.status.code().expect("no signal"), String::from_utf8(said).expect("text"))
    }

    /// The same, of a command that has to work.
    fn good(&self, who: &str, arguments: &[&str]) -> String {
        let (status, said) = self.run(who, arguments);
        assert_eq!(status, 0, "{arguments:?}: {said}");
        said
    }

    fn json(&self, who: &str, arguments: &[&str]) -> Value {
        let said = self.good(who, &[arguments, &["--json"]].concat());
        serde_json::from_str(&said).unwrap_or_else(|_| panic!("{said}"))
    }

    /// A rules file with one rule.
    fn rule(&self, limit: u32) -> String {
        let text = format!("[[rules]]\nname = 'per_user'\nkey = ['user']\nlimit = {limit}\nperiod = '1h'\n");
        write(self.folder(), &format!("{limit}.toml"), &text)
    }

    /// What the admin listener answers.
    fn ask(&self, who: &str, method: &str, target: &str, body: Option<&str>) -> (u16, Value) {
        let value = format!("Bearer {who}");
        let bytes = request(method, target, &[("authorization", &value)], body);
        let reply = send(self.server.address("admin"), &bytes);
        (reply.status, serde_json::from_str(&reply.body).unwrap_or_else(|_| panic!("{}", reply.body)))
    }

    fn check(&self, user: &str) -> Value {
        let body = format!(r#"{{"dimensions":{{"user":"{user}"}}}}"#);
        let fields = [("authorization", "Bearer app")];
        let reply = send(self.server.address("http"), &request("POST", "/v1/check", &fields, Some(&body)));
        serde_json::from_str(&reply.body).expect("a decision")
    }

    /// Requests of one user, until the log has them.
    fn traffic(&self, requests: u32) {
        for _ in 0..requests {
            assert_eq!(self.check("ann")["decision"], "allow");
        }
        wait_until("the log has all requests", START_TIME_MAX, || {
            let plan = self.json("ann", &["rules", "plan", &self.rule(1)]);
            plan["effect"]["measured"]["requests"].as_f64() >= Some(requests.into())
        });
    }
}

#[test]
fn a_change_is_planned_confirmed_approved_and_undone() {
    let desk = Desk::new();
    // Nothing is known of a new rule.
    let (status, said) = desk.run("ann", &["rules", "apply", &desk.rule(100)]);
    assert_eq!(status, 1, "{said}");
    assert!(said.contains("create rule \"per_user\"\n  + key = [\"user\"]\n  + limit = 100\n"), "{said}");
    assert!(said.contains("nothing to measure") && said.contains("--yes"), "{said}");
    let said = desk.good("ann", &["rules", "apply", &desk.rule(100), "--yes", "--reason", "to begin with"]);
    assert!(said.contains("change 1: applied, revision 1, by token:"), "{said}");
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 100, "in force at once");

    desk.traffic(100);
    let plan = desk.good("ann", &["rules", "plan", &desk.rule(94)]);
    assert!(plan.contains("update rule \"per_user\"\n  - limit = 100\n  + limit = 94\n"), "{plan}");
    assert!(plan.contains("5.9 % of") && plan.contains("needs: confirmation"), "{plan}");
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 100, "a plan changes nothing");
    let (status, said) = desk.run("ann", &["rules", "apply", &desk.rule(94)]);
    assert_eq!((status, said.contains("--yes")), (1, true), "{said}");
    let said = desk.good("ann", &["rules", "apply", &desk.rule(94), "--yes"]);
    assert!(said.contains("change 2: applied, revision 2"), "{said}");

    // Half of all requests denied takes somebody else, whatever is confirmed.
    let (status, said) = desk.run("bea", &["rules", "apply", &desk.rule(10), "--yes"]);
    assert_eq!(status, 3, "{said}");
    assert!(said.contains("needs: approver") && said.contains("tidegate rules approve 3"), "{said}");
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 94);
    let (status, said) = desk.run("bea", &["rules", "apply", "--change", "3", "--yes"]);
    assert_eq!((status, said.contains("needs the approval of somebody other")), (1, true), "{said}");
    let (status, said) = desk.run("bea", &["rules", "approve", "3"]);
    assert_eq!(
        (status, said.contains("403: change 3 cannot be approved by its author")),
        (1, true),
        "{said}"
    );
    let (status, said) = desk.run("ann", &["rules", "approve", "3"]);
    assert_eq!((status, said.contains("needs the role \"approver\"")), (1, true), "{said}");
    desk.good("cy", &["rules", "approve", "3"]);
    let said = desk.good("ann", &["rules", "apply", "--change", "3"]);
    assert!(said.contains("change 3: applied, revision 3"), "{said}");
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 10);
    let whole = desk.json("ann", &["rules", "history", "3"]);
    assert!(whole["change"]["approver"].as_str().is_some_and(|name| name.starts_with("token:")), "{whole}");
    assert!(whole["change"]["effect"]["measured"]["newly_denied_percent"].as_f64() > Some(50.0), "{whole}");

    let said = desk.good("ann", &["rules", "rollback", "--to-revision", "1", "--reason", "too strict"]);
    assert!(said.contains("change 4: applied, revision 4"), "{said}");
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 100);
    let history = desk.good("ann", &["rules", "history"]);
    assert!(
        history.starts_with("change 4: applied, revision 4") && history.contains("too strict"),
        "{history}"
    );
    assert!(history.contains("change 3: rolled back"), "{history}");

    let (status, said) = desk.run("bea", &["rules", "apply", &desk.rule(1)]);
    assert_eq!(status, 3, "{said}");
    let (status, said) = desk.run("ann", &["rules", "reject", "5"]);
    assert_eq!((status, said.contains("403")), (1, true), "of somebody else: {said}");
    desk.good("bea", &["rules", "reject", "5", "--reason", "a slip"]);
    let (status, said) = desk.run("cy", &["rules", "approve", "5"]);
    assert_eq!((status, said.contains("change 5 is rejected")), (1, true), "{said}");
}

#[test]
fn what_makes_no_sense_is_refused_with_all_reasons() {
    let desk = Desk::new();
    let wrong = "[[rules]]\nname = 'a'\nlimit = 1\nperiod = 'soon'\n[[overrides]]\nname = 'o'\nrule = 'b'\nlimit = 1\n";
    let wrong = write(desk.folder(), "wrong.toml", wrong);
    for verb in ["plan", "apply"] {
        let (status, said) = desk.run("ann", &["rules", verb, &wrong]);
        assert_eq!(status, 64, "{said}");
        assert!(said.contains("rules[\"a\"].period") && said.contains("overrides[\"o\"]"), "{said}");
    }
    let (status, said) = desk.run("ann", &["rules", "plan", "--delete", "rule/a"]);
    assert_eq!((status, said.contains("cannot delete what does not exist: rule \"a\"")), (1, true), "{said}");
    assert_eq!(desk.json("ann", &["rules", "list"])["revision"], 0, "nothing happened");
}

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
    let (status, said) = desk.run("ann", &["rules", "enforce", "per_user"]);
    assert_eq!((status, said.contains("--yes")), (1, true), "{said}");
    desk.good("ann", &["rules", "enforce", "per_user", "--yes"]);
    assert_eq!(desk.check("bob")["decision"], "deny");

    desk.good("ann", &["override", "set", "--rule", "per_user", "--key", "bob", "--limit", "9"]);
    assert_eq!(desk.check("bob")["rules"][0]["override"], "per_user:bob");
    assert!(desk.good("ann", &["override", "list"]).contains("per_user:bob"));
    desk.good("ann", &["override", "delete", "per_user:bob", "--yes"]);
    assert_eq!(desk.check("bob")["decision"], "deny");

    let block = ["--rule", "per_user", "--key", "eve"];
    let said = desk.good("ann", &[&["block"], &block[..], &["--for", "30m"]].concat());
    assert!(said.starts_with("blocked until "), "{said}");
    assert_eq!(desk.check("eve")["rules"][0]["emergency"], "block:per_user:eve");
    assert_eq!(desk.check("eve")["decision"], "deny");
    let (status, said) = desk.run("ann", &[&["block"], &block[..], &["--for", "2h"]].concat());
    assert_eq!((status, said.contains("for: 7200s is outside 1ms to 3600s")), (64, true), "{said}");
    desk.good("ann", &[&["unblock"], &block[..]].concat());
    assert_eq!(desk.check("eve")["decision"], "allow");
    let (status, said) = desk.run("ann", &[&["unblock"], &block[..]].concat());
    assert_eq!((status, said.contains("not blocked")), (1, true), "{said}");

    let row = desk.good("ann", &["rules", "get", "rule/per_user"]);
    assert!(row.starts_with("rule \"per_user\", version 3\n") && row.contains("mode = \"enforce\""), "{row}");
}

#[test]
fn what_other_limiters_were_told_becomes_rules() {
    let desk = Desk::new();
    let descriptors = "domain: edge\ndescriptors:\n  - key: user\n    rate_limit: { unit: hour, requests_per_unit: 7 }\n  \
                       - key: user\n    value: bob\n    rate_limit: { unit: hour, requests_per_unit: 8 }\n  \
                       - key: free\n    rate_limit: { unlimited: true }\n";
    let descriptors = write(desk.folder(), "descriptors.yaml", descriptors);
    let said = desk.good("ann", &["rules", "import", "envoy", &descriptors, "--yes"]);
    assert!(said.contains("left out: edge/free: unlimited"), "{said}");
    assert_eq!(["ann", "bob"].map(|user| desk.check(user)["rules"][0]["limit"].as_u64()), [Some(7), Some(8)]);

    let list =
        r#"{"data":[{"overrideId":"o","identifier":"eve*","limit":3,"duration":60000}],"pagination":{}}"#;
    let list = write(desk.folder(), "unkey.json", list);
    desk.good("ann", &["rules", "import", "unkey", &list, "--rule", "edge/user", "--yes"]);
    assert_eq!(desk.check("eve-1")["rules"][0]["limit"], 3);
    let (status, said) = desk.run("ann", &["rules", "import", "unkey", &descriptors, "--rule", "edge/user"]);
    assert_eq!(status, 64, "{said}");
}

#[test]
fn the_audit_is_shown_exported_and_verified() {
    let desk = Desk::new();
    let begun = desk.json("ann", &["audit", "verify"]);
    desk.good("ann", &["rules", "apply", &desk.rule(5), "--yes"]);
    let shown = desk.good("ann", &["audit", "show"]);
    assert!(shown.contains(" change.propose ") && shown.contains(" change.apply "), "{shown}");
    let end = desk.json("ann", &["audit", "verify"]);
    assert_eq!((&end["holds"], &end["entries"]), (&true.into(), &2.into()));
    let line = |verified: &Value| verified["checkpoint"].as_str().expect("a line").to_owned();
    desk.good("ann", &["audit", "verify", "--checkpoint", &line(&begun)]);

    let export = write(desk.folder(), "audit.jsonl", &desk.good("ann", &["audit", "show", "--json"]));
    desk.good("ann", &["audit", "verify", "--file", &export, "--checkpoint", &line(&end)]);
    let text = std::fs::read_to_string(&export).expect("the export");
    let forged = write(desk.folder(), "forged.jsonl", &text.replacen("token:", "tokem:", 1));
    let (status, said) = desk.run("ann", &["audit", "verify", "--file", &forged]);
    assert_eq!((status, said.contains("audit: entry 1 was changed")), (1, true), "{said}");
    let later = format!("tidegate-audit 3 {}", "ab".repeat(32));
    let (status, said) = desk.run("ann", &["audit", "verify", "--checkpoint", &later]);
    assert_eq!((status, said.contains("entry 3 is missing")), (1, true), "{said}");
}

#[test]
fn a_credential_of_the_store_opens_until_it_is_revoked() {
    let desk = Desk::new();
    let admit = |name: &str| {
        let body = format!(r#"{{"name":"{name}","role":"operator"}}"#);
        desk.ask("dan", "POST", "/v1/credentials", Some(&body))
    };
    let (_, made) = admit("eli");
    let token = made["token"].as_str().expect("a token");
    let said = desk.good(token, &["rules", "apply", &desk.rule(5), "--yes"]);
    assert!(said.contains("change 1: applied, revision 1, by eli"), "{said}");
    for taken in ["local", "token:0123456789ab", "tidegate: automatic"] {
        assert_eq!(admit(taken).0, 400, "{taken}");
    }
    let hash = made["credential"]["hash"].as_str().expect("a hash");
    let (_, all) = desk.ask("dan", "GET", "/v1/credentials", None);
    assert_eq!(all["credentials"][0]["name"], "eli");
    assert!(!all.to_string().contains(token), "told once");
    assert_eq!(desk.ask("dan", "DELETE", &format!("/v1/credentials/{hash}"), None).0, 200);
    let (status, said) = desk.run(token, &["rules", "list"]);
    assert_eq!((status, said.contains("401")), (1, true), "{said}");
}

#[test]
fn an_emergency_lasts_an_hour_unless_it_is_renewed_or_ended() {
    let desk = Desk::new();
    desk.good("ann", &["rules", "apply", &desk.rule(5), "--yes"]);
    let declare = |body: &str| desk.ask("ann", "POST", "/v1/emergencies", Some(body));
    let (status, declared) = declare(r#"{"action":"limit","limit":1,"period":"1h","for":"1m"}"#);
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
        (r#"{"action":"stop"}"#, ".action: "),
        (r#"{"action":"block","rule":"nothing"}"#, ".rule: "),
    ] {
        let (status, problem) = declare(wrong);
        let detail = problem["detail"].as_str().expect("words");
        assert_eq!((status, detail.contains(field)), (400, true), "{problem}");
    }
}

#[test]
fn what_changed_since_somebody_looked_is_a_conflict() {
    let desk = Desk::new();
    for limit in [5, 6] {
        desk.good("ann", &["rules", "apply", &desk.rule(limit), "--yes"]);
    }
    let body = r#"{"operations":[{"do":"delete","kind":"rule","name":"per_user"}],"base_revision":1}"#;
    let (status, problem) = desk.ask("bea", "POST", "/v1/rules/apply", Some(body));
    let detail = "conflict: changed in the meantime: rule \"per_user\" (revision 2)";
    assert_eq!((status, &problem["detail"]), (409, &detail.into()));
    assert_eq!(desk.json("ann", &["rules", "list"])["rows"][0]["version"], 2);
}
