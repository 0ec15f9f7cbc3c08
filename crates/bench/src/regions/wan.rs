//! Replication traffic: bytes for a number of keys, and how little they depend on requests.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use tidegate_load::{Turns, run_clients, wait_until};
use tidegate_testkit::REGIONS;

use super::fixture::{Counts, PAIRS, RegionsFixture, pair_name};
use crate::machine;
use crate::region::client::{Connection, Timeline};

/// Connections to each region. With more, more requests come at once, and an origin on the same
/// machine is late more often.
const CONNECTIONS: usize = 16;

/// The burst of both rules, and the publish threshold, a sixteenth of it.
const BURST: u64 = 10_000;
const THRESHOLD: u64 = BURST / 16;

/// Cost of a first request: above the publish threshold, with four times as much still below the
/// limit; or below the threshold.
const ABOVE: u64 = 700;
const BELOW: u64 = 1;
const _: () = assert!(BELOW < THRESHOLD && THRESHOLD < ABOVE && ABOVE * 4 < BURST);

/// Cost of each later request for steady keys. Four times as much is less than drains.
const STEADY: u64 = 63;
const STEADY_TURNS_PER_SECOND: u64 = 10;

/// Longest time of requests for steady keys: more time shows nothing more.
const STEADY_TIME_MAX: Duration = Duration::from_secs(30);

/// One active key in this many is steady: it gets requests all the time.
const STEADY_ONE_IN: u32 = 1_000;
/// Least number of steady keys. With fewer, most bytes are heartbeats.
const STEADY_KEYS_MIN: u32 = 40;

/// Keys before the rows: a few for each partition of an origin.
const WARM_UP_KEYS: u32 = 1_000;
const WARM_UP_TIME: Duration = Duration::from_secs(2);

/// Replication is complete after this time without a component: several rounds after the life of a
/// grant that is still to be reported.
const QUIET: Duration = Duration::from_secs(2);
const QUIET_TIME_MAX: Duration = Duration::from_mins(5);

/// Meters of `once` hardly drain while a row lasts, so a component is as large when it is published
/// late. Meters of `always` drain faster than requests fill them.
const RULES: &str = "placement = 'key'\n
[[rules]]\nname = 'once'\nwhen = { rule = 'once' }\nkey = ['key']\nregime = 'best_effort'\n\
limit = 10_000\nperiod = '1d'\n
[[rules]]\nname = 'always'\nwhen = { rule = 'always' }\nkey = ['key']\nregime = 'best_effort'\n\
limit = 600_000\nperiod = '1m'\nburst = 10_000\n";

/// The requests for the keys of a row.
#[derive(Clone, Copy, Debug)]
struct Shape {
    name: &'static str,
    rule: &'static str,
    keys: u32,
    /// How often each key has its turn, and how many requests it gets then, one right after the
    /// other.
    turns: u64,
    at_once: u64,
    /// How long it takes until all of them had all of their turns.
    time: Duration,
    /// The cost of a request in a key's first turn, and later.
    first: u64,
    then: u64,
}

/// A row of the table.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    pub(super) name: &'static str,
    /// Each key is used in one region; each region has a third of them.
    pub(super) keys: u32,
    pub(super) requests: u64,
    pub(super) seconds: f64,
    /// Requests that were not decided by all regions together.
    pub(super) odd: u64,
    /// Components, all pairs together. A key that is published again, or to another region, counts
    /// again.
    pub(super) published: u64,
    /// Components of a key that each peer region received, on average.
    pub(super) published_per_key: f64,
    pub(super) bytes: u64,
    pub(super) bytes_per_published: Option<f64>,
    pub(super) pairs: Vec<Pair>,
}

impl Row {
    pub(super) fn bytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.seconds
    }

    pub(super) fn published_per_second(&self) -> f64 {
        self.published as f64 / self.seconds
    }
}

/// Replication traffic between two regions, in both directions.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Pair {
    pub(super) between: String,
    pub(super) published: u64,
    pub(super) bytes: u64,
    pub(super) bytes_per_second: f64,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Wan {
    pub(super) key_bytes: usize,
    pub(super) rows: Vec<Row>,
}

