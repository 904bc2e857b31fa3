//! The example programs in other languages, and what the scripts' README tells those who call them.

use std::io::Write;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::Instant;

use serde_json::Value;
use tempfile::TempDir;
use tollgate::Script;
use tollgate::redis::{Value as Reply, cmd};
use tollgate_testing::acl::least;
use tollgate_testing::python::python;
use tollgate_testing::redis_server::{Server, free_port};
use tollgate_testing::repository::{read, root};

use crate::support::tool::{code, lines, stderr, stdout, tollgate};

const RULE: &str = "token-bucket 100/1m burst 20";
/// One that is allowed, one that has to wait, and one that is above the burst.
const COSTS: [&str; 3] = ["15", "20", "21"];
/// Of the rule by the name that the README and the programs give it.
const KEY: &str = "tollgate:{user:42}:api/token-bucket-1m";

/// How long a program waits for Redis: as its text says, or long enough on any machine.
#[derive(Clone, Copy, PartialEq)]
enum Deadline {
    AsShown,
    Long,
}

/// A program in a folder of its own, with what it needs beside it.
struct Example {
    folder: TempDir,
    program: PathBuf,
    file: Option<&'static str>,
}

impl Example {
    /// From a file, whose deadline may be replaced.
    fn new(file: &str, deadline: Deadline, [shown, long]: [&str; 2]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let text = read(&format!("examples/languages/{file}"));
        assert_eq!(text.matches(shown).count(), 1, "{file}: {shown}");
        let text = if deadline == Deadline::Long { text.replace(shown, long) } else { text };
        std::fs::write(folder.path().join(file), text).expect("the example");
        std::fs::write(folder.path().join("token_bucket.lua"), concatenated()).expect("the script");
        Self { folder, program: PathBuf::new(), file: None }
    }

    fn python(deadline: Deadline) -> Self {
        let example = Self::new("token_bucket.py", deadline, ["DEADLINE = 0.5 ", "DEADLINE = 60 "]);
        Self { program: python(), file: Some("token_bucket.py"), ..example }
    }

    fn node(deadline: Deadline) -> Self {
        let example = Self::new("token_bucket.mjs", deadline, ["DEADLINE_MS = 500;", "DEADLINE_MS = 60_000;"]);
        // Modules are looked for from the program's own folder upwards.
        std::os::unix::fs::symlink(node_modules(), example.folder.path().join("node_modules")).expect("a link");
        Self { program: "node".into(), file: Some("token_bucket.mjs"), ..example }
    }

    /// Nothing where Go or its client isn't installed, which tests/run.sh leaves to the machine: they are 500 MB.
    fn go(deadline: Deadline) -> Option<Self> {
        let sources =
            std::env::var_os("TOLLGATE_TEST_GOPATH").map_or_else(|| "/usr/share/gocode".into(), PathBuf::from);
        let missing = if Command::new("go").arg("version").output().is_err() {
            "go on the PATH"
        } else if !sources.join("src/github.com/gomodule/redigo").exists() {
            "redigo, which Debian has as golang-github-gomodule-redigo-dev"
        } else {
            let example = Self::new("token_bucket.go", deadline, ["500 * time.Millisecond", "60 * time.Second"]);
            let mut go = Command::new("go");
            go.args(["build", "token_bucket.go"]).env("GO111MODULE", "off").env("GOPATH", sources);
            let built = go.current_dir(example.folder.path()).output().expect("go runs");
            assert!(built.status.success(), "{}", stderr(&built));
            return Some(Self { program: example.folder.path().join("token_bucket"), ..example });
        };
        // Past the harness, which shows no output of a test that passes.
        let _ = writeln!(std::io::stderr(), "examples/languages/token_bucket.go: NOT RUN, expected {missing}");
        None
    }

    fn run(&self, url: &str, costs: &[&str]) -> Output {
        self.run_within("60", url, costs)
    }

