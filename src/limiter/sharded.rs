//! Which shards of a limit a call applies to.
//!
//! A call takes from one shard, as if that were the limit. If one call can look at any two shards, two are drawn at
//! random and the better one is used; otherwise one is drawn. What must be found again is placed in a shard by its id.

use futures_util::future::join_all;

use super::Limiter;
use super::prepare::concerned;
use crate::algorithm::TWO_CHOICES;
use crate::call::Mode;
use crate::decision::Decision;
use crate::error::Error;
use crate::key;
use crate::operation::Operation;
use crate::random::random;
use crate::request::Request;
use crate::rule::{Rule, ScopedLimit, Target};

/// The shards that a call applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ShardChoice {
    One(u32),
    /// The better of two.
    OneOf(u32, u32),
    All,
}

impl Limiter {
    /// Where such a call is decided.
    pub(super) fn choose_shard(
        &self,
        rule: &Rule,
        scoped: &ScopedLimit,
        request: &Request<'_>,
        operation: Operation,
    ) -> ShardChoice {
        let cost = request.units(rule);
        let never = match operation {
            Operation::Acquire | Operation::Peek => cost > scoped.limit.largest_cost(false),
            Operation::Reserve => cost > scoped.limit.largest_cost(true),
            _ => false,
        };
        let shards = scoped.limit.shards();
        match (operation, request.id) {
            (Operation::Reset | Operation::Block, _) => ShardChoice::All,
            // A larger shard might admit it: the answer must not depend on chance.
            _ if never => ShardChoice::One(shards - 1),
            (_, Some(id)) => ShardChoice::One(key::shard_of(id, shards)),
            _ if self.engine.has_one_node() => two_of(shards),
            _ => ShardChoice::One(one_of(shards)),
        }
    }

    /// The one limit, or the one shard of it, that decides this acquire. None if there are several, or if the acquire has
    /// an id or its rule [options](Rule::options), which an [ask](Self::ask) can't express.
    pub(super) fn target_of_ask<'r>(&self, rule: &'r Rule, request: &Request<'_>) -> Option<Target<'r>> {
        let [scoped] = rule.scoped_limits() else { return None };
        if request.has_id() || !rule.options().is_empty() {
            return None;
        }
        if scoped.limit.shards() == 1 {
            return Some(scoped.whole());
        }
        match self.choose_shard(rule, scoped, request, Operation::Acquire) {
            ShardChoice::One(number) => Some(scoped.shard(number)),
            ShardChoice::OneOf(..) | ShardChoice::All => None,
        }
    }

    /// Decides by the limit's shards.
    pub(super) async fn decide_by_shards(
        &self,
        rule: &Rule,
        scoped: &ScopedLimit,
        request: &Request<'_>,
        operation: Operation,
        choice: ShardChoice,
    ) -> Result<Decision, Error> {
        // Calls that don't apply, such as a renewal of what isn't held, are rejected as usual.
        concerned(rule, operation, request)?;
        match choice {
            ShardChoice::One(number) => self.decide_by_limits(rule, &[scoped.shard(number)], request, operation).await,
            ShardChoice::OneOf(one, other) => {
                let targets = [scoped.shard(one), scoped.shard(other)];
                let inputs = self.limit_inputs(rule, &targets, request, operation)?;
                let reply = self.run(rule, &TWO_CHOICES, &inputs, None, request, Mode::Call(operation)).await?;
                self.decision(rule, &targets[..1], request, operation, &reply)
            }
            ShardChoice::All => {
                let targets: Vec<_> = scoped.targets().collect();
                let each = targets.chunks(1).map(|target| self.decide_by_limits(rule, target, request, operation));
                let answers = join_all(each).await;
                let some_done = answers.iter().any(Result::is_ok);
                let failed = |error: Error| if some_done { error.half_way() } else { error };
                let answers = answers.into_iter().collect::<Result<Vec<_>, _>>().map_err(failed)?;
                let most_used = answers.into_iter().min_by_key(|answer| (answer.remaining, answer.limit));
                most_used.ok_or_else(super::decide::garbled)
            }
        }
    }
}

fn one_of(shards: u32) -> u32 {
    below(random() >> 32, shards)
}

fn two_of(shards: u32) -> ShardChoice {
    let drawn = random();
    let (one, step) = (below(drawn >> 32, shards), 1 + below(drawn & u64::from(u32::MAX), shards - 1));
    ShardChoice::OneOf(one, (one + step) % shards)
}

/// A 32-bit number, reduced to below the bound.
fn below(drawn: u64, bound: u32) -> u32 {
    u32::try_from((drawn * u64::from(bound)) >> 32).unwrap_or(0)
}

#[cfg(all(test, feature = "embedded"))]
mod tests {
    use std::collections::BTreeMap;
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;
    use crate::engine::embedded::{Clock, Embedded};

    /// The calls' times, in microseconds, and costs.
    type Traffic = fn(f64, u64) -> Vec<(u64, u64)>;

    /// Units offered per second, as a fraction of the 1000 that the limit admits.
    const LOADS: [f64; 5] = [0.5, 0.9, 1.0, 1.1, 2.0];
    const RATE: f64 = 1000.0;

