//! How long the slowest of many requests took.

use anyhow::{Result, ensure};
use hdrhistogram::Histogram;
use serde::Serialize;

/// Significant digits of a recorded time.
const DIGITS: u8 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Tail {
    pub(crate) requests: u64,
    pub(crate) p99_us: u64,
    pub(crate) p999_us: u64,
}

impl Tail {
    /// Computes the tail of these latencies. Fails if there are none.
    pub(crate) fn of(took_us: impl IntoIterator<Item = u64>) -> Result<Self> {
        let mut times = Histogram::<u64>::new(DIGITS)?;
        for us in took_us {
            times.record(us)?;
        }
        ensure!(!times.is_empty(), "no request to compute the latency of");
        Ok(Self {
            requests: times.len(),
            p99_us: times.value_at_quantile(0.99),
            p999_us: times.value_at_quantile(0.999),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tail_is_the_p99_and_p999_latency() {
        let tail = Tail::of((1..=1_000).rev()).unwrap();
        assert_eq!(tail, Tail { requests: 1_000, p99_us: 990, p999_us: 999 });
        let alike = Tail::of([7; 50]).unwrap();
        assert_eq!((alike.p99_us, alike.p999_us), (7, 7));
        let slow = Tail::of([1; 980].into_iter().chain([90_000_000; 20])).unwrap();
        assert!(slow.p99_us.abs_diff(90_000_000) < 90_000, "{slow:?}");
    }

    #[test]
    fn tail_of_no_requests_is_an_error() {
        assert!(Tail::of([]).is_err());
    }
}
