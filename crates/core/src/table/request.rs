//! Requests under several limits: all or nothing, as one change to all their meters.

use std::fmt;

use arrayvec::ArrayVec;

use super::line::{Head, Line, LineGuard};
use super::place::InsertResult;
use super::share::Counts;
use super::{Change, Check, CheckOutcome, DecidingMeter, Intent, MeterLocation, Spot, Table, count, refusal};
use crate::meter::{Meter, Slot};
use crate::time::Now;
use crate::verdict::Verdict;

/// The most limits one request may be under.
pub const LIMITS_PER_REQUEST_MAX: usize = 128;

/// Requests under at most this many limits need only a small frame on the stack.
#[cfg(not(loom))]
const LIMITS_COMMON: usize = 8;
/// Loom's threads have little stack.
#[cfg(loom)]
const LIMITS_COMMON: usize = 2;

/// How often a request may insert its missing meters and find one evicted again. After that the
/// overflow meter decides the key.
const PLACEMENTS_MAX: usize = 16;

/// More limits than one request may be under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyLimits {
    /// How many there were.
    pub limits: usize,
    /// How many there may be.
    pub limits_max: usize,
}

impl fmt::Display for TooManyLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "limits: {} in one request is outside 0 to {}", self.limits, self.limits_max)
    }
}

impl std::error::Error for TooManyLimits {}

/// The verdict on a request under all its limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestVerdict {
    /// Every limit allowed it, and every meter was charged.
    Allowed,
    /// At least one limit denied it, and no meter was changed.
    Denied {
        /// Index of the check that denied. Of several, the one that would deny longest.
        by: usize,
    },
}

/// The input that all steps of one decision share.
#[derive(Clone, Copy)]
struct Request<'r> {
    now: Now,
    checks: &'r [Check<'r>],
    intent: Intent,
}

/// A meter's next state, and the version of its line that it was decided on.
struct Write<'t> {
    line: &'t Line,
    slot: usize,
    head: Head,
    words: Slot,
}

type Writes<'t, const N: usize> = ArrayVec<Write<'t>, N>;

/// One limit of the request, as it was read and as it would be left.
struct Step {
    spot: Spot,
    source: DecidingMeter,
    /// Line, slot and version of the meter as it was read; none if it has to be created.
    at: Option<(usize, usize, Head)>,
    before: Meter,
    after: Meter,
    verdict: Verdict,
}

type Steps<const N: usize> = ArrayVec<Step, N>;

