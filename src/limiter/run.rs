//! Script calls in full, and what is asked once more: a call whose calendar windows don't contain the server's time, or
//! one that shared a script call with a key that its user may not use. Neither has charged anything.

use std::borrow::Cow;
use std::sync::Arc;

use super::Limiter;
use crate::batch::{Ask, AskApart, Entry};
use crate::call::{Call, LimitInput, Marker, Mode, Reply};
use crate::decision::Decision;
use crate::engine::deadline::Deadline;
use crate::error::Error;
use crate::operation::Operation;
use crate::request::{PlainRequest, Request};
use crate::rule::{Rule, Target};
use crate::script::Script;

impl Limiter {
    /// Asks once more for an acquire that was refused with this error.
    pub(super) async fn acquire_again(
        &self,
        rule: &Rule,
        target: Target<'_>,
        request: &PlainRequest<'_>,
        refused: Error,
        until: Deadline,
    ) -> Result<Decision, Error> {
        until.check()?;
        if refused.note::<AskApart>().is_some() {
            let Some(ask) = self.ask(rule, target, request)? else { return Err(refused) };
            let reply = Box::pin(self.engine.ask_by_itself(&Entry::Packed(ask), until)).await?;
            return self.decision_of_ask(rule, target, request, &reply);
        }
        let Some(ask) = self.ask_again(rule, target, request, &refused)? else { return Err(refused) };
        let reply = self.engine.ask(&Entry::Packed(ask), until).await?;
        self.decision_of_ask(rule, target, request, &reply)
    }

    /// What to ask after a refusal: the same, with the windows around the time that the server reported.
    pub(super) fn ask_again<'r>(
        &self,
        rule: &Rule,
        target: Target<'r>,
        request: &PlainRequest<'_>,
        stale: &Error,
    ) -> Result<Option<Ask<'r>>, Error> {
        let (Some(windows), Some(server_us)) = (target.limit.windows(), stale.stale_at()) else { return Ok(None) };
        self.server_clock.heard(server_us);
        let numbers = Arc::clone(&windows.around_server_time(server_us).packed);
        Ok(self.ask(rule, target, request)?.map(|ask| Ask { numbers: Cow::Owned(numbers), ..ask }))
    }

    /// Whether an acquire that was refused with this error is [asked for again](Self::acquire_again).
    pub(super) fn is_asked_again_after(error: &Error) -> bool {
        error.stale_at().is_some() || error.note::<AskApart>().is_some()
    }

    /// Calls a script in full.
    pub(super) async fn run(
        &self,
        rule: &Rule,
        script: &'static Script,
        limits: &[LimitInput<'_>],
        marker: Option<&Marker>,
        request: &Request<'_>,
        mode: Mode,
    ) -> Result<Reply, Error> {
        let (cost, now_us) = (request.units(rule), request.now_us()?);
        let options = match request.earlier() {
            Some(earlier) if mode == Mode::Call(Operation::Refund) => Cow::Owned(format!(
                "{}{}",
                rule.options(),
                earlier.owed_at(request.time().unwrap_or_else(|| self.now()))
            )),
            _ => Cow::Borrowed(rule.options()),
        };
        let within_us =
            request.within_us().filter(|_| matches!(mode, Mode::Call(Operation::Reserve | Operation::Peek)));
        let call = Call { script, limits, marker, cost, mode, options: &options, within_us, now_us };
        let until = Deadline::after(request.deadline_or(self.deadline));
        match self.engine.ask(&Entry::InFull(&call), until).await {
            Err(stale) if limits.iter().any(|input| input.windows.is_some()) => match stale.stale_at() {
                Some(server_us) => Box::pin(self.run_again(&call, server_us, until)).await,
                None => Err(stale),
            },
            reply => reply,
        }
    }

    async fn run_again(&self, call: &Call<'_>, server_us: u64, until: Deadline) -> Result<Reply, Error> {
        until.check()?;
        self.server_clock.heard(server_us);
        let mut limits = call.limits.to_vec();
        for input in &mut limits {
            if let Some(windows) = input.windows {
                input.arguments = windows.around_server_time(server_us).arguments.clone().into();
            }
        }
        self.engine.ask(&Entry::InFull(&Call { limits: &limits, ..*call }), until).await
    }
}
