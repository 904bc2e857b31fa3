//! Waiting for the turn of a reservation. When a caller leaves before its turn, those behind it may proceed sooner. If
//! it left in this process, they move up at once. If it left in another, they find out by asking what is still owed, in
//! one call for all that wait for the same limits.

use std::pin::pin;
use std::time::Duration;

use futures_util::future::{Either, select};
use tokio::time::Instant;

use super::call::Call;
use super::handle::Limiter;
use super::reservations::{Place, Turns};
use super::sharded::shard_for;
use crate::decision::{Decision, RetryAfter};
use crate::error::Error;
use crate::operation::Operation;
use crate::request::Request;
use crate::rule::Rule;
use crate::runtime::{self, LONGEST_WAIT};

/// How long after the reservation to look first. The time between looks doubles.
const FIRST_LOOK: Duration = Duration::from_millis(100);

impl Limiter {
    /// Waits with a reservation whose answer has just come, until its turn; sooner if others leave.
    pub(super) async fn until_turn(
        &self,
        rule: &Rule,
        request: &Request<'_>,
        reserved: &Decision,
    ) -> Result<(), Error> {
        let reserved_at = Instant::now();
        let wait = |wait: RetryAfter| reserved_at + wait.duration().unwrap_or_default().min(LONGEST_WAIT);
        let (turn, turns) = (wait(reserved.retry_after), reserved.limits.iter().map(|limit| wait(limit.retry_after)));
        let turns: Turns = turns.collect();
        // What was reserved in this process, for want of Redis, isn't owed there.
        let may_look = reserved.by.error().is_none() && turns.len() == rule.limits().len();
        let Some(name) = self.queue_name(rule, request).filter(|_| may_look) else {
            return runtime::sleep_until(turn).await;
        };
        let mut place = self.reservations.find(name, rule);
        place.join(reserved_at, request.units(rule), turns);
        let mut pause = FIRST_LOOK;
        let mut next = reserved_at + pause;
        loop {
            let moved_up = place.moved_up();
            let turn = place.turn().unwrap_or(turn);
            if turn <= Instant::now() {
                return Ok(());
            }
            match select(pin!(runtime::sleep_until(turn.min(next))), pin!(moved_up)).await {
                Either::Left((slept, _)) => slept?,
                Either::Right(_) => continue,
            }
            let now = Instant::now();
            if now >= turn {
                return Ok(());
            }
            let is_recent = place.looked_within(pause / 2, now);
            pause *= 2;
            next = now + pause;
            if !is_recent {
                runtime::timeout_at(turn, self.look(&place, rule, request)).await;
            }
        }
    }

    /// Looks at what is still owed, for those in this process that wait for the same limits as a reservation just
    /// cancelled.
    pub(super) async fn move_up(&self, rule: &Rule, request: &Request<'_>) {
        let Some(name) = self.queue_name(rule, request) else { return };
        if self.reservations.has(&name) {
            self.look(&self.reservations.find(name, rule), rule, request).await;
        }
    }

    async fn look(&self, place: &Place, rule: &Rule, request: &Request<'_>) {
        let owed = request.cost_of_all(0).jitter(0).within(Duration::ZERO);
        let asked = place.look(|| async {
            let now = self.decide(rule, owed, Operation::Peek).uncounted().await.ok()?;
            // An answer in Redis's place says nothing about its state, nor does a block.
            (now.allowed && now.by.error().is_none()).then_some(now.limits)
        });
        asked.await;
    }

    fn queue_name(&self, rule: &Rule, request: &Request<'_>) -> Option<Vec<u8>> {
        let mut name = self.state_keys(rule, request).ok()?;
        name.extend_from_slice(&rule.fingerprint().to_le_bytes());
        if let Some(scoped) = self.sharded(rule)
            && let Some(shard) = shard_for(Call { rule, request, operation: Operation::Reserve }, scoped)
        {
            name.extend_from_slice(&shard.to_le_bytes());
        }
        Some(name)
    }
}
