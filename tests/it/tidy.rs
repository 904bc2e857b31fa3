//! The repository's own rules, read from its files: a script's header says what its body does and what Rust sends,
//! the core stays a core, features only add, and every algorithm comes with all that belongs to it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use tollgate::redis::{Value, cmd, from_redis_value};
use tollgate::{Algorithm, Limiter, Redis, Request};

use crate::permissions::least;
use crate::rule::by_own_id;
use crate::server::Server;
use crate::subject::time;

const SECTIONS: [&str; 8] = ["KEYS", "ARGV", "Reply", "Formula", "Source", "Commands", "Expiry", "A deny writes"];

/// What decides by the scripts of the algorithms, whose text comes before it.
const COMPOSED: [&str; 2] = ["all_or_nothing", "two_choices"];

/// What follows the limit's own arguments, in every script.
const LAST: [&str; 3] = ["cost", "mode", "now_us"];

#[test]
fn every_script_opens_with_the_same_sections_in_the_same_order() {
    for Text { name, header, .. } in scripts() {
        assert!(header[0].starts_with(&format!("-- {name}: ")), "{name}: {}", header[0]);
        let titles: Vec<_> = header.windows(2).filter(|pair| pair[0] == "--").map(|pair| &pair[1][3..]).collect();
        assert_eq!(titles, SECTIONS, "{name}");
    }
}

#[test]
fn what_is_composed_opens_like_the_scripts_and_holds_back_every_write_of_theirs() {
    let commands = scripts().flat_map(|text| text.section("Commands")).collect::<Vec<_>>().join(" ");
    let called: BTreeSet<_> = commands.split(|c: char| !c.is_alphabetic()).filter(|word| is_upper(word)).collect();
    let reads = ["TIME", "GET", "GETRANGE", "MGET", "STRLEN", "EXISTS", "PTTL", "ZRANGE", "ZCOUNT", "ZSCORE"];
    for name in COMPOSED {
        let text = read(&format!("lua/{name}.lua"));
        let header: Vec<_> = text.lines().take_while(|line| line.starts_with("--")).collect();
        assert!(header[0].starts_with(&format!("-- {name}: ")), "{name}: {}", header[0]);
        let titles: Vec<_> = header.windows(2).filter(|pair| pair[0] == "--").map(|pair| &pair[1][3..]).collect();
        assert_eq!(titles, SECTIONS, "{name}");
        let held: BTreeSet<_> = text.split("command == '").skip(1).filter_map(|rest| rest.split('\'').next()).collect();
        let expected: BTreeSet<_> = called.iter().copied().filter(|word| !reads.contains(word)).collect();
        let held: BTreeSet<_> = held.into_iter().filter(|word| *word != "TIME").collect();
        assert_eq!(held, expected, "{name}");
        assert!(read("lua/README.md").contains(&format!("`{name}` decides ")), "lua/README.md: {name}");
        let once = "if command == 'TIME' and clock then return clock end";
        assert!(text.contains(once) && text.contains("clock = reply"), "{name}: TIME is called once");
    }
}

#[test]
fn every_script_binds_each_key_and_argument_once_and_first() {
    for text in scripts() {
        let (name, arguments) = (text.name, text.arguments());
        assert_eq!(arguments[arguments.len() - 3..], LAST, "{name}");
        let uses = |lines: &[&str], of: &str| lines.iter().map(|line| line.matches(of).count()).sum::<usize>();
        let mut paragraphs = text.body.split(|line| line.is_empty()).skip_while(|lines| lines.is_empty());
        let binding = paragraphs.next().expect("a binding");
        // What is missing or no number is looked for again, to be named.
        let named = paragraphs.next().expect("what is missing");
        // The packed form's arguments, then the others.
        let (packed, others) = binding.split_at(binding.iter().position(|line| *line == "else").unwrap_or(0));
        for (lines, count) in [(packed, if text.packs() { 3 } else { 0 }), (others, arguments.len())] {
            for number in 1..=count {
                let names: usize = lines.iter().map(|line| uses(&[*line], &format!("ARGV[{number}]")).min(1)).sum();
                assert_eq!(names, 1, "{name}: ARGV[{number}]");
            }
            assert_eq!(uses(lines, &format!("ARGV[{}]", count + 1)), 0, "{name}: an argument its header doesn't have");
        }
        let expected = format!("expected, fault, at = '{}'", arguments.join(", "));
        assert!(named.iter().any(|line| line.contains(&expected)), "{name}: {expected}");
        assert_eq!(uses(&text.body, "ARGV["), uses(binding, "ARGV[") + uses(named, "ARGV["), "{name}: named again");
        assert_eq!(uses(&text.body, "KEYS["), 1 + uses(&text.body, "'missing KEYS[1]'"), "{name}");
    }
}

