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
        "wan", "keys", "requests", "s", "odd", "published", "per key", "publ/s", "bytes/publ"
    );
    wan.rows.iter().for_each(print_row);
    println!(
        "  keys: {} bytes each, a third of them in each region; odd: decisions without the global state",
        wan.key_bytes
    );
    println!(
        "  published: components to all peers; per key: components per key and peer; pairs: bytes per \
         second, both directions"
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
        "\nstrict: {} requests of {} keys in {:.0} s, {:.0}/s; link {} up for {} s at a time and down for {} \
         s, {} times",
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
        "  {} admitted, {:.3} above any limit, {} relative to one bucket ({} by owner region)",
        strict.admitted,
        strict.over_units,
        percent(strict.share),
        by_owner.join(", ")
    );
    println!(
        "  over the link while it was down: {}, of which {} passed; refused without a decision elsewhere: {}",
        strict.unreachable, strict.unreachable_passed, strict.refused_reachable
    );
    strict.refusals.iter().for_each(|tail| print_tail("refusals while the link was down", tail));
}
