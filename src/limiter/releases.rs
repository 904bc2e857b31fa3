//! Releases in progress of permits that are held by an id of the caller's own. A hold by the same id comes after them:
//! otherwise a release on its way would take the later permit.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use super::Limiter;
use crate::decision::Decision;
use crate::error::{Charged, Error};
use crate::lock::Lock;
use crate::operation::Operation;
use crate::request::{OwnedRequest, Request};
use crate::rule::Rule;
use crate::runtime;

#[derive(Debug, Default)]
pub(super) struct Releases {
    by_permit: Lock<HashMap<Vec<u8>, Arc<Release>>>,
}

#[derive(Debug)]
struct Release {
    rule: Rule,
    request: OwnedRequest,
    /// Whether the call was begun, by its own task or by a hold.
    begun: AtomicBool,
    /// It has ended, or nobody makes the call any more.
    changed: Notify,
}

/// A release to be made. If this is dropped before anybody has begun to, nothing waits for it any more.
#[derive(Debug)]
pub(super) struct PendingRelease {
    all: Arc<Releases>,
    permit: Vec<u8>,
    release: Arc<Release>,
}

/// A release that is being made. It ends as this is dropped: a call that was given up isn't made again, since it may
/// have run, and another holder may have the permit by now.
struct Making<'a> {
    all: &'a Releases,
    permit: &'a [u8],
    release: &'a Arc<Release>,
}

impl Limiter {
    /// Notes a release to be made. None if one is in progress, which gives back all that the id holds.
    pub(super) fn pending_release(&self, rule: &Rule, request: &OwnedRequest) -> Option<PendingRelease> {
        let all = &self.releases;
        let permit = self.permit(rule, &Request::from(request))?;
        let mut by_permit = all.by_permit.lock();
        if by_permit.contains_key(&permit) {
            return None;
        }
        let (rule, request) = (rule.clone(), request.clone());
        let release = Arc::new(Release { rule, request, begun: AtomicBool::new(false), changed: Notify::new() });
        by_permit.insert(permit.clone(), Arc::clone(&release));
        Some(PendingRelease { all: Arc::clone(all), permit, release })
    }

    /// Returns once no release by this id is in progress, and how much of the request's deadline is left. A release
    /// that hasn't begun is made here: its own task may run on another runtime, which may be blocked.
    pub(super) async fn after_releases(&self, rule: &Rule, request: &Request<'_>) -> Result<Duration, Error> {
        let deadline = request.deadline_or(self.deadline);
        let Some(permit) = self.permit(rule, request) else { return Ok(deadline) };
        let (began, all) = (Instant::now(), &self.releases);
        let until = began + deadline.min(crate::runtime::LONGEST_WAIT);
        loop {
            let left = deadline.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Err(Error::deadline(deadline, false));
            }
            let found = all.by_permit.lock().get(&permit).cloned();
            let Some(release) = found else { return Ok(left) };
            let changed = release.changed.notified();
            match all.make(&permit, &release, self, left).await {
                Some(answer) => {
                    let failed = answer.map_or_else(Some, |decision| decision.by.error().cloned());
                    // It may yet run, after the hold; or can't be made on this runtime, however often it is tried.
                    if let Some(error) = failed.filter(|error| error.is_input() || error.charged() != Charged::No) {
                        return Err(error);
                    }
                }
                None if all.has(&permit, &release) => {
                    let waited = runtime::timeout_at(until, changed).await;
                    waited.ok_or_else(|| Error::deadline(deadline, false))?;
                }
                None => {}
            }
        }
    }

    /// Identifies the permits of an id, as Redis does.
    fn permit(&self, rule: &Rule, request: &Request<'_>) -> Option<Vec<u8>> {
        let mut permit = self.state_keys(rule, request).ok()?;
        permit.extend_from_slice(request.plain().id?);
        Some(permit)
    }
}

impl PendingRelease {
    /// Makes the call. None if it has been made, or somebody else makes it.
    pub(super) async fn make(&self, limiter: &Limiter) -> Option<Result<Decision, Error>> {
        if !self.all.has(&self.permit, &self.release) {
            return None;
        }
        let deadline = limiter.unhurried(&self.release.request).deadline_or(limiter.deadline);
        self.all.make(&self.permit, &self.release, limiter, deadline).await
    }
}

impl Drop for PendingRelease {
    fn drop(&mut self) {
        if !self.release.begun.load(Ordering::Acquire) {
            self.all.end(&self.permit, &self.release);
        }
    }
}

impl Releases {
    fn has(&self, permit: &[u8], release: &Arc<Release>) -> bool {
        self.by_permit.lock().get(permit).is_some_and(|found| Arc::ptr_eq(found, release))
    }

    /// Makes the call. None if somebody else has begun to.
    async fn make(
        &self,
        permit: &[u8],
        release: &Arc<Release>,
        limiter: &Limiter,
        deadline: Duration,
    ) -> Option<Result<Decision, Error>> {
        if release.begun.swap(true, Ordering::AcqRel) {
            return None;
        }
        let making = Making { all: self, permit, release };
        let request = Request::from(&release.request).deadline(deadline);
        let answer = limiter.make(Operation::Release, &release.rule, request).await;
        // One that this runtime can't make may be made on another.
        if answer.as_ref().is_err_and(Error::is_input) {
            std::mem::forget(making);
            release.begun.store(false, Ordering::Release);
            release.changed.notify_waiters();
        }
        Some(answer)
    }

    fn end(&self, permit: &[u8], release: &Arc<Release>) {
        let mut by_permit = self.by_permit.lock();
        if by_permit.get(permit).is_some_and(|found| Arc::ptr_eq(found, release)) {
            by_permit.remove(permit);
        }
        drop(by_permit);
        release.changed.notify_waiters();
    }
}

impl Drop for Making<'_> {
    fn drop(&mut self) {
        self.all.end(self.permit, self.release);
    }
}
