//! Records decided by a set of rules.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;

use tollgate::rules::{Applies, RuleSet};
use tollgate::{Error, Limiter, OwnedRequest, Request, Rule};

use crate::attributes::{self, Pairs};
use crate::held::{self, Held};
use crate::records::Record;
use crate::verdict::Judged;

/// A set, or one rule of it for all records.
pub(super) struct ByRules<'s> {
    pub(super) rules: &'s RuleSet,
    pub(super) only: Option<&'s str>,
    /// Attributes of records that don't have their own.
    pub(super) given: Pairs,
    /// Changes a rule as the options ask.
    pub(super) adapted: Box<dyn Fn(Rule) -> Rule + Sync + 's>,
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
    pub(super) fn completed<'r>(&self, record: &'r Record) -> Cow<'r, Record> {
        let has = |name: &String| record.attributes.iter().any(|(own, _)| own == name);
        let more: Vec<_> = self.given.iter().filter(|(name, _)| !has(name)).cloned().collect();
        if more.is_empty() {
            return Cow::Borrowed(record);
        }
        let mut record = record.clone();
        record.attributes.extend(more);
        Cow::Owned(record)
    }

    /// The verdict, and those of shadow rules.
    pub(super) async fn play(
        &mut self,
        limiter: &Limiter,
        record: &Record,
        held: &mut Held,
    ) -> Result<(Judged<'s>, Vec<Judged<'s>>), Error> {
        let request = attributes::read(&record.attributes);
        if self.rules.reads_two_ways(&request) {
            return Ok((Judged::refused(record), Vec::new()));
        }
        let (applies, shadows): (Applies<'s>, Vec<_>) = match self.only {
            // The name was checked before.
            Some(name) => match self.rules.by_name(name, &request)? {
                Some(applies) => (applies, Vec::new()),
                None => (self.rules.applies(&request)?, Vec::new()),
            },
            None => (self.rules.applies(&request)?, self.rules.shadows(&request)),
        };
        let mut shadowed = Vec::with_capacity(shadows.len());
        for shadow in shadows {
            // A shadow rule that can't decide has no consequence.
            if let Ok(judged) = Judged::of(shadow, limiter, &*self.adapted, record).await {
                judged.hold(held, limiter, record).await?;
                shadowed.push(judged);
            }
        }
        let judged = Judged::of(applies, limiter, &*self.adapted, record).await?;
        judged.hold(held, limiter, record).await?;
        if let Some(touched) = &mut self.touched {
            for (rule, request) in shadowed.iter().chain([&judged]).filter_map(Judged::charged) {
                let mut key = limiter.keys(rule, request)?.join("\n").into_bytes();
                key.extend_from_slice(b"\n");
                key.extend_from_slice(record.id.as_deref().unwrap_or_default());
                // Each call that holds permits has its own id.
                if held::holds(rule) {
                    key.extend_from_slice(record.line.to_string().as_bytes());
                }
                touched.entry(key).or_insert_with(|| (rule.clone(), request.clone()));
            }
        }
        Ok((judged, shadowed))
    }

    /// Removes the charged keys.
    pub(super) async fn forget_keys(&self, limiter: &Limiter) -> Result<(), Error> {
        for (rule, request) in self.touched.iter().flat_map(HashMap::values) {
            limiter.reset(rule, Request::from(request)).await?;
        }
        Ok(())
    }
}
