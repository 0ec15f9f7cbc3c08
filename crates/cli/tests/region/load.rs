//! Clients that make checks without pause, and a tally of their replies.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use tidegate_testkit::wait_until;

use crate::client::{Client, TIME_MAX};

/// Number of concurrent clients.
const CLIENTS: usize = 4;

/// The most that a request costs.
pub const COST_MAX: u64 = 3;

/// Between two requests of a client: the servers are to be busy, and the machine is not.
const PAUSE: Duration = Duration::from_millis(1);

/// The decision source of an overloaded server, which decides without any limit.
const SHED: &str = "shed";

/// Replies to the requests of one kind.
#[derive(Clone, Debug, Default)]
pub struct ClientTally {
    /// Units admitted by a limit. Units that an overloaded server lets pass are not counted.
    pub granted: u64,
    /// Units requested.
    pub asked: u64,
    /// Number of replies by decision source.
    pub sources: BTreeMap<String, u64>,
}

/// Replies by the dimension of the requests.
#[derive(Clone, Debug, Default)]
pub struct LoadTally {
    pub clients: BTreeMap<&'static str, ClientTally>,
    pub statuses: BTreeMap<u16, u64>,
    /// Requests without a reply, because the server went away.
    pub lost: u64,
}

impl LoadTally {
    pub fn granted(&self, kind: &str) -> u64 {
        self.clients.get(kind).map_or(0, |client_tally| client_tally.granted)
    }

    pub fn asked(&self, kind: &str) -> u64 {
        self.clients.get(kind).map_or(0, |client_tally| client_tally.asked)
    }

    pub fn answers_by(&self, kind: &str, source: &str) -> u64 {
        self.clients.get(kind).and_then(|client_tally| client_tally.sources.get(source)).copied().unwrap_or(0)
    }
}

struct Shared {
    stop: AtomicBool,
    places: Mutex<Vec<SocketAddr>>,
    tally: Mutex<LoadTally>,
}

/// Clients that make checks until they are stopped.
pub struct Load {
    shared: Arc<Shared>,
    kinds: &'static [&'static str],
    clients: Vec<JoinHandle<()>>,
}

impl Load {
    /// Clients of the servers at `places`. Each request has one of these dimensions, with one of
    /// `keys` values.
    pub fn start(places: Vec<SocketAddr>, kinds: &'static [&'static str], keys: usize) -> Self {
        let shared =
            Shared { stop: AtomicBool::new(false), places: Mutex::new(places), tally: Mutex::default() };
        let shared = Arc::new(shared);
        let clients = (0..CLIENTS).map(|number| {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || shared.ask(number, kinds, keys))
        });
        let clients = clients.collect();
        Self { shared, kinds, clients }
    }

    /// Sends clients to other servers from now on.
    pub fn go_to(&self, places: Vec<SocketAddr>) {
        *self.shared.places.lock().expect("no panic") = places;
    }

    /// Returns the replies so far.
    pub fn so_far(&self) -> LoadTally {
        self.shared.tally().clone()
    }

    /// Waits until each kind of request has this many further replies with the decision source
    /// `source`.
    pub fn wait_for(&self, source: &str, times: u64) {
        let before = self.so_far();
        for kind in self.kinds {
            let enough = before.answers_by(kind, source) + times;
            wait_until(&format!("{kind} to be {source}"), TIME_MAX, || {
                self.shared.tally().answers_by(kind, source) >= enough
            });
        }
    }

    /// The same of one kind of request.
    pub fn wait_for_kind(&self, kind: &str, source: &str, times: u64) {
        let enough = self.so_far().answers_by(kind, source) + times;
        wait_until(&format!("{kind} to be {source}"), TIME_MAX, || {
            self.shared.tally().answers_by(kind, source) >= enough
        });
    }

    /// Stops the clients. Returns all their replies.
    pub fn stop(self) -> LoadTally {
        self.shared.stop.store(true, Ordering::Relaxed);
        for client in self.clients {
            client.join().expect("no panic");
        }
        let tally = self.shared.tally().clone();
        assert!(tally.statuses.keys().all(|status| *status == 200), "{tally:?}");
        tally
    }
}

impl Shared {
    fn tally(&self) -> MutexGuard<'_, LoadTally> {
        self.tally.lock().expect("no panic")
    }

    fn place(&self, number: usize) -> SocketAddr {
        let places = self.places.lock().expect("no panic");
        places[number % places.len()]
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "no condition to wait for: a client that asks now and then"
    )]
    fn ask(&self, number: usize, kinds: &[&'static str], keys: usize) {
        let mut client = Client::new(self.place(number));
        for turn in 0.. {
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            if client.address() != self.place(number) {
                client = Client::new(self.place(number));
            }
            let (kind, key) = (kinds[turn % kinds.len()], format!("key {}", turn / kinds.len() % keys));
            let cost = 1 + (turn / 7) as u64 % COST_MAX;
            let answer = client.ask(&[(kind, &key)], cost);
            let mut tally = self.tally();
            match answer {
                Some(answer) => {
                    *tally.statuses.entry(answer.status).or_default() += 1;
                    let client_tally = tally.clients.entry(kind).or_default();
                    client_tally.asked += cost;
                    client_tally.granted += if answer.allowed && answer.source != SHED { cost } else { 0 };
                    *client_tally.sources.entry(answer.source).or_default() += 1;
                }
                None => tally.lost += 1,
            }
            drop(tally);
            std::thread::sleep(PAUSE);
        }
    }
}