impl Wan {
    pub(super) fn row(&self, name: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.name == name)
    }
}

pub(super) const ONCE: &str = "once";
pub(super) const FOUR_AT_ONCE: &str = "four at once";
pub(super) const HALF: &str = "half";
pub(super) const QUARTER: &str = "quarter";
pub(super) const UNDER: &str = "below";
pub(super) const ALWAYS: &str = "always";
pub(super) const ALWAYS_FOURFOLD: &str = "always fourfold";

fn shapes(keys: u32, time: Duration) -> [Shape; 7] {
    let once = |name, keys| Shape {
        name,
        rule: "once",
        keys,
        turns: 1,
        at_once: 1,
        time,
        first: ABOVE,
        then: STEADY,
    };
    let always = |name, at_once| Shape {
        rule: "always",
        turns: STEADY_TURNS_PER_SECOND * time.min(STEADY_TIME_MAX).as_secs(),
        time: time.min(STEADY_TIME_MAX),
        at_once,
        ..once(name, (keys / STEADY_ONE_IN).max(STEADY_KEYS_MIN))
    };
    [
        once(ONCE, keys),
        Shape { at_once: 4, ..once(FOUR_AT_ONCE, keys) },
        once(HALF, keys / 2),
        once(QUARTER, keys / 4),
        Shape { first: BELOW, ..once(UNDER, keys) },
        always(ALWAYS, 1),
        always(ALWAYS_FOURFOLD, 4),
    ]
}

pub(super) fn run(program: &Path, keys: u32, time: Duration) -> Result<Wan> {
    let fixture = RegionsFixture::start(program, RULES);
    warm_up(&fixture)?;
    let mut rows = Vec::new();
    for (number, shape) in (1..).zip(shapes(keys, time)) {
        eprintln!("wan, {number} of 7: {}, {} keys", shape.name, shape.keys);
        rows.push(row(&fixture, shape, number).with_context(|| shape.name)?);
    }
    Ok(Wan { key_bytes: key(1, 0).len(), rows })
}

/// Checks a few keys that are in no row. Connections and scripts then exist, and every partition
/// knows that the region is connected.
fn warm_up(fixture: &RegionsFixture) -> Result<()> {
    let [.., always, _] = shapes(WARM_UP_KEYS, WARM_UP_TIME);
    let shape = Shape { keys: WARM_UP_KEYS, turns: 1, ..always };
    ask(fixture, shape, 0, machine::now())?;
    wait_for_quiet(fixture)?;
    Ok(())
}

fn row(fixture: &RegionsFixture, shape: Shape, number: u32) -> Result<Row> {
    // The row before has ended with all components published.
    let (before, started) = (fixture.counts()?, machine::now());
    let requests = ask(fixture, shape, number, started)?;
    let after = wait_for_quiet(fixture)?;
    Ok(describe(shape, requests, (machine::now() - started).as_secs_f64(), &after.since(before)))
}

fn describe(shape: Shape, requests: u64, seconds: f64, counts: &Counts) -> Row {
    let all = counts.all();
    let others = (REGIONS.len() - 1) as f64;
    let pair = |(pair, of): (&(usize, usize), &super::fixture::ReplicationTraffic)| Pair {
        between: pair_name(*pair),
        published: of.published,
        bytes: of.bytes,
        bytes_per_second: of.bytes as f64 / seconds,
    };
    Row {
        name: shape.name,
        keys: shape.keys,
        requests,
        seconds,
        odd: counts.odd + requests.saturating_sub(counts.decided),
        published: all.published,
        published_per_key: all.published as f64 / f64::from(shape.keys) / others,
        bytes: all.bytes,
        bytes_per_published: (all.published > 0).then(|| all.bytes as f64 / all.published as f64),
        pairs: PAIRS.iter().zip(&counts.pairs).map(pair).collect(),
    }
}

