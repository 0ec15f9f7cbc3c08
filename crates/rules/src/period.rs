//! Periods as people write them.

use std::time::Duration;

/// The units a period may have, longest name first where one begins like another.
const UNITS: &[(&str, u64)] = &[
    ("us", 1),
    ("ms", 1_000),
    ("s", 1_000_000),
    ("m", 60 * 1_000_000),
    ("h", 3_600 * 1_000_000),
    ("d", 86_400 * 1_000_000),
];

/// A period such as `250ms`, `1s`, `5m`, `1h` or `30d`.
pub fn parse_period(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is not a number and a unit of us, ms, s, m, h or d, such as \"1m\"");
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let (_, micros) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(wrong)?;
    number.checked_mul(*micros).map(Duration::from_micros).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn periods_are_a_number_and_a_unit() {
        let cases = [
            ("250ms", Ok(Duration::from_millis(250))),
            ("1s", Ok(Duration::from_secs(1))),
            ("5m", Ok(Duration::from_mins(5))),
            ("2h", Ok(Duration::from_hours(2))),
            ("30d", Ok(Duration::from_hours(720))),
        ];
        for (text, period) in cases {
            assert_eq!(parse_period(text), period, "{text}");
        }
        for text in
            ["", "s", "10", "-1s", "1.5s", "1 s", "1w", "99999999999999999999s", "18446744073709551615d"]
        {
            assert!(parse_period(text).is_err(), "{text}");
        }
    }
}
