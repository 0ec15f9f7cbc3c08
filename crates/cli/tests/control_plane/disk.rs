//! Servers on a full disk: they decide on with the rules that they have, acknowledge nothing that
//! is lost, and are back to normal soon after the disk has room, without a restart.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tidegate_testkit::{ALWAYS, DiskFault, FaultLibrary, FaultSwitch, START_TIME_MAX, Server, wait_until};

use crate::fixture::{metrics, passed, per_user, wait_for_metric};
use crate::support::raw::{Reply, request, send};
use crate::support::tidegate;

/// Time from the end of the faults until everything works again.
const RECOVERY_MAX: Duration = Duration::from_secs(5);

/// A disk that can be full, and the servers on it.
struct TestDisk {
    folder: TempDir,
    library: FaultLibrary,
    switch: FaultSwitch,
}

impl TestDisk {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(folder.path().join("disk")).expect("a folder");
        let library = FaultLibrary::build(folder.path());
        let switch = FaultSwitch::create(&folder.path().join("control"));
        Self { folder, library, switch }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join("disk").join(name)
    }

    /// Starts a server with its data folder on the disk, and its log in a file that is not.
    fn serve(&self, name: &str, more: &[&str]) -> Server {
        let mut command = tidegate(&[]);
        let (disk, control) = (self.folder.path().join("disk"), self.folder.path().join("control"));
        self.library.preload(&mut command, &disk, &control);
        let log = File::options().append(true).create(true).open(self.log_path(name)).expect("a file");
        let data = self.path(name).to_string_lossy().into_owned();
        let arguments = ["--data-dir", &data, "--log-sample", "0", "--workers", "1"];
        command.stderr(log);
        Server::start_as(command, &[&arguments, more].concat())
    }

    fn log_path(&self, name: &str) -> PathBuf {
        self.folder.path().join(format!("{name}.log"))
    }

    fn fill(&self) {
        self.switch.begin(&[DiskFault::Full], ALWAYS, 1);
    }
}

/// How often a server has logged a text.
fn logged(log: &Path, text: &str) -> usize {
    std::fs::read_to_string(log).expect("a log").matches(text).count()
}

fn apply(server: &Server, limit: u32) -> Reply {
    let base_revision = number(server, "tidegate_rules_revision");
    let change = format!(
        r#"{{"operations": [{{"do": "put", "kind": "rule", "name": "per_user", "body": {}}}],
            "base_revision": {base_revision}, "confirmed": true}}"#,
        per_user(limit)
    );
    send(server.address("admin"), &request("POST", "/v1/rules/apply", &[], Some(&change)))
}

fn fields(identifier: &str, limit: u64) -> Value {
    json!({"namespace": "emails", "identifier": identifier, "limit": limit, "duration": 60_000})
}

fn call(server: &Server, endpoint: &str, identifier: &str, limit: u64) -> Reply {
    let body = fields(identifier, limit).to_string();
    let path = format!("/v2/ratelimit.{endpoint}");
    send(server.address("http"), &request("POST", &path, &[], Some(&body)))
}

/// Sets one override for each value, and returns the identifiers of those that were acknowledged.
fn set_overrides(server: &Server, values: std::ops::Range<u64>) -> Vec<String> {
    let set = |value: u64| (format!("id-{value}"), call(server, "setOverride", &format!("id-{value}"), 70));
    values.map(set).filter(|(_, reply)| reply.status == 200).map(|(identifier, _)| identifier).collect()
}

/// The limit that applies to an identifier.
fn limit(server: &Server, identifier: &str) -> u64 {
    let reply = call(server, "limit", identifier, 1);
    let decided: Value = serde_json::from_str(&reply.body).expect("JSON");
    decided["data"]["limit"].as_u64().expect("a number")
}

fn number(server: &Server, metric: &str) -> u64 {
    let metrics = metrics(server);
    let value = metrics.lines().find_map(|line| line.strip_prefix(metric));
    value.and_then(|value| value.trim().parse().ok()).unwrap_or_else(|| panic!("{metric}: {metrics}"))
}

/// The number of records about a user that `why` finds.
fn found(server: &Server, user: &str) -> usize {
    let url = server.url("admin", "");
    let why = ["why", "--server", &url, "--key", &format!("user:{user}"), "--records", "100", "--json"];
    let output = tidegate(&why).output().expect("it runs");
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    answer["records"].as_array().expect("records").len()
}

const WRITTEN: &str = "tidegate_log_records_total{kind=\"denial\"}";
const LOST: &str = "tidegate_log_dropped_total{kind=\"denial\"}";

