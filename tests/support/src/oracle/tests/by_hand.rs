//! Tables of calls whose answers were worked out by hand.

use super::*;

#[test]
fn bucket_by_hand() {
    // 2 units in 20 us is 1 in 10; capacity 3: empty to full in 30.
    let mut o = Oracle::new(bucket(2, 20, 3, 1));
    table(&mut o, &[
        (0, 90, Now, 3, 0), (4, 95, Never, 3, 0),
        (2, 100, Now, 1, 20), (2, 105, AfterUs(5), 1, 15), (2, 110, Now, 0, 30),
        // The clock steps back: within 30 the state's time counts as now ...
        (1, 80, AfterUs(40), 0, 60),
        // ... and further back the usage moves to now.
        (1, 79, AfterUs(10), 0, 30), (1, 89, Now, 0, 30),
    ]);
    let new = Answer { allowed: true, limit: 3, remaining: 3, retry: Now, reset_after_us: 0, blocked: false, overage: 0 };
    assert_eq!(o.peek(1, 95), Answer { allowed: false, remaining: 0, retry: AfterUs(4), reset_after_us: 24, ..new });
    assert_eq!(o.reset(), new);
    table(&mut o, &[(3, 0, Now, 0, 30)]);
    // Ticks of 5: half a unit each. Full at 7, so the taking is dated to 10.
    let mut o = Oracle::new(bucket(1, 10, 2, 5));
    table(&mut o, &[(1, 7, Now, 1, 13), (1, 8, Now, 0, 22), (1, 19, AfterUs(1), 0, 11), (1, 20, Now, 0, 20)]);
    // One and a half used at 27: not nearly full, so dated to 25.
    table(&mut o, &[(0, 31, Now, 1, 9), (1, 31, Now, 0, 19)]);
}

#[test]
fn fixed_window_by_hand() {
    // Boundaries at ..., 3, 13, 23, ...; 2 come back at each, up to 5.
    let mut o = Oracle::new(window(2, 10, 5, Start::At(23)));
    table(&mut o, &[
        (5, 1, Now, 0, 22), (1, 2, AfterUs(1), 0, 21), (4, 3, AfterUs(10), 2, 20),
        (4, 13, Now, 0, 30), (6, 13, Never, 0, 30), (0, 42, Now, 4, 1), (0, 43, Now, 5, 0),
    ]);
    let mut o = Oracle::new(window(2, 10, 3, Start::FirstHit));
    table(&mut o, &[
        // Empty at 4; two come at 14 and the third at 24; from then on a taking starts a window.
        (3, 4, Now, 0, 20), (1, 13, AfterUs(1), 0, 11), (1, 15, Now, 1, 9),
        (1, 27, Now, 2, 10), (3, 36, AfterUs(1), 2, 1), (3, 37, Now, 0, 20),
    ]);
}

#[test]
fn sliding_by_hand() {
    let mut o = Oracle::new(Spec::SlidingWindow { limit: 4, period_us: 10, tick_us: 1 });
    table(&mut o, &[
        // Four in the window [10, 20) weigh floor(4 * (10 - e) / 10) in the next: 3 from e = 1.
        (4, 15, Now, 0, 13), (1, 20, AfterUs(1), 0, 8), (2, 21, AfterUs(2), 1, 7),
        (2, 23, Now, 0, 13), (5, 23, Never, 0, 13), (0, 35, Now, 3, 1), (0, 36, Now, 4, 0),
    ]);
    // Ticks of 5: the count moves at 25 only.
    let mut o = Oracle::new(Spec::SlidingWindow { limit: 4, period_us: 10, tick_us: 5 });
    table(&mut o, &[(4, 17, Now, 0, 13), (1, 23, AfterUs(2), 0, 7), (1, 26, Now, 1, 9)]);

    let mut o = Oracle::new(Spec::SlidingLog { limit: 4, period_us: 10 });
    table(&mut o, &[
        (1, 1, Now, 3, 10), (2, 3, Now, 1, 10), (3, 5, AfterUs(8), 1, 8), (2, 10, AfterUs(1), 1, 3),
        (2, 11, Now, 0, 10), (1, 12, AfterUs(1), 0, 9), (1, 1, AfterUs(12), 0, 20), (1, 0, AfterUs(10), 0, 10),
    ]);
}

