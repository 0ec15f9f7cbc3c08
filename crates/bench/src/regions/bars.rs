//! The bars of a run, and whether they were held.

use super::fixture::WAY;
use super::strict::Strict;
use super::wan::{ALWAYS, ALWAYS_FOURFOLD, FOUR_AT_ONCE, HALF, ONCE, QUARTER, Row, UNDER, Wan};
use crate::region::bars::{Bar, percent};

/// Largest relative difference of the bytes per component between rows, and of the bytes of a row
/// from its share of the keys.
const ALIKE: f64 = 0.10;
/// Largest bytes of heartbeats alone, relative to the components of as many keys.
const LIFE_MAX: f64 = 0.02;
/// Largest bytes of four requests at once, relative to one: a component for the first, and one for
/// the others together.
const AT_ONCE_MAX: f64 = 2.0;
/// Largest bytes of four times the requests, for keys that are published in every round anyway.
const ALWAYS_MAX: f64 = 1.2;
/// Largest share of requests that are not decided by all regions together. With more of them, the
/// rows measure something else.
const ODD_MAX: f64 = 0.02;

/// Least share that passes while links are up, relative to one bucket.
const SHARE_MIN: f64 = 0.95;
/// Longest p99 of refusals: the forward timeout of 250 ms, and 50 ms for a busy machine.
const REFUSED_US_MAX: u64 = 300_000;

/// Returns the bars of replication. With few keys most bytes are heartbeats, which depend on time
/// only.
pub(super) fn of_wan(wan: &Wan, is_connected: bool) -> Vec<Bar> {
    if !is_connected {
        return vec![silent(wan)];
    }
    let bytes = |row: &Row| row.bytes as f64;
    vec![
        alike(wan),
        near("half of the keys: bytes, relative to all", ratio(wan, HALF, ONCE, bytes), 0.5),
        near("a quarter of the keys: bytes, relative to all", ratio(wan, QUARTER, ONCE, bytes), 0.25),
        silent(wan),
        at_most("below the threshold: bytes, relative to above it", ratio(wan, UNDER, ONCE, bytes), LIFE_MAX),
        at_most(
            "four requests at once: bytes, relative to one",
            ratio(wan, FOUR_AT_ONCE, ONCE, bytes),
            AT_ONCE_MAX,
        ),
        at_most(
            "four times the requests of keys published in every round: bytes per second",
            ratio(wan, ALWAYS_FOURFOLD, ALWAYS, Row::bytes_per_second),
            ALWAYS_MAX,
        ),
        odd(wan),
    ]
}

/// Returns one row as a multiple of another; NaN unless both exist.
fn ratio(wan: &Wan, one: &str, other: &str, of: impl Fn(&Row) -> f64) -> f64 {
    let value = |name| wan.row(name).map_or(f64::NAN, &of);
    value(one) / value(other)
}

/// A NaN meets no bar, here and below.
fn at_most(name: &'static str, found: f64, most: f64) -> Bar {
    Bar { name, asked: format!("at most {most}"), found: format!("{found:.3}"), held: found <= most }
}

fn near(name: &'static str, found: f64, should: f64) -> Bar {
    Bar {
        name,
        asked: format!("{should}, within {}", percent(ALIKE)),
        found: format!("{found:.3}"),
        held: (found / should - 1.0).abs() <= ALIKE,
    }
}

fn alike(wan: &Wan) -> Bar {
    let published = wan.rows.iter().filter(|row| row.name != UNDER);
    // A row without components leaves nothing to compare, and so does a run without rows.
    let bytes: Vec<f64> =
        published.map(|row| row.bytes_per_published).collect::<Option<_>>().unwrap_or_default();
    let over_all = |pick: fn(f64, f64) -> f64| bytes.iter().copied().reduce(pick).unwrap_or(f64::NAN);
    let (least, most) = (over_all(f64::min), over_all(f64::max));
    Bar {
        name: "bytes per component: largest row, relative to the smallest",
        asked: format!("at most {}", 1.0 + ALIKE),
        found: format!("{:.3}: {least:.1} to {most:.1}", most / least),
        held: most / least <= 1.0 + ALIKE,
    }
}

fn silent(wan: &Wan) -> Bar {
    let published = wan.row(UNDER).map(|row| row.published);
    Bar {
        name: "below the threshold: published components",
        asked: "0".to_owned(),
        found: published.map_or_else(|| "not measured".to_owned(), |published| published.to_string()),
        held: published == Some(0),
    }
}

fn odd(wan: &Wan) -> Bar {
    let sum = |of: fn(&Row) -> u64| wan.rows.iter().map(of).sum::<u64>() as f64;
    let found = sum(|row| row.odd) / sum(|row| row.requests);
    Bar {
        name: "decisions without the global state",
        asked: format!("at most {}", percent(ODD_MAX)),
        found: percent(found),
        held: found <= ODD_MAX,
    }
}

