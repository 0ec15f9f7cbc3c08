//! The cost of a region for many keys in constant use, at the full speed of the machine.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use serde::Serialize;
use tidegate_load::{CheckTally, RespConnection, run_clients, throttle};

use super::client::ANSWER_TIME_MAX;
use super::fleet::{BenchFleet, Counts};
use crate::machine;

const NODES: usize = 2;
const KEYS: u32 = 10_000;
/// Connections to each server, and commands that are under way on each of them.
const CONNECTIONS: usize = 4;
const PIPELINE: usize = 64;
/// How long a look takes whether keys are warm. Grants last a few seconds, so keys are cold again
/// after the other fleet's turn.
const WARM_UP_TIME: Duration = Duration::from_secs(1);

/// The extent of the load.
#[derive(Clone, Copy, Debug)]
pub(super) struct Length {
    /// How often each fleet has its turn, since the machine is not the same from one minute to the
    /// next, and for how long.
    rounds: usize,
    time: Duration,
    /// How many looks it may take until keys are warm.
    looks_max: usize,
}

impl Length {
    pub(super) const WHOLE: Self = Self { rounds: 3, time: Duration::from_secs(5), looks_max: 25 };
    pub(super) const QUICK: Self = Self { rounds: 1, time: Duration::from_secs(1), looks_max: 1 };
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Warm {
    pub(super) keys: u32,
    pub(super) nodes: usize,
    pub(super) requests: u64,
    pub(super) per_second: f64,
    /// Share of denied requests.
    pub(super) denied: f64,
    /// Let pass undecided, and counted nowhere else.
    pub(super) shed: u64,
    pub(super) waited: f64,
    pub(super) calls_per_request: f64,
    pub(super) updates_per_request: f64,
    pub(super) scripts_per_request: f64,
    pub(super) cpu_us_per_request: f64,
    /// The same of servers without an origin.
    pub(super) cpu_us_per_request_apart: f64,
    pub(super) per_second_apart: f64,
    /// Throughput relative to servers without an origin, by CPU time.
    pub(super) throughput: f64,
    /// The same for one server with every key below its limit, so that memory decides: with an
    /// origin, without one, and the relative throughput.
    pub(super) below_cpu_us_per_request: f64,
    pub(super) below_cpu_us_per_request_apart: f64,
    pub(super) below_throughput: f64,
    pub(super) below_calls_per_request: f64,
    pub(super) below_waited: f64,
}

/// The limits of the keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Limits {
    /// Every other key has one that it is always at, and the others one that they never reach.
    HalfReached,
    /// No limit is ever reached.
    Below,
}

impl Limits {
    /// Returns the largest part of requests that may wait for the keys to count as warm. Keys at
    /// their limits ask the origin whenever a unit has drained. Of the others, a few ask each
    /// second for about ten seconds, until the node has learned how large a grant each needs.
    fn waited_max(self) -> f64 {
        match self {
            Self::HalfReached => 0.004,
            Self::Below => 0.000_02,
        }
    }
}

/// Figures of a load, and its cost.
#[derive(Clone, Copy, Debug, Default)]
struct LoadFigures {
    asked: u64,
    denied: u64,
    seconds: f64,
    counts: Counts,
}

impl LoadFigures {
    fn plus(self, other: Self) -> Self {
        Self {
            asked: self.asked + other.asked,
            denied: self.denied + other.denied,
            seconds: self.seconds + other.seconds,
            counts: self.counts.plus(other.counts),
        }
    }

    /// Returns the requests that were decided.
    fn requests(&self) -> f64 {
        self.asked.saturating_sub(self.counts.shed) as f64
    }

    fn cpu_us(&self) -> f64 {
        self.counts.cpu.as_secs_f64() * 1e6 / self.requests()
    }
}

/// Runs the load. Also returns the fleet, so that the caller can inspect its origin.
pub(super) fn run(program: &Path, length: Length) -> Result<(Warm, BenchFleet)> {
    let Length { rounds, time, .. } = length;
    let (joined, apart) = (BenchFleet::start(program, NODES), BenchFleet::start_apart(program, NODES));
    eprintln!(
        "warm: {KEYS} keys on {NODES} servers, with an origin and without, {rounds} rounds of {time:?} each"
    );
    let half = beside(&joined, &apart, Limits::HalfReached, length)?;
    drop(apart);
    // One server has the machine to itself, as in production. Several would show how well the
    // machine runs them beside Redis, and not the cost of a decision.
    let (one, one_apart) = (BenchFleet::start(program, 1), BenchFleet::start_apart(program, 1));
    let below = beside(&one, &one_apart, Limits::Below, length)?;
    Ok((describe(half, below), joined))
}

/// Measures servers with an origin and without one, in turn.
fn beside(
    joined: &BenchFleet,
    apart: &BenchFleet,
    limits: Limits,
    length: Length,
) -> Result<(LoadFigures, LoadFigures)> {
    let (mut with, mut without) = (LoadFigures::default(), LoadFigures::default());
    for _ in 0..length.rounds {
        warm_up(joined, limits, length.looks_max)?;
        with = with.plus(ask_for(joined, limits, length.time)?);
        warm_up(apart, limits, length.looks_max)?;
        without = without.plus(ask_for(apart, limits, length.time)?);
    }
    ensure!(with.requests() > 0.0 && without.requests() > 0.0, "nothing was decided");
    Ok((with, without))
}

