//! Windows of the calendar: what they cost where a client doesn't know the server's time, and that no boundary and no
//! clock admits more than the limit in any of them. The bounds themselves are held against another library's beside
//! their code, and every law is in `laws`.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::future::join_all;
use tollgate::redis::{Connection, cmd};
use tollgate::{CalendarUnit, Charged, Clock, Embedded, Limit, Limiter, Operation, Redis, Request, RetryAfter, Rule};
use tollgate_testing::engines::{Micros, answer, time};
use tollgate_testing::oracle::calendar::{Window, bounds};
use tollgate_testing::oracle_spec::oracle;
use tollgate_testing::polling::PATIENCE;
use tollgate_testing::proxy::Proxy;
use tollgate_testing::redis_server::Server;
use tollgate_testing::rules::rule;

const SECOND: Micros = 1_000_000;
const HOUR: Micros = 3600 * SECOND;
const DAY: Micros = 24 * HOUR;
/// 2024-02-28 00:00 UTC.
const FEBRUARY_28: Micros = 1_709_078_400 * SECOND;

fn now() -> Micros {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_micros().try_into().expect("fits")
}

/// A limiter on a server that knows every script that these tests call, and what is between them.
async fn warm(server: &Server) -> (Limiter, Proxy) {
    let proxy = Proxy::to(server.port()).await;
    let limiter =
        Limiter::builder(Redis::open(&proxy.url()).expect("a good address")).deadline(Duration::from_secs(20)).build();
    let (one, both) = (rule("fixed-window 5/day"), rule("fixed-window 5/day, gcra 5/1s"));
    for rule in [&one, &both] {
        limiter.acquire(rule, "warm").await.expect("a decision");
    }
    limiter.peek(&one, "warm").await.expect("a decision");
    limiter.acquire_many(&one, ["warm"]).await.remove(0).expect("a decision");
    (limiter, proxy)
}

/// Has the limiter take this for the server's time, by a script that refuses a call as of then. The windows around it
/// are refused too, and a second refusal of one call is an error.
async fn believe(limiter: &Limiter, proxy: &Proxy, at: Micros) {
    proxy.run_instead(format!("return redis.error_reply('STALE calendar_window: in neither window; now_us={at}')"));
    let error = limiter.peek(&rule("fixed-window 5/day"), "told").await.expect_err("refused twice");
    assert_eq!((error.kind().name(), error.charged()), ("stale-windows", Charged::No), "{error}");
}

/// Calls of scripts, and of commands that write, since the server was told to forget them.
fn counts(server: &Server) -> (u64, u64) {
    let commands = server.commands();
    let sum = |names: &[&str]| names.iter().filter_map(|name| commands.get(*name)).map(|count| count.0).sum();
    (sum(&["evalsha", "evalsha_ro", "eval", "eval_ro"]), sum(&["set", "setrange", "del", "pexpireat"]))
}

#[tokio::test]
async fn windows_of_another_time_cost_every_operation_one_more_call_and_no_charge() {
    let server = Server::start();
    let (limiter, proxy) = warm(&server).await;
    for at in [HOUR, now() - 90 * DAY, now() + 90 * DAY] {
        for what in ["acquire", "peek", "at_most", "refund", "penalty", "block", "inspect", "by id", "both"] {
            let text = match what {
                "both" => "gcra 50/1d, fixed-window 50/day, fixed-window 70/year tz Asia/Tokyo",
                _ => "fixed-window 50/day tz Europe/Zurich",
            };
            let rule = rule(text);
            believe(&limiter, &proxy, at).await;
            let key = format!("{what} {at}");
            let request = || Request::new(&key).cost(3);
            for (calls, remaining) in [(2, 47), (1, 44)] {
                server.reset_command_counts();
                let decision = match what {
                    "peek" => limiter.peek(&rule, request()).await,
                    "at_most" => limiter.at_most(&rule, request()).await,
                    "refund" => limiter.call(Operation::Refund, &rule, request()).await,
                    "penalty" => limiter.penalty(&rule, request()).await,
                    "block" => limiter.call(Operation::Block, &rule, request().block_for(Duration::from_secs(1))).await,
                    "inspect" => limiter.inspect(&rule, request()).await.map(|mut states| states.remove(0).decision),
                    "by id" => limiter.acquire(&rule, request().id(&format!("{calls}"))).await,
                    _ => limiter.acquire(&rule, request()).await,
                };
                let decision = decision.unwrap_or_else(|error| panic!("{what}: {error}"));
                let (called, wrote) = counts(&server);
                assert_eq!(called, calls, "{what}, told of {at}");
                let takes = !["peek", "refund", "inspect", "block"].contains(&what);
                assert!(!takes || decision.remaining == remaining, "{what}: {decision:?}");
                assert!(!takes || wrote > 0 && wrote < 4, "{what}: {wrote} writes");
            }
        }
    }
}

