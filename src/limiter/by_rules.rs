//! Decisions by a set of rules.

use std::sync::Arc;

use futures_util::future::{join, join_all};

use super::Limiter;
use crate::error::Error;
use crate::rules::{Applies, Attributes, Effect, Reason, RuleSet, ShadowVerdict, Verdict};

impl Limiter {
    /// Takes what a request costs by the rule of a set that applies to it, or denies it. Costs a round trip where that rule,
    /// or a shadow rule before it, has limits, all of which are asked at once; otherwise none.
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire); a cost that an attribute says and that is no whole number. Shadow rules cause none.
    pub async fn acquire_by(&self, rules: &RuleSet, request: &Attributes<'_>) -> Result<Verdict, Error> {
        let (applies, shadows) = rules.found(request)?;
        // Most sets have none.
        if shadows.is_empty() {
            return self.verdict(&applies).await;
        }
        let (verdict, shadows) =
            join(self.verdict(&applies), join_all(shadows.iter().map(|one| self.shadow(one)))).await;
        verdict.map(|verdict| Verdict { shadows, ..verdict })
    }

    async fn verdict(&self, applies: &Applies<'_>) -> Result<Verdict, Error> {
        let decision = match &applies.effect {
            Effect::Limit(charge) => Some(self.acquire(charge.rule(), charge.request()).await?),
            _ => None,
        };
        let (allowed, reason) = match &applies.effect {
            Effect::Allow if applies.rule.is_none() => (true, Reason::NoRule),
            Effect::Allow => (true, Reason::Allowed),
            Effect::Block => (false, Reason::Blocked),
            Effect::Missing(attribute) => (false, Reason::Missing((*attribute).to_owned())),
            Effect::Limit(_) => (decision.as_ref().is_some_and(|decision| decision.allowed), Reason::Limits),
        };
        let response = applies.response.filter(|_| !allowed).cloned();
        Ok(Verdict { allowed, rule: applies.name().cloned(), reason, decision, response, shadows: Vec::new() })
    }

    async fn shadow(&self, applies: &Applies<'_>) -> ShadowVerdict {
        let decision = match &applies.effect {
            Effect::Limit(charge) => Some(self.acquire(charge.rule(), charge.request()).await),
            _ => None,
        };
        let allowed = match (&applies.effect, &decision) {
            (Effect::Limit(_), Some(Ok(decision))) => decision.allowed,
            (effect, _) => matches!(effect, Effect::Allow | Effect::Limit(_)),
        };
        ShadowVerdict { rule: applies.name().map_or_else(|| Arc::from(""), Arc::clone), allowed, decision }
    }
}
