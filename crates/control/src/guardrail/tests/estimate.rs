//! The estimate beside an exact replay of all traffic, of which it has only a sample.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "small numbers"
)]

use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use super::{NOW_MS, put, record, row};
use crate::guardrail::*;
use tidegate_record::RecordVerdict;
use tidegate_rules::RuleSet;
use tidegate_rules::rows::{RowKind, RuleRows};

/// How far off the share may be, in points of a hundred.
const POINTS_MAX: f64 = 10.0;

const USERS_MAX: usize = 200_000;
/// Fixed, because an estimate is off by more once in a while, and such a failure teaches nothing.
const SEED: u64 = 7;
const CASES: u32 = 4;

const HOUR_MS: u64 = 3_600_000;
const SAMPLE: f64 = 0.001;

/// Random numbers from a seed.
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn below(&mut self, bound: u64) -> u64 {
        (self.next() * bound as f64) as u64
    }
}

/// A limit, with its period and burst.
#[derive(Clone, Copy, Debug)]
struct LimitTerms {
    amount: u32,
    period_s: u32,
    burst: u32,
}

impl LimitTerms {
    fn body(self) -> String {
        let Self { amount, period_s, burst } = self;
        format!(r#"{{"key":["user"],"limit":{amount},"period":"{period_s}s","burst":{burst}}}"#)
    }
}

/// Exact model of a limit: passing requests, and the level after each.
struct Exact {
    terms: LimitTerms,
    levels: Vec<(f64, u64)>,
}

impl Exact {
    fn new(terms: LimitTerms) -> Self {
        Self { terms, levels: vec![(0.0, 0); USERS_MAX] }
    }

