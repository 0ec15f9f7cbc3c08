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
        "{:<9} {:<14} {:>7} {:>5} {:>7} {:>5} {:>8} {:>9} {:>9} {:>9} {:>8} {:>6} {:>9} {:>8} {:>7} {:>8} \
         {:>8}",
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
        "  limit: per minute; offered: cost relative to the sustained limit; over: largest over-admission of \
         an interval, relative to the limit"
    );
    println!(
        "  share: admitted, relative to one exact bucket; alone: decided by one server because the origin \
         was late"
    );
    println!(
        "  waited: share of requests that waited for a call; calls, meter updates, and scripts (as Redis \
         counts them): per request"
    );
}

fn print_row(row: &Row) {
    println!(
        "{:<9} {:<14} {:>7} {:>5} {:>6.2}x {:>5} {:>8.0} {:>9} {:>9} {:>8.3}% {:>7.2}% {:>6} {:>9} {:>7.2}% \
         {:>7.3} {:>8.3} {:>8.3}",
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
        "\nwarm: {} keys on {} servers, half of them at their limit, over RESP: {} requests, {:.0}/s, {:.1} \
         % denied, {} shed",
        warm.keys,
        warm.nodes,
        warm.requests,
        warm.per_second,
        warm.denied * 100.0,
        warm.shed
    );
    println!(
        "  per request: {:.4} scripts, {:.4} calls, {:.4} meter updates; {:.3} % waited",
        warm.scripts_per_request,
        warm.calls_per_request,
        warm.updates_per_request,
        warm.waited * 100.0
    );
    println!(
        "  CPU time of the servers: {:.3} us with an origin, {:.3} us without ({:.0}/s): {:.1} % of the \
         throughput",
        warm.cpu_us_per_request,
        warm.cpu_us_per_request_apart,
        warm.per_second_apart,
        warm.throughput * 100.0
    );
    println!(
        "  one server, all keys below their limits: {:.3} us with an origin, {:.3} us without: {:.1} % of \
         the throughput; {:.4} calls per request, {:.3} % waited",
        warm.below_cpu_us_per_request,
        warm.below_cpu_us_per_request_apart,
        warm.below_throughput * 100.0,
        warm.below_calls_per_request,
        warm.below_waited * 100.0
    );
}

pub(super) fn print_stall(stall: &Stall) {
    println!(
        "\nstall: one server, store stalled for {:.1} s, {} requests, one in eight of security rules",
        stall.seconds, stall.requests
    );
    print_tail("comfort before the stall", &stall.comfort_before);
    print_tail("comfort during the stall", &stall.comfort_meanwhile);
    println!(
        "  security decisions without the store: {} of {} allowed",
        stall.security_passed, stall.security_without
    );
    let seconds = |odd: &[u64]| odd.iter().map(u64::to_string).collect::<Vec<_>>().join(" ");
    println!("  not regional, per second before the stall: {}", seconds(&stall.odd_before));
    println!(
        "  not regional, per second after the stall: {}, the last after {:.0} ms, of {}",
        seconds(&stall.odd_after),
        stall.last_odd_ms,
        stall.requests_after
    );
    println!(
        "  pauses of a core of this machine: {}; {} decisions without the region fell into one, and are not \
         counted below",
        stall.pauses, stall.odd_in_pauses
    );
    println!(
        "  slower than {} ms during the stall: {}, of which {} fell into a pause; all are counted below",
        SLOW_US / 1_000,
        stall.slow,
        stall.slow_in_pauses
    );
}

pub(super) fn print_hedge(hedge: &Hedge) {
    println!(
        "\nhedge: cold requests, one reply of the store in {} is {} ms late",
        hedge.late_in, hedge.late_ms
    );
    print_tail("without a hedge", &hedge.once);
    print_tail(&format!("with a hedge after {} ms", hedge.again_after_ms), &hedge.again);
}

pub(super) fn print_sequences(rows: &[SequenceRow]) {
    println!("\nsequences: one request after the other for a fresh key, limits of 1 to 1,000 per day");
    println!(
        "{:>7} {:<19} {:>9} {:>8} {:>10} {:>12} {:>12} {:>13}",
        "servers",
        "surface",
        "sequences",
        "excluded",
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
    println!("  excluded: sequences with a decision without the origin");
    println!(
        "  most above: units admitted above the limit; least passed: admitted in the end, relative to the \
         limit"
    );
    println!("  first denial: mean of the requests admitted before it, relative to the limit");
    println!("  first values of `remaining` for a limit of 100, with the servers in turn:");
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
        "  skewed: one server has half of the requests; elsewhere: excluded decisions without the origin"
    );
    println!(
        "  busiest: admitted at the server with the most requests; waited: share that waited for a call"
    );
    println!("  calls to the origin, and CPU time of Redis: per request");
}

pub(crate) fn print_tail(label: &str, tail: &Tail) {
    println!("  {label}: p99 {} us, p99.9 {} us, of {}", tail.p99_us, tail.p999_us, tail.requests);
}

pub(crate) fn print_bars(bars: &[Bar]) {
    println!();
    for bar in bars {
        let held = if bar.held { "held" } else { "MISSED" };
        println!("{held:<6} {}: {} (required: {})", bar.name, bar.found, bar.asked);
    }
}
