//! `CL.THROTTLE key max_burst count_per_period period_s [quantity]`, with the replies of
//! redis-cell.

use std::time::Duration;

use tidegate::{Check, Gate, Limit, Outcome, Verdict};

use super::client_state::{ClientState, context};
use super::command::Flow;
use super::pending::{PendingCheck, PendingReply};
use super::reply::Reply;
use super::request::Request;
use crate::pipeline::{MeterAction, RecordSubject};

/// How many limits a connection keeps ready. Higher: more of them used in turns before they are
/// built anew; more memory and a longer search for a connection that uses many.
const GATES_MAX: usize = 16;

/// The prefix of redis-cell's own errors.
const ERROR_PREFIX: &str = "Cell error: Store error: ";

const USAGE: &str = "Usage: cl.throttle <key> <max_burst> <count per period> <period> [<quantity>]";

/// The longest period in seconds that a limit may have.
const PERIOD_S_MAX: u64 = tidegate::PERIOD_US_MAX / 1_000_000;

/// The limit in a request, as written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rate {
    max_burst: i64,
    count: i64,
    period_s: i64,
}

impl Rate {
    /// The limit, but for a burst below zero: that of one that lets one pass.
    fn limit(self) -> Result<Limit, String> {
        if self.count == 0 || self.period_s == 0 {
            return Err("Zero rates are not supported".to_owned());
        }
        let count = u64::try_from(self.count)
            .map_err(|_| format!("count per period: {} is outside 1 to {}", self.count, u32::MAX))?;
        let period_s = u64::try_from(self.period_s)
            .map_err(|_| format!("period: {} is outside 1 to {PERIOD_S_MAX}", self.period_s))?;
        let burst = u64::try_from(self.max_burst).map_or(1, |max_burst| max_burst + 1);
        Limit::gcra(count, Duration::from_secs(period_s))
            .and_then(|limit| limit.with_burst(burst))
            .map_err(|error| error.to_string())
    }
}

/// The gates of the limits that a connection used last.
#[derive(Debug, Default)]
pub(super) struct Gates {
    known: Vec<(Rate, Gate)>,
    /// Which one makes room next.
    next: usize,
}

impl Gates {
    /// Forgets all: they are of another tenant.
    pub(super) fn clear(&mut self) {
        self.known.clear();
    }

    #[inline]
    fn find(&self, rate: Rate) -> Option<&Gate> {
        self.known.iter().find(|(known, _)| *known == rate).map(|(_, gate)| gate)
    }

    /// The gate of `rate`, made from one that has the keys.
    fn get(&mut self, rate: Rate, keys: &Gate) -> Result<&Gate, String> {
        let at = match self.known.iter().position(|(known, _)| *known == rate) {
            Some(at) => at,
            None => self.add(rate, keys.with_limit(rate.limit()?)),
        };
        Ok(&self.known[at].1)
    }

    fn add(&mut self, rate: Rate, gate: Gate) -> usize {
        if self.known.len() < GATES_MAX {
            self.known.push((rate, gate));
            return self.known.len() - 1;
        }
        let at = self.next;
        self.known[at] = (rate, gate);
        self.next = (at + 1) % GATES_MAX;
        at
    }
}

/// The arguments of a check.
struct Throttle<'r> {
    key: &'r [u8],
    rate: Rate,
    quantity: i64,
}

impl<'r> Throttle<'r> {
    #[inline]
    fn read(request: &Request<'r>) -> Result<Self, String> {
        let (Some(key), 5 | 6) = (request.get(1), request.len()) else { return Err(USAGE.to_owned()) };
        let at = |at: usize| integer(request.get(at).unwrap_or_default());
        Ok(Self {
            key,
            rate: Rate { max_burst: at(2)?, count: at(3)?, period_s: at(4)? },
            quantity: if request.len() == 6 { at(5)? } else { 1 },
        })
    }
}

/// A number as redis-cell reads it.
#[inline]
fn integer(text: &[u8]) -> Result<i64, String> {
    /// So many digits are never too many for 64 bits.
    const DIGITS_MAX: usize = 18;
    if text.is_empty() || text.len() > DIGITS_MAX {
        return unusual_integer(text);
    }
    let mut value = 0;
    for byte in text {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return unusual_integer(text);
        }
        value = 10 * value + i64::from(digit);
    }
    Ok(value)
}

#[cold]
fn unusual_integer(text: &[u8]) -> Result<i64, String> {
    let text = String::from_utf8_lossy(text);
    text.parse().map_err(|_| format!("Couldn't parse as integer: {text}"))
}

/// Whether a request is this command's.
#[inline]
pub(super) fn is_meant(request: &Request<'_>) -> bool {
    request.is(0, "cl.throttle")
}

