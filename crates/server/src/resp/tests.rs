//! Tests of requests and replies, byte by byte.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use proptest::prelude::{Just, Strategy, any, prop_assert, prop_assert_eq, prop_oneof, proptest};
use tidegate::ManualClock;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio_util::sync::CancellationToken;

use super::dialogue::{Dialogue, Next};
use super::pending::{PendingReply, all_replies};
use super::reply::Protocol;
use super::request::{ARGUMENT_BYTES_MAX, ARGUMENTS_MAX, LINE_BYTES_MAX, ProtocolError, Trust, read_all};
use super::{READ_BYTES, serve};
use crate::auth::TokenHash;
use crate::fuzzing::small_config;
use crate::guard::ConnectionState;
use crate::pipeline::tests::{overloaded, recording};
use crate::request_memory::PartialRequest;
use crate::shared::Shared;
use crate::worker::Context;

/// A connection without a socket, on a clock that the test sets.
struct Bench {
    clock: Arc<ManualClock>,
    shared: Arc<Shared>,
    dialogue: Dialogue,
}

impl Bench {
    fn open() -> Self {
        Self::with("")
    }

    fn with(file: &str) -> Self {
        let (mut config, clock) = (small_config(Some(file)), Arc::new(ManualClock::new()));
        let shared = Arc::new(Shared::on_clock(&mut config, Arc::clone(&clock)).expect("starts"));
        let dialogue = Dialogue::new(Arc::clone(&shared));
        Self { clock, shared, dialogue }
    }

    /// A server with two tenants, and a token for each.
    fn guarded() -> Self {
        let row = |tenant: &str| {
            let hash = TokenHash::of(tenant_token(tenant).as_bytes());
            format!(
                "[[tenants]]\nname = {tenant:?}\n\
                 [[tokens]]\nname = {tenant:?}\nhash = \"{hash}\"\ntenant = {tenant:?}\n"
            )
        };
        Self::with(&[row("red"), row("blue")].concat())
    }

    /// Another client of the same server.
    fn reconnect(&mut self) {
        self.dialogue = Dialogue::new(Arc::clone(&self.shared));
    }

    /// Returns the replies to `sent`, which contains only complete requests, and the next step.
    fn exchange(&mut self, sent: &[u8]) -> (Vec<u8>, Next) {
        let mut out = Vec::new();
        let (used, next) = self.dialogue.answer(sent, &mut out);
        assert!(used == sent.len() || next != Next::More, "{} was not used", sent[used..].escape_ascii());
        (out, next)
    }

    fn text(&mut self, sent: &str) -> String {
        String::from_utf8(self.exchange(sent.as_bytes()).0).expect("text")
    }

    fn throttle(&mut self, arguments: &str) -> [i64; 5] {
        let answer = self.text(&format!("CL.THROTTLE {arguments}\r\n"));
        numbers(&answer).unwrap_or_else(|| panic!("{arguments}: {answer}"))
    }
}

fn tenant_token(tenant: &str) -> String {
    format!("tg_{tenant}")
}

fn numbers(answer: &str) -> Option<[i64; 5]> {
    let lines: Option<Vec<i64>> = answer
        .strip_prefix("*5\r\n")?
        .split_terminator("\r\n")
        .map(|line| line.strip_prefix(':')?.parse().ok())
        .collect();
    lines?.try_into().ok()
}

/// A request as an array of bulk strings.
fn array(words: &[&str]) -> Vec<u8> {
    words
        .iter()
        .fold(format!("*{}\r\n", words.len()), |frame, word| format!("{frame}${}\r\n{word}\r\n", word.len()))
        .into()
}

