//! Numbers as people read them, in few characters.

use std::time::Duration;

use indicatif::{HumanBytes, HumanCount};

use crate::output::human;

/// `1,234`, below ten with a digit after the point; a dash if it isn't known.
pub(super) fn rate(rate: Option<f64>) -> String {
    match rate {
        None => "-".to_owned(),
        Some(rate) if rate < 9.95 => format!("{rate:.1}"),
        Some(rate) => count(rate.round() as u64),
    }
}

pub(super) fn count(count: u64) -> String {
    HumanCount(count).to_string()
}

pub(super) fn bytes(bytes: u64) -> String {
    HumanBytes(bytes).to_string()
}

pub(super) fn percent(share: Option<f64>) -> String {
    match share.map(|share| share * 100.0) {
        None => "-".to_owned(),
        Some(percent) if percent > 0.0 && percent < 9.95 => format!("{percent:.1}%"),
        Some(percent) => format!("{percent:.0}%"),
    }
}

pub(super) fn micros(us: Option<f64>) -> String {
    match us {
        None => "-".to_owned(),
        Some(us) if us < 99.95 => format!("{us:.1}us"),
        Some(us) => human(Duration::from_micros(us.round() as u64)),
    }
}

/// The largest unit alone: `3h`.
pub(super) fn age(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m", seconds / 60),
        3600..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_what_is_unknown_is_a_dash() {
        let rates = [None, Some(0.0), Some(9.94), Some(9.96), Some(1234.5), Some(2e6)].map(rate);
        assert_eq!(rates, ["-", "0.0", "9.9", "10", "1,235", "2,000,000"]);
        let shares = [None, Some(0.0), Some(0.004), Some(0.5), Some(1.0)].map(percent);
        assert_eq!(shares, ["-", "0%", "0.4%", "50%", "100%"]);
        assert_eq!([None, Some(11.007), Some(1500.2)].map(micros), ["-", "11.0us", "1.5ms"]);
        assert_eq!([5, 61, 7200, 172_800].map(age), ["5s", "1m", "2h", "2d"]);
    }
}
