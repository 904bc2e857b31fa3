//! Batching: decisions queued at the same time go out together, and each is decided as if it were alone.

use std::collections::HashMap;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::task::JoinSet;
use tollgate::redis::cmd;
use tollgate::{Algorithm, Charged, Decision, Error, ErrorKind, Limiter, Request, RetryAfter, Rule};
use tollgate_testing::polling::PATIENCE;
use tollgate_testing::redis_server::{Server, patient};
use tollgate_testing::rules::{assert_of_every_algorithm, rule};

pub(super) fn limiter(server: &Server) -> Limiter {
    patient(&server.url())
}

/// One task for each request, all sent before any is answered; returns their answers in that order.
pub(super) async fn at_once(
    limiter: &Limiter,
    requests: Vec<(Arc<Rule>, String, u64)>,
) -> Vec<Result<Decision, Error>> {
    let mut tasks = JoinSet::new();
    for (at, (rule, key, cost)) in requests.into_iter().enumerate() {
        let limiter = limiter.clone();
        tasks.spawn(async move { (at, limiter.acquire(&rule, Request::new(&key).cost(cost)).await) });
    }
    let mut answers = tasks.join_all().await;
    answers.sort_by_key(|(at, _)| *at);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

#[tokio::test]
async fn queued_callers_of_one_key_are_one_call_and_the_first_are_allowed() {
    let server = Server::start();
    let limiter = limiter(&server);
    let texts = [
        "token-bucket 300/30d",
        "fixed-window 300/30d",
        "fixed-window 300/year",
        "sliding-window 300/30d",
        "sliding-log 300/30d",
    ];
    assert_of_every_algorithm(&texts, &[Algorithm::Concurrency]);
    for text in texts {
        let rule = Arc::new(rule(text));
        limiter.acquire(&rule, "warm").await.expect("a decision");
        server.reset_command_counts();
        let answers = at_once(&limiter, vec![(Arc::clone(&rule), "key".into(), 1); 500]).await;
        let decisions: Vec<_> = answers.into_iter().map(|answer| answer.expect("a decision")).collect();
        let allowed = decisions.iter().filter(|decision| decision.allowed).count();
        assert_eq!(allowed, 300, "{text}");
        // One goes alone, the others are one call.
        assert!(decisions[..300].iter().all(|decision| decision.allowed), "{text}: in the order in which they came");
        assert_eq!(decisions[0].remaining, 299, "{text}");
        for decision in &decisions[1..] {
            assert_eq!((decision.capacity, decision.remaining), (300, 0), "{text}: as it stands after the call");
            let waits = matches!(decision.retry_after, RetryAfter::After(_));
            assert_eq!(waits, !decision.allowed, "{text}");
            assert_eq!(decision.granted, u64::from(decision.allowed), "{text}");
        }
        assert_eq!(server.commands()["evalsha"].0, 2, "{text}");
    }
}

#[tokio::test]
async fn many_keys_of_some_rules_at_any_cost_are_a_few_calls_and_each_is_exact() {
    let server = Server::start();
    let limiter = limiter(&server);
    let rules: Vec<_> =
        ["token-bucket 10/30d", "fixed-window 10/30d", "sliding-log 10/30d"].map(|text| Arc::new(rule(text))).into();
    for rule in &rules {
        limiter.acquire(rule, "warm").await.expect("a decision");
    }
    server.reset_command_counts();
    let requests: Vec<_> = (0..900_usize)
        .map(|n| (Arc::clone(&rules[n % 3]), format!("k{}", n / 3 % 50), [1, 1, 3, 0][n / 150 % 4]))
        .collect();
    let answers = at_once(&limiter, requests.clone()).await;
    let mut taken: HashMap<(String, String), u64> = HashMap::new();
    for ((rule, key, cost), answer) in requests.iter().zip(answers) {
        let decision = answer.expect("a decision");
        let taken = taken.entry((rule.to_string(), key.clone())).or_default();
        assert!(decision.allowed || *cost > 0, "{rule}: cost 0 is allowed");
        *taken += if decision.allowed { *cost } else { 0 };
    }
    for ((rule, key), taken) in &taken {
        // Six calls of each key: 1, 1, 3, 0, 1, 1 in some order, which all fit.
        let rule = rules.iter().find(|one| one.to_string() == *rule).expect("one of them");
        let left = limiter.peek(rule, key).await.expect("a decision").remaining;
        assert_eq!((*taken, left), (7, 3), "{rule} {key}");
    }
    let calls = server.commands()["evalsha"].0;
    assert!(calls < 20, "{calls} calls for 900 decisions");
}

#[tokio::test]
async fn an_unreadable_key_fails_its_own_callers_alone() {
    let server = Server::start();
    let limiter = limiter(&server);
    let texts = [
        "token-bucket 5/30d",
        "fixed-window 5/30d",
        "fixed-window 5/year",
        "sliding-window 5/30d",
        "sliding-log 5/30d",
    ];
    assert_of_every_algorithm(&texts, &[Algorithm::Concurrency]);
    for text in texts {
        let rule = Arc::new(rule(text));
        let name = limiter.inspect(&rule, "k").await.expect("a state")[0].key.clone();
        let mut redis = server.connection();
        cmd("SET").arg(name.replace("{k}", "{k10}")).arg("poisoned").exec(&mut redis).expect("written");
        cmd("LPUSH").arg(name.replace("{k}", "{k20}")).arg("poisoned").exec(&mut redis).expect("written");
        let requests = (0..100).map(|n| (Arc::clone(&rule), format!("k{}", n % 50), 1)).collect();
        for (n, answer) in at_once(&limiter, requests).await.into_iter().enumerate() {
            match (n % 50, answer) {
                (10 | 20, Err(error)) => {
                    assert!(
                        error.kind() == ErrorKind::UnreadableState && error.charged() == Charged::No,
                        "{text}: {error}"
                    );
                }
                (10 | 20, Ok(decision)) => panic!("{text}: {n} {decision:?}"),
                (_, answer) => assert!(answer.expect("a decision").allowed, "{text}: {n}"),
            }
        }
        assert_eq!(limiter.peek(&rule, "k11").await.expect("a decision").remaining, 3, "{text}");
    }
}

#[tokio::test]
async fn a_caller_that_gives_up_while_queued_is_not_charged_and_delays_no_other() {
    let server = Server::start();
    let limiter = limiter(&server);
    let rule = Arc::new(rule("gcra 1000/30d"));
    limiter.acquire(&rule, "key").await.expect("a decision");
    server.signal("-STOP");
    let asks = |tasks: &mut JoinSet<_>| {
        let (limiter, rule) = (limiter.clone(), Arc::clone(&rule));
        tasks.spawn(async move { limiter.acquire(&rule, "key").await });
    };
    let settle = || async {
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
    };
    // One alone, and one in the second and last batch that may be in flight.
    let (mut sent, mut given_up, mut patient) = (JoinSet::new(), JoinSet::new(), JoinSet::new());
    for _ in 0..2 {
        asks(&mut sent);
        settle().await;
    }
    (0..100).for_each(|_| asks(&mut given_up));
    settle().await;
    asks(&mut patient);
    settle().await;
    given_up.shutdown().await;
    server.signal("-CONT");
    for answer in sent.join_all().await.into_iter().chain(patient.join_all().await) {
        assert!(answer.expect("a decision").allowed);
    }
    // The first of all, the two that had left, and the patient one.
    assert_eq!(limiter.peek(&rule, "key").await.expect("a decision").remaining, 1000 - 4);
}

#[tokio::test]
async fn every_caller_ends_by_its_deadline_and_learns_whether_it_was_sent() {
    let server = Server::start();
    let (limiter, another) = (limiter(&server), limiter(&server));
    let rule = Arc::new(rule("gcra 1000/30d"));
    limiter.acquire(&rule, "key").await.expect("a decision");
    server.signal("-STOP");
    let short = limiter.to_builder().deadline(Duration::from_millis(100)).build();
    let long = limiter.to_builder().deadline(Duration::from_millis(200)).build();
    let (first, second) = tokio::join!(
        at_once(&short, vec![(Arc::clone(&rule), "key".into(), 1); 50]),
        at_once(&long, vec![(Arc::clone(&rule), "key".into(), 1); 50]),
    );
    let errors: Vec<_> = first.into_iter().chain(second).map(|answer| answer.expect_err("no answer")).collect();
    assert!(errors.iter().all(|error| error.kind() == ErrorKind::Deadline));
    let unknown = errors.iter().filter(|error| error.charged() == Charged::Unknown).count();
    assert!(unknown > 0, "some were sent at once");
    server.signal("-CONT");
    let left = another.acquire(&rule, "key").await.expect("a decision").remaining;
    let charged = 1000 - 2 - left;
    assert!(charged <= unknown as u64, "{charged} were charged and {unknown} were told that it may be so");
}

#[test]
fn a_runtime_that_ends_leaves_no_caller_of_the_next_one_unanswered() {
    let server = Server::start();
    let (limiter, rule) = (limiter(&server), Arc::new(rule("gcra 1000/30d")));
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let first = runtime();
    first.block_on(limiter.acquire(&rule, "key")).expect("a decision");
    server.signal("-STOP");
    for _ in 0..50 {
        let (limiter, rule) = (limiter.clone(), Arc::clone(&rule));
        first.spawn(async move { limiter.acquire(&rule, "key").await });
    }
    first.block_on(async {
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
    });
    drop(first);
    server.signal("-CONT");
    let short = limiter.to_builder().deadline(Duration::from_secs(5)).build();
    let answers = runtime().block_on(async {
        // The connection ended with the first runtime: the call that finds it closed fails, and the next gets another.
        let found = short.acquire(&rule, "key").await;
        (found, at_once(&short, vec![(Arc::clone(&rule), "key".into(), 1); 50]).await)
    });
    assert!(answers.0.is_ok() || answers.0.is_err_and(|error| error.kind() == ErrorKind::Disconnected));
    assert!(answers.1.iter().all(Result::is_ok), "{:?}", answers.1);
}

#[tokio::test]
async fn a_caller_that_gives_up_before_the_connection_is_made_is_not_sent() {
    let server = Server::start();
    let (limiter, rule) = (limiter(&server), Arc::new(rule("gcra 1000/30d")));
    server.signal("-STOP");
    let ask = |deadline| {
        let (limiter, rule) = (limiter.to_builder().deadline(deadline).build(), Arc::clone(&rule));
        tokio::spawn(async move { limiter.acquire(&rule, "key").await })
    };
    let first = ask(PATIENCE);
    tokio::task::yield_now().await;
    // These share a batch, for which a connection is still made when one of them gives up.
    let (impatient, patient) = (ask(Duration::from_millis(50)), ask(PATIENCE));
    let error = impatient.await.expect("a task").expect_err("no connection");
    assert_eq!(error.charged(), Charged::No);
    server.signal("-CONT");
    for task in [first, patient] {
        assert!(task.await.expect("a task").expect("a decision").allowed);
    }
    assert_eq!(limiter.peek(&rule, "key").await.expect("a decision").remaining, 998);
}

/// The denied key's expiry must be extended, and that is the first thing that its call writes.
#[tokio::test]
async fn no_batched_call_writes_to_a_redis_out_of_memory() {
    let server = Server::start();
    let limiter = limiter(&server);
    for (text, changed) in
        [("token-bucket 10/1d", "token-bucket 1/1d burst 10"), ("fixed-window 10/1d", "fixed-window 1/1d burst 10")]
    {
        let (was, rule) =
            (rule(text).named("changed").expect("a name"), rule(changed).named("changed").expect("a name"));
        limiter.acquire(&was, Request::new("full").cost(10)).await.expect("a decision");
        let memory = |bytes: &'static str| {
            cmd("CONFIG").arg(&["SET", "maxmemory", bytes]).exec(&mut server.connection()).expect("set");
        };
        memory("1");
        let answers = limiter.acquire_many(&rule, ["full", "fresh", "fresh too"]).await;
        memory("0");
        let untaken = |answer: &Result<_, Error>| answer.as_ref().is_err_and(|error| error.charged() == Charged::No);
        assert!(answers[1..].iter().all(untaken), "{changed}: {answers:?}");
        assert_eq!(limiter.peek(&rule, "fresh").await.expect("a decision").remaining, 10, "{changed}");
    }
}

