//! One request after the other for a fresh key: how many of them pass, and when the first one is
//! denied.

use std::time::Duration;

use anyhow::{Context, Result};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use serde::Serialize;
use tidegate_load::{CheckDecision, wait_until};

use super::fleet::BenchFleet;
use super::surface::{Surface, SurfaceClient};
use crate::machine;

/// Requests for each server beyond one and a half times the limit.
const EXTRA_PER_SERVER: u64 = 4;

/// A grant of an idle server returns to the origin within this time, or its units are lost.
const RETURN_TIME_MAX: Duration = Duration::from_secs(3);

/// Between a denial and the next request that waits for a grant to return. The next request after
/// one that passes is sent at once: `RETURN_TIME_MAX` limits the return of grants, and not the
/// number of requests.
const RETURN_PAUSE: Duration = Duration::from_millis(50);

/// The pause of the slow sequences, and the largest limit that has such a sequence.
const PAUSE: Duration = Duration::from_millis(3);
const PAUSED_LIMIT_MAX: u32 = 100;

/// The limit of the printed first values of `remaining`, and their number.
const SHOWN_LIMIT: u32 = 100;
const SHOWN_COUNT: usize = 12;

/// The key of the requests that open connections.
const WARM_UP_KEY: &str = "warm-up";

/// Fleets and limits of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) fleets: &'static [usize],
    pub(super) limits: &'static [u32],
}

impl Plan {
    pub(super) const WHOLE: Self =
        Self { fleets: &[1, 2, 4, 12], limits: &[1, 2, 3, 5, 10, 20, 50, 100, 400, 1_000] };
    pub(super) const QUICK: Self = Self { fleets: &[1, 2], limits: &[1, 10, 100] };

    /// The sequences of a fleet over one surface.
    fn cases(self, servers: usize, surface: Surface) -> Vec<SequenceCase> {
        let orders: &[Order] = if servers == 1 { &[Order::InTurn] } else { &[Order::InTurn, Order::Random] };
        let mut cases = Vec::new();
        for &limit in self.limits {
            for &order in orders {
                cases.push(SequenceCase { servers, surface, order, pause: Duration::ZERO, limit });
                if limit <= PAUSED_LIMIT_MAX {
                    cases.push(SequenceCase { servers, surface, order, pause: PAUSE, limit });
                }
            }
        }
        cases
    }
}

/// The order in which a sequence visits the servers of a fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Order {
    InTurn,
    Random,
}

/// A fresh key, its limit per day, and the way it is checked.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct SequenceCase {
    pub(super) servers: usize,
    pub(super) surface: Surface,
    pub(super) order: Order,
    #[serde(rename = "pause_us", serialize_with = "micros")]
    pub(super) pause: Duration,
    pub(super) limit: u32,
}

fn micros<S: serde::Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(duration.as_micros() as u64)
}

impl SequenceCase {
    /// Each fleet has a store of its own, so the key is fresh.
    fn key(&self) -> String {
        let Self { surface, order, pause, limit, .. } = self;
        format!("{surface:?}-{order:?}-{}-{limit}", pause.as_micros())
    }

    fn requests(&self) -> u64 {
        let limit = u64::from(self.limit);
        limit + limit.div_ceil(2) + EXTRA_PER_SERVER * self.servers as u64
    }

    /// Whether the first values of `remaining` are shown.
    fn is_shown(&self) -> bool {
        self.limit == SHOWN_LIMIT && self.order == Order::InTurn && self.pause.is_zero()
    }
}

/// The outcome of one sequence.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Sequence {
    #[serde(flatten)]
    pub(super) case: SequenceCase,
    pub(super) requests: u64,
    pub(super) passed: u64,
    /// Requests that passed before the first denial, if there was one.
    pub(super) passed_before_denial: Option<u64>,
    /// The first values of `remaining`.
    pub(super) first_remaining: Vec<u64>,
    /// Answers with a `remaining` other than the limit less all requests that passed.
    pub(super) inexact_remaining: u64,
    /// Decisions that the region's origin had no part in.
    pub(super) elsewhere: u64,
}

impl Sequence {
    pub(super) fn new(case: SequenceCase) -> Self {
        Self {
            case,
            requests: 0,
            passed: 0,
            passed_before_denial: None,
            first_remaining: Vec::new(),
            inexact_remaining: 0,
            elsewhere: 0,
        }
    }

    fn record(&mut self, decision: CheckDecision) {
        self.requests += 1;
        if decision.is_allowed {
            self.passed += 1;
        } else {
            self.passed_before_denial.get_or_insert(self.passed);
        }
        let exact = u64::from(self.case.limit).saturating_sub(self.passed);
        self.inexact_remaining += u64::from(decision.remaining != Some(exact));
        if self.first_remaining.len() < SHOWN_COUNT {
            self.first_remaining.extend(decision.remaining);
        }
    }

    /// Whether the region's origin took part in every decision. Other sequences are not judged.
    pub(super) fn is_judged(&self) -> bool {
        self.elsewhere == 0
    }

