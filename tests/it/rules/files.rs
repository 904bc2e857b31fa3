//! Files of rules: what they may say, and what is wrong with those that can't be used.

use std::fs;

use tempfile::TempDir;
use tollgate::rules::{Attributes, Descriptors, RuleSet};

use super::{applies, rule_set};

fn written(text: &str) -> (TempDir, std::path::PathBuf) {
    let directory = TempDir::new().expect("a directory");
    let path = directory.path().join("rules.toml");
    fs::write(&path, text).expect("a file");
    (directory, path)
}

/// The message of a file's only fault, after the directory's name.
fn told(text: &str) -> String {
    let (directory, path) = written(text);
    let error = RuleSet::read(&path).expect_err(text);
    assert_eq!(error.faults().len(), 1, "{:?}", error.faults());
    assert_eq!(error.to_string().lines().count(), 1, "{error}");
    error.to_string().replace(&format!("{}/", directory.path().display()), "")
}

const GOOD: &str = "[[rule]]\nname = \"a\"\nkey = \"user\"\nlimits = [\"gcra 1/1s\"]\n";

#[test]
fn each_bad_file_is_reported_with_the_line_and_what_was_expected() {
    let with = |more: &str| format!("{GOOD}{more}\n");
    let second = |rule: &str| format!("{GOOD}[[rule]]\nname = \"b\"\n{rule}\n");
    for (text, expected) in [
        (String::new(), "rules.toml: the rules are missing: write at least one [[rule]]"),
        ("[[rule]\n".into(), "rules.toml:1:8: "),
        ("rule = 1\n".into(), "rules.toml:1:8: write [[rule]] before each rule: here, rule is 1"),
        (
            "[[rules]]\nname = \"a\"\n".into(),
            "rules.toml:1:3: expected a known name (did you mean rule?), got \"rules\"",
        ),
        (with("colour = \"red\""), "rules.toml:5:1: rule a: expected one of name, priority, match, "),
        (with("priority = \"high\""), "rules.toml:5:12: rule a: priority: expected a whole number, got \"high\""),
        (with("limts = \"x\""), "rules.toml:5:1: rule a: expected a known name (did you mean limits?), got \"limts\""),
        (with("shadow = \"yes\""), "rules.toml:5:10: rule a: shadow: expected true or false, got \"yes\""),
        (with("status = -1"), "rules.toml:5:10: rule a: status: expected a whole number from 400 to 599, got -1"),
        (
            with("processes = 0"),
            "rules.toml:5:13: rule a: processes: expected a whole number from 1 to 4294967295, got 0",
        ),
        (with("match = \"/x\""), "rules.toml:5:9: rule a: match: expected a table, got \"/x\""),
        (
            with("match = { tier = 1 }"),
            "rules.toml:5:18: rule a: match: expected a string, or a list of strings, got 1",
        ),
        (
            GOOD.replace("[\"gcra 1/1s\"]", "[{ limit = \"gcra 1/1s\", kee = \"x\" }]"),
            "rules.toml:4:34: rule a: expected a known name (did you mean key?), got \"kee\"",
        ),
        (
            format!("[defaults]\nstatus = \"x\"\n{GOOD}"),
            "rules.toml:2:10: defaults.status: expected a whole number from 400 to 599, got \"x\"",
        ),
        (format!("[defaults]\nlimits = []\n{GOOD}"), "rules.toml:2:1: expected one of shadow, missing, ipv6_prefix, "),
        ("rule = [1]\n".into(), "rules.toml:1:9: rule: expected a table, got 1"),
        (
            format!("[variables]\nstandard = \"gcra 1/1s\"\n{}", GOOD.replace("gcra 1/1s", "$standrad")),
            "rules.toml:6:11: rule a: limits: expected a limit or the name of a variable (did you mean $standard?), got ",
        ),
        (
            format!("[variables]\nstandard = \"gcra 1/1s\"\n{GOOD}overrides = {{ \"user:a\" = \"$x\" }}\n"),
            "rules.toml:7:26: rule a: user:a: expected a limit or the name of a variable (standard), got \"$x\"",
        ),
        (
            GOOD.replace("gcra 1/1s", "gcra 5/month"),
            "rules.toml:4:11: rule a: rate: expected units per period, such as 5/30d, or fixed-window 5/month, got ",
        ),
        (
            with("match = { ip = [\n  \"10.0.0.0/8\",\n  \"10.0.0.1/8\",\n] }"),
            "rules.toml:7:3: rule a: ip: expected a network without bits beyond its length, such as 10.0.0.0/8, got ",
        ),
        (
            format!("[defaults]\nstatus = 99\n{GOOD}{}", GOOD.replace("\"a\"", "\"b\"")),
            "rules.toml:2:10: defaults: status: expected an HTTP status from 400 to 599, got 99",
        ),
        (
            "[defaults]\nblock_for = \"x\"\n[[rule]]\nname = \"a\"\naction = \"allow\"\n".into(),
            "rules.toml:2:13: defaults: block_for: period: expected a count and a unit",
        ),
        (
            with("overrides = { \"user:a\" = \"deny\" }"),
            "rules.toml:5:26: rule a: user:a: expected limits, \"block\" or \"allow\", got \"deny\"",
        ),
        (
            with("on_change = \"x\""),
            "rules.toml:5:13: rule a: on_change: expected keep-used, as-is or reset, got \"x\"",
        ),
        (with("action = 1"), "rules.toml:5:10: rule a: action: expected a string, got 1"),
        (with("name = \"b\""), "rules.toml:5:1: name is given twice"),
        ("[[rule]]\nkey = \"user\"\n".into(), "rules.toml:1:1: rule: the name is missing"),
        (GOOD.replace("\"a\"", "\"a b\""), "rules.toml:2:8: rule a b: name: expected 1 to 64 letters, digits"),
        (
            second("match = { path = \"/x\" }\naction = \"allow\"").replace("\"b\"", "\"a\""),
            "rules.toml:6:8: rule a: name: another rule is also named \"a\"",
        ),
        (
            second("priority = -1\naction = \"allow\""),
            "rules.toml:6:8: rule b: never applies: rule \"a\", before it, takes all of its requests: ",
        ),
        (
            with("cost = \"x\"\nmin_cost = 1\noverrides = { \"user:a\" = \"gcra 5/1s\" }")
                .replace("min_cost = 1", "min_cost = 6")
                .replace("gcra 1/1s", "gcra 9/1s"),
            "rules.toml:7:26: rule a: user:a: min_cost: expected at most 5, the most that can ever be admitted by \
             token-bucket 5/1s, got 6",
        ),
        (
            with("count = [\"401\", \"4x\"]"),
            "rules.toml:5:17: rule a: count: expected an HTTP status, such as 401, or a class of them, such as 4xx, got \"4x\"",
        ),
        (
            with("count = []"),
            "rules.toml:5:9: rule a: count: the list is empty: write at least one status, such as 401",
        ),
        (
            with("count = 40.1"),
            "rules.toml:5:9: rule a: count: expected a status, or a list of them, such as [401, \"5xx\"], got 40.1",
        ),
        (
            with("count = [401, 99]"),
            "rules.toml:5:15: rule a: count: expected an HTTP status, such as 401, or a class of them, such as 4xx, got 99",
        ),
        (
            with("cost = \"toknes\"")
                .replace("limits = [\"gcra 1/1s\"]", "limits = [{ limit = \"gcra 5/1s\", cost = 1 }]"),
            "rules.toml:5:8: rule a: cost: has no effect, since each limit has a cost of its own",
        ),
        (
            with("count = \"401\"").replace("gcra 1/1s", "concurrency 1 ttl 1s"),
            "rules.toml:5:9: rule a: count: expected a limit that counts requests, since permits are released with \
             the response, got concurrency 1 ttl 1s",
        ),
        (
            second("count = \"401\"\naction = \"block\"").replace("priority = 1", "priority = 0"),
            "rules.toml:7:9: rule b: count: a rule whose action is block can't have it",
        ),
        (
            "[[rule]]\nname = \"a\"\nmatch = { method = [\"GET\", \"OTHER\"] }\naction = \"block\"\n\
             [[rule]]\nname = \"b\"\nmatch = { method = [\"PROPFIND\", \"HEAD\"] }\naction = \"allow\"\n"
                .into(),
            "rules.toml:6:8: rule b: never applies: rule \"a\", before it, takes all of its requests: ",
        ),
        (
            "[[rule]]\nname = \"a\"\nmatch = { path = [\"/x\", \"/*\"] }\naction = \"block\"\n\
             [[rule]]\nname = \"b\"\nmatch = { path = \"*\", tier = \"x\" }\naction = \"allow\"\n"
                .into(),
            "rules.toml:6:8: rule b: never applies: rule \"a\", before it, takes all of its requests: ",
        ),
        (
            "[[rule]]\nname = \"a\"\nmatch = { ip = [\"0.0.0.0/0\", \"::/0\"] }\naction = \"block\"\n\
             [[rule]]\nname = \"b\"\nmatch = { ip = \"*\", tier = \"x\" }\naction = \"allow\"\n"
                .into(),
            "rules.toml:6:8: rule b: never applies: rule \"a\", before it, takes all of its requests: ",
        ),
        (
            second("match = { tier = \"free\" }\naction = \"deny\""),
            "rules.toml:8:10: rule b: action: expected one of throttle, block, allow, got \"deny\"",
        ),
        (
            GOOD.replace("gcra 1/1s", "gcra 1 per second"),
            "rules.toml:4:11: rule a: rate: expected units per period, such as 1/1s, got ",
        ),
        (GOOD.replace("gcra 1/1s", "leaky 1/1s"), "rules.toml:4:11: rule a: algorithm: expected "),
        (
            GOOD.replace("\"gcra 1/1s\"", "\"gcra 1/1s\", \"gcra 2/1s\""),
            "rules.toml:4:24: rule a: two limits are named token-bucket-1s",
        ),
        (
            GOOD.replace("\"gcra 1/1s\"", "\"$standard\""),
            "rules.toml:4:11: rule a: limits: expected a limit or the name of a variable (of which there are none), got \"$standard\"",
        ),
        (
            GOOD.replace("\"gcra 1/1s\"", ""),
            "rules.toml:2:8: rule a: limits: they are missing: write at least one, such as \"token-bucket 100/1m\"",
        ),
        (
            GOOD.replace("key = \"user\"\n", ""),
            "rules.toml:3:10: rule a: key: it is missing: write what the rule counts by, such as \"user\"",
        ),
        (
            GOOD.replace("\"user\"", "[\"user\", \"global\"]"),
            "rules.toml:3:7: rule a: key: expected names of attributes, or \"global\" alone, got \"global\"",
        ),
        (GOOD.replace("\"user\"", "[\"user\", \"user\"]"), "rules.toml:3:7: rule a: key: user is given twice"),
        (
            with("match = { path = \"api/*\" }"),
            "rules.toml:5:18: rule a: path: expected a path pattern that begins with /, such as /api/*, got \"api/*\"",
        ),
        (
            with("match = { path = \"/api/v*\" }"),
            "rules.toml:5:18: rule a: path: expected * as a whole segment of a path pattern, such as /api/*/items, got \"/api/v*\"",
        ),
        (
            with("match = { path = \"/users/{id}\" }"),
            "rules.toml:5:18: rule a: path: expected * for a segment that varies in a path pattern, such as /users/*, got \"/users/{id}\"",
        ),
        (
            with("match = { ip = \"10.0.0.1/8\" }"),
            "rules.toml:5:16: rule a: ip: expected a network without bits beyond its length, such as 10.0.0.0/8, got \"10.0.0.1/8\"",
        ),
        (
            with("match = { ip = \"10.0.0\" }"),
            "rules.toml:5:16: rule a: ip: expected an address or a network, such as 192.0.2.1 or 10.0.0.0/8, got \"10.0.0\"",
        ),
        (
            with("match = { method = \"GET /\" }"),
            "rules.toml:5:20: rule a: method: expected an HTTP method such as POST, got \"GET /\"",
        ),
        (
            with("match = { tier = [\"free\", \"*\"] }"),
            "rules.toml:5:27: rule a: tier: expected \"*\" alone, or values, got ",
        ),
        (
            with("cost = \"path\""),
            "rules.toml:5:8: rule a: cost: expected a number without quotes, or the name of an attribute, got \"path\"",
        ),
        (with("match = { tier = [] }"), "rules.toml:5:18: rule a: tier: the list is empty: write at least one value"),
        (with("match = { tier = \"\" }"), "rules.toml:5:18: rule a: tier: a value is empty: write \"*\" for any value"),
        (
            with("cost = 2"),
            "rules.toml:5:8: rule a: cost: expected at most 1, the most that can ever be admitted by token-bucket \
             1/1s, got 2",
        ),
        (
            with("cost = -1"),
            "rules.toml:5:8: rule a: cost: expected units, or the name of an attribute that gives them, got -1",
        ),
        (with("status = 200"), "rules.toml:5:10: rule a: status: expected an HTTP status from 400 to 599, got 200"),
        (
            with("retry_after = \"soon\""),
            "rules.toml:5:15: rule a: retry_after: period: expected a count and a unit (us ms s m h d)",
        ),
        (with("block_for = \"0s\""), "rules.toml:5:13: rule a: block_for: expected at least 1us, got \"0s\""),
        (with("ipv6_prefix = 129"), "rules.toml:5:15: rule a: ipv6_prefix: expected a length from 1 to 128, got 129"),
        (with("on_error = \"local\""), "rules.toml:5:12: rule a: on_error: processes is missing: on_error = \"local\""),
        (
            with("overrides = { \"org:acme\" = \"gcra 2/1s\" }"),
            "rules.toml:5:28: rule a: expected a value of the rule's own key, such as user:..., got \"org:acme\"",
        ),
        (
            with("overrides = { \"user:a\" = \"gcra 2\" }"),
            "rules.toml:5:26: rule a: user:a: rate: expected units per period",
        ),
        (
            with("overrides = { \"user:a\" = \"block\" }\nallow = [\"user:b\", \"user:a\"]"),
            "rules.toml:6:20: rule a: \"user:a\" is given twice among overrides, block and allow",
        ),
        (
            second("action = \"block\"\nmatch = { tier = \"free\" }\nlimits = [\"gcra 1/1s\"]")
                .replace("key = \"user\"\n", "key = \"user\"\nmatch = { tier = \"paid\" }\n"),
            "rules.toml:10:10: rule b: limits: a rule whose action is block can't have it",
        ),
        (
            format!("include = [\"more/*.tml\"]\n{GOOD}"),
            "rules.toml:1:12: include: expected a file, or *.toml at the end for all of a directory, got \"more/*.tml\"",
        ),
        (
            format!("include = [\"more.toml\"]\n{GOOD}"),
            "rules.toml:1:12: include: more.toml: the file can't be read: No such file",
        ),
        (
            format!("include = [\n  \"rules.toml\",\n  \"none/*.toml\",\n]\n{GOOD}"),
            "rules.toml:3:3: include: the directory of \"none/*.toml\" can't be read: No such file",
        ),
        (with("min_cost = -1"), "rules.toml:5:12: rule a: min_cost: expected a whole number of units, from 0, got -1"),
        (with("message = 1979-05-27"), "rules.toml:5:11: rule a: message: expected a string, got 1979-05-27"),
        (
            with("match = 1979-05-27T07:32:00Z"),
            "rules.toml:5:9: rule a: match: expected a table, got 1979-05-27T07:32:00Z",
        ),
        (
            with("cost = \"a b\\n\""),
            "rules.toml:5:8: rule a: cost: expected units, or the name of an attribute: letters, digits, -, _ or ., got \"a b\\n\"",
        ),
        (
            with("match = { \"a b\\n\" = \"x\" }"),
            "rules.toml:5:21: rule a: match: expected the name of an attribute, got \"a b\\n\"",
        ),
    ] {
        let message = told(&text);
        assert!(message.starts_with(expected), "\n{message}\n{expected}\n{text}");
    }
    let (_directory, path) = written("");
    fs::write(&path, b"# \xff\n").expect("a file");
    assert!(RuleSet::read(&path).expect_err("no UTF-8").to_string().ends_with("the file isn't UTF-8"));
    let error = RuleSet::read("/nowhere/rules.toml").expect_err("no file").to_string();
    assert_eq!(error, "/nowhere/rules.toml: the file can't be read: No such file or directory (os error 2)");
}