#[tokio::test]
async fn a_redis_out_of_memory_charges_no_log_whose_expiry_it_would_have_to_set() {
    let server = Server::start();
    let limiter = limiter(&server);
    let named = |text: &str| rule(text).named("changed").expect("a name");
    let (was, rule) = (named("sliding-log 900/1h"), named("sliding-log 1000/1h"));
    for _ in 0..50 {
        limiter.acquire(&was, "key").await.expect("a decision");
    }
    let memory = |bytes: &'static str| {
        cmd("CONFIG").arg(&["SET", "maxmemory", bytes]).exec(&mut server.connection()).expect("set");
    };
    memory("1");
    let alone = limiter.acquire(&rule, "key").await;
    let answers = limiter.acquire_many(&rule, ["key", "fresh", "fresh too"]).await;
    memory("0");
    assert!(alone.is_err() && answers.iter().all(Result::is_err), "{alone:?}, {answers:?}");
    assert_eq!(limiter.peek(&rule, "key").await.expect("a decision").remaining, 950);
    assert_eq!(limiter.peek(&rule, "fresh").await.expect("a decision").remaining, 1000);
}

#[tokio::test]
async fn callers_of_one_key_are_decided_in_order() {
    let server = Server::start();
    let (limiter, rule) = (limiter(&server), rule("gcra 4/30d"));
    let costs = [1, 3, 1, 1];
    let answers = limiter.acquire_many(&rule, costs.map(|cost| Request::new("key").cost(cost))).await;
    let allowed: Vec<_> = answers.iter().map(|answer| answer.as_ref().expect("a decision").allowed).collect();
    assert_eq!(allowed, [true, true, false, false]);
}

