//! Acquires that answer a receipt, where those with an id leave a marker: they are decided and cancelled alike.

use super::*;

const ACQUIRE: u8 = 128;
const CANCEL: u8 = 137;
/// A long record of a limit, and what a receipt has of it.
const WIDTHS: [usize; 2] = [35, 66];

/// What calls have in common: their limits.
struct Shape {
    script: &'static tollgate::Script,
    numbers: Vec<u8>,
    limits: usize,
}

/// A call: its key, its cost for each limit, its id, and the receipt if it took.
#[derive(Clone, Debug)]
struct Call {
    key: usize,
    cost: u64,
    id: usize,
    receipt: Vec<u8>,
}

impl Shape {
    fn of(forms: &[&Form], numbers: &Numbers, now_us: i64) -> Self {
        let packed = |form: &&Form| {
            let packed = form.pack(&form.own(numbers, now_us), 1);
            packed[..packed.len() - 9].to_vec()
        };
        let script = tollgate::Script::for_algorithms(forms.iter().map(|form| form.algorithm));
        Self { script, numbers: forms.iter().flat_map(packed).collect(), limits: forms.len() }
    }

    fn keys(&self, call: &Call, by_receipt: bool) -> Vec<String> {
        let way = if by_receipt { "receipts" } else { "ids" };
        (0..self.limits).map(|limit| format!("{way} {} {limit}", call.key)).collect()
    }

    /// The records, and the receipts that follow them.
    fn decide(
        &self,
        redis: &mut Connection,
        (operation, by_receipt): (u8, bool),
        calls: &[Call],
        now_us: Option<i64>,
    ) -> (Vec<u8>, Vec<u8>) {
        let marker = |call: &Call| (!by_receipt).then(|| format!("marker {}", call.id));
        let keys: Vec<_> =
            calls.iter().flat_map(|call| self.keys(call, by_receipt).into_iter().chain(marker(call))).collect();
        let id_ttl: u64 = if by_receipt { 0 } else { 3_600_000 };
        let terms = [&[operation, 32 + 128], &[0; 7][..], &id_ttl.to_le_bytes()[..7]].concat();
        let each =
            calls.iter().flat_map(|call| [&[1, 0, 0], &*call.cost.to_le_bytes()[..7].repeat(self.limits)].concat());
        let mut eval = cmd("EVAL");
        eval.arg(self.script.text()).arg(keys.len()).arg(keys).arg([&*self.numbers, &terms].concat());
        eval.arg(now_us.unwrap_or(-1)).arg(each.collect::<Vec<u8>>());
        if by_receipt && operation == CANCEL {
            calls.iter().for_each(|call| _ = eval.arg(&call.receipt));
        }
        let mut answer: Vec<u8> = eval.query(redis).unwrap_or_else(|error| panic!("{operation} {calls:?}: {error}"));
        let receipts = answer.split_off(calls.len() * self.limits * WIDTHS[0]);
        (answer, receipts)
    }
}

