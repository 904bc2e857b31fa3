//! The repository's own rules, read from its files: the core stays a core, and features only add.

use std::collections::BTreeSet;

use tollgate::Algorithm;
use tollgate_testing::repository::{anchor, read, root, rust_files, stems};
use tollgate_testing::rules::five_of;

#[test]
fn the_core_does_no_io_and_names_no_feature_but_serde() {
    let core =
        ["algorithm", "batch", "call", "decision", "error", "key", "limit", "quota", "request", "rule", "script"];
    for name in core {
        for file in rust_files(&format!("src/{name}")) {
            let text = read(&file);
            for word in
                ["tokio", "deadpool", "redis::", "mlua", "std::net", "std::fs", "crate::engine", "crate::limiter"]
            {
                assert!(!text.contains(word), "{file}: {word}");
            }
            // A rule's policy says so if there is no engine that it could answer by.
            let may_name =
                |feature: &str| feature == "serde" || (feature == "embedded" && file == "src/rule/on_error.rs");
            let features = text.split("feature = \"").skip(1).filter_map(|rest| rest.split('"').next());
            assert!(features.clone().all(may_name), "{file}: {:?}", features.collect::<Vec<_>>());
        }
    }
}

#[test]
fn scripts_know_no_algorithms_and_these_no_limits() {
    let knows_not: [(&str, &[&str]); 3] =
        [("script", &["algorithm", "limit", "rule", "call"]), ("algorithm", &["limit", "rule"]), ("limit", &["rule"])];
    for (name, others) in knows_not {
        for file in rust_files(&format!("src/{name}")) {
            let text = read(&file);
            for other in others {
                assert!(!text.contains(&format!("crate::{other}::")), "{file}: {other}");
            }
        }
    }
}

#[test]
fn engines_know_neither_rules_nor_each_other() {
    // What all of them have, and what opens them.
    let is_engine = |name: &String| !["deadline", "builder"].contains(&name.as_str());
    let engines: Vec<_> = stems("src/engine", "rs").into_iter().filter(is_engine).collect();
    assert!(engines.len() >= 2);
    for engine in &engines {
        for file in rust_files(&format!("src/engine/{engine}")) {
            let text = read(&file);
            for module in ["rule", "limit", "limiter", "key", "algorithm"] {
                assert!(!text.contains(&format!("crate::{module}::")), "{file}: {module}");
            }
            // A cluster's nodes are each a Redis.
            let of_nodes = |other: &String| engine == "cluster" && other == "redis";
            for other in engines.iter().filter(|other| *other != engine && !of_nodes(other)) {
                let paths = [format!("super::{other}"), format!("engine::{other}")];
                assert!(!paths.iter().any(|path| text.contains(path)), "{file}: {other}");
            }
        }
    }
}

/// Otherwise the time of a simulation would be mixed with the machine's, and no seed would repeat its run.
#[test]
fn what_decides_reads_clocks_that_a_simulation_sets() {
    let elsewhere = ["middleware", "rules", "simulation", "telemetry", "wall_clock"].map(|name| format!("src/{name}"));
    let files: Vec<_> =
        rust_files("src").into_iter().filter(|file| !elsewhere.iter().any(|at| file.starts_with(at))).collect();
    assert!(files.len() > 50);
    for file in files {
        let text = read(&file);
        let machine = |line: &str| line.starts_with("use std::time") && line.contains("Instant");
        assert!(!text.contains("SystemTime::now") && !text.lines().any(machine), "{file}");
    }
}

#[test]
fn each_stop_of_an_acquires_path_is_where_the_documentation_says() {
    let documented = read("ARCHITECTURE.md");
    let (_, path) = documented.split_once("\n## The path of an acquire").expect("a path");
    let (path, _) = path.split_once("\n## ").expect("what follows it");
    let stops = path.lines().filter(|line| line.starts_with(|first: char| first.is_ascii_digit()));
    let stops: Vec<_> = stops.map(|line| line.split('`').collect::<Vec<_>>()).collect();
    assert!(stops.len() > 5, "{}", stops.len());
    for stop in stops {
        let [_, function, _, file, ..] = stop[..] else { panic!("{stop:?}: expected a function and its file") };
        let code = read(&format!("src/{file}"));
        assert!(
            code.contains(&format!("fn {function}(")) || code.contains(&format!("fn {function}<")),
            "{function} in {file}"
        );
    }
}

