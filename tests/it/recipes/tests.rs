//! That the recipes which people copy from the README and the guide are the ones tested here, and that each holds with
//! many callers at once, while Redis is unreachable, and where it fails or comes back in the middle of a recipe.

use std::num::NonZeroU32;
use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use tollgate::{Limit, Limiter, OnError, Redis, Rule};
use tollgate_testing::redis_server::{Server, patient};
use tollgate_testing::repository::read;

use super::{
    ask_maps, batch, call, complete, crawl, export, guess, login, pay, report, report_in_turn, send_mail, upload,
};

const DEADLINE: Duration = Duration::from_millis(200);
const ONE: NonZeroU32 = NonZeroU32::MIN;
const LOCAL: OnError = OnError::Local { processes: ONE };

fn limiter(url: &str) -> Limiter {
    patient(url)
}

/// A limiter whose Redis is unreachable, for rules that don't say what then.
fn away(on_error: OnError) -> Limiter {
    let mut server = Server::start();
    server.stop();
    limiter(&server.tcp_url()).to_builder().deadline(DEADLINE).on_error(on_error).build()
}

async fn left(limiter: &Limiter, text: &str, name: &str, key: &str) -> u64 {
    let rule = Rule::new(name, text).expect("a rule");
    limiter.peek(&rule, key).await.expect("a decision").remaining
}

/// Each function that the README or the guide shows is in `recipes.rs`, to the letter, and that has no others.
#[test]
fn documented_recipes_are_those_that_are_tested() {
    let tested = include_str!("../recipes.rs");
    let functions = |text: &str| -> Vec<String> {
        // A whole program's main is compiled, and not called.
        let begins = |(at, _): &(usize, &str)| text[..*at].ends_with('\n') && !text[*at..].starts_with("async fn main");
        let starts = text.match_indices("async fn ").filter(begins).map(|(at, _)| at);
        starts.map(|at| text[at..].split_inclusive("\n}\n").next().expect("a function").to_owned()).collect()
    };
    let pages = ["README.md", "src/guide.md", "src/guide/load.md"].map(read);
    let shown: Vec<_> = pages.iter().flat_map(|page| functions(page)).collect();
    let tested = functions(tested);
    for function in &shown {
        assert!(tested.contains(function), "shown, and not tested as shown:\n{function}");
    }
    for function in &tested {
        assert!(shown.contains(function), "tested, and not shown:\n{function}");
    }
}

/// So many wrong passwords for this account at once; how many of them were looked at.
async fn guesses(limiter: &Limiter, account: &str, count: usize) -> usize {
    let looked_at = AtomicUsize::new(0);
    let answers = join_all((0..count).map(|_| {
        login(limiter, account, async {
            looked_at.fetch_add(1, Ordering::Relaxed);
            // As long as a password's hash takes, so that all are under way together.
            tokio::time::sleep(Duration::from_millis(50)).await;
            false
        })
    }))
    .await;
    let refused = answers.iter().filter(|answer| answer.is_err()).count();
    assert_eq!(refused + looked_at.load(Ordering::Relaxed), count, "looked at, or refused without a look");
    looked_at.into_inner()
}

const SHARED_URL: &str = "TOLLGATE_TEST_LOGIN_URL";

/// Against a Redis of its own or, as the second process of the next test, against that one's.
#[tokio::test]
async fn a_process_checks_at_most_five_passwords_of_an_account() {
    match std::env::var(SHARED_URL) {
        Ok(url) => println!("looked at {}", guesses(&limiter(&url), "anna", 100).await),
        Err(_) => {
            let server = Server::start();
            assert_eq!(guesses(&limiter(&server.url()), "anna", 100).await, 5);
        }
    }
}

