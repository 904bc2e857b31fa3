//! The tool and a PostgreSQL that freezes in mid-exchange.

use tollgate_testing::polling::wait_until;
use tollgate_testing::proxy::Proxy;
use tollgate_testing::record::prepared;

use crate::support::tool::{code, command, stderr};

/// What it prints in the end, after so many answers.
async fn run(port: u16, answered: u64, words: &[&str]) -> (i32, String) {
    let proxy = Proxy::to(port).await;
    proxy.answer(answered);
    let url = format!("postgres://tollgate@127.0.0.1:{}/postgres", proxy.port());
    let mut tool = command(&[words, &["--database-deadline", "400ms"]].concat());
    tool.env("TOLLGATE_DATABASE", url);
    let output = tokio::task::spawn_blocking(move || tool.output().expect("the tool runs")).await.expect("no panic");
    (code(&output), stderr(&output))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_whose_answer_is_missing_ends_with_one_line_that_says_what_may_have_happened() {
    let (server, tool) = prepared().await;
    let rules: tollgate::rules::RuleSet =
        "[[rule]]\nname = \"all\"\nkey = \"global\"\nlimits = [\"gcra 7/1s\"]".parse().expect("rules");
    tool.push_rules(&rules, "").await.expect("pushed");
    let mut unknown = String::new();
    for answered in 0.. {
        let (code, line) = run(server.port(), answered, &["users", "block", "42"]).await;
        if code == 0 {
            break;
        }
        assert!(code == 2 && line.starts_with("error: postgres at 127.0.0.1:") && line.lines().count() == 1, "{line}");
        let blocked = "SELECT 1 FROM tollgate.user_quotas WHERE blocked";
        if line.contains(": the change may or may not have been made: ") {
            wait_until("the change is made", async || !server.run(blocked).await.is_empty()).await;
            server.run("DELETE FROM tollgate.user_quotas").await;
            unknown.clone_from(&line);
        } else {
            assert!(line.ends_with(": nothing was changed\n") || line.ends_with(": no connection in time\n"), "{line}");
            assert_eq!(server.run(blocked).await, Vec::<String>::new(), "{answered}: {line}");
        }
        assert!(answered < 200, "{line}");
    }
    assert!(
        unknown.ends_with(
            "no answer within 400ms: the change may or may not have been made: see tollgate users show 42\n"
        ),
        "{unknown}"
    );
    // At a connection, and in the middle.
    for words in [
        &["users", "show", "42"][..],
        &["users", "list"],
        &["keys", "list"],
        &["rules", "pull"],
        &["db", "status"],
        &["db", "migrate"],
        &["stats"],
        &["audit", "--user", "42", "--at", "2026-11-23"],
    ] {
        for answered in [0, 3] {
            let (code, line) = run(server.port(), answered, words).await;
            let is_said = line.ends_with(": nothing was changed\n") || line.ends_with(": no connection in time\n");
            assert!(code == 2 && line.lines().count() == 1 && is_said, "{words:?} {answered}: {line}");
        }
    }
}
