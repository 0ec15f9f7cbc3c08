//! The command line as people and scripts meet it: the real binary, its words, its exit statuses.

#![allow(
    clippy::expect_used,
    clippy::panic,
    unreachable_pub,
    reason = "what tests share is part of the tests"
)]

mod support;

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde_json::Value;
use support::raw::{request, send};
use support::{serve, tidegate as command};
use tidegate_testkit::{Process, START_TIME_MAX, Server, Signal, free_port, wait_until};

const COMMANDS: [&[&str]; 15] = [
    &["serve"],
    &["check"],
    &["why"],
    &["heavy"],
    &["rules"],
    &["rules", "validate"],
    &["bound"],
    &["plan"],
    &["token"],
    &["token", "new"],
    &["bench"],
    &["sim"],
    &["demo"],
    &["completions"],
    &["man"],
];

const RULES: &str = r#"
[[rules]]
name = "per_user"
key = ["user"]
limit = 2
period = "1h"
"#;

fn tidegate(arguments: &[&str]) -> Output {
    command(arguments).output().expect("it runs")
}

fn status(output: &Output) -> i32 {
    output.status.code().expect("it ended by itself")
}

fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).expect("text")
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).expect("text")
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// A folder with a file in it.
fn folder_with(name: &str, text: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join(name);
    std::fs::write(&path, text).expect("written");
    let path = path.to_str().expect("text").to_owned();
    (folder, path)
}

#[test]
fn every_command_has_help_and_is_in_the_help() {
    let all = tidegate(&["--help"]);
    assert_eq!(status(&all), 0);
    for words in COMMANDS {
        assert!(stdout(&all).contains(&format!("\n  {} ", words[0])), "{words:?}");
        let help = tidegate(&[words, &["--help"]].concat());
        assert_eq!(status(&help), 0, "{words:?}");
        assert!(stdout(&help).contains("Usage: tidegate "), "{words:?}");
    }
}

#[test]
fn wrong_usage_is_64_and_help_is_0() {
    let wrong: [&[&str]; 13] = [
        &["sevre"],
        &["serve", "--colour", "blue"],
        &["check", "--cost", "-1"],
        &["check", "alice"],
        &["check", "user=a", "user=b"],
        &["check", "--server", "127.0.0.1:8090"],
        &["check", "--ca", "/nowhere.pem"],
        &["bench", "--connections", "1001"],
        &["bench", "--duration", "2h"],
        &["bench", "--surface", "http", "--pipeline", "2"],
        &["bench", "--surface", "resp", "--server", "http://127.0.0.1:1"],
        &["token", "new", "--role", "king"],
        &["token", "new", "--name", ""],
    ];
    for words in wrong {
        let output = tidegate(words);
        assert_eq!(status(&output), 64, "{words:?}: {output:?}");
        assert!(stderr(&output).starts_with("error: "), "{words:?}: {output:?}");
        assert_eq!(stdout(&output), "", "{words:?}");
    }
    assert_eq!(status(&tidegate(&["--version"])), 0);
}

#[test]
fn a_bench_on_another_machine_has_to_be_asked_for() {
    // A network for documentation: nobody is there.
    let output = tidegate(&["bench", "--server", "http://192.0.2.1:8080"]);
    assert_eq!(status(&output), 64);
    assert!(stderr(&output).contains("--allow-remote"), "{output:?}");
}

#[test]
fn every_problem_of_a_configuration_is_listed() {
    let (_folder, file) =
        folder_with("tidegate.toml", "memory = '3 bananas'\nworkers = 0\ncolour = 'blue'\n");
    for check in [&["--check-config"][..], &[]] {
        let arguments = [&["serve", "--config", &file, "--http-listen", "localhost"], check].concat();
        let output = tidegate(&arguments);
        assert_eq!(status(&output), 64, "{output:?}");
        for problem in ["memory: ", "workers: ", "colour: not a setting", "http_listen: \"localhost\""] {
            assert!(stderr(&output).contains(&format!("error: {problem}")), "{problem}: {output:?}");
        }
    }
}

