//! A server that is frozen or away.

use super::*;

#[tokio::test]
async fn calls_to_a_frozen_server_get_the_policys_answer_until_it_answers_again() {
    let server = Server::start();
    let redis = redis(&server.tcp_url());
    let limiter = Limiter::builder(redis.clone()).deadline(DEADLINE).build();
    let closed = rule("gcra 1000/1d", OnError::Closed);
    decided(&limiter, &closed, "key").await;
    server.signal("-STOP");
    by_policy(&server.tcp_url(), &["deadline", "unreachable"]).await;
    let (mut unknown, mut unsent) = (0, 0);
    while unsent < 5 {
        let error = acquire(&limiter, &closed, "key").await.expect_err("frozen");
        match error.charged() {
            Charged::Unknown => assert!(error.kind() == ErrorKind::Deadline && unsent == 0, "{error}"),
            _ => assert!(error.is_unreachable(), "{error}"),
        }
        unknown += u64::from(error.charged() == Charged::Unknown);
        unsent += u64::from(error.charged() == Charged::No);
    }
    assert!(unknown > 0);
    assert_ne!(redis.breaker(), BreakerState::Closed);
    server.signal("-CONT");
    let decision = answered_again(&limiter.to_builder().deadline(PATIENCE).build(), &closed, "key").await;
    // The one before, at most those whose outcome wasn't known, and this.
    assert!((998 - unknown..=998).contains(&decision.remaining), "{decision:?} after {unknown}");
    assert_eq!(redis.breaker(), BreakerState::Closed);
}

/// A late reply belongs to a caller that has given up.
#[tokio::test]
async fn late_replies_are_never_paired_with_other_calls() {
    let server = Server::start();
    let limiter = limiter(&server.tcp_url());
    let patient = limiter.to_builder().deadline(PATIENCE).build();
    let named = |burst| rule(&format!("gcra 1/1d burst {burst}"), OnError::Closed).named(&format!("burst-{burst}"));
    let rules: Vec<_> = (1..=50).map(|burst| named(burst).expect("a name")).collect();
    for round in 0..5 {
        server.signal("-STOP");
        for rule in &rules[..4] {
            acquire(&limiter, rule, "late").await.expect_err("frozen");
        }
        server.signal("-CONT");
        for (at, rule) in rules.iter().enumerate() {
            let decision = answered_again(&patient, rule, &format!("key {round}")).await;
            assert_eq!((decision.capacity, decision.remaining), (at as u64 + 1, at as u64));
        }
    }
}

#[tokio::test]
async fn permits_taken_locally_are_renewed_and_released_locally() {
    let server = Server::start();
    let limiter = limiter(&server.tcp_url());
    // Two of the four are this process's.
    let rule = rule("concurrency 4 ttl 1h", LOCAL);
    // On a busy machine a call may miss its short deadline.
    let elsewhere = wait_for_value(async || {
        limiter.hold(&rule, "jobs").await.ok().filter(|taken| taken.decision.by == DecidedBy::Redis)?.permit
    })
    .await;
    server.signal("-STOP");
    let mut held = Vec::new();
    for _ in 0..2 {
        let taken = in_time(limiter.hold(&rule, "jobs")).await.expect("local");
        assert_eq!((taken.decision.by.name(), taken.decision.allowed, taken.decision.capacity), ("local", true, 2));
        held.extend(taken.permit);
    }
    assert!(!in_time(limiter.hold(&rule, "jobs")).await.expect("local").decision.allowed);
    in_time(held[0].renew()).await.expect("renewed here");
    in_time(held.remove(0).release()).await.expect("released here");
    held.extend(in_time(limiter.hold(&rule, "jobs")).await.expect("local").permit);
    assert_eq!(held.len(), 2);
    assert!(in_time(elsewhere.renew()).await.is_err(), "that one is Redis's");
    server.signal("-CONT");
    answered_again(&limiter, &tollgate_testing::rules::rule("gcra 5/1d"), "another").await;
    wait_until("renewed by redis", async || elsewhere.renew().await.is_ok()).await;
    for permit in held {
        assert_eq!(in_time(permit.release()).await.expect("released").by.name(), "local");
    }
}