#[test]
fn the_architecture_and_the_index_of_examples_name_each_file() {
    for (page, section, folder) in [
        ("ARCHITECTURE.md", "The library", "src"),
        ("ARCHITECTURE.md", "The system of record", "crates/record/src"),
        ("examples/README.md", "Examples", "examples/services/src/bin"),
    ] {
        let text = read(page);
        let (_, text) = text.split_once(&format!("# {section}\n")).unwrap_or_else(|| panic!("{page}: {section}"));
        let text = text.split("\n## ").next().unwrap_or_default();
        for name in stems(folder, "rs").into_iter().filter(|name| name != "lib") {
            let named = text.contains(&format!("`{name}`")) || text.contains(&format!("[{name}]"));
            assert!(named, "{page}, {section}: {folder}/{name}.rs");
        }
    }
}

#[test]
fn default_features_bring_neither_the_tool_nor_a_c_compiler() {
    let manifest = read("Cargo.toml");
    let (_, after) = manifest.split_once("\ndefault = [").expect("default features");
    let default = after.split(']').next().unwrap_or_default();
    for feature in ["cli", "embedded", "mlua", "clap", "tls"] {
        assert!(!default.contains(feature), "default features: {default}");
    }
}

/// `module::test`, as the page on running Redis has them.
#[test]
fn each_documented_fault_names_an_existing_test() {
    let page = include_str!("../../src/operations.md");
    let rows = page.split("# Faults").nth(1).and_then(|rest| rest.split("\n# ").next()).expect("the faults");
    let mut named = 0;
    for test in rows.split('`').filter(|word| word.contains("::") && !word.contains(' ') && word.contains('_')) {
        let (module, name) = test.rsplit_once("::").expect("a module");
        if module == module.to_lowercase() && !module.starts_with("crate") {
            let folders = [
                "tests/it/on_servers",
                "tests/it",
                "crates/cli/tests/it/on_servers",
                "crates/cli/tests/it",
                "crates/record/tests/it",
                "examples/services/tests/it",
            ];
            let found = folders.iter().any(|tests| {
                let file = root().join(tests).join(module.replace("::", "/")).with_extension("rs");
                std::fs::read_to_string(file).is_ok_and(|text| text.contains(&format!("fn {name}(")))
            });
            assert!(found, "{test}");
            named += 1;
        }
    }
    assert!(named > 30, "{named} tests");
}

/// A new module of tests is put into one of the lists by choice: on each PostgreSQL only the first one runs.
#[test]
fn each_module_of_tests_is_said_to_depend_on_postgresql_or_not() {
    let parents = ["crates/record/tests/it/main.rs", "crates/cli/tests/it/database.rs"].map(read).concat();
    let script = "tests/postgres.sh";
    let text = read(script);
    let modules = parents.lines().filter_map(|line| line.strip_prefix("mod ")?.strip_suffix(';'));
    // Two crates may have modules of the same name.
    let names: BTreeSet<_> = modules.map(str::to_owned).collect();
    let list = |name: &str| {
        let (_, rest) = text.split_once(&format!("\n{name}='")).unwrap_or_else(|| panic!("{script}: {name}"));
        let (list, _) = rest.split_once('\'').expect("an end");
        list.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    let mut listed = [list("depends"), list("alike")].concat();
    listed.sort();
    assert_eq!(listed, names.into_iter().collect::<Vec<_>>(), "{script}");
}

/// Read from top to bottom, each fits a screen. A function ends at the next `end` that is indented as it is.
#[test]
fn no_function_of_the_scripts_exceeds_forty_lines() {
    let mut functions = 0;
    for file in stems("lua", "lua") {
        let text = read(&format!("lua/{file}.lua"));
        let lines: Vec<_> = text.lines().collect();
        for (at, line) in lines.iter().enumerate() {
            let code = line.trim_start();
            let begins = !code.starts_with("--") && code.contains("function") && code.ends_with(')');
            if !begins {
                continue;
            }
            let indent = &line[..line.len() - code.len()];
            let is_end = |line: &&str| line.strip_prefix(indent).is_some_and(|rest| rest.starts_with("end"));
            let length = 1 + lines[at..].iter().position(is_end).expect("an end");
            assert!(length <= 40, "lua/{file}.lua:{}: {length} lines", at + 1);
            functions += 1;
        }
    }
    assert!(functions > 60, "{functions}");
}

/// Otherwise `tests/mutants.py` would refuse the list only when somebody runs it.
#[test]
fn each_mutant_changes_one_place_of_its_script() {
    let mutants: Vec<serde_json::Value> = serde_json::from_str(&read("tests/mutants.json")).expect("a list");
    assert!(mutants.len() > 100, "{}", mutants.len());
    for mutant in mutants {
        let [file, name, old, new] = ["file", "name", "old", "new"].map(|field| mutant[field].as_str().expect(field));
        assert_eq!(read(&format!("lua/{file}")).matches(old).count(), 1, "{name}: its text in {file}: {old}");
        assert_ne!(old, new, "{name}");
    }
}

/// The pages that are read as files, such as on a code host.
const PAGES: [&str; 30] = [
    "README.md",
    "ARCHITECTURE.md",
    "COMPARISON.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "STABILITY.md",
    "MIGRATION.md",
    "CHANGELOG.md",
    "crates/cli/README.md",
    "crates/record/src/operations.md",
    "crates/record/src/operations/backup.md",
    "crates/record/src/operations/runbook.md",
    "examples/README.md",
    "lua/README.md",
    "lua/sharing.md",
    "src/guide.md",
    "src/guide/algorithms.md",
    "src/guide/blocks.md",
    "src/guide/changes.md",
    "src/guide/faq.md",
    "src/guide/load.md",
    "src/guide/numbers.md",
    "src/guide/trace.md",
    "src/guide/unreachable.md",
    "src/middleware/answers.md",
    "src/operations.md",
    "src/rules/format.md",
    "src/operations/backup.md",
    "src/operations/limits.md",
    "src/operations/runbook.md",
];

/// Those of them that rustdoc shows too: the names of their links are defined twice, for files and for modules.
fn pages_of_two_homes() -> impl Iterator<Item = &'static str> {
    let others = ["src/middleware/answers.md", "src/rules/format.md"];
    PAGES.into_iter().filter(move |page| page.starts_with("src/guide") || others.contains(page))
}

