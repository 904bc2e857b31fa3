//! A lock that a panic doesn't poison.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A [`Mutex`] whose state is consistent whenever it is unlocked, so that it can be used after a panic.
#[derive(Debug, Default)]
pub(crate) struct Lock<T>(Mutex<T>);

impl<T> Lock<T> {
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
