//! Back-test of recent decisions. A record contains the verdict under the rules in force; meters
//! give the verdict under the planned rules.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

use tidegate_core::{LIMITS_PER_REQUEST_MAX, Limit};
use tidegate_record::{DecisionRecord, RecordVerdict, SHED_SOURCE};
use tidegate_rules::{Dimensions, Mode, RuleMatch, RuleSet, SecretHeaders};

use super::approval::{ApprovedEffect, DeniedShares, in_short};
use super::keys::{Guess, Keys, SampledRecord, SpentLevel};
use super::meter::{KeyMeter, Stream};
use super::plan::{AFTER_ALL_MS, ChangeScope, TightenedRule};
use super::rate::{Rate, as_real};
use super::{
    ChangeEffect, Measurement, NAMES_MAX, RECORDS_MAX, RuleMeasurement, UncertainRule, UnknownReason,
};

/// Minimum records of the rules of a change for a meaningful share. Higher: more certain; more
/// changes without a measurement.
pub(super) const RECORDS_MIN: u64 = 100;

/// Maximum relative error of the number of passing requests, as one standard deviation. Lower: more
/// certain; more changes without a measurement.
const DOUBT_MAX: f64 = 0.1;

/// Maximum number of stored pairs of record and rule, about 200 bytes each. Bounds the memory if
/// many rules of a change apply to one request. Further records are ignored.
const HELD_MAX: usize = 1_000_000;

/// Minimum share of a limit's rate that a steady key uses on average.
const STEADY_FROM: f64 = 0.5;

/// Records of a replay that is full. It ends before the next block of the log, so it may have fewer
/// than `RECORDS_MAX`.
const FULL_RECORDS: u64 = RECORDS_MAX / 2;

/// Lower bound of sample rates and of divisors.
const NEARLY_NOTHING: f64 = 1e-6;

/// Two sets, and the requests that rules of a change apply to.
#[derive(Debug)]
pub(crate) struct BackTest {
    before: RuleSet,
    after: RuleSet,
    /// Times at which other overrides apply than now; empty if none expires.
    moments: Vec<u64>,
    /// Common prefix of the versions of `before`, with any emergencies; `None` if it was not in
    /// force.
    version: Option<String>,
    scope: ChangeScope,
    sample_rate: f64,
    /// Time that the records of a rule must cover.
    evidence_ms: u64,
    /// The approved effect of the change.
    approved: Arc<ApprovedEffect>,
    records: u64,
    held: usize,
    /// Times of the first and the last record.
    window_ms: Option<(u64, u64)>,
    seen: Vec<LoggedRequest>,
    /// The same requests under the rules as they will be once overrides have ended, if any do.
    later: Vec<LoggedRequest>,
}

/// A request of the log that a rule of the change applies to.
#[derive(Debug)]
struct LoggedRequest {
    at_ms: u64,
    cost: u64,
    verdict: RecordVerdict,
    /// Number of requests that the record represents.
    drawn_from: f64,
    /// Whether the rules in force decided it, so that their verdict is known.
    is_known: bool,
    /// The rule that decided it, if the change touches that rule, and its level then.
    decided_by: Option<u32>,
    level: u32,
    /// Whether more enforced rules would apply than one check may have: it would be denied.
    is_undecidable: bool,
    under: Box<[RuleSides]>,
}

/// A rule of the change that applies to a request, before and after the change.
#[derive(Debug)]
struct RuleSides {
    rule: u32,
    before: Option<Side>,
    /// Only if it is enforced.
    after: Option<Side>,
}

impl RuleSides {
    /// Whether a request is counted under the same key, before and after.
    fn is_same_key(&self) -> bool {
        self.before.zip(self.after).is_some_and(|(before, after)| before.place == after.place)
    }
}

#[derive(Clone, Copy, Debug)]
struct Side {
    place: u64,
    limit: Limit,
    is_enforced: bool,
    /// Whether the rule was evaluated: of many shadow rules, only the first are.
    is_asked: bool,
}

impl Side {
    fn rate(&self) -> Rate {
        Rate::of(&self.limit)
    }
}

impl LoggedRequest {
    fn passed(&self) -> bool {
        self.verdict != RecordVerdict::Denied
    }

    fn is_drawn(&self) -> bool {
        self.verdict == RecordVerdict::Allowed
    }

