//! Moments as people write them.

use time::format_description::well_known::Rfc3339;
use time::{Date, OffsetDateTime, Time, UtcDateTime};

const DAY_MS: u64 = 86_400_000;

/// A bare number below this is Unix seconds, otherwise milliseconds. As milliseconds, it is in
/// 1973.
const UNIX_SECONDS_END: u64 = 100_000_000_000;

/// A moment in milliseconds since the Unix epoch: from RFC 3339, such as `2026-11-16T14:32:17Z`;
/// from a time of day by UTC, such as `14:32:17` or `14:32`, the last one until `now_ms`; from Unix
/// seconds or milliseconds; or `now`.
pub fn moment(text: &str, now_ms: u64) -> Result<u64, String> {
    if text == "now" {
        return Ok(now_ms);
    }
    if let Ok(number) = text.parse::<u64>() {
        return Ok(if number < UNIX_SECONDS_END { number * 1_000 } else { number });
    }
    if let Some(of_day_ms) = time_of_day(text) {
        let today = now_ms / DAY_MS * DAY_MS + of_day_ms;
        return Ok(if today > now_ms { today.saturating_sub(DAY_MS) } else { today });
    }
    let parsed = OffsetDateTime::parse(text, &Rfc3339).ok();
    parsed.and_then(|at| u64::try_from(at.unix_timestamp_nanos() / 1_000_000).ok()).ok_or_else(|| {
        format!(
            "{text:?} is neither RFC 3339, such as 2026-11-16T14:32:17Z, nor a time of day by UTC, such as \
             14:32:17, nor Unix seconds or milliseconds, nor \"now\""
        )
    })
}

fn time_of_day(text: &str) -> Option<u64> {
    // Parsed as part of a full timestamp, so that all notations of seconds work alike.
    let seconds = if text.len() == "14:32".len() { ":00" } else { "" };
    let whole = OffsetDateTime::parse(&format!("1970-01-01T{text}{seconds}Z"), &Rfc3339).ok()?;
    u64::try_from(whole.unix_timestamp_nanos() / 1_000_000).ok()
}

/// A moment as RFC 3339 writes it, to the millisecond, by UTC.
pub fn timestamp(at_ms: u64) -> String {
    let at = i64::try_from(at_ms / 1_000).ok().and_then(|s| UtcDateTime::from_unix_timestamp(s).ok());
    // Beyond the year 9999 there is no such text.
    let at = at.unwrap_or(UtcDateTime::new(Date::MAX, Time::MIDNIGHT));
    let (date, time) = (at.date(), at.time());
    format!("{date}T{:02}:{:02}:{:02}.{:03}Z", time.hour(), time.minute(), time.second(), at_ms % 1_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2026-11-16 14:00:00.250 UTC.
    const NOW_MS: u64 = 1_794_837_600_250;

    #[test]
    fn moments_are_read_as_people_write_them() {
        for (text, expected) in [
            ("now", "2026-11-16T14:00:00.250Z"),
            ("13:59:59", "2026-11-16T13:59:59.000Z"),
            ("14:00", "2026-11-16T14:00:00.000Z"),
            ("14:32:17", "2026-11-15T14:32:17.000Z"),
            ("14:32:17.5", "2026-11-15T14:32:17.500Z"),
            ("2026-11-15T09:08:07Z", "2026-11-15T09:08:07.000Z"),
            ("2026-11-15T09:08:07.125+02:00", "2026-11-15T07:08:07.125Z"),
            ("0", "1970-01-01T00:00:00.000Z"),
            ("1794837600", "2026-11-16T14:00:00.000Z"),
            ("1794837600250", "2026-11-16T14:00:00.250Z"),
            ("99999999999", "5138-11-16T09:46:39.000Z"),
            ("100000000000", "1973-03-03T09:46:40.000Z"),
        ] {
            assert_eq!(moment(text, NOW_MS).map(timestamp).as_deref(), Ok(expected), "{text}");
        }
        for wrong in
            ["", "25:00", "14:61:00", "yesterday", "2026-11-31T00:00:00Z", "1969-12-31T23:59:59Z", "-1"]
        {
            assert!(moment(wrong, NOW_MS).is_err(), "{wrong}");
        }
        assert_eq!(timestamp(u64::MAX), "9999-12-31T00:00:00.615Z");
    }
}