#[tokio::test]
async fn callers_in_one_batch_retry_together_and_the_limit_holds() {
    let server = Server::start();
    let (limiter, proxy) = warm(&server).await;
    let (stale, other) = (rule("fixed-window 100/year"), rule("gcra 1000/30d"));
    limiter.acquire(&other, "warm").await.expect("a decision");
    believe(&limiter, &proxy, HOUR).await;
    server.reset_command_counts();
    let calls = (0..400).map(|call| limiter.acquire(if call % 2 == 0 { &stale } else { &other }, "key"));
    let decisions: Vec<_> = join_all(calls).await.into_iter().map(|answer| answer.expect("a decision")).collect();
    let allowed = |of: usize| decisions.iter().skip(of).step_by(2).filter(|decision| decision.allowed).count();
    assert_eq!([allowed(0), allowed(1)], [100, 200]);
    // The first alone, and the others of each rule together; then as many of the one again.
    assert!(counts(&server).0 <= 6, "{} calls", counts(&server).0);
    assert_eq!(limiter.peek(&stale, "key").await.expect("a decision").remaining, 0);
    assert_eq!(limiter.peek(&other, "key").await.expect("a decision").remaining, 800);
}

#[tokio::test]
async fn decisions_of_acquire_many_are_retried_together() {
    let server = Server::start();
    let (limiter, proxy) = warm(&server).await;
    let rule = rule("fixed-window 5/month");
    let keys: Vec<_> = (0..800).map(|key| format!("key {key}")).collect();
    // Of those that are retried, the first may go by itself.
    for (calls, remaining) in [(20..=21, 4), (10..=10, 3)] {
        if remaining == 4 {
            believe(&limiter, &proxy, now() + 400 * DAY).await;
        }
        server.reset_command_counts();
        let decisions = limiter.acquire_many(&rule, &keys).await;
        let asked = counts(&server).0;
        assert!(calls.contains(&asked), "{asked}: 80 keys in a call");
        assert_eq!(decisions.len(), 800);
        for decision in decisions {
            let decision = decision.expect("a decision");
            assert!(decision.allowed && decision.remaining == remaining, "{decision:?}");
        }
    }
}

