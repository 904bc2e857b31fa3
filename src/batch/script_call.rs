//! A call of a script, as it is sent, and how its answer is read.

use std::sync::Arc;

use super::records::{Answered, MOST_COUNT, Record, Records, unexpected};
use super::{Group, Words, records};
use crate::call::{Mode, Receipt, Terms, packed_cost};
use crate::error::Error;
use crate::script::Script;
use crate::wall_clock;

/// A call of a script, as it is sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScriptCall<'a> {
    pub(super) script: &'static Script,
    pub(super) numbers: &'a Arc<[u8]>,
    pub(super) terms: &'a Terms,
    pub(super) limits: usize,
    pub(super) now_us: Option<u64>,
    pub(super) groups: &'a [Group],
    pub(super) words: &'a Words,
    /// Whether its keys are of several partitions.
    pub(super) across_partitions: bool,
    pub(super) repeats: bool,
    pub(super) is_alone: bool,
}

impl<'a> ScriptCall<'a> {
    pub(crate) fn script(self) -> &'static Script {
        if self.across_partitions { self.script.across_slots() } else { self.script }
    }

    /// Whether its keys are in several slots of a cluster, and so passed as arguments, after their count.
    pub(crate) fn is_across_slots(self) -> bool {
        self.across_partitions
    }

    /// Whether it is sent by itself, for one ask.
    pub(crate) fn is_alone(self) -> bool {
        self.is_alone
    }

    pub(crate) fn mode(self) -> Mode {
        self.terms.mode
    }

    /// Whether it may take units.
    pub(crate) fn takes(self) -> bool {
        self.asked().any(|group| self.takes_for(group))
    }

    fn takes_for(self, group: &Group) -> bool {
        self.terms.mode.takes() && group.costs.most() > 0
    }

    /// The groups with asks that are sent.
    fn asked(self) -> impl Iterator<Item = &'a Group> + Clone {
        self.groups.iter().filter(|group| group.asks > 0)
    }

    /// KEYS in order.
    pub(crate) fn keys(self) -> impl Iterator<Item = &'a [u8]> {
        self.asked().flat_map(|group| group.keys()).map(move |word| self.words.get(word))
    }

    pub(crate) fn key_count(self) -> usize {
        self.asked().map(|group| group.keys().len()).sum()
    }

    /// Hands over ARGV in order: the shape, with the first cost; `now`, if it is given or another argument follows; the
    /// number and the costs of each group, if they differ or a key occurs twice; and holders.
    pub(crate) fn each_argument(self, mut give: impl FnMut(&[u8])) {
        let first = self.asked().next().map_or(0, |group| group.costs.of(0));
        let alike = |group: &Group| group.asks == 1 && group.costs.of_all() == Some(first) && !group.has_holder;
        let are_alike = !self.repeats && self.groups.iter().all(alike);
        let mut shape = self.numbers.to_vec();
        self.terms.pack(first, &mut shape);
        give(&shape);
        match self.now_us {
            Some(now_us) => give(now_us.to_string().as_bytes()),
            None if !are_alike => give(b"-1"),
            None => {}
        }
        if !are_alike {
            let mut each = Vec::with_capacity(10 * self.groups.len());
            for Group { asks, costs, .. } in self.asked() {
                each.extend_from_slice(&asks.to_le_bytes()[..3]);
                each.extend(costs.each(self.limits).flat_map(packed_cost));
            }
            give(&each);
            let holders = self.asked().filter(|group| group.has_holder);
            holders.for_each(|group| give(self.words.get(group.words.end - 1)));
        }
    }

    /// Reads the script's records, given the error if too few replicas confirmed what was taken.
    pub(crate) fn read(self, answer: &[u8], lacking: Option<Error>) -> Result<Records, Error> {
        let width = Record::WIDTHS[usize::from(self.terms.are_long())];
        let asked = self.asked().count();
        let receipt_width = self.terms.receipt_width(self.limits);
        let (all, receipts) = answer
            .split_at_checked(asked * self.limits * width)
            .filter(|(_, receipts)| receipts.len() == asked * receipt_width)
            .ok_or_else(unexpected)?;
        let mut each = all.chunks_exact(width).map(Record::read);
        let mut records = Vec::with_capacity(self.groups.len() * self.limits);
        let is_only = asked == 1;
        for group in self.groups {
            let from = records.len();
            for _ in 0..self.limits {
                let record = if group.asks > 0 { each.next() } else { Some(Record::default()) };
                records.push(record.filter(|record| self.may_answer(group, is_only, record)).ok_or_else(unexpected)?);
            }
            if !Record::agree(&records[from..]) {
                return Err(unexpected());
            }
        }
        let mut answered = self.answered(records, Vec::new(), lacking);
        if receipt_width > 0 {
            let mut receipts = receipts.chunks_exact(receipt_width);
            let of_group = |group: &Group| if group.asks > 0 { receipts.next() } else { None };
            answered.receipts =
                self.groups.iter().map(of_group).map(|bytes| Receipt(bytes.unwrap_or_default().into())).collect();
        }
        Ok(answered)
    }

    /// Reads the reply of an inspection: the decision's five integers, and what is appended.
    pub(crate) fn read_state(self, integers: &[i64]) -> Result<Records, Error> {
        let [allowed @ 0..=1, 0..=MOST_COUNT, remaining, retry_after_us, reset_after_us, .., blocked_us, overage] =
            *integers
        else {
            return Err(unexpected());
        };
        let record = Record {
            allowed: if blocked_us > 0 { -1 } else { allowed },
            remaining,
            retry_after_us,
            reset_after_us,
            granted: Some(0),
            overage,
        };
        Ok(self.answered(vec![record], integers[5..].to_vec(), None))
    }

    /// Whether the script can answer this for the group. For a group that is alone, it returns an error instead of a
    /// record that says why nothing was decided.
    fn may_answer(self, group: &Group, is_only: bool, record: &Record) -> bool {
        let allowed = record.allowed;
        let waits = allowed == i64::from(group.asks) && record.retry_after_us != 0;
        record.is_in_range()
            && !(waits && self.terms.mode.is_at_once())
            && match allowed {
                records::FAILED => self.across_partitions,
                ..records::BLOCKED if is_only => false,
                records::STALE => self.script.takes_windows(),
                records::UNKNOWN_ID => self.terms.id_ttl_ms.is_some() || group.has_holder,
                records::OTHER_ID => self.terms.id_ttl_ms.is_some(),
                _ => (records::UNREADABLE..=i64::from(group.asks)).contains(&allowed),
            }
    }

    fn answered(self, records: Vec<Record>, state: Vec<i64>, lacking: Option<Error>) -> Records {
        let answered = |group: &Group| Answered { asks: group.asks, takes: self.takes_for(group) };
        Records {
            records,
            groups: self.groups.iter().map(answered).collect(),
            limits: self.limits,
            script: self.script.name(),
            is_done_anyway: self.terms.mode.is_done_anyway(),
            state,
            receipts: Vec::new(),
            at: wall_clock::now(),
            lacking,
        }
    }
}