/// Sends requests until the keys are warm, at most `looks_max` times.
fn warm_up(fleet: &BenchFleet, limits: Limits, looks_max: usize) -> Result<()> {
    for _ in 0..looks_max {
        let LoadFigures { asked, counts, .. } = ask_for(fleet, limits, WARM_UP_TIME)?;
        if counts.waited as f64 <= asked as f64 * limits.waited_max() {
            return Ok(());
        }
    }
    eprintln!("warm: keys are still cold after {WARM_UP_TIME:?}, {looks_max} times");
    Ok(())
}

fn describe(
    (with, without): (LoadFigures, LoadFigures),
    (below, below_apart): (LoadFigures, LoadFigures),
) -> Warm {
    let Counts { shed, waited, calls, updates, scripts, .. } = with.counts;
    let each = |count: u64| count as f64 / with.requests();
    Warm {
        keys: KEYS,
        nodes: NODES,
        requests: with.requests() as u64,
        per_second: with.requests() / with.seconds,
        denied: each(with.denied),
        shed,
        waited: each(waited),
        calls_per_request: each(calls),
        updates_per_request: each(updates),
        scripts_per_request: each(scripts),
        cpu_us_per_request: with.cpu_us(),
        cpu_us_per_request_apart: without.cpu_us(),
        per_second_apart: without.requests() / without.seconds,
        throughput: without.cpu_us() / with.cpu_us(),
        below_cpu_us_per_request: below.cpu_us(),
        below_cpu_us_per_request_apart: below_apart.cpu_us(),
        below_throughput: below_apart.cpu_us() / below.cpu_us(),
        below_calls_per_request: below.counts.calls as f64 / below.requests(),
        below_waited: below.counts.waited as f64 / below.requests(),
    }
}

/// Makes as many requests as are answered in `time`.
fn ask_for(fleet: &BenchFleet, limits: Limits, time: Duration) -> Result<LoadFigures> {
    let servers = fleet.addresses("resp");
    let before = fleet.counts()?;
    let started = machine::now();
    let client = |number: usize| ask(servers[number % servers.len()], limits, started + time, number as u64);
    let mut all = CheckTally::default();
    run_clients(CONNECTIONS * servers.len(), client)?.into_iter().for_each(|tally| all.add(tally));
    let seconds = (machine::now() - started).as_secs_f64();
    let counts = fleet.counts()?.since(before);
    Ok(LoadFigures { asked: all.decisions(), denied: all.denied, seconds, counts })
}

/// Makes requests over one connection.
fn ask(server: SocketAddr, limits: Limits, ends: Instant, seed: u64) -> Result<CheckTally> {
    let mut chance = SmallRng::seed_from_u64(seed);
    let mut connection = RespConnection::open(server, ANSWER_TIME_MAX)?;
    let mut tally = CheckTally::default();
    while machine::now() < ends {
        let batch: String = (0..PIPELINE).map(|_| command(limits, chance.random_range(0..KEYS))).collect();
        connection.send(&batch)?;
        for _ in 0..PIPELINE {
            tally.record(connection.read()?);
        }
    }
    ensure!(tally.errors == 0, "{}", tally.first_error.unwrap_or_default());
    Ok(tally)
}

fn command(limits: Limits, key: u32) -> String {
    let is_reached = limits == Limits::HalfReached && key.is_multiple_of(2);
    let per_minute = if is_reached { 10 } else { 1_000_000 };
    throttle(&format!("{limits:?}:{key}"), per_minute, Duration::from_mins(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_keys_have_a_limit_that_is_reached() {
        let low = |limits: Limits| {
            let is_low = |key: &u32| command(limits, *key).contains("\r\n$2\r\n10\r\n$2\r\n60\r\n");
            (0..KEYS).filter(is_low).count()
        };
        assert_eq!((low(Limits::HalfReached), low(Limits::Below)), (KEYS as usize / 2, 0));
    }

    #[test]
    fn shed_requests_are_excluded_and_costs_are_per_request() {
        let counts = Counts {
            shed: 20,
            scripts: 2,
            updates: 40,
            cpu: Duration::from_micros(200),
            ..Counts::default()
        };
        let with = LoadFigures { asked: 120, denied: 50, seconds: 2.0, counts };
        let without = LoadFigures { counts: Counts { cpu: Duration::from_micros(180), ..counts }, ..with };
        let warm = describe((with, without), (without, with));
        assert!((warm.below_throughput - 1.0 / 0.9).abs() < 1e-9);
        assert!(
            (warm.scripts_per_request - 0.02).abs() < 1e-9 && (warm.updates_per_request - 0.4).abs() < 1e-9
        );
        assert!((warm.cpu_us_per_request - 2.0).abs() < 1e-9 && (warm.throughput - 0.9).abs() < 1e-9);
        assert!((warm.per_second - 50.0).abs() < 1e-9 && warm.requests == 100);
    }
}
