//! Checks over HTTP/1.1, one at a time for each connection.

use std::io::{self, Read as _, Write as _};
use std::net::SocketAddr;
use std::ops::Range;
use std::time::{Duration, Instant};

use httparse::{EMPTY_HEADER, Header, Response, Status};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;

use crate::clients::now;
use crate::connection::{ReplyStream, closed, invalid};
use crate::decision::{CheckDecision, CheckResult};

/// Maximum size of a reply, bytes.
const REPLY_BYTES_MAX: usize = 1 << 20;

/// Maximum number of header fields of a reply.
const FIELDS_MAX: usize = 64;

const OK: u16 = 200;

/// A connection that stays open. After a failure, or if the server closes it, the next request
/// opens another one.
#[derive(Debug)]
pub struct HttpConnection {
    address: SocketAddr,
    time_max: Duration,
    /// `None` after a reply with `Connection: close`, and after an error.
    stream: Option<ReplyStream>,
    /// Header fields of every request.
    fields: String,
    bytes: Vec<u8>,
}

/// A complete reply, and the instants between which the server decided it.
#[derive(Clone, Copy, Debug)]
pub struct HttpReply<'a> {
    /// Such as 200.
    pub status: u16,
    /// All of it.
    pub body: &'a [u8],
    /// Before the first byte was sent.
    pub sent: Instant,
    /// After the last byte was received.
    pub answered: Instant,
}

impl HttpConnection {
    /// Connects to a server. `time_max` is the timeout of the connection and of each reply.
    pub fn open(address: SocketAddr, time_max: Duration) -> io::Result<Self> {
        let fields = format!("Host: {address}\r\nContent-Type: application/json\r\n");
        let stream = Some(ReplyStream::connect(address, time_max)?);
        Ok(Self { address, time_max, stream, fields, bytes: Vec::new() })
    }

    /// Sends a token with every request. It must not have control characters.
    #[must_use]
    pub fn with_token(mut self, token: &str) -> Self {
        self.fields.extend(["Authorization: Bearer ", token, "\r\n"]);
        self
    }

    /// Makes a check under the rules of the server: `POST /v1/check`.
    pub fn check(&mut self, dimensions: &[(&str, &str)], cost: u64) -> io::Result<CheckResult> {
        Ok(result(self.post("/v1/check", &check_body(dimensions, cost))?, CheckReply::decision))
    }

    /// Makes a check of a limit that comes with it: `POST /v2/ratelimit.limit`.
    pub fn limit(
        &mut self,
        namespace: &str,
        identifier: &str,
        limit: u64,
        period: Duration,
    ) -> io::Result<CheckResult> {
        let body = LimitBody { namespace, identifier, limit, duration: period.as_millis() };
        Ok(result(self.post("/v2/ratelimit.limit", &json(&body))?, |reply: LimitReply| {
            Some(reply.decision())
        }))
    }

    /// Sends a JSON body to a path, and waits for the reply.
    pub fn post(&mut self, path: &str, body: &str) -> io::Result<HttpReply<'_>> {
        let (fields, length) = (&self.fields, body.len());
        let request = format!("POST {path} HTTP/1.1\r\n{fields}Content-Length: {length}\r\n\r\n{body}");
        let mut stream = match self.stream.take() {
            Some(stream) => stream,
            None => ReplyStream::connect(self.address, self.time_max)?,
        };
        let sent = now();
        stream.write_all(request.as_bytes())?;
        let (head, body) = self.read_reply(&mut stream)?;
        let answered = now();
        self.stream = (!head.is_last).then_some(stream);
        let body = self.bytes.get(body).unwrap_or_default();
        Ok(HttpReply { status: head.status, body, sent, answered })
    }

    /// Reads one complete reply. Returns its head and where its body lies.
    fn read_reply(&mut self, stream: &mut ReplyStream) -> io::Result<(Head, Range<usize>)> {
        self.bytes.clear();
        stream.begin_reply();
        let mut part = [0; 4_096];
        loop {
            if let Some(head) = head(&self.bytes)? {
                let rest = self.bytes.get(head.length..).unwrap_or_default();
                match head.body_length {
                    Some(length) if rest.len() >= length => {
                        let body = head.length..head.length + length;
                        return Ok((head, body));
                    }
                    Some(_) => {}
                    None => {
                        if let Some(body) = unchunk(rest)? {
                            self.bytes = body;
                            return Ok((head, 0..self.bytes.len()));
                        }
                    }
                }
            }
            let count = stream.read(&mut part)?;
            if count == 0 {
                return Err(closed());
            }
            self.bytes.extend_from_slice(part.get(..count).unwrap_or_default());
            if self.bytes.len() > REPLY_BYTES_MAX {
                return Err(invalid(format!("the reply has more than {REPLY_BYTES_MAX} bytes")));
            }
        }
    }
}