#[tokio::test]
async fn of_200_guesses_at_once_by_two_processes_five_are_looked_at() {
    let server = Server::start();
    let mut other = tokio::process::Command::new(std::env::current_exe().expect("this program"));
    other.args(["--exact", "recipes::tests::a_process_checks_at_most_five_passwords_of_an_account", "--nocapture"]);
    other.env(SHARED_URL, server.url()).stdin(Stdio::null()).kill_on_drop(true);
    let limiter = limiter(&server.url());
    let (here, other) = tokio::join!(guesses(&limiter, "anna", 100), other.output());
    let there = String::from_utf8(other.expect("another process").stdout).expect("text");
    let (_, there) = there.split_once("looked at ").unwrap_or_else(|| panic!("no count: {there}"));
    let there: usize = there.lines().next().expect("a line").trim().parse().expect("a count");
    assert_eq!(here + there, 5, "{here} here, {there} there");

    // The right password waits too; then the counts are reset.
    login(&limiter, "anna", async { true }).await.expect_err("denied");
    // However the account is spelled.
    for account in ["Anna", " anna ", "ANNA\t"] {
        login(&limiter, account, async { panic!("nobody looks") }).await.expect_err("denied");
    }
    let request = || async { limiter.reset(&rule_of_logins(), "anna").await };
    request().await.expect("forgotten");
    for _ in 0..8 {
        for _ in 0..4 {
            assert!(!login(&limiter, "anna", async { false }).await.expect("the fourth at most"));
        }
        assert!(login(&limiter, "anna", async { true }).await.expect("the fifth"), "and it forgets the others");
    }
}

fn rule_of_logins() -> Rule {
    Rule::new("logins", "sliding-log 5/15m").expect("a rule")
}

#[tokio::test]
async fn nobody_guesses_a_password_during_a_redis_outage_whatever_the_limiters_policy() {
    for on_error in [OnError::Open, LOCAL, OnError::Closed] {
        let away = away(on_error);
        assert_eq!(guesses(&away, "anna", 200).await, 0, "{on_error}");
        guess(&away, "anna").await.expect_err("closed");
    }
}

#[tokio::test]
async fn redis_may_go_and_come_back_between_the_attempt_and_its_end() {
    for on_error in [OnError::Closed, OnError::Open, LOCAL] {
        let mut server = Server::start();
        // A server that is stopped refuses at once.
        let limiter = limiter(&server.tcp_url()).to_builder().on_error(on_error).build();
        let goes = async {
            server.stop();
            true
        };
        assert!(login(&limiter, "anna", goes).await.expect("the password was right"), "{on_error}: gone");
        let text = complete(&limiter, "one", 5, async { Ok(("text".to_owned(), 7)) }).await;
        match on_error {
            OnError::Closed => assert!(text.is_err(), "closed"),
            _ => assert_eq!(text.expect("a policy answered"), "text"),
        }
        if on_error == OnError::Closed {
            continue;
        }
        let comes_back = async {
            server.start_again(&[]);
            server.wait_until_it_answers();
            Ok(("text".to_owned(), 7))
        };
        assert_eq!(complete(&limiter, "two", 5, comes_back).await.expect("done"), "text", "{on_error}: back");
    }
}

#[tokio::test]
async fn concurrent_completions_are_charged_what_they_used() {
    let server = Server::start();
    let limiter = limiter(&server.url());
    let one = |number: u64| {
        let (limiter, id) = (&limiter, format!("completion-{number}"));
        async move {
            let model = async {
                tokio::time::sleep(Duration::from_millis(20)).await;
                // Every tenth fails, and is charged nothing.
                if number % 10 == 9 { Err("the model failed".into()) } else { Ok((id.clone(), 100 + number)) }
            };
            complete(limiter, &id, 150, model).await
        }
    };
    let texts = join_all((0..100).map(one)).await;
    assert_eq!(texts[98].as_ref().expect("a text"), "completion-98");
    assert_eq!(texts[99].as_ref().expect_err("no text").to_string(), "the model failed");
    let used: u64 = (0..100).filter(|number| number % 10 != 9).map(|number| 100 + number).sum();
    let tokens = "token-bucket 100000/1m max-debt 20000".parse::<Limit>().and_then(|limit| limit.named("tokens"));
    let tokens = tokens.and_then(|limit| Rule::new("model", limit)).expect("the recipe's limit");
    let left = limiter.peek(&tokens, "acme").await.expect("an answer").remaining;
    // A minute refills all, so that no machine is slow enough to refill a fifth meanwhile.
    assert!((100_000 - used..120_000 - used).contains(&left), "{left} are left after {used} were used");
}