/// By a history of both in turn, each on keys of its own: calls in batches that share keys, and others without either.
#[test]
fn what_a_receipt_gives_back_is_what_the_cancel_by_an_id_does() {
    let (_server, mut redis) = server();
    let forms = Form::all();
    let mut cancelled = 0;
    for seed in 0..u64::from(cases(60)) {
        let mut random = fastrand::Rng::with_seed(seed);
        cmd("FLUSHALL").exec(&mut redis).expect("flushed");
        let is_live = seed % 3 == 0;
        let some: Vec<_> = (0..random.usize(1..=2)).map(|_| random.choice(&forms).expect("a form")).collect();
        let mut now = NOW;
        // In the server's time, nothing passes.
        let period = if is_live { 2_592_000_000_000 } else { 1_000_000 };
        let numbers = Numbers { capacity: random.i64(3..9), rate: random.i64(1..4), period, ..SAMPLE };
        let server_us = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_micros();
        let server_us = i64::try_from(server_us).expect("a time");
        let (mut taken, mut next_id) = (Vec::new(), 0);
        for step in 0..50 {
            let at = (!is_live).then_some(now);
            let shape = Shape::of(&some, &numbers, at.unwrap_or(server_us));
            let said =
                format!("seed {seed}, step {step}: {:?}", some.iter().map(|form| form.algorithm).collect::<Vec<_>>());
            let (operation, mut calls) = match random.u8(0..10) {
                0..5 => {
                    let mut call = |id| Call { key: random.usize(0..2), cost: random.u64(0..4), id, receipt: vec![] };
                    let calls: Vec<_> = (next_id..next_id + 1 + step % 3).map(&mut call).collect();
                    next_id += calls.len();
                    (ACQUIRE, calls)
                }
                5..8 if !taken.is_empty() => {
                    let count = random.usize(1..=taken.len().min(3));
                    cancelled += count;
                    (CANCEL, (0..count).map(|_| taken.swap_remove(random.usize(0..taken.len()))).collect())
                }
                8 => {
                    // One of others, which passes by both.
                    let call = Call { key: random.usize(0..2), cost: random.u64(1..3), id: 0, receipt: vec![] };
                    for by_receipt in [false, true] {
                        let keys = shape.keys(&call, by_receipt);
                        let arguments = [&*shape.numbers, &[ACQUIRE, 0], &call.cost.to_le_bytes()[..7]].concat();
                        let mut eval = cmd("EVAL");
                        eval.arg(shape.script.text()).arg(keys.len()).arg(keys).arg(arguments).arg(at.unwrap_or(-1));
                        eval.exec(&mut redis).expect("decided");
                    }
                    continue;
                }
                _ => {
                    now += [1, 50_000, 400_000, 3_000_000][random.usize(0..4)];
                    continue;
                }
            };
            let (by_id, none) = shape.decide(&mut redis, (operation, false), &calls, at);
            let (by_receipt, receipts) = shape.decide(&mut redis, (operation, true), &calls, at);
            assert!(none.is_empty(), "{said}");
            let width = 9 + WIDTHS[1] * shape.limits;
            assert_eq!(receipts.len(), if operation == ACQUIRE { calls.len() * width } else { 0 }, "{said}");
            for (one, other) in by_id.chunks(WIDTHS[0]).zip(by_receipt.chunks(WIDTHS[0])) {
                // In the server's time, one comes later than the other.
                let times = if is_live { 7..21 } else { 0..0 };
                let of = |record: &[u8]| [&record[..times.start], &record[times.end..]].concat();
                assert_eq!(of(one), of(other), "{said}, {operation}: {calls:?}");
            }
            for (at, call) in calls.drain(..).enumerate().filter(|_| operation == ACQUIRE) {
                let receipt = receipts[at * width..][..width].to_vec();
                let allowed = by_id[at * shape.limits * WIDTHS[0]..][21..24] == [1, 0, 0];
                assert_eq!(receipt != vec![0; width], allowed, "{said}: {call:?}");
                if allowed {
                    taken.push(Call { receipt, ..call });
                }
            }
        }
        for key in (0..2).filter(|_| !is_live) {
            let shape = Shape::of(&some, &numbers, now);
            let [one, other] = [false, true].map(|by_receipt| {
                let keys = shape.keys(&Call { key, cost: 0, id: 0, receipt: vec![] }, by_receipt);
                dumps(&mut redis, &keys.iter().map(String::as_str).collect::<Vec<_>>())
            });
            assert_eq!(one, other, "seed {seed}");
        }
    }
    assert!(cancelled > 100, "{cancelled}");
}