    /// Requests that passed above the limit.
    pub(super) fn above(&self) -> u64 {
        self.passed.saturating_sub(self.case.limit.into())
    }

    /// Requests that passed in the end, as a share of the limit.
    pub(super) fn share(&self) -> f64 {
        self.passed as f64 / f64::from(self.case.limit)
    }

    /// Requests that passed before the first denial, as a share of the limit; 1 at most.
    pub(super) fn first_denial(&self) -> f64 {
        let position = |passed: u64| passed as f64 / f64::from(self.case.limit);
        self.passed_before_denial.map_or(1.0, position).min(1.0)
    }
}

/// Runs all sequences of a fleet.
pub(super) fn run(fleet: &BenchFleet, plan: Plan) -> Result<Vec<Sequence>> {
    let mut sequences = Vec::new();
    for surface in Surface::ALL {
        eprintln!("sequences: fleet of {}, {}", fleet.servers().len(), surface.name());
        let connect = |server| surface.connect(server);
        let mut clients = fleet.servers().iter().map(connect).collect::<Result<Vec<_>>>()?;
        let largest = plan.limits.iter().copied().max().context("a plan without limits")?;
        for client in &mut clients {
            client.ask(WARM_UP_KEY, largest)?;
        }
        let mut before = fleet.counts()?;
        for case in plan.cases(clients.len(), surface) {
            let seed = sequences.len() as u64;
            let mut sequence = ask(&mut clients, case, seed).with_context(|| format!("{case:?}"))?;
            let after = fleet.counts()?;
            sequence.elsewhere = after.since(before).elsewhere;
            before = after;
            sequences.push(sequence);
        }
    }
    Ok(sequences)
}

/// Sends the requests of a sequence, each after the answer to the one before.
fn ask(clients: &mut [Box<dyn SurfaceClient>], case: SequenceCase, seed: u64) -> Result<Sequence> {
    let (key, limit) = (case.key(), u64::from(case.limit));
    let mut chance = SmallRng::seed_from_u64(seed);
    let mut sequence = Sequence::new(case);
    let mut ask_next = |sequence: &mut Sequence| -> Result<CheckDecision> {
        let server = match case.order {
            Order::InTurn => sequence.requests as usize % clients.len(),
            Order::Random => chance.random_range(0..clients.len()),
        };
        let decision = clients[server].ask(&key, case.limit)?;
        sequence.record(decision);
        Ok(decision)
    };
    for _ in 0..case.requests() {
        ask_next(&mut sequence)?;
        if !case.pause.is_zero() {
            wait_until(machine::now() + case.pause);
        }
    }
    let deadline = machine::now() + RETURN_TIME_MAX;
    while sequence.passed < limit && machine::now() < deadline {
        if !ask_next(&mut sequence)?.is_allowed {
            wait_until(machine::now() + RETURN_PAUSE);
        }
    }
    Ok(sequence)
}

/// All sequences of one fleet over one surface.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct SequenceRow {
    pub(super) servers: usize,
    pub(super) surface: Surface,
    /// Sequences that are judged.
    pub(super) sequences: usize,
    /// Sequences with a decision that the region's origin had no part in.
    pub(super) not_judged: usize,
    pub(super) most_above: u64,
    pub(super) least_share: f64,
    pub(super) mean_first_denial: f64,
    pub(super) least_first_denial: f64,
    /// `remaining` of the first answers for a limit of 100, with the servers in turn and without a
    /// pause.
    pub(super) first_remaining: Vec<u64>,
}

/// The rows of sequences, which are in order of fleets and surfaces.
pub(super) fn rows(sequences: &[Sequence]) -> Vec<SequenceRow> {
    let is_same_row = |one: &Sequence, next: &Sequence| {
        (one.case.servers, one.case.surface) == (next.case.servers, next.case.surface)
    };
    sequences.chunk_by(is_same_row).filter_map(row).collect()
}

fn row(sequences: &[Sequence]) -> Option<SequenceRow> {
    let SequenceCase { servers, surface, .. } = sequences.first()?.case;
    let judged: Vec<&Sequence> = sequences.iter().filter(|sequence| sequence.is_judged()).collect();
    let shown = sequences.iter().find(|sequence| sequence.case.is_shown());
    let least =
        |of: fn(&Sequence) -> f64| judged.iter().map(|one| of(one)).reduce(f64::min).unwrap_or(f64::NAN);
    Some(SequenceRow {
        servers,
        surface,
        sequences: judged.len(),
        not_judged: sequences.len() - judged.len(),
        most_above: judged.iter().map(|sequence| sequence.above()).max().unwrap_or(0),
        least_share: least(Sequence::share),
        mean_first_denial: mean_first_denial(&judged),
        least_first_denial: least(Sequence::first_denial),
        first_remaining: shown.map(|sequence| sequence.first_remaining.clone()).unwrap_or_default(),
    })
}

