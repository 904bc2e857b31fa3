//! The crate itself, on a Redis whose clock is the test's.
#![cfg(target_os = "linux")]

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use actix_limitation::{Error, Limiter};
use tollgate::Limit;
use tollgate::redis::cmd;
use tollgate_testing::clock::Timed;
use tollgate_testing::engines::{Micros, answer};
use tollgate_testing::oracle::Retry;

use super::{MILLISECOND, SECOND, START, Tollgate, Trace, limit, limit_for};

const A_SECOND: Duration = Duration::from_secs(1);

struct Both<'a> {
    redis: &'a Timed,
    key: String,
    theirs: Limiter,
    ours: Tollgate,
}

/// Whether it allows, the limit, what remains, and when the window is over, in seconds since the epoch.
type Told = (bool, u64, u64, u64);

impl<'a> Both<'a> {
    fn new(redis: &'a Timed, most: usize, period: Duration, ours: Limit) -> Self {
        let theirs = Limiter::builder(redis.server.url()).limit(most).period(period).build().expect("an address");
        Self { redis, key: format!("{most} in {period:?}"), theirs, ours: Tollgate::new(ours) }
    }

    fn theirs(&self, now: Micros) -> Told {
        self.redis.set(now);
        let (allowed, status) = match self.ours.runtime.block_on(self.theirs.count(self.key.as_str())) {
            Ok(status) => (true, status),
            Err(Error::LimitExceeded(status)) => (false, status),
            Err(error) => panic!("{error}"),
        };
        (allowed, status.limit() as u64, status.remaining() as u64, status.reset_epoch_utc() as u64)
    }

    fn ask(&self, now: Micros) -> Retry {
        let asked_at = SystemTime::now();
        let ours = self.ours.decide(1, now);
        let (allowed, limit, remaining, resets) = self.theirs(now);
        let rule = &self.ours.rule;
        assert_eq!((allowed, limit, remaining), (ours.allowed, ours.capacity, ours.remaining), "at {now} by {rule}");
        // It adds what is left to the clock of this process, and by whole seconds.
        let (least, resets) = (asked_at + ours.reset_after - A_SECOND, UNIX_EPOCH + Duration::from_secs(resets));
        assert!(least <= resets && resets <= SystemTime::now() + ours.reset_after + A_SECOND, "{resets:?} by {rule}");
        answer(&ours).retry
    }
}

#[test]
fn a_limiter_of_actix_limitation_decides_as_its_rule_does() {
    let redis = Timed::start(START, &[]);
    for (most, seconds) in [(1, 1), (5, 2), (12, 60)] {
        let ours = limit(&format!("fixed-window {most}/{seconds}s start first-hit"));
        let both = Both::new(&redis, most, Duration::from_secs(seconds), ours);
        let interval = seconds * SECOND / most as u64;
        // No multiple of it is as long as a window: see the next test.
        let unit = 7 * MILLISECOND;
        Trace { calls: 500, unit, interval, capacity: most as u64, costs: None }.play(|_, now| both.ask(now));
    }
    // The page's own.
    let ours = limit_for(".limit(5000).period(Duration::from_secs(3600))");
    let both = Both::new(&redis, 5000, Duration::from_secs(3600), ours);
    assert_eq!(both.ask(START), Retry::Now);
    // Most of its calls at once, to be quick.
    assert!(both.ours.decide(4900, START).allowed);
    cmd("INCRBY").arg(&both.key).arg(4900).exec(&mut redis.server.connection()).expect("counted");
    for call in 1..100 {
        assert_eq!(both.ask(START + call * 30 * SECOND), Retry::Now);
    }
    assert_eq!(both.ask(START + 3300 * SECOND), Retry::AfterUs(300 * SECOND));
    assert_eq!(both.ask(START + 3601 * SECOND), Retry::Now);
}

/// Redis has a key until the clock is past the millisecond in which it expires.
#[test]
fn a_window_of_actix_limitation_is_up_to_a_millisecond_longer() {
    let redis = Timed::start(START, &[]);
    let ours = limit("fixed-window 1/1s start first-hit");
    let both = Both::new(&redis, 1, Duration::from_secs(1), ours);
    assert_eq!(both.ask(START), Retry::Now);
    assert_eq!(both.ask(START + SECOND - 1), Retry::AfterUs(1));
    assert!(both.ours.peek(1, START + SECOND).allowed);
    for now in [START + SECOND, START + SECOND + MILLISECOND - 1] {
        let (allowed, ..) = both.theirs(now);
        assert!(!allowed);
    }
    assert_eq!(both.ask(START + SECOND + MILLISECOND), Retry::Now);
}

#[test]
fn a_period_of_actix_limitation_is_cut_to_whole_seconds() {
    let redis = Timed::start(START, &[]);
    let ours = limit("fixed-window 1/1s start first-hit");
    let both = Both::new(&redis, 1, Duration::from_millis(1999), ours);
    assert_eq!(both.ask(START), Retry::Now);
    assert_eq!(both.ask(START + SECOND + MILLISECOND), Retry::Now);
}
