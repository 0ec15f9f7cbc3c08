//! The script is the pure transition: random histories are applied to both, and every answer and every meter is compared.
//!
//! An ordinary run makes [`CALLS`] calls; `TIDEGATE_EQUALITY_CALLS` sets another number, `TIDEGATE_EQUALITY_SEED` another
//! seed.

#![allow(clippy::cast_possible_truncation, reason = "chance is drawn below ends that fit")]

use std::collections::HashMap;
use std::time::Duration;

use tidegate_core::origin::{
    Ask, Call, CallError, Charge, Lapse, NodeId, OriginMeter, Partition, RECALL_US, Reply, StoreId, Terms,
    Told, Update,
};
use tidegate_core::{Limit, PERIOD_US_MAX};
use tidegate_testkit::Redis;

use super::script::{SOURCE, Script};
use super::wire::{self, Answered, Numbers, Words};

/// How many calls an ordinary run makes.
const CALLS: usize = 100_000;
/// How many are made of a script that is known to differ.
const MUTANT_CALLS: usize = 40_000;
const CALLS_PER_HISTORY: usize = 400;
const PARTITION: u16 = 77;
/// November 2026, µs.
const START_US: u64 = 1_794_000_000_000_000;
const SECOND: u64 = 1_000_000;
/// Numbers that the script keeps of a meter.
const METER_NUMBERS: usize = 16;
/// What who is denied for what others hold is told to wait.
const RECALL_RETRY_US: u64 = 200_000;

#[test]
fn the_script_is_the_pure_transition() {
    let calls = from_environment("TIDEGATE_EQUALITY_CALLS").map_or(CALLS, |calls| calls as usize);
    let seed = from_environment("TIDEGATE_EQUALITY_SEED").unwrap_or(1);
    let server = Redis::start(&[]);
    let difference =
        first_difference(&mut server.connection(), &source_with_given_time_and_place(), calls, seed);
    assert_eq!(difference, None);
}

/// What the comparison is worth: every one of these scripts is wrong in one place, and none goes unnoticed.
#[test]
fn a_script_that_differs_is_noticed() {
    let server = Redis::start(&[]);
    let mut connection = server.connection();
    let source = source_with_given_time_and_place();
    let unnoticed = MUTANTS.iter().filter(|(from, to)| {
        assert!(source.contains(from), "{from}");
        let mutant = source.replacen(from, to, 1);
        first_difference(&mut connection, &mutant, MUTANT_CALLS, 1).is_none()
    });
    assert_eq!(unnoticed.collect::<Vec<_>>(), Vec::<&(&str, &str)>::new());
}