fn nobody() -> String {
    format!("redis://127.0.0.1:{}", tollgate_testing::redis_server::free_port())
}

#[tokio::test]
async fn a_local_wait_beyond_the_bound_is_denied_and_charged_nothing() {
    let limiter = limiter(&nobody());
    let rule = rule("gcra 10/1h burst 2 max-debt 100", LOCAL);
    assert_eq!(acquire(&limiter, &rule, "key").await.expect("local").by.name(), "local");
    for _ in 0..20 {
        let denied = in_time(limiter.acquire_wait(&rule, "key", Duration::from_secs(1))).await.expect("local");
        assert_eq!((denied.allowed, denied.by.name()), (false, "local"));
        let wait = denied.retry_after.duration().expect("a wait");
        assert!(wait <= Duration::from_secs(720), "what was denied still counts: {wait:?}");
    }
    // Dropped while it waits.
    let waiting = tokio::time::timeout(DEADLINE, limiter.acquire_wait(&rule, "key", Duration::from_secs(3600))).await;
    assert!(waiting.is_err());
    wait_for_value(async || {
        let left = limiter.reserve(&rule, Request::new("key").cost(0)).await.expect("local").reset_after;
        (left <= Duration::from_secs(720)).then_some(())
    })
    .await;
}

/// As Redis would have denied it, whatever the share rounds to.
#[tokio::test]
async fn a_cost_that_the_rule_can_never_admit_is_denied_locally_as_never() {
    let limiter = limiter(&nobody());
    for processes in [1, 2, 3] {
        let rule = rule("gcra 100/1d", OnError::Local { processes: NonZeroU32::new(processes).expect("some") });
        for request in [Request::new("key").cost(101), Request::new("key").cost(101).id("call")] {
            let denied = in_time(limiter.acquire(&rule, request)).await.expect("decided here");
            assert_eq!(
                (denied.allowed, denied.by.name(), denied.retry_after),
                (false, "local", tollgate::RetryAfter::Never)
            );
        }
    }
}

#[tokio::test]
async fn acquire_many_is_one_call_to_the_breaker() {
    let redis = redis(&nobody());
    let limiter = Limiter::builder(redis.clone()).deadline(PATIENCE).build();
    let open = rule("gcra 5/1d", OnError::Open);
    let keys: Vec<_> = (0..20).map(|key| key.to_string()).collect();
    for call in 1..=5 {
        assert_eq!(redis.breaker(), BreakerState::Closed, "{call}");
        let answers = in_time(limiter.acquire_many(&open, keys.iter().map(String::as_str))).await;
        assert!(
            answers
                .iter()
                .all(|answer| answer.as_ref().is_ok_and(|decision| matches!(decision.by, DecidedBy::Policy(_))))
        );
    }
    assert!(matches!(redis.breaker(), BreakerState::Open(pause) if pause < Duration::from_millis(200)));
}

#[tokio::test]
async fn a_cost_above_the_local_share_but_within_the_rule_is_the_error() {
    let (limiter, rule) = (limiter(&nobody()), rule("gcra 100/1s", LOCAL));
    for (cost, answered) in [(50, true), (51, false), (100, false), (101, true)] {
        let answer = in_time(limiter.acquire(&rule, Request::new("key").cost(cost))).await;
        assert_eq!(answer.is_ok(), answered, "{cost}: {answer:?}");
        let why = "; this process's share of the rule, one of 2, never admits this cost";
        assert!(answer.as_ref().err().is_none_or(|error| error.to_string().ends_with(why)), "{answer:?}");
    }
    // A share of nothing.
    let many = OnError::Local { processes: NonZeroU32::new(200).expect("some") };
    let limiter = limiter.to_builder().on_error(many).build();
    let rule = Rule::new("test", "gcra 100/1s").expect("a name");
    let error = in_time(limiter.acquire(&rule, "key")).await.expect_err("no share");
    assert!(
        error
            .to_string()
            .contains("; token-bucket 100/1s: expected a burst of at least 200 for 200 processes, got 100"),
        "{error}"
    );
}