#[test]
fn all_mistakes_of_a_file_are_reported_at_once() {
    let text = format!("{}{}", GOOD.replace("1/1s", "1/1x"), GOOD.replace("\"a\"", "\"b\"").replace("user", "a b"));
    let (_directory, path) = written(&text);
    let error = RuleSet::read(&path).expect_err("two faults");
    assert_eq!(error.faults().iter().map(|fault| fault.line().expect("a line")).collect::<Vec<_>>(), [4, 7]);
    assert!(error.to_string().ends_with("(and 1 more)"), "{error}");
    assert!(error.faults().iter().all(|fault| fault.file() == Some(&path)));
    // Of another type, in each of several files.
    let text =
        format!("include = [\"more.toml\"]\n{GOOD}cost = true\n{}status = \"x\"\n", GOOD.replace("\"a\"", "\"b\""));
    let (directory, path) = written(&text);
    fs::write(directory.path().join("more.toml"), format!("{GOOD}priority = \"high\"\n")).expect("a file");
    let error = RuleSet::read(&path).expect_err("three faults");
    let faults = error.faults().iter();
    let places: Vec<_> = faults.map(|fault| (fault.file().and_then(|file| file.file_name()), fault.line())).collect();
    assert_eq!(
        places,
        [
            (Some("rules.toml".as_ref()), Some(6)),
            (Some("rules.toml".as_ref()), Some(11)),
            (Some("more.toml".as_ref()), Some(5))
        ]
    );
    // Of types, variables and values; and of very many, a hundred.
    let text = format!(
        "{GOOD}cost = true\n{}{}",
        GOOD.replace("\"a\"", "\"b\"").replace("gcra 1/1s", "$none"),
        GOOD.replace("\"a\"", "\"c\"").replace("1/1s", "1/1x"),
    );
    let (_directory, path) = written(&text);
    let error = RuleSet::read(&path).expect_err("three faults");
    assert_eq!(error.faults().iter().map(|fault| fault.line().expect("a line")).collect::<Vec<_>>(), [5, 9, 13]);
    let many: String =
        (0..20_000).map(|at| GOOD.replace("\"a\"", &format!("\"r{at}\"")).replace("gcra 1", "gcra x")).collect();
    let (_directory, path) = written(&many);
    assert_eq!(RuleSet::read(&path).expect_err("many faults").faults().len(), 100);
}