#[tokio::test]
async fn mails_are_sent_one_by_one_and_by_policy_during_a_redis_outage() {
    let server = Server::start();
    let limiter = limiter(&server.url());
    let begun = std::time::Instant::now();
    for sent in join_all((0..8).map(|_| send_mail(&limiter))).await {
        sent.expect("in turn");
    }
    assert!(begun.elapsed() >= Duration::from_millis(700), "eight at 10 a second");
    join_all((0..8).map(|_| send_mail(&limiter))).await.into_iter().for_each(|sent| sent.expect("in turn"));
    send_mail(&away(OnError::Open)).await.expect("open");
    send_mail(&away(LOCAL)).await.expect("decided here");
    send_mail(&away(OnError::Closed)).await.expect_err("closed");
}

#[tokio::test]
async fn eight_reports_run_at_a_time_and_continue_by_policy_during_a_redis_outage() {
    let server = Server::start();
    let limiter = limiter(&server.url());
    join_all((0..40).map(|_| report_in_turn(&limiter, "acme"))).await.into_iter().for_each(|done| done.expect("done"));
    limiter.finish().await;
    let done = join_all((0..40).map(|_| report(&limiter, "acme"))).await;
    let denied = done.iter().filter_map(|done| done.as_ref().err()).map(ToString::to_string);
    denied.for_each(|why| assert_eq!(why, "rule reports: denied by concurrency 8 ttl 30s"));
    assert!(done.iter().filter(|done| done.is_ok()).count() >= 8);
    limiter.finish().await;
    assert_eq!(left(&limiter, "concurrency 8 ttl 30s", "reports", "acme").await, 8, "all given back");
    for on_error in [OnError::Open, LOCAL] {
        let away = away(on_error);
        report(&away, "acme").await.expect("a policy answered");
        report_in_turn(&away, "acme").await.expect("a policy answered");
    }
    report(&away(OnError::Closed), "acme").await.expect_err("closed");
}

#[tokio::test]
async fn three_calls_to_a_third_party_run_at_a_time_and_all_make_the_pause_that_it_wants() {
    let server = Server::start();
    let limiters = [limiter(&server.url()), limiter(&server.url())];
    let (running, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let maps = || async {
        most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(300)).await;
        running.fetch_sub(1, Ordering::SeqCst);
        Ok("here".to_owned())
    };
    let answers = join_all((0..12).map(|at| ask_maps(&limiters[at % 2], maps()))).await;
    answers.into_iter().for_each(|answer| assert_eq!(answer.expect("an answer"), "here"));
    assert!(most.load(Ordering::SeqCst) <= 3, "{most:?}");

    let pause = Duration::from_secs(3600);
    let wants_none = ask_maps(&limiters[0], async { Err(pause) }).await.expect_err("a pause");
    assert_eq!(wants_none.to_string(), "maps wants no calls for 3600s");
    ask_maps(&limiters[1], async { unreachable!("no call is made") }).await.expect_err("blocked");
}

#[tokio::test]
async fn during_a_redis_outage_a_third_party_is_called_by_policy() {
    assert!(ask_maps(&away(OnError::Open), async { Ok(String::new()) }).await.is_ok());
    ask_maps(&away(OnError::Closed), async { unreachable!("no call is made") }).await.expect_err("unreachable");
}

#[tokio::test]
async fn uploads_calls_and_payments_at_once_are_admitted_exactly() {
    let server = Server::start();
    let limiter = limiter(&server.url());
    // A minute refills 100, so five seconds refill eight.
    let uploads = join_all((0..60).map(|_| upload(&limiter, "anna", 5))).await;
    assert!((20..=24).contains(&uploads.iter().filter(|done| done.is_ok()).count()));

    let calls = join_all((0..60).map(|_| call(&limiter, "anna", "acme"))).await;
    let allowed = calls.into_iter().filter(|allowed| *allowed.as_ref().expect("a decision")).count();
    assert!((10..=60).contains(&allowed), "{allowed}");

    let paid = join_all((0..20).map(|_| pay(&limiter, "anna", "payment-4711"))).await;
    assert!(paid.iter().all(|paid| paid.as_ref().is_ok_and(|decision| decision.allowed && decision.remaining == 9)));

    for on_error in [OnError::Open, LOCAL] {
        let away = away(on_error);
        upload(&away, "anna", 5).await.expect("a policy answered");
        assert!(call(&away, "anna", "acme").await.expect("a policy answered"));
        assert!(pay(&away, "anna", "payment-4711").await.expect("a policy answered").allowed);
    }
    let closed = away(OnError::Closed);
    upload(&closed, "anna", 5).await.expect_err("closed");
    call(&closed, "anna", "acme").await.expect_err("closed");
    pay(&closed, "anna", "payment-4711").await.expect_err("closed");
}

