//! What the callers of one runtime share.
//!
//! A connection is driven by the runtime that made it, so one that several runtimes shared would stand still whenever that
//! one is blocked, isn't driven, or has ended.

use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockWriteGuard};

use tokio::runtime::{Handle, Id};
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use super::Redis;
use super::departures::Line;
use super::link::Link;
use crate::error::Error;
use crate::runtime;

#[derive(Debug)]
pub(super) struct Local {
    runtime: Id,
    current: RwLock<Option<Link>>,
    /// Held while connecting, so that one task connects and all callers wait for what it gets.
    pub(super) connecting: Arc<tokio::sync::Mutex<()>>,
    pub(super) line: Mutex<Line>,
    /// A task that lasts as long as the runtime does, and this.
    lasts: AbortHandle,
    over: Arc<Notify>,
}

impl Redis {
    /// That of the runtime that this is called on.
    pub(super) fn local(&self) -> Result<Arc<Local>, Error> {
        let runtime = runtime::current()?;
        let id = runtime.id();
        let of_it = |locals: &[Arc<Local>]| locals.iter().find(|local| local.runtime == id).cloned();
        let locals = &self.shared.locals;
        if let Some(local) = of_it(&locals.read().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(local);
        }
        let runtime = runtime::with_timers()?;
        let mut locals = locals.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(local) = of_it(&locals) {
            return Ok(local);
        }
        locals.retain(|local| !local.lasts.is_finished());
        locals.push(Arc::new(Local::of(&runtime)));
        Ok(Arc::clone(&locals[locals.len() - 1]))
    }

    pub(super) fn locals(&self) -> Vec<Arc<Local>> {
        self.shared.locals.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Local {
    fn of(runtime: &Handle) -> Self {
        let over = Arc::new(Notify::new());
        let until = Arc::clone(&over);
        let lasts = runtime.spawn(async move { until.notified().await }).abort_handle();
        let (current, connecting, line) = (RwLock::default(), Arc::default(), Mutex::default());
        Self { runtime: runtime.id(), current, connecting, line, lasts, over }
    }

    pub(super) fn held(&self) -> Option<Link> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn hold(&self, link: Link) {
        *self.current() = Some(link);
    }

    pub(super) fn is_current(&self, link: &Link) -> bool {
        self.held().is_some_and(|held| held.number == link.number)
    }

    /// Whether it was the one that calls go over.
    pub(super) fn drop_link(&self, number: u64) -> bool {
        self.current().take_if(|held| held.number == number).is_some()
    }

    /// Unless another has taken its place meanwhile.
    pub(super) fn replace(&self, link: &Link, by: Link) {
        let mut current = self.current();
        if current.as_ref().is_none_or(|held| held.number == link.number) {
            *current = Some(by);
        }
    }

    pub(super) fn current(&self) -> RwLockWriteGuard<'_, Option<Link>> {
        self.current.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.over.notify_one();
    }
}