/// The head of a reply.
#[derive(Debug, PartialEq, Eq)]
struct Head {
    status: u16,
    length: usize,
    /// `None` for a body in chunks.
    body_length: Option<usize>,
    /// Whether the server closes the connection after the reply.
    is_last: bool,
}

/// The head of a reply, once all of it is there.
fn head(bytes: &[u8]) -> io::Result<Option<Head>> {
    let mut fields = [EMPTY_HEADER; FIELDS_MAX];
    let mut reply = Response::new(&mut fields);
    let unexpected = |problem: String| invalid(format!("{problem}: {}", bytes.escape_ascii()));
    let length = match reply.parse(bytes) {
        Ok(Status::Complete(length)) => length,
        Ok(Status::Partial) => return Ok(None),
        Err(error) => return Err(unexpected(format!("the reply is not HTTP ({error})"))),
    };
    let value = |name: &str| {
        let is_named = |field: &&Header<'_>| field.name.eq_ignore_ascii_case(name);
        reply.headers.iter().find(is_named).and_then(|field| std::str::from_utf8(field.value).ok())
    };
    let body_length = value("content-length").and_then(|value| value.trim().parse().ok());
    let is_chunked = value("transfer-encoding").is_some_and(|value| value.eq_ignore_ascii_case("chunked"));
    if body_length.is_none() && !is_chunked {
        return Err(unexpected("the reply has no length".to_owned()));
    }
    let is_last = value("connection")
        .is_some_and(|options| options.split(',').any(|option| option.trim().eq_ignore_ascii_case("close")));
    Ok(Some(Head { status: reply.code.unwrap_or_default(), length, body_length, is_last }))
}

/// Returns the body of a reply in chunks, once the empty line after the trailers has arrived.
fn unchunk(mut bytes: &[u8]) -> io::Result<Option<Vec<u8>>> {
    let mut body = Vec::new();
    loop {
        let size = httparse::parse_chunk_size(bytes).map_err(|_| invalid("a chunk has no size"))?;
        let Status::Complete((start, length)) = size else { return Ok(None) };
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length == 0 {
            let trailers = bytes.get(start..).unwrap_or_default();
            let mut fields = [EMPTY_HEADER; FIELDS_MAX];
            let parsed = httparse::parse_headers(trailers, &mut fields)
                .map_err(|error| invalid(format!("a trailer is not HTTP ({error})")))?;
            return Ok(parsed.is_complete().then_some(body));
        }
        let end = start.saturating_add(length);
        let (Some(chunk), Some(rest)) = (bytes.get(start..end), bytes.get(end.saturating_add(2)..)) else {
            return Ok(None);
        };
        body.extend_from_slice(chunk);
        bytes = rest;
    }
}

#[derive(Serialize)]
struct CheckBody<'a> {
    #[serde(serialize_with = "as_map")]
    dimensions: &'a [(&'a str, &'a str)],
    cost: u64,
}

fn as_map<S: Serializer>(pairs: &[(&str, &str)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(pairs.iter().copied())
}

/// The body of `POST /v1/check`.
pub fn check_body(dimensions: &[(&str, &str)], cost: u64) -> String {
    json(&CheckBody { dimensions, cost })
}

/// The fields of a reply to `POST /v1/check` that clients read.
#[derive(Debug, Deserialize)]
pub struct CheckReply<'a> {
    /// `allow` or `deny`.
    pub decision: &'a str,
    /// The decision source.
    #[serde(default)]
    pub source: &'a str,
    #[serde(default)]
    rules: Vec<RuleReply>,
}

#[derive(Debug, Deserialize)]
struct RuleReply {
    remaining: Option<u64>,
}

impl CheckReply<'_> {
    /// Whether the request passes; `None` if the reply has another decision than the two.
    pub fn is_allowed(&self) -> Option<bool> {
        match self.decision {
            "allow" => Some(true),
            "deny" => Some(false),
            _ => None,
        }
    }

    fn decision(self) -> Option<CheckDecision> {
        let remaining = if let [rule] = &self.rules[..] { rule.remaining } else { None };
        Some(CheckDecision { is_allowed: self.is_allowed()?, remaining })
    }
}

#[derive(Serialize)]
struct LimitBody<'a> {
    namespace: &'a str,
    identifier: &'a str,
    limit: u64,
    /// ms.
    duration: u128,
}

#[derive(Deserialize)]
struct LimitReply {
    data: LimitData,
}

#[derive(Deserialize)]
struct LimitData {
    success: bool,
    remaining: Option<u64>,
}

impl LimitReply {
    fn decision(self) -> CheckDecision {
        CheckDecision { is_allowed: self.data.success, remaining: self.data.remaining }
    }
}

/// Serializes a body. These bodies have no map with a key other than text, so it cannot fail.
fn json(body: &impl Serialize) -> String {
    serde_json::to_string(body).unwrap_or_default()
}

