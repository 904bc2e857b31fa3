//! The tool's messages, also where its output is closed.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;

use tollgate_testing::polling::block_until;
use tollgate_testing::repository::{read, rust_files};

use super::*;
use crate::support::tool::{code, command, lines, stderr, stdout, tollgate, with_input};

/// The ends of a pipe that is not read.
fn closed() -> Stdio {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    writer.into()
}

#[test]
fn a_closed_output_does_not_make_the_tool_panic() {
    let server = Server::start();
    let url = server.url();
    let bad = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(&bad, "{\"t_us\":1,\"key\":\"a\"}\n".to_owned() + &"{}\n".repeat(10_000)).expect("written");
    let bad = bad.path().to_str().expect("UTF-8");
    let log = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(&log, beginning_of_the_log(1_000)).expect("written");
    let log = log.path().to_str().expect("UTF-8");
    for (arguments, to_the_end) in [
        (&["replay", "--rule", "token-bucket 5/1s", log][..], 0),
        (&["replay", "--rule", "token-bucket 5/1s", "--summary", bad], 0),
        (&["replay", "--rule", "token-bucket 5/1s", "--input", "jsonl", log], 2),
        (&["probe", "token-bucket 5/1s", "k", "--count", "3"], 0),
        (&["probe", "token-bucket 5/1x", "k"], 2),
        (&["probe", "token-bucket 5/1s", "k", "--url", "redis://127.0.0.1:1"], 2),
        (&["probe", "token-bucket 5/1s", "k", "--url", "redis://127.0.0.1:1", "--on-error", "open"], 0),
        (&["probe", "--help"], 0),
        (&["load", "token-bucket 5/1s", "--count", "3", "--warmup", "0s"], 0),
        (&["inspect", "token-bucket 5/1s", "fixed-window 5/1s", "k", "--url", &url, "--format", "table"], 0),
        (&["reset", "--rule", "cli", "--url", &url, "--format", "table"], 0),
        (&["doctor", "--url", &url, "--format", "table"], 0),
        (&[], 2),
        (&["frobnicate"], 2),
    ] {
        let run = |stdout: Stdio, stderr: Stdio| {
            let ended = command(arguments).stdout(stdout).stderr(stderr).status().expect("the tool runs");
            ended.code().expect("an exit code")
        };
        assert_eq!(run(Stdio::null(), closed()), to_the_end, "{arguments:?} without a reader of stderr");
        // What goes wrong is still told by the exit code.
        let quiet = run(closed(), Stdio::null());
        assert!([0, to_the_end].contains(&quiet), "{arguments:?} without a reader of stdout: {quiet}");
        let quiet = run(closed(), closed());
        assert!([0, to_the_end].contains(&quiet), "{arguments:?} without readers: {quiet}");
        let full = || Stdio::from(File::options().write(true).open("/dev/full").expect("the full device"));
        assert_eq!(run(Stdio::null(), full()), to_the_end, "{arguments:?} where stderr can't be written");
        assert!([to_the_end, 2].contains(&run(full(), full())), "{arguments:?} where nothing can be written");
    }
}

#[test]
fn help_that_cannot_be_written_is_an_error() {
    for arguments in [&["--help"][..], &["help", "rules"], &["probe", "--help"], &["--version"]] {
        let full = Stdio::from(File::options().write(true).open("/dev/full").expect("the full device"));
        let output = command(arguments).stdout(full).stderr(Stdio::piped()).output().expect("the tool runs");
        let told = stderr(&output);
        assert!(code(&output) == 2 && told.starts_with("error: output: No space left"), "{arguments:?}: {told}");
    }
}

#[test]
fn nothing_is_printed_by_a_macro_that_panics() {
    for file in rust_files("crates/cli/src") {
        for line in read(&file).lines() {
            assert!(!line.contains("print!(") && !line.contains("println!("), "{file}: {line}");
        }
    }
}

