//! The files of the scripts: what a header says, its body does and Rust sends.

use std::collections::BTreeSet;

use tollgate::redis::{Value, cmd, from_redis_value};
use tollgate::{Algorithm, Request, Rule, Script};
use tollgate_testing::acl::least;
use tollgate_testing::engines::time;
use tollgate_testing::redis_server::{Server, patient};
use tollgate_testing::repository::{read, stems};
use tollgate_testing::rules::by_own_id;

/// What comes before the algorithms' files in a script, and what after them.
const SHARED: [&str; 3] = ["arguments", "keys", "decide"];

/// Words in capitals that are no commands.
const OTHERS: [&str; 8] = ["PX", "PXAT", "KEEPTTL", "BYSCORE", "LIMIT", "REV", "WITHSCORES", "STALE"];

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

    /// The limit's own arguments.
    fn own(&self) -> Vec<&str> {
        let names = self.section("Numbers").into_iter().filter_map(|line| line.split_once("  ")).map(|(name, _)| name);
        names.filter(|name| name.chars().all(|character| character.is_alphanumeric() || character == '_')).collect()
    }

    /// How they are packed, after the algorithm's number: whether signed, and the width.
    fn packed(&self) -> Vec<(bool, usize)> {
        let line = self.section("Numbers").into_iter().find_map(|line| line.strip_prefix("packed: B"));
        let (format, _) = line.expect("how they are packed").split_once(':').expect("its end");
        let signs = format.chars().filter(char::is_ascii_alphabetic).map(|sign| sign == 'i');
        let widths = format.split(['I', 'i']).skip(1).map(|width| width.parse().expect("a width"));
        signs.zip(widths).collect()
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

/// What a script may call: as the file that decides lists it, and its algorithms' files.
fn may_call() -> BTreeSet<String> {
    algorithms().flat_map(|file| file.listed()).chain(File::of("decide").listed()).collect()
}

fn is_upper(word: &str) -> bool {
    !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_uppercase())
}

#[test]
fn every_file_opens_with_its_sections_in_the_same_order() {
    let decide = File::of("decide");
    let all = ["KEYS", "ARGV", "ARGV", "Reply", "Formula", "Source", "Commands", "Expiry", "A deny writes"];
    let titles: Vec<_> = decide.titles().into_iter().filter_map(|title| title.split(", ").next()).collect();
    assert_eq!(titles, all);
    for file in algorithms() {
        let name = &file.name;
        assert!(file.header[0].starts_with(&format!("-- {name}: ")), "{name}: {}", file.header[0]);
        let titles: Vec<_> = file.titles().into_iter().filter_map(|title| title.split("; ").next()).collect();
        assert_eq!(titles[..4], ["Numbers", "State", "Formula", "Source"], "{name}");
        // What it needs beside what all do.
        let places = titles[4..].iter().map(|title| ["Commands", "Expiry"].iter().position(|known| known == title));
        assert!(places.clone().all(|place| place.is_some()) && places.is_sorted(), "{name}: {titles:?}");
    }
}

