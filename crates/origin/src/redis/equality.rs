//! Tests that the script equals the pure transition: both apply the same random histories, and the
//! test compares every reply and every meter.
//!
//! An ordinary run makes [`CALLS`] calls; `TIDEGATE_EQUALITY_CALLS` sets another number,
//! `TIDEGATE_EQUALITY_SEED` another seed.

#![allow(clippy::cast_possible_truncation, reason = "random numbers are drawn from ranges that fit")]

mod mutants;

use std::collections::HashMap;
use std::time::Duration;

use tidegate_core::origin::{
    Call, CallError, CallReply, Charge, CheckGroup, Component, ComponentTotals, CrossRegionTerms,
    DIRTY_RETENTION_US, Lapse, MergeReply, MergeRequest, MeterReply, MeterUpdate, NodeId, OriginMeter,
    Partition, RECALL_US, RegionId, RoundReply, RoundRequest, StoreId, Terms,
};
use tidegate_core::{Algorithm, Limit, PERIOD_US_MAX};
use tidegate_testkit::Redis;

use mutants::{MUTANTS, Mutant};

use super::script::{CALL, CALL_CROSS_REGION, GATHER, JOIN, MERGE, ROUND, Script};
use super::wire::{self, Numbers, RoundScriptReply, ScriptInput, ScriptReply};

/// How many calls an ordinary run makes.
const CALLS: usize = 100_000;
/// How many are made of a script that is known to differ.
const MUTANT_CALLS: usize = 300_000;
const CALLS_PER_HISTORY: usize = 400;
const PARTITION: u16 = 77;
/// November 2026, µs.
const START_US: u64 = 1_794_000_000_000_000;
const SECOND: u64 = 1_000_000;
/// Numbers that the script keeps of a meter.
const METER_NUMBERS: usize = 17;
/// Bytes of those, and of the name that they end with.
const METER_BYTES: usize = 17 * 8 + 16;
/// How far a clock may be behind its estimate before it counts as set back.
const AHEAD_US_MAX: u64 = 250_000;
/// Retry time of a request that is denied because other nodes hold grants, µs.
const RECALL_RETRY_US: u64 = 200_000;

#[test]
fn the_script_is_the_pure_transition() {
    let calls = from_environment("TIDEGATE_EQUALITY_CALLS").map_or(CALLS, |calls| calls as usize);
    let seed = from_environment("TIDEGATE_EQUALITY_SEED").unwrap_or(1);
    let server = Redis::start(&[]);
    let difference =
        first_difference(&mut server.connection(), &sources_with_given_time_and_place(), calls, seed);
    assert_eq!(difference, None);
}

/// Proves that the comparison can fail: each of these scripts is wrong in one place, and all are
/// noticed.
#[test]
fn a_script_that_differs_is_noticed() {
    // Two at a time, each with a store of its own: it is the store that takes the time.
    let halves = MUTANTS.split_at(MUTANTS.len() / 2);
    std::thread::scope(|scope| {
        let unnoticed = [halves.0, halves.1].map(|half| scope.spawn(|| unnoticed(half)));
        for unnoticed in unnoticed {
            assert_eq!(unnoticed.join().expect("no panic"), Vec::<&Mutant>::new());
        }
    });
}

