use fastrand::Rng;

use super::*;

/// The start of a day, and so of every window that divides a day.
const START: u64 = 1_700_006_400_000_000;
const SECOND: u64 = 1_000_000;

const LIMITS: [&str; 8] = [
    "gcra 10/1s",
    "gcra 20/1s burst 1",
    "token-bucket 50/1s burst 5",
    "fixed-window 10/1s",
    "fixed-window 5/1s burst 12 start spread",
    "sliding-window 10/1s",
    "sliding-log 10/1s",
    "fixed-window 3/200ms, sliding-log 9/1s",
];

fn subject(text: &str) -> Subject {
    crate::rule_arguments::subject_of(text).unwrap()
}

fn name(key: u32) -> Vec<u8> {
    format!("key-{key}").into_bytes()
}

fn identity(key: u32) -> (Vec<u8>, Pairs) {
    (name(key), Pairs::new())
}

fn rule(text: &str) -> Rule {
    subject(text).rule
}

/// Times are in milliseconds after the start.
fn call(verdict: Verdict, sent_ms: u64, answered_ms: u64) -> Call {
    Call { key: 0, verdict, sent: START + sent_ms * 1000, answered: START + answered_ms * 1000 }
}

fn admitted(sent_ms: u64, answered_ms: u64) -> Call {
    call(Verdict::Allowed, sent_ms, answered_ms)
}

fn denied(sent_ms: u64, answered_ms: u64) -> Call {
    call(Verdict::Denied, sent_ms, answered_ms)
}

async fn audited(limits: &str, cost: u64, mut calls: Vec<Call>) -> Audit {
    calls.sort_by_key(|call| (call.key, call.sent));
    audit(&rule(limits), &identity, cost, &calls, u64::MAX, |_| ()).await.unwrap()
}

/// Over-admissions and false denials.
async fn faults(limits: &str, calls: Vec<Call>) -> (u64, u64) {
    let audit = audited(limits, 1, calls).await;
    (audit.over_admissions, audit.false_denials)
}

/// Calls at random times, decided in that order by an exact limiter; replies come some time later, and occasionally
/// much later.
async fn exactly_decided(limits: &str, cost: u64, chance: &mut Rng) -> Vec<Call> {
    let (rule, limiter) = (rule(limits), Limiter::new(Embedded::with_clock(Clock::new(UNIX_EPOCH))));
    let mut times: Vec<_> = (0..150).map(|_| START + chance.u64(0..3 * SECOND)).collect();
    times.sort_unstable();
    let mut calls = Vec::new();
    for time in times {
        let key = chance.u32(0..2);
        let key_name = name(key);
        let request = Request::new(&key_name).cost(cost).at(UNIX_EPOCH + Duration::from_micros(time));
        let allowed = limiter.acquire(&rule, request).await.unwrap().allowed;
        let mut delay = || 500 * 10_u64.pow(chance.u32(0..4));
        let (before, after) = (delay(), delay());
        let (sent, answered) = (time - chance.u64(0..before), time + chance.u64(0..after));
        let verdict = match allowed {
            _ if chance.u8(0..20) == 0 => Verdict::Unknown,
            true => Verdict::Allowed,
            false => Verdict::Denied,
        };
        calls.push(Call { key, verdict, sent, answered });
    }
    calls
}

#[tokio::test]
async fn an_exact_limiter_is_never_accused() {
    let mut chance = Rng::with_seed(1);
    for limits in LIMITS {
        for round in 0..8 {
            let cost = 1 + round % 2;
            let calls = exactly_decided(limits, cost, &mut chance).await;
            let audit = audited(limits, cost, calls.clone()).await;
            assert!(!audit.found_faults(), "{limits} at cost {cost}: {audit:?}, {calls:?}");
        }
    }
}

#[tokio::test]
async fn a_burst_above_the_capacity_is_found_and_counted() {
    for limits in LIMITS {
        let of_ten = rule(limits).limits().map(tollgate::Limit::capacity).min().unwrap();
        let burst = |more| (0..of_ten + more).map(|at| admitted(10 + at, 12 + at)).collect();
        let (over, _) = faults(limits, burst(0)).await;
        assert_eq!(over, 0, "{limits}: its capacity");
        let (over, _) = faults(limits, burst(4)).await;
        assert!((3..=4).contains(&over), "{limits}: {over} of four more");
    }
}

#[tokio::test]
async fn a_limiter_that_forgets_its_key_is_found() {
    for limits in LIMITS {
        let (rule, limiter) = (rule(limits), Limiter::new(Embedded::with_clock(Clock::new(UNIX_EPOCH))));
        let mut calls = Vec::new();
        for ms in 0..700 {
            if ms == 360 {
                limiter.reset(&rule, "key-0").await.unwrap();
            }
            let at = UNIX_EPOCH + Duration::from_micros(START + ms * 1000);
            let allowed = limiter.acquire(&rule, Request::new("key-0").at(at)).await.unwrap().allowed;
            calls.push(call(if allowed { Verdict::Allowed } else { Verdict::Denied }, ms, ms + 1));
        }
        let (over, _) = faults(limits, calls).await;
        assert!(over >= 1, "{limits}");
    }
}

