//! Envoy's rate limit service: the examples of its README, and a model of what it documents.

use fastrand::Rng;
use tollgate_testing::effort::cases;

use super::*;

const TWO_RULES: &str = "\
domain: messaging
descriptors:
  - key: message_type
    value: marketing
    descriptors:
      - key: to_number
        rate_limit:
          unit: day
          requests_per_unit: 5
  - key: to_number
    rate_limit:
      unit: day
      requests_per_unit: 100
";

#[test]
fn both_rules_limit_a_marketing_message_and_one_any_other() {
    let directory = directory();
    let rules = file(&directory, "rules.toml", &import_exactly("envoy", TWO_RULES));
    let message = |attrs: Value| json!({"t_us": START_MS * 1000, "attrs": attrs}).to_string() + "\n";
    let marketing = message(json!({"domain": "messaging", "message_type": "marketing", "to_number": "2061111111"}));
    let other = message(json!({"domain": "messaging", "message_type": "news", "to_number": "2061111111"}));
    let log = file(&directory, "log.jsonl", &[marketing.repeat(8), other.repeat(100)].concat());
    let output = tollgate(&["replay", "--rules", &rules, "--format", "jsonl", &log]);
    let allowed: Vec<_> = lines(&output).iter().map(|line| line["allowed"] == true).collect();
    let count = |all: &[bool]| all.iter().filter(|allowed| **allowed).count();
    // Of a hundred to one number, five are of marketing.
    assert_eq!((count(&allowed[..8]), count(&allowed[8..])), (5, 95));
    let first = &lines(&output)[0];
    assert_eq!(first["together"], json!(["message_type_marketing.to_number", "to_number"]));
}

#[test]
fn values_are_matched_before_keys_and_zero_denies_all() {
    let rules = import_exactly(
        "envoy",
        "domain: edge_proxy_per_ip\ndescriptors:\n  - key: remote_address\n    rate_limit:\n      unit: second\n      \
         requests_per_unit: 10\n  - key: remote_address\n    value: 50.0.0.5\n    rate_limit:\n      unit: second\n      \
         requests_per_unit: 0\n",
    );
    let mut service = Service::new(&rules);
    let from = |address: &str| request([("domain", "edge_proxy_per_ip"), ("ip", address)]);
    assert_eq!(service.allowed_of(15, &from("50.0.0.1")), 10);
    assert_eq!(service.allowed_of(15, &from("50.0.0.2")), 10);
    assert_eq!(service.allowed_of(15, &from("50.0.0.5")), 0);
    // An address counts by itself, as it does there.
    assert_eq!(service.allowed_of(15, &from("2001:db8::1")), 10);
    assert_eq!(service.allowed_of(15, &from("2001:db8::2")), 10);
}

#[test]
fn unlimited_shadows_and_metrics_deny_nothing() {
    let rules = import_exactly(
        "envoy",
        "domain: d\ndescriptors:\n  - key: ldap\n    rate_limit:\n      unlimited: true\n  - key: azure\n    rate_limit:\n\
         \x20     unit: minute\n      requests_per_unit: 100\n  - key: service\n    descriptors:\n      - key: user\n        \
         value: user-a\n        rate_limit:\n          requests_per_unit: 10\n          unit: second\n        \
         shadow_mode: true\n      - key: user\n        value: user-b\n        rate_limit:\n          \
         requests_per_unit: 20\n          unit: second\n  - key: key1\n    detailed_metric: true\n    rate_limit:\n      \
         unit: minute\n      requests_per_unit: 10\n  - key: key1\n    value: value1\n    rate_limit:\n      unit: minute\n\
         \x20     requests_per_unit: 20\n",
    );
    let mut service = Service::new(&rules);
    assert_eq!(service.allowed_of(300, &request([("domain", "d"), ("ldap", "x")])), 300);
    assert_eq!(service.allowed_of(300, &request([("domain", "d"), ("azure", "x")])), 100);
    let user = |user: &str| request([("domain", "d"), ("service", "auth"), ("user", user)]);
    assert_eq!(service.allowed_of(30, &user("user-a")), 30);
    assert_eq!(service.allowed_of(30, &user("user-b")), 20);
    assert_eq!(service.allowed_of(30, &user("user-c")), 30);
    let key1 = |value: &str| request([("domain", "d"), ("key1", value)]);
    let counts = ["other", "another", "value1"].map(|value| service.allowed_of(30, &key1(value)));
    assert_eq!(counts, [10, 10, 20]);
    assert!(rules.contains("# ldap is unlimited (lines 3 to 5).\n"), "{rules}");
    assert_eq!(list(&rules, "What isn't translated"), ["line 24: is about metrics, and rules have their own"]);
}

