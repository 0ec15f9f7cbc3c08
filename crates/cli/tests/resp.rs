//! Redis clients that were not written here, against a real server.

#![allow(clippy::expect_used, clippy::panic, reason = "a helper of tests may panic as a test may")]

mod support;

use std::fmt::Write as _;
use std::io::{Read, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::Duration;

use support::{serve, tool};
use tidegate_server::auth::TokenHash;
use tidegate_testkit::{Redis, START_TIME_MAX, Server, wait_until};

/// Timeout for a reply on a busy machine.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(30);

fn run(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().expect("the program runs");
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{command:?} failed:\n{stdout}\n{stderr}");
    stdout.into_owned()
}

fn redis_cli(server: &Server, arguments: &[&str]) -> String {
    let port = server.address("resp").port().to_string();
    run(Command::new(tool("redis-cli")).args(["-p", &port]).args(arguments))
}

/// The start of every script: a client, and a check that is repeated if the server sheds it. Other
/// programs on the machine may cause that. A shed check charges nothing.
const PRELUDE: &str = r#"
import redis

def client(**options):
    return redis.Redis(port=PORT, decode_responses=True, **options)

def is_shed(answer):
    return answer == [0, answer[1], 0, -1, 0]

def throttle(c, *arguments):
    for _ in range(100_000):
        answer = c.execute_command("CL.THROTTLE", *arguments)
        if not is_shed(answer):
            return answer
    raise SystemExit("the server never had the time")
"#;

/// Runs a Python script, and fails where it does.
fn redis_py(server: &Server, script: &str) {
    let port = server.address("resp").port().to_string();
    let script = PRELUDE.replace("PORT", &port) + script;
    run(Command::new(tool("python3")).args(["-c", &script]));
}

#[test]
fn redis_py_asks_in_both_protocols() {
    let server = serve(&[]);
    for protocol in ["2", "3"] {
        redis_py(
            &server,
            &format!(
                r#"
c = client(protocol={protocol}, client_name="test")
assert c.ping() is True
assert c.echo("hello") == "hello"
assert c.client_getname() == "test"
assert c.client_id() > 0
key = "user{protocol}"
assert throttle(c, key, 15, 30, 60) == [0, 16, 15, -1, 2]
assert throttle(c, "slow" + key, 15, 1, 3600, 16) == [0, 16, 0, -1, 57600]
limited = throttle(c, "slow" + key, 15, 1, 3600)
assert limited[:3] == [1, 16, 0] and 1 <= limited[3] <= 3600 and limited[4] <= 57600, limited
assert c.config_get("save") == {{"save": ""}}
assert c.info("server")["server_name"] == "tidegate"
assert c.command_count() > 5

def pipelined(attempt):
    pipeline = c.pipeline(transaction=False)
    for n in range(1000):
        pipeline.execute_command("CL.THROTTLE", f"{protocol}-{{attempt}}-{{n % 100}}", 4, 1, 3600)
        if n % 10 == 0:
            pipeline.ping()
    return pipeline.execute()

for attempt in range(1000):
    answers = pipelined(attempt)
    decisions = [a for a in answers if a is not True]
    assert len(answers) == 1100 and len(decisions) == 1000, len(decisions)
    if not any(is_shed(a) for a in decisions):
        break
assert len([a for a in decisions if a[0] == 0]) == 500
assert [a is True for a in answers[:13]] == [n in (1, 12) for n in range(13)], "answers keep their order"

try:
    c.execute_command("CL.THROTTLE", key, "many", 30, 60)
    raise SystemExit("a wrong number was taken")
except redis.ResponseError as e:
    assert str(e) == "Cell error: Store error: Couldn't parse as integer: many", e
try:
    c.get(key)
    raise SystemExit("GET was answered")
except redis.ResponseError as e:
    assert "unknown command 'GET'" in str(e), e
"#
            ),
        );
    }
}

/// A configuration with two tenants and a token for each.
fn two_tenants() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let mut text = String::new();
    for tenant in ["red", "blue"] {
        let hash = TokenHash::of(format!("tg_{tenant}").as_bytes());
        write!(
            text,
            "[[tenants]]\nname = \"{tenant}\"\n\
             [[tokens]]\nname = \"{tenant}\"\nhash = \"{hash}\"\ntenant = \"{tenant}\"\n"
        )
        .expect("a string");
    }
    let path = folder.path().join("tidegate.toml");
    std::fs::write(&path, text).expect("written");
    (folder, path)
}

#[test]
fn a_token_is_a_password_and_tenants_are_apart() {
    let (_folder, path) = two_tenants();
    let server = serve(&["--config", path.to_str().expect("text")]);
    redis_py(
        &server,
        r#"
for options in [{}, {"password": "tg_green"}, {"username": "red", "password": "x", "protocol": 3}]:
    try:
        client(**options).ping()
        raise SystemExit(f"let in: {options}")
    except redis.AuthenticationError:
        pass
red = client(password="tg_red")
red3 = client(username="red", password="tg_red", protocol=3)
blue = client(username="whoever", password="tg_blue", protocol=3)
ask = lambda c: throttle(c, "k", 0, 1, 3600)[0]
assert [ask(red), ask(red), ask(red3)] == [0, 1, 1]
assert [ask(blue), ask(blue)] == [0, 1]
assert blue.info("keyspace")["db0"]["keys"] == 1
"#,
    );
}

#[test]
fn redis_cli_output_matches_the_redis_cell_readme() {
    let server = serve(&[]);
    for protocol in ["-2", "-3"] {
        let question = [protocol, "CL.THROTTLE", &format!("user{protocol}"), "15", "30", "60"];
        let mut answer = redis_cli(&server, &question);
        // An overloaded server lets the request pass and charges nothing.
        wait_until("the server to have the time", START_TIME_MAX, || {
            let shed = answer == "0\n16\n0\n-1\n0\n";
            if shed {
                answer = redis_cli(&server, &question);
            }
            !shed
        });
        assert_eq!(answer, "0\n16\n15\n-1\n2\n");
    }
    assert_eq!(redis_cli(&server, &["PING"]), "PONG\n");
}

