//! The rule that applies is the one that looking at each would find.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;
use tollgate::rules::{Action, Attributes, Definition, Missing, OneOrMore, RuleSet};
use tollgate_testing::effort::cases;

use super::applies;

#[derive(Clone, Debug)]
struct Sample {
    path: Option<String>,
    ip: Option<IpAddr>,
    method: Option<&'static str>,
    own: BTreeMap<&'static str, &'static str>,
}

fn path() -> impl Strategy<Value = String> {
    vec(select(vec!["a", "b", "c"]), 0..=4).prop_map(|segments| format!("/{}", segments.join("/")))
}

fn pattern() -> impl Strategy<Value = String> {
    vec(select(vec!["a", "b", "*", "*"]), 0..=4).prop_map(|segments| format!("/{}", segments.join("/")))
}

fn address() -> impl Strategy<Value = IpAddr> {
    let few = prop_oneof![Just(0_u32), Just(1), Just(2), any::<u32>()];
    (few, any::<bool>()).prop_map(|(bits, v6)| match v6 {
        false => IpAddr::from((0x0a00_0000 | (bits & 0x00ff_ffff)).to_be_bytes()),
        true => IpAddr::from((0x2001_0db8_u128 << 96 | u128::from(bits)).to_be_bytes()),
    })
}

fn network() -> impl Strategy<Value = String> {
    (address(), prop_oneof![3 => 0_u8..=128, 1 => Just(0)]).prop_map(|(address, length)| {
        let (bits, width) = bits(address);
        let length = length.min(width);
        let kept = bits & mask(length, width);
        match width {
            32 => format!("{}/{length}", IpAddr::from(u32::try_from(kept).expect("32 bits").to_be_bytes())),
            _ => format!("{}/{length}", IpAddr::from(kept.to_be_bytes())),
        }
    })
}

fn bits(address: IpAddr) -> (u128, u8) {
    match address {
        IpAddr::V4(address) => (u128::from(u32::from(address)), 32),
        IpAddr::V6(address) => (u128::from(address), 128),
    }
}

fn mask(length: u8, width: u8) -> u128 {
    let all = if width == 128 { u128::MAX } else { (1 << width) - 1 };
    all & !all.checked_shr(length.into()).unwrap_or_default()
}

/// These, or any.
fn or_any(values: impl Strategy<Value = OneOrMore>) -> impl Strategy<Value = OneOrMore> {
    prop_oneof![9 => values, 1 => Just("*".into())]
}

fn one_or_more(values: impl Strategy<Value = String>) -> impl Strategy<Value = OneOrMore> {
    vec(values, 1..=2).prop_map(OneOrMore)
}

fn own() -> impl Strategy<Value = String> {
    select(vec!["x", "y", "*"]).prop_map(str::to_owned)
}

fn method() -> impl Strategy<Value = &'static str> {
    select(vec!["GET", "post", "HEAD", "OTHER", "PROPFIND", "purge"])
}

prop_compose! {
    fn definition()(
        path in option::of(or_any(one_or_more(pattern()))),
        ip in option::weighted(0.3, or_any(one_or_more(network()))),
        method in option::weighted(0.3, or_any(one_or_more(method().prop_map(str::to_owned)))),
        own in btree_map(select(vec!["tier", "org"]), own(), 0..=2),
        priority in -1_i64..=1,
        shadow in prop::bool::weighted(0.15),
        skips in prop::bool::weighted(0.2),
    ) -> Definition {
        let mut rule = Definition::new("r");
        let mut add = |name: &str, values: Option<OneOrMore>| {
            rule.conditions.extend(values.map(|values| (name.to_owned(), values)));
        };
        add("path", path);
        add("ip", ip);
        add("method", method);
        for (name, value) in own {
            add(name, Some([value].into()));
        }
        rule.priority = priority;
        rule.shadow = shadow.then_some(true);
        if skips {
            rule.missing = Some(Missing::Skip);
            rule.key = ["org"].into();
            rule.limits = vec!["gcra 1/1s".into()];
        } else {
            rule.action = Action::Block;
        }
        rule
    }
}

prop_compose! {
    fn sample()(
        path in option::weighted(0.9, path()),
        ip in option::of(address()),
        method in option::of(select(vec!["GET", "POST", "HEAD", "PUT", "PROPFIND", "PURGE"])),
        own in btree_map(select(vec!["tier", "org"]), select(vec!["x", "y", "z"]), 0..=2),
    ) -> Sample {
        Sample { path, ip, method, own }
    }
}

