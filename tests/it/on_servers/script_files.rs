//! The files of the scripts: what a header says, its body does and Rust sends.

use std::collections::BTreeSet;

use tollgate::redis::{Value, cmd, from_redis_value};
use tollgate::{Algorithm, Limiter, Redis, Request, Rule, Script};
use tollgate_testing::acl::least;
use tollgate_testing::engines::time;
use tollgate_testing::redis_server::Server;
use tollgate_testing::repository::{read, stems};
use tollgate_testing::rules::by_own_id;
use tollgate_testing::scripts::composed;

/// What decides by the scripts of the algorithms, whose text comes before it.
const COMPOSED: &str = "all_or_nothing";

/// What comes before an algorithm's file in its script, and after it.
const SHARED: [&str; 2] = ["arguments", "frame"];

/// What follows the limit's own arguments, in every script.
const LAST: [&str; 3] = ["cost", "mode", "now_us"];

/// Words in capitals that are no commands.
const OTHERS: [&str; 7] = ["PX", "PXAT", "BYSCORE", "LIMIT", "REV", "WITHSCORES", "STALE"];

/// A file, cut at the end of its header.
struct File {
    name: String,
    header: Vec<String>,
    body: Vec<String>,
}

impl File {
    fn of(name: &str) -> Self {
        let text = read(&format!("lua/{name}.lua"));
        let lines: Vec<_> = text.lines().map(str::to_owned).collect();
        let end = lines.iter().position(|line| !line.starts_with("--")).expect("a body after the header");
        let (header, body) = lines.split_at(end);
        Self { name: name.to_owned(), header: header.to_vec(), body: body.to_vec() }
    }

    fn titles(&self) -> Vec<&str> {
        self.header.windows(2).filter(|pair| pair[0] == "--").map(|pair| &pair[1][3..]).collect()
    }

    /// The lines of a section, without its title.
    fn section(&self, title: &str) -> Vec<&str> {
        let lines = self.header.iter().skip_while(|line| line.strip_prefix("-- ") != Some(title));
        lines.skip(1).take_while(|line| *line != "--").map(|line| line[2..].trim()).collect()
    }

    /// The names that are numbered in a section, from this number on and without a gap.
    fn numbered(&self, title: &str, before: &str, from: usize) -> Vec<&str> {
        let lines = self.section(title).into_iter().filter(|line| line.starts_with(&format!("{before}[")));
        let mut names = Vec::new();
        for (number, line) in (from..).zip(lines) {
            let mut words = line.split_whitespace();
            assert_eq!(words.next(), Some(format!("{before}[{number}]").as_str()), "{}", self.name);
            names.push(words.next().unwrap_or_else(|| panic!("{}: {line}", self.name)));
        }
        names
    }

    /// The limit's own arguments.
    fn own(&self) -> Vec<&str> {
        self.numbered("ARGV, before cost, mode and now_us", "ARGV", 1)
    }

    /// Whether it has the form that decides many keys at once.
    fn packs(&self) -> bool {
        self.section("ARGV, before cost, mode and now_us").iter().any(|line| line.starts_with("packed: "))
    }

    fn listed(&self) -> BTreeSet<String> {
        let words = self.section("Commands").join(" ");
        words.split(|c: char| !c.is_alphabetic()).filter(|word| is_upper(word)).map(str::to_owned).collect()
    }

    /// Whatever stands between two quotes, or between what one ends and the next begins.
    fn called(&self) -> BTreeSet<String> {
        let quoted = self.body.iter().flat_map(|line| line.split('\'').skip(1));
        quoted.filter(|word| is_upper(word) && !OTHERS.contains(word)).map(str::to_owned).collect()
    }
}

fn algorithms() -> impl Iterator<Item = File> {
    Algorithm::all().map(|algorithm| File::of(algorithm.script().name()))
}

/// Of each script what it may call: as its algorithm's file lists it or, where that doesn't, the frame's.
fn may_call() -> BTreeSet<String> {
    algorithms().flat_map(|file| file.listed()).chain(File::of("frame").listed()).collect()
}

fn is_upper(word: &str) -> bool {
    !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_uppercase())
}

