//! How calls are sent over the connection: as commands, alone or in a pipeline.

use redis::{Cmd, RedisError, Value};

use super::confirm::{Confirm, WAIT_CHECK};
use super::connection::Connection;
use super::errors::from_answer;
use super::texts::Eval;
use crate::batch::ScriptCall;
use crate::error::Error;

/// Whether a call is sent after ASKING, which lets it use a slot that is moving to this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum Asking {
    No,
    Yes,
}

impl Confirm {
    fn command(self) -> Cmd {
        // 0 would mean no limit.
        let ms = u64::try_from(self.within.as_millis()).unwrap_or(u64::MAX).clamp(1, 1 << 31);
        let mut command = redis::cmd("WAIT");
        command.arg(self.replicas).arg(ms);
        command
    }

    /// The error if too few replicas confirmed, by WAIT's answer.
    fn lacking(self, answer: Option<Value>) -> Option<Error> {
        let replicas = self.replicas;
        match answer.unwrap_or(Value::Nil).extract_error() {
            Ok(Value::Int(had)) if had >= i64::from(replicas) => None,
            Ok(Value::Int(had)) => {
                Some(Error::unconfirmed(&format!("too few replicas confirmed it in time: {had} of {replicas}")))
            }
            Ok(_) => Some(Error::unconfirmed("the answer to WAIT can't be read")),
            Err(error) => {
                let refused = from_answer(&error);
                Some(match refused.goes_to_policy() {
                    true => Error::unconfirmed(&format!("WAIT failed: {error}")),
                    // The permission to WAIT must be fixed by an operator.
                    false => refused.after_charging(),
                })
            }
        }
    }
}

/// The answers to commands that were sent together, and the error if too few replicas confirmed what they wrote.
pub(super) type Answers = (Vec<Result<Value, RedisError>>, Option<Error>);

/// Sends all of these in one pipeline, each after an ASKING of its own if needed: it applies to one command.
pub(super) async fn send(
    connection: &Connection,
    commands: Vec<Cmd>,
    asking: Asking,
    confirm: Option<Confirm>,
) -> Answers {
    let count = commands.len();
    if let ([only], Asking::No, None) = (commands.as_slice(), asking, confirm) {
        return (vec![connection.command(only).await], None);
    }
    let each = if asking == Asking::Yes { 2 } else { 1 };
    let all = each * count + usize::from(confirm.is_some());
    let mut pipeline = redis::Pipeline::with_capacity(all);
    for command in commands {
        if asking == Asking::Yes {
            pipeline.cmd("ASKING");
        }
        pipeline.add_command(command);
    }
    if let Some(confirm) = confirm {
        pipeline.add_command(confirm.command());
        connection.may_wait(confirm.within.saturating_add(WAIT_CHECK));
    }
    match connection.pipeline(&pipeline, all).await {
        Ok(mut values) => {
            values.resize(all, Value::Nil);
            let lacking = confirm.and_then(|confirm| confirm.lacking(values.pop()));
            let mut answers: Vec<_> = values.into_iter().map(Value::extract_error).collect();
            if asking == Asking::Yes {
                // If ASKING is refused, its own error says why.
                let pairs = answers.chunks_exact_mut(2).map(|pair| {
                    let [first, own] = pair else { unreachable!("chunks of two") };
                    let own = std::mem::replace(own, Ok(Value::Nil));
                    own.map_err(|error| std::mem::replace(first, Ok(Value::Nil)).err().unwrap_or(error))
                });
                answers = pairs.collect();
            }
            (answers, lacking)
        }
        Err(error) => ((0..count).map(|_| Err(error.clone())).collect(), None),
    }
}

pub(super) fn command(call: ScriptCall<'_>, eval: Eval) -> Cmd {
    let (script, keys) = (call.script(), call.key_count());
    let (verb, script) = match (eval, call.mode().reads_only()) {
        (Eval::ByDigest, false) => ("EVALSHA", script.digest()),
        (Eval::ByDigest, true) => ("EVALSHA_RO", script.digest()),
        (Eval::ByText, false) => ("EVAL", script.text()),
        (Eval::ByText, true) => ("EVAL_RO", script.text()),
    };
    // With room for the keys and the arguments.
    let bytes = script.len() + call.keys().map(<[u8]>::len).sum::<usize>() + 32 * keys + 112;
    let mut command = Cmd::with_capacity(keys + 8, bytes);
    command.arg(verb).arg(script);
    // Keys of several slots are arguments, after their count.
    if call.is_across_slots() {
        command.arg(0);
    }
    command.arg(keys);
    call.keys().for_each(|key| _ = command.arg(key));
    call.each_argument(|argument| _ = command.arg(argument));
    command
}
