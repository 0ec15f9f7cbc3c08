//! An origin that stalls under load, as Redis does when its machine swaps or a snapshot takes too
//! long. The run measures the latency of decisions meanwhile, requests that must not pass, and the
//! time until the region decides again.

use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use serde::Serialize;
use tidegate::Algorithm;
use tidegate_load::wait_until;
use tidegate_testkit::Signal;

use super::case::{Case, Class, Costs, Offer, Rule};
use super::client::{Answer, SourceKind, Timeline};
use super::fleet::BenchFleet;
use super::load::{Load, SentRequest};
use super::pauses::Pauses;
use super::tail::Tail;
use crate::machine;

/// Keys of each class, and a limit per minute that none of them reaches.
const KEYS: u32 = 1_000;
const PER_MINUTE: u32 = 100_000;

/// Of so many requests one is of a security rule.
const SECURITY_ONE_IN: f64 = 8.0;

/// Seconds before the stall in which late answers are counted, as the machine's own.
const SECONDS_BEFORE: u64 = 8;

const SECOND_US: u64 = 1_000_000;

/// From when on a decision took long, µs: one in a thousand may.
pub(super) const SLOW_US: u64 = 25_000;

/// The length of each phase, and the constant rate of requests.
pub(super) struct Plan {
    /// Connections are made and keys get warm.
    before: Duration,
    stalled: Duration,
    after: Duration,
    pub(super) per_second: f64,
}

impl Plan {
    pub(super) const WHOLE: Self = Self {
        before: Duration::from_secs(12),
        stalled: Duration::from_secs(30),
        after: Duration::from_secs(8),
        per_second: 2_000.0,
    };

    pub(super) const QUICK: Self = Self {
        before: Duration::from_secs(1),
        stalled: Duration::from_secs(3),
        after: Duration::from_secs(2),
        per_second: 300.0,
    };

