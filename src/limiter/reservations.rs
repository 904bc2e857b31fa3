//! Reservations that wait in this process, and the order of their turns. When a caller leaves before its turn, those
//! behind it may proceed sooner than their reservations said.
//!
//! A look at what is owed finds when nothing is any more. The last of those that had reserved before it was sent may
//! proceed then, and each of the others before it, by as long as the limit takes for what those behind it have
//! reserved. So they proceed one by one as the limit refills, in the order of their turns, and none earlier than if those that
//! left had never been there. What other processes' callers have reserved in between isn't known here: it would only
//! let one proceed still earlier.
//!
//! Of several limits, each has turns of its own, since one may refill a thousand times as fast as another. A caller
//! proceeds when the last of its turns has come.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use smallvec::{SmallVec, smallvec};
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio::time::Instant;

use crate::algorithm::Algorithm;
use crate::call::Costs;
use crate::decision::{LimitDecision, LimitDecisions};
use crate::limit::Limit;
use crate::lock::Lock;
use crate::rule::Rule;
use crate::runtime::LONGEST_WAIT;

#[derive(Debug, Default)]
pub(super) struct Reservations {
    queues: Lock<HashMap<Vec<u8>, Places>>,
}

/// A queue, and how many have a place in it: the last to leave removes it.
#[derive(Debug)]
struct Places {
    queue: Arc<Queue>,
    count: usize,
}

/// The callers that wait for the same limits.
#[derive(Debug)]
struct Queue {
    rule: Rule,
    waiting: Lock<Waiting>,
    /// Somebody has moved up.
    moved_up: Notify,
    looking: AtomicBool,
    /// Somebody has left since the last look was sent.
    again: AtomicBool,
}

#[derive(Debug, Default)]
struct Waiting {
    joined: u64,
    /// When the last look was sent.
    looked_at: Option<Instant>,
    members: HashMap<u64, Member>,
    /// Callers that have given up since the turns were last read; they are put in order only then, since many may leave
    /// at once.
    left: Vec<Left>,
}

/// By how much those behind a place move up, in each limit of the rule.
#[derive(Debug)]
struct Left {
    place: (Option<Instant>, u64),
    sooner: SmallVec<[Duration; 2]>,
}

#[derive(Debug)]
struct Member {
    reserved_at: Instant,
    units: Costs,
    /// In each limit of the rule.
    turns: Turns,
}

/// When each limit of a rule has what was reserved.
pub(super) type Turns = SmallVec<[Instant; 2]>;

/// A place among those that wait.
pub(super) struct Place {
    reservations: Arc<Reservations>,
    name: Vec<u8>,
    queue: Arc<Queue>,
    /// Its number among the members; none if it only looks.
    number: Option<u64>,
}

impl Reservations {
    /// The place of a caller that waits for these limits, or only looks.
    pub(super) fn find(self: &Arc<Self>, name: Vec<u8>, rule: &Rule) -> Place {
        let mut queues = self.queues.lock();
        let places =
            queues.entry(name.clone()).or_insert_with(|| Places { queue: Arc::new(Queue::of(rule)), count: 0 });
        places.count += 1;
        let queue = Arc::clone(&places.queue);
        drop(queues);
        Place { reservations: Arc::clone(self), name, queue, number: None }
    }

    pub(super) fn has(&self, name: &[u8]) -> bool {
        self.queues.lock().contains_key(name)
    }
}

impl Place {
    /// Waits from now on, for these units.
    pub(super) fn join(&mut self, reserved_at: Instant, units: Costs, turns: Turns) {
        let mut waiting = self.queue.waiting.lock();
        waiting.move_up(&self.queue.rule);
        waiting.joined += 1;
        let number = waiting.joined;
        waiting.members.insert(number, Member { reserved_at, units, turns });
        drop(waiting);
        self.number = Some(number);
    }

    pub(super) fn turn(&self) -> Option<Instant> {
        let mut waiting = self.queue.waiting.lock();
        waiting.move_up(&self.queue.rule);
        waiting.members.get(&self.number?).map(Member::turn)
    }

