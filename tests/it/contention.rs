//! Exactness under concurrency: however many tasks and processes share a key, a limit of N admits N; callers
//! that give up don't affect others.

use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;
use tokio::task::JoinSet;
use tollgate::{Limiter, Redis, Request, Rule};

use crate::support::redis_server::Server;
use crate::support::rules::THOUSAND;

/// Ends a test that would hang; no machine is so slow that it decides one.
const PATIENCE: Duration = Duration::from_secs(60);

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
    text.parse::<Rule>().and_then(|rule| rule.named("cli")).expect("a rule")
}

/// Takes single units so many times; how often it was allowed.
async fn admitted(limiter: &Limiter, rule: &Rule, times: usize) -> usize {
    let mut admitted = 0;
    for _ in 0..times {
        admitted += usize::from(limiter.acquire(rule, "shared").await.expect("a decision").allowed);
    }
    admitted
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn callers_that_give_up_are_charged_at_most_once_and_replies_stay_matched() {
    let server = Server::start();
    for text in THOUSAND {
        let (limiter, rule) = (limiter(&server), tools_rule(text));
        let mut finished = 0;
        let mut tasks = Vec::new();
        for n in 0..600_u32 {
            let (limiter, rule) = (limiter.clone(), rule.clone());
            tasks
                .push(tokio::spawn(async move { limiter.acquire(&rule, "shared").await.expect("a decision").allowed }));
            // The caller of some time ago gives up: before its call was sent, on the way, or after the answer.
            if n % 3 == 0 {
                let early = n / 3 * 7919 % 40;
                for _ in 0..early {
                    tokio::task::yield_now().await;
                }
                tasks[(n / 2) as usize].abort();
            }
        }
        for task in tasks {
            match task.await {
                Ok(allowed) => finished += u64::from(allowed),
                Err(error) => assert!(error.is_cancelled(), "{error}"),
            }
        }
        let charged = 1000 - limiter.peek(&rule, "shared").await.expect("a decision").remaining;
        assert!((finished..=600).contains(&charged), "{text}: {charged} charged, {finished} told so");
        assert_answers_are_the_callers_own(&limiter).await;
    }
}

/// Each caller has a limit of its own, which its answer names.
async fn assert_answers_are_the_callers_own(limiter: &Limiter) {
    let mut tasks = JoinSet::new();
    for n in 1..=200_u64 {
        let limiter = limiter.clone();
        tasks.spawn(async move {
            let rule = crate::support::rules::rule(&format!("gcra {n}/30d"));
            let decision = limiter.peek(&rule, Request::new(&n.to_string())).await.expect("a decision");
            assert_eq!((decision.limit, decision.remaining), (n, n));
        });
    }
    tasks.join_all().await;
}

fn limiter(server: &Server) -> Limiter {
    Limiter::new(Redis::open(&server.url()).expect("a good address")).deadline(PATIENCE)
}
