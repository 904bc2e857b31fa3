//! A decision that sinks have taken, and whose response isn't known yet.

use smallvec::SmallVec;

use crate::rules::OnResponse;

/// What sinks do with the response's status. Dropping it tells them that there was none.
#[derive(Default)]
pub(super) struct Pending(SmallVec<[Box<dyn OnResponse>; 2]>);

impl Pending {
    pub(super) fn add(&mut self, waiting: Option<Box<dyn OnResponse>>) {
        self.0.extend(waiting);
    }

    pub(super) fn responded(self, status: u16) {
        self.0.into_iter().for_each(|waiting| waiting.responded(status));
    }
}