#[test]
fn files_include_others_by_name_or_by_directory() {
    let main = "include = [\"teams/*.toml\", \"last.toml\"]\n[defaults]\nstatus = 420\n[variables]\nslow = \"gcra 1/1m\"\n\
                [[rule]]\nname = \"main\"\nmatch = { team = \"main\" }\naction = \"allow\"\n";
    let (directory, path) = written(main);
    let of_team = |team: &str| {
        format!("[[rule]]\nname = \"{team}\"\nmatch = {{ team = \"{team}\" }}\nkey = \"user\"\nlimits = [\"$slow\"]\n")
    };
    fs::create_dir(directory.path().join("teams")).expect("a directory");
    for (file, team) in [("teams/b.toml", "b"), ("teams/a.toml", "a"), ("last.toml", "last")] {
        fs::write(directory.path().join(file), of_team(team)).expect("a file");
    }
    fs::write(directory.path().join("teams/.b.toml.swp"), "not a rule").expect("a file");
    fs::write(directory.path().join("teams/.hidden.toml"), "not a rule").expect("a file");
    let rules = RuleSet::read(&path).expect("rules");
    let names: Vec<_> = rules.definitions().iter().map(|rule| rule.name.as_str()).collect();
    assert_eq!(names, ["main", "a", "b", "last"]);
    assert_eq!(rules.definitions()[1].status, Some(420));
    assert_eq!(rules.rule("a").expect("limits").to_string(), "token-bucket 1/1m");
    assert_eq!(applies(&rules, &Attributes::new().set("team", "b").user("u")).as_deref(), Some("b"));
    // A pattern that matches the file itself means the others.
    fs::write(&path, main.replace("\"last.toml\"", "\"*.toml\"")).expect("a file");
    assert_eq!(RuleSet::read(&path).expect("rules").len(), 4);
    for again in ["\"./*.toml\"", "\"teams/../*.toml\"", "\"last.toml\", \"*.toml\", \"teams/a.toml\""] {
        fs::write(&path, main.replace("\"last.toml\"", again)).expect("a file");
        assert_eq!(RuleSet::read(&path).expect("rules").len(), 4, "{again}");
    }
    // A fault stands where it was written, and only rules may be included.
    fs::write(directory.path().join("teams/b.toml"), of_team("b").replace("$slow", "$fast")).expect("a file");
    let error = RuleSet::read(&path).expect_err("a bad team");
    assert_eq!(error.faults()[0].file(), Some(&*directory.path().join("teams/b.toml")));
    assert_eq!(error.faults()[0].line(), Some(5));
    for setting in ["ignore_case = true\n", "descriptors = \"each\"\n"] {
        fs::write(directory.path().join("teams/b.toml"), setting).expect("a file");
        let error = RuleSet::read(&path).expect_err("a setting").to_string();
        assert!(error.contains("teams/b.toml: expected only [[rule]] in an included file"), "{error}");
    }
}