#[tokio::test]
async fn a_permit_granted_by_policy_is_renewed_and_released_without_redis() {
    let limiter = limiter(&nobody());
    let rule = rule("concurrency 1 ttl 1h", OnError::Open);
    let permit = in_time(limiter.hold(&rule, "jobs")).await.expect("open").into_result().expect("a permit");
    in_time(permit.renew()).await.expect("nothing to renew");
    assert_eq!(in_time(permit.release()).await.expect("nothing to release").by.name(), "policy");
}

/// Every call that gives back what an earlier one took, after this decision.
async fn gives_back(
    limiter: &Limiter,
    rule: &Rule,
    after: Option<&Decision>,
) -> Vec<(&'static str, Result<Balance, Error>)> {
    let request = Request::new("key").id("id");
    let request = after.map_or(request, |decision| request.after(decision));
    let without_id = after.map_or(Request::new("key"), |decision| Request::new("key").after(decision));
    vec![
        ("refund", in_time(limiter.refund(rule, without_id)).await),
        ("settle", in_time(limiter.settle(rule, request.cost(2))).await),
        ("cancel", in_time(limiter.cancel(rule, request)).await),
        ("reset", in_time(limiter.reset(rule, request)).await),
    ]
}

#[tokio::test]
async fn giving_back_while_redis_is_unreachable_is_no_error_where_the_rule_is_open_or_local() {
    let mut server = Server::start();
    let limiter = limiter(&server.tcp_url()).to_builder().deadline(PATIENCE).build();
    server.stop();
    for on_error in [OnError::Closed, OnError::Open, LOCAL] {
        let rule = rule("gcra 10/1d", on_error);
        for (what, answer) in gives_back(&limiter, &rule, None).await {
            match on_error {
                OnError::Closed => assert!(answer.expect_err(what).charged() != Charged::Yes),
                _ => {
                    let decision = answer.expect(what);
                    assert_eq!(
                        (decision.by.name(), decision.granted, decision.by.error().is_some()),
                        ("policy", 0, true),
                        "{what}"
                    );
                }
            }
        }
        // What imposes something must not seem to be done.
        in_time(limiter.penalty(&rule, "key")).await.expect_err("not imposed");
        in_time(limiter.block(&rule, "key", PATIENCE)).await.expect_err("not blocked");
    }
}

#[tokio::test]
async fn units_admitted_by_a_policy_are_not_given_back_to_redis() {
    let mut server = Server::start();
    let limiter = limiter(&server.tcp_url()).to_builder().deadline(PATIENCE).build();
    let open = rule("gcra 10/1d", OnError::Open);
    for _ in 0..5 {
        assert_eq!(decided(&limiter, &open, "key").await.by, DecidedBy::Redis);
    }
    cmd("SAVE").exec(&mut server.connection()).expect("saved");
    server.stop();
    // The first may have been sent before the connection was seen to be broken.
    acquire(&limiter, &open, "key").await.expect("open");
    let request = Request::new("key").id("id");
    let by_policy = in_time(limiter.acquire(&open, request)).await.expect("open");
    assert_eq!((by_policy.by.name(), by_policy.by.error().expect("why").charged()), ("policy", Charged::No));
    server.start_again(&[]);
    server.wait_until_it_answers();
    let before = answered_again(&limiter, &open, "key").await.remaining;
    assert_eq!(before, 4, "as it was saved, and one more");
    for (what, answer) in gives_back(&limiter, &open, Some(&by_policy)).await {
        let decision = answer.expect(what);
        assert_eq!((decision.by.name(), decision.granted, decision.by.error()), ("policy", 0, None), "{what}");
    }
    assert_eq!(in_time(limiter.peek(&open, "key")).await.expect("a peek").remaining, before);
    // Said of a decision by Redis, it is given back there.
    let by_redis = decided(&limiter, &open, "key").await;
    in_time(limiter.refund(&open, Request::new("key").after(&by_redis))).await.expect("given back");
    assert_eq!(in_time(limiter.peek(&open, "key")).await.expect("a peek").remaining, before);
}

