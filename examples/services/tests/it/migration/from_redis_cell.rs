//! redis-cell is a module of Redis that isn't where the tests run, so its algorithm stands here, by its published
//! source.

use std::time::Duration;

use tollgate::{Decision, Limit, RetryAfter};
use tollgate_testing::engines::{Micros, answer};
use tollgate_testing::oracle::Retry;
use tollgate_testing::repository::read;

use super::{MILLISECOND, SECOND, START, Tollgate, Trace, limit, limit_for};

/// `CL.THROTTLE key max_burst count period quantity` on one key, of 0.4.0: `Rate::per_period`, `RateLimiter::new` and
/// `rate_limit` of its `src/cell/mod.rs` (the arithmetic), `run` of `src/lib.rs` (the reply) and `set_expire` of
/// `src/redis/mod.rs` (the expiry). Times are in nanoseconds.
struct Cell {
    interval: i64,
    limit: i64,
    /// The theoretical arrival time, if a Redis still has it.
    arrival: Option<i64>,
    /// The last millisecond in which Redis has it.
    last: i64,
    whole_milliseconds: bool,
}

impl Cell {
    fn new([max_burst, count, period]: [i64; 3]) -> Self {
        let interval = (period * 1_000_000_000) as f64 / count as f64;
        Self { interval: interval as i64, limit: max_burst + 1, arrival: None, last: 0, whole_milliseconds: true }
    }

    /// On a store that has a time until it is past, to the nanosecond.
    fn exactly_kept(self) -> Self {
        Self { whole_milliseconds: false, ..self }
    }

    fn throttle(&mut self, quantity: i64, now: Micros) -> [i64; 5] {
        let now = i64::try_from(now).expect("a time") * 1000;
        let kept = |arrival: &i64| if self.whole_milliseconds { now / 1_000_000 <= self.last } else { *arrival > now };
        self.arrival = self.arrival.filter(kept);
        let tolerance = self.interval * self.limit;
        let increment = self.interval * quantity;
        let arrival = self.arrival.unwrap_or(now);
        let next = arrival.max(now) + increment;
        let wait = next - tolerance - now;
        let lead = if wait > 0 { arrival - now } else { next - now };
        if wait <= 0 {
            self.arrival = Some(next);
            // What is left of a key is set in milliseconds, and Redis's clock for it has no more.
            self.last = now / 1_000_000 + lead / 1_000_000;
        }
        let spare = tolerance - lead;
        // It divides microseconds.
        let remaining =
            if spare > -self.interval { (spare / 1000) as f64 / (self.interval / 1000) as f64 } else { 0.0 };
        let helps = wait > 0 && increment <= tolerance;
        let retry_after = if helps { without_microseconds(wait) } else { -1 };
        [i64::from(wait > 0), self.limit, remaining as i64, retry_after, without_microseconds(lead)]
    }
}

/// Its seconds: rounded up if there are whole milliseconds, and down if there is less.
fn without_microseconds(nanoseconds: i64) -> i64 {
    nanoseconds / 1_000_000_000 + i64::from(nanoseconds / 1_000_000 % 1000 > 0)
}

/// A quantity of 0 looks.
fn ask(tollgate: &Tollgate, quantity: u64, now: Micros) -> Decision {
    if quantity == 0 { tollgate.peek(0, now) } else { tollgate.decide(quantity, now) }
}

/// The page's function.
mod page {
    include!("as_redis_cell.rs");

    pub(super) fn reply(decision: &Decision) -> [i64; 5] {
        as_redis_cell(decision)
    }
}

#[test]
fn the_function_that_is_tested_here_is_the_page_s() {
    assert!(read("MIGRATION.md").contains(include_str!("as_redis_cell.rs")));
}

/// `CL.THROTTLE`'s three numbers, and the limit like them.
fn pairs() -> Vec<([i64; 3], Limit)> {
    vec![
        ([15, 30, 60], limit_for("CL.THROTTLE user123 15 30 60 1")),
        ([0, 1, 1], limit("gcra 1/1s")),
        ([4, 8, 1], limit("gcra 8/1s burst 5")),
        ([99, 100, 60], limit("gcra 100/1m")),
        ([2, 1, 3600], limit("gcra 1/1h burst 3")),
        ([499, 500, 1], limit("gcra 500/1s")),
    ]
}

fn trace(unit: Micros, cell: &Cell) -> Trace {
    let interval = u64::try_from(cell.interval / 1000).expect("an interval");
    let capacity = u64::try_from(cell.limit).expect("a limit");
    Trace { calls: 1000, unit, interval, capacity, costs: Some(0..=capacity + 2) }
}

