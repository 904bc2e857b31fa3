//! What a lease holds and knows of its limit: data and times, no calls.

use std::time::Duration;

use tokio::time::Instant;

use crate::decision::{Decision, RetryAfter};

/// Units are spent or returned within this time of being taken.
const LONGEST_HOLD: Duration = Duration::from_secs(1);
/// A batch that must be spent sooner isn't worth its calls.
const SHORTEST: Duration = Duration::from_millis(10);
/// A return is sent only if it has this long to arrive: a late one would give units twice.
const RETURN_MARGIN: Duration = Duration::from_millis(100);

/// How long Redis is asked directly once calls are too rare for a lease: a batch of a single unit lasted longer than
/// [`SLOW`], or expired.
const QUIET: Duration = Duration::from_secs(10);

const FIRST_BATCH: u64 = 8;
/// A batch used up this fast was too small, and one that lasted this long was too large.
const FAST: Duration = Duration::from_millis(50);
const SLOW: Duration = Duration::from_millis(200);

#[derive(Debug)]
pub(super) struct Stock {
    /// The most units that may be held here.
    pub(super) share: u64,
    /// The level below which the limit is hot.
    pub(super) hot_below: u64,
    units: u64,
    /// Units aren't spent from this on.
    spent_until: Instant,
    /// Units can be returned before this: until then the limit's level and all units that are out can't add up to more
    /// than its capacity.
    sound_until: Instant,
    /// Until this, batches may be taken on the basis of the last peek.
    looked_until: Instant,
    /// Whether the limit was hot at the last answer; if it wasn't, a peek isn't worth its call.
    hot: bool,
    /// Redis has nothing to give before this.
    dry_until: Instant,
    /// Calls are too rare before this for a batch to be used.
    quiet_until: Instant,
    batch: u64,
    last_taken: u64,
    /// When the batch was taken, until it has decided the next batch's size.
    taken_at: Option<Instant>,
    reset_at: Instant,
    /// Refills that have ended.
    pub(super) refills: u64,
    /// Whether a task returns expiring units.
    pub(super) kept: bool,
    /// Units asked for, or being returned, that Redis hasn't answered for.
    pub(super) on_the_way: u64,
}

/// Units to return, and by when.
pub(super) struct Unused {
    pub(super) units: u64,
    pub(super) until: Instant,
}

impl Unused {
    /// How long the return may take. None if it might arrive too late.
    pub(super) fn within(&self, now: Instant) -> Option<Duration> {
        Some(self.until.saturating_duration_since(now)).filter(|within| *within >= RETURN_MARGIN)
    }
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
            on_the_way: 0,
        }
    }

    pub(super) fn units(&self) -> u64 {
        self.units
    }

    /// Spends this many units, if they are held here and haven't expired.
    pub(super) fn spend(&mut self, cost: u64, now: Instant) -> bool {
        let enough = now < self.spent_until && cost <= self.units;
        if enough {
            self.units -= cost;
        }
        enough
    }

    /// How long until the key is as if never used, by Redis's answer to the last batch.
    pub(super) fn reset_after(&self, now: Instant) -> Duration {
        self.reset_at.saturating_duration_since(now)
    }

    /// Whether the limit is worth a refill.
    pub(super) fn may_refill(&self, now: Instant) -> bool {
        self.hot && now >= self.dry_until && now >= self.quiet_until
    }

    /// Whether it is time for the next batch, so that no caller has to wait for it.
    pub(super) fn runs_low(&self, now: Instant) -> bool {
        self.last_taken > 1 && self.units <= self.last_taken / 4 && self.may_refill(now)
    }

    /// Notes Redis's answer to a call that asked it directly.
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

    /// Notes a peek's answer at the level below which the limit is hot, and says whether units may be taken now.
    pub(super) fn looked(&mut self, peek: &Decision, sent: Instant, now: Instant) -> bool {
        // The wait on a blocked key is until the block's end, whatever its level.
        let RetryAfter::After(sound) = peek.retry_after else { return self.cold() };
        // The last quarter is for returns, and for clock drift.
        let spent = (sound * 3 / 4).min(LONGEST_HOLD);
        if peek.allowed || peek.blocked || spent < SHORTEST {
            return self.cold();
        }
        if self.has_expired(now) {
            return false;
        }
        // An earlier peek's bound still holds; of the two, the later bound applies to all units held here.
        self.spent_until = self.spent_until.max(sent + spent);
        self.sound_until = self.sound_until.max(sent + sound);
        self.looked_until = sent + spent / 2;
        true
    }

    fn cold(&mut self) -> bool {
        self.hot = false;
        false
    }

    /// How many units to take for a caller that wants this many; none if there is no room for them.
    pub(super) fn next_batch(&mut self, cost: u64, now: Instant) -> u64 {
        // A batch from before the quiet time doesn't show how often calls arrive now.
        let taken_at = self.taken_at.take().filter(|taken| *taken >= self.quiet_until);
        match taken_at.map(|taken| now - taken) {
            Some(lasted) if lasted <= FAST => self.batch = (self.batch * 2).min(self.share),
            Some(lasted) if lasted > SLOW => self.shrink(now),
            _ => {}
        }
        let room = self.share.saturating_sub(self.units + self.on_the_way);
        if cost > self.units + room { 0 } else { self.batch.max(cost.saturating_sub(self.units)).min(room) }
    }

    /// Adds what was taken.
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

    /// Until when units are held here; none if there are none.
    pub(super) fn held_until(&self) -> Option<Instant> {
        (self.units > 0).then_some(self.spent_until)
    }

    /// Takes out the units held here. None if there are none, or if it is too late to give them back.
    pub(super) fn unused(&mut self, now: Instant) -> Option<Unused> {
        let units = std::mem::take(&mut self.units);
        if units == 0 {
            return None;
        }
        self.shrink(now);
        self.taken_at = None;
        let unused = Unused { units, until: self.sound_until };
        unused.within(now).is_some().then_some(unused)
    }

    /// Until when units taken now can be returned.
    pub(super) fn sound_until(&self) -> Instant {
        self.sound_until
    }

    fn shrink(&mut self, now: Instant) {
        if self.batch == 1 {
            self.quiet_until = now + QUIET;
        }
        self.batch = (self.batch / 2).max(1);
    }
}