fn unnoticed(mutants: &'static [Mutant]) -> Vec<&'static Mutant> {
    let server = Redis::start(&[]);
    let mut connection = server.connection();
    let sources = sources_with_given_time_and_place();
    let is_unnoticed = |(from, to): &&Mutant| {
        assert!(sources.iter().any(|source| source.contains(from)), "{from}");
        let mutant = sources.clone().map(|source| source.replacen(from, to, 1));
        first_difference(&mut connection, &mutant, MUTANT_CALLS, 1).is_none()
    };
    mutants.iter().filter(is_unnoticed).collect()
}

/// Applies random histories to both, and returns their first difference.
fn first_difference(
    connection: &mut redis::Connection,
    sources: &[String; 6],
    calls: usize,
    seed: u64,
) -> Option<String> {
    let hashes = sources.clone().map(|source| {
        let script = Script::new(&source);
        let hash: String =
            redis::cmd("SCRIPT").arg("LOAD").arg(&script.text).query(connection).expect("loads");
        assert_eq!(hash, script.hash);
        hash
    });
    (0..calls.div_ceil(CALLS_PER_HISTORY) as u64).find_map(|history| {
        let mut world = World::new(Chance(seed << 32 | history));
        let steps: Vec<Step> = (0..CALLS_PER_HISTORY).map(|_| world.step()).collect();
        let compared =
            compare_answers(connection, &hashes, &steps).and_then(|()| compare_meters(connection, &world));
        compared.err().map(|difference| format!("history {history} of seed {seed}: {difference}"))
    })
}

/// An error that shows both where they differ.
fn same<T: PartialEq + std::fmt::Debug + ?Sized>(
    got: &T,
    expected: &T,
    label: impl Fn() -> String,
) -> Result<(), String> {
    if got == expected { Ok(()) } else { Err(format!("{}: {got:?} instead of {expected:?}", label())) }
}

fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

/// Returns the scripts with only their clock and their store identity replaced by values of the
/// last argument.
fn sources_with_given_time_and_place() -> [String; 6] {
    let everywhere = ("= redis.call('TIME')", "= { 0, match(ARGV[#ARGV], '^(%d+)') }");
    let of_stores =
        [("parent = who_answers(clustered)", "parent = match(ARGV[#ARGV], '^%d+ (%d+) (%d+) (%d+)')")];
    let replaced = |source: String, (from, to): (&str, &str)| {
        assert_eq!(source.matches(from).count(), 1, "{from}");
        source.replace(from, to)
    };
    let [call, cross_region, round, gather, join, merge] =
        [CALL, CALL_CROSS_REGION, ROUND, GATHER, JOIN, MERGE]
            .map(|source| replaced(source.to_owned(), everywhere));
    let [call, cross_region, join] =
        [call, cross_region, join].map(|source| of_stores.into_iter().fold(source, replaced));
    let how_long = ("up_us = how_long_us()", "up_us = match(ARGV[#ARGV], '(%d+)$') + 0");
    let [call, cross_region] = [call, cross_region].map(|source| replaced(source, how_long));
    [call, cross_region, round, gather, join, merge]
}

struct Step {
    now_us: u64,
    done: StepKind,
}

enum StepKind {
    Call {
        call: Call,
        /// Whether the call runs the cross-region script, because it must or by chance.
        is_wide: bool,
        expected: Result<CallReply, CallError>,
    },
    Round(RoundRequest, StoreId, RoundReply),
    Merge(MergeRequest, MergeReply),
}

/// Steps sent in one pipeline, with their expected results.
#[derive(Default)]
struct SentPipeline<'a> {
    pipe: redis::Pipeline,
    steps: Vec<&'a Step>,
}

fn compare_answers(
    connection: &mut redis::Connection,
    hashes: &[String; 6],
    steps: &[Step],
) -> Result<(), String> {
    let [call_hash, cross_region_hash, round_hash, gather_hash, join_hash, merge_hash] = hashes;
    redis::cmd("FLUSHALL").exec(connection).expect("flushes");
    let mut sent = SentPipeline::default();
    for step in steps {
        let time = step.now_us.to_string();
        match &step.done {
            StepKind::Call { call, is_wide, .. } => {
                let StoreId { lineage, boot, parent, up_us } = call.store;
                let words = ScriptInput::of(PARTITION, call, true, *is_wide);
                let hash = if *is_wide { cross_region_hash } else { call_hash };
                sent.add(step, hash, &words, &format!("{time} {lineage} {boot} {parent} {up_us}"));
            }
            StepKind::Merge(merge, _) => {
                sent.add(step, merge_hash, &ScriptInput::of_merge(PARTITION, merge), &time);
            }
            StepKind::Round(round, StoreId { lineage, boot, parent, .. }, expected) => {
                std::mem::take(&mut sent).compare(connection)?;
                let there = format!("{time} {lineage} {boot} {parent}");
                let mut run = |hash: &str, words: &ScriptInput| -> Result<Vec<Vec<u8>>, String> {
                    evaluate(&mut redis::cmd("EVALSHA"), hash, words, &there)
                        .query(connection)
                        .map_err(|error| error.to_string())
                };
                let marked: Vec<Vec<u8>> = run(round_hash, &ScriptInput::of_round(PARTITION, round))?;
                let RoundScriptReply { mut gathered, names, isolated_meters } =
                    wire::read_round(&marked).ok_or("no round")?;
                let found = run(gather_hash, &ScriptInput::of_meters(PARTITION, names))?;
                gathered.components = wire::read_components(names, &found).ok_or("no components")?;
                if !isolated_meters.is_empty() {
                    run(join_hash, &ScriptInput::of_join(PARTITION, isolated_meters, true))?;
                }
                same(&gathered, expected, || format!("{round:?} at {time}"))?;
            }
        }
    }
    sent.compare(connection)
}