#[test]
fn each_link_of_a_page_leads_to_a_file_and_a_heading() {
    for page in PAGES {
        let text = outside_code(&read(page));
        let inline = text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target);
        let named: Vec<_> = definitions(&text).collect();
        let labels = text.split("][").skip(1).filter_map(|rest| rest.split_once(']')).map(|(label, _)| label);
        let is_label = |label: &&str| label.chars().all(|letter| letter.is_alphanumeric() || letter == '-');
        for label in labels.filter(is_label) {
            assert!(named.iter().any(|(name, _)| *name == label), "{page}: [{label}] is defined nowhere");
        }
        // Those of rustdoc's own are followed as it is run.
        for target in inline
            .chain(named.iter().map(|(_, target)| *target))
            .filter(|target| !target.starts_with("http") && !target.contains("::"))
        {
            let (file, heading) = target.split_once('#').unwrap_or((target, ""));
            let file = match file {
                "" => page.to_owned(),
                file => format!("{}/{file}", page.rsplit_once('/').map_or(".", |(folder, _)| folder)),
            };
            let path = root().join(&file);
            assert!(path.exists(), "{page}: {target}");
            let headings = || outside_code(&read(&file));
            let leads = |text: &str| text.lines().any(|line| line.starts_with('#') && anchor(line) == heading);
            assert!(heading.is_empty() || !file.ends_with(".md") || leads(&headings()), "{page}: {target}");
        }
        let prose: String = text.split('`').step_by(2).collect();
        let used: BTreeSet<_> = prose.split("][").skip(1).filter_map(|rest| rest.split(']').next()).collect();
        assert_eq!(used, named.iter().map(|(name, _)| *name).collect(), "{page}: names of links");
    }
}

/// A code host knows no modules, and shows the lines of a program that rustdoc hides; rustdoc knows no files.
#[test]
fn a_page_of_two_homes_has_links_and_programs_that_both_can_show() {
    let shared = read("src/guide/rustdoc_links.md");
    let mut seen = 0;
    for page in pages_of_two_homes() {
        let text = read(page);
        assert!(!text.contains("](crate::") && !text.contains("]: crate::"), "{page}: a link to a module");
        for (at, line) in text.split("\n```").skip(1).step_by(2).flat_map(str::lines).enumerate() {
            let hidden = line == "#" || line.starts_with("# ") || line.starts_with("##");
            assert!(!hidden, "{page}: {line:?} is hidden by rustdoc, in line {at} of its programs");
        }
        let prose = outside_code(&text);
        for target in prose.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target) {
            assert!(target.starts_with('#') || target.starts_with("http"), "{page}: expected a name for {target}");
        }
        // Plain brackets, such as those of a type's name, are no link on a code host.
        assert!(!prose.split("[`").skip(1).any(ends_without_target), "{page}: [`...`] without a target");
        let module = if page.starts_with("src/guide") {
            read("src/guide.rs")
        } else {
            read(&format!("{}.rs", page.rsplit_once('/').expect("a folder").0))
        };
        assert!(module.contains("guide/rustdoc_links.md"), "{page}");
        for (name, _) in definitions(&prose).filter(|(_, target)| !target.ends_with(".svg")) {
            let definition = format!("[{name}]: ");
            assert!(shared.contains(&definition) || module.contains(&definition), "{page}: {definition}for rustdoc");
            seen += 1;
        }
    }
    assert!(seen > 40, "{seen} names");
}

