//! Expiry times on the command line.

use jiff::Timestamp;
use tidegate::{Clock as _, SystemClock};
use tidegate_server::{parse_period, timestamp};

/// A bare number below this is Unix seconds, otherwise milliseconds. As milliseconds, it is in
/// 1973.
const UNIX_SECONDS_END: u64 = 100_000_000_000;

/// The last millisecond of the year 9999, which is the last year of RFC 3339.
const EXPIRY_MS_MAX: u64 = 253_402_300_799_999;

/// The wall clock, in milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    SystemClock::new().now().wall_us() / 1_000
}

/// Parses the value of an `--expires` flag, in milliseconds since 1970.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    parse_at(text, now_ms())
}

fn parse_at(text: &str, now_ms: u64) -> Result<u64, String> {
    let at_ms = if let Ok(number) = text.parse::<u64>() {
        if number < UNIX_SECONDS_END { number * 1_000 } else { number }
    } else if let Ok(period) = parse_period(text) {
        now_ms.saturating_add(u64::try_from(period.as_millis()).unwrap_or(u64::MAX))
    } else {
        let at: Timestamp = text.parse().map_err(|_| {
            "expected RFC 3339 (2026-12-31T00:00:00Z), a duration from now (30m, 90d), or Unix seconds or \
             milliseconds"
                .to_owned()
        })?;
        // A time before 1970 is in the past, too.
        u64::try_from(at.as_millisecond()).unwrap_or(0)
    };
    if at_ms <= now_ms {
        return Err(format!("{} is not in the future: it is {} now", timestamp(at_ms), timestamp(now_ms)));
    }
    if at_ms > EXPIRY_MS_MAX {
        return Err(format!("the time is after {}", timestamp(EXPIRY_MS_MAX)));
    }
    Ok(at_ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2026-11-16 14:00:00 UTC.
    const NOW_MS: u64 = 1_794_837_600_000;

    #[test]
    fn all_forms_of_a_time_are_read() {
        for (text, expected) in [
            ("2026-12-31T00:00:00Z", "2026-12-31T00:00:00.000Z"),
            ("2026-12-31T02:00:00.5+02:00", "2026-12-31T00:00:00.500Z"),
            ("30m", "2026-11-16T14:30:00.000Z"),
            ("90d", "2027-02-14T14:00:00.000Z"),
            ("1ms", "2026-11-16T14:00:00.001Z"),
            ("1798761600", "2027-01-01T00:00:00.000Z"),
            ("1798761600000", "2027-01-01T00:00:00.000Z"),
            ("99999999999", "5138-11-16T09:46:39.000Z"),
        ] {
            assert_eq!(parse_at(text, NOW_MS).map(timestamp).as_deref(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn times_in_the_past_are_refused_with_both_times() {
        for text in ["0", "1794837600", "1794837600000", "2026-11-16T14:00:00Z", "1969-12-31T00:00:00Z", "0s"]
        {
            let problem = parse_at(text, NOW_MS).expect_err(text);
            assert!(
                problem.contains("is not in the future: it is 2026-11-16T14:00:00.000Z now"),
                "{problem}"
            );
        }
        // As milliseconds, the first of these would be in 1973.
        let problem = parse_at("100000000000", NOW_MS).expect_err("in 1973");
        assert!(problem.starts_with("1973-03-03T09:46:40.000Z is not in the future"), "{problem}");
    }

    #[test]
    fn anything_else_is_refused_with_the_forms() {
        for text in ["", "soon", "-1", "1.5h", "2026-12-31", "31.12.2026", "2026-13-01T00:00:00Z"] {
            let problem = parse_at(text, NOW_MS).expect_err(text);
            assert!(problem.starts_with("expected RFC 3339"), "{text}: {problem}");
        }
        for text in ["253402300800000", "18446744073709551615", "18446744073709551615us"] {
            let problem = parse_at(text, NOW_MS).expect_err(text);
            assert!(problem.starts_with("the time is after 9999-12-31T23:59:59.999Z"), "{text}: {problem}");
        }
    }
}
