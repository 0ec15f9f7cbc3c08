//! A TCP proxy that stands between an origin and its store, and does to their traffic what networks do.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// What becomes of what the store says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replies {
    /// It goes through.
    Pass,
    /// It goes through, late.
    Delay(Duration),
    /// It is swallowed, and the connection stays open.
    Drop,
    /// It is swallowed on one connection, by the order in which they were made.
    DropOn(usize),
    /// The connection is cut instead.
    Cut,
}

/// A proxy on a port of its own.
pub struct Proxy {
    address: SocketAddr,
    replies: Arc<watch::Sender<Replies>>,
}

impl Proxy {
    pub async fn start(store: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let replies = Arc::new(watch::Sender::new(Replies::Pass));
        let rule = replies.subscribe();
        tokio::spawn(async move {
            for number in 0.. {
                let Ok((client, _)) = listener.accept().await else { return };
                if let Ok(store) = TcpStream::connect(store).await {
                    tokio::spawn(carry(number, client, store, rule.clone()));
                }
            }
        });
        Self { address, replies }
    }

    pub fn url(&self) -> String {
        format!("redis://{}/", self.address)
    }

    pub fn set(&self, replies: Replies) {
        self.replies.send_replace(replies);
    }
}

async fn carry(number: usize, client: TcpStream, store: TcpStream, rule: watch::Receiver<Replies>) {
    let (from_client, to_client) = client.into_split();
    let (from_store, to_store) = store.into_split();
    tokio::select! {
        () = requests(from_client, to_store) => {}
        () = replies(number, from_store, to_client, rule) => {}
    }
}

async fn requests(mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
    let _ = tokio::io::copy(&mut from, &mut to).await;
}

#[allow(clippy::disallowed_methods, reason = "a network that is slow")]
async fn replies(
    number: usize,
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    rule: watch::Receiver<Replies>,
) {
    let mut bytes = vec![0; 65_536];
    while let Ok(count @ 1..) = from.read(&mut bytes).await {
        let now = *rule.borrow();
        match now {
            Replies::Delay(time) => tokio::time::sleep(time).await,
            Replies::Drop => continue,
            Replies::DropOn(which) if which == number => continue,
            Replies::Pass | Replies::DropOn(_) => {}
            Replies::Cut => return,
        }
        if to.write_all(&bytes[..count]).await.is_err() {
            return;
        }
    }
}
