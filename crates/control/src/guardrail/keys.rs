//! Estimates of the requests of a key from a sample of its records.
//!
//! For a key with many records, each record but one stands for the requests it was drawn from, and
//! that one for itself. On average this is correct, however many requests the key had. A single
//! record shows nothing: the key may have had one request or a thousand. The requests behind each
//! record of keys with `n` records follow from the number of keys with `n + 1` records (Good and
//! Turing, Robbins). If no key has two records, few of those with one had many requests. The
//! precision depends on the number of keys with two records, so there is a [`Guess`] of the likely
//! number and one of the maximum.

use std::collections::HashMap;

use super::meter::Stream;
use super::rate::{Rate, as_real};

/// A key with this many records or more is estimated by its own records. Keys with fewer records
/// are estimated together.
const OWN_FROM: usize = 5;

/// Minimum number of keys with `n` records for an estimate from those with `n + 1`.
const KEYS_MIN: f64 = 20.0;

/// Standard deviations that [`Guess::AtMost`] adds to the number of keys with two records.
const DEVIATIONS_MAX: f64 = 2.0;

/// Assumption about keys with one record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Guess {
    Likely,
    AtMost,
}

/// Sampled records of a key.
#[derive(Clone, Copy, Debug)]
struct Key {
    rule: u32,
    drawn: u32,
    /// Requests that its records were drawn from, but for themselves.
    behind: f64,
    cost: f64,
    first_ms: u64,
    last_ms: u64,
    /// The highest level of its limit at one of the records, and the drain rate; `None` if one of
    /// them does not show it.
    spent: Option<SpentLevel>,
}

/// Level and rate of a limit that was in force at a record: an upper bound of the passed requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct SpentLevel {
    pub(super) level: u32,
    pub(super) rate: Rate,
}

impl Key {
    /// The time span of its requests, if they came evenly.
    fn span_ms(&self) -> f64 {
        let drawn = f64::from(self.drawn);
        as_real(self.last_ms.saturating_sub(self.first_ms)) * (drawn + 1.0) / (drawn - 1.0).max(1.0)
    }
}

/// Statistics of all keys of a rule.
#[derive(Clone, Copy, Debug, Default)]
struct Pool {
    /// Keys by how many records they have, up to a few.
    keys: [f64; OWN_FROM + 1],
    /// Sum of the time spans of keys with several records.
    spans_ms: f64,
}

/// A record of a sample.
#[derive(Clone, Copy, Debug)]
pub(super) struct SampledRecord {
    pub(super) at_ms: u64,
    /// The number of requests that it was drawn from.
    pub(super) from: f64,
    pub(super) cost: u64,
    pub(super) spent: Option<SpentLevel>,
}

/// The keys of a sample, by their meters.
#[derive(Debug, Default)]
pub(super) struct Keys(HashMap<u64, Key>);

impl Keys {
    /// Takes a record.
    pub(super) fn note(&mut self, (rule, place): (u32, u64), drawn: &SampledRecord) {
        let SampledRecord { at_ms, from, cost, spent } = *drawn;
        let new = Key { rule, drawn: 0, behind: 0.0, cost: 0.0, first_ms: at_ms, last_ms: at_ms, spent };
        let key = self.0.entry(place).or_insert(new);
        key.drawn += 1;
        key.behind += from - 1.0;
        key.cost += as_real(cost);
        key.last_ms = key.last_ms.max(at_ms);
        key.spent = key.spent.zip(spent).map(|(a, b)| if a.level > b.level { a } else { b });
    }

    /// Returns the requests of each key that were not sampled, over at most `window_ms`.
    pub(super) fn streams(self, window_ms: u64, guess: Guess) -> HashMap<u64, Stream> {
        let pools = self.pools();
        let window_ms = as_real(window_ms.max(1));
        let stream = |(place, key): (u64, Key)| {
            let pool = pools.get(&key.rule).copied().unwrap_or_default();
            Some((place, stream(&key, &pool, window_ms, guess)?))
        };
        self.0.into_iter().filter_map(stream).collect()
    }

