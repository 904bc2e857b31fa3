//! Removes keys in small steps, using SCAN and UNLINK.

use std::time::Duration;

use super::Redis;
use super::errors::from_answer;
use super::pipeline::Asking;
use super::redirect::Redirect;
use crate::engine::{Swept, Which};
use crate::error::Error;

impl Redis {
    pub(crate) async fn size(&self, deadline: Duration) -> Result<u64, Error> {
        let (size,) = self.ask(redis::pipe().cmd("DBSIZE"), deadline).await?;
        Ok(size)
    }

    /// Takes two round trips, and scans one step's keys, so that no other client is held up.
    pub(crate) async fn sweep(&self, from: u64, which: &Which<'_>, deadline: Duration) -> Result<Swept, Error> {
        const STEP: u64 = 500;
        let mut scan = redis::pipe();
        scan.cmd("SCAN").arg(from).arg("MATCH").arg(which.glob).arg("COUNT").arg(STEP);
        let ((next, keys),): ((u64, Vec<Vec<u8>>),) = self.ask(&scan, deadline).await?;
        let keys: Vec<_> = keys.into_iter().filter(|key| (which.exactly)(which, key)).collect();
        let (mut removed, elsewhere) = self.remove(Asking::No, keys, deadline).await?;
        if !elsewhere.is_empty() {
            // Keys that are moving to this node. Any others have left it.
            removed += self.remove(Asking::Yes, elsewhere, deadline).await?.0;
        }
        Ok(Swept { next, looked_at: STEP, removed })
    }

    /// How many of these keys it removed, and those that another node has. One key per command, since a cluster's node
    /// rejects an UNLINK across slots.
    async fn remove(
        &self,
        asking: Asking,
        keys: Vec<Vec<u8>>,
        deadline: Duration,
    ) -> Result<(u64, Vec<Vec<u8>>), Error> {
        let each = if asking == Asking::Yes { 2 } else { 1 };
        let mut commands = redis::Pipeline::with_capacity(each * keys.len());
        for key in &keys {
            if asking == Asking::Yes {
                commands.cmd("ASKING");
            }
            commands.cmd("UNLINK").arg(key);
        }
        let answers = match self.ask_each(&commands, deadline).await {
            Err(error) if Redirect::of(&error).is_some() => return Ok((0, keys)),
            answers => answers?.into_iter().skip(each - 1).step_by(each),
        };
        let (mut removed, mut elsewhere) = (0, Vec::new());
        for (answer, key) in answers.zip(keys) {
            match answer {
                Ok(value) => removed += redis::from_redis_value::<u64>(value).unwrap_or_default(),
                Err(error) if error.redirect_node().is_some() => elsewhere.push(key),
                Err(error) => return Err(from_answer(&error)),
            }
        }
        Ok((removed, elsewhere))
    }
}
