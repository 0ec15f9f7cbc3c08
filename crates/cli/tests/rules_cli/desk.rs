//! A server on a rule store, and the users of its command line.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::ops::Range;
use std::path::Path;
use std::process::Output;
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
use tidegate_testkit::{START_TIME_MAX, Server, wait_until};

use crate::support::raw::{request, send};
use crate::support::terminal::{TerminalRun, run_at_terminal};
use crate::support::{serve, tidegate, token_entry, write};

/// How long a test's load may take until a sample of it is large enough.
pub(crate) const SAMPLED_TIME_MAX: Duration = Duration::from_mins(5);

/// Users between two looks at whether a sample is large enough, and requests on their way at once.
pub(crate) const STRANGERS: u32 = 30_000;
pub(crate) const PIPELINED: u32 = 100;

/// A request of a user that leaves its connection open.
pub(crate) fn pipelined(user: u32) -> String {
    let body = format!(r#"{{"dimensions":{{"user":"{user}"}}}}"#);
    let bytes = request("POST", "/v1/check", &[("authorization", "Bearer app")], Some(&body));
    String::from_utf8(bytes).expect("text").replace("Connection: close\r\n", "")
}

/// A server on a store of its own, with people of several roles.
pub(crate) struct Desk {
    pub(crate) server: Server,
    pub(crate) folder: TempDir,
}

impl Desk {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let rules = format!("sqlite:{}", folder.path().join("rules.db").display());
        Self::on(&rules, folder)
    }

    pub(crate) fn on(rules: &str, folder: TempDir) -> Self {
        Self::logging(rules, folder, &["--log-sample", "1"])
    }

    pub(crate) fn logging(rules: &str, folder: TempDir, log: &[&str]) -> Self {
        let people = [
            ("ann", "operator"),
            ("bea", "approver"),
            ("cy", "approver"),
            ("dan", "admin"),
            ("app", "client"),
        ];
        Self::of(&people, rules, folder, log)
    }

    /// A server on which only an admin may approve.
    pub(crate) fn of_one_admin() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let rules = format!("sqlite:{}", folder.path().join("rules.db").display());
        let people = [("ann", "operator"), ("dan", "admin"), ("app", "client")];
        Self::of(&people, &rules, folder, &["--log-sample", "1"])
    }

    pub(crate) fn of(people: &[(&str, &str)], rules: &str, folder: TempDir, log: &[&str]) -> Self {
        let config: String = people.iter().map(|(name, role)| token_entry(name, "", role)).collect();
        let config = write(folder.path(), "tidegate.toml", &config);
        let data = folder.path().join("data").to_string_lossy().into_owned();
        let common = ["--config", &config, "--rules", rules, "--data-dir", &data, "--workers", "3"];
        // The requests of a test come at once.
        let evidence = if log.contains(&"--log-evidence") { &[][..] } else { &["--log-evidence", "0s"] };
        let server = serve(&[&common, evidence, log].concat());
        Self { server, folder }
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the exit status of a command and its output, standard error included.
    pub(crate) fn run(&self, who: &str, arguments: &[&str]) -> (i32, String) {
        let url = self.server.url("admin", "");
        let output: Output =
            tidegate(&[arguments, &["--server", &url, "--token", who]].concat()).output().expect("it runs");
        let printed = [output.stdout, output.stderr].concat();
        (output.status.code().expect("no signal"), String::from_utf8(printed).expect("text"))
    }

    /// The same for a command on its own terminal, with this answer to its question.
    pub(crate) fn run_at_terminal(&self, who: &str, arguments: &[&str], answer: &[u8]) -> (i32, String) {
        let url = self.server.url("admin", "");
        let mut command = tidegate(&[arguments, &["--server", &url, "--token", who]].concat());
        command.env("NO_COLOR", "1");
        let TerminalRun { status, printed, asked } = run_at_terminal(command, answer);
        assert!(asked, "there was no question: {printed}");
        (status, printed)
    }

    /// The same, of a command that has to work.
    pub(crate) fn good(&self, who: &str, arguments: &[&str]) -> String {
        let (status, printed) = self.run(who, arguments);
        assert_eq!(status, 0, "{arguments:?}: {printed}");
        printed
    }

    pub(crate) fn json(&self, who: &str, arguments: &[&str]) -> Value {
        let printed = self.good(who, &[arguments, &["--json"]].concat());
        serde_json::from_str(&printed).unwrap_or_else(|_| panic!("{printed}"))
    }

    /// A rules file with one rule.
    pub(crate) fn rule(&self, limit: u32) -> String {
        let text = format!("[[rules]]\nname = 'per_user'\nkey = ['user']\nlimit = {limit}\nperiod = '1h'\n");
        write(self.folder(), &format!("{limit}.toml"), &text)
    }

    /// A rules file with the same rule and a burst of 100, which no cost exceeds that passes now.
    pub(crate) fn slower_rule(&self, limit: u32) -> String {
        let text = format!(
            "[[rules]]\nname = 'per_user'\nkey = ['user']\nlimit = {limit}\nburst = 100\nperiod = '1h'\n"
        );
        write(self.folder(), &format!("slower-{limit}.toml"), &text)
    }

    /// Returns the response of the admin listener.
    pub(crate) fn ask(&self, who: &str, method: &str, target: &str, body: Option<&str>) -> (u16, Value) {
        let value = format!("Bearer {who}");
        let bytes = request(method, target, &[("authorization", &value)], body);
        let reply = send(self.server.address("admin"), &bytes);
        (reply.status, serde_json::from_str(&reply.body).unwrap_or_else(|_| panic!("{}", reply.body)))
    }

    pub(crate) fn check(&self, user: &str) -> Value {
        let body = format!(r#"{{"dimensions":{{"user":"{user}"}}}}"#);
        let fields = [("authorization", "Bearer app")];
        let reply = send(self.server.address("http"), &request("POST", "/v1/check", &fields, Some(&body)));
        serde_json::from_str(&reply.body).expect("a decision")
    }

    /// Sends one request for each of these users, pipelined. None is denied.
    pub(crate) fn strangers(&self, users: Range<u32>) {
        let ask = |users: Range<u32>| {
            let mut stream = TcpStream::connect(self.server.address("http")).expect("something listens");
            for from in users.clone().step_by(PIPELINED as usize) {
                let users = from..users.end.min(from + PIPELINED);
                let sent: String = users.clone().map(pipelined).collect();
                stream.write_all(sent.as_bytes()).expect("sent");
                let (mut heard, mut bytes) = (String::new(), vec![0; 64 << 10]);
                while heard.matches(r#""decision":"allow""#).count() < users.len() {
                    let count = stream.read(&mut bytes).expect("answers");
                    assert!(count > 0 && !heard.contains("HTTP/1.1 4"), "{heard}");
                    heard.push_str(&String::from_utf8_lossy(&bytes[..count]));
                }
            }
        };
        let middle = users.start.midpoint(users.end);
        std::thread::scope(|scope| {
            scope.spawn(|| ask(users.start..middle));
            ask(middle..users.end);
        });
    }

    /// Requests of one user, until the log has them, and as many as there are in all with those
    /// before.
    pub(crate) fn traffic(&self, requests: u32, in_all: u32) {
        self.traffic_of("ann", requests, in_all);
    }

    pub(crate) fn traffic_of(&self, user: &str, requests: u32, in_all: u32) {
        for _ in 0..requests {
            assert_eq!(self.check(user)["decision"], "allow");
        }
        wait_until("the log has all requests", START_TIME_MAX, || {
            let plan = self.json("ann", &["rules", "plan", &self.rule(1)]);
            plan["effect"]["measured"]["requests"].as_f64() >= Some(in_all.into())
        });
    }
}
