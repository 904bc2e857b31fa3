//! Asks the engine, and again after a refusal that charged nothing: of a call whose calendar windows don't contain the
//! server's time, or that shared a script call with a key that its user may not use.

use super::handle::Limiter;
use crate::batch::AskApart;
use crate::call::{Ask, Reply};
use crate::engine::deadline::Deadline;
use crate::error::Error;

impl Limiter {
    /// Asks for what `ask` makes, for the windows around the server's time if that is given.
    pub(super) async fn ask<'r>(
        &self,
        ask: impl Fn(Option<u64>) -> Result<Ask<'r>, Error>,
        until: Deadline,
    ) -> Result<Reply, Error> {
        match self.engine.ask(&ask(None)?, until).await {
            // Boxed, since it is rare, and there may be thousands of calls.
            Err(refused) if Self::is_asked_again_after(&refused) => Box::pin(self.ask_again(ask, refused, until)).await,
            answer => answer,
        }
    }

    /// Asks again for what was refused with this error, at most once for each reason.
    pub(super) async fn ask_again<'r>(
        &self,
        ask: impl Fn(Option<u64>) -> Result<Ask<'r>, Error>,
        mut refused: Error,
        until: Deadline,
    ) -> Result<Reply, Error> {
        let (mut server_us, mut apart) = (None, false);
        while Self::is_asked_again_after(&refused) {
            until.check()?;
            match refused.stale_at() {
                Some(_) if server_us.is_some() => break,
                Some(now_us) => {
                    self.server_clock.heard(now_us);
                    server_us = Some(now_us);
                }
                None if apart => break,
                None => apart = true,
            }
            let ask = ask(server_us)?;
            let asked =
                if apart { self.engine.ask_by_itself(&ask, until).await } else { self.engine.ask(&ask, until).await };
            match asked {
                Err(error) => refused = error,
                answer => return answer,
            }
        }
        Err(refused)
    }

    /// Whether a call that was refused with this error is [asked for again](Self::ask_again).
    pub(super) fn is_asked_again_after(error: &Error) -> bool {
        error.stale_at().is_some() || error.note::<AskApart>().is_some()
    }
}
