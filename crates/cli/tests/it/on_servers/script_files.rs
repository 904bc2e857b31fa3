//! The scripts as the tool prints and writes them, and what programs in other languages make of them.

use tollgate::redis::cmd;
use tollgate::{Algorithm, Script};
use tollgate_testing::acl::least;
use tollgate_testing::python::python;
use tollgate_testing::redis_server::Server;
use tollgate_testing::repository::read;

use crate::support::tool::{code, stderr, stdout, tollgate};

#[test]
fn the_tool_prints_a_script_its_digest_and_writes_all_of_them() {
    let bucket = Algorithm::TokenBucket.script();
    for name in ["token_bucket", "token-bucket", "gcra"] {
        let printed = tollgate(&["script", name]);
        assert_eq!((code(&printed), stdout(&printed)), (0, bucket.text().to_owned()), "{name}");
        assert_eq!(stdout(&tollgate(&["script", name, "--digest"])), format!("{}\n", bucket.digest()), "{name}");
    }
    for name in ["sliding_window_counter", "sliding-window-counter", "sliding-window", "sliding_window"] {
        assert_eq!(stdout(&tollgate(&["script", name])), Algorithm::SlidingWindow.script().text(), "{name}");
    }
    // In the order of the algorithms, each once.
    let both = Script::for_algorithms([Algorithm::TokenBucket, Algorithm::FixedWindow]);
    assert_eq!(stdout(&tollgate(&["script", "fixed-window", "gcra", "token_bucket"])), both.text());
    let wrong = tollgate(&["script", "token_bucket", "gcr"]);
    assert!(
        code(&wrong) == 2 && stderr(&wrong).starts_with("error: script: expected one of token_bucket, "),
        "{wrong:?}"
    );
    assert_eq!(code(&tollgate(&["script"])), 2);
    let directory = tempfile::tempdir().expect("a directory");
    let made = directory.path().join("made/when missing");
    assert_eq!(code(&tollgate(&["script", "--out", made.to_str().expect("text")])), 0);
    for script in Script::all() {
        let file = made.join(format!("{}.lua", script.name()));
        assert_eq!(std::fs::read_to_string(file).expect("a file"), script.text());
    }
    let mut check = std::process::Command::new("sha1sum");
    let checked = check.args(["--check", "--strict", "SHA1SUMS"]).current_dir(&made).output().expect("sha1sum runs");
    assert_eq!((code(&checked), stdout(&checked).matches(": OK\n").count()), (0, Script::all().count()), "{checked:?}");
    // One script alone leaves the list of all as it is.
    let sums = std::fs::read(made.join("SHA1SUMS")).expect("a list");
    assert_eq!(code(&tollgate(&["script", "token_bucket", "--out", made.to_str().expect("text")])), 0);
    assert_eq!(std::fs::read(made.join("SHA1SUMS")).expect("a list"), sums);
    let file = made.join("token_bucket.lua");
    let refused = tollgate(&["script", "--out", file.to_str().expect("text")]);
    let expected = format!("error: --out: {}", file.display());
    assert!(code(&refused) == 2 && stderr(&refused).starts_with(&expected), "{refused:?}");
}

/// The programs of the scripts' pages, as they stand there, and what these say that they print.
#[test]
fn python_programs_print_what_the_pages_show() {
    let server = Server::start();
    let directory = tempfile::tempdir().expect("a directory");
    let scripts = directory.path().join("scripts");
    assert_eq!(code(&tollgate(&["script", "--out", scripts.to_str().expect("text")])), 0);
    // They are documented to need no more than the smallest user may.
    let user = server.user("limiter", &least().join(" "));
    let pages = ["lua/README.md", "lua/sharing.md"].map(read).concat();
    let mut parts = pages.split("```python\n").skip(1).map(|part| part.split_once("```").expect("an end"));
    let (mut printed, mut programs) = (0, 0);
    for (program, after) in parts.by_ref() {
        cmd("FLUSHALL").exec(&mut server.connection()).expect("flushed");
        let program = program.replace("redis.Redis()", &format!("redis.Redis.from_url('{user}')"));
        let mut python = std::process::Command::new(python());
        let output = python.args(["-c", &program]).current_dir(directory.path()).output().expect("Python");
        assert!(output.status.success(), "{program}{}", String::from_utf8_lossy(&output.stderr));
        let (_, rest) = after.split_once("```text\n").expect("what it prints");
        let expected = rest.split_once("```").expect("an end").0;
        let said = stdout(&output);
        assert_eq!(said.lines().count(), expected.lines().count(), "{said}");
        for (said, expected) in said.lines().zip(expected.lines()) {
            for (said, expected) in said.split(' ').zip(expected.split(' ')) {
                // But for some microseconds, a second at most on a slow machine.
                let near = match (said.parse::<i64>(), expected.parse::<i64>()) {
                    (Ok(said), Ok(expected)) => {
                        said == expected || expected > 100_000 && said.abs_diff(expected) < 1_000_000
                    }
                    _ => said == expected,
                };
                assert!(near, "{said}, not {expected}");
                printed += 1;
            }
        }
        programs += 1;
    }
    assert!(programs == 3 && printed > 48, "{programs} {printed}");
}