#[test]
fn redis_benchmark_sends_pipelines_and_every_decision_is_counted() {
    let server = serve(&[]);
    let port = server.address("resp").port().to_string();
    let load = [
        "-P",
        "16",
        "-c",
        "20",
        "-n",
        "32000",
        "-r",
        "1000",
        "-q",
        "CL.THROTTLE",
        "key:__rand_int__",
        "15",
        "30",
        "60",
    ];
    let printed = run(Command::new(tool("redis-benchmark")).args(["-p", &port]).args(load));
    assert!(printed.contains("requests per second"), "{printed}");
    let scrape = ureq::get(server.url("admin", "/metrics"))
        .call()
        .and_then(|mut answer| answer.body_mut().read_to_string())
        .expect("a scrape");
    let counted: u64 = scrape
        .lines()
        .filter(|line| line.starts_with("tidegate_decisions_total{surface=\"resp\""))
        .filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok())
        .sum();
    assert_eq!(counted, 32_000, "{scrape}");
}

/// Sends bytes, closes the sending side, and returns the whole reply.
fn exchange(address: SocketAddr, sent: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).expect("connects");
    stream.set_read_timeout(Some(ANSWER_TIME_MAX)).expect("set");
    stream.write_all(sent).expect("written");
    stream.shutdown(std::net::Shutdown::Write).expect("half closed");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("answered and closed");
    answer.escape_ascii().to_string()
}

/// Requests that Redis answers with the same bytes.
const SAME_WORDS: &[&[u8]] = &[
    b"PING\r\n",
    b"*1\r\n$4\r\nPING\r\n*2\r\n$4\r\nPING\r\n$2\r\nhi\r\n",
    b"*0\r\n*-1\r\n\r\nPING\n",
    b"*1\r\n$4\r\nPINGxxPING\r\n",
    b"PING a b\r\nECHO\r\nECHO hi\r\n",
    b"ECHO \"a\\tb\\x41\\q\"\r\nECHO 'it\\'s'\r\nECHO \"\"\r\n",
    b"SELECT 0\r\nSELECT 99\r\nSELECT x\r\nSELECT\r\n",
    b"RESET\r\nRESET a\r\n",
    b"QUIT\r\nPING\r\n",
    b"AUTH x\r\nAUTH u p\r\nAUTH default p\r\nAUTH\r\nAUTH a b c\r\n",
    b"HELLO 4\r\nHELLO x\r\nHELLO 2 FOO\r\nHELLO 2 AUTH x\r\nHELLO 3 SETNAME \"a b\"\r\nHELLO 2 AUTH u p\r\n",
    b"CLIENT GETNAME\r\nCLIENT SETNAME me\r\nCLIENT GETNAME\r\nCLIENT SETNAME\r\nCLIENT SETNAME \"a b\"\r\n",
    b"CLIENT\r\nCLIENT FOO\r\nCLIENT ID x\r\nCLIENT NO-EVICT on\r\nCLIENT NO-EVICT x\r\n",
    b"CONFIG GET save\r\nCONFIG GET nosuch\r\nCONFIG GET\r\nCONFIG\r\nCONFIG FOO\r\n",
    b"COMMAND FOO\r\nCOMMAND INFO nosuch\r\nCOMMAND DOCS nosuch\r\n",
    b"INFO nosuch\r\n",
    b"nosuch\r\nnosuch with words\r\n\"no\\r\\nsuch\"\r\n*1\r\n$0\r\n\r\n",
    b"*abc\r\n",
    b"*\r\n",
    b"*+1\r\n",
    b"*01\r\n",
    b"*99999999999999999999\r\n",
    b"*1\r\n+PING\r\n",
    b"*1\r\n\r\n",
    b"*1\r\n$-1\r\n",
    b"*1\r\n$abc\r\n",
    b"*1\r\n$04\r\n",
    b"*1\r\n$4294967296\r\n",
    b"ping \"abc\r\n",
    b"'a'b\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\nPING\r\n",
    b"post\r\nPING\r\n",
    b"HOST: localhost\r\nPING\r\n",
    b"*1\r\n$4\r\nPOST\r\n*1\r\n$4\r\nPING\r\n",
];

#[test]
fn shared_commands_get_the_same_replies_as_redis() {
    let server = serve(&[]);
    let store = Redis::start(&[]);
    let redis = store.address();
    for sent in SAME_WORDS {
        assert_eq!(exchange(server.address("resp"), sent), exchange(redis, sent), "{}", sent.escape_ascii());
    }
    let long = [vec![b'x'; 40], vec![b'y'; 200], vec![b'z'; 9]].join(&b' ');
    let sent = [b"nosuch ", long.as_slice(), b"\r\n"].concat();
    assert_eq!(exchange(server.address("resp"), &sent), exchange(redis, &sent));
}

#[test]
fn stop_answers_received_requests_and_closes() {
    let mut server = serve(&[]);
    let mut stream = TcpStream::connect(server.address("resp")).expect("connects");
    stream.set_read_timeout(Some(START_TIME_MAX)).expect("set");
    stream.write_all(b"PING\r\n").expect("written");
    let mut pong = [0; 7];
    stream.read_exact(&mut pong).expect("answered");
    assert_eq!(server.process.terminate(), Some(0));
    let mut rest = Vec::new();
    assert_eq!(stream.read_to_end(&mut rest).expect("closed"), 0);
}
