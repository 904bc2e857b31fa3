//! What is under test: a rule on one key of one engine, called at virtual times.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use proptest::strategy::Strategy;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use tokio::runtime::Runtime;
use tollgate::{
    Cluster, Decision, Embedded, Error, KeyState, Limit, Limiter, OnChange, Operation, Redis, Request, RetryAfter, Rule,
};

use crate::cluster::{cluster_of_one, cluster_url};
use crate::effort::{cases, on_redis_alone};
use crate::oracle::{Answer, Retry};
use crate::redis_server::Server;
use crate::rules::by_own_id;

/// An engine, and what it needs to live.
pub struct Engine {
    pub limiter: Limiter,
    pub runtime: Runtime,
    pub server: Option<Server>,
    keys: std::cell::Cell<u64>,
}

/// One rule on one key.
pub struct Subject<'a> {
    engine: &'a Engine,
    pub rule: Rule,
    pub key: String,
    change: OnChange,
    counting: bool,
    block_for: Option<Micros>,
}

/// A moment, in microseconds since the epoch.
pub type Micros = u64;

impl Engine {
    pub fn embedded() -> Self {
        Self::of(Limiter::new(Embedded::new()), None)
    }

    pub fn redis() -> Self {
        let server = Server::start();
        let limiter = Limiter::new(Redis::open(&server.url()).expect("a good address"));
        Self::of(limiter.to_builder().deadline(Duration::from_secs(10)).build(), Some(server))
    }

    /// A cluster of one node, where limits with shards are decided by these.
    pub fn cluster() -> Self {
        let server = cluster_of_one();
        let limiter = Limiter::new(Cluster::open(&cluster_url(&server)).expect("a good address"));
        Self::of(limiter.to_builder().deadline(Duration::from_secs(10)).build(), Some(server))
    }

    fn of(limiter: Limiter, server: Option<Server>) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        Self { limiter, runtime, server, keys: std::cell::Cell::new(0) }
    }

    /// A fresh key.
    pub fn fresh_key(&self) -> String {
        self.keys.set(self.keys.get() + 1);
        format!("k{}", self.keys.get())
    }

    /// A rule on a fresh key.
    pub fn subject(&self, limit: Limit) -> Subject<'_> {
        let key = self.fresh_key();
        Subject { engine: self, rule: rule(limit), key, change: OnChange::KeepUsed, counting: false, block_for: None }
    }

    pub fn call<T, E: std::fmt::Debug>(&self, call: impl Future<Output = Result<T, E>>) -> T {
        self.runtime.block_on(call).expect("an answer")
    }

    pub fn states(&self, rule: &Rule, key: &str, now: Micros) -> Vec<KeyState> {
        self.call(self.limiter.inspect(rule, Request::new(key).at(time(now))))
    }

    /// What is left of all shards.
    pub fn left(&self, rule: &Rule, key: &str, now: Micros) -> u64 {
        self.states(rule, key, now).iter().map(|state| state.decision.remaining).sum()
    }
}