#[test]
fn every_file_opens_with_its_sections_in_the_same_order() {
    let (all, last) = (["KEYS", "ARGV", "Reply"], ["Commands", "Expiry", "A deny writes"]);
    assert_eq!(File::of("arguments").titles(), all[..2]);
    assert_eq!(File::of("frame").titles(), [&all[2..], &["Modes"], &last].concat());
    let composed = File::of(COMPOSED);
    assert!(composed.header[0].starts_with(&format!("-- {COMPOSED}: ")), "{}", composed.header[0]);
    assert_eq!(composed.titles(), [&all[..], &["Formula", "Source"], &last].concat());
    assert!(read("lua/README.md").contains(&format!("`{COMPOSED}` decides ")), "lua/README.md");
    for file in algorithms() {
        let name = &file.name;
        assert!(file.header[0].starts_with(&format!("-- {name}: ")), "{name}: {}", file.header[0]);
        let own = ["ARGV, before cost, mode and now_us", "Reply of inspect", "Formula", "Source"];
        let titles = file.titles();
        assert_eq!(titles[..4], own, "{name}");
        // What differs from the frame's.
        let places = titles[4..].iter().map(|title| last.iter().position(|known| known == title));
        assert!(places.clone().all(|place| place.is_some()) && places.is_sorted(), "{name}: {titles:?}");
    }
}

#[test]
fn the_composed_script_defers_every_write_of_an_algorithm() {
    let reads = ["TIME", "GET", "GETRANGE", "MGET", "STRLEN", "EXISTS", "PTTL", "ZRANGE", "ZCOUNT", "ZSCORE"];
    let text = File::of(COMPOSED).body.join("\n");
    let held: BTreeSet<_> = text.split("command == '").skip(1).filter_map(|rest| rest.split('\'').next()).collect();
    let mut expected = may_call();
    expected.retain(|word| !reads.contains(&word.as_str()));
    let held: BTreeSet<_> = held.into_iter().filter(|word| *word != "TIME").map(str::to_owned).collect();
    assert_eq!(held, expected);
    assert!(text.contains("if command == 'TIME' and clock then return clock end") && text.contains("clock = reply"));
}

#[test]
fn every_file_names_its_arguments_as_its_header_does() {
    for file in algorithms() {
        let body = file.body.join("\n");
        assert!(body.contains(&format!("'{}'", file.own().join(", "))), "{}", file.name);
        assert!(body.contains(&format!("'{}', '", file.name)), "{}: its own name", file.name);
    }
}

/// What a cluster's node is sent before an algorithm's script, and says what the script may do.
#[test]
fn what_decides_across_slots_says_so_in_its_first_line_and_calls_what_the_scripts_do() {
    let text = read("lua/across_slots.lua");
    let (first, rest) = text.split_once('\n').expect("lines");
    assert_eq!(first, "#!lua flags=allow-cross-slot-keys");
    let (header, body) = rest.split_at(rest.find("\n\n").expect("a body"));
    assert!(header.lines().all(|line| line.starts_with("--")), "{header}");
    let titles: Vec<_> = header.split("\n--\n-- ").skip(1).filter_map(|section| section.lines().next()).collect();
    assert_eq!(titles, ["KEYS", "ARGV", "Reply", "Commands"]);
    let called = body.split('\'').skip(1).step_by(2).filter(|word| is_upper(word));
    assert!(called.map(str::to_owned).collect::<BTreeSet<_>>().is_subset(&may_call()));
    assert!(body.contains("return call('TIME')"), "an error names the command");
    assert!(read("lua/README.md").contains("across_slots"), "lua/README.md");
}

