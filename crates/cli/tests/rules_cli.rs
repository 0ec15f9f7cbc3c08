//! Rules of a store, changed by several people with the command line: planned, confirmed, approved, undone, and audited.

#![allow(clippy::expect_used, clippy::panic, reason = "a helper of tests may panic as a test may")]
#![allow(unreachable_pub, reason = "what test programs share is public in each of them")]

mod support;

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::Output;
use std::time::Duration;

use rustix::fs::{Mode, OFlags, open};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use serde_json::{Map, Value, json};
use sqlx::Connection as _;
use support::raw::{request, send};
use support::{serve, tidegate, token_entry, write};
use tempfile::TempDir;
use tidegate_testkit::{Postgres, START_TIME_MAX, Server, wait_until};

/// How long a test's load may take until a sample of it is large enough.
const SAMPLED_TIME_MAX: Duration = Duration::from_mins(5);

/// Users between two looks at whether a sample is large enough, and requests on their way at once.
const STRANGERS: u32 = 30_000;
const PIPELINED: u32 = 100;

/// A request of a user that leaves its connection open.
fn pipelined(user: u32) -> String {
    let body = format!(r#"{{"dimensions":{{"user":"{user}"}}}}"#);
    let bytes = request("POST", "/v1/check", &[("authorization", "Bearer app")], Some(&body));
    String::from_utf8(bytes).expect("text").replace("Connection: close\r\n", "")
}

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
        Self::logging(rules, folder, &["--log-sample", "1"])
    }

    fn logging(rules: &str, folder: TempDir, log: &[&str]) -> Self {
        let people = [
            ("ann", "operator"),
            ("bea", "approver"),
            ("cy", "approver"),
            ("dan", "admin"),
            ("app", "client"),
        ];
        Self::of(&people, rules, folder, log)
    }

    /// One where nobody but an admin may approve anything.
    fn of_one_admin() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let rules = format!("sqlite:{}", folder.path().join("rules.db").display());
        let people = [("ann", "operator"), ("dan", "admin"), ("app", "client")];
        Self::of(&people, &rules, folder, &["--log-sample", "1"])
    }

    fn of(people: &[(&str, &str)], rules: &str, folder: TempDir, log: &[&str]) -> Self {
        let config: String = people.iter().map(|(name, role)| token_entry(name, "", role)).collect();
        let config = write(folder.path(), "tidegate.toml", &config);
        let data = folder.path().join("data").to_string_lossy().into_owned();
        let common = ["--config", &config, "--rules", rules, "--data-dir", &data, "--workers", "3"];
        let server = serve(&[&common, log].concat());
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
        let printed = [output.stdout, output.stderr].concat();
        (output.status.code().expect("no signal"), String::from_utf8(printed).expect("text"))
    }

    /// The same, of a command at a terminal of its own, where somebody answers the question that it asks.
    fn run_at_terminal(&self, who: &str, arguments: &[&str], answer: &[u8]) -> (i32, String) {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let controller = openpt(flags).expect("a terminal");
        grantpt(&controller).and_then(|()| unlockpt(&controller)).expect("a terminal to open");
        let name = ptsname(&controller, Vec::new()).expect("its name");
        // Not the tests' own terminal: they would end with it.
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let terminal = open(OsStr::from_bytes(name.as_bytes()), flags, Mode::empty()).expect("opens");
        let terminal = File::from(terminal);
        let url = self.server.url("admin", "");
        let mut command = tidegate(&[arguments, &["--server", &url, "--token", who]].concat());
        command.stdin(terminal.try_clone().expect("another"));
        command.stdout(terminal.try_clone().expect("another")).stderr(terminal);
        let mut child = command.spawn().expect("it runs");
        // Only the command has the terminal open now: when it ends, there is no more to read.
        drop(command);
        let mut controller = File::from(controller);
        let (mut printed, mut bytes, mut answered) = (Vec::new(), [0; 1024], false);
        while let Ok(count @ 1..) = controller.read(&mut bytes) {
            printed.extend_from_slice(&bytes[..count]);
            if !answered && printed.ends_with(b"[y/N] ") {
                controller.write_all(answer).expect("somebody types");
                answered = true;
            }
        }
        let status = child.wait().expect("it ended").code().expect("no signal");
        assert!(answered, "nobody was asked: {}", String::from_utf8_lossy(&printed));
        (status, String::from_utf8(printed).expect("text"))
    }

    /// The same, of a command that has to work.
    fn good(&self, who: &str, arguments: &[&str]) -> String {
        let (status, printed) = self.run(who, arguments);
        assert_eq!(status, 0, "{arguments:?}: {printed}");
        printed
    }

    fn json(&self, who: &str, arguments: &[&str]) -> Value {
        let printed = self.good(who, &[arguments, &["--json"]].concat());
        serde_json::from_str(&printed).unwrap_or_else(|_| panic!("{printed}"))
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

    /// One request of each of these users, many on their way at once, none of which is denied.
    fn strangers(&self, users: Range<u32>) {
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

    /// Requests of one user, until the log has them, and as many as there are in all with those before.
    fn traffic(&self, requests: u32, in_all: u32) {
        self.traffic_of("ann", requests, in_all);
    }

    fn traffic_of(&self, user: &str, requests: u32, in_all: u32) {
        for _ in 0..requests {
            assert_eq!(self.check(user)["decision"], "allow");
        }
        wait_until("the log has all requests", START_TIME_MAX, || {
            let plan = self.json("ann", &["rules", "plan", &self.rule(1)]);
            plan["effect"]["measured"]["requests"].as_f64() >= Some(in_all.into())
        });
    }
}

#[test]
fn a_change_is_planned_confirmed_approved_and_undone() {
    let desk = Desk::new();
    // Nothing is known of a new rule.
    let (status, printed) = desk.run("ann", &["rules", "apply", &desk.rule(100)]);
    assert_eq!(status, 1, "{printed}");
    assert!(
        printed.contains("create rule \"per_user\"\n  + key = [\"user\"]\n  + limit = 100\n"),
        "{printed}"
    );
    assert!(printed.contains("not applied: nothing to measure") && printed.contains("--yes"), "{printed}");
    let worst = "the change may deny all by \"per_user\" that passes now; the store is new; --yes";
    assert!(printed.contains(worst), "{printed}");
    let printed =
        desk.good("ann", &["rules", "apply", &desk.rule(100), "--yes", "--reason", "to begin with"]);
    assert!(printed.contains("change 1: applied, revision 1, by token:"), "{printed}");
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 100, "in force at once");

    desk.traffic(100, 101);
    let plan = desk.good("ann", &["rules", "plan", &desk.rule(94)]);
    assert!(plan.contains("update rule \"per_user\"\n  - limit = 100\n  + limit = 94\n"), "{plan}");
    assert!(plan.contains("5.9 % of") && plan.contains("needs: confirmation"), "{plan}");
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 100, "a plan changes nothing");
    let (status, printed) = desk.run("ann", &["rules", "apply", &desk.rule(94)]);
    assert_eq!((status, printed.contains("--yes")), (1, true), "{printed}");
    let printed = desk.good("ann", &["rules", "apply", &desk.rule(94), "--yes"]);
    assert!(printed.contains("change 2: applied, revision 2"), "{printed}");

    // Half of all requests denied takes somebody else, whatever is confirmed.
    let (status, printed) = desk.run("bea", &["rules", "apply", &desk.rule(10), "--yes"]);
    assert_eq!(status, 3, "{printed}");
    assert!(printed.contains("needs: approver") && printed.contains("tidegate rules approve 3"), "{printed}");
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 94);
    let (status, printed) = desk.run("bea", &["rules", "apply", "--change", "3", "--yes"]);
    assert_eq!((status, printed.contains("needs the approval of somebody other")), (1, true), "{printed}");
    let (status, printed) = desk.run("bea", &["rules", "approve", "3"]);
    assert_eq!(
        (status, printed.contains("403: change 3 cannot be approved by its author")),
        (1, true),
        "{printed}"
    );
    let (status, printed) = desk.run("ann", &["rules", "approve", "3"]);
    assert_eq!((status, printed.contains("needs the role \"approver\"")), (1, true), "{printed}");
    desk.good("cy", &["rules", "approve", "3"]);
    let printed = desk.good("ann", &["rules", "apply", "--change", "3"]);
    assert!(printed.contains("change 3: applied, revision 3"), "{printed}");
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 10);
    let whole = desk.json("ann", &["rules", "history", "3"]);
    assert!(whole["change"]["approver"].as_str().is_some_and(|name| name.starts_with("token:")), "{whole}");
    assert!(whole["change"]["effect"]["measured"]["newly_denied_percent"].as_f64() > Some(50.0), "{whole}");

    let printed = desk.good("ann", &["rules", "rollback", "--to-revision", "1", "--reason", "too strict"]);
    assert!(printed.contains("change 4: applied, revision 4"), "{printed}");
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 100);
    let history = desk.good("ann", &["rules", "history"]);
    assert!(
        history.starts_with("change 4: applied, revision 4") && history.contains("too strict"),
        "{history}"
    );
    assert!(history.contains("change 3: rolled back"), "{history}");

    let (status, printed) = desk.run("bea", &["rules", "apply", &desk.rule(1)]);
    assert_eq!(status, 3, "{printed}");
    let (status, printed) = desk.run("ann", &["rules", "reject", "5"]);
    assert_eq!((status, printed.contains("403")), (1, true), "of somebody else: {printed}");
    desk.good("bea", &["rules", "reject", "5", "--reason", "a slip"]);
    let (status, printed) = desk.run("cy", &["rules", "approve", "5"]);
    assert_eq!((status, printed.contains("change 5 is rejected")), (1, true), "{printed}");
}