#[test]
fn no_problem_hides_another() {
    let (_rules, rules) = folder_with("rules.toml", "[[rules]]\nname = 3");
    let (_broken, broken) = folder_with("broken.toml", "[[rules]\n");
    let (_descriptors, descriptors) = folder_with("descriptors.yaml", "domain: 7\ndescriptors: nothing");
    let (_config, config) = folder_with(
        "tidegate.toml",
        "memory = '3 bananas'\ntls_key = '/nowhere.key'\n[[tokens]]\nname = 't'\nhash = 'secret'\n",
    );
    let below_a_file = format!("{config}/data");
    let flags = [
        ["--config", &config],
        ["--rules", &rules],
        ["--envoy-descriptors", &descriptors],
        ["--tls-cert", "/nowhere.pem"],
        ["--tls-client-ca", "/nowhere-else.pem"],
        ["--data-dir", &below_a_file],
        // Whether it may be reached from elsewhere cannot be said while a token is not understood.
        ["--http-listen", "0.0.0.0:0"],
    ];
    for check in [&["--check-config"][..], &[]] {
        let mut serve = command(&[&["serve"], check, flags.as_flattened()].concat());
        serve.env("TIDEGATE_IDLE_TIMEOUT", "").env("TIDEGATE_MEMROY", "1GB").env("TIDEGATE_LOG", "wran");
        let output = serve.output().expect("it runs");
        assert_eq!((status(&output), stdout(&output)), (64, ""), "{output:?}");
        let mut keys: Vec<&str> = stderr(&output)
            .lines()
            .map(|line| line.strip_prefix("error: ").and_then(|line| line.split(": ").next()).expect("a key"))
            .collect();
        keys.sort_unstable();
        keys.dedup();
        let wrong = [
            "TIDEGATE_LOG",
            "TIDEGATE_MEMROY",
            "data_dir",
            "envoy_descriptors",
            "idle_timeout",
            "memory",
            "rules",
            "tls_cert",
            "tls_client_ca",
            "tls_key",
            "tokens[0]",
        ];
        assert_eq!(keys, wrong, "{}", stderr(&output));
    }
    // A file that cannot be read hides what it says, but nothing else.
    for (config, words) in [("/nowhere.toml", "No such file"), (&broken, "line 1, column 9: ")] {
        let output = tidegate(&["serve", "--config", config, "--rules", &broken, "--workers", "0"]);
        let lines: Vec<&str> = stderr(&output).lines().collect();
        assert_eq!((status(&output), lines.len()), (64, 3), "{output:?}");
        for problem in [
            &format!("error: config: {config}: {words}")[..],
            &format!("error: rules: {broken}: line 1, column 9: "),
            "error: workers: ",
        ] {
            assert!(lines.iter().any(|line| line.starts_with(problem)), "{problem}: {output:?}");
        }
    }
}

#[test]
fn variables_that_say_nothing_or_are_not_known_are_problems() {
    let check = |name: &str, value: &str| {
        let mut serve = command(&["serve", "--check-config", "--data-dir", "none"]);
        serve.env(name, value).output().expect("it runs")
    };
    let wrong = [
        ("TIDEGATE_HTTP_LISTEN", "", "http_listen: empty: leave it out for 127.0.0.1:8080"),
        ("TIDEGATE_RULES", "", "rules: empty"),
        ("TIDEGATE_WORKERS", "", "workers: empty"),
        ("TIDEGATE_CONFIG", "", "config: empty"),
        ("TIDEGATE_HTTP_LISTNE", "off", "TIDEGATE_HTTP_LISTNE: not a variable"),
        ("TIDEGATE_LOG", "", "TIDEGATE_LOG: \"\" is not a level"),
        ("TIDEGATE_LOG", "tidegate_server=loud", "TIDEGATE_LOG: "),
    ];
    for (name, value, words) in wrong {
        let output = check(name, value);
        assert_eq!((status(&output), stderr(&output).lines().count()), (64, 1), "{output:?}");
        assert!(stderr(&output).starts_with(&format!("error: {words}")), "{output:?}");
    }
    let good = [
        ("TIDEGATE_TRUSTED_PROXIES", ""),
        ("TIDEGATE_LOG", "warn"),
        ("TIDEGATE_TOKEN", "tg_0"),
        ("TIDEGATE_SERVER", "http://127.0.0.1:1"),
        ("TIDEGATE_SERVICE_HOST", "10.0.0.1"),
    ];
    for (name, value) in good {
        let output = check(name, value);
        assert_eq!(status(&output), 0, "{output:?}");
    }
}

#[test]
fn a_configuration_is_checked_with_the_files_it_names() {
    let (_folder, rules) = folder_with("rules.toml", RULES);
    let check = ["serve", "--check-config", "--data-dir", "none", "--rules"];
    let good = tidegate(&[&check[..], &[&rules]].concat());
    assert_eq!((status(&good), stdout(&good)), (0, "the configuration is good\n"));
    std::fs::write(&rules, "[[rules]]\nname = 3").expect("written");
    let bad = tidegate(&[&check[..], &[&rules]].concat());
    assert_eq!(status(&bad), 64);
    assert!(stderr(&bad).contains("rules.toml: rules[0]."), "{bad:?}");
    let missing = tidegate(&["serve", "--check-config", "--config", "/nowhere.toml"]);
    assert_eq!(status(&missing), 64);
    assert!(stderr(&missing).contains("config: /nowhere.toml: "), "{missing:?}");
}

#[test]
fn settings_come_from_flags_before_variables_before_the_file() {
    let (_folder, file) = folder_with("tidegate.toml", "connections_max = 0\nworkers = 1\n");
    let serve = |flags: &[&str]| {
        let arguments =
            [&["serve", "--check-config", "--data-dir", "none", "--config", file.as_str()], flags].concat();
        let mut command = command(&arguments);
        command.env("TIDEGATE_WORKERS", "0");
        command.output().expect("it runs")
    };
    let output = serve(&[]);
    assert!(stderr(&output).contains("connections_max: \"0\""), "the file counts: {output:?}");
    assert!(stderr(&output).contains("workers: \"0\""), "the variable counts more: {output:?}");
    let output = serve(&["--workers", "1", "--connections-max", "1"]);
    assert_eq!(status(&output), 0, "the flag counts most: {output:?}");
}