#[tokio::test]
async fn units_taken_locally_are_given_back_locally() {
    let mut server = Server::start();
    let limiter = limiter(&server.tcp_url()).to_builder().deadline(PATIENCE).build();
    server.stop();
    let local = rule("gcra 10/1d", OnError::Local { processes: NonZeroU32::MIN });
    let left = async || in_time(limiter.peek(&local, "key")).await.expect("decided here").remaining;
    let taken = acquire(&limiter, &local, "key").await.expect("decided here");
    assert_eq!((taken.by.name(), left().await), ("local", 9));
    let after = Request::new("key").after(&taken);
    assert_eq!(in_time(limiter.refund(&local, after)).await.expect("given back here").by.name(), "local");
    assert_eq!(left().await, 10);
    let call = Request::new("key").id("call");
    let reserved = in_time(limiter.acquire(&local, call.cost(3))).await.expect("decided here");
    in_time(limiter.settle(&local, call.cost(5).after(&reserved))).await.expect("settled here");
    assert_eq!(left().await, 5);
    in_time(limiter.cancel(&local, call.after(&reserved))).await.expect("cancelled here");
    assert_eq!(left().await, 10);
    let taken = in_time(limiter.acquire(&local, Request::new("key").cost(7))).await.expect("decided here");
    in_time(limiter.reset(&local, Request::new("key").after(&taken))).await.expect("forgotten here");
    assert_eq!(left().await, 10);
}

/// A reply that came too late: a policy answered, and Redis had taken the units all the same.
#[tokio::test]
async fn units_charged_by_redis_although_a_policy_answered_are_settled_by_their_id() {
    let server = Server::start();
    let limiter = limiter(&server.tcp_url()).to_builder().deadline(PATIENCE).build();
    let open = rule("gcra 10/1d", OnError::Open);
    // Loads the script.
    in_time(limiter.acquire(&open, Request::new("key").id("first"))).await.expect("a decision");
    server.signal("-STOP");
    let call = Request::new("key").id("call").cost(3);
    let by_policy = in_time(limiter.acquire(&open, call.deadline(DEADLINE))).await.expect("open");
    let charged = by_policy.by.error().expect("why").charged();
    assert_eq!((by_policy.by.name(), charged), ("policy", Charged::Unknown));
    server.signal("-CONT");
    answered_again(&limiter, &open, "other").await;
    assert_eq!(in_time(limiter.peek(&open, "key")).await.expect("a peek").remaining, 6, "it ran late");
    // Without an id it could be given back twice.
    let refund = in_time(limiter.refund(&open, Request::new("key").after(&by_policy))).await.expect("no error");
    assert_eq!(refund.by.name(), "policy");
    let settled = in_time(limiter.settle(&open, call.cost(1).after(&by_policy))).await.expect("settled");
    assert_eq!((settled.by, settled.remaining), (DecidedBy::Redis, 8));
}