#[test]
fn settings_of_a_set_are_kept_and_a_change_of_one_is_a_change() {
    let rule = "[[rule]]\nname = \"r\"\nkey = \"user\"\nlimits = [\"gcra 5/1s\"]\n";
    let plain = rule_set(rule);
    assert_eq!(plain.descriptors(), Descriptors::Together);
    for setting in ["ignore_case = true", "paths = \"segments\"", "descriptors = \"each\""] {
        let rules = rule_set(&format!("{setting}\n{rule}"));
        let json = serde_json::to_string(&rules).expect("JSON");
        assert_eq!(serde_json::from_str::<RuleSet>(&json).expect("rules"), rules, "{json}");
        let changes = plain.changes_to(&rules);
        assert!(changes.settings && !changes.has_rules(), "{setting}");
        assert_eq!(rules.descriptors() == Descriptors::Each, setting.starts_with("descriptors"), "{setting}");
    }
}

#[test]
fn the_file_in_the_documentation_does_what_it_says() {
    let format = tollgate_testing::repository::read("src/rules/format.md");
    let (_, rest) = format.split_once("```toml\n").expect("a file");
    let rules = rule_set(rest.split_once("```").expect("its end").0);
    let of = |request: Attributes<'_>| applies(&rules, &request);
    let login = || Attributes::new().method("POST").path("/api/v1/login/");
    assert_eq!(of(login().ip([10, 0, 0, 1].into())).as_deref(), Some("office"));
    assert_eq!(of(login().ip([192, 0, 2, 1].into())).as_deref(), Some("logins"));
    let paid = Attributes::new().tier("trial").user("7").set("org", "acme").path("/api/v1/items").set("units", "3");
    assert_eq!(of(paid).as_deref(), Some("paid"));
    assert_eq!(of(Attributes::new().path("/")).as_deref(), Some("everyone"));
    assert_eq!(
        rules.rule("paid").expect("limits").to_string(),
        "token-bucket 1000/1h burst 20, fixed-window 100000/1d"
    );
    assert_eq!(rules.rule("logins").expect("limits").blocks_for(), Some(std::time::Duration::from_secs(900)));
}