    fn limiter() -> Limiter {
        Limiter::new(Embedded::with_clock(Clock::set_to(UNIX_EPOCH)))
    }

    fn rule(text: &str) -> Rule {
        text.parse::<Rule>().unwrap().named("test").unwrap()
    }

    /// From 0 to 1, the same each time for the same number.
    fn drawn(number: u64) -> f64 {
        let hash = sha1_smol::Sha1::from(number.to_le_bytes()).digest().bytes();
        f64::from(u32::from_le_bytes([hash[0], hash[1], hash[2], hash[3]])) / f64::from(u32::MAX)
    }

    /// Calls of cost 1 at random times.
    fn even(load: f64, calls: u64) -> Vec<(u64, u64)> {
        let mut now = 0.0;
        let next = |number| {
            now -= (1.0 - drawn(number)).max(1e-9).ln() * 1e6 / (RATE * load);
            (now as u64, 1)
        };
        (0..calls).map(next).collect()
    }

    /// Calls of cost 1 to 10 that come 20 at a time.
    fn uneven(load: f64, calls: u64) -> Vec<(u64, u64)> {
        let mut now = 0.0;
        let next = |number: u64| {
            if number.is_multiple_of(20) {
                now -= (1.0 - drawn(number)).max(1e-9).ln() * 20.0 * 5.5 * 1e6 / (RATE * load);
            }
            (now as u64, 1 + (drawn(number + (1 << 32)) * 9.999) as u64)
        };
        (0..calls).map(next).collect()
    }

    /// What sharding costs, in hundredths.
    #[derive(Clone, Copy, Debug, Default)]
    struct Price {
        /// Extra units that one unsharded limiter would have admitted, as a share of those it admits.
        units: f64,
        /// Calls denied that one unsharded limiter, having admitted the same calls before, would have admitted.
        false_denials: f64,
    }

    async fn price(text: &str, shards: u32, choices: u32, traffic: &[(u64, u64)]) -> Price {
        let (limiter, after, alone) = (limiter(), limiter(), limiter());
        let (sharded, whole) = (rule(&format!("{text} shards {shards}")), rule(text));
        let scoped = sharded.sharded().unwrap();
        let (mut found, mut admitted, mut of_one) = (0, 0, 0);
        for &(now, cost) in traffic {
            let request = Request::new("key").cost(cost).at(UNIX_EPOCH + Duration::from_micros(now));
            let choice = if choices == 2 { two_of(shards) } else { ShardChoice::One(one_of(shards)) };
            let decision =
                limiter.decide_by_shards(&sharded, scoped, &request, Operation::Acquire, choice).await.unwrap();
            let would = if decision.allowed {
                after.acquire(&whole, request).await.unwrap()
            } else {
                after.peek(&whole, request).await.unwrap()
            };
            assert!(would.allowed || !decision.allowed, "{text}: above the limit");
            found += u32::from(would.allowed && !decision.allowed);
            admitted += decision.granted;
            of_one += alone.acquire(&whole, request).await.unwrap().granted;
        }
        let units = (of_one as f64 - admitted as f64) / of_one as f64 * 100.0;
        Price { units, false_denials: f64::from(found) / traffic.len() as f64 * 100.0 }
    }

    /// The tables of the guide, with more calls: `SHARDS_CALLS=20000 cargo test --release --features embedded --lib
    /// the_better_of_two -- --nocapture`.
    #[tokio::test]
    async fn the_better_of_two_denies_less_that_one_limiter_admits_than_one_by_chance() {
        let asked = std::env::var("SHARDS_CALLS").ok().map(|calls| calls.parse().unwrap());
        let calls = asked.unwrap_or(1500);
        // With fewer shards both may be close to zero, so only the tables have them.
        let numbers = if asked.is_some() { &[2, 8, 32][..] } else { &[32] };
        let of_traffic: [(&str, Traffic, u64); 2] = [("even", even, calls), ("uneven", uneven, calls / 4)];
        for text in ["gcra 1000/1s burst 400", "fixed-window 1000/1s"] {
            for (name, traffic, calls) in of_traffic {
                println!("{text}, {name}: units less, and false denials, in %, by the better of two (by one)");
                let mut sums: BTreeMap<_, f64> = BTreeMap::new();
                for load in LOADS {
                    let traffic = traffic(load, calls);
                    print!("| {load:.1} |");
                    for &shards in numbers {
                        let two = price(text, shards, 2, &traffic).await;
                        let one = price(text, shards, 1, &traffic).await;
                        print!(
                            " {:.1} ({:.1}) / {:.1} ({:.1}) |",
                            two.units, one.units, two.false_denials, one.false_denials
                        );
                        *sums.entry((shards, 2)).or_default() += two.units;
                        *sums.entry((shards, 1)).or_default() += one.units;
                    }
                    println!();
                }
                assert!(sums[&(32, 2)] * 1.2 < sums[&(32, 1)], "{text}, {name}: {sums:?}");
            }
        }
    }
}