/// Whatever each takes for the server's time: what it was when last refused, which may be windows ago, or this
/// machine's.
#[tokio::test]
async fn clients_who_differ_about_the_time_admit_the_limit_in_each_window_together() {
    for (text, window, zone, begin, step) in [
        // Two weeks with a day of 23 hours, and with one of 25.
        ("fixed-window 7/day tz Europe/Zurich", Window::Day, "Europe/Zurich", 1_711_000_000 * SECOND, 1_900 * SECOND),
        ("fixed-window 7/day tz America/Havana", Window::Day, "America/Havana", 1_730_000_000 * SECOND, 1_900 * SECOND),
        ("fixed-window 9/week", Window::Week, "UTC", FEBRUARY_28, 5 * HOUR),
        ("fixed-window 12/month", Window::Month, "UTC", FEBRUARY_28, 23 * HOUR),
    ] {
        let clock = Clock::new(time(begin));
        let (engine, rule) = (Embedded::with_clock(clock.clone()), rule(text));
        // A busy machine may not decide the test by the default deadline.
        let client = || Limiter::builder(engine.clone()).deadline(PATIENCE).build();
        let mut clients: Vec<_> = (0..4).map(|_| client()).collect();
        let zone = zone.parse().expect("a zone");
        let (mut now, mut taken) = (begin, BTreeMap::new());
        for turn in 0..600_u64 {
            // One of them now and then begins anew, years ahead of the server, and one is away for a while,
            // but for the first turns.
            if turn % 5 == 0 {
                clients[(turn / 5) as usize % 4] = client();
            }
            let away = (turn / 7 + 4) as usize % 5;
            // Of the last moments of a window as well.
            let [first, second, _] = bounds(window, zone, i64::try_from(now).expect("fits"));
            let left = u64::try_from(second).expect("fits") - now;
            let by = if left <= step && left > 1 { left - 1 } else { step.min(left) };
            for (_, client) in clients.iter().enumerate().filter(|(number, _)| *number != away) {
                let decision = client.acquire(&rule, "key").await.expect("a decision");
                *taken.entry(first).or_insert(0) += decision.granted;
                assert_eq!(decision.reset_after, Duration::from_micros(left), "{text} at {now}");
                if !decision.allowed {
                    assert_eq!(decision.retry_after, RetryAfter::After(Duration::from_micros(left)), "{text}");
                }
            }
            clock.advance(Duration::from_micros(by));
            now += by;
        }
        let limit = rule.limits().next().expect("a limit").rate();
        let whole = taken.len() - 1;
        assert!(whole > 3 && taken.values().take(whole).all(|units| *units == limit), "{text}: {taken:?}");
    }
}

/// What the first caller of a state meets whose time lies in a window that its own pair doesn't reach.
#[tokio::test]
async fn a_state_in_a_later_window_is_decided_by_the_next_pair_of_windows() {
    let noon = FEBRUARY_28 + 12 * HOUR;
    for packed in [true, false] {
        let clock = Clock::new(time(noon - DAY + HOUR / 2));
        let limiter = Limiter::new(Embedded::with_clock(clock.clone()));
        let (rule, others) = (rule("fixed-window 5/day"), rule("fixed-window 5/day"));
        // It learns the windows of yesterday and today.
        limiter.peek(&rule, "fresh").await.expect("a decision");
        clock.advance(Duration::from_micros(DAY - HOUR / 2));
        let written = limiter.acquire(&others, Request::new("ahead").cost(2).at(time(noon + 13 * HOUR))).await;
        assert_eq!(written.expect("a decision").remaining, 3);
        let (fresh, ahead) = if packed {
            let mut decisions = limiter.acquire_many(&rule, ["fresh", "ahead"]).await.into_iter();
            (decisions.next().expect("two"), decisions.next().expect("two"))
        } else {
            (limiter.acquire(&rule, "fresh").await, limiter.acquire(&rule, "ahead").await)
        };
        let (fresh, ahead) = (fresh.expect("a decision"), ahead.expect("a decision"));
        assert_eq!((fresh.remaining, fresh.reset_after), (4, Duration::from_secs(12 * 3600)));
        // It is tomorrow there, and stays so.
        assert_eq!((ahead.remaining, ahead.reset_after), (2, Duration::from_secs(36 * 3600)));
    }
}

fn call(redis: &mut Connection, keys: &[&str], arguments: &str) -> Result<Vec<i64>, String> {
    let mut call = cmd("EVAL");
    call.arg(tollgate::Algorithm::CalendarWindow.script().text()).arg(keys.len()).arg(keys);
    arguments.split(' ').for_each(|argument| _ = call.arg(argument));
    call.query(redis).map_err(|error| error.to_string())
}

