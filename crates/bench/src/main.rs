//! Tidegate beside its peers, in one run: `cargo run --profile dist -p tidegate-bench -- local`.
#![allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "counts and nanoseconds become printed statistics, far below 2^52"
)]

mod contenders;
mod control;
mod fill;
mod flat_table;
mod flood;
mod local;
mod machine;
mod measure;
mod memory;
mod pieces;
mod record;
mod region;
mod regions;
mod rules;
mod scrape;
mod servers;
mod stream;
mod table;
mod tenants;
mod trial;
mod workload;

/// The allocator of the server, so that compiling and logging cost the same here as there. Peers
/// use it too.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Tidegate beside its peers, in one run.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Limiters inside one process: CPU time per check, checks per second, memory per key.
    Local(local::Args),
    /// A flood of strangers against a table of fixed size.
    Flood(flood::Args),
    /// Memory per live key, for each algorithm.
    Memory(memory::Args),
    /// Servers beside each other: operations per second of the server's CPU time.
    Servers(servers::Args),
    /// Servers around one origin: admission together, and its cost.
    Region(region::Args),
    /// Three distant regions of servers: replication traffic, and admission of `strict` rules over
    /// links that flap.
    Regions(regions::Args),
    /// Servers that follow one store of rules: how long a change takes until all of them decide by
    /// it.
    Control(control::Args),
    /// A set of a million rules and overrides: time to compile, memory, time of a match.
    Rules(rules::Args),
    /// The cost of the decision log, and the denials per second that it takes.
    Record(record::Args),
    /// A tenant beside a hostile one: its decisions and latency, and the cost of a lookup among a
    /// thousand wildcard overrides.
    Tenants(tenants::Args),
    /// One contender in one case; `local` starts a process with this command for each of them.
    #[command(hide = true)]
    Trial(trial::Args),
}

fn main() -> Result<()> {
    match Cli::parse().command {
        Command::Local(args) => local::run(&args),
        Command::Flood(args) => flood::run(&args),
        Command::Memory(args) => memory::run(&args),
        Command::Servers(args) => servers::run(&args),
        Command::Region(args) => region::run(&args),
        Command::Regions(args) => regions::run(&args),
        Command::Control(args) => control::run(&args),
        Command::Rules(args) => rules::run(&args),
        Command::Record(args) => record::run(&args),
        Command::Tenants(args) => tenants::run(&args),
        Command::Trial(args) => trial::run(&args),
    }
}
