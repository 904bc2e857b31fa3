//! Script calls, sent together in one pipeline, and again as long as that is safe: by text if the server doesn't have
//! the script, over another connection if nothing was written, and after a wait if the server refuses for now. The code
//! that calls this decides the last two, so that no call is resent once its caller has been answered that nothing was
//! charged.

use std::sync::Arc;
use std::time::Duration;

use redis::{RedisError, ServerErrorKind, Value};
use tokio::time::Instant;

use super::Redis;
use super::connection::{Connection, lost};
use super::errors::{Called, from_answer, is_of_a_key};
use super::per_runtime::PerRuntime;
use super::pipeline::{Asking, command, send};
use super::queue::Stage;
use super::redirect::Redirect;
use super::texts::Eval;
use crate::batch::{AskApart, Records, ScriptCall};
use crate::call::Mode;
use crate::engine::deadline::Deadline;
use crate::error::{Charged, Error, ErrorKind, Kind};
use crate::random::jittered;
use crate::runtime;

/// The waits before calls that certainly didn't run are retried, each up to half as long again.
const WAITS: [Duration; 3] = [Duration::from_millis(5), Duration::from_millis(20), Duration::from_millis(60)];

/// How often calls are sent whose script the server doesn't have; the last time by its text, even if another call has
/// sent it.
const SENDINGS: usize = 4;

/// The outcome of a call.
#[derive(Debug)]
pub(super) enum Outcome {
    /// No part of it was written, or will be.
    Unsent,
    /// It was refused with this error and didn't run; it may be retried shortly.
    Refused(Error),
    Answered(Result<Records, Error>),
}

/// How calls are sent.
#[derive(Clone, Copy)]
pub(super) struct CallOptions {
    pub(super) asking: Asking,
    /// The time by which replicas must confirm what was taken; none if they needn't.
    pub(super) confirm_by: Option<Instant>,
}

/// The retries left for calls that didn't run, and the waits between them.
pub(super) struct Retries {
    waits: std::array::IntoIter<Duration, 3>,
    /// How often nothing could be written.
    unsent: u32,
}

impl Retries {
    pub(super) fn new() -> Self {
        Self { waits: WAITS.into_iter(), unsent: 0 }
    }

    /// Whether a retry is left for a call that the server refuses for now.
    fn are_left(&self) -> bool {
        self.waits.len() > 0
    }

    /// A connection to retry on: after a wait if the server refused for now, otherwise at once, unless the breaker has
    /// opened meanwhile, since connections break as soon as they are used.
    pub(super) async fn next(
        &mut self,
        redis: &Redis,
        per_runtime: &Arc<PerRuntime>,
        refused: bool,
    ) -> Result<Connection, Error> {
        if refused {
            per_runtime.sleep(jittered(self.waits.next().unwrap_or_default(), 50)).await;
        } else {
            // The first time, a connection may have broken while it was idle; after that, new ones do.
            if self.unsent > 0 {
                per_runtime.report_failure(&from_answer(&lost()));
            }
            self.unsent += 1;
            per_runtime.breaker.check()?;
        }
        redis.connection(per_runtime).await
    }
}