#[test]
fn changes_by_hand() {
    // Two of three used at 100. Then 1 in 5, up to 6: still two used at 100.
    let mut o = Oracle::new(bucket(1, 10, 3, 1));
    table(&mut o, &[(2, 100, Now, 1, 20)]);
    o.change(bucket(1, 5, 6, 1));
    table(&mut o, &[(6, 103, AfterUs(7), 4, 7)]);
    // The denial wrote nothing, so the next change counts from the first numbers, at their rate: the faster one.
    o.change(bucket(1, 20, 1, 1));
    table(&mut o, &[(1, 103, AfterUs(17), 0, 17)]);
    // What was used stays used, also what is beyond the new bound: 5, of 2 and 2.
    let mut o = Oracle::new(Spec::TokenBucket { rate: 1, period_us: 10, capacity: 3, max_debt: 2, tick_us: 1 });
    o.written = Some(Written::of(o.spec, State::Bucket { used: 50, time: 100 }));
    table(&mut o, &[(0, 100, Now, 0, 50), (1, 100, AfterUs(30), 0, 50)]);
    o.change(Spec::TokenBucket { rate: 1, period_us: 10, capacity: 2, max_debt: 2, tick_us: 1 });
    table(&mut o, &[(1, 100, AfterUs(40), 0, 50)]);
    // 7 tenths used are 2.1 thirds, counted as 3; 101 is ceiled to 102.
    let mut o = Oracle::new(bucket(1, 10, 3, 1));
    table(&mut o, &[(1, 98, Now, 2, 10)]);
    o.written = Some(Written::of(o.spec, State::Bucket { used: 7, time: 101 }));
    o.change(bucket(1, 6, 3, 2));
    table(&mut o, &[(0, 102, Now, 2, 6)]);

    let mut o = Oracle::new(window(3, 10, 3, Start::At(0)));
    table(&mut o, &[(2, 17, Now, 1, 3)]);
    o.change(window(5, 8, 5, Start::At(4)));
    table(&mut o, &[(4, 18, AfterUs(2), 3, 2)]);
    o.change(window(3, 8, 3, Start::FirstHit));
    table(&mut o, &[(2, 18, AfterUs(7), 1, 7)]);
    o.change(window(3, 10, 3, Start::FirstHit));
    table(&mut o, &[(2, 18, AfterUs(2), 1, 2)]);

    // Three used at 15 of a limit lowered to 2: they pass through the windows that they were taken in.
    let mut o = Oracle::new(Spec::SlidingWindow { limit: 4, period_us: 10, tick_us: 1 });
    table(&mut o, &[(3, 15, Now, 1, 12)]);
    o.change(Spec::SlidingWindow { limit: 2, period_us: 10, tick_us: 1 });
    table(&mut o, &[(1, 16, AfterUs(8), 0, 11)]);
    let mut o = Oracle::new(Spec::SlidingLog { limit: 4, period_us: 10 });
    table(&mut o, &[(1, 13, Now, 3, 10), (2, 15, Now, 1, 10)]);
    o.change(Spec::SlidingLog { limit: 2, period_us: 10 });
    table(&mut o, &[(1, 16, AfterUs(9), 0, 9), (1, 23, AfterUs(2), 0, 2)]);
    o.change(Spec::SlidingLog { limit: 5, period_us: 20 });
    // Four in 10 is faster than 5 in 20. The charge moves what is left of them to one entry, at 15.
    table(&mut o, &[(4, 23, AfterUs(2), 3, 2), (3, 23, Now, 0, 20), (1, 34, AfterUs(1), 0, 9), (2, 35, Now, 0, 20)]);
}