#[test]
fn two_servers_cannot_have_one_port() {
    let first = serve(&[]);
    let taken = first.address("http").to_string();
    let second = tidegate(&[
        "serve",
        "--data-dir",
        "none",
        "--http-listen",
        &taken,
        "--grpc-listen",
        "off",
        "--resp-listen",
        "off",
        "--admin-listen",
        "off",
    ]);
    assert_eq!(status(&second), 1);
    assert!(stderr(&second).contains(&format!("http_listen: {taken}: ")), "{second:?}");
    assert!(stderr(&second).contains("another program listens there"), "{second:?}");
}

#[test]
fn every_port_that_cannot_be_had_is_named() {
    let first = serve(&[]);
    let mut serve = command(&["serve", "--data-dir", "none"]);
    for listener in ["http", "grpc", "resp"] {
        serve.arg(format!("--{listener}-listen")).arg(first.address(listener).to_string());
    }
    // A network for documentation: no machine has an address in it.
    let output = serve.args(["--admin-listen", "192.0.2.1:0"]).output().expect("it runs");
    assert_eq!(status(&output), 64, "without tokens: {output:?}");

    let token = json(&tidegate(&["token", "new", "--json"]));
    let (_folder, config) =
        folder_with("tidegate.toml", &format!("[[tokens]]\nname = 'a'\nhash = {}\n", token["hash"]));
    let output = serve.args(["--config", &config]).output().expect("it runs");
    assert_eq!((status(&output), stderr(&output).lines().count()), (1, 4), "{output:?}");
    for listener in ["http", "grpc", "resp"] {
        let problem = format!("error: {listener}_listen: {}: ", first.address(listener));
        assert!(stderr(&output).contains(&problem), "{output:?}");
    }
    let admin = stderr(&output).lines().last().expect("four lines");
    assert!(admin.starts_with("error: admin_listen: 192.0.2.1:0: "), "{admin}");
    assert!(admin.ends_with("this machine has no such address"), "{admin}");
}

#[test]
fn listeners_have_an_address_each_and_one_is_on() {
    let check =
        |listen: &[&str]| tidegate(&[&["serve", "--check-config", "--data-dir", "none"], listen].concat());
    let output = check(&["--grpc-listen", "127.0.0.1:8080"]);
    assert_eq!(status(&output), 64, "{output:?}");
    assert_eq!(stderr(&output), "error: grpc_listen: 127.0.0.1:8080 is the address of http_listen too\n");
    let off = ["http", "grpc", "resp", "admin"].map(|listener| format!("--{listener}-listen=off"));
    let output = check(&off.each_ref().map(String::as_str));
    assert_eq!(status(&output), 64, "{output:?}");
    assert!(stderr(&output).starts_with("error: http_listen: \"off\""), "{output:?}");
    assert_eq!(status(&check(&["--http-listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0"])), 0);
}

#[test]
fn a_check_is_readable_or_json_and_its_status_tells() {
    let (_folder, rules) = folder_with("rules.toml", RULES);
    let server = serve(&["--rules", &rules]);
    let url = server.url("admin", "");
    let check = |more: &[&str]| tidegate(&[&["check", "user=alice", "--server", &url], more].concat());

    let allowed = check(&[]);
    assert_eq!(status(&allowed), 0, "{allowed:?}");
    let text = stdout(&allowed);
    assert!(text.starts_with("allow\n") && text.contains("per_user") && text.contains("remaining"), "{text}");

    let as_json = check(&["--json"]);
    assert_eq!((status(&as_json), &json(&as_json)["decision"]), (0, &Value::from("allow")));
    assert_eq!(json(&as_json)["rules"][0]["remaining"], 0);

    let denied = check(&["--json"]);
    assert_eq!((status(&denied), &json(&denied)["denied_by"]), (2, &Value::from("per_user")));
    let denied = check(&[]);
    assert_eq!(status(&denied), 2);
    assert!(stdout(&denied).starts_with("deny, by per_user\n"), "{denied:?}");
    let never = check(&["--cost", "3"]);
    assert!(stdout(&never).contains("never"), "{never:?}");
    assert_eq!(status(&check(&["--cost", "0"])), 0, "a look costs nothing and is always allowed");

    let other = tidegate(&["check", "plan=free", "--server", &url]);
    assert_eq!((status(&other), stdout(&other).contains("no rule applies")), (0, true), "{other:?}");
    let wrong = tidegate(&["check", "us er=x", "--server", &url]);
    assert_eq!(status(&wrong), 64, "{wrong:?}");
    assert!(stderr(&wrong).contains("the server answered 400: dimensions"), "{wrong:?}");
}

#[test]
fn without_a_server_a_command_says_so() {
    let nowhere = format!("http://127.0.0.1:{}", free_port());
    for words in [&["check", "user=a"][..], &["bench"]] {
        let output = tidegate(&[words, &["--server", &nowhere]].concat());
        assert_eq!(status(&output), 69, "{output:?}");
        assert!(stderr(&output).contains("is the server running"), "{output:?}");
    }
}

