//! Decisions of calls that take several steps: parts in several slots, or several tries.

use std::time::SystemTime;

use super::Decision;

impl Decision {
    /// The same, made by a try with this id, if it isn't the first's.
    pub(crate) fn of_try(mut self, id: Option<Vec<u8>>) -> Self {
        self.taken_by = id.map(Into::into);
        self
    }

    /// The id of the try that took the units, if it wasn't the first.
    #[allow(dead_code, reason = "asked by the middleware, which is a feature")]
    pub(crate) fn taken_by(&self) -> Option<&[u8]> {
        self.taken_by.as_deref()
    }

    /// The same as of this time.
    pub(crate) fn made_at(self, at: SystemTime) -> Self {
        Self { decided_at: at, ..self }
    }

    /// The same for limits that would have allowed, but from which nothing was taken. What a reservation owed isn't
    /// known here, so `remaining` stays as it was then.
    pub(crate) fn not_taken(self, was_reserved: bool) -> Self {
        let mut decision = self.given_back(|_| !was_reserved);
        decision.limits.0.iter_mut().for_each(|limit| limit.granted = 0);
        decision.waited();
        decision
    }

    /// The part of the limits at these places; of a policy's answer, the whole.
    pub(crate) fn of_limits(&self, places: &[usize]) -> Self {
        let limits = places.iter().filter_map(|place| self.limits.get(*place)).cloned().collect();
        Self::of(limits, self.by.clone(), self.decided_at).unwrap_or_else(|| self.clone())
    }

    /// The same once this many units stay taken from each limit.
    pub(crate) fn granting(mut self, units: u64) -> Self {
        self.granted = units;
        self.limits.0.iter_mut().for_each(|limit| limit.granted = units);
        self
    }
}
