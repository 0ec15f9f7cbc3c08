//! The bars of a run, and whether they were held.

use serde::Serialize;

use super::case::{Class, Costs};
use super::row::Row;
use super::stall::{SLOW_US, Stall};
use super::warm::Warm;

/// Least number of requests of security rules in a whole run.
const SECURITY_REQUESTS_MIN: u64 = 1_000_000;
/// Least share that passes, relative to one bucket.
const SHARE_MIN: f64 = 0.98;
/// Largest share of requests that wait, for keys that a server gets at least this often.
const WAITED_MAX: f64 = 0.40;
const OFTEN_PER_SECOND: f64 = 10.0;
/// Scripts for each request of warm keys.
const SCRIPTS_MAX: f64 = 0.02;
/// Least throughput of a server with an origin, relative to one without.
const THROUGHPUT_MIN: f64 = 0.80;

/// Longest decisions of comfort rules while the origin is stalled: p99 and p99.9.
const STALLED_P99_US_MAX: u64 = 5_000;
const STALLED_P999_US_MAX: u64 = SLOW_US;
/// At most one answer in this many after the resume may be excused because the machine stood still.
/// A smaller value gives a verdict on a busier machine, but judges less of the server.
const EXCUSED_ONE_IN: u64 = 1_000;
/// The longest time from the resume until every answer is regional.
const REGIONAL_AGAIN_MS_MAX: f64 = 1_000.0;

/// A condition that a run must meet.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Bar {
    pub(crate) name: &'static str,
    pub(crate) asked: String,
    pub(crate) found: String,
    pub(crate) held: bool,
}

/// Returns the bars of the cases. The least number of requests applies to a whole run only.
pub(super) fn of_cases(rows: &[Row], is_full_run: bool) -> Vec<Bar> {
    let mut bars = vec![security_over(rows), comfort_over(rows), share(rows), waited(rows)];
    if is_full_run {
        let requests = security(rows).map(|row| row.requests).sum::<u64>();
        bars.push(Bar {
            name: "requests of security rules",
            asked: format!("at least {SECURITY_REQUESTS_MIN}"),
            found: requests.to_string(),
            held: requests >= SECURITY_REQUESTS_MIN,
        });
    }
    bars
}

fn security(rows: &[Row]) -> impl Iterator<Item = &Row> {
    rows.iter().filter(|row| row.class == Class::Security)
}

fn security_over(rows: &[Row]) -> Bar {
    let over = most(security(rows).map(|row| row.over_units));
    Bar {
        name: "security: largest over-admission of a limit",
        asked: "0".to_owned(),
        found: format!("{over:.3}"),
        held: over == 0.0,
    }
}

fn comfort_over(rows: &[Row]) -> Bar {
    let decided_there = |row: &&Row| row.class == Class::Comfort && row.alone == 0;
    let judged = rows.iter().filter(decided_there).count();
    let over = most(rows.iter().filter(decided_there).map(|row| row.over_units));
    Bar {
        name: "comfort: largest over-admission of a limit, in rows that the origin decided alone",
        asked: "0".to_owned(),
        found: format!("{over:.3}, in {judged} rows"),
        held: over == 0.0 && judged > 0,
    }
}

fn share(rows: &[Row]) -> Bar {
    let steady = rows.iter().filter(|row| row.costs == Costs::One.name());
    let least = steady.map(|row| row.share).fold(f64::INFINITY, f64::min);
    Bar {
        name: "cost 1: admitted, relative to one bucket",
        asked: format!("at least {}", percent(SHARE_MIN)),
        found: percent(least),
        held: least >= SHARE_MIN,
    }
}

fn waited(rows: &[Row]) -> Bar {
    let often = rows.iter().filter(|row| row.per_second_of_key_and_node >= OFTEN_PER_SECOND);
    let most = most(often.map(|row| row.waited));
    Bar {
        name: "waited for a call, for keys with at least ten requests per second and server",
        asked: format!("at most {}", percent(WAITED_MAX)),
        found: percent(most),
        held: most <= WAITED_MAX,
    }
}

/// Returns the bars of warm keys.
pub(super) fn of_warm(warm: &Warm) -> Vec<Bar> {
    let scripts = warm.scripts_per_request;
    vec![
        Bar {
            name: "warm keys: scripts for each request",
            asked: format!("at most {SCRIPTS_MAX}"),
            found: format!("{scripts:.4}"),
            held: scripts <= SCRIPTS_MAX,
        },
        Bar {
            name: "one server, warm keys below their limits: throughput with an origin, relative to none",
            asked: format!("at least {}", percent(THROUGHPUT_MIN)),
            found: percent(warm.below_throughput),
            held: warm.below_throughput >= THROUGHPUT_MIN,
        },
    ]
}

