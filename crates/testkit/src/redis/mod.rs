//! Redis servers of a test's own: alone, behind a sentinel, over TLS, or as a cluster.

mod cluster;
mod tls;

use std::net::SocketAddr;
use std::process::{Command, Stdio};

use tempfile::TempDir;

use crate::process::{Process, Signal};
use crate::wait::{START_TIME_MAX, free_port, wait_until};

pub use cluster::Cluster;
pub use tls::TlsRedis;

/// Arguments of a server that persists every write before it replies.
pub const APPEND_ONLY: &[&str] = &["--appendonly", "yes", "--appendfsync", "always"];

/// Arguments of a server that persists its data on a save command, or once an hour.
pub const SNAPSHOTS: &[&str] = &["--save", "3600", "1"];

/// How many keys one look at a store's keys is about.
const SCAN_COUNT: &str = "1000";

/// Reply of `PTTL` for a key that expired after the scan.
const GONE: i64 = -2;

/// A redis-server of its own, on a free port and on a socket file, stopped when the test is done
/// with it.
#[derive(Debug)]
pub struct Redis {
    process: Process,
    port: u16,
    dir: TempDir,
    arguments: Vec<String>,
}

impl Redis {
    /// Starts a server with these arguments besides its address. By default it persists nothing.
    pub fn start(arguments: &[&str]) -> Self {
        let fixed = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no"];
        let arguments = fixed.iter().chain(arguments).map(ToString::to_string).collect();
        Self::start_in(tempfile::tempdir().expect("a folder"), arguments)
    }

    /// Starts a replica of `master`.
    pub fn start_replica(master: &Self) -> Self {
        Self::start(&["--replicaof", &format!("127.0.0.1 {}", master.port)])
    }

    /// Starts a sentinel that watches `master` under a name, and decides alone.
    pub fn start_sentinel(master: &Self, name: &str) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let configuration = dir.path().join("sentinel.conf");
        let watch = format!("sentinel monitor {name} 127.0.0.1 {} 1\n", master.port);
        std::fs::write(&configuration, watch).expect("written");
        let configuration = configuration.to_string_lossy().into_owned();
        Self::start_in(dir, vec![configuration, "--sentinel".to_owned()])
    }

    fn start_in(dir: TempDir, arguments: Vec<String>) -> Self {
        let port = free_port();
        let redis = Self { process: spawn(port, &dir, &arguments), port, dir, arguments };
        redis.wait_until_ready();
        redis
    }

    /// The port it listens at.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Its address.
    pub fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.port))
    }

    /// Returns its URL, for clients.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    /// Opens a connection for the test through the socket file, independent of the network.
    pub fn connection(&self) -> redis::Connection {
        self.try_connection().expect("a connection")
    }

    /// The same for a server that may be stopped.
    pub fn try_connection(&self) -> redis::RedisResult<redis::Connection> {
        let url = format!("redis+unix://{}", self.dir.path().join("socket").display());
        let connection = redis::Client::open(url)?.get_connection_with_timeout(START_TIME_MAX)?;
        // A halted server fails the test instead of blocking it forever.
        connection.set_read_timeout(Some(START_TIME_MAX))?;
        Ok(connection)
    }

    /// Returns all keys, with the time to live of each, ms. Below 0: the key never expires.
    pub fn keys(&self) -> Vec<(Vec<u8>, i64)> {
        let mut connection = self.connection();
        let (mut cursor, mut all) = (0, Vec::new());
        loop {
            let (next, keys): (u64, Vec<Vec<u8>>) = redis::cmd("SCAN")
                .arg(cursor)
                .arg(&["COUNT", SCAN_COUNT])
                .query(&mut connection)
                .expect("keys");
            let lives = lives(&mut connection, &keys);
            all.extend(keys.into_iter().zip(lives).filter(|(_, life)| *life != GONE));
            cursor = next;
            if cursor == 0 {
                return all;
            }
        }
    }

    /// Kills it on the spot.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Starts it again on the same port, with its persisted data.
    pub fn restart(&mut self) {
        self.process = spawn(self.port, &self.dir, &self.arguments);
        self.wait_until_ready();
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    fn wait_until_ready(&self) {
        wait_until("redis-server to be ready", START_TIME_MAX, || {
            let Ok(mut connection) = self.try_connection() else { return false };
            redis::cmd("PING").query::<String>(&mut connection).is_ok()
        });
    }
}

fn spawn(port: u16, dir: &TempDir, arguments: &[String]) -> Process {
    let mut command = Command::new("redis-server");
    command.args(arguments).args(["--port", &port.to_string(), "--unixsocket", "socket"]);
    Process::spawn(command.current_dir(dir.path()).stdout(Stdio::null()))
}

fn lives(connection: &mut redis::Connection, keys: &[Vec<u8>]) -> Vec<i64> {
    if keys.is_empty() {
        return Vec::new();
    }
    let mut lives = redis::pipe();
    for key in keys {
        lives.cmd("PTTL").arg(key);
    }
    lives.query(connection).expect("times")
}

/// Sends a command to a server and returns the reply.
pub fn ask<T: redis::FromRedisValue>(server: &Redis, command: &[&str]) -> T {
    let (name, arguments) = command.split_first().expect("a command");
    redis::cmd(name).arg(arguments).query(&mut server.connection()).expect("an answer")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restarted_redis_keeps_data_by_its_persistence_options() {
        for (arguments, kept) in [(APPEND_ONLY, 1), (&[], 0)] {
            let mut server = Redis::start(arguments);
            assert_eq!(ask::<String>(&server, &["SET", "key", "value"]), "OK");
            server.kill();
            assert!(server.try_connection().is_err());
            server.restart();
            assert_eq!(ask::<u64>(&server, &["EXISTS", "key"]), kept, "{arguments:?}");
        }
    }

    #[test]
    fn keys_are_listed_with_their_time_to_live() {
        let server = Redis::start(&[]);
        assert_eq!(server.keys(), []);
        ask::<String>(&server, &["SET", "stays", "1"]);
        ask::<String>(&server, &["SET", "goes", "1", "EX", "1000"]);
        let mut keys = server.keys();
        keys.sort();
        assert!(matches!(&keys[..], [(goes, 1..), (stays, -1)] if goes == b"goes" && stays == b"stays"));
    }
}