#[tokio::test]
async fn the_longest_deadline_means_no_deadline() {
    let server = Server::start();
    let limiter = limiter(&server).to_builder().deadline(Duration::MAX).build();
    let rule = Arc::new(rule("gcra 100/30d"));
    let answers = at_once(&limiter, vec![(Arc::clone(&rule), "key".into(), 1); 20]).await;
    assert!(answers.iter().all(Result::is_ok));
}

#[test]
fn callers_do_not_depend_on_another_runtime() {
    let server = Server::start();
    let (limiter, rule) = (limiter(&server), Arc::new(rule("gcra 1000/30d")));
    let driven = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    driven.block_on(limiter.acquire(&rule, "key")).expect("a decision");
    server.signal("-STOP");
    // Runtimes that are no longer driven once their caller is answered.
    let (tell, told) = std::sync::mpsc::channel();
    let callers: Vec<_> = (0..6)
        .map(|_| {
            let (limiter, rule, tell) = (limiter.clone(), Arc::clone(&rule), tell.clone());
            std::thread::spawn(move || {
                let own = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
                let answer = own.block_on(async {
                    let mut asking = pin!(limiter.acquire(&rule, "key"));
                    begun(asking.as_mut()).await;
                    tell.send(None).expect("somebody to tell");
                    asking.await
                });
                tell.send(Some(answer)).expect("somebody to tell");
                own
            })
        })
        .collect();
    let next = || told.recv_timeout(PATIENCE).expect("nobody depends on a runtime that isn't driven");
    assert!((0..6).all(|_| next().is_none()));
    server.signal("-CONT");
    assert!((0..6).all(|_| next().expect("an answer").expect("a decision").allowed));
    drop(callers);
    assert!(driven.block_on(limiter.acquire(&rule, "key")).expect("a decision").allowed);
}