/// The time in microseconds, the check, and the reply of redis-cell. A new key starts at 0 again.
type Row = (u64, &'static str, [i64; 5]);

/// The README of redis-cell, and the cases that its own tests go through.
const REDIS_CELL: &[Row] = &[
    (0, "user123 15 30 60", [0, 16, 15, -1, 2]),
    (0, "user123-again 15 30 60 1", [0, 16, 15, -1, 2]),
    (0, "user123-read-rate 15 30 60", [0, 16, 15, -1, 2]),
    (0, "user123-write-rate 5 10 60", [0, 6, 5, -1, 6]),
    (0, "foo 4 1 1 6", [1, 5, 5, -1, 0]),
    (0, "foo 4 1 1 1", [0, 5, 4, -1, 1]),
    (0, "foo 4 1 1 1", [0, 5, 3, -1, 2]),
    (0, "foo 4 1 1 1", [0, 5, 2, -1, 3]),
    (0, "foo 4 1 1 1", [0, 5, 1, -1, 4]),
    (0, "foo 4 1 1 1", [0, 5, 0, -1, 5]),
    (0, "foo 4 1 1 1", [1, 5, 0, 1, 5]),
    (3_000_000, "foo 4 1 1 1", [0, 5, 2, -1, 3]),
    (3_100_000, "foo 4 1 1 1", [0, 5, 1, -1, 4]),
    (4_000_000, "foo 4 1 1 1", [0, 5, 1, -1, 4]),
    (8_000_000, "foo 4 1 1 1", [0, 5, 4, -1, 1]),
    (9_500_000, "foo 4 1 1 1", [0, 5, 4, -1, 1]),
    (9_500_000, "foo 4 1 1 0", [0, 5, 4, -1, 1]),
    (9_500_000, "foo 4 1 1 2", [0, 5, 2, -1, 3]),
    (9_500_000, "foo 4 1 1 5", [1, 5, 2, 3, 3]),
];

/// More cases, computed from the documented algorithm of redis-cell by an independent program.
const DERIVED: &[Row] = &[
    (0, "even 0 1 1", [0, 1, 0, -1, 1]),
    (0, "even 0 1 1", [1, 1, 0, 1, 1]),
    (500_000, "even 0 1 1", [1, 1, 0, 1, 1]),
    (999_999, "even 0 1 1", [1, 1, 0, 0, 0]),
    (1_000_000, "even 0 1 1", [0, 1, 0, -1, 1]),
    (1_000_001, "even 0 1 1", [1, 1, 0, 1, 1]),
    (0, "e2e 0 1 2 1", [0, 1, 0, -1, 2]),
    (0, "e2e 0 1 2 1", [1, 1, 0, 2, 2]),
    (2_000_000, "e2e 0 1 2 1", [0, 1, 0, -1, 2]),
    (0, "thirty 15 30 60 4", [0, 16, 12, -1, 8]),
    (0, "thirty 15 30 60 4", [0, 16, 8, -1, 16]),
    (0, "thirty 15 30 60 4", [0, 16, 4, -1, 24]),
    (0, "thirty 15 30 60 4", [0, 16, 0, -1, 32]),
    (0, "thirty 15 30 60 1", [1, 16, 0, 2, 32]),
    (1_999_000, "thirty 15 30 60 1", [1, 16, 0, 1, 31]),
    (2_000_000, "thirty 15 30 60 1", [0, 16, 0, -1, 32]),
    (32_000_000, "thirty 15 30 60 0", [0, 16, 15, -1, 2]),
    (34_000_000, "thirty 15 30 60 0", [0, 16, 16, -1, 0]),
    (0, "q 5 10 60 0", [0, 6, 6, -1, 0]),
    (0, "q 5 10 60 5", [0, 6, 1, -1, 30]),
    (0, "q 5 10 60 6", [1, 6, 1, 30, 30]),
    (0, "q 5 10 60 7", [1, 6, 1, -1, 30]),
    (0, "q 5 10 60 6", [1, 6, 1, 30, 30]),
    (0, "q 5 10 60 1", [0, 6, 0, -1, 36]),
    (0, "q 5 10 60 0", [0, 6, 0, -1, 36]),
    (0, "q 5 10 60 5", [1, 6, 0, 30, 36]),
    (3_500_000, "q 5 10 60 1", [1, 6, 0, 3, 33]),
    (6_000_000, "q 5 10 60 1", [0, 6, 0, -1, 36]),
    (6_000_000, "q 5 10 60 0", [0, 6, 0, -1, 36]),
    (0, "round 3 1 10 1", [0, 4, 3, -1, 10]),
    (1, "round 3 1 10 0", [0, 4, 3, -1, 10]),
    (999, "round 3 1 10 0", [0, 4, 3, -1, 10]),
    (1_000, "round 3 1 10 0", [0, 4, 3, -1, 10]),
    (1_001, "round 3 1 10 0", [0, 4, 3, -1, 10]),
    (1_999, "round 3 1 10 0", [0, 4, 3, -1, 10]),
    (2_000, "round 3 1 10 0", [0, 4, 3, -1, 10]),
    (9_000_000, "round 3 1 10 0", [0, 4, 3, -1, 1]),
    (9_000_999, "round 3 1 10 0", [0, 4, 3, -1, 1]),
    (9_001_000, "round 3 1 10 0", [0, 4, 3, -1, 1]),
    (9_999_001, "round 3 1 10 0", [0, 4, 3, -1, 0]),
    (0, "fast 2 10 1", [0, 3, 2, -1, 1]),
    (0, "fast 2 10 1", [0, 3, 1, -1, 1]),
    (0, "fast 2 10 1", [0, 3, 0, -1, 1]),
    (0, "fast 2 10 1", [1, 3, 0, 1, 1]),
    (99_000, "fast 2 10 1", [1, 3, 0, 1, 1]),
    (100_000, "fast 2 10 1", [0, 3, 0, -1, 1]),
    (100_000, "fast 2 10 1 2", [1, 3, 0, 1, 1]),
    (100_000, "fast 2 10 1 4", [1, 3, 0, -1, 1]),
    (400_000, "fast 2 10 1 3", [0, 3, 0, -1, 1]),
    (0, "seven 6 7 1", [0, 7, 6, -1, 1]),
    (0, "seven 6 7 1", [0, 7, 5, -1, 1]),
    (0, "seven 6 7 1", [0, 7, 4, -1, 1]),
    (0, "seven 6 7 1", [0, 7, 3, -1, 1]),
    (0, "seven 6 7 1", [0, 7, 2, -1, 1]),
    (0, "seven 6 7 1", [0, 7, 1, -1, 1]),
    (0, "seven 6 7 1", [0, 7, 0, -1, 1]),
    (0, "seven 6 7 1", [1, 7, 0, 1, 1]),
    (142_000, "seven 6 7 1", [1, 7, 0, 0, 1]),
    (143_000, "seven 6 7 1", [0, 7, 0, -1, 1]),
    (700_000, "seven 6 7 1 3", [0, 7, 0, -1, 1]),
    (5_000_000, "seven 6 7 1 0", [0, 7, 7, -1, 0]),
    (0, "daily 1 1 86400", [0, 2, 1, -1, 86_400]),
    (0, "daily 1 1 86400", [0, 2, 0, -1, 172_800]),
    (0, "daily 1 1 86400", [1, 2, 0, 86_400, 172_800]),
    (43_200_000_000, "daily 1 1 86400", [1, 2, 0, 43_200, 129_600]),
    (86_400_000_000, "daily 1 1 86400", [0, 2, 0, -1, 172_800]),
    (86_400_000_000, "daily 1 1 86400", [1, 2, 0, 86_400, 172_800]),
    (0, "shared 9 10 10 4", [0, 10, 6, -1, 4]),
    (0, "shared 4 10 10 0", [0, 5, 1, -1, 4]),
    (0, "shared 4 10 10 1", [0, 5, 0, -1, 5]),
    (0, "shared 4 10 10 1", [1, 5, 0, 1, 5]),
    (0, "shared 9 10 10 0", [0, 10, 5, -1, 5]),
    (0, "shared 1 10 10 0", [1, 2, 0, 3, 5]),
    (0, "shared 1 10 10 1", [1, 2, 0, 4, 5]),
    (0, "shared 1 1 10 1", [0, 2, 0, -1, 15]),
    (4_500_000, "shared 1 1 10 1", [1, 2, 0, 1, 11]),
    (4_500_000, "shared 1 10 10 1", [1, 2, 0, 10, 11]),
    (0, "large 999999 1000000 3600 400000", [0, 1_000_000, 600_000, -1, 1_440]),
    (0, "large 999999 1000000 3600 600000", [0, 1_000_000, 0, -1, 3_600]),
    (0, "large 999999 1000000 3600 1", [1, 1_000_000, 0, 1, 3_600]),
    (3_600_000, "large 999999 1000000 3600 1000", [0, 1_000_000, 0, -1, 3_600]),
];

/// A burst below zero: nothing passes, by the arithmetic of redis-cell.
const WITHOUT_ROOM: &[Row] = &[
    (0, "none -1 30 60", [1, 0, 0, -1, 0]),
    (0, "none -5 30 60", [1, -4, 0, -1, 0]),
    (0, "none -1 30 60 0", [0, 0, 0, -1, 0]),
    (0, "none 3 30 60 2", [0, 4, 2, -1, 4]),
    (0, "none -1 30 60 1", [1, 0, 0, -1, 4]),
    (0, "none -1 30 60 0", [1, 0, 0, 4, 4]),
    (0, "none -2 30 60 0", [1, -1, 0, -1, 4]),
    (1_500_000, "none -1 30 60 1", [1, 0, 0, -1, 3]),
];

/// A quantity below zero gives back, down to an empty meter.
const GIVEN_BACK: &[Row] = &[
    (0, "back 4 1 1 5", [0, 5, 0, -1, 5]),
    (0, "back 4 1 1 -2", [0, 5, 2, -1, 3]),
    (0, "back 4 1 1 2", [0, 5, 0, -1, 5]),
    (0, "back 4 1 1 -9223372036854775808", [0, 5, 5, -1, 0]),
    (0, "back 4 1 1 5", [0, 5, 0, -1, 5]),
];

fn play(rows: &[Row]) {
    let mut last_key = "";
    let mut bench = Bench::open();
    for (at_us, arguments, expected) in rows {
        let key = arguments.split(' ').next().expect("a key");
        if key != last_key {
            (last_key, bench) = (key, Bench::open());
        }
        bench.clock.set(*at_us, *at_us);
        assert_eq!(bench.throttle(arguments), *expected, "{arguments} at {at_us} us");
    }
}

#[test]
fn redis_cells_own_cases_are_answered_as_redis_cell_does() {
    play(REDIS_CELL);
}

#[test]
fn cases_derived_from_redis_cells_algorithm_are_answered_as_it_would() {
    assert!(DERIVED.len() >= 40);
    play(DERIVED);
}

#[test]
fn nothing_passes_a_burst_below_zero() {
    play(WITHOUT_ROOM);
}

#[test]
fn a_quantity_below_zero_gives_back() {
    play(GIVEN_BACK);
}

#[test]
fn a_batch_is_answered_like_the_same_requests_one_by_one() {
    let requests: Vec<String> =
        (0..200).map(|n| format!("CL.THROTTLE key{} {} 10 60 {}\r\n", n % 7, n % 3 * 5, n % 4)).collect();
    let (mut one_by_one, mut batch) = (Bench::open(), Bench::open());
    let expected: String = requests.iter().map(|request| one_by_one.text(request)).collect();
    assert_eq!(batch.text(&requests.concat()), expected);
}

#[test]
fn limits_beyond_the_cache_are_decided() {
    let mut bench = Bench::open();
    for round in 1..=3 {
        for burst in 3..40 {
            let answer = bench.throttle(&format!("key{burst} {burst} 1 60"));
            assert_eq!(answer, [0, burst + 1, burst + 1 - round, -1, 60 * round]);
        }
    }
}

/// Commands, each with its exact reply.
const COMMANDS: &[(&str, &str)] = &[
    ("PING", "+PONG\r\n"),
    ("ping", "+PONG\r\n"),
    ("PING hello", "$5\r\nhello\r\n"),
    ("PING a b", "-ERR wrong number of arguments for 'ping' command\r\n"),
    ("ECHO hi", "$2\r\nhi\r\n"),
    ("ECHO \"a\\tb\"", "$3\r\na\tb\r\n"),
    ("ECHO \"\\x41\\n\"", "$2\r\nA\n\r\n"),
    ("ECHO 'it\\'s'", "$4\r\nit's\r\n"),
    ("ECHO \"\"", "$0\r\n\r\n"),
    ("ECHO", "-ERR wrong number of arguments for 'echo' command\r\n"),
    ("SELECT 0", "+OK\r\n"),
    ("SELECT 1", "-ERR DB index is out of range\r\n"),
    ("SELECT x", "-ERR value is not an integer or out of range\r\n"),
    ("SELECT", "-ERR wrong number of arguments for 'select' command\r\n"),
    ("RESET", "+RESET\r\n"),
    ("RESET a", "-ERR wrong number of arguments for 'reset' command\r\n"),
    ("AUTH default anything", "+OK\r\n"),
    ("AUTH somebody x", "-WRONGPASS invalid username-password pair or user is disabled.\r\n"),
    (
        "AUTH x",
        "-ERR AUTH <password> called without any password configured for the default user. Are you sure your \
         configuration is correct?\r\n",
    ),
    ("AUTH", "-ERR wrong number of arguments for 'auth' command\r\n"),
    ("AUTH a b c", "-ERR syntax error\r\n"),
    ("HELLO 4", "-NOPROTO unsupported protocol version\r\n"),
    ("HELLO x", "-ERR Protocol version is not an integer or out of range\r\n"),
    ("HELLO 2 FOO", "-ERR Syntax error in HELLO option 'FOO'\r\n"),
    ("HELLO 2 AUTH x", "-ERR Syntax error in HELLO option 'AUTH'\r\n"),
    ("HELLO 2 AUTH somebody x", "-WRONGPASS invalid username-password pair or user is disabled.\r\n"),
    (
        "HELLO 3 SETNAME \"a b\"",
        "-ERR Client names cannot contain spaces, newlines or special characters.\r\n",
    ),
    ("CLIENT", "-ERR wrong number of arguments for 'client' command\r\n"),
    ("CLIENT GETNAME", "$-1\r\n"),
    ("CLIENT GETNAME x", "-ERR wrong number of arguments for 'client|getname' command\r\n"),
    ("CLIENT SETNAME me", "+OK\r\n"),
    ("CLIENT SETNAME", "-ERR wrong number of arguments for 'client|setname' command\r\n"),
    (
        "CLIENT SETNAME \"a b\"",
        "-ERR Client names cannot contain spaces, newlines or special characters.\r\n",
    ),
    ("CLIENT SETINFO LIB-NAME redis-py", "+OK\r\n"),
    ("CLIENT SETINFO lib-ver 1.0", "+OK\r\n"),
    ("CLIENT SETINFO color red", "-ERR Unrecognized option 'color'\r\n"),
    ("CLIENT NO-EVICT on", "+OK\r\n"),
    ("CLIENT NO-EVICT x", "-ERR syntax error\r\n"),
    ("CLIENT NO-TOUCH off", "+OK\r\n"),
    ("CLIENT FOO", "-ERR unknown subcommand 'FOO'. Try CLIENT HELP.\r\n"),
    ("CLIENT KILL 1", "-ERR unknown subcommand 'KILL'. Try CLIENT HELP.\r\n"),
    ("COMMAND COUNT", ":12\r\n"),
    ("COMMAND COUNT x", "-ERR wrong number of arguments for 'command|count' command\r\n"),
    (
        "COMMAND INFO cl.throttle",
        "*1\r\n*10\r\n$11\r\ncl.throttle\r\n:-1\r\n*2\r\n+write\r\n+fast\r\n:1\r\n:1\r\n:1\r\n*0\r\n*0\r\n*0\r\n*0\r\n",
    ),
    ("COMMAND INFO get", "*1\r\n$-1\r\n"),
    ("COMMAND DOCS get", "*0\r\n"),
    (
        "COMMAND DOCS ping",
        "*2\r\n$4\r\nping\r\n*4\r\n$7\r\nsummary\r\n\
         $29\r\nAnswers, to show that it does\r\n$5\r\ngroup\r\n$10\r\nconnection\r\n",
    ),
    ("COMMAND FOO", "-ERR unknown subcommand 'FOO'. Try COMMAND HELP.\r\n"),
    ("CONFIG GET save", "*2\r\n$4\r\nsave\r\n$0\r\n\r\n"),
    ("CONFIG GET save appendonly", "*4\r\n$4\r\nsave\r\n$0\r\n\r\n$10\r\nappendonly\r\n$2\r\nno\r\n"),
    ("CONFIG GET foo", "*0\r\n"),
    ("CONFIG GET", "-ERR wrong number of arguments for 'config|get' command\r\n"),
    ("CONFIG SET save x", "-ERR unknown subcommand 'SET'. Try CONFIG HELP.\r\n"),
    ("CONFIG", "-ERR wrong number of arguments for 'config' command\r\n"),
    ("INFO nosuch", "$0\r\n\r\n"),
    ("INFO memory", "$29\r\n# Memory\r\nmaxmemory:1048576\r\n\r\n"),
    ("INFO keyspace", "$12\r\n# Keyspace\r\n\r\n"),
    ("foo", "-ERR unknown command 'foo', with args beginning with: \r\n"),
    ("foo bar baz", "-ERR unknown command 'foo', with args beginning with: 'bar' 'baz' \r\n"),
    ("\"foo\\r\\nbar\"", "-ERR unknown command 'foo  bar', with args beginning with: \r\n"),
    ("GET key", "-ERR unknown command 'GET', with args beginning with: 'key' \r\n"),
    ("cl.throttle k 15 30 60", "*5\r\n:0\r\n:16\r\n:15\r\n:-1\r\n:2\r\n"),
    ("", ""),
    ("   \t ", ""),
];

/// Invalid checks, each with its problem.
const WRONG_QUESTIONS: &[(&str, &str)] = &[
    ("", "Usage: cl.throttle <key> <max_burst> <count per period> <period> [<quantity>]"),
    ("k", "Usage: cl.throttle <key> <max_burst> <count per period> <period> [<quantity>]"),
    ("k 15 30", "Usage: cl.throttle <key> <max_burst> <count per period> <period> [<quantity>]"),
    ("k 15 30 60 1 2", "Usage: cl.throttle <key> <max_burst> <count per period> <period> [<quantity>]"),
    ("k x 30 60", "Couldn't parse as integer: x"),
    ("k 15 3.5 60", "Couldn't parse as integer: 3.5"),
    ("k 15 30 1e3", "Couldn't parse as integer: 1e3"),
    ("k 15 30 60 many", "Couldn't parse as integer: many"),
    ("k 15 30 \"\"", "Couldn't parse as integer: "),
    ("k 9223372036854775808 30 60", "Couldn't parse as integer: 9223372036854775808"),
    ("k 15 0 60", "Zero rates are not supported"),
    ("k 15 30 0", "Zero rates are not supported"),
    ("k 15 -30 60", "count per period: -30 is outside 1 to 4294967295"),
    ("k 15 30 -60", "period: -60 is outside 1 to 31622400"),
    ("k 15 4294967296 60", "amount: 4294967296 is outside 0 to 4294967295"),
    ("k 4294967295 30 60", "burst: 4294967296 is outside 1 to 4294967295"),
    ("k 9223372036854775807 30 60", "burst: 9223372036854775808 is outside 1 to 4294967295"),
    ("k 15 30 31622401", "period: 31622401s is not a whole number of microseconds from 1 us to 366 days"),
    (
        "k 10 1 31622400",
        "burst: 11 would take more than 3,660 days to drain; at this amount and period it may be 1 to 10",
    ),
];

#[test]
fn every_command_is_answered_to_the_byte() {
    for (sent, expected) in COMMANDS {
        assert_eq!(Bench::open().text(&format!("{sent}\r\n")), *expected, "{sent}");
    }
}

#[test]
fn invalid_throttle_arguments_get_an_exact_error() {
    for (arguments, problem) in WRONG_QUESTIONS {
        let answer = Bench::open().text(&format!("CL.THROTTLE {arguments}\r\n"));
        assert_eq!(answer, format!("-Cell error: Store error: {problem}\r\n"), "{arguments}");
    }
    let mut bench = Bench::open();
    assert_eq!(bench.throttle("k +15 0030 60"), [0, 16, 15, -1, 2], "as redis-cell reads numbers");
}

#[test]
fn hello_agrees_on_a_protocol() {
    let mut bench = Bench::open();
    let two = bench.text("HELLO\r\n");
    assert!(two.starts_with(
        "*14\r\n$6\r\nserver\r\n$8\r\ntidegate\r\n\
         $7\r\nversion\r\n$5\r\n7.0.0\r\n$5\r\nproto\r\n:2\r\n$2\r\nid\r\n:"
    ));
    assert!(two.ends_with(
        "$4\r\nmode\r\n$10\r\nstandalone\r\n$4\r\nrole\r\n$6\r\nmaster\r\n$7\r\nmodules\r\n*0\r\n"
    ));
    let three = bench.text("HELLO 3 SETNAME me\r\n");
    assert!(
        three.starts_with("%7\r\n$6\r\nserver\r\n") && three.contains("$5\r\nproto\r\n:3\r\n"),
        "{three}"
    );
    assert_eq!(bench.text("CLIENT GETNAME\r\n"), "$2\r\nme\r\n");
    assert_eq!(bench.text("CONFIG GET save\r\n"), "%1\r\n$4\r\nsave\r\n$0\r\n\r\n");
    assert_eq!(bench.text("COMMAND INFO get\r\n"), "*1\r\n_\r\n");
    assert_eq!(bench.text("INFO nosuch\r\n"), "=4\r\ntxt:\r\n");
    assert_eq!(bench.text("CL.THROTTLE k 1 1 1\r\n"), "*5\r\n:0\r\n:2\r\n:1\r\n:-1\r\n:1\r\n");
    assert_eq!(
        bench.text("HELLO 9\r\nCLIENT SETNAME \"\"\r\nCLIENT GETNAME\r\n"),
        "-NOPROTO unsupported protocol version\r\n+OK\r\n_\r\n"
    );
    assert_eq!(bench.text("RESET\r\nCLIENT GETNAME\r\n"), "+RESET\r\n$-1\r\n");
}

#[test]
fn connections_have_ids_and_descriptions() {
    let mut bench = Bench::open();
    let id = bench.text("CLIENT ID\r\n");
    bench.reconnect();
    assert_ne!(bench.text("CLIENT ID\r\n"), id);
    let id = bench.text("CLIENT ID\r\n");
    let about = bench.text("CLIENT SETNAME me\r\nCLIENT INFO\r\n");
    assert!(about.contains(&format!("id={} name=me db=0 resp=2\n", &id[1..id.len() - 2])), "{about}");
}

#[test]
fn info_describes_the_server_and_the_keys_of_the_tenant() {
    let mut bench = Bench::open();
    bench.throttle("a 1 1 60");
    bench.throttle("b 1 1 60");
    let info = bench.text("INFO\r\n");
    for part in [
        "# Server\r\nredis_version:7.0.0\r\n",
        "server_name:tidegate\r\n",
        "\r\n\r\n# Keyspace\r\ndb0:keys=2,",
    ] {
        assert!(info.contains(part), "{part} is not in {info}");
    }
}

/// Invalid input, and the error before the connection closes.
const MALFORMED: &[(&[u8], &str)] = &[
    (b"*abc\r\n", "invalid multibulk length"),
    (b"*\r\n", "invalid multibulk length"),
    (b"*+1\r\n$4\r\nPING\r\n", "invalid multibulk length"),
    (b"*01\r\n", "invalid multibulk length"),
    (b"*-0\r\n", "invalid multibulk length"),
    (b"*1025\r\n", "invalid multibulk length"),
    (b"*99999999999999999999\r\n", "invalid multibulk length"),
    (b"*111111111111111111111111111111111", "too big mbulk count string"),
    (b"*1\r\n+PING\r\n", "expected '$', got '+'"),
    (b"*1\r\n*1\r\n", "expected '$', got '*'"),
    (b"*1\r\n\r\n", "expected '$', got ' '"),
    (b"*1\r\n$-1\r\n", "invalid bulk length"),
    (b"*1\r\n$abc\r\n", "invalid bulk length"),
    (b"*1\r\n$04\r\n", "invalid bulk length"),
    (b"*1\r\n$\r\n", "invalid bulk length"),
    (b"*1\r\n$65537\r\n", "invalid bulk length"),
    (b"*1\r\n$4294967296\r\n", "invalid bulk length"),
    (b"*1\r\n$111111111111111111111111111111111", "too big bulk count string"),
    (b"ping \"abc\r\n", "unbalanced quotes in request"),
    (b"ping 'abc\r\n", "unbalanced quotes in request"),
    (b"'a'b\r\n", "unbalanced quotes in request"),
    (b"\"a\"b\r\n", "unbalanced quotes in request"),
];

#[test]
fn malformed_input_gets_an_error_and_closes_the_connection() {
    for (sent, problem) in MALFORMED {
        // Requests before the invalid input get a reply, later ones do not.
        let sent = [b"PING\r\n", *sent, b"PING\r\n"].concat();
        let (answer, next) = Bench::open().exchange(&sent);
        let answer = String::from_utf8(answer).expect("text");
        assert_eq!(answer, format!("+PONG\r\n-ERR Protocol error: {problem}\r\n"), "{}", sent.escape_ascii());
        assert_eq!(next, Next::Close);
    }
}

#[test]
fn oversized_request_is_refused_before_it_is_buffered() {
    let long_line = vec![b'a'; LINE_BYTES_MAX + 1];
    assert_eq!(read_all(&long_line, READ_BYTES, Trust::Known).1, Some(ProtocolError::LineTooLong));
    assert_eq!(read_all(&long_line[1..], READ_BYTES, Trust::Known).1, None);
    let many_words = b"a ".repeat(ARGUMENTS_MAX + 1).into_iter().chain(*b"\n").collect::<Vec<_>>();
    assert_eq!(read_all(&many_words, READ_BYTES, Trust::Known).1, Some(ProtocolError::InvalidCount));
    let argument = "x".repeat(ARGUMENT_BYTES_MAX);
    let (requests, problem) = read_all(&array(&[argument.as_str(); 3]), READ_BYTES, Trust::Known);
    assert_eq!((requests.len(), problem), (1, None));
    let (requests, problem) = read_all(&array(&[argument.as_str(); 4]), READ_BYTES, Trust::Known);
    assert_eq!((requests.len(), problem), (0, Some(ProtocolError::FrameTooLarge)));
}

#[test]
fn requests_may_be_empty_and_their_ends_are_counted_not_read() {
    let mut bench = Bench::open();
    assert_eq!(
        bench.text("*0\r\n*-1\r\n\r\n*1\r\n$4\r\nPINGxxPING\r\nPING\n"),
        "+PONG\r\n+PONG\r\n+PONG\r\n"
    );
    assert_eq!(bench.text("*1\r\n$0\r\n\r\n"), "-ERR unknown command '', with args beginning with: \r\n");
}

#[test]
fn nothing_is_answered_after_a_farewell() {
    let mut bench = Bench::open();
    let (answer, next) = bench.exchange(b"PING\r\nQUIT now\r\nPING\r\n");
    assert_eq!((answer.as_slice(), next), (&b"+PONG\r\n+OK\r\n"[..], Next::Close));
}

#[test]
fn a_browser_is_not_answered() {
    for sent in [
        &b"POST /x HTTP/1.1\r\nHost: localhost\r\n\r\nPING\r\n"[..],
        b"Host: localhost\r\nPING\r\n",
        b"*2\r\n$4\r\npost\r\n$1\r\n/\r\nPING\r\n",
    ] {
        for mut bench in [Bench::open(), Bench::guarded()] {
            let (answer, next) = bench.exchange(sent);
            assert_eq!((answer.as_slice(), next), (&b""[..], Next::Close), "{}", sent.escape_ascii());
        }
    }
}

/// Requests of all kinds, one behind the other.
fn mixture() -> Vec<u8> {
    let throttle = |key: &str| array(&["CL.THROTTLE", key, "15", "30", "60"]);
    [
        throttle("a"),
        throttle("b"),
        array(&["PING"]),
        throttle("a"),
        b"CL.THROTTLE a 15 30 60 3\r\n".to_vec(),
        array(&["CL.THROTTLE", "a", "x", "30", "60"]),
        b"\r\n*0\r\n".to_vec(),
        array(&["HELLO", "3"]),
        array(&["CLIENT", "GETNAME"]),
        throttle("c"),
        array(&["nonsense", "with", "words"]),
        array(&["CL.THROTTLE", &"k".repeat(300), "1", "2", "3", "0"]),
        b"ECHO 'quoted words'\n".to_vec(),
        throttle("c"),
        array(&["QUIT"]),
    ]
    .concat()
}

#[test]
fn it_does_not_matter_where_requests_are_cut() {
    let sent = mixture();
    let strip_id = |answer: Vec<u8>| {
        let answer = String::from_utf8(answer).expect("text");
        let (before, after) = answer.split_once("$2\r\nid\r\n:").expect("the answer to HELLO");
        format!("{before}{}", after.split_once("\r\n").expect("a line").1)
    };
    let whole = strip_id(Bench::open().exchange(&sent).0);
    for cut in 0..sent.len() {
        let (mut bench, mut out) = (Bench::open(), Vec::new());
        let (used, _) = bench.dialogue.answer(&sent[..cut], &mut out);
        let (_, next) = bench.dialogue.answer(&sent[used..], &mut out);
        assert_eq!(next, Next::Close);
        assert_eq!(strip_id(out), whole, "cut at {cut}");
    }
    for piece in [1, 2, 3, 7, 64] {
        let (whole, pieces) =
            (read_all(&sent, sent.len(), Trust::Known), read_all(&sent, piece, Trust::Known));
        assert_eq!(whole, pieces);
    }
}

#[test]
fn unauthenticated_clients_may_only_authenticate() {
    let mut bench = Bench::guarded();
    let noauth = "-NOAUTH Authentication required.\r\n";
    for request in [
        "PING",
        "CL.THROTTLE k 1 1 1",
        "ECHO x",
        "INFO",
        "CONFIG GET save",
        "CLIENT ID",
        "COMMAND",
        "SELECT 0",
    ] {
        assert_eq!(bench.text(&format!("{request}\r\n")), noauth, "{request}");
    }
    assert!(bench.text("HELLO 3\r\n").starts_with(
        "-NOAUTH HELLO must be called with the client already \
         authenticated, otherwise the HELLO AUTH <user> <pass> option"
    ));
    assert_eq!(bench.text("foo\r\n"), "-ERR unknown command 'foo', with args beginning with: \r\n");
    let wrong = "-WRONGPASS invalid username-password pair or user is disabled.\r\n";
    assert_eq!(
        bench.text("AUTH tg_green\r\nAUTH default tg_green\r\nHELLO 3 AUTH default x\r\n"),
        [wrong; 3].concat()
    );
    assert_eq!(
        bench.text("RESET\r\nAUTH tg_red\r\nPING\r\nAUTH wrong\r\nPING\r\n"),
        format!("+RESET\r\n+OK\r\n+PONG\r\n{wrong}+PONG\r\n")
    );
    assert_eq!(bench.text("RESET\r\nPING\r\n"), format!("+RESET\r\n{noauth}"));
    assert_eq!(bench.exchange(b"QUIT\r\n"), (b"+OK\r\n".to_vec(), Next::Close));
}

#[test]
fn strangers_may_not_send_much() {
    for (sent, problem) in [
        ("*11\r\n", "unauthenticated multibulk length"),
        ("*10\r\n$16385\r\n", "unauthenticated bulk length"),
    ] {
        let mut bench = Bench::guarded();
        let (answer, next) = bench.exchange(sent.as_bytes());
        assert_eq!(answer, format!("-ERR Protocol error: {problem}\r\n").into_bytes());
        assert_eq!(next, Next::Close);
    }
}

#[test]
fn tenants_have_keys_of_their_own() {
    let mut bench = Bench::guarded();
    assert_eq!(bench.text("AUTH tg_red\r\n"), "+OK\r\n");
    assert_eq!(bench.throttle("k 0 1 60"), [0, 1, 0, -1, 60]);
    assert_eq!(bench.throttle("k 0 1 60"), [1, 1, 0, 60, 60]);
    assert_eq!(bench.text("AUTH any tg_blue\r\n"), "+OK\r\n");
    assert_eq!(bench.throttle("k 0 1 60"), [0, 1, 0, -1, 60], "blue's own key");
    bench.reconnect();
    assert!(bench.text("HELLO 3 AUTH red tg_red\r\n").starts_with("%7"));
    assert_eq!(bench.throttle("k 0 1 60"), [1, 1, 0, 60, 60], "red's is still spent");
}

#[test]
fn decisions_are_counted_by_batch() {
    let mut bench = Bench::open();
    let sent = array(&["CL.THROTTLE", "k", "2", "1", "60"]).repeat(5);
    bench.exchange(&sent);
    let mut scrape = String::new();
    prometheus_client::encoding::text::encode(&mut scrape, &bench.shared.telemetry.registry).expect("text");
    for line in [
        "tidegate_decisions_total{surface=\"resp\",class=\"comfort\",outcome=\"allowed\",source=\"local\"} 3",
        "tidegate_decisions_total{surface=\"resp\",class=\"comfort\",outcome=\"denied\",source=\"local\"} 2",
        "tidegate_latency_seconds_count{surface=\"resp\"} 5",
    ] {
        assert!(scrape.contains(line), "{line} is not in {scrape}");
    }
}

#[test]
fn overloaded_worker_sheds_checks_and_counts_them() {
    let mut bench = Bench::open();
    assert_eq!(bench.throttle("k 0 1 60"), [0, 1, 0, -1, 60]);
    (0..crate::load::LATE_LOOKS).for_each(|_| crate::load::note(Duration::from_millis(100)));
    assert_eq!(bench.throttle("k 0 1 60"), [0, 1, 0, -1, 0]);
    assert_eq!(bench.throttle("k 15 30 60"), [0, 16, 0, -1, 0]);
    assert!(bench.text("CL.THROTTLE k x 30 60\r\nPING\r\n").ends_with("integer: x\r\n+PONG\r\n"));
    crate::load::note(Duration::ZERO);
    assert_eq!(bench.throttle("k 0 1 60"), [1, 1, 0, 60, 60], "nothing was charged meanwhile");
    let mut scrape = String::new();
    prometheus_client::encoding::text::encode(&mut scrape, &bench.shared.telemetry.registry).expect("text");
    let line =
        "tidegate_decisions_total{surface=\"resp\",class=\"comfort\",outcome=\"allowed\",source=\"shed\"} 2";
    assert!(scrape.contains(line), "{line} is not in {scrape}");
}

/// Bytes that are nearly requests.
fn nearly_requests() -> impl Strategy<Value = Vec<u8>> {
    let part = prop_oneof![
        Just(b"*".to_vec()),
        Just(b"$".to_vec()),
        Just(b"\r\n".to_vec()),
        Just(b"\"".to_vec()),
        Just(b"CL.THROTTLE".to_vec()),
        Just(array(&["CL.THROTTLE", "k", "15", "30", "60"])),
        (-2..70_000i64).prop_map(|number| number.to_string().into_bytes()),
        proptest::collection::vec(any::<u8>(), 0..20),
    ];
    proptest::collection::vec(part, 0..40).prop_map(|parts| parts.concat())
}

proptest! {
    #[test]
    fn input_is_parsed_the_same_in_any_chunks(bytes in nearly_requests(), piece in 1..50usize) {
        super::read_requests(&bytes);
        prop_assert_eq!(
            read_all(&bytes, bytes.len(), Trust::Known),
            read_all(&bytes, piece, Trust::Known)
        );
    }

    #[test]
    fn every_request_gets_a_reply(bytes in nearly_requests()) {
        let (mut bench, mut out) = (Bench::open(), Vec::new());
        let (used, next) = bench.dialogue.answer(&bytes, &mut out);
        prop_assert!(used <= bytes.len());
        prop_assert!(out.is_empty() || out.ends_with(b"\r\n"));
        prop_assert!(next != Next::Close || !out.is_empty());
    }
}

#[test]
fn a_long_pipeline_of_loud_answers_is_answered_in_parts() {
    let sent = b"COMMAND\n".repeat(2_000);
    let (mut bench, mut out, mut at, mut total) = (Bench::open(), Vec::new(), 0, 0);
    let one = bench.exchange(b"COMMAND\n").0.len();
    loop {
        out.clear();
        let (used, next) = bench.dialogue.answer(&sent[at..], &mut out);
        assert!(out.len() < super::REPLY_BYTES_MAX + one);
        (at, total) = (at + used, total + out.len());
        if next == Next::More {
            break;
        }
    }
    assert_eq!((at, total), (sent.len(), 2_000 * one));
}

/// A connection over a pipe, served by a task of this thread.
fn connect(
    bench: &Bench,
    pipe_bytes: usize,
) -> (DuplexStream, tokio::task::JoinHandle<std::io::Result<()>>, CancellationToken) {
    let (client, server) = tokio::io::duplex(pipe_bytes);
    let stop = CancellationToken::new();
    let context = Context {
        shared: Arc::clone(&bench.shared),
        tls: None,
        stop: stop.clone(),
        stop_admin: CancellationToken::new(),
        cut: CancellationToken::new(),
    };
    let state = ConnectionState {
        peer: ([127, 0, 0, 1], 1).into(),
        slot: Arc::default(),
        partial: PartialRequest::new(&bench.shared.request_memory, [127, 0, 0, 1].into()),
        tenant: Cell::default(),
    };
    (client, tokio::task::spawn_local(serve(server, Rc::new(state), context)), stop)
}

fn on_this_thread(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    tokio::task::LocalSet::new().block_on(&runtime, test);
}

#[test]
fn a_client_that_takes_its_answers_slowly_gets_all_of_them() {
    on_this_thread(async {
        let bench = Bench::open();
        // In a pipe of a few bytes, every write stalls, and every request arrives in pieces.
        let (client, served, _) = connect(&bench, 11);
        let (mut from, mut to) = tokio::io::split(client);
        let sent = [array(&["PING", "hello"]).repeat(3_000), array(&["QUIT"])].concat();
        let writing = tokio::task::spawn_local(async move { to.write_all(&sent).await });
        let mut answer = Vec::new();
        from.read_to_end(&mut answer).await.expect("reads");
        assert_eq!(answer, [b"$5\r\nhello\r\n".repeat(3_000), b"+OK\r\n".to_vec()].concat());
        writing.await.expect("runs").expect("writes");
        served.await.expect("runs").expect("ends well");
    });
}

#[test]
fn a_client_that_takes_nothing_is_not_read_any_further() {
    on_this_thread(async {
        let bench = Bench::open();
        let (mut client, served, _) = connect(&bench, 1 << 16);
        let sent = b"COMMAND\n".repeat(100_000);
        // The server reads as much as it can hold, which is far less than was sent.
        let mut taken = 0;
        for _ in 0..1_000 {
            let write = client.write(&sent[taken..]);
            match futures_now(write).await {
                Some(written) => taken += written.expect("open"),
                None => tokio::task::yield_now().await,
            }
        }
        assert!(taken < sent.len() / 2, "{taken} bytes were taken from a client that reads nothing");
        served.abort();
    });
}

/// Returns the output of a future, if it is ready.
async fn futures_now<T>(future: impl Future<Output = T>) -> Option<T> {
    let mut future = std::pin::pin!(future);
    std::future::poll_fn(|task| {
        std::task::Poll::Ready(match future.as_mut().poll(task) {
            std::task::Poll::Ready(value) => Some(value),
            std::task::Poll::Pending => None,
        })
    })
    .await
}

#[test]
fn a_stop_ends_an_idle_connection_after_its_last_answer() {
    on_this_thread(async {
        let bench = Bench::open();
        let (mut client, served, stop) = connect(&bench, 1 << 10);
        client.write_all(b"PING\r\nPI").await.expect("writes");
        let mut answer = [0; 7];
        client.read_exact(&mut answer).await.expect("reads");
        assert_eq!(&answer, b"+PONG\r\n");
        bench.shared.node.stop();
        stop.cancel();
        let mut rest = Vec::new();
        client.read_to_end(&mut rest).await.expect("reads");
        assert_eq!(rest, b"");
        served.await.expect("runs").expect("ends well");
    });
}

#[test]
fn shed_requests_are_answered_counted_and_recorded() {
    let folder = tempfile::tempdir().expect("a folder");
    let counts = overloaded(Arc::new(recording(folder.path())), |shared| {
        let mut out = Vec::new();
        Dialogue::new(shared).answer(b"CL.THROTTLE a 4 1 1\r\nCL.THROTTLE b 4 1 1\r\n", &mut out);
        assert_eq!(out, b"*5\r\n:0\r\n:5\r\n:0\r\n:-1\r\n:0\r\n".repeat(2));
    });
    assert_eq!(counts, (2, 2));
}

#[test]
fn a_lost_request_has_a_reply_in_its_place() {
    let lost = PendingReply { place: 6, check: None };
    let replies =
        all_replies(Bench::open().shared, Protocol::Resp2, b"+one\r\n+three\r\n".to_vec(), vec![lost]);
    let replies = replies.now_or_never().expect("nothing waits");
    assert_eq!(replies, b"+one\r\n-ERR not decided: send the request again\r\n+three\r\n");
}
