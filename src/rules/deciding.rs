//! Decisions by a set of rules.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join, join_all};

#[cfg(feature = "http")]
use super::Attributes;
use super::{Applies, Charge, Effect, Reason, RuleRequest, RuleSet, Shadow, ShadowVerdict, Verdict};
use crate::decision::Decision;
use crate::error::Error;
use crate::limiter::call::Call;
use crate::limiter::hold::Permit;
#[cfg(feature = "http")]
use crate::limiter::wait::Blocks;
use crate::limiter::{Limiter, counted};
use crate::operation::Operation;
use crate::telemetry;

/// A verdict, and the permits that the request took.
#[derive(Debug)]
#[non_exhaustive]
#[must_use = "permits that are dropped are given back"]
pub struct HoldVerdict {
    /// What became of the request.
    pub verdict: Verdict,
    /// Permits of the rule, and of shadow rules, that have a concurrency limit.
    pub permits: Vec<Permit>,
}

/// How a rule's limits are asked.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Acquisition<'a> {
    /// As [`Limiter::acquire`] does.
    Acquire,
    /// As [`Limiter::call`] does.
    Call(Operation),
    /// The same, or as [`Limiter::hold`] for limits with permits.
    Hold(Option<FollowUp<'a>>),
    /// The same, as soon as the limits allow, if that is within this time.
    #[cfg(feature = "http")]
    Wait(Duration, Blocks, Option<FollowUp<'a>>),
}

/// By what a request's charge may be changed once more is known of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FollowUp<'a> {
    /// A unique id.
    pub(crate) id: &'a [u8],
    pub(crate) within: Duration,
    /// Whether the rule that applies may settle its cost. Any rule may count by the response.
    pub(crate) settles: bool,
}

impl<'a> Acquisition<'a> {
    fn follow_up(self) -> Option<FollowUp<'a>> {
        match self {
            Self::Acquire | Self::Call(_) => None,
            Self::Hold(next) => next,
            #[cfg(feature = "http")]
            Self::Wait(.., next) => next,
        }
    }

    /// Whether the outcome is a decision, which telemetry counts.
    fn decides(self) -> bool {
        match self {
            Self::Call(operation) => operation.decides(),
            _ => true,
        }
    }

    /// How shadow rules are asked: nothing waits for them, and their cost is never settled.
    fn of_shadows(self) -> Self {
        match self {
            Self::Acquire | Self::Call(_) => self,
            _ => Self::Hold(self.follow_up().map(|next| FollowUp { settles: false, ..next })),
        }
    }
}

