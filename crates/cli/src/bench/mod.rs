//! `tidegate bench`: a bounded load on a running server, and how it bore it.

mod load;
mod plan;
mod report;

use std::io;
use std::process::ExitCode;

use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};

use self::plan::{CONNECTIONS_MAX, KEYS_MAX, PIPELINE_MAX, Plan, Surface};
use crate::client::{json_arg, token_arg};
use crate::{CommandResult, Failure};

pub(crate) fn command() -> Command {
    Command::new("bench")
        .about("Put a bounded load on a running server, and report its latency")
        .long_about(
            "Put a bounded load on a running server, and report its latency. Each check has a random key \
             and carries its limit; with the surface `check`, the rules of the server apply. Connections \
             are not encrypted. A server on another machine requires --allow-remote.",
        )
        .arg(
            Arg::new("surface")
                .long("surface")
                .value_name("NAME")
                .default_value(Surface::Http.as_str())
                .value_parser(PossibleValuesParser::new(Surface::ALL.map(Surface::as_str)))
                .help("http: POST /v2/ratelimit.limit; check: POST /v1/check; resp: CL.THROTTLE"),
        )
        .arg(
            Arg::new("server")
                .long("server")
                .value_name("ADDRESS")
                .help("HOST:PORT or URL of the listener [default: 127.0.0.1:8080; resp: 127.0.0.1:6380]"),
        )
        .arg(token_arg())
        .arg(number("connections", "N", "50", 1, CONNECTIONS_MAX, "Connections, 1 to 1000"))
        .arg(number("pipeline", "N", "1", 1, PIPELINE_MAX, "Checks sent together, 1 to 256; resp only"))
        .arg(
            Arg::new("duration")
                .long("duration")
                .value_name("TIME")
                .default_value("10s")
                .help("Duration of the load, 1s to 1h"),
        )
        .arg(number("keys", "N", "1000000", 1, KEYS_MAX, "Number of keys to draw from"))
        .arg(number("limit", "N", "100", 1, u64::from(u32::MAX), "Limit of each key, per minute"))
        .arg(
            Arg::new("rate")
                .long("rate")
                .value_name("N")
                .value_parser(value_parser!(u64).range(1..=10_000_000))
                .help("Checks per second over all connections [default: unlimited]"),
        )
        .arg(
            Arg::new("allow_remote")
                .long("allow-remote")
                .action(ArgAction::SetTrue)
                .help("Permit a server on another machine"),
        )
        .arg(json_arg())
}

fn number(
    id: &'static str,
    value: &'static str,
    default: &'static str,
    least: u64,
    most: u64,
    help: &'static str,
) -> Arg {
    Arg::new(id)
        .long(id)
        .value_name(value)
        .default_value(default)
        .value_parser(value_parser!(u64).range(least..=most))
        .help(help)
}

pub(crate) fn run(matches: &ArgMatches) -> CommandResult {
    let plan = Plan::read(matches)?;
    plan.reach().map_err(|error| not_there(&plan, &error))?;
    let findings = load::run(&plan)?;
    if matches.get_flag("json") {
        say!("{}", report::json(&plan, &findings))?;
    } else {
        report::print(&plan, &findings)?;
    }
    if findings.answered() == 0 {
        let reason = findings.answers.first_error.as_deref().unwrap_or("no response");
        return Err(Failure::failed(format!("no check got a decision: {reason}")));
    }
    Ok(ExitCode::SUCCESS)
}

fn not_there(plan: &Plan, error: &io::Error) -> Failure {
    Failure::unreachable(format!(
        "{}: {error}: is the server running, and is this its address? (--server)",
        plan.address
    ))
}