    /// Until somebody has moved up.
    pub(super) fn moved_up(&self) -> Notified<'_> {
        self.queue.moved_up.notified()
    }

    /// Whether the last look was sent less than this long before `now`.
    pub(super) fn looked_within(&self, time: Duration, now: Instant) -> bool {
        self.queue.waiting.lock().looked_at.is_some_and(|last| last + time > now)
    }

    /// Asks, by `owed`, when nothing is owed any more, once for all that want to know meanwhile.
    pub(super) async fn look<F: Future<Output = Option<LimitDecisions>>>(&self, owed: impl Fn() -> F) {
        let queue = &*self.queue;
        queue.again.store(true, Ordering::SeqCst);
        while queue.again.load(Ordering::SeqCst) && !queue.looking.swap(true, Ordering::SeqCst) {
            let _looking = Looking(queue);
            queue.again.store(false, Ordering::SeqCst);
            let asked_at = Instant::now();
            if let Some(limits) = owed().await {
                queue.waiting.lock().pay(&queue.rule, asked_at, Instant::now(), &limits);
                queue.moved_up.notify_waiters();
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(number) = self.number
            && self.queue.waiting.lock().leave(number, &self.queue.rule)
        {
            self.queue.moved_up.notify_waiters();
        }
        let mut queues = self.reservations.queues.lock();
        if let Some(places) = queues.get_mut(&self.name) {
            places.count -= 1;
            if places.count == 0 {
                queues.remove(&self.name);
            }
        }
    }
}

impl Queue {
    fn of(rule: &Rule) -> Self {
        Self {
            rule: rule.clone(),
            waiting: Lock::default(),
            moved_up: Notify::new(),
            looking: AtomicBool::new(false),
            again: AtomicBool::new(false),
        }
    }
}

impl Member {
    fn turn(&self) -> Instant {
        self.turns.iter().copied().max().unwrap_or(self.reserved_at)
    }
}

impl Waiting {
    /// Takes this one out. If it has given up, those behind it move up, without waiting for Redis; says whether any
    /// may.
    fn leave(&mut self, number: u64, rule: &Rule) -> bool {
        let Some(member) = self.members.remove(&number) else { return false };
        let now = Instant::now();
        let units = member.units.each(member.turns.len());
        let sooner = rule.limits().zip(&member.turns).zip(units).map(|((limit, turn), units)| match *turn > now {
            true => refills(limit, units, 0),
            // Once its turn has come, its units are refilled, or a look finds the rest.
            false => Duration::ZERO,
        });
        let sooner: SmallVec<_> = sooner.collect();
        let moves = !self.members.is_empty() && sooner.iter().any(|sooner: &Duration| !sooner.is_zero());
        if moves {
            self.left.push(Left { place: order(rule, number, &member), sooner });
        }
        moves
    }

    /// Moves up those behind the places that were left.
    fn move_up(&mut self, rule: &Rule) {
        if self.left.is_empty() {
            return;
        }
        let mut left = std::mem::take(&mut self.left);
        left.sort_unstable_by_key(|left| left.place);
        let mut left = left.into_iter().peekable();
        let in_order = self.members.iter_mut().map(|(number, member)| (order(rule, *number, member), member));
        let mut in_order: Vec<_> = in_order.collect();
        in_order.sort_unstable_by_key(|(place, _)| *place);
        let mut before: SmallVec<[Duration; 2]> = SmallVec::new();
        for (place, member) in in_order {
            while let Some(left) = left.next_if(|left| left.place < place) {
                before.resize(left.sooner.len(), Duration::ZERO);
                before.iter_mut().zip(left.sooner).for_each(|(all, sooner)| *all = all.saturating_add(sooner));
            }
            for (turn, sooner) in member.turns.iter_mut().zip(&before) {
                *turn = turn.checked_sub(*sooner).unwrap_or(*turn);
            }
        }
    }

    /// Moves up those that had reserved when this was asked: what was owed then to each limit is paid after the wait
    /// that it answers, counted from this time, when this many units remain of a window.
    fn pay(&mut self, rule: &Rule, asked_at: Instant, answered_at: Instant, limits: &[LimitDecision]) {
        self.move_up(rule);
        self.looked_at = Some(asked_at);
        let mut paid: Vec<_> = self.members.iter_mut().filter(|(_, member)| member.reserved_at <= asked_at).collect();
        paid.sort_unstable_by_key(|(number, member)| order(rule, **number, member));
        let mut behind: SmallVec<[u64; 2]> = smallvec![0; limits.len()];
        for (_, member) in paid.into_iter().rev() {
            let units = member.units.each(limits.len());
            let each = rule.limits().zip(limits).zip(&mut member.turns).zip(behind.iter_mut().zip(units));
            for (((limit, now), turn), (behind, units)) in each {
                if let Some(wait) = now.retry_after.duration() {
                    let paid_at = answered_at + wait.min(LONGEST_WAIT);
                    let sooner = refills(limit, *behind, now.remaining);
                    *turn = (*turn).min(paid_at.checked_sub(sooner).unwrap_or(asked_at));
                }
                *behind = behind.saturating_add(units);
            }
        }
    }
}

/// The order in which members are served. In a fixed window many have the same turn, reported to each at a different
/// moment, so that only the order of arrival distinguishes them.
fn order(rule: &Rule, number: u64, member: &Member) -> (Option<Instant>, u64) {
    let of_buckets = rule.limits().zip(&member.turns).filter(|(limit, _)| limit.algorithm() != Algorithm::FixedWindow);
    (of_buckets.map(|(_, turn)| *turn).max(), number)
}

/// The least time in which this limit refilled this many owed units, if this many remain.
fn refills(limit: &Limit, units: u64, remaining: u64) -> Duration {
    let (period, units, rate) = (limit.period().as_nanos(), u128::from(units), u128::from(limit.rate()));
    let nanos = match limit.algorithm() {
        // All at once as each window began.
        Algorithm::FixedWindow => ((units + u128::from(remaining)) / rate).saturating_mul(period),
        Algorithm::TokenBucket => units.saturating_mul(period) / rate,
        // They owe nothing.
        Algorithm::CalendarWindow | Algorithm::SlidingWindow | Algorithm::SlidingLog | Algorithm::Concurrency => {
            return LONGEST_WAIT;
        }
    };
    u64::try_from(nanos).map_or(LONGEST_WAIT, Duration::from_nanos)
}

struct Looking<'a>(&'a Queue);

