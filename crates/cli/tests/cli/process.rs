//! A running server: tokens, signals, draining, and the limit of open files.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;

use tidegate_testkit::{Process, START_TIME_MAX, Server, Signal, wait_until};

use crate::support::raw::{request, send};
use crate::support::{serve, tidegate as command};
use crate::{RULES, folder_with, start_with_log, status, stderr, stdout, tidegate};

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

/// Sends the beginning of a request. Returns the connection and the rest.
fn begin_request(server: &Server) -> (TcpStream, &'static [u8]) {
    let body: &str = r#"{"dimensions":{"user":"alice"}}"#;
    let mut client = TcpStream::connect(server.address("http")).expect("it listens");
    client.set_read_timeout(Some(START_TIME_MAX)).expect("a deadline");
    let head = format!("POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    client.write_all(head.as_bytes()).expect("sent");
    client.write_all(&body.as_bytes()[..10]).expect("sent");
    // A complete second request gives the server time to read the beginning of the first.
    let admin = server.url("admin", "");
    assert_eq!(status(&tidegate(&["check", "user=b", "--server", &admin])), 0);
    (client, &body.as_bytes()[10..])
}

/// Asks the server to stop, and waits until it accepts no connections.
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
fn request_beyond_the_drain_timeout_is_cut() {
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
fn head_is_answered_wherever_get_is() {
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
        // The server sends nothing on it: the connection is open, or it has ended.
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
fn unaccepted_connections_wait_and_are_logged() {
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
