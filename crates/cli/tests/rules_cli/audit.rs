//! The audit, and the credentials that it names.

use serde_json::Value;
use sqlx::Connection as _;

use crate::desk::Desk;
use crate::support::write;

#[test]
fn the_audit_is_shown_exported_and_verified() {
    let desk = Desk::new();
    let begun = desk.json("ann", &["audit", "verify"]);
    let nothing: [(&[&str], &str); 3] = [
        (&["audit", "show"], "no entries\n"),
        (&["rules", "history"], "no changes\n"),
        (&["override", "list"], "no overrides\n"),
    ];
    for (command, text) in nothing {
        assert_eq!(desk.good("ann", command), text);
    }
    desk.good("ann", &["rules", "apply", &desk.rule(5), "--yes"]);
    let shown = desk.good("ann", &["audit", "show"]);
    assert!(shown.contains(" change.propose ") && shown.contains(" change.apply "), "{shown}");
    let end = desk.json("ann", &["audit", "verify"]);
    assert_eq!((&end["holds"], &end["entries"]), (&true.into(), &2.into()));
    let line = |verified: &Value| verified["checkpoint"].as_str().expect("a line").to_owned();
    desk.good("ann", &["audit", "verify", "--checkpoint", &line(&begun)]);

    let export = write(desk.folder(), "audit.jsonl", &desk.good("ann", &["audit", "show", "--json"]));
    desk.good("ann", &["audit", "verify", "--file", &export, "--checkpoint", &line(&end)]);
    desk.good("ann", &["audit", "verify", "--file", &export]);
    let text = std::fs::read_to_string(&export).expect("the export");
    assert_eq!(text.lines().count(), 3, "two entries, and where they end");
    for (left, missing) in [(1, 2), (2, 3)] {
        let cut: String = text.split_inclusive('\n').take(left).collect();
        let cut = write(desk.folder(), "cut.jsonl", &cut);
        let (status, printed) = desk.run("ann", &["audit", "verify", "--file", &cut]);
        assert_eq!(
            (status, printed.contains(&format!("entry {missing} may be missing"))),
            (1, true),
            "{printed}"
        );
    }
    let later = desk.good("ann", &["audit", "show", "--json", "--after", "1"]);
    assert_eq!(later.lines().count(), 1, "no export that could be followed: {later}");
    let forged = write(desk.folder(), "forged.jsonl", &text.replacen("token:", "tokem:", 1));
    let (status, printed) = desk.run("ann", &["audit", "verify", "--file", &forged]);
    assert_eq!((status, printed.contains("audit: entry 1 was changed")), (1, true), "{printed}");
    let later = format!("tidegate-audit 3 {}", "ab".repeat(32));
    let (status, printed) = desk.run("ann", &["audit", "verify", "--checkpoint", &later]);
    assert_eq!((status, printed.contains("entry 3 is missing")), (1, true), "{printed}");
}

#[test]
fn audit_export_has_the_stored_end_despite_deleted_entries() {
    let desk = Desk::new();
    for limit in [5, 6, 7] {
        desk.good("ann", &["rules", "apply", &desk.rule(limit), "--yes"]);
    }
    let url = format!("sqlite:{}", desk.folder().join("rules.db").display());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let mut connection = sqlx::SqliteConnection::connect(&url).await.expect("a connection");
        let cut = "DELETE FROM tidegate_audit WHERE sequence > 3";
        sqlx::raw_sql(cut).execute(&mut connection).await.expect("cut off");
    });
    let shown = desk.good("ann", &["audit", "show", "--json"]);
    assert_eq!(shown.lines().count(), 4, "{shown}");
    let last = shown.lines().last().expect("a line");
    assert!(last.starts_with(r#"{"checkpoint":"tidegate-audit 6 "#), "{last}");
    let export = write(desk.folder(), "audit.jsonl", &shown);
    let (status, printed) = desk.run("ann", &["audit", "verify", "--file", &export]);
    assert_eq!(
        (status, printed.contains("entry 4 is missing: there were 6 entries")),
        (1, true),
        "{printed}"
    );
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
    let printed = desk.good(token, &["rules", "apply", &desk.rule(5), "--yes"]);
    assert!(printed.contains("change 1: applied, revision 1, by eli"), "{printed}");
    for taken in ["local", "token:0123456789ab", "tidegate: automatic"] {
        assert_eq!(admit(taken).0, 400, "{taken}");
    }
    let hash = made["credential"]["hash"].as_str().expect("a hash");
    let (_, all) = desk.ask("dan", "GET", "/v1/credentials", None);
    assert_eq!(all["credentials"][0]["name"], "eli");
    assert!(!all.to_string().contains(token), "told once");
    assert_eq!(desk.ask("dan", "DELETE", &format!("/v1/credentials/{hash}"), None).0, 200);
    let (status, printed) = desk.run(token, &["rules", "list"]);
    assert_eq!((status, printed.contains("401")), (1, true), "{printed}");
}

#[test]
fn credentials_are_made_used_listed_and_revoked() {
    let desk = Desk::new();
    let made = desk.json("dan", &["credential", "new", "--name", "eve", "--role", "viewer"]);
    let token = made["token"].as_str().expect("a token").to_owned();
    desk.good(&token, &["rules", "list"]);
    let listed = desk.good("dan", &["credential", "list"]);
    let line = listed.lines().find(|line| line.contains("  eve   viewer")).expect("it is listed");
    let hash = line.split_whitespace().next().expect("a hash");
    assert!(!listed.contains(&token), "nobody is told it again");
    assert_eq!(desk.good("dan", &["credential", "revoke", hash]), "revoked\n");
    let (status, printed) = desk.run(&token, &["rules", "list"]);
    assert!(status == 1 && printed.contains("401"), "{status}: {printed}");
    let (status, printed) = desk.run("ann", &["credential", "list"]);
    assert!(status == 1 && printed.contains("403"), "{status}: {printed}");
}

#[test]
fn a_server_without_tokens_warns_that_it_checks_none() {
    let warning = "warning: this server has no tokens in its configuration, so it checks none";
    let new = ["credential", "new", "--name", "eve", "--role", "viewer"];
    let folder = tempfile::tempdir().expect("a folder");
    let rules = format!("sqlite:{}", folder.path().join("rules.db").display());
    let open = Desk::of(&[], &rules, folder, &[]);
    let printed = open.good("nobody", &new);
    assert!(printed.contains(warning), "{printed}");
    let printed = Desk::new().good("dan", &new);
    assert!(!printed.contains("warning"), "{printed}");
}