fn result<'a, T: Deserialize<'a>>(
    reply: HttpReply<'a>,
    decision: impl FnOnce(T) -> Option<CheckDecision>,
) -> CheckResult {
    let HttpReply { status, body, .. } = reply;
    let decided = serde_json::from_slice(body).ok().filter(|_| status == OK).and_then(decision);
    decided.ok_or_else(|| {
        let problem: Value = serde_json::from_slice(body).unwrap_or_default();
        let detail = problem["detail"].as_str().or(problem["error"]["detail"].as_str());
        format!("the server answered {status}: {}", detail.unwrap_or("the response has no decision"))
    })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    fn reply(status: u16, body: &str) -> HttpReply<'_> {
        HttpReply { status, body: body.as_bytes(), sent: now(), answered: now() }
    }

    fn decision(is_allowed: bool, remaining: Option<u64>) -> CheckDecision {
        CheckDecision { is_allowed, remaining }
    }

    #[test]
    fn reply_is_known_once_its_head_is_there() {
        let bytes = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";
        let found = head(bytes).unwrap().unwrap();
        assert_eq!((found.status, &bytes[found.length..], found.body_length), (200, &b"{}"[..], Some(2)));
        assert_eq!(head(&bytes[..40]).unwrap(), None);
        let busy = head(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n").unwrap().unwrap();
        assert_eq!((busy.status, busy.body_length), (503, Some(0)));
        assert!(head(b"HTTP/1.1 200 OK\r\n\r\n").is_err());
        assert!(head(b"SMTP\r\ncontent-length: 0\r\n\r\n").is_err());
    }

    #[test]
    fn chunks_are_joined_once_all_are_there() {
        let head = head(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").unwrap().unwrap();
        assert_eq!(head.body_length, None);
        let chunks = b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n";
        assert_eq!(unchunk(chunks).unwrap(), Some(b"abcde".to_vec()));
        let trailers = b"1\r\na\r\n0\r\nServer-Timing: db\r\nExpires: 0\r\n\r\n";
        assert_eq!(unchunk(trailers).unwrap(), Some(b"a".to_vec()));
        for reply in [&chunks[..], trailers] {
            for length in 0..reply.len() {
                assert_eq!(unchunk(&reply[..length]).unwrap(), None, "{length}");
            }
        }
        assert!(unchunk(b"x\r\n").is_err());
    }

    /// Serves one connection after another. Each has its replies, one for each request.
    fn serve(connections: &'static [&'static [&'static str]]) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            for replies in connections {
                let (mut stream, _) = listener.accept().unwrap();
                for reply in *replies {
                    let mut request = Vec::new();
                    while !request.ends_with(b"}") {
                        let mut part = [0; 1_024];
                        let count = stream.read(&mut part).unwrap();
                        request.extend_from_slice(&part[..count]);
                    }
                    stream.write_all(reply.as_bytes()).unwrap();
                }
            }
        });
        address
    }

    #[test]
    fn connection_is_opened_again_after_the_server_closes_it() {
        const LAST: &str = "HTTP/1.1 200 OK\r\nConnection: Close\r\nContent-Length: 2\r\n\r\n{}";
        const OTHER: &str = "HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\n[]";
        let address = serve(&[&[OTHER, LAST], &[OTHER]]);
        let mut connection = HttpConnection::open(address, Duration::from_mins(1)).unwrap();
        let mut bodies = Vec::new();
        for _ in 0..3 {
            bodies.push(connection.post("/", "{}").unwrap().body.to_vec());
        }
        assert_eq!(bodies, [b"[]", b"{}", b"[]"]);
    }

    #[test]
    fn checks_are_encoded_as_json() {
        assert_eq!(check_body(&[("user", "a\"b")], 2), r#"{"dimensions":{"user":"a\"b"},"cost":2}"#);
        let limit = LimitBody { namespace: "n", identifier: "k7", limit: 100, duration: 60_000 };
        assert_eq!(json(&limit), r#"{"namespace":"n","identifier":"k7","limit":100,"duration":60000}"#);
    }

    #[test]
    fn reply_is_a_decision_or_an_error() {
        let limit = |body| result(reply(200, body), |reply: LimitReply| Some(reply.decision()));
        assert_eq!(limit(r#"{"data":{"success":true,"remaining":9}}"#), Ok(decision(true, Some(9))));
        assert_eq!(limit(r#"{"data":{"success":false,"remaining":0}}"#), Ok(decision(false, Some(0))));
        assert!(limit("{}").is_err() && limit("<html>").is_err());
        let check = |status, body| result(reply(status, body), CheckReply::decision);
        assert_eq!(
            check(200, r#"{"decision":"deny","rules":[{"remaining":3}]}"#),
            Ok(decision(false, Some(3)))
        );
        assert_eq!(
            check(200, r#"{"decision":"allow","source":"shed","rules":[]}"#),
            Ok(decision(true, None))
        );
        assert!(check(200, r#"{"decision":"perhaps"}"#).is_err());
        let refused = check(401, r#"{"detail":"no token"}"#);
        assert_eq!(refused, Err("the server answered 401: no token".to_owned()));
    }
}