    /// Returns whether it passes the planned rule, if the record shows that.
    fn recorded(&self, under: &RuleSides) -> Option<bool> {
        let (before, after) = (under.before?, under.after?);
        if !(under.is_same_key() && before.is_asked && self.is_known && self.passed()) {
            return None;
        }
        match !before.is_enforced && self.verdict == RecordVerdict::ShadowDenied {
            false => after.rate().covers(before.rate()).then_some(true),
            // The record does not show which other shadow rules let it pass.
            true if self.decided_by != Some(under.rule) => None,
            true => before.rate().covers(after.rate()).then_some(false),
        }
    }

    /// Returns the level of its key under the rule in force, if the record shows it.
    fn spent(&self, under: &RuleSides) -> Option<SpentLevel> {
        let has_level = self.is_known && self.passed() && self.decided_by == Some(under.rule);
        let before = under.before.filter(|before| has_level && before.is_enforced)?;
        Some(SpentLevel { level: self.level, rate: before.rate() })
    }

    /// Returns the maximum share of it that passes the planned rule, by the level that its key
    /// reached in a burst. The share is 0 if the level exceeds the new burst. A level at the
    /// current burst may have lasted long, so the draining part passes.
    fn most(&self, under: &RuleSides, before: &Model) -> f64 {
        // With a complete log, meters are more exact; so they are for steady keys.
        if !self.is_drawn() || self.drawn_from <= 1.0 || !under.is_same_key() {
            return 1.0;
        }
        let (Some(spent), Some(was), Some(after)) = (self.spent(under), under.before, under.after) else {
            return 1.0;
        };
        if !after.rate().is_below(spent.level) || before.is_steady(&was) {
            return 1.0;
        }
        let cost = u32::try_from(self.cost).unwrap_or(u32::MAX);
        let is_full = was.rate().is_below(spent.level.saturating_add(cost));
        if is_full { after.rate().part_of(was.rate()) } else { 0.0 }
    }

    /// Whether it can never pass a limit.
    fn is_above(&self, limit: &Limit) -> bool {
        limit.amount() == 0 || self.cost > u64::from(limit.burst())
    }

    /// Returns the minimum share that still passes, by the limits alone.
    fn by_limits(&self) -> f64 {
        let part = |under: &RuleSides| match (under.before, under.after) {
            (_, Some(after)) if self.is_above(&after.limit) => 0.0,
            (Some(before), Some(after)) => after.rate().part_of(before.rate()),
            _ => 1.0,
        };
        self.under.iter().map(part).fold(1.0, f64::min)
    }
}

impl BackTest {
    pub(super) fn new(
        (before, after, version): (RuleSet, RuleSet, Option<String>),
        scope: ChangeScope,
        moments: Vec<u64>,
        sample_rate: f64,
        approved: Arc<ApprovedEffect>,
    ) -> Self {
        Self {
            version,
            before,
            after,
            moments,
            scope,
            sample_rate,
            evidence_ms: 0,
            approved,
            records: 0,
            held: 0,
            window_ms: None,
            seen: Vec::new(),
            later: Vec::new(),
        }
    }

    /// Requires that the records of a rule cover a time. On an idle server, an author could
    /// otherwise make all of them at once.
    pub(crate) fn requiring(self, evidence_ms: u64) -> Self {
        Self { evidence_ms, ..self }
    }

    /// Leaves out rules for which the change names credentials other than by their digests: no
    /// record matches those.
    pub(crate) fn without_credentials(mut self, secrets: &SecretHeaders) -> Self {
        let hidden = |mut tighter: TightenedRule| {
            let named = tighter.named.iter().find(|dimension| secrets.is_secret(dimension)).cloned();
            tighter.not_measured = tighter.not_measured.or(named.map(UnknownReason::Credential));
            tighter
        };
        self.scope.tighter = self.scope.tighter.iter().cloned().map(hidden).collect();
        self
    }

    /// Takes the next record, in time order, and returns whether more are wanted.
    pub(crate) fn take(&mut self, record: &DecisionRecord) -> bool {
        self.records += 1;
        let (first_ms, _) = self.window_ms.unwrap_or((record.at_ms, record.at_ms));
        self.window_ms = Some((first_ms, record.at_ms.max(first_ms)));
        if let Some((seen, later)) = self.see(record).filter(|(seen, _)| !seen.under.is_empty()) {
            self.held += seen.under.len() + later.as_ref().map_or(0, |later| later.under.len());
            self.seen.push(seen);
            self.later.extend(later);
        }
        self.records < RECORDS_MAX && self.held < HELD_MAX
    }