fn evaluate<'a>(
    command: &'a mut redis::Cmd,
    hash: &str,
    words: &ScriptInput,
    place: &str,
) -> &'a mut redis::Cmd {
    command.arg(hash).arg(words.keys.len()).arg(&words.keys).arg(&words.arguments).arg(place)
}

impl<'a> SentPipeline<'a> {
    fn add(&mut self, step: &'a Step, hash: &str, words: &ScriptInput, place: &str) {
        let mut command = redis::cmd("EVALSHA");
        evaluate(&mut command, hash, words, place);
        self.pipe.add_command(command);
        self.steps.push(step);
    }

    fn compare(self, connection: &mut redis::Connection) -> Result<(), String> {
        if self.steps.is_empty() {
            return Ok(());
        }
        let answers: Vec<Vec<u8>> = self.pipe.query(connection).map_err(|error| error.to_string())?;
        self.steps.iter().zip(&answers).try_for_each(|(step, answer)| compare_answer(step, answer))
    }
}

fn compare_answer(step: &Step, answer: &[u8]) -> Result<(), String> {
    match &step.done {
        StepKind::Call { call, expected, .. } => {
            let expected = match expected {
                Ok(reply) => ScriptReply::Reply(reply.clone()),
                Err(error) => ScriptReply::Refused(*error),
            };
            let label = || format!("at {}: {call:?}: {answer:?}", step.now_us);
            same(&wire::read(call, answer), &Some(expected), label)
        }
        StepKind::Merge(merge, merged) => same(&wire::read_merged(merge, answer), &Some(*merged), || {
            format!("{merge:?} at {}", step.now_us)
        }),
        StepKind::Round(..) => Ok(()),
    }
}

fn compare_meters(connection: &mut redis::Connection, world: &World) -> Result<(), String> {
    let mut keys = 1 + world.nodes.iter().filter(|node| node.last.is_some()).count();
    for (name, meter) in world.partition.meters() {
        compare_meter(connection, name, meter).map_err(|difference| format!("{name:?}: {difference}"))?;
        keys += 1 + usize::from(meter.holders().count() > 0);
    }
    let (connected_until_us, stamp, connected_since_us, settled) = world.partition.connectivity_and_stamp();
    let kept: Option<Vec<u8>> = query(connection, "GET", &wire::partition_key(PARTITION, 'w'));
    let nothing = wire::numbers_bytes([0; 4]);
    let expected = wire::numbers_bytes([connected_until_us, stamp, connected_since_us, settled.into()]);
    same(kept.as_ref().unwrap_or(&nothing), &expected, || "connectivity".to_owned())?;
    let dirty_meters = redis::cmd("ZRANGE")
        .arg(wire::partition_key(PARTITION, 'k'))
        .arg(&["0", "-1", "WITHSCORES"])
        .query(connection);
    let dirty_meters: Vec<(Vec<u8>, u64)> = dirty_meters.expect("marks");
    let expected: Vec<_> =
        world.partition.dirty_meters().map(|(stamp, name)| (name.to_vec(), stamp)).collect();
    same(&dirty_meters, &expected, || "marks".to_owned())?;
    let isolated_meters = redis::cmd("ZRANGE")
        .arg(wire::partition_key(PARTITION, 'p'))
        .arg(&["0", "-1", "WITHSCORES"])
        .query(connection);
    let isolated_meters: Vec<(Vec<u8>, u64)> = isolated_meters.expect("isolated meters");
    let expected: Vec<_> =
        world.partition.isolated_meters().map(|(since_us, name)| (name.to_vec(), since_us)).collect();
    same(&isolated_meters, &expected, || "isolated meters".to_owned())?;
    keys += usize::from(kept.is_some())
        + usize::from(!dirty_meters.is_empty())
        + usize::from(!isolated_meters.is_empty());
    let all: Vec<Vec<u8>> = redis::cmd("KEYS").arg("*").query(connection).expect("keys");
    same(&all.len(), &keys, || "keys".to_owned())?;
    all.iter().try_for_each(|key| {
        let ends = query::<i64>(connection, "PTTL", key) > 0;
        same(&ends, &true, || format!("{} ends", key.escape_ascii()))
    })
}

