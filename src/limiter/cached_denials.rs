//! Denials remembered in this process, which save asking again.

use super::Limiter;
use super::fallback::may_fit;
use crate::decision::Decision;
use crate::denial_cache::{DenialCache, Sighting};
use crate::error::Error;
use crate::operation::Operation;
use crate::request::Request;
use crate::rule::Rule;

impl Limiter {
    /// Decides by the engine, or by a denial that the engine has just given.
    pub(super) async fn decide_or_recall(
        &self,
        cache: &DenialCache,
        rule: &Rule,
        request: &Request<'_>,
        operation: Operation,
    ) -> Result<Decision, Error> {
        if operation == Operation::Peek {
            return self.decide_by_engine(rule, request, operation).await;
        }
        if operation != Operation::Acquire {
            // However the call ends, it may have changed the state.
            let _changing = cache.changing(self.state_keys(rule, request)?);
            return self.decide_by_engine(rule, request, operation).await;
        }
        let Some(sighting) = self.sight(cache, rule, request)? else {
            return self.decide_by_engine(rule, request, operation).await;
        };
        if let Some(denial) = cache.recall(&sighting, request.units(rule)) {
            // It is there at once, and the caller may ask again at once: others must have their turn.
            tokio::task::consume_budget().await;
            return Ok(denial);
        }
        let decision = self.decide_by_engine(rule, request, operation).await?;
        cache.remember(sighting, request.units(rule), &decision);
        Ok(decision)
    }

    /// What an acquire looks up among the denials; none if only the engine can answer it.
    pub(super) fn sight(
        &self,
        cache: &DenialCache,
        rule: &Rule,
        request: &Request<'_>,
    ) -> Result<Option<Sighting>, Error> {
        let holds = rule.limits().any(|limit| limit.algorithm().holds());
        // For a sharded limit, the next call may use another shard.
        if holds || rule.sharded().is_some() || rule.counts_denials() || request.has_id() || request.time().is_some() {
            return Ok(None);
        }
        // A denial of a lower cost has a wait.
        if !may_fit(rule, request, Operation::Acquire) {
            return Ok(None);
        }
        Ok(Some(cache.sight(self.state_keys(rule, request)?, rule.fingerprint())))
    }

    /// The keys of all limits' states, each ended by a newline, which no key contains.
    pub(super) fn state_keys(&self, rule: &Rule, request: &Request<'_>) -> Result<Vec<u8>, Error> {
        let mut keys = Vec::new();
        for scoped in rule.scoped_limits() {
            keys.extend_from_slice(&self.state_key(rule, scoped.whole(), request.plain())?);
            keys.push(b'\n');
        }
        Ok(keys)
    }
}
