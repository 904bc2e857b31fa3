//! A block: until it ends, every call is denied. It doesn't change what is used.

use super::rule::u64_of;
use super::{Answer, Found, Oracle, Retry};

impl Oracle {
    /// Denies the key for so long from now on, whatever was said before; 0 lifts a block. Written
    /// with the usage as found: the block's end moves with the state's time.
    pub fn block(&mut self, for_us: u64, now_us: u64) -> Answer {
        let mut found = self.find(now_us);
        found.touch();
        found.until = i128::from(now_us) + i128::from(for_us);
        self.close(found, true, Retry::Now, now_us)
    }
}

impl Oracle {
    /// From now on a denial blocks the key for so long, or not.
    pub fn block_for(&mut self, time_us: Option<u64>) {
        self.block_for = time_us;
    }

    /// The wait of a call that alone would have to wait so long. If that denies it, and the key isn't blocked yet, it
    /// is from now on, where the rule says so: as by a block at this instant.
    pub(super) fn wait_or_block(&self, found: &mut Found, own: Retry, now_us: u64) -> Retry {
        if let (Some(time), Retry::AfterUs(_), false) = (self.block_for, own, found.is_blocked(now_us)) {
            found.touch();
            found.until = i128::from(now_us) + i128::from(time);
        }
        found.unblocked(own, now_us)
    }
}

impl Found {
    pub(super) fn is_blocked(&self, now_us: u64) -> bool {
        self.until > now_us.into()
    }

    pub(super) fn blocked_for(&self, now_us: u64) -> u64 {
        u64_of((self.until - i128::from(now_us)).max(0))
    }

    /// A call's own wait, or until the block ends where that is later.
    pub(super) fn unblocked(&self, own: Retry, now_us: u64) -> Retry {
        match (own, self.blocked_for(now_us)) {
            (Retry::Never, _) | (_, 0) => own,
            (Retry::Now, wait) => Retry::AfterUs(wait),
            (Retry::AfterUs(own), wait) => Retry::AfterUs(own.max(wait)),
        }
    }

    /// To be written at `at` with nothing taken. A log's time stays that of its last entry.
    pub(super) fn touch(&mut self) {
        // As taken at `at` itself: no unit is taken that a later date would have to make up for.
        self.state = self.rule().take(&self.state, 0, self.at, self.at);
        self.altered = true;
    }
}

#[cfg(test)]
#[rustfmt::skip]
mod tests {
    use super::super::Retry::{AfterUs, Never, Now};
    use super::super::tests::Call::{Acquire, AtMost, Block, Penalty, Refund, Reserve};
    use super::super::tests::{Random, bucket, calls};
    use super::super::{Spec, Start};
    use super::*;

    #[test]
    fn block_by_hand() {
        let mut o = Oracle::new(bucket(1, 10, 3, 1));
        calls(&mut o, &[
            // Until 120, when what was taken has come back, too.
            (Acquire, 2, 100, Some(2), Now, 1, 20), (Block, 15, 105, Some(0), Now, 0, 15),
            (Acquire, 0, 106, None, AfterUs(14), 0, 14), (Acquire, 1, 106, None, AfterUs(14), 0, 14),
            (Acquire, 4, 106, None, Never, 0, 14), (AtMost, 9, 106, None, AfterUs(14), 0, 14), (AtMost, 0, 106, None, AfterUs(14), 0, 14),
            // Penalties and refunds go on below: three used at 110, back at 140, and given back at 112.
            (Penalty, 2, 110, Some(2), Now, 0, 30), (Acquire, 1, 110, None, AfterUs(10), 0, 30),
            (Acquire, 2, 110, None, AfterUs(20), 0, 30), (Acquire, 3, 110, None, AfterUs(30), 0, 30),
            (Refund, 9, 112, Some(0), Now, 0, 8), (Acquire, 3, 119, None, AfterUs(1), 0, 1), (Acquire, 3, 120, Some(3), Now, 0, 30),
            // A later word counts, and the shortest lifts the block.
            (Block, 9, 121, Some(0), Now, 0, 29), (Block, 5, 122, Some(0), Now, 0, 28), (Acquire, 0, 126, None, AfterUs(1), 0, 24),
            (Block, 0, 126, Some(0), Now, 0, 24), (Acquire, 1, 130, Some(1), Now, 0, 30),
        ]);
        let _blocked = o.block(50, 131);
        assert_eq!(o.reset(), Oracle::new(o.spec).peek(0, 0));
        calls(&mut o, &[(Acquire, 3, 132, Some(3), Now, 0, 30)]);

        // Up to 5 at once: a reservation waits until it would be allowed.
        let mut o = Oracle::new(Spec::TokenBucket { rate: 1, period_us: 10, capacity: 2, max_debt: 3, tick_us: 1 });
        calls(&mut o, &[
            (Reserve, 4, 100, Some(4), AfterUs(20), 0, 40), (Block, 5, 100, Some(0), Now, 0, 40),
            (Reserve, 0, 101, None, AfterUs(4), 0, 39), (Reserve, 1, 101, None, AfterUs(4), 0, 39),
            (Reserve, 3, 101, None, AfterUs(19), 0, 39), (Reserve, 6, 101, None, Never, 0, 39),
            (Reserve, 1, 105, Some(1), AfterUs(25), 0, 45),
        ]);
    }