    /// A request as it is now and, if overrides end, as it will be.
    fn see(&self, record: &DecisionRecord) -> Option<(LoggedRequest, Option<LoggedRequest>)> {
        // Limits that come with a request have no rules, and no rule decided a shed request.
        // Without all dimensions the matching rules are unknown.
        let is_of_rules = !record.set_version.is_empty() && record.source != SHED_SOURCE;
        if !is_of_rules || record.dimensions_cut {
            return None;
        }
        let pairs = record.dimensions.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let dimensions = Dimensions::from_record(pairs).ok()?;
        let before: Vec<RuleMatch<'_, '_>> =
            self.before.matching(&record.tenant, &dimensions, record.at_ms).collect();
        let after: Vec<RuleMatch<'_, '_>> =
            self.after.matching(&record.tenant, &dimensions, record.at_ms).collect();
        // The verdict of an emergency is not that of the rules.
        let is_as_ruled = record.replaced_by.is_empty()
            || before.iter().any(|found| found.terms.override_name == Some(record.replaced_by.as_str()));
        let is_in_force = |version: &String| record.set_version.starts_with(version);
        let is_known = is_as_ruled && self.version.as_ref().is_some_and(is_in_force);
        let later = (!self.moments.is_empty()).then(|| {
            let ended = self.ended(&before, &record.tenant, &dimensions);
            let is_known = is_known && self.is_same(&before, &ended);
            self.seen(record, &ended, &self.strictest(&record.tenant, &dimensions), is_known)
        });
        Some((self.seen(record, &before, &after, is_known), later))
    }

    fn seen(
        &self,
        record: &DecisionRecord,
        before: &[RuleMatch<'_, '_>],
        after: &[RuleMatch<'_, '_>],
        is_known: bool,
    ) -> LoggedRequest {
        let enforced = after.iter().filter(|found| found.terms.mode == Mode::Enforce).count();
        LoggedRequest {
            at_ms: record.at_ms,
            cost: record.cost,
            verdict: record.verdict,
            drawn_from: 1.0 / record.sample_rate.clamp(NEARLY_NOTHING, 1.0),
            is_known,
            decided_by: self.scope.number_of(&record.rule),
            level: record.level,
            is_undecidable: enforced > LIMITS_PER_REQUEST_MAX,
            under: self.under(&record.tenant, before, after),
        }
    }

    /// Returns the terms of a request before the change, once overrides that would expire without
    /// the change have expired. Overrides that the change cuts short still apply.
    fn ended<'s, 'd>(
        &'s self,
        now: &[RuleMatch<'s, 'd>],
        tenant: &str,
        dimensions: &'d Dimensions<'_>,
    ) -> Vec<RuleMatch<'s, 'd>> {
        let is_cut_short = |name: &str| self.scope.cut_short.contains(name);
        // The matching rules do not depend on the time, only their terms do.
        let both = self.before.matching(tenant, dimensions, AFTER_ALL_MS).zip(now);
        let before = |(ended, now): (RuleMatch<'s, 'd>, &RuleMatch<'s, 'd>)| {
            if now.terms.override_name.is_some_and(is_cut_short) { now.clone() } else { ended }
        };
        both.map(before).collect()
    }

    /// Whether the same holds for a request by the rules of the change.
    fn is_same(&self, now: &[RuleMatch<'_, '_>], later: &[RuleMatch<'_, '_>]) -> bool {
        let is_touched = |found: &RuleMatch<'_, '_>| self.scope.number_of(&found.rule.name).is_some();
        now.iter().zip(later).all(|(now, later)| !is_touched(now) || now.terms == later.terms)
    }

    /// Returns the strictest terms of a request after the change, as overrides expire. An override
    /// that expires soon would hide the terms that follow.
    fn strictest<'s, 'd>(&'s self, tenant: &str, dimensions: &'d Dimensions<'_>) -> Vec<RuleMatch<'s, 'd>> {
        let mut all: Vec<RuleMatch<'s, 'd>> = Vec::new();
        for moment_ms in &self.moments {
            for (at, found) in self.after.matching(tenant, dimensions, *moment_ms).enumerate() {
                match all.get_mut(at) {
                    None => all.push(found),
                    Some(known) if allowance(&found) < allowance(known) => *known = found,
                    Some(_) => {}
                }
            }
        }
        all
    }

