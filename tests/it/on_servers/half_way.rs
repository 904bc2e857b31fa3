//! Commands that are refused in the middle of a script: whatever a user may not do, no key is left without an expiry,
//! and what says that it took nothing has written nothing.

use std::time::Duration;

use tollgate::redis::{Connection, cmd};
use tollgate::{Algorithm, Charged, ErrorKind, Limiter, OnError, Operation, Redis, Request, Rule};
use tollgate_testing::engines::time;
use tollgate_testing::redis_server::Server;
use tollgate_testing::rules::{assert_of_every_algorithm, rule};

/// Whatever the scripts write by.
const WRITES: [&str; 8] = ["set", "setrange", "del", "pexpire", "pexpireat", "zadd", "zrem", "zremrangebyscore"];

fn limiter(url: &str) -> Limiter {
    Limiter::builder(Redis::open(url).expect("a good address")).deadline(Duration::from_secs(30)).build()
}

/// Every key and its value.
fn stored(redis: &mut Connection) -> Vec<(String, Vec<u8>)> {
    let mut names: Vec<String> = cmd("KEYS").arg("*").query(redis).expect("names");
    names.sort();
    let value = |name| cmd("DUMP").arg(name).query(redis).expect("a value");
    let values: Vec<Vec<u8>> = names.iter().map(value).collect();
    names.into_iter().zip(values).collect()
}

