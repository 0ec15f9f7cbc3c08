//! The Redis protocol, as far as clients of benchmarks need it.

use std::io::{BufRead, BufReader, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

/// Timeout of a reply.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(30);

/// A command as clients send it: an array of bulk strings.
pub(crate) fn command(words: &[&str]) -> String {
    let parts = words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len()));
    std::iter::once(format!("*{}\r\n", words.len())).chain(parts).collect()
}

/// A connection that has one command under way at most.
pub(crate) struct RespConnection {
    stream: TcpStream,
    replies: BufReader<TcpStream>,
}

impl RespConnection {
    pub(crate) fn open(address: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(address).with_context(|| address.to_string())?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(ANSWER_TIME_MAX))?;
        let replies = BufReader::new(stream.try_clone()?);
        Ok(Self { stream, replies })
    }

    /// Sends a command, and reads its reply: an array of numbers.
    pub(crate) fn ask(&mut self, words: &[&str]) -> Result<Vec<i64>> {
        self.stream.write_all(command(words).as_bytes())?;
        read_numbers(&mut self.replies)
    }
}

fn read_numbers(replies: &mut impl BufRead) -> Result<Vec<i64>> {
    let count = read_number(replies, '*')?;
    (0..count).map(|_| read_number(replies, ':')).collect()
}

/// Reads a line of this kind.
fn read_number(replies: &mut impl BufRead, kind: char) -> Result<i64> {
    let mut line = String::new();
    let read = replies.read_line(&mut line).context("a reply")?;
    ensure!(read > 0, "the server closed the connection");
    let number = line.strip_prefix(kind).and_then(|rest| rest.strip_suffix("\r\n")?.parse().ok());
    number.with_context(|| format!("the reply has the line {line:?}, and {kind:?} was expected"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_is_encoded_as_an_array_of_bulk_strings() {
        assert_eq!(command(&["PING", "ü"]), "*2\r\n$4\r\nPING\r\n$2\r\nü\r\n");
    }

    #[test]
    fn a_reply_is_an_array_of_numbers_and_anything_else_is_an_error() {
        let mut replies = &b"*2\r\n:0\r\n:-1\r\n*0\r\n-ERR no\r\n"[..];
        assert_eq!(read_numbers(&mut replies).unwrap(), [0, -1]);
        assert_eq!(read_numbers(&mut replies).unwrap(), <[i64; 0]>::default());
        let refused = read_numbers(&mut replies).unwrap_err();
        assert!(refused.to_string().contains("-ERR no"), "{refused}");
        assert!(read_numbers(&mut replies).is_err(), "the connection is closed");
        assert!(read_numbers(&mut &b"*2\r\n:0\r\n:1"[..]).is_err(), "the reply is cut");
    }
}
