//! The limiters that are compared, one file each; a new one is a file here and a line in [`ALL`].

mod floor;
mod governor;
mod limitador;
mod pingora;
mod throttlecrab;
mod tidegate;

use std::time::Duration;

use anyhow::Result;

use crate::fill;
use crate::stream::NAME_LEN;
use crate::workload::Workload;

/// Every contender, in the order of the tables.
pub(crate) const ALL: &[Entry] = &[
    tidegate::ENTRY,
    floor::ENTRY,
    governor::BY_STRING,
    governor::BY_NUMBER,
    throttlecrab::ENTRY,
    pingora::ENTRY,
    limitador::ENTRY,
];

/// A limiter under measurement.
pub(crate) trait Contender: Sync {
    /// Checks every request of the batch and returns the number of allowed ones. An error is a
    /// denial: the printed share of allowed requests would show it.
    fn check(&self, batch: &Batch<'_>) -> u64;
}

/// The variants of one limiter.
pub(crate) type Contenders = Vec<Box<dyn Contender>>;

/// The static description of a limiter.
pub(crate) struct Entry {
    /// The measured ways to call it, a row each.
    pub(crate) variants: &'static [Variant],
    pub(crate) role: Role,
    /// Makes a contender per variant, all over one store: filling it through the first is enough.
    pub(crate) make: fn(&Workload) -> Result<Contenders>,
    /// `None` for a limiter without state per key: there is nothing to fill.
    pub(crate) key_cost: Option<KeyCost>,
}

/// A row of the tables.
pub(crate) struct Variant {
    pub(crate) contender: &'static str,
    /// Remark for the reader of the row.
    pub(crate) note: Option<&'static str>,
}

/// Whether a case makes sense without the contender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Left out when its keys take too long to fill.
    Peer,
    /// The reference of the ratios: always run.
    Yardstick,
}

/// Approximate cost of one live key: wall time with all threads filling, and memory. Contenders
/// that cannot be filled are left out in advance. Both values are from runs of this benchmark on
/// two cores.
pub(crate) struct KeyCost {
    pub(crate) fill_ns: u64,
    pub(crate) bytes: u64,
}

impl Entry {
    /// The name of its first variant, for notes about all of them.
    pub(crate) fn contender(&self) -> &'static str {
        self.variants.first().map_or("", |variant| variant.contender)
    }

    /// Returns the time that the fill may take; `None` for a contender that is never left out.
    pub(crate) fn fill_budget(&self, full: bool) -> Option<Duration> {
        (self.role == Role::Peer && !full).then_some(fill::BUDGET)
    }
}

/// The entry that has a variant of this name.
pub(crate) fn find(contender: &str) -> Option<&'static Entry> {
    ALL.iter().find(|entry| entry.variants.iter().any(|variant| variant.contender == contender))
}

/// Requests to decide, as a run of keys: `limits` keys make one request.
pub(crate) struct Batch<'a> {
    names: &'a str,
    pub(crate) numbers: &'a [u64],
    pub(crate) limits: usize,
    /// Whether other threads are measured at the same time. A contender must not then hold a lock
    /// for the whole batch.
    pub(crate) contended: bool,
}

impl<'a> Batch<'a> {
    /// `names` are the names of `numbers`, back to back.
    pub(crate) fn new(names: &'a str, numbers: &'a [u64], limits: usize, contended: bool) -> Self {
        Self { names, numbers, limits, contended }
    }

    /// The key names in order; each `limits` of them are one request.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'a str> {
        let names = self.names;
        (0..self.numbers.len()).map(move |index| &names[index * NAME_LEN..(index + 1) * NAME_LEN])
    }

    /// The key names of each request.
    pub(crate) fn requests(&self) -> impl Iterator<Item = impl Iterator<Item = &'a str>> {
        let (names, request_len) = (self.names, self.limits * NAME_LEN);
        (0..self.numbers.len() / self.limits).map(move |request| {
            let names = &names[request * request_len..(request + 1) * request_len];
            (0..names.len() / NAME_LEN).map(move |index| &names[index * NAME_LEN..(index + 1) * NAME_LEN])
        })
    }

    /// Counts the requests of which `allow` grants every key, for limiters that take names.
    pub(crate) fn count_by_name(&self, allow: impl FnMut(&str) -> bool) -> u64 {
        self.count(self.names(), allow)
    }

    /// Counts the requests of which `allow` grants every key, for limiters that take numbers.
    pub(crate) fn count_by_number(&self, allow: impl FnMut(u64) -> bool) -> u64 {
        self.count(self.numbers.iter().copied(), allow)
    }

    /// Counts allowed requests. The later limits of a request are checked even after a denial, so
    /// that each batch is the same work.
    fn count<K>(&self, keys: impl Iterator<Item = K>, mut allow: impl FnMut(K) -> bool) -> u64 {
        if self.limits == 1 {
            return keys.map(|key| u64::from(allow(key))).sum();
        }
        let (mut allowed, mut asked, mut granted) = (0, 0, true);
        for key in keys {
            granted &= allow(key);
            asked += 1;
            if asked == self.limits {
                allowed += u64::from(granted);
                (asked, granted) = (0, true);
            }
        }
        allowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn a_request_is_allowed_when_all_its_limits_are() {
        let batch = Batch::new("", &[1, 2, 3, 4, 5, 6], 2, false);
        assert_eq!(batch.count_by_number(|key| key != 3), 2);
    }

    #[test]
    fn every_limit_is_asked_after_a_denial() {
        let mut asked = 0;
        let batch = Batch::new("", &[1, 2, 3, 4], 4, false);
        assert_eq!(
            batch.count_by_number(|_| {
                asked += 1;
                false
            }),
            0
        );
        assert_eq!(asked, 4);
    }

    #[test]
    fn no_two_contenders_share_a_name() {
        let names: Vec<_> =
            ALL.iter().flat_map(|entry| entry.variants).map(|variant| variant.contender).collect();
        assert_eq!(names.iter().collect::<HashSet<_>>().len(), names.len());
    }
}