    /// The rules of the change that apply, before or after it.
    fn under(
        &self,
        tenant: &str,
        before: &[RuleMatch<'_, '_>],
        after: &[RuleMatch<'_, '_>],
    ) -> Box<[RuleSides]> {
        let side = |found: &RuleMatch<'_, '_>, is_asked: bool| {
            let rule = self.scope.number_of(&found.rule.name)?;
            let (place, limit) = (place(tenant, found), found.terms.limit);
            Some((rule, Side { place, limit, is_enforced: found.terms.mode == Mode::Enforce, is_asked }))
        };
        let mut shadows = 0;
        let before = before.iter().filter_map(|found| {
            shadows += usize::from(found.terms.mode != Mode::Enforce);
            side(found, found.terms.mode == Mode::Enforce || shadows <= LIMITS_PER_REQUEST_MAX)
        });
        let mut all: Vec<RuleSides> =
            before.map(|(rule, before)| RuleSides { rule, before: Some(before), after: None }).collect();
        for (rule, after) in after.iter().filter_map(|found| side(found, true)) {
            let after = Some(after).filter(|after| after.is_enforced);
            match all.iter_mut().find(|under| under.rule == rule) {
                Some(under) => under.after = after,
                None => all.push(RuleSides { rule, before: None, after }),
            }
        }
        all.into()
    }

    /// Returns the measured effect.
    pub(crate) fn finish(self) -> ChangeEffect {
        let enough = self.enough();
        let measured = enough.of_all().map(|()| {
            let (at_most, _) = self.measure(Guess::AtMost);
            let (likely, of_rules) = self.measure(Guess::Likely);
            let at_most_percent = at_most.newly_denied_percent.max(likely.newly_denied_percent);
            let is_beyond = self.is_beyond(&likely, &of_rules);
            (self.with_rules(Measurement { at_most_percent, ..likely }, of_rules), is_beyond)
        });
        let unsure = self.unsure(&enough);
        // This reason is more specific than the number of records.
        let not_measured = unsure.as_ref().and_then(UncertainRule::not_measured);
        let (measured, is_beyond) = match measured {
            Ok((measured, is_beyond)) => (Ok(measured), is_beyond),
            Err(why) => (Err(not_measured.unwrap_or(why)), false),
        };
        let leaves_less = self.approved.is_passed_by_halved(self.halved_unknown(&enough));
        let is_wider = self.approved.is_passed_by_scope(&self.scope);
        let is_beyond = is_beyond || leaves_less || is_wider;
        ChangeEffect::new(&self.scope, measured, unsure.as_ref()).beyond_if(is_beyond)
    }

    /// Whether the measured effect clearly exceeds the approved one, in total or for one rule.
    fn is_beyond(&self, measured: &Measurement, of_rules: &HashMap<u32, RuleMeasurement>) -> bool {
        let mut known = of_rules.iter().filter(|(_, of_rule)| of_rule.records >= RECORDS_MIN);
        self.approved.is_passed_by(measured.newly_denied_percent)
            || known.any(|(number, of_rule)| {
                let name = self.scope.touched.get(*number as usize);
                name.is_some_and(|name| self.approved.is_passed_by_rule(name, DeniedShares::from(of_rule)))
            })
    }

    /// Returns the rules that leave half of the passing requests, or less, and could not be
    /// measured.
    fn halved_unknown(&self, enough: &SampleCoverage) -> impl Iterator<Item = (&str, f64)> {
        let is_known = |tighter: &TightenedRule| {
            let number = self.scope.number_of(&tighter.rule);
            let is_measured = number.is_some_and(|number| enough.of_rule(number).is_ok());
            enough.of_all().is_ok() && tighter.not_measured.is_none() && is_measured
        };
        let unknown = self.scope.halved().filter(move |(tighter, _)| !is_known(tighter));
        unknown.map(|(tighter, left)| (tighter.rule.as_str(), left))
    }