/// Redis 7.0 says on which line of a script it refused a command, not which command that was.
#[test]
fn every_line_of_a_script_names_the_one_command_that_it_calls() {
    for Text { name, body, .. } in scripts() {
        for line in body {
            let calls: Vec<_> =
                ["redis.call(", "redis.pcall("].iter().flat_map(|call| line.split(call).skip(1)).collect();
            assert!(calls.len() <= 1, "{name}: {line}");
            let named =
                |call: &&str| call.strip_prefix('\'').and_then(|rest| rest.split('\'').next()).is_some_and(is_upper);
            assert!(calls.iter().all(named), "{name}: {line}");
        }
    }
}

#[test]
fn every_header_lists_the_commands_that_its_body_calls() {
    for text in scripts() {
        let options = ["PX", "PXAT", "BYSCORE", "LIMIT", "REV", "WITHSCORES"];
        // Whatever stands between two quotes, or between what one ends and the next begins.
        let quoted = text.body.iter().flat_map(|line| line.split('\'').skip(1));
        let called: BTreeSet<_> = quoted.filter(|word| is_upper(word) && !options.contains(word)).collect();
        let listed: String = text.section("Commands").join(" ");
        let listed: BTreeSet<_> = listed.split(|c: char| !c.is_alphabetic()).filter(|word| is_upper(word)).collect();
        assert_eq!(called, listed, "{}", text.name);
    }
}

#[test]
fn the_smallest_user_may_call_the_scripts_and_what_they_call() {
    let callers = ["EVALSHA", "EVALSHA_RO", "EVAL", "EVAL_RO"].map(str::to_owned);
    let listed = scripts().flat_map(|text| {
        let words = text.section("Commands").join(" ");
        let words: Vec<_> = words.split(|c: char| !c.is_alphabetic()).map(str::to_owned).collect();
        words.into_iter().filter(|word| is_upper(word))
    });
    let expected: BTreeSet<_> = listed.chain(callers).collect();
    let rights = least();
    let allowed = rights.iter().filter_map(|right| right.strip_prefix('+')).map(str::to_uppercase);
    assert_eq!(allowed.collect::<BTreeSet<_>>(), expected);
}

#[test]
fn every_header_names_the_state_as_rust_does() {
    for (algorithm, text) in Algorithm::all().zip(scripts()) {
        let reply = text.reply();
        let five = ["allowed", "limit", "remaining", "retry_after_us", "reset_after_us"];
        assert_eq!(reply[..5], five, "{}", text.name);
        assert_eq!(reply[5], "ttl_ms", "{}", text.name);
        assert_eq!(reply[6..], *algorithm.state_fields(), "{}", text.name);
    }
}

#[test]
fn scripts_stay_plain_lua_that_any_client_can_call() {
    for text in scripts() {
        let whole = text.body.join("\n");
        assert!(!text.header[0].starts_with("#!"), "{}", text.name);
        for library in ["cjson", "cmsgpack", "require"] {
            assert!(!whole.contains(library), "{}: {library}", text.name);
        }
        // An error is the caller's to know, but where one of several keys can't be read.
        let caught = whole.matches("redis.pcall").count();
        let reads = ["redis.pcall('GET', key)", "redis.pcall('GETRANGE', key, '0', '263')"];
        assert_eq!(caught, reads.map(|read| whole.matches(read).count()).iter().sum::<usize>(), "{}", text.name);
        assert!(whole.matches("'TIME'").count() <= 1, "{}: TIME is called once", text.name);
    }
}

