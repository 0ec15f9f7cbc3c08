//! The tables that people read.

use super::bars::Bar;
use super::half_load::HalfLoad;
use super::hedge::Hedge;
use super::row::Row;
use super::sequence::SequenceRow;
use super::stall::{SLOW_US, Stall};
use super::tail::Tail;
use super::warm::Warm;

pub(super) fn print_rows(rows: &[Row]) {
    println!(
        "{:<9} {:<14} {:>7} {:>5} {:>7} {:>5} {:>8} {:>9} {:>9} {:>9} {:>8} {:>6} {:>9} {:>8} {:>7} {:>8} {:>8}",
        "class",
        "algorithm",
        "limit",
        "cost",
        "offered",
        "keys",
        "req/s",
        "requests",
        "admitted",
        "over",
        "share",
        "alone",
        "undecided",
        "waited",
        "calls",
        "updates",
        "scripts"
    );
    rows.iter().for_each(print_row);
    println!(
        "  limit: a minute; offered: in costs, of what the limit lets pass for good; over: how far any interval was passed, of the limit"
    );
    println!(
        "  share: of what one exact bucket lets pass of the same requests; alone: decided by one server, the origin being late"
    );
    println!(
        "  waited: of all requests, for a call; calls, updates of meters, and scripts as Redis counts them: for each request"
    );
}

fn print_row(row: &Row) {
    println!(
        "{:<9} {:<14} {:>7} {:>5} {:>6.2}x {:>5} {:>8.0} {:>9} {:>9} {:>8.3}% {:>7.2}% {:>6} {:>9} {:>7.2}% {:>7.3} {:>8.3} {:>8.3}",
        row.class.name(),
        row.algorithm,
        row.limit_per_minute,
        row.costs,
        row.offered,
        row.keys,
        row.per_second,
        row.requests,
        row.admitted,
        row.over * 100.0,
        row.share * 100.0,
        row.alone,
        row.undecided,
        row.waited * 100.0,
        row.calls_per_request,
        row.updates_per_request,
        row.scripts_per_request
    );
}

pub(super) fn print_warm(warm: &Warm) {
    println!(
        "\nwarm: {} keys on {} servers, half of them at their limit, over RESP: {} requests, {:.0}/s, {:.1} % denied, {} shed",
        warm.keys,
        warm.nodes,
        warm.requests,
        warm.per_second,
        warm.denied * 100.0,
        warm.shed
    );
    println!(
        "  for each request: {:.4} scripts, {:.4} calls, {:.4} updates of meters; {:.3} % waited",
        warm.scripts_per_request,
        warm.calls_per_request,
        warm.updates_per_request,
        warm.waited * 100.0
    );
    println!(
        "  CPU time of the servers: {:.3} us with an origin, {:.3} us without ({:.0}/s): {:.1} % of the throughput",
        warm.cpu_us_per_request,
        warm.cpu_us_per_request_apart,
        warm.per_second_apart,
        warm.throughput * 100.0
    );
    println!(
        "  of one server, with all keys below their limits: {:.3} us with an origin, {:.3} us without: {:.1} % of the throughput; {:.4} calls for each request, {:.3} % waited",
        warm.below_cpu_us_per_request,
        warm.below_cpu_us_per_request_apart,
        warm.below_throughput * 100.0,
        warm.below_calls_per_request,
        warm.below_waited * 100.0
    );
}

pub(super) fn print_stall(stall: &Stall) {
    println!(
        "\nstall: one server whose store stands still for {:.1} s, {} requests, one in eight of security rules",
        stall.seconds, stall.requests
    );
    print_tail("comfort before", &stall.comfort_before);
    print_tail("comfort meanwhile", &stall.comfort_meanwhile);
    println!("  security without the store: {} of {} passed", stall.security_passed, stall.security_without);
    let seconds = |odd: &[u64]| odd.iter().map(u64::to_string).collect::<Vec<_>>().join(" ");
    println!("  not regional in each second before: {}", seconds(&stall.odd_before));
    println!(
        "  not regional in each second after it goes on: {}, the last after {:.0} ms, of {}",
        seconds(&stall.odd_after),
        stall.last_odd_ms,
        stall.requests_after
    );
    println!(
        "  a core of this machine stood still {} times; {} of those that were not regional met that, and are not counted below",
        stall.pauses, stall.odd_in_pauses
    );
    println!(
        "  slower than {} ms while it stands still: {}, of which {} met that; all of them are counted below",
        SLOW_US / 1_000,
        stall.slow,
        stall.slow_in_pauses
    );
}

