//! A connection of the tool's own to one node, beside those that decide.

use std::time::Duration;

use tokio::sync::mpsc::UnboundedSender;
use tollgate::redis::aio::{ConnectionLike, MultiplexedConnection};
use tollgate::redis::{AsyncConnectionConfig, Client, Pipeline, PushInfo, RedisError, Value};

use crate::refusal;

#[derive(Debug)]
pub(super) struct Connection {
    inner: MultiplexedConnection,
    deadline: Duration,
}

/// Why there is no reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The server refused the command; the connection is still usable.
    Refused(String),
    /// The connection is lost or not answering.
    Lost(String),
}

impl Connection {
    pub(super) async fn open(
        client: &Client,
        deadline: Duration,
        pushes: Option<UnboundedSender<PushInfo>>,
    ) -> Result<Self, Failure> {
        let mut patient = AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
        if let Some(pushes) = pushes {
            patient = patient.set_push_sender(pushes);
        }
        let connecting = client.get_multiplexed_async_connection_with_config(&patient);
        let connection = tokio::time::timeout(deadline, connecting).await;
        let connection = connection.map_err(|_| Failure::late(deadline))?;
        match connection {
            Ok(inner) => Ok(Self { inner, deadline }),
            Err(error) => Err(Failure::Lost(refusal::explained(client, &error, told).await)),
        }
    }

    /// The reply to each command; a refused one doesn't stop the others.
    pub(super) async fn all(&mut self, pipeline: &Pipeline) -> Result<Vec<Result<Value, Failure>>, Failure> {
        self.all_after(pipeline, Duration::ZERO).await
    }

    /// The same for commands for which the server waits this long.
    pub(super) async fn all_after(
        &mut self,
        pipeline: &Pipeline,
        wait: Duration,
    ) -> Result<Vec<Result<Value, Failure>>, Failure> {
        let count = pipeline.len();
        let replies = self.inner.req_packed_commands(pipeline, 0, count);
        let replies = tokio::time::timeout(self.deadline + wait, replies).await;
        let replies = replies.map_err(|_| Failure::late(self.deadline))?;
        let replies = replies.map_err(|error| Failure::Lost(told(&error)))?;
        let refused = |error: RedisError| Failure::Refused(told(&error));
        Ok(replies.into_iter().map(|value| value.extract_error().map_err(refused)).collect())
    }
}

impl Failure {
    fn late(deadline: Duration) -> Self {
        Self::Lost(format!("no answer within {deadline:?}"))
    }

    pub(super) fn why(&self) -> &str {
        match self {
            Self::Refused(why) | Self::Lost(why) => why,
        }
    }

    /// Whether the node has given the key's slot to another, or is about to.
    pub(super) fn is_of_slot(&self) -> bool {
        ["MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN"].iter().any(|code| self.why().starts_with(code))
    }
}

/// The server's error on one line.
fn told(error: &RedisError) -> String {
    let text = match (error.code(), error.detail()) {
        (Some(code), Some(detail)) => format!("{code} {detail}"),
        _ => error.to_string(),
    };
    text.replace(char::is_control, " ").trim_end_matches('.').to_owned()
}