    fn time(&self) -> Duration {
        self.before + self.stalled + self.after
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Stall {
    /// How long the store stood still.
    pub(super) seconds: f64,
    pub(super) requests: u64,
    pub(super) comfort_before: Tail,
    pub(super) comfort_meanwhile: Tail,
    /// Requests of security rules that were decided without the origin, all and passed.
    pub(super) security_without: u64,
    pub(super) security_passed: u64,
    /// Of status 5xx.
    pub(super) in_trouble: u64,
    /// Requests that the region did not decide, for each of the last seconds before the stall: the
    /// machine's own lateness.
    pub(super) odd_before: Vec<u64>,
    /// The same for each second after the resume, all requests since then, and the time of the last
    /// such answer.
    pub(super) odd_after: Vec<u64>,
    pub(super) requests_after: u64,
    pub(super) last_odd_ms: f64,
    /// How often a core of the machine stood still, and how many of the odd ones after the first
    /// second met that.
    pub(super) pauses: usize,
    pub(super) odd_in_pauses: u64,
    /// Comfort decisions that took long while the store stood still, and how many of them met such
    /// a pause. All of them count.
    pub(super) slow: u64,
    pub(super) slow_in_pauses: u64,
    /// Time from the resume until every answer was regional, without the excused ones. `None` if no
    /// request came after the last other answer.
    pub(super) regional_again_ms: Option<f64>,
}

/// When the store stood still.
#[derive(Clone, Copy, Debug)]
struct StallSpan {
    from_us: u64,
    until_us: u64,
}

/// Runs the stall. Also returns the fleet, so that the caller can inspect its origin.
pub(super) fn run(program: &Path, plan: &Plan) -> Result<(Stall, BenchFleet)> {
    let fleet = BenchFleet::start(program, 1);
    eprintln!("stall: store stalled for {:?}, {} requests/s", plan.stalled, plan.per_second);
    let timeline = Timeline::new();
    let (asked, pauses) = Pauses::watch(timeline, || ask_throughout(&fleet, timeline, plan))?;
    let (comfort, security, stood) = asked?;
    Ok((judge(stood, &comfort, &security, &pauses)?, fleet))
}

/// Returns the answers to requests of comfort and of security rules, and the span of the stall.
fn ask_throughout(
    fleet: &BenchFleet,
    timeline: Timeline,
    plan: &Plan,
) -> Result<(Vec<Answer>, Vec<Answer>, StallSpan)> {
    let of_security = plan.per_second / SECURITY_ONE_IN;
    thread::scope(|scope| {
        let comfort =
            scope.spawn(|| ask(fleet, timeline, Class::Comfort, plan.per_second - of_security, plan.time()));
        let security = scope.spawn(|| ask(fleet, timeline, Class::Security, of_security, plan.time()));
        let stood = stand_still(fleet, timeline, plan);
        let answers = |asking: thread::ScopedJoinHandle<'_, Result<Vec<Answer>>>| {
            asking.join().map_err(|_| anyhow!("a client panicked"))?
        };
        Ok((answers(comfort)?, answers(security)?, stood?))
    })
}

fn ask(
    fleet: &BenchFleet,
    timeline: Timeline,
    class: Class,
    per_second: f64,
    time: Duration,
) -> Result<Vec<Answer>> {
    let rule = Rule { class, algorithm: Algorithm::Gcra, amount: PER_MINUTE };
    let load = Load {
        case: Case { rule, costs: Costs::One, offer: Offer::Half },
        servers: &fleet.addresses("http"),
        timeline,
        keys: KEYS,
        per_second,
        time,
        run: 1,
    };
    let made = load.run(&load.prepare()?)?;
    Ok(made.into_iter().map(|SentRequest { answer, .. }| answer).collect())
}

fn stand_still(fleet: &BenchFleet, timeline: Timeline, plan: &Plan) -> Result<StallSpan> {
    let redis = fleet.redis.as_ref().context("a fleet with a store")?;
    let started = machine::now();
    wait_until(started + plan.before);
    let from_us = timeline.now_us();
    redis.signal(Signal::STOP);
    wait_until(started + plan.before + plan.stalled);
    let until_us = timeline.now_us();
    redis.signal(Signal::CONT);
    Ok(StallSpan { from_us, until_us })
}

fn judge(stood: StallSpan, comfort: &[Answer], security: &[Answer], pauses: &Pauses) -> Result<Stall> {
    let StallSpan { from_us, until_us } = stood;
    let all = || comfort.iter().chain(security);
    let tail = |is_meant: &dyn Fn(&Answer) -> bool| {
        Tail::of(comfort.iter().filter(|one| is_meant(one)).map(|one| one.answered_us - one.sent_us))
    };
    let of = |from_us: u64, until_us: u64| -> Vec<&Answer> {
        all().filter(|one| (from_us..until_us).contains(&one.sent_us)).collect()
    };
    let begun_us = all().map(|one| one.sent_us).min().unwrap_or(from_us);
    let looked_at_us = begun_us.max(from_us.saturating_sub(SECONDS_BEFORE * SECOND_US));
    let (before, after) = (of(looked_at_us, from_us), of(until_us, u64::MAX));
    // In the first second nothing is excused: the origin itself has most to do then.
    let is_excused = |one: &Answer| {
        one.sent_us >= until_us + SECOND_US && pauses.touch(one.sent_us, one.answered_us) && !is_regional(one)
    };
    let judged: Vec<&Answer> = after.iter().copied().filter(|one| !is_excused(one)).collect();
    let without = security.iter().filter(|one| !is_regional(one));
    let is_slow =
        |one: &&Answer| (from_us..until_us).contains(&one.sent_us) && one.answered_us - one.sent_us > SLOW_US;
    let slow: Vec<&Answer> = comfort.iter().filter(is_slow).collect();
    Ok(Stall {
        seconds: (until_us - from_us) as f64 / 1e6,
        requests: all().count() as u64,
        comfort_before: tail(&|one| one.sent_us < from_us).context("before the stall")?,
        comfort_meanwhile: tail(&|one| (from_us..until_us).contains(&one.sent_us))
            .context("during the stall")?,
        security_without: without.clone().count() as u64,
        security_passed: without.filter(|one| one.allowed).count() as u64,
        in_trouble: all().filter(|one| one.is_of_trouble()).count() as u64,
        odd_before: odd_each_second(looked_at_us, &before),
        odd_after: odd_each_second(until_us, &after),
        requests_after: after.len() as u64,
        last_odd_ms: last_odd_us(until_us, &after) as f64 / 1e3,
        pauses: pauses.count(),
        odd_in_pauses: (after.len() - judged.len()) as u64,
        slow: slow.len() as u64,
        slow_in_pauses: slow.iter().filter(|one| pauses.touch(one.sent_us, one.answered_us)).count() as u64,
        regional_again_ms: regional_again_us(until_us, &judged).map(|us| us as f64 / 1e3),
    })
}

fn is_regional(answer: &Answer) -> bool {
    answer.source_kind == SourceKind::Region
}

/// Of each second from `from_us` to the last of these, how many were not regional.
fn odd_each_second(from_us: u64, answers: &[&Answer]) -> Vec<u64> {
    let second = |one: &Answer| ((one.sent_us - from_us) / SECOND_US) as usize;
    let seconds = answers.iter().map(|one| second(one) + 1).max().unwrap_or(0);
    let mut odd = vec![0; seconds];
    answers.iter().filter(|one| !is_regional(one)).for_each(|one| odd[second(one)] += 1);
    odd
}

/// Returns the time from `from_us` to the last answer that was not regional.
fn last_odd_us(from_us: u64, answers: &[&Answer]) -> u64 {
    let odd = answers.iter().filter(|one| !is_regional(one));
    odd.map(|one| one.answered_us - from_us).max().unwrap_or(0)
}

/// Returns the same time; `None` if no request came after it. Later answers are regional.
fn regional_again_us(from_us: u64, answers: &[&Answer]) -> Option<u64> {
    let last_us = last_odd_us(from_us, answers);
    answers.iter().any(|one| one.sent_us >= from_us + last_us).then_some(last_us)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STOOD: StallSpan = StallSpan { from_us: 10_000_000, until_us: 20_000_000 };

    fn answer(at_ms: u64, took_us: u64, source_kind: SourceKind) -> Answer {
        let sent_us = at_ms * 1_000;
        Answer { allowed: true, source_kind, status: 200, sent_us, answered_us: sent_us + took_us }
    }

    fn refusal(at_ms: u64) -> Answer {
        Answer { allowed: false, ..answer(at_ms, 20, SourceKind::Nothing) }
    }

    fn good() -> (Vec<Answer>, Vec<Answer>) {
        let comfort = vec![
            answer(9_500, 400, SourceKind::Region),
            answer(10_000, 900, SourceKind::Region),
            answer(15_000, 700, SourceKind::Alone),
            answer(20_100, 50_000, SourceKind::Alone),
            answer(20_200, 500, SourceKind::Region),
        ];
        (
            comfort,
            vec![
                answer(9_999, 300, SourceKind::Region),
                refusal(12_000),
                answer(21_000, 300, SourceKind::Region),
            ],
        )
    }

    #[test]
    fn each_phase_is_judged_by_requests_sent_in_it() {
        let (comfort, security) = good();
        let stall = judge(STOOD, &comfort, &security, &Pauses::default()).unwrap();
        assert_eq!(stall.comfort_before, Tail { requests: 1, p99_us: 400, p999_us: 400 });
        assert_eq!(stall.comfort_meanwhile, Tail { requests: 2, p99_us: 900, p999_us: 900 });
        assert_eq!((stall.requests, stall.in_trouble), (8, 0));
        assert_eq!((stall.security_without, stall.security_passed), (1, 0));
        assert_eq!(stall.odd_before, [0]);
        assert_eq!((stall.requests_after, stall.odd_after), (3, vec![1, 0]));
        assert_eq!(stall.regional_again_ms, Some(150.0));
        assert!((stall.seconds - 10.0).abs() < 1e-9 && (stall.last_odd_ms - 150.0).abs() < 1e-9);
    }

    #[test]
    fn admissions_without_the_store_and_errors_count_in_all_phases() {
        let (mut comfort, mut security) = good();
        security.push(answer(15_000, 300, SourceKind::Alone));
        security.push(answer(21_500, 300, SourceKind::Nothing));
        comfort.push(Answer { status: 500, ..refusal(9_000) });
        comfort.push(Answer { status: 503, ..refusal(20_050) });
        let stall = judge(STOOD, &comfort, &security, &Pauses::default()).unwrap();
        assert_eq!((stall.security_without, stall.security_passed, stall.in_trouble), (3, 2, 2));
    }

    #[test]
    fn region_without_final_regional_answers_has_not_recovered() {
        let (odd, fine) =
            (answer(20_900, 30_000, SourceKind::Nothing), answer(20_950, 300, SourceKind::Region));
        assert_eq!(regional_again_us(20_000_000, &[&odd, &fine, &odd]), Some(930_000));
        let early = answer(20_910, 300, SourceKind::Region);
        assert_eq!(regional_again_us(20_000_000, &[&early, &odd]), None);
        assert_eq!(regional_again_us(20_000_000, &[&fine]), Some(0));
        assert_eq!(regional_again_us(20_000_000, &[]), None);
    }

    #[test]
    fn non_regional_answers_are_counted_per_second() {
        let (mut comfort, security) = good();
        comfort.extend([answer(3_100, 300, SourceKind::Alone), answer(3_200, 300, SourceKind::Nothing)]);
        comfort.extend([answer(1_900, 300, SourceKind::Alone), answer(23_999, 300, SourceKind::Alone)]);
        let stall = judge(STOOD, &comfort, &security, &Pauses::default()).unwrap();
        assert_eq!(stall.odd_before, [0, 2, 0, 0, 0, 0, 0, 0], "the eight seconds before");
        assert_eq!(stall.odd_after, [1, 0, 0, 1]);
    }

    #[test]
    fn answers_in_pauses_are_separate_after_the_first_second() {
        let (mut comfort, security) = good();
        comfort.extend([answer(24_000, 21_000, SourceKind::Alone), answer(25_000, 400, SourceKind::Region)]);
        let again = |pauses: &Pauses| {
            let stall = judge(STOOD, &comfort, &security, pauses).unwrap();
            assert!((stall.last_odd_ms - 4_021.0).abs() < 1e-9, "`last_odd_ms` includes excused decisions");
            (stall.odd_in_pauses, stall.regional_again_ms)
        };
        assert_eq!(again(&Pauses::default()), (0, Some(4_021.0)));
        assert_eq!(again(&Pauses::at(24_010_000, 24_020_500)), (1, Some(150.0)));
        assert_eq!(
            again(&Pauses::at(24_022_000, 24_090_000)),
            (0, Some(4_021.0)),
            "the decision was made before the pause"
        );
        assert_eq!(
            again(&Pauses::at(20_100_000, 20_149_000)),
            (0, Some(4_021.0)),
            "a pause in the first second excuses nothing"
        );
    }

    #[test]
    fn slow_answers_during_a_stall_are_counted_with_pauses() {
        let (mut comfort, security) = good();
        comfort
            .extend([answer(11_000, 25_001, SourceKind::Alone), answer(12_000, 25_000, SourceKind::Alone)]);
        comfort.extend([answer(13_000, 30_000, SourceKind::Alone), answer(9_000, 30_000, SourceKind::Alone)]);
        let stall = judge(STOOD, &comfort, &security, &Pauses::at(11_010_000, 11_020_000)).unwrap();
        assert_eq!((stall.slow, stall.slow_in_pauses), (2, 1));
    }

    #[test]
    fn a_stall_in_which_nothing_was_asked_is_no_finding() {
        let (comfort, security) = good();
        assert!(judge(STOOD, &comfort[..1], &security, &Pauses::default()).is_err());
    }
}