#[test]
fn a_token_opens_the_server_and_is_never_shown() {
    let made = tidegate(&["token", "new", "--name", "a \"b\"", "--role", "viewer", "--tenant", "acme"]);
    assert_eq!(status(&made), 0, "{made:?}");
    let (token, entry) = stdout(&made).split_once('\n').expect("the token, then its entry");
    let entry = &entry[entry.find("[[tokens]]").expect("an entry")..];
    assert!(token.starts_with("tg_") && !entry.contains(token));

    let (_folder, config) = folder_with("tidegate.toml", &format!("[[tenants]]\nname = 'acme'\n{entry}"));
    let (_rules_folder, rules) = folder_with("rules.toml", RULES);
    let mut serve = command(&[
        "serve",
        "--config",
        &config,
        "--rules",
        &rules,
        "--data-dir",
        "none",
        "--grpc-listen",
        "off",
        "--resp-listen",
        "off",
        "--http-listen",
        "off",
        "--admin-listen",
        "127.0.0.1:0",
    ]);
    serve.env("TIDEGATE_LOG", "trace");
    let (mut server, url, log) = start_with_log(serve);

    let without = tidegate(&["check", "user=a", "--server", &url]);
    assert_eq!(status(&without), 1);
    assert!(stderr(&without).contains("answered 401") && stderr(&without).contains("TIDEGATE_TOKEN"));
    let with = tidegate(&["check", "user=a", "--server", &url, "--token", token]);
    assert_eq!(status(&with), 0, "{with:?}");
    let by_variable =
        command(&["check", "user=a", "--server", &url]).env("TIDEGATE_TOKEN", token).output().expect("runs");
    assert_eq!(status(&by_variable), 0, "{by_variable:?}");
    let help = command(&["check", "--help"]).env("TIDEGATE_TOKEN", token).output().expect("runs");
    assert!(!stdout(&help).contains(token), "a secret in a help text");
    let broken = tidegate(&["check", "user=a", "--server", &url, "--token", "tg_\nsecret"]);
    assert_eq!(status(&broken), 64, "{broken:?}");
    assert!(!stderr(&broken).contains("secret"), "{broken:?}");

    assert_eq!(server.terminate(), Some(0));
    let log = std::fs::read_to_string(log.path()).expect("a log");
    assert!(log.contains("stopping"), "the log was written: {log}");
    assert!(!log.contains(&token["tg_".len()..]), "a secret in the log: {log}");
}

#[test]
fn a_token_as_json_has_the_same_parts() {
    let made = json(&tidegate(&["token", "new", "--json"]));
    assert_eq!((&made["role"], &made["tenant"]), (&Value::from("client"), &Value::Null));
    assert!(made["hash"].as_str().is_some_and(|hash| hash.starts_with("sha256:") && hash.len() == 71));
    let another = json(&tidegate(&["token", "new", "--json"]));
    assert_ne!(made["token"], another["token"]);
}

#[test]
fn listening_to_others_in_clear_text_is_warned_of() {
    let token = json(&tidegate(&["token", "new", "--json"]));
    let entry = format!("[[tokens]]\nname = 'a'\nhash = {}\n", token["hash"]);
    let (_folder, config) = folder_with("tidegate.toml", &entry);
    let serve = |listen: &str| {
        let (mut server, _, log) = start_with_log(command(&[
            "serve",
            "--config",
            &config,
            "--data-dir",
            "none",
            "--admin-listen",
            listen,
            "--http-listen",
            "off",
            "--grpc-listen",
            "off",
            "--resp-listen",
            "off",
        ]));
        assert_eq!(server.terminate(), Some(0));
        std::fs::read_to_string(log.path()).expect("a log")
    };
    assert!(serve("0.0.0.0:0").contains("without encryption"));
    assert!(!serve("127.0.0.1:0").contains("without encryption"));
}

/// Starts a server that writes its log to a file; gives the URL of its admin listener.
fn start_with_log(mut serve: Command) -> (Process, String, tempfile::NamedTempFile) {
    let log = tempfile::NamedTempFile::new().expect("a file");
    let out = tempfile::NamedTempFile::new().expect("a file");
    serve.stderr(log.reopen().expect("a file")).stdout(out.reopen().expect("a file"));
    let process = Process::spawn(&mut serve);
    let mut line = String::new();
    wait_until("the ready line", START_TIME_MAX, || {
        line = std::fs::read_to_string(out.path()).expect("text");
        line.ends_with('\n')
    });
    let address =
        line.split_whitespace().find_map(|word| word.strip_prefix("admin=")).expect("an admin listener");
    (process, format!("http://{}", address.replace("0.0.0.0", "127.0.0.1")), log)
}

