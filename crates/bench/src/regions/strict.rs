//! The admission of a `strict` rule in three regions while a link between two of them flaps.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use serde::Serialize;
use tidegate::Limit;

use super::fixture::{RegionsFixture, pair_name};
use super::strict_load::{self, Outage, StrictLoad, StrictRequest};
use crate::region::client::SourceKind;
use crate::region::exact;
use crate::region::load::SentRequest;
use crate::region::over::{OverAdmission, PassedRequest};
use crate::region::tail::Tail;

/// The pair of regions with the flapping link.
pub(super) const FLAPPING: (usize, usize) = (0, 1);

pub(super) const RULE: &str = "strict";
const PER_MINUTE: u64 = 60;
const BURST: u64 = 5;
const RULES: &str = "placement = 'key'\n
[[rules]]\nname = 'strict'\nwhen = { rule = 'strict' }\nkey = ['key']\nclass = 'security'\n\
regime = 'strict'\nlimit = 60\nperiod = '1m'\nburst = 5\n";

/// The load, and the times of the link.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) requests: u64,
    pub(super) keys: u32,
    /// Connections to each region. They determine the rate, because most answers come from far
    /// away.
    pub(super) connections: usize,
    pub(super) up: Duration,
    pub(super) down: Duration,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Strict {
    pub(super) requests: u64,
    pub(super) keys: u32,
    pub(super) seconds: f64,
    pub(super) flapping: String,
    pub(super) up_seconds: f64,
    pub(super) down_seconds: f64,
    /// How often the link went.
    pub(super) flaps: usize,
    pub(super) admitted: u64,
    /// How far any interval of any key was passed, in requests.
    pub(super) over_units: f64,
    /// Requests that passed, relative to one exact bucket, of those with a reachable owner region.
    pub(super) share: f64,
    /// The same of the keys that each region decides for, in the order of the regions.
    pub(super) share_by_owner: Vec<f64>,
    /// Requests over the link that overlap an outage, all and passed.
    pub(super) unreachable: u64,
    pub(super) unreachable_passed: u64,
    /// Requests refused undecided although the owner region was reachable: its reply was late, or
    /// the connection was not restored yet.
    pub(super) refused_reachable: u64,
    /// The shortest latency of an answer that another region decided, µs.
    pub(super) far_us_min: Option<u64>,
    /// Latency of refusals of requests that were sent during an outage.
    pub(super) refusals: Option<Tail>,
}

pub(super) fn run(program: &Path, plan: &Plan) -> Result<Strict> {
    let fixture = RegionsFixture::start(program, RULES);
    let pair = pair_name(FLAPPING);
    eprintln!(
        "strict: {} requests of {} keys, {pair} up for {:?}, down for {:?}",
        plan.requests, plan.keys, plan.up, plan.down
    );
    let seen = strict_load::run(&fixture, plan)?;
    judge(&seen, plan)
}

impl StrictLoad {
    /// Whether a request had to cross the link during an outage, for any part of its time.
    fn is_cut(&self, asked: &StrictRequest) -> bool {
        let sides = (asked.region, self.owners[asked.made.key as usize]);
        let answer = asked.made.answer;
        let meets = |gone: &Outage| gone.from_us <= answer.answered_us && answer.sent_us <= gone.to_us;
        is_flapping(sides) && self.gone.iter().any(meets)
    }

    /// Returns the latency of an answer that another region decided; `None` for any other.
    fn far_us(&self, asked: &StrictRequest) -> Option<u64> {
        let answer = asked.made.answer;
        let is_far =
            asked.region != self.owners[asked.made.key as usize] && answer.source_kind == SourceKind::Region;
        is_far.then_some(answer.answered_us - answer.sent_us)
    }

    /// Whether a request over the link was sent during an outage.
    fn is_sent_into_nothing(&self, asked: &StrictRequest) -> bool {
        let sent_us = asked.made.answer.sent_us;
        self.is_cut(asked) && self.gone.iter().any(|gone| (gone.from_us..=gone.to_us).contains(&sent_us))
    }
}

fn is_flapping((region, owner): (usize, usize)) -> bool {
    FLAPPING == (region, owner) || FLAPPING == (owner, region)
}

/// Whether the request was refused without a decision.
fn is_undecided(made: &SentRequest) -> bool {
    !made.answer.allowed && made.answer.source_kind == SourceKind::Nothing
}

