//! The denial cache: it spares Redis, and never denies what Redis would have allowed.

use std::time::{Duration, UNIX_EPOCH};

use proptest::prelude::*;
use tollgate::redis::cmd;
use tollgate::{
    Clock, DecidedBy, Decision, DenialCache, Embedded, Limit, Limiter, Operation, Redis, Request, RetryAfter, Rule,
};
use tollgate_testing::polling::{PATIENCE, turns_of_others};
use tollgate_testing::proxy::Proxy;
use tollgate_testing::redis_server::Server;
use tollgate_testing::rules::{FIVE, FOUR, by_own_id, rule};

const SECOND: Duration = Duration::from_secs(1);

/// A limiter that remembers denials and one that doesn't, on one engine and one clock.
struct Pair {
    clock: Clock,
    remembering: Limiter,
    plain: Limiter,
}

impl Pair {
    fn new(cache: DenialCache) -> Self {
        let clock = Clock::new(UNIX_EPOCH + 1_700_000_000 * SECOND);
        let plain = Limiter::new(Embedded::with_clock(clock.clone()));
        Self { clock, remembering: plain.to_builder().denial_cache(cache).build(), plain }
    }

    async fn pass(&self, time: Duration) {
        self.clock.advance(time);
        tokio::time::advance(time).await;
    }

    async fn acquire(&self, rule: &Rule, cost: u64) -> Decision {
        self.remembering.acquire(rule, Request::new("key").cost(cost)).await.expect("a decision")
    }
}

fn wait(decision: &Decision) -> Duration {
    decision.retry_after.duration().expect("a wait")
}