#[test]
fn above_5_percent_a_change_asks_and_above_50_it_waits_for_somebody_else() {
    let desk = Desk::new();
    desk.good("ann", &["rules", "apply", &desk.rule(100), "--yes"]);
    desk.traffic(100, 100);
    for (limit, percent, needs) in [
        (95, "5.0", "nothing"),
        (94, "6.0", "confirmation"),
        (50, "50.0", "confirmation"),
        (49, "51.0", "approver"),
    ] {
        let plan = desk.good("ann", &["rules", "plan", &desk.rule(limit)]);
        assert!(plan.contains(&format!("effect: {percent} % of")), "{limit}: {plan}");
        assert!(plan.contains(&format!("needs: {needs}\n")), "{limit}: {plan}");
    }
    let (status, printed) = desk.run("bea", &["rules", "apply", &desk.rule(94)]);
    assert_eq!((status, printed.contains("6.0 %") && printed.contains("--yes")), (1, true), "{printed}");
    let (status, printed) = desk.run("bea", &["rules", "apply", &desk.rule(49), "--yes"]);
    assert_eq!((status, printed.contains("change 2: waiting")), (3, true), "{printed}");
    let (status, printed) = desk.run("bea", &["rules", "approve", "2"]);
    assert_eq!((status, printed.contains("cannot be approved by its author")), (1, true), "{printed}");
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 100);
    desk.good("cy", &["rules", "approve", "2"]);
    desk.good("bea", &["rules", "apply", "--change", "2"]);
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 49);
}

