//! Changes reach every server, whoever made them.

use sqlx::Connection as _;
use tidegate_testkit::{Postgres, Proxy, START_TIME_MAX, Server, Traffic, wait_until};

use crate::ground::{Ground, metrics, passed, per_user, serve, wait_for, wait_for_metric};

#[test]
fn five_servers_enforce_what_their_store_holds() {
    let postgres = Postgres::start();
    let ground = Ground::open(&postgres.url("postgres"));
    let folder = tempfile::tempdir().expect("a folder");
    let start = |at: usize| serve(&postgres.url("postgres"), &folder.path().join(at.to_string()), &[]);
    let servers: Vec<Server> = (0..5).map(start).collect();
    let all_hold = |version: &str| servers.iter().for_each(|server| wait_for(server, version));

    ground.put(&[("per_user", &per_user(2))]);
    all_hold("r1e0");
    assert!(servers.iter().all(|server| passed(server, "bob", 5) == 2));

    // Another rule, and more for this one: what was spent stays spent.
    ground.put(&[("per_user", &per_user(3)), ("other", r#"{"key":["team"],"limit":1,"period":"1h"}"#)]);
    all_hold("r2e0");
    assert!(servers.iter().all(|server| passed(server, "bob", 5) <= 1), "a swap gives nobody a new burst");

    ground.block("per_user");
    all_hold("r2e1");
    assert!(servers.iter().all(|server| passed(server, "carol", 3) == 0));
    for server in &servers {
        for line in
            ["tidegate_rules_revision 2", "tidegate_rules_emergency_revision 1", "tidegate_rules_store_up 1"]
        {
            wait_for_metric(server, line);
        }
        wait_for_metric(server, "tidegate_rules_lag_seconds_count 3");
        assert!(metrics(server).contains("tidegate_rules_reloads_total{outcome=\"refused\"} 0\n"));
    }
}

#[test]
fn what_a_server_could_not_hear_it_catches_up_with() {
    let postgres = Postgres::start();
    let ground = Ground::open(&postgres.url("postgres"));
    ground.put(&[("per_user", &per_user(2))]);
    let proxy = Proxy::start(([127, 0, 0, 1], postgres.port()).into());
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("postgres://tidegate:secret@{}/postgres", proxy.address());
    let server = serve(&url, folder.path(), &["--rules-reconcile", "1s"]);
    wait_for(&server, "r1e0");

    proxy.set(Traffic::CutAnswers);
    ground.put(&[("per_user", &per_user(5))]);
    wait_for_metric(&server, "tidegate_rules_store_up 0");
    wait_for(&server, "r1e0");
    assert_eq!(passed(&server, "bob", 5), 2, "it goes on with what it knows");

    proxy.set(Traffic::Pass);
    wait_for(&server, "r2e0");
    wait_for_metric(&server, "tidegate_rules_store_up 1");
}

#[test]
fn what_is_written_past_the_revisions_is_found_when_everything_is_compared() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("rules.db").display());
    let ground = Ground::open(&url);
    ground.put(&[("per_user", &per_user(2))]);
    let server = serve(&url, &folder.path().join("data"), &["--rules-reconcile", "1s"]);
    assert_eq!(passed(&server, "bob", 5), 2);
    let statement = format!("UPDATE tidegate_rows SET body = '{}'", per_user(50));
    ground.runtime.block_on(async {
        let mut connection = sqlx::SqliteConnection::connect(&url).await.expect("a connection");
        sqlx::raw_sql(sqlx::AssertSqlSafe(statement)).execute(&mut connection).await.expect("done");
    });
    let mut users = 0;
    wait_until("the new limit", START_TIME_MAX, || {
        users += 1;
        passed(&server, &users.to_string(), 5) == 5
    });
}