const MUTANTS: [(&str, &str); 50] = [
    ("DEBT_MAX = 1125899906842624", "DEBT_MAX = 1125899906842623"),
    ("TOTAL_MAX = 4503599627370496", "TOTAL_MAX = 4503599627370495"),
    ("NEVER_US = 4503599627370496", "NEVER_US = 4503599627370495"),
    ("DEBT_US_MAX = 562949953421312", "DEBT_US_MAX = 62949953421312"),
    ("LAPSES_PER_CALL = 8", "LAPSES_PER_CALL = 9"),
    ("LAPSE_MARGIN_US = 300000", "LAPSE_MARGIN_US = 300001"),
    ("LIFE_US_MAX = 10000000", "LIFE_US_MAX = 10000001"),
    ("RECALL_US = 300000", "RECALL_US = 400000"),
    ("RECALL_RETRY_US = 200000", "RECALL_RETRY_US = 200001"),
    ("NUMBER = '%.0f'", "NUMBER = '%.14g'"),
    ("min(meter.first_us, own.until_us)", "meter.first_us"),
    ("min(meter.first_us, latest_us)", "meter.first_us"),
    ("or at > 2 * LAPSES_PER_CALL then", "then"),
    ("floor((a + b - 1) / b)", "floor(a / b)"),
    ("rest = less(holding.amount, meter[own])", "rest = 0"),
    ("meter[other] = less(meter[other], rest)", ""),
    (
        "elseif cell + 1 == meter.cell then\n    meter.previous = min",
        "elseif false then\n    meter.previous = min",
    ),
    ("meter.previous = less(meter.previous, units)", ""),
    ("less(amount, drained)", "amount"),
    ("if not (lost and meter.counted) then refund(meter, update) end", "refund(meter, update)"),
    ("store.loss ~= told", "false"),
    ("meter.own.cell ~= grant_cell(meter) then return told_over", "false then return told_over"),
    ("units = div_up(meter.level, meter.period)", "units = div_up(meter.level, meter.period) + 1"),
    ("meter.at = div(meter.at * tick, meter.tick)", ""),
    ("or period * tick ~= meter.period * meter.tick", ""),
    ("terms == meter.terms or ", "terms == meter.terms and "),
    ("elseif cell > meter.cell then", "elseif true then"),
    ("(known and not changed)", "false"),
    ("less(meter.full, drained)", "meter.full"),
    (
        "elseif cell + 1 == meter.cell then\n    meter.previous = max",
        "elseif false then\n    meter.previous = max",
    ),
    ("now < loss + 2 * LIFE_US_MAX", "now < loss + LIFE_US_MAX"),
    ("holding.until_us <= now", "holding.until_us < now"),
    ("holding.cell == grant_cell(meter) and 'held' or 'held_before'", "'held'"),
    ("wanted.until_us <= now", "wanted.until_us < now"),
    ("wanted.until_us > now + RECALL_US", "false"),
    ("HELD_US_MAX = 10925000", "HELD_US_MAX = 10925001"),
    ("#ahead < LAPSES_PER_CALL", "true"),
    ("then meter.latest_us = latest_us end", "then meter.latest_us = 0 end"),
    ("min(meter.previous + meter.held_before, meter.units_max)", "meter.previous + meter.held_before"),
    ("cost > meter.burst or", ""),
    ("max(fading(meter), 1)", "fading(meter) + 1"),
    ("if stands > meter.full then return meter.period - elapsed(meter) end", ""),
    ("if wanted_by_others(meter) or not is_large", "if not is_large"),
    ("or not helps", ""),
    ("min(units, 1)", "0"),
    ("div(life, 16)", "div_up(life, 16)"),
    ("acknowledged > answered or", ""),
    // The first cost for all meters: in what passes, in what is charged, and in how long it is denied.
    (
        "passes(meters[place + 1], cost, count)",
        "passes(meters[place + 1], select(2, read(CHARGE, numbers, first_byte)), count)",
    ),
    ("admit(meter, passed * cost)", "admit(meter, passed * select(2, read(CHARGE, numbers, first_byte)))"),
    ("denial_us(meter, cost)", "denial_us(meter, select(2, read(CHARGE, numbers, first_byte)))"),
];

/// Applies random histories to both, and says where they first differ.
fn first_difference(
    connection: &mut redis::Connection,
    source: &str,
    calls: usize,
    seed: u64,
) -> Option<String> {
    let script = Script::new(source);
    let hash: String = redis::cmd("SCRIPT").arg("LOAD").arg(&script.text).query(connection).expect("loads");
    assert_eq!(hash, script.hash);
    (0..calls.div_ceil(CALLS_PER_HISTORY) as u64).find_map(|history| {
        let mut world = World::new(Chance(seed << 32 | history));
        let steps: Vec<Step> = (0..CALLS_PER_HISTORY).map(|_| world.step()).collect();
        let compared =
            compare_answers(connection, &hash, &steps).and_then(|()| compare_meters(connection, &world));
        compared.err().map(|difference| format!("history {history} of seed {seed}: {difference}"))
    })
}

/// An error that shows both where they differ.
fn same<T: PartialEq + std::fmt::Debug + ?Sized>(
    got: &T,
    expected: &T,
    what: impl Fn() -> String,
) -> Result<(), String> {
    if got == expected { Ok(()) } else { Err(format!("{}: {got:?} instead of {expected:?}", what())) }
}

fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

/// The script with its clock, its place and nothing else replaced by what the last argument says.
fn source_with_given_time_and_place() -> String {
    let mut source = SOURCE.to_owned();
    let replacements = [
        ("= redis.call('TIME')", "= { 0, match(ARGV[#ARGV], '^(%d+)') }"),
        ("parent = who_answers()", "parent = match(ARGV[#ARGV], '^%d+ (%d+) (%d+) (%d+)$')"),
        ("IDENTITY_US = 500000", "IDENTITY_US = 0"),
    ];
    for (from, to) in replacements {
        assert_eq!(source.matches(from).count(), 1, "{from}");
        source = source.replace(from, to);
    }
    source
}

struct Step {
    now_us: u64,
    call: Call,
    expected: Result<Reply, CallError>,
}

