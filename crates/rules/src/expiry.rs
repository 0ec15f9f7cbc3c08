//! Expiry times as people write them.

use jiff::Timestamp;
use toml::Value;

use crate::fields::{INSTANT_MS_MAX, kind_of};

/// The earliest expiry, in milliseconds since the Unix epoch: in 2001. A smaller number is more
/// likely a time in seconds. As seconds, this one is far after the year 9999.
const EXPIRY_MS_MIN: i64 = 1_000_000_000_000;
/// The latest: the end of the year 9999.
const EXPIRY_MS_MAX: i64 = INSTANT_MS_MAX.cast_signed();

/// The forms of an expiry in a row.
const FORMS: &str =
    "expected milliseconds since the Unix epoch (1798761600000) or RFC 3339 (2027-01-01T00:00:00Z)";

/// Reads an expiry in milliseconds since the Unix epoch, which is the form of stored rows. Files
/// and requests may also have RFC 3339, as a text or as a date of TOML.
pub fn read_expiry(value: &Value) -> Result<i64, String> {
    let (text, at_ms) = match value {
        Value::Integer(number) => (number.to_string(), *number),
        Value::String(text) => (text.clone(), instant_ms(text)?),
        Value::Datetime(date) => (date.to_string(), instant_ms(&date.to_string())?),
        other => return Err(format!("{FORMS}, not {}", kind_of(other))),
    };
    if (EXPIRY_MS_MIN..=EXPIRY_MS_MAX).contains(&at_ms) {
        return Ok(at_ms);
    }
    Err(format!("{text} is outside {EXPIRY_MS_MIN} to {EXPIRY_MS_MAX}: {FORMS}"))
}

fn instant_ms(text: &str) -> Result<i64, String> {
    let at: Timestamp = text.parse().map_err(|_| format!("{text:?}: {FORMS}"))?;
    Ok(at.as_millisecond())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<i64, String> {
        let table: toml::Table = format!("expires = {text}").parse().expect("TOML");
        read_expiry(&table["expires"])
    }

    #[test]
    fn an_expiry_is_in_milliseconds_or_rfc_3339() {
        for text in
            ["1798761600000", "2027-01-01T00:00:00Z", "'2027-01-01T00:00:00Z'", "2027-01-01T02:00:00+02:00"]
        {
            assert_eq!(read(text), Ok(1_798_761_600_000), "{text}");
        }
        for text in ["1798761600", "0", "-1", "253402300800000", "1969-12-31T00:00:00Z"] {
            let problem = read(text).expect_err(text);
            assert!(
                problem.contains(" is outside 1000000000000 to 253402300799999: expected milliseconds"),
                "{problem}"
            );
        }
        for text in ["true", "'90d'", "2027-01-01", "2027-01-01T00:00:00", "1.5"] {
            let problem = read(text).expect_err(text);
            assert!(problem.contains("milliseconds since the Unix epoch"), "{problem}");
        }
    }
}