#[test]
fn what_cannot_be_measured_and_may_deny_everybody_waits_for_somebody_else() {
    let desk = Desk::new();
    desk.good("ann", &["rules", "apply", &desk.rule(100), "--yes"]);
    desk.traffic(100, 100);
    let by_plan = "[[rules]]\nname = 'per_user'\nkey = ['plan']\nlimit = 100\nperiod = '1h'\n";
    let by_plan = write(desk.folder(), "plan.toml", by_plan);
    let (status, printed) = desk.run("ann", &["rules", "apply", &by_plan, "--yes"]);
    assert_eq!((status, printed.contains("the log has no \"plan\" of requests")), (3, true), "{printed}");
    assert_eq!(desk.check("bob")["rules"][0]["rule"], "per_user", "nothing changed");
    let by_team =
        "[[rules]]\nname = 'per_team'\nkey = ['team']\nlimit = 100\nperiod = '1h'\nmode = 'shadow'\n";
    desk.good("ann", &["rules", "apply", &write(desk.folder(), "team.toml", by_team)]);
    // More for all, and back again, of a rule that nobody asked for yet.
    let more = ["override", "set", "--rule", "per_team", "--key", "*", "--limit", "1000", "--name", "all"];
    desk.good("ann", &more);
    let (status, printed) = desk.run("ann", &["rules", "enforce", "per_team", "--yes"]);
    assert_eq!((status, printed.contains("change 5: waiting")), (3, true), "{printed}");
    desk.good("cy", &["rules", "approve", "5"]);
    desk.good("ann", &["rules", "apply", "--change", "5"]);
    let (status, printed) = desk.run("ann", &["override", "delete", "all", "--yes"]);
    assert_eq!((status, printed.contains("change 6: waiting")), (3, true), "{printed}");
}