#[test]
fn numbers_of_redis_cell_give_the_five_of_their_rule_at_whole_milliseconds() {
    for (numbers, limit) in pairs() {
        let (mut cell, tollgate) = (Cell::new(numbers), Tollgate::new(limit));
        trace(MILLISECOND, &cell).play(|quantity, now| {
            let decision = ask(&tollgate, quantity, now);
            let theirs = cell.throttle(quantity.try_into().expect("few"), now);
            assert_eq!(page::reply(&decision), theirs, "{quantity} at {now} by {numbers:?}");
            answer(&decision).retry
        });
    }
}

/// What the store forgets early has a test of its own.
#[test]
fn at_other_moments_only_seconds_that_are_just_begun_differ() {
    let seconds = |time: Duration| without_microseconds(time.as_nanos().try_into().expect("a time"));
    for (numbers, limit) in pairs() {
        let (mut cell, tollgate, mut just_begun) = (Cell::new(numbers).exactly_kept(), Tollgate::new(limit), 0);
        trace(1, &cell).play(|quantity, now| {
            let decision = ask(&tollgate, quantity, now);
            let theirs = cell.throttle(quantity.try_into().expect("few"), now);
            let [limited, capacity, remaining, retry_after, reset_after] = page::reply(&decision);
            assert_eq!(theirs[..3], [limited, capacity, remaining], "{quantity} at {now} by {numbers:?}");
            let wait = match decision.retry_after {
                RetryAfter::After(wait) => seconds(wait),
                RetryAfter::Now | RetryAfter::Never => -1,
            };
            assert_eq!(theirs[3..], [wait, seconds(decision.reset_after)], "{quantity} at {now} by {numbers:?}");
            for (ours, theirs) in [(retry_after, theirs[3]), (reset_after, theirs[4])] {
                assert!(ours == theirs || ours == theirs + 1);
                just_begun += u32::from(ours > theirs);
            }
            answer(&decision).retry
        });
        assert!(just_begun > 0 || numbers[2] == 3600, "{numbers:?}");
    }
}

/// A wait of less than a millisecond is 0 there.
#[test]
fn redis_cell_drops_what_is_less_than_a_millisecond() {
    let (mut cell, tollgate) = (Cell::new([0, 1, 1]), Tollgate::new(limit("gcra 1/1s")));
    let mut both = |now| (cell.throttle(1, START + now), page::reply(&ask(&tollgate, 1, START + now)));
    assert_eq!(both(0), ([0, 1, 0, -1, 1], [0, 1, 0, -1, 1]));
    assert_eq!(both(SECOND - 999), ([1, 1, 0, 0, 0], [1, 1, 0, 1, 1]));
    assert_eq!(both(SECOND), ([0, 1, 0, -1, 1], [0, 1, 0, -1, 1]));
}

#[test]
fn redis_cell_forgets_a_key_up_to_a_millisecond_early() {
    let (mut cell, tollgate) = (Cell::new([1, 1, 1]), Tollgate::new(limit("gcra 1/1s burst 2")));
    for now in [400, 900] {
        assert_eq!(cell.throttle(1, START + now)[0], 0);
        assert!(tollgate.acquire(1, START + now).allowed);
    }
    // Both units are back 400 microseconds later.
    assert_eq!(tollgate.acquire(2, START + 2 * SECOND).retry, Retry::AfterUs(400));
    assert_eq!(cell.throttle(2, START + 2 * SECOND), [0, 2, 0, -1, 2]);
}

#[test]
fn redis_cell_miscounts_what_remains_where_an_interval_is_no_whole_microsecond() {
    let (mut cell, tollgate) = (Cell::new([999, 3000, 1]), Tollgate::new(limit("gcra 3000/1s burst 1000")));
    assert_eq!(cell.throttle(0, START), [0, 1000, 1001, -1, 0]);
    assert_eq!(page::reply(&ask(&tollgate, 0, START)), [0, 1000, 1000, -1, 0]);
}

/// A peek of one unit says whether that would be allowed.
#[test]
fn a_quantity_of_nothing_is_always_allowed_and_so_is_a_peek_of_nothing() {
    let (mut cell, tollgate) = (Cell::new([0, 1, 1]), Tollgate::new(limit("gcra 1/1s")));
    assert!(tollgate.acquire(1, START).allowed);
    cell.throttle(1, START);
    assert_eq!(cell.throttle(0, START), [0, 1, 0, -1, 1]);
    assert_eq!(page::reply(&ask(&tollgate, 0, START)), [0, 1, 0, -1, 1]);
    let one = answer(&tollgate.peek(1, START));
    assert_eq!((one.allowed, one.remaining, one.retry), (false, 0, Retry::AfterUs(SECOND)));
}