#[test]
fn commands_that_read_a_redis_require_an_address() {
    for arguments in [&["inspect", "token-bucket 5/1s", "k"][..], &["reset", "--rule", "api"], &["doctor"]] {
        let output = tollgate(arguments);
        let told = stderr(&output);
        assert_eq!((code(&output), stdout(&output).as_str(), told.lines().count()), (2, "", 1), "{told}");
        assert!(
            told.starts_with("error: --url is missing: ") && told.ends_with(" (--url or TOLLGATE_URL)\n"),
            "{told}"
        );
    }
}

#[test]
fn two_keys_never_look_alike() {
    let server = Server::start();
    let url = server.url();
    for (key, text) in [
        (&b"user:42"[..], "user:42"),
        ("Zoë \"z\"".as_bytes(), "Zoë \"z\""),
        (b"a\xffb", r"a\xffb"),
        (b"a\xfeb", r"a\xfeb"),
        (br"a\xffb", r"a\\xffb"),
        ("a\u{fffd}b".as_bytes(), "a\u{fffd}b"),
        (b"\x1b[2J\n", r"\u{1b}[2J\n"),
        (b"ab", "ab"),
        (b"a\x7fb", r"a\u{7f}b"),
        ("a\u{9b}\u{200b}\u{2028}\u{fe0f}b".as_bytes(), r"a\u{9b}\u{200b}\u{2028}\u{fe0f}b"),
        (b"ab ", r"ab\x20"),
    ] {
        let probe = |shape: &str| {
            let mut probe = command(&["probe", "token-bucket 5/1s", "--format", shape, "--url", &url]);
            probe.arg(OsStr::from_bytes(key)).output().expect("the tool runs")
        };
        assert_eq!(lines(&probe("jsonl"))[0]["key"], text);
        let table = stdout(&probe("table"));
        assert!(table.ends_with(&format!(" {text}\n")), "{table}");

        let mut inspect =
            command(&["inspect", "token-bucket 5/1s", "--format", "jsonl", "--url", &url, "--prefix", "p\\q"]);
        let report = &lines(&inspect.arg(OsStr::from_bytes(key)).output().expect("the tool runs"))[0];
        assert_eq!(report["key"], text);
        let name = report["redis_key"].as_str().expect("a key");
        assert!(name.starts_with(r"p\\q:{") && !name.contains('\u{fffd}'), "{name}");
    }
}

#[test]
fn an_output_can_be_replayed_whatever_bytes_its_keys_have() {
    let input = b"t_us,key,id\n1,\xff,\xfe\n2,a\\xff,\n3,C:\\new,\n4,\"a\nb\",\n";
    let replay = ["replay", "--rule", "token-bucket 5/1s", "-"];
    let output = with_input(&replay, input);
    let keys: Vec<_> = lines(&output).iter().map(|line| line["key"].as_str().expect("text").to_owned()).collect();
    assert_eq!(keys, [r"\xff", r"a\\xff", r"C:\\new", r"a\nb"]);
    assert_eq!(lines(&output)[0]["id"], r"\xfe");
    let again = with_input(&replay, &output.stdout);
    assert_eq!(stdout(&again), stdout(&output));
    let summary = with_input(&[&replay[..], &["--summary"]].concat(), b"t_us,key,cost\n1,\xff,9\n");
    assert_eq!(lines(&summary)[0]["busiest_denied"][0]["key"], r"\xff");
}

