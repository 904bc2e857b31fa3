//! A limit as a rule has it: what it counts by, what it takes, and how its keys end.

use std::sync::Arc;

use crate::limit::Limit;
use crate::quota::Quota;

/// One limit of a rule, and what it counts by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ScopedLimit {
    /// Shared by the rules of a set that have the same.
    pub(crate) limit: Arc<Limit>,
    /// The part of a request that it counts by; its key if none.
    pub(crate) by: Option<String>,
    /// `<rule>/<limit>`, the end of each key; without the rule's name, `/<limit>`.
    pub(crate) suffix: String,
    pub(crate) quota: Arc<Quota>,
    pub(super) cost: Option<OwnCost>,
    /// Whether it counts its rule's own key: among rules that apply together, that may be a part of the request.
    pub(crate) counts_key: bool,
    /// The place of its rule among those that apply together.
    pub(super) rule_at: usize,
}

/// What a limit takes in place of the rule's and the request's cost.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum OwnCost {
    Units(u64),
    /// What requests give by this name, which several limits may share.
    #[allow(dead_code, reason = "written in files, which are a feature")]
    Named(Arc<str>),
}

/// What a call takes from: the whole limit or, on a cluster, one of its shards.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target<'r> {
    pub(crate) scoped: &'r ScopedLimit,
    /// The whole limit, or the shard's part of it.
    pub(crate) limit: &'r Limit,
    pub(crate) shard: Option<u32>,
}

impl ScopedLimit {
    pub(super) fn new(rule: &str, limit: Arc<Limit>, by: Option<String>, cost: Option<OwnCost>) -> Self {
        let suffix = format!("{rule}/{}", limit.end_of_key());
        let quota = Arc::new(Quota::of(rule, &limit));
        let counts_key = by.is_none();
        Self { limit, by, suffix, quota, cost, counts_key, rule_at: 0 }
    }

    pub(crate) fn has_own_cost(&self) -> bool {
        self.cost.is_some()
    }

    /// What it takes whatever the request's cost is.
    pub(crate) fn own_cost(&self) -> Option<u64> {
        match self.cost {
            Some(OwnCost::Units(units)) => Some(units),
            Some(OwnCost::Named(_)) | None => None,
        }
    }

    /// Whether requests give its cost by this name.
    pub(crate) fn costs_by(&self, name: &str) -> bool {
        *name == **self.quota.title() || matches!(&self.cost, Some(OwnCost::Named(own)) if **own == *name)
    }

    /// The whole limit.
    pub(crate) fn whole(&self) -> Target<'_> {
        Target { scoped: self, limit: &self.limit, shard: None }
    }

    /// The shard of this number; the whole limit if it has none.
    pub(crate) fn shard(&self, number: u32) -> Target<'_> {
        match self.limit.shard_limits() {
            Some(parts) => Target { scoped: self, limit: parts.shard(number), shard: Some(number) },
            None => self.whole(),
        }
    }
}

/// Why the limit (with shards, its smallest one) could never admit this cost, debt included; none if it could.
pub(crate) fn never_admitted(limit: &Limit, cost: u64) -> Option<String> {
    let most = limit.smallest_shard().largest_cost(true);
    let what = if limit.shards() > 1 { "the smallest share of" } else { "the most that can ever be admitted by" };
    (cost > most).then(|| format!("expected at most {most}, {what} {limit}, got {cost}"))
}
