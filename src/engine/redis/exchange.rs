//! Script calls, sent together in one pipeline, and again as long as that is safe: by text if the server doesn't have
//! the script, over another connection if nothing was written, and after a wait if the server refuses for now. The code
//! that calls this decides the last two, so that no call is resent once its caller has been answered that nothing was
//! charged.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};
use tokio::time::Instant;

use super::Redis;
use super::connection::Connection;
use super::errors::{Called, is_of_a_key};
use super::per_runtime::PerRuntime;
use super::pipeline::{Asking, full_command, packed_command, send};
use super::queue::Stage;
use super::redirect::Redirect;
use super::texts::Eval;
use crate::batch::{Answer, AskApart, BatchedCall, InFull, PackedCall, Records};
use crate::call::Reply;
use crate::engine::deadline::Deadline;
use crate::error::{Charged, Error, Kind};
use crate::random::jittered;
use crate::runtime;

/// The waits before calls that certainly didn't run are retried, each up to half as long again.
const WAITS: [Duration; 3] = [Duration::from_millis(5), Duration::from_millis(20), Duration::from_millis(60)];

/// How often calls are sent whose script the server doesn't have: the last time by its text, whoever else has sent that.
const SENDINGS: usize = 4;

/// A script call.
pub(super) trait ScriptCall {
    type Answer;

    fn command(&self, eval: Eval) -> Cmd;

    fn called(&self) -> Called;

    /// Whether to retry it here shortly, after this error, with which it certainly didn't run.
    fn is_asked_again_after(&self, error: &Error) -> bool;

    /// The error of a call that the server refused with this.
    fn refused(&self, error: Error, _said: &RedisError) -> Error {
        error
    }

    /// Reads the script's answer, given the error if too few replicas confirmed what it took.
    fn read(&self, answer: Value, lacking: Option<Error>) -> Result<Self::Answer, Error>;
}

/// The outcome of a call.
#[derive(Debug)]
pub(super) enum Outcome<T> {
    /// None of it was written, nor will be.
    Unsent,
    /// It was refused with this error and didn't run; it may be retried shortly.
    Refused(Error),
    Answered(Result<T, Error>),
}

/// How calls are sent.
#[derive(Clone, Copy)]
pub(super) struct CallOptions {
    pub(super) asking: Asking,
    /// By when replicas must have confirmed what was taken; none if they needn't.
    pub(super) confirm_by: Option<Instant>,
}

/// The retries left for calls that didn't run, and the waits between them.
pub(super) struct Retries {
    waits: std::array::IntoIter<Duration, 3>,
}

impl Retries {
    pub(super) fn new() -> Self {
        Self { waits: WAITS.into_iter() }
    }

    /// Whether a retry is left for a call that the server refuses for now.
    fn are_left(&self) -> bool {
        self.waits.len() > 0
    }

    /// A connection to retry on: at once, or after a wait if the server refused for now.
    pub(super) async fn next(
        &mut self,
        redis: &Redis,
        per_runtime: &Arc<PerRuntime>,
        refused: bool,
    ) -> Result<Connection, Error> {
        if refused {
            per_runtime.sleep(jittered(self.waits.next().unwrap_or_default(), 50)).await;
        }
        redis.connection(per_runtime).await
    }
}

impl Redis {
    /// Sends one call, and ends by the deadline.
    pub(super) async fn ask_one<Q: ScriptCall>(
        &self,
        per_runtime: &Arc<PerRuntime>,
        call: &Q,
        asking: Asking,
        must_confirm: bool,
        until: Deadline,
    ) -> Result<Q::Answer, Error> {
        let options = CallOptions { asking, confirm_by: must_confirm.then_some(until.at) };
        let mut stage = Stage::Unsent;
        let asked = async {
            let mut retries = Retries::new();
            let mut connection = self.connection(per_runtime).await?;
            loop {
                // Also where the caller comes back late to a future that it had left alone.
                until.check()?;
                stage = Stage::Sent;
                let calls = std::slice::from_ref(call);
                let mut outcomes = self.exchange(per_runtime, &connection, calls, options, &retries).await;
                stage = match outcomes.pop() {
                    Some(Outcome::Answered(answer)) => return answer,
                    Some(Outcome::Refused(error)) => Stage::Refused(error),
                    Some(Outcome::Unsent) | None => Stage::Unsent,
                };
                connection = retries.next(self, per_runtime, matches!(stage, Stage::Refused(_))).await?;
            }
        };
        match runtime::timeout_at(until.at, asked).await {
            Some(answer) => answer,
            None => Err(stage.missed(until)),
        }
    }

