//! The bars of sequences and of half load.

use super::bars::{Bar, percent};
use super::half_load::HalfLoad;
use super::sequence::{Sequence, mean_first_denial};

/// The least mean position of the first denial, of the limit.
const FIRST_DENIAL_MIN: f64 = 0.98;

/// The least share that passes at half load.
const HALF_LOAD_PASSED_MIN: f64 = 0.997;

/// Largest part of the sequences, and of the answers at half load, that may be left out because the
/// origin answered late. A larger value gives a verdict on a busier machine. A smaller value covers
/// more answers.
const NOT_JUDGED_MAX: f64 = 0.05;

/// The bars of sequences.
pub(super) fn of_sequences(sequences: &[Sequence]) -> Vec<Bar> {
    let judged: Vec<&Sequence> = sequences.iter().filter(|sequence| sequence.is_judged()).collect();
    vec![
        admitted_above(&judged),
        passed_in_the_end(&judged),
        first_denial(&judged),
        inexact_remaining(&judged),
        not_judged(
            "sequences: excluded, because a decision had no origin",
            sequences.len() - judged.len(),
            sequences.len(),
        ),
    ]
}

fn admitted_above(judged: &[&Sequence]) -> Bar {
    let worst = judged.iter().max_by_key(|sequence| sequence.above());
    Bar {
        name: "sequences: admitted above the limit",
        asked: "0".to_owned(),
        found: worst.map_or_else(none, |worst| match worst.above() {
            0 => format!("0, in {} sequences", judged.len()),
            above => format!("{above}, in {}", describe(worst)),
        }),
        held: worst.is_some_and(|worst| worst.above() == 0),
    }
}

fn passed_in_the_end(judged: &[&Sequence]) -> Bar {
    let worst = judged.iter().min_by(|one, other| one.share().total_cmp(&other.share()));
    Bar {
        name: "sequences: admitted in the end, relative to the limit",
        asked: "all, in every sequence".to_owned(),
        found: worst.map_or_else(none, |worst| match worst.share() {
            share if share >= 1.0 => format!("all, in {} sequences", judged.len()),
            _ => format!("{} in {}", worst.passed, describe(worst)),
        }),
        held: worst.is_some_and(|worst| worst.share() >= 1.0),
    }
}

fn first_denial(judged: &[&Sequence]) -> Bar {
    let fleets = judged.chunk_by(|one, next| one.case.servers == next.case.servers);
    let means = fleets.filter_map(|fleet| Some((fleet.first()?.case.servers, mean_first_denial(fleet))));
    let least = means.min_by(|(_, one), (_, other)| one.total_cmp(other));
    Bar {
        name: "sequences: mean position of the first denial, relative to the limit, in every fleet",
        asked: format!("at least {}", percent(FIRST_DENIAL_MIN)),
        found: least
            .map_or_else(none, |(servers, mean)| format!("{} in the fleet of {servers}", percent(mean))),
        held: least.is_some_and(|(_, mean)| mean >= FIRST_DENIAL_MIN),
    }
}

fn inexact_remaining(judged: &[&Sequence]) -> Bar {
    let alone = judged.iter().filter(|sequence| sequence.case.servers == 1);
    let inexact = alone.clone().map(|sequence| sequence.inexact_remaining).sum::<u64>();
    let answers = alone.map(|sequence| sequence.requests).sum::<u64>();
    Bar {
        name: "sequences of one server: answers with an inexact `remaining`",
        asked: "0".to_owned(),
        found: format!("{inexact} of {answers}"),
        held: inexact == 0 && answers > 0,
    }
}

/// The bars of half load.
pub(super) fn of_half_load(rows: &[HalfLoad]) -> Vec<Bar> {
    // A share that is no number is the least of all.
    let key = |row: &HalfLoad| if row.passed.is_nan() { f64::NEG_INFINITY } else { row.passed };
    let worst = rows.iter().min_by(|one, other| key(one).total_cmp(&key(other)));
    let passed = Bar {
        name: "half load: admitted, in every row",
        asked: format!("at least {}", percent(HALF_LOAD_PASSED_MIN)),
        found: worst.map_or_else(none, |worst| {
            let HalfLoad { servers, rule, spread, passed, .. } = worst;
            format!("{} in the fleet of {servers}, {}, {}", percent(*passed), rule.name(), spread.name())
        }),
        held: worst.is_some_and(|worst| worst.passed >= HALF_LOAD_PASSED_MIN),
    };
    let elsewhere = rows.iter().map(|row| row.elsewhere as usize).sum();
    let requests = rows.iter().map(|row| row.requests as usize).sum();
    vec![passed, not_judged("half load: excluded decisions without the origin", elsewhere, requests)]
}

