//! Calls about what an earlier call took: they give it back, keep it or forget it, wherever it was taken: in Redis, in
//! this process, or nowhere.

use super::call::Call;
use super::handle::Limiter;
use crate::decision::Decision;
use crate::error::{Charged, Error};
use crate::operation::Operation;
use crate::request::{Earlier, TakenAt};

impl Limiter {
    /// Gives back, keeps or forgets what an earlier call took, wherever it was taken.
    pub(super) async fn follow_up(&self, call: Call<'_>) -> Result<Decision, Error> {
        let Call { rule, request, operation } = call;
        match request.earlier() {
            Some(Earlier { at: TakenAt::Nowhere, charged, .. }) => {
                if must_ask_redis(operation, charged) {
                    match self.decide(rule, *request, operation).await {
                        Err(error) if error.goes_to_policy() || error.is_unknown_id() => {}
                        answer => return answer,
                    }
                }
                // The answer is ready at once, and the caller may ask again at once: other tasks must get their turn.
                tokio::task::consume_budget().await;
                Ok(Decision::by_policy(rule.capacity(), 0))
            }
            #[cfg(feature = "embedded")]
            Some(Earlier { at: TakenAt::Here, charged, .. }) => Box::pin(self.follow_up_locally(call, charged)).await,
            _ => self.decide(rule, *request, operation).await,
        }
    }
}

/// Whether to ask Redis about a call that a fallback answered. Redis may have taken the units although its answer was
/// lost. It can settle, cancel or release them by the id, whereas a refund could give back what it never took.
pub(super) fn must_ask_redis(operation: Operation, charged: Charged) -> bool {
    match charged {
        Charged::No => false,
        Charged::Yes => true,
        Charged::Unknown => operation != Operation::Refund,
    }
}
