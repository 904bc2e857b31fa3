//! governor by its own fake clock. tower_governor is that with the quota that its builder makes.

use std::num::NonZeroU32;
use std::time::Duration;

use governor::clock::{Clock, FakeRelativeClock};
use governor::middleware::StateInformationMiddleware;
use governor::state::{InMemoryState, NotKeyed};
use governor::{InsufficientCapacity, Quota, RateLimiter};
use tollgate::middleware::HeaderStyle;
use tollgate::{Limit, RetryAfter};
use tollgate_testing::engines::Micros;
use tollgate_testing::oracle::Retry;

use super::{MILLISECOND, SECOND, START, Tollgate, Trace, limit, limit_for};

struct Governor {
    limiter: RateLimiter<NotKeyed, InMemoryState, FakeRelativeClock, StateInformationMiddleware>,
    now: Micros,
}

/// What it answers: what remains, how long to wait, or the most that could ever be allowed.
#[derive(Debug, PartialEq)]
enum Answer {
    Remaining(u32),
    After(Duration),
    NeverMoreThan(u32),
}

impl Governor {
    fn new(quota: Quota) -> Self {
        let limiter = RateLimiter::direct_with_clock(quota, FakeRelativeClock::default());
        Self { limiter: limiter.with_middleware(), now: START }
    }

    fn ask(&mut self, cost: u64, now: Micros) -> Answer {
        let clock = self.limiter.clock();
        clock.advance(Duration::from_micros(now - self.now));
        self.now = now;
        let answer = match units(cost) {
            NonZeroU32::MIN => Ok(self.limiter.check()),
            several => self.limiter.check_n(several),
        };
        match answer {
            Ok(Ok(state)) => Answer::Remaining(state.remaining_burst_capacity()),
            Ok(Err(denied)) => Answer::After(denied.wait_time_from(clock.now())),
            Err(InsufficientCapacity(most)) => Answer::NeverMoreThan(most),
        }
    }
}

fn units(count: u64) -> NonZeroU32 {
    u32::try_from(count).ok().and_then(NonZeroU32::new).expect("some units")
}

/// `tower_governor::governor::GovernorConfigBuilder::finish`, 0.8.0: `period` is `per_second`'s seconds, or the like.
fn quota_of_tower_governor(period: Duration, burst_size: u64) -> Quota {
    Quota::with_period(period).expect("a period").allow_burst(units(burst_size))
}

fn answer_alike(quota: Quota, limit: Limit) {
    let (tollgate, mut governor) = (Tollgate::new(limit), Governor::new(quota));
    let capacity = u64::from(quota.burst_size().get());
    let interval = u64::try_from(quota.replenish_interval().as_nanos().div_ceil(1000)).expect("a short interval");
    let trace = Trace { calls: 1000, unit: 1, interval, capacity, costs: Some(1..=capacity + 2) };
    trace.play(|cost, now| {
        let ours = tollgate.acquire(cost, now);
        let theirs = match ours.retry {
            Retry::Now => Answer::Remaining(ours.remaining.try_into().expect("few")),
            Retry::AfterUs(wait) => Answer::After(Duration::from_micros(wait)),
            Retry::Never => Answer::NeverMoreThan(ours.limit.try_into().expect("few")),
        };
        assert_eq!(ours.allowed, ours.retry == Retry::Now);
        // Of governor's nanoseconds, a begun microsecond is a whole one here.
        let answer = match governor.ask(cost, now) {
            Answer::After(wait) => Answer::After(Duration::from_micros(wait.as_nanos().div_ceil(1000) as u64)),
            other => other,
        };
        assert_eq!(answer, theirs, "a cost of {cost} at {now} of {}", tollgate.rule);
        ours.retry
    });
}

#[test]
fn a_quota_of_governor_decides_as_its_rule_does() {
    let quota = |count| Quota::per_minute(units(count));
    answer_alike(quota(100), limit_for("Quota::per_minute(nonzero!(100u32))"));
    answer_alike(quota(100).allow_burst(units(20)), limit_for(".allow_burst(nonzero!(20u32))"));
    let every = |period| Quota::with_period(period).expect("a period");
    let two = Duration::from_secs(2);
    answer_alike(every(two).allow_burst(units(5)), limit_for("Quota::with_period(Duration::from_secs(2))"));
    // Others by the same terms, also where a unit's interval is no whole microsecond.
    answer_alike(Quota::per_second(units(50)), limit("gcra 50/1s"));
    answer_alike(Quota::per_hour(units(90)).allow_burst(units(200)), limit("gcra 90/1h burst 200"));
    answer_alike(every(two), limit("gcra 1/2s"));
    answer_alike(every(Duration::from_nanos(1500)).allow_burst(units(7)), limit("gcra 2/3us burst 7"));
}

#[test]
fn governor_cuts_the_interval_to_a_nanosecond_and_admits_more_by_that() {
    let mut governor = Governor::new(Quota::per_second(units(300_000)));
    let tollgate = Tollgate::new(limit("gcra 300000/1s"));
    for now in [START, START + 999_900] {
        assert_eq!(governor.ask(300_000, now), Answer::Remaining(0));
    }
    assert!(tollgate.acquire(300_000, START).allowed);
    assert_eq!(tollgate.acquire(300_000, START + 999_900).retry, Retry::AfterUs(100));
}

#[test]
fn settings_of_tower_governor_decide_as_their_rule_does() {
    let settings = "per_second(2).burst_size(5)";
    answer_alike(quota_of_tower_governor(Duration::from_secs(2), 5), limit_for(settings));
    // Its defaults.
    answer_alike(quota_of_tower_governor(Duration::from_millis(500), 8), limit("gcra 1/500ms burst 8"));
}

/// Both with headers.
#[test]
fn tower_governor_rounds_retry_after_down_and_calls_the_burst_its_limit() {
    let mut governor = Governor::new(quota_of_tower_governor(Duration::from_secs(2), 5));
    let tollgate = Tollgate::new(limit_for("per_second(2).burst_size(5)"));
    let mut fields = |now| {
        let theirs = governor.ask(1, START + now);
        let decision = tollgate.decide(1, START + now);
        let fields = decision.headers(HeaderStyle::XRateLimit);
        let field = |name| fields.iter().find(|(found, _)| *found == name).map(|(_, value)| value.clone());
        assert_eq!(field("x-ratelimit-limit").as_deref(), Some("1"));
        assert_eq!(governor.limiter.clock().now().as_u64() / 1000, now);
        (theirs, field("x-ratelimit-remaining").expect("a field"), field("retry-after"), decision.retry_after)
    };
    for left in (0..5).rev() {
        assert_eq!(fields(0), (Answer::Remaining(left), left.to_string(), None, RetryAfter::Now));
    }
    // What it writes of this wait is `as_secs()`: 1, and then 0.
    for (now, ours) in [(500 * MILLISECOND, "2"), (1200 * MILLISECOND, "1")] {
        let wait = Duration::from_micros(2 * SECOND - now);
        assert_eq!(wait.as_secs() + 1, ours.parse::<u64>().expect("seconds"));
        assert_eq!(fields(now), (Answer::After(wait), "0".into(), Some(ours.into()), RetryAfter::After(wait)));
    }
}
