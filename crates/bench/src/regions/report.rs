//! The tables that people read.

use super::fixture::{PAIRS, pair_name};
use super::strict::Strict;
use super::wan::{Row, Wan};
use crate::region::bars::percent;
use crate::region::report::print_tail;

pub(super) fn print_wan(wan: &Wan) {
    let pairs: String = PAIRS.map(|pair| format!(" {:>10}", pair_name(pair))).concat();
    println!(
        "{:<16} {:>7} {:>9} {:>7} {:>7} {:>9} {:>8} {:>8} {:>10}{pairs}",
        "wan", "keys", "requests", "s", "odd", "told", "per key", "told/s", "bytes/told"
    );
    wan.rows.iter().for_each(print_row);
    println!(
        "  keys: of {} bytes, a third of them in each region; odd: requests that were not decided by all regions together",
        wan.key_bytes
    );
    println!(
        "  told: to all regions together; per key: how often each of the others was told of it; pairs: bytes per second, both ways"
    );
}

fn print_row(row: &Row) {
    let bytes_per_published =
        row.bytes_per_published.map_or_else(|| "-".to_owned(), |bytes| format!("{bytes:.1}"));
    let pairs: Vec<String> =
        row.pairs.iter().map(|pair| format!(" {:>10.0}", pair.bytes_per_second)).collect();
    let pairs = pairs.concat();
    println!(
        "{:<16} {:>7} {:>9} {:>7.1} {:>7} {:>9} {:>8.2} {:>8.0} {:>10}{pairs}",
        row.name,
        row.keys,
        row.requests,
        row.seconds,
        row.odd,
        row.published,
        row.published_per_key,
        row.published_per_second(),
        bytes_per_published
    );
}

pub(super) fn print_strict(strict: &Strict) {
    println!(
        "\nstrict: {} requests of {} keys in {:.0} s, {:.0}/s; {} was there for {} s at a time and gone for {} s, {} times",
        strict.requests,
        strict.keys,
        strict.seconds,
        strict.requests as f64 / strict.seconds,
        strict.flapping,
        strict.up_seconds,
        strict.down_seconds,
        strict.flaps
    );
    let by_owner: Vec<String> = strict.share_by_owner.iter().map(|share| percent(*share)).collect();
    println!(
        "  {} passed, {:.3} over any limit, {} of what one bucket lets pass ({} by the region that decides)",
        strict.admitted,
        strict.over_units,
        percent(strict.share),
        by_owner.join(", ")
    );
    println!(
        "  over the link while it was gone: {}, of which {} passed; refused undecided elsewhere: {}",
        strict.unreachable, strict.unreachable_passed, strict.refused_reachable
    );
    strict.refusals.iter().for_each(|tail| print_tail("refusals while it was gone", tail));
}
