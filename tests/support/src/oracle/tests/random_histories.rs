//! Random histories: every answer means what it says, and nothing is admitted beyond the limit.

use super::*;
use crate::effort::cases;

/// A linear congruential generator, so that the loop below repeats exactly.
pub(in crate::oracle) struct Random(pub(in crate::oracle) u64);

impl Random {
    pub(in crate::oracle) fn below(&mut self, n: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }

    pub(in crate::oracle) fn spec(&mut self, algorithm: u64) -> Spec {
        let (capacity, max_debt) = (self.below(6), self.below(3));
        let (rate, period_us) = (1 + self.below(4), 1 + self.below(12));
        let reduced = period_us / gcd(rate, period_us);
        // A bucket that admits nothing resets in no time, so not even a penalty's date by a coarse
        // tick may lie ahead. There is no such rule.
        let admits = capacity + max_debt > 0 || algorithm > 0;
        let divisor = |r: &mut Self, n: u64| match 1 + r.below(n) {
            d if n.is_multiple_of(d) && admits => d,
            _ => 1,
        };
        match algorithm {
            0 => Spec::TokenBucket {
                rate,
                period_us,
                capacity,
                max_debt,
                tick_us: divisor(self, reduced),
            },
            1 => {
                let offset = self.below(40);
                let start = if offset < 15 { Start::FirstHit } else { Start::At(offset) };
                Spec::FixedWindow { rate, period_us, capacity, max_debt, start }
            }
            2 => Spec::SlidingWindow {
                limit: capacity,
                period_us,
                tick_us: divisor(self, period_us),
            },
            3 => Spec::SlidingLog { limit: capacity, period_us },
            _ => Spec::Concurrency { limit: capacity, ttl_us: period_us },
        }
    }
}

/// Without a count of denials.
fn quiet(o: &Oracle) -> Oracle {
    Oracle { counts_overage: false, denied: Vec::new(), ..o.clone() }
}

