//! Units of a hot limit, taken in batches and spent in the process.
//!
//! # Why it never exceeds the rule
//!
//! A leased unit is taken from the key's level before it is spent. That admits more than an exact limiter would only if
//! the level was full in between: an exact limiter would have lost what refilled meanwhile. So the level and all units
//! that are out must never add up to more than the capacity C.
//!
//! - No process has more than its share S = C / (2 * processes) out, so all of them have at most H = processes * S.
//! - Before units are taken, a peek asks for C - H. If it is allowed, the limit isn't hot, and Redis is asked directly.
//!   If it is denied until r has passed, the level stays below C - H until then, apart from units that are returned,
//!   which were out before. So the sum is below C, however many units are taken in that time.
//! - Units taken on the basis of that peek are spent and returned before r has passed since it was sent. A later peek
//!   covers all units that haven't expired when it is answered.
//!
//! One task at a time takes units or returns them. Units asked for or being returned count as out until Redis has
//! answered. A task that is stuck, since its runtime is blocked, loses its turn; what it gets later goes back.

mod stock;
mod turn;

use std::fmt;
use std::num::NonZeroU32;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::Instant;

use crate::algorithm::Algorithm;
use crate::background::Counted;
use crate::decision::Decision;
use crate::error::{Error, Kind};
use crate::limit::WindowStart;
use crate::limiter::counted::counted;
use crate::limiter::handle::Limiter;
use crate::lock::Lock;
use crate::operation::Operation;
use crate::request::{OwnedRequest, Request};
use crate::rule::Rule;
use crate::runtime::{self, LONGEST_WAIT};
use stock::{Stock, Unused};
use turn::{Turn, Turns};

/// A process's share of a hot limit, spent without asking Redis: see [`Limiter::lease`]. Clones share it. When the last
/// of them is dropped, wherever that is, a background task returns what it holds.
#[derive(Clone)]
pub struct Lease {
    shared: Arc<Shared>,
}

struct Shared {
    limiter: Limiter,
    rule: Rule,
    /// The rule for taking units, closed: it takes nothing that Redis didn't give.
    closed: Rule,
    request: OwnedRequest,
    /// Jitter of denials. Not applied to peeks, whose wait must be exact.
    jitter: u8,
    stock: Lock<Stock>,
    turns: Turns,
    /// The runtime to return the rest on, wherever the last clone is dropped.
    runtime: OnceLock<Handle>,
}

/// Hides the key.
impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("rule", &self.shared.rule.name()).finish_non_exhaustive()
    }
}

