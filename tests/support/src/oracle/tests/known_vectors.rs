//! Vectors of other implementations.

use super::*;

#[test]
fn vectors() {
    const MINUTE: u64 = 60_000_000;
    // iv-08
    let mut o = Oracle::new(window(10, MINUTE, 10, Start::At(0)));
    calls(&mut o, &[
        (Acquire, 5, 0, Some(5), Now, 5, MINUTE), (Acquire, 6, MINUTE, Some(6), Now, 4, MINUTE),
        (Acquire, 10, MINUTE, None, AfterUs(MINUTE), 4, MINUTE),
    ]);
    // iv-09
    let mut o = Oracle::new(Spec::FixedWindow { rate: 10, period_us: MINUTE, capacity: 10, max_debt: 11, start: Start::At(0) });
    for (call, cost, now, left, retry) in [
        (Acquire, 5, 0, 5, Now), (Reserve, 16, MINUTE, -6, AfterUs(MINUTE)), (Reserve, 5, MINUTE / 2 * 3, -11, AfterUs(MINUTE / 2 * 3)),
    ] {
        let (a, _) = call.on(&mut o, cost, now);
        assert_eq!((a.allowed, a.retry, level(&o, now)), (true, retry, left));
    }
    // tb-30
    let mut o = Oracle::new(bucket(10, 30_000_000, 10, 1));
    for (call, cost, remaining) in [(Acquire, 1, 9), (Refund, 1, 10), (Acquire, 10, 0), (Refund, 1, 1)] {
        let (a, _) = call.on(&mut o, cost, 0);
        assert_eq!((a.allowed, a.remaining), (true, remaining));
    }
    // fw-12, for every algorithm.
    let two_days = 2880 * MINUTE;
    for spec in [
        bucket(10, two_days, 10, 1),
        window(10, two_days, 10, Start::At(0)),
        Spec::SlidingWindow { limit: 10, period_us: two_days, tick_us: 1 },
        Spec::SlidingLog { limit: 10, period_us: two_days },
    ] {
        let mut o = Oracle::new(spec);
        for (call, cost, remaining) in [(Acquire, 8, 2), (Refund, 2, 4), (Refund, 3, 7), (Acquire, 5, 2), (Acquire, 2, 0), (Refund, 3, 3)] {
            let (a, _) = call.on(&mut o, cost, 0);
            assert_eq!((a.allowed, a.remaining), (true, remaining), "{spec:?}");
        }
    }
}
