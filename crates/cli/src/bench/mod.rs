//! `tidegate bench`: a bounded load on a running server, and how it bore it.

mod http;
mod load;
mod plan;
mod report;
mod resp;

use std::io;
use std::process::ExitCode;
use std::sync::Arc;

use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};

use self::plan::{CONNECTIONS_MAX, KEYS_MAX, PIPELINE_MAX, Plan, Surface};
use crate::client::{json_arg, token_arg};
use crate::{CommandResult, Failure};

pub(crate) fn command() -> Command {
    Command::new("bench")
        .about("Puts a bounded load on a running server, and tells how fast it answers")
        .long_about(
            "Puts a bounded load on a running server and tells how fast it answers. Every question is about a key drawn \
             at random, under a limit that comes with it (or, for the surface `check`, under the server's rules). Stops \
             by itself. Only servers on this machine, unless told otherwise; connections are not encrypted.",
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
                .value_name("URL")
                .help("The server [default: http://127.0.0.1:8080, for resp redis://127.0.0.1:6380]"),
        )
        .arg(token_arg())
        .arg(number("connections", "N", "50", 1, CONNECTIONS_MAX, "Connections, 1 to 1000"))
        .arg(number("pipeline", "N", "1", 1, PIPELINE_MAX, "Questions sent together, 1 to 256; resp only"))
        .arg(
            Arg::new("duration")
                .long("duration")
                .value_name("TIME")
                .default_value("10s")
                .help("How long, 1s to 1h"),
        )
        .arg(number("keys", "N", "1000000", 1, KEYS_MAX, "How many keys there are to draw from"))
        .arg(number("limit", "N", "100", 1, u64::from(u32::MAX), "The limit of each key, per minute"))
        .arg(
            Arg::new("rate")
                .long("rate")
                .value_name("N")
                .value_parser(value_parser!(u64).range(1..=10_000_000))
                .help("Questions per second, all together [default: as many as are answered]"),
        )
        .arg(
            Arg::new("allow_remote")
                .long("allow-remote")
                .action(ArgAction::SetTrue)
                .help("Also put load on a server on another machine: yours to answer for"),
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
    let plan = Arc::new(Plan::read(matches)?);
    plan.reach().map_err(|error| not_there(&plan, &error))?;
    let findings = load::run(&plan)?;
    if matches.get_flag("json") {
        say!("{}", report::json(&plan, &findings))?;
    } else {
        report::print(&plan, &findings)?;
    }
    if findings.answered() == 0 {
        let reason = findings.answers.first_error.as_deref().unwrap_or("no answer came");
        return Err(Failure::failed(format!("not one question got a decision: {reason}")));
    }
    Ok(ExitCode::SUCCESS)
}

fn not_there(plan: &Plan, error: &io::Error) -> Failure {
    Failure::unreachable(format!(
        "{}: {error}: is the server running, and is this its address? (--server)",
        plan.address
    ))
}