#[test]
fn a_limit_that_replaces_another_is_the_only_one_that_counts() {
    let rules = import_exactly(
        "envoy",
        "domain: example7\ndescriptors:\n  - key: key_1\n    value: value_1\n    descriptors:\n      - key: user\n        \
         value: bkthomps\n        rate_limit:\n          name: specific_limit\n          requests_per_unit: 5\n          \
         unit: second\n  - key: key_2\n    value: value_2\n    descriptors:\n      - key: user\n        value: bkthomps\n\
         \x20       rate_limit:\n          replaces:\n            - name: specific_limit\n          requests_per_unit: 10\n\
         \x20         unit: second\n",
    );
    let mut service = Service::new(&rules);
    let one = request([("domain", "example7"), ("key_1", "value_1"), ("user", "bkthomps")]);
    let both = Pairs::from_iter(one.clone().into_iter().chain([("key_2", "value_2".to_owned())]));
    assert_eq!(service.allowed_of(20, &both), 10);
    assert_eq!(service.allowed_of(20, &one), 5);
}

#[test]
fn a_wildcard_is_a_path_or_left_out_with_a_warning() {
    let text = |key: &str, value: &str| {
        format!(
            "domain: d\ndescriptors:\n- key: {key}\n  value: {value}\n  rate_limit: {{unit: minute, requests_per_unit: 2}}\n- key: other\n  rate_limit: {{unit: minute, requests_per_unit: 2}}\n"
        )
    };
    let mut service = Service::new(&import_exactly("envoy", &text("path", "/a/*")));
    let to = |path: &str| request([("domain", "d"), ("path", path)]);
    assert_eq!(["/a/b", "/a/c", "/b"].map(|path| service.allowed_of(5, &to(path))), [2, 2, 5]);
    let mut service = Service::new(&import_exactly("envoy", &text("key1", "'*'")));
    assert_eq!(["x", "y"].map(|value| service.allowed_of(5, &request([("domain", "d"), ("key1", value)]))), [2, 2]);
    // Below a key that is never looked up nothing is.
    let taken = "domain: d\ndescriptors:\n- key: a\n  value: '*'\n  rate_limit: {unit: minute, requests_per_unit: 2}\n\
                 - key: a\n  descriptors:\n  - key: b\n    rate_limit: {unit: minute, requests_per_unit: 1}\n";
    let rules = import_exactly("envoy", taken);
    assert_eq!(
        list(&rules, "What isn't translated"),
        ["lines 8 to 9: a=* is looked up before it, and matches every value"]
    );
    assert_eq!(Service::new(&rules).allowed_of(5, &request([("domain", "d"), ("a", "x"), ("b", "x")])), 2);
    let imported = import("envoy", &text("key1", "value*"));
    let why = "key1=value*: only a path has patterns, and they end in /*, so the limit is left out";
    assert_eq!(imported.warnings, [format!("-:3: warning: {why}")]);
    assert_eq!(list(&imported.rules, "What differs"), [format!("line 3: {why}")]);
    assert_eq!(list(&imported.rules, "What isn't translated"), [format!("lines 3 to 5: {why}")]);
}

/// A descriptor of the model, as the README defines it.
#[derive(Clone, Debug, Default)]
struct Node {
    key: &'static str,
    value: Option<&'static str>,
    /// Requests and seconds.
    limit: Option<(u64, u64)>,
    shadow: bool,
    name: Option<&'static str>,
    replaces: Option<&'static str>,
    descriptors: Vec<Node>,
}

const KEYS: [&str; 3] = ["a", "b", "c"];
const VALUES: [&str; 3] = ["x", "y", "z"];
const UNITS: [(&str, u64); 3] = [("second", 1), ("minute", 60), ("hour", 3600)];

impl Node {
    /// Descriptors of a list, none twice.
    fn list(random: &mut Rng, depth: usize) -> Vec<Self> {
        let mut all = Vec::<Self>::new();
        for _ in 0..random.usize(1..4) {
            let (key, value) = (KEYS[random.usize(..3)], random.bool().then(|| VALUES[random.usize(..3)]));
            if all.iter().any(|other| (other.key, other.value) == (key, value)) {
                continue;
            }
            let mut node = Self { key, value, ..Self::default() };
            if random.u8(..4) > 0 {
                node.limit = Some((random.u64(..5), UNITS[random.usize(..3)].1));
                node.shadow = random.u8(..8) == 0;
                node.name = (random.u8(..6) == 0).then_some("named");
                node.replaces = (node.name.is_none() && random.u8(..8) == 0).then_some("named");
            }
            if depth < 3 && random.bool() {
                node.descriptors = Self::list(random, depth + 1);
                // A key that comes twice on the way has another attribute.
                node.descriptors.retain(|below| below.key != key && below.descriptors.iter().all(|low| low.key != key));
            }
            all.push(node);
        }
        all
    }

