//! The verdict of a set of rules on a recorded request.

use std::time::{Duration, UNIX_EPOCH};

use tollgate::rules::{Applies, Charge, Effect};
use tollgate::{Decision, Error, Limiter, OwnedRequest, Request, Rule};

use crate::attributes::Pairs;
use crate::held::{self, ByResponse, Held};
use crate::operation;
use crate::records::{Record, counted};

/// Why a request is refused if its path can be read in two ways.
pub(crate) const AMBIGUOUS: &str = "ambiguous";

/// How long the middleware remembers a request whose response may give it back.
const REMEMBERED: Duration = Duration::from_secs(3600);

/// Why a request is denied if it lacks an attribute of a rule's key.
pub(crate) const MISSING: &str = "missing";

/// A rule that applies to a record, or a shadow rule that would, before its limits are checked.
#[derive(Debug)]
pub(crate) struct Plan<'s> {
    /// None if the middleware refuses the request before any rule.
    applies: Option<Applies<'s>>,
    /// The call for its limits, if it has any.
    pub(crate) call: Option<Call>,
}

/// A call for a rule's limits.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) rule: Rule,
    pub(crate) request: OwnedRequest,
    pub(crate) cost: u64,
    /// The call's id: the record's, or a generated one if it holds permits or may be given back.
    pub(crate) id: Option<Vec<u8>>,
    /// What its response does to what it took.
    pub(crate) counted: ByResponse,
    /// What each limit counts.
    pub(crate) keys: Vec<Vec<u8>>,
}

/// A rule that applies to a record, or a shadow rule that would, and the outcome.
#[derive(Debug)]
pub(crate) struct Judged<'s> {
    /// None if the middleware refuses the request before any rule.
    pub(crate) applies: Option<Applies<'s>>,
    pub(crate) allowed: bool,
    /// If its limits were checked: the call, and what they decided.
    pub(crate) asked: Option<(Call, Decision)>,
}

impl<'s> Plan<'s> {
    /// A request whose path can be read in two ways.
    pub(crate) fn refused() -> Self {
        Self { applies: None, call: None }
    }

    /// The plan at the record's time; `adapted` changes a rule as the options ask.
    pub(crate) fn of(applies: Applies<'s>, adapted: &(dyn Fn(Rule) -> Rule + Sync), record: &Record) -> Self {
        let Record { line, t_us, op, cost, ref id, .. } = *record;
        let Effect::Limit(charge) = &applies.effect else { return Self { applies: Some(applies), call: None } };
        let rule = adapted(charge.rule().clone());
        let cost = cost.unwrap_or(charge.cost());
        // A call that ends later needs an id: the same one in every replay of the file.
        let is_given_back = matches!(ByResponse::of(charge, charge.request(), record), ByResponse::GivenBack(_));
        let has_end = held::holds(&rule) || is_given_back;
        let own = (id.is_none() && operation::takes(op) && has_end).then(|| format!("replay-{t_us}-{line}"));
        let mut request = charge.request().cost(cost).at(UNIX_EPOCH + Duration::from_micros(t_us));
        let id = id.clone().or(own.map(String::into_bytes));
        if let Some(id) = &id {
            request = request.id(id);
        }
        if is_given_back {
            request = request.id_ttl(REMEMBERED);
        }
        let counted = ByResponse::of(charge, request, record);
        let (request, keys) = (request.into_owned(), counted_keys(charge));
        Self { applies: Some(applies), call: Some(Call { rule, request, cost, id, counted, keys }) }
    }

    /// Checks its limits, if it has any.
    pub(crate) async fn decide(self, limiter: &Limiter, record: &Record) -> Result<Judged<'s>, Error> {
        let Self { applies, call } = self;
        let Some(call) = call else {
            let allows = matches!(&applies, Some(Applies { effect: Effect::Allow, .. }));
            return Ok(Judged { allowed: allows || !operation::asks(record.op), applies, asked: None });
        };
        let decision =
            operation::call(limiter, &call.rule, record.op, Request::from(&call.request), record.length).await?;
        Ok(Judged { applies, allowed: decision.allowed, asked: Some((call, decision)) })
    }
}