impl Sample {
    fn attributes(&self) -> Attributes<'_> {
        let mut request = Attributes::new();
        if let Some(path) = &self.path {
            request = request.path(path);
        }
        if let Some(address) = self.ip {
            request = request.ip(address);
        }
        if let Some(method) = self.method {
            request = request.method(method);
        }
        self.own.iter().fold(request, |request, (name, value)| request.set(name, *value))
    }
}

/// What the documentation says, word for word, of one rule.
fn holds(rule: &Definition, request: &Sample) -> bool {
    let has = rule.conditions.iter().all(|(name, OneOrMore(values))| {
        let one = |value: &String| match name.as_str() {
            "path" if value == "*" => request.path.is_some(),
            "ip" if value == "*" => request.ip.is_some(),
            "method" if value == "*" => request.method.is_some(),
            "path" => request.path.as_ref().is_some_and(|path| path_matches(value, path)),
            "ip" => request.ip.is_some_and(|address| {
                let (network, length) = value.split_once('/').expect("a network");
                let ((kept, width), (bits, of)) = (bits(network.parse().expect("an address")), bits(address));
                width == of && bits & mask(length.parse().expect("a length"), width) == kept
            }),
            "method" => request.method.is_some_and(|method| {
                let is_another = ["PROPFIND", "PURGE"].contains(&method);
                *method == value.to_uppercase()
                    || (value == "GET" && method == "HEAD")
                    || (value == "OTHER" && is_another)
            }),
            name => request.own.get(name).is_some_and(|own| own == value || value == "*"),
        };
        values.iter().any(one)
    });
    has && (rule.missing.is_none() || request.own.contains_key("org"))
}

fn path_matches(pattern: &str, path: &str) -> bool {
    fn rest(pattern: &[&str], path: &[&str]) -> bool {
        match (pattern, path) {
            (["*"], _) => true,
            ([], []) => true,
            (["*", pattern @ ..], [_, path @ ..]) => rest(pattern, path),
            ([own, pattern @ ..], [other, path @ ..]) => own == other && rest(pattern, path),
            _ => false,
        }
    }
    let split = |text| str::split(text, '/').filter(|segment| !segment.is_empty()).collect::<Vec<_>>();
    rest(&split(pattern), &split(path))
}

/// In the order in which they apply.
fn ordered(rules: &[Definition]) -> Vec<&Definition> {
    let mut rules: Vec<_> = rules.iter().collect();
    rules.sort_by_key(|rule| -rule.priority);
    rules
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(300), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_rule_that_applies_is_the_first_that_holds(
        mut rules in vec(definition(), 0..=12),
        samples in vec(sample(), 1..=20),
    ) {
        for (at, rule) in rules.iter_mut().enumerate() {
            rule.name = format!("r{at}");
        }
        // What is refused since it can never apply must never have applied.
        let read = match RuleSet::new(rules.clone()) {
            Ok(read) => read,
            Err(error) => {
                let hidden: BTreeSet<_> = error.faults().iter().map(|fault| {
                    let message = fault.message();
                    assert!(message.contains("never applies"), "{message}");
                    message.split(['e', ':']).nth(1).expect("rule rN: ...").trim().to_owned()
                }).collect();
                RuleSet::new(rules.iter().filter(|rule| !hidden.contains(&rule.name)).cloned()).expect("the others")
            }
        };
        for sample in &samples {
            let expected = ordered(&rules).into_iter().filter(|rule| rule.shadow != Some(true)).find(|rule| holds(rule, sample));
            prop_assert_eq!(applies(&read, &sample.attributes()), expected.map(|rule| rule.name.clone()), "{:?}", sample);
            // Each that comes before has its reason.
            let names: Vec<_> = read.definitions().to_vec();
            let before = ordered(&names).into_iter().take_while(|rule| Some(&rule.name) != expected.map(|rule| &rule.name));
            let passed = read.passed_over(&sample.attributes());
            prop_assert_eq!(
                passed.iter().map(|passed| passed.rule.to_string()).collect::<Vec<_>>(),
                before.map(|rule| rule.name.clone()).collect::<Vec<_>>()
            );
            for passed in passed {
                let rule = rules.iter().find(|rule| rule.name == *passed.rule).expect("its rule");
                prop_assert_eq!(passed.why.contains("a shadow rule"), holds(rule, sample), "{}", passed.why);
            }
        }
    }
}