#[test]
fn a_batch_that_was_never_sent_holds_up_no_other() {
    let server = Server::start();
    let (limiter, rule) =
        (limiter(&server).to_builder().deadline(Duration::from_secs(5)).build(), Arc::new(rule("gcra 1000/30d")));
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let first = runtime();
    first.block_on(limiter.acquire(&rule, "key")).expect("a decision");
    server.signal("-STOP");
    // The second begins a task that is to send it and has had no turn as the runtime ends.
    first.block_on(async {
        let (mut alone, mut queued) = (pin!(limiter.acquire(&rule, "key")), pin!(limiter.acquire(&rule, "key")));
        begun(alone.as_mut()).await;
        begun(queued.as_mut()).await;
    });
    drop(first);
    server.signal("-CONT");
    let answers = runtime().block_on(async {
        // The connection went with the first runtime.
        let _ = limiter.acquire(&rule, "key").await;
        at_once(&limiter, vec![(Arc::clone(&rule), "key".into(), 1); 50]).await
    });
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
}

/// Sends the call, and doesn't wait for its answer.
async fn begun(mut asking: Pin<&mut impl Future>) {
    tokio::select! {
        biased;
        _ = &mut asking => {}
        () = std::future::ready(()) => {}
    }
}

#[test]
fn a_runtime_may_end_while_callers_are_queued() {
    for workers in [0, 2] {
        let server = Server::start();
        let (limiter, rule) = (limiter(&server), Arc::new(rule("gcra 1000/30d")));
        let runtime = match workers {
            0 => tokio::runtime::Builder::new_current_thread().enable_all().build(),
            _ => tokio::runtime::Builder::new_multi_thread().worker_threads(workers).enable_all().build(),
        }
        .expect("a runtime");
        runtime.block_on(limiter.acquire(&rule, "key")).expect("a decision");
        server.signal("-STOP");
        for _ in 0..5 {
            for _ in 0..20 {
                let (limiter, rule) = (limiter.clone(), Arc::clone(&rule));
                runtime.spawn(async move { limiter.acquire(&rule, "key").await });
            }
            runtime.block_on(async {
                for _ in 0..20 {
                    tokio::task::yield_now().await;
                }
            });
        }
        // This hung where a task was begun under the queue's lock.
        drop(runtime);
    }
}

