//! No block of a page is left without a test, and no sentence names a command that isn't there.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use tollgate_testing::repository::{read, root};

use super::tool;

/// The pages that are documentation too, whose programs `cargo test --doc` runs.
const DOCTESTS: [&str; 5] =
    ["src/guide.rs", "src/lib.rs", "src/middleware.rs", "src/rules.rs", "crates/record/src/lib.rs"];

/// The tests of the other blocks, by page and by what the block is marked as.
const TESTS: &[(&str, &str, &str)] = &[
    ("README.md", "console", "examples/services/tests/it/pages/of_redis.rs"),
    ("README.md", "toml", "examples/services/tests/it/pages/of_redis.rs"),
    ("clients/README.md", "console", "tests/nightly.sh"),
    ("clients/README.md", "toml", "clients/python/tests/test_readme.py"),
    ("clients/go/README.md", "console", "clients/go/readme_test.go"),
    ("clients/go/README.md", "go", "clients/go/readme_test.go"),
    ("clients/go/README.md", "toml", "clients/go/readme_test.go"),
    ("clients/node/README.md", "console", "clients/test.sh"),
    ("clients/node/README.md", "js", "clients/node/tests/readme.test.mjs"),
    ("clients/node/README.md", "toml", "clients/node/tests/readme.test.mjs"),
    ("clients/python/README.md", "console", "clients/test.sh"),
    ("clients/python/README.md", "python", "clients/python/tests/test_readme.py"),
    ("clients/python/README.md", "toml", "clients/python/tests/test_readme.py"),
    ("crates/cli/README.md", "console", "examples/services/tests/it/pages/of_redis.rs"),
    ("crates/record/src/operations.md", "console", "examples/services/tests/it/pages/of_the_record.rs"),
    ("crates/record/src/operations.md", "python", "examples/services/tests/it/pages/of_the_record.rs"),
    ("crates/record/src/operations.md", "sql", "crates/record/tests/it/grants.rs"),
    ("crates/record/src/operations.md", "text", "examples/services/tests/it/pages/of_the_record.rs"),
    ("crates/record/src/operations/backup.md", "console", "examples/services/tests/it/pages/of_the_record.rs"),
    ("crates/record/src/operations/runbook.md", "console", "examples/services/tests/it/pages/of_the_record.rs"),
    ("crates/serve/README.md", "console", "crates/serve/tests/it/page.rs"),
    ("crates/serve/README.md", "json", "crates/serve/tests/it/page.rs"),
    ("crates/serve/README.md", "toml", "crates/serve/tests/it/page.rs"),
    ("examples/README.md", "console", "examples/services/tests/it/pages/examples.rs"),
    ("lua/README.md", "console", "examples/services/tests/it/pages/of_redis.rs"),
    ("lua/README.md", "python", "crates/cli/tests/it/on_servers/script_files.rs"),
    ("lua/README.md", "text", "crates/cli/tests/it/languages.rs"),
    ("lua/sharing.md", "console", "examples/services/tests/it/pages/of_redis.rs"),
    ("lua/sharing.md", "python", "crates/cli/tests/it/on_servers/script_files.rs"),
    ("lua/sharing.md", "text", "crates/cli/tests/it/sharing.rs"),
    ("src/guide.md", "console", "examples/services/tests/it/pages/of_redis.rs"),
    ("src/guide.md", "text", "crates/cli/tests/it/tool/suggest.rs"),
    ("src/guide/faq.md", "nginx", "tests/support/src/nginx.rs"),
    ("src/guide/faq.md", "toml", "tests/it/rules/optional_limits.rs"),
    ("src/guide/numbers.md", "console", "examples/services/tests/it/pages/of_redis.rs"),
    ("src/guide/numbers.md", "text", "crates/cli/tests/it/tool/suggest.rs"),
    ("src/guide/trace.md", "console", "examples/services/tests/it/pages/of_redis.rs"),
    ("src/operations.md", "console", "examples/services/tests/it/pages/of_redis.rs"),
    ("src/operations/backup.md", "console", "tests/backup_redis.sh"),
    ("src/operations/limits.md", "console", "examples/services/tests/it/pages/of_redis.rs"),
    ("src/operations/runbook.md", "console", "examples/services/tests/it/pages/of_redis.rs"),
    ("src/operations/runbook.md", "text", "examples/services/tests/it/pages/of_redis.rs"),
    ("src/rules/format.md", "console", "examples/services/tests/it/pages/of_redis.rs"),
    ("src/rules/format.md", "toml", "tests/it/rules/files.rs"),
];

/// The files below a folder with this ending; not what is built or fetched.
fn files(folder: &Path, ending: &str, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry")) {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        if path.is_dir() && !name.starts_with('.') && !["target", "node_modules"].contains(&&*name) {
            files(&path, ending, found);
        } else if name.ends_with(ending) {
            found.push(path);
        }
    }
}

/// Each page, with its text.
fn pages() -> Vec<(String, String)> {
    let mut found = Vec::new();
    files(root(), ".md", &mut found);
    assert!(found.len() > 25, "{found:?}");
    let name = |path: &PathBuf| path.strip_prefix(root()).expect("of the repository").display().to_string();
    found.iter().map(|path| (name(path), std::fs::read_to_string(path).expect("a page"))).collect()
}

