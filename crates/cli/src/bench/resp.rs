//! `CL.THROTTLE` over RESP, several at once.

use std::fmt::Write;
use std::io;

use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufStream};
use tokio::net::TcpStream;

use super::load::Answers;
use super::plan::Plan;

/// Maximum length of a line of a reply, bytes.
const LINE_BYTES_MAX: u64 = 1_024;

/// A decision is an array of five integers. The first is 1 if the request was limited.
const DECISION_PARTS: &str = "*5";

pub(super) struct RespConnection {
    stream: BufStream<TcpStream>,
    commands: String,
    line: Vec<u8>,
}

impl RespConnection {
    pub(super) async fn open(plan: &Plan) -> io::Result<Self> {
        let stream = TcpStream::connect(plan.address).await?;
        stream.set_nodelay(true)?;
        let mut connection =
            Self { stream: BufStream::new(stream), commands: String::new(), line: Vec::new() };
        if let Some(token) = &plan.token {
            connection.log_in(token).await?;
        }
        Ok(connection)
    }

    async fn log_in(&mut self, token: &str) -> io::Result<()> {
        let command = format!("*2\r\n$4\r\nAUTH\r\n${}\r\n{token}\r\n", token.len());
        self.stream.write_all(command.as_bytes()).await?;
        self.stream.flush().await?;
        match line(&mut self.stream, &mut self.line).await? {
            "+OK" => Ok(()),
            other => Err(io::Error::other(format!("AUTH: the server answered {other:?}"))),
        }
    }

    pub(super) async fn ask(&mut self, plan: &Plan, keys: &[u64]) -> io::Result<Answers> {
        self.commands.clear();
        for key in keys {
            write_command(&mut self.commands, *key, plan.limit).map_err(io::Error::other)?;
        }
        self.stream.write_all(self.commands.as_bytes()).await?;
        self.stream.flush().await?;
        let mut answers = Answers::default();
        for _ in keys {
            read_answer(&mut self.stream, &mut self.line, &mut answers).await?;
        }
        Ok(answers)
    }
}

/// A limit per minute, of which all may come at once.
fn write_command(commands: &mut String, key: u64, limit: u64) -> std::fmt::Result {
    let (key, burst, limit) = (format!("bench:k{key}"), (limit - 1).to_string(), limit.to_string());
    commands.push_str("*5\r\n$11\r\nCL.THROTTLE\r\n");
    for argument in [key.as_str(), &burst, &limit, "60"] {
        write!(commands, "${}\r\n{argument}\r\n", argument.len())?;
    }
    Ok(())
}

async fn read_answer(
    stream: &mut (impl AsyncBufRead + Unpin),
    buffer: &mut Vec<u8>,
    answers: &mut Answers,
) -> io::Result<()> {
    match line(stream, buffer).await? {
        DECISION_PARTS => {
            let limited = integer(line(stream, buffer).await?)?;
            for _ in 0..4 {
                integer(line(stream, buffer).await?)?;
            }
            answers.decided(limited == 0);
        }
        error if error.starts_with('-') => answers.failed(&format!("the server answered {error:?}")),
        other => return Err(unexpected(other)),
    }
    Ok(())
}

fn integer(line: &str) -> io::Result<i64> {
    line.strip_prefix(':').and_then(|digits| digits.parse().ok()).ok_or_else(|| unexpected(line))
}

fn unexpected(line: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{line:?} is not a response to CL.THROTTLE"))
}

async fn line<'b>(stream: &mut (impl AsyncBufRead + Unpin), buffer: &'b mut Vec<u8>) -> io::Result<&'b str> {
    buffer.clear();
    stream.take(LINE_BYTES_MAX).read_until(b'\n', buffer).await?;
    match buffer.strip_suffix(b"\r\n") {
        Some(line) => std::str::from_utf8(line).map_err(io::Error::other),
        None if buffer.is_empty() => Err(io::ErrorKind::UnexpectedEof.into()),
        None => Err(io::Error::new(io::ErrorKind::InvalidData, "the line has no end")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_is_encoded_as_redis_clients_send_it() {
        let mut commands = String::new();
        write_command(&mut commands, 7, 100).expect("fits");
        assert_eq!(
            commands,
            "*5\r\n$11\r\nCL.THROTTLE\r\n$8\r\nbench:k7\r\n$2\r\n99\r\n$3\r\n100\r\n$2\r\n60\r\n"
        );
    }

    #[tokio::test]
    async fn answers_are_counted_and_strange_ones_are_refused() {
        let mut answers = Answers::default();
        let mut stream: &[u8] =
            b"*5\r\n:0\r\n:100\r\n:99\r\n:-1\r\n:1\r\n*5\r\n:1\r\n:100\r\n:0\r\n:5\r\n:60\r\n-ERR no\r\n";
        for _ in 0..3 {
            read_answer(&mut stream, &mut Vec::new(), &mut answers).await.expect("an answer");
        }
        assert_eq!((answers.allowed, answers.denied, answers.errors), (1, 1, 1));
        for wrong in [&b"+OK\r\n"[..], b"*5\r\n:x\r\n", b"*5\r\n", b"", b"*5", b"*5\r\n$1\r\n"] {
            let mut stream = wrong;
            assert!(read_answer(&mut stream, &mut Vec::new(), &mut answers).await.is_err(), "{wrong:?}");
        }
    }
}
