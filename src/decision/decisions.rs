//! The decisions of calls that are made as one.

use std::ops::Deref;

use super::{Decision, Denied, RetryAfter};

/// The decisions of calls that were made as one, in their order: a slice of [`Decision`]. All calls are made, or none.
///
/// The `allowed` of a single decision says whether that call's own limits admit it, which isn't enough for it to be made:
/// ask [`allowed`](Self::allowed), or use [`into_result`](Self::into_result).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "a denial is an answer, not an error"]
pub struct Decisions(pub(crate) Vec<Decision>);

impl Decisions {
    /// Whether all calls are allowed. Otherwise nothing was taken for any of them.
    #[must_use]
    pub fn allowed(&self) -> bool {
        self.iter().all(|decision| decision.allowed)
    }

    /// When the same calls would be allowed if no other takes units: the longest wait of any.
    #[must_use]
    pub fn retry_after(&self) -> RetryAfter {
        self.iter().map(|decision| decision.retry_after).max().unwrap_or(RetryAfter::Now)
    }

    /// The decisions if all calls are allowed.
    ///
    /// # Errors
    ///
    /// One is denied: of those, the one with the longest wait.
    pub fn into_result(self) -> Result<Vec<Decision>, Denied> {
        // The first of those that wait equally long.
        let denials = self.0.iter().enumerate().rev().filter(|(_, decision)| !decision.allowed);
        let longest = denials.max_by_key(|(_, decision)| decision.retry_after).map(|(at, _)| at);
        let mut decisions = self.0;
        match longest {
            Some(at) => Err(Denied::of(decisions.swap_remove(at))),
            None => Ok(decisions),
        }
    }
}

impl Deref for Decisions {
    type Target = [Decision];

    fn deref(&self) -> &[Decision] {
        &self.0
    }
}

impl IntoIterator for Decisions {
    type Item = Decision;
    type IntoIter = std::vec::IntoIter<Decision>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl<'d> IntoIterator for &'d Decisions {
    type Item = &'d Decision;
    type IntoIter = std::slice::Iter<'d, Decision>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}