fn compare_meter(connection: &mut redis::Connection, name: &[u8], meter: &OriginMeter) -> Result<(), String> {
    let found: HashMap<Vec<u8>, Vec<u8>> =
        query(connection, "HGETALL", &wire::meter_key(PARTITION, 'm', name));
    let mut expected = HashMap::from([(b"t".to_vec(), wire::terms_bytes(meter.terms()))]);
    let ends: Vec<(String, u64)> = redis::cmd("ZRANGE")
        .arg(wire::meter_key(PARTITION, 'e', name))
        .arg(&["0", "-1", "WITHSCORES"])
        .query(connection)
        .expect("ends");
    let mut expected_ends = Vec::new();
    for (node, node_grant) in meter.holders() {
        let node = wire::node_name(node);
        expected_ends.push((node.clone(), node_grant.until_us));
        expected.insert(
            node.into_bytes(),
            wire::numbers_bytes([node_grant.amount, node_grant.until_us, node_grant.cell, node_grant.want]),
        );
    }
    expected_ends.sort_by_key(|(node, until_us)| (*until_us, node.clone()));
    let first_us = expected_ends.first().map_or(u64::MAX, |(_, until_us)| *until_us);
    let kept = numbers(&found[&b"m"[..]]);
    let (ends_us, expires_us) = (kept[12], meter.expires_us());
    same(&(ends_us >= expires_us), &true, || format!("kept until {ends_us} of {expires_us}"))?;
    same(&(kept[14] <= first_us), &true, || format!("next expiry at {} for {first_us}", kept[14]))?;
    let holders = expected_ends.len() as u64;
    let counted: Vec<u64> = meter.numbers().into_iter().chain([holders]).collect();
    same(&kept[..12], &counted[..], || "numbers".to_owned())?;
    let region_state = meter.region_state_numbers().map_or_else(Vec::new, wire::numbers_bytes);
    same(&found[&b"m"[..]][METER_BYTES..], &region_state[..], || "components of peers".to_owned())?;
    expected.insert(b"m".to_vec(), found[&b"m"[..]].clone());
    if meter.seen().count() > 0 {
        let seen = found.get(&b"x"[..]).cloned().unwrap_or_default();
        compare_seen(&seen, meter)?;
        expected.insert(b"x".to_vec(), seen);
    }
    same(&found, &expected, || "fields".to_owned())?;
    same(&ends, &expected_ends, || "ends".to_owned())
}

fn compare_seen(seen: &[u8], meter: &OriginMeter) -> Result<(), String> {
    let expected = meter.seen().map(|(region, incarnation, totals)| {
        let [first, second, third] = totals.numbers();
        let numbers = wire::numbers_bytes([incarnation, first, second, third]);
        [format!("{:016x}", region.0).as_bytes(), &numbers].concat()
    });
    let mut expected: Vec<Vec<u8>> = expected.collect();
    let mut seen: Vec<Vec<u8>> = seen.chunks(48).map(<[u8]>::to_vec).collect();
    expected.sort_unstable();
    seen.sort_unstable();
    same(&seen, &expected, || "usage charged for peers".to_owned())
}

fn query<T: redis::FromRedisValue>(connection: &mut redis::Connection, command: &str, key: &[u8]) -> T {
    redis::cmd(command).arg(key).query(connection).expect("an answer")
}

/// The numbers of a meter, which end with a name.
fn numbers(kept: &[u8]) -> Vec<u64> {
    let mut numbers = Numbers::of(&kept[..METER_NUMBERS * 8]).expect("whole numbers of eight bytes");
    (0..METER_NUMBERS).map(|_| numbers.whole().expect("a whole number")).collect()
}