impl Table {
    /// Decides a request under several limits as one: either every meter is charged, or none is.
    /// `answers` receives one outcome for each check, and needs room for all.
    pub fn check_all(
        &self,
        now: Now,
        checks: &[Check<'_>],
        answers: &mut [CheckOutcome],
    ) -> Result<RequestVerdict, TooManyLimits> {
        self.request(Request { now, checks, intent: Intent::Charge }, answers)
    }

    /// Like [`Table::check_all`], but reserves the allowed cost: see [`Table::reserve`].
    pub fn reserve_all(
        &self,
        now: Now,
        checks: &[Check<'_>],
        answers: &mut [CheckOutcome],
    ) -> Result<RequestVerdict, TooManyLimits> {
        self.request(Request { now, checks, intent: Intent::Reserve }, answers)
    }

    #[inline(always)]
    fn request(
        &self,
        request: Request<'_>,
        answers: &mut [CheckOutcome],
    ) -> Result<RequestVerdict, TooManyLimits> {
        let (limits, limits_max) = (request.checks.len(), LIMITS_PER_REQUEST_MAX.min(answers.len()));
        if limits > limits_max {
            return Err(TooManyLimits { limits, limits_max });
        }
        if limits > LIMITS_COMMON {
            return Ok(self.settle_in_steps::<LIMITS_PER_REQUEST_MAX>(request, answers));
        }
        if self.settle_at_once::<LIMITS_COMMON>(request, answers) {
            return Ok(RequestVerdict::Allowed);
        }
        Ok(self.settle_in_steps::<LIMITS_COMMON>(request, answers))
    }

    /// Decides the common case: every meter exists, in a line of its own, allows the request, and
    /// no other thread changes it meanwhile. Otherwise returns false and changes no meter.
    #[inline(always)]
    fn settle_at_once<const N: usize>(&self, request: Request<'_>, answers: &mut [CheckOutcome]) -> bool {
        let mut writes: Writes<'_, N> = Writes::new();
        for (check, answer) in request.checks.iter().zip(answers) {
            let spot = self.own_spot(check);
            let allowed = match self.find_at_home(spot) {
                Some(found) => prepare(&found, request, check, answer, &mut writes),
                None => self.prepare_further(spot, request, check, answer, &mut writes),
            };
            if !allowed {
                return false;
            }
        }
        write_at_once(&writes)
    }

    /// The same as [`prepare`] for a meter away from home, out of the way of those that are.
    #[inline(never)]
    fn prepare_further<'t, const N: usize>(
        &'t self,
        spot: Spot,
        request: Request<'_>,
        check: &Check<'_>,
        answer: &mut CheckOutcome,
        writes: &mut Writes<'t, N>,
    ) -> bool {
        let found = self.find_further(spot, self.line(spot.home).head().reach());
        found.is_some_and(|found| prepare(&found, request, check, answer, writes))
    }

    /// Decides every other case: reads all meters, decides on them, inserts missing meters, and
    /// replaces all if none has changed since.
    #[inline(never)]
    fn settle_in_steps<const N: usize>(
        &self,
        request: Request<'_>,
        answers: &mut [CheckOutcome],
    ) -> RequestVerdict {
        let mut sources: ArrayVec<DecidingMeter, N> =
            request.checks.iter().map(|_| DecidingMeter::Own).collect();
        let mut placements = 0;
        loop {
            let steps: Steps<N> = self.read_steps(request, &sources);
            if let Some(by) = denied_by(&steps) {
                self.mark_denied(request, by);
                report_denied(request, &steps, answers);
                return RequestVerdict::Denied { by };
            }
            if steps.iter().any(Step::must_be_made) {
                placements += 1;
                self.make_rooms(request, &steps, &mut sources, placements <= PLACEMENTS_MAX);
            } else if self.write_steps(request, &steps) {
                report_allowed(&steps, answers);
                return RequestVerdict::Allowed;
            }
        }
    }

    /// Marks a denial by the origin's reply: there is demand to ask the origin for again.
    fn mark_denied(&self, request: Request<'_>, by: usize) {
        if let Some(check) = request.checks.get(by).filter(|check| check.limit.is_at_origin()) {
            let step = |meter: Meter| match meter.missed(request.now) {
                after if after == meter => ((), Change::Keep),
                after => ((), Change::Write(after)),
            };
            self.change(request.now, self.own_spot(check), check.limit, step);
        }
    }

    fn make_rooms(&self, request: Request<'_>, steps: &[Step], sources: &mut [DecidingMeter], place: bool) {
        for ((check, step), source) in request.checks.iter().zip(steps).zip(sources) {
            if step.must_be_made() && !self.has_room(request.now, check, steps, step, place) {
                *source = step.without_room(self.counts(step.spot));
            }
        }
    }

    fn read_steps<const N: usize>(&self, request: Request<'_>, sources: &[DecidingMeter]) -> Steps<N> {
        let mut steps = Steps::new();
        for (check, &source) in request.checks.iter().zip(sources) {
            let step = self.read_step(request, check, source, &steps);
            steps.push(step);
        }
        steps
    }

    /// Reads the meter of one limit and decides on it. A key that the request names twice is
    /// charged twice: the second decision starts from the result of the first.
    fn read_step(
        &self,
        request: Request<'_>,
        check: &Check<'_>,
        source: DecidingMeter,
        earlier: &[Step],
    ) -> Step {
        let spot = if source == DecidingMeter::Own { self.own_spot(check) } else { self.spill_spot(check) };
        let twin = earlier.iter().rfind(|step| step.is_at(spot));
        let (at, before) = match twin {
            Some(twin) => (twin.at, twin.after),
            None => self.read_meter(request.now, check, spot),
        };
        if source == DecidingMeter::Refused {
            return Step { spot, source, at, before, after: before, verdict: refusal(check.limit).verdict };
        }
        let (verdict, after) = request.intent.decide(request.now, check, before);
        Step { spot, source, at, before, after, verdict }
    }

    fn read_meter(&self, now: Now, check: &Check<'_>, spot: Spot) -> (Option<(usize, usize, Head)>, Meter) {
        loop {
            let Some(found) = self.find(spot) else { return (None, Meter::empty(check.limit)) };
            if found.words.is_of_other_rate(check.limit) {
                self.convert(found, spot, check.limit, now);
            } else if found.here.is_still(found.head) {
                return (Some((found.line, found.slot, found.head)), found.words.unpack());
            }
        }
    }

    /// Inserts an empty meter for a key without one, if there is room beside the request's other
    /// keys. An empty meter changes no decision, so it does no harm if the request is denied after
    /// all.
    fn has_room(&self, now: Now, check: &Check<'_>, steps: &[Step], step: &Step, place: bool) -> bool {
        let words = Slot::pack(step.spot.tag, check.limit, &Meter::empty(check.limit));
        let is_ours = |tag: u64| steps.iter().any(|step| step.spot.tag == tag);
        // Overflow meters are few and shared: there is no point in giving up on making one.
        let place = place || step.source == DecidingMeter::Overflow;
        place && self.place(now, step.spot, words, is_ours) != InsertResult::NoRoom
    }

    /// Locks all lines in ascending order, at the versions that were read, then writes all meters.
    /// If any line has changed, it writes none.
    fn write_steps<const N: usize>(&self, request: Request<'_>, steps: &Steps<N>) -> bool {
        let mut order: ArrayVec<(usize, Head), N> = steps.iter().filter_map(Step::line_to_write).collect();
        order.sort_unstable_by_key(|&(line, _)| line);
        let mut locked: ArrayVec<(usize, LineGuard<'_>), N> = ArrayVec::new();
        for (line, head) in order {
            match locked.last().filter(|(last, _)| *last == line) {
                Some((_, lock)) if lock.head() == head => {}
                Some(_) => return false,
                None => match self.line(line).lock_at(head) {
                    Some(lock) => locked.push((line, lock)),
                    None => return false,
                },
            }
        }
        for (check, step) in request.checks.iter().zip(steps) {
            step.write_to(check, &mut locked);
        }
        true
    }
}

/// Decides on one meter of a request and records the write. Returns false if the meter denies or
/// needs no write.
#[inline(always)]
fn prepare<'t, const N: usize>(
    found: &MeterLocation<'t>,
    request: Request<'_>,
    check: &Check<'_>,
    answer: &mut CheckOutcome,
    writes: &mut Writes<'t, N>,
) -> bool {
    if found.words.is_of_other_rate(check.limit) {
        return false;
    }
    let (verdict, change) = request.intent.apply(request.now, check, found.words.unpack());
    let Change::Write(after) = change else { return false };
    // A denial may leave a mark, which is not made here.
    if !verdict.is_allowed() {
        return false;
    }
    *answer = CheckOutcome { verdict, source: DecidingMeter::Own };
    let words = Slot::pack(Slot::tag_of(check.digest.tag), check.limit, &after);
    writes.push(Write { line: found.here, slot: found.slot, head: found.head, words });
    true
}

/// Locks the lines of all writes at the versions that were read, then writes. If a line has
/// changed, or two writes share a line, it writes none.
///
/// The lines are in no order, because no thread waits here: two requests that lock each other's
/// lines both give up, and retry in order.
#[inline]
fn write_at_once<const N: usize>(writes: &Writes<'_, N>) -> bool {
    let mut locks: ArrayVec<LineGuard<'_>, N> = ArrayVec::new();
    for write in writes {
        let Some(lock) = write.line.lock_at(write.head) else { return false };
        locks.push(lock);
    }
    for (lock, write) in locks.iter_mut().zip(writes) {
        lock.write(write.slot, write.words);
    }
    true
}

impl Step {
    fn is_at(&self, spot: Spot) -> bool {
        self.spot.home == spot.home && self.spot.tag == spot.tag
    }