/// Returns the bars of a stalled origin.
pub(super) fn of_stall(stall: &Stall) -> Vec<Bar> {
    let time = |name, us: u64, us_max: u64| Bar {
        name,
        asked: format!("at most {us_max} us"),
        found: format!("{us} us"),
        held: us <= us_max,
    };
    let none = |name, count: u64, of: u64| Bar {
        name,
        asked: "0".to_owned(),
        found: format!("{count} of {of}"),
        held: count == 0 && of > 0,
    };
    let tail = stall.comfort_meanwhile;
    vec![
        time("stalled store: comfort decisions, p99", tail.p99_us, STALLED_P99_US_MAX),
        time("stalled store: comfort decisions, p99.9", tail.p999_us, STALLED_P999_US_MAX),
        none(
            "stalled store: allowed security decisions without the store",
            stall.security_passed,
            stall.security_without,
        ),
        none("stalled store: answers of status 5xx", stall.in_trouble, stall.requests),
        regional_again(stall),
        put_down_to_the_machine(stall),
    ]
}

/// Limits the answers that are attributed to the machine, because those are not judged.
fn put_down_to_the_machine(stall: &Stall) -> Bar {
    let (count, of) = (stall.odd_in_pauses, stall.requests_after);
    Bar {
        name: "resumed store: answers excused by a pause of the machine",
        asked: format!("at most 1 in {EXCUSED_ONE_IN}"),
        found: format!("{count} of {of}"),
        held: count * EXCUSED_ONE_IN <= of,
    }
}

fn regional_again(stall: &Stall) -> Bar {
    let found = match stall.regional_again_ms {
        Some(ms) => format!("{ms:.0} ms"),
        None => "not within the measurement".to_owned(),
    };
    Bar {
        name: "resumed store: time until every decision is regional again",
        asked: format!("at most {REGIONAL_AGAIN_MS_MAX} ms"),
        found,
        held: stall.regional_again_ms.is_some_and(|ms| ms <= REGIONAL_AGAIN_MS_MAX),
    }
}

/// Returns the bar of keys without an expiry, for the origins at the end of a run.
pub(super) fn of_keys(without_end: &[String], keys: usize) -> Bar {
    let first = without_end.first().map(|key| format!(", such as {key}")).unwrap_or_default();
    Bar {
        name: "keys in Redis without an expiry",
        asked: "0".to_owned(),
        found: format!("{} of {keys}{first}", without_end.len()),
        held: without_end.is_empty() && keys > 0,
    }
}

/// Returns the largest value, and 0 without values. A NaN is kept, and meets no bar.
fn most(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(0.0, |most, value| if value > most || value.is_nan() { value } else { most })
}