    fn write(&self, indent: usize, text: &mut String) {
        let pad = " ".repeat(indent);
        text.push_str(&format!("{pad}- key: {}\n", self.key));
        if let Some(value) = self.value {
            text.push_str(&format!("{pad}  value: {value}\n"));
        }
        if let Some((requests, seconds)) = self.limit {
            let unit = UNITS.iter().find(|(_, of)| *of == seconds).expect("a unit").0;
            text.push_str(&format!(
                "{pad}  rate_limit:\n{pad}    unit: {unit}\n{pad}    requests_per_unit: {requests}\n"
            ));
            if let Some(name) = self.name {
                text.push_str(&format!("{pad}    name: {name}\n"));
            }
            if let Some(name) = self.replaces {
                text.push_str(&format!("{pad}    replaces:\n{pad}      - name: {name}\n"));
            }
        }
        if self.shadow {
            text.push_str(&format!("{pad}  shadow_mode: true\n"));
        }
        if !self.descriptors.is_empty() {
            text.push_str(&format!("{pad}  descriptors:\n"));
            self.descriptors.iter().for_each(|node| node.write(indent + 4, text));
        }
    }

    /// The lists of keys that lead somewhere.
    fn ways(all: &[Self], before: &[&'static str], into: &mut Vec<Vec<&'static str>>) {
        for node in all {
            let way = [before, &[node.key]].concat();
            Self::ways(&node.descriptors, &way, into);
            if !into.contains(&way) {
                into.push(way);
            }
        }
    }

    /// The node of a list of entries: at each level by key and value, then by key, and never back.
    fn find<'n>(all: &'n [Self], entries: &[(&str, &str)]) -> Option<&'n Self> {
        let ((key, value), rest) = entries.split_first()?;
        let of = |wanted: Option<&str>| all.iter().find(|node| node.key == *key && node.value == wanted);
        let node = of(Some(value)).or_else(|| of(None))?;
        if rest.is_empty() { Some(node) } else { Self::find(&node.descriptors, rest) }
    }
}

/// Counters by their entries and window, of a service that counts a request everywhere or nowhere.
#[derive(Default)]
struct Model(BTreeMap<(Vec<(&'static str, String)>, u64), u64>);

impl Model {
    fn allows(&mut self, tree: &[Node], ways: &[Vec<&'static str>], now_ms: u64, pairs: &Pairs) -> bool {
        let mut limits = Vec::new();
        for way in ways {
            let entries = way.iter().map(|key| Some((*key, pairs.get(key)?.as_str()))).collect::<Option<Vec<_>>>();
            let Some(entries) = entries else { continue };
            if let Some((node, limit)) = Node::find(tree, &entries).and_then(|node| Some((node, node.limit?))) {
                limits.push((node, limit, entries));
            }
        }
        let replaced: Vec<_> = limits.iter().filter_map(|(node, ..)| node.replaces).collect();
        limits.retain(|(node, ..)| node.name.is_none_or(|name| !replaced.contains(&name)) && !node.shadow);
        let counters: Vec<_> = limits
            .iter()
            .map(|(_, (requests, seconds), entries)| {
                let entries = entries.iter().map(|(key, value)| (*key, (*value).to_owned())).collect();
                ((entries, now_ms / 1000 / seconds), *requests)
            })
            .collect();
        let fits = counters.iter().all(|(counter, requests)| self.0.get(counter).unwrap_or(&0) < requests);
        if fits {
            counters.into_iter().for_each(|(counter, _)| *self.0.entry(counter).or_default() += 1);
        }
        fits
    }
}

/// What is imported without a warning decides as documented, whatever the tree.
#[test]
fn random_descriptors_decide_as_the_model_does() {
    let mut random = Rng::with_seed(11);
    let (mut exact, mut replacing, mut verdicts) = (0, 0, [0, 0]);
    let all = cases(60);
    for _ in 0..all {
        let tree = Node::list(&mut random, 1);
        let mut text = "domain: d\ndescriptors:\n".to_owned();
        tree.iter().for_each(|node| node.write(2, &mut text));
        if !text.contains("requests_per_unit") {
            continue;
        }
        let imported = import("envoy", &text);
        if !imported.warnings.is_empty() {
            continue;
        }
        exact += 1;
        replacing += u32::from(imported.rules.contains("# In place of"));
        let mut ways = Vec::new();
        Node::ways(&tree, &[], &mut ways);
        let (mut model, mut service, mut now_ms) = (Model::default(), Service::new(&imported.rules), START_MS);
        for _ in 0..150 {
            now_ms += [0, 0, 1, 130, 1000, 20_000][random.usize(..6)];
            let mut pairs = request([("domain", "d")]);
            for key in KEYS {
                if random.u8(..4) > 0 {
                    pairs.insert(key, ["x", "y", "z", "w"][random.usize(..4)].to_owned());
                }
            }
            let expected = model.allows(&tree, &ways, now_ms, &pairs);
            let got = service.allows(now_ms, &pairs);
            assert_eq!(got, expected, "{pairs:?} at {now_ms}\n{text}\n{}", imported.rules);
            verdicts[usize::from(got)] += 1;
        }
    }
    println!("{exact} of {all} configurations without a warning, {replacing} with a limit that replaces: {verdicts:?}");
    assert!(
        exact > all / 2 && replacing > 0 && verdicts.iter().all(|count| *count > 1000),
        "{exact} {replacing} {verdicts:?}"
    );
}