    /// Ended after so many seconds.
    fn run_within(&self, seconds: &str, url: &str, costs: &[&str]) -> Output {
        let mut command = Command::new("timeout");
        command.arg(seconds).arg(&self.program).args(self.file).arg("user:42").args(costs);
        command.env("REDIS_URL", url).current_dir(self.folder.path());
        command.output().unwrap_or_else(|error| panic!("{}: {error}", self.program.display()))
    }
}

/// Where tests/node.sh has put the client of Redis for Node.
fn node_modules() -> PathBuf {
    if let Some(folder) = std::env::var_os("TOLLGATE_TEST_NODE_MODULES") {
        return folder.into();
    }
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || PathBuf::from(std::env::var_os("HOME").expect("HOME")).join(".cache");
    let folder = cache.unwrap_or_else(home).join("tollgate/node/node_modules");
    assert!(folder.join("ioredis").exists(), "{}: expected ioredis, which tests/node.sh installs", folder.display());
    folder
}

/// The command of the README that makes a script without the tool.
fn concatenated() -> Vec<u8> {
    let readme = read("lua/README.md");
    let command = readme.lines().find_map(|line| line.strip_prefix("$ ")?.strip_suffix(" > token_bucket.lua"));
    let mut shell = Command::new("sh");
    let output = shell.args(["-c", command.expect("the command")]).current_dir(root()).output().expect("sh runs");
    assert!(output.status.success(), "{}", stderr(&output));
    output.stdout
}

/// What a program printed of a decision, and the wait in microseconds: -1 for ever.
fn decision(line: &str) -> (bool, i64, i64) {
    let (verdict, rest) = line.split_once(": ").unwrap_or_else(|| panic!("{line}"));
    let (remaining, wait) = rest.split_once(" remaining, ").unwrap_or_else(|| panic!("{line}"));
    let wait = match wait.strip_prefix("retry after ").and_then(|wait| wait.strip_suffix(" s")) {
        Some(seconds) => seconds.replace('.', "").parse().expect("six digits after the point"),
        None => Some(-1).filter(|_| wait == "never").unwrap_or_else(|| panic!("{line}")),
    };
    assert!(["allowed", "denied"].contains(&verdict), "{line}");
    (verdict == "allowed", remaining.parse().expect("a number"), wait)
}

/// The same of the tool.
fn decision_of_tool(line: &Value) -> (bool, i64, i64) {
    let wait = match &line["retry_after_us"] {
        Value::Null => 0,
        Value::String(never) if never == "never" => -1,
        wait => wait.as_i64().expect("microseconds"),
    };
    (line["allowed"] == true, line["remaining"].as_i64().expect("units"), wait)
}