/// Every answer means what it says, on any history: clocks that step back, rules that change
/// and blocks included.
#[test]
fn answers_keep_their_word() {
    let mut random = Random(1);
    for round in 0..u64::from(cases(800)) {
        let algorithm = round % 5;
        let mut o = Oracle::new(random.spec(algorithm));
        let mut now = 1000;
        // More than any version could have lent: by a penalty, or as it is under a larger debt.
        let mut deep = false;
        // The longest reset of all versions, and what their clocks round it up by.
        let mut longest = Rule::of(o.spec).longest() + Rule::of(o.spec).tick;
        let counts_overage = random.below(2) == 0;
        if counts_overage { o.count_overage() }
        let mut denied = Vec::new();
        for _ in 0..25 {
            match random.below(18) {
                0 => {
                    let debt = Rule::of(o.spec).debt;
                    o.change(random.spec(algorithm));
                    deep |= debt > Rule::of(o.spec).debt;
                    let other = Rule::of(o.spec);
                    longest = (longest + other.tick).max(other.longest() + other.tick);
                }
                1 => now -= random.below(60),
                2 => now += random.below(60),
                3 => o.on_change([Change::KeepUsed, Change::AsIs, Change::Reset][random.below(3) as usize]),
                _ => now += random.below(5),
            }
            let id = ["a", "b"][random.below(2) as usize];
            let call = match (random.below(13), algorithm) {
                (0, 4) => Acquire,
                (1..=3, 4) => Hold(id),
                (4, 4) if o.clone().renew(id, now).is_some() => Renew(id),
                (8, 4) => Release(id),
                (9..=10, 4) => GiveBack(id),
                (11, 4) => if random.below(2) == 0 { Penalty } else { PenaltyBy(id) },
                (0..=3, _) => Acquire,
                (4..=6, 0..2) => Reserve,
                (4..=7, _) => AtMost,
                (8..=10, _) => Refund,
                (11, _) => Penalty,
                _ => Block,
            };
            deep |= call == Penalty;
            let (cost, before, untouched) = (random.below(6), o.clone(), o.peek(0, now));
            let cost = if call == Block { random.below(4) * random.below(12) } else { cost };
            let (a, taken) = call.on(&mut o, cost, now);
            let context = format!("{call:?} {cost} at {now}: {before:?}, then {o:?}");
            let (p, found) = (before.peek(cost, now), before.find(now));
            let rule = Rule::of(o.spec);
            // The first of the denials that count is at most the longest reset old.
            let live = |first: u64| now >= first && i128::from(now - first) < found.memory;
            let remembered = denied.first().is_some_and(|&first| live(first));
            // What is too old goes with the next write.
            if !remembered && o.denied.is_empty() { denied.clear() }
            if counts_overage && !a.allowed {
                if !remembered { denied.clear() }
                denied.push(now);
            }
            let counted = if remembered || !a.allowed { denied.len() as u64 } else { 0 };
            assert_eq!(a.overage, counted, "{context}");
            // What is given back, or has passed by the time of a write, may bring a count within the limit again, and
            // so under the call's numbers.
            let written = o.written.as_ref().map_or(o.spec, |written| written.spec);
            let answered = if written == o.spec { o.spec } else { found.spec };
            // And what was ahead of both versions by little may be too far ahead for the call's numbers alone.
            let next = o.find(now);
            if next.altered || (2..4).contains(&algorithm) && answered != next.spec {
                continue;
            }
            assert_eq!((p.remaining, p.reset_after_us), (untouched.remaining, untouched.reset_after_us));
            assert_eq!(a.blocked, !o.peek(0, now).allowed, "{context}");
            assert!(!o.peek(a.remaining + 1, now).allowed, "{context}");
            assert!(o.peek(a.remaining, now).allowed || (a.blocked && a.remaining == 0), "{context}");
            let altered = match call {
                Block | Renew(_) | Release(_) => true,
                _ => cost > 0 && a.allowed && (call != Refund || untouched.reset_after_us > 0),
            };
            if !altered {
                assert_eq!((a.remaining, a.reset_after_us), (p.remaining, p.reset_after_us), "{context}");
                // Counts may be too old to weigh anything, and still be given back.
                // A denial is counted in a state, written as of now.
                let counted = before.counts_overage && !a.allowed;
                let raw = call == Refund && matches!(found.state, State::Counter { .. });
                assert!(found.altered || raw || counted || o.written == before.written, "{context}");
            }
            if !deep && !a.blocked {
                let found = o.find(now);
                let reset = i128::from(now + a.reset_after_us) - found.at;
                assert!(a.reset_after_us == 0 || reset <= longest, "{context}");
            }
            // The call that is denied until now + retry, on the key as it was left.
            let again = match call {
                AtMost => Acquire,
                other => other,
            };
            let unit = if call == AtMost { cost.min(1) } else { cost };
            let is_allowed = |t| again.on(&mut o.clone(), unit, t).0.allowed;
            match (a.allowed, a.retry) {
                (false, AfterUs(wait)) => {
                    assert!(!(now..now + wait).any(is_allowed) && is_allowed(now + wait), "{context}");
                }
                (false, Never) if call == Reserve => {
                    assert!(i128::from(cost) > rule.capacity + rule.debt, "{context}");
                }
                (false, Never) => assert!(unit > a.limit, "{context}"),
                (true, AfterUs(_)) => assert_eq!(call, Reserve),
                (true, Now) => {}
                other => panic!("{other:?}: {context}"),
            }
            match call {
                Acquire => assert_eq!((p.allowed, p.retry), (a.allowed, a.retry), "{context}"),
                Reserve if a.allowed && cost > 0 => {
                    // Once taken, it waits under its own numbers.
                    if cost <= a.limit && found.spec == o.spec {
                        assert_eq!(a.retry, p.retry, "{context}");
                    }
                    // The debt is paid when the wait is over, but for what is dated later.
                    let wait = if let AfterUs(wait) = a.retry { wait } else { 0 };
                    assert!((now..now + wait).all(|t| level(&o, t) < 0), "{context}");
                    // Below 0 where the state's time is too far ahead for the call's numbers alone.
                    let late = (o.find(now).at - found.at).max(0);
                    assert!(level(&o, now + wait + u64_of(late)) >= 0, "{context}");
                }
                AtMost => assert_eq!(taken, cost.min(untouched.remaining), "{context}"),
                Refund => {
                    let most = (untouched.remaining + cost).min(a.limit);
                    assert!((untouched.remaining..=most).contains(&a.remaining), "{context}");
                    if matches!(rule.kind, Kind::Bucket | Kind::Window) {
                        let parts = found.rule().parts();
                        let level_then = (level(&before, now) + i128::from(cost) * parts).min(rule.capacity * parts);
                        // What is unused, in parts of the call's numbers.
                        let after = o.find(now).rule().parts();
                        assert_eq!(level(&o, now) * parts, level_then * after, "{context}");
                    }
                }
                Penalty | PenaltyBy(_) if rule.tick == found.rule().tick => {
                    assert_eq!(a.remaining, untouched.remaining.saturating_sub(cost), "{context}");
                }
                Reserve | Penalty | PenaltyBy(_) => {}
                Block => {
                    // Of an unused key, in parts of the call's numbers.
                    let (after, found) = (o.find(now), &found);
                    assert_eq!(after.used() * found.rule().parts(), found.used() * after.rule().parts(), "{context}");
                    assert!((now..now + cost).all(|t| !o.peek(0, t).allowed), "{context}");
                    assert!(o.peek(0, now + cost).allowed, "{context}");
                }
                Hold(id) if a.allowed && cost > 0 => {
                    assert!(taken == cost || taken < cost && before.clone().renew(id, now).is_some(), "{context}");
                    let renewed = o.find(now + u64_of(rule.period) - 1);
                    assert!(rule.used(&renewed.state, renewed.at) > 0, "{context}");
                }
                Hold(_) => assert_eq!(taken, 0, "{context}"),
                Renew(_) => assert_eq!(level(&o, now), level(&before, now), "{context}"),
                Release(id) => assert_eq!(o.clone().renew(id, now), None, "{context}"),
                GiveBack(_) => {
                    let given = level(&o, now) - level(&before, now);
                    assert!((0..=i128::from(cost)).contains(&given), "{context}");
                }
            }
            // What was taken can be given back at once, and all of it is as new, but for a block.
            let (mut back, mut all) = (o.clone(), quiet(&o));
            match call {
                Hold(id) | PenaltyBy(id) => {
                    assert_eq!(back.give_back(id, taken, now).remaining, untouched.remaining, "{context}");
                }
                Refund | Block => {}
                // What was used comes to more or less by the clock of the call's numbers, which taking wrote.
                _ if rule.tick != found.rule().tick => {}
                _ if algorithm < 4 => {
                    assert_eq!(back.refund(taken, now).remaining, untouched.remaining, "{context}");
                }
                _ => {}
            }
            if algorithm < 4 {
                let mut new = Oracle::new(o.spec);
                if a.blocked { new.block(o.find(now).blocked_for(now), now); }
                let expected = Answer { allowed: true, retry: Now, ..new.peek(0, now) };
                assert_eq!(all.refund(u64::MAX, now), expected, "{context}");
            }
            // One microsecond before its reset the key still answers as used, from then on as new.
            let (mut used, mut new, reset) =
                (quiet(&o), Oracle::new(o.spec), now + a.reset_after_us);
            if a.reset_after_us > 0 {
                assert_ne!(used.peek(0, reset - 1), new.peek(0, reset - 1), "{now}: {o:?}");
            }
            let mut t = reset;
            for _ in 0..6 {
                let cost = random.below(5);
                assert_eq!(used.acquire(cost, t), new.acquire(cost, t), "{now}: {o:?}");
                t += random.below(8);
            }
        }
    }
}

/// Between any two takings no more than the capacity and what came back in between.
#[test]
fn never_over_admits() {
    let mut random = Random(2);
    for round in 0..3_000 {
        let spec = random.spec([0, 3][round % 2]);
        let (rule, mut o) = (Rule::of(spec), Oracle::new(spec));
        let (mut now, mut taken) = (1000, Vec::new());
        for _ in 0..40 {
            now += random.below(4);
            let cost = random.below(3);
            let call = if random.below(4) == 0 { AtMost } else { Acquire };
            let (_, units) = call.on(&mut o, cost, now);
            taken.push((i128::from(now), i128::from(units)));
        }
        for (i, (from, _)) in taken.iter().enumerate() {
            let mut sum = 0;
            for (to, cost) in &taken[i..] {
                sum += cost;
                match rule.kind {
                    Kind::Log => assert!(to - from >= rule.period || sum <= rule.capacity),
                    _ => assert!(
                        sum * rule.period
                            <= rule.capacity * rule.period + rule.rate * (to - from),
                        "{spec:?}: {taken:?}"
                    ),
                }
            }
        }
    }
}
