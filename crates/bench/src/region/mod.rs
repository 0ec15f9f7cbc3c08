//! `region`: whether real servers around a real origin admit together as one bucket would.
//!
//! Every answer is kept with the times between which it was decided. They show for every key
//! whether any interval exceeded the limit (`over`), and the cost that one exact bucket lets pass
//! (`exact`).

pub(crate) mod bars;
mod case;
pub(crate) mod client;
pub(crate) mod exact;
mod exact_bars;
mod fleet;
mod half_load;
mod hedge;
pub(crate) mod load;
pub(crate) mod over;
mod pauses;
pub(crate) mod report;
mod row;
mod sequence;
mod stall;
mod surface;
pub(crate) mod tail;
mod warm;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use tidegate_testkit::Redis;

use self::bars::Bar;
use self::case::{Case, Class};
use self::client::Timeline;
use self::fleet::BenchFleet;
use self::half_load::HalfLoad;
use self::hedge::Hedge;
use self::row::{Row, Settings};
use self::sequence::{Sequence, SequenceRow};
use self::stall::{Plan, Stall};
use self::warm::{Length, Warm};
use crate::servers;

/// Servers of the cases.
const NODES: usize = 4;

/// Offered rate, relative to the rate that the machine answers when it does nothing else. Random
/// arrivals then find it ready. At a higher rate, servers shed.
const LOAD_OF_CAPACITY: f64 = 0.15;

/// Time of the measurement of the machine's capacity.
const CAPACITY_TIME: Duration = Duration::from_secs(3);

/// Seconds of a row by default, and with `--quick`.
const ROW_SECONDS: u64 = 20;
const QUICK_SECONDS: u64 = 3;

/// Cold keys, checked once each, and with `--quick`.
const COLD_KEYS: u64 = 20_000;
const QUICK_COLD_KEYS: u64 = 500;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// How long each row is measured.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: Option<u64>,
    /// Most requests per second, all keys together; derived from the machine's capacity if not set.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(100..=1_000_000))]
    rate: Option<u64>,
    /// A few rows of a few seconds.
    #[arg(long)]
    quick: bool,
    /// Leave the servers without a store, each counting for itself: the cases must then be missed.
    #[arg(long)]
    apart: bool,
    /// Wait of the servers of the cases for the origin, such as `1s` [default: the server's]. A
    /// machine whose cores stand still for longer makes servers decide without the origin.
    #[arg(long, value_name = "TIME")]
    origin_timeout: Option<String>,
    /// Run one part, and leave out the others.
    #[arg(long, value_name = "PART")]
    only: Option<Part>,
    /// Run this build of tidegate, instead of the one of this checkout.
    #[arg(long, value_name = "FILE")]
    tidegate: Option<PathBuf>,
    /// Print one JSON object instead of tables.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Admission of all servers together, case by case.
    Cases,
    /// The cost of an origin for keys in constant use.
    Warm,
    /// An origin that stalls for a while.
    Stall,
    /// A second attempt of calls that are answered late.
    Hedge,
    /// How exactly a fleet counts: request by request, and at half of the rate.
    Exact,
}

/// The findings of a run, as `--json` prints them.
#[derive(Default, Serialize)]
struct Findings {
    cases: Vec<Row>,
    warm: Option<Warm>,
    stall: Option<Stall>,
    hedge: Option<Hedge>,
    exact: Option<ExactFindings>,
    bars: Vec<Bar>,
    #[serde(skip)]
    keys: usize,
    #[serde(skip)]
    keys_without_end: Vec<String>,
}

/// How exactly fleets of several sizes count.
#[derive(Default, Serialize)]
struct ExactFindings {
    rows: Vec<SequenceRow>,
    sequences: Vec<Sequence>,
    half_load: Vec<HalfLoad>,
}