#[test]
fn the_only_one_who_may_approve_is_asked_about_what_is_not_known() {
    let desk = Desk::of_one_admin();
    desk.good("dan", &["rules", "apply", &desk.rule(100), "--yes"]);
    let team = |name: &str| {
        let text = format!("[[rules]]\nname = '{name}'\nkey = ['team']\nlimit = 100\nperiod = '1h'\n");
        write(desk.folder(), &format!("{name}.toml"), &text)
    };
    let (status, printed) = desk.run("dan", &["rules", "apply", &team("one")]);
    assert_eq!((status, printed.contains("; nobody else may approve; --yes")), (1, true), "{printed}");
    desk.good("dan", &["rules", "apply", &team("one"), "--yes"]);
    // Whoever may not approve has somebody who does.
    let (status, printed) = desk.run("ann", &["rules", "apply", &team("two"), "--yes"]);
    assert_eq!((status, printed.contains("change 3: waiting")), (3, true), "{printed}");
    desk.good("dan", &["rules", "approve", "3"]);
    desk.good("ann", &["rules", "apply", "--change", "3"]);
    // What is known waits, though nobody is there yet.
    desk.traffic(100, 100);
    let (status, printed) = desk.run("dan", &["rules", "apply", &desk.rule(49), "--yes"]);
    assert_eq!((status, printed.contains("change 4: waiting")), (3, true), "{printed}");
    let body = r#"{"name":"eve","role":"approver"}"#;
    let (status, made) = desk.ask("dan", "POST", "/v1/credentials", Some(body));
    let eve = made["token"].as_str().unwrap_or_else(|| panic!("{status}: {made}"));
    let (status, printed) = desk.run(eve, &["rules", "approve", "4"]);
    assert_eq!(status, 1, "with a credential that was made since: {printed}");
    let (status, printed) = desk.run("dan", &["rules", "apply", &team("three"), "--yes"]);
    assert_eq!((status, printed.contains("change 5: waiting")), (3, true), "{printed}");
}

#[test]
fn what_denies_everything_waits_for_somebody_else_at_the_sample_that_nobody_set() {
    let folder = tempfile::tempdir().expect("a folder");
    let rules = format!("sqlite:{}", folder.path().join("rules.db").display());
    let desk = Desk::logging(&rules, folder, &[]);
    desk.good("ann", &["rules", "apply", &desk.rule(1_000), "--yes"]);
    // One request of each user; what the log has of a thousand requests is one record.
    let mut users = 0;
    wait_until("enough records of a sample", SAMPLED_TIME_MAX, || {
        desk.strangers(users..users + STRANGERS);
        users += STRANGERS;
        let plan = desk.json("ann", &["rules", "plan", &desk.rule(0)]);
        plan["effect"]["measured"].is_object()
    });
    let (status, printed) = desk.run("ann", &["rules", "apply", &desk.rule(0), "--yes"]);
    assert_eq!(status, 3, "{printed}");
    assert!(printed.contains("effect: 100.0 % of") && printed.contains("needs: approver"), "{printed}");
    assert_eq!(desk.check("bob")["decision"], "allow");
    let plan = desk.good("ann", &["rules", "plan", &desk.rule(900)]);
    assert!(plan.contains("effect: 0.0 % of") && plan.contains("needs: nothing"), "{plan}");
}

#[test]
fn a_rollback_to_what_denied_much_waits_for_somebody_else() {
    let desk = Desk::new();
    desk.good("ann", &["rules", "apply", &desk.rule(100), "--yes"]);
    desk.traffic(100, 100);
    desk.run("bea", &["rules", "apply", &desk.rule(1)]);
    desk.good("cy", &["rules", "approve", "2"]);
    desk.good("bea", &["rules", "apply", "--change", "2"]);
    // Looser again: nobody has to wait for that.
    desk.good("ann", &["rules", "rollback", "--change", "2"]);
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 100);
    for (at, back) in [(4, ["--change", "3"]), (5, ["--to-revision", "2"])] {
        let (status, printed) = desk.run("ann", &[&["rules", "rollback", "--yes"], &back[..]].concat());
        assert_eq!(
            (status, printed.contains(&format!("change {at}: waiting"))),
            (3, true),
            "{back:?}: {printed}"
        );
        assert_eq!(desk.check("bob")["rules"][0]["limit"], 100, "{back:?}");
    }
    desk.good("bea", &["rules", "approve", "4"]);
    desk.good("ann", &["rules", "apply", "--change", "4"]);
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 1);
    let history = desk.good("ann", &["rules", "history"]);
    assert!(history.contains("change 3: rolled back"), "{history}");
}

