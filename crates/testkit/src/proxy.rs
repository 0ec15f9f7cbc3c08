//! A TCP proxy that stands between a client and its server, and does to their traffic what networks do.

use std::net::{SocketAddr, TcpListener as StdListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// What becomes of what is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Traffic {
    /// It goes through.
    Pass,
    /// Answers go through, late.
    DelayAnswers(Duration),
    /// The same for one answer in so many; what comes after it on its connection waits behind it.
    DelayOneIn(u32, Duration),
    /// Answers are swallowed, and the connections stay open.
    DropAnswers,
    /// The same, on one connection only, by the order in which they were made.
    DropAnswersOn(usize),
    /// The connection is cut instead of an answer: the server has done what was asked, and nobody hears of it.
    CutAnswers,
    /// Nothing passes either way and the connections stay open, as if the other machine were gone. What was said
    /// meanwhile arrives when traffic passes again.
    HalfOpen,
}

/// A proxy on a port of its own, on a thread of its own: it also works for tests without a runtime. It is closed, with
/// its connections, when the test is done with it.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    traffic: watch::Sender<Traffic>,
    server: watch::Sender<SocketAddr>,
    lost: Arc<AtomicU64>,
}

impl Proxy {
    /// Starts a proxy to `server` through which everything passes.
    pub fn start(server: SocketAddr) -> Self {
        let listener = StdListener::bind("127.0.0.1:0").expect("a free port");
        listener.set_nonblocking(true).expect("a socket of our own");
        let address = listener.local_addr().expect("bound");
        let (traffic, watched) = watch::channel(Traffic::Pass);
        let (server, leads_to) = watch::channel(server);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let lost = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&lost);
        std::thread::spawn(move || runtime.block_on(accept(listener, leads_to, watched, counted)));
        Self { address, traffic, server, lost }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The address of a store behind it.
    pub fn url(&self) -> String {
        format!("redis://{}/", self.address)
    }

    /// How often something that a server said was kept from its client.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// What becomes of what is said from now on.
    pub fn set(&self, traffic: Traffic) {
        self.traffic.send_replace(traffic);
    }

    /// Leads connections that are made from now on to another server, as an address does that moves.
    pub fn lead_to(&self, server: SocketAddr) {
        self.server.send_replace(server);
    }
}

/// Accepts until the proxy is dropped.
async fn accept(
    listener: StdListener,
    server: watch::Receiver<SocketAddr>,
    traffic: watch::Receiver<Traffic>,
    lost: Arc<AtomicU64>,
) {
    let listener = TcpListener::from_std(listener).expect("bound");
    let accepting = async {
        for number in 0.. {
            let Ok((client, _)) = listener.accept().await else { return };
            let server = *server.borrow();
            tokio::spawn(carry(number, client, server, traffic.clone(), Arc::clone(&lost)));
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
    lost: Arc<AtomicU64>,
) {
    let Ok(server) = TcpStream::connect(server).await else { return };
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    tokio::select! {
        () = questions(from_client, to_server, traffic.clone()) => {}
        () = answers(number, from_server, to_client, traffic, &lost) => {}
    }
}

async fn questions(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut traffic: watch::Receiver<Traffic>) {
    let mut bytes = vec![0; 65_536];
    while let Ok(count @ 1..) = from.read(&mut bytes).await {
        if !is_connected(&mut traffic).await || to.write_all(&bytes[..count]).await.is_err() {
            return;
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "a network that is slow")]
async fn answers(
    number: usize,
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut traffic: watch::Receiver<Traffic>,
    lost: &AtomicU64,
) {
    let mut bytes = vec![0; 65_536];
    let mut answered = 0_u32;
    while let Ok(count @ 1..) = from.read(&mut bytes).await {
        if !is_connected(&mut traffic).await {
            return;
        }
        answered = answered.wrapping_add(1);
        let now = *traffic.borrow();
        match now {
            Traffic::DelayAnswers(time) => tokio::time::sleep(time).await,
            Traffic::DelayOneIn(many, time) if answered.is_multiple_of(many) => {
                tokio::time::sleep(time).await;
            }
            Traffic::DropAnswers => {
                lost.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            Traffic::DropAnswersOn(which) if which == number => {
                lost.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            Traffic::Pass | Traffic::DelayOneIn(..) | Traffic::DropAnswersOn(_) | Traffic::HalfOpen => {}
            Traffic::CutAnswers => {
                lost.fetch_add(1, Ordering::Relaxed);
                return;
            }
        }
        if to.write_all(&bytes[..count]).await.is_err() {
            return;
        }
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
    use crate::wait::START_TIME_MAX;

    /// Long enough for an answer that is there to come, in tests that must see none.
    const QUIET: Duration = Duration::from_millis(200);

    /// A server that says what it hears, and tells through the channel what it heard.
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

    fn says(mut client: &Client, byte: u8) {
        client.write_all(&[byte]).unwrap();
    }

    fn hears(mut client: &Client) -> u8 {
        let mut byte = [0];
        client.read_exact(&mut byte).unwrap();
        byte[0]
    }

    fn hears_nothing(mut client: &Client) -> bool {
        client.set_read_timeout(Some(QUIET)).unwrap();
        let read = client.read(&mut [0]);
        client.set_read_timeout(Some(START_TIME_MAX)).unwrap();
        read.is_err_and(|error| matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut))
    }

    #[test]
    fn what_passes_passes_and_what_is_swallowed_was_heard() {
        let (server, heard) = echo();
        let proxy = Proxy::start(server);
        let (first, second) = (client(&proxy), client(&proxy));
        for (client, byte) in [(&first, 1), (&second, 2)] {
            says(client, byte);
            assert_eq!((heard.recv().unwrap(), hears(client)), (byte, byte));
        }
        proxy.set(Traffic::DropAnswers);
        says(&first, 3);
        assert_eq!(heard.recv().unwrap(), 3);
        assert!(hears_nothing(&first));
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
        assert!(hears_nothing(&first));
    }

    #[test]
    fn a_connection_is_cut_after_the_server_did_what_was_asked() {
        let (server, heard) = echo();
        let proxy = Proxy::start(server);
        let client = client(&proxy);
        proxy.set(Traffic::CutAnswers);
        says(&client, 1);
        assert_eq!(heard.recv().unwrap(), 1);
        assert!(matches!((&client).read(&mut [0]), Ok(0) | Err(_)));
    }

    #[test]
    fn half_open_means_that_nothing_passes_until_it_does_again() {
        let (server, heard) = echo();
        let proxy = Proxy::start(server);
        let client = client(&proxy);
        proxy.set(Traffic::HalfOpen);
        says(&client, 1);
        assert!(hears_nothing(&client));
        assert!(heard.try_recv().is_err(), "the server knows nothing of it");
        proxy.set(Traffic::Pass);
        assert_eq!(hears(&client), 1);
    }

    #[test]
    fn new_connections_go_where_the_address_leads() {
        let ((old, heard_by_old), (new, heard_by_new)) = (echo(), echo());
        let proxy = Proxy::start(old);
        let before = client(&proxy);
        says(&before, 1);
        assert_eq!((heard_by_old.recv().unwrap(), hears(&before)), (1, 1));
        proxy.lead_to(new);
        let after = client(&proxy);
        says(&after, 2);
        assert_eq!(heard_by_new.recv().unwrap(), 2);
        proxy.set(Traffic::DelayOneIn(2, Duration::from_millis(1)));
        says(&before, 3);
        assert_eq!((heard_by_old.recv().unwrap(), hears(&before)), (3, 3));
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