#[test]
fn reserve_by_hand() {
    // 1 in 10, capacity 2, debt 3: up to 5 at once.
    let spec = Spec::TokenBucket { rate: 1, period_us: 10, capacity: 2, max_debt: 3, tick_us: 1 };
    let mut o = Oracle::new(spec);
    calls(&mut o, &[
        (Reserve, 6, 100, None, Never, 2, 0), (Reserve, 0, 100, Some(0), Now, 2, 0),
        (Reserve, 2, 100, Some(2), Now, 0, 20), (Reserve, 1, 105, Some(1), AfterUs(5), 0, 25),
        (Reserve, 0, 105, Some(0), Now, 0, 25), (Acquire, 2, 105, None, AfterUs(25), 0, 25),
        // Half a unit is owed, so two can be had and not three.
        (Reserve, 3, 105, None, AfterUs(5), 0, 25), (Reserve, 2, 105, Some(2), AfterUs(25), 0, 45),
        // More than the rule's own 50 is owed; then it has to be paid back to 50 first.
        (Penalty, 4, 110, Some(4), Now, 0, 80), (Reserve, 1, 110, None, AfterUs(40), 0, 80),
        (Acquire, 1, 110, None, AfterUs(70), 0, 80), (Refund, 7, 110, Some(0), Now, 1, 10),
    ]);
    // More than capacity from full: the debt of 2 is paid after 20, whatever a full bucket holds.
    let mut o = Oracle::new(spec);
    calls(&mut o, &[(Reserve, 4, 100, Some(4), AfterUs(20), 0, 40)]);
    // Ticks of 5, nearly full at 7: the debt is dated to 10, the wait counts from 5.
    let mut o = Oracle::new(Spec::TokenBucket { rate: 1, period_us: 10, capacity: 1, max_debt: 1, tick_us: 5 });
    calls(&mut o, &[(Reserve, 2, 7, Some(2), AfterUs(8), 0, 23), (Reserve, 1, 8, None, AfterUs(12), 0, 22)]);
    // Capacity 0: one every 10.
    let mut o = Oracle::new(Spec::TokenBucket { rate: 1, period_us: 10, capacity: 0, max_debt: 2, tick_us: 1 });
    calls(&mut o, &[
        (Reserve, 1, 100, Some(1), AfterUs(10), 0, 10), (Reserve, 1, 100, Some(1), AfterUs(20), 0, 20),
        (Reserve, 1, 100, None, AfterUs(10), 0, 20), (AtMost, 1, 100, None, Never, 0, 20),
        // Back by the longest reset, 20, the clock stands still; further back, the debt moves.
        (Reserve, 1, 80, None, AfterUs(30), 0, 40), (Reserve, 1, 79, None, AfterUs(10), 0, 20),
        (Reserve, 1, 89, Some(1), AfterUs(20), 0, 20),
    ]);
    // A window from the reservation at 4 on, 2 at each boundary.
    let mut o = Oracle::new(Spec::FixedWindow { rate: 2, period_us: 10, capacity: 3, max_debt: 4, start: Start::FirstHit });
    calls(&mut o, &[
        (Reserve, 4, 4, Some(4), AfterUs(10), 0, 20), (Reserve, 4, 13, None, AfterUs(1), 0, 11),
        (Reserve, 3, 13, Some(3), AfterUs(11), 0, 31), (Penalty, 1, 14, Some(1), Now, 0, 30),
    ]);
}

#[test]
fn at_most_by_hand() {
    let mut o = Oracle::new(bucket(2, 20, 3, 1));
    calls(&mut o, &[
        (AtMost, 0, 100, Some(0), Now, 3, 0), (AtMost, 2, 100, Some(2), Now, 1, 20),
        (AtMost, 9, 105, Some(1), Now, 0, 25), (AtMost, 9, 106, None, AfterUs(4), 0, 24),
        (AtMost, 0, 106, Some(0), Now, 0, 24), (AtMost, 9, 120, Some(2), Now, 0, 30),
    ]);
    for mut o in [
        Oracle::new(Spec::SlidingWindow { limit: 0, period_us: 10, tick_us: 1 }),
        Oracle::new(Spec::SlidingLog { limit: 0, period_us: 10 }),
    ] {
        calls(&mut o, &[(AtMost, 2, 100, None, Never, 0, 0), (AtMost, 0, 100, Some(0), Now, 0, 0)]);
    }
}

#[test]
fn refund_by_hand() {
    let mut o = Oracle::new(bucket(1, 10, 3, 1));
    calls(&mut o, &[
        (Refund, 1, 100, Some(0), Now, 3, 0), (Acquire, 3, 100, Some(3), Now, 0, 30),
        (Refund, 1, 115, Some(0), Now, 2, 5), (Refund, 0, 118, Some(0), Now, 2, 2),
        // Written at 115: at 110 the refund waits for it, and is itself written there.
        (Acquire, 1, 110, Some(1), Now, 1, 20), (Refund, 9, 110, Some(0), Now, 3, 0),
    ]);
    assert_eq!(o.find(0).at, 0, "a full key's time binds nobody");
    // A refund is not dated to the next tick.
    let mut o = Oracle::new(bucket(3, 20, 6, 20));
    calls(&mut o, &[(Acquire, 6, 20, Some(6), Now, 0, 40), (Refund, 1, 45, Some(0), Now, 4, 15)]);

    let mut o = Oracle::new(window(2, 10, 5, Start::At(23)));
    calls(&mut o, &[(Acquire, 5, 1, Some(5), Now, 0, 22), (Refund, 1, 4, Some(0), Now, 3, 9), (Refund, 9, 5, Some(0), Now, 5, 0)]);
    let mut o = Oracle::new(window(2, 10, 5, Start::FirstHit));
    calls(&mut o, &[(Acquire, 5, 1, Some(5), Now, 0, 30), (Refund, 1, 14, Some(0), Now, 3, 7), (Refund, 9, 15, Some(0), Now, 5, 0)]);

    // Four of the window before weigh 2 at 24; of 3 given back one is of this window.
    let mut o = Oracle::new(Spec::SlidingWindow { limit: 4, period_us: 10, tick_us: 1 });
    calls(&mut o, &[
        (Acquire, 4, 15, Some(4), Now, 0, 13), (Acquire, 1, 24, Some(1), Now, 1, 7),
        (Refund, 3, 24, Some(0), Now, 3, 2), (Refund, 3, 26, Some(0), Now, 4, 0),
    ]);

    let mut o = Oracle::new(Spec::SlidingLog { limit: 6, period_us: 10 });
    calls(&mut o, &[
        (Acquire, 2, 1, Some(2), Now, 4, 10), (Acquire, 2, 5, Some(2), Now, 2, 10), (Acquire, 2, 8, Some(2), Now, 0, 10),
        // Those of 8, and one of those of 5, which is then the newest.
        (Refund, 3, 9, Some(0), Now, 3, 6), (Acquire, 1, 6, Some(1), Now, 2, 10), (Refund, 1, 6, Some(0), Now, 3, 9),
        // Those of 1 are gone, so one is left to give.
        (Refund, 3, 11, Some(0), Now, 6, 0),
    ]);
    assert_eq!(o.find(0).at, 0);
}