/// Its first chance to notice would be once somebody writes into the pipe.
#[cfg(unix)]
#[test]
fn a_command_that_waits_for_a_file_ends_when_it_is_interrupted() {
    let folder = tempfile::tempdir().expect("a folder");
    let pipe = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs").success());
    for arguments in [&["replay", "--rule", "token-bucket 5/1s"][..], &["compare", "token-bucket 5/1s"]] {
        let mut tool = command(arguments);
        let tool = tool.arg(&pipe).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the tool runs");
        let interrupt = || {
            Command::new("kill")
                .arg("-INT")
                .arg(tool.id().to_string())
                .stderr(Stdio::null())
                .status()
                .expect("kill runs");
        };
        let status = format!("/proc/{}/status", tool.id());
        // As soon as it handles them: before, one ends it.
        block_until("it handles signals", || {
            let status = std::fs::read_to_string(&status).expect("its status");
            let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).expect("a mask");
            u64::from_str_radix(caught.trim(), 16).expect("hexadecimal") & 0b10 != 0
        });
        block_until("it ends", || {
            interrupt();
            std::fs::read_to_string(&status).map_or(true, |status| status.contains("State:\tZ"))
        });
        let output = tool.wait_with_output().expect("it ends");
        assert_eq!((code(&output), stderr(&output).contains("interrupted")), (2, true), "{}", stderr(&output));
    }
}

#[test]
fn help_has_the_grammar_of_rules_and_its_examples_work_as_printed() {
    for subcommand in [&[][..], &["probe"], &["block"], &["inspect"], &["load"], &["replay"], &["compare"]] {
        let help = stdout(&tollgate(&[subcommand, &["--help"]].concat()));
        assert!(help.ends_with("\nHow a RULE is written: tollgate help rules\n"), "{subcommand:?}: {help}");
    }
    let help = stdout(&tollgate(&["help", "rules"]));
    let (_, rules) = help.split_once("How a RULE is written:").expect("the grammar");
    let (rules, rest) = rules.split_once("Examples:").expect("examples");
    let limits = rules.lines().filter_map(|line| line.strip_prefix("    ")?.split("  ").next());
    let limits: Vec<_> = limits.filter(|limit| !limit.is_empty() && !limit.contains(" [")).collect();
    assert!(limits.len() >= 8, "{limits:?}");
    for limit in limits {
        let output = match limit.starts_with('{') {
            true => tollgate(&["probe", limit, "key", "--part", "org=acme"]),
            false => tollgate(&["probe", limit, "key"]),
        };
        assert_eq!(code(&output), 0, "{limit}: {}", stderr(&output));
    }
    let examples: Vec<_> = rest.lines().filter_map(|line| line.strip_prefix("  tollgate ")).collect();
    assert_eq!(examples.len(), 3);
    for example in examples {
        let path = std::path::Path::new(env!("CARGO_BIN_EXE_tollgate"));
        let shell = Command::new("sh").arg("-c").arg(format!("{} {example}", path.display())).output();
        let output = shell.expect("a shell");
        assert!(code(&output) < 2, "{example}: {}", stderr(&output));
        assert!(!lines(&output).is_empty());
    }
}

#[test]
fn inspect_explains_in_words_and_units() {
    let server = Server::start();
    let url = server.url();
    let inspect =
        |limit: &str, key: &str| stdout(&tollgate(&["inspect", limit, key, "--url", &url, "--format", "table"]));
    tollgate(&["probe", "sliding-log 5/15m", "k", "--count", "3", "--url", &url]);
    let table = inspect("sliding-log 5/15m", "k");
    assert!(table.contains("remaining     2 of 5 units\n"), "{table}");
    assert!(table.contains("full again    in 1") && table.contains(", if nothing more is taken\n"), "{table}");
    assert!(table.contains("state_period  15m (900000000)\n"), "{table}");
    assert!(inspect("sliding-log 5/15m", "other").contains("full again  now: nothing is in use\n"));
    tollgate(&["probe", "sliding-window 1000000/30d", "k", "--url", &url]);
    let table = inspect("sliding-window 1000000/30d", "k");
    assert!(
        table.contains("state_period  30d (9000000000)\n") && table.contains("state_tick    288us (288)\n"),
        "{table}"
    );
    assert!(inspect("token-bucket 1/1s", "other").contains("remaining   1 of 1 unit\n"));
}