/// A request of which the server has the beginning, and what is left to send.
fn begin_request(server: &Server) -> (TcpStream, &'static [u8]) {
    let body: &str = r#"{"dimensions":{"user":"alice"}}"#;
    let mut client = TcpStream::connect(server.address("http")).expect("it listens");
    client.set_read_timeout(Some(START_TIME_MAX)).expect("a deadline");
    let head = format!("POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    client.write_all(head.as_bytes()).expect("sent");
    client.write_all(&body.as_bytes()[..10]).expect("sent");
    // A second request, wholly answered, shows that the server has had time to read the first one's beginning.
    let admin = server.url("admin", "");
    assert_eq!(status(&tidegate(&["check", "user=b", "--server", &admin])), 0);
    (client, &body.as_bytes()[10..])
}

/// Asks it to stop, and waits until it no longer takes requests.
fn begin_stop(server: &Server) {
    server.process.signal(Signal::TERM);
    wait_until("the listener to close", START_TIME_MAX, || {
        TcpStream::connect(server.address("http")).is_err()
    });
}

#[test]
fn a_request_under_way_is_answered_when_the_server_stops() {
    let mut server = serve(&["--drain-timeout", "10m"]);
    let (mut client, rest) = begin_request(&server);
    begin_stop(&server);
    assert!(server.process.is_running(), "it waits for the request under way");
    client.write_all(rest).expect("sent");
    let mut answer = String::new();
    client.read_to_string(&mut answer).expect("an answer, then the end");
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    assert_eq!(server.process.exit_status(), Some(0));
}

#[test]
fn a_server_that_drains_is_alive_and_not_ready() {
    let mut server = serve(&["--drain-timeout", "10m"]);
    let get = |path| {
        let reply = send(server.address("admin"), &request("GET", path, &[], None));
        (reply.status, reply.body)
    };
    assert_eq!(get("/readyz"), (200, "ready\n".to_owned()));
    let (mut client, rest) = begin_request(&server);
    // A connection of its own from before counts as little as one from after.
    let mut watcher = TcpStream::connect(server.address("admin")).expect("it listens");
    begin_stop(&server);
    assert_eq!(get("/readyz"), (503, "draining\n".to_owned()));
    assert_eq!(get("/healthz"), (200, "ok\n".to_owned()));
    watcher.set_read_timeout(Some(START_TIME_MAX)).expect("a deadline");
    watcher.write_all(b"GET /readyz HTTP/1.1\r\nhost: x\r\n\r\n").expect("sent");
    let mut answer = [0; 12];
    watcher.read_exact(&mut answer).expect("an answer");
    assert_eq!(&answer, b"HTTP/1.1 503");

    client.write_all(rest).expect("sent");
    client.read_to_end(&mut Vec::new()).expect("an answer, then the end");
    assert_eq!(server.process.exit_status(), Some(0), "nobody waits for those who only watch");
}

#[test]
fn what_does_not_end_in_time_is_cut() {
    let mut server = serve(&["--drain-timeout", "0s"]);
    let (mut client, _) = begin_request(&server);
    assert_eq!(server.process.terminate(), Some(0));
    assert!(!matches!(client.read(&mut [0; 1]), Ok(1..)), "there is no answer");
}

#[test]
fn a_second_signal_ends_a_server_at_once() {
    for (signal, code) in [(Signal::TERM, 143), (Signal::INT, 130)] {
        let mut server = serve(&["--drain-timeout", "10m", "--request-timeout", "5m"]);
        let _client = begin_request(&server);
        begin_stop(&server);
        assert!(server.process.is_running(), "it waits for the request under way");
        server.process.signal(signal);
        assert_eq!(server.process.exit_status(), Some(code), "{signal:?}");
    }
}

#[test]
fn who_may_get_may_ask_for_the_head_alone() {
    let server = serve(&[]);
    for (listener, path) in
        [("admin", "/healthz"), ("admin", "/readyz"), ("admin", "/metrics"), ("http", "/openapi.json")]
    {
        let [get, head] =
            ["GET", "HEAD"].map(|method| send(server.address(listener), &request(method, path, &[], None)));
        assert_eq!((get.status, head.status), (200, 200), "{path}");
        assert_eq!(head.header("content-type"), get.header("content-type"), "{path}");
        assert!(!get.body.is_empty() && head.body.is_empty(), "{path}");
        let post = send(server.address(listener), &request("POST", path, &[], None));
        assert_eq!((post.status, post.header("allow")), (405, Some("GET, HEAD")), "{path}");
    }
    let head = send(server.address("http"), &request("HEAD", "/v1/check", &[], None));
    assert_eq!((head.status, head.header("allow")), (405, Some("POST")));
}

/// Starts a server under limits of open files, as a shell sets them.
#[cfg(target_os = "linux")]
fn start_within(ulimits: &str, connections_max: &str) -> (Process, String, tempfile::NamedTempFile) {
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("{ulimits} && exec \"$0\" \"$@\"")]);
    let listen = ["http", "grpc", "resp"].map(|listener| format!("--{listener}-listen=off"));
    let mut serve =
        command(&["serve", "--data-dir", "none", "--admin-listen", "127.0.0.1:0", "--workers", "1"]);
    serve.args(listen).args(["--connections-max", connections_max]);
    shell.arg(serve.get_program()).args(serve.get_args());
    for (name, _) in serve.get_envs() {
        shell.env_remove(name);
    }
    start_with_log(shell)
}