    /// Returns the level after a request, if it passes.
    fn passes(&mut self, user: u32, at_ms: u64) -> Option<u32> {
        let LimitTerms { amount, period_s, burst } = self.terms;
        let (level, since_ms) = &mut self.levels[user as usize];
        let leaked = f64::from(amount) * (at_ms - *since_ms) as f64 / (f64::from(period_s) * 1_000.0);
        let left = (*level - leaked).max(0.0);
        (*level, *since_ms) = (left, at_ms);
        if amount == 0 || left + 1.0 > f64::from(burst) + 1e-9 {
            return None;
        }
        *level = left + 1.0;
        Some((*level - 1e-9).ceil() as u32)
    }
}

/// The share that is newly denied, in hundredths.
#[derive(Debug)]
struct DeniedShares {
    exact: f64,
    estimated: f64,
    at_most: f64,
}

/// Returns the exact share, and its estimate from a log with this sample rate.
fn shares(
    mut traffic: Vec<(u64, u32)>,
    (before, after): (LimitTerms, LimitTerms),
    sample: f64,
    draws: &mut Draws,
) -> DeniedShares {
    traffic.sort_unstable();
    let rule_rows = RuleRows {
        revision: 1,
        rows: [row(RowKind::Rule, "a", &before.body())].into(),
        ..RuleRows::default()
    };
    let in_force = RuleSet::compile(&rule_rows, None, NOW_MS).expect("compiles");
    let change = [put(RowKind::Rule, "a", &after.body())];
    let mut test = ChangePlan::new(&in_force, &rule_rows, &change, None, NOW_MS)
        .expect("compiles")
        .begin(sample, Arc::default());
    let (mut was, mut is) = (Exact::new(before), Exact::new(after));
    // If a key has denials already, other requests may be denied instead: only additional denials
    // count.
    let mut newly_denied = vec![0_i32; USERS_MAX];
    let mut passing = 0.0;
    for (at_ms, user) in &traffic {
        let passed = was.passes(*user, *at_ms);
        let would_pass = is.passes(*user, *at_ms).is_some();
        newly_denied[*user as usize] += i32::from(passed.is_some()) - i32::from(would_pass);
        passing += f64::from(u8::from(passed.is_some()));
        let logged = match passed {
            None => record(&user.to_string(), NOW_MS + at_ms, 1.0),
            Some(_) if draws.next() >= sample => continue,
            Some(_) => record(&user.to_string(), NOW_MS + at_ms, sample),
        };
        let verdict = if passed.is_some() { RecordVerdict::Allowed } else { RecordVerdict::Denied };
        let level = passed.unwrap_or(before.burst);
        test.take(&tidegate_record::DecisionRecord { verdict, level, ..logged });
    }
    let effect = test.finish();
    let measured = effect.measured.expect("enough is logged");
    let newly_denied: f64 = newly_denied.into_iter().map(|more| f64::from(more.max(0))).sum();
    DeniedShares {
        exact: 100.0 * newly_denied / passing,
        estimated: measured.newly_denied_percent,
        at_most: measured.at_most_percent,
    }
}

fn is_near(shares: &DeniedShares) -> Result<(), TestCaseError> {
    prop_assert!((shares.exact - shares.estimated).abs() <= POINTS_MAX, "{shares:?}");
    Ok(())
}

/// Users that come once, for up to `requests_max` requests in a row.
fn bursts(users: u32, requests_max: u64, draws: &mut Draws) -> Vec<(u64, u32)> {
    let mut traffic = Vec::new();
    for user in 0..users {
        let (begin_ms, requests) = (draws.below(HOUR_MS), 1 + draws.below(requests_max));
        traffic.extend((0..requests).map(|at| (begin_ms + at * 100, user)));
    }
    traffic
}

/// Users with so many requests each, at any time of the hour.
fn steady(users: u32, first: u32, requests: u32, draws: &mut Draws) -> Vec<(u64, u32)> {
    let user = |at: u32| first + at / requests;
    (0..users * requests).map(|at| (draws.below(HOUR_MS), user(at))).collect()
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: CASES,
        max_shrink_iters: 0,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(SEED),
        ..ProptestConfig::default()
    })]

    #[test]
    fn many_keys_of_few_requests(seed: u64, amount in 0_u32..10, requests_max in 1_u64..=8) {
        let draws = &mut Draws(seed);
        let before = LimitTerms { amount: 10, period_s: 60, burst: 10 };
        let after = LimitTerms { amount, burst: amount.max(1), ..before };
        is_near(&shares(bursts(150_000, requests_max, draws), (before, after), SAMPLE, draws))?;
    }

    #[test]
    fn few_keys_of_many_requests(seed: u64, users in 5_u32..20, part in 0_u32..=120, burst in 1_u32..=200) {
        let draws = &mut Draws(seed);
        let requests = 300_000 / users;
        let before = LimitTerms { amount: requests * 2, period_s: 3_600, burst: 2_000 };
        let after = LimitTerms { amount: requests * part / 100, period_s: 3_600, burst };
        is_near(&shares(steady(users, 0, requests, draws), (before, after), SAMPLE, draws))?;
    }

    #[test]
    fn many_keys_that_come_again_and_again(seed: u64, requests in 20_u32..=60, amount in 0_u32..=40) {
        let draws = &mut Draws(seed);
        let before = LimitTerms { amount: 1_000, period_s: 3_600, burst: 1_000 };
        let after = LimitTerms { amount, burst: amount.max(1), ..before };
        let traffic = steady(500_000 / requests, 0, requests, draws);
        is_near(&shares(traffic.clone(), (before, after), 10.0 * SAMPLE, draws))?;
        // With a tenth of the records the estimate is less precise, and `at_most` shows it.
        let rough = shares(traffic, (before, after), SAMPLE, draws);
        prop_assert!(rough.exact <= rough.at_most + POINTS_MAX, "{rough:?}");
    }

    #[test]
    fn some_keys_of_many_requests_among_many_of_few(seed: u64, heavy in 1_u32..=5, amount in 0_u32..=6) {
        let draws = &mut Draws(seed);
        let before = LimitTerms { amount: 1_000, period_s: 60, burst: 1_000 };
        let after = LimitTerms { amount: amount * 100, burst: (amount * 100).max(1), ..before };
        let mut traffic = bursts(100_000, 2, draws);
        traffic.extend(steady(heavy, 100_000, 45_000, draws));
        is_near(&shares(traffic, (before, after), SAMPLE, draws))?;
    }

    #[test]
    fn keys_that_are_denied_already(seed: u64, amount in 0_u32..10) {
        let draws = &mut Draws(seed);
        let before = LimitTerms { amount: 1_000, period_s: 60, burst: 1_000 };
        let after = LimitTerms { amount: amount * 100, burst: (amount * 100).max(1), ..before };
        is_near(&shares(steady(3, 0, 70_000, draws), (before, after), SAMPLE, draws))?;
    }
}
