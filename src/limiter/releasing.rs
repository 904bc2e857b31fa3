//! Releasing permits by an id of the caller's own, and holding anew by it only after that.

use std::time::Duration;

use tokio::time::Instant;

use super::handle::Limiter;
use super::releases::{InProgress, PendingRelease};
use crate::decision::Decision;
use crate::error::{Charged, Error};
use crate::operation::Operation;
use crate::request::{OwnedRequest, Request};
use crate::rule::Rule;
use crate::runtime::{self, LONGEST_WAIT};

impl Limiter {
    /// Notes a release to be made. None if one is in progress, which gives back all that the id holds.
    pub(super) fn pending_release(&self, rule: &Rule, request: &OwnedRequest) -> Option<PendingRelease> {
        self.releases.note(self.permit(rule, &Request::from(request))?, rule, request)
    }

    /// Makes this release. None if it has been made, or somebody else makes it.
    pub(super) async fn release_pending(&self, pending: &PendingRelease) -> Option<Result<Decision, Error>> {
        let release = pending.in_progress()?;
        self.make_release(release, self.unhurried(release.request()).deadline_or(self.deadline)).await
    }

    /// Returns once no release by this id is in progress, and how much of the request's deadline is left. A release
    /// that hasn't begun is made here: its own task may run on another runtime, which may be blocked.
    pub(super) async fn after_releases(&self, rule: &Rule, request: &Request<'_>) -> Result<Duration, Error> {
        let deadline = request.deadline_or(self.deadline);
        let Some(permit) = self.permit(rule, request) else { return Ok(deadline) };
        let began = Instant::now();
        let until = began + deadline.min(LONGEST_WAIT);
        loop {
            let left = deadline.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Err(Error::deadline(deadline, false));
            }
            let Some(release) = self.releases.find(&permit) else { return Ok(left) };
            let changed = release.changed();
            match self.make_release(&release, left).await {
                Some(answer) => {
                    let failed = answer.map_or_else(Some, |decision| decision.by.error().cloned());
                    // It may yet run, after the hold; or can't be made on this runtime, however often it is tried.
                    if let Some(error) = failed.filter(|error| error.is_input() || error.charged() != Charged::No) {
                        return Err(error);
                    }
                }
                None if release.goes_on() => {
                    let waited = runtime::timeout_at(until, changed).await;
                    waited.ok_or_else(|| Error::deadline(deadline, false))?;
                }
                None => {}
            }
        }
    }

    /// Makes the call. None if somebody else has begun to.
    async fn make_release(&self, release: &InProgress, deadline: Duration) -> Option<Result<Decision, Error>> {
        let making = release.begin()?;
        let request = Request::from(release.request()).deadline(deadline);
        let answer = self.make(Operation::Release, release.rule(), request).await;
        // One that this runtime can't make may be made on another.
        if answer.as_ref().is_err_and(Error::is_input) {
            making.leave();
        }
        Some(answer)
    }

    /// Identifies the permits of an id, as Redis does.
    fn permit(&self, rule: &Rule, request: &Request<'_>) -> Option<Vec<u8>> {
        let mut permit = self.state_keys(rule, request).ok()?;
        permit.extend_from_slice(request.plain().id?);
        Some(permit)
    }
}
