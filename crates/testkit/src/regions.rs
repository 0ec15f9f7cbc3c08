//! Regions of real servers, a Redis in each, and the way between them.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use crate::fleet::ServerFleet;
use crate::proxy::{Proxy, Traffic};
use crate::redis::Redis;
use crate::server::Server;

/// In the order in which parts are handed out.
pub const REGIONS: [&str; 3] = ["ap", "eu", "us"];

/// An address without a listener.
const NOBODY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 1);

/// Servers with a Redis of their own.
#[derive(Debug)]
pub struct Region {
    /// Its name.
    pub name: &'static str,
    /// Its origin.
    pub redis: Redis,
    /// Its servers, by their places.
    pub servers: Vec<Server>,
}

/// Three regions that know each other.
#[derive(Debug)]
pub struct Regions {
    /// In the order of [`REGIONS`].
    pub regions: Vec<Region>,
    /// From each server to each server of another region.
    links: Vec<Link>,
    /// From each server to the Redis of its region, where it does not go there straight.
    stores: Vec<((usize, usize), Proxy)>,
    /// Starts the servers of all regions, and has none itself.
    fleet: ServerFleet,
}

/// The way from one server to one of another region, each by region and place.
#[derive(Debug)]
struct Link {
    from: (usize, usize),
    to: (usize, usize),
    proxy: Proxy,
}

impl Regions {
    /// Starts this many servers of `fleet` in each region, with `traffic` on the links between
    /// regions.
    pub fn start(fleet: ServerFleet, servers: usize, traffic: Traffic) -> Self {
        let mut all = Self::empty(fleet);
        all.populate(servers, traffic);
        all
    }

    /// The same with `Traffic::Pass` between regions, and with a proxy between each server and its
    /// Redis too.
    pub fn start_on_wires(fleet: ServerFleet, servers: usize) -> Self {
        let mut all = Self::empty(fleet);
        for place in places(servers) {
            all.stores.push((place, Proxy::start(all.regions[place.0].redis.address())));
        }
        all.populate(servers, Traffic::Pass);
        all
    }

    fn empty(fleet: ServerFleet) -> Self {
        let region = |name| Region { name, redis: Redis::start(&[]), servers: Vec::new() };
        Self { regions: REGIONS.map(region).into(), links: Vec::new(), stores: Vec::new(), fleet }
    }

    fn populate(&mut self, servers: usize, traffic: Traffic) {
        places(servers).for_each(|place| self.link(place, servers));
        self.set(|_, _| true, traffic);
        for place in places(servers) {
            let started = self.start_server(place);
            self.regions[place.0].servers.push(started);
        }
    }

    /// Lays the way from a server to all of other regions. Where it leads is known when they have
    /// started.
    fn link(&mut self, from: (usize, usize), servers: usize) {
        for at in (0..REGIONS.len()).filter(|at| *at != from.0) {
            let to = (0..servers).map(|server| Link { from, to: (at, server), proxy: Proxy::start(NOBODY) });
            self.links.extend(to);
        }
    }

    fn start_server(&self, place: (usize, usize)) -> Server {
        let region = &self.regions[place.0];
        let store = self.stores.iter().find(|(of, _)| *of == place);
        let origin = store.map_or_else(|| region.redis.url(), |(_, proxy)| proxy.url());
        let links = self.links.iter().filter(|link| link.from == place);
        let peers: Vec<String> =
            links.map(|link| format!("{}={}", REGIONS[link.to.0], link.proxy.address())).collect();
        let mut arguments = vec!["--origin", &origin, "--region", region.name];
        arguments.extend(["--peer-listen", "127.0.0.1:0"]);
        for peer in &peers {
            arguments.extend(["--peer", peer]);
        }
        let started = self.fleet.start(&arguments);
        for link in self.links.iter().filter(|link| link.to == place) {
            link.proxy.lead_to(started.address("peer"));
        }
        started
    }

    /// Starts a new server in the place of a stopped one.
    pub fn replace(&mut self, place: (usize, usize)) {
        self.regions[place.0].servers[place.1] = self.start_server(place);
    }

    /// Returns the proxy between a server and its Redis.
    pub fn store(&self, of: (usize, usize)) -> &Proxy {
        let store = self.stores.iter().find(|(place, _)| *place == of);
        &store.expect("regions on wires").1
    }

    /// The ways from a server to those of a region.
    pub fn ways(&self, from: (usize, usize), to: usize) -> impl Iterator<Item = &Proxy> {
        self.links.iter().filter(move |link| link.from == from && link.to.0 == to).map(|link| &link.proxy)
    }

    /// Sets all links back to `Traffic::Pass`.
    pub fn restore(&self) {
        let links = self.links.iter().map(|link| &link.proxy);
        links.chain(self.stores.iter().map(|(_, proxy)| proxy)).for_each(|proxy| proxy.set(Traffic::Pass));
    }

    /// Sets the traffic on all links from one region to another for which `between` is true.
    pub fn set(&self, between: impl Fn(usize, usize) -> bool, traffic: Traffic) {
        for link in self.links.iter().filter(|link| between(link.from.0, link.to.0)) {
            link.proxy.set(traffic);
        }
    }

    /// How many connections a server ever made to other regions.
    pub fn connections_of(&self, from: (usize, usize)) -> u64 {
        self.links.iter().filter(|link| link.from == from).map(|link| link.proxy.connections()).sum()
    }

    /// A server, by region and place.
    pub fn server(&self, (at, server): (usize, usize)) -> &Server {
        &self.regions[at].servers[server]
    }

    /// Every server, by region and place.
    pub fn places(&self) -> Vec<(usize, usize)> {
        let of = |(at, region): (usize, &Region)| (0..region.servers.len()).map(move |server| (at, server));
        self.regions.iter().enumerate().flat_map(of).collect()
    }
}

/// So many servers in each region, by region and place.
fn places(servers: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..REGIONS.len()).flat_map(move |at| (0..servers).map(move |server| (at, server)))
}
