//! Calls that are answered at once, in this process: whoever makes them again and again lets others have their turn, as
//! if they waited for Redis.

use std::num::NonZeroU32;
use std::time::Duration;

use tollgate::rules::{Attributes, RuleSet};
use tollgate::{DenialCache, Embedded, Limiter, OnError, Redis, Request, Rule};
use tollgate_testing::polling::most_in_a_row;
use tollgate_testing::redis_server::free_port;
use tollgate_testing::rules::rule;

/// What tokio lets a task do before others have their turn.
const BUDGET: u64 = 128;

async fn takes_turns(what: &str, ask: impl AsyncFn()) {
    let most = most_in_a_row(ask).await;
    assert!(most <= BUDGET + 1, "{what}: {most} calls in a row");
}

fn closed(rule: &Rule) -> Rule {
    rule.clone().on_error(OnError::Closed).expect("a policy")
}

#[tokio::test]
async fn of_the_embedded_engine() {
    let limiter = Limiter::new(Embedded::new());
    let (one, two) = (rule("gcra 1/1d"), rule("gcra 1/1d, fixed-window 5/1h"));
    takes_turns("acquire", async || _ = limiter.acquire(&one, "key").await.expect("a decision")).await;
    takes_turns("of two limits", async || _ = limiter.acquire(&two, "key").await.expect("a decision")).await;
    takes_turns("peek", async || _ = limiter.peek(&one, "key").await.expect("a decision")).await;
    takes_turns("at most", async || _ = limiter.at_most(&one, "key").await.expect("a decision")).await;
    takes_turns("penalty", async || _ = limiter.penalty(&one, "key").await.expect("a decision")).await;
    takes_turns("refund", async || _ = limiter.refund(&one, "key").await.expect("a decision")).await;
    takes_turns("reset", async || _ = limiter.reset(&one, "key").await.expect("a decision")).await;
    takes_turns("inspect", async || _ = limiter.inspect(&one, "key").await.expect("states")).await;
    takes_turns("reset all", async || _ = limiter.reset_all("nobody", |_| ()).await.expect("forgotten")).await;
    takes_turns("wait", async || {
        limiter.acquire_wait(&one, "key", Duration::ZERO).await.expect("a decision");
    })
    .await;
    let permits = rule("concurrency 1 ttl 1m");
    takes_turns("hold and release", async || {
        let permit = limiter.hold(&permits, "key").await.expect("a decision").permit.expect("a permit");
        permit.release().await.expect("released");
    })
    .await;
    let _held = limiter.hold(&permits, "key").await.expect("a decision");
    takes_turns("hold in vain", async || {
        assert!(limiter.hold(&permits, "key").await.expect("a decision").permit.is_none());
    })
    .await;
}

#[tokio::test]
async fn of_many_requests_at_hand() {
    let plain = Limiter::new(Embedded::new());
    let remembering = Limiter::builder(Embedded::new()).denial_cache(DenialCache::new(10)).build();
    let one = rule("gcra 1/1d");
    takes_turns("one", async || _ = plain.acquire_many(&one, ["key"]).await).await;
    takes_turns("a remembered denial", async || _ = remembering.acquire_many(&one, ["key"]).await).await;
    takes_turns("a late one", async || {
        let late = Request::new("key").deadline(Duration::ZERO);
        assert!(plain.acquire_many(&closed(&one), [late]).await[0].is_err());
    })
    .await;
    takes_turns("a refused one", async || assert!(plain.acquire_many(&one, [""]).await[0].is_err())).await;
    // A thousand of them in one call.
    let keys: Vec<_> = (0..1000).map(|key| format!("user:{key}")).collect();
    let turns = tollgate_testing::polling::turns_while(async || _ = plain.acquire_many(&one, &keys).await).await;
    assert!(turns >= 1000 / BUDGET, "{turns} turns");
}

#[tokio::test]
async fn of_a_lease() {
    let limiter = Limiter::new(Embedded::new());
    let half_used = rule("fixed-window 4000000/30d");
    limiter.acquire(&half_used, Request::new("key").cost(2_500_000)).await.expect("a decision");
    let lease = limiter.lease(&half_used, "key", NonZeroU32::MIN).expect("a lease");
    takes_turns("lease", async || assert!(lease.acquire(1).await.expect("a decision").allowed)).await;
    lease.give_back().await.expect("given back");
}

#[tokio::test]
async fn of_rules_that_ask_no_limit() {
    let rules: RuleSet = r#"
        [[rule]]
        name = "blocked"
        match = { path = "/blocked" }
        action = "block"

        [[rule]]
        name = "limited"
        match = { path = "/limited" }
        key = "user"
        limits = ["gcra 1/1d"]
    "#
    .parse()
    .expect("rules");
    let limiter = Limiter::new(Embedded::new());
    for path in ["/", "/blocked", "/limited"] {
        let request = Attributes::new().user("42").path(path);
        takes_turns(path, async || _ = limiter.acquire_by(&rules, &request).await.expect("a verdict")).await;
        takes_turns(path, async || _ = limiter.hold_by(&rules, &request).await.expect("a verdict")).await;
    }
    // There is no user to count.
    let request = Attributes::new().path("/limited");
    takes_turns("missing", async || _ = limiter.acquire_by(&rules, &request).await.expect("a verdict")).await;
}

#[tokio::test]
async fn of_policies() {
    let redis = Redis::open(&format!("redis://127.0.0.1:{}", free_port())).expect("an address");
    let limiter = Limiter::new(redis);
    let one = rule("gcra 1/1d");
    let local = OnError::Local { processes: NonZeroU32::MIN };
    for policy in [OnError::Closed, OnError::Open, local] {
        let one = one.clone().on_error(policy).expect("a policy");
        takes_turns("acquire", async || _ = limiter.acquire(&one, "key").await).await;
        takes_turns("many", async || _ = limiter.acquire_many(&one, ["key"]).await).await;
        takes_turns("refund", async || _ = limiter.refund(&one, "key").await).await;
    }
    // What was granted without Redis is given back without it.
    let permits = rule("concurrency 1 ttl 1m").on_error(OnError::Open).expect("a policy");
    let granted = limiter.hold(&permits, "key").await.expect("open").permit.expect("a permit");
    takes_turns("renew", async || _ = granted.renew().await).await;
}
