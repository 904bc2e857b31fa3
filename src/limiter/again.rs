//! Calls of scripts, and those that are made again: where the windows of the calendar that a script was told of aren't those
//! of the server's time, it says that time and charges nothing.

use std::future::poll_fn;
use std::task::Poll;
use std::time::{Duration, Instant};

use super::Limiter;
use crate::error::Error;
use crate::limit::Windows;
use crate::request::Request;
use crate::rule::{Rule, Target};
use crate::script::{Call, Marker, Mode, Part, Reply, Script};

impl Limiter {
    pub(super) async fn run(
        &self,
        rule: &Rule,
        script: &'static Script,
        limits: &[Part<'_>],
        marker: Option<&Marker>,
        request: &Request<'_>,
        mode: Mode,
    ) -> Result<Reply, Error> {
        let (cost, options, now_us) = (request.units(rule), rule.options(), request.now_us()?);
        let call = Call { script, limits, marker, cost, mode, options, now_us };
        let deadline = request.deadline_or(self.deadline);
        let began = limits.iter().any(|part| part.windows.is_some()).then(Instant::now);
        match (self.engine.run(&call, deadline).await, began) {
            (Err(stale), Some(began)) if stale.windows_around().is_some() => {
                Box::pin(self.run_again(&call, &stale, left_of(deadline, began)?)).await
            }
            (reply, _) => reply,
        }
    }

    async fn run_again(&self, call: &Call<'_>, stale: &Error, deadline: Duration) -> Result<Reply, Error> {
        let mut limits = call.limits.to_vec();
        for part in &mut limits {
            if let Some(windows) = part.windows {
                around_server_time(windows, stale);
                part.arguments = windows.at(call.now_us).arguments.clone().into();
            }
        }
        self.engine.run(&Call { limits: &limits, ..*call }, deadline).await
    }

    /// An acquire by the script's packed form whose windows were refused, once more.
    pub(super) async fn acquire_again(
        &self,
        rule: &Rule,
        target: Target<'_>,
        request: &Request<'_>,
        stale: Error,
        began: Option<Instant>,
    ) -> Result<Reply, Error> {
        let (Some(windows), Some(began)) = (target.limit.windows(), began) else { return Err(stale) };
        around_server_time(windows, &stale);
        let deadline = left_of(request.deadline_or(self.deadline), began)?;
        let begun =
            poll_fn(|context| Poll::Ready(self.begin(rule, target, request, deadline, context.waker()))).await?;
        match begun {
            Some(acquiring) => acquiring.await,
            None => Err(stale),
        }
    }
}

/// The next calls by these windows are told those around the time that the server said.
pub(super) fn around_server_time(windows: &Windows, stale: &Error) {
    if let Some(now_us) = stale.windows_around() {
        windows.found(now_us);
    }
}

/// What is left of a deadline for a call that began then.
pub(super) fn left_of(deadline: Duration, began: Instant) -> Result<Duration, Error> {
    let left = deadline.saturating_sub(began.elapsed());
    if left.is_zero() { Err(Error::deadline(deadline, false)) } else { Ok(left) }
}