#[cfg(target_os = "linux")]
#[test]
fn the_limit_of_open_files_is_raised_as_far_as_needed() {
    let (process, _, log) = start_within("ulimit -Sn 64 && ulimit -Hn 1000", "100");
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", process.id())).expect("limits");
    let files = limits.lines().find(|line| line.starts_with("Max open files")).expect("the limit of files");
    let [soft, hard] =
        [3, 4].map(|at| files.split_whitespace().nth(at).and_then(|word| word.parse::<u64>().ok()));
    assert!(soft.is_some_and(|soft| (100..1_000).contains(&soft)) && hard == Some(1_000), "{files}");
    let log = std::fs::read_to_string(log.path()).expect("a log");
    assert!(!log.contains("open files"), "nothing to warn of: {log}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_server_takes_no_more_connections_than_the_system_lets_it_open() {
    let (_process, url, log) = start_within("ulimit -n 100", "5000");
    let address: SocketAddr = url.strip_prefix("http://").expect("a URL").parse().expect("an address");
    let told = std::fs::read_to_string(log.path()).expect("a log");
    assert!(told.contains("needed=324 allowed=100 connections_max=32"), "{told}");

    let connections: Vec<TcpStream> =
        (0..150).map(|_| TcpStream::connect(address).expect("the kernel takes it")).collect();
    let is_refused = |stream: &TcpStream| {
        stream.set_nonblocking(true).expect("set");
        // Nothing is ever sent on it: it waits, or it has ended.
        stream
            .peek(&mut [0; 1])
            .map_or_else(|error| error.kind() != ErrorKind::WouldBlock, |bytes| bytes == 0)
    };
    wait_until("those beyond to be refused", START_TIME_MAX, || {
        connections.iter().filter(|stream| is_refused(stream)).count() == 150 - 32
    });
    drop(connections);
    wait_until("room for another", START_TIME_MAX, || {
        let Ok(mut stream) = TcpStream::connect(address) else { return false };
        let _ = stream.write_all(&request("GET", "/healthz", &[], None));
        let mut answer = String::new();
        stream.read_to_string(&mut answer).is_ok_and(|_| answer.starts_with("HTTP/1.1 200 "))
    });
    let told = std::fs::read_to_string(log.path()).expect("a log");
    assert!(!told.contains("could not be accepted"), "{told}");
}

#[cfg(target_os = "linux")]
#[test]
fn connections_that_cannot_be_accepted_wait_and_are_told_of() {
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    let (process, url, log) = start_within("ulimit -n 1000", "100");
    let address: SocketAddr = url.strip_prefix("http://").expect("a URL").parse().expect("an address");
    let id = Pid::from_raw(process.id().try_into().expect("an id")).expect("not 0");
    let limit = |files| {
        let limit = Rlimit { current: Some(files), maximum: Some(1_000) };
        prlimit(Some(id), Resource::Nofile, limit).expect("its own child");
    };
    limit(3);
    let mut client = TcpStream::connect(address).expect("the kernel takes it");
    client.set_read_timeout(Some(START_TIME_MAX)).expect("a deadline");
    client.write_all(&request("GET", "/healthz", &[], None)).expect("sent");
    let told = || std::fs::read_to_string(log.path()).expect("a log");
    wait_until("a first word, and later one that counts", START_TIME_MAX, || {
        let log = told();
        let counts: Vec<u64> = log
            .lines()
            .filter(|line| line.contains("connections could not be accepted"))
            .filter_map(|line| line.split_once("times=")?.1.split(' ').next()?.parse().ok())
            .collect();
        counts.first() == Some(&1) && counts.iter().any(|times| *times > 1)
    });
    limit(1_000);
    let mut answer = String::new();
    client.read_to_string(&mut answer).expect("an answer, then the end");
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
}

#[test]
fn rules_are_validated_without_a_server() {
    let (_folder, file) = folder_with("rules.toml", RULES);
    let good = tidegate(&["rules", "validate", &file]);
    assert_eq!(status(&good), 0, "{good:?}");
    assert!(stdout(&good).contains("good: 1 rules, version "), "{good:?}");
    let good = json(&tidegate(&["rules", "validate", &file, "--json"]));
    assert_eq!(
        (&good["valid"], &good["rules"], good["problems"].as_array().map(Vec::len)),
        (&true.into(), &1.into(), Some(0))
    );

    std::fs::write(&file, "[[rules]]\nname=''\nkey=['us er']\nlimit=1\nperiod='1s'\n").expect("written");
    let bad = tidegate(&["rules", "validate", &file]);
    assert_eq!((status(&bad), stdout(&bad)), (64, ""));
    for problem in ["rules[0].name: ", "rules[0].key: "] {
        assert!(stderr(&bad).contains(&format!("error: {file}: {problem}")), "{bad:?}");
    }
    let bad = tidegate(&["rules", "validate", &file, "--json"]);
    assert_eq!(status(&bad), 64);
    assert_eq!(
        (&json(&bad)["valid"], json(&bad)["problems"].as_array().map(Vec::len)),
        (&false.into(), Some(2))
    );
    for missing in ["/nowhere.toml", "/"] {
        assert_eq!(status(&tidegate(&["rules", "validate", missing])), 64);
    }
}

#[test]
fn a_bench_counts_what_the_server_decided() {
    // On a machine that is too busy, checks of comfort pass uncounted; those of security are errors.
    let (_folder, rules) = folder_with("rules.toml", &format!("{RULES}class = 'security'\n"));
    let server = serve(&["--rules", &rules]);
    let url = server.url("http", "");
    let bench = ["bench", "--surface", "check", "--server", &url, "--duration", "1s", "--json"];
    let output = tidegate(&[&bench[..], &["--connections", "3", "--keys", "10"]].concat());
    assert_eq!(status(&output), 0, "{output:?}");
    let report = json(&output);
    // Ten keys with two each, and an hour to get more.
    assert_eq!(report["allowed"], 20, "{report}");
    let first_error = report["first_error"].as_str();
    assert!(first_error.is_none_or(|words| words.contains("overloaded")), "{report}");
    let count = |name: &str| report[name].as_u64().expect("a number");
    assert!(count("denied") > 0 && count("decisions") == 20 + count("denied"), "{report}");
    let latency = |name: &str| report["latency_us"][name].as_f64().expect("a number");
    assert!(
        latency("p50") > 0.0 && latency("p50") <= latency("p99") && latency("p99") <= latency("max"),
        "{report}"
    );

    let paced = json(&tidegate(&[&bench[..], &["--rate", "50", "--connections", "5"]].concat()));
    let decisions = paced["decisions"].as_u64().expect("a number");
    assert!((1..=50).contains(&decisions), "no more than were asked for: {paced}");
}

#[test]
fn a_bench_without_a_single_decision_fails() {
    let server = serve(&[]);
    let admin = server.url("admin", "");
    let output = tidegate(&["bench", "--server", &admin, "--duration", "1s", "--connections", "1"]);
    assert_eq!(status(&output), 1, "{output:?}");
    assert!(
        stderr(&output).contains("not one question got a decision: the server answered 404"),
        "{output:?}"
    );
}

#[test]
fn completions_and_manual_pages_are_made() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = tidegate(&["completions", shell]);
        assert!(status(&output) == 0 && stdout(&output).contains("check-config"), "{shell}");
    }
    let page = tidegate(&["man"]);
    assert!(status(&page) == 0 && stdout(&page).contains(".TH tidegate"), "{page:?}");
    let folder = tempfile::tempdir().expect("a folder");
    let pages = folder.path().join("man1");
    assert_eq!(status(&tidegate(&["man", "--dir", pages.to_str().expect("text")])), 0);
    for page in ["tidegate.1", "tidegate-serve.1", "tidegate-rules-validate.1", "tidegate-token-new.1"] {
        assert!(pages.join(page).is_file(), "{page}");
    }
}