#[test]
fn a_rule_changes_its_part_of_a_default() {
    let of = |rule: &str| {
        let good = GOOD.replace("1/1s", "9/1s");
        rule_set(&format!("[defaults]\non_error = \"local\"\nprocesses = 2\n{good}{rule}")).definitions()[0].clone()
    };
    assert_eq!(of("").processes.map(u32::from), Some(2));
    assert_eq!(of("processes = 1").processes.map(u32::from), Some(1));
    assert_eq!(of("on_error = \"open\"").processes, None);
}

/// The format as the design has it.
#[test]
fn the_documented_rule_is_read() {
    let rules = rule_set(
        r#"
        [[rule]]
        name = "free_tier"
        priority = 700
        match = { tier = "free", path = "/api/v1/*", method = "POST", ip = "10.0.0.0/8" }
        key = "user"
        limits = ["token-bucket 1000/1h burst 20", "fixed-window 10000/1d"]
        cost = 1
        action = "throttle"
        shadow = false
        block_for = "15m"
        overrides = { "user:42" = "token-bucket 500/1m" }
        on_error = "closed"
        status = 429
        message = "slow down"
    "#,
    );
    let request = Attributes::new().tier("free").path("/api/v1/x").method("POST").ip([10, 0, 0, 1].into()).user("7");
    assert_eq!(applies(&rules, &request).as_deref(), Some("free_tier"));
}

/// Limits of single users and keys, and look-ups of keys, count under these names.
#[test]
fn reserved_names_are_refused() {
    for name in ["user-quota", "key-quota", "api-key-look-ups"] {
        let error = format!("[[rule]]\nname = \"{name}\"\nkey = \"user\"\nlimits = [\"gcra 1/1s\"]").parse::<RuleSet>();
        let error = error.expect_err("reserved").to_string();
        let expected = "name: expected none of the reserved names (user-quota, key-quota, api-key-look-ups), got";
        assert!(error.contains(expected) && error.contains(":2:"), "{error}");
    }
}
