//! A TCP proxy between a client and its server, which simulates faults of a network.

use std::net::{SocketAddr, TcpListener as StdListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

/// Treatment of the traffic through a proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Traffic {
    /// Everything passes.
    Pass,
    /// Replies are delayed: a round trip takes this much longer.
    DelayAnswers(Duration),
    /// One reply in this many is delayed. Later replies on its connection wait behind it.
    DelayOneIn(u32, Duration),
    /// A long distance: both directions are delayed by this time, so a round trip takes twice as
    /// long. Instead of one reply in this many, the connection is cut.
    Far(Duration, u32),
    /// Replies are dropped, and the connections stay open.
    DropAnswers,
    /// The same, on one connection only, by the order in which they were made.
    DropAnswersOn(usize),
    /// The connection is cut instead of a reply: the server has applied the request, but the client
    /// does not know.
    CutAnswers,
    /// No byte passes in either direction and the connections stay open, as if the other machine
    /// had failed. Bytes sent meanwhile arrive when traffic passes again.
    HalfOpen,
    /// Bytes from clients pass up to this pattern, and are held from there on. An empty pattern
    /// holds everything. Held bytes arrive when the traffic changes, unless their sender has
    /// disconnected by then.
    QuestionsUpTo(&'static [u8]),
    /// The same for bytes from servers.
    AnswersUpTo(&'static [u8]),
}

/// Maximum bytes of a pattern. Longer: more of the passed bytes are remembered, in case a pattern
/// arrives in two pieces.
const WORDS_BYTES_MAX: usize = 256;

/// Initial capacity of the read buffer, bytes.
const READ_BYTES: usize = 65_536;

/// How many pieces of that are under way in one direction of a connection; more wait where they
/// come from.
const UNDER_WAY_MAX: usize = 1_024;

/// A proxy on a port of its own, on a thread of its own: it also works for tests without a runtime.
/// It is closed, with its connections, when the test is done with it.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    traffic: watch::Sender<Traffic>,
    server: watch::Sender<SocketAddr>,
    counts: Arc<Counts>,
}

/// Counters of a proxy.
#[derive(Debug, Default)]
struct Counts {
    lost: AtomicU64,
    connections: AtomicU64,
    keeping: AtomicU64,
}

impl Proxy {
    /// Starts a proxy to `server` with `Traffic::Pass`.
    pub fn start(server: SocketAddr) -> Self {
        let listener = StdListener::bind("127.0.0.1:0").expect("a free port");
        listener.set_nonblocking(true).expect("a local socket");
        let address = listener.local_addr().expect("bound");
        let (traffic, watched) = watch::channel(Traffic::Pass);
        let (server, leads_to) = watch::channel(server);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let counts = Arc::<Counts>::default();
        let counted = Arc::clone(&counts);
        std::thread::spawn(move || runtime.block_on(accept(listener, leads_to, watched, counted)));
        Self { address, traffic, server, counts }
    }

    /// Its address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The address of a store behind it.
    pub fn url(&self) -> String {
        format!("redis://{}/", self.address)
    }

    /// Returns how often a reply was dropped or cut off.
    pub fn lost(&self) -> u64 {
        self.counts.lost.load(Ordering::Relaxed)
    }

    /// Returns the number of connections with bytes held by [`Traffic::QuestionsUpTo`] or
    /// [`Traffic::AnswersUpTo`].
    pub fn keeping(&self) -> u64 {
        self.counts.keeping.load(Ordering::Relaxed)
    }

    /// How many connections were ever made to it.
    pub fn connections(&self) -> u64 {
        self.counts.connections.load(Ordering::Relaxed)
    }

    /// Sets the treatment of traffic from now on.
    pub fn set(&self, traffic: Traffic) {
        if let Traffic::QuestionsUpTo(words) | Traffic::AnswersUpTo(words) = traffic {
            assert!(words.len() <= WORDS_BYTES_MAX, "{words:?} are too many");
        }
        self.traffic.send_replace(traffic);
    }

    /// Leads connections that are made from now on to another server, as an address does that
    /// moves.
    pub fn lead_to(&self, server: SocketAddr) {
        self.server.send_replace(server);
    }
}

/// Accepts until the proxy is dropped.
async fn accept(
    listener: StdListener,
    server: watch::Receiver<SocketAddr>,
    traffic: watch::Receiver<Traffic>,
    counts: Arc<Counts>,
) {
    let listener = TcpListener::from_std(listener).expect("bound");
    let accepting = async {
        for number in 0.. {
            let Ok((client, _)) = listener.accept().await else { return };
            counts.connections.fetch_add(1, Ordering::Relaxed);
            let server = *server.borrow();
            tokio::spawn(carry(number, client, server, traffic.clone(), Arc::clone(&counts)));
        }
    };
    let mut watched = traffic.clone();
    let dropped = async { while watched.changed().await.is_ok() {} };
    tokio::select! {
        () = accepting => {}
        () = dropped => {}
    }
}

async fn carry(
    number: usize,
    client: TcpStream,
    server: SocketAddr,
    traffic: watch::Receiver<Traffic>,
    counts: Arc<Counts>,
) {
    let Ok(server) = TcpStream::connect(server).await else { return };
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let (to_server, arrives_at_server) = Way::new(to_server, traffic.clone());
    let (to_client, arrives_at_client) = Way::new(to_client, traffic.clone());
    tokio::select! {
        () = one_way(questions(from_client, to_server, traffic.clone(), &counts), arrives_at_server) => {}
        () = one_way(answers(number, from_server, to_client, traffic, &counts), arrives_at_client) => {}
    }
}

/// Runs one direction of a connection. Bytes in transit still arrive after the sender has closed
/// its side.
async fn one_way(saying: impl Future<Output = ()>, arriving: impl Future<Output = ()>) {
    let mut arriving = std::pin::pin!(arriving);
    tokio::select! {
        () = &mut arriving => return,
        () = saying => {}
    }
    arriving.await;
}

/// The way to one side of a connection.
struct Way(mpsc::Sender<Piece>);

/// Bytes in transit.
struct Piece {
    bytes: Vec<u8>,
    due: Instant,
    /// Notifies a sender that waits for the arrival.
    arrived: Option<oneshot::Sender<()>>,
}

impl Way {
    fn new(to: OwnedWriteHalf, traffic: watch::Receiver<Traffic>) -> (Self, impl Future<Output = ()>) {
        let (sender, under_way) = mpsc::channel(UNDER_WAY_MAX);
        (Self(sender), arrive(under_way, to, traffic))
    }

    /// Sends bytes with a delay, after all bytes sent before. Without a delay, waits until they
    /// have arrived. Returns false if the other side is closed.
    #[expect(clippy::disallowed_methods, reason = "a simulated network delay in real time")]
    async fn send(&self, bytes: Vec<u8>, time: Duration) -> bool {
        let (arrived, arrival) = oneshot::channel();
        let is_waited_for = time.is_zero();
        let piece = Piece { bytes, due: Instant::now() + time, arrived: is_waited_for.then_some(arrived) };
        self.0.send(piece).await.is_ok() && (!is_waited_for || arrival.await.is_ok())
    }
}

/// Delivers bytes in transit to one side, in order.
#[expect(clippy::disallowed_methods, reason = "a simulated network delay in real time")]
async fn arrive(
    mut under_way: mpsc::Receiver<Piece>,
    mut to: OwnedWriteHalf,
    mut traffic: watch::Receiver<Traffic>,
) {
    while let Some(Piece { bytes, due, arrived }) = under_way.recv().await {
        // A timer ends at a full millisecond, so even a zero delay would take one.
        if due > Instant::now() {
            tokio::time::sleep_until(due).await;
        }
        if !is_connected(&mut traffic).await || to.write_all(&bytes).await.is_err() {
            return;
        }
        // The sender may not wait for it.
        let _ = arrived.map(|arrived| arrived.send(()));
    }
}

async fn questions(mut from: OwnedReadHalf, to: Way, mut traffic: watch::Receiver<Traffic>, counts: &Counts) {
    let mut received = SideBytes::new();
    while received.hear(&mut from).await {
        if !is_connected(&mut traffic).await {
            return;
        }
        let mut time = Duration::ZERO;
        let now = *traffic.borrow();
        match now {
            Traffic::QuestionsUpTo(words)
                if !received.pass_up_to(words, &mut from, &to, &mut traffic, counts).await =>
            {
                return;
            }
            Traffic::Far(way, _) => time = way,
            _ => {}
        }
        if !received.pass(&to, time).await {
            return;
        }
    }
}

async fn answers(
    number: usize,
    mut from: OwnedReadHalf,
    to: Way,
    mut traffic: watch::Receiver<Traffic>,
    counts: &Counts,
) {
    let mut received = SideBytes::new();
    let mut answered = 0_u32;
    while received.hear(&mut from).await {
        if !is_connected(&mut traffic).await {
            return;
        }
        answered = answered.wrapping_add(1);
        let mut time = Duration::ZERO;
        let now = *traffic.borrow();
        match now {
            Traffic::Far(_, many) if answered.is_multiple_of(many) => {
                counts.lost.fetch_add(1, Ordering::Relaxed);
                return;
            }
            Traffic::DelayAnswers(late) | Traffic::Far(late, _) => time = late,
            Traffic::DelayOneIn(many, late) if answered.is_multiple_of(many) => time = late,
            Traffic::DropAnswers => {
                counts.lost.fetch_add(1, Ordering::Relaxed);
                received.bytes.clear();
            }
            Traffic::DropAnswersOn(which) if which == number => {
                counts.lost.fetch_add(1, Ordering::Relaxed);
                received.bytes.clear();
            }
            Traffic::AnswersUpTo(words) => {
                if !received.pass_up_to(words, &mut from, &to, &mut traffic, counts).await {
                    return;
                }
            }
            Traffic::Pass
            | Traffic::DelayOneIn(..)
            | Traffic::DropAnswersOn(_)
            | Traffic::HalfOpen
            | Traffic::QuestionsUpTo(_) => {}
            Traffic::CutAnswers => {
                counts.lost.fetch_add(1, Ordering::Relaxed);
                return;
            }
        }
        if !received.pass(&to, time).await {
            return;
        }
    }
}

/// Bytes from one side of a connection.
struct SideBytes {
    /// Bytes that have not passed yet.
    bytes: Vec<u8>,
    /// The last bytes that have passed.
    passed: Vec<u8>,
}

impl SideBytes {
    fn new() -> Self {
        Self { bytes: Vec::with_capacity(READ_BYTES), passed: Vec::new() }
    }

    /// Reads more bytes. Returns false at the end of the stream.
    async fn hear(&mut self, from: &mut OwnedReadHalf) -> bool {
        matches!(from.read_buf(&mut self.bytes).await, Ok(1..))
    }

    async fn pass(&mut self, to: &Way, time: Duration) -> bool {
        self.pass_some(self.bytes.len(), to, time).await
    }

    async fn pass_some(&mut self, count: usize, to: &Way, time: Duration) -> bool {
        let some: Vec<u8> = self.bytes.drain(..count).collect();
        self.passed.extend(&some);
        self.passed.drain(..self.passed.len().saturating_sub(WORDS_BYTES_MAX));
        some.is_empty() || to.send(some, time).await
    }

    /// Passes the bytes before a pattern, and holds the rest until the traffic changes. Returns
    /// false if one side is closed.
    async fn pass_up_to(
        &mut self,
        words: &[u8],
        from: &mut OwnedReadHalf,
        to: &Way,
        traffic: &mut watch::Receiver<Traffic>,
        counts: &Counts,
    ) -> bool {
        let Some(count) = self.before(words) else { return true };
        if !self.pass_some(count, to, Duration::ZERO).await {
            return false;
        }
        let _keeping = KeptConnection::new(counts);
        let is_other = |traffic: &Traffic| match traffic {
            Traffic::QuestionsUpTo(now) | Traffic::AnswersUpTo(now) => *now != words,
            _ => true,
        };
        // A sender of more bytes is still connected.
        let is_gone = async { while self.hear(from).await {} };
        tokio::select! {
            other = traffic.wait_for(is_other) => other.is_ok(),
            () = is_gone => false,
        }
    }

    /// Returns the number of bytes before a pattern, if it is there. Returns 0 if the pattern began
    /// in the passed bytes.
    fn before(&self, words: &[u8]) -> Option<usize> {
        let begun = &self.passed[self.passed.len().saturating_sub(words.len().saturating_sub(1))..];
        let all = [begun, &self.bytes].concat();
        let at = (0..=all.len()).find(|at| all[*at..].starts_with(words))?;
        Some(at.saturating_sub(begun.len()))
    }
}

/// Counts a connection while bytes of it are held.
struct KeptConnection<'a>(&'a Counts);