#[test]
fn what_denies_more_by_now_than_was_approved_waits_again() {
    let desk = Desk::new();
    desk.good("ann", &["rules", "apply", &desk.rule(100), "--yes"]);
    (0..60).for_each(|user| drop(desk.check(&format!("once-{user}"))));
    desk.traffic_of("often", 100, 160);
    let (status, printed) = desk.run("bea", &["rules", "apply", &desk.rule(10)]);
    assert_eq!((status, printed.contains("effect: 56.2 %")), (3, true), "{printed}");
    desk.good("cy", &["rules", "approve", "2"]);
    // Two more who ask often, and it is three in four.
    desk.traffic_of("often-too", 100, 260);
    desk.traffic_of("often-as-well", 100, 360);
    let (status, printed) = desk.run("bea", &["rules", "apply", "--change", "2", "--yes"]);
    assert_eq!((status, printed.contains("change 2: waiting")), (3, true), "{printed}");
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 100);
    let whole = desk.json("ann", &["rules", "history", "2"]);
    assert_eq!(whole["change"]["approver"], Value::Null, "{whole}");
    assert!(whole["change"]["effect"]["measured"]["newly_denied_percent"].as_f64() > Some(70.0), "{whole}");
    assert!(desk.good("ann", &["audit", "show"]).contains(" change.wait "));
    desk.good("cy", &["rules", "approve", "2"]);
    let printed = desk.good("bea", &["rules", "apply", "--change", "2"]);
    assert!(printed.contains("change 2: applied"), "{printed}");
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 10);
}

#[test]
fn what_a_template_denies_since_an_approval_waits_again() {
    let desk = Desk::new();
    let template = |limit: u32| format!("[[templates]]\nname = 't'\nlimit = {limit}\nperiod = '1h'\n");
    let rule = |name: &str, users: &str, terms: &str| {
        format!("[[rules]]\nname = '{name}'\nkey = ['user']\nwhen = {{ user = '{users}' }}\n{terms}\n")
    };
    let legacy = |limit: u32| rule("legacy", "l*", &format!("limit = {limit}\nperiod = '1h'"));
    let file = |name: &str, parts: &[String]| write(desk.folder(), name, &parts.concat());
    let begun = [template(1_000), legacy(100), rule("main", "m*", "limit = 1000\nperiod = '1h'")];
    desk.good("ann", &["rules", "apply", &file("begun.toml", &begun), "--yes"]);
    desk.traffic_of("lea", 100, 100);
    desk.traffic_of("mia", 100, 200);
    let moved = file("moved.toml", &[legacy(0), rule("main", "m*", "template = 't'")]);
    let (status, printed) = desk.run("bea", &["rules", "apply", &moved]);
    assert_eq!(
        (status, printed.contains("100.0 % of the requests that pass rule \"legacy\"")),
        (3, true),
        "{printed}"
    );
    desk.good("cy", &["rules", "approve", "2"]);
    // Nobody follows the template yet.
    desk.good("bea", &["rules", "apply", &file("t.toml", &[template(1)])]);
    let (status, printed) = desk.run("bea", &["rules", "apply", "--change", "2", "--yes"]);
    assert_eq!((status, printed.contains("change 2: waiting")), (3, true), "{printed}");
    assert_eq!(desk.check("max")["rules"][0]["limit"], 1_000);
}

