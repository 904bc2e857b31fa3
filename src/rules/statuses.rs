//! Statuses of responses, by which requests stay charged.

use std::sync::Arc;

/// Which statuses of HTTP responses count: single ones, such as `401`, and hundreds, such as `4xx`.
#[derive(Clone, Debug)]
pub(crate) struct Statuses(Arc<[Pattern]>);

#[derive(Debug)]
enum Pattern {
    One(u16),
    Hundred(u16),
}

impl Statuses {
    /// Or the place in the list, and what was expected there.
    pub(super) fn read(patterns: &[String]) -> Result<Self, (usize, String)> {
        let read = patterns.iter().enumerate().map(|(index, text)| {
            let why = || {
                format!("count: expected an HTTP status, such as 401, or a hundred of them, such as 4xx, got {text:?}")
            };
            Pattern::read(text).ok_or_else(|| (index, why()))
        });
        read.collect::<Result<_, _>>().map(Self)
    }

    pub(crate) fn has(&self, status: u16) -> bool {
        self.0.iter().any(|pattern| match pattern {
            Pattern::One(one) => *one == status,
            Pattern::Hundred(hundred) => *hundred == status / 100,
        })
    }
}

impl Pattern {
    fn read(text: &str) -> Option<Self> {
        let is_status = |status: &u16| (100..=599).contains(status);
        match text.as_bytes() {
            [hundred @ b'1'..=b'5', b'x', b'x'] => Some(Self::Hundred(u16::from(hundred - b'0'))),
            [b'0'..=b'9', b'0'..=b'9', b'0'..=b'9'] => text.parse().ok().filter(is_status).map(Self::One),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_counts_by_itself_or_by_its_hundred() {
        let read =
            |patterns: &[&str]| Statuses::read(&patterns.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>());
        let statuses = read(&["401", "5xx"]).expect("statuses");
        let counted: Vec<_> = (0..1000).filter(|status| statuses.has(*status)).collect();
        assert_eq!(counted, [401].into_iter().chain(500..600).collect::<Vec<_>>());
        for bad in ["", "4", "4x", "4XX", "xx4", "40x", "099", "600", "6xx", "0xx", "4xxx", "-40", "+40", "٤٠١"] {
            let (index, why) = read(&["200", bad]).expect_err(bad);
            assert_eq!((index, why.ends_with(&format!("got {bad:?}"))), (1, true), "{why}");
        }
    }
}