/// The same with nobody who reads its answer, or not all of it.
fn unread(arguments: &[&str]) -> Output {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    command(arguments).stdout(writer).output().expect("it runs")
}

#[test]
fn a_reader_that_goes_away_early_changes_nothing_but_what_is_read() {
    let (folder, rules) = folder_with("rules.toml", RULES);
    let store = format!("sqlite:{}", folder.path().join("rules.db").to_str().expect("text"));
    let server = serve(&["--rules", &store]);
    let admin = server.url("admin", "");
    let made = unread(&["rules", "apply", &rules, "--yes", "--server", &admin]);
    assert_eq!((status(&made), stderr(&made)), (0, ""), "apply");
    let denied = ["check", "user=a", "--cost", "3", "--server", &admin];
    let quiet: [(&[&str], i32); 11] = [
        (&denied, 2),
        (&["rules", "list", "--server", &admin], 0),
        (&["rules", "list", "--toml", "--server", &admin], 0),
        (&["rules", "history", "--server", &admin], 0),
        (&["audit", "show", "--server", &admin], 0),
        (&["rules", "validate", &rules], 0),
        (&["bound", "--rules", &rules], 0),
        (&["plan", "--requests-per-second", "20k", "--keys", "5M"], 0),
        (&["sim", "--seeds", "2"], 0),
        (&["token", "new", "--name", "ci"], 0),
        (&["man"], 0),
    ];
    for (arguments, expected) in quiet {
        let output = unread(arguments);
        assert_eq!((status(&output), stderr(&output)), (expected, ""), "{arguments:?}");
    }
    let listed = tidegate(&["rules", "list", "--server", &admin]);
    assert!(stdout(&listed).contains("per_user"), "what nobody read about was done: {listed:?}");
}

/// Where the system has a device that is always full.
#[cfg(target_os = "linux")]
#[test]
fn an_answer_that_cannot_be_written_is_a_failure() {
    let full = std::fs::File::options().write(true).open("/dev/full").expect("a device");
    let output = command(&["token", "new", "--name", "ci"]).stdout(full).output().expect("it runs");
    assert_eq!(status(&output), 1);
    assert!(stderr(&output).starts_with("error: standard output: "), "{output:?}");
}

/// An authority, and what it has signed: files as a server and its clients are told of them.
struct Certificates {
    folder: tempfile::TempDir,
    authority: rcgen::CertifiedIssuer<'static, rcgen::KeyPair>,
}

impl Certificates {
    fn new() -> Self {
        let key = rcgen::KeyPair::generate().expect("a key");
        let mut parameters = rcgen::CertificateParams::new(Vec::<String>::new()).expect("parameters");
        parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let authority = rcgen::CertifiedIssuer::self_signed(parameters, key).expect("signed");
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("ca.pem"), authority.pem()).expect("written");
        let certificates = Self { folder, authority };
        certificates.sign("server", &["localhost", "127.0.0.1"]);
        certificates.sign("client", &["a client"]);
        certificates
    }

    fn sign(&self, name: &str, names: &[&str]) {
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let key = rcgen::KeyPair::generate().expect("a key");
        let parameters = rcgen::CertificateParams::new(names).expect("names");
        let certificate = parameters.signed_by(&key, &self.authority).expect("signed");
        std::fs::write(self.folder.path().join(format!("{name}.pem")), certificate.pem()).expect("written");
        std::fs::write(self.folder.path().join(format!("{name}.key")), key.serialize_pem()).expect("written");
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().expect("text").to_owned()
    }
}