/// A random history of one partition.
struct World {
    chance: Chance,
    /// Whether many nodes hold grants of one meter, and sometimes all stop reporting for a while.
    is_crowded: bool,
    /// Whether there are limits of several regions.
    is_cross_region: bool,
    partition: Partition,
    now_us: u64,
    /// Stamp up to which dirty meters were gathered, and the usage of peer regions.
    upto: u64,
    foreign: u64,
    /// When the last recall ends.
    recall_us: u64,
    store: StoreId,
    names: Vec<Box<[u8]>>,
    /// Earlier and later versions of the limit of each meter.
    terms: Vec<Vec<Terms>>,
    nodes: Vec<Node>,
}

/// The state of one node.
struct Node {
    id: NodeId,
    sequence: u64,
    last: Option<Call>,
    outdated: Option<Call>,
    meter_reply: Vec<Option<MeterReply>>,
}

impl World {
    fn new(mut chance: Chance) -> Self {
        let (is_crowded, is_cross_region) = (chance.one_in(5), chance.one_in(2));
        let names = [&b"key"[..], b"", b"a b\0\r\n{7}", &[255; 300]];
        let most = if is_crowded { 1 } else { 4 };
        let names: Vec<Box<[u8]>> =
            names[..chance.between(1, most) as usize].iter().map(|name| Box::from(*name)).collect();
        let terms = names
            .iter()
            .map(|_| (0..chance.between(1, 3)).map(|_| some_terms(&mut chance, is_cross_region)).collect())
            .collect();
        let ids: Vec<u64> = [0, u64::MAX, 1 << 63, 10].into_iter().chain(100..120).collect();
        let nodes = chance.between(1, 5) as usize;
        let nodes = ids[..if is_crowded { ids.len() } else { nodes }].iter().map(|id| Node {
            id: NodeId(*id),
            sequence: 0,
            last: None,
            outdated: None,
            meter_reply: vec![None; names.len()],
        });
        Self {
            nodes: nodes.collect(),
            is_crowded,
            is_cross_region,
            partition: Partition::default(),
            now_us: START_US + chance.below(SECOND),
            upto: 0,
            foreign: 0,
            recall_us: 0,
            store: StoreId { lineage: 1, boot: 1, parent: 0, up_us: chance.below(20) * SECOND },
            names,
            terms,
            chance,
        }
    }

    fn step(&mut self) -> Step {
        self.pass_time();
        if self.chance.one_in(60) {
            let [lineage, boot, parent] = [2, 4, 4].map(|most| self.chance.below(most));
            let up_us = self.store.up_us;
            self.store = StoreId { lineage, boot, parent, up_us };
        }
        let done = match self.chance.below(10) {
            0 if self.is_cross_region => self.some_round(),
            1..3 if self.is_cross_region => self.some_merge(),
            _ => self.call(),
        };
        Step { now_us: self.now_us, done }
    }

    fn call(&mut self) -> StepKind {
        let at = self.chance.below(self.nodes.len() as u64) as usize;
        let call = self.some_call(at);
        let meters = call.updates.iter().filter_map(|update| self.partition.meter(&update.key));
        let has_cross_region = meters.into_iter().any(|meter| meter.region_state_numbers().is_some());
        let is_wide = has_cross_region || wire::is_cross_region(&call) || self.chance.one_in(4);
        let expected = self.partition.apply(self.now_us, &call);
        self.take(at, &call, &expected);
        StepKind::Call { call, is_wide, expected }
    }

    fn some_round(&mut self) -> StepKind {
        let chance = &mut self.chance;
        let connected_for_us = match chance.below(5) {
            0 => 0,
            1 => chance.below(u64::MAX),
            2 => chance.below(SECOND),
            _ => chance.below(60 * SECOND),
        };
        let [trim, after] = [0, 1].map(|_| match chance.below(6) {
            0 => 0,
            1 => self.upto.saturating_sub(chance.below(SECOND)),
            2 => self.upto + chance.below(10 * SECOND),
            3 => chance.below(u64::MAX),
            _ => self.upto,
        });
        let trim = if chance.one_in(3) { trim } else { 0 };
        let most = *chance.of(&[0, 1, 2, 2, 3, 256, u16::MAX]);
        let clock_us = match chance.below(8) {
            0 => 0,
            1 => chance.below(u64::MAX),
            2 => self.now_us + chance.below(2 * SECOND),
            3 => self.now_us - chance.below(60 * SECOND),
            4 => self.now_us + AHEAD_US_MAX + chance.below(2),
            _ => self.now_us - chance.below(SECOND / 2),
        };
        let settled = chance.one_in(2);
        let round = RoundRequest { connected_for_us, settled, clock_us, trim, after, most };
        let gathered = self.partition.round(self.now_us, self.store, &round);
        self.upto = gathered.upto;
        StepKind::Round(round, self.store, gathered)
    }

