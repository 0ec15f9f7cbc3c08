//! Requests under several limits: all or nothing, as one change to all their meters.

use std::fmt;

use arrayvec::ArrayVec;

use super::line::{Head, Line, Locked};
use super::place::Placed;
use super::share::Counts;
use super::{Answer, Ask, Change, Found, Intent, Source, Spot, Table, count, refusal};
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

/// How often a request may place its missing meters and find one gone again before that key goes to its
/// overflow meter.
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

/// What was decided for a request as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decided {
    /// Every limit allowed it, and every meter was charged.
    Allowed,
    /// At least one limit denied it, and no meter was changed.
    Denied {
        /// Which of the asks: of those that denied, the one that would deny longest.
        by: usize,
    },
}

/// What is asked: everything that the steps of one decision share.
#[derive(Clone, Copy)]
struct Request<'r> {
    now: Now,
    asks: &'r [Ask<'r>],
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
    source: Source,
    /// Where the meter lies and the version it was read at; nothing if it has to be made.
    at: Option<(usize, usize, Head)>,
    before: Meter,
    after: Meter,
    verdict: Verdict,
}

type Steps<const N: usize> = ArrayVec<Step, N>;

impl Table {
    /// Decides a request under several limits as one: either every meter is charged, or none is. `answers` takes
    /// one answer for each ask, and needs room for them.
    pub fn check_all(
        &self,
        now: Now,
        asks: &[Ask<'_>],
        answers: &mut [Answer],
    ) -> Result<Decided, TooManyLimits> {
        self.request(Request { now, asks, intent: Intent::Charge }, answers)
    }

    /// Like [`Table::check_all`], but what is allowed is set aside: see [`Table::reserve`].
    pub fn reserve_all(
        &self,
        now: Now,
        asks: &[Ask<'_>],
        answers: &mut [Answer],
    ) -> Result<Decided, TooManyLimits> {
        self.request(Request { now, asks, intent: Intent::Reserve }, answers)
    }

    #[inline(always)]
    fn request(&self, request: Request<'_>, answers: &mut [Answer]) -> Result<Decided, TooManyLimits> {
        let (limits, limits_max) = (request.asks.len(), LIMITS_PER_REQUEST_MAX.min(answers.len()));
        if limits > limits_max {
            return Err(TooManyLimits { limits, limits_max });
        }
        if limits > LIMITS_COMMON {
            return Ok(self.settle_in_steps::<LIMITS_PER_REQUEST_MAX>(request, answers));
        }
        if self.settle_at_once::<LIMITS_COMMON>(request, answers) {
            return Ok(Decided::Allowed);
        }
        Ok(self.settle_in_steps::<LIMITS_COMMON>(request, answers))
    }

    /// The common case: every meter is there, in a line of its own, allows the request, and is changed by nobody
    /// else meanwhile. Otherwise nothing has happened yet, and the answer is false.
    #[inline(always)]
    fn settle_at_once<const N: usize>(&self, request: Request<'_>, answers: &mut [Answer]) -> bool {
        let mut writes: Writes<'_, N> = Writes::new();
        for (ask, answer) in request.asks.iter().zip(answers) {
            let spot = self.own_spot(ask);
            let allowed = match self.find_at_home(spot) {
                Some(found) => prepare(&found, request, ask, answer, &mut writes),
                None => self.prepare_further(spot, request, ask, answer, &mut writes),
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
        ask: &Ask<'_>,
        answer: &mut Answer,
        writes: &mut Writes<'t, N>,
    ) -> bool {
        let found = self.find_further(spot, self.line(spot.home).head().reach());
        found.is_some_and(|found| prepare(&found, request, ask, answer, writes))
    }

    /// Every other case: reads all meters, decides on what was read, makes the meters that are missing, and
    /// replaces all if none has changed since.
    #[inline(never)]
    fn settle_in_steps<const N: usize>(&self, request: Request<'_>, answers: &mut [Answer]) -> Decided {
        let mut sources: ArrayVec<Source, N> = request.asks.iter().map(|_| Source::Own).collect();
        let mut placements = 0;
        loop {
            let steps: Steps<N> = self.read_steps(request, &sources);
            if let Some(by) = denied_by(&steps) {
                self.mark_denied(request, by);
                report_denied(request, &steps, answers);
                return Decided::Denied { by };
            }
            if steps.iter().any(Step::must_be_made) {
                placements += 1;
                self.make_rooms(request, &steps, &mut sources, placements <= PLACEMENTS_MAX);
            } else if self.write_steps(request, &steps) {
                report_allowed(&steps, answers);
                return Decided::Allowed;
            }
        }
    }

    /// A denial by an origin's word leaves a mark that there is someone to ask it again for.
    fn mark_denied(&self, request: Request<'_>, by: usize) {
        if let Some(ask) = request.asks.get(by).filter(|ask| ask.limit.is_at_origin()) {
            let step = |meter: Meter| match meter.missed(request.now) {
                after if after == meter => ((), Change::Keep),
                after => ((), Change::Write(after)),
            };
            self.change(request.now, self.own_spot(ask), ask.limit, step);
        }
    }

    fn make_rooms(&self, request: Request<'_>, steps: &[Step], sources: &mut [Source], place: bool) {
        for ((ask, step), source) in request.asks.iter().zip(steps).zip(sources) {
            if step.must_be_made() && !self.has_room(request.now, ask, steps, step, place) {
                *source = step.without_room(self.counts(step.spot));
            }
        }
    }

    fn read_steps<const N: usize>(&self, request: Request<'_>, sources: &[Source]) -> Steps<N> {
        let mut steps = Steps::new();
        for (ask, &source) in request.asks.iter().zip(sources) {
            let step = self.read_step(request, ask, source, &steps);
            steps.push(step);
        }
        steps
    }

    /// One limit's meter and verdict. A key that the request names twice is charged twice: the second look
    /// sees what the first will leave.
    fn read_step(&self, request: Request<'_>, ask: &Ask<'_>, source: Source, earlier: &[Step]) -> Step {
        let spot = if source == Source::Own { self.own_spot(ask) } else { self.spill_spot(ask) };
        let twin = earlier.iter().rfind(|step| step.is_at(spot));
        let (at, before) = match twin {
            Some(twin) => (twin.at, twin.after),
            None => self.read_meter(ask, spot),
        };
        if source == Source::Refused {
            return Step { spot, source, at, before, after: before, verdict: refusal(ask.limit).verdict };
        }
        let (verdict, after) = request.intent.decide(request.now, ask, before);
        Step { spot, source, at, before, after, verdict }
    }

    fn read_meter(&self, ask: &Ask<'_>, spot: Spot) -> (Option<(usize, usize, Head)>, Meter) {
        loop {
            let Some(found) = self.find(spot) else { return (None, Meter::empty(ask.limit)) };
            if found.here.is_still(found.head) {
                return (Some((found.line, found.slot, found.head)), found.words.unpack());
            }
        }
    }

    /// Places an empty meter for a key that has none, if there is room for it beside the request's other keys. An
    /// empty meter changes no decision, so that a request denied after all leaves nothing behind that matters.
    fn has_room(&self, now: Now, ask: &Ask<'_>, steps: &[Step], step: &Step, place: bool) -> bool {
        let words = Slot::pack(step.spot.tag, ask.limit, &Meter::empty(ask.limit));
        let is_ours = |tag: u64| steps.iter().any(|step| step.spot.tag == tag);
        // Overflow meters are few and shared: there is no point in giving up on making one.
        let place = place || step.source == Source::Overflow;
        place && self.place(now, step.spot, words, is_ours) != Placed::NoRoom
    }

    /// Locks all lines in ascending order, at the versions that were read, then writes all meters. If any line
    /// has moved on, nothing is written.
    fn write_steps<const N: usize>(&self, request: Request<'_>, steps: &Steps<N>) -> bool {
        let mut order: ArrayVec<(usize, Head), N> = steps.iter().filter_map(Step::line_to_write).collect();
        order.sort_unstable_by_key(|&(line, _)| line);
        let mut locked: ArrayVec<(usize, Locked<'_>), N> = ArrayVec::new();
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
        for (ask, step) in request.asks.iter().zip(steps) {
            step.write_to(ask, &mut locked);
        }
        true
    }
}

/// Decides on one meter of a request and notes what to write to it; false if there is nothing to write.
#[inline(always)]
fn prepare<'t, const N: usize>(
    found: &Found<'t>,
    request: Request<'_>,
    ask: &Ask<'_>,
    answer: &mut Answer,
    writes: &mut Writes<'t, N>,
) -> bool {
    let (verdict, change) = request.intent.apply(request.now, ask, found.words.unpack());
    let Change::Write(after) = change else { return false };
    // A denial may leave a mark, which is not made here.
    if !verdict.is_allowed() {
        return false;
    }
    *answer = Answer { verdict, source: Source::Own };
    let words = Slot::pack(Slot::tag_of(ask.digest.tag), ask.limit, &after);
    writes.push(Write { line: found.here, slot: found.slot, head: found.head, words });
    true
}

/// Locks the lines of all writes at the versions that were read, then writes. If a line has moved on, or is
/// another write's as well, nothing is written.
///
/// The lines come in no order, since nobody waits here: two requests that take each other's lines both give up, and
/// try again in order.
#[inline]
fn write_at_once<const N: usize>(writes: &Writes<'_, N>) -> bool {
    let mut locks: ArrayVec<Locked<'_>, N> = ArrayVec::new();
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
    fn without_room(&self, counts: &Counts) -> Source {
        match self.source {
            Source::Own => {
                count(&counts.spilled);
                Source::Overflow
            }
            Source::Overflow | Source::Refused => {
                count(&counts.refused);
                Source::Refused
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

    fn write_to(&self, ask: &Ask<'_>, locked: &mut [(usize, Locked<'_>)]) {
        let Some((line, slot, _)) = self.at.filter(|_| self.after != self.before) else { return };
        if let Some((_, lock)) = locked.iter_mut().find(|(at, _)| *at == line) {
            lock.write(slot, Slot::pack(self.spot.tag, ask.limit, &self.after));
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

fn report_allowed(steps: &[Step], answers: &mut [Answer]) {
    for (step, answer) in steps.iter().zip(answers) {
        *answer = Answer { verdict: step.verdict, source: step.source };
    }
}

/// Nothing was charged, so the limits that would have allowed report themselves as they are.
fn report_denied(request: Request<'_>, steps: &[Step], answers: &mut [Answer]) {
    for ((ask, step), answer) in request.asks.iter().zip(steps).zip(answers) {
        // A key named twice was last decided on what its first mention would have left; look at what is there.
        let first = steps.iter().find(|other| other.is_at(step.spot)).unwrap_or(step);
        let verdict = if step.verdict.is_allowed() {
            first.before.decide(ask.limit, request.now, 0).0
        } else {
            step.verdict
        };
        *answer = Answer { verdict, source: step.source };
    }
}
