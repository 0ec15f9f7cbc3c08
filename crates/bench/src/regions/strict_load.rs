//! The requests of `strict`: the owner region of each key, the region of each request, and the
//! outages of the link.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use tidegate_load::{Turns, run_clients, wait_until};
use tidegate_testkit::REGIONS;

use super::fixture::{RegionsFixture, WAY};
use super::strict::{FLAPPING, Plan, RULE};
use crate::machine;
use crate::region::client::{Connection, SourceKind, Timeline};
use crate::region::load::SentRequest;

/// Attempts to find the owner of a key. On a busy machine, the owner region may answer as late as
/// another region.
const OWNER_LOOKS_MAX: usize = 50;

/// A request, and the region in which it was made.
#[derive(Clone, Copy, Debug)]
pub(super) struct StrictRequest {
    pub(super) region: usize,
    pub(super) made: SentRequest,
}

/// A time in which the link was down, µs of the timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Outage {
    pub(super) from_us: u64,
    pub(super) to_us: u64,
}

/// The requests of a run, and their results.
pub(super) struct StrictLoad {
    /// The region that decides for each key.
    pub(super) owners: Vec<usize>,
    pub(super) asked: Vec<StrictRequest>,
    pub(super) gone: Vec<Outage>,
}

pub(super) fn run(fixture: &RegionsFixture, plan: &Plan) -> Result<StrictLoad> {
    let timeline = Timeline::new();
    let owners = owners(fixture, plan, timeline)?;
    let (turns, is_over) = (Turns::new(plan.requests), AtomicBool::new(false));
    thread::scope(|scope| {
        let flaps = scope.spawn(|| flap(fixture, plan, timeline, &is_over));
        let client = |number| ask(fixture, plan, timeline, number, &turns);
        let asked = run_clients(plan.connections * REGIONS.len(), client);
        is_over.store(true, Ordering::Relaxed);
        let gone = flaps.join().map_err(|_| anyhow!("the link panicked"))?;
        Ok(StrictLoad { owners, asked: asked?.concat(), gone })
    })
}

fn key(number: u32) -> String {
    format!("key-{number}")
}

/// Finds the owner region of each key. An answer of another region takes at least a round trip.
fn owners(fixture: &RegionsFixture, plan: &Plan, timeline: Timeline) -> Result<Vec<usize>> {
    let turns = Turns::new(plan.keys.into());
    let found = run_clients(plan.connections, |_| -> Result<Vec<(u64, usize)>> {
        let open = |region| Connection::open(fixture.address(region), timeline);
        let mut connections = (0..REGIONS.len()).map(open).collect::<Result<Vec<_>>>()?;
        let keys = std::iter::from_fn(|| turns.take());
        keys.map(|number| Ok((number, owner(&mut connections, number as u32)?))).collect()
    })?;
    let mut owners = vec![0; plan.keys as usize];
    found.into_iter().flatten().for_each(|(number, owner)| owners[number as usize] = owner);
    Ok(owners)
}

fn owner(connections: &mut [Connection], number: u32) -> Result<usize> {
    for _ in 0..OWNER_LOOKS_MAX {
        for (region, connection) in connections.iter_mut().enumerate() {
            let answer = connection.check(RULE, &key(number), 0)?;
            let took = Duration::from_micros(answer.answered_us - answer.sent_us);
            if answer.source_kind == SourceKind::Region && took < 2 * WAY {
                return Ok(region);
            }
        }
    }
    bail!("no region owns {}", key(number))
}

/// Makes requests over one connection, each as soon as the last is answered.
fn ask(
    fixture: &RegionsFixture,
    plan: &Plan,
    timeline: Timeline,
    number: usize,
    turns: &Turns,
) -> Result<Vec<StrictRequest>> {
    let region = number % REGIONS.len();
    let mut chance = SmallRng::seed_from_u64(number as u64);
    let mut connection = Connection::open(fixture.address(region), timeline)?;
    let mut asked = Vec::new();
    while turns.take().is_some() {
        let number = chance.random_range(0..plan.keys);
        let answer = connection.check(RULE, &key(number), 1)?;
        asked.push(StrictRequest { region, made: SentRequest { key: number, cost: 1, answer } });
    }
    Ok(asked)
}

/// Cuts and restores the link in turn. Returns the outages.
fn flap(fixture: &RegionsFixture, plan: &Plan, timeline: Timeline, is_over: &AtomicBool) -> Vec<Outage> {
    let mut gone = Vec::new();
    loop {
        rest(plan.up, is_over);
        if is_over.load(Ordering::Relaxed) {
            return gone;
        }
        let from_us = timeline.now_us();
        fixture.cut(FLAPPING, true);
        rest(plan.down, is_over);
        fixture.cut(FLAPPING, false);
        gone.push(Outage { from_us, to_us: timeline.now_us() });
    }
}

/// Waits for a while, or until it is over.
fn rest(time: Duration, is_over: &AtomicBool) {
    const LOOK_EVERY: Duration = Duration::from_millis(50);
    let ends = machine::now() + time;
    while machine::now() < ends && !is_over.load(Ordering::Relaxed) {
        wait_until(ends.min(machine::now() + LOOK_EVERY));
    }
}