impl<'s> Judged<'s> {
    /// Notes the permits that it holds.
    pub(crate) async fn hold(&self, held: &mut Held, limiter: &Limiter, record: &Record) -> Result<(), Error> {
        match &self.asked {
            Some((call, _)) => {
                held.note(limiter, (&call.rule, &call.request, &call.counted), record, self.allowed).await
            }
            None => Ok(()),
        }
    }

    /// The rule that decides: the first that denies or, if none does, the first.
    fn decisive(&self) -> Option<&Applies<'s>> {
        let applies = self.applies.as_ref()?;
        let denied_by = self.asked.as_ref().filter(|(_, decision)| !decision.allowed);
        let rule = denied_by.and_then(|(_, decision)| decision.rule()).or(applies.rule);
        Some(applies.together.iter().find(|own| own.rule == rule).unwrap_or(applies))
    }

    /// That rule's name; none if no rule applies.
    pub(crate) fn rule(&self) -> Option<&'s str> {
        self.decisive()?.rule
    }

    /// The names of all rules that apply, if several do.
    pub(crate) fn together(&self) -> Vec<&'s str> {
        self.applies.iter().flat_map(|applies| &applies.together).filter_map(|own| own.rule).collect()
    }

    /// Each rule that decides, and whether its own limits allow the request. If a rule without limits denies, only that
    /// one.
    pub(crate) fn each(&self) -> Vec<(Option<&'s str>, bool)> {
        let limits = self.asked.as_ref().map(|(_, decision)| &decision.limits);
        let allows = |own: &Applies<'s>| {
            let mut of_it = limits.into_iter().flatten().filter(|limit| limit.rule() == own.rule);
            of_it.all(|limit| limit.allowed)
        };
        match self.applies.as_ref().filter(|applies| !applies.together.is_empty()) {
            Some(applies) if self.allowed || limits.is_some() => {
                applies.together.iter().map(|own| (own.rule, allows(own))).collect()
            }
            _ => vec![(self.rule(), self.allowed)],
        }
    }

    /// Whether the middleware refuses the request before any rule.
    pub(crate) fn is_refused(&self) -> bool {
        self.applies.is_none()
    }

    /// Why it is allowed or denied.
    pub(crate) fn reason(&self) -> &'static str {
        self.applies.as_ref().map_or(AMBIGUOUS, reason)
    }

    pub(crate) fn overridden(&self) -> Option<&'s str> {
        self.decisive()?.overridden
    }

    pub(crate) fn denied_by(&self) -> Option<&str> {
        self.asked.as_ref().and_then(|(_, decision)| decision.denied_by.as_deref())
    }

    /// The key that the rule counts, or that an override names.
    pub(crate) fn key(&self) -> Option<&[u8]> {
        match &self.decisive()?.effect {
            Effect::Limit(charge) => Some(charge.key()),
            _ => self.overridden().map(str::as_bytes),
        }
    }

    /// The counted key or, if there is none, the client.
    pub(crate) fn key_or_client(&self, attributes: &Pairs) -> Vec<u8> {
        if let Some(key) = self.key() {
            return key.to_vec();
        }
        let found = ["user", "api_key", "ip"].iter().find_map(|name| attributes.iter().find(|(own, _)| own == name));
        match found.or(attributes.first()) {
            Some((name, value)) => {
                // An address as rules by `ip` count it.
                let address = (name == "ip").then(|| str::from_utf8(value).ok()?.parse().ok()).flatten();
                [name.as_bytes(), b":", &address.map_or_else(|| value.clone(), counted)].concat()
            }
            None => b"nobody".to_vec(),
        }
    }
}

/// Why a request is allowed or denied: no-rule, allowed, blocked, missing or limits.
pub(crate) fn reason(applies: &Applies<'_>) -> &'static str {
    match applies.effect {
        Effect::Allow if applies.rule.is_none() => "no-rule",
        Effect::Allow => "allowed",
        Effect::Block => "blocked",
        Effect::Missing(_) => MISSING,
        _ => "limits",
    }
}

/// What each limit of a charge counts, in order.
pub(crate) fn counted_keys(charge: &Charge<'_>) -> Vec<Vec<u8>> {
    let part = |name: &str| charge.parts().find(|(other, _)| *other == name).map(|(_, value)| value.to_vec());
    let parts = charge.rule().counted_parts();
    parts.map(|name| name.and_then(part).unwrap_or_else(|| charge.key().to_vec())).collect()
}