#[tokio::test]
async fn a_limiters_policy_answers_for_rules_without_one() {
    let mut server = Server::start();
    let open = limiter(&server.tcp_url()).to_builder().deadline(PATIENCE).on_error(OnError::Open).build();
    server.stop();
    let unsaid = tollgate_testing::rules::rule("gcra 10/1d");
    assert_eq!(acquire(&open, &unsaid, "key").await.expect("open").by.name(), "policy");
    let closed = rule("gcra 10/1d", OnError::Closed);
    acquire(&open, &closed, "key").await.expect_err("the rule's own goes first");
    let local = open.to_builder().on_error(LOCAL).build();
    assert_eq!(acquire(&local, &unsaid, "key").await.expect("here").by.name(), "local");
    acquire(&local, &tollgate_testing::rules::rule("gcra 1/1d"), "key").await.expect_err("half a unit each");
}

#[tokio::test]
async fn errors_and_policy_answers_have_the_same_text_each_time() {
    let mut server = Server::start();
    let redis = redis(&server.tcp_url());
    let limiter = Limiter::builder(redis.clone()).deadline(DEADLINE).build();
    let closed = rule("gcra 10/1d", OnError::Closed);
    decided(&limiter, &closed, "key").await;
    server.signal("-STOP");
    let late = acquire(&limiter, &closed, "key").await.expect_err("frozen");
    assert_eq!(
        (late.to_string().as_str(), late.missed_deadline()),
        ("no answer from redis within the deadline", Some(DEADLINE))
    );
    let other =
        in_time(limiter.acquire(&closed, Request::new("key").deadline(DEADLINE / 2))).await.expect_err("frozen");
    assert_eq!((other.to_string(), other.missed_deadline()), (late.to_string(), Some(DEADLINE / 2)));
    server.signal("-CONT");
    answered_again(&limiter, &closed, "key").await;
    server.stop();
    let mut unsent = Vec::new();
    while unsent.len() < 3 {
        let error = acquire(&limiter, &closed, "key").await.expect_err("away");
        if error.retry_in().is_some() {
            unsent.push(error);
            tokio::time::sleep(Duration::from_millis(7)).await;
        }
    }
    let waits: std::collections::BTreeSet<_> = unsent.iter().map(|error| error.retry_in().expect("a wait")).collect();
    let words: std::collections::BTreeSet<_> = unsent.iter().map(ToString::to_string).collect();
    assert_eq!((waits.len(), words.len()), (3, 1), "{words:?}");
    let expected = "the breaker is open: redis isn't called for a while; last error: no connection";
    assert!(unsent[0].to_string().starts_with(expected), "{}", unsent[0]);
}

#[tokio::test]
async fn a_refund_gives_back_at_most_what_was_granted_and_nothing_that_redis_did_not_take() {
    let mut server = Server::start();
    let limiter = limiter(&server.tcp_url()).to_builder().deadline(PATIENCE).build();
    let local = rule("gcra 10/1d", OnError::Local { processes: NonZeroU32::MIN });
    let left = async || {
        answered_again(&limiter, &local, "spare").await.by == DecidedBy::Redis
            && in_time(limiter.peek(&local, "key")).await.expect("a peek").remaining == 0
    };
    in_time(limiter.acquire(&local, Request::new("key").cost(8))).await.expect("a decision");
    let partial = in_time(limiter.at_most(&local, Request::new("key").cost(5))).await.expect("a decision");
    let denied = decided(&limiter, &local, "key").await;
    assert_eq!((partial.granted, denied.allowed), (2, false));
    in_time(limiter.refund(&local, Request::new("key").cost(5).after(&denied))).await.expect("nothing");
    assert!(left().await, "a denied call took nothing");
    in_time(limiter.refund(&local, Request::new("key").cost(5).after(&partial))).await.expect("two");
    assert_eq!(in_time(limiter.peek(&local, "key")).await.expect("a peek").remaining, 2);
    in_time(limiter.acquire(&local, Request::new("key").cost(2))).await.expect("a decision");

    cmd("SAVE").exec(&mut server.connection()).expect("saved");
    server.stop();
    acquire(&limiter, &local, "spare").await.expect("decided here");
    let here = acquire(&limiter, &local, "key").await.expect("decided here");
    assert_eq!((here.by.name(), here.by.error().expect("why").charged()), ("local", Charged::No));
    server.start_again(&[]);
    server.wait_until_it_answers();
    assert!(left().await, "as it was saved");
    in_time(limiter.refund(&local, Request::new("key").id("refund").after(&here))).await.expect("here");
    assert!(left().await, "redis took nothing");
}