/// As the smallest user with these rights beside, on a server that doesn't know the script; and which commands carry
/// its text, and how often.
fn answers_as_the_tool(example: &Example, beside: &str, text_by: &str) {
    let server = Server::start();
    let started = Instant::now();
    let by_tool: Vec<_> = COSTS
        .iter()
        .map(|cost| lines(&tollgate(&["probe", RULE, "user:1", "--cost", cost, "--url", &server.url()])).remove(0))
        .collect();
    cmd("SCRIPT").arg("FLUSH").exec(&mut server.connection()).expect("no scripts");
    server.reset_command_counts();
    let url = server.user("limiter", &format!("{} {beside}", least().join(" ")));
    let output = example.run(&url, &COSTS);
    let (said, commands) = (stdout(&output), server.commands());
    let seen: Vec<_> = said.lines().map(decision).collect();
    assert!(output.status.success() && seen.len() == COSTS.len(), "{said}{}", stderr(&output));

    // A unit comes back in 600 ms, however slow the machine is.
    let elapsed = i64::try_from(started.elapsed().as_micros()).expect("a short time");
    let near =
        |one: i64, other: i64, apart: i64| one == other || one > 0 && other > 0 && one.abs_diff(other) <= apart as u64;
    for (seen, line) in seen.iter().zip(&by_tool) {
        let (allowed, remaining, wait) = decision_of_tool(line);
        assert_eq!(seen.0, allowed, "{said}{line}");
        assert!(near(seen.1, remaining, elapsed / 600_000 + 1), "{said}{line}");
        assert!(near(seen.2, wait, elapsed), "{said}{line}");
    }
    assert_eq!((seen[0], seen[1].0, seen[2].2), ((true, 5, 0), false, -1), "{said}");

    let calls = |name: &str| commands.get(name).map_or(0, |(calls, _)| *calls);
    assert_eq!((calls("eval") + calls("script|load"), calls(text_by)), (1, 1), "{commands:?}");
    assert!(calls("evalsha") >= 2, "{commands:?}");
    let loaded = cmd("SCRIPT").arg("EXISTS").arg(tollgate::Algorithm::TokenBucket.script().digest()).to_owned();
    assert_eq!(loaded.query::<Vec<bool>>(&mut server.connection()).expect("a reply"), [true], "the same script");

    // The rule shares the state, in the script's other form: the tool's acquires are packed.
    let acquire = ["probe", RULE, "user:42", "--name", "api", "--url", &server.url()];
    let (_, remaining, _) = decision_of_tool(&lines(&tollgate(&acquire))[0]);
    let elapsed = i64::try_from(started.elapsed().as_micros()).expect("a short time");
    assert!((4..=5 + elapsed / 600_000).contains(&remaining), "{remaining}");
    assert_eq!(found(&server), [KEY]);

    // A mistake is no outage.
    cmd("SET").arg(KEY).arg("x").exec(&mut server.connection()).expect("another value");
    let output = example.run(&url, &["1"]);
    assert!(!output.status.success() && stdout(&output).is_empty(), "{output:?}");
    assert!(stderr(&output).contains("BADSTATE"), "{output:?}");
    let tcp = server.tcp_url();
    let wrong = [url.replace("sesame", "wrong"), format!("{tcp}/99"), format!("{url}/1")];
    for url in &wrong {
        let output = example.run(url, &["1", "1", "1"]);
        assert!(!output.status.success() && stdout(&output).is_empty(), "{url}: {output:?}");
    }
    for broken in
        ["", "redis://user:secret%zz@127.0.0.1:1", "redis://user:sec#ret@127.0.0.1:1", "redis://:secret@h:port"]
    {
        let output = example.run(broken, &["1"]);
        let told = stderr(&output);
        assert!(!output.status.success() && stdout(&output).is_empty(), "{broken}: {output:?}");
        assert!(told.ends_with("REDIS_URL: expected redis://[user:password@]host:port[/db]\n"), "{broken}: {told}");
        assert!(told.lines().count() == 1 && !told.contains("sec"), "{broken}: {told}");
    }
    for reply in ["1", "false", "{}"] {
        std::fs::write(example.folder.path().join("token_bucket.lua"), format!("return {reply}")).expect("the script");
        let output = example.run(&tcp, &["1"]);
        assert!(!output.status.success() && stdout(&output).is_empty(), "{reply}: {output:?}");
    }

    answers_by_itself(example, &server);
}