    fn enough(&self) -> SampleCoverage {
        let one_more = 1.0 / self.sample_rate.clamp(NEARLY_NOTHING, 1.0);
        // A replay that is full does not show how long the log is.
        let is_full = self.records >= FULL_RECORDS || self.held >= HELD_MAX;
        let evidence_ms = if is_full { 0 } else { self.evidence_ms };
        let (all, rules) = (SampleCount::default(), HashMap::new());
        let mut enough = SampleCoverage { one_more, evidence_ms, all, rules };
        for seen in &self.seen {
            enough.all.add(seen);
            for under in seen.under.iter().filter(|under| under.after.is_some()) {
                enough.rules.entry(under.rule).or_default().add(seen);
            }
        }
        enough
    }

    /// Returns a rule that may deny more and could not be measured; of several, one that leaves
    /// half or less.
    fn unsure(&self, enough: &SampleCoverage) -> Option<UncertainRule> {
        let unsure = self.scope.tighter.iter().filter_map(|tighter| {
            let number = self.scope.number_of(&tighter.rule)?;
            let why = tighter.not_measured.clone().or_else(|| enough.of_rule(number).err())?;
            Some(UncertainRule { rule: tighter.rule.clone(), left: tighter.left, why })
        });
        let all: Vec<UncertainRule> = unsure.collect();
        let at = all.iter().position(|unsure| unsure.left.is_some()).unwrap_or(0);
        all.into_iter().nth(at)
    }

    /// Measures the requests now and after overrides have expired. Returns the case that denies the
    /// larger share, in total and for each rule.
    fn measure(&self, guess: Guess) -> (Measurement, HashMap<u32, RuleMeasurement>) {
        let (now, mut of_rules) = self.judge(self.tally(&self.seen, guess));
        if self.later.is_empty() {
            return (now, of_rules);
        }
        let (later, of_rules_later) = self.judge(self.tally(&self.later, guess));
        for (rule, later) in of_rules_later {
            let known = of_rules.entry(rule).or_default();
            if DeniedShares::from(&later).of_passing > DeniedShares::from(&*known).of_passing {
                *known = later;
            }
        }
        let once_ended = later.newly_denied_percent > now.newly_denied_percent;
        let measured = if once_ended { Measurement { once_ended, ..later } } else { now };
        (measured, of_rules)
    }

    fn tally(&self, all: &[LoggedRequest], guess: Guess) -> (Measurement, HashMap<u32, RuleMeasurement>) {
        let window_ms = self.window_ms.map_or(0, |(first_ms, last_ms)| last_ms.saturating_sub(first_ms));
        let mut before = Model::new(streams(all, window_ms, guess, |under| under.before));
        let mut after = Model::new(streams(all, window_ms, guess, |under| under.after));
        let mut measured = Measurement::default();
        let mut of_rules: HashMap<u32, RuleMeasurement> = HashMap::new();
        for seen in all {
            let becomes = becomes(seen, &mut before, &mut after);
            let passing = becomes.passing * seen.drawn_from;
            measured.records += 1;
            measured.requests += seen.drawn_from;
            measured.passing += passing;
            measured.newly_denied += becomes.newly_denied * seen.drawn_from;
            measured.newly_allowed += becomes.newly_allowed * seen.drawn_from;
            for under in seen.under.iter().filter(|under| under.after.is_some()) {
                let of_rule = of_rules.entry(under.rule).or_default();
                of_rule.records += 1;
                of_rule.requests += seen.drawn_from;
                of_rule.passing += passing;
            }
            if let Some(rule) = becomes.denied_by {
                of_rules.entry(rule).or_default().newly_denied += becomes.newly_denied * seen.drawn_from;
            }
        }
        (measured, of_rules)
    }