impl Subject<'_> {
    pub fn acquire(&self, cost: u64, now: Micros) -> Answer {
        answer(&self.try_acquire(cost, now).expect("a decision"))
    }

    pub fn peek(&self, cost: u64, now: Micros) -> Answer {
        let call = self.engine.limiter.peek(&self.rule, self.request(cost, now));
        answer(&self.engine.runtime.block_on(call).expect("a decision"))
    }

    pub fn reserve(&self, cost: u64, now: Micros) -> Answer {
        let call = self.engine.limiter.reserve(&self.rule, self.request(cost, now));
        answer(&self.engine.runtime.block_on(call).expect("a decision"))
    }

    pub fn at_most(&self, cost: u64, now: Micros) -> (Answer, u64) {
        let call = self.engine.limiter.at_most(&self.rule, self.taking(cost, now));
        let decision = self.engine.runtime.block_on(call).expect("a decision");
        (answer(&decision), decision.granted)
    }

    pub fn refund(&self, cost: u64, now: Micros) -> Answer {
        let call = self.engine.limiter.call(Operation::Refund, &self.rule, self.request(cost, now));
        answer(&self.engine.runtime.block_on(call).expect("a decision"))
    }

    pub fn penalty(&self, cost: u64, now: Micros) -> Answer {
        let call = self.engine.limiter.penalty(&self.rule, self.taking(cost, now));
        answer(&self.engine.runtime.block_on(call).expect("a decision"))
    }

    pub fn block(&self, length: Micros, now: Micros) -> Answer {
        let length = Duration::from_micros(length);
        let call = self.engine.limiter.call(Operation::Block, &self.rule, self.request(1, now).block_for(length));
        answer(&self.engine.runtime.block_on(call).expect("an answer"))
    }

    pub fn hold(&self, id: &str, cost: u64, now: Micros) -> Answer {
        let call = self.engine.limiter.acquire(&self.rule, self.request(cost, now).id(id));
        answer(&self.engine.runtime.block_on(call).expect("a decision"))
    }

    /// None if nothing is held by this id.
    pub fn renew(&self, id: &str, now: Micros) -> Option<Answer> {
        let call = self.engine.limiter.call(Operation::Renew, &self.rule, self.request(1, now).id(id));
        match self.engine.runtime.block_on(call) {
            Err(error) if error.is_unknown_id() => None,
            answered => Some(answer(&answered.expect("an answer"))),
        }
    }

    pub fn release(&self, id: &str, now: Micros) -> Answer {
        let call = self.engine.limiter.call(Operation::Release, &self.rule, self.request(1, now).id(id));
        answer(&self.engine.runtime.block_on(call).expect("an answer"))
    }

    pub fn give_back(&self, id: &str, cost: u64, now: Micros) -> Answer {
        let call = self.engine.limiter.call(Operation::Refund, &self.rule, self.request(cost, now).id(id));
        answer(&self.engine.runtime.block_on(call).expect("an answer"))
    }

    pub fn penalty_by(&self, id: &str, cost: u64, now: Micros) -> Answer {
        let call = self.engine.limiter.penalty(&self.rule, self.request(cost, now).id(id));
        answer(&self.engine.runtime.block_on(call).expect("an answer"))
    }

    pub fn reset(&self) -> Answer {
        let call = self.engine.limiter.call(Operation::Reset, &self.rule, self.key.as_str());
        answer(&self.engine.runtime.block_on(call).expect("an answer"))
    }

    pub fn try_acquire(&self, cost: u64, now: Micros) -> Result<Decision, Error> {
        let call = self.engine.limiter.acquire(&self.rule, self.taking(cost, now));
        self.engine.runtime.block_on(call)
    }

    /// The state, without what differs from call to call: its TTL and the decision's own clock.
    pub fn state(&self, now: Micros) -> Vec<(&'static str, i64)> {
        let call = self.engine.limiter.inspect(&self.rule, self.request(1, now));
        self.engine.runtime.block_on(call).expect("a state").remove(0).fields
    }

    pub fn limit(&self) -> &Limit {
        self.rule.limits().next().expect("a limit")
    }

    /// The same key under other numbers.
    pub fn changed(&self, limit: Limit) -> Self {
        let fresh = Self { rule: rule(limit), key: self.key.clone(), ..*self };
        fresh.with(self.change, self.counting, self.block_for)
    }

    /// The same under a rule that treats changes so, counts denials or not, and blocks for them or not.
    pub fn with(mut self, change: OnChange, counting: bool, block_for: Option<Micros>) -> Self {
        (self.change, self.counting, self.block_for) = (change, counting, block_for);
        self.rule = self.rule.on_change(change).count_overage(counting);
        if let Some(time) = block_for {
            self.rule = self.rule.block_for(Duration::from_micros(time)).expect("no shards, and a good time");
        }
        self
    }

    fn taking(&self, cost: u64, now: Micros) -> Request<'_> {
        by_own_id(&self.rule, self.request(cost, now))
    }

    fn request(&self, cost: u64, now: Micros) -> Request<'_> {
        Request::new(self.key.as_str()).cost(cost).at(time(now))
    }
}

/// Named, so that a change of the period finds the same state.
fn rule(limit: Limit) -> Rule {
    limit.named("limit").and_then(|limit| Rule::new("test", limit)).expect("good names")
}

pub fn time(now: Micros) -> SystemTime {
    UNIX_EPOCH + Duration::from_micros(now)
}

pub fn answer(decision: &Decision) -> Answer {
    Answer {
        allowed: decision.allowed,
        limit: decision.capacity,
        remaining: decision.remaining,
        retry: match decision.retry_after {
            RetryAfter::Now => Retry::Now,
            RetryAfter::After(wait) => Retry::AfterUs(micros(wait)),
            RetryAfter::Never => Retry::Never,
        },
        reset_after_us: micros(decision.reset_after),
        blocked: decision.blocked,
        overage: decision.overage.unwrap_or(0),
    }
}

pub fn micros(duration: Duration) -> Micros {
    duration.as_micros().try_into().expect("within range")
}

/// Checks a property on many cases in the process, and on some with a real server.
pub fn on_both_engines<S: Strategy>(of: S, property: impl Fn(&Engine, S::Value) -> Result<(), TestCaseError>)
where
    S::Value: Clone,
{
    let embedded = (!on_redis_alone()).then(|| (Engine::embedded(), cases(50)));
    for (engine, count) in embedded.into_iter().chain([(Engine::redis(), cases(40))]) {
        on(&engine, count, &of, &property);
    }
}

/// Checks a property on some cases with a real cluster.
pub fn on_a_cluster<S: Strategy>(of: S, property: impl Fn(&Engine, S::Value) -> Result<(), TestCaseError>)
where
    S::Value: Clone,
{
    on(&Engine::cluster(), cases(40), &of, &property);
}

fn on<S: Strategy>(
    engine: &Engine,
    count: u32,
    of: &S,
    property: &impl Fn(&Engine, S::Value) -> Result<(), TestCaseError>,
) {
    let config = Config { cases: count, failure_persistence: None, max_global_rejects: 100_000, ..Config::default() };
    let outcome = TestRunner::new(config).run(of, |case| property(engine, case));
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
}