fn judge(seen: &StrictLoad, plan: &Plan) -> Result<Strict> {
    let limit = Limit::gcra(PER_MINUTE, Duration::from_mins(1))?.with_burst(BURST)?;
    let mut of_key = vec![Vec::new(); seen.owners.len()];
    for asked in &seen.asked {
        of_key[asked.made.key as usize].push(*asked);
    }
    let (mut over_units, mut admitted): (f64, u64) = (0.0, 0);
    let mut parts = [(0, 0); tidegate_testkit::REGIONS.len()];
    for (owner, asked) in seen.owners.iter().zip(&of_key) {
        let passed: Vec<PassedRequest> = asked.iter().filter_map(|asked| asked.made.passed()).collect();
        over_units = over_units.max(OverAdmission::of(&limit, &passed).units());
        admitted += passed.len() as u64;
        // Requests that had to cross the link during an outage count on neither side. Those that
        // passed before or after it would make up for those that did not.
        let reachable: Vec<&StrictRequest> = asked.iter().filter(|asked| !seen.is_cut(asked)).collect();
        let passed = reachable.iter().filter(|asked| asked.made.passed().is_some()).count() as u64;
        let arrivals: Vec<_> = reachable.iter().map(|asked| asked.made.arrival()).collect();
        let part = &mut parts[*owner];
        *part = (part.0 + passed, part.1 + exact::passes(&limit, None, &arrivals));
    }
    let share = |(passed, would_pass): (u64, u64)| {
        if would_pass == 0 { 1.0 } else { passed as f64 / would_pass as f64 }
    };
    let all = parts.iter().fold((0, 0), |sum, part| (sum.0 + part.0, sum.1 + part.1));
    let count = |wanted: &dyn Fn(&&StrictRequest) -> bool| seen.asked.iter().filter(wanted).count() as u64;
    let refusals =
        seen.asked.iter().filter(|asked| seen.is_sent_into_nothing(asked) && is_undecided(&asked.made));
    let took_us = refusals.map(|asked| asked.made.answer.answered_us - asked.made.answer.sent_us);
    Ok(Strict {
        requests: seen.asked.len() as u64,
        keys: plan.keys,
        seconds: seconds(&seen.asked),
        flapping: pair_name(FLAPPING),
        up_seconds: plan.up.as_secs_f64(),
        down_seconds: plan.down.as_secs_f64(),
        flaps: seen.gone.len(),
        admitted,
        over_units,
        share: share(all),
        share_by_owner: parts.map(share).into(),
        unreachable: count(&|asked| seen.is_cut(asked)),
        unreachable_passed: count(&|asked| seen.is_cut(asked) && asked.made.answer.allowed),
        refused_reachable: count(&|asked| !seen.is_cut(asked) && is_undecided(&asked.made)),
        far_us_min: seen.asked.iter().filter_map(|asked| seen.far_us(asked)).min(),
        refusals: Tail::of(took_us).ok(),
    })
}

/// Returns the time from the first request to the last answer.
fn seconds(asked: &[StrictRequest]) -> f64 {
    let first = asked.iter().map(|asked| asked.made.answer.sent_us).min().unwrap_or(0);
    let last = asked.iter().map(|asked| asked.made.answer.answered_us).max().unwrap_or(0);
    (last - first) as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::client::Answer;

    const START_US: u64 = 1_794_000_000_000_000;
    const SECOND_US: u64 = 1_000_000;

    fn plan() -> Plan {
        let (up, down) = (Duration::from_secs(10), Duration::from_secs(2));
        Plan { requests: 10, keys: 2, connections: 1, up, down }
    }

    fn asked(region: usize, key: u32, second: u64, allowed: bool) -> StrictRequest {
        let sent_us = START_US + second * SECOND_US;
        let source_kind = if allowed { SourceKind::Region } else { SourceKind::Nothing };
        let answer = Answer { allowed, source_kind, status: 200, sent_us, answered_us: sent_us + 250_000 };
        StrictRequest { region, made: SentRequest { key, cost: 1, answer } }
    }

    /// Two keys, owned by the second region and the third. The link between the first and the
    /// second is down from 10 s to 12 s.
    fn seen(asked: Vec<StrictRequest>) -> StrictLoad {
        let gone = Outage { from_us: START_US + 10 * SECOND_US, to_us: START_US + 12 * SECOND_US };
        StrictLoad { owners: vec![1, 2], asked, gone: vec![gone] }
    }

    #[test]
    fn only_requests_with_a_reachable_owner_count_as_missing() {
        let cut = vec![asked(0, 0, 0, true), asked(0, 0, 11, false)];
        let found = judge(&seen(cut), &plan()).unwrap();
        assert!((found.share - 1.0).abs() < 1e-9 && found.unreachable == 1 && found.refused_reachable == 0);
        assert_eq!(found.refusals.map(|tail| tail.requests), Some(1));
        for reachable in [asked(0, 0, 13, false), asked(2, 0, 11, false), asked(0, 1, 11, false)] {
            let found = judge(&seen(vec![asked(0, 0, 0, true), reachable]), &plan()).unwrap();
            assert!((found.share - 0.5).abs() < 1e-9 && found.refused_reachable == 1, "{found:?}");
        }
    }

    #[test]
    fn admissions_across_the_outage_do_not_offset_denials() {
        // One of the two requests with a reachable owner is missing. Two more passed that overlap
        // the outage.
        let cut = [asked(0, 0, 10, true), asked(0, 0, 12, true)];
        let reachable = [asked(2, 0, 0, true), asked(2, 0, 5, false)];
        let found = judge(&seen([&reachable[..], &cut].concat()), &plan()).unwrap();
        assert_eq!((found.admitted, found.unreachable_passed), (3, 2));
        assert!((found.share - 0.5).abs() < 1e-9, "{found:?}");
    }

    #[test]
    fn one_request_over_the_limit_is_seen_whichever_regions_let_it_pass() {
        let of = |count: usize| (0..count).map(|number| asked(number % 3, 1, 0, true)).collect();
        let kept = judge(&seen(of(5)), &plan()).unwrap();
        assert!(kept.over_units == 0.0 && kept.admitted == 5);
        assert_eq!(kept.far_us_min, Some(250_000), "two of three owners are remote");
        let over = judge(&seen(of(6)), &plan()).unwrap();
        // A quarter of one drains while a request is under way.
        assert!((over.over_units - 0.75).abs() < 0.01, "{over:?}");
    }

    #[test]
    fn request_in_flight_at_a_cut_counts_as_unreachable() {
        let found = judge(&seen(vec![asked(1, 0, 11, true)]), &plan()).unwrap();
        assert_eq!((found.unreachable, found.far_us_min), (0, None), "a region always reaches itself");
        let mut late = asked(0, 0, 9, false);
        late.made.answer.answered_us = START_US + 10 * SECOND_US;
        let found = judge(&seen(vec![late]), &plan()).unwrap();
        assert_eq!(
            (found.unreachable, found.refusals),
            (1, None),
            "the link was up when the request was sent"
        );
    }
}
