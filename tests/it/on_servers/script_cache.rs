//! Servers that have lost scripts: each costs a round trip more, and no decision.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::runtime::Handle;
use tokio::sync::RwLock;
use tokio::task::JoinSet;
use tollgate::redis::{Connection, cmd};
use tollgate::{Limiter, Redis, Request};
use tollgate_testing::polling::once_sent;
use tollgate_testing::redis_server::Server;
use tollgate_testing::rules::{THOUSAND, assert_of_every_algorithm, by_own_id, rule};

#[tokio::test]
async fn a_server_that_lost_its_scripts_gets_each_one_back_with_one_eval() {
    let server = Server::start();
    let limiter = limiter(&server.url());
    let rule = rule("gcra 5/30d");
    limiter.acquire(&rule, "key").await.expect("a decision");
    for (by_digest, by_text) in [("evalsha", "eval"), ("evalsha_ro", "eval_ro")] {
        cmd("SCRIPT").arg("FLUSH").exec(&mut server.connection()).expect("flushed");
        server.reset_command_counts();
        for calls in 1..=2 {
            let decision = match by_digest {
                "evalsha" => limiter.acquire(&rule, "key").await,
                _ => limiter.peek(&rule, "key").await,
            };
            assert!(decision.expect("a decision").allowed);
            let commands = server.commands();
            assert_eq!((commands[by_digest], commands[by_text]), ((calls, 1), (1, 0)), "{by_digest}");
        }
    }
    assert_eq!(limiter.peek(&rule, "key").await.expect("a decision").remaining, 2);
}

/// A text is some hundred times as long as a call: those of a crowd would hold up the server longer than callers wait.
#[tokio::test]
async fn many_callers_that_miss_a_script_at_once_send_its_text_once() {
    const CALLERS: u64 = 200;
    let server = Server::start();
    let limiter = limiter(&server.url());
    let (bucket, both, permits) =
        (rule("gcra 900/30d"), rule("gcra 900/30d, fixed-window 900/30d"), rule("concurrency 900 ttl 30d"));
    // Connected, with none of the scripts.
    limiter.acquire(&rule("sliding-log 5/30d"), "key").await.expect("a decision");
    for what in ["an id", "two limits", "permits", "a reservation", "a look"] {
        let (rule, by_digest, by_text) = match what {
            "two limits" => (&both, "evalsha", "eval"),
            "permits" => (&permits, "evalsha", "eval"),
            "a look" => (&bucket, "evalsha_ro", "eval_ro"),
            _ => (&bucket, "evalsha", "eval"),
        };
        cmd("SCRIPT").arg("FLUSH").exec(&mut server.connection()).expect("flushed");
        server.reset_command_counts();
        let ids: Vec<_> = (0..CALLERS).map(|number| format!("{what} {number}")).collect();
        let calls = ids.iter().map(async |id| match what {
            "an id" => limiter.acquire(rule, Request::new(what).id(id)).await,
            "permits" => limiter.acquire(rule, Request::new(what).id(id)).await,
            "a reservation" => limiter.reserve(rule, what).await,
            "a look" => limiter.peek(rule, what).await,
            _ => limiter.acquire(rule, what).await,
        });
        let decisions = join_all(calls).await;
        assert!(decisions.into_iter().all(|decision| decision.expect("a decision").allowed), "{what}");
        let commands = server.commands();
        // Some may ask for the first time only after the text was sent.
        let (_, missed) = commands[by_digest];
        assert_eq!((missed > 0, commands[by_text]), (true, (1, 0)), "{what}");
        let left = limiter.peek(rule, what).await.expect("a decision").remaining;
        assert_eq!(left, if what == "a look" { 900 } else { 900 - CALLERS }, "{what}");
    }
    // In one pipeline, of 80 keys each.
    cmd("SCRIPT").arg("FLUSH").exec(&mut server.connection()).expect("flushed");
    server.reset_command_counts();
    let keys: Vec<_> = (0..800).map(|number| format!("user:{number}")).collect();
    for decision in limiter.acquire_many(&bucket, &keys).await {
        assert!(decision.expect("a decision").allowed);
    }
    assert_eq!(server.commands()["eval"], (1, 0));
}