    fn some_merge(&mut self) -> StepKind {
        let count = self.chance.below(self.names.len() as u64 + 1) as usize;
        let components = (0..count).map(|meter| self.some_component(meter)).collect();
        let from = RegionId(*self.chance.of(&[0, 7, u64::MAX]));
        let merge = MergeRequest { from, components };
        let merged = self.partition.merge(self.now_us, &merge).expect("makes sense");
        StepKind::Merge(merge, merged)
    }

    fn some_component(&mut self, meter: usize) -> Component {
        let terms = self.some_terms(meter);
        let chance = &mut self.chance;
        self.foreign += chance.amount(&terms) % (1 << 40);
        let mut sum = || match chance.below(8) {
            0 => chance.below(u64::MAX),
            1 => chance.below(10),
            2 => chance.amount(&terms),
            _ => self.foreign.saturating_sub(chance.below(5)),
        };
        let [first, second, third] = [sum(), sum(), sum()];
        let cell = self.now_us / terms.tick_us() / terms.period();
        let totals = match terms.algorithm() {
            Algorithm::Gcra => {
                ComponentTotals::Drained { charged: first, refunded: second / 16, level: third }
            }
            Algorithm::SlidingWindow => {
                let cell = match chance.below(12) {
                    0 => chance.below(u64::MAX),
                    1 => (cell + 1).saturating_sub(chance.below(5)),
                    2..6 => cell.saturating_sub(1),
                    6 => cell + 1,
                    _ => cell,
                };
                ComponentTotals::Cells { cell, current: first % 1_000, previous: second % 1_000 }
            }
        };
        let incarnation = *chance.of(&[1, 1, 1, 1, 2, 2, 3, 4, u64::MAX]);
        Component { key: self.names[meter].clone(), terms, incarnation, totals }
    }

    fn pass_time(&mut self) {
        if !self.is_crowded && self.chance.one_in(8) {
            self.now_us = self.some_edge();
            return;
        }
        if self.is_crowded {
            self.now_us += if self.chance.one_in(40) { 15 * SECOND } else { self.chance.below(1_000) };
            // By much, and then again by little before all grants have been shortened.
            self.now_us -= match self.chance.below(60) {
                0 => 50 * SECOND,
                1..4 => SECOND,
                _ => 0,
            };
            return;
        }
        let terms = self.some_terms(0);
        let period_us = terms.period() * terms.tick_us();
        let chance = &mut self.chance;
        let forward = match chance.below(12) {
            0..3 => 0,
            3 => chance.below(1_000),
            4 => chance.below(100_000),
            5..7 => chance.below(SECOND),
            7 => chance.below(20 * SECOND),
            8 => chance.below(period_us / terms.amount().max(1) + 2),
            9 => chance.below(period_us / 4 + 2),
            10 => chance.below(2 * period_us + 2) / 40 * chance.below(40),
            _ => chance.below(3 * 3_600 * SECOND) / 200 * chance.below(200),
        };
        let back = match chance.below(60) {
            0 => chance.below(3_600 * SECOND),
            1 => chance.below(SECOND),
            _ => 0,
        };
        // A clock that ran on for centuries is brought back, before its numbers are larger than any
        // that there will be.
        if self.now_us > 2 * START_US {
            self.now_us = START_US;
        }
        self.now_us = self.now_us + forward - back;
    }