#[test]
fn a_log_that_cannot_be_read_keeps_nobody_from_changing_rules() {
    let desk = Desk::new();
    desk.good("ann", &["rules", "apply", &desk.rule(100), "--yes"]);
    desk.traffic(100, 100);
    // In the place of the log, something that is none.
    let log = desk.folder().join("data");
    let named = std::fs::read_dir(&log).expect("a folder").map(|entry| entry.expect("an entry").path());
    for file in named.filter(|path| path.to_string_lossy().contains("decisions")) {
        std::fs::rename(&file, file.with_extension("away")).expect("moved");
        std::fs::write(&file, b"no database, but long enough that nobody takes it for a new one".repeat(99))
            .expect("written");
    }
    let (status, printed) = desk.run("ann", &["rules", "apply", &desk.rule(60)]);
    assert_eq!(status, 1, "{printed}");
    assert!(printed.contains("the decision log cannot be read") && printed.contains("--yes"), "{printed}");
    desk.good("ann", &["rules", "apply", &desk.rule(60), "--yes"]);
    desk.good("ann", &["rules", "rollback", "--change", "2"]);
    // Half of a limit takes somebody else, as half of what passes does.
    let (status, printed) = desk.run("ann", &["rules", "apply", &desk.rule(50), "--yes"]);
    assert_eq!(
        (status, printed.contains("leaves half of rule \"per_user\", or less")),
        (3, true),
        "{printed}"
    );
    assert_eq!(desk.check("bob")["rules"][0]["limit"], 100);
}