impl Limiter {
    /// A lease on this key for this process, one of at most this many held at the same time. Nothing is taken until it
    /// is used.
    ///
    /// The rule is never exceeded as long as no more than `processes` leases are alive at once: one per process. If
    /// processes are replaced one by one, count both the old and the new. A lease holds at most [a
    /// share](Lease::most_unused) of the capacity, all leases together at most half. It returns what it doesn't spend
    /// within a second of its last batch, or sooner if the limit refills sooner; if the limit refills within about 400
    /// ms, unspent units lapse instead. If the runtime that took a batch has ended, a thread of the library's own
    /// returns it, over a connection of its own; if that runtime is blocked, the units come back afterwards, or with
    /// the next batch. Callers on other runtimes don't wait for it, but ask Redis.
    ///
    /// Redis is asked directly while more than half the capacity is left, because the limit can't refill units that are
    /// held here. So a lease saves calls when a limit is nearly or entirely used up, such as a window in its second
    /// half or a bucket after a burst. Redis is also asked directly while fewer than about five calls a second arrive.
    ///
    /// Times come from this machine's monotonic clock. If it stops, as in a suspended machine, up to a share may be
    /// spent after the limit has refilled.
    ///
    /// A lease learns of other changes to the key only with its next batch: after a block, a penalty, a reset, a
    /// changed rule, or a refund made without a lease, up to half the capacity may still be spent that an exact limiter
    /// would not admit.
    ///
    /// # Errors
    ///
    /// Anything but a single limit that is a token bucket or fixed window, without shards, with a burst of at
    /// least twice the processes; a fixed window that follows the calendar or starts at the first hit. A rule that
    /// counts denials or blocks for them. A request with an id, a time or a cost.
    ///
    /// ```
    /// # #[cfg(feature = "embedded")]
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::num::NonZeroU32;
    /// use tollgate::{DecidedBy, Embedded, Limiter, Rule};
    ///
    /// let limiter = Limiter::new(Embedded::new());
    /// let rule = Rule::new("exports", "fixed-window 1000/30d")?;
    /// let four = NonZeroU32::new(4).expect("not zero");
    ///
    /// let lease = limiter.lease(&rule, "everybody", four)?;
    /// assert_eq!(lease.most_unused(), 125);
    /// let mut local = 0;
    /// for _ in 0..1000 {
    ///     let decision = lease.acquire(1).await?;
    ///     assert!(decision.allowed);
    ///     local += u32::from(decision.by == DecidedBy::Lease);
    /// }
    /// assert!(local > 400);
    /// assert!(!lease.acquire(1).await?.allowed);
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "embedded"))]
    /// # fn main() {}
    /// ```
    pub fn lease<'a>(
        &self,
        rule: &Rule,
        request: impl Into<Request<'a>>,
        processes: NonZeroU32,
    ) -> Result<Lease, Error> {
        let request = request.into();
        let bad = |expected: &str| Error::new(Kind::Input, format!("lease: expected {expected}, got {rule}"));
        let [scoped] = rule.scoped_limits() else { return Err(bad("a rule of one limit")) };
        let limit = &scoped.limit;
        match limit.algorithm() {
            Algorithm::TokenBucket | Algorithm::FixedWindow => {}
            Algorithm::CalendarWindow => return Err(bad("a fixed window of a period, not of the calendar")),
            Algorithm::SlidingWindow | Algorithm::SlidingLog | Algorithm::Concurrency => {
                return Err(bad("a token bucket or fixed window"));
            }
        }
        if limit.start() == WindowStart::FirstHit {
            return Err(bad("a fixed window that doesn't start at the first hit (a batch would be that hit)"));
        }
        if limit.shards() > 1 {
            return Err(bad("a limit without shards, since the units left in one shard say nothing about the others"));
        }
        if rule.counts_overage() {
            return Err(bad("a rule without count_overage, since the denials of batches would be counted"));
        }
        if rule.blocks_for().is_some() {
            return Err(bad("a rule without block_for, since a batch that is denied would block everybody"));
        }
        if request.has_id() || request.time().is_some() || request.has_cost() {
            let why = "expected a request without an id, a time or a cost (Lease::acquire takes the cost)";
            return Err(Error::new(Kind::Input, format!("lease: {why}")));
        }
        let (capacity, processes) = (limit.capacity(), u64::from(processes.get()));
        let share = capacity / 2 / processes;
        if share == 0 {
            return Err(bad(&format!(
                "a burst of at least {}, two for each of the {processes} processes",
                2 * processes
            )));
        }
        let stock = Lock::new(Stock::new(share, capacity - processes * share, Instant::now()));
        let (limiter, rule, closed) = (self.clone(), rule.clone(), rule.clone().closed());
        let (jitter, request) = (request.wait_jitter(), request.jitter(0).into_owned());
        let (turns, runtime) = (Turns::new(self.deadline), OnceLock::new());
        let shared = Shared { limiter, rule, closed, request, jitter, stock, turns, runtime };
        Ok(Lease { shared: Arc::new(shared) })
    }
}

impl Lease {
    /// Takes the cost from what is held here; if that isn't enough, from a new batch, and otherwise from Redis itself.
    /// [`Decision::by`] says which. In a decision made here, `remaining` is what is left here, and `reset_after` counts
    /// from Redis's answer to the last batch.
    ///
    /// A cost above [the share](Self::most_unused) goes to Redis directly. Dropping the future loses no units but its
    /// own.
    ///
    /// # Errors
    ///
    /// The same as [`Limiter::acquire`].
    pub async fn acquire(&self, cost: u64) -> Result<Decision, Error> {
        // A caller that keeps taking what is held here must let other tasks have their turn.
        tokio::task::consume_budget().await;
        let shared = &self.shared;
        let begun = Instant::now();
        if let Some(decision) = shared.spend(cost, begun) {
            return Ok(decision);
        }
        let deadline = shared.request().deadline_or(shared.limiter.deadline).min(LONGEST_WAIT);
        runtime::with_timers()?;
        let seen = shared.worth_a_refill(cost, begun);
        if let Some(seen) = seen {
            // However the refill ends, half the deadline is left to ask directly.
            runtime::timeout_at(begun + deadline / 2, shared.refilled(cost, seen, deadline / 2)).await;
            if let Some(decision) = shared.spend(cost, Instant::now()) {
                return Ok(decision);
            }
        }
        shared.ask(cost, deadline.saturating_sub(begun.elapsed())).await
    }

    /// The most units that can be held here unused: this lease's share of the capacity.
    #[must_use]
    pub fn most_unused(&self) -> u64 {
        self.shared.stock.lock().share
    }

