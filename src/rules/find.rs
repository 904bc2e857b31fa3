//! Finds the rule that applies to a request, and rules that never can.

use smallvec::SmallVec;

use super::attributes::Attributes;
use super::index::Lookup;
use super::{Shadow, Shared};

impl Shared {
    /// The index of the rule that applies, and the shadow rules before it.
    pub(super) fn find(&self, request: &Attributes<'_>) -> (Option<u32>, SmallVec<[u32; 4]>) {
        let mut found = None;
        let mut shadows: SmallVec<[u32; 4]> = SmallVec::new();
        for list in self.index.lists(&Lookup::of_request(request)) {
            for &place in list {
                if found.is_some_and(|found| place >= found) {
                    break;
                }
                let check = self.checks[place as usize];
                if check.more && !self.rules[place as usize].applies(request, check.found_by) {
                    continue;
                }
                if check.shadow {
                    shadows.push(place);
                } else {
                    found = Some(place);
                    break;
                }
            }
        }
        shadows.retain(|place| found.is_none_or(|found| *place < found));
        shadows.sort_unstable();
        shadows.dedup();
        (found, shadows)
    }

    pub(super) fn shadows<'s>(
        &'s self,
        places: SmallVec<[u32; 4]>,
        request: &Attributes<'_>,
    ) -> impl Iterator<Item = Shadow<'s>> {
        places.into_iter().map(move |place| {
            let rule = &self.rules[place as usize];
            (&rule.name, rule.effect(request))
        })
    }

    /// The name of a rule before this one that leaves it nothing to apply to.
    pub(super) fn hidden_by(&self, place: usize) -> Option<&str> {
        let rule = &self.rules[place];
        let mut first = place;
        for list in self.index.lists(&Lookup::of_rule(&rule.conditions)) {
            let end = first;
            let mut before = list.iter().map(|other| *other as usize).take_while(|other| *other < end);
            let hides = |other: &usize| self.checks[*other].hides && rule.is_hidden_by(&self.rules[*other]);
            first = before.find(hides).unwrap_or(first);
        }
        (first < place).then(|| &*self.rules[first].name)
    }
}
