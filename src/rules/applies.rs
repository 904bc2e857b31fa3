//! Which rule applies to a request, and with what effect.

use std::num::NonZeroU16;
use std::sync::Arc;

use super::account::UserBlock;
use super::attributes::Attributes;
use super::charge::Charge;
use super::compiled::{Compiled, CompiledAction, Response};
use super::statuses::CountedBy;
use super::throttle::Throttled;
use crate::decision::Decision;
use crate::error::Error;
use crate::rule::Rule;

/// Which rule applies to a request, and with what effect.
#[derive(Debug)]
#[non_exhaustive]
pub struct Applies<'s> {
    /// The rule's name; none if no rule applies.
    pub rule: Option<&'s str>,
    /// What happens to the request.
    pub effect: Effect<'s>,
    /// How to answer if it is denied.
    pub response: Option<&'s Response>,
    /// The key of the override that replaces the rule's own limits, if one does: `user:42`.
    pub overridden: Option<&'s str>,
    /// The user's block, if that denies the request.
    pub user_block: Option<Arc<UserBlock>>,
    /// All rules that apply, in their order, if several do, since those before the last say `continue`: what each makes
    /// of the request. One that blocks or misses an attribute denies it before any limits are asked; otherwise the
    /// limits of all are charged, or none, by the [effect](Self::effect). Empty if one rule applies, or none.
    pub together: Vec<Self>,
    pub(super) rule_name: Option<&'s Arc<str>>,
}

/// What a shadow rule with this name would do, if it can interpret the request.
pub(crate) type Shadow<'s> = (&'s Arc<str>, Result<Applies<'s>, Error>);

/// What the rule that applies does with a request.
#[derive(Debug)]
#[non_exhaustive]
#[allow(clippy::large_enum_variant, reason = "boxing the charge would be an allocation for each request")]
pub enum Effect<'s> {
    /// Allowed, and nothing is counted: no rule applies, or one that allows.
    Allow,
    /// Denied by a rule that blocks, or because the rule blocks the key.
    Block,
    /// Denied: the rule counts by this attribute, which the request doesn't have.
    Missing(&'s str),
    /// The limits decide.
    Limit(Charge<'s>),
}

impl Compiled {
    /// What the rule makes of a request, ignoring its conditions.
    pub(super) fn effect(&self, request: &Attributes<'_>) -> Result<Applies<'_>, Error> {
        let (effect, overridden) = match &self.action {
            CompiledAction::Allow => (Effect::Allow, None),
            CompiledAction::Block => (Effect::Block, None),
            CompiledAction::Throttle(throttle) => {
                let (throttled, overridden) = throttle.throttled(request)?;
                let effect = match throttled {
                    Throttled::Allow => Effect::Allow,
                    Throttled::Block => Effect::Block,
                    Throttled::Missing(attribute) => Effect::Missing(attribute),
                    Throttled::Charge { rule, request } => {
                        // An override or an account may have permits alone, which are given back in any case.
                        let has_units = |rule: &Rule| rule.limits().any(|limit| !limit.algorithm().holds());
                        let counted = CountedBy::of(self.counted.as_ref().filter(|_| has_units(&rule)));
                        Effect::Limit(Charge { rule, request, counted })
                    }
                };
                (effect, overridden)
            }
        };
        let response = Some(match effect {
            Effect::Block => &self.response_if_blocked,
            Effect::Missing(_) => &self.response_if_missing,
            _ => &self.response,
        });
        let rule = Some(&*self.name);
        let rule_name = Some(&self.name);
        Ok(Applies { rule, effect, response, overridden, user_block: None, together: Vec::new(), rule_name })
    }
}

#[cfg(feature = "http")]
impl Compiled {
    /// Whether one of its limits doesn't apply to this request for lack of this attribute.
    pub(super) fn leaves_out(&self, attribute: &str, request: &Attributes<'_>) -> bool {
        let CompiledAction::Throttle(throttle) = &self.action else { return false };
        // A key that is overridden, blocked or allowed has no such limits.
        let by_its_limits =
            |applies: &Applies<'_>| applies.overridden.is_none() && matches!(applies.effect, Effect::Limit(_));
        throttle.limited.leaves_out(attribute, request) && self.effect(request).is_ok_and(|own| by_its_limits(&own))
    }
}

impl Applies<'_> {
    /// The rule's name, shared.
    pub(crate) fn name(&self) -> Option<&Arc<str>> {
        self.rule_name
    }

    /// What it charges, if its limits decide.
    pub(super) fn charge(&self) -> Option<&Charge<'_>> {
        match &self.effect {
            Effect::Limit(charge) => Some(charge),
            _ => None,
        }
    }

    pub(super) fn none() -> Self {
        Self {
            rule: None,
            effect: Effect::Allow,
            response: None,
            overridden: None,
            user_block: None,
            together: Vec::new(),
            rule_name: None,
        }
    }

    /// The rule among several that denies by this decision: the first with a limit that denies.
    pub(super) fn denied_by(&self, decision: &Decision) -> Option<&Self> {
        let rule = decision.limits.iter().find(|limit| !limit.allowed)?.quota.rule();
        // An account's own limits have a name of their own.
        let is_of = |own: &&Self| matches!(&own.effect, Effect::Limit(charge) if charge.rule().name() == rule);
        self.together.iter().find(is_of)
    }

    /// For a user who is blocked.
    pub(super) fn blocked(block: &Arc<UserBlock>) -> Self {
        const FORBIDDEN: Response =
            Response { status: NonZeroU16::new(403).unwrap(), message: None, retry_after: None };
        Self { effect: Effect::Block, response: Some(&FORBIDDEN), user_block: Some(Arc::clone(block)), ..Self::none() }
    }
}