#[test]
fn each_block_of_each_page_has_a_test() {
    let programs: String = DOCTESTS.map(read).concat();
    let mut tested = 0;
    for (page, text) in pages() {
        let marks = text.lines().filter_map(|line| line.trim_start().strip_prefix("```"));
        for mark in marks.step_by(2) {
            if mark.starts_with("rust") {
                // Their first page is included as `guide.md`, the next as `guide/faq.md`.
                let own = page.trim_start_matches("crates/record/").trim_start_matches("src/");
                let included = programs.contains(&format!("{own}\")"));
                assert!(included, "{page}: a program that no documentation includes");
            } else {
                let test = TESTS.iter().find(|(of, marked, _)| *of == page && *marked == mark);
                let (_, _, test) = test.unwrap_or_else(|| panic!("{page}: a block marked {mark:?} without a test"));
                // By whole name, or by the end of it for a test beside the page.
                assert!(root().join(test).exists(), "{test}: no such test");
            }
            tested += 1;
        }
    }
    assert!(tested > 100, "{tested}");
    assert!(
        read("tests/support/src/nginx.rs").contains("proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;")
    );
}

/// What a text has in backticks and begins so, without this.
fn spans<'a>(text: &'a str, begins: &'a str) -> impl Iterator<Item = String> + 'a {
    // Of blocks, which have three backticks, every second piece is code.
    let sentences = text.split("```").step_by(2).flat_map(|prose| prose.split('`').skip(1).step_by(2));
    sentences.filter_map(move |span| span.strip_prefix(begins)).map(|rest| rest.replace('\n', " "))
}

#[derive(Default)]
struct Help(BTreeMap<Vec<String>, String>);

impl Help {
    /// Of this command of the tool, if there is one.
    fn of(&mut self, command: &[String]) -> &str {
        self.0.entry(command.to_vec()).or_insert_with(|| {
            let mut tool = Command::new(tool());
            tool.args(command);
            if command.first().is_none_or(|command| command != "help") {
                tool.arg("--help");
            }
            let output = tool.output().expect("the tool runs");
            if output.status.success() { String::from_utf8(output.stdout).expect("UTF-8") } else { String::new() }
        })
    }
}

/// In sentences; what stands in blocks is run.
#[test]
fn each_command_and_option_that_a_sentence_names_is_the_tools() {
    let mut help = Help::default();
    let mut named = 0;
    for (page, text) in pages() {
        for span in spans(&text, "tollgate ") {
            let words: Vec<String> = span.split_whitespace().map(str::to_owned).collect();
            let is_name = |word: &&String| word.chars().all(|letter| letter.is_ascii_lowercase() || letter == '-');
            let mut command: Vec<String> = words.iter().take(2).take_while(is_name).cloned().collect();
            command.retain(|word| !word.starts_with('-'));
            if command.len() == 2 && command[0] != "help" && !help.of(&command[..1]).contains("\nCommands:") {
                command.pop();
            }
            assert!(!help.of(&command).is_empty(), "{page}: `tollgate {span}`: no such command");
            for option in words.iter().filter(|word| word.starts_with("--") && word.len() > 2) {
                let option = option.split(['=', ',', ';', '[']).next().unwrap_or_default();
                let listed = help.of(&command).split_whitespace().any(|word| word.trim_end_matches(',') == option);
                assert!(listed || option == "--help", "{page}: `tollgate {span}`: no option {option}");
            }
            named += 1;
        }
    }
    assert!(named > 50, "{named}");
}

#[test]
fn each_script_program_and_test_that_a_sentence_names_is_there() {
    let mut named = 0;
    for (page, text) in pages() {
        for span in spans(&text, "bash ") {
            let file = span.split_whitespace().next().unwrap_or_default();
            assert!(root().join(file).exists(), "{page}: `bash {span}`: no such file");
            named += 1;
        }
        for span in spans(&text, "cargo ") {
            let words: Vec<_> = span.split_whitespace().collect();
            let value =
                |option: &str| words.iter().position(|word| *word == option).and_then(|at| words.get(at + 1)).copied();
            let folder = match value("-p") {
                None | Some("tollgate") => "",
                Some("tollgate-record") => "crates/record/",
                Some("tollgate-cli") => "crates/cli/",
                Some("tollgate-examples") => "examples/services/",
                Some("tollgate-benches") => "benches/",
                Some(_) => continue,
            };
            if let Some(program) = value("--bin") {
                let file = root().join(format!("{folder}src/bin/{program}.rs"));
                assert!(file.exists(), "{page}: `cargo {span}`: no program {program}");
                named += 1;
            }
            if words[0] == "test" && value("--test") == Some("it") {
                let filter = *words.last().expect("words");
                let mut tests = Vec::new();
                files(&root().join(format!("{folder}tests/it")), ".rs", &mut tests);
                let is_it = |path: &PathBuf| path.display().to_string().contains(filter);
                let is_in = |path: &PathBuf| std::fs::read_to_string(path).is_ok_and(|code| code.contains(filter));
                let found = tests.iter().any(|path| is_it(path) || is_in(path));
                assert!(found || filter == "it", "{page}: `cargo {span}`: no test {filter}");
                named += 1;
            }
        }
    }
    assert!(named > 15, "{named}");
}
