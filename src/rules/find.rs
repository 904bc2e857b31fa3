//! Finds the rules that apply to a request, and rules that never can.

use smallvec::SmallVec;

use super::attributes::Attributes;
use super::index::Lookup;
use super::{Shadow, Shared};

/// The places of rules, in their order.
pub(super) type Places = SmallVec<[u32; 4]>;

impl Shared {
    /// The rules that apply, and the shadow rules before the last of them.
    pub(super) fn find(&self, request: &Attributes<'_>) -> (Places, Places) {
        let mut found = None;
        let (mut applying, mut shadows) = (Places::new(), Places::new());
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
                } else if check.continues {
                    applying.push(place);
                } else {
                    found = Some(place);
                    break;
                }
            }
        }
        for passed in [&mut applying, &mut shadows] {
            passed.retain(|place| found.is_none_or(|found| *place < found));
            passed.sort_unstable();
            passed.dedup();
        }
        applying.extend(found);
        (applying, shadows)
    }

    /// How many rules come before the last one that applies; all, if that lets others apply too.
    pub(super) fn looked_at(&self, applying: &Places) -> usize {
        let ends = applying.last().filter(|place| !self.checks[**place as usize].continues);
        ends.map_or(self.rules.len(), |place| *place as usize)
    }

    pub(super) fn shadows<'s>(&'s self, places: Places, request: &Attributes<'_>) -> impl Iterator<Item = Shadow<'s>> {
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
