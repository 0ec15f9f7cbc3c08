//! How many commands decisions cost Redis.

use std::collections::BTreeSet;
use std::time::Duration;

use tidegate_load::RespConnection;
use tidegate_testkit::{Redis, START_TIME_MAX, Server, ask, wait_until};

use crate::client::{Client, FOR_EVER, TIME_MAX, metric, start_region};
use crate::meters::{assert_all_end, commands};

/// Idle time after which no further call is expected: a few times the report interval of a server.
const QUIET: Duration = Duration::from_millis(500);

/// Connections that make checks on one key at the same time, and requests on each.
const CONNECTIONS: usize = 4;
const REQUESTS: usize = 250;

/// Maximum of calls with checks for all these requests: one for a hundred.
const CALLS_MAX: usize = CONNECTIONS * REQUESTS / 100;

/// Scripts that were run, however they were named.
fn scripts(redis: &Redis) -> u64 {
    commands(redis, "evalsha") + commands(redis, "eval")
}

/// Returns the time of a Redis.
fn time(redis: &Redis) -> Duration {
    let (seconds, micros): (u64, u64) = ask(redis, &["TIME"]);
    Duration::from_secs(seconds) + Duration::from_micros(micros)
}

/// Waits until the origin receives no more calls, by its own clock.
fn wait_for_quiet(redis: &Redis) {
    let (mut run, mut since) = (scripts(redis), time(redis));
    wait_until("quiet", TIME_MAX, || {
        let now = scripts(redis);
        if now != run {
            (run, since) = (now, time(redis));
        }
        time(redis).saturating_sub(since) >= QUIET
    });
}

/// Returns the calls, retries and meter updates that a server has sent to its origin.
fn said(server: &Server) -> [u64; 3] {
    let names =
        ["tidegate_origin_calls_total", "tidegate_origin_retries_total", "tidegate_origin_updates_total"];
    names.map(|name| metric(server, name))
}

/// One call contains every limit of a request, and a key without further requests causes no further
/// call. Second attempts, sent if the first reply takes more than 3 ms on a busy machine, are
/// counted apart.
#[test]
fn a_cold_request_under_four_limits_is_one_command() {
    let redis = Redis::start(&[]);
    let rule = |name: &str, key: &str| {
        format!("[[rules]]\nname='{name}'\nkey=[{key}]\nlimit=100\nperiod='{FOR_EVER}'\n")
    };
    let keys = [("user", "'user'"), ("path", "'user','path'"), ("method", "'user','method'")];
    let rules: String = keys.iter().map(|(name, key)| rule(name, key)).collect();
    let fleet = start_region(&redis.url(), &(rules + &rule("all", "'user','path','method'")), 1);
    let mut client = Client::of(&fleet.servers[0]);
    let mut asks = |number: u64| {
        let user = format!("user {number}");
        client.check(&[("user", &user), ("path", "/"), ("method", "GET")], 1)
    };
    let mut number = 0;
    wait_until("the script to be loaded, and a request that was answered in time", TIME_MAX, || {
        wait_for_quiet(&redis);
        let (run, before) = (scripts(&redis), said(&fleet.servers[0]));
        number += 1;
        let answer = asks(number);
        wait_for_quiet(&redis);
        let after = said(&fleet.servers[0]);
        let [calls, repeats, updates] = [0, 1, 2].map(|at| after[at] - before[at]);
        // The first request loads the script. A request without a reply in time is decided locally,
        // and reported later.
        if number == 1 || !answer.is_regional() {
            return false;
        }
        assert_eq!(answer.body["rules"].as_array().map(Vec::len), Some(4), "{answer:?}");
        assert_eq!((calls, updates), (1, 4));
        assert_eq!(scripts(&redis) - run, 1 + repeats);
        true
    });
    assert_all_end(&redis);
}

/// The first of a thousand requests is sent at once, and those that arrive meanwhile share the next
/// call. Then the server has a grant. If all arrive within one call, two calls contain checks, as
/// the engine's own tests show. A real server takes a moment to read them, and a local Redis
/// replies quickly, so there may be a few more. Calls that only report or renew a grant are not
/// counted. The first argument of a call, in the command log of Redis, shows its content.
#[test]
fn a_thousand_cold_requests_on_one_key_are_asked_in_a_few_calls() {
    let redis = Redis::start(&["--slowlog-log-slower-than", "0", "--slowlog-max-len", "100000"]);
    let fleet = start_region(&redis.url(), "rules = []", 1);
    let address = fleet.servers[0].address("resp");
    let connect = || RespConnection::open(address, START_TIME_MAX).expect("it listens");
    throttle(connect(), "warm", 1);
    wait_for_quiet(&redis);
    ask::<String>(&redis, &["SLOWLOG", "RESET"]);
    let connections: Vec<RespConnection> = (0..CONNECTIONS).map(|_| connect()).collect();
    let asking = connections
        .into_iter()
        .map(|connection| std::thread::spawn(move || throttle(connection, "cold", REQUESTS)));
    let asking: Vec<_> = asking.collect();
    let passed: usize = asking.into_iter().map(|asking| asking.join().expect("no panic")).sum();
    assert_eq!(passed, CONNECTIONS * REQUESTS);
    wait_for_quiet(&redis);
    let asked = calls_that_ask(&redis);
    println!("{passed} requests in {} calls: {asked:?}", asked.len());
    assert!((1..=CALLS_MAX).contains(&asked.len()), "{asked:?}");
    assert_all_end(&redis);
}

/// Sends a number of checks on a key at once. Returns how many pass.
fn throttle(mut connection: RespConnection, key: &str, times: usize) -> usize {
    let command = tidegate_load::throttle(key, 1_000_000, Duration::from_hours(24));
    connection.send(&command.repeat(times)).expect("sent");
    (0..times).filter(|_| connection.read().expect("an answer").expect("a decision").is_allowed).count()
}

type Entry = (i64, i64, i64, Vec<Vec<u8>>, String, String);

/// Positions of numbers at the start of a call.
const SEQUENCE: usize = 0;
const ASKS: usize = 5;

/// Returns the calls that contain checks, by session and sequence number. Repeated calls count
/// once.
fn calls_that_ask(redis: &Redis) -> BTreeSet<String> {
    let log: Vec<Entry> = ask(redis, &["SLOWLOG", "GET", "100000"]);
    let calls = log
        .iter()
        .map(|(_, _, _, command, ..)| command)
        .filter(|command| matches!(command[0].to_ascii_uppercase().as_slice(), b"EVALSHA" | b"EVAL"));
    let text = |word: &[u8]| String::from_utf8(word.to_vec()).expect("text");
    let asked = calls.filter_map(|command| {
        let keys: usize = text(&command[2]).parse().expect("a number of keys");
        // A probe of the origin has keys alone.
        let [node, numbers] = &command[3 + keys..] else { return None };
        let number = |place: usize| f64::from_le_bytes(numbers.as_chunks().0[place]);
        let asks = number(ASKS) > 0.0;
        asks.then(|| format!("{} {} {}", text(&command[3]), text(node), number(SEQUENCE)))
    });
    asked.collect()
}