impl<'a> KeptConnection<'a> {
    fn new(counts: &'a Counts) -> Self {
        counts.keeping.fetch_add(1, Ordering::Relaxed);
        Self(counts)
    }
}

impl Drop for KeptConnection<'_> {
    fn drop(&mut self) {
        self.0.keeping.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Waits while the connection is half open. False when the proxy was dropped meanwhile.
async fn is_connected(traffic: &mut watch::Receiver<Traffic>) -> bool {
    traffic.wait_for(|traffic| *traffic != Traffic::HalfOpen).await.is_ok()
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read as _, Write as _};
    use std::net::TcpStream as Client;

    use super::*;
    use crate::wait::{START_TIME_MAX, wait_until};

    /// Time within which a pending reply would arrive, for tests that expect none.
    const QUIET: Duration = Duration::from_millis(200);

    /// Starts an echo server. The channel receives each byte that the server receives.
    fn echo() -> (SocketAddr, std::sync::mpsc::Receiver<u8>) {
        let listener = StdListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (tells, heard) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, tells) = (stream.unwrap(), tells.clone());
                std::thread::spawn(move || {
                    let mut byte = [0];
                    while stream.read_exact(&mut byte).is_ok() {
                        // Not every test wants to know.
                        let _ = tells.send(byte[0]);
                        let _ = stream.write_all(&byte);
                    }
                });
            }
        });
        (address, heard)
    }

    fn client(proxy: &Proxy) -> Client {
        let client = Client::connect(proxy.address()).unwrap();
        client.set_read_timeout(Some(START_TIME_MAX)).unwrap();
        client
    }

    /// Returns the next byte that a server received.
    fn next(heard: &std::sync::mpsc::Receiver<u8>) -> u8 {
        heard.recv_timeout(START_TIME_MAX).expect("a message")
    }

    fn says(mut client: &Client, byte: u8) {
        client.write_all(&[byte]).unwrap();
    }

    fn hears(mut client: &Client) -> u8 {
        let mut byte = [0];
        client.read_exact(&mut byte).unwrap();
        byte[0]
    }

    fn receives_nothing(mut client: &Client) -> bool {
        client.set_read_timeout(Some(QUIET)).unwrap();
        let read = client.read(&mut [0]);
        client.set_read_timeout(Some(START_TIME_MAX)).unwrap();
        read.is_err_and(|error| matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut))
    }

    #[test]
    fn proxy_forwards_traffic_and_drops_replies_after_delivery() {
        let (server, heard) = echo();
        let proxy = Proxy::start(server);
        let (first, second) = (client(&proxy), client(&proxy));
        for (client, byte) in [(&first, 1), (&second, 2)] {
            says(client, byte);
            assert_eq!((next(&heard), hears(client)), (byte, byte));
        }
        proxy.set(Traffic::DropAnswers);
        says(&first, 3);
        assert_eq!(next(&heard), 3);
        assert!(receives_nothing(&first));
        proxy.set(Traffic::DelayAnswers(Duration::from_millis(1)));
        says(&first, 4);
        assert_eq!(hears(&first), 4);
    }

    #[test]
    fn one_connection_can_be_stuck_while_others_are_not() {
        let proxy = Proxy::start(echo().0);
        let first = client(&proxy);
        says(&first, 1);
        assert_eq!(hears(&first), 1);
        let second = client(&proxy);
        proxy.set(Traffic::DropAnswersOn(0));
        says(&first, 2);
        says(&second, 3);
        assert_eq!(hears(&second), 3);
        assert!(receives_nothing(&first));
    }

    #[test]
    fn connection_is_cut_after_the_server_receives_the_request() {
        let (server, heard) = echo();
        let proxy = Proxy::start(server);
        let client = client(&proxy);
        proxy.set(Traffic::CutAnswers);
        says(&client, 1);
        assert_eq!(next(&heard), 1);
        assert!(matches!((&client).read(&mut [0]), Ok(0) | Err(_)));
    }

    #[test]
    fn half_open_means_that_nothing_passes_until_it_does_again() {
        let (server, heard) = echo();
        let proxy = Proxy::start(server);
        let client = client(&proxy);
        proxy.set(Traffic::HalfOpen);
        says(&client, 1);
        assert!(receives_nothing(&client));
        assert!(heard.try_recv().is_err(), "the server did not get the request");
        proxy.set(Traffic::Pass);
        assert_eq!(hears(&client), 1);
    }

    #[test]
    fn proxy_buffers_data_from_a_pattern_until_traffic_changes() {
        let (server, heard) = echo();
        let proxy = Proxy::start(server);
        let client = client(&proxy);
        proxy.set(Traffic::QuestionsUpTo(&[1, 2]));
        // Also where the words come in two pieces: the first of them has passed by then.
        says(&client, 1);
        assert_eq!((next(&heard), hears(&client)), (1, 1));
        assert_eq!(proxy.keeping(), 0);
        says(&client, 2);
        assert!(receives_nothing(&client));
        assert_eq!((heard.try_recv().is_err(), proxy.keeping()), (true, 1));
        proxy.set(Traffic::AnswersUpTo(&[4]));
        assert_eq!((next(&heard), hears(&client)), (2, 2));
        (&client).write_all(&[3, 4, 5]).unwrap();
        assert_eq!([(); 3].map(|()| next(&heard)), [3, 4, 5]);
        assert_eq!(hears(&client), 3);
        assert!(receives_nothing(&client));
        assert_eq!(proxy.keeping(), 1);
        proxy.set(Traffic::Pass);
        assert_eq!([hears(&client), hears(&client)], [4, 5]);
        wait_until("no message to be withheld", START_TIME_MAX, || proxy.keeping() == 0);
    }

    #[test]
    fn buffered_data_is_lost_when_its_sender_disconnects() {
        let (server, heard) = echo();
        let proxy = Proxy::start(server);
        proxy.set(Traffic::QuestionsUpTo(b""));
        let gone = client(&proxy);
        says(&gone, 1);
        wait_until("the message to be withheld", START_TIME_MAX, || proxy.keeping() == 1);
        drop(gone);
        wait_until("the message to be lost", START_TIME_MAX, || proxy.keeping() == 0);
        proxy.set(Traffic::Pass);
        let client = client(&proxy);
        says(&client, 2);
        assert_eq!((next(&heard), hears(&client)), (2, 2));
    }

    #[test]
    fn new_connections_go_where_the_address_leads() {
        let ((old, heard_by_old), (new, heard_by_new)) = (echo(), echo());
        let proxy = Proxy::start(old);
        let before = client(&proxy);
        says(&before, 1);
        assert_eq!((next(&heard_by_old), hears(&before)), (1, 1));
        proxy.lead_to(new);
        let after = client(&proxy);
        says(&after, 2);
        assert_eq!(next(&heard_by_new), 2);
        proxy.set(Traffic::DelayOneIn(2, Duration::from_millis(1)));
        says(&before, 3);
        assert_eq!((next(&heard_by_old), hears(&before)), (3, 3));
    }

    /// Bytes sent while others are in transit do not wait for their arrival, however many there
    /// are.
    #[test]
    fn much_can_be_under_way_at_once() {
        let (server, heard) = echo();
        let proxy = Proxy::start(server);
        let client = client(&proxy);
        proxy.set(Traffic::Far(Duration::from_millis(300), u32::MAX));
        says(&client, 1);
        // The first byte is still in transit while the others are sent, and no reply has arrived.
        for byte in 2..=5 {
            assert!(heard.try_recv().is_err(), "the message is in flight");
            says(&client, byte);
        }
        for byte in 1..=5 {
            assert_eq!(next(&heard), byte);
        }
        for byte in 1..=5 {
            assert_eq!(hears(&client), byte);
        }
    }

    #[test]
    fn a_long_way_is_slow_and_loses_connections() {
        let (server, heard) = echo();
        let proxy = Proxy::start(server);
        let client = client(&proxy);
        proxy.set(Traffic::Far(Duration::from_millis(1), 2));
        says(&client, 1);
        assert_eq!((next(&heard), hears(&client)), (1, 1));
        says(&client, 2);
        assert_eq!(next(&heard), 2);
        assert!(matches!((&client).read(&mut [0]), Ok(0) | Err(_)));
        assert_eq!((proxy.connections(), proxy.lost()), (1, 1));
    }

    #[test]
    fn connections_end_with_the_proxy() {
        let proxy = Proxy::start(echo().0);
        let client = client(&proxy);
        says(&client, 1);
        assert_eq!(hears(&client), 1);
        drop(proxy);
        assert!(matches!((&client).read(&mut [0]), Ok(0) | Err(_)));
    }
}