#[tokio::test]
async fn a_batch_counts_each_key_by_itself_and_reports_an_outage() {
    let mut server = Server::start();
    let keys: Vec<_> = (0..300).map(|key| format!("user:{}", key % 3)).collect();
    let redis = || Redis::open(&server.tcp_url()).expect("a good address");
    let allowed = batch(redis(), &keys).await.expect("decisions");
    // 20 each, and what 100 a second refill meanwhile.
    assert!((60..300).contains(&allowed), "{allowed}");
    let gone = redis();
    server.stop();
    batch(gone, &keys).await.expect_err("the policy is the error");
}

#[tokio::test]
async fn five_of_all_guesses_at_once_are_looked_at_and_then_the_account_is_shut() {
    let server = Server::start();
    let limiter = limiter(&server.tcp_url());
    let guesses = join_all((0..20).map(|_| guess(&limiter, "alice"))).await;
    let guesses: Vec<_> = guesses.into_iter().map(|guess| guess.expect("a decision")).collect();
    assert_eq!(guesses.iter().filter(|guess| guess.allowed).count(), 5);
    for denied in guesses.iter().filter(|guess| !guess.allowed) {
        let wait = denied.retry_after.duration().expect("a wait");
        assert!(denied.blocked && wait > Duration::from_secs(3500) && wait <= Duration::from_secs(3600), "{denied:?}");
    }
    assert!(guess(&limiter, " Alice").await.expect("a decision").blocked);
    assert!(guess(&limiter, "bob").await.expect("a decision").allowed);
}

#[tokio::test]
async fn a_crawler_that_goes_on_is_blocked_and_one_that_stops_is_not() {
    let server = Server::start();
    let limiter = limiter(&server.url());
    let decisions = join_all((0..30).map(|_| crawl(&limiter, "crawler"))).await;
    let allowed = decisions.iter().filter(|decision| decision.as_ref().is_ok_and(|decision| decision.allowed));
    assert_eq!(allowed.count(), 1);
    assert!(crawl(&limiter, "crawler").await.expect("a decision").blocked);
    for _ in 0..10 {
        crawl(&limiter, "human").await.expect("a decision");
    }
    assert!(!crawl(&limiter, "human").await.expect("a decision").blocked, "nine denials");
    assert!(crawl(&away(OnError::Open), "crawler").await.expect("open").allowed);
    crawl(&away(OnError::Closed), "crawler").await.expect_err("closed");
}

#[tokio::test]
async fn an_export_is_paid_here_once_the_limit_is_hot_and_returns_the_rest() {
    let server = Server::start();
    let limiter = limiter(&server.url());
    let exports = join_all((0..8).map(|_| export(&limiter, NonZeroU32::new(8).expect("not zero"), 100))).await;
    assert!(exports.iter().all(Result::is_ok), "admitted");
    let text = "fixed-window 100000/1d";
    assert_eq!(left(&limiter, text, "exports", "everybody").await, 99_200);
    let rule = Rule::new("exports", text).expect("a rule");
    limiter.penalty(&rule, tollgate::Request::new("everybody").cost(70_000)).await.expect("taken");
    assert!(export(&limiter, ONE, 2000).await.expect("admitted") > 1000, "the limit is hot");
    assert_eq!(left(&limiter, text, "exports", "everybody").await, 27_200, "what was unused went back");
    export(&away(OnError::Open), ONE, 5).await.expect("open");
    export(&away(OnError::Closed), ONE, 5).await.expect_err("closed");
}