    /// Selects the rule that newly denies the largest share of its passing requests: traffic of
    /// other rules does not help its clients. The share of all rules together may be larger, if
    /// several deny some of the same requests.
    fn judge(
        &self,
        (mut measured, of_rules): (Measurement, HashMap<u32, RuleMeasurement>),
    ) -> (Measurement, HashMap<u32, RuleMeasurement>) {
        let share = |newly_denied: f64, passing: f64| newly_denied / passing.max(NEARLY_NOTHING);
        let known = of_rules.iter().filter(|(_, of_rule)| of_rule.records >= RECORDS_MIN);
        let shares = known.map(|(number, of_rule)| (share(of_rule.newly_denied, of_rule.passing), *number));
        let worst = shares.max_by(|a, b| a.0.total_cmp(&b.0).then_with(|| b.1.cmp(&a.1)));
        let of_all = share(measured.newly_denied, measured.passing);
        let worst = worst.filter(|(of_rule, _)| *of_rule >= of_all);
        measured.newly_denied_percent = 100.0 * worst.map_or(of_all, |(share, _)| share).min(1.0);
        measured.worst = worst.and_then(|(_, number)| self.scope.touched.get(number as usize)).cloned();
        (measured, of_rules)
    }

    /// Lists the rules that deny more, the largest first, and the others in short form.
    fn with_rules(&self, measured: Measurement, of_rules: HashMap<u32, RuleMeasurement>) -> Measurement {
        let named = |(number, of_rule): (u32, RuleMeasurement)| {
            let rule = self.scope.touched.get(number as usize)?.clone();
            Some(RuleMeasurement { rule, ..of_rule }).filter(|of_rule| of_rule.newly_denied > 0.0)
        };
        let mut rules: Vec<RuleMeasurement> = of_rules.into_iter().filter_map(named).collect();
        rules.sort_by(|a, b| b.newly_denied.total_cmp(&a.newly_denied).then_with(|| a.rule.cmp(&b.rule)));
        let (in_short, others) = in_short(rules.split_off(NAMES_MAX.min(rules.len())));
        Measurement { rules, in_short, others, ..measured }
    }
}

/// Returns a sort key of the terms of a key: the lower, the less passes.
fn allowance(found: &RuleMatch<'_, '_>) -> (bool, f64, u32) {
    let limit = &found.terms.limit;
    (found.terms.mode == Mode::Shadow, Rate::of(limit).per_ms(), limit.burst())
}

/// Estimates the unlogged requests of each meter, on one side of the change.
fn streams(
    all: &[LoggedRequest],
    window_ms: u64,
    guess: Guess,
    side: fn(&RuleSides) -> Option<Side>,
) -> HashMap<u64, Stream> {
    let mut keys = Keys::default();
    for seen in all.iter().filter(|seen| seen.is_drawn()) {
        for under in &seen.under {
            // Requests above a limit charge nothing.
            if let Some(side) = side(under).filter(|side| !seen.is_above(&side.limit)) {
                let LoggedRequest { at_ms, drawn_from: from, cost, .. } = *seen;
                let spent = seen.spent(under).filter(|_| under.is_same_key());
                keys.note((under.rule, side.place), &SampledRecord { at_ms, from, cost, spent });
            }
        }
    }
    keys.streams(window_ms, guess)
}

/// Record counts of all rules of a change and of each, to judge whether they suffice.
#[derive(Debug)]
struct SampleCoverage {
    /// Requests that one missing record would represent.
    one_more: f64,
    /// Time that the records of a rule must cover.
    evidence_ms: u64,
    all: SampleCount,
    rules: HashMap<u32, SampleCount>,
}

/// Estimate of the passing requests.
#[derive(Clone, Copy, Debug, Default)]
struct SampleCount {
    records: u64,
    /// Requests that pass, or may.
    passing: f64,
    /// Variance of the estimate.
    doubt: f64,
    /// Times of the first and the last record.
    window_ms: Option<(u64, u64)>,
}

impl SampleCount {
    fn add(&mut self, seen: &LoggedRequest) {
        self.records += 1;
        let (first_ms, last_ms) = self.window_ms.unwrap_or((seen.at_ms, seen.at_ms));
        self.window_ms = Some((first_ms.min(seen.at_ms), last_ms.max(seen.at_ms)));
        // Requests that other rules denied may pass these.
        if seen.passed() || !seen.is_known {
            self.passing += seen.drawn_from;
        }
        if seen.is_drawn() {
            self.doubt += doubt(seen.drawn_from);
        }
    }

    /// Returns an error if the records do not suffice. The estimate allows for one passing record
    /// that the sample missed.
    fn check(self, one_more: f64) -> Result<(), UnknownReason> {
        if self.records < RECORDS_MIN {
            return Err(UnknownReason::Few(self.records));
        }
        let is_sure = (self.doubt + doubt(one_more)).sqrt() <= DOUBT_MAX * self.passing;
        if is_sure { Ok(()) } else { Err(UnknownReason::Rough(self.records)) }
    }
}