/// One limiter a tenth too generous, and one a tenth too strict.
#[tokio::test]
async fn a_limiter_of_slightly_other_numbers_is_found() {
    let (rule, fault) = ("gcra 100/1s", [("gcra 110/1s", true), ("gcra 90/1s", false)]);
    for (other, generous) in fault {
        let (other, limiter) = (self::rule(other), Limiter::new(Embedded::with_clock(Clock::new(UNIX_EPOCH))));
        let mut calls = Vec::new();
        for ms in 0..5000 {
            let at = UNIX_EPOCH + Duration::from_micros(START + ms * 1000);
            let allowed = limiter.acquire(&other, Request::new("key-0").at(at)).await.unwrap().allowed;
            calls.push(call(if allowed { Verdict::Allowed } else { Verdict::Denied }, ms, ms + 2));
        }
        let (over, denied) = faults(rule, calls).await;
        assert_eq!((over > 40, denied > 40), (generous, !generous), "{over} and {denied}");
    }
}

#[tokio::test]
async fn a_denial_on_an_idle_key_is_false() {
    for limits in LIMITS {
        assert_eq!(faults(limits, vec![denied(10, 11)]).await, (0, 1), "{limits}");
        assert_eq!(faults(limits, vec![admitted(10, 11), denied(1500, 1501)]).await.1, 1, "{limits}");
    }
}

#[tokio::test]
async fn what_may_have_been_right_is_not_accused() {
    // Denied while a call in flight may have taken the one unit.
    assert_eq!(faults("gcra 1/1s", vec![denied(10, 20), admitted(19, 30)]).await, (0, 0));
    // Denied because of a call without a reply, however much later that arrived.
    assert_eq!(faults("gcra 1/1s", vec![call(Verdict::Unknown, 10, 20), denied(900, 910)]).await, (0, 0));
    // Two that cross the end of a window: one may have been decided on each side.
    assert_eq!(faults("fixed-window 1/1s", vec![admitted(990, 1005), admitted(995, 1010)]).await, (0, 0));
    assert_eq!(faults("fixed-window 1/1s", vec![admitted(980, 990), admitted(985, 997)]).await, (1, 0));
    // The clocks may differ by the slack.
    assert_eq!(faults("fixed-window 1/1s", vec![admitted(980, 990), admitted(985, 999)]).await, (0, 0));
    // The long call may have been decided after those that overtook it, though it was sent before.
    assert_eq!(faults("gcra 10/1s burst 1", vec![admitted(0, 200), admitted(10, 11)]).await, (0, 0));
    assert_eq!(faults("gcra 10/1s burst 1", vec![admitted(0, 80), admitted(10, 11)]).await, (1, 0));
    // Or before those that were answered earlier.
    assert_eq!(faults("gcra 10/1s burst 1", vec![admitted(0, 105), admitted(50, 104)]).await, (0, 0));
}

#[tokio::test]
async fn a_cost_that_never_fits_must_be_denied() {
    let audit = audited("gcra 5/1s", 6, vec![admitted(10, 11), denied(20, 21)]).await;
    assert_eq!((audit.over_admissions, audit.false_denials, audit.exact_admitted), (1, 0, 0));
}

#[tokio::test]
async fn a_denial_after_the_last_call_that_was_kept_is_not_judged() {
    let calls = [denied(10, 11), denied(900, 910)];
    let audit = audit(&rule("gcra 5/1s"), &identity, 1, &calls, START + 100_000, |_| ()).await.unwrap();
    assert_eq!(audit.false_denials, 1);
}

#[test]
fn what_cannot_be_judged_says_why() {
    for (limits, why) in [
        ("concurrency 5 ttl 1s", "permits"),
        ("gcra 5/1s, fixed-window 5/1s start first-hit", "first-hit: where its windows start"),
        ("sliding-window 999999999/1d", "steps of"),
    ] {
        let told = fits(&subject(limits)).unwrap_err();
        assert!(told.contains(why), "{told}");
    }
    let mut blocking = subject("gcra 5/1s");
    blocking.rule = blocking.rule.block_for(Duration::from_secs(1)).unwrap();
    assert!(fits(&blocking).unwrap_err().contains("a denial blocks its key"));
    for limits in LIMITS {
        assert_eq!(fits(&subject(limits)), Ok(()));
    }
}

#[tokio::test]
async fn shards_are_held_against_the_whole_limit_and_their_false_denials_are_no_fault() {
    let taken = admitted(0, 0);
    // More than a shard has: only the whole limit could have admitted it.
    let audit = audited("gcra 10/1s shards 5", 3, vec![taken, taken, taken]).await;
    assert_eq!((audit.exact_admitted, audit.over_admissions), (3, 0));
    let audit = audited("gcra 10/1s shards 5", 1, vec![taken, denied(10, 10)]).await;
    assert_eq!((audit.false_denials, audit.found_faults()), (1, false));
    let audit = audited("gcra 10/1s shards 5", 1, vec![taken; 11]).await;
    assert_eq!((audit.over_admissions, audit.found_faults()), (1, true));
}