    #[test]
    fn a_block_is_exact_where_the_tick_is_not() {
        let mut o = Oracle::new(bucket(1, 10, 2, 5));
        calls(&mut o, &[
            (Block, 6, 7, Some(0), Now, 0, 6), (Acquire, 1, 12, None, AfterUs(1), 0, 1), (Acquire, 1, 13, Some(1), Now, 1, 12),
            // The taking is dated to 15. From there one comes back at 25, which is after 23.
            (Block, 9, 14, Some(0), Now, 0, 11), (Acquire, 1, 22, None, AfterUs(1), 0, 3), (Acquire, 2, 22, None, AfterUs(3), 0, 3),
        ]);
        // A block takes nothing, so it isn't dated to the next tick.
        let mut o = Oracle::new(bucket(1, 10, 2, 5));
        calls(&mut o, &[(Acquire, 1, 5, Some(1), Now, 1, 10), (Block, 3, 12, Some(0), Now, 0, 3), (Acquire, 1, 12, None, AfterUs(3), 0, 3)]);
    }

    #[test]
    fn a_block_moves_with_the_clock() {
        // Nothing used, but blocked from 100 until 200. Back by more than 30 it moves along.
        let mut o = Oracle::new(bucket(1, 10, 3, 1));
        calls(&mut o, &[
            (Block, 100, 100, Some(0), Now, 0, 100), (Acquire, 1, 70, None, AfterUs(130), 0, 130),
            (Acquire, 1, 69, None, AfterUs(100), 0, 100), (Acquire, 1, 100, None, AfterUs(69), 0, 69), (Acquire, 1, 169, Some(1), Now, 2, 10),
            // Within 30 the block is held against the clock, the usage against the state's time.
            (Block, 10, 150, Some(0), Now, 0, 29), (Acquire, 3, 150, None, AfterUs(29), 0, 29), (Acquire, 1, 160, Some(1), Now, 1, 29),
            // That write dropped the block which was over.
            (Acquire, 0, 155, Some(0), Now, 1, 34),
        ]);
        // Where nothing is written, it isn't dropped. Over at 115, its time of 100 binds nobody.
        let mut o = Oracle::new(bucket(1, 10, 3, 1));
        calls(&mut o, &[(Block, 10, 100, Some(0), Now, 0, 10), (Acquire, 4, 115, None, Never, 3, 0), (Acquire, 1, 105, None, AfterUs(5), 0, 5)]);
        // It is over by what it moves back: at 69, it ends at 54.
        let mut o = Oracle::new(bucket(1, 10, 3, 1));
        calls(&mut o, &[
            (Acquire, 3, 100, Some(3), Now, 0, 30), (Block, 5, 80, Some(0), Now, 0, 50), (Acquire, 0, 84, None, AfterUs(1), 0, 46),
            (Acquire, 1, 69, None, AfterUs(10), 0, 30), (Acquire, 0, 50, Some(0), Now, 0, 49),
        ]);
        // Other numbers leave its end; how far back is too far is the larger of both resets, 30.
        let mut o = Oracle::new(bucket(1, 10, 3, 1));
        calls(&mut o, &[(Block, 50, 100, Some(0), Now, 0, 50), (Acquire, 0, 85, None, AfterUs(65), 0, 65)]);
        o.change(bucket(1, 10, 1, 1));
        calls(&mut o, &[(Acquire, 0, 70, None, AfterUs(80), 0, 80), (Acquire, 0, 69, None, AfterUs(50), 0, 50)]);
        // A log's time is that of its newest taking, 101, whenever its block was written.
        let mut o = Oracle::new(Spec::SlidingLog { limit: 4, period_us: 10 });
        calls(&mut o, &[(Acquire, 2, 101, Some(2), Now, 2, 10), (Block, 20, 105, Some(0), Now, 0, 20)]);
        calls(&mut o.clone(), &[(Acquire, 0, 91, None, AfterUs(34), 0, 34), (Acquire, 0, 90, None, AfterUs(24), 0, 24)]);
        calls(&mut o, &[
            (Refund, 1, 108, Some(0), Now, 0, 17), (Acquire, 0, 91, None, AfterUs(34), 0, 34), (Acquire, 0, 90, None, AfterUs(24), 0, 24),
            // Giving all back keeps the block.
            (Refund, 1, 95, Some(0), Now, 0, 19), (Acquire, 4, 113, None, AfterUs(1), 0, 1), (Acquire, 4, 114, Some(4), Now, 0, 10),
        ]);
    }

