//! Decisions by the engine in this process, while Redis is unreachable.

use std::num::NonZeroU32;
use std::sync::Arc;

use futures_util::future::join;

use super::call::Call;
use super::follow_up::must_ask_redis;
use super::handle::Limiter;
use super::server_clock::ServerClock;
use crate::decision::{DecidedBy, Decision};
use crate::error::{Charged, Error, Kind};
use crate::operation::Operation;
use crate::rule::OnError;

impl Limiter {
    /// Decides by the rule's share for one of this many processes.
    pub(super) async fn decide_locally(&self, call: Call<'_>, processes: NonZeroU32) -> Result<Decision, Error> {
        let Call { rule, request, operation } = call;
        let share = rule.share(processes).map_err(|error| Error::new(Kind::Input, error.to_string()))?;
        let engine = self.local.get();
        // The engine in this process has a clock of its own. Nothing answers in its place, and the caller jitters the
        // wait.
        let here = Self { engine, server_clock: ServerClock::default(), denials: None, ..self.clone() };
        let mut decision = here.decide_in_full(&share, request.jitter(0), operation).await?;
        decision.by = DecidedBy::Local(None);
        Ok(decision)
    }

    /// Gives back, keeps or forgets what was taken in this process.
    pub(super) async fn follow_up_locally(&self, call: Call<'_>, charged: Charged) -> Result<Decision, Error> {
        match self.policy(call.rule) {
            OnError::Local { processes } if must_ask_redis(call.operation, charged) => {
                self.follow_up_everywhere(call, processes).await
            }
            OnError::Local { processes } => self.decide_locally(call, processes).await,
            // The rule's policy has changed since.
            _ => Ok(Decision::by_policy(call.rule.capacity(), 0)),
        }
    }

    /// The outcome for a permit that was taken in this process; none if it wasn't.
    pub(super) async fn change_local_permits(&self, call: Call<'_>) -> Option<Decision> {
        let OnError::Local { processes } = self.policy(call.rule) else { return None };
        if !self.local.is_used() {
            return None;
        }
        let renewed = self.decide_locally(Call { operation: Operation::Renew, ..call }, processes).await.ok()?;
        match call.operation {
            Operation::Renew => Some(renewed),
            _ => self.follow_up_everywhere(call, processes).await.ok(),
        }
    }

    /// Follows up here and in Redis, which may have been asked too, and may have given the permit after the caller
    /// stopped waiting.
    async fn follow_up_everywhere(&self, call: Call<'_>, processes: NonZeroU32) -> Result<Decision, Error> {
        let there = self.decide(call.rule, *call.request, call.operation);
        let (here, there) = join(self.decide_locally(call, processes), there).await;
        let mut decision = match here {
            // An earlier try has cancelled or released it here, and may not have reached Redis.
            Err(unknown) if unknown.is_unknown_id() => return there,
            here => here?,
        };
        let error = match there {
            Ok(there) => there.by.error().cloned().map(Arc::new),
            // Redis never took them.
            Err(unknown) if unknown.is_unknown_id() => None,
            // It may still have them.
            Err(error) => Some(Arc::new(error)),
        };
        decision.by = decision.by.because_of(error);
        Ok(decision)
    }
}