#[test]
fn servers_on_a_full_disk_decide_on_and_are_back_when_it_has_room() {
    let disk = TestDisk::new();
    let url = format!("sqlite:{}", disk.path("rules.db").display());
    let start = |name: &str| disk.serve(name, &["--rules", &url]);
    let (mut one, mut other) = (start("one"), start("other"));
    let applied = apply(&one, 2);
    assert_eq!(applied.status, 200, "{}", applied.body);
    // Not by a check, which might be denied.
    for server in [&one, &other] {
        wait_for_metric(server, "tidegate_rules_revision 1");
    }
    let mut kept = set_overrides(&one, 0..10);
    assert_eq!(kept.len(), 10);
    assert_eq!(passed(&one, "bob", 5), 2);
    wait_until("the denials to be counted", START_TIME_MAX, || number(&one, WRITTEN) == 3);

    disk.fill();
    let refused = apply(&one, 3);
    assert!(refused.status >= 500, "{} {}", refused.status, refused.body);
    kept.extend(set_overrides(&one, 10..40));
    for server in [&one, &other] {
        assert_eq!(passed(server, "carol", 5), 2, "they decide by the rules that they have");
        wait_for_metric(server, "tidegate_log_up 0");
    }
    wait_for_metric(&one, "tidegate_rules_store_up 0");
    assert_eq!(send(one.address("admin"), &request("GET", "/readyz", &[], None)).status, 200);

    disk.switch.end();
    wait_until("a change to be applied", RECOVERY_MAX, || apply(&one, 4).status == 200);
    let revision = number(&one, "tidegate_rules_revision");
    for server in [&one, &other] {
        wait_until("the change to be in force, and all to be up", RECOVERY_MAX, || {
            let metrics = metrics(server);
            [
                "tidegate_rules_store_up 1\n",
                "tidegate_log_up 1\n",
                &format!("tidegate_rules_revision {revision}\n"),
            ]
            .iter()
            .all(|line| metrics.contains(*line))
        });
        assert_eq!(passed(server, "dave", 6), 4);
    }
    let after = set_overrides(&other, 40..50);
    assert_eq!(after.len(), 10);
    kept.extend(after);
    let decided = |server: &Server| number(server, WRITTEN) + number(server, LOST);
    wait_until("all denials to be counted", START_TIME_MAX, || decided(&one) == 3 + 3 + 2);
    let written = usize::try_from(number(&one, WRITTEN)).expect("few");
    let there: usize = ["bob", "carol", "dave"].map(|user| found(&one, user)).iter().sum();
    assert!(there >= written, "{written} denials are counted as written, and `why` finds {there}");
    assert_eq!(found(&one, "dave"), 2);

    for (name, text) in [
        ("one", "the store of rules takes no writes"),
        ("one", "the store of rules is there again"),
        ("one", "cannot write the decision log"),
        ("one", "the decision log is written again"),
        ("other", "cannot write the decision log"),
    ] {
        assert_eq!(logged(&disk.log_path(name), text), 1, "{name}: {text}");
    }
    assert_eq!([one.process.terminate(), other.process.terminate()], [Some(0); 2]);
    let one = start("one");
    for identifier in &kept {
        assert_eq!(limit(&one, identifier), 70, "{identifier} was acknowledged");
    }
    assert_eq!(number(&one, "tidegate_rules_revision"), revision);
}

#[test]
fn overrides_of_one_server_survive_a_full_disk() {
    let disk = TestDisk::new();
    let mut server = disk.serve("alone", &[]);
    let mut kept = set_overrides(&server, 0..10);
    assert_eq!(kept.len(), 10);

    disk.fill();
    kept.extend(set_overrides(&server, 10..70));
    assert!(kept.len() < 70, "a full disk takes not everything");
    wait_for_metric(&server, "tidegate_overrides_store_up 0");
    assert_eq!(limit(&server, "id-1"), 70);

    disk.switch.end();
    wait_until("the store to be up again", RECOVERY_MAX, || {
        metrics(&server).contains("tidegate_overrides_store_up 1\n")
    });
    let after = set_overrides(&server, 70..80);
    assert_eq!(after.len(), 10);
    kept.extend(after);
    assert_eq!(logged(&disk.log_path("alone"), "the store of overrides in `data_dir` fails"), 1);
    assert_eq!(logged(&disk.log_path("alone"), "the store of overrides in `data_dir` works again"), 1);

    assert_eq!(server.process.terminate(), Some(0));
    let server = disk.serve("alone", &[]);
    for identifier in &kept {
        assert_eq!(limit(&server, identifier), 70, "{identifier} was acknowledged");
    }
}
