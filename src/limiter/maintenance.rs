//! Maintenance of a rule's keys: inspecting them, and forgetting all of them.

use std::time::Duration;

use futures_util::future::try_join_all;

use super::handle::Limiter;
use crate::call::Mode;
use crate::decision::{Decision, LimitDecision};
use crate::denial_cache::DenialCache;
use crate::engine::deadline::Deadline;
use crate::engine::{Swept, Which};
use crate::error::{Error, Kind};
use crate::key;
use crate::request::Request;
use crate::rule::Rule;

/// A key's state: what it means and what it consists of.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyState {
    /// The key in Redis.
    pub key: String,
    /// The decision that a peek would have made.
    pub decision: Decision,
    /// Whether there is any state; if not, the key is as if never used.
    pub exists: bool,
    /// How long until Redis forgets it; none if it never expires, or if there is no state.
    pub expires_after: Option<Duration>,
    /// The script's own numbers, by the names that the header of its file in `lua/` gives them, with their units.
    pub fields: Vec<(&'static str, i64)>,
}

/// How far [`Limiter::reset_all`] has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ResetProgress {
    /// Keys in the database at the start, of all rules and programs.
    pub keys: u64,
    /// Roughly how many keys have been scanned.
    pub looked_at: u64,
    /// How many keys belonged to the rule and have been forgotten.
    pub forgotten: u64,
}

impl Limiter {
    /// Forgets every key and every id of the rule with this name, by scanning in small steps; `progress` is called
    /// after each. Returns how many keys were forgotten. Keys written meanwhile may stay.
    ///
    /// Costs two round trips per 500 keys of the whole database. On Redis it needs `SCAN`, `UNLINK` and `DBSIZE`, which
    /// decisions don't.
    ///
    /// # Errors
    ///
    /// A name that no rule can have. No answer; see [`Error`]. What was forgotten by then stays forgotten.
    pub async fn reset_all(&self, rule: &str, mut progress: impl FnMut(ResetProgress)) -> Result<u64, Error> {
        key::checked_name(rule).map_err(|error| Error::new(Kind::Input, error.to_string()))?;
        let prefix = &*self.prefix;
        let glob = key::glob_of_rule(prefix, rule);
        let which =
            Which { glob: &glob, exactly: |which, key| key::is_of_rule(key, which.prefix, which.rule), prefix, rule };
        let keyspaces = self.engine.keyspaces(self.deadline).await?;
        let sizes = keyspaces.iter().map(|keyspace| keyspace.size(self.deadline));
        let sizes = try_join_all(sizes).await?;
        let mut so_far = ResetProgress { keys: sizes.iter().sum(), looked_at: 0, forgotten: 0 };
        let mut before = 0;
        for (keyspace, size) in keyspaces.iter().zip(sizes) {
            let mut from = 0;
            loop {
                tokio::task::consume_budget().await;
                let changing = self.denials.as_ref().map(DenialCache::changing_any);
                let Swept { next, looked_at, removed } = keyspace.sweep(from, &which, self.deadline).await?;
                if let Some(changing) = changing {
                    changing.done();
                }
                so_far.looked_at =
                    before + if next == 0 { size } else { (so_far.looked_at - before + looked_at).min(size) };
                so_far.forgotten += removed;
                progress(so_far);
                if next == 0 {
                    break;
                }
                from = next;
            }
            before += size;
        }
        Ok(so_far.forgotten)
    }

    /// The Redis keys of the rule's limits, in their order; on a cluster, one for each shard of a limit. Sends nothing.
    ///
    /// # Errors
    ///
    /// A rule without a name, or one that needs a [secret](crate::LimiterBuilder::key_secret) when none is set. An
    /// empty key. A request without a part that the rule counts.
    ///
    /// ```
    /// # #[cfg(feature = "embedded")]
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use tollgate::{Embedded, Limiter, Rule};
    ///
    /// let limiter = Limiter::new(Embedded::new());
    /// let rule = Rule::new("api", "token-bucket 10/1s, fixed-window 250/1d")?;
    /// let expected = ["tollgate:{user:42}:api/token-bucket-1s", "tollgate:{user:42}:api/fixed-window-1d"];
    /// assert_eq!(limiter.keys(&rule, "user:42")?, expected);
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "embedded"))]
    /// # fn main() {}
    /// ```
    pub fn keys<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Vec<String>, Error> {
        let request = request.into();
        let key = |target| self.state_key(rule, target, request.plain());
        self.targets(rule).map(|target| key(target).map(|key| String::from_utf8_lossy(&key).into_owned())).collect()
    }

    /// The state of each of the rule's limits, in their order; on a cluster, of each shard of a limit. One round trip
    /// each.
    ///
    /// # Errors
    ///
    /// No answer; see [`Error`].
    pub async fn inspect<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Vec<KeyState>, Error> {
        let request = request.into();
        let mut states = Vec::new();
        for target in self.targets(rule) {
            let until = Deadline::after(request.deadline_or(self.deadline));
            let ask = |server_us| self.ask_for(rule, &[target], &request, Mode::Inspect, server_us);
            let reply = self.ask(ask, until).await?;
            let names = target.limit.algorithm().state_fields();
            let (by, at) = (self.engine.by(), self.decided_at(request.plain(), &reply));
            let garbled = || {
                Error::new(
                    Kind::Garbled,
                    "the script's reply can't be used: expected the limit's state after the decision",
                )
            };
            let ([ttl_ms, fields @ ..], [limit]) = (reply.state.as_slice(), reply.limits.as_slice()) else {
                return Err(garbled());
            };
            let (quota, capacity) = (&target.scoped.quota, target.limit.capacity());
            let limit = LimitDecision::new(quota, capacity, limit, 0, rule.counts_overage());
            let limit = limit.filter(|_| fields.len() == names.len()).ok_or_else(garbled)?;
            let (key, decision) = (self.state_key(rule, target, request.plain())?, Decision::of_one(limit, by, at));
            states.push(KeyState {
                key: String::from_utf8_lossy(&key).into_owned(),
                decision,
                exists: *ttl_ms != -2,
                expires_after: u64::try_from(*ttl_ms).ok().map(Duration::from_millis),
                fields: names.iter().copied().zip(fields.iter().copied()).collect(),
            });
        }
        Ok(states)
    }
}
