use std::borrow::Cow;

use super::*;
use crate::algorithm::Algorithm;
use crate::call::Mode;
use crate::error::Error;
use crate::operation::Operation;

const KEYS_IN_CALL: usize = 80;

fn ask<'a>(numbers: &'a Arc<[u8]>, key: &str, cost: u64) -> Ask<'a> {
    ask_of(numbers, &[key], &[cost])
}

/// An acquire of as many limits as there are keys.
fn ask_of<'a>(numbers: &'a Arc<[u8]>, keys: &[&str], costs: &[u64]) -> Ask<'a> {
    Ask {
        script: Algorithm::TokenBucket.script(),
        numbers: Cow::Borrowed(numbers),
        keys: keys.iter().map(|key| key.as_bytes().into()).collect(),
        holder: None,
        costs: Costs::each_of(costs.iter().copied()),
        terms: Terms::of(Mode::Call(Operation::Acquire)),
        now_us: None,
        most_keys: KEYS_IN_CALL,
        partition: 0,
        across_partitions: false,
    }
}

/// A batch of these asks, and the positions of those that are sent.
fn batch(asks: &[Ask<'_>], are_sent: impl Fn(usize) -> bool) -> (Batch, Vec<Position>) {
    let mut batch = Batch::default();
    let ids: Vec<_> = asks.iter().map(|ask| batch.add(ask, &ask.hashes())).collect();
    let sent = ids.into_iter().enumerate().map(|(at, id)| Some(id).filter(|_| are_sent(at)));
    let positions = batch.mark_sent(sent);
    (batch, positions.into_iter().flatten().collect())
}

fn arguments(call: ScriptCall<'_>) -> Vec<Vec<u8>> {
    let mut arguments = Vec::new();
    call.each_argument(|argument| arguments.push(argument.to_vec()));
    arguments
}

fn call(batch: &Batch, at: usize) -> ScriptCall<'_> {
    batch.calls().find(|(number, _)| *number == at).expect("it is asked for").1
}

fn sevens(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()[..7].to_vec()).collect()
}

/// A limit's record: what remains, the reset, the wait, and how many are allowed.
fn record(remaining: i64, reset: i64, retry: i64, allowed: i64) -> Vec<u8> {
    let number = |number: i64, width: usize| number.to_le_bytes()[..width].to_vec();
    [number(remaining, 7), number(reset, 7), number(retry, 7), number(allowed, 3)].concat()
}

/// Whether it is allowed, what remains, the wait and the reset, of the first limit.
fn first(reply: &crate::call::Reply) -> (bool, i64, i64, i64) {
    let limit = reply.limits[0];
    (limit.allowed, limit.remaining, limit.retry_after_us, limit.reset_after_us)
}

#[test]
fn asks_of_one_rule_go_in_one_call_and_asks_alike_in_one_group() {
    let (one, other): (Arc<[u8]>, Arc<[u8]>) = (Arc::from([1]), Arc::from([2]));
    let equal: Arc<[u8]> = Arc::from([1]);
    let asks = [
        ask(&one, "a", 1),
        ask(&one, "b", 1),
        ask(&other, "a", 1),
        ask(&equal, "a", 1),
        ask(&one, "a", 2),
        ask(&one, "a", 1),
        ask(&one, "a", 1),
    ];
    let (batch, positions) = batch(&asks, |_| true);
    let keys: Vec<Vec<_>> = batch.calls().map(|(_, call)| call.keys().collect()).collect();
    assert_eq!(keys, [vec![b"a", b"b", b"a", b"a"], vec![b"a"]]);
    let of = |position: &Position| (position.group.call, position.group.group, position.before);
    let positions: Vec<_> = positions.iter().map(of).collect();
    assert_eq!(positions, [(0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1), (0, 2, 0), (0, 3, 0), (0, 3, 1)]);
    let several: Vec<u8> = [(1, 2), (1, 1), (2, 1), (1, 2)]
        .into_iter()
        .flat_map(|(cost, calls)| [calls, 0, 0, cost, 0, 0, 0, 0, 0, 0])
        .collect();
    assert_eq!(arguments(call(&batch, 0)), [vec![1, 128, 0, 1, 0, 0, 0, 0, 0, 0], b"-1".to_vec(), several]);
    assert_eq!(arguments(call(&batch, 1)), [vec![2, 128, 0, 1, 0, 0, 0, 0, 0, 0]]);
}