pub(super) fn print_hedge(hedge: &Hedge) {
    println!(
        "\nhedge: cold requests, one answer of the store in {} is {} ms late",
        hedge.late_in, hedge.late_ms
    );
    print_tail("asked once", &hedge.once);
    print_tail(&format!("asked again after {} ms", hedge.again_after_ms), &hedge.again);
}

pub(super) fn print_sequences(rows: &[SequenceRow]) {
    println!("\nsequences: one request after the other for a fresh key, limits of 1 to 1,000 per day");
    println!(
        "{:>7} {:<19} {:>9} {:>8} {:>10} {:>12} {:>12} {:>13}",
        "servers",
        "surface",
        "sequences",
        "left out",
        "most above",
        "least passed",
        "first denial",
        "least of them"
    );
    for row in rows {
        println!(
            "{:>7} {:<19} {:>9} {:>8} {:>10} {:>11.1}% {:>11.1}% {:>12.1}%",
            row.servers,
            row.surface.name(),
            row.sequences,
            row.not_judged,
            row.most_above,
            row.least_share * 100.0,
            row.mean_first_denial * 100.0,
            row.least_first_denial * 100.0
        );
    }
    println!("  left out: sequences with an answer that the origin had no part in");
    println!("  most above: admitted above the limit; least passed: in the end, of the limit");
    println!("  first denial: mean of the requests that passed before it, of the limit");
    println!("  first values of `remaining` for a limit of 100, the servers asked in turn:");
    for row in rows {
        let values: Vec<String> = row.first_remaining.iter().map(u64::to_string).collect();
        println!("{:>7} {:<19} {}", row.servers, row.surface.name(), values.join(" "));
    }
}

pub(super) fn print_half_load(rows: &[HalfLoad]) {
    println!("\nhalf load: one key, Poisson arrivals at half of its rate");
    println!(
        "{:>7} {:>11} {:>7} {:<6} {:>7} {:>8} {:>9} {:>8} {:>8} {:>8} {:>7} {:>9}",
        "servers",
        "limit",
        "burst",
        "spread",
        "req/s",
        "requests",
        "elsewhere",
        "passed",
        "busiest",
        "waited",
        "calls",
        "redis us"
    );
    for row in rows {
        println!(
            "{:>7} {:>11} {:>7} {:<6} {:>7.0} {:>8} {:>9} {:>7.2}% {:>7.2}% {:>7.2}% {:>7.3} {:>9.1}",
            row.servers,
            format!("{} in {}s", row.rule.limit, row.rule.period_s),
            row.rule.burst,
            row.spread.name(),
            row.offered_per_second,
            row.requests,
            row.elsewhere,
            row.passed * 100.0,
            row.passed_at_busiest * 100.0,
            row.waited * 100.0,
            row.calls_per_request,
            row.origin_cpu_us_per_request
        );
    }
    println!(
        "  skewed: one server has half of the requests; elsewhere: answers without the origin, left out"
    );
    println!("  busiest: passed at the server with the most requests; waited: of all requests, for a call");
    println!("  calls to the origin, and CPU time of Redis: for each request");
}

pub(crate) fn print_tail(what: &str, tail: &Tail) {
    println!("  {what}: p99 {} us, p99.9 {} us, of {}", tail.p99_us, tail.p999_us, tail.requests);
}

pub(crate) fn print_bars(bars: &[Bar]) {
    println!();
    for bar in bars {
        let held = if bar.held { "held" } else { "MISSED" };
        println!("{held:<6} {}: {} (asked: {})", bar.what, bar.found, bar.asked);
    }
}