    /// Returns a moment at which some state has just expired, or is about to.
    fn some_edge(&mut self) -> u64 {
        let ends = self.partition.meters().flat_map(|(_, meter)| meter.holders());
        let mut edges: Vec<u64> = ends.map(|(_, node_grant)| node_grant.until_us).collect();
        edges.sort_unstable();
        edges.extend([self.recall_us; 4]);
        let (connected_until_us, ..) = self.partition.connectivity_and_stamp();
        edges.extend([connected_until_us; 3]);
        if let Some((stamp, _)) = self.partition.dirty_meters().next().filter(|_| self.chance.one_in(3)) {
            edges.push(stamp + DIRTY_RETENTION_US);
        }
        edges.retain(|edge| *edge > self.now_us);
        edges.push(self.now_us + 1);
        *self.chance.of(&edges) - self.chance.below(2)
    }

    fn some_terms(&mut self, meter: usize) -> Terms {
        let of = &self.terms[meter];
        of[self.chance.below(of.len() as u64) as usize]
    }

    fn some_call(&mut self, at: usize) -> Call {
        let node = &self.nodes[at];
        match (self.chance.below(20), &node.last, &node.outdated) {
            (0, Some(call), _) | (1, _, Some(call)) => call.clone(),
            _ => self.new_call(at),
        }
    }

    fn new_call(&mut self, at: usize) -> Call {
        let skip = if self.chance.one_in(20) { self.chance.below(1 << 40) } else { 0 };
        let ahead = u64::from(self.chance.one_in(80));
        let node = &mut self.nodes[at];
        let acknowledged = node.sequence + ahead;
        node.sequence += 1 + skip;
        let (id, sequence) = (node.id, node.sequence);
        let count = self.names.len() as u64;
        let first = self.chance.below(count);
        let meters: Vec<usize> =
            (0..self.chance.below(count + 1)).map(|meter| ((first + meter) % count) as usize).collect();
        let updates: Vec<MeterUpdate> = meters.iter().map(|meter| self.some_update(at, *meter)).collect();
        let checks = if updates.is_empty() { 0 } else { self.chance.below(4) };
        let checks = (0..checks).map(|_| self.some_ask(&updates)).collect();
        let known_us = if self.chance.one_in(3) { 0 } else { self.chance.below(20 * SECOND) };
        Call { node: id, sequence, acknowledged, known_us, store: self.store, updates, checks }
    }

    fn some_update(&mut self, at: usize, meter: usize) -> MeterUpdate {
        let terms = self.some_terms(meter);
        let meter_reply = self.nodes[at].meter_reply[meter];
        let chance = &mut self.chance;
        let granted = meter_reply.map_or(0, |meter_reply| meter_reply.grant);
        let (used, keep) = match chance.below(12) {
            0 => (chance.amount(&terms), chance.amount(&terms)),
            1 => (granted, granted),
            2 => (0, 0),
            _ => {
                let used = chance.below(granted + 1);
                (used, chance.below(granted - used + 1))
            }
        };
        let owed = if chance.one_in(12) { chance.amount(&terms) } else { 0 };
        let refund = if chance.one_in(12) { chance.amount(&terms) } else { 0 };
        let refund_of_us = match chance.below(4) {
            0 => 0,
            1 => chance.below(u64::MAX),
            _ => self.now_us.saturating_sub(chance.below(SECOND)),
        };
        let want = match chance.below(4) {
            0 => 0,
            _ if self.is_crowded => chance.between(1, 3),
            _ => chance.amount(&terms),
        };
        let life_us = match chance.below(5) {
            0 => chance.below(u64::MAX),
            1 => 0,
            _ => chance.below(2 * SECOND),
        };
        let cell = meter_reply.map_or(0, |meter_reply| meter_reply.cell);
        let cell = match chance.below(10) {
            0 => cell.wrapping_sub(1),
            1 => cell + 1,
            2 => chance.below(u64::MAX),
            _ => cell,
        };
        let key = self.names[meter].clone();
        MeterUpdate { key, terms, used, owed, refund, refund_of_us, keep, want, life_us, cell }
    }

    fn some_ask(&mut self, updates: &[MeterUpdate]) -> CheckGroup {
        let chance = &mut self.chance;
        let meters = updates.len() as u64;
        let first = chance.below(meters);
        let places = (0..chance.below(meters + 1)).map(|place| (first + place) % meters);
        let charges = places.map(|place| {
            let cost = match chance.below(6) {
                0 => 0,
                1..4 => chance.between(1, 3),
                _ => chance.amount(&updates[place as usize].terms),
            };
            Charge { meter: place as u16, cost }
        });
        let charges = charges.collect();
        let count = match chance.below(6) {
            0 => 0,
            1 => u32::MAX,
            _ => chance.between(1, 20) as u32,
        };
        CheckGroup { charges, count }
    }