#[tokio::test(start_paused = true)]
async fn a_denial_is_answered_from_the_cache_until_its_wait_is_over() {
    let pair = Pair::new(DenialCache::new(100).longest(60 * SECOND));
    for text in FOUR {
        let rule = rule(text);
        assert_eq!(pair.acquire(&rule, 5).await.by, DecidedBy::Embedded, "{text}");
        let first = pair.acquire(&rule, 1).await;
        assert_eq!((first.allowed, first.by.name()), (false, "embedded"), "{text}");
        let (all, step) = (wait(&first), Duration::from_millis(500));
        pair.pass(step).await;
        let again = pair.acquire(&rule, 1).await;
        assert_eq!((again.allowed, again.by.name()), (false, "denial-cache"), "{text}");
        assert_eq!(wait(&again), all - step, "{text}: the wait is tight");
        assert_eq!(again.reset_after, first.reset_after - step, "{text}");
        assert_eq!(again.denied_by, first.denied_by, "{text}");
        pair.pass(all - step - Duration::from_micros(1)).await;
        assert_eq!(pair.acquire(&rule, 1).await.by, DecidedBy::DenialCache, "{text}");
        pair.pass(Duration::from_micros(1)).await;
        let then = pair.acquire(&rule, 1).await;
        assert_eq!((then.allowed, then.by), (true, DecidedBy::Embedded), "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_higher_cost_is_denied_from_the_cache_and_a_lower_one_is_sent() {
    let (pair, rule) = (Pair::new(DenialCache::new(100)), rule("gcra 5/10s"));
    pair.acquire(&rule, 3).await;
    assert_eq!(pair.acquire(&rule, 3).await.by, DecidedBy::Embedded);
    assert_eq!(pair.acquire(&rule, 4).await.by, DecidedBy::DenialCache);
    let lower = pair.acquire(&rule, 2).await;
    assert_eq!((lower.allowed, lower.by), (true, DecidedBy::Embedded));
}

/// Of it the cache knows nothing, whatever it has of lower costs.
#[tokio::test(start_paused = true)]
async fn a_cost_that_can_never_be_allowed_is_denied_with_never() {
    for text in FOUR {
        let (pair, rule) = (Pair::new(DenialCache::new(100)), rule(text));
        pair.acquire(&rule, 5).await;
        assert_eq!(pair.acquire(&rule, 1).await.by, DecidedBy::Embedded, "{text}");
        assert_eq!(pair.acquire(&rule, 6).await.retry_after, RetryAfter::Never, "{text}");
        let denied = pair.acquire(&rule, 1).await;
        assert_eq!((denied.by.name(), wait(&denied) > Duration::ZERO), ("denial-cache", true), "{text}");
        let waited = pair.remembering.acquire_wait(&rule, Request::new("key").cost(6), 10 * SECOND).await;
        assert_eq!(waited.expect("a decision").retry_after, RetryAfter::Never, "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn units_given_back_by_this_process_are_seen_at_once() {
    let pair = Pair::new(DenialCache::new(100));
    let (rule, request) = (rule("token-bucket 5/1h max-debt 5"), Request::new("key"));
    let limiter = &pair.remembering;
    let full = || async {
        limiter.reset(&rule, request.id("held")).await.expect("an answer");
        limiter.acquire(&rule, request.cost(5).id("held")).await.expect("a decision");
        assert!(!pair.acquire(&rule, 1).await.allowed);
        assert_eq!(pair.acquire(&rule, 1).await.by, DecidedBy::DenialCache);
    };
    full().await;
    limiter.refund(&rule, request).await.expect("an answer");
    check(&pair, &rule, "refund").await;
    full().await;
    limiter.reset(&rule, request).await.expect("an answer");
    check(&pair, &rule, "reset").await;
    full().await;
    limiter.settle(&rule, request.cost(1).id("held")).await.expect("an answer");
    check(&pair, &rule, "settle").await;
    full().await;
    limiter.cancel(&rule, request.id("held")).await.expect("an answer");
    check(&pair, &rule, "cancel").await;
    full().await;
    limiter.reset_all("test", |_| ()).await.expect("an answer");
    check(&pair, &rule, "reset_all").await;
    limiter.block(&rule, request, 60 * SECOND).await.expect("an answer");
    assert!(pair.acquire(&rule, 1).await.blocked);
    assert!(pair.acquire(&rule, 1).await.blocked, "from the cache");
    limiter.unblock(&rule, request).await.expect("an answer");
    check(&pair, &rule, "unblock").await;
}

async fn check(pair: &Pair, rule: &Rule, how: &str) {
    let decision = pair.acquire(rule, 1).await;
    assert_eq!((decision.by, decision.allowed), (DecidedBy::Embedded, true), "{how}");
}

#[tokio::test(start_paused = true)]
async fn a_changed_rule_is_sent_to_the_engine_and_so_is_the_old_one_after_it() {
    let (pair, old, new) = (Pair::new(DenialCache::new(100)), rule("gcra 5/10s"), rule("gcra 50/10s"));
    pair.acquire(&old, 5).await;
    pair.acquire(&old, 1).await;
    assert_eq!(pair.acquire(&old, 1).await.by, DecidedBy::DenialCache);
    assert_eq!(pair.acquire(&new, 1).await.by, DecidedBy::Embedded);
    assert_eq!(pair.acquire(&old, 1).await.by, DecidedBy::Embedded);
}

#[tokio::test(start_paused = true)]
async fn units_given_back_by_other_processes_are_seen_within_a_second() {
    let (pair, rule) = (Pair::new(DenialCache::new(100)), rule("gcra 5/1h"));
    pair.acquire(&rule, 5).await;
    pair.acquire(&rule, 1).await;
    pair.plain.reset(&rule, "key").await.expect("an answer");
    pair.pass(SECOND - Duration::from_micros(1)).await;
    assert!(!pair.acquire(&rule, 1).await.allowed);
    pair.pass(Duration::from_micros(1)).await;
    assert!(pair.acquire(&rule, 1).await.allowed);
}

#[tokio::test(start_paused = true)]
async fn calls_that_only_the_engine_can_answer_are_always_sent() {
    let pair = Pair::new(DenialCache::new(100));
    let now = UNIX_EPOCH + 1_700_000_000 * SECOND;
    let request = Request::new("key");
    let asked = [
        (rule("concurrency 1 ttl 1h"), request),
        (rule("gcra 1/1h").count_overage(true), request),
        (rule("gcra 1/1h").named("at").expect("a name"), request.at(now)),
        (rule("gcra 1/1h").named("id").expect("a name"), request.id("one")),
        (
            rule("concurrency 1 ttl 1h")
                .and(rule("gcra 9/1h").limits().next().expect("a limit").clone())
                .expect("a rule")
                .named("two")
                .expect("a name"),
            request,
        ),
    ];
    for (rule, request) in asked {
        pair.remembering.acquire(&rule, by_own_id(&rule, "key")).await.expect("a decision");
        for _ in 0..3 {
            let decision = pair.remembering.acquire(&rule, by_own_id(&rule, request)).await.expect("a decision");
            assert_eq!((decision.allowed, decision.by), (false, DecidedBy::Embedded), "{rule}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn several_limits_are_denied_together_and_each_reports_its_wait() {
    let pair = Pair::new(DenialCache::new(100));
    let rule = rule("gcra 1/200ms").and("fixed-window 1/1h".parse().expect("a limit")).expect("a rule");
    pair.acquire(&rule, 1).await;
    let first = pair.acquire(&rule, 1).await;
    pair.pass(Duration::from_millis(300)).await;
    let again = pair.acquire(&rule, 1).await;
    assert_eq!(again.by, DecidedBy::DenialCache);
    assert_eq!(wait(&again), wait(&first) - Duration::from_millis(300));
    let allowed: Vec<_> = again.limits.iter().map(|limit| (limit.allowed, limit.retry_after)).collect();
    assert_eq!(allowed, [(true, RetryAfter::Now), (false, again.retry_after)]);
    assert_eq!(again.denied_by.as_deref(), Some("fixed-window 1/1h"));
}

/// Whichever limit denied, a call that takes no less of any is denied again, and another is asked.
#[tokio::test(start_paused = true)]
async fn of_limits_with_costs_of_their_own_no_lower_cost_is_denied_from_the_cache() {
    let pair = Pair::new(DenialCache::new(100).longest(60 * SECOND));
    let named = |text: &str, name: &str| text.parse::<Limit>().and_then(|limit| limit.named(name)).expect("a limit");
    let rule = Rule::new("model", named("token-bucket 5/1m", "requests")).expect("a name");
    let rule = rule.and(named("token-bucket 1000/1m", "tokens")).expect("another name");
    let ask = async |requests, tokens| {
        let costs = [("requests", requests), ("tokens", tokens)];
        let decision = pair.remembering.acquire(&rule, Request::new("key").costs(&costs)).await.expect("a decision");
        (decision.allowed, decision.by)
    };
    assert_eq!(ask(1, 600).await, (true, DecidedBy::Embedded));
    assert_eq!(ask(2, 500).await, (false, DecidedBy::Embedded));
    assert_eq!(ask(2, 500).await, (false, DecidedBy::DenialCache));
    assert_eq!(ask(3, 501).await, (false, DecidedBy::DenialCache));
    assert_eq!(ask(1, 500).await, (false, DecidedBy::Embedded), "fewer requests");
    assert_eq!(ask(1, 400).await, (true, DecidedBy::Embedded), "fewer tokens");
}

#[tokio::test]
async fn cached_denials_send_nothing_and_many_keys_do_not_grow_the_cache() {
    let server = Server::start();
    let mut redis = server.connection();
    let cache = DenialCache::new(50).longest(PATIENCE);
    let limiter = Limiter::builder(Redis::open(&server.url()).expect("a good address")).deadline(PATIENCE).build();
    let (limiter, rule) = (limiter.to_builder().denial_cache(cache).build(), rule("gcra 1/1h"));
    for _ in 0..100 {
        limiter.acquire(&rule, "key").await.expect("a decision");
    }
    let calls = |redis: &mut tollgate::redis::Connection| -> usize {
        let stats: String = cmd("INFO").arg("commandstats").query(redis).expect("statistics");
        let line = stats.lines().find(|line| line.starts_with("cmdstat_evalsha:")).expect("calls").to_owned();
        line.split(['=', ',']).nth(1).and_then(|count| count.parse().ok()).expect("a count")
    };
    assert_eq!(calls(&mut redis), 2, "the first, which finds no script, and the one that is denied");
    let many = (0..1000).flat_map(|key| [key, key]).map(|key| key.to_string()).collect::<Vec<_>>();
    for decision in limiter.acquire_many(&rule, &many).await {
        decision.expect("a decision");
    }
    let mut asked = 0;
    for key in &many {
        asked += usize::from(limiter.acquire(&rule, key).await.expect("a decision").by == DecidedBy::Redis);
    }
    assert!(asked > 900, "few of a thousand keys are remembered, yet only {asked} were asked of Redis");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// Alone in its process, a limiter that remembers denials allows just what one that doesn't would.
    #[test]
    fn the_cache_changes_no_verdict(
        which in 0..FIVE.len(),
        steps in prop::collection::vec((0..4_u64, 0..3_000_000_u64, 0..20_u8), 1..60),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().expect("a runtime");
        runtime.block_on(async {
            let rule = rule(FIVE[which]);
            // Two engines that go through the same.
            let (cached, plain) = (Pair::new(DenialCache::new(10).longest(60 * SECOND)), Pair::new(DenialCache::new(1)));
            for (cost, pause, kind) in steps {
                let pause = Duration::from_micros(pause);
                cached.pass(pause).await;
                plain.clock.advance(pause);
                let request = Request::new("key").cost(cost);
                let operation = match kind {
                    0 => Operation::Refund,
                    1 => Operation::Reset,
                    2 => Operation::AtMost,
                    _ => Operation::Acquire,
                };
                let one = cached.remembering.call(operation, &rule, request).await;
                let other = plain.plain.call(operation, &rule, request).await;
                let (one, other) = (one.expect("a decision"), other.expect("a decision"));
                assert_eq!(one.allowed, other.allowed, "{rule} at cost {cost}");
                if one.by == DecidedBy::Embedded {
                    assert_eq!((one.remaining, one.retry_after), (other.remaining, other.retry_after));
                } else {
                    assert!(one.retry_after <= other.retry_after, "{rule}: never longer than it is");
                }
            }
        });
    }
}

/// Nothing waits for a denial that is remembered, so only the caller can let others have their turn.
#[tokio::test]
async fn a_caller_who_asks_again_and_again_lets_others_have_their_turn() {
    let limiter = Limiter::builder(Embedded::new()).denial_cache(DenialCache::new(10)).build();
    let rule = rule("gcra 1/1d");
    let turns = turns_of_others(async || _ = limiter.acquire(&rule, "key").await.expect("a decision")).await;
    assert!(turns > 10, "{turns} turns");
}

/// Whatever the refund does, and whenever: a denial that is remembered meanwhile could hide it.
#[tokio::test]
async fn no_denial_is_remembered_while_a_dropped_refund_may_yet_run() {
    let server = Server::start();
    let proxy = Proxy::to(server.port()).await;
    let cache = DenialCache::new(10).longest(Duration::from_secs(3600));
    let on = |url: &str| {
        Limiter::builder(Redis::open(url).expect("a good address"))
            .deadline(PATIENCE)
            .denial_cache(cache.clone())
            .build()
    };
    let (there, slow, rule) = (on(&server.tcp_url()), on(&proxy.url()), rule("fixed-window 1/30d"));
    for (key, is_dropped) in [("refunded", false), ("dropped", true)] {
        assert!(slow.acquire(&rule, key).await.expect("a decision").allowed);
        if is_dropped {
            proxy.swallow(true);
            let refund = tokio::time::timeout(Duration::from_millis(50), slow.refund(&rule, key)).await;
            assert!(refund.is_err(), "no answer");
        } else {
            slow.refund(&rule, key).await.expect("a decision");
            assert!(there.acquire(&rule, key).await.expect("a decision").allowed);
        }
        let by = async || there.acquire(&rule, key).await.expect("a decision").by;
        assert_eq!(
            [by().await, by().await],
            [DecidedBy::Redis, if is_dropped { DecidedBy::Redis } else { DecidedBy::DenialCache }]
        );
    }
}