fn compare_answers(connection: &mut redis::Connection, hash: &str, steps: &[Step]) -> Result<(), String> {
    let mut pipe = redis::pipe();
    pipe.cmd("FLUSHALL").ignore();
    for step in steps {
        let words = Words::of(PARTITION, &step.call, true);
        let command = pipe.cmd("EVALSHA").arg(hash).arg(words.keys.len()).arg(words.keys);
        let store = step.call.store;
        let place = format!("{} {} {} {}", step.now_us, store.lineage, store.boot, store.parent);
        let [node, numbers] = words.arguments;
        command.arg(node).arg(numbers).arg(place);
    }
    let answers: Vec<Vec<u8>> = pipe.query(connection).map_err(|error| error.to_string())?;
    for (number, (step, answer)) in steps.iter().zip(&answers).enumerate() {
        let expected = match &step.expected {
            Ok(reply) => Answered::Reply(reply.clone()),
            Err(error) => Answered::Refused(*error),
        };
        let what = || format!("call {number} at {}: {:?}: {answer:?}", step.now_us, step.call);
        same(&wire::read(&step.call, answer), &Some(expected), what)?;
    }
    Ok(())
}

fn compare_meters(connection: &mut redis::Connection, world: &World) -> Result<(), String> {
    let mut keys = 1 + world.nodes.iter().filter(|node| node.last.is_some()).count();
    for (name, meter) in world.partition.meters() {
        compare_meter(connection, name, meter).map_err(|difference| format!("{name:?}: {difference}"))?;
        keys += 1 + usize::from(meter.holders().count() > 0);
    }
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
    let mut expected =
        HashMap::from([(b"t".to_vec(), wire::numbers_bytes(wire::terms_numbers(meter.terms())))]);
    let ends: Vec<(String, u64)> = redis::cmd("ZRANGE")
        .arg(wire::meter_key(PARTITION, 'e', name))
        .arg(&["0", "-1", "WITHSCORES"])
        .query(connection)
        .expect("ends");
    let mut expected_ends = Vec::new();
    for (node, holding) in meter.holders() {
        let node = wire::node_name(node);
        expected_ends.push((node.clone(), holding.until_us));
        expected
            .insert(node.into_bytes(), wire::numbers_bytes([holding.amount, holding.until_us, holding.cell]));
    }
    expected_ends.sort_by_key(|(node, until_us)| (*until_us, node.clone()));
    let first_us = expected_ends.first().map_or(u64::MAX, |(_, until_us)| *until_us);
    let kept = numbers(&found[&b"m"[..]]);
    let (ends_us, expires_us) = (kept[11], meter.expires_us());
    same(&(ends_us >= expires_us), &true, || format!("kept until {ends_us} of {expires_us}"))?;
    same(&(kept[13] <= first_us), &true, || format!("looked at again at {} for {first_us}", kept[13]))?;
    let holders = expected_ends.len() as u64;
    let counted: Vec<u64> = meter.numbers().into_iter().chain([holders]).collect();
    same(&kept[..11], &counted[..], || "numbers".to_owned())?;
    expected.insert(b"m".to_vec(), found[&b"m"[..]].clone());
    same(&found, &expected, || "fields".to_owned())?;
    same(&ends, &expected_ends, || "ends".to_owned())
}

fn query<T: redis::FromRedisValue>(connection: &mut redis::Connection, command: &str, key: &[u8]) -> T {
    redis::cmd(command).arg(key).query(connection).expect("an answer")
}

/// The numbers of a meter, which end with a name.
fn numbers(kept: &[u8]) -> Vec<u64> {
    let mut numbers = Numbers::of(&kept[..METER_NUMBERS * 8]).expect("whole numbers of eight bytes");
    (0..METER_NUMBERS).map(|_| numbers.whole().expect("a whole number")).collect()
}

/// What happens to one partition.
struct World {
    chance: Chance,
    /// Whether many nodes hold parts of one meter, and are all not heard of for a while now and then.
    is_crowded: bool,
    partition: Partition,
    now_us: u64,
    /// When the last recall ends.
    recall_us: u64,
    store: StoreId,
    names: Vec<Box<[u8]>>,
    /// What a limit was and will be, for each meter.
    terms: Vec<Vec<Terms>>,
    nodes: Vec<Node>,
}

/// What a node knows.
struct Node {
    id: NodeId,
    sequence: u64,
    last: Option<Call>,
    outdated: Option<Call>,
    told: Vec<Option<Told>>,
}

