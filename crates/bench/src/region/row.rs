//! One row of the table: the figures of a case.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde::Serialize;
use tidegate::Limit;

use super::case::{Case, Class};
use super::client::{SourceKind, Timeline};
use super::exact;
use super::fleet::{BenchFleet, Counts};
use super::load::{Key, Load, SentRequest};
use super::over::{OverAdmission, PassedRequest};

#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    pub(super) class: Class,
    pub(super) algorithm: &'static str,
    pub(super) limit_per_minute: u32,
    pub(super) costs: &'static str,
    /// Offered cost, relative to the long-run rate of the limit: 4 is four times as much.
    pub(super) offered: f64,
    pub(super) keys: u32,
    pub(super) per_second: f64,
    /// Requests per second for one key at one server.
    pub(super) per_second_of_key_and_node: f64,
    pub(super) requests: u64,
    pub(super) admitted: u64,
    /// How far any interval of any key was passed, in units of cost.
    pub(super) over_units: f64,
    /// The same as a share of the limit.
    pub(super) over: f64,
    /// Units that passed, relative to one exact bucket that sees the same requests.
    pub(super) share: f64,
    /// Decisions of one server alone, because the origin did not answer in time.
    pub(super) alone: u64,
    /// Let pass, or refused, without a look at the limit.
    pub(super) undecided: u64,
    /// Share of requests that waited for a call.
    pub(super) waited: f64,
    pub(super) calls_per_request: f64,
    pub(super) updates_per_request: f64,
    pub(super) scripts_per_request: f64,
}

/// How all cases are run.
pub(super) struct Settings {
    pub(super) timeline: Timeline,
    pub(super) per_second_max: f64,
    pub(super) time: Duration,
}

pub(super) fn run(fleet: &BenchFleet, case: Case, settings: &Settings, number: u32) -> Result<Row> {
    let servers = fleet.addresses("http");
    let load = Load {
        case,
        servers: &servers,
        timeline: settings.timeline,
        keys: case.keys(settings.per_second_max),
        per_second: case.per_second(settings.per_second_max),
        time: settings.time,
        run: number,
    };
    let keys = load.prepare()?;
    let before = fleet.counts()?;
    let made = load.run(&keys)?;
    let counts = fleet.counts()?.since(before);
    let odd = made.iter().find(|one| !one.answer.is_in_order());
    ensure!(odd.is_none(), "an answer is {odd:?}");
    let judged = judge(&case.rule.limit()?, &keys, &made);
    Ok(describe(&load, &made, judged, counts))
}

/// Figures derived from the answers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct RowFigures {
    over_units: f64,
    over: f64,
    share: f64,
}

fn judge(limit: &Limit, keys: &[Key], made: &[SentRequest]) -> RowFigures {
    let mut of_key = vec![Vec::new(); keys.len()];
    for one in made {
        of_key[one.key as usize].push(*one);
    }
    let (mut found, mut passed, mut would_pass) = (RowFigures::default(), 0, 0);
    for (key, made) in keys.iter().zip(&of_key) {
        let before = key.before.iter();
        let all: Vec<PassedRequest> = before.chain(made).filter_map(SentRequest::passed).collect();
        let over = OverAdmission::of(limit, &all);
        found.over_units = found.over_units.max(over.units());
        found.over = found.over.max(over.share());
        let arrivals: Vec<_> = made.iter().filter(|one| one.is_judged()).map(SentRequest::arrival).collect();
        would_pass += exact::passes(limit, key.before.as_ref().map(SentRequest::arrival), &arrivals);
        passed += made.iter().filter_map(SentRequest::passed).map(|one| one.cost).sum::<u64>();
    }
    // If one bucket lets nothing pass, nothing is missing.
    found.share = if would_pass == 0 { 1.0 } else { passed as f64 / would_pass as f64 };
    found
}

fn describe(load: &Load<'_>, made: &[SentRequest], judged: RowFigures, counts: Counts) -> Row {
    let Load { case, .. } = load;
    let requests = made.len() as f64;
    let took = took_seconds(made);
    let cost: u64 = made.iter().map(|one| one.cost).sum();
    let count = |wanted: &dyn Fn(&SentRequest) -> bool| made.iter().filter(|one| wanted(one)).count() as u64;
    let keys = f64::from(load.keys);
    Row {
        class: case.rule.class,
        algorithm: case.rule.algorithm_name(),
        limit_per_minute: case.rule.amount,
        costs: case.costs.name(),
        offered: cost as f64 / took / keys / case.rule.per_second(),
        keys: load.keys,
        per_second: requests / took,
        per_second_of_key_and_node: requests / took / keys / load.servers.len() as f64,
        requests: made.len() as u64,
        admitted: count(&|one| one.answer.allowed),
        over_units: judged.over_units,
        over: judged.over,
        share: judged.share,
        alone: count(&|one| one.answer.source_kind == SourceKind::Alone),
        undecided: count(&|one| one.answer.source_kind == SourceKind::Nothing),
        waited: counts.waited as f64 / requests,
        calls_per_request: counts.calls as f64 / requests,
        updates_per_request: counts.updates as f64 / requests,
        scripts_per_request: counts.scripts as f64 / requests,
    }
}

/// From the first request to the last: more than was planned, if the machine could not keep up.
fn took_seconds(made: &[SentRequest]) -> f64 {
    let first = made.iter().map(|one| one.answer.sent_us).min().unwrap_or(0);
    let last = made.iter().map(|one| one.answer.answered_us).max().unwrap_or(0);
    (last - first).max(1) as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::client::Answer;

    const START_US: u64 = 1_794_000_000_000_000;

    fn made(key: u32, second: u64, allowed: bool) -> SentRequest {
        let sent_us = START_US + second * 1_000_000;
        SentRequest {
            key,
            cost: 1,
            answer: Answer {
                allowed,
                source_kind: SourceKind::Region,
                status: 200,
                sent_us,
                answered_us: sent_us + 100,
            },
        }
    }

    fn used_up(key: u32, cost: u64) -> Key {
        Key::used_up(SentRequest { cost, ..made(key, 0, true) })
    }

    fn limit() -> Limit {
        Limit::gcra(60, Duration::from_mins(1)).unwrap()
    }

    #[test]
    fn a_region_that_decides_as_one_bucket_would_is_whole_and_not_over() {
        let answers: Vec<SentRequest> = (1..=30).map(|second| made(0, second, true)).collect();
        let judged = judge(&limit(), &[used_up(0, 60)], &answers);
        assert_eq!(judged, RowFigures { over_units: 0.0, over: 0.0, share: 1.0 });
    }

    #[test]
    fn one_key_over_its_limit_and_wrong_denials_are_detected() {
        let mut answers: Vec<SentRequest> = (1..=30).map(|second| made(0, second, second % 2 == 0)).collect();
        // Three in one second, where one drains.
        answers.extend(vec![made(1, 10, true); 3]);
        let judged = judge(&limit(), &[used_up(0, 60), used_up(1, 51)], &answers);
        assert!(judged.over_units == 0.0 && judged.share < 0.6, "{judged:?}");
        let judged = judge(
            &limit(),
            &[used_up(0, 60), used_up(1, 60), used_up(2, 60)],
            &[made(1, 0, true), made(2, 30, true)],
        );
        assert!(
            (judged.over_units - 1.0).abs() < 0.01 && (judged.over - 1.0 / 60.0).abs() < 0.001,
            "{judged:?}"
        );
    }
}
