//! What a lease holds, and what it knows of its limit: data and times, no calls.

use std::time::Duration;

use tokio::time::Instant;

use crate::decision::{Decision, RetryAfter};

/// Units are spent within this time of being taken, or go back.
const LONGEST_HOLD: Duration = Duration::from_secs(1);
/// A batch that must be spent sooner isn't worth its calls.
const SHORTEST: Duration = Duration::from_millis(10);
/// A return is sent only if it has this long to arrive: one that came late would give units twice.
const RETURN_MARGIN: Duration = Duration::from_millis(100);

/// Where even a single unit lasted too long, calls come too seldom for a lease, and it tries again after this.
const QUIET: Duration = Duration::from_secs(10);

const FIRST_BATCH: u64 = 8;
/// A batch that was used up this fast was too small, one that lasted this long too large.
const FAST: Duration = Duration::from_millis(50);
const SLOW: Duration = Duration::from_millis(200);

#[derive(Debug)]
pub(super) struct Stock {
    /// The most units that may be here.
    pub(super) share: u64,
    /// The level below which the limit is hot.
    pub(super) hot_below: u64,
    units: u64,
    /// Units are spent before this,
    spent_until: Instant,
    /// and can be returned before this: so long the limit's level and all that is out can't add up to more than its
    /// capacity.
    sound_until: Instant,
    /// Batches are taken on the strength of the last look before this.
    looked_until: Instant,
    /// Whether the limit was hot when it was asked last. It isn't worth a look before.
    hot: bool,
    /// Redis has nothing to take before this.
    dry_until: Instant,
    /// Nobody would use what is taken before this.
    quiet_until: Instant,
    batch: u64,
    last_taken: u64,
    /// When it was taken, until the next batch's size has been decided by it.
    taken_at: Option<Instant>,
    reset_at: Instant,
    /// Refills that ended.
    pub(super) refills: u64,
    /// Whether there is a task that sees to what expires.
    pub(super) kept: bool,
}

/// Units that go back, and how long that may take.
pub(super) struct Unused {
    pub(super) units: u64,
    pub(super) within: Duration,
}

impl Stock {
    pub(super) fn new(share: u64, hot_below: u64, now: Instant) -> Self {
        Self {
            share,
            hot_below,
            units: 0,
            spent_until: now,
            sound_until: now,
            looked_until: now,
            hot: false,
            dry_until: now,
            quiet_until: now,
            batch: FIRST_BATCH.min(share),
            last_taken: 0,
            taken_at: None,
            reset_at: now,
            refills: 0,
            kept: false,
        }
    }

    pub(super) fn units(&self) -> u64 {
        self.units
    }

    /// Spends this many, if they are here and haven't expired.
    pub(super) fn spend(&mut self, cost: u64, now: Instant) -> bool {
        let enough = now < self.spent_until && cost <= self.units;
        if enough {
            self.units -= cost;
        }
        enough
    }

    /// How long until the key is as if never used, as Redis said with the last batch.
    pub(super) fn reset_after(&self, now: Instant) -> Duration {
        self.reset_at.saturating_duration_since(now)
    }

    /// Whether the limit is worth a refill.
    pub(super) fn may_refill(&self, now: Instant) -> bool {
        self.hot && now >= self.dry_until && now >= self.quiet_until
    }

    /// Whether it is time for the next batch, so that nobody has to wait for it.
    pub(super) fn runs_low(&self, now: Instant) -> bool {
        self.last_taken > 1 && self.units <= self.last_taken / 4 && self.may_refill(now)
    }

    /// What Redis answered to somebody who asked it directly.
    pub(super) fn answered(&mut self, decision: &Decision, now: Instant) {
        self.hot = !decision.blocked && decision.remaining < self.hot_below;
        if decision.allowed {
            self.dry_until = now;
        }
    }

    /// A refill has failed: asking directly is all that can help.
    pub(super) fn failed(&mut self) {
        self.hot = false;
    }

    pub(super) fn must_look(&self, now: Instant) -> bool {
        now >= self.looked_until
    }

    /// What a peek answered to the level below which the limit is hot; whether units may be taken now.
    pub(super) fn looked(&mut self, peek: &Decision, sent: Instant, now: Instant) -> bool {
        // A blocked key waits for the block's end, whatever its level.
        let RetryAfter::After(sound) = peek.retry_after else { return self.cold() };
        // The last quarter is for returns, and for clocks of different speeds.
        let spent = (sound * 3 / 4).min(LONGEST_HOLD);
        if peek.allowed || peek.blocked || spent < SHORTEST {
            return self.cold();
        }
        if self.has_expired(now) {
            return false;
        }
        // What an earlier look said still holds: the later one counts, for all that is here.
        self.spent_until = self.spent_until.max(sent + spent);
        self.sound_until = self.sound_until.max(sent + sound);
        self.looked_until = sent + spent / 2;
        true
    }

    fn cold(&mut self) -> bool {
        self.hot = false;
        false
    }

    /// How many units to take for someone who wants this many; none if there is no room for them.
    pub(super) fn next_batch(&mut self, cost: u64, now: Instant) -> u64 {
        // A batch from before it was quiet says nothing of how often calls come now.
        let taken_at = self.taken_at.take().filter(|taken| *taken >= self.quiet_until);
        match taken_at.map(|taken| now - taken) {
            Some(lasted) if lasted <= FAST => self.batch = (self.batch * 2).min(self.share),
            Some(lasted) if lasted > SLOW => self.shrink(now),
            _ => {}
        }
        let room = self.share - self.units;
        if cost > self.units + room { 0 } else { self.batch.max(cost.saturating_sub(self.units)).min(room) }
    }

    /// Puts in what was taken.
    pub(super) fn put(&mut self, answer: &Decision, now: Instant) {
        self.reset_at = now + answer.reset_after;
        match answer.retry_after {
            RetryAfter::After(wait) if !answer.allowed => self.dry_until = now + wait,
            _ => {
                self.units += answer.granted;
                self.last_taken = answer.granted;
                self.taken_at = Some(now);
            }
        }
    }

    pub(super) fn has_expired(&self, now: Instant) -> bool {
        self.units > 0 && now >= self.spent_until
    }

    /// Until when units are here; none if there are none.
    pub(super) fn held_until(&self) -> Option<Instant> {
        (self.units > 0).then_some(self.spent_until)
    }

    /// Takes out what is here. None if that is nothing, or if it is too late to give it back.
    pub(super) fn unused(&mut self, now: Instant) -> Option<Unused> {
        let units = std::mem::take(&mut self.units);
        if units == 0 {
            return None;
        }
        self.shrink(now);
        self.taken_at = None;
        let within = self.sound_until.saturating_duration_since(now);
        (within >= RETURN_MARGIN).then_some(Unused { units, within })
    }

    fn shrink(&mut self, now: Instant) {
        if self.batch == 1 {
            self.quiet_until = now + QUIET;
        }
        self.batch = (self.batch / 2).max(1);
    }
}