/// The mean position of the first denial. It is no number where there are no sequences.
pub(super) fn mean_first_denial(sequences: &[&Sequence]) -> f64 {
    sequences.iter().map(|sequence| sequence.first_denial()).sum::<f64>() / sequences.len() as f64
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A sequence of two servers without a pause, of which these requests pass.
    pub(in crate::region) fn sequence(limit: u32, allowed: &[bool]) -> Sequence {
        let case = SequenceCase {
            servers: 2,
            surface: Surface::Check,
            order: Order::InTurn,
            pause: Duration::ZERO,
            limit,
        };
        let mut sequence = Sequence::new(case);
        for is_allowed in allowed {
            let remaining = u64::from(limit).saturating_sub(sequence.passed + u64::from(*is_allowed));
            sequence.record(CheckDecision { is_allowed: *is_allowed, remaining: Some(remaining) });
        }
        sequence
    }

    #[test]
    fn the_first_denial_of_an_exact_sequence_is_at_its_limit() {
        let exact = sequence(3, &[true, true, true, false, false]);
        assert_eq!((exact.above(), exact.passed, exact.requests), (0, 3, 5));
        assert!(exact.first_denial() >= 1.0 && exact.share() >= 1.0);
        assert_eq!((exact.first_remaining.as_slice(), exact.inexact_remaining), (&[2, 1, 0, 0, 0][..], 0));
    }

    #[test]
    fn an_early_denial_is_seen_though_the_limit_passes_in_the_end() {
        let early = sequence(4, &[true, false, true, true, true, false]);
        assert!((early.first_denial() - 0.25).abs() < 1e-9 && early.share() >= 1.0);
        let never = sequence(2, &[true; 5]);
        assert_eq!((never.passed_before_denial, never.above()), (None, 3));
        assert!(never.first_denial() >= 1.0 && never.share() > 2.0);
        let late = sequence(2, &[true, true, true, false]);
        assert!((late.first_denial() - 1.0).abs() < 1e-9, "no more than all of the limit");
    }

    #[test]
    fn a_remaining_that_is_not_the_rest_of_the_limit_is_counted() {
        let mut one = sequence(3, &[true]);
        one.record(CheckDecision { is_allowed: true, remaining: Some(2) });
        one.record(CheckDecision { is_allowed: true, remaining: None });
        assert_eq!((one.inexact_remaining, one.first_remaining.as_slice()), (2, &[2, 2][..]));
    }

    #[test]
    fn a_row_has_the_extremes_of_its_sequences_and_leaves_out_those_that_are_not_judged() {
        let mut elsewhere = sequence(2, &[false; 4]);
        elsewhere.elsewhere = 1;
        let early = sequence(4, &[true, true, false, true]);
        let above = sequence(1, &[true, true, true]);
        let shown = sequence(SHOWN_LIMIT, &[true; SHOWN_LIMIT as usize]);
        let rows = rows(&[elsewhere, early, above, shown]);
        let [row] = &rows[..] else { panic!("{rows:?}") };
        assert_eq!((row.sequences, row.not_judged, row.most_above), (3, 1, 2));
        assert!((row.least_share - 0.75).abs() < 1e-9 && (row.least_first_denial - 0.5).abs() < 1e-9);
        assert!((row.mean_first_denial - 2.5 / 3.0).abs() < 1e-9);
        assert_eq!(row.first_remaining.len(), SHOWN_COUNT);
        assert_eq!((row.first_remaining[0], row.first_remaining[11]), (99, 88));
    }

    #[test]
    fn each_surface_of_each_fleet_has_a_row() {
        let mut other = sequence(1, &[true]);
        other.case.surface = Surface::Envoy;
        let mut larger = other.clone();
        larger.case.servers = 4;
        let rows = rows(&[sequence(1, &[true]), sequence(2, &[true]), other, larger]);
        let of = rows.iter().map(|row| (row.servers, row.surface, row.sequences));
        let expected = [(2, Surface::Check, 2), (2, Surface::Envoy, 1), (4, Surface::Envoy, 1)];
        assert!(of.eq(expected), "{rows:?}");
    }

    #[test]
    fn keys_of_a_fleet_are_fresh_and_only_small_limits_have_pauses() {
        let cases = |servers| -> Vec<SequenceCase> {
            Surface::ALL.into_iter().flat_map(|surface| Plan::WHOLE.cases(servers, surface)).collect()
        };
        let (one, several) = (cases(1), cases(4));
        assert_eq!((one.len(), several.len()), (4 * 18, 4 * 36));
        let keys: std::collections::BTreeSet<String> = several.iter().map(SequenceCase::key).collect();
        assert_eq!(keys.len(), several.len());
        assert!(several.iter().all(|case| case.pause.is_zero() || case.limit <= PAUSED_LIMIT_MAX));
        assert_eq!(several.iter().filter(|case| case.is_shown()).count(), Surface::ALL.len());
        let odd = SequenceCase { limit: 5, ..several[0] };
        assert_eq!(odd.requests(), 5 + 3 + 16);
    }
}
