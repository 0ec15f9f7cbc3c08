//! Times on the command line: of an expiry, and of a search.

use tidegate::{Clock as _, SystemClock};
use tidegate_server::{moment, parse_period, timestamp};

/// The last millisecond of the year 9999, which is the last year of RFC 3339.
const EXPIRY_MS_MAX: u64 = 253_402_300_799_999;

/// The wall clock, in milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    SystemClock::new().now().wall_us() / 1_000
}

/// Help of an `--expires` flag.
pub(crate) const EXPIRES_HELP: &str =
    "End: RFC 3339, a duration from now (90d), or Unix seconds or ms [default: never]";

/// Parses the value of an `--expires` flag, in milliseconds since 1970.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    parse_at(text, now_ms())
}

fn parse_at(text: &str, now_ms: u64) -> Result<u64, String> {
    let later = |period_ms| now_ms.saturating_add(period_ms);
    let at_ms = read(text, now_ms, later).ok_or_else(|| {
        "expected RFC 3339 (2026-12-31T00:00:00Z), a duration from now (30m, 90d), or Unix seconds or \
         milliseconds"
            .to_owned()
    })?;
    if at_ms <= now_ms {
        return Err(format!("{} is not in the future: it is {} now", timestamp(at_ms), timestamp(now_ms)));
    }
    if at_ms > EXPIRY_MS_MAX {
        return Err(format!("the time is after {}", timestamp(EXPIRY_MS_MAX)));
    }
    Ok(at_ms)
}

/// Parses a time in the past, and returns it as the server reads it. `now` is by the server's
/// clock.
pub(crate) fn parse_past(text: &str) -> Result<String, String> {
    past_at(text, now_ms())
}

fn past_at(text: &str, now_ms: u64) -> Result<String, String> {
    if text == "now" {
        return Ok(text.to_owned());
    }
    let at_ms = read(text, now_ms, |period_ms| now_ms.saturating_sub(period_ms)).ok_or_else(|| {
        "expected RFC 3339 (2026-12-31T00:00:00Z), a duration before now (30m, 90d), Unix seconds or \
         milliseconds, a UTC time of day (14:32:17), or \"now\""
            .to_owned()
    })?;
    Ok(timestamp(at_ms))
}

/// Reads a time; `relative` converts a duration in milliseconds.
fn read(text: &str, now_ms: u64, relative: impl Fn(u64) -> u64) -> Option<u64> {
    if let Ok(period) = parse_period(text) {
        return Some(relative(u64::try_from(period.as_millis()).unwrap_or(u64::MAX)));
    }
    moment(text, now_ms).ok()
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
        for text in ["0", "1794837600", "1794837600000", "2026-11-16T14:00:00Z", "0s"] {
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
        for text in [
            "",
            "soon",
            "-1",
            "1.5h",
            "2026-12-31",
            "31.12.2026",
            "2026-13-01T00:00:00Z",
            "1969-12-31T00:00:00Z",
        ] {
            let problem = parse_at(text, NOW_MS).expect_err(text);
            assert!(problem.starts_with("expected RFC 3339"), "{text}: {problem}");
        }
        for text in ["253402300800000", "18446744073709551615", "18446744073709551615us"] {
            let problem = parse_at(text, NOW_MS).expect_err(text);
            assert!(problem.starts_with("the time is after 9999-12-31T23:59:59.999Z"), "{text}: {problem}");
        }
    }

    #[test]
    fn times_of_a_search_have_the_same_forms_and_lie_in_the_past() {
        for (text, expected) in [
            ("now", "now"),
            ("1794837600", "2026-11-16T14:00:00.000Z"),
            ("1794837600000", "2026-11-16T14:00:00.000Z"),
            ("30m", "2026-11-16T13:30:00.000Z"),
            ("13:59:59", "2026-11-16T13:59:59.000Z"),
            ("2026-11-15T09:08:07Z", "2026-11-15T09:08:07.000Z"),
        ] {
            assert_eq!(past_at(text, NOW_MS).as_deref(), Ok(expected), "{text}");
        }
        let problem = past_at("yesterday", NOW_MS).expect_err("no time");
        assert!(problem.starts_with("expected RFC 3339"), "{problem}");
    }
}
