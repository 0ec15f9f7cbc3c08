//! Compares the product's arithmetic with the oracle on random histories; exits with 1 at the first
//! difference.

mod args;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use args::{Args, USAGE};
use tidegate_core::{Algorithm, Meter};
use tidegate_oracle::{Bucket, Cells, Plan, Report, Totals, campaign};

fn main() -> ExitCode {
    let args = match Args::parse(std::env::args().skip(1)) {
        Ok(args) => args,
        Err(error) => {
            eprintln!("{error}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match compare_all(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(report) => {
            // With `--json`, stdout has one object or nothing, never prose.
            if args.json {
                eprintln!("{report}");
            } else {
                println!("{report}");
            }
            ExitCode::FAILURE
        }
    }
}

fn compare_all(args: &Args) -> Result<(), Box<Report>> {
    let mut objects = Vec::new();
    for &algorithm in &args.algorithms {
        let started = now();
        let totals = compare(algorithm, &args.plan, started)?;
        let took = now().duration_since(started);
        if args.json {
            objects.push(json(algorithm, &totals, took));
        } else {
            let Totals { decisions, probes, .. } = totals;
            let (name, seed) = (name(algorithm), args.plan.seed);
            println!("{name}: {decisions} decisions, {probes} probes, 0 mismatches, seed {seed}");
        }
    }
    if args.json {
        println!("{{\"seed\":{},\"threads\":{},{}}}", args.plan.seed, args.plan.threads, objects.join(","));
    }
    Ok(())
}

fn compare(algorithm: Algorithm, plan: &Plan, started: Instant) -> Result<Totals, Box<Report>> {
    let tell = |done: u64| {
        let rate = u128::from(done) * 1_000 / now().duration_since(started).as_millis().max(1);
        eprintln!("{}: {done} of {} decisions, {rate} per second", name(algorithm), plan.decisions);
    };
    match algorithm {
        Algorithm::Gcra => campaign::<Bucket, Meter>(plan, tell),
        Algorithm::SlidingWindow => campaign::<Cells, Meter>(plan, tell),
    }
}

fn json(algorithm: Algorithm, totals: &Totals, took: Duration) -> String {
    let Totals { histories, decisions, allowed, later, never, probes } = totals;
    let (name, milliseconds) = (name(algorithm), took.as_millis());
    format!(
        "\"{name}\":{{\"histories\":{histories},\"decisions\":{decisions},\"allowed\":{allowed},\
         \"later\":{later},\"never\":{never},\"probes\":{probes},\"mismatches\":0,\
         \"milliseconds\":{milliseconds}}}"
    )
}

fn name(algorithm: Algorithm) -> &'static str {
    match algorithm {
        Algorithm::Gcra => "gcra",
        Algorithm::SlidingWindow => "window",
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "only the rate of progress is measured; no decision depends on it"
)]
fn now() -> Instant {
    Instant::now()
}