/// What the README says that a program answers without Redis, as Redis says it. A script of the program's own says it
/// in place of Redis: for the first cost the first code, and so on.
fn answers_by_itself(example: &Example, server: &Server) {
    let readme = read("lua/README.md");
    let row = readme.lines().find(|line| line.starts_with("| no connection")).expect("the row");
    let (codes, _) = row[1..].split_once('|').expect("what Redis answers");
    // ioredis has no connection for a call that follows READONLY at once.
    let (readonly, mut codes): (Vec<_>, Vec<_>) =
        codes.split('`').skip(1).step_by(2).partition(|code| *code == "READONLY");
    codes.extend(readonly);
    assert!(codes.len() == 10 && codes.contains(&"BUSY") && codes.ends_with(&["READONLY"]), "{codes:?}");
    let error = |code: &&str| if code.contains(' ') { format!("'{code}'") } else { format!("'{code} is {code}'") };
    let errors: Vec<_> = codes.iter().map(error).collect();
    let text = format!("return redis.error_reply(({{{}}})[tonumber(ARGV[6])])", errors.join(", "));
    std::fs::write(example.folder.path().join("token_bucket.lua"), text).expect("the script");
    let costs: Vec<_> = (1..=codes.len()).map(|cost| cost.to_string()).collect();
    let output = example.run(&server.tcp_url(), &costs.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(stdout(&output), "denied without Redis\n".repeat(codes.len()), "{output:?}");
    let (told, mut last_words) = (stderr(&output), codes.iter().filter_map(|code| code.split(' ').next_back()));
    assert!(output.status.success() && last_words.all(|word| told.contains(word)), "{output:?}");

    // ioredis connects anew in the background.
    if example.file != Some("token_bucket.mjs") {
        let (before, last) = (connections(server), costs.last().expect("a cost").as_str());
        let output = example.run(&server.tcp_url(), &[last, last]);
        assert_eq!(connections(server) - before, 3, "one for each call, and one for INFO: {output:?}");
    }
}

fn connections(server: &Server) -> u64 {
    let info: String = cmd("INFO").arg("stats").query(&mut server.connection()).expect("INFO");
    let count = info.lines().find_map(|line| line.strip_prefix("total_connections_received:"));
    count.and_then(|count| count.parse().ok()).expect("a count")
}

/// The keys that the command for it on the page finds.
fn found(server: &Server) -> Vec<String> {
    let page = read("lua/sharing.md");
    let command = page.lines().find_map(|line| line.strip_prefix("$ redis-cli --scan --pattern "));
    let mut scan = cmd("SCAN");
    scan.arg(0).arg("MATCH").arg(command.expect("the command").trim_matches('\''));
    let (_, keys): (u64, _) = scan.query(&mut server.connection()).expect("keys");
    keys
}

#[test]
fn the_python_example_decides_as_the_tool_does() {
    let example = Example::python(Deadline::Long);
    answers_as_the_tool(&example, "+script|load", "script|load");
    let server = Server::start();
    let url = server.user("limiter", &format!("{} -script|load", least().join(" ")));
    let output = example.run(&url, &["1"]);
    assert!(!output.status.success() && stderr(&output).contains("script|load"), "{output:?}");
}

#[test]
fn the_node_example_decides_as_the_tool_does() {
    answers_as_the_tool(&Example::node(Deadline::Long), "", "eval");
}

#[test]
fn the_go_example_decides_as_the_tool_does_where_go_is_installed() {
    let Some(example) = Example::go(Deadline::Long) else { return };
    answers_as_the_tool(&example, "", "eval");
}

/// Where nobody listens, where nobody answers, where a replica may not write, and where there is no memory to.
#[test]
fn the_examples_answer_by_themselves_and_soon_when_redis_is_away() {
    let silent = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let replica = Server::with(&["--replicaof", "127.0.0.1", &free_port().to_string()]);
    let full = Server::with(&["--maxmemory", "1"]);
    let nobody = format!("redis://127.0.0.1:{}", free_port());
    let silent_url = format!("redis://{}", silent.local_addr().expect("an address"));
    let urls = [nobody, silent_url, replica.tcp_url(), full.tcp_url()];
    let examples = [Example::python(Deadline::AsShown), Example::node(Deadline::AsShown)];
    let examples: Vec<_> = examples.into_iter().chain(Example::go(Deadline::AsShown)).collect();
    std::thread::scope(|scope| {
        for (example, url) in examples.iter().flat_map(|example| urls.iter().map(move |url| (example, url))) {
            scope.spawn(move || {
                // Clients without a deadline of their own wait for five seconds each time, or for ever.
                let output = example.run_within("15", url, &["15", "1", "1", "1"]);
                assert_eq!(stdout(&output), "denied without Redis\n".repeat(4), "{url}: {output:?}");
                assert!(
                    output.status.success() && stderr(&output).contains("Redis doesn't decide"),
                    "{url}: {output:?}"
                );
            });
        }
    });
}

#[test]
fn the_readme_makes_the_tools_script_without_the_tool() {
    let printed = tollgate(&["script", "token_bucket"]);
    assert_eq!((code(&printed), printed.stdout == concatenated()), (0, true));
}

#[test]
fn the_contract_has_one_number_in_the_source_the_scripts_the_page_and_the_tool() {
    let number = Script::CONTRACT;
    assert_eq!(stdout(&tollgate(&["script", "--contract"])), format!("{number}\n"));
    assert!(read("lua/README.md").contains(&format!("are **contract {number}**")), "lua/README.md");
    for script in Script::all() {
        let line = format!("-- Contract {number}: ");
        assert_eq!(
            script.text().lines().take(8).filter(|text| text.starts_with(&line)).count(),
            1,
            "{}",
            script.name()
        );
    }
}

/// The call that the README draws, its reply there, both in bytes, and what the tool sends for the same rule and key.
#[test]
fn the_call_that_the_readme_draws_is_the_rules_and_has_the_reply_shown() {
    let readme = read("lua/README.md");
    let line = readme.lines().find(|line| line.starts_with("EVALSHA sha ")).expect("the call");
    let words: Vec<_> = line.split(' ').skip(3).collect();
    let (_, shown) = readme.split_once("\n1) (integer) ").expect("the reply");
    let shown: Vec<i64> = format!("1) (integer) {shown}")
        .lines()
        .map_while(|line| line.split_once(" (integer) ")?.1.split(' ').next()?.parse().ok())
        .collect();
    let server = Server::with(&["--slowlog-log-slower-than", "0"]);
    let mut redis = server.connection();
    let mut call = cmd("EVAL");
    call.arg(tollgate::Algorithm::TokenBucket.script().text()).arg(1).arg(&words);
    assert_eq!(call.query::<Vec<i64>>(&mut redis).expect("a reply"), shown);
    assert_eq!(shown.len(), 5);

    // Each arrow stands below the word that it is of.
    let arrows = readme.lines().find(|line| line.trim_start().starts_with('▲')).expect("arrows");
    let below: Vec<_> = arrows.chars().enumerate().filter(|(_, mark)| *mark == '▲').map(|(at, _)| at).collect();
    let starts: Vec<_> = line.match_indices(' ').map(|(at, _)| at + 1).collect();
    assert_eq!(below, starts);

    // The same in bytes, of a key that is as unused as the other was.
    let (_, bytes) = readme.split_once("\n01                     algorithm 1").expect("the bytes");
    let (call, answer) = format!("01  {bytes}")
        .split_once("\n\n")
        .map(|(call, rest)| (bytes_of(call), bytes_of(rest.split_once("```").expect("an end").0)))
        .expect("a call and its answer");
    cmd("DEL").arg(KEY).exec(&mut redis).expect("unused");
    let mut packed = cmd("EVAL");
    packed.arg(tollgate::Algorithm::TokenBucket.script().text()).arg(1).arg(KEY).arg(&call);
    assert_eq!(packed.query::<Vec<u8>>(&mut redis).expect("a reply"), answer);

    // The tool's calls begin with the same numbers.
    let probe = ["probe", RULE, "user:42", "--name", "api", "--url", &server.url()];
    assert_eq!(code(&tollgate(&probe)), 0);
    let log: Vec<Vec<Reply>> = cmd("SLOWLOG").arg("GET").query(&mut redis).expect("a log");
    let sent: Vec<Vec<Vec<u8>>> = log
        .into_iter()
        .filter_map(|mut entry| tollgate::redis::from_redis_value(entry.remove(3)).ok())
        .filter(|words: &Vec<Vec<u8>>| words[0].starts_with(b"EVALSHA"))
        .collect();
    assert!(sent.iter().any(|sent| sent[3] == KEY.as_bytes() && sent[4].starts_with(&call[..32])), "{sent:?}");
}

/// The hexadecimal digits at the beginning of each line.
fn bytes_of(lines: &str) -> Vec<u8> {
    let digits = lines.lines().filter_map(|line| line.split("  ").next()).flat_map(str::split_whitespace);
    digits.map(|byte| u8::from_str_radix(byte, 16).unwrap_or_else(|error| panic!("{byte}: {error}"))).collect()
}
