//! MIGRATION.md: what it calls alike answers alike. Each rule is held against the other limiter on one trace of calls.
//! Each difference that the page names has a test of its own.

mod from_actix_limitation;
mod from_governor;
mod from_redis_cell;

use std::cell::Cell;
use std::time::Duration;

use fastrand::Rng;
use tokio::runtime::Runtime;
use tollgate::{Clock, Decision, Embedded, Limit, Limiter, Request, Rule};
use tollgate_testing::effort::cases;
use tollgate_testing::engines::{Micros, answer, time};
use tollgate_testing::oracle::{Answer, Retry};
use tollgate_testing::repository::read;

/// When traces begin: at no round hour, since windows may.
const START: Micros = 1_800_001_234_567_000;

const MILLISECOND: Micros = 1000;
const SECOND: Micros = 1_000_000;

/// What the page gives for this code of another limiter: the next code after it that is a limit.
fn limit_for(theirs: &str) -> Limit {
    let page = read("MIGRATION.md").split_whitespace().collect::<Vec<_>>().join(" ");
    let (_, rest) = page.split_once(&format!("`{theirs}`")).unwrap_or_else(|| panic!("MIGRATION.md: no {theirs}"));
    let mut codes = rest.split('`').skip(1).step_by(2);
    codes.find_map(|code| code.parse().ok()).unwrap_or_else(|| panic!("MIGRATION.md: no limit after {theirs}"))
}

fn limit(text: &str) -> Limit {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// A limit of tollgate on one key, by a clock of its own. Calls don't say when they are, as a service's don't.
struct Tollgate {
    limiter: Limiter,
    runtime: Runtime,
    clock: Clock,
    now: Cell<Micros>,
    rule: Rule,
}

impl Tollgate {
    fn new(limit: Limit) -> Self {
        let clock = Clock::new(time(START));
        let limiter = Limiter::new(Embedded::with_clock(clock.clone()));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let rule = Rule::new("test", limit).expect("a good name");
        Self { limiter, runtime, clock, now: Cell::new(START), rule }
    }

    fn decide(&self, cost: u64, now: Micros) -> Decision {
        let request = self.request(cost, now);
        self.runtime.block_on(self.limiter.acquire(&self.rule, request)).expect("a decision")
    }

    fn peek(&self, cost: u64, now: Micros) -> Decision {
        let request = self.request(cost, now);
        self.runtime.block_on(self.limiter.peek(&self.rule, request)).expect("a decision")
    }

    fn acquire(&self, cost: u64, now: Micros) -> Answer {
        answer(&self.decide(cost, now))
    }

    fn request(&self, cost: u64, now: Micros) -> Request<'static> {
        self.clock.advance(Duration::from_micros(now - self.now.replace(now)));
        Request::new("key").cost(cost)
    }
}

/// How calls of a trace come.
struct Trace {
    /// How many there are at least.
    calls: u32,
    /// Moments are multiples of it.
    unit: Micros,
    /// About how long the limit takes to have one more.
    interval: Micros,
    /// The limit's capacity.
    capacity: u64,
    /// Whether the other limiter has costs. Then some are 0, if it has those too, and some above the capacity.
    costs: Option<std::ops::RangeInclusive<u64>>,
}

impl Trace {
    /// Calls at random moments: several at one, in some intervals one, or after a rest. After a denial, often just
    /// before its wait is over, and when it is. `call` asks both limiters, with a cost and a time, and returns when
    /// they allow.
    fn play(self, mut call: impl FnMut(u64, Micros) -> Retry) {
        let (mut random, mut now) = (Rng::with_seed(7), START);
        let (mut allowed, mut denied, mut ended) = (0, 0, 0);
        let calls = cases(self.calls);
        for _ in 0..calls {
            let cost = match &self.costs {
                Some(costs) if random.u8(..4) > 0 => random.u64(*costs.start()..=(costs.end() / 4).max(1)),
                Some(costs) => random.u64(costs.clone()),
                None => 1,
            };
            let answer = call(cost, now);
            *if answer == Retry::Now { &mut allowed } else { &mut denied } += 1;
            if let Retry::AfterUs(wait) = answer
                && random.bool()
            {
                now = START + (now + wait - START).next_multiple_of(self.unit);
                assert_ne!(call(cost, now - self.unit), Retry::Now, "just before the wait is over");
                assert_eq!(call(cost, now), Retry::Now, "when the wait is over");
                ended += 1;
            }
            // Often enough for denials, whatever a call costs.
            let units = match random.u8(..50) {
                0..20 => 0,
                20..49 if self.costs.is_some() => random.u64(..=4),
                20..49 => random.u64(..=2),
                _ => random.u64(..=2 * self.capacity),
            };
            let most = (units * self.interval).div_ceil(self.unit);
            now += self.unit * random.u64(..=most);
        }
        let few = calls / 25;
        assert!(allowed.min(denied).min(ended) > few, "{allowed} allowed, {denied} denied, {ended} ended");
    }
}