fn ends_without_target(rest: &str) -> bool {
    rest.split_once(']').is_some_and(|(_, after)| !after.starts_with(['(', '[']))
}

/// `[name]: target`, each on a line of its own.
fn definitions(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines().filter_map(|line| line.strip_prefix('[')?.split_once("]: "))
}

/// A page has one home. These are read in the repository, so they have nothing that only rustdoc understands.
#[test]
fn what_is_read_in_the_repository_has_no_links_and_no_hidden_lines_of_rustdoc() {
    for page in PAGES {
        let text = read(page);
        for of_rustdoc in ["](crate::", "](tollgate", "[crate::", "]: crate::"] {
            assert!(!text.contains(of_rustdoc), "{page}: {of_rustdoc}");
        }
        for block in text.split("\n```").skip(1).step_by(2) {
            let (language, code) = block.split_once('\n').unwrap_or_default();
            let is_rust = language.is_empty() || language.starts_with("rust") || language.starts_with("no_run");
            assert!(!is_rust || code.lines().all(|line| line != "#" && !line.starts_with("# ")), "{page}: {block}");
        }
    }
}

/// The first definition of a link counts.
#[test]
fn each_link_of_a_page_that_is_documentation_too_has_a_place_there() {
    let mut seen = 0;
    for (file, folder) in [("src/lib.rs", "src"), ("crates/record/src/lib.rs", "crates/record/src")] {
        let code = read(file);
        let mut before = BTreeSet::new();
        for line in code.lines().map(str::trim) {
            if let Some(page) =
                line.strip_prefix("#[doc = include_str!(\"operations").and_then(|page| page.strip_suffix("\")]"))
            {
                let text = read(&format!("{folder}/operations{page}"));
                let named: BTreeSet<_> = definitions(&text).map(|(name, _)| name.to_owned()).collect();
                assert_eq!(before, named, "{file}: names before operations{page}");
                seen += 1;
            }
            let name = line.strip_prefix("/// [").and_then(|rest| rest.split_once("]: "));
            match name {
                Some((name, _)) => drop(before.insert(name.to_owned())),
                None if line == "///" => {}
                None => before.clear(),
            }
        }
    }
    assert_eq!(seen, 7);
}

fn outside_code(text: &str) -> String {
    text.split("\n```").step_by(2).collect::<Vec<_>>().join("\n")
}

#[test]
fn every_algorithm_is_named_where_one_is_chosen() {
    for page in ["README.md", "src/guide.md", "src/guide/algorithms.md", "crates/cli/src/rule_arguments.rs"] {
        let text = read(page);
        for rule in Algorithm::all().map(five_of) {
            let name = rule.split(' ').next().expect("a name");
            assert!(text.contains(&format!("{name} ")), "{page}: expected a rule of {name}");
        }
    }
}

/// README is one page; what grows goes elsewhere.
#[test]
fn readme_has_at_most_190_lines() {
    let lines = read("README.md").lines().count();
    assert!(lines <= 190, "{lines}");
}

/// In place of badges, which would need a host: the same, held here.
#[test]
fn readme_begins_with_what_the_manifest_and_the_changelog_say() {
    let manifest = read("Cargo.toml");
    let value = |name: &str| {
        let line = manifest.lines().find_map(|line| line.strip_prefix(&format!("{name} = \"")));
        line.and_then(|rest| rest.strip_suffix('"')).unwrap_or_else(|| panic!("Cargo.toml: {name}"))
    };
    let licence = value("license").replace(" OR ", " or ").replace("Apache-2.0", "Apache 2.0");
    let readme = read("README.md");
    let line = readme.lines().find(|line| line.starts_with("Rust ")).expect("a line");
    let said: Vec<_> = line.split(" · ").collect();
    assert_eq!(said[0], format!("Rust {} or newer", value("rust-version")));
    assert!(said.contains(&licence.as_str()), "{line}: {licence}");
    let changelog = read("CHANGELOG.md");
    let released = changelog.lines().any(|line| line.starts_with("## ") && !line.ends_with("(unreleased)"));
    assert_eq!(said.contains(&"not released yet"), !released, "{line}");
}