/// Returns the bars of a strict rule.
pub(super) fn of_strict(strict: &Strict) -> Vec<Bar> {
    let refusals = strict.refusals.map(|tail| tail.p99_us);
    let far_us = u64::try_from(2 * WAY.as_micros()).unwrap_or(u64::MAX);
    vec![
        Bar {
            name: "strict: fastest decision of a remote region",
            asked: format!("at least {} ms", far_us / 1_000),
            found: strict.far_us_min.map_or_else(|| "none".to_owned(), |us| format!("{} ms", us / 1_000)),
            held: strict.far_us_min.is_some_and(|us| us >= far_us),
        },
        Bar {
            name: "strict: largest over-admission of a limit",
            asked: "0".to_owned(),
            found: format!("{:.3}, in {} requests", strict.over_units, strict.requests),
            held: strict.over_units == 0.0 && strict.admitted > 0,
        },
        Bar {
            name: "strict: admitted, relative to one bucket while links are up",
            asked: format!("at least {}", percent(SHARE_MIN)),
            found: percent(strict.share),
            held: strict.share >= SHARE_MIN,
        },
        Bar {
            name: "strict: refusals with an unreachable owner, p99",
            asked: format!("at most {} ms", REFUSED_US_MAX / 1_000),
            found: refusals.map_or_else(|| "no refusals".to_owned(), |us| format!("{} ms", us / 1_000)),
            held: refusals.is_some_and(|us| us <= REFUSED_US_MAX),
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::tail::Tail;

    fn row(name: &'static str, published: u64) -> Row {
        Row {
            name,
            keys: 100,
            requests: 300,
            seconds: 10.0,
            odd: 0,
            published,
            published_per_key: 1.0,
            bytes: 100 * published + 10,
            bytes_per_published: (published > 0).then_some(100.0),
            pairs: Vec::new(),
        }
    }

    fn missed(change: impl Fn(&mut Row)) -> Vec<&'static str> {
        let published = [
            (ONCE, 600),
            (FOUR_AT_ONCE, 900),
            (HALF, 300),
            (QUARTER, 150),
            (UNDER, 0),
            (ALWAYS, 50),
            (ALWAYS_FOURFOLD, 50),
        ];
        let mut rows: Vec<Row> = published.map(|(name, published)| row(name, published)).into();
        rows.iter_mut().for_each(change);
        of_wan(&Wan { key_bytes: 32, rows }, true)
            .iter()
            .filter(|bar| !bar.held)
            .map(|bar| bar.name)
            .collect()
    }

    fn of(name: &'static str, change: impl Fn(&mut Row)) -> Vec<&'static str> {
        missed(|row| {
            if row.name == name {
                change(row);
            }
        })
    }

    #[test]
    fn each_replication_bar_is_missed_only_by_its_own_measure() {
        assert_eq!(missed(|_| {}), <[&str; 0]>::default());
        let dear = of(ALWAYS, |row| row.bytes_per_published = Some(111.0));
        assert_eq!(dear, ["bytes per component: largest row, relative to the smallest"]);
        assert_eq!(
            of(HALF, |row| row.bytes_per_published = None).len(),
            1,
            "a row without components misses the bar"
        );
        assert_eq!(of(HALF, |row| row.bytes = 34_000), ["half of the keys: bytes, relative to all"]);
        assert_eq!(of(QUARTER, |row| row.bytes = 13_000), ["a quarter of the keys: bytes, relative to all"]);
        assert_eq!(of(UNDER, |row| row.published = 1), ["below the threshold: published components"]);
        assert_eq!(of(UNDER, |row| row.bytes = 1_300), ["below the threshold: bytes, relative to above it"]);
        // Bytes that follow requests.
        assert_eq!(
            of(FOUR_AT_ONCE, |row| row.bytes = 240_000),
            ["four requests at once: bytes, relative to one"]
        );
        let fourfold = of(ALWAYS_FOURFOLD, |row| row.bytes = 20_000);
        assert_eq!(fourfold, ["four times the requests of keys published in every round: bytes per second"]);
        assert_eq!(missed(|row| row.odd = 7), ["decisions without the global state"]);
    }

    #[test]
    fn rows_that_were_not_run_hold_nothing() {
        let held =
            of_wan(&Wan { key_bytes: 32, rows: Vec::new() }, true).iter().filter(|bar| bar.held).count();
        assert_eq!(held, 0);
    }

    fn missed_in_strict(change: impl FnOnce(&mut Strict)) -> Vec<&'static str> {
        let mut strict = Strict {
            requests: 1_000,
            keys: 10,
            seconds: 10.0,
            flapping: "ap-eu".to_owned(),
            up_seconds: 10.0,
            down_seconds: 2.0,
            flaps: 1,
            admitted: 100,
            over_units: 0.0,
            share: 0.95,
            share_by_owner: vec![0.95; 3],
            unreachable: 10,
            unreachable_passed: 0,
            refused_reachable: 0,
            far_us_min: Some(160_000),
            refusals: Some(Tail { requests: 10, p99_us: 300_000, p999_us: 400_000 }),
        };
        change(&mut strict);
        of_strict(&strict).iter().filter(|bar| !bar.held).map(|bar| bar.name).collect()
    }

    #[test]
    fn each_strict_bar_is_missed_only_by_its_own_measure() {
        assert_eq!(missed_in_strict(|_| {}), <[&str; 0]>::default());
        let over = ["strict: largest over-admission of a limit"];
        assert_eq!(missed_in_strict(|strict| strict.over_units = 0.001), over);
        assert_eq!(
            missed_in_strict(|strict| strict.admitted = 0),
            over,
            "a run without such requests misses the bar"
        );
        let share = missed_in_strict(|strict| strict.share = 0.949);
        assert_eq!(share, ["strict: admitted, relative to one bucket while links are up"]);
        let near = ["strict: fastest decision of a remote region"];
        assert_eq!(missed_in_strict(|strict| strict.far_us_min = Some(159_999)), near);
        assert_eq!(
            missed_in_strict(|strict| strict.far_us_min = None),
            near,
            "no request had a remote owner"
        );
        let refused = ["strict: refusals with an unreachable owner, p99"];
        assert_eq!(missed_in_strict(|strict| strict.refusals = None), refused);
        let slow = Tail { requests: 10, p99_us: 300_001, p999_us: 300_001 };
        assert_eq!(missed_in_strict(|strict| strict.refusals = Some(slow)), refused);
    }
}
