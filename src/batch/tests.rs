use super::*;
use crate::algorithm::Algorithm;

const KEYS_IN_CALL: usize = 80;

fn ask<'a>(numbers: &'a Arc<[u8]>, key: &str, cost: u64) -> Ask<'a> {
    let (script, key, most_keys) = (Algorithm::TokenBucket.script(), Key::from(key.as_bytes()), KEYS_IN_CALL);
    Ask {
        script,
        numbers: Cow::Borrowed(numbers),
        key,
        cost,
        now_us: None,
        most_keys,
        partition: 0,
        across_partitions: false,
    }
}

/// A batch of these asks, and the positions of those that are sent.
fn batch(asks: &[Ask<'_>], are_sent: impl Fn(usize) -> bool) -> (Batch, Vec<Position>) {
    let mut batch = Batch::default();
    let ids: Vec<_> = asks.iter().map(|ask| batch.add(&Entry::Packed(ask.clone()), ask.hash())).collect();
    let sent = ids.into_iter().enumerate().map(|(at, id)| Some(id).filter(|_| are_sent(at)));
    let positions = batch.mark_sent(sent);
    (batch, positions.into_iter().flatten().collect())
}

fn arguments(call: PackedCall<'_>) -> Vec<Vec<u8>> {
    let mut arguments = Vec::new();
    call.each_argument(|argument| arguments.push(argument.to_vec()));
    arguments
}

fn packed(batch: &Batch) -> impl Iterator<Item = (usize, PackedCall<'_>)> {
    batch.calls().map(|(at, call)| match call {
        BatchedCall::Packed(call) => (at, call),
        BatchedCall::InFull(call) => panic!("expected a packed call, got {call:?}"),
    })
}

fn call(batch: &Batch, at: usize) -> PackedCall<'_> {
    packed(batch).find(|(number, _)| *number == at).expect("it is asked for").1
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
    let keys: Vec<Vec<_>> = packed(&batch).map(|(_, call)| call.keys().collect()).collect();
    assert_eq!(keys, [vec![b"a", b"b", b"a", b"a"], vec![b"a"]]);
    let of = |position: &Position| (position.group.call, position.group.group, position.before);
    let positions: Vec<_> = positions.iter().map(of).collect();
    assert_eq!(positions, [(0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1), (0, 2, 0), (0, 3, 0), (0, 3, 1)]);
    let several: Vec<u8> = [(1, 2), (1, 1), (2, 1), (1, 2)]
        .into_iter()
        .flat_map(|(cost, calls)| [cost, 0, 0, 0, 0, 0, 0, calls, 0, 0])
        .collect();
    assert_eq!(arguments(call(&batch, 0)), [vec![1, 1, 0, 0, 0, 0, 0, 0], b"-1".to_vec(), several]);
    assert_eq!(arguments(call(&batch, 1)), [vec![2, 1, 0, 0, 0, 0, 0, 0]]);
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
    let asks: Vec<_> = (0..MOST_GROUPS).map(|key| ask(&numbers, &key.to_string(), 1)).collect();
    let (batch, _) = batch(&asks, |_| true);
    let has_room = |key: &str, cost| {
        let ask = ask(&numbers, key, cost);
        batch.has_room(&Entry::Packed(ask.clone()), ask.hash())
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
    // -1 - remaining, the reset, the wait, and how many are allowed; or remaining, and the reset.
    let packed =
        |numbers: &[i64]| -> Vec<u8> { numbers.iter().flat_map(|number| number.to_le_bytes()[..7].to_vec()).collect() };
    let answer = packed(&[-1, 9, 7, 1]);
    let records = call.read(&answer, None).unwrap();
    let decisions: Vec<_> = positions.iter().map(|at| records.reply(*at).unwrap().decision).collect();
    assert_eq!(decisions, [[1, 5, 0, 0, 9], [0, 5, 0, 7, 9]]);
    assert!(call.read(&answer[1..], None).is_err() && call.read(&answer[..21], None).is_err());
    let all = call.read(&packed(&[3, 8]), None).unwrap();
    let decisions: Vec<_> = positions.iter().map(|at| all.reply(*at).unwrap().decision).collect();
    assert_eq!(decisions, [[1, 5, 3, 0, 8]; 2]);
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
    let calls: Vec<_> = packed(&together).map(|(_, call)| (call.is_across_slots(), call.keys().collect())).collect();
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
    let declared = |batch: &Batch| packed(batch).all(|(_, call)| !call.is_across_slots());
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
    let packed: Vec<u8> =
        [4, 8, -1, 0, 0, -4_i64].iter().flat_map(|number| number.to_le_bytes()[..7].to_vec()).collect();
    let (batch, positions) = batch(&asks, |_| true);
    let records = call(&batch, 0).read(&packed, None).unwrap();
    let answers: Vec<_> = positions.iter().map(|at| records.reply(*at)).collect();
    assert_eq!(answers[0].as_ref().unwrap().decision, [1, 5, 4, 0, 8]);
    let error = answers[1].as_ref().unwrap_err();
    assert_eq!((error.note(), error.charged()), (Some(&AskApart::Key), crate::error::Charged::No));
}
