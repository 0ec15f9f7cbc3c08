//! Changes reach every server, whether made in the store or through one server.

use sqlx::Connection as _;
use tidegate_rules::store::CHANNEL;
use tidegate_testkit::{Postgres, START_TIME_MAX, Server, Traffic, wait_until};

use crate::fixture::{ControlFixture, metrics, passed, per_user, serve, wait_for, wait_for_metric};
use crate::support::raw::{request, send};

#[test]
fn five_servers_enforce_the_rules_of_their_store() {
    let postgres = Postgres::start();
    let fixture = ControlFixture::open(&postgres.url("postgres"));
    let folder = tempfile::tempdir().expect("a folder");
    // No server polls during this test: changes arrive by notification only.
    let without_polls = ["--rules-poll", "1d", "--rules-reconcile", "1d"];
    let start =
        |at: usize| serve(&postgres.url("postgres"), &folder.path().join(at.to_string()), &without_polls);
    let servers: Vec<Server> = (0..5).map(start).collect();
    let all_hold = |version: &str| servers.iter().for_each(|server| wait_for(server, version));

    fixture.put(&[("per_user", &per_user(2))]);
    all_hold("r1e0");
    assert!(servers.iter().all(|server| passed(server, "bob", 5) == 2));

    // A change through one server adds a rule and raises this one. Spent units stay spent.
    let change = format!(
        r#"{{"operations": [{{"do": "put", "kind": "rule", "name": "per_user", "body": {}}},
        {{"do": "put", "kind": "rule", "name": "other", "body": {{"key": ["team"], "limit": 1, "period": "1h"}}}}],
        "base_revision": 1, "confirmed": true}}"#,
        per_user(3)
    );
    let reply = send(servers[3].address("admin"), &request("POST", "/v1/rules/apply", &[], Some(&change)));
    assert_eq!(reply.status, 200, "{}", reply.body);
    all_hold("r2e0");
    assert!(servers.iter().all(|server| passed(server, "bob", 5) == 1), "two of three units are spent");

    fixture.block("per_user");
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
fn server_catches_up_with_changes_after_an_outage() {
    let postgres = Postgres::start();
    let (fixture, proxy, url) = ControlFixture::behind_a_proxy(&postgres);
    let folder = tempfile::tempdir().expect("a folder");
    let server = serve(&url, folder.path(), &["--rules-reconcile", "1s"]);
    wait_for(&server, "r1e0");

    proxy.set(Traffic::CutAnswers);
    fixture.put(&[("per_user", &per_user(5))]);
    wait_for_metric(&server, "tidegate_rules_store_up 0");
    wait_for(&server, "r1e0");
    assert_eq!(passed(&server, "bob", 5), 2, "it goes on with what it knows");

    proxy.set(Traffic::Pass);
    wait_for(&server, "r2e0");
    wait_for_metric(&server, "tidegate_rules_store_up 1");
}

/// A connection may be dead without either end noticing. Then neither reconnects, and no
/// notification arrives.
#[test]
fn reconciliation_finds_changes_of_a_dead_connection() {
    let postgres = Postgres::start();
    let (fixture, proxy, url) = ControlFixture::behind_a_proxy(&postgres);
    let folder = tempfile::tempdir().expect("a folder");
    let start = |name: &str, reconcile: &str| {
        let seldom = ["--rules-poll", "1d", "--rules-reconcile", reconcile];
        serve(&url, &folder.path().join(name), &seldom)
    };
    let (comparing, listening) = (start("comparing", "1s"), start("listening", "1d"));
    wait_until("both to listen", START_TIME_MAX, || listeners(&postgres, &fixture) == 2);
    // Two changes in sequence: a server that gets the second by notification has finished its own
    // first poll.
    for (limit, version) in [(3, "r2e0"), (4, "r3e0")] {
        fixture.put(&[("per_user", &per_user(limit))]);
        for server in [&comparing, &listening] {
            wait_for(server, version);
        }
    }

    // Only notifications contain the name of the channel.
    proxy.set(Traffic::AnswersUpTo(CHANNEL.as_bytes()));
    fixture.put(&[("per_user", &per_user(5))]);
    wait_until("neither to hear of it", START_TIME_MAX, || proxy.keeping() == 2);
    wait_for(&comparing, "r4e0");
    wait_for(&listening, "r3e0");
    for server in [&comparing, &listening] {
        assert!(metrics(server).contains("tidegate_rules_store_up 1\n"), "nothing was cut");
    }
    // The delayed notification is all that the other server lacked.
    proxy.set(Traffic::Pass);
    wait_for(&listening, "r4e0");
}

/// Returns how many connections of servers listen for notifications.
fn listeners(postgres: &Postgres, fixture: &ControlFixture) -> i64 {
    fixture.runtime.block_on(async {
        let mut connection =
            sqlx::PgConnection::connect(&postgres.url("postgres")).await.expect("a connection");
        let count = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'";
        sqlx::query_scalar(count).fetch_one(&mut connection).await.expect("a number")
    })
}

#[test]
fn reconciliation_finds_writes_without_a_revision() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("rules.db").display());
    let fixture = ControlFixture::open(&url);
    fixture.put(&[("per_user", &per_user(2))]);
    let server = serve(&url, &folder.path().join("data"), &["--rules-reconcile", "1s"]);
    assert_eq!(passed(&server, "bob", 5), 2);
    let statement = format!("UPDATE tidegate_rows SET body = '{}'", per_user(50));
    fixture.runtime.block_on(async {
        let mut connection = sqlx::SqliteConnection::connect(&url).await.expect("a connection");
        sqlx::raw_sql(sqlx::AssertSqlSafe(statement)).execute(&mut connection).await.expect("done");
    });
    let mut users = 0;
    wait_until("the new limit", START_TIME_MAX, || {
        users += 1;
        passed(&server, &users.to_string(), 5) == 5
    });
}