    /// Units held here unused.
    #[must_use]
    pub fn unused(&self) -> u64 {
        self.shared.stock.lock().units()
    }

    /// Returns the unused units held here, and says how many they were. Units that the limit has refilled by now, or
    /// nearly, aren't returned: that would give them twice.
    ///
    /// # Errors
    ///
    /// No answer; see [`Error`]. The units may be lost until the limit refills. If Redis runs the call after all, but
    /// only once the limit has refilled them, they are given twice: at most a share.
    pub async fn give_back(&self) -> Result<u64, Error> {
        let runtime = runtime::current()?;
        // A separate task waits for its turn, and keeps it until the answer, even if the caller gives up.
        let returned = runtime.spawn(self.shared.at_work().give_back());
        let deadline = self.shared.request().deadline_or(self.shared.limiter.deadline).min(LONGEST_WAIT);
        match runtime::timeout_at(Instant::now() + deadline, returned).await {
            // If the runtime ends, no answer arrives.
            Some(returned) => returned.unwrap_or(Ok(0)),
            None => Err(Error::deadline(deadline, true)),
        }
    }
}

impl Shared {
    fn request(&self) -> Request<'_> {
        Request::from(&self.request)
    }

    /// The decision, if it can be made here.
    fn spend(self: &Arc<Self>, cost: u64, now: Instant) -> Option<Decision> {
        let mut stock = self.stock.lock();
        if !stock.spend(cost, now) {
            return None;
        }
        let (left, reset_after, low) = (stock.units(), stock.reset_after(now), stock.runs_low(now));
        drop(stock);
        if low
            && let Ok(runtime) = runtime::current()
            && let Some(turn) = self.turns.try_take()
        {
            runtime.spawn(self.at_work().refill(1, turn));
        }
        let decision =
            Decision::leased(&self.rule.scoped_limits()[0].quota, left, cost, reset_after, self.limiter.now());
        counted(&self.rule, Ok(&decision));
        Some(decision)
    }

    /// How many refills have ended so far, if another one may help.
    fn worth_a_refill(&self, cost: u64, now: Instant) -> Option<u64> {
        let stock = self.stock.lock();
        ((1..=stock.share).contains(&cost) && stock.may_refill(now)).then_some(stock.refills)
    }

    /// Refills, or waits for a refill in progress. One refill serves all waiters; those it leaves nothing for go to
    /// Redis directly, together. One that has been running for this long, or on another runtime, isn't waited for: that
    /// runtime may be blocked.
    async fn refilled(self: &Arc<Self>, cost: u64, seen: u64, patience: Duration) {
        let turn = match self.turns.try_take() {
            Some(turn) => turn,
            None => match self.turns.worth_waiting_until(patience) {
                Some(until) => match runtime::timeout_at(until, self.turns.take()).await {
                    Some(turn) => turn,
                    None => return,
                },
                None => return,
            },
        };
        if self.stock.lock().refills == seen {
            // A separate task, so that what it takes isn't lost if the caller gives up.
            let _ = tokio::spawn(self.at_work().refill(cost, turn)).await;
        }
    }

    fn at_work(self: &Arc<Self>) -> AtWork {
        AtWork { shared: Arc::clone(self), _counted: self.limiter.background.count() }
    }

    async fn take(&self, cost: u64, turn: &Turn) -> Result<(), Error> {
        let expired = self.stock.lock().has_expired(Instant::now());
        if expired {
            self.return_unused().await?;
        }
        let must_look = self.stock.lock().must_look(Instant::now());
        if must_look {
            let (hot_below, sent) = (self.stock.lock().hot_below, Instant::now());
            let peek = self.limiter.peek(&self.closed, self.request().cost_of_all(hot_below)).await?;
            if !self.turns.has(turn) || !self.stock.lock().looked(&peek, sent, Instant::now()) {
                return Ok(());
            }
        }
        let batch = self.stock.lock().next_batch(cost, Instant::now());
        if batch == 0 {
            return Ok(());
        }
        let (_out, sound_until) = (self.out(batch), self.stock.lock().sound_until());
        let answer =
            self.limiter.decide(&self.closed, self.request().cost_of_all(batch), Operation::AtMost).uncounted().await?;
        if self.turns.has(turn) {
            self.stock.lock().put(&answer, Instant::now());
        } else {
            // Meanwhile another task may have taken as much as may be held.
            let unused = Unused { units: answer.granted, until: sound_until };
            give(&self.limiter, &self.closed, &self.request, unused).await?;
        }
        Ok(())
    }

    /// While this lives, this many units count as out although they aren't held here.
    fn out(&self, units: u64) -> Out<'_> {
        self.stock.lock().on_the_way += units;
        Out { shared: self, units }
    }

    async fn ask(&self, cost: u64, deadline: Duration) -> Result<Decision, Error> {
        let request = self.request().cost_of_all(cost).deadline(deadline).jitter(self.jitter);
        let decision = self.limiter.acquire(&self.rule, request).await?;
        if decision.by.error().is_none() {
            self.stock.lock().answered(&decision, Instant::now());
        }
        Ok(decision)
    }

    /// Returns expiring units, in a background task that runs while there are any.
    fn keep(self: &Arc<Self>) {
        let (lease, background) = (Arc::downgrade(self), self.limiter.background.clone());
        runtime::spawn_lasting(&Handle::current(), move || {
            let (lease, background) = (Weak::clone(&lease), background.clone());
            async move {
                loop {
                    // Counted before the lease is held: if the last clone is dropped meanwhile, `finish` still waits
                    // for this task.
                    let counted = background.count();
                    let Some(shared) = lease.upgrade() else { return };
                    let at_work = AtWork { shared, _counted: counted };
                    let shared = &at_work.shared;
                    let Some(until) = shared.held_until() else { return };
                    if Instant::now() < until {
                        drop(at_work);
                        if runtime::sleep_until(until).await.is_err() {
                            return;
                        }
                        continue;
                    }
                    let _turn = shared.turns.take().await;
                    let expired = shared.stock.lock().has_expired(Instant::now());
                    if expired {
                        // Nobody reads this answer.
                        let _ = shared.return_unused().await;
                    }
                }
            }
        });
    }

    /// Until when units are held here. If there are none, marks that no task looks after them.
    fn held_until(&self) -> Option<Instant> {
        let mut stock = self.stock.lock();
        let until = stock.held_until();
        stock.kept = until.is_some();
        until
    }

    /// One at a time, since units on their way back still count as out.
    async fn return_unused(&self) -> Result<u64, Error> {
        let unused = self.stock.lock().unused(Instant::now());
        match unused {
            Some(unused) => {
                let _out = self.out(unused.units);
                give(&self.limiter, &self.closed, &self.request, unused).await
            }
            None => Ok(0),
        }
    }
}

