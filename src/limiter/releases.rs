//! Releases in progress of permits that are held by an id of the caller's own. A hold by the same id comes after them:
//! otherwise a release on its way would take the later permit. `releasing.rs` makes them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use crate::lock::Lock;
use crate::request::OwnedRequest;
use crate::rule::Rule;

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

/// A release in progress.
#[derive(Debug)]
pub(super) struct InProgress {
    all: Arc<Releases>,
    permit: Vec<u8>,
    release: Arc<Release>,
}

/// A release to be made. If this is dropped before anybody has begun to, nothing waits for it any more.
#[derive(Debug)]
pub(super) struct PendingRelease(InProgress);

/// A release that is being made. It ends as this is dropped: a call that was given up isn't made again, since it may
/// have run, and another holder may have the permit by now.
pub(super) struct Making<'a>(Option<&'a InProgress>);

impl Releases {
    /// Notes that the permits of this id are to be released. None if a release is in progress, which gives back all
    /// that the id holds.
    pub(super) fn note(
        self: &Arc<Self>,
        permit: Vec<u8>,
        rule: &Rule,
        request: &OwnedRequest,
    ) -> Option<PendingRelease> {
        let mut by_permit = self.by_permit.lock();
        if by_permit.contains_key(&permit) {
            return None;
        }
        let (rule, request) = (rule.clone(), request.clone());
        let release = Arc::new(Release { rule, request, begun: AtomicBool::new(false), changed: Notify::new() });
        by_permit.insert(permit.clone(), Arc::clone(&release));
        Some(PendingRelease(InProgress { all: Arc::clone(self), permit, release }))
    }

    /// The release of this id's permits, if one is in progress.
    pub(super) fn find(self: &Arc<Self>, permit: &[u8]) -> Option<InProgress> {
        let release = Arc::clone(self.by_permit.lock().get(permit)?);
        Some(InProgress { all: Arc::clone(self), permit: permit.to_vec(), release })
    }
}

impl InProgress {
    pub(super) fn rule(&self) -> &Rule {
        &self.release.rule
    }

    pub(super) fn request(&self) -> &OwnedRequest {
        &self.release.request
    }

    /// Whether it hasn't ended.
    pub(super) fn goes_on(&self) -> bool {
        self.all.by_permit.lock().get(&self.permit).is_some_and(|found| Arc::ptr_eq(found, &self.release))
    }

    /// Until it has ended, or nobody makes it any more.
    pub(super) fn changed(&self) -> Notified<'_> {
        self.release.changed.notified()
    }

    /// For whoever makes the call now. None if somebody else has begun to.
    pub(super) fn begin(&self) -> Option<Making<'_>> {
        // Made only then: it ends the release as it is dropped.
        (!self.release.begun.swap(true, Ordering::AcqRel)).then(|| Making(Some(self)))
    }

    fn end(&self) {
        let mut by_permit = self.all.by_permit.lock();
        if by_permit.get(&self.permit).is_some_and(|found| Arc::ptr_eq(found, &self.release)) {
            by_permit.remove(&self.permit);
        }
        drop(by_permit);
        self.release.changed.notify_waiters();
    }
}

impl PendingRelease {
    /// None if it has ended.
    pub(super) fn in_progress(&self) -> Option<&InProgress> {
        self.0.goes_on().then_some(&self.0)
    }
}

impl Making<'_> {
    /// Leaves the call to others, since this runtime can't make it.
    pub(super) fn leave(mut self) {
        if let Some(InProgress { release, .. }) = self.0.take() {
            release.begun.store(false, Ordering::Release);
            release.changed.notify_waiters();
        }
    }
}

impl Drop for PendingRelease {
    fn drop(&mut self) {
        if !self.0.release.begun.load(Ordering::Acquire) {
            self.0.end();
        }
    }
}

impl Drop for Making<'_> {
    fn drop(&mut self) {
        if let Some(in_progress) = self.0 {
            in_progress.end();
        }
    }
}
