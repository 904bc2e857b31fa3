//! limitador: limits as its documentation has them, and a model of what it says of them.

use fastrand::Rng;
use tollgate_testing::effort::cases;

use super::*;

const LIMITS: &str = r#"---
# Of one test namespace.
- namespace: test_namespace
  max_value: 10
  seconds: 60
  name: "reads"
  conditions:
    - "descriptors[0]['req.method'] == 'GET'"
    - "descriptors[0]['req.path'] != '/json'"
  variables: []
-
  namespace: test_namespace
  max_value: 5
  seconds: 60
  conditions:
    - "req_method == 'POST'"
  variables:
    - user_id
- namespace: test_namespace
  max_value: 1000
  seconds: 1
  policy: unsafe
  conditions:
    - "descriptors[0]['req.path'].startsWith('/x')"
"#;

#[test]
fn limits_are_rules_and_what_is_no_rule_is_told_by_its_lines() {
    let imported = import("limitador", LIMITS);
    let why = "descriptors[0]['req.path'].startsWith('/x'): expected comparisons with == or !=, joined by &&, so the \
               limit is left out";
    let field = "policy: not a field of a limit";
    assert_eq!(imported.warnings, [format!("-:22: warning: {field}"), format!("-:24: warning: {why}")]);
    assert_eq!(list(&imported.rules, "What differs"), [format!("line 22: {field}"), format!("line 24: {why}")]);
    let part = "is part of a limit that is left out, see above";
    let left =
        [format!("lines 19 to 21: {part}"), format!("line 22: {field}; {part}"), format!("lines 23 to 24: {part}")];
    assert_eq!(list(&imported.rules, "What isn't translated"), left);
    let mut service = Service::new(&imported.rules);
    let read = |path: &str| request([("domain", "test_namespace"), ("method", "GET"), ("path", path)]);
    assert_eq!(["/a", "/b", "/json"].map(|path| service.allowed_of(8, &read(path))), [8, 2, 8]);
    let post = |user: &str| request([("domain", "test_namespace"), ("req_method", "POST"), ("user_id", user)]);
    assert_eq!(["1", "2"].map(|user| service.allowed_of(8, &post(user))), [5, 5]);
    // A minute from the first one, not of the clock.
    let now_ms = service.now_ms;
    assert!(!service.allows(now_ms + 59_999, &post("1")));
    assert!(service.allows(now_ms + 60_000, &post("1")));
    assert_eq!(service.allowed_of(8, &request([("domain", "test_namespace"), ("req_method", "POST")])), 8);
    assert_eq!(service.allowed_of(8, &request([("domain", "other"), ("req_method", "POST"), ("user_id", "3")])), 8);
}

#[test]
fn conditions_that_no_rule_has_leave_a_limit_out() {
    let text = |conditions: &str| {
        format!(
            "- {{namespace: n, max_value: 1, seconds: 1, conditions: [{conditions}]}}\n- {{namespace: n, max_value: 1, seconds: 1}}\n"
        )
    };
    for (conditions, why) in [
        ("\"a != 'x'\", \"b != 'y'\"", "only one variable can have !="),
        ("\"a == 'x'\", \"a == 'y'\"", "a == 'y': never holds together with the other conditions"),
        ("\"a == '*'\"", "a == '*': no condition can express this value"),
        ("\"a == ''\"", "a == '': no condition can express this value"),
        ("\"descriptors[1].a == 'x'\"", "descriptors[1].a == 'x': expected comparisons with == or !=, joined by &&"),
    ] {
        let imported = import("limitador", &text(conditions));
        assert_eq!(imported.warnings, [format!("-:1: warning: {why}, so the limit is left out")], "{conditions}");
        assert_eq!(imported.rules.matches("[[rule]]").count(), 1, "{conditions}");
    }
}

#[derive(Debug)]
struct Limit {
    namespace: &'static str,
    max_value: u64,
    seconds: u64,
    /// A variable, whether it must be equal, and to what.
    conditions: Vec<(&'static str, bool, &'static str)>,
    variables: Vec<&'static str>,
}

const NAMES: [&str; 3] = ["a", "b.c", "d_e"];
const VALUES: [&str; 3] = ["x", "y y", "z|z"];