#[test]
fn what_makes_no_sense_is_refused_with_all_reasons() {
    let desk = Desk::new();
    let wrong = "[[rules]]\nname = 'a'\nlimit = 1\nperiod = 'soon'\n[[overrides]]\nname = 'o'\nrule = 'b'\nlimit = 1\n";
    let wrong = write(desk.folder(), "wrong.toml", wrong);
    for verb in ["plan", "apply"] {
        let (status, printed) = desk.run("ann", &["rules", verb, &wrong]);
        assert_eq!(status, 64, "{printed}");
        assert!(printed.contains("rules[\"a\"].period") && printed.contains("overrides[\"o\"]"), "{printed}");
    }
    let (status, printed) = desk.run("ann", &["rules", "plan", "--delete", "rule/a"]);
    assert_eq!(
        (status, printed.contains("cannot delete what does not exist: rule \"a\"")),
        (1, true),
        "{printed}"
    );
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
    let (status, printed) = desk.run("ann", &[&["unblock"], &block[..]].concat());
    assert_eq!((status, printed.contains("not blocked")), (1, true), "{printed}");
    // A key may be longer than what it can be called by.
    let long = "x".repeat(1_024);
    for verb in [&["override", "set", "--limit", "9"][..], &["block"], &["unblock"]] {
        desk.good("ann", &[verb, &["--rule", "per_user", "--key", &long]].concat());
    }

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
    let printed = desk.good("ann", &["rules", "import", "envoy", &descriptors, "--yes"]);
    assert!(printed.contains("left out: edge/free: unlimited"), "{printed}");
    assert_eq!(["ann", "bob"].map(|user| desk.check(user)["rules"][0]["limit"].as_u64()), [Some(7), Some(8)]);

    let list =
        r#"{"data":[{"overrideId":"o","identifier":"eve*","limit":4,"duration":60000}],"pagination":{}}"#;
    let list = write(desk.folder(), "unkey.json", list);
    desk.good("ann", &["rules", "import", "unkey", &list, "--rule", "edge/user", "--yes"]);
    assert_eq!(desk.check("eve-1")["rules"][0]["limit"], 4);
    let page = |name: &str, user: &str, pagination: &str| {
        let text = format!(
            r#"{{"data":[{{"identifier":"{user}","limit":4,"duration":60000}}],"pagination":{pagination}}}"#
        );
        write(desk.folder(), name, &text)
    };
    let first = page("1.json", "fay", r#"{"cursor":"c","hasMore":true}"#);
    let second = page("2.json", "gus", r#"{"hasMore":false}"#);
    let import = |pages: &[&str]| {
        desk.run("ann", &[&["rules", "import", "unkey"], pages, &["--rule", "edge/user", "--yes"]].concat())
    };
    let (status, printed) = import(&[&first]);
    assert_eq!((status, printed.contains("every page says that another follows")), (64, true), "{printed}");
    assert_eq!(desk.check("fay")["rules"][0]["limit"], 7, "half of a list is not imported");
    let (status, printed) = import(&[&first, &second]);
    assert_eq!(status, 0, "{printed}");
    assert_eq!(["fay", "gus"].map(|user| desk.check(user)["rules"][0]["limit"].as_u64()), [Some(4), Some(4)]);
    let (status, printed) =
        desk.run("ann", &["rules", "import", "unkey", &descriptors, "--rule", "edge/user"]);
    assert_eq!(status, 64, "{printed}");
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
fn an_export_ends_where_the_store_says_whoever_cut_off_its_entries() {
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
        (r#"{"action":"stop"}"#, ".action: "),
        (r#"{"action":"block","rule":"nothing"}"#, ".rule: "),
    ] {
        let (status, problem) = declare(wrong);
        let detail = problem["detail"].as_str().expect("words");
        assert_eq!((status, detail.contains(field)), (400, true), "{problem}");
    }
}

#[test]
fn an_emergency_that_says_nobody_asks_whether_that_is_meant() {
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
            (status, detail.starts_with("confirmed: it is about all that ")),
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
    // What is about somebody, or lets something pass, is declared at once.
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
    assert_eq!((status, printed.contains("--yes says that it is meant")), (1, true), "{printed}");
    let (status, printed) = desk.run_at_terminal("ann", &["block"], b"n\n");
    assert_eq!((status, printed.contains("Is that meant? [y/N]")), (1, true), "{printed}");
    assert_eq!(desk.check("carol")["decision"], "allow");
    let printed = desk.good("ann", &["block", "--yes"]);
    assert!(printed.starts_with("blocked until ") && printed.ends_with(": everything\n"), "{printed}");
    assert_eq!(desk.check("carol")["decision"], "deny");
    desk.good("ann", &["unblock"]);
    assert_eq!(desk.check("carol")["decision"], "allow");
    let (status, printed) = desk.run("ann", &["block", "--rule", "per_user"]);
    assert_eq!((status, printed.contains("rule \"per_user\" applies to")), (1, true), "{printed}");
    let printed = desk.good("ann", &["block", "--rule", "per_user", "--yes"]);
    assert!(printed.ends_with(": all of per_user\n"), "{printed}");
    let (status, printed) = desk.run("ann", &["block", "--key", "carol"]);
    assert_eq!((status, printed.contains("--rule")), (64, true), "{printed}");
}

#[test]
fn an_emergency_that_does_not_go_with_the_others_is_refused() {
    let desk = Desk::new();
    desk.good("ann", &["rules", "apply", &desk.rule(5), "--yes"]);
    // All that is in force may look at sixteen header fields together.
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
        limit = 9";
    let file = write(desk.folder(), "all.toml", text);
    desk.good("ann", &["rules", "apply", &file, "--yes"]);
    let written = write(other.folder(), "written.toml", &desk.good("ann", &["rules", "list", "--toml"]));
    other.good("ann", &["rules", "apply", &written, "--yes"]);
    let rows = [&desk, &other].map(|desk| desk.json("ann", &["rules", "list"])["rows"].clone());
    assert_eq!(rows[0], rows[1]);
    assert_eq!(rows[0].as_array().map(Vec::len), Some(4));
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

#[test]
fn whoever_sits_at_a_terminal_is_asked_whether_it_is_meant() {
    /// What a terminal makes of its end of input, at the beginning of a line.
    const CONTROL_D: &[u8] = b"\x04";
    let desk = Desk::new();
    let rule = desk.rule(100);
    let apply = ["rules", "apply", rule.as_str()];
    let revision = || desk.ask("ann", "GET", "/v1/rules", None).1["revision"].clone();
    for no in [b"n\n".as_slice(), b"\n", b"nothing of the sort\n", CONTROL_D] {
        let (status, printed) = desk.run_at_terminal("ann", &apply, no);
        assert_eq!(status, 1, "{no:?}: {printed}");
        assert!(
            printed.contains("Is that meant? [y/N]") && printed.contains("error: not applied"),
            "{printed}"
        );
    }
    // Nobody there has not said yes.
    let (status, printed) = desk.run("ann", &apply);
    assert_eq!((status, printed.contains("--yes says that it is meant")), (1, true), "{printed}");
    assert!(!printed.contains("[y/N]"), "{printed}");
    assert_eq!(revision(), 0, "nothing was applied");
    let (status, printed) = desk.run_at_terminal("ann", &apply, b"y\n");
    assert_eq!(status, 0, "{printed}");
    assert!(printed.contains("change 1: applied, revision 1"), "{printed}");
    let (status, printed) = desk.run_at_terminal("ann", &["rules", "apply", &desk.rule(60)], b"yes\n");
    assert_eq!((status, revision()), (0, 2.into()), "{printed}");
}

#[test]
fn a_rule_in_an_emergency_is_not_deleted() {
    let desk = Desk::new();
    desk.good("ann", &["rules", "apply", &desk.rule(100), "--yes"]);
    let emergency = r#"{"id": "stop", "action": "block", "rule": "per_user", "confirmed": true}"#;
    assert_eq!(desk.ask("ann", "POST", "/v1/emergencies", Some(emergency)).0, 200);
    let delete =
        r#"{"operations": [{"do": "delete", "kind": "rule", "name": "per_user"}], "confirmed": true}"#;
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
    assert_eq!((status, printed.contains("--yes says that it is meant")), (1, true), "{printed}");
    let printed = desk.good("ann", &[&limit[..], &["--yes"]].concat());
    assert!(printed.starts_with("calm until 20") && printed.ends_with(": limit\n"), "{printed}");
    let listed = desk.json("ann", &["emergency", "list"]);
    let body = &listed["emergencies"][0]["body"];
    assert_eq!(
        (&body["action"], &body["limit"], &body["rule"]),
        (&json!("limit"), &json!(1), &json!("per_user"))
    );
    assert!(desk.good("ann", &["emergency", "renew", "calm", "--for", "20m"]).starts_with("lasts until 20"));
    assert_eq!(desk.good("ann", &["emergency", "end", "calm"]), "ended\n");
    assert_eq!(desk.json("ann", &["emergency", "list"])["emergencies"], json!([]));
    let (status, printed) = desk.run("ann", &["emergency", "renew", "calm"]);
    assert_eq!(status, 1, "{printed}");
    let (status, printed) = desk.run("ann", &["emergency", "block", "--tenant", "acme", "--yes"]);
    let told = "tenant: there is no [[tenants]] entry named \"acme\"";
    assert!(status != 0 && printed.contains(told), "{status}: {printed}");
}

#[test]
fn credentials_are_made_used_listed_and_revoked() {
    let desk = Desk::new();
    let made = desk.json("dan", &["credential", "new", "--name", "eve", "--role", "viewer"]);
    let token = made["token"].as_str().expect("a token").to_owned();
    desk.good(&token, &["rules", "list"]);
    let listed = desk.good("dan", &["credential", "list"]);
    let line = listed.lines().find(|line| line.ends_with(" eve: viewer")).expect("it is listed");
    let hash = line.split(' ').next().expect("a hash");
    assert!(!listed.contains(&token), "nobody is told it again");
    assert_eq!(desk.good("dan", &["credential", "revoke", hash]), "revoked\n");
    let (status, printed) = desk.run(&token, &["rules", "list"]);
    assert!(status == 1 && printed.contains("401"), "{status}: {printed}");
    let (status, printed) = desk.run("ann", &["credential", "list"]);
    assert!(status == 1 && printed.contains("403"), "{status}: {printed}");
}

#[test]
fn an_override_says_whose_it_is_how_much_it_counts_and_when_it_ends() {
    let desk = Desk::new();
    let rules = "[[rules]]\nname='per_user'\nkey=['user']\nlimit=100\nperiod='1m'\n";
    desk.good("ann", &["rules", "apply", &write(desk.folder(), "one.toml", rules), "--yes"]);
    let set =
        ["override", "set", "--rule", "per_user", "--key", "b*", "--limit", "500", "--name", "bees", "--yes"];
    let more = ["--priority", "-2", "--expires", "4000000000000", "--tenant", "acme"];
    let printed = desk.good("ann", &[&set[..], &more].concat());
    let warning = r#"warning: overrides["bees"].tenant: there is no [[tenants]] entry named "acme": it is for nobody here"#;
    assert!(printed.contains(warning), "{printed}");
    let body = desk.json("ann", &["rules", "get", "override/bees"])["row"]["body"].clone();
    let printed = (&body["priority"], &body["expires"], &body["tenant"]);
    assert_eq!(printed, (&json!(-2), &json!(4_000_000_000_000_u64), &json!("acme")));
    let (status, printed) = desk.run("ann", &[&set[..], &["--priority", "1000001"]].concat());
    assert_eq!((status, printed.contains("priority: 1000001 is outside")), (64, true), "{printed}");
}