#[tokio::test]
async fn rust_sends_the_arguments_that_the_header_lists() {
    let server = Server::with(&["--slowlog-log-slower-than", "0"]);
    let limiter = Limiter::new(Redis::open(&server.url()).expect("a good address"));
    let mut redis = server.connection();
    for (algorithm, text) in Algorithm::all().zip(scripts()) {
        let rule = crate::rule::rule(crate::rule::five_of(algorithm));
        let request = Request::new("key").cost(3).at(time(1 << 50));
        let request = by_own_id(&rule, request);
        limiter.at_most(&rule, request).await.expect("a decision");
        let sent: Vec<_> =
            last_sent(&mut redis).into_iter().map(|word| String::from_utf8(word).expect("text")).collect();
        let (own, last) = sent[4..].split_at(sent.len() - 7);
        assert_eq!(sent.len() - 4, text.arguments().len(), "{}: {sent:?}", text.name);
        assert_eq!(last, ["3", "at-most", "1125899906842624"], "{}", text.name);

        // The text alone, as a caller in another language would send it.
        let (key, now) = (&sent[3], &last[2]);
        let mut call = cmd("EVAL_RO");
        call.arg(algorithm.script().text()).arg(1).arg(key).arg(own);
        let reply: Vec<i64> = call.clone().arg(&["1", "inspect", now]).query(&mut redis).expect("a reply");
        assert_eq!(reply.len(), text.reply().len(), "{}: {reply:?}", text.name);
        call.arg(&["1", "inspect"]).query::<Vec<i64>>(&mut redis).expect_err("an argument is missing");

        // The packed form is told the same, in the bytes that the state ends with.
        limiter.acquire(&rule, request).await.expect("a decision");
        let packed = last_sent(&mut redis).split_off(4);
        if text.packs() {
            let state: Vec<u8> = cmd("GET").arg(key).query(&mut redis).expect("a state");
            let [numbers, at] = packed.as_slice() else { panic!("{}: {packed:?}", text.name) };
            assert!(numbers.len() > 12 && state.windows(12).any(|part| *part == numbers[..12]), "{}", text.name);
            assert!(numbers.ends_with(&[3, 0, 0, 0, 0, 0, 0]) && at == now.as_bytes(), "{}: {packed:?}", text.name);
        } else {
            assert_eq!(packed.len(), text.arguments().len(), "{}: {packed:?}", text.name);
        }
    }
}

/// The words of the last call of a script.
fn last_sent(redis: &mut tollgate::redis::Connection) -> Vec<Vec<u8>> {
    // The fourth of what an entry has, which is more on newer servers.
    let log: Vec<Vec<Value>> = cmd("SLOWLOG").arg("GET").query(redis).expect("a log");
    let mut words = log.into_iter().map(|mut entry| from_redis_value::<Vec<Vec<u8>>>(entry.remove(3)).expect("words"));
    // What a script calls in its turn is logged too.
    let call = words.find(|words| words[0].starts_with(b"EVAL"));
    call.expect("a script was called")
}

#[test]
fn every_algorithm_has_a_script_and_a_vectors_file_and_nobody_else_has() {
    let mut expected: BTreeSet<_> = Algorithm::all().map(|algorithm| algorithm.script().name().to_owned()).collect();
    assert_eq!(stems("tests/vectors", "json"), expected);
    expected.extend(COMPOSED.map(str::to_owned));
    assert_eq!(stems("lua", "lua"), expected);
    for algorithm in Algorithm::all() {
        let script = algorithm.script();
        assert_eq!(read(&format!("lua/{}.lua", script.name())), script.text());
    }
}

#[test]
fn the_scripts_readme_lists_every_script_with_its_arguments_and_every_mode() {
    let readme = read("lua/README.md");
    for text in scripts() {
        let (name, arguments) = (text.name, text.arguments());
        let own = arguments[..arguments.len() - LAST.len()].join(" ");
        let row = |line: &&str| line.starts_with(&format!("| `{name}` |")) && line.contains(&format!("`{own}`"));
        assert!(readme.lines().any(|line| row(&line)), "lua/README.md: no row for {name} with {own}");
        for mode in text.modes() {
            assert!(readme.contains(&format!("| `{mode}` |")), "lua/README.md: {mode} of {name}");
        }
    }
}

#[test]
fn the_core_does_no_io_and_names_no_feature_but_serde() {
    for name in ["algorithm", "batch", "decision", "error", "key", "limit", "quota", "request", "rule", "script"] {
        for file in rust_files(&format!("src/{name}")) {
            let text = read(&file);
            for word in
                ["tokio", "deadpool", "redis::", "mlua", "std::net", "std::fs", "crate::engine", "crate::limiter"]
            {
                assert!(!text.contains(word), "{file}: {word}");
            }
            let features = text.split("feature = \"").skip(1).filter(|rest| !rest.starts_with("serde\""));
            assert_eq!(features.count(), 0, "{file}: a feature that isn't serde");
        }
    }
}

