//! What recorded requests hold until they end, if the records say when: permits, and units that their response gives
//! back.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::time::{Duration, UNIX_EPOCH};

use tollgate::rules::Charge;
use tollgate::{Error, Limiter, Operation, OwnedRequest, Request, Rule};

use crate::messages;
use crate::operation;
use crate::output::{counted, micros};
use crate::records::{Permits, Record};

/// Requests in progress, and counts of those whose end or status the records lack.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// By the time of the next renewal or release, then by the order in which they were taken.
    due: BinaryHeap<Reverse<(u64, u64)>>,
    holders: HashMap<u64, Holder>,
    taken: u64,
    /// Permits given back at once, since their duration isn't known.
    unknown: u64,
    /// Permits that later records have to give back, and whether any did.
    left: u64,
    any_given_back: bool,
    /// Requests that stay charged although their rule counts by status, since their status isn't known.
    without_status: u64,
}

/// What a response does to the units that its request took.
#[derive(Clone, Debug)]
pub(crate) enum ByResponse {
    /// They stay charged, whatever the status.
    Stays,
    /// A rule doesn't count this status: the request for what remains charged in the end.
    GivenBack(Box<OwnedRequest>),
    /// The rule counts by status, and the record has none.
    Unknown,
}

#[derive(Debug)]
struct Holder {
    rule: Rule,
    request: OwnedRequest,
    ends_us: u64,
    /// A service renews its permits for as long as a request takes.
    renewed_every_us: u64,
    /// The request for what remains charged in the end, if that differs.
    settled: Option<Box<OwnedRequest>>,
}

impl ByResponse {
    /// For this request, which is charged.
    pub(crate) fn of(charge: &Charge<'_>, request: Request<'_>, record: &Record) -> Self {
        match record.status {
            _ if !charge.counts_by_response() => Self::Stays,
            None => Self::Unknown,
            Some(status) => match charge.after_response(request, status) {
                None => Self::Stays,
                Some(settled) => Self::GivenBack(Box::new(settled)),
            },
        }
    }
}

/// Whether requests hold permits of this rule.
pub(crate) fn holds(rule: &Rule) -> bool {
    rule.limits().any(|limit| limit.algorithm().holds())
}

impl Held {
    /// Whether any request is in progress.
    pub(crate) fn are_any(&self) -> bool {
        !self.holders.is_empty()
    }

    /// Does the renewals and releases that are due by now.
    pub(crate) async fn until(&mut self, limiter: &Limiter, now_us: u64) -> Result<(), Error> {
        while let Some(&Reverse((at, place))) = self.due.peek().filter(|Reverse((at, _))| *at <= now_us) {
            self.due.pop();
            let Some(holder) = self.holders.remove(&place) else { continue };
            let request = Request::from(&holder.request).at(UNIX_EPOCH + Duration::from_micros(at));
            if at >= holder.ends_us {
                if let Some(settled) = &holder.settled {
                    let settled = Request::from(&**settled).at(UNIX_EPOCH + Duration::from_micros(at));
                    match limiter.settle(&holder.rule, settled).await {
                        // A recorded operation has ended it.
                        Err(error) if error.is_unknown_id() => {}
                        settled => _ = settled?,
                    }
                }
                if holds(&holder.rule) {
                    limiter.release(&holder.rule, request).await?;
                }
                continue;
            }
            match limiter.renew(&holder.rule, request).await {
                // A recorded operation has ended it.
                Err(error) if error.is_unknown_id() => continue,
                renewed => renewed?,
            };
            self.hold(at, place, holder);
        }
        Ok(())
    }

    /// Notes what this record took or gave back by this rule.
    pub(crate) async fn note(
        &mut self,
        limiter: &Limiter,
        (rule, request, counted): (&Rule, &OwnedRequest, &ByResponse),
        record: &Record,
        allowed: bool,
    ) -> Result<(), Error> {
        self.any_given_back |= record.op == Operation::Release;
        if !allowed || !operation::takes(record.op) {
            return Ok(());
        }
        let has_permits = holds(rule);
        let settled = match counted {
            ByResponse::GivenBack(settled) => Some(settled.clone()),
            _ => None,
        };
        self.without_status += u64::from(matches!(counted, ByResponse::Unknown));
        if !has_permits && settled.is_none() {
            return Ok(());
        }
        let ends_us = match record.permits {
            Permits::Until(ends_us) => ends_us,
            Permits::Unknown | Permits::ByRecords if !has_permits => record.t_us,
            Permits::Unknown => {
                self.unknown += 1;
                record.t_us
            }
            Permits::ByRecords => {
                self.left += 1;
                self.without_status += u64::from(settled.is_some());
                return Ok(());
            }
        };
        // A permit isn't held for longer than its rule allows.
        let longest = rule.holds_for().map_or(u64::MAX, |time| record.t_us.saturating_add(micros(time)));
        let ends_us = ends_us.min(longest);
        let ttl = rule.limits().filter(|limit| limit.algorithm().holds()).map(|limit| micros(limit.period())).min();
        let renewed_every_us = ttl.map_or(u64::MAX, |ttl| (ttl / 3).max(1));
        let place = self.taken;
        self.taken += 1;
        self.hold(
            record.t_us,
            place,
            Holder { rule: rule.clone(), request: request.clone(), ends_us, renewed_every_us, settled },
        );
        self.until(limiter, record.t_us).await
    }

    fn hold(&mut self, now_us: u64, place: u64, holder: Holder) {
        let next = now_us.saturating_add(holder.renewed_every_us).min(holder.ends_us);
        self.due.push(Reverse((next, place)));
        self.holders.insert(place, holder);
    }

    /// How many permits weren't held as long as in reality.
    pub(crate) fn not_replayed(&self) -> u64 {
        self.unknown + if self.any_given_back { 0 } else { self.left }
    }

    /// Reports what could not be replayed.
    pub(crate) fn sum_up(&self) {
        if self.without_status > 0 {
            messages::note(format!(
                "the rules' count can't be replayed: {} without a status (in --fields, status=FIELD) stay charged, \
                 whatever their response was",
                counted(self.without_status, "request")
            ));
        }
        if self.unknown > 0 {
            let were = if self.unknown == 1 { "was" } else { "were" };
            messages::note(format!(
                "permits can't be replayed: {} taken by records that don't say how long a request took (request_time) \
                 {were} released at once, so concurrency is not limited",
                counted(self.unknown, "permit")
            ));
        }
        if self.left > 0 && !self.any_given_back {
            messages::note(format!(
                "permits can't be replayed: {} ended by the ttl alone, since no record gives one back (op release) or \
                 says how long a request took (request_time); denials by concurrency mean little",
                counted(self.left, "permit")
            ));
        }
    }
}