impl Limiter {
    /// Takes a request's cost by the rule of the set that applies to it, or denies it. Costs one round trip if that
    /// rule, or a shadow rule before it, has limits, which are all asked at once; otherwise none.
    ///
    /// # Errors
    ///
    /// The errors of [`acquire`](Self::acquire). A rule with permits: use [`hold_by`](Self::hold_by). A cost taken from
    /// an attribute that is no whole number. Shadow rules cause none.
    pub async fn acquire_by<'a>(&self, rules: &RuleSet, request: impl Into<RuleRequest<'a>>) -> Result<Verdict, Error> {
        let (applies, shadows) = Self::found_for(rules, &request.into())?;
        self.judge(&applies, &shadows, Acquisition::Acquire).await.map(|held| held.verdict)
    }

    /// Makes a call of this operation, as [`call`](Self::call) does, by the rule of the set that applies to a request,
    /// and by shadow rules before it: what [`acquire_by`](Self::acquire_by) would answer (peek), or what gives back,
    /// settles or renews what an earlier call with the request's id took. If the rules have changed since that call,
    /// another one may apply. Costs as many round trips as [`acquire_by`](Self::acquire_by).
    ///
    /// # Errors
    ///
    /// Those of the operation's method. A cost taken from an attribute that is no whole number. Shadow rules cause
    /// none.
    pub async fn call_by<'a>(
        &self,
        operation: Operation,
        rules: &RuleSet,
        request: impl Into<RuleRequest<'a>>,
    ) -> Result<Verdict, Error> {
        let (applies, shadows) = Self::found_for(rules, &request.into())?;
        let asking = if operation == Operation::Acquire { Acquisition::Acquire } else { Acquisition::Call(operation) };
        self.judge(&applies, &shadows, asking).await.map(|held| held.verdict)
    }

    /// The same, and holds the permits of rules with a concurrency limit until they are dropped, as
    /// [`hold`](Self::hold) does.
    ///
    /// # Errors
    ///
    /// The errors of [`hold`](Self::hold). A cost taken from an attribute that is no whole number. Shadow rules cause
    /// none.
    ///
    /// ```
    /// # #[cfg(feature = "embedded")]
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use tollgate::rules::{Attributes, RuleSet};
    /// use tollgate::{Embedded, Limiter};
    ///
    /// let rules: RuleSet = r#"
    ///     [[rule]]
    ///     name = "reports"
    ///     match = { path = "/reports/*" }
    ///     key = "user"
    ///     limits = ["concurrency 1 ttl 30s"]
    /// "#
    /// .parse()?;
    ///
    /// let limiter = Limiter::new(Embedded::new());
    /// let request = Attributes::new().user("42").path("/reports/7");
    /// let held = limiter.hold_by(&rules, &request).await?;
    /// assert!(held.verdict.allowed);
    /// assert!(!limiter.hold_by(&rules, &request).await?.verdict.allowed, "one at a time");
    /// # drop(held);
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "embedded"))]
    /// # fn main() {}
    /// ```
    pub async fn hold_by<'a>(
        &self,
        rules: &RuleSet,
        request: impl Into<RuleRequest<'a>>,
    ) -> Result<HoldVerdict, Error> {
        let (applies, shadows) = Self::found_for(rules, &request.into())?;
        self.judge(&applies, &shadows, Acquisition::Hold(None)).await
    }

    /// Takes what several requests cost by the rules that apply to each, or nothing: they are one decision, atomic on
    /// one Redis, such as of a gateway's call that falls under several descriptors. Costs one round trip if any of the
    /// rules has limits.
    ///
    /// The verdicts are the requests', in their order. `allowed` is whether the request would be allowed by itself;
    /// units are taken only if all requests are allowed. Shadow rules are asked beside that, each by itself. As by
    /// [`acquire_all`](Self::acquire_all), a deadline is that of the first request with limits, and requests that count
    /// the same key take the sum of their costs.
    ///
    /// # Errors
    ///
    /// The errors of [`acquire_all`](Self::acquire_all), and so: requests with an id, rules with permits, more than
    /// 1,000 requests. A cost taken from an attribute that is no whole number.
    ///
    /// ```
    /// # #[cfg(feature = "embedded")]
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use tollgate::rules::{Attributes, RuleSet};
    /// use tollgate::{Embedded, Limiter, Operation};
    ///
    /// let rules: RuleSet = r#"
    ///     [[rule]]
    ///     name = "users"
    ///     match = { user = "*" }
    ///     key = "user"
    ///     limits = ["fixed-window 10/1d"]
    ///
    ///     [[rule]]
    ///     name = "models"
    ///     match = { model = "*" }
    ///     key = "model"
    ///     limits = ["fixed-window 2/1d"]
    /// "#
    /// .parse()?;
    ///
    /// let limiter = Limiter::new(Embedded::new());
    /// let requests = [Attributes::new().user("42"), Attributes::new().set("model", "large")];
    /// for _ in 0..2 {
    ///     let verdicts = limiter.acquire_all_by(&rules, &requests).await?;
    ///     assert!(verdicts.iter().all(|verdict| verdict.allowed));
    /// }
    /// let verdicts = limiter.acquire_all_by(&rules, &requests).await?;
    /// assert!(verdicts[0].allowed && !verdicts[1].allowed, "the model has none left");
    /// let verdict = limiter.call_by(Operation::Peek, &rules, &requests[0]).await?;
    /// assert_eq!(verdict.decision.map(|decision| decision.remaining), Some(8), "so the user wasn't charged");
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "embedded"))]
    /// # fn main() {}
    /// ```
    pub async fn acquire_all_by<'a, R: Into<RuleRequest<'a>>>(
        &self,
        rules: &RuleSet,
        requests: impl IntoIterator<Item = R>,
    ) -> Result<Vec<Verdict>, Error> {
        let found = requests.into_iter().map(|request| Self::found_for(rules, &request.into()));
        let found = found.collect::<Result<Vec<_>, _>>()?;
        if let [(applies, shadows)] = found.as_slice() {
            let held = self.judge(applies, shadows, Acquisition::Acquire).await?;
            return Ok(vec![held.verdict]);
        }
        // What a rule denies before any limits are asked takes nothing of the others either.
        let denied = found.iter().any(|(applies, _)| matches!(applies.effect, Effect::Block | Effect::Missing(_)));
        let (operation, asking) = match denied {
            true => (Operation::Peek, Acquisition::Call(Operation::Peek)),
            false => (Operation::Acquire, Acquisition::Acquire),
        };
        let charges = || found.iter().filter_map(|(applies, _)| applies.charge());
        let calls: Vec<_> = charges().map(|charge| (charge.rule(), charge.request())).collect();
        let shadows = found.iter().flat_map(|(_, shadows)| shadows).map(|shadow| self.shadow(shadow, asking));
        let (decided, shadowed) = Box::pin(join(self.decide_all(&calls, operation), join_all(shadows))).await;
        if operation.decides() {
            match &decided {
                Ok(decisions) => calls.iter().zip(decisions).for_each(|((rule, _), own)| counted(rule, Ok(own))),
                Err(error) => calls.iter().for_each(|(rule, _)| counted(rule, Err(error))),
            }
        }
        let decided = decided.inspect_err(|error| {
            found.iter().for_each(|(applies, _)| telemetry::judged(applies.name(), Err(error.kind().name())));
        });
        let (mut decisions, mut shadowed) = (decided?.into_iter(), shadowed.into_iter());
        let verdicts = found.iter().map(|(applies, shadows)| {
            let decision = applies.charge().and_then(|_| decisions.next());
            let mut verdict = self.verdict(applies, decision);
            verdict.shadows.extend(shadowed.by_ref().take(shadows.len()).map(|(shadow, _)| shadow));
            verdict.counted();
            verdict
        });
        Ok(verdicts.collect())
    }

    /// The rule that applies to a request, and the shadow rules that would, at the request's own costs.
    fn found_for<'r>(rules: &'r RuleSet, request: &RuleRequest<'_>) -> Result<(Applies<'r>, Vec<Shadow<'r>>), Error> {
        rules.found_for(request).inspect_err(|error| telemetry::judged(None, Err(error.kind().name())))
    }

    /// The rule that applies to a request, and the shadow rules that would.
    ///
    /// # Errors
    ///
    /// A cost taken from an attribute that is no whole number.
    #[cfg(feature = "http")]
    pub(crate) fn found<'r>(
        rules: &'r RuleSet,
        request: &Attributes<'_>,
    ) -> Result<(Applies<'r>, Vec<Shadow<'r>>), Error> {
        rules.found(request).inspect_err(|error| telemetry::judged(None, Err(error.kind().name())))
    }

    /// Asks the limits of the rule that applies and, without waiting, those of shadow rules.
    pub(crate) async fn judge(
        &self,
        applies: &Applies<'_>,
        shadows: &[Shadow<'_>],
        asking: Acquisition<'_>,
    ) -> Result<HoldVerdict, Error> {
        let own = self.judge_own(applies, asking);
        // Most sets have none.
        let held = if shadows.is_empty() {
            own.await
        } else {
            let asking = asking.of_shadows();
            let others = join_all(shadows.iter().map(|shadow| self.shadow(shadow, asking)));
            let (held, others) = Box::pin(join(own, others)).await;
            held.map(|mut held| {
                for (shadow, permit) in others {
                    held.verdict.shadows.push(shadow);
                    held.permits.extend(permit);
                }
                held
            })
        };
        match &held {
            _ if !asking.decides() => {}
            Ok(HoldVerdict { verdict, .. }) => verdict.counted(),
            Err(error) => telemetry::judged(applies.name(), Err(error.kind().name())),
        }
        held
    }

    async fn judge_own(&self, applies: &Applies<'_>, asking: Acquisition<'_>) -> Result<HoldVerdict, Error> {
        let (decision, permit) = match applies.charge() {
            Some(charge) => {
                let answer = self.ask_limits(charge, asking).await;
                if asking.decides() {
                    counted(charge.rule(), answer.as_ref().map(|(decision, _)| decision));
                }
                let (decision, permit) = answer?;
                (Some(decision), permit)
            }
            None => {
                // The answer is ready at once, and the caller may ask again at once: other tasks must get their turn.
                tokio::task::consume_budget().await;
                (None, None)
            }
        };
        Ok(HoldVerdict { verdict: self.verdict(applies, decision), permits: permit.into_iter().collect() })
    }

    /// The verdict of the rules that apply, given what their limits decided, if they were asked.
    fn verdict(&self, applies: &Applies<'_>, decision: Option<Decision>) -> Verdict {
        let (allowed, reason) = match &applies.effect {
            Effect::Allow if applies.rule.is_none() => (true, Reason::NoRule),
            Effect::Allow => (true, Reason::Allowed),
            Effect::Block => match &applies.user_block {
                Some(block) => (false, Reason::UserBlocked(Arc::clone(block))),
                None => (false, Reason::Blocked),
            },
            Effect::Missing(attribute) => (false, Reason::Missing((*attribute).to_owned())),
            Effect::Limit(_) => (decision.as_ref().is_some_and(|decision| decision.allowed), Reason::Limits),
        };
        let decisive = decision.as_ref().filter(|_| !allowed).and_then(|decision| {
            // A policy knows that a cost could never be admitted, though no limit was asked.
            let never = |own: &&Applies<'_>| {
                own.charge().is_some_and(|charge| !self.may_fit(Call::acquire(charge.rule(), &charge.request())))
            };
            applies.denied_by(decision).or_else(|| applies.together.iter().find(never))
        });
        let decisive = decisive.unwrap_or(applies);
        let together = applies.together.iter().filter_map(Applies::name).cloned().collect();
        let mut response = decisive.response.filter(|_| !allowed).cloned();
        if let (Some(response), Some(block)) = (&mut response, &applies.user_block) {
            response.retry_after = block.left();
        }
        let rule = decisive.name().cloned();
        Verdict { allowed, rule, together, reason, decision, response, shadows: Vec::new() }
    }

    /// What a shadow rule decides. It has no effect.
    async fn shadow(&self, (name, applies): &Shadow<'_>, asking: Acquisition<'_>) -> (ShadowVerdict, Option<Permit>) {
        let (decision, permit) = match applies {
            Ok(Applies { effect: Effect::Limit(charge), .. }) => match self.ask_limits(charge, asking).await {
                Ok((decision, permit)) => (Some(Ok(decision)), permit),
                Err(error) => (Some(Err(error)), None),
            },
            Ok(_) => (None, None),
            Err(error) => (Some(Err(error.clone())), None),
        };
        let allowed = match (applies, &decision) {
            (_, Some(Ok(decision))) => decision.allowed,
            (Ok(applies), None) => matches!(applies.effect, Effect::Allow),
            _ => true,
        };
        (ShadowVerdict { rule: Arc::clone(name), allowed, decision }, permit)
    }

    /// What the limits decide, for a caller that counts the outcome.
    async fn ask_limits(
        &self,
        charge: &Charge<'_>,
        asking: Acquisition<'_>,
    ) -> Result<(Decision, Option<Permit>), Error> {
        let (rule, request) = (charge.rule(), charge.request());
        let holds = || rule.limits().any(|limit| limit.algorithm().holds());
        let follow_up = asking.follow_up().filter(|next| next.settles || charge.counts_by_response());
        let request = follow_up.map_or(request, |next| request.own_id(next.id).id_ttl(next.within));
        let held = match asking {
            Acquisition::Hold(_) if holds() => Box::pin(self.hold_once(rule, request)).await?,
            #[cfg(feature = "http")]
            Acquisition::Wait(max_wait, ..) if holds() => Box::pin(self.hold_within(rule, request, max_wait)).await?,
            #[cfg(feature = "http")]
            Acquisition::Wait(max_wait, blocks, _) => {
                return Ok((Box::pin(self.wait_within(rule, request, max_wait, blocks)).await?, None));
            }
            Acquisition::Call(operation) => {
                return Ok((self.decide(rule, request, operation).uncounted().await?, None));
            }
            _ => return Ok((self.acquire(rule, request).uncounted().await?, None)),
        };
        Ok((held.decision, held.permit))
    }
}
