//! Records decided by a set of rules.

use std::collections::HashMap;
use std::fmt;

use tollgate::rules::RuleSet;
use tollgate::{Error, Limiter, OwnedRequest, Request, Rule};

use crate::attributes::{self, Pairs};
use crate::records::Record;
use crate::verdict::{Call, Plan};

/// A set, or one rule of it for all records.
pub(crate) struct ByRules<'s> {
    pub(super) rules: &'s RuleSet,
    pub(super) only: Option<&'s str>,
    /// Attributes for records that lack them.
    pub(super) given: Pairs,
    /// Changes a rule as the options ask.
    pub(super) adapted: Box<dyn Fn(Rule) -> Rule + Send + Sync + 's>,
    /// The charged keys, to be removed; `None` if they are removed automatically.
    pub(super) touched: Option<HashMap<Vec<u8>, (Rule, OwnedRequest)>>,
}

impl fmt::Debug for ByRules<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ByRules").field("only", &self.only).finish_non_exhaustive()
    }
}

impl<'s> ByRules<'s> {
    /// Adds the attributes that all records have.
    pub(super) fn completed(&self, mut record: Record) -> Record {
        let has = |name: &String| record.attributes.iter().any(|(own, _)| own == name);
        let more: Vec<_> = self.given.iter().filter(|(name, _)| !has(name)).cloned().collect();
        record.attributes.extend(more);
        record
    }

    /// The calls for this record: of the rule that applies, then of each shadow rule.
    pub(super) fn plan(&mut self, limiter: &Limiter, record: &Record) -> Result<Vec<Plan<'s>>, Error> {
        let request = attributes::read(&record.attributes);
        if self.rules.reads_two_ways(&request) {
            return Ok(vec![Plan::refused()]);
        }
        let (applies, shadows) = match self.only {
            // The name was checked before.
            Some(name) => (self.rules.by_name(name, &request)?, Vec::new()),
            None => (None, self.rules.shadows(&request)),
        };
        let applies = match applies {
            Some(applies) => applies,
            None => self.rules.applies(&request)?,
        };
        let plans: Vec<_> =
            std::iter::once(applies).chain(shadows).map(|applies| Plan::of(applies, &*self.adapted, record)).collect();
        if let Some(touched) = &mut self.touched {
            for Call { rule, request, id, .. } in plans.iter().filter_map(|plan| plan.call.as_ref()) {
                // A rule that can't decide charges nothing.
                let Ok(keys) = limiter.keys(rule, request) else { continue };
                let mut key = keys.join("\n").into_bytes();
                key.extend_from_slice(b"\n");
                key.extend_from_slice(record.id.as_deref().unwrap_or_default());
                // Each call that ends later has an id of its own.
                if id.is_some() {
                    key.extend_from_slice(record.line.to_string().as_bytes());
                }
                touched.entry(key).or_insert_with(|| (rule.clone(), request.clone()));
            }
        }
        Ok(plans)
    }

    /// Removes the charged keys.
    pub(super) async fn forget_keys(&self, limiter: &Limiter) -> Result<(), Error> {
        for (rule, request) in self.touched.iter().flat_map(HashMap::values) {
            limiter.reset(rule, Request::from(request)).await?;
        }
        Ok(())
    }
}
