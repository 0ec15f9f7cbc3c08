//! `tidegate plan`: estimates the resources for a described load.

mod capacity;

use std::process::ExitCode;

use clap::builder::RangedU64ValueParser;
use clap::{Arg, ArgMatches, Command};
use comfy_table::{CellAlignment, Table};
use serde_json::json;

use self::capacity::{Constant, Load, Needs, Surface};
use tidegate_server::bounds::REGIONS_MAX;

use crate::client::json_arg;
use crate::{CommandResult, Failure, table};

/// The most requests in a second, and the most keys.
const COUNT_MAX: u64 = 1_000_000_000_000;
const NODES_MAX: u64 = 1_000_000;
const CORES_MAX: u64 = 1_024;
const LIMITS_MAX: u64 = 128;
const KEY_BYTES_MAX: u64 = 1_024;

/// Default percentage of keys that regions replicate. Most keys stay below the publish threshold.
const GLOBAL_KEYS_PERCENT: u64 = 1;

pub(crate) fn command() -> Command {
    Command::new("plan")
        .about("Estimate cores, memory, shards and bandwidth for a load")
        .long_about(
            "Estimate the resources of a load in each region: cores, memory, calls to the origin, Redis \
             shards and bandwidth between regions. The command contacts no server. It computes the figures \
             from costs that were measured on one machine, and prints these costs. Measure your machine \
             with `tidegate bench`. For the effect of a change of rules, use `tidegate rules plan`.",
        )
        .arg(
            count("requests_per_second", "Requests per second in all regions, such as 20k or 5M")
                .required(true),
        )
        .arg(count("keys", "Live keys in each region, of all limits").required(true))
        .arg(number("regions", "1", (1, REGIONS_MAX), "Regions, each with the same share of the requests"))
        .arg(number("limits", "1", (1, LIMITS_MAX), "Limits of each request"))
        .arg(count("global_keys", "Keys that regions replicate [default: 1 % of the keys]"))
        .arg(number("global_requests", "10", (0, 100), "Percent of the requests under a replicated key"))
        .arg(number(
            "local",
            "95",
            (0, 100),
            "Percent of the requests that memory decides, without a call \
                                              to the origin",
        ))
        .arg(
            Arg::new("surface")
                .long("surface")
                .value_name("SURFACE")
                .default_value(Surface::Sdk.as_str())
                .value_parser(Surface::ALL.map(Surface::as_str))
                .help("Surface by which clients ask"),
        )
        .arg(number("cores", "4", (1, CORES_MAX), "Cores of a node"))
        .arg(
            Arg::new("nodes")
                .long("nodes")
                .value_name("N")
                .value_parser(RangedU64ValueParser::<u64>::new().range(1..=NODES_MAX))
                .help("Nodes in each region [default: computed from the cores]"),
        )
        .arg(number("busy", "50", (1, 100), "Highest utilization of cores and shards, in percent"))
        .arg(number("key_bytes", "32", (1, KEY_BYTES_MAX), "Length of a key in bytes"))
        .arg(json_arg())
}

fn number(name: &'static str, default: &'static str, (least, most): (u64, u64), help: &'static str) -> Arg {
    Arg::new(name)
        .long(name.replace('_', "-"))
        .value_name("N")
        .default_value(default)
        .value_parser(RangedU64ValueParser::<u64>::new().range(least..=most))
        .help(help)
}

fn count(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name.replace('_', "-")).value_name("N").value_parser(parse_count).help(help)
}

/// A number as people write large ones: `5M`.
fn parse_count(text: &str) -> Result<u64, String> {
    let wrong = || format!("expected a number from 1 to {COUNT_MAX}, such as 20k, 5M or 1G");
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let times = match unit {
        "" => 1,
        "k" | "K" => 1_000,
        "M" => 1_000_000,
        "G" => 1_000_000_000,
        _ => return Err(wrong()),
    };
    let number = number.parse::<u64>().ok().and_then(|number| number.checked_mul(times));
    number.filter(|number| (1..=COUNT_MAX).contains(number)).ok_or_else(wrong)
}

