//! A lease that several runtimes share: one that is blocked or has ended holds up no other, and keeps no units.

use std::pin::pin;

use tokio::runtime::{Builder, Runtime};
use tollgate_testing::polling::{is_pending, wait_for_value};
use tollgate_testing::proxy::Proxy;

use super::*;

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// A limiter with this deadline, and a lease on a limit that is nearly used up.
fn hot(server: &Server, deadline: Duration) -> (Limiter, Rule, Lease) {
    let limiter = Limiter::builder(Redis::open(&server.url()).expect("a good address")).deadline(deadline).build();
    let rule = rule("fixed-window 100000/3650d");
    let lease = limiter.lease(&rule, "hot", processes(2)).expect("a lease");
    runtime().block_on(async {
        limiter.acquire(&rule, Request::new("hot").cost(90_000).deadline(PATIENCE)).await.expect("a decision");
    });
    (limiter, rule, lease)
}

/// Spends until units are held here.
async fn hold(lease: &Lease) {
    while lease.unused() == 0 {
        // One may miss the limiter's deadline.
        if let Ok(decision) = lease.acquire(1).await {
            assert!(decision.allowed);
        }
    }
}

#[test]
fn a_runtime_that_blocks_while_it_refills_holds_up_no_other() {
    let server = Server::start();
    let (_limiter, _rule, lease) = hot(&server, PATIENCE);
    let (blocked, other) = (runtime(), runtime());
    // It learns that the limit is hot, and begins to refill; then it isn't driven any more.
    blocked.block_on(lease.acquire(1)).expect("a decision");
    let mut begun = Box::pin(lease.acquire(1));
    assert!(blocked.block_on(is_pending(begun.as_mut())));
    // Each would wait half its deadline.
    let spent = other.block_on(async {
        let spends = async {
            for _ in 0..100 {
                assert_eq!(lease.acquire(1).await.expect("a decision").by, DecidedBy::Redis);
            }
        };
        tokio::time::timeout(PATIENCE / 3, spends).await
    });
    spent.expect("none waits");
    assert!(blocked.block_on(begun).expect("a decision").allowed);
}

#[test]
fn a_stuck_refill_loses_its_turn_and_what_it_took_comes_back() {
    let server = Server::start();
    let (limiter, rule, lease) = hot(&server, Duration::from_millis(400));
    let (blocked, other) = (runtime(), runtime());
    blocked.block_on(wait_for_value(async || lease.acquire(1).await.ok()));
    let mut begun = Box::pin(lease.acquire(1));
    assert!(blocked.block_on(is_pending(begun.as_mut())));
    other.block_on(async {
        let is_by_lease = async || lease.acquire(1).await.is_ok_and(|decision| decision.by == DecidedBy::Lease);
        let by_lease = async { while !is_by_lease().await {} };
        tokio::time::timeout(PATIENCE, by_lease).await.expect("another refills");
    });
    drop(begun);
    drop(blocked);
    drop(lease);
    comes_back(&limiter, &rule);
}

/// Waits until all that isn't spent is back. Spent was one unit at a time, as decided by whoever.
fn comes_back(limiter: &Limiter, rule: &Rule) {
    runtime().block_on(async {
        limiter.finish().await;
        // Nobody holds any: what remains doesn't change by another return.
        let remaining =
            async || limiter.peek(rule, Request::new("hot").deadline(PATIENCE)).await.expect("a decision").remaining;
        let before = remaining().await;
        tokio::time::sleep(SECOND / 5).await;
        assert_eq!(remaining().await, before);
    });
}

#[test]
fn units_come_back_after_the_runtime_that_took_them_has_ended() {
    let server = Server::start();
    // With the lease alive, dropped before its runtime has ended, and after.
    for case in 0..3 {
        let (limiter, rule, lease) = hot(&server, PATIENCE);
        let ended = runtime();
        ended.block_on(hold(&lease));
        let (held, other) = (lease.unused(), runtime());
        let remaining = async || limiter.peek(&rule, "hot").await.expect("a decision").remaining;
        let before = other.block_on(remaining());
        let kept = match case {
            0 => Some(lease),
            1 => {
                drop(lease);
                None
            }
            _ => {
                drop(ended);
                let runtime = runtime();
                drop(runtime);
                drop(lease);
                other.block_on(limiter.finish());
                other.block_on(async { assert_eq!(remaining().await, before + held, "{case}") });
                other.block_on(limiter.reset(&rule, "hot")).expect("an answer");
                continue;
            }
        };
        drop(ended);
        other.block_on(wait_until("they are back", async || remaining().await == before + held));
        assert_eq!(kept.map_or(0, |lease| lease.unused()), 0);
        other.block_on(limiter.reset(&rule, "hot")).expect("an answer");
    }
}

/// A lease that holds units of a limit of which little is left.
async fn held_behind_a_proxy(server: &Server) -> (Proxy, Limiter, Lease) {
    let proxy = Proxy::to(server.port()).await;
    let limiter = Limiter::new(Redis::open(&proxy.url()).expect("a good address"));
    let rule = rule("fixed-window 100000/3650d");
    let lease = limiter.lease(&rule, "hot", processes(2)).expect("a lease");
    limiter.acquire(&rule, Request::new("hot").cost(90_000).deadline(PATIENCE)).await.expect("a decision");
    hold(&lease).await;
    (proxy, limiter, lease)
}

/// Also where the task that returns them is what holds the lease's last clone.
#[test]
fn units_on_their_way_back_are_waited_for() {
    let server = Server::start();
    let runtime = runtime();
    runtime.block_on(async {
        let (proxy, limiter, lease) = held_behind_a_proxy(&server).await;
        proxy.swallow(true);
        wait_until("they are on their way", async || lease.unused() == 0).await;
        drop(lease);
        assert!(is_pending(pin!(limiter.finish())).await);
        tokio::time::timeout(PATIENCE, limiter.finish()).await.expect("the return ends by its deadline");
    });
}

/// Also where whoever gave them back waits no longer.
#[test]
fn units_that_were_given_back_are_waited_for() {
    let server = Server::start();
    runtime().block_on(async {
        let (proxy, limiter, lease) = held_behind_a_proxy(&server).await;
        limiter.finish().await;
        proxy.swallow(true);
        assert!(is_pending(pin!(lease.give_back())).await);
        drop(lease);
        assert!(is_pending(pin!(limiter.finish())).await);
        tokio::time::timeout(PATIENCE, limiter.finish()).await.expect("the return ends by its deadline");
    });
}

#[test]
fn a_runtime_for_each_call_loses_no_units() {
    let server = Server::start();
    let (limiter, rule, lease) = hot(&server, PATIENCE);
    let mut spent = 90_000;
    for _ in 0..50 {
        spent += runtime().block_on(lease.acquire(1)).expect("a decision").granted;
    }
    let left = async || limiter.peek(&rule, "hot").await.expect("a decision").remaining;
    runtime().block_on(wait_until("the rest is back", async || left().await == 100_000 - spent));
}
