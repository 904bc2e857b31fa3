//! How much may be denied: a share of the requests or of the keys.

use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;

/// The digits after the point of a percentage.
const DIGITS: usize = 6;
/// A whole, in millionths of a percent.
const WHOLE: u64 = 100 * 1_000_000;

/// A share such as `0.1%`, exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Share(u64);

/// What a share is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Of {
    /// Of all requests, this share may be denied.
    Requests,
    /// Of all keys, this share may have any request denied.
    Keys,
}

/// How much may be denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bound {
    pub(super) share: Share,
    pub(super) of: Of,
}

impl Bound {
    /// How many requests or keys may be denied of so many.
    pub(super) fn of(self, requests: u64, keys: u64) -> u64 {
        let total = if self.of == Of::Requests { requests } else { keys };
        let part = u128::from(total) * u128::from(self.share.0) / u128::from(WHOLE);
        u64::try_from(part).unwrap_or(u64::MAX)
    }
}

impl FromStr for Share {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let read = || {
            let percent = text.strip_suffix('%')?.trim_end();
            let (whole, digits) = percent.split_once('.').unwrap_or((percent, "0"));
            let are_digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            if !are_digits(whole) || !are_digits(digits) || digits.len() > DIGITS {
                return None;
            }
            let millionths = format!("{whole}{digits:0<DIGITS$}").parse().ok()?;
            (millionths <= WHOLE).then_some(Self(millionths))
        };
        read().ok_or_else(|| format!("expected a share from 0% to 100%, such as 0.1%, of at most {DIGITS} decimals"))
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = format!("{}.{:0>DIGITS$}", self.0 / 1_000_000, self.0 % 1_000_000);
        write!(f, "{}%", digits.trim_end_matches('0').trim_end_matches('.'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_read_exactly_and_rounded_down() {
        for (text, shown, of_ten_thousand) in [
            ("0%", "0%", 0),
            ("0.1%", "0.1%", 10),
            ("0.19%", "0.19%", 19),
            ("00.0199 %", "0.0199%", 1),
            ("33.333333%", "33.333333%", 3333),
            ("100%", "100%", 10_000),
        ] {
            let share: Share = text.parse().unwrap();
            assert_eq!(share.to_string(), shown);
            assert_eq!(Bound { share, of: Of::Requests }.of(10_000, 3), of_ten_thousand, "{text}");
            assert_eq!(Bound { share, of: Of::Keys }.of(3, 10_000), of_ten_thousand, "{text}");
        }
        assert_eq!(Bound { share: "100%".parse().unwrap(), of: Of::Keys }.of(0, u64::MAX), u64::MAX);
    }

    #[test]
    fn anything_else_is_refused() {
        for text in ["", "%", "1", "0.001", "-1%", "+1%", "100.000001%", "1e3%", ".5%", "5.%", "0.1234567%", "nan%"] {
            let why = text.parse::<Share>().unwrap_err();
            assert!(why.starts_with("expected a share from 0% to 100%"), "{text}: {why}");
        }
    }
}