impl World {
    fn new(mut chance: Chance) -> Self {
        let is_crowded = chance.one_in(5);
        let names = [&b"key"[..], b"", b"a b\0\r\n{7}", &[255; 300]];
        let most = if is_crowded { 1 } else { 4 };
        let names: Vec<Box<[u8]>> =
            names[..chance.between(1, most) as usize].iter().map(|name| Box::from(*name)).collect();
        let terms = names
            .iter()
            .map(|_| (0..chance.between(1, 3)).map(|_| some_terms(&mut chance)).collect())
            .collect();
        let ids: Vec<u64> = [0, u64::MAX, 1 << 63, 10].into_iter().chain(100..120).collect();
        let nodes = chance.between(1, 5) as usize;
        let nodes = ids[..if is_crowded { ids.len() } else { nodes }].iter().map(|id| Node {
            id: NodeId(*id),
            sequence: 0,
            last: None,
            outdated: None,
            told: vec![None; names.len()],
        });
        Self {
            nodes: nodes.collect(),
            is_crowded,
            partition: Partition::default(),
            now_us: START_US + chance.below(SECOND),
            recall_us: 0,
            store: StoreId { lineage: 1, boot: 1, parent: 0 },
            names,
            terms,
            chance,
        }
    }

    fn step(&mut self) -> Step {
        self.pass_time();
        if self.chance.one_in(60) {
            let [lineage, boot, parent] = [2, 4, 4].map(|most| self.chance.below(most));
            self.store = StoreId { lineage, boot, parent };
        }
        let at = self.chance.below(self.nodes.len() as u64) as usize;
        let call = self.some_call(at);
        let expected = self.partition.apply(self.now_us, &call);
        self.take(at, &call, &expected);
        Step { now_us: self.now_us, call, expected }
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
        // A clock that ran on for centuries is brought back, before its numbers are larger than any that there will be.
        if self.now_us > 2 * START_US {
            self.now_us = START_US;
        }
        self.now_us = self.now_us + forward - back;
    }

    /// A moment at which something is just over, or just not.
    fn some_edge(&mut self) -> u64 {
        let ends = self.partition.meters().flat_map(|(_, meter)| meter.holders());
        let mut edges: Vec<u64> = ends.map(|(_, holding)| holding.until_us).collect();
        edges.sort_unstable();
        edges.extend([self.recall_us; 4]);
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
        let updates: Vec<Update> = meters.iter().map(|meter| self.some_update(at, *meter)).collect();
        let asks = if updates.is_empty() { 0 } else { self.chance.below(4) };
        let asks = (0..asks).map(|_| self.some_ask(&updates)).collect();
        Call { node: id, sequence, acknowledged, store: self.store, updates, asks }
    }

    fn some_update(&mut self, at: usize, meter: usize) -> Update {
        let terms = self.some_terms(meter);
        let told = self.nodes[at].told[meter];
        let chance = &mut self.chance;
        let granted = told.map_or(0, |told| told.grant);
        let (used, keep) = match chance.below(12) {
            0 => (chance.amount(&terms), chance.amount(&terms)),
            1 => (granted, granted),
            2 => (0, 0),
            _ => {
                let used = chance.below(granted + 1);
                (used, chance.below(granted - used + 1))
            }
        };
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
        let cell = told.map_or(0, |told| told.cell);
        let cell = match chance.below(10) {
            0 => cell.wrapping_sub(1),
            1 => cell + 1,
            2 => chance.below(u64::MAX),
            _ => cell,
        };
        let key = self.names[meter].clone();
        Update { key, terms, used, refund, refund_of_us, keep, want, life_us, cell }
    }

    fn some_ask(&mut self, updates: &[Update]) -> Ask {
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
        Ask { charges, count }
    }

    /// What a node remembers of an answer.
    fn take(&mut self, at: usize, call: &Call, expected: &Result<Reply, CallError>) {
        let node = &mut self.nodes[at];
        let is_new = call.sequence == node.sequence && node.last.as_ref() != Some(call);
        if is_new {
            node.outdated = node.last.replace(call.clone());
        }
        let Ok(reply) = expected else { return };
        if is_new && reply.asks.iter().any(|decided| decided.retry_us == RECALL_RETRY_US) {
            self.recall_us = self.now_us + RECALL_US;
        }
        for (update, told) in call.updates.iter().zip(&reply.told) {
            let meter = self.names.iter().position(|name| *name == update.key).expect("known");
            node.told[meter] = Some(*told);
        }
    }
}

/// A limit of any kind, often an extreme one.
fn some_terms(chance: &mut Chance) -> Terms {
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
        let tolerance_ppm = *chance.of(&[0, 0, 50_000, 1_000_000, u32::MAX]);
        let lapse = *chance.of(&[Lapse::Counted, Lapse::Forgiven]);
        return Terms::new(&limit, tolerance_ppm, lapse, *chance.of(&[1, 2, 2, 3, u32::MAX]));
    }
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

    /// Units, as they might be said of a limit: few, a part of what it allows, just about all, or far too many.
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
