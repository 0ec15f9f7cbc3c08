//! `CL.THROTTLE` over RESP, several at once.

use std::io::{self, BufRead, BufReader, Read as _, Write as _};
use std::net::SocketAddr;
use std::time::Duration;

use crate::connection::{ReplyStream, closed, invalid};
use crate::decision::{CheckDecision, CheckResult};

/// Maximum length of a line of a reply, bytes.
const LINE_BYTES_MAX: u64 = 1_024;

/// A decision is an array of five integers. The first is 1 if the request was limited, the third is
/// the number of remaining units.
const DECISION_HEAD: &str = "*5";

/// A command as clients send it: an array of bulk strings.
pub fn command(words: &[&str]) -> String {
    let parts = words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len()));
    std::iter::once(format!("*{}\r\n", words.len())).chain(parts).collect()
}

/// The command of a check under a limit of which all may come at once.
pub fn throttle(key: &str, limit: u64, period: Duration) -> String {
    let (burst, period) = (limit.saturating_sub(1).to_string(), period.as_secs().to_string());
    command(&["CL.THROTTLE", key, &burst, &limit.to_string(), &period])
}

/// A connection that stays open.
#[derive(Debug)]
pub struct RespConnection {
    replies: BufReader<ReplyStream>,
    line: Vec<u8>,
}

impl RespConnection {
    /// Connects to a server. `time_max` is the timeout of the connection and of each reply.
    pub fn open(address: SocketAddr, time_max: Duration) -> io::Result<Self> {
        Ok(Self { replies: BufReader::new(ReplyStream::connect(address, time_max)?), line: Vec::new() })
    }

    /// Authenticates the connection.
    pub fn log_in(&mut self, token: &str) -> io::Result<()> {
        self.send(&command(&["AUTH", token]))?;
        self.replies.get_mut().begin_reply();
        match line(&mut self.replies, &mut self.line)? {
            "+OK" => Ok(()),
            other => Err(io::Error::other(format!("AUTH: the server answered {other:?}"))),
        }
    }

    /// Sends one or more commands.
    pub fn send(&mut self, commands: &str) -> io::Result<()> {
        self.replies.get_mut().write_all(commands.as_bytes())
    }

    /// Reads the reply to the next `CL.THROTTLE`.
    pub fn read(&mut self) -> io::Result<CheckResult> {
        self.replies.get_mut().begin_reply();
        read_reply(&mut self.replies, &mut self.line)
    }
}

fn read_reply(replies: &mut impl BufRead, buffer: &mut Vec<u8>) -> io::Result<CheckResult> {
    match line(replies, buffer)? {
        DECISION_HEAD => {
            let mut numbers = [0; 5];
            for number in &mut numbers {
                *number = integer(line(replies, buffer)?)?;
            }
            let [is_limited @ (0 | 1), _, remaining @ 0..=i64::MAX, _, _] = numbers else {
                return Err(unexpected(&format!("{numbers:?}")));
            };
            Ok(Ok(CheckDecision { is_allowed: is_limited == 0, remaining: remaining.try_into().ok() }))
        }
        error if error.starts_with('-') => Ok(Err(format!("the server answered {error:?}"))),
        other => Err(unexpected(other)),
    }
}

fn integer(line: &str) -> io::Result<i64> {
    line.strip_prefix(':').and_then(|digits| digits.parse().ok()).ok_or_else(|| unexpected(line))
}

fn unexpected(reply: &str) -> io::Error {
    invalid(format!("{reply:?} is not a response to CL.THROTTLE"))
}

fn line<'b>(replies: &mut impl BufRead, buffer: &'b mut Vec<u8>) -> io::Result<&'b str> {
    buffer.clear();
    replies.take(LINE_BYTES_MAX).read_until(b'\n', buffer)?;
    match buffer.strip_suffix(b"\r\n") {
        Some(line) => std::str::from_utf8(line).map_err(io::Error::other),
        None if buffer.is_empty() => Err(closed()),
        None => Err(invalid("the line has no end")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_encoded_as_redis_clients_send_them() {
        assert_eq!(command(&["PING", "ü"]), "*2\r\n$4\r\nPING\r\n$2\r\nü\r\n");
        assert_eq!(
            throttle("bench:k7", 100, Duration::from_mins(1)),
            "*5\r\n$11\r\nCL.THROTTLE\r\n$8\r\nbench:k7\r\n$2\r\n99\r\n$3\r\n100\r\n$2\r\n60\r\n"
        );
    }

    #[test]
    fn replies_are_decisions_or_errors_and_strange_ones_are_refused() {
        let mut replies: &[u8] =
            b"*5\r\n:0\r\n:10\r\n:9\r\n:-1\r\n:6\r\n*5\r\n:1\r\n:10\r\n:0\r\n:6\r\n:60\r\n-ERR no\r\n";
        let mut next = || read_reply(&mut replies, &mut Vec::new()).unwrap();
        assert_eq!(next(), Ok(CheckDecision { is_allowed: true, remaining: Some(9) }));
        assert_eq!(next(), Ok(CheckDecision { is_allowed: false, remaining: Some(0) }));
        assert_eq!(next(), Err("the server answered \"-ERR no\"".to_owned()));
        for wrong in [
            &b"+OK\r\n"[..],
            b"*5\r\n:x\r\n",
            b"*5\r\n",
            b"",
            b"*5",
            b"*5\r\n$1\r\n",
            b"*5\r\n:2\r\n:10\r\n:0\r\n:0\r\n:0\r\n",
            b"*5\r\n:0\r\n:10\r\n:-1\r\n:0\r\n:0\r\n",
        ] {
            let mut replies = wrong;
            assert!(read_reply(&mut replies, &mut Vec::new()).is_err(), "{wrong:?}");
        }
    }
}