impl SampleCoverage {
    fn of_all(&self) -> Result<(), UnknownReason> {
        self.all.check(self.one_more)
    }

    fn of_rule(&self, rule: u32) -> Result<(), UnknownReason> {
        let count = self.rules.get(&rule).copied().unwrap_or_default();
        count.check(self.one_more)?;
        let covered_ms = count.window_ms.map_or(0, |(first_ms, last_ms)| last_ms - first_ms);
        if covered_ms >= self.evidence_ms {
            return Ok(());
        }
        Err(UnknownReason::Short { records: count.records, covered_ms, evidence_ms: self.evidence_ms })
    }
}

/// Returns the variance of the number of requests behind a record that was drawn from `drawn_from`.
fn doubt(drawn_from: f64) -> f64 {
    drawn_from * (drawn_from - 1.0)
}

/// Fate of the requests that a record represents, as shares of them.
#[derive(Debug, Default)]
struct RequestFate {
    /// Share that passes under the rules in force.
    passing: f64,
    newly_denied: f64,
    newly_allowed: f64,
    /// The rule with the most denials.
    denied_by: Option<u32>,
}

fn becomes(seen: &LoggedRequest, before: &mut Model, after: &mut Model) -> RequestFate {
    if seen.is_undecidable {
        return of_undecidable(seen, before);
    }
    match (seen.is_known, seen.passed()) {
        (true, true) => of_passed(seen, before, after),
        (true, false) => of_denied(seen, before, after),
        (false, _) => of_modelled(seen, before, after),
    }
}

/// A request that passes under the rules as they are.
fn of_passed(seen: &LoggedRequest, before: &mut Model, after: &mut Model) -> RequestFate {
    let (was, _) = before.decide(seen, |under| under.before.filter(|side| side.is_enforced), |_| None);
    let (is, denied_by) = after.decide(seen, |under| under.after, |under| seen.recorded(under));
    // The request did pass. If the meters deny it, their error is assumed to be the same on the
    // other side.
    let passes = if was > NEARLY_NOTHING { is / was } else { seen.by_limits() };
    let spent = seen.under.iter().map(|under| (seen.most(under, before), under.rule));
    let (most, spender) = spent
        .fold((1.0, None), |least, (most, rule)| if most < least.0 { (most, Some(rule)) } else { least });
    let denied_by = if most < passes { spender } else { denied_by };
    let newly_denied = 1.0 - passes.min(most).clamp(0.0, 1.0);
    RequestFate { passing: 1.0, newly_denied, newly_allowed: 0.0, denied_by }
}

/// A request that the rules in force denied. It stays denied unless the denying rule is gone, or
/// has new room.
fn of_denied(seen: &LoggedRequest, before: &mut Model, after: &mut Model) -> RequestFate {
    let Some(rule) = seen.decided_by else { return RequestFate::default() };
    let enforced = |under: &RuleSides| under.before.filter(|side| side.is_enforced);
    let stays = seen.under.iter().any(|under| under.rule == rule && under.after.is_some());
    let had_room = stays && before.has_room(seen, enforced);
    let is_newly_allowed = after.has_room(seen, |under| under.after) && !had_room;
    if is_newly_allowed {
        after.charge(seen, |under| under.after);
    }
    RequestFate { newly_allowed: share_of(is_newly_allowed), ..RequestFate::default() }
}

/// A request with more rules than one check may have: none of them is charged.
fn of_undecidable(seen: &LoggedRequest, before: &mut Model) -> RequestFate {
    let (was, _) = before.decide(seen, |under| under.before.filter(|side| side.is_enforced), |_| None);
    let passing = match (seen.is_known, seen.passed()) {
        (true, true) => 1.0,
        (true, false) => 0.0,
        (false, _) => was,
    };
    let denied_by = seen.under.iter().find(|under| under.after.is_some()).map(|under| under.rule);
    RequestFate { passing, newly_denied: passing, newly_allowed: 0.0, denied_by }
}