impl Findings {
    /// Counts the keys of the origin, and collects those without an expiry.
    fn look_at_store(&mut self, redis: &Redis) {
        let keys = redis.keys();
        let stay = keys.iter().filter(|(_, life)| *life < 0);
        self.keys_without_end.extend(stay.map(|(key, _)| key.escape_ascii().to_string()));
        self.keys += keys.len();
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let program = servers::tidegate(args.tidegate.as_deref())?;
    let mut found = Findings::default();
    let is_wanted = |part| args.only.is_none_or(|only| only == part);
    if is_wanted(Part::Cases) {
        run_cases(args, &program, &mut found)?;
    }
    if is_wanted(Part::Warm) {
        run_warm(args, &program, &mut found)?;
    }
    if is_wanted(Part::Stall) {
        run_stall(args, &program, &mut found)?;
    }
    if is_wanted(Part::Hedge) {
        run_hedge(args, &mut found)?;
    }
    if is_wanted(Part::Exact) {
        run_exact(args, &program, &mut found)?;
    }
    found.bars.push(bars::of_keys(&found.keys_without_end, found.keys));
    tell(args, &found)?;
    let missed = found.bars.iter().filter(|bar| !bar.held).count();
    ensure!(missed == 0, "{missed} of {} bars were missed", found.bars.len());
    Ok(())
}

fn run_cases(args: &Args, program: &Path, found: &mut Findings) -> Result<()> {
    let fleet = if args.apart {
        BenchFleet::start_apart(program, NODES)
    } else {
        BenchFleet::start_with_timeout(program, NODES, args.origin_timeout.as_deref())
    };
    let cases = if args.quick { Case::quick() } else { Case::all() };
    let seconds = args.seconds.unwrap_or(if args.quick { QUICK_SECONDS } else { ROW_SECONDS });
    let timeline = Timeline::new();
    let per_second_max = match args.rate {
        Some(rate) => rate as f64,
        None => capacity(&fleet, timeline)? * LOAD_OF_CAPACITY,
    };
    let settings = Settings { timeline, per_second_max, time: Duration::from_secs(seconds) };
    for (number, case) in (1..).zip(&cases) {
        eprintln!(
            "{number} of {}: {}, cost {}, {}x",
            cases.len(),
            case.rule.name(),
            case.costs.name(),
            case.offer.times()
        );
        let row = row::run(&fleet, *case, &settings, number).with_context(|| format!("{case:?}"))?;
        found.cases.push(row);
    }
    found.bars.extend(bars::of_cases(&found.cases, !args.quick));
    fleet.redis.iter().for_each(|redis| found.look_at_store(redis));
    Ok(())
}

fn run_warm(args: &Args, program: &Path, found: &mut Findings) -> Result<()> {
    let length = if args.quick { Length::QUICK } else { Length::WHOLE };
    let (warm, fleet) = warm::run(program, length)?;
    found.bars.extend(bars::of_warm(&warm));
    fleet.redis.iter().for_each(|redis| found.look_at_store(redis));
    found.warm = Some(warm);
    Ok(())
}

fn run_stall(args: &Args, program: &Path, found: &mut Findings) -> Result<()> {
    let mut plan = if args.quick { Plan::QUICK } else { Plan::WHOLE };
    plan.per_second = args.rate.map_or(plan.per_second, |rate| rate as f64);
    let (stall, fleet) = stall::run(program, &plan)?;
    found.bars.extend(bars::of_stall(&stall));
    fleet.redis.iter().for_each(|redis| found.look_at_store(redis));
    found.stall = Some(stall);
    Ok(())
}

fn run_hedge(args: &Args, found: &mut Findings) -> Result<()> {
    let keys = if args.quick { QUICK_COLD_KEYS } else { COLD_KEYS };
    let (hedge, redis) = hedge::run(keys)?;
    found.look_at_store(&redis);
    found.hedge = Some(hedge);
    Ok(())
}

fn run_exact(args: &Args, program: &Path, found: &mut Findings) -> Result<()> {
    let mut exact = ExactFindings::default();
    let plan = if args.quick { sequence::Plan::QUICK } else { sequence::Plan::WHOLE };
    for servers in plan.fleets {
        let fleet = BenchFleet::start_with_rules(program, *servers, &surface::rules_file(plan.limits));
        exact.sequences.extend(sequence::run(&fleet, plan)?);
        fleet.redis.iter().for_each(|redis| found.look_at_store(redis));
    }
    exact.rows = sequence::rows(&exact.sequences);
    let mut plan = if args.quick { half_load::Plan::QUICK } else { half_load::Plan::WHOLE };
    plan.seconds = args.seconds.unwrap_or(plan.seconds);
    for servers in plan.fleets {
        let fleet = BenchFleet::start_with_rules(program, *servers, &half_load::rules_file(&plan));
        exact.half_load.extend(half_load::run(&fleet, &plan)?);
        fleet.redis.iter().for_each(|redis| found.look_at_store(redis));
    }
    found.bars.extend(exact_bars::of_sequences(&exact.sequences));
    found.bars.extend(exact_bars::of_half_load(&exact.half_load));
    found.exact = Some(exact);
    Ok(())
}

fn capacity(fleet: &BenchFleet, timeline: Timeline) -> Result<f64> {
    let widest = Case::all().into_iter().map(|case| case.rule).filter(|rule| rule.class == Class::Comfort);
    let rule = widest.max_by_key(|rule| rule.amount).context("there are rules")?;
    let per_second = load::capacity(&fleet.addresses("http"), timeline, &rule.name(), CAPACITY_TIME)?;
    eprintln!("the machine answers {per_second:.0} requests/s");
    Ok(per_second)
}

fn tell(args: &Args, found: &Findings) -> Result<()> {
    if args.json {
        println!("{}", serde_json::to_string_pretty(found)?);
        return Ok(());
    }
    if !found.cases.is_empty() {
        report::print_rows(&found.cases);
    }
    found.warm.iter().for_each(report::print_warm);
    found.stall.iter().for_each(report::print_stall);
    found.hedge.iter().for_each(report::print_hedge);
    if let Some(exact) = &found.exact {
        report::print_sequences(&exact.rows);
        report::print_half_load(&exact.half_load);
    }
    report::print_bars(&found.bars);
    Ok(())
}