#[tokio::test]
async fn a_script_cache_flushed_before_a_batch_costs_no_caller_an_answer() {
    let server = Server::start();
    let limiter = limiter(&server);
    let rules: Vec<_> = ["fixed-window 90/30d", "token-bucket 90/30d"].map(|text| Arc::new(rule(text))).into();
    for rule in &rules {
        limiter.acquire(rule, "warm").await.expect("a decision");
    }
    server.signal("-STOP");
    let asking = {
        let (limiter, requests) =
            (limiter.clone(), (0..400).map(|n| (Arc::clone(&rules[n % 2]), "key".to_owned(), 1)).collect());
        tokio::spawn(async move { at_once(&limiter, requests).await })
    };
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    server.signal("-CONT");
    cmd("SCRIPT").arg("FLUSH").exec(&mut server.connection()).expect("flushed");
    let answers = asking.await.expect("a task");
    let allowed = answers.into_iter().filter(|answer| answer.as_ref().expect("a decision").allowed).count();
    assert_eq!(allowed, 180);
}

#[tokio::test]
async fn acquire_many_is_one_round_trip_in_order() {
    let server = Server::start();
    let limiter = limiter(&server);
    let rule = rule("gcra 3/30d");
    limiter.acquire(&rule, "warm").await.expect("a decision");
    server.reset_command_counts();
    let keys: Vec<_> = (0..250).map(|n| format!("k{n}")).collect();
    let decisions = limiter.acquire_many(&rule, keys.iter().map(|key| Request::new(key).cost(2))).await;
    assert!(decisions.iter().all(|decision| decision.as_ref().is_ok_and(|decision| decision.remaining == 1)));
    assert_eq!(server.commands()["evalsha"].0, 4, "eighty keys each at most");

    let mixed = [
        Request::new("k0").cost(1),
        Request::new(""),
        Request::new("k0").cost(1),
        Request::new("k1").cost(4),
        Request::new("k1").cost(1).id("one"),
        Request::new("k2").cost(0),
    ];
    let answers = limiter.acquire_many(&rule, mixed).await;
    let allowed: Vec<_> = answers.iter().map(|answer| answer.as_ref().ok().map(|decision| decision.allowed)).collect();
    assert_eq!(allowed, [Some(true), None, Some(false), Some(false), Some(true), Some(true)]);
    assert!(answers[1].as_ref().expect_err("an empty key").is_input());
    assert_eq!(answers[3].as_ref().expect("a decision").retry_after, RetryAfter::Never);
    assert!(limiter.acquire_many(&rule, [] as [&str; 0]).await.is_empty());
}

/// More than a batch takes, none of which can be sent.
#[tokio::test]
async fn a_long_queue_ends_by_its_deadlines_and_the_next_caller_is_served() {
    const CALLERS: usize = 100_000;
    let server = Server::start();
    let (limiter, another) =
        (limiter(&server).to_builder().deadline(Duration::from_millis(300)).build(), limiter(&server));
    let rule = Arc::new(rule("gcra 1000000/30d"));
    limiter.acquire(&rule, "key").await.expect("a decision");
    server.signal("-STOP");
    // To look at each by itself would take minutes.
    let answers = at_once(&limiter, vec![(Arc::clone(&rule), "key".into(), 1); CALLERS]);
    let answers = tokio::time::timeout(PATIENCE, answers).await.expect("an end");
    assert!(answers.iter().all(Result::is_err));
    server.signal("-CONT");
    assert!(another.acquire(&rule, "key").await.expect("a decision").allowed);
}

/// A batch has 1,024 keys, so those of the many would take some thirty round trips.
#[tokio::test]
async fn a_single_caller_waits_for_no_more_than_a_few_batches_of_many() {
    let server = Server::start();
    let (limiter, rule) = (limiter(&server), rule("gcra 9/30d"));
    limiter.acquire(&rule, "first").await.expect("a decision");
    let keys: Vec<_> = (0..40_000).map(|key| format!("user:{key}")).collect();
    let decided = || cmd("DBSIZE").query::<u64>(&mut server.connection()).expect("a count");
    let mut many = pin!(limiter.acquire_many(&rule, keys.iter().map(String::as_str)));
    assert!(poll_fn(|context| Poll::Ready(many.as_mut().poll(context).is_pending())).await);
    let mut behind = 0;
    let single = async {
        // Lets the rest of the many be prepared and queued. Each time, a batch of them may be answered.
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
        let before = decided();
        let decision = limiter.acquire(&rule, "single").await;
        behind = decided() - before;
        decision
    };
    let single = tokio::select! {
        decision = single => decision,
        _ = &mut many => panic!("the single caller was answered last"),
    };
    assert!(single.expect("a decision").allowed && behind < 8 * 1024, "{behind} keys were decided meanwhile");
    assert!(many.await.iter().all(Result::is_ok));
}