#[test]
fn a_call_outside_its_pair_of_windows_is_refused_with_the_time_and_writes_nothing() {
    let server = Server::start();
    let mut redis = server.connection();
    let said = |error: Result<_, String>| error.expect_err("stale");
    for mode in ["acquire", "peek", "at-most", "refund", "penalty", "block", "inspect", "acquire+overage"] {
        for at in ["99", "400"] {
            let error = said(call(&mut redis, &["key"], &format!("5 100 200 400 1 {mode} {at}")));
            assert!(error.contains("STALE") && error.ends_with(&format!("now_us={at}")), "{mode}: {error}");
        }
    }
    let error = said(call(&mut redis, &["key"], "5 100 200 400 1 acquire -1"));
    let told: Micros = error.rsplit_once("now_us=").and_then(|(_, us)| us.parse().ok()).expect("a time");
    assert!(told.abs_diff(now()) < 60 * SECOND, "{error}");
    assert_eq!(cmd("DBSIZE").query::<u64>(&mut redis), Ok(0));
    // Both ends, and what a window before 1970 would be.
    for (at, reset) in [(100, 100), (199, 1), (200, 200), (399, 1)] {
        let reply = call(&mut redis, &[&at.to_string()], &format!("5 100 200 400 1 acquire {at}"));
        assert_eq!(reply, Ok(vec![1, 5, 4, 0, reset]));
    }
    assert_eq!(call(&mut redis, &["old"], "5 -300 50 70 2 acquire 0"), Ok(vec![1, 5, 3, 0, 50]));
    // A reset repairs, whatever the time.
    assert_eq!(call(&mut redis, &["old"], "5 100 200 400 1 reset 5000"), Ok(vec![1, 5, 5, 0, 0]));
}

#[test]
fn a_state_names_the_start_of_the_window_that_it_counts() {
    let server = Server::start();
    let mut redis = server.connection();
    let mut at = |pair: &str, mode: &str, now: u64| {
        call(&mut redis, &["key"], &format!("5 {pair} 1 {mode} {now}")).expect("an answer")
    };
    // Windows around now, each as the second of a pair and as the first; the states are time, used, limit and window.
    for (pair, now, state) in [
        ("100 200 400", 250, [250, 1, 5, 200]),
        ("200 400 700", 251, [251, 2, 5, 200]),
        ("200 400 700", 400, [400, 1, 5, 400]),
        ("400 700 900", 401, [401, 2, 5, 400]),
    ] {
        at(pair, "acquire", now);
        assert_eq!(at(pair, "inspect", now)[6..10], state, "{pair}, {now}");
    }
}

#[test]
fn a_clock_that_steps_back_counts_in_the_window_of_the_state_or_brings_it_back() {
    let server = Server::start();
    let mut redis = server.connection();
    let mut at = |key: &str, pair: &str, mode: &str, now: u64| {
        call(&mut redis, &[key], &format!("5 {pair} 2 {mode} {now}")).expect("a decision")
    };
    for key in ["a", "b", "c"] {
        at(key, "1000 2000 3000", "acquire", 2500);
    }
    // The next window's state, and at most a window ahead: it counts there.
    assert_eq!(at("a", "1000 2000 3000", "acquire", 1500), [1, 5, 1, 0, 1500]);
    assert_eq!(at("a", "1000 2000 3000", "acquire", 1501), [0, 5, 1, 1499, 1499]);
    // Further ahead than either window is long.
    assert_eq!(at("b", "1000 2000 3000", "peek", 1499), [1, 5, 3, 0, 501]);
    assert_eq!(at("b", "1000 2000 3000", "acquire", 1499), [1, 5, 1, 0, 501]);
    // Beyond the next window.
    assert_eq!(at("c", "500 900 2400", "acquire", 700), [1, 5, 1, 0, 200]);
}

#[tokio::test]
async fn a_skewed_clock_costs_nothing_after_the_first_call() {
    // The engine's clock stands still in 2024, years before this machine's.
    let clock = Clock::new(time(FEBRUARY_28 + DAY / 2));
    let limiter = Limiter::new(Embedded::with_clock(clock.clone()));
    let (rule, mut oracle) = (rule("fixed-window 3/day tz Europe/Zurich"), None);
    let oracle = oracle.get_or_insert_with(|| oracle_of(&rule));
    let mut now = FEBRUARY_28 + DAY / 2;
    for _ in 0..40 {
        let decision = limiter.acquire(&rule, "key").await.expect("a decision");
        assert_eq!(answer(&decision), oracle.acquire(1, now));
        clock.advance(Duration::from_micros(5 * HOUR));
        now += 5 * HOUR;
    }
}

