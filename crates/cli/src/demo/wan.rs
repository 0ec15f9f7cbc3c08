//! The network between the regions of a demo: real sockets on this machine, a delay, and links that
//! can be cut.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Maximum of chunks in flight in one direction of a connection. Replicators send fewer within the
/// longest delay.
const ON_THE_WAY_MAX: usize = 256;

/// The largest piece.
const PIECE_BYTES_MAX: usize = 16_384;

/// A link between two regions, both ways.
pub(super) struct Link {
    is_up: watch::Sender<bool>,
    delay: Duration,
}

impl Link {
    pub(super) fn new(delay: Duration) -> Self {
        Self { is_up: watch::Sender::new(true), delay }
    }

    pub(super) fn is_up(&self) -> bool {
        *self.is_up.borrow()
    }

    /// Cuts or heals the link. A cut link delivers nothing and keeps its connections open, like a
    /// broken network. Data sent meanwhile arrives after the repair, as with TCP retransmission.
    pub(super) fn set(&self, is_up: bool) {
        self.is_up.send_replace(is_up);
    }

    /// Forwards every connection to `listener` over this link.
    pub(super) fn lead(&self, listener: TcpListener, to: SocketAddr) {
        tokio::spawn(accept(listener, to, Path { is_up: self.is_up.subscribe(), delay: self.delay }));
    }
}

#[derive(Clone)]
struct Path {
    is_up: watch::Receiver<bool>,
    delay: Duration,
}

impl Path {
    /// Whether there will ever be a link again.
    async fn is_up(&mut self) -> bool {
        self.is_up.wait_for(|is_up| *is_up).await.is_ok()
    }
}

/// Accepts until the link is dropped.
async fn accept(listener: TcpListener, to: SocketAddr, path: Path) {
    let mut connections = JoinSet::new();
    let mut link = path.is_up.clone();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((near, _)) = accepted else { return };
                connections.spawn(join(near, to, path.clone()));
            }
            Some(_) = connections.join_next() => {}
            changed = link.changed() => if changed.is_err() { return },
        }
    }
}

async fn join(near: TcpStream, to: SocketAddr, mut path: Path) {
    if !path.is_up().await {
        return;
    }
    let Ok(far) = TcpStream::connect(to).await else { return };
    // Only the link delays.
    if near.set_nodelay(true).and_then(|()| far.set_nodelay(true)).is_err() {
        return;
    }
    let (from_near, to_near) = near.into_split();
    let (from_far, to_far) = far.into_split();
    tokio::select! {
        () = carry(from_near, to_far, path.clone()) => {}
        () = carry(from_far, to_near, path) => {}
    }
}

/// Carries one direction of a connection: every piece takes as long, however many are on the way.
async fn carry(from: OwnedReadHalf, to: OwnedWriteHalf, path: Path) {
    let (sender, on_the_way) = mpsc::channel(ON_THE_WAY_MAX);
    let delay = path.delay;
    tokio::join!(send(from, sender, delay), deliver(on_the_way, to, path));
}

#[expect(clippy::disallowed_methods, reason = "a network of the present")]
async fn send(mut from: OwnedReadHalf, on_the_way: mpsc::Sender<(Instant, Vec<u8>)>, delay: Duration) {
    let mut piece = vec![0; PIECE_BYTES_MAX];
    while let Ok(count @ 1..) = from.read(&mut piece).await {
        if on_the_way.send((Instant::now() + delay, piece[..count].to_vec())).await.is_err() {
            return;
        }
    }
}

async fn deliver(mut on_the_way: mpsc::Receiver<(Instant, Vec<u8>)>, mut to: OwnedWriteHalf, mut path: Path) {
    while let Some((due, piece)) = on_the_way.recv().await {
        tokio::time::sleep_until(due).await;
        if !path.is_up().await || to.write_all(&piece).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::poll_fn;
    use std::task::Poll;
    use tokio::io::ReadBuf;

    /// Both ends of a connection over a link.
    async fn ends(link: &Link) -> (TcpStream, TcpStream) {
        let listen = || TcpListener::bind("127.0.0.1:0");
        let (way, far) = (listen().await.expect("a free port"), listen().await.expect("a free port"));
        let address = way.local_addr().expect("bound");
        link.lead(way, far.local_addr().expect("bound"));
        let near = TcpStream::connect(address).await.expect("led");
        (near, far.accept().await.expect("led").0)
    }

    async fn hear(far: &mut TcpStream) -> [u8; 3] {
        let mut heard = [0; 3];
        far.read_exact(&mut heard).await.expect("carried");
        heard
    }

    async fn has_received(far: &TcpStream) -> bool {
        let peek =
            |context: &mut std::task::Context<'_>| far.poll_peek(context, &mut ReadBuf::new(&mut [0; 3]));
        poll_fn(|context| Poll::Ready(peek(context).is_ready())).await
    }

    #[tokio::test(flavor = "current_thread")]
    async fn cut_link_delays_data_until_it_is_healed() {
        let [cut, other] = [Link::new(Duration::ZERO), Link::new(Duration::from_millis(20))];
        let (mut near, mut far) = ends(&cut).await;
        let (mut near_other, mut far_other) = ends(&other).await;
        near.write_all(b"one").await.expect("open");
        assert_eq!(&hear(&mut far).await, b"one");

        cut.set(false);
        near.write_all(b"two").await.expect("still open");
        // Data sent later on the slower link arrives first.
        near_other.write_all(b"new").await.expect("open");
        assert_eq!(&hear(&mut far_other).await, b"new");
        assert!(!has_received(&far).await);
        cut.set(true);
        assert_eq!(&hear(&mut far).await, b"two");
    }
}
