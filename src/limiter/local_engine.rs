//! The engine in this process that decides while Redis is unreachable.

use std::sync::{Arc, OnceLock};

use crate::engine::Engine;
use crate::engine::embedded::Embedded;

/// A bound on memory, however many keys are used during an outage.
const MOST_KEYS: usize = 100_000;

/// Decides while Redis is unreachable, for rules that say `local`. Created on first use; clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct LocalEngine(Arc<OnceLock<Embedded>>);

impl LocalEngine {
    pub(super) fn get(&self) -> Engine {
        self.0.get_or_init(|| Embedded::of_at_most(MOST_KEYS)).clone().into()
    }

    pub(super) fn is_used(&self) -> bool {
        self.0.get().is_some()
    }
}