    /// Sends these calls once, and again those whose script the server doesn't have: one of them by its text, and, once
    /// that is on its way, the others by its digest.
    pub(super) async fn exchange<Q: ScriptCall>(
        &self,
        per_runtime: &Arc<PerRuntime>,
        connection: &Connection,
        calls: &[Q],
        options: CallOptions,
        retries: &Retries,
    ) -> Vec<Outcome<Q::Answer>> {
        let mut outcomes: Vec<_> = calls.iter().map(|_| Outcome::Unsent).collect();
        let mut asked: Vec<_> = (0..calls.len()).map(|at| (at, Eval::ByDigest)).collect();
        for further in (0..SENDINGS).rev() {
            let (written, texts) = (connection.written(), connection.texts().count());
            let confirm = options.confirm_by.and_then(|by| self.confirms(by.saturating_duration_since(Instant::now())));
            let (count, asking) = (asked.len(), options.asking);
            let commands: Vec<_> = asked.iter().map(|(at, eval)| calls[*at].command(*eval)).collect();
            let (answers, lacking) = if per_runtime.breaker.is_troubled() {
                let send = |connection| async move { send(&connection, commands, asking, confirm).await };
                per_runtime.send_in_task(connection, count, send).await
            } else {
                send(connection, commands, asking, confirm).await
            };
            let lost = answers.iter().find_map(|answer| answer.as_ref().err().filter(|error| error.is_io_error()));
            if let Some(error) = lost
                && connection.wrote_nothing_since(written)
            {
                per_runtime.interpret(error, connection.number);
                break;
            }
            let (mut missing, mut answered, mut failed) = (Vec::new(), false, None);
            for ((at, eval), answer) in asked.into_iter().zip(answers) {
                let call = &calls[at];
                let answer = match answer {
                    Err(error) if eval == Eval::ByDigest && is_noscript(&error) => {
                        let script = call.called().script;
                        let again = if further > 1 { connection.texts().again(script, texts) } else { Eval::ByText };
                        missing.push((at, again));
                        answered = true;
                        continue;
                    }
                    Err(error) => {
                        let refused = per_runtime.interpret_call(call.called(), &error, connection.number);
                        Err(call.refused(refused, &error))
                    }
                    Ok(value) => call.read(value, lacking.clone()),
                };
                outcomes[at] = match answer {
                    Err(error) if retries.are_left() && call.is_asked_again_after(&error) => Outcome::Refused(error),
                    answer => {
                        match &answer {
                            Err(error) if error.is_outage() => failed = Some(error.clone()),
                            _ => answered = true,
                        }
                        if answer.as_ref().is_err_and(Error::is_garbled) {
                            // It may be another call's answer: nothing more on this connection can be trusted.
                            per_runtime.drop_connection(connection.number);
                            connection.lose();
                        }
                        Outcome::Answered(answer)
                    }
                };
            }
            // Together they are one attempt: Redis is unreachable if it answered none of them.
            if answered || failed.is_some() {
                per_runtime.report_outcome(failed.filter(|_| !answered).as_ref());
            }
            asked = missing;
            if asked.is_empty() {
                break;
            }
        }
        outcomes
    }
}

impl ScriptCall for InFull {
    type Answer = Reply;

    fn command(&self, eval: Eval) -> Cmd {
        full_command(self, eval)
    }

    fn called(&self) -> Called {
        Called::of_full(self)
    }

    /// Also retried when a cluster's node asks for it: of several keys some may have moved and some not, until all
    /// have.
    fn is_asked_again_after(&self, error: &Error) -> bool {
        error.is_not_now() && (self.key_count() > 1 || Redirect::of(error).is_none())
    }

    fn read(&self, answer: Value, lacking: Option<Error>) -> Result<Reply, Error> {
        let items = if let Value::Array(items) = answer { items } else { Vec::new() };
        let integers = items.into_iter().map(|item| match item {
            Value::Int(integer) => Some(integer),
            _ => None,
        });
        self.read(integers, lacking)
    }
}

impl ScriptCall for BatchedCall<'_> {
    type Answer = Answer;

    fn command(&self, eval: Eval) -> Cmd {
        match self {
            Self::Packed(call) => call.command(eval),
            Self::InFull(call) => call.command(eval),
        }
    }

    fn called(&self) -> Called {
        match self {
            Self::Packed(call) => call.called(),
            Self::InFull(call) => call.called(),
        }
    }

    /// A call that a cluster's node redirects is sent on alone, so that no other waits for it.
    fn is_asked_again_after(&self, error: &Error) -> bool {
        error.is_not_now() && Redirect::of(error).is_none() && error.note::<AskApart>().is_none()
    }

    fn refused(&self, error: Error, said: &RedisError) -> Error {
        match self {
            Self::Packed(call) => call.refused(error, said),
            Self::InFull(_) => error,
        }
    }

    fn read(&self, answer: Value, lacking: Option<Error>) -> Result<Answer, Error> {
        match self {
            Self::Packed(call) => ScriptCall::read(call, answer, lacking).map(Answer::Packed),
            Self::InFull(call) => ScriptCall::read(*call, answer, lacking).map(Answer::InFull),
        }
    }
}

impl ScriptCall for PackedCall<'_> {
    type Answer = Records;

    fn command(&self, eval: Eval) -> Cmd {
        packed_command(*self, eval)
    }

    fn called(&self) -> Called {
        Called::of_packed(*self)
    }

    fn is_asked_again_after(&self, error: &Error) -> bool {
        BatchedCall::Packed(*self).is_asked_again_after(error)
    }

    /// A node may refuse a call across slots where it takes one that declares its keys; or, being a replica, redirect
    /// that. But one that runs no script for now refuses both. And one key that the user may not use must not fail
    /// those of others.
    fn refused(&self, error: Error, said: &RedisError) -> Error {
        let for_now = error.is_not_now() && said.kind() != ErrorKind::Server(ServerErrorKind::ReadOnly);
        let refused =
            error.is_permission() || error.is_unsupported() || error.is_refused() && error.stale_at().is_none();
        match self.is_across_slots() {
            _ if for_now || error.charged() != Charged::No => error,
            true if refused => error.redirected(AskApart::Call),
            false if self.key_count() > 1 && is_of_a_key(said) => error.redirected(AskApart::Others),
            _ => error,
        }
    }

    fn read(&self, answer: Value, lacking: Option<Error>) -> Result<Records, Error> {
        match answer {
            Value::BulkString(answer) => PackedCall::read(*self, &answer, lacking),
            _ => {
                let expected = "redis: expected a string of decisions from the script, got something else";
                Err(Error::new(Kind::Garbled, expected))
            }
        }
    }
}

fn is_noscript(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}
