//! `servers crowd`: the cost of many idle clients and some slow ones to the others, in latency and
//! in memory.

use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};

use super::case::{Case, Contestant, Loads};
use super::redis::{self, RedisLoad};
use super::{Load, peers, run_load};

/// Runs with the crowd and without, in turns, since the machine is not the same from one minute to
/// the next.
const ROUNDS: usize = 3;

/// Between two turns of the slow clients.
const TURN: Duration = Duration::from_millis(100);

/// Turns between two bytes of a client that sends one at a time: a second.
const TURNS_PER_BYTE: usize = 10;

/// A command that such a client takes about a minute to send, unless the server cuts it first.
const SLOW_COMMAND: &[u8] = b"*5\r\n$11\r\nCL.THROTTLE\r\n$4\r\nslow\r\n$2\r\n15\r\n$2\r\n30\r\n$2\r\n60\r\n";

/// Commands that a client sends at a time and never reads the answers to.
const UNREAD_COMMANDS: usize = 200;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Connections that send nothing.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(0..=100_000))]
    idle: u64,
    /// Connections that send a byte at a time, or never read their answers: half of each.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u64).range(0..=10_000))]
    slow: u64,
    /// How long each run takes.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=300))]
    seconds: u64,
}

pub(super) fn run(args: &Args) -> Result<()> {
    let server = peers::start(Case::RespP1, Contestant::Tidegate, None)?;
    let load = RedisLoad::new(server.port(), 1, redis::command(Contestant::Tidegate, server.port())?)?;
    let warm = load.warm_up()?;
    let time = Duration::from_secs(args.seconds);
    let alone_bytes = server.resident_bytes()?;
    let (mut alone, mut crowded, mut crowded_bytes, mut shed) = (Vec::new(), Vec::new(), 0, 0);
    let mut measure = |rounds: &mut Vec<Load>| -> Result<()> {
        let found = run_load(&server, &load, &warm, time)?;
        shed += found.shed;
        rounds.push(found.load);
        Ok(())
    };
    for round in 1..=ROUNDS {
        eprintln!("round {round} of {ROUNDS}: alone, then in a crowd");
        measure(&mut alone)?;
        let crowd = Crowd::gather(server.port(), args)?;
        measure(&mut crowded)?;
        crowded_bytes = crowded_bytes.max(server.resident_bytes()?);
        crowd.leave();
    }
    report(&alone, &crowded);
    println!("shed answers, not counted: {shed}");
    println!("resident: {} MB alone, {} MB in the crowd", alone_bytes >> 20, crowded_bytes >> 20);
    Ok(())
}

fn report(alone: &[Load], crowded: &[Load]) {
    let (calm, busy) = (p99(alone), p99(crowded));
    println!(
        "p99 of 50 busy clients, us: alone {calm:.0}, in the crowd {busy:.0}, {:.2} times as long",
        busy / calm
    );
    for (one, other) in alone.iter().zip(crowded) {
        println!(
            "  a round: {:.0} and {:.0}; {:.0} and {:.0} requests/s",
            one.p99_us, other.p99_us, one.per_second, other.per_second
        );
    }
}

/// The median of the rounds.
fn p99(loads: &[Load]) -> f64 {
    let mut all: Vec<f64> = loads.iter().map(|load| load.p99_us).collect();
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// Idle clients, and slow ones.
struct Crowd {
    idle: Vec<TcpStream>,
    over: Arc<AtomicBool>,
    slow: JoinHandle<()>,
}

impl Crowd {
    fn gather(port: u16, args: &Args) -> Result<Self> {
        let connect = |_| TcpStream::connect(("127.0.0.1", port)).context("a client of the crowd");
        let idle = (0..args.idle).map(connect).collect::<Result<_>>()?;
        let slow = (0..args.slow).map(connect).collect::<Result<Vec<_>>>()?;
        let over = Arc::new(AtomicBool::new(false));
        let watched = Arc::clone(&over);
        let slow = std::thread::spawn(move || dawdle(port, slow, &watched));
        Ok(Self { idle, over, slow })
    }

    fn leave(self) {
        self.over.store(true, Ordering::Relaxed);
        self.slow.thread().unpark();
        // A thread that panicked was slow in its own way.
        let _ = self.slow.join();
        drop(self.idle);
    }
}

fn dawdle(port: u16, mut clients: Vec<TcpStream>, over: &AtomicBool) {
    let unread = SLOW_COMMAND.repeat(UNREAD_COMMANDS);
    for client in &clients {
        let _ = client.set_nonblocking(true);
    }
    for turn in 0.. {
        if over.load(Ordering::Relaxed) {
            return;
        }
        for (at, client) in clients.iter_mut().enumerate() {
            let next = turn / TURNS_PER_BYTE % SLOW_COMMAND.len();
            let sent = match at % 2 {
                0 if turn % TURNS_PER_BYTE == 0 => client.write(&SLOW_COMMAND[next..=next]),
                0 => Ok(0),
                _ => client.write(&unread),
            };
            let cut = sent.is_err_and(|error| error.kind() != std::io::ErrorKind::WouldBlock);
            // The server cuts clients like these; they come back.
            if cut && let Ok(again) = TcpStream::connect(("127.0.0.1", port)) {
                let _ = again.set_nonblocking(true);
                *client = again;
            }
        }
        std::thread::park_timeout(TURN);
    }
}
