//! Random sets of rules, of which several apply to a request, against counts of one's own.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use proptest::prelude::*;
use tollgate::rules::{Attributes, RuleSet};
use tollgate::{Clock, Embedded, Limiter};

use super::continuing::left;
use super::decisions::verdict;

/// A rule of the random sets.
#[derive(Clone, Debug)]
struct Drawn {
    most: u64,
    cost: u64,
    key: usize,
    second: Option<(u64, usize)>,
    needs: Option<usize>,
    continues: bool,
    action: u8,
}

fn drawn() -> impl Strategy<Value = Drawn> {
    let second = proptest::option::weighted(0.4, (1..9_u64, 0..4_usize));
    let needs = proptest::option::weighted(0.5, 0..3_usize);
    (1..9_u64, 0..3_u64, 0..4_usize, second, needs, proptest::bool::weighted(0.75), 0..12_u8).prop_map(
        |(most, cost, key, second, needs, continues, action)| {
            let cost = cost.min(most).min(second.map_or(u64::MAX, |(most, _)| most));
            Drawn { most, cost, key, second, needs, continues: continues && action > 1, action }
        },
    )
}

const KEYS: [&str; 4] = ["a0", "a1", "a2", "global"];

impl Drawn {
    fn text(&self, at: usize) -> String {
        let Self { most, cost, key, second, needs, continues, action } = self;
        let needs = needs.map(|needs| format!("match = {{ a{needs} = \"1\" }}\n")).unwrap_or_default();
        let text = format!("[[rule]]\nname = \"r{at}\"\npriority = {}\n{needs}", -i64::try_from(at).expect("few"));
        match action {
            0 => format!("{text}action = \"block\"\n"),
            1 => format!("{text}action = \"allow\"\n"),
            _ => {
                let second = second.map_or(String::new(), |(most, key)| {
                    format!(
                        ", {{ name = \"second\", limit = \"fixed-window {most}/1h start first-hit\", key = {:?} }}",
                        KEYS[key]
                    )
                });
                format!(
                    "{text}key = {:?}\ncost = {cost}\nlimits = [\"fixed-window {most}/1h start first-hit\"{second}]\n\
                     continue = {continues}\n",
                    KEYS[*key]
                )
            }
        }
    }

    /// The limits: their most units, and the attributes that they count by.
    fn limits(&self) -> Vec<(u64, usize)> {
        [(self.most, self.key)].into_iter().chain(self.second).collect()
    }
}

/// What the rules make of a request: whether it is allowed, by which rule, and what each limit has left.
fn expected(
    rules: &[Drawn],
    values: [usize; 3],
    used: &mut BTreeMap<(usize, usize, usize), u64>,
) -> (bool, Option<usize>, Vec<u64>) {
    let value = |key: usize| values.get(key).copied().unwrap_or_default();
    let mut applying = Vec::new();
    for (at, rule) in rules.iter().enumerate().filter(|(_, rule)| rule.needs.is_none_or(|needs| value(needs) == 1)) {
        applying.push(at);
        if !rule.continues {
            break;
        }
    }
    if let Some(blocks) = applying.iter().find(|at| rules[**at].action == 0) {
        return (false, Some(*blocks), Vec::new());
    }
    let counted: Vec<_> = applying
        .iter()
        .filter(|at| rules[**at].action > 1)
        .flat_map(|at| {
            rules[*at].limits().into_iter().enumerate().map(|(nth, (most, key))| (*at, nth, most, value(key)))
        })
        .collect();
    let has = |at: usize, nth: usize, value: usize| used.get(&(at, nth, value)).copied().unwrap_or_default();
    let denies = counted
        .iter()
        .find(|(at, nth, most, value)| rules[*at].cost > 0 && has(*at, *nth, *value) + rules[*at].cost > *most);
    let denied_by = denies.map(|(at, ..)| *at);
    let rule = denied_by.or(counted.first().map(|(at, ..)| *at)).or(applying.first().copied());
    for (at, nth, _, value) in counted.iter().filter(|_| denied_by.is_none()) {
        *used.entry((*at, *nth, *value)).or_default() += rules[*at].cost;
    }
    let has = |at: usize, nth: usize, value: usize| used.get(&(at, nth, value)).copied().unwrap_or_default();
    let left = counted.iter().map(|(at, nth, most, value)| most - has(*at, *nth, *value)).collect();
    (denied_by.is_none(), rule, left)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    /// Against counts of one's own: of all rules that apply, all limits are charged or none.
    #[test]
    fn random_sets_decide_as_a_model_of_all_or_nothing(
        rules in proptest::collection::vec(drawn(), 1..=10),
        requests in proptest::collection::vec([0..2_usize, 0..2, 0..2], 1..60),
    ) {
        let text: String = rules.iter().enumerate().map(|(at, rule)| rule.text(at)).collect();
        let set = match text.parse::<RuleSet>() {
            Ok(set) => set,
            // A rule that can't apply to any request.
            Err(error) if error.to_string().contains("never applies") => return Ok(()),
            Err(error) => panic!("{error}\n{text}"),
        };
        let clock = Clock::new(SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000));
        let limiter = Limiter::new(Embedded::with_clock(clock));
        let mut used = BTreeMap::new();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        for values in requests {
            let texts = values.map(|value| value.to_string());
            let request = (0..3).fold(Attributes::new(), |request, at| request.set(["a0", "a1", "a2"][at], &texts[at]));
            let got = runtime.block_on(verdict(&limiter, &set, &request));
            let (allowed, rule, remaining) = expected(&rules, values, &mut used);
            let rule = rule.map(|at| format!("r{at}"));
            prop_assert_eq!((got.allowed, got.rule.as_deref()), (allowed, rule.as_deref()), "{}", text);
            let limits: Vec<_> = left(&got).into_iter().map(|(_, left)| left).collect();
            prop_assert_eq!(limits, remaining, "{}", text);
        }
    }
}
