//! Denials remembered in this process, which save round trips.

use super::call::Call;
use super::handle::Limiter;
use crate::call::Costs;
use crate::decision::Decision;
use crate::denial_cache::{Changing, DenialCache, Sighting};
use crate::error::Error;
use crate::operation::Operation;
use crate::request::Request;
use crate::rule::{Rule, ScopedLimit, Target};

/// What this process remembers about a call.
pub(super) enum Recalled {
    Denial(Box<Decision>),
    /// Nothing; with the sighting, the engine's decision is remembered if it is a denial.
    Nothing(Option<Box<Sighting>>),
}

impl Limiter {
    /// The engine's last denial of such a call.
    pub(super) fn recall(&self, call: Call<'_>) -> Result<Recalled, Error> {
        let Call { rule, request, operation } = call;
        let (Some(cache), Operation::Acquire) = (&self.denials, operation) else { return Ok(Recalled::Nothing(None)) };
        let Some(sighting) = self.sight(cache, rule, request)? else { return Ok(Recalled::Nothing(None)) };
        Ok(match cache.recall(&sighting, &request.units(rule)) {
            Some(denial) => Recalled::Denial(Box::new(denial)),
            None => Recalled::Nothing(Some(Box::new(sighting))),
        })
    }

    /// Remembers the engine's decision if it is a denial.
    pub(super) fn remember(&self, sighting: Option<Box<Sighting>>, units: &Costs, decision: &Decision) {
        if let (Some(cache), Some(sighting)) = (&self.denials, sighting) {
            cache.remember(*sighting, units, decision);
        }
    }

    /// Marks the call's keys as being changed for as long as the result lives. None for an acquire and a peek, which
    /// give nothing back.
    pub(super) fn changing(&self, call: Call<'_>) -> Result<Option<Changing<'_>>, Error> {
        match (&self.denials, call.operation) {
            (None, _) | (_, Operation::Acquire | Operation::Peek) => Ok(None),
            (Some(cache), _) => Ok(Some(cache.changing(self.state_keys(call.rule, call.request)?))),
        }
    }

    /// Marks the keys of these of the rule's limits as being changed for as long as the result lives.
    pub(super) fn changing_those<'r>(
        &self,
        rule: &Rule,
        request: &Request<'_>,
        targets: impl Iterator<Item = Target<'r>>,
    ) -> Result<Option<Changing<'_>>, Error> {
        let Some(cache) = &self.denials else { return Ok(None) };
        Ok(Some(cache.changing(self.keys_of(rule, request, targets)?)))
    }

    /// What an acquire looks up among the denials; none if only the engine can answer it.
    fn sight(&self, cache: &DenialCache, rule: &Rule, request: &Request<'_>) -> Result<Option<Sighting>, Error> {
        let holds = rule.limits().any(|limit| limit.algorithm().holds());
        // For a sharded limit, the next call may use another shard.
        if holds
            || self.sharded(rule).is_some()
            || rule.counts_overage()
            || request.has_id()
            || request.time().is_some()
        {
            return Ok(None);
        }
        // A denial of a lower cost has a wait.
        if !self.may_fit(Call::acquire(rule, request)) {
            return Ok(None);
        }
        Ok(Some(cache.sight(self.state_keys(rule, request)?, rule.fingerprint())))
    }

    /// The keys of all limits' states, each ended by a newline, which no key contains.
    pub(super) fn state_keys(&self, rule: &Rule, request: &Request<'_>) -> Result<Vec<u8>, Error> {
        self.keys_of(rule, request, rule.scoped_limits().iter().map(ScopedLimit::whole))
    }

    fn keys_of<'r>(
        &self,
        rule: &Rule,
        request: &Request<'_>,
        targets: impl Iterator<Item = Target<'r>>,
    ) -> Result<Vec<u8>, Error> {
        let mut keys = Vec::new();
        for target in targets {
            keys.extend_from_slice(&self.state_key(rule, target, request.plain())?);
            keys.push(b'\n');
        }
        Ok(keys)
    }
}