#[test]
fn a_full_call_takes_no_more_keys_and_still_asks_of_its_own() {
    let numbers: Arc<[u8]> = Arc::from([1]);
    let asks: Vec<_> = (0..=KEYS_IN_CALL).map(|key| ask(&numbers, &key.to_string(), 1)).collect();
    assert_eq!(batch(&asks, |_| true).0.calls().count(), 2);
    let asks: Vec<_> = (0..KEYS_IN_CALL).chain(0..5).map(|key| ask(&numbers, &key.to_string(), 1)).collect();
    assert_eq!(batch(&asks, |_| true).0.calls().count(), 1);
}

#[test]
fn a_full_batch_has_room_for_identical_asks_only() {
    let numbers: Arc<[u8]> = Arc::from([1]);
    let asks: Vec<_> = (0..MOST_WEIGHT).map(|key| ask(&numbers, &key.to_string(), 1)).collect();
    let (batch, _) = batch(&asks, |_| true);
    let has_room = |key: &str, cost| {
        let ask = ask(&numbers, key, cost);
        batch.has_room(&ask, &ask.hashes())
    };
    assert_eq!([has_room("7", 1), has_room("7", 2), has_room("other", 1)], [true, false, false]);
}

#[test]
fn the_first_of_a_group_are_allowed_of_those_who_did_not_give_up() {
    let numbers: Arc<[u8]> = Arc::from([1, 5, 0, 0, 0, 0, 0, 0]);
    let asks = ["gone", "a", "a", "a"].map(|key| ask(&numbers, key, 1));
    let (batch, positions) = batch(&asks, |at| at > 1);
    let call = call(&batch, 0);
    assert_eq!((call.keys().collect::<Vec<_>>(), call.key_count()), (vec![&b"a"[..]], 1));
    let answer = record(0, 9, 7, 1);
    let records = call.read(&answer, None).unwrap();
    let decisions: Vec<_> = positions.iter().map(|at| first(&records.reply(*at).unwrap())).collect();
    assert_eq!(decisions, [(true, 0, 0, 9), (false, 0, 7, 9)]);
    assert!(call.read(&answer[1..], None).is_err() && call.read(&answer[..23], None).is_err());
    let all = call.read(&record(3, 8, 0, 2), None).unwrap();
    let decisions: Vec<_> = positions.iter().map(|at| first(&all.reply(*at).unwrap())).collect();
    assert_eq!(decisions, [(true, 3, 0, 8); 2]);
    assert!(call.read(&record(3, 8, 0, 3), None).is_err(), "more than were asked for");
    let lacking = call.read(&answer, Some(Error::unconfirmed("no replica has it"))).unwrap();
    let unconfirmed: Vec<_> = positions.iter().map(|at| lacking.reply(*at).is_err()).collect();
    assert_eq!(unconfirmed, [true, false], "a denial took nothing");
}

#[test]
fn what_nobody_asks_for_still_is_not_sent() {
    let numbers: Arc<[u8]> = Arc::from([1]);
    let (batch, _) = batch(&[ask(&numbers, "a", 1)], |_| false);
    assert_eq!(batch.calls().count(), 0);
}

