//! A store that a test changes, and servers that follow it.

use std::path::Path;
use std::time::SystemTime;

use serde_json::Value;
use tidegate_rules::change::{Change, ChangeNeeds, ChangeState, Operation, Proposal};
use tidegate_rules::rows::{EmergencyRow, RowKind};
use tidegate_rules::store::{Address, Attribution, Store};
use tidegate_testkit::{Postgres, Proxy, START_TIME_MAX, Server, wait_until};
use tokio::runtime::Runtime;

use crate::support::raw::{Reply, request, send};

/// The actor of the changes.
pub const AUTHOR: &str = "ada";

/// A rule store that the test changes directly, not through a server.
pub struct ControlFixture {
    pub runtime: Runtime,
    pub store: Store,
}

impl ControlFixture {
    pub fn open(url: &str) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let address: Address = url.parse().expect("an address");
        let store = runtime.block_on(Store::open(&address)).expect("a store");
        Self { runtime, store }
    }

    /// A store in which `per_user` lets two pass, and the way to it through a proxy.
    pub fn behind_a_proxy(postgres: &Postgres) -> (Self, Proxy, String) {
        let fixture = Self::open(&postgres.url("postgres"));
        fixture.put(&[("per_user", &per_user(2))]);
        let proxy = Proxy::start(([127, 0, 0, 1], postgres.port()).into());
        let url = format!("postgres://tidegate:secret@{}/postgres", proxy.address());
        (fixture, proxy, url)
    }

    /// Puts rules with these names and bodies, as one change.
    pub fn put(&self, rules: &[(&str, &str)]) -> Change {
        self.make(rules.iter().map(|(name, body)| put(RowKind::Rule, name, body)).collect())
    }

    /// Makes a change.
    pub fn make(&self, operations: Vec<Operation>) -> Change {
        self.runtime.block_on(async {
            let base_revision = self.store.revisions().await.expect("heads").revision;
            let proposal = Proposal::new(base_revision, "a test", operations);
            self.store.apply_new(&proposal, false, by()).await.expect("applied")
        })
    }

    /// Stores a change of `author` that waits for approval, and returns its id.
    pub fn waiting(&self, author: &str) -> u64 {
        let operations = vec![put(RowKind::Rule, "waits", &per_user(1))];
        let needs = ChangeNeeds::Approver;
        let proposal = Proposal { needs, ..Proposal::new(0, "a test", operations) };
        let attribution = Attribution { by: author, ..by() };
        self.runtime.block_on(self.store.propose(&proposal, attribution)).expect("kept").id
    }

    /// The state of a change.
    pub fn state(&self, change: u64) -> ChangeState {
        self.runtime.block_on(self.store.change(change)).expect("kept").state
    }

    /// Blocks a rule for longer than a test lasts.
    pub fn block(&self, rule: &str) {
        self.emergency(&format!(r#"{{"action":"block","rule":"{rule}"}}"#));
    }

    /// Declares an emergency for longer than a test lasts.
    pub fn emergency(&self, body: &str) {
        let (id, body) = ("stop".to_owned(), body.to_owned());
        let emergency = EmergencyRow { id, body, expires_ms: by().now_ms + 600_000 };
        self.runtime.block_on(self.store.put_emergency(&emergency, by())).expect("put");
    }

    /// Returns the actor and action of each audit entry, in order.
    pub fn audit(&self) -> Vec<(String, String)> {
        let entries = self.runtime.block_on(self.store.audit(0, 1_000)).expect("an audit");
        entries.into_iter().map(|entry| (entry.actor, entry.action)).collect()
    }
}

#[expect(clippy::disallowed_methods, reason = "servers judge changes by when they were made")]
pub fn by() -> Attribution<'static> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
    Attribution { by: AUTHOR, now_ms: u64::try_from(now.as_millis()).expect("fits") }
}

pub fn put(kind: RowKind, name: &str, body: &str) -> Operation {
    Operation::Put { kind, name: name.to_owned(), body: body.to_owned() }
}

/// So much for each user in an hour.
pub fn per_user(limit: u32) -> String {
    format!(r#"{{"key":["user"],"limit":{limit},"period":"1h"}}"#)
}

/// Starts a server that follows a store, with `folder` as its data directory.
pub fn serve(url: &str, folder: &Path, more: &[&str]) -> Server {
    let data = folder.to_string_lossy();
    crate::support::serve(&[&["--rules", url, "--data-dir", &*data], more].concat())
}

pub fn check(server: &Server, user: &str) -> Reply {
    let body = format!(r#"{{"dimensions":{{"user":"{user}"}}}}"#);
    send(server.address("http"), &request("POST", "/v1/check", &[], Some(&body)))
}

fn answer(server: &Server, user: &str) -> Value {
    serde_json::from_str(&check(server, user).body).expect("JSON")
}

/// How many of so many requests of a user pass.
pub fn passed(server: &Server, user: &str, requests: usize) -> usize {
    (0..requests).filter(|_| answer(server, user)["decision"] == "allow").count()
}

/// Waits until a server decides by these revisions of the store.
pub fn wait_for(server: &Server, version: &str) {
    wait_until(&format!("{version} to be in force"), START_TIME_MAX, || {
        answer(server, "looks")["rules_version"] == version
    });
}

pub fn metrics(server: &Server) -> String {
    send(server.address("admin"), &request("GET", "/metrics", &[], None)).body
}

/// Waits for a line of the metrics.
pub fn wait_for_metric(server: &Server, line: &str) {
    let line = format!("{line}\n");
    wait_until(&format!("metrics to say {line:?}"), START_TIME_MAX, || metrics(server).contains(&line));
}