/// Redis 7.4 and Valkey 8, and newer ones, drop a script that came by EVAL once 500 others have come that way since it
/// was last called. Redis 7.0 keeps them all.
#[tokio::test]
async fn scripts_that_make_room_for_600_others_cost_one_round_trip_more_and_no_decision() {
    let server = Server::start();
    let limiter = limiter(&server.url());
    // Each has a script of its own.
    let rules = [
        "token-bucket 5/30d",
        "fixed-window 5/30d start first-hit",
        "fixed-window 5/year",
        "sliding-window 5/30d",
        "sliding-log 5/30d",
        "concurrency 5 ttl 30d",
        "gcra 5/30d, fixed-window 5/30d",
    ];
    assert_of_every_algorithm(&rules, &[]);
    let rules = rules.map(|text| (text, rule(text)));
    let all = rules.len() as u64;
    // How many calls were made by digest and by text, and how many of each failed.
    let take_of_each = async || {
        server.reset_command_counts();
        for (key, rule) in &rules {
            let decision = limiter.acquire(rule, by_own_id(rule, *key)).await;
            assert!(decision.expect("a decision").allowed, "{rule}");
        }
        let commands = server.commands();
        (commands["evalsha"], commands.get("eval").copied().unwrap_or_default())
    };
    assert_eq!(take_of_each().await, ((all, all), (all, 0)), "the first call of each brings its script");
    assert_eq!(take_of_each().await, ((all, 0), (0, 0)));

    let evicted = evicted_by(&mut server.connection(), 0..600);
    assert!(evicted == 0 || evicted >= all, "{evicted}");
    let missing = all.min(evicted);
    println!("{missing} of {all} scripts were dropped, which cost {missing} round trips more");
    assert_eq!(take_of_each().await, ((all, missing), (missing, 0)));
    assert_eq!(take_of_each().await, ((all, 0), (0, 0)));
    for (key, rule) in &rules {
        assert_eq!(limiter.peek(rule, *key).await.expect("a decision").remaining, 1, "{rule}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn scripts_that_make_room_for_others_in_mid_load_cost_no_error_and_no_unit() {
    let server = Server::start();
    let (mut from, mut drops) = (0, false);
    for text in THOUSAND {
        server.reset_command_counts();
        a_thousand_are_admitted_while(&server, text, |redis, asking| {
            // A script that is called meanwhile stays.
            let _nobody_asks = tokio::task::block_in_place(|| Handle::current().block_on(asking.write()));
            drops = evicted_by(redis, from..from + 600) > 0;
            from += 600;
        });
        let (_, failed) = server.commands()["evalsha"];
        assert!(!drops || failed >= 3, "{text}: not dropped while it ran");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_script_cache_flushed_in_mid_load_costs_no_error_and_no_unit() {
    let server = Server::start();
    for text in THOUSAND {
        a_thousand_are_admitted_while(&server, text, |redis, _| {
            cmd("SCRIPT").arg("FLUSH").exec(redis).expect("flushed")
        });
    }
}

/// Until the limit is used up, and that was done a few times meanwhile.
fn a_thousand_are_admitted_while(
    server: &Server,
    text: &'static str,
    mut disturb: impl FnMut(&mut Connection, &RwLock<()>) + Send,
) {
    let (limiter, rule) = (limiter(&server.url()), rule(text));
    let (asking, disturbed) = (Arc::new(RwLock::new(())), Arc::new(AtomicUsize::new(0)));
    let mut callers = JoinSet::new();
    for _ in 0..400 {
        let (limiter, rule) = (limiter.clone(), rule.clone());
        let (asking, disturbed) = (Arc::clone(&asking), Arc::clone(&disturbed));
        callers.spawn(async move {
            let (mut asked, mut admitted) = (0, 0);
            // Not for ever, should that fail.
            while asked < 3 || (asked < 100_000 && disturbed.load(Ordering::Relaxed) < 3) {
                let _asks = asking.read().await;
                admitted += usize::from(once_sent(|| limiter.acquire(&rule, text)).await.allowed);
                asked += 1;
            }
            admitted
        });
    }
    let mut redis = server.connection();
    let admitted: usize = std::thread::scope(|scope| {
        let callers = scope.spawn({
            let runtime = Handle::current();
            move || runtime.block_on(callers.join_all()).into_iter().sum()
        });
        while !callers.is_finished() {
            disturb(&mut redis, &asking);
            disturbed.fetch_add(1, Ordering::Relaxed);
        }
        callers.join().expect("every caller was answered")
    });
    assert_eq!(admitted, 1000, "{text}");
}

/// How many scripts the server has dropped, once this program has sent these as well.
fn evicted_by(redis: &mut Connection, others: Range<u64>) -> u64 {
    others.for_each(|n| cmd("EVAL").arg(format!("return {n}")).arg(0).exec(redis).expect("an answer"));
    let statistics: String = cmd("INFO").arg("stats").query(redis).expect("statistics");
    let evicted = statistics.lines().find_map(|line| line.strip_prefix("evicted_scripts:"));
    evicted.map_or(0, |number| number.parse().expect("a number"))
}

fn limiter(url: &str) -> Limiter {
    Limiter::builder(Redis::open(url).expect("an address")).deadline(Duration::from_secs(60)).build()
}