/// Returns the check of a request that only needs a decision, if its gate is ready.
#[inline]
pub(super) fn plain_check<'r, 'g>(request: &Request<'r>, gates: &'g Gates) -> Option<(&'r [u8], Check<'g>)> {
    let throttle = Throttle::read(request).ok()?;
    let cost = u64::try_from(throttle.quantity).ok()?;
    // The gate of a burst below zero is only for reading the usage.
    if throttle.rate.max_burst < 0 {
        return None;
    }
    Some((throttle.key, gates.find(throttle.rate)?.key(throttle.key).cost(cost)))
}

/// Executes any `CL.THROTTLE` request, also unusual ones.
pub(super) fn answer(client_state: &mut ClientState, request: &Request<'_>, reply: &mut Reply<'_>) -> Flow {
    let decided = Throttle::read(request).and_then(|throttle| decide(client_state, &throttle, reply));
    if let Err(problem) = decided {
        reply.error(format!("{ERROR_PREFIX}{problem}").as_bytes());
    }
    Flow::Continue
}

fn decide(
    client_state: &mut ClientState,
    throttle: &Throttle<'_>,
    reply: &mut Reply<'_>,
) -> Result<(), String> {
    let Throttle { key, rate, quantity } = *throttle;
    let ClientState { shared, principal: Some(principal), gates, tally, waiting, .. } = client_state else {
        return Err("the client is not authenticated".to_owned());
    };
    let limit = rate.max_burst.saturating_add(1);
    let gate = gates.get(rate, &shared.tenant(principal.tenant).resp)?;
    // A limit of zero or less charges nothing.
    let cost = if limit < 1 { 0 } else { u64::try_from(quantity).unwrap_or(0) };
    let (action, units) = if quantity < 0 {
        (MeterAction::Refund, quantity.unsigned_abs())
    } else {
        (MeterAction::Charge, cost)
    };
    let Ok(admission) = context(shared, principal.tenant).admit(|| RecordSubject::of_key(key, cost)) else {
        tally.note_shed();
        reply.integers([0, limit, 0, -1, 0]);
        return Ok(());
    };
    let zero_limit = (limit < 1).then_some(ZeroLimit { limit, quantity });
    let answer = |outcome: &Outcome<'_>| write_outcome(reply, outcome, zero_limit);
    let check = gate.region_check(key).cost(units);
    if !admission.decide_now(tally, key, &check, action, answer) {
        let check = PendingCheck::new(principal.tenant, gate, key, cost).with_zero_limit(zero_limit);
        waiting.push(PendingReply { place: reply.len(), check: Some(check) });
    }
    Ok(())
}

/// A limit of zero or less, and the requested quantity.
#[derive(Clone, Copy, Debug)]
pub(super) struct ZeroLimit {
    limit: i64,
    quantity: i64,
}

/// Writes the outcome of a check. Returns whether it passes.
pub(super) fn write_outcome(
    reply: &mut Reply<'_>,
    outcome: &Outcome<'_>,
    zero_limit: Option<ZeroLimit>,
) -> bool {
    let Some(zero_limit) = zero_limit else {
        write_plain(reply, outcome);
        return outcome.is_allowed();
    };
    let numbers = zero_limit.numbers(outcome.verdict().reset_after_us());
    reply.integers(numbers);
    numbers[0] == 0
}

impl ZeroLimit {
    /// Returns the reply. Only a quantity of 0 or less passes, if the limit is 0 and the meter is
    /// empty.
    fn numbers(self, reset_after_us: u64) -> [i64; 5] {
        let Self { limit, quantity } = self;
        let reset = seconds(reset_after_us);
        match (limit, quantity <= 0) {
            (0, true) if reset_after_us == 0 => [0, limit, 0, -1, 0],
            (0, true) => [1, limit, 0, reset, reset],
            _ => [1, limit, 0, -1, reset],
        }
    }
}

/// Writes the outcome of a plain check.
#[inline]
pub(super) fn write_plain(reply: &mut Reply<'_>, outcome: &Outcome<'_>) {
    let limit = i64::from(outcome.gate().limit().burst());
    let numbers = match outcome.verdict() {
        Verdict::Allow { remaining, reset_after_us } => {
            [0, limit, i64::from(remaining), -1, seconds(reset_after_us)]
        }
        Verdict::Deny { remaining, reset_after_us, retry } => {
            let retry = retry.after_us().map_or(-1, seconds);
            [1, limit, i64::from(remaining), retry, seconds(reset_after_us)]
        }
    };
    reply.integers(numbers);
}

/// Rounds to seconds as redis-cell does: drops the part below a millisecond, then rounds up.
#[inline]
fn seconds(us: u64) -> i64 {
    // Any 64-bit number of microseconds is far fewer seconds than fit.
    i64::try_from((us / 1_000).div_ceil(1_000)).unwrap_or(i64::MAX)
}
