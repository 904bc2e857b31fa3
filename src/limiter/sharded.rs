//! Shards: on a cluster, a limit that has them is decided by its parts, each with a key of its own. Where one server
//! has all keys, it is decided as if it had no shards.
//!
//! A call takes from one shard, as if that were the limit, drawn at random. What must be found again is placed in a
//! shard by its id.

use futures_util::future::join_all;

use super::call::Call;
use super::handle::Limiter;
use super::prepare::{Targets, concerned};
use super::several_slots::of_all;
use crate::decision::Decision;
use crate::error::Error;
use crate::key;
use crate::operation::Operation;
use crate::random::random;
use crate::request::Request;
use crate::rule::{Rule, ScopedLimit, Target};

impl Limiter {
    /// The rule's limit, if it is decided by its shards: where one node has all keys, nothing is gained by splitting
    /// one. Such a limit is the only one of its rule.
    pub(super) fn sharded<'r>(&self, rule: &'r Rule) -> Option<&'r ScopedLimit> {
        rule.sharded().filter(|_| self.engine.is_cluster())
    }

    /// All that calls of this rule may take from.
    pub(super) fn targets<'r>(&self, rule: &'r Rule) -> impl Iterator<Item = Target<'r>> {
        let splits = self.engine.is_cluster();
        rule.scoped_limits().iter().flat_map(move |scoped| {
            let count = if splits { scoped.limit.shards() } else { 1 };
            (0..count).map(move |number| if splits { scoped.shard(number) } else { scoped.whole() })
        })
    }

    /// The shard that decides this acquire, if it is decided by one: drawn at random unless the request has an id.
    pub(super) fn shard_of_acquire(&self, rule: &Rule, request: &Request<'_>) -> Option<u32> {
        self.sharded(rule).and_then(|scoped| shard_for(Call::acquire(rule, request), scoped))
    }

    /// The limits that decide an acquire, or this shard of the only one.
    pub(super) fn targets_of_acquire<'r>(&self, rule: &'r Rule, shard: Option<u32>) -> Targets<'r> {
        match shard {
            Some(number) => rule.scoped_limits().iter().map(|scoped| scoped.shard(number)).collect(),
            None => rule.scoped_limits().iter().map(ScopedLimit::whole).collect(),
        }
    }

    /// Decides by the limit's shards.
    pub(super) async fn decide_by_shards(&self, call: Call<'_>, scoped: &ScopedLimit) -> Result<Decision, Error> {
        // Calls that don't apply, such as a renewal of what isn't held, are rejected as usual.
        concerned(call.rule, call.request, call.operation)?;
        if let Some(number) = shard_for(call, scoped) {
            return self.decide_by_limits(call, &[scoped.shard(number)]).await;
        }
        let targets: Vec<_> = self.targets(call.rule).collect();
        let each = targets.chunks(1).map(|target| self.decide_by_limits(call, target));
        let most_used =
            of_all(join_all(each).await)?.into_iter().min_by_key(|answer| (answer.remaining, answer.capacity));
        most_used.ok_or_else(super::decide::garbled)
    }
}

/// The shard that decides such a call; none if it applies to all.
pub(super) fn shard_for(call: Call<'_>, scoped: &ScopedLimit) -> Option<u32> {
    let Call { rule, request, operation } = call;
    let (cost, shards) = (request.units(rule).most(), scoped.limit.shards());
    let never = match operation {
        Operation::Acquire | Operation::Peek | Operation::Reserve => {
            cost > scoped.limit.smallest_shard().largest_cost(operation == Operation::Reserve)
        }
        _ => false,
    };
    match (operation, request.plain().id) {
        (Operation::Reset | Operation::Block, _) => None,
        // A larger shard might admit it: the answer must not depend on chance.
        _ if never => Some(shards - 1),
        (_, Some(id)) => Some(key::shard_of(id, shards)),
        _ => Some(below(random() >> 32, shards)),
    }
}

/// A 32-bit number, reduced to below the bound.
fn below(drawn: u64, bound: u32) -> u32 {
    u32::try_from((drawn * u64::from(bound)) >> 32).unwrap_or(0)
}
