//! `regions`: three regions of real servers, each with its own origin, and 80 ms between them in
//! each direction.
//!
//! The servers count their replication traffic themselves (`wan`). The admission of a `strict` rule
//! is judged by the answers that clients get, as in `region` (`strict`).

mod bars;
mod fixture;
mod report;
mod strict;
mod strict_load;
mod wan;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, ensure};
use serde::Serialize;

use self::strict::Strict;
use self::wan::Wan;
use crate::region::bars::Bar;
use crate::region::report::print_bars;
use crate::servers;

/// Seconds of each row of `wan`, and with `--quick`. Higher: fewer requests per second.
const ROW_SECONDS: u64 = 120;
const QUICK_SECONDS: u64 = 2;

/// Active keys of `wan`, and of `--quick`.
const KEYS: u32 = 100_000;
const QUICK_KEYS: u32 = 400;

/// Requests of `strict`, and of `--quick`.
const REQUESTS: u64 = 1_000_000;
const QUICK_REQUESTS: u64 = 4_000;

/// Keys of `strict`, so many that requests come at three to four times their limit; and with
/// `--quick`.
const STRICT_KEYS: u32 = 1_000;
const QUICK_STRICT_KEYS: u32 = 100;

/// Connections of `strict` to each region, and of `--quick`. More: more requests in a second, since
/// most wait for a region far away; more of them are too late where the machine is busy.
const CONNECTIONS: usize = 192;
const QUICK_CONNECTIONS: usize = 16;

/// Seconds for which the flapping link is up and down, and with `--quick`.
const UP_SECONDS: u64 = 10;
const DOWN_SECONDS: u64 = 2;
const QUICK_UP_SECONDS: u64 = 1;
const QUICK_DOWN_SECONDS: u64 = 1;

#[derive(clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// Few keys and requests, within seconds.
    #[arg(long)]
    quick: bool,
    /// Run one part, and leave out the other.
    #[arg(long, value_name = "PART")]
    only: Option<Part>,
    /// Run this build of tidegate, instead of the one of this checkout.
    #[arg(long, value_name = "FILE")]
    tidegate: Option<PathBuf>,
    /// Print one JSON object instead of tables.
    #[arg(long)]
    json: bool,
}

const HELP: &str = "\
wan: once a key is above the publish threshold, its region publishes a component in each replication round
(200 ms) in which the key changed. So bytes depend on keys and rounds, not on requests. Rows:
  once             one request for every key, above the threshold
  four at once     four requests in direct succession for every key
  half, quarter    a half, a quarter of the keys
  below            one request for every key, below the threshold
  always, always fourfold
                   a thousandth of the keys, one or four requests ten times a second each
Bars:
  - The bytes per component are equal in all rows, within 10 %.
  - Half and a quarter of the keys take half and a quarter of the bytes, within 10 %.
  - Below the threshold no component is published, and heartbeats take at most 2 % of the bytes of `once`.
  - Four requests at once take at most twice the bytes of one: the first component is sent at once, the others
    together one round later.
  - Four times the requests for keys that are published in every round take at most 1.2 times the bytes.
With --quick most bytes are heartbeats, so only the bar of no component below the threshold applies.

strict: all regions send requests for keys of a strict security rule, at three to four times their limit,
while the link of one pair of regions flaps. Each link has a delay of 80 ms in each direction. Bars:
  - No interval of a key admits more than one bucket.
  - At least 95 % of the units of one bucket are admitted, for requests with a reachable owner.
  - With an unreachable owner, 99 % of the refusals come within the timeout of 250 ms and 50 ms.
  - No decision of a remote region comes before 160 ms.";

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Replication traffic.
    Wan,
    /// Admission of a strict rule while a link flaps.
    Strict,
}

/// The findings of a run, as `--json` prints them.
#[derive(Default, Serialize)]
struct Findings {
    wan: Option<Wan>,
    strict: Option<Strict>,
    bars: Vec<Bar>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let program = servers::tidegate(args.tidegate.as_deref())?;
    let mut found = Findings::default();
    let is_wanted = |part| args.only.is_none_or(|only| only == part);
    if is_wanted(Part::Wan) {
        let wan = args.wan(&program)?;
        found.bars.extend(bars::of_wan(&wan, !args.quick));
        found.wan = Some(wan);
    }
    if is_wanted(Part::Strict) {
        let strict = args.strict(&program)?;
        found.bars.extend(bars::of_strict(&strict));
        found.strict = Some(strict);
    }
    tell(args, &found)?;
    let missed = found.bars.iter().filter(|bar| !bar.held).count();
    ensure!(missed == 0, "{missed} of {} bars were missed", found.bars.len());
    Ok(())
}

impl Args {
    fn or_quick<T>(&self, usual: T, quick: T) -> T {
        if self.quick { quick } else { usual }
    }

    fn wan(&self, program: &Path) -> Result<Wan> {
        let seconds = self.or_quick(ROW_SECONDS, QUICK_SECONDS);
        wan::run(program, self.or_quick(KEYS, QUICK_KEYS), Duration::from_secs(seconds))
    }

    fn strict(&self, program: &Path) -> Result<Strict> {
        let plan = strict::Plan {
            requests: self.or_quick(REQUESTS, QUICK_REQUESTS),
            keys: self.or_quick(STRICT_KEYS, QUICK_STRICT_KEYS),
            connections: self.or_quick(CONNECTIONS, QUICK_CONNECTIONS),
            up: Duration::from_secs(self.or_quick(UP_SECONDS, QUICK_UP_SECONDS)),
            down: Duration::from_secs(self.or_quick(DOWN_SECONDS, QUICK_DOWN_SECONDS)),
        };
        strict::run(program, &plan)
    }
}

fn tell(args: &Args, found: &Findings) -> Result<()> {
    if args.json {
        println!("{}", serde_json::to_string_pretty(found)?);
        return Ok(());
    }
    found.wan.iter().for_each(report::print_wan);
    found.strict.iter().for_each(report::print_strict);
    print_bars(&found.bars);
    Ok(())
}
