//! Statuses of responses, by which requests stay charged.

use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use crate::request::OwnedRequest;
use crate::rule::{ALL, apart};

/// Which statuses of HTTP responses count: single ones, such as `401`, and hundreds, such as `4xx`.
#[derive(Clone, Debug)]
pub(crate) struct Statuses(Arc<[Pattern]>);

#[derive(Debug)]
enum Pattern {
    One(u16),
    Hundred(u16),
}

impl Statuses {
    /// The statuses; or the place in the list of a bad one, and what was expected there.
    pub(super) fn read(patterns: &[String]) -> Result<Self, (usize, String)> {
        let read = patterns.iter().enumerate().map(|(index, text)| {
            let why = || {
                let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
                let got = if is_number { text.clone() } else { format!("{text:?}") };
                format!("count: expected an HTTP status, such as 401, or a class of them, such as 4xx, got {got}")
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

/// By which statuses what a request took stays charged: its rule's or, if several apply together, those of each that
/// has any.
#[derive(Clone, Debug, Default)]
pub(crate) struct CountedBy(SmallVec<[(Option<Arc<str>>, Statuses); 1]>);

/// What is given back once a response has its status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum GivenBack {
    #[default]
    Nothing,
    All,
    /// What these rules took.
    Of(SmallVec<[Arc<str>; 1]>),
}

impl CountedBy {
    pub(super) fn of(statuses: Option<&Statuses>) -> Self {
        Self(statuses.into_iter().map(|statuses| (None, statuses.clone())).collect())
    }

    /// Of several rules, by their names.
    pub(super) fn joined<'a>(rules: impl Iterator<Item = (&'a str, &'a Self)>) -> Self {
        let own = |(name, of): (&str, &Self)| of.0.first().map(|(_, own)| (Some(name.into()), own.clone()));
        Self(rules.filter_map(own).collect())
    }

    /// Whether it doesn't depend on the status.
    pub(crate) fn is_none(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn given_back(&self, status: u16) -> GivenBack {
        let mut others = self.0.iter().filter(|(_, statuses)| !statuses.has(status)).map(|(rule, _)| rule);
        match others.next() {
            None => GivenBack::Nothing,
            Some(None) => GivenBack::All,
            Some(Some(first)) => {
                let mut rules = smallvec![Arc::clone(first)];
                rules.extend(others.flatten().cloned());
                GivenBack::Of(rules)
            }
        }
    }
}

impl GivenBack {
    /// Whether what this rule took is given back.
    #[cfg(feature = "http")]
    pub(crate) fn has(&self, rule: Option<&str>) -> bool {
        match self {
            Self::Nothing => false,
            Self::All => true,
            Self::Of(rules) => rules.iter().any(|own| Some(&**own) == rule),
        }
    }

    /// The request at a cost of nothing, for what is given back.
    pub(crate) fn taken_off(&self, mut request: OwnedRequest) -> OwnedRequest {
        match self {
            Self::Nothing => request,
            Self::All => crate::Request::from(&request).cost_of_all(0).into_owned(),
            Self::Of(rules) => {
                rules.iter().for_each(|rule| request.set_cost_of(&apart(rule, ALL), 0));
                request
            }
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
            let got = if matches!(bad, "4" | "099" | "600") { bad.to_owned() } else { format!("{bad:?}") };
            assert_eq!((index, why.ends_with(&format!("got {got}"))), (1, true), "{why}");
        }
    }
}