#[test]
fn penalty_by_hand() {
    let deep = Spec::TokenBucket { rate: 1, period_us: 10, capacity: 2, max_debt: 0, tick_us: 1 };
    let mut o = Oracle::new(deep);
    calls(&mut o, &[
        (Penalty, 0, 100, Some(0), Now, 2, 0), (Penalty, 5, 100, Some(5), Now, 0, 50),
        (Acquire, 1, 100, None, AfterUs(40), 0, 50), (Acquire, 1, 140, Some(1), Now, 0, 20),
        (Penalty, 5, 150, Some(5), Now, 0, 60),
        // The rule's longest reset, 20, is still what bounds a step back; the usage moves whole.
        (AtMost, 1, 130, None, AfterUs(70), 0, 80), (AtMost, 1, 129, None, AfterUs(50), 0, 60),
    ]);
    // Six units are used whatever the numbers, and pass at the faster rate.
    o.change(bucket(2, 20, 2, 1));
    calls(&mut o, &[(Refund, 0, 129, Some(0), Now, 0, 60)]);
    o.change(bucket(1, 5, 3, 1));
    calls(&mut o, &[(Refund, 0, 129, Some(0), Now, 0, 30)]);
    o.change(Spec::TokenBucket { rate: 1, period_us: 10, capacity: 2, max_debt: 1, tick_us: 1 });
    // What debt is allowed is no part of a state.
    calls(&mut o, &[(Refund, 0, 129, Some(0), Now, 0, 60)]);
    // Ticks of 5, full at 7: dated to 10, as a taking.
    let mut o = Oracle::new(bucket(1, 10, 2, 5));
    calls(&mut o, &[(Penalty, 3, 7, Some(3), Now, 0, 33)]);

    let mut o = Oracle::new(window(2, 10, 2, Start::At(0)));
    calls(&mut o, &[(Penalty, 7, 15, Some(7), Now, 0, 35), (Acquire, 1, 15, None, AfterUs(25), 0, 35), (Acquire, 1, 40, Some(1), Now, 0, 10)]);
    // Six weigh 6, 5.4, ...: under four from 24 on; and a refund takes from the raw six.
    let mut o = Oracle::new(Spec::SlidingWindow { limit: 4, period_us: 10, tick_us: 1 });
    calls(&mut o, &[(Penalty, 6, 15, Some(6), Now, 0, 14), (Acquire, 1, 16, None, AfterUs(8), 0, 13), (Refund, 5, 22, Some(0), Now, 4, 0)]);
    let mut o = Oracle::new(Spec::SlidingLog { limit: 4, period_us: 10 });
    calls(&mut o, &[(Penalty, 6, 15, Some(6), Now, 0, 10), (Acquire, 1, 16, None, AfterUs(9), 0, 9), (Refund, 3, 16, Some(0), Now, 1, 9)]);
    // Moved back to now, even by a refund of nothing, all of it stays used.
    calls(&mut o, &[(Penalty, 6, 17, Some(6), Now, 0, 10), (Refund, 0, 6, Some(0), Now, 0, 10), (Refund, 1, 7, Some(0), Now, 0, 9), (Refund, 5, 7, Some(0), Now, 1, 9)]);
}

