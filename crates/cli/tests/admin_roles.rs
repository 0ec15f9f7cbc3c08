//! Access to the admin listener: every route with every role, compared with the table in the
//! documentation.

#![allow(clippy::expect_used, clippy::panic, reason = "a helper of tests may panic as a test may")]
#![allow(unreachable_pub, reason = "what test programs share is public in each of them")]

mod support;

use support::raw::{request, send};
use support::{serve, token_entry, write};

/// The columns of the table: no token, and tokens named after their roles.
const COLUMNS: [Option<&str>; 7] = [
    None,
    Some("client"),
    Some("viewer"),
    Some("operator"),
    Some("approver"),
    Some("admin"),
    Some("tenants"),
];

/// A row of the table: method, path, cells.
type Row = (String, String, Vec<String>);

fn table() -> Vec<Row> {
    let text = include_str!("../../../docs/control-plane.md");
    let row = |line: &str| {
        let (route, cells) = line.strip_prefix("| `")?.split_once('`')?;
        let (method, path) = route.split_once(' ')?;
        let cells: Vec<String> = cells.split('|').map(|cell| cell.trim().to_owned()).collect();
        let cells = cells.get(1..=COLUMNS.len())?.to_vec();
        ["GET", "POST", "DELETE"].contains(&method).then(|| (method.to_owned(), path.to_owned(), cells))
    };
    text.lines().filter_map(row).collect()
}

/// Fills in the path of a route. The request is authorized but has no effect, because no body is
/// complete.
fn target(path: &str) -> String {
    let path = path.replace("{kind}", "rule").replace("{name}", "nothing").replace("{hash}", &"0".repeat(64));
    path.replace("/changes/{id}", "/changes/1").replace("{id}", "nothing")
}

#[test]
fn every_route_admits_exactly_the_documented_roles() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut config = "[[tenants]]\nname = 'acme'\n".to_owned();
    for role in COLUMNS.into_iter().flatten() {
        config += &match role {
            "tenants" => token_entry(role, "acme", "admin"),
            role => token_entry(role, "", role),
        };
    }
    let config = write(folder.path(), "tidegate.toml", &config);
    let rules = format!("sqlite:{}", folder.path().join("rules.db").display());
    let data = folder.path().join("data").to_string_lossy().into_owned();
    let server = serve(&["--config", &config, "--rules", &rules, "--data-dir", &data]);
    let ask = |method: &str, target: &str, token: Option<&str>, body: &str| {
        let value = token.map(|token| format!("Bearer {token}"));
        let fields: Vec<(&str, &str)> = value.iter().map(|value| ("authorization", value.as_str())).collect();
        let body = (method == "POST" && token.is_some()).then_some(body);
        send(server.address("admin"), &request(method, target, &fields, body))
    };
    let rule = r#"{"confirmed":true,"operations":[
        {"do":"put","kind":"rule","name":"a","body":{"key":["user"],"limit":1,"period":"1h"}}]}"#;
    assert_eq!(ask("POST", "/v1/rules/apply", Some("admin"), rule).status, 200, "a change of somebody else");

    let rows = table();
    assert!(rows.len() > 20, "the table was not found");
    let mut wrong = Vec::new();
    for (method, path, cells) in &rows {
        for (column, cell) in COLUMNS.into_iter().zip(cells) {
            let reply = ask(method, &target(path), column, "{}");
            let got = match reply.status {
                401 => "401",
                403 => "403",
                405 | 500.. => "broken",
                _ => "✓",
            };
            if got != cell {
                wrong.push(format!("{method} {path} as {column:?}: {got}, not {cell}: {}", reply.body));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn rules_of_a_file_are_not_changed_here() {
    let folder = tempfile::tempdir().expect("a folder");
    let rules = write(folder.path(), "rules.toml", "rules = []");
    let server = serve(&["--rules", &rules]);
    for (method, path, _) in
        table().iter().filter(|(_, path, _)| path.contains("rules") || path.contains("audit"))
    {
        let body = match path.as_str() {
            "/v1/rules/plan" => r#"{"operations":[]}"#,
            "/v1/rules/rollback" => r#"{"change":1}"#,
            _ => "{}",
        };
        let body = (method == "POST").then_some(body);
        let reply = send(server.address("admin"), &request(method, &target(path), &[], body));
        assert_eq!(reply.status, 409, "{method} {path}: {}", reply.body);
        assert!(reply.body.contains(&format!("rules come from the file {rules}: edit it")), "{}", reply.body);
    }
    let server = serve(&[]);
    let reply = send(server.address("admin"), &request("GET", "/v1/rules", &[], None));
    let detail = "this server has no rules: start it with --rules FILE or --rules sqlite:FILE";
    assert_eq!((reply.status, reply.body.contains(detail)), (409, true), "{}", reply.body);
}