/// Gives units back, unless that might arrive too late.
async fn give(limiter: &Limiter, rule: &Rule, request: &OwnedRequest, unused: Unused) -> Result<u64, Error> {
    let (Some(within), units @ 1..) = (unused.within(Instant::now()), unused.units) else { return Ok(0) };
    let request = Request::from(request).cost_of_all(units).deadline(within.min(limiter.deadline));
    limiter.refund(rule, request).await.map(|_| units)
}

/// A lease in use by a task that [`Limiter::finish`] waits for: it may hold the last clone, and return what is unused.
struct AtWork {
    shared: Arc<Shared>,
    /// Dropped after the lease.
    _counted: Counted,
}

impl AtWork {
    async fn give_back(self) -> Result<u64, Error> {
        let _turn = self.shared.turns.take().await;
        self.shared.return_unused().await
    }

    async fn refill(self, cost: u64, turn: Turn) {
        let shared = &self.shared;
        shared.runtime.get_or_init(Handle::current);
        let taken = shared.take(cost, &turn).await;
        let mut stock = shared.stock.lock();
        stock.refills += 1;
        if taken.is_err() {
            stock.failed();
        }
        let unkept = stock.units() > 0 && (!stock.kept || turn.replaces_a_stuck_one());
        stock.kept |= unkept;
        drop(stock);
        if unkept {
            shared.keep();
        }
    }
}

struct Out<'a> {
    shared: &'a Shared,
    units: u64,
}

impl Drop for Out<'_> {
    fn drop(&mut self) {
        self.shared.stock.lock().on_the_way -= self.units;
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let unused = self.stock.lock().unused(Instant::now());
        if let (Some(unused), Some(runtime)) = (unused, self.runtime.get()) {
            let (limiter, rule, request) = (self.limiter.clone(), self.closed.clone(), self.request.clone());
            // Nobody reads this answer. Sent once only: a second return would give the units twice.
            let unused = Lock::new(Some(unused));
            self.limiter.spawn(runtime, move |_| {
                let (limiter, rule, request) = (limiter.clone(), rule.clone(), request.clone());
                let unused = unused.lock().take();
                async move {
                    if let Some(unused) = unused {
                        let _ = give(&limiter, &rule, &request, unused).await;
                    }
                    true
                }
            });
        }
    }
}