#[test]
fn engines_know_neither_rules_nor_each_other() {
    let engines: Vec<_> = stems("src/engine", "rs").into_iter().collect();
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
fn each_fault_names_a_test_that_there_is() {
    let page = include_str!("../../src/operations.md");
    let rows = page.split("# Faults").nth(1).and_then(|rest| rest.split("\n# ").next()).expect("the faults");
    let mut named = 0;
    for test in rows.split('`').filter(|word| word.contains("::") && !word.contains(' ') && word.contains('_')) {
        let (module, name) = test.rsplit_once("::").expect("a module");
        if module == module.to_lowercase() && !module.starts_with("crate") {
            let file = format!("tests/it/{}.rs", module.replace("::", "/"));
            let text = std::fs::read_to_string(root().join(&file)).unwrap_or_else(|error| panic!("{file}: {error}"));
            assert!(text.contains(&format!("fn {name}(")), "{test}");
            named += 1;
        }
    }
    assert!(named > 30, "{named} tests");
}

#[test]
fn no_file_of_rust_grows_beyond_five_hundred_lines() {
    for file in rust_files("src").into_iter().chain(rust_files("tests/it")) {
        let lines = read(&file).lines().take_while(|line| *line != "#[cfg(test)]").count();
        assert!(lines <= 500, "{file}: {lines} lines before its tests");
    }
}

/// A script, cut at the end of its header.
struct Text {
    name: &'static str,
    header: Vec<&'static str>,
    body: Vec<&'static str>,
}

impl Text {
    /// The lines of a section, without its title.
    fn section(&self, title: &str) -> Vec<&'static str> {
        let lines = self.header.iter().copied().skip_while(|line| line.strip_prefix("-- ") != Some(title));
        lines.skip(1).take_while(|line| *line != "--").map(|line| line[2..].trim()).collect()
    }

    /// The arguments' names, numbered without a gap.
    fn arguments(&self) -> Vec<&'static str> {
        self.numbered("ARGV", "ARGV")
    }

    /// The reply's names, those that inspect appends included.
    fn reply(&self) -> Vec<&'static str> {
        self.numbered("Reply", "")
    }

    fn numbered(&self, section: &str, before: &str) -> Vec<&'static str> {
        // What another mode appends is numbered from the same place on.
        let mut inspects = true;
        let lines = self.section(section).into_iter().filter(|line| {
            if line.ends_with("appends:") {
                inspects = line.starts_with("inspect");
            }
            inspects && line.starts_with(&format!("{before}["))
        });
        let name = |(number, line): (usize, &'static str)| {
            let mut words = line.split_whitespace();
            assert_eq!(words.next(), Some(format!("{before}[{number}]").as_str()), "{}", self.name);
            words.next().unwrap_or_else(|| panic!("{}: {line}", self.name))
        };
        (1..).zip(lines).map(name).collect()
    }

    /// Whether it has the form that decides many keys at once.
    fn packs(&self) -> bool {
        self.section("ARGV").iter().any(|line| line.starts_with("packed"))
    }

    fn modes(&self) -> Vec<&'static str> {
        let arguments = self.section("ARGV");
        let line = arguments.iter().find(|line| line.split_whitespace().nth(1) == Some("mode")).expect("a mode");
        let modes = line.split_whitespace().skip(3).filter(|word| *word != "|");
        modes.collect()
    }
}

fn scripts() -> impl Iterator<Item = Text> {
    Algorithm::all().map(|algorithm| {
        let lines: Vec<_> = algorithm.script().text().lines().collect();
        let end = lines.iter().position(|line| !line.starts_with("--")).expect("a body after the header");
        let (header, body) = lines.split_at(end);
        Text { name: algorithm.script().name(), header: header.to_vec(), body: body.to_vec() }
    })
}

fn is_upper(word: &str) -> bool {
    !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_uppercase())
}

pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

pub(crate) fn read(file: &str) -> String {
    std::fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// The names of a folder's files with this ending.
fn stems(folder: &str, ending: &str) -> BTreeSet<String> {
    let files = files(folder).into_iter().filter(|path| path.extension().is_some_and(|found| found == ending));
    files.map(|path| path.file_stem().expect("a name").to_string_lossy().into_owned()).collect()
}

/// A module's file and those in its folder, or all of a folder's.
pub(crate) fn rust_files(module: &str) -> Vec<String> {
    let own = format!("{module}.rs");
    let mut found: Vec<_> = root().join(&own).exists().then_some(own).into_iter().collect();
    if root().join(module).is_dir() {
        for path in files(module) {
            let name = format!("{module}/{}", path.file_name().expect("a name").to_string_lossy());
            match name.strip_suffix(".rs") {
                Some(_) => found.push(name),
                None if path.is_dir() => found.extend(rust_files(&name)),
                None => {}
            }
        }
    }
    assert!(!found.is_empty(), "{module}: no such module");
    found
}

fn files(folder: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root().join(folder)).unwrap_or_else(|error| panic!("{folder}: {error}"));
    entries.map(|entry| entry.expect("an entry").path()).collect()
}
