//! Exactness under concurrency: however many tasks and processes share a key, a limit of N admits N.

use std::process::Stdio;

use tokio::process::Command;
use tokio::task::JoinSet;
use tollgate::{Limiter, Redis, Rule};
use tollgate_testing::polling::{PATIENCE, once_sent};
use tollgate_testing::redis_server::Server;
use tollgate_testing::rules::THOUSAND;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn processes_and_tasks_together_are_admitted_exactly_the_limit() {
    let server = Server::start();
    for text in THOUSAND {
        let processes: Vec<_> = (0..4).map(|_| probe(&server, text, 200)).collect();
        let (limiter, rule) = (limiter(&server), tools_rule(text));
        // Begin together with the processes, not before them.
        let begun = || processes.iter().any(|process| process.is_finished());
        while limiter.peek(&rule, "shared").await.expect("a decision").remaining == 1000 && !begun() {
            tokio::task::yield_now().await;
        }
        let mut tasks = JoinSet::new();
        for _ in 0..300 {
            let (limiter, rule) = (limiter.clone(), rule.clone());
            tasks.spawn(async move { admitted(&limiter, &rule, 3).await });
        }
        let here: usize = tasks.join_all().await.into_iter().sum();
        let mut there = 0;
        for process in processes {
            there += process.await.expect("a process's count");
        }
        assert!(there > 0 && here > 0, "{text}: {there} there, {here} here");
        assert_eq!(there + here, 1000, "{text}: {there} there, {here} here");
        assert_eq!(limiter.peek(&rule, "shared").await.expect("a decision").remaining, 0, "{text}");
    }
}

/// The tool, taking one unit after another; how many it was given.
fn probe(server: &Server, rule: &str, count: usize) -> tokio::task::JoinHandle<usize> {
    let mut tool = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    tool.args(["probe", rule, "shared", "--format", "jsonl", "--deadline", "60s"]);
    tool.args(["--count", &count.to_string(), "--url", &server.url()]);
    tool.stdin(Stdio::null()).kill_on_drop(true);
    tokio::spawn(async move {
        let output = tool.output().await.expect("the tool runs");
        let (lines, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        let allowed = |line: &str| {
            let record: serde_json::Value = serde_json::from_str(line).expect("a record in JSON");
            record["allowed"].as_bool().unwrap_or_else(|| panic!("allowed: {line}"))
        };
        let answers: Vec<_> = lines.lines().map(allowed).collect();
        assert_eq!(answers.len(), count, "a line for each decision: {errors}");
        let admitted = answers.iter().filter(|allowed| **allowed).count();
        assert_eq!(output.status.code(), Some(i32::from(admitted < count)), "{errors}");
        admitted
    })
}

/// As the tool names a rule that has no name, so that both count on one key.
fn tools_rule(text: &str) -> Rule {
    Rule::new("cli", text).expect("a rule")
}

/// Takes single units so many times; how often it was allowed.
async fn admitted(limiter: &Limiter, rule: &Rule, times: usize) -> usize {
    let mut admitted = 0;
    for _ in 0..times {
        admitted += usize::from(once_sent(|| limiter.acquire(rule, "shared")).await.allowed);
    }
    admitted
}

fn limiter(server: &Server) -> Limiter {
    Limiter::builder(Redis::open(&server.url()).expect("a good address")).deadline(PATIENCE).build()
}
