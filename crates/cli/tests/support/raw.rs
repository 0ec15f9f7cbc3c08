//! HTTP/1.1 by hand: sends exactly the bytes of the test, valid or not.

#![allow(clippy::expect_used, clippy::panic, reason = "a helper of tests may panic as a test may")]

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use socket2::{Domain, Socket, Type};
use tidegate_testkit::START_TIME_MAX;

/// A whole response.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    head: String,
    pub(crate) body: String,
}

impl Reply {
    /// The value of a header field.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let fields = self.head.lines().skip(1).filter_map(|line| line.split_once(':'));
        let mut named = fields.filter(|(known, _)| known.eq_ignore_ascii_case(name));
        named.next().map(|(_, value)| value.trim())
    }
}

/// A request that ends its connection. A body is JSON unless the fields name another type.
pub(crate) fn request(method: &str, target: &str, fields: &[(&str, &str)], body: Option<&str>) -> Vec<u8> {
    let mut text = format!("{method} {target} HTTP/1.1\r\nConnection: close\r\n");
    let is_named = |wanted: &str| fields.iter().any(|(name, _)| name.eq_ignore_ascii_case(wanted));
    if !is_named("host") {
        text += "Host: localhost\r\n";
    }
    for (name, value) in fields {
        write!(text, "{name}: {value}\r\n").expect("writing to text");
    }
    if let Some(body) = body {
        write!(text, "Content-Length: {}\r\n", body.len()).expect("writing to text");
        if !is_named("content-type") {
            text += "Content-Type: application/json\r\n";
        }
    }
    text += "\r\n";
    text += body.unwrap_or_default();
    text.into_bytes()
}

/// Sends bytes, and reads the whole response.
pub(crate) fn send(address: SocketAddr, bytes: &[u8]) -> Reply {
    finish(begin(address, bytes))
}

/// The same, from an address of the loopback network that the test chooses.
pub(crate) fn send_from(from: &str, address: SocketAddr, bytes: &[u8]) -> Reply {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    let from: SocketAddr = format!("{from}:0").parse().expect("an address");
    socket.bind(&from.into()).expect("all of 127.0.0.0/8 is this machine");
    socket.connect(&address.into()).expect("something listens");
    let mut stream = TcpStream::from(socket);
    stream.write_all(bytes).expect("sent");
    finish(stream)
}

/// Sends bytes, and leaves the response unread.
pub(crate) fn begin(address: SocketAddr, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).expect("something listens");
    stream.write_all(bytes).expect("sent");
    stream
}

/// Reads the whole response.
pub(crate) fn finish(mut stream: TcpStream) -> Reply {
    stream.set_read_timeout(Some(START_TIME_MAX)).expect("a time");
    let mut all = Vec::new();
    stream.read_to_end(&mut all).expect("an answer that ends");
    let text = String::from_utf8_lossy(&all);
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("not an answer: {text:?}"));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Reply { status: status.expect("a status"), head: head.to_owned(), body: body.to_owned() }
}