/// As on a cluster, whose slots are the partitions.
#[test]
fn keys_of_several_partitions_share_a_call_in_which_no_key_stands_twice() {
    let numbers: Arc<[u8]> = Arc::from([1]);
    let of = |key, cost, partition, across_partitions| {
        let ask = ask(&numbers, key, cost);
        Ask { partition, across_partitions, ..ask }
    };
    let across = |key, cost, partition| of(key, cost, partition, true);
    let asks = [across("a", 1, 1), across("b", 1, 2), across("a", 1, 1), across("a", 2, 1), across("a", 1, 1)];
    let (together, positions) = batch(&asks, |_| true);
    let calls: Vec<_> = together.calls().map(|(_, call)| (call.is_across_slots(), call.keys().collect())).collect();
    assert_eq!(calls, [(true, vec![&b"a"[..], b"b"]), (false, vec![b"a", b"a"])]);
    let calls: Vec<_> = positions.iter().map(|position| position.group.call).collect();
    assert_eq!(calls, [0, 0, 0, 1, 1]);
    // Nor does one in a later call overtake itself in an earlier one.
    let full = (0..KEYS_IN_CALL).map(|key| key.to_string());
    let full: Vec<_> = full.collect();
    let before = [across("a", 1, 1), across("a", 2, 1), across("b", 1, 1)];
    let asks: Vec<_> = before.into_iter().chain(full.iter().map(|key| across(key, 1, 3))).collect();
    let asks: Vec<_> = asks.into_iter().chain([across("c", 1, 1), across("c", 2, 1)]).collect();
    let (_, positions) = batch(&asks, |_| true);
    let calls: Vec<_> = positions.iter().rev().take(2).map(|position| position.group.call).collect();
    assert_eq!(calls, [3, 2], "the call of two keys is the second");
    // What may not share a call with other partitions doesn't join a group of one that does.
    let (apart, positions) = batch(&[across("a", 1, 1), across("b", 1, 2), of("a", 1, 1, false)], |_| true);
    let calls: Vec<_> = positions.iter().map(|position| position.group.call).collect();
    assert_eq!((apart.calls().count(), calls), (2, vec![0, 0, 1]));
    // Alone, of one partition, or where the node refuses them, they are declared.
    let (alone, _) = batch(&[across("a", 1, 1), across("b", 1, 2)], |at| at == 0);
    let (of_one, _) = batch(&[across("a", 1, 1), across("b", 1, 1)], |_| true);
    let (refused, _) = batch(&[of("a", 1, 1, false), of("b", 1, 2, false)], |_| true);
    let declared = |batch: &Batch| batch.calls().all(|(_, call)| !call.is_across_slots());
    let counts = [&alone, &of_one, &refused].map(|batch| (batch.calls().count(), declared(batch)));
    assert_eq!(counts, [(1, true), (1, true), (2, true)]);
}

#[test]
fn a_key_that_a_call_could_not_use_is_asked_for_by_itself() {
    let numbers: Arc<[u8]> = Arc::from([1, 5, 0, 0, 0, 0, 0, 0]);
    let asks = [("a", 1), ("b", 2)].map(|(key, partition)| {
        let ask = ask(&numbers, key, 1);
        Ask { partition, across_partitions: true, ..ask }
    });
    let packed = [record(4, 8, 0, 1), record(0, 0, 0, -4)].concat();
    let (batch, positions) = batch(&asks, |_| true);
    let records = call(&batch, 0).read(&packed, None).unwrap();
    let answers: Vec<_> = positions.iter().map(|at| records.reply(*at)).collect();
    assert_eq!(first(answers[0].as_ref().unwrap()), (true, 4, 0, 8));
    let error = answers[1].as_ref().unwrap_err();
    assert_eq!((error.note(), error.charged()), (Some(&AskApart::Key), crate::error::Charged::No));
}

#[test]
fn calls_of_several_limits_share_a_call_and_a_key_that_several_have_is_listed() {
    let numbers: Arc<[u8]> = Arc::from([1, 2]);
    let asks = [["a", "s"], ["b", "t"], ["a", "s"]].map(|keys| ask_of(&numbers, &keys, &[1]));
    let (apart, positions) = batch(&asks, |_| true);
    assert_eq!(call(&apart, 0).keys().collect::<Vec<_>>(), [b"a", b"s", b"b", b"t"]);
    assert_eq!(positions.iter().map(|at| (at.group.group, at.before)).collect::<Vec<_>>(), [(0, 0), (1, 0), (0, 1)]);
    // The second call has a key of the first, and so the third doesn't overtake it.
    let asks = [["a", "s"], ["b", "s"], ["a", "s"]].map(|keys| ask_of(&numbers, &keys, &[1]));
    let (sharing, positions) = batch(&asks, |_| true);
    assert_eq!(positions.iter().map(|at| at.group.group).collect::<Vec<_>>(), [0, 1, 2]);
    let each = [[1, 0, 0].to_vec(), sevens(&[1, 1])].concat().repeat(3);
    assert_eq!(arguments(call(&sharing, 0))[1..], [b"-1".to_vec(), each]);
    // What only one of two limits allows is denied, by the other.
    let (_, _, denies) = (0, 0, [record(4, 8, 0, 0), record(0, 9, 7, 0)].concat());
    let (one, positions) = batch(&asks[..1], |_| true);
    let reply = call(&one, 0).read(&denies, None).unwrap().reply(positions[0]).unwrap();
    assert_eq!(reply.limits.iter().map(|limit| limit.allowed).collect::<Vec<_>>(), [true, false]);
    let nobody = [record(4, 8, 0, 0), record(0, 9, 0, 0)].concat();
    assert!(call(&one, 0).read(&nobody, None).unwrap().reply(positions[0]).is_err(), "denied by none");
}