/// Waits until replication is complete. Returns the counts at that time.
fn wait_for_quiet(fixture: &RegionsFixture) -> Result<Counts> {
    let deadline = machine::now() + QUIET_TIME_MAX;
    let mut counts = fixture.counts()?;
    loop {
        wait_until(machine::now() + QUIET);
        let next = fixture.counts()?;
        if next.all().published == counts.all().published {
            return Ok(next);
        }
        ensure!(machine::now() < deadline, "regions still publish components at the deadline");
        counts = next;
    }
}

/// Checks every key in its region, evenly over the time. Returns the number of requests.
fn ask(fixture: &RegionsFixture, shape: Shape, number: u32, started: Instant) -> Result<u64> {
    let timeline = Timeline::new();
    let keys = |region: usize| keys_of(region, shape.keys);
    let turns: Vec<Turns> = (0..REGIONS.len()).map(|region| Turns::new(keys(region) * shape.turns)).collect();
    let asked = run_clients(CONNECTIONS * REGIONS.len(), |place| -> Result<u64> {
        let region = place % REGIONS.len();
        let keys = keys(region);
        let mut connection = Connection::open(fixture.address(region), timeline)?;
        let mut asked = 0;
        while let Some(turn) = turns[region].take() {
            wait_until(started + shape.time.mul_f64(turn as f64 / (keys * shape.turns) as f64));
            let cost = if turn < keys { shape.first } else { shape.then };
            let key = key(number, turn % keys * REGIONS.len() as u64 + region as u64);
            for _ in 0..shape.at_once {
                connection.check(shape.rule, &key, cost)?;
                asked += 1;
            }
        }
        Ok(asked)
    })?;
    Ok(asked.into_iter().sum())
}

/// How many keys are those of a region: each has every third.
fn keys_of(region: usize, keys: u32) -> u64 {
    let regions = REGIONS.len() as u64;
    (u64::from(keys) + regions - 1 - region as u64) / regions
}

/// A key of a row, as long as `tidegate plan` takes keys to be.
fn key(row: u32, number: u64) -> String {
    format!("{row:08}{number:024}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::regions::fixture::ReplicationTraffic;

    #[test]
    fn each_row_varies_the_dimension_in_its_name() {
        let of = shapes(100_000, Duration::from_secs(90)).map(|shape| {
            (shape.keys, u64::from(shape.keys) * shape.turns * shape.at_once, shape.first > THRESHOLD)
        });
        assert_eq!(of[0], (100_000, 100_000, true));
        assert_eq!(of[1], (100_000, 400_000, true));
        assert_eq!((of[2], of[3]), ((50_000, 50_000, true), (25_000, 25_000, true)));
        assert_eq!(of[4], (100_000, 100_000, false));
        assert_eq!((of[5], of[6]), ((100, 30_000, true), (100, 120_000, true)));
    }

    #[test]
    fn bytes_are_reported_per_key_and_per_pair() {
        let pairs = [100, 200, 300].map(|published| ReplicationTraffic { bytes: 90 * published, published });
        let counts = Counts { decided: 290, odd: 5, pairs };
        let found = describe(shapes(300, Duration::from_secs(1))[0], 300, 10.0, &counts);
        assert_eq!(
            (found.published, found.bytes, found.odd),
            (600, 54_000, 15),
            "an undecided request counts as odd"
        );
        assert_eq!((found.published_per_key, found.bytes_per_published), (1.0, Some(90.0)));
        let pairs: Vec<_> =
            found.pairs.iter().map(|pair| (pair.between.as_str(), pair.bytes_per_second)).collect();
        assert_eq!(pairs, [("ap-eu", 900.0), ("ap-us", 1_800.0), ("eu-us", 2_700.0)]);
    }

    #[test]
    fn every_key_has_its_region() {
        for keys in [100, 101, 102] {
            assert_eq!((0..3).map(|region| keys_of(region, keys)).sum::<u64>(), u64::from(keys));
        }
        assert_eq!([0, 1, 2].map(|region| keys_of(region, 100)), [34, 33, 33]);
    }

    #[test]
    fn keys_are_of_one_length_and_no_row_meets_those_of_another() {
        assert_eq!((key(1, 0).len(), key(7, 99_999).len()), (32, 32));
        assert_ne!(key(1, 5), key(2, 5));
    }
}