/// The keys that would stay for ever.
fn without_expiry(redis: &mut Connection) -> Vec<String> {
    let script = "local all = redis.call('KEYS', '*') local found = {}
        for _, key in ipairs(all) do if redis.call('PTTL', key) == -1 then found[#found + 1] = key end end
        return found";
    cmd("EVAL").arg(script).arg(0).query(redis).expect("names")
}

/// Every operation on used and unused keys, by users who lack one of the commands, at the server's time and at another.
#[tokio::test]
async fn a_command_that_is_refused_half_way_leaves_no_key_without_an_expiry() {
    let server = Server::start();
    let mut redis = server.connection();
    let all = limiter(&server.url());
    let texts = [
        ("token-bucket 3/30d max-debt 3", "token-bucket 5/30d max-debt 1"),
        ("fixed-window 3/30d start first-hit", "fixed-window 9/30d start first-hit"),
        ("fixed-window 3/year", "fixed-window 2/year"),
        ("sliding-window 3/30d", "sliding-window 2/30d"),
        ("sliding-log 3/30d", "sliding-log 5/30d"),
        ("concurrency 3 ttl 1h", "concurrency 2 ttl 1m"),
        ("concurrency 3 ttl 1h, gcra 3/30d", "concurrency 2 ttl 1h, gcra 4/30d"),
    ];
    assert_of_every_algorithm(&texts.map(|(before, _)| before), &[]);
    let operations = [
        (Operation::Acquire, 1),
        (Operation::AtMost, 2),
        (Operation::Penalty, 1),
        (Operation::Acquire, 9),
        (Operation::Refund, 1),
        (Operation::Renew, 1),
        (Operation::Block, 1),
        (Operation::Release, 1),
        (Operation::Reserve, 1),
        (Operation::Settle, 2),
        (Operation::Cancel, 1),
    ];
    let mut refusals = 0;
    for command in WRITES {
        let url = server.user("some", &format!("+@all -{command} ~*"));
        let some = limiter(&url).to_builder().on_error(OnError::Open).build();
        for (before, after) in texts {
            let of = |text| rule(text).count_overage(true).block_for(Duration::from_secs(1)).expect("a rule");
            let [before, after] = [before, after].map(of);
            for (operation, cost) in operations {
                for (used, at) in [(false, None), (true, None), (true, Some(time(1 << 50)))] {
                    let request = at.map_or(Request::new("key"), |at| Request::new("key").at(at));
                    let request = request.block_for(Duration::from_secs(2));
                    if used {
                        for id in ["mine", "other"] {
                            assert!(all.acquire(&before, request.id(id)).await.expect("a decision").allowed);
                        }
                    }
                    let what = format!("{operation:?} {cost} of {before} without {command}, used {used}, at {at:?}");
                    for rule in [&before, &after] {
                        let left = all.peek(&before, request.cost(0)).await.expect("a decision").remaining;
                        let answer = some.call(operation, rule, request.cost(cost).id("mine")).await;
                        assert_eq!(without_expiry(&mut redis), [""; 0], "{what}");
                        let Some(error) = answer.err().filter(|error| error.kind() == ErrorKind::Permission) else {
                            continue;
                        };
                        refusals += 1;
                        assert!(error.to_string().contains(&format!("'{command}'")), "{what}: {error}");
                        let now = all.peek(&before, request.cost(0)).await.expect("a decision").remaining;
                        assert!(error.charged() != Charged::No || now == left, "{what}: {error}");
                    }
                    cmd("FLUSHALL").exec(&mut redis).expect("forgotten");
                }
            }
        }
    }
    assert!(refusals > 300, "{refusals} refusals");
}

/// Permits are the one state that isn't written by one command.
#[tokio::test]
async fn a_permit_isnt_taken_by_who_may_not_do_all_that_takes_one() {
    let server = Server::start();
    let (all, mut redis) = (limiter(&server.url()), server.connection());
    let (permits, key) = (rule("concurrency 3 ttl 1h"), Request::new("key"));
    let both: Rule = rule("concurrency 3 ttl 1h, gcra 9/1h");
    for command in ["pexpireat", "zadd", "zrem", "zremrangebyscore"] {
        let renamed = Server::with(&["--rename-command", command, ""]);
        let users = [server.user("some", &format!("+@all -{command} ~*")), renamed.url()];
        for (url, is_renamed) in users.into_iter().zip([false, true]) {
            let some = limiter(&url).to_builder().on_error(OnError::Open).build();
            for rule in [&permits, &both] {
                let error = some.acquire(rule, key.id("mine")).await.expect_err("refused");
                assert_eq!(error.kind().name(), if is_renamed { "unsupported" } else { "permission" }, "{error}");
                assert!(error.to_string().contains(&format!("'{command}'")), "{error}");
                if !is_renamed {
                    // With several keys, another may have been written before.
                    let charged = if rule == &permits { Charged::No } else { Charged::Unknown };
                    assert_eq!(error.charged(), charged, "{rule} without {command}: {error:?}");
                    assert_eq!(all.peek(rule, key).await.expect("a decision").remaining, 3, "{rule} without {command}");
                }
                let mut redis = if is_renamed { renamed.connection() } else { server.connection() };
                assert!(stored(&mut redis).is_empty(), "{rule} without {command}, renamed: {is_renamed}");
            }
        }
        // Held by somebody else, whose permit stays as it is.
        all.acquire(&permits, key.id("held")).await.expect("a decision");
        let then = stored(&mut redis);
        let some = limiter(&server.user("some", &format!("+@all -{command} ~*")));
        for operation in [Operation::Acquire, Operation::Renew, Operation::Penalty] {
            let error = some.call(operation, &permits, key.id("held")).await.expect_err("refused");
            assert!(error.kind() == ErrorKind::Permission && error.charged() == Charged::No, "{error:?}");
            assert_eq!(stored(&mut redis), then, "{operation:?} without {command}");
        }
        all.reset(&permits, key).await.expect("forgotten");
    }
}

/// What is taken back in part is refused as a whole.
#[tokio::test]
async fn permits_stay_held_by_who_may_not_give_them_back() {
    let server = Server::start();
    let (all, mut redis) = (limiter(&server.url()), server.connection());
    let (permits, key) = (rule("concurrency 3 ttl 1h"), Request::new("key"));
    assert_eq!(permits.limits().next().map(|limit| limit.algorithm()), Some(Algorithm::Concurrency));
    for command in ["pexpireat", "zadd", "zrem", "zremrangebyscore"] {
        all.acquire(&permits, key.id("held")).await.expect("a decision");
        all.acquire(&permits, key.id("other")).await.expect("a decision");
        let then = stored(&mut redis);
        let some = limiter(&server.user("some", &format!("+@all -{command} ~*")));
        let error = some.release(&permits, key.id("held")).await.expect_err("refused");
        assert!(error.kind() == ErrorKind::Permission && error.charged() == Charged::No, "{error:?}");
        assert_eq!(stored(&mut redis), then, "without {command}");
        all.reset(&permits, key).await.expect("forgotten");
    }
}