#[test]
fn every_file_names_its_arguments_as_its_header_does() {
    for file in algorithms() {
        let body = file.body.join("\n");
        assert!(body.contains(&format!("'{}'", file.own().join(", "))), "{}", file.name);
        assert!(body.contains(&format!("name = '{}'", file.name)), "{}: its own name", file.name);
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
    assert!(read("lua/README.md").contains("across_slots"), "lua/README.md");
}

/// Redis 7.0 says on which line of a script it refused a command, not which command that was: whoever reads the line
/// takes the first one that stands there.
#[test]
fn every_line_of_a_script_names_the_one_command_that_it_calls() {
    for File { name, body, .. } in algorithms().chain(SHARED.map(File::of)) {
        for line in body {
            let calls: BTreeSet<_> = line
                .split("call('")
                .skip(1)
                .filter_map(|call| call.split('\'').next())
                .filter(|call| is_upper(call))
                .collect();
            // One key is read by GET where several are by MGET.
            assert!(calls.len() <= 1 || calls == BTreeSet::from(["GET", "MGET"]), "{name}: {line}");
        }
    }
}

#[test]
fn every_command_that_is_listed_is_called_and_no_other() {
    let shared: BTreeSet<_> = SHARED.iter().flat_map(|name| File::of(name).called()).collect();
    let decide = File::of("decide");
    assert_eq!(shared, decide.listed());
    for file in algorithms() {
        let (own, listed) = (file.called(), file.listed());
        let either: BTreeSet<_> = listed.union(&decide.listed()).cloned().collect();
        assert!(own.is_subset(&either) && listed.is_subset(&own), "{}: {own:?}", file.name);
    }
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
fn every_header_says_what_inspect_lists() {
    for (algorithm, file) in Algorithm::all().zip(algorithms()) {
        let listed = file.titles().into_iter().find_map(|title| title.strip_prefix("State; inspect lists "));
        let listed = listed.unwrap_or_else(|| panic!("{}: what inspect lists", file.name)).split(", ").count();
        // The last two are noted of any key.
        let (noted, own) = (["blocked_us", "overage"], algorithm.state_fields());
        assert!(own.ends_with(&noted), "{}: {own:?}", file.name);
        // "When the first and when the last of them expires" are two.
        assert!(own.len() - 2 == listed || algorithm.holds(), "{}: {own:?}", file.name);
    }
}

#[test]
fn scripts_stay_plain_lua_that_any_client_can_call() {
    for file in algorithms().chain(SHARED.map(File::of)) {
        let whole = file.body.join("\n");
        assert!(!file.header[0].starts_with("#!"), "{}", file.name);
        for library in ["cjson", "cmsgpack", "require"] {
            assert!(!whole.contains(library), "{}: {library}", file.name);
        }
    }
    for script in Algorithm::all().map(Algorithm::script) {
        assert_eq!(script.text().matches("call('TIME')").count(), 1, "{}", script.name());
    }
}

#[tokio::test]
async fn rust_sends_the_numbers_that_the_header_lists() {
    let server = Server::with(&["--slowlog-log-slower-than", "0"]);
    let limiter = patient(&server.url());
    let mut redis = server.connection();
    for (number, (algorithm, file)) in (1..).zip(Algorithm::all().zip(algorithms())) {
        let name = &file.name;
        let rule = tollgate_testing::rules::rule(tollgate_testing::rules::five_of(algorithm));
        let request = by_own_id(&rule, Request::new("key").cost(3).at(time(1 << 50)));
        limiter.at_most(&rule, request).await.expect("a decision");
        let sent = last_sent(&mut redis);
        let (key, shape, now) = (&sent[3], &sent[4], &sent[5]);
        assert_eq!((shape[0], now.as_slice()), (number, b"1125899906842624".as_slice()), "{name}");
        let mut own = Vec::new();
        let mut rest = &shape[1..];
        for (is_signed, width) in file.packed() {
            let (bytes, after) = rest.split_at(width);
            let mut number = [if is_signed && bytes[width - 1] > 0x7f { 0xff } else { 0 }; 8];
            number[..width].copy_from_slice(bytes);
            own.push(i64::from_le_bytes(number).to_string().into_bytes());
            rest = after;
        }
        assert_eq!(rest[0], 130, "{name}: at-most");
        // The holder is an argument of its own.
        own.extend(algorithm.holds().then(|| sent[7].clone()));
        assert_eq!(own.len(), file.own().len(), "{name}: {sent:?}");

        // The text form, as a caller in another language would send it.
        let mut call = cmd("EVAL_RO");
        call.arg(algorithm.script().text()).arg(1).arg(key).arg(own);
        let reply: Vec<i64> = call.clone().arg(&["1", "inspect"]).arg(now).query(&mut redis).expect("a reply");
        assert_eq!(reply.len(), 6 + algorithm.state_fields().len(), "{name}: {reply:?}");
        call.arg(&["1", "inspect"]).query::<Vec<i64>>(&mut redis).expect_err("an argument is missing");
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
    assert_eq!(Script::all().map(|script| script.name().to_owned()).collect::<BTreeSet<_>>(), expected);
    expected.insert("across_slots".to_owned());
    expected.extend(SHARED.map(str::to_owned));
    assert_eq!(stems("lua", "lua"), expected);
    let [before, after @ ..] = SHARED;
    let whole = |files: &[&str]| {
        [&[before][..], files, &after[..]]
            .concat()
            .into_iter()
            .map(|name| read(&format!("lua/{name}.lua")))
            .collect::<String>()
    };
    let files: Vec<_> = Algorithm::all().map(|algorithm| algorithm.script().name()).collect();
    for file in &files {
        let script = Script::all().find(|script| script.name() == *file).expect("a script");
        assert_eq!(script.text(), whole(&[*file]), "{file}");
    }
    assert_eq!(Script::for_algorithms(Algorithm::all()).text(), whole(&files));
}

#[test]
fn no_five_lines_stand_in_two_files() {
    let mut seen = std::collections::BTreeMap::new();
    for name in stems("lua", "lua") {
        let text = read(&format!("lua/{name}.lua"));
        let lines: Vec<_> = text.lines().map(str::trim).filter(|line| !["", "end"].contains(line)).collect();
        for five in lines.windows(5) {
            let before = seen.insert(five.join("\n"), name.clone());
            assert!(
                before.as_ref().is_none_or(|before| *before == name),
                "{before:?} and {name}:\n{}",
                five.join("\n")
            );
        }
    }
}

/// What contract 2 promises of arguments and replies. A change of what stands here is another contract
/// (`Script::CONTRACT`), unless it only adds an algorithm, a mode or an option.
#[test]
fn arguments_and_replies_are_those_of_the_contract() {
    assert_eq!(Script::CONTRACT, 2);
    let expected = [
        "token_bucket capacity rate period tick max_debt / BI7I7I7I3I7: 1",
        "fixed_window capacity rate period start max_debt / BI7I7I7i7I7: 2",
        "calendar_window limit first second stop / BI7i7i7i7: 3",
        "sliding_window_counter limit period tick / BI7I7I3: 4",
        "sliding_window_log limit period / BI5I7: 5",
        "concurrency limit ttl holder / BI2I7: 6",
    ];
    let found = algorithms().map(|file| {
        let packed = file.section("Numbers").into_iter().find_map(|line| line.strip_prefix("packed: "));
        let (packed, _) = packed.expect("how they are packed").split_once(',').expect("its number");
        format!("{} {} / {packed}", file.name, file.own().join(" "))
    });
    assert_eq!(found.collect::<Vec<_>>(), expected);
    let (decide, spaces) = (File::of("decide"), |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" "));
    let text = spaces(&decide.header.iter().map(|line| line.trim_start_matches('-')).collect::<Vec<_>>().join(" "));
    for promised in [
        "operation B, options B, cost I7, and the values of the options that have one, in their order",
        "[3] calls of each call I3, its number (as many are allowed as fit one after the other), and I7 for each limit",
        "128 acquire, 129 reserve, 130 at-most, 131 peek, 132 inspect, 133 refund, 134 penalty, 135 block, 136 settle, \
         137 cancel, 138 renew, 139 release, 140 reset",
        "1 as-is, 2 reset, 4 overage, 8 block (I7 us), 16 within (I7 us), 32 id (I7 ms that it is \
         remembered; 0: the caller keeps the receipt)",
        "64 taken (I7 us ago; of each limit I7 us, the reset that it answered), 128 long records",
        "one limit, in a script of one algorithm: its own arguments, cost, mode, now_us",
        "for each limit its name and own arguments; then id_ttl (ms, 0 without an id)",
        "cost (or with commas one for each limit), mode, now_us",
        "for each limit allowed (0 | 1), limit, remaining, retry_after_us, reset_after_us",
    ] {
        assert!(text.contains(promised), "{promised}");
    }
    let records = ["i7 remaining", "i7 reset_after_us", "i7 retry_after_us", "i3 allowed", "I7 granted", "I4 overage"];
    let places: Vec<_> = records.iter().map(|record| text.find(record)).collect();
    assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{places:?}");
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