/// An encrypted connection to a listener, after its handshake.
fn connect(address: SocketAddr, ca: &Path) -> std::io::Result<StreamOwned<ClientConnection, TcpStream>> {
    use rustls::pki_types::{CertificateDer, pem::PemObject};
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(ca).expect("a certificate")).expect("an authority");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").expect("a name");
    let stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(START_TIME_MAX))?;
    let mut stream =
        StreamOwned::new(ClientConnection::new(Arc::new(config), name).expect("a client"), stream);
    stream.conn.complete_io(&mut stream.sock)?;
    Ok(stream)
}

#[test]
fn every_listener_is_encrypted_once_there_is_a_certificate() {
    let certificates = Certificates::new();
    let (cert, key) = (certificates.text("server.pem"), certificates.text("server.key"));
    let server = serve(&["--tls-cert", &cert, "--tls-key", &key]);
    for listener in ["http", "grpc", "resp", "admin"] {
        let connected = connect(server.address(listener), &certificates.path("ca.pem"));
        assert!(connected.is_ok(), "{listener}: {:?}", connected.err());
    }
    let mut admin = connect(server.address("admin"), &certificates.path("ca.pem")).expect("encrypted");
    admin.write_all(b"GET /readyz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").expect("sent");
    let mut answer = Vec::new();
    let _ = admin.read_to_end(&mut answer);
    assert!(answer.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&answer));

    let url = format!("https://localhost:{}", server.address("admin").port());
    let ca = certificates.text("ca.pem");
    let trusted = tidegate(&["check", "user=a", "--server", &url, "--ca", &ca]);
    assert_eq!(status(&trusted), 0, "{trusted:?}");
    let unknown = tidegate(&["check", "user=a", "--server", &url]);
    assert_eq!(status(&unknown), 69, "{unknown:?}");
    let in_clear = tidegate(&["check", "user=a", "--server", &server.url("admin", "")]);
    assert_eq!(status(&in_clear), 69, "{in_clear:?}");
}

#[test]
fn a_server_that_wants_certificates_refuses_clients_without_one() {
    let certificates = Certificates::new();
    let (cert, key, ca) =
        (certificates.text("server.pem"), certificates.text("server.key"), certificates.text("ca.pem"));
    let server = serve(&["--tls-cert", &cert, "--tls-key", &key, "--tls-client-ca", &ca]);
    for listener in ["http", "grpc", "resp", "admin"] {
        // With TLS 1.3 the client's part of the handshake is over before the server has judged it.
        let refused = connect(server.address(listener), &certificates.path("ca.pem"))
            .and_then(|mut stream| stream.read(&mut [0; 1]));
        let error = refused.expect_err(listener).to_string();
        assert!(error.contains("CertificateRequired"), "{listener}: {error}");
    }
    let url = format!("https://localhost:{}", server.address("admin").port());
    let check = ["check", "user=a", "--server", &url, "--ca", &ca];
    assert_eq!(status(&tidegate(&check)), 69);
    let (cert, key) = (certificates.text("client.pem"), certificates.text("client.key"));
    let with = tidegate(&[&check[..], &["--client-cert", &cert, "--client-key", &key]].concat());
    assert_eq!(status(&with), 0, "{with:?}");
}

#[test]
fn tls_files_that_are_wrong_are_named() {
    let certificates = Certificates::new();
    let (cert, key) = (certificates.text("server.pem"), certificates.text("client.key"));
    let wrong = [
        (["--tls-cert", &cert, "--tls-key", "/nowhere.pem"], "tls_key: /nowhere.pem: "),
        (["--tls-cert", "/nowhere.pem", "--tls-key", &key], "tls_cert: /nowhere.pem: "),
        (["--tls-cert", &cert, "--tls-key", &key], "tls_cert: "),
    ];
    for (flags, words) in wrong {
        let output = tidegate(&[&["serve", "--check-config", "--data-dir", "none"], &flags[..]].concat());
        assert_eq!(status(&output), 64, "{output:?}");
        assert!(stderr(&output).contains(words), "{words}: {output:?}");
    }
}

#[test]
fn the_ready_line_names_every_open_listener_with_its_port() {
    let mut serve = command(&[
        "serve",
        "--data-dir",
        "none",
        "--http-listen",
        "127.0.0.1:0",
        "--grpc-listen",
        "off",
        "--resp-listen",
        "off",
        "--admin-listen",
        "127.0.0.1:0",
    ]);
    let mut child = serve.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("it starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
    child.kill().expect("its own child");
    child.wait().expect("its own child");
    let words: Vec<&str> = line.split_whitespace().collect();
    let ["tidegate", "is", "ready:", http, admin] = words[..] else { panic!("{line}") };
    for (word, listener) in [(http, "http="), (admin, "admin=")] {
        let address = word.strip_prefix(listener).unwrap_or_else(|| panic!("{line}"));
        assert_ne!(address.parse::<SocketAddr>().expect("an address").port(), 0, "{line}");
    }
}