pub(crate) fn run(matches: &ArgMatches) -> CommandResult {
    let load = read(matches)?;
    let needs = load.needs();
    if matches.get_flag("json") {
        say!("{}", json!({ "regions": load.regions, "each_region": needs, "constants": load.constants() }))?;
    } else {
        say!("needs of each of {} regions\n{}", load.regions, needs_table(&needs))?;
        say!("\ncomputed from\n{}", constants_table(&load.constants()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn read(matches: &ArgMatches) -> Result<Load, Failure> {
    // Arguments that are required or have a default are present.
    let number = |name: &str| matches.get_one::<u64>(name).copied();
    let given = |name: &str| number(name).ok_or_else(|| Failure::usage(format!("{name}: missing")));
    let surface = matches.get_one::<String>("surface").map_or("", String::as_str);
    let keys = given("keys")?;
    Ok(Load {
        requests_per_s: given("requests_per_second")?,
        regions: given("regions")?,
        keys,
        global_keys: number("global_keys").unwrap_or(keys * GLOBAL_KEYS_PERCENT / 100),
        global_percent: given("global_requests")?,
        limits: given("limits")?,
        surface: Surface::ALL.into_iter().find(|known| known.as_str() == surface).unwrap_or(Surface::Sdk),
        local_percent: given("local")?,
        key_bytes: given("key_bytes")?,
        busy_percent: given("busy")?,
        cores: given("cores")?,
        nodes: number("nodes"),
    })
}

fn needs_table(needs: &Needs) -> Table {
    let rows = [
        ("requests", grouped(needs.requests_per_s), "per second"),
        ("checks", grouped(needs.checks_per_s), "per second"),
        ("cores", grouped(needs.cores), ""),
        ("nodes", grouped(needs.nodes), ""),
        ("meter table, if every node sees each key", megabytes(needs.table_bytes_per_node), "MB per node"),
        (
            "meter table, if one node sees each key",
            megabytes(needs.table_bytes_per_node_sticky),
            "MB per node",
        ),
        ("requests that wait for the origin", grouped(needs.waiting_per_s), "per second"),
        ("calls to the origin", grouped(needs.origin_calls_per_s), "per second"),
        ("replicator reads of the origin", grouped(needs.origin_looks_per_s), "per second"),
        ("Redis shards", grouped(needs.redis_shards), ""),
        ("memory of a shard", megabytes(needs.redis_bytes_per_shard), "MB"),
        ("components sent to each peer", grouped(needs.components_per_s), "per second"),
        ("components received from peers", grouped(needs.merged_per_s), "per second"),
        ("bandwidth to peers", grouped(needs.wan_bits_per_s.div_ceil(1_000_000)), "Mbit/s"),
    ];
    let mut table = table::without_header();
    for (what, figure, unit) in rows {
        table.add_row([what, figure.as_str(), unit]);
    }
    align_right(&mut table, 1);
    table
}

fn constants_table(constants: &[Constant]) -> Table {
    let mut table = table::without_header();
    for Constant { name, value, unit, from } in constants {
        table.add_row([*name, grouped(*value).as_str(), *unit, *from]);
    }
    align_right(&mut table, 1);
    table
}

fn align_right(table: &mut Table, column: usize) {
    if let Some(column) = table.column_mut(column) {
        column.set_cell_alignment(CellAlignment::Right);
    }
}

fn megabytes(bytes: u64) -> String {
    grouped(bytes.div_ceil(1_000_000))
}

/// Digits in groups of three.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read_as_people_write_them() {
        for (text, number) in [("1", 1), ("20k", 20_000), ("5M", 5_000_000), ("1G", 1_000_000_000)] {
            assert_eq!(parse_count(text), Ok(number), "{text}");
        }
        for text in ["", "0", "M", "5 M", "-1", "1.5M", "5m", "2000G", "99999999999999999999"] {
            assert!(parse_count(text).is_err(), "{text}");
        }
    }

    #[test]
    fn digits_come_in_groups() {
        for (number, text) in [(0, "0"), (999, "999"), (1_000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(grouped(number), text);
        }
    }
}