/// Two clocks that are more than a year apart: each call finds the rule's windows as the other server's time has left
/// them, also while it retries.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_rule_on_two_servers_of_different_times_is_decided_on_both() {
    // A busy machine may not decide the test by the default deadline.
    let limiters = [FEBRUARY_28, FEBRUARY_28 + 400 * DAY]
        .map(|at| Limiter::builder(Embedded::with_clock(Clock::new(time(at)))).deadline(PATIENCE).build());
    let (one, several) = (rule("fixed-window 1000/day"), rule("fixed-window 1000/day, gcra 10000/1s"));
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..8 {
        let (limiter, one, several) = (limiters[task % 2].clone(), one.clone(), several.clone());
        tasks.spawn(async move {
            for _ in 0..250 {
                assert!(limiter.acquire(&one, "one").await.expect("a decision").allowed);
                assert!(limiter.acquire(&several, "several").await.expect("a decision").allowed);
                for decision in limiter.acquire_many(&one, ["many"]).await {
                    assert!(decision.expect("a decision").allowed);
                }
            }
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended.expect("every call decided");
    }
    for limiter in &limiters {
        for (rule, key) in [(&one, "one"), (&one, "many"), (&several, "several")] {
            assert!(!limiter.acquire(rule, key).await.expect("a decision").allowed, "{key}");
        }
    }
}

fn oracle_of(rule: &Rule) -> tollgate_testing::oracle::Oracle {
    oracle(rule.limits().next().expect("a limit"))
}

#[tokio::test]
async fn a_limit_keeps_its_state_where_its_number_or_its_zone_changes() {
    let limiter = Limiter::new(Embedded::new());
    let at = |rule: &Rule, cost| {
        let (limiter, rule) = (limiter.clone(), rule.clone());
        async move {
            let request = Request::new("user").cost(cost).at(time(FEBRUARY_28 + 12 * HOUR));
            (limiter.acquire(&rule, request).await.expect("a decision"), limiter.inspect(&rule, request).await)
        }
    };
    assert_eq!(at(&rule("fixed-window 10/month"), 4).await.0.remaining, 6);
    let (decision, states) = at(&rule("fixed-window 20/month tz Asia/Tokyo"), 1).await;
    assert_eq!(decision.remaining, 15);
    // Tokyo's March begins nine hours before that of UTC.
    assert_eq!(decision.reset_after, Duration::from_secs(36 * 3600 - 9 * 3600));
    let state = states.expect("a state").remove(0);
    assert_eq!(state.key, "tollgate:{user}:test/fixed-window-month");
    let begun = i64::try_from(1_706_745_600 * SECOND - 9 * HOUR).expect("fits");
    assert_eq!(state.fields[1..4], [("used", 5), ("state_limit", 20), ("window_us", begun)]);
    // A day is another limit than a month, unless they share a name.
    assert_eq!(at(&rule("fixed-window 10/day"), 1).await.0.remaining, 9);
    let error = rule("fixed-window 9/day").and("fixed-window 9/day tz Asia/Tokyo".parse().expect("a limit"));
    assert!(error.expect_err("one key").to_string().contains("named fixed-window-day"));
}

#[test]
fn a_calendar_limit_reports_its_unit_zone_and_numbers() {
    let limit = Limit::calendar(250, CalendarUnit::Month).tz("europe/zurich").build().expect("a limit");
    assert_eq!(limit.to_string(), "fixed-window 250/month tz Europe/Zurich");
    assert_eq!((limit.window(), limit.tz()), (Some(CalendarUnit::Month), Some("Europe/Zurich")));
    let days = |days: u64| Duration::from_secs(days * 86_400);
    assert_eq!((limit.period(), limit.longest_reset()), (days(31), days(32)));
    assert_eq!((limit.rate(), limit.capacity(), limit.max_debt()), (250, 250, 0));
    let same: Limit = limit.to_string().parse().expect("a limit");
    assert!(same == limit && same != "fixed-window 250/month".parse().expect("a limit"));
    let other: Limit = "fixed-window 250/30d".parse().expect("a limit");
    assert_eq!((other.window(), other.tz()), (None, None));
    let shares: Limit = "fixed-window 10/week shards 3".parse().expect("a limit");
    assert_eq!((shares.shards(), shares.rate()), (3, 10));
}

/// 2^53 + 1 is no double: rounded, it would be the limit.
#[tokio::test]
async fn a_cost_just_above_the_largest_limit_is_denied_for_good() {
    let server = Server::start();
    let most: u64 = (1 << 53) - 1;
    let rule = rule(&format!("fixed-window {most}/day"));
    // Together 2^53 + 1.
    let many = [Request::new("many").cost(28_059_810_762_433); 321];
    for limiter in [warm(&server).await.0, Limiter::new(Embedded::new())] {
        for cost in [most + 1, most + 2, u64::MAX] {
            for request in [Request::new("key").cost(cost), Request::new("key").cost(cost).at(SystemTime::now())] {
                let decision = limiter.acquire(&rule, request).await.expect("a decision");
                assert!(!decision.allowed && decision.retry_after == RetryAfter::Never, "{cost}: {decision:?}");
            }
            let looked = limiter.peek(&rule, Request::new("key").cost(cost)).await.expect("a decision");
            assert!(!looked.allowed, "{cost}: {looked:?}");
        }
        assert!(limiter.acquire(&rule, Request::new("key").cost(most)).await.expect("a decision").allowed);
        let allowed =
            limiter.acquire_many(&rule, many).await.into_iter().filter(|one| one.as_ref().is_ok_and(|one| one.allowed));
        assert_eq!(allowed.count(), 320);
    }
}

#[tokio::test]
async fn operations_that_calendar_windows_do_not_support_are_refused_in_one_line() {
    for (text, expected) in [
        ("fixed-window 9/day burst 20", "option: expected tz, shards after fixed-window 9/day, got \"burst\""),
        ("fixed-window 9/day max-debt 2", "option: expected tz, shards after fixed-window 9/day, got \"max-debt\""),
        ("fixed-window 9/week start 8h", "option: expected tz, shards after fixed-window 9/week, got \"start\""),
        ("fixed-window 9/day tz", "tz: its value is missing"),
        ("fixed-window 9/day tz UTC tz UTC", "tz: given twice, the second time as \"UTC\""),
        (
            "fixed-window 9/day tz Zurich",
            "tz: expected a name in the time zone database, such as Europe/Zurich, got \"Zurich\"",
        ),
        (
            "fixed-window 9/day tz Etc/Unknown",
            "tz: expected a name in the time zone database, such as Europe/Zurich, got \"Etc/Unknown\"",
        ),
        (
            "fixed-window 9/1h tz Europe/Zurich",
            "option: expected burst, max-debt, start, shards after fixed-window, got \"tz\" (tz is for calendar \
             windows, such as 10/day)",
        ),
        ("gcra 9/1h tz Europe/Zurich", "option: expected burst, max-debt, shards after token-bucket, got \"tz\""),
        ("fixed-window 0/day", "rate: expected a whole number from 1 to 2^53 - 1, got 0"),
        (
            "fixed-window 2/day shards 3",
            "shards: expected a whole number from 1 to 2, since each needs a unit of the rate, got 3",
        ),
        ("fixed-window 2/2months", "rate: expected units per period, such as 2/month, got \"2/2months\""),
        ("fixed-window 2/1month", "rate: expected units per period, such as 2/month, got \"2/1month\""),
        ("fixed-window 2/Days", "rate: expected units per period, such as 2/day, got \"2/Days\""),
        ("fixed-window 2 per week", "rate: expected units per period, such as 2/week, got \"2 per week\""),
        (
            "fixed-window 2/3 days",
            "rate: expected units per period, such as 2/3d, got \"2/3\"; the units are us ms s m h d",
        ),
        (
            "fixed-window 2/2weeks",
            "rate: expected units per period, such as 2/14d, got \"2/2weeks\"; the units are us ms s m h d",
        ),
        ("fixed-window 2/yr", "rate: expected units per period, such as 2/year, got \"2/yr\""),
        ("gcra 2/month", "rate: expected units per period, such as 2/30d, or fixed-window 2/month, got \"2/month\""),
    ] {
        let error = text.parse::<Limit>().expect_err(text).to_string();
        assert_eq!(error, expected, "{text}");
    }
    let error = Limit::calendar(9, CalendarUnit::Day).capacity(20).build().expect_err("a burst").to_string();
    assert_eq!(error, "burst: not an option of calendar-window, which has tz, shards");
    let of = Limit::builder(tollgate::Algorithm::CalendarWindow, 9, Duration::from_secs(60));
    let error = of.build().expect_err("a period").to_string();
    assert_eq!(error, "calendar-window: expected a day, week, month or year (Limit::calendar), got 60s");
    let error = Limit::builder(tollgate::Algorithm::TokenBucket, 9, Duration::from_secs(60))
        .tz("UTC")
        .build()
        .expect_err("a zone");
    assert_eq!(error.to_string(), "tz: not an option of token-bucket, which has burst, max-debt, shards");
    let limiter = Limiter::new(Embedded::new());
    let day = rule("fixed-window 9/day");
    let error = limiter.reserve(&day, "key").await.expect_err("a reservation").to_string();
    assert!(error.ends_with("fixed window of a period, which can owe units, got fixed-window 9/day"), "{error}");
    let error = limiter.lease(&day, "key", std::num::NonZeroU32::MIN).expect_err("a lease").to_string();
    assert!(error.ends_with("a fixed window of a period, not of the calendar, got fixed-window 9/day"), "{error}");
}

#[tokio::test]
async fn a_penalty_and_settling_count_until_the_window_ends() {
    let clock = Clock::new(time(FEBRUARY_28));
    let limiter = Limiter::new(Embedded::with_clock(clock.clone()));
    let rule = rule("fixed-window 10/day");
    let request = || Request::new("key").id("call").cost(4);
    assert_eq!(limiter.acquire(&rule, request()).await.expect("a decision").remaining, 6);
    assert_eq!(limiter.settle(&rule, request().cost(40)).await.expect("an answer").remaining, 0);
    assert_eq!(limiter.penalty(&rule, Request::new("key").cost(9)).await.expect("an answer").remaining, 0);
    // What was settled is given back, and no more than that.
    assert_eq!(limiter.cancel(&rule, Request::new("key").id("call")).await.expect("an answer").remaining, 1);
    assert_eq!(limiter.refund(&rule, Request::new("key").cost(99)).await.expect("an answer").remaining, 10);
    assert_eq!(limiter.penalty(&rule, Request::new("key").cost(u64::MAX >> 11)).await.expect("an answer").remaining, 0);
    clock.advance(Duration::from_micros(24 * HOUR));
    assert_eq!(limiter.peek(&rule, "key").await.expect("a decision").remaining, 10);
}

#[tokio::test]
async fn denials_are_counted_in_the_window_that_they_are_of() {
    let clock = Clock::new(time(FEBRUARY_28 + 23 * HOUR));
    let limiter = Limiter::new(Embedded::with_clock(clock.clone()));
    let rule = rule("fixed-window 1/day").count_overage(true);
    let mut counted = Vec::new();
    for _ in 0..8 {
        counted.push(limiter.acquire(&rule, Request::new("key").cost(2)).await.expect("a decision").overage);
        clock.advance(Duration::from_micros(HOUR / 4));
    }
    assert_eq!(counted, [1, 2, 3, 4, 1, 2, 3, 4].map(Some));
}
