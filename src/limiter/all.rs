//! Several calls as one: all of them are allowed, or nothing is taken.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::time::Instant;

use super::counted::counted;
use super::handle::Limiter;
use crate::decision::{Decision, Decisions};
use crate::error::{Error, Kind};
use crate::operation::Operation;
use crate::request::{OwnedRequest, Request};
use crate::rule::{Rule, RuleOfCalls};

/// The most calls: a script decides them while it holds up all others.
const MOST: usize = 1000;

/// What asks for all calls, and which of its limits are each call's, in their order.
struct Joined {
    rule: Rule,
    request: OwnedRequest,
    places: Vec<Vec<usize>>,
}

impl Limiter {
    /// Takes what several calls cost, each by its own rule and key, or nothing: they are one decision, atomic on one
    /// Redis, such as of a transfer that counts against both of its accounts, or of a gateway's call that falls under
    /// several descriptors. Costs what one call does: one round trip, or two on a cluster if one
    /// node denies what others have admitted.
    ///
    /// The decisions are the calls', in their order. Units are taken only if all calls are
    /// [allowed](Decisions::allowed). A call that would be allowed by itself, and isn't made because of another, has
    /// granted nothing. Calls that count the same key take the sum of their costs from it.
    ///
    /// A deadline, a time and jitter are those of the first request. While Redis is unreachable, the strictest policy of
    /// the rules answers all calls. On a cluster, keys may be [on several
    /// nodes](crate::guide::load#keys-on-several-nodes), as of one rule.
    ///
    /// # Errors
    ///
    /// The errors of [`acquire`](Self::acquire), of any of the calls. More than 1,000 calls. Calls with an id, and so
    /// calls with permits. Two calls on one key whose limits of that name have different numbers.
    ///
    /// ```
    /// # #[cfg(feature = "embedded")]
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use tollgate::{Embedded, Limiter, Request, Rule};
    ///
    /// let limiter = Limiter::new(Embedded::new());
    /// let sent = Rule::new("sent", "token-bucket 100/1d")?;
    /// let received = Rule::new("received", "token-bucket 10/1d")?;
    /// let transfer = [(&sent, Request::new("ada").cost(20)), (&received, Request::new("bob").cost(20))];
    ///
    /// let decisions = limiter.acquire_all(transfer).await?;
    /// assert!(!decisions.allowed());
    /// assert!(decisions[0].allowed && !decisions[1].allowed, "more than bob may receive");
    /// assert_eq!(limiter.peek(&sent, "ada").await?.remaining, 100, "so nothing was taken");
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "embedded"))]
    /// # fn main() {}
    /// ```
    pub async fn acquire_all<'a, R: Into<Request<'a>>>(
        &self,
        calls: impl IntoIterator<Item = (&'a Rule, R)>,
    ) -> Result<Decisions, Error> {
        let calls: Vec<(&Rule, Request<'a>)> = calls.into_iter().map(|(rule, call)| (rule, call.into())).collect();
        if let [(only, request)] = calls.as_slice() {
            return self.acquire(only, *request).await.map(|decision| Decisions(vec![decision]));
        }
        let decided = self.decide_all(&calls, Operation::Acquire).await;
        match &decided {
            Ok(decisions) => calls.iter().zip(decisions).for_each(|((rule, _), own)| counted(rule, Ok(own))),
            Err(error) => calls.iter().for_each(|(rule, _)| counted(rule, Err(error))),
        }
        decided.map(Decisions)
    }

    /// The same, or what it would answer; for a caller that counts the outcome.
    pub(crate) async fn decide_all(
        &self,
        calls: &[(&Rule, Request<'_>)],
        operation: Operation,
    ) -> Result<Vec<Decision>, Error> {
        let began = Instant::now();
        if calls.is_empty() {
            return Ok(Vec::new());
        }
        if calls.len() > MOST {
            return Err(Error::new(
                Kind::Input,
                format!("acquire_all: expected at most {MOST} calls, got {}", calls.len()),
            ));
        }
        let Joined { rule, request, places } = self.joined(calls)?;
        let request = Request::from(&request).with_terms_of(&calls[0].1);
        let request = request.deadline(request.deadline_or(self.deadline).saturating_sub(began.elapsed()));
        let decision = self.decide(&rule, request, operation).uncounted().await?;
        Ok(places.iter().map(|places| decision.of_limits(places)).collect())
    }

    fn joined(&self, calls: &[(&Rule, Request<'_>)]) -> Result<Joined, Error> {
        let (mut all, mut parts, mut places) = (RuleOfCalls::default(), Vec::new(), Vec::with_capacity(calls.len()));
        let mut by_key = HashMap::new();
        for (call, (rule, request)) in calls.iter().enumerate() {
            if request.has_id() {
                let why = "a call has an id, so it can't be made together with others: make it by itself";
                return Err(Error::new(Kind::Input, format!("acquire_all: {why} (rule {rule})")));
            }
            let plain = request.plain();
            plain.check_costs(rule)?;
            // No name of a part begins with a line break.
            let part = |name: &str| -> Arc<str> { format!("\n{call}\n{name}").into() };
            let (own, units) = (all.add_rule(rule, part), request.units(rule));
            let mut of_call = Vec::with_capacity(rule.limits().len());
            for (at, scoped) in rule.scoped_limits().iter().enumerate() {
                let key = self.state_key(rule, scoped.whole(), plain)?;
                let place = match by_key.get(&*key) {
                    Some(&place) if all.take_more(place, scoped, units.of(at)) => place,
                    Some(_) => {
                        let why = "two calls on one key have a limit of this name, with different numbers";
                        return Err(Error::new(Kind::Input, format!("acquire_all: {why}: {}", scoped.quota.title())));
                    }
                    None => {
                        let by = part(scoped.by.as_deref().unwrap_or_default()).to_string();
                        let place = all.add_limit(scoped, own, Some(by), units.of(at));
                        by_key.insert(key.to_vec(), place);
                        place
                    }
                };
                of_call.push(place);
            }
            places.push(of_call);
            let owned = request.into_owned();
            parts.push((part(""), Arc::clone(owned.shared_key())));
            parts.extend(owned.shared_parts().iter().map(|(name, value)| (part(name), Arc::clone(value))));
        }
        let request = OwnedRequest::charging(calls[0].1.key().into(), parts, None, Vec::new());
        Ok(Joined { rule: all.joined(), request, places })
    }
}
