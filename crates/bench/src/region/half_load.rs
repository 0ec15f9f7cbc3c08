//! One key at half of its rate: every request should pass, at every server of the fleet.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use rand_distr::{Distribution as _, Exp};
use serde::Serialize;

use super::case::rules_toml;
use super::client::{SourceKind, Timeline};
use super::fleet::{BenchFleet, Counts};
use super::load::{Clients, DueRequest, Key, SentRequest};

/// The requests that are offered, as a share of the rate.
const LOAD: f64 = 0.5;

/// The requests that are offered per second, at most.
const PER_SECOND_MAX: f64 = 2_000.0;

/// Requests of this time come first, and are not counted.
const WARM_UP_TIME: Duration = Duration::from_secs(1);

/// The part of all requests that the busiest server has in a skewed row.
const BUSIEST_PART: f64 = 0.5;

/// Fleets and rules of a run, and the time of each row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) fleets: &'static [usize],
    pub(super) rules: &'static [HalfLoadRule],
    pub(super) seconds: u64,
}

impl Plan {
    pub(super) const WHOLE: Self = Self { fleets: &[4, 12], rules: &RULES, seconds: 8 };
    pub(super) const QUICK: Self = Self { fleets: &[4], rules: &QUICK_RULES, seconds: 2 };
}

const SECOND: u32 = 1;
const MINUTE: u32 = 60;

const RULES: [HalfLoadRule; 6] = [
    HalfLoadRule::new(1_000, SECOND, 200),
    HalfLoadRule::new(1_000, SECOND, 100),
    HalfLoadRule::new(400, SECOND, 40),
    HalfLoadRule::new(100, SECOND, 100),
    HalfLoadRule::new(100, SECOND, 10),
    HalfLoadRule::new(100_000, MINUTE, 100_000),
];

const QUICK_RULES: [HalfLoadRule; 2] = [RULES[0], RULES[4]];

/// A limit with a burst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct HalfLoadRule {
    pub(super) limit: u32,
    pub(super) period_s: u32,
    pub(super) burst: u32,
}

impl HalfLoadRule {
    const fn new(limit: u32, period_s: u32, burst: u32) -> Self {
        Self { limit, period_s, burst }
    }

    pub(super) fn name(self) -> String {
        format!("{}_in_{}s_burst_{}", self.limit, self.period_s, self.burst)
    }

    fn offered_per_second(self) -> f64 {
        (f64::from(self.limit) / f64::from(self.period_s) * LOAD).min(PER_SECOND_MAX)
    }
}

/// How the requests are spread over the servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Spread {
    Even,
    /// The first server has half of the requests.
    Skewed,
}

impl Spread {
    const ALL: [Self; 2] = [Self::Even, Self::Skewed];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Even => "even",
            Self::Skewed => "skewed",
        }
    }

    /// The server of the next request.
    fn draw(self, servers: usize, chance: &mut SmallRng) -> usize {
        match self {
            Self::Skewed if chance.random_bool(BUSIEST_PART) => 0,
            Self::Skewed => chance.random_range(1..servers),
            Self::Even => chance.random_range(0..servers),
        }
    }
}

/// One row of the table.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct HalfLoad {
    pub(super) servers: usize,
    #[serde(flatten)]
    pub(super) rule: HalfLoadRule,
    pub(super) spread: Spread,
    pub(super) offered_per_second: f64,
    pub(super) requests: u64,
    /// Answers without the region's origin. The shares leave them out.
    pub(super) elsewhere: u64,
    /// Requests that passed, as a share of those that the region decided.
    pub(super) passed: f64,
    /// The same at the server with the most requests.
    pub(super) passed_at_busiest: f64,
    /// Decisions that waited for the origin, for each request.
    pub(super) waited: f64,
    pub(super) calls_per_request: f64,
    pub(super) origin_cpu_us_per_request: f64,
}

/// The rules of a plan, as servers read them.
pub(super) fn rules_file(plan: &Plan) -> String {
    let fields = |rule: &HalfLoadRule| {
        let HalfLoadRule { limit, period_s, burst } = rule;
        format!("class = 'comfort'\nlimit = {limit}\nperiod = '{period_s}s'\nburst = {burst}")
    };
    rules_toml(plan.rules.iter().map(|rule| (rule.name(), fields(rule))))
}

/// Runs all rows of a fleet.
pub(super) fn run(fleet: &BenchFleet, plan: &Plan) -> Result<Vec<HalfLoad>> {
    let mut rows = Vec::new();
    for rule in plan.rules {
        for spread in Spread::ALL {
            let servers = fleet.servers().len();
            eprintln!("half load: fleet of {servers}, {}, {}", rule.name(), spread.name());
            let time = Duration::from_secs(plan.seconds);
            let seed = rows.len() as u64;
            let row = run_row(fleet, *rule, spread, time, seed).with_context(|| rule.name())?;
            rows.push(row);
        }
    }
    Ok(rows)
}

fn run_row(
    fleet: &BenchFleet,
    rule: HalfLoadRule,
    spread: Spread,
    time: Duration,
    seed: u64,
) -> Result<HalfLoad> {
    let (servers, name) = (fleet.addresses("http"), rule.name());
    let keys = [Key::fresh(format!("half-load-{}", spread.name()))];
    let clients = Clients { servers: &servers, timeline: Timeline::new(), rule: &name, keys: &keys };
    let mut chance = SmallRng::seed_from_u64(seed);
    let mut requests = |time| draw(rule, spread, servers.len(), time, &mut chance);
    clients.run(requests(WARM_UP_TIME)?)?;
    let before = fleet.counts()?;
    let made = clients.run(requests(time)?)?;
    let counts = fleet.counts()?.since(before);
    let odd = made.iter().flatten().find(|one| !one.answer.is_in_order());
    ensure!(odd.is_none(), "an answer is {odd:?}");
    Ok(describe(rule, spread, &made, counts))
}

