//! Commands that decide nothing, in one pipeline.

use std::time::Duration;

use redis::{FromRedisValue, Pipeline, RedisError, Value};

use super::Redis;
use super::connection::Connection;
use super::errors::from_answer;
use crate::engine::deadline::Deadline;
use crate::error::{Error, Kind};
use crate::runtime;

impl Redis {
    /// All answers, or the first that is an error.
    pub(crate) async fn ask<T: FromRedisValue>(&self, commands: &Pipeline, deadline: Duration) -> Result<T, Error> {
        let answers = self.ask_each(commands, deadline).await?.into_iter().collect::<Result<_, _>>();
        let answers = answers.and_then(|all| Ok(redis::from_redis_value(Value::Array(all))?));
        answers.map_err(|error| from_answer(&error))
    }

    pub(super) async fn ask_each(
        &self,
        commands: &Pipeline,
        deadline: Duration,
    ) -> Result<Vec<Result<Value, RedisError>>, Error> {
        if commands.is_empty() {
            return Ok(Vec::new());
        }
        if commands.is_transaction() {
            // Its answers are more than its commands: those beyond would be taken for the answers of other calls.
            let message = "query: an atomic pipeline can't be sent: put its commands in a script";
            return Err(Error::new(Kind::Input, message));
        }
        let per_runtime = &self.per_runtime()?;
        let _entry = per_runtime.breaker.enter()?;
        let mut sent = false;
        let answer = runtime::timeout_at(Deadline::after(deadline).at, async {
            let connection = self.connection(per_runtime).await?;
            sent = true;
            let answers = if per_runtime.breaker.is_troubled() {
                let commands = commands.clone();
                let send = |connection| async move { (send(&connection, &commands).await, None) };
                per_runtime.send_in_task(&connection, 1, send).await.0
            } else {
                send(&connection, commands).await
            };
            let answers = match answers.first() {
                Some(Err(error)) if answers.iter().all(Result::is_err) => {
                    Err(per_runtime.interpret(error, None, connection.number))
                }
                _ => Ok(answers),
            };
            per_runtime.report_outcome(answers.as_ref().err());
            answers
        });
        answer.await.unwrap_or_else(|| Err(Error::deadline(deadline, sent)))
    }
}

/// All answers; the error alone if there are none.
async fn send(connection: &Connection, commands: &Pipeline) -> Vec<Result<Value, RedisError>> {
    match connection.pipeline(commands, commands.len()).await {
        Ok(answers) => answers.into_iter().map(Value::extract_error).collect(),
        Err(error) => vec![Err(error)],
    }
}
