//! A small HTTP server that records its requests and replies as a test specifies: a collector or a
//! store that can be made to fail.

use std::io::{self, BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};

/// The largest body: far above any that a test sends.
const BODY_BYTES_MAX: usize = 64 << 20;

/// A request as it came.
#[derive(Clone, Debug, Default)]
pub struct ReceivedRequest {
    /// Such as `POST`.
    pub method: String,
    /// With its query.
    pub path: String,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    /// All of it.
    pub body: Vec<u8>,
}

impl ReceivedRequest {
    /// The value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}

/// A reply: status, headers and body.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    /// Such as 200.
    pub status: u16,
    /// Besides the length.
    pub headers: Vec<(String, String)>,
    /// All of it.
    pub body: Vec<u8>,
}

impl Reply {
    /// A status with a body.
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self { status, headers: Vec::new(), body: body.into() }
    }
}

/// The server. Its threads end with the process.
#[derive(Debug)]
pub struct HttpListener {
    address: SocketAddr,
    heard: Arc<Mutex<Vec<ReceivedRequest>>>,
}

impl HttpListener {
    /// Listens on a free port. `answer` receives each request, and the number of requests before
    /// it.
    pub fn start(answer: impl Fn(usize, &ReceivedRequest) -> Reply + Send + Sync + 'static) -> Self {
        let socket = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = socket.local_addr().expect("an address");
        let heard = Arc::new(Mutex::new(Vec::new()));
        let (answer, known) = (Arc::new(answer), Arc::clone(&heard));
        std::thread::spawn(move || {
            for stream in socket.incoming().map_while(Result::ok) {
                let (answer, known) = (Arc::clone(&answer), Arc::clone(&known));
                std::thread::spawn(move || converse(&stream, &*answer, &known));
            }
        });
        Self { address, heard }
    }

    /// Its address.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns the requests received so far.
    pub fn heard(&self) -> Vec<ReceivedRequest> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Replies to the requests of a connection until it ends.
fn converse(
    stream: &TcpStream,
    answer: &dyn Fn(usize, &ReceivedRequest) -> Reply,
    known: &Mutex<Vec<ReceivedRequest>>,
) {
    let mut reader = BufReader::new(stream);
    while let Ok(Some(request)) = read(&mut reader) {
        let before = {
            let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
            known.push(request.clone());
            known.len() - 1
        };
        if write(stream, &request, &answer(before, &request)).is_err() {
            return;
        }
    }
}

fn read(reader: &mut impl BufRead) -> io::Result<Option<ReceivedRequest>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split_whitespace().map(str::to_owned);
    let mut heard = ReceivedRequest {
        method: words.next().unwrap_or_default(),
        path: words.next().unwrap_or_default(),
        ..ReceivedRequest::default()
    };
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        heard.headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    let length = heard.header("content-length").and_then(|length| length.parse().ok()).unwrap_or(0_usize);
    assert!(length <= BODY_BYTES_MAX, "a body of {length} bytes");
    heard.body.resize(length, 0);
    reader.read_exact(&mut heard.body)?;
    Ok(Some(heard))
}

fn write(mut stream: &TcpStream, request: &ReceivedRequest, reply: &Reply) -> io::Result<()> {
    write!(stream, "HTTP/1.1 {} answer\r\ncontent-length: {}\r\n", reply.status, reply.body.len())?;
    for (name, value) in &reply.headers {
        write!(stream, "{name}: {value}\r\n")?;
    }
    stream.write_all(b"\r\n")?;
    if request.method == "HEAD" { Ok(()) } else { stream.write_all(&reply.body) }
}