/// The requests of each server. Together they arrive as a Poisson process.
fn draw(
    rule: HalfLoadRule,
    spread: Spread,
    servers: usize,
    time: Duration,
    chance: &mut SmallRng,
) -> Result<Vec<Vec<DueRequest>>> {
    let gaps = Exp::new(rule.offered_per_second())?;
    let mut nodes = vec![Vec::new(); servers];
    let mut after = gaps.sample(chance);
    while after < time.as_secs_f64() {
        let due = DueRequest { after: Duration::from_secs_f64(after), key: 0, cost: 1 };
        nodes[spread.draw(servers, chance)].push(due);
        after += gaps.sample(chance);
    }
    Ok(nodes)
}

fn describe(rule: HalfLoadRule, spread: Spread, made: &[Vec<SentRequest>], counts: Counts) -> HalfLoad {
    let requests = made.iter().map(Vec::len).sum::<usize>() as u64;
    let elsewhere =
        made.iter().flatten().filter(|one| one.answer.source_kind != SourceKind::Region).count() as u64;
    let busiest = made.iter().max_by_key(|node| node.len());
    let each = |amount: f64| amount / requests as f64;
    HalfLoad {
        servers: made.len(),
        rule,
        spread,
        offered_per_second: rule.offered_per_second(),
        requests,
        elsewhere,
        passed: passed(made.iter().flatten()),
        passed_at_busiest: passed(busiest.into_iter().flatten()),
        waited: each(counts.waited as f64),
        calls_per_request: each(counts.calls as f64),
        origin_cpu_us_per_request: each(counts.origin_cpu.as_secs_f64() * 1e6),
    }
}

/// Returns the share that passed, of requests that the region decided; NaN if there are none.
fn passed<'a>(made: impl Iterator<Item = &'a SentRequest>) -> f64 {
    let decided: Vec<&SentRequest> =
        made.filter(|one| one.answer.source_kind == SourceKind::Region).collect();
    let passed = decided.iter().filter(|one| one.answer.allowed).count();
    passed as f64 / decided.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::client::Answer;

    fn drawn(spread: Spread) -> Vec<Vec<DueRequest>> {
        let mut chance = SmallRng::seed_from_u64(7);
        draw(RULES[0], spread, 4, Duration::from_secs(20), &mut chance).unwrap()
    }

    #[test]
    fn half_of_the_rate_is_offered_and_never_more_than_the_machine_takes() {
        let offered = RULES.map(HalfLoadRule::offered_per_second);
        let expected = [500.0, 500.0, 200.0, 50.0, 50.0, 100_000.0 / 120.0];
        assert!(offered.iter().zip(expected).all(|(one, other)| (one - other).abs() < 1e-9), "{offered:?}");
        let fast = HalfLoadRule::new(1_000_000, SECOND, 100);
        assert!((fast.offered_per_second() - PER_SECOND_MAX).abs() < 1e-9);
    }

    #[test]
    fn each_rule_is_in_the_file_with_its_burst_and_without_a_tolerance() {
        let text = rules_file(&Plan::WHOLE);
        assert_eq!(text.matches("[[rules]]").count(), RULES.len());
        assert!(text.contains("limit = 100\nperiod = '1s'\nburst = 10\n") && !text.contains("tolerance"));
    }

    #[test]
    fn even_requests_are_spread_alike_and_skewed_ones_go_to_the_first_server_by_half() {
        for (spread, first) in [(Spread::Even, 0.25), (Spread::Skewed, 0.5)] {
            let nodes = drawn(spread);
            let total: usize = nodes.iter().map(Vec::len).sum();
            assert!((9_500..10_500).contains(&total), "{total}");
            let share = nodes[0].len() as f64 / total as f64;
            assert!((share - first).abs() < 0.02, "{spread:?}: {share}");
            assert!(nodes.iter().all(|node| node.is_sorted_by_key(|due| due.after) && !node.is_empty()));
        }
    }

    #[test]
    fn answers_of_another_source_are_counted_and_not_judged() {
        let made = |allowed, source_kind| SentRequest {
            key: 0,
            cost: 1,
            answer: Answer { allowed, source_kind, status: 200, sent_us: 1, answered_us: 2 },
        };
        let busy = vec![
            made(true, SourceKind::Region),
            made(false, SourceKind::Region),
            made(false, SourceKind::Alone),
            made(true, SourceKind::Nothing),
        ];
        let counts =
            Counts { waited: 1, calls: 3, origin_cpu: Duration::from_micros(60), ..Counts::default() };
        let row =
            describe(RULES[0], Spread::Skewed, &[busy, vec![made(true, SourceKind::Region); 2]], counts);
        assert_eq!((row.servers, row.requests, row.elsewhere), (2, 6, 2));
        assert!((row.passed - 0.75).abs() < 1e-9 && (row.passed_at_busiest - 0.5).abs() < 1e-9);
        assert!((row.calls_per_request - 0.5).abs() < 1e-9 && (row.waited - 1.0 / 6.0).abs() < 1e-9);
        assert!((row.origin_cpu_us_per_request - 10.0).abs() < 1e-9);
    }

    #[test]
    fn a_row_that_the_region_decided_nothing_of_has_no_share() {
        assert!(passed(std::iter::empty()).is_nan());
    }
}