fn not_judged(name: &'static str, count: usize, of: usize) -> Bar {
    Bar {
        name,
        asked: format!("at most {}", percent(NOT_JUDGED_MAX)),
        found: format!("{count} of {of}"),
        held: of > 0 && count as f64 <= of as f64 * NOT_JUDGED_MAX,
    }
}

fn none() -> String {
    "no sequence was evaluated".to_owned()
}

fn describe(sequence: &Sequence) -> String {
    let case = sequence.case;
    format!("a sequence of limit {}, fleet of {}, {}", case.limit, case.servers, case.surface.name())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::half_load::{Plan, Spread};
    use crate::region::sequence::tests::sequence;

    fn missed(bars: &[Bar]) -> Vec<&'static str> {
        bars.iter().filter(|bar| !bar.held).map(|bar| bar.name).collect()
    }

    /// Exact sequences of one server and of two, and one that is changed.
    fn missed_by(change: impl FnOnce(&mut Sequence)) -> Vec<&'static str> {
        let exact = sequence(2, &[true, true, false]);
        let mut alone = exact.clone();
        alone.case.servers = 1;
        let mut sequences = vec![alone, exact.clone(), exact];
        change(&mut sequences[2]);
        missed(&of_sequences(&sequences))
    }

    #[test]
    fn exact_sequences_hold_every_bar() {
        assert_eq!(missed_by(|_| {}), <[&str; 0]>::default());
    }

    #[test]
    fn each_sequence_bar_is_missed_only_by_its_own_measure() {
        let above = missed_by(|one| *one = sequence(2, &[true, true, true, false]));
        assert_eq!(above, ["sequences: admitted above the limit"]);
        let lost = missed_by(|one| *one = sequence(100, &[[true; 99].as_slice(), &[false]].concat()));
        assert_eq!(lost, ["sequences: admitted in the end, relative to the limit"]);
        let early = missed_by(|one| *one = sequence(2, &[true, false, true]));
        assert_eq!(
            early,
            ["sequences: mean position of the first denial, relative to the limit, in every fleet"]
        );
        let inexact =
            |servers| move |one: &mut Sequence| (one.case.servers, one.inexact_remaining) = (servers, 1);
        let remaining = ["sequences of one server: answers with an inexact `remaining`"];
        assert_eq!(missed_by(inexact(1)), remaining);
        assert_eq!(missed_by(inexact(2)), <[&str; 0]>::default(), "the bar applies to one server only");
    }

    #[test]
    fn a_sequence_that_is_not_judged_misses_nothing_but_the_bar_of_those() {
        let elsewhere = missed_by(|one| {
            *one = sequence(2, &[false, true, true, true]);
            one.elsewhere = 1;
        });
        assert_eq!(elsewhere, ["sequences: excluded, because a decision had no origin"]);
        assert_eq!(missed(&of_sequences(&[])).len(), 5, "a run without sequences misses every bar");
    }

    #[test]
    fn the_fleet_with_the_earliest_denials_is_named() {
        let mut early = sequence(4, &[true, false, true, true, true]);
        early.case.servers = 12;
        let bars = of_sequences(&[sequence(2, &[true, true]), early]);
        assert_eq!(bars[2].found, "25.00 % in the fleet of 12");
    }

    fn half_load(passed: f64, elsewhere: u64) -> HalfLoad {
        HalfLoad {
            servers: 4,
            rule: Plan::QUICK.rules[1],
            spread: Spread::Skewed,
            offered_per_second: 50.0,
            requests: 1_000,
            elsewhere,
            passed,
            passed_at_busiest: passed,
            waited: 0.1,
            calls_per_request: 0.1,
            origin_cpu_us_per_request: 10.0,
        }
    }

    #[test]
    fn each_half_load_bar_is_missed_only_by_its_own_measure() {
        let missed_by = |row| missed(&of_half_load(&[half_load(1.0, 0), row]));
        assert_eq!(missed_by(half_load(0.997, 100)), <[&str; 0]>::default());
        assert_eq!(missed_by(half_load(0.9969, 0)), ["half load: admitted, in every row"]);
        assert_eq!(missed_by(half_load(f64::NAN, 0)), ["half load: admitted, in every row"]);
        assert_eq!(missed_by(half_load(1.0, 101)), ["half load: excluded decisions without the origin"]);
        assert_eq!(missed(&of_half_load(&[])).len(), 2, "a run without rows misses every bar");
        let bars = of_half_load(&[half_load(0.68, 0)]);
        assert_eq!(bars[0].found, "68.00 % in the fleet of 4, 100_in_1s_burst_10, skewed");
    }
}
