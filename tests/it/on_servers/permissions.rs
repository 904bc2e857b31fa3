//! What a user of Redis must be allowed: all that the documentation says, and nothing less.

use std::num::NonZeroU32;
use std::process::Command;
use std::time::{Duration, SystemTime};

use futures_util::future::join_all;
use tollgate::deadpool_redis::{Manager, Pool, Runtime};
use tollgate::redis::{Client, RedisResult, cmd};
use tollgate::{
    Algorithm, Charged, Cluster, Error, ErrorKind, Limit, Limiter, OnChange, OnError, Operation, Redis, Request, Rule,
};
use tollgate_testing::acl::{least, more, rights_of};
use tollgate_testing::cluster::{cluster_of_one, cluster_url};
use tollgate_testing::engines::time;
use tollgate_testing::polling::PATIENCE;
use tollgate_testing::redis_server::{Server, patient};
use tollgate_testing::repository::read;
use tollgate_testing::rules::{assert_of_every_algorithm, by_own_id, rule};

/// Each list without one of its members, and that.
fn each_left_out(of: &[&'static str]) -> impl Iterator<Item = (&'static str, Vec<&'static str>)> {
    (0..of.len()).map(|at| (of[at], [&of[..at], &of[at + 1..]].concat()))
}

/// Every operation of every algorithm, as far as the first that fails.
async fn everything(limiter: &Limiter) -> Result<(), Error> {
    let texts = [
        "token-bucket 60/1d max-debt 9",
        "fixed-window 60/1d max-debt 9",
        "fixed-window 60/year",
        "sliding-window 60/1d",
        "sliding-log 60/1d",
        "concurrency 60 ttl 1d",
    ];
    assert_of_every_algorithm(&texts, &[]);
    for text in texts {
        let rule = rule(text);
        let (holds, owes) =
            rule.limits().map(|limit| (limit.algorithm().holds(), limit.max_debt() > 0)).next().unwrap();
        for at in [Some(1 << 50), Some((1 << 50) + 1), None, None] {
            let request = at.map_or(Request::new("key"), |at| Request::new("key").at(time(at)));
            limiter.peek(&rule, request).await?;
            limiter.acquire(&rule, by_own_id(&rule, request.cost(2))).await?;
            limiter.at_most(&rule, by_own_id(&rule, request)).await?;
            limiter.inspect(&rule, request).await?;
            limiter.block(&rule, request, Duration::from_secs(9)).await?;
            limiter.unblock(&rule, request).await?;
            if holds {
                limiter.acquire(&rule, request.id("holder")).await?;
                limiter.renew(&rule, request.id("holder")).await?;
                limiter.release(&rule, request.id("holder")).await?;
            } else {
                limiter.refund(&rule, request).await?;
                limiter.penalty(&rule, request).await?;
                limiter.acquire(&rule, request.id("call")).await?;
                limiter.settle(&rule, request.id("call").cost(3)).await?;
                limiter.acquire(&rule, request.id("other")).await?;
                limiter.cancel(&rule, request.id("other")).await?;
            }
            if owes {
                limiter.reserve(&rule, request).await?;
            }
        }
        // Many entries of a log, and many keys of others.
        for _ in 0..30 {
            limiter.acquire(&rule, by_own_id(&rule, "long")).await?;
        }
        let many = ["key", "long", "many", "many"].map(|key| by_own_id(&rule, key));
        for decision in limiter.acquire_many(&rule, many).await {
            decision?;
        }
        let counting = rule.clone().count_overage(true).on_change(OnChange::AsIs);
        limiter.acquire(&counting, by_own_id(&rule, Request::new("long").cost(61))).await?;
        limiter.reset(&rule, "long").await?;
    }

    let permits = rule("concurrency 2 ttl 30s");
    let held = limiter.hold_wait(&permits, "acme", PATIENCE).await?.into_result().expect("a permit");
    held.renew().await?;
    held.release().await?;
    let several = rule("gcra 10/1s").and("concurrency 5 ttl 30s".parse().expect("a limit")).expect("a rule");
    let several = several.and("sliding-log 9/1d".parse().expect("a limit")).expect("a rule");
    limiter.acquire(&several, Request::new("acme").id("both")).await?;
    limiter.cancel(&several, Request::new("acme").id("both")).await?;
    limiter.acquire_wait(&rule("gcra 10/1s burst 0 max-debt 9"), "waits", PATIENCE).await?;
    let split = rule("sliding-log 1000/1d shards 8");
    limiter.peek(&split, "hot").await?;
    limiter.acquire(&split, "hot").await?;
    let hot = rule("token-bucket 1000/1d");
    limiter.lease(&hot, "hot", NonZeroU32::MIN)?.acquire(1).await?;
    Ok(())
}

/// What the library never sends.
const OF_OTHER_LANGUAGES: &str = "+script|load";

/// Calls a script that the server doesn't know as redis-py's `register_script` does.
fn as_other_languages_do(url: &str) -> RedisResult<()> {
    let script = Algorithm::TokenBucket.script();
    let mut redis = Client::open(url)?.get_connection()?;
    let mut call = cmd("EVALSHA");
    call.arg(script.digest()).arg(1).arg("tollgate:{user:42}:cli/token-bucket-10s");
    call.arg(&["5", "1", "2000000", "1", "0", "1", "acquire", "-1"]);
    let error = call.exec(&mut redis).expect_err("it isn't loaded");
    assert_eq!(error.code(), Some("NOSCRIPT"), "{error}");
    cmd("SCRIPT").arg("LOAD").arg(script.text()).exec(&mut redis)?;
    let answer: Vec<i64> = call.query(&mut redis)?;
    assert_eq!(answer[..3], [1, 5, 4]);
    Ok(())
}

#[tokio::test]
async fn the_smallest_user_can_do_everything_and_needs_each_of_its_rights() {
    let server = Server::start();
    let all = least();
    assert!(
        all.len() > 20 && all[0].starts_with('~') && all[1..].iter().all(|right| right.starts_with('+')),
        "{all:?}"
    );
    let url = server.user("least", &all.join(" "));
    everything(&limiter(&url)).await.expect("what is documented suffices");
    forget(&server);
    as_other_languages_do(&url).expect("what is documented suffices for other languages");
    for (right, others) in each_left_out(&all) {
        forget(&server);
        if right == OF_OTHER_LANGUAGES {
            let url = server.user("less", &others.join(" "));
            everything(&limiter(&url)).await.expect("the library doesn't load scripts");
            forget(&server);
            let error = as_other_languages_do(&url).expect_err(right);
            assert_eq!(error.code(), Some("NOPERM"), "{error}");
            continue;
        }
        // An open gate is for a Redis that is unreachable, not for one that isn't set up.
        let open = limiter(&server.user("less", &others.join(" "))).to_builder().on_error(OnError::Open).build();
        let error = everything(&open).await.expect_err(right);
        // What does several things in one script may have done some of them.
        assert!(error.kind() == ErrorKind::Permission && error.charged() != Charged::Yes, "without {right}: {error:?}");
        let lacks = match right.strip_prefix('+') {
            Some(command) => format!("redis doesn't let this user run '{command}' (ACL SETUSER ... +{command}): "),
            None => "redis doesn't let this user have these keys (ACL SETUSER ... ~PREFIX:*): ".into(),
        };
        assert!(error.to_string().starts_with(&lacks), "without {right}: {error}");
    }
    let elsewhere =
        limiter(&server.user("least", &all.join(" "))).to_builder().prefix("elsewhere").expect("a prefix").build();
    let error = elsewhere.acquire(&rule("gcra 5/10s"), "key").await.unwrap_err();
    assert!(error.kind() == ErrorKind::Permission && error.charged() == Charged::No, "{error:?}");
    let resp3 = format!("{}?protocol=resp3", server.user("least", &all.join(" ")));
    everything(&limiter(&resp3)).await.expect("by the other protocol too");
}

#[tokio::test]
async fn resetting_a_whole_rule_needs_three_more_rights() {
    let server = Server::start();
    let added = more("+scan");
    assert_eq!(added.len(), 3);
    let all = [least(), added.clone()].concat();
    let able = limiter(&server.user("able", &all.join(" ")));
    let rule = rule("gcra 5/10s");
    able.acquire(&rule, "key").await.expect("a decision");
    for (right, others) in each_left_out(&all).filter(|(right, _)| added.contains(right)) {
        let unable = limiter(&server.user("unable", &others.join(" ")));
        let error = unable.reset_all("test", |_| ()).await.expect_err(right);
        assert!(error.kind() == ErrorKind::Permission, "without {right}: {error:?}");
    }
    assert_eq!(able.reset_all("test", |_| ()).await.expect("forgotten"), 1);
}

#[tokio::test]
async fn another_database_and_a_used_connection_need_the_rights_that_are_documented() {
    let server = Server::start();
    let (least, rule) = (least(), rule("gcra 5/10s"));
    let with = |more: &[&str]| server.user("user", &[&least, more].concat().join(" "));
    for (more, works) in [(vec![], false), (more("+select"), true)] {
        let decision = limiter(&format!("{}/1", with(&more))).acquire(&rule, "key").await;
        assert_eq!(decision.is_ok(), works, "{decision:?}");
        if let Err(error) = decision {
            assert!(error.kind() == ErrorKind::Permission && error.to_string().contains("'select'"), "{error:?}");
        }
    }
    let more = more("+ping");
    let cases = each_left_out(&more).map(|(_, others)| (others, false)).chain([(more.clone(), true)]);
    for (more, reused) in cases {
        let manager = Manager::new(with(&more)).expect("a good address");
        let pool = Pool::builder(manager).max_size(1).runtime(Runtime::Tokio1).build().expect("a pool");
        server.reset_command_counts();
        drop(pool.get().await.expect("a connection"));
        let limiter = Limiter::builder(Redis::with_pool(pool)).deadline(PATIENCE).build();
        limiter.acquire(&rule, "key").await.expect("a decision");
        assert_eq!(server.commands()["auth"].0, if reused { 1 } else { 2 }, "{more:?}");
    }
}

#[tokio::test]
async fn a_user_without_evalsha_lacks_a_permission() {
    let server = Server::start();
    let limiter = limiter(&server.user("most", "+@all -evalsha ~*"));
    let rule = rule("gcra 5/10s");
    let error = limiter.acquire(&rule, "key").await.unwrap_err();
    assert!(error.kind() == ErrorKind::Permission && error.charged() == Charged::No, "{error:?}");
    assert_eq!(limiter.peek(&rule, "key").await.expect("peeks go by another command").remaining, 5);
}

#[tokio::test]
async fn a_user_without_a_command_that_a_script_calls_gets_a_permission_error_and_is_not_charged() {
    let server = Server::start();
    let all = limiter(&server.url());
    // A given time far from the server's, and one shortly before it.
    let (given, lately) = (time(1 << 50), SystemTime::now() - Duration::from_secs(60));
    for (command, text, taken, before, now) in [
        ("time", "gcra 50/1d", 1, None, None),
        ("get", "gcra 50/1d", 1, None, None),
        ("set", "gcra 50/1d", 0, None, None),
        ("set", "fixed-window 50/1d", 1, Some(given), Some(given)),
        ("setrange", "gcra 50/1d", 1, None, None),
        ("setrange", "sliding-window 50/1d", 1, None, None),
        ("getrange", "sliding-log 50/1d", 1, None, None),
        ("exists", "sliding-log 50/1d", 0, None, None),
        ("set", "sliding-log 50/1d", 0, None, None),
        // What has more entries isn't read and written as a whole.
        ("strlen", "sliding-log 50/1d", 30, None, None),
        ("setrange", "sliding-log 50/1d", 30, None, None),
        ("pexpire", "sliding-log 50/1d", 30, Some(given), Some(given)),
        // What was written by another clock has to be armed anew.
        ("pexpireat", "sliding-log 50/1d", 30, Some(lately), None),
    ] {
        let what = format!("{text} after {taken} without {command}");
        let rule = own(text, &format!("{command}-{taken}"));
        let at = |at: Option<SystemTime>, us| {
            let request = Request::new("key");
            at.map_or(request, |at| request.at(at + Duration::from_micros(us)))
        };
        for us in 0..taken {
            assert!(all.acquire(&rule, at(before, us)).await.expect("a decision").allowed, "{what}");
        }
        let left = async || all.peek(&rule, at(now, taken)).await.expect("a decision").remaining;
        let before = left().await;
        assert_eq!(before, 50 - taken, "{what}");
        let some = limiter(&server.user("some", &format!("+@all -{command} ~*")));
        for (request, by_id) in [(at(now, taken), false), (at(now, taken).id("call"), true)] {
            let error = some.acquire(&rule, request).await.expect_err(&what);
            let begins = format!("redis doesn't let this user run '{command}' (ACL SETUSER ... +{command}): ");
            assert!(error.kind() == ErrorKind::Permission && error.to_string().starts_with(&begins), "{what}: {error}");
            // With an id there are two keys, of which one may have been written.
            let charged = error.charged();
            assert!(charged == Charged::No || by_id && charged == Charged::Unknown, "{what}: {error:?}");
            assert_eq!(left().await, before, "{what}");
        }
    }
}

/// What remembers a call by its id is written last.
#[tokio::test]
async fn whoever_may_not_write_what_remembers_a_call_learns_that_it_may_be_charged() {
    let server = Server::start();
    let (all, rule) = (limiter(&server.url()), rule("gcra 5/1d"));
    assert!(all.acquire(&rule, "key").await.expect("a decision").allowed);
    let some = limiter(&server.user("some", "+@all -set ~*"));
    assert!(some.acquire(&rule, "key").await.expect("in place").allowed);
    let error = some.acquire(&rule, Request::new("key").id("call")).await.expect_err("a refusal");
    assert!(error.kind() == ErrorKind::Permission && error.charged() == Charged::Unknown, "{error:?}");
    assert!(error.to_string().starts_with("redis doesn't let this user run 'set' "), "{error}");
    assert!((2..=3).contains(&all.peek(&rule, "key").await.expect("a decision").remaining));
}

/// Made again, it would give back what others took.
#[tokio::test]
async fn a_cancellation_that_may_not_forget_its_call_gives_nothing_back() {
    let server = Server::start();
    let (all, some) = (limiter(&server.url()), limiter(&server.user("some", "+@all -del ~*")));
    for text in [
        "gcra 10/1d",
        "fixed-window 10/1d",
        "sliding-window 10/1d",
        "sliding-log 10/1d",
        "gcra 10/1d, sliding-log 10/1d",
    ] {
        let (rule, request) = (rule(text), Request::new(text).at(time(1 << 50)));
        for id in ["one", "other"] {
            assert!(all.acquire(&rule, request.cost(3).id(id)).await.expect("a decision").allowed, "{text}");
        }
        let left = async || all.peek(&rule, request).await.expect("a decision").remaining;
        for _ in 0..3 {
            let error = some.cancel(&rule, request.id("one")).await.expect_err(text);
            assert!(error.kind() == ErrorKind::Permission, "{text}: {error:?}");
            assert_eq!(left().await, 4, "{text}");
        }
        all.cancel(&rule, request.id("one")).await.expect("cancelled");
        assert_eq!(left().await, 7, "{text}");
    }
}

/// Several keys of a node are asked in one call, which is answered for each, and asked again for those that are
/// refused.
#[tokio::test]
async fn what_a_user_may_not_delete_is_given_back_no_more_than_once_by_a_cluster_too() {
    let server = cluster_of_one();
    server.user("some", "+@all -del ~*");
    let on_cluster = |user: &str| {
        let url = cluster_url(&server).replace("://", user);
        Limiter::builder(Cluster::open(&url).expect("a good address")).deadline(PATIENCE).build()
    };
    let (all, some) = (on_cluster("://"), on_cluster("://some:sesame@"));
    let keys = ["a", "b", "c", "d"];
    let (bucket, log) = (own("gcra 9/1d", "log"), own("sliding-log 9/1d", "log"));
    let (both, permits) = (own("gcra 9/1d, sliding-log 9/1d", "log"), own("concurrency 9 ttl 1d", "permits"));
    for key in keys {
        let request = Request::new(key).cost(2);
        all.acquire(&bucket, request).await.expect("a decision");
        all.acquire(&both, request).await.expect("a decision");
        all.acquire(&bucket, request.id("call")).await.expect("a decision");
        all.acquire(&permits, request.id("holder")).await.expect("a decision");
    }
    let refused = async |operation: Operation, rule: &Rule, id: Option<&str>| {
        let call = |key| {
            let request = Request::new(key).cost(2);
            some.call(operation, rule, id.map_or(request, |id| request.id(id)))
        };
        for answer in join_all(keys.map(call)).await {
            let error = answer.expect_err("may not delete");
            assert!(
                error.kind() == ErrorKind::Permission && error.to_string().contains("'del'"),
                "{operation}: {error}"
            );
        }
    };
    let left = async |rule: &Rule| {
        let mut left = Vec::new();
        for key in keys {
            left.push(all.peek(rule, key).await.expect("a decision").remaining);
        }
        left
    };
    refused(Operation::Refund, &log, None).await;
    assert_eq!(left(&log).await, [7; 4]);
    refused(Operation::Cancel, &bucket, Some("call")).await;
    assert_eq!(left(&bucket).await, [3; 4]);
    refused(Operation::Release, &permits, Some("holder")).await;
    assert_eq!(left(&permits).await, [7; 4]);
    refused(Operation::Refund, &both, None).await;
    assert_eq!((left(&bucket).await, left(&log).await), (vec![5; 4], vec![7; 4]));
}

/// A rule with keys of its own.
fn own(text: &str, name: &str) -> Rule {
    Rule::new(name, text).expect("a rule")
}

fn forget(server: &Server) {
    let mut redis = server.connection();
    cmd("FLUSHALL").exec(&mut redis).expect("forgotten");
    cmd("SCRIPT").arg("FLUSH").exec(&mut redis).expect("forgotten");
}

fn limiter(url: &str) -> Limiter {
    patient(url)
}

#[tokio::test]
async fn a_missing_right_to_wait_for_replicas_is_an_error_under_every_policy() {
    let server = Server::start();
    let confirmed = Redis::builder().confirmed_by(1, Duration::from_millis(20));
    let redis = confirmed.open(&server.user("some", "+@all -wait ~*")).expect("a good address");
    let limiter = Limiter::builder(redis).deadline(PATIENCE).on_error(OnError::Open).build();
    let error = limiter.acquire(&rule("gcra 5/1d"), "key").await.expect_err("not confirmed");
    assert!(error.kind() == ErrorKind::Permission && error.charged() == Charged::Yes, "{error:?}");
    assert!(
        error.to_string().starts_with("redis doesn't let this user run 'wait' (ACL SETUSER ... +wait): "),
        "{error}"
    );
}

/// Many keys in one call of a script are each read again where the first look found nothing.
#[tokio::test]
async fn a_missing_right_to_read_closes_the_gate_for_many_keys_at_once_too() {
    let server = Server::start();
    for (command, text) in [
        ("get", "token-bucket 5/1d"),
        ("get", "fixed-window 5/1d"),
        ("get", "sliding-window 5/1d"),
        ("get", "gcra 5/1d"),
        ("getrange", "sliding-log 5/1d"),
    ] {
        let open =
            limiter(&server.user("some", &format!("+@all -{command} ~*"))).to_builder().on_error(OnError::Open).build();
        for answer in open.acquire_many(&rule(text), ["a", "b", "c", "a"]).await {
            let error = answer.expect_err("no decision");
            let begins = format!("redis doesn't let this user run '{command}' (ACL SETUSER ... +{command}): ");
            assert!(error.kind() == ErrorKind::Permission && error.to_string().starts_with(&begins), "{text}: {error}");
        }
    }
}

/// Redis refuses a call if one of the keys that it declares is forbidden, and callers share calls.
#[tokio::test]
async fn a_key_that_the_user_may_not_use_fails_no_other_of_its_batch() {
    let server = Server::start();
    let rights: Vec<_> = least().into_iter().filter(|right| !right.starts_with('~')).collect();
    let url = server.user("limiter", &[&rights[..], &["~*:allowed*"]].concat().join(" "));
    let limiter = Limiter::builder(Redis::open(&url).expect("a good address")).deadline(PATIENCE).build();
    let [allowed, forbidden] = ["allowed", "forbidden"].map(|name| rule("gcra 900/30d").named(name).expect("a name"));
    let of = async |rule: &Rule, keys: std::ops::Range<u32>| {
        let keys: Vec<_> = keys.map(|key| format!("user:{key}")).collect();
        limiter.acquire_many(rule, keys.iter().map(String::as_str)).await
    };
    // Scripts are known from now on, so that callers wait for one another.
    limiter.acquire(&allowed, "first").await.expect("a decision");
    for turn in 1..=3 {
        let one_by_one = futures_util::future::join_all((0..8).map(|_| limiter.acquire(&allowed, "user:0")));
        let (singles, many, refused) =
            futures_util::future::join3(one_by_one, of(&allowed, 1..9), of(&forbidden, 0..4)).await;
        assert!(singles.iter().chain(&many).all(Result::is_ok), "{singles:?} {many:?}");
        for error in refused {
            let error = error.expect_err("a refusal");
            assert!(error.kind() == ErrorKind::Permission && error.charged() == Charged::No, "{error}");
        }
        assert_eq!(limiter.peek(&allowed, "user:0").await.expect("a decision").remaining, 900 - 8 * turn);
        assert_eq!(limiter.peek(&allowed, "user:8").await.expect("a decision").remaining, 900 - turn);
    }
}

/// Under other numbers than the state's too, of which the faster apply until a call takes units.
#[tokio::test]
async fn a_denial_needs_no_right_to_write_and_its_key_stays_until_the_reset() {
    let rights = least().into_iter().filter(|right| {
        let writes = ["set", "setrange", "del", "pexpire", "pexpireat", "zadd", "zrem", "zremrangebyscore"];
        !writes.iter().any(|command| right.strip_prefix('+') == Some(command))
    });
    let rights = rights.collect::<Vec<_>>().join(" ");
    for (text, versions) in [
        ("token-bucket", ["30/1m burst 1", "1/1m burst 1"]),
        ("token-bucket", ["1/1m burst 1", "30/1m burst 1"]),
        ("fixed-window", ["1/1d start first-hit", "1/2d start first-hit"]),
        ("sliding-window", ["1/1d", "1/2d"]),
        // The longer period keeps a time for longer.
        ("sliding-log", ["1/10s", "1/1m"]),
        ("sliding-log", ["1/1m", "1/10s"]),
    ] {
        let server = Server::start();
        let all = limiter(&server.url());
        let less = limiter(&server.user("limiter", &rights));
        let limit = |numbers| format!("{text} {numbers}").parse::<Limit>().and_then(|limit| limit.named("limit"));
        let versions = versions.map(|numbers| Rule::new("test", limit(numbers).expect("a limit")).expect("a rule"));
        assert!(all.acquire(&versions[0], "key").await.expect("a decision").allowed);
        let name = &all.inspect(&versions[1], "key").await.expect("a state")[0].key;
        for rule in [&versions[1], &versions[0], &versions[1]] {
            let denied = less.acquire(rule, "key").await.expect("a decision");
            let left: u64 = cmd("PTTL").arg(name).query(&mut server.connection()).expect("a time");
            // By the time of this answer, less is left of both.
            let reset = denied.reset_after.as_millis();
            assert!(!denied.allowed && u128::from(left) >= reset, "{rule}: {left} ms of {reset}");
        }
    }
}

/// Sentinels have users of their own.
#[test]
fn an_operator_may_run_whatever_the_runbook_checks() {
    let server = Server::start();
    let url = server.user("operator", &rights_of("operator").join(" "));
    let mut seen = 0;
    for page in ["src/operations/runbook.md", "src/operations/limits.md"].map(read) {
        for entry in page.split("\n# ") {
            let (_, check) = entry.split_once("\n**Check:**").unwrap_or_default();
            let check = check.split("\n**Do:**").next().unwrap_or_default();
            for call in check.split("redis-cli ").skip(1).filter(|call| !call.starts_with("-p 26379")) {
                let call = call.split(['`', '\n', '|', ';']).next().unwrap_or_default();
                let call = format!("redis-cli --no-auth-warning -u {url} {call}");
                let output = Command::new("sh").args(["-c", &call]).output().expect("redis-cli runs");
                let told = String::from_utf8_lossy(&output.stdout);
                assert!(output.status.success() && !told.contains("NOPERM"), "{call}: {told}");
                seen += 1;
            }
        }
    }
    assert!(seen > 25, "{seen} calls");
}