    /// Which meter decides for a key that there is no room for.
    fn without_room(&self, counts: &Counts) -> DecidingMeter {
        match self.source {
            DecidingMeter::Own => {
                count(&counts.spilled);
                DecidingMeter::Overflow
            }
            DecidingMeter::Overflow | DecidingMeter::Refused => {
                count(&counts.refused);
                DecidingMeter::Refused
            }
        }
    }

    /// A look needs no meter.
    fn must_be_made(&self) -> bool {
        self.at.is_none() && self.after != self.before
    }

    fn line_to_write(&self) -> Option<(usize, Head)> {
        self.at.map(|(line, _, head)| (line, head))
    }

    fn write_to(&self, check: &Check<'_>, locked: &mut [(usize, LineGuard<'_>)]) {
        let Some((line, slot, _)) = self.at.filter(|_| self.after != self.before) else { return };
        if let Some((_, lock)) = locked.iter_mut().find(|(at, _)| *at == line) {
            lock.write(slot, Slot::pack(self.spot.tag, check.limit, &self.after));
        }
    }
}

/// Of the limits that denied, the one that would deny longest: waiting for it is waiting for all.
fn denied_by(steps: &[Step]) -> Option<usize> {
    let mut longest = None;
    for (at, step) in steps.iter().enumerate() {
        if let Some(retry) = step.verdict.retry()
            && longest.is_none_or(|(_, most)| retry > most)
        {
            longest = Some((at, retry));
        }
    }
    longest.map(|(at, _)| at)
}

fn report_allowed(steps: &[Step], answers: &mut [CheckOutcome]) {
    for (step, answer) in steps.iter().zip(answers) {
        *answer = CheckOutcome { verdict: step.verdict, source: step.source };
    }
}

/// Reports the outcomes of a denied request. No meter was charged, so limits that would have
/// allowed it report their present state.
fn report_denied(request: Request<'_>, steps: &[Step], answers: &mut [CheckOutcome]) {
    for ((check, step), answer) in request.checks.iter().zip(steps).zip(answers) {
        // A key named twice was last decided on the result of its first check, so the state before
        // that one is used.
        let first = steps.iter().find(|other| other.is_at(step.spot)).unwrap_or(step);
        let verdict = if step.verdict.is_allowed() {
            first.before.decide(check.limit, request.now, 0).0
        } else {
            step.verdict
        };
        *answer = CheckOutcome { verdict, source: step.source };
    }
}