#[test]
fn each_limit_may_have_a_cost_of_its_own() {
    let numbers: Arc<[u8]> = Arc::from([1, 2]);
    let asks = [ask_of(&numbers, &["a", "b"], &[1, 900]), ask_of(&numbers, &["a", "b"], &[1, 900])];
    let (own, positions) = batch(&asks, |_| true);
    assert_eq!(positions[1].before, 1, "alike, so in one group");
    let each = [[2, 0, 0].to_vec(), sevens(&[1, 900])].concat();
    assert_eq!(arguments(call(&own, 0))[1..], [b"-1".to_vec(), each]);
}

#[test]
fn calls_with_an_id_or_a_holder_are_groups_of_their_own() {
    let numbers: Arc<[u8]> = Arc::from([1]);
    let with_id = || {
        let ask = ask_of(&numbers, &["a", "id"], &[1]);
        Ask { terms: Terms { id_ttl_ms: Some(600_000), ..ask.terms }, ..ask }
    };
    let (ids, positions) = batch(&[with_id(), with_id()], |_| true);
    assert_eq!((ids.calls().count(), positions[1].group.group), (1, 1));
    let shape = [&[1, 128, 32 + 128][..], &sevens(&[1, 600_000])].concat();
    assert_eq!(arguments(call(&ids, 0))[0], shape);
    let held = |holder: &[u8]| Ask { holder: Some(holder.into()), ..ask(&numbers, "a", 1) };
    let (permits, _) = batch(&[held(b"one"), held(b"two")], |_| true);
    let call = call(&permits, 0);
    assert_eq!((call.key_count(), arguments(call)[3..].to_vec()), (2, vec![b"one".to_vec(), b"two".to_vec()]));
}

#[test]
fn an_answer_that_no_script_gives_is_refused() {
    let numbers: Arc<[u8]> = Arc::from([1, 2]);
    let asks = [ask_of(&numbers, &["a", "s"], &[1]), ask_of(&numbers, &["b", "t"], &[1])];
    let (alone, _) = batch(&asks[..1], |_| true);
    let (both, _) = batch(&asks, |_| true);
    let good = [record(4, 8, 0, 1), record(3, 8, 0, 1)].concat();
    let unreadable = [record(0, 0, 0, -2), record(0, 0, 0, -2)].concat();
    let blocked = [record(9, 9, 9, -1), record(3, 8, 0, 0)].concat();
    let read = |batch: &Batch, answer: &[u8]| call(batch, 0).read(answer, None).is_ok();
    assert!(read(&alone, &good) && read(&alone, &blocked) && read(&both, &[&good[..], &unreadable].concat()));
    assert!(!read(&alone, &unreadable), "alone, its script gives an error");
    for (remaining, reset, retry, allowed) in [
        (-1, 8, 0, 1),
        (1 << 54, 8, 0, 1),
        (4, -1, 0, 1),
        (4, 8, 1, 1),
        (4, 8, -1, 1),
        (4, 8, -2, 0),
        (4, 8, 0, 0),
        (4, 8, 0, 2),
        (4, 8, 0, -3),
        (4, 8, 0, -4),
        (4, 8, 0, -5),
        (4, 8, 0, -6),
        (4, 8, 0, -7),
    ] {
        let answer = [record(remaining, reset, retry, allowed), record(3, 8, 0, 1), good.clone()].concat();
        assert!(!read(&both, &answer), "{remaining} {reset} {retry} {allowed}");
    }
}