pub(crate) fn percent(share: f64) -> String {
    format!("{:.2} %", share * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::tail::Tail;

    fn row(class: Class) -> Row {
        Row {
            class,
            algorithm: "gcra",
            limit_per_minute: 1_000,
            costs: "1",
            offered: 4.0,
            keys: 10,
            per_second: 1_000.0,
            per_second_of_key_and_node: 25.0,
            requests: 600_000,
            admitted: 10,
            over_units: 0.0,
            over: 0.0,
            share: 1.0,
            alone: 0,
            undecided: 0,
            waited: 0.01,
            calls_per_request: 0.1,
            updates_per_request: 0.1,
            scripts_per_request: 0.1,
        }
    }

    fn missed(change: impl FnOnce(&mut Row), class: Class) -> Vec<&'static str> {
        let mut rows = vec![row(Class::Security), row(Class::Security), row(Class::Comfort), row(class)];
        change(&mut rows[3]);
        of_cases(&rows, true).iter().filter(|bar| !bar.held).map(|bar| bar.name).collect()
    }

    #[test]
    fn a_good_run_holds_every_bar() {
        assert_eq!(missed(|_| {}, Class::Comfort), <[&str; 0]>::default());
    }

    #[test]
    fn each_bar_is_missed_only_by_its_own_measure() {
        let over = |row: &mut Row| row.over_units = 0.001;
        assert_eq!(missed(over, Class::Security), ["security: largest over-admission of a limit"]);
        let comfort = "comfort: largest over-admission of a limit, in rows that the origin decided alone";
        assert_eq!(missed(over, Class::Comfort), [comfort]);
        let alone = |row: &mut Row| (row.over_units, row.alone) = (0.7, 1);
        assert_eq!(missed(alone, Class::Comfort), <[&str; 0]>::default());
        assert_eq!(missed(|row| row.share = 0.979, Class::Comfort).len(), 1);
        assert_eq!(missed(|row| row.waited = 0.401, Class::Comfort).len(), 1);
        let seldom = |row: &mut Row| (row.waited, row.per_second_of_key_and_node) = (0.9, 9.9);
        assert_eq!(missed(seldom, Class::Comfort), <[&str; 0]>::default());
        let mixed = |row: &mut Row| (row.share, row.costs) = (0.9, "1-20");
        assert_eq!(missed(mixed, Class::Comfort), <[&str; 0]>::default());
    }

    #[test]
    fn too_few_requests_are_no_proof_of_a_whole_run() {
        let few = [row(Class::Security), row(Class::Comfort)];
        assert!(of_cases(&few, true).iter().any(|bar| !bar.held));
        assert!(of_cases(&few, false).iter().all(|bar| bar.held));
    }

    fn missed_in_stall(change: impl FnOnce(&mut Stall)) -> Vec<&'static str> {
        let tail = Tail { requests: 1_000, p99_us: 5_000, p999_us: 25_000 };
        let mut stall = Stall {
            seconds: 30.0,
            requests: 3_000,
            comfort_before: tail,
            comfort_meanwhile: tail,
            security_without: 100,
            security_passed: 0,
            in_trouble: 0,
            odd_before: vec![0; 8],
            odd_after: vec![10, 0],
            requests_after: 1_000,
            last_odd_ms: 1_000.0,
            pauses: 0,
            odd_in_pauses: 0,
            slow: 0,
            slow_in_pauses: 0,
            regional_again_ms: Some(1_000.0),
        };
        change(&mut stall);
        of_stall(&stall).iter().filter(|bar| !bar.held).map(|bar| bar.name).collect()
    }

    #[test]
    fn each_stall_bar_is_missed_only_by_its_own_measure() {
        assert_eq!(missed_in_stall(|_| {}), <[&str; 0]>::default());
        let p99 = missed_in_stall(|stall| stall.comfort_meanwhile.p99_us = 5_001);
        assert_eq!(p99, ["stalled store: comfort decisions, p99"]);
        let p999 = missed_in_stall(|stall| stall.comfort_meanwhile.p999_us = 25_001);
        assert_eq!(p999, ["stalled store: comfort decisions, p99.9"]);
        let passed = ["stalled store: allowed security decisions without the store"];
        assert_eq!(missed_in_stall(|stall| stall.security_passed = 1), passed);
        assert_eq!(
            missed_in_stall(|stall| stall.security_without = 0),
            passed,
            "a run without such requests misses the bar"
        );
        let trouble = missed_in_stall(|stall| stall.in_trouble = 1);
        assert_eq!(trouble, ["stalled store: answers of status 5xx"]);
        let again = ["resumed store: time until every decision is regional again"];
        assert_eq!(missed_in_stall(|stall| stall.regional_again_ms = Some(1_000.1)), again);
        assert_eq!(missed_in_stall(|stall| stall.regional_again_ms = None), again);
        let excused = missed_in_stall(|stall| (stall.odd_in_pauses, stall.requests_after) = (2, 1_999));
        assert_eq!(excused, ["resumed store: answers excused by a pause of the machine"]);
        let few = missed_in_stall(|stall| (stall.odd_in_pauses, stall.requests_after) = (2, 2_000));
        assert_eq!(few, <[&str; 0]>::default());
    }

    #[test]
    fn nan_measure_misses_its_bar() {
        assert_eq!(missed(|row| row.waited = f64::NAN, Class::Comfort).len(), 1);
    }

    #[test]
    fn a_key_without_an_end_is_named_and_a_store_without_keys_proves_nothing() {
        let stays = of_keys(&["tg2:{7}:s".to_owned()], 9);
        assert!(!stays.held && stays.found.contains("1 of 9, such as tg2:{7}:s"));
        assert!(of_keys(&[], 9).held && !of_keys(&[], 0).held);
    }
}