#[tokio::test]
async fn misuse_of_an_id_is_an_error_under_every_policy() {
    let server = Server::start();
    let limiter = limiter(&server.tcp_url()).to_builder().deadline(PATIENCE).build();
    let open = rule("gcra 2/1d", OnError::Open);
    in_time(limiter.penalty(&open, Request::new("key").id("pay").cost(2))).await.expect("taken");
    let error =
        in_time(limiter.acquire(&open, Request::new("key").id("pay"))).await.expect_err("another operation's id");
    assert!(error.is_input() && error.charged() == Charged::No, "{error:?}");
}

#[tokio::test]
async fn a_permit_is_renewed_where_the_decision_says_that_it_was_taken() {
    let mut server = Server::start();
    let limiter = limiter(&server.tcp_url()).to_builder().deadline(PATIENCE).build();
    let permits = rule("concurrency 1 ttl 1h", OnError::Local { processes: NonZeroU32::MIN });
    let worker = Request::new("key").id("worker-1");
    server.stop();
    assert_eq!(in_time(limiter.acquire(&permits, worker)).await.expect("decided here").by.name(), "local");
    server.start_again(&[]);
    server.wait_until_it_answers();
    answered_again(&limiter, &rule("gcra 5/1d", LOCAL), "other").await;
    let taken = in_time(limiter.acquire(&permits, worker)).await.expect("a decision");
    assert_eq!(taken.by, DecidedBy::Redis);
    let renewed = in_time(limiter.renew(&permits, worker.after(&taken))).await.expect("renewed");
    assert_eq!(renewed.by, DecidedBy::Redis);
    in_time(limiter.release(&permits, worker.after(&taken))).await.expect("released");
    let error = in_time(limiter.renew(&permits, worker.after(&taken))).await.expect_err("nothing is held");
    assert!(error.is_unknown_id(), "{error}");
}

#[tokio::test]
async fn a_reset_after_a_local_decision_is_known_to_the_cache_of_denials() {
    let mut server = Server::start();
    let cache = tollgate::DenialCache::new(100).longest(Duration::from_secs(60));
    let limiter = limiter(&server.tcp_url()).to_builder().deadline(PATIENCE).denial_cache(cache).build();
    let local = rule("gcra 2/1d", OnError::Local { processes: NonZeroU32::MIN });
    server.stop();
    let here = in_time(limiter.acquire(&local, Request::new("other").deadline(DEADLINE))).await.expect("decided here");
    assert_eq!(here.by.name(), "local");
    // Redis may have been charged as well: a reset clears the key there too.
    server.start_again(&[]);
    server.wait_until_it_answers();
    answered_again(&limiter, &local, "key").await;
    decided(&limiter, &local, "key").await;
    assert!(!acquire(&limiter, &local, "key").await.expect("denied").allowed);
    assert_eq!(acquire(&limiter, &local, "key").await.expect("denied").by, DecidedBy::DenialCache);
    server.signal("-STOP");
    let unknown = in_time(limiter.acquire(&local, Request::new("third").deadline(DEADLINE))).await.expect("here");
    server.signal("-CONT");
    assert_eq!(unknown.by.error().expect("why").charged(), Charged::Unknown);
    answered_again(&limiter, &local, "fourth").await;
    in_time(limiter.reset(&local, Request::new("key").after(&unknown))).await.expect("forgotten");
    let decision = decided(&limiter, &local, "key").await;
    assert_eq!((decision.by, decision.allowed), (DecidedBy::Redis, true));
}