    #[test]
    fn a_denial_blocks_by_hand() {
        let mut o = Oracle::new(bucket(1, 10, 2, 1));
        o.block_for(Some(15));
        calls(&mut o, &[
            // Denied at 100, so blocked until 115: longer than the wait of 10. Denials meanwhile don't extend it.
            (Acquire, 2, 100, Some(2), Now, 0, 20), (Acquire, 1, 100, None, AfterUs(15), 0, 20), (Acquire, 1, 110, None, AfterUs(5), 0, 10),
            // What refilled meanwhile is there: one and a half.
            (AtMost, 2, 115, Some(1), Now, 0, 15), (Refund, 1, 115, Some(0), Now, 1, 5),
            // A wait of "never" blocks no key. Of one and eight tenths two can't be had, and at 130 it is full.
            (Acquire, 3, 118, None, Never, 1, 2), (Acquire, 2, 118, None, AfterUs(15), 0, 15), (Acquire, 2, 133, Some(2), Now, 0, 20),
            (AtMost, 1, 133, None, AfterUs(15), 0, 20),
        ]);
        // The own wait may be the longer one; coming in between blocks anew.
        let mut o = Oracle::new(Spec::TokenBucket { rate: 1, period_us: 10, capacity: 1, max_debt: 1, tick_us: 1 });
        o.block_for(Some(3));
        calls(&mut o, &[
            (Reserve, 2, 100, Some(2), AfterUs(10), 0, 20), (Reserve, 1, 100, None, AfterUs(10), 0, 20), (Reserve, 1, 102, None, AfterUs(8), 0, 18),
            (Reserve, 1, 108, None, AfterUs(3), 0, 12), (Reserve, 1, 110, None, AfterUs(1), 0, 10), (Reserve, 1, 111, Some(1), AfterUs(9), 0, 19),
        ]);
        assert_eq!(o.peek(1, 111), Answer { allowed: false, retry: AfterUs(19), ..o.peek(0, 111) }, "a peek blocks nobody");
    }

    /// Beside a key that is never blocked but gets the same calls, those a block denies left out:
    /// they differ while the block lasts, and only by it.
    #[test]
    fn a_block_alters_nothing_else() {
        let mut random = Random(3);
        for round in 0..6_000 {
            let spec = random.spec(round % 5);
            let (mut o, mut free) = (Oracle::new(spec), Oracle::new(spec));
            let (mut now, mut until) = (1000, 0);
            for _ in 0..30 {
                now += random.below(5);
                let cost = random.below(6);
                let wait = until.max(now) - now;
                let call = match random.below(12) {
                    0..=3 => Acquire,
                    4 => AtMost,
                    5..=6 if round % 5 < 2 => Reserve,
                    7..=8 if round % 5 < 4 => Refund,
                    9 => Penalty,
                    _ => Block,
                };
                if call == Block {
                    until = now + cost * random.below(5);
                    let _blocked = o.block(until - now, now);
                    continue;
                }
                // The shadow of a call that the block denies: what would it be told?
                let denies = wait > 0 && matches!(call, Acquire | AtMost | Reserve);
                let other = if denies { &mut free.clone() } else { &mut free };
                let (own, units) = call.on(other, if call == AtMost && denies { cost.min(1) } else { cost }, now);
                let untouched = if denies { free.peek(0, now) } else { own };
                let expected = Answer {
                    allowed: own.allowed && !denies,
                    remaining: if wait > 0 { 0 } else { own.remaining },
                    retry: match own.retry {
                        AfterUs(own) if denies && call != Reserve => AfterUs(own.max(wait)),
                        // If allowed, a reservation's wait is that for its debt.
                        AfterUs(later) if denies => AfterUs(if own.allowed { wait } else { later.max(wait) }),
                        Now if denies => AfterUs(wait),
                        own => own,
                    },
                    reset_after_us: untouched.reset_after_us.max(wait),
                    blocked: wait > 0,
                    ..own
                };
                let got = call.on(&mut o, cost, now);
                assert_eq!(got, (expected, if denies { 0 } else { units }), "{call:?} {cost} at {now}: {o:?}");
            }
        }
    }

    #[test]
    fn every_kind_can_be_blocked() {
        for spec in [
            bucket(1, 10, 3, 1),
            Spec::FixedWindow { rate: 3, period_us: 10, capacity: 3, max_debt: 0, start: Start::FirstHit },
            Spec::SlidingWindow { limit: 3, period_us: 10, tick_us: 5 },
            Spec::SlidingLog { limit: 3, period_us: 10 },
            Spec::Concurrency { limit: 3, ttl_us: 10 },
        ] {
            let mut o = Oracle::new(spec);
            assert!(o.acquire(1, 100).allowed);
            calls(&mut o, &[
                // Longer than any usage lasts, and written again when all of that is gone.
                (Block, 100, 101, Some(0), Now, 0, 100), (Block, 50, 150, Some(0), Now, 0, 50), (Acquire, 3, 199, None, AfterUs(1), 0, 1),
            ]);
            assert_eq!(o.acquire(3, 200), Oracle::new(spec).acquire(3, 200));
        }
    }
}