impl Drop for Looking<'_> {
    fn drop(&mut self) {
        self.0.looking.store(false, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Comparing each caller that leaves with all that stay would take minutes for so many.
    #[tokio::test(start_paused = true)]
    async fn of_a_hundred_thousand_that_leave_at_once_each_is_counted() {
        const MANY: u64 = 100_000;
        let rule: Rule = "gcra 1000/1s burst 0 max-debt 1000000".parse().unwrap();
        let (now, mut waiting) = (Instant::now(), Waiting::default());
        let turn_of = |number| now + Duration::from_millis(number);
        for number in 1..=MANY {
            let member =
                Member { reserved_at: now, units: Costs::all(1), turns: Turns::from_slice(&[turn_of(number)]) };
            waiting.members.insert(number, member);
        }
        // All but every thousandth, those behind before those in front.
        for number in (1..=MANY).rev().filter(|number| number % 1000 > 0) {
            assert!(waiting.leave(number, &rule));
        }
        waiting.move_up(&rule);
        assert_eq!(waiting.members.len(), 100);
        for (number, member) in &waiting.members {
            assert_eq!(member.turn(), turn_of(number / 1000), "{number}");
        }
        // One that proceeds moves nobody.
        assert!(waiting.members.keys().copied().min() == Some(1000));
        tokio::time::advance(Duration::from_millis(1)).await;
        assert!(!waiting.leave(1000, &rule) && waiting.left.is_empty());
    }
}