    fn pools(&self) -> HashMap<u32, Pool> {
        let mut pools: HashMap<u32, Pool> = HashMap::new();
        for key in self.0.values() {
            let pool = pools.entry(key.rule).or_default();
            if let Some(keys) = pool.keys.get_mut(key.drawn as usize) {
                *keys += 1.0;
            }
            if (2..OWN_FROM).contains(&(key.drawn as usize)) {
                pool.spans_ms += key.span_ms();
            }
        }
        pools
    }
}

impl Pool {
    /// Estimates the other records of a key with this many, if the log sampled its requests again.
    fn others(&self, drawn: usize, guess: Guess) -> f64 {
        let own = f64::from(u32::try_from(drawn.saturating_sub(1)).unwrap_or(u32::MAX));
        let (Some(&keys), Some(&more)) = (self.keys.get(drawn), self.keys.get(drawn + 1)) else { return own };
        let of_more = |more: f64| ((own + 2.0) * more / keys.max(1.0)).min(own + 1.0);
        match (drawn, guess) {
            (1, Guess::Likely) => of_more(more),
            (1, Guess::AtMost) => of_more(more + DEVIATIONS_MAX * (more + 1.0).sqrt()),
            (_, Guess::Likely) if keys >= KEYS_MIN => of_more(more),
            _ => own,
        }
    }

    /// Returns the time span of the requests of keys with few records: the mean of the keys that
    /// have several, or the whole window if none has.
    fn span_ms(&self, window_ms: f64) -> f64 {
        let several: f64 = self.keys.iter().take(OWN_FROM).skip(2).sum();
        if several > 0.0 { self.spans_ms / several } else { window_ms }
    }
}