/// Redis 7.0 says on which line of a script it refused a command, not which command that was.
#[test]
fn every_line_of_a_script_names_the_one_command_that_it_calls() {
    for File { name, body, .. } in algorithms().chain(SHARED.map(File::of)) {
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
fn every_command_that_is_listed_is_called_and_no_other() {
    let shared: BTreeSet<_> = SHARED.iter().flat_map(|name| File::of(name).called()).collect();
    let mut called = shared.clone();
    for file in algorithms() {
        let own = file.called();
        if file.section("Commands").is_empty() {
            called.extend(own);
        } else {
            let either: BTreeSet<_> = own.union(&shared).cloned().collect();
            assert!(own.is_subset(&file.listed()) && file.listed().is_subset(&either), "{}: {own:?}", file.name);
        }
    }
    assert_eq!(called, File::of("frame").listed());
}

#[test]
fn the_least_rights_are_exactly_the_commands_of_the_scripts_and_their_callers() {
    // The last is sent by clients in other languages.
    let callers = ["EVALSHA", "EVALSHA_RO", "EVAL", "EVAL_RO", "SCRIPT|LOAD"].map(str::to_owned);
    let expected: BTreeSet<_> = may_call().into_iter().chain(callers).collect();
    let rights = least();
    let allowed = rights.iter().filter_map(|right| right.strip_prefix('+')).map(str::to_uppercase);
    assert_eq!(allowed.collect::<BTreeSet<_>>(), expected);
}

#[test]
fn every_header_names_the_state_as_rust_does() {
    let frame = File::of("frame");
    let five = ["[1] allowed", "[2] limit", "[3] remaining", "[4] retry_after_us", "[5] reset_after_us"];
    let reply = frame.section("Reply");
    assert!(five.iter().zip(&reply).all(|(expected, line)| line.starts_with(expected)), "{reply:?}");
    for (algorithm, file) in Algorithm::all().zip(algorithms()) {
        let state = file.numbered("Reply of inspect", "", 7);
        assert_eq!([state.as_slice(), &["blocked_us", "overage"]].concat(), algorithm.state_fields(), "{}", file.name);
    }
}

#[test]
fn scripts_stay_plain_lua_that_any_client_can_call() {
    for file in algorithms().chain(["arguments", "frame", COMPOSED].map(File::of)) {
        let whole = file.body.join("\n");
        assert!(!file.header[0].starts_with("#!"), "{}", file.name);
        for library in ["cjson", "cmsgpack", "require"] {
            assert!(!whole.contains(library), "{}: {library}", file.name);
        }
    }
    for script in Algorithm::all().map(Algorithm::script) {
        assert_eq!(script.text().matches("redis.call('TIME')").count(), 1, "{}", script.name());
    }
}

#[tokio::test]
async fn rust_sends_the_arguments_that_the_header_lists() {
    let server = Server::with(&["--slowlog-log-slower-than", "0"]);
    let limiter = Limiter::new(Redis::open(&server.url()).expect("a good address"));
    let mut redis = server.connection();
    for (algorithm, file) in Algorithm::all().zip(algorithms()) {
        let name = &file.name;
        let rule = tollgate_testing::rules::rule(tollgate_testing::rules::five_of(algorithm));
        let request = Request::new("key").cost(3).at(time(1 << 50));
        let request = by_own_id(&rule, request);
        limiter.at_most(&rule, request).await.expect("a decision");
        let sent: Vec<_> =
            last_sent(&mut redis).into_iter().map(|word| String::from_utf8(word).expect("text")).collect();
        let (own, last) = sent[4..].split_at(sent.len() - 7);
        assert_eq!(own.len(), file.own().len(), "{name}: {sent:?}");
        assert_eq!(last, ["3", "at-most", "1125899906842624"], "{name}");

        // The text alone, as a caller in another language would send it.
        let (key, now) = (&sent[3], &last[2]);
        let mut call = cmd("EVAL_RO");
        call.arg(algorithm.script().text()).arg(1).arg(key).arg(own);
        let reply: Vec<i64> = call.clone().arg(&["1", "inspect", now]).query(&mut redis).expect("a reply");
        assert_eq!(reply.len(), 6 + algorithm.state_fields().len(), "{name}: {reply:?}");
        call.arg(&["1", "inspect"]).query::<Vec<i64>>(&mut redis).expect_err("an argument is missing");

        // The packed form has the same arguments.
        limiter.acquire(&rule, request).await.expect("a decision");
        let packed = last_sent(&mut redis).split_off(4);
        if file.packs() {
            let [numbers, at] = packed.as_slice() else { panic!("{name}: {packed:?}") };
            let first: u64 = own[0].parse().expect("a number");
            assert!(numbers[1..8] == first.to_le_bytes()[..7], "{name}: {packed:?}");
            assert!(numbers.ends_with(&[3, 0, 0, 0, 0, 0, 0]) && at == now.as_bytes(), "{name}: {packed:?}");
        } else {
            assert_eq!(packed.len(), file.own().len() + LAST.len(), "{name}: {packed:?}");
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
fn only_algorithms_have_a_script_and_a_vectors_file_and_each_has_both() {
    let mut expected: BTreeSet<_> = Algorithm::all().map(|algorithm| algorithm.script().name().to_owned()).collect();
    assert_eq!(stems("tests/vectors", "json"), expected);
    expected.insert(COMPOSED.to_owned());
    assert_eq!(Script::all().map(|script| script.name().to_owned()).collect::<BTreeSet<_>>(), expected);
    expected.extend(["across_slots", "arguments", "frame"].map(str::to_owned));
    assert_eq!(stems("lua", "lua"), expected);
    for algorithm in Algorithm::all() {
        let script = algorithm.script();
        let whole = ["arguments", script.name(), "frame"].map(|name| read(&format!("lua/{name}.lua"))).concat();
        assert_eq!(script.text(), whole, "{}", script.name());
    }
    let text = composed(COMPOSED);
    for shared in SHARED.map(|name| read(&format!("lua/{name}.lua"))) {
        assert_eq!(text.matches(&shared).count(), 1);
    }
    assert!(text.ends_with(&read(&format!("lua/{COMPOSED}.lua"))));
}

#[test]
fn no_six_lines_stand_in_two_files() {
    let mut seen = std::collections::BTreeMap::new();
    for name in stems("lua", "lua") {
        let text = read(&format!("lua/{name}.lua"));
        let lines: Vec<_> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        for six in lines.windows(6) {
            let before = seen.insert(six.join("\n"), name.clone());
            assert!(before.as_ref().is_none_or(|before| *before == name), "{before:?} and {name}:\n{}", six.join("\n"));
        }
    }
}

/// What contract 1 promises of arguments and replies. A change of what stands here is another contract
/// (`Script::CONTRACT`), unless it only adds a script or a mode.
#[test]
fn arguments_and_replies_are_those_of_the_contract() {
    assert_eq!(Script::CONTRACT, 1);
    let expected = [
        "token_bucket capacity rate period tick max_debt / BI7I7I7I3I7I7",
        "fixed_window capacity rate period start max_debt / BI7I7I7i7I7I7",
        "calendar_window limit first second stop / BI7i7i7i7I7",
        "sliding_window_counter limit period tick / BI7I7I3I7",
        "sliding_window_log limit period / BI7I7I7",
        "concurrency limit ttl holder",
    ];
    let found = algorithms().map(|file| {
        let packed = file.body.iter().find_map(|line| line.split("struct.unpack('<B").nth(1)?.split('\'').next());
        let packed = packed.map(|format| format!(" / B{format}")).unwrap_or_default();
        format!("{} {}{packed}", file.name, file.own().join(" "))
    });
    assert_eq!(found.collect::<Vec<_>>(), expected);
    let frame = File::of("frame");
    let names = |line: &&str| line.split("  ").next().unwrap_or_default().to_owned();
    let reply: Vec<_> = frame.section("Reply").iter().map(names).collect();
    let expected = [
        "[1] allowed",
        "[2] limit",
        "[3] remaining",
        "[4] retry_after_us",
        "[5] reset_after_us",
        "at-most appends:",
        "[6] granted",
        "inspect appends:",
        "[6] ttl_ms",
        "[7] ...",
        "then, if the key is blocked, even by this call, or with +overage:",
        "blocked_us",
        "overage",
    ];
    assert_eq!(reply[..expected.len()], expected);
    let call = File::of(COMPOSED).section("ARGV").join("\n");
    for last in ["id_ttl  ms", "cost    units", "mode    -", "now_us  us"] {
        assert!(call.contains(last), "{last}");
    }
}

#[test]
fn the_scripts_readme_lists_every_script_with_its_arguments_and_every_mode() {
    let readme = read("lua/README.md");
    for file in algorithms() {
        let (name, own) = (&file.name, file.own().join(" "));
        let row = |line: &&str| line.starts_with(&format!("| `{name}` |")) && line.contains(&format!("`{own}`"));
        let line = readme.lines().find(row).unwrap_or_else(|| panic!("lua/README.md: no row for {name} with {own}"));
        let rule: Rule = line.split('`').nth(3).expect("a rule").parse().expect("a good rule");
        let scripts: Vec<_> = rule.limits().map(|limit| limit.algorithm().script().name()).collect();
        assert_eq!(scripts, [name], "{line}");
    }
    assert!(!readme.contains("](crate::"), "lua/README.md is read as a file");
    let modes = ["acquire", "peek", "reserve", "at-most", "refund", "penalty", "block", "reset", "inspect"];
    for mode in modes.into_iter().chain(["renew", "release", "settle", "cancel"]) {
        assert!(readme.contains(&format!("| `{mode}` |")), "lua/README.md: {mode}");
    }
}
