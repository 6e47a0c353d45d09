//! Numbers as people read them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// `1234567` as `1,234,567`.
pub fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Bytes in the decimal unit that leaves one to three digits: `640 B`, `8.38 kB`, `4.72 MB`.
pub fn bytes(n: u64) -> String {
    let units = ["kB", "MB", "GB", "TB", "PB"];
    let mut value = n as f64;
    let mut unit = "B";
    for larger in units {
        // What would round to 1000 is 1 of the next.
        if value < 999.995 {
            break;
        }
        (value, unit) = (value / 1000.0, larger);
    }
    match unit {
        "B" => format!("{n} B"),
        _ => format!("{value:.2} {unit}"),
    }
}

/// Two units of a duration: `1h05m`, `1m52s`, `7s`.
pub fn duration(d: Duration) -> String {
    let seconds = d.as_secs_f64().round() as u64;
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        _ => format!("{}h{:02}m", seconds / 3600, seconds % 3600 / 60),
    }
}

/// A moment in UTC as `20260131-235959`, which sorts by time and is a legal file name everywhere.
pub fn timestamp(time: SystemTime) -> String {
    let seconds = time
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs();
    let (year, month, day) = civil(seconds / 86400);
    let rest = seconds % 86400;
    let (hour, minute, second) = (rest / 3600, rest % 3600 / 60, rest % 60);
    format!("{year:04}{month:02}{day:02}-{hour:02}{minute:02}{second:02}")
}

/// Year, month and day of a number of days since 1970-01-01, by Howard Hinnant's `civil_from_days`:
/// years start in March, so that the leap day comes last.
fn civil(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 {
        march_month + 3
    } else {
        march_month - 9
    };
    let year = year_of_era + 400 * era + u64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_units() {
        for (n, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (8_384, "8.38 kB"),
            (999_994, "999.99 kB"),
            (999_996, "1.00 MB"),
            (4_718_592, "4.72 MB"),
            (2_000_000_000_000, "2.00 TB"),
        ] {
            assert_eq!(bytes(n), text);
        }
    }

    #[test]
    fn numbers_are_grouped() {
        let pairs = [
            (0, "0"),
            (999, "999"),
            (1000, "1,000"),
            (1_234_567, "1,234,567"),
        ];
        for (n, text) in pairs {
            assert_eq!(grouped(n), text);
        }
    }

    #[test]
    fn durations_have_two_units() {
        let pairs = [
            (7.4, "7s"),
            (112.0, "1m52s"),
            (59.6, "1m00s"),
            (3900.0, "1h05m"),
        ];
        for (seconds, text) in pairs {
            assert_eq!(duration(Duration::from_secs_f64(seconds)), text);
        }
    }

    #[test]
    fn timestamps_know_leap_years() {
        let pairs = [
            (0, "19700101-000000"),
            (951_782_400, "20000229-000000"),
            (1_709_251_199, "20240229-235959"),
            (4_107_542_400, "21000301-000000"),
        ];
        for (seconds, text) in pairs {
            let time = UNIX_EPOCH + Duration::from_secs(seconds);
            assert_eq!(timestamp(time), text);
        }
    }
}