fn stream(key: &Key, pool: &Pool, window_ms: f64, guess: Guess) -> Option<Stream> {
    let drawn = f64::from(key.drawn);
    let share = pool.others(key.drawn as usize, guess) / drawn;
    if share * key.behind <= 0.0 {
        return None;
    }
    let span_ms = if (key.drawn as usize) < OWN_FROM { pool.span_ms(window_ms) } else { key.span_ms() };
    let span_ms = whole(span_ms.clamp(1.0, window_ms));
    let mean_cost = key.cost / drawn;
    // The units that passed have drained since, or are part of the level.
    let most = |spent: SpentLevel| {
        (f64::from(spent.level) + spent.rate.per_ms() * as_real(span_ms)) / mean_cost.max(1.0) - drawn
    };
    let requests = (share * key.behind).min(key.spent.map_or(f64::INFINITY, most)).max(0.0);
    // Requests of a whole cost that together have the same units.
    let cost = mean_cost.round().max(if mean_cost > 0.0 { 1.0 } else { 0.0 });
    let requests = if cost > 0.0 { requests * mean_cost / cost } else { requests };
    Some(Stream {
        from_ms: key.last_ms.saturating_sub(span_ms),
        to_ms: key.last_ms,
        requests: whole(requests.round()),
        cost: whole(cost),
    })
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "no number here is negative, and a larger one saturates"
)]
fn whole(number: f64) -> u64 {
    number as u64
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tidegate_core::Limit;

    use super::*;

    const HOUR_MS: u64 = 3_600_000;

    fn drawn(at_ms: u64, from: f64, cost: u64) -> SampledRecord {
        SampledRecord { at_ms, from, cost, spent: None }
    }

    /// The requests behind the records of keys, each of which has records at these times.
    fn behind(keys: &[(u64, &[u64])], drawn_from: f64, guess: Guess) -> HashMap<u64, u64> {
        let mut all = Keys::default();
        for (place, at) in keys {
            at.iter().for_each(|at_ms| all.note((0, *place), &drawn(*at_ms, drawn_from, 1)));
        }
        let streams = all.streams(HOUR_MS, guess);
        streams.into_iter().map(|(place, stream)| (place, stream.requests)).collect()
    }

    #[test]
    fn unsampled_log_has_no_hidden_requests() {
        for guess in [Guess::Likely, Guess::AtMost] {
            assert_eq!(behind(&[(1, &[5, 6, 7]), (2, &[5])], 1.0, guess), HashMap::new());
        }
    }

    #[test]
    fn keys_with_several_records_stand_for_many_requests_and_lonely_ones_for_themselves() {
        assert_eq!(behind(&[(1, &[5]), (2, &[6]), (3, &[7])], 1_000.0, Guess::Likely), HashMap::new());
        // Each of the others for a thousand, and itself, less the four that are there.
        let known =
            behind(&[(1, &[5_000, 6_000, 7_000, 8_000]), (2, &[6]), (3, &[7])], 1_000.0, Guess::Likely);
        assert_eq!(known, HashMap::from([(1, 2_997)]));
    }

    #[test]
    fn keys_with_two_records_weight_those_with_one() {
        let keys: Vec<(u64, &[u64])> =
            (0..90).map(|at| (at, &[5_000][..])).chain([(100, &[4_000, 5_000][..])]).collect();
        let known = behind(&keys, 1_000.0, Guess::Likely);
        assert_eq!((known[&0], known[&100]), (22, 999));
        // One pair, and two standard deviations more.
        let most = behind(&keys, 1_000.0, Guess::AtMost);
        assert_eq!((most[&0], most[&100]), (85, 999));
    }

    #[test]
    fn requests_come_for_as_long_as_records_are_apart() {
        let mut all = Keys::default();
        (0..6).for_each(|at| all.note((0, 1), &drawn(10_000 + at * 1_000, 1_000.0, 2)));
        all.note((0, 2), &drawn(10_000, 1_000.0, 1));
        all.note((0, 2), &drawn(13_000, 1_000.0, 1));
        all.note((0, 3), &drawn(99_000, 1_000.0, 1));
        let streams = all.streams(HOUR_MS, Guess::Likely);
        let measured = |place: u64| (streams[&place].from_ms, streams[&place].to_ms, streams[&place].cost);
        assert_eq!([1, 2, 3].map(measured), [(8_000, 15_000, 2), (4_000, 13_000, 1), (90_000, 99_000, 1)]);
    }

    #[test]
    fn no_more_passed_than_was_spent_and_leaked() {
        let limit = Limit::gcra(60, Duration::from_mins(1)).expect("in range");
        let mut all = Keys::default();
        for (place, at_ms) in [(1, 10_000), (2, 10_000), (3, 10_000), (3, 12_000)] {
            let spent = Some(SpentLevel { level: 7, rate: Rate::of(&limit) });
            all.note((0, place), &SampledRecord { spent, ..drawn(at_ms, 1_000.0, 1) });
        }
        let streams = all.streams(HOUR_MS, Guess::Likely);
        // Seven were spent and six leaked in six seconds, and some of them are there.
        assert_eq!([1, 2, 3].map(|place| streams[&place].requests), [12, 12, 11]);
    }

    #[test]
    fn keys_with_one_more_record_weight_those_with_several() {
        let [ones, twos, threes] = [&[9_000][..], &[8_000, 9_000], &[7_000, 8_000, 9_000]];
        let keys = |count: u64, from: u64, at: &'static [u64]| (from..from + count).map(move |key| (key, at));
        let all: Vec<(u64, &[u64])> =
            keys(200, 0, ones).chain(keys(40, 1_000, twos)).chain(keys(4, 2_000, threes)).collect();
        let known = behind(&all, 1_001.0, Guess::Likely);
        // 2 * 40 / 200, 3 * 4 / 40; four keys are too few, so their own records count.
        assert_eq!((known[&0], known[&1_000], known[&2_000]), (400, 300, 2_000));
    }
}