/// A request that other rules decided, or none: the record only shows that it came.
fn of_modelled(seen: &LoggedRequest, before: &mut Model, after: &mut Model) -> RequestFate {
    let (was, _) = before.decide(seen, |under| under.before.filter(|side| side.is_enforced), |_| None);
    let (is, denied_by) = after.decide(seen, |under| under.after, |_| None);
    let (newly_denied, newly_allowed) = ((was - is).max(0.0), (is - was).max(0.0));
    RequestFate { passing: was, newly_denied, newly_allowed, denied_by }
}

/// The meters of one side.
#[derive(Debug)]
struct Model {
    meters: HashMap<u64, KeyMeter>,
    /// Unlogged requests of each meter.
    streams: HashMap<u64, Stream>,
}

impl Model {
    fn new(streams: HashMap<u64, Stream>) -> Self {
        Self { meters: HashMap::new(), streams }
    }

    /// Whether the stream of a meter uses much of its drain rate, for longer than a burst takes to
    /// drain. Such a meter is not filled by bursts.
    fn is_steady(&self, side: &Side) -> bool {
        let stream = self.streams.get(&side.place).copied().unwrap_or_default();
        let (span_ms, rate) = (stream.to_ms - stream.from_ms, side.rate());
        let drained = rate.per_ms() * as_real(span_ms);
        let is_much = as_real(stream.requests) * as_real(stream.cost) >= STEADY_FROM * drained;
        stream.requests > 0 && is_much && span_ms >= rate.full_ms()
    }

    fn advance(&mut self, side: &Side, at_ms: u64) -> &mut KeyMeter {
        let stream = self.streams.get(&side.place).copied().unwrap_or_default();
        let new = || KeyMeter::new(side.limit, &stream, at_ms);
        let meter = self.meters.entry(side.place).or_insert_with(new);
        meter.advance(&side.limit, &stream, at_ms);
        meter
    }

    /// Whether a request passes all rules.
    fn has_room(&mut self, seen: &LoggedRequest, side: impl Fn(&RuleSides) -> Option<Side>) -> bool {
        let mut has_room = true;
        for side in seen.under.iter().filter_map(side) {
            has_room &= self.advance(&side, seen.at_ms).has_room(seen.cost);
        }
        has_room
    }

    fn charge(&mut self, seen: &LoggedRequest, side: impl Fn(&RuleSides) -> Option<Side>) {
        for side in seen.under.iter().filter_map(side) {
            self.advance(&side, seen.at_ms).charge(seen.cost);
        }
    }

    /// Returns the share that passes of the requests that a record represents, and the rule that
    /// denies most of the rest. Rules are charged for a request that passes all of them. A
    /// `recorded` result replaces the meter of its rule.
    fn decide(
        &mut self,
        seen: &LoggedRequest,
        side: impl Fn(&RuleSides) -> Option<Side>,
        recorded: impl Fn(&RuleSides) -> Option<bool>,
    ) -> (f64, Option<u32>) {
        let (mut least, mut denied_by, mut passes) = (1.0, None, true);
        for under in &seen.under {
            let (own, flow) = match (recorded(under), side(under)) {
                (Some(recorded), _) => (recorded, (0, 0)),
                (None, None) => (true, (0, 0)),
                // All requests behind the record have its cost. Unlogged ones of its key may cost
                // less.
                (None, Some(side)) if seen.is_above(&side.limit) => (false, (0, 0)),
                (None, Some(side)) => {
                    let meter = self.advance(&side, seen.at_ms);
                    // A record that is not a sample represents one request.
                    let flow = if seen.is_drawn() { meter.take_flow() } else { (0, 0) };
                    (meter.has_room(seen.cost), flow)
                }
            };
            passes &= own;
            let (came, let_through) = flow;
            let share = (as_real(let_through) + share_of(own)) / (as_real(came) + 1.0);
            if share < least {
                (least, denied_by) = (share, Some(under.rule));
            }
        }
        if passes {
            self.charge(seen, |under| side(under).filter(|_| recorded(under).is_none()));
        }
        (least, denied_by)
    }
}

/// The share of a request that is decided as a whole.
fn share_of(passes: bool) -> f64 {
    f64::from(u8::from(passes))
}

/// Returns the meter that counts a request under a rule.
fn place(tenant: &str, found: &RuleMatch<'_, '_>) -> u64 {
    let mut hasher = DefaultHasher::new();
    (&found.rule.name, tenant, &found.key[..]).hash(&mut hasher);
    hasher.finish()
}