/// A penalty of more than can be counted takes what can be: the numbers are worked out by hand.
#[test]
fn penalty_is_bounded() {
    let (two, used) = (2i128, |o: &Oracle| {
        let found = o.find(0);
        Rule::of(o.spec).used(&found.state, found.at)
    });
    for (spec, most) in [
        // 3 parts a unit: 2^51 is no multiple of 3, 2^51 - 2 is.
        (bucket(1, 3, 1, 1), two.pow(51) - 2),
        (Spec::TokenBucket { rate: 7, period_us: 3, capacity: 1, max_debt: 0, tick_us: 1 }, two.pow(53) - 5),
        // 2^51 * 2 / 3 is 1501199875790165 and a third, an odd number of halves.
        (bucket(2, 3, 1, 3), 1_501_199_875_790_165),
        (bucket(2, 9, 1, 3), 1_501_199_875_790_163),
        (window(7, 1, 7, Start::At(0)), two.pow(53) - 7),
        (window(5, 1000, 7, Start::FirstHit), 2_251_799_813_685 * 5),
        (Spec::SlidingWindow { limit: 1, period_us: 10, tick_us: 5 }, two.pow(52) - 1),
        (Spec::SlidingWindow { limit: 1, period_us: 3, tick_us: 1 }, 3_002_399_751_580_329),
        (Spec::SlidingLog { limit: 1, period_us: 3 }, two.pow(39)),
    ] {
        let mut o = Oracle::new(spec);
        let _ = (o.penalty(1, 0), o.penalty(u64::MAX, 0));
        assert_eq!(used(&o), most, "{spec:?}");
        let a = o.acquire(1, 0);
        assert!(matches!(a.retry, AfterUs(_)), "{spec:?}: {a:?}");
        assert_eq!(a, Answer { allowed: false, retry: a.retry, ..o.penalty(9, 0) });
        assert_eq!(used(&o), most, "{spec:?}");
        assert_eq!(o.refund(u64::MAX, 0), Oracle::new(spec).peek(0, 0));
    }
}

#[test]
fn overage_by_hand() {
    // One in 10, which is also how long denials are remembered: 101 until 111.
    let mut o = Oracle::new(bucket(1, 10, 1, 1));
    calls(&mut o, &[(Acquire, 1, 100, Some(1), Now, 0, 10), (Acquire, 1, 100, None, AfterUs(10), 0, 10)]);
    assert_eq!(o.peek(0, 100).overage, 0, "off");
    o.count_overage();
    for (call, cost, now, allowed, overage) in [
        (Acquire, 1, 101, false, 1), (Reserve, 1, 101, false, 2), (AtMost, 1, 102, false, 3), (Acquire, 2, 103, false, 4),
        (Refund, 0, 104, true, 4), (Acquire, 1, 110, true, 4), (Refund, 0, 111, true, 0),
        // Nothing was written: the clock steps back to where they count. Before the first they don't.
        (Refund, 0, 110, true, 4), (Refund, 0, 100, true, 0), (Refund, 0, 101, true, 4),
        (Acquire, 1, 112, false, 1), (Acquire, 1, 111, false, 1), (Acquire, 1, 112, false, 2),
        // A block's denials count, the block doesn't.
        (Block, 9, 112, true, 2), (Acquire, 0, 113, false, 3), (Block, 0, 113, true, 3),
    ] {
        let (a, _) = call.on(&mut o, cost, now);
        assert_eq!((a.allowed, a.overage), (allowed, overage), "{call:?} {cost} at {now}: {o:?}");
        assert_eq!(o.peek(9, now).overage, overage, "a peek isn't counted");
    }
    // As long as the rule's longest reset of now: 3 is 1 too many for those of 111 at 114.
    o.change(bucket(1, 3, 1, 1));
    assert_eq!((o.peek(0, 113).overage, o.peek(0, 114).overage), (3, 0));
    assert_eq!((o.reset().overage, o.peek(0, 113).overage), (0, 0));
    // Nothing lasts, so a denial counts itself only.
    let mut o = Oracle::new(bucket(1, 10, 0, 1));
    o.count_overage();
    assert_eq!([o.acquire(1, 5).overage, o.acquire(1, 5).overage, o.peek(1, 5).overage], [1, 1, 0]);
    // A key that was never used is none for having been denied.
    let mut o = Oracle::new(bucket(1, 10, 1, 1));
    o.count_overage();
    assert_eq!((o.acquire(2, 100).overage, o.find(0).at), (1, 0));
    table(&mut o, &[(1, 50, Now, 0, 10)]);
}