impl Redis {
    /// Sends one call, and ends by the deadline.
    pub(super) async fn ask_one(
        &self,
        per_runtime: &Arc<PerRuntime>,
        call: ScriptCall<'_>,
        asking: Asking,
        until: Deadline,
    ) -> Result<Records, Error> {
        let options = CallOptions { asking, confirm_by: call.takes().then_some(until.at) };
        let mut stage = Stage::Unsent;
        let asked = async {
            let mut retries = Retries::new();
            let mut connection = self.connection(per_runtime).await?;
            loop {
                // The caller may poll this late.
                until.check()?;
                stage = Stage::Sent;
                let calls = std::slice::from_ref(&call);
                let sending = self.exchange(per_runtime, &connection, calls, options, &retries, |_| true);
                let mut outcomes = per_runtime.writing.in_order(sending).await;
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
    /// that is on its way, the others by its digest. Of calls for which nobody, or not everybody, waits any more, what is
    /// to be sent again is up to the caller: it may have been given back already.
    pub(super) async fn exchange(
        &self,
        per_runtime: &Arc<PerRuntime>,
        connection: &Connection,
        calls: &[ScriptCall<'_>],
        options: CallOptions,
        retries: &Retries,
        is_awaited: impl Fn(usize) -> bool,
    ) -> Vec<Outcome> {
        let mut outcomes: Vec<_> = calls.iter().map(|_| Outcome::Unsent).collect();
        let mut asked: Vec<_> = (0..calls.len()).map(|at| (at, Eval::ByDigest)).collect();
        for further in (0..SENDINGS).rev() {
            let (written, texts) = (connection.written(), connection.texts().count());
            let confirm = options.confirm_by.and_then(|by| self.confirms(by.saturating_duration_since(Instant::now())));
            let (count, asking) = (asked.len(), options.asking);
            let commands: Vec<_> = asked.iter().map(|(at, eval)| command(calls[*at], *eval)).collect();
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
                per_runtime.interpret(error, None, connection.number);
                break;
            }
            let (mut missing, mut answered, mut failed) = (Vec::new(), false, None);
            for ((at, eval), answer) in asked.into_iter().zip(answers) {
                let call = calls[at];
                let answer = match answer {
                    Err(error) if eval == Eval::ByDigest && is_noscript(&error) => {
                        answered = true;
                        if is_awaited(at) {
                            let script = call.script();
                            let again =
                                if further > 1 { connection.texts().again(script, texts) } else { Eval::ByText };
                            missing.push((at, again));
                        }
                        continue;
                    }
                    Err(error) => {
                        let refused = per_runtime.interpret(&error, Some(Called::of(call)), connection.number);
                        Err(of_call(call, refused, &error))
                    }
                    Ok(value) => read(call, value, lacking.clone()),
                };
                outcomes[at] = match answer {
                    Err(error) if retries.are_left() && is_asked_again_after(call, &error) => Outcome::Refused(error),
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

/// Whether to retry this call here shortly, after this error, with which it certainly didn't run. One that a cluster's
/// node redirects is sent on alone, so that no other waits for it; sent alone, it is retried while some of its keys
/// have moved and some have not.
fn is_asked_again_after(call: ScriptCall<'_>, error: &Error) -> bool {
    let is_apart = error.note::<AskApart>().is_some();
    error.kind() == ErrorKind::NotNow
        && !is_apart
        && (Redirect::of(error).is_none() || call.is_alone() && call.key_count() > 1)
}

/// The error of a call that the server refused with this. A node may refuse a call across slots but take one that
/// declares its keys, or, as a replica, redirect that one. But a node that runs no script for now refuses both. And one
/// key that the user may not use must not fail the calls of others.
fn of_call(call: ScriptCall<'_>, error: Error, said: &RedisError) -> Error {
    let for_now =
        error.kind() == ErrorKind::NotNow && said.kind() != redis::ErrorKind::Server(ServerErrorKind::ReadOnly);
    let refused =
        matches!(error.kind(), ErrorKind::Permission | ErrorKind::Unsupported | ErrorKind::Refused | ErrorKind::NotNow);
    match call.is_across_slots() {
        _ if for_now || error.charged() != Charged::No => error,
        true if refused => error.redirected(AskApart::Call),
        false if !call.is_alone() && call.key_count() > 1 && is_of_a_key(said) => error.redirected(AskApart::Others),
        _ => error,
    }
}

fn read(call: ScriptCall<'_>, answer: Value, lacking: Option<Error>) -> Result<Records, Error> {
    let integer = |item| if let Value::Int(integer) = item { Some(integer) } else { None };
    let integers = |items: Vec<Value>| items.into_iter().map(integer).collect::<Option<Vec<_>>>();
    match answer {
        Value::BulkString(answer) => call.read(&answer, lacking),
        Value::Array(items) if call.mode() == Mode::Inspect => call.read_state(&integers(items).unwrap_or_default()),
        _ => {
            let expected = "the script's reply can't be used: expected a string of decisions";
            Err(Error::new(Kind::Garbled, expected))
        }
    }
}

fn is_noscript(error: &RedisError) -> bool {
    error.kind() == redis::ErrorKind::Server(ServerErrorKind::NoScript)
}