impl Limit {
    fn random(random: &mut Rng) -> Self {
        let conditions =
            (0..random.usize(..3)).map(|_| (NAMES[random.usize(..3)], random.u8(..3) > 0, VALUES[random.usize(..3)]));
        let conditions = conditions.collect();
        let variables = NAMES.into_iter().filter(|_| random.u8(..3) == 0).collect();
        let seconds = [1, 7, 60, 90][random.usize(..4)];
        let namespace = ["n", "m"][usize::from(random.u8(..4) == 0)];
        Self { namespace, max_value: random.u64(..6), seconds, conditions, variables }
    }

    fn write(&self, random: &mut Rng) -> String {
        let named = |name: &str, random: &mut Rng| match random.u8(..3) {
            0 => format!("descriptors[0]['{name}']"),
            1 => format!("descriptors[0].{name}"),
            _ => name.to_owned(),
        };
        let mut text =
            format!("- namespace: {}\n  max_value: {}\n  seconds: {}\n", self.namespace, self.max_value, self.seconds);
        text.push_str("  conditions:\n");
        for (name, is_equal, value) in &self.conditions {
            let sign = if *is_equal { "==" } else { "!=" };
            text.push_str(&format!("    - \"{} {sign} '{value}'\"\n", named(name, random)));
        }
        text.push_str("  variables:\n");
        self.variables.iter().for_each(|name| text.push_str(&format!("    - {}\n", named(name, random))));
        text
    }

    fn applies(&self, pairs: &Pairs) -> bool {
        let holds = |(name, is_equal, value): &(&str, bool, &str)| {
            pairs.get(name).is_some_and(|got| (got == value) == *is_equal)
        };
        pairs["domain"] == self.namespace
            && self.conditions.iter().all(holds)
            && self.variables.iter().all(|name| pairs.contains_key(name))
    }
}

/// Counters by limit and variables: when a window began, and what it counts.
#[derive(Default)]
struct Model(BTreeMap<(usize, Vec<String>), (u64, u64)>);

impl Model {
    fn allows(&mut self, limits: &[Limit], now_ms: u64, pairs: &Pairs) -> bool {
        let applying = limits.iter().enumerate().filter(|(_, limit)| limit.applies(pairs));
        let counters: Vec<_> = applying
            .map(|(at, limit)| {
                let counter = (at, limit.variables.iter().map(|name| pairs[name].clone()).collect::<Vec<_>>());
                let known = self.0.get(&counter).filter(|(since, _)| now_ms < since + limit.seconds * 1000);
                let (since, count) = known.copied().unwrap_or((now_ms, 0));
                (counter, (since, count + 1), limit.max_value)
            })
            .collect();
        let fits = counters.iter().all(|(_, (_, count), max)| count <= max);
        if fits {
            counters.into_iter().for_each(|(counter, state, _)| _ = self.0.insert(counter, state));
        }
        fits
    }
}

#[test]
fn random_limits_decide_as_the_model_does() {
    let mut random = Rng::with_seed(12);
    let (mut exact, mut verdicts) = (0, [0, 0]);
    let all = cases(60);
    for _ in 0..all {
        // One that is a rule in any case: no limit at all is an error.
        let all_of_n =
            Limit { namespace: "n", max_value: 40, seconds: 90, conditions: Vec::new(), variables: Vec::new() };
        let limits: Vec<_> = (0..random.usize(1..5)).map(|_| Limit::random(&mut random)).chain([all_of_n]).collect();
        let text: String = limits.iter().map(|limit| limit.write(&mut random)).collect();
        let imported = import("limitador", &text);
        if !imported.warnings.is_empty() {
            continue;
        }
        exact += 1;
        let rules = imported.rules;
        let (mut model, mut service, mut now_ms) = (Model::default(), Service::new(&rules), START_MS);
        for _ in 0..150 {
            now_ms += [0, 0, 1, 400, 1000, 11_000][random.usize(..6)];
            let mut pairs = request([("domain", ["n", "m"][random.usize(..2)])]);
            for name in NAMES {
                if random.u8(..5) > 0 {
                    pairs.insert(name, VALUES[random.usize(..3)].to_owned());
                }
            }
            let expected = model.allows(&limits, now_ms, &pairs);
            let got = service.allows(now_ms, &pairs);
            assert_eq!(got, expected, "{pairs:?} at {now_ms}\n{text}\n{rules}");
            verdicts[usize::from(got)] += 1;
        }
    }
    println!("{exact} of {all} configurations without a warning: {verdicts:?}");
    assert!(exact > all / 2 && verdicts.iter().all(|count| *count > 1000), "{exact} {verdicts:?}");
}