    /// Records a call and its reply in the state of the node.
    fn take(&mut self, at: usize, call: &Call, expected: &Result<CallReply, CallError>) {
        let node = &mut self.nodes[at];
        let is_new = call.sequence == node.sequence && node.last.as_ref() != Some(call);
        if is_new {
            node.outdated = node.last.replace(call.clone());
        }
        let Ok(reply) = expected else { return };
        if is_new && reply.checks.iter().any(|decided| decided.retry_us == RECALL_RETRY_US) {
            self.recall_us = self.now_us + RECALL_US;
        }
        for (update, meter_reply) in call.updates.iter().zip(&reply.meters) {
            let meter = self.names.iter().position(|name| *name == update.key).expect("known");
            node.meter_reply[meter] = Some(*meter_reply);
        }
    }
}

/// A limit of any kind, often an extreme one.
fn some_terms(chance: &mut Chance, is_cross_region: bool) -> Terms {
    loop {
        let amounts = [0, 1, 2, 7, 10, 100, 1_000, 100_000, 1_000_000, u64::from(u32::MAX)];
        let periods = [
            1,
            10,
            1_000,
            SECOND,
            SECOND,
            7 * SECOND,
            60 * SECOND,
            3_600 * SECOND,
            86_400 * SECOND,
            PERIOD_US_MAX,
        ];
        let amount = *chance.of(&amounts);
        let period = match chance.below(3) {
            0 => chance.between(1, PERIOD_US_MAX),
            1 => chance.between(1, 100 * SECOND),
            _ => *chance.of(&periods),
        };
        let period = Duration::from_micros(period);
        let limit = match chance.below(3) {
            0 => Limit::sliding_window(amount, period),
            1 => Limit::gcra(amount, period),
            _ => {
                let burst = *chance.of(&[1, 2, 5, 100, 1_000_000, u64::from(u32::MAX)]);
                Limit::gcra(amount, period).and_then(|limit| limit.with_burst(burst))
            }
        };
        let Ok(limit) = limit else { continue };
        let tolerance_ppm = *chance.of(&[0, 0, 1, 10_000, u32::MAX]);
        let lapse = *chance.of(&[Lapse::Counted, Lapse::Forgiven]);
        let terms = Terms::new(&limit, tolerance_ppm, lapse, *chance.of(&[1, 2, 2, 3, u32::MAX]));
        let is_cross_region = is_cross_region && !chance.one_in(5);
        return if is_cross_region {
            terms.with_cross_region(some_cross_region(chance, &terms))
        } else {
            terms
        };
    }
}

fn some_cross_region(chance: &mut Chance, terms: &Terms) -> CrossRegionTerms {
    let publish_threshold = *chance.of(&[1, 1, 3, 10, terms.capacity() / 16, u64::MAX]);
    let mut part = |whole: u64| match chance.below(5) {
        0 => 0,
        1 => whole,
        2 => whole / 2,
        _ => chance.below(whole + 1),
    };
    let (share_amount, share_capacity) = (part(terms.amount()), part(terms.capacity()));
    let debt_max = *chance.of(&[0, 1, 100, 2 * terms.capacity(), u64::MAX]);
    CrossRegionTerms { publish_threshold, share_amount, share_capacity, debt_max }
}

/// Seeded chance, by `SplitMix64`.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    fn between(&mut self, least: u64, most: u64) -> u64 {
        least + self.below(most - least + 1)
    }

    fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    fn of<'a, T>(&mut self, values: &'a [T]) -> &'a T {
        &values[self.below(values.len() as u64) as usize]
    }

    /// Returns units that a call might state for a limit: few, a part of its capacity, about all of
    /// it, or far too many.
    fn amount(&mut self, terms: &Terms) -> u64 {
        match self.below(16) {
            0..5 => self.below(4),
            5..11 => self.below(terms.capacity() / 2 + 2),
            11..14 => (terms.capacity() + self.below(3)).saturating_sub(1),
            14 => terms.burst() + self.below(2),
            _ => u64::MAX - self.below(1 << 63),
        }
    }
}