/// So it is on a replica that was promoted before it had the call.
#[test]
fn of_a_state_from_before_the_call_nothing_is_given_back() {
    let (_server, mut redis) = server();
    for form in Form::all() {
        cmd("FLUSHALL").exec(&mut redis).expect("flushed");
        let shape = Shape::of(&[&form], &SAMPLE, NOW);
        let mut call = Call { key: 0, cost: 2, id: 0, receipt: vec![] };
        let keys = shape.keys(&call, true);
        let (_, of_earlier) = shape.decide(&mut redis, (ACQUIRE, true), &[call.clone()], Some(NOW));
        let before: Vec<u8> = cmd("DUMP").arg(&keys).query(&mut redis).expect("a state");
        (_, call.receipt) = shape.decide(&mut redis, (ACQUIRE, true), &[call.clone()], Some(NOW));
        assert_ne!(call.receipt, vec![0; call.receipt.len()], "{}: allowed", form.algorithm);
        cmd("RESTORE").arg(&keys).arg(0).arg(&before).arg("REPLACE").exec(&mut redis).expect("restored");
        let restored = dumps(&mut redis, &[&keys[0]]);
        shape.decide(&mut redis, (CANCEL, true), &[call.clone()], Some(NOW));
        assert_eq!(dumps(&mut redis, &[&keys[0]]), restored, "{}", form.algorithm);
        // What is there was taken by the earlier one.
        shape.decide(&mut redis, (CANCEL, true), &[Call { receipt: of_earlier, ..call }], Some(NOW));
        assert_ne!(dumps(&mut redis, &[&keys[0]]), restored, "{}", form.algorithm);
    }
}

#[test]
fn a_receipt_that_is_none_gives_nothing_back_and_none_is_answered_where_permits_are_taken() {
    let (_server, mut redis) = server();
    for form in Form::all() {
        cmd("FLUSHALL").exec(&mut redis).expect("flushed");
        let shape = Shape::of(&[&form], &SAMPLE, NOW);
        let mut call = Call { key: 0, cost: 2, id: 0, receipt: vec![] };
        let (_, receipt) = shape.decide(&mut redis, (ACQUIRE, true), &[call.clone()], Some(NOW));
        let keys = shape.keys(&call, true);
        let before = dumps(&mut redis, &[&keys[0]]);
        let wrong: [(&[u8], &str); 4] =
            [(b"", "BADSTATE"), (&[0; 75], "BADSTATE"), (&receipt[1..], "BADSTATE"), (b"something else", "BADSTATE")];
        for (wrong, code) in wrong {
            call.receipt = wrong.to_vec();
            let terms = [&[CANCEL, 32 + 128], &[0; 14][..]].concat();
            let mut eval = cmd("EVAL");
            eval.arg(shape.script.text()).arg(1).arg(&keys).arg([&*shape.numbers, &terms].concat()).arg(NOW);
            let error = eval.arg(several(&[("a", 0, 1)])).arg(wrong).exec(&mut redis).expect_err("no receipt");
            assert_eq!(error.code(), Some(code), "{}: {error}", form.algorithm);
            assert_eq!(dumps(&mut redis, &[&keys[0]]), before, "{}", form.algorithm);
        }
        // Only acquires answer one.
        for operation in [129, 130, 131, 133, 134, 135, 136, 140] {
            let terms = [&[operation, 32 + 128], &[0; 14][..]].concat();
            let mut eval = cmd("EVAL");
            eval.arg(shape.script.text()).arg(1).arg(&keys).arg([&*shape.numbers, &terms].concat()).arg(NOW);
            let error = eval.exec(&mut redis).expect_err("no receipt");
            assert_eq!(error.code(), Some("BADARG"), "{} {operation}: {error}", form.algorithm);
        }
    }
    let permits = tollgate::Algorithm::all().find(|algorithm| algorithm.holds()).expect("permits");
    let ttl = &1_000_000_u64.to_le_bytes()[..7];
    let shape = [&[6, 5, 0], ttl, &[ACQUIRE, 32 + 128, 1], &[0; 13]].concat();
    let mut eval = cmd("EVAL");
    eval.arg(tollgate::Script::for_algorithms([permits]).text()).arg(1).arg("permits").arg(&shape).arg(-1);
    let error = eval.arg(several(&[("permits", 1, 1)])).arg("holder").exec(&mut redis).expect_err("permits");
    assert_eq!(error.code(), Some("BADARG"), "{error}");
}
